"""Starts the ranks of this machine, watches them, and ends them: torch elastic's agent.

A *rank* is a process of the run. A *launcher* (`lockstep run`) starts the ranks of one machine,
which is a *node*. An *attempt* is one start of the ranks; after a failure, torch elastic may start
them again. The *zygote* is the process that the ranks are forked from, and the *supervisor* finds
out when ranks wait for each other forever.

`Agent` is torch elastic's SimpleElasticAgent (torch/distributed/elastic/agent/server/api.py): its
loop, its rendezvous and its restarts are torch's, and the four abstract methods are implemented
here. The loop calls `_monitor_workers` every `monitor_interval` seconds, which also drives the
supervisor.

If machines may join and leave (`--nnodes MIN:MAX`), the loss of a machine is not a failure: the
others restart their ranks without it.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException

from lockstep.errors import EXIT_SIGNAL, LockstepError
from lockstep.language import translate
from lockstep.machine.interface import NCCL_INTERFACE, choose_nccl_interfaces, gloo_variables
from lockstep.machine.network import running_interfaces, wait_until
from lockstep.machine.topology import (
    CHOSEN_THREADS_VARIABLE,
    LAUNCHER_VARIABLE,
    THREADS_VARIABLE,
)
from lockstep.run.machines.nodes import Node
from lockstep.run.machines.open_rendezvous import open_rendezvous
from lockstep.run.machines.rendezvous import Rendezvous
from lockstep.run.run_folder import ELASTIC_ERROR_NAME
from lockstep.run.start import job_control
from lockstep.run.start.console import Console, console_for
from lockstep.run.start.late_end import LateEnd, Progress
from lockstep.run.start.launcher_record import LauncherRecord
from lockstep.run.start.left_behind import end_process_groups
from lockstep.run.start.plan import LaunchPlan
from lockstep.run.start.process import (
    Attempt,
    Process,
    describe_exit_code,
    exit_status_of,
    spawned_ranks,
)
from lockstep.run.start.process_memory import peak_memory, read_oom_counts
from lockstep.run.start.rank_environment import rank_environment
from lockstep.run.start.step_memory import StepMemory, step_memory_for
from lockstep.run.start.system_limits import can_hold_evidence, explain_scarcity
from lockstep.run.start.torchrun_flags import rendezvous_parameters, shutdown_timeout
from lockstep.run.start.zygote import Zygote
from lockstep.run.start.zygote_messages import Event
from lockstep.run.watch.dataclass_json import from_values
from lockstep.run.watch.error_record import (
    TORCH_ERROR_FILE_VARIABLE,
    read_error,
    readable_torch_file,
)
from lockstep.run.watch.evidence import FOLDER_VARIABLE, create_evidence_memory
from lockstep.run.watch.exit_status import ExitReport, ExitStatus, Interruption
from lockstep.run.watch.failure_report import render_briefly, render_failure
from lockstep.run.watch.first_failure import FirstFailure, first_failure, lost_node
from lockstep.run.watch.probe import FLIGHT_RECORDER_VARIABLES
from lockstep.run.watch.process_status import (
    describe_state,
    exit_code_of_ending_process,
    read_process,
)
from lockstep.run.watch.repeated_failure import step_of_key
from lockstep.run.watch.snapshot import STOPPED_STATES, Snapshot
from lockstep.run.watch.snapshot_exchange import SnapshotExchange
from lockstep.run.watch.supervisor import Supervisor
from lockstep.run.watch.take_snapshot import take_snapshot
from lockstep.torch_compat import accepted, skip_exit_barrier
from lockstep.wording import count_noun, format_ranks

_NOT_STARTED_PID = 0
"""Stands for the process id of a rank whose process does not exist yet."""
_EXIT_REPORT_KEY = "exit report"
"""The key under which the launchers of a run publish their exit reports for each other."""
_MAX_PENDING_STARTS = 8
"""How many ranks may be requested before the zygote's answers are read."""
_MAX_MONITOR_INTERVAL_S = 0.5
"""The longest pause between two checks: other launchers wait only seconds for an answer."""
_SLOW_CHECKS_INTERVAL_S = 2.0
_SETTLE_S = 0.5
"""How long to wait for other ranks to fail after the first one, to find out which was first."""
_MAX_START_S = 60.0
"""How long the zygote may take to start the next rank while it uses no processor time."""
_MAX_WAIT_FOR_KEPT_STEP_S = 30.0
"""How long ranks go on training, before they are ended because a machine joins, until they have
kept a step in memory."""
_MAX_COPY_OF_STEP_S = 5.0
"""How long ranks may take, in that time, to keep the last step that they have made together with
those of another machine, which have ended."""
_INTERRUPT_GRACE_S = 10.0
"""The time that a script gets after Ctrl-C, for example to save."""
_EXIT_AFTER_EXCEPTION_S = 10.0
"""A rank that has raised an exception must end within this time."""
_REPORTS_WAIT_S = 5.0
"""The time that the other launchers get to report their failures after a failure here."""
_MAX_FULL_REPORTS = 3
"""How many failures of one kind are printed in full. Further ones get one line each."""
_MEMBERSHIP_CHANGE_S = 2.0
"""How much earlier ranks may notice a lost connection than launchers notice a lost machine."""


def run_agent(
    plan: LaunchPlan,
    flags: argparse.Namespace,
    zygote: Zygote,
    folder: Path,
    start_zygote: Callable[[], Zygote] | None = None,
) -> Agent:
    """Meets the other machines, starts the ranks of this one, and watches them until they end.

    Args:
        plan: what to start on this machine.
        flags: torchrun's flags.
        zygote: the process that forks the ranks.
        folder: the folder of the run; each attempt gets a folder in it.
        start_zygote: function that starts another zygote if something has killed the first one;
            None if that is not possible.

    Returns:
        The agent, which knows how the run has ended on this machine.

    Raises:
        SettingError: a flag has a value that cannot be used.
        JoinError: the machines of the run did not come together.
    """
    parameters = rendezvous_parameters(flags)
    with (
        explain_scarcity(plan.nproc),
        console_for(flags, plan.nproc) as console,
        contextlib.closing(step_memory_for(plan, flags)) as step_memory,
        open_rendezvous(parameters, lambda line: console.announce(translate(line))) as rendezvous,
        contextlib.ExitStack() as at_end,
    ):
        variables = _variables_of_all_ranks(plan, console, rendezvous)
        variables.update(step_memory.variables)
        agent = Agent(plan, flags, zygote, folder, variables, console, rendezvous, step_memory)
        agent.start_zygote = start_zygote
        at_end.callback(agent.close_other_zygote)

        # `events.record` tells the handler of --event-log-handler how the run ended, as torchrun
        # does.
        try:
            with job_control.handled(_signal_handlers(agent, flags)), _without_torch_warnings():
                agent.run()
        except SignalException:  # `agent.received_signal` says which signal it was
            events.record(agent.get_event_failed(), flags.event_log_handler)
        except LockstepError as error:
            if agent.failure is None:
                raise
            # A restart raised it. The failure that made the restart necessary came first.
            console.announce(translate(f"the ranks cannot be started again: {error}"))
        else:
            events.record(agent.get_event_succeeded(), flags.event_log_handler)
            rendezvous.shutdown()

        if step_memory.is_wanted_and_unused:
            console.announce(
                translate(
                    "--keep-in-memory: the script has kept nothing; it needs "
                    "world.checkpoint(...), and resume() before the loop"
                )
            )

        # If this machine leaves before the end of the run, tell the other launchers why.
        if agent.failure is not None:
            rendezvous.close(agent.failure.headline)
        elif agent.received_signal is not None:
            rendezvous.close(f"it was sent {signal.Signals(agent.received_signal.signal).name}")

        # After Ctrl-C, the console does not wait for a slow terminal.
        console.hurry = agent.received_signal is not None

    return agent


