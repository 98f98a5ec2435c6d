"""The Trainer of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from installed import PROGRAMS, Ended, lines, run, told, torchrun, verify

pytestmark = pytest.mark.real

TRAINER = str(PROGRAMS / "trainer.py")


def trained(ended: Ended) -> list[str]:
    """Loss and norm of each step, and the sum of the weights."""
    assert ended.code == 0, ended.said
    return lines(ended.printed, "step", "weights")


def test_it_trains_as_under_torchrun(tmp_path: Path) -> None:
    numbers = trained(torchrun(TRAINER, cwd=tmp_path))
    assert len(numbers) == 13
    assert trained(run("--nproc", "2", TRAINER, cwd=tmp_path)) == numbers


def test_it_resumes_with_several_micro_batches_and_a_short_last_batch(tmp_path: Path) -> None:
    words = (TRAINER, "--samples", "45", "--accumulate", "2", "--save", "3")
    whole = trained(torchrun(*words, cwd=tmp_path))
    shutil.rmtree(tmp_path / "out")
    assert trained(run("--nproc", "2", *words, cwd=tmp_path)) == whole
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    resumed = trained(run("--nproc", "2", *words, "--resume", cwd=tmp_path))
    assert resumed == whole[3:]


DEFECTS = {
    "tokens": "LS205",
    "loader": "LS101",
    "drift": "LS304",
}


def test_it_is_equal_with_padded_batches(tmp_path: Path) -> None:
    """One process gets as many samples a step; the library builds the DataLoader anew."""
    verdict = verify("--steps", "3", "--batch-per-process", TRAINER, cwd=tmp_path)
    assert (verdict["verdict"], verdict["code"]) == ("EQUAL", 0), verdict["findings"]


def test_a_global_batch_that_grows_is_said(tmp_path: Path) -> None:
    verdict = verify("--steps", "3", TRAINER, cwd=tmp_path)
    assert told(verdict)[0] == "LS110"


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_told(defect: str, tmp_path: Path) -> None:
    words = ("--steps", "3", "--batch-per-process", TRAINER, "--defect", defect)
    assert told(verify(*words, cwd=tmp_path))[0] == DEFECTS[defect]
