from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lockstep.batch.plan import (
    batches_in_epoch,
    micro_batches_needed,
    part_sizes,
    plan_epoch,
    split_batch,
    split_over_virtual_ranks,
)
from lockstep.batch.shuffling import shuffled_indices
from lockstep.errors import DataError, SettingError
from lockstep.session.micro_batch import VirtualRanks
from lockstep.settings import parse_shares

pytestmark = pytest.mark.unit

lengths = st.integers(0, 500)
batch_sizes = st.integers(1, 80)
shares = st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any).map(tuple)
micro = st.integers(1, 9)
many = settings(max_examples=300, deadline=None)


def computed(parts: np.ndarray) -> list[int]:
    """The places of the batch that any rank computes, in order."""
    return sorted(i for begin, end in parts.reshape(-1, 2) for i in range(begin, end))


@many
@given(lengths, batch_sizes, shares, micro, st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_every_sample_exactly_once_an_epoch(length, size, ratio, pieces, epoch, seed, shuffle):
    plan = plan_epoch(length, size, seed=seed, epoch=epoch, shuffle=shuffle)
    seen = [
        int(plan[step][i])
        for step in range(len(plan))
        for i in computed(split_batch(len(plan[step]), ratio, pieces))
    ]
    assert sorted(seen) == list(range(length))


@many
@given(lengths, batch_sizes, shares, shares, micro, micro)
def test_order_is_independent_of_world_size_shares_and_micro_batches(
    length, size, one, other, pieces, others
):
    plan = plan_epoch(length, size)
    for step in range(len(plan)):
        batch = plan[step]
        for ratio, k in ((one, pieces), (other, others)):
            parts = split_batch(len(batch), ratio, k)
            # Read micro-batch by micro-batch and rank by rank, the batch comes out in order.
            flat = [int(batch[i]) for begin, end in parts.reshape(-1, 2) for i in range(begin, end)]
            assert flat == batch.tolist()


@many
@given(st.integers(0, 400), shares, micro)
def test_shares_are_honoured_within_one_sample(count, ratio, pieces):
    parts = split_batch(count, ratio, pieces)
    of_rank = (parts[..., 1] - parts[..., 0]).sum(axis=0)
    exact = count * np.array(ratio) / sum(ratio)
    assert np.abs(of_rank - exact).max() < 1
    assert all(n == 0 for n, share in zip(of_rank, ratio, strict=True) if share == 0)


@many
@given(st.integers(0, 400), shares, shares, micro)
def test_micro_batches_hold_the_same_samples_on_any_number_of_ranks(count, one, other, pieces):
    ends = [split_batch(count, ratio, pieces)[:, -1, 1].tolist() for ratio in (one, other)]
    assert ends[0] == ends[1]
    sizes = np.diff([0, *ends[0]])
    assert sizes.max() - sizes.min() <= 1
    assert count == 0 or sizes.min() >= 1


@many
@given(lengths, batch_sizes, st.integers(0, 40), st.integers(0, 3))
def test_resuming_repeats_and_skips_nothing(length, size, stop, epoch):
    plan, again = (plan_epoch(length, size, epoch=epoch) for _ in range(2))
    stop = min(stop, len(plan))
    seen = [plan[t].tolist() for t in range(stop)] + [
        again[t].tolist() for t in range(stop, len(again))
    ]
    assert sorted(sum(seen, [])) == list(range(length))


@many
@given(lengths, batch_sizes)
def test_last_batch(length, size):
    whole, dropped = plan_epoch(length, size), plan_epoch(length, size, drop_last=True)
    assert len(whole) == -(-length // size) == batches_in_epoch(length, size, drop_last=False)
    assert len(dropped) == length // size == batches_in_epoch(length, size, drop_last=True)
    assert all(len(dropped[t]) == size for t in range(len(dropped)))
    if len(whole):
        assert len(whole[len(whole) - 1]) == (length % size or size)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 2])
def test_fewer_samples_than_ranks(length, ranks):
    plan = plan_epoch(length, 4)
    assert len(plan) == (1 if length else 0)
    parts = split_batch(length, (1,) * ranks, 3)
    assert computed(parts) == list(range(length))


def test_every_epoch_and_seed_has_its_own_order():
    seeds = [*range(4), 2**32, 2**32 + 1, 3 * 2**32 + 1, 2**64 - 1]
    orders = {tuple(shuffled_indices(50, seed=s, epoch=e)) for s in seeds for e in range(4)}
    assert len(orders) == len(seeds) * 4