def _signal_handlers(agent: Agent, flags: argparse.Namespace) -> dict[int, Callable[[int], object]]:
    """Returns what the launcher does at each signal, by the number of the signal."""
    handlers: dict[int, Callable[[int], object]] = {
        signal.SIGUSR1: agent.signal_ranks,  # asks scripts for a checkpoint
        # `hosts_run` sends this signal when another machine has failed. Once ranks have been
        # started, the launcher notices that by itself.
        signal.SIGUSR2: agent.end_unless_started,
        signal.SIGTSTP: agent.stop,  # Ctrl-Z
    }
    for text in flags.signals_to_handle.split(","):  # torchrun's flag: "SIGTERM,SIGINT"
        name = text.strip()
        if name:
            handlers[signal.Signals[name]] = agent.interrupt
    return handlers


def _variables_of_all_ranks(
    plan: LaunchPlan, console: Console, rendezvous: Rendezvous
) -> dict[str, str]:
    """Returns the environment variables that every rank of this machine gets."""
    variables: dict[str, str] = {}

    # Variables that the user has set stay as they are.
    for name, value in FLIGHT_RECORDER_VARIABLES.items():
        if name not in os.environ:
            variables[name] = value

    variables.update(gloo_variables(os.environ, rendezvous.interface))
    if plan.gpus > 0:  # the ranks may use NCCL
        variables.update(_nccl_variables(plan, console, rendezvous))
    variables.update(plan.environment)
    if plan.chooses_threads:
        variables[CHOSEN_THREADS_VARIABLE] = plan.environment[THREADS_VARIABLE]

    # Ranks that do not have the terminal themselves are told its width. A single rank has it.
    is_only_rank = plan.nproc == 1 and plan.one_node
    if not is_only_rank:
        variables.update(console.environment)

    # LAUNCHER_VARIABLE tells a process that it is a rank. A script that spawns its own ranks
    # must not mistake its first process for one.
    if not plan.script_spawns_ranks:
        variables[LAUNCHER_VARIABLE] = plan.launcher

    return variables


def _nccl_variables(plan: LaunchPlan, console: Console, rendezvous: Rendezvous) -> dict[str, str]:
    """Returns the variable with NCCL's network interfaces, and announces it.

    Returns:
        Empty if NCCL is to choose the interfaces itself.
    """
    chosen = choose_nccl_interfaces(os.environ, running_interfaces(), rendezvous.interface)
    if chosen is None:
        return {}

    interfaces, reason = chosen
    if not plan.quiet:
        console.announce(f"{NCCL_INTERFACE}={interfaces}: {translate(reason)}")
    return {NCCL_INTERFACE: interfaces}


