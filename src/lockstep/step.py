"""The present optimizer step, as the parts that take turns in it see it.

The loader says which micro-batch it hands out, `World.backward` and the prepared optimizers say
what they did with it. There is one `Step` a run; it is plain state, and all decisions are made by
those who read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

CHECK_EVERY = 200
"""Global batches from one comparison of the ranks to the next, by default."""
_EARLY = frozenset({1, 2, 3, 10})


def check_due(number: int, every: int = CHECK_EVERY) -> bool:
    """Whether to compare the ranks at this global batch: in the first ones, and now and then."""
    return number in _EARLY or number % every == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one rank computes at a time."""

    count: int = 0
    """Samples of the whole global batch, over all ranks and micro-batches."""
    local: int = 0
    """Samples of this rank's part of this micro-batch; 0 is possible."""
    first: bool = True
    last: bool = True
    """Whether this micro-batch opens and closes its global batch."""
    num_micro_batches: int = 1
    """Micro-batches of the global batch."""
    scale: float = 1.0
    """What the loss is multiplied by, so that the average over ranks of the accumulated gradients
    is the gradient of the mean over the global batch; over the part of one replica, where there are
    several that train apart."""
    plain: bool = True
    """The scale is 1 on every rank and there is one micro-batch: `loss.backward()` is right too."""
    replica: int | None = None
    """Which of the replicas that train apart computes it; None: there are none."""
    turns: int = 1
    """How many of these this process computes, one after the other."""
    mean_turns: float = 1.0
    """How many a process computes in the mean over all."""
    begins_turn: bool = False
    ends_turn: bool = False
    """Whether it is the first and the last of its replica in the global batch."""

    def of_all(self) -> MicroBatch:
        """The same, where the replicas train as one: each counts alike."""
        own = {
            "replica": None,
            "turns": 1,
            "mean_turns": 1.0,
            "begins_turn": False,
            "ends_turn": False,
        }
        return replace(self, scale=self.scale / self.mean_turns, **own)  # type: ignore[arg-type]

    @property
    def opens(self) -> bool:
        """No gradients of the same step come before it."""
        return self.first or self.begins_turn

    @property
    def closes(self) -> bool:
        """The optimizer steps after it."""
        return self.last or self.ends_turn


_weight = attrgetter("scale", "opens", "closes", "plain", "replica")
"""What must be alike where two loaders are trained on at a time."""


class BatchEvent(NamedTuple):
    """A micro-batch that a loader delivers to be trained on, on this rank."""

    loader: Any
    epoch: int
    position: int
    """Which global batch of the epoch it is part of, from 0."""
    samples: npt.NDArray[np.int64]
    """The indices of its samples in the dataset."""
    micro_batch: MicroBatch
    batch: Any
    """What the training loop gets."""
    counts: bool
    """Whether this rank's part is counted: under a pipeline other ranks get the same one."""


class Callback:
    """Looks on at a training, on its rank, and changes nothing; here every method does nothing."""

    def prepared(self, module: nn.Module) -> None:
        """`World.prepare` has wrapped a module."""

    def delivered(self, event: BatchEvent) -> None:
        """A training loop is about to get a micro-batch."""

    def backward(self, loss: Tensor) -> None:
        """`World.backward` was given a loss; here it is weighted, so that the mean over ranks of
        its sums over the micro-batches is the loss of the global batch.
        """

    def stepped(self, number: int) -> None:
        """The first of the optimizers has stepped for the global batch of this number, from 0."""

    def logged(self, description: str, means: Mapping[str, float], *, complete: bool) -> None:
        """There are new means over all ranks of what was given to `World.log` in a pass; of the
        whole pass, where it is complete.
        """

    def announced(self, choices: Sequence[tuple[str, str, str]]) -> None:
        """Something was chosen: names, values and reasons."""


class Pass:
    """One running iteration of a training loader."""

    def __init__(self) -> None:
        self.micro_batch = MicroBatch()
        self.number = 0
        """Global batches begun."""
        self.turns = 0
        """Likewise; where replicas take turns, each of these counts."""
        self.backwards = 0
        """Calls of `World.backward` for the present micro-batch."""
        self.loss: Tensor | float = 0.0
        """What `World.backward` was given of the present global batch, weighted and summed up."""
        self.accumulated = False
        """Whether the present global batch has gradients of micro-batches before this one."""
        self.stepped = False
        """Whether an optimizer has stepped for the present global batch."""
        self.trained = False
        """Whether one has stepped at all: a pass with gradients may be an evaluation."""


Turn = tuple[Pass, int, int]
"""A pass, which of its global batches, and which of its turns."""

PHASES = (
    "data", "forward", "backward", "communication", "optimizer", "checkpoint", "evaluation", "other"
)  # fmt: skip
"""What a rank spends the time of a step on. `communication` is waiting for other ranks, whatever it
is for; `forward` ends where `World.backward` begins, or the optimizer's step; `other` is what
follows that step, up to the next batch."""

_of_every_run: list[Callback] = []


def add_callback(callback: Callback) -> None:
    """Lets a callback look on at every run that this process joins from now on."""
    _of_every_run.append(callback)


