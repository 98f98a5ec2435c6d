"""The progress of one pass: a bar on rank 0's terminal, or now and then a line in a log.

The pass is the loop's own: `progress` hands the loader's items through and looks at the clock
after each global batch. Every rank must run it, because the means that it shows are those over all
ranks (`metrics`); only rank 0 prints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Protocol, TypeVar

import torch

from lockstep.data.loader import Loader as Prepared
from lockstep.errors import UsageError
from lockstep.report.bar import Bar
from lockstep.report.console import on_terminal, say
from lockstep.report.metrics import RunningMeans
from lockstep.report.text import Snapshot, plain_line, summary_line
from lockstep.runtime.collectives import Collectives
from lockstep.topology import Topology

Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)

_REDUCTIONS = 50


class MicroBatch(Protocol):
    """What the loader says of the micro-batch it has handed out last."""

    @property
    def count(self) -> int:
        """Samples of the whole global batch."""

    @property
    def local(self) -> int:
        """This rank's samples of this micro-batch."""

    @property
    def last(self) -> bool:
        """Whether it closes the global batch."""


class Loader(Protocol[Item_co]):
    """What is needed of a loader."""

    def __iter__(self) -> Iterator[Item_co]:
        """One pass."""

    @property
    def steps(self) -> int | None:
        """Global batches of a whole epoch, where that is known."""

    @property
    def current(self) -> MicroBatch:
        """The micro-batch that was handed out last."""


class World(Protocol):
    """What is needed of the world."""

    means: RunningMeans
    """Where `world.log` adds: those of the innermost pass that runs."""

    @property
    def topology(self) -> Topology:
        """This process's place."""

    @property
    def device(self) -> torch.device:
        """Where the means are kept."""

    @property
    def collectives(self) -> Collectives:
        """Tells whether this rank's values count."""


class Lines:
    """Stands in for the bar where there is no terminal: now and then a plain line."""

    interval = 10.0
    """Seconds between two lines, at least."""

    def draw(self, at: Snapshot) -> None:
        """Prints the state."""
        say(plain_line(at))

    def close(self) -> None:
        """Nothing stays on the screen."""


def check_loader(loader: object) -> None:
    """Raises UsageError where it is no prepared loader."""
    if not isinstance(loader, Prepared):
        raise UsageError(
            f"world.progress of a {type(loader).__name__}",
            "it is not a prepared loader",
            "iterate what world.prepare or world.loader returned for it",
        )


def check_shown(shown: bool, values: Iterable[str]) -> None:
    """Raises UsageError where what is logged would be shown by nothing.

    Args:
        shown: a pass is running that shows it.
        values: the names of what is logged.
    """
    if not shown:
        raise UsageError(
            f"world.log({', '.join(values)})",
            "no world.progress(loader) is being iterated, so nothing would show it",
            "iterate world.progress(loader) instead of the loader, or use world.print",
        )


def progress(
    loader: Loader[Item],
    world: World,
    description: str = "",
    *,
    done: int = 0,
    every: int | None = None,
    alone: bool = False,
) -> Generator[Item, None, None]:
    """Hands out the loader's items and shows how the pass goes.

    With gradients enabled the means over ranks are brought up to date as the pass runs. Without
    (an evaluation, where ranks may have different numbers of batches) they are reduced once, at
    the end of the pass.

    Args:
        loader: a prepared loader.
        world: its `means` are replaced while the pass runs, and put back after it.
        description: what stands in front, such as `epoch 3`.
        done: global batches of the epoch that were done before, when it is resumed.
        every: global batches between two reductions of the means; None: about 50 in a pass, and
            at least one in 50 global batches. The same on all ranks.
        alone: no other rank runs this pass, so nothing is reduced.

    Raises:
        RanksDifferError: the ranks did not log the same names.
    """
    topology = Topology() if alone else world.topology
    if every is None:
        every = reduce_every(loader.steps)
    means = RunningMeans(
        topology,
        world.device,
        every if torch.is_grad_enabled() else 0,
        counts=alone or world.collectives.counts,
    )
    screen = _Screen(description, done, loader.steps, means) if world.topology.is_main else None
    outer, world.means = world.means, means
    try:
        for item in loader:
            yield item
            current = loader.current
            means.samples += current.local
            if current.last:
                means.step()
                if screen is not None:
                    screen.step(current.count)
        means.finish()
        if screen is not None:
            screen.complete()
    finally:
        if world.means is means:
            world.means = outer
        if screen is not None:
            screen.close()


def reduce_every(steps: int | None) -> int:
    """Global batches between two reductions: about 50 in an epoch, and one in 50 at least."""
    return 10 if steps is None else max(1, min(50, steps // _REDUCTIONS))


class _Screen:
    """What rank 0 shows of a pass, and when."""

    def __init__(
        self, description: str, begun: int, total: int | None, means: RunningMeans
    ) -> None:
        self._description = description
        self._begun = self._done = begun
        self._total = total
        self._means = means
        self._samples = 0
        self._view = Bar() if on_terminal() else Lines()
        self._start = time.perf_counter()
        self._due = self._start + self._view.interval
        self._complete = False

    def step(self, samples: int) -> None:
        """One global batch of so many samples is done."""
        self._done += 1
        self._samples += samples
        now = time.perf_counter()
        if now >= self._due:
            self._view.draw(self._at(now))
            self._due = time.perf_counter() + self._view.interval

    def complete(self) -> None:
        """The pass ran to its end and its means are exact."""
        self._complete = True
        self._samples = self._means.latest.samples
        if self._total is not None:
            self._done = self._total

    def close(self) -> None:
        """Replaces the bar by one line that stays; says how far it came if not to the end.

        What stopped the pass may have broken the device, so nothing is asked of it here.
        """
        at = self._at(time.perf_counter())
        self._view.close()
        # A pass kept in a variable is closed last of all, and a traceback must stay the end.
        if not sys.is_finalizing():
            say(summary_line(at, complete=self._complete))

    def _at(self, now: float) -> Snapshot:
        return Snapshot(
            description=self._description,
            begun=self._begun,
            done=self._done,
            total=self._total,
            samples=self._samples,
            seconds=now - self._start,
            means=self._means.latest.values,
        )
