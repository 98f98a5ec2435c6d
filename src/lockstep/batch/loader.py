"""The loader that `prepare` returns: yields this rank's part of every global batch on its device.

A *global batch* holds the samples of one optimizer step over all ranks. Each rank gets its part in
one or more *micro-batches*. A *pass* is one iteration over the loader, from `iter()` to its end. A
pass with gradients is an epoch. Its position consists of the epoch and the number of the global
batch, so it is the same on all ranks and can be resumed on any number of them. Passes without
gradients are counted separately: evaluating on the training loader does not change its position.

A micro-batch is *planned* (which samples? `micro_batches`), then *read* (`fetch`), *scaled* (what
factor does its loss get? `weighing`), moved to the device, and handed to the user's loop.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice, tee
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lockstep.batch.coverage import Coverage
from lockstep.batch.data_identity import (
    bring_sampler_to_epoch,
    check_fingerprint,
    read_fingerprint,
)
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
from lockstep.batch.pytree import cut_to_rows, map_tensors, storage_references
from lockstep.batch.rows import RowCounter
from lockstep.batch.shuffling import is_shuffled_in_slices
from lockstep.batch.source import SHARDING, Source
from lockstep.batch.training_passes import TrainingPasses
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
"""Version of the algorithm that shuffles large datasets (`shuffling`)."""
SOME_RANKS_SKIP = "in this pass some rank has no samples of some batch and skips it"
"""The reason for refusing collectives during such an evaluation."""
MAX_RANKS_IN_CHOICE = 8
"""In the startup summary, the sizes of at most this number of ranks are listed."""


@dataclass(eq=False)
class _BatchAwaitingTraining:
    """A batch that the user's loop has got, until training on it begins (`Loader._hand_out`)."""

    epoch: int
    training_pass: TrainingPass
    planned: PlannedMicroBatch
    batch: Any
    """The batch on the device, or `()` after `forget_batch`."""

    def forget_batch(self) -> None:
        """Drops the batch: training on it will begin only after the user's loop has got it.

        The step keeps this object until then. If it kept the batch alive, the step could not see
        from the released tensors that the script has dropped the batch.
        """
        self.batch = ()


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
    """Iterates over this rank's micro-batches.

    With gradients enabled, every rank gets every micro-batch, since all ranks must take part in the
    backward pass. A rank without samples gets tensors of shape `(0, *)`. Under `torch.no_grad()` or
    `torch.inference_mode()` the ranks do not depend on each other (unless `evaluates_together` is
    set), so a rank skips micro-batches in which it has no samples.

    Args:
        source: the dataset and the order in which it is read.
        plan: divides global batches into micro-batches.
        weight: computes the weight of a batch in the mean loss. By default a batch weighs its
            number of samples.
        sample_rng: True to give each sample random number generators of its own.
        seed: the seed of the run.
        collectives: the collectives of the run.
        step: the current optimizer step, which the loader keeps up to date while it is iterated.
        evaluates_together: True if a forward pass without gradients needs all ranks, as under FSDP.
            Then every rank gets every micro-batch of an evaluation, even one without samples.
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
        self.number = 0
        """The number of this loader in the run, counted from 0. It is the same on all ranks."""
        self.weight = weight
        self.seed = seed
        self._plan = plan
        self._collectives = collectives
        self._step = step
        self._evaluates_together = evaluates_together
        """True if all ranks must take part in each forward pass of an evaluation."""
        self._fetch = Fetch(source.dataset, source.collate, seed, sample_rng)
        self._workers = Workers(source.options, seed)
        self._row_counter: RowCounter | None = None
        """Counts the rows of batches that a collate function of the user's has made; None with
        torch's `default_collate`, which makes one row of each sample."""
        if source.collate is not default_collate:
            self._row_counter = RowCounter()
        self.coverage = Coverage(source.sampler, source.batch_sampler)
        self.current = MicroBatch()
        """The micro-batch that was handed out last."""
        self.training_passes = TrainingPasses()
        self.passes_begun = 0
        """Number of passes that have begun on this rank, with and without gradients."""
        self.evaluated = 0
        """Number of completed passes in which no optimizer has stepped."""
        self.evaluated_at: Location | None = None
        """The user's line that started the latest of these passes."""
        self.lines_that_asked_length: dict[Location, None] = {}
        """Lines of the script that called `len(loader)`, in the order of the first calls."""
        self.length_asked_at: Location | None = None
        """The user's line that called `len(loader)` last."""
        self.start = 0
        """The global batch with which the next training pass begins. It is 0 unless a checkpoint
        was resumed in the middle of an epoch."""
        self._next_epoch = 0
        """The epoch of the next training pass. A pass that begins counts it up."""
        self._is_resumed = False
        """True after `load_state_dict`, until the next training pass begins."""
        self.is_saved = False
        """True once `state_dict` was called."""
        self.epoch_was_set = False
        """True once the script has called `set_epoch`."""
        self._evaluations_begun = 0
        self._training_pass: TrainingPass | None = None
        """The training pass that is in progress."""
        self._position = 0
        """The number of the global batch that is being trained, within its epoch."""
        self._custom_plan: CustomPlan | None = None
        """The order of the current or resumed epoch, if a sampler of the user's has given it."""
        self._latest_order: tuple[int, int] | None = None
        """The latest epoch in whose order a sampler of the user's was trained, and the CRC-32 of
        the order."""
        self._one_sample_batch: Any = None
        """A batch with one sample, which serves as the template of batches without samples."""
        self._needs_empty_batches = False
        """True if, in the latest pass, some rank has no samples in some micro-batch."""

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.source.dataset

    @property
    def batch_size(self) -> int:
        """The number of samples in a global batch, over all ranks."""
        return self.source.batch_size

    @property
    def sampler(self) -> Any:
        """The user's own sampler; otherwise an object that has `set_epoch` alone."""
        own_sampler = self.source.sampler
        return EpochSetter(self) if own_sampler is None else own_sampler

    @property
    def batch_sampler(self) -> Any:
        """The user's own batch sampler; otherwise an object that has `set_epoch` alone."""
        own_sampler = self.source.batch_sampler
        return EpochSetter(self) if own_sampler is None else own_sampler

    @property
    def shares(self) -> tuple[int, ...]:
        """How a global batch is divided over the ranks: rank r gets `shares[r] / sum(shares)`."""
        return self._plan.shares

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a global batch."""
        return self._plan.num_micro_batches

    @property
    def steps(self) -> int | None:
        """The number of optimizer steps in an epoch, or None for a stream of unknown length."""
        return self.source.steps

    @property
    def epoch(self) -> int:
        """The number of the current epoch, or between epochs that of the next one."""
        return self._next_epoch - 1 if self._is_training else self._next_epoch

    @property
    def is_resumed(self) -> bool:
        """True if the state of a checkpoint was loaded, and no training pass has begun since."""
        return self._is_resumed

    @property
    def batch_in_training(self) -> tuple[int, int] | None:
        """The epoch and number of the global batch that is trained on; None between two passes."""
        return (self.epoch, self._position) if self._is_training else None

    @property
    def batch_with_step(self) -> tuple[int, int] | None:
        """The batch that is trained on if the optimizer has stepped for it; otherwise None."""
        training_pass = self._training_pass
        if training_pass is None or not self._step.has_stepped_for(training_pass):
            return None
        return self.batch_in_training

    @property
    def was_trained_on(self) -> bool:
        """True once an optimizer has stepped for a batch of this loader."""
        if self._training_pass is not None and self._training_pass.ever_stepped:
            return True
        return self.training_passes.num_ended_in_run > 0

    @property
    def position_matters(self) -> bool:
        """True if a run that begins anew trains on other samples than one that goes on.

        That is not so if each global batch has the whole dataset. A sampler of the user's may
        choose others in each epoch, also if an epoch has a single batch.
        """
        if self.source.custom_order or self.steps != 1:
            return True
        return self.batch_size < self.source.length

    @property
    def mid_epoch(self) -> bool:
        """True in the middle of an epoch, also if a resumed run has yet to continue that epoch."""
        return self._is_training or self.start > 0

    @property
    def _is_training(self) -> bool:
        """True while the user's loop trains on batches of the current pass.

        That may last longer than the iteration: a loop that fetches batches ahead still has some
        to train on when the loader is exhausted.
        """
        training_pass = self._training_pass
        if training_pass is None:
            return False
        if not training_pass.loader_ended:
            return True

        # The loader is exhausted. The loop still trains if it holds batches, or if the optimizer
        # has yet to step for the latest global batch.
        return training_pass.holds_batches or not training_pass.stepped

    @cached_property
    def fingerprint(self) -> Fingerprint | None:
        """A hash of some samples, which shows whether data has changed; None for a stream."""
        return read_fingerprint(self.source, self.seed)

    @cached_property
    def _fingerprint_text(self) -> str | None:
        """The fingerprint as text for `state_dict`, cached as that may be called in every step."""
        return None if self.fingerprint is None else self.fingerprint.to_text()

    @property
    def first_samples_of_epoch(self) -> list[Any]:
        """Hashes of the first samples of the current epoch. Only the loader of a stream has any."""
        return []

    def choice(self, number: int) -> Choice:
        """Describes for the startup summary how a global batch is divided.

        For example, the summary has this line (a name, a value and a reason):

            loader 0    128 of 60 000    samples in a global batch, 32 on each of 4 ranks

        Args:
            number: the number of this loader, counted from 0.
        """
        sizes = split_sizes(self._plan.split(self.batch_size))  # shape (micro-batches, ranks)
        samples_of_rank = sizes.sum(axis=0).tolist()
        num_ranks = len(samples_of_rank)

        how = self._describe_division(samples_of_rank)
        if self.micro_batches > 1:
            how += f", in {self.micro_batches} micro-batches"
        # The request is open until autotuning has measured what this loader asked for.
        waits_for_autotuning = self._plan.autotune_request.is_open
        if waits_for_autotuning:
            how += "; the first global batch that is trained on decides how they are divided"
        if self.source.sharding is not None and num_ranks > 1:
            how += f"; {SHARDING[self.source.sharding]}"

        size = "a stream" if self.steps is None else f"{self.source.length:,}"
        value = f"{self.batch_size:,} of {size}"
        value_with_spaces = value.replace(",", " ")  # "128 of 60 000"
        return Choice(f"loader {number}", value_with_spaces, f"samples in a global batch, {how}")

    def _describe_division(self, samples_of_rank: list[int]) -> str:
        """Returns how many samples of a global batch each rank has: "4 + 2 on ranks 0 to 1".

        Args:
            samples_of_rank: samples of each rank that has a part of its own. In a pipeline, through
                which each batch passes, all ranks count as one.
        """
        if self._collectives.single_process:
            return "in one process"

        num_ranks = len(samples_of_rank)
        if num_ranks == 1:
            return "by all ranks together"
        if len(set(samples_of_rank)) == 1:
            return f"{samples_of_rank[0]} on each of {num_ranks} ranks"

        sizes = " + ".join(str(samples) for samples in samples_of_rank[:MAX_RANKS_IN_CHOICE])
        if num_ranks > MAX_RANKS_IN_CHOICE:
            sizes += " + ..."
        return f"{sizes} on ranks 0 to {num_ranks - 1}"

    def __len__(self) -> int:
        """Returns the number of micro-batches in an epoch, i.e. of iterations of a training loop.

        With `micro_batch_size="auto"`, one micro-batch per global batch is assumed until the size
        has been measured.

        Raises:
            LengthUnknownError: the dataset is a stream of unknown length.
        """
        self.length_asked_at = user_location()
        if self.length_asked_at is not None:
            self.lines_that_asked_length[self.length_asked_at] = None
        return self.num_micro_batches_of_epoch()

    def num_micro_batches_of_epoch(self) -> int:
        """Returns the same number as `len()`, without recording that the script asked for it."""
        if self.source.batch_sampler is not None:
            # Each batch of a batch sampler may have another size.
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
                # If the previous loop ended by `break`, its last batch is still marked as in use.
                self._step.extensions.batch_is_done()
            epoch = self._next_epoch
            start = self.start
            self._next_epoch += 1
            self.start = 0
            self._is_resumed = False
            return self._train(epoch, start)

        evaluation = self._evaluations_begun
        self._evaluations_begun += 1
        return self._evaluate(evaluation)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next training pass, like `DistributedSampler.set_epoch`.

        A loader counts its epochs itself, so a script does not need to call this. It matters for a
        script that has resumed on its own and continues with another epoch than 0: the loader then
        uses the order of that epoch. If the user's own sampler has a `set_epoch` method, that is
        called as well.

        Args:
            epoch: the number of the epoch, counted from 0.

        Raises:
            UsageError: the loader is in the middle of another epoch, or has resumed another epoch
                from a checkpoint.
        """
        call = f"set_epoch({epoch!r}) of a prepared loader"
        check_whole_number(call, epoch, 0, UsageError)
        self.epoch_was_set = True

        # A script may call this inside of a loop, for the epoch that is running (`self.epoch`), or
        # before a loop, for the next epoch. In both cases the loader needs no change.
        is_another_epoch = epoch not in (self.epoch, self._next_epoch)
        if is_another_epoch and self._is_training:
            raise UsageError(
                call,
                f"a loop over the loader is in epoch {self.epoch}",
                "call it before the loop, or leave it out: the loader counts its epochs itself",
            )
        if is_another_epoch and self._is_resumed:
            raise UsageError(
                call,
                f"in the checkpoint that was resumed the loader is in epoch {self.epoch}",
                "loop over world.epochs(n), which continues there, or leave set_epoch out: the "
                "loader counts its epochs itself",
            )

        if is_another_epoch:
            self._next_epoch = epoch
        own_samplers: tuple[Any, Any] = (self.source.sampler, self.source.batch_sampler)
        for sampler in own_samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the data, from which any number of ranks can resume.

        The state is the same on every rank. Only the number of evaluations differs if some ranks
        have evaluated more often than others; saving a checkpoint reports that.

        In the middle of an epoch, the state also contains the order of that epoch if the user's own
        sampler has given it, because the sampler may return another order the next time. The
        checksum of the latest order lets a resumed run notice that.
        """
        self.is_saved = True
        epoch, step = self._position_to_resume()
        state: dict[str, Any] = {
            "epoch": epoch,
            "step": step,
            "evaluations": self._evaluations_begun,
            **self._identity(),
        }
        if self._fingerprint_text is not None:
            state["data"] = self._fingerprint_text
        if step > 0 and self._custom_plan is not None:
            # Global batch t of the epoch has the samples order[bounds[t] : bounds[t + 1]].
            state["order"] = torch.from_numpy(self._custom_plan.order)
            state["bounds"] = torch.from_numpy(self._custom_plan.bounds)
        if self._latest_order is not None:
            state["latest_epoch"], state["crc_of_order"] = self._latest_order
        return state

    def _position_to_resume(self) -> tuple[int, int]:
        """Returns the epoch and the global batch with which a run that resumes now begins.

        Of an epoch 3 with 100 global batches, the result is:

        - within the epoch: (3, 17);
        - after it: (4, 0);
        - after it, while the script trains on another loader in the same epoch: (3, 100);
        - after (3, 17) was resumed, until a training pass begins: (3, 17).
        """
        latest_epoch = self._next_epoch - 1

        # A script trains on loader A and then on B in each epoch, and is saved during B. When it
        # resumes, it loops over A again, which must yield nothing: A's position is its end.
        if self._is_done_but_epoch_goes_on():
            return latest_epoch, self._num_steps_of_last_epoch()

        # Between two epochs. `start` is 0, unless the position (3, 17) was resumed.
        training_pass = self._training_pass
        if training_pass is None or not self._is_training:
            return self._next_epoch, self.start

        # Within an epoch.
        is_done_with_global_batch = self._step.has_stepped_for(training_pass)
        next_position = self._position + 1 if is_done_with_global_batch else self._position
        return latest_epoch, next_position

    def _is_done_but_epoch_goes_on(self) -> bool:
        """Returns True if the epoch is done for this loader, and goes on with another loader.

        That is only known for the epochs of `World.epochs`.
        """
        if (
            not self.training_passes.was_prepared_before_epoch
            or self._is_training
            or self.start > 0
        ):
            return False
        is_done = self.training_passes.any_ended_in_epoch
        another_is_trained_on = self._step.in_training_loop
        has_known_length = self.steps is not None
        return is_done and another_is_trained_on and has_known_length

    def _num_steps_of_last_epoch(self) -> int:
        """Returns the number of global batches of the epoch that was trained on last."""
        if self._custom_plan is not None:
            return len(self._custom_plan.bounds) - 1
        assert self.steps is not None
        return self.steps

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position in the data; the next training pass starts from there.

        Raises:
            CheckpointError: the checkpoint was saved with other data, another size of the global
                batch, or another seed, so that its position would mean other samples.
        """
        # The position only means the same samples if these values are the same: the length of the
        # dataset, the batch size, the seed and `shuffle`.
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"resuming a loader whose {name.replace('_', ' ')} is {value}",
                    f"in the checkpoint it is {state.get(name)}: the position means other samples",
                    "continue with the same data, batch size, seed and Lockstep, or leave the "
                    "loader out",
                )

        state = _with_keys_of_this_version(state)
        if state["data"] is not None and self.fingerprint is not None:
            fingerprint_before = Fingerprint.from_text(state["data"])
            check_fingerprint(self.source, fingerprint_before, self.fingerprint)

        self._next_epoch = state["epoch"]
        self.start = state["step"]  # the number of the global batch to begin with
        self._evaluations_begun = state["evaluations"]
        self._is_resumed = True
        self._training_pass = None

        self._restore_custom_order(state)

    def _restore_custom_order(self, state: dict[str, Any]) -> None:
        """Restores what a checkpoint contains of the order that the user's own sampler has given.

        Args:
            state: what `state_dict` has returned. It has the order itself if it was saved in the
                middle of an epoch, and the checksum of the latest order if there was any.
        """
        self._custom_plan = None
        if "order" in state:
            self._custom_plan = CustomPlan(state["order"].numpy(), state["bounds"].numpy())

        self._latest_order = None
        if "crc_of_order" in state and self.source.custom_order:
            latest_epoch = state["latest_epoch"]
            crc_of_order = state["crc_of_order"]
            self._latest_order = (latest_epoch, crc_of_order)
            bring_sampler_to_epoch(self.source, self.seed, latest_epoch, crc_of_order)

    def _identity(self) -> dict[str, int]:
        """Returns the values on which the meaning of a position depends.

        A checkpoint can only be resumed by a loader for which they are the same.
        """
        identity = {
            "length": self.source.length,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": int(self.source.shuffle),
        }

        # Only large datasets are shuffled by Lockstep's own algorithm, which may have another
        # version some day.
        if self.source.shuffle and is_shuffled_in_slices(self.source.length):
            identity["version of the order"] = SHUFFLE_VERSION
        return identity

    def example(self) -> Any:
        """Returns a CPU batch of the dataset's first samples, with the size of a micro-batch."""
        return self._read_first(0, ceil_div(self.batch_size, self.micro_batches))

    def release(self) -> None:
        """Shuts down persistent loader workers."""
        self._workers.release()

    # One pass over the data

    def _train(self, epoch: int, start: int) -> Iterator[Any]:
        """Starts a training pass.

        Args:
            epoch: number of the epoch.
            start: number of the first global batch, which is above 0 in a resumed epoch.
        """
        epoch_plan = self._plan_of_epoch(epoch, start)
        self._custom_plan = epoch_plan if isinstance(epoch_plan, CustomPlan) else None
        if self._custom_plan is not None:
            self._latest_order = (epoch, self._custom_plan.crc_of_order)
        self.coverage.begin(epoch, start, epoch_plan)

        # A rank needs an empty batch for each micro-batch in which it has no samples. Under DiLoCo
        # there are none: training is refused if some copy of the model would have no samples.
        virtual_ranks = self._plan.virtual_ranks
        trains_copies = virtual_ranks is not None and virtual_ranks.train_copies
        some_rank_lacks_samples = not self._plan.every_rank_has_samples(epoch_plan)
        self._needs_empty_batches = some_rank_lacks_samples and not trains_copies

        # Plan the micro-batches. They come in segments: groups that are planned and read together.
        segments = self._plan.plan_training(epoch_plan, start, self._step.number)
        micro_batches = self._read_segments(epoch, segments)
        checks_devices = self._plan.check_devices is not None
        if checks_devices:
            # If two devices get different results from the same samples, all ranks repeat these.
            micro_batches = self._insert_repeats(epoch, micro_batches)
        return self._run_pass(epoch, start, micro_batches, training=True)

    def _plan_of_epoch(self, epoch: int, start: int) -> Plan:
        """Returns the global batches of an epoch, in the order in which they are trained on.

        Args:
            epoch: number of the epoch.
            start: number of the first global batch, which is above 0 in a resumed epoch.
        """
        # The checkpoint contains the order of a resumed epoch if the user's sampler has given it.
        # If the sampler were asked again, it might return another order.
        resumes_mid_epoch = start > 0
        if resumes_mid_epoch and self._custom_plan is not None:
            return self._custom_plan
        return self.source.plan(self.seed, epoch)

    def _evaluate(self, epoch: int) -> Iterator[Any]:
        """Returns an iterator over the batches of a pass without gradients.

        Args:
            epoch: the number of this pass among all passes without gradients.
        """
        plan = self.source.plan(self.seed, epoch)
        planned = self._plan.plan_epoch(plan, start=0)

        # A rank that has no samples in a micro-batch skips it, unless the model needs all ranks in
        # each forward pass, as under FSDP. Then the rank gets an empty batch.
        skips_without_samples = not self._evaluates_together
        if skips_without_samples:
            planned = _with_samples_only(planned)

        some_ranks_lack_samples = not self._plan.every_rank_has_samples(plan)
        some_ranks_skip = some_ranks_lack_samples and skips_without_samples
        self._needs_empty_batches = some_ranks_lack_samples and not skips_without_samples

        read = self._count_rows(epoch, self._read_planned(epoch, planned))
        on_device = to_device(read, self._collectives.device)
        return self._run_pass(
            epoch, start=0, on_device=on_device, training=False, some_ranks_skip=some_ranks_skip
        )

    def _run_pass(
        self,
        epoch: int,
        start: int,
        on_device: Generator[ReadMicroBatch, None, None],
        *,
        training: bool,
        some_ranks_skip: bool = False,
    ) -> Iterator[Any]:
        """Yields the batches of a pass to the user's loop.

        Before each batch it tells the current step which micro-batch the loop is about to process.
        However the loop ends (also by `break` or by an exception), the state of the step is then
        restored to what it was before the pass.

        Args:
            epoch: number of the epoch.
            start: number of the first global batch.
            on_device: yields the micro-batches, each with its batch on the device.
            training: True for a training pass, False for an evaluation.
            some_ranks_skip: True for an evaluation in which some rank skips some micro-batch.
                Collectives are then refused, because they would wait for that rank.
        """
        step = self._step
        training_pass = TrainingPass()
        begun_at = user_location()
        reading_phase = "data" if training else "evaluation"
        working_phase = "forward" if training else "evaluation"

        micro_batch_before = step.micro_batch_in_use
        reason_to_block = SOME_RANKS_SKIP if some_ranks_skip else None
        phase_before = step.enter_phase(reading_phase)

        exhausted = False
        is_empty_rest = False
        try:
            if training:
                self._training_pass = training_pass
                self._position = start

            opened = step.logged_passes.opened(
                self, training_pass if training else None, num_trained=step.number
            )
            with self._collectives.blocked_because(reason_to_block), opened as open_pass:
                for planned, batch in on_device:
                    self._set_current(planned.micro_batch)
                    step.logged_passes.hands_out(open_pass, planned.micro_batch)
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
            # A run that was saved after the last step of an epoch resumes with an epoch of which no
            # batch is left. All of it was trained on, so this is no evaluation.
            is_empty_rest = training and start > 0 and training_pass.num_deliveries == 0
            if not training_pass.ever_stepped and not is_empty_rest:
                self.evaluated += 1
                self.evaluated_at = begun_at
        finally:
            on_device.close()
            if self._training_pass is training_pass:
                self._training_pass = None
            if training_pass.ever_stepped or is_empty_rest:
                self.training_passes.num_ended_in_run += 1
            step.end_pass(training_pass, exhausted=exhausted)
            step.micro_batch_in_use = micro_batch_before
            step.enter_phase(phase_before)

    def _set_current(self, micro_batch: MicroBatch) -> None:
        """Records that the user's loop now works on this micro-batch."""
        self.current = micro_batch
        self._step.micro_batch_in_use = micro_batch
        self._step.latest_micro_batch = micro_batch

    def _without_samples(self, batch: Any) -> Any:
        """Cuts a batch of one sample to a batch with no rows, which the user's loop gets.

        The result shares the memory of that sample. Where a function cannot process an empty batch,
        the sample can therefore be recovered and processed instead, with weight 0: by the prepared
        model (`strategies.placeholder`) and by loss functions (`batch.no_rows`).
        """
        if batch is None:  # the collate function left out the whole global batch
            return None
        self._step.note_empty_part(batch)
        return map_tensors(cut_to_rows(batch, num_samples=1, share=True), mark_no_rows)

    def _hand_out(
        self, epoch: int, training_pass: TrainingPass, planned: PlannedMicroBatch, batch: Any
    ) -> None:
        """Records that the training loop is about to get a batch.

        Extensions are notified later, when training on the batch begins: a loop that fetches
        batches ahead first finishes earlier ones.

        Args:
            epoch: number of the epoch.
            training_pass: the pass that the batch belongs to.
            planned: the micro-batch.
            batch: its batch, on the device.
        """
        samples = planned.indices
        if planned.micro_batch.is_repeat:  # its samples are counted in the micro-batch it repeats
            samples = samples[:0]
        self.coverage.add(
            epoch, planned.position, samples, planned.micro_batch, planned.global_batch
        )

        # The step calls `on_begin` when training on the batch begins. That is usually at once, in
        # `hand_out` below, but later if an earlier batch is not finished.
        awaiting = _BatchAwaitingTraining(epoch, training_pass, planned, batch)
        on_begin = partial(self._begin_training_on, awaiting)
        weak_references = storage_references(batch)
        delivery = Delivery(training_pass, planned.micro_batch, weak_references, on_begin)
        self._step.hand_out(delivery)

        # If training on the batch begins later, it must not be kept alive until then.
        awaiting.forget_batch()

    def _begin_training_on(self, awaiting: _BatchAwaitingTraining, micro_batch: MicroBatch) -> None:
        """Records that training on a batch begins, and notifies the extensions.

        Args:
            awaiting: the batch on which training begins.
            micro_batch: its micro-batch, with the final factor of the loss.
        """
        position = awaiting.planned.position
        self._set_current(micro_batch)

        # A batch counts as trained on once: not again on the later stages of a pipeline, which get
        # the same batch (only the first stage contributes to sums over ranks), nor in a repeat,
        # which checks a device.
        is_first_stage = self._collectives.contributes
        counts_as_trained = is_first_stage and not micro_batch.is_repeat
        extensions = self._step.extensions
        somebody_listens = bool(extensions.listeners["delivered"])
        if somebody_listens:
            extensions.delivered(
                DeliveredBatch(
                    loader=self,
                    epoch=awaiting.epoch,
                    position=position,
                    samples=awaiting.planned.indices,
                    micro_batch=micro_batch,
                    batch=awaiting.batch,
                    counts=counts_as_trained,
                )
            )

        self._update_position(awaiting.training_pass, position)

    def _update_position(self, training_pass: TrainingPass, position: int) -> None:
        """Records that a pass trains on a global batch, unless a later pass has begun.

        - `ahead = list(loader)`, then training on `ahead`: the pass has ended, so none is in
          progress. Training on its batches makes it the pass in progress again.
        - A batch of an earlier pass is trained on inside a new loop over the loader: the position
          stays that of the new loop.

        Args:
            training_pass: the pass that the batch belongs to.
            position: position of the global batch in the epoch.
        """
        another_is_in_progress = self._training_pass not in (None, training_pass)
        if another_is_in_progress:
            return
        self._training_pass = training_pass
        self._position = position

    # Checking devices (`check_devices`)

    def _insert_repeats(
        self, epoch: int, on_device: Generator[ReadMicroBatch, None, None]
    ) -> Generator[ReadMicroBatch, None, None]:
        """Yields the micro-batches of a pass, and inserts repeats where devices disagree.

        In a checked global batch (`repeats`), some virtual ranks are computed by two ranks. Before
        the micro-batch marked `compare_devices_before` they compare the results. If two ranks
        disagree, all ranks compute that virtual rank again, and the majority shows which device is
        wrong.

        Args:
            epoch: number of the epoch.
            on_device: yields the micro-batches, each with its batch on the device.
        """
        with closing(on_device):  # also if the user's loop is left early
            for planned, batch in on_device:
                if planned.compare_devices_before:
                    assert planned.global_batch is not None  # only that of a stream is None
                    yield from self._compare_and_repeat(
                        epoch, planned.position, planned.global_batch
                    )
                yield planned, batch

    def _compare_and_repeat(
        self, epoch: int, position: int, global_batch: Indices
    ) -> Iterator[ReadMicroBatch]:
        """Checks devices: compares gradients that two ranks have computed of the same samples.

        Each checked virtual rank is computed by two ranks. If their gradients differ, one of the
        two has a faulty device. To find out which, this yields the micro-batches of the virtual
        rank once more, for all ranks to compute.

        Args:
            epoch: number of the epoch.
            position: number of the global batch within the epoch.
            global_batch: the indices of its samples.
        """
        # Some gradients are missing if the loop fetches batches ahead, before it calls backward for
        # the earlier ones. Then this global batch is not checked.
        if self._training_pass is not None and self._training_pass.holds_batches:
            return

        # The virtual rank whose two gradients differ; None if all agree.
        dispute = self._step.find_dispute()
        if dispute is not None:
            yield from self._read_repeat(epoch, position, global_batch, dispute)

    def _read_repeat(
        self, epoch: int, position: int, global_batch: Indices, dispute: Dispute
    ) -> Iterator[ReadMicroBatch]:
        """Yields the micro-batches of a disputed virtual rank, which every rank computes again.

        Args:
            epoch: number of the epoch.
            position: number of the global batch within the epoch.
            global_batch: the indices of its samples.
            dispute: the virtual rank on which two ranks disagree, and the factors of the losses of
                its micro-batches.
        """
        repeats = self._plan.plan_repeat(position, global_batch, dispute.virtual_rank)
        weighing = self._weighing(epoch)
        for repeat, scale in zip(repeats, dispute.scales, strict=True):
            # Read the samples again. The collate function may make another number of rows than
            # planned.
            collated_batch = self._fetch[epoch, repeat.indices]
            counted = weighing.count_rows(repeat, collated_batch)

            # The loss gets the factor that it had when the two ranks computed it.
            scaled = counted.corrected.with_scale(scale)
            yield from to_device([(scaled, counted.batch)], self._collectives.device)

    # Reading the data

    def _read_segments(
        self, epoch: int, segments: Generator[Segment, None, None]
    ) -> Generator[ReadMicroBatch, None, None]:
        """Yields the micro-batches of a training pass, each with its batch on the device.

        A segment is only read when the training loop has finished the previous one, because what
        autotuning measures in one segment decides how the next one is divided.

        Args:
            epoch: number of the epoch.
            segments: groups of micro-batches that are planned and read together; see
                `micro_batches.Segment`.
        """
        # If autotuning has cut a global batch into two segments: the weight of the first of them.
        weight_before = 0.0

        with closing(segments):
            for planned, rest_of_global_batch in segments:
                weighing = self._weighing(epoch)
                if weighing.is_planned:  # weights follow from the numbers of samples
                    read = self._read_planned(epoch, planned)
                    yield from to_device(read, self._collectives.device)
                    continue

                # The factor of a micro-batch depends on the weight of its whole global batch, so
                # the whole global batch is read first.
                read = self._read_planned(epoch, chain(planned, rest_of_global_batch))

                is_first_part = len(rest_of_global_batch) > 0
                weight_of_first_part = 0.0
                if is_first_part:
                    # `planned` is the single micro-batch on which autotuning measures. The rest of
                    # the global batch is read here only for its weight, and a second time by the
                    # next segment, which hands it out.
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
        """Yields planned micro-batches, each with its batch on the CPU.

        A micro-batch in which this rank has no samples comes with a batch of one sample; see
        `_make_one_sample_batch`. One sample of the first batch is kept for that purpose.
        """
        # The plan is iterated twice: by the loader workers, which prefetch batches and so are
        # ahead, and by the loop below. The workers return batches in the order of the plan, without
        # those that have no samples.
        planned, planned_for_workers = tee(planned)

        def batches_to_read() -> Iterator[tuple[int, Indices]]:
            """Yields the epoch and the sample indices of each batch that has samples."""
            for item in planned_for_workers:
                if len(item.indices) > 0:
                    yield epoch, item.indices

        batches = self._workers.read(self._fetch, batches_to_read())

        for item in planned:
            num_samples = len(item.indices)
            if num_samples > 0:
                batch = next(batches)
                self._keep_as_template(batch, num_samples)
            else:
                batch = self._make_one_sample_batch(epoch)
            yield item, batch

    def _weighing(self, epoch: int) -> Weighing:
        """Returns the object that computes the weights of this loader's micro-batches."""
        return Weighing(
            weight=self.weight,
            row_counter=self._row_counter,
            make_one_sample_batch=lambda: self._make_one_sample_batch(epoch),
        )

    def _count_rows(self, epoch: int, read: Iterator[ReadMicroBatch]) -> Iterator[ReadMicroBatch]:
        """Corrects the planned sizes of an evaluation's micro-batches by their actual rows.

        A collate function of the user's may drop samples or make several rows of one.
        """
        has_default_collate = self._row_counter is None
        if has_default_collate:  # one row per sample, so the planned sizes are right
            yield from read
            return

        # An evaluation takes no mean loss, so the user's `weight=` is not called.
        weighing = self._weighing(epoch).without_weight_function()
        for planned, collated in read:
            counted = weighing.count_rows(planned, collated)

            batch = collated
            if self._evaluates_together:
                # If the collate function has dropped all samples of this rank, it has often
                # returned None. A model that needs all ranks in each forward pass gets an empty
                # batch instead.
                batch = counted.batch
            yield counted.corrected, batch

    def _keep_as_template(self, batch: Any, num_samples: int) -> None:
        """Keeps a sample of the first batch that is read, as the template of empty batches.

        Later calls do nothing.

        Args:
            batch: the batch that the collate function returned.
            num_samples: the number of samples in the batch.

        Raises:
            DataError: a single sample cannot be cut out of such a batch, although some rank needs
                an empty batch in this pass. This is raised before the first step.
        """
        if self._one_sample_batch is not None:
            return
        if batch is None:  # the collate function has dropped all samples
            return

        try:
            self._one_sample_batch = cut_to_rows(batch, num_samples, keep=1)
        except DataError as error:
            # If no rank needs an empty batch in this pass, no template is needed either.
            if not self._needs_empty_batches:
                return

            # The new error names the same batch (`was_set`) and gives the same advice (`do`).
            raise DataError(
                error.was_set,
                "some rank gets no samples of a short batch in this pass, and an empty batch "
                "of this type cannot be made",
                error.do,
            ) from error

    def _make_one_sample_batch(self, epoch: int) -> Any:
        """Returns a batch of one sample, for a micro-batch in which this rank has no samples.

        When the batch is handed to the user's loop, `_without_samples` cuts it to zero rows.

        Args:
            epoch: number of the epoch.
        """
        if self._one_sample_batch is None:
            # A collate function of the user's may drop the first sample, so it gets several.
            has_own_collate = self.source.collate is not default_collate
            num_samples = self.batch_size if has_own_collate else 1
            first_batch = self._read_first(epoch, num_samples)
            self._one_sample_batch = cut_to_rows(first_batch, num_samples, keep=1)

        # The user may modify the batch in place, so each call returns a copy.
        return map_tensors(self._one_sample_batch, Tensor.clone)

    def _read_first(self, epoch: int, count: int) -> Any:
        """Returns a CPU batch of the dataset's first `count` samples."""
        indices = np.arange(min(count, self.source.length), dtype=np.int64)
        with preserve_rng_state():
            return self._fetch[epoch, indices]


def _with_samples_only(planned: Iterable[PlannedMicroBatch]) -> Iterator[PlannedMicroBatch]:
    """Yields the micro-batches in which this rank has samples."""
    for each in planned:
        if each.micro_batch.local_rows > 0:
            yield each


def _with_keys_of_this_version(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of a loader with the keys that checkpoints of older versions lack.

    These have no fingerprint of the data. Their "epoch" counts training passes and evaluations
    together, so both counters continue from it.
    """
    return {"data": None, "evaluations": state["epoch"], **state}
