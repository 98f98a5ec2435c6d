"""Describes the data of a loader: its dataset, the order of the samples, and the batch size.

`make_source` makes a `Source` from a dataset or a torch DataLoader, and refuses data that cannot be
divided into global batches. A map-style dataset is read by index, so a global batch is a list of
indices. An iterable dataset (`IterableSource`) is read from its beginning in every epoch, and
global batch `t` holds the samples from number `t * batch_size` on, on any number of ranks.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import operator
import random
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Literal, cast

import numpy as np
import torch
from torch.utils import data as torch_data

from lockstep.batch.indices import Indices, ceil_div
from lockstep.batch.plan import (
    CustomPlan,
    Plan,
    batches_in_epoch,
    check_batch_size,
    cut_into_batches,
    plan_epoch,
)
from lockstep.distributed.seeding import mix_seed, preserve_rng_state, seed_sample
from lockstep.errors import DataError, LengthUnknownError, UsageError
from lockstep.settings import check_whole_number
from lockstep.wording import describe_type

_SAMPLER = 0x5A3
"""Takes the place of a sample's index when the random numbers of a sampler are seeded."""
_ITEMS_CONVERTED_AT_ONCE = 2**16
LOADER_OPTIONS = ("num_workers", "prefetch_factor", "persistent_workers", "timeout",
                  "worker_init_fn", "multiprocessing_context", "pin_memory")  # fmt: skip
"""The options of `torch.utils.data.DataLoader` that `world.loader` accepts."""
OPTIONS_OF_ORDER = ("sampler", "batch_sampler", "generator")
"""The options of DataLoader that `world.loader` refuses, with a reason."""
ARGUMENTS_OF_LOADER = ("batch_size", "batch_size_per_device", "shuffle", "drop_last",
                       "micro_batch_size", "shares", "weight", "sample_rng", "collate_fn",
                       "transform", "shard")  # fmt: skip
"""The arguments of `world.loader` itself, which are suggested if an option is misspelt."""

Shard = Callable[[int, int], Iterable[Any]] | Literal[False] | None
"""How an iterable dataset is split over the ranks. With a function `shard(start, step)`, which
returns the samples start, start + step, ..., each rank reads its own part. With False the dataset
splits itself. With None every rank reads the whole dataset and keeps its part."""

