"""Precision: fp32, bf16 and fp16 mixed precision by torch's autocast and gradient scaler, fp64.

Parameters, gradients and the optimizer stay in fp32. The model's forward pass runs under autocast
and its floating-point outputs come back in fp32, so that losses are computed in fp32. Under fp64
all of the model is in float64, and what it is called with is brought to that.

The scaler is brought up to date once for each backward pass that was stepped on, at the beginning
of the next one: however many optimizers share a backward pass, they see one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.data.pytree import map_tensors
from lockstep.errors import SettingError

_DTYPES: dict[str, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
_MARKS = {"bf": "bf16", "64": "fp64", "double": "fp64", "16": "fp16", "half": "fp16", "32": "fp32"}
"""What stands in the names that other tools and torch have for them; the first that fits counts."""


class Precision:
    """How the forward pass is computed and the loss scaled.

    Args:
        name: `fp32`, `bf16`, `fp16` or `fp64`.
        device: of the model.

    Raises:
        SettingError: an unknown name, or one that the device cannot do.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in _DTYPES:
            near = next((known for mark, known in _MARKS.items() if mark in str(name)), None)
            raise SettingError(
                f"precision={name!r}",
                "precisions are " + ", ".join(_DTYPES),
                f"did you mean {near!r}?" if near else "choose one of them",
            )
        emulated = device.type == "cuda" and not torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        if name == "bf16" and emulated:
            raise SettingError(
                "precision='bf16'",
                f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic",
                "use precision='fp16'",
            )
        self.name = name
        self.device = device
        self.dtype = _DTYPES[name]
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        self._unscaled: set[int] = set()
        self._used = False

    def attach(self, module: nn.Module) -> None:
        """Has the module's forward pass run so; under fp64 the module itself is converted."""
        if self.dtype is None:
            return
        if self.dtype == torch.float64:
            module.double()
            module.register_forward_pre_hook(lambda _, *given: in_double(given), with_kwargs=True)
            return
        running: list[torch.autocast] = []

        def enter(module: nn.Module, args: Any) -> None:
            context = torch.autocast(self.device.type, self.dtype)
            context.__enter__()  # type: ignore[no-untyped-call]
            running.append(context)  # entered: another replica's thread may be the one to leave it

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            running.pop().__exit__(None, None, None)
            return map_tensors(
                output, lambda t: t.float() if t.dtype == self.dtype else t, opaque=None
            )

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """The backward pass of the (scaled) loss."""
        if self.scaler is not None:
            self.update_scale()
            loss = self.scaler.scale(loss)
        torch.autograd.backward(loss, **options)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Brings gradients to their true size before they are looked at; once a step."""
        for optimizer in optimizers:
            if self.scaler is not None and id(optimizer) not in self._unscaled:
                self.scaler.unscale_(optimizer)
                self._unscaled.add(id(optimizer))
                self._used = True

    def scales(self, optimizer: Optimizer) -> bool:
        """Whether its gradients are, just now, multiplied by the scale of the loss."""
        return self.scaler is not None and id(optimizer) not in self._unscaled

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> tuple[Any, bool]:
        """Steps the optimizer; returns its result and whether the scaler left the step out."""
        if self.scaler is None:
            return optimizer.step(closure), False
        if closure is not None:
            raise SettingError(
                "precision='fp16' with an optimizer that takes a closure",
                "a scaled step evaluates the loss once",
                "use precision='bf16' or 'fp32'",
            )
        # A fused one is always called: it reads on the device whether to do anything.
        taken: list[Tensor | None] = []
        with optimizer.register_step_post_hook(
            lambda called, *_: taken.append(getattr(called, "found_inf", None))
        ):
            result = self.scaler.step(optimizer)
        self._used = True
        return result, not taken or (taken[0] is not None and bool(taken[0].item()))

    def update_scale(self) -> None:
        """Adapts the scale to what the last backward pass gave; the next one begins with it."""
        if self.scaler is not None and self._used:
            self.scaler.update()
        self._used = False
        self._unscaled.clear()

    def state_dict(self) -> dict[str, Any] | None:
        """The loss scaler's; None: there is none."""
        self.update_scale()
        return None if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Takes up what `state_dict` gave, where both have a scaler."""
        self.update_scale()
        if self.scaler is not None and state is not None:
            self.scaler.load_state_dict(state)


def in_double(nest: Any) -> Any:
    """The same nest with its floating-point tensors in float64."""
    return map_tensors(nest, lambda t: t.double() if t.is_floating_point() else t, opaque=None)
