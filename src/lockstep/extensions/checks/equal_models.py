"""Checks that tensors that must be equal on several ranks have the same bits there.

Gradients are averaged to the same bits on all ranks, so the models of the ranks stay equal to the
bit, and any difference is a fault. The bits of every tensor are summed as integers on each rank
(`strategies.bit_sums`), and one small all-reduce finds the largest and the smallest sum over the
ranks: if these are equal, the tensors are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.communication import routing
from lockstep.distributed.process_group import Run
from lockstep.errors import RanksDifferError
from lockstep.extensions.checks.base import Check
from lockstep.optim.precision import Precision
from lockstep.session.check_schedule import DueComparisons
from lockstep.strategies.base import EqualTensors, PreparedModule
from lockstep.strategies.bit_sums import bit_sums
from lockstep.wording import join_first


class EqualModelsCheck(Check):
    """Compares models after some of the first global batches and then at regular intervals."""

    def __init__(
        self, run: Run, precision: Precision, wrapped: Collection[PreparedModule] = ()
    ) -> None:
        super().__init__(run, precision, wrapped)
        self._due_comparisons = DueComparisons()

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Remembers the modules of an optimizer."""
        self._due_comparisons.optimizer_prepared(modules)

    def global_batch_trained(self, modules: Sequence[nn.Module]) -> None:
        """Raises RanksDifferError if models that are to be compared now differ.

        It is raised on all ranks that have these models.

        Args:
            modules: the prepared modules whose optimizer has stepped.
        """
        number = self.run.step.number
        interval_of_module = {}
        for wrapped in self.wrapped:
            if wrapped.check_every > 0:  # 0: the strategy wants no comparison
                interval_of_module[wrapped.module] = wrapped.check_every

        to_compare = self._due_comparisons.take_due_modules(
            number, interval_of_module, stepped=modules
        )
        for wrapped in self.wrapped:
            if wrapped.module in to_compare:
                # The strategy names the tensors that must have the same bits on a group of ranks.
                for equal_tensors in wrapped.equal_tensors():
                    check_equal(equal_tensors, f"step {number}")


def check_equal(equal_tensors: EqualTensors, when: str) -> None:
    """Compares tensors over the ranks that have them. All these ranks have to call it.

    Args:
        equal_tensors: parameters and buffers that must have the same bits on all ranks of a group.
        when: for the message: "step 3".

    Raises:
        RanksDifferError: on every rank, naming the tensors that differ.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in (*equal_tensors.parameters.items(), *equal_tensors.buffers.items()):
        is_empty = tensor.numel() == 0
        is_of_other_ranks = tensor.is_meta
        if not is_empty and not is_of_other_ranks:
            tensors[name] = tensor
    if not tensors:
        return

    sums = bit_sums(tensors.values())  # shape (number of tensors,)

    # The smallest sum over the ranks is found as the largest of the negative sums.
    maxima = torch.cat([sums, -sums])
    routing.all_reduce(maxima, dist.ReduceOp.MAX, equal_tensors.group)
    largest, negative_smallest = maxima.chunk(2)
    differs = (largest != -negative_smallest).tolist()
    differing = [name for name, is_different in zip(tensors, differs, strict=True) if is_different]
    if not differing:
        return

    only_buffers_differ = all(name in equal_tensors.buffers for name in differing)
    raise RanksDifferError(
        f"replicas that stay equal ({when})",
        f"{len(differing)} of {len(tensors)} tensors differ between ranks: {join_first(differing)}",
        "look for a forward pass that goes around the prepared model, parameters changed by "
        "hand on some ranks, or a step taken on some ranks only",
        code="LS309" if only_buffers_differ else "LS304",
    )
