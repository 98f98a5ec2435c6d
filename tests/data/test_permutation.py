"""The order of a dataset that is too large to be drawn whole, one index at a time and many."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from lockstep.batch.plan import plan_epoch
from lockstep.batch.shuffling import is_shuffled_in_slices, permuted_indices, shuffled_indices

pytestmark = pytest.mark.unit

MASK = 2**64 - 1


def naive(place: int, length: int, keys: list[int]) -> int:
    """One index, with the whole numbers of Python; reads as the definition does."""
    columns = math.isqrt(length - 1) + 1
    rows = -(-length // columns)
    row, column = divmod(place, columns)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            column = (column + moved(row, key, columns)) % columns
        else:
            row = (row + moved(column, key, rows)) % rows
    found = row * columns + column
    return found if found < length else naive(found, length, keys)


def moved(number: int, key: int, width: int) -> int:
    """Output `number` of the SplitMix64 generator that is seeded with `key`, within `width`."""
    z = (key + number * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return ((z ^ (z >> 31)) >> 32) * width >> 32


def keys_of(number: int, rounds: int = 6) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 2**64, rounds, np.uint64)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 97, 1797, 16385, 10**6, 10**12, sys.maxsize])
def test_many_at_a_time_are_what_one_at_a_time_is(length):
    keys = keys_of(length % 97)
    places = min(length, 200)
    for begin in {0, length // 2 - places // 2, length - places}:
        found = permuted_indices(begin, begin + places, length, keys)
        assert found.dtype == np.int64
        expected = [naive(p, length, keys.tolist()) for p in range(begin, begin + places)]
        assert found.tolist() == expected


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 99), st.data())
def test_every_index_once_however_it_is_read(length, number, data):
    keys = keys_of(number)
    whole = permuted_indices(0, length, length, keys)
    assert sorted(whole.tolist()) == list(range(length))
    begin = data.draw(st.integers(0, length))
    end = data.draw(st.integers(begin, length))
    assert permuted_indices(begin, end, length, keys).tolist() == whole[begin:end].tolist()


def test_the_order_is_pinned_for_all_time():
    """A run resumed with a later version must see the same samples."""
    assert plan_epoch(20_000, 5)[0].tolist() == PINNED[0]
    assert plan_epoch(10**12, 4, seed=7, epoch=3)[10**11].tolist() == PINNED[1]
    assert plan_epoch(sys.maxsize, 3, seed=2**64 - 1, epoch=1)[0].tolist() == PINNED[2]


PINNED = (
    [17004, 2707, 8663, 12588, 11660],
    [593320713642, 29615477932, 726284357306, 479591533078],
    [6658054891131554820, 3475988441438582149, 3399992108276429837],
)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("length", "size"), [(20_000, 96), (20_000, 19_999), (40_000, 16_384), (300, 7), (3, 7)]
)
def test_batches_read_together_are_those_read_alone(length, size, shuffle, drop_last):
    plan = plan_epoch(length, size, seed=1, shuffle=shuffle, drop_last=drop_last)
    alone = [plan[step].tolist() for step in range(len(plan))]
    assert [batch.tolist() for batch in plan.batches()] == alone
    for start in {0, len(plan) // 2, max(0, len(plan) - 1), len(plan)}:
        assert [batch.tolist() for batch in plan.batches(start)] == alone[start:]
        assert plan.sizes(start) == set(map(len, alone[start:]))
        assert plan.num_samples_from(start) == sum(map(len, alone[start:]))
    seen = sorted(itertools.chain.from_iterable(alone))
    assert len(seen) == len(set(seen)) == (length // size * size if drop_last else length)


@pytest.mark.parametrize("length", [3, 4, 5])
def test_all_orders_of_a_few_samples_come_equally_often(length):
    draws = 60 * math.factorial(length)
    orders = (shuffled_indices(length, seed=n, epoch=length) for n in range(draws))
    found = Counter(tuple(order.tolist()) for order in orders)
    assert len(found) == math.factorial(length)
    assert abs(normal([found[order] - 60 for order in found], 60)) < 4


def normal(apart: list[int] | np.ndarray, expected: float) -> float:
    """How far chi-square is from what chance gives, in standard deviations (about)."""
    squares = np.asarray(apart, np.float64) ** 2 / expected
    free = squares.size - 1
    return float((squares.sum() - free) / math.sqrt(2 * free))


def oddities(orders: list[np.ndarray]) -> dict[str, float]:
    """By how many standard deviations orders of the same length differ from random ones."""
    length, number = len(orders[0]), len(orders)
    places = np.arange(length)
    ranks = [order - (length - 1) / 2 for order in orders]
    spread = (length**2 - 1) / 12

    def alike(one: np.ndarray, other: np.ndarray) -> float:
        return float((one * other).mean() / spread * math.sqrt(len(one)))

    cells = sum(
        np.histogram2d(places, order, bins=32, range=[[0, length]] * 2)[0] for order in orders
    )
    steps = np.concatenate([np.diff(order) % length for order in orders])
    pairs = list(itertools.pairwise(orders))
    same = sum(int((one == other).sum()) for one, other in pairs)
    ascents = sum(int((np.diff(order) > 0).sum()) for order in orders)
    bits = np.bincount(np.concatenate([order[: length // 16] % 8 for order in orders]), minlength=8)
    return {
        "where a sample stands": normal(cells - cells.mean(), cells.mean()),
        "low bits of the first samples": normal(bits - bits.mean(), bits.mean()),
        "distance of neighbours": normal(
            np.histogram(steps, 64, (0, length))[0] - len(steps) / 64, len(steps) / 64
        ),
        "a sample and its place": max(abs(alike(r, places - (length - 1) / 2)) for r in ranks),
        "neighbours": max(abs(alike(r[:-1], r[1:])) for r in ranks),
        "one epoch and the next": max(abs(alike(a, b)) for a, b in itertools.pairwise(ranks)),
        "the same place in the next epoch": (same - len(pairs)) / math.sqrt(len(pairs)),
        "ascents": (ascents - number * (length - 1) / 2) / math.sqrt(number * length / 12),
    }


def epochs(length: int, number: int = 24) -> list[np.ndarray]:
    return [plan_epoch(length, length, seed=5, epoch=epoch)[0] for epoch in range(number)]


@pytest.mark.parametrize("length", [16_385, 30_011, 65_536])
def test_it_is_as_random_as_a_permutation_of_torch(length):
    assert is_shuffled_in_slices(length)
    assert {name: far for name, far in oddities(epochs(length)).items() if abs(far) > 4.5} == {}


def test_torch_passes_the_same_tests_and_worse_orders_do_not():
    length, generator = 20_011, torch.Generator().manual_seed(1)
    torchs = [torch.randperm(length, generator=generator).numpy() for _ in range(24)]
    assert max(map(abs, oddities(torchs).values())) < 4.5
    two = [permuted_indices(0, length, length, keys_of(n, rounds=2)) for n in range(24)]
    assert max(map(abs, oddities(two).values())) > 20
    affine = [(np.arange(length) * (7001 + 2 * n) + n) % length for n in range(24)]
    assert max(map(abs, oddities(affine).values())) > 20
    repeated = [torchs[0]] * 24
    assert abs(oddities(repeated)["one epoch and the next"]) > 20
