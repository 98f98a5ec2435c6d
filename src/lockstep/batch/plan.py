"""Decides which samples form a global batch, and which rank processes which of them.

A *global batch* holds the samples of one optimizer step over all ranks. Two pure functions are
behind all of Lockstep's promises about data:

1. `plan_epoch(length, batch_size, seed=, epoch=, ...)` divides an epoch into global batches. It
   does not know the devices, so the order of the samples cannot depend on them.
2. `split_batch(count, shares, micro_batches)` divides a global batch into micro-batches, and each
   micro-batch into one part for each rank. It does not know the data. The *shares*, a whole number
   for each rank, say how the work is divided.

A global batch is a sequence of micro-batches, and a micro-batch is a sequence of parts, one for
each rank. A micro-batch holds the same samples on any number of ranks. This makes the statistics of
BatchNorm, which are those of a micro-batch, independent of the number of ranks.
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
    is_shuffled_in_slices,
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
    """The number of samples in the epoch."""
    batch_size: int
    read_order: Callable[[int, int], Indices]
    """`read_order(begin, end)` returns this slice of the epoch's sample indices."""

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

        To be fast, it computes the indices of several small global batches together.
        """
        batches_at_once = max(1, INDICES_COMPUTED_AT_ONCE // self.batch_size)
        samples_at_once = batches_at_once * self.batch_size

        for begin in range(start * self.batch_size, self.num_samples, samples_at_once):
            indices = self.read_order(begin, min(begin + samples_at_once, self.num_samples))
            for batch_begin in range(0, len(indices), self.batch_size):
                yield indices[batch_begin : batch_begin + self.batch_size]

    def sizes(self, start: int = 0) -> set[int]:
        """Returns the sizes that occur among the global batches from number `start` on."""
        num_full, size_of_last = divmod(self.num_samples_from(start), self.batch_size)
        sizes = set()
        if num_full:
            sizes.add(self.batch_size)
        if size_of_last:
            sizes.add(size_of_last)
        return sizes

    def num_samples_from(self, start: int) -> int:
        """Returns the number of samples in the global batches from number `start` on."""
        return max(0, self.num_samples - start * self.batch_size)


@dataclass(frozen=True, eq=False)
class CustomPlan:
    """The global batches of one epoch as the user's own sampler gave them; see `EpochPlan`."""

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
        """Returns the sizes that occur among the global batches from number `start` on."""
        return set(np.diff(self.bounds[start:]).tolist())

    def num_samples_from(self, start: int) -> int:
        """Returns the number of samples in the global batches from number `start` on."""
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
    """Divides an epoch into global batches. The result depends on nothing but the arguments.

    Args:
        length: number of samples in the dataset, up to `sys.maxsize`.
        batch_size: number of samples in a global batch. If `length` is not a multiple of it, the
            last global batch is shorter, or is left out with `drop_last`.
        seed: the seed of the run.
        epoch: number of the epoch, counted from 0. Each epoch is shuffled differently.
        shuffle: False to keep the order of the dataset.
        drop_last: True to leave out a last global batch that is not full.

    Raises:
        DataError: `batch_size` or `length` is out of range.
    """
    check_batch_size(batch_size)
    if length < 0:
        raise DataError(f"a dataset of length {length}", "a length is at least 0", "fix __len__")
    num_samples = length - length % batch_size if drop_last else length

    # `EpochPlan` gets a function that returns a slice of the order. If the samples are not
    # shuffled, its result for the slice from 3 to 6 is [3, 4, 5].
    if not shuffle:
        in_order = partial(np.arange, dtype=np.int64)
        return EpochPlan(num_samples, batch_size, in_order)

    # The order of a dataset of usual size is drawn as a whole.
    if not is_shuffled_in_slices(length):
        order = shuffled_indices(length, seed=seed, epoch=epoch)
        return EpochPlan(num_samples, batch_size, lambda begin, end: order[begin:end])

    # The order of a huge dataset would take too much memory. So slices of it are computed when they
    # are needed, by a permutation that the random keys define (`shuffling`).
    keys = random_words(seed, epoch, NUM_ROUNDS)
    computed_slice = partial(permuted_indices, length=length, keys=keys)
    return EpochPlan(num_samples, batch_size, computed_slice)


