"""A stream as data: an iterable without index, read again from its beginning in every epoch.

Sample `i` of an epoch is the `i`-th that the stream gives, and global batch `t` holds the samples
from `t * B` on, on any number of ranks. How a rank comes by its own part of them says `shard`.

Random streams of a reader's own, which the training does not touch.

Do the ranks read the same stream? The first samples of a global batch are compared now and then.

A stream that each rank reads as a whole must be the same one everywhere; of one that is split, the
ranks must not all have the same part. Neither shows in a loss.

Reads one rank's part of the global batches of a stream, in this process or in loader workers.

A worker is asked for a global batch by its number, and reads forward to it; so what it gives does
not depend on how many workers there are, or which of them is asked.

The random streams that the stream itself draws from are seeded once a pass from (seed, epoch),
alike on all ranks, and kept apart from those of the training. What `transform` draws comes from
(seed, epoch, sample): it does not depend on the rank or on where the pass was taken up.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from lockstep.data.batch_plan import Indices, batches_in_epoch, check_batch_size, split_batch
from lockstep.data.same_samples import alike, another, digest
from lockstep.data.source import Source, check_options, what_it_reads
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.seeding import mix_seed, preserve_rng_state, seed_sample
from lockstep.distributed.topology import DataParallelRank
from lockstep.distributed.torch_compat import pytree
from lockstep.errors import DataError, LengthUnknownError, RanksDifferError, UsageError

Shard = Callable[[int, int], Iterable[Any]] | Literal[False] | None
"""`(start, step)` gives the samples start, start + step, ...; False: the stream splits itself over
the ranks; None: every rank reads the whole stream and keeps its part."""


@dataclass(frozen=True, kw_only=True)
class StreamSource(Source):
    """A stream and how its samples are grouped."""

    transform: Callable[[Any], Any] | None = None
    """Applied to a rank's own samples, each with random streams of its own."""
    shard: Shard = None

    @property
    def length(self) -> int:
        """Samples of an epoch, as the stream itself says.

        Raises:
            LengthUnknownError: it does not.
        """
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            raise LengthUnknownError(
                f"the length of the stream {type(self.dataset).__name__}",
                "it has no __len__: its end is known when it comes",
                "count what the loop was handed, or give the stream a __len__ that returns the "
                "number of its samples",
            ) from None

    @property
    def steps(self) -> int | None:  # type: ignore[override]
        """Global batches of an epoch; None: the stream does not say its length."""
        try:
            return batches_in_epoch(self.length, self.batch_size, drop_last=self.drop_last)
        except LengthUnknownError:
            return None

    @property
    def description(self) -> str:
        """What must be equal on all ranks, in words."""
        return (
            f"a loader over a stream ({type(self.dataset).__name__}) in global batches of "
            f"{self.batch_size}, drop_last={self.drop_last}, shard={self.how}"
        )

    @property
    def how(self) -> str:
        """Which way of sharding, in a word."""
        return "own" if self.shard is False else "whole" if self.shard is None else "seek"


def is_stream(data: object) -> bool:
    """Whether data are read from the beginning to the end, not by index."""
    return isinstance(data, IterableDataset) or (
        hasattr(data, "__iter__") and not hasattr(data, "__getitem__")
    )


def from_stream(
    stream: Any,
    batch_size: object,
    *,
    shuffle: bool,
    drop_last: bool,
    collate: Callable[[Any], Any] | None,
    options: dict[str, Any],
    transform: Callable[[Any], Any] | None,
    shard: Shard,
) -> StreamSource:
    """A stream with a global batch size.

    Args:
        stream: `iter(stream)` begins a new pass.
        batch_size: samples of a global batch.
        shuffle: must be False: a stream has the order that it has.
        drop_last: leave a last batch that is not full out.
        collate: joins samples into a batch; None: torch's own.
        options: of `torch.utils.data.DataLoader`, those that say how samples are read.
        transform: see `StreamSource`.
        shard: likewise.

    Raises:
        DataError: it can be read but once, or a size or an option is wrong.
        UsageError: `shuffle`, or a `shard` of another kind.
    """
    name = type(stream).__name__
    if shuffle:
        raise UsageError(
            f"shuffle=True for the stream {name}",
            "a stream is read in the order that it has",
            "shuffle inside its __iter__ (whose random streams are seeded alike on all ranks), or "
            "with the stream's own .shuffle(...)",
        )
    if not (shard is None or shard is False or callable(shard)):
        raise UsageError(
            f"shard={shard!r}",
            "it is neither a function (start, step) nor False",
            "give a function that returns the samples start, start + step, ...; False, if the "
            "stream splits itself over the ranks; or leave it out",
        )
    check_batch_size(batch_size)
    _check_again(stream)
    check_options(stream, options)
    return StreamSource(
        dataset=stream,
        batch_size=int(batch_size),  # type: ignore[call-overload]
        drop_last=drop_last,
        collate=collate or default_collate,
        options=options,
        transform=transform,
        shard=shard,
    )


