"""The global batch: which samples form it, and who computes which of them.

A *global batch* holds the samples of one optimizer step, over all ranks. Two pure functions carry
all of Lockstep's promises about data:

1. `plan_epoch(length, batch_size, seed=, epoch=, ...)` divides an epoch into global batches. It
   knows nothing of devices, so the order of samples cannot depend on them.
2. `split_batch(count, shares, micro_batches)` divides one global batch into micro-batches, and each
   of these into the parts of the ranks. It knows nothing of the data. *Shares* say how much each
   rank computes, one whole number a rank.

A global batch is laid out as consecutive micro-batches, and each micro-batch as consecutive parts
of the ranks. The micro-batches hold the same samples on any number of ranks, which is what makes
BatchNorm, whose statistics are those of a micro-batch, independent of that number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from lockstep.batch.indices import Indices, ceil_div
from lockstep.batch.shuffling import (
    NUM_ROUNDS,
    is_permuted,
    permuted_indices,
    random_words,
    shuffled_indices,
)
from lockstep.errors import DataError
from lockstep.session.micro_batch import VirtualRanks
from lockstep.settings import check_micro_batch_size, is_whole_number

INDICES_COMPUTED_AT_ONCE = 2**14


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The global batches of one epoch: `plan[t]` holds the sample indices of batch t, in order."""

    num_samples: int
    """How many samples the epoch has."""
    batch_size: int
    read_order: Callable[[int, int], Indices]
    """Returns the sample indices from one place of the epoch's order to before another."""

    def __len__(self) -> int:
        return ceil_div(self.num_samples, self.batch_size)

    def __getitem__(self, step: int) -> Indices:
        if not 0 <= step < len(self):
            raise IndexError(step)
        begin = step * self.batch_size
        end = min(begin + self.batch_size, self.num_samples)
        return self.read_order(begin, end)

    def batches(self, start: int = 0) -> Iterator[Indices]:
        """Yields the global batches from number `start` on.

        The indices of several small ones are computed together.
        """
        batches_at_once = max(1, INDICES_COMPUTED_AT_ONCE // self.batch_size)
        samples_at_once = batches_at_once * self.batch_size
        for begin in range(start * self.batch_size, self.num_samples, samples_at_once):
            indices = self.read_order(begin, min(begin + samples_at_once, self.num_samples))
            for batch_begin in range(0, len(indices), self.batch_size):
                yield indices[batch_begin : batch_begin + self.batch_size]

    def sizes(self, start: int = 0) -> set[int]:
        """Returns the different sizes of the global batches from number `start` on."""
        num_full, size_of_last = divmod(self.num_samples_from(start), self.batch_size)
        sizes = set()
        if num_full:
            sizes.add(self.batch_size)
        if size_of_last:
            sizes.add(size_of_last)
        return sizes

    def num_samples_from(self, start: int) -> int:
        """Returns how many samples the global batches from number `start` on have."""
        return max(0, self.num_samples - start * self.batch_size)


@dataclass(frozen=True, eq=False)
class CustomPlan:
    """The global batches of one epoch in an order of the user's own; see `EpochPlan`."""

    order: Indices
    """The sample indices of the epoch, shape `(samples,)`."""
    bounds: Indices
    """The positions in `order` at which batches begin and end, shape `(steps + 1,)`."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, step: int) -> Indices:
        if not 0 <= step < len(self):
            raise IndexError(step)
        return self.order[self.bounds[step] : self.bounds[step + 1]]

    def batches(self, start: int = 0) -> Iterator[Indices]:
        """Yields the global batches from number `start` on."""
        for step in range(start, len(self)):
            yield self[step]

    def sizes(self, start: int = 0) -> set[int]:
        """Returns the different sizes of the global batches from number `start` on."""
        return set(np.diff(self.bounds[start:]).tolist())

    def num_samples_from(self, start: int) -> int:
        """Returns how many samples the global batches from number `start` on have."""
        return int(self.bounds[-1] - self.bounds[start])


Plan = EpochPlan | CustomPlan


def plan_epoch(
    length: int,
    batch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
) -> EpochPlan:
    """Returns the global batches of one epoch, which depend on nothing but the arguments.

    Args:
        length: samples in the dataset, up to `sys.maxsize`.
        batch_size: samples in a global batch. The last one is shorter if `length` is not a multiple
            of it, or left out with `drop_last`.
        seed: of the run.
        epoch: counted from 0; every epoch has an order of its own.
        shuffle: False keeps the dataset's order.
        drop_last: leave out a last batch that is not full.

    Raises:
        DataError: `batch_size` or `length` is out of range.
    """
    check_batch_size(batch_size)
    if length < 0:
        raise DataError(f"a dataset of length {length}", "a length is at least 0", "fix __len__")
    num_samples = length - length % batch_size if drop_last else length
    if not shuffle:
        return EpochPlan(num_samples, batch_size, partial(np.arange, dtype=np.int64))
    if not is_permuted(length):  # it is short enough to draw the order as a whole
        order = shuffled_indices(length, seed=seed, epoch=epoch)
        return EpochPlan(num_samples, batch_size, lambda begin, end: order[begin:end])
    keys = random_words(seed, epoch, NUM_ROUNDS)
    return EpochPlan(
        num_samples, batch_size, lambda begin, end: permuted_indices(begin, end, length, keys)
    )


def plan_custom_order(order: Indices, batch_size: int, *, drop_last: bool) -> CustomPlan:
    """Returns consecutive global batches of a given order of sample indices."""
    num_batches = batches_in_epoch(len(order), batch_size, drop_last=drop_last)
    bounds = np.arange(num_batches + 1, dtype=np.int64) * batch_size
    bounds = np.minimum(bounds, len(order))  # the last batch may be short
    return CustomPlan(order[: bounds[-1]], bounds)


def batches_in_epoch(length: int, batch_size: int, *, drop_last: bool) -> int:
    """Returns the number of global batches, and so of optimizer steps, of an epoch."""
    return length // batch_size if drop_last else ceil_div(length, batch_size)


@lru_cache(maxsize=256)
def split_batch(
    count: int,
    shares: tuple[int, ...],
    micro_batches: int = 1,
    virtual_ranks: VirtualRanks | None = None,
) -> Indices:
    """Divides a global batch over micro-batches and ranks.

    Every rank's part is within one sample of its share of the whole batch, and micro-batches differ
    by at most one sample. If `count` is less than `micro_batches`, there are only `count`
    micro-batches, so none is empty on all ranks; a rank's part may be.

    Args:
        count: samples in the global batch.
        shares: one weight a rank, `(1, 2)`: rank 1 computes twice as much as rank 0.
        micro_batches: in how many pieces the batch is computed, one after the other.
        virtual_ranks: that divide the global batch; see `_split_over_copies` and
            `split_over_virtual_ranks`. None: there are none.

    Returns:
        Begin and end of each part within the global batch, shape `(micro-batches, ranks, 2)`.
    """
    num_ranks = len(shares)
    if virtual_ranks is not None and virtual_ranks.train_copies:
        return _split_over_copies(count, num_ranks, micro_batches, virtual_ranks.count)
    if virtual_ranks is not None:
        return _as_array(
            split_over_virtual_ranks(count, shares, micro_batches, virtual_ranks.count)
        )
    num_micro_batches = max(1, min(micro_batches, count))
    # Each place of the global batch is given to a rank. The number of places that a rank has in a
    # micro-batch is the size of its part.
    rank_of_place = _spread_ranks(part_sizes(count, shares))
    # Micro-batch i has the samples bounds[i] to bounds[i + 1] - 1 of the global batch.
    bounds = ceil_div(count * np.arange(num_micro_batches + 1), num_micro_batches)
    split = np.empty((num_micro_batches, num_ranks, 2), dtype=np.int64)
    for index in range(num_micro_batches):
        begin = bounds[index]
        end = bounds[index + 1]
        sizes = np.bincount(rank_of_place[begin:end], minlength=num_ranks)  # of each rank's part
        part_ends = begin + np.cumsum(sizes)
        split[index, :, 0] = part_ends - sizes
        split[index, :, 1] = part_ends
    split.setflags(write=False)
    return split


def split_sizes(split: Indices) -> Indices:
    """Returns the number of samples of each part of a global batch.

    Args:
        split: begin and end of each part, shape `(micro-batches, ranks, 2)`, of `split_batch`.

    Returns:
        Shape `(micro-batches, ranks)`.
    """
    return split[..., 1] - split[..., 0]


def _spread_ranks(sizes: Sequence[int]) -> Indices:
    """Spreads the samples of each rank evenly over a global batch.

    However the batch is then divided into micro-batches, a rank has its share of each, and the
    totals stay exact.

    Args:
        sizes: how many samples each rank has.

    Returns:
        For each place of the global batch a rank, shape `(samples,)`.
    """
    # Where the samples of each rank are to stand in the global batch, from 0 (its begin) to 1.
    places = [np.empty(0)]
    for size in sizes:
        if size > 0:  # the middles of `size` equal pieces of the range from 0 to 1
            places.append((np.arange(size) + 0.5) / size)
    order_of_places = np.argsort(np.concatenate(places), kind="stable")
    rank_of_place = np.repeat(np.arange(len(sizes)), sizes)
    return rank_of_place[order_of_places]


class VirtualRankPiece(NamedTuple):
    """A micro-batch of a virtual rank, or one without samples that only fills up a rank's list."""

    virtual_rank: int
    piece: int
    """The number of this piece among those of its virtual rank, from 0."""
    num_pieces: int
    """How many pieces the virtual rank's part is computed in."""
    begin: int
    """The position of the first sample in the global batch."""
    end: int
    """The position after the last sample."""
    is_padding: bool = False
    """True if it only fills up a rank's list."""


@lru_cache(maxsize=256)
def split_over_virtual_ranks(
    count: int, shares: tuple[int, ...], micro_batches: int, num_virtual_ranks: int
) -> list[list[VirtualRankPiece]]:
    """Divides a global batch over virtual ranks that train one model.

    The parts of the virtual ranks are consecutive and differ by one sample at most. They do not
    depend on the ranks, each of which computes neighbouring virtual ranks, as many as its share
    says. Virtual ranks that have no samples, of a short global batch, are left out.

    Args:
        count: samples in the global batch.
        shares: one weight a rank.
        micro_batches: pieces in which each part is computed; fewer if a part has fewer samples.
        num_virtual_ranks: of the run.

    Returns:
        For each rank its pieces, in order. All ranks have the same number of them, because a loop
        may communicate in each of its micro-batches: shorter lists are filled up with pieces
        without samples.
    """
    sizes = part_sizes(count, (1,) * num_virtual_ranks)
    begins = np.cumsum([0, *sizes]).tolist()
    bounds_of_ranks = virtual_rank_bounds(shares, num_virtual_ranks)
    pieces_of_ranks = []
    for first, end in itertools.pairwise(bounds_of_ranks):
        pieces = []
        for number in range(first, end):
            num_pieces = min(micro_batches, sizes[number])
            for piece in range(num_pieces):
                begin = begins[number] + ceil_div(sizes[number] * piece, num_pieces)
                piece_end = begins[number] + ceil_div(sizes[number] * (piece + 1), num_pieces)
                pieces.append(VirtualRankPiece(number, piece, num_pieces, begin, piece_end))
        pieces_of_ranks.append(pieces)
    most_pieces = max(1, *(len(pieces) for pieces in pieces_of_ranks))
    for rank, pieces in enumerate(pieces_of_ranks):
        end = bounds_of_ranks[rank + 1]
        place = begins[end]  # where the rank's samples end; a piece without samples stands here
        last_virtual_rank = max(0, end - 1)
        padding = VirtualRankPiece(last_virtual_rank, 0, 1, place, place, is_padding=True)
        pieces += [padding] * (most_pieces - len(pieces))
    return pieces_of_ranks


def virtual_rank_bounds(shares: tuple[int, ...], num_virtual_ranks: int) -> tuple[int, ...]:
    """Returns which virtual ranks each rank computes, if all virtual ranks train one model.

    Args:
        shares: one weight a rank.
        num_virtual_ranks: of the run.

    Returns:
        Rank r computes the virtual ranks from number r to before number r + 1 of these.
    """
    numbers_of_ranks = part_sizes(num_virtual_ranks, shares)
    return (0, *itertools.accumulate(numbers_of_ranks))


def _as_array(pieces_of_ranks: list[list[VirtualRankPiece]]) -> Indices:
    """Returns begin and end of each piece, shape `(pieces of a rank, ranks, 2)`."""
    num_pieces = len(pieces_of_ranks[0])
    split = np.empty((num_pieces, len(pieces_of_ranks), 2), dtype=np.int64)
    for rank, pieces in enumerate(pieces_of_ranks):
        for index, piece in enumerate(pieces):
            split[index, rank] = piece.begin, piece.end
    split.setflags(write=False)
    return split


def _split_over_copies(
    count: int, num_ranks: int, micro_batches: int, num_virtual_ranks: int
) -> Indices:
    """Divides a global batch over virtual ranks that each train a copy of the model.

    The parts do not depend on the number of ranks. If there are fewer ranks, each computes several
    virtual ranks, one after the other; if there are more, several neighbouring ranks compute one
    together.

    Args:
        count: samples in the global batch.
        num_ranks: at most `num_virtual_ranks`, or a multiple of it.
        micro_batches: pieces in which each part is computed; fewer if a part has fewer samples.
        num_virtual_ranks: of the run.

    Returns:
        Begin and end of each part within the global batch, shape `(micro-batches, ranks, 2)`. The
        micro-batches of a rank's first virtual rank come first.
    """
    max_virtual_ranks_of_rank = ceil_div(num_virtual_ranks, num_ranks)
    ranks_of_virtual_rank = max(1, num_ranks // num_virtual_ranks)
    # The part of virtual rank v has sizes[v] samples, and begins at begins[v] of the global batch.
    sizes = part_sizes(count, (1,) * num_virtual_ranks)
    begins = np.cumsum([0, *sizes])
    num_pieces = max(1, min(micro_batches, *sizes))
    split = np.zeros((max_virtual_ranks_of_rank * num_pieces, num_ranks, 2), dtype=np.int64)
    for first_rank in range(0, num_ranks, ranks_of_virtual_rank):
        # These ranks compute the same virtual ranks. In `split` a rank is a column, and a
        # micro-batch is a row.
        columns = slice(first_rank, first_rank + ranks_of_virtual_rank)
        numbers = virtual_ranks_of(first_rank, num_ranks, num_virtual_ranks)
        for index, number in enumerate(numbers):
            rows = slice(index * num_pieces, (index + 1) * num_pieces)
            split_of_part = split_batch(sizes[number], (1,) * ranks_of_virtual_rank, num_pieces)
            split[rows, columns] = begins[number] + split_of_part
    split.setflags(write=False)
    return split


def virtual_ranks_of(rank: int, num_ranks: int, num_virtual_ranks: int) -> range:
    """Returns the numbers of the virtual ranks that a rank computes, if each trains a copy.

    The numbers of two ranks differ by one at most. If there are more ranks than virtual ranks, each
    rank computes a single one, together with its neighbours.
    """
    if num_ranks > num_virtual_ranks:
        ranks_of_virtual_rank = num_ranks // num_virtual_ranks
        number = rank // ranks_of_virtual_rank
        return range(number, number + 1)
    first = ceil_div(num_virtual_ranks * rank, num_ranks)
    end = ceil_div(num_virtual_ranks * (rank + 1), num_ranks)
    return range(first, end)


def part_sizes(count: int, shares: tuple[int, ...]) -> list[int]:
    """Returns how many samples of a global batch each rank has.

    Args:
        count: samples of the global batch.
        shares: one weight a rank.
    """
    # Rounded up, so that a single sample goes to the first rank.
    bounds = ceil_div(count * np.cumsum([0, *shares]), sum(shares))
    return [int(size) for size in np.diff(bounds)]


@lru_cache(maxsize=256)
def micro_batches_needed(batch_size: int, shares: tuple[int, ...], largest: int | None) -> int:
    """Returns how many micro-batches are needed so that no rank computes too much at a time.

    Args:
        batch_size: samples of a global batch.
        shares: one weight a rank.
        largest: the most samples of a micro-batch that a rank may have; None: any number.

    Raises:
        SettingError: `largest` is less than 1.
    """
    if largest is None:
        return 1
    check_micro_batch_size(largest)
    # With fewer than these, even equal parts are too large. With unequal ones more may be needed.
    fewest = math.ceil(batch_size / (largest * len(shares)))
    for number in range(max(1, fewest), batch_size + 1):
        sizes = split_sizes(split_batch(batch_size, shares, number))
        if int(sizes.max()) <= largest:
            return number
    return max(1, batch_size)  # one sample in each


def check_batch_size(batch_size: object) -> int:
    """Raises DataError unless this is a whole number of at least 1, which is returned."""
    if not is_whole_number(batch_size):
        raise DataError(
            f"batch_size={batch_size!r}",
            "a global batch holds a whole number of samples, at least 1",
            "give the number of samples of one optimizer step over all devices",
        )
    return batch_size
