"""Lets functions of torch that refuse tensors without rows accept them.

A rank without samples gets batches of shape `(0, *)`. Most functions accept these: the sum is 0,
the mean NaN. Some refuse them: a reshape with -1, `max`, `CTCLoss`. Such a function is called again
with a *placeholder*, one row of a real sample, which is then removed from the result. A
floating-point result that has no rows, such as a mean, becomes NaN. An integer, such as the longest
length, keeps the value of the placeholder.

Prepared models do this for their whole forward pass (`strategies.placeholder`). Outside of them, in
the user's loop, tensors of the class `NoRows` do it for each function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.overrides import get_default_nowrap_functions

from lockstep.batch.pytree import map_tensors, map_tensors_and_attributes, tensors
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.torch_compat import DisableTorchFunctionSubclass

REFUSALS = (RuntimeError, ValueError, IndexError)
"""The errors that torch raises if a function refuses tensors without rows."""


_OPERATORS_IN_PLACE = (
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__",
    "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
)  # fmt: skip


def has_no_rows(tensor: Tensor) -> bool:
    """Returns True if some dimension of the tensor is 0."""
    return tensor.dim() > 0 and tensor.numel() == 0


class NoRows(Tensor):
    """A tensor without rows. Functions that refuse it are called with a placeholder row.

    A function returns tensors of this class if they have no rows, and plain tensors otherwise.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch; torch calls this if an argument is of this class."""
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            try:
                result = func(*args, **kwargs)
            except REFUSALS as error:
                result = call_with_placeholder(func, args, kwargs, error)

            # Torch also calls this method to read attributes such as `grad` and `_base`. These must
            # be the same object each time, so they are returned unchanged.
            is_attribute = func in get_default_nowrap_functions()
            if isinstance(result, (Tensor, tuple, list)) and not is_attribute:
                return map_tensors(result, mark_no_rows)

            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles a plain tensor, so that files and other processes get no tensor of this class."""
        with DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def mark_no_rows(tensor: Tensor) -> Tensor:
    """Converts a plain tensor without rows to `NoRows`, and returns any other tensor unchanged."""
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
        The result of the function, without the placeholder rows.

    Raises:
        Exception: `refusal`, if the function fails with the placeholder too.
    """
    # If all tensors have rows, the error had another reason.
    if not any(has_no_rows(tensor) for tensor in tensors((args, kwargs))):
        raise refusal

    # A function may write into its first argument, as `states[rows] = values` does.
    writes_into_first = _writes_into_first(func)
    first_is_tensor = bool(args) and isinstance(args[0], Tensor)
    if writes_into_first and not first_is_tensor:
        raise refusal  # it is not known which of the user's tensors would be written into

    # Give one row to each tensor without rows. No real samples are at hand here.
    placeholder = Placeholder(samples=())
    args_with_row, kwargs_with_row = placeholder.add_to((args, kwargs))

    # In `states[rows] = values`, where `values` has no rows but `states` has some, nothing is to be
    # written, and `states` must stay as it is. The function writes the placeholder into a copy of
    # `states`, which only shows whether it fails again.
    first_must_stay = writes_into_first and not has_no_rows(args[0])
    if first_must_stay:
        copy_of_first = args[0].clone()
        args_with_row = (copy_of_first, *args_with_row[1:])

    # The function may draw random numbers for the placeholder. Ranks with samples do not make this
    # call, so it must not advance the random state.
    with preserve_rng_state():
        try:
            result = _call_with_one_row(func, args_with_row, kwargs_with_row)
        except Exception:
            raise refusal from None

    if first_must_stay:
        return args[0]
    without_placeholder = map_tensors(result, placeholder.cut_off)
    return map_tensors(without_placeholder, _nan_unless_empty)


def _writes_into_first(func: Callable[..., Any]) -> bool:
    """Tells whether a function of torch changes its first argument, as `add_` and `+=` do."""
    name = getattr(func, "__name__", "")
    is_method_in_place = name.endswith("_") and not name.endswith("__")
    return is_method_in_place or name in _OPERATORS_IN_PLACE


def _call_with_one_row(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a function with tensors that have got one row instead of none.

    If this fails, the number of rows may be among the other arguments, as in `x.view(len(x), -1)`.
    It is 0 there, but the tensor has 1 row now. So the function is called once more, with each
    argument 0 replaced by 1.
    """
    try:
        return func(*args, **kwargs)
    except Exception:
        return func(*_zeros_as_ones(args), **kwargs)


def _nan_unless_empty(tensor: Tensor) -> Tensor:
    """Fills a result that still has values after the placeholder's rows were removed with NaN.

    For example, it is a mean over the rows, and the mean of no rows is NaN. A result of one row for
    each sample, of which none is left, is empty and stays as it is, and so do integers. The tensor
    is changed in place, and returned.
    """
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        with torch.no_grad():
            tensor.fill_(torch.nan)
    return tensor