def cut_into_batches(order: Indices, batch_size: int, *, drop_last: bool) -> CustomPlan:
    """Divides a given order of sample indices into consecutive global batches."""
    num_batches = batches_in_epoch(len(order), batch_size, drop_last=drop_last)
    bounds = np.arange(num_batches + 1, dtype=np.int64) * batch_size
    bounds = np.minimum(bounds, len(order))  # the last batch may be short
    return CustomPlan(order[: bounds[-1]], bounds)


def batches_in_epoch(length: int, batch_size: int, *, drop_last: bool) -> int:
    """Returns the number of global batches in an epoch, which is that of optimizer steps."""
    return length // batch_size if drop_last else ceil_div(length, batch_size)


@lru_cache(maxsize=256)
def split_batch(
    count: int,
    shares: tuple[int, ...],
    micro_batches: int = 1,
    virtual_ranks: VirtualRanks | None = None,
) -> Indices:
    """Divides a global batch into micro-batches, and each micro-batch over the ranks.

    For 8 samples, 2 ranks and 2 micro-batches the result is `[[[0, 2], [2, 4]], [[4, 6], [6, 8]]]`.

    The number of samples of a rank differs from its exact share by less than one, and the sizes of
    micro-batches differ by at most one. If `count` is less than `micro_batches`, there are only
    `count` micro-batches, so that no micro-batch is empty on all ranks. It may still be empty on
    some.

    Args:
        count: number of samples in the global batch.
        shares: a whole number for each rank. With `(1, 2)`, rank 1 processes twice as many samples
            as rank 0.
        micro_batches: number of micro-batches, which are processed one after the other.
        virtual_ranks: the virtual ranks of the run, or None. With virtual ranks, see
            `split_over_virtual_ranks` and `_split_over_replicas`.

    Returns:
        The first sample of each part, and the one after its last, within the global batch. The
        shape is `(micro-batches, ranks, 2)`.
    """
    if virtual_ranks is None:
        return _split_over_ranks(count, shares, micro_batches)
    if virtual_ranks.train_copies:
        return _split_over_replicas(count, len(shares), micro_batches, virtual_ranks.count)
    pieces_of_ranks = split_over_virtual_ranks(count, shares, micro_batches, virtual_ranks.count)
    return _as_array(pieces_of_ranks)


def _split_over_ranks(count: int, shares: tuple[int, ...], micro_batches: int) -> Indices:
    """Divides a global batch into micro-batches and over the ranks; see `split_batch`."""
    num_ranks = len(shares)
    num_micro_batches = max(1, min(micro_batches, count))

    # Example: 6 samples, the shares (2, 1) and 2 micro-batches. The samples are dealt out to the
    # ranks, evenly mixed: [0, 1, 0, 0, 1, 0]. This only decides how many samples a rank gets in
    # each micro-batch: rank 0 gets 2, and rank 1 gets 1.
    rank_of_sample = _deal_out_samples(part_sizes(count, shares))

    # Micro-batch i has the samples bounds[i] to bounds[i + 1] - 1 of the global batch. In the
    # example the bounds are [0, 3, 6].
    bounds = ceil_div(count * np.arange(num_micro_batches + 1), num_micro_batches)
    split = np.empty((num_micro_batches, num_ranks, 2), dtype=np.int64)
    for index in range(num_micro_batches):
        begin = bounds[index]
        end = bounds[index + 1]
        sizes_of_parts = np.bincount(rank_of_sample[begin:end], minlength=num_ranks)

        # Within the micro-batch, the parts of the ranks follow each other. In the example, `split`
        # becomes [[[0, 2], [2, 3]], [[3, 5], [5, 6]]].
        ends_of_parts = begin + np.cumsum(sizes_of_parts)
        split[index, :, 0] = ends_of_parts - sizes_of_parts
        split[index, :, 1] = ends_of_parts

    split.setflags(write=False)  # the result is cached, and callers share it
    return split


def split_sizes(split: Indices) -> Indices:
    """Returns the number of samples in each part of a global batch.

    Args:
        split: the result of `split_batch`, shape `(micro-batches, ranks, 2)`.

    Returns:
        An array of shape `(micro-batches, ranks)`.
    """
    return split[..., 1] - split[..., 0]


