from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lockstep.run.start.machine import cores_allowed, cpu_quota, loopback_name

pytestmark = pytest.mark.launcher


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = "4:cpu,cpuacct:/job/step\n3:memory:/other\n"
V1_CPU = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("contents", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        (
            {  # the tightest of the groups above counts
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "800000 100000\n",
            },
            3.0,
        ),
        (
            {  # the host's path, seen from within a container
                "proc/self/cgroup": "0::/system.slice/host.scope\n",
                "sys/fs/cgroup/cpu.max": "400000 100000\n",
            },
            4.0,
        ),
        (
            {
                "proc/self/cgroup": V1,
                f"{V1_CPU}/job/step/cpu.cfs_quota_us": "150000",
                f"{V1_CPU}/job/step/cpu.cfs_period_us": "100000",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": V1,
                f"{V1_CPU}/cpu.cfs_quota_us": "-1",
                f"{V1_CPU}/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({"proc/self/cgroup": "nonsense\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, None),
    ],
)
def test_quota_of_the_control_group(
    tmp_path: Path, contents: dict[str, str], quota: float | None
) -> None:
    assert cpu_quota(files(tmp_path, contents)) == quota


@pytest.mark.parametrize(("quota", "cores"), [(None, 3), (2.9, 2), (0.5, 1), (64.0, 3)])
def test_cores_are_the_affinity_within_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5})
    monkeypatch.setattr("lockstep.run.start.machine.cpu_quota", lambda: quota)
    assert cores_allowed() == cores


def test_loopback_is_an_interface_of_this_machine() -> None:
    assert loopback_name() in {name for _, name in socket.if_nameindex()}
