"""Looks after the ranks while they run: what hangs, what is slow.

Cheap most of the time: a few bytes of each rank's beacon. Only when a rank has made no step for
`HangRules.after` seconds are stacks and Flight Recorders asked for, twice, and judged by the pure
functions of `lockstep.diagnose`.
"""

from __future__ import annotations

import linecache
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.launcher.plan import HangRules
from lockstep.launcher.process import Process
from lockstep.watchdog import hang, observe, straggler
from lockstep.watchdog.messages import Finding, render
from lockstep.watchdog.observe import Watched
from lockstep.watchdog.probe import read_heartbeat
from lockstep.watchdog.snapshot import Snapshot

_BEACONS_EVERY_S = 0.5
_BETWEEN_LOOKS_S = 1.5
"""Between the two snapshots of a look: long enough to see whether a rank moves."""
_PAUSE_S = 1.5
_LONGEST_PAUSE_S = 4.0
"""Between two looks; it grows while they find that the ranks move."""
_LINES_S = 4.0
"""For a last look that also asks for the lines of earlier collectives."""
_ANSWER_S = 1.0
"""A rank is waited for so long when it is looked at."""
_PATIENCE_S = 1.0
"""Waiting that is no deadlock is told when it has lasted so much longer."""
_TOLD_AGAIN = 4.0
"""The same waiting is told again when it is so many times as long as when it was last told."""
_SLOW_STEPS = 4.0
"""A rank is not looked at before it is quiet for so many of its own steps."""
_FIRST_STRAGGLER_S = 6.0
_SECOND_STRAGGLER_S = 2.0
_LONGEST_STRAGGLER_PAUSE_S = 600.0


@dataclass
class _Steps:
    """What a rank's beacon said, and since when."""

    count: int | None
    since: float
    took: float = 0.0
    """Seconds of the last step."""


def look_at(processes: Sequence[Process], lines: bool) -> Snapshot:
    """The ranks of this machine at this moment; `lines`: with those of earlier collectives."""
    watched = [Watched(p.rank, p.pid or 0, p.folder, p.code) for p in processes]
    return observe.take_snapshot(watched, _LINES_S if lines else _ANSWER_S, lines=lines)


class Supervisor:
    """Watches the ranks of one attempt.

    Args:
        processes: the ranks of this machine.
        rules: when a run counts as hanging.
        folder: where the evidence is kept.
        say: called with each report.
        share: makes of this machine's ranks all ranks of the run; None while some are not known.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        rules: HangRules,
        folder: Path,
        say: Callable[[str], None],
        share: Callable[[Snapshot], Snapshot | None] = lambda own: own,
    ) -> None:
        self._processes, self._rules, self._folder = processes, rules, folder
        self._say, self._share = say, share
        now = time.monotonic()
        self._steps = {process.rank: _Steps(None, now) for process in processes}
        self._moved_at = now
        """When something was last seen to move in a look."""
        self._next_beacons = self._next_look = now
        self._pause = _PAUSE_S
        self._earlier: tuple[float, Snapshot] | None = None
        self._told: dict[object, float] = {}
        self._slow: tuple[int, ...] = ()
        """The straggler of the last look."""
        self._straggler_pause = _FIRST_STRAGGLER_S
        self._next_straggler = now + _FIRST_STRAGGLER_S
        self.verdict: Finding | None = None
        """Why the run cannot go on."""
        self.judged_at = 0.0
        """When that was found, in wall-clock seconds."""

    def look(self) -> bool:
        """Looks at the ranks as closely as their silence asks for; whether to stop the run."""
        now = time.monotonic()
        if self.verdict is None and now >= self._next_beacons:
            self._next_beacons = now + _BEACONS_EVERY_S
            quiet = self._quiet(now)
            if self._earlier is not None:
                if now - self._earlier[0] >= _BETWEEN_LOOKS_S:
                    self._judge(now, self._earlier[1])
                    self._earlier = None
            elif quiet >= self._rules.after - _BETWEEN_LOOKS_S and now >= self._next_look:
                before = self._snapshot()
                self._earlier = None if before is None else (now, before)
            elif now >= self._next_straggler:
                self._look_for_stragglers(now)
        return self.verdict is not None and self._rules.on_hang == "stop"

    def _quiet(self, now: float) -> float:
        """Seconds for which the quietest rank has made no step, less what its steps take."""
        longest = 0.0
        for process in self._processes:
            steps = self._steps[process.rank]
            beacon = read_heartbeat(process.folder)
            if beacon is not None and beacon.steps != steps.count:
                took = beacon.took_s or 0.0
                self._steps[process.rank] = steps = _Steps(beacon.steps, now, took)
            patience = max(0.0, _SLOW_STEPS * steps.took - self._rules.after)
            longest = max(longest, now - steps.since - patience)
        return longest

    def _snapshot(self, *, lines: bool = False) -> Snapshot | None:
        return self._share(look_at(self._processes, lines))

    def _judge(self, now: float, before: Snapshot) -> None:
        self._next_look = now + self._pause
        later = self._snapshot()
        if later is None:
            return
        since = max(self._moved_at, *(steps.since for steps in self._steps.values()))
        finding = hang.judge(before, later, now - since)
        if finding is None:
            self._moved_at = now
            self._pause = min(2.0 * self._pause, _LONGEST_PAUSE_S)
            self._next_look = now + self._pause
            return
        self._pause = _PAUSE_S
        if finding.fatal and self._rules.on_hang == "stop":
            self.judged_at = time.time()
            self.verdict = self._kept(finding, before, later, since)
        elif finding.fatal and self._is_due(finding, finding.waited_s):
            # Something outside may free the run, which may hang again.
            self._say(render(self._kept(finding, before, later, since), linecache.getline))
        elif not finding.fatal and finding.waited_s >= self._rules.after + _PATIENCE_S:
            self._tell(finding, finding.waited_s)

    def _kept(self, finding: Finding, before: Snapshot, later: Snapshot, since: float) -> Finding:
        """The finding with the lines of earlier calls, and the evidence for it in files."""
        with_lines = self._snapshot(lines=True)
        if with_lines is not None:
            again = hang.judge(before, with_lines, time.monotonic() - since)
            if again is not None and again.kind == finding.kind:
                finding, later = again, with_lines
        try:
            observe.keep(later, self._folder, finding)
        except OSError as error:  # the verdict must still be told
            self._say(f"hang.txt and hang.json cannot be written: {error.strerror}")
        return finding

    def _tell(self, finding: Finding, lasted: float) -> None:
        if self._is_due(finding, lasted):
            self._say(render(finding, linecache.getline))

    def _is_due(self, finding: Finding, lasted: float) -> bool:
        """Whether to tell what does not stop the run, seldom: a rank may well work alone often."""
        key = (finding.kind, finding.ranks, tuple(row.line for row in finding.rows))
        told = self._told.get(key, 0.0)
        due = lasted >= _TOLD_AGAIN * told
        if due:
            self._told[key] = max(lasted, told)
        return due

    def _look_for_stragglers(self, now: float) -> None:
        self._straggler_pause = min(2.0 * self._straggler_pause, _LONGEST_STRAGGLER_PAUSE_S)
        self._next_straggler = now + self._straggler_pause
        snapshot = self._snapshot()
        finding = None if snapshot is None else straggler.find(snapshot)
        ranks = () if finding is None else finding.ranks
        if finding is not None and ranks == self._slow:
            self._tell(finding, 1.0)
        elif finding is not None:
            # Any rank can be late for a while: only a second look soon after makes it a straggler.
            self._next_straggler = now + _SECOND_STRAGGLER_S
        self._slow = ranks
