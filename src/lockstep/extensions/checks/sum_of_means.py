"""Warns if a script sums means of batches over all ranks, and divides by the batches of one rank.

`world.sum(total_loss) / len(test)`, where `total_loss` adds up the means of batches, is right on
one process. On N ranks, the sum covers the batches of all ranks, but `len(test)` is the number of
batches of one rank, so the result is N times too large. The values do not show this mistake, so the
source of the script is parsed (`sums_of_script`).
"""

from __future__ import annotations

import linecache
from collections.abc import Collection
from typing import Any

from lockstep.distributed.process_group import Run
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.extensions.checks.sums_of_script import divides_sum_by_length, numbers_in
from lockstep.optim.precision import Precision
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule
from lockstep.user_code import Location, user_location


class SumOfMeansCheck(Check):
    """Records the line of a sum after an evaluation, and parses the script some time later.

    The script is not parsed at once, because it may call `len` of the loader only after the sum.
    """

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._evaluations_at_last_sum = 0
        """How many evaluations over prepared loaders had ended when a sum was last recorded."""
        self._sum_location: Location | None = None
        """The line of the script with that sum; None after the script was parsed."""
        self._has_warned = False

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Parses the script if a sum was recorded before this step."""
        if self._sum_location is not None:
            self._warn_if_recorded_sum_is_wrong()

    def close(self, failed: bool) -> None:
        """Parses the script if a sum was recorded before the end of the run."""
        if not self.run.collectives.single_process and not failed and self.run.joined is not None:
            self._warn_if_recorded_sum_is_wrong()

    def summed(self, value: Any, total: Any) -> None:
        """Records the line of a sum if it may be a sum of means of batches."""
        if self._has_warned or self.run.collectives.single_process:
            return

        # After each evaluation, only the first sum of means is recorded.
        num_evaluations_ended = sum(loader.evaluated for loader in self.run.loaders)
        is_after_new_evaluation = num_evaluations_ended != self._evaluations_at_last_sum
        if not is_after_new_evaluation:
            return

        # Whole numbers are not means, but counts, for example of correct predictions.
        are_counts = all(number == int(number) for number in numbers_in(value))
        if are_counts:
            return

        # The sum of the previous evaluation is still recorded if there was no training step since.
        self._warn_if_recorded_sum_is_wrong()
        self._evaluations_at_last_sum = num_evaluations_ended
        self._sum_location = user_location()

    def _warn_if_recorded_sum_is_wrong(self) -> None:
        """Warns if the script divides the recorded sum by the length of a prepared loader.

        To find out what is done with the sum, the source of the script is parsed. Forgets the sum,
        so that each one is examined only once. Does nothing if none is recorded.
        """
        location = self._sum_location
        self._sum_location = None
        if location is None or self._has_warned or not self.run.topology.is_main:
            return

        size = self.run.collectives.data_parallel.size
        if size == 1:  # every loader has all batches
            return

        file, sum_line = location
        source = "".join(linecache.getlines(file))
        for loader in self.run.loaders:
            if loader.length_asked_at is None:  # the script has not called `len(loader)`
                continue

            # The line of the script that has called `len(loader)` last.
            length_file, length_line = loader.length_asked_at
            if length_file != file:
                continue
            if not divides_sum_by_length(source, sum_line, length_line):
                continue

            self._has_warned = True
            warn(
                "world.sum over all ranks, divided by len(loader)",
                found=f"len(loader) is {len(loader)}, the number of batches that one rank gets, "
                f"and {size} ranks have added theirs: a mean over batches comes out {size} times "
                "too large",
                do="add up what counts for each sample, total += loss.item() * len(x), and divide "
                "world.sum(total) by the number of samples",
                code="LS501",
                at=location,
            )
            return
