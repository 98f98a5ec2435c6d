"""A pipeline that is driven by the user's own training loop.

Each turn of the loop brings one micro-batch: the loop calls the model, and then `world.backward`
with the loss. A rank has a list of *actions* (`schedule.order`): forward and backward passes
through its *stages*. It does all of them that are possible with the inputs and losses that it has.
Ranks with the last stage return the model's output from the call. Others return NaN of the same
shapes, whose loss is not used; in evaluation every rank gets the output.
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
from lockstep.distributed.torch_compat import never_compiled, pytree
from lockstep.errors import NotOnStageError, UsageError
from lockstep.optim.precision import Precision
from lockstep.strategies.base import EqualTensors, ModuleWrapper
from lockstep.strategies.gradient_average import GradientAverage
from lockstep.strategies.moving_buffers import MovingBuffers
from lockstep.strategies.pipeline.global_batch import BoundaryTensors, GlobalBatch, ModelCall
from lockstep.strategies.pipeline.gradient_message import gradient_message, gradient_message_spec
from lockstep.strategies.pipeline.input_kind import Arguments, InputKind, signature
from lockstep.strategies.pipeline.place import PipelinePlace
from lockstep.strategies.pipeline.schedule import Action, order
from lockstep.strategies.pipeline.shapes import map_tensors
from lockstep.strategies.pipeline.stage import SAVE_WHOLE_MODEL_ADVICE, StagedModel
from lockstep.strategies.pipeline.wire import PostedMessage, Wire
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.wording import count_noun, describe_type, with_article


class ForwardResult(NamedTuple):
    """What a forward pass through one stage received, sent, and returned."""

    received: list[Tensor]
    sent: list[Tensor]
    output: Any
    """What the model's forward returned; the model's output in the last stage."""


class Wires(NamedTuple):
    """What carries the messages of one model: for each cut a wire of each kind.

    The wires between the stages n and n + 1 have the index n.
    """

    activations: list[Wire]
    gradients: list[Wire]
    outputs: list[Wire]
    """They carry the model's output back in evaluation."""


