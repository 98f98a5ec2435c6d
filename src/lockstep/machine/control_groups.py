"""Reads how much memory this process may use, from the control groups that limit it.

A *control group* (cgroup) is how Linux limits the memory and CPU time of a container or a job. The
kernel shows each group as a folder of small text files. All functions take the root folder of the
file system as an argument, so that tests can supply files of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class GroupFiles(NamedTuple):
    """The names of the files in which a control group describes its memory."""

    limit: str
    usage: str
    cache_field: str
    """The field of `memory.stat` that says how much of the usage is cached files. The kernel frees
    this memory when it is needed."""


FILES_OF_VERSION = {
    1: GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: GroupFiles("memory.max", "memory.current", "inactive_file"),
}
"""The names of the files for each version of Linux's control groups."""


def own_cgroups(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yields the folders of the control groups that may limit this process.

    Args:
        controller: the resource that is limited, such as `cpu` or `memory`.
        root: the root folder of the file system.

    Yields:
        Pairs of the version of control groups (1 or 2) and the folder of this process's group or of
        one of its parents. The folder may not exist.
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
            # Version 2 has one hierarchy for all controllers: /sys/fs/cgroup/job/step.
            version = 2
            mounts = [mount_point, mount_point / "unified"]
        elif controller in controllers.split(","):
            # Usually /sys/fs/cgroup/cpu,cpuacct, and a link /sys/fs/cgroup/cpu to it. Some systems
            # have only one of them.
            version = 1
            mounts = [mount_point / controllers, mount_point / controller]
        else:
            continue

        for mount in dict.fromkeys(mounts):  # without duplicates
            for folder in _folders_of_group(mount, path):
                yield version, folder


def _folders_of_group(mount: Path, group: str) -> Iterator[Path]:
    """Yields the folders of a group and of its parents: MOUNT, MOUNT/job and MOUNT/job/step.

    In a container, MOUNT may itself be the folder of the group /job/step of the host. Then only the
    folder MOUNT exists.

    Args:
        mount: the folder at which the control groups are mounted.
        group: the path of the group, such as "/job/step".
    """
    parts = Path(group.lstrip("/")).parts
    for depth in range(len(parts) + 1):
        yield mount.joinpath(*parts[:depth])


def available_in_group(root: Path) -> int | None:
    """Returns how much memory the control groups of this process leave, by the tightest limit.

    Args:
        root: the root folder of the file system.

    Returns:
        The number of bytes, or None if no group sets a limit.
    """
    available = []
    for version, folder in own_cgroups("memory", root):
        files = FILES_OF_VERSION[version]
        try:
            limit = int((folder / files.limit).read_text())
            usage = int((folder / files.usage).read_text())
        except (OSError, ValueError):  # there is no such group, or its limit is "max"
            continue

        # The kernel frees cached files when memory is needed, so they are available, too. The two
        # files are not read at the same moment, so `cached` may be larger than `usage`.
        cached = read_field(folder / "memory.stat", files.cache_field) or 0
        freeable = min(usage, cached)
        available.append(limit - usage + freeable)
    return min(available, default=None)


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns how much memory this process could still take.

    That is what the machine has left, or what the control groups of the process leave, if that is
    less.

    Returns:
        The number of bytes, or None if neither is known.
    """
    limits = []

    on_machine_kib = read_field(root / "proc/meminfo", "MemAvailable:")
    if on_machine_kib is not None:
        limits.append(on_machine_kib * 1024)

    in_group = available_in_group(root)
    if in_group is not None:
        limits.append(in_group)

    return min(limits, default=None)


def read_field(path: Path, name: str) -> int | None:
    """Reads a number from a file of the kernel whose lines have the form `NAME NUMBER`.

    Args:
        path: the file, such as `/proc/vmstat` or a cgroup's `memory.events`.
        name: the first word of the line, such as `oom_kill`.

    Returns:
        The number in the first line with this name; None if the file cannot be read or has no such
        line.
    """
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if words and words[0] == name:
                return int(words[1])
    except (OSError, ValueError, IndexError):
        pass
    return None
