"""Reads the control groups of this process: Linux's limits for a container or a job.

Every function takes `root`, which stands for "/" and lets tests supply files of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class GroupFiles(NamedTuple):
    """The names of the files in which a control group tells of its memory."""

    limit: str
    usage: str
    cache_field: str
    """The field of `memory.stat` for the part of the usage that caches files, which the kernel
    gives back when memory is needed."""


FILES_OF_VERSION = {
    1: GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: GroupFiles("memory.max", "memory.current", "inactive_file"),
}
"""The names differ between the versions of Linux's control groups, which are the keys."""


def own_cgroups(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yields the folders of the control groups that may limit this process.

    Args:
        controller: such as `cpu` or `memory`.
        root: stands for the root of the file system.

    Yields:
        The version (2 or 1) of control groups, and the folder of this process's group or of one of
        its parents. The folder need not exist.
    """
    mount_point = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    # Each line is HIERARCHY:CONTROLLERS:PATH, such as "0::/job/step" (version 2) or
    # "4:cpu,cpuacct:/job/step" (version 1).
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            version = 2
            mounts = [mount_point, mount_point / "unified"]
        elif controller in controllers.split(","):
            version = 1
            mounts = [mount_point / controllers, mount_point / controller]
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        # In a container the path may be the host's, while the mount starts at the container's own
        # group. So some of these folders do not exist; the top of the mount is always one of them.
        for mount in dict.fromkeys(mounts):
            for depth in range(len(parts) + 1):
                yield version, mount.joinpath(*parts[:depth])


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


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns how many bytes this process could take: what the machine and its groups leave.

    Returns:
        The bytes; None if neither is known.
    """
    known = []
    available_kib = read_field(root / "proc/meminfo", "MemAvailable:")
    if available_kib is not None:
        known.append(available_kib * 1024)
    in_group = available_in_group(root)
    if in_group is not None:
        known.append(in_group)
    return min(known, default=None)


def read_field(path: Path, name: str) -> int | None:
    """Returns a number from a file of lines `NAME NUMBER`, as the kernel writes them.

    Args:
        path: such as `/proc/vmstat` or a cgroup's `memory.events`.
        name: the first word of the line, such as `oom_kill`.

    Returns:
        The number in the first such line; None if the file cannot be read or has no such line.
    """
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if words and words[0] == name:
                return int(words[1])
    except (OSError, ValueError, IndexError):
        pass
    return None
