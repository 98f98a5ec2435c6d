"""The loader of an iterable: this rank's part of every global batch, while the end is not known.

Where every rank reads the whole iterable, each knows what the others have, and nothing is exchanged
but, now and then, a few bytes that tell whether they read the same (`consistency`). Where it is
split, the ranks tell each other how many samples they have of every global batch (8 bytes each, one
global batch ahead, so no step waits for it).
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep.batch.consistency import (
    SAMPLES_COMPARED,
    WorkerComparison,
    check_global_batch,
    check_length,
    other_beginning,
)
from lockstep.batch.fetch import GlobalBatchKey, IterableFetch, RankBatch, is_compared, to_device
from lockstep.batch.fingerprint import differing_sample
from lockstep.batch.loader import SOME_SKIP, Loader
from lockstep.batch.micro_batches import PlannedMicroBatch, WithBatch, micro_batches, weighted
from lockstep.batch.source import IterableSource, Source
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
        self._iterable = IterableFetch(
            source, self.seed, options.get("sample_rng", True), self._collectives.data_parallel
        )
        self._raw: list[Any] = []
        """All samples of the global batch in which something is measured."""
        self._raw_begins = 0
        self._gave_samples = False
        """Whether a pass over the stream had any."""
        self._first_samples: dict[int, list[Any]] = {}
        """Digests of the first samples of the epoch that is trained on, by global batch."""
        self._first_samples_before: list[Any] | None = None
        """Those of the checkpoint that was resumed in the middle of this epoch."""
        if source.shard is not None and self._plan.request.undecided:
            raise SettingError(
                "shares='auto' or micro_batch_size='auto' for a stream with shard=",
                "they are measured on a global batch that every rank has read as a whole",
                "give numbers, or leave shard out",
            )
        if source.shard is not None and self._plan.num_virtual_ranks is not None:
            raise SettingError(
                "strategy='diloco' for a stream with shard=",
                "each replica has a part of every global batch, whoever computes it, so every rank "
                "reads the whole stream",
                "leave shard out",
            )
        if callable(source.shard) and len(set(self.shares)) > 1:
            raise SettingError(
                f"shares {':'.join(map(str, self.shares))} for a stream with shard=",
                "a rank reads every n-th sample of it, so all parts are equal",
                "leave shares out for this loader (shares=(1, 1, ...)), or leave shard out",
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up the position; the next pass begins there.

        Raises:
            CheckpointError: the stream or the global batch are not those of the checkpoint.
        """
        if "ranks" not in state:
            raise CheckpointError(
                "resuming a loader of a stream",
                "the checkpoint was made with a loader of a dataset with an index",
                "continue with the data of the checkpoint, or leave the loader out",
            )
        super().load_state_dict(state)
        self._first_samples = {}
        self._first_samples_before = None
        if "beginning" in state and self.start > 0:
            self._first_samples_before = json.loads(state["beginning"])

    def state_dict(self) -> dict[str, Any]:
        """The position; inside of an epoch also what the stream began with (see `Loader`)."""
        state = super().state_dict()
        first_samples = self.first_samples_of_epoch
        if self.mid_epoch and first_samples:
            state["beginning"] = json.dumps(first_samples)
        return state

    @property
    def first_samples_of_epoch(self) -> list[Any]:
        """Digests of the first samples that the stream gave in the epoch that is trained on.

        Of a stream that is split over the ranks, rank 0 has those that a checkpoint holds. If the
        ranks seek their samples, only its first one does not depend on the number of ranks.
        """
        found: list[Any] = []
        for position in itertools.count():
            digests = self._first_samples.get(position)
            if digests is None:
                break
            found += digests
        if not found and self._first_samples_before is not None:
            return self._first_samples_before
        return found[:1] if callable(self.source.shard) else found[:SAMPLES_COMPARED]

    def _identity(self) -> dict[str, int]:
        split = self.source.shard is False
        ranks = self._collectives.data_parallel.size if split else 0
        return {"batch_size": self.batch_size, "seed": self.seed, "ranks": ranks}

    def _keep_first_samples(self, digests: Mapping[int, list[Any]]) -> None:
        """Keeps what the stream began with in this epoch."""
        for position, found in digests.items():
            if position * self.batch_size < SAMPLES_COMPARED:
                self._first_samples[position] = found

    def _check_beginning(self, epoch: int) -> None:
        """Compares what the stream began with before and after a run was resumed. A collective.

        Raises:
            CheckpointError: on all ranks, where these are not the same samples.
        """
        before = self._first_samples_before
        if before is None:
            return
        differing: int | None = None
        # A checkpoint holds the samples of rank 0.
        if self.source.shard is None or self._collectives.data_parallel.rank == 0:
            differing = differing_sample(before, self.first_samples_of_epoch)
        found = [place for place in self._collectives.exchange(differing) if place is not None]
        if found:
            raise other_beginning(self.source, epoch, found[0])

    def _train(self, epoch: int, start: int) -> Iterator[Any]:
        self._first_samples = {}
        if start == 0:
            self._first_samples_before = None
        return self._run(epoch, start, self._pairs(epoch, start, training=True), training=True)

    def _evaluate(self, epoch: int) -> Iterator[Any]:
        return self._run(epoch, 0, self._pairs(epoch, 0, training=False), training=False)

    def _pairs(
        self, epoch: int, position: int, *, training: bool
    ) -> Generator[WithBatch, None, None]:
        """The micro-batches from a global batch on, each with its batch on the device."""
        try:
            while training and self._plan.request.undecided:
                self._raw = self._iterable.read_whole(epoch, position)
                count, size = len(self._raw), self.batch_size
                if not count or (count < size and self.source.drop_last):
                    return
                self._raw_begins = position * size
                batch = np.arange(self._raw_begins, self._raw_begins + count, dtype=np.int64)
                yield from self._of_segments(epoch, self._plan.autotuned(position, batch))
                self._raw = []
                position += 1
            rest = self._rest(epoch, position, training)
            weighing = self._weighing(epoch)
            if not training:
                rest = self._with_rows(epoch, rest)
            elif not weighing.is_planned:
                rest = weighted(
                    rest,
                    weighing,
                    self._collectives,
                    epoch,
                    num_virtual_ranks=self._plan.num_virtual_ranks,
                )
            yield from to_device(rest, self._collectives.device)
        finally:
            self._iterable.close()

    def _with_batches(self, epoch: int, wanted: Iterable[PlannedMicroBatch]) -> Iterator[WithBatch]:
        """Of a global batch that has been read already."""
        for planned in wanted:
            indices = planned.indices
            samples = [self._raw[i - self._raw_begins] for i in indices.tolist()]
            if samples:
                yield planned, self._iterable.collate(epoch, samples, indices)
                continue
            with preserve_rng_state():
                first = np.array([self._raw_begins])
                self._keep_example(self._iterable.collate(epoch, self._raw[:1], first), 1)
            yield planned, self._empty(epoch)

    def _rest(self, epoch: int, position: int, training: bool) -> Iterator[WithBatch]:
        everywhere = training or self._evaluates_together
        outer = self._collectives.blocked
        for own in self._counted(epoch, position, training):
            if training:
                self._plan.check_trained(int(own.counts.sum()))
            for planned, batch in self._micro_batches(epoch, own):
                if not everywhere:
                    if not planned.micro_batch.local_rows:
                        continue
                    known = self.source.shard is None and planned.on_all_ranks
                    self._collectives.blocked = outer if known else SOME_SKIP
                yield planned, batch

    def _micro_batches(self, epoch: int, own: RankBatch) -> Iterator[WithBatch]:
        """This rank's micro-batches of a global batch, each with its batch."""
        before = np.cumsum(own.sizes, axis=0) - own.sizes
        sizes = np.clip(own.counts - before, 0, own.sizes)
        some = np.flatnonzero(sizes.sum(axis=1))
        rank, count = self._collectives.data_parallel.rank, int(own.counts.sum())
        num_virtual_ranks = self._plan.num_virtual_ranks
        of_rank = micro_batches(sizes[some], rank, count, num_virtual_ranks=num_virtual_ranks)
        for j, micro in zip(some, of_rank, strict=False):  # see `MicroBatchPlan`
            batch = own.batches[j]
            if micro.local_rows:
                self._keep_example(batch, micro.local_rows)
            else:
                if own.example is not None:
                    self._keep_example(own.example, 1)
                batch = self._empty(epoch)
            on_all_ranks = bool(sizes[j].all())
            yield PlannedMicroBatch(own.position, micro, own.indices[j], on_all_ranks), batch

    def _counted(self, epoch: int, begin: int, training: bool) -> Iterator[RankBatch]:
        """What this rank has of the global batches, to the end, with the counts of all ranks."""
        source, alone = self.source, self._collectives.alone
        whole = source.shard is None
        asks = not (whole or alone) and (training or self._evaluates_together or source.drop_last)
        compares = training and not alone
        total = begin * self.batch_size
        ahead: deque[tuple[RankBatch, Any]] = deque()
        with closing(self._global_batches(epoch, begin)) as read:
            for own in read:
                if training:
                    self._keep_first_samples(own.digests)
                    if own.position == begin:
                        self._check_beginning(epoch)
                if own.ended and not asks:
                    break
                if compares and is_compared(own.position, begin, self.batch_size):
                    first = own.position * self.batch_size
                    mine = own.digests.get(own.position, [])
                    check_global_batch(self._collectives, source, epoch, first, mine)
                ahead.append((own, self._ask(own) if asks else None))
                if asks and len(ahead) < 2:
                    continue
                known, work = ahead.popleft()
                if work is not None:
                    work.wait()
                count = int(known.counts.sum())
                total += count
                if not count or (source.drop_last and count < self.batch_size):
                    break
                yield known
                if count < self.batch_size and source.shard is not False:
                    break
            for _, work in ahead:  # the others have asked too
                if work is not None:
                    work.wait()
            # The other workers have come to the end as well; each says how many samples it gave.
            other_workers = max(0, source.options["num_workers"] - 1)
            for _ in itertools.islice(read, other_workers):
                pass
        self._check_gives_samples_again(epoch, total)
        if compares and whole:
            check_length(self._collectives, epoch, total)

    def _check_gives_samples_again(self, epoch: int, total: int) -> None:
        """Raises DataError where a pass had no samples although one before it had some."""
        if total:
            self._gave_samples = True
        elif self._gave_samples:
            raise DataError(
                f"another pass (epoch {epoch}) over the stream {type(self.dataset).__name__}",
                "it gave samples in an earlier pass and none in this one, as an iterator does that "
                "can be read once",
                "let its __iter__ begin with the first sample each time",
            )

    def _ask(self, own: RankBatch) -> Any:
        """Begins to ask the other ranks for their counts, which are there when it is done."""
        rank, size = self._collectives.data_parallel.rank, self._collectives.topology.size
        mine = torch.tensor([int(own.counts[rank])])
        rows = torch.empty(size, 1, dtype=mine.dtype)
        own.counts = rows.view(-1).numpy()[: len(own.counts)]
        return dist.all_gather(list(rows), mine, async_op=True)

    def _global_batches(self, epoch: int, begin: int) -> Generator[RankBatch, None, None]:
        """What this rank has of the global batches, without end: after the last one, nothing.

        What several loader workers have read is compared.
        """
        plan = self._plan
        needed = plan.num_micro_batches // plan.max_virtual_ranks_of_process
        num_virtual_ranks = plan.num_virtual_ranks
        compares_beginning = self._first_samples_before is not None
        keys = (
            GlobalBatchKey(
                epoch,
                t,
                plan.shares,
                needed,
                num_virtual_ranks,
                begin,
                compares_beginning and t == begin,
            )
            for t in itertools.count(begin)
        )
        # Workers begin a pass of their own; here the one that is open goes on.
        several = self.source.options["num_workers"] > 0
        fetch = self._iterable.fresh() if several else self._iterable
        workers = WorkerComparison(self.source, self._collectives.topology, epoch)
        with closing(self._workers.read(fetch, keys)) as read:
            for own in read:
                workers.check(own.worker, own.digests, own.samples_in_all)
                yield own

    def _first(self, epoch: int, count: int) -> Any:
        with preserve_rng_state():
            batch = self._iterable.first(epoch, count)
        if batch is None:
            raise DataError(
                f"the stream {type(self.dataset).__name__}",
                "it has no samples for this rank, so not even an empty batch can be made",
                "check what it reads, or use fewer processes",
            )
        return batch


def make_loader(source: Source, **options: Any) -> Loader:
    """The loader of a source; `options` are those of `Loader`."""
    if isinstance(source, IterableSource):
        return IterableLoader(source, **options)
    return Loader(source, **options)
