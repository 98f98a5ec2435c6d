"""Builds the environment variables that tell a rank its numbers in the run, as torchrun sets
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup


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
