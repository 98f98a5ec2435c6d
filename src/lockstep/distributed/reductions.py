"""Reduces tensors of any dtype, and single numbers, over ranks: sum, mean, maximum, minimum.

Backends can reduce only some of torch's dtypes. Other tensors are converted to a *carrier*, a
tensor of the nearest dtype that every backend reduces, and converted back. A *leaf* is one tensor
or number in the nested structure that a collective takes. If any rank has NaN, the maximum and the
minimum are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication import routing
from lockstep.distributed.collective_calls import CARRIER_DTYPES, LeafDescription, find_problem
from lockstep.errors import UsageError

Number = bool | int | float

UINT64_HIGHEST_BIT = -(2**63)
"""The highest bit of a 64-bit integer, as an int64."""


def all_reduced_copy(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Returns the reduction of a tensor over all ranks, without changing the tensor.

    Sums of integers wrap around as in torch's addition.

    Args:
        tensor: a tensor of any dtype that `find_problem` accepts.
        operation: SUM, MAX or MIN.
    """
    # `x.conj()` and negated views share the memory of `x`, with its numbers. Backends send that
    # memory, so `resolve_conj` and `resolve_neg` write out the tensor's own numbers first.
    contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if contiguous.dtype is torch.uint64:
        return _all_reduced_uint64(contiguous, operation)

    carrier_dtype = CARRIER_DTYPES.get(contiguous.dtype, contiguous.dtype)
    carrier = contiguous.to(carrier_dtype, copy=True)

    # Only floats can be NaN. Backends may lose a NaN when they take the maximum or minimum.
    if carrier.is_floating_point() and operation != dist.ReduceOp.SUM:
        return _extreme_or_nan(carrier, operation).to(contiguous.dtype)

    routing.all_reduce(carrier, operation)
    return carrier.to(contiguous.dtype)


