"""Watches the ranks of an attempt on this machine, and finds out when they must be ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from lockstep.run.machines.rendezvous import Rendezvous
from lockstep.run.start.exit_reports import ExitReports
from lockstep.run.start.launcher_record import LauncherRecord
from lockstep.run.start.plan import LaunchPlan
from lockstep.run.start.process import Attempt, Process, spawned_ranks
from lockstep.run.start.process_memory import peak_memory
from lockstep.run.start.rank_ending import RankEnding
from lockstep.run.watch.error_record import read_error
from lockstep.run.watch.snapshot import Snapshot
from lockstep.run.watch.snapshot_exchange import SnapshotExchange
from lockstep.run.watch.supervisor import Supervisor
from lockstep.run.watch.take_snapshot import take_snapshot

_SLOW_CHECKS_INTERVAL_S = 2.0
_EXIT_AFTER_EXCEPTION_S = 10.0
"""A rank that has raised an exception must end within this time."""


class RankWatch:
    """Watches the ranks of one attempt, which have all been started.

    Args:
        attempt: the attempt on this machine.
        plan: says after how long ranks hang, and how long they may run.
        rendezvous: knows which machines are lost, and carries messages between the launchers.
        exit_reports: say whether ranks of other machines have failed.
        ending: watches processes that are slow to end.
        record: announces and records what the supervisor finds.
        say: function that shows an English line to the user.
    """

    def __init__(
        self,
        attempt: Attempt,
        plan: LaunchPlan,
        rendezvous: Rendezvous,
        exit_reports: ExitReports,
        ending: RankEnding,
        record: LauncherRecord,
        say: Callable[[str], object],
    ) -> None:
        self._attempt = attempt
        self._plan = plan
        self._rdzv = rendezvous
        self._exit_reports = exit_reports
        self._ending = ending
        self._record = record
        self._say = say
        self._next_slow_checks = 0.0  # at once
        self._spawned_ranks: list[Process] = []
        """The ranks that a script has spawned itself, if the launcher started one process."""

        # `launch(timeout=...)` says how long the ranks may run.
        self._timeout_at = math.inf if plan.timeout is None else time.monotonic() + plan.timeout

        processes = attempt.processes

        def take_snapshot_of_ranks(call_stacks: bool) -> Snapshot:
            """Returns what the ranks of this machine are doing, for other launchers that ask."""
            return take_snapshot(processes, call_stacks=call_stacks)

        self._snapshot_exchange = SnapshotExchange(
            rendezvous, attempt.node, attempt.num_nodes, take_snapshot_of_ranks
        )
        # It looks for hangs and stragglers, and calls `record.find` with what it has found.
        self._supervisor = Supervisor(
            processes, plan.hang, attempt.folder, record.find, self._snapshot_exchange
        )

    def ranks_must_end(self) -> bool:
        """Does the regular checks, and returns True if the ranks of this machine must be ended.

        Once they must be ended, the remaining checks are skipped. If that is because they hang or
        have run for too long, the attempt says so: `Attempt.hang` or `timed_out_ranks`.
        """
        now = time.monotonic()
        has_timed_out = now >= self._timeout_at and len(self._attempt.running) > 0
        if has_timed_out:
            self._attempt.timed_out_ranks = tuple(process.rank for process in self._attempt.running)
            return True

        # Only an elastic run goes on without a lost machine.
        if self._rdzv.departed_nodes() and not self._rdzv.goes_on_without_lost_nodes():
            return True

        if self._exit_reports.has_failure_elsewhere():
            return True

        if now >= self._next_slow_checks:
            self._next_slow_checks = now + _SLOW_CHECKS_INTERVAL_S
            self._do_slow_checks()

            # A rank that has failed, but does not end, would let others wait for it forever.
            if _runs_on_after_exception(self._attempt):
                return True

        self._snapshot_exchange.answer()  # other launchers may have asked for a snapshot
        if self._supervisor.check():
            self._attempt.hang = self._supervisor.verdict
            return True
        return False

    def _do_slow_checks(self) -> None:
        """Does the checks that read files of every rank. None of them ends the ranks."""
        self._note_peak_memory()
        if self._attempt.world_size == 1 and self._attempt.running:
            # The only rank may be a script that has spawned ranks of its own.
            self._watch_spawned_ranks()
        announce_deleted_logs(self._attempt, self._say)
        self._ending.watch_late_exits()

    def _note_peak_memory(self) -> None:
        """Notes the highest resident memory of each running rank, which cannot be read after its
        end.
        """
        for process in self._attempt.running:
            peak_bytes = peak_memory(process.pid) if process.pid else None
            if peak_bytes:
                process.peak_bytes = peak_bytes

    def _watch_spawned_ranks(self) -> None:
        """Makes the supervisor watch the ranks that the only process of an attempt has spawned.

        If it has spawned none, or all of them have returned, the supervisor watches that process
        itself, and `_spawned_ranks` is empty.
        """
        only_process = self._attempt.processes[0]
        spawned = spawned_ranks(only_process)  # empty if all of them have returned
        pids = [process.pid for process in spawned]
        watched_pids = [process.pid for process in self._spawned_ranks]
        others_must_be_watched = pids != watched_pids
        if others_must_be_watched:
            self._supervisor = Supervisor(
                spawned or [only_process],
                self._plan.hang,
                self._attempt.folder,
                self._record.find,
            )
            self._spawned_ranks = spawned
            return

        # These are the ranks that are watched already, but `spawned_ranks` creates new `Process`
        # objects each time. Copy their exit codes to the older objects that the supervisor has.
        for watched, current in zip(self._spawned_ranks, spawned, strict=True):
            watched.code = current.code


def announce_deleted_logs(attempt: Attempt, say: Callable[[str], object]) -> None:
    """Announces that somebody has deleted the logs of the ranks, once for each attempt.

    Args:
        attempt: the attempt, of which it is noted.
        say: function that shows an English line to the user.
    """
    if attempt.logs_deleted or all(log.exists() for log in attempt.logs):
        return

    attempt.logs_deleted = True
    still_watched = "" if attempt.over else "; failures and hangs are still reported"
    say(
        f"the logs in {attempt.folder} have been deleted, perhaps by a cleaner of temporary "
        f"folders: what the ranks print is not kept any more{still_watched}. --log-dir names "
        "another folder"
    )


def _runs_on_after_exception(attempt: Attempt) -> bool:
    """Returns True if a rank raised an exception a while ago but is still running.

    Others may be waiting for it.
    """
    for process in attempt.running:
        record = read_error(process.evidence)
        if record and time.time() - record.time > _EXIT_AFTER_EXCEPTION_S:
            return True
    return False
