"""Reads this rank's part of each global batch from an iterable dataset, also in loader workers.

A *global batch* holds the samples of one optimizer step, and its *position* is its number within
the epoch. Each rank processes its part in one or more *micro-batches*. How a rank gets its part
depends on `shard`. With None, it reads the whole dataset and keeps its part. With a function, it
reads only its own samples. With False, the dataset itself splits the samples over the ranks.
*Digests* are short hashes of samples, by which ranks and workers check that they read the same.

A worker is asked for a global batch by its position, and reads the dataset forward to that place.
So the result does not depend on the number of workers, or on which of them is asked.

Random numbers drawn in `transform` depend on the seed, the epoch and the number of the sample.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from lockstep.machine.topology import DataParallelRank
from lockstep.session.micro_batch import VirtualRanks
from lockstep.torch_compat import without_worker_info

BATCHES_BETWEEN_COMPARISONS = 100
"""Samples are compared at the beginning of a pass, and then after this many global batches."""


def is_compared(position: int, pass_begin: int, batch_size: int) -> bool:
    """Returns True if the ranks and the workers compare the samples of a global batch.

    They compare the first 16 samples of the pass, the first 16 of the epoch, and the first 16 after
    every hundredth global batch. If global batches are small, 16 samples span several of them.

    Args:
        position: position of the global batch in the epoch.
        pass_begin: position at which the pass began, above 0 in a resumed epoch.
        batch_size: number of samples in a global batch.
    """
    batches_per_comparison = ceil_div(SAMPLES_COMPARED, batch_size)
    is_at_begin_of_pass = pass_begin <= position < pass_begin + batches_per_comparison
    batches_since_hundredth = position % BATCHES_BETWEEN_COMPARISONS
    return is_at_begin_of_pass or batches_since_hundredth < batches_per_comparison


class GlobalBatchRequest(NamedTuple):
    """A request to read a global batch: which one, and how it is divided."""

    epoch: int
    position: int
    shares: tuple[int, ...]
    num_micro_batches: int
    """Number of micro-batches in the global batch, or in each virtual rank's part of it."""
    virtual_ranks: VirtualRanks | None
    pass_begin: int
    """The position of the first global batch of this pass."""
    read_beginning: bool = False
    """True to also read the first samples of the epoch, in a pass that begins in its middle and in
    a stream that can skip samples. Their digests are compared with those of the checkpoint."""

    def at_beginning(self, position: int) -> GlobalBatchRequest:
        """Returns the request for a global batch in a pass from the beginning of this epoch."""
        return self._replace(position=position, pass_begin=0, read_beginning=False)


@dataclass
class RankBatch:
    """The part of a global batch that a rank has read from an iterable dataset."""

    position: int
    planned_sizes: Indices
    """The planned number of samples of each rank in each micro-batch, shape `(micro-batches,
    ranks)`. At the end of the dataset there may be fewer."""
    num_samples_of_ranks: Indices
    """The actual number of samples of each rank, shape `(ranks,)`. If every rank reads the whole
    dataset, all entries are right. Otherwise only the entry of this rank is right, and the others
    hold the planned numbers."""
    ended: bool
    """True if the dataset has no more samples for this rank."""
    worker: int
    """The number of the loader worker that has read it; 0 without workers."""
    digests: dict[int, list[Any]]
    """Digests of samples that are to be compared (see `is_compared`), by the position of their
    global batch. They cover all that this worker has read or skipped since its last result."""
    num_samples_in_all: int | None = None
    """The number of samples in the dataset, if this worker has reached its end."""
    one_sample_batch: Any = None
    """A batch with one sample, from which empty batches can be made. It is only present if this
    rank has no samples in some micro-batch."""
    indices: list[Indices] = field(default_factory=list)
    """For each micro-batch, the numbers of this rank's samples as an array of shape `(n,)`."""
    batches: list[Any] = field(default_factory=list)
    """For each micro-batch, the collated batch, or None if this rank has no samples in it."""


