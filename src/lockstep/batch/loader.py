"""The loader: hands out this rank's part of every global batch, on the device, in planned order.

A *global batch* holds the samples of one optimizer step, over all ranks. A rank gets its part of it
in one or more *micro-batches*. One iteration of a loop over a loader is a *pass*. A pass with
gradients is an epoch; its position is two numbers, epoch and global batch, which are the same on
all ranks and mean the same on any number of them. Passes without gradients are counted separately:
evaluating over the loader that is trained on does not change its position.

A micro-batch is *planned* (`micro_batches`), then *read* (`fetch`), *scaled* if it is weighed by
more than its samples (`weighing`), moved to the device, and handed out.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice, tee
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lockstep.batch.coverage import Coverage
from lockstep.batch.data_identity import check_fingerprint, read_fingerprint
from lockstep.batch.device_copy import to_device
from lockstep.batch.fetch import Fetch
from lockstep.batch.fingerprint import Fingerprint
from lockstep.batch.indices import Indices, ceil_div
from lockstep.batch.micro_batches import (
    MicroBatchPlan,
    PlannedMicroBatch,
    ReadMicroBatch,
    Segment,
)
from lockstep.batch.no_rows import mark_no_rows
from lockstep.batch.plan import CustomPlan, Plan, split_sizes
from lockstep.batch.pytree import cut_to_rows, map_tensors, storages
from lockstep.batch.rows import RowCounter
from lockstep.batch.shuffling import is_permuted
from lockstep.batch.source import SHARDING, Source
from lockstep.batch.weighing import Weighing, Weight, scale_by_weight
from lockstep.batch.workers import Workers
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.errors import CheckpointError, DataError, UsageError
from lockstep.session.delivery import Delivery, TrainingPass
from lockstep.session.extension import DeliveredBatch
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Dispute, Step
from lockstep.settings import Choice, check_whole_number
from lockstep.user_code import Location, user_location

SHUFFLE_VERSION = 1
"""Version of the order in which large datasets are shuffled (`shuffling`)."""
SOME_RANKS_SKIP = "in this pass some rank has no samples of some batch and skips it"
"""Why collectives are refused in a pass without gradients."""
MAX_RANKS_IN_CHOICE = 8


@dataclass(eq=False)
class _HandedOut:
    """A micro-batch that a pass with gradients has handed out to the training loop."""

    epoch: int
    training_pass: TrainingPass
    planned: PlannedMicroBatch
    batch: Any
    """The batch on the device; `()` after `Loader._hand_out` has returned."""


class EpochSetter:
    """Stands for the sampler of a loader whose order is Lockstep's own.

    Scripts for DistributedSampler call `loader.sampler.set_epoch(epoch)` in every epoch.

    Args:
        loader: the loader.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the loader's next pass; see `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)