def _zeros_as_ones(arguments: Any) -> Any:
    """Returns the arguments with each 0 replaced by 1, e.g. `(x, 0, -1) -> [x, 1, -1]`."""
    if type(arguments) is int:
        return 1 if arguments == 0 else arguments
    if isinstance(arguments, tuple | list):
        return [_zeros_as_ones(argument) for argument in arguments]
    return arguments


class Placeholder:
    """Adds one row to tensors without rows, and removes it from the results computed with them.

    Args:
        samples: tensors with at least one row, from which a row of the right shape is taken.
    """

    def __init__(self, samples: Iterable[Tensor]) -> None:
        self._samples = list(samples)
        self._flattened_lengths: dict[int, set[int]] = {}
        """For each dimension in which some argument is empty: how long a result may be whose first
        dimensions, up to this one or a later one, were flattened into one.

        - A batch of shape (0, 3, 4) becomes the placeholder (1, 3, 4), which may be flattened to
          (3, 4) or (12,): the lengths for dimension 0 are 1, 3 and 12.
        - The state of two layers, of shape (2, 0, 16), becomes (2, 1, 16), which may be flattened
          to (2, 16) or (32,): the lengths for dimension 1 are 2 and 32.
        """

    def add_to(self, arguments: Any) -> Any:
        """Replaces each tensor without rows in a pytree by a tensor with one row.

        Tensors in attributes of objects are replaced too.
        """
        return map_tensors_and_attributes(arguments, self._add_row)

    def _add_row(self, tensor: Tensor) -> Tensor:
        """Replaces a tensor without rows by one row, and returns any other tensor unchanged.

        It notes in which dimension the row was added, so that `cut_off` finds it in a result.
        """
        if not has_no_rows(tensor):
            return tensor

        empty_dimension = tensor.shape.index(0)
        row = placeholder_of(tensor, self._samples)
        lengths = self._flattened_lengths.setdefault(empty_dimension, set())
        lengths.update(_lengths_after_flattening(row, empty_dimension))

        # The row is a new tensor, which autograd does not connect with `tensor`. If `tensor` needs
        # a gradient, `_AddRow` connects them, so that the backward pass reaches `tensor`.
        needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
        if not needs_gradient:
            return row
        connected_row: Tensor = _AddRow.apply(tensor, row)  # type: ignore[no-untyped-call]
        return connected_row

    def cut_off(self, result: Tensor) -> Tensor:
        """Removes the placeholder's rows from a result; no gradient flows back through them."""
        dimension = self._dimension_of_rows(result.shape)
        without_rows: Tensor = _CutRows.apply(result, dimension)  # type: ignore[no-untyped-call]
        return without_rows

    def cut_off_distribution(self, distribution: Distribution) -> Distribution:
        """Removes the placeholder's row from the batch shape of a probability distribution."""
        shape = list(distribution.batch_shape)
        dimension = self._dimension_of_rows(shape)
        if dimension is None or shape[dimension] != 1:
            return distribution

        shape[dimension] = 0  # `expand` repeats a dimension of size 1 any number of times, also 0
        try:
            return distribution.expand(torch.Size(shape))  # type: ignore[no-any-return]
        except NotImplementedError:  # a class of the user that does not have this method
            return distribution

    def _dimension_of_rows(self, shape: Sequence[int]) -> int | None:
        """Returns the dimension in which a result has the placeholder's rows, or None.

        A result has only a shape, so this is a guess; the likelier cases come first. In the
        examples a batch (0, 3, 4) became (1, 3, 4), and a state (2, 0, 16) became (2, 1, 16).

        Args:
            shape: the shape of the result.
        """
        if len(shape) == 0:
            return None
        length = shape[0]

        # The shapes (1, 10), (3, 4) and (12,) begin with the row of the batch.
        if length in self._flattened_lengths.get(0, ()):
            return 0

        # The shape (2, 1, 7) has the row of the state in dimension 1.
        for dimension in sorted(self._flattened_lengths):
            if dimension < len(shape) and shape[dimension] == 1:
                return dimension

        # The shape (32,) is the flattened row of the state. That is a coincidence more easily, so
        # there must also be an argument that is empty in dimension 0, like the batch.
        some_begin_with_rows = 0 in self._flattened_lengths
        if some_begin_with_rows and any(
            length in lengths for lengths in self._flattened_lengths.values()
        ):
            return 0
        return None


