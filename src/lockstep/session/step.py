"""Keeps the state of the current optimizer step. A run has one `Step`.

A *pass* is one iteration of a training loop over a loader. A *delivery* is one micro-batch that the
loop gets in a pass. Which delivery a loss comes from is found out in `session.loss_source`.

Loaders report what they hand out; `World.backward` and the prepared optimizers report what they do
with it. The step passes these events on to the extensions of the run (`session.extension`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.session.delivery import (
    Delivery,
    StorageReference,
    TrainingPass,
    check_order,
    optimizer_steps_at,
    two_loaders_error,
    weight_in_backward,
)
from lockstep.session.extension import Extensions
from lockstep.session.logged_passes import LoggedPasses
from lockstep.session.loss_source import LossSource
from lockstep.session.micro_batch import MicroBatch, VirtualRank

if TYPE_CHECKING:
    from torch import Tensor


def _are_fetched_together(first: TrainingPass, second: TrainingPass) -> bool:
    """Returns True if a loop seems to fetch a batch of each of two passes in turn, as `zip` does.

    If A1, A2, ... are the global batches of `first` and B1, B2, ... those of `second`, they then
    begin in the order A1, B1, A2, B2: A2 and B2 have the same number, and A2 begins between B1 and
    B2. In a loop over `second` within a loop over `first`, the order is A1, B1, B2, B3, and only A1
    and B1 seem to be fetched together.
    """
    if first is second or first.number != second.number:
        return False
    return second.previous_begun_at < first.begun_at < second.begun_at


class StepKey(NamedTuple):
    """Identifies an optimizer step."""

    training_pass: TrainingPass
    global_batch: int
    """The number of its global batch within the pass."""
    num_steps: int
    """The number of the optimizer step within the pass."""


def _latest_key(training_pass: TrainingPass) -> StepKey:
    """Returns the key of the last optimizer step that a pass has begun."""
    return StepKey(training_pass, training_pass.number, training_pass.num_steps)


class Dispute(NamedTuple):
    """A virtual rank for which two processes have computed different gradients."""

    virtual_rank: int
    scales: list[float]
    """The factor of the loss in each micro-batch of the virtual rank."""


class Step:
    """The state of the current optimizer step."""

    def __init__(self) -> None:
        self.extensions = Extensions()
        self.number = 0
        """The number of global batches for which an optimizer has stepped in this training."""
        self.samples = 0
        """The number of samples, over all ranks, that were trained since this process started."""
        self.num_devices = 1
        """The number of devices of this process, which divide each of its micro-batches."""
        self.micro_batch_in_use = MicroBatch()
        """The micro-batch that was handed out last by any loader, evaluations included. When a pass
        is over, it is reset to what it was before the pass."""
        self.latest_micro_batch = MicroBatch()
        """Like `micro_batch_in_use`, but not reset when a pass is over."""
        self.micro_batch_of_loss = MicroBatch()
        """The micro-batch of the latest loss that was passed to `World.backward`."""
        self.sample_in_place_of_none: Any = None
        """A batch of one sample, like the latest micro-batch that had no samples."""
        self.virtual_rank: VirtualRank | None = None
        """The virtual rank of the current micro-batch. It is known even in the first global batches
        of `num_common_steps`, whose micro-batches have no virtual rank."""
        self.find_dispute: Callable[[], Dispute | None] = lambda: None
        """Compares what processes have computed in a checked global batch (`check_devices`), and
        returns a dispute if two of them disagree. Loaders call it on all processes."""
        self.num_common_steps = 0
        """The number of global batches, from the first one, in which all virtual ranks train one
        model."""
        self.phase = "other"
        """What this rank spends its time on, one of `extension.PHASES`."""
        self.logged_passes = LoggedPasses(self.extensions)
        self.pass_of_loss: TrainingPass | None = None
        """The pass of the latest loss that was passed to `World.backward`, or None."""
        self._pass_without_loader = TrainingPass()
        """Stands for everything that is trained outside of any prepared loader."""
        self._pass_without_loader.loader_ended = True
        self.training_pass = self._pass_without_loader
        """The pass that is being trained on."""
        self._open_passes: list[TrainingPass] = []
        """The training passes that are open. The one that was last trained on is at the end."""
        self._loss_source = LossSource(self._open_passes)
        self._num_begun = 0
        """The number of global batches, over all loaders, that were begun to be trained on."""
        self._had_empty_part = False
        """True once this rank was handed a micro-batch without samples."""
        self._was_fetched_ahead = False
        self._first_batch_at_s: float | None = None
        self._last_step_at_s = 0.0

    @property
    def in_training_loop(self) -> bool:
        """True while a training loop iterates over a prepared loader."""
        return bool(self._open_passes)

    @property
    def micro_batch(self) -> MicroBatch:
        """The micro-batch that is being trained."""
        return self.training_pass.micro_batch

    @property
    def _is_outside_of_loaders(self) -> bool:
        """True before the first training loop, and once the loaders of all loops have ended."""
        return self.training_pass is self._pass_without_loader

    @property
    def micro_batch_of_loop(self) -> MicroBatch:
        """The micro-batch that the loop works on, even if no forward pass has shown it yet."""
        return self.training_pass.micro_batch_of_loop

    @property
    def key(self) -> StepKey:
        """Identifies the current optimizer step."""
        return _latest_key(self.training_pass)

    def is_still_due(self, key: StepKey) -> bool:
        """Returns True if a loop that has begun an optimizer step is still to call `step` for it.

        The comments are for step 5 of a loop with two micro-batches (5a, 5b) in each step.

        Args:
            key: the optimizer step.
        """
        training_pass = key.training_pass
        pass_has_gone_on = key != _latest_key(training_pass)
        if pass_has_gone_on:
            return False  # the loop trains on 6a
        if training_pass.micro_batch.is_only_of_step:
            return False  # a step of a single micro-batch is never due

        if training_pass is self.training_pass:
            return True  # the loop trains on 5a or 5b
        if not self._is_outside_of_loaders:
            return False  # the script trains on a batch of another loader
        # The loader has ended. A loop that has fetched everything ahead may still hold 5b.
        return training_pass.holds_more_of_step

    @property
    def seconds(self) -> float:
        """Seconds between the first micro-batch that was handed out and the last optimizer step."""
        if self._first_batch_at_s is None:
            return 0.0
        return max(0.0, self._last_step_at_s - self._first_batch_at_s)

    def enter_phase(self, phase: str) -> str:
        """Records that this rank enters another phase of its step.

        Args:
            phase: the new phase, one of `extension.PHASES`.

        Returns:
            The previous phase.
        """
        phase_before = self.phase
        self.phase = phase
        self.extensions.phase_entered(phase)
        return phase_before

    def hand_out(self, delivery: Delivery) -> None:
        """Records that a pass hands out a micro-batch to train on.

        Usually training on it begins at once.

        Raises:
            UsageError: two loaders are trained on, and the optimizer steps at different times.
        """
        self._end_passes_of_ended_loaders()
        training_pass = delivery.training_pass
        self._loss_source.remember(delivery)

        is_fetched_ahead = training_pass.holds_batches
        training_pass.untrained.append(delivery)
        if is_fetched_ahead:
            self._hand_out_ahead(delivery)
            return

        # The usual case: the next loss, and the next logged value, are of this delivery.
        training_pass.source_of_loss_is_known = True
        training_pass.batch_in_use = delivery
        self._begin_delivery(delivery)

    def _end_passes_of_ended_loaders(self) -> None:
        """Ends the passes whose loaders have ended. Called when a loop fetches another batch.

        In `for batch in list(loader): ...`, the loader has ended before the loop trains on the
        batches, so their pass is open again while the loop does so. When the script fetches a batch
        of another pass, it is done with the batches of ended loaders.
        """
        for training_pass in list(self._open_passes):
            if training_pass.loader_ended:
                self.end_pass(training_pass)

    def _hand_out_ahead(self, delivery: Delivery) -> None:
        """Records a delivery that a loop fetches before it has trained on the previous ones.

        For example, the loop has fetched batch 1, has not trained on it, and fetches batch 2. The
        next loss may come from either, so from now on the forward passes show which one is trained.
        """
        training_pass = delivery.training_pass
        training_pass.source_of_loss_is_known = False
        self._watch_forward_passes()

        # A pass in which no optimizer has stepped may be an evaluation with gradients enabled. No
        # backward pass would show which batch it uses, so it is taken to use the latest one.
        may_be_evaluation = not training_pass.ever_stepped
        if may_be_evaluation:
            training_pass.batch_in_use = delivery

        # The batches are interchangeable if each has an optimizer step of its own, and their losses
        # are multiplied by the same factor. Then training on the latest batch begins now. Otherwise
        # training on a batch begins when a forward pass shows it (`module_called`).
        if training_pass.batches_are_interchangeable:
            self._begin_delivery(delivery)

    def note_empty_part(self, sample: Any) -> None:
        """Records that this rank is about to get a micro-batch without samples.

        Args:
            sample: a batch of one sample, with the same structure.
        """
        self.sample_in_place_of_none = sample
        if not self._had_empty_part:
            self._had_empty_part = True
            self.extensions.part_is_empty()

    def module_called(
        self, storages: Iterable[StorageReference], *, is_output_of_prepared_module: bool = False
    ) -> None:
        """Records that a prepared module is called with gradients enabled.

        If the loop has fetched ahead, the call shows which delivery is trained: training on a
        delivery begins when a module is first called with its tensors.

        Args:
            storages: references to the storages of the tensors that the module is called with.
            is_output_of_prepared_module: True if one of the tensors seems to be the output of
                another prepared module. In `decoder(encoder(batch))`, the call of the encoder has
                shown the delivery.

        Raises:
            UsageError: micro-batches are trained in a different order than they were handed out.
        """
        deliveries = self._loss_source.module_called(
            storages, is_output_of_prepared_module=is_output_of_prepared_module
        )
        for delivery in deliveries:
            self._note_call_with(delivery)

    def _note_call_with(self, delivery: Delivery) -> None:
        """Makes a delivery the one being trained, because a module was called with its tensors.

        Raises:
            UsageError: deliveries are trained in a different order than they were handed out.
        """
        training_pass = delivery.training_pass
        training_pass.batch_in_use = delivery

        training_has_begun = delivery is training_pass.being_trained
        if not training_has_begun:  # the loop had fetched it ahead
            self._begin_global_batch_if_start_was_skipped(delivery)
            check_order(delivery)
            self._begin_delivery(delivery)
        elif self._is_outside_of_loaders:
            # In `for batch in loader: pass`, followed by `model(batch)`, the loader has ended, and
            # its last batch is trained now. This call shows so, and the next loss cannot come from
            # a batch of another pass that has ended.
            self._loss_source.forget_batches_of_ended_passes()
            self.training_pass = training_pass

        # The forward pass has shown that the next loss comes from `being_trained`.
        training_pass.source_of_loss_is_known = True

    def _begin_global_batch_if_start_was_skipped(self, delivery: Delivery) -> None:
        """Begins the global batch of a delivery if the loop has skipped its first micro-batch."""
        first = delivery.training_pass.skipped_first_of(delivery)
        if first is not None:
            check_order(first)
            self._begin_delivery(first)

    def source_of_loss(self) -> MicroBatch:
        """Returns the micro-batch that a loss comes from, and records that it is trained.

        Called once before each backward pass.

        Raises:
            UsageError: the loss may come from several micro-batches of different weight.
        """
        deliveries_of_loss = self._loss_source.find()
        is_certain = self._loss_source.call_was_seen
        for delivery in deliveries_of_loss:
            delivery.training_pass.mark_trained(delivery)
            if is_certain:
                delivery.training_pass.drop_skipped_before(delivery)
        self.micro_batch_of_loss = self._micro_batch_giving_factor(deliveries_of_loss)

        # If an error was raised above, the calls are kept, so that a second call raises it again.
        self._loss_source.forget_calls()
        return self.micro_batch_of_loss

    def _micro_batch_giving_factor(self, deliveries_of_loss: list[Delivery]) -> MicroBatch:
        """Returns the micro-batch whose factor a loss gets: usually the one being trained.

        In a loop over two loaders, the micro-batch being trained may be of one loader and the loss
        of the other. Then any delivery of the loss gives the factor, as all its deliveries have the
        same factor.
        """
        current_pass = self.training_pass
        passes_of_loss = [delivery.training_pass for delivery in deliveries_of_loss]
        if not passes_of_loss or current_pass in passes_of_loss:
            return current_pass.micro_batch
        return deliveries_of_loss[0].micro_batch

    def _watch_forward_passes(self) -> None:
        """Makes the prepared modules report their calls to `module_called` from now on."""
        if not self._was_fetched_ahead:
            self._was_fetched_ahead = True
            self.extensions.batches_fetched_ahead()

    def _begin_delivery(self, delivery: Delivery) -> None:
        """Begins training on a delivery."""
        delivery.training_pass.being_trained = delivery
        micro_batch = self.begin(delivery.training_pass, delivery.micro_batch)
        if delivery.on_begin is not None:
            delivery.on_begin(micro_batch)

    def begin(self, training_pass: TrainingPass, micro_batch: MicroBatch) -> MicroBatch:
        """Begins training on a micro-batch of a pass, and notifies the extensions.

        Returns:
            The micro-batch as it is trained: without its virtual rank in the first
            `num_common_steps` global batches, in which all virtual ranks train one model.

        Raises:
            UsageError: two loaders are trained on, and the optimizer steps at different times.
        """
        self.virtual_rank = micro_batch.virtual_rank
        is_common_step = self.number < self.num_common_steps
        if is_common_step:
            micro_batch = micro_batch.without_virtual_rank()
        self._check_fits_other_loops(training_pass, micro_batch)

        if self._first_batch_at_s is None:
            self._first_batch_at_s = time.perf_counter()
        self._make_current(training_pass)
        if micro_batch.first:
            self._note_order_of_global_batches(training_pass)
        training_pass.begin_micro_batch(micro_batch)
        self.micro_batch_in_use = micro_batch
        self.extensions.begin(micro_batch)
        return micro_batch

    def _make_current(self, training_pass: TrainingPass) -> None:
        """Makes a pass the one that is being trained, and puts it at the end of the open passes."""
        if not self._open_passes:
            self._loss_source.forget_batches_of_ended_passes()
        if training_pass in self._open_passes:
            self._open_passes.remove(training_pass)
        self._open_passes.append(training_pass)
        self.training_pass = training_pass

    def _note_order_of_global_batches(self, training_pass: TrainingPass) -> None:
        """Notes that a pass begins a global batch, for `_are_fetched_together`.

        With passes A and B and the global batches A1, B1, A2, the pass A has begun its present one
        at 3, and its previous one at 1.
        """
        self._num_begun += 1
        training_pass.previous_begun_at = training_pass.begun_at
        training_pass.begun_at = self._num_begun

    def _check_fits_other_loops(self, training_pass: TrainingPass, micro_batch: MicroBatch) -> None:
        """Checks that a micro-batch can be trained while loops over other loaders are running.

        If the batches of those loops have another factor for the loss, the forward passes of the
        prepared modules are watched from now on, to show which loader's batch a loss comes from.

        Raises:
            UsageError: the optimizer would step in the middle of another loop's global batch.
        """
        for other in self._open_passes:
            if other is training_pass:
                continue

            step_together = optimizer_steps_at(other.micro_batch) == optimizer_steps_at(micro_batch)
            if not step_together:
                raise two_loaders_error()

            same_factor = weight_in_backward(other.micro_batch) == weight_in_backward(micro_batch)
            if not same_factor:
                self._watch_forward_passes()

    def end_pass(self, training_pass: TrainingPass, *, exhausted: bool = False) -> None:
        """Ends a pass. If it ended in the middle of a global batch, gradients are cleared.

        The script may hold batches of the pass, and train on them later. These batches are kept in
        mind, so that their losses are recognised.

        Args:
            training_pass: the pass.
            exhausted: True if the loader has no more batches; False if the loop was left early.
        """
        if training_pass not in self._open_passes:  # nothing of it was trained, or it ended earlier
            return

        self._open_passes.remove(training_pass)
        training_pass.loader_ended = True
        training_pass.is_exhausted = exhausted
        if self._open_passes:
            self.training_pass = self._open_passes[-1]
        else:
            self.training_pass = self._pass_without_loader
            self.virtual_rank = None  # outside of loaders there are no virtual ranks

        if training_pass.leaves_gradients():
            self.extensions.clear_gradients()

        kept_batches = self._loss_source.keep_batches_of(training_pass)
        some_losses_are_weighted = any(not kept.micro_batch.plain for kept in kept_batches)
        if some_losses_are_weighted:
            self._watch_forward_passes()
        self.extensions.pass_ended()

    def weigh_loss(self, loss: Tensor) -> Tensor:
        """Multiplies a loss by its factor, and adds it to the loss of the global batch.

        The factor is chosen so that the mean of these sums over all processes is the mean loss over
        the samples of the global batch. Example: 8 samples on 2 processes, and this process has 5
        of them. The mean loss over the 5 samples is multiplied by 5/8 * 2.

        Returns:
            The weighted loss, for the backward pass. It is NaN if the loss is NaN, even if the
            factor is 0, for example because the micro-batch has no samples.
        """
        # In a loop over two loaders, the loss may be of another micro-batch than the current one.
        scale = self.micro_batch_of_loss.scale
        weighted_loss = loss if scale == 1.0 else loss * scale

        has_no_weight = scale == 0.0  # NaN * 0 is NaN, so zeros are added instead
        # A micro-batch that only checks a device is counted by the process that has it.
        is_counted_elsewhere = self.micro_batch.is_repeat
        if has_no_weight or is_counted_elsewhere:
            loss_to_add = weighted_loss.new_zeros(())
        else:
            loss_to_add = weighted_loss.detach()

        self.training_pass.add_loss(loss_to_add)
        self.pass_of_loss = self.training_pass
        return weighted_loss

    def mark_stepped(self) -> None:
        """Records that a prepared optimizer has stepped.

        If several optimizers step for one global batch, only the first step is counted. Outside of
        a loader every step is counted.
        """
        training_pass = self.training_pass
        # `stepped` becomes False again when the next global batch begins.
        is_first_step_of_global_batch = not training_pass.stepped
        is_outside_of_loaders = self._is_outside_of_loaders
        if is_first_step_of_global_batch or is_outside_of_loaders:
            number_of_this_step = self.number  # from 0
            self.extensions.step_finished(number_of_this_step)
            self.number = number_of_this_step + 1
            self.samples += training_pass.micro_batch.global_samples
            self._last_step_at_s = time.perf_counter()

        training_pass.stepped = True
        training_pass.ever_stepped = True
        for other in self._open_passes:
            # A loop over `zip(one, other)` makes one step for the batches of both. So both passes
            # are trained on, and neither is taken for an evaluation.
            if _are_fetched_together(other, training_pass):
                other.ever_stepped = True

    def has_stepped_for(self, training_pass: TrainingPass) -> bool:
        """Returns True if an optimizer has stepped for the current global batch of a pass.

        A loop over `zip(one, other)` trains on a batch of each, and then the optimizer steps. The
        step is for both batches, but it is recorded only in the pass over `other`, which was
        fetched last. So for the pass over `one`, the answer is also True if the pass over `other`
        has recorded the step.
        """
        if not training_pass.micro_batch.last:
            return False
        if training_pass.has_stepped_for_current_batch:
            return True

        for other in self._open_passes:
            is_fetched_together = _are_fetched_together(training_pass, other)
            if is_fetched_together and other.has_stepped_for_current_batch:
                return True
        return False

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Returns a context in which optimizer steps are not counted, and not observed.

        On exit, the number of steps and samples, and the times, are reset to what they were before.
        """
        number = self.number
        samples = self.samples
        first_batch_at_s = self._first_batch_at_s
        last_step_at_s = self._last_step_at_s
        try:
            with self.extensions.observers_muted():
                yield
        finally:
            self.number = number
            self.samples = samples
            self._first_batch_at_s = first_batch_at_s
            self._last_step_at_s = last_step_at_s
