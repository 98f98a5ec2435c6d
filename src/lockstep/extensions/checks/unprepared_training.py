"""Warns if a script trains on a DataLoader that was not prepared.

Such a DataLoader gives every rank all samples. If its dataset is also that of a prepared loader,
the script most likely iterates the wrong one of the two: ranks would train on the same samples.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lockstep.distributed.process_group import Run
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.extensions.checks.unprepared_sum import UnpreparedSumCheck
from lockstep.optim.precision import Precision
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule


class UnpreparedTrainingCheck(Check):
    """Looks at which DataLoader was read last before a backward pass."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._has_warned = False
        # Unprepared loaders can be watched only once in a process, so two checks share it.
        sum_check: UnpreparedSumCheck | None = run.extensions.of_type(UnpreparedSumCheck)
        self._unprepared_loaders = None if sum_check is None else sum_check.unprepared_loaders

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Warns once if the loss is of an unprepared loader over the dataset of a prepared one."""
        if self._unprepared_loaders is None or self._has_warned:  # None on one process
            return

        # The dataset of the unprepared loader that is being read; None if there is none.
        dataset = self._unprepared_loaders.dataset_in_use
        loss_is_of_prepared_loader = self.run.step.in_training_loop
        if dataset is None or loss_is_of_prepared_loader:
            return

        # In a pipeline without data parallelism, all ranks need the same samples.
        all_need_same_samples = self.run.collectives.data_parallel.size == 1
        if all_need_same_samples:
            return

        # The script may itself have divided any other dataset between the ranks.
        is_of_prepared_loader = any(loader.dataset is dataset for loader in self.run.loaders)
        if not is_of_prepared_loader:
            return

        self._has_warned = True
        warn(
            "training over an unprepared DataLoader",
            found="its dataset is that of a prepared loader, but here every rank goes through all "
            "of it, and does not get its part of each global batch",
            do="iterate what world.prepare returned: model, optimizer, train = "
            "world.prepare(model, optimizer, train)",
            code="LS110",
        )
