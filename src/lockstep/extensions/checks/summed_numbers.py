"""Reads the numbers that a script gives to `World.sum`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

MAX_NUMBERS_IN_TENSOR = 64
"""Of a larger tensor only its sum is looked at."""


def numbers_in(leaves: Sequence[Any]) -> list[float]:
    """Returns the numbers in the leaves of a nest, 0 for those that are not finite.

    A large tensor gives one number, its sum. Complex tensors are left out.
    """
    numbers: list[float] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            values = [leaf]
        elif leaf.is_complex():
            values = []
        elif leaf.numel() <= MAX_NUMBERS_IN_TENSOR:
            values = leaf.flatten().tolist()
        else:
            values = [leaf.sum().item()]
        for value in values:
            numbers.append(value if math.isfinite(value) else 0.0)
    return numbers
