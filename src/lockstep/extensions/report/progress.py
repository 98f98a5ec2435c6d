"""The progress of one pass: a bar on rank 0's terminal, or now and then a line in a log.

The pass is the loop's own: `progress` hands the loader's items through and looks at the clock
after each global batch. Every rank must run it, because the means that it shows are those over all
ranks (`metrics`); only rank 0 prints.

The bar has one row for each pass that runs, the inner ones below the outer. It is drawn by the
loop's own thread, so nothing can be left behind or fall between two collectives. While it is shown,
rich passes what the script prints through the same console, so that the lines appear above it.
"""

from __future__ import annotations

import atexit
import itertools
import socket
import statistics
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lockstep.batch.loader import Loader
from lockstep.communication import routing
from lockstep.communication.compression import costs
from lockstep.communication.link import (
    Link,
    Network,
    Traffic,
    advice,
    run_delay_s,
    slow_machine,
    traffic,
)
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.process_group import Run
from lockstep.errors import UsageError
from lockstep.extensions.report.analysis import COMMUNICATE_WITHIN
from lockstep.extensions.report.console import (
    clock,
    duration,
    encodable,
    launcher_columns,
    number,
    on_terminal,
    open_console,
    print_line,
    rate,
    set_bar_console,
    thousands,
)
from lockstep.extensions.report.metrics import RunningMeans
from lockstep.step import Callback, Step
from lockstep.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text


_REDUCTIONS = 50
_MAX_BAR = 30
_MIN_BAR = 8
_GAP = "  "


def check_loader(loader: object) -> None:
    """Raises UsageError where it is no prepared loader."""
    if not isinstance(loader, Loader):
        raise UsageError(
            f"world.progress of a {type(loader).__name__}",
            "it is not a prepared loader",
            "iterate what world.prepare or world.loader returned for it",
        )


def check_shown(running: Sequence[RunningMeans], values: Iterable[str]) -> None:
    """Raises UsageError where no pass is running that would show the values of these names."""
    if not running:
        raise UsageError(
            f"world.log({', '.join(values)})",
            "no world.progress(loader) is being iterated, so nothing would show it",
            "iterate world.progress(loader) instead of the loader, or use world.print",
        )


def progress(
    loader: Loader,
    collectives: Collectives,
    running: list[RunningMeans],
    description: str = "",
    *,
    done: int = 0,
    callbacks: Sequence[Callback] = (),
) -> Generator[Any, None, None]:
    """Delivers the loader's items and shows how the pass goes.

    With gradients enabled the means over ranks are brought up to date as the pass runs. Without
    (an evaluation, where ranks may have different numbers of batches) they are reduced once, at
    the end of the pass.

    Args:
        loader: a prepared loader.
        collectives: of the run.
        running: the means of all passes that run; those of this one are at its end meanwhile.
        description: what stands in front, such as `epoch 3`.
        done: global batches of the epoch that were done before, when it is resumed.
        callbacks: told of new means.

    Raises:
        RanksDifferError: the ranks did not log the same names.
    """
    steps = loader.steps
    means = RunningMeans(collectives, reduce_every(steps) if torch.is_grad_enabled() else 0)
    display = None
    if collectives.topology.is_main:
        kind = Bar if on_terminal() else Display
        if launcher_columns() is not None:
            kind = LauncherBar
        display = kind(PassState(description, begun=done, done=done, total=steps))
    running.append(means)
    complete, known = False, means.values
    try:
        for item in loader:
            yield item
            current = loader.current
            means.samples += current.local
            if current.last:
                means.step()
                if means.values is not known:
                    known = means.values
                    for callback in callbacks:
                        callback.logged(description, known, complete=False)
                if display is not None:
                    display.step(current.count, means.values)
        means.finish()
        complete = True
        for callback in callbacks:
            callback.logged(description, means.values, complete=True)
    finally:
        running.remove(means)
        if display is not None:
            display.close(means if complete else None)


