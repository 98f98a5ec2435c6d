"""A pipeline that is driven by the user's own training loop.

The model is cut into *stages*, and each rank has one or more of them. Each turn of the loop brings
one micro-batch: the loop calls the model, and then `world.backward` with the loss. A rank has a
list of *actions* (`schedule.order`): forward and backward passes of micro-batches through its
stages. In each call it does all actions that are possible with the inputs and losses that it has.

Ranks with the last stage return the model's output from the call. In training, the other ranks
return NaN of the same shapes, whose loss is not used. In evaluation every rank gets the output.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple, NoReturn, SupportsIndex
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lockstep.distributed.process_group import Run
from lockstep.distributed.seeding import mix_seed
from lockstep.errors import NotOnStageError, UsageError
from lockstep.optim.precision import Precision
from lockstep.strategies.base import EqualTensors, ModuleWrapper
from lockstep.strategies.gradient_average import GradientAverage
from lockstep.strategies.moving_buffers import MovingBuffers
from lockstep.strategies.pipeline.global_batch import BoundaryTensors, GlobalBatch, ModelCall
from lockstep.strategies.pipeline.gradient_message import gradient_message, gradient_message_spec
from lockstep.strategies.pipeline.input_kind import Arguments, InputKind, signature
from lockstep.strategies.pipeline.place import ACROSS_PIPELINES, PipelinePlace
from lockstep.strategies.pipeline.schedule import Action, order
from lockstep.strategies.pipeline.shapes import map_tensors
from lockstep.strategies.pipeline.stage import SAVE_WHOLE_MODEL_ADVICE, StagedModel
from lockstep.strategies.pipeline.wire import PostedMessage, Wire
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.torch_compat import never_compiled, pytree
from lockstep.wording import count_noun, describe_type, with_article


class ForwardResult(NamedTuple):
    """The result of a forward pass through one stage."""

    received: list[Tensor]
    """The tensors that came from the previous stage."""
    sent: list[Tensor]
    """The tensors that were sent to the next stage."""
    output: Any
    """What the model's forward returned: the model's output in the last stage, else its shapes."""


class Wires(NamedTuple):
    """The connections that carry the messages of one model.

    Each list has one wire for each cut. The wire between the stages n and n + 1 has the index n.
    """

    activations: list[Wire]
    gradients: list[Wire]
    outputs: list[Wire]
    """Carry the model's output back to earlier stages in evaluation."""


