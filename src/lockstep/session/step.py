"""Keeps the state of the current optimizer step. A run has one `Step`.

A *pass* is one iteration of a training loop over a loader. A *delivery* is one micro-batch that the
loop gets in a pass. The step must know which delivery a loss comes from, because that determines
the factor of the loss. This is not always the latest delivery: a loop may fetch batches ahead, or
keep them with `list(loader)` or `itertools.cycle(loader)`.

So each delivery is remembered by the storages of its tensors. As soon as a loop has fetched a batch
ahead, the prepared modules report the tensors that they are called with, whose storages show which
delivery is being trained. If the source of a loss remains unknown, and its factor depends on it,
`source_of_loss` raises an error.

Loaders report what they hand out; `World.backward` and the prepared optimizers report what they do
with it. The step passes these events on to the extensions of the run (`session.extension`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.errors import warn
from lockstep.session.delivery import (
    TRAIN_APART,
    Delivery,
    StorageReference,
    TrainingPass,
    check_order,
    describe_parts,
    mixed_sources_error,
    next_trained,
    optimizer_steps_at,
    skipped_batch_error,
    still_referenced,
    two_loaders_error,
    unknown_source_error,
    weigh_the_same,
    weight_in_backward,
)
from lockstep.session.extension import Extensions
from lockstep.session.logged_passes import LoggedPasses
from lockstep.session.micro_batch import MicroBatch, VirtualRank

if TYPE_CHECKING:
    from torch import Tensor


def _are_fetched_together(first: TrainingPass, second: TrainingPass) -> bool:
    """Returns True if a loop seems to fetch a batch of each of two passes in turn, as `zip` does.

    Then both passes have begun equally many global batches, and the second one has begun exactly
    one since the first one began its current one. In a loop over `second` within a loop over
    `first`, this is only so at the first batches of both.
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
        """Stands for everything that is trained outside of any prepared loader. It never ends."""
        self.training_pass = self._pass_without_loader
        """The pass that is being trained on."""
        self._passes: list[TrainingPass] = []
        """The training passes that are open. The one that was last trained on is at the end."""
        self._num_begun = 0
        """The number of global batches, over all loaders, that were begun to be trained on."""
        self._delivery_by_storage: dict[StorageReference, Delivery | None] = {}
        """The delivery that a storage belongs to; None if it belongs to several."""
        self._prune_at_size = 64
        """When the table above has this many entries, those of freed storages are removed."""
        self._seen_in_forward: list[Delivery] = []
        """Deliveries with which modules were called since the last backward pass."""
        self._trainable_between_passes: list[Delivery] = []
        """Deliveries of the pass that ended last on which the script may still train. Used while no
        pass is open."""
        self._trainable_beside_open_passes: list[Delivery] = []
        """The same for all passes that ended while another pass was open: a loop over
        `zip(itertools.cycle(one), other)` trains on both."""
        self._had_empty_part = False
        """True once this rank was handed a micro-batch without samples."""
        self._was_fetched_ahead = False
        self._called_without_delivery = False
        """True if a module was called, since the last backward pass, without any tensor of a
        loader."""
        self._warned_of_other_batches = False
        self._first_batch_at_s: float | None = None
        self._last_step_at_s = 0.0

    @property
    def in_training_loop(self) -> bool:
        """True while a training loop iterates over a prepared loader."""
        return bool(self._passes)

    @property
    def micro_batch(self) -> MicroBatch:
        """The micro-batch that is being trained."""
        return self.training_pass.micro_batch

    @property
    def _no_pass_is_current(self) -> bool:
        """True before the first training loop, and once the loaders of all loops have ended."""
        return self.training_pass is self._pass_without_loader

    @property
    def micro_batch_of_loop(self) -> MicroBatch:
        """The micro-batch that the loop works on.

        Example: the loop has trained on batch 1, skipped batch 2 (`continue`), and got batch 3.
        Until the forward pass of batch 3, `micro_batch` is that of batch 2. This is that of 3.
        """
        training_pass = self.training_pass
        latest = training_pass.latest_if_untrained
        if latest is not None and training_pass.works_on_latest:
            return latest.micro_batch
        return training_pass.micro_batch

    @property
    def key(self) -> StepKey:
        """Identifies the current optimizer step."""
        return _latest_key(self.training_pass)

    def is_still_due(self, key: StepKey) -> bool:
        """Returns True if a loop still has to make an optimizer step that it has begun.

        Examples, for step 5 of a loop with two micro-batches (5a, 5b) in each step:

            the loop trains on 5a or 5b                         due
            it trains on 6a                                     not due: it has gone on
            it trains on a batch of another loader              not due
            the loader has ended, and the loop still holds 5b   due
            the loader has ended, and 5b is trained             not due: the loop makes no step

        A step of a single micro-batch is never due.

        Args:
            key: the optimizer step.
        """
        training_pass = key.training_pass
        pass_has_gone_on = key != _latest_key(training_pass)
        if pass_has_gone_on or training_pass.micro_batch.is_only_of_step:
            return False

        is_being_trained = training_pass is self.training_pass
        if is_being_trained:
            return True

        # A loop that has fetched everything ahead still trains when its loader has ended.
        loader_has_ended = self._no_pass_is_current
        return loader_has_ended and self._holds_more_of_step(training_pass)

    def _holds_more_of_step(self, training_pass: TrainingPass) -> bool:
        """Returns True if a loop holds untrained micro-batches of its present optimizer step."""
        is_last_of_step = training_pass.micro_batch.closes_step
        if is_last_of_step:
            return False
        return any(delivery.is_referenced for delivery in training_pass.untrained)

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

        Usually training on it begins at once. If the loop has fetched ahead, and its batches are
        weighted differently, a forward pass has to show first which of them is trained.

        Raises:
            UsageError: two loaders are trained on, and the optimizer steps at different times.
        """
        self._end_passes_of_ended_loaders()
        training_pass = delivery.training_pass
        self._remember(delivery)

        earlier_ones_are_trained = not training_pass.untrained
        training_pass.untrained.append(delivery)
        if earlier_ones_are_trained:
            # The usual case: the next loss, and the next logged value, are of this delivery.
            training_pass.source_of_loss_is_known = True
            training_pass.batch_in_use = delivery
            self._begin_delivery(delivery)
        else:
            self._hand_out_ahead(delivery)

    def _end_passes_of_ended_loaders(self) -> None:
        """Ends the passes whose loaders have ended. Called when a loop fetches another batch.

        In `for batch in list(loader): ...`, the loader has ended before the loop trains on the
        batches, so their pass is open again while it does. When the script fetches a batch of
        another pass, it is done with them.
        """
        for training_pass in list(self._passes):
            if training_pass.loader_ended:
                self.end_pass(training_pass)

    def _hand_out_ahead(self, delivery: Delivery) -> None:
        """Records a delivery that a loop fetches before it has trained on the previous ones.

        For example, the loop has fetched batch 1, has not trained on it, and fetches batch 2. The
        next loss may come from either, so from now on the forward passes show which one is trained.
        Until they do, the pass has these attributes:

            untrained       batches 1 and 2
            being_trained   batch 1; batch 2 if the next loss has the same factor in either case
            batch_in_use    batch 1; batch 2 in what may be an evaluation, or is being trained
        """
        training_pass = delivery.training_pass
        training_pass.source_of_loss_is_known = False
        self._watch_forward_passes()

        # A pass in which no optimizer has stepped may be an evaluation with gradients enabled. No
        # backward pass would show which batch it uses, so that is taken to be the latest one.
        may_be_evaluation = not training_pass.ever_stepped
        if may_be_evaluation:
            training_pass.batch_in_use = delivery

        next_factor_is_known = self._any_batch_may_be_next(delivery)
        if next_factor_is_known:
            self._begin_delivery(delivery)

    def _any_batch_may_be_next(self, latest: Delivery) -> bool:
        """Returns True if it makes no difference on which of its batches a loop trains next.

        That is so if each batch has an optimizer step of its own and all have the same factor, for
        example two batches of 32 samples, of which this rank has 16.

        Args:
            latest: the delivery that the loop has fetched last.
        """
        training_pass = latest.training_pass
        being_trained = training_pass.being_trained
        if being_trained is None or not latest.micro_batch.is_only_of_step:
            return False
        return weigh_the_same([being_trained, *training_pass.untrained])

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

        If the loop has fetched ahead, this shows which delivery is trained: training on it begins
        when a module is first called with its tensors.

        Args:
            storages: references to the storages of the tensors that the module is called with.
            is_output_of_prepared_module: True if one of the tensors seems to be the output of
                another prepared module, whose call has shown the delivery.

        Raises:
            UsageError: micro-batches are trained in a different order than they were handed out.
        """
        deliveries: list[Delivery] = []
        for storage in storages:
            delivery = self._delivery_by_storage.get(storage)
            if delivery is not None and delivery not in deliveries:
                deliveries.append(delivery)

        # The usual case: the tensors belong to deliveries, which are trained now.
        for delivery in deliveries:
            if delivery not in self._seen_in_forward:
                self._seen_in_forward.append(delivery)
            self._note_call_with(delivery)

        # Otherwise the script may have made the tensors from any batch. That is noted for
        # `source_of_loss`, which warns of it if the batches have different factors.
        if not deliveries and not is_output_of_prepared_module:
            self._called_without_delivery = True

    def _note_call_with(self, delivery: Delivery) -> None:
        """Makes a delivery the one being trained, because a module was called with its tensors.

        Raises:
            UsageError: it is trained in a different order than it was handed out.
        """
        pass_of_delivery = delivery.training_pass
        pass_of_delivery.batch_in_use = delivery

        is_being_trained = delivery is pass_of_delivery.being_trained
        if is_being_trained:
            # In `for batch in loader: pass`, followed by `model(batch)`, the loader has ended since
            # training on its last batch began.
            if self._no_pass_is_current:
                self.training_pass = pass_of_delivery
        else:
            # The loop had fetched the delivery ahead, and training on it begins now.
            self._begin_global_batch_of(delivery)
            check_order(delivery)
            self._begin_delivery(delivery)

        # The forward pass has shown that the next loss comes from `being_trained`.
        pass_of_delivery.source_of_loss_is_known = True

    def _begin_global_batch_of(self, delivery: Delivery) -> None:
        """Begins the global batch of a delivery if the loop has skipped its first micro-batch.

        For example, a loop trains on 1b, skips 2a, 2b and 3a (`continue`), and trains on 3b. When
        it skipped 2a, training on that had begun, but not on 2b and 3a. So global batch 3 begins
        here, with 3a.
        """
        training_pass = delivery.training_pass
        being_trained = training_pass.being_trained
        if being_trained is None or delivery.micro_batch.first:
            return
        if being_trained.global_batch_number == delivery.global_batch_number:
            return

        for other in training_pass.untrained:
            is_of_same_global_batch = other.global_batch_number == delivery.global_batch_number
            was_skipped = not other.is_referenced
            if other.micro_batch.first and is_of_same_global_batch and was_skipped:
                check_order(other)
                self._begin_delivery(other)
                return

    def source_of_loss(self) -> MicroBatch:
        """Returns the micro-batch that a loss comes from, and records that it is trained.

        Called once before each backward pass.

        Raises:
            UsageError: the loss may come from several micro-batches of different weight.
        """
        deliveries_of_loss = self._find_deliveries_of_loss()
        for delivery in deliveries_of_loss:
            self._mark_trained(delivery)
        self.micro_batch_of_loss = self._micro_batch_giving_factor(deliveries_of_loss)

        # If an error was raised above, the calls are kept, so that a second call raises it again.
        self._forget_calls()
        return self.micro_batch_of_loss

    def _forget_calls(self) -> None:
        """Forgets calls of modules before a backward pass: the next loss does not follow them."""
        self._seen_in_forward = []
        self._called_without_delivery = False

    def _micro_batch_giving_factor(self, deliveries_of_loss: list[Delivery]) -> MicroBatch:
        """Returns the micro-batch whose factor a loss gets: usually the one being trained.

        In a loop over two loaders, the micro-batch being trained may be of one loader and the loss
        of the other. Then any delivery of the loss gives the factor, as all have the same.
        """
        current_pass = self.training_pass
        passes_of_loss = [delivery.training_pass for delivery in deliveries_of_loss]
        if not passes_of_loss or current_pass in passes_of_loss:
            return current_pass.micro_batch
        return deliveries_of_loss[0].micro_batch

    def _find_deliveries_of_loss(self) -> list[Delivery]:
        """Returns the deliveries that a loss comes from.

        Raises:
            UsageError: the loss may come from several deliveries of different weight.
        """
        # In a loop that fetches nothing ahead, modules need not report their calls.
        seen_in_forward = self._seen_in_forward
        if not seen_in_forward:
            self._raise_if_possible_sources_differ()
            return self._next_of_each_pass()

        # The loss may come from some of them only: the loop has skipped the others (`continue`).
        if not weigh_the_same(seen_in_forward):
            return self._without_skipped(seen_in_forward)

        # A module was also called with tensors that no loader handed out, but that the script may
        # have made from another batch.
        if self._called_without_delivery:
            self._warn_of_other_batches(seen_in_forward[0])
        return seen_in_forward

    def _without_skipped(self, seen_in_forward: list[Delivery]) -> list[Delivery]:
        """Returns the deliveries that a loss comes from, without those that the loop has skipped.

        A loop with `continue` calls a model with a batch, and then with the next one. The script
        holds no tensor of the skipped batch any more.

        Args:
            seen_in_forward: deliveries of different weight with which modules were called since the
                last backward pass.

        Raises:
            UsageError: the loss may come from several deliveries of different weight.
        """
        held = still_referenced(seen_in_forward)
        none_was_skipped = len(held) == len(seen_in_forward)
        if none_was_skipped:
            raise mixed_sources_error(seen_in_forward)

        held_ones_give_factor = len(held) > 0 and weigh_the_same(held)
        if not held_ones_give_factor:
            raise skipped_batch_error()

        # The loss may come from a batch that is not held any more, after all. With virtual ranks,
        # an error before the optimizer's step names the one without a backward pass. Without them,
        # nothing would notice the mistake.
        if any(delivery.micro_batch.virtual_rank is None for delivery in held):
            raise skipped_batch_error()
        return held

    def _next_of_each_pass(self) -> list[Delivery]:
        """Returns the deliveries that a loss is taken to come from if no forward pass has shown it.

        For example, the loop `for a, b in zip(one, other)` converts both batches and then calls the
        model: the loss comes from the latest batch of `one` and that of `other`.
        """
        next_deliveries = [next_trained(training_pass) for training_pass in self._passes]
        return [delivery for delivery in next_deliveries if delivery is not None]

    def _mark_trained(self, delivery: Delivery) -> None:
        """Records that the backward pass of a delivery begins."""
        training_pass = delivery.training_pass
        training_pass.batch_in_use = delivery
        training_pass.num_trained += 1
        later_one_was_fetched = delivery.number_in_pass < training_pass.num_deliveries
        if later_one_was_fetched:
            training_pass.fetches_ahead = True
        if delivery in training_pass.untrained:
            training_pass.untrained.remove(delivery)

        # Without a forward pass that was seen, it is not certain that this delivery is trained, so
        # no earlier one is known to be skipped.
        was_seen_in_forward = delivery in self._seen_in_forward
        if not was_seen_in_forward:
            return

        # Example: batch 3 is trained now. No backward pass was made for batch 2, and the script
        # does not hold its tensors any more: the loop has skipped batch 2.
        still_untrained = []
        for other in training_pass.untrained:
            is_earlier = other.number_in_pass < delivery.number_in_pass
            was_skipped = is_earlier and not other.is_referenced
            if not was_skipped:
                still_untrained.append(other)

        training_pass.untrained = still_untrained

    def _raise_if_possible_sources_differ(self) -> None:
        """Raises UsageError if a loss may come from deliveries of different weight.

        Called if no forward pass has shown which delivery the loss comes from.
        """
        # Outside of all loops, the script may hold batches of a loader that has ended.
        if self._no_pass_is_current:
            self._check_loss_is_of_no_loader()
            return

        # In each open pass, the loss may come from the delivery being trained. If the loop has
        # fetched ahead, and no forward pass has shown which of its batches comes next, the loss may
        # come from any delivery that no backward pass has followed yet.
        of_open_passes: list[Delivery] = []
        for training_pass in self._passes:
            if training_pass.being_trained is not None:
                of_open_passes.append(training_pass.being_trained)
            if not training_pass.source_of_loss_is_known:
                of_open_passes += training_pass.untrained

        # Batches of ended passes that the script still holds are possible, too.
        of_ended_passes = still_referenced(self._trainable_beside_open_passes)
        possible = [*of_open_passes, *of_ended_passes]
        if weigh_the_same(possible):
            return

        # They weigh differently, for one of three reasons. 1: a loop goes on over one loader, and
        # the script holds batches of another loader, which has ended.
        differ_because_of_ended_passes = weigh_the_same(of_open_passes)
        if differ_because_of_ended_passes:
            raise unknown_source_error(
                possible,
                "of two loaders, one of which has ended",
                "begin another pass over the loader that ends first instead of itertools.cycle, "
                "which keeps its batches; " + TRAIN_APART,
            )

        # 2: two loaders are trained on at once.
        open_passes = {delivery.training_pass for delivery in of_open_passes}
        two_loaders_are_trained_on = len(open_passes) > 1
        if two_loaders_are_trained_on:
            raise mixed_sources_error(of_open_passes)

        # 3: one loop has fetched batches ahead.
        raise unknown_source_error(of_open_passes, "that no backward pass has followed yet")

    def _check_loss_is_of_no_loader(self) -> None:
        """Raises UsageError if a loss may come from a batch of the pass that ended last.

        No pass is open, but the script may still hold batches. This is an error only if their
        losses have to be weighted, so not for `plain` micro-batches.
        """
        deliveries_in_script = []
        for delivery in self._trainable_between_passes:
            if delivery.is_referenced and not delivery.micro_batch.plain:
                deliveries_in_script.append(delivery)
        if deliveries_in_script:
            raise unknown_source_error(deliveries_in_script, "of a loader that has ended")

    def _warn_of_other_batches(self, recognised: Delivery) -> None:
        """Warns once if a loss may also come from a batch of another loader, of different weight.

        For example, the loss is `f(a) + f(b.half())`, with batches `a` and `b` of two loaders. Only
        `a` is recognised, so the whole loss gets the factor of `a`. This rank has 4 of the 8
        samples of `a`, and 3 of the 8 samples of `b`, so `f(b.half())` needs another factor.

        Args:
            recognised: the batch with which a forward pass was called.
        """
        if self._warned_of_other_batches:
            return

        different = []
        for other in self._batches_held_by_script():
            is_of_other_pass = other.training_pass is not recognised.training_pass
            if is_of_other_pass and not weigh_the_same([recognised, other]):
                different.append(other)

        if not different:
            return

        self._warned_of_other_batches = True
        parts = describe_parts([recognised, *different])
        warn(
            "one world.backward(loss) while two loaders are trained on",
            "the prepared model was called with a batch of one loader, and with tensors that no "
            f"loader gave. Of the two loaders' batches this rank has {parts} "
            "samples, which count differently; the loss is taken to come from the first alone, so "
            "its weight is wrong if these tensors were made of the other batch",
            TRAIN_APART,
        )

    def _batches_held_by_script(self) -> list[Delivery]:
        """Returns the batches that the script has not trained yet, or may train again."""
        held: list[Delivery] = []
        for training_pass in self._passes:
            held += training_pass.untrained
        return held + still_referenced(self._trainable_beside_open_passes)

    def _remember(self, delivery: Delivery) -> None:
        """Remembers the storages of a delivery, and forgets freed storages from time to time."""
        table = self._delivery_by_storage
        for storage in delivery.storages:
            is_shared_by_several = storage in table and table[storage] is not delivery
            if is_shared_by_several:
                table[storage] = None  # the storage identifies none of them from now on
            else:
                table[storage] = delivery

        if len(table) >= self._prune_at_size:
            self._forget_freed_storages()
            # Pruning again only when the table has doubled keeps its cost per entry constant.
            self._prune_at_size = max(64, 2 * len(self._delivery_by_storage))

    def _forget_freed_storages(self) -> None:
        """Removes the entries of freed storages from the table of deliveries."""
        alive: dict[StorageReference, Delivery | None] = {}
        for storage, delivery in self._delivery_by_storage.items():
            if not storage.expired():
                alive[storage] = delivery
        self._delivery_by_storage = alive

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
            The micro-batch as it is trained. In the first `num_common_steps` global batches, in
            which all virtual ranks train one model, it has no virtual rank.

        Raises:
            UsageError: two loaders are trained on, and the optimizer steps at different times.
        """
        # Stored first, because the micro-batch of a common step loses it below.
        self.virtual_rank = micro_batch.virtual_rank
        is_common_step = self.number < self.num_common_steps
        if is_common_step:
            micro_batch = micro_batch.without_virtual_rank()
        self._prepare_for_other_passes(training_pass, micro_batch)  # may raise an error

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
        if training_pass in self._passes:
            self._passes.remove(training_pass)
        self._passes.append(training_pass)
        self.training_pass = training_pass

    def _note_order_of_global_batches(self, training_pass: TrainingPass) -> None:
        """Notes that a pass begins a global batch, for `_are_fetched_together`.

        With passes A and B and the global batches A1, B1, A2, the pass A has begun its present one
        at 3, and its previous one at 1.
        """
        self._num_begun += 1
        training_pass.previous_begun_at = training_pass.begun_at
        training_pass.begun_at = self._num_begun

    def _prepare_for_other_passes(
        self, training_pass: TrainingPass, micro_batch: MicroBatch
    ) -> None:
        """Prepares for training on a micro-batch together with those of other open passes.

        If these micro-batches have different factors for their losses, the forward passes of the
        prepared modules are watched from now on, to show which micro-batch a loss comes from.

        Raises:
            UsageError: the optimizer would step in the middle of another pass's global batch.
        """
        for other in self._passes:
            if other is training_pass:
                continue

            step_together = optimizer_steps_at(other.micro_batch) == optimizer_steps_at(micro_batch)
            if not step_together:
                raise two_loaders_error()

            same_factor = weight_in_backward(other.micro_batch) == weight_in_backward(micro_batch)
            if not same_factor:
                self._watch_forward_passes()  # they report their calls from now on

    def end_pass(self, training_pass: TrainingPass, *, exhausted: bool = False) -> None:
        """Ends a pass. If it ended in the middle of a global batch, gradients are cleared.

        The script may have kept batches of the pass, and train on them later. They are remembered,
        so that their losses are recognised.

        Args:
            training_pass: the pass.
            exhausted: True if the loader has no more batches; False if the loop was left early.
        """
        if training_pass not in self._passes:  # nothing of it was trained, or it ended earlier
            return

        self._passes.remove(training_pass)
        training_pass.loader_ended = True
        training_pass.is_exhausted = exhausted
        if self._passes:
            self.training_pass = self._passes[-1]
        else:
            self.training_pass = self._pass_without_loader
            self.virtual_rank = None  # only batches of a loader belong to one

        if training_pass.leaves_gradients():
            self.extensions.clear_gradients()

        self._remember_trainable(training_pass)
        self.extensions.pass_ended()

    def _remember_trainable(self, ended_pass: TrainingPass) -> None:
        """Remembers the batches of an ended pass on which the script may still train.

        - `_trainable_between_passes` is used while no pass is open: a loss may then come from the
          pass that ended last.
        - `_trainable_beside_open_passes` is used while another pass is open: in a loop over
          `zip(itertools.cycle(one), other)`, the pass over `one` ends, and the loop trains on its
          batches again. So a loss may come from any pass that has ended since this loop began. Here
          the list holds the batches of `one` until the pass over `other` has ended, too.
        """
        trainable = self._still_trainable(ended_pass)
        self._trainable_between_passes = trainable

        another_pass_is_open = bool(self._passes)
        if another_pass_is_open:
            all_trainable = [*self._trainable_beside_open_passes, *trainable]
            self._trainable_beside_open_passes = still_referenced(all_trainable)
        else:  # no loop is open that could train on batches of an ended pass
            self._trainable_beside_open_passes = []

        some_losses_are_weighted = any(not delivery.micro_batch.plain for delivery in trainable)
        if some_losses_are_weighted:
            self._watch_forward_passes()  # they show which batch a loss comes from

    def _still_trainable(self, training_pass: TrainingPass) -> list[Delivery]:
        """Returns the batches of an ended pass on which the script may still train.

        If the script holds the tensors of several batches, it keeps them on purpose, as
        `itertools.cycle` does, and may train on each of them again. If it holds only one, that is
        the last batch of an ordinary loop, in its variable `batch`. The loop may still train on it
        only if it has not done so yet.
        """
        referenced: list[Delivery] = []
        deliveries = dict.fromkeys(self._delivery_by_storage.values())  # each once, in order
        for delivery in deliveries:
            if delivery is None:  # the table has None for a storage that several deliveries share
                continue
            if delivery.training_pass is training_pass and delivery.is_referenced:
                referenced.append(delivery)

        script_keeps_batches = len(referenced) > 1
        if script_keeps_batches:
            return referenced
        return [delivery for delivery in referenced if delivery in training_pass.untrained]

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

        # A loss without weight adds 0, although it may be NaN. So does the loss of a micro-batch
        # that another process has, and this one repeats to check a device.
        has_no_weight = scale == 0.0
        current_micro_batch = self.micro_batch
        only_checks_device = current_micro_batch.is_repeat
        if has_no_weight or only_checks_device:
            loss_to_add = weighted_loss.new_zeros(())
        else:
            loss_to_add = weighted_loss.detach()

        self._add_loss(loss_to_add)
        return weighted_loss

    def _add_loss(self, loss_to_add: Tensor) -> None:
        """Adds a weighted loss to the sums of the global batch that is being trained.

        The mean of the sums over the processes is the loss of the global batch. With virtual ranks,
        that is the mean of the weighted losses over the virtual ranks. So each of them is divided
        by the number of virtual ranks of a process. Example: 4 virtual ranks on 2 processes, with a
        mean of 4.0.

            process   weighted losses of its virtual ranks   its sum
            0         1.0 and 3.0                            (1.0 + 3.0) / 2 = 2.0
            1         5.0 and 7.0                            (5.0 + 7.0) / 2 = 6.0

            loss of the global batch: (2.0 + 6.0) / 2 = 4.0

        The loss for the backward pass is not divided, as gradients are averaged over the virtual
        ranks.
        """
        training_pass = self.training_pass
        virtual_rank = training_pass.micro_batch.virtual_rank
        self._forget_loss_of_last_step(training_pass)

        # If all virtual ranks train one model, the loss of each is also kept by itself.
        trains_common_model = virtual_rank is not None and not virtual_rank.has_own_step
        if virtual_rank is not None and trains_common_model:
            self._add_loss_of_virtual_rank(training_pass, virtual_rank, loss_to_add)

        if virtual_rank is not None and virtual_rank.virtual_ranks_per_process != 1:
            loss_to_add = loss_to_add / virtual_rank.virtual_ranks_per_process
        training_pass.loss = loss_to_add + training_pass.loss
        self.pass_of_loss = training_pass

    def _forget_loss_of_last_step(self, training_pass: TrainingPass) -> None:
        """Resets the sum of losses after an optimizer step outside of any loader.

        Without a loader nothing tells where a global batch begins, so each optimizer step ends one.
        """
        is_used_up = training_pass.loader_ended and not training_pass.untrained
        without_loader = training_pass is self._pass_without_loader or is_used_up
        if without_loader and training_pass.stepped:
            training_pass.loss = 0.0
            training_pass.stepped = False

    def _add_loss_of_virtual_rank(
        self, training_pass: TrainingPass, virtual_rank: VirtualRank, weighted_loss: Tensor
    ) -> None:
        """Adds a weighted loss to the virtual rank's loss in the current global batch."""
        losses = training_pass.loss_of_virtual_rank
        if training_pass.micro_batch.first:
            losses.clear()
        if virtual_rank.contributes:
            number = virtual_rank.number
            if number in losses:
                losses[number] = losses[number] + weighted_loss
            else:
                losses[number] = weighted_loss

    def mark_stepped(self) -> None:
        """Records that a prepared optimizer has stepped.

        If several optimizers step for one global batch, only the first step is counted. Outside of
        a loader every step is counted.
        """
        training_pass = self.training_pass
        # `stepped` becomes False again when the next global batch begins.
        is_first_step_of_global_batch = not training_pass.stepped
        is_outside_of_loader = self._no_pass_is_current
        if is_first_step_of_global_batch or is_outside_of_loader:
            self.extensions.step_finished(self.number)  # the first global batch has the number 0
            self.number += 1
            self.samples += training_pass.micro_batch.global_samples
            self._last_step_at_s = time.perf_counter()

        training_pass.stepped = True
        training_pass.ever_stepped = True
        for other in self._passes:
            # A loop over `zip(one, other)` makes one step for the batches of both. So both passes
            # are trained on, and neither is taken for an evaluation.
            if _are_fetched_together(other, training_pass):
                other.ever_stepped = True

    def has_stepped_for(self, training_pass: TrainingPass) -> bool:
        """Returns True if an optimizer has stepped for the current global batch of a pass.

        A loop over `zip(one, other)` trains on a batch of each, and then the optimizer steps. The
        step is for both, but it is recorded only in the pass over `other`, which was fetched last.
        So for the pass over `one`, the answer is also True if the pass over `other` has recorded
        it.
        """
        if not training_pass.micro_batch.last:
            return False
        if training_pass.has_stepped_for_current_batch:
            return True

        for other in self._passes:
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
