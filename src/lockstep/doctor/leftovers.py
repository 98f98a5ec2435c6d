"""Checks for leftovers of earlier runs: shared memory of processes that have ended, and old logs.

`gather` reads facts from this machine, `judge` says what is wrong with them, and `fix` removes the
files. Only files of this user are examined.

A process in another container may use this /dev/shm, although its process id means nothing here. So
files that a process has mapped are left out, as are files younger than an hour. And unless all
processes can be seen from here, nothing is removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from lockstep.doctor.base import OK, WARNING, Facts, Finding, join_findings
from lockstep.units import MIB
from lockstep.wording import count_noun

SHARED_MEMORY = Path("/dev/shm")
PROC = Path("/proc")
# The name of a file created by torch: torch_1234_987654321_0, where 1234 is the process id.
TORCH_FILE = re.compile(r"torch_(\d+)_")
SHARED_MIN_AGE_S = 3600.0
LOGS_MIN_AGE_S = 14 * 24 * 3600.0
MAX_LOGS_SIZE = 2**28  # bytes
# The inode number of the first namespace of processes (PROC_PID_INIT_INO in Linux's proc_ns.h).
INITIAL_PID_NAMESPACE = 0xEFFFFFFC

FileAndSize = tuple[str, int]
"""A path, and its size in bytes."""


def gather(folder: Path) -> Facts:
    """Lists the files of shared memory and the folders of logs that could be removed.

    `sees_all_processes` is False if processes in containers may use the files: a container may
    share /dev/shm with this process, which does not see the processes in it.
    """
    return {
        "shared": [[path, size] for path, size in _abandoned_shared_memory()],
        "sees_all_processes": sees_all_processes(),
        "logs": [[path, size] for path, size in _old_logs()],
    }


def _abandoned_shared_memory() -> list[FileAndSize]:
    """Returns torch's files whose process has ended, and that no other process has mapped."""
    if not SHARED_MEMORY.is_dir():
        return []

    abandoned = []
    for path in SHARED_MEMORY.glob("torch_*"):
        match = TORCH_FILE.match(path.name)
        if match is None:
            continue

        pid = int(match[1])  # the process that created the file

        try:
            status = path.stat()
        except OSError:  # it was removed in the meantime
            continue

        is_ours = status.st_uid == os.getuid()
        is_old = time.time() - status.st_mtime > SHARED_MIN_AGE_S
        if is_ours and is_old and not _is_running(pid):
            abandoned.append((str(path), status.st_size))

    if not abandoned:  # the maps of all processes need not be read
        return []

    # If the process is running in another container, its id means nothing here. But its files are
    # mapped.
    mapped = _mapped_shared_memory()
    return [(path, size) for path, size in abandoned if path not in mapped]


def _old_logs() -> list[FileAndSize]:
    """Returns the folders of logs whose files are all old, each with the total size of its files.

    They are in one folder of this user, and each belongs to one run.
    """
    logs = Path(tempfile.gettempdir(), f"lockstep-logs-{os.getuid()}")
    if not logs.is_dir() or logs.stat().st_uid != os.getuid():
        return []

    old = []
    for run in logs.iterdir():
        statuses = []  # of each file and folder in it
        if run.is_dir():
            statuses = [path.lstat() for path in run.rglob("*")]

        if statuses:
            newest_time = max(status.st_mtime for status in statuses)
        else:  # an empty folder, or a single file beside the folders
            newest_time = run.lstat().st_mtime

        if time.time() - newest_time > LOGS_MIN_AGE_S:
            old.append((str(run), sum(status.st_size for status in statuses)))

    return old


def sees_all_processes() -> bool:
    """Returns True if no process of this user, including this one, runs in a container.

    A container has a process namespace of its own, in which processes have other ids.
    """
    namespaces = set()  # the inode numbers of the namespaces
    for process in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it belongs to another user, or has ended
            namespaces.add(os.stat(process / "ns/pid").st_ino)
    return namespaces == {INITIAL_PID_NAMESPACE}


def _mapped_shared_memory() -> set[str]:
    """Returns torch's files of shared memory that any process has mapped."""
    # A line of /proc/1234/maps may end with /dev/shm/torch_1234_987654321_0.
    name = re.compile(rf"{re.escape(str(SHARED_MEMORY))}/torch_\S+")
    mapped: set[str] = set()
    for maps in PROC.glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped.update(name.findall(maps.read_text(errors="replace")))
    return mapped


def _is_running(pid: int) -> bool:
    """Returns True if there is a process with this id."""
    try:
        os.kill(pid, 0)  # sends nothing, but fails if there is no such process
    except ProcessLookupError:
        return False
    except PermissionError:  # the process belongs to another user
        pass
    return True


def _total_size(files: list[FileAndSize]) -> int:
    return sum(size for _, size in files)


def judge(facts: Facts) -> Finding:
    """Finds abandoned shared memory, and old logs if they are large."""
    shared = facts["shared"]
    logs = facts["logs"]

    problems = []
    if shared:
        size_mib = _total_size(shared) // MIB
        files = count_noun(len(shared), "file")
        found = f"/dev/shm holds {size_mib} MiB in {files} of ended processes"

        # A process in a container that shares /dev/shm may still use the files. Such a process
        # cannot be seen from here.
        if facts["sees_all_processes"]:
            do = "--fix removes them"
        else:
            do = "remove them if no container uses this /dev/shm: its processes cannot be seen here"

        problems.append(Finding(WARNING, found, do))

    if _total_size(logs) > MAX_LOGS_SIZE:
        size_mib = _total_size(logs) // MIB
        runs = count_noun(len(logs), "run")
        found = f"logs of {runs} of more than two weeks ago take {size_mib} MiB"
        problems.append(Finding(WARNING, found, "--fix removes them"))

    # The findings follow the name of the check: "leftovers  of earlier runs; /dev/shm holds ...".
    if not problems:
        return Finding(OK, "nothing that matters")
    return join_findings("of earlier runs", problems)


def fix(facts: Facts) -> list[str]:
    """Removes the shared memory, and the old logs if they are large.

    Shared memory is kept if processes that cannot be seen from here may use it.

    Returns:
        A line about each file or folder that was removed.
    """
    done = []
    if facts["sees_all_processes"]:
        for path, _ in facts["shared"]:
            Path(path).unlink(missing_ok=True)
            done.append(f"removed {path}")

    if _total_size(facts["logs"]) > MAX_LOGS_SIZE:
        for path, _ in facts["logs"]:
            shutil.rmtree(path, ignore_errors=True)
            done.append(f"removed {path}")

    return done
