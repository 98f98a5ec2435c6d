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
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, get_args, get_origin, get_type_hints

from lockstep.watchdog.probe import STACK_SIGNAL, Heartbeat, read_heartbeat
from lockstep.watchdog.stacks import Frame, Stack, parse_stack

_T = TypeVar("_T")


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
    """Whether its thread that answers did; None: it has none, or its recorder cannot be read."""
    calls: tuple[Call, ...] | None = None
    """Its latest collectives, oldest first."""
    completed: Mapping[str, int] | None = None
    """The last completed collective by `backend:group`. Gloo's can lag behind by a few."""
    groups: tuple[Group, ...] | None = None
    steps: int | None = None
    """Optimizer steps so far."""

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
    frames: dict[Frame, int] = {}

    def encode(value: Any) -> object:
        if isinstance(value, Frame):
            return frames.setdefault(value, len(frames))
        return vars(value)

    ranks = json.dumps(snapshot.ranks, default=encode)
    listed = json.dumps([(frame.file, frame.line, frame.function) for frame in frames])
    return f'{{"time": {snapshot.time!r}, "frames": {listed}, "ranks": {ranks}}}'


def from_json(text: str) -> Snapshot:
    """The opposite of `to_json`.

    Raises:
        ValueError: the text is not such a snapshot.
    """
    try:
        data = json.loads(text)
        frames = [Frame(*frame) for frame in data.pop("frames")]
        return from_values(Snapshot, data, {Frame: frames.__getitem__})
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"not a snapshot: {error!r}") from error


def from_values(
    kind: type[_T], values: Any, readers: Mapping[Any, Callable[[Any], object]] | None = None
) -> _T:
    """A dataclass from what `asdict` and JSON have made of it, by the types of its fields.

    Args:
        kind: a dataclass; its fields are dataclasses, tuples, texts, numbers, or one of them or
            None.
        values: the fields by name.
        readers: by type, what reads the values of that type in another way.

    Raises:
        TypeError, KeyError, AttributeError: these are not its values.
    """
    read: _T = _read(kind, values, readers or {})
    return read


def _read(kind: Any, values: Any, readers: Mapping[Any, Callable[[Any], object]]) -> Any:
    if kind in readers:
        return readers[kind](values)
    if isinstance(kind, type) and is_dataclass(kind):
        types = _types_of_fields(kind)
        read = {name: _read(types[name], value, readers) for name, value in values.items()}
        return kind(**read)
    inner = get_args(kind)
    if values is None or not inner:
        return values
    if get_origin(kind) is tuple:
        of_all = inner[-1] is Ellipsis
        return tuple(
            _read(inner[0 if of_all else i], value, readers) for i, value in enumerate(values)
        )
    # `Stack | None` is one type or None; of a Literal or a Mapping the values are as they are.
    return _read(inner[0], values, readers) if type(None) in inner else values


