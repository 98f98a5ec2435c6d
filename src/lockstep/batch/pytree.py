"""Moves, pins, cuts and joins batches, which are trees of containers and tensors.

*Containers* are mappings, lists, tuples, named tuples and dataclass instances. Everything else is a
*leaf*: a tensor; an *opaque* object that moves itself with `.to`, such as a graph batch or a
`PackedSequence`; or plain data (text, numbers, `None`).

torch's own pytree supports neither dataclasses nor users' mappings and sequences.
"""

from __future__ import annotations

import copy
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim import Optimizer

from lockstep.errors import DataError
from lockstep.session.delivery import StorageReference
from lockstep.torch_compat import storage_reference
from lockstep.wording import describe_type, with_article

_MAX_OBJECT_DEPTH = 3
"""How many objects inside of each other `map_tensors_and_attributes` looks into. A cache of a
transformer holds layers, which hold tensors. An object may also refer to half of the program."""


def map_tensors(
    batch: Any,
    change: Callable[[Tensor], Tensor],
    change_opaque: Callable[[Any], Any] | None = None,
    *,
    inside_opaque: bool = False,
    change_other: Callable[[Any], Any] | None = None,
) -> Any:
    """Returns a copy of a pytree in which each tensor is replaced by `change(tensor)`.

    Containers keep their types; `dict`, `UserDict`, `list` and dataclasses also keep additional
    attributes. A container that cannot be rebuilt becomes a plain `dict`, `list` or `tuple`.

    For example, the batch `{"image": tensor, "graph": graph, "name": "a.png"}` becomes
    `{"image": change(tensor), "graph": change_opaque(graph), "name": change_other("a.png")}`.

    Args:
        batch: the pytree, which is not modified.
        change: function that is called with each tensor.
        change_opaque: function that is called with each opaque object and returns what takes its
            place; by default opaque objects stay as they are.
        inside_opaque: True to look inside of opaque objects that are containers, such as a
            `PackedSequence`, and change the tensors in them.
        change_other: function that is called with each leaf that is neither a tensor nor opaque,
            and returns what takes its place; by default these leaves stay as they are.
    """
    if isinstance(batch, Tensor):
        return change(batch)

    # With `inside_opaque`, an opaque object that is a container has children, too.
    children = children_of(batch, opaque_too=inside_opaque)
    if children is not None:
        changed = {}
        for key, child in children.items():
            changed[key] = map_tensors(
                child,
                change,
                change_opaque,
                inside_opaque=inside_opaque,
                change_other=change_other,
            )
        return _rebuild(batch, changed)

    change_leaf = change_opaque if is_opaque(batch) else change_other
    return batch if change_leaf is None else change_leaf(batch)


def map_tensors_and_attributes(
    value: Any,
    change: Callable[[Tensor], Tensor],
    change_distribution: Callable[[Distribution], Distribution] | None = None,
    *,
    object_depth: int = 0,
) -> Any:
    """Does what `map_tensors` does, and also changes the tensors in attributes of other objects.

    An object of any class, such as a `SimpleNamespace`, is copied (shallowly) if one of its
    attributes changes. Modules, optimizers and classes are left alone: a model may return an object
    that refers to the model.

    Args:
        value: the pytree, which is not modified.
        change: function that is called with each tensor. It returns the tensor itself to leave it
            as it is.
        change_distribution: function that is called with each probability distribution. (To change
            its tensors is not enough, as it also stores their shape.) By default distributions stay
            as they are.
        object_depth: in how many objects the value is nested.
    """
    # Every leaf that is no tensor is an object with attributes, whether it is opaque or not.
    change_object = partial(
        _change_attributes,
        change=change,
        change_distribution=change_distribution,
        object_depth=object_depth,
    )
    return map_tensors(value, change, change_opaque=change_object, change_other=change_object)


