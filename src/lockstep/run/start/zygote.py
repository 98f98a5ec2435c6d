"""Implements the zygote: a process that has imported torch once, and from which ranks are forked.

`Zygote` is the launcher's side, and `Server` the zygote's own. They talk over a socket: the
launcher sends requests, and the zygote sends `Event`s. A *spare* is a copy of the zygote that waits
until it is told to become a rank. Ranks may *leave behind* processes that they have started and
that outlive them.

The zygote is forked from the launcher before any thread exists, or is a new interpreter if the
launcher is a program of the user's (`FreshZygote`).

The zygote has a single thread and does nothing but fork, reap and signal. So it can be forked
safely, and eight ranks start about as fast as one. As the ranks' parent, it is the only process
that signals them, so it never signals another process that has been given an old process id.

When the launcher ends, for whatever reason, its end of the socket is closed. The zygote then ends
every rank and everything that ranks have started. As a *subreaper* (PR_SET_CHILD_SUBREAPER,
prctl(2)) it becomes the parent of processes whose parent has ended, even of those in sessions of
their own. The launcher asks for the same after a failure, after Ctrl-C and before a restart.
Processes left behind by ranks that have all ended well are not touched. When the zygote ends, the
kernel kills the ranks (PR_SET_PDEATHSIG), but not what they have started, such as the workers of a
DataLoader. If something has killed the zygote, the launcher ends those: see `end_process_groups`.

Some processes do not end at any signal, see `late_end`. The zygote does not wait for them forever:
the launcher decides when to *give up* on a rank, and when the zygote ends, init takes over.

Forking a process that has imported torch takes 10 ms or more. So the ranks of the first attempt are
forked as spares before they are requested, while the launcher is still importing modules.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn

from lockstep.run.machines.run_token import TOKEN_VARIABLE
from lockstep.run.start.job_control import set_foreground_group

if TYPE_CHECKING:
    import psutil

Work = Callable[[], NoReturn]
"""A function that does the work of a rank, once its environment, streams and session are set."""

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that ask a program to end. If the launcher ignores one, such as SIGHUP under nohup,
ranks ignore it too."""
_SIGNALS_OF_PROGRAM = (signal.SIGTERM, signal.SIGUSR1)
"""Signals at which a Python program may save a checkpoint, for which it needs the workers of its
DataLoader. So they are sent only to the program itself, and the rest of its process group is killed
once it has ended. Other signals are sent to the whole group."""

_ZYGOTE_GONE = "the process that starts the ranks is gone"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LEFT_BEHIND = -1
"""Used in an event instead of a rank's number: the processes left behind by ranks have ended."""
_START = b"start"
"""The message that comes with descriptors."""
_MESSAGE_BYTES = 1 << 17
_MAX_DESCRIPTORS = 4
"""The descriptors of a message: a rank's input, output and error, and the file with its request."""

_LEFT_BEHIND_TERM_GRACE_S = 1.0
"""The time that processes left behind get to end after SIGTERM, before they are killed."""
_LEFT_BEHIND_TIMEOUT_S = 10.0
"""How long the launcher waits for the end of processes left behind by ranks."""
# When the launcher is gone, everything must have ended within 5 s.
_LAUNCHER_GONE_GRACE_S = 2.0
_KILL_TIMEOUT_S = 2.0
_RECHECK_S = 0.1
_ZYGOTE_TIMEOUT_S = 15.0
"""How long the launcher waits for the end of the zygote, which has to end the ranks first."""
_MAX_POLL_S = 0.02