def _all_reduced_uint64(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Reduces a uint64 tensor over all ranks, as an int64 tensor with the same bits.

    A sum has the same bits for both dtypes. For a maximum or minimum the highest bit is flipped
    before and after, so that the order of the unsigned numbers becomes that of signed ones:
    0 becomes -2**63, and 2**64 - 1 becomes 2**63 - 1.
    """
    flipped_bits = 0 if operation == dist.ReduceOp.SUM else UINT64_HIGHEST_BIT
    carrier = tensor.view(torch.int64) ^ flipped_bits
    routing.all_reduce(carrier, operation)
    return (carrier ^ flipped_bits).view(torch.uint64)


def _extreme_or_nan(tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Returns the maximum or minimum over ranks, and NaN where any rank has NaN.

    A backend may return NaN or the number, depending on the order in which ranks arrive. So NaN is
    sent in a second tensor of marks: 1 for a maximum, -1 for a minimum, and 0 where there is no
    NaN. The mark of any rank survives the reduction.

    Args:
        tensor: a floating-point tensor of any shape.
        operation: MAX or MIN.
    """
    # In place of NaN, the ranks send a number that never wins the reduction.
    if operation == dist.ReduceOp.MAX:
        nan_mark = 1
        never_wins = -torch.inf
    else:
        nan_mark = -1
        never_wins = torch.inf

    is_nan = tensor.isnan()
    numbers = tensor.masked_fill(is_nan, never_wins)
    marks = nan_mark * is_nan.to(tensor.dtype)

    numbers_and_marks = torch.stack([numbers, marks])  # shape (2, *)
    routing.all_reduce(numbers_and_marks, operation)
    reduced_numbers, reduced_marks = numbers_and_marks
    return torch.where(reduced_marks == 0, reduced_numbers, torch.nan)


def identity_element(leaf: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Returns a tensor of the leaf's shape and dtype that does not change a reduction.

    That is 0 for SUM, the lowest value of the dtype for MAX and the highest for MIN.
    """
    if operation == dist.ReduceOp.SUM:
        return torch.zeros_like(leaf)

    needs_highest = operation == dist.ReduceOp.MIN
    if leaf.dtype == torch.bool:
        return torch.full_like(leaf, needs_highest)  # True for MIN, False for MAX

    is_8_bit = leaf.itemsize == 1  # some floating-point dtypes of 8 bits have no infinity
    if leaf.is_floating_point() and not is_8_bit:
        return torch.full_like(leaf, torch.inf if needs_highest else -torch.inf)

    limits = torch.finfo(leaf.dtype) if leaf.is_floating_point() else torch.iinfo(leaf.dtype)
    return torch.full_like(leaf, limits.max if needs_highest else limits.min)


def bool_to_int(leaf: Any) -> Any:
    """Converts a boolean leaf to integers, so that its sum is a count. Others are unchanged."""
    if isinstance(leaf, Tensor) and leaf.dtype is torch.bool:
        return leaf.to(torch.int64)
    if isinstance(leaf, bool):
        return int(leaf)
    return leaf


def to_floating_point(leaf: Any) -> Any:
    """Converts integers and booleans to floating point, to compute a mean.

    A leaf that has no mean, such as text, is returned unchanged; the collective refuses it later,
    on all ranks.
    """
    if find_problem("mean", leaf) is not None:
        return leaf
    if not isinstance(leaf, Tensor):
        return float(leaf)
    if leaf.is_floating_point() or leaf.is_complex():
        return leaf
    return leaf.to(torch.get_default_dtype())


def divide(leaf: Any, divisor: int) -> Any:
    """Returns `leaf / divisor` in the leaf's own dtype, for a leaf from `to_floating_point`."""
    if isinstance(leaf, Tensor) and leaf.dtype in CARRIER_DTYPES:
        # torch cannot divide these dtypes themselves.
        carrier = leaf.to(CARRIER_DTYPES[leaf.dtype])
        return (carrier / divisor).to(leaf.dtype)
    return leaf / divisor


def number_like(leaf: Any, number: Number, descriptions: Sequence[LeafDescription]) -> Any:
    """Converts a reduced number to the type of the leaf that this rank has passed.

    Args:
        leaf: the leaf that this rank has passed: a number, or a 0-dimensional tensor.
        number: the result of the reduction.
        descriptions: the type and dtype of the leaf that each rank has passed.
    """
    if not isinstance(leaf, Tensor):
        return number

    # This rank may have passed an integer tensor and another rank the Python number 0.5. Then the
    # result does not fit into an integer tensor. As in `torch.tensor(3) + 0.5`, it gets the default
    # dtype of floats.
    dtype = leaf.dtype
    any_floating_point = any(description.is_floating_point for description in descriptions)
    if any_floating_point and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    return torch.tensor(number, dtype=dtype, device=leaf.device)


def check_fits(name: str, number: Number, descriptions: Sequence[LeafDescription]) -> None:
    """Checks that a reduced integer fits into the dtypes that the ranks have passed.

    Every rank calls this with the same arguments, so either all of them raise the error or none.

    Args:
        name: the name of the collective: "sum".
        number: the result of the reduction.
        descriptions: the type and dtype of the leaf that each rank has passed.

    Raises:
        UsageError: the number does not fit into the dtype of some rank.
    """
    if type(number) is not int:  # a float or bool always fits
        return

    for description in descriptions:
        is_tensor = description.kind == "tensor"  # Python numbers have no limits
        is_integer = not description.is_floating_point and description.dtype != "bool"
        if not is_tensor or not is_integer:
            continue

        limits = torch.iinfo(getattr(torch, description.dtype))
        if not limits.min <= number <= limits.max:
            raise UsageError(
                f"world.{name} of 0-dimensional {description.dtype} tensors",
                f"the result, {number}, does not fit into {description.dtype}",
                "convert them to a wider dtype, or to plain numbers",
            )


def max_or_nan(numbers: list[Number]) -> Number:
    """Returns the largest number, or NaN if there is one; Python's max depends on the order."""
    return _nan_or(max, numbers)


def min_or_nan(numbers: list[Number]) -> Number:
    """Returns the smallest number, or NaN if there is one; Python's min depends on the order."""
    return _nan_or(min, numbers)


def _nan_or(choose: Callable[[list[Number]], Number], numbers: list[Number]) -> Number:
    """Returns NaN if any number is NaN, otherwise what `choose` (max or min) returns."""
    if any(math.isnan(number) for number in numbers):
        return math.nan
    return choose(numbers)
