"""Raises an error for losses that cannot be trained on.

`World.backward` asks this check before and after every backward pass. Whether a loss on a GPU is
NaN is copied to the host in the background and looked at one step later, because reading it at once
would make the host wait for the GPU.

A loss has *weight 0* (`MicroBatch.scale`) if this rank has no samples of the micro-batch, or none
that count. Its mean is NaN then, which is right, as long as no gradient becomes NaN.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from lockstep.distributed.process_group import Run
from lockstep.errors import UsageError
from lockstep.extensions.checks.base import Check, LateValue
from lockstep.optim.precision import Precision
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule
from lockstep.torch_compat import to_local
from lockstep.wording import describe_type


class LossCheck(Check):
    """Checks losses; on CUDA a NaN is reported one step late."""

    def __init__(
        self, run: Run, precision: Precision, wrapped: Collection[PreparedModule] = ()
    ) -> None:
        super().__init__(run, precision, wrapped)
        self._is_nan = LateValue()

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Raises UsageError unless `loss` is a scalar tensor with a gradient and not NaN."""
        if not self.run.collectives.contributes:
            # In a pipeline only the last stage has the model's output. On the other ranks the
            # script computes its loss from a placeholder, and the loss is not used.
            return
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"world.backward of {describe_type(loss)}",
                "a loss is a tensor of one element",
                "pass the loss itself, not .item() of it or a tuple",
            )
        if loss.numel() != 1:
            raise UsageError(
                f"world.backward of a loss of shape {tuple(loss.shape)}",
                "exact weighting needs one number: the mean over this rank's samples",
                "take its .mean(), or leave reduction='none' out of the loss function",
            )
        if not loss.requires_grad:
            raise UsageError(
                "world.backward of a loss without gradient",
                "it does not depend on any parameter that is trained, or was computed under "
                "torch.no_grad()",
                "compute it from the output of the prepared model, with gradients enabled",
            )
        if loss.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "world.backward while a CUDA graph is captured",
                "a graph repeats kernels alone, and what Lockstep does on the host in each step "
                "(weights, averaging, checks) would be left out of it",
                "capture the forward pass alone: torch.compile(model, mode='reduce-overhead')",
            )

        # The mean over no samples, or over none that count, is NaN and is weighted with 0.
        if micro_batch.scale == 0.0:
            return
        if loss.is_cuda:
            self._look_later(loss)
            return

        value = loss.item()
        if value != value:  # only NaN differs from itself; faster than `loss.isnan()`
            self._raise_nan(self.run.step.number + 1)

    def after_backward(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Raises UsageError if a NaN loss of weight 0 has made gradients NaN.

        Such a loss is multiplied by 0 before the backward pass, but 0 * NaN is NaN. There are two
        cases, with different errors:

        - This rank has no rows of the micro-batch: the loss is a mean over nothing.
        - It has rows, but none that counts, such as tokens that are all masked: the script divides
          by 0.
        """
        if not self._must_look_at_gradients(micro_batch):
            return
        if loss.isfinite().item():  # then no gradient need be looked at
            return

        # A NaN loss need not make gradients NaN: in `loss + penalty.detach()`, the NaN may be in
        # the penalty, which has no gradient.
        if self._has_nan_gradient():
            raise _nan_gradients_error(micro_batch)

    def _must_look_at_gradients(self, micro_batch: MicroBatch) -> bool:
        """Returns True if a NaN loss of this micro-batch may be an error that is not reported yet.

        That is only so for a loss of weight 0, which `before_backward` does not look at.
        """
        has_weight = micro_batch.scale != 0.0
        if has_weight:
            return False  # `before_backward` has reported a NaN loss

        is_earlier_stage = not self.run.collectives.contributes
        if is_earlier_stage:
            return False  # in a pipeline, only the last stage has the loss

        # All labels of these rows are masked, for example, and the script has divided by the number
        # of those that count, 0. That is an error of the script.
        has_rows = bool(micro_batch.local_rows)
        if has_rows:
            return True

        # Without rows, the loss is a mean over nothing. That does no harm if a loss scaler (fp16)
        # skips each step in which gradients of any rank are not finite.
        has_scaler = self.precision.scaler is not None
        return not has_scaler

    def _has_nan_gradient(self) -> bool:
        """Returns True if a gradient on this rank has a NaN; waits for each device once."""
        flags_of_device: dict[torch.device, list[Tensor]] = {}
        for gradient in self._gradients():
            flags_of_device.setdefault(gradient.device, []).append(gradient.isnan().any())
        return any(bool(torch.stack(flags).any()) for flags in flags_of_device.values())

    def _gradients(self) -> Iterator[Tensor]:
        """Yields the gradients on this rank; of a sharded one (DTensor) this rank's part."""
        for wrapped in self.wrapped:
            for parameter in (*wrapped.module.parameters(), *wrapped.unsharded_parameters):
                if parameter.grad is not None:
                    # `isnan().any()` of a whole DTensor would wait for other ranks.
                    yield to_local(parameter.grad)

    def settle(self) -> None:
        """Waits until the pending loss has arrived, and raises UsageError if it is NaN."""
        self._look_at_earlier_loss(wait=True)

    def _look_later(self, loss: Tensor) -> None:
        """Looks at an earlier loss and makes this one pending.

        If the earlier one has not arrived yet, this loss is skipped. Its NaN would still be found:
        it makes the parameters NaN, and with them all later losses.

        Raises:
            UsageError: the earlier loss is NaN.
        """
        self._look_at_earlier_loss()
        if self._is_nan.is_pending:
            return
        step_of_loss = self.run.step.number + 1  # `number` counts the steps that are finished
        self._is_nan.put(loss.detach().isnan(), step_of_loss)

    def _look_at_earlier_loss(self, *, wait: bool = False) -> None:
        """Raises UsageError if an earlier loss has arrived and is NaN.

        Args:
            wait: True to wait until it has arrived.
        """
        late = self._is_nan.take(wait=wait)
        if late is None:
            return

        is_nan, step_number = late
        if is_nan:
            self._raise_nan(step_number)

    def _raise_nan(self, step_number: int) -> NoReturn:
        raise UsageError(
            "world.backward(loss)",
            f"the loss of step {step_number} is NaN on this rank",
            "look at the batch of this step, lower the learning rate, or clip the gradients "
            "(world.clip_grad_norm_)",
        )


def _nan_gradients_error(micro_batch: MicroBatch) -> UsageError:
    """Returns the error of a micro-batch of weight 0 whose NaN loss has made gradients NaN."""
    has_rows = bool(micro_batch.local_rows)
    if has_rows:  # but none that count, such as tokens that are all masked
        return UsageError(
            "world.backward(loss) of a micro-batch whose weight is 0",
            "the loss is NaN, because it was divided by that 0, and so are its gradients",
            "divide by the number that counts, at least 1: .sum().clamp(min=1)",
        )
    if micro_batch.left_out:
        return UsageError(
            "world.backward(loss) of a batch without rows",
            f"the collate function left out all {micro_batch.left_out} samples of this rank's "
            "part: the mean over nothing is NaN, and so are the gradients of parameters that "
            "it is multiplied with",
            "divide a sum by the number of rows, at least 1: .sum() / max(1, len(x))",
        )
    if micro_batch.num_micro_batches > 1:  # this rank may have samples in others of them
        return UsageError(
            "world.backward(loss) on a rank without samples",
            "it has no samples in this micro-batch: the mean over nothing is NaN, and so are the "
            "gradients of parameters that it is multiplied with",
            "divide a sum by the number of samples, at least 1: .sum() / max(1, len(x))",
        )
    return UsageError(
        "world.backward(loss) on a rank without samples",
        f"it has none of the {micro_batch.global_samples} samples of this batch: the mean "
        "over nothing is NaN, and so are the gradients of parameters that it is multiplied "
        "with",
        "divide a sum by the number of samples, at least 1: .sum() / max(1, len(x)); or "
        "leave short batches out with drop_last=True",
    )