def _lengths_after_flattening(row: Tensor, dimension: int) -> set[int]:
    """Returns the lengths of a row if its first dimensions are flattened into one.

    The row (1, 3, 4) has the length 1 as it is, 3 after `flatten(0, 1)`, and 12 after `flatten()`.

    Args:
        row: the row.
        dimension: the dimension in which it is one row, here 0. This one is flattened too.
    """
    lengths = set()
    for num_flattened in range(dimension + 1, row.dim() + 1):
        lengths.add(row.shape[:num_flattened].numel())
    return lengths


def placeholder_of(tensor: Tensor, samples: Iterable[Tensor]) -> Tensor:
    """Returns one row to replace a tensor without rows.

    The batch of a rank without samples is an empty view of a real sample. If the tensor is such a
    batch, or a view of one, the row is that sample. For any other tensor, it is a row of `samples`
    with the same shape, or else made-up numbers.

    Args:
        tensor: the tensor, which has no elements.
        samples: tensors with at least one row.
    """
    shape = [max(1, size) for size in tensor.shape]

    # First choice: the sample of which the tensor is a view.
    row = _row_in_memory(tensor, shape)
    if row is not None:
        return row

    # Second choice: a row of one of the samples.
    for sample in samples:
        if sample.dim() and len(sample) and list(sample.shape[1:]) == shape[1:]:
            return sample[:1].detach().to(tensor.device, tensor.dtype, copy=True)

    # Otherwise the row is made up.
    if tensor.dtype == torch.bool:
        return tensor.new_zeros(shape)  # in a padding mask, for example, False hides nothing
    if not tensor.is_floating_point():
        return tensor.new_ones(shape)  # a length, for example, may be refused if it is 0

    # The numbers differ, because the standard deviation of equal numbers is 0, and its derivative
    # infinite.
    count = torch.Size(shape).numel()
    return torch.linspace(0.1, 1, count, device=tensor.device).to(tensor.dtype).view(shape)


def _row_in_memory(tensor: Tensor, shape: list[int]) -> Tensor | None:
    """Returns a copy of the row that the memory of an empty tensor still holds, or None.

    An empty view of a sample, such as `sample[:0]`, shares the memory of the whole sample. The
    memory of other empty tensors is empty, too.

    Args:
        tensor: a tensor without elements.
        shape: the shape of the row.
    """
    num_stored = tensor.untyped_storage().nbytes() // tensor.element_size()
    last_element_is_stored = _offset_of_last_element(tensor, shape) < num_stored
    if not last_element_is_stored:
        return None
    return tensor.detach().as_strided(shape, tensor.stride(), tensor.storage_offset()).clone()


def _offset_of_last_element(tensor: Tensor, shape: list[int]) -> int:
    """Returns where the last element would be in the storage if the tensor had another shape.

    With offset 5, strides (4, 1) and the shape (1, 4) it is `5 + 0 * 4 + 3 * 1 = 8`.
    """
    offset = int(tensor.storage_offset())
    for size, stride in zip(shape, tensor.stride(), strict=True):
        offset += (size - 1) * stride
    return offset


class _ZeroGradient(torch.autograd.Function):
    """Zeros of a shape in place of a gradient, still connected with it.

    A gradient penalty differentiates a gradient once more. The second backward pass then has to
    reach all parameters that it reaches on ranks with samples, so the zeros are no constant.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, shape: torch.Size) -> Tensor:
        ctx.shape = gradient.shape
        return gradient.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _ZeroGradient.apply(gradient, ctx.shape), None  # type: ignore[no-untyped-call]


class _AddRow(torch.autograd.Function):
    """Replaces a tensor without rows by a row; the tensor gets an empty gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, row: Tensor) -> Tensor:
        ctx.shape = tensor.shape
        return row

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _ZeroGradient.apply(gradient, ctx.shape), None  # type: ignore[no-untyped-call]


def _sharing_memory(tensor: Tensor, shape: list[int]) -> Tensor:
    """Returns a tensor of another shape in the memory of a tensor, like the view `tensor[:0]`.

    For autograd it is no view: autograd forbids to change in place a view that a function returned.
    """
    result = tensor.new_empty(0)
    result.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, tensor.stride())
    return result


class _CutRows(torch.autograd.Function):
    """Removes the rows of a tensor, but keeps its memory. The gradient is always zero."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dimension: int | None) -> Tensor:
        """Returns the tensor with size 0 in the dimension that holds the placeholder's rows.

        If the tensor has no such dimension (None), like a mean over the rows, this returns a copy.
        (If the function returned its input, autograd would make that a view, which the user may not
        change in place.)
        """
        ctx.shape = tensor.shape
        if dimension is None:
            return tensor.clone()

        # If a later function refuses the result, `placeholder_of` finds the row in its memory.
        shape = list(tensor.shape)
        shape[dimension] = 0
        return _sharing_memory(tensor, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _ZeroGradient.apply(gradient, ctx.shape), None  # type: ignore[no-untyped-call]
