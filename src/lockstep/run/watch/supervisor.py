"""Watches the ranks while they run: what hangs, what is slow; takes snapshots of them.

Cheap most of the time: a few bytes of each rank's heartbeat. Only when a rank has made no step for
`HangRules.after` seconds are snapshots of all ranks taken, two of them, and handed to the pure
functions that know the verdicts: `lockstep.run.watch.hang`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.distributed.network import wait_until
from lockstep.run.machines.rendezvous import Rendezvous
from lockstep.run.start.plan import HangRules
from lockstep.run.start.process import Process
from lockstep.run.watch import hang
from lockstep.run.watch.evidence import write_whole
from lockstep.run.watch.messages import Verdict, render, render_state
from lockstep.run.watch.probe import read_heartbeat
from lockstep.run.watch.snapshot import (
    STOPPED,
    RankState,
    Snapshot,
    cpu_of_children,
    from_json,
    harmless_signal,
    merge,
    read_process,
    shorten,
    to_json,
    with_answer,
)
from lockstep.run.watch.stacks import parse_stack

_POLL_S = 0.02
_SIGNAL_AFTER_S = 0.3
"""A rank that has not answered for so long is asked by a signal, which needs no Python."""
_WAIT_S, _WAIT_FOR_LINES_S = 1.0, 4.0
_requests = itertools.count(1)


def take_snapshot(
    processes: Sequence[Process], *, lines: bool = False, wait_s: float | None = None
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
        request.ask(lines)
    start = time.monotonic()
    while True:
        for request in requests:
            request.collect()
        late = [request for request in requests if not request.complete]
        waited = time.monotonic() - start
        if not late or waited > wait_s:
            break
        if waited > min(_SIGNAL_AFTER_S, wait_s / 2):
            for request in late:
                request.signal()
        time.sleep(_POLL_S)
    used = cpu_of_children([request.state.pid for request in requests])
    states = [replace(r.state, children_cpu_s=used.get(r.state.pid)) for r in requests]
    return Snapshot(time.time(), tuple(states))


class _Request:
    """One rank while it is being asked."""

    def __init__(self, process: Process, number: int) -> None:
        self._process, self._number = process, number
        code = process.code
        status = read_process(process.pid or 0) if code is None else None
        self._evidence = process.evidence
        heartbeat = read_heartbeat(self._evidence.heartbeat)
        if heartbeat is not None and heartbeat.pid != process.pid:
            heartbeat = None  # of the rank's earlier life, or of another
        self._main_thread = 0 if heartbeat is None else heartbeat.main_thread
        self._frozen = code is not None or (status is not None and status.state in f"{STOPPED}Z")
        self._shows_stacks = status is not None and status.shows_stacks and not self._frozen
        self._main_switches = None if status is None else status.main_switches
        self._stacks_from: int | None = None
        self._written = -1
        self.state = RankState(
            rank=process.rank,
            host=socket.gethostname(),
            pid=process.pid or 0,
            alive=code is None and (status is None or status.state not in "ZX"),
            code=code,
            state=None if status is None else status.state,
            cpu_s=None if status is None else status.cpu_s,
            main_cpu_s=None if status is None else status.main_cpu_s,
            steps=None if heartbeat is None else heartbeat.steps,
        )
        """What is known of the rank so far."""

    @property
    def complete(self) -> bool:
        """Whether all has come that it was asked for."""
        if self.state.answered is not None:
            return self.state.answered
        return not self._shows_stacks or self.state.stack is not None

    def ask(self, lines: bool) -> None:
        """Asks the thread that answers in the rank, if the rank has ever had one."""
        if self._frozen or self.state.steps is None:
            return
        try:
            pipe = os.open(self._evidence.ask, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # it is gone, or nobody reads
            return
        self.state = replace(self.state, answered=False)
        with contextlib.suppress(BlockingIOError):  # it is full: nobody has read for long
            os.write(pipe, f"{self._number}{' lines' if lines else ''}\n".encode())
        os.close(pipe)

    def signal(self) -> None:
        """For a rank that cannot answer, where that harms nothing."""
        if self._shows_stacks and self._stacks_from is None:
            with contextlib.suppress(OSError):
                size = self._evidence.stacks.stat().st_size
                answers = self.state.answered is not None
                number = harmless_signal(self.state.pid, self._main_switches, answers=answers)
                if number is not None:
                    os.kill(self.state.pid, number)
                    self._stacks_from = size

    def collect(self) -> None:
        """Reads what has come so far."""
        state = self.state
        if self._stacks_from is not None and state.stack is None:
            with contextlib.suppress(OSError), open(self._evidence.stacks, "rb") as file:
                file.seek(self._stacks_from)
                text = file.read().decode(errors="replace")
                if len(text) == self._written:  # the handler writes piece by piece
                    state = replace(state, stack=parse_stack(text, self._main_thread))
                self._written = len(text)
        if state.answered is False:
            head = f'{{"request": {self._number},'
            with contextlib.suppress(OSError), open(self._evidence.answer) as file:
                if file.read(len(head)) == head:  # an answer can be megabytes: none is read twice
                    state = with_answer(state, head + file.read(), self._main_thread)
        self.state = state


_HEARTBEATS_EVERY_S = 0.5
_BETWEEN_SNAPSHOTS_S = 1.5
"""Between the two snapshots for a verdict: long enough to see whether a rank moves."""
_PAUSE_S = 1.5
_LONGEST_PAUSE_S = 4.0
"""Between two pairs of snapshots; it grows while they show that the ranks move."""
_PATIENCE_S = 1.0
"""Waiting that is no deadlock is reported when it has lasted so much longer."""
_REPORTED_AGAIN = 4.0
"""The same waiting is reported again when it is so many times as long as at the last report."""
_AWAITED = ("working", "blocked", "loading", "gil", "unknown")
"""Kinds of verdicts by which the others wait for a rank that may yet come."""
_SLOW_STEPS = 4.0
"""No snapshots are taken before a rank is quiet for so many of its own steps."""
_FIRST_STRAGGLER_S = 6.0
_SECOND_STRAGGLER_S = 2.0
_LONGEST_STRAGGLER_PAUSE_S = 600.0


class Supervisor:
    """Watches the ranks of one attempt.

    Args:
        processes: the ranks of this machine.
        rules: when a run counts as hanging.
        folder: where `hang.txt` and `hang.json` are written.
        report: called with each text for the user.
        exchange: with the other machines of the run; without it the ranks here are all.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        rules: HangRules,
        folder: Path,
        report: Callable[[str], None],
        exchange: SnapshotExchange | None = None,
    ) -> None:
        self._processes, self._rules, self._folder = processes, rules, folder
        self._report, self._exchange = report, exchange
        turn = exchange.turn_s if exchange else 0.0
        self._quiet_for = rules.after - _BETWEEN_SNAPSHOTS_S + turn
        now = time.monotonic()
        self._began = self._moved_at = now
        """When a step, or two snapshots, last showed that something moves."""
        self._next_heartbeats = self._next_snapshot = now
        self._pause = _PAUSE_S
        self._earlier: tuple[float, Snapshot] | None = None
        self._reported: dict[object, float] = {}
        self._slow: tuple[int, ...] = ()
        """The straggler of the last snapshot."""
        self._straggler_pause = _FIRST_STRAGGLER_S
        self._next_straggler = now + _FIRST_STRAGGLER_S + turn
        self.verdict: Verdict | None = None
        """Why the run cannot go on."""

    def check(self) -> bool:
        """Whether to stop the run; to be called often."""
        now = time.monotonic()
        if self.verdict is None and now >= self._next_heartbeats:
            self._next_heartbeats = now + _HEARTBEATS_EVERY_S
            quiet = self._quiet(now)
            if self._earlier is not None:
                if now - self._earlier[0] >= _BETWEEN_SNAPSHOTS_S:
                    self._judge(now, self._earlier[1])
                    self._earlier = None
            elif quiet >= self._quiet_for and now >= self._next_snapshot:
                before = self._snapshot()
                self._earlier = None if before is None else (now, before)
            elif now >= self._next_straggler:
                self._check_for_stragglers(now)
        return self.verdict is not None and self._rules.on_hang == "stop"

    def _quiet(self, now: float) -> float:
        """Seconds for which the quietest rank has made no step, less what its steps take."""
        longest = 0.0
        for process in self._processes:
            heartbeat = read_heartbeat(process.evidence.heartbeat)
            last_step, took = (heartbeat.last_step, heartbeat.took_s) if heartbeat else (0.0, 0.0)
            self._moved_at = max(self._moved_at, last_step)
            patience = max(0.0, _SLOW_STEPS * took - self._rules.after)
            longest = max(longest, now - max(self._began, last_step) - patience)
        return longest

    def _snapshot(self, *, lines: bool = False) -> Snapshot | None:
        if self._exchange is None:
            return take_snapshot(self._processes, lines=lines)
        return self._exchange.of_all_ranks(lines=lines)

    def _judge(self, now: float, before: Snapshot) -> None:
        self._next_snapshot = now + self._pause
        later = self._snapshot()
        if later is None:
            return
        verdict = hang.find(before, later, now - self._moved_at)
        if verdict is None:
            self._moved_at = now
            self._pause = min(2.0 * self._pause, _LONGEST_PAUSE_S)
            self._next_snapshot = now + self._pause
            return
        self._pause = _PAUSE_S
        if verdict.fatal and self._rules.on_hang == "stop":
            judged = replace(verdict, found_at=time.time())
            self.verdict = self._in_full(judged, before, later)
            return
        patient = verdict.fatal or verdict.waited_s >= self._rules.after + _PATIENCE_S
        if patient and self._is_due(verdict, verdict.waited_s):
            # Also of a deadlock: something outside may free the run, which may hang again.
            told = self._in_full(verdict, before, later) if verdict.fatal else verdict
            self._report(render(told))

    def _in_full(self, verdict: Verdict, before: Snapshot, later: Snapshot) -> Verdict:
        """The verdict with the lines of earlier calls; what it was made from goes to files."""
        with_lines = self._snapshot(lines=True)
        if with_lines is not None:
            again = hang.find(before, with_lines, time.monotonic() - self._moved_at)
            if again is not None and again.kind == verdict.kind:
                verdict, later = replace(again, found_at=verdict.found_at), with_lines
        try:
            write_report(self._folder, later, verdict)
        except OSError as error:  # the verdict must still be reported
            self._report(f"hang.txt and hang.json cannot be written: {error.strerror}")
        return verdict

    def _is_due(self, verdict: Verdict, lasted: float) -> bool:
        """Whether to report what does not stop the run: seldom, as a rank may work alone often."""
        key = (verdict.kind, verdict.ranks, tuple(row.line for row in verdict.rows))
        # A rank that works and is blocked by turns, while nothing moves, is in one state.
        kind = "awaited" if verdict.kind in _AWAITED else verdict.kind
        state = (kind, verdict.ranks, self._moved_at)
        reported = max(self._reported.get(key, 0.0), self._reported.get(state, 0.0))
        if lasted < _REPORTED_AGAIN * reported:
            return False
        self._reported[key] = max(lasted, reported)
        self._reported[state] = self._reported[key]
        return True

    def _check_for_stragglers(self, now: float) -> None:
        self._straggler_pause = min(2.0 * self._straggler_pause, _LONGEST_STRAGGLER_PAUSE_S)
        self._next_straggler = now + self._straggler_pause
        snapshot = self._snapshot()
        verdict = None if snapshot is None else hang.find_straggler(snapshot)
        ranks = () if verdict is None else verdict.ranks
        if verdict is not None and ranks != self._slow:
            # Any rank can be late for a while: only a second snapshot soon after makes it a
            # straggler.
            self._next_straggler = now + _SECOND_STRAGGLER_S
        elif verdict is not None and self._is_due(verdict, 1.0):
            self._report(render(verdict))
        self._slow = ranks


