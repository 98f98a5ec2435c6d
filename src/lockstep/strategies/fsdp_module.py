"""Follows the steps of a training with a module that is sharded by torch's `fully_shard`.

`fully_shard` divides a module into *units*, whose parameters are gathered when they run. The
optimizer holds *shards* (DTensors); forward passes use *whole* parameters. Before the last
micro-batch of a global batch, gradients accumulate in the whole parameters. In the last one torch
averages them over the ranks and moves them to the shards.

`ShardedModule` tells torch which micro-batch is computed, frees gathered parameters in time, and
rejects what would otherwise go wrong without an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lockstep import torch_compat
from lockstep.distributed.process_group import Run
from lockstep.errors import UsageError
from lockstep.session.check_schedule import check_due
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import StepKey
from lockstep.strategies.base import EqualTensors
from lockstep.strategies.empty_part import note_empty_part
from lockstep.strategies.fsdp_misuse import (
    check_hooks,
    note_mixed_dtypes,
    outside_forward_error,
    refuse_autograd_gradient,
    refuse_copies,
    replaced_parameter_error,
)
from lockstep.strategies.fsdp_shown_gradients import ShownGradients
from lockstep.strategies.fsdp_unused import UnusedParameters
from lockstep.strategies.moving_buffers import MovingBuffers
from lockstep.wording import join_first


class _ZeroGrad:
    """Replaces the `zero_grad` of the model or of a submodule: clears the gradients of its shards.

    Between a forward and a backward pass the model has whole parameters in the place of shards.
    Torch's method would clear the gradients of these: those of earlier micro-batches of the global
    batch, and not those that the optimizer has used.

    Args:
        part: the module, whose parameters are shards now.
    """

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._parameters = list(part.parameters())

    def __call__(self, set_to_none: bool = True) -> None:
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if set_to_none:
                parameter.grad = None
                continue

            # As torch does: a gradient with a graph leaves it. One without may be a view, which
            # `detach_` refuses.
            if gradient.grad_fn is not None:
                gradient.detach_()
            else:
                gradient.requires_grad_(False)
            gradient.zero_()

    def __reduce__(self) -> tuple[type[MethodType], tuple[Callable[..., None], nn.Module]]:
        """Gives a copy of a submodule, which has no shards that others use, torch's method."""
        return MethodType, (nn.Module.zero_grad, self._part)


def _replace_zero_grad(root: nn.Module) -> None:
    """Gives a model and its submodules `_ZeroGrad`, except where a script has its own method."""
    for part in root.modules():
        if type(part).zero_grad is nn.Module.zero_grad:
            vars(part)["zero_grad"] = _ZeroGrad(part)


