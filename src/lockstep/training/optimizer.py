"""Optimizers and schedulers that step once per global batch.

The training loop runs once per micro-batch. On all but the last of a global batch, `step()` and
`zero_grad()` do nothing, so the same loop is right with and without accumulation.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.checkpoint.optimizer_state import load_saved_state
from lockstep.distributed.collectives import Collectives, check_same_metric
from lockstep.distributed.torch_compat import is_sharded
from lockstep.errors import UsageError, warn
from lockstep.optim.precision import Precision
from lockstep.step import Step, Turn
from lockstep.strategies.base import parameters_of

# Their CPU implementations over lists of tensors give the same bits as those over single tensors,
# with a fraction of the calls (tests/optim/test_accumulation.py). The fused ones do not.
_SAME_BITS_FOREACH = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adamax,
    torch.optim.Adadelta,
)
# Few tensors: the lists cost what they save. Large ones: each operation goes over memory that the
# one before has pushed out of the cache, and lists as long as the model are held in between.
_FOREACH_TENSORS = 8
_FOREACH_MEAN_SIZE = 2**14


# Every error of torch about operations on shards has one of these words.
_TORCH_ON_SHARDS = ("DTensor", "Sharding propagation")


class _Around:
    """Has what the object inside of it has."""

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet while copying or unpickling
            raise AttributeError(name)
        return getattr(self.inner, name)


class PreparedOptimizer(_Around, Optimizer):
    """The user's optimizer, stepping once per global batch.

    It shares the inner optimizer's groups and state. `before` and `after` are called around every
    real step, `before` after each call of a closure; `whole` makes of the loss that a closure
    returns that of the global batch.
    """

    def __init__(
        self,
        inner: Optimizer,
        step: Step,
        precision: Precision,
        before: Callable[[], None],
        after: Callable[[], None],
        whole: Callable[[Any], Any] = lambda loss: loss,
    ) -> None:
        # Not calling super().__init__(): there is one set of groups, state and hooks, the inner's.
        self.inner = inner
        self.stepping = False
        """Whether the inner optimizer is just now in a step that this one has called."""
        self.skipped = False
        """Whether the loss scaler left the last step out because a gradient was infinite."""
        self._step = step
        self._precision = precision
        self._before = before
        self._after = after
        self._whole = whole
        self._asked: Turn | None = None
        """The global batch, or the replica's turn, in which `step()` was last called."""
        self._rates: list[Any] = []
        """The learning rates then."""
        self._taken: Turn | None = None
        """That in which a step was last taken."""
        self.places: list[list[int]] | None = None
        """Where the parameters of each group stand among all, of which other ranks have some."""
        self.counts: list[int] = []
        """How many each group has over all ranks, where `places` are set."""
        self.scheduled = False
        """A scheduler that drives it is prepared, or it was warned of one that is not."""
        self._error_of_closure: Exception | None = None
        self._plain_zero_grad = type(inner).zero_grad is Optimizer.zero_grad
        self._dropped: Turn | None = None
        """The global batch in which a clearing was last put off."""
        self._replica: int | None = None
        """Whose state the inner optimizer has; None: all replicas' alike, or there are none."""
        self._states: dict[int | None, Any] = {}
        """The states of all, but for that one."""
        step.clear_gradients.append(inner.zero_grad)
        step.batch_begins.append(self._clear_dropped)

    def __repr__(self) -> str:
        return f"Prepared{self.inner!r}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps where the present micro-batch closes its global batch; else returns None.

        Raises:
            UsageError: `loss.backward()` was called where the loss needs exact weighting.
        """
        if closure is None and not self._step.running.backwards:
            self._step.of_loss()  # `loss.backward()` was called, or nothing
        running = self._step.running
        present = running.micro_batch
        if closure is None:
            self._check_backward()
        elif not (present.first and present.last):
            raise UsageError(
                "optimizer.step(closure) with micro-batches",
                "the closure would be evaluated on a part of the global batch",
                "leave micro_batch_size out, or use an optimizer without closures",
            )
        self._check_rates()
        self._asked = batch = self._step.batch
        if not present.closes:
            return None
        self._take_turn(present.replica)
        if len(self._states) == present.turns:  # all of them have begun
            self._states.pop(None, None)
        self._step.enter_phase("optimizer")
        if closure is None:
            self._before()
        evaluate = None if closure is None else partial(self._evaluate, closure)
        self.stepping = True
        try:
            result, self.skipped = self._precision.step(self.inner, evaluate)
        except Exception as error:
            if (refused := self._refused_by_shards(error)) is not None:
                raise refused from error
            raise
        finally:
            self.stepping = False
        self._taken = batch
        if present.last:
            self._step.mark_stepped()
        self._after()
        self._step.enter_phase("other")
        return result

    def _refused_by_shards(self, error: Exception) -> UsageError | None:
        """What an error of the step means where torch cannot compute it with shards; else None."""
        of_torch = any(words in str(error) for words in _TORCH_ON_SHARDS)
        if not of_torch or error is self._error_of_closure:
            return None
        if not any(map(is_sharded, parameters_of(self.inner))):
            return None
        kind = type(self.inner).__name__
        first_sentence = str(error).strip().splitlines()[0].split(". ")[0]
        return UsageError(
            f"{kind}.step() on the shards of a model",
            "torch cannot compute it with parameters that are spread over the ranks "
            f"({first_sentence[:200]})",
            f"use strategy='ddp' with {kind}, or an optimizer that updates every element by itself "
            "and without masks, such as SGD, Adam, AdamW, RMSprop or Adagrad",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, but for those that a global batch has begun to accumulate.

        They have begun once `step()` was called for an earlier micro-batch (or for this one, where
        the clearing comes after it), and are done when it was taken.
        """
        present = self._step.current
        if not (present.opens and present.closes):
            batch = self._step.batch
            if self._asked == batch and self._taken != batch:
                self._dropped = batch
                return
        if set_to_none and self._plain_zero_grad:
            # What torch's own does, without the profiling around it, which takes ten times as long.
            for group in self.inner.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            self.inner.zero_grad(set_to_none)

    def _clear_dropped(self) -> None:
        """Before a global batch: the one before was to be cleared, and its step was left out."""
        if self._dropped not in (None, self._taken):
            self.inner.zero_grad()
        self._dropped = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the strategy was built for the parameters that were there at `prepare`."""
        raise UsageError(
            "optimizer.add_param_group after world.prepare",
            "gradients of parameters that came later would not be averaged over the ranks",
            "add all parameters first (frozen ones may be in it), then call world.prepare",
            code="LS303",
        )

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state: that of plain torch.

        Under a pipeline it numbers the parameters as on one device, and has the entries of those
        that are on this rank. Where replicas train apart it is that of the first on this rank.
        """
        if self._replica is not None:
            self._take_turn(min(r for r in (*self._states, self._replica) if r is not None))
        state = self.inner.state_dict()
        if self.places is None:
            return state
        numbers = list(chain(*self.places))
        entries = {numbers[local]: entry for local, entry in state["state"].items()}
        return _numbered(state, entries, self.counts)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the inner optimizer what `state_dict` gave, here or on one device.

        As in plain torch, the state is converted to the dtypes of the parameters.
        """
        self.inner.load_state_dict(self._begin_loading(state_dict))

    def load_saved_state(
        self, state_dict: dict[str, Any], saved_dtypes: Mapping[torch.Tensor, torch.dtype]
    ) -> None:
        """Loads a state of a checkpoint in the dtypes that it was saved in.

        Args:
            state_dict: what `state_dict` gave, here or on one device.
            saved_dtypes: the dtypes that parameters had then, as far as they are known.
        """
        load_saved_state(self.inner, self._begin_loading(state_dict), saved_dtypes)

    def _begin_loading(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Drops the states of replicas; returns what the inner optimizer is to load."""
        self._replica = None
        self._states.clear()
        if self.places is None:
            return state_dict
        saved, numbers = state_dict["state"], enumerate(chain(*self.places))
        entries = {local: saved[number] for local, number in numbers if number in saved}
        return _numbered(state_dict, entries, [len(places) for places in self.places])

    def replica_state(self, replica: int) -> Any:
        """The state of one of the replicas that train apart, as `state_dict` has it; None: none."""
        if self._replica is None:
            return None
        self._take_turn(replica)
        return self.inner.state_dict()["state"]

    def load_replica_state(self, replica: int, state: Any) -> None:
        """Takes up what `replica_state` gave."""
        if state is not None:
            self._take_turn(replica)
            self._states.pop(None, None)
            load_saved_state(self.inner, {**self.inner.state_dict(), "state": state}, {})

    def _take_turn(self, replica: int | None) -> None:
        """Puts the state of a replica in place; each begins with what was there before."""
        if replica == self._replica or replica is None:
            return
        self._states[self._replica] = self.inner.state
        if replica not in self._states:
            kept = self._states.get(None, {})
            own = {parameter: copy.deepcopy(entry) for parameter, entry in kept.items()}
            self._states[replica] = defaultdict(dict, own)
        self.inner.state = self._states.pop(replica)
        self._replica = replica

    @property
    def partial(self) -> bool:
        """Whether other ranks have parameters that this one has not."""
        return self.places is not None

    def check_kept(self) -> None:
        """Raises UsageError where gradients were cleared in the middle of a global batch."""
        cleared = all(parameter.grad is None for parameter in parameters_of(self.inner))
        if self._asked == self._step.batch and cleared:
            raise UsageError(
                "gradients cleared between the micro-batches of a global batch",
                "those of the micro-batches before are lost",
                "call optimizer.zero_grad() of the prepared optimizer, not model.zero_grad()",
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch's GradScaler when it is about to step (torch 2.11 and 2.13).

        Raises:
            UsageError: in the middle of a global batch. The scaler has divided the gradients by its
                scale, and those of later micro-batches come on top.
        """
        if not self._step.current.last:
            raise UsageError(
                "a GradScaler of your own with micro-batches",
                "it divides the gradients by its scale at each of them, those of the micro-batches "
                "before once more",
                "use lockstep.init(precision='fp16') instead, or leave micro_batch_size out",
                code="LS406",
            )
        return bool(getattr(self.inner, "_step_supports_amp_scaling", False))

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """What a closure gives; how it calls backward is looked at before anything is updated."""
        self._step.running.loss = 0.0  # it may be called more than once
        try:
            loss = closure()
            self._check_backward()
            self._before()
        except Exception as error:
            self._error_of_closure = error
            raise
        return self._whole(loss)

    def _check_backward(self) -> None:
        running = self._step.running
        present = running.micro_batch
        if running.backwards or (present.plain and self._precision.scaler is None):
            return
        if running.unstepped:
            raise UsageError(
                "optimizer.step() after another batch was fetched",
                "no backward pass has followed that batch, and the one before has not been "
                "stepped for: the step would take the weights of the wrong batch",
                "call optimizer.step() before the next batch is fetched; num_workers= and "
                "prefetch_factor= of the loader read ahead without a change to the loop",
            )
        reason = (
            f"the precision is {self._precision.name}, whose loss is scaled"
            if present.plain
            else f"this rank's part is {present.local} of {present.count} samples, "
            "so its mean counts as much as others only when weighted"
        )
        raise UsageError(
            "loss.backward() before optimizer.step()",
            reason,
            "call world.backward(loss), which weighs the loss exactly",
            code=None if present.plain else "LS206",
        )

    def _check_rates(self) -> None:
        """Whether a scheduler that is not prepared steps in the loop.

        Raises:
            UsageError: it has stepped between the micro-batches of a global batch.
        """
        batch, rates = self._step.batch, [g["lr"] for g in self.inner.param_groups if "lr" in g]
        before, self._rates = self._rates, rates
        # A rate that is a tensor is changed in place: it is one object, and nobody waits for it.
        if self._asked is None or self._asked[0] is not batch[0] or rates == before:
            return
        if self._asked[:2] == batch[:2] and not self._step.current.first:
            raise UsageError(
                "a learning rate that changes between the micro-batches of a global batch",
                f"it was {_shown(before)} and is {_shown(rates)}: a step once per micro-batch",
                "give the scheduler to world.prepare too: it then steps once per global batch",
                code="LS401",
            )
        # Torch's schedulers put a `step` of their own on the optimizer that they drive; that of an
        # epoch, which is right as it is, does not change the rate within a pass.
        driven = "step" in vars(self.inner) or "step" in vars(self)
        if driven and self._step.inside and not self.scheduled:
            self.scheduled = True
            warn(
                "a learning-rate scheduler that steps in the training loop and is not prepared",
                f"the rate went from {_shown(before)} to {_shown(rates)}; with micro-batches it "
                "would step once for each of them",
                "give it to world.prepare too: it then steps once per global batch",
                code="LS401",
            )


def _shown(rates: list[Any]) -> str:
    return ", ".join(f"{float(rate):g}" for rate in rates)


class PreparedScheduler(_Around, LRScheduler):
    """The user's scheduler: steps where the optimizer does, once per global batch or per epoch."""

    def __init__(
        self, inner: LRScheduler, prepared: PreparedOptimizer, step: Step, collectives: Collectives
    ) -> None:
        self.inner = inner
        self.prepared = prepared
        """The optimizer that it drives."""
        self._step = step
        self._collectives = collectives
        prepared.scheduled = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps unless a global batch is in the middle or its optimizer step was left out.

        Raises:
            RanksDifferError: ReduceLROnPlateau was given a metric that differs between ranks.
        """
        if (self._step.inside and self.prepared.skipped) or not self._step.current.last:
            return
        if isinstance(self.inner, ReduceLROnPlateau):
            self._check_metric(*args, **kwargs)
        self.inner.step(*args, **kwargs)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The learning rate of each parameter group."""
        return self.inner.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The inner scheduler's state."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the inner scheduler."""
        self.inner.load_state_dict(state_dict)

    def _check_metric(self, metrics: Any, *_: Any, **__: Any) -> None:
        values = self._collectives.exchange(repr(float(metrics)))
        check_same_metric("ReduceLROnPlateau.step(metric)", values, "LS402")


def choose_foreach(optimizer: Optimizer, device: torch.device) -> str | None:
    """Switches to the faster implementation with the same bits; returns the reason, if it did."""
    if device.type != "cpu" or type(optimizer) not in _SAME_BITS_FOREACH:
        return None
    flags = ("foreach", "fused", "differentiable", "capturable", "maximize")
    for group in optimizer.param_groups:
        if any(group.get(flag) for flag in flags) or group.get("foreach") is False:
            return None
        # Given as tensors, they keep torch from working on lists.
        if any(isinstance(x, torch.Tensor) for x in (group.get("lr"), *group.get("betas", ()))):
            return None
    sizes = [parameter.numel() for parameter in parameters_of(optimizer)]
    if len(sizes) < _FOREACH_TENSORS or sum(sizes) > _FOREACH_MEAN_SIZE * len(sizes):
        return None
    for group in optimizer.param_groups:
        group["foreach"] = True
    return "updates all tensors in one call; the same bits as one at a time"


def _numbered(
    state: dict[str, Any], entries: dict[int, Any], counts: Sequence[int]
) -> dict[str, Any]:
    """An optimizer's state with these entries, whose groups have so many parameters."""
    numbers = iter(range(sum(counts)))
    groups = [
        {**group, "params": list(islice(numbers, count))}
        for group, count in zip(state["param_groups"], counts, strict=False)
    ]
    return {**state, "state": entries, "param_groups": groups}
