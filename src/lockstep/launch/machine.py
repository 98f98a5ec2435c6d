"""What this machine offers to a run: cores, GPUs, the name of its loopback interface."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_IFF_LOOPBACK = 0x8


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a launcher must know before it starts anything."""

    cores: int
    """Cores that this process and its children may use."""
    gpus: int
    """Visible accelerators: CUDA devices, or those of torch's other accelerator."""
    loopback: str | None
    """Name of the loopback interface; None when it could not be found."""


def read_machine() -> Machine:
    """Reads the machine this process runs on; imports torch to count the accelerators."""
    return Machine(cores=cores_allowed(), gpus=_visible_gpus(), loopback=loopback_name())


def cores_allowed() -> int:
    """Cores this process may use: its affinity mask, cut down to its cgroup's quota; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The tightest CPU quota of this process's cgroup and its parents, in cores; None: no quota.

    Reads version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`); see the kernel's
    "Control Group v2" and "CFS Bandwidth Control". `root` stands for the root of the file system.
    """
    quotas = []
    for controllers, path in _own_cgroups(root / "proc/self/cgroup"):
        if controllers == "":
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup/cpu"]
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        # In a container the path may be the host's, while the mount starts at the container's own
        # group: folders that do not exist are passed over and the mount's top is always read.
        for mount in mounts:
            for depth in range(len(parts) + 1):
                quotas.append(_quota_of(mount.joinpath(*parts[:depth])))
    return min((quota for quota in quotas if quota is not None), default=None)


def _own_cgroups(file: Path) -> list[tuple[str, str]]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return []
    fields = [line.split(":", 2) for line in lines]
    return [(found[1], found[2]) for found in fields if len(found) == 3]


def _quota_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such group, or "max"
        return None


def loopback_name() -> str | None:
    """The loopback interface's name (`lo` on Linux, `lo0` on macOS), asked from the system."""
    for _, name in socket.if_nameindex():
        try:
            flags = int(Path(f"/sys/class/net/{name}/flags").read_text(), 16)
        except (OSError, ValueError):
            if name in ("lo", "lo0"):
                return name
        else:
            if flags & _IFF_LOOPBACK:
                return name
    return None


def _visible_gpus() -> int:
    import torch

    count = torch.cuda.device_count()  # asks NVML where it can, which leaves CUDA uninitialised
    if count == 0 and torch.accelerator.is_available():
        count = torch.accelerator.device_count()
    return count
