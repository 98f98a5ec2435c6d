"""Processes that SIGKILL does not end, made without a driver.

A process that is traced (ptrace(2)) stays a zombie until its tracer takes notice of its end. The
kernel tells its parent only then, so `waitpid` of the parent does not return it. The old freezer of
control groups (version 1) keeps a process in state D, with SIGKILL pending, until it is thawed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import HANG_S

_PTRACE_SEIZE = 0x4206
_WALL = 0x40000000  # waits for traced processes too, see waitpid(2)
_FREEZER = Path("/sys/fs/cgroup/freezer")

MAY_BE_HELD = """
import ctypes, os, time
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER: anybody may
def write_pid(name):
    with open(name + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(name + ".new", name)
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)
"""
"""The beginning of a script that a test wants to hold."""


def pid_in(file: Path) -> int:
    """The process id that a script has written into a file, which is waited for.

    A file is there for a moment before its text is.
    """
    limit = time.monotonic() + HANG_S
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < limit
        time.sleep(0.02)
    return int(file.read_text())


@contextlib.contextmanager
def traced(pid: int) -> Iterator[None]:
    """Holds a process as this thread's tracee."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_long(_PTRACE_SEIZE), ctypes.c_long(pid), None, None]
    if libc.ptrace(*arguments) != 0:
        pytest.skip(f"ptrace is not permitted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.waitpid(pid, _WALL)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Holds a process in state D."""
    group = _FREEZER / f"lockstep-test-{pid}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"there is no freezer of version 1 that may be used: {error}")
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        limit = time.monotonic() + HANG_S
        while (group / "cgroup.procs").read_text() and time.monotonic() < limit:
            time.sleep(0.02)
        group.rmdir()
