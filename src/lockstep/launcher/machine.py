"""What this machine offers to a run: cores, GPUs, the name of its loopback interface."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
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
    quotas = [_quota_of(folder) for _, folder in own_cgroups("cpu", root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def own_cgroups(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """The control groups of this process and their parents, in which a controller may be at work.

    Args:
        controller: such as `cpu` or `memory`.
        root: stands for the root of the file system.

    Returns:
        The version (2 or 1) of control groups, and a folder, which need not exist.
    """
    top = root / "sys/fs/cgroup"
    for controllers, path in _cgroup_paths(root / "proc/self/cgroup"):
        if controllers == "":
            version, mounts = 2, [top, top / "unified"]
        elif controller in controllers.split(","):
            version, mounts = 1, [top / controllers, top / controller]
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        # In a container the path may be the host's, while the mount starts at the container's own
        # group: folders that do not exist are for the caller to pass over, and the mount's top is
        # always among them.
        for mount in dict.fromkeys(mounts):
            for depth in range(len(parts) + 1):
                yield version, mount.joinpath(*parts[:depth])


def _cgroup_paths(file: Path) -> list[tuple[str, str]]:
    """Controllers (empty: version 2) and path of each group; empty where they cannot be read."""
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