class _ReadPart(NamedTuple):
    """The samples of a global batch that this rank has read, before they are collated."""

    samples: list[Any]
    """The samples of this rank, or of all ranks if every rank reads the whole dataset."""
    first_number: int
    """The number of the first sample."""
    stride: int
    """The difference between the numbers of neighbouring samples."""
    planned_sizes: Indices
    """See `RankBatch`."""
    num_samples_of_ranks: Indices
    """See `RankBatch`."""
    begins_and_ends: list[list[int]]
    """For each micro-batch, where this rank's samples begin and end within `samples`."""
    ended: bool
    """True if the dataset has no more samples for this rank."""


class _BatchesOfReader(NamedTuple):
    """Which global batch a sample belongs to that a rank reads and drops."""

    samples_per_batch: int
    """The number of samples that this rank reads of each full global batch."""
    pass_begin: int
    """The position of the first global batch of the pass. Digests are kept of the first samples
    from there on, among others (`is_compared`)."""


class IterableFetch(Dataset[Any]):
    """A dataset whose items are this rank's parts of global batches.

    `fetch[request]` reads the part that a `GlobalBatchRequest` asks for.

    Args:
        source: the iterable dataset.
        seed: the seed of the run.
        sample_rng: False to leave all random number generators as they are.
        data_parallel: this rank among the ranks that process parts of a global batch.
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
        """Digests that have not been put into a `RankBatch` yet."""
        self._runs_user_code = source.transform is not None or source.collate is not default_collate
        """True if the user's own functions prepare samples. These may draw random numbers."""

    def fresh(self) -> IterableFetch:
        """Returns a copy that starts from the beginning of the dataset, for a loader worker."""
        return IterableFetch(self._source, self._seed, self._sample_rng, self._data_parallel)

    def close(self) -> None:
        """Ends the current pass."""
        self._reader = None

    def __getitem__(self, request: GlobalBatchRequest) -> RankBatch:
        worker_info = get_worker_info()
        if request.read_beginning:
            self._read_beginning(request)

        part = self._read_part(request)
        self._keep_digests(request.position, request.pass_begin, part.samples)

        rank_batch = RankBatch(
            position=request.position,
            planned_sizes=part.planned_sizes,
            num_samples_of_ranks=part.num_samples_of_ranks,
            ended=part.ended,
            worker=0 if worker_info is None else worker_info.id,
            digests=self._digests,
            num_samples_in_all=self._num_samples_in_all(),
        )
        self._digests = {}

        # One batch for each micro-batch.
        for begin, end in part.begins_and_ends:
            samples = part.samples[begin:end]
            numbers = part.first_number + part.stride * np.arange(begin, end)
            batch = self.collate(request.epoch, samples, numbers) if samples else None
            rank_batch.indices.append(numbers)
            rank_batch.batches.append(batch)

        some_are_empty = any(batch is None for batch in rank_batch.batches)
        if some_are_empty and part.samples:
            # The loader makes empty batches from this one, as it has the right dtypes and shapes.
            with preserve_rng_state():
                numbers = np.array([part.first_number])
                rank_batch.one_sample_batch = self.collate(request.epoch, part.samples[:1], numbers)
        return rank_batch

    def _read_part(self, request: GlobalBatchRequest) -> _ReadPart:
        """Reads what this rank needs of a global batch, in the way that `shard` demands."""
        every_rank_reads_all = self._source.shard is None
        if every_rank_reads_all:
            return self._read_all_and_select(request)

        planned_sizes = self._planned_sizes(request)
        dataset_splits_itself = self._source.shard is False
        if dataset_splits_itself:
            return self._read_own_part(request, planned_sizes)

        # `shard` is a function, which gives each of n ranks every n-th sample.
        return self._read_every_nth(request, planned_sizes)

    def _read_all_and_select(self, request: GlobalBatchRequest) -> _ReadPart:
        """Reads a whole global batch, and determines which of its samples belong to this rank."""
        samples = self.read_whole(request.epoch, request.position, request.pass_begin)

        # Where each part begins and ends in `samples`, shape (micro-batches, ranks, 2). For 8
        # samples, 2 micro-batches and 2 ranks: [[[0, 2], [2, 4]], [[4, 6], [6, 8]]].
        begins_and_ends = split_batch(
            len(samples), request.shares, request.num_micro_batches, request.virtual_ranks
        )
        # For each micro-batch, this rank's begin and end. On rank 1: [[2, 4], [6, 8]].
        on_this_rank = begins_and_ends[:, self._data_parallel.rank]

        sizes = split_sizes(begins_and_ends)  # shape (micro-batches, ranks): [[2, 2], [2, 2]]
        num_samples_of_ranks = sizes.sum(axis=0)  # shape (ranks,): [4, 4]

        return _ReadPart(
            samples=samples,
            # The samples of all ranks have consecutive numbers in the epoch.
            first_number=request.position * self._source.batch_size,
            stride=1,
            planned_sizes=sizes,  # also the actual ones: they follow from what was read
            num_samples_of_ranks=num_samples_of_ranks,
            begins_and_ends=on_this_rank.tolist(),
            ended=not samples,
        )

    def _read_own_part(self, request: GlobalBatchRequest, planned_sizes: Indices) -> _ReadPart:
        """Reads this rank's part from a dataset that splits itself over the ranks.

        Its samples are numbered as if the ranks took turns, so that no two have the same number:
        with 2 ranks, rank 0 has the numbers 0, 2, 4, ... and rank 1 has 1, 3, 5, ... The k-th
        sample of rank r has the number k * ranks + r.

        Args:
            request: the global batch to read.
            planned_sizes: number of samples in each part, shape `(micro-batches, ranks)`.
        """
        rank = self._data_parallel.rank
        num_ranks = self._data_parallel.size

        # The dataset yields only samples of this rank. The plan is that of a full global batch, so
        # `num_wanted` is the same for every global batch.
        num_wanted = int(planned_sizes[:, rank].sum())
        first_on_rank = request.position * num_wanted
        samples = self._read(
            request.epoch,
            first=first_on_rank,
            stride=1,
            count=num_wanted,
            batches=_BatchesOfReader(num_wanted, request.pass_begin),
        )

        return self._divide_part(
            samples,
            first_number=first_on_rank * num_ranks + rank,
            planned_sizes=planned_sizes,
            # A part that is shorter than planned is trained on, too; the next request then finds no
            # samples.
            ended=not samples,
        )

    def _read_every_nth(self, request: GlobalBatchRequest, planned_sizes: Indices) -> _ReadPart:
        """Reads this rank's samples through the user's function `shard(start, step)`.

        Of n ranks, rank r gets the samples r, r + n, r + 2 n, ... of the epoch.

        Args:
            request: the global batch to read.
            planned_sizes: number of samples in each part, shape `(micro-batches, ranks)`.
        """
        rank = self._data_parallel.rank
        num_ranks = self._data_parallel.size
        num_wanted = int(planned_sizes[:, rank].sum())

        first_of_global_batch = request.position * self._source.batch_size
        first_number = _next_number_of_rank(first_of_global_batch, rank, num_ranks)
        samples = self._read(request.epoch, first=first_number, stride=num_ranks, count=num_wanted)

        # If 3 samples are planned and 2 are left, these are trained on, and the next request finds
        # none: only then the dataset has ended. (If a global batch has fewer samples than ranks,
        # none is planned for some ranks, which says nothing.)
        finds_none = num_wanted > 0 and not samples
        return self._divide_part(
            samples, first_number=first_number, planned_sizes=planned_sizes, ended=finds_none
        )

    def _divide_part(
        self, samples: list[Any], *, first_number: int, planned_sizes: Indices, ended: bool
    ) -> _ReadPart:
        """Divides this rank's samples of a global batch into micro-batches, in their order.

        At the end of the dataset there may be fewer samples than planned. Then the last
        micro-batches become short or empty: 5 samples for the planned sizes 4 and 4 are divided
        into 4 and 1.

        Args:
            samples: the samples of this rank. Their numbers in the epoch are `first_number`,
                `first_number + ranks`, `first_number + 2 * ranks`, ...
            first_number: see above.
            planned_sizes: planned number of samples of each rank in each micro-batch, shape
                `(micro-batches, ranks)`.
            ended: True if the dataset has no more samples for this rank.
        """
        rank = self._data_parallel.rank

        # Micro-batch i consists of samples[bounds[i] : bounds[i + 1]]. In the example above the
        # planned bounds are [0, 4, 8], and the bounds are [0, 4, 5].
        planned_sizes_of_this_rank = planned_sizes[:, rank]
        planned_bounds = np.cumsum([0, *planned_sizes_of_this_rank])
        bounds = np.minimum(planned_bounds, len(samples))
        begins_and_ends = np.stack([bounds[:-1], bounds[1:]], axis=1)  # e.g. [[0, 4], [4, 5]]

        # How many samples each rank has in all micro-batches. How many the others have read is not
        # known here. Their planned numbers are used, until the loader exchanges the actual ones.
        num_samples_of_ranks = planned_sizes.sum(axis=0)
        num_samples_of_ranks[rank] = len(samples)

        return _ReadPart(
            samples=samples,
            first_number=first_number,
            stride=self._data_parallel.size,
            planned_sizes=planned_sizes,
            num_samples_of_ranks=num_samples_of_ranks,
            begins_and_ends=begins_and_ends.tolist(),
            ended=ended,
        )

    def _planned_sizes(self, request: GlobalBatchRequest) -> Indices:
        """Returns how a full global batch is divided if the dataset is split over the ranks.

        Returns:
            The number of samples in each part, shape `(micro-batches, ranks)`.
        """
        # With shard=False the dataset splits itself, and each rank takes its share of every
        # micro-batch, as from a dataset with an index.
        dataset_splits_itself = self._source.shard is False
        if dataset_splits_itself:
            return split_sizes(
                split_batch(self._source.batch_size, request.shares, request.num_micro_batches)
            )

        # Otherwise `shard` is a function that gives each rank every n-th sample of the epoch.
        return self._sizes_of_every_nth(request)

    def _sizes_of_every_nth(self, request: GlobalBatchRequest) -> Indices:
        """Returns how a full global batch is divided if rank r has the samples r, r + n, r + 2 n...

        For example, the first global batch has the samples 0 to 4, and 2 ranks train it in 2
        micro-batches, {0, 1, 2} and {3, 4}. Of the first one, rank 0 has 0 and 2, and rank 1 has 1.
        Of the second one, rank 0 has 4, and rank 1 has 3. The result is [[2, 1], [1, 1]].

        Returns:
            The number of samples in each part, shape `(micro-batches, ranks)`.
        """
        batch_size = self._source.batch_size
        num_ranks = self._data_parallel.size

        # First cut the global batch into micro-batches: micro-batch i has the samples bounds[i] to
        # bounds[i + 1] - 1 of the epoch. In the example, the bounds are [0, 3, 5]. They are rounded
        # up, so that the first micro-batch is the larger one, as in `split_batch`.
        edges = np.arange(request.num_micro_batches + 1)
        begin_of_batch = request.position * batch_size
        bounds = begin_of_batch + ceil_div(batch_size * edges, request.num_micro_batches)

        # At bound 3, for example, rank 0 has had 2 samples and rank 1 has had 1: the row [2, 1].
        num_before = _num_before_bounds(bounds, num_ranks)  # [[0, 0], [2, 1], [3, 2]]
        return np.diff(num_before, axis=0)

    def read_whole(self, epoch: int, position: int, pass_begin: int = 0) -> list[Any]:
        """Reads all samples of a global batch. At the end of the dataset there are fewer or none.

        Args:
            epoch: number of the epoch.
            position: position of the global batch in the epoch.
            pass_begin: position of the first global batch of the pass, which is above 0 in a
                resumed epoch. Digests of the samples near it are kept, to compare them with those
                of other readers (`is_compared`). For example, a pass begins at position 5, and this
                worker reads position 7 first: it drops the samples of 5 and 6, but keeps their
                digests.
        """
        batch_size = self._source.batch_size
        return self._read(
            epoch,
            first=position * batch_size,
            stride=1,
            count=batch_size,
            batches=_BatchesOfReader(batch_size, pass_begin),
        )

    def read_first(self, epoch: int, count: int) -> Any:
        """Returns a batch of the first `count` samples of the dataset, or None if it has none."""
        # A copy with a reader of its own reads them, so that a pass which is in progress keeps its
        # place.
        copy_at_beginning = self.fresh()
        samples = copy_at_beginning._read(epoch, first=0, stride=1, count=count)

        # If `iter(dataset)` always returns the same iterator, the copy has moved that of the pass
        # in progress, which then has to read forward from the beginning to its place.
        if self._shares_iterator_with(copy_at_beginning):
            self._reader = None  # so the next read opens the dataset again

        if not samples:
            return None
        return self.collate(epoch, samples, sample_numbers=np.arange(len(samples)))

    def _shares_iterator_with(self, copy: IterableFetch) -> bool:
        """Returns True if this object and a copy of it read from the same iterator."""
        if self._reader is None or copy._reader is None:
            return False
        return self._reader.samples is copy._reader.samples

    def collate(self, epoch: int, samples: list[Any], sample_numbers: Indices) -> Any:
        """Transforms samples and makes a batch of them.

        Random numbers are seeded for each sample by its number, so that a sample is transformed in
        the same way on whichever rank and worker that happens.

        Args:
            epoch: number of the epoch.
            samples: the samples as the dataset yielded them.
            sample_numbers: the numbers of the samples in the epoch, shape `(n,)`.
        """
        # Seeds are needed only if the user's own functions are called, since those may draw random
        # numbers. With `sample_rng=False` the user says that they draw none.
        transform = self._source.transform
        needs_seeds = self._runs_user_code and self._sample_rng
        if not needs_seeds:
            if transform is not None:
                samples = [transform(sample) for sample in samples]
            return call_collate(self._source.collate, samples)

        with preserve_rng_state():
            if transform is None:
                # The collate function draws the random numbers of the first sample.
                seed_sample(self._seed, epoch, int(sample_numbers[0]))
            else:
                # The collate function goes on with the random numbers of the last sample.
                samples = self._transform_each(transform, samples, epoch, sample_numbers)
            return call_collate(self._source.collate, samples)

    def _transform_each(
        self,
        transform: Callable[[Any], Any],
        samples: list[Any],
        epoch: int,
        sample_numbers: Indices,
    ) -> list[Any]:
        """Transforms samples, each with the random numbers that follow from its number."""
        transformed = []
        for sample, number in zip(samples, sample_numbers.tolist(), strict=True):
            seed_sample(self._seed, epoch, number)
            transformed.append(transform(sample))
        return transformed

    def _read(
        self,
        epoch: int,
        *,
        first: int,
        stride: int,
        count: int,
        batches: _BatchesOfReader | None = None,
    ) -> list[Any]:
        """Reads the samples `first`, `first + stride`, and so on, up to the end of the dataset.

        If samples before `first` must be read and dropped, their digests are kept.

        Args:
            epoch: number of the epoch.
            first: number of the first sample. If the dataset splits itself over the ranks, samples
                are counted on this rank only, otherwise over the whole epoch.
            stride: difference between the numbers of neighbouring samples.
            count: number of samples to read.
            batches: the global batches that dropped samples belong to; None if this is unknown,
                and no digests are kept.
        """
        if count == 0:
            return []

        # Many datasets split themselves over the loader workers. They must not see that there are
        # workers: here each worker reads everything.
        with without_worker_info():
            reader = self._reader_that_reaches(epoch, first, stride)
            if reader.ended:
                return []

            with reader.enter_random_state():
                self._read_up_to(reader, first, batches)
                return reader.take(count)

    def _reader_that_reaches(self, epoch: int, first: int, stride: int) -> StreamReader:
        """Returns a reader that has not read the sample `first` of this epoch yet.

        Usually it is the reader of the previous call, which goes on. If that one is past the
        sample, for example, the dataset is opened anew.
        """
        reader = self._reader
        if reader is None or self._must_reopen(reader, epoch, first):
            return self._open(epoch, first, stride)
        return reader

    def _must_reopen(self, reader: StreamReader, epoch: int, first: int) -> bool:
        """Returns True if the dataset must be opened again to read a sample.

        Args:
            reader: the reader of the current pass.
            epoch: number of the epoch to read.
            first: number of the sample to read next.
        """
        is_another_epoch = reader.epoch != epoch
        if is_another_epoch:
            return True

        is_past_sample = reader.next_number > first
        if is_past_sample:  # an iterator cannot go back
            return True

        # A function `shard(start, step)` opens the dataset at any sample, which is faster than
        # reading up to it. If the reader has reached the end of the dataset, the later sample does
        # not exist, and there is nothing to open.
        is_before_sample = reader.next_number < first
        can_start_anywhere = callable(self._source.shard)
        return is_before_sample and can_start_anywhere and not reader.ended

    def _read_up_to(
        self, reader: StreamReader, first: int, batches: _BatchesOfReader | None
    ) -> None:
        """Reads and drops all samples before a given one.

        These belong to global batches that other loader workers return, or that were trained on
        before the run was resumed. Their digests are kept, to check that all workers read the same
        samples.

        Args:
            reader: the reader of this pass.
            first: number of the sample to stop at.
            batches: the global batches that the dropped samples belong to; None if unknown.
        """
        while reader.next_number < first and not reader.ended:
            if batches is None:  # no digests to keep
                reader.take(first - reader.next_number)
                continue

            # Read to the end of the current global batch, so that its digests can be kept.
            position = reader.next_number // batches.samples_per_batch
            end = min((position + 1) * batches.samples_per_batch, first)
            skipped = reader.take(end - reader.next_number)
            self._keep_digests(position, batches.pass_begin, skipped)

    def _keep_digests(self, position: int, pass_begin: int, samples: list[Any]) -> None:
        """Keeps the digests of a global batch for the next `RankBatch`, if it is to be compared."""
        if samples and is_compared(position, pass_begin, self._source.batch_size):
            self._digests[position] = batch_digests(samples)

    def _read_beginning(self, request: GlobalBatchRequest) -> None:
        """Keeps the digests of the epoch's first samples for the next `RankBatch`.

        A run that resumes in the middle of an epoch compares them with those of the checkpoint, to
        see whether the dataset still has the same samples.

        Args:
            request: the global batch to read, which is usually in the middle of the epoch.
        """
        if not self._can_skip:
            return  # `_read_up_to` reads the beginning anyway, and keeps its digests

        # A copy with an iterator of its own reads them, so that this object keeps its place.
        copy_at_beginning = self.fresh()
        self._digests.update(copy_at_beginning._digests_of_first_samples(request))

    def _digests_of_first_samples(self, request: GlobalBatchRequest) -> dict[int, list[Any]]:
        """Reads the first samples of the epoch of a request, and returns their digests.

        Returns:
            The digests that `_keep_digests` keeps, by the position of the global batch.
        """
        num_batches = ceil_div(SAMPLES_COMPARED, self._source.batch_size)
        for position in range(num_batches):
            samples = self._read_part(request.at_beginning(position)).samples
            self._keep_digests(position, pass_begin=0, samples=samples)
        return self._digests

    @property
    def _can_skip(self) -> bool:
        """True if a pass can begin in the middle of the dataset without reading up to there."""
        if callable(self._source.shard):  # the function can be asked for any sample
            return True

        # A dataset of the `datasets` library (it has `set_epoch`) must be read from its beginning:
        # after `skip` it returns another order in all epochs except the first, and its
        # load_state_dict loses the contents of a shuffle buffer.
        return hasattr(self.dataset, "skip") and not hasattr(self.dataset, "set_epoch")

    def _num_samples_in_all(self) -> int | None:
        """Returns the number of samples in the dataset, or None if that is not known.

        It is known when the end has been reached, unless only every n-th sample was read.
        """
        reader = self._reader
        reads_every_nth = callable(self._source.shard)
        if reads_every_nth or reader is None or not reader.ended:
            return None
        return reader.next_number

    def _open(self, epoch: int, first: int, stride: int) -> StreamReader:
        """Starts a pass over the dataset, which replaces the current one.

        If the dataset can be opened in its middle, the pass begins with the sample `first`.
        Otherwise it begins with sample 0, and `_read_up_to` will drop the samples before `first`.

        Args:
            epoch: number of the epoch.
            first: number of the first sample that is needed.
            stride: difference between the numbers of neighbouring samples. It is 1 unless the user
                has given a function, which is called as `shard(first, stride)`.

        Returns:
            The reader of the pass, which is also kept in `_reader`.
        """
        dataset: Any = self.dataset
        shard = self._source.shard

        enter_random_state = self._enters_random_state(epoch)
        with enter_random_state():
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)

            if callable(shard):
                samples = iter(shard(first, stride))
                number_of_first_read = first
            elif first and self._can_skip:
                samples = iter(dataset.skip(first))
                number_of_first_read = first
            else:
                samples = iter(dataset)
                number_of_first_read = 0

        self._reader = StreamReader(
            epoch=epoch,
            next_number=number_of_first_read,
            stride=stride,
            samples=samples,
            enter_random_state=enter_random_state,
        )
        return self._reader

    def _enters_random_state(self, epoch: int) -> Callable[[], AbstractContextManager[None]]:
        """Returns a function, whose result is the context in which the dataset is read in a pass.

        In this context the dataset draws from random streams of the pass in place of the usual
        ones; with `sample_rng=False`, from the usual ones.
        """
        return PassRandomState(self._seed, epoch).entered if self._sample_rng else nullcontext


def _num_before_bounds(bounds: Indices, num_ranks: int) -> Indices:
    """Returns how many of the samples r, r + n, r + 2 n, ... of each rank r are before each bound.

    For the bounds [0, 3, 5] and 2 ranks the result is [[0, 0], [2, 1], [3, 2]]:

        bound    rank 0 has before it    rank 1 has before it
        0        0: none                 0: none
        3        2: samples 0, 2         1: sample 1
        5        3: samples 0, 2, 4      2: samples 1, 3

    Args:
        bounds: numbers of samples, shape `(bounds,)`.
        num_ranks: number of ranks, n.

    Returns:
        An array of shape `(bounds, ranks)`.
    """
    bound_column = bounds[:, None]
    rank_row = np.arange(num_ranks)
    return ceil_div(bound_column - rank_row, num_ranks)  # 0 if the bound is below the rank


def _next_number_of_rank(begin: int, rank: int, num_ranks: int) -> int:
    """Returns the first of the samples `rank`, `rank + num_ranks`, ... that is not before `begin`.

    Of 4 ranks, rank 1 has the samples 1, 5, 9, ...; from sample 6 on, its first one is 9.
    """
    return begin + (rank - begin) % num_ranks
