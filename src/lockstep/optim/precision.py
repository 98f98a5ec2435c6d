"""The precision of a training: fp32, fp64, and mixed precision with bf16 or fp16.

In mixed precision, parameters, gradients and the optimizer stay in fp32. The model's forward pass
runs under autocast, and its floating-point outputs are converted to fp32, so that losses are
computed in fp32. If a strategy gives the model parameters in half precision, autocast is not
needed: the inputs of the model are converted to that dtype instead, and outputs to fp32 as well.
Under fp16 the loss is scaled by torch's gradient scaler. Under fp64 the whole model is in float64,
and its inputs are converted.

Autocast is entered and left in one function, which replaces the model's `forward` (`HalfForward`).
`torch.compile` can then trace it, or compile the original forward under the autocast that is on.
Two forward hooks, one to enter and one to leave, would not work, because the compiler traces each
hook separately from the forward pass between them.

The scaler is updated once for each backward pass that was followed by a step, at the beginning of
the next backward pass. So all optimizers that share a backward pass see the same scale.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.batch.pytree import map_tensors
from lockstep.errors import SettingError
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.settings import check_precision
from lockstep.torch_compat import (
    compile_only_callees,
    compiler_is_loaded,
    never_compiled,
    outside_compiled_code,
    pytree,
    without_compile,
)

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of each precision that computes in half precision."""
_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, **HALF_DTYPES, "fp64": torch.float64}


