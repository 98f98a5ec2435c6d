"""What a check gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Facts = Mapping[str, Any]
OK, WARNING, ERROR = "ok", "warning", "error"
UNKNOWN = "not known"
"""In the place of facts: why there are none."""


class Finding(NamedTuple):
    """What a check says."""

    level: str
    """`ok`, `warning` or `error`."""
    found: str
    do: str = ""


def verdict(summary: str, problems: Sequence[Finding]) -> Finding:
    """One finding of several problems, after what is the case anyway (empty: nothing)."""
    levels = {problem.level for problem in problems}
    level = ERROR if ERROR in levels else WARNING if WARNING in levels else OK
    found = "; ".join(filter(None, [summary, *(problem.found for problem in problems)]))
    return Finding(level, found, "; ".join(dict.fromkeys(p.do for p in problems if p.do)))


def gib(size: float) -> str:
    """`15.6 GiB`."""
    return f"{size / 2**30:.3g} GiB"
