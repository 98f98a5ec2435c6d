"""Do the replicas still hold the same bits? One pass over the parameters and one small all-reduce.

Every tensor's bits are summed as integers; the largest and the smallest sum over the ranks must be
equal. Gradients are averaged to the same bits on all ranks, so anything else is a fault.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.communication import routing
from lockstep.errors import RanksDifferError
from lockstep.extensions.checks.base import Check
from lockstep.session.step import check_due
from lockstep.strategies.base import EqualTensors
from lockstep.strategies.bit_sums import bit_sums
from lockstep.wording import join_first


class ReplicaCheck(Check):
    """Compares what several ranks have in common, in the first steps and now and then."""

    def global_batch_trained(self) -> None:
        """Raises RanksDifferError, on all ranks, where they have parted."""
        number = self.run.step.number
        for wrapped in self.wrapped:
            if wrapped.check_every and check_due(number, wrapped.check_every):
                for replicas in wrapped.equal_tensors():
                    check_equal(replicas, f"step {number}")


def check_equal(replicas: EqualTensors, when: str) -> None:
    """Compares tensors over the ranks that have them.

    Raises:
        RanksDifferError: on every rank, naming the tensors.
    """
    named = {**replicas.parameters, **replicas.buffers}
    named = {name: t for name, t in named.items() if t.numel() and not t.is_meta}
    if not named:
        return
    mine = bit_sums(named.values())
    extremes = torch.cat([mine, -mine])
    routing.all_reduce(extremes, dist.ReduceOp.MAX, replicas.group)
    largest, smallest = extremes.chunk(2)
    differ = [n for n, same in zip(named, (largest == -smallest).tolist(), strict=True) if not same]
    if differ:
        raise RanksDifferError(
            f"replicas that stay equal ({when})",
            f"{len(differ)} of {len(named)} tensors differ between ranks: {join_first(differ)}",
            "look for a forward pass that goes around the prepared model, parameters changed by "
            "hand on some ranks, or a step taken on some ranks only",
            code="LS309" if all(name in replicas.buffers for name in differ) else "LS304",
        )
