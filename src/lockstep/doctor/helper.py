"""The process that `lockstep doctor --hosts` starts on each machine by ssh.

It reads *requests* from its standard input, one JSON object per line, `{"ask": NAME, ...}`, and
sends an answer to each. `ANSWER_FUNCTIONS` has a function for each name, which returns the answer.
The process ends when its input ends.

After the request "serve", it also listens on a port, so that the processes on other machines can
measure the link to it. They must know a token. A message on such a connection is its length in 8
bytes, followed by its bytes; it is acknowledged by one byte.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import secrets
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from lockstep import doctor
from lockstep.doctor import data
from lockstep.machine.network import interface_of, resolve
from lockstep.run.machines.helper import describe_machine, listen, send_answer

TOKEN_SIZE = 32  # bytes
CONNECT_TIMEOUT_S = 4.0
ANSWER_TIMEOUT_S = 4.0
SERVER_TIMEOUT_S = 60.0
MAX_CONNECTIONS = 256  # at the same time; this process may not be allowed to open more files
NUM_PINGS = 9
MESSAGE_SIZES = (2**14, 2**20, 2**24)
"""The sizes in bytes of the messages with which the bandwidth is measured. The first fills ten
packets; a longer one is sent if it will not take long."""
MAX_MESSAGE_S = 1.0
RECEIVE_SIZE = 1 << 16  # bytes
ACKNOWLEDGEMENT = b"+"


def facts(
    folder: str, address_of: dict[str, str], files: dict[str, str], fix: bool, seconds: float
) -> dict[str, Any]:
    """Runs all checks of `lockstep doctor` on this machine, and reads the files to compare.

    Args:
        folder: the folder for checkpoints.
        address_of: the address or host name of each machine, by the name that the user gave it:
            `{"gpu1": "10.0.0.5"}`.
        files: the files to compare: `script`, a file, and `data`, a file or folder.
        fix: whether to repair what can be repaired.
        seconds: how long everything may take. Facts that take longer are not known, see
            `doctor.run_within`.

    Returns:
        `checks`, the facts of each check; `fixed`, a line about each repair; `script` and `data`,
        the descriptions of these files; `resolved`, the addresses of each machine.
    """
    readers: dict[str, Callable[[], Any]] = {}
    if "script" in files:
        readers["script"] = partial(_digest, Path(files["script"]))
    if "data" in files:
        readers["data"] = partial(data.gather, Path(files["data"]))
    readers["resolved"] = partial(_resolve_all, address_of)

    # Both may take as long as `seconds`, so the readers run in another thread meanwhile.
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(doctor.run_within, seconds, readers)
        checks, fixed = doctor.examine(Path(folder), repair=fix, deadline_s=seconds)
        return {"checks": checks, "fixed": fixed, **reading.result()}


def _digest(file: Path) -> dict[str, Any] | None:
    """Returns the first digits of the digest of a file, or None if there is no such file."""
    if not file.is_file():
        return None
    return {"digest": hashlib.sha256(file.read_bytes()).hexdigest()[:8]}


def _resolve_all(address_of: dict[str, str]) -> dict[str, Any]:
    return {name: resolve(address) for name, address in address_of.items()}


def serve(token: str) -> dict[str, Any]:
    """Listens for processes that know the token, until this process ends.

    Returns:
        `port`, or `error` if it cannot listen.
    """
    listener, port_or_error = listen(0, any_port_if_taken=False)
    if listener is not None:
        threading.Thread(target=_accept, args=(listener, token.encode()), daemon=True).start()
    return port_or_error


def _accept(listener: socket.socket, token: bytes) -> None:
    """Accepts connections until this process ends, and serves each of them in a thread."""
    while True:
        connection, _ = listener.accept()
        thread = threading.Thread(target=acknowledge, args=(connection, token), daemon=True)
        thread.start()


def acknowledge(connection: socket.socket, token: bytes) -> None:
    """Acknowledges each message on a connection, and closes it at its end.

    A connection that does not begin with the token is closed at once.
    """
    with connection:
        connection.settimeout(SERVER_TIMEOUT_S)
        try:
            if not secrets.compare_digest(receive(connection, TOKEN_SIZE), token):
                return

            # Each message begins with its length, in 8 bytes. When the other end closes the
            # connection, `receive` raises an OSError, which ends the loop.
            while True:
                length = int.from_bytes(receive(connection, 8))
                if length == 0:  # no message is empty, so this comes from another program
                    return

                _receive_and_discard(connection, length)
                connection.sendall(ACKNOWLEDGEMENT)
        except OSError:
            return


def _receive_and_discard(connection: socket.socket, size: int) -> None:
    """Receives `size` bytes in pieces, so that a long message takes little memory."""
    remaining = size
    while remaining > 0:
        piece_size = min(remaining, RECEIVE_SIZE)
        receive(connection, piece_size)
        remaining -= piece_size


def receive(connection: socket.socket, size: int) -> bytes:
    """Receives exactly `size` bytes.

    Raises:
        ConnectionResetError: the other end closed the connection before.
    """
    data = b""
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received:
            raise ConnectionResetError
        data += received
    return data


def unreachable(places: dict[str, tuple[str, int]]) -> dict[str, str]:
    """Tries to connect to other machines, and returns those that cannot be reached.

    Args:
        places: the address and port of each machine, by its name.

    Returns:
        The reason for each machine that could not be reached, by its name.
    """

    def try_to_connect(place: tuple[str, int]) -> str:
        """Returns why a machine cannot be reached, or an empty string if it can."""
        address, port = place
        try:
            socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return _describe(error, CONNECT_TIMEOUT_S)
        return ""

    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        problems = list(pool.map(try_to_connect, places.values()))
    return {name: problem for name, problem in zip(places, problems, strict=True) if problem}


def _describe(error: OSError, timeout_s: float) -> str:
    """Returns the system's text for an error, or a text on the timeout, which has none."""
    return error.strerror or f"no answer within {timeout_s:g} s"


