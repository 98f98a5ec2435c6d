"""All patches that `lockstep verify` applies to torch and Lockstep, with the reason for each.

To *patch* a function is to replace it, for the rest of the process, by one that calls the original
and also informs the `Recorder`. Its parts `recorder.calls`, `recorder.inputs` and so on record one
subject each. `FunctionMode` sees all calls of torch's functions, and `Determinism` changes some of
them, such as dropout. Torch's public hooks are used where there are any, for optimizer steps and
forward passes.

The patches, in the order below:

- to make runs comparable: the default dtype, autocast, `torch.compile`, activation checkpointing,
  Lockstep's checkpoints; saving and opening files in `saved_files` and `files`
- to observe the training: backward passes, collectives, DDP, gradient clipping, learning rate
  schedules, optimizers, seeds, samplers, hooks on tensors
- to observe or replace batches: DataLoaders of torch and of Lockstep
- to refuse what cannot be recorded: ranks that the script starts by itself
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial, wraps
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.batch.loader import Loader
from lockstep.batch.pytree import tensors
from lockstep.checkpoint.checkpointer import Checkpoint
from lockstep.distributed.process_group import Run
from lockstep.run.watch.script_processes import replace_start_processes
from lockstep.session.extension import add_to_every_run
from lockstep.torch_compat import (
    in_backward_pass,
    on_shadowed_iteration,
    watch_indices,
)
from lockstep.training.optimizer import PreparedOptimizer
from lockstep.user_code import is_user_file, user_line
from lockstep.verify.feed import BatchReader, BatchWriter, LoadedBatch
from lockstep.verify.recording.bit_recorder import BitRecorder
from lockstep.verify.recording.determinism import Determinism
from lockstep.verify.recording.draws import moved_streams, stream_digests
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.recording.larger_batches import CannotEnlargeError, enlarge_in_place
from lockstep.verify.recording.optimizers import ParameterGroup
from lockstep.verify.recording.recorder import Recorder
from lockstep.verify.recording.saved_files import SavedFiles
from lockstep.verify.recording.state import RecorderState
from lockstep.verify.restored_files import FilesBefore
from lockstep.verify.run_config import RunConfig
from lockstep.verify.unsupported import (
    forbid_larger_groups,
    raise_own_ranks_error,
    run_without_larger_groups,
)
from lockstep.world import World

# Since torch 2.13 some collectives have a second name.
GATHERING_FUNCTIONS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
)
REDUCING_FUNCTIONS = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
)
MOVING_FUNCTIONS = (
    "send",
    "recv",
    "isend",
    "irecv",
    "scatter",
    "gather",
    "all_to_all",
    "all_to_all_single",
)
WORLD_COLLECTIVES = ("sum", "mean", "max", "min", "broadcast", "gather")
CLIPPING_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
UNKNOWN_LINE = "somewhere"
"""Shown instead of a line of the script if no file of the user is on the call stack."""
INDICES_ATTRIBUTE = "_lockstep_indices"
"""Name of the attribute in which a DataLoader's iterator keeps the indices of pending batches."""


