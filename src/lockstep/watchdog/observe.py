"""The ranks as seen from outside: what they are asked, what the kernel says, and keeping it.

Looking at the ranks of all machines at about the same time.

Each launcher can look at its own ranks alone. One that looks closely lets the others know; they
look as well, whatever they are doing, and the one that asked puts the parts together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import linecache
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.launcher.rendezvous import Meeting
from lockstep.watchdog.messages import Finding, render
from lockstep.watchdog.probe import STACK_SIGNAL, Heartbeat, read_heartbeat
from lockstep.watchdog.snapshot import (
    Flight,
    Frame,
    RankState,
    Snapshot,
    Stack,
    from_json,
    merge,
    parse_flight,
    parse_stack,
    shorten,
    to_json,
)

_POLL_S = 0.02
_PATIENCE_S = 0.3
"""A rank that has not answered for so long is asked by a signal, which needs no Python."""
_requests = itertools.count(1)


@dataclass(frozen=True)
class Watched:
    """A rank and how it ended, if it did; the one who reaps it says so."""

    rank: int
    pid: int
    folder: Path
    code: int | None = None
    """None while it runs; else its exit code, or minus the number of the signal that ended it."""
    host: str = field(default_factory=socket.gethostname)


class Process(NamedTuple):
    """What the kernel says of a process."""

    state: str
    """The main thread's: R, S, D, T, t, Z, ..."""
    cpu_s: float
    """Of all its threads."""
    main_cpu_s: float | None
    """Of its main thread."""
    shows_stacks: bool
    """It handles `STACK_SIGNAL`; another would be ended by it."""


def read_process(pid: int, root: Path = Path("/proc")) -> Process | None:
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
    return Process(state, cpu_s, main, bool(mask >> (STACK_SIGNAL - 1) & 1))


def _stat(path: Path) -> tuple[str, float]:
    fields = path.read_text().rpartition(")")[2].split()  # the name before it may hold anything
    ticks = int(fields[11]) + int(fields[12])
    return fields[0], ticks / os.sysconf("SC_CLK_TCK")


@dataclass
class _Look:
    """One rank while it is being asked."""

    watched: Watched
    process: Process | None
    beacon: Heartbeat | None
    request: int = 0
    """The number of the question that it is to answer; 0: it was not asked."""
    flight: Flight | None = None
    signalled: bool = False
    stacks_from: int = 0
    written: int = -1
    stack: Stack | None = None

    @property
    def complete(self) -> bool:
        if self.request:
            return self.flight is not None
        return not self.signalled or self.stack is not None


def take_snapshot(
    ranks: Sequence[Watched], wait_s: float = 1.0, *, lines: bool = False
) -> Snapshot:
    """Looks at all ranks of this machine at once.

    Args:
        ranks: those to look at.
        wait_s: how long to wait for their answers at most. It ends earlier when all are there;
            what has not come by then is None.
        lines: also asks for the lines of earlier collectives, for a verdict that is to be told.
            It stops a rank's Python for some tenths of a second.
    """
    request = next(_requests)
    looks = [_look(watched) for watched in ranks]
    for look in looks:
        if not _ask(look, request, lines):
            _signal(look)
    start = time.monotonic()
    while True:
        for look in looks:
            _collect(look)
        waited = time.monotonic() - start
        if all(look.complete for look in looks) or waited > wait_s:
            break
        if waited > min(_PATIENCE_S, wait_s / 2):
            for look in looks:
                if not look.complete and not look.signalled:
                    _signal(look)
        time.sleep(_POLL_S)
    now, monotonic = time.time(), time.monotonic()
    return Snapshot(now, tuple(_state(look, now - monotonic) for look in looks))


