"""Reads the numbers that a script gives to `World.sum`.

`World.sum` takes a *nest*: a tensor or number, or lists and dicts of them. The *leaves* of a nest
are its tensors and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

MAX_NUMBERS_IN_TENSOR = 64
"""A tensor with more numbers than this is read as one number, its sum."""


def numbers_in(leaves: Sequence[Any]) -> list[float]:
    """Returns the numbers in the leaves of a nest, with 0.0 in place of NaN and infinity.

    A large tensor gives one number, its sum, so that few numbers are copied from a GPU. Complex
    tensors give none.
    """
    numbers: list[float] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            values = [leaf]  # a number
        elif leaf.is_complex():
            values = []
        elif leaf.numel() <= MAX_NUMBERS_IN_TENSOR:
            values = leaf.flatten().tolist()
        else:
            values = [leaf.sum().item()]

        for value in values:
            numbers.append(value if math.isfinite(value) else 0.0)
    return numbers
