"""Finds this process's place in the run from the environment variables of its launcher.

A `Topology` says which *rank* this process is, of how many (*world size*), and which *local rank*
among the processes of its machine (*node*). It is read once, by pure functions, from:

| started by                | known by                                                        |
|---------------------------|-----------------------------------------------------------------|
| `lockstep run`, torchrun  | RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK          |
|                           | (LOCKSTEP_LAUNCHER says that it was not torchrun)               |
| older launchers, by hand  | RANK WORLD_SIZE, `--local_rank` among the arguments             |
| `mpirun`, `srun`, ...     | the variables of a scheduler, one after the other: `SCHEDULERS` |

The first that is present wins: RANK before a scheduler's variables, since a launcher that itself
runs under a scheduler sets RANK for its workers. MASTER_ADDR and MASTER_PORT, where they are set,
are used under all of them.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lockstep.errors import SettingError
from lockstep.machine.network import LOOPBACK, means_loopback

LAUNCHER_VARIABLE = "LOCKSTEP_LAUNCHER"
"""The environment variable with the name of a rank's launcher, which `lockstep.init` prints. Other
launchers than those of Lockstep do not set it."""
THREADS_VARIABLE = "OMP_NUM_THREADS"
CHOSEN_THREADS_VARIABLE = "LOCKSTEP_CHOSEN_THREADS"
"""The environment variable in which a launcher repeats the OMP_NUM_THREADS of a rank if it has
chosen the number itself. Without it, or with another number, the user has set OMP_NUM_THREADS."""

Environ = Mapping[str, str]
DEFAULT_PORT = 29500
LOCAL_RANK_FLAGS = ("--local_rank", "--local-rank")
OWN_AREAS_PER_RANK = 2
"""Files in memory in which a rank keeps steps: while one is being written, the other one holds the
step before."""
MAX_SENDERS_PER_RANK = 2
"""A rank has as many areas again for each of at most so many ranks of another machine, which may be
lost."""
AREAS_PER_RANK = OWN_AREAS_PER_RANK * (1 + MAX_SENDERS_PER_RANK)
SEALED_FLAG_AT = 8
"""The offset, in such a file, of the 8 bytes that are 1 if it holds a complete step."""
SEAL_BYTES = 84
"""How many bytes at the beginning of the file identify the step."""

# Of the ports that jobs get: below those that the kernel hands out.
FIRST_JOB_PORT = 12288
NUM_JOB_PORTS = 16384

RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"

# What `Topology.source` says where no launcher has numbered the processes.
SET_BY_SCRIPT = "the script"
SET_BY_VARIABLES = "RANK and WORLD_SIZE"

# Slurm's short form of one or more hosts with the same prefix: "n[01-03,7]-ib[0-1]" or "login".
SLURM_HOST = r"(?:[\w.:-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
# Slurm's short form of the tasks on equal nodes: "2(x3)" is 2 on each of three, "1" on one.
SLURM_TASKS = re.compile(r"(?P<tasks>\d+)(?:\(x(?P<nodes>\d+)\))?")
# A range of numbers in a host name; only the first number is captured: "[01-03,7]" gives "01".
SLURM_NUMBERS = re.compile(r"\[(\d+)[^]]*\]")


@dataclass(frozen=True)
class DataParallelRank:
    """Which part of every global batch a process computes: part `rank` of `size`.

    If several processes compute one part together (the stages of a pipeline), the first `size`
    ranks of the run hold the results: only they contribute to sums and means over ranks.
    """

    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One process's place in the run.

    All processes of a node have the same `node_rank`. If all nodes have equally many processes,
    `rank = node_rank * local_size + local_rank`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    """Host name or address of the node where rank 0 is."""
    master_port: int | None = None
    agent_store: bool = False
    """True if the launcher serves a store at the master's address; rank 0 must not open another."""
    source: str = "one process"
    """What the place was read from, for messages: `torchrun`, `Slurm`, ..."""
    memory: tuple[str, ...] = ()
    """Files in memory that the launcher keeps open: AREAS_PER_RANK for each rank that it has
    started on this machine, in the order of their local ranks."""
    restarts: int = 0
    """How many times the launcher has started the ranks of the run before."""
    keeps_every_step: bool = False
    """True if the user has asked the launcher that each step is kept in memory."""
    unknown: frozenset[str] = frozenset()
    """Which of `local_rank`, `local_size` and `node_rank` the environment does not say. Until the
    ranks have met (`with_hosts`) they have the values of a rank that is alone on its machine, or
    whose machine has no more ranks than its own local rank shows."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise SettingError(
                f"rank {self.rank} of world size {self.size} (from {self.source})",
                "ranks count from 0 to world size - 1",
                "start each process with a rank of its own below the world size",
            )
        if not 0 <= self.local_rank < self.local_size:
            raise SettingError(
                f"local rank {self.local_rank} of {self.local_size} (from {self.source})",
                "local ranks count from 0 to the number of processes on the node - 1",
                "set LOCAL_RANK and LOCAL_WORLD_SIZE to match, or let `lockstep run` set them",
            )

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def is_set_by_hand(self) -> bool:
        """True if the script or the user has numbered the processes, and no launcher."""
        return self.source in (SET_BY_SCRIPT, SET_BY_VARIABLES)

    @property
    def launcher_has_macro(self) -> bool:
        """True if the launcher starts one command for all processes of a machine.

        torchrun and `lockstep run` do, and replace `${local_rank}` in its arguments. MPI and Slurm
        can start other commands for some processes.
        """
        by_scheduler = any(self.source == scheduler.name for scheduler in SCHEDULERS)
        return not self.is_set_by_hand and not by_scheduler

    @property
    def one_node(self) -> bool:
        """True if all processes are known to run on this machine."""
        return self.local_size == self.size and "local_size" not in self.unknown

    def with_hosts(self, hosts: Sequence[str]) -> Topology:
        """Returns a copy in which the unknown values are filled in.

        Args:
            hosts: the host of each rank, which the ranks know once they have met.
        """
        # With hosts ["a", "a", "b", "b"], rank 3 has local rank 1 of 2, and node rank 1.
        this_host = hosts[self.rank]
        ranks_here = [rank for rank, host in enumerate(hosts) if host == this_host]

        local_rank = self.local_rank
        if "local_rank" in self.unknown:
            local_rank = ranks_here.index(self.rank)

        # The local rank may be larger than the number of ranks with this host name: each container
        # of a machine may have its own name, while LOCAL_RANK counts the processes of the machine.
        local_size = self.local_size
        if "local_size" in self.unknown:
            local_size = max(len(ranks_here), local_rank + 1)

        node_rank = self.node_rank
        if "node_rank" in self.unknown:
            different_hosts = list(dict.fromkeys(hosts))  # in the order of their first ranks
            node_rank = different_hosts.index(this_host)

        return replace(
            self,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=node_rank,
            unknown=frozenset(),
        )


@dataclass(frozen=True)
class Task:
    """The rank and the number of tasks that a scheduler or MPI has set for this process."""

    rank: int
    size: int


def threads_set_by_user(environ: Environ) -> int | None:
    """Returns the number of threads that the user has set in OMP_NUM_THREADS, or None.

    A number that a launcher of Lockstep has chosen is not the user's: it follows from the number of
    processes and the cores of their machine.

    Args:
        environ: the environment variables.
    """
    text = environ.get(THREADS_VARIABLE, "")
    if text == environ.get(CHOSEN_THREADS_VARIABLE):
        return None

    # OpenMP also accepts a list, such as "4,2" for nested parallel regions.
    first = text.partition(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        return int(first)
    return None


def detect(environ: Environ, argv: Sequence[str] = ()) -> Topology | None:
    """Returns this process's place in the run; None if it was started plainly, as one process.

    Args:
        environ: the environment variables.
        argv: the script's arguments, where old launchers put `--local_rank`.

    Raises:
        SettingError: variables that are half set, do not parse, or contradict each other.
    """
    topology = _read_torchrun(environ, argv)
    if topology is not None:
        return topology

    for scheduler in SCHEDULERS:
        task = scheduler.task(environ)
        if task is None:
            continue
        topology = scheduler.read(environ, task)
        if topology is not None:
            return topology

    # Nothing says that there are several processes. But WORLD_SIZE or LOCAL_RANK without RANK is
    # half a setting.
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        if environ.get(name):
            raise _half_set_error(name, environ[name], "RANK")
    return None


# torchrun, `lockstep run`, and launchers that set the same variables


def _read_torchrun(environ: Environ, argv: Sequence[str]) -> Topology | None:
    """Reads RANK and WORLD_SIZE, which may come from torchrun or be set by hand.

    Args:
        environ: the environment variables.
        argv: the script's arguments, where old launchers put `--local_rank`.

    Returns:
        This process's place; None if RANK is not set.
    """
    if not environ.get("RANK"):
        return None
    if not environ.get("WORLD_SIZE"):
        raise _half_set_error("RANK", environ["RANK"], "WORLD_SIZE")

    rank = _number(environ, "RANK")
    size = _number(environ, "WORLD_SIZE")
    master_addr = environ.get("MASTER_ADDR") or None
    local_rank, local_size, node_rank, unknown = _place_on_machine(
        environ, argv, rank, size, master_addr
    )

    topology = Topology(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
        unknown=unknown,
        master_addr=master_addr,
        master_port=port(environ),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        source=_launcher(environ) or SET_BY_VARIABLES,
        memory=tuple(environ.get("LOCKSTEP_STEP_MEMORY", "").split()),
        restarts=_number(environ, RESTART_COUNT) if environ.get(RESTART_COUNT) else 0,
        keeps_every_step=environ.get("LOCKSTEP_KEEP_EVERY_STEP") == "1",
    )

    if local_size > size or rank < local_rank:
        raise SettingError(
            f"RANK={rank} and LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size} and "
            f"WORLD_SIZE={size}",
            "ranks are counted on from machine to machine, so LOCAL_RANK is at most RANK, and "
            "LOCAL_WORLD_SIZE at most WORLD_SIZE",
            "let the launcher set all of them",
        )
    if not _was_started_by_torch_elastic(environ):
        _check_agrees_with_scheduler(topology, environ)
    return topology


def _launcher(environ: Environ) -> str | None:
    """Returns the launcher that has set the variables of a rank: `torchrun`, for example.

    None if there is none, or if it is one that does not give its name.
    """
    name = environ.get(LAUNCHER_VARIABLE)
    if name:
        return name
    return "torchrun" if _was_started_by_torch_elastic(environ) else None


def _was_started_by_torch_elastic(environ: Environ) -> bool:
    """Returns True in a rank of torchrun or of another launcher that is built on torch elastic."""
    return "TORCHELASTIC_RUN_ID" in environ


def launcher_above_script(environ: Environ) -> str | None:
    """Returns the launcher of the rank whose script has started this process by multiprocessing.

    Such a process, of `torch.multiprocessing.spawn` for example, inherits the variables of the
    rank. None in the rank itself, and without a launcher.
    """
    import multiprocessing  # here, as the launcher does without it

    parent = multiprocessing.parent_process()
    # A copy of a launching program (`lockstep.launch`) is a process of multiprocessing too, but it
    # is the rank itself, and its own parent there.
    if parent is None or parent.pid == os.getpid():
        return None

    return _launcher(environ)


class _PlaceOnMachine(NamedTuple):
    """A rank's place among those of its machine, as in `Topology`."""

    local_rank: int
    local_size: int
    node_rank: int
    unknown: frozenset[str]


