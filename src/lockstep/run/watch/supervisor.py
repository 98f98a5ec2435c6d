"""Watches the ranks while they run, and reports what hangs and what is slow.

Most of the time it only reads a few bytes of each rank's *heartbeat*. If a rank is *quiet*, that is
if it has made no step for `HangRules.after` seconds, two snapshots of all ranks are taken one after
the other, and `hang.find` judges them. A *fatal* verdict stops the run; others are reported.
Stragglers are looked for now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.language import translate
from lockstep.run.start.plan import HangRules
from lockstep.run.start.process import Process
from lockstep.run.watch import hang, straggler
from lockstep.run.watch.evidence import write_atomically
from lockstep.run.watch.heartbeat import read_heartbeat
from lockstep.run.watch.messages import render, render_state
from lockstep.run.watch.snapshot import Snapshot, to_json
from lockstep.run.watch.snapshot_exchange import SnapshotExchange
from lockstep.run.watch.take_snapshot import take_snapshot
from lockstep.run.watch.verdict import Verdict

_HEARTBEAT_INTERVAL_S = 0.5
# The time between the two snapshots of a verdict is long enough to see whether a rank moves.
_BETWEEN_SNAPSHOTS_S = 1.5
# The pause between two pairs of snapshots grows while they show that the ranks move.
_MIN_PAUSE_S = 1.5
_MAX_PAUSE_S = 4.0
# Waiting that is no deadlock is reported when it has lasted this much longer.
_EXTRA_PATIENCE_S = 1.0
# The same waiting is reported again when it is this many times as long as at the last report.
_REPORT_AGAIN_FACTOR = 4.0
# A rank is not quiet before this many of its own steps would have passed.
_QUIET_AFTER_STEPS = 4.0
_FIRST_STRAGGLER_CHECK_S = 6.0
_SECOND_STRAGGLER_CHECK_S = 2.0
_MAX_STRAGGLER_PAUSE_S = 600.0

# With these kinds of verdicts the others wait for a rank that may yet come.
_KINDS_OF_AWAITED_RANKS = ("working", "blocked", "loading", "gil", "unknown")


class Supervisor:
    """Watches the ranks of one attempt.

    Args:
        processes: the ranks of this machine.
        rules: when a run counts as hanging, and what to do then.
        folder: where `hang.txt` and `hang.json` are written.
        report: called with each text for the user, in English and in the language of the console.
        exchange: takes snapshots together with the run's other machines; None if there are none.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        rules: HangRules,
        folder: Path,
        report: Callable[[str, str], None],
        exchange: SnapshotExchange | None = None,
    ) -> None:
        self._processes = processes
        self._rules = rules
        self._folder = folder
        self._report = report
        self._exchange = exchange

        # The launchers of other machines begin later than the first one.
        delay_s = 0.0 if exchange is None else exchange.delay_s
        self._max_quiet_s = rules.after - _BETWEEN_SNAPSHOTS_S + delay_s
        now = time.monotonic()
        self._began_at = now
        self._moved_at = now
        """When a step, or a pair of snapshots, last showed that something moves."""
        self._next_heartbeats_at = now
        self._next_snapshot_at = now
        self._pause_s = _MIN_PAUSE_S
        self._first_snapshot: Snapshot | None = None
        """The first snapshot of a pair, while the second is waited for."""
        self._first_snapshot_at = 0.0
        self._reported_s: dict[object, float] = {}
        """How long each wait had lasted when it was last reported."""
        self._slow_ranks: tuple[int, ...] = ()
        """The stragglers of the last check."""
        self._straggler_pause_s = _FIRST_STRAGGLER_CHECK_S
        self._next_straggler_check_at = now + _FIRST_STRAGGLER_CHECK_S + delay_s
        self.verdict: Verdict | None = None
        """Why the run cannot go on."""

    def check(self) -> bool:
        """Looks after the ranks, if it is time to. Call it often.

        Returns:
            True if the run cannot go on, as `verdict` says, and is to be stopped.
        """
        now = time.monotonic()
        if self.verdict is None and now >= self._next_heartbeats_at:
            self._next_heartbeats_at = now + _HEARTBEAT_INTERVAL_S
            self._do_what_is_due(now)
        return self.verdict is not None and self._rules.on_hang == "stop"

    def _do_what_is_due(self, now: float) -> None:
        """Reads the heartbeats, and does the one thing that is due, if any: takes the first
        snapshot of a pair, judges it by a second one, or looks for stragglers.
        """
        quiet_s = self._read_heartbeats(now)
        if self._first_snapshot is not None:  # the ranks are left alone until the second one
            if now - self._first_snapshot_at >= _BETWEEN_SNAPSHOTS_S:
                self._judge(now, self._first_snapshot)
                self._first_snapshot = None
        elif quiet_s >= self._max_quiet_s and now >= self._next_snapshot_at:
            # A rank has been quiet for too long, and the last pair is some time ago.
            self._first_snapshot = self._take_snapshot()
            self._first_snapshot_at = now
        elif now >= self._next_straggler_check_at:
            self._check_for_stragglers(now)

    def _read_heartbeats(self, now: float) -> float:
        """Notes in `_moved_at` when a rank last made a step.

        Returns:
            For how many seconds the quietest rank has made no step. The caller compares them with
            `HangRules.after`. A rank with slow steps may be quiet for longer; what it may be quiet
            more is taken off its seconds.
        """
        longest_s = 0.0
        for process in self._processes:
            heartbeat = read_heartbeat(process.evidence.heartbeat)
            last_step = 0.0 if heartbeat is None else heartbeat.last_step
            step_s = 0.0 if heartbeat is None else heartbeat.took_s
            self._moved_at = max(self._moved_at, last_step)
            quiet_s = now - max(self._began_at, last_step)  # before its first step, since the start
            extra_allowance_s = max(0.0, _QUIET_AFTER_STEPS * step_s - self._rules.after)
            longest_s = max(longest_s, quiet_s - extra_allowance_s)

        return longest_s

    def _take_snapshot(self, *, call_stacks: bool = False) -> Snapshot | None:
        """Takes a snapshot of all ranks of the run; None if another machine cannot answer."""
        if self._exchange is None:
            return take_snapshot(self._processes, call_stacks=call_stacks)
        return self._exchange.take_of_all_ranks(call_stacks=call_stacks)

    def _judge(self, now: float, earlier: Snapshot) -> None:
        """Takes the second snapshot of a pair, and acts on what both of them show.

        If the ranks move, it notes that in `_moved_at`. If the run cannot go on and is to be
        stopped, it sets `verdict`. Any other verdict is reported, if that is due.

        Args:
            now: the present time.
            earlier: the first snapshot.
        """
        self._next_snapshot_at = now + self._pause_s
        later = self._take_snapshot()
        if later is None:  # another machine did not answer: the next pair may show more
            return

        verdict = hang.find(earlier, later, waited_s=now - self._moved_at)
        if verdict is None:
            # The ranks move, so the next snapshots can wait longer.
            self._moved_at = now
            self._pause_s = min(2.0 * self._pause_s, _MAX_PAUSE_S)
            self._next_snapshot_at = now + self._pause_s
            return

        self._pause_s = _MIN_PAUSE_S
        if verdict.fatal and self._rules.on_hang == "stop":
            verdict = replace(verdict, found_at=time.time())
            self.verdict = self._complete(verdict, earlier, later)
            return

        # From here on the run is left alone: `on_hang` is "report", or the wait may end by itself.
        # A wait that may end is reported only when it has lasted somewhat longer.
        has_lasted = verdict.waited_s >= self._rules.after + _EXTRA_PATIENCE_S
        may_be_reported = verdict.fatal or has_lasted
        if may_be_reported and self._mark_reported_if_due(verdict, verdict.waited_s):
            if verdict.fatal:
                verdict = self._complete(verdict, earlier, later)
            self._report(render(verdict), render(verdict, translate))

    def _complete(self, verdict: Verdict, earlier: Snapshot, later: Snapshot) -> Verdict:
        """Returns a fatal verdict that also says where earlier calls were made; writes its report.

        For that the stacks of the recorded calls are needed. To obtain them stops the ranks for
        some tenths of a second, so it is done only now. If they are not obtained, the verdict is
        returned as it is.
        """
        snapshot_with_stacks = self._take_snapshot(call_stacks=True)
        if snapshot_with_stacks is not None:
            waited_s = time.monotonic() - self._moved_at
            verdict_with_stacks = hang.find(earlier, snapshot_with_stacks, waited_s)
            # If it is of another kind, a rank has moved or ended meanwhile: the first one counts.
            if verdict_with_stacks is not None and verdict_with_stacks.kind == verdict.kind:
                verdict = replace(verdict_with_stacks, found_at=verdict.found_at)
                later = snapshot_with_stacks

        try:
            write_report(self._folder, later, verdict)
        except OSError as error:  # the verdict must still be reported
            problem = f"hang.txt and hang.json cannot be written: {error.strerror}"
            self._report(problem, translate(problem))

        return verdict

    def _mark_reported_if_due(self, verdict: Verdict, lasted_s: float) -> bool:
        """Decides whether a verdict that does not stop the run is reported now.

        A rank may often work alone, so the same wait is reported again only when it is much longer
        than at its last report.

        Args:
            verdict: what keeps the ranks waiting.
            lasted_s: for how long they have waited.

        Returns:
            True if it is to be reported. It is then noted in `_reported_s`.
        """
        keys = self._keys_of_wait(verdict)
        reported_s = max(self._reported_s.get(key, 0.0) for key in keys)  # at the last report
        if lasted_s < _REPORT_AGAIN_FACTOR * reported_s:
            return False
        for key in keys:
            self._reported_s[key] = max(lasted_s, reported_s)
        return True

    def _keys_of_wait(self, verdict: Verdict) -> tuple[object, object]:
        """Returns two keys. Two verdicts are on the same wait if one of their keys is the same.

        The first key is the same if all ranks are at the same lines. The second one is the same if
        nothing has moved between the verdicts. Their kinds may differ then, as a rank for which the
        others wait may work and be blocked in turn.
        """
        lines = tuple(row.line for row in verdict.rows)
        key_by_lines = (verdict.kind, verdict.ranks, lines)
        is_on_awaited_rank = verdict.kind in _KINDS_OF_AWAITED_RANKS
        kind_or_group = "awaited" if is_on_awaited_rank else verdict.kind
        key_by_last_move = (kind_or_group, verdict.ranks, self._moved_at)
        return key_by_lines, key_by_last_move

    def _check_for_stragglers(self, now: float) -> None:
        """Takes a snapshot and reports a straggler that the last check has found as well.

        Any rank can be late for a while. So if a new one is found, the next check follows soon;
        otherwise the pauses between the checks grow.
        """
        self._straggler_pause_s = min(2.0 * self._straggler_pause_s, _MAX_STRAGGLER_PAUSE_S)
        self._next_straggler_check_at = now + self._straggler_pause_s
        snapshot = self._take_snapshot()

        verdict = None if snapshot is None else straggler.find_straggler(snapshot)
        if verdict is None:
            self._slow_ranks = ()
            return

        is_new = verdict.ranks != self._slow_ranks
        self._slow_ranks = verdict.ranks
        if is_new:
            self._next_straggler_check_at = now + _SECOND_STRAGGLER_CHECK_S
            return

        # A straggler does not get longer, as a wait does. It always counts as 1 s, so that the same
        # one, at the same lines, is reported once.
        if self._mark_reported_if_due(verdict, lasted_s=1.0):
            self._report(render(verdict), render(verdict, translate))


def write_report(folder: Path, snapshot: Snapshot, verdict: Verdict) -> None:
    """Writes `hang.json` for programs and `hang.txt` for people.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "hang.json", to_json(snapshot))
    parts = [render(verdict, translate)]
    for state in snapshot.ranks:
        parts.append(render_state(state))
    write_atomically(folder / "hang.txt", "\n\n".join(parts) + "\n")
