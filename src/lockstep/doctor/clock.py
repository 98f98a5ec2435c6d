"""The clock: is it kept right by the network, and not years away."""

from __future__ import annotations

import ctypes
import time
from datetime import UTC, datetime
from pathlib import Path

from lockstep.doctor.base import ERROR, WARNING, Facts, Finding

_UNSYNCHRONISED = 5
"""TIME_ERROR of adjtimex(2)."""
_EARLIEST = datetime(2025, 1, 1, tzinfo=UTC).timestamp()


def gather(folder: Path) -> Facts:
    """`time`, and whether the kernel calls the clock synchronised; None: not known."""
    buffer = ctypes.create_string_buffer(512)  # struct timex, all zero: nothing is changed
    try:
        state = ctypes.CDLL(None).adjtimex(buffer)
    except AttributeError:  # of Linux alone
        state = -1
    return {"time": time.time(), "synchronised": None if state < 0 else state != _UNSYNCHRONISED}


def judge(facts: Facts) -> Finding:
    """A clock that stands wrong, or may."""
    now = f"{datetime.fromtimestamp(facts['time'], UTC):%Y-%m-%d %H:%M:%S} UTC"
    do = "timedatectl set-ntp true, or start chrony, as root"
    if facts["time"] < _EARLIEST:
        return Finding(ERROR, f"{now}, which is past: certificates and logs will not fit", do)
    if facts["synchronised"] is False:
        found = f"{now}, not kept right by the network: logs of several machines may not fit"
        return Finding(WARNING, found, do)
    return Finding("ok", now if facts["synchronised"] else f"{now} (who keeps it is not known)")