def keep(snapshot: Snapshot, folder: Path, finding: Finding | None = None) -> Path:
    """Writes `hang.json` and, for people, `hang.txt` into a folder; returns the latter's path.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "hang.json", to_json(snapshot))
    parts = [] if finding is None else [render(finding, linecache.getline)]
    parts += [_told(state) for state in snapshot.ranks]
    _write(folder / "hang.txt", "\n\n".join(parts) + "\n")
    return folder / "hang.txt"


def _look(watched: Watched) -> _Look:
    process = None if watched.code is not None else read_process(watched.pid)
    beacon = read_heartbeat(watched.folder)
    if beacon is not None and beacon.pid != watched.pid:
        beacon = None  # of the rank's earlier life, or of another
    return _Look(watched, process, beacon)


def _ask(look: _Look, request: int, lines: bool) -> bool:
    if look.watched.code is not None or (look.process is not None and look.process.state in "TZ"):
        return False
    try:
        pipe = os.open(look.watched.folder / "ask", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # nobody reads: no process group so far
        return False
    try:
        os.write(pipe, f"{request}{' lines' if lines else ''}\n".encode())
    except OSError:  # full: it has not read for long
        return False
    finally:
        os.close(pipe)
    look.request = request
    return True


def _signal(look: _Look) -> None:
    """For a rank that cannot answer; a signal cuts short what waits in C, such as `sleep`."""
    process = look.process
    if process is None or process.state in "TZ" or not process.shows_stacks:
        return
    with contextlib.suppress(OSError):
        look.stacks_from = (look.watched.folder / "stacks.txt").stat().st_size
        os.kill(look.watched.pid, STACK_SIGNAL)
        look.signalled = True


def _collect(look: _Look) -> None:
    folder = look.watched.folder
    if look.signalled and look.stack is None:
        with contextlib.suppress(OSError), open(folder / "stacks.txt", "rb") as file:
            file.seek(look.stacks_from)
            text = file.read().decode(errors="replace")
            if len(text) == look.written:  # the handler writes piece by piece
                look.stack = parse_stack(text)
            look.written = len(text)
    if look.request and look.flight is None:
        head = f'{{"request": {look.request},'
        with contextlib.suppress(OSError), open(folder / "flight.json") as file:
            if file.read(len(head)) == head:  # an answer can be megabytes: none is read twice
                look.flight = parse_flight(head + file.read())
                look.request = look.request if look.flight is not None else 0


def _state(look: _Look, to_wall_clock: float) -> RankState:
    watched, process, beacon, flight = look.watched, look.process, look.beacon, look.flight
    main, others = look.stack, None
    if flight is not None and beacon is not None:
        main = flight.stacks.get(beacon.main_thread, main)
        others = {i: stack for i, stack in flight.stacks.items() if i != beacon.main_thread}
    return RankState(
        rank=watched.rank,
        host=watched.host,
        pid=watched.pid,
        alive=watched.code is None and (process is None or process.state not in "ZX"),
        exit_code=watched.code if watched.code is not None and watched.code >= 0 else None,
        signal=-watched.code if watched.code is not None and watched.code < 0 else None,
        state=None if process is None else process.state,
        cpu_s=None if process is None else process.cpu_s,
        main_cpu_s=None if process is None else process.main_cpu_s,
        stack=main,
        threads=None if others is None else tuple(others.values()),
        thread_ids=tuple(others or ()),
        answered=(flight is not None) if look.request else None,
        calls=None if flight is None else flight.calls,
        completed=None if flight is None else flight.completed,
        groups=None if flight is None else flight.groups,
        steps=None if beacon is None else beacon.steps,
        last_step_s=None
        if beacon is None or beacon.steps == 0
        else beacon.last_step + to_wall_clock,
        step_took_s=None if beacon is None or beacon.steps < 2 else beacon.took_s,
    )


def _told(state: RankState) -> str:
    lines = [f"rank {state.rank} on {state.host}, process {state.pid}"]
    if state.exit_code is not None or state.signal is not None:
        lines[0] += f": ended, exit code {state.exit_code}, signal {state.signal}"
    if state.steps is not None:
        lines.append(f"  optimizer steps: {state.steps}")
    lines += _told_stack("main thread", state.stack)
    for stack in state.threads or ():
        lines += _told_stack("another thread", stack)
    if state.calls is None:
        lines.append("  collectives: not obtained")
    else:
        lines.append("  collectives, the latest last:")
        lines += [
            f"    {call.backend}:{call.group} {call.seq} {call.op} {list(call.input_sizes)} "
            f"{call.state} {time.strftime('%H:%M:%S', time.localtime(call.time_s))}"
            for call in state.calls[-20:]
        ]
    return "\n".join(lines)


def _told_stack(name: str, stack: Sequence[Frame] | None) -> list[str]:
    if stack is None:
        return [f"  {name}: no stack was obtained"]
    return [
        f"  {name}, innermost first:",
        *(f"    {frame.file}:{frame.line} in {frame.function}" for frame in stack),
    ]


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.new")
    # Names of files may hold bytes that are no text in UTF-8.
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)


_KEY = "snapshot"
_CALLS, _FEW_CALLS = 100, 10
"""Collectives of each rank that are told; the fewer where many ranks make that too long."""
_ANSWER_S, _LINES_S = 2.0, 5.0
"""The other launchers are waited for so long; those that fetch the lines of earlier collectives
for longer."""
_ANSWER_POLL_S = 0.02


class Sharing:
    """One launcher's part, for one attempt.

    Args:
        meeting: carries what is told.
        node: rank of this machine.
        nodes: of how many.
        take: looks at the ranks of this machine; its argument: with the lines of earlier
            collectives.
    """

    def __init__(
        self, meeting: Meeting, node: int, nodes: int, take: Callable[[bool], Snapshot]
    ) -> None:
        self._meeting, self._node, self._nodes, self._take = meeting, node, nodes, take
        self._told = self._looks = 0
        self._with_lines = False
        self._answered: dict[int, int] = {}
        """The last look of each other launcher that it has had an answer to."""

    def all_ranks(self, own: Snapshot) -> Snapshot | None:
        """Makes of this machine's ranks all ranks of the run; waits some seconds at most.

        Returns:
            None where a machine has not answered in time, or none can.
        """
        if self._nodes == 1:
            return own
        if not self._meeting.hears:
            return None
        before = {node: told["number"] for node, told in self._others().items()}
        self._looks += 1
        self._with_lines = _has_lines(own)
        self._tell(own)
        limit = time.monotonic() + (_LINES_S if self._with_lines else _ANSWER_S)
        while not self._meeting.lost_nodes():
            parts = [
                from_json(json.dumps(told["snapshot"]))
                for node, told in self._others().items()
                if told["number"] > before.get(node, 0)
            ]
            if len(parts) == self._nodes - 1:
                return merge([own, *parts])
            if time.monotonic() > limit:
                break
            time.sleep(_ANSWER_POLL_S)
        return None

    def answer(self) -> None:
        """Looks at the ranks of this machine if another launcher wants it to; call it often."""
        asking = [
            told
            for node, told in (self._others().items() if self._nodes > 1 else ())
            if told["look"] > self._answered.get(node, 0)
        ]
        if asking:
            self._tell(self._take(any(told["lines"] for told in asking)))

    def _others(self) -> dict[int, dict[str, Any]]:
        heard = self._meeting.heard(_KEY)
        return {node: told for node, told in heard.items() if node != self._node}

    def _tell(self, own: Snapshot) -> None:
        self._answered = {node: told["look"] for node, told in self._others().items()}
        self._told += 1
        values = {"number": self._told, "look": self._looks, "lines": self._with_lines}
        for calls in (_CALLS, _FEW_CALLS):
            short = json.loads(to_json(shorten(own, calls)))
            if self._meeting.tell(_KEY, {**values, "snapshot": short}):
                break


def _has_lines(snapshot: Snapshot) -> bool:
    return any(call.frames is not None for state in snapshot.ranks for call in state.calls or ())
