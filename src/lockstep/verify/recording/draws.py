"""Records which random numbers a script draws for a step, and from which generators.

A *draw* is a call of torch that returns random numbers; its *line* is the line of the script that
made the call. A *stream* is a random generator, such as numpy's global one. The generators of numpy
and Python cannot be observed call by call, so their states are compared before and after instead.
Digests stand for drawn numbers and for states.
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
    """Counts the draws of this process, and keeps digests of the recent ones."""

    def __init__(self) -> None:
        self.num_draws = 0
        """Number of draws since the process began."""
        self.digests: set[str] = set()
        """A digest of each draw for the current step, to find a draw in another run."""
        self._first_line = ""
        """Line of the first draw since `restart`; empty if there was none."""
        self._hash = hashlib.blake2b(digest_size=8)
        """Hash of the numbers of all draws since `restart`, in their order."""

    def begin(self, generator: Any) -> str:
        """Counts a draw that is about to be made. After the draw, call `finish`.

        Args:
            generator: the `generator` argument of the call.

        Returns:
            The line of the script that makes the call, to be passed to `finish`. If the call draws
            from a generator of the script, the text also says so.
        """
        line = user_line() or "somewhere"
        uses_own_generator = generator not in (None, torch.default_generator)
        if uses_own_generator:
            line += ", a torch.Generator of its own"

        self.num_draws += 1
        if not self._first_line:
            self._first_line = line

        return line

    def finish(self, drawn: Any, line: str) -> None:
        """Records the numbers of a draw, and marks their tensor so that its use can be followed.

        Args:
            drawn: return value of the call that has drawn the numbers.
            line: return value of `begin`, which was called before the draw.
        """
        has_values = isinstance(drawn, Tensor) and drawn.device.type != "meta"
        if not has_values:
            return

        digest_of_draw = digest(drawn)
        self._hash.update(digest_of_draw.encode())
        self.digests.add(digest_of_draw)

        number_of_draw = self.num_draws  # `begin` has counted this draw already
        mark(drawn, draw=(number_of_draw, line, digest_of_draw))

    def restart(self) -> None:
        """Clears what `since_restart` returns."""
        self._first_line = ""
        self._hash = hashlib.blake2b(digest_size=8)

    def since_restart(self) -> dict[str, str]:
        """Returns the draws since `restart`: {line of the first draw: digest of all numbers}."""
        if not self._first_line:
            return {}
        return {self._first_line: self._hash.hexdigest()}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Returns a context manager; draws inside its block do not appear in `since_restart`.

        They still count in `num_draws`, the number of all draws of the process.
        """
        # These are the two values that `since_restart` returns. They are put back after the block.
        first_line_before = self._first_line
        hash_before = self._hash.copy()
        try:
            yield
        finally:
            self._first_line = first_line_before
            self._hash = hash_before


def stream_digests() -> list[str]:
    """Returns a digest of the state of each random stream, in the order of `STREAMS`.

    The digest of the GPU's stream comes last. It is left out if CUDA is not in use.
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
        before: return value of `stream_digests` at the beginning.
    """
    moved = {}
    # The last stream, the GPU's, has no digest if CUDA is not in use now or was not in use then.
    for stream, digest_before, digest_now in zip(STREAMS, before, stream_digests(), strict=False):
        if digest_now != digest_before and stream != "torch":
            moved[stream] = digest_before
    return moved
