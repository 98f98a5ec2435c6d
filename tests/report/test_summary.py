"""`lockstep report --json`: what the page says, for programs."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import made
import pytest
import schemas
from click.testing import CliRunner

import lockstep
from lockstep.cli.main import main

pytestmark = pytest.mark.unit


def report(*arguments: object) -> Any:
    result = CliRunner().invoke(main, ["report", *map(str, arguments), "--json", "-"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    schemas.check("report", summary)
    return summary


def test_what_it_says_of_a_run(tmp_path: Path) -> None:
    logged = [
        made.logged(50, {"loss": 0.5}, "epoch 0", training=True),
        made.logged(100, {"loss": 0.25}, "epoch 1", training=True),
        made.logged(100, {"accuracy": 0.75}, "validation", loader=1),
    ]
    slow = made.noisy({1: ("forward", 0.1)})
    made.write(tmp_path, 2, work=slow, loss=lambda step: 4.0, lines=tuple(logged))
    summary = report(tmp_path)
    assert (summary["end"], summary["ranks"], summary["last_step"]) == ("ok", 2, 100)
    assert summary["loss"] == {"step": 100, "value": 4.0}
    assert summary["logged"] == {
        "loss (training)": {"step": 100, "value": 0.25},
        "accuracy (validation)": {"step": 100, "value": 0.75},
    }
    [finding] = [each for each in summary["findings"] if each["level"] == "warning"]
    assert finding["text"].startswith("rank 1")
    assert finding["advice"]
    phases = summary["seconds_per_step"]
    assert phases["1"]["forward"] > phases["0"]["forward"] + 0.05
    assert summary["comparison"] is None


def test_a_run_that_failed_without_a_step_and_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    made.write(tmp_path / "none", 2, rows=0, end="failed")
    summary = report(tmp_path / "none")
    assert (summary["end"], summary["loss"], summary["speed"]) == ("failed", None, None)
    made.write(tmp_path / "nan", 1, loss=lambda step: float("inf"), end=None)
    summary = report(tmp_path / "nan", tmp_path / "none")
    assert summary["loss"]["value"] == "Infinity"
    assert summary["end"] is None
    assert summary["comparison"]["names"] == ["nan", "none"]
    assert summary["comparison"]["figures"]["Ranks"] == ["1", "2"]


@pytest.mark.parametrize("option", [["--live"], ["--to", "tensorboard"], ["--out", "page.html"]])
def test_it_goes_with_nothing_else(option: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--json", "-", *option])
    assert result.exit_code == 2
    assert f"--json - with {option[0]}" in result.stderr


def test_as_an_object(tmp_path: Path) -> None:
    made.write(tmp_path / "run", 2, work=made.noisy({1: ("forward", 0.1)}), loss=lambda step: 4.0)
    shown = lockstep.report(tmp_path / "run")
    first, finding, *_ = repr(shown).splitlines()
    assert first == f"report of {tmp_path / 'run'}: 2 ranks, ok, last step 100, loss 4.000"
    assert finding.startswith("  warning: rank 1")
    frame = shown._repr_html_()
    assert frame.startswith("<iframe srcdoc=")
    assert frame.count("<") == 2  # the page is escaped, and cannot end its frame
    page = html.unescape(frame.split('"')[1])
    assert page.rstrip().endswith("</html>")
    made.write(tmp_path / "run", 3, number=2)
    assert " 3 ranks" in repr(shown)


def test_the_check_of_a_schema_finds_what_is_wrong(tmp_path: Path) -> None:
    made.write(tmp_path, 1)
    good = report(tmp_path)
    for wrong in (
        {**good, "more": 1},
        {key: value for key, value in good.items() if key != "facts"},
        {**good, "end": "well"},
        {**good, "ranks": True},
        {**good, "starts": []},
        {**good, "loss": {"step": 1, "value": "one"}},
    ):
        with pytest.raises(AssertionError):
            schemas.check("report", wrong)
