"""Random numbers: which a script draws for a step, and from which streams.

A *draw* is a call of torch that returns random numbers; its *line* is that of the script's call.
Numpy's and Python's generators cannot be watched call by call: their states are compared before and
after instead. A *stream* is one such generator. Digests stand for numbers and for states.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.user_code import user_line
from lockstep.verify.recording.marks import mark
from lockstep.verify.recording.tensor_values import digest

STREAMS = ("torch", "numpy's global stream", "the global stream of Python's random", "the GPU's")


class DrawLog:
    """The draws of this process: their number, and digests of those since `restart`."""

    def __init__(self) -> None:
        self.count = 0
        """Draws since the process began."""
        self.digests: set[str] = set()
        """Of each draw since `StepDraws.restart`, a digest of its numbers."""
        self._first_line = ""
        """The line of the first draw since `restart`; empty if there was none."""
        self._hash = hashlib.blake2b(digest_size=8)
        """Of the numbers of all draws since `restart`."""

    def begin(self, generator: Any) -> str:
        """Counts a draw that is about to be made, and returns its line for `finish`.

        Args:
            generator: what the script passed as `generator`.
        """
        line = user_line() or "somewhere"
        uses_own_generator = generator not in (None, torch.default_generator)
        if uses_own_generator:
            line += ", a torch.Generator of its own"

        self.count += 1

        if not self._first_line:
            self._first_line = line

        return line

    def finish(self, drawn: Any, line: str) -> None:
        """Notes the numbers of a draw and marks their tensor, so that their use can be followed.

        Args:
            drawn: what the call returned.
            line: as `begin` returned it.
        """
        if not isinstance(drawn, Tensor) or drawn.device.type == "meta":  # there are no values
            return
        digest_of_numbers = digest(drawn)
        self._hash.update(digest_of_numbers.encode())
        self.digests.add(digest_of_numbers)
        mark(drawn, draw=(self.count, line, digest_of_numbers))

    def restart(self) -> None:
        """Forgets the draws so far: `since_restart` begins with the next one."""
        self._first_line = ""
        self._hash = hashlib.blake2b(digest_size=8)

    def since_restart(self) -> dict[str, str]:
        """Returns the line of the first draw and a digest of all numbers; empty without draws."""
        if not self._first_line:
            return {}
        return {self._first_line: self._hash.hexdigest()}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves draws inside of the block out of `since_restart`; they are still counted."""
        first_line_before = self._first_line
        hash_before = self._hash.copy()
        try:
            yield
        finally:
            self._first_line = first_line_before
            self._hash = hash_before


def stream_digests() -> list[str]:
    """Returns a digest of the state of each stream, in the order of `STREAMS`.

    The GPU's comes last, and only if CUDA is in use.
    """
    # Numpy's state is the name of the generator, its array of numbers, and the position in it.
    kind, keys, position, *_ = np.random.get_state()
    states = [
        torch.get_rng_state().numpy().tobytes(),
        np.asarray(keys).tobytes() + f"{kind}{position}".encode(),
        repr(random.getstate()).encode(),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state().numpy().tobytes())

    return [hashlib.blake2b(state, digest_size=8).hexdigest() for state in states]


def moved_streams(before: Sequence[str]) -> dict[str, str]:
    """Returns the streams that were drawn from, each with the digest that it had before.

    Two ranks whose stream had the same digest before drew the same numbers. Torch's stream is left
    out: its draws are seen one by one.

    Args:
        before: what `stream_digests` returned at the beginning.
    """
    moved = {}
    # The last stream, the GPU's, has no digest if CUDA is not in use, or was not at the beginning.
    for stream, digest_before, digest_now in zip(STREAMS, before, stream_digests(), strict=False):
        if digest_now != digest_before and stream != "torch":
            moved[stream] = digest_before
    return moved
