"""Records which micro-batches a loader has handed out to a training loop, and which are trained.

A *pass* is one iteration of a training loop over a loader. A *delivery* is one micro-batch that the
loop gets in a pass. `session.step` keeps these records, and `session.loss_source` finds out by them
which delivery a loss comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from lockstep.errors import UsageError
from lockstep.session.micro_batch import MicroBatch, VirtualRank

if TYPE_CHECKING:
    from torch import Tensor

optimizer_steps_at = attrgetter("opens_step", "closes_step", "virtual_rank_number")
"""When the optimizer steps. Two loaders that are trained on at the same time must agree on it."""
weight_in_backward = attrgetter(
    "scale", "opens_step", "closes_step", "plain", "virtual_rank_number"
)
"""What a backward pass uses of a micro-batch. If two micro-batches have equal values, it does not
matter which of them a loss is taken to come from."""


class StorageReference(Protocol):
    """A weak reference to the storage of a tensor; two to the same storage are equal."""

    def __hash__(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

    def expired(self) -> bool:
        """Returns True once the storage has been freed."""


class Delivery:
    """A micro-batch that a loader has handed out to a training loop.

    Args:
        training_pass: the pass in which it is handed out.
        micro_batch: the micro-batch, which says how its loss is weighted.
        storages: references to the storages of its tensors.
        on_begin: function that is called with the micro-batch each time training on it begins.
    """

    def __init__(
        self,
        training_pass: TrainingPass,
        micro_batch: MicroBatch,
        storages: Iterable[StorageReference] = (),
        on_begin: Callable[[MicroBatch], None] | None = None,
    ) -> None:
        self.training_pass = training_pass
        self.micro_batch = micro_batch
        self.storages = tuple(storages)
        self.on_begin = on_begin
        training_pass.num_deliveries += 1
        self.number_in_pass = training_pass.num_deliveries
        """The number of this delivery in its pass, from 1."""
        if micro_batch.first:
            training_pass.num_delivered_global_batches += 1
        self.global_batch_number = training_pass.num_delivered_global_batches
        """The number of its global batch in the pass, from 1."""

    @property
    def is_referenced(self) -> bool:
        """True while the script, or an autograd graph, holds a tensor of the batch."""
        for storage in self.storages:
            if storage.expired():
                return False
        return True


class TrainingPass:
    """One iteration of a training loop over a loader."""

    def __init__(self) -> None:
        self.micro_batch = MicroBatch()
        """The micro-batch that is being trained."""
        self.number = 0
        """The number of global batches that have begun."""
        self.num_steps = 0
        """The number of optimizer steps that have begun: one for each global batch, or one for each
        virtual rank if virtual ranks have their own optimizer step."""
        self.num_backwards = 0
        """The number of calls of `World.backward` for the current micro-batch."""
        self.loss: Tensor | float = 0.0
        """The sum of the weighted losses of the current global batch on this rank. With virtual
        ranks, each loss is divided by their number on a process (see `add_loss`)."""
        self.loss_of_previous_global_batch: Tensor | float | None = None
        """The loss of the previous global batch; None if no backward pass has followed its last
        micro-batch."""
        self.loss_of_virtual_rank: dict[int, Tensor] = {}
        """The loss of each virtual rank of this process, if all train one model."""
        self.accumulated = False
        """True if earlier micro-batches of the current global batch have left gradients."""
        self.begun_at = 0
        """When the current global batch began: 3 if it was the third one over all passes."""
        self.previous_begun_at = 0
        """When the previous global batch began."""
        self.stepped = False
        """True if an optimizer has stepped for the current global batch."""
        self.ever_stepped = False
        """True if an optimizer has stepped in this pass. A pass in which none has stepped is taken
        for an evaluation, even if gradients are enabled."""
        self.step_left_out = False
        """True if the previous micro-batch was trained, and its global batch had no optimizer step
        so far. If the optimizer steps now, without a backward pass for the current micro-batch, it
        is an error of the loop, which has fetched a batch before the step."""
        self.num_deliveries = 0
        self.num_delivered_global_batches = 0
        self.num_trained = 0
        """The number of deliveries that a backward pass has followed."""
        self.fetches_ahead = False
        """True if the loop has trained on a batch after it had fetched a later one."""
        self.being_trained: Delivery | None = None
        """The delivery whose micro-batch is `micro_batch`, the one that is being trained."""
        self.batch_in_use: Delivery | None = None
        """The delivery that the loop computes on: the last one for which a forward or a backward
        pass was seen. In a loop that fetches nothing ahead, it is the last one handed out."""
        self.untrained: list[Delivery] = []
        """Deliveries for which no backward pass is known yet, in order."""
        self.loader_ended = False
        """True if the loader is exhausted, or the loop has left it. The loop may still train on
        batches that it holds."""
        self.is_exhausted = False
        """True if the loader has ended because it has no more batches."""
        self.source_of_loss_is_known = True
        """True if the next loss comes from `being_trained`; False if it may come from any of
        `untrained`."""

    @property
    def holds_batches(self) -> bool:
        """True if the loop holds batches on which it has not called backward yet."""
        return len(self.untrained) > 0

    @property
    def holds_batches_of_exhausted_loader(self) -> bool:
        """True if the loader has no more batches, and the loop may still train on some it holds.

        It is False if the loop has left the loader in the middle of a pass.
        """
        return self.is_exhausted and self.holds_batches

    @property
    def latest_if_untrained(self) -> Delivery | None:
        """The delivery that was handed out last; None if a backward pass has followed it."""
        if self.untrained and self.untrained[-1].number_in_pass == self.num_deliveries:
            return self.untrained[-1]
        return None

    @property
    def works_on_latest(self) -> bool:
        """True if the loop is taken to work on the delivery that it got last, not an earlier one.

        Once the loop has trained on a delivery, `fetches_ahead` tells. Before that, a loop that has
        skipped the first deliveries (`continue`) does not hold the one before the latest any more,
        as its variable `batch` holds the latest. A loop that has fetched ahead still holds it.
        """
        if self.num_trained > 0:
            return not self.fetches_ahead
        if len(self.untrained) < 2:
            return True
        previous, latest = self.untrained[-2:]
        return latest.is_referenced and not previous.is_referenced

    @property
    def next_trained(self) -> Delivery | None:
        """The delivery that the next loss is taken to come from; None if nothing was handed out.

        It is only used if no call of a module since the last loss has shown the delivery.
        """
        is_fetched_ahead = not self.source_of_loss_is_known and self.holds_batches
        if is_fetched_ahead:
            return self.untrained[0]  # the loop is taken to train on them in their order
        return self.being_trained

    @property
    def possible_sources(self) -> list[Delivery]:
        """The deliveries that the next loss may come from: `being_trained`.

        If the loop has fetched ahead, and no forward pass has shown which of its batches comes
        next, it may also come from any delivery that no backward pass has followed yet.
        """
        deliveries: list[Delivery] = []
        if self.being_trained is not None:
            deliveries.append(self.being_trained)
        if not self.source_of_loss_is_known:
            deliveries += self.untrained
        return deliveries

    @property
    def batches_are_interchangeable(self) -> bool:
        """True if it makes no difference which of the loop's batches the next loss comes from.

        It makes none if each batch has an optimizer step of its own and all have the same factor,
        for example two batches of 32 samples, of which this rank has 16.
        """
        if self.being_trained is None or not self.being_trained.micro_batch.is_only_of_step:
            return False
        return weigh_the_same([self.being_trained, *self.untrained])

    @property
    def holds_more_of_step(self) -> bool:
        """True if the loop holds untrained micro-batches of its present optimizer step."""
        if self.micro_batch.closes_step:
            return False
        return any(delivery.is_referenced for delivery in self.untrained)

    @property
    def micro_batch_of_loop(self) -> MicroBatch:
        """The micro-batch that the loop works on.

        Example: the loop has trained on batch 1, skipped batch 2 (`continue`), and got batch 3.
        Until the forward pass of batch 3, `micro_batch` is that of batch 2, and the result is that
        of batch 3.
        """
        latest = self.latest_if_untrained
        if latest is not None and self.works_on_latest:
            return latest.micro_batch
        return self.micro_batch

    @property
    def has_stepped_for_current_batch(self) -> bool:
        """True if an optimizer has stepped for the current micro-batch, the last of its step.

        In an earlier micro-batch `stepped` may still be True from the previous global batch: it is
        reset in the first one, which the loop may have skipped.
        """
        return self.micro_batch.last and self.stepped

    @property
    def may_go_on(self) -> bool:
        """True if the loader has ended, and the loop may still train on batches that it holds.

        A loop may, if it fetches ahead, or has fetched everything with `list(loader)`. Any other
        loop has skipped its untrained batches.
        """
        trains_later = self.fetches_ahead or self.num_trained == 0
        return self.holds_batches_of_exhausted_loader and trains_later

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Updates the state of the pass when training on a micro-batch begins.

        Args:
            micro_batch: the micro-batch. `micro_batch.first` is True if it is the first of its
                global batch, `micro_batch.opens_step` if it is the first of its optimizer step.
        """
        previous_was_trained = self.num_backwards > 0

        # Kept for the error message of an `optimizer.step()` that comes too late. Usually this is
        # no mistake, as most micro-batches have no step.
        self.step_left_out = previous_was_trained and not self.stepped

        if micro_batch.first:
            if previous_was_trained:
                self._keep_loss_of_previous_global_batch()
            self._begin_global_batch()
        elif previous_was_trained:
            self.accumulated = True  # new gradients are added to those of the previous micro-batch

        if micro_batch.opens_step:
            self.num_steps += 1

        self.micro_batch = micro_batch
        self.num_backwards = 0

    def _keep_loss_of_previous_global_batch(self) -> None:
        """Keeps the loss of a global batch when the next one begins.

        The loss is the sum over all micro-batches of the global batch. It is incomplete if the loop
        has left out the last ones: then the micro-batch that was trained until now is not the last.
        """
        is_complete = self.micro_batch.last
        self.loss_of_previous_global_batch = self.loss if is_complete else None

    def _begin_global_batch(self) -> None:
        """Resets what is recorded for each global batch."""
        self.number += 1
        self.stepped = False
        self.accumulated = False
        self.loss = 0.0

    def mark_trained(self, delivery: Delivery) -> None:
        """Records that the backward pass of a delivery begins."""
        self.batch_in_use = delivery
        self.num_trained += 1
        later_one_was_fetched = delivery.number_in_pass < self.num_deliveries
        if later_one_was_fetched:
            self.fetches_ahead = True
        if delivery in self.untrained:
            self.untrained.remove(delivery)

    def drop_skipped_before(self, trained: Delivery) -> None:
        """Drops deliveries from `untrained` that the loop has skipped (`continue`).

        Example: the loop trains on batch 3. No backward pass was made for batch 2, and the script
        does not hold its tensors any more: the loop has skipped batch 2.

        Args:
            trained: the delivery that is certainly trained now, here batch 3.
        """
        still_untrained = []
        for other in self.untrained:
            is_earlier = other.number_in_pass < trained.number_in_pass
            was_skipped = is_earlier and not other.is_referenced
            if not was_skipped:
                still_untrained.append(other)
        self.untrained = still_untrained

    def skipped_first_of(self, delivery: Delivery) -> Delivery | None:
        """Returns the first micro-batch of a delivery's global batch if its training never began.

        Training on a micro-batch begins when the loop gets it, unless the loop still has an earlier
        one that is not trained. Example: a loop has trained on 1a and 1b. It skips 2a, 2b and 3a
        (`continue`), and trains on 3b. Training has begun on 2a, but not on 2b and 3a. So for 3b,
        the result is 3a. It is None for any other delivery.
        """
        if delivery.micro_batch.first or self.being_trained is None:
            return None
        has_begun = self.being_trained.global_batch_number == delivery.global_batch_number
        if has_begun:
            return None

        for other in self.untrained:
            is_of_same_global_batch = other.global_batch_number == delivery.global_batch_number
            was_skipped = not other.is_referenced
            if other.micro_batch.first and is_of_same_global_batch and was_skipped:
                return other
        return None

    def add_loss(self, weighted_loss: Tensor) -> None:
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
        # Without a loader nothing tells where a global batch begins, so each optimizer step ends
        # one.
        is_without_loader = self.loader_ended and not self.holds_batches
        if is_without_loader and self.stepped:
            self.loss = 0.0
            self.stepped = False

        virtual_rank = self.micro_batch.virtual_rank
        if virtual_rank is not None:
            if not virtual_rank.has_own_step:
                self._add_loss_of_virtual_rank(virtual_rank, weighted_loss)
            if virtual_rank.virtual_ranks_per_process != 1:
                weighted_loss = weighted_loss / virtual_rank.virtual_ranks_per_process
        self.loss = weighted_loss + self.loss

    def _add_loss_of_virtual_rank(self, virtual_rank: VirtualRank, weighted_loss: Tensor) -> None:
        """Adds a weighted loss to the virtual rank's loss in the current global batch."""
        losses = self.loss_of_virtual_rank
        if self.micro_batch.first:
            losses.clear()
        if virtual_rank.contributes:
            number = virtual_rank.number
            if number in losses:
                losses[number] = losses[number] + weighted_loss
            else:
                losses[number] = weighted_loss

    def leaves_gradients(self) -> bool:
        """Returns True if the pass has ended in the middle of a global batch and left gradients."""
        has_gradients = self.accumulated or self.num_backwards > 0
        is_unfinished = has_gradients and not self.micro_batch.last
        # A loop that fetches ahead trains on the last batches after the loader has ended.
        return is_unfinished and not self.holds_batches_of_exhausted_loader