def _deal_out_samples(sizes: Sequence[int]) -> Indices:
    """Decides which rank gets each sample of a global batch, spreading each rank's evenly.

    For the sizes 4 and 2 the result is `[0, 1, 0, 0, 1, 0]`, not `[0, 0, 0, 0, 1, 1]`. So
    wherever the global batch is cut, each rank has about its share of each piece.

    Args:
        sizes: number of samples of each rank.

    Returns:
        The rank of each sample, shape `(samples,)`.
    """
    # Place the samples of each rank at equal distances between 0 and 1: those of a rank with 4
    # samples at 1/8, 3/8, 5/8 and 7/8, those of a rank with 2 samples at 1/4 and 3/4.
    no_positions = np.empty(0)  # np.concatenate needs at least one array
    positions = [no_positions]
    for size in sizes:
        if size > 0:
            centers_of_equal_intervals = (np.arange(size) + 0.5) / size
            positions.append(centers_of_equal_intervals)
    positions_rank_by_rank = np.concatenate(positions)
    ranks_rank_by_rank = np.repeat(np.arange(len(sizes)), sizes)  # e.g. [0, 0, 0, 0, 1, 1]

    # Then read off the ranks from left to right. At the same position, the lower rank comes first,
    # because the sort is stable.
    order = np.argsort(positions_rank_by_rank, kind="stable")
    return ranks_rank_by_rank[order]


class VirtualRankPiece(NamedTuple):
    """A micro-batch of a virtual rank: some consecutive samples of the global batch."""

    virtual_rank: int
    piece_number: int
    """The number of this piece among the pieces of its virtual rank, counted from 0."""
    num_pieces: int
    """The number of pieces of its virtual rank."""
    begin: int
    """The position of its first sample in the global batch."""
    end: int
    """The position after its last sample."""
    is_padding: bool = False
    """True for a piece without samples that a rank processes because other ranks have more."""


@lru_cache(maxsize=256)
def split_over_virtual_ranks(
    count: int, shares: tuple[int, ...], micro_batches: int, num_virtual_ranks: int
) -> list[list[VirtualRankPiece]]:
    """Divides a global batch over virtual ranks that train one model together.

    Each virtual rank gets consecutive samples, and the sizes differ by at most one. Which samples
    these are does not depend on the ranks. Each rank processes neighbouring virtual ranks, as many
    as its share allows. If a short global batch has fewer samples than there are virtual ranks,
    those without samples are left out.

    Args:
        count: number of samples in the global batch.
        shares: a whole number for each rank, see `split_batch`.
        micro_batches: number of pieces in which a virtual rank's part is processed. A part with
            fewer samples than that has one piece for each sample.
        num_virtual_ranks: number of virtual ranks in the run.

    Returns:
        For each rank, its pieces in order. All ranks have the same number of pieces, because the
        user's loop may communicate in each micro-batch. Shorter lists are padded with pieces
        without samples.
    """
    # Virtual rank v has the samples begins[v] to begins[v + 1] - 1 of the global batch.
    sizes = part_sizes(count, (1,) * num_virtual_ranks)
    begins = np.cumsum([0, *sizes]).tolist()

    # Rank r processes the virtual ranks bounds_of_ranks[r] to bounds_of_ranks[r + 1] - 1.
    bounds_of_ranks = virtual_rank_bounds(shares, num_virtual_ranks)
    pieces_of_ranks = []
    for first_virtual_rank, end_virtual_rank in itertools.pairwise(bounds_of_ranks):
        pieces = []
        for virtual_rank in range(first_virtual_rank, end_virtual_rank):
            begin = begins[virtual_rank]
            pieces += _cut_into_pieces(virtual_rank, begin, sizes[virtual_rank], micro_batches)
        pieces_of_ranks.append(pieces)

    longest_list = max(len(pieces) for pieces in pieces_of_ranks)
    max_pieces = max(1, longest_list)
    for rank, pieces in enumerate(pieces_of_ranks):
        end_of_virtual_ranks = bounds_of_ranks[rank + 1]  # its last virtual rank, plus 1
        # A piece belongs to some virtual rank. If rank 0 has none at all, virtual rank 0 is taken.
        last_virtual_rank = max(0, end_of_virtual_ranks - 1)
        # `begins` also has the end of the last virtual rank, so this is the end of this one.
        end_of_samples = begins[end_of_virtual_ranks]
        padding = _padding(last_virtual_rank, end_of_samples)
        pieces += [padding] * (max_pieces - len(pieces))

    return pieces_of_ranks


def _padding(virtual_rank: int, position: int) -> VirtualRankPiece:
    """Returns a piece without samples for a rank that has fewer pieces than others.

    If a rank's last virtual rank is 3, whose samples end before position 20 of the global batch,
    its padding is a piece of virtual rank 3 that begins and ends at 20.
    """
    return VirtualRankPiece(
        virtual_rank=virtual_rank,
        piece_number=0,
        num_pieces=1,
        begin=position,
        end=position,
        is_padding=True,
    )


