"""A run on this machine: from the rendezvous with the other machines to how it ended.

The agent is torch elastic's, with ranks from the zygote instead of fresh processes. Its loop and
its restarts are those of `torch.distributed.elastic`'s SimpleElasticAgent
(elastic/agent/server/api.py); its four abstract methods are here. Where machines may come and go
(`--nnodes MIN:MAX`), one that is lost is no failure: the others start again without it. It also
holds the supervisor's clock: torch elastic looks at the workers every `monitor_interval` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException

from lockstep.distributed.network import socket_variables, wait_until
from lockstep.errors import LockstepError, SettingError
from lockstep.run.machines.nodes import Node
from lockstep.run.machines.open_rendezvous import open_rendezvous
from lockstep.run.machines.rendezvous import Rendezvous
from lockstep.run.start import process as job
from lockstep.run.start.machine import RoundMemory, peak_memory, read_oom_counts
from lockstep.run.start.output import Console, console_for
from lockstep.run.start.plan import LaunchPlan, rendezvous_parameters, shutdown_timeout
from lockstep.run.start.process import Attempt, Journal, Process, exit_status_of, started_by
from lockstep.run.start.zygote import Event, Zygote
from lockstep.run.watch import error_record
from lockstep.run.watch.dataclass_json import from_values
from lockstep.run.watch.error_record import TORCH_ERROR_FILE_VARIABLE
from lockstep.run.watch.evidence import FOLDER_VARIABLE, create_evidence_memory
from lockstep.run.watch.exit_status import ExitReport, Interruption
from lockstep.run.watch.failure_report import render_failure
from lockstep.run.watch.first_failure import FirstFailure, first_failure, lost_node
from lockstep.run.watch.probe import FLIGHT_RECORDER_VARIABLES
from lockstep.run.watch.process_status import read_process
from lockstep.run.watch.snapshot import STOPPED_STATES
from lockstep.run.watch.snapshot_exchange import SnapshotExchange
from lockstep.run.watch.supervisor import Supervisor
from lockstep.run.watch.take_snapshot import take_snapshot
from lockstep.wording import count_noun

_ERROR_FILE_NAME = "elastic_error.json"
_STARTS_IN_FLIGHT = 8
"""How many ranks the zygote is asked for ahead of its answers."""
_SETTLE_S = 0.5
"""After a first failure the others follow within moments, and which came first matters."""
_INTERRUPT_S = 10.0
"""What a script does at Ctrl-C, such as saving, may take so long."""
_STUCK_AT_EXIT_S = 10.0
"""A rank that has raised is given so long to end."""
_OTHERS_S = 5.0
"""After a failure here, the other machines are given so long to say what happened there."""
_CHANGE_S = 2.0
"""A lost connection to another rank is noticed so much earlier than that its machine is lost."""
_PEAKS_EVERY_S = 2.0
_LONGEST_INTERVAL_S = 0.5
"""Between two looks at the ranks, as other launchers wait only seconds for an answer."""
_REPORT = "exit report"
"""What the launchers of a run tell each other."""
LAUNCHER = "LOCKSTEP_LAUNCHER"
"""Variable of a rank: who gave it its rank, in words; `lockstep.init` prints it."""
_SCARCE = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_PIPES, _PIPES_PER_RANK = 6, 3
"""As many as use the descriptors that a run on one machine needs."""
_ROOMY, _ROOMY_PER_RANK = 64, 16
"""Descriptors with which evidence can be kept in memory as well, and many are left."""


def launch_agent(
    plan: LaunchPlan, flags: argparse.Namespace, zygote: Zygote, folder: Path
) -> Agent:
    """Meets the other machines, starts the ranks of this one and watches them to their end.

    Args:
        plan: what to start here.
        flags: torchrun's.
        zygote: starts the ranks.
        folder: of the run; each attempt gets a folder in it.

    Returns:
        The agent, which knows how the run has ended on this machine.

    Raises:
        SettingError: a flag's value that cannot be honoured.
        JoinError: the machines of the run did not come together.
    """
    parameters = rendezvous_parameters(flags)
    again = flags.max_restarts > 0 or parameters.min_nodes < parameters.max_nodes
    with (
        _scarcity_explained(plan.nproc),
        console_for(flags, plan.nproc) as console,
        contextlib.closing(RoundMemory(plan.nproc if again else 0)) as memory,
        open_rendezvous(parameters, console.announce) as rendezvous,
    ):
        variables = {
            **{k: v for k, v in FLIGHT_RECORDER_VARIABLES.items() if k not in os.environ},
            **socket_variables(os.environ, rendezvous.interface),
            **plan.environment,
            **({} if plan.nproc == 1 and plan.one_node else console.environment),
            **({} if plan.own_processes else {LAUNCHER: plan.launcher}),
        }
        agent = Agent(plan, flags, zygote, folder, variables, console, rendezvous, memory)
        numbers = [text.strip() for text in flags.signals_to_handle.split(",") if text.strip()]
        handlers: dict[int, Callable[[int], object]] = {
            signal.SIGUSR1: agent.pass_on,  # it asks for a checkpoint
            signal.SIGUSR2: agent.wait_no_longer,
            signal.SIGTSTP: agent.stop,
            **{signal.Signals[name]: agent.interrupt for name in numbers},
        }
        try:
            with job.handled(handlers), _quiet_torch_logs():
                agent.run()
        except SignalException:  # `agent.interrupted` has it
            events.record(agent.get_event_failed(), flags.event_log_handler)
        except LockstepError as error:
            # For another start, that is; what made it necessary is the first failure.
            if agent.failure is None:
                raise
            console.announce(f"the ranks cannot be started again: {error}")
        else:
            events.record(agent.get_event_succeeded(), flags.event_log_handler)
            rendezvous.shutdown()
        if agent.failure is not None:
            rendezvous.close(agent.failure.headline)
        elif agent.interrupted is not None:
            rendezvous.close(f"it was sent {signal.Signals(agent.interrupted.signal).name}")
        console.hurry = agent.interrupted is not None
    return agent


class Agent(api.SimpleElasticAgent):
    """Starts, watches and ends the ranks of this machine.

    Args:
        plan: what to start here.
        flags: torchrun's.
        zygote: starts the ranks.
        folder: of the run.
        variables: for every rank.
        console: opens and reads the ranks' streams.
        rendezvous: also carries what the machines of the run tell each other.
        memory: held for the ranks.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        flags: argparse.Namespace,
        zygote: Zygote,
        folder: Path,
        variables: Mapping[str, str],
        console: Console,
        rendezvous: Rendezvous,
        memory: RoundMemory,
    ) -> None:
        super().__init__(  # not with the grace, which newer versions take: `_end` has it
            api.WorkerSpec(
                role=flags.role,
                local_world_size=plan.nproc,
                rdzv_handler=rendezvous,
                entrypoint=folder.name,  # of events alone: the zygote has the ranks' work
                max_restarts=flags.max_restarts,
                monitor_interval=min(flags.monitor_interval, _LONGEST_INTERVAL_S),
                local_addr=flags.local_addr,
                event_log_handler=flags.event_log_handler,
                virtual_local_rank=flags.virtual_local_rank,
            )
        )
        self._grace = shutdown_timeout(getattr(flags, "shutdown_timeout", None), os.environ)
        self._plan, self._zygote, self._folder, self._variables = plan, zygote, folder, variables
        self._console, self._announce, self._rdzv = console, console.announce, rendezvous
        report = {**os.environ, **variables}.get("LOCKSTEP_REPORT")
        self._journal = Journal(report, console.announce)
        # By a method of this agent's the supervisor would hold it, and with it the store.
        self._memory = memory
        self._marks: list[int] = []
        rendezvous.defers_joiners = self._round_goes_on
        self._stop_at, self._next_look = math.inf, 0.0
        self._oom = read_oom_counts()
        self._refused: str | None = None
        """Why a rank could not be started."""
        self._alone: Process | None = None
        """The rank that has the terminal's keys."""
        self._failures = 0
        """Of attempts; torch elastic starts again after `max_restarts` of them."""
        self._shielded = False
        self._held_back: SignalException | None = None
        """See `_uninterrupted`."""
        self._in_a_hurry = False
        """The user asks a second time: what still runs is killed at once."""
        self._supervisor: Supervisor | None = None
        self._exchange: SnapshotExchange
        self._own: list[Process]
        """What the one rank has started."""
        self.attempts: list[Attempt] = []
        """Of starting the ranks; empty: the run was interrupted before that."""
        self.interrupted: Interruption | None = None
        """The signal that ended the run from outside."""
        self.late: tuple[int, ...] = ()
        """The ranks that were ended because the time was over."""

    @property
    def failure(self) -> FirstFailure | None:
        """What failed first in the last attempt, once that is over."""
        return self.attempts[-1].failure if self.attempts else None

    @property
    def exit_code(self) -> int:
        """See `lockstep.errors`."""
        if self.failure is not None:
            return self.failure.exit_code
        return 0 if self.interrupted is None else 128 + self.interrupted.signal

    def _start_workers(self, worker_group: api.WorkerGroup) -> dict[int, Any]:
        workers = worker_group.workers
        folder = self._folder / f"attempt_{len(self.attempts)}"
        attempt = Attempt(
            processes=[],
            world_size=workers[0].world_size,
            node=worker_group.group_rank or 0,
            nodes=worker_group.group_world_size or 1,
            folder=folder,
        )
        self.attempts.append(attempt)
        self._alone, self._marks = None, []
        self._supervisor = None  # that of the last attempt has its verdict
        self._journal.start(attempt, self._plan.script)
        for worker in workers:
            self._start(worker_group, worker, attempt)
            self._await_starts(attempt, at_most=_STARTS_IN_FLIGHT)
        self._await_starts(attempt, at_most=0)
        if self._refused is not None:
            raise BlockingIOError(errno.EAGAIN, self._refused)
        self._watch(attempt)
        return {process.local_rank: process.pid for process in attempt.processes}

    def _await_starts(self, attempt: Attempt, *, at_most: int) -> None:
        """Waits until no more than so many ranks have yet to start.

        Else the socket to the zygote could be full in both directions, and each side wait for the
        other to read.
        """
        while sum(process.pid is None for process in attempt.processes) > at_most:
            self._read_events(timeout=1.0)

    def _start(self, group: api.WorkerGroup, worker: api.Worker, attempt: Attempt) -> None:
        rank, local_rank = worker.global_rank, worker.local_rank
        process = Process(rank, local_rank, attempt.folder / f"rank_{rank}")
        process.folder.mkdir(parents=True)
        roomy = _ROOMY + _ROOMY_PER_RANK * self._plan.nproc
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= roomy:
            process.memory = create_evidence_memory(process.folder)
        alone = attempt.world_size == 1
        # Its process stays in the terminal's session where it is alone: pdb and input() work.
        if alone and self._plan.keyboard and job.in_foreground():
            self._alone = process
        command = self._plan.command.for_rank(local_rank)
        # Counted alike by all machines, where the rendezvous knows; our own count is of ours alone.
        shared_count = self._rdzv.attempt
        restarts = self._failures if shared_count is None else shared_count
        place = rank_environment(group, worker, restarts, os.environ)
        variables = {
            # Where it starts the ranks itself, the one process is not told that it is one.
            **({} if self._plan.own_processes else place),
            FOLDER_VARIABLE: str(process.folder),
            TORCH_ERROR_FILE_VARIABLE: str(process.folder / _ERROR_FILE_NAME),
            **({} if process.memory is None else process.memory.variables),
            **self._memory.variables(local_rank),
            **command.environment,
            **self._variables,
        }
        streams = self._console.open(
            rank,
            local_rank,
            process.folder,
            alone=alone,
            error=process.evidence.error,
            recent=process.errors,
        )
        attempt.logs += process.folder.glob("*.log")
        with self._uninterrupted():
            try:
                self._zygote.start(
                    local_rank,
                    variables,
                    streams,
                    own_session=process is not self._alone,
                    command=command.line,
                )
            except ChildProcessError as error:
                raise LockstepError(
                    f"--nproc {self._plan.nproc}",
                    str(error),
                    "find out what killed it; if memory ran out, the kernel's log (dmesg) says so",
                ) from None
            finally:
                for stream in streams:
                    os.close(stream)
            attempt.processes.append(process)

    def _watch(self, attempt: Attempt) -> None:
        """Begins to look after the ranks."""
        if self._plan.timeout is not None:
            self._stop_at = time.monotonic() + self._plan.timeout
        self._tell(attempt)
        processes = attempt.processes
        self._exchange = SnapshotExchange(
            self._rdzv,
            attempt.node,
            attempt.nodes,
            lambda lines: take_snapshot(processes, lines=lines),
        )
        self._own = []
        self._supervisor = Supervisor(
            processes, self._plan.hang, attempt.folder, self._journal.find, self._exchange
        )

    def _watch_own(self, attempt: Attempt) -> None:
        """Looks after the processes that a rank which is alone has started, in its place."""
        own = started_by(attempt.processes[0])
        if [process.pid for process in own] != [process.pid for process in self._own]:
            processes, rules = own or attempt.processes, self._plan.hang
            self._supervisor = Supervisor(processes, rules, attempt.folder, self._journal.find)
            self._own = own
        for known, now in zip(self._own, own, strict=True):
            known.code = now.code

    def _monitor_workers(self, worker_group: api.WorkerGroup) -> api.RunResult:
        attempt = self.attempts[-1]
        self._read_events()
        if self._alone and self._alone.pid and self._alone.code is None:
            job.follow_keys(self._alone.pid, self.pass_on)
        if self._is_over(attempt) or _failures(attempt):
            settled = time.monotonic() + _SETTLE_S
            while attempt.running and time.monotonic() < settled:
                self._read_events(timeout=0.05)
            if _failures(attempt) and self._others_changed(attempt):
                return api.RunResult(state=api.WorkerState.HEALTHY)  # and start again, see above
            self._failures += 1
            return api.RunResult(state=api.WorkerState.FAILED, failures=_failures(attempt))
        # Those that have ended here are started again with the others when a rank elsewhere fails.
        if attempt.running or self._others_run(attempt):
            return api.RunResult(state=api.WorkerState.HEALTHY)
        return api.RunResult(
            state=api.WorkerState.SUCCEEDED,
            return_values={process.rank: None for process in attempt.processes},
        )

    def _others_changed(self, attempt: Attempt) -> bool:
        """Whether ranks here have failed because the run goes on with other machines."""
        failed = any(report.failed for report in self._others(attempt).values())
        if failed or not self._rdzv.elastic:
            return False
        wait_until(lambda: self._rdzv.num_nodes_waiting() > 0, time.monotonic() + _CHANGE_S)
        return self._rdzv.num_nodes_waiting() > 0

    def _round_goes_on(self) -> bool:
        """Whether ranks keep rounds in memory, and none since this was asked first."""
        now = self._memory.marks()
        if not any(now):
            return False
        self._marks = self._marks or now
        return self._memory.busy or now == self._marks

    def _restart_workers(self, worker_group: api.WorkerGroup) -> None:
        lost, number = self._rdzv.describe_lost_nodes(), signal.SIGTERM
        if self._rdzv.elastic and worker_group.state == api.WorkerState.HEALTHY:
            self._rdzv.request_restart()
            # What they would save at SIGTERM is there already.
            number = signal.SIGKILL if any(self._memory.marks()) else number
        self._end(number, again=True)
        # Before the other machines are waited for, which may take minutes.
        if lost:
            self._announce(f"{lost}; starting the ranks of the other machines again")
        elif self.failure is None:
            self._announce("the machines of the run have changed; starting all ranks again")
        else:
            left = worker_group.spec.max_restarts - self._failures
            self._announce(render_failure(self.failure))
            self._announce(f"starting all ranks again (--max-restarts: {left} left after this)")
        self._journal.write("restart", "all ranks are started again")
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: api.WorkerGroup) -> None:
        self._end(signal.SIGTERM)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end(death_sig)

    def _exit_barrier(self) -> None:
        # torch's waits in C++ for up to 300 s, where Ctrl-C is not heard; `_others_run` has waited.
        if not self._rdzv.can_publish:
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _end(self, number: int, *, again: bool = False) -> None:
        """Asks the ranks to end, waits, and kills those that have not; finds out what failed.

        Args:
            number: of the signal that asks them.
            again: the ranks are then started again.
        """
        if not self.attempts or self.attempts[-1].over:
            return
        attempt = self.attempts[-1]
        self._tell(attempt)
        # A rank that waits in C++ answers to Ctrl-C only when it comes back to Python; SIGTERM's
        # default ends it where it is.
        steps = [(number, self._grace)]
        if number == signal.SIGINT:
            steps = [(signal.SIGINT, _INTERRUPT_S), (signal.SIGTERM, self._grace)]
        for step, patience in steps:
            self._send(attempt, step)
            limit = time.monotonic() + patience
            while attempt.running and time.monotonic() < limit and not self._in_a_hurry:
                self._read_events(timeout=0.05)
        self._send(attempt, signal.SIGKILL)
        while attempt.running:
            self._read_events(timeout=1.0)
        ended_well = all(process.code == 0 for process in attempt.processes)
        if again or self.interrupted is not None or not ended_well:
            with self._uninterrupted():
                self._zygote.end_left_behind()
        if self._alone and self._alone.pid:
            job.take_keys(self._alone.pid)
        attempt.over = True
        self._console.drain()
        self._check_logs(attempt)
        attempt.failure = self._first_failure(attempt)
        self._keep_evidence(attempt)
        self._journal.end(attempt.failure)

    def _check_logs(self, attempt: Attempt) -> None:
        """Says once that somebody has deleted the ranks' logs."""
        if attempt.logs_deleted or all(log.exists() for log in attempt.logs):
            return
        attempt.logs_deleted = True
        kept = "" if attempt.over else "; failures and hangs are still reported"
        self._announce(
            f"the logs in {attempt.folder} have been deleted, perhaps by a cleaner of temporary "
            f"folders: what the ranks print is not kept any more{kept}. --log-dir names another "
            "folder"
        )

    def _keep_evidence(self, attempt: Attempt) -> None:
        """Writes what the ranks have told into their folders, and frees the memory it was in."""
        for process in attempt.processes:
            if process.memory is None:
                continue
            try:
                process.memory.keep()
            except OSError as error:
                self._announce(f"rank {process.rank}: {process.folder}: {error.strerror}")
            process.memory.close()
            process.memory = None

    def _send(self, attempt: Attempt, number: int) -> None:
        for process in attempt.running:
            process.sent.setdefault(number, time.time())
            status = read_process(process.pid or 0)
            process.stopped |= status is not None and status.state in STOPPED_STATES
        self.pass_on(number)

    # What the user asks for

    def pass_on(self, number: int) -> None:
        """Sends the ranks a signal."""
        running = self.attempts[-1].running if self.attempts else []
        if running:
            self._zygote.signal([process.local_rank for process in running], number)

    def interrupt(self, number: int) -> None:
        """Ends the run in order, and when called again kills what still runs."""
        if self.interrupted is not None:
            self._in_a_hurry = True
            return
        self.interrupted = Interruption(signal=number, time=time.time())
        end = SignalException(f"process {os.getpid()} got signal {number}", signal.Signals(number))
        if not self._shielded:
            raise end
        self._held_back = end

    def wait_no_longer(self, number: int) -> None:
        """Ends the run where no rank has started: another machine of it has failed.

        Where ranks have started, the launchers find that out by themselves, and what failed first.
        """
        if not self.attempts:
            self.interrupt(signal.SIGTERM)

    @contextlib.contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Within it a signal that ends the run waits, so that nothing of a rank is lost.

        One whose end was read and not written down would be waited for for ever.
        """
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = False
        held, self._held_back = self._held_back, None
        if held is not None:
            raise held

    def stop(self, number: int) -> None:
        """Stops the ranks and this process; lets the ranks go on when this process does."""
        # Not SIGTSTP: the kernel does not stop groups by it that no shell could let go on.
        self.pass_on(signal.SIGSTOP)
        job.stop_here()
        if self._alone and self._alone.pid and self._alone.code is None:
            job.give_keys(self._alone.pid)
        self.pass_on(signal.SIGCONT)

    # What happens to the ranks

    def _read_events(self, timeout: float = 0.0) -> None:
        with self._uninterrupted():
            processes = {process.local_rank: process for process in self.attempts[-1].processes}
            try:
                events = self._zygote.events(timeout)
            except ChildProcessError:
                # Somebody has killed it, and the kernel the ranks with it.
                killed = processes.items()
                events = [Event(rank, p.pid or 0, -signal.SIGKILL) for rank, p in killed]
                code = self._zygote.wait()
                for process in self.attempts[-1].running:
                    process.fork_server = (
                        f"the fork server (process {self._zygote.pid}, which starts the ranks) "
                        f"ended first: {job.in_words(code)}; the kernel then kills its ranks"
                    )
            for event in events:
                process = processes[event.rank]
                if event.pid is None:
                    self.attempts[-1].processes.remove(process)  # what never started has no end
                    self._refused = event.reason
                elif event.code is None:
                    process.pid = event.pid
                elif process.pid in (None, event.pid) and process.code is None:
                    process.pid, process.code, process.ended_at = event.pid, event.code, time.time()

    def _is_over(self, attempt: Attempt) -> bool:
        """Whether the run is to be stopped."""
        now = time.monotonic()
        if now >= self._stop_at and attempt.running:
            self.late = tuple(process.rank for process in attempt.running)
            return True
        others = self._others(attempt).values()
        lost = self._rdzv.lost_nodes() and not self._rdzv.describe_lost_nodes()
        if lost or any(report.failed for report in others):
            return True
        if now >= self._next_look:
            self._next_look = now + _PEAKS_EVERY_S
            for process in attempt.running:
                peak = peak_memory(process.pid) if process.pid else None
                process.peak_bytes = peak or process.peak_bytes
            if attempt.world_size == 1 and attempt.running:
                self._watch_own(attempt)
            self._check_logs(attempt)
            # A rank that has raised and does not end, while others may wait for it.
            records = [error_record.read_error(process.evidence) for process in attempt.running]
            if any(r and time.time() - r.time > _STUCK_AT_EXIT_S for r in records):
                return True
        self._exchange.answer()
        return self._supervisor is not None and self._supervisor.check()

    # What the machines tell each other

    def _tell(self, attempt: Attempt) -> ExitReport:
        """Lets the other machines know what has become of the ranks of this one."""
        report = ExitReport(
            host=socket.gethostname(),
            ranks=tuple(process.rank for process in attempt.processes),
            exits=tuple(
                exit_status_of(process, self._oom)
                for process in attempt.processes
                if process.code is not None
            ),
            complete=not attempt.running,
            hang=self._supervisor.verdict if self._supervisor else None,
            interrupted=self.interrupted or _ctrl_c(attempt),
        )
        if attempt.nodes > 1:
            self._rdzv.publish(_REPORT, report.to_values())
        return report

    def _others(self, attempt: Attempt) -> dict[int, ExitReport]:
        """What the other machines of the attempt have told, by node."""
        told = self._rdzv.published(_REPORT) if attempt.nodes > 1 else {}
        return {n: from_values(ExitReport, v) for n, v in told.items() if n != attempt.node}

    def _others_run(self, attempt: Attempt) -> bool:
        """Whether ranks of other machines have not ended, or not all have said so."""
        if attempt.nodes == 1 or not self._rdzv.can_publish:
            return False
        if not attempt.told:
            attempt.told = True
            self._tell(attempt)
        return sum(report.complete for report in self._others(attempt).values()) < attempt.nodes - 1

    def _first_failure(self, attempt: Attempt) -> FirstFailure | None:
        own = self._tell(attempt)

        def all_said() -> bool:
            """How their ranks ended; or no more of it is needed."""
            others = self._others(attempt)
            reports = [own, *others.values()]
            told = {node for node, report in others.items() if report.complete}
            gone = {_rank(node) for node in self._rdzv.lost_nodes()}
            return (
                len(told | gone) >= attempt.nodes - 1
                or any(report.interrupted for report in reports)
                or not any(report.failed for report in reports)
            )

        if self._rdzv.can_publish:
            wait_until(all_said, time.monotonic() + _OTHERS_S)
        others = self._others(attempt)
        reports = [own, *others.values()]
        hangs = [report.hang for report in reports if report.hang is not None]
        signals = [report for report in reports if report.interrupted is not None]
        exits = [status for report in reports for status in report.exits]
        ended = {status.rank for status in exits}
        gone = [(node, others.get(_rank(node))) for node in self._rdzv.lost_nodes()]
        failure = first_failure(
            exits,
            hang=min(hangs, key=lambda verdict: verdict.found_at, default=None),
            interrupted=signals[0].interrupted if signals else None,
            # Those that are gone without a word about the end of their ranks.
            lost_nodes=[
                lost_node(node.host, report.ranks if report else (), time.time(), node.why)
                for node, report in gone
                if report is None or not ended & set(report.ranks)
            ],
            folder=f"{attempt.folder}{' (its logs were deleted)' * attempt.logs_deleted}",
        )
        if failure is not None and failure.kind == "interrupted" and own.interrupted is None:
            host = signals[0].host
            failure = replace(failure, headline=f"{failure.headline} on host {host}")
        return failure


def _rank(node: Node) -> int:
    return -1 if node.rank is None else node.rank


def _ctrl_c(attempt: Attempt) -> Interruption | None:
    """Ctrl-C reaches a rank alone that has the terminal, and not the launcher."""
    for process in attempt.processes:
        if attempt.world_size == 1 and process.code == -signal.SIGINT and not process.sent:
            return Interruption(signal=signal.SIGINT, time=process.ended_at or time.time())
    return None


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


def rank_environment(
    group: api.WorkerGroup, worker: api.Worker, restarts: int, environ: Mapping[str, str]
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
    if spec.virtual_local_rank:  # each rank sees its own GPU alone, as device 0
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible is not None else []
        local = worker.local_rank
        variables["LOCAL_RANK"] = 0
        variables["CUDA_VISIBLE_DEVICES"] = devices[local].strip() if devices else local
    return {name: str(value) for name, value in variables.items()}


@contextlib.contextmanager
def _scarcity_explained(nproc: int) -> Iterator[None]:
    """Within it the want of processes, threads, files or memory is told as what it is.

    Of files here and now: later a library of C++ may come to the limit, and abort.
    """
    try:
        with contextlib.ExitStack() as room:
            for _ in range(_PIPES + _PIPES_PER_RANK * nproc):
                for end in os.pipe():
                    room.callback(os.close, end)
        yield
    except (OSError, RuntimeError) as error:
        # Python and torch raise the second where they get no thread.
        words = ("can't start new thread", os.strerror(errno.EAGAIN))
        if getattr(error, "errno", None) not in _SCARCE and str(error) not in words:
            raise
        raise SettingError(
            f"{count_noun(nproc, 'process')} on this machine",
            f"the system gives no more: {error}",
            "raise the limits of processes, files or memory (ulimit -a), or start fewer processes",
        ) from None


@contextlib.contextmanager
def _quiet_torch_logs() -> Iterator[None]:
    """Within it torch's agent logs no warnings, which are said better here; LOGLEVEL still wins."""
    logger = logging.getLogger(api.SimpleElasticAgent.__module__)
    before = logger.level
    if "LOGLEVEL" not in os.environ:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
