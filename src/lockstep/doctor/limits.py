"""Limits of this user's processes: open files, processes, memory that may be locked."""

from __future__ import annotations

import resource
from pathlib import Path

from lockstep.doctor.base import WARNING, Facts, Finding, verdict

_FILES, _PROCESSES = 4096, 1024
_LOCKED = 2**33


def gather(folder: Path) -> Facts:
    """Soft limits, and of files the hard one; None: there is no limit."""
    files = [_limit(number) for number in resource.getrlimit(resource.RLIMIT_NOFILE)]
    processes = getattr(resource, "RLIMIT_NPROC", None)
    return {
        "files": files[0],
        "most_files": files[1],
        "processes": None if processes is None else _limit(resource.getrlimit(processes)[0]),
        "locked": _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        "infiniband": Path("/sys/class/infiniband").is_dir(),
    }


def _limit(number: int) -> int | None:
    return None if number == resource.RLIM_INFINITY else number


def judge(facts: Facts) -> Finding:
    """Limits at which a run of several ranks and workers ends."""
    files, problems = facts["files"], []
    if files is not None and files < _FILES:
        most = facts["most_files"]
        possible = most is None or most >= _FILES
        do = f"ulimit -n {_FILES if most is None else min(most, 65536)}"
        do = do if possible else "as root, raise nofile in /etc/security/limits.conf"
        problems.append(Finding(WARNING, "loaders with workers may need more open files", do))
    if facts["processes"] is not None and facts["processes"] < _PROCESSES:
        found = f"at most {facts['processes']} processes and threads"
        problems.append(Finding(WARNING, found, "ulimit -u, or ask for a higher limit"))
    if facts["infiniband"] and facts["locked"] is not None and facts["locked"] < _LOCKED:
        found = f"InfiniBand needs locked memory, and {facts['locked'] // 2**10} KiB may be locked"
        problems.append(Finding(WARNING, found, "as root, memlock unlimited in limits.conf"))
    return verdict(f"{'unlimited' if files is None else files} open files", problems)
