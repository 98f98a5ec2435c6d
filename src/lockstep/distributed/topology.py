"""Who am I in the run: a frozen value, read once from the environment by pure functions.

Environment variables of torchrun, the older launchers, MPI and Slurm become a `Topology`:

| started by                          | known by                                              |
|-------------------------------------|-------------------------------------------------------|
| `lockstep run`, torchrun            | RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK |
|                                     | (LOCKSTEP_LAUNCHER says that it was not torchrun)     |
| older launchers, by hand            | RANK WORLD_SIZE, `--local_rank` among the arguments   |
| `mpirun` of Open MPI                | OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE |
| `mpirun` of MPICH and Intel MPI     | PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS     |
| `srun`                              | SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID ...   |

The first that is present wins: RANK before a scheduler's variables, since a launcher that itself
runs under a scheduler sets RANK for its workers; MPI before Slurm, since `mpirun` inside a Slurm
job hands Slurm's variables of its own daemons on to the ranks. MASTER_ADDR and MASTER_PORT, where
they are set, are used under all of them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.distributed.network import LOOPBACK, means_loopback
from lockstep.errors import SettingError

Environ = Mapping[str, str]
DEFAULT_PORT = 29500
_LOCAL_RANK_FLAGS = ("--local_rank", "--local-rank")

_HOST = r"(?:[\w.:-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")

_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True)
class DataParallelRank:
    """Which part of every global batch a process computes: part `rank` of `size`.

    Where several processes compute one part together (the stages of a pipeline), the first `size`
    ranks of the run are those that hold the results: they alone contribute to sums and means over
    ranks.
    """

    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One process's place among the others.

    Every process of a node has the same `node_rank`; where all nodes hold equally many,
    `rank = node_rank * local_size + local_rank`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    """Host name or address of the node that holds rank 0."""
    master_port: int | None = None
    agent_store: bool = False
    """The launcher already serves a store at the master's address; rank 0 must not open another."""
    source: str = "one process"
    """Where this was learnt from, in words: `torchrun`, `Slurm`, ..."""
    memory: tuple[str, ...] = ()
    """Two files in memory that the launcher holds for this rank and those that follow it."""

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
    def one_node(self) -> bool:
        """True when all processes run on this machine."""
        return self.local_size == self.size


def detect(environ: Environ, argv: Sequence[str] = ()) -> Topology | None:
    """This process's place in the run; None when it was started plainly, as one process.

    Args:
        environ: the environment variables.
        argv: the script's arguments, where old launchers put `--local_rank`.

    Raises:
        SettingError: variables that are half set, do not parse, or contradict each other.
    """
    for parse in _PARSERS:
        topology = parse(environ, argv)
        if topology is not None:
            return topology
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        if environ.get(name):
            raise _half_set(name, environ[name], "RANK")
    return None


def _torchrun(environ: Environ, argv: Sequence[str]) -> Topology | None:
    if not environ.get("RANK"):
        return None
    if not environ.get("WORLD_SIZE"):
        raise _half_set("RANK", environ["RANK"], "WORLD_SIZE")
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank = _local_rank(environ, argv)
    master_addr = environ.get("MASTER_ADDR") or None
    local_size = _optional(environ, "LOCAL_WORLD_SIZE") or _optional(environ, "LOCAL_SIZE")
    if local_size is None:
        # Nothing says how many ranks share this machine. A loopback master means all of them;
        # otherwise it is at least those up to this one's local rank.
        everyone_here = size == 1 or means_loopback(master_addr)
        local_size = size if everyone_here else (local_rank or 0) + 1
    local_rank = rank % local_size if local_rank is None else local_rank
    node_rank = _optional(environ, "GROUP_RANK")
    elastic = "TORCHELASTIC_RUN_ID" in environ
    topology = Topology(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=(rank - local_rank) // local_size if node_rank is None else node_rank,
        master_addr=master_addr,
        master_port=port(environ),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        source=environ.get("LOCKSTEP_LAUNCHER")
        or ("torchrun" if elastic else "RANK and WORLD_SIZE"),
        memory=tuple(environ.get("LOCKSTEP_MEMORY", "").split()),
    )
    if local_size > size or rank < local_rank:
        raise SettingError(
            f"RANK={rank} and LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size} and "
            f"WORLD_SIZE={size}",
            "ranks are counted on from machine to machine, so the local numbers are never larger",
            "let the launcher set all of them",
        )
    if not elastic:
        _agree(topology, environ)
    return topology


