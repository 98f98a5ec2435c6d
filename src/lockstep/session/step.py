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
"""By default, the ranks are compared once in this number of global batches."""
_EARLY_CHECKS = frozenset({1, 2, 3, 10})


def check_due(number: int, every: int = CHECK_EVERY) -> bool:
    """Returns True if the ranks must be compared at a global batch.

    They are compared at some of the first global batches, and then at regular intervals.

    Args:
        number: number of the global batch, from 1.
        every: length of the interval.
    """
    return number in _EARLY_CHECKS or number % every == 0


StepKey = tuple[TrainingPass, int, int]
"""Identifies an optimizer step: the pass, the number of its global batch, and the number of the
part for which the optimizer steps."""


class Dispute(NamedTuple):
    """A virtual rank for which two processes have computed different gradients."""

    virtual_rank: int
    scales: list[float]
    """The factor of the loss in each micro-batch of the virtual rank."""


@dataclass(eq=False)
class OpenPass:
    """A pass over a prepared loader, with or without gradients, and what was logged in it."""

    loader: Any
    training_pass: TrainingPass | None
    """None for a pass without gradients."""
    begun: int
    """The number of global batches that were trained before the pass began."""
    number: int = 0
    """The number of the pass, from 1, among those over this loader that began at the same step. It
    is 0 until something is logged in the pass, or the loader is exhausted."""
    sums: Any = None
    """The `WeightedSums` of the values that the script has logged in the pass, or None."""
    description: str = ""
    """The name of the pass, e.g. `epoch 3` or `validation`; empty if it has none."""
    is_shown: bool = False
    """True for a loop over `World.progress`."""
    only_held_batches_remain: bool = False
    """True if the loader is exhausted, but the loop holds batches that it has not trained yet. The
    pass then stays open until the script begins another one."""
    handed_out: MicroBatch = field(default_factory=MicroBatch)
    """The micro-batch that was handed out last."""
    delivery_of_name: dict[str, Delivery | None] = field(default_factory=dict)
    """For each logged name, the delivery that the loop computed on when it was last logged."""

    @property
    def is_training(self) -> bool:
        """True for a pass with gradients."""
        return self.training_pass is not None

    @property
    def identity(self) -> tuple[int, bool, int, int]:
        """Identifies the pass. It is the same on all ranks that take part in the pass.

        Some ranks may take part in more passes than others, for example if only rank 0 looks at
        some samples. So passes are counted from 0 again at each step, and a pass is only counted
        once something is logged in it or its loader is exhausted.
        """
        return self.loader.number, self.is_training, self.begun, self.number

    @property
    def micro_batch(self) -> MicroBatch:
        """The micro-batch that the loop is computing on."""
        if self.training_pass is None or self.training_pass.last_used is None:
            return self.handed_out
        return self.training_pass.last_used.micro_batch

    def takes(self, name: str) -> bool:
        """Returns True if a value that the script logs now belongs to this pass.

        It does as long as the loader has more batches. Once the loader is exhausted, the loop may
        still train on batches that it holds, and nothing tells when the loop is over. A script logs
        a name once for each batch, so a second value of the same batch comes from after the loop.

        Args:
            name: name of the value.
        """
        if not self.only_held_batches_remain:
            return True
        assert self.training_pass is not None  # only training leaves batches to train on

        # A name that this pass has not logged yet belongs to it as long as batches are untrained.
        if name not in self.delivery_of_name:
            return bool(self.training_pass.untrained)

        batch_of_last_value = self.delivery_of_name[name]
        present_batch = self.training_pass.last_used
        return batch_of_last_value is not present_batch


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
        self.open_passes: list[OpenPass] = []
        """The passes over loaders that are open. The one that was last to hand out a micro-batch is
        at the end."""
        self.last_pass: OpenPass | None = None
        """The pass that ended last; None if none has ended."""
        self._num_passes: Counter[tuple[int, bool, int]] = Counter()
        """How many passes have a number, by their identity without the number."""
        self.pass_of_loss: TrainingPass | None = None
        """The pass of the latest loss that was passed to `World.backward`, or None."""
        self._pass_without_loader = TrainingPass()
        """Stands for everything that is trained outside of any prepared loader. It never ends."""
        self.training_pass = self._pass_without_loader
        """The pass that is being trained on."""
        self._passes: list[TrainingPass] = []
        """The training passes that are open. The one that was last trained on is at the end."""
        self._delivery_by_storage: dict[StorageReference, Delivery | None] = {}
        """The delivery that a storage belongs to; None if it belongs to several."""
        self._prune_at = 64
        """When the table above has this many entries, those of freed storages are removed."""
        self._seen_in_forward: list[Delivery] = []
        """Deliveries with which modules were called since the last backward pass."""
        self._trainable_of_last_pass: list[Delivery] = []
        """Deliveries of the pass that ended last on which the script may still train. Used while no
        pass is open."""
        self._trainable_of_ended_passes: list[Delivery] = []
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
    def key(self) -> StepKey:
        """Identifies the current optimizer step."""
        return self.training_pass, self.training_pass.number, self.training_pass.num_parts

    def is_unfinished(self, key: StepKey) -> bool:
        """Returns True if a step is still due: the loop is in the middle of its micro-batches.

        Args:
            key: the optimizer step: its pass, the number of its global batch, and the number of
                the optimizer step within the pass.
        """
        training_pass, number, num_parts = key
        latest_step_of_pass = (training_pass.number, training_pass.num_parts)
        if (number, num_parts) != latest_step_of_pass:
            return False  # the pass has gone on to a later optimizer step

        # A step of a single micro-batch is never left half-way.
        micro_batch = training_pass.micro_batch
        is_only_micro_batch = micro_batch.opens_step and micro_batch.closes_step
        if is_only_micro_batch:
            return False

        # While the pass is trained, its latest step is the current one. This is so even in the last
        # micro-batch of the step: the optimizer steps after it.
        if training_pass is self.training_pass:
            return True

        another_pass_is_trained = self.training_pass is not self._pass_without_loader
        if another_pass_is_trained or micro_batch.closes_step:
            return False

        # The loader has ended. A loop that fetches ahead may still hold micro-batches of the step.
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

        A pass has two attributes for this. `being_trained` is the delivery whose micro-batch has
        begun, which sets the factor of the loss; `last_used` is the delivery on which the script
        was last seen to compute, which tells what a logged value belongs to.

        Raises:
            UsageError: two loaders are trained on, and the optimizer steps at different times.
        """
        training_pass = delivery.training_pass
        for other in list(self._passes):
            # The loop trained on this pass after its loader had ended. It has now gone on.
            if other.ended:
                self.end_pass(other)

        self._remember(delivery)
        training_pass.untrained.append(delivery)

        # The usual case: every earlier delivery has been trained, so the next loss is of this one.
        is_only_untrained = len(training_pass.untrained) == 1
        training_pass.source_of_loss_is_known = is_only_untrained
        if is_only_untrained:
            training_pass.last_used = delivery
            self._begin_delivery(delivery)
            return

        # The loop fetches ahead: earlier deliveries have not been trained yet. From now on the
        # forward passes show which of them is trained.
        self._watch_forward_passes()

        # In an evaluation with gradients, no backward pass shows which delivery is computed on, so
        # it is taken to be the latest one.
        may_be_evaluation = not training_pass.ever_stepped
        if may_be_evaluation:
            training_pass.last_used = delivery

        # Training may begin at once if it makes no difference which delivery is trained first: each
        # has its own optimizer step, and all have the same weight as the one being trained.
        being_trained = training_pass.being_trained
        has_own_step = delivery.micro_batch.opens_step and delivery.micro_batch.closes_step
        if being_trained is None or not has_own_step:
            return
        if weigh_the_same([being_trained, *training_pass.untrained]):
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
        self, storages: Iterable[StorageReference], *, has_gradient: bool = False
    ) -> None:
        """Records that a prepared module is called with gradients enabled.

        If the loop has fetched ahead, this shows which delivery is trained: training on it begins
        when a module is first called with its tensors.

        Args:
            storages: references to the storages of the tensors that the module is called with.
            has_gradient: True if one of the tensors requires a gradient, because it was computed in
                another forward pass.

        Raises:
            UsageError: micro-batches are trained in a different order than they were handed out.
        """
        deliveries: list[Delivery] = []
        for storage in storages:
            delivery = self._delivery_by_storage.get(storage)
            if delivery is not None and delivery not in deliveries:
                deliveries.append(delivery)

        # The module was called with tensors that no loader handed out. If one requires a gradient,
        # they come from another module, whose own call was reported. If not, the script may have
        # made them from any batch. `source_of_loss` warns of this if it makes a difference.
        if not deliveries and not has_gradient:
            self._called_without_delivery = True

        for delivery in deliveries:
            if delivery not in self._seen_in_forward:
                self._seen_in_forward.append(delivery)
            self._train_on(delivery)

    def _train_on(self, delivery: Delivery) -> None:
        """Makes a delivery the one being trained, because a module was called with its tensors.

        Raises:
            UsageError: it is trained in a different order than it was handed out.
        """
        pass_of_delivery = delivery.training_pass
        pass_of_delivery.last_used = delivery

        if delivery is not pass_of_delivery.being_trained:
            # The loop had fetched it ahead, and trains on it now.
            check_order(delivery)
            self._begin_delivery(delivery)
        elif self.training_pass is self._pass_without_loader:
            # The loader has ended, and the loop trains on a batch that it still holds.
            self.training_pass = pass_of_delivery

        pass_of_delivery.source_of_loss_is_known = True

    def source_of_loss(self) -> MicroBatch:
        """Returns the micro-batch that a loss comes from. Called once before each backward pass.

        Raises:
            UsageError: the loss may come from several micro-batches of different weight.
        """
        # Deliveries with which the prepared modules were called since the last backward pass. The
        # list is empty as long as forward passes are not watched.
        seen_in_forward = self._seen_in_forward
        self._seen_in_forward = []

        deliveries_of_loss = self._find_deliveries_of_loss(seen_in_forward)
        for delivery in deliveries_of_loss:
            self._mark_trained(delivery, seen_in_forward=bool(seen_in_forward))

        # The calls of modules before this backward pass say nothing about the next loss.
        self._called_without_delivery = False

        # Usually the loss belongs to the pass that was last trained on. If several passes are open,
        # the forward pass may show that it belongs to another one.
        self.micro_batch_of_loss = self.training_pass.micro_batch
        if seen_in_forward and seen_in_forward[0].training_pass is not self.training_pass:
            self.micro_batch_of_loss = seen_in_forward[0].micro_batch
        return self.micro_batch_of_loss

    def _find_deliveries_of_loss(self, seen_in_forward: list[Delivery]) -> list[Delivery]:
        """Returns the deliveries that a loss comes from.

        Args:
            seen_in_forward: deliveries with which modules were called since the last backward pass.

        Raises:
            UsageError: the loss may come from several deliveries of different weight.
        """
        # If no module was seen to be called with a delivery, the loss is taken to come from the
        # next delivery of each open pass.
        if not seen_in_forward:
            self._check_source_is_known()
            deliveries: list[Delivery] = []
            for training_pass in self._passes:
                deliveries += next_trained(training_pass)
            return deliveries

        if not weigh_the_same(seen_in_forward):
            self._seen_in_forward = seen_in_forward  # so that a second backward pass fails too
            raise mixed_sources_error(seen_in_forward)

        # A module was also called with tensors that no loader handed out.
        if self._called_without_delivery and not self._warned_of_other_batches:
            self._warn_of_other_batches(seen_in_forward[0])
        return seen_in_forward

    def _mark_trained(self, delivery: Delivery, *, seen_in_forward: bool) -> None:
        """Records that the backward pass of a delivery begins.

        Args:
            delivery: the delivery that is trained.
            seen_in_forward: True if a module was called with its tensors.
        """
        training_pass = delivery.training_pass
        training_pass.last_used = delivery
        if delivery in training_pass.untrained:
            training_pass.untrained.remove(delivery)
        if not seen_in_forward:
            return

        # Drop earlier deliveries that the loop has skipped: forward passes are watched, none has
        # used such a delivery, and the script no longer holds its tensors.
        still_untrained = []
        for other in training_pass.untrained:
            is_earlier = other.number_in_pass < delivery.number_in_pass
            was_skipped = is_earlier and not other.is_referenced
            if not was_skipped:
                still_untrained.append(other)

        training_pass.untrained = still_untrained

    def _check_source_is_known(self) -> None:
        """Raises UsageError if a loss may come from deliveries of different weight.

        Called if no forward pass has shown which delivery the loss comes from.
        """
        if self.training_pass is self._pass_without_loader:
            self._check_loss_is_of_no_loader()
            return

        # In each open pass, the loss may come from the delivery being trained. If the loop has
        # fetched ahead, and no forward pass has shown which of its batches comes next, the loss may
        # come from any delivery that no backward pass has followed yet.
        possible: list[Delivery] = []
        for training_pass in self._passes:
            if training_pass.being_trained is not None:
                possible.append(training_pass.being_trained)
            if not training_pass.source_of_loss_is_known:
                possible += training_pass.untrained

        # Batches of ended passes that the script still holds are possible, too.
        ended_deliveries = still_referenced(self._trainable_of_ended_passes)
        if weigh_the_same([*possible, *ended_deliveries]):
            return

        # The open passes agree on the weight, so it is the ended passes that differ.
        if weigh_the_same(possible):
            raise unknown_source_error(
                [*possible, *ended_deliveries],
                "of two loaders, one of which has ended",
                "begin another pass over the loader that ends first instead of itertools.cycle, "
                "which keeps its batches; " + TRAIN_APART,
            )

        # Two loaders are trained on at once.
        passes = {delivery.training_pass for delivery in possible}
        if len(passes) > 1:
            raise mixed_sources_error(possible)

        # One loop has fetched ahead.
        raise unknown_source_error(possible, "that no backward pass has followed yet")

    def _check_loss_is_of_no_loader(self) -> None:
        """Raises UsageError if a loss may come from a batch of the pass that ended last.

        No pass is open, but the script may still hold batches. This is an error only if their
        losses have to be weighted, so not for `plain` micro-batches.
        """
        deliveries_in_script = []
        for delivery in self._trainable_of_last_pass:
            if delivery.is_referenced and not delivery.micro_batch.plain:
                deliveries_in_script.append(delivery)
        if deliveries_in_script:
            raise unknown_source_error(deliveries_in_script, "of a loader that has ended")

    def _warn_of_other_batches(self, recognised: Delivery) -> None:
        """Warns once if a loss may also come from a batch of another loader, of different weight.

        Args:
            recognised: the batch with which a forward pass was called.
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

    def _remember(self, delivery: Delivery) -> None:
        """Remembers the storages of a delivery, and forgets freed storages from time to time."""
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
        # The micro-batches of one global batch differ in their virtual rank, even in steps in which
        # all virtual ranks train one model. So it is recorded before it is removed here.
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
            # The factor of a loss depends on which of the two micro-batches it comes from, so the
            # forward passes must show this.
            if weight_in_backward(other.micro_batch) != weight_in_backward(micro_batch):
                self._watch_forward_passes()

    def end_pass(self, training_pass: TrainingPass, *, exhausted: bool = False) -> None:
        """Ends a pass. If it ended in the middle of a global batch, gradients are cleared.

        The script may go on to train on batches of the pass that it holds, for example in a loop
        over `zip(itertools.cycle(one), other)`. Two lists keep these batches, so that their losses
        are recognised: `_trainable_of_last_pass` has those of the pass that ended last. It is used
        while no pass is open. `_trainable_of_ended_passes` has those of all passes that ended while
        another pass was open. It is used as long as such a pass goes on.

        Args:
            training_pass: the pass.
            exhausted: True if the loader has no more batches; False if the loop was left early.
        """
        if training_pass not in self._passes:  # nothing of it was trained, or it ended earlier
            return

        self._passes.remove(training_pass)
        training_pass.ended = True
        if self._passes:
            self.training_pass = self._passes[-1]
        else:
            self.training_pass = self._pass_without_loader
            self.virtual_rank = None

        if training_pass.leaves_gradients(exhausted=exhausted):
            self.extensions.clear_gradients()

        self._keep_trainable(training_pass)  # sets `_trainable_of_last_pass`
        if self._passes:
            # The loop goes on with another loader, and may come back to these batches.
            self._trainable_of_ended_passes += self._trainable_of_last_pass
            self._trainable_of_ended_passes = still_referenced(self._trainable_of_ended_passes)
        else:
            # No loop goes on that could come back to batches of the passes that ended before.
            self._trainable_of_ended_passes = []

        self.extensions.pass_ended()

    def _keep_trainable(self, training_pass: TrainingPass) -> None:
        """Sets `_trainable_of_last_pass`: the batches of an ended pass that may still be trained.

        If the script holds the tensors of several batches, it keeps them on purpose, as
        `itertools.cycle` does, and may train on each of them again. If it holds only one, this is
        the last batch of an ordinary loop, which can only be trained if it has not been yet.
        """
        referenced: list[Delivery] = []
        deliveries = dict.fromkeys(self._delivery_by_storage.values())  # each once, in order
        for delivery in deliveries:
            # None stands for storages that several deliveries share.
            if delivery is None or delivery.training_pass is not training_pass:
                continue
            if delivery.is_referenced:
                referenced.append(delivery)

        if len(referenced) > 1:
            self._trainable_of_last_pass = referenced
        else:
            untrained = training_pass.untrained
            self._trainable_of_last_pass = [d for d in referenced if d in untrained]

        # A loss of a micro-batch that is not `plain` is weighted, so it must be recognised.
        all_are_plain = all(delivery.micro_batch.plain for delivery in self._trainable_of_last_pass)
        if not all_are_plain:
            self._watch_forward_passes()

    def weigh_loss(self, loss: Tensor) -> Tensor:
        """Multiplies a loss by its factor, and adds it to the loss of the global batch.

        The sum of these losses over all micro-batches and processes, divided by the number of
        processes, is the mean loss over the samples of the global batch. The factor is chosen for
        this.

        Returns:
            The weighted loss, for the backward pass. It may be NaN if the factor is 0.
        """
        training_pass = self.training_pass
        scale = self.micro_batch_of_loss.scale
        weighted = loss if scale == 1.0 else loss * scale

        # The loss of a micro-batch without samples may be NaN. It counts as 0, as does the loss of
        # a virtual rank that is repeated to check a device.
        is_counted = scale != 0.0 and not training_pass.micro_batch.is_repeat
        counted = weighted if is_counted else weighted.new_zeros(())
        part = counted.detach()

        self._forget_loss_of_last_step(training_pass)

        # If all virtual ranks train one model, the loss of each of them is also kept by itself.
        virtual_rank = training_pass.micro_batch.virtual_rank
        if virtual_rank is not None and not virtual_rank.has_own_step:
            self._add_loss_of_virtual_rank(training_pass, virtual_rank, part)

        # With virtual ranks, the factor is chosen for the average over virtual ranks, while the sum
        # of losses is averaged over processes. Example: 4 virtual ranks on 2 processes. Each
        # process adds the losses of 2 virtual ranks, so each loss is divided by 2.
        if virtual_rank is not None and virtual_rank.mean_num_on_process != 1:
            part = part / virtual_rank.mean_num_on_process

        training_pass.loss = part + training_pass.loss
        self.pass_of_loss = training_pass
        return weighted

    def _forget_loss_of_last_step(self, training_pass: TrainingPass) -> None:
        """Resets the sum of losses after an optimizer step outside of any loader.

        Without a loader nothing tells where a global batch begins, so each optimizer step ends one.
        """
        is_used_up = training_pass.ended and not training_pass.untrained
        without_loader = training_pass is self._pass_without_loader or is_used_up
        if without_loader and training_pass.stepped:
            training_pass.loss = 0.0
            training_pass.stepped = False

    def _add_loss_of_virtual_rank(
        self, training_pass: TrainingPass, virtual_rank: VirtualRank, part: Tensor
    ) -> None:
        """Adds a weighted loss to the virtual rank's loss in the current global batch."""
        losses = training_pass.loss_of_virtual_rank
        if training_pass.micro_batch.first:
            losses.clear()
        if virtual_rank.contributes:
            number = virtual_rank.number
            losses[number] = part if number not in losses else losses[number] + part

    def mark_stepped(self) -> None:
        """Records that a prepared optimizer has stepped.

        If several optimizers step for one global batch, only the first step is counted. Outside of
        a loader every step is counted.
        """
        training_pass = self.training_pass
        if not training_pass.stepped or training_pass is self._pass_without_loader:
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
        """Returns a context in which a pass over a loader is open.

        Args:
            loader: the loader.
            training_pass: the pass; None for one without gradients.
        """
        self.close_exhausted_passes()
        open_pass = OpenPass(loader, training_pass, begun=self.number)
        self.open_passes.append(open_pass)

        loop_holds_batches = False
        try:
            yield open_pass
            # The loader is exhausted, so every rank has made this pass.
            self.number_pass(open_pass)
            if training_pass is not None:
                # A loop that has fetched ahead still has to train on the batches that it holds.
                loop_holds_batches = bool(still_referenced(training_pass.untrained))
        finally:
            # With such batches, the pass stays open until the loop goes on to another pass.
            open_pass.only_held_batches_remain = loop_holds_batches
            if not loop_holds_batches:
                self._close_pass(open_pass)

    def pass_hands_out(self, open_pass: OpenPass, micro_batch: MicroBatch) -> None:
        """Records that a pass, with or without gradients, hands out a micro-batch."""
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

    def close_passes(self) -> None:
        """Closes all open passes, because the run ends."""
        for open_pass in list(self.open_passes):
            self._close_pass(open_pass)

    def close_exhausted_passes(self) -> None:
        """Closes the passes whose loader is exhausted, and of which the loop held some batches.

        Called when the script goes on to another pass, so it is done with these batches.
        """
        for open_pass in list(self.open_passes):
            if open_pass.only_held_batches_remain:
                self._close_pass(open_pass)

    def _close_pass(self, open_pass: OpenPass) -> None:
        """Closes a pass that is over, or that the loop has left."""
        if open_pass not in self.open_passes:  # it was closed when the run ended
            return

        self.open_passes.remove(open_pass)

        # A pass without a number does not count: the loop left it before it logged anything. Other
        # ranks may not have made it at all.
        if open_pass.number > 0:
            self.last_pass = open_pass

        # The values that the script has logged in the pass are complete now.
        if open_pass.sums is not None:
            self.extensions.values_logged(open_pass.sums, open_pass)

        # Other passes may have stayed open because their loops still held batches. The script has
        # left this loop, so it is done with them.
        self.close_exhausted_passes()
        if not self.open_passes:  # no pass of an earlier step can still get a number
            self._forget_passes_of_earlier_steps()

    def _forget_passes_of_earlier_steps(self) -> None:
        """Drops the counts of passes that began at earlier steps than the current one."""
        counts = self._num_passes
        self._num_passes = Counter({key: n for key, n in counts.items() if key[2] == self.number})

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