def _cut_into_pieces(
    virtual_rank: int, begin: int, size: int, micro_batches: int
) -> list[VirtualRankPiece]:
    """Cuts the part of a virtual rank into pieces whose sizes differ by at most one.

    A part of 5 samples that begins at 10 becomes, in 2 pieces, the samples 10 to 12 and 13 to 14.

    Args:
        virtual_rank: number of the virtual rank.
        begin: position of its first sample in the global batch.
        size: number of its samples.
        micro_batches: number of pieces, unless there are fewer samples.
    """
    num_pieces = min(micro_batches, size)
    pieces = []
    for number in range(num_pieces):
        piece_begin = begin + ceil_div(size * number, num_pieces)
        piece_end = begin + ceil_div(size * (number + 1), num_pieces)
        pieces.append(VirtualRankPiece(virtual_rank, number, num_pieces, piece_begin, piece_end))
    return pieces


def virtual_rank_bounds(shares: tuple[int, ...], num_virtual_ranks: int) -> tuple[int, ...]:
    """Returns which virtual ranks each rank processes, if all virtual ranks train one model.

    Args:
        shares: a whole number for each rank, see `split_batch`.
        num_virtual_ranks: number of virtual ranks in the run.

    Returns:
        The bounds of the ranks: rank r processes the virtual ranks `bounds[r]` to
        `bounds[r + 1] - 1`. For 8 virtual ranks on 3 equal ranks they are `(0, 3, 6, 8)`.
    """
    virtual_ranks_per_rank = part_sizes(num_virtual_ranks, shares)
    return (0, *itertools.accumulate(virtual_ranks_per_rank))


def virtual_ranks_of_rank(rank: int, num_ranks: int, num_virtual_ranks: int) -> range:
    """Returns the virtual ranks that a rank processes under DiLoCo, where ranks have equal shares.

    With more ranks than virtual ranks, neighbouring ranks process one together. Otherwise each rank
    processes one or more:

    - 4 ranks, 2 virtual ranks: ranks 0 and 1 process virtual rank 0, ranks 2 and 3 virtual rank 1.
    - 2 ranks, 5 virtual ranks: rank 0 processes 0, 1 and 2, rank 1 processes 3 and 4.
    """
    if num_ranks > num_virtual_ranks:  # a multiple of it
        ranks_of_each = num_ranks // num_virtual_ranks
        virtual_rank = rank // ranks_of_each
        return range(virtual_rank, virtual_rank + 1)

    bounds = virtual_rank_bounds((1,) * num_ranks, num_virtual_ranks)
    return range(bounds[rank], bounds[rank + 1])


def _as_array(pieces_of_ranks: list[list[VirtualRankPiece]]) -> Indices:
    """Returns the begin and end of each piece, as an array of shape `(pieces, ranks, 2)`.

    Args:
        pieces_of_ranks: the pieces of each rank. All ranks have the same number of them.
    """
    num_pieces = len(pieces_of_ranks[0])
    num_ranks = len(pieces_of_ranks)
    begins_and_ends = np.empty((num_pieces, num_ranks, 2), dtype=np.int64)
    for rank, pieces in enumerate(pieces_of_ranks):
        for index, piece in enumerate(pieces):
            begins_and_ends[index, rank] = piece.begin, piece.end

    begins_and_ends.setflags(write=False)  # the result is cached, and callers share it
    return begins_and_ends


