"""Checks main memory: how much is available, and how much the control group allows.

A control group is Linux's limit for a container or a job. `gather` reads facts from this machine,
`judge` says what is wrong with them.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.distributed.control_groups import available_in_group
from lockstep.doctor.base import ERROR, OK, WARNING, Facts, Finding, gib, verdict

MIN_FOR_A_MODEL = 2 * 2**30  # bytes
MIN_FOR_TORCH = 2**28  # bytes


def gather(folder: Path) -> Facts:
    """Reads bytes; `group` is what the control group leaves, or None if it sets no limit."""
    import psutil

    memory = psutil.virtual_memory()
    return {
        "total": memory.total,
        "available": memory.available,
        "group": available_in_group(Path("/")),
    }


def judge(facts: Facts) -> Finding:
    """Finds too little memory to load torch and a model on each rank."""
    available = facts["available"]
    group = facts["group"]
    do = "end the programs that use it"
    problems = []  # their texts follow the summary: `3 GiB of 8 GiB available; ...`

    # The tighter of the two counts: what the machine has, and what the control group allows.
    if group is not None and group < available:
        available = group
        problems.append(Finding(OK, f"its control group leaves {gib(group)}"))

    if available < MIN_FOR_TORCH:
        problems.append(Finding(ERROR, "too little for one process with torch", do))
    elif available < MIN_FOR_A_MODEL:
        found = "a process with torch takes about 0.5 GiB, without any model"
        problems.append(Finding(WARNING, found, f"start few processes, or {do}"))

    return verdict(f"{gib(facts['available'])} of {gib(facts['total'])} available", problems)
