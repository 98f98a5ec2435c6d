"""Measures what a forward pass keeps for the backward pass, in bytes, block by block.

Autograd calls the hooks of `torch.autograd.graph.saved_tensors_hooks` for each tensor that it
saves. Here they only count the bytes and save nothing, so that a model can be measured that would
not fit into memory. Bytes are counted by storage, so that views count once. Parameters and buffers
are not counted, because they are in memory anyway. A *block* is a submodule that may recompute its
activations in the backward pass; then it keeps only its inputs.
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
"""The bytes of storages, by a key that identifies a storage."""


@dataclass
class Activations:
    """What one forward pass keeps. Blocks have numbers and are in the order in which they ran."""

    outside: StorageBytes = field(default_factory=dict)
    """What is kept by operations outside of all blocks."""
    inputs: dict[int, StorageBytes] = field(default_factory=dict)
    """The inputs of each block. It keeps these if it recomputes."""
    inside: dict[int, StorageBytes] = field(default_factory=dict)
    """What each block keeps if it does not recompute."""

    def peak(self, recomputed: set[int]) -> int:
        """Returns the most bytes that are kept at one time, if some blocks recompute.

        That is at the end of the forward pass, or in the backward pass while a block is recomputed:
        then there is what the block keeps inside, and what all blocks before it keep. (The backward
        pass goes from the last block to the first and has freed what later blocks kept.) What is
        kept outside of blocks is counted as if it stayed to the end.

        Args:
            recomputed: the numbers of the blocks that recompute.
        """
        kept = dict(self.outside)
        total = sum(kept.values())  # of `kept`
        peak = total

        # In the order of the forward pass: before each block, `kept` is what those before it keep.
        for block, kept_inside in self.inside.items():
            inputs = self.inputs[block]
            if block in recomputed:
                while_recomputed = total + _bytes_not_in(kept, inputs | kept_inside)
                peak = max(peak, while_recomputed)
                kept_by_block = inputs
            else:
                kept_by_block = kept_inside

            total += _bytes_not_in(kept, kept_by_block)
            kept |= kept_by_block

        return max(peak, total)

    def total(self, recomputed: set[int]) -> int:
        """Returns the bytes at the end of the forward pass, if some blocks recompute.

        Args:
            recomputed: the numbers of the blocks that recompute.
        """
        kept = dict(self.outside)
        for block, kept_inside in self.inside.items():
            kept |= self.inputs[block] if block in recomputed else kept_inside
        return sum(kept.values())

    def by_saving(self) -> list[int]:
        """Returns the numbers of all blocks. Those that save most by recomputing stand first."""
        return sorted(self.inside, key=lambda block: self.total({block}))


def _bytes_not_in(kept: StorageBytes, added: StorageBytes) -> int:
    """Returns the bytes of those added storages that are not among the kept ones."""
    num_bytes = 0
    for storage, size in added.items():
        if storage not in kept:
            num_bytes += size
    return num_bytes


def measure(
    module: nn.Module, blocks: Sequence[nn.Module], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Activations:
    """Calls `module(*args, **kwargs)` once, with gradients, and counts what is kept.

    The call changes buffers and random streams. If a block recomputes already, only its inputs are
    counted.

    Args:
        module: the model.
        blocks: submodules of the model. Their numbers in the result are their positions here.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.

    Raises:
        UsageError: the forward pass computes gradients itself.
    """
    counter = _Counter(module)
    hooks = saved_tensors_hooks(counter.count_saved, _refuse_backward)
    with hooks, torch.enable_grad(), ExitStack() as stack:
        for number, block in enumerate(blocks):
            enter = partial(counter.enter_block, number)
            stack.enter_context(block.register_forward_pre_hook(enter, with_kwargs=True))
            stack.enter_context(block.register_forward_hook(counter.leave_block, always_call=True))
        module(*args, **kwargs)

    return counter.activations


class _Counter:
    """Counts what autograd saves in a forward pass. Its methods are hooks of that pass.

    Args:
        module: the model. Its parameters and buffers are not counted.
    """

    def __init__(self, module: nn.Module) -> None:
        self.activations = Activations()
        """What was counted up to now."""
        self._current = self.activations.outside
        """What is added to now: what the running block keeps, or what is kept outside of blocks."""
        self._not_counted: StorageBytes = {}
        """The storages of parameters and buffers, which are in memory anyway."""
        for tensor in [*module.parameters(), *module.buffers()]:
            self._count(tensor, self._not_counted)

    def _count(self, tensor: Tensor, counted: StorageBytes) -> None:
        """Adds the storage of a tensor to `counted`, unless it is that of a parameter or buffer."""
        if tensor.layout is not torch.strided:  # others have no storage of their own
            return
        storage = tensor.untyped_storage()
        # Torch returns the same object for a storage as long as it is referred to. A weak reference
        # to it is never equal to one to a later storage, even at the same address.
        reference = weakref.ref(storage)
        if reference not in self._not_counted:
            counted[reference] = storage.nbytes()

    def count_saved(self, tensor: Tensor) -> None:
        """The hook for each tensor that autograd saves. It saves what this returns: None."""
        self._count(tensor, self._current)

    def enter_block(self, block: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        """The hook before the forward pass of a block: counts its inputs, then what is inside it.

        A block that the model calls several times adds up what all calls keep.

        Args:
            block: the number of the block.
            args: the positional arguments of the block's call.
            kwargs: the keyword arguments of the block's call.
        """
        if block not in self.activations.inputs:
            self.activations.inputs[block] = {}
            self.activations.inside[block] = {}
        for tensor in tensors((args, kwargs)):
            self._count(tensor, self.activations.inputs[block])
        self._current = self.activations.inside[block]

    def leave_block(self, *_: Any) -> None:
        """The hook after the forward pass of a block: counts outside of blocks again."""
        self._current = self.activations.outside


def _refuse_backward(_: object) -> Tensor:
    """Called by autograd for a tensor that a backward pass needs, but nothing was saved."""
    raise UsageError(
        "checkpoint_activations(..., budget=...)",
        "the forward pass of the example computes gradients itself, and cannot be measured",
        "choose submodules= or every= by hand",
    )
