"""Warns if a loss function sums over the samples: `F.cross_entropy(..., reduction="sum")`.

The losses of the parts of a global batch are averaged, weighted by their samples. That gives the
mean over the global batch if each part's loss is a mean. If it is a sum, the gradients depend on
the number of parts: on four ranks, they are about a quarter of those of one process.

Autograd's graph shows which loss function was called, and with which reduction. A sum that the
script divides afterwards is right, so only those losses are looked at that are loss functions
themselves, or sums of loss functions and other terms, such as a penalty.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from lockstep.distributed.process_group import Run
from lockstep.distributed.torch_compat import rows_summed_by_loss_function
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.optim.precision import Precision
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule

MAX_BACKWARDS_WATCHED = 20
"""The graphs of losses are read in the first backward passes of a run, this many."""
MAX_TERMS = 100
"""The number of nodes that are visited in the graph of one loss."""
NODES_THAT_KEEP_A_SUM = {"AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0"}
"""Autograd's nodes of `a + b`, `a - b`, `-a` and a change of the dtype. If a term is a sum over the
samples, so is the result. After any other function, such as a division, it may be a mean."""


class SummedLossCheck(Check):
    """Looks at the loss functions in the graphs of the first losses."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._num_backwards = 0
        self._has_warned = False

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Warns once if the loss is a sum over the samples of a part of a global batch."""
        if self._has_warned or self._num_backwards == MAX_BACKWARDS_WATCHED:
            return
        if not self.run.collectives.contributes:  # the loss of an earlier stage of a pipeline
            return

        # Where one micro-batch is the whole global batch, a sum gives the gradients that plain
        # PyTorch gives, too. With one sample, a sum is a mean. Replicas with a step of their own
        # may see one part each, which is then whole for them.
        num_rows = micro_batch.local_rows
        is_part = 1 < num_rows < micro_batch.global_samples
        if not is_part or micro_batch.has_own_step:
            return

        self._num_backwards += 1
        function_name = summing_loss_function(loss, num_rows)
        if function_name is None:
            return

        self._has_warned = True
        warn(
            'world.backward of a loss with reduction="sum"',
            f"{function_name} sums over the {num_rows} samples of this part of the global batch, "
            f"which has {micro_batch.global_samples}; the losses of the parts are averaged, so the "
            "gradients get smaller with each further rank or micro-batch",
            'use reduction="mean", or divide the loss by the number of its samples: '
            "loss / max(1, len(x))",
            code="LS202",
        )


def summing_loss_function(loss: Tensor, num_rows: int) -> str | None:
    """Returns the loss function that has summed over the samples, or None.

    Args:
        loss: a tensor of one element that has a gradient.
        num_rows: the number of samples that it was computed from. A loss function that has summed
            over something else, such as the entries of a codebook, has another number of rows. One
            over tokens has a multiple of this number.

    Returns:
        The name of autograd's node without its ending, for example "NllLoss".
    """
    nodes_to_visit: list[Any] = [loss.grad_fn]
    for _ in range(MAX_TERMS):
        if not nodes_to_visit:
            return None

        node = nodes_to_visit.pop()
        if node is None:  # a term without a gradient
            continue

        num_summed = rows_summed_by_loss_function(node)
        if num_summed and num_summed % num_rows == 0:
            return str(node.name()).removesuffix("Backward0")

        if node.name() in NODES_THAT_KEEP_A_SUM:
            nodes_to_visit += [next_node for next_node, _ in node.next_functions]
    return None
