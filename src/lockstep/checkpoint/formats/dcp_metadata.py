"""Unpickles the metadata of torch's distributed checkpoint (DCP) without running anything.

DCP's own reader unpickles the file `.metadata` with Python's `pickle`, which runs what the file
says. Here a restricted unpickler allows only the names in `ALLOWED_NAMES`, which are private to
torch in part, and makes plain *records* of them, which do nothing. A test tells when torch writes
other names. Written for torch 2.11 to 2.13, with the names of older folders.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.checkpoint.encoding import STORABLE_DTYPES
from lockstep.checkpoint.lazy_tensor import Shape, non_negative_integers

MAX_OPERATIONS = 20_000_000
"""How many operations a pickle may have. Each takes some 100 bytes of memory at most."""
MAX_TUPLE_VALUES = 500
"""How many values a tuple may hold, including those of the tuples in it."""
MAX_ELEMENTS = 2**62
"""How many elements a tensor may have."""
GET_OPERATIONS = ("GET", "BINGET", "LONG_BINGET")
"""Operations of a pickle that put a value of its memo on the stack."""
PUT_OPERATIONS = ("PUT", "BINPUT", "LONG_BINPUT")
"""Operations that keep the value on top of the stack in the memo."""

DCP = "torch.distributed.checkpoint."
SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata."
"""Older versions of torch wrote some classes of this module."""
DTYPE_OF_PICKLED_NAME = {str(dtype): dtype for dtype in STORABLE_DTYPES}
"""A pickle has a dtype as "torch.float32"."""
ALLOWED_NAMES = frozenset(
    {
        *DTYPE_OF_PICKLED_NAME,
        f"{DCP}metadata.Metadata",
        f"{DCP}metadata.TensorStorageMetadata",
        f"{DCP}metadata.BytesStorageMetadata",
        f"{DCP}metadata.ChunkStorageMetadata",
        f"{DCP}metadata.MetadataIndex",
        f"{DCP}metadata.TensorProperties",
        f"{DCP}filesystem._StorageInfo",
        f"{SHARDED_TENSOR}TensorProperties",
        "torch.Size",
        # These are read and not used.
        f"{DCP}metadata.StorageMeta",
        f"{DCP}metadata._MEM_FORMAT_ENCODING",
        f"{SHARDED_TENSOR}MEM_FORMAT_ENCODING",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib.PurePosixPath",
        "pathlib.PureWindowsPath",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
        "pathlib._local.PurePosixPath",
        "pathlib._local.PureWindowsPath",
    }
)
"""All names that the metadata of such a folder may have."""


class Record:
    """Stands for an object of a class of `ALLOWED_NAMES`: what the pickle says to make it of."""

    class_name: str
    """The name of the class, without its module."""
    args: tuple[Any, ...]
    """What the class would have been called with."""
    state: Any = None
    """What `__setstate__` of the object would have got; mostly its attributes, a dictionary."""

    def __new__(cls, *args: Any) -> Record:
        """Called by `pickle` in place of the class, with the same arguments."""
        record = super().__new__(cls)
        record.args = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _RestrictedUnpickler(pickle.Unpickler):
    """Makes records of the objects of a pickle, and refuses all names but `ALLOWED_NAMES`."""

    def find_class(self, module: str, name: str) -> Any:
        """Called by `pickle` for each name in the file; returns what stands for it.

        For a dtype it is the dtype, for a class a subclass of `Record` with its name.

        Raises:
            ValueError: the name is not one of `ALLOWED_NAMES`.
        """
        full_name = f"{module}.{name}"
        if full_name not in ALLOWED_NAMES:
            raise ValueError(f"it names {full_name[:120]}, which is not expected there")
        if full_name in DTYPE_OF_PICKLED_NAME:
            return DTYPE_OF_PICKLED_NAME[full_name]
        return type(name, (Record,), {"class_name": name})


def unpickle(content: bytes) -> Any:
    """Returns the content of a pickle, with a `Record` for each object.

    Raises:
        ValueError: it has names that are not in `ALLOWED_NAMES`, or would take more memory than any
            metadata does.
        Exception: the pickle is damaged; it may be any exception.
    """
    _check_operations(content)
    return _RestrictedUnpickler(io.BytesIO(content)).load()


def _check_operations(content: bytes) -> None:
    """Checks that unpickling takes no more time or memory than real metadata needs.

    A short pickle can do harm in two ways. `pickle` allocates its memo for the largest index that
    the file has. And the keys of dictionaries are hashed with everything that they hold, which can
    take for ever with tuples that hold each other.

    Raises:
        ValueError: it takes more.
    """
    stack = _StackOfSizes()
    for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
        # Whoever writes a pickle numbers the memo from 0 on, so that no index exceeds the number of
        # operations so far.
        is_too_large_index = operation.name in PUT_OPERATIONS and int(argument or 0) > number
        if number > MAX_OPERATIONS or is_too_large_index:
            raise ValueError("it would take more memory than any metadata does")
        stack.follow(operation, argument)  # raises an error if a key may be too large to hash


class _StackOfSizes:
    """Follows what each operation of a pickle does to the stack, without making the values.

    For each value it keeps only its size: the number of values that it holds if it is a tuple, and
    1 if it is anything else.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        """The sizes of the values on the stack."""
        self._marks: list[int] = []
        """The heights of the stack at which the operation MARK was."""
        self._memo: dict[int, int] = {}
        """The sizes of the values in the memo, by index."""

    def follow(self, operation: pickletools.OpcodeInfo, argument: Any) -> None:
        """Changes the stack of sizes as an operation of the pickle changes the stack of values.

        Example: a pickle of `((1, 2), 3)` first puts 1 and 2 on the stack, whose sizes are [1, 1].
        TUPLE2 makes a tuple of them: [3], as a tuple counts as itself and what it holds. With 3 the
        sizes are [3, 1], and a second TUPLE2 makes them [5].

        Args:
            operation: the operation.
            argument: the index in the memo, if it is one of `GET_OPERATIONS` or `PUT_OPERATIONS`.

        Raises:
            ValueError: it makes a tuple that is larger than any of metadata.
        """
        name = operation.name
        if name == "MARK":
            self._marks.append(len(self._sizes))
        elif name in GET_OPERATIONS:
            self._sizes.append(self._memo[int(argument)])
        elif name in PUT_OPERATIONS:
            self._memo[int(argument)] = self._sizes[-1]  # the value itself stays on the stack
        elif name == "MEMOIZE":  # PUT at the next free index
            self._memo[len(self._memo)] = self._sizes[-1]
        elif name == "DUP":
            self._sizes.append(self._sizes[-1])
        else:
            self._replace_operands_by_result(operation)

    def _replace_operands_by_result(self, operation: pickletools.OpcodeInfo) -> None:
        """Takes the operands of an operation from the stack, and puts its result there, if any.

        Raises:
            ValueError: the result is a tuple that is larger than any of metadata.
        """
        size_of_operands = self._pop_operands(operation.stack_before)
        makes_tuple = operation.name.startswith("TUPLE")
        size_of_result = 1 + size_of_operands if makes_tuple else 1
        if size_of_result > MAX_TUPLE_VALUES:
            raise ValueError("it has a tuple that is larger than any of metadata")

        has_result = len(operation.stack_after) > 0  # POP, for example, has none
        if has_result:
            self._sizes.append(size_of_result)

    def _pop_operands(self, operands: Sequence[pickletools.StackObject]) -> int:
        """Removes the operands of an operation from the stack, and returns the sum of their sizes.

        Args:
            operands: what the operation takes from the stack. `[anyobject, anyobject]` are the two
                values on top. `[pydict, markobject, stackslice]` is a dictionary, the last mark,
                and all values above the mark. A mark itself is no entry of the stack, but a height.
        """
        if pickletools.markobject in operands:
            num_operands_below_mark = operands.index(pickletools.markobject)
            first_operand = self._marks.pop() - num_operands_below_mark
        else:
            first_operand = len(self._sizes) - len(operands)

        size = sum(self._sizes[first_operand:])
        del self._sizes[first_operand:]
        return size


