"""The helper process that `lockstep run --hosts` starts on each machine, by ssh.

It serves the *first machine*, the one on which the user started the run: it describes its machine,
tests connections to other machines, and then starts the *launcher*, whose output it passes on.
*Requests* are JSON lines on its standard input. *Answers* are lines on its standard output that
begin with ANSWER_MARK and a *nonce*, a random text that is the argument of this process:

    {"folder", "script", "here"}
        answered with a description of this machine: versions, address, and what is missing; `here`
        says that it is the first machine itself
    {"listen", "any_port_if_taken"}
        listens at a port; answered with the port
    {"reach"}
        tests the connection to an address and port; answered with the reason why it fails, or
        empty, and this machine's address on it
    {"start", "environment", "keep", "grace"}
        starts the launcher, a module with its arguments; its ranks have `grace` seconds to end
    {"signal"}
        sends a signal to the launcher
    an empty line
        a heartbeat: the first machine is still there

The last answer has the launcher's exit code. While the launcher runs, ALIVE is sent as a heartbeat.

When the input ends, or is silent for SILENCE_TIMEOUT_S, the first machine or the connection to it
is lost. Then the launcher is ended, and with it the ranks, unless `keep` says that the run goes on
while nobody sees its output. The launcher also ends when this process is killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from lockstep import __version__
from lockstep.errors import EXIT_SIGNAL
from lockstep.machine.network import (
    boot_id,
    default_route_address,
    is_loopback_address,
    wait_until,
)
from lockstep.run.start.parent_death import die_with_parent

ANSWER_MARK = b"\x1elockstep "
"""The beginning of an answer; \\x1e is the record separator, as in RFC 7464."""
ALIVE = {"alive": True}
HEARTBEAT_S = 2.0
SILENCE_TIMEOUT_S = 12.0
CONNECT_TIMEOUT_S = 5.0
LONG_MESSAGE = bytes(1 << 14)
"""A message that fills more than one packet, even on a network with jumbo frames."""
MESSAGE_LOST = (
    "short messages arrive, long ones do not, as where the MTU of an interface is larger than that "
    "of the way"
)
POLL_INTERVAL_S = 0.2
KILL_LAUNCHER_AFTER_S = 110.0
"""How long after it was asked to end a launcher is killed, in addition to the time of its ranks."""
READ_BYTES = 1 << 16
WRITE_BYTES = 4096
"""The number of bytes that a pipe accepts at once when select() reports it as writable (PIPE_BUF,
pipe(7))."""
LAST_OUTPUT_TIMEOUT_S = 2.0

STDIN = 0
STDOUT = 1
STDERR = 2
STDOUT_LOCK = threading.Lock()
"""The lock that is held from select() to write() on standard output, so that answers and the
launcher's output are not mixed."""


def versions() -> dict[str, str]:
    """Returns the versions that must be the same on all machines of a run, by name."""
    try:
        torch_version = version("torch")  # without importing it, which takes long
    except PackageNotFoundError:
        torch_version = "none"
    major, minor, _ = platform.python_version_tuple()
    return {"Lockstep": __version__, "Python": f"{major}.{minor}", "torch": torch_version}


def describe_machine(request: dict[str, Any]) -> dict[str, Any]:
    """Enters the run's folder, and describes this machine for the first one.

    Args:
        request: `folder`, the run's folder; `script`, the path of the script or None for a module;
            and `here`, whether this is the first machine itself.

    Returns:
        A dictionary with these keys:

        - `versions`: the versions that must be the same everywhere.
        - `missing`: a text on what is missing; empty if nothing is.
        - `own_address`: the address of this machine that ssh has reached, or else that of its
          default route.
        - `address_ssh_came_from`: the address of the first machine, or of a jump host; empty
          without ssh.
        - `machine`: a text that identifies this machine, which may have several names.
        - `time`: its clock.
    """
    client_address, server_address = _addresses_of_ssh(is_first_machine=request["here"])
    if server_address and not is_loopback_address(server_address):
        own_address = server_address
    else:
        own_address = default_route_address() or ""
    return {
        "versions": versions(),
        "missing": _enter_folder(request["folder"], request["script"]),
        "own_address": own_address,
        "address_ssh_came_from": client_address,
        "machine": f"{socket.gethostname()} {boot_id()}",
        "time": time.time(),
    }


