"""Describes the state of all ranks at one moment, in values that can be written as JSON.

A *call* is one collective, or one send or receive, as recorded by torch's Flight Recorder. A call
is *pending* if it is not known to have completed. The *key* of a call is `backend:group`, such as
`nccl:0`; calls with equal keys are numbered together by `seq`.

None always means "not known": a rank whose interpreter is blocked reports no calls, which is not
the same as a rank that has made none.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.error_in_flight import ErrorInFlight
from lockstep.run.watch.dataclass_json import from_values
from lockstep.run.watch.stacks import Frame, Stack
from lockstep.wording import format_ranks

DEFAULT_BACKEND = "undefined"
"""torch's name for the backends that it chooses itself, by the device of the tensors."""

STOPPED_STATES = "Tt"
"""States of a process that is stopped: T by a signal, t by a debugger."""


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective that a rank has called, from torch's Flight Recorder.

    The fields follow `torch/csrc/distributed/c10d/FlightRecorderDetail.hpp`.
    """

    group: str
    """torch's name of the process group, which is the same on all of its ranks."""
    backend: str
    """`gloo`, `nccl`, ..."""
    seq: int
    """The number of this call in its group and backend, from 1."""
    op: str
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    """The types of the inputs."""
    p2p: bool = False
    """True for a send or receive. Their `seq` is a number of its own; those of a batch share it."""
    peer: int | None = None
    """The number, in the group, of the rank that a send goes to or a receive comes from; None if it
    is not known. NCCL's record has it."""
    state: str = "scheduled"
    """`scheduled`, `started` or `completed`. Gloo's calls stay `scheduled`."""
    time_s: float
    """When it was called, by the wall clock of its host."""
    thread: int | None = None
    """The identifier of the calling thread."""
    timeout_s: float | None = None
    """The timeout of its group."""
    frames: Stack | None = None

    @property
    def key(self) -> str:
        """`backend:group`. Calls with equal keys are numbered together."""
        return f"{self.backend}:{self.group}"


@dataclass(frozen=True)
class Group:
    """A process group that a rank is a member of."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class NewGroup:
    """A process group that a rank is about to create, in `new_group` or in what calls it."""

    name: str
    """A number that each rank counts by itself; with `use_local_synchronization` a hash."""
    ranks: tuple[int, ...]
    backend: str
    members_only: bool
    """True if only the group's members wait for each other, not all ranks of the run."""

    def describe(self) -> str:
        """Describes the group: `ranks 0-1 (group '1', over gloo)`."""
        details = []
        # torch names a group by a number, which the user may recognise, or by a hash of its ranks,
        # which tells the user nothing.
        name_is_a_number = self.name.isdigit()
        if name_is_a_number:
            details.append(f"group {self.name!r}")
        if self.backend != DEFAULT_BACKEND:
            details.append(f"over {self.backend}")

        ranks = format_ranks(self.ranks)
        return f"{ranks} ({', '.join(details)})" if details else ranks

    def may_be_same(self, other: NewGroup) -> bool:
        """Returns False only if something that is known about the two groups differs."""
        if self.name != other.name or self.ranks != other.ranks:
            return False

        # The default backend may turn out to be the one that the other rank names.
        one_has_default_backend = DEFAULT_BACKEND in (self.backend, other.backend)
        return one_has_default_backend or self.backend == other.backend


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The state of one rank's process."""

    rank: int
    host: str
    pid: int
    alive: bool
    code: int | None = None
    """The exit code of a rank that has ended, or minus the number of the signal that ended it."""
    state: str | None = None
    """The main thread's state as in `/proc/PID/stat`: R, S, D, T (stopped), t (traced), ..."""
    cpu_s: float | None = None
    """Processor time of all its threads since its start."""
    main_cpu_s: float | None = None
    """Processor time of its main thread."""
    children_cpu_s: float | None = None
    """Processor time of the processes that it has started, and of those that they have started."""
    stack: Stack | None = None
    """The main thread's stack."""
    threads: tuple[Stack, ...] | None = None
    """The stacks of its other Python threads, except for those in `idle_loops`."""
    idle_loops: tuple[Stack, ...] = ()
    """The stacks of its threads that run an event loop of asyncio which only another thread can
    wake: no call is due later, and no connection is open. Their stacks do not show it."""
    main_thread: int | None = None
    """The main thread's identifier, as in `CollectiveCall.thread`."""
    answered: bool | None = None
    """Whether the rank's probe has answered. None if it could not be asked, or if its answer could
    not be read."""
    calls: tuple[CollectiveCall, ...] | None = None
    """Its latest calls, the oldest first."""
    completed: Mapping[str, int] | None = None
    """The `seq` of the last completed collective by `backend:group`. Gloo's may be a few behind."""
    groups: tuple[Group, ...] | None = None
    making: NewGroup | None = None
    """The process group that its main thread is about to create."""
    in_flight: ErrorInFlight | None = None
    """The exception that its main thread handles."""
    steps: int | None = None
    """Optimizer steps so far. None if it has no heartbeat, as a program that is not Python."""
    trained_steps: int | None = None
    """See `ErrorRecord.trained_steps`."""

    @property
    def all_threads(self) -> tuple[Stack, ...]:
        """The stacks of all its other Python threads; empty if they are not known."""
        return (*(self.threads or ()), *self.idle_loops)

    @property
    def stopped(self) -> bool | None:
        """True if the rank is stopped by a signal (SIGSTOP, SIGTSTP) or by a debugger.

        None if its state is not known.
        """
        return None if self.state is None else self.state in STOPPED_STATES

    def pending_calls(self) -> list[CollectiveCall]:
        """Returns the calls that are not known to have completed, the oldest first.

        With Gloo, some of them may have completed all the same, as its record of the last completed
        call is updated late.
        """
        last_completed_by_key = self.completed or {}  # it only covers collectives
        pending = []
        for call in self.calls or ():
            # Collectives are numbered from 1, so 0 means that none of the group has completed.
            last_completed = last_completed_by_key.get(call.key, 0)
            is_collective = not call.p2p
            has_completed = call.state == "completed" or (
                is_collective and call.seq <= last_completed
            )
            if not has_completed:
                pending.append(call)
        return pending


