"""Changes what a script computes, so that runs on different numbers of processes can be compared.

Dropout is switched off, because its masks differ with the number of processes. Computation in
float32 or less becomes computation in float64, because rounding differs with the order of sums;
random numbers stay those that the script would draw. Calls of torch's functions are changed before
they run. Whatever is switched off is counted in `switched_off` and reported with the verdict.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.optim.precision import in_double
from lockstep.torch_compat import DropoutNd

DROPOUT_FUNCTIONS = {
    torch.dropout,
    F.alpha_dropout,
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.feature_alpha_dropout,
}
DRAWS_WITH_GRADIENT = {"dropout", "dropout_", "native_dropout", "rrelu", "gumbel_softmax"}
"""Functions that draw random numbers and pass gradients through to their input."""
WIDE_DTYPE_OF_NARROW = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
NARROWING_METHODS = {Tensor.float, Tensor.half, Tensor.bfloat16}
CONVERSIONS = "conversions to a lower precision"


class Determinism:
    """Changes calls and modules of a script so that its runs become comparable.

    Args:
        double: whether to compute in float64.
    """

    def __init__(self, *, double: bool) -> None:
        self.double = double
        self.switched_off: Counter[str] = Counter()
        """How often each thing was switched off, under the name that the verdict uses."""
        self._script_dtype = torch.get_default_dtype()
        self._set_default_dtype = torch.set_default_dtype
        self._prepared_ids: set[int] = set()

    def notes(self) -> list[str]:
        """Returns what was switched off, for the verdict: `["3 dropout layers", "autocast"]`."""
        notes = []
        for what, count in self.switched_off.items():
            # If something was switched off once, its number is left out: "dropout layers".
            if count == 1:
                notes.append(what)
            elif count > 1:
                notes.append(f"{count} {what}")
        return notes

    # Dropout

    def skip_dropout(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the input of a dropout function unchanged, instead of calling the function.

        Args:
            args: positional arguments of the call: the input, the probability, and whether the
                model is in training mode.
            kwargs: keyword arguments of the call.
        """
        # All dropout functions begin like F.dropout(input, p=0.5, training=True).
        positional = dict(zip(("input", "p", "training"), args, strict=False))
        arguments = positional | kwargs
        rate = arguments.get("p", 0.5)
        training = arguments.get("training", True)

        # In evaluation mode, or with the rate 0, dropout returns its input anyway.
        would_drop_values = training and rate
        if would_drop_values:
            self.switched_off["dropout functions"] += 1

        return arguments["input"]

    def without_attention_dropout(self, func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments of a call, without dropout of attention weights."""
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            self.switched_off["dropout of attention"] += 1
            return {**kwargs, "dropout_p": 0.0}
        return kwargs

    def prepare_module(self, module: nn.Module) -> None:
        """Switches off a module's dropout layers and converts it to float64, only once."""
        if id(module) in self._prepared_ids:
            return

        for submodule in module.modules():
            self._prepared_ids.add(id(submodule))
            if isinstance(submodule, DropoutNd) and submodule.p:
                submodule.p = 0.0
                self.switched_off["dropout layers"] += 1
            elif isinstance(submodule, nn.RNNBase | nn.MultiheadAttention) and submodule.dropout:
                submodule.dropout = 0.0
                self.switched_off["dropout of attention and recurrent layers"] += 1

        if self.double:
            _convert_module(module)

    # Computing in float64

    def convert(self, values: Any) -> Any:
        """Converts a batch, or the inputs of a model, to float64."""
        return in_double(values) if self.double else values

    def make_float64_default(self) -> None:
        """Sets torch's default dtype to float64."""
        self._set_default_dtype(torch.float64)

    def set_script_dtype(self, dtype: torch.dtype) -> None:
        """Replaces `torch.set_default_dtype`: the default stays float64.

        The dtype is remembered: random numbers are still drawn in it, and then converted.
        """
        # A script may read the default and set it again later. Then it passes the float64 that was
        # set here, although its own default was float32.
        self._script_dtype = torch.float32 if dtype == torch.float64 else dtype

    def widen_call(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Makes a call that converts a tensor to a lower precision convert it to float64.

        `x.half()` becomes `x.double()`, and `x.to(torch.float16)` becomes `x.to(torch.float64)`.

        Args:
            func: function or method of torch that is called.
            name: name of the function.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Returns:
            The function, the positional and the keyword arguments to call instead. Any other call
            is returned unchanged.
        """
        # tensor.float() becomes tensor.double()
        if func in NARROWING_METHODS:
            self._count_conversion(args)
            return Tensor.double, args, kwargs

        if name == "view":  # view(dtype) reinterprets the bytes and converts nothing
            return func, args, kwargs

        # A conversion has a tensor and a narrow dtype among its arguments. A call with a dtype
        # only, such as torch.zeros(3, dtype=torch.float16), creates a tensor and stays as it is.
        values = (*args, *kwargs.values())
        dtypes = [value for value in values if isinstance(value, torch.dtype)]
        has_narrow_dtype = any(dtype in WIDE_DTYPE_OF_NARROW for dtype in dtypes)
        has_tensor = any(isinstance(value, Tensor) for value in values)
        is_conversion = has_narrow_dtype and has_tensor
        if not is_conversion:
            return func, args, kwargs

        self._count_conversion(args)
        wide_args = tuple(_widen_dtype(value) for value in args)
        wide_kwargs = {key: _widen_dtype(value) for key, value in kwargs.items()}
        return func, wide_args, wide_kwargs

    def _count_conversion(self, args: tuple[Any, ...]) -> None:
        """Counts a conversion as switched off, if it would lower the precision of a tensor.

        The conversion of an integer tensor is not counted.

        Args:
            args: positional arguments of the conversion, of which the first may be the tensor.
        """
        tensor = args[0] if args else None
        if isinstance(tensor, Tensor) and tensor.dtype == torch.float64:
            self.switched_off[CONVERSIONS] += 1

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draws the random numbers that the unmodified script would draw, as float64 if possible.

        A generator gives other numbers in float64 than in float32, so the draw itself is made in
        the script's own dtype.

        Args:
            func: function or method of torch that draws, such as `torch.randn` or `Tensor.normal_`.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Returns:
            The result of the call. It is in float64, unless the call itself specifies another dtype
            or passes gradients on.
        """
        # The run does not compute in float64, so every draw stays as it is.
        if not self.double:
            return func(*args, **kwargs)

        # Functions such as F.gumbel_softmax pass gradients from their result on to their input. A
        # converted copy, as below, would pass none on, so their result stays as it is.
        if func.__name__ in DRAWS_WITH_GRADIENT:
            return func(*args, **kwargs)

        # The call itself specifies the dtype of the draw.
        if "out" in kwargs or "dtype" in kwargs:
            return func(*args, **kwargs)

        # A trailing underscore stands for a method that fills its tensor, such as `normal_`.
        if func.__name__.endswith("_"):
            return self._fill_with_draws(func, args, kwargs)

        # Functions such as torch.randn draw in the default dtype. Others, such as
        # torch.bernoulli(x), draw in the dtype of an argument. Both become the script's own dtype.
        script_args = [self._to_script_dtype(value) for value in args]
        self._set_default_dtype(self._script_dtype)
        try:
            drawn = func(*script_args, **kwargs)
        finally:
            self._set_default_dtype(torch.float64)

        if not isinstance(drawn, Tensor) or not drawn.is_floating_point():
            return drawn

        # The result of torch.randn(3, requires_grad=True) is a leaf tensor, and so must be its
        # converted copy: it is detached first, and then requires gradients again.
        converted = drawn.detach().double()
        return converted.requires_grad_(drawn.requires_grad)

    def _fill_with_draws(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function that fills its first argument, a tensor, with random numbers.

        A float64 tensor is filled with the numbers that a tensor of the script's own dtype would
        get.

        Args:
            func: a method such as `Tensor.normal_`, or a function such as `nn.init.normal_`.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
        """
        if args:
            tensor, *other_args = args
        else:
            tensor = kwargs.pop("tensor")  # as in `nn.init.normal_(tensor=weight)`
            other_args = []

        # A tensor that was never converted to float64, such as an integer tensor, is filled as in
        # the unmodified script.
        if tensor.dtype != torch.float64:
            return func(tensor, *other_args, **kwargs)

        # Draw into a tensor of the script's own dtype, and copy the numbers. The tensor may be a
        # parameter, and without `no_grad` it is an error to write to a parameter, also by `copy_`.
        narrow_tensor = torch.empty_like(tensor, dtype=self._script_dtype)
        with torch.no_grad():
            drawn = func(narrow_tensor, *other_args, **kwargs)
            return tensor.copy_(drawn)

    def _to_script_dtype(self, value: Any) -> Any:
        """Converts a float64 tensor to the script's own dtype; returns other values unchanged."""
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            return value.to(self._script_dtype)
        return value


def _widen_dtype(value: Any) -> Any:
    """Returns float64 for a dtype of lower precision; other values are returned unchanged."""
    if isinstance(value, torch.dtype):
        return WIDE_DTYPE_OF_NARROW.get(value, value)
    return value


def _convert_module(module: nn.Module) -> None:
    """Converts a module's parameters and buffers to float64 or complex128.

    A module that already is in float64 is left alone: `Module.double` may replace its tensors, and
    DDP and FSDP keep references to them.
    """
    module_tensors = list(chain(module.parameters(), module.buffers()))
    if any(t.is_floating_point() and t.dtype != torch.float64 for t in module_tensors):
        module.double()
    for tensor in module_tensors:
        if tensor.dtype == torch.complex64:  # `Module.double` leaves complex numbers as they are
            tensor.data = tensor.data.to(torch.complex128)
