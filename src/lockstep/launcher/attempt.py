"""One start of the ranks, from here: their streams, who watches them, and how it ended."""

from __future__ import annotations

import linecache
import math
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from lockstep.launcher.output import Console
from lockstep.launcher.peers import Node, departure
from lockstep.launcher.plan import HangRules
from lockstep.launcher.process import Attempt, Process, exit_status_of, peak_memory, read_oom_counts
from lockstep.launcher.rendezvous import Rendezvous
from lockstep.watchdog import exit_status
from lockstep.watchdog.exit_status import ExitReport, Interruption, LostNode
from lockstep.watchdog.first_failure import FirstFailure, first_failure, render
from lockstep.watchdog.snapshot import from_values, take_snapshot
from lockstep.watchdog.supervisor import SnapshotExchange, Supervisor

_STUCK_AT_EXIT_S = 10.0
"""A rank that has raised is given so long to end."""
_OTHERS_S = 5.0
"""After a failure here, the other machines are given so long to say what happened there."""
_LOOK_S = 0.1
_PEAKS_EVERY_S = 2.0
_REPORT, _DONE, _RANKS = "exit report", "done", "ranks"
"""What the launchers of a run tell each other."""


class Watch:
    """What goes with the ranks' processes: the agent's `Ranks`.

    Args:
        console: opens and reads the ranks' streams.
        rendezvous: for what the machines of the run tell each other.
        rules: when a run counts as hanging.
        say: called with each report.
        timeout: seconds from the start of the ranks after which the run is stopped; None: no limit.
    """

    def __init__(
        self,
        console: Console,
        rendezvous: Rendezvous,
        rules: HangRules,
        say: Callable[[str], None],
        timeout: float | None = None,
    ) -> None:
        self._console, self._rendezvous, self._rules, self._say = console, rendezvous, rules, say
        self._timeout, self._stop_at = timeout, math.inf
        self._oom = read_oom_counts()
        self._supervisor: Supervisor | None = None
        self._peaks: dict[int, int] = {}
        self._next_look = 0.0
        self._exchange: SnapshotExchange | None = None
        self._seen: list[Attempt] = []
        self._done: Attempt | None = None
        self.interrupted: Interruption | None = None
        """The signal that ended the run from outside."""
        self.late: tuple[int, ...] = ()
        """The ranks that still ran when the time was over."""

    def again(self, attempt: Attempt, left: int) -> None:
        """Says why the ranks are started again, before they are."""
        if attempt.failure is None:
            self._say("the machines of the run have changed; starting all ranks again")
            return
        self._say(render(attempt.failure))
        self._say(f"starting all ranks again (--max-restarts: {left} left after this)")

    def streams(self, process: Process, alone: bool) -> tuple[int, int, int]:
        """Opens the streams of a rank that is about to start."""
        return self._console.open(process.rank, process.local_rank, process.folder, alone=alone)

    def started(self, attempt: Attempt) -> None:
        """Begins to watch."""
        if self._timeout is not None:
            self._stop_at = time.monotonic() + self._timeout
        self._rendezvous.publish(_RANKS, [process.rank for process in attempt.processes])
        self._exchange = SnapshotExchange(
            self._rendezvous,
            attempt.node,
            attempt.nodes,
            lambda lines: take_snapshot(attempt.processes, lines=lines),
        )
        self._supervisor = Supervisor(
            attempt.processes, self._rules, attempt.folder, self._say, self._exchange.of_all_ranks
        )

    def look(self, attempt: Attempt) -> bool:
        """Whether the run is to be stopped."""
        now = time.monotonic()
        if now >= self._stop_at and attempt.running:
            self.late = tuple(process.rank for process in attempt.running)
            return True
        if self._rendezvous.lost_nodes() or self._failed_elsewhere(attempt):
            return True
        if now >= self._next_look:
            self._next_look = now + _PEAKS_EVERY_S
            for process in attempt.running:
                peak = peak_memory(process.pid) if process.pid else None
                if peak is not None:
                    self._peaks[process.rank] = peak
            if self._stuck(attempt):
                return True
        if self._exchange is not None:
            self._exchange.answer()
        return self._supervisor is not None and self._supervisor.check()

    def _stuck(self, attempt: Attempt) -> bool:
        """Whether a rank has raised and does not end, while others may wait for it."""
        records = [exit_status.read_record(process.folder) for process in attempt.running]
        return any(r is not None and time.time() - r.time > _STUCK_AT_EXIT_S for r in records)

    def ended(self, attempt: Attempt) -> None:
        """Reads the streams to their end and finds out what failed first."""
        if attempt not in self._seen:
            self._seen.append(attempt)
            self._console.drain()
            attempt.failure = self._failure(attempt)

    def others_are_done(self, attempt: Attempt) -> bool | None:
        """Whether the ranks of the other machines have ended well too; None: it cannot be known."""
        if attempt.nodes == 1:
            return True
        if not self._rendezvous.can_publish:
            return None
        if self._done is not attempt:
            self._done = attempt
            self._rendezvous.publish(_DONE, True)
        return len(self._rendezvous.published(_DONE)) == attempt.nodes

    def ending(self, attempt: Attempt) -> None:
        """Lets the other machines know why, before the ranks of this one are asked to end."""
        if attempt not in self._seen and attempt.nodes > 1:
            self._tell(self._report(attempt))

    def _tell(self, report: ExitReport) -> None:
        self._rendezvous.publish(_REPORT, report.to_values())

    def _report(self, attempt: Attempt) -> ExitReport:
        supervisor = self._supervisor
        stops = supervisor is not None and self._rules.on_hang == "stop"
        return ExitReport(
            host=socket.gethostname(),
            exits=tuple(
                exit_status_of(process, self._oom, peak_bytes=self._peaks.get(process.rank))
                for process in attempt.processes
                if process.code is not None
            ),
            complete=not attempt.running,
            hang=supervisor.verdict if supervisor and stops else None,
            judged_at=supervisor.judged_at if supervisor else 0.0,
            interrupted=self.interrupted or _ctrl_c(attempt),
        )

    def _others(self, attempt: Attempt) -> dict[int, ExitReport]:
        """What the other machines of the attempt have told, by node."""
        if attempt.nodes == 1:
            return {}
        told = self._rendezvous.published(_REPORT)
        return {
            node: from_values(ExitReport, v) for node, v in told.items() if node != attempt.node
        }

    def _failed_elsewhere(self, attempt: Attempt) -> bool:
        return any(report.failed for report in self._others(attempt).values())

    def _failure(self, attempt: Attempt) -> FirstFailure | None:
        own = self._report(attempt)
        reports = [own, *self._wait_for_reports(attempt, own)]
        hangs = [report for report in reports if report.hang is not None]
        judged = min(hangs, key=lambda report: report.judged_at, default=own)
        signals = [report for report in reports if report.interrupted is not None]
        exits = [status for report in reports for status in report.exits]
        failure = first_failure(
            exits,
            hang=judged.hang,
            judged_at=judged.judged_at,
            interrupted=signals[0].interrupted if signals else None,
            lost_nodes=self._lost({status.rank for status in exits}),
            folder=str(attempt.folder),
            read_line=linecache.getline,
        )
        if failure is not None and failure.kind == "interrupted" and own.interrupted is None:
            host = signals[0].host
            failure = replace(failure, headline=f"{failure.headline} on host {host}")
        return failure

    def _wait_for_reports(self, attempt: Attempt, own: ExitReport) -> Sequence[ExitReport]:
        """Those of the other machines that can be had in a few seconds."""
        if attempt.nodes == 1:
            return ()
        self._tell(own)
        limit = time.monotonic() + (_OTHERS_S if self._rendezvous.can_publish else 0.0)
        while time.monotonic() < limit:
            others = self._others(attempt)
            reports = [own, *others.values()]
            told = {node for node, report in others.items() if report.complete}
            gone = {_rank(node) for node in self._rendezvous.lost_nodes()}
            if (
                len(told | gone) >= attempt.nodes - 1
                or any(report.interrupted for report in reports)
                or not any(report.failed for report in reports)
            ):
                break
            time.sleep(_LOOK_S)
        return tuple(self._others(attempt).values())

    def _lost(self, explained: set[int]) -> list[LostNode]:
        """The machines that are gone without a word about their ranks."""
        ranks = self._rendezvous.published(_RANKS)
        return [
            LostNode(
                host=node.host,
                ranks=tuple(ranks.get(_rank(node), ())),
                time=time.time(),
                reason=departure(node),
            )
            for node in self._rendezvous.lost_nodes()
            if not explained & set(ranks.get(_rank(node), ()))
        ]


def _rank(node: Node) -> int:
    return -1 if node.rank is None else node.rank


def _ctrl_c(attempt: Attempt) -> Interruption | None:
    """Ctrl-C reaches a rank alone that has the terminal, and not the launcher."""
    for process in attempt.processes:
        if attempt.world_size == 1 and process.code == -signal.SIGINT and not process.sent:
            return Interruption(signal=signal.SIGINT, time=process.ended_at or time.time())
    return None
