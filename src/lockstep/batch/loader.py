"""The loader: this rank's part of every global batch, on the device, in the planned order.

One pass over a loader is one epoch. Its position is two numbers, epoch and global batch, which are
the same on all ranks and mean the same on any number of them. Passes without gradients are counted
for themselves: evaluating over the loader that is trained on leaves its position as it is.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from functools import cached_property
from itertools import islice, tee
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lockstep.batch.consistency import check_fingerprint, read_fingerprint
from lockstep.batch.coverage import Coverage
from lockstep.batch.fetch import Fetch, Workers, to_device
from lockstep.batch.fingerprint import Fingerprint
from lockstep.batch.micro_batches import (
    MicroBatchPlan,
    PlannedMicroBatch,
    Segment,
    Weighing,
    Weight,
    WithBatch,
    weighted,
)
from lockstep.batch.no_rows import marked
from lockstep.batch.plan import CustomPlan, Plan, permutes
from lockstep.batch.pytree import emptied, map_tensors, storages
from lockstep.batch.rows import RowCounter
from lockstep.batch.source import SHARDING, Source
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.errors import CheckpointError, DataError
from lockstep.session.delivery import Delivery, TrainingPass
from lockstep.session.extension import DeliveredBatch
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step
from lockstep.settings import Choice
from lockstep.user_code import Location, user_location

_ORDER = 1
"""Version of the order in which large datasets are shuffled (`batch_plan.permuted`)."""
SOME_SKIP = "in this pass some rank has no samples of some batch and skips it"


class Loader:
    """Iterates this rank's micro-batches of an epoch.

    With gradients enabled every rank gets every micro-batch, one without samples being a batch of
    shape `(0, *)`: the other ranks need its backward pass. Under `torch.no_grad()` or
    `torch.inference_mode()` nothing is exchanged (unless `evaluates_together`), so a rank
    skips a batch it has no samples of.

    Args:
        source: the data and its order.
        plan: how its global batches are divided.
        weight: a batch's weight in the mean, instead of its number of samples.
        sample_rng: give every sample random streams of its own.
        seed: of the run.
        collectives: of the run.
        step: the present optimizer step, kept up to date while iterating.
        evaluates_together: forward passes without gradients involve other ranks too, so every
            rank gets every micro-batch of an evaluation, one without samples as well.
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
        self.current = MicroBatch()
        self._collectives = collectives
        self._step = step
        self._evaluates_together = evaluates_together
        self._fetch = Fetch(source.dataset, source.collate, seed, sample_rng)
        self.trained = 0
        """Passes in which an optimizer has stepped."""
        self.passes_begun = 0
        """On this rank, with gradients and without."""
        self.evaluated = 0
        """Passes in which nothing was trained that this rank has come to the end of."""
        self.evaluated_at: Location | None = None
        """The user's line that began the latest of these."""
        self.length_asked_at: Location | None = None
        """The user's line that has last asked for `len(loader)`."""
        self.coverage = Coverage(source.sampler, source.batch_sampler)
        self._epoch = 0
        """Passes with gradients that have begun."""
        self._evaluations = 0
        """Passes without gradients that have begun."""
        self.start = 0
        """Global batches of the coming pass with gradients: a checkpoint was resumed after them."""
        self._running: TrainingPass | None = None
        self._custom_plan: CustomPlan | None = None
        """Of the pass that is running or is to be taken up, where the order is the user's own."""
        self._position = 0
        self._example: Any = None
        """A batch of one sample."""
        self._needs_empty_parts = False
        """In the pass that has begun last some rank has no samples of some batch."""
        own_collate = source.collate is not default_collate
        self._rows = RowCounter() if own_collate else None
        self._workers = Workers(source.options, seed)

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.source.dataset

    @property
    def batch_size(self) -> int:
        """Samples of a global batch."""
        return self.source.batch_size

    @property
    def shares(self) -> tuple[int, ...]:
        """How a global batch is divided over the ranks: one whole number each."""
        return self._plan.shares

    @property
    def micro_batches(self) -> int:
        """Of a global batch."""
        return self._plan.num_micro_batches

    @property
    def steps(self) -> int | None:
        """Global batches, and so optimizer steps, of an epoch; None: not known."""
        return self.source.steps

    @property
    def epoch(self) -> int:
        """The epoch that is trained on, or the next one."""
        return self._epoch - 1 if self._is_running else self._epoch

    @property
    def mid_epoch(self) -> bool:
        """An epoch is trained on, or will be taken up where a checkpoint left it."""
        return self._is_running or self.start > 0

    @property
    def _is_running(self) -> bool:
        """Whether a pass with gradients goes on.

        A loop that fetches batches ahead trains on the last ones when the loader has ended.
        """
        running = self._running
        if running is None:
            return False
        return not running.ended or bool(running.untrained) or not running.stepped

    @cached_property
    def fingerprint(self) -> Fingerprint | None:
        """What tells these data from others; some samples are read for it, once."""
        return read_fingerprint(self.source, self.seed)

    @property
    def first_samples_of_epoch(self) -> list[Any]:
        """Of a stream: digests of the first samples that it gave in the present epoch."""
        return []

    def choice(self, number: int) -> Choice:
        """How the global batch is computed, in words; `number` is that of this loader."""
        begins, ends = self._plan.split(self.batch_size).transpose(2, 0, 1)
        of_rank = (ends - begins).sum(axis=0).tolist()
        if len(of_rank) == 1:
            how = "in one process" if self._collectives.alone else "by all ranks together"
        elif len(set(of_rank)) == 1:
            how = f"{of_rank[0]} on each of {len(of_rank)} ranks"
        else:
            how = " + ".join(str(n) for n in of_rank[:8]) + (" + ..." if of_rank[8:] else "")
            how += f" on ranks 0 to {len(of_rank) - 1}"
        if self.micro_batches > 1:
            how += f", in {self.micro_batches} micro-batches"
        if self._plan.request.undecided:
            how += "; how to divide it is measured in the first that is trained on"
        if self.source.sharding is not None and len(of_rank) > 1:
            how += f"; {SHARDING[self.source.sharding]}"
        size = "a stream" if self.steps is None else f"{self.source.length:,}"
        value = f"{self.batch_size:,} of {size}".replace(",", " ")
        return Choice(f"loader {number}", value, f"samples in a global batch, {how}")

    def __len__(self) -> int:
        """Micro-batches of an epoch, which is the number of turns of a training loop.

        While `micro_batch_size="auto"` is not found, one for each global batch is counted.

        Raises:
            LengthUnknownError: of a stream that does not say its length.
        """
        self.length_asked_at = user_location()
        if self.source.batch_sampler is not None:
            plan = self.source.plan(self.seed, self.epoch)
            return sum(len(self._plan.split(len(batch))) for batch in plan.batches())
        full, rest = divmod(self.source.length, self.batch_size)
        last = len(self._plan.split(rest)) if rest and not self.source.drop_last else 0
        return full * self.micro_batches + last

    def __iter__(self) -> Iterator[Any]:
        self.passes_begun += 1
        if torch.is_grad_enabled():
            epoch, start = self._epoch, self.start
            self._epoch, self.start = epoch + 1, 0
            return self._train(epoch, start)
        self._evaluations += 1
        return self._evaluate(self._evaluations - 1)

    def state_dict(self) -> dict[str, Any]:
        """The position: the same on every rank, and meaningful on any number of them.

        The number of evaluations differs where only some ranks have evaluated, which is reported.

        Inside of an epoch it comes with the order of that epoch where a sampler of the user's gave
        it: asked again, that may give another one.
        """
        if self._running is None or not self._is_running:
            epoch, step = self._epoch, self.start
        else:
            done = self._running.micro_batch.last and self._running.stepped
            epoch, step = self._epoch - 1, self._position + int(done)
        position = {"epoch": epoch, "step": step, "evaluations": self._evaluations}
        state: dict[str, Any] = {**position, **self._identity()}
        if self.fingerprint is not None:
            state["data"] = self.fingerprint.to_text()
        if self.mid_epoch and self._custom_plan is not None:
            state |= {name: torch.from_numpy(a) for name, a in vars(self._custom_plan).items()}
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
            before = Fingerprint.from_text(state["data"])
            check_fingerprint(self.source, before, self.fingerprint)
        self._epoch, self.start, self._running = state["epoch"], state["step"], None
        # An older checkpoint has one count of both.
        self._evaluations = state.get("evaluations", state["epoch"])
        self._custom_plan = None
        if "order" in state:
            self._custom_plan = CustomPlan(state["order"].numpy(), state["bounds"].numpy())

    def example(self) -> Any:
        """A batch of one micro-batch's size, of the first samples, on the CPU."""
        count = -(-self.batch_size // self.micro_batches)
        return self._first(0, count)

    def release(self) -> None:
        """Ends persistent workers."""
        self._workers.release()

    def _train(self, epoch: int, start: int) -> Iterator[Any]:
        """The pass with gradients over an epoch, from a global batch of it on."""
        plan: Plan | None = self._custom_plan if start else None
        if plan is None:
            plan = self.source.plan(self.seed, epoch)
        self._custom_plan = plan if isinstance(plan, CustomPlan) else None
        self.coverage.begin(epoch, start, plan)
        self._needs_empty_parts = False
        if self._plan.num_virtual_ranks is None:
            self._needs_empty_parts = not self._plan.reaches_all(plan)
        segments = self._plan.segments(plan, start)
        return self._run(epoch, start, self._of_segments(epoch, segments), training=True)

    def _evaluate(self, epoch: int) -> Iterator[Any]:
        """A pass without gradients."""
        plan = self.source.plan(self.seed, epoch)
        wanted = self._plan.of_epoch(plan, 0)
        some_lack = not self._plan.reaches_all(plan)
        some_skip = some_lack and not self._evaluates_together
        self._needs_empty_parts = some_lack and self._evaluates_together
        if not self._evaluates_together:
            wanted = (planned for planned in wanted if planned.micro_batch.local_rows)
        read = self._with_rows(epoch, self._with_batches(epoch, wanted))
        pairs = to_device(read, self._collectives.device)
        return self._run(epoch, 0, pairs, training=False, some_skip=some_skip)

    def _identity(self) -> dict[str, int]:
        found = {
            "length": self.source.length,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": int(self.source.shuffle),
        }
        if self.source.shuffle and permutes(self.source.length):
            found["version of the order"] = _ORDER
        return found

    def _run(
        self,
        epoch: int,
        start: int,
        pairs: Generator[WithBatch, None, None],
        *,
        training: bool,
        some_skip: bool = False,
    ) -> Iterator[Any]:
        """Hands out the micro-batches; everything is as it was before when the pass is left."""
        step = self._step
        micro_batch_before = step.micro_batch_in_use
        blocked = self._collectives.blocked
        running, begun_at = TrainingPass(), user_location()
        reading, working = ("data", "forward") if training else ("evaluation", "evaluation")
        before = step.enter_phase(reading)
        exhausted = False
        try:
            if training:
                self._running, self._position = running, start
            elif some_skip:
                self._collectives.blocked = SOME_SKIP
            for planned, batch in pairs:
                self._set_current(planned.micro_batch)
                if not planned.micro_batch.local_rows:
                    batch = self._without_samples(batch)
                if training:
                    self._hand_out(epoch, running, planned, batch)
                step.enter_phase(working)
                yield batch
                step.enter_phase(reading)
            exhausted = True
            if not running.ever_stepped:
                self.evaluated += 1
                self.evaluated_at = begun_at
        finally:
            pairs.close()
            self._collectives.blocked = blocked
            if self._running is running:
                self._running = None
            self.trained += int(running.ever_stepped)
            step.end_pass(running, exhausted=exhausted)
            step.micro_batch_in_use = micro_batch_before
            step.enter_phase(before)

    def _without_samples(self, batch: Any) -> Any:
        """A batch without rows, for the training loop.

        It is a view of the one sample that a micro-batch without samples comes with, from which a
        prepared model takes the row that it computes (`strategies.placeholder`), and functions that
        the loop calls (`batch.no_rows`).
        """
        if batch is None:  # the collate function left out the whole global batch
            return None
        self._step.sample_in_place_of_none = batch
        if not self._step.had_empty_part:
            self._step.had_empty_part = True
            self._step.extensions.part_is_empty()
        return map_tensors(emptied(batch, 1, share=True), marked)

    def _hand_out(
        self, epoch: int, running: TrainingPass, planned: PlannedMicroBatch, batch: Any
    ) -> None:
        """Tells the step and the extensions what the training loop is about to get."""
        position, micro, indices, _, whole = planned
        self.coverage.add(epoch, position, indices, micro, whole)
        # Set to () below: only the script may keep the batch alive, so that one sees if it does.
        batch_for_extensions: Any = batch

        def begin(micro_batch: MicroBatch) -> None:
            self._set_current(micro_batch)
            extensions = self._step.extensions
            if extensions.listeners["delivered"]:
                extensions.delivered(
                    DeliveredBatch(
                        loader=self,
                        epoch=epoch,
                        position=position,
                        samples=indices,
                        micro_batch=micro_batch,
                        batch=batch_for_extensions,
                        counts=self._collectives.contributes,
                    )
                )
            if self._running is running or self._running is None:
                self._running = running
                self._position = position

        self._step.hand_out(Delivery(running, micro, storages(batch), begin))
        batch_for_extensions = ()

    def _set_current(self, micro_batch: MicroBatch) -> None:
        """The script works on this micro-batch of the loader from now on."""
        self.current = micro_batch
        self._step.micro_batch_in_use = micro_batch
        self._step.latest_micro_batch = micro_batch

    def _of_segments(
        self, epoch: int, segments: Generator[Segment, None, None]
    ) -> Generator[WithBatch, None, None]:
        """The micro-batches of a training, weighted, each with its batch on the device.

        Nothing is read of a segment before the one before it has been worked on.
        """
        weight_before = 0.0  # of what this rank was handed of the same global batch
        with closing(segments):
            for wanted, ahead in segments:
                weighing = self._weighing(epoch)
                if weighing.is_planned:
                    pairs = self._with_batches(epoch, wanted)
                else:  # of which the whole global batch has to be read
                    read = self._with_batches(epoch, [*wanted, *ahead])
                    handed = 0.0
                    if ahead:
                        whole = list(read)
                        handed, read = weighing.counted(*whole[0]).weight, iter(whole)
                    scaled = weighted(
                        read,
                        weighing,
                        self._collectives,
                        epoch,
                        weight_before,
                        self._plan.num_virtual_ranks,
                    )
                    pairs, weight_before = islice(scaled, 1) if ahead else scaled, handed
                yield from to_device(pairs, self._collectives.device)

    def _with_batches(self, epoch: int, wanted: Iterable[PlannedMicroBatch]) -> Iterator[WithBatch]:
        """The micro-batches, each with its batch on the CPU; an empty one comes from any other."""
        wanted, ahead = tee(wanted)
        filled = ((epoch, planned.indices) for planned in ahead if planned.micro_batch.local_rows)
        fetched = self._workers.read(self._fetch, filled)
        for planned in wanted:
            if planned.micro_batch.local_rows:
                batch = next(fetched)
                self._keep_example(batch, planned.micro_batch.local_rows)
            else:
                batch = self._empty(epoch)
            yield planned, batch

    def _weighing(self, epoch: int) -> Weighing:
        """How the micro-batches of a pass are weighed."""
        return Weighing(weight=self.weight, rows=self._rows, empty=lambda: self._empty(epoch))

    def _with_rows(self, epoch: int, pairs: Iterator[WithBatch]) -> Iterator[WithBatch]:
        """The micro-batches of an evaluation, with the rows that each has."""
        if self._rows is None:
            yield from pairs
            return
        weighing = Weighing(weight=None, rows=self._rows, empty=lambda: self._empty(epoch))
        for planned, batch in pairs:
            counted = weighing.counted(planned, batch)
            yield counted.planned, counted.batch if self._evaluates_together else batch

    def _keep_example(self, batch: Any, count: int) -> None:
        """Keeps one sample of the first batch, of which batches without samples are made.

        Raises:
            DataError: that cannot be done, and this pass needs it: said before the first step.
        """
        if self._example is not None or batch is None:
            return
        try:
            self._example = emptied(batch, count, rows=1)
        except DataError as error:
            if self._needs_empty_parts:
                raise DataError(
                    error.was_set,
                    "some rank gets no samples of a short batch in this pass, and an empty batch "
                    "of this type cannot be made",
                    error.do,
                ) from error

    def _empty(self, epoch: int) -> Any:
        """What stands for a part without samples until it is handed out: a batch of one sample."""
        if self._example is None:
            # A collate function of the user's may leave the first sample out.
            count = 1 if self._rows is None else self.batch_size
            self._example = emptied(self._first(epoch, count), count, rows=1)
        return map_tensors(self._example, Tensor.clone)  # the user may write to what is handed out

    def _first(self, epoch: int, count: int) -> Any:
        """A batch of the first samples, on the CPU."""
        with preserve_rng_state():
            return self._fetch[epoch, np.arange(min(count, self.source.length), dtype=np.int64)]


class Epochs:
    """Counts epochs and sees, from what the loaders did, whether the present one is done.

    Args:
        loaders: all prepared loaders; the list may still grow.
        step: of the run.
    """

    def __init__(self, loaders: list[Loader], step: Step) -> None:
        self.present = 0
        self._loaders = loaders
        self._step = step
        self._begun: dict[Loader, int] | None = None
        """Passes with steps of each loader when the present epoch began; None between loops."""
        self._begun_at = 0
        self._regular: list[Loader] = []
        """Those that were trained on in the epoch before belong to every epoch."""

    def run(self, total: int) -> Iterator[int]:
        """The epochs from the present one to `total` - 1."""
        while self.present < total:
            self._begin()
            try:
                yield self.present
            except GeneratorExit:  # the loop was left with `break`
                self.present = self.next
                self._begun = None
                raise
            self.present += 1
        self._begun = None

    @property
    def next(self) -> int:
        """The epoch to continue with: the present one, or the next if it is done."""
        return self.present + int(self._done())

    def _begin(self) -> None:
        before = self._begun or {}
        self._regular = [x for x in self._loaders if x.trained > before.get(x, x.trained)]
        self._begun = {loader: loader.trained for loader in self._loaders}
        self._begun_at = self._step.number

    def _done(self) -> bool:
        if self._begun is None or any(loader.mid_epoch for loader in self._loaders):
            return False
        if not any(loader.trained for loader in self._loaders):
            return self._step.number > self._begun_at
        now = [x for x in self._loaders if x.trained > self._begun.get(x, 0)]
        return bool(now) and all(loader in now for loader in self._regular)
