"""Handles states that are sharded over the ranks: which rank stores what, and how to reshard them.

A state is what `state_dict()` returns: nested dictionaries and lists of tensors and other values.
Some of the tensors may be DTensors, of which each rank stores its own shard. Values that are equal
on all ranks are stored by rank 0.

A rank may also have only some entries of a state, as under a pipeline, where each rank has only its
own layers. The entries of other layers are tensors on the meta device in the state of a module, and
are missing in the state of an optimizer. Each entry is stored by the first rank that has it.

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
from lockstep.torch_compat import (
    is_sharded,
    local_box,
    set_state_dict_metadata,
    state_dict_metadata,
    to_local,
)


def is_meta(value: object) -> bool:
    """Returns True for a tensor on the meta device, whose values are on another rank."""
    return isinstance(value, Tensor) and value.is_meta


def without_meta(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Returns the state of a module with None in place of each tensor on the meta device.

    These are the tensors whose values are on another rank.
    """
    kept = OrderedDict((key, None if is_meta(value) else value) for key, value in state.items())
    set_state_dict_metadata(kept, state_dict_metadata(state))
    return kept


def is_replicated_copy(tensor: Any) -> bool:
    """Returns True if this rank's shard of a DTensor is a copy of a shard that another rank stores.

    Along a mesh dimension with the placement `Replicate`, all ranks have the same shard, and the
    rank with coordinate 0 stores it.
    """
    if not is_sharded(tensor):
        return False

    coordinates = tensor.device_mesh.get_coordinate()
    for placement, coordinate in zip(tensor.placements, coordinates, strict=True):
        if placement.is_replicate() and coordinate > 0:
            return True
    return False


def keep_dtensors_only(state: Any) -> Any:
    """Returns a state with None in place of each value that is not a DTensor."""
    return map_leaves(lambda leaf: leaf if is_sharded(leaf) else None, state)


def entries_to_store(
    state: Mapping[str, Any], keys_of_ranks: Sequence[Collection[int | str] | None], rank: int
) -> dict[str, Any]:
    """Returns the entries that one rank stores, of a state that is divided over the ranks.

    Each entry is stored by the first rank that has it.

    Args:
        state: the state of a module, in which the tensors of other ranks are on the meta device; or
            the state of an optimizer, whose `state` has only the parameters of this rank.
        keys_of_ranks: for each rank, the keys of its entries. None if it has all entries.
        rank: this rank.

    Returns:
        A state of the same form. Entries that other ranks store are None in the state of a module,
        and left out of the state of an optimizer.
    """
    key_sets = [None if keys is None else frozenset(keys) for keys in keys_of_ranks]

    def is_stored_here(key: int | str) -> bool:
        return _first_rank_with(key, key_sets) == rank

    # An optimizer has {"state": {0: entry of the first parameter, ...}, "param_groups": [...]}.
    is_optimizer_state = isinstance(state.get("state"), dict)
    if is_optimizer_state:
        entries = {key: entry for key, entry in state["state"].items() if is_stored_here(key)}
        return {**state, "state": entries}

    # A module has {"fc.weight": tensor, ...}, to which torch has attached the versions of its
    # submodules.
    module_state: OrderedDict[str, Any] = OrderedDict()
    for key, tensor in state.items():
        module_state[key] = tensor if is_stored_here(key) else None
    set_state_dict_metadata(module_state, state_dict_metadata(state))
    return module_state


def _first_rank_with(key: int | str, key_sets: Sequence[frozenset[int | str] | None]) -> int:
    """Returns the first rank that has an entry of a state.

    Args:
        key: the key of the entry.
        key_sets: for each rank, the keys of its entries. None if it has all entries.
    """
    for rank, keys in enumerate(key_sets):
        if keys is None or key in keys:
            return rank

    # No rank has the entry if the whole model is on the meta device. Rank 0 takes it then, and
    # raises the error that it has no values.
    return 0


