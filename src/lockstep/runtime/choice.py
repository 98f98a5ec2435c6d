"""A decision and its reason; rank 0 prints them once, in one block."""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """Something that the run decided or was told, and why."""

    name: str
    value: str
    reason: str


def sized(size: int) -> str:
    """`42.7 MiB`, or `13.2 KiB` below a tenth of one."""
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 / 10 else f"{size / 2**10:.1f} KiB"
