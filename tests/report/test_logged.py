"""Which means over the ranks are shown: those of which every rank's part is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import made
import pytest

from lockstep.extensions.report import trackers
from lockstep.extensions.report.charts import logged_values
from lockstep.extensions.report.reading import Record
from lockstep.extensions.report.record_format import COLUMNS

pytestmark = pytest.mark.unit


def add(folder: Path, rank: int, *lines: Any) -> None:
    """Adds lines to what a rank has written."""
    (path,) = folder.glob(f"*.rank{rank}.record")
    with open(path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def row(step: int) -> list[float]:
    return [step, 1, *[1.0] * (len(COLUMNS) - 2)]


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for title, (steps, values) in logged_values(Record(folder).starts[0]).items():
        found[title] = [
            (int(step), float(value)) for step, value in zip(steps, values, strict=True)
        ]
    return found


@pytest.mark.parametrize("sign", ["the same pass", "a later row", "a later value", "the end"])
def test_a_mean_is_left_out_until_it_is_known_what_each_rank_has(sign: str, tmp_path: Path) -> None:
    made.write(tmp_path, 2, rows=5, end=None)
    add(tmp_path, 0, made.logged(5, {"acc": 0.0}, weight=3.0), made.logged(5, {"b": 1.0}, loader=1))
    assert curves(tmp_path) == {}
    line: Any = {
        "the same pass": made.logged(5, {"acc": 1.0}),
        "a later row": row(6),
        "a later value": {"logged": {"x": 1.0}, "weights": {"x": 1.0}, "step": 6},
        "the end": {"end": "ok"},
    }[sign]
    add(tmp_path, 1, line)
    if sign == "the same pass":  # what follows it is not known yet
        assert curves(tmp_path) == {"acc (evaluation)": [(5, 0.25)]}
    else:
        assert curves(tmp_path) == {"acc (evaluation)": [(5, 0.0)], "b (evaluation)": [(5, 1.0)]}


def test_nothing_is_known_of_a_rank_that_lost_lines_was_killed_or_has_no_file(
    tmp_path: Path,
) -> None:
    for name, end in (("lost", {"end": "failed", "lost": True}), ("killed", None)):
        made.write(tmp_path / name, 2, rows=5, end=None)
        add(tmp_path / name, 0, made.logged(4, {"acc": 0.0}), made.logged(5, {"acc": 0.5}))
        add(tmp_path / name, 0, {"end": "ok"})
        if end is not None:
            add(tmp_path / name, 1, end)
        assert curves(tmp_path / name) == {"acc (evaluation)": [(4, 0.0)]}
    (path,) = (tmp_path / "lost").glob("*.rank1.record")
    path.unlink()
    assert curves(tmp_path / "lost") == {}


def test_a_rank_that_only_repeats_another_ones_work_is_not_waited_for(tmp_path: Path) -> None:
    made.write(tmp_path, 2, rows=5, end=None, contributes=False)
    (path,) = tmp_path.glob("*.rank0.record")
    path.write_text(path.read_text().replace('"contributes": false', '"contributes": true'))
    add(tmp_path, 0, made.logged(5, {"acc": 0.5}))
    assert curves(tmp_path) == {"acc (evaluation)": [(5, 0.5)]}


def test_passes_are_told_apart_by_loader_step_and_number(tmp_path: Path) -> None:
    """Rank 1 has logged nothing in some of them."""
    made.write(tmp_path, 2, rows=9)
    add(
        tmp_path,
        0,
        made.logged(3, {"acc": 1.0}, loader=1),
        made.logged(3, {"acc": 2.0, "b": 1.0}, loader=2),
        made.logged(3, {"acc": 3.0}, loader=1, number=2),
        made.logged(5, {"acc": 4.0}, loader=2),
        {"logged": {"x": 1.0}, "weights": {"x": 1.0}, "step": 5},
    )
    add(
        tmp_path,
        1,
        made.logged(3, {"acc": 4.0}, loader=2),
        made.logged(3, {"acc": 5.0}, loader=1, number=2),
        {"logged": {"x": 3.0, "y": 7.0}, "weights": {"x": 1.0, "y": 1.0}, "step": 5},
    )
    # The last of several values of one loader at one step counts.
    assert curves(tmp_path) == {
        "acc (evaluation)": [(3, 4.0), (5, 4.0)],
        "acc (evaluation 2)": [(3, 3.0)],
        "b (evaluation)": [(3, 1.0)],
        "x": [(5, 2.0)],
        "y": [(5, 7.0)],
    }
    values = [(mean.name, mean.mean, mean.weight) for mean in Record(tmp_path).starts[0].logged]
    assert values[:3] == [("acc", 1.0, 1.0), ("acc", 3.0, 2.0), ("b", 1.0, 1.0)]


class Sent:
    """Stands for the writer of a tracker."""

    def __init__(self) -> None:
        self.values: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        if "/" in name:
            self.values.append((name, value, step))


def test_a_tracker_gets_each_mean_once_when_it_is_known(tmp_path: Path, monkeypatch: Any) -> None:
    made.write(tmp_path, 2, rows=5, end=None)
    sent = Sent()
    monkeypatch.setattr(trackers, "_make_writer", lambda *_: sent)
    record = Record(tmp_path)
    exporter = trackers.Exporter(record, "mlflow")
    of_rank_0 = [
        made.logged(5, {"acc": 0.0}, loader=1),
        made.logged(5, {"acc": 2.0}, loader=2),
        made.logged(5, {"acc": 0.5}, loader=1, number=2),
        row(6),
    ]
    of_rank_1 = [
        made.logged(5, {"acc": 4.0}, loader=2),
        made.logged(5, {"acc": 1.5}, loader=1, number=2),
        row(6),
    ]
    while of_rank_0 or of_rank_1:  # rank 0 is ahead
        for rank, lines in enumerate((of_rank_0, of_rank_1)):
            if lines:
                add(tmp_path, rank, lines.pop(0))
            record.refresh()
            exporter.write()
    assert sent.values == [
        ("evaluation 2/acc", 3.0, 5),
        ("evaluation/acc", 0.0, 5),
        ("evaluation/acc", 1.0, 5),
    ]
