"""Lightning's Trainer, and loops on its Fabric."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed import PROGRAMS, lines, run, torchrun

LIGHTNING, FABRIC = str(PROGRAMS / "lit.py"), str(PROGRAMS / "fabric.py")


@pytest.mark.parametrize("program", [LIGHTNING, FABRIC])
def test_it_trains_as_under_torchrun(program: str, tmp_path: Path) -> None:
    theirs = torchrun(program, cwd=tmp_path)
    ours = run("--nproc", "2", program, cwd=tmp_path)
    assert (theirs.code, ours.code) == (0, 0), theirs.said + ours.said
    numbers = lines(theirs.printed, "step", "epoch", "weights")
    assert len(numbers) == 13
    assert lines(ours.printed, "step", "epoch", "weights") == numbers


@pytest.mark.parametrize("program", [LIGHTNING, FABRIC])
def test_what_starts_its_own_processes_elsewhere_takes_the_launcher_s(
    program: str, tmp_path: Path
) -> None:
    """As under torchrun: under plain Python Lightning would start a second process itself."""
    alone = run(program, "--devices", "2", cwd=tmp_path)
    assert alone.code == 1
    assert "`devices=2`" in alone.said
    assert "what to do: start as many processes: lockstep run --nproc N" in alone.said
    both = run("--nproc", "2", program, "--devices", "2", cwd=tmp_path)
    assert both.code == 0, both.said


def test_a_rank_that_skips_a_step_is_told(tmp_path: Path) -> None:
    ended = run("--nproc", "2", FABRIC, "--defect", "skip", cwd=tmp_path)
    assert ended.code == 71, ended.said
    _, _, verdict = ended.said.partition("FIRST FAILURE: rank 1 on host ")
    assert "left early" in verdict, ended.said
    assert "every rank must take the same number of steps" in verdict
    assert "consequences: rank 0" in verdict