class ShardedModule(Extension):
    """Follows the training of one sharded module.

    Args:
        units: the modules that `fully_shard` was applied to, by name. The last one is the whole
            model, and its name is empty.
        mesh: the mesh over which parameters are sharded.
        run: the run of this process.
        keep_gathered: True if gathered parameters stay until the backward pass of the last
            micro-batch.
        accumulate_shards: True if gradients are averaged in every micro-batch.
        find_unused_parameters: True if ranks may use different parameters.
        half_dtype: the dtype of gathered parameters if it is a half-precision one, else None.
        moving_buffers: makes the buffers that forward passes change equal on all ranks; None if
            another extension does that.
    """

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        mesh: DeviceMesh,
        run: Run,
        *,
        keep_gathered: bool,
        accumulate_shards: bool,
        find_unused_parameters: bool,
        half_dtype: torch.dtype | None,
        moving_buffers: MovingBuffers | None,
    ) -> None:
        self._mesh = mesh
        self._run = run
        self._keep_gathered = keep_gathered
        self._accumulate_shards = accumulate_shards
        self._half_dtype = half_dtype
        self._moving_buffers = moving_buffers
        self._units: list[Any] = list(units.values())
        root = self._units[-1]
        self._root = root
        torch_compat.make_fsdp_root(root)
        self.whole_parameters = _whole_parameters(units)
        """The parameters that forward passes use, by name."""
        for unit in self._units:
            torch_compat.set_dtypes_of_frozen_unit(unit)

        self._shards: dict[str, DTensor] = {}
        self._scalars: dict[str, nn.Parameter] = {}
        """The parameters without dimensions, which every rank keeps whole, by name."""
        for name, parameter in root.named_parameters():
            if isinstance(parameter, DTensor):
                self._shards[name] = parameter
            else:
                self._scalars[name] = parameter

        whole_after_forward = self._names_of_whole_after_forward()
        self._shown_gradients = ShownGradients(
            [self._shards[name] for name in whole_after_forward],  # type: ignore[misc]
            [self.whole_parameters[name] for name in whole_after_forward],
        )
        self._places = _places_of_parameters(root, self._shards, self.whole_parameters)
        """The places in the modules that hold each parameter."""
        self._unused_parameters: UnusedParameters | None = None
        if find_unused_parameters:
            root.set_reduce_scatter_unused_params(True)
            whole_parameters = [self.whole_parameters[name] for name in self._shards]
            shards: list[Any] = list(self._shards.values())
            self._unused_parameters = UnusedParameters(shards, whole_parameters)

        self._storages = {name: shard.untyped_storage() for name, shard in self._shards.items()}
        """The storage of each shard, by name. It is replaced if the user sets `parameter.data`."""
        self._names_with_hook: set[str] = set()
        """The names of shards with a gradient hook that rejects gradients from autograd."""
        self._refuse_autograd_gradients()
        self._step_key: StepKey | None = None
        """Identifies the optimizer step that the latest forward or backward pass belonged to."""
        self._is_last_backward = True
        """What torch is set to: True if the next backward pass completes the gradients."""
        self._frees_after_backward = True
        """What torch is set to: True if it frees gathered parameters after the next backward pass.

        Always True without `keep_gathered`. With it, True in the last micro-batch only."""
        self._has_unfinished_gradients = False
        """True from the beginning of a backward pass that is not the last one of its global batch,
        or of its virtual rank. It leaves gradients on this rank, to which later ones add."""
        self._late_gradient_hooks: list[RemovableHandle] = []
        """Hooks that convert the gradients of parameters which only the last micro-batch uses."""
        self._is_double_backward = False
        """True if units stay gathered because a backward pass will itself be differentiated."""
        self._forward_is_running = False
        """True while torch runs the forward pass, after the checks that may reject it."""
        self._error_before_forward: BaseException | None = None
        """The error that the script was handling when the running forward pass began."""
        self._has_failed = False
        """True if a forward pass raised an error and torch cannot reset the model after it."""
        self._is_released = False
        root.register_forward_pre_hook(self._before_forward, prepend=True)
        root.register_forward_hook(self._after_forward, always_call=True)
        root.register_load_state_dict_pre_hook(self._before_load)
        torch_compat.replace_apply(root, self._refuse_conversion)
        _replace_zero_grad(root)
        for unit in self._units:
            refuse_copies(unit)

    def _names_of_whole_after_forward(self) -> list[str]:
        """Returns the names of the parameters that stay whole from a forward to a backward pass."""
        ids_in_root = set(map(id, torch_compat.shards_in_reduction_order(self._root)))
        names: list[str] = []
        for name, shard in self._shards.items():
            if self._keep_gathered or id(shard) in ids_in_root:
                names.append(name)
        return names

    def before_backward(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Clears the gradients of shards that the script has cleared since the forward pass."""
        self.hide_gradients()

    def hide_gradients(self) -> None:
        """Ends what `ShownGradients.show` began after the forward pass, if nothing else has."""
        self._shown_gradients.hide()

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Sets torch to what the current micro-batch needs.

        Raises:
            UsageError: the loss was computed from shards, outside the model's forward pass.
        """
        if isinstance(weighted_loss, DTensor):
            raise outside_forward_error("the loss is a DTensor, as parameters are")

        if not micro_batch.first:
            # No step begins here, even if the loader has ended since the forward pass.
            self._step_key = self._run.step.key
        self._set_torch_for_micro_batch()
        self._has_unfinished_gradients = not self._is_last_backward
        if self._unused_parameters is not None:
            self._unused_parameters.before_backward()

        # A parameter that only the last of several micro-batches uses would get a gradient in half
        # precision. Torch averages it together with those accumulated before, which are in fp32.
        is_last_of_several = micro_batch.last and not micro_batch.first
        if self._half_dtype is not None and is_last_of_several:
            self._convert_late_gradients()

    def _convert_late_gradients(self) -> None:
        """Makes the backward pass of the last micro-batch give all gradients of a unit one dtype.

        Torch has converted the gradients of earlier micro-batches from half precision to fp32, and
        sends all gradients of a unit in one message. A parameter that only the last micro-batch
        uses would get a *late* gradient, in half precision, which does not fit into that message.
        So this method registers a hook on each parameter that no micro-batch has used yet. The hook
        converts the late gradient during the backward pass; `backward_ended` removes it. A
        parameter that is never used sends zeros under `find_unused_parameters`.
        """
        for unit in self._units:
            self._late_gradient_hooks += torch_compat.accumulate_late_gradients(
                unit, zeros_if_unused=self._unused_parameters is not None
            )

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Frees gathered units, and removes the gradients of parameters that no rank has used."""
        self._end_double_backward()
        for hook in self._late_gradient_hooks:
            hook.remove()
        self._late_gradient_hooks = []
        if self._unused_parameters is not None and self._is_last_backward:
            self._unused_parameters.end_round()

    def _set_torch_for_micro_batch(self) -> None:
        """Sets whether torch frees parameters and averages gradients in the current micro-batch.

        Called before each forward and backward pass with gradients.
        """
        step = self._run.step
        micro_batch = step.micro_batch
        another_step_begins = self._step_key != step.key
        self._step_key = step.key

        # If there are unfinished gradients when a step begins, the loop has left the previous
        # global batch early, or has skipped its last micro-batch.
        if another_step_begins and self._has_unfinished_gradients:
            self._drop_unfinished_gradients()

        self.hide_gradients()  # of an earlier forward pass, which had no backward pass

        # If parameters stay gathered between micro-batches, the last one frees them.
        if self._keep_gathered:
            self._set_frees_after_backward(micro_batch.last)

        # With virtual ranks, the gradients of each virtual rank are collected at its end.
        self._set_is_last_backward(micro_batch.last or micro_batch.virtual_rank_ends)

    def _set_frees_after_backward(self, frees: bool) -> None:
        """Sets whether torch frees gathered parameters after the next backward pass."""
        if frees != self._frees_after_backward:  # it takes time, because it visits all units
            self._frees_after_backward = frees
            self._root.set_reshard_after_backward(frees)

    def _set_is_last_backward(self, is_last_backward: bool) -> None:
        """Tells torch whether the next backward pass is the last one before gradients are complete.

        Gradients accumulate on this rank until the last backward pass, which averages them. With
        `accumulate_shards` every backward pass averages them.
        """
        if is_last_backward == self._is_last_backward:  # a change takes time, it visits all units
            return

        self._is_last_backward = is_last_backward
        # Whether the backward pass waits for the communication at its end.
        self._root.set_is_last_backward(is_last_backward)
        # Whether it averages the gradients. Without this call, it does.
        if not self._accumulate_shards:
            self._root.set_requires_gradient_sync(is_last_backward)

    def _drop_unfinished_gradients(self) -> None:
        """Drops the gradients of a global batch whose last micro-batch had no backward pass.

        On one device, a loop that does not clear them would keep them for its next step.
        """
        self._has_unfinished_gradients = False
        self._shown_gradients.forget_accumulated()  # the script may have cleared them, too
        self.hide_gradients()  # else those of the shards would seem to be cleared below
        for parameter in self.whole_parameters.values():
            parameter.grad = None
        for unit in self._units:
            torch_compat.drop_accumulated_gradients(unit)
        if self._unused_parameters is not None:
            self._unused_parameters.forget_round()

    def begin_double_backward(self) -> None:
        """Keeps units gathered because a backward pass is differentiated and needs them again."""
        if not self._is_double_backward:
            self._is_double_backward = True
            self._root.set_reshard_after_backward(False)
            self._root.set_reshard_after_forward(False)

    def _end_double_backward(self) -> None:
        """Lets torch free units again after a backward pass that was differentiated."""
        if not self._is_double_backward:
            return

        self._is_double_backward = False

        # `begin_double_backward` has set torch to free nothing. Set torch again to free units after
        # a backward pass, if it did so before.
        self._root.set_reshard_after_backward(self._frees_after_backward)

        # Also set torch again to free units after a forward pass, except the last unit, the root:
        # torch keeps its parameters because the backward pass begins with them.
        if not self._keep_gathered:
            *inner_units, _ = self._units
            for unit in inner_units:
                unit.set_reshard_after_forward(True, recurse=False)

        # Free the units that this backward pass would have freed.
        if self._frees_after_backward:
            self._free_gathered()

    def _free_gathered(self) -> None:
        """Frees all gathered parameters."""
        for unit in self._units:
            unit.reshard()

    def before_clipping(self, module: nn.Module) -> None:
        """Frees what a forward pass after the backward pass has gathered.

        The parameters of the module are then shards again, which have the gradients to be clipped.
        """
        shares_parts = not set(self._root.modules()).isdisjoint(module.modules())
        if shares_parts:
            self.hide_gradients()
            self._free_gathered()

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Prepares for an optimizer step: frees gathered parameters and checks the gradients.

        The step changes the shards, so parameters that stay gathered would be out of date.

        Raises:
            UsageError: gradients were not averaged, because a loss was not computed from the
                model's outputs, or the user has changed parameters in a way that has no effect.
        """
        if self._root not in modules:
            return

        self._raise_if_earlier_forward_failed()
        self.hide_gradients()
        self._end_double_backward()
        self._free_gathered()
        self._check_gradients_are_averaged()
        if self._unused_parameters is not None:
            self._unused_parameters.before_step()

        # Look for changed shards in some of the first steps, and then at regular intervals.
        number_of_this_step = self._run.step.number + 1
        if check_due(number_of_this_step):
            self._refuse_autograd_gradients()
            self._check_shards()

    def _check_gradients_are_averaged(self) -> None:
        """Raises UsageError if a loss was not computed from the outputs of the model."""
        not_averaged = self._parameters_with_whole_gradient()
        if not_averaged:
            raise UsageError(
                "a backward pass around the outputs of a sharded model",
                f"the gradients of {join_first(not_averaged)} stayed on this rank: when the last "
                "backward pass of the global batch ended, torch did not know that they were there",
                "compute the loss of every micro-batch from what the model returns, in tensors, "
                "tuples, lists or dicts",
            )

    def _parameters_with_whole_gradient(self) -> list[str]:
        """Returns the names of whole parameters that still hold a gradient.

        When a global batch has ended, torch should have moved all gradients to the shards.
        """
        # If units are computed in half precision, torch accumulates the gradients of several
        # micro-batches in fp32, in an attribute of its own instead of `parameter.grad`.
        ids_with_accumulated_gradient: set[int] = set()
        if self._half_dtype is not None:
            for unit in self._units:
                parameters = torch_compat.parameters_with_accumulated_gradient(unit)
                ids_with_accumulated_gradient.update(map(id, parameters))

        names: list[str] = []
        for name, parameter in self.whole_parameters.items():
            if parameter.grad is not None or id(parameter) in ids_with_accumulated_gradient:
                names.append(name)

        return names

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Makes the buffers that forward passes change equal on all ranks."""
        if self._moving_buffers is not None and self._root in modules:
            self._moving_buffers.make_equal()

    def _raise_if_earlier_forward_failed(self) -> None:
        """Raises UsageError if a forward pass raised an error and torch cannot reset the model."""
        if self._has_failed:
            raise UsageError(
                "a sharded model whose forward pass has raised",
                f"torch {torch.__version__} cannot take up such a model",
                "let the error end the run, or use torch 2.13 or later",
            )

    def _refuse_autograd_gradients(self) -> None:
        """Registers hooks on trainable shards that reject gradients which come from autograd.

        Gradients reach the shards by torch's reduce-scatter, not by autograd, unless the loss was
        computed from the shards themselves.
        """
        for name, shard in self._shards.items():
            if shard.requires_grad and name not in self._names_with_hook:
                self._names_with_hook.add(name)
                hook = partial(refuse_autograd_gradient, name)
                shard.register_hook(hook)  # type: ignore[no-untyped-call]

    def _check_shards(self) -> None:
        """Raises UsageError if the user has changed shards in a way that has no effect.

        There are two such ways: a gradient hook, which is never called, and other memory for the
        shard by `parameter.data = ...`.
        """
        # One hook on each trainable shard is ours (`_refuse_autograd_gradients`).
        check_hooks(self._shards, num_own_hooks=1)

        # `self._storages` keeps each original storage object alive, and torch returns the same
        # object as long as it is. So `is` compares storages.
        replaced: list[str] = []
        for name, shard in self._shards.items():
            has_other_memory = shard.untyped_storage() is not self._storages[name]
            if has_other_memory:
                replaced.append(name)

        if replaced:
            raise UsageError(
                "parameter.data = ... of a sharded model",
                f"it has no effect on {join_first(replaced)}: the shards are elsewhere",
                "write into them, under torch.no_grad(): parameter.copy_(...), .clamp_(...)",
            )

    def release(self) -> None:
        """Drops references to the process groups, so that their threads end with the run.

        See `ExactDDP.release` for what could happen otherwise.
        """
        self._is_released = True
        # The mesh is that of this run. Torch caches meshes, so the parameters may refer to the mesh
        # of an earlier run.
        torch_compat.drop_fsdp_groups(self._units, self._mesh)

    def equal_tensors(self) -> Iterator[EqualTensors]:
        """Yields the tensors that are equal on several ranks.

        Buffers and scalars are equal on all ranks, and under HSDP each shard is on some.
        """
        yield EqualTensors(self._scalars, dict(self._root.named_buffers()))
        if self._mesh.ndim > 1:
            shards = {name: shard.to_local() for name, shard in self._shards.items()}
            yield EqualTensors(shards, {}, self._mesh.get_group(0))

    def _refuse_conversion(self, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Replaces `nn.Module._apply`, which `module.to(...)` and similar methods call.

        A call that changes nothing is allowed, such as `model.to(device)` on that device. So each
        tensor is converted, to see whether the result is another tensor.

        Args:
            convert: the conversion that the method applies to each tensor. It returns the same
                tensor if there is nothing to change.
            recurse: an argument of torch's method, not used here.

        Returns:
            The module, as `_apply` does.

        Raises:
            UsageError: the method would change a tensor of the model.
        """
        shards = [shard.to_local() for shard in self._shards.values()]
        scalars = self._scalars.values()  # the parameters that are not sharded
        for tensor in [*shards, *scalars, *self._root.buffers()]:
            if convert(tensor) is not tensor:
                raise UsageError(
                    "a model moved or converted after world.prepare",
                    f"its shards stay in {tensor.dtype} on {tensor.device}",
                    "do it before world.prepare, or choose precision= in lockstep.init",
                    code="LS303",
                )

        return self._root

    def _before_load(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any
    ) -> None:
        """Raises UsageError if a state dict to be loaded has whole tensors instead of shards."""
        whole: list[str] = []
        for name in self._shards:
            loaded = state.get(prefix + name)
            if isinstance(loaded, Tensor) and not isinstance(loaded, DTensor):
                whole.append(name)

        if whole:
            raise UsageError(
                "load_state_dict of a sharded model with the state of a whole one",
                f"{join_first(whole)} would have to be cut, alike on all ranks",
                "load it before world.prepare, or with lockstep.load_weights(model, path)",
            )

    def _freeze_shards_like_parameters(self) -> None:
        """Freezes the shards of whole parameters that the user has frozen, and unfreezes others.

        While units stay gathered, the parameters that the user finds in the model are the whole
        ones, not the shards.
        """
        for name, parameter in self._root.named_parameters():
            if name in self._shards and not isinstance(parameter, DTensor):
                self._shards[name].requires_grad_(parameter.requires_grad)

    @torch_compat.outside_compiled_code
    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        """Prepares for a forward pass of the model, and rejects one that cannot work.

        Before a forward pass with gradients, torch is set to what the current micro-batch needs:
        whether it frees parameters and averages gradients.

        Raises:
            UsageError: the model cannot run, because the run has ended or a forward pass has
                failed.
        """
        if self._is_released:
            raise UsageError(
                "a forward pass of a sharded model after world.close()",
                "its parameters are on all ranks, and the process group is closed",
                "evaluate before closing; world.checkpoint keeps whole weights",
            )

        self._run.collectives.check_not_in_main_process_first("a forward pass of a sharded model")
        self._raise_if_earlier_forward_failed()
        self._check_parameters_are_in_place()
        if torch.is_grad_enabled():
            self._set_torch_for_micro_batch()

            # With `find_unused_parameters`: record that a forward pass runs after the latest step.
            if self._unused_parameters is not None:
                self._unused_parameters.before_forward()

            # Torch looks which shards are frozen when it gathers a unit. With `keep_gathered`, it
            # has done so in an earlier micro-batch, and would not notice a later change.
            if self._keep_gathered and not self._run.step.micro_batch.first:
                self._freeze_shards_like_parameters()

        self._begin_forward()

    def _check_parameters_are_in_place(self) -> None:
        """Raises UsageError if a parameter of the model was replaced, as by `functional_call`.

        All parameters are looked at in some steps; the first and the last one in each step.
        """
        places = self._places
        if not check_due(self._run.step.number + 1):
            places = [*places[:1], *places[-1:]]
        for place in places:
            if not place.has_parameter():
                raise replaced_parameter_error(place.name)

    def _begin_forward(self) -> None:
        """Notes that a forward pass begins, and an error that the script is handling.

        The script may call the model in an `except` block. If another error is there after the
        forward pass, the forward pass has raised it (`_end_forward`).
        """
        self._forward_is_running = True
        self._error_before_forward = sys.exception()

    @torch_compat.outside_compiled_code
    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Frees parameters after an evaluation, and resets torch after an error."""
        # Torch also calls this hook if `_before_forward` has raised an error. Then the forward pass
        # has not begun, and there is nothing to reset.
        has_begun = self._forward_is_running
        error = self._error_of_forward(output)
        self._end_forward()
        if error is None and torch.is_grad_enabled():
            self._show_gradients()
        elif error is None:
            self._free_after_evaluation()
        elif has_begun:
            self._handle_forward_error(error)

    def _end_forward(self) -> None:
        """Notes that the forward pass has ended."""
        self._forward_is_running = False
        self._error_before_forward = None

    def _error_of_forward(self, output: Any) -> BaseException | None:
        """Returns the error with which a forward pass has ended; None if it has returned.

        An error that the script was already handling when it called the model does not count.

        Args:
            output: what torch passes to a forward hook: the output of the model, which may be None,
                or None after an error.
        """
        if output is not None:
            return None
        error = sys.exception()
        was_there_before = error is self._error_before_forward
        return None if was_there_before else error

    def _free_after_evaluation(self) -> None:
        """Frees the parameters that torch keeps after an evaluation.

        Torch keeps those of the root for a backward pass. After an evaluation there is none, and
        the next optimizer step would make them out of date.
        """
        if not self._is_double_backward:
            self._free_gathered()

    def _show_gradients(self) -> None:
        """Lets the script clear gradients by hand until the backward pass."""
        if torch_compat.in_backward_pass():
            return  # activation checkpointing has run the forward pass again

        accumulates_in_whole = self._has_unfinished_gradients and not self._accumulate_shards
        self._shown_gradients.show(accumulates_in_whole=accumulates_in_whole)

    def _handle_forward_error(self, error: BaseException) -> None:
        """Explains an error that a forward pass has raised, and resets torch after it.

        The error gets a note if this rank had no samples, or if it is about mixed dtypes.
        """
        note_empty_part(error, self._run.step.micro_batch)
        if self._half_dtype is not None:
            note_mixed_dtypes(error, self._half_dtype)

        # Without a reset torch would behave as if this forward pass were still running. Older
        # versions of torch have no reset, so the next forward pass or step raises an error.
        has_been_reset = torch_compat.reset_after_failed_forward(self._units)
        if not has_been_reset:
            self._has_failed = True


class _Place(NamedTuple):
    """The place in a module that holds a parameter: its shard or, while the module runs, the whole
    parameter.
    """

    name: str
    """The name of the parameter in the model."""
    parameters_of_module: Mapping[str, Any]
    own_name: str
    """The name of the parameter in the module."""
    shard: nn.Parameter
    whole: nn.Parameter

    def has_parameter(self) -> bool:
        """Returns False if the script has put another tensor in the place of the parameter."""
        present = self.parameters_of_module.get(self.own_name)
        return present is self.shard or present is self.whole


def _places_of_parameters(
    root: nn.Module, shards: Mapping[str, Any], whole_parameters: Mapping[str, nn.Parameter]
) -> list[_Place]:
    """Returns the place of each parameter; of one that several modules have, the first."""
    places: list[_Place] = []
    for name, shard in shards.items():
        path, _, own_name = name.rpartition(".")
        parameters = torch_compat.members(root.get_submodule(path)).parameters
        places.append(_Place(name, parameters, own_name, shard, whole_parameters[name]))
    return places


def _whole_parameters(units: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Returns the whole parameters, which torch puts into the modules while they run, by name.

    Torch would create them when a unit is gathered for the first time, usually in the first forward
    pass. If that were an evaluation under `torch.inference_mode()`, the parameters would be
    inference tensors, which can never be trained. So they are created here, without memory.
    """
    whole_parameters: dict[str, nn.Parameter] = {}
    unit: Any
    for unit_name, unit in units.items():
        whole_by_id_of_shard = {
            id(shard): whole for shard, whole in torch_compat.make_whole_parameters(unit)
        }
        for name, parameter in unit.named_parameters(prefix=unit_name):
            # None for a scalar, which is not sharded, and for a parameter of an inner unit.
            whole = whole_by_id_of_shard.get(id(parameter))
            if whole is not None:
                whole_parameters[name] = whole

    return whole_parameters
