"""Measures the network between machines: the time of a short message, and the bandwidth.

The machines form a ring. In a *shift*, each machine sends a number of bytes to the next machine
while it receives as many from the previous one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from lockstep.units import format_number

FIRST_MESSAGE_BYTES = 2**16
MAX_MESSAGE_BYTES = 2**24
MESSAGE_GROWTH = 4
# Messages grow until one takes this long: then the bandwidth dominates its time.
LONG_MESSAGE_S = 0.06
# A message that took longer is not repeated, so that the measurement takes well below a second.
MAX_REPEATED_MESSAGE_S = 0.2
NUM_PINGS = 15


class Link(NamedTuple):
    """The slowest connection between two machines of a run, sending and receiving at once."""

    latency_s: float
    """How long a short message takes from one machine to the next, in seconds."""
    bandwidth: float
    """Bytes per second."""
    machines: int = 2
    """Number of machines in the run."""

    def __str__(self) -> str:
        return f"{format_number(self.bandwidth * 8 / 1e6)} Mb/s"


def measure(
    shift: Callable[[int], float], agree: Callable[[float], float], machines: int = 2
) -> Link:
    """Measures the network with messages of growing size. All ranks call this.

    Args:
        shift: function that sends the given number of bytes to the next machine, receives as many
            from the previous one, and returns how long that took in seconds.
        agree: function that returns the largest of the values that all ranks pass to it.
        machines: number of machines in the run.
    """
    # The first messages open the connections.
    for _ in range(3):
        shift(1)

    pings_s = [shift(1) for _ in range(NUM_PINGS)]
    latency_s = agree(statistics.median(pings_s))
    previous_bytes = 0
    previous_s = latency_s

    nbytes = FIRST_MESSAGE_BYTES
    while True:
        seconds = _shortest_time(shift, agree, nbytes)
        is_last_message = seconds >= LONG_MESSAGE_S or nbytes >= MAX_MESSAGE_BYTES
        if is_last_message:
            # Compare the last two messages, because TCP takes a while to reach its full speed. The
            # minimum avoids a division by 0 if the longer message took no longer.
            additional_s = max(seconds - previous_s, 1e-9)
            bandwidth = (nbytes - previous_bytes) / additional_s
            return Link(latency_s, bandwidth, machines)

        previous_bytes = nbytes
        previous_s = seconds
        nbytes *= MESSAGE_GROWTH


def _shortest_time(
    shift: Callable[[int], float], agree: Callable[[float], float], nbytes: int
) -> float:
    """Sends a message up to three times, and returns the shortest time in seconds.

    Other work on the machine may disturb a try. A message that takes long is not sent again. All
    ranks agree on the time of each try, so they send equally many messages, and return the same.

    Args:
        shift: see `measure`.
        agree: see `measure`.
        nbytes: size of the message.
    """
    shortest_s = agree(shift(nbytes))
    for _ in range(2):
        if shortest_s >= MAX_REPEATED_MESSAGE_S:
            break
        shortest_s = min(shortest_s, agree(shift(nbytes)))
    return shortest_s
