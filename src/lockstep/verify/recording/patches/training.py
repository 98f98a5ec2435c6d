"""Patches that observe the training: backward passes, optimizers, seeds, and hooks on gradients.

Each informs the `Recorder`, whose parts `recorder.calls`, `recorder.losses` and so on record one
subject each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DistributedSampler

from lockstep.distributed.process_group import Run
from lockstep.torch_compat import in_backward_pass, is_sharded
from lockstep.training.optimizer import PreparedOptimizer
from lockstep.user_code import user_line
from lockstep.verify.recording.bit_recorder import BitRecorder
from lockstep.verify.recording.library_code import is_of_torch_or_lockstep
from lockstep.verify.recording.optimizers import ParameterGroup
from lockstep.verify.recording.patches.wrapping import wrap
from lockstep.verify.recording.recorder import Recorder
from lockstep.world import World

CLIPPING_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


def watch_backward_passes(recorder: Recorder) -> None:
    """Patches `torch.autograd.backward`, to see losses and the gradients of each backward pass.

    `Tensor.backward` calls this function too. With reentrant activation checkpointing, torch calls
    it once more within a backward pass. This inner call has no loss of the script and is ignored.
    """

    def before_backward(tensors: Any, *_args: Any, **_kwargs: Any) -> None:
        """Called before `torch.autograd.backward`: records the loss, if it is a single scalar."""
        # Reentrant activation checkpointing makes this call, within the backward pass of a loss.
        if in_backward_pass():
            return

        loss = tensors
        if isinstance(tensors, list | tuple) and len(tensors) == 1:
            loss = tensors[0]

        is_scalar = isinstance(loss, Tensor) and loss.numel() == 1
        if is_scalar:
            recorder.losses.begin_backward(loss)

    def after_backward(*_args: Any, **_kwargs: Any) -> None:
        """Called after `torch.autograd.backward`: records the gradients that it has left."""
        # If a backward pass is still running, this was an inner call.
        if in_backward_pass():
            return

        recorder.gradients.end_backward()

    wrap(torch.autograd, "backward", before=before_backward, after=after_backward)


def watch_gradient_clipping(recorder: Recorder) -> None:
    """Patches torch's clipping functions, to see the gradients before they are clipped."""
    utils: Any = torch.nn.utils
    for name in CLIPPING_FUNCTIONS:
        clip = partial(recorder.gradients.clip, getattr(utils, name))
        setattr(utils, name, clip)
        setattr(utils.clip_grad, name, clip)  # the module that defines these functions


def watch_optimizers(recorder: Recorder) -> None:
    """Patches optimizers, to see new ones, and which line sets the learning rate of a group."""

    def after_group(optimizer: Optimizer, *_args: Any, **_kwargs: Any) -> None:
        """Called after `Optimizer.add_param_group`: tells `recorder` of the group.

        The constructor of every optimizer calls `add_param_group` for each of its groups, so the
        optimizer may be new too.
        """
        # The random numbers drawn so far belong to no step: they have initialized the model, which
        # a script constructs before its optimizer.
        recorder.state.step_draws.forget_draws_so_far()

        # Replace the group, a dictionary, by one that also remembers which line of the script last
        # set its learning rate.
        optimizer.param_groups[-1] = ParameterGroup(optimizer.param_groups[-1])

        built_optimizers = recorder.state.models.built_optimizers
        if optimizer not in built_optimizers:
            built_optimizers.append(optimizer)

    def before_prepared(_prepared: Any, inner: Optimizer, *_args: Any, **_kwargs: Any) -> None:
        """Called before `PreparedOptimizer.__init__`, with the optimizer of the script.

        `lockstep verify` reports optimizers of Lockstep's models that were never prepared.
        """
        recorder.optimizers.prepared_by_lockstep.add(inner)

    wrap(Optimizer, "add_param_group", after=after_group)
    wrap(PreparedOptimizer, "__init__", before=before_prepared)


def watch_schedulers(recorder: Recorder) -> None:
    """Patches schedulers, to see how often each process steps them, and with which metric."""

    def before_schedule(*_args: Any, **_kwargs: Any) -> None:
        recorder.calls.record("schedule")

    def before_plateau(_: Any, metrics: Any, *_args: Any) -> None:
        recorder.calls.record("schedule", value=float(metrics))

    wrap(LRScheduler, "step", before=before_schedule)
    wrap(ReduceLROnPlateau, "step", before=before_plateau)  # it has a `step` of its own


