"""The zygote: a process that has imported torch once and forks the ranks.

It is forked from the launcher before any thread exists, or is an interpreter of its own where the
launcher is a program of the user's (`FreshZygote`). It keeps one thread itself, and does nothing
but fork, reap and signal (`Server`): a fork from it is safe, and eight ranks start about as fast
as one. As the ranks' parent it alone signals them, so a number that the system has given to another
process meanwhile is never hit.

When the launcher goes, however it goes, the zygote reads the end of its socket and ends every
rank, and all that has come of them: what is left without its parent becomes the zygote's child
(PR_SET_CHILD_SUBREAPER, see prctl(2)), also where it has a session of its own. The launcher asks
for the same after a failure, after Ctrl-C and before it starts the ranks again. What ranks leave
that have all ended well is left alone. When the zygote goes, the kernel kills the ranks
(PR_SET_PDEATHSIG).

Forking a process that has imported torch takes 10 ms or more, one rank after the other; so the
ranks of the first start are made before they are asked for, while the launcher still imports what
it needs itself. They wait for their request, and are ranks from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from lockstep.run.machines.run_token import TOKEN_VARIABLE


class Event(NamedTuple):
    """What has become of a rank."""

    rank: int
    pid: int | None
    """None: the system makes no process for it."""
    code: int | None = None
    """None: it runs; its exit code, or minus the number of the signal that ended it."""
    reason: str = ""
    """Why there is no process."""


class Zygote:
    """The launcher's end of the zygote.

    Args:
        work: run in every rank, with the rank's variables in `os.environ`; it must not return.
        ahead: how many ranks are made before they are asked for, where that is known.

    Raises:
        OSError: no process could be made.
    """

    _code: int | None = None
    """How it ended, once that has been asked."""

    def __init__(self, work: Work, ahead: int = 0) -> None:
        ours, theirs = control_sockets()
        # Else what is buffered here would be written again by every copy.
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # the copies then share these pages: no collection touches them
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            try:
                Server(theirs, work, ahead).serve()
            finally:
                os._exit(1)
        gc.unfreeze()
        theirs.close()
        self._socket = ours

    def start(
        self,
        rank: int,
        environment: Mapping[str, str],
        streams: Iterable[int],
        *,
        own_session: bool,
        command: Sequence[str] = (),
    ) -> None:
        """Asks for a rank; an event follows.

        Args:
            rank: its number on this machine.
            environment: variables in addition to the launcher's.
            streams: descriptors that become its standard input, output and error.
            own_session: False: it stays in the terminal's session, and its keys reach it alone.
            command: executed in place of `work`.

        Raises:
            ChildProcessError: the zygote is gone.
        """
        request = {
            "rank": rank,
            "environment": dict(environment),
            "own_session": own_session,
            "command": list(command),
        }
        with tempfile.TemporaryFile() as file:  # a command may be too long for a message
            file.write(json.dumps(request).encode())
            file.flush()
            try:
                socket.send_fds(self._socket, [b"start"], [*streams, file.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                raise ChildProcessError(_GONE) from None

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Sends a signal to the process groups of those ranks that still run."""
        with contextlib.suppress(OSError):  # it has gone, and the ranks with it
            self._socket.send(json.dumps({"signal": number, "ranks": list(ranks)}).encode())

    def end_left_behind(self) -> None:
        """Ends the processes that ranks which have ended have left behind, and waits for that.

        To be called when no rank runs.
        """
        with contextlib.suppress(OSError, ChildProcessError):  # the zygote has gone
            self._socket.send(json.dumps({"left_behind": True}).encode())
            limit = time.monotonic() + _LEFT_BEHIND_WITHIN_S
            while time.monotonic() < limit:
                if any(event.rank == _LEFT_BEHIND for event in self.events(timeout=0.1)):
                    return

    def events(self, timeout: float = 0.0) -> list[Event]:
        """What has happened since the last call; waits up to `timeout` seconds for the first.

        Raises:
            ChildProcessError: the zygote is gone.
        """
        found: list[Event] = []
        while select.select([self._socket], [], [], 0.0 if found else timeout)[0]:
            data, _ = _receive(self._socket)
            if data:
                found.append(Event(*json.loads(data)))
            elif found:
                break
            else:
                raise ChildProcessError(_GONE)
        return found

    def close(self) -> None:
        """Ends the zygote, and with it every rank that still runs; waits for it."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            self.wait()

    def wait(self) -> int:
        """Waits until the zygote has ended: its exit code, or minus the signal that ended it."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


