"""Manages the connection by ssh to one machine of a run, and sends the working folder by rsync.

A *drop* means that the ssh server closed the connection before anything else, as sshd does when too
many connections begin at once (MaxStartups). After a drop, the connection is tried again.

On this machine, the helper is started without ssh.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import random
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import IO, Any, TypeVar

from lockstep.run.machines.hosts import Host, working_folder
from lockstep.run.machines.machine_connection import (
    FINISH_TIMEOUT_S,
    HELPER_MODULE,
    MachineConnection,
    Problem,
    ShowLine,
    helper_command,
    wait_all,
    wait_for_exit,
)
from lockstep.run.machines.ssh_command import SshCommand
from lockstep.run.machines.ssh_errors import ConnectionDropped, ssh_failure

T = TypeVar("T")

RETRY_PAUSES_S = (1.0, 2.0, 4.0)
"""Pauses before a dropped connection is tried again."""


class SshConnection(MachineConnection):
    """The connection to a machine by ssh. On this machine, the helper is a process of its own.

    Args:
        host: the machine.
        ssh: the ssh program and the user's options for it.
        show: function that is called with each line printed there after the launcher was started.
        module: name of the Python module that is started there as the helper.
    """

    def __init__(
        self,
        host: Host,
        ssh: SshCommand,
        show: ShowLine | None = None,
        module: str = HELPER_MODULE,
    ) -> None:
        super().__init__(host, show, module)
        self._ssh = ssh

    async def connect(self, **request: Any) -> dict[str, Any]:
        """Starts the helper, and returns its answer to a first request.

        Raises:
            Problem: ssh is not installed, or there is no answer within `answer_timeout_s`,
                including retries.
        """
        deadline = time.monotonic() + self.answer_timeout_s

        async def attempt() -> dict[str, Any]:
            return await self._connect_within(deadline - time.monotonic(), request)

        return await self._retry_if_dropped(attempt, deadline)

    async def _retry_if_dropped(
        self, attempt: Callable[[], Coroutine[Any, Any, T]], deadline: float = math.inf
    ) -> T:
        """Repeats an attempt, after a pause, as long as the ssh server drops the connection.

        Args:
            attempt: function that makes one attempt, and raises Problem if it fails.
            deadline: the monotonic time after which no further attempt begins. An attempt that is
                still running then is expected to end by itself with a Problem.
        """
        last_drop: ConnectionDropped | None = None
        pauses = list(RETRY_PAUSES_S)
        while True:
            try:
                return await attempt()
            except ConnectionDropped as drop:  # the only kind of Problem that may go away by itself
                last_drop = drop
                if not pauses:
                    raise
                # The pause is random, so that not all machines try again at the same time.
                pause_s = random.uniform(0.5, 1.0) * pauses.pop(0)
                if time.monotonic() + pause_s > deadline:
                    raise
                await self.close()  # ends this ssh process
                await asyncio.sleep(pause_s)
            except Problem:
                was_ended_by_deadline = time.monotonic() >= deadline
                if last_drop is not None and was_ended_by_deadline:
                    # The problem is only that there was no answer in time. The drop says why.
                    raise last_drop from None
                raise

    def _start_program(self, nonce: str) -> subprocess.Popen[bytes]:
        """Starts ssh, which starts the helper. On this machine, starts the helper itself."""
        return _start_process(
            self._command(nonce),
            advice="install OpenSSH's client, or name another program with --ssh",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C in the terminal only reaches this process
        )

    def _command(self, nonce: str) -> list[str]:
        """Returns the command that starts the helper: by ssh, unless the host is this machine."""
        command = helper_command(self._module, nonce)
        return command if self.here else self._ssh.running(command, self.host.name)

    def _advice_on_missing_file(self, *, was_copied: bool) -> str:
        """Returns what to do if the run's folder or script is not on the machine."""
        if was_copied:
            return "--copy sends what is in this folder and not ignored by git"
        return "the folder must be on a shared disk, or be sent: --copy"

    def _failure(self) -> Problem:
        """Returns the error that explains why the helper does not answer."""
        exit_code = self._process.poll() if self._process else None
        error_output = self._error_output.decode(errors="replace")
        return ssh_failure(self.host, exit_code, error_output, self._ssh)

    async def copy_folder(self, file_names: bytes | None) -> None:
        """Sends the working folder to the same path on the other machine, by rsync.

        Files that are only on the other machine stay as they are.

        Args:
            file_names: names of the files to send, each followed by a zero byte; None for all files
                that .gitignore does not exclude.

        Raises:
            Problem: the folder could not be sent.
        """
        folder = working_folder()
        command = [
            "rsync",
            "--archive",  # keeps times and modes
            "--recursive",  # a part of --archive, but one that --files-from switches off
            "--compress",
            "--protect-args",  # allows spaces in names
            "--keep-dirlinks",  # a link to a folder on the other machine stays a link
            "--exclude=.git",
            # Runs `mkdir` on that machine first: rsync before 3.2.3 has no option that creates the
            # folder.
            f"--rsync-path=mkdir -p {shlex.quote(folder)} && rsync",
            f"--rsh={self._ssh.for_rsync()}",
        ]
        if file_names is None:
            # Exclude (-) what the .gitignore of each folder (:) lists.
            command.append("--filter=:- .gitignore")
        else:
            # Read the names from standard input (-).
            command += ["--from0", "--files-from=-", "--ignore-missing-args"]
        command += [f"{folder}/", f"{self.host.name}:{folder}/"]

        names_on_standard_input = file_names or b""
        await self._retry_if_dropped(partial(self._run_rsync, command, names_on_standard_input))

    async def _run_rsync(self, command: Sequence[str], file_names: bytes) -> None:
        """Runs rsync with the names of files as its input.

        Raises:
            Problem: rsync failed.
        """
        # rsync gets files, and not pipes: a process that it leaves behind may hold a pipe open.
        with _file_for_rsync(file_names) as names_file, _file_for_rsync() as error_file:
            process = _start_process(
                command,
                advice="install rsync",
                stdin=names_file,
                stderr=error_file,
                start_new_session=True,
            )
            self._process = process
            try:
                await wait_for_exit(process)
            finally:
                # If a signal ends the run, the wait is cancelled while rsync is still running.
                is_running = process.returncode is None
                if is_running:
                    await self._end_rsync(process)

            error_file.seek(0)
            error_output = error_file.read().decode(errors="replace")

        if process.returncode:
            advice = f"see whether {working_folder()} can be written on it, and has room"
            raise ssh_failure(self.host, process.returncode, error_output, self._ssh, advice)

    async def _end_rsync(self, process: subprocess.Popen[bytes]) -> None:
        """Asks rsync and its ssh to end, so that rsync can remove its temporary files on the other
        machine. Kills them if they do not end in time.
        """
        os.killpg(process.pid, signal.SIGTERM)
        has_ended_in_time = await wait_all([wait_for_exit(process)], FINISH_TIMEOUT_S)
        if not has_ended_in_time:
            self.kill()
            await wait_for_exit(process)

    def kill(self) -> None:
        """Ends the connection at once, without waiting for the helper to end by itself."""
        process = self._process
        if not isinstance(process, subprocess.Popen) or process.poll() is not None:
            return  # nothing was started, or it has ended

        with contextlib.suppress(ProcessLookupError):
            if self.here:  # the helper runs on this machine, without ssh
                # Kill only the helper. The kernel then kills the launcher too (`die_with_parent`),
                # and the launcher's fork server, which is still running, ends the ranks.
                os.kill(process.pid, signal.SIGKILL)
            else:
                os.killpg(process.pid, signal.SIGKILL)  # ssh and its ProxyCommand


