"""What rank 0 prints: plain lines and the block of choices, above a running bar if there is one.

Nothing here asks for the rank: the caller is rank 0. `rich` is imported where it is needed, so
that importing lockstep does not pay for it.

The words and numbers of a pass as plain text; nothing here prints.

The last lines of a run: how fast it was, where things are, what to try next.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.distributed.topology import Topology
from lockstep.settings import Choice
from lockstep.step import Step

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


_INDENT = 2
_MIN_NAME, _MAX_VALUE, _MIN_REASON = 10, 24, 24

_with_bar: Console | None = None


def open_console() -> Console:
    """The console of the running bar, or a new one on stdout as it is now."""
    from rich.console import Console

    columns = launcher_columns()
    return _with_bar or Console(
        markup=False,
        emoji=False,
        highlight=False,
        width=columns,
        force_terminal=None if columns is None else True,
    )


def launcher_columns() -> int | None:
    """How wide a line may be on the terminal of the launcher, which reads stdout through a pipe.

    None: stdout is a terminal itself, or goes elsewhere.
    """
    columns = os.environ.get("LOCKSTEP_TERMINAL_COLUMNS", "")
    piped = not sys.stdout.isatty() and sys.stdout is sys.__stdout__
    return int(columns) if piped and columns.isdigit() else None


def on_terminal() -> bool:
    """Whether stdout can be drawn on; a pipe cannot, whatever is set to force colours on it."""
    return sys.stdout.isatty() and open_console().is_interactive


def occupy(console: Console | None) -> None:
    """A bar runs on `console` from now on, so all lines must go through it; None: no longer."""
    global _with_bar
    _with_bar = console


def say(text: str = "") -> None:
    """Prints lines as they are, above the running bar if there is one; for rank 0 alone."""
    if _with_bar is None:
        sys.stdout.write(encodable(text, sys.stdout.encoding) + "\n")
        sys.stdout.flush()
    else:
        from rich.text import Text

        _with_bar.print(Text.from_ansi(encodable(text, _with_bar.encoding)), soft_wrap=True)


def encodable(text: str, encoding: str | None) -> str:
    """The text with `?` for what a stream of this encoding cannot print: no run ends over a dot."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def title_of(topology: Topology, version: str) -> str:
    """Stands above the choices of a run."""
    size, hosts = topology.size, topology.size // topology.local_size
    several = "es" * (size > 1), "s" * (hosts > 1)
    return f"lockstep {version} · {size} process{several[0]} on {hosts} host{several[1]}"


def print_choices(title: str, choices: Sequence[Choice]) -> None:
    """Prints the title and one aligned line a choice; for rank 0 alone.

    On a terminal long reasons are wrapped between words; on anything else a choice is one line, so
    that a log can be searched.
    """
    if not _may_be_styled():
        for parts in choice_rows(title, choices, None):
            say("".join(parts))
        return
    console = open_console()
    width = launcher_columns() or (console.width if on_terminal() else None)
    for parts in choice_rows(title, choices, width):
        text = _styled(*(encodable(part, console.encoding) for part in parts))
        console.print(text, soft_wrap=True)


def _may_be_styled() -> bool:
    """Whether `rich` should decide; a pipe that nobody forces to be more needs none of it."""
    forced = any(os.environ.get(name) for name in ("FORCE_COLOR", "TTY_COMPATIBLE"))
    terminal = sys.stdout.isatty() or launcher_columns() is not None
    return terminal or forced or "IPython" in sys.modules or _with_bar is not None


def choice_rows(
    title: str, choices: Sequence[Choice], width: int | None
) -> list[tuple[str, str, str]]:
    """The block as rows of name, value and reason, each padded to stand where it belongs.

    Args:
        title: the line above the block.
        choices: in the order in which they are shown.
        width: columns to stay within, where words are short enough; None: any.
    """
    rows = [("", line, "") for line in _wrap(title, width)]
    name_width = max([_MIN_NAME, *(len(c.name) for c in choices)]) + 2
    fitting = [len(c.value) for c in choices if len(c.value) <= _MAX_VALUE]
    value_width = max([0, *fitting]) + 2
    indent = _INDENT + name_width
    beside = indent + value_width
    for choice in choices:
        name = " " * _INDENT + choice.name.ljust(name_width)
        fits = len(choice.value) + 2 <= value_width
        if fits and (width is None or width - beside >= _MIN_REASON):
            reasons = _wrap(choice.reason, None if width is None else width - beside)
            value = choice.value.ljust(value_width) if choice.reason else choice.value
            rows.append((name, value, reasons[0]))
            rows += [(" " * beside, "", line) for line in reasons[1:]]
        elif width is None or indent + len(choice.value) + 2 + len(choice.reason) <= width:
            rows.append((name, choice.value, f"  {choice.reason}" if choice.reason else ""))
        else:
            values = _wrap(choice.value, width - indent)
            rows.append((name, values[0], ""))
            rows += [(" " * indent, line, "") for line in values[1:]]
            if choice.reason:
                lines = _wrap(choice.reason, width - indent - 2)
                rows += [(" " * (indent + 2), "", line) for line in lines]
    return rows