def install(
    recorder: Recorder,
    mode: FunctionMode,
    config: RunConfig,
    folder: Path,
    kept_batches: BatchWriter | BatchReader | None = None,
) -> None:
    """Applies all patches to this process.

    Args:
        recorder: recorder that is informed of everything.
        mode: function mode, which is entered here and then sees every call of torch's functions.
        config: settings of the run.
        folder: folder for the files that the script saves.
        kept_batches: writer that keeps the batches of this run, or reader that replaces them with
            the batches of another run.
    """
    _forbid_own_ranks(recorder.note_own_process, config.nproc)

    # To observe the training.
    recorder.state.branches.install()
    add_to_every_run(recorder)  # the recorder is an extension, which sees Lockstep's steps
    register_optimizer_step_pre_hook(recorder.optimizers.before_step)
    register_optimizer_step_post_hook(recorder.optimizers.after_step)
    register_module_forward_pre_hook(recorder.forwards.enter_module)
    register_module_forward_hook(recorder.forwards.leave_module, always_call=True)
    _watch_backward_passes(recorder)
    _watch_collectives(recorder)
    _watch_ddp(recorder, mode.determinism)
    _watch_gradient_clipping(recorder)
    _watch_optimizers(recorder)
    _watch_seeds_and_epochs(recorder)
    _watch_tensor_hooks(recorder)

    # To observe or replace batches.
    _record_sample_indices(mode)
    if kept_batches is not None:
        _number_loaders(kept_batches)
    if isinstance(kept_batches, BatchReader):
        _replace_lengths(kept_batches)
    _watch_loaders(recorder, mode, kept_batches)
    if config.batch_size_factor > 1:
        _enlarge_batches(recorder, config.batch_size_factor)

    # To make runs comparable.
    if mode.determinism.double:
        _compute_in_float64(mode)
    _disable_compile(mode.determinism)
    _disable_saved_checkpoints(mode.determinism)
    SavedFiles(folder).patch(mode.determinism)
    FilesBefore(folder.parent).watch()  # to restore the user's files after the run

    # The mode is never exited: from here on, it sees all calls of torch's functions.
    mode.__enter__()  # type: ignore[no-untyped-call]


def install_for_bits(
    recorder: BitRecorder, determinism: Determinism, config: RunConfig, folder: Path
) -> None:
    """Applies the few patches that are needed to compare runs bit by bit.

    Nothing that the script computes is changed, except that `torch.compile` is switched off.

    Args:
        recorder: recorder that listens to Lockstep's steps as an extension.
        determinism: object that counts what is switched off, to report it with the verdict.
        config: settings of the run.
        folder: folder for the files that the script saves, within the folder of the run.
    """
    # Refuse scripts that cannot be compared: those that start ranks by themselves, and those that
    # call `optimizer.step()` without Lockstep.
    _forbid_own_ranks(recorder.note_own_process, config.nproc)
    register_optimizer_step_pre_hook(recorder.end_script_without_lockstep)

    # The recorder is an extension, which Lockstep calls at every batch and step.
    add_to_every_run(recorder)
    _watch_settings(recorder)
    _end_after_enough_steps(recorder.state)

    _disable_compile(determinism)
    _disable_saved_checkpoints(determinism)

    SavedFiles(folder).patch(determinism)
    run_folder = folder.parent
    FilesBefore(run_folder).watch()  # to restore the user's files after the run


def _watch_settings(recorder: BitRecorder) -> None:
    """Patches `World`, to see the settings with which the script calls `lockstep.init`."""

    def after_world_init(_: World, run: Run, *_args: Any) -> None:
        recorder.note_settings(run.settings)

    _wrap(World, "__init__", after=after_world_init)


def _end_after_enough_steps(state: RecorderState) -> None:
    """Patches the iteration of Lockstep's loaders, to end the script after enough steps."""
    original_iter = Loader.__iter__

    def iterate(self: Loader) -> Iterator[Any]:
        return _until_enough_steps(state, original_iter(self))

    Loader.__iter__ = iterate  # type: ignore[method-assign]


# To make runs comparable