def _start_process(command: Sequence[str], advice: str, **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process on this machine.

    Args:
        command: the program and its arguments.
        advice: what the user can do if there is no such program.
        **options: options of `subprocess.Popen`.

    Raises:
        Problem: the process cannot be started.
    """
    try:
        return subprocess.Popen(command, **options)
    except OSError as error:
        if error.errno == errno.EMFILE:
            advice = "allow more open files here: `ulimit -n`"
        found = f"{command[0]} cannot be started here: {error.strerror}"
        raise Problem(found, advice) from None


@contextlib.contextmanager
def _file_for_rsync(content: bytes = b"") -> Iterator[IO[bytes]]:
    """Opens a temporary file, which becomes the input or the error output of rsync.

    Args:
        content: what is written to the file. The file is then at its beginning.

    Raises:
        Problem: no such file can be written.
    """
    with contextlib.ExitStack() as stack:
        # Only errors of the file are caught, and not those of the caller's block, which runs at
        # the `yield`.
        try:
            file = stack.enter_context(tempfile.TemporaryFile())
            file.write(content)
            file.seek(0)
        except OSError as error:
            found = f"no file for rsync can be written here: {error.strerror}"
            raise Problem(found, "make room in /tmp, or set TMPDIR to another folder") from None

        yield file
