"""Measures the network between machines: the time of a short message, and the bandwidth.

The machines form a ring: in a *shift* each sends as many bytes to the next one as it receives from
the one before. All of them send at the same time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

FIRST_MESSAGE_BYTES = 2**16
MAX_MESSAGE_BYTES = 2**24
MESSAGE_GROWTH = 4
# Messages grow until one takes so long that its time tells the bandwidth.
LONG_MESSAGE_S = 0.06
# A message that took longer is not repeated, so that measuring stays well below a second.
MAX_REPEATED_MESSAGE_S = 0.2
NUM_PINGS = 15


class Link(NamedTuple):
    """The slowest network between two machines of a run; each sends and receives at a time."""

    latency_s: float
    """Seconds of a short message from one machine to the next."""
    bandwidth: float
    """Bytes per second."""
    machines: int = 2
    """Number of machines of the run."""

    def __str__(self) -> str:
        megabits = self.bandwidth * 8 / 1e6
        return f"{megabits:.0f} Mb/s" if megabits >= 100 else f"{megabits:.3g} Mb/s"


def measure(
    shift: Callable[[int], float], agree: Callable[[float], float], machines: int = 2
) -> Link:
    """Sends messages round all machines until one takes long enough to tell the bandwidth.

    Args:
        shift: sends that many bytes to the next machine, receives as many from the one before, and
            returns the seconds that it took.
        agree: returns the largest of all ranks' values.
        machines: number of machines.
    """
    for _ in range(3):
        shift(1)  # opens the connections
    pings_s = [shift(1) for _ in range(NUM_PINGS)]
    latency_s = agree(statistics.median(pings_s))
    previous_bytes = 0
    previous_s = latency_s
    nbytes = FIRST_MESSAGE_BYTES
    while True:
        # With the same time on all ranks, all of them go on in the same way.
        seconds = agree(shift(nbytes))
        # The shortest of three tries, as other work on the machine may have disturbed one.
        for _ in range(2):
            if seconds < MAX_REPEATED_MESSAGE_S:
                seconds = min(seconds, agree(shift(nbytes)))
        if seconds >= LONG_MESSAGE_S or nbytes >= MAX_MESSAGE_BYTES:
            # The difference of two messages counts, as TCP takes a while to fill a link. It is not
            # 0 even if the longer message took no longer.
            additional_s = max(seconds - previous_s, 1e-9)
            bandwidth = (nbytes - previous_bytes) / additional_s
            return Link(latency_s, bandwidth, machines)
        previous_bytes = nbytes
        previous_s = seconds
        nbytes *= MESSAGE_GROWTH
