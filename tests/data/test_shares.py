"""The pure decisions behind `"auto"`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lockstep.batch.plan import part_sizes, split_batch
from lockstep.batch.shares import (
    are_equally_fast,
    choose_shares,
    choose_shares_by_times,
    confirm_shares,
    first_micro_batch,
    largest_that_fits,
    parse_micro_batch_size,
    step_seconds,
    times_are_sufficient,
)
from lockstep.errors import SettingError

pytestmark = pytest.mark.unit

FREE = [None, None]


def chosen(seconds, present=(1, 1), batch=1000, limits=FREE):
    return choose_shares(seconds, present, batch, limits)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 1.0), (1, 1)),
        ((1.5, 1.0), (2, 3)),
        ((3e-4, 1e-4), (1, 3)),
        ((1.0, 2.03), (2, 1)),
        ((2.0, 1.0, 1.0), (1, 2, 2)),
    ],
)
def test_shares_are_the_small_numbers_near_the_speeds(seconds, expected):
    ranks = len(seconds)
    assert choose_shares(seconds, (1,) * ranks, 1000, [None] * ranks) == expected


def test_the_same_speeds_within_noise_leave_the_shares_as_they_are():
    for noise in (0.92, 0.97, 1.03, 1.1):
        assert chosen((1.0, noise)) == (1, 1)
        assert chosen((1.5 * noise, 1.0), present=(2, 3)) == (2, 3)
    assert chosen((1.0, 1.4)) != (1, 1)


def test_many_ranks_of_which_one_is_slow():
    shares = choose_shares([1.0] * 15 + [2.0], (1,) * 16, 4096, [None] * 16)
    assert shares == (2,) * 15 + (1,)


def test_a_very_slow_rank_keeps_a_share():
    shares = chosen((1000.0, 1.0))
    assert shares[0] >= 1
    assert shares[1] >= 20 * shares[0]


@pytest.mark.parametrize("limit", [5, 17, 40, 99])
def test_no_rank_gets_more_than_fits(limit):
    shares = chosen((1.0, 3.0), batch=100, limits=[limit, None])
    assert part_sizes(100, shares)[0] <= limit
    assert part_sizes(100, shares)[0] > limit * 0.85 or limit == 99
    assert chosen((1.0, 1.0), batch=100, limits=[limit, 100 - limit]) is not None


def test_limits_that_leave_no_choice():
    shares = choose_shares([1.0, 1.0, 1.0], (1, 1, 1), 101, [50, 37, 14])
    assert part_sizes(101, shares) == [50, 37, 14]
    with pytest.raises(SettingError, match="micro_batch_size='auto' too"):
        chosen((1.0, 1.0), batch=100, limits=[50, 49])


MEASURED = {
    "in use now and then": (1.0, 1.02, 1.05, 1.10, 1.25, 1.60, 3.80),
    "always in use": (1.0, 1.09, 1.24, 1.36, 1.52, 1.91, 2.64),
}
"""How much longer than the shortest time a time was, in windows of 30 ms of a machine of two cores
that others used meanwhile: quantiles 0, 5, 25, 50, 75, 95 and 100 %."""
FOLLOWS = 0.5
"""Correlation of a window with the one before; 0.2 to 0.5 were measured."""


def noisy(rng: np.random.Generator, kind: str, count: int) -> list[float]:
    normal = rng.normal(size=count)
    for n in range(1, count):
        normal[n] = FOLLOWS * normal[n - 1] + math.sqrt(1 - FOLLOWS**2) * normal[n]
    return list(np.interp(normal, (-3.5, -1.645, -0.674, 0, 0.674, 1.645, 3.5), MEASURED[kind]))


def searched(rng: np.random.Generator, kind: str, seconds: tuple[float, ...]) -> tuple[int, ...]:
    """As `extensions.autotune` does it."""
    shares, tried = (1,) * len(seconds), {}
    free = [None] * len(seconds)
    while shares not in tried and len(tried) < 3:
        every = [[own * factor for factor in noisy(rng, kind, 20)] for own in seconds]
        taken = next(n for n in range(1, 21) if times_are_sufficient([each[:n] for each in every]))
        times = [each[:taken] for each in every]
        tried[shares] = step_seconds(times, shares, 64, free)
        shares = choose_shares_by_times(times, shares, 64, free)
    return confirm_shares(tried, shares)


@pytest.mark.parametrize("kind", MEASURED)
def test_noise_does_not_part_equal_ranks_nor_hide_one_that_is_twice_as_fast(kind):
    rng = np.random.default_rng(0)
    runs = 300
    for ranks in (2, 4):
        even = sum(searched(rng, kind, (1.0,) * ranks) == (1,) * ranks for _ in range(runs))
        assert even > 0.99 * runs, ranks
    found = [searched(rng, kind, (2.0, 1.0)) for _ in range(runs)]
    assert sum(1.5 <= fast / slow <= 2.7 for slow, fast in found) > 0.99 * runs


def test_quiet_ranks_are_measured_five_times_and_told_apart():
    quiet = [[1.00, 1.01, 1.0, 1.02, 1.01], [1.4, 1.42, 1.41, 1.4, 1.43]]
    assert not times_are_sufficient([each[:1] for each in quiet])
    assert not times_are_sufficient([each[:4] for each in quiet])
    assert times_are_sufficient(quiet)
    assert not are_equally_fast(quiet)
    assert choose_shares_by_times(quiet, (1, 1), 1000, FREE) == (7, 5)
    assert not times_are_sufficient([quiet[0], [1.4, 1.9, 2.0, 1.4, 1.9]])


def test_ranks_that_are_alike_get_even_shares_as_far_as_these_fit():
    times = [[1.0, 1.5, 1.6], [1.4, 1.4, 1.9]]
    assert are_equally_fast(times)
    assert choose_shares_by_times(times, (3, 2), 100, FREE) == (1, 1)
    fitting = choose_shares_by_times(times, (1, 1), 100, [40, None])
    assert part_sizes(100, fitting)[0] <= 40


def test_shares_must_have_been_faster_than_the_first():
    tried = {(1, 1): 1.05, (1, 2): 1.0, (1, 3): 1.1}
    assert confirm_shares(tried, (1, 4)) == confirm_shares(tried, (1, 2)) == (1, 1)
    assert confirm_shares({**tried, (1, 1): 1.2}, (1, 4)) == (1, 2)
    assert confirm_shares({**tried, (1, 1): 2.0}, (1, 3)) == (1, 3)  # where it came to rest
    even = step_seconds([[2.0, 3.0], [1.0, 4.0]], (1, 1), 8, [3, None])
    assert confirm_shares({(1, 1): even, (1, 2): 9.0}, (1, 2)) == (1, 2)  # even ones do not fit
    assert confirm_shares({(1, 1): even}, (1, 3)) == (1, 3)
    assert step_seconds([[2.0, 3.0], [1.0, 4.0]], (1, 2), 9, [3, None]) == 6.0


def test_parts_are_those_of_the_plan():
    for batch in (1, 2, 7, 64, 101):
        for shares in ((1,), (1, 1), (2, 3), (0, 1), (5, 1, 3)):
            piece = split_batch(batch, shares)[0]
            assert part_sizes(batch, shares) == (piece[:, 1] - piece[:, 0]).tolist()


@pytest.mark.parametrize("most", [1, 2, 3, 30, 64, 1000])
@pytest.mark.parametrize("true", [2, 3, 24, 63, 64, 900, 5000])
def test_the_largest_size_that_fits(most, true):
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= true

    found = largest_that_fits(fits, 2, most)
    assert found <= min(true, most)
    assert found == most or found >= true - max(1, found // 10)
    assert all(size <= most for size in tried)
    assert len(tried) == len(set(tried))


def test_a_size_that_fits_whole_is_found_by_doubling_alone():
    tried = []
    assert largest_that_fits(lambda size: not tried.append(size), 2, 100) == 100
    assert tried == [4, 8, 16, 32, 64, 100]


def test_the_first_micro_batch_gives_every_rank_with_a_share_something():
    def sizes(count, shares, most=None, whole=False, pieces=1):
        found = first_micro_batch(
            count, shares, split_batch(count, shares, pieces) if whole else None, most
        )
        return None if found is None else (found[..., 1] - found[..., 0]).tolist()

    assert sizes(100, (1, 1)) == [[2, 2]]
    assert sizes(100, (1, 50)) == [[2, 2]]
    assert sizes(100, (0, 1, 1)) == [[0, 2, 2]]
    assert sizes(100, (1, 1), most=1) == [[1, 1]]
    assert sizes(3, (1, 1)) == [[2, 1]]
    assert sizes(1, (1, 1)) is None
    assert sizes(100, (1, 3), whole=True) == [[25, 75]]
    assert sizes(100, (1, 1), whole=True, pieces=5) == [[10, 10]]
    assert sizes(1, (1, 1), whole=True) is None


def test_a_micro_batch_is_a_number_or_auto():
    assert parse_micro_batch_size(7) == 7
    assert parse_micro_batch_size("auto") is parse_micro_batch_size(None) is None
    for wrong in (2.5, True, "7", "all"):
        with pytest.raises(SettingError, match="whole number of samples"):
            parse_micro_batch_size(wrong)
