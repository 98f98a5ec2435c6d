"""The zygote: a process that has imported torch once, and forks the ranks.

`Zygote` is the launcher's side, `Server` the zygote's own. The two talk over a socket: the launcher
sends requests, the zygote `Event`s. A *spare* is a copy of the zygote that waits until it is asked
to be a rank. What ranks *leave behind* are processes that they have started and that outlive them.

The zygote is forked from the launcher before any thread exists, or is an interpreter of its own if
the launcher is a program of the user's (`FreshZygote`).

The zygote has a single thread and does nothing but fork, reap and signal. So a fork from it is
safe, and eight ranks start about as fast as one. As the ranks' parent it is the only process that
signals them, so it never signals another process that has been given an old process id.

When the launcher goes, in whatever way, the zygote reads the end of its socket. It then ends every
rank, and everything that ranks have started: as a *subreaper* (PR_SET_CHILD_SUBREAPER, prctl(2)) it
becomes the parent of processes that have lost theirs, even of those in sessions of their own. The
launcher asks for the same after a failure, after Ctrl-C and before it starts the ranks again. What
ranks leave behind that have all ended well is not touched. When the zygote goes, the kernel kills
the ranks (PR_SET_PDEATHSIG).

Some processes end at no signal, see `late_end`. The zygote waits for none of them for ever. The
launcher decides when a rank is *given up*; when the zygote goes, it leaves that to init.

To fork a process that has imported torch takes 10 ms or more. So the ranks of the first attempt are
forked as spares before they are asked for, while the launcher still imports what it needs itself.
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
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn

from lockstep.run.machines.run_token import TOKEN_VARIABLE
from lockstep.run.start.job_control import set_foreground_group

if TYPE_CHECKING:
    import psutil

Work = Callable[[], NoReturn]
"""What a rank does once it has its environment, streams and session."""

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals by which a program is asked to end. One that the launcher ignores, as SIGHUP under nohup,
is ignored by ranks too."""
_SIGNALS_OF_PROGRAM = (signal.SIGTERM, signal.SIGUSR1)
"""A Python program may answer these with a checkpoint, for which it needs the workers of its
DataLoader. So they are sent to the program alone; the rest of its process group is killed when it
has ended. Other signals are sent to the whole group."""

_ZYGOTE_GONE = "the process that starts the ranks is gone"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LEFT_BEHIND = -1
"""In place of a rank's number: what ranks have left behind has ended."""
_MESSAGE_BYTES = 1 << 17
_MAX_DESCRIPTORS = 4
"""Of a message: a rank's input, output and error, and the file with its request."""

_LEFT_BEHIND_TERM_GRACE_S = 1.0
"""What ranks have left behind has this time to end at SIGTERM before it is killed."""
_LEFT_BEHIND_TIMEOUT_S = 10.0
"""The launcher waits this long for what ranks have left behind."""
# When the launcher is gone, all must be over within 5 s.
_LAUNCHER_GONE_GRACE_S = 2.0
_KILL_TIMEOUT_S = 2.0
_RECHECK_S = 0.1
_ZYGOTE_TIMEOUT_S = 15.0
"""The launcher waits this long for the end of the zygote, which has to end the ranks first."""
_MAX_POLL_S = 0.02


class Event(NamedTuple):
    """What has become of a rank."""

    rank: int
    """Its number on this machine."""
    pid: int | None
    """None: the system makes no process for it."""
    code: int | None = None
    """Its exit code, or minus the number of the signal that ended it; None: it runs."""
    reason: str = ""
    """Why the system makes no process. Of what ranks have left behind: the process ids of those
    that do not end."""


