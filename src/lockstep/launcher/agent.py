"""The agent: torch elastic's, with ranks from the zygote instead of fresh processes.

Rendezvous, membership and restarts are those of `torch.distributed.elastic`'s SimpleElasticAgent
(elastic/agent/server/api.py); its four abstract methods are here. It also holds the supervisor's
clock: torch elastic looks at the workers every `monitor_interval` seconds. What goes with the
processes, `Watch`, opens their streams, looks after them and finds out what failed first.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import ProcessFailure

from lockstep.launcher.machine import peak_memory, read_oom_counts
from lockstep.launcher.output import Console
from lockstep.launcher.peers import Node, departure
from lockstep.launcher.plan import HangRules
from lockstep.launcher.process import (
    Attempt,
    Process,
    exit_status_of,
    follow_keys,
    give_keys,
    in_foreground,
    take_keys,
)
from lockstep.launcher.rendezvous import Rendezvous
from lockstep.launcher.worker import FOLDER, Command
from lockstep.launcher.zygote import Ended, Refused, Zygote
from lockstep.watchdog import exit_status
from lockstep.watchdog.exit_status import ERROR_FILE, ExitReport, Interruption, LostNode
from lockstep.watchdog.first_failure import FirstFailure, first_failure, render
from lockstep.watchdog.snapshot import from_values
from lockstep.watchdog.supervisor import SnapshotExchange, Supervisor, take_snapshot

_ERROR_FILE_NAME = "elastic_error.json"
_SETTLE_S = 0.5
"""After a first failure the others follow within moments, and which came first matters."""
_INTERRUPT_S = 10.0
"""What a script does at Ctrl-C, such as saving, may take so long."""
_STUCK_AT_EXIT_S = 10.0
"""A rank that has raised is given so long to end."""
_OTHERS_S = 5.0
"""After a failure here, the other machines are given so long to say what happened there."""
_LOOK_S = 0.1
_PEAKS_EVERY_S = 2.0
_REPORT, _DONE, _RANKS = "exit report", "done", "ranks"
"""What the launchers of a run tell each other."""


class Agent(SimpleElasticAgent):
    """Starts, watches and ends the ranks of this machine.

    Args:
        spec: what torch elastic wants to know; the entry point is not used, the zygote has it.
        zygote: starts the ranks.
        command: what a rank executes; None: the zygote's own work.
        environment: variables for every rank.
        folder: of the run; each attempt gets a folder in it.
        watch: opens the streams and looks after the ranks.
        grace: seconds between asking the ranks to end and killing them.
        plain: the one process is not told that it is a rank: it starts the ranks itself.
        keyboard: a rank that is alone gets the terminal's keys while it runs.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        zygote: Zygote,
        command: Command | None,
        environment: Mapping[str, str],
        folder: Path,
        watch: Watch,
        grace: float,
        plain: bool,
        keyboard: bool = True,
    ) -> None:
        super().__init__(spec)  # not with the grace, which newer versions take: `_end` has it
        self._zygote, self._command, self._environment = zygote, command, environment
        self._folder, self._watch, self._grace = folder, watch, grace
        self._plain, self._keyboard = plain, keyboard
        self._refused: str | None = None
        """Why a rank could not be started."""
        self._alone: Process | None = None
        """The rank that has the terminal's keys."""
        self._failures = 0
        """Of attempts; torch elastic starts again after `max_restarts` of them."""
        self.attempts: list[Attempt] = []
        self.in_a_hurry = False
        """Set when the user asks a second time: what still runs is killed at once."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers = worker_group.workers
        folder = self._folder / f"attempt_{len(self.attempts)}"
        attempt = Attempt(
            restarts=self._failures,
            processes=[
                Process(w.global_rank, w.local_rank, folder / f"rank_{w.global_rank}")
                for w in workers
            ],
            world_size=workers[0].world_size,
            node=worker_group.group_rank or 0,
            nodes=worker_group.group_world_size or 1,
            folder=folder,
        )
        self.attempts.append(attempt)
        # Its process stays in the terminal's session where it is alone: pdb and input() work.
        alone = self._keyboard and attempt.world_size == 1 and in_foreground()
        self._alone = attempt.processes[0] if alone else None
        for worker in workers:
            try:
                self._start(worker_group, worker, attempt)
            except BaseException:  # such as a full disk; what was never started has no end
                del attempt.processes[worker.local_rank :]
                raise
        while any(process.pid is None for process in attempt.processes):
            self._read_events(timeout=1.0)
        if self._refused is not None:
            raise BlockingIOError(errno.EAGAIN, self._refused)
        self._watch.started(attempt)
        return {process.local_rank: process.pid for process in attempt.processes}

    def _start(self, group: WorkerGroup, worker: Worker, attempt: Attempt) -> None:
        process = attempt.processes[worker.local_rank]
        process.folder.mkdir(parents=True)
        command = self._command and self._command.for_rank(process.local_rank)
        # Counted alike by all machines, where the rendezvous knows; our own count is of ours alone.
        counted = getattr(group.spec.rdzv_handler, "attempt", None)
        restarts = attempt.restarts if counted is None else counted
        variables = {
            **({} if self._plain else rank_environment(group, worker, restarts, os.environ)),
            FOLDER: str(process.folder),
            ERROR_FILE: str(process.folder / _ERROR_FILE_NAME),
            **(command.environment if command else {}),
            **self._environment,
        }
        streams = self._watch.streams(process, attempt.world_size == 1)
        try:
            self._zygote.start(
                process.local_rank,
                variables,
                streams,
                own_session=process is not self._alone,
                command=command.line if command else (),
            )
        finally:
            for stream in streams:
                os.close(stream)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        attempt = self.attempts[-1]
        self._read_events()
        if self._alone and self._alone.pid and self._alone.code is None:
            follow_keys(self._alone.pid, self.pass_on)
        if self._watch.look(attempt) or _failures(attempt):
            settled = time.monotonic() + _SETTLE_S
            while attempt.running and time.monotonic() < settled:
                self._read_events(timeout=0.05)
            self._failures += 1
            return RunResult(state=WorkerState.FAILED, failures=_failures(attempt))
        # Those that have ended here are started again with the others when a rank elsewhere fails.
        if attempt.running or self._watch.others_are_done(attempt) is False:
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(
            state=WorkerState.SUCCEEDED,
            return_values={process.rank: None for process in attempt.processes},
        )

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        # Before the other machines are waited for, which may take minutes.
        left = worker_group.spec.max_restarts - self._failures
        self._watch.again(self.attempts[-1], left)
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._end(signal.SIGTERM, self._grace)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end(death_sig, self._grace)

    def _exit_barrier(self) -> None:
        # torch's waits in C++ for up to 300 s, where Ctrl-C is not heard.
        if self._watch.others_are_done(self.attempts[-1]) is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _end(self, number: int, grace: float) -> None:
        """Asks the ranks to end, waits, and kills those that have not."""
        if not self.attempts:
            return
        attempt = self.attempts[-1]
        self._watch.ending(attempt)
        # A rank that waits in C++ answers to Ctrl-C only when it comes back to Python; SIGTERM's
        # default ends it where it is.
        steps = [(number, grace)]
        if number == signal.SIGINT:
            steps = [(signal.SIGINT, _INTERRUPT_S), (signal.SIGTERM, grace)]
        for step, patience in steps:
            self._send(attempt, step)
            limit = time.monotonic() + patience
            while attempt.running and time.monotonic() < limit and not self.in_a_hurry:
                self._read_events(timeout=0.05)
        self._send(attempt, signal.SIGKILL)
        while attempt.running:
            self._read_events(timeout=1.0)
        if self._alone and self._alone.pid:
            take_keys(self._alone.pid)
        self._watch.ended(attempt)

    def pass_on(self, number: int) -> None:
        """Sends the ranks a signal that says nothing about their end."""
        if self.attempts:
            self._zygote.signal([p.local_rank for p in self.attempts[-1].running], number)

    def give_keys(self) -> None:
        """Gives the terminal's keys to a rank that is alone, if the launcher has them."""
        if self._alone and self._alone.pid and self._alone.code is None:
            give_keys(self._alone.pid)

    def _send(self, attempt: Attempt, number: int) -> None:
        running = attempt.running
        for process in running:
            process.sent.setdefault(number, time.time())
        if running:
            self._zygote.signal([process.local_rank for process in running], number)

    def _read_events(self, timeout: float = 0.0) -> None:
        processes = {process.local_rank: process for process in self.attempts[-1].processes}
        try:
            events = self._zygote.events(timeout)
        except ChildProcessError:
            # Somebody has killed it, and the kernel the ranks with it.
            events = [Ended(p.local_rank, p.pid or 0, -signal.SIGKILL) for p in processes.values()]
        for event in events:
            process = processes[event.rank]
            if isinstance(event, Refused):
                self.attempts[-1].processes.remove(process)  # what never started has no end
                self._refused = event.reason
            elif isinstance(event, Ended):
                if process.pid in (None, event.pid) and process.code is None:
                    process.pid, process.code = event.pid, event.code
                    process.ended_at = time.time()
            else:
                process.pid = event.pid