class Event(NamedTuple):
    """Says that a rank was started, could not be started, or has ended."""

    rank: int
    """The number of the rank on this machine."""
    pid: int | None
    """The process id; None if the system refused to create the process."""
    code: int | None = None
    """The exit code, or minus the number of the signal that ended it; None while it is running."""
    reason: str = ""
    """Why the system refused to create the process. If the event is about processes left behind by
    ranks, the ids of those that do not end."""

    @property
    def says_start_was_refused(self) -> bool:
        """True if the system has refused to create the process of the rank."""
        return self.pid is None

    @property
    def pids_left_behind(self) -> list[int] | None:
        """The processes left behind by ranks that do not end; None if the event is about a rank."""
        if self.rank != _LEFT_BEHIND:
            return None
        return [int(pid) for pid in self.reason.split()]

    @property
    def says_started(self) -> bool:
        """True if the rank was started; otherwise a process that was created has ended."""
        return self.pid is not None and self.code is None


class Zygote:
    """The launcher's side of the zygote.

    Args:
        work: function that every rank runs, with its variables in `os.environ`. It must not return.
        spares: number of ranks that are forked before they are requested.

    Raises:
        OSError: no process could be created.
    """

    _code: int | None = None
    """The exit code of the zygote; None while it is not known to have ended."""

    def __init__(self, work: Work, spares: int = 0) -> None:
        launchers_end, zygotes_end = control_sockets()

        # Otherwise every copy would write the buffered output once more.
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # the collector leaves existing objects alone, so all copies share them

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
        """Requests a rank. An event will say whether it was started.

        Args:
            rank: number of the rank on this machine.
            environment: its variables, in addition to the launcher's.
            streams: descriptors that become its standard input, output and error.
            own_session: whether the rank gets a session of its own. Otherwise it stays in the
                session of the terminal, and reads the keyboard.
            command: program that the rank executes; empty if it stays a copy of the zygote, and
                calls the function `work` that the zygote was created with.

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
                socket.send_fds(self._socket, [_START], [*streams, file.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                raise ChildProcessError(_ZYGOTE_GONE) from None

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Sends a signal to the process groups of those of the ranks that are still running."""
        request = {"signal": number, "ranks": list(ranks)}
        with contextlib.suppress(OSError):  # the zygote is gone, and the ranks with it
            self._socket.send(json.dumps(request).encode())

    def give_up(self, rank: int) -> None:
        """Tells the zygote not to wait for a rank any longer, because its process does not end."""
        with contextlib.suppress(OSError):  # the zygote is gone
            self._socket.send(json.dumps({"give_up": rank}).encode())

    def end_left_behind(self) -> list[int]:
        """Ends the processes that ranks have left behind, and waits until they have ended.

        This must only be called while no rank is running.

        Returns:
            The ids of processes that have not ended although they were killed. Also empty if the
            zygote is gone, or does not answer in time.
        """
        with contextlib.suppress(OSError):  # the zygote is gone
            self._socket.send(json.dumps({"left_behind": True}).encode())

            # The zygote answers with an event about them.
            deadline = time.monotonic() + _LEFT_BEHIND_TIMEOUT_S
            while time.monotonic() < deadline:
                for event in self.events(timeout=0.1):
                    if event.pids_left_behind is not None:
                        return event.pids_left_behind
        return []

    def events(self, timeout: float = 0.0) -> list[Event]:
        """Returns the events that have arrived since the last call.

        Args:
            timeout: how long to wait for the first event, in seconds.

        Raises:
            ChildProcessError: the zygote is gone.
        """
        events: list[Event] = []
        while True:
            wait_s = 0.0 if events else timeout
            readable, _, _ = select.select([self._socket], [], [], wait_s)
            if not readable:
                return events

            data, _ = _receive(self._socket)  # one event, as the socket keeps messages apart
            if not data:  # the zygote has closed its end
                if not events:
                    raise ChildProcessError(_ZYGOTE_GONE)
                return events  # the next call will raise the error

            events.append(Event(*json.loads(data)))

    @property
    def has_ended(self) -> bool:
        """True if the zygote is gone because something has killed it."""
        return self._ends_within(0.0)

    def kill(self) -> None:
        """Kills the zygote, and the kernel its ranks. It does not wait for their end."""
        if not self.has_ended:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the zygote and every rank that is still running, and waits until the zygote has
        ended.
        """
        if self._socket.fileno() >= 0:  # it has not been closed before
            self._socket.close()
            self.wait()

    def wait(self) -> int:
        """Waits until the zygote has ended, and kills it if it does not end in time.

        Returns:
            Its exit code, or minus the number of the signal that ended it. A zygote that does not
            even end after that is reported as killed.
        """
        if not self._ends_within(_ZYGOTE_TIMEOUT_S):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._ends_within(_KILL_TIMEOUT_S)
        return -signal.SIGKILL if self._code is None else self._code

    def _ends_within(self, timeout: float) -> bool:
        """Returns True if the zygote ends within `timeout` seconds, and notes its exit code."""
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
        """Returns the zygote's exit code, see `wait`, or None if it has not ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return None if pid == 0 else os.waitstatus_to_exitcode(status)


