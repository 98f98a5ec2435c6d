"""What the user gave as data, read once: the dataset, the order of its samples, the batch size."""

from __future__ import annotations

import difflib
import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from lockstep.data.batch_plan import EpochPlan, batches_in_epoch, check_batch_size, cut, plan_epoch
from lockstep.distributed.seeding import mix_seed, preserve_rng_state, seed_sample
from lockstep.errors import DataError, UsageError

_SAMPLER = 0x5A3  # stands for a sample's index where a sampler's streams are seeded
_OPTIONS = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "pin_memory",
)
_ORDERING = ("sampler", "batch_sampler", "generator")
# Of `world.loader` itself: what a misspelt option may have meant.
_ARGUMENTS = (
    "batch_size",
    "batch_size_per_device",
    "shuffle",
    "drop_last",
    "micro_batch_size",
    "shares",
    "weight",
    "sample_rng",
    "collate_fn",
    "transform",
    "shard",
)


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

    @property
    def own_order(self) -> bool:
        """A sampler of the user's says which samples form the global batches."""
        return self.sampler is not None or self.batch_sampler is not None

    @property
    def fingerprint(self) -> int:
        """A CRC-32 over what must be equal on all ranks: sizes, splits, and the user's own order.

        A sampler of the user's is run through once, for epoch 0 of seed 0.
        """
        sizes = (self.length, self.batch_size, self.shuffle, self.drop_last, self.steps)
        found = zlib.crc32(repr(tuple(int(size) for size in sizes)).encode())
        for indices in _subsets(self.dataset):
            found = zlib.crc32(_bytes(indices), found)
        if self.own_order:
            plan = self.plan(0, 0)
            found = zlib.crc32(plan.order.tobytes(), found)
            found = zlib.crc32(plan.bounds.tobytes(), found)
        return found

    @property
    def description(self) -> str:
        """What must be equal on all ranks, in words."""
        text = f"a loader over {self.length} samples in global batches of {self.batch_size}"
        # The checksum covers what the words leave out: order, a subset's indices, batches.
        return f"{text} (checksum {self.fingerprint:08x})"

    def plan(self, seed: int, epoch: int) -> EpochPlan:
        """The global batches of an epoch, the same on every rank."""
        if not self.own_order:
            return plan_epoch(
                self.length,
                self.batch_size,
                seed=seed,
                epoch=epoch,
                shuffle=self.shuffle,
                drop_last=self.drop_last,
            )
        with preserve_rng_state():
            # A sampler may draw from any of the global streams, or from generators of its own.
            seed_sample(seed, epoch, _SAMPLER)
            for number, generator in enumerate(_generators(self.batch_sampler, self.sampler)):
                _seed(generator, mix_seed(seed, epoch, _SAMPLER, number))
            if self.batch_sampler is not None:
                batches = [np.asarray(batch, dtype=np.int64) for batch in self.batch_sampler]
                bounds = np.cumsum([0, *(len(batch) for batch in batches)], dtype=np.int64)
                return EpochPlan(np.concatenate([np.empty(0, np.int64), *batches]), bounds)
            order = np.fromiter(_indices(self.sampler), dtype=np.int64)
        return cut(order, self.batch_size, drop_last=self.drop_last)


def _indices(sampler: Sampler[int] | None) -> Iterator[int]:
    return iter(sampler) if sampler is not None else iter(())


_Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def _seed(generator: _Generator, value: int) -> None:
    """Leaves what cannot be seeded as it is, such as a generator of the operating system's."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        with suppress(TypeError, ValueError):  # a bit generator of somebody's own
            bits.state = type(bits)(value).state
    elif isinstance(generator, np.random.RandomState):
        with suppress(TypeError):  # numpy seeds only its Mersenne Twister again
            generator.seed(value & 0xFFFFFFFF)
    else:
        generator.seed(value)


def _generators(*samplers: object) -> list[_Generator]:
    """Those that samplers and the samplers they wrap have as attributes."""
    found: list[_Generator] = []
    waiting, known = list(samplers), {id(sampler) for sampler in samplers}
    while waiting:
        for name, value in getattr(waiting.pop(), "__dict__", {}).items():
            if id(value) in known:
                continue
            known.add(id(value))
            if isinstance(value, _Generator):
                found.append(value)
            elif isinstance(value, Sampler) or name in ("sampler", "batch_sampler"):
                waiting.append(value)
    return found


def _subsets(dataset: object) -> Iterator[Any]:
    """The indices of a Subset and of those it is made of."""
    if isinstance(dataset, Subset):
        yield dataset.indices
        yield from _subsets(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _subsets(part)


def _bytes(indices: Any) -> bytes:
    """Equal for equal indices, whether given as list, range, array or tensor."""
    try:
        array = np.asarray(indices.cpu() if isinstance(indices, torch.Tensor) else indices)
    except ValueError:  # such as tuples of several lengths
        array = np.asarray(["?"] * len(indices))
    if array.dtype.kind in "iu" or not array.size:
        return array.astype(np.int64).tobytes()
    # Names of samples; of other objects only their number, as their text may hold an address.
    return array.tobytes() if array.dtype.kind == "U" else str(len(indices)).encode()


def from_dataset(
    dataset: Dataset[Any],
    batch_size: object,
    *,
    shuffle: bool,
    drop_last: bool,
    collate: Callable[[Any], Any] | None,
    options: dict[str, Any],
) -> Source:
    """A dataset with a global batch size.

    Args:
        dataset: map-style.
        batch_size: samples of a global batch.
        shuffle: a new order every epoch.
        drop_last: leave a last batch that is not full out.
        collate: joins samples into a batch; None: torch's own.
        options: of `torch.utils.data.DataLoader`, those that say how samples are read.

    Raises:
        DataError: the dataset has no length or no index, `batch_size` is wrong, or an option is
            unknown or refused by torch.
    """
    _check_map_style(dataset)
    check_batch_size(batch_size)
    check_options(dataset, options)
    return Source(
        dataset=dataset,
        batch_size=int(batch_size),  # type: ignore[call-overload]
        shuffle=shuffle,
        drop_last=drop_last,
        collate=collate or default_collate,
        options=options,
    )


def check_options(dataset: Dataset[Any], options: dict[str, Any]) -> None:
    """Raises DataError where an option is unknown, or refused by torch."""
    for name in options:
        if name in _ORDERING:
            raise DataError(
                f"{name}= beside a dataset",
                "the order of a dataset's samples follows from shuffle and the seed alone",
                f"give a DataLoader instead: DataLoader(dataset, ..., {name}=...)",
            )
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, (*_OPTIONS, *_ARGUMENTS), n=1)
            raise DataError(
                f"{name}= for a loader",
                "there is no such option",
                f"did you mean {near[0]}?" if near else f"use one of {', '.join(_OPTIONS)}",
            )
    for name, least in (("num_workers", 0), ("prefetch_factor", 1)):
        value = options.get(name)
        if value is not None and (not isinstance(value, int) or value < least):
            raise DataError(
                f"{name}={value!r}",
                f"it is not a whole number of at least {least}",
                f"give such a number, or leave {name} out",
            )
    try:
        with warnings.catch_warnings():  # those come when it is built for use
            warnings.simplefilter("ignore")
            DataLoader(dataset, **options)
    except (TypeError, ValueError) as error:
        raise DataError(
            ", ".join(f"{name}={value!r}" for name, value in options.items()),
            f"torch refuses these loader options: {error}",
            "change the option that it names",
        ) from error


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
            code="LS102",
        )
    common = what_it_reads(loader)
    if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return Source(
            batch_size=_typical(loader),
            batch_sampler=cast("Sampler[list[int]]", loader.batch_sampler),
            **common,
        )
    check_batch_size(loader.batch_size)
    sampler = loader.sampler
    simple = (
        type(sampler) is SequentialSampler
        or (type(sampler) is RandomSampler and not sampler.replacement)
    ) and len(sampler) == len(sampler.data_source) == _length(loader.dataset)
    return Source(
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        shuffle=simple and type(sampler) is RandomSampler,
        sampler=None if simple else sampler,  # type: ignore[arg-type]
        **common,
    )


def what_it_reads(loader: DataLoader[Any]) -> dict[str, Any]:
    """A DataLoader's dataset, its collate function, and how it reads.

    Raises:
        DataError: it has no batch size.
    """
    if loader.batch_size is None and loader.batch_sampler is None:
        raise DataError(
            "a DataLoader with batch_size=None",
            "without a batch size there is no global batch",
            "give the DataLoader a batch_size",
        )
    return {
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


def _typical(loader: DataLoader[Any]) -> int:
    size = getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(size, int) and size > 0:
        return size
    return max(1, -(-_length(loader.dataset) // max(1, _length(loader.batch_sampler))))


def _check_map_style(dataset: object) -> None:
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
