"""Reads and writes sizes and times: "5GB" to bytes, bytes to "42.7 MiB", times to seconds."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Any

from lockstep.errors import SettingError

KIB = 2**10
MIB = 2**20
GIB = 2**30

# A number, a prefix, an "i" for powers of 1024, and the letter B: "5GB", "500 mb", "2GiB", "1.5k".
SIZE_PATTERN = re.compile(r"(?P<number>\d+(?:\.\d*)?)\s*(?P<prefix>[kmgt]?)(?P<binary>i?)b?")
EXPONENT_OF_PREFIX = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def format_bytes(size: float) -> str:
    """Formats a number of bytes, e.g. "13.2 KiB", "42.7 MiB" or "1.38 GiB"."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    if size >= MIB / 10:
        return f"{size / MIB:.1f} MiB"
    return f"{size / KIB:.1f} KiB"


def format_number(value: float, digits: int = 3) -> str:
    """Formats a number with a few significant digits, and large ones in full: "0.0123", "1234".

    Python's format "g" would write 1234 with three digits as "1.23e+03".

    Args:
        value: the number.
        digits: how many significant digits a small number gets.
    """
    text = f"{value:.{digits}g}"
    has_exponent = "e+" in text  # also 999.7, which is rounded up to "1e+03"
    return f"{value:.0f}" if has_exponent else text


def parse_bytes(size: int | str) -> int | None:
    """Parses a size such as "5GB", "500MB" or "2GiB"; returns bytes, or None if it is not one."""
    match = SIZE_PATTERN.fullmatch(str(size).strip().lower())
    if match is None:
        return None
    base = 1024 if match["binary"] else 1000
    return int(float(match["number"]) * base ** EXPONENT_OF_PREFIX[match["prefix"]])


def parse_seconds(name: str, value: Any) -> float:
    """Converts a time that is given in seconds or as a timedelta to seconds.

    Args:
        name: name of the setting, for the error message.
        value: the time as the user gave it.

    Raises:
        SettingError: `value` is not a finite time above 0.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < math.inf:
        raise SettingError(
            f"{name}={value!r}", "it is not a time above 0", "give seconds, or a timedelta"
        )
    return float(seconds)
