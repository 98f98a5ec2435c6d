"""The Trainer of transformers."""

from __future__ import annotations

from pathlib import Path

from installed import PROGRAMS, lines, run, torchrun

TRAINER = str(PROGRAMS / "trainer.py")


def test_the_trainer_trains_as_under_torchrun(tmp_path: Path) -> None:
    theirs = torchrun(TRAINER, cwd=tmp_path)
    ours = run("--nproc", "2", TRAINER, cwd=tmp_path)
    assert (theirs.code, ours.code) == (0, 0), theirs.said + ours.said
    numbers = lines(theirs.printed, "step", "weights")
    assert len(numbers) == 13
    assert lines(ours.printed, "step", "weights") == numbers
