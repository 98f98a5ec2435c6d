"""States that are sharded over the ranks: which rank stores which part, and resharding.

A state is what `state_dict()` returns: nested dictionaries and lists with tensors at the ends. Some
of its tensors may be DTensors, of which each rank stores its own shard. Rank 0 stores whatever is
equal on all ranks.

A rank may also lack a part of a state, as under a pipeline, where each rank has some layers only.
The tensors that it lacks are on the meta device in the state of a module, and are left out of the
state of an optimizer. The first rank that has such a part stores it.

Any strategy on any number of ranks can load what any other has stored: each rank reads the regions
that make up its own shards. No function here communicates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.batch.pytree import tensors
from lockstep.checkpoint.lazy_tensor import LazyTensor
from lockstep.checkpoint.shards import Shard, TensorInShards
from lockstep.distributed.torch_compat import (
    is_sharded,
    local_box,
    set_state_dict_metadata,
    state_dict_metadata,
    to_local,
)


def is_meta(value: object) -> bool:
    """Returns True for a tensor on the meta device: another rank has its values."""
    return isinstance(value, Tensor) and value.is_meta


def without_meta(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Returns the state of a module with None in place of the tensors that other ranks have."""
    kept = OrderedDict((key, None if is_meta(value) else value) for key, value in state.items())
    set_state_dict_metadata(kept, state_dict_metadata(state))
    return kept


def is_replicated_copy(tensor: Any) -> bool:
    """Returns True if this rank's shard of a DTensor is a copy of one that another rank stores.

    Over a mesh dimension with the placement `Replicate`, the rank with coordinate 0 stores it.
    """
    if not is_sharded(tensor):
        return False
    coordinates = tensor.device_mesh.get_coordinate()
    for placement, coordinate in zip(tensor.placements, coordinates, strict=True):
        if placement.is_replicate() and coordinate > 0:
            return True
    return False


def keep_dtensors_only(state: Any) -> Any:
    """Returns a state with None in place of everything that is not a DTensor."""
    return map_leaves(lambda leaf: leaf if is_sharded(leaf) else None, state)


def entries_to_store(
    state: Mapping[str, Any], keys_of_ranks: Sequence[Collection[int | str] | None], rank: int
) -> dict[str, Any]:
    """Returns what one rank stores of a state of which each rank has a part.

    Each entry is stored by the first rank that has it.

    Args:
        state: the state of a module, with the tensors that this rank lacks on the meta device; or
            that of an optimizer, whose `state` has an entry for each parameter that this rank has.
        keys_of_ranks: for each rank, the keys of the entries that it has. None: it has all.
        rank: this rank.

    Returns:
        A state of the same form. Entries that other ranks store are None in the state of a module,
        and left out of the state of an optimizer.
    """
    key_sets = [None if keys is None else frozenset(keys) for keys in keys_of_ranks]

    def is_stored_here(key: int | str) -> bool:
        """Returns True if this rank is the first that has the entry."""
        for other_rank, keys in enumerate(key_sets):
            if keys is None or key in keys:
                return other_rank == rank
        # No rank has it, because the model is on the meta device. Rank 0 takes it, and then raises
        # the error that it has no values.
        return rank == 0

    is_optimizer_state = isinstance(state.get("state"), dict)
    if is_optimizer_state:
        stored = {key: entry for key, entry in state["state"].items() if is_stored_here(key)}
        return {**state, "state": stored}
    module_state = OrderedDict(
        (key, tensor if is_stored_here(key) else None) for key, tensor in state.items()
    )
    set_state_dict_metadata(module_state, state_dict_metadata(state))
    return module_state


def reshard_optimizer(state: Any, optimizer: Optimizer) -> Any:
    """Returns the saved state of an optimizer, sharded like the optimizer's present parameters.

    Tensors with another shape than their parameter, such as a step counter, are not sharded.

    Args:
        state: as `optimizer.state_dict()` returned it. Its tensors may be in shards.
        optimizer: the optimizer that will load the state.
    """
    # A saved state has numbers in place of parameters. `zip` is not strict: if the optimizer has
    # other groups than the saved one, the user gets the error of `load_state_dict` later.
    parameter_of_number: dict[int, Tensor] = {}
    for saved_group, group in zip(state["param_groups"], optimizer.param_groups, strict=False):
        for number, parameter in zip(saved_group["params"], group["params"], strict=False):
            parameter_of_number[number] = parameter

    entries = {}
    for number, entry in state["state"].items():
        parameter = parameter_of_number.get(number)
        resharded_entry = map_leaves(partial(reshard, like=parameter), entry)
        entries[number] = map_leaves(_copy_leaf, resharded_entry)
    return {**state, "state": entries}