def from_stream_loader(
    loader: DataLoader[Any], *, transform: Callable[[Any], Any] | None = None, shard: Shard = None
) -> StreamSource:
    """A DataLoader's settings, its `batch_size` being the global batch.

    Raises:
        DataError: without a batch size.
        UsageError: see `from_stream`.
    """
    read = what_it_reads(loader)
    return from_stream(
        read["dataset"],
        loader.batch_size,
        shuffle=False,
        drop_last=loader.drop_last,
        collate=read["collate"],
        options=read["options"],
        transform=transform,
        shard=shard,
    )


def _check_again(stream: object) -> None:
    if hasattr(stream, "__next__"):
        raise DataError(
            f"data of type {type(stream).__name__}, which is an iterator",
            "it can be read once, and every epoch reads from the beginning",
            "give an object whose __iter__ begins anew, such as an IterableDataset",
        )


_numpy: Any = np.random  # whose annotations leave out what is used here
_PASS = 0x57A3  # stands for a sample's index where the streams of a whole pass are seeded


class OwnStreams:
    """The CPU streams of torch, numpy and `random` as one pass over a stream finds them.

    Args:
        seed: of the run.
        epoch: of the pass.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        value = mix_seed(seed, epoch, _PASS)
        self._torch = torch.Generator().manual_seed(value).get_state()
        # numpy's generators can be exchanged, which is much quicker than to read and set a state.
        self._numpy = np.random.MT19937(value)
        self._python = random.Random(value).getstate()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Goes on where it was left the last time; outside all is as it was before."""
        outer_torch, outer_python = torch.get_rng_state(), random.getstate()
        outer_numpy = _numpy.get_bit_generator()
        torch.set_rng_state(self._torch)
        _numpy.set_bit_generator(self._numpy)
        random.setstate(self._python)
        try:
            yield
        finally:
            self._torch, self._python = torch.get_rng_state(), random.getstate()
            torch.set_rng_state(outer_torch)
            _numpy.set_bit_generator(outer_numpy)
            random.setstate(outer_python)


_SAMPLES = 16
"""Of a global batch that are compared."""
_NUMBERS = 512
"""Of a tensor that are looked at."""
_END = "end "


def marks(samples: Sequence[Any]) -> list[Any]:
    """What stands for the first of these samples."""
    return [digest(pytree.tree_map(_thinned, sample)) for sample in islice(samples, _SAMPLES)]


