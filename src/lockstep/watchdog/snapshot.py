"""The state of all ranks at one moment, as seen from outside.

None always means "not obtained": a rank whose interpreter is blocked gives no calls, which is not
the same as a rank that has made none.

What instruments write, as values: faulthandler's stacks, the Flight Recorder's answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Frame:
    """One line of a Python stack."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]
"""Innermost first."""


@dataclass(frozen=True, kw_only=True)
class Call:
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
    frames: Stack | None = None


@dataclass(frozen=True)
class Group:
    """A process group that a rank is a member of."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank."""

    rank: int
    host: str
    pid: int
    alive: bool
    exit_code: int | None = None
    signal: int | None = None
    """The number of the signal that ended it."""
    state: str | None = None
    """The main thread's state as in `/proc/PID/stat`: R, S, D, T (stopped), t (traced), ..."""
    cpu_s: float | None = None
    """Processor time of all its threads since its start."""
    main_cpu_s: float | None = None
    """Processor time of its main thread."""
    stack: Stack | None = None
    """Of the main thread."""
    threads: tuple[Stack, ...] | None = None
    """The stacks of its other Python threads."""
    thread_ids: tuple[int, ...] = ()
    """Their identifiers, as in `Call.thread`, in the same order."""
    answered: bool | None = None
    """Whether its Flight Recorder answered; None: it has none (no process group so far)."""
    calls: tuple[Call, ...] | None = None
    """Its latest collectives, oldest first."""
    completed: Mapping[str, int] | None = None
    """The last completed collective by `backend:group`. Gloo's can lag behind by a few."""
    groups: tuple[Group, ...] | None = None
    steps: int | None = None
    """Optimizer steps so far."""
    last_step_s: float | None = None
    """When the last one ended, by the wall clock of its host; None: there was none."""
    step_took_s: float | None = None
    """From the end of the last step but one to the end of the last."""

    @property
    def stopped(self) -> bool | None:
        """Stopped by a signal (SIGSTOP, SIGTSTP)."""
        return None if self.state is None else self.state == "T"


@dataclass(frozen=True)
class Snapshot:
    """All ranks at one moment; `time` is the wall clock of the machine that looked."""

    time: float
    ranks: tuple[RankState, ...] = field(default=())

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one host: of several the clocks differ."""
        return len({state.host for state in self.ranks}) == 1

    def __getitem__(self, rank: int) -> RankState:
        return next(state for state in self.ranks if state.rank == rank)


def shorten(snapshot: Snapshot, calls: int = 100) -> Snapshot:
    """The same with the latest `calls` collectives of each rank alone, for sending it."""
    return replace(
        snapshot,
        ranks=tuple(
            state if state.calls is None else replace(state, calls=state.calls[-calls:])
            for state in snapshot.ranks
        ),
    )


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """One snapshot of the ranks of several machines, taken at about the same time."""
    parts = list(snapshots)
    ranks = sorted((state for part in parts for state in part.ranks), key=lambda s: s.rank)
    return Snapshot(max((part.time for part in parts), default=0.0), tuple(ranks))


def to_json(snapshot: Snapshot) -> str:
    """As text; a frame that occurs many times is written once."""
    frames: dict[tuple[str, int, str], int] = {}
    written: dict[int, list[int]] = {}

    def number(stack: Stack | None) -> list[int] | None:
        if stack is None:
            return None
        if id(stack) not in written:
            written[id(stack)] = [
                frames.setdefault((f.file, f.line, f.function), len(frames)) for f in stack
            ]
        return written[id(stack)]

    ranks = []
    for state in snapshot.ranks:
        bare = asdict(replace(state, stack=None, threads=None, calls=None))
        bare["stack"] = number(state.stack)
        if state.threads is not None:
            bare["threads"] = [number(stack) for stack in state.threads]
        if state.calls is not None:
            bare["calls"] = [{**vars(c), "frames": number(c.frames)} for c in state.calls]
        ranks.append(bare)
    return json.dumps({"time": snapshot.time, "frames": list(frames), "ranks": ranks})


def from_json(text: str) -> Snapshot:
    """The opposite of `to_json`.

    Raises:
        ValueError: the text is not such a snapshot.
    """
    try:
        data = json.loads(text)
        frames = [Frame(*frame) for frame in data["frames"]]
        return Snapshot(data["time"], tuple(_rank(state, frames) for state in data["ranks"]))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a snapshot: {error!r}") from error


def _rank(data: dict[str, Any], frames: list[Frame]) -> RankState:
    def stack(numbers: list[int] | None) -> Stack | None:
        return None if numbers is None else tuple(frames[n] for n in numbers)

    if data["threads"] is not None:
        data["threads"] = tuple(stack(numbers) for numbers in data["threads"])
    data["thread_ids"] = tuple(data["thread_ids"])
    if data["calls"] is not None:
        data["calls"] = tuple(
            Call(
                **{
                    **call,
                    "input_sizes": tuple(tuple(size) for size in call["input_sizes"]),
                    "output_sizes": tuple(tuple(size) for size in call["output_sizes"]),
                    "dtypes": tuple(call["dtypes"]),
                    "frames": stack(call["frames"]),
                }
            )
            for call in data["calls"]
        )
    if data["groups"] is not None:
        data["groups"] = tuple(
            Group(g["name"], g["description"], tuple(g["ranks"])) for g in data["groups"]
        )
    return RankState(**{**data, "stack": stack(data["stack"])})


_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


def parse_stack(text: str) -> Stack | None:
    """The last stack in what `faulthandler` writes for one thread; None: there is none.

    It has the 100 innermost frames.
    """
    _, heading, last = text.rpartition("Stack (most recent call first):\n")
    if not heading:
        return None
    found = [_FRAME.fullmatch(line) for line in last.splitlines()]
    return tuple(
        Frame(frame[1], 0 if frame[2] == "???" else int(frame[2]), frame[3])
        for frame in found
        if frame
    )


@dataclass(frozen=True)
class Flight:
    """One answer of a rank's Flight Recorder."""

    request: int
    """Which question it answers."""
    calls: tuple[Call, ...]
    completed: dict[str, int]
    groups: tuple[Group, ...]
    stacks: dict[int, Stack]
    """By the thread's identifier."""


