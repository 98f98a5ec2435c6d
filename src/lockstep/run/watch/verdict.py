"""The verdict on a run whose ranks wait: what is wrong, which ranks it is about, what each does."""

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
    """What one rank does."""

    rank: int
    host: str
    does: str
    """A text that begins with a verb, such as `waits in barrier`."""
    line: Frame | None
    """The user's own line that it is at."""
    for_s: float | None = None
    """How long it has been doing that, if known."""


@dataclass(frozen=True)
class Verdict:
    """One verdict about a run."""

    kind: VerdictKind
    fatal: bool
    """True if nothing that the run itself can do will end this."""
    ranks: tuple[int, ...]
    """The ranks that are at fault, or that the others wait for."""
    headline: str
    rows: tuple[Row, ...] = ()
    mismatch: Mismatch | None = None
    advice: tuple[str, ...] = ()
    waited_s: float = 0.0
    """How long nothing has moved."""
    found_at: float = 0.0
    """Wall-clock time at which the run was found to be unable to go on."""
