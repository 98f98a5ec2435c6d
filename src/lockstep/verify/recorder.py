"""Looks on at a script's training, in one rank, and records every update of every optimizer.

It sees calls and values alone: torch's hooks for optimizer steps and forward passes, what loaders
hand out, what backward passes are made of, and a few functions of torch.distributed. Of a batch it
records a digest of each sample and what it may weigh; a model's tensors it names by where they are.
"""

from __future__ import annotations

import math
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import chain
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lockstep.batch.pytree import tensors
from lockstep.checkpoint.modules import unwrap
from lockstep.distributed.torch_compat import (
    BatchNorm,
    in_function_transform,
    is_sharded,
    own_part,
    pytree,
)
from lockstep.errors import LockstepError, RecordingFailedError
from lockstep.session.extension import DeliveredBatch, Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import Wrapped, parameters_of
from lockstep.user_code import user_line
from lockstep.verify.batches import Fetched, look_at, random_streams, streams_that_moved
from lockstep.verify.branches import Branches
from lockstep.verify.models import (
    Models,
    are_positions,
    compares_samples,
    couples_samples,
    holds_tensors,
    inside_autograd_function,
    is_traced,
    nodes_behind,
    parts_of_samples,
    rows_of_tensors,
    storage_of,
    sums_of,
    with_rows,
)
from lockstep.verify.patches import (
    MADE,
    NORM,
    STATISTIC,
    DeterminismPatches,
    mark,
    marks_of,
    terms_of,
    unmark,
)
from lockstep.verify.record import LEAST_STEPS, LOST_PEER, UpdateWriter, Way
from lockstep.verify.tolerance import Array, scale_of
from lockstep.verify.training_record import Batch, Forward, RankUpdate, ScriptCall

_OF_BACKWARD = (
    "batches",
    "losses",
    "local_gradients",
    "loss_terms",
    "loss_line",
    "model_inputs",
    "forwards",
    "loss_compares_samples",
    "loss_divisors",
    "loss_options",
    "coupling_model",
    "module_tensors_before",
    "batch_statistics",
    "local_passes",
    "changed_between_passes",
    "loss_draws",
    "drawn_digests",
    "scalar_statistics",
    "random_streams",
    "gather_line",
    "detached_gather_line",
    "unwrapped_line",
    "past_wrapper_line",
    "wrapped_passes",
)
"""What belongs to backward passes, after which several optimizers may step."""
_MOST_FORWARDS = 256
"""Of an update, whose samples are kept apart."""
_FEW_VALUES = 65_536
"""Of inputs that are recorded as they are."""
_MOST_PIECES = 16
"""Backward passes of an update whose gradients are kept apart."""
_ONE_NUMBER = 1e-12
"""Of a squared norm, what may be left beside a multiple."""
SLOW_S = 1.0
"""Seconds; evidence that takes longer is looked for once."""
_ROUNDING = 1e-12
"""Of the largest gradient: below it, in float64, there is nothing else."""


class Finished(SystemExit):
    """Enough steps have been recorded; ends the script as `sys.exit(0)` would."""