class FreshZygote(Zygote):
    """A zygote in a new interpreter, which shares no memory with the launcher.

    Args:
        command: the program. The descriptor of its control socket is appended as the last argument;
            the program must call `serve` with it.
        environment: all environment variables of the program.
        files: other descriptors that it inherits.

    Raises:
        OSError: no process could be created.
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
                process_group=0,  # not in the foreground, as Ctrl-C is for the launcher
            )

        self.pid = self._process.pid
        self._socket = launchers_end

    def _poll(self) -> int | None:
        return self._process.poll()


def serve(control: int, work: Work) -> NoReturn:
    """Runs the zygote's own side in a new interpreter, see `FreshZygote`.

    Args:
        control: descriptor of the zygote's socket.
        work: function that every rank runs, see `Zygote`.
    """
    os.set_inheritable(control, False)
    Server(socket.socket(fileno=control), work).serve()
    os._exit(1)


class Server:
    """The zygote's own side.

    Args:
        control: the zygote's end of the socket to the launcher.
        work: function that every rank runs.
        spares: number of ranks that are forked before they are requested.
    """

    def __init__(self, control: socket.socket, work: Work, spares: int = 0) -> None:
        self.control = control
        self.work = work
        self.spares_to_fork = spares
        self.spares: dict[int, socket.socket] = {}
        """The sockets to the spares, by process id."""
        self.rank_of_pid: dict[int, int] = {}
        """The running ranks, by process id."""
        self.given_up: set[int] = set()
        """The process ids of ranks that do not end, so that the launcher has given up on them."""
        self.non_python_pids: set[int] = set()
        """The process ids of ranks whose program is not Python: `_signal` always sends signals to
        their whole process groups."""
        self.ignored: set[int] = set()
        """The signals that the ranks ignore because the launcher does."""

        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:
                self.ignored.add(number)

        # A signal writes a byte into this pipe, so one select waits for messages and for signals.
        self.wake_reader, self.wake_writer = os.pipe()
        os.set_blocking(self.wake_reader, False)
        os.set_blocking(self.wake_writer, False)

    def serve(self) -> None:
        """Handles the launcher's requests until the launcher closes its end, then ends all
        ranks.
        """
        self._prepare_signals()
        os.setpgid(0, 0)  # leaves the terminal's foreground group

        # From now on this process becomes the parent of processes left behind by ranks, so that it
        # can end them.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)

        watched: list[Any] = [self.control, self.wake_reader]
        while True:
            # Wait for a message or the end of a child. But while there are spares to fork, do not
            # wait: only look whether either has come.
            timeout = 0 if self.spares_to_fork else None
            readable, _, _ = select.select(watched, [], [], timeout)

            is_idle = not readable
            if is_idle and self.spares_to_fork:
                self._try_forking_spare()

            if self.wake_reader in readable:  # a child has ended
                self._reap()

            if self.control in readable:
                is_open = self._handle_message()
                if not is_open:
                    break

        self._end_all()
        os._exit(0)

    def _prepare_signals(self) -> None:
        """Ignores the signals that are for the launcher, and makes SIGCHLD wake up `serve`."""
        # Ctrl-C is for the launcher, which decides what to do, and the zygote must outlive the
        # ranks.
        for number in (*ENDING_SIGNALS, signal.SIGTSTP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

        # The kernel sends SIGCHLD when a child ends. If there is a handler, even one that does
        # nothing, Python then writes a byte into the pipe.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_writer, warn_on_full_buffer=False)

    def _try_forking_spare(self) -> None:
        """Forks one spare. If that fails, a rank is forked, and the error reported, on request."""
        self.spares_to_fork -= 1
        with contextlib.suppress(OSError):
            self._fork_spare()

    def _handle_message(self) -> bool:
        """Receives and handles one message of the launcher.

        Returns:
            False if the launcher has closed its end of the socket.
        """
        data, files = _receive(self.control)
        is_closed = not data
        if is_closed:
            return False

        if files:  # a rank is to be started, and `data` is only `_START`
            self._start(files)
            for file in files:
                os.close(file)
        else:
            self._handle_short_request(json.loads(data))
        return True

    def _handle_short_request(self, request: Mapping[str, Any]) -> None:
        """Handles a request to end or to signal processes. Its keys say which one it is."""
        if "left_behind" in request:
            remaining = self._end_left_behind(_LEFT_BEHIND_TERM_GRACE_S)
            pids = " ".join(str(pid) for pid in remaining)
            self._report(Event(rank=_LEFT_BEHIND, pid=None, reason=pids))
        elif "give_up" in request:
            self._give_up(request["give_up"])
        else:
            self._signal(request["signal"], set(request["ranks"]))

    def _give_up(self, given_up_rank: int) -> None:
        """Notes that the launcher no longer waits for a rank, which does not end at SIGKILL."""
        for pid, rank in list(self.rank_of_pid.items()):
            if rank == given_up_rank:
                del self.rank_of_pid[pid]
                self.given_up.add(pid)

    # Starting ranks

    def _start(self, files: list[int]) -> None:
        """Starts a rank, and reports to the launcher whether that worked.

        Args:
            files: descriptors of the rank's streams and of the file with its request.
        """
        request = _read_request(files)
        rank = request["rank"]

        # `serve` forks spares as long as this is above 0. From now on, ranks are forked when they
        # are requested.
        self.spares_to_fork = 0

        try:
            pid = self._make_rank(files)
        except OSError as error:  # there are no more processes, or there is no more memory
            self._report(Event(rank, pid=None, reason=str(error.strerror)))
            return

        self.rank_of_pid[pid] = rank

        command = request["command"]  # empty if the rank stays a copy of this process
        is_python = not command or command[0] == sys.executable
        if not is_python:
            self.non_python_pids.add(pid)  # `_signal` sends signals to its whole group

        # Without a session of its own, the rank will create its process group. Create it here, too,
        # so that the group exists if the next request is to signal it.
        if not request["own_session"]:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)

        self._report(Event(rank, pid))

    def _make_rank(self, files: list[int]) -> int:
        """Turns a spare into the requested rank, after forking one if there is none.

        Args:
            files: descriptors of the rank's streams and of the file with its request.

        Returns:
            The process id of the rank, which is removed from `spares`.

        Raises:
            OSError: there is no spare, and none can be forked.
        """
        while True:
            if not self.spares:
                self._fork_spare()

            pid, channel = self.spares.popitem()  # all spares are alike
            with channel:
                try:
                    socket.send_fds(channel, [_START], files)
                except BrokenPipeError:  # this spare has ended
                    continue
            return pid

    def _fork_spare(self) -> None:
        """Forks a spare: a copy of this process that waits until it is told to become a rank."""
        parent = os.getpid()
        zygotes_end, spares_end = control_sockets()
        with spares_end:
            try:
                pid = os.fork()
            except OSError:
                zygotes_end.close()
                raise

            if pid == 0:  # in the spare
                try:
                    zygotes_end.close()
                    self._separate_from_zygote(parent)
                    # The zygote sends the files of a rank as the order to become that rank. If
                    # there are none, it has closed its end.
                    _, files_of_rank = _receive(spares_end)
                    spares_end.close()
                    if files_of_rank:
                        self._become_rank(files_of_rank)
                finally:
                    # Only reached if the spare is not needed, or after an error, as `_become_rank`
                    # does not return. The spare must not go on as a second zygote.
                    os._exit(1)

        self.spares[pid] = zygotes_end

    def _separate_from_zygote(self, parent: int) -> None:
        """Separates a spare from the zygote that it was forked from. The spare calls this.

        It closes the zygote's own descriptors, which it has inherited, and ends when the zygote
        does.

        Args:
            parent: process id of the zygote.
        """
        die_with_parent(parent)

        # The pipe through which signals wake up the zygote. With -1, no signal writes to it.
        signal.set_wakeup_fd(-1)
        os.close(self.wake_reader)
        os.close(self.wake_writer)

        # The sockets to the launcher, and to spares that were forked before.
        self.control.close()
        for channel in self.spares.values():
            channel.close()

    def _become_rank(self, files: list[int]) -> NoReturn:
        """Turns this process, which is a spare, into the requested rank, and does the rank's work.

        Args:
            files: descriptors of the rank's streams and of the file with its request.
        """
        request = _read_request(files)
        *streams, request_file = files
        os.close(request_file)

        # Several ranks have sessions of their own, without a terminal. A single rank stays in the
        # session of the terminal, and is put in its foreground, so that it can read the keyboard.
        if request["own_session"]:
            os.setsid()
        else:
            os.setpgid(0, 0)
            set_foreground_group(streams[0], os.getpgrp())

        # Replace the signal handlers inherited from the zygote by those of a new process.
        for number in (*ENDING_SIGNALS, signal.SIGCHLD, signal.SIGTSTP, signal.SIGUSR1):
            if number in self.ignored:  # the launcher ignores it
                signal.signal(number, signal.SIG_IGN)
            elif number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)
            else:
                signal.signal(number, signal.SIG_DFL)

        for standard_descriptor, stream in enumerate(streams):  # 0, 1, 2
            os.dup2(stream, standard_descriptor)  # inherited by programs that the rank executes
            os.close(stream)

        os.environ.update(request["environment"])
        os.environ.pop(TOKEN_VARIABLE, None)  # only the launchers of the run may know the token

        if request["command"]:
            _execute(request["command"])
        else:
            self.work()

    # Ending ranks

    def _reap(self) -> None:
        """Collects the processes that have ended, and reports the ranks among them.

        A spare that has ended stays in `spares` until `_make_rank` notices it.
        """
        # Python writes a byte into this pipe at each SIGCHLD. Empty it, unless it is empty already.
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_reader, 4096)

        for pid, status in self._ended_children():
            # A rank that the launcher has given up on may end after all. It is no longer in
            # `rank_of_pid`, so it is not reported below: for the launcher it has ended before.
            self.given_up.discard(pid)

            rank = self.rank_of_pid.pop(pid, None)
            if rank is not None:
                # If the rank was killed, its DataLoader workers may be left in its process group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                self._report(Event(rank, pid, os.waitstatus_to_exitcode(status)))

    def _ended_children(self) -> Iterator[tuple[int, int]]:
        """Collects the children that have ended, and yields the process id and the status of each.

        Stops when the caller has removed the last rank: all other children are processes left
        behind by ranks, which `_end_left_behind` collects.
        """
        while self.rank_of_pid or self.spares or self.given_up:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # there are no children
                return
            if pid == 0:  # all children are still running
                return
            yield pid, status

    def _signal(self, number: int, ranks: set[int]) -> None:
        """Sends a signal to the process groups of ranks, or only to their main processes.

        SIGTERM and SIGUSR1 are sent to a Python program alone, not to its child processes, which it
        may need to save a checkpoint (`_SIGNALS_OF_PROGRAM`). All other signals go to the group,
        and so do these two if the program is not Python: a shell script, for example, may not pass
        them on to what it has started.

        Args:
            number: number of the signal.
            ranks: numbers of the ranks on this machine.
        """
        for pid, rank in self.rank_of_pid.items():
            if rank not in ranks:
                continue

            is_python = pid not in self.non_python_pids
            if is_python and number in _SIGNALS_OF_PROGRAM:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            else:
                _signal_group(pid, number)

            # A rank that is stopped handles the signal only once it is continued.
            if number in ENDING_SIGNALS:
                _signal_group(pid, signal.SIGCONT)

    def _end_all(self) -> None:
        """Ends all ranks and spares, by SIGTERM and some seconds later by SIGKILL.

        Processes that have not ended some seconds after that are left to init.
        """
        ranks_were_running = bool(self.rank_of_pid)
        self._signal(signal.SIGTERM, set(self.rank_of_pid.values()))
        self._wait_for_ranks(_LAUNCHER_GONE_GRACE_S)

        self._signal(signal.SIGKILL, set(self.rank_of_pid.values()))
        for channel in self.spares.values():
            channel.close()  # a spare ends when its channel is closed

        # A process that does not end even now is given up. `_end_left_behind` ends its children.
        pids = {*self.rank_of_pid, *self.spares}
        not_ended = _wait_for_ends(pids, _KILL_TIMEOUT_S)
        self.given_up |= not_ended
        self.rank_of_pid.clear()
        self.spares.clear()

        # Kill what the ranks have left behind at once: it has had time to end while they had.
        if ranks_were_running:
            self._end_left_behind(term_grace_s=0.0)

    def _wait_for_ranks(self, timeout_s: float) -> None:
        """Waits until all ranks have ended, for at most the given time."""
        deadline = time.monotonic() + timeout_s
        while self.rank_of_pid and time.monotonic() < deadline:
            remaining_s = max(0.0, deadline - time.monotonic())
            select.select([self.wake_reader], [], [], remaining_s)  # until a child ends
            self._reap()

    def _end_left_behind(self, term_grace_s: float) -> list[int]:
        """Ends processes left behind by ranks, by SIGTERM and some seconds later by SIGKILL.

        These processes are listed again and again, as they may start others in the meantime.

        Args:
            term_grace_s: time between SIGTERM and SIGKILL, in seconds.

        Returns:
            The ids of processes that have not ended some seconds after SIGKILL. A zombie has ended,
            though its parent has not collected its exit status.
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
                        process.resume()  # a stopped process handles no other signal
            terminated.update(processes)

            # A process can only wait for its own children. Grandchildren become children of this
            # process when their parents have ended (PR_SET_CHILD_SUBREAPER).
            _wait_for_ends({child.pid for child in children}, _RECHECK_S)
            time.sleep(_MAX_POLL_S)  # as the call does not wait for children of given-up ranks

        return [process.pid for process in processes if not _has_ended_completely(process)]

    def _children_left_behind(self) -> list[psutil.Process]:
        """Returns the processes that ranks have left behind and whose parents have ended.

        These are the children of this process that are neither ranks nor spares, and the children
        of ranks that were given up: such a rank has not ended, but is treated so.
        """
        import psutil

        children = []
        for child in psutil.Process().children():
            if child.pid in self.given_up:
                children += _running_children(child)
            elif child.pid not in self.rank_of_pid and child.pid not in self.spares:
                children.append(child)
        return children

    def _report(self, event: Event) -> None:
        """Sends an event to the launcher."""
        with contextlib.suppress(OSError):  # if the launcher is gone, the main loop will notice
            self.control.send(json.dumps(event).encode())


