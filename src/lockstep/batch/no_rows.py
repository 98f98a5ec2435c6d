"""Tensors of no rows, and one placeholder row where a function refuses them.

A rank without samples gets batches of shape `(0, *)`. Most functions take these: a sum of nothing
is 0, a mean NaN. Some refuse them: a reshape with -1, `max`, `CTCLoss`. `stand_in` calls such a
function once more with one row, of a real sample, and cuts that row off its result. A
floating-point result without rows becomes NaN, as the mean of nothing is; an integer, such as the
longest length, remains that of the placeholder.

Prepared models do this for their whole forward pass (`strategies.placeholder`). Around them, in the
user's loop, tensors of the class `NoRows` do it, function by function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import get_default_nowrap_functions

from lockstep.batch.pytree import map_tensors, tensors
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.distributed.torch_compat import DisableTorchFunctionSubclass

REFUSALS = (RuntimeError, ValueError, IndexError)
"""What torch raises where a function refuses tensors of no rows."""


def has_no_rows(tensor: Tensor) -> bool:
    """Whether some dimension of the tensor is 0."""
    return bool(tensor.dim()) and not tensor.numel()


class NoRows(Tensor):
    """A tensor of no rows, whose functions get a placeholder row where they refuse it.

    What they return is of this class as long as it has no rows, and a plain tensor otherwise.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch with tensors of which at least one is of this class."""
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            try:
                result = func(*args, **kwargs)
            except REFUSALS as error:
                result = stand_in(func, args, kwargs, error)
            # Attributes such as `_base` are the same object each time they are asked for.
            is_attribute = func in get_default_nowrap_functions()
            if isinstance(result, Tensor | tuple | list) and not is_attribute:
                return map_tensors(result, marked)
            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is saved, or sent to another process, is a plain tensor."""
        with DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def marked(tensor: Tensor) -> Tensor:
    """A plain tensor of no rows as one of the class `NoRows`; any other as it is."""
    if type(tensor) is Tensor and has_no_rows(tensor):
        return tensor.as_subclass(NoRows)
    return tensor


def stand_in(func: Callable[..., Any], args: Any, kwargs: Any, refusal: Exception) -> Any:
    """What a function returns that has refused tensors of no rows, by one placeholder row.

    Raises:
        Exception: `refusal`, where the function fails with a row too.
    """
    rows = Placeholder(())
    if not any(has_no_rows(tensor) for tensor in tensors((args, kwargs))):
        raise refusal
    args_with_row, kwargs_with_row = rows.added_to((args, kwargs))
    with preserve_rng_state():
        try:
            result = func(*args_with_row, **kwargs_with_row)
        except Exception:
            # In `x.view(len(x), -1)` the number of rows is an argument too.
            try:
                result = func(*_zeros_as_ones(args_with_row), **kwargs_with_row)
            except Exception:
                raise refusal from None
    return map_tensors(result, lambda tensor: _undefined(rows.cut_off(tensor)))


def _undefined(tensor: Tensor) -> Tensor:
    """NaN for a floating-point result that has values without any row."""
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        with torch.no_grad():
            tensor.fill_(torch.nan)
    return tensor


def _zeros_as_ones(arguments: Any) -> Any:
    if type(arguments) is int:
        return arguments or 1
    if isinstance(arguments, tuple | list):
        return [_zeros_as_ones(each) for each in arguments]
    return arguments


class Placeholder:
    """Puts one row into tensors of no rows, and cuts it off what was computed with them.

    Args:
        samples: tensors with at least one row, in which a row of the same shape is looked for.
    """

    def __init__(self, samples: Iterable[Tensor]) -> None:
        self._samples = list(samples)
        self._lengths: set[int] = {1}
        """How long a dimension of a result may be that holds the placeholder's rows alone."""
        self._dimensions: set[int] = set()
        """Which dimensions of the arguments had no rows."""

    def added_to(self, arguments: Any) -> Any:
        """A pytree with one row in the place of each tensor of no rows."""
        return map_tensors(arguments, self._with_row)

    def _with_row(self, tensor: Tensor) -> Tensor:
        if not has_no_rows(tensor):
            return tensor
        self._dimensions.add(tensor.shape.index(0))
        row = placeholder_of(tensor, self._samples)
        length = 1
        for size in row.shape:
            length *= size
            self._lengths.add(length)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return row
        made: Tensor = _AddRow.apply(tensor, row)  # type: ignore[no-untyped-call]
        return made

    def cut_off(self, result: Tensor) -> Tensor:
        """A result without the placeholder's rows; its gradient is zero."""
        dimension = None
        if result.dim() and result.shape[0] in self._lengths and 0 in self._dimensions:
            dimension = 0
        else:
            for each in sorted(self._dimensions):
                if each < result.dim() and result.shape[each] == 1 and dimension is None:
                    dimension = each
        cut: Tensor = _CutRows.apply(result, dimension)  # type: ignore[no-untyped-call]
        return cut


def placeholder_of(tensor: Tensor, samples: Iterable[Tensor]) -> Tensor:
    """One row in the place of none.

    A batch without rows is a view of a real sample, and so are views of it: then the row is that
    sample's. Of another tensor it is a sample's row of the same shape, else made up.

    Args:
        tensor: of no elements.
        samples: tensors with at least one row.
    """
    shape = [max(1, size) for size in tensor.shape]
    last = tensor.storage_offset()
    last += sum((n - 1) * stride for n, stride in zip(shape, tensor.stride(), strict=True))
    if last < tensor.untyped_storage().nbytes() // tensor.element_size():
        found = tensor.detach().as_strided(shape, tensor.stride(), tensor.storage_offset())
        return found.clone()
    for sample in samples:
        if sample.dim() and len(sample) and list(sample.shape[1:]) == shape[1:]:
            return sample[:1].detach().to(tensor.device, tensor.dtype, copy=True)
    if tensor.dtype == torch.bool:
        return tensor.new_zeros(shape)
    if not tensor.is_floating_point():
        return tensor.new_ones(shape)
    count = torch.Size(shape).numel()
    # Rows with a spread: the deviation of equal numbers is 0, and its derivative infinite.
    return torch.linspace(0.1, 1, count, device=tensor.device).to(tensor.dtype).view(shape)


class _AddRow(torch.autograd.Function):
    """Puts a row in the place of a tensor without rows, which gets no gradient of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, row: Tensor) -> Tensor:
        ctx.shape = tensor.shape
        return row

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.shape), None


class _CutRows(torch.autograd.Function):
    """A tensor without its rows, on the same memory; its gradient is zero, whatever comes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dimension: int | None) -> Tensor:
        ctx.shape = tensor.shape
        if dimension is None:
            return tensor.clone()
        shape = list(tensor.shape)
        shape[dimension] = 0
        cut = tensor.new_empty(0)
        cut.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, tensor.stride())
        return cut

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.shape), None