@functools.cache
def _types_of_fields(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


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
    """The answer that a probe writes; None where the recorder could not be read.

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


_POLL_S = 0.02
_PATIENCE_S = 0.3
"""A rank that has not answered for so long is asked by a signal, which needs no Python."""
_WAIT_S, _WAIT_FOR_LINES_S = 1.0, 4.0
_requests = itertools.count(1)


class RankProcess(Protocol):
    """A rank on this machine, as the launcher that started it knows it."""

    rank: int
    pid: int | None
    folder: Path
    """Where its probe writes."""
    code: int | None
    """None while it runs; else its exit code, or minus the number of the signal that ended it."""


class ProcessStatus(NamedTuple):
    """What the kernel says of a process."""

    state: str
    """The main thread's: R, S, D, T, t, Z, ..."""
    cpu_s: float
    """Of all its threads."""
    main_cpu_s: float | None
    """Of its main thread."""
    shows_stacks: bool
    """It handles `STACK_SIGNAL`; another would be ended by it."""


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
    main = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        state, main = _stat(folder / "task" / str(pid) / "stat")
    caught = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    mask = int(caught[0], 16) if caught else 0
    return ProcessStatus(state, cpu_s, main, bool(mask >> (STACK_SIGNAL - 1) & 1))


def _stat(path: Path) -> tuple[str, float]:
    fields = path.read_text().rpartition(")")[2].split()  # the name before it may hold anything
    ticks = int(fields[11]) + int(fields[12])
    return fields[0], ticks / os.sysconf("SC_CLK_TCK")


def take_snapshot(
    processes: Sequence[RankProcess], *, lines: bool = False, wait_s: float | None = None
) -> Snapshot:
    """Asks all ranks of this machine at once.

    Args:
        processes: the ranks.
        lines: also asks for the lines of earlier collectives, for a verdict that is to be reported.
            It stops a rank's Python for some tenths of a second.
        wait_s: how long to wait for their answers at most, 1 s by default and 4 s with `lines`. It
            ends earlier when all are there; what has not come by then is None.
    """
    if wait_s is None:
        wait_s = _WAIT_FOR_LINES_S if lines else _WAIT_S
    number = next(_requests)
    requests = [_Request(process, number) for process in processes]
    for request in requests:
        if not request.ask(lines):
            request.signal()
    start = time.monotonic()
    while True:
        for request in requests:
            request.collect()
        waited = time.monotonic() - start
        if all(request.complete for request in requests) or waited > wait_s:
            break
        if waited > min(_PATIENCE_S, wait_s / 2):
            for request in requests:
                if not request.complete:
                    request.signal()
        time.sleep(_POLL_S)
    return Snapshot(time.time(), tuple(request.result() for request in requests))


class _Request:
    """One rank while it is being asked."""

    def __init__(self, process: RankProcess, number: int) -> None:
        self._process, self._number = process, number
        self._status = read_process(process.pid or 0) if process.code is None else None
        self._heartbeat: Heartbeat | None = read_heartbeat(process.folder)
        if self._heartbeat is not None and self._heartbeat.pid != process.pid:
            self._heartbeat = None  # of the rank's earlier life, or of another
        self._asked = self._signalled = False
        self._flight: Flight | None = None
        self._stack: Stack | None = None
        self._stacks_from = 0
        self._written = -1

    @property
    def complete(self) -> bool:
        """Whether all has come that it was asked for."""
        if self._asked:
            return self._flight is not None
        return not self._signalled or self._stack is not None

    def ask(self, lines: bool) -> bool:
        """Asks the thread that answers in the rank; False: there is none, or it cannot."""
        if self._process.code is not None or (self._status and self._status.state in "TZ"):
            return False
        try:
            pipe = os.open(self._process.folder / "ask", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads
            return False
        try:
            os.write(pipe, f"{self._number}{' lines' if lines else ''}\n".encode())
        except OSError:  # full: it has not read for long
            return False
        finally:
            os.close(pipe)
        self._asked = True
        return True

    def signal(self) -> None:
        """For a rank that cannot answer; a signal cuts short what waits in C, such as `sleep`."""
        status, pid = self._status, self._process.pid
        if self._signalled or not pid or status is None or status.state in "TZ":
            return
        with contextlib.suppress(OSError):
            if status.shows_stacks:
                self._stacks_from = (self._process.folder / "stacks.txt").stat().st_size
                os.kill(pid, STACK_SIGNAL)
                self._signalled = True

    def collect(self) -> None:
        """Reads what has come so far."""
        folder = self._process.folder
        if self._signalled and self._stack is None:
            with contextlib.suppress(OSError), open(folder / "stacks.txt", "rb") as file:
                file.seek(self._stacks_from)
                text = file.read().decode(errors="replace")
                if len(text) == self._written:  # the handler writes piece by piece
                    self._stack = parse_stack(text)
                self._written = len(text)
        if self._asked and self._flight is None:
            head = f'{{"request": {self._number},'
            with contextlib.suppress(OSError), open(folder / "flight.json") as file:
                if file.read(len(head)) == head:  # an answer can be megabytes: none is read twice
                    self._flight = parse_flight(head + file.read())
                    self._asked = self._flight is not None

    def result(self) -> RankState:
        """What is known of the rank."""
        code, status, heartbeat, flight = (
            self._process.code, self._status, self._heartbeat, self._flight
        )  # fmt: skip
        state = RankState(
            rank=self._process.rank,
            host=socket.gethostname(),
            pid=self._process.pid or 0,
            alive=code is None and (status is None or status.state not in "ZX"),
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            stack=self._stack,
            steps=None if heartbeat is None else heartbeat.steps,
            answered=(flight is not None) if self._asked else None,
        )
        if status is not None:
            state = replace(
                state, state=status.state, cpu_s=status.cpu_s, main_cpu_s=status.main_cpu_s
            )
        if flight is not None:
            state = replace(
                state, calls=flight.calls, completed=flight.completed, groups=flight.groups
            )
        if flight is not None and heartbeat is not None:
            others = dict(flight.stacks)
            main = others.pop(heartbeat.main_thread, self._stack)
            state = replace(
                state, stack=main, threads=tuple(others.values()), thread_ids=tuple(others)
            )
        return state
