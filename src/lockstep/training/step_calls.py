"""Follows in which micro-batches a training loop calls `step()` and `zero_grad()` of an optimizer.

Only the calls in the last micro-batch of a global batch do something. Loops that make them in some
micro-batches only, because they count batches themselves, are warned here: their optimizer misses
steps, or steps with a part of the gradients.
"""

from __future__ import annotations

from torch import Tensor

from lockstep.errors import UsageError, warn
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step, StepKey
from lockstep.user_code import Location, user_location

# The next constants decide when to warn that `step()` was called in some micro-batches of a global
# batch, but not in the last one. If that happens once, the step may be left out on purpose.
MAX_GLOBAL_BATCHES_BETWEEN_MISSED_STEPS = 10
"""If `step()` was called in only some of the micro-batches before the last one, a warning is given
when this happens twice within this number of global batches."""

# If `step()` was called in all micro-batches before the last one (with two micro-batches, in the
# first), a warning is given only if no step was made for several global batches in a row.
MIN_STEPS_MISSED_AT_END_OF_PASS = 3
MAX_STEPS_MISSED_IN_A_ROW = 20
"""After so many, the warning does not wait for the end of the pass, which may never come."""
INCOMPLETE_STEPS_UNTIL_WARNING = 2
"""After so many optimizer steps in a row that lacked gradients, a warning is given."""


