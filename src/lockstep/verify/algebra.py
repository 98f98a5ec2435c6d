"""Linear algebra on dictionaries of gradients: is one a multiple, a mean, or a sum of others?

A *remainder* is what is left of a gradient after its best explanation by others has been
subtracted. It counts as rounding if its norm is at most `max_error` times the gradient's norm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lockstep.verify.tolerance import Array

# A least-squares fit with too few equations for each unknown could succeed by chance.
MIN_VALUES_PER_WEIGHT = 4


def constant_ratio(
    reference: Mapping[str, Array], tensors: Mapping[str, Array], max_error: float = 1e-7
) -> float | None:
    """Returns `c` if each tensor is `c` times the reference's, or None if there is no such number.

    Args:
        reference: tensors by name.
        tensors: other tensors with the same names.
        max_error: the largest remainder, relative to `tensors`, that counts as rounding.
    """
    a = flat(reference)
    b = flat(tensors)
    if a.shape != b.shape:
        return None
    square = float(a @ a)
    if square == 0.0:
        return None
    ratio = float(a @ b) / square
    if ratio == 0.0:
        return None
    remainder = norm(b - ratio * a)
    is_rounding = remainder <= max_error * norm(b)  # False for NaN
    return ratio if is_rounding else None


def weights(
    target: Mapping[str, Array], parts: Sequence[Mapping[str, Array]], max_error: float = 1e-7
) -> tuple[float, ...] | None:
    """Returns the weights with which `parts` add up to `target`, by least squares.

    Args:
        target: a gradient.
        parts: what each backward pass left; a tensor that a part lacks counts as zero.
        max_error: the largest remainder, relative to `target`, that counts as rounding.

    Returns:
        One weight for each part, or None if there is no such sum, or if it could fit by chance.
    """
    goal = flat(target)
    if not parts or goal.size < MIN_VALUES_PER_WEIGHT * len(parts):
        return None
    columns = []
    for part in parts:
        whole_part = {}
        for name, array in target.items():
            whole_part[name] = part.get(name, np.zeros_like(array))
        columns.append(flat(whole_part))
    matrix = np.stack(columns, axis=1)
    column_norms = np.linalg.norm(matrix, axis=0)
    nonzero = column_norms > 0
    if not nonzero.any():
        return None
    # Parts may be of very different sizes, and lstsq judges the rank against the largest column.
    normalized = matrix[:, nonzero] / column_norms[nonzero]
    solution, _, rank, _ = np.linalg.lstsq(normalized, goal, rcond=1e-10)
    is_unique = rank >= nonzero.sum()
    if not is_unique or norm(goal - normalized @ solution) > max_error * norm(goal):
        return None
    result = np.zeros(len(parts))
    result[nonzero] = solution / column_norms[nonzero]
    return tuple(result.tolist())


def proportional(first: Sequence[float], second: Sequence[float]) -> bool:
    """Returns whether two lists of numbers are multiples of each other."""
    ratio = constant_ratio({"": np.array(first)}, {"": np.array(second)}, 1e-5)
    return ratio is not None


def mean_of(ranks: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Returns the mean over ranks of the arrays with each name.

    An array that a rank lacks counts as zero.
    """
    arrays_by_name: dict[str, list[Array]] = defaultdict(list)
    for arrays in ranks:
        for name, array in arrays.items():
            arrays_by_name[name].append(array)
    means = {}
    for name, arrays_of_ranks in arrays_by_name.items():
        means[name] = np.asarray(sum(arrays_of_ranks)) / len(ranks)
    return means


def near(first: float, second: float, max_error: float = 1e-6) -> bool:
    """Returns whether two numbers are equal within a relative error."""
    return math.isclose(first, second, rel_tol=max_error)


def all_near(values: Sequence[float], max_error: float) -> bool:
    """Returns whether all numbers equal the first one within a relative error, at least 1e-6."""
    return all(near(values[0], value, max(max_error, 1e-6)) for value in values)


def flat(arrays: Mapping[str, Array]) -> Array:
    """Returns all values of the arrays as one float64 vector."""
    rows = [np.zeros(0)]
    for array in arrays.values():
        rows.append(array.ravel().astype(np.float64))
    return np.concatenate(rows)


def norm(values: Array) -> float:
    """Returns the Euclidean norm."""
    return float(np.linalg.norm(values))


def sum_of_passes(passes: Sequence[Mapping[str, Array]], names: Iterable[str]) -> dict[str, Array]:
    """Returns what all backward passes together left of each gradient.

    Args:
        passes: the gradients that each backward pass left.
        names: of the gradients.

    Returns:
        The sums by name; empty if no pass left a gradient of one of the names.
    """
    sums = {}
    for name in names:
        gradients = [arrays[name] for arrays in passes if name in arrays]
        if not gradients:
            return {}
        sums[name] = np.asarray(sum(gradients))
    return sums
