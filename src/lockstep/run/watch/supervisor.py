"""Watches the ranks of a run, and reports ranks that hang and ranks that are slow.

Most of the time, the supervisor only reads a few bytes of each rank's *heartbeat*. If a rank is
*quiet*, which means it has made no step for `HangRules.after` seconds, the supervisor takes two
snapshots of all ranks, one after the other, and `hang.find` judges them. A *fatal* verdict stops
the run; others are only reported. Now and then it also looks for stragglers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.language import translate
from lockstep.run.run_folder import HANG_JSON_NAME, HANG_TEXT_NAME
from lockstep.run.start.plan import HangRules
from lockstep.run.start.process import Process
from lockstep.run.watch import hang, straggler
from lockstep.run.watch.evidence import write_atomically
from lockstep.run.watch.heartbeat import Heartbeat, read_heartbeat
from lockstep.run.watch.messages import render, render_state
from lockstep.run.watch.snapshot import Snapshot, to_json
from lockstep.run.watch.snapshot_exchange import SnapshotExchange
from lockstep.run.watch.take_snapshot import take_snapshot
from lockstep.run.watch.verdict import Verdict

_HEARTBEAT_INTERVAL_S = 0.5
# The time between two snapshots must be long enough to see whether a rank moves.
_BETWEEN_SNAPSHOTS_S = 1.5
# The pause between two pairs of snapshots grows while they show that the ranks move.
_MIN_PAUSE_S = 1.5
_MAX_PAUSE_S = 4.0
# A wait that is not a deadlock is reported after this much more time.
_EXTRA_PATIENCE_S = 1.0
# The same wait is reported again when it has become this many times longer.
_REPORT_AGAIN_FACTOR = 4.0
# A rank is not quiet before this many of its own steps would have passed.
_QUIET_AFTER_STEPS = 4.0
_FIRST_STRAGGLER_CHECK_S = 6.0
_SECOND_STRAGGLER_CHECK_S = 2.0
_MAX_STRAGGLER_PAUSE_S = 600.0

# In these kinds of verdicts, the others wait for a rank that may still come.
_KINDS_OF_AWAITED_RANKS = ("working", "blocked", "loading", "gil", "unknown")


class Supervisor:
    """Watches the ranks of one attempt.

    Args:
        processes: the ranks of this machine.
        rules: after how long a run counts as hanging, and what to do then.
        folder: the folder in which `hang.txt` and `hang.json` are written.
        report: function that shows a text to the user; it is called with the text in English and in
            the language of the console.
        exchange: takes snapshots together with the other machines of the run; None if there are
            none.
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

        # The launchers of the other machines begin later than the first one.
        delay_s = 0.0 if exchange is None else exchange.delay_s
        self._snapshot_when_overdue_s = delay_s - _BETWEEN_SNAPSHOTS_S
        """How long a rank is overdue when the first snapshot of a pair is taken. It is negative
        without a delay, so that the rank becomes overdue just as the second one is taken."""
        now = time.monotonic()
        self._began_at = now
        self._moved_at = now
        """When a step or a pair of snapshots last showed that the ranks move."""
        self._next_heartbeats_at = now
        self._next_snapshot_at = now
        self._pause_s = _MIN_PAUSE_S
        self._first_snapshot: Snapshot | None = None
        """The first snapshot of a pair, until the second one is taken."""
        self._first_snapshot_at = 0.0
        self._lasted_at_report_s: dict[object, float] = {}
        """How long each wait had lasted when it was last reported, by each of its two keys."""
        self._reported_stragglers: set[object] = set()
        """Both keys of each wait for a straggler that was reported."""
        self._slow_ranks: tuple[int, ...] = ()
        """The stragglers of the last check."""
        self._straggler_pause_s = _FIRST_STRAGGLER_CHECK_S
        self._next_straggler_check_at = now + _FIRST_STRAGGLER_CHECK_S + delay_s
        self.verdict: Verdict | None = None
        """The reason why the run cannot go on, once one has been found."""

    def check(self) -> bool:
        """Checks the ranks, if it is time to. The launcher calls this many times a second.

        Returns:
            True if the run cannot go on and must be stopped; `verdict` then says why.
        """
        now = time.monotonic()
        if self.verdict is None and now >= self._next_heartbeats_at:
            self._next_heartbeats_at = now + _HEARTBEAT_INTERVAL_S
            self._do_what_is_due(now)
        return self.verdict is not None and self._rules.on_hang == "stop"

    def _do_what_is_due(self, now: float) -> None:
        """Reads the heartbeats, and takes a snapshot if one is due.

        At most one thing is done: the first snapshot of a pair is taken, or the second one is taken
        and both are judged, or stragglers are looked for.
        """
        heartbeats = [read_heartbeat(process.evidence.heartbeat) for process in self._processes]
        last_steps_at = [0.0 if each is None else each.last_step for each in heartbeats]
        self._moved_at = max([self._moved_at, *last_steps_at])
        overdue_s = self._longest_overdue_s(now, heartbeats)

        if self._first_snapshot is not None:
            # Until it is time for the second snapshot, the ranks are left alone.
            if now - self._first_snapshot_at >= _BETWEEN_SNAPSHOTS_S:
                self._judge(now, self._first_snapshot)
                self._first_snapshot = None
        elif overdue_s >= self._snapshot_when_overdue_s and now >= self._next_snapshot_at:
            # A rank has been quiet for too long, and the last pair was some time ago.
            self._first_snapshot = self._take_snapshot()
            self._first_snapshot_at = now
        elif now >= self._next_straggler_check_at:
            self._check_for_stragglers(now)

    def _longest_overdue_s(self, now: float, heartbeats: Sequence[Heartbeat | None]) -> float:
        """Returns for how long the rank that is most overdue has been overdue.

        A rank may be quiet for `HangRules.after` seconds, or for the time of `_QUIET_AFTER_STEPS`
        of its own steps if that is longer. After that it is overdue. For example, with `after=10`:

            steps take    may be quiet for     has been quiet for    is overdue for
            1 s           10 s                 12 s                  2 s
            5 s           20 s, for 4 steps    12 s                  -8 s

        Args:
            now: the present time.
            heartbeats: the heartbeat of each rank, None for a rank without one.

        Returns:
            The seconds, 2 s in this example; negative if no rank is overdue.
        """
        overdue_s_of_ranks: list[float] = []
        for heartbeat in heartbeats:
            last_step_at = 0.0 if heartbeat is None else heartbeat.last_step
            duration_of_step_s = 0.0 if heartbeat is None else heartbeat.took_s

            # Before its first step, a rank is quiet since its start.
            quiet_s = now - max(self._began_at, last_step_at)

            allowed_s = max(self._rules.after, _QUIET_AFTER_STEPS * duration_of_step_s)
            overdue_s_of_ranks.append(quiet_s - allowed_s)

        # Without ranks: as if a rank had just made a step.
        return max(overdue_s_of_ranks, default=-self._rules.after)

    def _take_snapshot(self, *, call_stacks: bool = False) -> Snapshot | None:
        """Takes a snapshot of all ranks of the run.

        Returns:
            The snapshot, or None if another machine did not answer.
        """
        if self._exchange is None:
            return take_snapshot(self._processes, call_stacks=call_stacks)
        return self._exchange.take_of_all_ranks(call_stacks=call_stacks)

    def _judge(self, now: float, earlier: Snapshot) -> None:
        """Takes the second snapshot of a pair, and acts on what the two of them show.

        If the ranks move, only `_moved_at` is updated. If the run cannot go on and must be stopped,
        `verdict` is set. Any other verdict is reported, unless it was reported a short while ago.

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
            self._note_that_ranks_move(now)
            return

        self._pause_s = _MIN_PAUSE_S  # the pauses after the next pair are short again
        must_stop = verdict.fatal and self._rules.on_hang == "stop"
        if must_stop:
            verdict = replace(verdict, found_at=time.time())
            self.verdict = self._add_stacks_of_calls(verdict, earlier, later)
        elif self._is_worth_reporting(verdict):
            # The stacks of calls are only worth stopping the ranks for if they cannot go on anyway.
            if verdict.fatal:
                verdict = self._add_stacks_of_calls(verdict, earlier, later)
            # The record of the run gets the text in English, and the console in the user's
            # language.
            self._report(render(verdict), render(verdict, translate))

    def _note_that_ranks_move(self, now: float) -> None:
        """Notes that the ranks move, so that the next pair of snapshots can wait longer."""
        self._moved_at = now
        self._pause_s = min(2.0 * self._pause_s, _MAX_PAUSE_S)
        self._next_snapshot_at = now + self._pause_s

    def _is_worth_reporting(self, verdict: Verdict) -> bool:
        """Decides whether to report a verdict now. If so, it is marked as reported.

        The run is left alone: `on_hang` is "report", or the wait may end by itself. A wait that may
        end is only reported once it has lasted somewhat longer.
        """
        has_lasted = verdict.waited_s >= self._rules.after + _EXTRA_PATIENCE_S
        if not verdict.fatal and not has_lasted:
            return False
        return self._mark_reported_if_due(verdict, lasted_s=verdict.waited_s)

    def _add_stacks_of_calls(self, verdict: Verdict, earlier: Snapshot, later: Snapshot) -> Verdict:
        """Adds to a fatal verdict where earlier calls were made, and writes its report.

        This takes another snapshot, with the stacks of all recorded calls. It stops the ranks for
        some tenths of a second, so it is only taken once a verdict is known. If it cannot be taken,
        the verdict is returned as it is.
        """
        judged_again = self._judge_with_stacks(verdict, earlier)
        shown_verdict, shown_snapshot = judged_again or (verdict, later)
        try:
            write_report(self._folder, shown_snapshot, shown_verdict)
        except OSError as error:  # the verdict must still be reported
            problem = f"hang.txt and hang.json cannot be written: {error.strerror}"
            self._report(problem, translate(problem))  # in English for the record, and translated

        return shown_verdict

    def _judge_with_stacks(
        self, verdict: Verdict, earlier: Snapshot
    ) -> tuple[Verdict, Snapshot] | None:
        """Takes a snapshot with the stacks of all calls, and judges it as `verdict` was judged.

        Args:
            verdict: the verdict that is known so far.
            earlier: the first snapshot of the pair on which it was found.

        Returns:
            The verdict with the stacks, and the snapshot. None if the snapshot cannot be taken, or
            if a rank has moved or ended meanwhile.
        """
        snapshot = self._take_snapshot(call_stacks=True)
        if snapshot is None:
            return None

        waited_s = time.monotonic() - self._moved_at
        verdict_with_stacks = hang.find(earlier, snapshot, waited_s)
        if verdict_with_stacks is None or verdict_with_stacks.kind != verdict.kind:
            return None

        # The time at which the first verdict was found, compared with the times at which ranks have
        # ended, shows what came first.
        return replace(verdict_with_stacks, found_at=verdict.found_at), snapshot

    def _mark_reported_if_due(self, verdict: Verdict, lasted_s: float) -> bool:
        """Marks a verdict as reported, unless a report on its wait is too recent.

        A rank may often work while the others wait. So a wait that was reported when it had lasted
        10 s is reported again when it has lasted 40 s (`_REPORT_AGAIN_FACTOR`).

        Args:
            verdict: what keeps the ranks waiting.
            lasted_s: how long they have waited, in seconds.

        Returns:
            True if the verdict was marked, and so must be reported.
        """
        lasted_at_last_report_s = self._lasted_at_last_report_s(verdict)  # 0 without a report
        is_much_longer = lasted_s >= _REPORT_AGAIN_FACTOR * lasted_at_last_report_s
        if not is_much_longer:
            return False

        for key in self._keys_of_wait(verdict):
            self._lasted_at_report_s[key] = lasted_s
        return True

    def _lasted_at_last_report_s(self, verdict: Verdict) -> float:
        """Returns how long the wait had lasted when it was last reported; 0 if it never was.

        A verdict is on a reported wait if one of its two keys was reported, see `_keys_of_wait`.
        """
        return max(self._lasted_at_report_s.get(key, 0.0) for key in self._keys_of_wait(verdict))

    def _keys_of_wait(self, verdict: Verdict) -> tuple[object, object]:
        """Returns two keys of the wait that a verdict is on.

        Two verdicts are on the same wait if at least one of these keys is equal:

        - by lines: all ranks are at the same lines, as in a loop in which rank 1 is late in every
          step. Between the verdicts the ranks have moved.
        - by last move: no rank has moved between the verdicts. A rank that polls in a loop may be
          at another line.
        """
        lines = tuple(row.line for row in verdict.rows)
        key_by_lines = (verdict.kind, verdict.ranks, lines)

        # If no rank has moved, the rank that the others wait for may still be "working" in one
        # verdict, and "blocked" in the next one. That is the same wait, so in this key all kinds of
        # verdicts on what an awaited rank does are replaced by one word.
        kind: str = verdict.kind
        if kind in _KINDS_OF_AWAITED_RANKS:
            kind = "awaited"

        key_by_last_move = (kind, verdict.ranks, self._moved_at)
        return key_by_lines, key_by_last_move

    def _check_for_stragglers(self, now: float) -> None:
        """Takes a snapshot, and reports a straggler if the last check found the same one.

        Any rank can be late for a while. So a new straggler is only noted, and the next check
        follows soon. Otherwise the pauses between the checks grow.
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

        # Each wait for a straggler is reported once. A wait has two keys, and if either of them was
        # reported, so was the wait.
        keys = self._keys_of_wait(verdict)
        is_reported = any(key in self._reported_stragglers for key in keys)
        if not is_reported:
            self._reported_stragglers.update(keys)
            self._report(render(verdict), render(verdict, translate))


def write_report(folder: Path, snapshot: Snapshot, verdict: Verdict) -> None:
    """Writes a verdict and the state of the ranks: `hang.json` for programs, `hang.txt` for people.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / HANG_JSON_NAME, to_json(snapshot))
    parts = [render(verdict, translate)]
    for state in snapshot.ranks:
        parts.append(render_state(state, translate))
    write_atomically(folder / HANG_TEXT_NAME, "\n\n".join(parts) + "\n")