class Step:
    """The state of the present optimizer step."""

    def __init__(self) -> None:
        self.seen = self.latest = MicroBatch()
        """The micro-batch last handed out by any loader, evaluation included; for averages. When a
        pass is over, `seen` is again what it was before, `latest` is not."""
        self.number = 0
        """Global batches finished by an optimizer step since the start of the training."""
        self.devices = 1
        """Of this process, which divide each of its micro-batches."""
        self.samples = 0
        """Samples, over all ranks, that this process has seen trained on."""
        self.clear_gradients: list[Callable[[], None]] = []
        """Of the prepared optimizers."""
        self.batch_begins: list[Callable[[], None]] = []
        """Called before the first micro-batch of a global batch, or of a replica's part of it."""
        self.micro_batch_begins: list[Callable[[], None]] = []
        """Called when a micro-batch is about to be handed out, and is the current one."""
        self.pass_ends: list[Callable[[], None]] = []
        """Called when a training loop is left."""
        self.replica: int | None = None
        """Whose part the present micro-batch is of, also as long as they train together."""
        self.together = 0
        """Global batches, from the first, in which replicas do not train apart yet."""
        self.callbacks: list[Callback] = [*_of_every_run]
        self.enter_phase: Callable[[str], str] = lambda phase: "other"
        """Called with one of `PHASES` where it begins; gives the one before. Set by a recorder."""
        self._outside = self.running = Pass()
        """The pass whose micro-batch is worked on; outside of any loader one that never ends."""
        self._passes: list[Pass] = []
        self._since: float | None = None
        self._until = 0.0

    @property
    def inside(self) -> bool:
        """A prepared loader is being trained on."""
        return bool(self._passes)

    @property
    def current(self) -> MicroBatch:
        """The micro-batch that a training loop works on."""
        return self.running.micro_batch

    @property
    def batch(self) -> Turn:
        """Tells what the present optimizer step is made of from all others."""
        return self.running, self.running.number, self.running.turns

    def begin(self, running: Pass, micro_batch: MicroBatch) -> MicroBatch:
        """A pass hands out a micro-batch to train on.

        Returns:
            The same; one of all replicas, where they train together.

        Raises:
            UsageError: another loader is being trained on, and its parts weigh differently.
        """
        self.replica = micro_batch.replica
        if self.replica is not None and self.number < self.together:
            micro_batch = micro_batch.of_all()
        self._check_alike(running, micro_batch)
        if running in self._passes:
            self._passes.remove(running)
        self._passes.append(running)
        self.running = running
        if self._since is None:
            self._since = time.perf_counter()
        if micro_batch.first:
            running.number += 1
            running.stepped = running.accumulated = False
            running.loss = 0.0
        elif running.backwards:
            running.accumulated = True
        if micro_batch.opens:
            running.turns += 1
            for begins in self.batch_begins:
                begins()
        running.micro_batch = self.seen = micro_batch
        running.backwards = 0
        for begins in self.micro_batch_begins:
            begins()
        return micro_batch

    def _check_alike(self, running: Pass, micro_batch: MicroBatch) -> None:
        for other in self._passes:
            if other is not running and _weight(other.micro_batch) != _weight(micro_batch):
                raise UsageError(
                    "training on two prepared loaders at a time",
                    "this rank's parts of their global batches weigh differently, so one "
                    "world.backward cannot be exact for both",
                    "evaluate under torch.no_grad(); to train on two datasets use one loader over "
                    "both, or equal shares, batch sizes that divide and drop_last=True",
                )

    def end(self, running: Pass) -> None:
        """The pass is over; gradients of a global batch broken off in its middle are dropped."""
        if running not in self._passes:
            return
        self._passes.remove(running)
        self.running = self._passes[-1] if self._passes else self._outside
        self.replica = self.replica if self._passes else None
        if not running.micro_batch.last and (running.accumulated or running.backwards):
            for clear in self.clear_gradients:
                clear()
        for ends in self.pass_ends:
            ends()

    def weighted(self, loss: Tensor) -> Tensor:
        """The loss of the present micro-batch, as much as it counts in that of the global batch."""
        running = self.running
        scale = running.micro_batch.scale
        weighted = loss if scale == 1.0 else loss * scale
        # The mean over no samples is NaN, and does not count.
        counted = weighted if scale else weighted.new_zeros(())
        for callback in self.callbacks:
            callback.backward(counted)
        if running is self._outside and running.stepped:  # no loader says what a global batch is
            running.loss, running.stepped = 0.0, False
        turns, part = running.micro_batch.mean_turns, counted.detach()
        running.loss = (part if turns == 1 else part / turns) + running.loss
        return weighted

    def mark_stepped(self) -> None:
        """A prepared optimizer has stepped; several of them make one step together."""
        running = self.running
        if not running.stepped or running is self._outside:
            for callback in self.callbacks:
                callback.stepped(self.number)
            self.number += 1
            self.samples += running.micro_batch.count
            self._until = time.perf_counter()
        running.stepped = running.trained = True

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Steps that are taken inside do not count: they are put back, and nobody watches."""
        before = self.number, self.samples, self._since, self._until
        callbacks, self.callbacks = self.callbacks, []
        try:
            yield
        finally:
            self.number, self.samples, self._since, self._until = before
            self.callbacks = callbacks

    @property
    def seconds(self) -> float:
        """From the first micro-batch handed out to the last optimizer step."""
        return 0.0 if self._since is None else max(0.0, self._until - self._since)
