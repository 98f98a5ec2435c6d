"""Optimizers and schedulers that step once per global batch.

The training loop runs once per micro-batch. In all but the last micro-batch of a global batch,
`step()` and `zero_grad()` do nothing, so the same loop is right with and without gradient
accumulation.

A *virtual rank* (`session.micro_batch`) is a fixed part of every global batch. If each of them
trains its own copy of the model, the optimizer steps once for each virtual rank and keeps a
separate state for each. The user's optimizer, called *inner*, holds one of these states at a time.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.checkpoint.optimizer_state import load_into_torch_optimizer
from lockstep.distributed.collectives import Collectives, check_same_metric
from lockstep.errors import UsageError, warn
from lockstep.optim.precision import Precision
from lockstep.session.delivery import cleared_gradients_error
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step, StepKey
from lockstep.strategies.base import parameters_of
from lockstep.torch_compat import answer_grad_scaler, is_sharded, unscales_gradients
from lockstep.user_code import Location, user_location

# On the CPU, torch's implementations over lists of tensors (`foreach`) give the same bits as those
# over single tensors with a fraction of the calls (tests/optim/test_accumulation.py). The fused
# implementations do not.
OPTIMIZERS_WITH_SAME_BITS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adamax,
    torch.optim.Adadelta,
)
# With few tensors, lists cost as much as they save. With large tensors, each operation reads memory
# that the previous one has pushed out of the cache, and temporary lists are as large as the model.
FOREACH_MIN_TENSORS = 8
FOREACH_MAX_MEAN_ELEMENTS = 2**14

# Every error of torch about operations on shards contains one of these words, for example
# "aten.add.Tensor: got mixed torch.Tensor and DTensor".
WORDS_OF_SHARD_ERRORS = ("DTensor", "Sharding propagation")

# The next constants decide when to warn that `step()` was called in some micro-batches of a global
# batch, but not in the last one. If that happens once, the step may be left out on purpose.
MAX_BATCHES_BETWEEN_MISSED_STEPS = 10
"""If `step()` was called in only some of the micro-batches before the last one, a warning is given
when this happens twice within this number of global batches."""

# If `step()` was called in all micro-batches before the last one (with two micro-batches, in the
# first), a warning is given only if no step was made for several global batches in a row.
MIN_STEPS_MISSED_AT_END_OF_PASS = 3
MAX_STEPS_MISSED_IN_A_ROW = 20
"""After so many, the warning does not wait for the end of the pass, which may never come."""
INCOMPLETE_STEPS_UNTIL_WARNING = 2
"""After so many optimizer steps in a row that lacked gradients, a warning is given."""


_COMMON_STATE = None
"""The key of the optimizer state with which all virtual ranks begin."""


def refuse_optimizer_wrong_on_shards(optimizer: Optimizer) -> None:
    """Raises UsageError for an optimizer that torch computes wrongly with shards, without an error.

    Adafactor takes means over the rows and columns of a parameter. Torch 2.11 and later refuse that
    for shards; in torch 2.9 the results differ from those of whole parameters.
    """
    # `torch.__version__` compares itself as a version, so 2.9 is less than 2.11.
    torch_computes_it_wrongly = torch.__version__ < "2.11"
    is_adafactor = isinstance(optimizer, torch.optim.Adafactor)
    if not (is_adafactor and torch_computes_it_wrongly):
        return

    if any(is_sharded(parameter) for parameter in parameters_of(optimizer)):
        kind = type(optimizer).__name__
        raise UsageError(
            f"{kind} on the shards of a model, with torch {torch.__version__}",
            "torch 2.9 computes it wrongly with parameters that are spread over the ranks, without "
            "an error; so it is refused before torch 2.11",
            f"use strategy='ddp' with {kind}, or another optimizer",
        )


class _DelegatesToInner:
    """A base class for objects with all attributes of the object in their `inner`."""

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet while the object is copied or unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


class PreparedOptimizer(_DelegatesToInner, Optimizer):
    """The user's optimizer, which steps once per global batch.

    It shares the parameter groups and the state of the inner optimizer.

    Args:
        inner: the user's optimizer.
        step: the state of the current optimizer step.
        precision: makes the step, with the loss scaler if there is one.
        modules: the prepared modules that have the optimizer's parameters.
        collectives: the collectives of the run; None for one process.
    """

    def __init__(
        self,
        inner: Optimizer,
        step: Step,
        precision: Precision,
        modules: Sequence[nn.Module] = (),
        collectives: Collectives | None = None,
    ) -> None:
        # super().__init__() is not called, because groups, state and hooks are those of `inner`.
        self.inner = inner
        self.modules = modules
        self.as_extension = _OptimizerEvents(self)
        self._step = step
        self._precision = precision
        self._collectives = collectives

        self.stepping = False
        """True while the inner optimizer is in a step that this optimizer has called."""
        self.skipped = False
        """True if the loss scaler skipped the latest step because a gradient was infinite."""
        self.has_prepared_scheduler = False
        """True if a scheduler of this optimizer is prepared, or if the warning about one that is
        not was given."""
        self.numbers_on_one_device: list[list[int]] | None = None
        """If other ranks have some of the parameters: for each group, the numbers that the
        parameters on this rank would have on one device."""
        self.origins_on_one_device: list[list[tuple[nn.Module, str]]] = []
        """If other ranks have some of the parameters: for each group, the prepared module of each
        parameter, over all ranks, and the parameter's name in it."""
        self.num_parameters_of_groups: list[int] = []
        """If other ranks have some of the parameters: the number of parameters in each group, over
        all ranks."""

        # A `StepKey` (`self._step.key`) identifies an optimizer step. While a global batch is
        # computed the key stays the same, so it tells whether two events belong to one step.
        self._key_of_latest_call: StepKey | None = None
        """The optimizer step to which the latest call of `step()` belonged."""
        self._key_of_latest_step: StepKey | None = None
        """The optimizer step in which the inner optimizer stepped last."""

        self._num_early_calls = 0
        """How often `step()` was called in the present global batch before its last micro-batch."""
        self._line_of_early_call: Location | None = None
        """The line of the user's script with the first of these calls."""
        self._warned_of_missed_step = False
        self._is_clipped = False
        """True if the gradient of the present global batch was clipped."""
        self._num_batches_seen = 0
        """The number of global batches that were computed as a whole."""
        self._steps_missed_in_a_row = 0
        """For how many global batches in a row the optimizer has not stepped, although `step()` was
        called."""
        self._latest_batch_with_missed_step: int | None = None
        """The number of the latest global batch with a missed step in which `step()` was called in
        some of the micro-batches before the last one, but not in all of them."""
        self._line_of_missed_call: Location | None = None
        """The line of the user's script that called `step()` in the latest such global batch."""
        self._early_calls_of_missed_step = (0, 0)
        """In how many of its micro-batches `step()` was called in the latest global batch with a
        missed step, and how many micro-batches it had."""

        self.num_backwards = 0
        """The number of backward passes since the present optimizer step began to accumulate."""
        self._key_of_incomplete_step: StepKey | None = None
        """The latest optimizer step that lacks gradients, because `zero_grad()` cleared those of
        some of its micro-batches."""
        self._num_incomplete_steps_in_a_row = 0
        """How many times in a row the optimizer has made such a step."""
        self._warned_of_incomplete_steps = False
        self._step_with_postponed_clearing: StepKey | None = None
        """The optimizer step in which a call of `zero_grad()` was postponed last."""
        self._learning_rates: list[Any] = []
        """The learning rates at the latest call of `step()`."""
        self._error_of_closure: Exception | None = None
        """The error that the user's closure raised last."""
        self._has_plain_zero_grad = type(inner).zero_grad is Optimizer.zero_grad

        self._active_virtual_rank: int | None = _COMMON_STATE
        """The virtual rank whose state the inner optimizer holds; `_COMMON_STATE` before the first
        step, and without virtual ranks."""
        self._states: dict[int | None, Any] = {}
        """The states that the inner optimizer does not hold at present, by virtual rank. The key
        `_COMMON_STATE` has the state with which all virtual ranks begin."""

    def __repr__(self) -> str:
        return f"Prepared{self.inner!r}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps in the last micro-batch before an optimizer step; in others it returns None.

        Raises:
            UsageError: `loss.backward()` was called although the loss must be weighted, or learning
                rates changed within a global batch.
        """
        if closure is not None:
            _check_closure_sees_whole_batch(self._step.micro_batch)
        else:
            self._find_micro_batch_of_own_backward()
            self._check_backward()

        micro_batch = self._step.micro_batch
        self._check_learning_rates()
        self._key_of_latest_call = self._step.key
        if not micro_batch.closes_step:
            self._note_early_call()
            return None

        # A virtual rank that trains its own copy of the model steps with its own state.
        if micro_batch.virtual_rank is not None and micro_batch.has_own_step:
            self._activate_state_of(micro_batch.virtual_rank.number)
            self._drop_common_state_if_unused(micro_batch.virtual_rank.num_on_process)

        return self._take_step(closure, micro_batch)

    def _find_micro_batch_of_own_backward(self) -> None:
        """Makes the step know which micro-batch the loss of a user's own `loss.backward()` is of.

        `World.backward` does the same for its loss, so nothing is done after it.
        """
        called_world_backward = self._step.training_pass.num_backwards > 0
        if not called_world_backward:
            self._step.source_of_loss()  # sets `micro_batch`

    def _note_early_call(self) -> None:
        """Counts a call of `step()` before the last micro-batch, which does nothing.

        A loop that calls it there, but not in the last micro-batch, is warned of later.
        """
        if self._num_early_calls == 0:
            self._line_of_early_call = user_location()
        self._num_early_calls += 1

    def _take_step(self, closure: Callable[[], Any] | None, micro_batch: MicroBatch) -> Any:
        """Makes the inner optimizer step, and tells the extensions before and after the step.

        Args:
            closure: the user's closure, which the inner optimizer evaluates; None without one.
            micro_batch: the micro-batch after which the optimizer steps.

        Returns:
            The return value of the inner optimizer.
        """
        extensions = self._step.extensions
        key = self._step.key  # identifies the present optimizer step
        self._step.enter_phase("optimizer")

        # Extensions get the gradients before the optimizer steps. With a closure there are no
        # gradients yet, so `_evaluate_closure` tells the extensions.
        evaluate = None
        if closure is None:
            extensions.before_step(self.inner, self.modules)
        else:
            evaluate = partial(self._evaluate_closure, closure)

        self.stepping = True
        try:
            result, self.skipped = self._precision.step(self.inner, evaluate)
        except Exception as error:
            error_on_shards = self._explain_shard_error(error)
            if error_on_shards is not None:
                raise error_on_shards from error
            raise
        finally:
            self.stepping = False

        self._key_of_latest_step = key

        # If `zero_grad()` was called between the micro-batches of this step, the step was made with
        # only a part of the gradients. A warning is given if that happens repeatedly.
        lacks_gradients = self._key_of_incomplete_step == key
        self._count_incomplete_step(lacks_gradients=lacks_gradients)

        # If virtual ranks train copies of the model, the optimizer steps once for each of them. The
        # global batch is trained after the step of the last one.
        if micro_batch.last:
            self._step.mark_stepped()

        extensions.after_step(self.inner, self.modules)
        if micro_batch.last:
            extensions.global_batch_trained()

        self._step.enter_phase("other")
        return result

    def _explain_shard_error(self, error: Exception) -> UsageError | None:
        """Returns an error with advice if the step failed because of sharded parameters.

        Returns:
            The error to raise, or None if the error of the step has another cause.
        """
        if error is self._error_of_closure:  # raised in the user's closure, not by the optimizer
            return None
        if not any(words in str(error) for words in WORDS_OF_SHARD_ERRORS):
            return None
        if not any(is_sharded(parameter) for parameter in parameters_of(self.inner)):
            return None

        kind = type(self.inner).__name__
        first_line = str(error).strip().splitlines()[0]
        first_sentence = first_line.split(". ")[0]
        return UsageError(
            f"{kind}.step() on the shards of a model",
            "torch cannot compute it with parameters that are spread over the ranks "
            f"({first_sentence[:200]})",
            f"use strategy='ddp' with {kind}, or an optimizer that updates every element by itself "
            "and without masks, such as SGD, Adam, AdamW, RMSprop or Adagrad",
        )

    def _evaluate_closure(self, closure: Callable[[], Any]) -> Any:
        """Calls the user's closure, and checks its gradients before anything is updated.

        Returns:
            The loss of the global batch, on which some optimizers base decisions.
        """
        # The optimizer may evaluate the closure more than once. `World.backward` adds its loss to
        # the loss of the global batch, so that loss is reset before each evaluation.
        self._step.training_pass.loss = 0.0
        try:
            loss = closure()
            self._check_backward()
            self._step.extensions.before_step(self.inner, self.modules)
        except Exception as error:
            # It is the user's error, which is not to be explained as one of the optimizer.
            self._error_of_closure = error
            raise

        return self._mean_over_global_batch(loss)

    def _mean_over_global_batch(self, loss: Any) -> Any:
        """Returns the mean loss over the global batch, for the mean loss over this rank's samples.

        The scale of a micro-batch is the number of this rank's samples, divided by that of all
        samples, times the number of ranks. For example, two ranks with 3 samples and 1 sample have
        the scales 1.5 and 0.5: the mean over the ranks of the scaled losses is the mean over all 4
        samples.
        """
        if self._collectives is None or self._collectives.single_process:
            return loss
        if not isinstance(loss, Tensor | float):  # the closure returns None, for example
            return loss

        scale = self._step.micro_batch_of_loss.scale
        has_samples = scale != 0.0
        if has_samples:
            scaled_loss = loss * scale
        else:
            scaled_loss = 0.0  # even if the loss is NaN
        return self._collectives.mean(scaled_loss)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; does nothing while a global batch is accumulating them.

        The accumulated gradients are kept for the optimizer step at the end of the global batch. If
        the loop leaves this step out, `clear_if_postponed` clears them before the next one. With 2
        micro-batches, for example:

            step(), zero_grad()   in micro-batch 0: neither does anything yet
            step(), zero_grad()   in micro-batch 1: the optimizer steps, and gradients are cleared
        """
        if self._is_accumulating():
            self._step_with_postponed_clearing = self._key_of_latest_call
            return

        self._note_if_step_becomes_incomplete()
        if set_to_none and self._has_plain_zero_grad:
            # The same as in torch, without its profiling, which takes ten times as long.
            for group in self.inner.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            self.inner.zero_grad(set_to_none)

    def _note_if_step_becomes_incomplete(self) -> None:
        """Notes the present optimizer step if it still needs the gradients that are to be cleared.

        These are the gradients of its earlier micro-batches. If the step is made without them, it
        is incomplete, and `_take_step` counts it. The loop may also leave the step out on purpose,
        for example because a loss was not finite. Then the note has no effect.
        """
        present_step = self._step.key
        was_made = self._key_of_latest_step == present_step
        needs_gradients = self.num_backwards > 0 and not was_made
        if needs_gradients and not self._step.micro_batch.is_only_of_step:
            self._key_of_incomplete_step = present_step

    def _is_accumulating(self) -> bool:
        """Returns True if the gradients of earlier micro-batches wait for an optimizer step.

        They do from the first call of `step()` in a global batch, which does nothing if further
        micro-batches follow, until the call in its last micro-batch. So gradients are also kept in
        loops that call `zero_grad()` after `step()`.
        """
        key = self._key_of_latest_call
        if key is None:  # `step()` was never called
            return False

        has_stepped = self._key_of_latest_step == key
        return not has_stepped and self._step.is_still_due(key)

    def _count_incomplete_step(self, *, lacks_gradients: bool) -> None:
        """Counts incomplete steps in a row, and warns, once, if there are several.

        An incomplete step lacks gradients: `zero_grad()` had cleared those of some micro-batches
        before the optimizer stepped. In a single step that may be on purpose, to drop a loss that
        is not finite. So the warning is only given after `INCOMPLETE_STEPS_UNTIL_WARNING` of them.

        Args:
            lacks_gradients: True if the step that was just made is incomplete.
        """
        if not lacks_gradients:
            self._num_incomplete_steps_in_a_row = 0
            return

        self._num_incomplete_steps_in_a_row += 1
        if self._num_incomplete_steps_in_a_row < INCOMPLETE_STEPS_UNTIL_WARNING:
            return

        # Missed steps have the same cause, calls under a condition, and their warning has the same
        # advice.
        was_warned = self._warned_of_incomplete_steps or self._warned_of_missed_step
        if was_warned:
            return

        self._warned_of_incomplete_steps = True
        warn(
            "optimizer.zero_grad() between the micro-batches of a global batch",
            "it cleared the gradients of earlier micro-batches, so the optimizer has stepped with "
            "those of the later ones only",
            "call optimizer.step() and optimizer.zero_grad() in every iteration, without a "
            "condition: both act once for each global batch",
        )

    def clear_if_postponed(self) -> None:
        """Clears gradients of a global batch whose step was left out, before the next begins.

        It does so if `zero_grad()` was postponed and the optimizer has not stepped since.
        """
        postponed_in = self._step_with_postponed_clearing
        if postponed_in is not None and postponed_in != self._key_of_latest_step:
            self.inner.zero_grad()
        self._step_with_postponed_clearing = None

    def begin_global_batch(self) -> None:
        """Resets what is recorded about the calls of a global batch."""
        self.num_backwards = 0
        self._num_early_calls = 0
        self._line_of_early_call = None
        self._is_clipped = False

    def note_clipping(self) -> None:
        """Records that the gradient of the present global batch was clipped, so it is complete."""
        self._is_clipped = True

    def count_missed_step(self, num_micro_batches: int) -> None:
        """Counts a global batch after its last micro-batch, and warns if steps are missed.

        A step is missed if the loop has called `step()` early, before the last micro-batch, but not
        in the last one, after which the optimizer steps. Of the micro-batches 0 to 3, `step()` was
        called in:

            3 (and others)   the step is made
            none             no step is due for this global batch
            0, 1 and 2       missed, perhaps on purpose, because the last loss was not finite: a
                             warning is given after many such global batches in a row
            only 1           missed: the loop counts batches itself, for example by
                             `if i % 3 == 0`: a warning is given the second time

        A step that was left out after the gradient was clipped is not missed: the script may have
        looked at the gradient's norm.

        Args:
            num_micro_batches: the number of micro-batches in the global batch, all of which had a
                backward pass.
        """
        self._num_batches_seen += 1
        if self._has_made_requested_step():
            self._steps_missed_in_a_row = 0
            return

        num_early_calls = self._num_early_calls
        no_step_is_due = num_early_calls == 0
        if no_step_is_due or self._is_clipped:
            return

        self._steps_missed_in_a_row += 1
        self._line_of_missed_call = self._line_of_early_call
        self._early_calls_of_missed_step = (num_early_calls, num_micro_batches)

        only_last_call_is_missing = num_early_calls == num_micro_batches - 1
        if only_last_call_is_missing:
            self._warn_if_missed_many_in_a_row()
        else:
            self._warn_if_missed_a_second_time()

    def _has_made_requested_step(self) -> bool:
        """Returns True if the optimizer has made the step that the loop has last called for.

        Each global batch has one step, for which the loop may call `step()` in several
        micro-batches. Only the call in the last micro-batch makes the step. If `step()` was never
        called, no step was due, and the result is True.
        """
        return self._key_of_latest_step == self._key_of_latest_call

    def _warn_if_missed_many_in_a_row(self) -> None:
        """Warns if the optimizer did not step for many global batches in a row."""
        if self._steps_missed_in_a_row >= MAX_STEPS_MISSED_IN_A_ROW:
            self._warn_of_missed_step()

    def _warn_if_missed_a_second_time(self) -> None:
        """Warns if a loop that counts batches itself has missed two steps within a few batches.

        It is called after each missed step of such a loop. Example: 4 micro-batches make up a
        global batch, and the loop calls `step()` if `i % 3 == 0`:

            i = 0, 1, 2, 3: called at 0 and 3, the last one, so the optimizer steps
            i = 4, 5, 6, 7: called only at 6: the first missed step
            i = 8, 9, 10, 11: called only at 9: the second missed step, one batch later
        """
        previous_batch = self._latest_batch_with_missed_step
        present_batch = self._num_batches_seen
        self._latest_batch_with_missed_step = present_batch

        if previous_batch is None:  # this is the first missed step
            return
        if present_batch - previous_batch <= MAX_BATCHES_BETWEEN_MISSED_STEPS:
            self._warn_of_missed_step()

    def warn_at_end_of_pass(self) -> None:
        """Warns if the optimizer did not step for the last few global batches of a pass.

        With two micro-batches, `step()` was then called in the first one of each.
        """
        if self._steps_missed_in_a_row >= MIN_STEPS_MISSED_AT_END_OF_PASS:
            self._warn_of_missed_step()

    def _warn_of_missed_step(self) -> None:
        """Warns, once, that the optimizer has not stepped although `step()` was called."""
        if self._warned_of_missed_step:
            return

        self._warned_of_missed_step = True
        early_calls, num_micro_batches = self._early_calls_of_missed_step
        warn(
            "optimizer.step() in some micro-batches of a global batch",
            f"it was called in {early_calls} of {num_micro_batches} micro-batches, but not "
            "in the last one, after which the optimizer steps: it has not stepped for this global "
            "batch",
            "call optimizer.step() in every iteration and count no batches: it steps once for each "
            "global batch",
            code="LS405",
            at=self._line_of_missed_call,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError, as strategies only know the parameters that `prepare` was given."""
        raise UsageError(
            "optimizer.add_param_group after world.prepare",
            "gradients of parameters that came later would not be averaged over the ranks",
            "add all parameters first (frozen ones may be in it), then call world.prepare",
            code="LS303",
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the inner optimizer, in the format of torch.

        Under a pipeline the parameters have the same numbers as on one device, and only those on
        this rank have entries. With virtual ranks it is the state of the first virtual rank on this
        process.
        """
        self._activate_first_virtual_rank()
        state: dict[str, Any] = self.inner.state_dict()
        if self.numbers_on_one_device is None:  # this rank has all parameters
            return state

        # Other ranks have some of the parameters. The inner optimizer numbers only the parameters
        # on this rank, from 0; in the result they get the numbers that they have on one device.
        global_numbers = list(chain(*self.numbers_on_one_device))
        entries = {}
        for number_here, entry in state["state"].items():
            entries[global_numbers[number_here]] = entry

        return _replace_entries(state, entries, self.num_parameters_of_groups)

    def _activate_first_virtual_rank(self) -> None:
        """Gives the inner optimizer the state of the first virtual rank on this process.

        Before the first step, and without virtual ranks, it holds the only state that there is.
        """
        if self._active_virtual_rank is _COMMON_STATE:
            return
        others = [number for number in self._states if number is not _COMMON_STATE]
        first_virtual_rank = min([self._active_virtual_rank, *others])
        self._activate_state_of(first_virtual_rank)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that `state_dict` returned, on this rank or on one device.

        As in torch, the state is converted to the dtypes of the parameters.
        """
        self._forget_virtual_ranks()
        self.inner.load_state_dict(self._select_parameters_here(state_dict))

    def load_saved_state(
        self, state_dict: dict[str, Any], saved_dtypes: Mapping[torch.Tensor, torch.dtype]
    ) -> None:
        """Loads the state of a checkpoint in the dtypes in which it was saved.

        Args:
            state_dict: what `state_dict` returned, on this rank or on one device.
            saved_dtypes: the dtypes of the parameters when it was saved, if they are known.
        """
        self._forget_virtual_ranks()
        load_into_torch_optimizer(
            self.inner, self._select_parameters_here(state_dict), saved_dtypes
        )

    def _forget_virtual_ranks(self) -> None:
        """Drops the states of virtual ranks: all begin with the state that is loaded next."""
        self._active_virtual_rank = _COMMON_STATE
        self._states.clear()

    def _select_parameters_here(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a state for the parameters on this rank only, numbered from 0.

        If this rank has parameter 1 of the first parameter group and parameters 3 and 4 of the
        second, `numbers_on_one_device` is `[[1], [3, 4]]`, and they get the numbers 0, 1 and 2.

        Args:
            state_dict: the state for all parameters, numbered as on one device. If this rank has
                all parameters, it is returned unchanged.
        """
        if self.numbers_on_one_device is None:  # this rank has all parameters
            return state_dict

        saved_entries = state_dict["state"]
        global_numbers = list(chain(*self.numbers_on_one_device))
        entries = {}
        for number_here, global_number in enumerate(global_numbers):
            if global_number in saved_entries:
                entries[number_here] = saved_entries[global_number]

        num_parameters_here = [len(numbers) for numbers in self.numbers_on_one_device]
        return _replace_entries(state_dict, entries, num_parameters_here)

    def virtual_rank_state(self, number: int) -> Any:
        """Returns the state of a virtual rank, as in `state_dict`; None if it has none."""
        if self._active_virtual_rank is _COMMON_STATE:
            return None
        self._activate_state_of(number)
        return self.inner.state_dict()["state"]

    def load_virtual_rank_state(self, number: int, state: Any) -> None:
        """Loads what `virtual_rank_state` returned for a virtual rank."""
        if state is not None:
            self._activate_state_of(number)
            # All virtual ranks are loaded, one after the other, so none begins with this state.
            self._states.pop(_COMMON_STATE, None)
            load_into_torch_optimizer(self.inner, {**self.inner.state_dict(), "state": state}, {})

    def _activate_state_of(self, virtual_rank: int) -> None:
        """Gives the inner optimizer the state of a virtual rank.

        The first time, this is a copy of the state with which all virtual ranks begin.
        """
        if virtual_rank == self._active_virtual_rank:
            return

        # Put the present state of the inner optimizer away: that of another virtual rank or, the
        # first time, the one with which all begin, under the key `_COMMON_STATE`.
        self._states[self._active_virtual_rank] = self.inner.state

        is_first_time = virtual_rank not in self._states
        if is_first_time:
            common_state = self._states.get(_COMMON_STATE, {})
            state: dict[Any, Any] = defaultdict(dict)
            for parameter, entry in common_state.items():
                state[parameter] = copy.deepcopy(entry)
            self._states[virtual_rank] = state

        self.inner.state = self._states.pop(virtual_rank)
        self._active_virtual_rank = virtual_rank

    def _drop_common_state_if_unused(self, num_virtual_ranks: int) -> None:
        """Drops the common state once all virtual ranks of this process have their own state.

        Args:
            num_virtual_ranks: number of virtual ranks that this process computes.
        """
        # One state is in the inner optimizer, the others are in `_states`.
        others = [number for number in self._states if number is not _COMMON_STATE]
        if 1 + len(others) == num_virtual_ranks:
            self._states.pop(_COMMON_STATE, None)

    @property
    def partial(self) -> bool:
        """True if other ranks have parameters that are not on this rank."""
        return self.numbers_on_one_device is not None

    def check_gradients_are_there(self) -> None:
        """Raises UsageError if gradients were cleared in the middle of a global batch."""
        if self._key_of_latest_call != self._step.key:
            return  # gradients only accumulate once `step()` was called in a micro-batch
        if all(parameter.grad is None for parameter in parameters_of(self.inner)):
            raise cleared_gradients_error()

    def _divides_by_scale_itself(self) -> bool:
        """Answers whether the inner optimizer divides the gradients by the scale of a GradScaler.

        A GradScaler of the user's own reads this as the attribute `_step_supports_amp_scaling` in
        `scaler.step(optimizer)`. If it is True, as of torch's fused optimizers, the GradScaler
        leaves the division to the optimizer.

        Raises:
            UsageError: `scaler.step(optimizer)` was called before the last micro-batch of a global
                batch. Each call divides all gradients that have accumulated: with 2 micro-batches,
                the gradients of the first one would be divided by the scale twice.
        """
        if not self._step.micro_batch.last:
            raise UsageError(
                "a GradScaler of your own with micro-batches",
                "it divides the gradients by its scale at each of them, those of the micro-batches "
                "before once more",
                "use lockstep.init(precision='fp16') instead, or leave micro_batch_size out",
                code="LS406",
            )

        return unscales_gradients(self.inner)

    def _check_backward(self) -> None:
        """Raises UsageError if `loss.backward()` was called although the loss must be weighted."""
        training_pass = self._step.training_pass
        micro_batch = training_pass.micro_batch
        called_world_backward = training_pass.num_backwards > 0
        if called_world_backward:
            return

        # `plain` means that every rank has the factor 1: an unweighted loss gives the same
        # gradients. Under fp16 the loss is also multiplied by the scale of the loss scaler.
        needs_no_factor = micro_batch.plain and self._precision.scaler is None
        if needs_no_factor:
            return

        # First case: the loop calls `step()` late. It had called `World.backward` for the previous
        # batch, and has fetched another one before the optimizer stepped.
        is_step_for_previous_batch = training_pass.step_left_out
        if is_step_for_previous_batch:
            raise UsageError(
                "optimizer.step() after another batch was fetched",
                "no backward pass has followed that batch, and the one before has not been "
                "stepped for: the step would take the weights of the wrong batch",
                "call optimizer.step() before the next batch is fetched; num_workers= and "
                "prefetch_factor= of the loader read ahead without a change to the loop",
            )

        # Second case: the loop calls `loss.backward()`. Say why that is not enough.
        if micro_batch.plain:
            reason = f"the precision is {self._precision.name}, whose loss is scaled"
            code = None
        else:
            reason = (
                f"this rank's part is {micro_batch.local_rows} of {micro_batch.global_samples} "
                "samples, so its mean counts as much as others only when weighted"
            )
            code = "LS206"

        raise UsageError(
            "loss.backward() before optimizer.step()",
            reason,
            "call world.backward(loss), which weighs the loss exactly",
            code=code,
        )

    def _check_learning_rates(self) -> None:
        """Warns of schedulers that are not prepared and step in the training loop.

        Such a scheduler is recognised by a learning rate that has changed since the latest call of
        `step()`.

        Raises:
            UsageError: the learning rate has changed between the micro-batches of a global batch.
        """
        rates_before = self._learning_rates
        rates = [group["lr"] for group in self.inner.param_groups if "lr" in group]
        self._learning_rates = rates
        if self._key_of_latest_call is None:
            return  # this is the first call of `step()`

        # A rate that is a tensor is changed in place, so no difference is seen here.
        if rates == rates_before:
            return

        training_pass, global_batch, _ = self._step.key
        training_pass_before, global_batch_before, _ = self._key_of_latest_call
        if training_pass is not training_pass_before:
            return  # a scheduler may step between two epochs without being prepared

        old = _format_rates(rates_before)
        new = _format_rates(rates)
        if global_batch == global_batch_before and not self._step.micro_batch.first:
            raise UsageError(
                "a learning rate that changes between the micro-batches of a global batch",
                f"it was {old} and is {new}: a step once per micro-batch",
                "give the scheduler to world.prepare too: it then steps once per global batch",
                code="LS401",
            )

        if not self._step.in_training_loop or self.has_prepared_scheduler:
            return

        # The rate may have been set by hand instead. Torch's schedulers are recognised because they
        # set another method `step` on the optimizer object.
        is_driven_by_scheduler = "step" in vars(self.inner) or "step" in vars(self)
        if is_driven_by_scheduler:
            self.has_prepared_scheduler = True  # warn only once
            warn(
                "a learning-rate scheduler that steps in the training loop and is not prepared",
                f"the rate went from {old} to {new}; with micro-batches it would step once for "
                "each of them",
                "give it to world.prepare too: it then steps once per global batch",
                code="LS401",
            )


answer_grad_scaler(PreparedOptimizer, PreparedOptimizer._divides_by_scale_itself)


class _OptimizerEvents(Extension):
    """Tells a prepared optimizer about the events of global batches."""

    def __init__(self, optimizer: PreparedOptimizer) -> None:
        self._optimizer = optimizer
        self._num_micro_batches_trained = 0
        """The number of micro-batches in the present global batch, once all of them had a backward
        pass; 0 before that."""

    def begin(self, micro_batch: MicroBatch) -> None:
        """Clears gradients that are left from a global batch without an optimizer step."""
        if micro_batch.opens_step:
            self._check_previous_global_batch()
            self._optimizer.clear_if_postponed()

    def after_backward(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Records when all micro-batches of a global batch have had a backward pass."""
        self._optimizer.num_backwards += 1
        is_complete = self._optimizer.num_backwards >= micro_batch.num_micro_batches
        if micro_batch.closes_step and is_complete:
            self._num_micro_batches_trained = micro_batch.num_micro_batches

    def pass_ended(self) -> None:
        """Checks the last global batch of a pass, and the steps of the pass."""
        self._check_previous_global_batch()
        self._optimizer.warn_at_end_of_pass()

    def _check_previous_global_batch(self) -> None:
        """Records whether the optimizer has stepped for the previous global batch."""
        if self._num_micro_batches_trained:
            self._optimizer.count_missed_step(self._num_micro_batches_trained)
        self._num_micro_batches_trained = 0
        self._optimizer.begin_global_batch()

    def clear_gradients(self) -> None:
        """Clears the gradients of a global batch that the loop has left early."""
        self._optimizer.inner.zero_grad()


def _format_rates(rates: Sequence[Any]) -> str:
    return ", ".join(f"{float(rate):g}" for rate in rates)


class PreparedScheduler(_DelegatesToInner, LRScheduler):
    """The user's scheduler, which steps once per global batch, or once per epoch.

    Args:
        inner: the user's scheduler.
        prepared_optimizer: the prepared optimizer whose learning rate it sets.
        step: the state of the current optimizer step.
        collectives: the collectives of the run.
    """

    def __init__(
        self,
        inner: LRScheduler,
        prepared_optimizer: PreparedOptimizer,
        step: Step,
        collectives: Collectives,
    ) -> None:
        self.inner = inner
        self.prepared_optimizer = prepared_optimizer
        self._step = step
        self._collectives = collectives
        self.num_steps = 0
        """How often the inner scheduler has stepped. Not every scheduler has torch's `last_epoch`:
        ChainedScheduler does not."""
        prepared_optimizer.has_prepared_scheduler = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps after the last micro-batch of a global batch; does nothing in earlier ones.

        If the loss scaler has skipped the optimizer's step for this global batch, the scheduler
        does not step either.

        Raises:
            RanksDifferError: ReduceLROnPlateau was given a metric that differs between ranks.
        """
        is_within_global_batch = not self._step.micro_batch.last  # never so after the loop
        if is_within_global_batch:
            return

        # A call in the loop is for the present global batch. A call after the loop is for the whole
        # epoch, and then it does not matter whether the optimizer's last step was skipped.
        is_for_global_batch = self._step.in_training_loop
        if is_for_global_batch and self.prepared_optimizer.skipped:
            return

        if isinstance(self.inner, ReduceLROnPlateau):
            self._check_metric(*args, **kwargs)
        self.inner.step(*args, **kwargs)
        self.num_steps += 1

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Returns the learning rate of each parameter group."""
        return self.inner.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Returns the inner scheduler's state."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state into the inner scheduler."""
        self.inner.load_state_dict(state_dict)

    def _check_metric(self, metrics: Any, *_: Any, **__: Any) -> None:
        """Raises RanksDifferError if the metric that `step` was given differs between ranks.

        With different metrics, ranks would lower the learning rate at different times.
        """
        values = self._collectives.exchange(repr(float(metrics)))
        check_same_metric("ReduceLROnPlateau.step(metric)", values, "LS402")


def _check_closure_sees_whole_batch(micro_batch: MicroBatch) -> None:
    """Raises UsageError if a closure would be evaluated on only a part of the samples of a step."""
    # Under DiLoCo each virtual rank has its own step. Otherwise one step is for all virtual ranks,
    # which are computed one after the other, and the closure would only see one of them.
    has_virtual_rank = micro_batch.virtual_rank is not None
    if has_virtual_rank and not micro_batch.has_own_step:
        raise UsageError(
            "optimizer.step(closure) with virtual_ranks",
            "the closure would be evaluated on the part of one virtual rank",
            "leave virtual_ranks out, or use an optimizer without closures",
        )

    # `micro_batch_size` divides global batches. With shares "auto" the first global batch is
    # divided, too: its first samples serve to measure the speeds.
    is_whole_global_batch = micro_batch.first and micro_batch.last
    if not is_whole_global_batch:
        raise UsageError(
            "optimizer.step(closure) with micro-batches",
            "the closure would be evaluated on a part of the global batch",
            "leave micro_batch_size out, and if shares are 'auto', give numbers instead; or call "
            "optimizer.step() without a closure",
        )


def choose_foreach(optimizer: Optimizer, device: torch.device) -> str | None:
    """Switches an optimizer to `foreach` if this is faster and gives the same bits.

    `foreach` is torch's implementation that works on lists of tensors.

    Returns:
        The reason to print; None if nothing was changed.
    """
    if device.type != "cpu" or type(optimizer) not in OPTIMIZERS_WITH_SAME_BITS:
        return None

    # With `fused` the user has chosen another implementation. With the others it is not tested
    # that `foreach` gives the same bits.
    flags_against_foreach = ("fused", "differentiable", "capturable", "maximize")
    for group in optimizer.param_groups:
        user_has_chosen = group.get("foreach") is not None
        if user_has_chosen or any(group.get(flag) for flag in flags_against_foreach):
            return None

        # `foreach` does not accept a learning rate or beta that is a tensor itself.
        settings = [group.get("lr"), *group.get("betas", ())]
        if any(isinstance(setting, torch.Tensor) for setting in settings):
            return None

    sizes = [parameter.numel() for parameter in parameters_of(optimizer)]
    if len(sizes) < FOREACH_MIN_TENSORS:
        return None

    mean_size = sum(sizes) / len(sizes)
    if mean_size > FOREACH_MAX_MEAN_ELEMENTS:
        return None

    for group in optimizer.param_groups:
        group["foreach"] = True

    return "updates all tensors in one call; the same bits as one at a time"


def _replace_entries(
    state: dict[str, Any], entries: dict[int, Any], num_parameters_of_groups: Sequence[int]
) -> dict[str, Any]:
    """Returns an optimizer's state with new entries and other numbers of parameters in the groups.

    In the state, parameters are numbered over all groups: with 2 and 1 parameters in two groups,
    the groups have the parameters `[0, 1]` and `[2]`.

    Args:
        state: what an optimizer's `state_dict` returned; it is not changed.
        entries: the new state of each parameter, by the number of the parameter.
        num_parameters_of_groups: the new number of parameters in each group.
    """
    groups = []
    next_number = 0
    # The state may come from an optimizer with another number of groups. Then only the groups that
    # both have are kept.
    for group, count in zip(state["param_groups"], num_parameters_of_groups, strict=False):
        numbers = list(range(next_number, next_number + count))
        groups.append({**group, "params": numbers})
        next_number += count
    return {**state, "state": entries, "param_groups": groups}
