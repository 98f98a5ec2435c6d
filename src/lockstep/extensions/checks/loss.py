"""Can this loss be trained on? Asked before every backward pass, without stalling a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.distributed.torch_compat import own_part
from lockstep.errors import UsageError
from lockstep.extensions.checks.base import Check
from lockstep.session.micro_batch import MicroBatch


class LossCheck(Check):
    """Checks losses; on CUDA a NaN is reported one step late, because reading it would wait."""

    _pending: tuple[Tensor, torch.cuda.Event, int] | None = None
    """Whether a loss is NaN, when that has come from the GPU, and the step it is of."""

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Raises UsageError unless `loss` is a scalar tensor with a gradient and not NaN."""
        if not self.run.collectives.contributes:  # the loss is made of nothing, and is not used
            return
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"world.backward of a {type(loss).__name__}",
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
        # The mean over no samples, or over none that count, is NaN and is weighted with 0.
        if micro_batch.scale == 0.0:
            return
        if loss.is_cuda:
            self._look_back(loss)
            return
        value = loss.item()
        if value != value:  # NaN alone; asked of the number, which is faster than of the tensor
            self._complain(self.run.step.number + 1)

    def after_backward(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        """Raises UsageError where a loss of weight 0 has made gradients NaN."""
        present = micro_batch
        if present.scale != 0.0 or not self.run.collectives.contributes:
            return
        if self.precision.scaler is not None and not present.local_rows:
            return  # it sees to what is not finite on any rank
        if loss.isfinite().item() or not any(bool(g.isnan().any()) for g in self._gradients()):
            return
        if present.left_out and not present.local_rows:
            raise UsageError(
                "world.backward(loss) of a batch without rows",
                f"the collate function left out all {present.left_out} samples of this rank's "
                "part: the mean over nothing is NaN, and so are the gradients of parameters that "
                "it is multiplied with",
                "divide a sum by the number of rows, at least 1: .sum() / max(1, len(x))",
            )
        if not present.local_rows:
            raise UsageError(
                "world.backward(loss) on a rank without samples",
                f"it has none of the {present.global_samples} samples of this batch: the mean over "
                "nothing is NaN, and so are the gradients of parameters that it is multiplied with",
                "divide a sum by the number of samples, at least 1: .sum() / max(1, len(x)); or "
                "leave short batches out with drop_last=True",
            )
        raise UsageError(
            "world.backward(loss) of a micro-batch whose weight is 0",
            "the loss is NaN, a division by that 0, and so are its gradients",
            "divide by the number that counts, at least 1: .sum().clamp(min=1)",
        )

    def _gradients(self) -> Iterator[Tensor]:
        """What backward passes have left on this rank, in whatever form."""
        for wrapped in self.wrapped:
            for parameter in (*wrapped.module.parameters(), *wrapped.unsharded_parameters):
                if parameter.grad is not None:
                    # Of a shard this rank's part: what asks a DTensor waits for other ranks.
                    yield own_part(parameter.grad)

    def settle(self) -> None:
        """Waits for the last loss; raises UsageError where it was NaN."""
        pending, self._pending = self._pending, None
        if pending is not None:
            flag, copied, number = pending
            copied.synchronize()
            if flag.item():
                self._complain(number)

    def _look_back(self, loss: Tensor) -> None:
        if self._pending is not None and not self._pending[1].query():  # type: ignore[no-untyped-call]
            return  # still on its way: look at it another time rather than wait
        self.settle()
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(loss.detach().isnan().reshape(()), non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # On a model spread over several GPUs the loss is not on the present device.
        copied.record(torch.cuda.current_stream(loss.device))
        self._pending = (flag, copied, self.run.step.number + 1)

    def _complain(self, number: int) -> None:
        raise UsageError(
            "world.backward(loss)",
            f"the loss of step {number} is NaN on this rank",
            "look at the batch of this step, lower the learning rate, or clip the gradients "
            "(world.clip_grad_norm_)",
        )
