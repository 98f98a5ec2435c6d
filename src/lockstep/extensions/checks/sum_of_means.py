"""Warns if means of batches are summed over the ranks and divided by the batches of one rank.

`world.sum(total_loss) / len(test)`, where `total_loss` adds up the means of batches, is right on
one process. On N ranks the sum has the batches of all ranks, but `len(test)` is the number of
batches of one rank, so the result is N times too large. The values do not show it, so the script's
own source is read (`mean_of_batches`).
"""

from __future__ import annotations

import linecache
from collections.abc import Collection, Sequence
from typing import Any

from lockstep.distributed.process_group import Run
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.extensions.checks.mean_of_batches import divides_sum_by_length
from lockstep.extensions.checks.summed_numbers import numbers_in
from lockstep.optim.precision import Precision
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule
from lockstep.user_code import Location, user_call, user_location


class SumOfMeansCheck(Check):
    """Remembers the line of a sum after an evaluation, and reads the script some time later.

    It reads later because the script may ask for the length of a loader only after the sum.
    """

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._evaluations_before = 0
        """Evaluations over prepared loaders that had ended when a sum was last remembered."""
        self._sum_location: Location | None = None
        """The line of the script with that sum. None once the script was read."""
        self._has_warned = False
        if not run.collectives.single_process:
            run.collectives.sum_listeners.append(self._look_at_sum)

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Reads the script, if there was a sum before this step."""
        if self._sum_location is not None:
            self._read_script()

    def close(self, failed: bool) -> None:
        """Reads the script, if there was a sum before the end."""
        if not self.run.collectives.single_process and not failed and self.run.joined is not None:
            self._read_script()

    def _look_at_sum(self, local_leaves: Sequence[Any], summed_leaves: Sequence[Any]) -> None:
        """Remembers the line of a sum if it may be a sum of means of batches.

        Called after every sum over the ranks, on all ranks.

        Args:
            local_leaves: the tensors and numbers that this rank has given to the sum.
            summed_leaves: the sums.
        """
        num_evaluations = sum(loader.evaluated for loader in self.run.loaders)
        if self._has_warned or num_evaluations == self._evaluations_before:
            return  # no evaluation has ended since the sum that is remembered
        are_counts = all(number == int(number) for number in numbers_in(local_leaves))
        if are_counts:
            return  # whole numbers are counts, such as correct predictions, and no means
        if user_call() != "world.sum()":
            return  # Lockstep itself sums, inside another function that the script has called
        self._read_script()  # for the previous sum, which is forgotten now
        self._evaluations_before = num_evaluations
        self._sum_location = user_location()

    def _read_script(self) -> None:
        """Warns if the script divides the remembered sum by the length of a prepared loader.

        Afterwards no sum is remembered.
        """
        location = self._sum_location
        self._sum_location = None
        if location is None or self._has_warned or not self.run.topology.is_main:
            return
        size = self.run.collectives.data_parallel.size
        if size == 1:
            return  # every loader has all batches
        file, sum_line = location
        source = "".join(linecache.getlines(file))
        for loader in self.run.loaders:
            if loader.length_asked_at is None:
                continue
            length_file, length_line = loader.length_asked_at
            if length_file != file:
                continue
            if not divides_sum_by_length(source, sum_line, length_line):
                continue
            self._has_warned = True
            warn(
                "world.sum over all ranks, divided by len(loader)",
                f"len(loader) is {len(loader)}, the number of batches that one rank gets, and "
                f"{size} ranks have added theirs: a mean over batches comes out {size} times too "
                "large",
                "add up what counts for each sample, total += loss.item() * len(x), and divide "
                "world.sum(total) by the number of samples",
                code="LS501",
                at=location,
            )
            return
