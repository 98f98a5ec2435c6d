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
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
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

    @cached_property
    def crc_of_order(self) -> int:
        """A CRC-32 of the order."""
        return zlib.crc32(np.ascontiguousarray(self.order).data)


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
            `split_over_virtual_ranks`: the shape is then `(pieces, ranks, 2)`.

    Returns:
        The first sample of each part, and the one after its last, within the global batch. The
        shape is `(micro-batches, ranks, 2)`.
    """
    if virtual_ranks is None:
        return _split_over_ranks(count, shares, micro_batches)
    return _as_array(split_over_virtual_ranks(count, shares, micro_batches, virtual_ranks))


def _split_over_ranks(count: int, shares: tuple[int, ...], micro_batches: int) -> Indices:
    """Divides a global batch into micro-batches and over the ranks; see `split_batch`.

    For 6 samples, the shares (2, 1) and 2 micro-batches:

        rank_of_sample    [0, 1, 0, 0, 1, 0]
        bounds            [0, 3, 6]
        split             [[[0, 2], [2, 3]], [[3, 5], [5, 6]]]
    """
    num_ranks = len(shares)
    num_micro_batches = max(1, min(micro_batches, count))

    # Deal out the samples to the ranks, evenly mixed. This only decides how many samples of each
    # micro-batch a rank gets, not which ones.
    rank_of_sample = _deal_out_samples(part_sizes(count, shares))

    # Micro-batch i has the samples bounds[i] to bounds[i + 1] - 1 of the global batch.
    bounds = ceil_div(count * np.arange(num_micro_batches + 1), num_micro_batches)
    split = np.empty((num_micro_batches, num_ranks, 2), dtype=np.int64)
    for index in range(num_micro_batches):
        begin = bounds[index]
        end = bounds[index + 1]
        sizes_of_parts = np.bincount(rank_of_sample[begin:end], minlength=num_ranks)

        # Within the micro-batch, the parts of the ranks follow each other.
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
    positions_of_ranks = [(np.arange(size) + 0.5) / size for size in sizes]
    positions = np.concatenate(positions_of_ranks)  # those of rank 0 come first
    ranks = np.repeat(np.arange(len(sizes)), sizes)  # e.g. [0, 0, 0, 0, 1, 1]

    # Then read off the ranks from left to right. At the same position, the lower rank comes first,
    # because the sort is stable.
    order = np.argsort(positions, kind="stable")
    return ranks[order]


class VirtualRankPiece(NamedTuple):
    """A micro-batch of a virtual rank on one rank: some consecutive samples of the global batch."""

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

    @property
    def num_samples(self) -> int:
        """The number of samples in this piece."""
        return self.end - self.begin


@lru_cache(maxsize=256)
def split_over_virtual_ranks(
    count: int, shares: tuple[int, ...], micro_batches: int, virtual_ranks: VirtualRanks
) -> list[list[VirtualRankPiece]]:
    """Divides a global batch over virtual ranks, and each virtual rank's part over its ranks.

    Each virtual rank gets consecutive samples, and the sizes differ by at most one. Which samples
    these are does not depend on the ranks. A rank processes neighbouring virtual ranks one after
    the other; with more ranks than virtual ranks, several ranks process one together. Virtual ranks
    without samples, of a short global batch, are left out.

    Example: 12 samples, 3 virtual ranks of 4, and 1 piece for each. On 2 ranks, rank 0 processes
    two virtual ranks, and rank 1 has padding in the place of its second piece:

        piece   rank 0       rank 1
        0       [0, 4]       [8, 12]
        1       [4, 8]       [12, 12]

    On 6 ranks, the ranks 0 and 1 process the first virtual rank together, and so on:

        piece   rank 0       rank 1       rank 2       rank 3       rank 4       rank 5
        0       [0, 2]       [2, 4]       [4, 6]       [6, 8]       [8, 10]      [10, 12]

    Args:
        count: number of samples in the global batch.
        shares: a whole number for each rank, see `split_batch`. They say how many virtual ranks
            each rank processes, and are equal if there are more ranks than virtual ranks.
        micro_batches: number of pieces in which a virtual rank's part is processed. A part with
            fewer samples than pieces has one piece for each sample.
        virtual_ranks: the virtual ranks of the run.

    Returns:
        For each rank, its pieces in order. All ranks have the same number of pieces, because the
        user's loop may communicate in each micro-batch. Shorter lists are padded with pieces
        without samples.
    """
    # Virtual rank v has the samples begins[v] to begins[v + 1] - 1 of the global batch.
    sizes = part_sizes(count, (1,) * virtual_ranks.count)
    begins = np.cumsum([0, *sizes]).tolist()

    # If virtual ranks train copies of the model, ranks get no micro-batches for padding, so all
    # copies are trained in the same number of pieces.
    if virtual_ranks.train_copies:
        micro_batches = min(micro_batches, max(1, min(sizes)))

    ranks_per_virtual_rank = virtual_ranks.ranks_per_virtual_rank(len(shares))
    virtual_ranks_of_rank = virtual_ranks_of_ranks(shares, virtual_ranks)
    pieces_of_ranks: list[list[VirtualRankPiece]] = []
    for rank, own_virtual_ranks in enumerate(virtual_ranks_of_rank):
        pieces = []
        for number in own_virtual_ranks:
            if sizes[number] == 0:
                continue

            # The part of a virtual rank is divided over its ranks as a whole global batch is over
            # all ranks. `split` has the shape (pieces, ranks of this virtual rank, 2).
            split = split_batch(sizes[number], (1,) * ranks_per_virtual_rank, micro_batches)
            parts_of_rank = begins[number] + split[:, rank % ranks_per_virtual_rank]
            for piece_number, (begin, end) in enumerate(parts_of_rank.tolist()):
                pieces.append(VirtualRankPiece(number, piece_number, len(split), begin, end))

        pieces_of_ranks.append(pieces)

    # Pad the shorter lists.
    max_pieces = max(1, *[len(pieces) for pieces in pieces_of_ranks])
    for pieces, own_virtual_ranks in zip(pieces_of_ranks, virtual_ranks_of_rank, strict=True):
        # A piece belongs to some virtual rank. If rank 0 has none at all, virtual rank 0 is taken.
        last_virtual_rank = max(0, own_virtual_ranks.stop - 1)
        # A virtual rank ends where the next one begins. `begins` also has the end of the last one.
        end_of_samples = begins[own_virtual_ranks.stop]
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


def virtual_rank_bounds(shares: tuple[int, ...], num_virtual_ranks: int) -> tuple[int, ...]:
    """Returns which virtual ranks each rank processes, if there are at least as many as ranks.

    Args:
        shares: a whole number for each rank, see `split_batch`.
        num_virtual_ranks: number of virtual ranks in the run.

    Returns:
        The bounds of the ranks: rank r processes the virtual ranks `bounds[r]` to
        `bounds[r + 1] - 1`. For 8 virtual ranks on 3 equal ranks they are `(0, 3, 6, 8)`.
    """
    virtual_ranks_per_rank = part_sizes(num_virtual_ranks, shares)
    return (0, *itertools.accumulate(virtual_ranks_per_rank))


def virtual_ranks_of_ranks(shares: tuple[int, ...], virtual_ranks: VirtualRanks) -> list[range]:
    """Returns the numbers of the virtual ranks that each rank processes.

    With more ranks than virtual ranks, neighbouring ranks process one together. Otherwise each rank
    processes one or more:

    - 4 ranks, 2 virtual ranks: ranks 0 and 1 process virtual rank 0, ranks 2 and 3 virtual rank 1.
    - 2 ranks, 5 virtual ranks: rank 0 processes 0, 1 and 2, rank 1 processes 3 and 4.

    Args:
        shares: a whole number for each rank, see `split_over_virtual_ranks`.
        virtual_ranks: the virtual ranks of the run. If there are more ranks, their number is a
            multiple of that of the virtual ranks.
    """
    num_ranks = len(shares)
    ranks_per_virtual_rank = virtual_ranks.ranks_per_virtual_rank(num_ranks)
    if ranks_per_virtual_rank > 1:
        virtual_rank_of_rank = [rank // ranks_per_virtual_rank for rank in range(num_ranks)]
        return [range(number, number + 1) for number in virtual_rank_of_rank]

    bounds = virtual_rank_bounds(shares, virtual_ranks.count)
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


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
    # With equal shares it is enough. With unequal shares it may take more, at most `batch_size`
    # micro-batches of one sample each.
    num_micro_batches = max(1, math.ceil(batch_size / (largest * len(shares))))
    while _largest_part(batch_size, shares, num_micro_batches) > largest:
        num_micro_batches += 1
    return num_micro_batches


def _largest_part(batch_size: int, shares: tuple[int, ...], num_micro_batches: int) -> int:
    """Returns the largest number of samples that some rank has in some micro-batch."""
    sizes = split_sizes(split_batch(batch_size, shares, num_micro_batches))
    return int(sizes.max())


def check_batch_size(batch_size: object) -> int:
    """Returns the batch size, or raises DataError if it is not a whole number of at least 1."""
    if not is_whole_number(batch_size, least=1):
        raise DataError(
            f"batch_size={batch_size!r}",
            "a global batch holds a whole number of samples, at least 1",
            "give the number of samples of one optimizer step over all devices",
        )
    return batch_size
