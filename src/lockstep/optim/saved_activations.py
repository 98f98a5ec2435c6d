"""Measures how many bytes a forward pass keeps for the backward pass, block by block.

Autograd calls the hooks of `torch.autograd.graph.saved_tensors_hooks` for each tensor that it
saves. Here the hooks only count bytes and save nothing, so that even a model that would not fit
into memory can be measured. Bytes are counted by storage, so that several views of a storage count
once. Parameters and buffers are not counted, because they are in memory anyway. A *block* is a
submodule that may recompute its activations in the backward pass; then it keeps only its inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lockstep.batch.pytree import tensors
from lockstep.errors import UsageError

StorageBytes = dict[Hashable, int]
"""The size of each storage in bytes, by a key that identifies the storage."""


@dataclass
class Activations:
    """What one forward pass keeps for the backward pass: the storages of tensors, with their sizes.

    Blocks are identified by numbers. The dictionaries list them in the order in which they ran.
    """

    outside_blocks: StorageBytes = field(default_factory=dict)
    """What operations outside of all blocks keep."""
    inputs_of_block: dict[int, StorageBytes] = field(default_factory=dict)
    """What each block keeps if it recomputes its activations: its inputs."""
    activations_of_block: dict[int, StorageBytes] = field(default_factory=dict)
    """What each block keeps if it does not recompute them."""

    def peak(self, recomputed: set[int]) -> int:
        """Returns the maximum number of bytes that are kept at one time, if some blocks recompute.

        The maximum is reached either at the end of the forward pass, or in the backward pass while
        a block is recomputed. At that time memory holds the activations of the block and what all
        earlier blocks keep. (The backward pass goes from the last block to the first, and has freed
        what later blocks kept.) What is kept outside of blocks is counted as if it stayed to the
        end.

        For example, each of two blocks keeps 10 bytes of activations, or an input of 1 byte:

            recomputed         while the second is recomputed    after the forward pass    peak
            none                                                 10 + 10 = 20              20
            the second         10 + (1 + 10) = 21                10 + 1 = 11               21
            both               1 + (1 + 10) = 12                 1 + 1 = 2                 12

        Args:
            recomputed: the numbers of the blocks that recompute.
        """
        # All of these map a storage to its size in bytes. A storage that several blocks keep is
        # counted once.
        kept = dict(self.outside_blocks)
        num_bytes_kept = sum(kept.values())
        peak = num_bytes_kept

        # Go through the blocks in the order of the forward pass, adding what each of them keeps.
        for block, activations in self.activations_of_block.items():
            kept_by_block = activations
            if block in recomputed:
                kept_by_block = self.inputs_of_block[block]
                while_recomputed = kept_by_block | activations
                peak = max(peak, num_bytes_kept + _added_bytes(while_recomputed, present=kept))

            num_bytes_kept += _added_bytes(kept_by_block, present=kept)
            kept |= kept_by_block

        return max(peak, num_bytes_kept)

    def total(self, recomputed: set[int]) -> int:
        """Returns the number of bytes at the end of the forward pass, if some blocks recompute.

        Args:
            recomputed: the numbers of the blocks that recompute.
        """
        kept = dict(self.outside_blocks)
        for block, activations in self.activations_of_block.items():
            kept |= self.inputs_of_block[block] if block in recomputed else activations
        return sum(kept.values())

    def by_saving(self) -> list[int]:
        """Returns the numbers of all blocks, beginning with those that save most by recomputing."""
        return sorted(self.activations_of_block, key=lambda block: self.total({block}))


def _added_bytes(added: StorageBytes, *, present: StorageBytes) -> int:
    """Returns the total size of those added storages that are not present already."""
    num_bytes = 0
    for storage, size in added.items():
        if storage not in present:
            num_bytes += size
    return num_bytes


def measure(
    module: nn.Module, blocks: Sequence[nn.Module], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Activations:
    """Calls `module(*args, **kwargs)` once, with gradients, and counts what is kept for backward.

    The call changes buffers and random streams. Of a block that already recomputes its activations,
    only the inputs are counted.

    Args:
        module: the model.
        blocks: submodules of the model. Their numbers in the result are their indices in this list.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.

    Raises:
        UsageError: the forward pass computes gradients itself.
    """
    counter = _Counter(module)
    # The second hook would be called in a backward pass. There must be none, because the first hook
    # saves nothing.
    hooks = saved_tensors_hooks(counter.count_saved, _refuse_backward)
    with hooks, torch.enable_grad(), ExitStack() as stack:
        for number, block in enumerate(blocks):
            enter = partial(counter.enter_block, number)
            stack.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
            stack.enter_context(block.register_forward_hook(counter.leave_block, always_call=True))
        module(*args, **kwargs)

    return counter.activations


class _Counter:
    """Counts what autograd saves in a forward pass. Its methods are hooks of that forward pass.

    Args:
        module: the model, whose parameters and buffers are not counted.
    """

    def __init__(self, module: nn.Module) -> None:
        self.activations = Activations()
        """What was counted so far."""
        self._current = self.activations.outside_blocks
        """The storages to which saved tensors are added now: those of the running block, or those
        outside of blocks."""
        self._not_counted: StorageBytes = {}
        """The storages of parameters and buffers, which are in memory anyway."""
        for tensor in [*module.parameters(), *module.buffers()]:
            self._count(tensor, self._not_counted)

    def _count(self, tensor: Tensor, counted: StorageBytes) -> None:
        """Adds the storage of a tensor to `counted`, unless it belongs to a parameter or buffer."""
        if tensor.layout is not torch.strided:  # other tensors do not have a single storage
            return

        # A weak reference serves as the key, because torch returns the same object for a storage
        # each time. Its address may belong to another storage later.
        storage = tensor.untyped_storage()
        key = weakref.ref(storage)
        if key not in self._not_counted:
            counted[key] = storage.nbytes()

    def count_saved(self, tensor: Tensor) -> None:
        """The hook for each tensor that autograd saves.

        Autograd keeps its return value, which is None.
        """
        self._count(tensor, self._current)

    def enter_block(self, block: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        """The hook before the forward pass of a block, which counts its inputs.

        If the model calls a block several times, what all calls keep is added up.

        Args:
            block: the number of the block.
            args: the positional arguments of the block's call.
            kwargs: the keyword arguments of the block's call.
        """
        if block not in self.activations.inputs_of_block:
            self.activations.inputs_of_block[block] = {}
            self.activations.activations_of_block[block] = {}
        for tensor in tensors((args, kwargs)):
            self._count(tensor, self.activations.inputs_of_block[block])
        self._current = self.activations.activations_of_block[block]

    def leave_block(self, *_: Any) -> None:
        """The hook after the forward pass of a block."""
        self._current = self.activations.outside_blocks


def _refuse_backward(_: object) -> Tensor:
    """Raises UsageError; called if a backward pass needs a tensor, because none was saved."""
    raise UsageError(
        "checkpoint_activations(..., budget=...)",
        "the forward pass of the example computes gradients itself, and cannot be measured",
        "choose submodules= or every= by hand",
    )
