"""`lockstep run` as a command, on machines of its own (see `namespaces`)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from namespaces import THIS_MACHINE, Machine, enter, listening_in, until
from ranks import HANG_S, LEAVE_S, context

_CLONE_NEWUTS = 0x04000000


class Command:
    """`lockstep run` on a machine, with a host name of its own; what it prints is in a file.

    It is forked from a process that has imported torch; `fresh` executes Python, as a user does.
    """

    def __init__(
        self,
        machine: Machine,
        host: str,
        folder: Path,
        *arguments: str,
        token: str = "a token of the tests",
        fresh: bool = False,
    ) -> None:
        self.machine, self.host = machine, host
        self._said = folder / f"{host}.txt"
        setting = (machine.name, host, folder, self._said, {"LOCKSTEP_TOKEN": token})
        self._process = context.Process(target=_run, args=(*setting, arguments, fresh))
        self._process.start()
        self.pid = int(self._process.pid or 0)

    @property
    def said(self) -> str:
        """All that it and its ranks have printed so far."""
        return self._said.read_text() if self._said.exists() else ""

    @property
    def last_block(self) -> str:
        """From the launcher's last word on."""
        return self.said[self.said.rindex("\nlockstep: ") :]

    def until(self, text: str) -> None:
        """Waits until it has printed a text."""
        until(lambda: text in self.said or not self._process.is_alive())
        assert text in self.said, self.said

    def listening(self) -> set[tuple[str, int]]:
        """Addresses and ports at which anything on its machine listens."""
        return listening_in(Path(f"/proc/{self.pid}/net"))

    def send(self, number: int) -> None:
        """Sends the launcher, and nobody else, a signal."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Waits for its end; its exit code, or minus the signal's number."""
        self._process.join(HANG_S)
        assert self._process.exitcode is not None, self.said
        return self._process.exitcode

    def end(self) -> None:
        """Kills the launcher, if it still runs."""
        self._process.kill()
        self._process.join()
        self._process.close()


@contextlib.contextmanager
def commands() -> Iterator[Callable[..., Command]]:
    """Makes `Command`s; at the end nothing may run on their machines."""
    made: list[Command] = []

    def make(*args: Any, **options: Any) -> Command:
        made.append(Command(*args, **options))
        return made[-1]

    try:
        yield make
    finally:
        for command in made:
            command.end()
    for machine in {command.machine for command in made} - {THIS_MACHINE}:
        until(lambda machine=machine: not machine.processes(), LEAVE_S)


def _run(
    namespace: str | None,
    host: str,
    folder: Path,
    said: Path,
    environ: dict[str, str],
    arguments: tuple[str, ...],
    fresh: bool,
) -> None:
    enter(namespace)
    if namespace:
        assert ctypes.CDLL(None).unshare(_CLONE_NEWUTS) == 0
        socket.sethostname(host)
    os.chdir(folder)
    os.environ.update(environ)
    with said.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if fresh:
        os.execv(sys.executable, [sys.executable, "-m", "lockstep.cli.main", "run", *arguments])
    from lockstep.cli.main import main

    main(["run", *arguments], prog_name="lockstep")