def _place_on_machine(
    environ: Environ, argv: Sequence[str], rank: int, size: int, master_addr: str | None
) -> _PlaceOnMachine:
    """Reads a rank's place on its machine; what no variable says follows from the others.

    Args:
        environ: the environment variables.
        argv: the script's arguments, where old launchers put `--local_rank`.
        rank: RANK.
        size: WORLD_SIZE.
        master_addr: MASTER_ADDR, if it is set.
    """
    local_rank = _local_rank(environ, argv)
    node_rank = _optional_number(environ, "GROUP_RANK")
    local_size = _optional_number(environ, "LOCAL_WORLD_SIZE")
    if not local_size:
        local_size = _optional_number(environ, "LOCAL_SIZE")  # as other launchers call it
    if not local_size and (size == 1 or means_loopback(master_addr)):
        local_size = size  # only processes of one machine can meet at a loopback address

    if local_size:
        if local_rank is None:
            local_rank = rank % local_size
        if node_rank is None:
            # rank - local_rank is the first rank of this machine; those before fill whole machines.
            node_rank = (rank - local_rank) // local_size
        return _PlaceOnMachine(local_rank, local_size, node_rank, unknown=frozenset())

    # Nothing says which ranks share this machine. They find out once they are connected. Until
    # then, the smallest possible size stands in.
    unknown = {"local_size"}
    if local_rank is None:
        unknown.add("local_rank")
        local_rank = 0
    if node_rank is None:
        unknown.add("node_rank")
        node_rank = rank
    least_local_size = local_rank + 1
    return _PlaceOnMachine(local_rank, least_local_size, node_rank, frozenset(unknown))


