"""Batches as pytrees: one walk for moving, pinning and emptying them.

A batch is walked through mappings, lists, tuples, named tuples and dataclass instances. Everything
else is a leaf: a tensor, an opaque object that knows how to move itself (`.to`), such as a graph
batch or a `PackedSequence`, or plain data (text, numbers, `None`), which stays as it is.

torch's own pytree walks neither dataclasses nor users' mappings and sequences.
"""

from __future__ import annotations

import copy
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.distributed.torch_compat import storage_reference
from lockstep.errors import DataError
from lockstep.session.delivery import StorageReference


def map_tensors(
    batch: Any,
    change: Callable[[Tensor], Tensor],
    opaque: Callable[[Any], Any] | None = lambda leaf: leaf,
) -> Any:
    """The same pytree with every tensor changed by `change` and every opaque leaf by `opaque`.

    With `opaque=None` an opaque leaf that is a container, a `PackedSequence` say, is walked too.
    Containers keep their types, and `dict`, `UserDict`, `list` and dataclasses their further
    attributes; a container that cannot be built again becomes a plain `dict`, `list` or `tuple`.
    The batch itself is not written to.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    children = children_of(batch, opaque_too=opaque is None)
    if children is None:
        return opaque(batch) if opaque and is_opaque(batch) else batch
    changed = {key: map_tensors(child, change, opaque) for key, child in children.items()}
    return _rebuilt(batch, changed)


def tensors(batch: Any) -> list[Tensor]:
    """All tensors of a pytree, in order."""
    return [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]


class _ObjectReference:
    """A weak reference to an object that moves itself; two to the same object are equal."""

    def __init__(self, thing: Any) -> None:
        self._reference = weakref.ref(thing)
        self._hash = id(thing)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ObjectReference):
            return False
        mine = self._reference()
        return self is other or (mine is not None and mine is other._reference())

    def expired(self) -> bool:
        """True when the object is gone."""
        return self._reference() is None


def storages(batch: Any) -> list[StorageReference]:
    """Weak references to the storages of all dense tensors of a pytree, and to opaque objects.

    They tell whether another tensor is one of these, or a view of one.
    """
    found: list[StorageReference] = []
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            if _is_dense(leaf):
                found.append(storage_reference(leaf))
        elif is_opaque(leaf):
            with suppress(TypeError):  # not every class allows weak references
                found.append(_ObjectReference(leaf))
    return found


def move(batch: Any, device: torch.device) -> Any:
    """The batch on the device; from pinned memory the copy of a tensor does not block."""
    return map_tensors(batch, lambda t: t.to(device, non_blocking=True), lambda o: o.to(device))


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
        _is_dense(leaf) if isinstance(leaf, Tensor) else not is_opaque(leaf)
        for leaf in leaves(batch)
    )


def emptied(batch: Any, count: int | None = None, *, rows: int = 0, share: bool = False) -> Any:
    """The batch without samples, or with the first alone: shapes `(n, *)` become `(rows, *)`.

    Lists of text, and sequences that hold one thing for each sample, are cut alike.

    Args:
        batch: to be cut.
        count: its samples, where they are known.
        rows: to be left, 0 or 1.
        share: dense tensors become views of those of the batch; False: nothing shares memory.

    Raises:
        DataError: the batch holds an opaque object, or a tensor that cannot be cut.
    """
    if isinstance(batch, Tensor):
        if _is_dense(batch):
            cut = batch[:rows] if batch.dim() else batch
            return cut if share else cut.clone()
        if batch.layout is torch.sparse_coo:
            return batch.index_select(0, torch.arange(rows, device=batch.device))
        raise _cannot_be_empty(f"{type(batch).__name__} of layout {batch.layout}")
    if isinstance(batch, np.ndarray) and batch.ndim:
        return batch[:rows].copy()
    if is_opaque(batch):
        raise _cannot_be_empty(type(batch).__name__)
    children = children_of(batch)
    if children is None:
        return batch
    if is_list_of_plain_data(batch) or (
        isinstance(batch, list | tuple) and lists_one_thing_for_each(batch, count)
    ):
        return _rebuilt(batch, dict(list(children.items())[:rows]))
    cut_children = {
        key: emptied(child, count, rows=rows, share=share) for key, child in children.items()
    }
    return _rebuilt(batch, cut_children)


def joined(trees: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    """The first pytree with `join(leaves)` in each place, of what all have there.

    Args:
        trees: at least one; alike in their containers.
        join: is given one leaf of each, in their order.

    Raises:
        DataError: they are not alike.
    """
    children = [children_of(tree) or {} for tree in trees]
    if children_of(trees[0]) is None:
        return join(list(trees))
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
    values = {key: joined([found[key] for found in children], join) for key in children[0]}
    return _rebuilt(trees[0], values)


def children_of(batch: Any, *, opaque_too: bool = False) -> dict[Any, Any] | None:
    """What a container holds, by key, position or field; None: it is a leaf."""
    if isinstance(batch, Tensor) or (is_opaque(batch) and not opaque_too):
        return None
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, list | tuple):
        return dict(enumerate(batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        named = [each.name for each in fields(batch) if hasattr(batch, each.name)]
        return {name: getattr(batch, name) for name in named}
    return None


def is_list_of_plain_data(batch: Any) -> bool:
    """Whether it lists text or numbers, one for each sample; a tuple of numbers may be a size."""
    if isinstance(batch, list):
        return not any(
            isinstance(v, Tensor) or is_opaque(v) or children_of(v) is not None for v in batch
        )
    # What default_collate makes of text.
    return type(batch) is tuple and bool(batch) and all(isinstance(v, str | bytes) for v in batch)


def lists_one_thing_for_each(values: Sequence[Any], count: int | None) -> bool:
    """Whether a sequence is of one thing for each sample, not of one batch for each field.

    These things are alike, and what they hold is not `count` long throughout, as fields are.
    """
    if len(values) != count or len({_kind(value) for value in values}) > 1:
        return False
    if any(
        isinstance(value, list | tuple) and lists_one_thing_for_each(value, count)
        for value in values
    ):
        return False
    found = tensors(values)
    return bool(found) and any(not t.dim() or len(t) != count for t in found)


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dim()
    return type(value), tuple(children_of(value) or ())


def _cannot_be_empty(kind: str) -> DataError:
    return DataError(
        f"a batch that holds a {kind}",
        "a rank got no samples, and an empty batch of this type cannot be made",
        "use drop_last=True, or a collate function that returns tensors",
    )


def is_opaque(value: Any) -> bool:
    """Whether it moves itself. A dictionary with `.to`, as of a tokenizer, is walked all the same:
    its tensors can then be copied ahead and emptied.
    """
    if isinstance(value, Tensor | dict | UserDict | str | bytes | type):
        return False
    return callable(getattr(value, "to", None))


def _is_dense(tensor: Tensor) -> bool:
    """One storage of its own: not sparse, not nested, and no wrapper around other tensors."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not hasattr(tensor, "__tensor_flatten__")
    )