def copy_to_memory(state: Any) -> Any:
    """Returns a copy of a state that was read from a file which may be removed later.

    Tensors in shards are joined. A tied tensor, which the state has in several places, is copied
    once and stays tied.
    """
    copy_of_leaf: dict[int, Any] = {}

    def copy(leaf: Any) -> Any:
        if id(leaf) not in copy_of_leaf:
            copy_of_leaf[id(leaf)] = _copy_leaf(leaf)
        return copy_of_leaf[id(leaf)]

    return map_leaves(copy, state)


def _copy_leaf(leaf: Any) -> Any:
    """Returns a plain tensor with memory of its own; other values are returned as they are."""
    if isinstance(leaf, LazyTensor):
        return leaf.read()
    if isinstance(leaf, Tensor) and not is_sharded(leaf) and not leaf.is_meta:
        return leaf.clone()
    return leaf


def reshard(value: Any, like: Any) -> Any:
    """Returns a tensor that was read, sharded like a tensor of this run.

    Args:
        value: a tensor, a `TensorInShards`, or anything else, which is returned as it is.
        like: the tensor that `value` is for, or None if it is not known.

    Returns:
        A DTensor if `like` is one of the same shape; only this rank's shard is read. `like` itself
        if it is on the meta device. Otherwise the whole tensor.
    """
    if is_meta(like):
        return like
    if not isinstance(value, Tensor | TensorInShards):
        return value
    # A tensor of another shape, such as an optimizer's step counter, is not sharded like its
    # parameter.
    is_for_shards = is_sharded(like) and tuple(value.shape) == tuple(like.shape)
    if not is_for_shards:
        if isinstance(value, TensorInShards):
            return value.read()
        return value
    # Not imported at the top, because the import is slow; whoever made `like` has done it already.
    from torch.distributed.tensor import DTensor

    local = _part_for(value, like)
    if not isinstance(value, TensorInShards):
        # Copied, because `value` may be mapped from a file that is removed later.
        local = local.clone()
    return DTensor.from_local(
        local.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _part_for(value: Tensor | TensorInShards, like: Any) -> Tensor:
    """Returns this rank's part of a tensor that is sharded like another; a view if it can be."""
    offsets, sizes = local_box(like)
    if isinstance(value, TensorInShards):
        return value.read_box(offsets, sizes)
    slices = [slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)]
    return value[tuple(slices)]


@torch.no_grad()
def copy_part(value: Tensor | LazyTensor, target: Tensor) -> None:
    """Copies values into a tensor; into a DTensor this rank's part, and no more is read.

    Args:
        value: whole, of the shape of the target.
        target: has the dtype and device that the values get.
    """
    if isinstance(value, LazyTensor) and not isinstance(value, TensorInShards):
        value = in_one_shard(value)
    if is_sharded(target):
        to_local(target).copy_(_part_for(value, target))
    elif isinstance(value, LazyTensor):
        target.copy_(value.read())
    else:
        target.copy_(value)


def in_one_shard(value: LazyTensor) -> TensorInShards:
    """Returns a tensor of a file, of which regions can be read."""
    shard = Shard(tuple(0 for _ in value.shape), value)
    return TensorInShards("", value.dtype, value.shape, (shard,))


def storage_addresses(tree: Any) -> set[int]:
    """Returns the addresses in memory of the storages of all tensors in a pytree.

    For a DTensor it is the storage of this rank's shard.
    """
    addresses = set()
    for tensor in tensors(tree):
        # Sparse tensors and parameters without a shape yet have no storage.
        if tensor.layout is torch.strided and not is_lazy(tensor):
            addresses.add(to_local(tensor).untyped_storage().data_ptr())
    return addresses


def view_key(tensor: Any) -> tuple[object, ...] | None:
    """Returns a key that is equal for two tensors if they are the same view of the same memory.

    That is how tied weights are found. It also works for tied DTensors on ranks whose shards are
    empty: the memory of a sharded parameter is padded, so it is never empty.

    Returns:
        None for a tensor without memory.
    """
    local = to_local(tensor)
    address = local.untyped_storage().data_ptr()
    if not address:
        return None
    return (
        address,
        local.storage_offset(),
        local.is_conj(),
        local.is_neg(),
        tensor.device,
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Returns the same dictionaries, lists and tuples with `change` applied to all other values."""
    if isinstance(tree, dict):
        mapped_dict: Any = tree.copy()  # keeps the class, such as OrderedDict
        set_state_dict_metadata(mapped_dict, state_dict_metadata(tree))
        for key, value in tree.items():
            mapped_dict[key] = map_leaves(change, value)
        return mapped_dict
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(change, value) for value in tree)
    return change(tree)