def reduce_every(steps: int | None) -> int:
    """Global batches between two reductions: about 50 in an epoch, and one in 50 at least."""
    return 10 if steps is None else max(1, min(50, steps // _REDUCTIONS))


class Display:
    """What rank 0 shows of a pass, and when: now and then a plain line, where there is no terminal.

    Args:
        at: the state of the pass, kept up to date here.
    """

    interval = 10.0
    """Seconds between two drawings, at least."""

    def __init__(self, at: PassState) -> None:
        self.at = at
        self._start = time.perf_counter()
        self._due = self._start + self.interval

    def draw(self) -> None:
        """Shows the state."""
        print_line(plain_line(self.at))

    def clear(self) -> None:
        """Takes away what is shown and must not stay."""

    def step(self, samples: int, means: Mapping[str, float]) -> None:
        """One global batch of so many samples is done."""
        self.at.done += 1
        self.at.samples += samples
        self.at.means = means
        now = time.perf_counter()
        if now >= self._due:
            self.at.seconds = now - self._start
            self.draw()
            self._due = time.perf_counter() + self.interval

    def close(self, exact: RunningMeans | None) -> None:
        """Replaces what is shown by one line that stays.

        Args:
            exact: the means of a pass that came to its end; None: it did not. What stopped it may
                have broken the device, so nothing is asked of it here.
        """
        at = self.at
        at.seconds = time.perf_counter() - self._start
        if exact is not None:
            at.samples, at.means = exact.total_samples, exact.values
        self.clear()
        # A pass kept in a variable is closed last of all, and a traceback must stay the end.
        if not sys.is_finalizing():
            print_line(summary_line(at, complete=exact is not None))


class LauncherBar(Display):
    """The bar where a launcher has the terminal: it keeps an unfinished line under the others.

    The carriage return comes last, so that what the script prints next takes the line.
    """

    interval = 0.1

    def draw(self) -> None:
        """Shows the state."""
        console = open_console()
        console.print(_row(self.at, console), end="\r", soft_wrap=True)

    def clear(self) -> None:
        """Nothing but a blank is left of the line."""
        sys.stdout.write(" \r")
        sys.stdout.flush()


_rows: list[Bar] = []
_live: Live | None = None


class Bar(Display):
    """A row of the terminal's display, which the first one drawn opens and the last one ends."""

    interval = 0.1

    def draw(self) -> None:
        """Shows the state."""
        if self not in _rows:
            _rows.append(self)
        (_live or _open()).refresh()

    def clear(self) -> None:
        """Takes the row away; a second call does nothing."""
        if self in _rows:
            _rows.remove(self)
            if not _rows:
                _close()
            elif _live is not None:
                _live.refresh()


def _open() -> Live:
    global _live
    from rich.console import Group
    from rich.live import Live

    console = open_console()
    _live = Live(
        console=console,
        auto_refresh=False,
        transient=True,
        # Where stderr goes to a file it must stay there: rich would move it to the terminal.
        redirect_stderr=sys.stderr.isatty(),
        get_renderable=lambda: Group(*(_row(bar.at, console) for bar in _rows)),
    )
    _live.start()
    console.show_cursor(True)  # a run that is killed must not leave the terminal without one
    set_bar_console(console)
    # A script that keeps the pass in a variable keeps it alive to the end, also when it raises.
    atexit.register(_close)
    return _live


def _close() -> None:
    global _live
    if _live is not None:
        live, _live = _live, None
        _rows.clear()
        atexit.unregister(_close)
        set_bar_console(None)
        live.stop()


def _row(at: PassState, console: Console) -> Text:
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


@dataclass(slots=True)
class PassState:
    """Where a pass stands."""

    description: str = ""
    begun: int = 0
    """Global batches that were done before the pass, when an epoch is resumed in its middle."""
    done: int = 0
    """Global batches done, those of `begun` among them."""
    total: int | None = None
    """Global batches of the epoch, where that is known."""
    samples: int = 0
    """Samples computed by all ranks since the pass began."""
    seconds: float = 0.0
    means: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float | None:
        """An estimate from the average so far, or None where there is nothing to go by."""
        if self.total is None or self.done <= self.begun:
            return None
        return self.seconds / (self.done - self.begun) * max(0, self.total - self.done)


def mean_words(means: Mapping[str, float]) -> list[str]:
    """`loss 0.0412`, one text for each name; `loss` first, the others in alphabetical order."""
    names = sorted(means, key=lambda name: (name != "loss", name))
    return [f"{name} {number(means[name])}" for name in names]


def _words(at: PassState, done: str) -> list[str]:
    """The state of a pass; `done` is how far it is, where its end is not known."""
    count = done if at.total is None else f"{at.done}/{at.total}"
    words = [count, *mean_words(at.means), rate(at.samples, at.seconds)]
    left = at.seconds_left
    return [*words, f"{clock(left)} left"] if left else words


def bar_parts(at: PassState, width: int) -> tuple[str, float | None, int, str]:
    """One row of at most `width` columns: description, part done, bar's width, what follows it.

    On a narrow terminal the bar becomes shorter and then what stands last is left out. A bar's
    width of 0 means no bar.
    """
    words = _words(at, str(at.done))
    room = width - len(at.description) - (len(_GAP) if at.description else 0)
    needed = _MIN_BAR + len(_GAP) if at.total else 0
    while len(words) > 1 and needed + len(_GAP.join(words)) > room:
        words.pop()
    after = _GAP.join(words)
    if not at.total:
        return at.description, None, 0, after
    bar = min(_MAX_BAR, room - len(after) - len(_GAP))
    return at.description, min(1.0, at.done / at.total), bar if bar >= _MIN_BAR else 0, after


def plain_line(at: PassState) -> str:
    """The state of a pass in one line, for a log."""
    words = _words(at, f"{at.done} global batches")
    return _GAP.join(filter(None, [at.description, *words]))


def summary_line(at: PassState, *, complete: bool) -> str:
    """What is left of a pass when it is over; says so when it was broken off."""
    words = [at.description]
    if not complete:
        of = "" if at.total is None else f" of {at.total}"
        words.append(f"stopped after {at.done}{of} global batches")
    words += mean_words(at.means)
    if at.samples:
        words += [rate(at.samples, at.seconds), duration(at.seconds)]
    return _GAP.join(word for word in words if word)


class NetworkAdvice(Callback):
    """Says once, after the first steps, what the network takes of a step and what would help, and
    whether one machine is slower than the others.

    Communication: one small exchange.
    """

    def __init__(self, run: Run, link: Link) -> None:
        self._run, self._link = run, link
        self._seen: list[tuple[float, float, float]] = []
        """After each step the time, and until then the seconds of waiting, and without a core."""

    def stepped(self, number: int) -> None:
        """Counts; the first steps make buckets and fill caches."""
        if len(self._seen) == _ADVICE_FROM + _ADVICE_STEPS:
            return
        self._seen.append((time.perf_counter(), traffic.waited_s, run_delay_s()))
        if len(self._seen) == _ADVICE_FROM + _ADVICE_STEPS:
            pairs = itertools.pairwise(self._seen[_ADVICE_FROM - 1 :])
            steps = [(b[0] - a[0], b[1] - a[1], b[2] - a[2]) for a, b in pairs]
            # Medians: the network may have been away for a while.
            seconds, waited, queued = map(statistics.median, zip(*steps, strict=True))
            topology = self._run.topology
            name = f"machine {topology.node_rank} ({socket.gethostname()})"
            of_all = self._run.collectives.exchange([name, waited])
            if topology.is_main:
                waits = {name: min(w for n, w in of_all if n == name) for name, _ in of_all}
                self._tell(seconds, min(waits.values()), queued)
                if slow := slow_machine(seconds, waits):
                    print_line(f"  network     {slow}")

    def _tell(self, seconds: float, waited: float, queued: float) -> None:
        run = self._run
        models = [made for prepared in run.prepared if (made := prepared()) is not None]
        trained = [p for m in models for p in m.parameters() if p.requires_grad]
        machines = self._link.machines
        seen = Network(
            compute_s=seconds - waited,
            waiting_s=waited,
            gradient_bytes=4 * sum(p.numel() for p in trained),
            local_size=run.topology.size // machines,
            hierarchical=routing.shared_memory() is not None,
            compressed=any(getattr(m, "compressed", None) is not None for m in models),
            run_delay_s=min(queued, seconds - waited),
        )
        compressions = costs(seen.gradient_bytes // 4 // seen.local_size, machines)
        print_line(f"  network     {advice(seen, self._link, compressions)}")


_ADVICE_FROM, _ADVICE_STEPS = 3, 10


def print_closing(step: Step, folders: Sequence[str], moved: Traffic, strategy: str) -> None:
    """Prints the last lines of a training; for rank 0 alone.

    Args:
        step: of the run.
        folders: of its checkpoints.
        moved: what rank 0 has sent.
        strategy: its name.
    """
    samples, seconds = step.samples, step.seconds
    if not step.number:
        return
    if samples:
        speed = f"{thousands(samples)} samples in {duration(seconds)}, {rate(samples, seconds)}"
        print_line(f"  trained     {speed}")
    if moved.sent and strategy not in COMMUNICATE_WITHIN:
        within = f", {format_bytes(moved.shared)} into shared memory" if moved.shared else ""
        print_line(f"  sent        {format_bytes(moved.sent)} by rank 0 to other ranks{within}")
    if folders:
        print_line(f"  checkpoint  {folders[-1]}")