def _addresses_of_ssh(*, is_first_machine: bool) -> tuple[str, str]:
    """Returns the address of the ssh client, and that of this machine which the client reached.

    Both are empty if this process was not started by ssh over a network.

    Args:
        is_first_machine: True on the machine that starts the run. There SSH_CONNECTION is about the
            user's own login, and is not used.
    """
    ssh_connection = os.environ.get("SSH_CONNECTION", "")
    if not ssh_connection or is_first_machine:
        return "", ""

    # The address and port of the client, then of the server; see ssh(1).
    client_address, _, server_address, _ = ssh_connection.split(" ")
    was_connected_by_pipe = client_address == "UNKNOWN"
    return ("", "") if was_connected_by_pipe else (client_address, server_address)


def _enter_folder(folder: str, script: str | None) -> str:
    """Enters the run's folder.

    Returns:
        A text on what is missing, or an empty string if the folder and the script exist.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if script is not None and not Path(script).exists():
        return f"{Path(folder, script)}: there is no such file"
    return ""


def listen(port: int, any_port_if_taken: bool) -> tuple[socket.socket | None, dict[str, Any]]:
    """Listens at a port on all interfaces.

    Args:
        port: the port; 0 for any free port.
        any_port_if_taken: whether to listen at another port if this one is in use.

    Returns:
        The socket, or None if nothing can listen at the port; and the answer to the first machine,
        with the port or the error.
    """
    has_ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_ipv6 else socket.AF_INET
    try:
        listener = socket.create_server(
            ("", port),
            family=family,
            dualstack_ipv6=has_ipv6,
            # All other machines connect at once, only to test whether they can. Their connections
            # are never accepted, and stay in the backlog.
            backlog=4096,
        )
    except OSError as error:
        # Another port helps if this one is in use, but not against any other error.
        if any_port_if_taken and error.errno == errno.EADDRINUSE:
            return listen(0, any_port_if_taken=False)
        return None, {"error": error.strerror}

    return listener, {"port": listener.getsockname()[1]}


def try_connection(address: str, port: int) -> dict[str, str]:
    """Tests whether another machine can be reached, which listens for this.

    A message of several packets is sent. If the MTU of an interface, its largest packet, is larger
    than the network carries, a connection can be opened, but its long packets do not arrive.

    Returns:
        `why`, the reason why it cannot be reached, or empty; and `own`, the address of this machine
        on the connection.
    """
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as connection:
            connection.sendall(LONG_MESSAGE)  # returns before anything has arrived

            # Wait until the other machine's kernel has confirmed every byte.
            has_arrived = wait_until(
                lambda: _unconfirmed_bytes(connection) == 0, time.monotonic() + CONNECT_TIMEOUT_S
            )
            own_address = str(connection.getsockname()[0])
    except OSError as error:
        # `strerror` is None for a timeout.
        reason = error.strerror or f"no answer within {CONNECT_TIMEOUT_S:g} s"
        return {"why": reason, "own": ""}

    why = "" if has_arrived else MESSAGE_LOST
    return {"why": why, "own": own_address}


def _unconfirmed_bytes(connection: socket.socket) -> int:
    """Returns the number of bytes whose arrival the other machine has not confirmed yet."""
    count = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(count, sys.byteorder)


class RequestReader:
    """Reads the requests of the first machine from standard input."""

    def __init__(self) -> None:
        self._unfinished_line = b""
        self._last_heard = time.monotonic()

    @property
    def is_silent(self) -> bool:
        """True if nothing has been heard of the first machine for too long."""
        return time.monotonic() - self._last_heard > SILENCE_TIMEOUT_S

    def receive(self, timeout: float) -> list[dict[str, Any]] | None:
        """Returns the requests that have arrived, after waiting for up to `timeout` seconds.

        Returns:
            The requests; empty if there were none, or only heartbeats; None if the input has ended.
        """
        readable, _, _ = select.select([STDIN], [], [], timeout)
        if not readable:
            return []

        data = os.read(STDIN, READ_BYTES)
        self._last_heard = time.monotonic()

        if not data:
            return None

        received = self._unfinished_line + data
        *lines, unfinished_line = received.split(b"\n")
        self._unfinished_line = unfinished_line
        return [json.loads(line) for line in lines if line]  # an empty line is a heartbeat


def send_answer(values: Mapping[str, object], output: int = STDOUT) -> None:
    """Sends an answer to the first machine, if it is still there."""
    with contextlib.suppress(OSError), STDOUT_LOCK:
        os.write(output, _encode_answer(values))


def _encode_answer(values: Mapping[str, object]) -> bytes:
    nonce = sys.argv[1]
    return ANSWER_MARK + f"{nonce} {json.dumps(values)}\n".encode()


def write_if_possible(target: int, data: bytes) -> int:
    """Writes the first bytes of `data` to a pipe, if the pipe accepts any.

    Returns:
        The number of bytes written; 0 if there was no room within POLL_INTERVAL_S.
    """
    lock = STDOUT_LOCK if target == STDOUT else contextlib.nullcontext()
    with lock:
        _, writable, _ = select.select([], [target], [], POLL_INTERVAL_S)
        if not writable:
            return 0
        return os.write(target, data[:WRITE_BYTES])


def start_launcher(request: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Starts the launcher. The kernel ends it if this process, its parent, ends before it."""
    parent_pid = os.getpid()
    environment = {**os.environ, **request["environment"]}

    # Commands that are installed with this Python, such as ninja, must be found.
    commands_folder = Path(sys.executable).parent
    environment["PATH"] = f"{commands_folder}:{environment.get('PATH', os.defpath)}"

    return subprocess.Popen(
        [sys.executable, "-m", *request["start"]],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: die_with_parent(parent_pid),
    )