def parse_flight(text: str) -> Flight | None:
    """The answer that `launch.instruments` writes; None where the recorder could not be read.

    torch's two forms are understood: that of `_dump_fr_trace_json` (numbers as texts, no frames)
    and that of `_dump_fr_trace` turned into JSON.
    """
    try:
        data = json.loads(text)
        if "records" not in data:
            return None
        calls: list[Call] = []
        completed: dict[str, int] = {}
        for record in data["records"]:
            entries = record.get("entries") or ()
            calls += [_call(entry) for entry in entries]
            completed |= _completed(record.get("pg_status") or {}, entries)
        groups = tuple(
            Group(g["name"], g["description"], tuple(g["ranks"])) for g in data["groups"]
        )
        in_order = tuple(sorted(calls, key=lambda c: c.time_s))
        stacks = {
            int(ident): tuple(Frame(*frame) for frame in stack)
            for ident, stack in data["stacks"].items()
        }
        return Flight(data["request"], in_order, completed, groups, stacks)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _call(entry: Mapping[str, Any]) -> Call:
    backend, _, op = entry["profiling_name"].partition(":")
    frames = entry.get("frames")
    thread = str(entry.get("thread_id", ""))
    return Call(
        group=str(entry["process_group"][0]),
        backend=backend if op else "",
        seq=int(entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]),
        op=op or backend,
        input_sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        output_sizes=tuple(tuple(size) for size in entry["output_sizes"]),
        dtypes=tuple(str(dtype).lower() for dtype in entry["input_dtypes"]),
        p2p=bool(entry["is_p2p"]),
        state=entry["state"],
        time_s=int(entry["time_created_ns"]) / 1e9,
        thread=int(thread) if thread.isdigit() else None,
        frames=None
        if frames is None
        else tuple(Frame(f["filename"], int(f["line"]), f["name"]) for f in frames),
    )


def _completed(status: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    keys = {}
    for entry in entries:
        backend = entry["profiling_name"].partition(":")[0]
        keys[str(entry["pg_id"])] = f"{backend}:{entry['process_group'][0]}"
    return {
        keys[str(number)]: int(found["last_completed_collective"])
        for number, found in status.items()
        if str(number) in keys
    }
