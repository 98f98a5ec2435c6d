"""Tells the other launchers how the ranks of this machine end, and finds what failed first on all.

Each launcher publishes an `ExitReport` of its own ranks, and reads those of the others. All of them
apply the same pure function to all reports, and so arrive at the same first failure. Torch's own
rendezvous (etcd and others) carries no reports: each launcher then only knows its own ranks.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lockstep.machine.network import wait_until
from lockstep.run.machines.nodes import Node
from lockstep.run.machines.rendezvous import Rendezvous
from lockstep.run.start.interrupts import Interrupts
from lockstep.run.start.process import Attempt, exit_status_of
from lockstep.run.start.process_memory import OomCounts
from lockstep.run.watch.dataclass_json import from_values
from lockstep.run.watch.exit_status import ExitReport, ExitStatus, Interruption
from lockstep.run.watch.first_failure import FirstFailure, first_failure, lost_node

_EXIT_REPORT_KEY = "exit report"
"""The key under which the launchers of a run publish their exit reports for each other."""
_REPORTS_WAIT_S = 5.0
"""The time that the other launchers get to report their failures after a failure here."""


class ExitReports:
    """The exit reports of all launchers in one attempt.

    Args:
        rendezvous: carries the reports between the launchers.
        attempt: the attempt on this machine.
        earlier_failures: the keys of what failed first in earlier attempts. The launchers exchange
            them, because one that joined later has not seen these failures. So all of them agree on
            whether a failure is repeated.
        oom_counts_before: the kernel's out-of-memory counters from before any rank was started.
        interrupts: says whether the user has interrupted this launcher.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        attempt: Attempt,
        earlier_failures: Sequence[str],
        oom_counts_before: OomCounts,
        interrupts: Interrupts,
    ) -> None:
        self._rdzv = rendezvous
        self._attempt = attempt
        self._earlier_failures = tuple(earlier_failures)
        self._oom_counts_before = oom_counts_before
        self._interrupts = interrupts
        self._is_end_published = False
        """True once the other launchers know that all ranks of this machine have ended."""

    def publish(self) -> ExitReport:
        """Returns how the ranks of this machine have ended so far.

        If the run has several machines, the report is also published for the other launchers.
        """
        attempt = self._attempt
        exits = []
        for process in attempt.processes:
            has_ended = process.code is not None
            if has_ended:
                exits.append(exit_status_of(process, self._oom_counts_before))

        report = ExitReport(
            host=socket.gethostname(),
            ranks=tuple(process.rank for process in attempt.processes),
            exits=tuple(exits),
            complete=not attempt.running,
            earlier_failures=self._earlier_failures,
            hang=attempt.hang,
            interrupted=self._interrupts.received or _ctrl_c_of_only_rank(attempt),
        )
        if attempt.num_nodes > 1:
            self._rdzv.publish(_EXIT_REPORT_KEY, report.to_values())
        return report

    def of_others(self) -> dict[int, ExitReport]:
        """Returns the latest report of each other launcher, by the number of its node."""
        reports = {}
        if self._attempt.num_nodes > 1:
            for node, values in self._rdzv.published(_EXIT_REPORT_KEY).items():
                if node != self._attempt.node:
                    reports[node] = from_values(ExitReport, values)
        return reports

    def has_failure_elsewhere(self) -> bool:
        """Returns True if another launcher has reported a failure that ends the run."""
        return any(report.failed for report in self.of_others().values())

    def a_machine_has_ended_elsewhere(self) -> bool:
        """Returns True if all ranks of another machine are known to have ended."""
        return any(report.complete for report in self.of_others().values())

    def others_run(self) -> bool:
        """Returns True if ranks of other machines are still running.

        This is called once the ranks of this machine have ended. The first call of an attempt tells
        the other launchers so. With torch's own rendezvous, this returns False.
        """
        if self._attempt.num_nodes == 1 or not self._rdzv.can_publish:
            return False

        if not self._is_end_published:
            self._is_end_published = True
            self.publish()

        # A report is complete once all ranks of its machine have ended.
        complete = [report for report in self.of_others().values() if report.complete]
        num_other_nodes = self._attempt.num_nodes - 1
        return len(complete) < num_other_nodes

    def find_first_failure(self) -> FirstFailure | None:
        """Determines what failed first on all machines.

        The report of this machine is published, and the reports of the others are waited for if
        they are needed.

        Returns:
            The failure, or None if nothing failed.
        """
        own_report = self.publish()
        if self._rdzv.can_publish:
            deadline = time.monotonic() + _REPORTS_WAIT_S
            wait_until(lambda: self._can_tell_first_failure(own_report), deadline)

        reports_of_others = self.of_others()
        reports = [own_report, *reports_of_others.values()]
        exits: list[ExitStatus] = []
        earlier_failures: set[str] = set()
        for report in reports:
            exits += report.exits
            earlier_failures.update(report.earlier_failures)
        hangs = [report.hang for report in reports if report.hang is not None]

        # This launcher's report comes first, so it is taken if this one was interrupted too.
        interrupted_reports = (report for report in reports if report.interrupted is not None)
        interrupted_report = next(interrupted_reports, None)

        failure = first_failure(
            exits,
            hang=min(hangs, key=lambda hang: hang.found_at, default=None),
            interrupted=interrupted_report.interrupted if interrupted_report else None,
            lost_nodes=self._failures_of_lost_nodes(reports_of_others, exits),
            earlier_failures=earlier_failures,
            folder=self._folder_for_messages(),
        )
        if failure is None or interrupted_report is None:
            return failure

        # If the user has interrupted the launcher of another machine, the message says which.
        was_interrupted_elsewhere = interrupted_report is not own_report
        if failure.kind == "interrupted" and was_interrupted_elsewhere:
            headline = f"{failure.headline} on host {interrupted_report.host}"
            failure = replace(failure, headline=headline)
        return failure

    def _folder_for_messages(self) -> str:
        """Returns the folder of the attempt's logs and snapshots, as messages name it."""
        folder = str(self._attempt.folder)
        if self._attempt.logs_deleted:
            folder += " (its logs were deleted)"
        return folder

    def _failures_of_lost_nodes(
        self, reports_of_others: Mapping[int, ExitReport], exits: Sequence[ExitStatus]
    ) -> list[FirstFailure]:
        """Returns a failure for each lost machine, unless one of its ranks is known to have ended.

        How a rank ended says more than the loss of the machine.

        Args:
            reports_of_others: the last report of each other launcher, by the rank of its node.
            exits: how ranks of all machines have ended.
        """
        ended_ranks = {status.rank for status in exits}
        failures = []
        for node in self._rdzv.departed_nodes():
            last_report = reports_of_others.get(_node_rank(node))
            ranks = last_report.ranks if last_report else ()
            if ended_ranks.isdisjoint(ranks):
                failures.append(lost_node(node.host, ranks, time.time(), node.why))
        return failures

    def _can_tell_first_failure(self, own_report: ExitReport) -> bool:
        """Returns True if the other launchers have reported everything that is needed to find the
        first failure.
        """
        reports_of_others = self.of_others()
        reports = [own_report, *reports_of_others.values()]
        if any(report.interrupted for report in reports):
            return True  # the interruption is what ended the run, and further failures follow
        if not any(report.failed for report in reports):
            return True  # nothing failed, so there is no first failure to be found

        # Something failed. The first failure is known once every machine has reported the end of
        # all its ranks. Lost machines will report nothing more.
        awaited = set(range(self._attempt.num_nodes)) - {self._attempt.node}
        awaited -= {_node_rank(node) for node in self._rdzv.departed_nodes()}
        for node_rank, report in reports_of_others.items():
            if report.complete:
                awaited.discard(node_rank)
        return not awaited


def _node_rank(node: Node) -> int:
    """Returns the rank of a node, or -1, which no node has, if it has been given none yet."""
    return -1 if node.rank is None else node.rank


def _ctrl_c_of_only_rank(attempt: Attempt) -> Interruption | None:
    """Returns the Ctrl-C that ended the only rank of the run, if that was the case.

    A single rank may be in the foreground of the terminal, to read the keyboard. Ctrl-C then
    interrupts the rank, and not this launcher.
    """
    if attempt.world_size != 1:
        return None
    for process in attempt.processes:
        if process.code == -signal.SIGINT and not process.signals_sent:
            return Interruption(signal=signal.SIGINT, time=process.ended_at or time.time())
    return None
