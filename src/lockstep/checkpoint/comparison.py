"""Compares the tensors of two files or checkpoints, for `lockstep checkpoint diff`.

The tensors of both sides are `LazyTensor`s: their values are read from the files and compared a
chunk at a time. Integers of the same dtype are compared exactly, complex values in complex128, and
all others in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.encoding import encode
from lockstep.checkpoint.lazy_tensor import LazyTensor
from lockstep.checkpoint.name_matching import match_names
from lockstep.errors import CheckpointError

CHUNK_ELEMENTS = 2**22
"""Elements that are compared at a time; each takes at most 16 bytes."""
SIGNED_DTYPE = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
"""Torch compares no tensors of these unsigned dtypes, but those of the signed ones."""


@dataclass
class ValueDifferences:
    """How much the values of two tensors `a` and `b` of one shape differ."""

    count: int = 0
    """Number of elements that differ by more than is allowed. Two NaNs are equal."""
    absolute: float = 0.0
    """The largest |a - b|."""
    relative: float = 0.0
    """The largest |a - b| / max(|a|, |b|)."""
    nans: list[int] = field(default_factory=lambda: [0, 0])
    """The numbers of NaNs in `a` and in `b`."""

    def count_nans(self, *, in_a: int, in_b: int) -> None:
        """Adds the numbers of NaNs in some further elements of `a` and of `b`."""
        self.nans[0] += in_a
        self.nans[1] += in_b

    @property
    def are_equal(self) -> bool:
        """True if no values differ, not even by as little as is allowed."""
        return self.count == 0 and self.absolute == 0


@dataclass(frozen=True)
class Pair:
    """The tensors of the two sides that have the same name."""

    name: str
    a: LazyTensor | None
    b: LazyTensor | None
    values: ValueDifferences | None
    """None if one side lacks the tensor, or if the shapes differ."""

    @property
    def differs(self) -> bool:
        """True if one side lacks the tensor, or if shape, dtype or values differ."""
        if self.a is None or self.b is None or self.values is None:
            return True
        return self.a.dtype is not self.b.dtype or self.values.count > 0


def compare(
    a: Mapping[str, LazyTensor],
    b: Mapping[str, LazyTensor],
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> Iterator[Pair]:
    """Yields a pair for each name: first the names of `a`, then those that only `b` has.

    The values of two tensors are read and compared just before their pair is yielded. Elements are
    equal if |a - b| <= atol + rtol * |b|.

    Args:
        a: the tensors of one side by name.
        b: the tensors of the other side by name.
        atol: the allowed absolute difference.
        rtol: the allowed relative difference.
    """
    names = {**a, **b}  # in this order, without repetitions
    for name in names:
        a_tensor = a.get(name)
        b_tensor = b.get(name)

        values = None
        if a_tensor is not None and b_tensor is not None and a_tensor.shape == b_tensor.shape:
            values = compare_values(a_tensor, b_tensor, atol, rtol)
        yield Pair(name, a_tensor, b_tensor, values)


def compare_values(
    a: LazyTensor, b: LazyTensor, atol: float = 0.0, rtol: float = 0.0
) -> ValueDifferences:
    """Compares the values of two tensors of one shape, a chunk of elements at a time."""
    differences = ValueDifferences()
    for begin in range(0, a.num_elements, CHUNK_ELEMENTS):
        end = min(begin + CHUNK_ELEMENTS, a.num_elements)
        _compare_chunk(differences, a.read_range(begin, end), b.read_range(begin, end), atol, rtol)
    return differences


def _compare_chunk(
    differences: ValueDifferences, a: Tensor, b: Tensor, atol: float, rtol: float
) -> None:
    """Compares two flat tensors of the same length, and adds the result to `differences`.

    Args:
        differences: the result for the chunks before, which is updated.
        a: a CPU tensor of shape `(n,)`.
        b: a CPU tensor of shape `(n,)`, perhaps of another dtype.
        atol: the allowed absolute difference, as in `compare`.
        rtol: the allowed relative difference.
    """
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        # Equal bits are the usual case, and this is many times faster than the rest.
        num_nans = _count_nans(a)
        differences.count_nans(in_a=num_nans, in_b=num_nans)
        return

    wide_dtype = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    wide_a = a.to(wide_dtype)
    wide_b = b.to(wide_dtype)
    a_is_nan = wide_a.isnan()
    b_is_nan = wide_b.isnan()
    differences.count_nans(in_a=int(a_is_nan.sum()), in_b=int(b_is_nan.sum()))

    # Integers beyond 2**53 may differ and be equal in float64. So they are compared as integers.
    both_are_integers = a.dtype == b.dtype and not _has_fractions(a)
    if both_are_integers:
        is_different = _comparable_integers(a) != _comparable_integers(b)
    else:
        is_different = (wide_a != wide_b) & ~(a_is_nan & b_is_nan)
    if is_different.any():
        _measure_differences(differences, wide_a[is_different], wide_b[is_different], atol, rtol)


def _measure_differences(
    differences: ValueDifferences, a: Tensor, b: Tensor, atol: float, rtol: float
) -> None:
    """Adds the elements of a chunk that differ to `differences`: how many, and by how much.

    Args:
        differences: the result for the chunks before, which is updated.
        a: the elements of one side, in float64 or complex128.
        b: the elements of the other side in the same places. Each differs from that of `a`.
        atol: the allowed absolute difference, as in `compare`.
        rtol: the allowed relative difference.
    """
    difference = (a - b).abs()
    differences.count += difference.numel()
    if atol or rtol:
        is_within_tolerance = difference <= atol + rtol * b.abs()  # False if one side is NaN
        # Where b is infinite, so is the tolerance. An infinite difference counts all the same.
        is_allowed = is_within_tolerance & difference.isfinite()
        differences.count -= int(is_allowed.sum())

    # Where one side is NaN, the difference is NaN too, and has no size.
    is_number = ~difference.isnan()
    if not is_number.any():
        return
    differences.absolute = max(differences.absolute, float(difference[is_number].max()))

    relative = (difference / torch.maximum(a.abs(), b.abs()))[is_number]
    relative[relative.isnan()] = math.inf  # an infinite difference, divided by an infinite value
    differences.relative = max(differences.relative, float(relative.max()))


def _count_nans(tensor: Tensor) -> int:
    """Counts the NaNs in a tensor of any dtype."""
    if not _has_fractions(tensor):
        return 0
    if tensor.dtype.itemsize == 1:  # torch has no isnan for floats of 8 bits
        tensor = tensor.float()
    return int(tensor.isnan().sum())


def _comparable_integers(tensor: Tensor) -> Tensor:
    """Returns a tensor of integers with the same bits, in a dtype that torch can compare."""
    return tensor.view(SIGNED_DTYPE.get(tensor.dtype, tensor.dtype))


def _has_fractions(tensor: Tensor) -> bool:
    """Returns True for floating-point and complex dtypes, False for integers and bool."""
    return tensor.is_floating_point() or tensor.is_complex()


def same_extra(a: Any, b: Any) -> bool:
    """Returns True if two values other than tensors are equal. They may contain tensors.

    `encode` splits each value into a tree, which can be compared with `==`, and tensors by name.
    """
    try:
        a_encoded = encode(a)
        b_encoded = encode(b)
    except CheckpointError:
        # Only plain types can be encoded. A trusted pickle may hold objects of any class.
        return bool(repr(a) == repr(b))

    # Equal trees refer to tensors of the same names.
    if a_encoded.tree != b_encoded.tree:
        return False
    for name, a_tensor in a_encoded.tensors.items():
        if not torch.equal(a_tensor, b_encoded.tensors[name]):
            return False
    return True


def rename_to_match(
    reference: Mapping[str, LazyTensor], other: Mapping[str, LazyTensor]
) -> tuple[dict[str, LazyTensor], str]:
    """Gives tensors the names that they have on the reference side, if only wrappers changed them.

    If the reference has "fc.weight" and the other side "module.fc.weight", that becomes
    "fc.weight". A tensor without a counterpart keeps its name. But it is left out if a renamed
    tensor has taken its name.

    Returns:
        The tensors of the other side by their new names, and a text that says what was done, "" if
        nothing.
    """
    match = match_names(
        file_shapes={name: tensor.shape for name, tensor in other.items()},
        model_shapes={name: tensor.shape for name, tensor in reference.items()},
    )
    if not match.changes:
        return dict(other), ""

    renamed = {}
    for name, reference_name in match.name_pairs.items():
        renamed[reference_name] = other[name]
    for name, tensor in other.items():
        has_counterpart = name in match.name_pairs
        if not has_counterpart and name not in renamed:
            renamed[name] = tensor
    return renamed, "; ".join(match.changes)
