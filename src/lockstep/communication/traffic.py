"""Counts what this rank sends to other ranks, and how long it waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable


class Traffic:
    """Bytes that this rank has sent, and seconds that it has waited, since the run began.

    Only communication that Lockstep itself makes is counted.

    Attributes:
        sent: bytes sent to other ranks through the backend, without the headers of packets.
        shared: bytes written to the memory that the ranks of a machine share.
        waited_s: seconds spent waiting for data that was sent through the backend.
        blocked_s: seconds spent waiting for other ranks in any way: in `waited_s`, in blocking
            collectives of the backend, and in shared memory.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Sets all counts to 0."""
        self.sent = 0
        self.shared = 0
        self.waited_s = 0.0
        self.blocked_s = 0.0

    def wait(self, work: Callable[[], object]) -> None:
        """Calls `work`, which waits for data of other ranks, and adds its time to both counts."""
        begin_s = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin_s
        self.waited_s += seconds
        self.blocked_s += seconds

    def block(self, work: Callable[[], object]) -> None:
        """Calls `work`, a blocking collective of the backend, and adds its time to `blocked_s`."""
        begin_s = time.perf_counter()
        work()
        self.blocked_s += time.perf_counter() - begin_s


traffic = Traffic()
"""The counts of this process."""


def all_reduce_bytes(nbytes: int, num_ranks: int) -> int:
    """Returns how many bytes each rank sends in an all-reduce of a tensor of `nbytes`.

    Gloo's ring divides the tensor into one chunk per rank. A rank sends all chunks but one twice:
    first its values, which are summed, and then the sum.
    """
    return 2 * nbytes * (num_ranks - 1) // num_ranks