class RecordingFailed(SystemExit):
    """The recorder has failed; ends the script, which is not to blame for it."""


Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(method: Method) -> Method:
    """Makes an error of the recorder's own end the script as that, and not as one of the script's.

    A connection that breaks while the ranks put sharded tensors together is no such error: another
    rank has failed, and says why.
    """

    @wraps(method)
    def call(recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(recorder, *args, **kwargs)
        except LockstepError:
            raise
        except Exception as error:
            if re.search(LOST_PEER, str(error)):
                raise
            recorder.internal = recorder.internal or traceback.format_exc()
            raise RecordingFailed(RecordingFailedError.exit_code) from error

    return cast(Method, call)


@dataclass
class _Pass:
    """A training forward pass of a model, until the next backward pass begins."""

    seen: Forward
    outputs: list[Tensor] = field(default_factory=list)
    taken: Batch | None = None
    """What it was called with, where another pass may turn out to be the first of the loss."""
    inside: Tensor | None = None
    """What the first of the model's parts returned that has a row for each sample."""

    def slope(self, place: int, gradient: Tensor) -> None:
        """The loss by one of its outputs."""
        count = len(self.seen.inputs)
        rows = rows_of_tensors(with_rows([gradient], count), count) * (1 + place)
        if not len(rows):
            return
        self.seen.output_gradients = (
            self.seen.output_gradients + rows if len(self.seen.output_gradients) else rows
        )


@dataclass
class _Beside:
    """What is known of the present update besides what is recorded."""

    drawn: int = 0
    """Draws before its first forward pass."""
    forwards: list[_Pass] = field(default_factory=list)
    """The last ones since the last backward pass."""
    calls: int = 0
    """Of models, since then."""
    present: _Pass | None = None
    """Of the outermost model that is being called."""
    made: dict[int, str] = field(default_factory=dict)
    """Lines of forward passes that the loss is made of, by the updates before them."""
    began: dict[str, Array] = field(default_factory=dict)
    """Sums over the parameters at the first forward pass."""
    unstepped: dict[tuple[int, int], Array] = field(default_factory=dict)
    """See `RankUpdate.unstepped_sums`."""
    graded: dict[int, Tensor] = field(default_factory=dict)
    """The gradients of this rank as the last backward pass left them, by the ids of parameters."""
    left: list[dict[int, Tensor]] = field(default_factory=list)
    """What each backward pass has left, by the ids of parameters."""
    unclipped: dict[str, Array] = field(default_factory=dict)
    evaluating: set[int] = field(default_factory=set)
    """Ids of parameters of modules that were called in evaluation mode."""
    local: set[int] = field(default_factory=set)
    """Ids of BatchNorm layers that took statistics of what this rank alone has."""
    untrained: set[int] = field(default_factory=set)
    """The same of the outermost model that is being called without gradients."""
    behind: dict[int, tuple[Tensor, Array]] = field(default_factory=dict)
    """What the last loss reaches on a rank without models, by the ids, with sums over it."""
    looked: bool = False
    """At what the step begins with."""
    taken: int = 0
    """Batches that were handed out before the last backward pass was over."""


class Recorder(Extension):
    """A `Extension` of Lockstep's steps, and the receiver of the hooks of `rank.install`.

    Args:
        writer: of this rank.
        way: after how many steps of one optimizer the script ends.
        patches: what is switched off in the models.
    """

    started = ""
    """The line that started the first process of the script's own."""
    kept_batches = ""
    """The line of a DataLoader whose batches could not be made larger; empty: there was none."""
    internal = ""
    """The traceback of an error of the recorder's own; empty: there was none."""

    def __init__(self, writer: UpdateWriter, way: Way, patches: DeterminismPatches) -> None:
        self.models = Models()
        self.by_choice = ""
        """What is left out, as the script has chosen it although it gives other numbers."""
        self._writer = writer
        self._way = way
        self.until = ""
        """Where the script was stopped, in words; empty: it was not."""
        self._begun = math.inf
        """When the first step was made."""
        self._patches, self.branches = patches, Branches()
        patches.on_write = self._is_updated_by_hand
        self._update = RankUpdate()
        """What happened since the last one."""
        self._beside = _Beside()
        self._streams, self._drawn_before = random_streams(), 0
        """Draws before the last batch was handed out, the last step, or the optimizer was built."""
        self.told: set[Any] = set()
        """Samplers that were told an epoch."""
        self.known: set[Any] = set()
        """Optimizers that Lockstep has prepared."""
        self._last = self._update
        """The last one that was complete."""
        self._taken: dict[Optimizer, int] = {}
        """Steps of each optimizer, in the order of their first ones."""
        self._couples: dict[str, bool] = {}
        """By model that was tried, whether the output of a sample follows from others."""
        self._couples_slowly = False
        """It took long to find that out."""
        self._joined = False
        """The last step was made by the others alone (`Join`)."""
        self._rounds = 0
        """Times that others changed the parameters of this rank, which has no optimizer."""
        self._stepped: dict[Optimizer, int] = {}
        """Updates up to the last one of each optimizer."""
        self._fetched = Fetched()
        self._ahead: list[Batch] = []
        """Batches of a later update."""
        self._passes: dict[Any, int] = {}
        """Of each loader, likewise; counted for those of torch."""
        self._batches: Counter[tuple[Any, int]] = Counter()
        """Handed out so far by those of torch, and in which epoch."""
        self._place = ""
        """Of the last one, in words."""
        self._hooked: dict[int, Tensor] = {}
        self._depth = 0
        self._stepping: list[Optimizer] = []
        self._micro_batch = MicroBatch()  # the last one of a loader of Lockstep's
        self._weighted = False
        """`World.backward` runs, or has: its loss is known."""

    @property
    def of_lockstep(self) -> bool:
        """Whether the script trains by Lockstep."""
        return bool(self.models.prepared)

    @property
    def loaders(self) -> int:
        """How many of torch's DataLoaders were iterated to train."""
        return sum(isinstance(loader, DataLoader) for loader in self._passes)

    @property
    def passes(self) -> int:
        """Backward passes since the last optimizer step of this rank."""
        return len(self._update.losses)

    @property
    def passes_without_step(self) -> int:
        """Backward passes of a rank without an optimizer since its parameters have changed last."""
        return 0 if self.models.built or self._taken else len(self._update.losses)

    # Of Lockstep's steps

    @guarded
    def module_prepared(self, wrapped: Wrapped) -> None:
        """`World.prepare` has wrapped a module."""
        module = wrapped.module
        self.by_choice = self.by_choice or vars(module).get("by_choice", "")
        self.models.prepared.add(id(unwrap(module)))
        self._meet(module)

    @guarded
    def delivered(self, event: DeliveredBatch) -> None:
        """A loader of Lockstep's hands out a micro-batch."""
        self._update.contributes, self._micro_batch = event.counts, event.micro_batch
        ids = event.samples.tolist()
        taken = look_at(event.batch, event.micro_batch.local_rows, epoch=event.epoch, ids=ids)
        if len(taken.contents) != len(ids):
            taken.contents = ()
        self._take(event.loader, taken, event.position + 1)

    @guarded
    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """`World.backward` was given a loss, which is weighted here."""
        self._weighted = False
        self.lost(weighted_loss if micro_batch.scale else weighted_loss.new_zeros(()))
        self._weighted = True

    # Of the hooks

    @guarded
    def took(self, loader: DataLoader[Any], batch: Any, **known: Any) -> None:
        """A DataLoader of torch's handed out a batch to train on.

        Args:
            loader: which.
            batch: as it was handed out.
            **known: what else is known of it: `ids`, `stream`, `drawn`.
        """
        sampler = loader.sampler
        known["epoch"] = max(0, self._passes.get(loader, 0) - 1)
        known["workers"] = loader.num_workers > 0
        known["iterable"] = isinstance(loader.dataset, IterableDataset)
        shuffles = isinstance(sampler, DistributedSampler) and sampler.shuffle
        known["order_fixed"] = shuffles and sampler not in self.told
        taken = look_at(batch, **known)
        self._batches[loader, taken.epoch] += 1
        self._take(loader, taken, self._batches[loader, taken.epoch])
        self._fetched.add(batch, taken)

    @guarded
    def begins_anew(self) -> None:
        """What is drawn from here on is drawn for the next step."""
        self._drawn_before = self._patches.count
        self._patches.numbers, self._streams = {}, random_streams()
        self._patches.drawn = set()

    @guarded
    def begins_pass(self, loader: Any) -> None:
        """A DataLoader of torch's begins to be iterated, to train."""
        self._passes[loader] = self._passes.get(loader, 0) + 1

    @guarded
    def lost(self, loss: Tensor) -> None:
        """A backward pass begins at a loss."""
        if self._weighted:
            return
        self._patches.went_through(loss)
        self._hook_parameters(*chain(*map(parameters_of, self.models.built)))
        self._look_at_parameters_behind(loss)
        update, passes = self._update, self._beside.forwards
        if not self._writer.count and len(passes) > 1:
            passes = self._beside.forwards = self._passes_of(loss)
        update.loss_line = loss.__dict__.get("_line") or user_line() or ""
        marks = marks_of(loss)
        update.gather_line = update.gather_line or marks.get("gather", "")
        update.detached_gather_line = update.detached_gather_line or marks.get("detached", "")
        self._made_of(marks, self._beside.drawn)
        update.scalar_statistics |= self._patches.numbers
        update.drawn_digests |= self._patches.drawn
        update.random_streams |= streams_that_moved(self._streams)
        samples = sum(
            taken.weights["samples"] for taken in (update.batches or update.model_inputs)[-1:]
        )
        if not dist.is_initialized() or dist.get_world_size() == 1:
            outputs = [output for each in passes for output in each.outputs]
            update.loss_compares_samples = update.loss_compares_samples or compares_samples(
                loss, outputs, int(samples)
            )
            update.coupling_model = update.coupling_model or self._coupling_model(passes)
        value = float(loss.detach())
        seen = (*update.batches[-1:], *update.model_inputs[-1:])
        empty = any(not taken.weights["samples"] for taken in seen)
        # The mean over no samples is NaN; there is nothing that it could be the loss of.
        update.losses.append(0.0 if empty and math.isnan(value) else value)
        update.loss_terms.append(terms_of(loss))
        self._beside.left.append({})
        self._weigh(marks.get("divisor", (0.0, ""))[0], passes)
        for each in passes:
            each.seen.output_gradients = each.seen.output_gradients[
                :0
            ]  # what was derived until here is not the loss
        update.forwards = [*update.forwards, *(each.seen for each in passes)][-_MOST_FORWARDS:]
        self._beside.forwards, self._beside.calls, self._beside.unclipped = [], 0, {}

    def _coupling_model(self, passes: Sequence[_Pass]) -> str:
        """A model whose output for a sample follows from others of the batch; empty: there is none.

        Models are tried in the first steps alone, large ones once: it takes several backward passes
        through them.
        """
        for each in passes:
            model = each.seen.model
            first = self._writer.count < LEAST_STEPS and not self._couples_slowly
            if each.inside is None or not (first or model not in self._couples):
                continue
            if not self._couples.get(model):
                begun = time.monotonic()
                self._couples[model] = couples_samples(each.outputs, each.inside)
                self._couples_slowly |= time.monotonic() - begun > SLOW_S
        for each in passes:
            model = each.seen.model
            if self._couples.get(model):
                return model
        return ""

    def _passes_of(self, loss: Tensor) -> list[_Pass]:
        """The forward passes that a loss is made of; others were only tried before training."""
        passes, update = self._beside.forwards, self._update
        made = nodes_behind(loss.grad_fn)
        used = [each for each in passes if any(t.grad_fn in made for t in each.outputs)]
        if not used or used[0] is passes[0]:
            return passes
        if update.model_inputs and used[0].taken is not None:
            update.model_inputs[-1] = used[0].taken
        return used

    @guarded
    def returns(self) -> None:
        """A backward pass is over."""
        update, left, own = self._update, self._beside.left, []
        graded = self._beside.graded = {}
        for _, parameter in self.models.parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                now = graded[id(parameter)] = own_part(parameter.grad).clone()
                parts = [part[id(parameter)] for part in left if id(parameter) in part]
                whole = sum(parts, torch.zeros_like(now))
                own += [now.equal(whole) or now.equal(parts[-1])] if parts else []
        update.local_passes.append(bool(own) and all(own))
        self._beside.taken = len(update.batches)

    def _factor(self) -> float:
        """See `RankUpdate.gradient_factor`."""
        graded, products = self._beside.graded, np.zeros(3)
        for _, parameter in self.models.parameters():
            if parameter.grad is not None:
                if id(parameter) not in graded:
                    return math.nan
                now, then = own_part(parameter.grad), graded[id(parameter)]
                now, then = (t.double().flatten() for t in (now, then))
                products += [float(now @ then), float(then @ then), float(now @ now)]
        both, before, after = products
        ratio = both / before if before else math.nan
        return ratio if after - ratio * both <= _ONE_NUMBER * after else math.nan

    def _weigh(self, divisor: float, passes: Sequence[_Pass]) -> None:
        """What a loss may have been divided by, and what samples were to become in it."""
        calls, self._patches.loss_calls = self._patches.loss_calls, []
        counted = {"divisor of the loss": divisor} if divisor else {}
        if calls:
            counted["labels in the loss"] = sum(call.count for call in calls)
        self._update.loss_divisors.append(counted)
        for call in calls:
            for key, value in call.options.items():
                if isinstance(value, Tensor | float):
                    value = torch.as_tensor(value)
                    self._update.loss_options[f"{key} of {call.line}"] = sums_of(value)
        count = len(passes[0].seen.inputs) if passes else 0
        known = (c for c in calls if count and c.targets.numel() and not are_positions(c.targets))
        whole = [call.targets for call in known]
        if whole and all(t.dim() and not len(t) % count for t in whole):
            passes[0].seen.targets = rows_of_tensors(whole, count)

    def _made_of(self, marks: Mapping[str, Any], before: int) -> None:
        """What has these marks is part of the loss; draws up to a number do not count."""
        for kind, value in marks.items():
            if kind.startswith(STATISTIC):
                self._update.batch_statistics[kind.removeprefix(STATISTIC)] = value
            elif kind.startswith(MADE):
                self._beside.made[int(kind.removeprefix(MADE))] = value
            elif kind.startswith(NORM):
                self._beside.local.add(value)
        number, *draw = marks.get("draw", (0,))
        self._update.loss_draws += [(draw[0], draw[1])] if number > before else []

    def clips(self, clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The script clips gradients."""
        self.called("clip", None)
        before = self._gradients()
        self._beside.unclipped = self._beside.unclipped or before
        norm = clip(*args, **kwargs)
        after = self._gradients().items()
        changed = (not np.array_equal(array, before.get(name, array)) for name, array in after)
        self._update.calls[-1].has_clipped = any(changed)
        return norm

    @guarded
    def _gradients(self) -> dict[str, Array]:
        return _arrays((n, p.grad) for n, p in self.models.parameters() if p.grad is not None)

    @guarded
    def called(
        self, name: str, tensor: Any, into: Any = None, value: float | None = None
    ) -> ScriptCall:
        """The script called a function that matters for gradients.

        Args:
            name: of the function.
            tensor: what it was given.
            into: what it fills in without a gradient.
            value: a number that it was given.
        """
        known = isinstance(tensor, Tensor)
        storage = storage_of(tensor) if known else 0
        named = ((n, p) for n, p in self.models.parameters() if storage and p.grad is not None)
        own = ((n, id(p)) for n, p in named if p.grad is not None and storage_of(p.grad) == storage)
        owner = next(own, ("", 0))
        call = ScriptCall(
            name=name,
            line=user_line() or "",
            carries_gradient=known and tensor.requires_grad and torch.is_grad_enabled(),
            uses_model_output=known and "trained" in marks_of(tensor),
            gradient_of=owner[0],
            gradient_changed=bool(owner[0]) and self._changed(owner[1], tensor),
            passes_before=len(self._update.losses),
            value=value,
            in_step=bool(self._stepping),
            in_function=known and inside_autograd_function(),
        )
        self._update.calls.append(call)
        if isinstance(tensor, Tensor):
            unmark(tensor)
            self._patches.wrote(tensor, by_hand=False)
        if into is not None and not call.in_function:
            self._loses_gradient(call, into)
        return call

    @guarded
    def exchanged(self, calls: Sequence[ScriptCall], result: Any, *, loses_gradient: bool) -> None:
        """A collective of Lockstep's has brought a result."""
        for tensor in tensors(result):
            unmark(tensor)
        for call in calls if loses_gradient else ():
            self._loses_gradient(call, result)

    def _loses_gradient(self, call: ScriptCall, result: Any) -> None:
        """An all-gather has brought what models returned to be trained, without its gradient."""
        if call.carries_gradient:
            mark(result, gather=call.line)
        elif call.uses_model_output:
            mark(result, detached=call.line)

    @guarded
    def reduced(self, tensor: Any) -> None:
        """A tensor has been reduced over the ranks: in an optimizer's step perhaps a gradient."""
        if not self._stepping or not isinstance(tensor, Tensor):
            return
        storage = storage_of(tensor)
        for name, p in self.models.parameters():
            if storage and p.grad is not None and storage_of(p.grad) == storage:
                self._update.reduced_in_step = {
                    **self._update.reduced_in_step,
                    **_arrays([(name, p.grad)]),
                }

    def _changed(self, parameter: int, gradient: Tensor) -> bool:
        """Whether a gradient is no longer what the backward passes of this update left."""
        left = [part[parameter] for part in self._beside.left if parameter in part]
        if not left or self._patches.lowest != torch.float64:
            return False
        return not torch.allclose(gradient, torch.stack(left).sum(0), rtol=1e-6, atol=0.0)

    @guarded
    def seeded(self, seed: int) -> None:
        """The script seeds torch."""
        if not self._writer.count and (line := user_line()):
            self._update.seeds[line] = int(seed)

    @guarded
    def changed_by_hook(self, line: str) -> None:
        """A hook of the script's has changed the gradient of a parameter."""
        self._update.gradient_hook_line = line

    @guarded
    def wrapped(self, wrapper: DistributedDataParallel) -> None:
        """DDP was put around a module."""
        self.models.wrapped(wrapper)
        self._hook_parameters()
        self._watch_writes()

    @guarded
    def enters(self, module: nn.Module, inputs: Any) -> Any:
        """A module's forward pass begins; the outermost one's inputs may be changed."""
        self._depth += 1
        if is_traced() or in_function_transform():
            return None
        marks = marks_of(inputs)
        self._fetched.used(marks.get("batch", 0))
        update, grad = self._update, torch.is_grad_enabled()
        training = module.training and grad
        if self._depth == 1:
            self._beside.untrained = set()
        if isinstance(module, BatchNorm) and module.training:
            layers = self._beside.local if grad else self._beside.untrained
            layers |= {id(module)} if type(module).forward is BatchNorm.forward else set()
        if self._depth > 1:
            return None
        trains = grad and next(module.parameters(), None) is not None
        if (
            trains
            and len(update.model_inputs) == len(update.losses)
            and self._is_stepped_by_others()
        ):
            self._close_round()
            update = self._update
        self._beside.present = None
        if id(module) in self.models.averaged and training:
            update.past_wrapper_line = update.past_wrapper_line or user_line() or "somewhere"
        update.wrapped_passes += training and isinstance(module, DistributedDataParallel)
        self._meet(module)
        if trains:
            if not self.models.is_wrapped(module):
                update.unwrapped_line = update.unwrapped_line or user_line() or ""
            update.module_tensors_before = update.module_tensors_before or self.models.attributes()
            if not update.began_with_forward:
                update.began_with_forward, update.rewritten_parameters = True, self._rewritten()
                self._joined = False
            if not update.losses or len(update.model_inputs) == len(update.losses):
                self._look_between()
            if len(update.model_inputs) == len(update.losses):
                seen = look_at(inputs, ids=())
                self._beside.drawn = (
                    self._beside.drawn if update.model_inputs else self._patches.count
                )
                update.model_inputs += [seen] if seen.shape else []
            parts = (part for part in module.modules() if not part.training)
            self._beside.evaluating |= {
                id(p) for part in parts for p in part.parameters(recurse=False)
            }
            self._made_of(marks, self._drawn_before)
            self._beside.present = self._begins(module, inputs)
            if self._beside.present is not None and not self._writer.count:
                self._beside.present.taken = look_at(inputs, ids=())
        return self._patches.converted(inputs) if holds_tensors(module) else None

    @guarded
    def _is_updated_by_hand(self, storage: int) -> None:
        """The script has written to a tensor; a parameter's gradient is what it used for that."""
        if self.models.built or self._taken or not self._update.losses:
            return
        for name, p in self.models.parameters():
            if p.grad is not None and name not in self._update.gradients:
                if storage_of(p) == storage:
                    found = _arrays([(name, p.grad)])
                    self._update.gradients = {**self._update.gradients, **found}
                    self._update.unclipped = self._update.gradients

    def _is_stepped_by_others(self) -> bool:
        """Whether parameters have changed since the last pass, on a rank without an optimizer."""
        if self.models.built or self._taken or not self._update.losses:
            return False
        began = self._beside.began
        named = ((n, p) for n, p in self.models.parameters() if n in began)
        return any(not np.array_equal(sums_of(p), began[n]) for n, p in named)

    def _look_at_parameters_behind(self, loss: Tensor) -> None:
        """Sees on a rank that calls no module and has no optimizer that others send parameters.

        Such a rank may call functions with the parameters of a module. They are known by the loss.
        """
        if self.models.built or self._taken or any(True for _ in self.models.parameters()):
            return
        before = self._beside.behind
        now = {}
        for node in nodes_behind(loss.grad_fn):
            parameter = getattr(node, "variable", None)
            if isinstance(parameter, Tensor) and not is_sharded(parameter):
                now[id(parameter)] = (parameter, sums_of(parameter))
        for number, (_, sums) in now.items():
            if number in before and not np.array_equal(sums, before[number][1]):
                self._close_round()
                break
        self._beside.behind = now

    def _close_round(self) -> None:
        """Records what led to a change of the parameters that no optimizer of this rank made."""
        update, named = self._update, list(self.models.parameters())
        count = self._beside.taken
        closed = replace(
            update,
            batches=update.batches[:count] or update.model_inputs,
            stepped=False,
            step=self._rounds,
            dtype=str(self._patches.lowest),
            parameter_sums=self._beside.began,
            frozen=[name for name, parameter in named if not parameter.requires_grad],
            unwrapped=self.models.bare(),
            local_gradients=self._local_gradients(named),
            branch_outcomes=self.branches.since(),
        )
        self._writer.write(closed)
        self._rounds += 1
        self._begun = min(self._begun, time.monotonic())
        self._update = RankUpdate(contributes=update.contributes, batches=update.batches[count:])
        self._beside = _Beside()
        self._weighted = False
        self.end_if_enough()

    @guarded
    def shadows(self) -> None:
        """This rank has joined (`Join`) early, and the others make an iteration without it."""
        last, self._joined = self._last, True
        for number, optimizer in enumerate(self._taken):
            missed = RankUpdate(
                optimizer=number,
                optimizer_class=type(optimizer).__name__,
                step=self._taken[optimizer],
                stepped=False,
                dtype=str(self._patches.lowest),
                learning_rates=last.learning_rates,
                group_options=last.group_options,
                contributes=False,
            )
            self._writer.write(missed)
            self._taken[optimizer] += 1
            self._stepped[optimizer] = self._writer.count

    @guarded
    def final(self) -> dict[str, Array]:
        """Sums over the parameters that the next forward pass would begin with, or began with.

        Of a rank that has joined nothing: it is given the others' parameters later.
        """
        if self._joined:
            return {}
        if self._update.began_with_forward:
            return self._beside.began
        return {n: sums_of(p) for n, p in self.models.parameters() if not is_sharded(p)}

    def _look_between(self) -> None:
        """A forward pass before the first backward pass, or the first before another, begins."""
        update = self._update
        now = {n: sums_of(p) for n, p in self.models.parameters() if not is_sharded(p)}
        began = self._beside.began
        if not update.losses:
            self._beside.began = now
            unstepped = self.models.of_unstepped()
            self._beside.unstepped = {place: sums_of(p) for place, p in unstepped}
            if not self._writer.count:
                update.initial = _arrays((n, p) for n, p in self.models.parameters() if n in now)
        elif not update.changed_between_passes:
            changed = (n for n in now if n in began and not np.array_equal(now[n], began[n]))
            update.changed_between_passes = {n: now[n] for n in changed}

    def _rewritten(self) -> dict[str, Array]:
        if not self._writer.count:  # what tests came to before is no part of a step
            self.branches.since()
        left, named = self.models.left, self.models.parameters()
        now = _arrays((n, p) for n, p in named if n in left and not is_sharded(p))
        return {n: array for n, array in now.items() if not np.array_equal(array, left[n])}

    def _begins(self, module: nn.Module, inputs: Any) -> _Pass | None:
        count, parts = parts_of_samples(inputs)
        self._beside.calls += 1
        if not parts:
            return None
        name = f"{type(unwrap(module)).__name__}, forward pass {self._beside.calls}"
        shape = f"{parts[0].dtype} {list(parts[0].shape[1:])}"
        rows = rows_of_tensors(parts[:1], count), rows_of_tensors(parts[1:], count)
        alike = 1 < len(parts) == sum(t.dim() > 0 for t in tensors(inputs))
        seen = Forward(
            model=name, shape=shape, inputs=rows[0], other_inputs=rows[1], rows_are_samples=alike
        )
        if 0 < parts[0].numel() <= _FEW_VALUES:
            seen.input_values = parts[0].detach().double().reshape(count, -1).cpu().clone().numpy()
        return _Pass(seen)

    @guarded
    def leaves(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module's forward pass is over."""
        self._depth -= 1
        if is_traced() or in_function_transform():
            return
        if not self._depth and next(module.parameters(), None) is not None:
            norms = {f"{NORM}{layer}": layer for layer in self._beside.untrained}
            mark(output, **norms, **{f"{MADE}{self._writer.count}": user_line() or ""})
        present = self._beside.present
        if present is None or not torch.is_grad_enabled():
            return
        count = len(present.seen.inputs)
        leaves = pytree.tree_leaves(output)
        found = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad and t.dim()]
        whole = with_rows(found, count)
        if self._depth:
            present.inside = whole[0] if present.inside is None and whole else present.inside
            return
        self._beside.present = None
        present.outputs = found
        mark(found, trained=self._writer.count)
        present.seen.rows_are_samples |= bool(whole) or any(
            not count or not len(t) % count for t in found
        )
        self._beside.forwards = [*self._beside.forwards, present][-_MOST_PIECES:]
        if found and len(whole) == len(found):
            present.seen.outputs = rows_of_tensors(whole, count)
            for place, tensor in enumerate(found):
                hook = partial(self._see_slope, present, place)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    @guarded
    def _see_slope(self, present: _Pass, place: int, gradient: Tensor | None) -> None:
        """The loss has a gradient by an output; autograd has None where nothing comes back."""
        if gradient is not None:
            present.slope(place, gradient)

    @guarded
    def before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer is about to step, perhaps by another one, as that of ZeRO.

        Returns:
            What it is called with: of a closure, which computes the gradients, the first call is
            looked at.
        """
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            return None
        self._patches.watched = frozenset()
        if optimizer not in self._taken:
            self._taken[optimizer] = 0
            self.models.stepped.append(optimizer)
        # Where optimizers step by turns, the others finish their turn before the script ends.
        if self._taken[optimizer] == max(self._taken.values()):
            self.end_if_enough()

        def told(value: Any) -> Any:
            def called() -> Any:
                loss = value()
                self._look_before(optimizer)
                return loss

            return called if callable(value) else value

        itself, *given = args
        if not any(map(callable, (*given, *kwargs.values()))):
            self._look_before(optimizer)
            return None
        return (itself, *map(told, given)), {key: told(value) for key, value in kwargs.items()}

    @guarded
    def _look_before(self, optimizer: Optimizer) -> None:
        """The gradients are there."""
        if self._beside.looked:
            return
        self._beside.looked = True
        update, held = self._update, set(map(id, parameters_of(optimizer)))
        if not update.losses and self._last.losses:  # of the backward pass before that step
            kept = {name: getattr(self._last, name) for name in _OF_BACKWARD}
            update = self._update = replace(update, **kept)
        named = list(self.models.parameters())
        update.local_norm_layers = [
            n for n, m in self.models.modules() if id(m) in self._beside.local
        ]
        update.in_eval_mode = [name for name, p in named if id(p) in self._beside.evaluating]
        update.optimizer_unprepared = optimizer not in self.known and self.models.of_prepared(held)
        if not any(self._taken.values()):
            update.initial = {**_arrays(named), **update.initial}
        update.gradient_factor = self._factor()
        early = (n for n in self._beside.made if n < self._stepped.get(optimizer, 0))
        update.earlier_outputs_line = next((self._beside.made[n] for n in early), "")
        gradients = _arrays((n, p.grad) for n, p in named if id(p) in held and p.grad is not None)
        _silence(gradients, [p for n, p in named if n in gradients])
        for gradient in (p.grad for _, p in named if p.grad is not None):
            self._patches.went_through(gradient)
        update.gradients = gradients
        update.unclipped = {
            n: self._beside.unclipped.get(n, array) for n, array in gradients.items()
        }
        update.frozen = [name for name, parameter in named if not parameter.requires_grad]
        whole = {name: sums_of(p) for name, p in named if not is_sharded(p)}
        update.parameter_sums = {**whole, **self._beside.began}
        update.unstepped_sums = self._beside.unstepped
        update.module_tensors, update.comm_hook_line = (
            self.models.attributes(),
            self.models.comm_hook,
        )
        update.optimizer_state = {
            f"{name}/{key}": np.array([*sums_of(value), value.numel()])
            for name, p in named
            for key, value in optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor) and not is_sharded(value)
        }
        drawn = marks_of([p.grad for _, p in named if p.grad is not None]).get("draw", (0, ""))
        update.gradient_draw_line = drawn[1] if drawn[0] > self._drawn_before else ""
        update.group_options = [_options(group) for group in optimizer.param_groups]
        groups = [group for group in optimizer.param_groups if "lr" in group]
        update.learning_rates = [float(group["lr"]) for group in groups]
        update.learning_rate_lines = [getattr(group, "line", "") for group in groups]
        update.unknown_to_ddp, update.unwrapped = self.models.not_averaged(), self.models.bare()
        update.ddp_ranks = self.models.averaged_over
        seen, self._ahead = self._fetched.only_seen, self._fetched.ahead()
        others = set(map(id, (*seen, *self._ahead)))
        update.batches = [taken for taken in update.batches if id(taken) not in others]
        if not update.batches:  # these may be made from the batch, so they are not compared with it
            update.batches = update.model_inputs

    @guarded
    def after_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer has stepped."""
        if self._stepping.pop() is not optimizer or self._stepping:
            return
        update, held = self._update, set(map(id, parameters_of(optimizer)))
        update.optimizer = list(self._taken).index(optimizer)
        update.optimizer_class = type(optimizer).__name__
        update.step, update.dtype = self._taken[optimizer], str(self._patches.lowest)
        named = list(self.models.parameters())
        if optimizer in self.models.built:
            update.construction_index = self.models.built.index(optimizer)
        name_of = {id(parameter): name for name, parameter in named}
        update.optimizer_parameters = [name_of.get(id(p), "") for p in parameters_of(optimizer)]
        update.local_gradients = self._local_gradients(named) or update.local_gradients
        self._last = replace(update)
        update.parameters = _arrays((n, p) for n, p in named if id(p) in held)
        update.buffers = _arrays(self.models.buffers())
        writes, self._patches.writes = self._patches.writes, {}
        places = self._watch_writes().items()
        update.write_stacks = {name: writes[place] for name, place in places if place in writes}
        update.branch_outcomes = self.branches.since()
        self.models.left.update(update.parameters)
        self._writer.write(update, self._micro_batch.virtual_rank_number)
        self._stepped[optimizer] = self._writer.count
        self._taken[optimizer] += self._micro_batch.virtual_rank is None or self._micro_batch.last
        self._begun = min(self._begun, time.monotonic())
        self._update = RankUpdate(contributes=update.contributes, batches=self._ahead)
        self._beside = _Beside()
        self.begins_anew()
        self._weighted = False

    def _local_gradients(self, named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Array]]:
        """What each backward pass of the update has left; empty where they are too many."""
        pieces = self._beside.left
        kept = pieces if len(pieces) <= _MOST_PIECES else []
        left = ([(n, part[id(p)]) for n, p in named if id(p) in part] for part in kept)
        return [_arrays(part) for part in left]

    @guarded
    def end_if_enough(self) -> None:
        """Ends the script where its steps have been recorded.

        The optimizer that has made the most steps decides. The first one may have trained something
        before, on this rank alone.
        """
        done = max(self._taken.values(), default=self._rounds)
        way, micro = self._way, self._micro_batch
        late = way.seconds is not None and time.monotonic() > self._begun + way.seconds
        others = micro.virtual_rank is not None and (self._update.batches or not micro.last)
        if not others and (done >= way.steps or (done >= LEAST_STEPS and late)):
            self.until = f"step {done}{self._place}"
            raise Finished(0)

    def _meet(self, module: nn.Module) -> None:
        self._patches.quiet(module)
        self.models.add(module)
        self._hook_parameters()
        if not self._stepping:
            self._watch_writes()

    def _watch_writes(self) -> dict[str, int]:
        """From here on all that models hold now is watched; returns where it lies."""
        every = [*self.models.parameters(), *self.models.buffers()]
        places = {name: storage_of(tensor) for name, tensor in every}
        self._patches.watched = frozenset(places.values()) - {0}
        return places

    def _take(self, loader: Any, taken: Batch, number: int) -> None:
        self._weighted = False
        self._passes.setdefault(loader, 0)
        taken.loader = list(self._passes).index(loader)
        self._place = f", batch {number} of "
        with suppress(TypeError):  # a stream has no length
            self._place += f"{len(loader)} of "
        self._place += f"epoch {taken.epoch + 1}"
        self._update.batches.append(taken)
        self._patches.watch_draws()
        self.begins_anew()

    def _hook_parameters(self, *loose: nn.Parameter) -> None:
        """Sees every gradient before anything else does with it what it does.

        Args:
            loose: parameters that no module may have; only when all is wrapped.
        """
        for parameter in (*(p for _, p in self.models.parameters()), *loose):
            # Of a shard what this rank left is not its own alone.
            own = parameter.is_leaf and not is_sharded(parameter)
            if own and parameter.requires_grad and id(parameter) not in self._hooked:
                parameter.register_hook(partial(self._left, id(parameter)))  # type: ignore[no-untyped-call]
                self._hooked[id(parameter)] = parameter

    @guarded
    def _left(self, parameter: int, gradient: Tensor | None) -> None:
        if gradient is not None and 0 < len(self._beside.left) <= _MOST_PIECES:
            mine, last = gradient.detach(), self._beside.left[-1]
            last[parameter] = last[parameter] + mine if parameter in last else mine.clone()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a parameter group, but for its learning rate."""
    plain = {k: v for k, v in group.items() if isinstance(v, bool | int | float | tuple)}
    found = {k: v for k, v in plain.items() if k not in {"lr", "initial_lr"}}
    return {**found, "parameters": len(group["params"])}


def _silence(gradients: Mapping[str, Array], parameters: list[nn.Parameter]) -> None:
    """Sets to zero what is rounding alone in gradients.

    Those of a bias before a BatchNorm vanish, but for the last bits, which Adam and its like make
    into steps as large as any other.
    """
    limit = _ROUNDING * scale_of(gradients)
    for parameter in parameters:
        own = own_part(parameter.grad)
        if not own.is_sparse and own.is_floating_point():
            own.masked_fill_(own.abs() < limit, 0.0)


def _arrays(named: Any) -> dict[str, Array]:
    """Whole tensors as arrays; of a sharded one all ranks call this together."""
    found = {}
    for name, tensor in named:
        whole = tensor.detach()
        whole = whole.full_tensor() if is_sharded(whole) else whole
        whole = (whole.to_dense() if whole.is_sparse else whole).cpu()
        whole = whole.double() if whole.is_floating_point() else whole
        # A copy: storage that numpy looks at cannot be freed, see `digest`.
        found[name] = whole.clone(memory_format=torch.contiguous_format).numpy()
    return found
