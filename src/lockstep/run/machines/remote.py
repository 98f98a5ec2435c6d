"""The end of `lockstep run --hosts` on each machine: what ssh starts there.

It does what the first machine asks for (`hosts`), which comes as lines of JSON on its standard
input: it looks at what is here, lets the machines find each other, and then starts the launcher,
whose output it passes on. Answers are lines of its standard output that begin with `MARK` and the
nonce that it was started with; the last one says how the launcher ended.

    {"folder", "script", "here"}   this machine: versions, address, and what is missing; `here`: it
                              is the first one
    {"listen"}                the port at which the run will be served, which is free now
    {"reach"}                 why an address and port cannot be reached; empty: they can. And the
                              address of this machine that lies on the way
    {"start", "environment", "keep", "grace"}   starts `lockstep` with these arguments; its ranks
                              have `grace` seconds to end
    {"signal"}                passes a signal on
    an empty line             the first machine is still there

The end of its input, or silence for `SILENT_S`, means that the first machine or the way to it is
gone: the launcher is then ended, and with it the ranks, unless the run is to go on (`keep`) while
nobody sees what it prints. The launcher ends too when this process is killed. While it runs, an
answer of `ALIVE` tells the first machine now and then that this one is there.
"""

from __future__ import annotations

import contextlib
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
from lockstep.distributed.network import address_reaching, is_loopback_address, wait_until
from lockstep.run.start.zygote import die_with_parent

MARK = b"\x1elockstep "
"""Before an answer; \\x1e is the record separator, as in RFC 7464."""
ALIVE = {"alive": True}
HEARTBEAT_S = 2.0
SILENT_S = 12.0
_REACH_S = 5.0
_LONG = bytes(1 << 14)
"""Fills more than one packet, also where they are jumbo frames."""
_LOOK_S = 0.2
_KILL_AFTER_S = 110.0
"""A launcher that was asked to end and has not, beside what it gives its ranks."""
_PIECE = 4096
"""A pipe that select() calls writable takes so many bytes at once (PIPE_BUF, pipe(7))."""
_FINISH_S = 2.0
_WRITING = threading.Lock()
"""Held from select() to write() on standard output, where answers and the launcher's lines mix."""


