"""Finds the blocks of a model that FSDP shards as units.

A *unit* is a submodule whose parameters are gathered together just before it runs, and freed after
it. Units should therefore run one after the other, and each should be a small part of the model: a
block of a transformer, a residual block of a convolutional network. Parameters that belong to no
block (embeddings, the head) form a unit of their own, that of the whole model.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import nn

from lockstep.optim.module_filter import ModuleFilter, repeated_blocks, select_modules


class Blocks(NamedTuple):
    """The submodules that become units, in the order in which they are registered."""

    found: list[tuple[str, nn.Module]]
    """Their names and modules. None of them is inside another."""
    tied: list[str]
    """Names of blocks that are no units, because one of their parameters is also used elsewhere."""

    def __str__(self) -> str:
        counts = Counter(type(block).__name__ for _, block in self.found)
        return ", ".join(f"{count} x {name}" for name, count in counts.items())


def find_blocks(module: nn.Module, chosen: ModuleFilter | None = None) -> Blocks:
    """Finds the blocks of a model.

    Args:
        module: the model; it is never a block of itself.
        chosen: a class or tuple of classes, a pattern of names as in `named_modules()`, or a
            function that returns True for the modules to take. Of nested matches the outermost is
            taken. None for the blocks that the model repeats
            (`lockstep.optim.module_filter.repeated_blocks`).

    Raises:
        SettingError: nothing matches what was chosen.
    """
    if chosen is None:
        candidates = repeated_blocks(module)
    else:
        candidates = select_modules(module, chosen, "blocks={}")

    times_in_model: Counter[int] = Counter()  # in how many places each submodule stands, by its id
    for _, submodule in module.named_modules(remove_duplicate=False):
        times_in_model[id(submodule)] += 1

    uses_in_model = _count_uses(module)
    found: list[tuple[str, nn.Module]] = []
    tied: list[str] = []
    for name, block in candidates:
        uses_in_block = _count_uses(block)
        is_tied = False
        for parameter_id, uses in uses_in_block.items():
            # A parameter that only this block has is registered this many times in the model, for
            # the block itself may stand in several places of it.
            if uses_in_model[parameter_id] != uses * times_in_model[id(block)]:
                is_tied = True

        if is_tied:
            tied.append(name)
        elif uses_in_block:  # a block without parameters has nothing to shard
            found.append((name, block))

    return Blocks(found, tied)


def _count_uses(module: nn.Module) -> Counter[int]:
    """Returns in how many places of a module each parameter is registered, by its id."""
    uses: Counter[int] = Counter()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] += 1
    return uses