def _check_agrees_with_scheduler(topology: Topology, environ: Environ) -> None:
    """Raises SettingError if RANK and WORLD_SIZE do not fit what a scheduler has set.

    Each task of the scheduler may be one rank, or start equally many ranks with consecutive
    numbers. Anything else is a mistake, such as RANK in a batch script.
    """
    for scheduler in SCHEDULERS:
        if not scheduler.ranks_must_fit:
            continue

        # With a single task, which may start any ranks, nothing can be wrong.
        task = scheduler.task(environ)
        if task is None or task.size == 1:
            continue

        # With 8 ranks in 4 tasks, task 1 has the ranks 2 and 3. 7 ranks do not fit 4 tasks.
        fits = False
        ranks_are_shared_out_equally = topology.size % task.size == 0
        if ranks_are_shared_out_equally:
            ranks_per_task = topology.size // task.size
            fits = topology.rank // ranks_per_task == task.rank

        if not fits:
            raise SettingError(
                f"RANK={topology.rank} and WORLD_SIZE={topology.size}",
                f"{scheduler.name} says task {task.rank} of {task.size}",
                "unset RANK and WORLD_SIZE, so that the scheduler's numbers are used; or set them "
                "in each task, not in the batch script",
            )


def _local_rank(environ: Environ, argv: Sequence[str]) -> int | None:
    """Returns LOCAL_RANK, or the value of `--local_rank` among the script's arguments."""
    from_variable = _optional_number(environ, "LOCAL_RANK")
    for position, argument in enumerate(argv):
        flag, equals_sign, value = argument.partition("=")
        if flag not in LOCAL_RANK_FLAGS:
            continue

        if not equals_sign:  # `--local_rank 1`: the value is the next argument
            is_last = position + 1 == len(argv)
            value = "" if is_last else argv[position + 1]

        from_argument = _parse_number(flag, value)
        if from_variable is not None and from_variable != from_argument:
            raise SettingError(
                f"LOCAL_RANK={from_variable} and {flag}={from_argument}",
                "they contradict each other",
                f"leave {flag} to the launcher",
            )
        return from_argument
    return from_variable


