"""What goes from rank to rank: counted."""

from __future__ import annotations


class Traffic:
    """Bytes that this rank has moved since the run began, as far as Lockstep moves them itself."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Counts from 0."""
        self.sent = 0
        """By the backend, to other ranks; headers of packets are not counted."""
        self.shared = 0
        """Into memory that the ranks of a machine share."""


traffic = Traffic()


def all_reduce_bytes(nbytes: int, size: int) -> int:
    """What each of so many ranks sends for the all-reduce of a tensor: Gloo's, in a ring."""
    return 2 * nbytes * (size - 1) // size
