"""Warns if a sum over the ranks counts every sample once per rank.

A DataLoader that was not prepared gives every rank all samples. If each rank evaluates over it and
the results are summed over the ranks, every sample counts as often as there are ranks: the sum is
*doubtful*. It is right after all if the script divides it by the number of ranks, or by the sum of
the numbers of samples. It is only a warning, because a script may mean it.

The ranks have read the same samples if the checksums of their passes are equal. The checksum is a
part of the digest that ranks compare in every collective.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from lockstep.batch.unprepared import ReadPass, UnpreparedLoaders
from lockstep.distributed.process_group import Run
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.extensions.checks.sums_of_script import (
    divides_sum_by_number,
    lines_mention_number_of_ranks,
    numbers_in,
)
from lockstep.optim.precision import Precision
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule
from lockstep.user_code import Location, user_location

MAX_LINES_AFTER_SUM = 6
"""A script is read this far from a sum on, to see if it divides by the number of ranks."""


class DoubtfulSum(NamedTuple):
    """A sum over the ranks that seems to count every sample once per rank."""

    samples: int
    """How many samples every rank has read."""
    local_value: float
    """The number that this rank has given to the sum."""
    total: float
    """The sum over the ranks."""
    location: Location | None
    """The line of the script that has summed."""


class UnpreparedSumCheck(Check):
    """Looks at sums over the ranks that follow a pass over an unprepared loader.

    A doubtful sum is not reported at once: what the script does next may explain it. The check
    warns when something else begins, such as a training step, another pass, or the end of the run.

    The methods with `history` or `histories` in their names are called by the collectives of the
    run (`distributed.collectives.RankHistory`). They compare whether the ranks have read the same.
    """

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._latest_pass: ReadPass | None = None
        """The latest pass over an unprepared loader, until something else is trained or read."""
        self._passes_begun_before = 0
        """How many passes over prepared loaders had begun when that pass ended."""
        self._has_summed_sample_counts = False
        """True if the script also sums the number of samples. Then it divides one sum by the other,
        and the quotient is right."""
        self._doubtful_sum: DoubtfulSum | None = None
        """The first doubtful sum since the latest pass."""
        self._has_warned = False
        self.unprepared_loaders: UnpreparedLoaders | None = None
        """Watches all DataLoaders that are not prepared. None on one process."""
        if not run.collectives.single_process:
            run.collectives.rank_histories.append(self)
            self.unprepared_loaders = UnpreparedLoaders(self._remember_pass)

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Warns of a doubtful sum after the evaluation before this training step."""
        if self._latest_pass is not None:
            self._forget_pass_and_warn()

    def close(self, failed: bool) -> None:
        """Stops watching DataLoaders, and warns of a doubtful sum after the last evaluation."""
        if self.unprepared_loaders is None:
            return
        self.unprepared_loaders.release()
        if not failed and self.run.joined is not None:
            self._forget_pass_and_warn()

    def history_digest(self) -> ReadPass | None:
        """Returns the latest pass over an unprepared loader, or None.

        If a pass over a prepared loader has begun since, the latest pass is forgotten first, and a
        doubtful sum after it is warned of.
        """
        other_pass_has_begun = self._passes_begun_before != self._count_passes_begun()
        if self._latest_pass is not None and other_pass_has_begun:
            self._forget_pass_and_warn()
        return self._latest_pass

    def history_details(self) -> ReadPass | None:
        """Returns the same as `history_digest`."""
        return self.history_digest()

    def compare_histories(self, details_of_ranks: Sequence[Any]) -> None:
        """Forgets the latest pass if ranks have read different samples: none is counted twice.

        Args:
            details_of_ranks: for each rank the number of samples and the checksum of its latest
                pass in a list, or None if it has none.
        """
        if any(read_pass != details_of_ranks[0] for read_pass in details_of_ranks):
            self._latest_pass = None

    def _remember_pass(self, read_pass: ReadPass) -> None:
        """Remembers a pass over an unprepared loader that has just ended, in place of the latest.

        Warns of a doubtful sum after the pass before.
        """
        self._forget_pass_and_warn()
        self._latest_pass = read_pass
        self._passes_begun_before = self._count_passes_begun()

    def _count_passes_begun(self) -> int:
        """Returns how many passes over prepared loaders this rank has begun."""
        return sum(loader.passes_begun for loader in self.run.loaders)

    def _forget_pass_and_warn(self) -> None:
        """Forgets the latest pass over an unprepared loader, and what was summed after it.

        If one of these sums was doubtful, this warns of it, once in a run.
        """
        doubtful_sum = self._doubtful_sum
        self._latest_pass = None
        self._doubtful_sum = None
        self._has_summed_sample_counts = False
        if doubtful_sum is not None and not self._has_warned:
            self._warn_of(doubtful_sum)

    def _warn_of(self, doubtful_sum: DoubtfulSum) -> None:
        """Warns that a sum seems to count every sample once per rank."""
        self._has_warned = True
        size = self.run.collectives.data_parallel.size
        warn(
            "world.sum of what every rank computed over an unprepared DataLoader",
            found=f"every rank went through the same {doubtful_sum.samples} samples; this rank "
            f"brought {doubtful_sum.local_value:g}, and the sum {doubtful_sum.total:g} counts each "
            f"sample {size} times",
            do="prepare the loader (test = world.prepare(test)), so that each rank gets its part; "
            "or leave world.sum out where every rank evaluates them all",
            code="LS501",
            at=doubtful_sum.location,
        )

    def summed(self, value: Any, total: Any) -> None:
        """Remembers a doubtful sum in `_doubtful_sum`.

        For example, each of 2 ranks has read the same 100 samples, of which 80 are classified
        correctly:

        - `world.sum(80)` is 160. This sum is doubtful, as every sample counts twice.
        - `world.sum(100)` is 200. The script also sums the number of samples, so it computes
          160 / 200, which is right. Then no sum after this pass is doubtful. But if the script sums
          both and divides by the number itself, `world.sum((80, 100))[0] / 100`, it is wrong.

        Args:
            value: the nest of tensors and numbers that this rank has given to the sum.
            total: the sum over the ranks, a nest like `value`.
        """
        # The latest pass over an unprepared loader. At the beginning of `world.sum`,
        # `compare_histories` sets it to None if each rank has read different samples.
        latest_pass = self._latest_pass
        size = self.run.collectives.data_parallel.size
        if latest_pass is None or size == 1 or self._has_warned:
            return

        numbers = list(zip(numbers_in(value), numbers_in(total), strict=True))
        num_samples = latest_pass.samples
        is_quotient_of_sums = _sums_sample_count(numbers, num_samples)
        if is_quotient_of_sums and not _divides_by_own_count(numbers, num_samples):
            self._has_summed_sample_counts = True
            self._doubtful_sum = None
            return

        # Only the first doubtful sum of a pass is remembered.
        if not self._has_summed_sample_counts and self._doubtful_sum is None:
            self._doubtful_sum = _find_doubtful_sum(numbers, num_samples, size)