class PipelinedModule(ModuleWrapper):
    """The module that the user calls instead of the model.

    Args:
        model: the user's model, cut into stages.
        place: the place of this rank in its pipeline.
        schedule: the order of the actions, `gpipe` or `1f1b`.
        run: the run of this process.
        wires: the connections for the messages of this model.
    """

    wraps_module: ClassVar[bool] = True
    """Makes checkpoints use the names in the user's module, without a prefix."""

    def __init__(
        self, model: StagedModel, place: PipelinePlace, schedule: str, run: Run, wires: Wires
    ) -> None:
        super().__init__()
        self.module = model.module
        self.place = place
        self.run = run
        self.across_pipelines = run.groups.get(ACROSS_PIPELINES)
        """The ranks of other pipelines with the same stages as this one; None with one pipeline."""
        self._moving_buffers = None
        if self.across_pipelines is not None:
            self._moving_buffers = MovingBuffers(self.module, run.step, self.across_pipelines)

        self._model = model
        self._schedule = schedule
        self._activation_wires = wires.activations
        self._gradient_wires = wires.gradients
        self._output_wires = wires.outputs
        self._self_and_copies: WeakSet[PipelinedModule] = WeakSet([self])
        """This module, and the copies of it that the user has made."""
        self._all_parameters = list(self.module.parameters())
        self._global_batch: GlobalBatch | None = None
        """The global batch that is being computed; None between two of them."""
        self._failure = ""
        """The name of the type of an exception that the model has raised on this rank; empty if
        there was none. Other ranks may have continued after it."""
        self._seed_step = 0
        """The number of the optimizer step for which the latest seed was made."""
        self._num_seeds_in_step = 0
        """How many seeds were made for that step."""
        self._is_initialized = True

    @property
    def device(self) -> torch.device:
        """The device of this rank's stages, which is also where inputs are expected."""
        return self.run.device

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the user's module, such as a setting.

        Raises:
            NotOnStageError: the attribute is a method, a submodule or a tensor, which may need
                parts of the model that are on other ranks.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet, so `self.module` below would recurse forever
                raise
            value = getattr(self.module, name)

        if not (callable(value) or isinstance(value, Tensor)):
            return value

        stages_here = count_noun(len(self.place.stages), "stage")
        total = self.place.last_stage + 1
        if inspect.isroutine(value):
            found = f"it is a method of the whole model, and this rank has {stages_here} of {total}"
        else:
            found = (
                f"it is {describe_type(value)} of the whole model, and this rank has {stages_here} "
                f"of {total}"
            )
        raise NotOnStageError(
            f"{name} of {describe_type(self.module)} under strategy='pipeline'",
            found,
            f"{SAVE_WHOLE_MODEL_ADVICE}; parts that are on this rank are in .module",
        )

    @property
    def waits_for_loss(self) -> bool:
        """True if the latest forward pass was not followed by `world.backward` yet."""
        batch = self._global_batch
        if batch is None:
            return False
        if batch.key != self.run.step.key:  # the loop was left in the middle of that global batch
            return False
        return batch.num_losses_given < len(batch.calls)

    @property
    def has_last_stage(self) -> bool:
        """True if this rank has the last stage, and so the model's output."""
        return self.place.last_stage in self.place.stages

    def local_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that are on this rank."""
        return [parameter for parameter in self._all_parameters if not parameter.is_meta]

    # Other ranks' stages are computed as shapes here, which the compiler cannot trace.
    @partial(never_compiled, recursive=True)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model for one micro-batch, through the stages of all ranks.

        Returns:
            The model's output. In training, ranks without the last stage return NaN of the same
            shapes.

        Raises:
            UsageError: the model cannot be cut where it is, or it is called at the wrong time.
        """
        self._check_can_run()
        if not torch.is_grad_enabled():
            return self._evaluate((args, kwargs))

        batch = self._current_global_batch()
        self._check_call(batch)

        # The kind of the inputs determines the shapes of activations. They are found out once for
        # each kind, and kept for later calls.
        input_kind = self._input_kind((args, kwargs), batch.requires_grad)
        batch.calls.append(ModelCall((args, kwargs), input_kind))

        # This call returns after the forward pass of this micro-batch through the last stage of
        # this rank.
        last_stage_here = self.place.stages[-1]
        micro_batch = len(batch.calls) - 1
        forward_pass = Action(forward=True, stage=last_stage_here, micro_batch=micro_batch)
        output = self._do_actions_up_to(forward_pass, batch)

        if self.has_last_stage:
            return output

        # On this rank the output consists of tensors without values. They become NaN, so that
        # nobody takes a loss that is computed from them for a real one.
        return map_tensors(output, self._make_nan)

    def _do_actions_up_to(self, forward_pass: Action, batch: GlobalBatch) -> Any:
        """Does a forward pass, and the remaining actions that the schedule puts before it.

        Returns:
            What the model's forward returned in the forward pass.
        """
        output_of_action = None
        while forward_pass in batch.actions:  # which holds the remaining actions
            output_of_action = self._do_next_action(batch)
        return output_of_action

    def _check_can_run(self) -> None:
        """Raises UsageError if the run has ended, or if an earlier call has failed on this rank."""
        if self._run_has_ended:
            raise UsageError(
                "a forward pass after world.close()",
                "the model is spread over the ranks, which no longer exchange messages",
                "close at the very end",
            )

        if self._failure:
            raise UsageError(
                "a call of the model after an exception in its forward or backward pass, which was "
                "caught",
                f"{with_article(self._failure)} on this rank: the others wait for what it did not "
                "send",
                "let the exception end the run; check on all ranks, before the call, whatever may "
                "make it fail",
            )

    @property
    def _run_has_ended(self) -> bool:
        """True after `release` has removed the wires; a pipeline has at least one."""
        return not self._activation_wires

    def _check_call(self, batch: GlobalBatch) -> None:
        """Raises UsageError if the model is called at the wrong time within a global batch.

        That is the case if the previous call was not followed by `world.backward`, or if the user
        has switched modes since the global batch began. (A model without BatchNorm may switch.)

        Args:
            batch: the global batch, without the present call.
        """
        # Every earlier call must have been followed by `world.backward`. Ranks without the last
        # stage call it as well: their output is NaN, and so is the loss that they compute from it.
        every_call_has_its_loss = batch.num_losses_given == len(batch.calls)
        if not every_call_has_its_loss:
            raise UsageError(
                "two forward passes with gradients for one world.backward",
                "a pipeline computes one forward pass for each micro-batch",
                "join the inputs and call the model once; evaluate under torch.no_grad(); call "
                "world.backward even if the loss is NaN, as it always is without the last stage",
            )

        has_switched_modes = batch.training is not self.training
        if has_switched_modes:
            self._refuse_switched_modes_with_statistics()

    def _refuse_switched_modes_with_statistics(self) -> None:
        """Raises UsageError if some layer has running statistics, such as a BatchNorm.

        Called if `model.train()` or `model.eval()` was called within a global batch.
        """
        has_statistics = any(
            getattr(part, "running_mean", None) is not None for part in self.module.modules()
        )
        if has_statistics:
            raise UsageError(
                "model.train() or model.eval() within a global batch under strategy='pipeline'",
                "its backward passes come later: in evaluation mode they would be computed with "
                "statistics of the normalisation layers that have moved since",
                "switch between two global batches, or evaluate under torch.no_grad()",
            )

    def _current_global_batch(self) -> GlobalBatch:
        """Returns the global batch of the present call, which may be a new one.

        A global batch that the loop has left early is dropped, and one that has got all its losses
        is finished first.
        """
        self._drop_unfinished()
        batch = self._global_batch  # None between two global batches

        # If all losses were given, this call begins another global batch, as in a loop that calls
        # the model several times for each batch of the loader.
        if batch is not None:
            all_losses_were_given = batch.num_losses_given == batch.num_micro_batches
            if not all_losses_were_given:
                return batch
            self._finish_global_batch(batch)

        self._global_batch = self._new_global_batch()
        return self._global_batch

    def _new_global_batch(self) -> GlobalBatch:
        """Returns a global batch of the present step, of which nothing was computed yet."""
        num_micro_batches = self.run.step.micro_batch.num_micro_batches
        actions = order(
            self._schedule,
            position=self.place.position,
            num_positions=self.place.num_positions,
            stages_per_rank=self.place.stages_per_rank,
            num_micro_batches=num_micro_batches,
        )
        return GlobalBatch(
            key=self.run.step.key,
            num_micro_batches=num_micro_batches,
            actions=deque(actions),
            # This decides which activations require gradients; see `_input_kind`.
            requires_grad=tuple(p.requires_grad for p in self._all_parameters),
            training=self.training,
            seed=self._next_seed(),
        )

    def backward(self, loss: Tensor, precision: Precision, **options: Any) -> None:
        """Takes the loss of the latest forward pass, and does all actions that are possible now.

        1. Keep the loss, whose backward pass runs when it is this micro-batch's turn.
        2. Start receiving the gradients of this micro-batch.
        3. Do the actions that are possible now.
        4. After the last micro-batch of a global batch: do all remaining actions. Then the
           gradients are complete, and are averaged if there are several pipelines.

        Args:
            loss: the weighted loss. It is only used on ranks with the last stage.
            precision: runs the backward pass of the loss.
            **options: arguments of `torch.autograd.backward`.
        """
        batch = self._global_batch
        assert batch is not None  # the caller has checked `waits_for_loss`

        run_backward = None  # on the ranks without the last stage, and so without the loss
        if self.has_last_stage:
            run_backward = partial(precision.backward, loss, **options)
        micro_batch = batch.give_loss(run_backward)

        # The next stage will send gradients of this micro-batch. Start receiving them now, even if
        # the backward pass that needs them comes after other actions.
        self._receive_gradients_early(batch, micro_batch)

        # From now on, a backward pass may complete the gradients of its stage. They are then sent
        # to the other pipelines to be averaged.
        is_last = self.run.step.micro_batch.last
        if is_last and self.across_pipelines is not None:
            batch.gradient_averaging = GradientAverage(self.across_pipelines)

        self._do_possible_actions(batch)

        if is_last:
            self._finish_global_batch(batch)
            if batch.gradient_averaging is not None:
                batch.gradient_averaging.finish()

    def _do_possible_actions(self, batch: GlobalBatch) -> None:
        """Does the next actions of this rank, up to one that needs a later call or loss."""
        while batch.actions and batch.is_ready(batch.actions[0]):
            self._do_next_action(batch)

    def check_backward_is_done(self) -> None:
        """Raises UsageError if an optimizer steps before `world.backward` was called."""
        batch = self._global_batch  # `world.backward` sets it to None when all is done
        if batch is None:
            return

        # A global batch of an earlier step was left early by the loop, and will be dropped.
        is_of_earlier_step = batch.key != self.run.step.key
        if is_of_earlier_step:
            return

        raise UsageError(
            "optimizer.step() before the backward pass of the pipeline",
            "loss.backward() reaches no further than the stage of this rank",
            "call world.backward(loss)",
        )

    def make_moving_buffers_equal(self) -> None:
        """Makes the buffers that forward passes change equal in all pipelines."""
        if self._moving_buffers is not None:
            self._moving_buffers.make_equal()

    def equal_tensors(self) -> list[EqualTensors]:
        """Returns the tensors that must be equal in the same stages of all pipelines."""
        if self.across_pipelines is None:
            return []
        return [EqualTensors.of(self.module, self.across_pipelines)]

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedModule:
        """Copies the weights of this rank, for example to average them. The copy can only evaluate.

        It shares the run, the process groups and the wires with this module.
        """
        # `deepcopy` does not copy an object whose `id` is in `memo`, but uses the one found there.
        shared = [
            self.run,
            self.place,
            self._self_and_copies,
            self._activation_wires,
            self._gradient_wires,
            self._output_wires,
            *self.run.groups.values(),
        ]
        for shared_object in shared:
            memo[id(shared_object)] = shared_object

        new_module = PipelinedModule.__new__(PipelinedModule)
        memo[id(self)] = new_module
        attributes = dict(vars(self))
        for not_copied in ("_global_batch", "_moving_buffers", "across_pipelines"):
            attributes[not_copied] = None

        vars(new_module).update(copy.deepcopy(attributes, memo))
        self._self_and_copies.add(new_module)
        return new_module

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raises UsageError, because this rank has only a part of the model, bound to this run."""
        raise UsageError(
            "torch.save, pickle or copy.copy of a model under strategy='pipeline'",
            f"this rank has {count_noun(len(self.place.stages), 'stage')} of "
            f"{self.place.last_stage + 1}, bound to this run",
            "save the weights instead, on all ranks together: lockstep.save_weights(model, path); "
            "or all that is needed to resume: world.checkpoint(path, model=model, ...)",
        )

    def release(self) -> None:
        """Drops all references to process groups, which would keep their threads alive.

        The user may have copied this module (`__deepcopy__`). A copy shares the wires, but its
        BatchNorm layers are copies, from which the groups must be removed too.
        """
        self._global_batch = None
        self.across_pipelines = None
        self._moving_buffers = None  # this object also refers to the replica group

        for pipelined in self._self_and_copies:
            for part in pipelined.modules():
                if isinstance(part, SyncBatchNorm | nn.SyncBatchNorm):
                    part.process_group = None

        self._activation_wires.clear()
        self._gradient_wires.clear()
        self._output_wires.clear()

    def _do_next_action(self, batch: GlobalBatch) -> Any:
        """Does the next action of this rank, and removes it from `batch.actions`.

        The tensors that a forward pass received and sent are stored in `batch.boundary_tensors` for
        the backward pass.

        Returns:
            What the model's forward returned; None for a backward pass.
        """
        action = batch.actions.popleft()
        if not action.forward:
            self._run_backward_pass(batch, action)
            return None

        another_micro_batch_follows = action.micro_batch + 1 < batch.num_micro_batches
        call = batch.calls[action.micro_batch]
        result = self._run_forward_pass(
            action.stage,
            call.arguments,
            call.kind,
            seed=mix_seed(batch.seed, action.micro_batch),
            may_receive_next_early=another_micro_batch_follows,
        )
        # In the backward pass, the next stage sends gradients of these tensors only.
        sent_with_gradient = [tensor for tensor in result.sent if tensor.requires_grad]
        batch.boundary_tensors[action.stage, action.micro_batch] = BoundaryTensors(
            result.received, sent_with_gradient
        )

        return result.output

    def _input_kind(
        self, arguments: Arguments, requires_grad: tuple[bool, ...] = ()
    ) -> InputKind | None:
        """Returns the kind of a call; None if unknown.

        Calls of the same kind give activations of the same shapes, so the ranks exchange the shapes
        only once for each kind.

        Args:
            arguments: the arguments of the call.
            requires_grad: `requires_grad` of each of the model's parameters.
        """
        arguments_key = signature(arguments)
        if not arguments_key:  # there are no arguments, or arguments of unknown types
            return None

        device_type = self.run.device.type
        autocast_dtype = None
        if torch.is_autocast_enabled(device_type):
            autocast_dtype = torch.get_autocast_dtype(device_type)

        depends_on_values = any(_is_integer_tensor(leaf) for leaf in pytree.tree_leaves(arguments))
        modes = (self.training, torch.is_grad_enabled(), autocast_dtype)
        key = (arguments_key, modes, requires_grad)
        return InputKind(key, depends_on_values)

    def _next_seed(self) -> int:
        """Returns a new random seed, which is the same on all ranks of the pipeline.

        It depends on the number of the optimizer step, and on how many seeds were made in this
        step.
        """
        step_number = self.run.step.number
        if step_number != self._seed_step:
            self._seed_step = step_number
            self._num_seeds_in_step = 0
        self._num_seeds_in_step += 1
        return mix_seed(
            self.run.settings.seed, self.place.pipeline, step_number, self._num_seeds_in_step
        )

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """Records an exception inside this context, so that later calls are rejected.

        Only its type is recorded, not its message. A loop that looks for "out of memory" in
        messages must not find it again in the error of the next call.
        """
        try:
            yield
        except Exception as error:
            self._failure = type(error).__name__
            raise

    def _run_forward_pass(
        self,
        stage: int,
        arguments: Arguments,
        input_kind: InputKind | None,
        *,
        seed: int,
        may_receive_next_early: bool,
    ) -> ForwardResult:
        """Receives the inputs of a stage, runs the stage, and starts sending its outputs.

        Args:
            stage: the number of the stage.
            arguments: the arguments of the model's forward.
            input_kind: the kind of these arguments. The wires know the shapes of the activations
                from the first message of the same kind.
            seed: the seed of the random numbers that the stage draws.
            may_receive_next_early: True if another micro-batch is certain to follow. Then the wires
                may start receiving its tensors early.

        Returns:
            The result. Its lists `received` and `sent` are empty for the first stage, which
            receives nothing, and the last one, which sends nothing.
        """
        received = None
        with self._noting_failures():
            if stage > 0:
                source = self.place.rank_of_stage(stage - 1)
                wire = self._activation_wires[stage - 1]
                received = wire.receive(
                    source, input_kind, may_receive_next_early=may_receive_next_early
                )

            to_send, output = self._model.run(stage, received, arguments, seed)
            if to_send is not None:
                destination = self.place.rank_of_stage(stage + 1)
                wire = self._activation_wires[stage]
                wire.send(
                    to_send, destination, input_kind, may_receive_next_early=may_receive_next_early
                )

        return ForwardResult(
            received=[] if received is None else received,
            sent=[] if to_send is None else to_send,
            output=output,
        )

    def _run_backward_pass(self, batch: GlobalBatch, action: Action, *, drop: bool = False) -> None:
        """Receives the gradients for a stage, runs its backward pass, and starts sending gradients.

        The last stage starts from the loss instead of received gradients, and the first one sends
        none.

        Args:
            batch: the global batch.
            action: the backward pass to run.
            drop: True to exchange the messages without computing anything, if the loop has left
                the global batch early and its gradients are not needed.
        """
        stage = action.stage
        micro_batch = action.micro_batch
        forward_inputs, forward_outputs = batch.boundary_tensors.pop((stage, micro_batch))
        with (
            self._noting_failures(),
            self._model.backward_pass(),
            self._averaging_gradients(batch, action),
        ):
            # Receives the gradients of the outputs, and computes those of the inputs.
            self._compute_gradients(batch, action, forward_outputs, drop=drop)

            # The previous stage has sent these tensors, so it knows the shapes and dtypes of their
            # gradients. For each tensor a mark says whether it has a gradient.
            if stage > 0:
                message = gradient_message([t for t in forward_inputs if t.requires_grad])
                destination = self.place.rank_of_stage(stage - 1)
                self._gradient_wires[stage - 1].send_with_known_specs(
                    message.tensors, destination, message.marks
                )

    def _compute_gradients(
        self, batch: GlobalBatch, action: Action, forward_outputs: list[Tensor], *, drop: bool
    ) -> None:
        """Runs the backward pass of a stage.

        The last stage begins with the loss, any other stage with the gradients of what it sent.

        Args:
            batch: the global batch.
            action: the backward pass of the stage.
            forward_outputs: the tensors that the stage sent and that need a gradient. If there are
                none, there is nothing to do.
            drop: True if the loop has left the global batch early. Then the gradients are received,
                as another rank sends them, but nothing is computed.
        """
        is_last_stage = action.stage == self.place.last_stage
        if is_last_stage:
            # The backward pass of the loss that `world.backward` was called with.
            run_backward = batch.take_backward(action.micro_batch)
            if run_backward is not None and not drop:
                run_backward()
            return

        if forward_outputs:
            outputs, gradients = self._receive_gradients(batch, action, forward_outputs)
            if outputs and not drop:
                torch.autograd.backward(outputs, gradients)

    @contextmanager
    def _averaging_gradients(self, batch: GlobalBatch, action: Action) -> Iterator[None]:
        """Averages a stage's gradients over the pipelines, if this pass completes them.

        Args:
            batch: the global batch. Its `actions` are those that remain after `action`.
            action: the backward pass that runs inside this context.
        """
        # With one pipeline this is None. With several it is None until `world.backward` was called
        # for the last micro-batch, because only then it is known what still follows.
        gradient_averaging = batch.gradient_averaging
        if gradient_averaging is None or self._another_backward_follows(batch, action.stage):
            yield
            return

        parameters = self._model.parameters_of_stage[action.stage]
        with gradient_averaging.during_backward(parameters):
            yield

    def _another_backward_follows(self, batch: GlobalBatch, stage: int) -> bool:
        """Returns True if a remaining backward pass of a stage will add to its gradients.

        It is called after the loop has given its last loss of the global batch. So a remaining
        backward pass whose loss was not given belongs to a micro-batch that the loop has left out,
        and adds nothing.

        Args:
            batch: the global batch, with the remaining actions.
            stage: the number of the stage.
        """
        for action in batch.actions:
            is_backward_of_stage = not action.forward and action.stage == stage
            loss_was_given = action.micro_batch < batch.num_losses_given
            if is_backward_of_stage and loss_was_given:
                return True
        return False

    def _receive_gradients(
        self, batch: GlobalBatch, action: Action, sent: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Receives the gradients of the tensors that a stage has sent to the next stage.

        If the receives were started before (posted), this only waits for them.

        Args:
            batch: the global batch.
            action: the backward pass of the stage.
            sent: the tensors that were sent.

        Returns:
            The tensors that have a gradient, and their gradients.
        """
        posted = batch.posted_gradients.pop(action.micro_batch, None)
        if posted is None:  # they were not posted early
            posted = self._post_gradients(action.stage, sent)

        # The message has one tensor and one mark for each tensor that was sent. The mark says
        # whether the tensor has a gradient; if not, zeros were sent.
        message = self._gradient_wires[action.stage].take(posted)
        with_gradient: list[Tensor] = []
        gradients: list[Tensor] = []
        for tensor, has_gradient, gradient in zip(
            sent, message.marks, message.tensors, strict=True
        ):
            if has_gradient:
                with_gradient.append(tensor)
                gradients.append(gradient)

        return with_gradient, gradients

    def _receive_gradients_early(self, batch: GlobalBatch, micro_batch: int) -> None:
        """Starts receiving gradients from the next stage, before the backward pass needs them.

        The receives are kept in `batch.posted_gradients`.

        Args:
            batch: the global batch.
            micro_batch: the micro-batch whose loss has just been given.
        """
        if self.has_last_stage:  # no later stage sends gradients to this one
            return

        # With several stages on this rank, the gradients of one micro-batch arrive at several
        # times, between those of other micro-batches. They are received when they are needed.
        if len(self.place.stages) > 1:
            return

        stage = self.place.stages[0]
        if self._gradient_wires[stage].can_receive_early:
            # One gradient will arrive for each tensor that was sent to the next stage, in the same
            # shape.
            sent = batch.boundary_tensors[stage, micro_batch].sent
            batch.posted_gradients[micro_batch] = self._post_gradients(stage, sent)

    def _post_gradients(self, stage: int, sent: list[Tensor]) -> PostedMessage:
        """Starts receiving the gradients of tensors that were sent to the next stage.

        Returns:
            The message with the started receives, which must be waited for later.
        """
        source = self.place.rank_of_stage(stage + 1)
        return self._gradient_wires[stage].post_receives(source, gradient_message_spec(sent))

    def _finish_global_batch(self, batch: GlobalBatch, *, drop: bool = False) -> None:
        """Ends a global batch: runs remaining backward passes, and waits until all is sent.

        Backward passes remain if the loop has left out the last micro-batches. For example, the
        order of a rank is F0 F1 B0 F2 B1 B2 (F forward, B backward), and the loop has left out
        micro-batch 2. So F2 was never done, and B1 still waits behind it. This method skips F2 and
        B2, and does B1. The loops of all ranks leave out the same micro-batches.

        Args:
            batch: the global batch.
            drop: True if its gradients are not needed. Then messages are exchanged, but nothing is
                computed.
        """
        while batch.actions:
            action = batch.actions.popleft()
            if action.forward:  # the loop has left out its micro-batch
                continue

            loss_was_given = action.micro_batch < batch.num_losses_given
            if loss_was_given:
                self._run_backward_pass(batch, action, drop=drop)

        # The output wires are only used in evaluation, which waits for them itself.
        for wire in (*self._activation_wires, *self._gradient_wires):
            wire.wait()

        self._global_batch = None

    def clear_gradients(self) -> None:
        """Drops the gradients when the loop was left in the middle of a global batch.

        The remaining messages are exchanged at the next call of the model, not now. The loop may
        have been left by an exception on this rank, of which the other ranks know nothing.
        """
        for parameter in self.local_parameters():
            parameter.grad = None

    def _drop_unfinished(self) -> None:
        """Drops a global batch that the loop has left early, and its gradients.

        First exchanges its remaining messages, because other ranks wait for them.
        """
        batch = self._global_batch
        if batch is not None and batch.key != self.run.step.key:
            self._finish_global_batch(batch, drop=True)
            self.clear_gradients()

    def _evaluate(self, arguments: Arguments) -> Any:
        """Runs a forward pass without gradients, and returns the model's output on every rank."""
        self._drop_unfinished()  # a global batch of an earlier step, which the loop has left
        output = self._evaluate_stages(arguments)  # with shapes if this rank lacks the last stage

        # The rank with the model's last stage passes the values to all others.
        leaves = pytree.tree_leaves(output)
        tensors_here = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        output_tensors = self._pass_output_back(tensors_here)
        self._wait_for_sends_of_evaluation()

        if self.has_last_stage:
            return output
        return _with_tensors(output, output_tensors)

    def _evaluate_stages(self, arguments: Arguments) -> Any:
        """Runs a forward pass without gradients through the stages of this rank.

        Returns:
            The model's output. It has values on the rank with the model's last stage, and only
            shapes on all others.
        """
        input_kind = self._input_kind(arguments)
        seed = self._next_seed()
        outputs = []
        for stage in self.place.stages:
            result = self._run_forward_pass(
                stage,
                arguments,
                input_kind,
                seed=seed,
                may_receive_next_early=False,  # it is not known whether the script evaluates more
            )
            outputs.append(result.output)
        return outputs[-1]  # that of the last stage here

    def _wait_for_sends_of_evaluation(self) -> None:
        """Waits until everything has been sent, except gradients.

        A script may evaluate between two micro-batches of a global batch. Then another rank may
        receive gradients of the first micro-batch only after its evaluation.
        """
        for wire in self._activation_wires + self._output_wires:
            wire.wait()

    def _pass_output_back(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sends the model's output from the last stage to every rank of the pipeline.

        The last stage is at the last position. Every other rank receives the output from the rank
        at the next position, and sends it on to the rank at the previous position.

        Args:
            tensors: the tensors of the output, on the rank with the last stage. The tensors that
                other ranks pass are not used.

        Returns:
            The tensors of the output, with their values.
        """
        # Output wire 0 connects the positions 0 and 1, output wire 1 the positions 1 and 2.
        position = self.place.position
        if not self.has_last_stage:
            next_rank = self.place.rank_at(position + 1)
            tensors = self._output_wires[position].receive(next_rank)

        if position > 0:
            previous_rank = self.place.rank_at(position - 1)
            self._output_wires[position - 1].send(tensors, previous_rank)

        return tensors

    def _make_nan(self, tensor: Tensor) -> Tensor:
        """Returns NaN in the shape of an output tensor whose values are on another rank.

        It takes no memory, and nobody can mistake it for a result. For integers the value is 0.
        """
        if not tensor.is_meta:  # a real tensor, computed only from the model's inputs
            return tensor
        can_be_nan = tensor.is_floating_point() or tensor.is_complex()
        number = torch.nan if can_be_nan else 0
        value = torch.full((), number, dtype=tensor.dtype, device=self.run.device)

        # The loop computes a loss from it and may call `loss.backward()`, so it requires a
        # gradient. `expand` repeats the one number without copying it.
        return value.requires_grad_(can_be_nan).expand(tensor.shape)


def _with_tensors(output: Any, tensors: list[Tensor]) -> Any:
    """Replaces the tensors of a nest: `({"loss": a, "n": 3}, [b]) -> {"loss": b, "n": 3}`."""
    remaining = iter(tensors)
    return pytree.tree_map_only(Tensor, lambda _: next(remaining), output)


def _is_integer_tensor(leaf: Any) -> bool:
    """Returns True for a tensor of integers or booleans."""
    return isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex())
