"""A run whose logs are deleted, or fill the disk: its failures are told as of any other."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import pytest
from launched import launch, with_disk

pytestmark = pytest.mark.launcher

DELETE = """
import os, shutil
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
if rank == 0:
    shutil.rmtree(Path(os.environ["LOCKSTEP_RANK_FOLDER"]).parents[1])
dist.all_reduce(torch.ones(1))
"""
RAISE = """
if rank == 1:
    raise ValueError("after the logs had gone")
dist.barrier()
"""
PRINT = """
if rank == 1:
    print("giving up", file=__import__("sys").stderr)
    os._exit(5)
dist.barrier()
"""
HANG = """
dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(2))
"""


def run(folder: Path, script: str) -> tuple[int, str]:
    (folder / "script.py").write_text(DELETE + script)
    done = launch(["run", "--nproc", "2", "--log-dir", "logs", "script.py"], cwd=folder)
    assert done.stderr.count("have been deleted") == 1
    assert re.search(r"logs: \S+/attempt_0 \(its logs were deleted\)", done.stderr)
    return done.returncode, done.stderr


def test_an_exception_is_reported_with_its_line_although_the_logs_are_deleted(
    tmp_path: Path,
) -> None:
    code, said = run(tmp_path, RAISE)
    assert code == 1
    assert "FIRST FAILURE: rank 1" in said
    assert "  ValueError: after the logs had gone\n  script.py:13: raise ValueError" in said
    assert "no exception was recorded" not in said
    [kept] = tmp_path.glob("logs/*/attempt_0/rank_1/error.json")
    assert "after the logs had gone" in kept.read_text()


@pytest.mark.thorough
def test_the_end_of_a_ranks_output_is_reported_although_its_log_is_deleted(tmp_path: Path) -> None:
    code, said = run(tmp_path, PRINT)
    assert code == 5
    assert "exit code 5; no exception was recorded\n  its last lines:\n    giving up" in said


@pytest.mark.thorough
def test_a_hang_is_reported_although_the_logs_are_deleted(tmp_path: Path) -> None:
    code, said = run(tmp_path, HANG)
    assert code == 70
    assert "deadlock: ranks 0-1 wait in collectives that do not match" in said
    assert "script.py:12: dist.barrier() if rank == 1" in said
    assert list(tmp_path.glob("logs/*/attempt_0/hang.txt"))


FILL = """
import os
restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
for _ in range(200):
    print("x" * 2000, flush=True)
if restarts == "0" and os.environ["RANK"] == "1":
    raise ValueError("its first life")
print("END", restarts)
"""


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
@pytest.mark.parametrize("disk", ["size=500k", "nr_inodes=12"])
def test_logs_that_fill_the_disk_keep_no_run_from_going_on(tmp_path: Path, disk: str) -> None:
    """Neither the present attempt nor the next one."""
    (tmp_path / "script.py").write_text(FILL)
    logs = tmp_path / "logs"
    logs.mkdir()
    run = ["run", "--nproc=3", "--max-restarts=1", "script.py"]
    env = {**os.environ, "TMPDIR": str(logs)}
    done = launch(run, tmp_path, env=env, first=[partial(with_disk, logs, disk)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("END 1") == 3
    full = re.findall("attempt_(.): No space left on device: the logs there end", done.stderr)
    assert full == ["0", "1"]
    assert "FIRST FAILURE: rank 1" in done.stderr
    assert "  ValueError: its first life\n" in done.stderr
    assert done.stderr.count("Traceback") == 1
