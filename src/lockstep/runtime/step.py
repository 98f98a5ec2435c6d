"""The present optimizer step, as the parts that take turns in it see it.

The loader says which micro-batch it hands out, `World.backward` and the prepared optimizer say
what they did with it. There is one `Step` a run; it is plain state, and all decisions are made by
those who read it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


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
    scale: float = 1.0
    """What the loss is multiplied by, so that the average over ranks of the accumulated gradients
    is the gradient of the mean over the global batch."""
    plain: bool = True
    """The scale is 1 on every rank and there is one micro-batch: `loss.backward()` is right too."""


OUTSIDE = MicroBatch()
"""The present micro-batch where no prepared loader is being iterated."""


class Step:
    """The state of the present optimizer step."""

    def __init__(self) -> None:
        self.current = OUTSIDE
        """The micro-batch that a training loop works on."""
        self.seen = OUTSIDE
        """The micro-batch last handed out by any loader, evaluation included; for averages."""
        self.backwards = 0
        """Calls of `World.backward` for the present micro-batch."""
        self.stepped = False
        """Whether an optimizer has stepped for the present global batch."""
        self.number = 0
        """Global batches finished by an optimizer step since the start of the training."""
        self.samples = 0
        """Samples, over all ranks, that this process has seen trained on."""
        self._since: float | None = None
        self._until = 0.0

    def begin(self, micro_batch: MicroBatch) -> None:
        """A loader hands out a micro-batch to train on."""
        if self._since is None:
            self._since = time.perf_counter()
        self.current = self.seen = micro_batch
        self.backwards = 0
        if micro_batch.first:
            self.stepped = False

    def mark_stepped(self) -> None:
        """A prepared optimizer has stepped; several of them make one step together."""
        if not self.stepped or self.current is OUTSIDE:
            self.number += 1
            self.samples += self.current.count
            self._until = time.perf_counter()
        self.stepped = True

    @property
    def seconds(self) -> float:
        """From the first micro-batch handed out to the last optimizer step."""
        return 0.0 if self._since is None else max(0.0, self._until - self._since)
