"""Finds out which micro-batch a loss comes from, because that determines the factor of the loss.

The source is not always the batch that a loop got last: it may fetch batches ahead, or keep them
with `list(loader)` or `itertools.cycle(loader)`.

So each delivery is remembered by the storages of its tensors. As soon as a loop has fetched a batch
ahead, the prepared modules report the tensors that they are called with, whose storages show which
delivery is being trained. If the source of a loss remains unknown, and its factor depends on it, an
error is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.errors import UsageError, warn
from lockstep.session.delivery import (
    TO_LEAVE_ONE_OUT,
    Delivery,
    StorageReference,
    TrainingPass,
    still_referenced,
    weigh_the_same,
)

MIN_STORAGES_TO_PRUNE = 64

TRAIN_APART = (
    "call the prepared model and world.backward for each batch by itself, one after the other, "
    "then optimizer.step() once; or use one loader over both datasets, or batch sizes that the "
    "number of ranks divides, with drop_last=True"
)
"""Advice if the losses of two loaders' batches are weighted differently."""
FETCH_LATER = (
    "fetch a batch when the one before is trained (num_workers= and prefetch_factor= of the loader "
    "read ahead without a change to the loop)"
)
"""Advice if a loop fetches batches ahead."""


class DeliveryTable:
    """Finds the delivery that a tensor belongs to, by the storage of the tensor."""

    def __init__(self) -> None:
        self._delivery_by_storage: dict[StorageReference, Delivery | None] = {}
        """The delivery that a storage belongs to; None if it belongs to several."""
        self._prune_at_size = MIN_STORAGES_TO_PRUNE
        """When the table has this many entries, those of freed storages are removed."""

    def add(self, delivery: Delivery) -> None:
        """Adds the storages of a delivery, and removes freed storages from time to time."""
        table = self._delivery_by_storage
        for storage in delivery.storages:
            is_shared_by_several = storage in table and table[storage] is not delivery
            if is_shared_by_several:
                table[storage] = None  # the storage identifies none of them from now on
            else:
                table[storage] = delivery

        if len(table) >= self._prune_at_size:
            self._remove_freed_storages()
            # Pruning again only when the table has doubled keeps its cost per entry constant.
            self._prune_at_size = max(MIN_STORAGES_TO_PRUNE, 2 * len(self._delivery_by_storage))

    def _remove_freed_storages(self) -> None:
        alive: dict[StorageReference, Delivery | None] = {}
        for storage, delivery in self._delivery_by_storage.items():
            if not storage.expired():
                alive[storage] = delivery
        self._delivery_by_storage = alive

    def deliveries_of(self, storages: Iterable[StorageReference]) -> list[Delivery]:
        """Returns the deliveries that some storages belong to, each once."""
        deliveries: list[Delivery] = []
        for storage in storages:
            delivery = self._delivery_by_storage.get(storage)
            if delivery is not None and delivery not in deliveries:
                deliveries.append(delivery)
        return deliveries

    def held_by_script(self, training_pass: TrainingPass) -> list[Delivery]:
        """Returns the deliveries of a pass of which the script still holds the tensors."""
        held: list[Delivery] = []
        each_once = dict.fromkeys(self._delivery_by_storage.values())  # in order
        for delivery in each_once:
            if delivery is None:  # stands for storages that belong to several deliveries
                continue
            if delivery.training_pass is training_pass and delivery.is_referenced:
                held.append(delivery)
        return held


