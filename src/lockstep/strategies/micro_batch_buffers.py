"""Warns of buffers that change in every micro-batch of a global batch.

A device that computes the whole global batch at once updates a buffer such as a running mean or a
codebook once per optimizer step. With micro-batches the buffer is updated once per micro-batch, and
gets other values. Lockstep cannot correct that without knowing what the buffer means, so it warns
once. BatchNorm layers are left out, because the start of the run prints how they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from lockstep.errors import warn
from lockstep.session.check_schedule import check_due
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step, StepKey
from lockstep.strategies.bit_sums import bit_sums
from lockstep.torch_compat import BatchNorm
from lockstep.wording import join_first

MIN_CHANGES_BEFORE_WARNING = 2
"""A cache changes only once, in the first forward pass; a running statistic changes every time."""


class _BufferValue(NamedTuple):
    """The properties of a buffer that are compared."""

    shape: torch.Size
    sum_of_bits: int


class MicroBatchBuffers(Extension):
    """Warns once of buffers that change from one micro-batch of a global batch to the next.

    In some of the first global batches, and then at regular intervals, the buffers at the beginning
    of the first micro-batch are compared with those at the beginning of the second one.

    Args:
        module: the module whose buffers are compared. Buffers on the meta device belong to other
            ranks and are left out.
        step: the state of the current optimizer step.
        pipelined: True if the strategy itself divides global batches into micro-batches.
    """

    def __init__(self, module: nn.Module, step: Step, *, pipelined: bool) -> None:
        self._module = module
        self._step = step
        self._pipelined = pipelined

        batchnorm_ids: set[int] = set()
        for layer in module.modules():
            if isinstance(layer, BatchNorm):
                batchnorm_ids.update(id(buffer) for buffer in layer.buffers(recurse=False))

        self._names: list[str] = []
        """The names of the buffers that are compared."""
        for name, buffer in module.named_buffers():
            if buffer.numel() and not buffer.is_meta and id(buffer) not in batchnorm_ids:
                self._names.append(name)

        self._num_changes = dict.fromkeys(self._names, 0)
        """In how many comparisons each buffer had changed, by name."""
        self._values_at_first_micro_batch: dict[str, _BufferValue] = {}
        """The buffers at the beginning of the first micro-batch of `_step_to_compare`."""
        self._step_to_compare: StepKey | None = None
        """The optimizer step in whose second micro-batch the buffers are to be compared, or None.
        """
        self._has_warned = False
        """True once a warning was given; then nothing is compared any more."""

    def begin(self, micro_batch: MicroBatch) -> None:
        """Records the buffers in the first micro-batch, and compares them in the second one."""
        if micro_batch.num_micro_batches == 1:
            return
        if not self._names or self._has_warned:
            return

        # Compare only in some of the first steps, and then at regular intervals.
        number_of_this_step = self._step.number + 1  # `number` counts finished steps
        if not check_due(number_of_this_step):
            return

        if micro_batch.opens_step:
            self._step_to_compare = self._step.key
            self._values_at_first_micro_batch = self._values()
            return

        is_second_micro_batch = self._step_to_compare == self._step.key
        if is_second_micro_batch:
            self._step_to_compare = None  # later micro-batches have the same key
            self._compare(micro_batch.num_micro_batches)

    def _values(self) -> dict[str, _BufferValue]:
        """Returns the present value of each compared buffer, by name.

        A value is the buffer's shape, and the sum of its bits: with nearly every change of the
        buffer, the sum changes, and it is much smaller to store than a copy.
        """
        buffers = dict(self._module.named_buffers())
        names = [name for name in self._names if name in buffers]  # the user may have removed some
        sums = bit_sums([buffers[name] for name in names]).tolist()
        values: dict[str, _BufferValue] = {}
        for name, sum_of_bits in zip(names, sums, strict=True):
            values[name] = _BufferValue(buffers[name].shape, sum_of_bits)
        return values

    def _compare(self, num_micro_batches: int) -> None:
        """Compares the buffers with their first values, and warns of those that change repeatedly.

        After the warning nothing is compared any more.
        """
        values = self._values()
        for name, first_value in self._values_at_first_micro_batch.items():
            value = values.get(name)
            if value is None or value.shape != first_value.shape:
                continue  # the buffer was replaced, so it is not a statistic that is updated
            if value.sum_of_bits != first_value.sum_of_bits:
                self._num_changes[name] += 1

        changing: list[str] = []
        for name, num_changes in self._num_changes.items():
            if num_changes >= MIN_CHANGES_BEFORE_WARNING:
                changing.append(name)

        if changing:
            self._has_warned = True
            self._warn(changing, num_micro_batches)

    def _warn(self, names: Sequence[str], num_micro_batches: int) -> None:
        """Warns of the buffers with these names, which change in each micro-batch."""
        advice = (
            "update them once per global batch, from sums over its micro-batches, or adapt the "
            "momentum of running means to that number of updates"
        )
        if not self._pipelined:  # a pipeline needs micro-batches
            advice += "; without micro-batches there is one update"

        warn(
            "buffers that change in the forward pass, and a global batch in micro-batches",
            found=f"{join_first(names)} changed from one micro-batch to the next: they are updated "
            f"{num_micro_batches} times per optimizer step, each time from a part of the global "
            "batch, and get different values than if the whole global batch were computed at once",
            do=f"{advice}; if these values are good enough, nothing has to be done",
            on_this_rank=True,
        )
