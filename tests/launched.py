"""`lockstep` as a command, forked from a process that has imported torch.

Importing it takes two seconds of a core, in each of the hundreds of commands that the tests run.
What is told from how the command itself was started (its name, its terminal) is tested with
`subprocess`.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ranks import HANG_S, context

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000
"""See unshare(2) and mount(2)."""


class Launched:
    """`lockstep ARGUMENTS` in a folder; what it prints is read from `stdout`, as text.

    Args:
        arguments: what stands behind `lockstep`.
        cwd: the folder.
        env: its variables; ours if left out.
        typed: its standard input.
        first: what is called in its process before anything else, such as `in_control_group`.
        merged: what it prints to its standard output is in `said` as well, and not in `stdout`.
        fresh: executes Python, as a user does.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: dict[str, str] | None = None,
        typed: str = "",
        first: Sequence[Callable[[], object]] = (),
        merged: bool = False,
        fresh: bool = False,
    ) -> None:
        standard_input, output, errors = os.pipe(), os.pipe(), os.pipe()
        theirs = [Connection(end) for end in (standard_input[0], output[1], errors[1])]
        setting = (dict(env or os.environ), theirs, first, merged, fresh)
        self._process = context.Process(target=_main, args=(list(arguments), cwd, *setting))
        self._process.start()
        for connection in theirs:
            connection.close()
        self.pid = int(self._process.pid or 0)
        self.stdout = os.fdopen(output[0], encoding="utf-8", errors="backslashreplace")
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(errors[0],))
        self._reader.start()
        with open(standard_input[1], "w") as file:
            file.write(typed)

    def _read(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="backslashreplace") as file:
            for line in file:
                self._said.append(line)

    @property
    def said(self) -> str:
        """What it has printed to its standard error so far."""
        return "".join(self._said)

    @property
    def last_block(self) -> str:
        """From the launcher's last word on."""
        return self.said[self.said.rindex("\nlockstep: ") :]

    def until(self, text: str) -> None:
        """Waits until it has said a text."""
        limit = time.monotonic() + HANG_S
        while text not in self.said and self._reader.is_alive() and time.monotonic() < limit:
            time.sleep(0.02)
        assert text in self.said, self.said

    def send_signal(self, number: int) -> None:
        """Sends it, and nobody else, a signal."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it, and nobody else, at once."""
        self._process.kill()

    def wait(self, timeout: float = HANG_S) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; None: it still runs.

        All that it has said is there then.
        """
        self._process.join(timeout)
        if self._process.exitcode is not None:
            self._reader.join(timeout)
        return self._process.exitcode

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Waits for its end, and for that of all that it says."""
        stdout = self.stdout.read()
        code = self.wait()
        assert code is not None, f"still running, {HANG_S} s after it closed its output"
        return subprocess.CompletedProcess("lockstep", code, stdout, self.said)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._reader.join()
        self.stdout.close()


def launch(arguments: Sequence[str], cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """`lockstep ARGUMENTS` to its end."""
    with Launched(arguments, cwd=cwd, **options) as process:
        return process.finish()


def _main(
    arguments: list[str],
    cwd: Path,
    environ: dict[str, str],
    streams: list[Connection],
    first: Sequence[Callable[[], object]],
    merged: bool,
    fresh: bool,
) -> None:
    multiprocessing.current_process().name = "MainProcess"  # as in a command
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` in front of the tests ignores it
    for prepare in first:
        prepare()
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    if merged:
        os.dup2(2, 1)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put /dev/null in its place
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    if fresh:
        os.execv(sys.executable, [sys.executable, "-m", "lockstep.cli.main", *arguments])
    sys.argv = ["lockstep", *arguments]
    from lockstep.cli.main import main

    main(arguments, prog_name="lockstep")


# What to call first, by functools.partial


def in_control_group(folder: Path) -> None:
    """It and its children are in the control group of a folder."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def ignoring(number: int) -> None:
    """It inherits a signal as ignored, as under nohup."""
    signal.signal(number, signal.SIG_IGN)


def with_files(count: int) -> None:
    """It may have so many files open (`ulimit -n`)."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def with_shared_memory(size: str) -> None:
    """It and its children have a /dev/shm of their own, such as `4k`; this takes root."""
    with_disk(Path("/dev/shm"), f"size={size}")


def with_disk(folder: Path, options: str) -> None:
    """It and its children find a disk of their own (tmpfs(5)) at a folder; this takes root."""
    libc = ctypes.CDLL(None)
    assert libc.unshare(_CLONE_NEWNS) == 0
    assert libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
    assert libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, options.encode()) == 0