def _compute_in_float64(mode: FunctionMode) -> None:
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

    Torch calls it once in the forward pass, and again in the backward pass to recompute its
    activations.

    Args:
        mode: function mode, which torch disables during a backward pass.
        function: part of the model that is checkpointed.
        *inputs: positional arguments of the function.
        **options: keyword arguments of the function.
    """
    # In the forward pass, the mode is enabled already.
    is_recomputation = mode.in_backward
    if not is_recomputation:
        return function(*inputs, **options)

    with (
        mode.set_in_backward(False),  # so that checkpoints inside of `function` do not do this too
        mode,  # torch has disabled the mode in the backward pass
    ):
        return function(*inputs, **options)


def _disable_compile(determinism: Determinism) -> None:
    """Patches `torch.compile` to do nothing, as it would trace through the recorder's hooks."""
    original_compile: Any = torch.compile

    @wraps(original_compile)
    def compile_disabled(model: Any = None, **options: Any) -> Any:
        # Without a model, as in `@torch.compile(mode=...)`, this call returns a decorator. When it
        # gets the model, it looks up `torch.compile`, finds this function, and calls it again.
        if model is not None:
            determinism.switched_off["torch.compile"] += 1
        return original_compile(model, **{**options, "disable": True})

    torch.compile = compile_disabled


def _disable_saved_checkpoints(determinism: Determinism) -> None:
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


# To observe the training


def _watch_backward_passes(recorder: Recorder) -> None:
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

    _wrap(torch.autograd, "backward", before=before_backward, after=after_backward)


def _watch_collectives(recorder: Recorder) -> None:
    """Patches the collectives of torch and of `World`, to see what the ranks exchange."""
    for name in (*GATHERING_FUNCTIONS, *REDUCING_FUNCTIONS, *MOVING_FUNCTIONS):
        if hasattr(dist, name):
            _watch_torch_collective(recorder, name)
    for name in WORLD_COLLECTIVES:
        _watch_world_collective(recorder, name)
    on_shadowed_iteration(recorder.foreign_steps.record_shadowed_iteration)


def _watch_torch_collective(recorder: Recorder, name: str) -> None:
    """Patches a collective of `torch.distributed`, to see its input and an all-reduce's result."""

    def before_collective(*args: Any, **kwargs: Any) -> None:
        """Records the call and its input, unless Lockstep itself has made the call."""
        if not _is_of_lockstep(_module_that_called_patch()):
            _record_torch_collective(recorder, name, args, kwargs)

    def after_collective(*args: Any, **kwargs: Any) -> None:
        """Records the result of an all-reduce, unless it is still running in the background.

        `record_reduced` only records gradients that an optimizer reduces during its step. Lockstep
        may make this call too, in a step of one of its own optimizers.
        """
        if name == "all_reduce" and not kwargs.get("async_op"):
            tensor = args[0] if args else kwargs.get("tensor")
            recorder.gradients.record_reduced(tensor)

    _wrap(dist, name, before=before_collective, after=after_collective)