def measure(address: str, port: int, token: str) -> dict[str, Any]:
    """Measures the link to another machine.

    Returns:
        `latency_s`, `bandwidth` (bytes per second) and `interface`; only `error` if the machine
        cannot be reached; or `latency_s` and `stalled` if only short messages arrive there.
    """
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S)
    except OSError as error:
        return {"error": _describe(error, CONNECT_TIMEOUT_S)}

    with connection:
        interface = interface_of(connection.getsockname()[0])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.sendall(token.encode())

            # The first message of one byte is not measured, as the other end starts a thread first.
            _time_round_trip(connection, size=1)
            round_trips_s = [_time_round_trip(connection, size=1) for _ in range(NUM_PINGS)]
        except OSError as error:
            return {"error": _describe(error, ANSWER_TIMEOUT_S)}

        latency_s = statistics.median(round_trips_s) / 2
        bandwidth = _measure_bandwidth(connection, latency_s)

    if bandwidth is None:  # no long message was acknowledged
        return {"latency_s": latency_s, "stalled": True}
    return {"latency_s": latency_s, "bandwidth": bandwidth, "interface": interface}


def _time_round_trip(connection: socket.socket, size: int) -> float:
    """Sends a message of `size` bytes, and returns the seconds until it was acknowledged."""
    begin = time.perf_counter()
    connection.sendall(size.to_bytes(8) + bytes(size))
    receive(connection, 1)
    return time.perf_counter() - begin


def _measure_bandwidth(connection: socket.socket, latency_s: float) -> float | None:
    """Measures the bandwidth of a connection with messages of growing size.

    Args:
        connection: the connection to the other machine.
        latency_s: the seconds that a short message takes in one direction.

    Returns:
        The bytes per second for the longest messages that were acknowledged; None if none was.
    """
    bandwidth: float | None = None
    for size in MESSAGE_SIZES:
        takes_too_long = bandwidth is not None and size / bandwidth > MAX_MESSAGE_S
        if takes_too_long:
            break

        try:
            # The shorter of two times is used, as a busy machine may have delayed one of them.
            seconds = min(_time_round_trip(connection, size), _time_round_trip(connection, size))
        except OSError:  # not acknowledged in time: the result of the shorter messages is kept
            break

        # In these seconds the message was sent, and the acknowledgement came back, which takes one
        # latency. The measured latency may be too large; it counts for half of the time at most.
        acknowledgement_s = min(latency_s, seconds / 2)
        sending_s = seconds - acknowledgement_s
        bandwidth = size / sending_s

    return bandwidth


def write(path: str, text: str) -> dict[str, Any]:
    """Writes a small file, for other machines to see whether they have the same folder.

    If the folder does not exist yet, the file is written into the nearest existing folder above: in
    the file system in which the run would create the missing folders. The file is removed when this
    process ends.

    Returns:
        `error`, the reason why it could not be written, or None; and on success also `path`, where
        it was written.
    """
    folder = Path(path).parent
    while not os.path.isdir(folder):
        folder = folder.parent

    file = folder / Path(path).name
    atexit.register(file.unlink, missing_ok=True)  # before the write, which may leave a part
    try:
        file.write_text(text)
    except OSError as error:
        return {"error": error.strerror}
    return {"error": None, "path": str(file)}


def read(path: str) -> dict[str, Any]:
    """Reads a small file.

    Returns:
        `text`, the content of the file, or None if it cannot be read.
    """
    try:
        return {"text": Path(path).read_text()}
    except OSError:
        return {"text": None}


ANSWER_FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "look": lambda **request: describe_machine(request),
    "time": lambda: {"time": time.time()},
    "facts": facts,
    "serve": serve,
    "measure": measure,
    "reach": unreachable,
    "write": write,
    "read": read,
}


def main() -> None:
    """Answers the requests on standard input."""
    # Answers are written to the original stdout. Output of libraries goes to stderr instead.
    output = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answer_function = ANSWER_FUNCTIONS[request.pop("ask")]
        send_answer(answer_function(**request), output)


if __name__ == "__main__":
    main()
