"""Patterns of gradients that are not the reference's: constant ratios, and other weights.

The gradient of several ranks is a sum of what their backward passes left, each times a weight. If
the reference's gradient is such a sum too, with other weights, then only the weighting is wrong,
and the weights say what it should have been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.diagnose.updates import Array

_EXACT = 1e-7
"""The largest remainder, against the gradient itself, that counts as none."""


def constant_ratio(
    reference: Mapping[str, Array], found: Mapping[str, Array], exact: float = _EXACT
) -> float | None:
    """`c` where all of `found` is `c` times the reference; None: there is no such number."""
    a, b = flat(reference), flat(found)
    if a.shape != b.shape or not a.size:
        return None
    square = float(a @ a)
    if square == 0.0:
        return None
    ratio = float(a @ b) / square
    return ratio if _norm(b - ratio * a) <= exact * _norm(b) and ratio != 0.0 else None


def ratios(reference: Mapping[str, Array], found: Mapping[str, Array]) -> dict[str, float | None]:
    """The constant ratio of each tensor by itself; None: it has none."""
    return {
        name: constant_ratio({name: reference[name]}, {name: found[name]})
        for name in reference
        if name in found
    }


def weights(
    target: Mapping[str, Array], parts: Sequence[Mapping[str, Array]], exact: float = _EXACT
) -> tuple[float, ...] | None:
    """The numbers by which `parts` are multiplied in a sum that is `target`.

    Args:
        target: a gradient.
        parts: what each backward pass left; a tensor that one lacks counts as zero.
        exact: the largest remainder.

    Returns:
        One number a part; None where there is no such sum, or it could be one by chance.
    """
    names = list(target)
    goal = flat(target)
    if not parts or goal.size < 4 * len(parts):
        return None
    columns = np.stack(
        [
            flat({n: part[n] if n in part else np.zeros_like(target[n]) for n in names})
            for part in parts
        ],
        axis=1,
    )
    scale = np.sqrt((columns**2).sum(axis=0))
    used = scale > 0
    if not used.any():
        return None
    # Scaled: parts may be of very different sizes, and the rank is judged against the largest.
    scaled = columns[:, used] / scale[used]
    solution, _, rank, _ = np.linalg.lstsq(scaled, goal, rcond=1e-10)
    if rank < used.sum() or _norm(goal - scaled @ solution) > exact * _norm(goal):
        return None
    result = np.zeros(len(parts))
    result[used] = solution / scale[used]
    return tuple(float(w) for w in result)


def proportional(one: Sequence[float], other: Sequence[float], exact: float = 1e-5) -> bool:
    """Whether two lists of numbers are multiples of each other."""
    a, b = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    if not a.any() or not b.any():
        return False
    a, b = a / _norm(a), b / _norm(b)
    return bool(_norm(a - b) <= exact)


def near(one: float, other: float, exact: float = 1e-6) -> bool:
    """Equal but for rounding."""
    return abs(one - other) <= exact * max(abs(one), abs(other))


def flat(arrays: Mapping[str, Array]) -> Array:
    """All values in one row."""
    return np.concatenate([np.zeros(0), *(a.ravel().astype(np.float64) for a in arrays.values())])


def _norm(values: Array) -> float:
    return float(np.linalg.norm(values))
