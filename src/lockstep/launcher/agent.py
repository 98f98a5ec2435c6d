"""The agent: torch elastic's, with ranks from the zygote instead of fresh processes.

Rendezvous, membership and restarts are those of `torch.distributed.elastic`'s SimpleElasticAgent
(elastic/agent/server/api.py); its four abstract methods are here. It also holds the supervisor's
clock: torch elastic looks at the workers every `monitor_interval` seconds.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import ProcessFailure

from lockstep.launcher import job_control
from lockstep.launcher.process import Attempt, Process
from lockstep.launcher.worker import FOLDER, Command
from lockstep.launcher.zygote import Ended, Refused, Zygote
from lockstep.watchdog.exit_status import ERROR_FILE

_ERROR_FILE_NAME = "elastic_error.json"
_SETTLE_S = 0.5
"""After a first failure the others follow within moments, and which came first matters."""
_INTERRUPT_S = 10.0
"""What a script does at Ctrl-C, such as saving, may take so long."""


class Ranks(Protocol):
    """What goes with the processes: their streams, and who watches them."""

    def again(self, attempt: Attempt, left: int) -> None:
        """The ranks are about to be started again after `attempt`; `left` restarts remain."""
        ...

    def streams(self, process: Process, alone: bool) -> tuple[int, int, int]:
        """Descriptors for the rank's standard input, output and error; the caller closes them."""
        ...

    def started(self, attempt: Attempt) -> None:
        """All ranks of an attempt have been started."""
        ...

    def look(self, attempt: Attempt) -> bool:
        """Called a few times a second; whether the run is to be stopped."""
        ...

    def ended(self, attempt: Attempt) -> None:
        """No rank of the attempt runs any more."""
        ...

    def ending(self, attempt: Attempt) -> None:
        """What still runs of an attempt is about to be asked to end."""
        ...

    def others_are_done(self, attempt: Attempt) -> bool | None:
        """Whether the ranks of the other machines have ended well too; None: it cannot be known."""
        ...


class Agent(SimpleElasticAgent):
    """Starts, watches and ends the ranks of this machine.

    Args:
        spec: what torch elastic wants to know; the entry point is not used, the zygote has it.
        zygote: starts the ranks.
        command: what a rank executes; None: the zygote's own work.
        environment: variables for every rank.
        folder: of the run; each attempt gets a folder in it.
        ranks: streams and supervision.
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
        ranks: Ranks,
        grace: float,
        plain: bool,
        keyboard: bool = True,
    ) -> None:
        super().__init__(spec)  # not with the grace, which newer versions take: `_end` has it
        self._zygote, self._command, self._environment = zygote, command, environment
        self._folder, self._ranks, self._grace = folder, ranks, grace
        self._plain, self._keyboard = plain, keyboard
        self._refused: str | None = None
        """Why a rank could not be started."""
        self._alone: Process | None = None
        """The rank that has the terminal's keys."""
        self.attempts: list[Attempt] = []
        self.in_a_hurry = False
        """Set when the user asks a second time: what still runs is killed at once."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers = worker_group.workers
        folder = self._folder / f"attempt_{len(self.attempts)}"
        attempt = Attempt(
            restarts=worker_group.spec.max_restarts - self._remaining_restarts,
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
        alone = self._keyboard and attempt.world_size == 1 and job_control.in_foreground()
        self._alone = attempt.processes[0] if alone else None
        for number, worker in enumerate(workers):
            try:
                self._start(worker_group, worker, attempt, attempt.processes[number])
            except BaseException:  # such as a full disk; what was never started has no end
                del attempt.processes[number:]
                raise
        while any(process.pid is None for process in attempt.processes):
            self._read_events(timeout=1.0)
        if self._refused is not None:
            raise BlockingIOError(errno.EAGAIN, self._refused)
        self._ranks.started(attempt)
        return {process.local_rank: process.pid for process in attempt.processes}

    def _start(
        self, group: WorkerGroup, worker: Worker, attempt: Attempt, process: Process
    ) -> None:
        process.folder.mkdir(parents=True)
        command = self._command and self._command.for_rank(process.local_rank)
        variables = self._variables(group, worker, attempt, process, command)
        streams = self._ranks.streams(process, attempt.world_size == 1)
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

    def _variables(
        self,
        group: WorkerGroup,
        worker: Worker,
        attempt: Attempt,
        process: Process,
        command: Command | None,
    ) -> dict[str, str]:
        # Counted alike by all machines, where the rendezvous knows; our own count is of ours alone.
        counted = getattr(group.spec.rdzv_handler, "attempt", None)
        restarts = attempt.restarts if counted is None else counted
        return {
            **({} if self._plain else rank_environment(group, worker, restarts, os.environ)),
            FOLDER: str(process.folder),
            ERROR_FILE: str(process.folder / _ERROR_FILE_NAME),
            **(command.environment if command else {}),
            **self._environment,
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        attempt = self.attempts[-1]
        self._read_events()
        if self._alone and self._alone.pid and self._alone.code is None:
            job_control.follow(self._alone.pid, self.pass_on)
        if self._ranks.look(attempt) or self._failed(attempt):
            settled = time.monotonic() + _SETTLE_S
            while attempt.running and time.monotonic() < settled:
                self._read_events(timeout=0.05)
            return RunResult(state=WorkerState.FAILED, failures=_failures(attempt))
        # Those that have ended here are started again with the others when a rank elsewhere fails.
        if attempt.running or self._ranks.others_are_done(attempt) is False:
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(
            state=WorkerState.SUCCEEDED,
            return_values={process.rank: None for process in attempt.processes},
        )

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        # Before the other machines are waited for, which may take minutes.
        self._ranks.again(self.attempts[-1], self._remaining_restarts)
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._end(signal.SIGTERM, self._grace)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end(death_sig, self._grace)

    def _exit_barrier(self) -> None:
        # torch's waits in C++ for up to 300 s, where Ctrl-C is not heard.
        if self._ranks.others_are_done(self.attempts[-1]) is None:
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _end(self, number: int, grace: float) -> None:
        """Asks the ranks to end, waits, and kills those that have not."""
        if not self.attempts:
            return
        attempt = self.attempts[-1]
        self._ranks.ending(attempt)
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
            job_control.take_keys(self._alone.pid)
        self._ranks.ended(attempt)

    def pass_on(self, number: int) -> None:
        """Sends the ranks a signal that says nothing about their end."""
        if self.attempts:
            self._zygote.signal([p.local_rank for p in self.attempts[-1].running], number)

    def give_keys(self) -> None:
        """Gives the terminal's keys to a rank that is alone, if the launcher has them."""
        if self._alone and self._alone.pid and self._alone.code is None:
            job_control.give_keys(self._alone.pid)

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

    def _failed(self, attempt: Attempt) -> bool:
        return any(process.code not in (None, 0) for process in attempt.processes)


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
