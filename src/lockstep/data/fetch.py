"""Reads the samples of a micro-batch, each with random streams of its own.

A sample's augmentation is drawn from (seed, epoch, index) and from nothing else: not the rank, the
loader worker, the batch it came in, or the point at which a run was resumed.

The worker processes of a loader, which are those of torch's DataLoader.

Moves batches to the device one ahead, on a stream of its own: copies hide behind work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

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

from lockstep.data.batch_plan import Indices
from lockstep.data.pytree import all_dense, map_tensors, move, pin
from lockstep.distributed.seeding import mix_seed, preserve_rng_state, seed_sample

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
        if not self.sample_rng:
            return self.collate(self._read_at_once(indices.tolist()))
        if get_worker_info() is not None:
            return self._read_each(epoch, indices)
        with preserve_rng_state():
            return self._read_each(epoch, indices)

    def _read_each(self, epoch: int, indices: Indices) -> Any:
        samples = []
        for index in indices.tolist():
            seed_sample(self.seed, epoch, index)
            samples.append(self.dataset[index])
        return self.collate(samples)

    def _read_at_once(self, indices: list[int]) -> list[Any]:
        read = getattr(self.dataset, "__getitems__", None)
        return read(indices) if read else [self.dataset[index] for index in indices]


def _select(tensors: tuple[torch.Tensor, ...], rows: Indices) -> list[torch.Tensor]:
    return [tensor.index_select(0, torch.from_numpy(rows)) for tensor in tensors]


def as_it_is(item: Any) -> Any:
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


class Workers:
    """Reads with worker processes.

    Args:
        options: of `torch.utils.data.DataLoader`; `num_workers` is at least 1.
        seed: of the run.
    """

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self._options = {name: value for name, value in options.items() if value is not None}
        self._options["pin_memory"] = False  # `to_device` pins what can be pinned
        self._options["worker_init_fn"] = partial(_begin, self._options.get("worker_init_fn"))
        self._seed = seed
        self._persistent: DataLoader[Any] | None = None
        self._keys: Iterable[Any] = ()
        self._busy = False
        """The persistent ones are in the middle of a pass: they can do but one at a time."""

    def read(self, fetch: Dataset[Any], keys: Iterable[Any]) -> Iterator[Any]:
        """`fetch[key]` for each key, in order."""
        if self._busy or not self._options.get("persistent_workers"):
            yield from self._new(fetch, keys, persistent_workers=False)
            return
        self._busy, self._keys = True, keys
        try:
            if self._persistent is None:
                self._persistent = self._new(fetch, _Present(self))
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
            collate_fn=as_it_is,
            generator=generator,
            **{**self._options, **changed},
        )


class _Present:
    """What persistent workers are to read in the present pass."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def __iter__(self) -> Iterator[Any]:
        return iter(self._workers._keys)


def _begin(given: Callable[[int], None] | None, worker: int) -> None:
    """Begins a worker process; the user's code finds its own dataset there, as ever."""
    info: Any = get_worker_info()
    if isinstance(info.dataset, Fetch):
        object.__setattr__(info, "dataset", info.dataset.dataset)
    if given is not None:
        given(worker)


def to_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The batches on the device, in order; on CUDA each copy is started one batch early.

    It is started from page-locked memory, without which a copy cannot overlap with anything.
    """
    if device.type != "cuda":
        # Nothing to hide: no look-ahead, so nothing is read that is not used.
        return (batch if device.type == "cpu" else move(batch, device) for batch in batches)
    return _one_ahead(batches, device)


def _one_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Copies batch t + 1 while batch t is worked on.

    Only batches of dense tensors: what graph batches, sparse tensors and the like hold inside
    cannot be marked as used by a second stream, so they are copied on the present one when needed.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start() -> tuple[Any, bool]:
        batch = pin(next(batches))
        if not all_dense(batch):
            return batch, False
        with torch.cuda.stream(stream):
            return move(batch, device), True

    def used_here(tensor: Tensor) -> Tensor:
        # The allocator must not hand the memory out again before this stream is done with it.
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(device))
        return tensor

    try:
        ahead, moved = start()
    except StopIteration:
        return
    while True:
        if moved:
            torch.cuda.current_stream(device).wait_stream(stream)
            ready = map_tensors(ahead, used_here)
        else:
            ready = move(ahead, device)
        try:
            ahead, moved = start()
        except StopIteration:
            yield ready
            return
        yield ready
