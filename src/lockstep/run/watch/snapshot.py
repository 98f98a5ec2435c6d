"""The state of all ranks at one moment: its values, how it is taken from outside, and as JSON.

None always means "not obtained": a rank whose interpreter is blocked gives no calls, which is not
the same as a rank that has made none.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from lockstep.run.watch.probe import SLEEPERS_SIGNAL, STACK_SIGNAL
from lockstep.run.watch.stacks import Frame, Stack
from lockstep.wording import format_ranks, group_by_key

_T = TypeVar("_T")

DEFAULT_BACKEND = "undefined"
"""What torch calls the backends that it chooses itself by the device."""

STOPPED = "Tt"
"""States of a process that is stopped: by a signal, by a debugger."""


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective that a rank has called, from torch's Flight Recorder.

    The fields follow `torch/csrc/distributed/c10d/FlightRecorderDetail.hpp`.
    """

    group: str
    """torch's name of the process group, the same on all ranks."""
    backend: str
    """`gloo`, `nccl`, ..."""
    seq: int
    """Which collective of this group and backend it is, from 1."""
    op: str
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    """Of the inputs."""
    p2p: bool = False
    """A send or receive; `seq` counts those of each pair on its own."""
    state: str = "scheduled"
    """`scheduled`, `started` or `completed`; Gloo never goes past the first."""
    time_s: float
    """When it was called, by the wall clock of its host."""
    thread: int | None = None
    """The calling thread's identifier."""
    timeout_s: float | None = None
    """That of its group."""
    frames: Stack | None = None

    @property
    def key(self) -> str:
        """Calls with equal keys are numbered together."""
        return f"{self.backend}:{self.group}"


@dataclass(frozen=True)
class Group:
    """A process group that a rank is a member of."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class NewGroup:
    """A process group that a rank waits to make, in `new_group` or what calls it."""

    name: str
    """A number that each rank counts by itself; with `use_local_synchronization` a hash."""
    ranks: tuple[int, ...]
    backend: str
    members_only: bool
    """The ranks in it wait for each other, and not for the others of the run."""

    def describe(self) -> str:
        """`ranks 0-1 (group '1', over gloo)`."""
        words = []
        if self.name.isdigit():  # else it is a hash of the ranks
            words.append(f"group {self.name!r}")
        if self.backend != DEFAULT_BACKEND:
            words.append(f"over {self.backend}")
        return format_ranks(self.ranks) + (f" ({', '.join(words)})" if words else "")

    def is_same(self, other: NewGroup) -> bool:
        """Whether two ranks make one group, as far as that is known."""
        default = DEFAULT_BACKEND in (self.backend, other.backend)
        same = (self.name, self.ranks) == (other.name, other.ranks)
        return same and (default or self.backend == other.backend)


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank."""

    rank: int
    host: str
    pid: int
    alive: bool
    code: int | None = None
    """What it has ended with: its exit code, or minus the number of the signal that ended it."""
    state: str | None = None
    """The main thread's state as in `/proc/PID/stat`: R, S, D, T (stopped), t (traced), ..."""
    cpu_s: float | None = None
    """Processor time of all its threads since its start."""
    main_cpu_s: float | None = None
    """Processor time of its main thread."""
    children_cpu_s: float | None = None
    """Processor time of the processes that it has started, and of those that they have."""
    stack: Stack | None = None
    """Of the main thread."""
    threads: tuple[Stack, ...] | None = None
    """The stacks of its other Python threads."""
    main_thread: int | None = None
    """Its identifier, as in `CollectiveCall.thread`."""
    answered: bool | None = None
    """Whether its thread that answers did; None: it could not be asked, or its recorder cannot be
    read."""
    calls: tuple[CollectiveCall, ...] | None = None
    """Its latest collectives, oldest first."""
    completed: Mapping[str, int] | None = None
    """The last completed collective by `backend:group`. Gloo's can lag behind by a few."""
    groups: tuple[Group, ...] | None = None
    making: NewGroup | None = None
    """The group that its main thread waits to make."""
    steps: int | None = None
    """Optimizer steps so far; None: it has not told of any, as a program that is not Python."""

    @property
    def stopped(self) -> bool | None:
        """Stopped by a signal (SIGSTOP, SIGTSTP) or by a debugger."""
        return None if self.state is None else self.state in STOPPED