class PipelinedModule(ModuleWrapper):
    """What the user calls instead of the model.

    Args:
        model: the user's model, which is cut already.
        place: of this rank.
        schedule: `gpipe` or `1f1b`.
        run: the run.
        wires: for the messages of this model alone.
    """

    wraps_module: ClassVar[bool] = True
    """Checkpoints hold the names of the user's module, without a prefix."""

    def __init__(
        self, model: StagedModel, place: PipelinePlace, schedule: str, run: Run, wires: Wires
    ) -> None:
        super().__init__()
        self.module = model.module
        self.place = place
        self.run = run
        self.replica_group = run.groups.get("replicas")
        """The ranks with the same stages, if there are several pipelines."""
        self._moving_buffers = None
        if self.replica_group is not None:
            self._moving_buffers = MovingBuffers(self.module, run.step, self.replica_group)

        self._model = model
        self._schedule = schedule
        self._activation_wires = wires.activations
        self._gradient_wires = wires.gradients
        self._output_wires = wires.outputs
        self._copies: WeakSet[PipelinedModule] = WeakSet([self])
        """This module, and copies of it that the user has made."""
        self._all_parameters = list(self.module.parameters())
        self._global_batch: GlobalBatch | None = None
        """The global batch under way."""
        self._failure = ""
        """The type of an exception in the model on this rank, after which others went on."""
        self._seed_step = 0
        """The number of the optimizer step of the latest seed."""
        self._num_seeds_in_step = 0
        self._is_initialized = True

    @property
    def device(self) -> torch.device:
        """The device of this rank's stages, on which inputs are expected."""
        return self.run.device

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the user's module, such as a setting.

        Raises:
            NotOnStageError: it is code or a tensor: it needs the whole model, or may be on another
                rank.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet, so `self.module` below would call this again
                raise
            value = getattr(self.module, name)

        if not (callable(value) or isinstance(value, Tensor)):
            return value

        kind = "a method" if inspect.isroutine(value) else describe_type(value)
        raise NotOnStageError(
            f"{name} of {describe_type(self.module)} under strategy='pipeline'",
            f"it is {kind} of the whole model, and this rank has "
            f"{count_noun(len(self.place.stages), 'stage')} of {self.place.last_stage + 1}",
            f"{SAVE_WHOLE_MODEL_ADVICE}; parts that are on this rank are in .module",
        )

    @property
    def waits_for_loss(self) -> bool:
        """True if a forward pass was not followed by `world.backward` yet."""
        batch = self._global_batch
        if batch is None:
            return False
        if batch.key != self.run.step.key:  # the loop was left in the middle of that global batch
            return False
        return len(batch.loss_backwards) < len(batch.calls)

    @property
    def has_last_stage(self) -> bool:
        """True if this rank has the model's output."""
        return self.place.last_stage in self.place.stages

    def local_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters on this rank."""
        return [parameter for parameter in self._all_parameters if not parameter.is_meta]

    # What is outside of this rank's stages is computed as shapes, which the compiler cannot trace.
    @partial(never_compiled, recursive=True)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output; in training, NaN of the same shapes without the last stage.

        Raises:
            UsageError: the model cannot be cut where it is, or it is called at the wrong time.
        """
        self._check_can_run()
        if not torch.is_grad_enabled():
            return self._evaluate((args, kwargs))

        batch = self._current_global_batch()
        self._check_call(batch)
        kind = self._input_kind((args, kwargs), batch.requires_grad)
        batch.calls.append(ModelCall((args, kwargs), kind))

        # The call returns after the forward pass of this micro-batch through this rank's highest
        # stage. The schedule may have other actions before it, which are done too. `actions` holds
        # those that are not done yet.
        highest_stage = self.place.stages[-1]
        forward_pass = Action(forward=True, stage=highest_stage, micro_batch=len(batch.calls) - 1)

        output = None
        while forward_pass in batch.actions:
            output = self._do_next_action(batch)

        # Now it is the output of that forward pass: shapes, if another rank has the last stage.
        if self.has_last_stage:
            return output

        return map_tensors(self._make_nan, output)

    def _check_can_run(self) -> None:
        """Raises UsageError if the run has ended, or a call has failed on this rank before."""
        if not self._activation_wires:  # `release` has removed them
            raise UsageError(
                "a forward pass after world.close()",
                "the model is spread over the ranks, which no longer exchange messages",
                "close at the very end",
            )

        if self._failure:
            raise UsageError(
                "a call of the model after an exception in it that was caught",
                f"{with_article(self._failure)} on this rank: the others wait for what it did not "
                "send",
                "let the exception end the run; check on all ranks, before the call, whatever may "
                "make it fail",
            )

    def _check_call(self, batch: GlobalBatch) -> None:
        """Raises UsageError for a call that does not fit the calls before it."""
        every_call_has_its_loss = len(batch.calls) == len(batch.loss_backwards)
        if not every_call_has_its_loss:
            raise UsageError(
                "two forward passes with gradients for one world.backward",
                "a pipeline computes one forward pass for each micro-batch",
                "join the inputs and call the model once; evaluate under torch.no_grad(); call "
                "world.backward even if the loss is NaN, as it always is without the last stage",
            )

        if batch.training is self.training:
            return

        # The user has switched modes. That matters only to layers with running statistics.
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
        """Returns the global batch that the training loop works on, which may begin now.

        One that the loop has left is dropped, and one that has all its losses is finished.
        """
        self._drop_unfinished()
        batch = self._global_batch
        if batch is not None and len(batch.loss_backwards) == batch.num_micro_batches:
            # A loop that calls the model several times per turn has begun another one.
            self._finish_global_batch(batch)

        if self._global_batch is None:
            num_micro_batches = self.run.step.micro_batch.num_micro_batches
            actions = order(
                self._schedule,
                self.place.position,
                self.place.num_positions,
                self.place.stages_per_rank,
                num_micro_batches,
            )
            self._global_batch = GlobalBatch(
                key=self.run.step.key,
                num_micro_batches=num_micro_batches,
                actions=deque(actions),
                requires_grad=tuple(p.requires_grad for p in self._all_parameters),
                training=self.training,
                seed=self._next_seed(),
            )

        return self._global_batch

    def backward(self, loss: Tensor, precision: Precision, **options: Any) -> None:
        """Takes the loss of the last forward pass, and does all actions that are possible now.

        After the last micro-batch of a global batch all its gradients are there, and the mean of
        those of several pipelines.

        Args:
            loss: weighted. On ranks without the last stage it is not used.
            precision: runs the backward pass of the loss.
            **options: of `torch.autograd.backward`.
        """
        batch = self._global_batch
        assert batch is not None  # the caller has checked `waits_for_loss`
        run_backward = None
        if self.has_last_stage:
            # Called later, when the schedule has the backward pass of this micro-batch.
            run_backward = partial(precision.backward, loss, **options)

        micro_batch = len(batch.loss_backwards)
        batch.loss_backwards.append(run_backward)
        self._post_gradients_early(batch, micro_batch)
        is_last = self.run.step.micro_batch.last
        if is_last and self.replica_group is not None:
            batch.average = GradientAverage(self.replica_group)

        while batch.actions and batch.is_ready(batch.actions[0]):
            self._do_next_action(batch)

        if is_last:
            self._finish_global_batch(batch)
            if batch.average is not None:
                batch.average.finish()

    def check_backward_is_done(self) -> None:
        """Raises UsageError if an optimizer is to step before `world.backward` was called."""
        batch = self._global_batch  # `world.backward` sets it to None when all is done
        if batch is not None and batch.key == self.run.step.key:
            raise UsageError(
                "optimizer.step() before the backward pass of the pipeline",
                "loss.backward() reaches no further than the stage of this rank",
                "call world.backward(loss)",
            )

    def follow_moving_buffers(self) -> None:
        """Makes buffers that forward passes change equal in all pipelines."""
        if self._moving_buffers is not None:
            self._moving_buffers.follow()

    def equal_tensors(self) -> list[EqualTensors]:
        """Returns the tensors that equal stages of several pipelines have in common."""
        if self.replica_group is None:
            return []
        return [EqualTensors.of(self.module, self.replica_group)]

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedModule:
        """Returns a copy of this rank's weights (averages of them, for example) that can evaluate.

        It shares the run, the process groups and the wires.
        """
        # `deepcopy` takes an object that is in `memo` (by its `id`) instead of copying it.
        shared = [
            self.run,
            self.place,
            self._copies,
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
        for not_copied in ("_global_batch", "_moving_buffers", "replica_group"):
            attributes[not_copied] = None

        vars(new_module).update(copy.deepcopy(attributes, memo))
        self._copies.add(new_module)
        return new_module

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raises UsageError: this rank has a part of the model, bound to this run."""
        raise UsageError(
            "torch.save, pickle or copy.copy of a model under strategy='pipeline'",
            f"this rank has {count_noun(len(self.place.stages), 'stage')} of "
            f"{self.place.last_stage + 1}, bound to this run",
            "save the weights instead, on all ranks together: lockstep.save_weights(model, path); "
            "or all that is needed to resume: world.checkpoint(path, model=model, ...)",
        )

    def release(self) -> None:
        """Drops references to the process groups, also those of the copies."""
        self._global_batch = None
        self.replica_group = None
        self._moving_buffers = None
        for pipelined in self._copies:
            for part in pipelined.modules():
                if isinstance(part, SyncBatchNorm | nn.SyncBatchNorm):
                    part.process_group = None

        self._activation_wires.clear()
        self._gradient_wires.clear()
        self._output_wires.clear()

    def _do_next_action(self, batch: GlobalBatch) -> Any:
        """Does the next action of this rank, and removes it from `batch.actions`.

        The tensors that a forward pass received and sent are kept in `batch.boundary_tensors`, for
        the backward pass.

        Returns:
            What the model's forward returned; None for a backward pass.
        """
        action = batch.actions.popleft()
        if not action.forward:
            self._run_backward_pass(batch, action)
            return None

        call = batch.calls[action.micro_batch]
        result = self._run_forward_pass(
            action.stage,
            call.arguments,
            call.kind,
            seed=mix_seed(batch.seed, action.micro_batch),
            more=action.micro_batch + 1 < batch.num_micro_batches,
        )
        sent_with_gradient = [tensor for tensor in result.sent if tensor.requires_grad]
        batch.boundary_tensors[action.stage, action.micro_batch] = BoundaryTensors(
            result.received, sent_with_gradient
        )

        return result.output

    def _input_kind(
        self, arguments: Arguments, requires_grad: tuple[bool, ...] = ()
    ) -> InputKind | None:
        """Returns the kind of a call, which decides the shapes of activations; None: unknown.

        Args:
            arguments: of the call.
            requires_grad: of each of the model's parameters.
        """
        arguments_key = signature(arguments)
        if not arguments_key:  # no key can be made, or there are no arguments to make one of
            return None

        device_type = self.run.device.type
        autocast_dtype = None
        if torch.is_autocast_enabled(device_type):
            autocast_dtype = torch.get_autocast_dtype(device_type)

        # A forward pass may branch on whole numbers or booleans, such as a mask of padding.
        depends_on_values = False
        for leaf in pytree.tree_leaves(arguments):
            if isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex()):
                depends_on_values = True

        modes = (self.training, torch.is_grad_enabled(), autocast_dtype)
        return InputKind((arguments_key, modes, requires_grad), depends_on_values)

    def _next_seed(self) -> int:
        """Returns a new seed of random numbers, equal on all ranks of the pipeline.

        It is made of the number of the optimizer step, and of how many seeds there were in it.
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
        """Notes an exception inside, so that this rank does not go on as if nothing had happened.

        Only its type is noted. A loop that looks for "out of memory" in messages must not take the
        error of the next call for another one of these.
        """
        try:
            yield
        except Exception as error:
            self._failure = type(error).__name__
            raise

    def _run_forward_pass(
        self, stage: int, arguments: Arguments, kind: InputKind | None, *, seed: int, more: bool
    ) -> ForwardResult:
        """Receives the inputs of a stage, runs it, and starts to send its outputs.

        Args:
            stage: its number.
            arguments: of the model's forward.
            kind: of these arguments.
            seed: of the random numbers.
            more: True if it is certain that another micro-batch follows.
        """
        received = None
        with self._noting_failures():
            if stage > 0:
                source = self.place.rank_of_stage(stage - 1)
                received = self._activation_wires[stage - 1].receive(source, kind, more=more)
            sent, output = self._model.run(stage, received, arguments, seed)
            if sent is not None:
                destination = self.place.rank_of_stage(stage + 1)
                self._activation_wires[stage].send(sent, destination, kind, more=more)

        return ForwardResult(received or [], sent or [], output)

    def _run_backward_pass(self, batch: GlobalBatch, action: Action, *, drop: bool = False) -> None:
        """Receives the gradients of a stage, runs its backward pass, and starts to send gradients.

        The last stage begins at the loss instead of received gradients; the first stage sends none.

        Args:
            batch: the global batch.
            action: the backward pass.
            drop: True if messages are to be exchanged, but nothing is to be computed.
        """
        stage = action.stage
        micro_batch = action.micro_batch
        tensors = batch.boundary_tensors.pop((stage, micro_batch))
        with (
            self._noting_failures(),
            self._model.backward_pass(),
            self._averaging_gradients(batch, action),
        ):
            if stage == self.place.last_stage:
                run_backward = batch.loss_backwards[micro_batch]
                batch.loss_backwards[micro_batch] = None  # it holds the whole graph of the loss
                if run_backward is not None and not drop:
                    run_backward()
            elif tensors.sent:
                outputs, gradients = self._receive_gradients(batch, action, tensors.sent)
                if outputs and not drop:
                    torch.autograd.backward(outputs, gradients)

            if stage > 0:
                message = gradient_message([t for t in tensors.received if t.requires_grad])
                destination = self.place.rank_of_stage(stage - 1)
                self._gradient_wires[stage - 1].send_known(
                    message.tensors, destination, message.marks
                )

    @contextmanager
    def _averaging_gradients(self, batch: GlobalBatch, action: Action) -> Iterator[None]:
        """Averages the gradients of a stage over the pipelines, if they are complete after this.

        Args:
            batch: the global batch.
            action: the backward pass that runs inside; the last one of its stage or not.
        """
        if batch.average is None:
            yield
            return

        for later in batch.actions:
            is_of_stage = not later.forward and later.stage == action.stage
            if is_of_stage and batch.is_ready(later):  # not the last one
                yield
                return

        parameters = self._model.parameters_of_stage[action.stage]
        with batch.average.during_backward(parameters):
            yield

    def _receive_gradients(
        self, batch: GlobalBatch, action: Action, sent: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Receives the gradients of what a stage has sent to the next stage.

        Args:
            batch: the global batch.
            action: the backward pass of the stage.
            sent: the tensors that were sent.

        Returns:
            Those of the tensors that have a gradient, and their gradients.
        """
        posted = batch.posted_gradients.pop(action.micro_batch, None)
        if posted is None:  # `_post_gradients_early` has not started to receive them
            posted = self._post_gradients(action.stage, sent)

        message = self._gradient_wires[action.stage].take(posted)
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for tensor, has_gradient, gradient in zip(
            sent, message.marks, message.tensors, strict=True
        ):
            if has_gradient:
                outputs.append(tensor)
                gradients.append(gradient)

        return outputs, gradients

    def _post_gradients_early(self, batch: GlobalBatch, micro_batch: int) -> None:
        """Starts to receive the gradients of a micro-batch: now it is certain that they come.

        The receives are kept in `batch.posted_gradients`. Nothing happens where receives that are
        started early would not help, or would come in another order than the gradients.
        """
        if self.has_last_stage:  # no later stage sends gradients to this one
            return
        if len(self.place.stages) > 1:  # then gradients do not come in the order of micro-batches
            return
        stage = self.place.stages[0]
        if self._gradient_wires[stage].posts_early:
            sent = batch.boundary_tensors[stage, micro_batch].sent
            batch.posted_gradients[micro_batch] = self._post_gradients(stage, sent)

    def _post_gradients(self, stage: int, sent: list[Tensor]) -> PostedMessage:
        """Starts to receive the gradients of tensors that were sent to the next stage.

        Returns:
            The message whose receives were started, which are waited for later.
        """
        source = self.place.rank_of_stage(stage + 1)
        return self._gradient_wires[stage].post_receives(source, gradient_message_spec(sent))

    def _finish_global_batch(self, batch: GlobalBatch, *, drop: bool = False) -> None:
        """Ends a global batch: runs the backward passes that are left, and waits for all messages.

        Some are left if the loop has not brought all micro-batches: in the schedule they come after
        a forward pass that is never called. The loops of all ranks leave out the same ones.

        Args:
            batch: the global batch.
            drop: True if its gradients are not wanted: messages are exchanged, but nothing is
                computed.
        """
        while batch.actions:
            action = batch.actions.popleft()
            is_backward = not action.forward
            if is_backward and batch.is_ready(action):
                self._run_backward_pass(batch, action, drop=drop)
        for wire in (*self._activation_wires, *self._gradient_wires):
            wire.wait()
        self._global_batch = None

    def clear_gradients(self) -> None:
        """Drops the gradients after the loop was left in the middle of a global batch.

        The messages that are left are exchanged at the next call of the model, not now: the reason
        may be an exception on this rank, of which the other ranks know nothing.
        """
        for parameter in self.local_parameters():
            parameter.grad = None

    def _drop_unfinished(self) -> None:
        """Drops a global batch that the loop has left in its middle, and its gradients.

        Before that its messages are exchanged, for which other ranks wait.
        """
        batch = self._global_batch
        if batch is not None and batch.key != self.run.step.key:
            self._finish_global_batch(batch, drop=True)
            self.clear_gradients()

    def _evaluate(self, arguments: Arguments) -> Any:
        """Returns the model's output on every rank, from a forward pass without gradients."""
        self._drop_unfinished()
        kind = self._input_kind(arguments)
        seed = self._next_seed()

        output = None
        for stage in self.place.stages:
            result = self._run_forward_pass(stage, arguments, kind, seed=seed, more=False)
            output = result.output

        leaves = pytree.tree_leaves(output)
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        tensors = self._pass_output_back(tensors)

        # The wires of gradients are not waited for. They may carry those of a global batch that is
        # under way, which another rank receives in the next turn of its loop.
        for wire in self._activation_wires + self._output_wires:
            wire.wait()

        if self.has_last_stage:
            return output

        # Here the output has shapes only; each is replaced by the next received tensor.
        remaining = iter(tensors)
        return pytree.tree_map_only(Tensor, lambda _: next(remaining), output)

    def _pass_output_back(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the tensors of the model's output, on every rank of the pipeline.

        The rank with the last stage has them. Every other rank receives them from the rank at the
        position after its own, and each sends them on to the rank at the position before.

        Args:
            tensors: of the output on this rank: shapes, if it does not have the last stage.
        """
        # The lowest stage of a rank has the number of the rank's position, and the output wire
        # between two positions has the index of the lower one.
        position = self.place.position
        if not self.has_last_stage:
            source = self.place.rank_of_stage(position + 1)
            tensors = self._output_wires[position].receive(source)

        if position > 0:
            destination = self.place.rank_of_stage(position - 1)
            self._output_wires[position - 1].send(tensors, destination)

        return tensors

    def _make_nan(self, tensor: Tensor) -> Tensor:
        """Returns what a rank without the output returns for one of its tensors: NaN of its shape.

        It takes no memory, and nobody can mistake it for a result. Whole numbers are 0.
        """
        if not tensor.is_meta:  # a real tensor, made of the model's inputs alone
            return tensor
        can_be_nan = tensor.is_floating_point() or tensor.is_complex()
        number = torch.nan if can_be_nan else 0
        value = torch.full((), number, dtype=tensor.dtype, device=self.run.device)
        # `expand` repeats the one number without copying it.
        return value.requires_grad_(can_be_nan).expand(tensor.shape)
