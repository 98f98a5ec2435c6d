"""What the user gave as data, read once: the dataset, the order of its samples, the batch size.

A map-style dataset has an index, and a global batch is a list of indices (`Source`). An iterable
one is read again from its beginning in every epoch: its sample `i` is the `i`-th that it gives, and
global batch `t` holds the samples from `t * B` on, on any number of ranks (`IterableSource`).
"""

from __future__ import annotations

import difflib
import random
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, cast

import numpy as np
import torch
from torch.utils import data as torch_data

from lockstep.batch.plan import (
    CustomPlan,
    Plan,
    batches_in_epoch,
    check_batch_size,
    plan_custom_order,
    plan_epoch,
)
from lockstep.distributed.seeding import mix_seed, preserve_rng_state, seed_sample
from lockstep.errors import DataError, LengthUnknownError, UsageError
from lockstep.settings import check_whole_number

_SAMPLER = 0x5A3  # stands for a sample's index where a sampler's streams are seeded
_OPTIONS = ("num_workers", "prefetch_factor", "persistent_workers", "timeout", "worker_init_fn",
            "multiprocessing_context", "pin_memory")  # fmt: skip
_ORDERING = ("sampler", "batch_sampler", "generator")
# Of `world.loader` itself: what a misspelt option may have meant.
_ARGUMENTS = ("batch_size", "batch_size_per_device", "shuffle", "drop_last", "micro_batch_size",
              "shares", "weight", "sample_rng", "collate_fn", "transform", "shard")  # fmt: skip

Shard = Callable[[int, int], Iterable[Any]] | Literal[False] | None
"""`(start, step)` gives the samples start, start + step, ...; False: the iterable splits itself
over the ranks; None: every rank reads the whole of it and keeps its part."""


SHARDING = {
    "whole": "every rank reads the whole stream and keeps its part",
    "seek": "every rank reads its part of the stream",
    "own": "the stream splits itself over the ranks",
}
"""What `Source.sharding` means."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset and how its samples are ordered and grouped."""

    dataset: torch_data.Dataset[Any]
    batch_size: int
    """Samples of a global batch."""
    collate: Callable[[Any], Any]
    options: dict[str, Any]
    """Of `torch.utils.data.DataLoader`: all of `_OPTIONS`."""
    shuffle: bool = False
    drop_last: bool = False
    sampler: torch_data.Sampler[int] | None = None
    """The user's own order; it must be the same on every rank."""
    batch_sampler: torch_data.Sampler[list[int]] | None = None
    """The user's own global batches."""

    @property
    def length(self) -> int:
        """Samples of an epoch (with a batch sampler of the user's: of the dataset)."""
        return _length(self.sampler if self.sampler is not None else self.dataset)

    @property
    def steps(self) -> int | None:
        """Global batches of an epoch; None: an iterable does not say its length."""
        if self.batch_sampler is not None:
            return _length(self.batch_sampler)
        try:
            return batches_in_epoch(self.length, self.batch_size, drop_last=self.drop_last)
        except LengthUnknownError:
            return None

    @property
    def custom_order(self) -> bool:
        """A sampler of the user's says which samples form the global batches."""
        return self.sampler is not None or self.batch_sampler is not None

    @property
    def sharding(self) -> str | None:
        """How a rank comes by its part of an iterable, in a word; None: there is an index."""
        return None

    @property
    def fingerprint(self) -> int:
        """A CRC-32 over what must be equal on all ranks: sizes, splits, and the user's own order.

        A sampler of the user's is run through once, for epoch 0 of seed 0.
        """
        sizes = (self.length, self.batch_size, self.shuffle, self.drop_last, self.steps or 0)
        found = zlib.crc32(repr(tuple(map(int, sizes))).encode())
        for indices in subset_indices(self.dataset):
            found = zlib.crc32(index_bytes(indices), found)
        plan = self.plan(0, 0) if self.custom_order else None
        if isinstance(plan, CustomPlan):
            found = zlib.crc32(plan.order.tobytes(), found)
            found = zlib.crc32(plan.bounds.tobytes(), found)
        return found

    @property
    def description(self) -> str:
        """What must be equal on all ranks, in words."""
        text = f"a loader over {self.length} samples in global batches of {self.batch_size}"
        # The checksum covers what the words leave out: order, a subset's indices, batches.
        return f"{text} (checksum {self.fingerprint:08x})"

    def plan(self, seed: int, epoch: int) -> Plan:
        """The global batches of an epoch, the same on every rank."""
        if not self.custom_order:
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
                return CustomPlan(np.concatenate([np.empty(0, np.int64), *batches]), bounds)
            order = np.fromiter(cast("torch_data.Sampler[int]", self.sampler), dtype=np.int64)
        return plan_custom_order(order, self.batch_size, drop_last=self.drop_last)