class FreshZygote(Zygote):
    """A zygote in a new interpreter, which has nothing of the launcher's memory.

    Args:
        line: the program; the number of its control socket's descriptor follows as its last
            argument, and it is to call `serve` with that.
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

    def wait(self) -> int:
        """As that of a zygote that was forked."""
        return self._process.wait()


_GONE = "the process that starts the ranks is gone"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LEFT_BEHIND = -1
"""In the place of a rank's number: what ranks have left behind has ended."""
_TERMINATED_WITHIN_S = 1.0
"""What ranks have left behind has so long to end at SIGTERM before it is killed."""
_LEFT_BEHIND_WITHIN_S = 10.0
_GRACE_S, _KILLED_WITHIN_S = 2.0, 2.0
"""Between SIGTERM and SIGKILL when the launcher is gone; all must be over within 5 s."""
_LOOK_AGAIN_S = 0.1
_MESSAGE_BYTES = 1 << 17
HANDED_DOWN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
"""What a Python program may answer with a checkpoint. It needs the workers of its DataLoader for
that, so these are not for its whole group; what it leaves of that is killed when it has ended."""

Work = Callable[[], NoReturn]
"""What a rank does; its environment, streams and session are its own by then."""


def serve(control: int, work: Work) -> NoReturn:
    """The life of a `FreshZygote`.

    Args:
        control: descriptor of its socket.
        work: run in every rank, see `Zygote`.
    """
    os.set_inheritable(control, False)
    Server(socket.socket(fileno=control), work).serve()
    os._exit(1)


