"""The state of the optimizer step that is being computed. There is one `Step` in a run.

A *pass* is one iteration of a training loop over a loader, and a *delivery* is one micro-batch that
the loop gets in it. A loop may get deliveries before it has trained the earlier ones: it prefetches
by hand, or keeps an epoch with `list(loader)` or `itertools.cycle(loader)`. The factor of a loss
belongs to the delivery that the loss came from, which is not always the latest.

So each delivery is remembered by the storages of its tensors. As soon as a loop has got one too
early, the prepared modules report the tensors that they are called with: the storages of their
inputs say which delivery is trained. If nothing says it, and the deliveries in question do not
weigh the same, `source_of_loss` raises an error.

Loaders say what they hand out, `World.backward` and the prepared optimizers what they did with it,
and the step tells the extensions of the run (`session.extension`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    still_referenced,
    two_loaders_error,
    unknown_source_error,
    weigh_the_same,
    weight_in_backward,
)
from lockstep.session.extension import Extensions
from lockstep.session.micro_batch import MicroBatch, VirtualRank

if TYPE_CHECKING:
    from torch import Tensor

CHECK_EVERY = 200
"""Global batches from one comparison of the ranks to the next, by default."""
_EARLY_CHECKS = frozenset({1, 2, 3, 10})


def check_due(number: int, every: int = CHECK_EVERY) -> bool:
    """Returns True if the ranks are to be compared at this global batch, counted from 1.

    They are compared in some of the first global batches, and then at regular intervals.
    """
    return number in _EARLY_CHECKS or number % every == 0


StepKey = tuple[TrainingPass, int, int]
"""A pass, the number of its global batch, and the number of its part that an optimizer steps for:
together they identify an optimizer step."""


class Dispute(NamedTuple):
    """A virtual rank for which two processes have computed different gradients."""

    virtual_rank: int
    scales: list[float]
    """The factor of the loss of each of its micro-batches."""


@dataclass(eq=False)
class OpenPass:
    """A pass over a prepared loader, with or without gradients, and what was logged in it."""

    loader: Any
    training_pass: TrainingPass | None
    """None for a pass without gradients."""
    begun: int
    """Global batches that were trained before it began."""
    number: int = 0
    """Its number, from 1, among the passes over this loader that began at the same step. It is 0
    until something is logged in the pass, or the loader is exhausted."""
    sums: Any = None
    """The `WeightedSums` of what the script has logged in it; None: nothing yet."""
    description: str = ""
    """What it is called, such as `epoch 3` or `validation`; empty if it has no name."""
    is_shown: bool = False
    """True for a loop over `World.progress`."""
    is_exhausted: bool = False
    """True if the loader has nothing more, but the loop holds batches that it has not trained."""
    handed_out: MicroBatch = field(default_factory=MicroBatch)
    """The micro-batch that was handed out last."""
    delivery_of_name: dict[str, Delivery | None] = field(default_factory=dict)
    """The delivery that the loop computed on when a name was logged last."""

    @property
    def is_training(self) -> bool:
        """True for a pass with gradients."""
        return self.training_pass is not None

    @property
    def identity(self) -> tuple[int, bool, int, int]:
        """What tells it from other passes. It is the same on all ranks that take part in the pass.

        A rank may take part in more passes than others: rank 0 alone may look at some samples. So
        passes are counted anew at each step, and those in which nothing happens do not count.
        """
        return self.loader.number, self.is_training, self.begun, self.number

    @property
    def micro_batch(self) -> MicroBatch:
        """The micro-batch that the loop computes on."""
        if self.training_pass is None or self.training_pass.in_use is None:
            return self.handed_out
        return self.training_pass.in_use.micro_batch

    def takes(self, name: str) -> bool:
        """Returns True if a value that is logged now belongs to the pass.

        When the loader is exhausted a loop may still train on batches that it holds. It logs for
        the last of them what it has logged for those before; what it logs besides comes after it.
        """
        if not self.is_exhausted:
            return True
        assert self.training_pass is not None
        if name not in self.delivery_of_name:
            return bool(self.training_pass.untrained)
        return self.delivery_of_name[name] is not self.training_pass.in_use


class Step:
    """The state of the optimizer step that is being computed."""

    def __init__(self) -> None:
        self.extensions = Extensions()
        self.number = 0
        """Global batches finished by an optimizer step since the start of the training."""
        self.samples = 0
        """Samples, over all ranks, that this process has seen trained on."""
        self.num_devices = 1
        """Devices of this process, which divide each of its micro-batches."""
        self.micro_batch_in_use = MicroBatch()
        """The micro-batch that any loader handed out last, evaluation included. When a pass is
        over, it is again what it was before the pass."""
        self.latest_micro_batch = MicroBatch()
        """The same, but not reset when a pass is over."""
        self.micro_batch_of_loss = MicroBatch()
        """The micro-batch that the latest loss given to `World.backward` came from."""
        self.sample_in_place_of_none: Any = None
        """A batch of one sample, like the latest micro-batch that had no samples."""
        self.virtual_rank: VirtualRank | None = None
        """The virtual rank of the current micro-batch, even while all of them train one model."""
        self.find_dispute: Callable[[], Dispute | None] = lambda: None
        """Compares what processes have computed in a checked global batch (`check_devices`).
        Loaders call it on all processes; None: no two of them disagree."""
        self.num_common_steps = 0
        """Global batches, from the first, in which all virtual ranks train one model."""
        self.phase = "other"
        """What this rank spends its time on, one of `extension.PHASES`."""
        self.open_passes: list[OpenPass] = []
        """The passes over loaders that go on, the one that has handed out a micro-batch last at the
        end."""
        self.last_pass: OpenPass | None = None
        """The pass that ended last; None: none has ended."""
        self._num_passes: Counter[tuple[int, bool, int]] = Counter()
        """How many passes have a number, by all of their identity but the number."""
        self.pass_of_loss: TrainingPass | None = None
        """The pass that the latest loss given to `World.backward` came from; None: there was none.
        """
        self._no_loader = TrainingPass()
        """The pass of what is trained outside of any prepared loader. It never ends."""
        self.training_pass = self._no_loader
        """The pass that is trained on."""
        self._passes: list[TrainingPass] = []
        """The passes that go on, the one trained on last at the end."""
        self._delivery_by_storage: dict[StorageReference, Delivery | None] = {}
        """None for a storage that belongs to several deliveries."""
        self._prune_at = 64
        """At this many entries, those of freed storages are removed from the table above."""
        self._forwarded: list[Delivery] = []
        """Deliveries that forward passes were called with since the last backward pass."""
        self._trainable_after_end: list[Delivery] = []
        """Deliveries of a pass that is over which the script may still train on."""
        self._trainable_of_ended_passes: list[Delivery] = []
        """The same, of all passes that ended while another pass went on: a loop over
        `zip(itertools.cycle(one), other)` trains on both."""
        self._had_empty_part = False
        """True once this rank was handed a micro-batch without samples."""
        self._was_fetched_ahead = False
        self._called_with_unknown = False
        """True if a module was called, since the last backward pass, with nothing that a loader
        gave."""
        self._warned_of_unknown = False
        self._first_batch_at_s: float | None = None
        self._last_step_at_s = 0.0

    @property
    def in_training_loop(self) -> bool:
        """True while a prepared loader is being trained on."""
        return bool(self._passes)

    @property
    def micro_batch(self) -> MicroBatch:
        """The micro-batch that a training loop works on."""
        return self.training_pass.micro_batch

    @property
    def key(self) -> StepKey:
        """A key that identifies the current optimizer step."""
        return self.training_pass, self.training_pass.number, self.training_pass.num_parts

    def is_unfinished(self, key: StepKey) -> bool:
        """Returns True if further micro-batches are trained before the optimizer step of this key.

        That may be the current step. If the loader has ended, it may be the last one of a loop that
        fetches ahead and holds batches which it has not trained yet.
        """
        training_pass, number, num_parts = key
        is_latest_of_pass = (number, num_parts) == (training_pass.number, training_pass.num_parts)
        micro_batch = training_pass.micro_batch
        is_whole = micro_batch.opens and micro_batch.closes
        if is_whole or not is_latest_of_pass:
            return False
        if training_pass is self.training_pass:
            return True
        if self.training_pass is not self._no_loader or micro_batch.closes:
            return False
        return any(delivery.is_referenced for delivery in training_pass.untrained)

    @property
    def seconds(self) -> float:
        """Seconds from the first micro-batch handed out to the last optimizer step."""
        if self._first_batch_at_s is None:
            return 0.0
        return max(0.0, self._last_step_at_s - self._first_batch_at_s)

    def enter_phase(self, phase: str) -> str:
        """Says what this rank spends its time on from now on, and returns the phase before.

        Args:
            phase: one of `extension.PHASES`.
        """
        phase_before = self.phase
        self.phase = phase
        self.extensions.phase_entered(phase)
        return phase_before

    def hand_out(self, delivery: Delivery) -> None:
        """Notes that a pass hands out a micro-batch to train on.

        Training on it begins, unless one before it was not trained yet and weighs differently:
        then a forward pass has to show which of them is trained first.

        Raises:
            UsageError: another loader is being trained on, and the optimizer steps at other times.
        """
        training_pass = delivery.training_pass
        for other in list(self._passes):
            # A pass that the loop still trained on when it ended is over now.
            if other.ended:
                self.end_pass(other)
        self._remember(delivery)
        training_pass.untrained.append(delivery)
        training_pass.source_is_known = len(training_pass.untrained) == 1
        # In an evaluation with gradients no backward pass says which delivery is computed on.
        if training_pass.source_is_known or not training_pass.ever_stepped:
            training_pass.in_use = delivery
        if training_pass.source_is_known:  # every delivery before this one is trained
            self._begin_delivery(delivery)
            return
        # The loop fetches ahead: deliveries before this one are not trained yet.
        self._watch_forward_passes()
        # If all weigh the same and each has an optimizer step of its own, it makes no difference
        # which of them is taken for the one that is trained.
        is_whole = delivery.micro_batch.opens and delivery.micro_batch.closes
        if not is_whole or training_pass.active is None:
            return
        if weigh_the_same([training_pass.active, *training_pass.untrained]):
            self._begin_delivery(delivery)

    def note_empty_part(self, sample: Any) -> None:
        """This rank is about to get a micro-batch without samples.

        Args:
            sample: a batch of one sample that is like it.
        """
        self.sample_in_place_of_none = sample
        if not self._had_empty_part:
            self._had_empty_part = True
            self.extensions.part_is_empty()

    def module_called(
        self, storages: Iterable[StorageReference], *, has_gradient: bool = False
    ) -> None:
        """Notes that a prepared module is called with gradients enabled.

        Training on a delivery begins when a module is first called with its tensors.

        Args:
            storages: of the tensors that the module is called with.
            has_gradient: True if one of these has a gradient: it comes from another forward pass.

        Raises:
            UsageError: micro-batches are trained in another order than they were handed out in.
        """
        deliveries: list[Delivery] = []
        for storage in storages:
            delivery = self._delivery_by_storage.get(storage)
            if delivery is not None and delivery not in deliveries:
                deliveries.append(delivery)
        # Tensors with a gradient were computed by another module, whose own call was reported.
        # Other tensors of no delivery may have been made of any batch: `source_of_loss` warns.
        if not deliveries and not has_gradient:
            self._called_with_unknown = True
        for delivery in deliveries:
            training_pass = delivery.training_pass
            training_pass.in_use = delivery
            if delivery not in self._forwarded:
                self._forwarded.append(delivery)
            if delivery is not training_pass.active:  # the loop had fetched it before
                check_order(delivery)
                self._begin_delivery(delivery)
            elif self.training_pass is self._no_loader:
                # Its loader has ended, and the loop trains on a batch that it still holds.
                self.training_pass = training_pass
            training_pass.source_is_known = True

    def source_of_loss(self) -> MicroBatch:
        """Returns the micro-batch that a loss came from; called once before each backward pass.

        Raises:
            UsageError: it may have come from several, which do not weigh the same.
        """
        forwarded = self._forwarded
        self._forwarded = []
        trained = self._find_trained(forwarded)
        self._called_with_unknown = False
        for delivery in trained:
            self._mark_trained(delivery, seen_in_forward=bool(forwarded))
        self.micro_batch_of_loss = self.training_pass.micro_batch
        # The loss may be of another of several passes than the one that got a batch last.
        if forwarded and forwarded[0].training_pass is not self.training_pass:
            self.micro_batch_of_loss = forwarded[0].micro_batch
        return self.micro_batch_of_loss

    def _find_trained(self, forwarded: list[Delivery]) -> list[Delivery]:
        """Returns the deliveries that a loss came from.

        Args:
            forwarded: those that forward passes were called with since the last backward pass. If
                there are none, the loss is taken to come from those that are next in their passes.

        Raises:
            UsageError: it may have come from several, which do not weigh the same.
        """
        if not forwarded:
            self._check_source_is_known()
            trained: list[Delivery] = []
            for training_pass in self._passes:
                trained += next_trained(training_pass)
            return trained
        if not weigh_the_same(forwarded):
            self._forwarded = forwarded  # so that a second call fails too
            raise mixed_sources_error(forwarded)
        if self._called_with_unknown and not self._warned_of_unknown:
            self._warn_of_other_batches(forwarded[0])
        return forwarded

    def _mark_trained(self, delivery: Delivery, *, seen_in_forward: bool) -> None:
        """Notes that a backward pass follows a delivery.

        Args:
            delivery: that is trained.
            seen_in_forward: True if a forward pass was called with its tensors.
        """
        training_pass = delivery.training_pass
        training_pass.in_use = delivery
        if delivery in training_pass.untrained:
            training_pass.untrained.remove(delivery)
        if not seen_in_forward:
            return
        # Forward passes are watched, and none was called with an earlier delivery. If the script
        # has dropped the tensors of that, the loop has left it out: it will not be trained.
        still_untrained = []
        for other in training_pass.untrained:
            if other.is_referenced or other.place > delivery.place:
                still_untrained.append(other)
        training_pass.untrained = still_untrained

    def _check_source_is_known(self) -> None:
        """Raises UsageError if a loss may come from deliveries that do not weigh the same.

        It is called if no forward pass has shown which delivery the loss comes from.
        """
        if self.training_pass is self._no_loader:
            self._check_loss_is_of_no_loader()
            return
        possible: list[Delivery] = []
        for training_pass in self._passes:
            if training_pass.active is not None:
                possible.append(training_pass.active)
            if not training_pass.source_is_known:
                possible += training_pass.untrained
        ended_deliveries = still_referenced(self._trainable_of_ended_passes)
        if weigh_the_same([*possible, *ended_deliveries]):
            return
        if weigh_the_same(possible):  # only those of passes that have ended weigh otherwise
            raise unknown_source_error(
                [*possible, *ended_deliveries],
                "of two loaders, one of which has ended",
                "begin another pass over the loader that ends first instead of itertools.cycle, "
                "which keeps its batches; " + TRAIN_APART,
            )
        passes = {delivery.training_pass for delivery in possible}
        if len(passes) > 1:
            raise mixed_sources_error(possible)
        raise unknown_source_error(possible, "that no backward pass has followed yet")

    def _check_loss_is_of_no_loader(self) -> None:
        """Raises UsageError if a loss may come from a batch of the pass that has ended last.

        No pass goes on, but the script may still hold such batches. That does no harm if their
        losses need no weight (`plain`).
        """
        deliveries_in_script = []
        for delivery in self._trainable_after_end:
            if delivery.is_referenced and not delivery.micro_batch.plain:
                deliveries_in_script.append(delivery)
        if deliveries_in_script:
            raise unknown_source_error(deliveries_in_script, "of a loader that has ended")

    def _warn_of_other_batches(self, recognised: Delivery) -> None:
        """Warns once if a loss may also come from a batch of another loader that weighs otherwise.

        Args:
            recognised: the batch that a forward pass was called with.
        """
        others: list[Delivery] = []
        for training_pass in self._passes:
            others += training_pass.untrained
        others += still_referenced(self._trainable_of_ended_passes)
        different = []
        for other in others:
            is_of_other_pass = other.training_pass is not recognised.training_pass
            if is_of_other_pass and not weigh_the_same([recognised, other]):
                different.append(other)
        if not different:
            return
        self._warned_of_unknown = True
        parts = describe_parts([recognised, *different])
        warn(
            "one world.backward(loss) while two loaders are trained on",
            "the prepared model was called with a batch of one loader, and with tensors that no "
            f"loader gave. Of the two loaders' batches this rank has {parts} "
            "samples, which count differently; the loss is taken to come from the first alone, so "
            "its weight is wrong if these tensors were made of the other batch",
            TRAIN_APART,
        )

    def _remember(self, delivery: Delivery) -> None:
        """Remembers the storages of a delivery, and forgets those that are freed."""
        table = self._delivery_by_storage
        for storage in delivery.storages:
            is_shared = storage in table and table[storage] is not delivery
            # None marks a storage that several deliveries share.
            table[storage] = None if is_shared else delivery
        if len(table) >= self._prune_at:
            alive: dict[StorageReference, Delivery | None] = {}
            for storage, known_delivery in table.items():
                if not storage.expired():
                    alive[storage] = known_delivery
            self._delivery_by_storage = alive
            # Pruning again only when the table has doubled keeps its cost per entry constant.
            self._prune_at = max(64, 2 * len(self._delivery_by_storage))

    def _watch_forward_passes(self) -> None:
        """Makes the prepared modules call `module_called` from now on."""
        if not self._was_fetched_ahead:
            self._was_fetched_ahead = True
            self.extensions.batches_fetched_ahead()

    def _begin_delivery(self, delivery: Delivery) -> None:
        """Notes that training on a delivery begins."""
        delivery.training_pass.active = delivery
        micro_batch = self.begin(delivery.training_pass, delivery.micro_batch)
        if delivery.on_begin is not None:
            delivery.on_begin(micro_batch)

    def begin(self, training_pass: TrainingPass, micro_batch: MicroBatch) -> MicroBatch:
        """Notes that training on a micro-batch of a pass begins.

        Returns:
            The micro-batch as it is trained: while all virtual ranks train one model, without one.

        Raises:
            UsageError: another loader is being trained on, and the optimizer steps at other times.
        """
        self.virtual_rank = micro_batch.virtual_rank
        if self.number < self.num_common_steps:
            micro_batch = micro_batch.without_virtual_rank()
        self._check_other_passes(training_pass, micro_batch)
        # The pass that is trained on last stands at the end.
        if training_pass in self._passes:
            self._passes.remove(training_pass)
        self._passes.append(training_pass)
        self.training_pass = training_pass
        if self._first_batch_at_s is None:
            self._first_batch_at_s = time.perf_counter()
        training_pass.begin_micro_batch(micro_batch)
        self.micro_batch_in_use = micro_batch
        self.extensions.begin(micro_batch)
        return micro_batch

    def _check_other_passes(self, training_pass: TrainingPass, micro_batch: MicroBatch) -> None:
        """Raises UsageError if the optimizer would step in the middle of another pass's batch."""
        for other in self._passes:
            if other is training_pass:
                continue
            if optimizer_steps_at(other.micro_batch) != optimizer_steps_at(micro_batch):
                raise two_loaders_error()
            # The factor of a loss then depends on which of the two micro-batches it comes from.
            if weight_in_backward(other.micro_batch) != weight_in_backward(micro_batch):
                self._watch_forward_passes()

    def end_pass(self, training_pass: TrainingPass, *, exhausted: bool = False) -> None:
        """Notes that a pass is over. If it ended within a global batch, gradients are cleared.

        Args:
            training_pass: the pass.
            exhausted: True if the loader has nothing more; False if the loop was left before.
        """
        if training_pass not in self._passes:  # nothing of it was trained, or it has ended before
            return
        self._passes.remove(training_pass)
        training_pass.ended = True
        if self._passes:
            self.training_pass = self._passes[-1]
        else:
            self.training_pass = self._no_loader
            self.virtual_rank = None
        if training_pass.leaves_gradients(exhausted=exhausted):
            self.extensions.clear_gradients()
        self._keep_trainable(training_pass)
        if self._passes:  # the loop goes on with another loader, and may come back to these batches
            self._trainable_of_ended_passes += self._trainable_after_end
            self._trainable_of_ended_passes = still_referenced(self._trainable_of_ended_passes)
        else:
            self._trainable_of_ended_passes = []
        self.extensions.pass_ended()

    def _keep_trainable(self, training_pass: TrainingPass) -> None:
        """Notes in `_trainable_after_end` which batches of an ended pass may still be trained on.

        These are batches whose tensors the script still holds. If it holds several, it keeps
        batches, as `itertools.cycle` does, and may train on each of them again. If it holds one,
        that is the last batch of an ordinary loop; it counts only if it was not trained.
        """
        referenced: list[Delivery] = []
        deliveries = dict.fromkeys(self._delivery_by_storage.values())  # each once, in order
        for delivery in deliveries:
            if delivery is None or delivery.training_pass is not training_pass:
                continue
            if delivery.is_referenced:
                referenced.append(delivery)
        if len(referenced) > 1:
            self._trainable_after_end = referenced
        else:
            untrained = training_pass.untrained
            self._trainable_after_end = [d for d in referenced if d in untrained]
        all_are_plain = all(delivery.micro_batch.plain for delivery in self._trainable_after_end)
        if not all_are_plain:  # a later loss of one of them has to be recognised, to be weighted
            self._watch_forward_passes()

    def weigh_loss(self, loss: Tensor) -> Tensor:
        """Weighs a loss by its part of the global batch, and adds it to the global batch's loss.

        Returns:
            The weighted loss, for the backward pass. It may be NaN if its weight is 0.
        """
        training_pass = self.training_pass
        scale = self.micro_batch_of_loss.scale
        weighted = loss if scale == 1.0 else loss * scale
        # The loss of no samples may be NaN, and counts as 0. So does one that is computed again.
        is_counted = scale != 0.0 and not training_pass.micro_batch.is_repeat
        counted = weighted if is_counted else weighted.new_zeros(())
        self._forget_loss_of_last_step(training_pass)
        part = counted.detach()
        virtual_rank = training_pass.micro_batch.virtual_rank
        if virtual_rank is not None and not virtual_rank.has_own_step:
            self._add_loss_of_virtual_rank(training_pass, virtual_rank, part)
        # With virtual ranks, the scale makes a mean over one of them; this makes it one over all.
        if virtual_rank is not None and virtual_rank.mean_number_on_process != 1:
            part = part / virtual_rank.mean_number_on_process
        training_pass.loss = part + training_pass.loss
        self.pass_of_loss = training_pass
        return weighted

    def _forget_loss_of_last_step(self, training_pass: TrainingPass) -> None:
        """Begins to add up losses anew, if a global batch begins without a loader that says so.

        Without a loader nobody says what a global batch is: each optimizer step ends one.
        """
        is_used_up = training_pass.ended and not training_pass.untrained
        without_loader = training_pass is self._no_loader or is_used_up
        if without_loader and training_pass.stepped:
            training_pass.loss = 0.0
            training_pass.stepped = False

    def _add_loss_of_virtual_rank(
        self, training_pass: TrainingPass, virtual_rank: VirtualRank, part: Tensor
    ) -> None:
        """Adds a weighted loss to what a virtual rank has of the loss of the global batch."""
        losses = training_pass.loss_of_virtual_rank
        if training_pass.micro_batch.first:
            losses.clear()
        if virtual_rank.counts:
            number = virtual_rank.number
            losses[number] = part if number not in losses else losses[number] + part

    def mark_stepped(self) -> None:
        """Notes that a prepared optimizer has stepped.

        If several optimizers step for one global batch, the first one counts. Outside of a loader
        every step counts.
        """
        training_pass = self.training_pass
        if not training_pass.stepped or training_pass is self._no_loader:
            self.extensions.step_finished(self.number)
            self.number += 1
            self.samples += training_pass.micro_batch.global_samples
            self._last_step_at_s = time.perf_counter()
        training_pass.stepped = True
        training_pass.ever_stepped = True

    @contextmanager
    def pass_opened(
        self, loader: Any, training_pass: TrainingPass | None = None
    ) -> Iterator[OpenPass]:
        """Notes that a pass over a loader goes on inside this context.

        Args:
            loader: the loader.
            training_pass: None for a pass without gradients.
        """
        self.close_passes(exhausted_only=True)
        open_pass = OpenPass(loader, training_pass, begun=self.number)
        self.open_passes.append(open_pass)
        goes_on = False
        try:
            yield open_pass
            # The loader is exhausted, so this pass counts on every rank.
            self.number_pass(open_pass)
            if training_pass is not None:  # a loop that fetches ahead holds batches to train on
                goes_on = bool(still_referenced(training_pass.untrained))
        finally:
            open_pass.is_exhausted = goes_on
            if not goes_on:
                self._close_pass(open_pass)

    def pass_hands_out(self, open_pass: OpenPass, micro_batch: MicroBatch) -> None:
        """Notes that a pass hands out a micro-batch, with or without gradients."""
        open_pass.handed_out = micro_batch
        is_latest = self.open_passes and self.open_passes[-1] is open_pass
        if not is_latest and open_pass in self.open_passes:
            self.open_passes.remove(open_pass)
            self.open_passes.append(open_pass)

    def number_pass(self, open_pass: OpenPass) -> None:
        """Gives a pass its number, if it has none yet."""
        if open_pass.number > 0:
            return
        key = open_pass.identity[:3]
        self._num_passes[key] += 1
        open_pass.number = self._num_passes[key]

    def close_passes(self, *, exhausted_only: bool = False) -> None:
        """Closes the passes that go on.

        Args:
            exhausted_only: True for only those whose loader is exhausted: the loop has gone on to
                another pass, so it has trained on the batches that it held.
        """
        for open_pass in list(self.open_passes):
            if open_pass.is_exhausted or not exhausted_only:
                self._close_pass(open_pass)

    def _close_pass(self, open_pass: OpenPass) -> None:
        """Notes that a pass is over, or that the loop has left it."""
        if open_pass not in self.open_passes:  # the run was left before the loop
            return
        self.open_passes.remove(open_pass)
        if open_pass.number > 0:
            self.last_pass = open_pass
        if open_pass.sums is not None:
            self.extensions.values_logged(open_pass.sums, open_pass)
        self.close_passes(exhausted_only=True)
        if not self.open_passes:  # no earlier step has a pass that may still get a number
            self._forget_passes_of_earlier_steps()

    def _forget_passes_of_earlier_steps(self) -> None:
        """Drops the numbers of passes that began at an earlier step than the present one."""
        counts = self._num_passes
        self._num_passes = Counter({key: n for key, n in counts.items() if key[2] == self.number})

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Steps that are taken inside do not count: they are put back, and nobody observes them."""
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