def end_process_groups(leaders: Iterable[int]) -> list[int]:
    """Kills the process groups of ranks whose zygote is gone, and waits until they have ended.

    The kernel kills these ranks, but not the processes that they have started. A worker of a
    DataLoader looks for its parent every 5 s only, and until then keeps what it has inherited from
    it, such as the connection to the launcher's store.

    This is called right after the end of the zygote, so no other process has been given the id of
    a rank yet.

    Args:
        leaders: the process ids of ranks that were running when the zygote ended. Each rank leads a
            process group of its own.

    Returns:
        The ids of processes that have not ended although they were killed.
    """
    import psutil

    groups = set(leaders)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while True:
        # They are listed again each time, as they may have started others in the meantime.
        processes = _running_members(groups)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not processes or time.monotonic() >= deadline:
            return [process.pid for process in processes]
        time.sleep(_MAX_POLL_S)


def _running_children(process: psutil.Process) -> list[psutil.Process]:
    """Returns the children of a process without the zombies, which it may never collect."""
    import psutil

    running = []
    with contextlib.suppress(psutil.Error):
        for child in process.children():
            if not _has_ended_completely(child):
                running.append(child)
    return running


def _running_members(groups: set[int]) -> list[psutil.Process]:
    """Returns the processes in the given process groups that are still running."""
    import psutil

    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.Error):  # it has just ended
            if os.getpgid(pid) in groups:
                process = psutil.Process(pid)
                if not _has_ended_completely(process):
                    members.append(process)
    return members


