"""Decides which part of the state of a training each rank stores in a checkpoint.

Rank 0 stores everything that is equal on all ranks. Of a DTensor, each rank stores its own shard. A
state is *partial* if each rank has only some of its entries, as under a pipeline or with the
virtual ranks of DiLoCo; then each entry is stored by the first rank that has it. Before a save, the
ranks tell each other in a `RankSummary` which entries they have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.batch.pytree import tensors
from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import encode, rng_state_from_text
from lockstep.checkpoint.save import RankPart
from lockstep.checkpoint.sharding import entries_to_store, is_meta, keep_dtensors_only
from lockstep.checkpoint.shards import Box
from lockstep.torch_compat import is_sharded


@dataclass(frozen=True)
class RankSummary:
    """A rank's message to the others before a save. All fields can be sent as JSON."""

    skip: bool
    """True if this rank votes to skip the save. Rank 0 decides."""
    metric: float | None
    rng_state: str
    """The rank's random state as text."""
    random_stream_is_common: bool
    """True if all ranks have the same random state, so that only one is stored."""
    partial_keys: dict[str, list[int | str]]
    """The keys of the entries that the rank has of each partial state, by the state's name."""
    has_own_tensors: bool
    """True if the rank may have something to store that rank 0 does not have."""


def keys_of_partial_states(
    states: Mapping[str, Any], objects: Mapping[str, Any]
) -> dict[str, list[int | str]]:
    """Finds the partial states, and returns the keys of the entries that this rank has of each.

    The keys are names of tensors for a module, and numbers of parameters for an optimizer. For a
    pipeline: `{"model": ["0.weight", "0.bias"], "optimizer": [0, 1]}`.

    Args:
        states: the state of each object by name, and the run's own state under "world".
        objects: the objects by the same names.
    """
    partial_keys: dict[str, list[int | str]] = {}

    # The run's own state has an entry "state" only if gradients are compressed. It is partial: each
    # rank has rounding errors of its own, such as {0: ..., 1: ...} on one rank.
    rounding_errors = states["world"].get("state")
    if rounding_errors is not None:
        partial_keys["world"] = list(rounding_errors)

    for name, value in objects.items():
        if isinstance(value, nn.Module):
            # In a partial state, the tensors of other ranks are on the meta device.
            tensor_of_name = states[name]
            keys = [key for key, tensor in tensor_of_name.items() if not is_meta(tensor)]
            if len(keys) < len(tensor_of_name):
                partial_keys[name] = keys
        elif getattr(value, "partial", False):
            # An optimizer under a pipeline has {"state": {0: entry of the first parameter, ...},
            # ...}, and the states of virtual ranks {"state": {0: state of virtual rank 0, ...}}.
            partial_keys[name] = list(states[name]["state"])
    return partial_keys


def has_own_tensors(
    states: Mapping[str, Any], partial_keys: Mapping[str, Sequence[int | str]]
) -> bool:
    """Returns True if a rank may have something to store that rank 0 does not have.

    This can be entries of partial states, or shards of DTensors.

    Args:
        states: the states of the rank by name.
        partial_keys: the result of `keys_of_partial_states`.
    """
    return bool(partial_keys) or any(is_sharded(tensor) for tensor in tensors(states))


def copy_rank_part(
    states: Mapping[str, Any],
    module_names: Sequence[str],
    summaries: Sequence[RankSummary],
    rank: int,
    to_host: Callable[[Tensor], Tensor],
) -> tuple[RankPart, dict[str, Any]]:
    """Copies to host memory what one rank stores.

    Args:
        states: this rank's states by name.
        module_names: names of the states that are stored in files of their own.
        summaries: the summaries of all ranks.
        rank: this rank.
        to_host: copies a tensor to contiguous CPU memory.

    Returns:
        What the rank stores, and the trees of its states: one by the name of each module, and one
        as `layout.TRAINING` for everything else.
    """
    partial_names: set[str] = set()
    for summary in summaries:
        partial_names.update(summary.partial_keys)

    # Each module has a file of its own, and all other states have one together.
    training = _states_to_store(states, partial_names, summaries, rank)
    state_of_file = {name: training.pop(name) for name in module_names}
    state_of_file[layout.TRAINING] = training

    # Split each state into a tree and tensors, and copy the tensors to host memory.
    tensors_of_file: dict[str, dict[str, Tensor]] = {}
    boxes: dict[str, dict[str, Box]] = {}
    trees: dict[str, Any] = {}
    for name, state in state_of_file.items():
        encoded = encode(
            state,
            name="" if name == layout.TRAINING else name,
            to_host=to_host,
            is_rank_0=rank == 0,
        )
        trees[name] = encoded.tree
        boxes[name] = encoded.boxes
        if encoded.tensors or rank == 0:  # rank 0 writes every file, even one without tensors
            tensors_of_file[layout.tensor_file(name, rank)] = encoded.tensors

    # The trees of the entries that this rank has of partial states, by the names of these states.
    # Rank 0 adds them to its trees.
    entries: dict[str, Any] = {}
    if rank > 0:
        for name in partial_names:
            if name in module_names:
                entries[name] = trees[name]
            else:
                entries[name] = trees[layout.TRAINING][name]["state"]
    return RankPart(tensors_of_file, boxes, entries), trees


def _states_to_store(
    states: Mapping[str, Any],
    partial_names: Collection[str],
    summaries: Sequence[RankSummary],
    rank: int,
) -> dict[str, Any]:
    """Returns what one rank stores of each state, by name, and on rank 0 also the random states.

    Args:
        states: the states of the rank by name.
        partial_names: the names of states of which each rank has only some entries.
        summaries: the summaries of all ranks.
        rank: the rank.
    """
    to_store: dict[str, Any] = {}
    for name, state in states.items():
        if name in partial_names:
            keys_of_ranks = [summary.partial_keys.get(name) for summary in summaries]
            to_store[name] = entries_to_store(state, keys_of_ranks, rank)
        elif rank == 0:
            to_store[name] = state
        else:
            to_store[name] = keep_dtensors_only(state)

    if rank == 0:
        rng_states = [summary.rng_state for summary in summaries]
        if summaries[0].random_stream_is_common:
            rng_states = rng_states[:1]  # the others are the same
        to_store["random"] = [rng_state_from_text(text) for text in rng_states]
    return to_store
