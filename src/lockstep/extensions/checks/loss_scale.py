"""Warns if a loss has a factor that makes the gradients depend on how a global batch is divided.

The losses of the parts of a global batch are averaged, weighted by their samples. That gives the
mean over the global batch if each part's loss is the mean over its samples. Three mistakes give
other gradients:

- The loss is a sum over the samples, `F.cross_entropy(..., reduction="sum")`. On four ranks, the
  gradients are about a quarter of those of one process.
- Such a sum is divided by the number of samples of the global batch. The gradients are too small by
  the number of parts.
- A mean is divided by the number of micro-batches, as scripts do that accumulate gradients
  themselves. `World.backward` has averaged already.

Autograd's graph shows which loss function was called, with which reduction, and by which number the
script has divided. Nothing is said of a loss in which other functions stand between.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lockstep.distributed.process_group import Run
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.optim.precision import Precision
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule
from lockstep.torch_compat import (
    is_mean_of_loss_function,
    rows_summed_by_loss_function,
    scalar_factor,
)

MAX_BACKWARDS_WATCHED = 20
"""The graphs of losses are read in the first backward passes of a run, this many."""
MAX_TERMS = 100
"""The number of nodes that are visited in the graph of one loss."""
MAX_USUAL_DIVISOR = 2
"""Many scripts halve a mean without accumulating gradients: half of a squared error."""
NODES_THAT_KEEP_A_SUM = {"AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0"}
"""Autograd's nodes of `a + b`, `a - b`, `-a` and a change of the dtype. If a term is a sum over the
samples, so is the result. After any other function it may be a mean."""


class LossScaleCheck(Check):
    """Looks at the loss functions in the graphs of the first losses."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._num_backwards = 0
        self._has_warned = False

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Warns once if the loss is a sum, or a mean that is divided by the micro-batches."""
        if self._has_warned or self._num_backwards == MAX_BACKWARDS_WATCHED:
            return

        # In a pipeline, only the last stage has the loss.
        is_earlier_stage = not self.run.collectives.contributes
        if is_earlier_stage or _sum_may_be_right(micro_batch):
            return

        self._num_backwards += 1
        # Of `F.mse_loss(x, y) / 4`, these are 4 and the node of `mse_loss` in autograd's graph.
        divisor, node_before_division = split_divisor(loss.grad_fn)
        summing = find_sum(node_before_division, micro_batch.local_rows)
        if summing is not None:
            self._check_sum(summing, divisor, micro_batch)
        elif is_mean_of_loss_function(node_before_division):
            self._check_mean(divisor, micro_batch)

    def _check_sum(self, summing: Any, divisor: float, micro_batch: MicroBatch) -> None:
        """Warns if a sum over the samples is not divided, or by the samples of the global batch.

        Args:
            summing: the node of the loss function that has summed.
            divisor: the number by which the script has divided the sum.
            micro_batch: the part of the global batch that the loss is computed from.
        """
        function_name = str(summing.name()).removesuffix("Backward0")  # for example "NllLoss"
        num_rows = micro_batch.local_rows
        num_samples = micro_batch.global_samples

        is_divided = not _is_equal(divisor, 1)
        if not is_divided:
            self._warn_of_sum(
                'world.backward of a loss with reduction="sum"',
                f"{function_name} sums over the {num_rows} samples of this part of the global "
                f"batch, which has {num_samples}; the losses of the parts are averaged, so the "
                "gradients get smaller with each further rank or micro-batch",
            )
            return

        # A loss over tokens sums more rows than there are samples. A divisor that equals the number
        # of samples then says nothing, as it may be a number of tokens.
        is_over_samples = rows_summed_by_loss_function(summing) == num_rows
        if is_over_samples and _is_equal(divisor, num_samples):
            self._warn_of_sum(
                "world.backward of a sum that is divided by the global batch",
                f"{function_name} sums over the {num_rows} samples of this part of the global "
                f"batch, and the loss is divided by {num_samples}; the losses of the parts are "
                "averaged, so the gradients get smaller with each further rank or micro-batch",
            )

    def _warn_of_sum(self, was_set: str, found: str) -> None:
        """Warns of a sum over the samples."""
        self._has_warned = True
        warn(
            was_set,
            found=found,
            do='use reduction="mean", or divide the loss by the number of its samples: '
            "loss / max(1, len(x))",
            code="LS202",
        )

    def _check_mean(self, divisor: float, micro_batch: MicroBatch) -> None:
        """Warns if a mean over the samples is divided by the number of micro-batches."""
        num_micro_batches = micro_batch.num_micro_batches
        is_divided = _is_equal(divisor, num_micro_batches)
        may_have_other_reason = num_micro_batches <= MAX_USUAL_DIVISOR  # such as `loss / 2`
        if not is_divided or may_have_other_reason:
            return

        self._has_warned = True
        warn(
            f"world.backward of a loss that is divided by {num_micro_batches}",
            found=f"a global batch has {num_micro_batches} micro-batches, over which "
            "world.backward averages by itself; if the loss is divided for them, the gradients are "
            f"1/{num_micro_batches} of what they should be",
            do="leave out the division by the number of accumulation steps",
            code="LS204",
        )


def _sum_may_be_right(micro_batch: MicroBatch) -> bool:
    """Returns True if a loss that is a sum may give the gradients that plain PyTorch gives."""
    is_single_sample = micro_batch.local_rows <= 1
    if is_single_sample:
        return True  # the sum over one sample is the mean

    is_whole_global_batch = micro_batch.local_rows >= micro_batch.global_samples
    if is_whole_global_batch:
        return True  # one loss, which is not averaged with others

    # Under DiLoCo, each copy of the model makes a step with its part of the global batch, and may
    # compute all samples of this step at once.
    return micro_batch.has_own_step


def split_divisor(node: Any) -> tuple[float, Any]:
    """Returns by how much a loss was divided after it was computed, and the node that computed it.

    `F.mse_loss(x, y) / 4 * 2` gives 2 and the node of `mse_loss`: multiplying by 1/4 and by 2 is
    dividing by 2.

    Args:
        node: the `grad_fn` of the loss.

    Returns:
        The divisor, 1 if the loss was neither divided nor multiplied; and the node before that.
    """
    divisor = 1.0
    while node is not None:  # from the last operation backwards
        factor = scalar_factor(node)
        if factor is None or factor == 0:
            break

        inputs = [next_node for next_node, _ in node.next_functions if next_node is not None]
        loss_is_only_input = len(inputs) == 1
        if not loss_is_only_input:  # the factor has a gradient, too: which of the two is the loss?
            break

        divisor /= factor
        node = inputs[0]
    return divisor, node


def find_sum(node: Any, num_rows: int) -> Any:
    """Returns the node of a loss function that has summed over the samples, or None.

    A sum over the samples has a multiple of their number of rows: 40 rows, for example, for 8
    samples of 5 tokens each. A sum over the 30 entries of a codebook is none over 8 samples.

    Args:
        node: the node of a loss in autograd's graph.
        num_rows: the number of samples that it was computed from.
    """
    nodes_to_visit: list[Any] = [node]
    num_visited = 0
    while nodes_to_visit and num_visited < MAX_TERMS:
        visited = nodes_to_visit.pop()
        num_visited += 1
        if visited is None:  # a term without a gradient
            continue

        num_summed = rows_summed_by_loss_function(visited)  # 0 if it is no sum
        sums_over_samples = num_summed > 0 and num_summed % num_rows == 0
        if sums_over_samples:
            return visited

        if visited.name() in NODES_THAT_KEEP_A_SUM:
            nodes_to_visit += [next_node for next_node, _ in visited.next_functions]
    return None


def _is_equal(divisor: float, number: int) -> bool:
    """Returns True if a divisor is a number, apart from rounding.

    `1 / (1 / 49)` is not quite 49.
    """
    return abs(divisor - number) < 1e-6 * number
