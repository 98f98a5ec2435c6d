"""Checks main memory: how much is available, and how much the control group allows.

A control group is Linux's limit for a container or a job. `gather` reads facts from this machine,
`judge` says what is wrong with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lockstep.doctor.base import ERROR, OK, WARNING, Facts, Finding, gib, verdict
from lockstep.run.start.machine import own_cgroups, read_field

MIN_FOR_A_MODEL = 2 * 2**30  # bytes
MIN_FOR_TORCH = 2**28  # bytes


class GroupFiles(NamedTuple):
    """Where a control group tells of its memory."""

    limit: str
    usage: str
    cache_field: str
    """The field of `memory.stat` for the part of the usage that caches files, which the kernel
    gives back when memory is needed."""


FILES_OF_VERSION = {
    1: GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: GroupFiles("memory.max", "memory.current", "inactive_file"),
}
"""By the version of Linux's control groups."""


def gather(folder: Path) -> Facts:
    """Reads bytes; `group` is what the control group leaves, or None if it sets no limit."""
    import psutil

    memory = psutil.virtual_memory()
    return {
        "total": memory.total,
        "available": memory.available,
        "group": available_in_group(Path("/")),
    }


def available_in_group(root: Path) -> int | None:
    """Returns how many bytes the tightest control group of this process leaves.

    Args:
        root: the root of the file system.

    Returns:
        The bytes, or None if no group sets a limit.
    """
    available = []
    for version, folder in own_cgroups("memory", root):
        files = FILES_OF_VERSION[version]
        try:
            limit = int((folder / files.limit).read_text())
            usage = int((folder / files.usage).read_text())
        except (OSError, ValueError):  # there is no such group, or its limit is "max"
            continue
        # The kernel gives back what caches files, so it is available as well:
        #     available = limit - usage + freeable
        cached = read_field(folder / "memory.stat", files.cache_field) or 0
        # The files are not read at the same moment, so more may be cached than was used before.
        freeable = min(usage, cached)
        available.append(limit - usage + freeable)
    return min(available, default=None)


def judge(facts: Facts) -> Finding:
    """Finds too little memory to load torch and a model on each rank."""
    available = facts["available"]
    group = facts["group"]
    do = "end the programs that take it"
    problems = []  # their texts follow the summary: `3 GiB of 8 GiB available; ...`
    # The tighter of the two counts: what the machine has, and what the control group allows.
    if group is not None and group < available:
        available = group
        problems.append(Finding(OK, f"its control group leaves {gib(group)}"))
    if available < MIN_FOR_TORCH:
        problems.append(Finding(ERROR, "no process with torch fits", do))
    elif available < MIN_FOR_A_MODEL:
        found = "a process with torch takes about half a GiB before there is a model"
        problems.append(Finding(WARNING, found, f"start few processes, or {do}"))
    return verdict(f"{gib(facts['available'])} of {gib(facts['total'])} available", problems)
