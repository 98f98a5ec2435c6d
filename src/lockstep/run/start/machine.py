"""Reads what this machine offers: CPU cores, GPUs, and the name of its loopback interface.

The number of cores is limited by the CPU affinity of this process and by the CPU quota of its
*control groups* (cgroups), with which containers and batch systems limit a job. Every function that
reads the file system takes `root`, which stands for "/" and lets tests supply files of their own.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from lockstep.machine.control_groups import own_cgroups
from lockstep.run.start.cuda_state import count_gpus


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a launcher must know about its machine before it starts anything."""

    cores: int
    """Cores that this process and its children may use."""
    gpus: int
    """Visible accelerators: CUDA devices, or the devices of torch's current accelerator."""
    loopback: str | None
    """Name of the loopback interface; None if it was not found."""


def read_machine() -> Machine:
    """Reads the properties of this machine. It imports torch to count the accelerators.

    CUDA is not initialised in this process, so copies of the process can use CUDA.
    """
    return Machine(cores=cores_allowed(), gpus=count_gpus(), loopback=loopback_name())


def cores_allowed() -> int:
    """Returns how many cores this process may use: its affinity mask, limited by its CPU quota.

    The result is at least 1, even if the quota is less than one core.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cpu_quota()
    if quota is None:
        return cores
    return max(1, min(cores, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the smallest CPU quota of this process's control group and its parents.

    It is read from `cpu.max` (version 2 of control groups) or `cpu.cfs_quota_us` (version 1); see
    the kernel's "Control Group v2" and "CFS Bandwidth Control".

    Args:
        root: the root of the file system.

    Returns:
        The quota in cores, such as 2.5; None if there is no quota.
    """
    quotas = []
    for _, folder in own_cgroups("cpu", root):
        quota = _read_cpu_quota(folder)
        if quota is not None:
            quotas.append(quota)
    return min(quotas, default=None)


def _read_cpu_quota(folder: Path) -> float | None:
    """Returns the CPU quota of one control group in cores, or None if it has none."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()

        # Without a quota, the value is "max" or -1. `int` raises ValueError for "max".
        if int(quota) <= 0:
            return None
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # OSError: there is no such group
        return None


def loopback_name() -> str | None:
    """Returns the name of the loopback interface, `lo` on Linux and `lo0` on macOS, or None."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            return name
    return None
