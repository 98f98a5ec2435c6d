"""Ends the ranks of an attempt: by a signal, then by SIGKILL, and gives up on those that stay.

A process may not even end at SIGKILL, see `late_end`. The user is told what it waits for, and the
launcher does not wait for it forever.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from lockstep.run.start.interrupts import Interrupts
from lockstep.run.start.late_end import LateEnd, Progress
from lockstep.run.start.local_ranks import LocalRanks
from lockstep.run.start.process import Attempt, Process
from lockstep.run.watch.process_status import (
    describe_state,
    exit_code_of_ending_process,
    read_process,
)
from lockstep.run.watch.snapshot import STOPPED_STATES
from lockstep.wording import format_ranks

_INTERRUPT_GRACE_S = 10.0
"""The time that a script gets after Ctrl-C, for example to save."""


class RankEnding:
    """Ends the ranks of one attempt.

    Args:
        attempt: the attempt.
        ranks: starts and signals the ranks of this machine.
        interrupts: the user's signals: after the second one, the ranks are killed at once.
        grace_s: the time that ranks get to end after a signal, before they are killed.
        say: function that shows an English line to the user.
    """

    def __init__(
        self,
        attempt: Attempt,
        ranks: LocalRanks,
        interrupts: Interrupts,
        grace_s: float,
        say: Callable[[str], object],
    ) -> None:
        self._attempt = attempt
        self._ranks = ranks
        self._interrupts = interrupts
        self._grace_s = grace_s
        self._say = say
        self._late_ends: dict[int, LateEnd] = {}
        """How long processes that should end have taken so far, by process id."""

    def end_ranks(self, end_signal: int) -> None:
        """Asks the ranks to end, waits for them, and kills those that do not end in time.

        A second Ctrl-C ends the waiting.

        Args:
            end_signal: number of the signal that asks the ranks to end.
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
            self._signal(signal_to_send)
            deadline = time.monotonic() + grace_s
            while self._is_worth_waiting() and time.monotonic() < deadline:
                self._ranks.read_events(timeout=0.05)

        self._signal(signal.SIGKILL)
        self._wait_for_killed()

    def _is_worth_waiting(self) -> bool:
        """Returns True if ranks are running, and the user has not asked to kill them at once."""
        return bool(self._attempt.running) and not self._interrupts.kill_at_once

    def end_left_behind(self) -> None:
        """Ends the processes that ranks have started and that have outlived them, and announces
        those that do not end.
        """
        for pid in self._ranks.end_left_behind():
            self._say(
                f"process {pid}, which ranks have left behind, does not end at SIGKILL: "
                f"{describe_state(pid)}"
            )

    def watch_late_exits(self) -> None:
        """Watches ranks whose program has ended, but whose process has not.

        At the end of a process the kernel closes its files, which may take as long as after
        SIGKILL.
        """
        for process in self._attempt.running:
            if process.pid is not None and exit_code_of_ending_process(process.pid) is not None:
                self._watch_end(process, process.pid, ended_by="its program's end")

    def save_evidence(self) -> None:
        """Copies the evidence of the ranks from memory into their folders, and frees the memory.

        The evidence of a rank consists of the files with its steps, its stacks and the exception
        that ends it.
        """
        # One line is printed for each kind of problem, such as a full disk, not for each rank.
        ranks_of_problem: dict[str, list[int]] = {}
        for process in self._attempt.processes:
            if process.evidence_memory is None:
                continue

            try:
                process.evidence_memory.copy_to_folder()
            except OSError as error:
                ranks_of_problem.setdefault(str(error.strerror), []).append(process.rank)

            process.evidence_memory.close()
            process.evidence_memory = None

        for problem, ranks in ranks_of_problem.items():
            folder = self._attempt.folder
            self._say(
                f"{folder}: {problem}: the stacks and exceptions of {format_ranks(ranks)} are not "
                "kept there"
            )

    def _signal(self, number: int) -> None:
        """Sends the running ranks a signal to end them, and notes which of them were stopped, by
        SIGSTOP or a debugger.
        """
        now = time.time()
        for process in self._attempt.running:
            process.signals_sent.setdefault(number, now)  # keeps the time of the first signal

            # A rank without a process id has not been started yet.
            status = None if process.pid is None else read_process(process.pid)
            if status is not None and status.state in STOPPED_STATES:
                process.stopped = True

        self._ranks.signal(number)

    def _wait_for_killed(self) -> None:
        """Waits for ranks that were sent SIGKILL, and gives up on those that do not end."""
        while self._attempt.running:
            self._give_up_unstarted()
            for process in self._attempt.running:
                if process.pid is not None:  # otherwise it has not been started yet
                    self._watch_end(process, process.pid, ended_by="SIGKILL")
            if self._attempt.running:
                self._ranks.read_events(timeout=0.2)

    def _give_up_unstarted(self) -> None:
        """Gives up on ranks that were requested and not started, if the fork server does not
        answer.

        The fork server is then killed. Otherwise the launcher would wait again when it asks the
        fork server to end the processes that ranks have left behind.
        """
        unstarted = [process for process in self._attempt.running if process.pid is None]
        if not unstarted:
            return

        fork_server_pid = self._ranks.fork_server_pid
        # The time to answer begins at the first check, when the ranks have been sent SIGKILL.
        progress = self._late_end_of(fork_server_pid).check()
        fork_server_may_answer = progress is not Progress.GIVEN_UP
        if fork_server_may_answer:
            return

        ranks = format_ranks(process.rank for process in unstarted)
        self._say(
            f"{ranks}: not started: the fork server (process {fork_server_pid}) does not answer: "
            f"{describe_state(fork_server_pid)}"
        )
        self._ranks.kill_fork_server()

    def _watch_end(self, process: Process, pid: int, *, ended_by: str) -> None:
        """Announces that a rank's process is slow to end, and gives up on it if it does not end.

        Args:
            process: a rank that should have ended.
            pid: id of its process.
            ended_by: what should have ended it, for the announcement, such as "SIGKILL".
        """
        late_end = self._late_end_of(pid)
        progress = late_end.check()
        if progress is Progress.IN_TIME:
            return

        text = (
            f"process {pid} has not ended {late_end.waited_s:.0f} s after {ended_by}: "
            f"{describe_state(pid)}"
        )
        if progress is Progress.GIVEN_UP:
            # The process still exists, but may have an exit code already. Otherwise it counts as
            # ended by SIGKILL, which it was sent.
            code = exit_code_of_ending_process(pid)
            if code is None:
                code = -signal.SIGKILL
            self._ranks.give_up(process, code, text)
            self._say(f"rank {process.rank}: {text}; it is not waited for any longer")
        elif not late_end.is_announced:
            late_end.is_announced = True
            self._say(f"rank {process.rank}: {text}; it is still busy, perhaps freeing memory")

    def _late_end_of(self, pid: int) -> LateEnd:
        """Returns how long a process has taken to end; its time begins at the first call."""
        return self._late_ends.setdefault(pid, LateEnd(pid))
