"""The end of `lockstep doctor --hosts` on each machine: what ssh starts there.

Requests are lines of JSON on its standard input, `{"ask": NAME, ...}`; each gets one answer. It
ends with its input. Meanwhile it listens, for machines that know the token.
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
from lockstep.distributed.network import interface_of, resolve
from lockstep.doctor import data
from lockstep.run.machines.remote import describe_machine, listen, send_answer

_TOKEN = 32
_CONNECT_S, _ANSWER_S, _MEASURED_S = 4.0, 4.0, 1.0
_PINGS = 9
_AT_ONCE = 256
"""Connections; more may be more than there are files."""
_SIZES = (2**14, 2**20, 2**24)
"""Bytes of what is sent; the first fills ten packets, the others follow where that is soon done."""
_SECONDS_UP_TO = 60.0


def facts(
    folder: str, names: dict[str, str], files: dict[str, str], fix: bool, seconds: float
) -> dict[str, Any]:
    """What this machine has, and what it makes of the others' names; mends before what it can.

    What is not known after so many seconds is left out, see `doctor.within`.
    """
    look_at = {"script": _digest, "data": data.gather}
    others: dict[str, Callable[[], Any]]
    others = {name: partial(look_at[name], Path(file)) for name, file in files.items()}
    others["resolved"] = lambda: {name: resolve(address) for name, address in names.items()}
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(doctor.within, seconds, others)
        checks, fixed = doctor.look(Path(folder), mend=fix, deadline_s=seconds)
        return {"checks": checks, "fixed": fixed, **told.result()}


def _digest(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    return {"digest": hashlib.sha256(file.read_bytes()).hexdigest()[:8]}


def serve(token: str) -> dict[str, Any]:
    """Answers those that send the token, until this process ends."""
    listener, found = listen(0, any_port_if_taken=False)
    if listener is None:
        return found
    threading.Thread(target=_accept, args=(listener, token.encode()), daemon=True).start()
    return found


def _accept(listener: socket.socket, token: bytes) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, token), daemon=True).start()


def _answer(connection: socket.socket, token: bytes) -> None:
    """Sends a byte back for each message: its length in 8 bytes, and that many bytes."""
    with connection:
        connection.settimeout(_SECONDS_UP_TO)
        try:
            if not secrets.compare_digest(_receive(connection, _TOKEN), token):
                return
            while size := int.from_bytes(_receive(connection, 8)):
                while size:
                    size -= len(_receive(connection, min(size, 1 << 16)))
                connection.sendall(b"+")
        except OSError:
            return


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


def reach(places: dict[str, tuple[str, int]]) -> dict[str, str]:
    """Which of many machines cannot be connected to, and why."""

    def attempt(place: tuple[str, int]) -> str:
        try:
            socket.create_connection((place[0], place[1]), timeout=_CONNECT_S).close()
        except OSError as error:
            return error.strerror or f"no answer within {_CONNECT_S:g} s"
        return ""

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = zip(places, pool.map(attempt, places.values()), strict=True)
        return {name: why for name, why in found if why}


def measure(address: str, port: int, token: str) -> dict[str, Any]:
    """How far another machine is; `error`: it is not reached; `stalled`: by no long message."""
    try:
        connection = socket.create_connection((address, port), timeout=_CONNECT_S)
    except OSError as error:
        return {"error": error.strerror or f"no answer within {_CONNECT_S:g} s"}
    with connection:
        interface = interface_of(connection.getsockname()[0])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_ANSWER_S)

        def send(size: int) -> float:
            begun = time.perf_counter()
            connection.sendall(size.to_bytes(8) + bytes(size))
            _receive(connection, 1)
            return time.perf_counter() - begun

        try:
            connection.sendall(token.encode())
            send(1)
            latency = statistics.median(send(1) for _ in range(_PINGS)) / 2
        except OSError as error:
            return {"error": error.strerror or f"no answer within {_ANSWER_S:g} s"}
        bandwidth = 0.0
        try:
            for size in _SIZES:
                if bandwidth and size / bandwidth > _MEASURED_S:
                    break
                seconds = min(send(size), send(size))  # a busy machine may have disturbed one
                bandwidth = size / max(seconds - latency, seconds / 2)
        except OSError:
            if not bandwidth:
                return {"latency_s": latency, "stalled": True}
    return {"latency_s": latency, "bandwidth": bandwidth, "interface": interface}


def write(path: str, text: str) -> dict[str, Any]:
    """Writes a small file, which goes with this process.

    Where there is no such folder yet: to where it would be made.
    """
    folders = (folder for folder in Path(path).parents if os.path.isdir(folder))
    place = next(folders) / Path(path).name
    atexit.register(place.unlink, missing_ok=True)
    try:
        place.write_text(text)
    except OSError as error:
        return {"error": error.strerror}
    return {"error": None, "path": str(place)}


def read(path: str) -> dict[str, Any]:
    """What is in a small file; None: it is not there."""
    try:
        return {"text": Path(path).read_text()}
    except OSError:
        return {"text": None}


_ASKED: dict[str, Callable[..., dict[str, Any]]] = {
    "look": lambda **request: describe_machine(request),
    "time": lambda: {"time": time.time()},
    "facts": facts,
    "serve": serve,
    "measure": measure,
    "reach": reach,
    "write": write,
    "read": read,
}


def main() -> None:
    """Answers until there is nobody who asks."""
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not stand among the answers
    for line in sys.stdin:
        request = json.loads(line)
        send_answer(_ASKED[request.pop("ask")](**request), output)


if __name__ == "__main__":
    main()
