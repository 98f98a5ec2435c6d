"""Defines what every check of `lockstep doctor` uses: facts about a machine, and findings.

*Facts* are what a check has read from the machine, as values that JSON can represent. A *finding*
is the check's verdict on its facts: a level, what was found, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lockstep.units import GIB, format_number

Facts = Mapping[str, Any]
OK = "ok"
WARNING = "warning"
ERROR = "error"
UNKNOWN = "not known"
"""The only key of facts that a check could not read. Its value says why."""


class Finding(NamedTuple):
    """The verdict of a check."""

    level: str
    """`OK`, `WARNING` or `ERROR`."""
    found: str
    do: str = ""


class Check(Protocol):
    """A check: a module of this package."""

    def gather(self, folder: Path) -> Facts:
        """Reads facts from this machine; `folder` is the folder for checkpoints."""

    def judge(self, facts: Facts) -> Finding:
        """Returns what is wrong, if anything."""


@runtime_checkable
class RepairingCheck(Check, Protocol):
    """A check that can repair something without root."""

    def fix(self, facts: Facts) -> list[str]:
        """Repairs what it can, and returns a line about each repair."""


def join_findings(summary: str, problems: Sequence[Finding]) -> Finding:
    """Joins several problems into one finding, which has the worst level among them.

    Without problems, the level is `OK`. A problem may have this level too, if it is only worth
    mentioning.

    Args:
        summary: text that comes first, whether there are problems or not; may be empty.
        problems: the problems.
    """
    levels = {problem.level for problem in problems}
    if ERROR in levels:
        level = ERROR
    elif WARNING in levels:
        level = WARNING
    else:
        level = OK

    texts = [summary, *(problem.found for problem in problems)]
    found = "; ".join(text for text in texts if text)

    # If several problems have the same remedy, it is mentioned once.
    remedies = dict.fromkeys(problem.do for problem in problems if problem.do)
    return Finding(level, found, "; ".join(remedies))


def gib(size: float) -> str:
    """Formats a number of bytes: `15.6 GiB`."""
    return f"{format_number(size / GIB)} GiB"