class Precision:
    """Applies a precision to forward passes, the loss and optimizer steps.

    Args:
        name: `fp32`, `bf16`, `fp16` or `fp64`.
        device: the device of the model.

    Raises:
        SettingError: the name is unknown, or the device does not support the precision.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        check_precision(name)
        if (
            name == "bf16"
            and device.type == "cuda"
            and not torch.cuda.is_bf16_supported(including_emulation=False)
        ):
            raise SettingError(
                "precision='bf16'",
                f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic",
                "use precision='fp16'",
            )

        self.name = name
        self.device = device
        self.dtype = _DTYPES[name]
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        self._half_modules: list[tuple[weakref.ref[nn.Module], bool]] = []
        """The modules whose forward pass runs in half precision, each with True if it runs under
        autocast. `follow_forwards` needs them."""
        self._unscaled: set[int] = set()
        """The ids of optimizers whose gradients were unscaled since the latest update of the scale.
        """
        self._scale_was_used = False
        """True if the scaler has checked gradients since the latest update of the scale."""

    def attach(self, module: nn.Module, *, autocast: bool = True) -> None:
        """Makes a module's forward pass run in this precision.

        Under fp64 it converts the module in place, and its inputs before each forward pass. Under
        bf16 and fp16 it replaces the module's `forward`.

        Args:
            module: the module.
            autocast: under bf16 and fp16, True to run the module under autocast. False if the
                strategy gives the module its parameters in half precision when it runs, so that it
                is enough to convert its inputs.
        """
        if self.name == "fp32":
            return  # nothing to change

        # `torch.compile` returns a wrapper around the user's module. Hooks on a wrapper are lost
        # when it is copied, so change the user's module itself.
        module = without_compile(module)
        if self.name == "fp64":
            module.double()
            module.register_forward_pre_hook(_inputs_in_double, with_kwargs=True)
            return

        self._replace_forward(module, autocast)

        # If the user sets another `forward` on the module later, `follow_forwards` replaces that.
        self._half_modules.append((weakref.ref(module), autocast))

    def follow_forwards(self) -> None:
        """Applies the precision to forwards that the user has set on modules since `attach`."""
        for reference, autocast in self._half_modules:
            module = reference()
            if module is None:
                continue
            if not isinstance(vars(module).get("forward"), HalfForward):
                self._replace_forward(module, autocast)

    def _replace_forward(self, module: nn.Module, autocast: bool) -> None:
        """Replaces the `forward` of a module by one that runs it in half precision."""
        dtype = HALF_DTYPES[self.name]
        # Set directly, because the user's class may have its own `__setattr__`.
        vars(module)["forward"] = HalfForward(module, self.device.type, dtype, autocast=autocast)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Runs the backward pass of a loss, which is scaled first under fp16.

        Args:
            loss: a tensor with one element.
            **options: arguments of `torch.autograd.backward`.
        """
        if self.scaler is not None:
            self.update_scale()
            loss = self.scaler.scale(loss)
        torch.autograd.backward(loss, **options)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divides the gradients of optimizers by the scale of the loss, once in each step.

        Must be called before anything reads the gradients. Does nothing without a scaler.
        """
        for optimizer in optimizers:
            if self.scaler is not None and id(optimizer) not in self._unscaled:
                self.scaler.unscale_(optimizer)
                self._unscaled.add(id(optimizer))
                self._scale_was_used = True

    def scales(self, optimizer: Optimizer) -> bool:
        """Returns True if the gradients of an optimizer are still multiplied by the scale."""
        return self.scaler is not None and id(optimizer) not in self._unscaled

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> tuple[Any, bool]:
        """Makes an optimizer step; under fp16 only if its gradients are finite.

        Args:
            optimizer: the user's optimizer.
            closure: a closure for the optimizer; None without one.

        Returns:
            The return value of the optimizer, and True if the step was skipped because gradients
            were not finite.

        Raises:
            SettingError: a closure was given under fp16.
        """
        if self.scaler is None:
            return optimizer.step(closure), False

        if closure is not None:
            raise SettingError(
                "precision='fp16' with an optimizer that takes a closure",
                "a scaled step evaluates the loss once",
                "use precision='bf16' or 'fp32'",
            )

        # Torch does not tell whether the step was skipped, because gradients were not finite.
        was_called = False
        found_inf: Tensor | None = None  # of a fused optimizer

        def note_call(*_: Any) -> None:
            """Records that the optimizer was called, and its `found_inf` during the call."""
            nonlocal was_called, found_inf
            was_called = True
            found_inf = getattr(optimizer, "found_inf", None)

        with optimizer.register_step_post_hook(note_call):
            result = self.scaler.step(optimizer)

        self._scale_was_used = True  # so that `update_scale` changes it
        # The scaler skips the step of most optimizers: it does not call them. A fused optimizer is
        # always called, and skips the step itself if the scaler has set `found_inf` to 1.0.
        scaler_has_skipped = not was_called
        fused_optimizer_has_skipped = found_inf is not None and bool(found_inf.item())
        return result, scaler_has_skipped or fused_optimizer_has_skipped

    def update_scale(self) -> None:
        """Updates the scale for the next backward pass, if gradients of the last one were used."""
        if self.scaler is not None and self._scale_was_used:
            self.scaler.update()
        self._scale_was_used = False
        self._unscaled.clear()

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the state of the loss scaler; None if there is none."""
        self.update_scale()
        return None if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Loads a state of the loss scaler, if both runs have one."""
        self.update_scale()
        if self.scaler is not None and state is not None:
            self.scaler.load_state_dict(state)


class HalfForward:
    """A forward pass in half precision, whose floating-point outputs are converted to fp32.

    It replaces `module.forward`. The hooks of the module are called outside of it, so they see the
    original inputs, and outputs in fp32.

    Args:
        module: the module whose `forward` is called: that of its class, or one that was set on it.
        device_type: the type of the device on which the module runs.
        dtype: bfloat16 or float16.
        autocast: True to run under autocast, which uses `dtype` for operations for which that is
            safe. False to convert floating-point inputs to `dtype`, for modules whose parameters
            are in it when they run.
    """

    def __init__(
        self, module: nn.Module, device_type: str, dtype: torch.dtype, *, autocast: bool
    ) -> None:
        self.module = module
        self.own: Callable[..., Any] | None = vars(module).get("forward")
        """The forward that was set on the module object. If None, the method of the class is looked
        up at each call, so that it may be replaced."""
        of_class = inspect.getattr_static(type(module), "forward")
        if self.own is None and not isinstance(of_class, FunctionType):
            # It is not a plain method, for example in a scripted module.
            self.own = module.forward

        self.device_type = device_type
        self.dtype = dtype
        self.autocast = autocast
        self.is_torchs = self.own is None and of_class.__module__.startswith("torch.")
        """True if the forward is part of torch, such as that of `nn.Sequential`."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original forward, which is called in half precision.

        `inspect.signature` reads this.
        """
        if self.own is not None:
            return self.own
        return MethodType(type(self.module).forward, self.module)

    def __getattr__(self, name: str) -> Any:
        """Looks up attributes of the original forward, such as `__code__` and `__name__`."""
        if "own" not in vars(self):  # the object is being copied, and has no attributes yet
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    @compile_only_callees
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward pass, and converts floating-point tensors in its output to fp32."""
        context: Any = nullcontext()
        if self.autocast:
            context = torch.autocast(self.device_type, self.dtype)
        else:
            to_half = partial(_in_half, dtype=self.dtype)
            args = tuple([_change_tensors(value, to_half) for value in args])
            kwargs = {name: _change_tensors(value, to_half) for name, value in kwargs.items()}

        with context:
            if self.own is not None:
                output = self.own(*args, **kwargs)
            elif self.is_torchs:
                output = _called(type(self.module).forward, self.module, *args, **kwargs)
            else:
                output = type(self.module).forward(self.module, *args, **kwargs)

        return _change_tensors(output, partial(_in_fp32, dtype=self.dtype))