def leaves(batch: Any) -> Iterator[Any]:
    """All that is no container, in order."""
    children = children_of(batch)
    if children is None:
        yield batch
        return
    for child in children.values():
        yield from leaves(child)


def _rebuilt(batch: Any, children: dict[Any, Any]) -> Any:
    """The container with other children, or without any."""
    values = list(children.values())
    if type(batch) is dict:
        return children
    if type(batch) is list:
        return values
    if not isinstance(batch, Mapping | list | tuple):
        made = copy.copy(batch)  # neither `__init__` nor `__post_init__`, which may do anything
        for name, child in children.items():
            object.__setattr__(made, name, child)  # also where it is frozen
        return made
    try:
        return _of_own_class(batch, children, values)
    except Exception:  # users' classes may raise anything; a plain container then holds the same
        if isinstance(batch, Mapping):
            return children
        return values if isinstance(batch, list) else tuple(values)


def _of_own_class(batch: Any, children: dict[Any, Any], values: list[Any]) -> Any:
    if isinstance(batch, tuple):
        return getattr(batch, "_make", type(batch))(values)  # `_make` is the named tuples' own
    if isinstance(batch, list):
        listed = copy.copy(batch)
        listed[:] = values
        return listed
    if not isinstance(batch, dict | UserDict) or getattr(batch, "__dict__", None) is batch:
        make: Any = type(batch)
        return make(children)  # a shallow copy of these may share what it holds
    made: Any = copy.copy(batch)
    for key, value in children.items():
        made[key] = value
    return made