def rank_environment(
    group: WorkerGroup, worker: Worker, restarts: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables by which a rank finds its place, those of torchrun.

    Source: `LocalElasticAgent._start_workers` and `_set_local_rank_env` of torch.
    """
    spec = group.spec
    variables = {
        "RANK": worker.global_rank,
        "LOCAL_RANK": worker.local_rank,
        "GROUP_RANK": group.group_rank,
        "ROLE_RANK": worker.role_rank,
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "WORLD_SIZE": worker.world_size,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": restarts,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }
    if getattr(spec, "virtual_local_rank", False):  # each rank sees its own GPU alone, as device 0
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible is not None else []
        local = worker.local_rank
        variables["LOCAL_RANK"] = 0
        variables["CUDA_VISIBLE_DEVICES"] = devices[local].strip() if devices else local
    return {name: str(value) for name, value in variables.items()}


def _failures(attempt: Attempt) -> dict[int, ProcessFailure]:
    return {
        process.rank: ProcessFailure(
            local_rank=process.local_rank,
            pid=process.pid or 0,
            exitcode=process.code,
            error_file=str(process.folder / _ERROR_FILE_NAME),
        )
        for process in attempt.processes
        if process.code not in (None, 0)
    }


class Watch:
    """What goes with the ranks' processes: their streams, and who looks after them.

    Args:
        console: opens and reads the ranks' streams.
        rendezvous: for what the machines of the run tell each other.
        rules: when a run counts as hanging.
        timeout: seconds from the start of the ranks after which the run is stopped; None: no limit.
    """

    def __init__(
        self, console: Console, rendezvous: Rendezvous, rules: HangRules, timeout: float | None
    ) -> None:
        self._console, self._rendezvous, self._rules = console, rendezvous, rules
        self._announce = console.announce
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
            self._announce("the machines of the run have changed; starting all ranks again")
            return
        self._announce(render(attempt.failure))
        self._announce(f"starting all ranks again (--max-restarts: {left} left after this)")

    def streams(self, process: Process, alone: bool) -> tuple[int, int, int]:
        """Opens the streams of a rank that is about to start."""
        return self._console.open(process.rank, process.local_rank, process.folder, alone=alone)

    def started(self, attempt: Attempt) -> None:
        """Begins to watch."""
        if self._timeout is not None:
            self._stop_at = time.monotonic() + self._timeout
        self._rendezvous.publish(_RANKS, [process.rank for process in attempt.processes])
        processes = attempt.processes
        self._exchange = exchange = SnapshotExchange(
            self._rendezvous,
            attempt.node,
            attempt.nodes,
            lambda lines: take_snapshot(processes, lines=lines),
        )
        self._supervisor = Supervisor(
            processes, self._rules, attempt.folder, self._announce, exchange.of_all_ranks
        )

    def look(self, attempt: Attempt) -> bool:
        """Whether the run is to be stopped."""
        now = time.monotonic()
        if now >= self._stop_at and attempt.running:
            self.late = tuple(process.rank for process in attempt.running)
            return True
        others = self._others(attempt).values()
        if self._rendezvous.lost_nodes() or any(report.failed for report in others):
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
            self._rendezvous.publish(_REPORT, self._report(attempt).to_values())

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
        )
        if failure is not None and failure.kind == "interrupted" and own.interrupted is None:
            host = signals[0].host
            failure = replace(failure, headline=f"{failure.headline} on host {host}")
        return failure

    def _wait_for_reports(self, attempt: Attempt, own: ExitReport) -> Sequence[ExitReport]:
        """Those of the other machines that can be had in a few seconds."""
        if attempt.nodes == 1:
            return ()
        self._rendezvous.publish(_REPORT, own.to_values())
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
