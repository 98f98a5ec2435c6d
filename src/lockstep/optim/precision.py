"""Precision: fp32, bf16 and fp16 mixed precision with torch's gradient scaler, fp64.

Parameters, gradients and the optimizer stay in fp32. The model's forward pass runs under autocast
and its floating-point outputs come back in fp32, so that losses are computed in fp32. A strategy
that gives the model parameters in half precision takes the place of autocast: the inputs of the
model are then brought to that dtype, and outputs come back in fp32 as well. Under fp64 all of the
model is in float64, and what it is called with is brought to that.

Autocast is entered and left in one function, which takes the place of the model's `forward`
(`HalfForward`). `torch.compile` can then trace it, or compile what it calls under the autocast
that is on. Two forward hooks, one that enters and one that leaves, would not do: the compiler
traces each hook apart from the forward pass between them.

The scaler is brought up to date once for each backward pass that was stepped on, at the beginning
of the next one: however many optimizers share a backward pass, they see one scale.
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
from lockstep.distributed.torch_compat import (
    compiler_is_loaded,
    never_compiled,
    outside_compiled_code,
    pytree,
    run_as_it_is,
    without_compile,
)
from lockstep.errors import SettingError
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.settings import check_precision

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of the precisions that compute in half precision."""
_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, **HALF_DTYPES, "fp64": torch.float64}


class Precision:
    """How the forward pass is computed and the loss scaled.

    Args:
        name: `fp32`, `bf16`, `fp16` or `fp64`.
        device: the device of the model.

    Raises:
        SettingError: an unknown name, or one that the device cannot do.
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
        """The modules whose forward pass runs in half precision, each with whether it is run under
        autocast."""
        self._unscaled: set[int] = set()
        """The ids of optimizers whose gradients were unscaled since the scale was last updated."""
        self._used = False
        """True if the scaler has looked at gradients since the scale was last updated."""

    def attach(self, module: nn.Module, *, autocast: bool = True) -> None:
        """Makes a module's forward pass run in this precision.

        Under fp64 it converts the module in place, and its inputs before each forward pass. Under
        bf16 and fp16 it replaces the module's `forward` by one that runs under autocast.

        Args:
            module: the module.
            autocast: False if the module has its parameters in half precision when it runs. Its
                inputs are then converted under bf16 and fp16, and there is no autocast.
        """
        if self.dtype is None:
            return  # fp32: nothing is to be done

        # Not the object that `torch.compile` returned: copies of it do not have its hooks.
        module = without_compile(module)
        if self.dtype == torch.float64:
            module.double()
            module.register_forward_pre_hook(_inputs_in_double, with_kwargs=True)
            return

        self._replace_forward(module, autocast)
        self._half_modules.append((weakref.ref(module), autocast))

    def follow_forwards(self) -> None:
        """Makes a `forward` that the user has set on a module since `attach` run like that, too."""
        for reference, autocast in self._half_modules:
            module = reference()
            if module is None:
                continue
            if not isinstance(vars(module).get("forward"), HalfForward):
                self._replace_forward(module, autocast)

    def _replace_forward(self, module: nn.Module, autocast: bool) -> None:
        """Replaces the `forward` of a module by one that runs it in half precision."""
        dtype = HALF_DTYPES[self.name]
        # Not by `Module.__setattr__`, which a user's class may have replaced.
        vars(module)["forward"] = HalfForward(module, self.device.type, dtype, autocast=autocast)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Runs the backward pass of a loss. Under fp16 it scales the loss before.

        Args:
            loss: a tensor of one element.
            **options: arguments of `torch.autograd.backward`.
        """
        if self.scaler is not None:
            self.update_scale()
            loss = self.scaler.scale(loss)
        torch.autograd.backward(loss, **options)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divides the gradients of optimizers by the scale of the loss, once in a step.

        To be called before anything reads the gradients. Without a scaler it does nothing.
        """
        for optimizer in optimizers:
            if self.scaler is not None and id(optimizer) not in self._unscaled:
                self.scaler.unscale_(optimizer)
                self._unscaled.add(id(optimizer))
                self._used = True

    def scales(self, optimizer: Optimizer) -> bool:
        """Returns True if the gradients of an optimizer are still multiplied by the scale."""
        return self.scaler is not None and id(optimizer) not in self._unscaled

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> tuple[Any, bool]:
        """Steps an optimizer; under fp16 only if its gradients are finite.

        Args:
            optimizer: the user's own optimizer.
            closure: a function that is passed to the optimizer; None: none.

        Returns:
            What the optimizer returned, and True if the step was skipped because gradients were
            not finite.

        Raises:
            SettingError: fp16 with a closure.
        """
        if self.scaler is None:
            return optimizer.step(closure), False

        if closure is not None:
            raise SettingError(
                "precision='fp16' with an optimizer that takes a closure",
                "a scaled step evaluates the loss once",
                "use precision='bf16' or 'fp32'",
            )

        # Torch does not say whether the scaler has skipped the step. If gradients are not finite,
        # it does not call the optimizer. A fused optimizer is always called, and decides on the GPU
        # by its attribute `found_inf`, which is 1.0 if they are not.
        was_called = False
        found_inf: Tensor | None = None

        def note_call(called: Optimizer, *_: Any) -> None:
            """Notes that the optimizer has stepped, and the attribute if it has one."""
            nonlocal was_called, found_inf
            was_called = True
            found_inf = getattr(called, "found_inf", None)

        with optimizer.register_step_post_hook(note_call):
            result = self.scaler.step(optimizer)

        self._used = True
        if not was_called:
            return result, True

        return result, found_inf is not None and bool(found_inf.item())

    def update_scale(self) -> None:
        """Adapts the scale for the next backward pass, if gradients of the last one were used.

        From then on gradients are those of the next backward pass, and not unscaled yet.
        """
        if self.scaler is not None and self._used:
            self.scaler.update()
        self._used = False
        self._unscaled.clear()

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the state of the loss scaler, None if there is none."""
        self.update_scale()
        return None if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Loads what `state_dict` returned, if both runs have a loss scaler."""
        self.update_scale()
        if self.scaler is not None and state is not None:
            self.scaler.load_state_dict(state)


class HalfForward:
    """The forward pass of a module in half precision; floating-point outputs come back in fp32.

    It takes the place of `module.forward`. The hooks of the module are called outside of it: they
    see the inputs as they were given, and outputs in fp32.

    Args:
        module: the module whose `forward` is called, that of its class or one that was set on it.
        device_type: the type of the device of the tensors that are computed with.
        dtype: bfloat16 or float16.
        autocast: run under autocast, which computes in `dtype` where it knows that to be safe. If
            False, floating-point inputs are converted to `dtype`: the module's parameters are in it
            when it runs.
    """

    def __init__(
        self, module: nn.Module, device_type: str, dtype: torch.dtype, *, autocast: bool
    ) -> None:
        self.module = module
        self.own: Callable[..., Any] | None = vars(module).get("forward")
        """The forward that was set on the object. None: `forward` is a method of the class, which
        is looked up at each call, so that it may be replaced."""
        of_class = inspect.getattr_static(type(module), "forward")
        if self.own is None and not isinstance(of_class, FunctionType):
            # It is no plain method, as in a scripted module: take what the object gives.
            self.own = module.forward

        self.device_type = device_type
        self.dtype = dtype
        self.autocast = autocast
        self.is_torchs = self.own is None and of_class.__module__.startswith("torch.")
        """True if the forward is one of torch's, such as that of `nn.Sequential`."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward that is called in half precision. `inspect.signature` reads it."""
        if self.own is not None:
            return self.own
        return MethodType(type(self.module).forward, self.module)

    def __getattr__(self, name: str) -> Any:
        """Looks up attributes that a method has, such as `__code__` and `__name__`."""
        if "own" not in vars(self):  # it is being copied, and has nothing yet
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    @run_as_it_is
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward pass; returns its output with floating-point tensors in fp32."""
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
    """Calls a forward of torch's.

    The compiler skips functions of torch's own unless another function calls them that it compiles.
    This is that function.
    """
    return forward(*args, **kwargs)


class ForwardsSetLater(Extension):
    """Lets a `forward` that is set on a model after `world.prepare` run in the precision, too."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def begin(self, micro_batch: MicroBatch) -> None:
        """Replaces such a `forward` before the forward passes of a micro-batch."""
        self._precision.follow_forwards()

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Does the same after the forward passes, for loops without a prepared loader."""
        self._precision.follow_forwards()


@run_as_it_is
def _in_half(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a floating-point tensor in half precision, and any other tensor itself."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@run_as_it_is
def _in_fp32(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor of this dtype in fp32, and any other tensor itself."""
    return tensor.float() if tensor.dtype == dtype else tensor