@dataclass(frozen=True)
class Snapshot:
    """All ranks at one moment."""

    time: float
    """The wall clock of the machine that took the snapshot."""
    ranks: tuple[RankState, ...] = ()

    @functools.cached_property  # it is read once for each rank
    def one_host(self) -> bool:
        """True if all ranks are on one host. The clocks of several hosts differ."""
        hosts = {state.host for state in self.ranks}
        return len(hosts) == 1


def shorten(snapshot: Snapshot, max_calls: int) -> Snapshot:
    """Keeps only the latest calls of each rank, so that a snapshot is short to send."""
    ranks = []
    for state in snapshot.ranks:
        if state.calls:
            state = replace(state, calls=state.calls[-max_calls:])
        ranks.append(state)
    return replace(snapshot, ranks=tuple(ranks))


def merge(parts: Sequence[Snapshot]) -> Snapshot:
    """Joins the snapshots that several machines took at about the same time into one.

    The ranks are sorted by number. The time is that of the last snapshot.
    """
    ranks: list[RankState] = []
    for part in parts:
        ranks.extend(part.ranks)
    ranks.sort(key=lambda state: state.rank)
    return Snapshot(max(part.time for part in parts), tuple(ranks))


# --- Process groups that have the same name and are not the same


def with_unique_group_names(snapshot: Snapshot) -> Snapshot:
    """Renames process groups so that each name stands for one set of ranks.

    Each rank numbers the groups that it creates, and torch uses these numbers as names. If ranks
    create different groups, or create them in a different order, one name stands for several
    groups. Their ranks are then added to the name: `1 of ranks 0-1`.
    """
    ranks_by_name: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for state in snapshot.ranks:
        for group in state.groups or ():
            ranks_by_name[group.name].add(group.ranks)

    ambiguous_names = {name for name, ranks in ranks_by_name.items() if len(ranks) > 1}
    if not ambiguous_names:
        return snapshot

    renamed = tuple(_rename_groups(state, ambiguous_names) for state in snapshot.ranks)
    return replace(snapshot, ranks=renamed)


