"""Counts what this rank sends to other ranks, and how long it waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable


class Traffic:
    """What this rank has moved since the run began. Only what Lockstep moves itself is counted."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Counts from 0 again."""
        self.sent = 0
        """Bytes sent by the backend to other ranks, without the headers of packets."""
        self.shared = 0
        """Bytes written into memory that the ranks of a machine share."""
        self.waited_s = 0.0
        """Seconds of waiting for what other ranks were to send by the backend."""
        self.blocked_s = 0.0
        """Seconds of waiting for other ranks in any way, those of the same machine included."""

    def wait(self, work: Callable[[], object]) -> None:
        """Calls `work`, which returns when other ranks have sent something by the backend."""
        begin_s = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin_s
        self.waited_s += seconds
        self.blocked_s += seconds

    def block(self, work: Callable[[], object]) -> None:
        """Calls `work`, a collective of the backend that returns when other ranks have come.

        Its time is counted in `blocked_s` alone.
        """
        begin_s = time.perf_counter()
        work()
        self.blocked_s += time.perf_counter() - begin_s


traffic = Traffic()
"""The counts of this process."""


def all_reduce_bytes(nbytes: int, num_ranks: int) -> int:
    """Returns the bytes that each rank sends for the all-reduce of a tensor of `nbytes`.

    Gloo's ring divides the tensor into one chunk per rank. A rank sends all chunks except one, once
    to be summed up and once as a sum.
    """
    return 2 * nbytes * (num_ranks - 1) // num_ranks
