"""Every fault of the table, as a user meets it: a command, its last block, its exit code."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest
from faults import FAULTS, Fault
from launched import Launched, in_control_group, with_shared_memory
from memory_group import memory_group
from ranks import HANG_S, LEAVE_S

pytestmark = pytest.mark.launcher

RARE = {
    "the GIL held in C",
    "a debugger stops a rank in a call of C",
    "poll in C that holds the GIL, in a thread",
    "poll in C that lets the GIL go, which another thread holds",
    "poll in C beside a thread that seldom lets the GIL go",
    "short naps in C that hold the GIL",
    "a semaphore that C waits for with the GIL",
    "an answer of a licence server that C waits for with the GIL",
    "a child process works, started from C",
    "a timer comes to a group of the main threads",
    "both ranks receive",
    "both receive, and both send in threads",
    "shared memory: a rank is stopped in the middle",
    "a group whose timeout is expected",
    "the launcher is stopped for a while",
    "honest work of rank 0 alone",
    "both ranks are stopped and continued",
    "one of three skips a batch",
    "a stage of a pipeline leaves the loop",
    "threads of both ranks come late",
    "a thread waits for what a child process makes",
    "sleep in C that holds the GIL",
    "a thread receives from one that sleeps",
    "a new thread comes to a group of the main threads",
    "a rank waits for a key of the store",
    "a rank looks again and again whether a collective has ended",
    "a thread waits for one that reads from a pipe",
    "a pool of threads works for the main thread",
    "a lock of a file between the ranks",
    "shared memory: a rank waits in a collective of torch's",
    "training in a thread",
    "a rank waits for a signal",
    "a thread downloads",
}
"""Close to others, which are tried each time."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, id=f.name, marks=pytest.mark.thorough if f.name in RARE else ())
        for f in FAULTS
    ],
)
def test_the_verdict_is_right(fault: Fault, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(fault.script)
    limit = fault.memory_bytes
    with memory_group(limit) if limit else contextlib.nullcontext() as group:
        check(fault, tmp_path, group)


def test_the_rare_ones_are_faults() -> None:
    assert {fault.name for fault in FAULTS} >= RARE


def check(fault: Fault, folder: Path, group: Path | None) -> None:
    arguments = ["run", "--nproc", str(fault.nproc), *fault.flags, "script.py"]
    size = fault.shared_memory
    if size is not None and subprocess.run(["unshare", "-m", "true"], stderr=PIPE).returncode:
        pytest.skip("a /dev/shm of our own takes root")
    os.mkfifo(folder / "told")
    pipe = os.open(folder / "told", os.O_RDWR)
    first = [partial(in_control_group, group)] if group else []
    first += [partial(with_shared_memory, size)] if size else []
    with Launched(arguments, cwd=folder, first=first) as launcher:
        # Each rank's own line, so that all of them are where the fault begins.
        waiting = fault.nproc
        while waiting:
            line = launcher.stdout.readline()
            assert line, "the script ended before it came to its fault"
            waiting -= "FAULT" in line
        processes = psutil.Process(launcher.pid).children(recursive=True)
        if fault.launcher_signal is not None:
            launcher.send_signal(fault.launcher_signal)
        if fault.waits_for_words:
            limit = time.monotonic() + HANG_S
            while not told(fault, launcher.said) and time.monotonic() < limit:
                time.sleep(0.1)
            os.write(pipe, b"\n" * fault.nproc)
        done = launcher.finish()
        os.close(pipe)
        left = psutil.wait_procs(processes, timeout=LEAVE_S)[1]
    assert left == []
    said = done.stderr
    assert done.returncode == fault.exit_code, said
    assert told(fault, said if done.returncode == 0 else said[said.rindex("\nlockstep: ") :]), said
    assert done.returncode != 0 or "deadlock" not in said


def told(fault: Fault, said: str) -> bool:
    return re.search(".*".join(fault.says), said, re.DOTALL) is not None
