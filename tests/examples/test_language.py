"""One script under every strategy: the language model has the same loss curve."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from ranks import HANG_S, run_ranks

pytestmark = pytest.mark.ranks

FOLDER = Path(__file__).parents[2] / "examples" / "language"
OPTIONS = {"epochs": 2, "batch_size": 12, "width": 32, "blocks": 2, "lr": 3e-3, "limit": 40}


def printed(program: str) -> list[str]:
    """The lines about epochs that a program prints."""
    sys.path.insert(0, str(FOLDER))
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        import_module(program).main(argparse.Namespace(**OPTIONS))
    return [line for line in text.getvalue().splitlines() if line.startswith("epoch")]


def losses(lines: list[str]) -> list[tuple[float, float]]:
    """In training and in the test, of every epoch."""
    assert len(lines) == OPTIONS["epochs"]
    found = [re.findall(r"\d+\.\d+", line) for line in lines]
    return [(float(training), float(test)) for training, test in found]


@pytest.fixture(scope="module")
def alone() -> list[str]:
    return run_ranks(printed, 1, "with_lockstep")[0]


@pytest.mark.parametrize(("strategy", "size"), [("ddp", 2), ("fsdp", 2), ("pipeline", 2)])
def test_the_curve_is_that_of_one_device(alone, strategy, size):
    first, *others = run_ranks(
        printed, size, "with_lockstep", env={"LOCKSTEP_STRATEGY": strategy}, timeout=HANG_S
    )
    assert others == [[]] * (size - 1), "rank 0 alone prints"
    for found, expected in zip(losses(first), losses(alone), strict=True):
        assert found == pytest.approx(expected, abs=2e-5)


def test_it_learns_as_plain_torch_does(alone):
    plain = run_ranks(printed, 1, "plain_torch")[0]
    for lines in (plain, alone):
        (first, _), (second, _) = losses(lines)
        assert second < first - 0.2
