"""The zygote: a process that has imported torch once and forks the ranks.

It is forked from the launcher before any thread exists, or is an interpreter of its own where the
launcher is a program of the user's (`FreshZygote`). It keeps one thread itself, and does nothing
but fork, reap and signal (`forking`): a fork from it is safe, and eight ranks start about as fast
as one. As the ranks' parent it alone signals them, so a number that the system has given to another
process meanwhile is never hit.

When the launcher goes, however it goes, the zygote reads the end of its socket and ends every
rank. When the zygote goes, the kernel kills the ranks (PR_SET_PDEATHSIG, see prctl(2)).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lockstep.launch.forking import HANDED_DOWN, MESSAGE_BYTES, Server, Work, control_sockets


class Started(NamedTuple):
    """A rank runs."""

    rank: int
    pid: int


class Ended(NamedTuple):
    """A rank has ended and was reaped."""

    rank: int
    pid: int
    code: int
    """Exit code, or minus the number of the signal that ended it."""


class Refused(NamedTuple):
    """The system makes no process for a rank."""

    rank: int
    reason: str


Event = Started | Ended | Refused
_EVENTS: dict[str, type[Event]] = {"started": Started, "ended": Ended, "refused": Refused}


class Zygote:
    """The launcher's end of the zygote.

    Args:
        work: run in every rank, with the rank's variables in `os.environ`; it must not return.
        ahead: how many ranks are made before they are asked for, where that is known.

    Raises:
        OSError: no process could be made.
    """

    def __init__(self, work: Work, ahead: int = 0) -> None:
        ours, theirs = control_sockets()
        handlers = {number: signal.getsignal(number) for number in HANDED_DOWN}
        # Else what is buffered here would be written again by every copy.
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # the copies then share these pages: no collection touches them
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            try:
                Server(theirs, work, handlers, ahead).serve()
            finally:
                os._exit(1)
        gc.unfreeze()
        theirs.close()
        self._socket = ours
        self._open = True

    def start(
        self,
        rank: int,
        environment: Mapping[str, str],
        streams: Iterable[int],
        *,
        own_session: bool,
        command: Sequence[str] = (),
    ) -> None:
        """Asks for a rank; `Started` follows.

        Args:
            rank: its number on this machine.
            environment: variables in addition to the launcher's.
            streams: descriptors that become its standard input, output and error.
            own_session: False: it stays in the terminal's session, and its keys reach it alone.
            command: executed in place of `work`.
        """
        request = {
            "start": rank,
            "environment": dict(environment),
            "own_session": own_session,
            "command": list(command),
        }
        data = json.dumps(request).encode()
        if len(data) <= MESSAGE_BYTES:
            socket.send_fds(self._socket, [data], list(streams))
            return
        with tempfile.TemporaryFile() as file:  # a command with the names of all its images
            file.write(data)
            file.flush()
            socket.send_fds(self._socket, [b"{}"], [*streams, file.fileno()])

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Sends a signal to the process groups of those ranks that still run."""
        with contextlib.suppress(OSError):  # it has gone, and the ranks with it
            self._socket.send(json.dumps({"signal": number, "ranks": list(ranks)}).encode())

    def events(self, timeout: float = 0.0) -> list[Event]:
        """What has happened since the last call; waits up to `timeout` seconds for the first.

        Raises:
            ChildProcessError: the zygote is gone.
        """
        found: list[Event] = []
        while self._open and select.select([self._socket], [], [], 0.0 if found else timeout)[0]:
            try:
                data = self._socket.recv(MESSAGE_BYTES)
            except ConnectionResetError:
                data = b""
            if not data:
                self._open = False
                break
            kind, *values = json.loads(data)
            found.append(_EVENTS[kind](*values))
        if not self._open and not found:
            raise ChildProcessError("the process that starts the ranks is gone")
        return found

    def close(self) -> None:
        """Ends the zygote, and with it every rank that still runs; waits for it."""
        self._open = False
        if self._socket.fileno() >= 0:
            self._socket.close()
            self._wait()

    def _wait(self) -> None:
        os.waitpid(self.pid, 0)


class FreshZygote(Zygote):
    """A zygote in a new interpreter, which has nothing of the launcher's memory.

    Args:
        line: the program; the number of its control socket's descriptor follows as its last
            argument, and it is to call `forking.serve` with that.
        environment: all its variables.
        files: other descriptors that it inherits.

    Raises:
        OSError: no process could be made.
    """

    def __init__(
        self, line: Sequence[str], environment: Mapping[str, str], files: Sequence[int] = ()
    ) -> None:
        ours, theirs = control_sockets()
        with theirs:
            control = theirs.fileno()
            self._process = subprocess.Popen(
                [*line, str(control)],
                env=environment,
                pass_fds=(control, *files),
                process_group=0,  # the terminal's keys are the launcher's
            )
        self.pid = self._process.pid
        self._socket = ours
        self._open = True

    def _wait(self) -> None:
        self._process.wait()
