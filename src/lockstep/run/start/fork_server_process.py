"""Runs in the fork server: the process that has imported torch, and from which ranks are forked.

`fork_server.ForkServer` is the launcher's side of it, and `fork_server_messages` defines what the
two send each other. The fork server has a single thread and does nothing but fork, reap and signal.
So it can be forked safely, and eight ranks start about as fast as one. As the ranks' parent, it is
the only process that signals them, so it never signals another process that has been given an old
process id.

A *spare* is a copy of the fork server that waits until it is told to become a rank. Forking a
process that has imported torch takes 10 ms or more. So the ranks of the first attempt are forked as
spares before they are requested, while the launcher is still importing modules.

When the launcher ends, for whatever reason, its end of the socket is closed. The fork server then
ends every rank and everything that ranks have started: as a *subreaper* it becomes the parent of
processes whose parent has ended (see `parent_death`), so it finds what ranks have *left behind*.
The launcher asks for the same after a failure, after Ctrl-C and before a restart. Processes left
behind by ranks that have all ended well are not touched.

Some processes do not end at any signal, see `late_end`. The fork server does not wait for them
forever: the launcher decides when to *give up* on a rank, and when the fork server ends, init takes
over.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from lockstep.run.machines.run_token import TOKEN_VARIABLE
from lockstep.run.start.fork_server_messages import (
    START,
    Event,
    answer_on_left_behind,
    control_sockets,
    read_rank_request,
    receive,
)
from lockstep.run.start.job_control import set_foreground_group
from lockstep.run.start.left_behind import (
    KILL_TIMEOUT_S,
    end_with_descendants,
    running_children,
    wait_for_ends,
)
from lockstep.run.start.parent_death import become_subreaper, die_with_parent

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

_LEFT_BEHIND_TERM_GRACE_S = 1.0
"""The time that processes left behind get to end after SIGTERM, before they are killed."""
_LAUNCHER_GONE_GRACE_S = 2.0
"""The time that ranks get to end when the launcher is gone. All must have ended within 5 s."""


def serve(control: int, work: Work) -> NoReturn:
    """Runs the fork server's own side in a new interpreter, see `fork_server.FreshForkServer`.

    Args:
        control: descriptor of the fork server's socket.
        work: function that every rank runs, see `fork_server.ForkServer`.
    """
    os.set_inheritable(control, False)
    ForkServerProcess(socket.socket(fileno=control), work).serve()
    os._exit(1)


class ForkServerProcess:
    """Forks ranks when the launcher asks for them, signals them, and reports their ends.

    Args:
        control: the fork server's end of the socket to the launcher.
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
        become_subreaper()

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
        # Ctrl-C is for the launcher, which decides what to do, and the fork server must outlive the
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
        data, files = receive(self.control)
        is_closed = not data
        if is_closed:
            return False

        if files:  # a rank is to be started, and `data` is only `START`
            self._start(files)
            for file in files:
                os.close(file)
        else:
            self._handle_short_request(json.loads(data))
        return True

    def _handle_short_request(self, request: Mapping[str, Any]) -> None:
        """Handles a request to end or to signal processes.

        {"left_behind": 2}                 end what ranks have left behind; this is the second
                                           such request, and the answer repeats the number
        {"give_up": 3}                     do not wait for the end of rank 3 any longer
        {"signal": 15, "ranks": [0, 1]}    send ranks 0 and 1 SIGTERM
        """
        if "left_behind" in request:
            not_ended = end_with_descendants(self._children_left_behind, _LEFT_BEHIND_TERM_GRACE_S)
            self._send(answer_on_left_behind(request["left_behind"], not_ended))
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
        request = read_rank_request(files)
        rank = request.local_rank

        self.spares_to_fork = 0  # from now on, ranks are only forked when they are requested

        try:
            pid = self._make_rank(files)
        except OSError as error:  # there are no more processes, or there is no more memory
            self._send(Event(rank, pid=None, reason=str(error.strerror)))
            return

        self.rank_of_pid[pid] = rank

        # A program that is not Python may not pass signals on to what it has started, so `_signal`
        # sends them to its whole process group.
        is_copy = not request.command
        is_python = is_copy or request.command[0] == sys.executable
        if not is_python:
            self.non_python_pids.add(pid)

        if not request.own_session:
            _create_process_group(pid)
        self._send(Event(rank, pid))

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
                    socket.send_fds(channel, [START], files)
                except BrokenPipeError:  # this spare has ended
                    continue
            return pid

    def _fork_spare(self) -> None:
        """Forks a spare: a copy of this process that waits until it is told to become a rank."""
        parent = os.getpid()
        servers_end, spares_end = control_sockets()
        with spares_end:
            try:
                pid = os.fork()
            except OSError:
                servers_end.close()
                raise

            if pid == 0:  # in the spare
                try:
                    servers_end.close()
                    self._separate_from_fork_server(parent)
                    # The fork server sends the files of a rank as the order to become that rank. If
                    # there are none, it has closed its end.
                    _, files_of_rank = receive(spares_end)
                    spares_end.close()
                    if files_of_rank:
                        self._become_rank(files_of_rank)
                finally:
                    # Only reached if the spare is not needed, or after an error, as `_become_rank`
                    # does not return. The spare must not go on as a second fork server.
                    os._exit(1)

        self.spares[pid] = servers_end

    def _separate_from_fork_server(self, parent: int) -> None:
        """Separates a spare from the fork server that it was forked from. The spare calls this.

        It closes the fork server's own descriptors, which it has inherited, and ends when the fork
        server does.

        Args:
            parent: process id of the fork server.
        """
        die_with_parent(parent)

        # The pipe through which signals wake up the fork server. With -1, no signal writes to it.
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
        request = read_rank_request(files)
        *streams, request_file = files
        os.close(request_file)

        # Several ranks have sessions of their own, without a terminal. A single rank stays in the
        # session of the terminal, and is put in its foreground, so that it can read the keyboard.
        if request.own_session:
            os.setsid()
        else:
            os.setpgid(0, 0)
            set_foreground_group(streams[0], os.getpgrp())

        # Replace the signal handlers inherited from the fork server by those of a new process.
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

        os.environ.update(request.environment)
        os.environ.pop(TOKEN_VARIABLE, None)  # only the launchers of the run may know the token

        if request.command:
            _execute(request.command)
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

        # Other children are processes that ranks have left behind. They are collected here as long
        # as there are ranks or spares, and by `end_with_descendants` afterwards.
        while self._has_ranks_or_spares():
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # there are no children
                return
            if pid == 0:  # all children are still running
                return
            self._note_end(pid, os.waitstatus_to_exitcode(status))

    def _has_ranks_or_spares(self) -> bool:
        """Returns True if a rank, also one that was given up, or a spare has not ended."""
        return bool(self.rank_of_pid or self.given_up or self.spares)

    def _note_end(self, pid: int, code: int) -> None:
        """Notes the end of a child, and reports it if the child was a rank.

        Args:
            pid: process id of the child.
            code: its exit code, or minus the number of the signal that ended it.
        """
        # A rank that the launcher has given up on may end after all. It is no longer in
        # `rank_of_pid`, so it is not reported below: for the launcher it has ended before.
        self.given_up.discard(pid)

        rank = self.rank_of_pid.pop(pid, None)
        if rank is not None:
            # If the rank was killed, its DataLoader workers may be left in its process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self._send(Event(rank, pid, code))

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

        # A process that does not end even now is given up. `_children_left_behind` lists its
        # children, too.
        pids = {*self.rank_of_pid, *self.spares}
        not_ended = wait_for_ends(pids, KILL_TIMEOUT_S)
        self.given_up |= not_ended
        self.rank_of_pid.clear()
        self.spares.clear()

        # Kill what the ranks have left behind. It gets no SIGTERM before: it had the time that the
        # ranks got to end.
        if ranks_were_running:
            end_with_descendants(self._children_left_behind, term_grace_s=0.0)

    def _wait_for_ranks(self, timeout_s: float) -> None:
        """Waits until all ranks have ended, for at most the given time."""
        deadline = time.monotonic() + timeout_s
        while self.rank_of_pid and time.monotonic() < deadline:
            remaining_s = max(0.0, deadline - time.monotonic())
            select.select([self.wake_reader], [], [], remaining_s)  # until a child ends
            self._reap()

    def _children_left_behind(self) -> list[psutil.Process]:
        """Returns the processes that ranks have left behind and whose parents have ended.

        These are the children of this process that are neither ranks nor spares, and the children
        of ranks that were given up: such a rank has not ended, but is treated so.
        """
        import psutil

        children = []
        for child in psutil.Process().children():
            if child.pid in self.given_up:
                children += running_children(child)
            elif child.pid not in self.rank_of_pid and child.pid not in self.spares:
                children.append(child)
        return children

    def _send(self, message: object) -> None:
        """Sends an event or an answer to the launcher."""
        with contextlib.suppress(OSError):  # if the launcher is gone, the main loop will notice
            self.control.send(json.dumps(message).encode())


def _execute(command: list[str]) -> NoReturn:
    """Replaces this process by a program. If that fails, ends with the exit code of a shell."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _create_process_group(pid: int) -> None:
    """Creates the process group of a rank, which will create it too if it does not exist.

    If the next request is to signal the rank, the group must exist by then.
    """
    with contextlib.suppress(OSError):  # the rank has ended
        os.setpgid(pid, pid)


def _signal_group(pid: int, number: int) -> None:
    """Sends a signal to the process group of a rank."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # Either the process has no group of its own yet, or the whole group has ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
