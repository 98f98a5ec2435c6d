"""Manages the connection to one machine of a run, and to the helper process that is started there.

The *helper* (module `helper`) receives *requests*, JSON lines on its standard input. Its *answers*
are lines on its standard output that begin with a mark. When asked to, it starts the launcher,
whose output then comes between the answers.

`SshConnection` starts the helper by ssh, and `RayConnection` by an actor of Ray. Nothing secret is
in a command line: the token and the variables of the run go through standard input.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from lockstep.run.machines.helper import (
    ALIVE,
    ANSWER_MARK,
    MESSAGE_LOST,
    SILENCE_TIMEOUT_S,
    versions,
)
from lockstep.run.machines.helper_output import HelperOutput
from lockstep.run.machines.hosts import Host
from lockstep.run.start.late_end import GIVE_UP_IDLE_AFTER_S

T = TypeVar("T")
ShowLine = Callable[[Host, str, bytes], Awaitable[None]]
"""A function that shows a line. It is called with the host, "stdout" or "stderr", and the line."""

HELPER_MODULE = "lockstep.run.machines.helper"
ANSWER_TIMEOUT_S = 25.0
FINISH_TIMEOUT_S = 2.0
LAUNCHER_END_S = 20.0 + GIVE_UP_IDLE_AFTER_S
"""The time that a launcher needs to end, in addition to the time that it gives its ranks."""
POLL_INTERVAL_S = 0.05
MAX_READS_AFTER_END = 64
"""The number of reads that suffices for everything that a process wrote before it ended."""
READ_BYTES = 1 << 16
MAX_ERROR_OUTPUT_BYTES = 1 << 16


class Problem(Exception):
    """Nothing can be started on a machine, or it does not answer.

    Args:
        found: what is wrong.
        advice: what the user can do.
    """

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found, advice)
        self.found = found
        self.advice = advice


class Process(Protocol):
    """The program that starts the helper, as far as `MachineConnection` uses it. It is a
    `subprocess.Popen`, or a class that stands for a process on a node of Ray.
    """

    @property
    def stdin(self) -> Any:
        """The writing end of the pipe to its standard input."""

    @property
    def stdout(self) -> Any:
        """The reading end of the pipe from its standard output."""

    @property
    def stderr(self) -> Any:
        """The reading end of the pipe from its standard error."""

    def poll(self) -> int | None:
        """Returns its exit code, or None if it is running."""


class MachineConnection(ABC):
    """The connection to a machine of the run, and to the helper process there.

    Args:
        host: the machine.
        show: function that is called with each line printed there after the launcher was started.
        module: name of the Python module that is started there as the helper.
    """

    def __init__(
        self,
        host: Host,
        show: ShowLine | None = None,
        module: str = HELPER_MODULE,
    ) -> None:
        self.host = host
        self.here = host.here
        self._show = show
        self._module = module
        self.answer_timeout_s = ANSWER_TIMEOUT_S
        self.exit_code: int | None = None
        """The launcher's exit code; None if it has not ended, or if the connection was lost."""
        self.facts: dict[str, Any] = {}
        """The helper's first answer; see `helper.describe_machine`."""
        self.clock_offset_s = 0.0
        """The clock there is at least this many seconds ahead; negative if it is behind."""
        self.listen_address = ("", 0)
        """The address and port at which the helper listens."""
        self._outputs: dict[str, HelperOutput] = {}
        """The two streams of the helper's output, "stdout" and "stderr", once it is started."""
        self._error_output = b""
        """The standard error from before the launcher was started."""
        self._launcher_started = False
        self._shutdown_timeout_s = 0.0
        """The seconds that the ranks there get to end, once the launcher is started."""
        self._process: Process | None = None
        """The program that starts the helper and is connected to it, or the helper itself."""
        self._input: asyncio.WriteTransport | None = None
        self._reading_tasks: list[asyncio.Task[None]] = []

    @abstractmethod
    def _start_program(self, nonce: str) -> Process:
        """Starts the program that starts the helper.

        Args:
            nonce: argument of the helper, with which its answers begin.

        Raises:
            Problem: the program cannot be started.
        """

    @abstractmethod
    def _failure(self) -> Problem:
        """Returns the error that explains why the helper does not answer."""

    @abstractmethod
    def _advice_on_missing_file(self, *, was_copied: bool) -> str:
        """Returns what to do if the run's folder or script is not on the machine."""

    async def copy_folder(self, file_names: bytes | None) -> None:
        """Sends the working folder to the machine (--copy). Only `SshConnection` can.

        Args:
            file_names: names of the files to send, each followed by a zero byte; None for all files
                that .gitignore does not exclude.
        """
        raise NotImplementedError

    @abstractmethod
    def kill(self) -> None:
        """Ends the connection at once, without waiting for the helper to end by itself."""

    @property
    def machine_id(self) -> str:
        """A text that identifies the machine, which may have several names."""
        return str(self.facts["machine"])

    async def connect(self, **request: Any) -> dict[str, Any]:
        """Starts the helper, and returns its answer to a first request.

        Raises:
            Problem: the helper cannot be started, or there is no answer within `answer_timeout_s`.
        """
        return await self._connect_within(self.answer_timeout_s, request)

    async def _connect_within(self, timeout_s: float, request: Mapping[str, Any]) -> dict[str, Any]:
        """Starts the helper, and returns its answer to a first request; see `connect`."""
        await self._start_helper()
        self.send(**request)
        return await self._receive_answer(timeout_s)

    async def _start_helper(self) -> None:
        """Starts the helper, and the tasks that read its output."""
        self._forget_earlier_helper()

        # Each answer begins with a mark. It contains a random number, which output of the ranks
        # cannot contain by accident.
        nonce = secrets.token_hex(8)
        answer_mark = ANSWER_MARK + f"{nonce} ".encode()
        self._outputs = {stream: HelperOutput(answer_mark) for stream in ("stdout", "stderr")}

        # asyncio's own subprocesses are not used. With them, closing the event loop would wait for
        # every process that still holds the output open, even one that ssh has left behind.
        process = self._start_program(nonce)
        self._process = process
        loop = asyncio.get_running_loop()
        self._input, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)

        for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            reader = asyncio.StreamReader()
            transport, _ = await loop.connect_read_pipe(
                partial(asyncio.StreamReaderProtocol, reader), pipe
            )
            reading = asyncio.create_task(self._read_stream(stream, reader, transport))
            self._reading_tasks.append(reading)

    def _forget_earlier_helper(self) -> None:
        """Drops the answers and the error output of a helper whose connection was dropped."""
        self._error_output = b""
        self._reading_tasks = []

        # The queue receives the answers, and None when there will be no more.
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def open(self, request: Mapping[str, Any], was_copied: bool) -> None:
        """Starts the helper, and checks its description of its machine.

        Args:
            request: the first request, see `helper.describe_machine`.
            was_copied: True if the working folder has been sent to the machine.

        Raises:
            Problem: the helper could not be started, a version differs, or something is missing.
        """
        time_before = time.time()
        is_first_machine = self.here
        self.facts = await self.connect(**request, here=is_first_machine)
        time_after = time.time()
        self.clock_offset_s = _clock_offset_s(self.facts["time"], time_before, time_after)

        for name, version_here in versions().items():
            version_there = self.facts["versions"].get(name)
            if version_there != version_here:
                raise Problem(
                    f"{name} {version_there} there, {version_here} here",
                    f"install {name} {version_here} there, for {sys.executable}, or "
                    f"{version_there} here",
                )

        what_is_missing = self.facts["missing"]  # "/home/me/train.py: there is no such file"
        if what_is_missing:
            raise Problem(what_is_missing, self._advice_on_missing_file(was_copied=was_copied))

    async def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request, and returns the answer.

        Raises:
            Problem: there is no answer.
        """
        self.send(**request)
        return await self._receive_answer(self.answer_timeout_s)

    async def _receive_answer(self, timeout: float) -> dict[str, Any]:
        """Waits for the next answer.

        Args:
            timeout: how long to wait, in seconds.

        Raises:
            Problem: there is no answer in time, or the helper has ended.
        """
        try:
            answer = await asyncio.wait_for(self._answers.get(), timeout)
        except TimeoutError:
            raise self._failure() from None

        if answer is not None:
            return answer

        # Standard output has ended. Standard error, which says why, may not have arrived yet.
        await wait_all([self.wait_for_end()], FINISH_TIMEOUT_S)
        raise self._failure()

    async def listen(self, address: str, port: int, any_port_if_taken: bool = False) -> None:
        """Makes the helper listen, so that the other machines can test the connection to it.

        Args:
            address: the address at which the other machines reach it, which is kept in
                `listen_address`.
            port: the port; 0 for any free port.
            any_port_if_taken: whether to listen at another port if this one is in use.

        Raises:
            Problem: the port is in use.
        """
        answer = await self.ask(listen=port, any_port_if_taken=any_port_if_taken)
        if "error" in answer:
            advice = "give another --master-port, or leave it out"
            raise Problem(f"port {port}: {answer['error']}", advice)
        self.listen_address = (address, int(answer["port"]))

    async def reach(self, other: MachineConnection) -> str:
        """Tests the network connection from this machine to another one whose helper listens.

        Returns:
            The address of this machine on that connection.

        Raises:
            Problem: the other machine cannot be reached, or only by short messages.
        """
        answer = await self.ask(reach=other.listen_address)
        reason = answer["why"]
        if not reason:
            return str(answer["own"])

        if reason == MESSAGE_LOST:  # only short messages arrive
            advice = "set the MTU of their interfaces to that of the network between them, as root"
        else:
            advice = (
                "a firewall must let the machines reach each other on all ports; --master-addr and "
                "--master-port give another place of the first; `lockstep doctor --hosts` tests "
                "all connections"
            )
        address, port = other.listen_address
        raise Problem(
            f"it cannot reach {other.host.name} at {address}, port {port} ({reason})", advice
        )

    def start_launcher(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        keep: bool,
        shutdown_timeout_s: float,
    ) -> None:
        """Makes the helper start the launcher. From now on, the output there is shown.

        Args:
            command: the Python module that is the launcher, and its arguments.
            environment: environment variables for the launcher and its ranks.
            keep: whether the ranks go on if the connection to this machine is lost.
            shutdown_timeout_s: the seconds that the ranks get to end.
        """
        self._shutdown_timeout_s = shutdown_timeout_s
        self._launcher_started = True

        # Until now, output was dropped, one whole line after the other. Drop what has arrived of
        # the next line.
        for output in self._outputs.values():
            output.unfinished_line = b""

        # The request `{"start": ..., "environment": ..., ...}`.
        self.send(
            start=list(command),
            environment=dict(environment),
            keep=keep,
            grace=shutdown_timeout_s,
        )

    def send(self, **request: Any) -> None:
        """Sends a request, or a heartbeat if there are no arguments.

        Does nothing if the helper is gone.
        """
        if self._is_running() and self._input and not self._input.is_closing():
            line = json.dumps(request) if request else ""
            self._input.write(line.encode() + b"\n")

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def _read_stream(
        self, stream: str, reader: asyncio.StreamReader, transport: asyncio.ReadTransport
    ) -> None:
        """Reads a stream of the helper until it ends, and closes it."""
        try:
            await self._read_until_end(stream, reader)
        finally:
            transport.close()

        # Show the last line even if it does not end with a newline.
        has_unfinished_line = bool(self._outputs[stream].unfinished_line.strip())
        if has_unfinished_line:
            await self._process_output(stream, b"\n")

        if stream == "stdout":
            self._answers.put_nowait(None)  # all answers were put before; there will be no more

    async def _read_until_end(self, stream: str, reader: asyncio.StreamReader) -> None:
        """Reads a stream until it is closed, or for a while after the process has ended."""
        is_closed = await self._read_while_running(stream, reader)
        if not is_closed:
            await self._read_rest(stream, reader)
        self._outputs[stream].drop_begun_answer()

    async def _read_while_running(self, stream: str, reader: asyncio.StreamReader) -> bool:
        """Reads a stream as long as the process is running.

        After the launcher was started, the helper sends heartbeats on its standard output. If they
        stop arriving, the connection is killed.

        Returns:
            True if the stream was closed, False if the process has ended.
        """
        silent_s = 0.0  # how long the reads have waited since data last arrived
        while self._is_running():
            read_started = time.monotonic()
            data = await _read_within(FINISH_TIMEOUT_S, reader)  # None at the timeout
            is_closed = data == b""
            if is_closed:
                return True

            if data is not None:
                silent_s = 0.0
                await self._process_output(stream, data)
                continue

            # After `kill`, the process ends soon, and with it this loop.
            silent_s += time.monotonic() - read_started
            expects_heartbeats = self._launcher_started and stream == "stdout"
            if expects_heartbeats and silent_s > SILENCE_TIMEOUT_S:
                self.kill()

        return False

    async def _read_rest(self, stream: str, reader: asyncio.StreamReader) -> None:
        """Reads what the process wrote before it ended.

        Usually the stream ends soon. But a process that ssh has left behind may hold it open, and
        may even keep writing. So this also stops

        - after a silence of 2 s (`FINISH_TIMEOUT_S`),
        - after a silence of 0.5 s, once all reads together have waited for 2 s,
        - after `MAX_READS_AFTER_END` reads.
        """
        waited_s = 0.0  # in all reads together
        for _ in range(MAX_READS_AFTER_END):
            has_waited_long = waited_s >= FINISH_TIMEOUT_S
            max_silence_s = FINISH_TIMEOUT_S / 4 if has_waited_long else FINISH_TIMEOUT_S
            read_started = time.monotonic()
            data = await _read_within(max_silence_s, reader)
            if not data:  # b"": the stream has ended; None: nothing arrived in time
                return

            waited_s += time.monotonic() - read_started
            await self._process_output(stream, data)

    async def _process_output(self, stream: str, data: bytes) -> None:
        """Takes the answers out of the helper's output, and shows the other lines.

        Before the launcher was started, no line is shown. Standard error is then kept in
        `_error_output`, because it says why ssh has failed.
        """
        answers, lines = self._outputs[stream].add(data)
        for answer in answers:
            self._take_answer(answer)

        if not self._launcher_started:
            if stream == "stderr":
                self._error_output = (self._error_output + data)[-MAX_ERROR_OUTPUT_BYTES:]
            return

        for line in lines:
            if self._show is not None:
                await self._show(self.host, stream, line)

    def _take_answer(self, answer: dict[str, Any]) -> None:
        """Puts an answer of the helper into the queue, unless it is only a heartbeat."""
        if answer == ALIVE:
            return
        # The last answer has the launcher's exit code. In all others there is none.
        self.exit_code = answer.get("exit")
        self._answers.put_nowait(answer)

    @property
    def unfinished_lines(self) -> dict[str, bytes]:
        """The output after the last newline, by stream, which may be shown on a terminal."""
        return {stream: output.unfinished_line for stream, output in self._outputs.items()}

    async def wait_for_end(self) -> None:
        """Waits until the launcher there has ended, or the connection to it has."""
        if self._reading_tasks:
            await asyncio.wait(self._reading_tasks)
        if self._process:
            await wait_for_exit(self._process)

    async def close(self) -> None:
        """Ends the launcher and the helper if they are still running on the machine, and then the
        connection.
        """
        if self._input:
            self._input.close()  # makes the helper end the launcher and itself

        time_to_end_launcher_s = LAUNCHER_END_S + self._shutdown_timeout_s
        timeout_s = time_to_end_launcher_s if self._launcher_started else FINISH_TIMEOUT_S
        has_ended_in_time = await wait_all([self.wait_for_end()], timeout_s)
        if not has_ended_in_time:
            self.kill()
            longest_reading_s = 2 * FINISH_TIMEOUT_S  # of the rest of the output, by `_read_rest`
            await wait_all([self.wait_for_end()], longest_reading_s)

        for task in self._reading_tasks:
            task.cancel()


def _clock_offset_s(remote_time: float, time_before: float, time_after: float) -> float:
    """Returns by how many seconds the clock of another machine is ahead of the clock here.

    The other machine has read its clock at some moment between two readings here. If its time lies
    between them, the clocks may be equal, and the result is 0. Otherwise it is the smallest
    possible difference: with 10 and 11 here and 15 there, the other clock is at least 4 s ahead.

    Returns:
        The difference in seconds; negative if the other clock is behind.
    """
    if remote_time > time_after:
        return remote_time - time_after
    if remote_time < time_before:
        return remote_time - time_before
    return 0.0


async def _read_within(timeout: float, reader: asyncio.StreamReader) -> bytes | None:
    """Reads from a stream.

    Args:
        timeout: how long to wait for data, in seconds.
        reader: the stream.

    Returns:
        The data; empty if the stream is closed; None if nothing arrived in time.
    """
    try:
        return await asyncio.wait_for(reader.read(READ_BYTES), timeout)
    except TimeoutError:
        return None


async def run_on_all(
    connections: Sequence[MachineConnection],
    work: Callable[[MachineConnection], Coroutine[Any, Any, T]],
) -> tuple[dict[MachineConnection, T], dict[MachineConnection, Problem]]:
    """Runs a coroutine for all machines at the same time.

    Returns:
        The results of the machines for which it succeeded, and the problems of the others.
    """
    results: dict[MachineConnection, T] = {}
    problems: dict[MachineConnection, Problem] = {}
    outcomes = await asyncio.gather(
        *(work(connection) for connection in connections), return_exceptions=True
    )
    for connection, outcome in zip(connections, outcomes, strict=True):
        if isinstance(outcome, Problem):
            problems[connection] = outcome
        elif isinstance(outcome, BaseException):  # an error in this program
            raise outcome
        else:
            results[connection] = outcome
    return results, problems


async def wait_all(coroutines: Iterable[Coroutine[Any, Any, Any]], timeout: float) -> bool:
    """Runs coroutines at the same time, and cancels those that are not done in time.

    Args:
        coroutines: the coroutines.
        timeout: how long to wait, in seconds.

    Returns:
        True if all of them were done in time.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    if not tasks:
        return True
    _, pending = await asyncio.wait(tasks, timeout=timeout)
    for task in pending:
        task.cancel()
    return not pending


def helper_command(module: str, nonce: str) -> list[str]:
    """Returns the command that starts a helper on its machine.

    Args:
        module: name of the helper's Python module.
        nonce: argument of the module, with which its answers begin.
    """
    return [sys.executable, "-P", "-u", "-m", module, nonce]


async def wait_for_exit(process: Process) -> None:
    """Waits until a process has ended, without blocking the event loop."""
    while process.poll() is None:
        await asyncio.sleep(POLL_INTERVAL_S)
