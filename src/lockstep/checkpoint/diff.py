"""Where two sets of stored tensors differ, and by how much; a part of one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.contents import Stored
from lockstep.checkpoint.encoding import encode
from lockstep.checkpoint.modules import match_names
from lockstep.errors import CheckpointError

_ELEMENTS = 2**22  # compared at a time, in at most 16 bytes each
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass
class Values:
    """By how much the values of two tensors of one shape differ."""

    count: int = 0
    """Elements that differ by more than is allowed; a NaN differs from all but a NaN."""
    absolute: float = 0.0
    """The largest |a - b|."""
    relative: float = 0.0
    """The largest |a - b| / max(|a|, |b|)."""
    nans: list[int] = field(default_factory=lambda: [0, 0])
    """NaNs on either side."""


@dataclass(frozen=True)
class Pair:
    """A tensor's name, and the tensor on either side."""

    name: str
    a: Stored | None
    b: Stored | None
    values: Values | None
    """Where both are there in one shape."""

    @property
    def differs(self) -> bool:
        """In being there, shape, dtype or values."""
        if self.a is None or self.b is None or self.values is None:
            return True
        return self.a.dtype is not self.b.dtype or bool(self.values.count)


def compare(
    a: Mapping[str, Stored],
    b: Mapping[str, Stored],
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> Iterator[Pair]:
    """Each name of `a` and then those of `b` alone, compared as they are asked for.

    Args:
        a: tensors by name.
        b: the others.
        atol: elements are equal where |a - b| <= atol + rtol * |b|.
        rtol: see `atol`.
    """
    for name, first in a.items():
        second = b.get(name)
        same = second is not None and first.shape == second.shape
        values = compare_values(first, second, atol, rtol) if second and same else None
        yield Pair(name, first, second, values)
    for name, second in b.items():
        if name not in a:
            yield Pair(name, None, second, None)


def compare_values(a: Stored, b: Stored, atol: float = 0.0, rtol: float = 0.0) -> Values:
    """Compares two tensors of one shape, in float64 (complex ones in complex128)."""
    values = Values()
    for begin in range(0, a.count, _ELEMENTS):
        end = min(begin + _ELEMENTS, a.count)
        _add_part(values, a.part(begin, end), b.part(begin, end), atol, rtol)
    return values


def same_extra(a: Any, b: Any) -> bool:
    """Whether two values that are no tensors (but may hold some) are the same."""
    try:
        (tree, tensors), (other, others) = encode(a), encode(b)
    except CheckpointError:  # objects of a trusted pickle
        return bool(repr(a) == repr(b))
    return tree == other and all(torch.equal(tensors[name], others[name]) for name in tensors)


def renamed(a: Mapping[str, Stored], b: Mapping[str, Stored]) -> tuple[dict[str, Stored], str]:
    """`b` under the names of `a`, where wrappers alone have changed them; what was done, in words.

    A name that has no counterpart stays as it is.
    """
    match = match_names({n: s.shape for n, s in b.items()}, {n: s.shape for n, s in a.items()})
    if not match.changes:
        return dict(b), ""
    taken = set(match.names.values())
    others = {n: s for n, s in b.items() if n not in match.names and n not in taken}
    return {match.names[n]: b[n] for n in match.names} | others, "; ".join(match.changes)


def _add_part(values: Values, a: Tensor, b: Tensor, atol: float, rtol: float) -> None:
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        # Mostly so, and many times faster than what follows.
        narrow = a.dtype.itemsize == 1  # 8-bit floats have no isnan of their own
        nans = int((a.float() if narrow else a).isnan().sum()) if _has_fractions(a) else 0
        values.nans = [count + nans for count in values.nans]
        return
    exact = not (_has_fractions(a) or _has_fractions(b)) and a.dtype == b.dtype
    # Not in float64, which has not all integers beyond 2**53.
    wrong = _integers(a) != _integers(b) if exact else None
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    a_nan, b_nan = a.isnan(), b.isnan()
    values.nans[0] += int(a_nan.sum())
    values.nans[1] += int(b_nan.sum())
    wrong = (a != b) & ~(a_nan & b_nan) if wrong is None else wrong
    if not wrong.any():
        return
    a, b = a[wrong], b[wrong]
    apart = (a - b).abs()
    # Infinite on one side is apart by any measure; NaN is no number, and counts in any case.
    beyond = ~(apart <= atol + rtol * b.abs()) | apart.isinf()
    values.count += int(beyond.sum()) if atol or rtol else a.numel()
    number = ~apart.isnan()
    if number.any():
        relative = apart / torch.maximum(a.abs(), b.abs())
        values.absolute = max(values.absolute, float(apart[number].max()))
        relative = relative[number].nan_to_num(nan=math.inf, posinf=math.inf)
        values.relative = max(values.relative, float(relative.max()))


def _integers(tensor: Tensor) -> Tensor:
    """The same bits in a dtype that torch compares."""
    return tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
