"""The texts of the catalogue, one file for each hundred of its codes."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One finding: what is seen, how it comes about, and what to write instead."""

    code: str
    """`LS` and three digits; the first is that of its group."""
    title: str
    """One line."""
    cause: str
    """What happens inside torch, and why nobody notices."""
    cure: str
    """What to do; lines of code are indented by four spaces."""


def entry(code: str, title: str, cause: str, cure: str) -> Entry:
    """An entry whose texts are written indented, as the code around them."""
    return Entry(code, title, _plain(cause), _plain(cure))


def _plain(text: str) -> str:
    return textwrap.dedent(text).strip()