@run_as_it_is
def _change_tensors(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a nest of tensors (any containers) with all tensors changed.

    The compiler traces it as a part of a model, and never compiles it alone.
    """
    if isinstance(nest, Tensor):  # the usual case, without looking through a nest
        return change(nest)
    if torch.compiler.is_compiling():
        return pytree.tree_map(partial(_traced, change=change), nest)
    # If the compiler is loaded, it would compile the conversion, function by function.
    change_nest = _change_nest_uncompiled if compiler_is_loaded() else _change_nest
    return change_nest(nest, change)


def _change_nest(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return map_tensors(nest, change, opaque=None)


_change_nest_uncompiled = never_compiled(_change_nest, recursive=True)


def _traced(leaf: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Changes one leaf of a torch pytree, in a way that the compiler can trace."""
    if isinstance(leaf, Tensor):
        return change(leaf)
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    # A container that torch's pytree does not know, such as a dataclass. It is converted outside of
    # the compiled graph, which ends here.
    return _change_nest_uncompiled(leaf, change)


@outside_compiled_code
def _inputs_in_double(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The hook before the forward pass of a module in float64; returns its inputs in float64."""
    return in_double((args, kwargs))


def in_double(nest: Any) -> Any:
    """Returns a nest with its floating-point tensors converted to float64."""
    return map_tensors(nest, lambda t: t.double() if t.is_floating_point() else t, opaque=None)
