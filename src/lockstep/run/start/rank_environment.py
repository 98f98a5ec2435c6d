"""Builds the environment variables that ranks get from their launcher.

Some tell a rank its numbers in the run, as torchrun sets them. The others are the same for all
ranks of a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from lockstep.language import translate
from lockstep.machine.interface import NCCL_INTERFACE, choose_nccl_interfaces, gloo_variables
from lockstep.machine.network import running_interfaces
from lockstep.machine.topology import (
    CHOSEN_THREADS_VARIABLE,
    LAUNCHER_VARIABLE,
    THREADS_VARIABLE,
)
from lockstep.run.start.plan import LaunchPlan
from lockstep.run.watch.probe import FLIGHT_RECORDER_VARIABLES


def variables_of_all_ranks(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    interface: str | None,
    announce: Callable[[str], object],
) -> dict[str, str]:
    """Returns the environment variables that every rank of this machine gets.

    Args:
        plan: what is started on this machine.
        environ: the launcher's own variables. Those that the user has set stay as they are.
        interface: name of the network interface that reaches the other machines, or of loopback;
            None if not known.
        announce: function that shows a line to the user.
    """
    variables: dict[str, str] = {}
    for name, value in FLIGHT_RECORDER_VARIABLES.items():
        if name not in environ:
            variables[name] = value

    variables.update(gloo_variables(environ, interface))
    if plan.gpus > 0:  # the ranks may use NCCL
        variables.update(_nccl_variables(plan, environ, interface, announce))
    variables.update(plan.environment)
    if plan.chooses_threads:  # tells the rank that the user has not set the number of threads
        variables[CHOSEN_THREADS_VARIABLE] = plan.environment[THREADS_VARIABLE]

    # LAUNCHER_VARIABLE tells a process that it is a rank. A script that spawns its own ranks
    # must not mistake its first process for one.
    if not plan.script_spawns_ranks:
        variables[LAUNCHER_VARIABLE] = plan.launcher

    return variables


def _nccl_variables(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    interface: str | None,
    announce: Callable[[str], object],
) -> dict[str, str]:
    """Returns the variable with NCCL's network interfaces, and announces it.

    Returns:
        Empty if NCCL is to choose the interfaces itself.
    """
    chosen = choose_nccl_interfaces(environ, running_interfaces(), interface)
    if chosen is None:
        return {}

    interfaces, reason = chosen
    if not plan.quiet:
        announce(f"{NCCL_INTERFACE}={interfaces}: {translate(reason)}")
    return {NCCL_INTERFACE: interfaces}


def rank_environment(
    group: WorkerGroup, worker: Worker, restarts: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables from which a rank reads its rank, the world size and so on.

    They follow `LocalElasticAgent._start_workers` and `_set_local_rank_env` of torch.

    Args:
        group: the workers of this machine, as numbered by torch elastic's rendezvous.
        worker: the rank.
        restarts: how many times the ranks of the run have been restarted.
        environ: the launcher's own variables.
    """
    spec = group.spec
    variables = {
        "RANK": worker.global_rank,
        "LOCAL_RANK": worker.local_rank,
        "GROUP_RANK": group.group_rank,
        "ROLE_RANK": worker.role_rank,
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "WORLD_SIZE": worker.world_size,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }
    if getattr(spec, "virtual_local_rank", False):  # torch 2.9 does not have it
        # Each rank sees only its own GPU, as device 0.
        local_rank = worker.local_rank
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        variables["LOCAL_RANK"] = 0
        if visible is None:
            variables["CUDA_VISIBLE_DEVICES"] = local_rank
        else:
            variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local_rank].strip()

    return {name: str(value) for name, value in variables.items()}