@dataclass(frozen=True)
class Snapshot:
    """All ranks at one moment; `time` is the wall clock of the machine that looked."""

    time: float
    ranks: tuple[RankState, ...] = ()

    @functools.cached_property  # asked for once for each rank
    def one_host(self) -> bool:
        """Whether all ranks are on one host: of several the clocks differ."""
        return len({state.host for state in self.ranks}) == 1


def shorten(snapshot: Snapshot, calls: int) -> Snapshot:
    """The same with the latest `calls` collectives of each rank alone, for sending it."""
    ranks = (replace(state, calls=state.calls and state.calls[-calls:]) for state in snapshot.ranks)
    return replace(snapshot, ranks=tuple(ranks))


def merge(parts: Sequence[Snapshot]) -> Snapshot:
    """One snapshot of the ranks of several machines, taken at about the same time."""
    ranks = sorted((state for part in parts for state in part.ranks), key=lambda s: s.rank)
    return Snapshot(max(part.time for part in parts), tuple(ranks))


def with_groups_apart(snapshot: Snapshot) -> Snapshot:
    """The same, with names of their own for groups that have one name and not the same ranks.

    Each rank counts the groups that it makes, and names them by their numbers. Where ranks make
    others, or in another order, one name stands for several groups.
    """
    groups = {group for state in snapshot.ranks for group in state.groups or ()}
    by_name = group_by_key((group.name, group.ranks) for group in groups)
    ambiguous = {name for name, found in by_name.items() if len(set(found)) > 1}
    if not ambiguous:
        return snapshot
    return replace(snapshot, ranks=tuple(_renamed(state, ambiguous) for state in snapshot.ranks))


def _renamed(state: RankState, ambiguous: Collection[str]) -> RankState:
    """A rank's state in which the ranks of some groups are part of their names."""
    names: dict[str, str] = {}
    groups: list[Group] = []
    for group in state.groups or ():
        if group.name in ambiguous:
            names[group.name] = f"{group.name} of {format_ranks(group.ranks)}"
            group = replace(group, name=names[group.name], description="")
        groups.append(group)
    calls = [replace(c, group=names.get(c.group, c.group)) for c in state.calls or ()]
    completed = {}
    for key, seq in (state.completed or {}).items():
        backend, _, name = key.partition(":")
        completed[f"{backend}:{names.get(name, name)}"] = seq
    return replace(
        state,
        groups=None if state.groups is None else tuple(groups),
        calls=None if state.calls is None else tuple(calls),
        completed=None if state.completed is None else completed,
    )


def to_json(snapshot: Snapshot) -> str:
    """As text; frames and groups that occur many times are written once.

    Every rank knows of all members of its groups, so the text would grow with the square of ranks;
    so would that of all machines, if they listed them one by one.
    """
    frames: dict[Frame, int] = {}
    groups: dict[Group, int] = {}

    def encode(value: Any) -> object:
        if isinstance(value, Frame):
            return frames.setdefault(value, len(frames))
        if isinstance(value, Group):
            return groups.setdefault(value, len(groups))
        return vars(value)

    ranks = json.dumps(snapshot.ranks, default=encode)
    listed = {
        "frames": [list(vars(frame).values()) for frame in frames],
        "groups": [[group.name, group.description, _to_ranges(group.ranks)] for group in groups],
    }
    return f'{{"time": {snapshot.time!r}, {json.dumps(listed)[1:-1]}, "ranks": {ranks}}}'


def from_json(text: str) -> Snapshot:
    """The opposite of `to_json`."""
    data = json.loads(text)
    written: dict[type, Sequence[Any]] = {
        Frame: [Frame(*frame) for frame in data.pop("frames")],
        Group: [
            Group(n, d, _from_ranges(*map(tuple, ranks))) for n, d, ranks in data.pop("groups")
        ],
    }
    return from_values(Snapshot, data, written)


