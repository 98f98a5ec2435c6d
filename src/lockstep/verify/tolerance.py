"""How far two arrays may be apart and still count as equal.

A run on several processes adds up the same numbers in another order, so its results differ from
those of one process by rounding errors. A `Tolerance` says how much rounding is allowed in one
precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Two arrays are equal if `|a - b| <= relative * max|tensor| + absolute * max|all tensors|`."""

    relative: float = 1e-9
    absolute: float = 1e-12
    # The lowest precision of the values that this tolerance is meant for.
    dtype: str = "float64"

    def differ(self, a: Array, b: Array, scale: float) -> bool:
        """True if two arrays are not equal within the tolerance.

        Args:
            a: first array.
            b: second array.
            scale: largest absolute value of all tensors that are compared together with these.
        """
        return self.used_fraction(a, b, scale) > 1

    def used_fraction(self, a: Array, b: Array, scale: float) -> float:
        """Returns the largest difference of two arrays, as a fraction of the allowed difference.

        The allowed difference is `relative * max(|a|, |b|) + absolute * scale`. Above a fraction of
        1, the arrays differ. The result is infinite if their shapes differ, or if a value is
        finite in only one of them. Two equal infinities, or two NaNs, count as equal.

        Args:
            a: first array.
            b: second array.
            scale: largest absolute value of all tensors that are compared together with these.
        """
        if a.shape != b.shape:
            return math.inf

        both_nan = np.isnan(a) & np.isnan(b)
        unequal = ~((a == b) | both_nan)
        if not unequal.any():
            return 0.0

        difference = _difference(a[unequal], b[unequal])
        if not np.isfinite(difference).all():
            return math.inf

        # Not 0, since of two unequal values only one can be 0.
        allowed = self.relative * max(largest(a), largest(b)) + self.absolute * scale
        return largest(difference) / allowed


def _difference(a: Array, b: Array) -> Array:
    """Returns `a - b` for arrays of any dtype; infinity where the result is too large."""
    with np.errstate(over="ignore"):
        # complex128 holds the values of every dtype. Without the conversion, booleans could not be
        # subtracted, and unsigned integers would wrap around.
        return a.astype(np.complex128) - b


FLOAT64 = Tolerance()
FLOAT32 = Tolerance(relative=1e-3, absolute=1e-5, dtype="float32")
FLOAT16 = Tolerance(relative=1e-1, absolute=1e-2, dtype="16 bits or fewer")


def tolerance_for_dtype(dtype: str) -> Tolerance:
    """Returns the tolerance for values that were computed in a dtype, such as "torch.float32"."""
    if dtype == "torch.float64":
        return FLOAT64
    if dtype == "torch.float32":
        return FLOAT32
    return FLOAT16


def largest(array: Array) -> float:
    """Returns the largest finite absolute value in an array; 0 if there is none."""
    finite = array[np.isfinite(array)]
    if finite.size == 0:
        return 0.0
    return float(np.abs(finite).max())


def largest_of_all(arrays: Mapping[str, Array]) -> float:
    """Returns the largest finite absolute value in several arrays; 0 if there is none."""
    return max((largest(array) for array in arrays.values()), default=0.0)