def _sums_sample_count(numbers: Sequence[tuple[float, float]], num_samples: int) -> bool:
    """Returns True if one of these numbers is the number of samples.

    If 2 ranks have read the same 100 samples, `world.sum(100)` gets this number from each rank.
    `world.sum(50)`, for half of the samples on each rank, returns it.

    Args:
        numbers: what this rank has given to a sum, each with the sum over the ranks.
        num_samples: how many samples every rank has read.
    """
    return any(num_samples in (local_value, total) for local_value, total in numbers)


def _find_doubtful_sum(
    numbers: Sequence[tuple[float, float]], num_samples: int, size: int
) -> DoubtfulSum | None:
    """Returns the first number that seems to count every sample once per rank, or None.

    Args:
        numbers: what this rank has given to a sum, each with the sum over the ranks.
        num_samples: how many samples every rank has read.
        size: the number of ranks.
    """
    for local_value, total in numbers:
        if counts_repeatedly(local_value, total, size, num_samples):
            location = user_location()
            if not _mentions_number_of_ranks(location):
                return DoubtfulSum(num_samples, local_value, total, location)
    return None


def counts_repeatedly(local_value: float, total: float, size: int, samples: int) -> bool:
    """Returns True if a sum seems to count the result of a sample several times.

    All ranks have read the same samples before the sum.

    Args:
        local_value: the number that this rank has given, which is finite.
        total: the sum over the ranks.
        size: the number of ranks.
        samples: how many samples every rank has read.
    """
    if local_value in (0, 1):
        return False  # more likely a vote, such as "is any rank done?"
    if math.isclose(total, size * local_value, rel_tol=1e-6):
        return True  # every rank has given the same number

    # A whole number may be the number of correct predictions. If their sum exceeds the number of
    # samples, some were counted on several ranks.
    may_be_count = local_value > 0 and local_value == int(local_value)
    return may_be_count and total > samples


def _divides_by_own_count(numbers: Sequence[tuple[float, float]], num_samples: int) -> bool:
    """Returns True if the script divides a sum by the samples of one rank, not by their sum.

    Each of 2 ranks has counted 100 samples, of which 80 are correct. The script sums both numbers,
    but divides by a number that it spells out: `world.sum((80, 100))[0] / 100` is 1.6.

    Args:
        numbers: what this rank has given to the sum, each with the sum over the ranks.
        num_samples: how many samples every rank has read.
    """
    rank_has_counted_all = any(local_value == num_samples for local_value, _ in numbers)
    location = user_location()
    if location is None or not rank_has_counted_all:
        return False
    file, sum_line = location
    source = "".join(linecache.getlines(file))
    return divides_sum_by_number(source, sum_line, MAX_LINES_AFTER_SUM, num_samples)


def _mentions_number_of_ranks(location: Location | None) -> bool:
    """Returns True if the script has the number of ranks in a line, or soon after it.

    Then it seems to divide by that number. It also returns True if the line is not known, so that
    the check does not warn without reason.
    """
    if location is None:
        return True
    file, first_line = location
    source = "".join(linecache.getlines(file))
    return lines_mention_number_of_ranks(source, first_line, MAX_LINES_AFTER_SUM)