@dataclass(frozen=True, kw_only=True)
class IterableSource(Source):
    """An iterable dataset and how its samples are grouped."""

    transform: Callable[[Any], Any] | None = None
    """Applied to a rank's own samples, each with random streams of its own."""
    shard: Shard = None

    @property
    def length(self) -> int:
        """Samples of an epoch, as the iterable itself says.

        Raises:
            LengthUnknownError: it does not.
        """
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            raise LengthUnknownError(
                f"the length of the stream {type(self.dataset).__name__}",
                "it has no __len__, so its length is known only at its end",
                "count the batches in the loop, or give the stream a __len__: its samples",
            ) from None

    @property
    def description(self) -> str:
        """What must be equal on all ranks, in words."""
        return (
            f"a loader over a stream ({type(self.dataset).__name__}) in global batches of "
            f"{self.batch_size}, drop_last={self.drop_last}, shard={self.sharding}"
        )

    @property
    def sharding(self) -> str:
        """How a rank comes by its part."""
        return "own" if self.shard is False else "whole" if self.shard is None else "seek"


_Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def _seed(generator: _Generator, value: int) -> None:
    """Leaves what cannot be seeded as it is, such as a generator of the operating system's."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        with suppress(TypeError, ValueError):  # a bit generator of somebody's own
            bits.state = type(bits)(value).state
    else:
        with suppress(TypeError):  # a RandomState seeds only its Mersenne Twister again
            generator.seed(value & 0xFFFFFFFF)


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
            elif isinstance(value, torch_data.Sampler) or name in ("sampler", "batch_sampler"):
                waiting.append(value)
    return found


def subset_indices(dataset: object) -> Iterator[Any]:
    """The indices of a Subset and of those it is made of."""
    if isinstance(dataset, torch_data.Subset):
        yield dataset.indices
        yield from subset_indices(dataset.dataset)
    elif isinstance(dataset, torch_data.ConcatDataset):
        for part in dataset.datasets:
            yield from subset_indices(part)


def index_bytes(indices: Any) -> bytes:
    """Equal for equal indices, whether given as list, range, array or tensor."""
    try:
        array = np.asarray(indices.cpu() if isinstance(indices, torch.Tensor) else indices)
    except ValueError:  # such as tuples of several lengths
        return str(len(indices)).encode()
    if array.dtype.kind in "iu" or not array.size:
        return array.astype(np.int64).tobytes()
    # Names of samples; of other objects only their number, as their text may hold an address.
    return array.tobytes() if array.dtype.kind == "U" else str(len(indices)).encode()


def make_source(
    data: Any,
    batch_size: int | None = None,
    *,
    per_device: int | None = None,
    devices: int = 1,
    shuffle: bool = False,
    drop_last: bool = False,
    collate: Callable[[Any], Any] | None = None,
    transform: Callable[[Any], Any] | None = None,
    shard: Shard = None,
    options: dict[str, Any] | None = None,
) -> Source:
    """The source of a loader, from a dataset or a DataLoader; see `World.loader`.

    Raises:
        DataError: data or sizes that make no global batch, or an option is unknown or refused by
            torch.
        UsageError: arguments that do not fit these data.
    """
    dataset = data.dataset if isinstance(data, torch_data.DataLoader) else data
    iterable = isinstance(dataset, torch_data.IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )
    if iterable:
        _check_iterable(dataset, shuffle=shuffle, shard=shard)
    else:
        _check_map_style(dataset, only_of_iterables=transform is not None or shard is not None)
    if not isinstance(data, torch_data.DataLoader):
        if (batch_size is None) == (per_device is None):
            raise DataError(
                f"batch_size={batch_size}, batch_size_per_device={per_device}",
                "exactly one of them says how large the global batch is",
                "give batch_size: the samples of one optimizer step over all devices",
            )
        size = check_batch_size(batch_size if per_device is None else per_device * devices)
        loader = _make_loader(dataset, size, drop_last, collate, options or {})
    else:
        loader = data
        none_given = all(each is None for each in (batch_size, per_device, collate))
        if shuffle or drop_last or options or not none_given:
            raise UsageError(
                "world.loader of a DataLoader with batch_size or loader options",
                "the DataLoader has these already",
                "set them in the DataLoader, or pass its dataset",
            )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise DataError(
            "a DataLoader with batch_size=None",
            "without a batch size there is no global batch",
            "give the DataLoader a batch_size",
        )
    given: dict[str, Any] = {
        "dataset": dataset,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "collate": loader.collate_fn,
        "options": {name: getattr(loader, name) for name in _OPTIONS},
    }
    if iterable:
        _check_workers_may_read_whole(dataset, loader.num_workers)
        return IterableSource(transform=transform, shard=shard, **given)
    return Source(**given | _order(loader, shuffle))


def _order(loader: torch_data.DataLoader[Any], shuffle: bool) -> dict[str, Any]:
    """What a DataLoader over a map-style dataset, or `shuffle`, says about the order of samples."""
    batches, sampler = loader.batch_sampler, cast(Any, loader.sampler)
    if any(
        isinstance(s, torch_data.DistributedSampler)
        for s in (sampler, getattr(batches, "sampler", None))
    ):
        raise UsageError(
            "a DataLoader with a DistributedSampler",
            "it is already sharded; Lockstep would shard each shard again",
            "leave the sampler out and pass shuffle=True: every rank gets its part of the batch",
            code="LS102",
        )
    if type(batches) is not torch_data.BatchSampler or loader.batch_size is None:
        size = getattr(batches, "batch_size", None)
        if not (isinstance(size, int) and size > 0):  # what is typical of its batches
            size = max(1, -(-_length(loader.dataset) // max(1, _length(batches))))
        return {"batch_sampler": batches, "batch_size": size}
    of_torch = type(sampler) is torch_data.SequentialSampler or (
        type(sampler) is torch_data.RandomSampler and not sampler.replacement
    )
    if of_torch and len(sampler) == len(sampler.data_source) == _length(loader.dataset):
        return {"shuffle": shuffle or type(sampler) is torch_data.RandomSampler}
    return {"sampler": sampler}


def _make_loader(
    dataset: torch_data.Dataset[Any],
    batch_size: int,
    drop_last: bool,
    collate: Callable[[Any], Any] | None,
    options: dict[str, Any],
) -> torch_data.DataLoader[Any]:
    """Torch's loader of a dataset, which nobody iterates; it completes and checks the options.

    Raises:
        DataError: an option is unknown, or refused by torch.
    """
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
        if value is not None:
            check_whole_number(f"{name}={value!r}", value, least, DataError)
    try:
        with warnings.catch_warnings():  # those come when one is built for use
            warnings.simplefilter("ignore")
            return torch_data.DataLoader(
                dataset, batch_size, drop_last=drop_last, collate_fn=collate, **options
            )
    except (TypeError, ValueError) as error:
        raise DataError(
            ", ".join(f"{name}={value!r}" for name, value in options.items()),
            f"torch refuses these loader options: {error}",
            "change the option that it names",
        ) from error


def _check_iterable(dataset: object, *, shuffle: bool, shard: object) -> None:
    name = type(dataset).__name__
    if shuffle:
        raise UsageError(
            f"shuffle=True for the stream {name}",
            "a stream is read in its own order",
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
    if _can_be_read_once(dataset):
        raise DataError(
            f"data of type {name}, which is an iterator",
            "it can be read once, and every epoch reads from the beginning",
            "pass an object whose __iter__ starts again, such as an IterableDataset",
        )


def _check_workers_may_read_whole(dataset: Any, num_workers: int) -> None:
    """Refuses several loader workers for a stream whose readers wait for each other.

    MosaicML's StreamingDataset counts the loader workers of all ranks, gives each its own part and
    lets them meet at a barrier in shared memory. Here every worker reads the whole of what its rank
    reads: each takes itself for the only one, and the barrier is met too early or never.
    """
    if num_workers < 2 or not _has_mosaic_stream(dataset):
        return
    raise DataError(
        f"a stream over MosaicML's StreamingDataset with num_workers={num_workers}",
        "its loader workers divide the samples among themselves and wait for each other, while "
        "Lockstep lets every worker read the whole stream; they can hang or fail",
        "read it by index, which works with any number of ranks and workers: a Dataset whose "
        "__len__ returns data.num_samples and whose __getitem__ returns data[index], with "
        "shuffle=True in the DataLoader; or use num_workers=1",
    )


def _has_mosaic_stream(dataset: Any) -> bool:
    """Whether it is MosaicML's StreamingDataset, or has one as an attribute."""
    for each in (dataset, *getattr(dataset, "__dict__", {}).values()):
        for kind in type(each).__mro__:
            if kind.__name__ == "StreamingDataset" and kind.__module__.startswith("streaming."):
                return True
    return False


def _can_be_read_once(dataset: Any) -> bool:
    """Whether `iter(dataset)` is known to go on where it was, instead of beginning again.

    Generators, files and the iterators of Python's own types are like this, and what inherits its
    `__iter__` from `collections.abc.Iterator`. An `__iter__` written in Python may begin again,
    also where the object has a `__next__` as well, as litdata's StreamingDataset has.
    """
    if not hasattr(dataset, "__next__"):
        return False
    method = type(dataset).__iter__
    if method is Iterator.__iter__:
        return True
    return not isinstance(method, FunctionType) and iter(dataset) is dataset


def _check_map_style(dataset: object, *, only_of_iterables: bool) -> None:
    if only_of_iterables:
        raise UsageError(
            "transform= or shard= for a map-style dataset",
            "they are for iterable datasets; of this one each rank reads only its own samples",
            "leave them out, and transform samples in the dataset's __getitem__",
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
