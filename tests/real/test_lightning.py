"""Lightning's Trainer, and loops on its Fabric."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed import PROGRAMS, lines, run, told, torchrun, verify

pytestmark = pytest.mark.real

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


@pytest.mark.parametrize("program", [LIGHTNING, FABRIC])
def test_a_right_program_is_equal(program: str, tmp_path: Path) -> None:
    verdict = verify("--steps", "3", "--batch-per-process", program, cwd=tmp_path)
    assert (verdict["verdict"], verdict["code"]) == ("EQUAL", 0), verdict["findings"]


DEFECTS = {
    (LIGHTNING, "order"): "LS109",  # a DistributedSampler of its own, which shuffles
    (LIGHTNING, "sampler"): "LS101",
    (LIGHTNING, "batchnorm"): "LS306",
    (LIGHTNING, "sum"): "LS202",
    (LIGHTNING, "rate"): "LS402",
    (FABRIC, "model"): "LS311",
    (FABRIC, "loader"): "LS101",
    (FABRIC, "local"): "LS301",
}


@pytest.mark.parametrize(
    ("program", "defect"), DEFECTS, ids=[f"{Path(p).stem}-{d}" for p, d in DEFECTS]
)
def test_a_defect_is_told(program: str, defect: str, tmp_path: Path) -> None:
    words = ("--steps", "3", "--batch-per-process", program, "--defect", defect)
    assert told(verify(*words, cwd=tmp_path))[0] == DEFECTS[program, defect]


def test_verify_says_that_a_rank_skipped_a_step(tmp_path: Path) -> None:
    words = ("--steps", "12", "--batch-per-process", FABRIC, "--defect", "skip")
    verdict = verify(*words, cwd=tmp_path)
    # Where the step is skipped, the samples part first.
    assert told(verdict) == ["LS109", "LS405"]
    assert 'if options.defect == "skip"' in str(verdict["findings"][0]["seen"])
    assert "rank 1 ended without an error after optimizer step 10" in str(verdict["findings"])


def test_verify_shows_lightning_s_own_words_on_a_skipped_step(tmp_path: Path) -> None:
    words = ("--steps", "3", "--batch-per-process", LIGHTNING, "--defect", "skip")
    verdict = verify(*words, cwd=tmp_path)
    assert (verdict["verdict"], verdict["code"]) == ("FAILED", 2)
    assert "Skipping the `training_step` by returning None" in str(verdict)