class Zygote:
    """The launcher's side of the zygote.

    Args:
        work: what every rank runs, with the rank's variables in `os.environ`. It must not return.
        spares: how many ranks are forked before they are asked for.

    Raises:
        OSError: no process could be made.
    """

    _code: int | None = None
    """How the zygote ended; None: it has not been waited for."""

    def __init__(self, work: Work, spares: int = 0) -> None:
        launchers_end, zygotes_end = control_sockets()

        # What is buffered would be written once more by every copy.
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # no collection touches what exists now, so all copies share its pages

        self.pid = os.fork()
        if self.pid == 0:
            launchers_end.close()
            try:
                Server(zygotes_end, work, spares).serve()
            finally:
                os._exit(1)

        gc.unfreeze()
        zygotes_end.close()
        self._socket = launchers_end

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
            own_session: True if the rank gets a session of its own. False: it stays in the
                terminal's session, and reads the keyboard.
            command: what it executes; empty: it does the zygote's `work`.

        Raises:
            ChildProcessError: the zygote is gone.
        """
        request = {
            "rank": rank,
            "environment": dict(environment),
            "own_session": own_session,
            "command": list(command),
        }
        with unnamed_file() as file:  # the request may be too long for a message
            file.write(json.dumps(request).encode())
            file.flush()
            try:
                socket.send_fds(self._socket, [b"start"], [*streams, file.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                raise ChildProcessError(_ZYGOTE_GONE) from None

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Sends a signal to the process groups of those ranks that still run."""
        request = {"signal": number, "ranks": list(ranks)}
        with contextlib.suppress(OSError):  # the zygote is gone, and the ranks with it
            self._socket.send(json.dumps(request).encode())

    def give_up(self, rank: int) -> None:
        """Tells the zygote that a rank does not end: it is not waited for any more."""
        with contextlib.suppress(OSError):  # the zygote is gone
            self._socket.send(json.dumps({"give_up": rank}).encode())

    def end_left_behind(self) -> list[int]:
        """Ends the processes that ranks have left behind, and waits until they have ended.

        To be called when no rank runs.

        Returns:
            The process ids of those that have not ended although they were killed.
        """
        with contextlib.suppress(OSError, ChildProcessError):  # the zygote is gone
            self._socket.send(json.dumps({"left_behind": True}).encode())
            deadline = time.monotonic() + _LEFT_BEHIND_TIMEOUT_S
            while time.monotonic() < deadline:
                events = self.events(timeout=0.1)
                # The zygote answers by an event with this number in place of a rank's.
                for event in events:
                    if event.rank == _LEFT_BEHIND:
                        return [int(pid) for pid in event.reason.split()]

        return []

    def events(self, timeout: float = 0.0) -> list[Event]:
        """Returns what has happened since the last call.

        Args:
            timeout: seconds to wait for the first event.

        Raises:
            ChildProcessError: the zygote is gone.
        """
        events: list[Event] = []
        while True:
            wait_s = 0.0 if events else timeout
            readable, _, _ = select.select([self._socket], [], [], wait_s)
            if not readable:
                return events

            data, _ = _receive(self._socket)
            if data:
                events.append(Event(*json.loads(data)))
            elif events:
                return events  # the next call will raise
            else:
                raise ChildProcessError(_ZYGOTE_GONE)

    @property
    def has_ended(self) -> bool:
        """True if the zygote is gone: something has killed it."""
        return self._ends_within(0.0)

    def close(self) -> None:
        """Ends the zygote, and with it every rank that still runs; waits for it."""
        if self._socket.fileno() >= 0:  # it has not been closed before
            self._socket.close()
            self.wait()

    def wait(self) -> int:
        """Waits until the zygote has ended. One that does not end in time is killed.

        Returns:
            Its exit code, or minus the number of the signal that ended it. If it does not end even
            then, it counts as killed.
        """
        if not self._ends_within(_ZYGOTE_TIMEOUT_S):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._ends_within(_KILL_TIMEOUT_S)
        return -signal.SIGKILL if self._code is None else self._code

    def _ends_within(self, timeout: float) -> bool:
        """Returns True if the zygote has ended within some seconds, and notes its exit code."""
        deadline = time.monotonic() + timeout
        interval_s = 0.0005
        while self._code is None:
            self._code = self._poll()
            if self._code is None:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(interval_s)
                interval_s = min(2 * interval_s, _MAX_POLL_S)

        return True

    def _poll(self) -> int | None:
        """Returns the zygote's exit code as `wait`; None: it has not ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return None if pid == 0 else os.waitstatus_to_exitcode(status)


class FreshZygote(Zygote):
    """A zygote in a new interpreter, which has nothing of the launcher's memory.

    Args:
        command: the program. Its last argument will be the descriptor of its control socket, with
            which it must call `serve`.
        environment: all its variables.
        files: other descriptors that it inherits.

    Raises:
        OSError: no process could be made.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], files: Sequence[int] = ()
    ) -> None:
        launchers_end, zygotes_end = control_sockets()
        with zygotes_end:
            control = zygotes_end.fileno()
            self._process = subprocess.Popen(
                [*command, str(control)],
                env=environment,
                pass_fds=(control, *files),
                process_group=0,  # out of the foreground: Ctrl-C is for the launcher
            )

        self.pid = self._process.pid
        self._socket = launchers_end

    def _poll(self) -> int | None:
        return self._process.poll()