def weigh_the_same(deliveries: Sequence[Delivery]) -> bool:
    """Returns True if a loss is weighted in the same way for all deliveries."""
    weights = {weight_in_backward(delivery.micro_batch) for delivery in deliveries}
    return len(weights) <= 1


def still_referenced(deliveries: Iterable[Delivery]) -> list[Delivery]:
    """Returns the deliveries of which the script still holds a tensor."""
    return [delivery for delivery in deliveries if delivery.is_referenced]


def check_order(delivery: Delivery) -> None:
    """Raises UsageError if the micro-batches of a global batch are not trained in order.

    With two global batches in two micro-batches each, 1a 1b and 2a 2b:

    - 1b may only follow an earlier micro-batch of the same global batch, 1a.
    - 2a may follow 1b, which is the last micro-batch of its global batch. It may also follow any
      micro-batch that got no backward pass, such as 1a: the loop has skipped 1a.

    Args:
        delivery: the delivery on which training is about to begin.
    """
    # Training on `delivery` has not begun, so the pass still trains on `previous`, and has counted
    # the backward passes of `previous`.
    training_pass = delivery.training_pass
    previous = training_pass.being_trained
    num_backwards_of_previous = training_pass.num_backwards
    if previous is None:
        return

    if delivery.micro_batch.first:
        previous_was_skipped = num_backwards_of_previous == 0
        previous_is_last = previous.micro_batch.last
        in_order = previous_is_last or previous_was_skipped
    else:
        is_later = delivery.number_in_pass > previous.number_in_pass
        is_same_global_batch = delivery.global_batch_number == previous.global_batch_number
        in_order = is_later and is_same_global_batch

    if not in_order:
        raise UsageError(
            "training on batches in another order than the loader gave them",
            f"each global batch is computed in {delivery.micro_batch.num_micro_batches} "
            "micro-batches, and those of one global batch do not follow each other",
            "train on the batches in their order, or leave micro_batch_size out",
        )


def two_loaders_error() -> UsageError:
    """Returns the error for a loop over two loaders whose optimizer steps do not coincide."""
    return UsageError(
        "training on two prepared loaders at a time",
        "their global batches are computed in different numbers of micro-batches, so "
        "the optimizer would step in the middle of one of them",
        "evaluate under torch.no_grad(); to train on two datasets use one loader over "
        "both, or leave micro_batch_size out",
    )


TO_LEAVE_ONE_OUT = (
    "to leave one out, multiply its loss by 0, or, where that is NaN, replace the inputs that make "
    "it so"
)
"""Advice if a loop skips a batch that the global batch needs."""


def cleared_gradients_error() -> UsageError:
    """Returns the error for gradients that a script has cleared in the middle of a global batch."""
    return UsageError(
        "gradients cleared between the micro-batches of a global batch",
        "those of the micro-batches before are lost",
        "call optimizer.zero_grad() of the prepared optimizer, not model.zero_grad()",
    )
