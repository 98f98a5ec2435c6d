from __future__ import annotations

import math

import pytest

from lockstep.extensions.report.console import clock, duration, number, rate
from lockstep.extensions.report.pass_text import (
    BarLayout,
    PassState,
    bar_layout,
    plain_line,
    summary_line,
)

pytestmark = pytest.mark.unit

HALF = PassState(
    description="epoch 3",
    done=50,
    total=100,
    samples=3200,
    seconds=2.0,
    means={"acc": 0.5, "loss": 1.25},
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (1.0, "1.000"),
        (0.0412, "0.04120"),
        (-2.5, "-2.500"),
        (123.456, "123.5"),
        (1234.5, "1234"),
        (9999.4, "9999"),
        (9999.7, "10000"),
        (54321.6, "54322"),
        (-7654321.0, "-7654321"),
        (1.2e-5, "1.200e-05"),
        (3e9, "3.000e+09"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


def test_rate_and_times() -> None:
    assert rate(10864, 2.0) == "5 432 samples/s"
    assert rate(3, 2.0) == "1.5 samples/s"
    assert rate(0, 0.0) == "0 samples/s"
    assert [clock(s) for s in (7.4, 125, 3725)] == ["0:07", "2:05", "1:02:05"]
    assert [duration(s) for s in (1.94, 59.94, 59.97)] == ["1.9 s", "59.9 s", "1:00"]


def test_lines() -> None:
    means = "loss 1.250  acc 0.5000  1 600 samples/s"
    assert plain_line(HALF) == f"epoch 3  50/100  {means}  0:02 left"
    assert summary_line(HALF, is_complete=True) == f"epoch 3  {means}  2.0 s"
    assert summary_line(HALF, is_complete=False) == (
        f"epoch 3  stopped after 50 of 100 global batches  {means}  2.0 s"
    )


def test_a_pass_of_unknown_length() -> None:
    at = PassState(done=7, samples=70, seconds=1.0)
    assert plain_line(at) == "7 global batches  70 samples/s"
    assert (
        summary_line(at, is_complete=False) == "stopped after 7 global batches  70 samples/s  1.0 s"
    )
    assert bar_layout(at, 80) == BarLayout("", None, 0, "7  70 samples/s")


def test_time_left_counts_only_what_this_pass_did() -> None:
    resumed = PassState(begun=80, done=90, total=100, seconds=5.0)
    assert resumed.seconds_left == 5.0
    assert PassState(begun=80, done=80, total=100, seconds=5.0).seconds_left is None


@pytest.mark.parametrize("width", range(20, 120))
def test_a_row_fits_any_width(width: int) -> None:
    layout = bar_layout(HALF, width)
    assert layout.fraction == 0.5
    bar = "-" * layout.bar_width + "  " if layout.bar_width else ""
    assert len(f"{layout.description}  {bar}{layout.text}") <= width
    assert layout.text.startswith("50/100")
    if width >= 100:
        assert layout.text == "50/100  loss 1.250  acc 0.5000  1 600 samples/s  0:02 left"


def test_an_empty_epoch_has_no_bar() -> None:
    layout = bar_layout(PassState(description="x", total=0), 80)
    assert (layout.fraction, layout.bar_width) == (None, 0)
