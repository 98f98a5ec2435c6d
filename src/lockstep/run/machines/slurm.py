"""Finds out where in a Slurm job `lockstep run` was started.

A *task* is one process that srun starts, and a *step* is everything that one call of srun starts.
The launcher, which starts the ranks of its machine, may itself be started

    by srun, as the one task on each machine     then the launchers of the tasks meet
    by the job's script, or in salloc's shell    then srun must start a launcher on each machine

`slurm_batch` submits a job whose script does the latter.

Source: "INPUT/OUTPUT ENVIRONMENT VARIABLES" in the manual pages of srun and sbatch.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from lockstep.errors import SettingError
from lockstep.machine.topology import Topology, detect, expand_tasks
from lockstep.run.machines.run_token import TOKEN_VARIABLE

INTERACTIVE_STEP_ID = "4294967290"
"""The step in which salloc's shell may run (SLURM_INTERACTIVE_STEP in slurm.h)."""
SRUN_OPTIONS = (
    "--ntasks-per-node=1",  # one launcher on each machine
    "--cpu-bind=none",  # with all cores that the job has there
    "--export=ALL",
    "--kill-on-bad-exit=0",  # launchers end each other
)
PER_TASK_VARIABLES = {
    "SLURM_GPUS_PER_TASK",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_TRES_PER_TASK",
    "SRUN_CPUS_PER_TASK",
}
"""Variables with the resources that the job requests for each rank. srun would read them, and give
a launcher no more than that."""


@dataclass(frozen=True, kw_only=True)
class JobPlacement:
    """How a run is started in a Slurm job."""

    nproc: str | None
    """Processes on each machine; None if the launcher there finds out."""
    meeting_flags: tuple[str, ...] = ()
    """Torchrun's flags by which the launchers of the job meet."""
    srun_nodes: int = 0
    """The number of machines on which srun must start launchers; 0 if this process is a launcher.
    """
    gpus_per_node: int = 0
    """The GPUs to request from srun; 0 for those that the job has on each machine."""


def find_placement(environ: Mapping[str, str], nproc: str | None = None) -> JobPlacement | None:
    """Finds out how this process was started in a Slurm job.

    Args:
        environ: environment variables.
        nproc: processes on each machine, if the user has given their number.

    Returns:
        The placement, or None if this process is not in a job, or was started by another launcher.

    Raises:
        SettingError: several launchers share a machine, or the tasks are spread unevenly.
    """
    if not environ.get("SLURM_JOB_ID"):
        return None

    # By default, a launcher in a job starts one rank for each GPU of its machine, or one rank.
    default_nproc = environ.get("SLURM_GPUS_ON_NODE") or "1"

    # A launcher or srun has started this process as one of several.
    topology = detect(environ)
    if topology is not None:
        if topology.source != "Slurm":  # another launcher, such as torchrun
            return None
        meeting_flags = _meeting_flags(topology)
        return JobPlacement(nproc=nproc or default_nproc, meeting_flags=meeting_flags)

    # srun has started this process as the only one of its step.
    is_in_step = bool(environ.get("SLURM_STEP_NUM_TASKS"))
    is_in_shell_of_salloc = environ.get("SLURM_STEP_ID") == INTERACTIVE_STEP_ID
    if is_in_step and not is_in_shell_of_salloc:
        return JobPlacement(nproc=nproc or default_nproc)

    # The job's script, or a shell of salloc, has started this process.
    return _placement_of_job(environ, nproc, default_nproc)


def _meeting_flags(topology: Topology) -> tuple[str, ...]:
    """Returns torchrun's flags by which the launchers that srun has started meet.

    Raises:
        SettingError: several launchers share a machine.
    """
    if topology.local_size > 1:
        raise SettingError(
            "lockstep run, started by srun",
            f"{topology.local_size} tasks of this machine start it, and each would start ranks",
            "srun --ntasks-per-node=1 lockstep run ..., or srun python ... with one task for each "
            "rank",
        )
    return (
        f"--nnodes={topology.size}",
        f"--node-rank={topology.node_rank}",
        f"--master-addr={topology.master_addr}",
        f"--master-port={topology.master_port}",
    )


