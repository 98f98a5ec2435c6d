"""Watches the ranks while they run: what hangs, what is slow.

Cheap most of the time: a few bytes of each rank's heartbeat. Only when a rank has made no step for
`HangRules.after` seconds are snapshots of all ranks taken, two of them, and handed to the pure
functions that know the verdicts: `lockstep.watchdog.hang`, `lockstep.watchdog.straggler`.
"""

from __future__ import annotations

import json
import linecache
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.launcher.plan import HangRules
from lockstep.launcher.process import Process
from lockstep.launcher.rendezvous import Rendezvous
from lockstep.watchdog import hang, straggler
from lockstep.watchdog.messages import Verdict, render, render_state
from lockstep.watchdog.probe import read_heartbeat
from lockstep.watchdog.snapshot import (
    Snapshot,
    from_json,
    merge,
    shorten,
    take_snapshot,
    to_json,
)

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
_SLOW_STEPS = 4.0
"""No snapshots are taken before a rank is quiet for so many of its own steps."""
_FIRST_STRAGGLER_S = 6.0
_SECOND_STRAGGLER_S = 2.0
_LONGEST_STRAGGLER_PAUSE_S = 600.0


@dataclass
class _Steps:
    """What a rank's heartbeat said, and since when."""

    count: int | None
    since: float
    took: float = 0.0
    """Seconds of the last step."""


class Supervisor:
    """Watches the ranks of one attempt.

    Args:
        processes: the ranks of this machine.
        rules: when a run counts as hanging.
        folder: where `hang.txt` and `hang.json` are written.
        report: called with each text for the user.
        of_all_ranks: makes of a snapshot of this machine's ranks one of all ranks of the run; None
            while some are not known.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        rules: HangRules,
        folder: Path,
        report: Callable[[str], None],
        of_all_ranks: Callable[[Snapshot], Snapshot | None] = lambda own: own,
    ) -> None:
        self._processes, self._rules, self._folder = processes, rules, folder
        self._report, self._of_all_ranks = report, of_all_ranks
        now = time.monotonic()
        self._steps = {process.rank: _Steps(None, now) for process in processes}
        self._moved_at = now
        """When two snapshots last showed that something moves."""
        self._next_heartbeats = self._next_snapshot = now
        self._pause = _PAUSE_S
        self._earlier: tuple[float, Snapshot] | None = None
        self._reported: dict[object, float] = {}
        self._slow: tuple[int, ...] = ()
        """The straggler of the last snapshot."""
        self._straggler_pause = _FIRST_STRAGGLER_S
        self._next_straggler = now + _FIRST_STRAGGLER_S
        self.verdict: Verdict | None = None
        """Why the run cannot go on."""
        self.judged_at = 0.0
        """When that was found, in wall-clock seconds."""

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
            elif quiet >= self._rules.after - _BETWEEN_SNAPSHOTS_S and now >= self._next_snapshot:
                before = self._snapshot()
                self._earlier = None if before is None else (now, before)
            elif now >= self._next_straggler:
                self._check_for_stragglers(now)
        return self.verdict is not None and self._rules.on_hang == "stop"

    def _quiet(self, now: float) -> float:
        """Seconds for which the quietest rank has made no step, less what its steps take."""
        longest = 0.0
        for process in self._processes:
            steps = self._steps[process.rank]
            heartbeat = read_heartbeat(process.folder)
            if heartbeat is not None and heartbeat.steps != steps.count:
                steps = _Steps(heartbeat.steps, now, heartbeat.took_s)
                self._steps[process.rank] = steps
            patience = max(0.0, _SLOW_STEPS * steps.took - self._rules.after)
            longest = max(longest, now - steps.since - patience)
        return longest

    def _snapshot(self, *, lines: bool = False) -> Snapshot | None:
        return self._of_all_ranks(take_snapshot(self._processes, lines=lines))

    def _judge(self, now: float, before: Snapshot) -> None:
        self._next_snapshot = now + self._pause
        later = self._snapshot()
        if later is None:
            return
        since = max(self._moved_at, *(steps.since for steps in self._steps.values()))
        verdict = hang.find(before, later, now - since)
        if verdict is None:
            self._moved_at = now
            self._pause = min(2.0 * self._pause, _LONGEST_PAUSE_S)
            self._next_snapshot = now + self._pause
            return
        self._pause = _PAUSE_S
        if verdict.fatal and self._rules.on_hang == "stop":
            self.judged_at = time.time()
            self.verdict = self._in_full(verdict, before, later, since)
        elif verdict.fatal and self._is_due(verdict, verdict.waited_s):
            # Something outside may free the run, which may hang again.
            in_full = self._in_full(verdict, before, later, since)
            self._report(render(in_full, linecache.getline))
        elif not verdict.fatal and verdict.waited_s >= self._rules.after + _PATIENCE_S:
            self._report_if_due(verdict, verdict.waited_s)

    def _in_full(
        self, verdict: Verdict, before: Snapshot, later: Snapshot, since: float
    ) -> Verdict:
        """The verdict with the lines of earlier calls; what it was made from goes to files."""
        with_lines = self._snapshot(lines=True)
        if with_lines is not None:
            again = hang.find(before, with_lines, time.monotonic() - since)
            if again is not None and again.kind == verdict.kind:
                verdict, later = again, with_lines
        try:
            write_report(self._folder, later, verdict)
        except OSError as error:  # the verdict must still be reported
            self._report(f"hang.txt and hang.json cannot be written: {error.strerror}")
        return verdict

    def _report_if_due(self, verdict: Verdict, lasted: float) -> None:
        if self._is_due(verdict, lasted):
            self._report(render(verdict, linecache.getline))

    def _is_due(self, verdict: Verdict, lasted: float) -> bool:
        """Whether to report what does not stop the run: seldom, as a rank may work alone often."""
        key = (verdict.kind, verdict.ranks, tuple(row.line for row in verdict.rows))
        reported = self._reported.get(key, 0.0)
        due = lasted >= _REPORTED_AGAIN * reported
        if due:
            self._reported[key] = max(lasted, reported)
        return due

    def _check_for_stragglers(self, now: float) -> None:
        self._straggler_pause = min(2.0 * self._straggler_pause, _LONGEST_STRAGGLER_PAUSE_S)
        self._next_straggler = now + self._straggler_pause
        snapshot = self._snapshot()
        verdict = None if snapshot is None else straggler.find(snapshot)
        ranks = () if verdict is None else verdict.ranks
        if verdict is not None and ranks == self._slow:
            self._report_if_due(verdict, 1.0)
        elif verdict is not None:
            # Any rank can be late for a while: only a second snapshot soon after makes it a
            # straggler.
            self._next_straggler = now + _SECOND_STRAGGLER_S
        self._slow = ranks


def write_report(folder: Path, snapshot: Snapshot, verdict: Verdict | None = None) -> Path:
    """Writes `hang.json` and, for people, `hang.txt` into a folder; returns the latter's path.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = [] if verdict is None else [render(verdict, linecache.getline)]
    parts += [render_state(state) for state in snapshot.ranks]
    texts = {"hang.json": to_json(snapshot), "hang.txt": "\n\n".join(parts) + "\n"}
    for name, text in texts.items():
        temporary = folder / f"{name}.new"
        # Names of files may hold bytes that are no text in UTF-8.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(folder / name)
    return folder / "hang.txt"