def reshard_optimizer(state: Any, optimizer: Optimizer) -> Any:
    """Shards the saved state of an optimizer like the optimizer's present parameters.

    Tensors whose shape is not that of their parameter, for example a step counter, are not sharded.

    Args:
        state: the result of `optimizer.state_dict()` when it was saved. Its tensors may be stored
            in shards.
        optimizer: the optimizer that will load the state.
    """
    parameter_of_number = _parameter_of_number(state, optimizer)
    entries = {}
    for number, entry in state["state"].items():
        parameter = parameter_of_number.get(number)  # None: `reshard` returns whole tensors
        resharded_entry = map_leaves(partial(reshard, own_tensor=parameter), entry)

        # `reshard` has copied the shards of this rank to memory. Tensors that are not sharded may
        # still be mapped from a file that is removed later, so they are copied here.
        entries[number] = map_leaves(_copy_leaf, resharded_entry)
    return {**state, "state": entries}


def _parameter_of_number(state: Any, optimizer: Optimizer) -> dict[int, Tensor]:
    """Returns the parameters of an optimizer by the numbers that its saved state has for them.

    If the optimizer has more or fewer parameters now, those that have no counterpart are left out:
    `load_state_dict` will raise an error later.
    """
    parameter_of_number: dict[int, Tensor] = {}
    for saved_group, group in zip(state["param_groups"], optimizer.param_groups, strict=False):
        numbered = zip(saved_group["params"], group["params"], strict=False)
        parameter_of_number.update(numbered)
    return parameter_of_number


def copy_to_memory(state: Any) -> Any:
    """Copies a state that was read from a file into memory, as the file may be removed later.

    Tensors in shards are joined. A tied tensor, which occurs several times in the state, is copied
    once and stays tied.
    """
    # `state` keeps all of its values alive, so each id belongs to one value.
    copy_of_id: dict[int, Any] = {}

    def copy_once(leaf: Any) -> Any:
        """Returns the copy of a value; the same copy if the same value comes again."""
        if id(leaf) not in copy_of_id:
            copy_of_id[id(leaf)] = _copy_leaf(leaf)
        return copy_of_id[id(leaf)]

    return map_leaves(copy_once, state)


def _copy_leaf(leaf: Any) -> Any:
    """Returns a copy of a plain or lazy tensor in memory of its own; other values unchanged."""
    if isinstance(leaf, LazyTensor):
        return leaf.read()
    if isinstance(leaf, Tensor) and not is_sharded(leaf) and not leaf.is_meta:
        return leaf.clone()
    return leaf


def reshard(value: Any, own_tensor: Any) -> Any:
    """Shards a tensor that was read from a file like a tensor of this run.

    Args:
        value: a tensor, a `TensorInShards`, or any other value, which is returned unchanged.
        own_tensor: the tensor of this run that `value` belongs to, or None if it is not known.

    Returns:
        If `own_tensor` is a DTensor of the same shape, a DTensor for which only this rank's shard
        was read. If it is on the meta device, `own_tensor` itself. Otherwise the whole value.
    """
    if is_meta(own_tensor):  # this rank has no values of it, e.g. of a layer of another rank
        return own_tensor
    if not isinstance(value, Tensor | TensorInShards):
        return value

    # A tensor of another shape, for example an optimizer's step counter, is not sharded like its
    # parameter.
    becomes_dtensor = is_sharded(own_tensor) and tuple(value.shape) == tuple(own_tensor.shape)
    if not becomes_dtensor:
        return value.read() if isinstance(value, TensorInShards) else value

    # Imported here, because the import is slow. The code that made `own_tensor` has done it.
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        _copy_part_for(value, own_tensor).to(own_tensor.device),
        own_tensor.device_mesh,
        own_tensor.placements,
        run_check=False,
        shape=own_tensor.shape,
        stride=own_tensor.stride(),
    )