def _change_attributes(
    instance: Any,
    change: Callable[[Tensor], Tensor],
    change_distribution: Callable[[Distribution], Distribution] | None,
    object_depth: int,
) -> Any:
    """Returns an object, or a copy of it if a tensor in its attributes changes.

    See `map_tensors_and_attributes` for the arguments. An object that is nested in
    `_MAX_OBJECT_DEPTH` others stays as it is.
    """
    if isinstance(instance, Distribution):
        return instance if change_distribution is None else change_distribution(instance)

    is_left_alone = isinstance(instance, type | ModuleType | nn.Module | Optimizer)
    if is_left_alone or object_depth == _MAX_OBJECT_DEPTH:
        return instance

    changed = {}
    for name, attribute in _attributes_of(instance).items():
        new_attribute = map_tensors_and_attributes(
            attribute, change, change_distribution, object_depth=object_depth + 1
        )
        if not _is_same(attribute, new_attribute):
            changed[name] = new_attribute

    return _with_attributes(instance, changed) if changed else instance


def tensors_and_attributes(value: Any) -> list[Tensor]:
    """Returns all tensors of a pytree, and those in attributes of the objects in it."""
    collected: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        collected.append(tensor)
        return tensor

    map_tensors_and_attributes(value, collect)  # only to visit the tensors; its result is dropped
    return collected


def _attributes_of(instance: Any) -> dict[str, Any]:
    """Returns the attributes that an object itself holds, by name; none for text and numbers."""
    attributes = dict(getattr(instance, "__dict__", {}))
    for base in type(instance).__mro__:
        slots = base.__dict__.get("__slots__", ())
        if isinstance(slots, str):  # `__slots__ = "x"` is one slot
            slots = (slots,)
        for name in slots:
            if name not in {"__dict__", "__weakref__"} and hasattr(instance, name):
                attributes[name] = getattr(instance, name)
    return attributes


def _is_same(old: Any, new: Any) -> bool:
    """Returns True if two trees have the same leaves.

    Containers are not compared, because `map_tensors` makes new ones.
    """
    if old is new:
        return True
    old_leaves = list(leaves(old))
    new_leaves = list(leaves(new))
    if len(old_leaves) != len(new_leaves):
        return False
    pairs = zip(old_leaves, new_leaves, strict=True)
    return all(old_leaf is new_leaf for old_leaf, new_leaf in pairs)


def tensors(batch: Any) -> list[Tensor]:
    """Returns all tensors of a pytree, in order."""
    return [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]


class _ObjectReference:
    """A weak reference to an opaque object, for recognising the object later.

    Two references are equal if they refer to the same object, even if it is not hashable.
    """

    def __init__(self, opaque: Any) -> None:
        self._reference = weakref.ref(opaque)
        self._hash = id(opaque)  # remains valid after the object is gone

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ObjectReference):
            return False
        if self is other:  # also if the object is gone
            return True
        referent = self._reference()
        return referent is not None and referent is other._reference()

    def expired(self) -> bool:
        """Returns True once the object is gone."""
        return self._reference() is None


def storage_references(batch: Any) -> list[StorageReference]:
    """Returns weak references to the storages of all dense tensors in a pytree.

    They make it possible to recognise these tensors, and views of them, later. An opaque object is
    represented by a reference to itself.
    """
    references: list[StorageReference] = []
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            if _is_dense(leaf):
                references.append(storage_reference(leaf))
        elif is_opaque(leaf):
            with suppress(TypeError):  # not every class allows weak references
                references.append(_ObjectReference(leaf))

    return references


