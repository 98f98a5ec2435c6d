"""The type of arrays of sample indices, and division of whole numbers that rounds up."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
IntOrArray = TypeVar("IntOrArray", int, Indices)


def ceil_div(dividend: IntOrArray, divisor: int) -> IntOrArray:
    """Returns the quotient of whole numbers, rounded up."""
    return -(-dividend // divisor)