class LossSource:
    """Finds the deliveries that the next loss comes from.

    Args:
        open_passes: the training passes that are open. The owner of the list changes it.
    """

    def __init__(self, open_passes: list[TrainingPass]) -> None:
        self._open_passes = open_passes
        self._table = DeliveryTable()
        self._called_with: list[Delivery] = []
        """Deliveries with which modules were called since the last backward pass."""
        self._called_without_delivery = False
        """True if a module was called, since the last backward pass, without any tensor of a
        loader."""
        self._kept: list[Delivery] = []
        """Deliveries of ended passes on which the script may still train: of all passes that ended
        while another one was open; or, while no pass is open, of the one that ended last."""
        self._warned_of_other_batches = False

    @property
    def call_was_seen(self) -> bool:
        """True if, since the last backward pass, a module was called with tensors of a loader."""
        return len(self._called_with) > 0

    def remember(self, delivery: Delivery) -> None:
        """Remembers the tensors of a delivery, to recognise them when a module is called."""
        self._table.add(delivery)

    def module_called(
        self, storages: Iterable[StorageReference], *, is_output_of_prepared_module: bool
    ) -> list[Delivery]:
        """Records that a prepared module is called with gradients enabled.

        Args:
            storages: references to the storages of the tensors that the module is called with.
            is_output_of_prepared_module: True if one of the tensors seems to be the output of
                another prepared module. In `decoder(encoder(batch))`, the call of the encoder has
                shown the delivery.

        Returns:
            The deliveries that the tensors belong to.
        """
        deliveries = self._table.deliveries_of(storages)
        for delivery in deliveries:
            if delivery not in self._called_with:
                self._called_with.append(delivery)

        # The script may have made the tensors from any batch. `find` warns of that if the batches
        # have different factors.
        if not deliveries and not is_output_of_prepared_module:
            self._called_without_delivery = True
        return deliveries

    def forget_calls(self) -> None:
        """Forgets calls of modules before a backward pass: the next loss does not follow them."""
        self._called_with = []
        self._called_without_delivery = False

    def keep_batches_of(self, ended_pass: TrainingPass) -> list[Delivery]:
        """Keeps the batches of an ended pass on which the script may still train; returns them."""
        trainable = self._still_trainable(ended_pass)
        another_pass_is_open = len(self._open_passes) > 0
        if another_pass_is_open:
            # A loop over `zip(itertools.cycle(one), other)` trains on the batches of `one` again,
            # after its pass has ended, until the pass over `other` ends.
            each_once = dict.fromkeys([*self._kept, *trainable])  # the pass may end several times
            self._kept = still_referenced(each_once)
        else:
            self._kept = trainable
        return trainable

    def forget_batches_of_ended_passes(self) -> None:
        """Forgets the batches of ended passes, because the script begins another loop."""
        self._kept = []

    def _still_trainable(self, ended_pass: TrainingPass) -> list[Delivery]:
        """Returns the batches of an ended pass on which the script may still train.

        If the script holds the tensors of several batches, it keeps them on purpose, as
        `itertools.cycle` does, and may train on each of them again. If it holds only one, that is
        the last batch of an ordinary loop, in its variable `batch`. The loop may still train on it
        only if it has not done so yet.
        """
        held = self._table.held_by_script(ended_pass)
        script_keeps_batches = len(held) > 1
        if script_keeps_batches:
            return held
        return [delivery for delivery in held if delivery in ended_pass.untrained]

    def find(self) -> list[Delivery]:
        """Returns the deliveries that a loss comes from.

        - If modules were called with deliveries, the loss comes from these.
        - If not, it is taken to come from the next delivery of each open pass. Then its factor must
          be the same for all deliveries that it may come from.

        Raises:
            UsageError: the loss may come from several deliveries of different weight.
        """
        if not self.call_was_seen:
            self._raise_if_possible_sources_differ()
            return self._next_of_each_pass()

        if not weigh_the_same(self._called_with):
            return self._without_skipped(self._called_with)

        # A module was also called with tensors that no loader handed out, but that the script may
        # have made from another batch.
        if self._called_without_delivery:
            self._warn_of_other_batches(self._called_with[0])
        return self._called_with

    def _next_of_each_pass(self) -> list[Delivery]:
        """Returns the deliveries that a loss is taken to come from if no forward pass has shown it.

        For example, the loop `for a, b in zip(one, other)` converts both batches and then calls the
        model: the loss comes from the latest batch of `one` and that of `other`.
        """
        next_deliveries = [training_pass.next_trained for training_pass in self._open_passes]
        return [delivery for delivery in next_deliveries if delivery is not None]

    def _without_skipped(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Returns the deliveries that a loss comes from, without those that the loop has skipped.

        Example: the loop calls the model with batch 1, skips it (`continue`), and calls the model
        with batch 2. The script holds no tensor of batch 1 any more, so the loss is taken to come
        from batch 2.

        Args:
            deliveries: the deliveries of different weight with which modules were called since the
                last backward pass.

        Raises:
            UsageError: the loss may come from several deliveries of different weight.
        """
        held = still_referenced(deliveries)
        if len(held) == len(deliveries):  # none was skipped
            raise mixed_sources_error(deliveries)
        if not held or not weigh_the_same(held):
            raise skipped_batch_error()

        # The script may have computed the loss from batch 1, and dropped the batch. With virtual
        # ranks an error follows, as no backward pass was made for batch 1 when the optimizer steps.
        # Without them nothing would notice the wrong factor, so nothing is assumed.
        has_virtual_ranks = all(delivery.micro_batch.virtual_rank is not None for delivery in held)
        if not has_virtual_ranks:
            raise skipped_batch_error()
        return held

    def _raise_if_possible_sources_differ(self) -> None:
        """Raises UsageError if a loss may come from deliveries of different weight.

        Called if no forward pass has shown which delivery the loss comes from.
        """
        if not self._open_passes:
            self._check_loss_is_of_no_loader()
            return

        of_open_passes: list[Delivery] = []
        for training_pass in self._open_passes:
            of_open_passes += training_pass.possible_sources

        # Batches of ended passes that the script still holds are possible, too.
        possible = [*of_open_passes, *still_referenced(self._kept)]
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
        held = still_referenced(self._kept)
        weighted = [delivery for delivery in held if not delivery.micro_batch.plain]
        if weighted:
            raise unknown_source_error(weighted, "of a loader that has ended")

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
        for other in self._untrained_or_kept():
            is_of_other_pass = other.training_pass is not recognised.training_pass
            if is_of_other_pass and not weigh_the_same([recognised, other]):
                different.append(other)

        if not different:
            return

        self._warned_of_other_batches = True
        parts = describe_parts([recognised, *different])
        warn(
            "one world.backward(loss) while two loaders are trained on",
            found="the prepared model was called with a batch of one loader, and with tensors that "
            f"no loader gave. Of the two loaders' batches this rank has {parts} "
            "samples, which count differently; the loss is taken to come from the first alone, so "
            "its weight is wrong if these tensors were made of the other batch",
            do=TRAIN_APART,
        )

    def _untrained_or_kept(self) -> list[Delivery]:
        """Returns the batches that the script has not trained yet, or may train again."""
        untrained: list[Delivery] = []
        for training_pass in self._open_passes:
            untrained += training_pass.untrained
        return untrained + still_referenced(self._kept)


def unknown_source_error(
    possible: Sequence[Delivery], which_batches: str, advice: str = FETCH_LATER
) -> UsageError:
    """Returns the error for a loss that may come from any of several batches.

    The batches have different numbers of samples, so the factor of the loss depends on which of
    them it comes from. For example: "it is not known which batch the loss comes from: the loop
    holds several batches of a loader that has ended, of which this rank has 3 of 8 and 2 of 8
    samples, so its loss counts differently for each. ..."

    Args:
        possible: the batches that the loss may come from. If there is only one, the other
            possibility is that the loss comes from no batch of a loader, and needs no factor.
        which_batches: the words after "several batches", here "of a loader that has ended".
        advice: the beginning of the advice.
    """
    batches = "several batches" if len(possible) > 1 else "a batch"
    return UsageError(
        "world.backward(loss) in a loop that holds batches which it fetched before",
        "it is not known which batch the loss comes from: the loop holds "
        f"{batches} {which_batches}, of which this rank has {describe_parts(possible)} samples, so "
        "its loss counts differently for each. No call of the prepared model was seen with a "
        "tensor that the loader gave, or a view of one (calls inside of compiled code are not "
        "seen)",
        f"{advice}; or call the model with the tensors that the loader gave and convert them "
        "inside of it",
    )


def skipped_batch_error() -> UsageError:
    """Returns the error for a loss that follows forward passes of batches that were skipped."""
    return UsageError(
        "a loop that skips batches which weigh differently",
        "no backward pass has followed an earlier call of the prepared model, so the loss may come "
        "from several batches, and no single factor is exact for all of them",
        f"call world.backward for every batch; {TO_LEAVE_ONE_OUT}",
    )


def mixed_sources_error(deliveries: Sequence[Delivery]) -> UsageError:
    """Returns the error for a loss that comes from several batches of different weight.

    `World.backward` multiplies each loss by one factor, but each of these batches needs another.
    For example: "the loss comes from 2 batches, of which this rank has 3 of 8 and 4 of 8 samples:
    no single factor is exact for all of them on these ranks".
    """
    return UsageError(
        "one world.backward(loss) for batches that weigh differently",
        f"the loss comes from {len(deliveries)} batches, of which this rank has "
        f"{describe_parts(deliveries)} samples: no single factor is exact for all of them on "
        "these ranks",
        TRAIN_APART,
    )


def describe_parts(deliveries: Sequence[Delivery]) -> str:
    """Describes how many samples this rank has of up to four deliveries: `3 of 8 and 2 of 8`."""
    parts: list[str] = []
    for delivery in deliveries:
        part = f"{delivery.micro_batch.local_rows} of {delivery.micro_batch.global_samples}"
        if part not in parts:
            parts.append(part)
    return " and ".join(parts[:4])
