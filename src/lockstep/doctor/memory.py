"""Main memory: how much is there, and how much may this process take."""

from __future__ import annotations

from pathlib import Path

from lockstep.doctor.base import ERROR, WARNING, Facts, Finding, gib, verdict
from lockstep.run.start.machine import own_cgroups, read_field

_LIMITS = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""The files of the limit and of what is used; and the field of `memory.stat` for what of that
caches files, and is given back when it is needed."""
_FEW, _NONE = 2 * 2**30, 2**28


def gather(folder: Path) -> Facts:
    """Bytes; `group` is what the control group leaves, None where it sets no limit."""
    import psutil

    found = psutil.virtual_memory()
    return {"total": found.total, "available": found.available, "group": group_left(Path("/"))}


def group_left(root: Path) -> int | None:
    """What the tightest control group of this process leaves; None: none sets a limit."""
    left = []
    for version, folder in own_cgroups("memory", root):
        limit, used, cached = _LIMITS[version]
        try:
            most, taken = (int((folder / name).read_text()) for name in (limit, used))
        except (OSError, ValueError):  # no such group, or "max"
            continue
        left.append(most - taken + min(taken, read_field(folder / "memory.stat", cached) or 0))
    return min(left, default=None)


def judge(facts: Facts) -> Finding:
    """Too little to load torch and a model on each rank."""
    left = facts["available"]
    problems = []
    if facts["group"] is not None and facts["group"] < left:
        left = facts["group"]
        problems.append(Finding("ok", f"its control group leaves {gib(left)}"))
    if left < _NONE:
        problems.append(Finding(ERROR, "no process with torch fits", "end what takes it"))
    elif left < _FEW:
        found = "a process with torch takes about half a GiB before there is a model"
        problems.append(Finding(WARNING, found, "start few processes, or end what takes it"))
    return verdict(f"{gib(facts['available'])} of {gib(facts['total'])} available", problems)
