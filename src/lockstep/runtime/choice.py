"""A decision and its reason; rank 0 prints them once, in one block."""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """Something that the run decided or was told, and why."""

    name: str
    value: str
    reason: str
