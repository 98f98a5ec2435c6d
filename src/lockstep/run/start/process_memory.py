"""Reads from the kernel how much memory processes use, and whether any was killed for lack of
memory.

When memory runs out, Linux's out-of-memory killer ("OOM killer") ends a process with SIGKILL. It
counts its kills, for each control group and for the machine, and logs each one. The launcher
compares the counters from before and after the end of a rank to tell such a kill from any other
SIGKILL.

Every function takes `root`, which stands for "/" and lets tests supply files of their own.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.machine.control_groups import own_cgroups, read_field

_OOM_COUNTER_FILES = {2: "memory.events", 1: "memory.oom_control"}
"""The file that contains the counter `oom_kill`, by the version of control groups."""
_KERNEL_LOG_MAX_RECORDS = 100_000


@dataclass(frozen=True)
class OomCounts:
    """How many processes the out-of-memory killer has ended so far; None if not known."""

    cgroup: int | None
    """The kills in the control groups of this process."""
    machine: int | None
    """The kills on the whole machine; inside a container, on its host."""


def read_oom_counts(root: Path = Path("/")) -> OomCounts:
    """Reads the present counters. Two readings are compared by `oom_between`.

    They are in `memory.events` (version 2 of control groups) or `memory.oom_control` (version 1),
    and in `/proc/vmstat`; see the kernel's "Control Group v2" and "Memory Resource Controller". The
    kernel increases them before it sends the signal, so a kill that was noticed has been counted.
    """
    counts_of_groups = []
    for version, folder in own_cgroups("memory", root):
        count = read_field(folder / _OOM_COUNTER_FILES[version], "oom_kill")
        if count is not None:
            counts_of_groups.append(count)

    return OomCounts(
        # The counter of a parent includes the counters of its children. So the sum is not a number
        # of kills, but it grows whenever one of the counters grows.
        cgroup=sum(counts_of_groups) if counts_of_groups else None,
        machine=read_field(root / "proc/vmstat", "oom_kill"),
    )


def oom_between(before: OomCounts, after: OomCounts) -> Literal["certain", "likely"] | None:
    """Tells whether the out-of-memory killer ended a process between two readings.

    Returns:
        `certain` if it did in the control groups of this process, `likely` if it did somewhere on
        the machine, or None.
    """
    if _has_grown(before.cgroup, after.cgroup):
        return "certain"
    if _has_grown(before.machine, after.machine):
        return "likely"
    return None


def _has_grown(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def oom_message_of(pid: int, root: Path = Path("/")) -> str | None:
    """Finds the message in the kernel's log that process `pid` was killed for lack of memory.

    The log contains the process ids of the machine itself, which differ from those in a container.

    Returns:
        The message, or None if there is none or the log may not be read.
    """
    # Matches "Memory cgroup out of memory: Killed process 42 (python) total-vm:9kB" in the record
    # "3,900,99,-;Memory cgroup out of memory: Killed process 42 (python) total-vm:9kB".
    pattern = re.compile(rf"[^;\n]*[Oo]ut of memory: Killed process {pid} .*")
    messages = pattern.findall("\n".join(_kernel_log_records(root)))
    return str(messages[-1]).strip() if messages else None


def _kernel_log_records(root: Path) -> list[str]:
    """Returns the records of the kernel's log, the oldest first; empty if it may not be read."""
    records: list[str] = []
    try:
        with open(root / "dev/kmsg", "rb", buffering=0, opener=_open_non_blocking) as log:
            while len(records) < _KERNEL_LOG_MAX_RECORDS:
                try:
                    record = log.read(8192)  # each read returns one record
                except BrokenPipeError:  # the record was overwritten; the next one can be read
                    continue
                if not record:  # the end of a file, which tests use
                    break
                records.append(record.decode(errors="replace"))
    except OSError:  # the log may not be read, or (BlockingIOError) the last record was read
        pass
    return records


def _open_non_blocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def peak_memory(pid: int, root: Path = Path("/")) -> int | None:
    """Returns the highest resident memory of a running process in bytes (VmHWM, see proc(5))."""
    kib = read_field(root / f"proc/{pid}/status", "VmHWM:")
    return None if kib is None else kib * 1024
