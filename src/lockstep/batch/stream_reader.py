"""One pass over an iterable: an iterator, how far it has come, and its random streams.

Samples of a pass are numbered from 0, in the order in which the iterable gives them. The random
streams from which the iterable itself draws (torch's, numpy's and Python's on the CPU) are seeded
once a pass from (seed, epoch), alike on all ranks, and kept apart from those of the training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.distributed.seeding import mix_seed

_PASS = 0x57A3  # stands for a sample's index when the streams of a whole pass are seeded


class _RandomStates(NamedTuple):
    """The states of torch's, numpy's and Python's random streams on the CPU."""

    torch_state: Tensor
    # numpy's generator is swapped as a whole, which is much quicker than to copy its state.
    numpy_generator: np.random.BitGenerator
    python_state: Any


class PassRandomState:
    """The random streams on the CPU as one pass over an iterable sees them.

    Args:
        seed: of the run.
        epoch: of the pass.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        value = mix_seed(seed, epoch, _PASS)
        self._states = _RandomStates(
            torch.Generator().manual_seed(value).get_state(),
            np.random.MT19937(value),
            random.Random(value).getstate(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Code inside draws from the streams of the pass, which continue where they were left."""
        self._swap_with_global_streams()
        try:
            yield
        finally:
            self._swap_with_global_streams()

    def _swap_with_global_streams(self) -> None:
        """Swaps the random states of the pass with the global ones. A second call swaps them back.

        For NumPy the generator itself is swapped, for torch and Python the states are.
        """
        global_states = _RandomStates(
            torch.get_rng_state(),
            np.random.get_bit_generator(),  # type: ignore[attr-defined]
            random.getstate(),
        )
        torch.set_rng_state(self._states.torch_state)
        np.random.set_bit_generator(self._states.numpy_generator)  # type: ignore[attr-defined]
        random.setstate(self._states.python_state)
        self._states = global_states


@dataclass
class StreamReader:
    """One pass over an iterable."""

    epoch: int
    next_number: int
    """The number of the sample that the iterator gives next."""
    stride: int
    """The difference between the numbers of neighbouring samples."""
    samples: Iterator[Any]
    enter_random_state: Callable[[], AbstractContextManager[None]]
    """Returns a context in which code draws from the random streams of this pass."""
    ended: bool = False
    """True when the iterator has nothing more."""

    def take(self, count: int) -> list[Any]:
        """Returns the next samples; fewer than `count` at the end of the iterable.

        They are taken with `next` alone, as torch's DataLoader does it. `itertools.islice` and a
        `for` loop call `iter` on the iterator first, and some iterators begin again when that is
        called.
        """
        samples: list[Any] = []
        while len(samples) < count and not self.ended:
            try:
                samples.append(next(self.samples))
            except StopIteration:
                self.ended = True
        self.next_number += self.stride * len(samples)
        return samples
