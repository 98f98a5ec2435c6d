"""The loader of an iterable (a *stream*): this rank's part of every global batch.

A *global batch* holds the samples of one optimizer step, over all ranks; its *position* is its
number in the epoch. How many there are is not known before the end of the stream. Each rank
computes its part in one or more *micro-batches*. *Digests* are short values made of samples, by
which these are compared.

If every rank reads the whole stream, each knows what the others have. Nothing is exchanged except,
now and then, a few bytes that show whether they read the same (`consistency`). If the stream is
split over the ranks, they tell each other how many samples they have of every global batch: 8 bytes
each, one global batch ahead, so no step waits for it.
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
from lockstep.batch.loader import SOME_RANKS_SKIP, Loader
from lockstep.batch.micro_batches import PlannedMicroBatch, ReadMicroBatch
from lockstep.batch.source import IterableSource
from lockstep.batch.stream_consistency import (
    WorkerComparison,
    check_global_batch,
    check_length,
    other_beginning_error,
)
from lockstep.batch.stream_fetch import GlobalBatchKey, IterableFetch, RankBatch, is_compared
from lockstep.batch.weighing import scale_by_weight
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.errors import CheckpointError, DataError, SettingError


class IterableLoader(Loader):
    """Iterates this rank's micro-batches of an iterable; see `Loader`.

    Args:
        source: the iterable.
        **options: of `Loader`.

    Raises:
        SettingError: shares or micro-batches that an iterable which is split cannot have.
    """

    source: IterableSource

    def __init__(self, source: IterableSource, **options: Any) -> None:
        super().__init__(source, **options)
        sample_rng = options.get("sample_rng", True)
        self._iterable = IterableFetch(
            source, self.seed, sample_rng, self._collectives.data_parallel
        )
        self._whole_batch: list[Any] = []
        """All samples of the global batch in which something is measured."""
        self._first_number = 0
        """The number of the first of these samples."""
        self._gave_samples = False
        """True if some pass over the stream had samples."""
        self._steps_before_pass = 0
        """Optimizer steps of the run before the first global batch of the epoch."""
        self._first_samples: dict[int, list[Any]] = {}
        """Digests of the first samples of the current epoch, by the position of a global batch."""
        self._first_samples_before: list[Any] | None = None
        """The digests in the checkpoint from which this epoch was resumed in its middle."""
        self._check_options()

    def _check_options(self) -> None:
        """Raises SettingError for options that an iterable which is split cannot have."""
        if self.source.shard is not None and self._plan.request.is_open:
            raise SettingError(
                "shares='auto' or micro_batch_size='auto' for a stream with shard=",
                "they are measured on a global batch that every rank has read as a whole",
                "give numbers, or leave shard out",
            )
        if self.source.shard is not None and self._plan.virtual_ranks is not None:
            train_copies = self._plan.virtual_ranks.train_copies
            setting = "strategy='diloco'" if train_copies else "virtual_ranks"
            part_of = "replica" if train_copies else "virtual rank"
            raise SettingError(
                f"{setting} for a stream with shard=",
                f"each {part_of} has a part of every global batch, whoever computes it, so every "
                "rank reads the whole stream",
                "leave shard out",
            )
        if callable(self.source.shard) and len(set(self.shares)) > 1:
            raise SettingError(
                f"shares {':'.join(map(str, self.shares))} for a stream with shard=",
                "a rank reads every n-th sample of it, so all parts are equal",
                "leave shares out for this loader (shares=(1, 1, ...)), or leave shard out",
            )

    # The position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up the position; the next pass begins there.

        Raises:
            CheckpointError: the stream or the global batch are not those of the checkpoint.
        """
        if "ranks" not in state:  # only the loader of a stream writes it
            raise CheckpointError(
                "resuming a loader of a stream",
                "the checkpoint was made with a loader of a dataset with an index",
                "continue with the data of the checkpoint, or leave the loader out",
            )
        super().load_state_dict(state)
        self._first_samples = {}
        self._first_samples_before = None
        if "beginning" in state and self.start > 0:  # in the middle of an epoch
            self._first_samples_before = json.loads(state["beginning"])

    def state_dict(self) -> dict[str, Any]:
        """Returns the position. In the middle of an epoch it says what the stream began with."""
        state = super().state_dict()
        first_samples = self.first_samples_of_epoch
        if self.mid_epoch and first_samples:
            state["beginning"] = json.dumps(first_samples)
        return state

    def _identity(self) -> dict[str, int]:
        """Returns what must be equal in a checkpoint and in the run that resumes it."""
        ranks = 0  # any number
        if self.source.shard is False:  # the samples of a rank depend on the number of ranks
            ranks = self._collectives.data_parallel.size
        return {"batch_size": self.batch_size, "seed": self.seed, "ranks": ranks}

    @property
    def first_samples_of_epoch(self) -> list[Any]:
        """Digests of the first samples that the stream gave in the current epoch.

        A checkpoint holds those of rank 0, and a resumed run compares them with its own. In a run
        that was resumed and has not read anything yet, they are those of the checkpoint.
        """
        # Digests of the global batches 0, 1, 2, ..., up to the first that was not read.
        digests_read: list[Any] = []
        for position in itertools.count():
            digests = self._first_samples.get(position)
            if digests is None:
                break
            digests_read += digests
        if not digests_read and self._first_samples_before is not None:
            return self._first_samples_before
        # If the ranks seek their samples, rank 0 of n ranks has the samples 0, n, 2 n, ...: only
        # the first is the same on any number of ranks.
        ranks_seek_samples = callable(self.source.shard)
        num_compared = 1 if ranks_seek_samples else SAMPLES_COMPARED
        return digests_read[:num_compared]

    def _keep_first_samples(self, digests_by_position: Mapping[int, list[Any]]) -> None:
        """Keeps digests of the samples with which the stream began in this epoch.

        Args:
            digests_by_position: digests of the samples of some global batches, by their positions
                in the epoch. Those of later samples are ignored.
        """
        for position, digests in digests_by_position.items():
            first_number = position * self.batch_size  # of the samples of this global batch
            if first_number < SAMPLES_COMPARED:
                self._first_samples[position] = digests

    def _check_beginning(self, epoch: int) -> None:
        """Compares what the stream began with before and after a run was resumed. A collective.

        Raises:
            CheckpointError: these are not the same samples; raised on all ranks.
        """
        before = self._first_samples_before
        if before is None:  # the pass was not resumed, or the checkpoint has no such samples
            return
        differing_sample: int | None = None
        # The checkpoint holds what rank 0 read. If every rank reads the whole stream, each compares
        # that with its own; if the stream is split, only rank 0 can.
        if self.source.shard is None or self._collectives.data_parallel.rank == 0:
            differing_sample = first_differing_sample(before, self.first_samples_of_epoch)
        for sample in self._collectives.exchange(differing_sample):
            if sample is not None:
                raise other_beginning_error(self.source, epoch, sample)

    # A pass

    def _train(self, epoch: int, start: int) -> Iterator[Any]:
        self._first_samples = {}
        if start == 0:
            self._first_samples_before = None
        self._steps_before_pass = self._step.number - start
        on_device = self._read_pass(epoch, start, training=True)
        return self._run_pass(epoch, start, on_device, training=True)

    def _evaluate(self, epoch: int) -> Iterator[Any]:
        on_device = self._read_pass(epoch, 0, training=False)
        return self._run_pass(epoch, 0, on_device, training=False)

    def _read_pass(
        self, epoch: int, start: int, *, training: bool
    ) -> Generator[ReadMicroBatch, None, None]:
        """Yields the micro-batches of a pass, each with its batch on the device.

        Args:
            epoch: of the pass.
            start: the position of its first global batch.
            training: True for a pass with gradients.
        """
        position = start
        try:
            # While shares or the micro-batch size are to be measured, every rank reads the whole
            # global batch, since it is not known yet which part will be its own.
            while training and self._plan.request.is_open:
                stream_has_ended = yield from self._read_measured(epoch, position)
                if stream_has_ended:
                    return
                position += 1
            read = self._read_rest(epoch, position, training)
            # In training each micro-batch has a scale for its loss. It is planned by the numbers of
            # samples, or follows from what the batches weigh.
            weighing = self._weighing(epoch)
            if not training:
                read = self._count_rows(epoch, read)
            elif not weighing.is_planned:
                read = scale_by_weight(
                    read,
                    weighing,
                    self._collectives,
                    epoch,
                    virtual_ranks=self._plan.virtual_ranks,
                )
            yield from to_device(read, self._collectives.device)
        finally:
            self._iterable.close()

    def _read_measured(self, epoch: int, position: int) -> Generator[ReadMicroBatch, None, bool]:
        """Yields the micro-batches of a global batch in which something is measured.

        Every rank reads all samples of it. They are kept in `_whole_batch`, from which
        `_read_planned` takes those of this rank.

        Returns:
            True if the stream has no such global batch, and the pass ends.
        """
        self._whole_batch = self._iterable.read_whole(epoch, position)
        count = len(self._whole_batch)
        is_short = count < self.batch_size
        if count == 0 or (is_short and self.source.drop_last):
            return True
        self._first_number = position * self.batch_size
        numbers = self._first_number + np.arange(count, dtype=np.int64)
        segments = self._plan.plan_autotuning(position, numbers)
        yield from self._read_segments(epoch, segments)
        self._whole_batch = []
        return False

    def _read_planned(
        self, epoch: int, planned: Iterable[PlannedMicroBatch]
    ) -> Iterator[ReadMicroBatch]:
        """Yields micro-batches of the global batch in `_whole_batch`, which is measured.

        Args:
            epoch: of the pass.
            planned: this rank's micro-batches; their `indices` are the numbers of their samples.
        """
        for item in planned:
            samples = []
            for number in item.indices.tolist():
                samples.append(self._whole_batch[number - self._first_number])
            if samples:
                yield item, self._iterable.collate(epoch, samples, item.indices)
                continue
            # This rank has no sample of the micro-batch. Its empty batch is made from the first
            # sample of the global batch, which another rank computes.
            with preserve_rng_state():
                first_number = np.array([self._first_number])
                batch = self._iterable.collate(epoch, self._whole_batch[:1], first_number)
                self._keep_one_sample(batch, 1)
            yield item, self._make_empty_batch(epoch)

    def _read_rest(self, epoch: int, start: int, training: bool) -> Iterator[ReadMicroBatch]:
        """Yields the micro-batches of a pass from a global batch on, each with its batch.

        In an evaluation a rank skips micro-batches of which it has no samples. Collectives are
        refused while a batch is handed out that some rank may skip.

        Args:
            epoch: of the pass.
            start: the position of the first global batch.
            training: True for a pass with gradients.
        """
        every_rank_gets_all = training or self._evaluates_together
        blocked_before = self._collectives.blocked_reason
        for rank_batch in self._read_counted(epoch, start, training):
            if training:
                self._plan.check_trained(int(rank_batch.counts.sum()))
            steps_before = self._steps_before_pass + rank_batch.position
            is_checked = self._plan.check_number(steps_before) is not None
            for planned, batch in self._divide(epoch, rank_batch):
                if training and is_checked:
                    # The state of the devices is compared; nothing is computed again.
                    micro_batch = replace(planned.micro_batch, checks_devices=True)
                    planned = planned._replace(micro_batch=micro_batch)
                if every_rank_gets_all:
                    yield planned, batch
                    continue
                if not planned.micro_batch.local_rows:  # this rank has no sample of it
                    continue
                # The counts of the other ranks are known only if every rank reads the whole stream.
                if self.source.shard is None and planned.on_all_ranks:
                    self._collectives.blocked_reason = blocked_before
                else:
                    self._collectives.blocked_reason = SOME_RANKS_SKIP
                yield planned, batch

    def _divide(self, epoch: int, rank_batch: RankBatch) -> Iterator[ReadMicroBatch]:
        """Yields this rank's micro-batches of a global batch, each with its batch.

        Args:
            epoch: of the pass.
            rank_batch: what this rank has read of the global batch, and how many samples each rank
                has of it (`counts`).
        """
        # At the end of the stream a rank may have fewer samples than are planned. Then its last
        # micro-batches are short or empty. These arrays have the shape (micro-batches, ranks).
        planned_sizes = rank_batch.planned_sizes
        # What is planned for a rank in all micro-batches before this one.
        planned_before = np.cumsum(planned_sizes, axis=0) - planned_sizes
        remaining = rank_batch.counts - planned_before
        sizes = np.clip(remaining, 0, planned_sizes)
        # The indices of the micro-batches of which some rank has samples.
        with_samples = np.flatnonzero(sizes.sum(axis=1))
        micro_batches = self._plan.make_micro_batches(
            sizes[with_samples], int(rank_batch.counts.sum())
        )
        # If another rank has one more virtual rank, it has more micro-batches than this one, and
        # `with_samples` has an index for each of them.
        for index, micro_batch in zip(with_samples, micro_batches, strict=False):
            batch = rank_batch.batches[index]
            # One sample of some batch is kept, from which batches without samples are made.
            if micro_batch.local_rows:
                self._keep_one_sample(batch, micro_batch.local_rows)
            else:
                if rank_batch.one_sample_batch is not None:
                    self._keep_one_sample(rank_batch.one_sample_batch, 1)
                batch = self._make_empty_batch(epoch)
            numbers = rank_batch.indices[index]
            on_all_ranks = bool(sizes[index].all())
            yield PlannedMicroBatch(rank_batch.position, micro_batch, numbers, on_all_ranks), batch

    def _read_counted(self, epoch: int, start: int, training: bool) -> Iterator[RankBatch]:
        """Yields what this rank has of each global batch, with the counts of all ranks.

        It ends with the stream. The ranks compare what they read on the way.

        Args:
            epoch: of the pass.
            start: the position of the first global batch.
            training: True for a pass with gradients.
        """
        source = self.source
        alone = self._collectives.single_process
        # How many samples the other ranks have. A rank that evaluates by itself need not know it. A
        # rank that reads the whole stream knows it; otherwise it asks.
        needs_counts = training or self._evaluates_together or source.drop_last
        asks_for_counts = needs_counts and source.shard is not None and not alone
        compares = training and not alone
        num_samples = start * self.batch_size  # of the stream, up to the latest global batch
        asked: deque[tuple[RankBatch, dist.Work | None]] = deque()
        """Global batches that were read, and for whose counts the other ranks were asked."""
        with closing(self._read_global_batches(epoch, start)) as read:
            for rank_batch in read:
                if training:
                    self._keep_first_samples(rank_batch.digests)
                    if rank_batch.position == start:
                        self._check_beginning(epoch)
                # A rank that asks goes on until all ranks have come to the end: they wait for its
                # count, which is 0.
                if rank_batch.ended and not asks_for_counts:
                    break
                if compares and is_compared(rank_batch.position, start, self.batch_size):
                    first = rank_batch.position * self.batch_size
                    digests = rank_batch.digests.get(rank_batch.position, [])
                    check_global_batch(self._collectives, source, epoch, first, digests)
                work = self._ask_for_counts(rank_batch) if asks_for_counts else None
                asked.append((rank_batch, work))
                if asks_for_counts and len(asked) < 2:
                    continue  # the answer arrives while the next global batch is read
                rank_batch, work = asked.popleft()
                if work is not None:
                    work.wait()
                count = int(rank_batch.counts.sum())
                num_samples += count
                is_short = count < self.batch_size
                if count == 0 or (is_short and source.drop_last):
                    break
                yield rank_batch
                # A stream that splits itself may give a rank its last samples early.
                if is_short and source.shard is not False:
                    break
            for _, work in asked:  # every rank has asked, so every rank waits
                if work is not None:
                    work.wait()
            # The other workers come to the end as well; each then says how many samples it gave.
            num_other_workers = max(0, source.options["num_workers"] - 1)
            for _ in itertools.islice(read, num_other_workers):
                pass
        self._check_gives_samples_again(epoch, num_samples)
        if compares and source.shard is None:
            check_length(self._collectives, epoch, num_samples)

    def _check_gives_samples_again(self, epoch: int, num_samples: int) -> None:
        """Raises DataError if a pass had no samples although an earlier one had some.

        Keeps for later passes whether this one had samples.
        """
        if num_samples:
            self._gave_samples = True
        elif self._gave_samples:
            raise DataError(
                f"another pass (epoch {epoch}) over the stream {type(self.dataset).__name__}",
                "it gave samples in an earlier pass and none in this one, as an iterator does that "
                "can be read once",
                "let its __iter__ begin with the first sample each time",
            )

    def _ask_for_counts(self, rank_batch: RankBatch) -> dist.Work:
        """Starts to gather how many samples each rank has of a global batch.

        Args:
            rank_batch: what this rank has read. Its `counts` are replaced.

        Returns:
            The all-gather. When it is done, `rank_batch.counts` has the numbers of all ranks, shape
            `(ranks,)`.
        """
        rank = self._collectives.data_parallel.rank
        size = self._collectives.topology.size
        count = torch.tensor([int(rank_batch.counts[rank])])
        counts_of_all = torch.empty(size, 1, dtype=count.dtype)
        # The new `counts` are a view of the memory that the numbers are gathered into. In a
        # pipeline all stages read the same data. The ranks of the first stage have the lowest
        # numbers, and only their samples count.
        rank_batch.counts = counts_of_all.view(-1).numpy()[: len(rank_batch.counts)]
        work: dist.Work = dist.all_gather(list(counts_of_all), count, async_op=True)
        return work

    def _read_global_batches(self, epoch: int, start: int) -> Generator[RankBatch, None, None]:
        """Yields what this rank has of each global batch from position `start` on.

        It does not end with the stream: after that come global batches without samples, until the
        caller closes the generator. Raises DataError if loader workers read different samples.
        """
        # Each worker process begins a pass of its own. If this process reads, it continues the pass
        # in which it may already have read global batches that were measured.
        has_workers = self.source.options["num_workers"] > 0
        fetch = self._iterable.fresh() if has_workers else self._iterable
        comparison = WorkerComparison(self.source, self._collectives.topology, epoch)
        with closing(self._workers.read(fetch, self._keys(epoch, start))) as read:
            for rank_batch in read:
                comparison.check(
                    rank_batch.worker, rank_batch.digests, rank_batch.num_samples_in_all
                )
                yield rank_batch

    def _keys(self, epoch: int, start: int) -> Iterator[GlobalBatchKey]:
        """Yields the keys of the global batches from position `start` on, without end."""
        plan = self._plan
        num_micro_batches = plan.num_pieces(self.batch_size)  # see `GlobalBatchKey`
        # After a run was resumed, the beginning of the epoch is read once for a comparison.
        checks_beginning = self._first_samples_before is not None
        for position in itertools.count(start):
            yield GlobalBatchKey(
                epoch,
                position,
                plan.shares,
                num_micro_batches,
                plan.virtual_ranks,
                pass_begin=start,
                read_beginning=checks_beginning and position == start,
            )

    def _read_first(self, epoch: int, count: int) -> Any:
        """Returns a batch of the first `count` samples that this rank can read, on the CPU."""
        with preserve_rng_state():
            batch = self._iterable.read_first(epoch, count)
        if batch is None:
            raise DataError(
                f"the stream {type(self.dataset).__name__}",
                "it has no samples for this rank, so not even an empty batch can be made",
                "check what it reads, or use fewer processes",
            )
        return batch
