"""Random numbers of virtual ranks, which are the same on any number of processes.

A *stream* is the state of the random generators of torch, of the GPU, of numpy and of Python's
`random`. There are three kinds:

- Each virtual rank has a stream for what a model draws in its forward passes (dropout). It is
seeded again for each micro-batch with the seed of the run and the numbers of the step, the virtual
rank and the micro-batch.
- Each step has a stream for what the optimizer or the script draws after the last micro-batch.
- The *common* stream is for what the script draws outside of the training loop.

The last two are the same on all processes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.distributed import seeding
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step, StepKey

VIRTUAL_RANK_CONSTANT = 0x7A11
"""Mixed into the seeds of virtual ranks, so that no other random stream has the same seed."""
STEP_CONSTANT = 0x57E9
"""Mixed into the seeds of steps."""


class VirtualRankStreams(Extension):
    """Seeds the random generators when a virtual rank begins.

    Args:
        seed: the seed of the run.
        device: the device of this process.
        step: the state of the current optimizer step.
    """

    def __init__(self, seed: int, device: torch.device, step: Step) -> None:
        self._seed = seed
        self._device = device
        self._step = step
        self._common: dict[str, Any] | None = None
        """The common stream, while a training loop uses the others; None outside of a loop."""
        self._seeded_for_step: StepKey | None = None
        """The latest optimizer step whose stream was seeded."""

    @property
    def common(self) -> dict[str, Any]:
        """The state of the common stream, as returned by `seeding.rng_state`."""
        if self._common is not None:
            return self._common
        return seeding.rng_state(self._device)

    def set_common(self, state: dict[str, Any]) -> None:
        """Sets the common stream to a state that `common` returned."""
        if self._common is not None:
            self._common = state
        else:
            seeding.set_rng_state(state, self._device)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Seeds the generators for a micro-batch of a virtual rank.

        This is done for every micro-batch, not only for the first one of a virtual rank. A loop
        that fetches batches ahead leaves the loader, which restores the common stream, before it
        trains the last one.
        """
        virtual_rank = micro_batch.virtual_rank
        if virtual_rank is None:
            return
        if self._common is None:
            self._common = seeding.rng_state(self._device)
        self._seed_generators(virtual_rank.number, virtual_rank.piece, VIRTUAL_RANK_CONSTANT)

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Seeds the generators for what the script draws after the last virtual rank of a step.

        Otherwise each process would continue with the stream of its last virtual rank, and noise
        that is added to gradients or weights would differ between processes.
        """
        if self._step.micro_batch.last:
            self._seed_for_step()

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Seeds the generators if `World.backward` was not called for the last micro-batch."""
        self._seed_for_step()

    def _seed_for_step(self) -> None:
        """Seeds the generators with the stream of the present step, once."""
        if self._common is None or self._seeded_for_step == self._step.key:
            return
        self._seeded_for_step = self._step.key
        self._seed_generators(STEP_CONSTANT)

    def _seed_generators(self, *numbers: int) -> None:
        """Seeds the generators with the seed of the run, the step's number and given numbers."""
        seed = seeding.mix_seed(self._seed, self._step.number, *numbers)
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
        np.random.seed(seed & seeding.LOWEST_32_BITS)
        random.seed(seed)

    def pass_ended(self) -> None:
        """Continues with the common stream when the last training loop has ended."""
        if self._common is not None and not self._step.in_training_loop:
            seeding.set_rng_state(self._common, self._device)
            self._common = None
