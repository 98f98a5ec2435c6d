"""Records which lines of the script write to the tensors of models.

A tensor is identified by the *address* of its values, because a parameter and a view of it are
different tensors. `FunctionMode`, which sees all calls of torch's functions, tells the `WriteLog`
of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lockstep.batch.pytree import tensors
from lockstep.user_code import user_stack
from lockstep.verify.recording.tensor_values import storage_address

Stack = tuple[tuple[str, int], ...]
"""Frames of the user's code, as (file, line)."""
WRITING_OPERATORS = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__"),
    *("__ipow__", "__iand__", "__ior__", "__ixor__", "__ifloordiv__", "__imod__"),
}
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
"""The function that `tensor.data = other` calls."""
METHODS_WITHOUT_WRITES = {"requires_grad_", "detach_", "share_memory_", "rename_"}
"""Methods that end with an underscore but do not change any values."""


class WriteLog:
    """The last write to each watched tensor."""

    def __init__(self) -> None:
        self.watched_addresses: frozenset[int] = frozenset()
        self.stacks: dict[int, Stack] = {}
        """Call stack of the last write to each address."""
        self.on_write_by_hand: Callable[[int], object] = lambda address: None
        """Called with an address when the script itself, and not a collective, writes to it."""

    def note_call(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Records a call of torch that was made, if it has written to a watched tensor.

        Args:
            func: function or method that was called.
            name: name of the function.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        # `tensor.data = other` calls `SET_DATA(tensor, other)`. The tensor's values are at the
        # address of `other` now, which is watched too.
        sets_data = name == "__set__" and func == SET_DATA  # the name first, as that is faster
        if sets_data:
            tensor = args[0]
            self.watched_addresses |= {storage_address(tensor)}

        # A method such as `add_` writes to its first argument, and a call with `out=` to the
        # tensors given there.
        if sets_data or _is_in_place(name) or "out" in kwargs:
            # `tensors` finds tensors in nested lists too, as those of `torch._foreach_add_`.
            first_argument = args[0] if args else None
            for tensor in tensors([first_argument, kwargs.get("out")]):
                self.note_write(tensor)

    def note_write(self, tensor: Tensor, *, by_hand: bool = True) -> None:
        """Records that the values of a tensor were written to, if the tensor is watched.

        Args:
            tensor: tensor that was written to.
            by_hand: True if the script itself has written to it; False for a collective.
        """
        # Nothing is watched during an optimizer's step, which writes to all parameters by itself,
        # nor before the recorder has seen a model.
        if not self.watched_addresses:
            return

        address = storage_address(tensor)
        if address not in self.watched_addresses:
            return

        # If no line of the script is on the call stack, the last known stack is kept.
        stack = user_stack()
        if stack:
            self.stacks[address] = stack

        if by_hand:
            self.on_write_by_hand(address)

    def pop_stacks(self) -> dict[int, Stack]:
        """Returns the call stack of the last write to each address, and clears them."""
        stacks = self.stacks
        self.stacks = {}
        return stacks


def _is_in_place(name: str) -> bool:
    """True if a method or operator changes its tensor in place, such as `add_` or `__iadd__`."""
    if name in WRITING_OPERATORS:
        return True
    ends_with_one_underscore = name.endswith("_") and not name.endswith("__")
    return ends_with_one_underscore and name not in METHODS_WITHOUT_WRITES
