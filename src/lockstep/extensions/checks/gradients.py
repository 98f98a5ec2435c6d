"""Raises an error if the script writes to gradients while that gives other results.

Between the micro-batches of a global batch the gradients are only partial sums, and under a loss
scaler (fp16) they are multiplied by its scale until the optimizer steps. Clipping them there gives
different numbers than clipping the gradient of the whole batch, and nothing shows it. So the check
remembers which gradients a backward pass has left, and how often each was written to.

With virtual ranks, a norm that the script takes over shards of gradients (FSDP) has bits that
depend on the number of processes. If the script writes to shards, the check warns of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import UsageError, warn
from lockstep.extensions.checks.base import Check
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import parameters_of
from lockstep.torch_compat import is_sharded, to_local, write_count, write_counts


class GradientRecord(NamedTuple):
    """The gradient of a parameter, as a backward pass has left it."""

    parameter: nn.Parameter
    gradient_id: int
    write_count: int
    """How often the gradient had been written to in place."""


class ShardRecord(NamedTuple):
    """The values of one shard of a gradient, as a backward pass has left it.

    Torch counts no writes of operations on lists of shards, as in its `clip_grad_norm_`. Those
    change all gradients alike, so one small shard shows it.
    """

    parameter: nn.Parameter
    values: Tensor


class GradientVersionCheck(Check):
    """Compares gradients with what the latest backward pass has left in them."""

    _has_partial_gradients = False
    """True if the current global batch has had a backward pass."""
    _num_backwards_of_micro_batch = 0
    """How many backward passes the current micro-batch has had."""
    _records: Sequence[GradientRecord] = ()
    """The gradients as the latest backward pass has left them."""
    _shard: ShardRecord | None = None
    """One shard of a gradient, as the latest backward pass has left it; None if there are none."""
    _parameters: Sequence[nn.Parameter] | None = None
    """The parameters of the prepared modules. To find them takes longer than the check itself, so
    they are found once in a pass."""

    _has_shards_with_virtual_ranks = False
    _warned_of_shards = False
    _prepared: Mapping[int, Any] = MappingProxyType({})
    """The prepared optimizers, by the ids of the user's optimizers."""

    def module_prepared(self, wrapped: Any) -> None:
        """Forgets the parameters, to which those of this module belong."""
        self._parameters = None
        if self.run.settings.virtual_ranks is not None:
            if any(is_sharded(parameter) for parameter in wrapped.module.parameters()):
                self._has_shards_with_virtual_ranks = True

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Remembers the prepared optimizer, which knows whether gradients were clipped."""
        self._prepared = {**self._prepared, id(optimizer.inner): optimizer}

    def pass_ended(self) -> None:
        """Forgets the parameters: between two passes the script may replace some."""
        self._parameters = None

    def begin(self, micro_batch: MicroBatch) -> None:
        """Begins to count the backward passes of a new micro-batch from 0."""
        self._num_backwards_of_micro_batch = 0
        if micro_batch.opens_step:
            self._has_partial_gradients = False

    def after_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Records the gradients, if the script must not write to them now.

        They are not yet those that the optimizer will use if later micro-batches will add to them,
        or if they are still scaled (fp16). With virtual ranks, shards are always recorded.

        Args:
            loss: not used.
            micro_batch: not used, as the step may belong to the micro-batches of another loader.
        """
        del loss, micro_batch
        self._num_backwards_of_micro_batch += 1
        self._has_partial_gradients = True

        are_complete = self.run.step.micro_batch.closes_step
        are_scaled = self.precision.scaler is not None
        script_may_write = are_complete and not are_scaled
        if not script_may_write or self._has_shards_with_virtual_ranks:
            self._record_gradients()

    def _record_gradients(self) -> None:
        """Records the gradients as they are now, to find out later whether they were written to."""
        if self._parameters is None:
            self._parameters = self._find_parameters()
        parameters: list[nn.Parameter] = []
        gradients: list[Tensor] = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None:
                parameters.append(parameter)
                gradients.append(gradient)

        # `GradientRecord(parameter, id of its gradient, write count)` for each gradient. This runs
        # in every micro-batch, and `map` is faster than a loop.
        gradient_ids = [id(gradient) for gradient in gradients]
        self._records = list(map(GradientRecord, parameters, gradient_ids, write_counts(gradients)))

        # Some writes to shards are not counted. They change all shards, so a copy of one is enough.
        self._shard = _record_smallest_shard(parameters)

    def _find_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters whose gradients can be checked for writes of the script."""
        parameters: list[nn.Parameter] = []
        for wrapped in self.wrapped:
            # Some strategies write the gradients themselves after the backward pass. The check
            # would mistake that for a write of the script.
            if not wrapped.gradients_after_backward:
                parameters += wrapped.module.parameters()
        return parameters

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Raises UsageError if the gradients of earlier micro-batches were written to.

        Gradients are compared once for each micro-batch, before its first backward pass. Nothing is
        compared for the first trained micro-batch of a global batch, which finds no earlier
        gradients. It may be a later one than the first: a loop may skip some.

        Args:
            loss: not used.
            micro_batch: not used; see `after_backward`.
        """
        del loss, micro_batch
        is_first_backward_of_micro_batch = self._num_backwards_of_micro_batch == 0
        opens_step = self.run.step.micro_batch.opens_step
        if is_first_backward_of_micro_batch and self._has_partial_gradients and not opens_step:
            self._check_partial_gradients()

    def batch_is_done(self) -> None:
        """Raises UsageError if the gradients of a virtual rank were written to.

        When the next virtual rank begins, it takes these gradients out of `parameter.grad`, to add
        them up later. So `before_backward` would be too late to look at them.
        """
        micro_batch_of_step = self.run.step.micro_batch
        virtual_rank = micro_batch_of_step.virtual_rank
        # A virtual rank with a step of its own (DiLoCo) has used its gradients by then.
        will_be_taken_out = virtual_rank is not None and not virtual_rank.has_own_step
        are_complete = micro_batch_of_step.closes_step
        had_backward = self._num_backwards_of_micro_batch > 0
        if will_be_taken_out and had_backward and not are_complete:
            self._check_partial_gradients()

    def _check_partial_gradients(self) -> None:
        """Raises UsageError if the script has written to gradients that are not complete yet."""
        if self._finds_write(self._parameters or ()):
            raise UsageError(
                "gradients that are written to between the micro-batches of a global batch",
                "they belong to a part of the batch; clipping each part, with torch's "
                "clip_grad_norm_ for example, gives other numbers than clipping the whole gradient",
                "use world.clip_grad_norm_(model, max_norm); change gradients by hand only "
                "if world.is_last_micro_batch",
                code="LS406",
            )

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Raises UsageError if gradients of this optimizer are still scaled and were written to.

        Under fp16, gradients are multiplied by a large scale until the optimizer steps. If they are
        clipped to a norm of 1 before, they are far too small afterwards. Gradients that are not
        scaled may be written to now, except that shards with virtual ranks lead to a warning.
        """
        are_scaled = self.precision.scales(optimizer)
        if not are_scaled:
            if self._has_shards_with_virtual_ranks:
                self._warn_if_shards_were_written_to(optimizer)
            return

        if self._finds_write(parameters_of(optimizer)):
            raise UsageError(
                "gradients that are written to before optimizer.step() under precision='fp16'",
                "they are still multiplied by the scale of the loss, so that clip_grad_norm_ "
                "of torch clips nearly all of them away",
                "use world.clip_grad_norm_(model, max_norm); after it (max_norm=math.inf clips "
                "nothing) they have their true size and may be changed",
                code="LS406",
            )

    def _finds_write(self, parameters: Iterable[Tensor]) -> bool:
        """Returns True if the script has written to gradients since the latest backward pass.

        Args:
            parameters: the parameters whose gradients are looked at.
        """
        ids = {id(parameter) for parameter in parameters}
        for record in self._records:
            if id(record.parameter) in ids and _was_written_to(record):
                return True

        # Torch does not count all writes to shards. So one shard was copied, and is compared.
        shard = self._shard
        if shard is None or id(shard.parameter) not in ids or shard.parameter.grad is None:
            return False
        present_values = to_local(shard.parameter.grad)
        return not torch.equal(_bytes_of(present_values), _bytes_of(shard.values))

    def _warn_if_shards_were_written_to(self, optimizer: Optimizer) -> None:
        """Warns, once, if the script has changed shards of gradients without `world`'s clipping.

        With virtual ranks, the bits of a result must not depend on the number of processes. The
        bits of a norm over shards do depend on it, and so does clipping with torch's
        `clip_grad_norm_`. But it is not known what the script has done: to multiply each element
        by a fixed number is harmless.
        """
        prepared = self._prepared.get(id(optimizer))
        if self._warned_of_shards or prepared is None or prepared.step_calls.is_clipped:
            return

        shards = [parameter for parameter in parameters_of(optimizer) if is_sharded(parameter)]
        if self._finds_write(shards):
            self._warned_of_shards = True
            warn(
                "shards of gradients that the script changes before optimizer.step(), with "
                "virtual_ranks",
                found="a norm over shards, as torch's clip_grad_norm_ takes it, and noise have "
                "bits that depend on the number of processes",
                do="to clip, use world.clip_grad_norm_(model, max_norm); ignore this if each "
                "element is changed by itself, for example multiplied by a number",
            )


def _record_smallest_shard(parameters: Sequence[nn.Parameter]) -> ShardRecord | None:
    """Copies the smallest shard of a gradient on this rank that is not empty.

    On a GPU nothing is copied: to compare it later would wait for the GPU.

    Returns:
        None if gradients are not sharded, or are on a GPU.
    """
    smallest: nn.Parameter | None = None
    smallest_size = 0
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or gradient.device.type != "cpu" or not is_sharded(gradient):
            continue
        size = to_local(gradient).numel()
        if size and (smallest is None or size < smallest_size):
            smallest = parameter
            smallest_size = size

    if smallest is None or smallest.grad is None:
        return None
    return ShardRecord(smallest, to_local(smallest.grad).clone())


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor. Unlike values, bytes of NaN are equal to themselves."""
    return tensor.reshape(-1).view(torch.uint8)


def _was_written_to(record: GradientRecord) -> bool:
    """Returns True if a gradient was replaced or changed in place since it was recorded.

    A gradient that was cleared (`zero_grad`) counts as untouched: the script has dropped it.
    """
    gradient = record.parameter.grad
    if gradient is None:
        return False
    if id(gradient) != record.gradient_id:
        return True
    return write_count(gradient) != record.write_count