def _copy_part_for(value: Tensor | TensorInShards, own_tensor: Any) -> Tensor:
    """Returns the same as `_part_for`, in memory of its own.

    A tensor may be mapped from a file that is removed later, so its part is copied.
    """
    part = _part_for(value, own_tensor)
    is_view = not isinstance(value, TensorInShards)
    return part.clone() if is_view else part


def _part_for(value: Tensor | TensorInShards, own_tensor: Any) -> Tensor:
    """Returns the part of a value that this rank has of `own_tensor`, a DTensor of the same shape.

    The part of a tensor in memory is a view. That of a `TensorInShards` is read.
    """
    offsets, sizes = local_box(own_tensor)
    if isinstance(value, TensorInShards):
        return value.read_box(offsets, sizes)
    slices = [slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)]
    return value[tuple(slices)]


@torch.no_grad()
def copy_part(value: Tensor | LazyTensor, target: Tensor) -> None:
    """Copies values into a target. If the target is a DTensor, only this rank's part is copied.

    Args:
        value: the whole tensor, of the shape of the target. Of a lazy tensor, which has not been
            read yet, only the part that is copied is read.
        target: the tensor that is overwritten. It keeps its dtype and device.
    """
    if not is_sharded(target):
        whole_value = value.read() if isinstance(value, LazyTensor) else value
        target.copy_(whole_value)
        return

    # Only a `TensorInShards` can read a region of itself, so any other lazy tensor is wrapped in
    # one, with itself as the only shard.
    if isinstance(value, LazyTensor) and not isinstance(value, TensorInShards):
        value = in_one_shard(value)

    own_shard_of_target = to_local(target)
    own_shard_of_target.copy_(_part_for(value, target))


def in_one_shard(value: LazyTensor) -> TensorInShards:
    """Returns a lazy tensor as a `TensorInShards` with one shard, so that regions can be read."""
    shard = Shard(tuple(0 for _ in value.shape), value)
    return TensorInShards("", value.dtype, value.shape, (shard,))


def storage_addresses(tree: Any) -> set[int]:
    """Returns the addresses of the storages of all tensors in a pytree.

    For a DTensor it is the storage of this rank's shard.
    """
    addresses = set()
    for tensor in tensors(tree):
        # Sparse tensors and parameters without a shape yet have no storage.
        if tensor.layout is torch.strided and not is_lazy(tensor):
            addresses.add(to_local(tensor).untyped_storage().data_ptr())
    return addresses


def tie_key(tensor: Any) -> tuple[object, ...] | None:
    """Returns a key that two tensors share if they are the same view of the same memory.

    This is how tied weights are found. It also works for DTensors on ranks whose shards are empty:
    FSDP allocates some memory even for an empty shard, so it has an address.

    Returns:
        The key, or None for a tensor without memory.
    """
    local = to_local(tensor)
    address = local.untyped_storage().data_ptr()
    if not address:
        return None

    # `x` and `x.conj()` are views of the same memory with other values, as are `x` and `-x` in some
    # cases, so these flags belong to the key.
    return (
        address,
        local.storage_offset(),
        local.is_conj(),
        local.is_neg(),
        # Those of the whole tensor: empty shards of different tensors look alike.
        tensor.device,
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `change` to every value in nested dictionaries, lists and tuples.

    Returns new containers of the same types. `tree` is not changed.
    """
    # A copy of a dictionary keeps its class, for example OrderedDict. The versions of the modules,
    # which `nn.Module.state_dict()` stores in an attribute, are copied separately.
    if isinstance(tree, dict):
        mapped_dict: Any = tree.copy()
        set_state_dict_metadata(mapped_dict, state_dict_metadata(tree))
        for key, value in tree.items():
            mapped_dict[key] = map_leaves(change, value)
        return mapped_dict

    # A list or tuple of another class, such as `torch.Size`, cannot hold arbitrary values, so it is
    # treated as a single value below.
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(change, value) for value in tree)

    return change(tree)
