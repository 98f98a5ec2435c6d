"""The state of a pass over a loader, and how it is written in one line of text.

`PassState` says how far a pass is. A line has a description ("epoch 3"), how many global batches
are done ("50/100"), the means that the script logged ("loss 0.0412"), the throughput and the time
that is left.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.columns import width_of
from lockstep.extensions.report.console import clock, duration, number, rate
from lockstep.language import translate

# Columns of a terminal.
MAX_BAR_WIDTH = 30
MIN_BAR_WIDTH = 8
GAP = "  "


@dataclass(slots=True)
class PassState:
    """How far a pass is."""

    description: str = ""
    begun: int = 0
    """Global batches of the epoch that were done before this pass, when an epoch is resumed."""
    done: int = 0
    """Global batches of the epoch that are done, including `begun`."""
    total: int | None = None
    """Global batches of the whole epoch; None if that is not known."""
    samples: int = 0
    """Samples that all ranks computed since the pass began."""
    seconds: float = 0.0
    """Seconds since the pass began."""
    means: Mapping[str, float] = field(default_factory=dict)
    """The means over all ranks of what the script logged, by name."""

    @property
    def seconds_left(self) -> float | None:
        """The estimated time to the end of the pass, or None if it cannot be estimated yet."""
        done_in_this_pass = self.done - self.begun
        if self.total is None or done_in_this_pass <= 0:
            return None
        remaining = max(0, self.total - self.done)
        return self.seconds / done_in_this_pass * remaining


@dataclass(frozen=True, slots=True)
class BarLayout:
    """A line with a progress bar: the description, then the bar, then a text."""

    description: str
    fraction: float | None
    """How much of the epoch is done, from 0 to 1; None if that is not known."""
    bar_width: int
    """Columns of the bar; 0 if there is no room for one."""
    text: str


@functools.cache
def _translated(template: str) -> str:
    """Returns a template in the language of this process. It is kept, since bars are drawn often.

    A template is a message of the catalogue as any other: its fields are its values.
    """
    return translate(template)


def mean_words(means: Mapping[str, float]) -> list[str]:
    """Returns `loss 0.0412` for each mean: the loss first, the others in alphabetical order."""
    names = sorted(means)
    if "loss" in means:
        names.remove("loss")
        names.insert(0, "loss")
    return [f"{name} {number(means[name])}" for name in names]


def _state_words(state: PassState, done_without_total: str) -> list[str]:
    """Returns the parts of a line about a pass that is running: `50/100`, the means, the rate, ...

    Args:
        state: the state of the pass.
        done_without_total: what to write instead of `50/100` if the total is not known.
    """
    if state.total is None:
        words = [done_without_total]
    else:
        words = [f"{state.done}/{state.total}"]
    words += mean_words(state.means)
    words.append(rate(state.samples, state.seconds))
    seconds_left = state.seconds_left
    if seconds_left:  # neither None nor 0
        words.append(_translated("{time} left").format(time=clock(seconds_left)))
    return words


def bar_layout(state: PassState, width: int) -> BarLayout:
    """Lays out a line with a bar in at most `width` columns.

    The text consists of parts, such as `50/100`, `loss 0.0412`, `5 432 samples/s` and `2:05 left`.
    On a narrow terminal the bar becomes shorter first; then the last parts of the text are left
    out, except for the first one, the number of global batches.
    """
    # Columns for the bar and the text.
    available = width
    if state.description:
        available -= width_of(state.description) + len(GAP)

    # Without a total it is not known how much of a bar to fill, so there is none. An empty loader
    # with a total of 0 has none either.
    total = state.total or 0
    has_bar = total > 0
    needed_for_bar = MIN_BAR_WIDTH + len(GAP) if has_bar else 0

    # Leave out parts of the text from its end until the shortest bar has room. Without a total, the
    # first part is `50` instead of `50/100`.
    parts = _state_words(state, done_without_total=str(state.done))
    while len(parts) > 1 and needed_for_bar + width_of(GAP.join(parts)) > available:
        parts.pop()
    text = GAP.join(parts)

    if not has_bar:
        return BarLayout(state.description, fraction=None, bar_width=0, text=text)

    fraction = min(1.0, state.done / total)
    bar_width = min(MAX_BAR_WIDTH, available - width_of(text) - len(GAP))
    if bar_width < MIN_BAR_WIDTH:  # even the first part alone leaves no room for it
        bar_width = 0
    return BarLayout(state.description, fraction, bar_width, text)


def plain_line(state: PassState) -> str:
    """Returns the line of a running pass for a log, without a bar."""
    words = _state_words(state, _translated("{done} global batches").format(done=state.done))
    if state.description:
        words.insert(0, state.description)
    return GAP.join(words)


def summary_line(state: PassState, *, is_complete: bool) -> str:
    """Returns the line that stays when a pass is over.

    Args:
        state: the state at the end of the pass.
        is_complete: False if the training loop left the pass before its end.
    """
    words = []
    if state.description:
        words.append(state.description)

    if not is_complete:
        if state.total is None:
            phrase = _translated("stopped after {done} global batches")
        else:
            phrase = _translated("stopped after {done} of {total} global batches")
        words.append(phrase.format(done=state.done, total=state.total))

    words += mean_words(state.means)
    if state.samples:  # 0 if no global batch was done
        words.append(rate(state.samples, state.seconds))
        words.append(duration(state.seconds))
    return GAP.join(words)
