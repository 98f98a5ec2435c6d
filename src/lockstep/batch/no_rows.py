"""Tensors without rows, and a placeholder row for functions of torch that refuse them.

A rank without samples gets batches of shape `(0, *)`. Most functions accept these: a sum of nothing
is 0, a mean NaN. Some refuse them: a reshape with -1, `max`, `CTCLoss`. Such a function is called
once more with a *placeholder*: one row, of a real sample, which is cut off its result again. A
floating-point result without rows becomes NaN, as the mean of nothing is. An integer, such as the
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
"""What torch raises if a function refuses tensors without rows."""


def has_no_rows(tensor: Tensor) -> bool:
    """Returns True if some dimension of the tensor is 0."""
    return tensor.dim() > 0 and tensor.numel() == 0


class NoRows(Tensor):
    """A tensor without rows. Functions that refuse it are called with a placeholder row.

    What functions return is of this class if it has no rows, and a plain tensor otherwise.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch with tensors of which at least one is of this class."""
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            try:
                result = func(*args, **kwargs)
            except REFUSALS as error:
                result = call_with_placeholder(func, args, kwargs, error)

            # Torch reads attributes such as `grad` and `_base` by calling `func` too. They are the
            # same object each time they are asked for, so they must not be made another one.
            is_attribute = func in get_default_nowrap_functions()
            if isinstance(result, (Tensor, tuple, list)) and not is_attribute:
                return map_tensors(result, mark_no_rows)

            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a plain tensor, so that is what is saved or sent to another process."""
        with DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def mark_no_rows(tensor: Tensor) -> Tensor:
    """Returns a plain tensor without rows as one of the class `NoRows`, and any other unchanged."""
    if type(tensor) is Tensor and has_no_rows(tensor):
        return tensor.as_subclass(NoRows)
    return tensor


def call_with_placeholder(
    func: Callable[..., Any], args: Any, kwargs: Any, refusal: Exception
) -> Any:
    """Calls a function that has refused tensors without rows, with a placeholder row in each.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        refusal: the error that it raised.

    Returns:
        Its result without the placeholder row.

    Raises:
        Exception: `refusal`, if the function fails with a row too.
    """
    if not any(has_no_rows(tensor) for tensor in tensors((args, kwargs))):
        raise refusal  # it was raised for another reason

    placeholder = Placeholder(())
    args_with_row, kwargs_with_row = placeholder.add_to((args, kwargs))
    with preserve_rng_state():
        try:
            result = func(*args_with_row, **kwargs_with_row)
        except Exception:
            # In `x.view(len(x), -1)` the number of rows is an argument too: 0, which has to be 1
            # for a tensor with the placeholder row.
            try:
                result = func(*_zeros_as_ones(args_with_row), **kwargs_with_row)
            except Exception:
                raise refusal from None

    return map_tensors(result, lambda tensor: _fill_with_nan(placeholder.cut_off(tensor)))


def _fill_with_nan(tensor: Tensor) -> Tensor:
    """Fills a floating-point result with NaN, in place, and returns it.

    Its values, such as a mean, were computed of no rows. Integers stay as they are.
    """
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        with torch.no_grad():
            tensor.fill_(torch.nan)
    return tensor


def _zeros_as_ones(arguments: Any) -> Any:
    """Returns the arguments with 1 instead of each number 0."""
    if type(arguments) is int:
        return 1 if arguments == 0 else arguments
    if isinstance(arguments, tuple | list):
        return [_zeros_as_ones(argument) for argument in arguments]
    return arguments


