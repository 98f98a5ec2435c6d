"""Seeds the random generators: equally on all ranks where that is needed, otherwise differently.

`init` seeds every rank with the same seed, so that a model that is built, or a dataset that is
split, before `prepare` is the same on all ranks. `prepare` then gives each rank other random
numbers (`seed_rank`), so that dropout masks differ. Rank 0 keeps its numbers, which are also those
of a plain single-device script. A *stream* is the random generator of torch, of CUDA, of numpy or
of Python's `random`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

LOWEST_64_BITS = (1 << 64) - 1
LOWEST_32_BITS = (1 << 32) - 1
SEED_RANK_CONSTANT = 0xD1F
"""Mixed into the seeds of `seed_rank`, so that they differ from other mixed seeds."""


def mix_seed(*numbers: int) -> int:
    """Combines several numbers into one 64-bit seed (SplitMix64, Steele et al. 2014).

    Seeds of similar numbers, such as (1, 2) and (1, 3), have nothing in common.
    """
    state = 0
    for number in numbers:
        state = (state + (number & LOWEST_64_BITS) + 0x9E3779B97F4A7C15) & LOWEST_64_BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & LOWEST_64_BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & LOWEST_64_BITS
        state ^= state >> 31
    return state


def seed_everything(seed: int) -> None:
    """Seeds torch (all devices), numpy and `random`, as a plain script does."""
    torch.manual_seed(seed)
    np.random.seed(seed & LOWEST_32_BITS)
    random.seed(seed)


def seed_rank(seed: int, rank: int) -> None:
    """Gives every rank except rank 0 random streams of its own."""
    if rank != 0:
        seed_everything(mix_seed(seed, rank, SEED_RANK_CONSTANT))


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seeds the CPU streams that a dataset uses, before it loads one sample of one epoch."""
    value = mix_seed(seed, epoch, index)
    torch.default_generator.manual_seed(value)
    np.random.seed(value & LOWEST_32_BITS)
    random.seed(value)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restores the CPU streams of torch, numpy and `random` at the end of the block."""
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Returns the current state of every stream, in values that a checkpoint can store."""
    # `words` is a tuple of 625 integers, which a checkpoint would store one by one. So it becomes
    # an array.
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": np.random.get_state(),
        "python": (version, np.array(words, dtype=np.uint32), gauss),
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Sets every stream to a state from `rng_state`.

    CUDA's stream is set only if the state was taken on a GPU and this rank computes on one.
    """
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(state["numpy"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
