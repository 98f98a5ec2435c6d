"""Defines the verdict on a run whose ranks wait: what is wrong, and what each rank does.

A verdict has a *kind*, such as "deadlock", the ranks at fault, a headline, advice, and a *row* for
each rank that says what the rank does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.run.watch.call_table import Mismatch
from lockstep.run.watch.stacks import Frame

VerdictKind = Literal[
    "deadlock",  # the ranks wait for each other, and nothing can end that
    "stopped",  # the others wait for a rank that was stopped (SIGSTOP, a debugger)
    "left",  # the others wait for a rank that has ended with exit code 0
    "lost",  # the others wait for a rank that has died
    "working",  # the others wait for a rank that still works, or has a thread that may
    "blocked",  # the others wait for a rank that waits for a lock, a file or a person
    "loading",  # the others wait for a rank that waits for data
    "gil",  # the others wait for a rank whose interpreter is blocked
    "unknown",  # the others wait for a rank that cannot be seen
    "transport",  # all ranks are in the same collective, and nothing moves
    "straggler",  # one rank is later than the others, step after step
]


@dataclass(frozen=True)
class Row:
    """What one rank does, for a verdict."""

    rank: int
    host: str
    does: str
    """A text that begins with a verb, such as `waits in barrier`."""
    line: Frame | None
    """The line of the user's code that the rank is at."""
    for_s: float | None = None
    """How long the rank has been doing this, if known."""
    handles: str = ""
    """The exception that the rank handles: `ValueError: no data, train.py:12: load()`."""

    @property
    def content(self) -> tuple[str, Frame | None, str]:
        """What the row says about its rank. Rows of equal content are shown as one entry."""
        return self.does, self.line, self.handles


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run whose ranks wait."""

    kind: VerdictKind
    fatal: bool
    """True if the run cannot recover by itself."""
    ranks: tuple[int, ...]
    """The ranks that are at fault, or that the others wait for."""
    headline: str
    rows: tuple[Row, ...] = ()
    mismatch: Mismatch | None = None
    advice: tuple[str, ...] = ()
    key: str = ""
    """Equal if another attempt hangs because of the same exception in the same step; see
    `repeated_failure`."""
    waited_s: float = 0.0
    """The seconds for which the run has made no progress."""
    found_at: float = 0.0
    """The wall-clock time at which it was found that the run cannot go on."""
