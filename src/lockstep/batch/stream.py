"""Loads an iterable dataset (a *stream*): gives each rank its part of every global batch.

A *global batch* holds the samples of one optimizer step over all ranks, and its *position* is its
number within the epoch. Each rank processes its part in one or more *micro-batches*. A *digest* is
a short hash of a sample, so that ranks can compare samples without sending them.

The length of a stream is unknown until it ends. If every rank reads the whole stream, each rank
knows how many samples the others have, and the ranks only exchange a few bytes now and then to
check that they read the same data (`stream_consistency`). If the stream is split over the ranks,
each rank tells the others how many samples it has of every global batch. That takes 8 bytes per
rank and is done one global batch ahead, so no step waits for it.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep.batch.device_copy import to_device
from lockstep.batch.digest import SAMPLES_COMPARED
from lockstep.batch.digest_matching import first_differing_sample
from lockstep.batch.indices import Indices
from lockstep.batch.loader import SOME_RANKS_SKIP, Loader
from lockstep.batch.micro_batches import PlannedMicroBatch, ReadMicroBatch
from lockstep.batch.source import IterableSource
from lockstep.batch.stream_consistency import (
    WorkerComparison,
    check_global_batch,
    check_length,
    other_beginning_error,
)
from lockstep.batch.stream_fetch import GlobalBatchRequest, IterableFetch, RankBatch, is_compared
from lockstep.batch.weighing import scale_by_weight
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.errors import CheckpointError, DataError, SettingError


class IterableLoader(Loader):
    """Iterates over this rank's micro-batches of an iterable dataset; see `Loader`.

    Args:
        source: the iterable dataset.
        **options: the options of `Loader`.

    Raises:
        SettingError: the shares or micro-batches are not possible for a stream that is split over
            the ranks.
    """

    source: IterableSource

    def __init__(self, source: IterableSource, **options: Any) -> None:
        super().__init__(source, **options)
        sample_rng = options.get("sample_rng", True)
        self._iterable = IterableFetch(
            source, self.seed, sample_rng, self._collectives.data_parallel
        )
        self._kept_samples: list[Any] = []
        """All samples of the global batch on which autotuning measures the devices, while its
        micro-batches are handed out."""
        self._number_of_first_kept = 0
        """The number of the first of these samples in the stream, counted from 0."""
        self._had_samples = False
        """True if an earlier pass over the stream had samples."""
        self._steps_before_pass = 0
        """Number of optimizer steps in the run before the current epoch."""
        self._first_samples: dict[int, list[Any]] = {}
        """Digests of the first samples of the current epoch, by the position of a global batch."""
        self._first_samples_in_checkpoint: list[Any] | None = None
        """The same digests from the checkpoint, if a run was resumed in the middle of an epoch."""
        self._check_options()

    def _check_options(self) -> None:
        """Raises SettingError for options that a stream split over the ranks cannot have."""
        is_split = self.source.shard is not None
        # The request is open until autotuning has measured what this loader asked for.
        waits_for_autotuning = self._plan.autotune_request.is_open

        if is_split and waits_for_autotuning:
            raise SettingError(
                "shares='auto' or micro_batch_size='auto' for a stream with shard=",
                "they are measured on a global batch that every rank has read as a whole",
                "give numbers, or leave shard out",
            )

        if is_split and self._plan.virtual_ranks is not None:
            # DiLoCo's replicas are virtual ranks that train copies of the model.
            is_diloco = self._plan.virtual_ranks.train_copies
            setting = "strategy='diloco'" if is_diloco else "virtual_ranks"
            owner_of_part = "replica" if is_diloco else "virtual rank"
            raise SettingError(
                f"{setting} for a stream with shard=",
                f"each {owner_of_part} has a part of every global batch, whoever computes it, so "
                "every rank reads the whole stream",
                "leave shard out",
            )

        # A callable shard gives each rank every n-th sample.
        if callable(self.source.shard) and len(set(self.shares)) > 1:
            raise SettingError(
                f"shares {':'.join(map(str, self.shares))} for a stream with shard=",
                "a rank reads every n-th sample of it, so all parts are equal",
                "leave shares out for this loader (shares=(1, 1, ...)), or leave shard out",
            )

    # Saving and resuming the position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position in the stream; the next pass starts from there.

        Raises:
            CheckpointError: the checkpoint was saved with another kind of dataset, or with another
                size of the global batch.
        """
        # Only the loader of a stream saves the number of ranks; see `_identity`.
        saved_by_stream_loader = "ranks" in state
        if not saved_by_stream_loader:
            raise CheckpointError(
                "resuming a loader of a stream",
                "the checkpoint was made with a loader of a dataset with an index",
                "continue with the data of the checkpoint, or leave the loader out",
            )
        super().load_state_dict(state)

        # A run that resumes in the middle of an epoch will check that the stream still begins with
        # the same samples; see `_check_beginning`.
        self._first_samples = {}
        self._first_samples_in_checkpoint = None
        resumes_mid_epoch = self.start > 0
        if resumes_mid_epoch and "beginning" in state:
            self._first_samples_in_checkpoint = json.loads(state["beginning"])

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the stream.

        In the middle of an epoch the state also contains digests of the epoch's first samples. With
        these a resumed run checks that the stream still starts with the same data.
        """
        state = super().state_dict()
        first_samples = self.first_samples_of_epoch
        if self.mid_epoch and first_samples:
            state["beginning"] = json.dumps(first_samples)
        return state

    def _identity(self) -> dict[str, int]:
        """Returns the settings that a run must share with the checkpoint that it resumes."""
        ranks = 0  # 0: the checkpoint can be resumed on any number of ranks
        stream_splits_itself = self.source.shard is False
        if stream_splits_itself:  # then the samples of a rank depend on the number of ranks
            ranks = self._collectives.data_parallel.size
        return {"batch_size": self.batch_size, "seed": self.seed, "ranks": ranks}

    @property
    def first_samples_of_epoch(self) -> list[Any]:
        """Digests of the first samples that the stream yielded in the current epoch.

        A checkpoint contains the digests of rank 0, and a resumed run compares them with its own.
        Until a resumed run has read any sample, this property returns those of the checkpoint.
        """
        # Join the digests of the global batches 0, 1, 2, ... up to the first that is missing: if
        # one is missing, it is unknown which sample a later digest belongs to.
        digests_read: list[Any] = []
        for position in itertools.count():
            digests = self._first_samples.get(position)
            if digests is None:
                break
            digests_read += digests

        if not digests_read and self._first_samples_in_checkpoint is not None:
            return self._first_samples_in_checkpoint

        # If `shard` is a function, rank 0 of n reads the samples 0, n, 2 n, ... After a resume on
        # another number of ranks it reads others, and only sample 0 is certain to be among them.
        # Otherwise rank 0 reads the same samples again.
        ranks_read_every_nth = callable(self.source.shard)
        num_compared = 1 if ranks_read_every_nth else SAMPLES_COMPARED
        return digests_read[:num_compared]

    def _keep_first_samples(self, digests_by_position: Mapping[int, list[Any]]) -> None:
        """Keeps the digests of the first `SAMPLES_COMPARED` samples of this epoch.

        Args:
            digests_by_position: maps the position of a global batch to the digests of its samples.
                Later global batches are ignored.
        """
        for position, digests in digests_by_position.items():
            number_of_first_sample = position * self.batch_size
            if number_of_first_sample < SAMPLES_COMPARED:
                self._first_samples[position] = digests

    def _check_beginning(self, epoch: int) -> None:
        """Checks that a resumed epoch starts with the same samples as before the interruption.

        This is a collective: all ranks call it together.

        Raises:
            CheckpointError: the samples differ; raised on all ranks.
        """
        samples_in_checkpoint = self._first_samples_in_checkpoint
        if samples_in_checkpoint is None:  # only a run that resumed inside an epoch has them
            return

        # The checkpoint contains what rank 0 read. If the stream is split, the other ranks read
        # different samples and have nothing to compare.
        every_rank_reads_all = self.source.shard is None
        is_rank_0 = self._collectives.data_parallel.rank == 0
        differing_sample: int | None = None
        if every_rank_reads_all or is_rank_0:
            differing_sample = first_differing_sample(
                samples_in_checkpoint, self.first_samples_of_epoch
            )

        for sample in self._collectives.exchange(differing_sample):
            if sample is not None:
                raise other_beginning_error(self.source, epoch, sample)

    # One pass over the stream

    def _train(self, epoch: int, start: int) -> Iterator[Any]:
        """Starts a training pass at the global batch with position `start`."""
        self._first_samples = {}
        if start == 0:
            self._first_samples_in_checkpoint = None
        self._steps_before_pass = self._step.number - start
        on_device = self._read_pass(epoch, start, training=True)
        return self._run_pass(epoch, start, on_device, training=True)

    def _evaluate(self, epoch: int) -> Iterator[Any]:
        """Starts an evaluation pass, which always covers the whole stream."""
        on_device = self._read_pass(epoch, 0, training=False)
        return self._run_pass(epoch, 0, on_device, training=False)

    def _read_pass(
        self, epoch: int, start: int, *, training: bool
    ) -> Generator[ReadMicroBatch, None, None]:
        """Yields this rank's micro-batches of a pass, each with its batch on the device.

        Args:
            epoch: number of the epoch.
            start: position of the first global batch to read.
            training: True for a training pass, False for an evaluation.
        """
        try:
            if training:
                micro_batches = self._read_training_pass(epoch, start)
            else:
                # A collate function of the user's may have made other numbers of rows than there
                # are samples. Means over samples need the actual numbers.
                read = self._read_from(epoch, start, training=False)
                micro_batches = to_device(self._count_rows(epoch, read), self._collectives.device)
            yield from micro_batches
        finally:
            self._iterable.close()

    def _read_training_pass(self, epoch: int, start: int) -> Generator[ReadMicroBatch, None, None]:
        """Yields the micro-batches of a training pass, each with the factor of its loss."""
        # First the micro-batches on which autotuning measures; usually there are none.
        position_after_autotuning = yield from self._autotune(epoch, start)
        if position_after_autotuning is None:  # the stream has ended already
            return

        # The plan has computed the factors from the numbers of samples, unless the contents of
        # batches decide: by the user's function, or by the rows that a collate function has made.
        micro_batches = self._read_from(epoch, position_after_autotuning, training=True)
        weighing = self._weighing(epoch)
        if not weighing.is_planned:
            micro_batches = scale_by_weight(
                micro_batches,
                weighing,
                self._collectives,
                epoch,
                virtual_ranks=self._plan.virtual_ranks,
            )
        yield from to_device(micro_batches, self._collectives.device)

    def _autotune(self, epoch: int, start: int) -> Generator[ReadMicroBatch, None, int | None]:
        """Yields the micro-batches on which devices are measured, while an "auto" setting is open.

        These settings are shares="auto" and micro_batch_size="auto". Usually there are none.

        Returns:
            The position of the global batch with which the pass goes on; None if the pass has
            ended. (It is the value of `yield from self._autotune(...)`.)
        """
        position = start
        while self._plan.autotune_request.is_open:
            # The measurements decide which part of the global batch each rank gets, so every rank
            # reads all of its samples.
            samples = self._iterable.read_whole(epoch, position)
            is_short = len(samples) < self.batch_size
            if not samples or (is_short and self.source.drop_last):
                return None

            yield from self._read_for_autotuning(epoch, position, samples)
            position += 1
        return position

    def _read_for_autotuning(
        self, epoch: int, position: int, samples: list[Any]
    ) -> Iterator[ReadMicroBatch]:
        """Yields the micro-batches of a global batch on which autotuning measures the devices.

        Args:
            epoch: number of the epoch.
            position: position of the global batch in the epoch.
            samples: all samples of the global batch.
        """
        # A planned micro-batch only says which numbers its samples have in the stream. So the
        # samples are kept, and `_read_segments` gets them by calling `_read_planned` below.
        self._kept_samples = samples
        self._number_of_first_kept = position * self.batch_size
        sample_numbers = self._number_of_first_kept + np.arange(len(samples), dtype=np.int64)

        segments = self._plan.plan_autotuning(position, sample_numbers)
        yield from self._read_segments(epoch, segments)
        self._kept_samples = []  # the loop has processed the global batch

    def _read_planned(
        self, epoch: int, planned: Iterable[PlannedMicroBatch]
    ) -> Iterator[ReadMicroBatch]:
        """Yields planned micro-batches, each with its batch on the CPU.

        This replaces `Loader._read_planned`, which reads samples by their indices. Micro-batches of
        a stream are only planned for autotuning, and then their samples have already been read and
        kept (`_read_for_autotuning`).

        Args:
            epoch: number of the epoch.
            planned: this rank's micro-batches. Their `indices` are the numbers of the samples in
                the stream.
        """
        for item in planned:
            samples = []
            for number in item.indices.tolist():
                samples.append(self._kept_samples[number - self._number_of_first_kept])

            if samples:
                batch = self._iterable.collate(epoch, samples, item.indices)
            else:
                batch = self._make_one_sample_batch_for_autotuning(epoch)
            yield item, batch

    def _make_one_sample_batch_for_autotuning(self, epoch: int) -> Any:
        """Makes a batch of one sample, for a rank that has no part of a micro-batch.

        An empty batch has the structure of a real one, its template. The template is collated from
        the first sample of the global batch, although another rank processes that sample.
        """
        number_of_first_sample = np.array([self._number_of_first_kept])

        # The collate function may draw random numbers. This extra call must not change those that
        # the training draws.
        with preserve_rng_state():
            template = self._iterable.collate(epoch, self._kept_samples[:1], number_of_first_sample)

        self._keep_as_template(template, num_samples=1)
        return self._make_one_sample_batch(epoch)

    def _read_from(self, epoch: int, start: int, training: bool) -> Iterator[ReadMicroBatch]:
        """Yields this rank's micro-batches from a global batch to the end of the stream.

        Args:
            epoch: number of the epoch.
            start: position of the first global batch to read.
            training: True for a training pass, False for an evaluation.
        """
        micro_batches = self._read_divided(epoch, start, training)
        no_rank_skips = training or self._evaluates_together
        if no_rank_skips:
            return micro_batches
        return self._skip_without_samples(micro_batches)

    def _read_divided(self, epoch: int, start: int, training: bool) -> Iterator[ReadMicroBatch]:
        """Yields this rank's micro-batches, including those in which it has no samples.

        Args:
            epoch: number of the epoch.
            start: position of the first global batch to read.
            training: True for a training pass, False for an evaluation.
        """
        for rank_batch in self._read_counted(epoch, start, training):
            micro_batches = self._divide(epoch, rank_batch)
            if not training:
                yield from micro_batches
                continue

            global_samples = int(rank_batch.num_samples_of_ranks.sum())
            self._plan.check_every_copy_has_samples(smallest=global_samples)

            # With `check_devices`, the states of the devices are compared after some of the steps.
            # Micro-batches of these steps are marked.
            steps_before = self._steps_before_pass + rank_batch.position
            step_is_checked = self._plan.checks_devices_after(steps_before)
            for planned, batch in micro_batches:
                yield (_marked_as_checked(planned) if step_is_checked else planned), batch

    def _skip_without_samples(
        self, micro_batches: Iterator[ReadMicroBatch]
    ) -> Iterator[ReadMicroBatch]:
        """Yields the micro-batches of an evaluation in which this rank has samples.

        A collective in the user's loop would wait forever for a rank that skips the micro-batch. So
        as long as the loop processes a batch that another rank may skip, collectives are refused.

        Args:
            micro_batches: this rank's micro-batches of the pass.
        """
        # A rank knows how many samples the others have only if every rank reads the whole stream.
        knows_counts_of_all = self.source.shard is None

        for planned, batch in micro_batches:
            this_rank_skips = planned.micro_batch.local_rows == 0
            if this_rank_skips:
                continue

            no_rank_skips = knows_counts_of_all and planned.all_ranks_have_samples
            if no_rank_skips:
                yield planned, batch
                continue

            with self._collectives.blocked_because(SOME_RANKS_SKIP):
                yield planned, batch

    def _divide(self, epoch: int, rank_batch: RankBatch) -> Iterator[ReadMicroBatch]:
        """Divides this rank's part of a global batch into micro-batches and yields them.

        Args:
            epoch: number of the epoch.
            rank_batch: the batches that this rank has read of the global batch. Its
                `num_samples_of_ranks` says how many samples of it each rank has.
        """
        sizes = _micro_batch_sizes(rank_batch)  # shape (micro-batches, ranks)

        # A micro-batch in which no rank has samples is left out on all ranks.
        num_samples_on_all_ranks = sizes.sum(axis=1)  # shape (micro-batches,)
        numbers_of_filled = np.flatnonzero(num_samples_on_all_ranks)
        global_samples = int(rank_batch.num_samples_of_ranks.sum())
        micro_batches = self._plan.make_micro_batches(sizes[numbers_of_filled], global_samples)

        # Under DiLoCo, a rank may train fewer copies than others, and then it lacks the last
        # micro-batches. For example, 3 copies on 2 ranks have the sizes [[2, 2], [2, 0]]: rank 0
        # has the micro-batches 0 and 1, and rank 1 has micro-batch 0 only.
        numbers_of_this_rank = numbers_of_filled[: len(micro_batches)]
        for number, micro_batch in zip(numbers_of_this_rank, micro_batches, strict=True):
            planned = PlannedMicroBatch(
                position=rank_batch.position,
                micro_batch=micro_batch,
                indices=rank_batch.indices[number],
                all_ranks_have_samples=bool((sizes[number] > 0).all()),
            )
            if micro_batch.local_rows:
                batch = rank_batch.batches[number]
                self._keep_as_template(batch, micro_batch.local_rows)
            else:
                batch = self._make_one_sample_batch_for(rank_batch, epoch)
            yield planned, batch

    def _make_one_sample_batch_for(self, rank_batch: RankBatch, epoch: int) -> Any:
        """Makes a batch of one sample for a micro-batch of which this rank has no part.

        Args:
            rank_batch: the part of the global batch that this rank has read. If it has a batch of
                one sample, this becomes the template of empty batches, unless one is kept already.
            epoch: number of the epoch.
        """
        if rank_batch.one_sample_batch is not None:
            self._keep_as_template(rank_batch.one_sample_batch, num_samples=1)
        return self._make_one_sample_batch(epoch)

    def _read_counted(self, epoch: int, start: int, training: bool) -> Iterator[RankBatch]:
        """Yields this rank's part of each global batch until the stream ends on all ranks.

        Each part comes with the sample counts of all ranks. On the way, the ranks check that they
        read the same stream.

        Args:
            epoch: number of the epoch.
            start: position of the first global batch to read.
            training: True for a training pass, False for an evaluation.
        """
        source = self.source
        is_single = self._collectives.single_process

        # How many samples do the other ranks have? A rank that evaluates on its own need not know.
        # A rank that reads the whole stream can count them. Otherwise the ranks exchange counts.
        needs_counts = training or self._evaluates_together or source.drop_last
        exchanges_counts = needs_counts and source.shard is not None and not is_single

        compares_samples = training and not is_single
        num_samples_read = start * self.batch_size  # over all ranks, since the epoch began

        # Counts of a global batch are exchanged while the next one is read. This queue holds the
        # global batches whose exchange has started; it has at most two entries.
        in_flight: deque[tuple[RankBatch, dist.Work | None]] = deque()

        with closing(self._read_global_batches(epoch, start)) as read:
            for rank_batch in read:
                if training:
                    self._keep_first_samples(rank_batch.digests)
                    if rank_batch.position == start:
                        self._check_beginning(epoch)

                # If counts are exchanged, a rank whose stream has ended still takes part, with a
                # count of 0, until the streams of all ranks have ended.
                if rank_batch.ended and not exchanges_counts:
                    break

                if compares_samples and is_compared(rank_batch.position, start, self.batch_size):
                    self._compare_first_samples(epoch, rank_batch)

                work = None
                if exchanges_counts:
                    work, rank_batch.num_samples_of_ranks = self._start_count_exchange(rank_batch)
                in_flight.append((rank_batch, work))
                if exchanges_counts and len(in_flight) < 2:
                    continue  # the counts arrive while the next global batch is read
                counted_batch, work = in_flight.popleft()
                if work is not None:
                    work.wait()

                count = int(counted_batch.num_samples_of_ranks.sum())
                num_samples_read += count
                is_short = count < self.batch_size
                if count == 0 or (is_short and source.drop_last):
                    break
                yield counted_batch

                # A short global batch is the last one, unless the stream splits itself: then one
                # rank may run out of samples earlier than others.
                if is_short and source.shard is not False:
                    break

            # Every rank has started these exchanges, so every rank must also finish them.
            for _, work in in_flight:
                if work is not None:
                    work.wait()

            # Each loader worker reports at its end how many samples it read. This loop reads the
            # reports of the workers that have not ended yet.
            num_other_workers = max(0, source.options["num_workers"] - 1)
            for _ in itertools.islice(read, num_other_workers):
                pass

        self._check_stream_is_not_used_up(epoch, num_samples_read)
        if compares_samples and source.shard is None:
            check_length(self._collectives, epoch, num_samples_read)

    def _compare_first_samples(self, epoch: int, rank_batch: RankBatch) -> None:
        """Compares the first samples of a global batch over the ranks. A collective.

        Raises:
            RanksDifferError: the ranks have read the wrong samples.
        """
        number_of_first_sample = rank_batch.position * self.batch_size
        digests = rank_batch.digests.get(rank_batch.position, [])
        check_global_batch(self._collectives, self.source, epoch, number_of_first_sample, digests)

    def _check_stream_is_not_used_up(self, epoch: int, num_samples: int) -> None:
        """Raises DataError if a pass had no samples although an earlier pass had some.

        That happens if the dataset returns the same iterator for every pass.

        Args:
            epoch: number of the epoch.
            num_samples: number of samples in the pass that has ended.
        """
        if num_samples:
            self._had_samples = True
        elif self._had_samples:
            raise DataError(
                f"another pass (epoch {epoch}) over the stream {type(self.dataset).__name__}",
                "it gave samples in an earlier pass and none in this one, as an iterator does that "
                "can be read once",
                "let its __iter__ begin with the first sample each time",
            )

    def _start_count_exchange(self, rank_batch: RankBatch) -> tuple[dist.Work, Indices]:
        """Starts an all-gather of the number of samples that each rank has of a global batch.

        Args:
            rank_batch: the part of the global batch that this rank has read.

        Returns:
            The handle of the all-gather, and the numbers, shape `(ranks,)`. They are there once the
            all-gather has completed.
        """
        rank = self._collectives.data_parallel.rank
        world_size = self._collectives.topology.size
        count = torch.tensor([int(rank_batch.num_samples_of_ranks[rank])])

        # The all-gather fills the rows of this tensor, one for each rank.
        counts_of_all = torch.empty(world_size, 1, dtype=count.dtype)
        rows = list(counts_of_all)
        work: dist.Work = dist.all_gather(rows, count, async_op=True)

        # In a pipeline all stages read the same data, so only the processes of the first stage are
        # counted; these have the lowest numbers. The array is a view of the tensor, so the
        # all-gather fills it, too.
        num_data_parallel_ranks = len(rank_batch.num_samples_of_ranks)
        counts_of_ranks = counts_of_all.view(-1).numpy()[:num_data_parallel_ranks]
        return work, counts_of_ranks

    def _read_global_batches(self, epoch: int, start: int) -> Generator[RankBatch, None, None]:
        """Yields this rank's part of each global batch from position `start` on, without end.

        After the end of the stream it yields global batches without samples, until the caller
        closes the generator.

        Raises:
            DataError: loader workers of this rank read different samples.
        """
        # Without loader workers, this process goes on with its own iterator, from which it may
        # already have read global batches for autotuning. Each worker has an iterator of its own,
        # and reads the stream from the beginning.
        has_workers = self.source.options["num_workers"] > 0
        stream = self._iterable.fresh() if has_workers else self._iterable

        # The workers, or without them this process, get a request for each global batch and return
        # their parts in the same order.
        requests = self._requests(epoch, start)
        comparison = WorkerComparison(self.source, self._collectives.topology, epoch)
        with closing(self._workers.read(stream, requests)) as read:
            for rank_batch in read:
                comparison.check(
                    rank_batch.worker, rank_batch.digests, rank_batch.num_samples_in_all
                )
                yield rank_batch

    def _requests(self, epoch: int, start: int) -> Iterator[GlobalBatchRequest]:
        """Yields requests for the global batches from position `start` on, without end.

        A request tells the process that reads the stream which samples to read.
        """
        plan = self._plan
        num_micro_batches = plan.micro_batches_of(self.batch_size)
        # If a run was resumed in the middle of an epoch, the first request of the pass asks for the
        # epoch's first samples as well, so that they can be compared with those of the checkpoint.
        checks_beginning = self._first_samples_in_checkpoint is not None

        for position in itertools.count(start):
            yield GlobalBatchRequest(
                epoch=epoch,
                position=position,
                shares=plan.shares,
                num_micro_batches=num_micro_batches,
                virtual_ranks=plan.virtual_ranks,
                pass_begin=start,
                read_beginning=checks_beginning and position == start,
            )

    def _read_first(self, epoch: int, count: int) -> Any:
        """Returns a CPU batch of the first `count` samples that this rank can read.

        Raises:
            DataError: the stream has no samples for this rank.
        """
        # Reading may draw random numbers. It must not change those that the training draws.
        with preserve_rng_state():
            batch = self._iterable.read_first(epoch, count)

        if batch is None:
            raise DataError(
                f"the stream {type(self.dataset).__name__}",
                "it has no samples for this rank, so not even an empty batch can be made",
                "check what it reads, or use fewer processes",
            )
        return batch


def _marked_as_checked(planned: PlannedMicroBatch) -> PlannedMicroBatch:
    """Returns a micro-batch after whose step the states of the devices are compared."""
    micro_batch = replace(planned.micro_batch, checks_devices=True)
    return planned._replace(micro_batch=micro_batch)


def _micro_batch_sizes(rank_batch: RankBatch) -> np.ndarray:
    """Returns how many samples each rank has in each micro-batch, shape `(micro-batches, ranks)`.

    A rank that has fewer samples than planned fills its micro-batches in order. With 4 planned
    samples in each of 3 micro-batches and 6 samples left, its sizes are 4, 2 and 0.
    """
    planned_sizes = rank_batch.planned_sizes
    planned_in_earlier_micro_batches = np.cumsum(planned_sizes, axis=0) - planned_sizes
    samples_left = rank_batch.num_samples_of_ranks - planned_in_earlier_micro_batches
    return np.clip(samples_left, 0, planned_sizes)
