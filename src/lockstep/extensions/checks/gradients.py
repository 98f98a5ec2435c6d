"""Raises an error if the script writes to gradients while that gives other results.

Between the micro-batches of a global batch the gradients are only partial sums, and under a loss
scaler (fp16) they are multiplied by its scale until the optimizer steps. Clipping them there gives
other numbers than clipping the gradient of the whole batch, and nothing shows it. So the check
remembers which gradients a backward pass has left, and how often each was written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.extensions.checks.base import Check
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import parameters_of
from lockstep.torch_compat import write_count, write_counts


class GradientRecord(NamedTuple):
    """The gradient of a parameter, as a backward pass has left it."""

    parameter: nn.Parameter
    gradient_id: int
    write_count: int
    """How often the gradient had been written to in place."""


class GradientVersionCheck(Check):
    """Compares gradients with what the latest backward pass has left in them."""

    _num_backwards_of_micro_batch = 0
    """How many backward passes the current micro-batch has had."""
    _records: Sequence[GradientRecord] = ()
    """The gradients as the latest backward pass has left them."""
    _parameters: Sequence[nn.Parameter] | None = None
    """The parameters of the prepared modules. To find them takes longer than the check itself, so
    they are found once in a pass."""

    def module_prepared(self, wrapped: Any) -> None:
        """Forgets the parameters, to which those of this module belong."""
        self._parameters = None

    def pass_ended(self) -> None:
        """Forgets the parameters: between two passes the script may replace some."""
        self._parameters = None

    def begin(self, micro_batch: MicroBatch) -> None:
        """Begins to count the backward passes of a new micro-batch from 0."""
        self._num_backwards_of_micro_batch = 0

    def after_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Records the gradients, if they are not yet those that the optimizer will use.

        They are not if later micro-batches will add to them, or if they are still scaled (fp16).

        Args:
            loss: not used.
            micro_batch: not used. With two loaders it may be a micro-batch of loader 0, while the
                gradients of the step are complete after a micro-batch of loader 1.
        """
        del loss, micro_batch
        self._num_backwards_of_micro_batch += 1

        micro_batch_of_step = self.run.step.micro_batch
        are_complete = micro_batch_of_step.closes_step
        are_scaled = self.precision.scaler is not None
        if are_complete and not are_scaled:
            return

        if self._parameters is None:
            self._parameters = self._find_parameters()
        parameters: list[nn.Parameter] = []
        gradients: list[Tensor] = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None:
                parameters.append(parameter)
                gradients.append(gradient)

        gradient_ids = [id(gradient) for gradient in gradients]
        self._records = list(map(GradientRecord, parameters, gradient_ids, write_counts(gradients)))

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
        compared for the first micro-batch of a global batch, which finds no earlier gradients.

        Args:
            loss: not used.
            micro_batch: not used; see `after_backward`.
        """
        del loss, micro_batch
        micro_batch_of_step = self.run.step.micro_batch
        has_earlier_micro_batch = not micro_batch_of_step.opens_step
        is_first_backward_of_micro_batch = self._num_backwards_of_micro_batch == 0
        if not (has_earlier_micro_batch and is_first_backward_of_micro_batch):
            return

        if any(_was_written_to(record) for record in self._records):
            raise UsageError(
                "gradients that are written to between the micro-batches of a global batch",
                "they are those of a part of it; clipped there, by torch's clip_grad_norm_ say, "
                "they add up to something else",
                "use world.clip_grad_norm_(model, max_norm); change gradients by hand only where "
                "loader.current.last",
                code="LS406",
            )

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Raises UsageError if gradients of this optimizer are still scaled and were written to.

        Under fp16, gradients are multiplied by a large scale until the optimizer steps. If they are
        clipped to a norm of 1 before, they are far too small afterwards.
        """
        are_scaled = self.precision.scales(optimizer)
        if not are_scaled:
            return

        # The records describe the gradients as the latest backward pass has left them.
        stepped_ids = {id(parameter) for parameter in parameters_of(optimizer)}
        for record in self._records:
            is_stepped = id(record.parameter) in stepped_ids
            if is_stepped and _was_written_to(record):
                raise UsageError(
                    "gradients that are written to before optimizer.step() under precision='fp16'",
                    "they are still multiplied by the scale of the loss, so that clip_grad_norm_ "
                    "of torch clips nearly all of them away",
                    "use world.clip_grad_norm_(model, max_norm); after it (max_norm=math.inf clips "
                    "nothing) they have their true size and may be changed",
                    code="LS406",
                )


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