# MPI and Slurm


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """Something that starts processes and numbers them by environment variables of its own.

    A process that it starts is a task. Without a launcher in between, each task is a rank.
    """

    name: str
    """The name of the scheduler in messages. It is also the `Topology.source` of its tasks."""
    command: str
    """The command that starts the tasks."""
    rank: str
    """The variable with the number of the task."""
    size: str
    """The variable with the number of all tasks."""
    local_rank: str = ""
    """The variable with the number of the task among those of this machine, for `_read_mpi`."""
    local_size: str = ""
    """The variable with the number of tasks on this machine; empty if there is none. If there are
    several, `lockstep run` is refused in them. (For Slurm, `run/machines/slurm.py` does that.)"""
    read: Callable[[Environ, Task], Topology | None]
    """Reads the place of a task; returns None if the variables are there, but mean nothing."""
    only_tasks_have_rank: bool = True
    """False if processes that are no tasks have the variable `rank`, too, but not `size`."""
    ranks_must_fit: bool = True
    """True if RANK and WORLD_SIZE, where they are also set, must fit the number of the task."""

    def task(self, environ: Environ) -> Task | None:
        """Returns the task that this process is; None if it is none of this scheduler.

        Raises:
            SettingError: only one of `rank` and `size` is set, or they are no numbers.
        """
        if not self.only_tasks_have_rank and not environ.get(self.size):
            return None
        return _read_task(environ, (self.rank, self.size))


