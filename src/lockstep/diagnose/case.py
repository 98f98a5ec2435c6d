"""A divergence with all that may explain it, and what explains it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.diagnose.equivalence import Divergence, Tolerance
from lockstep.diagnose.updates import Update


@dataclass(frozen=True)
class Cause:
    """What explains a divergence best."""

    code: str
    seen: tuple[str, ...]
    """What it was read from, a sentence each."""
    names: tuple[str, ...] = ()
    """Of tensors or samples that it is about."""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A divergence with all that may explain it."""

    reference: Sequence[Update]
    other: Sequence[Update]
    divergence: Divergence
    tolerance: Tolerance

    @property
    def one(self) -> Update:
        """The reference's update in which they part."""
        return self.reference[self.divergence.update]

    @property
    def many(self) -> Update:
        """The other's."""
        return self.other[self.divergence.update]

    @property
    def size(self) -> int:
        """Processes of the other."""
        return len(self.other[0])

    @property
    def exact(self) -> float:
        """The largest remainder that counts as none."""
        return max(1e-7, 10 * self.tolerance.relative)


def shown(things: Sequence[object]) -> str:
    """The first of several things, in words."""
    words = [str(t[-1]) if isinstance(t, tuple) else str(t) for t in things[:6]]
    return ", ".join(words) + (f" and {len(things) - 6} more" if things[6:] else "")