def _rename_groups(state: RankState, ambiguous_names: Collection[str]) -> RankState:
    """Adds the ranks to the names of ambiguous groups: `1` becomes `1 of ranks 0-1`.

    The groups are renamed wherever the state of the rank mentions them: in `groups`, `calls` and
    `completed`. Each of these is None if it is not known, and then stays None.
    """
    new_names: dict[str, str] = {}  # by the old name
    groups: list[Group] = []
    for group in state.groups or ():
        if group.name in ambiguous_names:
            new_names[group.name] = f"{group.name} of {format_ranks(group.ranks)}"
            # Drop the description, which would be shown instead of the new name: several groups may
            # have the same one.
            group = replace(group, name=new_names[group.name], description="")
        groups.append(group)

    calls: list[CollectiveCall] = []
    for call in state.calls or ():
        new_name = new_names.get(call.group, call.group)
        calls.append(replace(call, group=new_name))

    completed: dict[str, int] = {}
    for key, seq in (state.completed or {}).items():
        backend, _, name = key.partition(":")  # the key is `backend:group`
        new_name = new_names.get(name, name)
        completed[f"{backend}:{new_name}"] = seq

    return replace(
        state,
        groups=None if state.groups is None else tuple(groups),
        calls=None if state.calls is None else tuple(calls),
        completed=None if state.completed is None else completed,
    )


# --- JSON


def to_json(snapshot: Snapshot) -> str:
    """Writes a snapshot as JSON text, in which each frame and each group is written only once.

    Frames and groups are collected in two tables, and referred to by their index in the table.
    Without that, the text would grow with the square of the number of ranks, because every rank
    lists the members of its groups. For the same reason, members are written as ranges.
    """
    index_of_frame: dict[Frame, int] = {}
    index_of_group: dict[Group, int] = {}

    def encode(value: Any) -> object:
        """Returns what `json.dumps` writes for a dataclass: an index, or the fields by name.

        `json.dumps` calls this again for each field that is a dataclass.
        """
        if isinstance(value, Frame):
            # The index from before or, for a new frame, the next one.
            return index_of_frame.setdefault(value, len(index_of_frame))
        if isinstance(value, Group):
            return index_of_group.setdefault(value, len(index_of_group))
        return vars(value)

    # The ranks are encoded first, as this fills the two tables. They are most of the snapshot, so
    # they are not encoded again: the object is put together as text.
    ranks_json = json.dumps(snapshot.ranks, default=encode)
    frames = [[frame.file, frame.line, frame.function] for frame in index_of_frame]
    groups = [[group.name, group.description, _to_ranges(group.ranks)] for group in index_of_group]
    fields = [
        f'"time": {json.dumps(snapshot.time)}',
        f'"frames": {json.dumps(frames)}',
        f'"groups": {json.dumps(groups)}',
        f'"ranks": {ranks_json}',
    ]
    return "{" + ", ".join(fields) + "}"


def from_json(text: str) -> Snapshot:
    """Reads a snapshot that `to_json` has written."""
    data = json.loads(text)

    # Take the two tables out. What remains are the fields of `Snapshot`.
    frames = [Frame(*fields) for fields in data.pop("frames")]
    groups = []
    for name, description, ranges in data.pop("groups"):
        # `_from_ranges` caches its results, so its argument must be hashable: tuples, not lists.
        ranks = _from_ranges(tuple(tuple(bounds) for bounds in ranges))
        groups.append(Group(name, description, ranks))

    # Where the snapshot has a `Frame` or a `Group`, the data has its index in the table.
    return from_values(Snapshot, data, tables={Frame: frames, Group: groups})


RangeBounds = tuple[int, int, int]
"""Start, stop and step of a range."""


def _to_ranges(ranks: Sequence[int]) -> list[RangeBounds]:
    """Writes ranks as ranges, in the same order: `[0, 2, 4, 6]` becomes `[(0, 7, 2)]`.

    The ranks of a process group usually need only one or two ranges.
    """
    ranges: list[range] = []
    for rank in ranks:
        longer_range = _extended(ranges[-1], rank) if ranges else None
        if longer_range is not None:
            ranges[-1] = longer_range
        else:
            ranges.append(range(rank, rank + 1))
    return [(numbers.start, numbers.stop, numbers.step) for numbers in ranges]


def _extended(numbers: range, rank: int) -> range | None:
    """Returns a range with one rank more at its end, or None if the rank does not continue it."""
    # The second rank of a range determines its step: rank 2 after rank 0 makes it 2.
    step = rank - numbers.start if len(numbers) == 1 else numbers.step
    if step > 0 and rank == numbers[-1] + step:
        return range(numbers.start, rank + 1, step)
    return None


@functools.lru_cache(64)  # all machines send the same groups
def _from_ranges(ranges: tuple[RangeBounds, ...]) -> tuple[int, ...]:
    """Reads ranks that `_to_ranges` has written."""
    ranks: list[int] = []
    for start, stop, step in ranges:
        ranks.extend(range(start, stop, step))
    return tuple(ranks)
