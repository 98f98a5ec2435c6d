"""What the user gave as data, read once: the dataset, the order of its samples, the batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from lockstep.data.global_batch import (
    EpochPlan,
    batches_in_epoch,
    check_batch_size,
    cut,
    plan_epoch,
)
from lockstep.errors import DataError, UsageError
from lockstep.runtime.seeding import kept_random_state, mix


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset and how its samples are ordered and grouped."""

    dataset: Dataset[Any]
    batch_size: int
    """Samples of a global batch."""
    shuffle: bool = False
    drop_last: bool = False
    sampler: Sampler[int] | None = None
    """The user's own order; it must be the same on every rank."""
    batch_sampler: Sampler[list[int]] | None = None
    """The user's own global batches."""
    collate: Callable[[Any], Any] = default_collate
    options: dict[str, Any] = field(default_factory=dict)
    """What goes on to `torch.utils.data.DataLoader`: `num_workers`, `pin_memory`, ..."""

    @property
    def length(self) -> int:
        """Samples of an epoch (with a batch sampler of the user's: of the dataset)."""
        return _length(self.sampler if self.sampler is not None else self.dataset)

    @property
    def steps(self) -> int:
        """Global batches of an epoch."""
        if self.batch_sampler is not None:
            return _length(self.batch_sampler)
        return batches_in_epoch(self.length, self.batch_size, drop_last=self.drop_last)

    def plan(self, seed: int, epoch: int) -> EpochPlan:
        """The global batches of an epoch, the same on every rank."""
        if self.sampler is None and self.batch_sampler is None:
            return plan_epoch(
                self.length,
                self.batch_size,
                seed=seed,
                epoch=epoch,
                shuffle=self.shuffle,
                drop_last=self.drop_last,
            )
        with kept_random_state():  # a sampler draws from torch's global stream
            torch.default_generator.manual_seed(mix(seed, epoch, 0x5A3))
            if self.batch_sampler is not None:
                batches = [np.asarray(batch, dtype=np.int64) for batch in self.batch_sampler]
                bounds = np.cumsum([0, *(len(batch) for batch in batches)], dtype=np.int64)
                return EpochPlan(np.concatenate([np.empty(0, np.int64), *batches]), bounds)
            order = np.fromiter(_indices(self.sampler), dtype=np.int64)
        return cut(order, self.batch_size, drop_last=self.drop_last)


def _indices(sampler: Sampler[int] | None) -> Iterator[int]:
    return iter(sampler) if sampler is not None else iter(())


def from_dataset(
    dataset: Dataset[Any],
    batch_size: object,
    *,
    shuffle: bool,
    drop_last: bool,
    collate: Callable[[Any], Any] | None,
    options: dict[str, Any],
) -> Source:
    """Raises DataError where the dataset has no length or no index, or `batch_size` is wrong."""
    _check_map_style(dataset)
    check_batch_size(batch_size)
    return Source(
        dataset=dataset,
        batch_size=int(batch_size),  # type: ignore[call-overload]
        shuffle=shuffle,
        drop_last=drop_last,
        collate=collate or default_collate,
        options=options,
    )


def from_loader(loader: DataLoader[Any]) -> Source:
    """A DataLoader's settings, its `batch_size` being the global batch.

    Raises:
        DataError: without a batch size, or over a dataset without length.
        UsageError: the loader is already cut into shards.
    """
    _check_map_style(loader.dataset)
    if isinstance(loader.sampler, DistributedSampler) or isinstance(
        getattr(loader.batch_sampler, "sampler", None), DistributedSampler
    ):
        raise UsageError(
            "a DataLoader with a DistributedSampler",
            "it is already cut into shards; Lockstep would cut each shard again",
            "leave the sampler out and pass shuffle=True: every rank gets its part of the batch",
        )
    if loader.batch_sampler is None:
        raise DataError(
            "a DataLoader with batch_size=None",
            "without a batch size there is no global batch",
            "give the DataLoader a batch_size",
        )
    common: dict[str, Any] = {
        "dataset": loader.dataset,
        "collate": loader.collate_fn,
        "options": {
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        },
    }
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return Source(
            batch_size=_typical(loader),
            batch_sampler=cast("Sampler[list[int]]", loader.batch_sampler),
            **common,
        )
    check_batch_size(loader.batch_size)
    sampler = loader.sampler
    simple = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == _length(loader.dataset)
    )
    return Source(
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        shuffle=simple and type(sampler) is RandomSampler,
        sampler=None if simple else sampler,  # type: ignore[arg-type]
        **common,
    )


def _typical(loader: DataLoader[Any]) -> int:
    size = getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(size, int) and size > 0:
        return size
    return max(1, -(-_length(loader.dataset) // max(1, _length(loader.batch_sampler))))


def _check_map_style(dataset: object) -> None:
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"a {type(dataset).__name__}, which is an IterableDataset",
            "a stream has no length and no index, so its samples cannot be planned",
            "use a map-style dataset (with __getitem__ and __len__)",
        )
    if not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"data of type {type(dataset).__name__}",
            "it has no __getitem__",
            "pass a torch Dataset, or a DataLoader",
        )
    _length(dataset)


def _length(data: object) -> int:
    try:
        if isinstance(data, Sized):
            return len(data)
    except (TypeError, NotImplementedError):
        pass
    raise DataError(
        f"a {type(data).__name__} without a length",
        "len() does not work on it, so an epoch cannot be cut into global batches",
        "give it a __len__ that returns the number of samples (batches for a batch sampler)",
    )
