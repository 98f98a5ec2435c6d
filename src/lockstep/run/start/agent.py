"""Starts the ranks of this machine, watches them, and ends them: torch elastic's agent.

A *rank* is a process of the run. A *launcher* (`lockstep run`) starts the ranks of one machine,
which is a *node*. An *attempt* is one start of the ranks; after a failure, torch elastic may start
them again. The *fork server* is the process that the ranks are forked from.

`Agent` is torch elastic's SimpleElasticAgent (torch/distributed/elastic/agent/server/api.py): its
loop, its rendezvous and its restarts are torch's, and the four abstract methods are implemented
here. The loop calls `_monitor_workers` every `monitor_interval` seconds. The agent has these parts:

    local_ranks     starts the ranks, and notes which have ended
    rank_watch      finds out when they must be ended, also by the supervisor of hangs
    rank_ending     ends them, and gives up on those that do not end
    exit_reports    exchanges with the other launchers how ranks ended, and finds what failed first
    interrupts      handles the user's signals
    restarts        says why ranks are started again, or why that would not help
    usable_gpus     leaves out GPUs that a process of an earlier attempt still holds
    step_memory     outlives the ranks, and holds their latest step

If machines may join and leave (`--nnodes MIN:MAX`), the loss of a machine is not a failure: the
others restart their ranks without it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException

from lockstep.errors import EXIT_SIGNAL, LockstepError
from lockstep.language import translate
from lockstep.machine.network import wait_until
from lockstep.run.machines.open_rendezvous import open_rendezvous
from lockstep.run.machines.rendezvous import Rendezvous
from lockstep.run.run_folder import ELASTIC_ERROR_NAME
from lockstep.run.start import job_control
from lockstep.run.start.console import Console
from lockstep.run.start.console_flags import console_for
from lockstep.run.start.exit_reports import ExitReports
from lockstep.run.start.fork_server import ForkServer
from lockstep.run.start.interrupts import Interrupts
from lockstep.run.start.launcher_record import LauncherRecord
from lockstep.run.start.local_ranks import LocalRanks
from lockstep.run.start.plan import LaunchPlan
from lockstep.run.start.process import (
    Attempt,
    Process,
)
from lockstep.run.start.process_memory import read_oom_counts
from lockstep.run.start.rank_ending import RankEnding
from lockstep.run.start.rank_environment import rank_environment, variables_of_all_ranks
from lockstep.run.start.rank_watch import RankWatch, announce_deleted_logs
from lockstep.run.start.restarts import check_restart_may_help, describe_restart
from lockstep.run.start.step_memory import StepMemory, step_memory_for
from lockstep.run.start.system_limits import can_hold_evidence, explain_scarcity
from lockstep.run.start.torchrun_flags import rendezvous_parameters, shutdown_timeout
from lockstep.run.start.usable_gpus import UsableGpus
from lockstep.run.watch.error_record import (
    TORCH_ERROR_FILE_VARIABLE,
    readable_torch_file,
)
from lockstep.run.watch.evidence import FOLDER_VARIABLE, create_evidence_memory
from lockstep.run.watch.exit_status import Interruption
from lockstep.run.watch.first_failure import FirstFailure
from lockstep.torch_compat import accepted, skip_exit_barrier
from lockstep.wording import count_noun

_MAX_PENDING_STARTS = 8
"""How many ranks may be requested before the fork server's answers are read."""
_MAX_MONITOR_INTERVAL_S = 0.5
"""The longest pause between two checks: other launchers wait only seconds for an answer."""
_SETTLE_S = 0.5
"""How long to wait for other ranks to fail after the first one, to find out which was first."""
_MAX_WAIT_FOR_KEPT_STEP_S = 30.0
"""How long ranks go on training, before they are ended because a machine joins, until they have
kept a step in memory."""
_MAX_COPY_OF_STEP_S = 5.0
"""How long ranks may take, in that time, to keep the last step that they have made together with
those of another machine, which have ended."""
_MEMBERSHIP_CHANGE_S = 2.0
"""How much earlier ranks may notice a lost connection than launchers notice a lost machine."""


