"""Random streams of a reader's own, which the training does not touch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lockstep.runtime.seeding import mix

_numpy: Any = np.random  # whose annotations leave out what is used here
_PASS = 0x57A3  # stands for a sample's index where the streams of a whole pass are seeded


class OwnStreams:
    """The CPU streams of torch, numpy and `random` as one pass over a stream finds them.

    Args:
        seed: of the run.
        epoch: of the pass.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        value = mix(seed, epoch, _PASS)
        self._torch = torch.Generator().manual_seed(value).get_state()
        # numpy's generators can be exchanged, which is much quicker than to read and set a state.
        self._numpy = np.random.MT19937(value)
        self._python = random.Random(value).getstate()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Goes on where it was left the last time; outside all is as it was before."""
        outer_torch, outer_python = torch.get_rng_state(), random.getstate()
        outer_numpy = _numpy.get_bit_generator()
        torch.set_rng_state(self._torch)
        _numpy.set_bit_generator(self._numpy)
        random.setstate(self._python)
        try:
            yield
        finally:
            self._torch, self._python = torch.get_rng_state(), random.getstate()
            torch.set_rng_state(outer_torch)
            _numpy.set_bit_generator(outer_numpy)
            random.setstate(outer_python)
