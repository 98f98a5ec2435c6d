"""The words and numbers of a pass as plain text; nothing here prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

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