def serve(control: int, work: Work) -> NoReturn:
    """Runs the zygote's own side in a new interpreter, see `FreshZygote`.

    Args:
        control: descriptor of its socket.
        work: what every rank runs, see `Zygote`.
    """
    os.set_inheritable(control, False)
    Server(socket.socket(fileno=control), work).serve()
    os._exit(1)


class Server:
    """The zygote's own side.

    Args:
        control: the zygote's end of the socket to the launcher.
        work: what every rank runs.
        spares: how many ranks are forked before they are asked for.
    """

    def __init__(self, control: socket.socket, work: Work, spares: int = 0) -> None:
        self.control = control
        self.work = work
        self.spares_to_fork = spares
        self.spares: dict[int, socket.socket] = {}
        """Sockets to the processes that wait until they are asked to be a rank, by process id."""
        self.running: dict[int, int] = {}
        """The numbers of the ranks that run, by process id."""
        self.given_up: set[int] = set()
        """The process ids of ranks that do not end, and are not waited for."""
        self.non_python_pids: set[int] = set()
        """Process ids of the ranks that are programs other than Python."""
        self.ignored: set[int] = set()
        """Signals that the ranks ignore because the launcher does."""

        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:
                self.ignored.add(number)

        # A signal writes a byte into this pipe, so one select waits for messages and for signals.
        self.wake_reader, self.wake_writer = os.pipe()
        os.set_blocking(self.wake_reader, False)
        os.set_blocking(self.wake_writer, False)

    def serve(self) -> None:
        """Does what the launcher asks for until it closes its end; then ends all ranks."""
        # Ctrl-C goes to the launcher, which decides; and the zygote must outlive the ranks.
        for number in (*ENDING_SIGNALS, signal.SIGTSTP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

        # When a child ends, the kernel sends SIGCHLD. With a handler, even one that does nothing,
        # Python then writes a byte into the pipe.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_writer, warn_on_full_buffer=False)
        os.setpgid(0, 0)  # out of the terminal's foreground group

        # From now on this process becomes the parent of what ranks leave behind, and can end it.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        watched: list[Any] = [self.control, self.wake_reader]
        while True:
            # While spares are to be forked, one is forked whenever there is nothing else to do.
            timeout = 0 if self.spares_to_fork else None
            readable, _, _ = select.select(watched, [], [], timeout)
            if self.spares_to_fork and not readable:
                self.spares_to_fork -= 1
                with contextlib.suppress(OSError):  # reported when the rank is asked for
                    self._fork_spare()

            if self.wake_reader in readable:
                self._reap()

            if self.control in readable and not self._handle_message():
                break

        self._end_all()
        os._exit(0)

    def _handle_message(self) -> bool:
        """Does what one message asks for; returns False if the launcher has closed its end."""
        data, files = _receive(self.control)
        is_closed = not data
        if is_closed:
            return False

        if files:  # only the request for a rank comes with descriptors
            self._start(files)
            for file in files:
                os.close(file)
            return True

        request = json.loads(data)
        if "left_behind" in request:
            remaining = self._end_left_behind(_LEFT_BEHIND_TERM_GRACE_S)
            pids = " ".join(str(pid) for pid in remaining)
            self._report(Event(rank=_LEFT_BEHIND, pid=None, reason=pids))
        elif "give_up" in request:
            for pid, rank in list(self.running.items()):
                if rank == request["give_up"]:
                    del self.running[pid]
                    self.given_up.add(pid)
        else:
            self._signal(request["signal"], set(request["ranks"]))

        return True

    # Starting ranks

    def _start(self, files: list[int]) -> None:
        """Starts a rank and reports it.

        Args:
            files: descriptors of the rank's streams and of its request.
        """
        request = _read_request(files)
        rank = request["rank"]
        self.spares_to_fork = 0  # from now on ranks are forked when they are asked for
        try:
            pid = self._make_rank(files)
        except OSError as error:  # no more processes, or no more memory
            self._report(Event(rank, pid=None, reason=str(error.strerror)))
            return

        self.running[pid] = rank
        command = request["command"]  # empty: the rank stays a copy of this process
        if command and command[0] != sys.executable:
            self.non_python_pids.add(pid)

        if not request["own_session"]:
            # A rank without a session of its own gets a process group of its own. It makes that
            # itself, too, but a signal to the group may be asked for before it has come to that.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)

        self._report(Event(rank, pid))

    def _make_rank(self, files: list[int]) -> int:
        """Makes a spare the rank that is asked for, after forking one if there is none.

        Returns:
            Its process id. It is no longer among `spares`.

        Raises:
            OSError: there is no spare, and none can be forked.
        """
        while True:
            if not self.spares:
                self._fork_spare()

            pid, channel = self.spares.popitem()  # any of them; they are all alike
            with channel:
                try:
                    socket.send_fds(channel, [b"start"], files)
                except BrokenPipeError:  # this spare has ended
                    continue

            return pid

    def _fork_spare(self) -> None:
        """Forks a copy of this process, which waits until it is asked to be a rank."""
        parent = os.getpid()
        zygotes_end, spares_end = control_sockets()
        with spares_end:
            try:
                pid = os.fork()
            except OSError:
                zygotes_end.close()
                raise

            if pid == 0:
                try:
                    zygotes_end.close()
                    self._close_zygotes_descriptors(parent)
                    _, files = _receive(spares_end)
                    spares_end.close()
                    is_needed = bool(files)  # otherwise the zygote has closed its end
                    if is_needed:
                        self._become_rank(files)
                finally:
                    os._exit(1)  # whatever happens, it must not go on as a second zygote

        self.spares[pid] = zygotes_end

    def _close_zygotes_descriptors(self, parent: int) -> None:
        """Called in a spare. Closes what it has inherited, and makes it end with the zygote."""
        signal.set_wakeup_fd(-1)
        die_with_parent(parent)
        os.close(self.wake_reader)
        os.close(self.wake_writer)
        self.control.close()
        for channel in self.spares.values():
            channel.close()

    def _become_rank(self, files: list[int]) -> NoReturn:
        """Called in a spare. Makes it the rank that is asked for, and does the rank's work.

        Args:
            files: descriptors of the rank's streams and of its request.
        """
        request = _read_request(files)
        *streams, request_file = files
        os.close(request_file)

        if request["own_session"]:
            os.setsid()
        else:
            os.setpgid(0, 0)
            set_foreground_group(streams[0], os.getpgrp())  # the rank reads the keyboard

        # The zygote's handlers were inherited. The rank gets those of a new process.
        for number in (*ENDING_SIGNALS, signal.SIGCHLD, signal.SIGTSTP, signal.SIGUSR1):
            if number in self.ignored:  # the launcher ignores it
                signal.signal(number, signal.SIG_IGN)
            elif number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)
            else:
                signal.signal(number, signal.SIG_DFL)

        for target, stream in enumerate(streams):
            os.dup2(stream, target)  # makes the copy inheritable
            os.close(stream)

        os.environ.update(request["environment"])
        os.environ.pop(TOKEN_VARIABLE, None)  # only the launchers of the run may know it

        if request["command"]:
            _execute(request["command"])

        self.work()

    # Ending ranks

    def _reap(self) -> None:
        """Collects the processes that have ended, and reports the ranks among them.

        A spare that has ended stays in `spares`; `_make_rank` notices it.
        """
        # Empties the pipe that SIGCHLD writes to. The pipe may be empty already.
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_reader, 4096)

        while self.running or self.spares or self.given_up:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return

            if pid == 0:  # all others still run
                return

            self.given_up.discard(pid)
            rank = self.running.pop(pid, None)
            if rank is not None:
                # Loader workers of a rank that was killed may be left in its process group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                self._report(Event(rank, pid, os.waitstatus_to_exitcode(status)))

    def _signal(self, number: int, ranks: set[int]) -> None:
        """Sends a signal to ranks: to their process groups, or to their programs alone.

        A Python program may answer SIGTERM or SIGUSR1 with a checkpoint, for which it needs its
        children. So it gets these signals alone; see `_SIGNALS_OF_PROGRAM`.

        Args:
            number: of the signal.
            ranks: the numbers of the ranks on this machine.
        """
        for pid, rank in self.running.items():
            if rank not in ranks:
                continue

            is_python = pid not in self.non_python_pids
            if is_python and number in _SIGNALS_OF_PROGRAM:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            else:
                _signal_group(pid, number)

            if number in ENDING_SIGNALS:
                # A rank that is stopped would take the signal only when it goes on.
                _signal_group(pid, signal.SIGCONT)

    def _end_all(self) -> None:
        """Ends all ranks and spares, by SIGTERM and after some seconds by SIGKILL.

        What has not ended some seconds later is left to init.
        """
        was_running = bool(self.running)
        self._signal(signal.SIGTERM, set(self.running.values()))

        deadline = time.monotonic() + _LAUNCHER_GONE_GRACE_S
        while self.running and time.monotonic() < deadline:
            select.select([self.wake_reader], [], [], max(0.0, deadline - time.monotonic()))
            self._reap()

        self._signal(signal.SIGKILL, set(self.running.values()))

        for channel in self.spares.values():
            channel.close()  # a spare ends when its channel is closed

        self.given_up |= _wait_for_ends({*self.running, *self.spares}, _KILL_TIMEOUT_S)
        self.running.clear()
        self.spares.clear()

        if was_running:
            self._end_left_behind(0.0)

    def _end_left_behind(self, term_grace_s: float) -> list[int]:
        """Ends what ranks have left behind, by SIGTERM and after some seconds by SIGKILL.

        These processes are looked for again and again, as they may start others meanwhile.

        Args:
            term_grace_s: seconds between SIGTERM and SIGKILL.

        Returns:
            The process ids of those that have not ended some seconds after SIGKILL.
        """
        import psutil

        kill_at = time.monotonic() + term_grace_s
        deadline = kill_at + _KILL_TIMEOUT_S
        terminated: set[psutil.Process] = set()
        processes: list[psutil.Process] = []
        while time.monotonic() < deadline:
            children = self._children_left_behind()
            processes = list(children)
            for child in children:
                with contextlib.suppress(psutil.Error):
                    processes += child.children(recursive=True)

            if not processes:
                break

            is_time_to_kill = time.monotonic() >= kill_at
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    if is_time_to_kill:
                        process.kill()
                    elif process not in terminated:
                        process.terminate()
                        process.resume()  # a stopped process takes no other signal

            terminated.update(processes)

            # A process can wait only for its own children. Grandchildren become its children when
            # their parents have ended.
            _wait_for_ends({child.pid for child in children}, _RECHECK_S)
            time.sleep(_MAX_POLL_S)  # also if none of them is a child of this process

        return [process.pid for process in processes if process.is_running()]

    def _children_left_behind(self) -> list[psutil.Process]:
        """Returns the children of this process that are neither ranks nor spares.

        A rank that is given up keeps its children, which are returned in its place. Those that
        have ended are left out: a rank that does not end takes no notice of it.
        """
        import psutil

        children = []
        for child in psutil.Process().children():
            if child.pid in self.given_up:
                with contextlib.suppress(psutil.Error):
                    for helper in child.children():
                        if helper.status() != psutil.STATUS_ZOMBIE:
                            children.append(helper)
            elif child.pid not in self.running and child.pid not in self.spares:
                children.append(child)

        return children

    def _report(self, event: Event) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone; the loop is about to notice
            self.control.send(json.dumps(event).encode())