SHARDING = {
    "whole": "every rank reads the whole stream and keeps its part",
    "seek": "every rank reads its part of the stream",
    "own": "the stream splits itself over the ranks",
}
"""Descriptions of the values of `Source.sharding`, for the startup summary."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset, and how its samples are ordered and grouped into global batches."""

    dataset: torch_data.Dataset[Any]
    batch_size: int
    """The number of samples in a global batch."""
    collate: Callable[[Any], Any]
    options: dict[str, Any]
    """A value for each of `LOADER_OPTIONS`."""
    shuffle: bool = False
    drop_last: bool = False
    sampler: torch_data.Sampler[int] | None = None
    """The user's own order of the samples, which must be the same on every rank."""
    batch_sampler: torch_data.Sampler[list[int]] | None = None
    """The user's own global batches."""

    @property
    def length(self) -> int:
        """The number of samples in an epoch (if the user has a batch sampler: in the dataset)."""
        if self.sampler is not None:
            return _length(self.sampler)
        return _length(self.dataset)

    @property
    def steps(self) -> int | None:
        """The number of global batches in an epoch, or None for a stream of unknown length."""
        if self.batch_sampler is not None:
            return _length(self.batch_sampler)
        try:
            return batches_in_epoch(self.length, self.batch_size, drop_last=self.drop_last)
        except LengthUnknownError:
            return None

    @property
    def custom_order(self) -> bool:
        """True if a sampler of the user's decides which samples form the global batches."""
        return self.sampler is not None or self.batch_sampler is not None

    @property
    def samplers(self) -> list[object]:
        """The user's batch sampler and sampler, each of which may be None, and those they wrap."""
        return _with_inner_samplers(self.batch_sampler, self.sampler)

    @property
    def follows_set_epoch(self) -> bool:
        """True if the user's sampler, or one inside of it, is told the epoch by `set_epoch`."""
        return any(hasattr(sampler, "set_epoch") for sampler in self.samplers)

    @property
    def sharding(self) -> str | None:
        """How a stream is split over the ranks, a key of `SHARDING`; None if not a stream."""
        return None

    @property
    def fingerprint(self) -> int:
        """A checksum (CRC-32) of everything that must be equal on all ranks.

        It covers sizes, the indices of subsets, and the order of the user's own sampler: that of
        seed 0 and epoch 0, for which a copy of the sampler is asked.
        """
        numbers = (
            self.length,
            self.batch_size,
            int(self.shuffle),
            int(self.drop_last),
            self.steps or 0,  # 0 if it is not known
        )
        checksum = zlib.crc32(repr(numbers).encode())

        # Each further part continues the checksum.
        for indices in subset_indices(self.dataset):
            checksum = zlib.crc32(index_bytes(indices), checksum)

        if self.custom_order:
            # The sampler itself may count how often it was asked, and must stay as it is.
            plan = self._with_copied_samplers()._custom_plan(seed=0, epoch=0)
            checksum = zlib.crc32(plan.order.tobytes(), checksum)
            # The bounds say where in this order the global batches begin and end.
            checksum = zlib.crc32(plan.bounds.tobytes(), checksum)
        return checksum

    @property
    def description(self) -> str:
        """A text that must be equal on all ranks, and that errors quote where it is not."""
        # The checksum covers the rest: the order, a subset's indices, the batches.
        checksum = f"{self.fingerprint:08x}"
        return (
            f"a loader over {self.length} samples in global batches of {self.batch_size} "
            f"(checksum {checksum})"
        )

    def plan(self, seed: int, epoch: int) -> Plan:
        """Returns the global batches of an epoch, the same on every rank."""
        if self.custom_order:
            return self._custom_plan(seed, epoch)
        return plan_epoch(
            self.length,
            self.batch_size,
            seed=seed,
            epoch=epoch,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
        )

    def plan_if_stateless(self, seed: int, epoch: int) -> CustomPlan | None:
        """Asks a copy of the user's sampler for an epoch; returns None if it may keep a state.

        A sampler with a state, such as a count of the epochs, has an attribute that differs after
        it was asked.
        """
        source = self._with_copied_samplers()
        samplers = source.samplers
        if not self._can_be_asked(samplers):
            return None

        before = [_copy_attributes(sampler, self.dataset) for sampler in samplers]
        plan = source._custom_plan(seed, epoch)
        for sampler, attributes in zip(samplers, before, strict=True):
            if not _are_same_attributes(attributes, _attributes(sampler)):
                return None
        return plan

    def _can_be_asked(self, copies: list[object]) -> bool:
        """Returns True if asking copies of the user's samplers does not change the originals.

        - A sampler that could not be copied is among the copies as it is.
        - An attribute that cannot be compared, for example a running generator, may be one that a
          copy shares with the original.
        """
        originals = self.samplers
        for sampler in copies:
            is_original = any(sampler is original for original in originals)
            has_attributes = bool(_attributes(sampler))
            if is_original and has_attributes:
                return False
            if not _can_be_compared(sampler, self.dataset, copies):
                return False
        return True

    def _with_copied_samplers(self) -> Source:
        """Returns a source whose samplers can be asked while the user's stay as they are."""
        return replace(
            self,
            sampler=_copy_sampler(self.sampler, self.dataset),
            batch_sampler=_copy_sampler(self.batch_sampler, self.dataset),
        )

    def _custom_plan(self, seed: int, epoch: int) -> CustomPlan:
        """Asks the user's sampler for the order of an epoch, and forms the global batches.

        All random number generators that the sampler may use are seeded first, so it returns the
        same order on every rank and after a resume.
        """
        with preserve_rng_state():
            # The sampler may use global generators (of torch, numpy or Python) or its own.
            _seed_global_generators(seed, epoch)
            generators = _find_generators(self.batch_sampler, self.sampler)
            for number, generator in enumerate(generators):
                _seed_generator(generator, mix_seed(seed, epoch, _SAMPLER, number))

            if self.batch_sampler is not None:
                return _plan_of_batches(self.batch_sampler, epoch)

            # A sampler only orders the samples.
            sampler = cast("torch_data.Sampler[int]", self.sampler)
            order = _as_indices(sampler, named_in_error=sampler)
            return cut_into_batches(order, self.batch_size, drop_last=self.drop_last)


