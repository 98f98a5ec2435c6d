"""Checks the folder for checkpoints: free space, permissions, and the speed of its disk.

`gather` reads facts from this machine, `judge` says what is wrong with them, and `fix` creates the
folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.doctor.base import ERROR, OK, WARNING, Facts, Finding, gib, join_findings
from lockstep.wording import count_noun

# How the speed is measured.
WRITE_SIZE = 2**22  # bytes, each flushed to the disk
MAX_WRITTEN = 2**26  # bytes
MAX_WRITING_S = 3.0

MIN_FREE = 5 * 2**30  # bytes
MIN_FREE_TEMPORARY = 2**28  # bytes
MIN_SPEED = 50e6  # bytes per second
MIN_NEW_FILES = 1000


def gather(folder: Path) -> Facts:
    """Reads the free space and the number of free files, and measures the speed of writing.

    If the folder does not exist, the nearest existing folder above it is measured.
    """
    path_and_parents = [folder, *folder.absolute().parents]
    nearest_folder = _first(path_and_parents, os.path.isdir)
    usage = shutil.disk_usage(nearest_folder)
    file_system = os.statvfs(nearest_folder)
    facts: dict[str, Any] = {
        "folder": str(folder),
        "exists": nearest_folder == folder,
        "total": usage.total,  # bytes
        "free": usage.free,  # bytes
        # How many files can still be made; None without a limit, for which `f_files` is 0.
        "files": file_system.f_favail if file_system.f_files else None,
        "temporary": tempfile.gettempdir(),
        "temporary_free": shutil.disk_usage(tempfile.gettempdir()).free,  # bytes
        "speed": None,  # bytes per second; None if nothing can be written
        "problem": None,  # why nothing can be written
    }

    # If `a/b` is a file, or a link that leads nowhere, the folder `a/b/c` cannot be made.
    nearest_path = _first(path_and_parents, os.path.lexists)  # here `a/b`
    is_blocked_by_file = nearest_path != nearest_folder  # which is `a`
    if is_blocked_by_file:
        facts["problem"] = f"{nearest_path} is no folder"
        return facts

    try:
        _check_mount(folder)
        facts["speed"] = _measure_speed(nearest_folder)
    except OSError as error:
        facts["problem"] = error.strerror or str(error)

    return facts


def _check_mount(folder: Path) -> None:
    """Raises OSError if a folder cannot be read, for example on a dead network mount.

    `os.path.isdir` returns False for such a folder, as for a missing one. A missing folder is not a
    problem.
    """
    with contextlib.suppress(FileNotFoundError):
        folder.stat()


def _first(paths: list[Path], is_wanted: Callable[[Path], bool]) -> Path:
    """Returns the first path for which the function returns True, or the last path, which is /."""
    for path in paths:
        if is_wanted(path):
            return path
    return paths[-1]


def _measure_speed(folder: Path) -> float:
    """Measures how many bytes per second can be written to the disk, with a temporary file."""
    data = os.urandom(WRITE_SIZE)
    written = 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begin = time.monotonic()
        while written < MAX_WRITTEN and time.monotonic() - begin < MAX_WRITING_S:
            written += file.write(data)
            os.fsync(file.fileno())
        seconds = time.monotonic() - begin

    return written / max(seconds, 1e-9)


def judge(facts: Facts) -> Finding:
    """Finds a disk that is nearly full, a folder that cannot be written, and a slow disk."""
    summary = f"{gib(facts['free'])} of {gib(facts['total'])} free in {facts['folder']}"

    # The texts of the problems follow the summary: "3 GiB of 8 GiB free in runs, 20 MB/s; the free
    # space is not much for checkpoints".
    problems = []
    if facts["problem"] is not None:  # the reason why nothing can be written; no speed was measured
        found = f"{facts['folder']} cannot be written: {facts['problem']}"
        problems.append(Finding(ERROR, found, "name another by --folder, or make it writable"))
    else:
        if facts["speed"] < MIN_SPEED:
            found = f"{facts['speed'] / 1e6:.0f} MB/s, so that checkpoints take long"
            problems.append(Finding(WARNING, found, "choose a faster disk, or save less often"))
        else:
            summary += f", {facts['speed'] / 1e6:.0f} MB/s"

        if not facts["exists"]:  # only mentioned, as it can be created
            do = "it is made with the first checkpoint, or by --fix"
            problems.append(Finding(OK, "the folder does not exist yet", do))

    if facts["free"] < MIN_FREE:
        problems.append(Finding(WARNING, "the free space is not much for checkpoints", "make room"))

    num_files_left = facts["files"]  # None: there is no limit
    if num_files_left is not None and num_files_left < MIN_NEW_FILES:
        found = f"no more than {count_noun(num_files_left, 'file')} can be made"
        problems.append(Finding(WARNING, found, "remove some of the many small files"))

    if facts["temporary_free"] < MIN_FREE_TEMPORARY:
        found = f"{gib(facts['temporary_free'])} free in {facts['temporary']}, where logs go"
        problems.append(Finding(WARNING, found, "make room, or give lockstep run --log-dir"))

    return join_findings(summary, problems)


def fix(facts: Facts) -> list[str]:
    """Creates the folder if it does not exist."""
    if facts["exists"] or facts["problem"] is not None:
        return []
    Path(facts["folder"]).mkdir(parents=True, exist_ok=True)
    return [f"made {facts['folder']}"]
