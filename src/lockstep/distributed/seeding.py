"""Seeds: equal on all ranks where they must be, different where they should.

`init` seeds every rank alike, so that a model built, or a dataset split, before `prepare` is the
same everywhere. `prepare` then lets the ranks part (`seed_rank`), so that dropout masks differ;
rank 0 keeps the stream it has, which is also that of a plain single-device script.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mix_seed(*numbers: int) -> int:
    """One well-spread 64-bit number from several (SplitMix64, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_everything(seed: int) -> None:
    """Seeds torch (all devices), numpy and `random`, as a plain script does."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def seed_rank(seed: int, rank: int) -> None:
    """Gives every rank but 0 random streams of its own."""
    if rank:
        seed_everything(mix_seed(seed, rank, 0xD1F))


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Sets the CPU streams that datasets draw from, for one sample of one epoch."""
    value = mix_seed(seed, epoch, index)
    torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restores the CPU streams of torch, numpy and `random` on leaving."""
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()
    python_state = random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The present state of every stream, in values that `checkpoint.encoding` takes."""
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": np.random.get_state(),
        "python": (version, np.array(words, dtype=np.uint32), gauss),
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Sets every stream as `rng_state` found it; CUDA's only where both runs have such a device."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(state["numpy"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
