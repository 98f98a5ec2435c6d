"""What this machine offers to a run: cores, GPUs, the name of its loopback interface; and what its
kernel tells of processes: how much memory they took, and whether it has killed one for that. And
what runs have here: a folder, and memory.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.errors import SettingError

_COUNTERS = {2: "memory.events", 1: "memory.oom_control"}
"""By the version of control groups."""
_KERNEL_LOG_LINES = 100_000
_NAME = 60
"""Characters of a script's name that stand in its folder's."""
_ROOM_BYTES = 1 << 18
"""What a run's first files may need."""


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
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
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
    """The loopback interface's name, `lo` on Linux and `lo0` on macOS; None: there is none."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def _visible_gpus() -> int:
    import torch

    count = torch.cuda.device_count()  # asks NVML where it can, which leaves CUDA uninitialised
    if count == 0 and torch.accelerator.is_available():
        count = torch.accelerator.device_count()
    return count


@dataclass(frozen=True)
class OomCounts:
    """How many processes the kernel's out-of-memory killer has ended so far; None: not known."""

    cgroup: int | None
    """In the control groups that this process is in."""
    machine: int | None
    """On the whole machine; in a container that of its host."""


def read_oom_counts(root: Path = Path("/")) -> OomCounts:
    """Reads the counters of now; two of them tell what happened in between.

    Version 2 (`memory.events`) and version 1 (`memory.oom_control`) of control groups, and
    `/proc/vmstat`; see the kernel's "Control Group v2" and "Memory Resource Controller". The
    kernel counts before it sends the signal. `root` stands for the root of the file system.
    """
    groups = own_cgroups("memory", root)
    found = [read_field(folder / _COUNTERS[version], "oom_kill") for version, folder in groups]
    known = [count for count in found if count is not None]
    return OomCounts(
        # Those of the parents hold those of the children, so the sum grows when any of them does.
        cgroup=sum(known) if known else None,
        machine=read_field(root / "proc/vmstat", "oom_kill"),
    )


def oom_between(before: OomCounts, after: OomCounts) -> Literal["certain", "likely"] | None:
    """Whether the out-of-memory killer was at work: in our own groups, or on the machine."""
    if _grew(before.cgroup, after.cgroup):
        return "certain"
    return "likely" if _grew(before.machine, after.machine) else None


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def read_field(path: Path, name: str) -> int | None:
    """A number of a file whose lines are `name number`; None: it is not told."""
    try:
        fields = (line.split() for line in path.read_text().splitlines())
        return next((int(found[1]) for found in fields if found[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None


def kernel_log_on(pid: int, root: Path = Path("/")) -> str | None:
    """What the kernel's log says of its killing of `pid`; None: nothing, or it may not be read.

    The log has the numbers of the machine itself, which differ from a container's.
    """
    pattern = re.compile(rf"[^;\n]*[Oo]ut of memory: Killed process {pid} .*")
    text: list[str] = []
    with suppress(OSError), open(root / "dev/kmsg", "rb", buffering=0, opener=_not_waiting) as log:
        while len(text) < _KERNEL_LOG_LINES:
            try:
                record = log.read(8192)  # one message a time
            except BrokenPipeError:  # it was overwritten meanwhile; the next one can be read
                continue
            if not record:  # that was the last one
                break
            text.append(record.decode(errors="replace"))
    found = pattern.findall("\n".join(text))
    return str(found[-1]).strip() if found else None


def _not_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def peak_memory(pid: int, root: Path = Path("/")) -> int | None:
    """Bytes of a running process's highest resident memory (VmHWM, proc(5)); None: not known."""
    kib = read_field(root / f"proc/{pid}/status", "VmHWM:")
    return None if kib is None else kib * 1024


def make_folder(asked: str | None, name: str) -> Path:
    """A new folder for a run's logs: in `--log-dir`, else in the system's temporary folder.

    Args:
        asked: the flag's value.
        name: of the script.

    Raises:
        SettingError: nothing can be written there.
    """
    try:
        # The ranks may change their own working folder.
        root = Path(asked or Path(tempfile.gettempdir(), f"lockstep-logs-{os.getuid()}")).absolute()
        root.mkdir(parents=True, exist_ok=True, mode=0o777 if asked else 0o700)
        if not asked and root.stat().st_uid != os.getuid():  # made by somebody to read or swap ours
            root = root.parent
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = Path(tempfile.mkdtemp(prefix=f"{name[:_NAME]}-{stamp}-", dir=root))
        (folder / "room").write_bytes(bytes(_ROOM_BYTES))  # a full disk is heard of here
        (folder / "room").unlink()
        return folder
    except OSError as error:
        raise SettingError(
            f"--log-dir {asked}" if asked else "the temporary folder, as there is no --log-dir",
            str(error),
            "name a folder in which you may write: --log-dir FOLDER",
        ) from None


class RoundMemory:
    """Two files in memory for each rank, which those that are started again find as they were.

    Not in /dev/shm, which containers make small, and where files stay when a launcher is killed.

    Args:
        nproc: ranks.
    """

    def __init__(self, nproc: int) -> None:
        names = ["lockstep-rounds"] * 2 * nproc
        self._files = [os.memfd_create(name) for name in names]

    def variables(self, local_rank: int) -> dict[str, str]:
        """By which a rank finds its own."""
        own = self._files[2 * local_rank :][:2]
        names = " ".join(f"/proc/{os.getpid()}/fd/{file}" for file in own)
        return {"LOCKSTEP_MEMORY": names} if own else {}

    def marks(self) -> list[int]:
        """Of each file when it was last written to; 0: never."""
        found = map(os.fstat, self._files)
        return [status.st_mtime_ns if status.st_size else 0 for status in found]

    @property
    def busy(self) -> bool:
        """Whether one is being written: its first bytes come last."""
        return any(os.pread(file, 8, 0) == bytes(8) for file in self._files)

    def close(self) -> None:
        """Frees all."""
        for file in self._files:
            os.close(file)
