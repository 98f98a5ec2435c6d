"""Patches that make runs comparable: whatever would differ between two equal runs is switched off.

`Determinism` counts what was switched off, for a line of the verdict, and `FunctionMode` sees every
call of torch's functions in the script.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.utils.checkpoint

from lockstep.checkpoint.checkpointer import Checkpoint
from lockstep.verify.recording.determinism import Determinism
from lockstep.verify.recording.function_mode import FunctionMode


def compute_in_float64(mode: FunctionMode) -> None:
    """Patches everything that would make the script compute in another precision than float64.

    In float32, sums that are computed in another order on several processes would differ by
    rounding.
    """
    mode.determinism.make_float64_default()
    torch.set_default_dtype = mode.determinism.set_script_dtype
    _disable_autocast(mode.determinism)
    _keep_mode_for_recomputation(mode)


def _disable_autocast(determinism: Determinism) -> None:
    """Patches `torch.autocast` to do nothing; it would compute in float16 or bfloat16."""
    autocast: Any = torch.autocast
    original_init = autocast.__init__

    def init_disabled(
        context: Any, device_type: str, dtype: Any = None, enabled: bool = True, **options: Any
    ) -> None:
        """Replaces `torch.autocast.__init__`, and always builds a disabled context."""
        if enabled:
            determinism.switched_off["autocast"] += 1
        original_init(context, device_type, dtype, enabled=False, **options)

    autocast.__init__ = init_disabled


def _keep_mode_for_recomputation(mode: FunctionMode) -> None:
    """Patches `torch.utils.checkpoint.checkpoint`, so that `mode` also sees recomputed activations.

    With activation checkpointing, torch calls a part of the model twice: in the forward pass, and
    again in the backward pass to recompute its activations. The mode makes the first call compute
    in float64, and must do the same with the second. But torch disables a function mode within each
    call of torch, and the backward pass is such a call.
    """
    module: Any = torch.utils.checkpoint
    original_checkpoint = module.checkpoint

    @wraps(original_checkpoint)
    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces `torch.utils.checkpoint.checkpoint`, and passes on a wrapped function."""
        function_with_mode = partial(_call_with_mode, mode, function)
        return original_checkpoint(function_with_mode, *args, **kwargs)

    module.checkpoint = checkpoint


def _call_with_mode(
    mode: FunctionMode, function: Callable[..., Any], /, *inputs: Any, **options: Any
) -> Any:
    """Calls a function that uses activation checkpointing, with the function mode enabled.

    Torch calls it once in the forward pass, where the mode is enabled already, and again in the
    backward pass to recompute its activations.

    Args:
        mode: function mode, which torch disables during a backward pass.
        function: part of the model that is checkpointed.
        *inputs: positional arguments of the function.
        **options: keyword arguments of the function.
    """
    is_recomputation = mode.in_backward
    if not is_recomputation:
        return function(*inputs, **options)

    # The function may contain another checkpoint, which calls this again. Since `in_backward` is
    # false for it, as in a forward pass, it does not enable the mode a second time.
    with mode.set_in_backward(False), mode:
        return function(*inputs, **options)


def disable_compile(determinism: Determinism) -> None:
    """Patches `torch.compile` to do nothing, as it would trace through the recorder's hooks."""
    original_compile: Any = torch.compile

    @wraps(original_compile)
    def compile_disabled(model: Any = None, **options: Any) -> Any:
        # Without a model, as in `@torch.compile(mode=...)`, torch returns a decorator. It will call
        # `torch.compile` with the model, and so this function again.
        if model is not None:
            determinism.switched_off["torch.compile"] += 1

        # With disable=True, torch returns the model as it is.
        return original_compile(model, **{**options, "disable": True})

    torch.compile = compile_disabled


def disable_saved_checkpoints(determinism: Determinism) -> None:
    """Patches Lockstep's `Checkpoint` to do nothing.

    Otherwise, each run of the script would resume where the run before has saved a checkpoint.
    """
    checkpoint_class: Any = Checkpoint
    original_init = checkpoint_class.__init__

    def init(checkpoint: Checkpoint, *args: Any, **kwargs: Any) -> None:
        """Replaces `Checkpoint.__init__`, and leaves a note why nothing is resumed."""
        determinism.switched_off["checkpoints (neither resumed nor saved)"] += 1
        original_init(checkpoint, *args, **kwargs)
        checkpoint.last_resume_note = "nothing is resumed while the script is verified"

    def save_nothing(checkpoint: Checkpoint, metric: float | None = None) -> Any:
        return checkpoint.folder

    def resume_nothing(checkpoint: Checkpoint) -> bool:
        return False

    def do_nothing(checkpoint: Checkpoint) -> None:
        pass

    checkpoint_class.__init__ = init
    checkpoint_class.save = save_nothing
    checkpoint_class.resume = resume_nothing
    checkpoint_class.step = do_nothing
    checkpoint_class.wait = do_nothing
