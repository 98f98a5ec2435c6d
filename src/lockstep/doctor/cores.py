"""The cores that this process may use, against those of the machine, and who else uses them."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.doctor.base import WARNING, Facts, Finding, verdict
from lockstep.run.start.machine import cores_allowed, cpu_quota

_BUSY = 0.5


def gather(folder: Path) -> Facts:
    """`load`: processes that ran or waited for a core in the last minute."""
    return {
        "machine": os.cpu_count() or 1,
        "allowed": cores_allowed(),
        "quota": cpu_quota(),
        "load": os.getloadavg()[0],
    }


def judge(facts: Facts) -> Finding:
    """Fewer than libraries think there are, or busy ones."""
    machine, allowed, quota = facts["machine"], facts["allowed"], facts["quota"]
    problems = []
    if quota is not None and quota < machine:
        found = f"the control group allows {quota:g}, and libraries that count see {machine}"
        do = "lockstep run sets OMP_NUM_THREADS by it; give num_workers by hand"
        problems.append(Finding(WARNING, found, do))
    # The load is that of the whole machine.
    if facts["load"] > (1 + _BUSY) * machine:
        found = f"{facts['load']:.1f} processes want them"
        problems.append(Finding(WARNING, found, "see top for what else runs"))
    return verdict(f"{allowed} of {machine}", problems)
