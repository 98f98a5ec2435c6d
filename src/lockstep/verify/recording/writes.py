"""Notes which lines of the script write to the tensors of models.

A tensor is known by its *storage*, the address of its values, since a parameter and a view of it
are different tensors. `FunctionMode`, which sees all calls of torch's functions, calls `WriteLog`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lockstep.batch.pytree import tensors
from lockstep.user_code import user_stack
from lockstep.verify.recording.tensor_values import storage_of

Stack = tuple[tuple[str, int], ...]
"""The user's frames, each with its file and line."""
WRITING_OPERATORS = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__"),
    *("__ipow__", "__iand__", "__ior__", "__ixor__", "__ifloordiv__", "__imod__"),
}
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
"""What `tensor.data = other` calls."""
METHODS_WITHOUT_WRITES = {"requires_grad_", "detach_", "share_memory_", "rename_"}
"""Methods that end with an underscore and leave the values as they are."""


class WriteLog:
    """The last write to each watched tensor."""

    def __init__(self) -> None:
        self.watched: frozenset[int] = frozenset()
        """Storages of the tensors that are watched."""
        self.stacks: dict[int, Stack] = {}
        """The place at which each storage was last written to."""
        self.on_write_by_hand: Callable[[int], object] = lambda storage: None
        """Called with a storage that the script, not a collective, has written to."""

    def note_call(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Notes a call of torch if it writes to a watched tensor.

        Args:
            func: the function or method that was called.
            name: its name.
            args: of the call.
            kwargs: of the call.
        """
        sets_data = name == "__set__" and func == SET_DATA  # tensor.data = other
        if sets_data:
            # The tensor has another storage now, which is watched from here on.
            self.watched |= {storage_of(args[0])}

        if sets_data or _is_in_place(name) or "out" in kwargs:
            # A method such as `add_` writes to its first argument, which may be a list of tensors,
            # and a function with `out=` to that.
            for tensor in tensors((args[:1], kwargs.get("out"))):
                self.note_write(tensor)

    def note_write(self, tensor: Tensor, *, by_hand: bool = True) -> None:
        """Notes that a tensor's values were written to, if it is watched.

        Args:
            tensor: which was written to.
            by_hand: by the script itself; False: by a collective.
        """
        if not self.watched:  # as inside of an optimizer's step: saves looking up the storage
            return

        storage = storage_of(tensor)
        if storage not in self.watched:
            return

        stack = user_stack()
        if stack:  # else no line of the script led here: the last known one stays
            self.stacks[storage] = stack

        if by_hand:
            self.on_write_by_hand(storage)

    def pop_stacks(self) -> dict[int, Stack]:
        """Returns the last writes by storage, and forgets them."""
        stacks = self.stacks
        self.stacks = {}
        return stacks


def _is_in_place(name: str) -> bool:
    """True if a method or an operator writes to its tensor, as `add_` and `__iadd__` do."""
    if name in WRITING_OPERATORS:
        return True
    ends_with_one_underscore = name.endswith("_") and not name.endswith("__")
    return ends_with_one_underscore and name not in METHODS_WITHOUT_WRITES
