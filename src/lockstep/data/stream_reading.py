"""Reads one rank's part of the global batches of a stream, in this process or in loader workers.

A worker is asked for a global batch by its number, and reads forward to it; so what it gives does
not depend on how many workers there are, or which of them is asked.

The random streams that the stream itself draws from are seeded once a pass from (seed, epoch),
alike on all ranks, and kept apart from those of the training. What `transform` draws comes from
(seed, epoch, sample): it does not depend on the rank or on where the pass was taken up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from lockstep.data.global_batch import Indices, split_batch
from lockstep.data.own_streams import OwnStreams
from lockstep.data.stream import StreamSource
from lockstep.data.stream_marks import marks
from lockstep.runtime.seeding import kept_random_state, seed_sample
from lockstep.topology import Part


class Key(NamedTuple):
    """Which global batch, and how it is divided."""

    epoch: int
    position: int
    shares: tuple[int, ...]
    micro_batches: int
    mark: bool
    """Whether the samples are to be compared between ranks."""


@dataclass
class Item:
    """A rank's part of a global batch."""

    brought: Indices
    """Samples of each rank that are known here: shape `(ranks,)`. Of a stream that every rank
    reads these are all, else they are right for this rank alone."""
    planned: Indices
    """The samples of each rank in each micro-batch, shape `(micro-batches, ranks)`."""
    indices: list[Indices] = field(default_factory=list)
    """Of this rank's samples, one array a micro-batch, shape `(n,)`."""
    batches: list[Any] = field(default_factory=list)
    """Collated; None where this rank has no sample of a micro-batch."""
    marks: list[Any] = field(default_factory=list)
    """What stands for some of the samples."""


