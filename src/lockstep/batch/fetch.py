"""Reads samples: by index or from an iterable, in this process or in workers, then to the device.

`Fetch` reads the micro-batches of a map-style dataset. A sample's augmentation is drawn from (seed,
epoch, index) and from nothing else: not the rank, the loader worker, the batch it came in, or the
point at which a run was resumed.

`IterableFetch` reads one rank's part of the global batches of an iterable. A worker is asked for a
global batch by its number, and reads forward to it; so what it gives does not depend on how many
workers there are, or which of them is asked. The random streams that the iterable itself draws from
are seeded once a pass from (seed, epoch), alike on all ranks, and kept apart from those of the
training. What `transform` draws comes from (seed, epoch, sample).

`Workers` are the worker processes of torch's DataLoader. `to_device` moves batches to the device
one ahead, on a stream of its own: copies hide behind work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from lockstep.batch.consistency import SAMPLES_COMPARED, batch_digests
from lockstep.batch.plan import Indices, split_batch
from lockstep.batch.pytree import all_dense, map_tensors, move, pin
from lockstep.batch.source import IterableSource
from lockstep.distributed.seeding import mix_seed, preserve_rng_state, seed_sample
from lockstep.distributed.topology import DataParallelRank
from lockstep.distributed.torch_compat import without_worker_info

T = TypeVar("T")
Pairs = Generator[tuple[T, Any], None, None]
"""Batches, each beside what it is."""
Key = tuple[int, Indices]
"""Epoch and sample indices of one micro-batch."""


class Fetch(Dataset[Any]):
    """A dataset of micro-batches: indexed by a `Key`, returns the collated batch.

    Args:
        dataset: map-style.
        collate: joins samples into a batch.
        seed: of the run.
        sample_rng: False leaves the random streams alone and reads with the dataset's own
            `__getitems__` where it has one: for datasets that draw no random numbers.
    """

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[Any], Any], seed: int, sample_rng: bool
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self.sample_rng = sample_rng
        self.tensors = _tensors(dataset) if collate is default_collate else None

    def __getitem__(self, key: Key) -> Any:
        epoch, indices = key
        if self.tensors is not None:  # rows of tensors: nothing is drawn, nothing to stack
            tensors, subset = self.tensors
            rows = indices if subset is None else subset[indices]
            try:
                return _select(tensors, rows)
            except (IndexError, RuntimeError):  # some are counted from the end
                return _select(tensors, np.where(rows < 0, rows + len(tensors[0]), rows))
        wanted = indices.tolist()
        if not self.sample_rng:
            read = getattr(self.dataset, "__getitems__", None)
            samples = read(wanted) if read else [self.dataset[index] for index in wanted]
            return collated(self.collate, samples)
        # A worker process does nothing else, so nobody misses its streams.
        with preserve_rng_state() if get_worker_info() is None else nullcontext():
            samples = []
            for index in wanted:
                seed_sample(self.seed, epoch, index)
                samples.append(self.dataset[index])
            return collated(self.collate, samples)


def collated(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    """The batch of some samples.

    A collate function that leaves samples out may find that none is left, which happens in a
    rank's part of a global batch before it happens on one device; its error then gets a note.
    """
    try:
        return collate(samples)
    except (IndexError, RuntimeError, ValueError) as error:
        if collate is not default_collate:
            error.add_note(
                f"lockstep: the collate function was given {len(samples)} of the samples of a "
                "global batch. If it leaves samples out and none of these was left, let it return "
                "None: this rank then takes part without samples."
            )
        raise


def _select(tensors: tuple[Tensor, ...], rows: Indices) -> list[Tensor]:
    return [tensor.index_select(0, torch.from_numpy(rows)) for tensor in tensors]


def _identity(item: Any) -> Any:
    """For a DataLoader whose dataset gives what is wanted: nothing is collated or converted."""
    return item


def _tensors(dataset: Dataset[Any]) -> tuple[tuple[torch.Tensor, ...], Indices | None] | None:
    """The tensors, and the row of each sample, of a TensorDataset or a Subset of one.

    Only the exact classes: a subclass may augment. Tensors that are not on the CPU are left to
    the general way.
    """
    if type(dataset) is Subset:
        inner = _tensors(dataset.dataset)
        if inner is None:
            return None
        rows = np.asarray(dataset.indices, dtype=np.int64)
        return inner[0], rows if inner[1] is None else inner[1][rows]
    if type(dataset) is TensorDataset and all(t.device.type == "cpu" for t in dataset.tensors):
        return dataset.tensors, None
    return None


_PASS = 0x57A3  # stands for a sample's index where the streams of a whole pass are seeded


class _PassRng:
    """The CPU streams of torch, numpy and `random` as one pass over an iterable finds them.

    Args:
        seed: of the run.
        epoch: of the pass.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        value = mix_seed(seed, epoch, _PASS)
        # numpy's generators can be exchanged, which is much quicker than to read and set a state.
        self._kept: tuple[Tensor, np.random.BitGenerator, Any] = (
            torch.Generator().manual_seed(value).get_state(),
            np.random.MT19937(value),
            random.Random(value).getstate(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Goes on where it was left the last time; outside all is as it was before."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """Puts what is kept here into the global streams, and keeps what was there."""
        numpys = np.random.get_bit_generator()  # type: ignore[attr-defined]
        outside = torch.get_rng_state(), numpys, random.getstate()
        torch.set_rng_state(self._kept[0])
        np.random.set_bit_generator(self._kept[1])  # type: ignore[attr-defined]
        random.setstate(self._kept[2])
        self._kept = outside


_COMPARED_EVERY = 100
"""Global batches from one comparison of samples to the next."""


def is_compared(position: int, begin: int, batch_size: int) -> bool:
    """Whether the samples of a global batch are compared between ranks and between loader workers.

    Compared are the first samples of the pass and of the epoch, and those after each hundredth
    global batch: 16 of each, which are in several global batches where these are small.
    """
    batches = -(-SAMPLES_COMPARED // batch_size)
    return begin <= position < begin + batches or position % _COMPARED_EVERY < batches


class GlobalBatchKey(NamedTuple):
    """Which global batch, and how it is divided."""

    epoch: int
    position: int
    shares: tuple[int, ...]
    micro_batches: int
    """Of it, or of the part of each virtual rank."""
    num_virtual_ranks: int | None
    begin: int
    """The position of the first global batch of this pass."""
    read_beginning: bool = False
    """Whether the first samples of the epoch are read although the pass begins after them, where
    the stream would go to its place without reading what comes before."""


@dataclass
class RankBatch:
    """A rank's part of a global batch of an iterable."""

    position: int
    """Which global batch of the epoch."""
    sizes: Indices
    """The planned samples of each rank in each micro-batch, shape `(micro-batches, ranks)`."""
    counts: Indices
    """Samples of each rank that are known here: shape `(ranks,)`. Of an iterable that every rank
    reads as a whole these are all, else they are right for this rank alone."""
    ended: bool
    """The iterable gives this rank no more samples."""
    worker: int
    """Which loader worker has read it; 0 where there are none."""
    digests: dict[int, list[Any]]
    """Digests of the first samples of each global batch that is compared (`is_compared`), by
    position: of those that this worker has read, or read past, since the one that it gave last."""
    samples_in_all: int | None = None
    """The number of samples that the iterable gave, once this worker has come to its end."""
    example: Any = None
    """A batch of one sample, where this rank has none of its own but has read those of others."""
    indices: list[Indices] = field(default_factory=list)
    """Of this rank's samples, one array a micro-batch, shape `(n,)`."""
    batches: list[Any] = field(default_factory=list)
    """Collated; None where this rank has no sample of a micro-batch."""


class IterableFetch(Dataset[Any]):
    """This rank's part of the global batches of an iterable, by key.

    Args:
        source: the iterable.
        seed: of the run.
        sample_rng: False leaves all random streams alone.
        data_parallel: this rank's.
    """

    def __init__(
        self, source: IterableSource, seed: int, sample_rng: bool, data_parallel: DataParallelRank
    ) -> None:
        self.dataset = source.dataset
        self._source = source
        self._seed = seed
        self._sample_rng = sample_rng
        self._data_parallel = data_parallel
        self._reader: _Reader | None = None
        self._digests: dict[int, list[Any]] = {}
        """What the next `RankBatch` has as its digests."""
        self._draws = not (source.transform is None and source.collate is default_collate)

    def fresh(self) -> IterableFetch:
        """The same with nothing open, for a process of its own."""
        return IterableFetch(self._source, self._seed, self._sample_rng, self._data_parallel)

    def close(self) -> None:
        """Lets go of the open pass."""
        self._reader = None

    def __getitem__(self, key: GlobalBatchKey) -> RankBatch:
        info = get_worker_info()
        if key.read_beginning:
            self._read_beginning(key)
        part = self._part(key)
        self._keep_digests(key.position, key.begin, part.samples)
        found = RankBatch(
            position=key.position,
            sizes=part.sizes,
            counts=part.counts,
            ended=part.ended,
            worker=0 if info is None else info.id,
            digests=self._digests,
            samples_in_all=self._samples_in_all(),
        )
        self._digests = {}
        for start, end in part.bounds:
            samples = part.samples[start:end]
            indices = part.first + part.step * np.arange(start, end)
            found.indices.append(indices)
            found.batches.append(self.collate(key.epoch, samples, indices) if samples else None)
        some_are_empty = any(batch is None for batch in found.batches)
        if some_are_empty and part.samples:
            with preserve_rng_state():
                index = np.array([part.first])
                found.example = self.collate(key.epoch, part.samples[:1], index)
        return found

    def _part(self, key: GlobalBatchKey) -> _Part:
        """Reads what this rank needs of a global batch."""
        rank, ranks = self._data_parallel.rank, self._data_parallel.size
        shard, size = self._source.shard, self._source.batch_size
        begin = key.position * size
        if shard is None:
            samples = self.read_whole(key.epoch, key.position, key.begin)
            parts = split_batch(len(samples), key.shares, key.micro_batches, key.num_virtual_ranks)
            sizes = parts[..., 1] - parts[..., 0]
            counts = sizes.sum(axis=0)
            bounds = parts[:, rank].tolist()
            return _Part(samples, begin, 1, sizes, counts, bounds, ended=not samples)

        sizes = self._planned_sizes(key)
        wanted = int(sizes[:, rank].sum())
        if shard is False:
            # Its own samples, of which every full global batch takes as many; numbered so that
            # no two ranks have a number in common.
            own_begin = key.position * wanted
            samples = self._read(key.epoch, own_begin, 1, wanted, key.begin, wanted)
            first = own_begin * ranks + rank
            ended = not samples
        else:
            first = begin + (rank - begin) % ranks
            samples = self._read(key.epoch, first, ranks, wanted, key.begin)
            # A global batch that is smaller than the ranks are many may leave a rank out.
            ended = wanted > 0 and not samples
        ends = np.minimum(np.cumsum([0, *sizes[:, rank]]), len(samples))
        bounds = np.stack([ends[:-1], ends[1:]], axis=1).tolist()
        counts = sizes.sum(axis=0)
        counts[rank] = len(samples)
        return _Part(samples, first, ranks, sizes, counts, bounds, ended)

    def read_whole(self, epoch: int, position: int, begin: int = 0) -> list[Any]:
        """The samples of a whole global batch; fewer, or none, at the end of the iterable."""
        size = self._source.batch_size
        return self._read(epoch, position * size, 1, size, begin, size)

    def first(self, epoch: int, count: int) -> Any:
        """A batch of the first samples that this rank can read; None where there are none."""
        fetch = self.fresh()
        samples = fetch._read(epoch, 0, 1, count)
        opened = fetch._reader
        if self._reader is not None and opened is not None:
            # Some streams have one iterator alone, which has just begun again: the pass that was
            # reading it has to find its place anew.
            if opened.samples is self._reader.samples:
                self._reader = None
        return self.collate(epoch, samples, np.arange(len(samples))) if samples else None

    def collate(self, epoch: int, samples: list[Any], indices: Indices) -> Any:
        """A batch of samples, each transformed with random streams of its own."""
        transform = self._source.transform
        if not (self._sample_rng and self._draws):
            ready = [transform(sample) for sample in samples] if transform else samples
            return collated(self._source.collate, ready)
        with preserve_rng_state():
            if transform is None:
                seed_sample(self._seed, epoch, int(indices[0]))
                return collated(self._source.collate, samples)
            done = []
            for sample, index in zip(samples, indices.tolist(), strict=True):
                seed_sample(self._seed, epoch, index)
                done.append(transform(sample))
            return collated(self._source.collate, done)

    def _planned_sizes(self, key: GlobalBatchKey) -> Indices:
        """Of a full global batch of an iterable that is split, shape `(micro-batches, ranks)`."""
        size, ranks = self._source.batch_size, self._data_parallel.size
        if self._source.shard is False:
            parts = split_batch(size, key.shares, key.micro_batches)
            return parts[..., 1] - parts[..., 0]
        cuts = -(-size * np.arange(key.micro_batches + 1) // key.micro_batches)
        # Samples before a cut that belong to a rank: those whose number leaves it as remainder.
        before = key.position * size + cuts[:, None] - np.arange(ranks)
        return np.diff(-(-before // ranks), axis=0)

    def _read(
        self, epoch: int, first: int, step: int, count: int, begin: int = 0, per_batch: int = 0
    ) -> list[Any]:
        """Reads `count` samples: `first`, `first + step`, ...; fewer at the end of the iterable.

        Args:
            epoch: of the pass.
            first: the number of the first sample, as this rank counts them.
            step: from one sample to the next.
            count: samples to read.
            begin: the position at which the pass begins.
            per_batch: samples that this rank reads of each full global batch; 0: it varies.
        """
        if count == 0:
            return []
        with without_worker_info():  # many iterables would give this worker a part of their own
            reader = self._reader
            if reader is None or reader.epoch != epoch or reader.next > first:
                reader = self._open(epoch, first, step)
            elif reader.ended:
                return []
            elif reader.next < first and callable(self._source.shard):
                reader = self._open(epoch, first, step)
            with reader.rng():
                self._read_up_to(reader, first, begin, per_batch)
                samples = reader.take(count)
            if samples:
                reader.next = first + step * len(samples)
        return samples

    def _read_up_to(self, reader: _Reader, first: int, begin: int, per_batch: int) -> None:
        """Reads on to a sample, past global batches that other workers have or that are done."""
        while reader.next < first and not reader.ended:
            position = reader.next // per_batch if per_batch else 0
            end = min((position + 1) * per_batch, first) if per_batch else first
            passed = reader.take(end - reader.next)
            reader.next += len(passed)
            if per_batch:
                self._keep_digests(position, begin, passed)

    def _keep_digests(self, position: int, begin: int, samples: list[Any]) -> None:
        """Keeps digests of a global batch that has been read, if it is one that is compared."""
        if samples and is_compared(position, begin, self._source.batch_size):
            self._digests[position] = batch_digests(samples)

    def _read_beginning(self, key: GlobalBatchKey) -> None:
        """Reads the first samples of the epoch, whose digests go out with the next batch.

        A stream that is read from the beginning of the epoch anyway passes them on its way.
        """
        if not self._goes_to_its_place:
            return
        fetch = self.fresh()
        for position in range(-(-SAMPLES_COMPARED // self._source.batch_size)):
            beginning = key._replace(position=position, begin=0, read_beginning=False)
            samples = fetch._part(beginning).samples
            fetch._keep_digests(position, 0, samples)
        self._digests.update(fetch._digests)

    @property
    def _goes_to_its_place(self) -> bool:
        """Whether a pass can begin after the first sample without reading what comes before."""
        if callable(self._source.shard):
            return True
        # The `datasets` library gives another order to what has been skipped to, after epoch 0,
        # and its load_state_dict loses what was in a shuffle buffer: there one reads on.
        return hasattr(self.dataset, "skip") and not hasattr(self.dataset, "set_epoch")

    def _samples_in_all(self) -> int | None:
        """The samples of the iterable, as far as this reader alone can tell; None: not known."""
        reader = self._reader
        if reader is None or not reader.ended or callable(self._source.shard):
            return None
        return reader.next

    def _open(self, epoch: int, first: int, step: int) -> _Reader:
        dataset: Any = self.dataset
        shard = self._source.shard
        rng = _PassRng(self._seed, epoch).entered if self._sample_rng else nullcontext
        begun = 0
        with rng():
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            if callable(shard):
                samples = iter(shard(first, step))
                begun = first
            elif first and self._goes_to_its_place:
                samples = iter(dataset.skip(first))
                begun = first
            else:
                samples = iter(dataset)
        self._reader = _Reader(epoch, begun, samples, rng)
        return self._reader


class _Part(NamedTuple):
    """What this rank has read of a global batch."""

    samples: list[Any]
    """This rank's own; of an iterable that every rank reads as a whole, those of all ranks."""
    first: int
    step: int
    """The index of the first of these samples, and from one to the next."""
    sizes: Indices
    counts: Indices
    """See `RankBatch`."""
    bounds: list[list[int]]
    """Where this rank's samples of each micro-batch begin and end in `samples`."""
    ended: bool


@dataclass
class _Reader:
    """One pass over an iterable, as far as it has come."""

    epoch: int
    next: int
    """The sample that `samples` gives next."""
    samples: Iterator[Any]
    rng: Callable[[], AbstractContextManager[None]]
    """Enters the random streams of this pass."""
    ended: bool = False

    def take(self, count: int) -> list[Any]:
        """The next samples; fewer at the end of the iterable.

        They are taken with `next` alone, as torch's DataLoader does it. `itertools.islice` and a
        `for` loop call `iter` on the iterator first, and some begin again when that is called.
        """
        taken: list[Any] = []
        while len(taken) < count and not self.ended:
            try:
                taken.append(next(self.samples))
            except StopIteration:
                self.ended = True
        return taken


class Workers:
    """Reads with worker processes, or in this one where there are none.

    Args:
        options: of `torch.utils.data.DataLoader`.
        seed: of the run.
    """

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self._options = {name: value for name, value in options.items() if value is not None}
        self._options["pin_memory"] = False  # `to_device` pins what can be pinned
        self._options["worker_init_fn"] = partial(_start_worker, options["worker_init_fn"])
        self._seed = seed
        self._persistent: DataLoader[Any] | None = None
        self._keys: Iterable[Any] = ()
        self._busy = False
        """The persistent ones are in the middle of a pass: they can do but one at a time."""

    def __iter__(self) -> Iterator[Any]:
        """What persistent workers are to read in the present pass."""
        return iter(self._keys)

    def read(self, fetch: Dataset[Any], keys: Iterable[Any]) -> Generator[Any, None, None]:
        """`fetch[key]` for each key, in order; of no keys no worker is started."""
        if not self._options["num_workers"]:
            yield from map(fetch.__getitem__, keys)
            return
        keys = iter(keys)
        first = next(keys, None)
        if first is None:
            return
        keys = chain([first], keys)
        if self._busy or not self._options["persistent_workers"]:
            yield from self._new(fetch, keys, persistent_workers=False)
            return
        self._busy, self._keys = True, keys
        try:
            if self._persistent is None:
                self._persistent = self._new(fetch, self)
            yield from self._persistent
        finally:
            self._busy = False

    def release(self) -> None:
        """Ends persistent workers."""
        self._persistent = None

    def _new(self, fetch: Dataset[Any], keys: Iterable[Any], **changed: Any) -> DataLoader[Any]:
        # A generator of its own: torch would draw the workers' seed from the global stream.
        generator = torch.Generator().manual_seed(mix_seed(self._seed, 0x10AD))
        return DataLoader(
            fetch,
            batch_size=None,
            sampler=keys,
            collate_fn=_identity,
            generator=generator,
            **{**self._options, **changed},
        )


def _start_worker(given: Callable[[int], None] | None, worker: int) -> None:
    """In a new worker process: the user's code finds its own dataset there, as ever."""
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if given is not None:
        given(worker)


def to_device(pairs: Iterable[tuple[T, Any]], device: torch.device) -> Pairs[T]:
    """The batches on the device, in order, each beside what it is."""
    if device.type == "cuda":
        return _one_ahead(pairs, device)
    # Nothing to hide: no look-ahead, so nothing is read that is not used.
    return ((what, batch if device.type == "cpu" else move(batch, device)) for what, batch in pairs)


def _one_ahead(pairs: Iterable[tuple[T, Any]], device: torch.device) -> Pairs[T]:
    """Copies batch t + 1 while batch t is worked on.

    It is copied from page-locked memory, without which a copy cannot overlap with anything. Only
    batches of dense tensors: what graph batches, sparse tensors and the like hold inside cannot be
    marked as used by a second stream, so they are copied on the present one when needed.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def started(batch: Any) -> tuple[Any, bool]:
        batch = pin(batch)
        if not all_dense(batch):
            return batch, False
        with torch.cuda.stream(stream):
            return move(batch, device), True

    def used_here(tensor: Tensor) -> Tensor:
        # The allocator must not hand the memory out again before this stream is done with it.
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(device))
        return tensor

    def arrived(batch: Any, moved: bool) -> Any:
        if not moved:
            return move(batch, device)
        torch.cuda.current_stream(device).wait_stream(stream)
        return map_tensors(batch, used_here)

    ahead: tuple[T, Any, bool] | None = None
    for what, batch in pairs:
        ready = None if ahead is None else (ahead[0], arrived(*ahead[1:]))
        ahead = (what, *started(batch))
        if ready is not None:
            yield ready
    if ahead is not None:
        yield ahead[0], arrived(*ahead[1:])
