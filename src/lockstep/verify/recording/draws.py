"""Random numbers: which a script draws for a step, and from which streams.

A *draw* is a call of torch that returns random numbers. Numpy's and Python's generators cannot be
watched call by call; their states are compared before and after instead. A *stream* is one such
generator.
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
    """The draws of this process, and those since it was last restarted."""

    def __init__(self) -> None:
        self.count = 0
        """Draws since the process began."""
        self.digests: set[str] = set()
        """Of each draw since `StepDraws.restart`, a digest of its numbers."""
        self._first_line = ""
        self._hash = hashlib.blake2b(digest_size=8)

    def begin(self, generator: Any) -> str:
        """Counts a draw that is about to be made, and returns its line.

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
        """Notes the numbers of a draw and marks their tensor."""
        if not isinstance(drawn, Tensor) or drawn.device.type == "meta":  # there are no values
            return
        numbers = digest(drawn)
        self._hash.update(numbers.encode())
        self.digests.add(numbers)
        mark(drawn, draw=(self.count, line, numbers))

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
        """Draws inside of the block are not part of `since_restart`."""
        line = self._first_line
        hash_before = self._hash.copy()
        try:
            yield
        finally:
            self._first_line = line
            self._hash = hash_before


def stream_digests() -> list[str]:
    """Returns a digest of the state of each stream, in the order of `STREAMS`.

    The GPU's comes last, and only if CUDA is in use.
    """
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

    Torch's stream is left out: its draws are seen one by one.

    Args:
        before: what `stream_digests` returned then.
    """
    moved = {}
    for stream, digest_before, digest_now in zip(STREAMS, before, stream_digests(), strict=False):
        if digest_now != digest_before and stream != "torch":
            moved[stream] = digest_before
    return moved
