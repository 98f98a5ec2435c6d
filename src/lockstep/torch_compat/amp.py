"""GradScaler, which scales losses for training in fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.torch_compat.dtensor import is_sharded

if TYPE_CHECKING:
    from torch.optim import Optimizer


def unscales_gradients(optimizer: Optimizer) -> bool:
    """Returns True if an optimizer divides its gradients by the loss scale, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def answer_grad_scaler(optimizer_class: type[Optimizer], answer: Callable[[Any], bool]) -> None:
    """Answers torch's GradScaler for the optimizers of a class.

    Just before a step, the scaler asks whether the optimizer divides its gradients by the scale.

    Args:
        optimizer_class: the class.
        answer: called with the optimizer; returns the answer, or raises to refuse the step.
    """
    optimizer_class._step_supports_amp_scaling = property(answer)  # type: ignore[attr-defined]


def unscale_shards_with_others() -> None:
    """Lets torch's GradScaler unscale gradients of which some are DTensors and others are not.

    Torch unscales all gradients in one call. It takes the mesh over which it looks for infinite
    values from the first gradient of the list, which must therefore be a DTensor.
    """
    import torch
    from torch.distributed.tensor import DTensor

    # Torch 2.11 and 2.13 have these private names.
    handlers = DTensor._op_dispatcher._custom_op_handlers
    operation = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    original = handlers[operation]
    if getattr(original, "sorts_gradients", False):  # this function was called before
        return

    def unscale(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Moves the DTensors to the front. The gradients are changed in place, in any order."""
        gradients, *others = args
        sorted_gradients = sorted(gradients, key=is_sharded, reverse=True)
        original(op_call, (sorted_gradients, *others), kwargs)

    unscale.sorts_gradients = True  # type: ignore[attr-defined]
    handlers[operation] = unscale
