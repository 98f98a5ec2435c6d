"""`/dev/shm`, through which workers of loaders hand over batches, and NCCL what it sends."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lockstep.doctor.base import ERROR, WARNING, Facts, Finding, gib, verdict

_FOLDER = Path("/dev/shm")
_SMALL, _FULL = 2**30, 2**28


def gather(folder: Path) -> Facts:
    """Bytes; None where there is no such folder."""
    if not _FOLDER.is_dir():
        return {"total": None}
    usage = shutil.disk_usage(_FOLDER)
    writable = os.access(_FOLDER, os.W_OK)
    return {"total": usage.total, "free": usage.free, "writable": writable}


def judge(facts: Facts) -> Finding:
    """Too small, as a container's is by default, full, or closed."""
    if facts["total"] is None:
        return Finding("ok", "there is no /dev/shm on this system")
    problems = []
    if not facts["writable"]:
        found = "this user may not write there"
        problems.append(Finding(ERROR, found, "as root: chmod 1777 /dev/shm"))
    elif facts["total"] < _SMALL:
        found = "workers of a DataLoader die there of a bus error"
        problems.append(Finding(WARNING, found, "docker run --shm-size=8g, or num_workers=0"))
    elif facts["free"] < _FULL:
        do = "see ls -l /dev/shm, and leftovers below for what is torch's"
        problems.append(Finding(WARNING, "it is nearly full", do))
    return verdict(f"{gib(facts['free'])} of {gib(facts['total'])} free in /dev/shm", problems)