def move(batch: Any, device: torch.device) -> Any:
    """Moves a batch to a device. Tensors in pinned memory are copied without blocking.

    It is only used for copies to a device. A copy from a GPU to the CPU would have to block.
    """

    def move_tensor(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    def move_opaque(opaque: Any) -> Any:
        return opaque.to(device)

    return map_tensors(batch, move_tensor, move_opaque)


def pin(batch: Any) -> Any:
    """Copies the dense CPU tensors of a batch to page-locked memory."""

    def pin_tensor(tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if _can_be_pinned(tensor) else tensor

    return map_tensors(batch, pin_tensor)


def bytes_to_pin(batch: Any) -> int:
    """Returns how many bytes `pin` would copy."""
    return sum(tensor.nbytes for tensor in tensors(batch) if _can_be_pinned(tensor))


def _can_be_pinned(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and _is_dense(tensor)


def all_dense(batch: Any) -> bool:
    """Returns True if the batch has only dense tensors and plain data.

    Only dense tensors can be copied on one CUDA stream and used on another.
    """
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            if not _is_dense(leaf):
                return False
        elif is_opaque(leaf):
            return False
    return True


def cut_to_rows(
    batch: Any, num_samples: int | None = None, *, keep: int = 0, share: bool = False
) -> Any:
    """Removes all samples from a batch (`keep=0`), or all but the first one (`keep=1`).

    With `keep=1`, a tensor of shape `(n, *)` becomes `(1, *)`, and a list with one item for each
    sample becomes a list of 1 item. *Opaque* objects, which move themselves with `.to`, cannot be
    cut.

    Args:
        batch: the batch, which is not modified.
        num_samples: number of samples in the batch; None if it is not known.
        keep: how many samples remain, 0 or 1.
        share: True to return views of the dense tensors. Otherwise the result shares no memory with
            the batch.

    Raises:
        DataError: the batch holds an opaque object, or a tensor that cannot be cut.
    """
    if isinstance(batch, Tensor):
        return _cut_tensor(batch, keep, share)
    if isinstance(batch, np.ndarray) and batch.ndim:
        return batch[:keep].copy()
    if is_opaque(batch):
        raise _cannot_be_cut_error(type(batch).__name__)

    children = children_of(batch)
    if children is None:  # a leaf that is no array, e.g. one text
        return batch

    # First case: a list or tuple with one item for each sample, such as a list of file names. The
    # first items are kept.
    is_sequence = isinstance(batch, list | tuple)
    items_are_samples = is_sequence and has_item_per_sample(batch, num_samples)
    if items_are_samples or is_list_of_plain_data(batch):
        first_items = dict(list(children.items())[:keep])  # the items by position
        return _rebuild(batch, first_items)

    # Second case: the children are fields of the batch, e.g. images and labels. Each of them holds
    # all samples and is cut by itself.
    cut_children = {}
    for key, child in children.items():
        cut_children[key] = cut_to_rows(child, num_samples, keep=keep, share=share)
    return _rebuild(batch, cut_children)


def _cut_tensor(tensor: Tensor, keep: int, share: bool) -> Tensor:
    """Returns the first rows of a tensor. A tensor without dimensions is returned whole.

    Args:
        tensor: the tensor.
        keep: how many rows remain.
        share: True to return a view if the tensor is dense.

    Raises:
        DataError: the tensor has a layout that cannot be cut.
    """
    if _is_dense(tensor):
        first_rows = tensor[:keep] if tensor.dim() else tensor
        return first_rows if share else first_rows.clone()
    if tensor.layout is torch.sparse_coo:
        return tensor.index_select(0, torch.arange(keep, device=tensor.device))
    raise _cannot_be_cut_error(f"{type(tensor).__name__} of layout {tensor.layout}")


def _cannot_be_cut_error(kind: str) -> DataError:
    return DataError(
        f"a batch that holds {with_article(kind)}",
        "a rank got no samples, and an empty batch of this type cannot be made",
        "use drop_last=True, or a collate function that returns tensors",
    )


def join_trees(trees: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    """Joins pytrees with the same structure, for example a model's results on several devices.

    `[{"x": a}, {"x": b}]` becomes `{"x": join([a, b])}`.

    Args:
        trees: at least one pytree.
        join: function that is called with the leaves at the same position in all trees.

    Returns:
        A pytree like the first one, with the results of `join` as its leaves.

    Raises:
        DataError: the containers are not the same.
    """
    first_children = children_of(trees[0])
    if first_children is None:  # the trees are leaves
        return join(list(trees))

    children_of_trees = []
    for tree in trees:
        children = children_of(tree)
        if children is None or children.keys() != first_children.keys():
            raise _different_kinds_error(trees)
        children_of_trees.append(children)

    joined_children = {}
    for key in first_children:
        children_at_key = [children[key] for children in children_of_trees]
        joined_children[key] = join_trees(children_at_key, join)

    return _rebuild(trees[0], joined_children)


def _different_kinds_error(trees: Sequence[Any]) -> DataError:
    """Returns the error of results that cannot be joined."""
    descriptions = []
    for tree in trees:
        num_children = len(children_of(tree) or {})  # 0 for a leaf
        descriptions.append(f"{describe_type(tree)} of {num_children}")
    return DataError(
        "results of several devices, to be joined",
        f"they are of different kinds: {', '.join(descriptions)}",
        "return containers of the same length and keys whatever the samples are; what differs "
        "from sample to sample belongs into tensors with one row a sample",
    )


def children_of(batch: Any, *, opaque_too: bool = False) -> dict[Any, Any] | None:
    """Returns the items of a container by key, index or field name; None for a leaf.

    An *opaque* object, which moves itself with `.to`, is a leaf even if it is also a container,
    such as a `PackedSequence`, which is a named tuple.

    Args:
        batch: the container or leaf.
        opaque_too: True to return the items of an opaque object that is a container.
    """
    if isinstance(batch, Tensor) or (is_opaque(batch) and not opaque_too):
        return None
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, list | tuple):
        return dict(enumerate(batch))

    is_instance = not isinstance(batch, type)  # `is_dataclass` also returns True for the class
    if is_dataclass(batch) and is_instance:
        children = {}
        for field in fields(batch):
            if hasattr(batch, field.name):  # a field with init=False may not have been set
                children[field.name] = getattr(batch, field.name)
        return children

    return None


def is_list_of_plain_data(batch: Any) -> bool:
    """Returns True for a list of texts or numbers, which has one item for each sample.

    Also returns True for a tuple of texts, since `default_collate` makes such tuples. A tuple of
    numbers may be a size instead.
    """
    if isinstance(batch, list):
        return not any(_is_structured(item) for item in batch)
    if type(batch) is tuple and batch:
        return all(isinstance(item, str | bytes) for item in batch)
    return False


def _is_structured(item: Any) -> bool:
    """Returns True for a tensor, an opaque object or a container, False for plain data."""
    return isinstance(item, Tensor) or is_opaque(item) or children_of(item) is not None


def has_item_per_sample(sequence: Sequence[Any], count: int | None) -> bool:
    """Returns True if a sequence has one item for each sample, and not one for each field.

    The first of these rules that applies decides. The examples are of 2 samples.

    1. There is another number of items, as in `[a, b, c]`: False.
    2. The items have different structures, as in `(images, {"label": labels})`. They are fields:
       False.
    3. Some item has one item for each sample, as in `([image, image], [mask, mask])`. They are
       fields: False.
    4. Every tensor has one row for each sample, as in `(images, masks)` of shape `(2, 3, 8, 8)`.
       They are fields: False.
    5. Otherwise they are samples, as in `[image, image]` of shape `(3, 8, 8)`: True.

    Args:
        sequence: a list or a tuple.
        count: number of samples. If it is not known (None), the result is False.
    """
    # Rule 1.
    if len(sequence) != count:
        return False

    # Rule 2. Samples have the same structure, so items of different structures are fields.
    kinds = {_kind_of_item(item) for item in sequence}
    if len(kinds) > 1:
        return False

    # Rule 3. An item such as `[image, image]` has all samples, so it is a field.
    for item in sequence:
        is_sequence = isinstance(item, list | tuple)
        if is_sequence and has_item_per_sample(item, count):
            return False

    # Rules 4 and 5.
    all_have_row_per_sample = all(
        tensor.dim() > 0 and len(tensor) == count for tensor in tensors(sequence)
    )
    return not all_have_row_per_sample


def _kind_of_item(item: Any) -> Any:
    """Returns a value that is equal for items of the same structure.

    It is the number of dimensions of a tensor, or the type and the keys of any other item.
    """
    if isinstance(item, Tensor):
        return item.dim()
    keys = tuple(children_of(item) or ())
    return type(item), keys


def is_opaque(value: Any) -> bool:
    """Returns True for an object with a method `to`: it contains tensors that cannot be found.

    A dictionary with `.to`, such as those of tokenizers, is treated as a container instead, so that
    its tensors can be copied ahead and cut.
    """
    if isinstance(value, Tensor | dict | UserDict | str | bytes | type):
        return False
    return callable(getattr(value, "to", None))


def _is_dense(tensor: Tensor) -> bool:
    """Returns True for a tensor with one storage: not sparse, nested or wrapping other tensors."""
    wraps_tensors = hasattr(tensor, "__tensor_flatten__")  # e.g. a DTensor
    return tensor.layout is torch.strided and not tensor.is_nested and not wraps_tensors


def leaves(batch: Any) -> Iterator[Any]:
    """Yields all leaves of a pytree (everything that is not a container), in order."""
    children = children_of(batch)
    if children is None:
        yield batch
        return
    for child in children.values():
        yield from leaves(child)


def _rebuild(batch: Any, children: dict[Any, Any]) -> Any:
    """Returns a container of the same type with other children.

    If the class does not allow this, a plain `dict`, `list` or `tuple` is returned instead.

    Args:
        batch: the container.
        children: the new children by key, by field name, or, for a sequence, by index, e.g.
            `{0: a, 1: b}`. There may be fewer than before.
    """
    if type(batch) in (dict, list):
        return _plain_container(batch, children)
    if not isinstance(batch, Mapping | list | tuple):
        return _with_attributes(batch, children)

    # A tuple, or a class derived from a mapping, a list or a tuple, e.g. a named tuple.
    try:
        if isinstance(batch, Mapping):
            return _rebuild_mapping(batch, children)
        return _rebuild_sequence(batch, list(children.values()))
    except Exception:  # a user's class may raise anything
        return _plain_container(batch, children)


def _plain_container(batch: Any, children: dict[Any, Any]) -> Any:
    """Returns a `dict`, `list` or `tuple` of the children, as the container is one of the three."""
    if isinstance(batch, Mapping):
        return children
    if isinstance(batch, list):
        return list(children.values())
    return tuple(children.values())


def _with_attributes(batch: Any, children: dict[str, Any]) -> Any:
    """Returns a copy of an object, such as a dataclass instance, with other attributes.

    Neither `__init__` nor `__post_init__` is called, because they may check or change the values.
    """
    rebuilt = copy.copy(batch)
    for name, child in children.items():
        object.__setattr__(rebuilt, name, child)  # works for a frozen dataclass too
    return rebuilt


def _rebuild_sequence(batch: Any, values: list[Any]) -> Any:
    """Returns a list or tuple of the same class with other values."""
    if isinstance(batch, tuple):
        if hasattr(batch, "_make"):  # a named tuple
            return batch._make(values)
        return type(batch)(values)
    rebuilt = copy.copy(batch)  # keeps further attributes of a subclass of `list`
    rebuilt[:] = values
    return rebuilt


def _rebuild_mapping(batch: Any, children: dict[Any, Any]) -> Any:
    """Returns a mapping of the same class with other values.

    Usually it is a copy, which keeps additional attributes of the mapping.
    """
    if _copy_may_share_items(batch):  # replacing values in the copy might change the original
        mapping_class: Any = type(batch)
        return mapping_class(children)

    rebuilt: Any = copy.copy(batch)
    for key, value in children.items():
        rebuilt[key] = value
    return rebuilt


def _copy_may_share_items(batch: Any) -> bool:
    """Returns True if changing the items of `copy.copy(batch)` may change the batch itself."""
    # A mapping of another class may keep its items anywhere.
    if not isinstance(batch, dict | UserDict):
        return True

    # A class may set `self.__dict__ = self`, so that `batch.image` is `batch["image"]`. `copy.copy`
    # gives the copy the same `__dict__`, so setting an attribute of the copy changes the original.
    return getattr(batch, "__dict__", None) is batch
