"""Starts the fork server, a process that has imported torch, and has it fork, signal and end ranks.

This is the launcher's side. `fork_server_process` runs in the fork server itself, and
`fork_server_messages` defines what the two send each other.

The fork server is forked from the launcher before any thread exists (`ForkServer`), or is a new
interpreter if the launcher is a program of the user's (`FreshForkServer`).

When the fork server ends, the kernel kills the ranks, but not what they have started, such as the
workers of a DataLoader. If something has killed the fork server, the launcher ends those: see
`left_behind.end_process_groups`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.run.start.fork_server_messages import (
    Event,
    RankRequest,
    control_sockets,
    read_answer_on_left_behind,
    read_event,
    receive,
    send_rank_request,
)
from lockstep.run.start.fork_server_process import ForkServerProcess, Work
from lockstep.run.start.left_behind import KILL_TIMEOUT_S, MAX_POLL_S

_FORK_SERVER_GONE = "the process that starts the ranks is gone"
_LEFT_BEHIND_TIMEOUT_S = 10.0
"""How long the launcher waits for the end of processes left behind by ranks."""
_FORK_SERVER_TIMEOUT_S = 15.0
"""How long the launcher waits for the end of the fork server, which has to end the ranks first."""


class ForkServer:
    """The launcher's side of the fork server.

    Args:
        work: function that every rank runs, with its variables in `os.environ`. It must not return.
        spares: number of ranks that are forked before they are requested.

    Raises:
        OSError: no process could be created.
    """

    _code: int | None = None
    """The exit code of the fork server; None while it is not known to have ended."""
    _num_left_behind_requests = 0
    """How often the fork server was asked to end what ranks have left behind."""

    def __init__(self, work: Work, spares: int = 0) -> None:
        launchers_end, servers_end = control_sockets()

        # Otherwise every copy would write the buffered output once more.
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # the collector leaves existing objects alone, so all copies share them

        self.pid = os.fork()
        if self.pid == 0:
            launchers_end.close()
            try:
                ForkServerProcess(servers_end, work, spares).serve()
            finally:
                os._exit(1)

        gc.unfreeze()
        servers_end.close()
        self._socket = launchers_end

    def start(
        self,
        local_rank: int,
        environment: Mapping[str, str],
        streams: Iterable[int],
        *,
        own_session: bool,
        command: Sequence[str] = (),
    ) -> None:
        """Requests a rank. An event will say whether it was started.

        Args:
            local_rank: number of the rank on this machine.
            environment: its variables, in addition to the launcher's.
            streams: descriptors that become its standard input, output and error.
            own_session: whether the rank gets a session of its own. Otherwise it stays in the
                session of the terminal, and reads the keyboard.
            command: program that the rank executes; empty if it stays a copy of the fork
                server, and calls the function `work` that the fork server was created with.

        Raises:
            ChildProcessError: the fork server is gone.
        """
        request = RankRequest(local_rank, dict(environment), own_session, list(command))
        try:
            send_rank_request(self._socket, request, streams)
        except (BrokenPipeError, ConnectionResetError):
            raise ChildProcessError(_FORK_SERVER_GONE) from None

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Sends a signal to the process groups of those of the ranks that are still running."""
        request = {"signal": number, "ranks": list(ranks)}
        with contextlib.suppress(OSError):  # the fork server is gone, and the ranks with it
            self._socket.send(json.dumps(request).encode())

    def give_up(self, rank: int) -> None:
        """Tells the fork server not to wait for a rank any longer, because its process does not
        end.
        """
        with contextlib.suppress(OSError):  # the fork server is gone
            self._socket.send(json.dumps({"give_up": rank}).encode())

    def end_left_behind(self) -> list[int]:
        """Ends the processes that ranks have left behind, and waits until they have ended.

        This must only be called while no rank is running.

        Returns:
            The ids of processes that have not ended although they were killed. Also empty if the
            fork server is gone, or does not answer in time.
        """
        self._num_left_behind_requests += 1
        request = self._num_left_behind_requests
        with contextlib.suppress(OSError):  # the fork server is gone
            self._socket.send(json.dumps({"left_behind": request}).encode())

            deadline = time.monotonic() + _LEFT_BEHIND_TIMEOUT_S
            while time.monotonic() < deadline:
                # Other messages are not needed: a late answer to an earlier request, or the end of
                # a process on which the launcher has given up.
                for message in self._messages(timeout=0.1):
                    pids = read_answer_on_left_behind(message, request)
                    if pids is not None:
                        return pids
        return []

    def events(self, timeout: float = 0.0) -> list[Event]:
        """Returns the events that have arrived since the last call.

        Args:
            timeout: how long to wait for the first event, in seconds.

        Raises:
            ChildProcessError: the fork server is gone.
        """
        events = []
        for message in self._messages(timeout):
            event = read_event(message)
            if event is not None:  # otherwise an answer for which `end_left_behind` did not wait
                events.append(event)
        return events

    def _messages(self, timeout: float) -> list[Any]:
        """Returns the messages of the fork server that have arrived since the last call.

        Args:
            timeout: how long to wait for the first message, in seconds.

        Raises:
            ChildProcessError: the fork server is gone.
        """
        messages: list[Any] = []
        while True:
            wait_s = 0.0 if messages else timeout
            readable, _, _ = select.select([self._socket], [], [], wait_s)
            if not readable:
                return messages

            data, _ = receive(self._socket)  # one message, as the socket keeps messages apart
            if not data:  # the fork server has closed its end
                if not messages:
                    raise ChildProcessError(_FORK_SERVER_GONE)
                return messages  # the next call will raise the error

            messages.append(json.loads(data))

    @property
    def has_ended(self) -> bool:
        """True if the fork server is gone because something has killed it."""
        return self._ends_within(0.0)

    def kill(self) -> None:
        """Kills the fork server, and the kernel its ranks. It does not wait for their end."""
        if not self.has_ended:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the fork server and every rank that is still running, and waits until the fork
        server has ended.
        """
        if self._socket.fileno() >= 0:  # it has not been closed before
            self._socket.close()
            self.wait()

    def wait(self) -> int:
        """Waits until the fork server has ended, and kills it if it does not end in time.

        Returns:
            Its exit code, or minus the number of the signal that ended it. A fork server that does
            not even end after that is reported as killed.
        """
        if not self._ends_within(_FORK_SERVER_TIMEOUT_S):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._ends_within(KILL_TIMEOUT_S)
        return -signal.SIGKILL if self._code is None else self._code

    def _ends_within(self, timeout: float) -> bool:
        """Returns True if the fork server ends within the timeout, and notes its exit code."""
        deadline = time.monotonic() + timeout
        interval_s = 0.0005
        while self._code is None:
            self._code = self._poll()
            if self._code is None:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(interval_s)
                interval_s = min(2 * interval_s, MAX_POLL_S)
        return True

    def _poll(self) -> int | None:
        """Returns the fork server's exit code, see `wait`, or None if it has not ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return None if pid == 0 else os.waitstatus_to_exitcode(status)


class FreshForkServer(ForkServer):
    """A fork server in a new interpreter, which shares no memory with the launcher.

    Args:
        command: the program. The descriptor of its control socket is appended as the last argument;
            the program must call `fork_server_process.serve` with it.
        environment: all environment variables of the program.
        files: other descriptors that it inherits.

    Raises:
        OSError: no process could be created.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], files: Sequence[int] = ()
    ) -> None:
        launchers_end, servers_end = control_sockets()
        with servers_end:
            control = servers_end.fileno()
            self._process = subprocess.Popen(
                [*command, str(control)],
                env=environment,
                pass_fds=(control, *files),
                process_group=0,  # not in the foreground, as Ctrl-C is for the launcher
            )

        self.pid = self._process.pid
        self._socket = launchers_end

    def _poll(self) -> int | None:
        return self._process.poll()
