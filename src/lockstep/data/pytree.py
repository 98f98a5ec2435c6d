"""Batches as pytrees: one walk for moving, pinning and emptying them.

A batch is walked through mappings, lists, tuples, named tuples and dataclass instances. Everything
else is a leaf: a tensor, an opaque object that knows how to move itself (`.to`), such as a graph
batch or a `PackedSequence`, or plain data (text, numbers, `None`), which stays as it is.

torch's own pytree walks neither dataclasses nor users' mappings and sequences.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import DataError


def map_tensors(
    batch: Any,
    change: Callable[[Tensor], Tensor],
    opaque: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """The same pytree with every tensor changed by `change` and every opaque leaf by `opaque`.

    Containers keep their types, and `dict`, `UserDict`, `list` and dataclasses their further
    attributes; a container that cannot be built again becomes a plain `dict`, `list` or `tuple`.
    The batch itself is not written to.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if _is_opaque(batch):
        return opaque(batch)
    if _is_container(batch):
        return _rebuilt(batch, lambda child: map_tensors(child, change, opaque))
    return batch


def tensors(batch: Any) -> list[Tensor]:
    """All tensors of a pytree, in order."""
    return [leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor)]


def move(batch: Any, device: torch.device) -> Any:
    """The batch on the device; from pinned memory the copy of a tensor does not block."""
    return map_tensors(
        batch,
        lambda tensor: tensor.to(device, non_blocking=True),
        lambda leaf: leaf.to(device),
    )


def pin(batch: Any) -> Any:
    """The batch with its dense CPU tensors in page-locked memory; no others can be pinned."""
    return map_tensors(
        batch,
        lambda tensor: (
            tensor.pin_memory() if _is_dense(tensor) and tensor.device.type == "cpu" else tensor
        ),
    )


def all_dense(batch: Any) -> bool:
    """Whether all that `move` moves are tensors of one storage each, which streams can share."""
    return all(
        _is_dense(leaf) if isinstance(leaf, Tensor) else not _is_opaque(leaf)
        for leaf in _leaves(batch)
    )


def emptied(batch: Any, count: int | None = None) -> Any:
    """The batch without samples: shapes `(n, *)` become `(0, *)`.

    Lists of text, and sequences that hold one thing for each sample, become empty. Shares no
    memory with the batch.

    Args:
        batch: to be emptied.
        count: its samples, where they are known.

    Raises:
        DataError: the batch holds an opaque object, or a tensor that cannot be cut.
    """
    if isinstance(batch, Tensor):
        return _no_rows(batch)
    if _is_opaque(batch):
        raise _cannot_be_empty(type(batch).__name__)
    if isinstance(batch, list) and not any(
        isinstance(value, Tensor) or _is_opaque(value) or _is_container(value) for value in batch
    ):
        return []
    if type(batch) is tuple and batch and all(isinstance(value, str | bytes) for value in batch):
        return ()  # what default_collate makes of text
    if isinstance(batch, np.ndarray) and batch.ndim:
        return batch[:0].copy()
    if isinstance(batch, list | tuple) and _one_for_each(batch, count):
        return _sequence(batch, [])
    return _rebuilt(batch, lambda child: emptied(child, count)) if _is_container(batch) else batch


def joined(trees: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    """The first pytree with `join(leaves)` in each place, of what all have there.

    Args:
        trees: at least one; alike in their containers.
        join: is given one leaf of each, in their order.

    Raises:
        DataError: they are not alike.
    """
    first = trees[0]
    if _is_opaque(first) or not _is_container(first):
        return join(list(trees))
    children = [_children(tree) for tree in trees]
    if any(found.keys() != children[0].keys() for found in children):
        sizes = ", ".join(
            f"a {type(tree).__name__} of {len(c)}" for tree, c in zip(trees, children, strict=True)
        )
        raise DataError(
            "results of several devices, to be joined",
            f"they are not alike: {sizes}",
            "return containers of the same length and keys whatever the samples are; what differs "
            "from sample to sample belongs into tensors with one row a sample",
        )
    values = iter([joined([found[key] for found in children], join) for key in children[0]])
    return _rebuilt(first, lambda _: next(values))


def _children(batch: Any) -> dict[Any, Any]:
    """What a container holds, by key, position or field, in the order of `_rebuilt`."""
    if not _is_container(batch):
        return {}
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, list | tuple):
        return dict(enumerate(batch))
    return {
        each.name: getattr(batch, each.name) for each in fields(batch) if hasattr(batch, each.name)
    }