def _record_torch_collective(
    recorder: Recorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Records a call of a collective of `torch.distributed`, with its input.

    Args:
        recorder: recorder that is informed of the call.
        name: name of the collective, such as "all_reduce".
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    if name in GATHERING_FUNCTIONS:
        # all_gather(tensor_list, tensor) and all_gather_into_tensor(output_tensor, input_tensor)
        # fill their first argument.
        gathered = args[0] if args else kwargs.get("tensor_list", kwargs.get("output_tensor"))
        tensor = args[1] if len(args) > 1 else _input_by_name(kwargs)
        recorder.calls.record_collective(name, tensor, gathered)
    else:  # all_reduce(tensor)
        tensor = args[0] if args else _input_by_name(kwargs)
        recorder.calls.record_collective(name, tensor)


def _input_by_name(kwargs: dict[str, Any]) -> Any:
    """Returns the input of a collective that is passed by keyword; None if there is none."""
    return kwargs.get("tensor", kwargs.get("input_tensor"))


def _watch_world_collective(recorder: Recorder, name: str) -> None:
    """Patches a collective of `World`, which may exchange data without `torch.distributed`."""
    original = getattr(World, name)

    @wraps(original)
    def collective(world: World, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces the collective."""
        call_original = partial(original, world, value, *args, **kwargs)
        return _record_world_collective(
            recorder,
            world,
            name,
            value,
            call_original,
            loses_gradient=_loses_gradient(name, kwargs),
        )

    setattr(World, name, collective)


def _loses_gradient(name: str, kwargs: dict[str, Any]) -> bool:
    """True if no gradient flows through a collective of `World`, as the script may not expect.

    That is a gather, unless the script asks for gradients: `world.gather(value, gradient=True)`.
    """
    return name == "gather" and not kwargs.get("gradient")


def _record_world_collective(
    recorder: Recorder,
    world: World,
    name: str,
    value: Any,
    call_original: Callable[[], Any],
    *,
    loses_gradient: bool,
) -> Any:
    """Calls a collective of `World`, and records one call for each exchanged tensor.

    Args:
        recorder: recorder that is informed of the calls.
        world: world whose collective the script has called.
        name: name of the collective, such as "gather".
        value: nest of tensors that the script exchanges.
        call_original: calls the original collective with the arguments of the script.
        loses_gradient: whether no gradient flows from the result to `value`.

    Returns:
        The result of the collective.
    """
    calls = []
    for tensor in tensors(value):
        calls.append(recorder.calls.record_collective(f"world.{name}", tensor))

    result = call_original()

    # With several ranks, the result combines the samples of all of them, so it loses the marks of
    # `value`. On one process, it keeps them.
    if world.size > 1:
        recorder.calls.end_collective(calls, result, loses_gradient=loses_gradient)

    return result


def _watch_ddp(recorder: Recorder, determinism: Determinism) -> None:
    """Patches DDP, to see which modules it wraps and whether it gets a communication hook."""

    def before_init(_: Any, module: Any, *_args: Any, **_kwargs: Any) -> None:
        # DDP keeps references to the parameters, so they are converted to float64 before.
        determinism.prepare_module(module)

    def after_init(wrapper: DistributedDataParallel, *_args: Any, **_kwargs: Any) -> None:
        recorder.forwards.add_ddp(wrapper)

    def before_comm_hook(*_args: Any, **_kwargs: Any) -> None:
        """Called before `register_comm_hook`: tells `recorder` the line of the script that calls.

        Lockstep's own hook averages gradients as DDP does, so it explains no difference.
        """
        is_called_by_lockstep = _is_of_lockstep(_module_that_called_patch())
        if not is_called_by_lockstep:
            recorder.state.models.comm_hook_line = user_line() or UNKNOWN_LINE

    _wrap(DistributedDataParallel, "__init__", before=before_init, after=after_init)
    _wrap(DistributedDataParallel, "register_comm_hook", before=before_comm_hook)


def _watch_gradient_clipping(recorder: Recorder) -> None:
    """Patches torch's clipping functions, to see the gradients before they are clipped."""
    utils: Any = torch.nn.utils
    for name in CLIPPING_FUNCTIONS:
        clip = partial(recorder.gradients.clip, getattr(utils, name))
        setattr(utils, name, clip)
        setattr(utils.clip_grad, name, clip)  # the module that defines these functions


def _watch_optimizers(recorder: Recorder) -> None:
    """Patches optimizers and schedulers, to see new optimizers and changes of learning rates."""

    def after_group(optimizer: Optimizer, *_args: Any, **_kwargs: Any) -> None:
        """Called after `Optimizer.add_param_group`: tells `recorder` of the group.

        The constructor of every optimizer calls `add_param_group` for each of its groups, so the
        optimizer may be new too.
        """
        # A script constructs its optimizer after its model. So the random numbers drawn so far have
        # initialized the model, and were not drawn for the first step.
        recorder.state.step_draws.restart()

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

    def before_schedule(*_args: Any, **_kwargs: Any) -> None:
        recorder.calls.record("schedule")

    def before_plateau(_: Any, metrics: Any, *_args: Any) -> None:
        recorder.calls.record("schedule", value=float(metrics))

    _wrap(Optimizer, "add_param_group", after=after_group)
    _wrap(PreparedOptimizer, "__init__", before=before_prepared)
    _wrap(LRScheduler, "step", before=before_schedule)
    _wrap(ReduceLROnPlateau, "step", before=before_plateau)  # it has a `step` of its own


def _watch_seeds_and_epochs(recorder: Recorder) -> None:
    """Patches `torch.manual_seed` and `DistributedSampler.set_epoch`.

    They may explain differences: ranks may use the same seed, or a sampler's epoch is never set.
    """

    def before_epoch(sampler: Any, *_args: Any, **_kwargs: Any) -> None:
        recorder.inputs.samplers_with_epoch.add(sampler)

    _wrap(torch, "manual_seed", before=recorder.calls.record_seed)
    _wrap(DistributedSampler, "set_epoch", before=before_epoch)


def _watch_tensor_hooks(recorder: Recorder) -> None:
    """Patches `Tensor.register_hook`, to see whether a hook changes the gradient of a parameter."""
    original_register: Any = Tensor.register_hook

    def register_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        """Replaces `Tensor.register_hook`, and watches the hook if the script registers it."""
        # Hooks that torch registers are not watched, even if the script has called torch and is on
        # the call stack. Nor are those that a library registers without the script.
        caller = sys._getframe(1)
        is_registered_by_torch = caller.f_globals["__name__"].startswith("torch.")
        line_of_user = user_line()
        if is_registered_by_torch or not line_of_user:
            return original_register(tensor, hook)

        watched_hook = partial(_call_watched_hook, recorder, line_of_user, tensor, hook)
        return original_register(tensor, watched_hook)

    Tensor.register_hook = register_hook  # type: ignore[method-assign]


def _call_watched_hook(
    recorder: Recorder,
    line: str,
    tensor: Tensor,
    hook: Callable[..., Any],
    gradient: Tensor | None,
) -> Any:
    """Calls a hook that the script has registered, and records if it returns another gradient.

    A hook that changes the gradient in place is not noticed.

    Args:
        recorder: recorder that is informed of a change.
        line: line of the script that has registered the hook.
        tensor: tensor on which the hook is registered.
        hook: the script's hook.
        gradient: gradient of the tensor; None if the loss does not depend on it.

    Returns:
        The result of the hook: a new gradient, or None to leave the gradient unchanged.
    """
    result = hook(gradient)

    # An optimizer steps with the gradients of parameters, which are leaf tensors. Other gradients
    # are not of interest.
    if not tensor.is_leaf:
        return result

    if isinstance(result, Tensor) and isinstance(gradient, Tensor):
        if not result.equal(gradient):
            recorder.calls.record_hook(line)

    return result


# To observe or replace batches


def _record_sample_indices(mode: FunctionMode) -> None:
    """Patches DataLoader iterators to keep the sample indices of each batch until it is handed out.

    With worker processes, the indices of several batches are drawn before the first batch is ready.
    """

    def draw_indices(iterator: Any, draw: Callable[[], Any]) -> Any:
        """Draws the sample indices of the next batch, and keeps them on the iterator."""
        # The indices themselves are compared, so the random draws that order them are not recorded.
        with mode.draws.paused():
            indices = draw()
        _pending_indices(iterator).append(indices)
        return indices

    def forget_indices(iterator: Any) -> None:
        """Clears the indices of the last pass, because persistent workers begin another one."""
        vars(iterator).pop(INDICES_ATTRIBUTE, None)

    # Iterators call the first function instead of their sampler, and the second one at a reset.
    watch_indices(draw_indices, forget_indices)


def _pending_indices(iterator: Any) -> deque[Any]:
    """Returns the queue of sample indices for batches that an iterator has not handed out yet.

    The queue is created on first use and stored on the iterator.
    """
    attributes = vars(iterator)
    if INDICES_ATTRIBUTE not in attributes:
        attributes[INDICES_ATTRIBUTE] = deque()
    pending: deque[Any] = attributes[INDICES_ATTRIBUTE]
    return pending


def _number_loaders(kept_batches: BatchWriter | BatchReader) -> None:
    """Patches `DataLoader.__init__`, to number the script's loaders in the order of construction.

    A loader has the same number in the run that writes batches and in the run that reads them.

    Args:
        kept_batches: writer of the batches of this run, or reader of the batches of the other run.
            It counts the loaders.
    """

    def after_init(loader: DataLoader[Any], dataset: Any, *_args: Any, **_kwargs: Any) -> None:
        if not _is_lockstep_dataset(dataset):
            kept_batches.add_loader(loader)

    _wrap(DataLoader, "__init__", after=after_init)


def _replace_lengths(reader: BatchReader) -> None:
    """Patches `DataLoader.__len__`, since loaders yield the batches of another run.

    Args:
        reader: reader of the batches of the other run.
    """
    original_len: Any = DataLoader.__len__

    def length(self: DataLoader[Any]) -> int:
        """Replaces `DataLoader.__len__`: returns the length in the other run, if it is known."""
        length_in_other_run = reader.length(self)
        if length_in_other_run is not None:
            return length_in_other_run

        own_length: int = original_len(self)
        return own_length

    DataLoader.__len__ = length  # type: ignore[method-assign]


def _watch_loaders(
    recorder: Recorder, mode: FunctionMode, kept_batches: BatchWriter | BatchReader | None
) -> None:
    """Patches the iteration of DataLoaders, to see their batches, and to keep or replace them.

    Args:
        recorder: recorder that is informed of each batch.
        mode: function mode, which sees every call of torch's functions.
        kept_batches: writer that keeps each batch, or reader whose batches replace those of the
            loader, or None.
    """
    original_iter = DataLoader.__iter__
    original_lockstep_iter = Loader.__iter__

    def iterate(self: DataLoader[Any]) -> Iterator[Any]:
        """Replaces `DataLoader.__iter__`."""
        # A DataLoader inside one of Lockstep's loaders is left alone, because `Loader.__iter__` is
        # patched instead.
        if _is_lockstep_dataset(self.dataset):
            return original_iter(self)

        return _iterate_torch_loader(self, original_iter, recorder, mode, kept_batches)

    def iterate_lockstep(self: Loader) -> Iterator[Any]:
        """Replaces `Loader.__iter__`, to convert the batches of Lockstep's loaders to float64.

        It also ends the script once enough steps are recorded. The batches are not recorded here:
        the recorder is an extension of Lockstep, which tells it of every batch.
        """
        batches = _until_enough_steps(recorder.state, original_lockstep_iter(self))
        return map(mode.determinism.convert, batches)

    DataLoader.__iter__ = iterate  # type: ignore[method-assign, assignment]
    Loader.__iter__ = iterate_lockstep  # type: ignore[method-assign]


def _iterate_torch_loader(
    loader: DataLoader[Any],
    original_iter: Callable[[DataLoader[Any]], Iterator[Any]],
    recorder: Recorder,
    mode: FunctionMode,
    kept_batches: BatchWriter | BatchReader | None,
) -> Iterator[Any]:
    """Returns the iterator that the script gets for one of torch's DataLoaders.

    Args:
        loader: the DataLoader.
        original_iter: torch's own `DataLoader.__iter__`.
        recorder: recorder that is informed of each batch.
        mode: function mode, which sees the random numbers that are drawn while a batch is read.
        kept_batches: writer that keeps each batch for another run, or reader of the batches that
            another run has kept, or None.
    """
    # Gradients are off during evaluation.
    is_training = torch.is_grad_enabled()
    if is_training:
        recorder.inputs.begin_pass(loader)

    # Training loops get the batches of the other run instead of the loader's own.
    if is_training and isinstance(kept_batches, BatchReader):
        return _iterate_kept(recorder, loader, kept_batches)

    writer = kept_batches if isinstance(kept_batches, BatchWriter) else None
    return _iterate_recorded(recorder, mode, loader, original_iter(loader), writer)


def _iterate_kept(
    recorder: Recorder, loader: DataLoader[Any], reader: BatchReader
) -> Iterator[Any]:
    """Records and yields the batches of the other run, in which those of all ranks are joined."""
    name_of_pass = reader.begin_pass(loader)
    for batch, ids in _until_enough_steps(recorder.state, reader.batches(name_of_pass)):
        recorder.inputs.record_batch(loader, batch, ids=ids, random_draws={})
        yield batch


def _iterate_recorded(
    recorder: Recorder,
    mode: FunctionMode,
    loader: DataLoader[Any],
    iterator: Iterator[Any],
    writer: BatchWriter | None,
) -> Iterator[Any]:
    """Yields the batches of a DataLoader, in float64.

    Batches for training are recorded, and kept for another run if there is a writer. Batches for
    evaluation, when gradients are off, are neither recorded nor kept.

    Args:
        recorder: recorder that is informed of each batch.
        mode: function mode, which sees the random numbers that are drawn while a batch is read.
        loader: the DataLoader.
        iterator: iterator that `iter(loader)` returned.
        writer: writer that keeps the batches for another run; None to keep none.
    """
    # The iterator draws the sample indices of several batches ahead. They wait in this queue, in
    # the order of the batches (see `_record_sample_indices`).
    pending_indices = _pending_indices(iterator)
    batches = _until_enough_steps(recorder.state, iterator)

    # Whether a pass is kept is decided at its beginning, for all of its batches.
    writer_of_pass = writer if torch.is_grad_enabled() else None
    name_of_pass = ""
    if writer_of_pass is not None:
        name_of_pass = writer_of_pass.begin_pass(loader)

    for number in count():
        # Random numbers that are drawn while the batch is read belong to the batch.
        mode.draws.restart()
        streams_before = stream_digests()

        try:
            batch = mode.determinism.convert(next(batches))
        except StopIteration:
            return

        # The indices of this batch are the first in the queue. The iterator of a subclass of
        # DataLoader may work without indices.
        ids = None
        if pending_indices:
            ids = _as_numbers(pending_indices.popleft())

        # The script may switch gradients on or off between two batches of one pass.
        is_training = torch.is_grad_enabled()
        if is_training:
            drawn = mode.draws.since_restart() | moved_streams(streams_before)
            recorder.inputs.record_batch(loader, batch, ids=ids, random_draws=drawn)

        if writer_of_pass is not None:
            writer_of_pass.write(name_of_pass, number, LoadedBatch(batch, ids))

        yield batch


def _until_enough_steps(state: RecorderState, iterator: Iterator[Any]) -> Iterator[Any]:
    """Yields the batches of an iterator, and ends the script once enough steps are recorded.

    The script is ended before the next batch is read, which would not be compared, and which may
    take long to read.
    """
    while True:
        if torch.is_grad_enabled():  # never in the middle of an evaluation
            state.end_script_if_enough()
        try:
            yield next(iterator)
        except StopIteration:
            return


def _as_numbers(indices: Any) -> list[int] | None:
    """Returns the indices of a batch as integers.

    The result is None if there are no indices, or if the dataset uses other keys, such as texts or
    pairs.
    """
    if not isinstance(indices, list | tuple) or not indices:
        return None
    if not all(isinstance(index, int | np.integer | Tensor) for index in indices):
        return None
    return [int(index) for index in indices]


def _enlarge_batches(recorder: Recorder, times: int) -> None:
    """Patches `DataLoader.__init__`, to multiply batch sizes (see `larger_batches`)."""
    original_init: Any = DataLoader.__init__
    signature = inspect.signature(original_init)

    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        """Replaces `DataLoader.__init__`, to multiply the batch size by the factor `times`.

        If that is not possible, the loader stays as it is, and the verdict mentions its line.
        """
        arguments = signature.bind(self, *args, **kwargs).arguments  # by name, including "self"
        if not _is_lockstep_dataset(arguments["dataset"]):
            try:
                enlarge_in_place(arguments, times)
            except CannotEnlargeError:
                recorder.note_loader_without_batch_size(user_line() or UNKNOWN_LINE)
        original_init(**arguments)

    DataLoader.__init__ = init  # type: ignore[method-assign]


# To refuse what cannot be recorded


def _forbid_own_ranks(note_own_process: Callable[[str], None], nproc: int) -> None:
    """Patches the start of processes: it becomes an error if a script starts ranks of its own.

    They would not be recorded. Three things are forbidden:

    - `torch.multiprocessing.spawn` and `start_processes`, which always start ranks;
    - a process group with more than `nproc` ranks in this process, which may be the first of the
      script's own ranks;
    - such a group in a process that the script starts. Other processes are allowed, such as helpers
      that prepare data.

    Args:
        note_own_process: called with the line of the script that starts a process.
        nproc: number of ranks that `lockstep verify` has started.
    """
    replace_start_processes(raise_own_ranks_error)
    forbid_larger_groups(nproc)

    original_start = BaseProcess.start

    def start(process: BaseProcess) -> None:
        """Replaces `Process.start`."""
        caller = sys._getframe(1)
        if is_user_file(caller.f_code.co_filename):
            note_own_process(user_line() or "")
            _start_without_larger_groups(process, original_start, nproc)
        else:  # a library has called it, such as a DataLoader that starts its workers
            original_start(process)

    BaseProcess.start = start  # type: ignore


def _start_without_larger_groups(
    process: BaseProcess, original_start: Callable[[BaseProcess], None], nproc: int
) -> None:
    """Starts a process of the script, which gets an error if it turns out to be a rank.

    A rank of the script opens a process group together with other ranks. If the group has more than
    `nproc` ranks, the script has started some of them itself, and the error is raised.

    Args:
        process: process to start.
        original_start: Python's own `Process.start`.
        nproc: number of ranks that `lockstep verify` has started.
    """
    # The new process will call `process.run`. Replace this method, for this object only, by a
    # function that first forbids such process groups and then calls the original method.
    run = partial(run_without_larger_groups, nproc, process.run)
    process.run = run  # type: ignore[method-assign]

    original_start(process)

    # The new process has its own copy of `process`. Here, the method of the class becomes visible
    # again: the replaced one refers to `process`, and would keep the object alive. (The watch on
    # processes in `lockstep.run.watch`, which patches `start` too, may have removed it already.)
    vars(process).pop("run", None)


# Helpers


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _wrap(
    owner: Any,
    name: str,
    before: Callable[..., Any] = _do_nothing,
    after: Callable[..., Any] = _do_nothing,
) -> None:
    """Patches a function so that others are called before and after it, with the same arguments.

    Args:
        owner: module or class that the function belongs to.
        name: name of the function.
        before: function that is called before it.
        after: function that is called after it, unless it raises an error.
    """
    function = getattr(owner, name)

    @wraps(function)  # `FunctionMode` recognizes functions by their names
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = function(*args, **kwargs)
        after(*args, **kwargs)
        return result

    setattr(owner, name, wrapped)


def _module_that_called_patch() -> str:
    """Returns the name of the module that has called a patched function.

    It must be called directly by a `before` or `after` function of `_wrap`.
    """
    # Frame 0 is this function, 1 is `before` or `after`, 2 is `wrapped`, and 3 is its caller.
    caller = sys._getframe(3)
    name: str = caller.f_globals["__name__"]
    return name


def _is_of_lockstep(module_name: str) -> bool:
    return module_name.startswith("lockstep.")


def _is_lockstep_dataset(dataset: Any) -> bool:
    """True for the dataset inside one of Lockstep's loaders, which is not the script's."""
    return _is_of_lockstep(type(dataset).__module__)