class Loader:
    """Iterates this rank's micro-batches of an epoch.

    With gradients enabled every rank gets every micro-batch; one without samples is a batch of
    shape `(0, *)`, because the other ranks need its backward pass. Under `torch.no_grad()` or
    `torch.inference_mode()` nothing is exchanged (unless `evaluates_together`), so a rank skips a
    batch of which it has no samples.

    Args:
        source: the data and its order.
        plan: how its global batches are divided.
        weight: returns what a batch weighs in the mean, instead of its number of samples.
        sample_rng: give every sample random streams of its own.
        seed: of the run.
        collectives: of the run.
        step: the current optimizer step, which the loader keeps up to date while it is iterated.
        evaluates_together: True if forward passes without gradients involve other ranks too. Then
            every rank gets every micro-batch of an evaluation, even one without samples.
    """

    def __init__(
        self,
        source: Source,
        *,
        plan: MicroBatchPlan,
        weight: Weight | None = None,
        sample_rng: bool = True,
        seed: int,
        collectives: Collectives,
        step: Step,
        evaluates_together: bool = False,
    ) -> None:
        self.source = source
        self.weight = weight
        self.seed = seed
        self._plan = plan
        self._collectives = collectives
        self._step = step
        self._evaluates_together = evaluates_together
        self._fetch = Fetch(source.dataset, source.collate, seed, sample_rng)
        self._workers = Workers(source.options, seed)
        self._rows: RowCounter | None = None
        if source.collate is not default_collate:
            self._rows = RowCounter()
        self.coverage = Coverage(source.sampler, source.batch_sampler)
        self.current = MicroBatch()
        """The micro-batch that was handed out last."""
        self.trained = 0
        """Passes in which an optimizer has stepped."""
        self.passes_begun = 0
        """Passes on this rank, with and without gradients."""
        self.evaluated = 0
        """Passes without an optimizer step that this rank has finished."""
        self.evaluated_at: Location | None = None
        """The user's line that began the latest of these."""
        self.length_asked_at: Location | None = None
        """The user's line that was the last to ask for `len(loader)`."""
        self.start = 0
        """Where the next pass with gradients begins: at this global batch of its epoch. It is not 0
        if a checkpoint was resumed in the middle of an epoch."""
        self._epochs_begun = 0
        self._is_resumed = False
        """True from the moment that a position was loaded until the next pass with gradients."""
        self._evaluations_begun = 0
        self._training_pass: TrainingPass | None = None
        """The pass with gradients that is under way."""
        self._position = 0
        """The position of the global batch that is trained, in its epoch."""
        self._custom_plan: CustomPlan | None = None
        """The order of the current or resumed epoch, if it is the user's own."""
        self._one_sample_batch: Any = None
        """A batch of one sample, of which batches without samples are made."""
        self._needs_empty_batches = False
        """True if, in the latest pass, some rank has no samples of some micro-batch."""

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.source.dataset

    @property
    def batch_size(self) -> int:
        """The number of samples of a global batch."""
        return self.source.batch_size

    @property
    def sampler(self) -> Any:
        """The user's own sampler; otherwise an object that has `set_epoch` alone."""
        own = self.source.sampler
        return EpochSetter(self) if own is None else own

    @property
    def batch_sampler(self) -> Any:
        """The user's own batch sampler; otherwise an object that has `set_epoch` alone."""
        own = self.source.batch_sampler
        return EpochSetter(self) if own is None else own

    @property
    def shares(self) -> tuple[int, ...]:
        """How a global batch is divided over the ranks: one whole number for each rank."""
        return self._plan.shares

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a global batch."""
        return self._plan.num_micro_batches

    @property
    def steps(self) -> int | None:
        """Global batches, and so optimizer steps, of an epoch; None: the length is not known."""
        return self.source.steps

    @property
    def epoch(self) -> int:
        """The epoch that is trained on, or the next one."""
        return self._epochs_begun - 1 if self._is_training else self._epochs_begun

    @property
    def mid_epoch(self) -> bool:
        """True in the middle of an epoch, even one that a resumed run has not continued yet."""
        return self._is_training or self.start > 0

    @property
    def _is_training(self) -> bool:
        """True while a pass with gradients goes on.

        A loop that fetches batches ahead still trains on the last ones when the loader has ended.
        """
        training_pass = self._training_pass
        if training_pass is None:
            return False
        if not training_pass.ended:
            return True
        # `stepped`: an optimizer has stepped for the latest global batch. `untrained`: batches for
        # which the loop has not called backward yet.
        all_batches_are_trained = training_pass.stepped and not training_pass.untrained
        return not all_batches_are_trained

    @cached_property
    def fingerprint(self) -> Fingerprint | None:
        """Identifies the data. It is read once, from some samples; None for a stream."""
        return read_fingerprint(self.source, self.seed)

    @cached_property
    def _fingerprint_text(self) -> str | None:
        """The fingerprint as a state has it, which may be asked for in every step."""
        return None if self.fingerprint is None else self.fingerprint.to_text()

    @property
    def first_samples_of_epoch(self) -> list[Any]:
        """Digests of the first samples of the current epoch, for a stream; otherwise empty."""
        return []

    def choice(self, number: int) -> Choice:
        """Describes how the global batch is computed.

        Args:
            number: of this loader, from 0.
        """
        sizes = split_sizes(self._plan.split(self.batch_size))  # shape (micro-batches, ranks)
        samples_of_rank = sizes.sum(axis=0).tolist()
        num_ranks = len(samples_of_rank)
        if num_ranks == 1:
            how = "in one process" if self._collectives.single_process else "by all ranks together"
        elif len(set(samples_of_rank)) == 1:
            how = f"{samples_of_rank[0]} on each of {num_ranks} ranks"
        else:
            how = " + ".join(str(samples) for samples in samples_of_rank[:MAX_RANKS_IN_CHOICE])
            if num_ranks > MAX_RANKS_IN_CHOICE:
                how += " + ..."
            how += f" on ranks 0 to {num_ranks - 1}"
        if self.micro_batches > 1:
            how += f", in {self.micro_batches} micro-batches"
        if self._plan.request.is_open:
            how += "; how to divide it is measured in the first that is trained on"
        if self.source.sharding is not None and num_ranks > 1:
            how += f"; {SHARDING[self.source.sharding]}"
        size = "a stream" if self.steps is None else f"{self.source.length:,}"
        value = f"{self.batch_size:,} of {size}".replace(",", " ")
        return Choice(f"loader {number}", value, f"samples in a global batch, {how}")

    def __len__(self) -> int:
        """Returns the number of micro-batches of an epoch: the iterations of a training loop.

        Until `micro_batch_size="auto"` was measured, each global batch counts as one.

        Raises:
            LengthUnknownError: the loader has a stream that does not know its length.
        """
        self.length_asked_at = user_location()
        return self.num_micro_batches_of_epoch()

    def num_micro_batches_of_epoch(self) -> int:
        """Returns what `len()` returns, and does not note that the script has asked for it."""
        if self.source.batch_sampler is not None:
            plan = self.source.plan(self.seed, self.epoch)
            return sum(len(self._plan.split(len(batch))) for batch in plan.batches())
        num_full, size_of_last = divmod(self.source.length, self.batch_size)
        length = num_full * self.micro_batches
        if size_of_last and not self.source.drop_last:
            length += len(self._plan.split(size_of_last))
        return length

    def __iter__(self) -> Iterator[Any]:
        self.passes_begun += 1
        if torch.is_grad_enabled():
            if not self._step.in_training_loop:
                self._step.extensions.batch_is_done()  # a loop may have left a pass by `break`
            epoch = self._epochs_begun
            start = self.start
            self._epochs_begun += 1
            self.start = 0
            self._is_resumed = False
            return self._train(epoch, start)
        evaluation = self._evaluations_begun
        self._evaluations_begun += 1
        return self._evaluate(evaluation)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass with gradients, as `DistributedSampler.set_epoch` does.

        A loader counts its epochs itself, so a script need not call this. One that counts from
        another epoch on, because it has resumed by itself, gets the order of that epoch. A sampler
        of the user's that has `set_epoch` is told as well.

        Raises:
            UsageError: another epoch is being trained on, or was resumed from a checkpoint.
        """
        was_set = f"set_epoch({epoch!r}) of a prepared loader"
        check_whole_number(was_set, epoch, 0, UsageError)
        is_another_epoch = epoch not in (self.epoch, self._epochs_begun)
        if is_another_epoch and self._is_training:
            raise UsageError(
                was_set,
                f"a loop over the loader is in epoch {self.epoch}",
                "call it before the loop, or leave it out: the loader counts its epochs itself",
            )
        if is_another_epoch and self._is_resumed:
            raise UsageError(
                was_set,
                f"in the checkpoint that was resumed the loader is in epoch {self.epoch}",
                "loop over world.epochs(n), which continues there, or leave set_epoch out: the "
                "loader counts its epochs itself",
            )
        if is_another_epoch:
            self._epochs_begun = epoch
        own_samplers: tuple[Any, Any] = (self.source.sampler, self.source.batch_sampler)
        for sampler in own_samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: the same on every rank, and meaningful on any number of them.

        The number of evaluations differs if only some ranks have evaluated, which is reported.

        In the middle of an epoch it comes with the order of that epoch if a sampler of the user's
        gave it, because the sampler may give another order when it is asked again.
        """
        training_pass = self._training_pass
        if training_pass is None or not self._is_training:
            epoch = self._epochs_begun
            step = self.start
        else:
            epoch = self._epochs_begun - 1  # the current epoch, which was counted when it began
            step = self._position
            global_batch_is_trained = training_pass.micro_batch.last and training_pass.stepped
            if global_batch_is_trained:
                step += 1
        state: dict[str, Any] = {
            "epoch": epoch,
            "step": step,
            "evaluations": self._evaluations_begun,
            **self._identity(),
        }
        if self._fingerprint_text is not None:
            state["data"] = self._fingerprint_text
        if self.mid_epoch and self._custom_plan is not None:
            state["order"] = torch.from_numpy(self._custom_plan.order)
            state["bounds"] = torch.from_numpy(self._custom_plan.bounds)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up the position; the next pass begins there.

        Raises:
            CheckpointError: the data or the global batch are not those of the checkpoint.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"resuming a loader whose {name.replace('_', ' ')} is {value}",
                    f"in the checkpoint it is {state.get(name)}: the position means other samples",
                    "continue with the same data, batch size, seed and Lockstep, or leave the "
                    "loader out",
                )
        if "data" in state and self.fingerprint is not None:  # an older checkpoint has none
            fingerprint_before = Fingerprint.from_text(state["data"])
            check_fingerprint(self.source, fingerprint_before, self.fingerprint)
        self._epochs_begun = state["epoch"]
        self.start = state["step"]
        self._is_resumed = True
        self._training_pass = None
        # An older checkpoint has one count for epochs and evaluations.
        self._evaluations_begun = state.get("evaluations", state["epoch"])
        self._custom_plan = None
        if "order" in state:
            self._custom_plan = CustomPlan(state["order"].numpy(), state["bounds"].numpy())

    def _identity(self) -> dict[str, int]:
        """Returns what must be equal in a checkpoint for a position to mean the same samples."""
        identity = {
            "length": self.source.length,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": int(self.source.shuffle),
        }
        if self.source.shuffle and is_permuted(self.source.length):
            identity["version of the order"] = SHUFFLE_VERSION
        return identity

    def example(self) -> Any:
        """Returns a batch of the first samples, as large as one micro-batch, on the CPU."""
        return self._read_first(0, ceil_div(self.batch_size, self.micro_batches))

    def release(self) -> None:
        """Ends persistent workers."""
        self._workers.release()

    # A pass

    def _train(self, epoch: int, start: int) -> Iterator[Any]:
        """Begins a pass with gradients.

        Args:
            epoch: of the pass.
            start: the position of its first global batch.
        """
        plan: Plan
        is_resumed = start > 0
        if is_resumed and self._custom_plan is not None:
            # The checkpoint has the order of this epoch. The user's sampler may give another one.
            plan = self._custom_plan
        else:
            plan = self.source.plan(self.seed, epoch)
        self._custom_plan = plan if isinstance(plan, CustomPlan) else None
        self.coverage.begin(epoch, start, plan)
        self._needs_empty_batches = False
        virtual_ranks = self._plan.virtual_ranks
        # Every copy of the model has samples of each global batch, or training on it is refused.
        if virtual_ranks is None or not virtual_ranks.train_copies:
            self._needs_empty_batches = not self._plan.every_rank_has_samples(plan)
        segments = self._plan.plan_training(plan, start, self._step.number)
        on_device = self._read_segments(epoch, segments)
        if self._plan.check_devices is not None:
            on_device = self._insert_repeats(epoch, on_device)
        return self._run_pass(epoch, start, on_device, training=True)

    def _evaluate(self, epoch: int) -> Iterator[Any]:
        """Begins a pass without gradients; `epoch` is its number among such passes."""
        plan = self.source.plan(self.seed, epoch)
        planned = self._plan.plan_epoch(plan, start=0)
        some_ranks_lack_samples = not self._plan.every_rank_has_samples(plan)
        if self._evaluates_together:
            # Every rank gets every micro-batch: an empty batch, if it has no samples of it.
            some_ranks_skip = False
            self._needs_empty_batches = some_ranks_lack_samples
        else:
            # Each rank gets only those micro-batches of which it has samples.
            some_ranks_skip = some_ranks_lack_samples
            self._needs_empty_batches = False
            planned = (item for item in planned if item.micro_batch.local_rows > 0)
        read = self._count_rows(epoch, self._read_planned(epoch, planned))
        on_device = to_device(read, self._collectives.device)
        return self._run_pass(epoch, 0, on_device, training=False, some_ranks_skip=some_ranks_skip)

    def _run_pass(
        self,
        epoch: int,
        start: int,
        on_device: Generator[ReadMicroBatch, None, None],
        *,
        training: bool,
        some_ranks_skip: bool = False,
    ) -> Iterator[Any]:
        """Hands out the batches of a pass. When it is left, the step is as it was before the pass.

        Args:
            epoch: of the pass.
            start: the position of its first global batch.
            on_device: the micro-batches, each with its batch on the device.
            training: True for a pass with gradients.
            some_ranks_skip: True if not all ranks get every batch. Collectives are then refused.
        """
        step = self._step
        training_pass = TrainingPass()
        begun_at = user_location()
        reading_phase = "data" if training else "evaluation"
        working_phase = "forward" if training else "evaluation"
        micro_batch_before = step.micro_batch_in_use
        blocked_before = self._collectives.blocked_reason
        phase_before = step.enter_phase(reading_phase)
        exhausted = False
        try:
            if training:
                self._training_pass = training_pass
                self._position = start
            elif some_ranks_skip:
                self._collectives.blocked_reason = SOME_RANKS_SKIP
            with step.pass_opened(self, training=training):
                for planned, batch in on_device:
                    self._set_current(planned.micro_batch)
                    if not planned.micro_batch.local_rows:
                        batch = self._without_samples(batch)
                    if training:
                        self._hand_out(epoch, training_pass, planned, batch)
                    step.enter_phase(working_phase)
                    yield batch
                    step.enter_phase(reading_phase)
                    if training:
                        step.extensions.batch_is_done()
            exhausted = True
            if not training_pass.ever_stepped:
                self.evaluated += 1
                self.evaluated_at = begun_at
        finally:
            on_device.close()
            self._collectives.blocked_reason = blocked_before
            if self._training_pass is training_pass:
                self._training_pass = None
            if training_pass.ever_stepped:
                self.trained += 1
            step.end_pass(training_pass, exhausted=exhausted)
            step.micro_batch_in_use = micro_batch_before
            step.enter_phase(phase_before)

    def _set_current(self, micro_batch: MicroBatch) -> None:
        """Notes that the script works on this micro-batch from now on."""
        self.current = micro_batch
        self._step.micro_batch_in_use = micro_batch
        self._step.latest_micro_batch = micro_batch

    def _without_samples(self, batch: Any) -> Any:
        """Returns a batch without rows, for the training loop.

        It is a view of the one sample that a micro-batch without samples comes with. A prepared
        model (`strategies.placeholder`), and functions that the loop calls (`batch.no_rows`), take
        from it the row that they compute.
        """
        if batch is None:  # the collate function left out the whole global batch
            return None
        self._step.note_empty_part(batch)
        return map_tensors(cut_to_rows(batch, 1, share=True), mark_no_rows)

    def _hand_out(
        self, epoch: int, training_pass: TrainingPass, planned: PlannedMicroBatch, batch: Any
    ) -> None:
        """Tells the step which batch the training loop is about to get.

        The extensions are told when training on it begins, which is later if the loop fetches
        batches ahead.

        Args:
            epoch: of the pass.
            training_pass: the pass.
            planned: the micro-batch.
            batch: its batch, on the device.
        """
        samples = planned.indices
        if planned.micro_batch.is_repeat:  # another micro-batch counts them
            samples = samples[:0]
        self.coverage.add(
            epoch, planned.position, samples, planned.micro_batch, planned.global_batch
        )
        handed_out = _HandedOut(epoch, training_pass, planned, batch)
        on_begin = partial(self._begin_training_on, handed_out)
        delivery = Delivery(training_pass, planned.micro_batch, storages(batch), on_begin)
        self._step.hand_out(delivery)
        # The step keeps the delivery and with it `handed_out`, which must not keep the batch alive:
        # the step sees that the script has dropped a batch when its tensors are freed.
        handed_out.batch = ()

    def _begin_training_on(self, handed_out: _HandedOut, micro_batch: MicroBatch) -> None:
        """Notes that training on a batch begins, and tells the extensions of it.

        Args:
            handed_out: the batch.
            micro_batch: how it is weighed.
        """
        position = handed_out.planned.position
        self._set_current(micro_batch)
        extensions = self._step.extensions
        if extensions.listeners["delivered"]:
            extensions.delivered(
                DeliveredBatch(
                    loader=self,
                    epoch=handed_out.epoch,
                    position=position,
                    samples=handed_out.planned.indices,
                    micro_batch=micro_batch,
                    batch=handed_out.batch,
                    counts=self._collectives.contributes and not micro_batch.is_repeat,
                )
            )
        # If another pass over this loader has begun meanwhile, the loader's position is in that.
        training_pass = handed_out.training_pass
        if self._training_pass is training_pass or self._training_pass is None:
            self._training_pass = training_pass
            self._position = position

    # Checks of devices

    def _insert_repeats(
        self, epoch: int, on_device: Generator[ReadMicroBatch, None, None]
    ) -> Generator[ReadMicroBatch, None, None]:
        """Yields the micro-batches of a pass, and more of them where devices disagree.

        In a checked global batch (`repeats`) the ranks compare what two of them have computed. If
        two disagree about a virtual rank, all ranks compute it, and the majority is right.

        Args:
            epoch: of the pass.
            on_device: the micro-batches, each with its batch on the device.
        """
        with closing(on_device):
            for planned, batch in on_device:
                # A loop that has not trained yet what it got before has nothing to be compared.
                if planned.compared_before and not self._has_untrained_batches:
                    dispute = self._step.find_dispute()
                    if dispute is not None:
                        yield from self._read_repeat(epoch, planned, dispute)
                yield planned, batch

    @property
    def _has_untrained_batches(self) -> bool:
        """True if the loop has got micro-batches that no backward pass has followed yet."""
        return self._training_pass is not None and bool(self._training_pass.untrained)

    def _read_repeat(
        self, epoch: int, planned: PlannedMicroBatch, dispute: Dispute
    ) -> Iterator[ReadMicroBatch]:
        """Yields the micro-batches of a virtual rank that all ranks compute, on the device.

        Args:
            epoch: of the pass.
            planned: a micro-batch of the same global batch.
            dispute: says which virtual rank it is, and what its micro-batches weigh.
        """
        assert planned.global_batch is not None
        repeats = self._plan.plan_repeat(
            planned.position, planned.global_batch, dispute.virtual_rank
        )
        weighing = self._weighing(epoch)
        for repeat, scale in zip(repeats, dispute.scales, strict=True):
            batch = self._fetch[epoch, repeat.indices]
            counted = weighing.count_rows(repeat, batch)
            micro_batch = replace(counted.planned.micro_batch, scale=scale)
            read = [(counted.planned._replace(micro_batch=micro_batch), counted.batch)]
            yield from to_device(read, self._collectives.device)

    # Reading

    def _read_segments(
        self, epoch: int, segments: Generator[Segment, None, None]
    ) -> Generator[ReadMicroBatch, None, None]:
        """Yields the micro-batches of a pass that trains, each with its batch on the device.

        Nothing of a segment is read before the training loop is done with the segment before it.

        Args:
            epoch: of the pass.
            segments: micro-batches that are planned and read together (`micro_batches.Segment`).
        """
        # The weight of the micro-batch of the segment before, if it is of the same global batch.
        weight_before = 0.0
        with closing(segments):
            for planned, rest_of_global_batch in segments:
                weighing = self._weighing(epoch)
                if weighing.is_planned:  # the plan says what each micro-batch weighs
                    read = self._read_planned(epoch, planned)
                    yield from to_device(read, self._collectives.device)
                    continue
                # The scale of a micro-batch depends on the weight of its whole global batch, so all
                # of that is read first.
                read = self._read_planned(epoch, chain(planned, rest_of_global_batch))
                is_first_part = len(rest_of_global_batch) > 0
                weight_of_first_part = 0.0
                if is_first_part:
                    # `planned` is the one micro-batch in which autotuning measures. The rest is
                    # read for its weight alone; the next segment reads it again, to hand it out.
                    read_global_batch = list(read)
                    first_planned, first_batch = read_global_batch[0]
                    weight_of_first_part = weighing.count_rows(first_planned, first_batch).weight
                    read = iter(read_global_batch)
                scaled = scale_by_weight(
                    read,
                    weighing,
                    self._collectives,
                    epoch,
                    weight_before,
                    self._plan.virtual_ranks,
                )
                if is_first_part:
                    scaled = islice(scaled, 1)
                weight_before = weight_of_first_part
                yield from to_device(scaled, self._collectives.device)

    def _read_planned(
        self, epoch: int, planned: Iterable[PlannedMicroBatch]
    ) -> Iterator[ReadMicroBatch]:
        """Yields the micro-batches, each with its batch on the CPU.

        A micro-batch without samples comes with a batch of one sample.
        """
        # Workers are asked for batches ahead of those that are yielded here.
        planned, planned_for_workers = tee(planned)

        def keys_of_batches() -> Iterator[tuple[int, Indices]]:
            """Yields epoch and sample indices of each batch that has samples."""
            for item in planned_for_workers:
                if item.micro_batch.local_rows > 0:
                    yield epoch, item.indices

        batches = self._workers.read(self._fetch, keys_of_batches())
        for item in planned:
            num_samples = item.micro_batch.local_rows
            if num_samples > 0:
                batch = next(batches)
                self._keep_one_sample(batch, num_samples)
            else:
                batch = self._make_empty_batch(epoch)
            yield item, batch

    def _weighing(self, epoch: int) -> Weighing:
        """Returns how the micro-batches of a pass are weighed."""
        return Weighing(
            weight=self.weight,
            rows=self._rows,
            make_empty_batch=lambda: self._make_empty_batch(epoch),
        )

    def _count_rows(self, epoch: int, read: Iterator[ReadMicroBatch]) -> Iterator[ReadMicroBatch]:
        """Yields the micro-batches of an evaluation with the number of rows that each batch has."""
        if self._rows is None:  # torch's collate function makes one row of each sample, as planned
            yield from read
            return
        weighing = Weighing(
            weight=None,
            rows=self._rows,
            make_empty_batch=lambda: self._make_empty_batch(epoch),
        )
        for planned, batch in read:
            counted = weighing.count_rows(planned, batch)
            if self._evaluates_together:
                # Other ranks need this rank's forward pass. If the collate function has left out
                # all samples, `counted.batch` is one that the model can compute.
                yield counted.planned, counted.batch
            else:
                yield counted.planned, counted.collated

    def _keep_one_sample(self, batch: Any, count: int) -> None:
        """Keeps one sample of the first batch, of which batches without samples are made.

        Args:
            batch: as the collate function returned it.
            count: samples of the batch.

        Raises:
            DataError: no sample can be taken out of it, and this pass needs that. It is raised
                before the first step.
        """
        if self._one_sample_batch is not None:
            return
        if batch is None:  # the collate function left out all samples
            return
        try:
            self._one_sample_batch = cut_to_rows(batch, count, rows=1)
        except DataError as error:
            if self._needs_empty_batches:
                raise DataError(
                    error.was_set,
                    "some rank gets no samples of a short batch in this pass, and an empty batch "
                    "of this type cannot be made",
                    error.do,
                ) from error

    def _make_empty_batch(self, epoch: int) -> Any:
        """Returns a batch of one sample, for a micro-batch of which this rank has no samples.

        When it is handed out, `_without_samples` makes a batch without rows of it.

        Args:
            epoch: of the pass.
        """
        if self._one_sample_batch is None:
            # A collate function of the user's may leave the first sample out, so it gets more.
            has_default_collate = self._rows is None
            count = 1 if has_default_collate else self.batch_size
            first_batch = self._read_first(epoch, count)
            self._one_sample_batch = cut_to_rows(first_batch, count, rows=1)
        # The user may write to what is handed out, so it is a copy.
        return map_tensors(self._one_sample_batch, Tensor.clone)

    def _read_first(self, epoch: int, count: int) -> Any:
        """Returns a batch of the first `count` samples, on the CPU."""
        indices = np.arange(min(count, self.source.length), dtype=np.int64)
        with preserve_rng_state():
            return self._fetch[epoch, indices]
