"""Kinds of input: calls of the same kind make a model compute tensors of the same shapes.

What is known of a kind is remembered, so that it is found out only once: the shapes that a
submodule returns (`stage`), and the shapes of the messages between two stages (`wire`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.distributed.torch_compat import pytree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""

MAX_REMEMBERED_KINDS = 256
"""When this many kinds are remembered, all of them are forgotten."""


class InputKind(NamedTuple):
    """Everything that decides the shapes of activations, apart from the values of the inputs."""

    key: Hashable
    """Equal for calls of the same kind."""
    depends_on_values: bool
    """True if inputs hold whole numbers or booleans: a forward pass may branch on their values."""


def signature(arguments: Arguments) -> Any:
    """Returns a key that is equal for arguments of the same kind, or None if no key can be made.

    It is made of the shape, the dtype and `requires_grad` of each tensor, and of the values of
    everything else.
    """
    args, kwargs = arguments
    if not kwargs and all(isinstance(arg, Tensor) for arg in args):  # nearly always; this is fast
        return tuple((arg.shape, arg.dtype, arg.requires_grad) for arg in args)

    leaves, spec = pytree.tree_flatten(arguments)
    key: list[Any] = [str(spec)]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            key.append((tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
        elif isinstance(leaf, tuple | int | float | str | bool | None):
            key.append(leaf)
        else:  # nothing is known of its type: two equal ones may lead to other shapes
            return None

    return tuple(key)


def remember(values: dict[Any, Any], kind: Any, value: Any) -> None:
    """Stores a value for a kind of input. Nothing is stored for None, the unknown kind."""
    if kind is None:
        return
    if len(values) >= MAX_REMEMBERED_KINDS:
        values.clear()
    values[kind] = value