def _called(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a forward that is part of torch.

    The compiler skips functions of torch unless they are called by another function that it
    compiles, such as this one.
    """
    return forward(*args, **kwargs)


class ForwardsSetLater(Extension):
    """Applies the precision to a `forward` that the user sets on a model after `world.prepare`."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def begin(self, micro_batch: MicroBatch) -> None:
        """Replaces such a `forward` before the forward passes of a micro-batch."""
        self._precision.follow_forwards()

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Replaces it after the forward passes, too, for loops without a prepared loader."""
        self._precision.follow_forwards()


@compile_only_callees
def _in_half(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a floating-point tensor to half precision; returns any other tensor unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@compile_only_callees
def _in_fp32(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a tensor of the given dtype to fp32; returns any other tensor unchanged."""
    return tensor.float() if tensor.dtype == dtype else tensor


@compile_only_callees
def _change_tensors(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a copy of nested containers in which each tensor is replaced by `change(tensor)`.

    The result is always that of `_change_in_containers`. But torch's compiler cannot trace this
    function, so there are three cases:

        the compiler traces a call of this one       torch's own `tree_map`, which it can trace
        the compiler is loaded, and traces nothing   `_change_in_containers`, hidden from it
        the compiler is not loaded                   `_change_in_containers`

    Args:
        nest: a tensor, or containers of tensors and other values, in any depth.
        change: function that is called with each tensor.
    """
    if isinstance(nest, Tensor):  # the usual case
        return change(nest)

    if torch.compiler.is_compiling():
        return pytree.tree_map(partial(_change_leaf_in_graph, change=change), nest)

    # The hidden form is not used in all cases, because it would load the compiler, which takes
    # about a second.
    if compiler_is_loaded():
        return _change_in_containers_uncompiled(nest, change)
    return _change_in_containers(nest, change)


def _change_in_containers(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Changes all tensors, also those in a `PackedSequence` or another opaque container."""
    return map_tensors(nest, change, inside_opaque=True)


_change_in_containers_uncompiled = never_compiled(_change_in_containers, recursive=True)
"""Does the same as `_change_in_containers`, and torch's compiler leaves it alone."""


def _change_leaf_in_graph(leaf: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Changes one leaf of a torch pytree in a way that the compiler can trace.

    Args:
        leaf: a tensor, a plain value, or a container that torch's pytree does not know.
        change: function that is called with each tensor.
    """
    if isinstance(leaf, Tensor):
        return change(leaf)
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf

    # A container that torch's pytree does not know, such as a dataclass. The compiled graph ends
    # here, and the container is converted outside of it.
    return _change_in_containers_uncompiled(leaf, change)


@outside_compiled_code
def _inputs_in_double(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The hook before the forward pass of a module in float64; returns its inputs in float64."""
    return in_double((args, kwargs))


def in_double(nest: Any) -> Any:
    """Returns a nest with its floating-point tensors converted to float64."""
    return map_tensors(
        nest, lambda t: t.double() if t.is_floating_point() else t, inside_opaque=True
    )
