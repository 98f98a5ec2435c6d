"""Accelerate: its own test scripts as installed, and a loop as a user writes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from installed import PROGRAMS, lines, run, told, torchrun, verify

pytestmark = pytest.mark.real

SCRIPTS = "accelerate.test_utils.scripts"
ACCELERATED = str(PROGRAMS / "accelerated.py")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, and without a GPU, each process is a run of its own."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")


@pytest.mark.parametrize("name", ["test_script", "test_sync", "test_ops"])
def test_its_own_tests_pass(name: str, tmp_path: Path) -> None:
    ended = run("--nproc", "2", "-m", f"{SCRIPTS}.{name}", cwd=tmp_path)
    assert ended.code == 0, ended.said
    assert "FIRST FAILURE" not in ended.said
    said = {
        "test_script": "**Test split between processes as a tensor**",
        "test_sync": "**Test Distributed `no_sync` context manager**",
        "test_ops": "testing reduce_sum",
    }[name]
    assert said in ended.printed


def test_its_deadlock_is_told(tmp_path: Path) -> None:
    """With `join_uneven_inputs`, which does nothing on CPUs, one rank has a batch more."""
    ended = run("--nproc", "2", "-m", f"{SCRIPTS}.test_distributed_data_loop", cwd=tmp_path)
    assert ended.code == 70, ended.said
    _, _, verdict = ended.said.partition("FIRST FAILURE: ranks 0-1 on host ")
    assert "deadlock: ranks 0-1 wait in collectives that do not match" in verdict, ended.said
    script = r"test_distributed_data_loop\.py:\d+: "
    assert re.search(rf"rank 0 .*: waits in broadcast .*\n    {script}output = ddp_model", verdict)
    assert re.search(rf"rank 1 .*: waits in barrier.*\n    {script}accelerator.wait_for", verdict)


def test_a_loop_trains_as_under_torchrun(tmp_path: Path) -> None:
    theirs = torchrun(ACCELERATED, cwd=tmp_path)
    ours = run("--nproc", "2", ACCELERATED, cwd=tmp_path)
    assert (theirs.code, ours.code) == (0, 0), theirs.said + ours.said
    numbers = lines(theirs.printed, "epoch", "weights")
    assert len(numbers) == 13
    assert lines(ours.printed, "epoch", "weights") == numbers


def test_a_right_loop_is_equal(tmp_path: Path) -> None:
    verdict = verify("--steps", "3", "--batch-per-process", ACCELERATED, cwd=tmp_path)
    assert (verdict["verdict"], verdict["code"]) == ("EQUAL", 0), verdict["findings"]


DEFECTS = {
    "order": "LS109",  # without a seedable sampler each number of processes draws another one
    "model": "LS311",
    "loader": "LS101",
    "clip": "LS304",
    "schedule": "LS401",
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_told(defect: str, tmp_path: Path) -> None:
    words = ("--steps", "3", "--batch-per-process", ACCELERATED, "--defect", defect)
    assert told(verify(*words, cwd=tmp_path))[0] == DEFECTS[defect]
