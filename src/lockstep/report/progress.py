"""The progress of one pass: a bar on rank 0's terminal, or now and then a line in a log.

The pass is the loop's own: `progress` hands the loader's items through and looks at the clock
after each global batch. Every rank must run it, because the means that it shows are those over all
ranks (`metrics`); only rank 0 prints.

The bar on a terminal: one row for each pass that runs, the inner ones below the outer.

Drawn by whoever calls `draw`: no thread, so nothing can be left behind or fall between two
collectives. While it is shown, rich passes what the script prints through the same console, so
that the lines appear above the bar.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from lockstep.data.loader import Loader as Prepared
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.topology import Topology
from lockstep.errors import UsageError
from lockstep.report.console import (
    Snapshot,
    bar_parts,
    encodable,
    launcher_columns,
    occupy,
    on_terminal,
    open_console,
    plain_line,
    say,
    summary_line,
)
from lockstep.report.metrics import RunningMeans

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text


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


class LauncherBar:
    """The bar where a launcher has the terminal: it keeps an unfinished line under the others.

    The carriage return comes last, so that what the script prints next takes the line.
    """

    interval = 0.1
    """Seconds between two drawings, at least."""

    def draw(self, at: Snapshot) -> None:
        """Shows the state."""
        console = open_console()
        console.print(_row(at, console), end="\r", soft_wrap=True)

    def close(self) -> None:
        """Takes it away: nothing but a blank is left of the line."""
        sys.stdout.write(" \r")
        sys.stdout.flush()


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
        counts=alone or world.collectives.contributes,
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
        self._view: Bar | LauncherBar | Lines
        if launcher_columns() is not None:
            self._view = LauncherBar()
        else:
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


_rows: list[Bar] = []
_live: Live | None = None


class Bar:
    """One row of the display; the first one drawn opens it and the last one closed ends it."""

    interval = 0.1
    """Seconds between two drawings, at least."""

    def __init__(self) -> None:
        self.at = Snapshot()

    def draw(self, at: Snapshot) -> None:
        """Shows the state."""
        self.at = at
        if self not in _rows:
            _rows.append(self)
        live = _live or _open()
        live.refresh()

    def close(self) -> None:
        """Takes the row away; a second call does nothing."""
        if self in _rows:
            _rows.remove(self)
            if not _rows:
                _close()
            elif _live is not None:
                _live.refresh()


def _open() -> Live:
    global _live
    from rich.live import Live

    console = open_console()
    _live = Live(
        console=console,
        auto_refresh=False,
        transient=True,
        # Where stderr goes to a file it must stay there: rich would move it to the terminal.
        redirect_stderr=sys.stderr.isatty(),
        get_renderable=_render,
    )
    _live.start()
    console.show_cursor(True)  # a run that is killed must not leave the terminal without one
    occupy(console)
    # A script that keeps the pass in a variable keeps it alive to the end, also when it raises.
    atexit.register(_close)
    return _live


def _close() -> None:
    global _live
    if _live is not None:
        live, _live = _live, None
        _rows.clear()
        atexit.unregister(_close)
        occupy(None)
        live.stop()


def _render() -> Group:
    from rich.console import Group

    console = open_console()
    return Group(*(_row(bar.at, console) for bar in _rows))


def _row(at: Snapshot, console: Console) -> Text:
    from rich.text import Text

    # One column is left free: some terminals wrap when the last one is written.
    description, part, width, after = bar_parts(at, console.width - 1)
    # Two signs, not one in two colours, so that it can be read without colour.
    full, rest = "━─" if console.encoding.startswith("utf") else "#-"
    row = Text(no_wrap=True, overflow="crop", end="")
    if description:
        row.append(encodable(f"{description}  ", console.encoding), "bold")
    if part is not None and width:
        done = int(part * width)
        row.append(full * done, "cyan").append(rest * (width - done), "dim").append("  ")
    return row.append(encodable(after, console.encoding))
