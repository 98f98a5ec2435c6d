"""Which parts of a model are sharded as units: the blocks that it repeats.

A unit's parameters are gathered together just before it runs and let go after it. Units should
therefore run one after the other, and be a small part of the model each: the blocks of a
transformer, the residual blocks of a convolutional network. What belongs to no block (embeddings,
the head) is the unit of the model itself.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import nn

from lockstep.optim.blocks import repeated_blocks
from lockstep.optim.chosen import Choice, choose


class Blocks(NamedTuple):
    """The parts of a module that become units, in the order in which they are registered."""

    found: list[tuple[str, nn.Module]]
    """Names and modules; none is inside another."""
    tied: list[str]
    """Names of those left to the whole, because a parameter of theirs is used elsewhere too."""

    def __str__(self) -> str:
        counts = Counter(type(block).__name__ for _, block in self.found)
        return ", ".join(f"{count} x {name}" for name, count in counts.items())


def find_blocks(module: nn.Module, chosen: Choice | None = None) -> Blocks:
    """The blocks of a module.

    Args:
        module: the model; it is never a block of itself.
        chosen: a class or tuple of classes, a pattern of names as in `named_modules()`, or a
            function that says yes or no to each module; of nested matches the outermost is taken.
            None: `lockstep.optim.blocks.repeated_blocks`.

    Raises:
        SettingError: nothing matches what was chosen.
    """
    matching = repeated_blocks(module) if chosen is None else choose(module, chosen, "blocks={}")
    users = _users(module, {id(part) for _, part in matching})
    found, tied = [], []
    for name, part in matching:
        own = list(part.parameters())
        if any(users[id(p)] != {id(part)} for p in own):
            tied.append(name)
        elif own:
            found.append((name, part))
    return Blocks(found, tied)


def _users(module: nn.Module, blocks: set[int]) -> dict[int, set[int | None]]:
    """For each parameter the blocks that it is in, None standing for what is in none.

    Args:
        module: the model.
        blocks: identities; parameters, too, are named by theirs.
    """
    places = {
        path: id(part)
        for path, part in module.named_modules(remove_duplicate=False)
        if id(part) in blocks
    }
    users: dict[int, set[int | None]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts)))
        block = next((places[path] for path in paths if path in places), None)
        users.setdefault(id(parameter), set()).add(block)
    return users
