"""Random numbers of virtual ranks: the same on any number of processes.

What a model draws in its forward passes (dropout) comes from a *stream* of its virtual rank, which
is seeded anew for each micro-batch with the seed of the run and the numbers of the step, of the
virtual rank and of the micro-batch in it. What is drawn after the last of them, by the optimizer or
by the script, comes from a stream of the step. What the script draws outside of the training loop
comes from the *common* stream. The last two are the same on all processes. A stream is the state of
the random generators of torch, of the GPU, of numpy and of Python's `random`.
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
"""Mixed into the seeds of virtual ranks, so that they differ from other mixed seeds."""
STEP_CONSTANT = 0x57E9
"""Mixed into the seeds of steps."""


class VirtualRankStreams(Extension):
    """Seeds the random generators when a virtual rank begins.

    Args:
        seed: of the run.
        device: of this process.
        step: of the run.
    """

    def __init__(self, seed: int, device: torch.device, step: Step) -> None:
        self._seed = seed
        self._device = device
        self._step = step
        self._common: dict[str, Any] | None = None
        """The common stream, while a training loop uses those of virtual ranks."""
        self._seeded_for_step: StepKey | None = None
        """The optimizer step for which the stream of the step was last seeded."""

    @property
    def common(self) -> dict[str, Any]:
        """The state of the common stream, as `seeding.rng_state` returns it."""
        if self._common is not None:
            return self._common
        return seeding.rng_state(self._device)

    def set_common(self, state: dict[str, Any]) -> None:
        """Sets the common stream to a state that `common` has returned."""
        if self._common is not None:
            self._common = state
        else:
            seeding.set_rng_state(state, self._device)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Seeds the generators for a micro-batch of a virtual rank.

        Not for the first one alone: a loop that fetches batches ahead has left the loader, which
        ends with the common stream, before it trains the last one.
        """
        virtual_rank = micro_batch.virtual_rank
        if virtual_rank is None:
            return
        if self._common is None:
            self._common = seeding.rng_state(self._device)
        self._seed_generators(virtual_rank.number, virtual_rank.piece, VIRTUAL_RANK_CONSTANT)

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Seeds the generators for what follows the last virtual rank, before the first optimizer.

        Each process would go on with the stream of its last virtual rank otherwise, so that noise
        added to the weights would differ between the processes.
        """
        if self._common is None or self._seeded_for_step == self._step.key:
            return
        self._seeded_for_step = self._step.key
        self._seed_generators(STEP_CONSTANT)

    def _seed_generators(self, *numbers: int) -> None:
        """Seeds the generators with numbers, the seed of the run and the number of the step."""
        seed = seeding.mix_seed(self._seed, self._step.number, *numbers)
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
        np.random.seed(seed & seeding.LOWEST_32_BITS)
        random.seed(seed)

    def pass_ended(self) -> None:
        """Continues with the common stream when the last training loop is left."""
        if self._common is not None and not self._step.in_training_loop:
            seeding.set_rng_state(self._common, self._device)
            self._common = None
