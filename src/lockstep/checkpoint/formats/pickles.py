"""Reads a pickle without running it: as plain data, in which calls are only written down.

A pickle is a program for a small machine. Python's own machine imports what the program names and
calls it; this one knows the few operations that data needs, refuses all others, and makes a record
(`Made`) where a call is asked for. So nothing of the file's can run, whatever it holds. Operations:
https://docs.python.org/3/library/pickletools.html and the source of `pickletools`.

For `torch.load(..., pickle_module=...)` of files that are trusted: models in DDP open anywhere.

A pickled DistributedDataParallel joins a process group while it is unpickled, fails where there is
none, and waits for the other ranks where there is one. Here it is a plain module around the model.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import IO, Any, ClassVar, NamedTuple

from torch import nn

MAX_OPERATIONS = 20_000_000
"""Each takes some 100 bytes of memory at most."""


class Name(str):
    """Something that Python would import, as `module.name`."""


@dataclass(eq=False)
class Made:
    """What Python would make by calling `name` with `args`."""

    name: Name
    args: tuple[Any, ...]
    state: Any = None
    """What Python would put into it then."""


class Outside(NamedTuple):
    """What stands outside of the pickle, under this name."""

    name: Any


class NotInert(ValueError):
    """It is no pickle, or one of more than the data that is expected."""


def read_inert(content: bytes, allowed: Collection[str]) -> Any:
    """What a pickle describes: None, numbers, text, tuples, lists, dictionaries, and records.

    Args:
        content: the pickle.
        allowed: the names (`module.name`) that it may use.

    Raises:
        NotInert: it uses other names or operations, or is damaged.
    """
    machine = _Machine(allowed)
    try:
        for number, (operation, value, _) in enumerate(pickletools.genops(content)):
            if number > MAX_OPERATIONS:
                raise NotInert(f"it has more than {MAX_OPERATIONS} operations")
            if operation.name == "STOP":
                return machine.pop()
            machine.run(operation.name, value)
    except NotInert:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise NotInert(f"{type(error).__name__}: {str(error)[:200]}") from error
    raise NotInert("it has no end")


_MARK = object()
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "MARK": lambda: _MARK,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """The stack and the memory of the program so far."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = allowed
        self._stack: list[Any] = []
        self._memory: dict[int, Any] = {}

    def pop(self) -> Any:
        """Takes the uppermost value."""
        value = self._stack.pop()
        if value is _MARK:
            raise NotInert("a mark where a value is needed")
        return value

    def run(self, operation: str, value: Any) -> None:
        """One operation, with the value that stands in the pickle behind it."""
        stack = self._stack
        if operation in _NUMBERS or operation in _TEXTS:
            stack.append(value)
        elif operation in _CONSTANTS:
            stack.append(_CONSTANTS[operation]())
        elif operation in _TUPLES:
            items = [self.pop() for _ in range(_TUPLES[operation])]
            stack.append(tuple(reversed(items)))
        elif operation == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif operation in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self._memory[len(self._memory) if value is None else value] = stack[-1]
        elif operation in ("BINGET", "LONG_BINGET"):
            stack.append(self._memory[value])
        elif operation == "BINPERSID":
            stack.append(Outside(self.pop()))
        elif operation not in ("PROTO", "FRAME"):
            self._build(operation, value)

    def _build(self, operation: str, value: Any) -> None:
        if operation == "GLOBAL":
            self._push_name(*value.split(" ", 1))
        elif operation == "STACK_GLOBAL":
            name = self.pop()
            self._push_name(self.pop(), name)
        elif operation in ("REDUCE", "NEWOBJ"):
            args, name = self.pop(), self.pop()
            if not isinstance(name, Name) or type(args) is not tuple:
                raise NotInert("a call of what has no name")
            self._stack.append(Made(name, args))
        elif operation == "BUILD":
            state, made = self.pop(), self._stack[-1]
            if not isinstance(made, Made) or made.state is not None:
                raise NotInert("a state for what was not made")
            made.state = state
        elif operation in ("APPEND", "APPENDS"):
            items = [self.pop()] if operation == "APPEND" else self._to_mark()
            if type(self._stack[-1]) is not list:
                raise NotInert("items for what is no list")
            self._stack[-1].extend(items)
        elif operation in ("SETITEM", "SETITEMS"):
            items = [self.pop(), self.pop()][::-1] if operation == "SETITEM" else self._to_mark()
            self._set_items(items[::2], items[1::2])
        else:
            raise NotInert(f"it has the operation {operation}, which plain data does not need")

    def _set_items(self, keys: list[Any], values: list[Any]) -> None:
        # Other keys could take any time to hash, or nest without end.
        if type(self._stack[-1]) is not dict or not all(type(k) in (str, int, Made) for k in keys):
            raise NotInert("keys that are no text, or for what is no dictionary")
        self._stack[-1].update(zip(keys, values, strict=True))

    def _to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            items.append(value)
        return items[::-1]

    def _push_name(self, module: object, name: object) -> None:
        if type(module) is not str or type(name) is not str:
            raise NotInert("a name that is no text")
        full = f"{module}.{name}"
        if full not in self._allowed:
            raise NotInert(f"it names {full[:120]}, which is not expected there")
        self._stack.append(Name(full))


__all__ = ["Unpickler", "load"]

_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel")


class Opened(nn.Module):
    """What was a DistributedDataParallel."""

    wraps_module: ClassVar[bool] = True


class Unpickler(pickle.Unpickler):
    """Python's own, but for that class."""

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickle stands for."""
        return Opened if (module, name) == _DDP else super().find_class(module, name)


def load(file: IO[bytes], **options: Any) -> Any:
    """As `pickle.load`."""
    return Unpickler(file, **options).load()
