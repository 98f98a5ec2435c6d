"""Defines `LazyTensor`, a tensor of known dtype and shape whose values are read only when needed.

Checkpoints and weights files may be larger than memory. So only their headers are read and checked
when they are opened. The values are read later, a range of elements at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

Shape = tuple[int, ...]

MAX_DIMENSIONS = 64
MAX_EXTENT = 2**62
"""No tensor has a larger size in any dimension. Larger numbers in a file are refused, because
multiplying them takes long."""


def non_negative_integers(value: Any) -> Shape:
    """Returns a list of numbers from a file, such as a shape or offsets, as a tuple.

    Raises:
        ValueError: `value` is not a short list of whole numbers of at least 0, or has a number that
            is too large for any tensor.
    """
    is_short_list = isinstance(value, list | tuple) and len(value) <= MAX_DIMENSIONS
    if not is_short_list or not all(_is_extent(item) for item in value):
        raise ValueError(f"a shape or a place of {str(value)[:80]}")
    return tuple(value)


def _is_extent(item: Any) -> bool:
    """Returns True for a number that may be a tensor's size in one dimension."""
    return type(item) is int and 0 <= item < MAX_EXTENT


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without "torch.", such as "float32"."""
    return str(dtype).removeprefix("torch.")


class LazyTensor:
    """A tensor of known dtype and shape whose values are read when they are requested.

    Subclasses are frozen dataclasses, or set these attributes themselves.
    """

    dtype: torch.dtype
    shape: Shape
    file: Path
    """The file that has the values. Only tensors in files have this attribute."""
    read_range: Callable[[int, int], Tensor]
    """`read_range(begin, end)` reads the elements from `begin` to before `end` of the flattened
    tensor. Returns them as a 1-dimensional CPU tensor. Raises CheckpointError if it cannot."""

    def check(self) -> None:
        """Raises CheckpointError if the tensor is not in its file. Reads no values."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return self.num_elements * self.dtype.itemsize

    def view_as(self, dtype: torch.dtype, shape: Shape) -> LazyTensor:
        """Returns the same bytes as a tensor of another dtype and shape.

        Raises:
            ValueError: a tensor of this dtype and shape has another number of bytes.
        """
        dataclass_instance: Any = self  # every subclass that supports this is a dataclass
        view = cast(LazyTensor, replace(dataclass_instance, dtype=dtype, shape=shape))
        if view.nbytes != self.nbytes:
            raise ValueError(f"{self.nbytes} bytes for a tensor of {dtype} and shape {list(shape)}")
        return view

    def read(self) -> Tensor:
        """Reads the whole tensor."""
        return self.read_range(0, self.num_elements).reshape(self.shape)


class TensorInMemory(LazyTensor):
    """A tensor in the memory of this process, on any device, with the methods of a `LazyTensor`."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)

    def read_range(self, begin: int, end: int) -> Tensor:
        """Returns the elements from `begin` to before `end`, flattened and on the CPU."""
        values = self._tensor.resolve_conj().resolve_neg().cpu()
        return values.reshape(-1)[begin:end]