def scheduler_of_several_tasks_here(environ: Environ) -> Scheduler | None:
    """Returns the scheduler that says it has started several tasks on this machine, or None."""
    for scheduler in SCHEDULERS:
        if environ.get(scheduler.local_size, "1") != "1":
            return scheduler
    return None


def _read_open_mpi(environ: Environ, task: Task) -> Topology | None:
    """Reads the place of a process of Open MPI's `mpirun`."""
    return _read_mpi(
        environ,
        task,
        OPEN_MPI,
        job_variables=["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"],
        advice="mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...",
    )


def _read_mpich(environ: Environ, task: Task) -> Topology | None:
    """Reads the place of a process of MPICH's or Intel MPI's `mpirun`."""
    # `srun --mpi=pmi2` sets the variables of MPICH and those of Slurm to the same rank and size.
    # `_read_slurm` reads such a process.
    was_started_by_srun = task == SLURM.task(environ)
    if was_started_by_srun:
        return None

    return _read_mpi(
        environ,
        task,
        MPICH,
        job_variables=["PMI_JOBID"],
        advice="mpirun -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500 ...",
    )


def _read_mpi(
    environ: Environ,
    task: Task,
    mpi: Scheduler,
    *,
    job_variables: Sequence[str],
    advice: str,
) -> Topology:
    """Reads the place of a process that `mpirun` has started.

    Args:
        environ: the environment variables.
        task: its rank, and the number of ranks.
        mpi: whose `mpirun` it was.
        job_variables: variables of which one has the name of the job.
        advice: how to start the processes with MASTER_ADDR and MASTER_PORT.
    """
    _check_world_size(environ, task.size, mpi.name)
    local_task = _read_task(environ, (mpi.local_rank, mpi.local_size))
    if local_task is None:
        if task.size > 1:
            found = f"{task.rank} of {task.size}"
            raise _half_set_error(f"{mpi.name}'s rank and size", found, mpi.local_rank)

        local_task = Task(rank=0, size=1)
    master_addr = environ.get("MASTER_ADDR")
    if not master_addr and local_task.size < task.size:
        raise SettingError(
            f"{task.size} ranks started by mpirun ({mpi.name}) on several machines",
            f"{local_task.size} of them are on this one, and MASTER_ADDR (where rank 0 is) is not "
            "set",
            advice,
        )

    master_port = port(environ)
    if master_port is None:
        master_port = _port_of_first_job(environ, job_variables)
    topology = Topology(
        rank=task.rank,
        size=task.size,
        local_rank=local_task.rank,
        local_size=local_task.size,
        node_rank=(task.rank - local_task.rank) // local_task.size,
        master_addr=master_addr or LOOPBACK,
        master_port=master_port,
        source=mpi.name,
    )
    command = "mpirun --map-by slot (Open MPI) or -ppn <ranks per machine> (MPICH)"
    _check_consecutive_ranks(topology, command)
    return topology


