"""Stages that fail on purpose, which show in a rehearsal that a stage costs itself alone."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.results import BEGIN_MARK, NotRun, Stage

CHUNK = b"x" * 2**20


def hang(stage: Stage) -> None:
    """Waits for ever, beside a child in a session of its own that ignores SIGTERM."""
    ignoring = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    subprocess.Popen([sys.executable, "-c", ignoring], start_new_session=True)
    stage.write("a check before the stage hangs", "passed", 0.0, {}, "")
    print(f"{BEGIN_MARK}waiting for ever", flush=True)
    signal.pause()


def kill(stage: Stage) -> None:
    """Is killed by the system, as where memory is short."""
    stage.write("a check before the stage is killed", "passed", 0.0, {}, "")
    print(f"{BEGIN_MARK}the check in which it is killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk(stage: Stage) -> None:
    """Writes until no space is left, in a small file system, then reports a check.

    The runner's folder is on another file system in a rehearsal, as nobody wants their disk to be
    filled; `tests/gpu/test_gpu_run.py` has the results themselves on a full one.
    """
    with stage.check("fills the disk") as values:
        folder = small_file_system(stage.scratch)
        try:
            values["written_mib"] = write_until_full(folder / "filler") / 2**20
        finally:
            subprocess.run(["umount", str(folder)], check=False)
    with stage.check("reports a result afterwards"):
        pass


def write_until_full(path: Path) -> int:
    """Writes a file until no space is left; returns its bytes."""
    written = 0
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                written += file.write(CHUNK)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return written


def small_file_system(scratch: Path) -> Path:
    """A folder that holds 4 MiB."""
    folder = scratch / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotRun(f"a small file system takes root: {done.stderr.strip()}")
    return folder


def main() -> None:
    name = os.environ["GPU_RUN_STAGE"]
    failures = {"rehearse-hang": hang, "rehearse-kill": kill, "rehearse-disk": fill_disk}
    failures[name](Stage(name))
