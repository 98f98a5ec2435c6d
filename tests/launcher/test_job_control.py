"""The keys of a terminal, typed into a shell's: pdb, input(), Ctrl-C, Ctrl-Z and fg."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ranks import HANG_S

from lockstep.run.start.job_control import (
    give_keyboard,
    handled,
    in_foreground,
    take_keyboard_from,
)

pytestmark = pytest.mark.launcher

COMMAND = shlex.join([sys.executable, "-m", "lockstep.cli.main", "run"])
CTRL_C, CTRL_Z = "\x03", "\x1a"


class Shell:
    """An interactive shell on a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.said, self._read_to = "", 0

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            ["/bin/sh", "-i"],
            cwd=folder,
            env={**os.environ, "PS1": "ready> ", "ENV": "/dev/null"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=take_terminal,
        )
        os.close(theirs)

    def types(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, text: str) -> None:
        """Reads on until it shows a text."""
        limit = time.monotonic() + HANG_S
        while (found := self.said.find(text, self._read_to)) < 0:
            assert time.monotonic() < limit, f"no {text!r} in {self.said!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self.said += os.read(self._ours, 65536).decode(errors="replace")
        self._read_to = found + len(text)

    def end(self) -> None:
        # The terminal's end is the end of what runs in it, as when a window is closed.
        os.close(self._ours)
        self.process.wait(30)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    if not Path("/bin/sh").exists():
        pytest.skip("there is no /bin/sh here")
    made = Shell(tmp_path)
    try:
        made.until("ready> ")
        yield made
    finally:
        with contextlib.suppress(OSError):
            made.end()


DEBUGGED = """
import sys
x = 41
breakpoint()
name = input("name? ")
print("hello", name, sys.stdin.isatty(), sys.stdout.isatty())
"""


@pytest.mark.parametrize("warm", ["--warm", pytest.param("--no-warm", marks=pytest.mark.thorough)])
def test_pdb_and_input_work_in_the_only_rank(tmp_path: Path, shell: Shell, warm: str) -> None:
    (tmp_path / "script.py").write_text(DEBUGGED)
    shell.types(f"{COMMAND} {warm} script.py; echo code $?\n")
    shell.until("(Pdb)")
    shell.types("p x + 1\n")
    shell.until("42")
    shell.until("(Pdb)")
    shell.types("c\n")
    shell.until("name? ")
    shell.types("Ada\n")
    shell.until("hello Ada True True")
    shell.until("code 0")
    shell.until("ready> ")


WORKS = """
import os, time
with open(os.environ["RANK"], "w") as file:
    file.write(str(os.getpid()))
print("at work", flush=True)
while True:
    time.sleep(0.01)
"""


def until_all(processes: list[psutil.Process], stopped: bool) -> None:
    limit = time.monotonic() + HANG_S
    while any((p.status() == psutil.STATUS_STOPPED) is not stopped for p in processes):
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.mark.parametrize("nproc", [1, 2])
def test_ctrl_z_fg_and_ctrl_c_reach_the_ranks(tmp_path: Path, shell: Shell, nproc: int) -> None:
    (tmp_path / "script.py").write_text(WORKS)
    shell.types(f"{COMMAND} --nproc {nproc} script.py\n")
    for _ in range(nproc):
        shell.until("at work")
    ranks = [psutil.Process(int((tmp_path / str(rank)).read_text())) for rank in range(nproc)]
    for resume in ("fg\n", "bg\nfg\n"):
        shell.types(CTRL_Z)
        shell.until("Stopped")
        shell.until("ready> ")
        until_all(ranks, stopped=True)
        shell.types(resume)
        until_all(ranks, stopped=False)
    shell.until("ready> ")  # after bg
    shell.types(CTRL_C)
    shell.until("INTERRUPTED: lockstep was sent SIGINT")
    shell.until("ready> ")
    shell.types("echo code $?\n")
    shell.until("code 130")
    assert "death signal" not in shell.said  # of torch's log


def test_several_ranks_are_told_how_wide_the_terminal_is(tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "print(os.environ.get('LOCKSTEP_TERMINAL_COLUMNS'), sys.stdout.isatty(), end='!\\n')\n"
    )
    shell.types(f"{COMMAND} --nproc 2 script.py\n")
    for _ in range(2):
        shell.until("70 False!")  # of 80: without the prefix, and the last column
    shell.until("ready> ")
    shell.types(f"{COMMAND} script.py\n")
    shell.until("None True!")
    shell.until("ready> ")


def test_a_signal_handler_of_the_user_is_not_replaced() -> None:
    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        with handled({signal.SIGTSTP: lambda number: None}):
            assert signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTSTP, before)


def test_without_a_terminal_there_is_no_foreground() -> None:
    with open(os.devnull) as nothing:
        saved = os.dup(0)
        os.dup2(nothing.fileno(), 0)
        try:
            assert not in_foreground()
            take_keyboard_from(os.getpgrp())
            give_keyboard(os.getpgrp())
        finally:
            os.dup2(saved, 0)
            os.close(saved)
