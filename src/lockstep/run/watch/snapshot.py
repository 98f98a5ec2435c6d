"""The state of all ranks at one moment, as values that can be compared and written as JSON.

A *call* is one collective, or one send or receive, from torch's Flight Recorder. A call is
*pending* if it is not known to have completed. Calls with equal *keys* belong to one backend and
process group, and are numbered together by `seq`.

None always means "not obtained": a rank whose interpreter is blocked reports no calls, which is not
the same as a rank that has made none.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
        """Returns a text such as `ranks 0-1 (group '1', over gloo)`."""
        details = []
        name_is_a_number = self.name.isdigit()  # otherwise it is a hash of the ranks
        if name_is_a_number:
            details.append(f"group {self.name!r}")
        if self.backend != DEFAULT_BACKEND:
            details.append(f"over {self.backend}")
        ranks = format_ranks(self.ranks)
        return f"{ranks} ({', '.join(details)})" if details else ranks

    def is_same(self, other: NewGroup) -> bool:
        """Returns True if two ranks may be creating the same group: nothing that is known of it
        differs.
        """
        if self.name != other.name or self.ranks != other.ranks:
            return False
        # The default backend may be the very one that the other rank names.
        if DEFAULT_BACKEND in (self.backend, other.backend):
            return True
        return self.backend == other.backend


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
    """The stacks of its other Python threads."""
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
    steps: int | None = None
    """Optimizer steps so far. None if it has no heartbeat, as a program that is not Python."""

    @property
    def stopped(self) -> bool | None:
        """True if it is stopped by a signal (SIGSTOP, SIGTSTP) or by a debugger; None if its state
        is not known.
        """
        return None if self.state is None else self.state in STOPPED_STATES

    def pending_calls(self) -> list[CollectiveCall]:
        """Returns the calls that are not known to have completed, the oldest first.

        With Gloo these may be too many: what it names as its last completed call may be an older
        one.
        """
        completed = self.completed or {}  # None: it is not known of any call that it has completed
        pending = []
        for call in self.calls or ():
            if call.state == "completed":
                continue
            is_collective = not call.p2p  # `completed` says nothing about sends and receives
            # Calls are numbered from 1, so that 0 means: none of this group has completed.
            if is_collective and call.seq <= completed.get(call.key, 0):
                continue
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
    """Returns the snapshot with only the latest calls of each rank, so that it is short to send."""
    ranks = []
    for state in snapshot.ranks:
        if state.calls:
            state = replace(state, calls=state.calls[-max_calls:])
        ranks.append(state)
    return replace(snapshot, ranks=tuple(ranks))


def merge(parts: Sequence[Snapshot]) -> Snapshot:
    """Joins the snapshots that several machines took at about the same time.

    The ranks are in the order of their numbers; the time is that of the last snapshot.
    """
    ranks: list[RankState] = []
    for part in parts:
        ranks.extend(part.ranks)
    ranks.sort(key=lambda state: state.rank)
    return Snapshot(max(part.time for part in parts), tuple(ranks))


# --- Process groups that have the same name and are not the same


def with_unique_group_names(snapshot: Snapshot) -> Snapshot:
    """Returns the snapshot, with process groups renamed so that each name means one set of ranks.

    Each rank numbers the groups that it creates, and torch uses the numbers as names. If ranks
    create different groups, or create them in another order, one name stands for several groups.
    Those groups get their ranks as a part of the name: `1 of ranks 0-1`.
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
    """Returns one rank's state, in which groups with these names have their ranks in the name.

    The groups are renamed wherever the state mentions them: in `groups`, `calls` and `completed`.
    """
    new_names: dict[str, str] = {}  # by the present name
    groups: list[Group] = []
    for group in state.groups or ():
        if group.name in ambiguous_names:
            new_names[group.name] = f"{group.name} of {format_ranks(group.ranks)}"
            # A description would be shown instead of the name, and may be the same for all.
            group = replace(group, name=new_names[group.name], description="")
        groups.append(group)

    calls: list[CollectiveCall] = []
    for call in state.calls or ():
        new_name = new_names.get(call.group, call.group)  # the present one, if it is not ambiguous
        calls.append(replace(call, group=new_name))

    completed: dict[str, int] = {}
    for key, seq in (state.completed or {}).items():
        backend, _, name = key.partition(":")  # the key is `backend:group`
        new_name = new_names.get(name, name)
        completed[f"{backend}:{new_name}"] = seq

    # What was not obtained stays None: that is not the same as empty.
    return replace(
        state,
        groups=None if state.groups is None else tuple(groups),
        calls=None if state.calls is None else tuple(calls),
        completed=None if state.completed is None else completed,
    )


