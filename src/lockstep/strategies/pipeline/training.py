"""Takes part in the training steps of a pipeline, with checks and buffers that must stay equal.

Several pipelines side by side have the same stages. Each rank of a pipeline has its own part of the
model, so all of them must use the same learning rates.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lockstep.distributed.process_group import Run
from lockstep.errors import RanksDifferError
from lockstep.session.check_schedule import check_due
from lockstep.session.extension import Extension
from lockstep.strategies.pipeline.module import PipelinedModule


class PipelineSteps(Extension):
    """Takes part in the training steps of one pipelined module."""

    def __init__(self, module: PipelinedModule) -> None:
        self._module = module

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Checks that the backward passes have run, and at intervals that learning rates are equal.

        Raises:
            UsageError: a forward pass was not followed by `world.backward`.
            RanksDifferError: the stages would be trained at different learning rates.
        """
        if self._module not in modules:
            return
        self._module.check_backward_is_done()
        number_of_this_step = self._module.run.step.number + 1  # `number` counts finished steps
        if check_due(number_of_this_step):
            check_learning_rates(optimizer, self._module.run)

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Makes the buffers that forward passes change equal in all pipelines."""
        if self._module in modules:
            self._module.make_moving_buffers_equal()

    def clear_gradients(self) -> None:
        """Drops the gradients of a global batch that the loop has left early."""
        self._module.clear_gradients()

    def release(self) -> None:
        """Drops all references to process groups."""
        self._module.release()


def check_learning_rates(optimizer: Optimizer, run: Run) -> None:
    """Raises RanksDifferError if the optimizer's learning rates differ between ranks.

    Ranks with different stages have no parameters in common, so no other check would notice.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    rates_by_rank = run.collectives.exchange(str(rates))  # as text, such as "[0.1, 0.01]"
    for rank, rates_of_rank in enumerate(rates_by_rank):
        if rates_of_rank != rates_by_rank[0]:
            raise RanksDifferError(
                "optimizer.step() with other learning rates on other ranks",
                f"rank 0 has {rates_by_rank[0]}, rank {rank} has {rates_of_rank}",
                "give the scheduler to world.prepare, and decide about rates by world.mean(loss): "
                "only ranks with the last stage have the loss, the others NaN",
            )
