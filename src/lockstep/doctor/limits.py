"""Checks the limits on this user's processes: open files, processes, and locked memory.

`gather` reads facts from this machine, and `judge` says what is wrong with them. Locked memory is
never moved to disk; InfiniBand needs it.
"""

from __future__ import annotations

import resource
from pathlib import Path

from lockstep.doctor.base import WARNING, Facts, Finding, join_findings

MIN_OPEN_FILES = 4096
USUAL_OPEN_FILES = 65536
MIN_PROCESSES = 1024
MIN_LOCKED_MEMORY = 2**33  # bytes


def gather(folder: Path) -> Facts:
    """Reads the limits. A limit that does not exist is None.

    `files` is the present limit on open files (the soft limit), and `most_files` the value up to
    which a user who is not root may raise it (the hard limit). `locked` is in bytes. `infiniband`
    is True if this machine has such a network.
    """
    soft_files, hard_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = None
    if hasattr(resource, "RLIMIT_NPROC"):  # not every system limits the number of processes
        processes = _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0])

    return {
        "files": _limit(soft_files),
        "most_files": _limit(hard_files),
        "processes": processes,
        "locked": _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        "infiniband": Path("/sys/class/infiniband").is_dir(),
    }


def _limit(number: int) -> int | None:
    """Returns the limit, or None if the number stands for no limit."""
    return None if number == resource.RLIM_INFINITY else number


def judge(facts: Facts) -> Finding:
    """Finds limits that are too low for several ranks with several workers each.

    A limit that is None does not exist.
    """
    max_files = facts["files"]
    max_processes = facts["processes"]
    max_locked_bytes = facts["locked"]

    problems = []
    if max_files is not None and max_files < MIN_OPEN_FILES:
        found = "loaders with workers may need more open files"
        do = _how_to_raise_open_files(hard_limit=facts["most_files"])
        problems.append(Finding(WARNING, found, do))

    if max_processes is not None and max_processes < MIN_PROCESSES:
        found = f"at most {max_processes} processes and threads"
        problems.append(Finding(WARNING, found, "ulimit -u, or ask for a higher limit"))

    if (
        max_locked_bytes is not None
        and max_locked_bytes < MIN_LOCKED_MEMORY
        and facts["infiniband"]
    ):
        max_locked_kib = max_locked_bytes // 2**10
        found = f"InfiniBand needs locked memory, and {max_locked_kib} KiB may be locked"
        problems.append(Finding(WARNING, found, "as root, memlock unlimited in limits.conf"))

    files = "unlimited" if max_files is None else max_files
    return join_findings(f"{files} open files", problems)


def _how_to_raise_open_files(hard_limit: int | None) -> str:
    """Says how to raise the limit on open files, which needs root only above the hard limit.

    Args:
        hard_limit: the hard limit; None if there is none.
    """
    if hard_limit is None:
        return f"ulimit -n {MIN_OPEN_FILES}"
    if hard_limit < MIN_OPEN_FILES:
        return "as root, raise nofile in /etc/security/limits.conf"
    return f"ulimit -n {min(hard_limit, USUAL_OPEN_FILES)}"