def _to_ranges(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Start, stop and step of the ranges that ranks are made of: in a group they are few."""
    found: list[range] = []
    for rank in ranks:
        last = found[-1] if found else range(0)
        step = rank - last[0] if len(last) == 1 else last.step
        if last and step > 0 and rank == last[-1] + step:
            found[-1] = range(last.start, rank + 1, step)
        else:
            found.append(range(rank, rank + 1))
    return [(each.start, each.stop, each.step) for each in found]


@functools.lru_cache(64)  # all machines tell of the same groups
def _from_ranges(*ranges: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(itertools.starmap(range, ranges)))


def from_values(
    kind: type[_T], values: Any, written: Mapping[type, Sequence[Any]] = MappingProxyType({})
) -> _T:
    """A dataclass from what `asdict` and JSON have made of it, by the types of its fields.

    Args:
        kind: a dataclass; its fields are dataclasses, tuples, texts, numbers, or one of them or
            None.
        values: the fields by name.
        written: of these kinds the values name one by its number.

    Raises:
        TypeError, KeyError, AttributeError, IndexError: these are not its values.
    """
    read: Any = values  # of a Literal or a Mapping they are as they are
    inner = get_args(kind)
    if kind in written:
        read = written[kind][values]
    elif is_dataclass(kind):
        types = _types_of_fields(kind)
        read = kind(**{name: from_values(types[name], v, written) for name, v in values.items()})
    elif values is not None and inner in _PLAIN_ITEMS:
        read = tuple(values)  # quickly: every rank lists all ranks of its groups
    elif values is not None and get_origin(kind) is tuple:
        types_of_items = itertools.repeat(inner[0]) if inner[-1] is Ellipsis else inner
        read = tuple(map(from_values, types_of_items, values, itertools.repeat(written)))
    elif values is not None and type(None) in inner:
        read = from_values(inner[0], values, written)
    return cast(_T, read)


_PLAIN_ITEMS = ((int, Ellipsis), (str, Ellipsis))
_types_of_fields = functools.cache(get_type_hints)


def with_answer(state: RankState, text: str, main_thread: int) -> RankState:
    """A rank's state with the answer that its probe has written.

    torch's two forms are understood: that of `_dump_fr_trace_json` (numbers as texts, no frames)
    and that of `_dump_fr_trace` turned into JSON. `answered` becomes None where the recorder could
    not be read.

    Args:
        state: what is known so far.
        text: of `flight.json`.
        main_thread: the identifier of the rank's main thread; 0: not known.
    """
    try:
        data = json.loads(text)
        calls: list[CollectiveCall] = []
        completed: dict[str, int] = {}
        for record in data["records"]:
            made = [(_call(entry), str(entry["pg_id"])) for entry in record.get("entries") or ()]
            made.sort(key=lambda pair: pair[0].time_s)
            # The recorder keeps calls of groups that are gone. Names and numbers begin again with
            # the next group; torch's number of the group alone does not.
            present = {call.key: number for call, number in made}
            calls += [call for call, number in made if present[call.key] == number]
            status = record.get("pg_status") or {}
            for key, number in present.items():
                if number in status:
                    completed[key] = int(status[number]["last_completed_collective"])
        stacks: dict[int, Stack] = {
            int(ident): tuple(Frame(*frame) for frame in stack)
            for ident, stack in data["stacks"].items()
        }
        return replace(
            state,
            answered=True,
            calls=tuple(sorted(calls, key=lambda call: call.time_s)),
            completed=completed,
            groups=from_values(tuple[Group, ...], data["groups"]),
            making=from_values(cast(type[NewGroup], NewGroup | None), data.get("making")),
            stack=stacks.pop(main_thread, state.stack),
            threads=tuple(stacks.values()),
            main_thread=main_thread or None,
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return replace(state, answered=None)


def _call(entry: Mapping[str, Any]) -> CollectiveCall:
    backend, _, op = entry["profiling_name"].rpartition(":")
    frames = entry.get("frames")
    thread = str(entry.get("thread_id", ""))
    return CollectiveCall(
        group=str(entry["process_group"][0]),
        backend=backend,
        seq=int(entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]),
        op=op,
        input_sizes=tuple(map(tuple, entry["input_sizes"])),
        output_sizes=tuple(map(tuple, entry["output_sizes"])),
        dtypes=tuple(str(dtype).lower() for dtype in entry["input_dtypes"]),
        p2p=bool(entry["is_p2p"]),
        state=entry["state"],
        time_s=int(entry["time_created_ns"]) / 1e9,
        thread=int(thread) if thread.isdigit() else None,
        timeout_s=entry["timeout_ms"] / 1e3 if entry.get("timeout_ms") else None,
        frames=None
        if frames is None
        else tuple(Frame(f["filename"], int(f["line"]), f["name"]) for f in frames),
    )


class ProcessStatus(NamedTuple):
    """What the kernel says of a process."""

    state: str
    """The main thread's: R, S, D, T, t, Z, ..."""
    cpu_s: float
    """Of all its threads."""
    main_cpu_s: float | None
    """Of its main thread."""
    main_switches: int | None
    """How often its main thread has given up its processor by itself."""
    shows_stacks: bool
    """It handles the signals that ask for stacks; another would be ended by them. Its main thread
    does not block its own, which another thread would get."""


def read_process(pid: int, root: Path = Path("/proc")) -> ProcessStatus | None:
    """From `/proc/PID/stat`, `task/PID/stat` and `status`, see proc(5).

    None: there is no such process, or the system has no `/proc`.
    """
    folder = root / str(pid)
    try:
        state, cpu_s = _stat(folder / "stat")
        status = (folder / "status").read_text()
    except (OSError, ValueError, IndexError):
        return None
    main, switches = None, None
    task = folder / "task" / str(pid)
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, main = _stat(task / "stat")
        switches = int(_field(task.joinpath("status").read_text(), "voluntary_ctxt_switches"))
    caught, blocked = (int(_field(status, name) or "0", 16) for name in ("SigCgt", "SigBlk"))
    shows = all(caught >> (number - 1) & 1 for number in (STACK_SIGNAL, SLEEPERS_SIGNAL))
    shows = shows and not blocked >> (STACK_SIGNAL - 1) & 1
    return ProcessStatus(state, cpu_s, main, switches, shows)


def cpu_of_children(pids: Collection[int], root: Path = Path("/proc")) -> dict[int, float]:
    """Processor time of the descendants of processes, in s; of those that have ended as well.

    From `/proc/PID/stat`, see proc(5). A process that is gone, or all where there is no `/proc`, is
    left out.
    """
    children: dict[int, list[int]] = {}
    own_ticks: dict[int, int] = {}
    waited_ticks: dict[int, int] = {}
    for path in root.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            children.setdefault(int(fields[1]), []).append(pid)
            own_ticks[pid] = int(fields[11]) + int(fields[12])
            waited_ticks[pid] = int(fields[13]) + int(fields[14])
    found: dict[int, float] = {}
    for pid in own_ticks.keys() & set(pids):
        ticks = waited_ticks[pid]
        left = list(children.get(pid, ()))
        while left:
            child = left.pop()
            ticks += own_ticks[child] + waited_ticks[child]
            left += children.get(child, ())
        found[pid] = ticks / os.sysconf("SC_CLK_TCK")
    return found


def harmless_signal(
    pid: int, main_switches: int | None, *, answers: bool, root: Path = Path("/proc")
) -> int | None:
    """The signal that brings the stack of a rank which does not answer; None: none for now.

    A thread that handles a signal comes back from `poll`, `sleep`, `sem_timedwait` and others with
    EINTR, see signal(7), which code in C seldom expects. So where all threads sleep, the one that
    answers is asked; else the main thread, where it computes or sleeps in a futex without a time
    limit: that is what waits for locks and `sem_wait` are made of, and the kernel goes on with it.
    Where it sleeps in anything else, its stack is not to be had.

    Args:
        pid: of the rank.
        main_switches: some tenths of a second ago; None: not known.
        answers: it has a thread that answers.
        root: where the kernel tells of processes.
    """
    tasks = root / str(pid) / "task"
    try:
        states = {_stat(task / "stat")[0] for task in tasks.iterdir()}
        waits = tasks.joinpath(str(pid), "wchan").read_text().startswith("futex")
        status = read_process(pid, root)
    except (OSError, ValueError, IndexError):
        return None
    if status is None:
        return None
    lasts = status.main_switches == main_switches is not None  # else it sleeps now and then
    # Those that wait for the interpreter's lock wake up every 5 ms.
    if answers and states <= {"S", "D"} and (waits or lasts):
        return SLEEPERS_SIGNAL
    goes_on = status.state == "R" or (waits and not _has_limit(tasks / str(pid)))
    return STACK_SIGNAL if lasts and goes_on else None


def _has_limit(task: Path) -> bool:
    """Whether a thread that sleeps in a futex does so for some time at most, or it is not known."""
    with contextlib.suppress(OSError, IndexError):  # reading it may be forbidden
        return task.joinpath("syscall").read_text().split()[4] != "0x0"
    return True


def _field(text: str, name: str) -> str:
    """A field of `status`; "": there is none."""
    return next((line.split()[1] for line in text.splitlines() if line.startswith(f"{name}:")), "")


def _stat(path: Path) -> tuple[str, float]:
    fields = path.read_text().rpartition(")")[2].split()  # the name before it may hold anything
    ticks = int(fields[11]) + int(fields[12])
    return fields[0], ticks / os.sysconf("SC_CLK_TCK")