def versions() -> dict[str, str]:
    """What must be the same on all machines of a run, by name."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Lockstep": __version__, "Python": python, "torch": torch}


def missing_here(folder: str, script: str | None) -> str:
    """Enters the run's folder; what is missing here, in words; empty: nothing."""
    try:
        os.chdir(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    there = script is None or Path(script).exists()
    return "" if there else f"{Path(folder, script or '')}: there is no such file"


def look(request: dict[str, Any]) -> dict[str, Any]:
    """This machine, as far as the first one must know it.

    `own` is the address of this machine that the first one has reached, `first` the one from which
    it came, empty where no ssh lies between them. `machine` tells machines apart that may have
    several names. `time` is what the clock says.
    """
    # SSH_CONNECTION: address and port of the client, then of the server; see ssh(1). On the first
    # machine it is that of the user's own login.
    connection = "" if request["here"] else os.environ.get("SSH_CONNECTION", "")
    client, _, server, _ = (connection or "   ").split(" ")
    if client == "UNKNOWN":  # ssh goes over a pipe
        client = server = ""
    if not server or is_loopback_address(server):
        server = address_reaching() or ""
    return {
        "versions": versions(),
        "missing": missing_here(request["folder"], request["script"]),
        "own": server,
        "first": client,
        "machine": f"{socket.gethostname()} {_boot_id()}",
        "time": time.time(),
    }


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def listen(port: int, instead: bool) -> tuple[socket.socket | None, dict[str, Any]]:
    """Listens at a port; where it is taken and `instead`, at any other."""
    ipv6 = socket.has_dualstack_ipv6()
    # All other machines connect at once, and nobody accepts.
    options: dict[str, Any] = {"dualstack_ipv6": ipv6, "backlog": 4096}
    if ipv6:
        options["family"] = socket.AF_INET6
    try:
        found = socket.create_server(("", port), **options)
    except OSError as error:
        return listen(0, False) if instead else (None, {"error": error.strerror})
    return found, {"port": found.getsockname()[1]}


def reach(address: str, port: int) -> dict[str, str]:
    """Why nothing can be reached there, in words; and the address of this machine on the way."""
    try:
        with socket.create_connection((address, port), timeout=_REACH_S) as connection:
            connection.sendall(_LONG)
            arrived = wait_until(lambda: not _unsent(connection), time.monotonic() + _REACH_S)
            own = str(connection.getsockname()[0])
    except OSError as error:
        return {"why": error.strerror or f"no answer within {_REACH_S:g} s", "own": ""}
    return {"why": "" if arrived else _TOO_LONG, "own": own}


_TOO_LONG = (
    "short messages arrive, long ones do not, as where the MTU of an interface is larger than that "
    "of the way"
)


def _unsent(connection: socket.socket) -> int:
    """Bytes that the other machine has not confirmed; nobody needs to read them there."""
    return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


class Input:
    """The lines that come; nothing is read further than to the end of the last one."""

    def __init__(self) -> None:
        self._unfinished = b""
        self._heard = time.monotonic()

    @property
    def silent(self) -> bool:
        """Whether nothing was heard for too long."""
        return time.monotonic() - self._heard > SILENT_S

    def lines(self, timeout: float) -> list[dict[str, Any]] | None:
        """The messages that come within so many seconds, or have come; None: there will be none."""
        if not select.select([0], [], [], timeout)[0]:
            return []
        data = os.read(0, 1 << 16)
        self._heard = time.monotonic()
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return [json.loads(line) for line in lines if line] if data else None


def answer(values: Mapping[str, object], output: int = 1) -> None:
    """Sends an answer; it may be that nobody is there any more."""
    with contextlib.suppress(OSError), _WRITING:
        os.write(output, _line(values))


def _line(values: Mapping[str, object]) -> bytes:
    return MARK + f"{sys.argv[1]} {json.dumps(values)}\n".encode()


def write(target: int, data: bytes) -> int:
    """How many bytes went at once; 0: there was no room within `_LOOK_S`."""
    with _WRITING if target == 1 else contextlib.nullcontext():
        writable = select.select([], [target], [], _LOOK_S)[1]
        return os.write(target, data[:_PIECE]) if writable else 0


def start(request: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Starts the launcher, which ends with this process."""
    parent = os.getpid()
    environment = {**os.environ, **request["environment"]}
    # What the environment of this Python has installed as commands, such as ninja.
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}"
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", *request["start"]],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: die_with_parent(parent),
    )


def forward_output(source: IO[bytes], target: int, gone: threading.Event) -> None:
    """Copies what the launcher prints; once nobody is there, reads it and throws it away."""
    while data := os.read(source.fileno(), 1 << 16):
        while data and not gone.is_set():
            try:
                data = data[write(target, data) :]
            except OSError:
                gone.set()


def watch(
    launcher: subprocess.Popen[bytes],
    requests: Input,
    messages: list[dict[str, Any]] | None,
    *,
    keep: bool,
    grace: float,
) -> int:
    """Does what the first machine asks for until the launcher has ended; its exit code."""
    gone, kill_at, answer_at = threading.Event(), float("inf"), 0.0
    copying = [
        threading.Thread(target=forward_output, args=(source, target, gone), daemon=True)
        for target, source in enumerate((launcher.stdout, launcher.stderr), 1)
    ]
    for thread in copying:
        thread.start()
    there = True
    while (code := launcher.poll()) is None:
        for message in messages or ():
            launcher.send_signal(signal.Signals[message["signal"]])
        if there:
            messages = requests.lines(_LOOK_S)
            there = messages is not None and not requests.silent
            if there:
                with contextlib.suppress(OSError):
                    if time.monotonic() >= answer_at and write(1, _line(ALIVE)):
                        answer_at = time.monotonic() + HEARTBEAT_S
                continue
            gone.set()
            if not keep:
                launcher.send_signal(signal.SIGTERM)
                kill_at = time.monotonic() + _KILL_AFTER_S + grace
        else:
            messages = None
            time.sleep(_LOOK_S)
        if time.monotonic() > kill_at:
            launcher.kill()
    for thread in copying:  # a process that the ranks have left behind may hold its output open
        thread.join(_FINISH_S)
    gone.set()
    return code if code >= 0 else 128 - code


def main() -> int:
    """Serves the first machine until the launcher has ended, or the first machine is gone."""
    requests, listener = Input(), None
    while (messages := requests.lines(SILENT_S)) is not None and not requests.silent:
        while messages:
            message = messages.pop(0)
            if "folder" in message:
                answer(look(message))
            elif "listen" in message:
                listener, found = listen(message["listen"], message["instead"])
                answer(found)
            elif "reach" in message:
                answer(reach(*message["reach"]))
            elif "start" in message:
                if listener is not None:
                    listener.close()
                # Not ignored, which the launcher would inherit.
                for number in (signal.SIGHUP, signal.SIGINT):
                    signal.signal(number, lambda *_: None)
                launcher = start(message)
                rules = {name: message[name] for name in ("keep", "grace")}
                code = watch(launcher, requests, messages, **rules)
                answer({"exit": code})
                return code
    return 1


if __name__ == "__main__":
    sys.exit(main())
