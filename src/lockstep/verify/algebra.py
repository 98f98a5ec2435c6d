"""Linear algebra on gradients: is one gradient a multiple, a mean or a sum of others?

Gradients are dictionaries of arrays by name. All arrays of one dictionary together are treated as
one long vector (see `flat`). If a vector `b` is explained by others, for example as `c * a`, the
*remainder* is what the best fit leaves, here `b - c * a`. It counts as rounding if its norm is at
most `max_error` times the norm of `b`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lockstep.verify.tolerance import Array

# A least-squares fit with too few values for each weight could succeed by chance.
MIN_VALUES_PER_WEIGHT = 4


def constant_ratio(
    reference: Mapping[str, Array], tensors: Mapping[str, Array], max_error: float = 1e-7
) -> float | None:
    """Returns the number `c` for which `tensors = c * reference`; None if there is no such number.

    Args:
        reference: tensors by name.
        tensors: other tensors with the same names.
        max_error: largest remainder, relative to `tensors`, that counts as rounding.
    """
    a = flat(reference)
    b = flat(tensors)
    if a.shape != b.shape:
        return None

    # The norm of b - c * a is smallest for c = (a . b) / (a . a).
    square = float(a @ a)
    if square == 0.0:
        return None

    ratio = float(a @ b) / square
    if ratio == 0.0:  # b is zero, or orthogonal to a
        return None

    remainder = norm(b - ratio * a)
    is_rounding = remainder <= max_error * norm(b)  # False if b contains NaN
    return ratio if is_rounding else None


def fit_weights(
    target: Mapping[str, Array], parts: Sequence[Mapping[str, Array]], max_error: float = 1e-7
) -> tuple[float, ...] | None:
    """Finds the weights with which `parts` add up to `target`: `w1 * part1 + w2 * part2 + ...`.

    Args:
        target: a gradient, as tensors by name.
        parts: gradients that may be its parts, such as those of each backward pass. If a part lacks
            a tensor, the tensor is taken as zero.
        max_error: largest remainder, relative to `target`, that counts as rounding.

    Returns:
        One weight for each part, found by least squares; 0 for a part that is zero. None if there
        is no such sum, or if it could fit by chance.
    """
    goal = flat(target)
    if not parts:
        return None

    # With so few values, some weights would fit by chance.
    if goal.size < MIN_VALUES_PER_WEIGHT * len(parts):
        return None

    # One column for each part: shape (values of the target, parts).
    matrix = np.stack([_values_like(target, part) for part in parts], axis=1)
    column_norms = np.linalg.norm(matrix, axis=0)
    is_nonzero = column_norms > 0  # for each part
    if not is_nonzero.any():
        return None

    # Solve goal = normalized @ solution, where each column is a part divided by its norm. Without
    # this normalization, `lstsq` would take very small parts for zero.
    nonzero_norms = column_norms[is_nonzero]
    normalized = matrix[:, is_nonzero] / nonzero_norms
    solution, _, matrix_rank, _ = np.linalg.lstsq(normalized, goal, rcond=1e-10)

    # If the columns are linearly dependent, many weights give the same sum.
    num_columns = len(nonzero_norms)
    columns_are_independent = matrix_rank >= num_columns
    if not columns_are_independent:
        return None

    remainder = norm(goal - normalized @ solution)
    if remainder > max_error * norm(goal):
        return None

    # The weights of the parts themselves, and not of their normalized columns.
    weights_of_parts = np.zeros(len(parts))
    weights_of_parts[is_nonzero] = solution / nonzero_norms
    return tuple(weights_of_parts.tolist())


def _values_like(target: Mapping[str, Array], part: Mapping[str, Array]) -> Array:
    """Returns the values of a part in the order of the target, as one vector.

    A tensor that the part lacks is taken as zero.
    """
    tensors_in_order = {}
    for name, array in target.items():
        tensors_in_order[name] = part.get(name, np.zeros_like(array))
    return flat(tensors_in_order)


def proportional(first: Sequence[float], second: Sequence[float]) -> bool:
    """True if one list of numbers is a multiple of the other."""
    ratio = constant_ratio({"": np.array(first)}, {"": np.array(second)}, max_error=1e-5)
    return ratio is not None


def mean_of(ranks: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Returns the mean over all ranks, for each array by name.

    An array that a rank lacks is taken as zero.

    Args:
        ranks: arrays of each rank, by name.
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
    """True if two numbers are equal within a relative error."""
    return math.isclose(first, second, rel_tol=max_error)


def all_near(values: Sequence[float], max_error: float) -> bool:
    """True if all numbers are equal to the first one, within a relative error of at least 1e-6."""
    return all(near(values[0], value, max(max_error, 1e-6)) for value in values)


def flat(arrays: Mapping[str, Array]) -> Array:
    """Returns the values of all arrays as one float64 vector."""
    vectors = [np.zeros(0)]  # `np.concatenate` needs at least one vector
    for array in arrays.values():
        vectors.append(array.ravel().astype(np.float64))
    return np.concatenate(vectors)


def norm(values: Array) -> float:
    """Returns the Euclidean norm of a vector."""
    return float(np.linalg.norm(values))


def sum_of_passes(passes: Sequence[Mapping[str, Array]], names: Iterable[str]) -> dict[str, Array]:
    """Returns the sum of each gradient over all backward passes, by name.

    Args:
        passes: gradients of each backward pass, by name.
        names: names of the gradients to be summed.

    Returns:
        The sums by name; empty if any of the gradients is missing in all backward passes.
    """
    sums = {}
    for name in names:
        gradients = [arrays[name] for arrays in passes if name in arrays]
        if not gradients:
            return {}
        sums[name] = np.asarray(sum(gradients))
    return sums