def forward_output(source: IO[bytes], target: int, nobody_reads: threading.Event) -> None:
    """Copies the launcher's output to the output of this process. It runs in a thread.

    Once nobody reads the output any more, it is read and dropped, so that the launcher does not
    block.

    Args:
        source: the launcher's standard output or error.
        target: descriptor of this process's own standard output or error.
        nobody_reads: set when a write fails, here or in the other thread of this kind.
    """
    while data := os.read(source.fileno(), READ_BYTES):  # empty at the end of the output
        try:
            _write_while_read(target, data, nobody_reads)
        except OSError:
            nobody_reads.set()


def _write_while_read(target: int, data: bytes, nobody_reads: threading.Event) -> None:
    """Writes data to a pipe, piece by piece; drops the rest once nobody reads it.

    Raises:
        OSError: the reading end of the pipe is closed.
    """
    while data and not nobody_reads.is_set():
        # If the pipe accepts nothing, this waits for a moment and returns 0.
        num_written = write_if_possible(target, data)
        data = data[num_written:]


def _start_forwarding_output(
    launcher: subprocess.Popen[bytes], nobody_reads: threading.Event
) -> list[threading.Thread]:
    """Starts two threads, which copy the launcher's standard output and error to those here.

    Args:
        launcher: the process of the launcher.
        nobody_reads: see `forward_output`.
    """
    threads = []
    for target, source in ((STDOUT, launcher.stdout), (STDERR, launcher.stderr)):
        thread = threading.Thread(
            target=forward_output, args=(source, target, nobody_reads), daemon=True
        )
        thread.start()
        threads.append(thread)
    return threads


