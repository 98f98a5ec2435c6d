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
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        draw_from(seed, device)
        yield


def draw_from(seed: int, device: torch.device) -> None:
    """Torch's streams of the CPU and the device start at a seed."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def seed_of_stage(seed: int, stage: int) -> int:
    """Of what a stage draws, from that of the whole forward pass."""
    return mix(seed, stage, 0x57A6E)
