"""One start of the ranks, from here: their streams, who watches them, and how it ended."""

from __future__ import annotations

import json
import linecache
import math
import signal
import time
from collections.abc import Callable

from lockstep.diagnose.endings import Ending, Interruption, LostNode, ending_from
from lockstep.diagnose.first_failure import FirstFailure, first_failure, render
from lockstep.diagnose.snapshot import Snapshot, from_json, merge, shorten, to_json
from lockstep.launch import deaths, exceptions
from lockstep.launch.logs import Console
from lockstep.launch.meeting import Meeting
from lockstep.launch.nodes import Node, departure
from lockstep.launch.process import Attempt, Process
from lockstep.launch.spec import HangRules
from lockstep.launch.supervise import Supervisor

_STUCK_AT_EXIT_S = 10.0
"""A rank that has raised is given so long to end."""
_OTHERS_S = 3.0
"""After a failure here, the other machines are given so long to say what happened there."""
_LOOK_S = 0.1
_PEAKS_EVERY_S = 2.0
_ENDINGS, _RANKS, _SNAPSHOT = "endings", "ranks", "snapshot"
"""What the launchers of a run tell each other."""


class Watch:
    """What goes with the ranks' processes: the agent's `Ranks`.

    Args:
        console: opens and reads the ranks' streams.
        meeting: for what the machines of the run tell each other.
        rules: when a run counts as hanging.
        say: called with each report.
        timeout: seconds from the start of the ranks after which the run is stopped; None: no limit.
    """

    def __init__(
        self,
        console: Console,
        meeting: Meeting,
        rules: HangRules,
        say: Callable[[str], None],
        timeout: float | None = None,
    ) -> None:
        self._console, self._meeting, self._rules, self._say = console, meeting, rules, say
        self._timeout, self._stop_at = timeout, math.inf
        self._oom = deaths.read_oom_counts()
        self._supervisor: Supervisor | None = None
        self._peaks: dict[int, int] = {}
        self._next_look = 0.0
        self._times: dict[int, float] = {}
        """Of the snapshots last heard, by node."""
        self._seen: list[Attempt] = []
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
        nodes = attempt.nodes
        if self._timeout is not None:
            self._stop_at = time.monotonic() + self._timeout
        self._meeting.tell(_RANKS, [process.rank for process in attempt.processes])
        self._supervisor = Supervisor(
            attempt.processes,
            self._rules,
            attempt.folder,
            self._say,
            (lambda own: self._share(own, nodes)) if nodes > 1 else lambda own: own,
        )

    def look(self, attempt: Attempt) -> bool:
        """Whether the run is to be stopped."""
        now = time.monotonic()
        if now >= self._stop_at and attempt.running:
            self.late = tuple(process.rank for process in attempt.running)
            return True
        if now >= self._next_look:
            self._next_look = now + _PEAKS_EVERY_S
            for process in attempt.running:
                peak = deaths.peak_memory(process.pid) if process.pid else None
                if peak is not None:
                    self._peaks[process.rank] = peak
            if self._meeting.lost_nodes() or self._stuck(attempt):
                return True
        return self._supervisor is not None and self._supervisor.look()

    def _stuck(self, attempt: Attempt) -> bool:
        """Whether a rank has raised and does not end, while others may wait for it."""
        records = [exceptions.read_record(process.folder) for process in attempt.running]
        return any(r is not None and time.time() - r.time > _STUCK_AT_EXIT_S for r in records)

    def ended(self, attempt: Attempt) -> None:
        """Reads the streams to their end and finds out what failed first."""
        if attempt not in self._seen:
            self._seen.append(attempt)
            self._console.drain()
            attempt.failure = self._failure(attempt)

    def wait_for_other_nodes(self, attempt: Attempt) -> None:
        """Waits until the ranks of the other machines have ended as well, or a machine is lost."""
        self._meeting.tell("done", True)
        while len(self._meeting.heard("done")) < attempt.nodes and not self._meeting.lost_nodes():
            time.sleep(_LOOK_S)

    def _failure(self, attempt: Attempt) -> FirstFailure | None:
        own = [
            deaths.ending(process, self._oom, peak_bytes=self._peaks.get(process.rank))
            for process in attempt.processes
            if process.code is not None
        ]
        failed = any(end.code != 0 and end.asked_to_end is None for end in own)
        supervisor = self._supervisor
        verdict = supervisor.verdict if supervisor else None
        endings = self._with_others(own, attempt, wait=failed and self.interrupted is None)
        return first_failure(
            endings,
            hang=verdict if self._rules.on_hang == "stop" else None,
            judged_at=supervisor.judged_at if supervisor else 0.0,
            interrupted=self.interrupted or _ctrl_c(attempt),
            lost_nodes=self._lost(endings),
            folder=str(attempt.folder),
            read_line=linecache.getline,
        )

    def _with_others(self, own: list[Ending], attempt: Attempt, wait: bool) -> list[Ending]:
        """The endings of all machines' ranks, those that can be had in a few seconds."""
        if attempt.nodes == 1:
            return own
        self._meeting.tell(_ENDINGS, [end.to_values() for end in own])
        limit = time.monotonic() + _OTHERS_S
        while wait and time.monotonic() < limit:
            gone = len(self._meeting.lost_nodes())
            if len(self._meeting.heard(_ENDINGS)) + gone >= attempt.nodes:
                break
            time.sleep(_LOOK_S)
        told = self._meeting.heard(_ENDINGS)
        others = [ending_from(v) for node, vs in told.items() if node != attempt.node for v in vs]
        return own + others

    def _lost(self, endings: list[Ending]) -> list[LostNode]:
        """The machines that are gone without a word about their ranks."""
        ranks = self._meeting.heard(_RANKS)
        explained = {end.rank for end in endings}
        return [
            LostNode(
                host=node.host,
                ranks=tuple(ranks.get(_rank(node), ())),
                time=time.time(),
                reason=departure(node),
            )
            for node in self._meeting.lost_nodes()
            if not explained & set(ranks.get(_rank(node), ()))
        ]

    def _share(self, own: Snapshot, nodes: int) -> Snapshot | None:
        """All ranks of the run; None while a machine has told nothing new."""
        self._meeting.tell(_SNAPSHOT, json.loads(to_json(shorten(own))))
        told = {
            node: from_json(json.dumps(values))
            for node, values in self._meeting.heard(_SNAPSHOT).items()
        }
        times = {node: snapshot.time for node, snapshot in told.items()}
        fresh = all(times[node] != self._times.get(node) for node in times)
        self._times = times
        return merge(told.values()) if fresh and len(told) == nodes else None


def _rank(node: Node) -> int:
    return -1 if node.rank is None else node.rank


def _ctrl_c(attempt: Attempt) -> Interruption | None:
    """Ctrl-C reaches a rank alone that has the terminal, and not the launcher."""
    for process in attempt.processes:
        if attempt.world_size == 1 and process.code == -signal.SIGINT and not process.sent:
            return Interruption(signal=signal.SIGINT, time=process.ended_at or time.time())
    return None