def run_agent(
    plan: LaunchPlan,
    flags: argparse.Namespace,
    fork_server: ForkServer,
    folder: Path,
    start_fork_server: Callable[[], ForkServer] | None = None,
) -> Agent:
    """Meets the other machines, starts the ranks of this one, and watches them until they end.

    Args:
        plan: what to start on this machine.
        flags: torchrun's flags.
        fork_server: the process that forks the ranks.
        folder: the folder of the run; each attempt gets a folder in it.
        start_fork_server: function that starts another fork server if something has killed the
            first one; None if that is not possible.

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
        variables = variables_of_all_ranks(plan, os.environ, rendezvous.interface, console.announce)
        variables.update(step_memory.variables)
        # Ranks that do not have the terminal themselves are told its width. A single rank has it.
        is_only_rank = plan.nproc == 1 and plan.one_node
        if not is_only_rank:
            variables.update(console.environment)

        interrupts = Interrupts()
        ranks = LocalRanks(fork_server, start_fork_server, interrupts)
        at_end.callback(ranks.close)
        agent = Agent(
            plan, flags, folder, variables, console, rendezvous, step_memory, ranks, interrupts
        )

        _run_until_end(agent, flags, console, rendezvous)

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


def _run_until_end(
    agent: Agent, flags: argparse.Namespace, console: Console, rendezvous: Rendezvous
) -> None:
    """Runs torch elastic's loop until the run has ended on this machine.

    As torchrun does, it tells the handler of --event-log-handler how the run ended
    (`events.record`).

    Raises:
        LockstepError: the ranks could not be started.
    """
    try:
        with job_control.handled(_signal_handlers(agent, flags)), _without_torch_warnings():
            agent.run()
    except SignalException:  # `agent.received_signal` says which signal it was
        events.record(agent.get_event_failed(), flags.event_log_handler)
    except LockstepError as error:
        if agent.failure is None:
            raise
        # A restart raised it. The failure that made the restart necessary is the one to report.
        console.announce(translate(f"the ranks cannot be started again: {error}"))
    else:
        events.record(agent.get_event_succeeded(), flags.event_log_handler)
        rendezvous.shutdown()


def _signal_handlers(agent: Agent, flags: argparse.Namespace) -> dict[int, Callable[[int], object]]:
    """Returns what the launcher does at each signal, by the number of the signal."""
    handlers: dict[int, Callable[[int], object]] = {
        signal.SIGUSR1: agent.ranks.signal,  # asks scripts for a checkpoint
        # `hosts_run` sends this signal when another machine has failed. Once ranks have been
        # started, the launcher notices that by itself.
        signal.SIGUSR2: agent.end_unless_started,
        signal.SIGTSTP: agent.stop,  # Ctrl-Z
    }
    for text in flags.signals_to_handle.split(","):  # torchrun's flag: "SIGTERM,SIGINT"
        name = text.strip()
        if name:
            handlers[signal.Signals[name]] = agent.interrupts.interrupt
    return handlers


class Agent(api.SimpleElasticAgent):
    """Starts, watches and ends the ranks of this machine.

    Args:
        plan: what to start on this machine.
        flags: torchrun's flags.
        folder: the folder of the run.
        variables: environment variables of every rank.
        console: opens and reads the output streams of the ranks.
        rendezvous: connects the machines of the run, and carries messages between their launchers.
        step_memory: memory that outlives the ranks, in which they keep their latest step.
        ranks: starts and signals the ranks.
        interrupts: the signals by which the user ends the run.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        flags: argparse.Namespace,
        folder: Path,
        variables: Mapping[str, str],
        console: Console,
        rendezvous: Rendezvous,
        step_memory: StepMemory,
        ranks: LocalRanks,
        interrupts: Interrupts,
    ) -> None:
        # Newer versions of torch take a `shutdown_timeout` here; `RankEnding` applies it instead.
        super().__init__(
            api.WorkerSpec(
                role=flags.role,
                local_world_size=plan.nproc,
                rdzv_handler=rendezvous,
                entrypoint=folder.name,  # for torch's events only
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

        self._plan = plan
        self._folder = folder
        self._variables = variables
        self._console = console
        self._rdzv = rendezvous
        self._step_memory = step_memory
        self.ranks = ranks
        self.interrupts = interrupts

        # Parts of this agent are given this function, and a method of the record. A method of this
        # agent would keep the agent alive, and with it the store.
        def say(line: str) -> None:
            """Announces an English line, in the language of this process."""
            console.announce(translate(line))

        self._say = say
        report_folder = {**os.environ, **variables}.get("LOCKSTEP_REPORT")
        self._record = LauncherRecord(report_folder, console.announce)

        self._grace_s = shutdown_timeout(flags.shutdown_timeout, os.environ)
        self._gpus = UsableGpus(plan, str(flags.nproc_per_node))
        self._oom_counts_before = read_oom_counts()
        self._failed_attempts = 0
        self.attempts: list[Attempt] = []
        """Empty if the run was interrupted before any rank was started."""

        # Each attempt has its own of these.
        self._exit_reports: ExitReports
        self._ending: RankEnding
        self._watch: RankWatch
        self._keyboard = job_control.Keyboard()
        self._steps_kept_before: list[frozenset[bytes]] = []
        """The steps in `step_memory` when the present attempt began, see `kept_steps` there."""

    @property
    def failure(self) -> FirstFailure | None:
        """The first failure of the last attempt, known once it is over; None if nothing failed."""
        return self.attempts[-1].failure if self.attempts else None

    @property
    def received_signal(self) -> Interruption | None:
        """The signal that ended the run from outside; None if there was none."""
        return self.interrupts.received

    @property
    def timed_out_ranks(self) -> tuple[int, ...]:
        """The ranks that were ended because they ran for longer than the plan allows."""
        return self.attempts[-1].timed_out_ranks if self.attempts else ()

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
            nproc=len(workers),
            folder=self._folder / f"attempt_{len(self.attempts)}",
        )
        self._begin_attempt(attempt)
        self._record.start(attempt, self._plan.script)

        # `_start_rank` only sends a request to the fork server. At most `_MAX_PENDING_STARTS`
        # requests wait for an answer at a time.
        for worker in workers:
            self._start_rank(worker_group, worker, attempt)
            self.ranks.wait_for_starts(max_pending=_MAX_PENDING_STARTS)
        self.ranks.wait_for_all_starts()

        # An exit report lists all ranks of a machine, and the exits of those that have ended: none
        # yet. If this machine is lost, the other launchers know from it which ranks are lost.
        self._exit_reports.publish()
        self._watch = RankWatch(
            attempt,
            self._plan,
            self._rdzv,
            self._exit_reports,
            self._ending,
            self._record,
            self._say,
        )
        return {process.local_rank: process.pid for process in attempt.processes}

    def _begin_attempt(self, attempt: Attempt) -> None:
        """Makes an attempt the present one, and replaces everything that was about the last one."""
        earlier_failures = [earlier.failure for earlier in self.attempts if earlier.failure]
        keys_of_failures = [failure.key for failure in earlier_failures if failure.key]
        self._exit_reports = ExitReports(
            self._rdzv, attempt, keys_of_failures, self._oom_counts_before, self.interrupts
        )
        self._ending = RankEnding(attempt, self.ranks, self.interrupts, self._grace_s, self._say)
        self._keyboard = job_control.Keyboard()

        # Once a rank has another step in memory than now, it has kept a step in this attempt.
        self._steps_kept_before = self._step_memory.kept_steps()

        # From here on a signal may end the run in the middle. `_end_ranks` then ends this attempt.
        self.attempts.append(attempt)
        self.ranks.begin(attempt)

    def _start_rank(self, group: api.WorkerGroup, worker: api.Worker, attempt: Attempt) -> None:
        """Requests a rank from the fork server and adds it to the attempt, without waiting for its
        start.
        """
        rank = worker.global_rank
        process = Process(rank, worker.local_rank, attempt.folder / f"rank_{rank}")
        with contextlib.suppress(OSError):  # if the disk is full, the console says so
            process.folder.mkdir(parents=True)

        if can_hold_evidence(attempt.nproc):
            process.evidence_memory = create_evidence_memory(process.folder)

        # A single rank stays in the session of the terminal, so that pdb and input() work.
        is_only_rank = attempt.world_size == 1
        gets_keyboard = is_only_rank and self._plan.keyboard and job_control.in_foreground()
        if gets_keyboard:
            self._keyboard.rank = process

        command = self._plan.command.for_rank(worker.local_rank)
        variables = {
            **self._variables_of_rank(group, worker, process),
            **command.environment,
            **self._variables,
        }
        streams = self._console.open(
            rank,
            worker.local_rank,
            process.folder,
            is_only_rank=is_only_rank,
            error_file=process.evidence.error,
            recent=process.stderr_tail,
        )
        attempt.logs += process.folder.glob("*.log")  # the console has just created them

        try:
            self.ranks.start(
                process,
                variables,
                streams,
                command,
                own_session=not gets_keyboard,
            )
        finally:
            for stream in streams:
                os.close(stream)

    def _variables_of_rank(
        self, group: api.WorkerGroup, worker: api.Worker, process: Process
    ) -> dict[str, str]:
        """Returns the environment variables of one rank: its numbers in the run, and its files."""
        variables: dict[str, str] = {}

        # A script that spawns its own ranks must not mistake its first process for a rank.
        if not self._plan.script_spawns_ranks:
            variables.update(self._numbers_of_rank(group, worker))

        variables[FOLDER_VARIABLE] = str(process.folder)
        variables[TORCH_ERROR_FILE_VARIABLE] = str(process.folder / ELASTIC_ERROR_NAME)
        if process.evidence_memory is not None:
            variables.update(process.evidence_memory.variables)
        return variables

    def _numbers_of_rank(self, group: api.WorkerGroup, worker: api.Worker) -> dict[str, str]:
        """Returns RANK, WORLD_SIZE and so on, and the GPUs that the rank may use."""
        restarts = self._rdzv.attempt
        if restarts is None:  # torch's own rendezvous does not count the attempts
            restarts = self._failed_attempts

        # If a GPU was left out after a failure, the ranks only see the GPUs that remain. With
        # --virtual-local-rank a rank sees one of these, which `rank_environment` chooses.
        visible_gpus = self._gpus.variables  # CUDA_VISIBLE_DEVICES, or nothing
        environ = {**os.environ, **visible_gpus}
        return {**visible_gpus, **rank_environment(group, worker, restarts, environ)}

    # Watching the ranks

    def _monitor_workers(self, worker_group: api.WorkerGroup) -> api.RunResult:
        """Checks the ranks. torch elastic's loop calls this every `monitor_interval` seconds.

        Returns:
            FAILED if a rank has failed or all must be ended, SUCCEEDED if the ranks of all machines
            have ended well, and HEALTHY otherwise.
        """
        attempt = self.attempts[-1]
        self.ranks.read_events()
        self._keyboard.pass_on_ctrl_z(self.ranks.signal)

        ranks_must_end = self._watch.ranks_must_end()
        some_have_failed = bool(_failed_processes(attempt))
        if ranks_must_end or some_have_failed:
            return self._result_of_failure(attempt)

        # While ranks of other machines are running, this machine counts as running too: its ranks
        # that have ended may have to be restarted.
        if attempt.running or self._exit_reports.others_run():
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
            self.ranks.read_events(timeout=0.05)

        # If ranks only failed because a machine has left or wants to join, torch elastic must not
        # count a failure. So the result is HEALTHY. torch elastic then reads `num_nodes_waiting`,
        # which is above 0 in this case, and restarts all ranks.
        failures = _failed_processes(attempt)
        if failures and self._is_membership_changing():
            return api.RunResult(state=api.WorkerState.HEALTHY)

        self._failed_attempts += 1
        return api.RunResult(state=api.WorkerState.FAILED, failures=failures)

    # Restarts

    def _is_membership_changing(self) -> bool:
        """Returns True if ranks failed here only because a machine has left or wants to join.

        Ranks fail as soon as their connections to a machine break. The launchers notice the change
        later, so this waits for up to `_MEMBERSHIP_CHANGE_S` seconds until they do:
        `num_nodes_waiting` is then above 0.
        """
        if not self._rdzv.elastic:  # machines may neither leave nor join
            return False

        # If a rank has failed on another machine, that explains the failure here, so there is no
        # need to wait for a change of the machines.
        if self._exit_reports.has_failure_elsewhere():
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
        max_restarts = worker_group.spec.max_restarts
        if ranks_failed and self._failed_attempts > max_restarts:
            self._end_ranks(signal.SIGTERM)
            return

        # The ranks are restarted. Which machines were lost is asked before the ranks are ended:
        # afterwards the rendezvous may only know the machines of the next attempt.
        lost_machines = self._rdzv.describe_lost_nodes()

        if ranks_failed:
            self._end_ranks(signal.SIGTERM, before_restart=True)
            if self.failure is not None:
                check_restart_may_help(self.failure, max_restarts, is_elastic=self._rdzv.elastic)
        else:
            self._end_ranks_for_other_machines(a_machine_was_lost=bool(lost_machines))

        self._leave_out_held_gpus(worker_group.spec)

        # Announce the restart now, as the rendezvous that follows may take minutes.
        failures = [attempt.failure for attempt in self.attempts]
        restart_lines = describe_restart(
            failures,
            lost_machines,
            restarts_left=max_restarts - self._failed_attempts,
            is_counted=ranks_failed,
        )
        for line in restart_lines:
            self._console.announce(line)
        self._record.write("restart", "all ranks are started again")

    def _leave_out_held_gpus(self, spec: api.WorkerSpec) -> None:
        """Leaves out the GPUs of ranks whose processes did not end even at SIGKILL.

        Args:
            spec: what torch elastic starts next; it gets the number of ranks that is left.
        """
        num_gpus_left = self._gpus.leave_out_held(self.attempts[-1])
        if num_gpus_left is not None:
            spec.local_world_size = num_gpus_left
            self._say(f"this machine goes on with {count_noun(num_gpus_left, 'GPU')}")

    def _end_ranks_for_other_machines(self, *, a_machine_was_lost: bool) -> None:
        """Ends the ranks to restart them on the machines that the run has now.

        Args:
            a_machine_was_lost: True if the ranks may wait for those of a lost machine.
        """
        # If the run is not elastic, a lost machine was started again. All launchers notice that by
        # themselves, so there is no `request_restart`.
        if not self._rdzv.elastic:
            self._end_ranks(signal.SIGTERM, before_restart=True)
            return

        attempt = self.attempts[-1]
        self._rdzv.request_restart()  # tells the other launchers that this one restarts
        can_train_on = not a_machine_was_lost and _all_are_running(attempt)
        if can_train_on:
            end_signal = self._wait_for_good_moment(attempt)
        elif self._step_memory.is_used:
            end_signal = signal.SIGKILL
        else:
            end_signal = signal.SIGTERM  # at which they may write a checkpoint
        self._end_ranks(end_signal, before_restart=True)

    def _wait_for_good_moment(self, attempt: Attempt) -> signal.Signals:
        """Lets ranks that keep steps in memory train until they have kept the next one.

        Returns:
            The signal that ends the ranks: SIGKILL if they have kept a step, from which they will
            resume; otherwise SIGTERM, at which they may write a checkpoint.
        """
        if not self._all_have_kept_a_step_since(self._steps_kept_before):
            return signal.SIGTERM
        self._wait_for_kept_step(attempt)  # they may keep only every k-th step
        return signal.SIGKILL

    def _wait_for_kept_step(self, attempt: Attempt) -> None:
        """Lets the ranks train until each of them has kept another step, or one of them fails.

        The ranks are watched meanwhile, since torch elastic's loop, which watches them otherwise,
        waits for this. The wait also ends if the ranks must be ended, because they hang, say.
        """
        kept_before = self._step_memory.kept_steps()
        next_check_at = 0.0  # at once
        deadline = time.monotonic() + _MAX_WAIT_FOR_KEPT_STEP_S
        while _all_are_running(attempt) and time.monotonic() < deadline:
            if self._all_have_kept_a_step_since(kept_before):
                return

            now = time.monotonic()
            if now >= next_check_at:
                next_check_at = now + _MAX_MONITOR_INTERVAL_S
                if self._watch.ranks_must_end():
                    return
                # Without the ranks of another machine, those here make no further step. The last
                # one may still be being copied, so wait a little for that.
                others_are_missing = (
                    self._rdzv.has_node_left_attempt()
                    or self._exit_reports.a_machine_has_ended_elsewhere()
                )
                if others_are_missing:
                    deadline = min(deadline, now + _MAX_COPY_OF_STEP_S)

            self.ranks.read_events(timeout=0.005)

    def _all_have_kept_a_step_since(self, kept_before: Sequence[frozenset[bytes]]) -> bool:
        """Returns True if each rank of this machine has kept a step that is not in
        `kept_before`.
        """
        local_ranks = [process.local_rank for process in self.attempts[-1].processes]
        return self._step_memory.have_all_kept_since(kept_before, local_ranks)

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
        self._exit_reports.publish()
        self._ending.end_ranks(end_signal)

        # Ranks may have started processes that outlive them. These may go on after a run that has
        # ended well. In all other cases they are ended.
        all_ended_well = all(process.code == 0 for process in attempt.processes)
        run_has_ended_well = all_ended_well and not before_restart and self.received_signal is None
        if not run_has_ended_well:
            self._ending.end_left_behind()

        self._keyboard.take_back()  # from a rank that has read the terminal's input
        attempt.over = True

        # Show everything that the ranks have printed before their failure is reported.
        self._console.drain()
        announce_deleted_logs(attempt, self._say)

        attempt.failure = self._exit_reports.find_first_failure()
        self._ending.save_evidence()
        self._record.end(attempt.failure)

    # Signals of the user

    def end_unless_started(self, number: int) -> None:
        """Ends the run if no rank has been started yet, because another of its machines has failed.

        Once ranks have been started, the launchers determine the first failure by themselves.
        """
        if not self.attempts:
            self.interrupts.interrupt(signal.SIGTERM)

    def stop(self, number: int) -> None:
        """Stops the ranks and this process at Ctrl-Z, and continues the ranks when it continues.

        Args:
            number: not used; the number of the signal, which every handler is called with.
        """
        # The ranks have sessions of their own. The kernel ignores SIGTSTP, the signal of Ctrl-Z, in
        # a session without a shell that could continue its processes. So they are sent SIGSTOP.
        self.ranks.signal(signal.SIGSTOP)
        job_control.stop_this_process()

        # Here the user has continued this process, by the shell's `fg` or `bg`.
        self._keyboard.give_again()
        self.ranks.signal(signal.SIGCONT)


def _all_are_running(attempt: Attempt) -> bool:
    """Returns True if no rank of this machine has ended."""
    return len(attempt.running) == len(attempt.processes)


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
