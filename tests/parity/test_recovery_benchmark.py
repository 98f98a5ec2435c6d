"""The arithmetic of `make bench-recovery`."""

from __future__ import annotations

import pytest

from benchmarks.bench_recovery import (
    PARTS_OF_RECOVERY,
    Line,
    foretold_bytes,
    parts_of_recovery,
    progress,
    quiet_rate,
    read_lines,
    step_at,
    useful_part,
)

pytestmark = pytest.mark.unit


def steady(attempt: int, first: int, begin: int, end: int) -> list[Line]:
    """A step in each second, from a moment to another."""
    moments = range(begin, end)
    return [Line(attempt, first + at - begin, float(at), 1.0) for at in moments]


def test_a_line_that_is_half_written_is_left_out() -> None:
    assert read_lines("") == []
    assert read_lines("0 1 10.5 1.0\n0 2 11.") == [Line(0, 1, 10.5, 1.0)]


def test_steps_that_are_made_again_count_once() -> None:
    # Steps 1 to 10 until second 10. From second 14 on, steps 6 to 15 until second 24.
    lines = steady(0, 1, 0, 10) + steady(1, 6, 14, 24)
    assert step_at(lines, -1) == 0
    assert step_at(lines, 9.5) == 10
    assert step_at(lines, 14) == 6
    assert progress(lines, 9.5, 23.5) == 5
    assert progress(lines, 9.5, 15.5) == -3


def test_what_counts_is_compared_with_the_undisturbed_rate() -> None:
    lines = steady(0, 1, 0, 10) + steady(1, 6, 14, 24)
    # One step a second, in the last 4 s and in the last 0.4 * 15 s.
    moments = [-1, 9, 24]
    assert quiet_rate(lines, moments) == pytest.approx((4 + 5) / (4 + 6))
    assert useful_part(lines, moments) == pytest.approx(5 / (0.9 * 15))


def test_a_training_that_was_never_disturbed_is_useful_as_a_whole() -> None:
    lines = [
        line
        for attempt in range(4)
        for line in steady(attempt, 1 + 10 * attempt, 10 * attempt, 10 * attempt + 10)
    ]
    assert useful_part(lines, [0, 10, 20, 30, 40]) == pytest.approx(1, abs=0.05)


def test_time_in_which_a_rank_has_not_come_back_says_nothing_about_the_rate() -> None:
    # The second attempt begins in the last 0.4 * 10 s.
    lines = steady(0, 1, 0, 11) + steady(1, 11, 18, 21)
    assert quiet_rate(lines, [0, 10, 20]) == 1


def test_steps_of_one_replica_of_two_count_half() -> None:
    lines = [Line(0, 1, 1.0, 1.0), Line(1, 1, 1.1, 1.0), Line(1, 2, 2.0, 0.5), Line(1, 3, 3.0, 0.5)]
    assert progress(lines, 1.5, 4.0) == 1.0
    assert progress(lines, 0.0, 4.0) == 2.0


def test_parts_of_a_recovery_add_up() -> None:
    marks = {name: 100.0 + 2**place for place, name in enumerate(PARTS_OF_RECOVERY)}
    parts = parts_of_recovery(100.0, marks)
    assert list(parts) == list(PARTS_OF_RECOVERY)
    assert parts["forked"] == 1.0
    assert sum(parts.values()) == marks["step"] - 100.0


def test_the_memory_that_a_run_announces() -> None:
    said = (
        "every step is kept in memory: two copies, {} for a rank at most, {} on a machine at most"
    )
    assert foretold_bytes(said.format("512.0 KiB", "1.5 MiB")) == 1.5 * 2**20
    assert foretold_bytes(said.format("40.0 KiB", "80.0 KiB")) == 80 * 2**10
    with pytest.raises(AssertionError, match="kept nothing"):
        foretold_bytes("kept nothing")