def _placement_of_job(
    environ: Mapping[str, str], nproc: str | None, default_nproc: str
) -> JobPlacement:
    """Returns the placement if the job's script, or a shell of salloc, has started this process.

    Args:
        environ: environment variables.
        nproc: processes on each machine, if the user has given their number.
        default_nproc: processes on this machine, if neither the user nor the job says how many.

    Raises:
        SettingError: the job is heterogeneous, or its tasks are spread unevenly.
    """
    num_components = _number_from_slurm(environ, "SLURM_HET_SIZE") or 1
    if num_components > 1:
        raise SettingError(
            "lockstep run in a Slurm job",
            "the job is heterogeneous, and srun starts a step on its first component alone",
            "ask for one component; or start the launchers yourself: srun --het-group ... "
            "lockstep run --nnodes ... --rdzv-backend c10d --rdzv-endpoint ...",
        )

    if not nproc:
        nproc = _tasks_per_node(environ)

    # SLURM_NNODES is the older name of the same variable.
    num_nodes = (
        _number_from_slurm(environ, "SLURM_JOB_NUM_NODES")
        or _number_from_slurm(environ, "SLURM_NNODES")
        or 1
    )
    is_on_job_machine = bool(environ.get("SLURMD_NODENAME"))
    if num_nodes == 1 and is_on_job_machine:  # nothing to start by srun
        return JobPlacement(nproc=nproc or default_nproc)

    # A launcher is the only task on its machine, but needs the GPUs of all tasks there: 4, if 8
    # tasks with a GPU each share 2 machines.
    gpus_per_task = _number_from_slurm(environ, "SLURM_GPUS_PER_TASK") or 0
    num_tasks = _number_from_slurm(environ, "SLURM_NTASKS") or num_nodes  # or one on each
    gpus_per_node = gpus_per_task * num_tasks // num_nodes
    return JobPlacement(nproc=nproc, srun_nodes=num_nodes, gpus_per_node=gpus_per_node)


def _number_from_slurm(environ: Mapping[str, str], name: str) -> int | None:
    """Returns the value of a variable of Slurm as a number: `4` -> 4, `a100:2` -> 2.

    Returns:
        The number; None if the variable is not set, or empty.

    Raises:
        SettingError: the value is not a whole number of at least 0.
    """
    text = environ.get(name)
    if not text:
        return None

    number = text.rpartition(":")[2].strip()  # GPUs may be requested with their type
    if not number.isdecimal():
        raise SettingError(f"{name}={text}", "it is not a whole number of at least 0", "correct it")
    return int(number)


def _tasks_per_node(environ: Mapping[str, str]) -> str | None:
    """Returns the number of tasks on each machine that the job requests.

    Returns:
        The number as a text, which becomes the value of --nproc. None if the job requests one task
        on each machine, or does not say; then --nproc keeps its default, 1.

    Raises:
        SettingError: the machines have different numbers of tasks.
    """
    # Slurm always sets SLURM_TASKS_PER_NODE. If the job requests no tasks, by --ntasks or
    # --ntasks-per-node, the variable is the number of cores.
    requests_tasks = environ.get("SLURM_NTASKS") or environ.get("SLURM_NTASKS_PER_NODE")
    if not requests_tasks:
        return None

    text = environ.get("SLURM_TASKS_PER_NODE", "1")
    counts = set(expand_tasks(text))
    if len(counts) > 1:
        raise SettingError(
            "lockstep run in a Slurm job, without --nproc",
            f"the job has {text} tasks on its machines",
            "give --nproc, or ask for as many on each: --ntasks-per-node",
        )

    (count,) = counts
    return str(count) if count > 1 else None


def srun_command(placement: JobPlacement, arguments: Sequence[str]) -> list[str]:
    """Returns the command that starts a launcher on each machine of the job.

    Args:
        placement: the number of machines (if it is 0, srun reads it from the job), and the ranks
            and GPUs on each.
        arguments: the arguments of `lockstep run`, except --nproc.
    """
    command = ["srun"]
    if placement.srun_nodes:
        command += [f"--nodes={placement.srun_nodes}", f"--ntasks={placement.srun_nodes}"]
    if placement.gpus_per_node:
        command.append(f"--gpus-per-node={placement.gpus_per_node}")

    command += [*SRUN_OPTIONS, sys.executable, "-m", "lockstep", "run"]
    if placement.nproc:
        command.append(f"--nproc={placement.nproc}")
    return command + list(arguments)


def exec_srun(command: list[str]) -> NoReturn:
    """Replaces this process by srun. All launchers that it starts get the same token.

    Raises:
        SettingError: srun is not installed.
    """
    # srun starts one launcher on each machine, which needs the resources of all ranks there. With
    # these variables, srun would give the launcher only the resources of a single rank.
    environment = {}
    for name, value in os.environ.items():
        if name not in PER_TASK_VARIABLES:
            environment[name] = value

    if not environment.get(TOKEN_VARIABLE):
        environment[TOKEN_VARIABLE] = secrets.token_hex(32)

    try:
        os.execvpe(command[0], command, environment)
    except FileNotFoundError:
        raise missing_program(command[0]) from None


def missing_program(name: str) -> SettingError:
    """Returns the error for a command of Slurm that is not installed on this machine."""
    return SettingError(
        "a run under Slurm",
        f"there is no {name} on this machine",
        "run it where Slurm's commands are installed, such as the login node",
    )
