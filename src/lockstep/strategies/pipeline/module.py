"""A pipeline driven by the user's own training loop.

Each turn of the loop brings one micro-batch: the model is called with it, and `world.backward` is
called with its loss. Between two turns a rank knows which inputs and which losses it has, and takes
from its list of actions (`schedule.order`) all that can be done with these. The ranks of the last
stage return the model's real output from the call. The others return NaN of the same shapes, whose
loss is not used; in evaluation every rank gets the real output.

A global batch under way on a rank of a pipeline: what its training loop has brought so far.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NoReturn, SupportsIndex
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.distributed.process_group import Run
from lockstep.distributed.seeding import mix_seed
from lockstep.distributed.torch_compat import never_compiled, pytree
from lockstep.errors import NotOnStageError, RanksDifferError, UsageError
from lockstep.optim.precision import Precision
from lockstep.session.extension import Extension
from lockstep.session.step import StepKey, check_due
from lockstep.strategies.base import EqualTensors, ModuleWrapper
from lockstep.strategies.moving_buffers import MovingBuffers
from lockstep.strategies.pipeline.schedule import Action, Place, order
from lockstep.strategies.pipeline.split import Arguments
from lockstep.strategies.pipeline.stage import WHOLE_ELSEWHERE, StagedModel, map_shapes, signature
from lockstep.strategies.pipeline.wire import (
    Expected,
    Kind,
    Wire,
    marked,
    with_mark,
    without_mark,
)
from lockstep.strategies.replication import average_gradients
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.wording import count_noun


class PipelinedModule(ModuleWrapper):
    """What the user calls in the place of the model.

    Args:
        model: the user's, cut already.
        place: of this rank.
        schedule: `gpipe` or `1f1b`.
        run: this process's part in the run, in which the groups for what is sent are open.
    """

    wraps_module: ClassVar[bool] = True
    """Checkpoints hold the names of what is inside."""

    def __init__(self, model: StagedModel, place: Place, schedule: str, run: Run) -> None:
        super().__init__()
        self.module = model.module
        self.place = place
        self.run = run
        self.replica_group = run.groups.get("replicas")
        """Of the ranks with the same stages, where there are several."""
        self._moving_buffers = None
        if self.replica_group is not None:
            self._moving_buffers = MovingBuffers(self.module, run.step, self.replica_group)
        self._model = model
        self._schedule = schedule
        tag = 2 * len(run.prepared)
        self._activations = self._wires("activations", tag=tag)
        self._gradients = self._wires("gradients", tag=tag)
        self._outputs = self._wires("activations", tag=tag + 1)
        self._copies: WeakSet[PipelinedModule] = WeakSet([self])
        self._parameters_there = list(self.module.parameters())
        self._batch: Batch | None = None
        self._failed = ""
        """What went wrong in the model on this rank, while the others went on."""
        self._begun = 0, 0
        """Passes begun since that many optimizer steps."""
        self._is_initialized = True

    @property
    def device(self) -> torch.device:
        """Where this rank's stages are, and inputs belong."""
        return self.run.device

    def __getattr__(self, name: str) -> Any:
        """What the user's module has that is neither code nor a tensor: its settings, say.

        Raises:
            NotOnStageError: what it has is made of all stages, or may be on another rank.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
            value = getattr(self.module, name)
        if not (callable(value) or isinstance(value, Tensor)):
            return value
        kind = "a method" if inspect.isroutine(value) else f"a {type(value).__name__}"
        raise NotOnStageError(
            f"{name} of a {type(self.module).__name__} under strategy='pipeline'",
            f"it is {kind} of the whole model, and this rank has "
            f"{count_noun(len(self.place.stages), 'stage')} of {self.place.last_stage + 1}",
            f"{WHOLE_ELSEWHERE}; parts that are on this rank are in .module",
        )

    @property
    def waits_for_loss(self) -> bool:
        """Whether a forward pass has got no `world.backward` yet."""
        batch = self._batch
        if batch is None or batch.of != self.run.step.key:
            return False
        return len(batch.losses) < len(batch.inputs)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the model's output."""
        return self.place.last_stage in self.place.stages

    def held(self) -> list[nn.Parameter]:
        """The parameters on this rank."""
        return [p for p in self._parameters_there if not p.is_meta]

    # What is outside of this rank's stages is computed as shapes, which the compiler cannot trace.
    @partial(never_compiled, recursive=True)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output; while training, NaN of the same shapes but on the last stage.

        Raises:
            UsageError: the model cannot be cut where it is, or a call that nothing follows.
        """
        if not self._activations:
            raise UsageError(
                "a forward pass after world.close()",
                "the model is spread over ranks that have parted",
                "close at the very end",
            )
        if self._failed:
            raise UsageError(
                "a call of the model after an exception in it that was caught",
                f"a {self._failed} on this rank: the others wait for what it did not send",
                "let the exception end the run; what may fail, check on all ranks before the call",
            )
        if not torch.is_grad_enabled():
            return self._evaluate((args, kwargs))
        batch = self._present()
        if len(batch.inputs) != len(batch.losses):
            raise UsageError(
                "two forward passes with gradients for one world.backward",
                "a pipeline carries one forward pass a micro-batch",
                "join the inputs and call the model once; evaluate under torch.no_grad(); leave no "
                "turn out for a loss that is NaN: it always is but on the last stage",
            )
        if batch.training is not self.training and any(
            getattr(part, "running_mean", None) is not None for part in self.module.modules()
        ):
            raise UsageError(
                "model.train() or model.eval() within a global batch under strategy='pipeline'",
                "its backward passes come later: in evaluation mode they would be computed with "
                "statistics of the normalisation layers that have moved since",
                "switch between two global batches, or evaluate under torch.no_grad()",
            )
        batch.inputs.append(((args, kwargs), self._kind((args, kwargs), batch.flags)))
        output = None
        called = Action(True, self.place.stages[-1], len(batch.inputs) - 1)
        while called in batch.actions:
            output = self._do(batch)
        return output if self.is_last else map_shapes(self._stand_in, output)

    def _present(self) -> Batch:
        """The global batch that the training loop works on."""
        step, place = self.run.step, self.place
        self._drop_old()
        if self._batch is not None and len(self._batch.losses) == self._batch.num_micro_batches:
            self._catch_up(self._batch)  # the loop calls the model several times a turn
        if self._batch is None:
            micro_batches = step.micro_batch.num_micro_batches
            sizes = place.position, place.positions, place.per_rank, micro_batches
            self._batch = Batch(
                of=step.key,
                num_micro_batches=micro_batches,
                actions=deque(order(self._schedule, *sizes)),
                flags=tuple(p.requires_grad for p in self._parameters_there),
                training=self.training,
                seed=self._new_seed(),
            )
        return self._batch

    def backward(self, loss: Tensor, precision: Precision, **options: Any) -> None:
        """Takes the loss of the last forward pass, and does all that can be done now."""
        batch = self._batch
        assert batch is not None  # `waits_for_loss`
        batch.losses.append(partial(precision.backward, loss, **options) if self.is_last else None)
        self._ask_early(batch, len(batch.losses) - 1)
        while batch.actions and batch.has(batch.actions[0]):
            self._do(batch)
        if self.run.step.micro_batch.last:
            self._catch_up(batch)
            if self.replica_group is not None:
                average_gradients(self.held(), self.replica_group)

    def before_step(self, optimizer: Optimizer) -> None:
        """Compares learning rates now and then.

        Raises:
            UsageError: a forward pass has got no `world.backward`.
            RanksDifferError: the stages would be trained at other rates.
        """
        if self._batch is not None and self._batch.of == self.run.step.key:
            raise UsageError(
                "optimizer.step() before the backward pass of the pipeline",
                "loss.backward() reaches no further than the stage of this rank",
                "call world.backward(loss)",
            )
        if check_due(self.run.step.number + 1):
            _check_rates(optimizer, self.run)

    def after_step(self) -> None:
        """Makes buffers that move equal in all pipelines."""
        if self._moving_buffers is not None:
            self._moving_buffers.follow()

    def equal_tensors(self) -> list[EqualTensors]:
        """What equal stages of several pipelines have in common."""
        group = self.replica_group
        return [] if group is None else [EqualTensors.of(self.module, group)]

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedModule:
        """A copy of the weights on this rank (averages of them, say) that can evaluate."""
        shared = [self.run, self.place, self._copies, *self.run.groups.values()]
        shared += [self._activations, self._gradients, self._outputs]
        memo |= {id(thing): thing for thing in shared}
        made = PipelinedModule.__new__(PipelinedModule)
        memo[id(self)] = made
        own = {**vars(self), "_batch": None, "_moving_buffers": None, "replica_group": None}
        vars(made).update(copy.deepcopy(own, memo))
        self._copies.add(made)
        return made

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
        """Lets go of the process groups."""
        self._batch = None
        self.replica_group = self._moving_buffers = None
        for part in itertools.chain.from_iterable(map(nn.Module.modules, self._copies)):
            if isinstance(part, SyncBatchNorm | nn.SyncBatchNorm):
                part.process_group = None
        for wires in (self._activations, self._gradients, self._outputs):
            wires.clear()

    def _wires(self, name: str, *, tag: int) -> list[Wire]:
        """One for each cut: that between stage n and the next one is at n.

        Messages between two ranks arrive in the order in which they were sent. With one stage a
        rank all cuts share a group; with several, two cuts may lie between the same ranks, and each
        has a group of its own.
        """
        groups = [group for key, group in self.run.groups.items() if key.startswith(name)]
        cuts = range(self.place.last_stage)
        return [Wire(groups[cut % len(groups)], self.run.device, tag) for cut in cuts]

    def _do(self, batch: Batch) -> Any:
        action = batch.actions.popleft()
        if not action.forward:
            return self._backward(batch, action)
        stage, number = action.stage, action.micro_batch
        seed, more = mix_seed(batch.seed, number), number + 1 < batch.num_micro_batches
        received, sent, output = self._through(stage, *batch.inputs[number], seed, more)
        batch.kept[stage, number] = received, [tensor for tensor in sent if tensor.requires_grad]
        return output

    def _kind(self, arguments: Arguments, flags: tuple[bool, ...] = ()) -> Kind | None:
        """Calls of one kind give activations of one form; None: unknown."""
        shapes, device = signature(arguments), self.run.device.type
        if not shapes:
            return None
        cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        by_value = any(
            isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex())
            for leaf in pytree.tree_leaves(arguments)
        )
        parts = shapes, self.training, torch.is_grad_enabled(), cast, flags
        return Kind(parts, by_value)

    def _new_seed(self) -> int:
        """Of what the next pass draws; the same on all ranks of the pipeline."""
        number, (before, begun) = self.run.step.number, self._begun
        self._begun = number, begun + 1 if number == before else 1
        return mix_seed(self.run.settings.seed, self.place.replica, *self._begun)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """What goes wrong inside keeps the rank from going on as if it had not."""
        try:
            yield
        except Exception as error:
            # No more of it: a loop that looks for "out of memory" shall not catch the next one too.
            self._failed = type(error).__name__
            raise

    def _through(
        self, stage: int, arguments: Arguments, kind: Kind | None, seed: int, more: bool
    ) -> tuple[list[Tensor], list[Tensor], Any]:
        """Runs one stage: what came in, what goes out, and what the model's forward returned.

        `more`: another micro-batch follows for certain.
        """
        came = None
        with self._noticing():
            if stage:
                source, wire = self.place.rank_of(stage - 1), self._activations[stage - 1]
                came = wire.receive(source, kind, more=more)
            sent, output = self._model.run(stage, came, arguments, seed)
            if sent is not None:
                to, wire = self.place.rank_of(stage + 1), self._activations[stage]
                wire.send(sent, to, kind, more=more)
        return came or [], sent or [], output

    def _backward(self, batch: Batch, action: Action, drop: bool = False) -> None:
        stage, place = action.stage, self.place
        came, went = batch.kept.pop((stage, action.micro_batch))
        with self._noticing(), self._model.going_back():
            if stage == place.last_stage:
                loss, batch.losses[action.micro_batch] = batch.losses[action.micro_batch], None
                if loss and not drop:
                    loss()
            elif went:
                expected = batch.expected.pop(action.micro_batch, None)
                messages = self._gradients[stage].take(expected or self._expect(stage, went))
                gradients = [without_mark(m, t) for m, t in zip(messages, went, strict=True)]
                used = [t for t, g in zip(went, gradients, strict=True) if g is not None]
                if used and not drop:
                    torch.autograd.backward(used, [g for g in gradients if g is not None])
            if stage:
                back = [with_mark(tensor) for tensor in came if tensor.requires_grad]
                self._gradients[stage - 1].send_known(back, place.rank_of(stage - 1))

    def _ask_early(self, batch: Batch, number: int) -> None:
        """Asks for the gradients of a micro-batch: that they will come is certain from now on."""
        stage, *others = self.place.stages
        alone = not others and not self.is_last  # several stages come in another order
        if alone and self._gradients[stage].expects_early:
            batch.expected[number] = self._expect(stage, batch.kept[stage, number][1])

    def _expect(self, stage: int, went: list[Tensor]) -> list[Expected]:
        forms = [marked(tensor) for tensor in went]
        return self._gradients[stage].expect(self.place.rank_of(stage + 1), forms)

    def _catch_up(self, batch: Batch, drop: bool = False) -> None:
        """Ends a global batch of which no more comes: does what is left for what has come.

        Something is, where the loop has left out a micro-batch: all ranks have left out the same,
        and each takes the rest in its order. With `drop` messages go, but nothing is computed.
        """
        for action in batch.actions:
            if not action.forward and batch.has(action):  # the forward passes are done
                self._backward(batch, action, drop)
        for wire in (*self._activations, *self._gradients):
            wire.wait()
        self._batch = None

    def leave_global_batch(self) -> None:
        """The loop over a loader was left in the middle of a global batch.

        What is left of it waits for the next call of the model: an exception may be why the loop
        was left, and the other ranks know nothing of it.
        """
        for parameter in self.held():
            parameter.grad = None

    def _drop_old(self) -> None:
        """Drops a global batch that was broken off, after what other ranks still wait for."""
        if self._batch is not None and self._batch.of != self.run.step.key:
            self._catch_up(self._batch, drop=True)
            self.leave_global_batch()

    def _evaluate(self, arguments: Arguments) -> Any:
        """The real output on every rank: each sends it to the one before, the last one first."""
        self._drop_old()
        kind, seed, output = self._kind(arguments), self._new_seed(), None
        for stage in self.place.stages:
            _, _, output = self._through(stage, arguments, kind, seed, False)
        leaves = pytree.tree_leaves(output)
        found = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        position, rank_of = self.place.position, self.place.rank_of
        if not self.is_last:  # stage n, for n < positions, is at position n
            found = self._outputs[position].receive(rank_of(position + 1))
        if position:
            self._outputs[position - 1].send(found, rank_of(position - 1))
        # Not for gradients of a global batch under way: a rank may take them in its next turn.
        for wire in self._activations + self._outputs:
            wire.wait()
        if self.is_last:
            return output
        return pytree.tree_map_only(Tensor, lambda _: found.pop(0), output)

    def _stand_in(self, shape: Tensor) -> Tensor:
        """What a rank without the output returns for it: no memory, and nobody mistakes it."""
        if not shape.is_meta:
            return shape
        real = shape.is_floating_point() or shape.is_complex()
        nothing = torch.nan if real else 0
        value = torch.full((), nothing, dtype=shape.dtype, device=self.run.device)
        return value.requires_grad_(real).expand(shape.shape)


def _check_rates(optimizer: Optimizer, run: Run) -> None:
    """No replica would show that the ranks of a pipeline have parted here."""
    own = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    rates = run.collectives.exchange(str(own))
    other = next((rank for rank, each in enumerate(rates) if each != rates[0]), None)
    if other is not None:
        raise RanksDifferError(
            "optimizer.step() with other learning rates on other ranks",
            f"rank 0 has {rates[0]}, rank {other} has {rates[other]}",
            "give the scheduler to world.prepare, and decide about rates by world.mean(loss): a "
            "loss is NaN but on the last stage",
        )


@dataclass
class Batch:
    """A global batch under way."""

    of: StepKey
    """Tells it from others."""
    num_micro_batches: int
    """Its micro-batches."""
    actions: deque[Action]
    """Those that are not done."""
    flags: tuple[bool, ...]
    """Which of the model's parameters are trained."""
    training: bool
    """Whether the model was in training mode at the beginning."""
    seed: int
    inputs: list[tuple[Arguments, Kind | None]] = field(default_factory=list)
    """Of each call of the model: its arguments, and their kind."""
    losses: list[Callable[[], None] | None] = field(default_factory=list)
    """The backward passes of losses, of the micro-batches that `world.backward` was called for;
    None: the loss is on another rank, or was used already."""
    kept: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)
    """By stage and micro-batch: what came in, and what went out and gets a gradient."""
    expected: dict[int, list[Expected]] = field(default_factory=dict)
    """Gradients that were asked for, by micro-batch."""

    def has(self, action: Action) -> bool:
        """Whether the training loop has brought what it needs."""
        return action.micro_batch < len(self.inputs if action.forward else self.losses)


class StepsOfPipeline(Extension):
    """What happens in a step with the stages of a model on this rank."""

    def __init__(self, module: PipelinedModule) -> None:
        self._module = module

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Raises UsageError if a forward pass got no backward pass."""
        if self._module in modules:
            self._module.before_step(optimizer)

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Makes buffers that forward passes change equal in all pipelines."""
        if self._module in modules:
            self._module.after_step()

    def clear_gradients(self) -> None:
        """Drops the gradients of a global batch that was broken off."""
        self._module.leave_global_batch()

    def release(self) -> None:
        """Drops references to process groups."""
        self._module.release()