def _split_over_replicas(
    count: int, num_ranks: int, micro_batches: int, num_virtual_ranks: int
) -> Indices:
    """Divides a global batch under DiLoCo, where each virtual rank trains a replica of the model.

    The samples of a replica do not depend on the number of ranks. If there are fewer ranks than
    replicas, a rank processes several replicas one after the other. If there are more, several
    neighbouring ranks process one replica together.

    Example: 12 samples in 3 replicas of 4, and 1 micro-batch for each part. On 2 ranks, rank 0
    processes two replicas, and rank 1 has nothing to do in the second micro-batch:

        micro-batch  rank 0       rank 1
        0            [0, 4]       [8, 12]
        1            [4, 8]       [0, 0]

    On 6 ranks, the ranks 0 and 1 process the first replica together, and so on:

        micro-batch  rank 0       rank 1       rank 2       rank 3       rank 4       rank 5
        0            [0, 2]       [2, 4]       [4, 6]       [6, 8]       [8, 10]      [10, 12]

    Args:
        count: number of samples in the global batch.
        num_ranks: number of ranks, which is at most `num_virtual_ranks` or a multiple of it.
        micro_batches: number of pieces in which a replica's part is processed. It is reduced to the
            size of the smallest part.
        num_virtual_ranks: number of virtual ranks, and so of replicas, in the run.

    Returns:
        The first sample of each part, and the one after its last, within the global batch. The
        shape is `(micro-batches, ranks, 2)`; the micro-batches of a rank's first replica come
        first.
    """
    max_replicas_per_rank = ceil_div(num_virtual_ranks, num_ranks)
    ranks_per_replica = max(1, num_ranks // num_virtual_ranks)

    # Replica v has sizes[v] samples of the global batch, and the first of them is begins[v].
    sizes = part_sizes(count, (1,) * num_virtual_ranks)
    begins = np.cumsum([0, *sizes])
    num_pieces = max(1, min(micro_batches, *sizes))

    # The table, filled with [0, 0]: no samples. A rank that processes fewer replicas than another
    # one keeps this in its last rows.
    num_rows = max_replicas_per_rank * num_pieces
    split = np.zeros((num_rows, num_ranks, 2), dtype=np.int64)

    # The columns of the table form groups of ranks that process the same replicas. On 2 ranks the
    # groups are (0) and (1); on 6 ranks they are (0, 1), (2, 3) and (4, 5).
    for first_rank in range(0, num_ranks, ranks_per_replica):
        ranks_of_group = slice(first_rank, first_rank + ranks_per_replica)
        replicas_of_group = virtual_ranks_of_rank(first_rank, num_ranks, num_virtual_ranks)

        # The group's first replica has the first `num_pieces` rows, the second has the next ones.
        for index, replica in enumerate(replicas_of_group):
            first_row = index * num_pieces
            rows_of_replica = slice(first_row, first_row + num_pieces)

            # Divide the samples of the replica, counted from its own first sample, over the group.
            # The result has the shape (pieces, ranks of the group, 2), like the part of the table.
            equal_shares = (1,) * ranks_per_replica
            split_of_replica = split_batch(sizes[replica], equal_shares, num_pieces)
            split[rows_of_replica, ranks_of_group] = begins[replica] + split_of_replica

    split.setflags(write=False)  # the result is cached, and callers share it
    return split


def part_sizes(count: int, shares: tuple[int, ...]) -> list[int]:
    """Returns the number of samples of a global batch that each rank gets.

    For 10 samples and the shares `(1, 2)` these are 4 and 6.

    Args:
        count: number of samples in the global batch.
        shares: a whole number for each rank, see `split_batch`.
    """
    # The bounds are rounded up, so that a single sample goes to the first rank.
    bounds = ceil_div(count * np.cumsum([0, *shares]), sum(shares))
    return [int(size) for size in np.diff(bounds)]


@lru_cache(maxsize=256)
def micro_batches_needed(batch_size: int, shares: tuple[int, ...], largest: int | None) -> int:
    """Returns the smallest number of micro-batches with which no part of a rank is too large.

    Args:
        batch_size: number of samples in a global batch.
        shares: a whole number for each rank, see `split_batch`.
        largest: the largest number of samples that a rank may process at once; None for no limit.

    Raises:
        SettingError: `largest` is less than 1.
    """
    if largest is None:
        return 1
    check_micro_batch_size(largest)

    # A micro-batch has at most `largest` samples on each rank, so at least this number is needed.
    # With equal shares it is enough. With unequal shares it may take more: the search goes up.
    least_number = math.ceil(batch_size / (largest * len(shares)))
    for number in range(max(1, least_number), batch_size + 1):
        sizes = split_sizes(split_batch(batch_size, shares, number))
        if int(sizes.max()) <= largest:
            return number

    return max(1, batch_size)  # one sample in each micro-batch


def check_batch_size(batch_size: object) -> int:
    """Returns the batch size, or raises DataError if it is not a whole number of at least 1."""
    if not is_whole_number(batch_size, least=1):
        raise DataError(
            f"batch_size={batch_size!r}",
            "a global batch holds a whole number of samples, at least 1",
            "give the number of samples of one optimizer step over all devices",
        )
    return batch_size