class Placeholder:
    """Puts one row into tensors without rows, and cuts it off what was computed with them.

    Args:
        samples: tensors with at least one row. A row is taken from one of them if its shape fits.
    """

    def __init__(self, samples: Iterable[Tensor]) -> None:
        self._samples = list(samples)
        self._possible_lengths: set[int] = {1}
        """How many rows of a result may come from one placeholder. A function may flatten the first
        dimensions, so these are the products of the first sizes of a row."""
        self._empty_dimensions: set[int] = set()
        """Dimensions of the arguments that had size 0."""

    def add_to(self, arguments: Any) -> Any:
        """Returns a pytree with one row in the place of each tensor without rows."""
        return map_tensors(arguments, self._add_row)

    def _add_row(self, tensor: Tensor) -> Tensor:
        """Returns one row in the place of a tensor without rows; any other tensor unchanged.

        Keeps for `cut_off` which dimension was empty, and the lengths that the row may have in a
        result.
        """
        if not has_no_rows(tensor):
            return tensor

        self._empty_dimensions.add(tensor.shape.index(0))
        row = placeholder_of(tensor, self._samples)

        # A row of shape (1, 3, 4) is 1 row, 3 rows after `flatten(0, 1)`, 12 after `flatten()`.
        length = 1
        for size in row.shape:
            length *= size
            self._possible_lengths.add(length)

        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return row

        with_row: Tensor = _AddRow.apply(tensor, row)  # type: ignore[no-untyped-call]
        return with_row

    def cut_off(self, result: Tensor) -> Tensor:
        """Returns a result without the placeholder's rows, for which no gradient flows back."""
        dimension = self._dimension_of_rows(result)
        without_rows: Tensor = _CutRows.apply(result, dimension)  # type: ignore[no-untyped-call]
        return without_rows

    def _dimension_of_rows(self, result: Tensor) -> int | None:
        """Returns the dimension of a result that has the placeholder's rows; None: it has none.

        `_empty_dimensions` are the dimensions in which some argument had size 0, and got the
        placeholder. `_possible_lengths` are the numbers of rows that a function may make of it.
        """
        if 0 in self._empty_dimensions and result.dim() > 0:
            # `x.flatten(0, 1)`, for example, makes several rows of one.
            if result.shape[0] in self._possible_lengths:
                return 0

        # Otherwise the result has the placeholder in the same dimension as an argument, as one row.
        for dimension in sorted(self._empty_dimensions):
            if dimension < result.dim() and result.shape[dimension] == 1:
                return dimension

        return None


def placeholder_of(tensor: Tensor, samples: Iterable[Tensor]) -> Tensor:
    """Returns one row that takes the place of no rows.

    A batch without rows is a view of a real sample, and so are views of it: then the row is that
    sample's. For another tensor it is a sample's row of the same shape, or else made up.

    Args:
        tensor: without elements.
        samples: tensors with at least one row.
    """
    shape = [max(1, size) for size in tensor.shape]

    # Where in the storage the last element of the row is: offset + sum of (size - 1) * stride.
    last_element = tensor.storage_offset()
    for size, stride in zip(shape, tensor.stride(), strict=True):
        last_element += (size - 1) * stride
    num_stored = tensor.untyped_storage().nbytes() // tensor.element_size()
    if last_element < num_stored:  # the tensor is a view of memory that has the row
        row = tensor.detach().as_strided(shape, tensor.stride(), tensor.storage_offset())
        return row.clone()

    for sample in samples:
        if sample.dim() and len(sample) and list(sample.shape[1:]) == shape[1:]:
            return sample[:1].detach().to(tensor.device, tensor.dtype, copy=True)

    if tensor.dtype == torch.bool:  # as a padding mask, say, False hides nothing
        return tensor.new_zeros(shape)
    if not tensor.is_floating_point():  # as a length, 0 may be refused
        return tensor.new_ones(shape)

    count = torch.Size(shape).numel()

    # The numbers differ: the standard deviation of equal ones is 0, and its derivative infinite.
    return torch.linspace(0.1, 1, count, device=tensor.device).to(tensor.dtype).view(shape)


class _AddRow(torch.autograd.Function):
    """Returns a row in the place of a tensor without rows, which gets an empty gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, row: Tensor) -> Tensor:
        ctx.shape = tensor.shape
        return row

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.shape), None


class _CutRows(torch.autograd.Function):
    """Returns a tensor without its rows, on the same memory. Its gradient is always zero.

    If the tensor has no dimension of rows, a copy is returned.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dimension: int | None) -> Tensor:
        """Returns the tensor with size 0 in the dimension of its rows; None: it has no rows."""
        ctx.shape = tensor.shape
        if dimension is None:
            return tensor.clone()

        shape = list(tensor.shape)
        shape[dimension] = 0

        # It has the same memory, where `placeholder_of` finds the row if a later function refuses
        # this result. It is no view for autograd, as `tensor[:0]` is, so that it may be changed in
        # place: autograd forbids that for views made here.
        without_rows = tensor.new_empty(0)
        without_rows.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, tensor.stride())
        return without_rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.shape), None
