"""Checks the cores: how many this process may use, and whether other processes use them.

`gather` reads facts from this machine, `judge` says what is wrong with them.
"""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.doctor.base import WARNING, Facts, Finding, verdict
from lockstep.run.start.machine import cores_allowed, cpu_quota

MAX_LOAD_PER_CORE = 1.5


def gather(folder: Path) -> Facts:
    """Reads the numbers of cores, and how many processes wanted one in the last minute (`load`)."""
    return {
        "machine": os.cpu_count() or 1,
        "allowed": cores_allowed(),
        "quota": cpu_quota(),
        "load": os.getloadavg()[0],
    }


def judge(facts: Facts) -> Finding:
    """Finds fewer cores than libraries count, and cores that others use."""
    machine = facts["machine"]
    quota = facts["quota"]
    load = facts["load"]
    problems = []
    if quota is not None and quota < machine:
        found = f"the control group allows {quota:g}, and libraries that count see {machine}"
        do = "lockstep run sets OMP_NUM_THREADS by it; give num_workers by hand"
        problems.append(Finding(WARNING, found, do))
    # The load is that of the whole machine, so it is compared with all of its cores.
    if load > MAX_LOAD_PER_CORE * machine:
        found = f"{load:.1f} processes want them"
        problems.append(Finding(WARNING, found, "see top for what else runs"))
    return verdict(f"{facts['allowed']} of {machine}", problems)
