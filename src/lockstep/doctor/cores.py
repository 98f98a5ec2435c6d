"""Checks the cores: how many this process may use, and whether other processes use them.

`gather` reads facts from this machine, and `judge` says what is wrong with them.
"""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.doctor.base import WARNING, Facts, Finding, join_findings
from lockstep.run.start.machine import cores_allowed, cpu_quota

MAX_LOAD_PER_CORE = 1.5


def gather(folder: Path) -> Facts:
    """Reads the number of cores, and the load of the last minute.

    `machine` is the number of all cores, and `allowed` the number that this process may use.
    `quota` is how many of them its control group (the limit of a container or job) allows it to
    keep busy, or None. `load` is the average number of processes that were running or wanted to.
    """
    return {
        "machine": os.cpu_count() or 1,
        "allowed": cores_allowed(),
        "quota": cpu_quota(),
        "load": os.getloadavg()[0],
    }


def judge(facts: Facts) -> Finding:
    """Finds a quota below the number of cores that libraries count, and busy cores."""
    machine = facts["machine"]  # the number of all cores
    allowed = facts["allowed"]  # the number of cores that this process may use
    quota = facts["quota"]  # in cores, such as 2.5
    load = facts["load"]  # in processes

    problems = []
    if quota is not None and quota < machine:
        found = f"the control group allows {quota:g}, but libraries count {machine}"
        do = "lockstep run sets OMP_NUM_THREADS to fit; choose num_workers of loaders yourself"
        problems.append(Finding(WARNING, found, do))

    # The load is that of the whole machine, so it is compared with all of its cores.
    if load > MAX_LOAD_PER_CORE * machine:
        found = f"{load:.1f} processes want a core"
        problems.append(Finding(WARNING, found, "use top to see what else is running"))

    return join_findings(f"{allowed} of {machine}", problems)
