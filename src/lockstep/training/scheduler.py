"""Schedulers of learning rates that step once per global batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.distributed.collectives import Collectives, check_same_metric
from lockstep.session.step import Step
from lockstep.training.optimizer import DelegatesToInner, PreparedOptimizer


class PreparedScheduler(DelegatesToInner, LRScheduler):
    """The user's scheduler, which steps once per global batch, or once per epoch.

    Args:
        inner: the user's scheduler.
        prepared_optimizer: the prepared optimizer whose learning rate it sets.
        step: the state of the current optimizer step.
        collectives: the collectives of the run.
    """

    def __init__(
        self,
        inner: LRScheduler,
        prepared_optimizer: PreparedOptimizer,
        step: Step,
        collectives: Collectives,
    ) -> None:
        self.inner = inner
        self.prepared_optimizer = prepared_optimizer
        self._step = step
        self._collectives = collectives
        self.num_steps = 0
        """How often the inner scheduler has stepped. Not every scheduler has torch's `last_epoch`:
        ChainedScheduler does not."""
        prepared_optimizer.has_prepared_scheduler = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps after the last micro-batch of a global batch; does nothing in earlier ones.

        If the loss scaler has skipped the optimizer's step for this global batch, the scheduler
        does not step either.

        Raises:
            RanksDifferError: ReduceLROnPlateau was given a metric that differs between ranks.
        """
        # After the loop, the micro-batch counts as a last one.
        is_within_global_batch = not self._step.micro_batch.last
        if is_within_global_batch:
            return

        # A call in the loop is for the present global batch. A call after the loop is for the whole
        # epoch, and then it does not matter whether the optimizer's last step was skipped.
        is_for_global_batch = self._step.in_training_loop
        if is_for_global_batch and self.prepared_optimizer.skipped:
            return

        if isinstance(self.inner, ReduceLROnPlateau):
            self._check_metric(*args, **kwargs)
        self.inner.step(*args, **kwargs)
        self.num_steps += 1

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Returns the learning rate of each parameter group."""
        return self.inner.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Returns the inner scheduler's state."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state into the inner scheduler."""
        self.inner.load_state_dict(state_dict)

    def _check_metric(self, metrics: Any, *_: Any, **__: Any) -> None:
        """Raises RanksDifferError if the metric that `step` was given differs between ranks.

        With different metrics, ranks would lower the learning rate at different times.
        """
        values = self._collectives.exchange(repr(float(metrics)))
        check_same_metric("ReduceLROnPlateau.step(metric)", values, "LS402")