class StreamFetch(Dataset[Any]):
    """The global batches of a stream by `Key`; None after the last one.

    Args:
        source: the stream.
        seed: of the run.
        sample_rng: False leaves all random streams alone.
        part: this rank's.
    """

    def __init__(self, source: StreamSource, seed: int, sample_rng: bool, part: Part) -> None:
        self._source = source
        self._seed = seed
        self._sample_rng = sample_rng
        self._part = part
        self._reading: _Reading | None = None
        self._draws = not (source.transform is None and source.collate is default_collate)

    def another(self) -> StreamFetch:
        """The same with nothing open, for a process of its own."""
        return StreamFetch(self._source, self._seed, self._sample_rng, self._part)

    def close(self) -> None:
        """Lets go of the open pass."""
        self._reading = None

    def __getitem__(self, key: Key) -> Item | None:
        item = self._planned(key)
        rank = self._part.index
        if self._source.shard is None:
            samples = self.raw(key.epoch, key.position)
            parts = split_batch(len(samples), key.shares, key.micro_batches)
            item.planned = parts[..., 1] - parts[..., 0]
            item.brought = item.planned.sum(axis=0)
            first = key.position * self._source.batch_size
            order = np.arange(first, first + len(samples), dtype=np.int64)
            own = parts[:, rank]
            wanted = 1
        else:
            wanted = int(item.brought[rank])
            samples, order = self._own(key, wanted)
            item.brought[rank] = len(samples)
            ends = np.minimum(np.cumsum([0, *item.planned[:, rank]]), len(samples))
            own = np.stack([ends[:-1], ends[1:]], axis=1)
        if not samples and (wanted or not key.shares[rank]):
            return None
        if key.mark:
            item.marks = marks(samples)
        for begin, end in own.tolist():
            some, indices = samples[begin:end], order[begin:end]
            item.indices.append(indices)
            item.batches.append(self.collated(key.epoch, some, indices) if some else None)
        return item

    def raw(self, epoch: int, position: int) -> list[Any]:
        """The samples of a whole global batch; fewer, or none, at the end of the stream."""
        size = self._source.batch_size
        return self._take(epoch, position * size, 1, size)

    def nothing(self, key: Key) -> Item:
        """What a rank brings when its own part of the stream is at its end."""
        item = self._planned(key)
        item.brought[self._part.index] = 0
        item.indices = [np.empty(0, np.int64)] * len(item.planned)
        item.batches = [None] * len(item.planned)
        return item

    def first(self, epoch: int, count: int) -> Any:
        """A batch of the first samples that this rank can read; None where there are none."""
        fetch = self.another()
        samples = fetch._take(epoch, 0, 1, count)
        return self.collated(epoch, samples, np.arange(len(samples))) if samples else None

    def collated(self, epoch: int, samples: list[Any], indices: Indices) -> Any:
        """A batch of samples, each transformed with random streams of its own."""
        transform = self._source.transform
        if not (self._sample_rng and self._draws):
            return self._source.collate(
                samples if transform is None else [transform(sample) for sample in samples]
            )
        with kept_random_state():
            if transform is None:
                seed_sample(self._seed, epoch, int(indices[0]))
                return self._source.collate(samples)
            done = []
            for sample, index in zip(samples, indices.tolist(), strict=True):
                seed_sample(self._seed, epoch, index)
                done.append(transform(sample))
            return self._source.collate(done)

    def _planned(self, key: Key) -> Item:
        """A full global batch, as far as the ranks have one."""
        size, ranks = self._source.batch_size, self._part.count
        if callable(self._source.shard):
            cuts = -(-size * np.arange(key.micro_batches + 1) // key.micro_batches)
            # Samples before a cut that belong to a rank: those whose number leaves it as remainder.
            before = key.position * size + cuts[:, None] - np.arange(ranks)
            sizes = np.diff(-(-before // ranks), axis=0)
        else:
            parts = split_batch(size, key.shares, key.micro_batches)
            sizes = parts[..., 1] - parts[..., 0]
        return Item(sizes.sum(axis=0), sizes)

    def _own(self, key: Key, count: int) -> tuple[list[Any], Indices]:
        """This rank's samples of a stream that is split, and their numbers in the whole of it."""
        ranks, rank = self._part.count, self._part.index
        if self._source.shard is False:
            # Its own stream, of which every full global batch takes as many; numbered so that no
            # two ranks have a number in common.
            first = key.position * count
            samples = self._take(key.epoch, first, 1, count)
            return samples, (first + np.arange(len(samples))) * ranks + rank
        begin = key.position * self._source.batch_size
        first = begin + (rank - begin) % ranks
        samples = self._take(key.epoch, first, ranks, count)
        return samples, first + ranks * np.arange(len(samples))

    def _take(self, epoch: int, first: int, step: int, count: int) -> list[Any]:
        """`count` samples: `first`, `first + step`, ...; fewer at the end of the stream."""
        if count == 0:
            return []
        with _as_without_workers():
            reading = self._reading
            if reading is None or reading.epoch != epoch or reading.next > first:
                reading = self._open(epoch, first, step)
            elif reading.ended:
                return []
            elif reading.next < first and callable(self._source.shard):
                reading = self._open(epoch, first, step)
            with reading.entered():
                if reading.next < first:
                    deque(islice(reading.samples, first - reading.next), maxlen=0)
                samples = list(islice(reading.samples, count))
            reading.next = first + step * count
            reading.ended = len(samples) < count
        return samples

    def _open(self, epoch: int, first: int, step: int) -> _Reading:
        stream: Any = self._source.dataset
        shard = self._source.shard
        entered = OwnStreams(self._seed, epoch).entered if self._sample_rng else nullcontext
        begun = 0
        with entered():
            has_epochs = hasattr(stream, "set_epoch")
            if has_epochs:
                stream.set_epoch(epoch)
            if callable(shard):
                samples, begun = iter(shard(first, step)), first
            # The `datasets` library gives another order to what has been skipped to, after epoch 0,
            # and its load_state_dict loses what was in a shuffle buffer: there one reads on.
            elif first and hasattr(stream, "skip") and not has_epochs:
                samples, begun = iter(stream.skip(first)), first
            else:
                samples = iter(stream)
        self._reading = _Reading(epoch, begun, samples, entered)
        return self._reading


@dataclass
class _Reading:
    """One pass over the stream, as far as it has come."""

    epoch: int
    next: int
    """The sample that `samples` gives next."""
    samples: Iterator[Any]
    entered: Callable[[], AbstractContextManager[None]]
    """The random streams of this pass."""
    ended: bool = False


@contextmanager
def _as_without_workers() -> Iterator[None]:
    """In a loader worker: the stream is not told that it is one.

    Many streams ask torch's `get_worker_info` and give each worker a part of their own, by rules
    of their own. Here every worker needs the whole, to take from it what it was asked for. torch
    has no public way to say so.
    """
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info
