"""Finds the blocks of a model that FSDP shards as units.

A *unit* is a submodule whose parameters are gathered together just before it runs and freed after
it. So units should run one after the other, and each should be a small part of the model, such as a
block of a transformer or a residual block of a convolutional network. Parameters that belong to no
block (embeddings, the head) form a unit of their own, together with the whole model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from lockstep.optim.module_filter import ModuleFilter, repeated_blocks, select_modules


class Blocks(NamedTuple):
    """The submodules that become units, in the order in which they are registered."""

    found: list[tuple[str, nn.Module]]
    """The names and modules of the units. No unit is inside another one."""
    tied_to_outside: list[str]
    """The names of blocks that share a parameter with another module, so they cannot be units."""

    def __str__(self) -> str:
        counts = Counter(type(block).__name__ for _, block in self.found)
        return ", ".join(f"{count} x {name}" for name, count in counts.items())


def find_blocks(module: nn.Module, chosen: ModuleFilter | None = None) -> Blocks:
    """Finds the blocks of a model that become units.

    Args:
        module: the model, which is never a block itself.
        chosen: which submodules to choose: a class or tuple of classes, a pattern of names as in
            `named_modules()`, or a function that returns True for them. If both a module and one
            inside it are chosen, only the outer one is taken. None for the repeated blocks of the
            model (`lockstep.optim.module_filter.repeated_blocks`).

    Raises:
        SettingError: nothing matches what was chosen.
    """
    if chosen is None:
        candidates = repeated_blocks(module)
    else:
        candidates = select_modules(module, chosen, setting="blocks={}")

    # How often each submodule is registered in the model, by its `id`.
    times_in_model: Counter[int] = Counter()
    for _, submodule in module.named_modules(remove_duplicate=False):
        times_in_model[id(submodule)] += 1

    uses_in_model = _count_uses(module)
    found: list[tuple[str, nn.Module]] = []
    tied_to_outside: list[str] = []
    for name, block in candidates:
        uses_in_block = _count_uses(block)

        # A block that shares a parameter with a module outside of it cannot be a unit.
        if _is_tied_to_outside(uses_in_block, uses_in_model, times_in_model[id(block)]):
            tied_to_outside.append(name)
        elif uses_in_block:  # a block without parameters has nothing to shard
            found.append((name, block))

    return Blocks(found, tied_to_outside)


def _is_tied_to_outside(
    uses_in_block: Mapping[int, int], uses_in_model: Mapping[int, int], times_in_model: int
) -> bool:
    """Returns True if a block shares a parameter with a module outside of the block.

    For example, two layers of a block have the same weight, and the block is registered in 3 places
    of the model: 2 * 3 = 6 uses of the weight are inside the block. If the weight is used 7 times
    in the model, one use is outside.

    Args:
        uses_in_block: how often each parameter is registered in the block, by the `id` of the
            parameter.
        uses_in_model: the same for the whole model.
        times_in_model: how often the block is registered in the model.
    """
    for parameter_id, uses in uses_in_block.items():
        uses_outside = uses_in_model[parameter_id] - uses * times_in_model
        if uses_outside > 0:
            return True
    return False


def _count_uses(module: nn.Module) -> Counter[int]:
    """Counts how often each parameter is registered in a module, by the `id` of the parameter."""
    uses: Counter[int] = Counter()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        uses[id(parameter)] += 1
    return uses
