"""Checks main memory: how much is available, and how much the control group allows.

A control group is Linux's way to limit a container or job. `gather` reads facts from this machine,
and `judge` says what is wrong with them.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.doctor.base import ERROR, OK, WARNING, Facts, Finding, gib, join_findings
from lockstep.machine.control_groups import available_in_group

MIN_FOR_A_MODEL = 2 * 2**30  # bytes
MIN_FOR_TORCH = 2**28  # bytes


def gather(folder: Path) -> Facts:
    """Reads how much memory there is.

    Args:
        folder: not used; the `gather` of every check gets it.

    Returns:
        The bytes in `total` and that are `available`, and `group`: the bytes that the control group
        still allows, or None without a limit.
    """
    import psutil

    memory = psutil.virtual_memory()
    return {
        "total": memory.total,
        "available": memory.available,
        "group": available_in_group(root=Path("/")),
    }


def judge(facts: Facts) -> Finding:
    """Finds too little memory to load torch and a model on each rank."""
    usable = facts["available"]
    group = facts["group"]
    advice = "end the programs that use it"

    # The texts of the findings follow the summary: `3 GiB of 8 GiB available; ...`. The result has
    # the worst level of the findings.
    findings = []

    # The control group may leave less than the machine has. That is only mentioned here, but it
    # decides below whether there is too little.
    if group is not None and group < usable:
        usable = group
        findings.append(Finding(OK, f"its control group leaves {gib(group)}"))

    if usable < MIN_FOR_TORCH:
        findings.append(Finding(ERROR, "too little for one process with torch", advice))
    elif usable < MIN_FOR_A_MODEL:
        found = "a process with torch takes about 0.5 GiB, without any model"
        findings.append(Finding(WARNING, found, f"start few processes, or {advice}"))

    return join_findings(f"{gib(facts['available'])} of {gib(facts['total'])} available", findings)