def _plan_of_batches(batch_sampler: Iterable[Iterable[int]], epoch: int) -> CustomPlan:
    """Takes the batches of a user's batch sampler as the global batches.

    Args:
        batch_sampler: the batch sampler.
        epoch: number of the epoch, for the error.

    Raises:
        DataError: a batch has no samples, or not their indices.
    """
    batches = [_as_indices(batch, named_in_error=batch_sampler) for batch in batch_sampler]
    sizes = [len(batch) for batch in batches]
    if 0 in sizes:
        raise DataError(
            f"batch {sizes.index(0)} of {describe_type(batch_sampler)} in epoch {epoch}",
            "it has no samples, and a global batch is an optimizer step",
            "let the batch sampler leave empty batches out",
        )

    no_samples = np.empty(0, np.int64)  # np.concatenate needs at least one array
    order = np.concatenate([no_samples, *batches])
    # Global batch t consists of order[bounds[t] : bounds[t + 1]].
    bounds = np.cumsum([0, *sizes], dtype=np.int64)
    return CustomPlan(order, bounds)


def _as_indices(items: Iterable[int], *, named_in_error: object) -> Indices:
    """Returns what a user's sampler yields as an array.

    An error in the code of a sampler of the user's is raised as it is.

    Args:
        items: the sampler, or a batch of a batch sampler.
        named_in_error: the sampler or batch sampler.

    Raises:
        DataError: these are not the indices of samples.
    """
    if isinstance(items, torch.Tensor | np.ndarray):
        items = items.tolist()  # to iterate over it is faster

    try:
        iterator = iter(items)
    except TypeError as error:
        # It cannot be iterated over, or else this is an error in its own `__iter__`.
        is_iterable = hasattr(items, "__iter__") or hasattr(items, "__getitem__")
        if is_iterable:
            raise
        raise _no_indices(named_in_error, error) from error

    parts = [np.empty(0, np.int64)]  # np.concatenate needs at least one array
    while part := list(itertools.islice(iterator, _ITEMS_CONVERTED_AT_ONCE)):
        try:
            # `np.fromiter` alone would cut 1.5 to 1, and take "7" for 7.
            parts.append(np.fromiter(map(operator.index, part), dtype=np.int64))
        except (TypeError, ValueError, OverflowError) as error:
            raise _no_indices(named_in_error, error) from error
    return np.concatenate(parts)


def _no_indices(sampler: object, error: Exception) -> DataError:
    """Makes the error for a sampler or batch sampler that yields something else than indices."""
    return DataError(
        f"the order of {describe_type(sampler)}",
        f"what it yields cannot be read as indices of samples: {error}",
        "let it yield the number of each sample, and put what else belongs to a sample into "
        "the dataset",
    )


@dataclass(frozen=True, kw_only=True)
class IterableSource(Source):
    """An iterable dataset, and how its samples are grouped into global batches."""

    transform: Callable[[Any], Any] | None = None
    """A function that is applied to the samples which this rank trains on."""
    shard: Shard = None

    @property
    def length(self) -> int:
        """The number of samples in an epoch, as returned by `len(dataset)`.

        Raises:
            LengthUnknownError: the dataset has no length.
        """
        # A stream may have a `__len__` that returns the number of its samples.
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
        """A text that must be equal on all ranks, and that errors quote where it is not."""
        return (
            f"a loader over a stream ({type(self.dataset).__name__}) in global batches of "
            f"{self.batch_size}, drop_last={self.drop_last}, shard={self.sharding}"
        )

    @property
    def sharding(self) -> str:
        """How the stream is split over the ranks, a key of `SHARDING`."""
        if self.shard is None:
            return "whole"
        if self.shard is False:
            return "own"
        return "seek"


