"""The Trainer of transformers."""

from __future__ import annotations

import shutil
from pathlib import Path

from installed import PROGRAMS, Ended, lines, run, torchrun

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
