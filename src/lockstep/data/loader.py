"""The loader: this rank's part of every global batch, on the device, in the planned order.

One pass over a loader is one epoch. Its position is two numbers, epoch and global batch, which are
the same on all ranks and mean the same on any number of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.batch_plan import EpochPlan, Indices
from lockstep.data.coverage import Coverage
from lockstep.data.fetch import Fetch, Key, Workers, to_device
from lockstep.data.micro_batch_plan import Division, Portion
from lockstep.data.pytree import emptied, map_tensors
from lockstep.data.shares import AutotuneRequest, parts
from lockstep.data.source import Source
from lockstep.data.weighting import Pair, Weight, weigh, weighted
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.errors import CheckpointError, DataError
from lockstep.settings import Choice
from lockstep.step import BatchEvent, MicroBatch, Pass, Step


class Loader:
    """Iterates this rank's micro-batches of an epoch.

    With gradients enabled every rank gets every micro-batch, one without samples being a batch of
    shape `(0, *)`: the other ranks need its backward pass. Under `torch.no_grad()` or
    `torch.inference_mode()` nothing is exchanged (unless `together`), so a rank skips a batch it
    has no samples of.

    Args:
        source: the data and its order.
        shares: one whole number a rank.
        micro_batch_size: the most samples this rank computes at a time; None: its whole part.
            `"auto"` is None until it is found.
        weight: a batch's weight in the mean, instead of its number of samples.
        sample_rng: give every sample random streams of its own.
        seed: of the run.
        collectives: of the run.
        step: the present optimizer step, kept up to date while iterating.
        together: forward passes without gradients, too, involve other ranks, so every rank gets
            every micro-batch of an evaluation, one without samples as well.
        pieces: micro-batches of a global batch, at least.
        wish: what of shares and micro_batch_size is found in the first pass that trains.
    """

    def __init__(
        self,
        source: Source,
        *,
        shares: tuple[int, ...],
        micro_batch_size: int | str | None = None,
        weight: Weight | None = None,
        sample_rng: bool = True,
        seed: int,
        collectives: Collectives,
        step: Step,
        together: bool = False,
        pieces: int = 1,
        wish: AutotuneRequest | None = None,
    ) -> None:
        self.source = source
        self.weight = weight
        self.seed = seed
        self._division = Division(
            source.batch_size,
            varying=source.batch_sampler is not None,
            shares=shares,
            micro_batch_size=micro_batch_size,
            least_pieces=pieces,
            wish=wish,
        )
        self.current = MicroBatch()
        self._collectives = collectives
        self._step = step
        self._together = together
        self._fetch = Fetch(source.dataset, source.collate, seed, sample_rng)
        self.trained = 0
        """Passes in which an optimizer has stepped."""
        self.evaluated = 0
        """Passes without gradients that this rank has come to the end of."""
        self.coverage = Coverage(source.sampler, source.batch_sampler)
        self._epoch = 0
        self._start = 0
        self._running: Pass | None = None
        self._own_plan: EpochPlan | None = None
        """Of the pass that is running, or is to be taken up, where the order is the user's own."""
        self._position = 0
        self._example: Any = None
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
        self._division.follow()
        return self._division.shares

    @property
    def micro_batches(self) -> int:
        """Of a global batch."""
        self._division.follow()
        return self._division.micro_batches

    @property
    def steps(self) -> int:
        """Global batches, and so optimizer steps, of an epoch."""
        return self.source.steps

    @property
    def epoch(self) -> int:
        """The epoch of the pass that is running, or of the next one."""
        return self._epoch if self._running is None else self._epoch - 1

    @property
    def mid_epoch(self) -> bool:
        """A pass is running, or will be taken up where a checkpoint left it."""
        return self._running is not None or self._start > 0

    @property
    def start(self) -> int:
        """Global batches of the coming pass that a checkpoint has been resumed after."""
        return self._start

    @property
    def choice(self) -> Choice:
        """How the global batch is computed, in words."""
        of_rank = parts(self.batch_size, self.shares)
        value = f"{self.batch_size:,} of ".replace(",", " ") + self._size()
        if len(of_rank) == 1:
            together = "in one process" if self._collectives.alone else "by all ranks together"
            reason = f"samples: the global batch, {together}"
        elif len(set(of_rank)) == 1:
            reason = f"samples: the global batch, {of_rank[0]} on each of {len(of_rank)} ranks"
        else:
            shown = " + ".join(str(n) for n in of_rank[:8]) + (" + ..." if of_rank[8:] else "")
            reason = f"samples: the global batch, {shown} on ranks 0 to {len(of_rank) - 1}"
        if self.micro_batches > 1:
            reason += f", in {self.micro_batches} micro-batches"
        if self._division.open:
            reason += "; how to divide it is measured in the first that is trained on"
        return Choice("batch", value, reason)

    def __len__(self) -> int:
        """Micro-batches of an epoch, which is the number of turns of a training loop.

        While `micro_batch_size="auto"` is not found, one for each global batch is counted.

        Raises:
            LengthUnknownError: of a stream that does not say its length.
        """
        length, size = self.source.length, self.batch_size
        if self.source.batch_sampler is not None:
            plan = self.source.plan(self.seed, self.epoch)
            return len(self._division.pieces(plan, self._collectives.data_parallel, 0))
        full = min(self.steps, length // size)
        last = len(self._division.planned(length % size)) if self.steps > full else 0
        return full * self.micro_batches + last

    def __iter__(self) -> Iterator[Any]:
        training = torch.is_grad_enabled()
        epoch, start = self._epoch, self._start
        self._epoch, self._start = epoch + 1, 0
        return self._begin(epoch, start, training)

    def state_dict(self) -> dict[str, Any]:
        """The position: the same on every rank, and meaningful on any number of them.

        Inside of an epoch it comes with the order of that epoch where a sampler of the user's gave
        it: asked again, that may give another one.
        """
        if self._running is None:
            epoch, step = self._epoch, self._start
        else:
            done = self._running.micro_batch.last and self._running.stepped
            epoch, step = self._epoch - 1, self._position + int(done)
        state: dict[str, Any] = {"epoch": epoch, "step": step, **self._identity()}
        if self.mid_epoch and self._own_plan is not None:
            state |= {name: torch.from_numpy(a) for name, a in vars(self._own_plan).items()}
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
                    "continue with the same data, batch size and seed, or leave the loader out",
                )
        self._epoch, self._start, self._running = state["epoch"], state["step"], None
        self._own_plan = None
        if "order" in state:
            self._own_plan = EpochPlan(state["order"].numpy(), state["bounds"].numpy())

    def example(self) -> Any:
        """A batch of one micro-batch's size, of the first samples, on the CPU."""
        count = min(self.source.length, -(-self.batch_size // self.micro_batches))
        with preserve_rng_state():
            return self._fetch[0, np.arange(count, dtype=np.int64)]

    def release(self) -> None:
        """Ends persistent workers."""
        self._workers.release()

    def _begin(self, epoch: int, start: int, training: bool) -> Iterator[Any]:
        """The pass over an epoch, from a global batch of it on."""
        plan = self._own_plan if start else None
        if plan is None:
            plan = self.source.plan(self.seed, epoch)
        part = self._collectives.data_parallel
        if training:
            self._own_plan = plan if self.source.own_order else None
            self.coverage.begin(epoch, start, plan)
            portions = self._division.portions(plan, part, start, weighed=self.weight is not None)
            return self._run(epoch, portions, start, training, False)
        self._division.follow()
        pieces = self._division.pieces(plan, part, start)
        some_skip = False
        if not self._together:
            some_skip = not all(all_have for _, _, _, all_have in pieces)
            pieces = [piece for piece in pieces if piece[1].local]
        portion = Portion(deque(pieces))
        return self._run(epoch, (one for one in [portion]), start, training, some_skip)

    def _size(self) -> str:
        return f"{self.source.length:,}".replace(",", " ")

    def _identity(self) -> dict[str, int]:
        return {
            "length": self.source.length,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": int(self.source.shuffle),
        }

    def _run(
        self,
        epoch: int,
        portions: Generator[Portion, None, None],
        start: int,
        training: bool,
        some_skip: bool,
    ) -> Iterator[Any]:
        """Hands out the pieces; everything is as it was before when the pass is left."""
        step, seen, blocked = self._step, self._step.seen, self._collectives.blocked
        running = Pass()
        try:
            if training:
                self._running, self._position = running, start
            elif some_skip:
                self._collectives.blocked = SOME_SKIP
            for portion in portions:
                for micro, batch in self._place(self._pairs(epoch, portion, training)):
                    position, _, samples, _ = portion.pieces.popleft()
                    self.current = step.seen = step.latest = micro
                    if training:
                        step.begin(running, micro)
                        self.coverage.add(epoch, position, samples, micro)
                        if step.watchers:
                            counts = self._collectives.contributes
                            handed = BatchEvent(
                                self, epoch, position, samples, micro, batch, counts
                            )
                            for watcher in step.watchers:
                                watcher.handed_out(handed)
                        if self._running is running:
                            self._position = position
                    yield batch
            self.evaluated += int(not training)
        finally:
            portions.close()
            self._collectives.blocked = blocked
            if self._running is running:
                self._running = None
            self.trained += int(running.trained)
            step.end(running)
            step.seen = seen

    def _pairs(self, epoch: int, portion: Portion, training: bool) -> Iterator[Pair]:
        """The pieces of a portion, weighted, each with its batch on the CPU."""
        wanted = [*portion.pieces, *portion.ahead]
        batches = self._read([(epoch, indices) for _, _, indices, _ in wanted])
        pairs: Iterator[Pair] = zip((piece[1] for piece in wanted), batches, strict=True)
        if self.weight is None or not training:
            return pairs
        begun = portion.begun
        if portion.ahead:
            read = list(pairs)
            micro, batch = read[0]
            portion.begun = weigh(self.weight, batch) if micro.local else 0.0
            pairs = iter(read)
        whole = weighted(
            pairs,
            self.weight,
            self._collectives,
            epoch=epoch,
            position=wanted[0][0] if wanted else 0,
            begun=begun,
        )
        return islice(whole, len(portion.pieces))

    def _place(self, pairs: Iterator[Pair]) -> Iterator[Pair]:
        """Moves batches to the device while keeping what they are beside them."""
        micros: list[MicroBatch] = []

        def batches() -> Iterator[Any]:
            for micro, batch in pairs:
                micros.append(micro)
                yield batch

        for batch in to_device(batches(), self._collectives.device):
            yield micros.pop(0), batch

    def _read(self, keys: list[Key]) -> Iterator[Any]:
        """The collated batches on the CPU; an empty part is made from any other batch."""
        filled = [key for key in keys if len(key[1])]
        workers = self.source.options.get("num_workers", 0)
        fetched = (
            self._workers.read(self._fetch, filled)
            if workers and filled
            else map(self._fetch.__getitem__, filled)
        )
        for key in keys:
            if len(key[1]):
                batch = next(fetched)
                self._keep_example(batch, len(key[1]))
                yield batch
            else:
                yield self._empty(key[0])

    def _keep_example(self, batch: Any, count: int) -> None:
        if self._example is None:
            with suppress(DataError):  # raised where an empty part is really needed
                self._example = emptied(batch, count)

    def _empty(self, epoch: int) -> Any:
        if self._example is None:
            with preserve_rng_state():
                self._example = emptied(self._fetch[epoch, _FIRST], 1)
        return map_tensors(self._example, Tensor.clone)  # the user may write to what is handed out


_FIRST: Indices = np.zeros(1, dtype=np.int64)
SOME_SKIP = "in this pass some rank has no samples of some batch and skips it"
