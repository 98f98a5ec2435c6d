"""Buffers that the forward pass changes, where a global batch is computed in micro-batches.

One device that computes the whole global batch at a time changes such a buffer (a running mean, a
codebook) once per optimizer step. With micro-batches it changes once per micro-batch, and ends with
other values. That cannot be put right without knowing what the buffer means, so it is said once.
BatchNorm is left out: what it does under micro-batches is said in the block of choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lockstep.distributed.torch_compat import BatchNorm
from lockstep.errors import warn
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step, StepKey, check_due
from lockstep.strategies.replication import fingerprint
from lockstep.wording import join_first

TIMES_SEEN_BEFORE_WARNING = 2
"""A cache that the first forward pass fills changes once; a running statistic changes each time."""


class MicroBatchBuffers(Extension):
    """Warns once of buffers that change between two micro-batches of one global batch.

    Buffers are compared at the beginning of the first and of the second micro-batch, in the first
    global batches and now and then.

    Args:
        module: whose buffers are compared; those on the meta device are on other ranks.
        step: of the run.
        pipelined: the strategy itself cuts the global batch into micro-batches.
    """

    def __init__(self, module: nn.Module, step: Step, *, pipelined: bool) -> None:
        self._module = module
        self._step = step
        self._pipelined = pipelined
        of_batchnorm = {
            id(buffer)
            for child in module.modules()
            if isinstance(child, BatchNorm)
            for buffer in child.buffers(recurse=False)
        }
        self._names = [
            name
            for name, buffer in module.named_buffers()
            if buffer.numel() and not buffer.is_meta and id(buffer) not in of_batchnorm
        ]
        self._times_changed = dict.fromkeys(self._names, 0)
        self._at_first: dict[str, tuple[torch.Size, int]] = {}
        """The buffers when the first micro-batch of `_global_batch` began."""
        self._global_batch: StepKey | None = None

    def begin(self, micro_batch: MicroBatch) -> None:
        """Compares at the beginning of the second micro-batch."""
        if micro_batch.num_micro_batches == 1 or not self._names:
            return
        if not check_due(self._step.number + 1):
            return
        if micro_batch.opens:
            self._global_batch = self._step.key
            self._at_first = self._values()
        elif self._global_batch == self._step.key:
            self._global_batch = None  # the later micro-batches are not looked at
            self._compare(micro_batch.num_micro_batches)

    def _values(self) -> dict[str, tuple[torch.Size, int]]:
        """The shape and the sum of the bits of each buffer."""
        now = dict(self._module.named_buffers())
        there = [name for name in self._names if name in now]
        sums = fingerprint([now[name] for name in there]).tolist()
        return {name: (now[name].shape, bits) for name, bits in zip(there, sums, strict=True)}

    def _compare(self, num_micro_batches: int) -> None:
        now = self._values()
        for name, (shape, bits) in self._at_first.items():
            shape_now, bits_now = now.get(name, (None, bits))
            if shape_now == shape and bits_now != bits:
                self._times_changed[name] += 1
        changing = [
            name
            for name, times_changed in self._times_changed.items()
            if times_changed >= TIMES_SEEN_BEFORE_WARNING
        ]
        if changing:
            self._names = []  # said once
            self._warn(changing, num_micro_batches)

    def _warn(self, names: Sequence[str], num_micro_batches: int) -> None:
        advice = (
            "update them once per global batch, from sums over its micro-batches, or choose the "
            "momentum of running means for so many updates"
        )
        if not self._pipelined:
            advice += "; without micro-batches there is one update"
        warn(
            "buffers that change in the forward pass, and a global batch in micro-batches",
            f"{join_first(names)} changed from one micro-batch to the next: they are updated "
            f"{num_micro_batches} times per optimizer step, each time from a part of the global "
            "batch, and get other values than from the whole global batch at a time",
            f"{advice}; do nothing where these values are good enough",
            on_this_rank=True,
        )