def _thinned(leaf: Any) -> Any:
    """A large tensor or array as some of its numbers and its shape; the rest as it is."""
    size = leaf.numel() if isinstance(leaf, torch.Tensor) else getattr(leaf, "size", 0)
    if not isinstance(leaf, torch.Tensor | np.ndarray) or size <= _NUMBERS:
        return leaf
    if isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided:
        return leaf
    return [list(leaf.shape), leaf.reshape(-1)[:: size // _NUMBERS]]


def compare(
    collectives: Collectives, source: StreamSource, epoch: int, first: int, mine: list[Any]
) -> None:
    """Compares what the ranks have read of a global batch. A collective.

    Args:
        collectives: of the run.
        source: the stream.
        epoch: that is being read.
        first: the first sample of the global batch.
        mine: the marks of what this rank has read of it.

    Raises:
        RanksDifferError: on every rank.
    """
    text = json.dumps(mine)
    if source.shard is None:
        sums = collectives.exchange(f"{zlib.crc32(text.encode()):08x}")
        _check_ends(epoch, sums)
        if len(set(sums)) > 1:
            rows = [json.loads(row) for row in collectives.exchange(text)]
            _check_alike(source, epoch, first, rows)
        return
    parts = [
        json.loads(part) for part in collectives.exchange(text)[: collectives.data_parallel.size]
    ]
    # A part all of whose samples are alike tells nothing: a stream of zeros is the same everywhere.
    telling = [part for part in parts if any(not alike(sample, part[0]) for sample in part)]
    twins = [part for part in telling if sum(alike(part, other) for other in parts) > 1]
    if twins:
        ranks = [str(rank) for rank, part in enumerate(parts) if alike(part, twins[0])]
        raise RanksDifferError(
            f"shard={'False' if source.shard is False else 'a function'}, for a stream that is "
            "split over the ranks",
            f"ranks {', '.join(ranks)} were given the same samples (epoch {epoch}, from sample "
            f"{first} on)",
            "leave shard=False out: every rank then keeps its part of the stream"
            if source.shard is False
            else "let the function give the samples start, start + step, ... of the stream",
            code="LS108",
        )


def compare_ends(collectives: Collectives, epoch: int, samples: int) -> None:
    """Compares how many samples the ranks have read when their stream is at its end. A collective.

    Raises:
        RanksDifferError: on every rank.
    """
    _check_ends(epoch, collectives.exchange(f"{_END}{samples}"))


def _check_ends(epoch: int, texts: list[str]) -> None:
    """Of ranks whose stream is at its end, and ranks whose stream goes on."""
    if len(set(texts)) > 1 and any(text.startswith(_END) for text in texts):
        ends = [
            f"after {text.removeprefix(_END)} samples on rank {rank}"
            if text.startswith(_END)
            else f"not yet on rank {rank}"
            for rank, text in enumerate(texts)
        ]
        raise RanksDifferError(
            f"a stream that every rank reads (epoch {epoch})",
            f"it ends {', '.join(ends)}",
            "let all ranks read the same data: look for machines whose copies differ",
            code="LS104",
        )


def _check_alike(source: StreamSource, epoch: int, first: int, rows: list[list[Any]]) -> None:
    counts = [len(row) for row in rows]
    shortest = min(counts)
    differing = (n for n in range(shortest) if any(not alike(row[n], rows[0][n]) for row in rows))
    place = next(differing, shortest)
    if place < shortest:
        found = another(first + place, [row[place] for row in rows])
    elif len(set(counts)) > 1:
        ended = ", ".join(str(r) for r, count in enumerate(counts) if count == shortest)
        found = f"on rank {ended} it ends before sample {first + place}, elsewhere it goes on"
    else:
        return
    raise RanksDifferError(
        f"the stream {type(source.dataset).__name__}, which every rank reads as a whole, to keep "
        f"its part (epoch {epoch})",
        found,
        "if it splits itself over the ranks, let it give every rank everything, or pass "
        "shard=False to world.loader; else seed what shuffles it, and let the order not depend "
        "on a set, a folder or the time",
        code="LS109",
    )


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
        data_parallel: this rank's.
    """

    def __init__(
        self, source: StreamSource, seed: int, sample_rng: bool, data_parallel: DataParallelRank
    ) -> None:
        self._source = source
        self._seed = seed
        self._sample_rng = sample_rng
        self._data_parallel = data_parallel
        self._reading: _Reading | None = None
        self._draws = not (source.transform is None and source.collate is default_collate)

    def another(self) -> StreamFetch:
        """The same with nothing open, for a process of its own."""
        return StreamFetch(self._source, self._seed, self._sample_rng, self._data_parallel)

    def close(self) -> None:
        """Lets go of the open pass."""
        self._reading = None

    def __getitem__(self, key: Key) -> Item | None:
        item = self._planned(key)
        rank = self._data_parallel.rank
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
        item.brought[self._data_parallel.rank] = 0
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
        with preserve_rng_state():
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
        size, ranks = self._source.batch_size, self._data_parallel.size
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
        ranks, rank = self._data_parallel.size, self._data_parallel.rank
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
