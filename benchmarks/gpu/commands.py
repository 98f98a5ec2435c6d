"""Commands that a stage starts, such as `lockstep run`, each with a limit."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

PROGRAMS = Path(__file__).resolve().parent / "programs"
MIN_CORES_FOR_COMMANDS_AT_ONCE = 8


@dataclass(frozen=True)
class Finished:
    """What a command came to."""

    exit_code: int | None
    """None: it was not over in time, and has been ended with all that it had started."""
    seconds: float
    stdout: str
    stderr: str
    ended_at: float
    """In seconds since the epoch."""
    notice_at: float | None
    """When its standard error first had what was looked for, in seconds since the epoch."""


class Reader:
    """Reads a stream of a command in a thread, and notes when a pattern first appears in it."""

    def __init__(self, stream: IO[str], notice: str | None = None) -> None:
        self.text = ""
        self.notice_at: float | None = None
        self._notice = notice
        self._stream = stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            self.text += line
            if self._notice and self.notice_at is None and re.search(self._notice, line):
                self.notice_at = time.time()

    def finish(self) -> str:
        """All that was read; a process that cannot be ended may hold the stream open."""
        self._thread.join(timeout=5.0)
        return self.text


def lockstep(
    arguments: Sequence[str], folder: Path, limit: float, notice: str | None = None
) -> Finished:
    """Runs `lockstep ARGUMENTS` in a folder, for at most `limit` seconds.

    Args:
        arguments: of the command.
        folder: its working directory.
        limit: after so many seconds it is ended, with all that it has started.
        notice: a regular expression for a line of its standard error; it is noted when that comes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "lockstep", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    stdout = Reader(process.stdout)
    stderr = Reader(process.stderr, notice)
    exit_code: int | None = None
    try:
        exit_code = process.wait(limit)
    except subprocess.TimeoutExpired:
        end_tree(process.pid)
        process.wait(10.0)
    return Finished(
        exit_code=exit_code,
        seconds=time.monotonic() - began,
        stdout=stdout.finish(),
        stderr=stderr.finish(),
        ended_at=time.time(),
        notice_at=stderr.notice_at,
    )


def end_tree(pid: int) -> None:
    """Kills a process and all below it."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.Error):
                each.kill()


def at_once(checks: Iterable[Callable[[], None]]) -> None:
    """Runs checks that wait for processes side by side, where there are cores enough."""
    with pool_of_checks() as pool:
        for finished in [pool.submit(check) for check in checks]:
            finished.result()


def pool_of_checks() -> ThreadPoolExecutor:
    """Threads that wait for processes: several where there are cores enough, else one."""
    several = (psutil.cpu_count() or 1) >= MIN_CORES_FOR_COMMANDS_AT_ONCE
    return ThreadPoolExecutor(max_workers=4 if several else 1)