def _agree(topology: Topology, environ: Environ) -> None:
    """Each scheduler task is one rank, or starts an equal run of ranks; anything else is a slip."""
    for name, task in (("Open MPI", _pair(environ, _OPEN_MPI)), ("Slurm", _slurm_task(environ))):
        if task is None or task[1] == 1:
            continue
        rank, size = task
        if topology.size % size or topology.rank // (topology.size // size) != rank:
            raise SettingError(
                f"RANK={topology.rank} and WORLD_SIZE={topology.size}",
                f"{name} says task {rank} of {size}",
                "unset RANK and WORLD_SIZE, so that the scheduler's numbers are used; or set them "
                "in each task, not in the batch script",
            )


def _slurm_task(environ: Environ) -> tuple[int, int] | None:
    # A batch script and an salloc shell have SLURM_PROCID too, but no step of their own.
    return _pair(environ, _SLURM) if environ.get(_SLURM[1]) else None


def _mpi(environ: Environ, argv: Sequence[str]) -> Topology | None:
    ranks = _pair(environ, _OPEN_MPI)
    if ranks is not None:
        source = "Open MPI"
        local_names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        jobs = ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"]
        pass_on = "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
    else:
        ranks = _pair(environ, ("PMI_RANK", "PMI_SIZE"))
        if ranks is None or ranks == _slurm_task(environ):  # `srun --mpi=pmi2` sets both
            return None
        source = "MPICH"
        local_names = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        jobs = ["PMI_JOBID"]
        pass_on = "mpirun -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500 ..."
    rank, size = ranks
    _same_world_size(environ, size, source)
    local = _pair(environ, local_names)
    if local is None and size > 1:
        raise _half_set(f"{source}'s rank and size", f"{rank} of {size}", local_names[0])
    local_rank, local_size = local or (0, 1)
    master_addr = environ.get("MASTER_ADDR")
    if not master_addr and local_size < size:
        raise SettingError(
            f"{size} ranks started by mpirun ({source}) on several machines",
            f"{local_size} of them are on this one, and MASTER_ADDR (where rank 0 is) is not set",
            pass_on,
        )
    job = next((environ[name] for name in jobs if environ.get(name)), None)
    return _in_blocks(
        Topology(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=(rank - local_rank) // local_size,
            master_addr=master_addr or LOOPBACK,
            master_port=port(environ) or (port_of(job) if job else DEFAULT_PORT),
            source=source,
        ),
        "mpirun --map-by slot (Open MPI) or -ppn <ranks per machine> (MPICH)",
    )


def _slurm(environ: Environ, argv: Sequence[str]) -> Topology | None:
    task = _slurm_task(environ)
    if task is None or task[1] == 1:
        return None
    rank, size = task
    _same_world_size(environ, size, "Slurm")
    for name in ("SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID", "SLURM_LOCALID"):
        if not environ.get(name):
            raise SettingError("a run started by srun", f"{name} is not set", "start it anew")
    node_rank = _number(environ, "SLURM_NODEID")
    counts = expand_tasks(environ["SLURM_STEP_TASKS_PER_NODE"])
    if sum(counts) != size or not 0 <= node_rank < len(counts):
        raise SettingError(
            f"SLURM_STEP_NUM_TASKS={size} and SLURM_NODEID={node_rank}",
            f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} means "
            f"{sum(counts)} tasks on {len(counts)} nodes",
            "start the processes with srun, which sets all of them",
        )
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    job = f"{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '0')}"
    return _in_blocks(
        Topology(
            rank=rank,
            size=size,
            local_rank=_number(environ, "SLURM_LOCALID"),
            local_size=counts[node_rank],
            node_rank=node_rank,
            master_addr=environ.get("MASTER_ADDR") or (first_host(hosts) if hosts else None),
            master_port=port(environ) or port_of(job),
            source="Slurm",
        ),
        "srun --distribution=block",
    )