def _copy_sampler(sampler: Any, dataset: object) -> Any:
    """Returns a copy that can be iterated while the user's sampler stays as it is.

    The samplers inside it are copied too, and lists, sets, dicts and one-dimensional arrays, which
    it may shuffle in place. Everything else is shared.

    Args:
        sampler: a sampler, a batch sampler or None. One that cannot be copied is returned itself.
        dataset: the dataset, which is shared whatever it is.
    """
    try:
        duplicate = copy.copy(sampler)
    except Exception:  # its class decides how it is copied, so any error is possible
        return sampler
    # `_copy_attributes` copies containers and vectors. Samplers inside of this sampler are copied
    # here. But it may refer to itself, and copying it again would never end.
    for name, value in _copy_attributes(duplicate, dataset).items():
        if _is_sampler(name, value) and value is not sampler:
            value = _copy_sampler(value, dataset)
        duplicate.__dict__[name] = value
    return duplicate


def _attributes(sampler: object) -> dict[str, Any]:
    """Returns the attributes of a sampler; a list that serves as a sampler has none."""
    return getattr(sampler, "__dict__", {})


def _copy_attributes(sampler: object, dataset: object) -> dict[str, Any]:
    """Returns the attributes of a sampler, with copies of containers and of vectors."""
    attributes = dict(_attributes(sampler))
    for name, value in attributes.items():
        if value is dataset:
            continue
        if type(value) in _CONTAINERS:
            attributes[name] = copy.copy(value)
        elif _is_vector(value):
            attributes[name] = _clone(value)
    return attributes


_CONTAINERS = (list, dict, set, deque)
_PLAIN_VALUES = (int, float, str, bytes, range, type(None), np.generic)
"""Types whose values do not change."""


def _is_vector(value: object) -> bool:
    """Tells whether a value is an array of numbers, in memory, with at most one dimension.

    A dataset usually has more dimensions, and would be expensive to copy.
    """
    if type(value) is torch.Tensor:
        return value.ndim <= 1
    return type(value) is np.ndarray and value.ndim <= 1 and not value.dtype.hasobject


def _clone(vector: Any) -> Any:
    """Returns a copy of a tensor or an array with data of its own."""
    return vector.clone() if isinstance(vector, torch.Tensor) else vector.copy()


def _can_be_compared(sampler: object, dataset: object, samplers: list[object]) -> bool:
    """Returns True if the attributes of a sampler show whether a pass over it has changed it.

    Args:
        sampler: the sampler.
        dataset: the dataset, which a sampler does not change.
        samplers: all samplers, each of which is compared by itself.
    """
    if not hasattr(sampler, "__dict__"):
        # A pass over one of these changes nothing.
        return sampler is None or type(sampler) in (list, tuple, range)

    for value in _attributes(sampler).values():
        is_dataset = value is dataset or isinstance(value, torch_data.Dataset)
        is_seeded_for_each_epoch = isinstance(value, _Generator)
        is_compared_by_itself = any(value is each for each in samplers)
        if is_dataset or is_seeded_for_each_epoch or is_compared_by_itself:
            continue
        if not _is_comparable(value):  # an iterator, for example, does not show how far it was read
            return False
    return True


def _is_comparable(value: Any) -> bool:
    """Returns True for a plain value, a container of plain values, or a vector of numbers."""
    if _is_vector(value):
        return True

    parts = [value]
    if type(value) is dict:
        parts = [*value.keys(), *value.values()]
    elif type(value) in (*_CONTAINERS, tuple):
        parts = value
    types_of_parts = set(map(type, parts))  # a list of a million indices has one type
    return all(issubclass(each, _PLAIN_VALUES) for each in types_of_parts)


