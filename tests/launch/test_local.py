"""Real runs of small scripts, each a command as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

COMMAND = [sys.executable, "-m", "lockstep.cli.main", "run"]

# Knows nothing of Lockstep.
PLAIN = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS",
         "GLOO_SOCKET_IFNAME", "LOCKSTEP_STRATEGY", "LOCKSTEP_SEED")
seen = {name: os.environ.get(name) for name in names}
with open(f"seen-{dist.get_rank()}.json", "w") as file:
    json.dump({**seen, "total": total.item(), "argv": sys.argv, "main": __name__,
               "threads": torch.get_num_threads()}, file)
dist.destroy_process_group()
"""

FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    if sys.argv[1] == "raise": raise ValueError("a bad sample")
    if sys.argv[1] == "exit": sys.exit(9)
    os.kill(os.getpid(), 9)
time.sleep(300)
"""

WAITS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(os.getpid(), child.pid)
time.sleep(300)
"""


def environment(**changes: str) -> dict[str, str]:
    kept = {
        n: v for n, v in os.environ.items() if n not in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    }
    return {**kept, **changes}


def lockstep_run(
    folder: Path, text: str, *arguments: str, **changes: str
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_script_that_knows_only_torch(tmp_path: Path) -> None:
    flags = ["--nproc", "2", "--strategy", "ddp", "--seed", "5", "--max-restarts=0"]
    done = lockstep_run(tmp_path, PLAIN, *flags, "script.py", "--seed", "9", "--", "a b")
    assert done.returncode == 0, done.stderr
    cores = len(os.sched_getaffinity(0))
    assert "OMP_NUM_THREADS" in done.stderr.splitlines()[0]
    for rank in range(2):
        seen = json.loads((tmp_path / f"seen-{rank}.json").read_text())
        assert seen == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": seen["OMP_NUM_THREADS"],
            "GLOO_SOCKET_IFNAME": "lo",
            "LOCKSTEP_STRATEGY": "ddp",
            "LOCKSTEP_SEED": "5",
            "total": 3.0,
            "argv": ["script.py", "--seed", "9", "--", "a b"],
            "main": "__main__",
            "threads": int(seen["OMP_NUM_THREADS"]),
        }
        assert 1 <= seen["threads"] <= max(1, cores // 2)


def test_a_module_and_the_users_own_variables(tmp_path: Path) -> None:
    own = {"OMP_NUM_THREADS": "3", "PET_NPROC_PER_NODE": "1"}
    done = lockstep_run(tmp_path, PLAIN, "-m", "script", **own)
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen-0.json").read_text())
    assert (seen["OMP_NUM_THREADS"], seen["WORLD_SIZE"]) == ("3", "1")


@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        ("raise", 1, "rank 1 failed first (exit code 1)"),
        ("exit", 9, "rank 1 failed first (exit code 9)"),
        ("kill", 137, "rank 1 failed first (SIGKILL)"),
    ],
)
def test_the_rank_that_failed_is_named_last(tmp_path: Path, how: str, code: int, line: str) -> None:
    done = lockstep_run(tmp_path, FAILS, "--nproc=2", "script.py", how)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == f"lockstep: {line}"
    assert how != "raise" or "ValueError: a bad sample" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_process(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(WAITS)
    launcher = subprocess.Popen(
        [*COMMAND, "--nproc=2", "script.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    pids = " ".join(launcher.stdout.readline() for _ in range(2)).split()
    started = [psutil.Process(int(pid)) for pid in pids]
    assert len(started) == 4
    launcher.send_signal(number)
    _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number
    assert (
        stderr.splitlines()[-1]
        == f"lockstep: ended by {number.name}, with every process of the run"
    )
    assert psutil.wait_procs(started, timeout=5)[1] == []