_KEY = "snapshot"
_CALLS, _FEW_CALLS = 100, 10
"""Collectives of each rank that are sent; the fewer where many ranks make that too long."""
_ANSWER_S, _LINES_S = 2.0, 5.0
"""The other launchers are waited for so long; those that fetch the lines of earlier collectives
for longer."""
_ANSWER_POLL_S = 0.02


class SnapshotExchange:
    """Snapshots of the ranks of all machines, taken at about the same time.

    Each launcher can ask its own ranks alone. One that takes a snapshot lets the others know; they
    take one as well, whatever they are doing, and the one that asked puts the parts together.

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
        self._sent = self._asked = 0
        self._with_lines = False
        self._answered: dict[int, int] = {}
        """The last question of each other launcher that it has had an answer to."""

    def of_all_ranks(self, own: Snapshot) -> Snapshot | None:
        """Makes of a snapshot of this machine's ranks one of all; waits some seconds at most.

        Returns:
            None where a machine has not answered in time, or none can.
        """
        if self._nodes == 1:
            return own
        if not self._rendezvous.can_publish:
            return None
        before = {node: message["number"] for node, message in self._others().items()}
        self._asked += 1
        self._with_lines = _has_lines(own)
        self._send(own)
        limit = time.monotonic() + (_LINES_S if self._with_lines else _ANSWER_S)
        while not self._rendezvous.lost_nodes():
            parts = [
                from_json(json.dumps(message["snapshot"]))
                for node, message in self._others().items()
                if message["number"] > before.get(node, 0)
            ]
            if len(parts) == self._nodes - 1:
                return merge([own, *parts])
            if time.monotonic() > limit:
                break
            time.sleep(_ANSWER_POLL_S)
        return None

    def answer(self) -> None:
        """Takes a snapshot of this machine's ranks if another launcher asks; call it often."""
        if self._nodes == 1:
            return
        asking = [
            message
            for node, message in self._others().items()
            if message["asked"] > self._answered.get(node, 0)
        ]
        if asking:
            self._send(self._take(any(message["lines"] for message in asking)))

    def _others(self) -> dict[int, dict[str, Any]]:
        heard = self._rendezvous.published(_KEY)
        return {node: message for node, message in heard.items() if node != self._node}

    def _send(self, own: Snapshot) -> None:
        self._answered = {node: message["asked"] for node, message in self._others().items()}
        self._sent += 1
        values = {"number": self._sent, "asked": self._asked, "lines": self._with_lines}
        for calls in (_CALLS, _FEW_CALLS):
            short = json.loads(to_json(shorten(own, calls)))
            if self._rendezvous.publish(_KEY, {**values, "snapshot": short}):
                break


def _has_lines(snapshot: Snapshot) -> bool:
    return any(call.frames is not None for state in snapshot.ranks for call in state.calls or ())
