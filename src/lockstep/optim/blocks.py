"""The repeated blocks of a model: transformer blocks, residual blocks, found by structure alone.

They are what is worth treating as one: to recompute, to shard, to put on a stage of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

_HOLDS = (nn.Module.forward, nn.Sequential.forward)
"""The forwards of modules that only hold others; ModuleList and ModuleDict have none."""


def repeated_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks that a model repeats, under their names, in the order of `named_modules()`.

    A block has parameters, stands in an `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict`, is
    more than one of torch's single layers, and is not the only one of its kind. The kind is the
    class; of an `nn.Sequential` also what is in it. Of blocks inside blocks the outermost counts,
    but an `nn.Sequential` that holds several blocks of a kind (a stage) is none itself. Where
    containers hold no blocks, modules that stand in attributes (`self.down1`, `self.down2`) are
    looked at in the same way.

    Returns:
        `(name, block)` for each, none inside another; nothing where nothing repeats.
    """
    modules = dict(module.named_modules())
    possible = {name: m for name, m in modules.items() if name and _may_be_block(m)}
    held = {
        name: m for name, m in possible.items() if _only_holds(modules[name.rpartition(".")[0]])
    }
    for candidates in (held, possible):
        count = Counter(_kind(m) for m in candidates.values())
        repeated = {name: m for name, m in candidates.items() if count[_kind(m)] > 1}
        if repeated:
            return list(_outermost(repeated))
    return []


def _may_be_block(module: nn.Module) -> bool:
    """It runs, has parameters, and is not one of torch's single layers."""
    if type(module).forward is nn.Module.forward or next(module.parameters(), None) is None:
        return False
    if next(module.children(), None) is None:
        return not type(module).__module__.startswith("torch.")
    return not _is_stage(module)


def _is_stage(module: nn.Module) -> bool:
    """It only holds others, and several blocks of a kind are among them."""
    if not _only_holds(module):
        return False
    count = Counter(_kind(child) for child in module.children() if _may_be_block(child))
    return any(number > 1 for number in count.values())


def _only_holds(module: nn.Module) -> bool:
    return type(module).forward in _HOLDS


def _kind(module: nn.Module) -> Any:
    """Equal for modules that are built alike; to be counted by."""
    if not _only_holds(module):
        return type(module)
    return (type(module), *(_kind(child) for child in module.children()))


def _outermost(blocks: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Those that are in no other; what is in a module follows it in the order."""
    inside: str | None = None
    for name, block in blocks.items():
        if inside is None or not name.startswith(inside):
            inside = f"{name}."
            yield name, block
