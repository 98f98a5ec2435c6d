"""Reads one rank's part of the global batches of an iterable, in this process or in a worker.

A *global batch* holds the samples of one optimizer step; its *position* is its number in the epoch.
Each rank computes its part in one or more *micro-batches*. How it comes by its part depends on
`shard`: it reads the whole iterable and keeps its part (None), seeks its samples (a function), or
gets a part of its own from the iterable (False). *Digests*, short values made of samples, show
whether ranks and workers read the same.

A worker is asked for a global batch by its position, and reads the iterable forward to it. So what
it gives does not depend on how many workers there are, or which of them is asked.

What `transform` draws at random comes from (seed, epoch, number of the sample).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, default_collate, get_worker_info

from lockstep.batch.digest import SAMPLES_COMPARED, batch_digests
from lockstep.batch.fetch import call_collate
from lockstep.batch.indices import Indices, ceil_div
from lockstep.batch.plan import split_batch, split_sizes
from lockstep.batch.source import IterableSource
from lockstep.batch.stream_reader import PassRandomState, StreamReader
from lockstep.distributed.seeding import preserve_rng_state, seed_sample
from lockstep.distributed.topology import DataParallelRank
from lockstep.distributed.torch_compat import without_worker_info
from lockstep.session.micro_batch import VirtualRanks

BATCHES_BETWEEN_COMPARISONS = 100


def is_compared(position: int, pass_begin: int, batch_size: int) -> bool:
    """Returns True if samples of a global batch are compared between ranks and between workers.

    Compared are the first 16 samples of the pass and of the epoch, and 16 samples after each
    hundredth global batch. Where global batches are small, these are in several of them.

    Args:
        position: of the global batch.
        pass_begin: the position at which the pass began.
        batch_size: samples of a global batch.
    """
    # The 16 samples that are compared at a time are in this many global batches.
    num_batches = ceil_div(SAMPLES_COMPARED, batch_size)
    begins_pass = pass_begin <= position < pass_begin + num_batches
    batches_since_hundredth = position % BATCHES_BETWEEN_COMPARISONS  # of the epoch, from 0
    return begins_pass or batches_since_hundredth < num_batches


class GlobalBatchKey(NamedTuple):
    """Which global batch is wanted, and how it is divided."""

    epoch: int
    position: int
    shares: tuple[int, ...]
    num_micro_batches: int
    """Micro-batches of the global batch; with virtual ranks, of the part of each."""
    virtual_ranks: VirtualRanks | None
    pass_begin: int
    """The position of the first global batch of this pass."""
    read_beginning: bool = False
    """True to read the first samples of the epoch too, if the pass begins after them and the stream
    would not pass them on its way."""


@dataclass
class RankBatch:
    """What a rank has read of a global batch of an iterable."""

    position: int
    planned_sizes: Indices
    """The planned samples of each rank in each micro-batch, shape `(micro-batches, ranks)`. At the
    end of the iterable there may be fewer."""
    counts: Indices
    """How many samples each rank has, shape `(ranks,)`. If every rank reads the whole iterable, all
    are right; otherwise only that of this rank is."""
    ended: bool
    """True if the iterable gives this rank no more samples."""
    worker: int
    """The number of the loader worker that has read it; 0 without workers."""
    digests: dict[int, list[Any]]
    """Digests of the first samples of each compared global batch (see `is_compared`) that this
    worker has read, or read past, since the batch that it gave last. By position."""
    num_samples_in_all: int | None = None
    """How many samples the iterable gave, when this worker has come to its end."""
    one_sample_batch: Any = None
    """A batch of one sample, if this rank has read only samples of other ranks."""
    indices: list[Indices] = field(default_factory=list)
    """The numbers of this rank's samples, one array for each micro-batch, shape `(n,)`."""
    batches: list[Any] = field(default_factory=list)
    """The collated batches; None if this rank has no sample of a micro-batch."""


