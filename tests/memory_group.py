"""Control groups with a memory limit, in which the kernel's out-of-memory killer can be met."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """The folder of a group below our own: a process enters it by `cgroup.procs`.

    Skips the test where none can be made: that takes root, or a delegated group.
    """
    group = _make(limit_bytes)
    if group is None:
        pytest.skip("no control group with a memory limit can be made here")
    try:
        yield group
    finally:
        group.rmdir()


def _make(limit_bytes: int) -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version_1 = "memory" in controllers.split(",")
        if not version_1 and controllers:
            continue
        top = Path("/sys/fs/cgroup/memory" if version_1 else "/sys/fs/cgroup")
        limit = "memory.limit_in_bytes" if version_1 else "memory.max"
        for parent in (top / path.lstrip("/"), top):
            group = parent / f"lockstep-test-{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                continue
            try:
                (group / limit).write_text(str(limit_bytes))
            except OSError:
                group.rmdir()
                continue
            return group
    return None