def _execute(command: list[str]) -> NoReturn:
    """Replaces this process by a program; ends with a shell's exit codes if that fails."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _wait_for_ends(pids: set[int], timeout: float) -> set[int]:
    """Waits for children of this process, some seconds at most; returns those that have not ended.

    `psutil.wait_procs` is not used: it waits without limit for a process that a debugger holds.
    """
    deadline = time.monotonic() + timeout
    while True:
        pids = {pid for pid in pids if not _has_ended(pid)}
        if not pids or time.monotonic() >= deadline:
            return pids
        time.sleep(_MAX_POLL_S)


def _has_ended(pid: int) -> bool:
    """Returns True if a process has ended, or is no child of this one; a child is then reaped."""
    try:
        ended_pid, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # it was reaped before
        return True
    return ended_pid == pid


def _signal_group(pid: int, number: int) -> None:
    """Sends a signal to the process group of a rank."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # It is not yet the leader of a group of its own, or all of the group have ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; on Linux only.

    Args:
        parent: the parent's process id. If it has ended already, this process ends at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Returns a message and the descriptors that came with it; empty: the other end is closed."""
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, _MAX_DESCRIPTORS)
    except ConnectionResetError:
        return b"", []
    return data, descriptors


def _read_request(files: list[int]) -> dict[str, Any]:
    """Reads what is asked of a rank.

    Args:
        files: descriptors of the rank's input, output and error, and of the file with the request.
    """
    request_file = files[3]
    size = os.fstat(request_file).st_size
    request: dict[str, Any] = json.loads(os.pread(request_file, size, 0))
    return request


def unnamed_file() -> IO[bytes]:
    """Returns an empty file that other processes get by its descriptor alone.

    It is in memory if the system has such files: the disk with the temporary folder may be full.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("lockstep-request"), "w+b")
    return tempfile.TemporaryFile()


def control_sockets() -> tuple[socket.socket, socket.socket]:
    """Returns two connected sockets, over which each message arrives whole."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
