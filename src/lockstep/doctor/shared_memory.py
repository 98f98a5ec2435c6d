"""Checks `/dev/shm`, through which DataLoader workers pass batches and NCCL sends data.

`gather` reads facts from this machine, and `judge` says what is wrong with them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lockstep.doctor.base import ERROR, OK, WARNING, Facts, Finding, gib, join_findings

SHARED_MEMORY = Path("/dev/shm")
MIN_SIZE = 2**30  # bytes
MIN_FREE = 2**28  # bytes


def gather(folder: Path) -> Facts:
    """Reads the total and the free size in bytes. `total` is None if there is no such folder."""
    if not SHARED_MEMORY.is_dir():
        return {"total": None}
    usage = shutil.disk_usage(SHARED_MEMORY)
    writable = os.access(SHARED_MEMORY, os.W_OK)
    return {"total": usage.total, "free": usage.free, "writable": writable}


def judge(facts: Facts) -> Finding:
    """Finds shared memory that cannot be written, is nearly full, or is too small for DataLoader
    workers, as it is in most containers.
    """
    if facts["total"] is None:
        return Finding(OK, "there is no /dev/shm on this system")

    problems = []
    if not facts["writable"]:
        found = "this user may not write there"
        problems.append(Finding(ERROR, found, "as root: chmod 1777 /dev/shm"))
    elif facts["total"] < MIN_SIZE:
        found = "so little that DataLoader workers may die with a bus error"
        problems.append(Finding(WARNING, found, "docker run --shm-size=8g, or num_workers=0"))
    elif facts["free"] < MIN_FREE:
        # The finding of the check `leftovers` is printed below this one. It lists the files of
        # torch that no process uses any more.
        do = "see ls -l /dev/shm, and leftovers below for what is torch's"
        problems.append(Finding(WARNING, "it is nearly full", do))

    # "0.06 GiB of 0.06 GiB free in /dev/shm; so little that DataLoader workers may die ..."
    summary = f"{gib(facts['free'])} of {gib(facts['total'])} free in /dev/shm"
    return join_findings(summary, problems)