def watch_seeds_and_epochs(recorder: Recorder) -> None:
    """Patches `torch.manual_seed` and `DistributedSampler.set_epoch`.

    They may explain differences: ranks may use the same seed, or a sampler's epoch is never set.
    """

    def before_epoch(sampler: Any, *_args: Any, **_kwargs: Any) -> None:
        recorder.inputs.samplers_with_epoch.add(sampler)

    wrap(torch, "manual_seed", before=recorder.calls.record_seed)
    wrap(DistributedSampler, "set_epoch", before=before_epoch)


def watch_tensor_hooks(recorder: Recorder) -> None:
    """Patches how hooks are registered, to see whether one changes the gradient of a parameter."""
    _watch_hooks(recorder, "register_hook", _call_gradient_hook)
    _watch_hooks(recorder, "register_post_accumulate_grad_hook", _call_post_accumulate_hook)


def _watch_hooks(recorder: Recorder, method_name: str, call_hook: Callable[..., Any]) -> None:
    """Patches a method of `Tensor` that registers a hook.

    Args:
        recorder: recorder that is informed if a hook changes a gradient.
        method_name: name of the method.
        call_hook: function that is registered in place of the hook. It is called with the recorder,
            the line of the script that has registered the hook, the tensor, the hook, and what the
            hook is called with.
    """
    original_register: Any = getattr(Tensor, method_name)

    def register(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        """Replaces the method, and watches the hook if the script registers it."""
        module_of_caller = sys._getframe(1).f_globals["__name__"]
        # The script may have called torch, which registers a hook of its own.
        if is_of_torch_or_lockstep(module_of_caller):  # first, because it is faster
            return original_register(tensor, hook)

        line_of_script = user_line()  # None if only libraries are on the call stack
        if not line_of_script:
            return original_register(tensor, hook)

        watched_hook = partial(call_hook, recorder, line_of_script, tensor, hook)
        return original_register(tensor, watched_hook)

    setattr(Tensor, method_name, register)


def _call_gradient_hook(
    recorder: Recorder,
    line: str,
    tensor: Tensor,
    hook: Callable[..., Any],
    gradient: Tensor | None,
) -> Any:
    """Calls a hook of `Tensor.register_hook`, and records if it changes the gradient.

    Args:
        recorder: recorder that is informed of a change.
        line: line of the script that has registered the hook.
        tensor: tensor on which the hook is registered.
        hook: the script's hook.
        gradient: gradient of the tensor; None if the loss does not depend on it.

    Returns:
        The result of the hook: a new gradient, or None to use the gradient that it was given.
    """
    # An optimizer steps with the gradients of parameters, which are leaf tensors. Other gradients
    # are not of interest.
    before = _copy_of_gradient(gradient) if tensor.is_leaf else None
    result = hook(gradient)
    after = gradient if result is None else result
    if _is_changed(before, after):
        recorder.calls.record_hook(line)
    return result


def _call_post_accumulate_hook(
    recorder: Recorder,
    line: str,
    parameter: Tensor,
    hook: Callable[..., Any],
    hooked_parameter: Tensor,
) -> Any:
    """Calls a hook of `register_post_accumulate_grad_hook`, and records if it changes the gradient.

    A hook that sets the gradient to None, as after a step, has not changed its values.

    Args:
        recorder: recorder that is informed of a change.
        line: line of the script that has registered the hook.
        parameter: parameter on which the hook is registered.
        hook: the script's hook.
        hooked_parameter: the same parameter, with which the hook is called.
    """
    before = _copy_of_gradient(parameter.grad)
    result = hook(hooked_parameter)
    if _is_changed(before, parameter.grad):
        recorder.calls.record_hook(line)
    return result


def _copy_of_gradient(gradient: Tensor | None) -> Tensor | None:
    """Returns a copy; None for a gradient that cannot be compared: a sparse or a sharded one."""
    if gradient is None or gradient.layout != torch.strided or is_sharded(gradient):
        return None
    return gradient.detach().clone()


def _is_changed(before: Tensor | None, after: Any) -> bool:
    """True if a gradient has other values than before; False if this is not known."""
    if before is None or not isinstance(after, Tensor):
        return False
    if after.shape != before.shape:
        return True
    is_same = (after == before) | (after.isnan() & before.isnan())
    return not bool(is_same.all())


def watch_settings(recorder: BitRecorder) -> None:
    """Patches `World`, to see the settings with which the script calls `lockstep.init`."""

    def after_world_init(_: World, run: Run, *_args: Any) -> None:
        recorder.note_settings(run.settings)

    wrap(World, "__init__", after=after_world_init)