def _read_slurm(environ: Environ, task: Task) -> Topology | None:
    """Reads the place of a task that `srun` has started; returns None if it is the only one."""
    if task.size == 1:  # an ordinary process
        return None

    _check_world_size(environ, task.size, "Slurm")

    for name in ("SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID", "SLURM_LOCALID"):
        if not environ.get(name):
            raise SettingError("a run started by srun", f"{name} is not set", "start it anew")

    # The number of tasks on each node: "2(x3),1" is [2, 2, 2, 1].
    node_rank = _number(environ, "SLURM_NODEID")
    tasks_of_node = expand_tasks(environ["SLURM_STEP_TASKS_PER_NODE"])
    if sum(tasks_of_node) != task.size or not 0 <= node_rank < len(tasks_of_node):
        raise SettingError(
            f"SLURM_STEP_NUM_TASKS={task.size} and SLURM_NODEID={node_rank}",
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} means "
            f"{sum(tasks_of_node)} tasks on {len(tasks_of_node)} nodes",
            "start the processes with srun, which sets all of them",
        )

    # The ranks meet on the first node of the step, unless the user says where.
    master_addr = environ.get("MASTER_ADDR")
    if not master_addr:
        hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        master_addr = first_host(hosts) if hosts else None

    # Without MASTER_PORT it is a port made of the name of the job, the same for all of its tasks.
    job = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '0')}"
    master_port = port(environ) or port_of(job)

    topology = Topology(
        rank=task.rank,
        size=task.size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_size=tasks_of_node[node_rank],
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        source="Slurm",
    )
    _check_consecutive_ranks(topology, "srun --distribution=block")
    return topology


OPEN_MPI = Scheduler(
    name="Open MPI",
    command="mpirun",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    read=_read_open_mpi,
)
MPICH = Scheduler(  # and Intel MPI
    name="MPICH",
    command="mpirun",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    read=_read_mpich,
    ranks_must_fit=False,
)
SLURM = Scheduler(
    name="Slurm",
    command="srun",
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    read=_read_slurm,
    # A batch script and an salloc shell have SLURM_PROCID too, but no step of their own.
    only_tasks_have_rank=False,
)

SCHEDULERS = (OPEN_MPI, MPICH, SLURM)
"""What is read one after the other: MPI before Slurm, since `mpirun` inside a Slurm job hands
Slurm's variables of its own daemons on to the ranks."""


def _read_task(environ: Environ, names: tuple[str, str]) -> Task | None:
    """Reads a rank and a size, which must both be set or both not.

    Args:
        environ: the environment variables.
        names: the variable of the rank and that of the size.
    """
    rank_name, size_name = names
    has_rank = bool(environ.get(rank_name))
    has_size = bool(environ.get(size_name))
    if not has_rank and not has_size:
        return None
    if not has_size:
        raise _half_set_error(rank_name, environ[rank_name], size_name)
    if not has_rank:
        raise _half_set_error(size_name, environ[size_name], rank_name)
    return Task(_number(environ, rank_name), _number(environ, size_name))


def _port_of_first_job(environ: Environ, job_variables: Sequence[str]) -> int:
    """Returns the port of the job that the first of these variables names."""
    for name in job_variables:
        job = environ.get(name)
        if job:
            return port_of(job)
    return DEFAULT_PORT


def port_of(job: str) -> int:
    """Returns the port for a job's store, which is the same on all of its ranks."""
    return FIRST_JOB_PORT + zlib.crc32(job.encode()) % NUM_JOB_PORTS


def _check_consecutive_ranks(topology: Topology, command: str) -> None:
    """Raises SettingError if the ranks of a machine are certainly not consecutive.

    Lockstep relies on consecutive ranks when it reduces within a machine first. A process only
    knows its own numbers. For example, with 8 ranks of which 4 are on each machine:

        rank 5, local rank 1: local rank 0 has rank 4; the machine has ranks 4 to 7
        rank 2, local rank 1: local rank 0 would have rank 1; no machine begins there: an error
        rank 0, local rank 1: local rank 0 would have rank -1: an error

    Args:
        topology: this process's place.
        command: how to start the processes, so that the ranks are consecutive.
    """
    # The rank of this machine's local rank 0, provided that the ranks are consecutive.
    first_rank_here = topology.rank - topology.local_rank
    begins_below_0 = first_rank_here < 0

    # If all machines have equally many ranks, each begins at a multiple of this number. With 7
    # ranks of which 4 are here, they have not: then nothing is known about where this machine
    # begins.
    machines_may_be_equal = topology.size % topology.local_size == 0
    is_multiple = first_rank_here % topology.local_size == 0
    begins_within_another_machine = machines_may_be_equal and not is_multiple

    if begins_below_0 or begins_within_another_machine:
        raise SettingError(
            f"rank {topology.rank} as local rank {topology.local_rank} of {topology.local_size} "
            f"(from {topology.source})",
            "the ranks are dealt out to the machines in turn; each machine needs consecutive ranks",
            command,
        )


