"""What a forward pass keeps for backward, in bytes, block by block.

Autograd asks `torch.autograd.graph.saved_tensors_hooks` what to do with each tensor that it keeps.
Here it is told to keep nothing: the bytes are counted by storage and let go, so a model is measured
that would not fit. Parameters and buffers are there anyway and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lockstep.errors import UsageError

Kept = dict[int, int]
"""Bytes of storages, by number."""


@dataclass(frozen=True)
class Activations:
    """What one forward pass keeps. Blocks are counted in the order in which they run."""

    order: list[int]
    """Which of the given blocks each of these is."""
    outside: Kept
    """Kept by what is in no block."""
    inputs: list[Kept]
    """What a block is called with, and so keeps if it recomputes."""
    inside: list[Kept]
    """What it keeps if it does not."""

    def peak(self, recomputed: set[int]) -> int:
        """Bytes at the worst moment: after the forward pass, or while a block is recomputed.

        Backward goes from the last block to the first and lets go of what it has passed. What is
        kept outside of blocks is counted as if it stayed to the end.
        """
        held = dict(self.outside)
        total = worst = sum(held.values())
        for i, (inputs, inside) in enumerate(zip(self.inputs, self.inside, strict=True)):
            if i in recomputed:
                worst = max(worst, total + sum(_new(inputs | inside, held).values()))
            new = _new(inputs if i in recomputed else inside, held)
            held |= new
            total += sum(new.values())
        return max(worst, total)

    def by_saving(self) -> list[int]:
        """The blocks: those first whose recomputation saves most; of equals the first to run."""
        holders = Counter(key for kept in (self.outside, *self.inside) for key in kept)

        def saved(i: int) -> int:
            inside, inputs = self.inside[i], self.inputs[i]
            own = {key for key in inside.keys() | inputs if holders[key] == (key in inside)}
            let_go = sum(size for key, size in inside.items() if key in own)
            return let_go - sum(size for key, size in inputs.items() if key in own)

        return sorted(range(len(self.inside)), key=saved, reverse=True)


def _new(kept: Kept, held: Kept) -> Kept:
    return {key: size for key, size in kept.items() if key not in held}


def measure(
    module: nn.Module, blocks: Sequence[nn.Module], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Activations:
    """Calls `module(*args, **kwargs)` once, with gradients, and counts what is kept.

    Buffers and random streams are changed as the call changes them. What a block keeps that
    recomputes already is not seen; its inputs are.

    Raises:
        UsageError: the forward pass computes gradients itself.
    """
    recorder = _Recorder([*module.parameters(), *module.buffers()], len(blocks))
    with ExitStack() as stack:
        for i, block in enumerate(blocks):
            enter = block.register_forward_pre_hook(recorder.entering(i), with_kwargs=True)
            leave = block.register_forward_hook(recorder.leave, always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        stack.enter_context(torch.enable_grad())
        hooks = torch.autograd.graph.saved_tensors_hooks(recorder.keep, _cannot_give_back)
        stack.enter_context(hooks)
        module(*args, **kwargs)
    return recorder.result()


class _Recorder:
    """Hooks that count."""

    def __init__(self, there_anyway: Iterable[Tensor], blocks: int) -> None:
        # A storage is the same Python object as long as it lives, and its number is not used again.
        self._numbers: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self._next = 0
        self._anyway = {self._number(tensor.untyped_storage()) for tensor in there_anyway}
        self._order: list[int] = []
        self._outside: Kept = {}
        self._inputs: list[Kept] = [{} for _ in range(blocks)]
        self._inside: list[Kept] = [{} for _ in range(blocks)]
        self._now = self._outside

    def entering(self, block: int) -> Any:
        """The hook that is called before a block runs."""

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if block not in self._order:
                self._order.append(block)
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._count(leaf, self._inputs[block])
            self._now = self._inside[block]

        return enter

    def leave(self, *_: Any) -> None:
        """The hook that is called after a block has run."""
        self._now = self._outside

    def keep(self, tensor: Tensor) -> None:
        """Autograd wants to keep a tensor."""
        self._count(tensor, self._now)

    def result(self) -> Activations:
        """What was counted; blocks that did not run are left out."""
        inputs, inside = ([kept[i] for i in self._order] for kept in (self._inputs, self._inside))
        return Activations(self._order, self._outside, inputs, inside)

    def _count(self, tensor: Tensor, kept: Kept) -> None:
        if tensor.layout is not torch.strided:  # has no storage of its own
            return
        storage = tensor.untyped_storage()
        number = self._number(storage)
        if number not in self._anyway:
            kept[number] = storage.nbytes()

    def _number(self, storage: torch.UntypedStorage) -> int:
        if storage not in self._numbers:
            self._numbers[storage] = self._next
            self._next += 1
        return self._numbers[storage]


def _cannot_give_back(_: object) -> Tensor:
    raise UsageError(
        "checkpoint_activations(..., budget=...)",
        "the forward pass of the example computes gradients itself, so it cannot be measured "
        "without keeping everything",
        "choose submodules= or every= by hand",
    )
