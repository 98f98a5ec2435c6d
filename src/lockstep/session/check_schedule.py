"""Says at which global batches the ranks are compared, which costs a collective each time."""

from __future__ import annotations

CHECK_EVERY = 200
"""The number of global batches from one comparison of the ranks to the next, by default."""
_EARLY_CHECKS = frozenset({1, 2, 3, 10})


def check_due(number: int, every: int = CHECK_EVERY) -> bool:
    """Returns True if the ranks must be compared at a global batch.

    They are compared at some of the first global batches, and then at regular intervals.

    Args:
        number: number of the global batch, from 1.
        every: length of the interval.
    """
    return number in _EARLY_CHECKS or number % every == 0