def _are_same_attributes(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Returns True if a pass over a sampler has left its attributes as they were."""
    if before.keys() != now.keys():
        return False
    return all(_are_equal(value, now[name]) for name, value in before.items())


def _are_equal(value: Any, other: Any) -> bool:
    """Returns True if an attribute of a sampler still has the same value."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if _is_vector(value):
        is_tensor = isinstance(value, torch.Tensor)
        return torch.equal(value, other) if is_tensor else np.array_equal(value, other)

    can_be_compared = isinstance(value, (*_CONTAINERS, tuple, *_PLAIN_VALUES))
    if not can_be_compared:
        return False  # it counts as changed
    return bool(value == other)


def _is_sampler(name: str, value: object) -> bool:
    """Tells whether an attribute of a sampler is a sampler that it wraps."""
    # Not every sampler inherits from torch's class, so the name is taken as a hint too.
    return isinstance(value, torch_data.Sampler) or name in ("sampler", "batch_sampler")


_Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def _find_generators(*samplers: object) -> list[_Generator]:
    """Finds the random number generators that samplers hold as attributes.

    Samplers that wrap other samplers are searched recursively.

    Args:
        *samplers: the user's sampler and batch sampler, each of which may be None.
    """
    generators: dict[int, _Generator] = {}  # by their ids: several samplers may share one
    for sampler in _with_inner_samplers(*samplers):
        for value in _attributes(sampler).values():
            if isinstance(value, _Generator):
                generators[id(value)] = value
    return list(generators.values())


def _with_inner_samplers(*samplers: object) -> list[object]:
    """Returns samplers, and those that they wrap.

    Args:
        *samplers: the user's sampler and batch sampler, each of which may be None.
    """
    found: list[object] = []
    to_search = list(samplers)
    ids_found = {id(sampler) for sampler in samplers}  # so that a cycle does not go on forever
    while to_search:
        sampler = to_search.pop()
        found.append(sampler)
        for name, value in _attributes(sampler).items():
            if _is_sampler(name, value) and id(value) not in ids_found:
                ids_found.add(id(value))
                to_search.append(value)
    return found


def _seed_global_generators(seed: int, epoch: int) -> None:
    """Seeds the global generators of torch, NumPy and Python for the order of an epoch."""
    # In place of the index of a sample, `_SAMPLER` gives a seed that no sample has.
    seed_sample(seed, epoch, _SAMPLER)


def _seed_generator(generator: _Generator, value: int) -> None:
    """Seeds a random number generator if it supports that; `random.SystemRandom` does not."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif isinstance(generator, np.random.Generator):
        # NumPy's Generator has no method for seeding. So a new bit generator is made with the seed,
        # and its state is copied. A user-defined bit generator may not allow that.
        bits = generator.bit_generator
        with suppress(TypeError, ValueError):
            new_bits = type(bits)(value)
            bits.state = new_bits.state
    else:
        seed_of_32_bits = value & 0xFFFFFFFF  # RandomState takes no larger seed
        # A RandomState can be based on a bit generator that cannot be seeded.
        with suppress(TypeError):
            generator.seed(seed_of_32_bits)


def subset_indices(dataset: object) -> Iterator[Any]:
    """Yields the indices of each `torch.utils.data.Subset` that a dataset is composed of."""
    if isinstance(dataset, torch_data.Subset):
        yield dataset.indices
        yield from subset_indices(dataset.dataset)
    elif isinstance(dataset, torch_data.ConcatDataset):
        for part in dataset.datasets:
            yield from subset_indices(part)


def index_bytes(indices: Any) -> bytes:
    """Serializes the indices of a subset so that they can be compared between processes.

    A list, a range, an array and a tensor with the same numbers give the same bytes. Of indices
    that are neither integers nor strings, only their count is used: no text of them is certain to
    be the same in another process, as `repr` may contain an address.
    """
    if len(indices) == 0:
        return b""

    length_as_bytes = str(len(indices)).encode()
    if isinstance(indices, torch.Tensor):
        indices = indices.cpu()
    try:
        array = np.asarray(indices)
    except ValueError:  # NumPy cannot convert, for example, tuples of different lengths
        return length_as_bytes

    is_integer = array.dtype.kind in "iu"  # "i" means signed and "u" unsigned
    if is_integer:
        return array.astype(np.int64).tobytes()
    is_text = array.dtype.kind == "U"
    if is_text:
        return array.tobytes()
    return length_as_bytes


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
    """Makes the source of a loader from a dataset or a torch DataLoader; see `World.loader`.

    Args:
        data: the dataset or DataLoader.
        batch_size: number of samples in a global batch.
        per_device: number of samples in a global batch for each device, instead of `batch_size`.
        devices: number of devices in the run.
        shuffle: True to shuffle the samples in each epoch.
        drop_last: True to leave out a last global batch that is not full.
        collate: function that makes a batch from a list of samples; None for torch's.
        transform: function that is applied to each sample of an iterable dataset.
        shard: how an iterable dataset is split over the ranks (see `Shard`).
        options: further options of torch's DataLoader by name (`LOADER_OPTIONS`).

    Raises:
        DataError: the data or the sizes do not make global batches, or an option is unknown or
            refused by torch.
        UsageError: the arguments do not fit the kind of dataset.
    """
    is_loader = isinstance(data, torch_data.DataLoader)
    dataset = data.dataset if is_loader else data

    # A dataset with both `__iter__` and `__getitem__` is read by index.
    is_iterable = isinstance(dataset, torch_data.IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )
    if is_iterable:
        _check_iterable(dataset, shuffle=shuffle, shard=shard)
    else:
        _check_map_style(dataset, transform=transform, shard=shard)

    if is_loader:
        sizes_are_given = batch_size is not None or per_device is not None
        if sizes_are_given or collate is not None or shuffle or drop_last or options:
            raise UsageError(
                "world.loader of a DataLoader with batch_size or loader options",
                "the DataLoader has these already",
                "set them in the DataLoader, or pass its dataset",
            )
        loader = data
    else:
        size = _global_batch_size(batch_size, per_device, devices)
        loader = _make_torch_loader(dataset, size, drop_last, collate, options or {})
    if loader.batch_size is None and loader.batch_sampler is None:
        raise DataError(
            "a DataLoader with batch_size=None",
            "without a batch size there is no global batch",
            "give the DataLoader a batch_size",
        )

    fields: dict[str, Any] = {
        "dataset": dataset,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "collate": loader.collate_fn,
        "options": {name: getattr(loader, name) for name in LOADER_OPTIONS},
    }
    if is_iterable:
        _check_mosaic_has_one_worker(dataset, loader.num_workers)
        return IterableSource(transform=transform, shard=shard, **fields)
    fields.update(_fields_of_order(loader, shuffle))
    return Source(**fields)


def _global_batch_size(batch_size: int | None, per_device: int | None, devices: int) -> int:
    """Returns the number of samples in a global batch.

    Args:
        batch_size: that number, or None.
        per_device: the number of samples for each device, or None.
        devices: number of devices in the run.

    Raises:
        DataError: not exactly one of `batch_size` and `per_device` is given, or it is not a valid
            size.
    """
    both_are_given = batch_size is not None and per_device is not None
    none_is_given = batch_size is None and per_device is None
    if both_are_given or none_is_given:
        raise DataError(
            f"batch_size={batch_size}, batch_size_per_device={per_device}",
            "exactly one of them says how large the global batch is",
            "give batch_size: the samples of one optimizer step over all devices",
        )
    if per_device is not None:
        return check_batch_size(per_device * devices)
    return check_batch_size(batch_size)


def _fields_of_order(loader: torch_data.DataLoader[Any], shuffle: bool) -> dict[str, Any]:
    """Finds out in which order a DataLoader reads its samples.

    Args:
        loader: a DataLoader over a map-style dataset.
        shuffle: the argument of `World.loader`.

    Returns:
        Fields of `Source`. If the DataLoader has a batch sampler of the user's, these are
        `batch_sampler` and `batch_size`. If it has a sampler of the user's, it is `sampler`.
        Otherwise it is `shuffle`, and Lockstep chooses the order.

    Raises:
        UsageError: the DataLoader has a DistributedSampler.
    """
    batch_sampler = loader.batch_sampler
    sampler: Any = loader.sampler
    for possibly_sharded in (sampler, getattr(batch_sampler, "sampler", None)):
        if isinstance(possibly_sharded, torch_data.DistributedSampler):
            raise UsageError(
                "a DataLoader with a DistributedSampler",
                "it is already sharded; Lockstep would shard each shard again",
                "leave the sampler out and pass shuffle=True: every rank gets its part of the "
                "batch",
                code="LS102",
            )

    if _has_users_batch_sampler(loader):
        size = _size_of_batches(batch_sampler, loader.dataset)
        return {"batch_sampler": batch_sampler, "batch_size": size}

    # Lockstep's own order, which it can resume anywhere, takes the place of torch's samplers.
    if _is_torchs_sampler_of_each_sample(sampler, loader.dataset):
        is_random = type(sampler) is torch_data.RandomSampler
        return {"shuffle": shuffle or is_random}

    return {"sampler": sampler}


def _has_users_batch_sampler(loader: torch_data.DataLoader[Any]) -> bool:
    """Returns True if the user has passed a batch sampler, False if torch has created one."""
    is_torchs_class = type(loader.batch_sampler) is torch_data.BatchSampler

    # The user's batch sampler may be of torch's class, too. A DataLoader with a batch sampler of
    # the user's has no batch_size.
    return not is_torchs_class or loader.batch_size is None


def _size_of_batches(batch_sampler: Any, dataset: Any) -> int:
    """Returns the batch size of the user's batch sampler; if unknown, the mean of its batches."""
    size = getattr(batch_sampler, "batch_size", None)
    if isinstance(size, int) and size > 0:
        return size
    num_batches = max(1, _length(batch_sampler))
    return max(1, ceil_div(_length(dataset), num_batches))


def _is_torchs_sampler_of_each_sample(sampler: Any, dataset: Any) -> bool:
    """Returns True for torch's sampler that yields each sample once, in order or shuffled.

    These are a SequentialSampler and a RandomSampler, with three exceptions:

    - a RandomSampler with `replacement=True`;
    - a RandomSampler with `num_samples=...`, if that is not the number of samples;
    - a sampler that was made for another dataset.
    """
    if type(sampler) not in (torch_data.SequentialSampler, torch_data.RandomSampler):
        return False
    if getattr(sampler, "replacement", False):
        return False
    return len(sampler) == len(sampler.data_source) == _length(dataset)


def _make_torch_loader(
    dataset: torch_data.Dataset[Any],
    batch_size: int,
    drop_last: bool,
    collate: Callable[[Any], Any] | None,
    options: dict[str, Any],
) -> torch_data.DataLoader[Any]:
    """Makes a torch DataLoader, which checks the options and fills in their defaults.

    The DataLoader is never iterated.

    Args:
        dataset: the dataset.
        batch_size: number of samples in a global batch.
        drop_last: True to leave out a last global batch that is not full.
        collate: function that makes a batch from a list of samples; None for torch's.
        options: further options from the user, by name.

    Raises:
        DataError: an option is unknown, or refused by torch.
    """
    for name in options:
        if name in OPTIONS_OF_ORDER:
            raise DataError(
                f"{name}= beside a dataset",
                "the order of a dataset's samples follows from shuffle and the seed alone",
                f"give a DataLoader instead: DataLoader(dataset, ..., {name}=...)",
            )
        if name not in LOADER_OPTIONS:
            # A misspelt name may also be meant for an argument of `World.loader` itself.
            known = (*LOADER_OPTIONS, *ARGUMENTS_OF_LOADER)
            similar = difflib.get_close_matches(name, known, n=1)
            advice = f"use one of {', '.join(LOADER_OPTIONS)}"
            if similar:
                advice = f"did you mean {similar[0]}?"
            raise DataError(f"{name}= for a loader", "there is no such option", advice)

    for name, least in (("num_workers", 0), ("prefetch_factor", 1)):
        value = options.get(name)
        if value is not None:
            check_whole_number(f"{name}={value!r}", value, least, DataError)

    try:
        # The same warnings appear again when the DataLoader that reads the data is made.
        with warnings.catch_warnings():
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
    """Checks an iterable dataset and the arguments of its loader.

    Args:
        dataset: the iterable dataset.
        shuffle: the argument of `World.loader`.
        shard: the argument of `World.loader`, which must be a function, False or None.

    Raises:
        UsageError: the arguments do not fit an iterable dataset.
        DataError: the dataset is an iterator that can be read only once.
    """
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
    if _can_be_read_only_once(dataset):
        raise DataError(
            f"data of type {name}, which is an iterator",
            "it can be read once, and every epoch reads from the beginning",
            "pass an object whose __iter__ starts again, such as an IterableDataset",
        )


def _check_mosaic_has_one_worker(dataset: Any, num_workers: int) -> None:
    """Raises DataError if MosaicML's StreamingDataset is used with several loader workers.

    A StreamingDataset splits the samples over the loader workers of all ranks and lets the workers
    wait for each other at a barrier in shared memory. Lockstep lets every worker read everything
    that its rank reads, and hides the other workers from the dataset. Each worker would wait at the
    barrier as if it were the only one, so the barrier would open too early or never.
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
    """Returns True for MosaicML's StreamingDataset, or a dataset with one among its attributes.

    The class is recognised by its name, so that the library need not be installed.
    """
    attributes = getattr(dataset, "__dict__", {}).values()
    for value in (dataset, *attributes):
        for base in type(value).__mro__:
            if base.__name__ == "StreamingDataset" and base.__module__.startswith("streaming."):
                return True
    return False


def _can_be_read_only_once(dataset: Any) -> bool:
    """Returns True if the dataset is known to be an iterator, which does not start again.

    These are generators, files, the iterators of built-in types, and classes that inherit their
    `__iter__` from `collections.abc.Iterator`.
    """
    if not hasattr(dataset, "__next__"):
        return False

    method = type(dataset).__iter__
    inherits_from_iterator = method is Iterator.__iter__  # which returns the object itself
    if inherits_from_iterator:
        return True
    is_written_in_python = isinstance(method, FunctionType)
    if is_written_in_python:  # it may start again, as that of litdata's StreamingDataset does
        return False

    # A method that is implemented in C, such as that of a generator or a file, has no side effects
    # and can be tried. It returns the object itself if it is an iterator.
    return iter(dataset) is dataset


def _check_map_style(dataset: object, *, transform: object, shard: object) -> None:
    """Checks a map-style dataset and the arguments of its loader.

    Args:
        dataset: the dataset.
        transform: the argument of `World.loader`, which is only for iterable datasets.
        shard: the argument of `World.loader`, which is only for iterable datasets.

    Raises:
        UsageError: `transform` or `shard` is given.
        DataError: the dataset has no `__getitem__` or no length.
    """
    # Of a map-style dataset each rank reads only its own samples, so nothing needs to be split.
    if transform is not None or shard is not None:
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
    _length(dataset)  # raises if it has none


def _length(data: object) -> int:
    """Returns the length of a dataset or a sampler; raises DataError if it has none."""
    try:
        if isinstance(data, Sized):
            return len(data)
    except (TypeError, NotImplementedError):
        pass
    raise DataError(
        f"{describe_type(data)} without a length",
        "len() does not work on it, so an epoch cannot be cut into global batches",
        "give it a __len__ that returns the number of samples (batches for a batch sampler)",
    )