def _no_rows(tensor: Tensor) -> Tensor:
    if _is_dense(tensor):
        return (tensor[:0] if tensor.dim() else tensor).clone()
    if tensor.layout is torch.sparse_coo:
        return tensor.index_select(0, torch.empty(0, dtype=torch.int64, device=tensor.device))
    raise _cannot_be_empty(f"{type(tensor).__name__} of layout {tensor.layout}")


def _one_for_each(values: Sequence[Any], count: int | None) -> bool:
    """Whether a sequence is of one thing for each sample, not of one batch for each field.

    These things are alike, and what they hold is not `count` long throughout, as fields are.
    """
    if len(values) != count or len({_kind(value) for value in values}) > 1:
        return False
    if any(isinstance(value, list | tuple) and _one_for_each(value, count) for value in values):
        return False
    found = tensors(values)
    return bool(found) and any(not t.dim() or len(t) != count for t in found)


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dim()
    return type(value), tuple(_children(value)) if _is_container(value) else ()


def _cannot_be_empty(kind: str) -> DataError:
    return DataError(
        f"a batch that holds a {kind}",
        "a rank got no samples of a global batch, and an empty part of this batch type cannot be "
        "made",
        "use drop_last=True, or a collate function that returns tensors",
    )


def _is_opaque(value: Any) -> bool:
    """Whether it moves itself. A dictionary with `.to`, as of a tokenizer, is walked all the same:
    its tensors can then be copied ahead and emptied.
    """
    if isinstance(value, Tensor | dict | UserDict | str | bytes | type):
        return False
    return callable(getattr(value, "to", None))


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) or (
        is_dataclass(value) and not isinstance(value, type)
    )


def _is_dense(tensor: Tensor) -> bool:
    """One storage of its own: not sparse, not nested, and no wrapper around other tensors."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not hasattr(tensor, "__tensor_flatten__")
    )


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Tensor) or _is_opaque(batch) or not _is_container(batch):
        yield batch
        return
    for child in _children(batch).values():
        yield from _leaves(child)


def _rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The container with every child changed."""
    if isinstance(batch, Mapping):
        return _mapping(batch, {key: change(value) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        return _sequence(batch, [change(value) for value in batch])
    return map_fields(batch, change)


def _mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return items
    # Users' classes may raise anything here; a plain dict then holds the same items.
    try:
        if not isinstance(batch, dict | UserDict) or getattr(batch, "__dict__", None) is batch:
            # A shallow copy of these may share what it holds with the batch.
            return type(batch)(items)  # type: ignore[call-arg]
        made = copy.copy(batch)
        for key, value in items.items():
            made[key] = value
        return made
    except Exception:
        return items


def _sequence(batch: list[Any] | tuple[Any, ...], values: list[Any]) -> Any:
    if type(batch) is list:
        return values
    plain = values if isinstance(batch, list) else tuple(values)
    try:
        if isinstance(batch, list):
            made = copy.copy(batch)
            made[:] = values
            return made
        make = getattr(batch, "_make", type(batch))  # `_make` is the named tuples' own
        return make(values)
    except Exception:
        return plain


def map_fields(instance: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a dataclass instance whose fields are changed, also where it is frozen.

    Neither `__init__` nor `__post_init__` is run, which may do anything.
    """
    made = copy.copy(instance)
    for each in fields(instance):
        if hasattr(instance, each.name):
            object.__setattr__(made, each.name, change(getattr(instance, each.name)))
    return made