def state_of_record(record: Any, class_name: str) -> dict[str, Any]:
    """Returns the attributes of the object that a record stands for.

    Args:
        record: what `unpickle` has made of the object.
        class_name: the class that the object must have.

    Raises:
        ValueError: `record` is something else.
    """
    is_expected = isinstance(record, Record) and record.class_name == class_name
    if not is_expected or type(record.state) is not dict:
        raise ValueError(f"something else where {class_name} is needed")
    return record.state


def shape_of_record(record: Any) -> Shape:
    """Returns the numbers of a pickled `torch.Size`.

    Raises:
        ValueError: `record` is something else, or a size that no tensor has.
    """
    is_size = isinstance(record, Record) and record.class_name == "Size"
    if not is_size or len(record.args) != 1:
        raise ValueError("something else where a size is needed")
    shape = non_negative_integers(record.args[0])

    # A dimension of size 0 is counted as 1. Otherwise it would hide that the others are too large.
    if math.prod(max(extent, 1) for extent in shape) >= MAX_ELEMENTS:
        raise ValueError("a size that no tensor has")
    return shape


def dtype_of_properties(name: str, properties: Any) -> torch.dtype:
    """Returns the dtype in the pickled properties of a tensor.

    Args:
        name: the name of the tensor, for errors.
        properties: the record of a `TensorProperties` object of torch, with the dtype and others.

    Raises:
        ValueError: `properties` is no such record, or its dtype is not known here.
    """
    if not isinstance(properties, Record) or properties.class_name != "TensorProperties":
        raise ValueError(f"{name} has no properties")
    state = properties.state
    dtype: Any = None
    if isinstance(state, dict):
        dtype = state.get("dtype")
    elif isinstance(state, tuple) and state:  # what the class's own `__getstate__` returns
        dtype = state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has a dtype that is not known here")
    return dtype
