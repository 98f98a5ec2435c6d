"""Starts the ranks of this machine, and knows which of them are running.

Ranks are forked by the fork server (see `fork_server`). All that is known of a rank's start and end
comes from its events.
"""

from __future__ import annotations

import errno
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.run.start.fork_server import ForkServer
from lockstep.run.start.fork_server_messages import Event
from lockstep.run.start.interrupts import Interrupts
from lockstep.run.start.left_behind import end_process_groups
from lockstep.run.start.process import Attempt, Process, describe_exit_code
from lockstep.run.start.worker import Command
from lockstep.run.watch.process_status import describe_state, read_process
from lockstep.wording import format_ranks

_MAX_START_S = 60.0
"""How long the fork server may take to start the next rank while it uses no processor time."""
_NOT_STARTED_PID = 0
"""Stands for the process id of a rank whose process does not exist yet."""


class LocalRanks:
    """The ranks of this machine, of one attempt after the other.

    Args:
        fork_server: the process that forks the ranks. It is closed by its owner.
        start_fork_server: function that starts another fork server if something has killed the
            first one; None if that is not possible.
        interrupts: the user's signals, which are delayed while events are read.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        start_fork_server: Callable[[], ForkServer] | None,
        interrupts: Interrupts,
    ) -> None:
        self._first_fork_server = fork_server
        self._fork_server = fork_server
        self._start_fork_server = start_fork_server
        self._interrupts = interrupts
        self._attempt = Attempt([], world_size=0, node=0, num_nodes=1, nproc=0, folder=Path())
        """The present attempt; before the first one, an attempt without ranks."""
        self._why_not_started: str | None = None
        """Why the system refused to start a rank; None if it has not."""

    def begin(self, attempt: Attempt) -> None:
        """Makes an attempt the present one. If something has killed the fork server, another is
        started, if that is possible.
        """
        self._attempt = attempt
        if self._start_fork_server is not None and self._fork_server.has_ended:
            self._fork_server.close()
            self._fork_server = self._start_fork_server()

    def close(self) -> None:
        """Ends the fork server that has replaced the first one, if any."""
        if self._fork_server is not self._first_fork_server:
            self._fork_server.close()

    @property
    def fork_server_pid(self) -> int:
        """The process id of the fork server."""
        return self._fork_server.pid

    # Starting ranks

    def start(
        self,
        process: Process,
        variables: Mapping[str, str],
        streams: Sequence[int],
        command: Command,
        *,
        own_session: bool,
    ) -> None:
        """Requests a rank, and adds it to the attempt, without waiting for its start.

        Args:
            process: the rank.
            variables: its environment variables, in addition to the launcher's.
            streams: descriptors of its standard input, output and error.
            command: what it executes.
            own_session: False if it stays in the session of the terminal, to read the keyboard.

        Raises:
            LockstepError: the fork server is gone.
        """
        attempt = self._attempt
        with self._interrupts.delayed():
            try:
                self._fork_server.start(
                    process.local_rank,
                    variables,
                    streams,
                    own_session=own_session,
                    command=command.words,
                )
            except ChildProcessError as error:
                raise LockstepError(
                    f"--nproc {attempt.nproc}",
                    str(error),
                    "find out what killed it; if memory ran out, the kernel's log (dmesg) says so",
                ) from None
            attempt.processes.append(process)

    def wait_for_starts(self, *, max_pending: int) -> None:
        """Waits until at most `max_pending` of the requested ranks are still to be started.

        Without this limit, the socket to the fork server could fill up in both directions, and each
        side would wait for the other one to read.

        Raises:
            LockstepError: the fork server does not answer.
        """
        attempt = self._attempt
        progress_before: tuple[int, float] | None = None  # ranks to start, and processor time
        deadline = math.inf
        while True:
            pending = [process for process in attempt.processes if process.pid is None]
            if len(pending) <= max_pending:
                return

            # Processor time of the fork server counts as progress, as it may still be importing
            # torch from a slow file system.
            status = read_process(self.fork_server_pid)
            progress = (len(pending), 0.0 if status is None else status.cpu_s)
            if progress != progress_before:
                progress_before = progress
                deadline = time.monotonic() + _MAX_START_S
            elif time.monotonic() >= deadline:
                raise self._not_started_error(attempt, pending)
            self.read_events(timeout=1.0)

    def wait_for_all_starts(self) -> None:
        """Waits until all requested ranks have been started.

        Raises:
            BlockingIOError: the system has refused to start a rank.
            LockstepError: the fork server does not answer.
        """
        self.wait_for_starts(max_pending=0)
        if self._why_not_started is not None:
            raise BlockingIOError(errno.EAGAIN, self._why_not_started)

    def _not_started_error(self, attempt: Attempt, pending: Sequence[Process]) -> LockstepError:
        """Returns the error for ranks that a fork server which does not answer has not started."""
        pid = self.fork_server_pid
        ranks = format_ranks(process.rank for process in pending)
        return LockstepError(
            f"--nproc {attempt.nproc}",
            f"the fork server (process {pid}, which starts the ranks) has not started {ranks} "
            f"within {_MAX_START_S:.0f} s: {describe_state(pid)}",
            f"if it was stopped, let it go on (kill -CONT {pid}); in state D it waits for a device "
            "or a file server, which must be repaired",
        )

    # Starts and ends of ranks

    def read_events(self, timeout: float = 0.0) -> None:
        """Notes which ranks the fork server has started, and which have ended, since the last call.

        Args:
            timeout: how long to wait for the first event, in seconds.
        """
        attempt = self._attempt
        with self._interrupts.delayed():
            process_of_local_rank = {process.local_rank: process for process in attempt.processes}

            try:
                fork_server_events = self._fork_server.events(timeout)
            except ChildProcessError:
                fork_server_events = self._events_of_fork_servers_death(attempt)

            for event in fork_server_events:
                process = process_of_local_rank.get(event.local_rank)
                # An earlier attempt may have had more ranks, one of which ends only now. If the
                # present attempt has this rank too, `_note_event` compares the process id.
                if process is not None:
                    self._note_event(event, process)

    def _note_event(self, event: Event, process: Process) -> None:
        """Notes what an event of the fork server says about a rank of the present attempt."""
        if event.says_start_was_refused:  # by the system
            self._attempt.processes.remove(process)
            self._why_not_started = event.reason
        elif event.says_started:
            process.pid = event.pid
            process.started_at = time.time()
        elif _is_end_of(process, event):
            process.pid = event.pid  # `_NOT_STARTED_PID` if it was not started before
            process.code = event.code
            process.ended_at = time.time()

    def _events_of_fork_servers_death(self, attempt: Attempt) -> list[Event]:
        """Makes the events that the fork server would have sent, had it seen the end of its ranks,
        and sets `fork_server_end` of each running rank.

        If the fork server ends, the kernel kills all ranks that are running. The events say so, and
        `fork_server_end` tells the user that the fork server ended first.
        """
        code = self._fork_server.wait()
        killed_by_kernel = []
        for process in attempt.running:
            process.fork_server_end = (
                f"the fork server (process {self.fork_server_pid}, which starts the ranks) "
                f"ended first: {describe_exit_code(code)}; the kernel then kills its ranks"
            )
            # A rank that was requested but not started yet counts as killed, too.
            pid = _NOT_STARTED_PID if process.pid is None else process.pid
            killed_by_kernel.append(Event(process.local_rank, pid, -signal.SIGKILL))
        return killed_by_kernel

    # Signals and ends

    def signal(self, number: int) -> None:
        """Sends a signal to the ranks that are running."""
        running = self._attempt.running
        if running:
            self._fork_server.signal([process.local_rank for process in running], number)

    def give_up(self, process: Process, code: int, why: str) -> None:
        """Treats a rank whose process does not end as if it had ended.

        Args:
            process: the rank.
            code: the exit code that it counts as having ended with.
            why: how long its process has not ended, for messages.
        """
        process.code = code
        process.ended_at = time.time()
        process.given_up = why
        self._fork_server.give_up(process.local_rank)

    def kill_fork_server(self) -> None:
        """Kills the fork server, and treats the ranks that it was asked for and has not started as
        killed.
        """
        for process in self._attempt.running:
            if process.pid is None:
                process.code = -signal.SIGKILL
                process.ended_at = time.time()
        self._fork_server.kill()

    def end_left_behind(self) -> list[int]:
        """Ends the processes that ranks have started and that have outlived them.

        Returns:
            The ids of those that do not end at SIGKILL.
        """
        with self._interrupts.delayed():
            if not self._fork_server.has_ended:
                return self._fork_server.end_left_behind()

            # Something has killed the fork server, and the kernel then killed the ranks. The
            # process groups of ranks that had ended before are not touched: their process ids may
            # belong to other processes now.
            processes = self._attempt.processes
            killed = [process for process in processes if process.was_killed_with_fork_server]
            return end_process_groups(process.pid for process in killed if process.pid)


def _is_end_of(process: Process, event: Event) -> bool:
    """Returns True if an event says that a rank's process has ended, and this was not known yet.

    The event may also be about an older process of the same local rank, on which the launcher had
    given up in an earlier attempt.
    """
    if process.code is not None:
        return False  # it is known to have ended
    if process.pid is None:
        # Only the death of the fork server ends a rank that was not started yet.
        return event.pid == _NOT_STARTED_PID
    return event.pid == process.pid