class StepCalls(Extension):
    """The calls of `step()` and `zero_grad()` of one optimizer.

    A `StepKey` (`Step.key`) identifies an optimizer step. While a global batch is computed the key
    stays the same, so it tells whether two events belong to one step.

    Args:
        step: the state of the current optimizer step.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.key_of_latest_call: StepKey | None = None
        """The optimizer step to which the latest call of `step()` belonged."""
        self.key_of_latest_step: StepKey | None = None
        """The optimizer step in which the inner optimizer stepped last."""

        self._num_backwards = 0
        """The number of backward passes since the present optimizer step began to accumulate."""
        self._has_gradients_of_micro_batch = False
        """True once the present micro-batch had a backward pass."""
        self._clearing_was_postponed = False
        """True if `zero_grad()` should have cleared the gradients of the present micro-batch, and
        they were kept."""
        self._num_micro_batches_trained = 0
        """The number of micro-batches in the present global batch, once all of them had a backward
        pass; 0 before that."""
        self._num_early_calls = 0
        """How often `step()` was called in the present global batch before its last micro-batch."""
        self._line_of_early_call: Location | None = None
        """The line of the user's script with the first of these calls."""
        self.is_clipped = False
        """True if the gradient of the present global batch was clipped."""

        self._num_global_batches = 0
        """The number of global batches that were computed as a whole."""
        self._steps_missed_in_a_row = 0
        """For how many global batches in a row the optimizer has not stepped, although `step()` was
        called."""
        self._latest_global_batch_with_missed_step: int | None = None
        """The number of the latest global batch with a missed step in which `step()` was called in
        some of the micro-batches before the last one, but not in all of them."""
        self._line_of_missed_call: Location | None = None
        """The line of the user's script that called `step()` in the latest such global batch."""
        self._num_calls_of_missed_step = 0
        """In how many micro-batches `step()` was called in the latest global batch with a missed
        step."""
        self._num_micro_batches_of_missed_step = 0
        """How many micro-batches that global batch had."""
        self._warned_of_missed_step = False

        self._key_of_incomplete_step: StepKey | None = None
        """The latest optimizer step that lacks gradients, because `zero_grad()` cleared those of
        some of its micro-batches."""
        self._num_incomplete_steps_in_a_row = 0
        """How many times in a row the optimizer has made such a step."""
        self._warned_of_incomplete_steps = False

    # What the prepared optimizer reports and asks

    def note_call(self) -> None:
        """Records a call of `step()`.

        Before the last micro-batch it does nothing. A loop that calls it there, but not in the last
        micro-batch, is warned of later.
        """
        self.key_of_latest_call = self._step.key
        if self._step.micro_batch.closes_step:
            return
        if self._num_early_calls == 0:
            self._line_of_early_call = user_location()
        self._num_early_calls += 1

    def note_step(self, key: StepKey) -> None:
        """Records that the inner optimizer has stepped.

        Args:
            key: the optimizer step that it has made.
        """
        self.key_of_latest_step = key

        # If `zero_grad()` was called between the micro-batches of this step, the step was made with
        # only a part of the gradients. A warning is given if that happens repeatedly.
        lacks_gradients = self._key_of_incomplete_step == key
        self._count_incomplete_step(lacks_gradients=lacks_gradients)

    def note_clearing(self) -> None:
        """Notes the present optimizer step if it still needs the gradients that are to be cleared.

        These are the gradients of its earlier micro-batches. If the step is made without them, it
        is incomplete, and `note_step` counts it. The loop may also leave the step out on purpose,
        for example because a loss was not finite. Then the note has no effect.
        """
        present_step = self._step.key
        was_made = self.key_of_latest_step == present_step
        needs_gradients = self._num_backwards > 0 and not was_made
        if needs_gradients and not self._step.micro_batch.is_only_of_step:
            self._key_of_incomplete_step = present_step

    def note_postponed_clearing(self) -> None:
        """Records that `zero_grad()` was called while gradients are kept."""
        self._clearing_was_postponed = self._has_gradients_of_micro_batch

    def note_clipping(self) -> None:
        """Records that the gradient of the present global batch was clipped, so it is complete."""
        self.is_clipped = True

    def gradients_are_kept(self) -> bool:
        """Returns True if the gradients of earlier micro-batches wait for an optimizer step.

        They do from the first call of `step()` in a global batch, which does nothing if further
        micro-batches follow, until the call in its last micro-batch. So gradients are also kept in
        loops that call `zero_grad()` after `step()`.
        """
        key = self.key_of_latest_call
        if key is None:  # `step()` was never called
            return False

        has_stepped = self.key_of_latest_step == key
        return not has_stepped and self._step.is_still_due(key)

    # The events of a training

    def begin(self, micro_batch: MicroBatch) -> None:
        """Checks the previous global batch when the first micro-batch of the next one begins."""
        self._has_gradients_of_micro_batch = False
        self._clearing_was_postponed = False
        if micro_batch.opens_step:
            self._end_previous_global_batch()

    def before_backward(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Checks that the gradients of the passes of a micro-batch are meant to be added up.

        Raises:
            UsageError: `zero_grad()` was called after an earlier backward pass of the micro-batch.
                An example is sharpness-aware minimisation, which steps with the gradients of the
                second pass alone. But `zero_grad()` has not cleared those of the first pass, as
                they are added to the gradients of earlier micro-batches.
        """
        if self._clearing_was_postponed:
            raise UsageError(
                "optimizer.zero_grad() between two backward passes of a micro-batch",
                "it clears nothing before all micro-batches are computed, so the gradients of both "
                "passes would be added up",
                "leave micro_batch_size out, or add the losses up and call world.backward once",
            )

    def after_backward(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Records when all micro-batches of a global batch have had a backward pass."""
        self._num_backwards += 1
        self._has_gradients_of_micro_batch = True
        is_complete = self._num_backwards >= micro_batch.num_micro_batches
        if micro_batch.closes_step and is_complete:
            self._num_micro_batches_trained = micro_batch.num_micro_batches

    def pass_ended(self) -> None:
        """Checks the last global batch of a pass, and the steps of the pass."""
        self._end_previous_global_batch()
        self._warn_at_end_of_pass()

    def _end_previous_global_batch(self) -> None:
        """Counts the step of the previous global batch if it was missed, and forgets this batch."""
        was_trained_as_a_whole = self._num_micro_batches_trained > 0
        if was_trained_as_a_whole:
            self._count_if_missed(self._num_micro_batches_trained)

        self._num_micro_batches_trained = 0
        self._num_backwards = 0
        self._num_early_calls = 0
        self._line_of_early_call = None
        self.is_clipped = False

    # Steps that were made with a part of the gradients

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

        # The warning of missed steps gives the same advice, so one of the two is enough.
        was_warned = self._warned_of_incomplete_steps or self._warned_of_missed_step
        if was_warned:
            return

        self._warned_of_incomplete_steps = True
        warn(
            "optimizer.zero_grad() between the micro-batches of a global batch",
            found="it cleared the gradients of earlier micro-batches, so the optimizer has stepped "
            "with those of the later ones only",
            do="call optimizer.step() and optimizer.zero_grad() in every iteration, without a "
            "condition: both act once for each global batch",
        )

    # Steps that were called for and not made

    def _count_if_missed(self, num_micro_batches: int) -> None:
        """Counts the step of a global batch if it was missed, and warns if several are.

        A step is missed if the loop has called `step()` early, before the last micro-batch, but not
        in the last one, after which the optimizer steps. Of the micro-batches 0 to 3, `step()` was
        called in:

            3                the step is made, whether or not it was called in others, too
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
        self._num_global_batches += 1
        if self._has_made_requested_step():  # called in 3
            self._steps_missed_in_a_row = 0
            return

        num_early_calls = self._num_early_calls
        no_step_is_due = num_early_calls == 0  # called in none
        if no_step_is_due or self.is_clipped:
            return

        self._steps_missed_in_a_row += 1
        self._line_of_missed_call = self._line_of_early_call
        self._num_calls_of_missed_step = num_early_calls
        self._num_micro_batches_of_missed_step = num_micro_batches

        only_last_call_is_missing = num_early_calls == num_micro_batches - 1
        if only_last_call_is_missing:  # called in 0, 1 and 2
            self._warn_if_missed_many_in_a_row()
        else:  # called in only 1
            self._warn_if_missed_a_second_time()

    def _has_made_requested_step(self) -> bool:
        """Returns True if the optimizer has made the step that the loop has last called for.

        Each global batch has one step, for which the loop may call `step()` in several
        micro-batches. Only the call in the last micro-batch makes the step. If `step()` was never
        called, no step was due, and the result is True.
        """
        return self.key_of_latest_step == self.key_of_latest_call

    def _warn_if_missed_many_in_a_row(self) -> None:
        """Warns if the optimizer did not step for many global batches in a row."""
        if self._steps_missed_in_a_row >= MAX_STEPS_MISSED_IN_A_ROW:
            self._warn_of_missed_step()

    def _warn_if_missed_a_second_time(self) -> None:
        """Warns if a loop that counts batches itself has missed two steps within a few global
        batches.

        It is called after each missed step of such a loop. Example: 4 micro-batches make up a
        global batch, and the loop calls `step()` if `i % 3 == 0`:

            i = 0, 1, 2, 3: called at 0 and 3, the last one, so the optimizer steps
            i = 4, 5, 6, 7: called only at 6: the first missed step
            i = 8, 9, 10, 11: called only at 9: the second missed step, in the next global batch
        """
        previous_number = self._latest_global_batch_with_missed_step
        present_number = self._num_global_batches
        self._latest_global_batch_with_missed_step = present_number

        if previous_number is None:  # this is the first missed step
            return
        if present_number - previous_number <= MAX_GLOBAL_BATCHES_BETWEEN_MISSED_STEPS:
            self._warn_of_missed_step()

    def _warn_at_end_of_pass(self) -> None:
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
        early_calls = self._num_calls_of_missed_step
        num_micro_batches = self._num_micro_batches_of_missed_step
        warn(
            "optimizer.step() in some micro-batches of a global batch",
            found=f"it was called in {early_calls} of {num_micro_batches} micro-batches, but not "
            "in the last one, after which the optimizer steps: it has not stepped for this global "
            "batch",
            do="call optimizer.step() in every iteration and count no batches: it steps once for "
            "each global batch",
            code="LS405",
            at=self._line_of_missed_call,
        )