# --- JSON


def to_json(snapshot: Snapshot) -> str:
    """Writes a snapshot as JSON text, in which every frame and every group stands once.

    They stand in two tables, and everywhere else as their number in the table. All ranks list the
    members of their groups, so the text would otherwise grow with the square of the number of
    ranks. For the same reason members are written as ranges.
    """
    number_of_frame: dict[Frame, int] = {}
    number_of_group: dict[Group, int] = {}

    def encode(value: Any) -> object:
        """Called by json.dumps with each dataclass that it comes upon. Returns what is written."""
        # A frame or group that is met for the first time gets the next number.
        if isinstance(value, Frame):
            if value not in number_of_frame:
                number_of_frame[value] = len(number_of_frame)
            return number_of_frame[value]

        if isinstance(value, Group):
            if value not in number_of_group:
                number_of_group[value] = len(number_of_group)
            return number_of_group[value]

        return vars(value)  # the fields by name

    # This comes first, as it numbers the frames and groups. The rest is put around its text.
    ranks_text = json.dumps(snapshot.ranks, default=encode)
    frames = [[frame.file, frame.line, frame.function] for frame in number_of_frame]
    groups = [[group.name, group.description, _to_ranges(group.ranks)] for group in number_of_group]
    return (
        f'{{"time": {json.dumps(snapshot.time)}, "frames": {json.dumps(frames)}, '
        f'"groups": {json.dumps(groups)}, "ranks": {ranks_text}}}'
    )


def from_json(text: str) -> Snapshot:
    """Reads a snapshot that `to_json` has written."""
    data = json.loads(text)

    # The two tables are taken out. What stays are the fields of `Snapshot`.
    frames = [Frame(*fields) for fields in data.pop("frames")]
    groups = []
    for name, description, ranges in data.pop("groups"):
        # As tuples, since `_from_ranges` keeps its results in a cache.
        ranks = _from_ranges(tuple(tuple(bounds) for bounds in ranges))
        groups.append(Group(name, description, ranks))

    # Where a frame or group belongs, the values have its number in its table.
    return from_values(Snapshot, data, numbered={Frame: frames, Group: groups})


RangeBounds = tuple[int, int, int]
"""Start, stop and step of a range."""


def _to_ranges(ranks: Sequence[int]) -> list[RangeBounds]:
    """Returns the ranges that these ranks consist of, in the same order.

    The ranks of a group need only a few: 0, 2, 4, 6 are one range from 0 to 7 with step 2.
    """
    ranges: list[range] = []
    for rank in ranks:
        if ranges:
            last = ranges[-1]
            # A range of one rank has no step yet: its second rank determines it.
            step = rank - last.start if len(last) == 1 else last.step
            continues_last = step > 0 and rank == last[-1] + step
            if continues_last:
                ranges[-1] = range(last.start, rank + 1, step)
                continue

        ranges.append(range(rank, rank + 1))

    return [(numbers.start, numbers.stop, numbers.step) for numbers in ranges]


@functools.lru_cache(64)  # all machines send the same groups
def _from_ranges(ranges: tuple[RangeBounds, ...]) -> tuple[int, ...]:
    """Returns the ranks that `_to_ranges` has written as ranges."""
    ranks: list[int] = []
    for start, stop, step in ranges:
        ranks.extend(range(start, stop, step))
    return tuple(ranks)