# The order is explained at the top of this file.
_PARSERS: tuple[Callable[[Environ, Sequence[str]], Topology | None], ...] = (
    _torchrun,
    _mpi,
    _slurm,
)


def port_of(job: str) -> int:
    """A port between 12288 and 28671 (below those the kernel hands out), the same on all ranks."""
    return 12288 + zlib.crc32(job.encode()) % 16384


def _in_blocks(topology: Topology, command: str) -> Topology:
    """Consecutive ranks share a node; what reduces within a node first relies on it."""
    first = topology.rank - topology.local_rank
    equal_nodes = topology.size % topology.local_size == 0
    if first < 0 or (equal_nodes and first % topology.local_size):
        raise SettingError(
            f"rank {topology.rank} as local rank {topology.local_rank} of {topology.local_size} "
            f"(from {topology.source})",
            "the ranks are dealt out to the machines in turn; each machine needs consecutive ranks",
            command,
        )
    return topology


def _local_rank(environ: Environ, argv: Sequence[str]) -> int | None:
    variable = _optional(environ, "LOCAL_RANK")
    for position, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag not in _LOCAL_RANK_FLAGS:
            continue
        following = argv[position + 1 : position + 2]
        argued = _number({flag: value if equals else "".join(following)}, flag)
        if variable is not None and variable != argued:
            raise SettingError(
                f"LOCAL_RANK={variable} and {flag}={argued}",
                "they contradict each other",
                f"leave {flag} to the launcher",
            )
        return argued
    return variable


def port(environ: Environ) -> int | None:
    """MASTER_PORT, where it is set."""
    number = _optional(environ, "MASTER_PORT")
    if number is not None and not 0 < number < 65536:
        raise SettingError(f"MASTER_PORT={number}", "ports go from 1 to 65535", "set a free one")
    return number


def _same_world_size(environ: Environ, size: int, source: str) -> None:
    given = _optional(environ, "WORLD_SIZE")
    if given not in (None, size):
        raise SettingError(f"WORLD_SIZE={given}", f"{source} says {size} processes", "unset it")


def _pair(environ: Environ, names: tuple[str, str]) -> tuple[int, int] | None:
    """A rank and a size, which are both set or both not."""
    there = [name for name in names if environ.get(name)]
    if len(there) == 1:
        missing = names[1] if there[0] == names[0] else names[0]
        raise _half_set(there[0], environ[there[0]], missing)
    return (_number(environ, names[0]), _number(environ, names[1])) if there else None


def _optional(environ: Environ, name: str) -> int | None:
    return _number(environ, name) if environ.get(name) else None


def _number(environ: Environ, name: str) -> int:
    text = environ[name]
    if not text.strip().isdecimal():
        raise SettingError(f"{name}={text}", "it is not a whole number of at least 0", "correct it")
    return int(text)


def _half_set(name: str, value: str, missing: str) -> SettingError:
    return SettingError(
        f"{name}={value}",
        f"{missing} is not set beside it",
        "start with `lockstep run`, which sets all of them; to run as one process, unset it",
    )


# Slurm's short forms for lists of hosts and of numbers of tasks


def first_host(text: str) -> str:
    """The first of `n[01-03,7]-ib[0-1],login`: `n01-ib0`.

    Source: the host list expressions in the manual page of `scontrol` (`show hostnames`).

    Raises:
        SettingError: the text is not a host list.
    """
    if not re.fullmatch(f"{_HOST}(?:,{_HOST})*", text.strip()):
        raise _malformed("host list", text, "n[01-03,7],login")
    first = re.match(_HOST, text.strip())
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first[0] if first else "")


def expand_tasks(text: str) -> list[int]:
    """`2(x3),1` as `[2, 2, 2, 1]`: the number of tasks on each node.

    Raises:
        SettingError: the text does not have this form.
    """
    counts: list[int] = []
    for part in text.strip().split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise _malformed("list of tasks per node", text, "2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _malformed(what: str, text: str, example: str) -> SettingError:
    return SettingError(
        f"the {what} {text!r} from Slurm's environment",
        f"it does not read like {example!r}",
        "start the processes with srun, which sets it",
    )
