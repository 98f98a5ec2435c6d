"""Every fault of the table, as a user meets it: a command, its last block, its exit code."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from faults import FAULTS, Fault
from memory_group import memory_group
from ranks import HANG_S, LEAVE_S

COMMAND = [sys.executable, "-m", "lockstep.cli.main", "run"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_verdict_is_right(fault: Fault, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(fault.script)
    limit = fault.memory_bytes
    with memory_group(limit) if limit else contextlib.nullcontext([]) as enter:
        check(fault, tmp_path, enter)


def check(fault: Fault, folder: Path, enter: list[str]) -> None:
    launcher = subprocess.Popen(
        [*enter, *COMMAND, "--nproc", str(fault.nproc), *fault.flags, "script.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    assert launcher.stderr is not None
    told: list[str] = []
    reading = threading.Thread(target=lambda: told.append(launcher.stderr.read()))
    reading.start()
    try:
        # Each rank's own line, so that all of them are where the fault begins.
        waiting = fault.nproc
        while waiting:
            line = launcher.stdout.readline()
            assert line, "the script ended before it came to its fault"
            waiting -= "FAULT" in line
        processes = psutil.Process(launcher.pid).children(recursive=True)
        if fault.launcher_signal is not None:
            launcher.send_signal(fault.launcher_signal)
        code = launcher.wait(timeout=HANG_S)
        left = psutil.wait_procs(processes, timeout=LEAVE_S)[1]
    finally:
        launcher.kill()
        launcher.wait()
        reading.join()
        launcher.stdout.close()
        launcher.stderr.close()
    assert left == []
    assert code == fault.exit_code, told[0]
    block = told[0] if code == 0 else told[0][told[0].rindex("\nlockstep: ") :]
    assert re.search(".*".join(fault.says), block, re.DOTALL), told[0]
