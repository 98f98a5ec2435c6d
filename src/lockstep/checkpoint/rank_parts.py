"""Splits the states of a training between the ranks: which rank stores what of a checkpoint.

Rank 0 stores everything that is equal on all ranks. Of a DTensor each rank stores its own shard. A
state is *partial* if a rank has only some of its entries, as under a pipeline or with the virtual
ranks of DiLoCo; each entry of a partial state is stored by the first rank that has it. Before a
save, the ranks tell each other in a `RankSummary` which entries they have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lockstep.batch.pytree import tensors
from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import encode, rng_state_from_text
from lockstep.checkpoint.save import RankPart
from lockstep.checkpoint.sharding import entries_to_store, is_meta, keep_dtensors_only
from lockstep.checkpoint.shards import Box
from lockstep.distributed.torch_compat import is_sharded


@dataclass(frozen=True)
class RankSummary:
    """What a rank tells the others before a save. All of it is JSON."""

    skip: bool
    """True if this rank would leave the save out. The answer of rank 0 counts."""
    metric: float | None
    rng_state: str
    """The rank's random state as text."""
    random_stream_is_common: bool
    """True if the random state is one for all ranks, so that one is stored."""
    partial_keys: dict[str, list[int | str]]
    """For each partial state, by its name, the keys of the entries that the rank has."""
    has_own_tensors: bool
    """True if the rank stores something even if it is not rank 0."""


def keys_of_partial_states(
    states: Mapping[str, Any], objects: Mapping[str, Any]
) -> dict[str, list[int | str]]:
    """Returns, by the name of each partial state, the keys of the entries that this rank has.

    A state is partial if this rank has only some of its entries. The keys are the names of tensors
    in the state of a module, and the numbers of parameters in that of an optimizer.

    Args:
        states: what the `state_dict` of each object returned, and the run's own under "world".
        objects: the objects by the same names.
    """
    partial_keys: dict[str, list[int | str]] = {}
    if "state" in states["world"]:  # the rounding errors of compressed gradients, by rank
        partial_keys["world"] = list(states["world"]["state"])
    for name, value in objects.items():
        state = states[name]
        if isinstance(value, nn.Module):
            # The tensors of other ranks are on the meta device.
            keys = [key for key, tensor in state.items() if not is_meta(tensor)]
            if len(keys) < len(state):
                partial_keys[name] = keys
        elif getattr(value, "partial", False):
            # An optimizer under a pipeline, or the states of virtual ranks.
            partial_keys[name] = list(state["state"])
    return partial_keys


def has_own_tensors(
    states: Mapping[str, Any], partial_keys: Mapping[str, Sequence[int | str]]
) -> bool:
    """Returns True if a rank may have something to store that rank 0 lacks.

    These are entries of partial states, and shards of DTensors.

    Args:
        states: the states of the rank by name.
        partial_keys: what `keys_of_partial_states` returned.
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

    # First, what of each state this rank stores.
    training: dict[str, Any] = {}
    for name, state in states.items():
        if name in partial_names:
            keys_of_ranks = [summary.partial_keys.get(name) for summary in summaries]
            training[name] = entries_to_store(state, keys_of_ranks, rank)
        elif rank == 0:
            training[name] = state
        else:
            training[name] = keep_dtensors_only(state)
    state_of_file = {name: training.pop(name) for name in module_names}
    if rank == 0:
        num_streams = 1 if summaries[0].random_stream_is_common else len(summaries)
        rng_states = [rng_state_from_text(summary.rng_state) for summary in summaries[:num_streams]]
        training["random"] = rng_states
    state_of_file[layout.TRAINING] = training

    # Then each state is split into a tree and tensors, which are copied to host memory.
    tensors_of_file: dict[str, dict[str, Tensor]] = {}
    boxes: dict[str, dict[str, Box]] = {}
    trees: dict[str, Any] = {}
    for name, state in state_of_file.items():
        encoded = encode(
            state,
            inside="" if name == layout.TRAINING else name,
            to_host=to_host,
            main=rank == 0,
        )
        trees[name] = encoded.tree
        boxes[name] = encoded.boxes
        if encoded.tensors or rank == 0:  # rank 0 writes every file, even one without tensors
            tensors_of_file[layout.tensor_file(name, rank)] = encoded.tensors

    # Of partial states, the trees of this rank's entries. Rank 0 puts them into its own trees.
    entries = {}
    if rank > 0:
        for name in partial_names:
            if name in module_names:
                entries[name] = trees[name]
            else:
                entries[name] = trees[layout.TRAINING][name]["state"]
    return RankPart(tensors_of_file, boxes, entries), trees