def _check_world_size(environ: Environ, size: int, source: str) -> None:
    """Raises SettingError if WORLD_SIZE is set and differs from the launcher's size."""
    world_size = _optional_number(environ, "WORLD_SIZE")
    if world_size is not None and world_size != size:
        raise SettingError(
            f"WORLD_SIZE={world_size}", f"{source} says {size} processes", "unset it"
        )


# Single variables


def port(environ: Environ) -> int | None:
    """Returns MASTER_PORT; None if it is not set."""
    number = _optional_number(environ, "MASTER_PORT")
    if number is not None and not 0 < number < 65536:
        raise SettingError(f"MASTER_PORT={number}", "ports go from 1 to 65535", "set a free one")
    return number


def _optional_number(environ: Environ, name: str) -> int | None:
    """Returns the value of a variable as a number; None if it is not set, or empty."""
    if not environ.get(name):
        return None
    return _number(environ, name)


def _number(environ: Environ, name: str) -> int:
    """Returns the value of a variable, which must be set, as a number of at least 0.

    Raises:
        SettingError: it is not a whole number of at least 0.
    """
    return _parse_number(name, environ[name])


def _parse_number(name: str, text: str) -> int:
    """Returns the number that a text stands for.

    Args:
        name: the variable or flag with this value, for the error.
        text: the value.

    Raises:
        SettingError: it is not a whole number of at least 0.
    """
    if not text.strip().isdecimal():
        raise SettingError(f"{name}={text}", "it is not a whole number of at least 0", "correct it")
    return int(text)


def _half_set_error(name: str, value: str, missing: str) -> SettingError:
    """Returns the error for a variable that is set without the one it needs."""
    return SettingError(
        f"{name}={value}",
        f"{missing} is not set beside it",
        "start with `lockstep run`, which sets all of them; to run as one process, unset it",
    )


# Slurm's short forms for lists of hosts and of numbers of tasks


def first_host(text: str) -> str:
    """Returns the first host of a list: `n[01-03,7]-ib[0-1],login` gives `n01-ib0`.

    Source: the host list expressions in the manual page of `scontrol` (`show hostnames`).

    Raises:
        SettingError: the text is not a host list.
    """
    if not re.fullmatch(f"{SLURM_HOST}(?:,{SLURM_HOST})*", text.strip()):
        raise _malformed_error("host list", text, "n[01-03,7],login")
    first = re.match(SLURM_HOST, text.strip())
    assert first is not None  # the whole text matched
    return SLURM_NUMBERS.sub(r"\1", first[0])


def expand_tasks(text: str) -> list[int]:
    """Returns the number of tasks on each node: `2(x3),1` gives `[2, 2, 2, 1]`.

    Raises:
        SettingError: the text does not have this form.
    """
    tasks_of_node: list[int] = []
    for part in text.strip().split(","):
        match = SLURM_TASKS.fullmatch(part)
        if match is None:
            raise _malformed_error("list of tasks per node", text, "2(x3),1")
        num_nodes = int(match["nodes"] or 1)
        tasks_of_node += [int(match["tasks"])] * num_nodes
    return tasks_of_node


def _malformed_error(what: str, text: str, example: str) -> SettingError:
    return SettingError(
        f"the {what} {text!r} from Slurm's environment",
        f"it does not read like {example!r}",
        "start the processes with srun, which sets it",
    )
