"""Checks the clock: whether it is kept in time by the network, and that it is not years wrong.

`gather` reads facts from this machine, and `judge` says what is wrong with them.
"""

from __future__ import annotations

import ctypes
import time
from datetime import UTC, datetime
from pathlib import Path

from lockstep.doctor.base import ERROR, OK, WARNING, Facts, Finding

TIME_ERROR = 5  # the clock's state if it is not synchronised, see adjtimex(2)
TIMEX_SIZE = 512  # bytes; struct timex is smaller
EARLIEST_TIME = datetime(2025, 1, 1, tzinfo=UTC).timestamp()


def gather(folder: Path) -> Facts:
    """Reads the time in seconds since 1970, and whether the kernel regards the clock as
    synchronised.

    `synchronised` is None if that is not known.
    """
    clock_state = _clock_state()
    synchronised = None if clock_state is None else clock_state != TIME_ERROR
    return {"time": time.time(), "synchronised": synchronised}


def _clock_state() -> int | None:
    """Returns the state of the clock, such as `TIME_ERROR`, or None if it cannot be read."""
    # adjtimex(2) changes the clock where its argument says so, and returns the clock's state. All
    # bytes of this argument are zero, so that it changes nothing.
    change_nothing = ctypes.create_string_buffer(TIMEX_SIZE)
    try:
        state: int = ctypes.CDLL(None).adjtimex(change_nothing)  # -1 if it has failed
    except AttributeError:  # only Linux has this function
        return None
    return None if state < 0 else state


def judge(facts: Facts) -> Finding:
    """Finds a clock that is wrong, or that is not synchronised with a time server (NTP)."""
    now = f"{datetime.fromtimestamp(facts['time'], UTC):%Y-%m-%d %H:%M:%S} UTC"
    do = "timedatectl set-ntp true, or start chrony, as root"
    if facts["time"] < EARLIEST_TIME:
        found = (
            f"{now}, which is years ago: certificates will fail, and times in logs will be wrong"
        )
        return Finding(ERROR, found, do)

    if facts["synchronised"] is False:
        found = (
            f"{now}, not kept right by the network: times in logs of several machines may not match"
        )
        return Finding(WARNING, found, do)

    if facts["synchronised"] is None:
        return Finding(OK, f"{now} (whether it is synchronised is not known)")

    return Finding(OK, now)