def write_report(folder: Path, snapshot: Snapshot, verdict: Verdict) -> None:
    """Writes `hang.json` and, for people, `hang.txt` into a folder.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "hang.json", to_json(snapshot))
    parts = [render(verdict), *(render_state(state) for state in snapshot.ranks)]
    write_whole(folder / "hang.txt", "\n\n".join(parts) + "\n")


_ASK, _ANSWER = "snapshot asked for", "snapshot"
_CALLS = 100, 10, 1
"""Collectives of each rank that are sent; the fewer, where many ranks make more too long."""
_ANSWER_S, _LINES_S = 2.0, 5.0
"""The other launchers are waited for so long; those that fetch the lines of earlier collectives
for longer."""
_TURN_S, _LED_S = 1.0, 10.0
"""All launchers see a hang at the same time, and one is to ask: the others give the first one time
to begin, and do not ask for so long after one of lower rank has. The second is more than twice
`_LONGEST_PAUSE_S`: with many ranks a snapshot takes seconds."""


class SnapshotExchange:
    """Snapshots of the ranks of all machines, taken at about the same time.

    Each launcher can ask its own ranks alone. One that takes a snapshot lets the others know; they
    take one as well, whatever they are doing, and send it to the one that asked, which puts the
    parts together.

    Args:
        rendezvous: carries the messages.
        node: rank of this machine.
        nodes: of how many.
        take: takes a snapshot of this machine's ranks; its argument: with the lines of earlier
            collectives.
    """

    def __init__(
        self, rendezvous: Rendezvous, node: int, nodes: int, take: Callable[[bool], Snapshot]
    ) -> None:
        self._rendezvous, self._node, self._nodes, self._take = rendezvous, node, nodes, take
        self._asked = 0
        self._answered: dict[int, int] = {}
        """The number of each other launcher's question that ours has last answered."""
        self._led_until = 0.0
        self.turn_s = _TURN_S if node > 0 else 0.0
        """How much later than the first launcher this one is to ask."""

    def of_all_ranks(self, *, lines: bool = False) -> Snapshot | None:
        """Takes a snapshot of all ranks of the run; waits some seconds at most.

        Args:
            lines: with the lines of earlier collectives, for a verdict that has been found.

        Returns:
            None where a machine has not answered in time, or none can, or a launcher of lower rank
            takes snapshots.
        """
        if self._nodes == 1:
            return self._take(lines)
        led = not lines and time.monotonic() < self._led_until
        if led or not self._rendezvous.can_publish:
            return None
        self._asked += 1
        self._rendezvous.publish(_ASK, {"number": self._asked, "lines": lines})
        own = self._take(lines)
        others = self._nodes - 1

        def settled() -> bool:
            self.answer()  # another may ask at the same time
            return bool(self._rendezvous.lost_nodes()) or len(self._answers()) == others

        wait_until(settled, time.monotonic() + (_LINES_S if lines else _ANSWER_S))
        answers = [from_json(text) for text in self._answers()]
        return merge([own, *answers]) if len(answers) == others else None

    def answer(self) -> None:
        """Takes a snapshot of this machine's ranks if another launcher asks; call it often."""
        if self._nodes == 1:
            return
        asked = {
            node: ask
            for node, ask in self._rendezvous.published(_ASK).items()
            if node != self._node and ask["number"] > self._answered.get(node, 0)
        }
        if not asked:
            return
        if min(asked) < self._node:
            self._led_until = time.monotonic() + _LED_S
        self._answered |= {node: ask["number"] for node, ask in asked.items()}
        own = self._take(any(ask["lines"] for ask in asked.values()))
        for calls in _CALLS:
            snapshot = to_json(shorten(own, calls))
            told = {n: {"to": ask["number"], "snapshot": snapshot} for n, ask in asked.items()}
            if all(self._rendezvous.publish(_ANSWER, told[node], to=node) for node in told):
                break

    def _answers(self) -> list[str]:
        """What the others have answered to our last question."""
        told = self._rendezvous.published(_ANSWER).values()
        return [answer["snapshot"] for answer in told if answer["to"] == self._asked]