class Agent(api.SimpleElasticAgent):
    """Starts, watches and ends the ranks of this machine.

    Args:
        plan: what to start on this machine.
        flags: torchrun's flags.
        zygote: the process that forks the ranks.
        folder: the folder of the run.
        variables: environment variables of every rank.
        console: opens and reads the output streams of the ranks.
        rendezvous: connects the machines of the run, and carries messages between their launchers.
        step_memory: memory that outlives the ranks, in which they keep their latest step.
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
        step_memory: StepMemory,
    ) -> None:
        # Newer versions of torch take a `shutdown_timeout` here; `_end_ranks` applies it instead.
        super().__init__(
            api.WorkerSpec(
                role=flags.role,
                local_world_size=plan.nproc,
                rdzv_handler=rendezvous,
                entrypoint=folder.name,  # for torch's events only: the zygote knows what to run
                max_restarts=flags.max_restarts,
                monitor_interval=min(flags.monitor_interval, _MAX_MONITOR_INTERVAL_S),
                local_addr=flags.local_addr,
                **accepted(
                    api.WorkerSpec,
                    event_log_handler=flags.event_log_handler,  # torch 2.6 does not have it
                    virtual_local_rank=flags.virtual_local_rank,  # nor torch 2.9 this one
                ),
            )
        )

        if rendezvous.can_publish:
            # torch's barrier waits up to 300 s in C++ code, which Ctrl-C does not interrupt. With
            # Lockstep's rendezvous, `_monitor_workers` has already waited for the other machines.
            skip_exit_barrier(self)

        self._grace_s = shutdown_timeout(flags.shutdown_timeout, os.environ)
        self._plan = plan
        self._flags = flags
        self._devices: list[str] = []
        """The GPUs that are still used, as in CUDA_VISIBLE_DEVICES; empty while all of them are."""
        self._zygote = zygote
        self._first_zygote = zygote
        self.start_zygote: Callable[[], Zygote] | None = None
        """See `run_agent`."""
        self._folder = folder
        self._variables = variables
        self._console = console
        self._announce = console.announce
        self._rdzv = rendezvous
        self._step_memory = step_memory
        self._seals_at_start: list[frozenset[bytes]] = []
        """The seals in `step_memory` when the present attempt began."""

        # The supervisor is given a method of the record. A method of this agent would keep the
        # agent alive, and with it the store.
        report_folder = {**os.environ, **variables}.get("LOCKSTEP_REPORT")
        self._record = LauncherRecord(report_folder, console.announce)

        self._timeout_at = math.inf
        self._next_slow_checks = 0.0
        self._oom_counts_before = read_oom_counts()
        self._why_not_started: str | None = None
        """Why the system refused to start a rank; None if it has not."""
        self._keyboard_rank: Process | None = None
        """The rank that reads the terminal's keyboard, which only a single rank may do."""
        self._failed_attempts = 0
        self._interrupts_delayed = False
        self._delayed_interrupt: SignalException | None = None
        """See `_delay_interrupts`."""
        self._kill_at_once = False
        """True once the user has asked for the second time to end the run."""
        self._late_ends: dict[int, LateEnd] = {}
        """How long processes that should end have taken so far, by process id."""
        self._supervisor: Supervisor | None = None
        self._snapshot_exchange: SnapshotExchange
        self._spawned_ranks: list[Process]
        """The ranks that a script has spawned itself, if the launcher started one process."""
        self.attempts: list[Attempt] = []
        """Empty if the run was interrupted before any rank was started."""
        self.received_signal: Interruption | None = None
        """The signal that ended the run from outside."""
        self.timed_out_ranks: tuple[int, ...] = ()
        """The ranks that were ended because they ran for longer than the plan allows."""

    @property
    def failure(self) -> FirstFailure | None:
        """The first failure of the last attempt, known once it is over; None if nothing failed."""
        return self.attempts[-1].failure if self.attempts else None

    @property
    def exit_code(self) -> int:
        """The exit code of the launcher, see `lockstep.errors`."""
        if self.failure is not None:
            return self.failure.exit_code
        if self.received_signal is not None:
            return EXIT_SIGNAL + self.received_signal.signal  # as a shell does
        return 0

    # Starting the ranks

    def _start_workers(self, worker_group: api.WorkerGroup) -> dict[int, Any]:
        """Starts the ranks of this machine. torch elastic calls this after each rendezvous.

        The new attempt is appended to `attempts`.

        Args:
            worker_group: the ranks of this machine (*workers*), as numbered by the rendezvous.

        Returns:
            The process ids, by local rank.
        """
        workers = worker_group.workers
        attempt = Attempt(
            processes=[],
            world_size=workers[0].world_size,
            node=worker_group.group_rank or 0,
            num_nodes=worker_group.group_world_size or 1,
            folder=self._folder / f"attempt_{len(self.attempts)}",
        )
        self.attempts.append(attempt)
        self._reset_for_new_attempt()
        # A restart compares these seals with the later ones: has each rank kept a step since?
        self._seals_at_start = self._step_memory.seals()
        self._replace_zygote_if_dead()
        self._record.start(attempt, self._plan.script)

        # `_start_rank` only sends a request to the zygote. At most `_MAX_PENDING_STARTS` requests
        # wait for an answer at a time.
        for worker in workers:
            self._start_rank(worker_group, worker, attempt)
            self._wait_for_starts(attempt, max_pending=_MAX_PENDING_STARTS)
        self._wait_for_starts(attempt, max_pending=0)

        if self._why_not_started is not None:  # the system has refused to start a rank
            raise BlockingIOError(errno.EAGAIN, self._why_not_started)

        self._begin_watching(attempt)
        return {process.local_rank: process.pid for process in attempt.processes}

    def _replace_zygote_if_dead(self) -> None:
        """Starts another zygote, if something has killed the present one and that is possible."""
        if self.start_zygote is not None and self._zygote.has_ended:
            self._zygote.close()
            self._zygote = self.start_zygote()

    def close_other_zygote(self) -> None:
        """Ends the zygote that has replaced the first one, if any. The first one is closed by its
        owner.
        """
        if self._zygote is not self._first_zygote:
            self._zygote.close()

    def _reset_for_new_attempt(self) -> None:
        """Resets everything that was only true for the last attempt."""
        self._keyboard_rank = None
        self._supervisor = None
        self._late_ends = {}

    def _wait_for_starts(self, attempt: Attempt, *, max_pending: int) -> None:
        """Waits until at most `max_pending` of the requested ranks are still to be started.

        Without this limit, the socket to the zygote could fill up in both directions, and each side
        would wait for the other one to read.
        """
        progress_before: tuple[int, float] | None = None
        deadline = math.inf
        while True:
            pending = [process for process in attempt.processes if process.pid is None]
            if len(pending) <= max_pending:
                return

            # A new zygote imports torch first, which may take long on a slow file system, but it
            # computes meanwhile.
            status = read_process(self._zygote.pid)
            progress = (len(pending), 0.0 if status is None else status.cpu_s)
            if progress != progress_before:
                progress_before = progress
                deadline = time.monotonic() + _MAX_START_S
            elif time.monotonic() >= deadline:
                raise self._not_started_error(pending)
            self._read_events(timeout=1.0)

    def _not_started_error(self, pending: Sequence[Process]) -> LockstepError:
        """Returns the error for ranks that were requested from a zygote that does not answer."""
        pid = self._zygote.pid
        ranks = format_ranks(process.rank for process in pending)
        return LockstepError(
            f"--nproc {self._plan.nproc}",
            f"the fork server (process {pid}, which starts the ranks) has not started {ranks} "
            f"within {_MAX_START_S:.0f} s: {describe_state(pid)}",
            f"if it was stopped, let it go on (kill -CONT {pid}); in state D it waits for a device "
            "or a file server, which must be repaired",
        )

    def _start_rank(self, group: api.WorkerGroup, worker: api.Worker, attempt: Attempt) -> None:
        """Requests a rank from the zygote and adds it to the attempt, without waiting for its
        start.
        """
        rank = worker.global_rank
        process = Process(rank, worker.local_rank, attempt.folder / f"rank_{rank}")
        with contextlib.suppress(OSError):  # if the disk is full, the console says so
            process.folder.mkdir(parents=True)

        if can_hold_evidence(self._plan.nproc):
            process.evidence_memory = create_evidence_memory(process.folder)

        # A single rank stays in the session of the terminal, so that pdb and input() work.
        is_only_rank = attempt.world_size == 1
        if is_only_rank and self._plan.keyboard and job_control.in_foreground():
            self._keyboard_rank = process

        command = self._plan.command.for_rank(worker.local_rank)
        variables = self._variables_of_rank(group, worker, process)
        variables.update(command.environment)
        variables.update(self._variables)

        streams = self._console.open(
            rank,
            worker.local_rank,
            process.folder,
            is_only_rank=is_only_rank,
            error_file=process.evidence.error,
            recent=process.stderr_tail,
        )
        attempt.logs += process.folder.glob("*.log")  # the console has just created them

        with self._delay_interrupts():
            try:
                self._zygote.start(
                    worker.local_rank,
                    variables,
                    streams,
                    own_session=process is not self._keyboard_rank,
                    command=command.words,
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

    def _variables_of_rank(
        self, group: api.WorkerGroup, worker: api.Worker, process: Process
    ) -> dict[str, str]:
        """Returns the environment variables of one rank: its numbers in the run, and its files."""
        variables: dict[str, str] = {}

        # A script that spawns its own ranks must not mistake its first process for a rank.
        if not self._plan.script_spawns_ranks:
            # Lockstep's rendezvous counts the attempts of all machines alike. torch's own does not
            # count, so the failures of this machine are used instead.
            restarts = self._rdzv.attempt
            if restarts is None:
                restarts = self._failed_attempts

            # If a GPU was left out after a failure, the ranks only see the GPUs that remain. With
            # --virtual-local-rank a rank sees one GPU: `rank_environment` chooses it from those of
            # CUDA_VISIBLE_DEVICES in `variables_to_choose_from`, and overwrites the variable.
            variables_to_choose_from = dict(os.environ)
            if self._devices:
                devices = ",".join(self._devices)
                variables["CUDA_VISIBLE_DEVICES"] = devices
                variables_to_choose_from["CUDA_VISIBLE_DEVICES"] = devices
            variables.update(rank_environment(group, worker, restarts, variables_to_choose_from))

        variables[FOLDER_VARIABLE] = str(process.folder)
        variables[TORCH_ERROR_FILE_VARIABLE] = str(process.folder / ELASTIC_ERROR_NAME)
        if process.evidence_memory is not None:
            variables.update(process.evidence_memory.variables)
        return variables

    # Watching the ranks

    def _begin_watching(self, attempt: Attempt) -> None:
        """Starts the timeout and the supervisor of an attempt whose ranks have been started.

        The timeout is that of `launch(timeout=...)`. The supervisor looks for hangs and stragglers,
        and calls `LauncherRecord.find` with what it has found, which announces and records it.
        """
        if self._plan.timeout is not None:
            self._timeout_at = time.monotonic() + self._plan.timeout

        # An exit report lists all ranks of a machine, and the exits of those that have ended: none
        # yet. If this machine is lost, the other launchers know from it which ranks are lost.
        self._report_exits(attempt)

        processes = attempt.processes

        def take_snapshot_of_ranks(call_stacks: bool) -> Snapshot:
            """Returns what the ranks of this machine are doing, for other launchers that ask."""
            return take_snapshot(processes, call_stacks=call_stacks)

        self._spawned_ranks = []  # a script has not spawned any ranks yet
        self._snapshot_exchange = SnapshotExchange(
            self._rdzv, attempt.node, attempt.num_nodes, take_snapshot_of_ranks
        )
        self._supervisor = Supervisor(
            processes,
            self._plan.hang,
            attempt.folder,
            self._record.find,
            self._snapshot_exchange,
        )

    def _watch_spawned_ranks(self, attempt: Attempt) -> None:
        """Makes the supervisor watch the ranks that the only process of an attempt has spawned.

        If it has spawned none, or all of them have returned, the supervisor watches that process
        itself. `_spawned_ranks` is empty as long as it does.
        """
        spawned = spawned_ranks(attempt.processes[0])  # empty if all of them have returned
        pids = [process.pid for process in spawned]
        watched_pids = [process.pid for process in self._spawned_ranks]
        others_must_be_watched = pids != watched_pids
        if others_must_be_watched:
            only_process = attempt.processes
            self._supervisor = Supervisor(
                spawned or only_process,
                self._plan.hang,
                attempt.folder,
                self._record.find,
            )
            self._spawned_ranks = spawned
            return

        # These are the ranks that are watched already, but `spawned_ranks` creates new `Process`
        # objects each time. Copy their exit codes to the older objects that the supervisor has.
        for watched, current in zip(self._spawned_ranks, spawned, strict=True):
            watched.code = current.code

    def _monitor_workers(self, worker_group: api.WorkerGroup) -> api.RunResult:
        """Checks the ranks. torch elastic's loop calls this every `monitor_interval` seconds.

        Returns:
            FAILED if a rank has failed or all must be ended, SUCCEEDED if the ranks of all machines
            have ended well, and HEALTHY otherwise.
        """
        attempt = self.attempts[-1]
        self._read_events()

        # If the run has a single rank, that rank is in the foreground of the terminal, so that it
        # can read the keyboard. `pass_keyboard` stops this process too after the user has stopped
        # the rank by Ctrl-Z, and continues the rank after the user has entered `fg`.
        pid = self._pid_of_keyboard_rank()
        if pid is not None:
            job_control.pass_keyboard(pid, self.signal_ranks)

        ranks_must_end = self._check_whether_ranks_must_end(attempt)
        some_have_failed = bool(_failed_processes(attempt))
        if ranks_must_end or some_have_failed:
            return self._result_of_failure(attempt)

        # While ranks of other machines are running, those that have ended here may have to be
        # restarted.
        if attempt.running or self._others_run(attempt):
            return api.RunResult(state=api.WorkerState.HEALTHY)

        return api.RunResult(
            state=api.WorkerState.SUCCEEDED,
            return_values={process.rank: None for process in attempt.processes},
        )

    def _result_of_failure(self, attempt: Attempt) -> api.RunResult:
        """Returns the result for torch elastic when ranks have failed or must be ended.

        Before that, it waits a moment in which other ranks may fail as well, since the first
        failure is determined from all of them.
        """
        settled_at = time.monotonic() + _SETTLE_S
        while attempt.running and time.monotonic() < settled_at:
            self._read_events(timeout=0.05)

        # If ranks only failed because a machine has left or wants to join, torch elastic must not
        # count a failure. So the result is HEALTHY. torch elastic then reads `num_nodes_waiting`,
        # which is above 0 in this case, and restarts all ranks.
        failures = _failed_processes(attempt)
        if failures and self._is_membership_changing(attempt):
            return api.RunResult(state=api.WorkerState.HEALTHY)

        self._failed_attempts += 1
        return api.RunResult(state=api.WorkerState.FAILED, failures=failures)

    def _check_whether_ranks_must_end(self, attempt: Attempt) -> bool:
        """Does the regular checks, and returns True if the ranks of this machine must be ended.

        Once they must be ended, the remaining checks are skipped. If the run has reached its
        timeout, `timed_out_ranks` is set.
        """
        now = time.monotonic()
        has_timed_out = now >= self._timeout_at and len(attempt.running) > 0
        if has_timed_out:
            self.timed_out_ranks = tuple(process.rank for process in attempt.running)
            return True

        # Only an elastic run goes on without a lost machine.
        if self._rdzv.departed_nodes() and not self._rdzv.goes_on_without_lost_nodes():
            return True

        if self._has_failure_elsewhere(attempt):
            return True

        if now >= self._next_slow_checks:
            self._next_slow_checks = now + _SLOW_CHECKS_INTERVAL_S
            self._do_slow_checks(attempt)

            # A rank that has failed, but does not end, would let others wait for it forever.
            if _runs_on_after_exception(attempt):
                return True

        self._snapshot_exchange.answer()  # other launchers may have asked for a snapshot
        return self._supervisor is not None and self._supervisor.check()

    def _do_slow_checks(self, attempt: Attempt) -> None:
        """Does the checks that read files of every rank. None of them ends the ranks."""
        self._note_peak_memory(attempt)
        if attempt.world_size == 1 and attempt.running:
            # The only rank may be a script that has spawned ranks of its own.
            self._watch_spawned_ranks(attempt)
        self._announce_deleted_logs(attempt)
        self._watch_late_exits(attempt)

    def _note_peak_memory(self, attempt: Attempt) -> None:
        """Notes the highest resident memory of each running rank, which cannot be read after its
        end.
        """
        for process in attempt.running:
            peak_bytes = peak_memory(process.pid) if process.pid else None
            if peak_bytes:
                process.peak_bytes = peak_bytes

    def _read_events(self, timeout: float = 0.0) -> None:
        """Notes which ranks the zygote has started, and which have ended, since the last call.

        Args:
            timeout: how long to wait for the first event, in seconds.
        """
        with self._delay_interrupts():
            attempt = self.attempts[-1]
            process_of_local_rank = {process.local_rank: process for process in attempt.processes}

            try:
                zygote_events = self._zygote.events(timeout)
            except ChildProcessError:
                zygote_events = self._events_of_zygotes_death(attempt)

            for event in zygote_events:
                process = process_of_local_rank[event.rank]  # the event has the local rank

                if event.says_start_was_refused:  # by the system
                    attempt.processes.remove(process)
                    self._why_not_started = event.reason
                elif event.says_started:
                    process.pid = event.pid
                    process.started_at = time.time()
                elif _is_end_of(process, event):
                    process.pid = event.pid
                    process.code = event.code
                    process.ended_at = time.time()

    def _events_of_zygotes_death(self, attempt: Attempt) -> list[Event]:
        """Makes the events that the zygote would have sent, had it seen the end of its ranks.

        If the zygote ends, the kernel kills all ranks that are running. So each of them gets an
        event that says so, and a note that the zygote ended first, which is part of the report for
        the user. Users know the zygote as the fork server.
        """
        code = self._zygote.wait()
        killed_by_kernel = []
        for process in attempt.running:
            process.fork_server_end = (
                f"the fork server (process {self._zygote.pid}, which starts the ranks) "
                f"ended first: {describe_exit_code(code)}; the kernel then kills its ranks"
            )
            # A rank that was requested but not started yet counts as killed, too.
            pid = _NOT_STARTED_PID if process.pid is None else process.pid
            killed_by_kernel.append(Event(process.local_rank, pid, -signal.SIGKILL))
        return killed_by_kernel

    def _announce_deleted_logs(self, attempt: Attempt) -> None:
        """Announces that somebody has deleted the logs of the ranks, once for each attempt."""
        if attempt.logs_deleted or all(log.exists() for log in attempt.logs):
            return

        attempt.logs_deleted = True
        still_watched = "" if attempt.over else "; failures and hangs are still reported"
        self._say(
            f"the logs in {attempt.folder} have been deleted, perhaps by a cleaner of temporary "
            f"folders: what the ranks print is not kept any more{still_watched}. --log-dir names "
            "another folder"
        )

    def _say(self, line: str) -> None:
        """Announces an English line, in the language of this process."""
        self._announce(translate(line))

    # Restarts

    def _is_membership_changing(self, attempt: Attempt) -> bool:
        """Returns True if ranks failed here only because a machine has left or wants to join.

        Ranks fail as soon as their connections to a machine break. The launchers notice the change
        up to `_MEMBERSHIP_CHANGE_S` seconds later, so this waits until they do: `num_nodes_waiting`
        is then above 0.
        """
        if not self._rdzv.elastic:  # machines may neither leave nor join
            return False

        # If a rank has failed on another machine, that explains the failure here, so there is no
        # need to wait for a change of the machines.
        if self._has_failure_elsewhere(attempt):
            return False

        deadline = time.monotonic() + _MEMBERSHIP_CHANGE_S
        return wait_until(lambda: self._rdzv.num_nodes_waiting() > 0, deadline)

    def _stop_workers(self, worker_group: api.WorkerGroup, is_restart: bool = False) -> None:
        """Ends the ranks. torch elastic calls this before each restart and after the last failure.

        Before a restart, the reason for it is announced.

        Args:
            worker_group: the ranks of this machine (*workers*).
            is_restart: not used, as only torch 2.5 to 2.8 pass it.
        """
        # There are two reasons: ranks have failed, which is allowed `max_restarts` times, or the
        # machines of the run have changed. In the second case the ranks count as HEALTHY.
        ranks_failed = worker_group.state != api.WorkerState.HEALTHY
        restarts_left = worker_group.spec.max_restarts - self._failed_attempts
        if ranks_failed and restarts_left < 0:
            self._end_ranks(signal.SIGTERM)
            return

        # The ranks are restarted. Read this first: after `request_restart` the rendezvous is about
        # the machines of the next attempt.
        lost_machines = self._rdzv.describe_lost_nodes()

        if ranks_failed:
            self._end_ranks(signal.SIGTERM, before_restart=True)
            if self.failure is not None:
                self._raise_if_restart_is_pointless(self.failure, worker_group.spec.max_restarts)
        else:
            self._end_ranks_for_other_machines(a_machine_was_lost=bool(lost_machines))

        # A process that did not end even at SIGKILL may hold its GPU. Restart without such GPUs.
        self._leave_out_held_devices(self.attempts[-1], worker_group.spec)

        # Announce the restart now, as the rendezvous that follows may take minutes.
        self._announce_restart(lost_machines, restarts_left)

    def _end_ranks_for_other_machines(self, *, a_machine_was_lost: bool) -> None:
        """Ends the ranks to restart them on the machines that the run has now.

        Args:
            a_machine_was_lost: True if the ranks may wait for those of a lost machine.
        """
        # In a run that is not elastic, a machine has only been started again after it was lost. All
        # launchers notice that by themselves.
        if not self._rdzv.elastic:
            self._end_ranks(signal.SIGTERM, before_restart=True)
            return

        attempt = self.attempts[-1]
        self._rdzv.request_restart()  # tells the other launchers that this one restarts
        can_go_on = not a_machine_was_lost and _all_are_running(attempt)
        if can_go_on and self._all_have_kept_a_step_since(self._seals_at_start, attempt):
            # They have nothing to save, as their steps are in memory. They may keep only every k-th
            # step, so they are killed right after one.
            self._wait_for_kept_step(attempt)
            end_signal = signal.SIGKILL
        elif not can_go_on and self._step_memory.is_used:
            end_signal = signal.SIGKILL
        else:
            # At SIGTERM, ranks that write checkpoints save their last step together.
            end_signal = signal.SIGTERM
        self._end_ranks(end_signal, before_restart=True)

    def _wait_for_kept_step(self, attempt: Attempt) -> None:
        """Lets the ranks train until each of them has kept another step, or one of them fails.

        The ranks are watched meanwhile, since torch elastic's loop, which watches them otherwise,
        waits for this. If they hang, the wait ends, and they are restarted after that verdict.
        """
        seals = self._step_memory.seals()
        next_check_at = 0.0  # at once
        deadline = time.monotonic() + _MAX_WAIT_FOR_KEPT_STEP_S
        while _all_are_running(attempt) and time.monotonic() < deadline:
            if self._all_have_kept_a_step_since(seals, attempt):
                return

            now = time.monotonic()
            if now >= next_check_at:
                next_check_at = now + _MAX_MONITOR_INTERVAL_S
                if self._check_whether_ranks_must_end(attempt):
                    return
                # The ranks here cannot train on without those of another machine. Each may still
                # copy the step that they have made together.
                if self._other_ranks_have_ended(attempt):
                    deadline = min(deadline, now + _MAX_COPY_OF_STEP_S)

            self._read_events(timeout=0.005)

    def _other_ranks_have_ended(self, attempt: Attempt) -> bool:
        """Returns True if the ranks of another machine of the attempt are known to have ended."""
        if self._rdzv.has_node_left_attempt():
            return True
        return any(report.complete for report in self._reports_of_others(attempt).values())

    def _all_have_kept_a_step_since(
        self, seals_before: Sequence[frozenset[bytes]], attempt: Attempt
    ) -> bool:
        """Returns True if each rank of this machine has kept a step since its seals were read."""
        seals = self._step_memory.seals()
        if not seals:  # the launcher has no memory for steps
            return False
        for process in attempt.processes:
            has_new_seal = bool(seals[process.local_rank] - seals_before[process.local_rank])
            if not has_new_seal:
                return False
        return True

    def _raise_if_restart_is_pointless(self, failure: FirstFailure, max_restarts: int) -> None:
        """Raises an error if the ranks would fail in the same way after a restart.

        Args:
            failure: the first failure of the last attempt.
            max_restarts: how often the ranks may be restarted, for the error.

        Raises:
            LockstepError: the same failure came in the same step of an earlier attempt, or it is
                one that each attempt will meet, such as a wrong setting.
        """
        if failure.is_repeated:
            # Only a failure in a known step is repeated.
            raise _repeated_failure_error(step_of_key(failure.key), max_restarts)

        # In an elastic run, other machines may take part in the next attempt. They may honour a
        # setting that the present machines cannot honour.
        is_elastic = self._rdzv.elastic
        if failure.may_be_temporary or is_elastic:
            return

        # "it" is the report of the failure, which is printed above this error.
        raise LockstepError(
            f"--max-restarts {max_restarts}",
            "the same command would fail again in the same way: restarting will not help",
            "repair what it says",
        )

    def _leave_out_held_devices(self, attempt: Attempt, spec: api.WorkerSpec) -> None:
        """Excludes the GPUs of ranks whose processes did not end from the next attempt.

        Such a process may still hold its GPU, so another rank could not use it.

        Args:
            attempt: the last attempt.
            spec: tells torch elastic how many ranks this machine starts; it is updated.

        Raises:
            LockstepError: the run may not go on with fewer ranks on this machine.
        """
        # The ranks whose processes did not end at SIGKILL, so that the launcher gave up on them.
        not_ended = [process for process in attempt.processes if process.given_up]
        if not not_ended or not self._each_rank_has_own_gpu():
            return

        # Each rank uses the GPU with the index of its local rank.
        held_indices = {process.local_rank for process in not_ended}
        num_left = self._plan.nproc - len(held_indices)

        # The number of ranks may shrink if the user has asked for as many as there are GPUs.
        nproc_asked = str(self._flags.nproc_per_node)
        number_may_shrink = nproc_asked in ("auto", "gpu")
        if not number_may_shrink or num_left == 0:
            ranks = format_ranks(process.rank for process in not_ended)
            raise LockstepError(
                f"--nproc {nproc_asked}",
                f"the process of {ranks} has not ended and may hold its GPU",
                "repair or restart the machine; with --nproc gpu the next start would take the "
                "GPUs that are left, with --nnodes MIN:MAX the other machines",
            )

        devices = []
        for index, device in enumerate(self._devices_used_so_far()):
            if index not in held_indices:
                devices.append(device)
        self._devices = devices
        self._plan = replace(self._plan, nproc=num_left)
        spec.local_world_size = num_left
        self._announce(translate(f"this machine goes on with {count_noun(num_left, 'GPU')}"))

    def _each_rank_has_own_gpu(self) -> bool:
        """Returns True if the ranks of this machine use GPUs, and do not share them."""
        variables = {**os.environ, **self._plan.environment}
        uses_gpus = self._plan.gpus > 0 and variables.get("LOCKSTEP_DEVICE") != "cpu"
        return uses_gpus and self._plan.nproc <= self._plan.gpus

    def _devices_used_so_far(self) -> list[str]:
        """Returns the GPUs of the last attempt, as in CUDA_VISIBLE_DEVICES."""
        if self._devices:
            return self._devices
        all_gpus = ",".join(str(index) for index in range(self._plan.gpus))
        return os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")

    def _announce_restart(self, lost_machines: str, restarts_left: int) -> None:
        """Says why all ranks are restarted, on the console and in the record of the run.

        Args:
            lost_machines: text that names the machines that were lost; empty if none was.
            restarts_left: how often the ranks may still be restarted after a failure.
        """
        # The record is in English, and the console in the language of the user. `translate` looks
        # up English texts; it also knows those with numbers and names in them.
        if lost_machines:
            what_follows = translate("starting the ranks of the other machines again")
            self._announce(f"{translate(lost_machines)}; {what_follows}")
        elif self.failure is None:  # no rank has failed
            self._announce(
                translate("the machines of the run have changed; starting all ranks again")
            )
        else:
            what_follows = translate(
                f"starting all ranks again (--max-restarts: {restarts_left} left after this)"
            )
            # A failure that comes again and again is reported in full only the first few times.
            num_alike = self._num_failures_like(self.failure)
            if num_alike <= _MAX_FULL_REPORTS:
                self._announce(render_failure(self.failure, translate))
                self._announce(what_follows)
            else:
                brief_report = render_briefly(self.failure, num_alike, translate)
                self._announce(f"{brief_report}; {what_follows}")

        self._record.write("restart", "all ranks are started again")

    def _num_failures_like(self, failure: FirstFailure) -> int:
        """Returns the number of attempts whose first failure was of the same kind, in any step.

        The attempt of the given failure is included.
        """
        count = 0
        for attempt in self.attempts:
            if attempt.failure is not None and attempt.failure.likeness == failure.likeness:
                count += 1
        return count

    # Ending the ranks

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Ends the ranks that are still running. torch elastic calls this at the end of the run."""
        self._end_ranks(death_sig)

    def _end_ranks(self, end_signal: int, *, before_restart: bool = False) -> None:
        """Ends the ranks of the last attempt, and determines its first failure.

        Afterwards the attempt is `over`, and its `failure` is set if there was one.

        Args:
            end_signal: number of the signal that asks the ranks to end.
            before_restart: True if the ranks are restarted afterwards.
        """
        if not self.attempts or self.attempts[-1].over:
            return

        # Publish which ranks have ended by themselves, before the others are ended.
        attempt = self.attempts[-1]
        self._report_exits(attempt)
        self._end_processes(attempt, end_signal)

        # Ranks may have started processes that outlive them. These may go on after a run that has
        # ended well. In all other cases they are ended.
        all_ended_well = all(process.code == 0 for process in attempt.processes)
        run_has_ended_well = all_ended_well and not before_restart and self.received_signal is None
        if not run_has_ended_well:
            self._end_processes_left_behind()

        # A single rank was in the foreground of the terminal, so that it could read the keyboard.
        # Put this process back in the foreground.
        if self._keyboard_rank and self._keyboard_rank.pid:
            job_control.take_keyboard_from(self._keyboard_rank.pid)

        attempt.over = True

        # Show everything that the ranks have printed before their failure is reported.
        self._console.drain()
        self._announce_deleted_logs(attempt)

        attempt.failure = self._first_failure(attempt)
        self._save_evidence(attempt)
        self._record.end(attempt.failure)

    def _end_processes_left_behind(self) -> None:
        """Ends the processes that ranks have started and that have outlived them, and announces
        those that do not end.
        """
        with self._delay_interrupts():
            if not self._zygote.has_ended:
                not_ended = self._zygote.end_left_behind()
            else:  # something has killed it, and the kernel has killed its ranks
                killed = [
                    rank for rank in self.attempts[-1].processes if rank.was_killed_with_zygote
                ]
                not_ended = end_process_groups(rank.pid for rank in killed if rank.pid)
        for pid in not_ended:
            self._say(
                f"process {pid}, which ranks have left behind, does not end at SIGKILL: "
                f"{describe_state(pid)}"
            )

    def _end_processes(self, attempt: Attempt, end_signal: int) -> None:
        """Asks the ranks to end, waits for them, and kills those that do not end in time.

        A second Ctrl-C, which sets `_kill_at_once`, ends the waiting.
        """
        if end_signal == signal.SIGINT:
            # A rank that waits in C++ code reacts to Ctrl-C only when it returns to Python. SIGTERM
            # ends it where it is.
            signals_and_times_to_end = [
                (signal.SIGINT, _INTERRUPT_GRACE_S),
                (signal.SIGTERM, self._grace_s),
            ]
        else:
            signals_and_times_to_end = [(signal.Signals(end_signal), self._grace_s)]

        for signal_to_send, grace_s in signals_and_times_to_end:
            self._end_by_signal(attempt, signal_to_send)
            deadline = time.monotonic() + grace_s
            while attempt.running and time.monotonic() < deadline and not self._kill_at_once:
                self._read_events(timeout=0.05)

        self._end_by_signal(attempt, signal.SIGKILL)
        self._wait_for_killed(attempt)

    def _wait_for_killed(self, attempt: Attempt) -> None:
        """Waits for ranks that were sent SIGKILL, and gives up on those that do not end."""
        while attempt.running:
            self._give_up_unstarted(attempt)
            for process in attempt.running:
                self._watch_end(process, "SIGKILL")
            if attempt.running:
                self._read_events(timeout=0.2)

    def _give_up_unstarted(self, attempt: Attempt) -> None:
        """Gives up on ranks that were requested and not started, if the zygote does not answer.

        The zygote is killed, so that nothing is waited for that it will not do either.
        """
        unstarted = [process for process in attempt.running if process.pid is None]
        if not unstarted:
            return

        zygote_pid = self._zygote.pid
        late_answer = self._late_ends.setdefault(zygote_pid, LateEnd(zygote_pid))
        if late_answer.check() is not Progress.GIVEN_UP:
            return
        for process in unstarted:
            process.code = -signal.SIGKILL
            process.ended_at = time.time()
        ranks = format_ranks(process.rank for process in unstarted)
        self._say(
            f"{ranks}: not started: the fork server (process {zygote_pid}) does not answer: "
            f"{describe_state(zygote_pid)}"
        )
        self._zygote.kill()

    def _watch_late_exits(self, attempt: Attempt) -> None:
        """Watches ranks whose program has ended, but whose process has not.

        At the end of a process the kernel closes its files, which may take as long as after
        SIGKILL.
        """
        for process in attempt.running:
            if process.pid is not None and exit_code_of_ending_process(process.pid) is not None:
                self._watch_end(process, "its program's end")

    def _watch_end(self, process: Process, since: str) -> None:
        """Announces that a rank's process is slow to end, and gives up on it if it does not end.

        Args:
            process: a rank that should have ended.
            since: what should have ended it, for the announcement: `SIGKILL`.
        """
        pid = process.pid
        if pid is None:  # it has not been started yet
            return

        late_end = self._late_ends.setdefault(pid, LateEnd(pid))  # keeps the time since the signal
        progress = late_end.check()
        if progress is Progress.IN_TIME:
            return

        text = (
            f"process {pid} has not ended {late_end.waited_s:.0f} s after {since}: "
            f"{describe_state(pid)}"
        )
        if progress is Progress.GIVEN_UP:
            self._treat_as_ended(process, pid, text)
        elif not late_end.is_announced:
            late_end.is_announced = True
            self._say(f"rank {process.rank}: {text}; it is still busy, perhaps freeing memory")

    def _treat_as_ended(self, process: Process, pid: int, text: str) -> None:
        """Gives up on a rank whose process does not end.

        Args:
            process: the rank.
            pid: id of its process.
            text: how long the process has not ended, for messages.
        """
        code = exit_code_of_ending_process(pid)
        process.code = -signal.SIGKILL if code is None else code
        process.ended_at = time.time()
        process.given_up = text
        self._zygote.give_up(process.local_rank)
        self._say(f"rank {process.rank}: {text}; it is not waited for any longer")

    def _end_by_signal(self, attempt: Attempt, number: int) -> None:
        """Sends the running ranks a signal to end them, and notes which of them were stopped, by
        SIGSTOP or a debugger.
        """
        now = time.time()
        for process in attempt.running:
            process.signals_sent.setdefault(number, now)  # keeps the time of the first signal

            # A rank without a process id has not been started yet.
            status = None if process.pid is None else read_process(process.pid)
            if status is not None and status.state in STOPPED_STATES:
                process.stopped = True

        self.signal_ranks(number)

    def _save_evidence(self, attempt: Attempt) -> None:
        """Copies the evidence of the ranks from memory into their folders, and frees the memory.

        The evidence of a rank consists of the files with its steps, its stacks and the exception
        that ends it.
        """
        # One line is printed for each kind of problem, such as a full disk, not for each rank.
        ranks_of_problem: dict[str, list[int]] = {}
        for process in attempt.processes:
            if process.evidence_memory is None:
                continue

            try:
                process.evidence_memory.copy_to_folder()
            except OSError as error:
                ranks_of_problem.setdefault(str(error.strerror), []).append(process.rank)

            process.evidence_memory.close()
            process.evidence_memory = None

        for problem, ranks in ranks_of_problem.items():
            self._say(
                f"{attempt.folder}: {problem}: the stacks and exceptions of {format_ranks(ranks)} "
                "are not kept there"
            )

    # Signals of the user

    def signal_ranks(self, number: int) -> None:
        """Sends a signal to the ranks that are running."""
        running = self.attempts[-1].running if self.attempts else []
        if running:
            self._zygote.signal([process.local_rank for process in running], number)

    def interrupt(self, number: int) -> None:
        """Ends the run in an orderly way. The second call kills the ranks that are still running.

        Args:
            number: number of the signal that the launcher has received.

        Raises:
            SignalException: at the first call. Inside a `_delay_interrupts` block, the exception is
                raised when the block ends.
        """
        if self.received_signal is not None:
            self._kill_at_once = True  # `_end_processes` then does not wait for the ranks
            return

        self.received_signal = Interruption(signal=number, time=time.time())
        error = SignalException(
            f"process {os.getpid()} got signal {number}", signal.Signals(number)
        )
        if self._interrupts_delayed:
            self._delayed_interrupt = error
        else:
            raise error

    def end_unless_started(self, number: int) -> None:
        """Ends the run if no rank has been started yet, because another of its machines has failed.

        Once ranks have been started, the launchers determine the first failure by themselves.
        """
        if not self.attempts:
            self.interrupt(signal.SIGTERM)

    @contextlib.contextmanager
    def _delay_interrupts(self) -> Iterator[None]:
        """Delays a signal that ends the run until the end of the block.

        The block reads from the zygote which ranks have ended, and records that. If a signal came
        in between, the end of a rank would be lost, and the launcher would wait for it forever.
        """
        self._interrupts_delayed = True
        try:
            yield
        finally:
            self._interrupts_delayed = False

            # If a signal came in the block, its handler has kept the exception here. It is raised
            # even if the block has raised another one, as the user wants the run to end.
            interrupt = self._delayed_interrupt
            self._delayed_interrupt = None
            if interrupt is not None:
                raise interrupt

    def stop(self, number: int) -> None:
        """Stops the ranks and this process at Ctrl-Z, and continues the ranks when it continues.

        Args:
            number: not used; the number of the signal, which every handler is called with.
        """
        # The ranks have sessions of their own. The kernel ignores SIGTSTP, the signal of Ctrl-Z, in
        # a session without a shell that could continue its processes. So they are sent SIGSTOP.
        self.signal_ranks(signal.SIGSTOP)
        job_control.stop_this_process()

        # Here the user has continued this process, by the shell's `fg` or `bg`.
        # A single rank gets the terminal's keyboard back.
        pid = self._pid_of_keyboard_rank()
        if pid is not None:
            job_control.give_keyboard(pid)

        self.signal_ranks(signal.SIGCONT)

    def _pid_of_keyboard_rank(self) -> int | None:
        """Returns the process id of the rank that reads the terminal's keyboard.

        Returns:
            The id, or None if there is no such rank, or if it has not been started yet or has
            ended.
        """
        rank = self._keyboard_rank
        if rank is None or not rank.pid or rank.code is not None:
            return None
        return rank.pid

    # Messages between the launchers of the run

    def _report_exits(self, attempt: Attempt) -> ExitReport:
        """Returns how the ranks of this machine have ended so far, and tells the other launchers.

        Returns:
            The report that was published if the run has several machines.
        """
        exits = []
        for process in attempt.processes:
            has_ended = process.code is not None
            if has_ended:
                exits.append(exit_status_of(process, self._oom_counts_before))

        interrupted = self.received_signal or _ctrl_c_of_only_rank(attempt)
        report = ExitReport(
            host=socket.gethostname(),
            ranks=tuple(process.rank for process in attempt.processes),
            exits=tuple(exits),
            complete=not attempt.running,
            earlier_failures=self._earlier_failures(),
            hang=self._supervisor.verdict if self._supervisor else None,
            interrupted=interrupted,
        )
        if attempt.num_nodes > 1:
            self._rdzv.publish(_EXIT_REPORT_KEY, report.to_values())
        return report

    def _reports_of_others(self, attempt: Attempt) -> dict[int, ExitReport]:
        """Returns the latest report of each other launcher of the attempt, by the number of its
        node.
        """
        reports = {}
        if attempt.num_nodes > 1:
            for node, values in self._rdzv.published(_EXIT_REPORT_KEY).items():
                if node != attempt.node:
                    reports[node] = from_values(ExitReport, values)
        return reports

    def _has_failure_elsewhere(self, attempt: Attempt) -> bool:
        """Returns True if another launcher has reported a failure that ends the run."""
        reports = self._reports_of_others(attempt).values()
        return any(report.failed for report in reports)

    def _others_run(self, attempt: Attempt) -> bool:
        """Returns True if ranks of other machines are still running.

        This is called once the ranks of this machine have ended. The first call of an attempt tells
        the other launchers so. With torch's own rendezvous, launchers cannot tell each other
        anything. Then each of them only waits for its own ranks, and this returns False.
        """
        if attempt.num_nodes == 1 or not self._rdzv.can_publish:
            return False

        if not attempt.end_published:
            attempt.end_published = True
            self._report_exits(attempt)

        # A report is complete once all ranks of its machine have ended.
        reports = self._reports_of_others(attempt).values()
        complete = [report for report in reports if report.complete]
        num_other_nodes = attempt.num_nodes - 1
        return len(complete) < num_other_nodes

    def _first_failure(self, attempt: Attempt) -> FirstFailure | None:
        """Determines what failed first on all machines.

        The report of this machine is published, and the reports of the others are waited for if
        they are needed.

        Returns:
            The failure, or None if nothing failed.
        """
        own_report = self._report_exits(attempt)
        if self._rdzv.can_publish:
            deadline = time.monotonic() + _REPORTS_WAIT_S
            wait_until(lambda: self._has_all_reports(attempt, own_report), deadline)

        reports_of_others = self._reports_of_others(attempt)
        reports = [own_report, *reports_of_others.values()]
        exits: list[ExitStatus] = []
        earlier_failures: set[str] = set()
        for report in reports:
            exits.extend(report.exits)
            earlier_failures.update(report.earlier_failures)

        hangs = [report.hang for report in reports if report.hang is not None]
        first_hang = min(hangs, key=lambda hang: hang.found_at, default=None)

        # The user may have interrupted this launcher, or that of another machine.
        interrupted_reports = [report for report in reports if report.interrupted is not None]
        interruption = None
        if interrupted_reports:
            interruption = interrupted_reports[0].interrupted

        folder = str(attempt.folder)
        if attempt.logs_deleted:
            folder += " (its logs were deleted)"

        failure = first_failure(
            exits,
            hang=first_hang,
            interrupted=interruption,
            lost_nodes=self._failures_of_lost_nodes(reports_of_others, exits),
            earlier_failures=earlier_failures,
            folder=folder,
        )
        if failure is None or failure.kind != "interrupted":
            return failure
        was_interrupted_here = own_report.interrupted is not None
        if was_interrupted_here:
            return failure

        # The user has interrupted the launcher of another machine. The message says which.
        host = interrupted_reports[0].host
        return replace(failure, headline=f"{failure.headline} on host {host}")

    def _earlier_failures(self) -> tuple[str, ...]:
        """Returns the keys of the first failures of all attempts before the last one.

        The launchers exchange them, because one that joined later has not seen these failures. So
        all of them agree on whether a failure is repeated.
        """
        keys = [attempt.failure.key for attempt in self.attempts[:-1] if attempt.failure]
        return tuple(key for key in keys if key)

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

    def _has_all_reports(self, attempt: Attempt, own_report: ExitReport) -> bool:
        """Returns True if the other launchers have reported everything that is needed to find the
        first failure.
        """
        reports_of_others = self._reports_of_others(attempt)
        reports = [own_report, *reports_of_others.values()]
        if any(report.interrupted for report in reports):
            return True  # the interruption is what ended the run, and further failures follow
        if not any(report.failed for report in reports):
            return True  # nothing failed, so there is no first failure to be found

        # Something failed. The first failure is known once every machine has reported the end of
        # all its ranks. Lost machines will report nothing more.
        awaited = set(range(attempt.num_nodes)) - {attempt.node}
        awaited -= {_node_rank(node) for node in self._rdzv.departed_nodes()}
        awaited -= {rank for rank, report in reports_of_others.items() if report.complete}
        return not awaited


def _all_are_running(attempt: Attempt) -> bool:
    """Returns True if no rank of this machine has ended."""
    return len(attempt.running) == len(attempt.processes)


def _is_end_of(process: Process, event: Event) -> bool:
    """Returns True if an event says that a rank's process has ended, and this was not known yet.

    The event may also be about an older process of the same local rank, on which the launcher had
    given up in an earlier attempt.
    """
    if process.code is not None:
        return False  # it is known to have ended
    if process.pid is None:
        return True  # the zygote died before it reported the start
    return process.pid == event.pid


def _repeated_failure_error(step: int | None, max_restarts: int) -> LockstepError:
    """Returns the error for a run in which the same failure has come twice in the same step.

    It is printed below the report of the failure, which "repair what it says" refers to.
    """
    is_before_first_step = not step
    where = (
        "before the first step" if is_before_first_step else f"after step {step} of the training"
    )
    return LockstepError(
        f"--max-restarts {max_restarts}",
        f"the same failure twice {where}: restarting will not help",
        "repair what it says",
    )


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


def _runs_on_after_exception(attempt: Attempt) -> bool:
    """Returns True if a rank raised an exception a while ago but is still running.

    Others may be waiting for it.
    """
    for process in attempt.running:
        record = read_error(process.evidence)
        if record and time.time() - record.time > _EXIT_AFTER_EXCEPTION_S:
            return True
    return False


def _failed_processes(attempt: Attempt) -> dict[int, ProcessFailure]:
    """Returns the ranks of this machine that have failed, in the form that torch elastic uses."""
    failures = {}
    for process in attempt.processes:
        if process.code is None or process.code == 0:  # it is running, or has ended well
            continue

        failures[process.rank] = ProcessFailure(
            local_rank=process.local_rank,
            pid=process.pid or 0,
            exitcode=process.code,
            error_file=readable_torch_file(process.folder / ELASTIC_ERROR_NAME),
        )
    return failures


@contextlib.contextmanager
def _without_torch_warnings() -> Iterator[None]:
    """Silences the warnings of torch's agent within the block, unless LOGLEVEL is set.

    Lockstep announces the same events in a clearer form.
    """
    logger = logging.getLogger(api.SimpleElasticAgent.__module__)
    level_before = logger.level
    if "LOGLEVEL" not in os.environ:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level_before)
