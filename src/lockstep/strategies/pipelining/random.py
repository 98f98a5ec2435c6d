"""Random numbers inside a model that is cut into stages.

The streams of the ranks of one pipeline are equal, so that what a training loop draws (a mask, say)
is the same on all of them. What the model's forward draws comes from streams of its own: outside of
the stage the same on every rank, because the forward runs on all of them for the same micro-batch;
inside of it another one for every stage, or the dropout of two stages would drop the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.runtime.seeding import mix


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's streams of the CPU and the device start at a seed; afterwards they are as before."""
    before = torch.get_rng_state()  # by hand: `fork_rng` takes as long as a small layer
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        draw_from(seed, device)
        yield
    finally:
        torch.set_rng_state(before)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)


def draw_from(seed: int, device: torch.device) -> None:
    """Torch's streams of the CPU and the device start at a seed."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def seed_of_stage(seed: int, stage: int) -> int:
    """Of what a stage draws, from that of the whole forward pass."""
    return mix(seed, stage, 0x57A6E)
