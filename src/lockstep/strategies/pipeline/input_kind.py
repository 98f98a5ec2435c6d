"""Kinds of input. Calls of a model with inputs of the same kind give activations of equal shapes.

So shapes need to be found out only once for each kind: the shapes that a submodule returns
(`stage`), and those of the messages between two stages (`wire`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.torch_compat import pytree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a call."""

MAX_REMEMBERED_KINDS = 256
"""When this many kinds have been stored, all of them are dropped."""


class InputKind(NamedTuple):
    """Everything that determines the shapes of activations, except the values of the inputs."""

    key: Hashable
    """A key that is equal for calls of the same kind."""
    depends_on_values: bool
    """True if inputs contain integers or booleans, on whose values a forward pass may branch, such
    as a padding mask. Calls of this kind may give activations of different shapes after all, so
    each message between two stages says whether they have the shapes of the last one."""


def signature(arguments: Arguments) -> Any:
    """Returns a key that is equal for arguments of the same kind, or None if none can be made.

    The key contains the shape, the dtype and `requires_grad` of each tensor, and the values of all
    other arguments.
    """
    args, kwargs = arguments
    # A fast path for most calls. Its keys have another form than those below. That does not matter:
    # arguments of the same kind take the same path.
    if not kwargs and all(isinstance(arg, Tensor) for arg in args):
        return tuple((arg.shape, arg.dtype, arg.requires_grad) for arg in args)

    leaves, spec = pytree.tree_flatten(arguments)
    key: list[Any] = [str(spec)]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            key.append((tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
        elif isinstance(leaf, int | float | str | bool | tuple | None):
            # (`tree_flatten` takes most tuples apart, but not those of some classes, such as
            # `torch.Size`.)
            key.append(leaf)
        else:
            # The attributes of an object of another type may decide about shapes.
            return None

    return tuple(key)


def store_in_cache(values: dict[Any, Any], kind: Any, value: Any) -> None:
    """Stores a value for a kind of input, unless the kind is None (unknown).

    Args:
        values: the stored values, by kind.
        kind: the kind of the input.
        value: the value to store.
    """
    if kind is None:
        return
    if len(values) >= MAX_REMEMBERED_KINDS:
        values.clear()
    values[kind] = value
