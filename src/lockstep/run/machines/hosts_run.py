"""Runs a script on several machines over ssh (`lockstep run --hosts`), and waits for its end.

The command may be given on one of the machines or on any other one, such as a laptop. On each
machine, ssh starts a *helper* process (see `machine_connection`), which then starts the launcher.
`ray_run` does the same on the nodes of a Ray cluster, with another kind of connection.

Before any launcher is started, all machines are checked at the same time, and all problems are
reported in one error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import secrets
import signal
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from lockstep.errors import EXIT_LOST_RANK, EXIT_SIGNAL, HostError
from lockstep.machine.network import address_reaching, is_here
from lockstep.run.machines.helper import HEARTBEAT_S, SILENCE_TIMEOUT_S
from lockstep.run.machines.hosts import (
    DEFAULT_MASTER_PORT,
    NUM_NEIGHBORS_TRIED,
    Host,
    HostsSpec,
    resolve_all,
    working_folder,
)
from lockstep.run.machines.machine_connection import (
    LAUNCHER_END_S,
    POLL_INTERVAL_S,
    MachineConnection,
    ShowLine,
    run_on_all,
    wait_all,
)
from lockstep.run.machines.run_token import TOKEN_VARIABLE
from lockstep.run.machines.ssh_connection import SshConnection
from lockstep.run.start.late_end import GIVE_UP_IDLE_AFTER_S
from lockstep.run.start.sink import FlushDeadline, Sink, open_sinks
from lockstep.run.start.terminal_lines import last_state
from lockstep.wording import count_noun

FORWARDED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1")
FAILED_ELSEWHERE_SIGNAL = "SIGUSR2"
"""The signal that ends a launcher whose ranks have not started yet."""
OTHERS_NOTICE_FAILURE_S = SILENCE_TIMEOUT_S + GIVE_UP_IDLE_AFTER_S + 3.0
"""The time within which launchers whose ranks have started notice by themselves that another
machine has failed or was lost, even if one of their ranks does not end."""
MAX_CLOCK_OFFSET_S = 5.0
"""The same tolerance as in `run.watch.first_failure`."""
MAX_UNPRINTED_BYTES = 4 << 20

MakeConnection = Callable[[Host, ShowLine], MachineConnection]
"""A function that creates the connection to a host, which is not open yet. The other argument is
called with each line that is printed there."""


def run_on_hosts(spec: HostsSpec, say: Callable[[str], None]) -> int:
    """Starts a run on all of its machines by ssh, and ends it on all of them when one fails.

    Args:
        spec: the request.
        say: function that shows a line to the user.

    Returns:
        The exit code of the launcher that failed first; see `lockstep.errors`.

    Raises:
        HostError: the run cannot be started on some machine; then nothing is left running on any.
    """

    def connect_by_ssh(host: Host, show: ShowLine) -> MachineConnection:
        return SshConnection(host, spec.ssh, show)

    return HostsRun(spec, say, connect_by_ssh).run()


class HostsRun:
    """A run on several machines, whose helpers may be started by ssh or by Ray.

    Args:
        spec: the request.
        say: function that shows a line to the user.
        make_connection: function that creates the connection to one of the machines.
    """

    def __init__(
        self,
        spec: HostsSpec,
        say: Callable[[str], None],
        make_connection: MakeConnection,
    ) -> None:
        self._spec = spec
        self._say = say
        self._shutdown_timeout_s = spec.shutdown_timeout_s
        self._sinks = open_sinks(os.environ)
        self._host_of_launcher_line: dict[bytes, Host] = {}
        """The first host that printed each of the launchers' own lines."""
        self._connections = [make_connection(host, self._show) for host in spec.hosts]
        self._ending_signal: int | None = None
        """The last signal that asked the run to end."""
        self._launchers_started = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._interrupts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._main_task: asyncio.Task[Any] | None = None

    def run(self) -> int:
        """Carries out the run; see `run_on_hosts`.

        In the main thread, it handles signals. In another one, `interrupt` passes them on.
        """
        resolve_all(self._spec.hosts)
        return asyncio.run(self._run())

    def interrupt(self, name: str) -> None:
        """Does what the run does at a signal of this name. It may be called in any thread."""
        self._interrupts.put(name)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the run has ended, and the loop is closed
                self._loop.call_soon_threadsafe(self._handle_interrupts)

    def _handle_interrupts(self) -> None:
        """Handles the signals that `interrupt` was given, also those from before the run began."""
        while not self._interrupts.empty():
            self._on_signal(self._interrupts.get())

    def _handle_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handles the signals of the user, which Python passes to the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in FORWARDED_SIGNALS:
            number = signal.Signals[name]
            is_ignored = signal.getsignal(number) is signal.SIG_IGN  # as SIGHUP is under nohup
            if not is_ignored:
                loop.add_signal_handler(number, self._on_signal, name)

        # Ctrl-Z only prints that ranks on other machines cannot be suspended.
        loop.add_signal_handler(signal.SIGTSTP, self._say_cannot_suspend)

        # All these handlers are removed when the loop is closed.

    def _say_cannot_suspend(self) -> None:
        self._say(
            "Ctrl-Z does nothing here: a run on several machines cannot be stopped for a while"
        )

    async def _run(self) -> int:
        """Carries out the run, inside the event loop."""
        self._main_task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._handle_signals(self._loop)
        self._loop.call_soon(self._handle_interrupts)  # `interrupt` may have been called already

        heartbeats = asyncio.create_task(self._send_heartbeats())
        try:
            await self._start_launchers()
            return await self._wait_for_launchers()
        except asyncio.CancelledError:
            if self._ending_signal is None:
                raise
            return EXIT_SIGNAL + self._ending_signal  # `_on_signal` has cancelled this task
        finally:
            self._main_task = None  # so that a signal does not cancel the following steps

            # The task with the heartbeats goes on meanwhile, as it also prints what still arrives.
            await asyncio.gather(*(connection.close() for connection in self._connections))
            heartbeats.cancel()
            await self._print_rest_of_output()

    def _on_signal(self, name: str) -> None:
        """Does what the user wants with a signal.

            launchers are running              pass the signal on to them
            not yet; the first Ctrl-C          cancel the start
            not yet; a second Ctrl-C           do not wait for the connections either
            not yet; SIGUSR1                   nothing, as no ranks could save

        SIGTERM and the like count as Ctrl-C.
        """
        asks_to_end = name != "SIGUSR1"  # SIGUSR1 asks the ranks to save
        was_asked_before = self._ending_signal is not None
        if asks_to_end:
            self._ending_signal = signal.Signals[name]

        if self._launchers_started:
            self._send_signal(name, self._connections)
            return

        if not asks_to_end:
            return

        if self._main_task and not was_asked_before:
            self._main_task.cancel()  # `_run` then closes the connections
            return

        for connection in self._connections:
            connection.kill()

    async def _send_heartbeats(self) -> None:
        """Sends heartbeats to the helpers, and writes waiting output to the terminal in between."""
        polls_per_heartbeat = int(HEARTBEAT_S / POLL_INTERVAL_S)
        while True:
            for connection in self._connections:
                helper_has_answered = bool(connection.facts)
                if helper_has_answered:
                    connection.send()  # without arguments, this is a heartbeat

            for _ in range(polls_per_heartbeat):
                await asyncio.sleep(POLL_INTERVAL_S)
                self._write_waiting_output()

    async def _show(self, host: Host, stream: str, line: bytes) -> None:
        """Prints a line of a machine's output, with the name of the machine before it.

        When a run fails, every launcher prints the same report. A line of a launcher that another
        machine has already printed is not printed again.

        Args:
            host: the machine.
            stream: "stdout" or "stderr".
            line: the line, without a newline.
        """
        if _may_be_of_launcher(stream, line) and not self._is_first_machine_with(line, host):
            return

        # The last row of the terminal, which may show an unfinished line, is drawn again below the
        # new line.
        sink = self._sinks[stream]
        sink.write(f"[{host.name}] ".encode() + line + b"\n", self._bottom_row(sink))
        await self._wait_for_terminal(sink)

    def _is_first_machine_with(self, launcher_line: bytes, host: Host) -> bool:
        """Returns True if no launcher of another machine has printed the same line before.

        For each line, the first machine that prints it is remembered.
        """
        if len(self._connections) == 1:
            return True

        # In its report, each launcher has a line "consequences: rank 1 ..." with the ranks that
        # failed because another one had. These lines count as the same, as it is enough to print
        # one of them.
        is_consequences = launcher_line.startswith(b"consequences: ")
        key = b"consequences" if is_consequences else launcher_line
        first_host = self._host_of_launcher_line.setdefault(key, host)
        return first_host is host

    async def _wait_for_terminal(self, sink: Sink) -> None:
        """Waits while there is much that the terminal has not accepted yet.

        In the meantime no further line of the machine is read. If a signal has asked the run to
        end, its end does not wait for the terminal.
        """
        while len(sink.waiting) > MAX_UNPRINTED_BYTES and self._ending_signal is None:
            await asyncio.sleep(POLL_INTERVAL_S)

    def _bottom_row(self, sink: Sink) -> bytes:
        """Returns the row below the lines on a terminal, such as a progress bar.

        It is the unfinished line of the first machine that has one.
        """
        if not sink.can_draw:
            return b""

        for connection in self._connections:
            for stream, unfinished_line in connection.unfinished_lines.items():
                is_shown_on_this_terminal = self._sinks[stream] is sink
                visible_text = last_state(unfinished_line)  # of a progress bar, its last state
                if is_shown_on_this_terminal and visible_text.strip():
                    return sink.crop(f"[{connection.host.name}] ".encode() + visible_text)

        return b""

    def _write_waiting_output(self) -> None:
        """Writes as much waiting output as the terminals accept, and draws their bottom rows."""
        for sink in self._sinks.values():
            sink.draw(self._bottom_row(sink))
            sink.flush()

    async def _print_rest_of_output(self) -> None:
        """Prints the rest of the output, as long as the terminal accepts data.

        If the user has asked the run to end, a slow terminal is not waited for.
        """
        was_asked_to_end = self._ending_signal is not None
        deadline = FlushDeadline(self._sinks.values(), hurry=was_asked_to_end)
        self._write_waiting_output()

        # Go on until all is written, or until the terminal has accepted nothing for too long.
        while not deadline.wait_is_over():
            await asyncio.sleep(POLL_INTERVAL_S)
            self._write_waiting_output()

        # If standard error accepts nothing, no message can be shown.
        message = self._sinks["stdout"].message_on_lost_output
        if message:
            self._say(message)

    async def _run_on_all_or_raise(
        self,
        connections: Sequence[MachineConnection],
        work: Callable[[MachineConnection], Coroutine[Any, Any, Any]],
    ) -> None:
        """Runs a coroutine for all machines at the same time.

        Raises:
            HostError: it failed for some of them. The error contains the problems of all.
        """
        _, problems = await run_on_all(connections, work)
        if not problems:
            return

        names = []
        findings = []
        advice = []
        for connection, problem in problems.items():
            name = connection.host.name
            names.append(name)
            findings.append(f"{name}: {problem.found}" if len(problems) > 1 else problem.found)
            if problem.advice not in advice:
                advice.append(problem.advice)

        raise HostError(
            f"{self._spec.option}: a run on {', '.join(names)}",
            "; ".join(findings),
            "; ".join(advice),
        )

    async def _start_launchers(self) -> None:
        """Checks all machines, finds out where the launchers can meet, and starts them.

        Raises:
            HostError: the run cannot be started on some of the machines.
        """
        spec = self._spec
        if spec.copy:
            await self._copy_folder()
        await self._open_connections()
        self._warn_about_machines()

        address = ""
        port = 0
        if len(self._connections) > 1:
            address, port = await self._find_meeting_place()

        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)
        environment = {TOKEN_VARIABLE: token, **spec.environment}
        self._launchers_started = True  # signals are passed on to them from now on
        for node_rank, connection in enumerate(self._connections):
            launcher_module = spec.launcher[0]
            arguments = spec.launcher_arguments(node_rank, address, port)
            command = [launcher_module, *arguments]
            connection.start_launcher(command, environment, spec.keep, self._shutdown_timeout_s)

        if not spec.quiet:
            self._say(self._starting_line(address, port))

    async def _open_connections(self) -> None:
        """Starts the helper of each machine, which checks that the folder and the script exist.

        Raises:
            HostError: a helper cannot be started, or something is missing on its machine.
        """
        spec = self._spec
        script = None
        if spec.script and not spec.module:
            script = spec.script[0]  # without the arguments of the script, which follow
        request = {"folder": working_folder(), "script": script}
        await self._run_on_all_or_raise(
            self._connections, lambda connection: connection.open(request, was_copied=spec.copy)
        )

    def _starting_line(self, address: str, port: int) -> str:
        """Returns the line about a run that begins: its hosts, and where their launchers meet.

        Args:
            address: the address of the first machine; empty if the run has only one machine.
            port: the port there.
        """
        names = ", ".join(host.name for host in self._spec.hosts)
        num_hosts = len(self._spec.hosts)
        if not address:
            return f"{count_noun(num_hosts, 'host')}: {names}"
        return f"{count_noun(num_hosts, 'host')}: {names}; they meet at {address}, port {port}"

    async def _copy_folder(self) -> None:
        """Sends the working folder to all other machines (--copy).

        Raises:
            HostError: it could not be sent to some of them.
        """
        file_names = await asyncio.to_thread(list_git_files)

        elsewhere = [connection for connection in self._connections if not connection.here]
        await self._run_on_all_or_raise(
            elsewhere, lambda connection: connection.copy_folder(file_names)
        )

    def _warn_about_machines(self) -> None:
        """Warns the user if two hosts are one machine, or if a clock is wrong."""
        host_name_of_machine: dict[str, str] = {}
        for connection in self._connections:
            name = connection.host.name
            first_name = host_name_of_machine.setdefault(connection.machine_id, name)
            if first_name != name:
                self._say(f"{first_name} and {name} are one machine: each uses its devices")

        for connection in self._connections:
            offset_s = connection.clock_offset_s
            if abs(offset_s) > MAX_CLOCK_OFFSET_S:
                self._warn_about_clock(connection.host.name, offset_s)

    def _warn_about_clock(self, name: str, offset_s: float) -> None:
        """Warns the user that the clock of a machine is ahead of this machine's, or behind it.

        Args:
            name: the name of the host.
            offset_s: the seconds by which it is ahead; below 0 if it is behind.
        """
        if offset_s > 0:
            offset = f"{abs(offset_s):.0f} s ahead"
        else:
            offset = f"{abs(offset_s):.0f} s behind"
        self._say(
            f"the clock of {name} is {offset}: the report may name the wrong rank as the first to "
            "fail; `timedatectl set-ntp true` there, as root"
        )

    async def _find_meeting_place(self) -> tuple[str, int]:
        """Finds an address and port of the first machine that all other machines can reach.

        The first machine listens there. Each other machine connects to it, and then listens too.
        Finally, each machine connects to the next few in the list, because Gloo connects all ranks
        with each other.

        Returns:
            The address and port of the first machine at which the launchers meet.

        Raises:
            HostError: a machine cannot be reached from another one.
        """
        connections = self._connections
        first = connections[0]
        address = self._spec.torchrun_flag("--master-addr") or self._address_of_first()
        given_port = self._spec.torchrun_flag("--master-port")
        port = int(given_port or DEFAULT_MASTER_PORT)

        async def listen_first(connection: MachineConnection) -> None:
            await connection.listen(address, port, any_port_if_taken=given_port is None)

        await self._run_on_all_or_raise([first], listen_first)
        await self._run_on_all_or_raise(connections[1:], self._reach_first_and_listen)

        # If the user has chosen an interface for Gloo, the ranks may use another one than these
        # connections. So connections between neighbors are not tested then.
        if "GLOO_SOCKET_IFNAME" not in self._spec.environment:
            await self._run_on_all_or_raise(connections, self._reach_neighbors)

        return first.listen_address  # with the port that is really used

    async def _reach_first_and_listen(self, connection: MachineConnection) -> None:
        """Connects a machine to the first one, and makes it listen, for `_reach_neighbors`."""
        own_address = await connection.reach(self._connections[0])
        any_free_port = 0
        await connection.listen(own_address, any_free_port)

    async def _reach_neighbors(self, connection: MachineConnection) -> None:
        """Connects a machine to the next few in the list, whose last is followed by the first."""
        index = self._connections.index(connection)
        following = self._connections[index + 1 :] + self._connections[:index]
        for neighbor in following[:NUM_NEIGHBORS_TRIED]:
            await connection.reach(neighbor)

    def _address_of_first(self) -> str:
        """Returns the address of the first machine, as seen by the other machines."""
        first = self._connections[0]
        second = self._connections[1]
        first_is_this_machine = first.here
        if not first_is_this_machine:
            # ssh has connected from here to the first machine, at one of its addresses.
            return str(first.facts["own_address"] or first.host.address)

        # This is the first machine, and ssh has connected from here to the second one. The second
        # has seen the address that ssh came from. It belongs to this machine, or to a jump host in
        # between.
        address_ssh_came_from = str(second.facts["address_ssh_came_from"])
        if address_ssh_came_from and is_here(address_ssh_came_from):
            return address_ssh_came_from

        # Otherwise take the address of the interface over which this machine sends to the second.
        return address_reaching(second.host.address) or first.host.address

    async def _wait_for_launchers(self) -> int:
        """Waits until the launchers on all machines have ended.

        When one has failed, the others get some time to notice it by themselves.

        Returns:
            The exit code of the first launcher that failed, or 0.
        """
        exit_codes: list[int] = []
        connection_lost = False
        failed = False
        connection_of_task = {
            asyncio.create_task(connection.wait_for_end()): connection
            for connection in self._connections
        }
        while connection_of_task:
            timeout = None
            if failed:
                timeout = OTHERS_NOTICE_FAILURE_S + self._shutdown_timeout_s
            done, _ = await asyncio.wait(
                connection_of_task, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )

            is_timeout_over = not done
            if is_timeout_over:
                await self._end_launchers(list(connection_of_task.values()))
                break

            for task in done:
                connection = connection_of_task.pop(task)
                if connection.exit_code is not None:
                    exit_codes.append(connection.exit_code)
                    continue

                connection_lost = True
                self._say_connection_lost(connection)
                if not self._spec.keep:
                    exit_codes.append(EXIT_LOST_RANK)

            # This signal only ends launchers whose ranks have not been started. The others notice
            # the failure by themselves, and report it.
            if any(exit_codes) and not failed:
                failed = True
                self._send_signal(FAILED_ELSEWHERE_SIGNAL, connection_of_task.values())

        # With --on-lost keep, there is no exit code if all connections were lost.
        if connection_lost and not exit_codes:
            return EXIT_LOST_RANK
        failures = [exit_code for exit_code in exit_codes if exit_code != 0]
        return failures[0] if failures else 0

    async def _end_launchers(self, connections: Sequence[MachineConnection]) -> None:
        """Asks launchers that have not noticed the failure of another one to end."""
        self._send_signal("SIGTERM", connections)
        endings = [connection.wait_for_end() for connection in connections]
        await wait_all(endings, LAUNCHER_END_S + self._shutdown_timeout_s)

    def _say_connection_lost(self, connection: MachineConnection) -> None:
        """Tells the user that the connection to a machine is lost, and what follows from that."""
        if self._spec.keep:
            what_follows = "its ranks go on if the other machines reach them (--on-lost keep)"
        elif self._spec.option == "--hosts":
            what_follows = "the run is ended (--on-lost stop)"
        else:  # Ray has no option --on-lost
            what_follows = "all ranks are ended"
        self._say(f"the connection to {connection.host.name} is lost; {what_follows}")

    def _send_signal(self, name: str, connections: Iterable[MachineConnection]) -> None:
        for connection in connections:
            connection.send(signal=name)


def _may_be_of_launcher(stream: str, line: bytes) -> bool:
    """Returns True if a line may come from a launcher: it is not blank, and of no rank.

    Lines of ranks begin with "[rank" if the run has several ranks.
    """
    return stream == "stderr" and line.strip() != b"" and not line.startswith(b"[rank")


def list_git_files() -> bytes | None:
    """Lists the files of the working folder that git tracks, or does not ignore.

    Returns:
        The names, each followed by a zero byte. None if git is not installed, the folder is not in
        a working tree, or git ignores the folder as a whole.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        result = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        return None
    if result.returncode != 0 or not result.stdout:
        return None
    return result.stdout