def _wrap(text: str, width: int | None) -> list[str]:
    if width is None:
        return [text]
    lines = textwrap.wrap(text, max(width, 1), break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def _styled(name: str, value: str, reason: str) -> Text:
    from rich.text import Text

    return Text.assemble((name, "dim"), (value, "bold"), reason)


_MAX_BAR = 30
_MIN_BAR = 8
_GAP = "  "


@dataclass(frozen=True, kw_only=True)
class Snapshot:
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


def thousands(number: float) -> str:
    """`5 432`; two significant digits below ten."""
    return f"{number:.2g}" if 0 < number < 9.95 else f"{number:,.0f}".replace(",", " ")


def rate(samples: int, seconds: float) -> str:
    """`5 432 samples/s`."""
    return f"{thousands(samples / seconds if seconds > 0 else 0.0)} samples/s"


def clock(seconds: float) -> str:
    """`0:07`, `2:05`, `1:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """`1.9 s` below a minute, else as `clock`."""
    return f"{seconds:.1f} s" if seconds < 59.95 else clock(seconds)


def number(value: float) -> str:
    """Four significant digits: `0.04120`, `12.35`, `1.200e-05`."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        before = math.floor(math.log10(abs(value))) + 1 if value else 1
        return f"{value:.{max(0, 4 - before)}f}"
    return f"{value:.3e}"


def mean_words(means: Mapping[str, float]) -> list[str]:
    """`loss 0.0412`, one text for each name; `loss` first, the others in alphabetical order."""
    names = sorted(means, key=lambda name: (name != "loss", name))
    return [f"{name} {number(means[name])}" for name in names]


def bar_parts(at: Snapshot, width: int) -> tuple[str, float | None, int, str]:
    """One row of at most `width` columns: description, part done, bar's width, what follows it.

    On a narrow terminal the bar becomes shorter and then what stands last is left out. A bar's
    width of 0 means no bar.
    """
    count = str(at.done) if at.total is None else f"{at.done}/{at.total}"
    left = at.seconds_left
    words = [count, *mean_words(at.means), rate(at.samples, at.seconds)]
    if left is not None:
        words.append(f"{clock(left)} left")
    room = width - len(at.description) - (len(_GAP) if at.description else 0)
    needed = _MIN_BAR + len(_GAP) if at.total else 0
    while len(words) > 1 and needed + len(_GAP.join(words)) > room:
        words.pop()
    after = _GAP.join(words)
    if not at.total:
        return at.description, None, 0, after
    bar = min(_MAX_BAR, room - len(after) - len(_GAP))
    return at.description, min(1.0, at.done / at.total), bar if bar >= _MIN_BAR else 0, after


def plain_line(at: Snapshot) -> str:
    """The state of a pass in one line, for a log."""
    count = f"{at.done} global batches" if at.total is None else f"{at.done}/{at.total}"
    left = at.seconds_left
    words = [at.description, count, *mean_words(at.means), rate(at.samples, at.seconds)]
    return _GAP.join(word for word in [*words, f"{clock(left)} left" if left else ""] if word)


def summary_line(at: Snapshot, *, complete: bool) -> str:
    """What is left of a pass when it is over; says so when it was broken off."""
    words = [at.description]
    if not complete:
        of = "" if at.total is None else f" of {at.total}"
        words.append(f"stopped after {at.done}{of} global batches")
    words += mean_words(at.means)
    if at.samples:
        words += [rate(at.samples, at.seconds), duration(at.seconds)]
    return _GAP.join(word for word in words if word)


_NAME_WIDTH = 12


def say_closing(step: Step, folders: Sequence[str]) -> None:
    """Prints the lines of a training; for rank 0 alone.

    Args:
        step: of the run.
        folders: of its checkpoints.
    """
    if step.number:
        folder = folders[-1] if folders else None
        lines = closing_lines(checkpoint=folder, samples=step.samples, seconds=step.seconds)
        for line in lines:
            say(line)


def closing_lines(
    *,
    checkpoint: str | Path | None = None,
    samples: int = 0,
    seconds: float = 0.0,
    try_next: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """The lines, for `console.say`; what is not given is left out.

    Args:
        checkpoint: the folder of the last checkpoint.
        samples: computed by all ranks in the whole run.
        seconds: it took.
        try_next: what one could do, and the command that does it.
    """
    rows: list[tuple[str, str]] = []
    if samples:
        speed = f"{thousands(samples)} samples in {duration(seconds)}, {rate(samples, seconds)}"
        rows.append(("trained", speed))
    if checkpoint is not None:
        rows.append(("checkpoint", str(checkpoint)))
    width = max((len(what) for what, _ in try_next), default=0)
    for place, (what, command) in enumerate(try_next):
        rows.append(("" if place else "try next", f"{what.ljust(width)}  {command}"))
    return [f"  {name.ljust(_NAME_WIDTH)}{text}" for name, text in rows]