class _ReadPart(NamedTuple):
    """The samples that this rank has read of a global batch."""

    samples: list[Any]
    """Samples of this rank; if every rank reads the whole iterable, those of all ranks."""
    first_number: int
    """The number of the first sample."""
    stride: int
    """How much the number grows from one sample to the next."""
    planned_sizes: Indices
    """The planned samples of each rank in each micro-batch; see `RankBatch`."""
    counts: Indices
    """The number of samples that each rank has; see `RankBatch`."""
    bounds: list[list[int]]
    """For each micro-batch, the begin and end in `samples` of this rank's samples."""
    ended: bool


class IterableFetch(Dataset[Any]):
    """This rank's part of the global batches of an iterable, by `GlobalBatchKey`.

    Args:
        source: the iterable.
        seed: of the run.
        sample_rng: False leaves all random streams alone.
        data_parallel: this rank among those that compute parts of a global batch.
    """

    def __init__(
        self, source: IterableSource, seed: int, sample_rng: bool, data_parallel: DataParallelRank
    ) -> None:
        self.dataset = source.dataset
        self._source = source
        self._seed = seed
        self._sample_rng = sample_rng
        self._data_parallel = data_parallel
        self._reader: StreamReader | None = None
        self._digests: dict[int, list[Any]] = {}
        """The digests that the next `RankBatch` gets."""
        # True if code of the user's prepares samples, and so may draw random numbers.
        self._prepares_samples = (
            source.transform is not None or source.collate is not default_collate
        )

    def fresh(self) -> IterableFetch:
        """Returns a copy that has no pass open, for a process of its own."""
        return IterableFetch(self._source, self._seed, self._sample_rng, self._data_parallel)

    def close(self) -> None:
        """Ends the pass that is open."""
        self._reader = None

    def __getitem__(self, key: GlobalBatchKey) -> RankBatch:
        worker_info = get_worker_info()
        if key.read_beginning:
            self._read_beginning(key)
        part = self._read_part(key)
        self._keep_digests(key.position, key.pass_begin, part.samples)
        rank_batch = RankBatch(
            position=key.position,
            planned_sizes=part.planned_sizes,
            counts=part.counts,
            ended=part.ended,
            worker=0 if worker_info is None else worker_info.id,
            digests=self._digests,
            num_samples_in_all=self._num_samples_in_all(),
        )
        self._digests = {}
        for begin, end in part.bounds:
            samples = part.samples[begin:end]
            numbers = part.first_number + part.stride * np.arange(begin, end)
            batch = self.collate(key.epoch, samples, numbers) if samples else None
            rank_batch.indices.append(numbers)
            rank_batch.batches.append(batch)
        some_are_empty = any(batch is None for batch in rank_batch.batches)
        if some_are_empty and part.samples:
            # The loader makes the empty batches of this one, which has the right dtypes and shapes.
            with preserve_rng_state():
                number = np.array([part.first_number])
                rank_batch.one_sample_batch = self.collate(key.epoch, part.samples[:1], number)
        return rank_batch

    def _read_part(self, key: GlobalBatchKey) -> _ReadPart:
        """Reads what this rank needs of a global batch, as `shard` says."""
        if self._source.shard is None:  # every rank reads all samples and keeps its own
            return self._read_part_of_whole(key)
        planned_sizes = self._planned_sizes(key)
        if self._source.shard is False:  # the iterable gives each rank a part of its own
            return self._read_own_part(key, planned_sizes)
        return self._seek_part(key, planned_sizes)  # `shard` is a function that seeks samples

    def _read_part_of_whole(self, key: GlobalBatchKey) -> _ReadPart:
        """Reads a whole global batch, and says which samples of it are this rank's."""
        samples = self.read_whole(key.epoch, key.position, key.pass_begin)
        # Begin and end of each part in `samples`, shape (micro-batches, ranks, 2).
        split = split_batch(len(samples), key.shares, key.num_micro_batches, key.virtual_ranks)
        sizes = split_sizes(split)  # samples of each part, shape (micro-batches, ranks)
        samples_of_rank = sizes.sum(axis=0)
        bounds_on_this_rank = split[:, self._data_parallel.rank]
        return _ReadPart(
            samples=samples,
            # The samples follow each other in the epoch, so their numbers grow by 1.
            first_number=key.position * self._source.batch_size,
            stride=1,
            # The size of the global batch is known, so every rank has what is planned.
            planned_sizes=sizes,
            counts=samples_of_rank,
            bounds=bounds_on_this_rank.tolist(),
            ended=not samples,
        )

    def _read_own_part(self, key: GlobalBatchKey, planned_sizes: Indices) -> _ReadPart:
        """Reads this rank's part of an iterable that splits itself over the ranks.

        Args:
            key: of the global batch.
            planned_sizes: samples of each part of it, shape `(micro-batches, ranks)`.
        """
        rank = self._data_parallel.rank
        num_ranks = self._data_parallel.size
        num_wanted = int(planned_sizes[:, rank].sum())
        # The iterable gives only samples of this rank, the same number for each global batch.
        first_on_rank = key.position * num_wanted
        samples = self._read(
            key.epoch,
            first=first_on_rank,
            stride=1,
            count=num_wanted,
            pass_begin=key.pass_begin,
            per_batch=num_wanted,
        )
        return self._divide_part(
            samples,
            # Sample k of rank r has the number k * ranks + r, so that no two samples have the same.
            first_number=first_on_rank * num_ranks + rank,
            planned_sizes=planned_sizes,
            ended=not samples,
        )

    def _seek_part(self, key: GlobalBatchKey, planned_sizes: Indices) -> _ReadPart:
        """Reads this rank's samples of an iterable that can be entered at any sample.

        Rank r has the samples r, r + ranks, r + 2 * ranks, ... of the epoch, where `ranks` is the
        number of ranks.

        Args:
            key: of the global batch.
            planned_sizes: samples of each part of it, shape `(micro-batches, ranks)`.
        """
        rank = self._data_parallel.rank
        num_ranks = self._data_parallel.size
        num_wanted = int(planned_sizes[:, rank].sum())
        begin = key.position * self._source.batch_size  # the first sample of the global batch
        # This rank's first sample from `begin` on. Of 4 ranks, rank 1 has the samples 1, 5, 9, ...,
        # so from begin=6 on it is 6 + (1 - 6) % 4 = 9.
        first_number = begin + (rank - begin) % num_ranks
        samples = self._read(
            key.epoch,
            first=first_number,
            stride=num_ranks,
            count=num_wanted,
            pass_begin=key.pass_begin,
        )
        # A global batch with fewer samples than ranks has none for some ranks. That such a rank has
        # read nothing does not mean that the iterable has ended.
        ended = num_wanted > 0 and not samples
        return self._divide_part(
            samples, first_number=first_number, planned_sizes=planned_sizes, ended=ended
        )

    def _divide_part(
        self, samples: list[Any], *, first_number: int, planned_sizes: Indices, ended: bool
    ) -> _ReadPart:
        """Divides this rank's samples of a global batch into micro-batches.

        Args:
            samples: those of this rank alone, fewer than planned at the end of the iterable.
            first_number: the number of the first sample. The next ones have this number plus the
                number of ranks, and so on.
            planned_sizes: samples of each part, shape `(micro-batches, ranks)`.
            ended: True if the iterable gives this rank no more samples.
        """
        rank = self._data_parallel.rank
        # Micro-batch i has samples[bounds[i] : bounds[i + 1]]. At the end of the iterable
        # the last micro-batches are short or empty.
        planned_bounds = np.cumsum([0, *planned_sizes[:, rank]])
        bounds = np.minimum(planned_bounds, len(samples))
        begins_and_ends = np.stack([bounds[:-1], bounds[1:]], axis=1)  # (micro-batches, 2)
        counts = planned_sizes.sum(axis=0)  # planned samples of each rank
        counts[rank] = len(samples)  # of the other ranks it is not known yet
        return _ReadPart(
            samples=samples,
            first_number=first_number,
            stride=self._data_parallel.size,
            planned_sizes=planned_sizes,
            counts=counts,
            bounds=begins_and_ends.tolist(),
            ended=ended,
        )

    def _planned_sizes(self, key: GlobalBatchKey) -> Indices:
        """Returns the sizes of the parts of a full global batch of an iterable that is split.

        Returns:
            Samples of each part, shape `(micro-batches, ranks)`.
        """
        batch_size = self._source.batch_size
        num_ranks = self._data_parallel.size
        if self._source.shard is False:
            return split_sizes(split_batch(batch_size, key.shares, key.num_micro_batches))
        # Micro-batch i has the samples bounds[i] to bounds[i + 1] - 1 of the epoch.
        edges = np.arange(key.num_micro_batches + 1)
        bounds = key.position * batch_size + ceil_div(batch_size * edges, key.num_micro_batches)
        # Rank r has the samples r, r + ranks, r + 2 * ranks, ... of the epoch. Before a bound there
        # are ceil((bound - r) / ranks) of them; shape (micro-batches + 1, ranks).
        ranks = np.arange(num_ranks)
        samples_before_bound = ceil_div(bounds[:, None] - ranks, num_ranks)
        return np.diff(samples_before_bound, axis=0)

    def read_whole(self, epoch: int, position: int, pass_begin: int = 0) -> list[Any]:
        """Reads the samples of a whole global batch; fewer, or none, at the end of the iterable.

        Args:
            epoch: of the pass.
            position: of the global batch in the epoch.
            pass_begin: the position of the first global batch of the pass.
        """
        batch_size = self._source.batch_size
        return self._read(
            epoch,
            first=position * batch_size,
            stride=1,
            count=batch_size,
            pass_begin=pass_begin,
            per_batch=batch_size,
        )

    def read_first(self, epoch: int, count: int) -> Any:
        """Returns a batch of the first samples that this rank can read; None if there are none."""
        fetch = self.fresh()
        samples = fetch._read(epoch, first=0, stride=1, count=count)
        opened = fetch._reader
        if self._reader is not None and opened is not None:
            # Some iterables have a single iterator, which has just begun again: then the pass that
            # was reading it has to find its place anew.
            if opened.samples is self._reader.samples:
                self._reader = None
        if not samples:
            return None
        return self.collate(epoch, samples, np.arange(len(samples)))

    def collate(self, epoch: int, samples: list[Any], numbers: Indices) -> Any:
        """Returns a batch of samples, each transformed with random streams of its own.

        Args:
            epoch: of the pass.
            samples: as the iterable gave them.
            numbers: of the samples, shape `(n,)`.
        """
        transform = self._source.transform
        # Without code of the user's, or if `sample_rng=False` was set, nothing is seeded.
        needs_seeds = self._prepares_samples and self._sample_rng
        if not needs_seeds:
            if transform is not None:
                samples = [transform(sample) for sample in samples]
            return call_collate(self._source.collate, samples)
        with preserve_rng_state():
            if transform is None:  # the collate function may draw
                seed_sample(self._seed, epoch, int(numbers[0]))
                return call_collate(self._source.collate, samples)
            transformed = []
            for sample, number in zip(samples, numbers.tolist(), strict=True):
                seed_sample(self._seed, epoch, number)
                transformed.append(transform(sample))
            return call_collate(self._source.collate, transformed)

    def _read(
        self,
        epoch: int,
        *,
        first: int,
        stride: int,
        count: int,
        pass_begin: int = 0,
        per_batch: int = 0,
    ) -> list[Any]:
        """Reads the samples `first`, `first + stride`, ...; fewer at the end of the iterable.

        Args:
            epoch: of the pass.
            first: the number of the first sample, as this rank counts them.
            stride: how much the number grows from one sample to the next.
            count: samples to read.
            pass_begin: the position at which the pass begins.
            per_batch: samples that this rank reads of each full global batch; 0: it varies.
        """
        if count == 0:
            return []
        can_seek = callable(self._source.shard)
        with without_worker_info():  # many iterables would give this worker a part of their own
            reader = self._reader
            if reader is None or reader.epoch != epoch:
                reader = self._open(epoch, first, stride)
            elif reader.next_number > first:  # it is past the sample, and cannot go back
                reader = self._open(epoch, first, stride)
            elif reader.ended:
                return []
            elif reader.next_number < first and can_seek:  # quicker than to read on to the sample
                reader = self._open(epoch, first, stride)
            with reader.random_state():
                self._read_up_to(reader, first, pass_begin, per_batch)
                samples = reader.take(count)
            if samples:
                reader.next_number = first + stride * len(samples)
        return samples

    def _read_up_to(
        self, reader: StreamReader, first: int, pass_begin: int, per_batch: int
    ) -> None:
        """Reads on to a sample, and past all samples before it.

        These are of global batches that other loader workers read, or that were trained on before
        the run was resumed. Their digests are kept, since all workers must read the same.

        Args:
            reader: of this pass.
            first: the number of the sample.
            pass_begin: the position at which the pass begins.
            per_batch: samples that this rank reads of each full global batch; 0: it varies.
        """
        while reader.next_number < first and not reader.ended:
            if per_batch == 0:  # which sample is in which global batch is not known
                passed = reader.take(first - reader.next_number)
                reader.next_number += len(passed)
                continue
            # Read to the end of the global batch in which the reader is.
            position = reader.next_number // per_batch
            end = min((position + 1) * per_batch, first)
            passed = reader.take(end - reader.next_number)
            reader.next_number += len(passed)
            self._keep_digests(position, pass_begin, passed)

    def _keep_digests(self, position: int, pass_begin: int, samples: list[Any]) -> None:
        """Keeps digests of a global batch that has been read, if it is one that is compared.

        The next `RankBatch` that this worker returns hands them out.
        """
        if samples and is_compared(position, pass_begin, self._source.batch_size):
            self._digests[position] = batch_digests(samples)

    def _read_beginning(self, key: GlobalBatchKey) -> None:
        """Reads the first samples of the epoch, and keeps their digests for the next `RankBatch`.

        It does so only if the stream can skip to the middle of the epoch. Any other stream is read
        from its beginning anyway, and `_read_up_to` keeps these digests.

        Args:
            key: of the global batch that is wanted, which may be in the middle of the epoch.
        """
        if not self._can_skip:
            return
        # A copy reads them, with an iterator of its own. That of this object stays where it is.
        fetch_of_beginning = self.fresh()
        num_batches = ceil_div(SAMPLES_COMPARED, self._source.batch_size)
        for position in range(num_batches):
            key_of_beginning = key._replace(position=position, pass_begin=0, read_beginning=False)
            samples = fetch_of_beginning._read_part(key_of_beginning).samples
            fetch_of_beginning._keep_digests(position, pass_begin=0, samples=samples)
        self._digests.update(fetch_of_beginning._digests)

    @property
    def _can_skip(self) -> bool:
        """True if a pass can begin after the first sample without reading what comes before."""
        if callable(self._source.shard):
            return True
        # After `skip`, the `datasets` library gives another order in all epochs but the first, and
        # its load_state_dict loses what was in a shuffle buffer: such a stream is read on.
        return hasattr(self.dataset, "skip") and not hasattr(self.dataset, "set_epoch")

    def _num_samples_in_all(self) -> int | None:
        """Returns how many samples the iterable has, if this reader has come to its end; else None.

        A reader that seeks its samples has only those of this rank, so it cannot tell.
        """
        reader = self._reader
        if callable(self._source.shard) or reader is None or not reader.ended:
            return None
        return reader.next_number

    def _open(self, epoch: int, first: int, stride: int) -> StreamReader:
        """Begins a pass over the iterable, which replaces the one that is open.

        Args:
            epoch: of the pass.
            first: the number of the first sample that is wanted. The pass begins with it if the
                iterable can skip to it, and otherwise with sample 0.
            stride: how much the number grows from one sample to the next, if samples are sought.

        Returns:
            Its reader, which is also kept in `_reader`.
        """
        dataset: Any = self.dataset
        shard = self._source.shard
        random_state: Any = nullcontext
        if self._sample_rng:
            random_state = PassRandomState(self._seed, epoch).entered
        next_number = 0
        with random_state():
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            if callable(shard):  # the user's function returns the samples from `first` on
                samples = iter(shard(first, stride))
                next_number = first
            elif first and self._can_skip:
                samples = iter(dataset.skip(first))
                next_number = first
            else:
                samples = iter(dataset)
        self._reader = StreamReader(epoch, next_number, samples, random_state)
        return self._reader