def watch_launcher(
    launcher: subprocess.Popen[bytes],
    reader: RequestReader,
    requests: list[dict[str, Any]],
    *,
    keep_running: bool,
    shutdown_timeout_s: float,
) -> int:
    """Passes signals and output on until the launcher has ended.

    Args:
        launcher: the process of the launcher.
        reader: reads further requests.
        requests: requests that have already arrived, all of them like `{"signal": "SIGTERM"}`.
        keep_running: whether the launcher goes on if the first machine is lost.
        shutdown_timeout_s: the seconds that the ranks get to end.

    Returns:
        The launcher's exit code, or `EXIT_SIGNAL` + N if signal N ended it.
    """
    nobody_reads = threading.Event()
    threads = _start_forwarding_output(launcher, nobody_reads)

    next_heartbeat = 0.0
    exit_code = launcher.poll()  # None while it is running
    while exit_code is None:
        for request in requests:
            launcher.send_signal(signal.Signals[request["signal"]])

        received = reader.receive(POLL_INTERVAL_S)
        if received is None or reader.is_silent:  # the first machine is lost
            nobody_reads.set()
            exit_code = _wait_without_first_machine(
                launcher, keep_running=keep_running, shutdown_timeout_s=shutdown_timeout_s
            )
            break
        requests = received  # the next turn of the loop passes them on

        if time.monotonic() >= next_heartbeat:
            with contextlib.suppress(OSError):
                if write_if_possible(STDOUT, _encode_answer(ALIVE)):
                    next_heartbeat = time.monotonic() + HEARTBEAT_S
        exit_code = launcher.poll()

    # The wait is limited, as a process that the ranks have left behind may hold the output open.
    for thread in threads:
        thread.join(LAST_OUTPUT_TIMEOUT_S)
    nobody_reads.set()  # from now on the threads drop what they read

    if exit_code < 0:
        signal_number = -exit_code
        return EXIT_SIGNAL + signal_number
    return exit_code


def _wait_without_first_machine(
    launcher: subprocess.Popen[bytes], *, keep_running: bool, shutdown_timeout_s: float
) -> int:
    """Waits until the launcher has ended, once the first machine is lost; returns its exit code.

    No requests can arrive any more, and no answers can be sent. The arguments are those of
    `watch_launcher`.
    """
    if keep_running:
        return launcher.wait()

    launcher.send_signal(signal.SIGTERM)
    try:
        return launcher.wait(KILL_LAUNCHER_AFTER_S + shutdown_timeout_s)
    except subprocess.TimeoutExpired:
        launcher.kill()
        return launcher.wait()


def _ignore_in_this_process(*signals: signal.Signals) -> None:
    """Ignores signals by a handler that does nothing, as the launcher would inherit SIG_IGN."""
    for number in signals:
        signal.signal(number, lambda *_: None)


def main() -> int:
    """Handles requests until the launcher has ended, or the first machine is lost."""
    reader = RequestReader()
    listener: socket.socket | None = None
    while True:
        requests = reader.receive(SILENCE_TIMEOUT_S)
        if requests is None or reader.is_silent:
            return 1

        while requests:
            request = requests.pop(0)
            if "folder" in request:
                send_answer(describe_machine(request))
            elif "listen" in request:
                listener, answer = listen(request["listen"], request["any_port_if_taken"])
                send_answer(answer)
            elif "reach" in request:
                address, port = request["reach"]
                send_answer(try_connection(address, port))
            elif "start" in request:
                if listener is not None:
                    listener.close()  # the launcher needs the port
                # The requests after this one are for the launcher.
                return _run_launcher(request, reader, early_requests=requests)


def _run_launcher(
    request: dict[str, Any], reader: RequestReader, early_requests: list[dict[str, Any]]
) -> int:
    """Starts the launcher, waits for its end, and answers with its exit code.

    Args:
        request: the request to start it, see `MachineConnection.start_launcher`.
        reader: reads further requests.
        early_requests: requests that have already arrived, each a signal for the launcher.

    Returns:
        The exit code.
    """
    _ignore_in_this_process(signal.SIGHUP, signal.SIGINT)
    launcher = start_launcher(request)
    exit_code = watch_launcher(
        launcher,
        reader,
        early_requests,
        keep_running=request["keep"],
        shutdown_timeout_s=request["grace"],
    )
    send_answer({"exit": exit_code})
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