class Server:
    """The zygote's own end.

    Args:
        control: the other end of the launcher's.
        work: run in every rank.
        ahead: how many ranks are made before they are asked for.
    """

    def __init__(self, control: socket.socket, work: Work, ahead: int = 0) -> None:
        self.control, self.work, self.ahead = control, work, ahead
        self.ignored = {n for n in HANDED_DOWN if signal.getsignal(n) is signal.SIG_IGN}
        """Signals that the ranks ignore too, as SIGHUP under nohup."""
        self.spares: dict[int, socket.socket] = {}
        """Processes that wait to become a rank, by their ids."""
        self.running: dict[int, int] = {}
        """Rank by process id."""
        self.foreign: set[int] = set()
        """Those of them that are no Python program."""
        # Read descriptors and signals in one place: the handler does nothing but wake the select.
        self.wake, self.waker = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.waker, False)

    def serve(self) -> None:
        """Does what the launcher asks for until it closes its end, and ends all ranks then."""
        # Ctrl-C goes to the launcher, which decides; and the zygote must outlive the ranks.
        for number in (*HANDED_DOWN, signal.SIGTSTP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        os.setpgid(0, 0)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        watched: list[Any] = [self.control, self.wake]
        while True:
            readable = select.select(watched, [], [], 0 if self.ahead else None)[0]
            if self.ahead and not readable:
                self.ahead -= 1
                with contextlib.suppress(OSError):  # what is missing is told when it is asked for
                    self._make_spare()
            if self.wake in readable:
                self._reap()
            if self.control in readable and not self._obey():
                break
        self._end_all()
        os._exit(0)

    def _obey(self) -> bool:
        data, files = _receive(self.control)
        if files:
            self._start(files)
            for file in files:
                os.close(file)
        elif data:
            request = json.loads(data)
            if "left_behind" in request:
                self._end_left_behind(_TERMINATED_WITHIN_S)
                self._report(Event(_LEFT_BEHIND, None))
            else:
                self._signal(request["signal"], set(request["ranks"]))
        return bool(data)

    def _start(self, files: list[int]) -> None:
        request = _request_in(files)
        rank = request["rank"]
        self.ahead = 0
        try:
            pid = self._give_to_copy(files)
        except OSError as error:  # no more processes, or no more memory
            self._report(Event(rank, None, reason=str(error.strerror)))
            return
        self.running[pid] = rank
        if request["command"] and request["command"][0] != sys.executable:
            self.foreign.add(pid)
        # Also here: a signal to the group may be asked for before the child has run at all.
        if not request["own_session"]:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
        self._report(Event(rank, pid))

    def _give_to_copy(self, files: list[int]) -> int:
        """Lets a copy of this process become the rank that is asked for; its id."""
        while True:
            if not self.spares:
                self._make_spare()
            pid, channel = self.spares.popitem()
            with channel, contextlib.suppress(BrokenPipeError):  # it has ended
                socket.send_fds(channel, [b"start"], files)
                return pid

    def _make_spare(self) -> None:
        """Makes a copy of this process, which waits until it is asked to be a rank."""
        parent, (ours, theirs) = os.getpid(), control_sockets()
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                try:
                    ours.close()
                    self._part(parent)
                    files = _receive(theirs)[1]
                    theirs.close()
                    if files:
                        self._become(files)
                finally:
                    os._exit(1)
        self.spares[pid] = ours

    def _part(self, parent: int) -> None:
        """In the copy: what it has from the zygote is given back."""
        signal.set_wakeup_fd(-1)
        die_with_parent(parent)
        for descriptor in (self.wake, self.waker):
            os.close(descriptor)
        self.control.close()
        for channel in self.spares.values():
            channel.close()

    def _become(self, files: list[int]) -> NoReturn:
        """Makes the copy the rank that is asked for."""
        request = _request_in(files)
        os.close(files.pop())
        if request["own_session"]:
            os.setsid()
        else:
            os.setpgid(0, 0)
            give_terminal(files[0], os.getpgrp())
        for number in (*HANDED_DOWN, signal.SIGCHLD, signal.SIGTSTP, signal.SIGUSR1):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in self.ignored else default)
        for target, stream in enumerate(files):
            os.dup2(stream, target)  # dup2 makes them inheritable
            os.close(stream)
        os.environ.update(request["environment"])
        os.environ.pop(TOKEN_VARIABLE, None)  # the launchers' alone
        if request["command"]:
            _execute(request["command"])
        self.work()

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)
        while self.running or self.spares:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank = self.running.pop(pid, None)
            if rank is not None:
                # What the rank has left in its group: loader workers of a rank that was killed.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                self._report(Event(rank, pid, os.waitstatus_to_exitcode(status)))

    def _signal(self, number: int, ranks: set[int]) -> None:
        for pid, rank in self.running.items():
            if rank in ranks:
                if number in _REQUESTS and pid not in self.foreign:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                else:
                    _signal_group(pid, number)
                if number in HANDED_DOWN:
                    # A stopped process takes no other signal.
                    _signal_group(pid, signal.SIGCONT)

    def _end_all(self) -> None:
        interrupted = bool(self.running)
        self._signal(signal.SIGTERM, set(self.running.values()))
        limit = time.monotonic() + _GRACE_S
        while self.running and time.monotonic() < limit:
            select.select([self.wake], [], [], max(0.0, limit - time.monotonic()))
            self._reap()
        self._signal(signal.SIGKILL, set(self.running.values()))
        for channel in self.spares.values():
            channel.close()
        for pid in (*self.running, *self.spares):
            with contextlib.suppress(ChildProcessError):  # it had ended before it was needed
                os.waitpid(pid, 0)
        self.running.clear()
        self.spares.clear()
        if interrupted:
            self._end_left_behind(0.0)

    def _end_left_behind(self, grace_s: float) -> None:
        """Ends what ranks have left, by SIGTERM and after some seconds by SIGKILL.

        Most of it is in sessions of its own. One that starts others meanwhile does not escape.
        """
        import psutil

        # Ranks, and processes that wait to become one, are not left behind.
        needed = {*self.running, *self.spares}
        terminated_until = time.monotonic() + grace_s
        limit = terminated_until + _KILLED_WITHIN_S
        asked = set[psutil.Process]()
        while time.monotonic() < limit:
            children = [each for each in psutil.Process().children() if each.pid not in needed]
            left = list(children)
            for child in children:
                with contextlib.suppress(psutil.Error):
                    left += child.children(recursive=True)
            if not left:
                return
            is_patient = time.monotonic() < terminated_until
            for process in left:
                with contextlib.suppress(psutil.Error):
                    if not is_patient:
                        process.kill()
                    elif process not in asked:
                        process.terminate()
                        process.resume()  # a stopped process takes no other signal
            asked.update(left)
            # Our own children alone: the others become that, or are gone, when their parents are.
            psutil.wait_procs(children, timeout=_LOOK_AGAIN_S)

    def _report(self, event: Event) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone; the loop is about to see it
            self.control.send(json.dumps(event).encode())


def _execute(line: list[str]) -> NoReturn:
    try:
        os.execvp(line[0], line)
    except OSError as error:
        os.write(2, f"{line[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)  # as shells do


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # Not yet the leader of a group of its own, or all of the group has ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def give_terminal(terminal: int, group: int) -> None:
    """Makes a process group the one that a terminal's keys reach; nothing where it is none."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else asking would stop us
    with contextlib.suppress(OSError):
        os.tcsetpgrp(terminal, group)
    signal.signal(signal.SIGTTOU, before)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent, of that id, ends; on Linux."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """A message and the descriptors that came with it; nothing: the other end is closed."""
    try:
        return socket.recv_fds(channel, _MESSAGE_BYTES, 4)[:2]
    except ConnectionResetError:
        return b"", []


def _request_in(files: list[int]) -> dict[str, Any]:
    """What is asked of a rank: in the last of its files, after its standard streams."""
    request: dict[str, Any] = json.loads(os.pread(files[3], os.fstat(files[3]).st_size, 0))
    return request


def control_sockets() -> tuple[socket.socket, socket.socket]:
    """The launcher's end and the zygote's; each message arrives whole."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