def test_the_order_is_pinned_for_all_time():
    """A run resumed with a later version must see the same samples."""
    assert shuffled_indices(10, seed=0, epoch=0).tolist() == PINNED[0]
    assert shuffled_indices(10, seed=7, epoch=3).tolist() == PINNED[1]


PINNED = ([0, 8, 9, 3, 7, 5, 1, 2, 6, 4], [7, 1, 9, 6, 0, 4, 2, 8, 3, 5])


@many
@given(st.integers(1, 200), shares, st.integers(1, 50))
def test_micro_batches_needed_keeps_every_part_small_enough(size, ratio, largest):
    pieces = micro_batches_needed(size, ratio, largest)
    parts = split_batch(size, ratio, pieces)
    assert (parts[..., 1] - parts[..., 0]).max() <= largest
    assert 1 <= pieces <= size


def test_the_documented_splits():
    sizes = lambda *a: (np.diff(split_batch(*a), axis=-1)[..., 0]).tolist()  # noqa: E731
    assert sizes(8, (1, 1)) == [[4, 4]]
    assert sizes(9, (1, 1)) == [[5, 4]]
    assert sizes(8, (2, 3, 3)) == [[2, 3, 3]]
    assert sizes(16, (4, 6, 6), 2) == [[2, 3, 3], [2, 3, 3]]
    assert sizes(1, (1, 1, 1)) == [[1, 0, 0]]
    assert sizes(8, (0, 1)) == [[0, 8]]


def test_the_documented_splits_over_virtual_ranks():
    def parts(ranks: int, *, train_copies: bool = False) -> list[list[list[int]]]:
        virtual_ranks = VirtualRanks(count=3, train_copies=train_copies)
        return split_batch(12, (1,) * ranks, 1, virtual_ranks).tolist()

    assert parts(1) == [[[0, 4]], [[4, 8]], [[8, 12]]]
    assert parts(2) == [[[0, 4], [8, 12]], [[4, 8], [12, 12]]]
    assert parts(3) == [[[0, 4], [4, 8], [8, 12]]]
    six = parts(6, train_copies=True)
    assert six == [[[0, 2], [2, 4], [4, 6], [6, 8], [8, 10], [10, 12]]]


@many
@given(
    count=st.integers(0, 60), number=st.integers(1, 6), factor=st.integers(1, 3),
    ranks=st.integers(1, 6), pieces=micro, train_copies=st.booleans(),
)  # fmt: skip
def test_a_virtual_rank_has_the_same_samples_on_any_number_of_ranks(
    count, number, factor, ranks, pieces, train_copies
):
    virtual_ranks = VirtualRanks(count=number, train_copies=train_copies)
    sizes = part_sizes(count, (1,) * number)
    begins = np.cumsum([0, *sizes])
    # Several ranks for each virtual rank, which only copies may have; or several of these on each.
    num_ranks = number * factor if train_copies and factor > 1 else min(ranks, number)
    pieces_of_ranks = split_over_virtual_ranks(count, (1,) * num_ranks, pieces, virtual_ranks)

    samples: dict[int, list[int]] = {virtual_rank: [] for virtual_rank in range(number)}
    for pieces_of_rank in pieces_of_ranks:
        for piece in pieces_of_rank:
            assert not (piece.is_padding and piece.begin < piece.end)
            samples[piece.virtual_rank] += range(piece.begin, piece.end)
    for virtual_rank, found in samples.items():
        assert sorted(found) == list(range(begins[virtual_rank], begins[virtual_rank + 1]))
    assert len({len(pieces_of_rank) for pieces_of_rank in pieces_of_ranks}) == 1


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "8", None])
def test_wrong_batch_sizes(size):
    with pytest.raises(DataError, match="batch_size="):
        plan_epoch(10, size)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("1:2:3", "3 shares for a world size of 2"),
        ((1,), "1 share for a world size of 2"),
        ("1:x", "not whole numbers"),
        ((1.5, 1), "not whole numbers"),
        ("0:0", "one is above 0"),
        ((-1, 2), "at least 0"),
        ("auto", "not whole numbers"),
    ],
)
def test_wrong_shares(given, found):
    with pytest.raises(SettingError, match=found):
        parse_shares(given, 2)


def test_shares_are_reduced_to_lowest_terms():
    assert parse_shares("2:4", 2) == (1, 2)
    assert parse_shares([3, 3], 2) == (1, 1)
    assert parse_shares(None, 3) == (1, 1, 1)
    with pytest.raises(SettingError, match="micro_batch_size=0"):
        micro_batches_needed(8, (1,), 0)