def _execute(command: list[str]) -> NoReturn:
    """Replaces this process by a program. If that fails, ends with the exit code of a shell."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _wait_for_ends(pids: set[int], timeout: float) -> set[int]:
    """Waits for children of this process to end, for at most `timeout` seconds.

    `psutil.wait_procs` is not used, as it waits without limit for a process that a debugger holds.

    Returns:
        The ids of those that have not ended.
    """
    deadline = time.monotonic() + timeout
    while True:
        pids = {pid for pid in pids if not _has_ended(pid)}
        if not pids or time.monotonic() >= deadline:
            return pids
        time.sleep(_MAX_POLL_S)


def _has_ended_completely(process: psutil.Process) -> bool:
    """Returns True if a process has ended, whether or not its parent has collected its exit status.

    The kernel shows a process as a zombie as soon as its main thread has ended. While another
    thread still runs, or waits for a device, the process has not ended.
    """
    import psutil

    try:
        # The status is read first. If another process was given the process id before that,
        # `is_running` notices it.
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        if not process.is_running():
            return True

        only_main_thread_is_left = process.num_threads() <= 1
        return bool(is_zombie and only_main_thread_is_left)
    except psutil.NoSuchProcess:
        return True


def _has_ended(pid: int) -> bool:
    """Returns True if a child of this process has ended, after collecting its exit status."""
    try:
        ended_pid, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # it was collected before, or is not a child of this process
        return True
    return ended_pid == pid


def _signal_group(pid: int, number: int) -> None:
    """Sends a signal to the process group of a rank."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # Either the process has no group of its own yet, or the whole group has ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends. This only works on Linux.

    Args:
        parent: process id of the parent. If it has ended already, this process exits at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Receives a message and the descriptors that came with it; both are empty at the end of the
    stream.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, _MAX_DESCRIPTORS)
    except ConnectionResetError:
        return b"", []
    return data, descriptors


def _read_request(files: list[int]) -> dict[str, Any]:
    """Reads the request for a rank.

    Args:
        files: descriptors of the rank's input, output and error, and of the file with the request.
    """
    request_file = files[-1]
    size = os.fstat(request_file).st_size
    request: dict[str, Any] = json.loads(os.pread(request_file, size, 0))
    return request


def unnamed_file() -> IO[bytes]:
    """Creates an empty file without a name, which is passed to other processes by its descriptor.

    It is in memory if the system has such files, as the disk with the temporary folder may be full.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("lockstep-request"), "w+b")
    return tempfile.TemporaryFile()


def control_sockets() -> tuple[socket.socket, socket.socket]:
    """Creates two connected sockets that preserve the boundaries of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
