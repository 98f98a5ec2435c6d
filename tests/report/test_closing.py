from __future__ import annotations

from lockstep.report.console import closing_lines


def test_everything() -> None:
    lines = closing_lines(
        checkpoint="runs/digits",
        samples=36000,
        seconds=12.4,
        try_next=[("on 4 processes", "lockstep run --nproc 4 train.py"), ("see it", "ls runs")],
    )
    assert "\n".join(lines) == (
        "  trained     36 000 samples in 12.4 s, 2 903 samples/s\n"
        "  checkpoint  runs/digits\n"
        "  try next    on 4 processes  lockstep run --nproc 4 train.py\n"
        "              see it          ls runs"
    )


def test_what_is_not_given_is_left_out() -> None:
    assert closing_lines() == []
    assert closing_lines(checkpoint="runs") == ["  checkpoint  runs"]
