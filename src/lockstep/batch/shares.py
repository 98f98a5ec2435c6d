"""Chooses shares and micro-batch sizes from measurements, for `shares="auto"` and the like.

*Shares* say how a global batch is divided over the ranks: one whole number for each rank, e.g. 1:2.
The *times* of a rank are several measurements of its seconds per sample, which all ranks make at
the same time.

`extensions.autotune` makes the measurements on a first micro-batch of the first global batch. The
rest of that global batch is then divided according to the result. This is possible because shares
and micro-batches only change how a global batch is computed, not what it contains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.batch.indices import Indices
from lockstep.batch.plan import part_sizes, split_batch, split_sizes
from lockstep.errors import SettingError
from lockstep.settings import check_micro_batch_size, is_auto, parse_shares

MIN_SPEEDUP = 1.08
"""Shares are only changed if a step gets this much faster: measurements always differ a little."""
MIN_TIMES = 5
MAX_TIMES = 20
STEADY_RATIO = 1.05
"""Measuring ends when the median time of every rank is at most this multiple of its shortest."""
NEARLY_IDEAL_RATIO = 1.02
"""The smallest whole numbers are chosen with which a step takes at most this multiple of the ideal
time."""
MAX_SUM_PER_RANK = 12
"""Whole numbers are tried up to this sum, times the number of ranks."""
SAMPLES_TO_MEASURE = 2
"""The number of samples on each rank in the micro-batch that is measured. It is small because it is
not known yet how many fit into memory, but sufficient for BatchNorm."""


def initial_shares(shares: str | Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Returns the shares with which a run begins, one for each rank.

    Args:
        shares: the setting of the user. With `"auto"`, shares are equal until they are measured.
        size: number of ranks.

    Raises:
        SettingError: the shares are invalid for this number of ranks.
    """
    return parse_shares(None if is_auto(shares) else shares, size)


def parse_micro_batch_size(value: Any) -> int | None:
    """Checks a micro-batch size, and returns it; returns None for None and `"auto"`.

    Raises:
        SettingError: the value is invalid.
    """
    if value is None or is_auto(value):
        return None
    check_micro_batch_size(value)
    size: int = value
    return size


def first_micro_batch(
    count: int,
    shares: tuple[int, ...],
    planned: Indices | None,
    max_samples_of_rank: int | None,
) -> Indices | None:
    """Returns the micro-batch of a global batch on which measurements are made.

    If none is planned, each rank with a share gets two samples: with the shares (1, 2, 0), the
    ranks get 2, 2 and 0, so the result is `[[[0, 2], [2, 4], [4, 4]]]`.

    Args:
        count: number of samples in the global batch.
        shares: share of each rank.
        planned: the planned micro-batches, of which the first one is taken: begin and end of each
            part, of shape `(micro-batches, ranks, 2)`, from `split_batch`. None to take two samples
            on each rank.
        max_samples_of_rank: the largest number of samples that a rank can compute at once; None if
            not limited.

    Returns:
        Begin and end of each rank's part, of shape `(1, ranks, 2)`. None if some rank with a share
        would have no sample.
    """
    if planned is not None:
        split = planned[:1]
    else:
        samples_of_rank = SAMPLES_TO_MEASURE
        if max_samples_of_rank:
            samples_of_rank = min(SAMPLES_TO_MEASURE, max_samples_of_rank)
        split = _same_number_on_each_rank(count, shares, samples_of_rank)

    sizes_of_ranks = split_sizes(split)[0]  # `split` has a single micro-batch
    for size, share in zip(sizes_of_ranks, shares, strict=True):
        if share > 0 and size == 0:
            return None

    return split


def _same_number_on_each_rank(count: int, shares: tuple[int, ...], samples_of_rank: int) -> Indices:
    """Returns a micro-batch in which each rank that has a share gets the same number of samples.

    Args:
        count: number of samples in the global batch. If it is too small, some ranks get fewer.
        shares: share of each rank.
        samples_of_rank: number of samples on each rank.

    Returns:
        Begin and end of each rank's part, of shape `(1, ranks, 2)`.
    """
    equal_shares = tuple(1 if share > 0 else 0 for share in shares)
    num_ranks_with_share = sum(equal_shares)
    num_samples = min(count, samples_of_rank * num_ranks_with_share)
    return split_batch(num_samples, equal_shares)


def largest_that_fits(fits: Callable[[int], bool], known: int, most: int) -> int:
    """Finds the largest size that fits, with a precision of about a tenth.

    The size is doubled until it does not fit; then a binary search finds the limit.

    Args:
        fits: function that tries a size, and returns True if it fits.
        known: a size that is known to fit.
        most: the largest size to try.
    """
    fitting = min(known, most)  # the largest size that is known to fit
    too_large: int | None = None  # the smallest size that is known not to fit

    # Double the size until one does not fit.
    while fitting < most and too_large is None:
        size = min(2 * fitting, most)
        if fits(size):
            fitting = size
        else:
            too_large = size

    if too_large is None:
        return fitting

    # Halve the range between the two until it is a tenth of what fits.
    while too_large - fitting > max(1, fitting // 10):
        size = (fitting + too_large) // 2
        if fits(size):
            fitting = size
        else:
            too_large = size

    return fitting


def times_are_sufficient(times: Sequence[Sequence[float]]) -> bool:
    """Returns True if shares can be chosen from the measured times, False to measure again.

    Args:
        times: for each rank, the same number of measurements of its seconds per sample.
    """
    num_times = len(times[0])
    if num_times >= MAX_TIMES:  # do not go on, however much they vary
        return True
    if num_times < MIN_TIMES:
        return False

    # They suffice if they are steady on every rank: half of them are close to the shortest.
    for times_of_rank in times:
        if np.median(times_of_rank) > STEADY_RATIO * min(times_of_rank):
            return False

    return True


def are_equally_fast(times: Sequence[Sequence[float]]) -> bool:
    """Returns True if the ranks differ no more than the measurements of a single rank vary.

    This holds if no rank's shortest time is longer than the median time of another rank.

    Args:
        times: for each rank, several measurements of its seconds per sample.
    """
    shortest = [min(times_of_rank) for times_of_rank in times]
    medians = [np.median(times_of_rank) for times_of_rank in times]
    return bool(max(shortest) <= min(medians))


def choose_shares_by_times(
    times: Sequence[Sequence[float]],
    present: tuple[int, ...],
    batch_size: int,
    limits: Sequence[int | None],
) -> tuple[int, ...]:
    """Chooses shares by the shortest time of each rank; equal shares if all are equally fast.

    The shortest time of a rank is used because other work on the machine can only make a
    measurement longer.

    Args:
        times: for each rank, several measurements of its seconds per sample.
        present: the current shares, which are kept unless others are much better.
        batch_size: number of samples in the global batch.
        limits: the largest number of samples that each rank can take; None if not limited.

    Raises:
        SettingError: the limits are too low for the batch.
    """
    if are_equally_fast(times):
        return _equal_shares_within(limits, batch_size)
    shortest = [min(times_of_rank) for times_of_rank in times]
    return choose_shares(shortest, present, batch_size, limits)


def _equal_shares_within(limits: Sequence[int | None], batch_size: int) -> tuple[int, ...]:
    """Returns equal shares, or if these do not fit into the limits, shares that do.

    Args:
        limits: the largest number of samples that each rank can take; None if not limited.
        batch_size: number of samples in the global batch.

    Raises:
        SettingError: the limits are too low for the batch.
    """
    # `choose_shares` keeps the present shares if they fit and no others are faster. Of ranks that
    # all take the same time, equal shares are the fastest.
    num_ranks = len(limits)
    return choose_shares(
        [1.0] * num_ranks, present=(1,) * num_ranks, batch_size=batch_size, limits=limits
    )


def confirm_shares(
    seconds: Mapping[tuple[int, ...], float], last: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the shares with which a search ends: new ones only if they are measurably faster.

    This is needed because seconds per sample can mislead: a device that takes nearly the same time
    for few samples as for many seems slower per sample the fewer it gets, and would get even fewer.

    Args:
        seconds: measured seconds of a step for all shares that were tried, in order; infinite if
            they do not fit into memory.
        last: the shares that were chosen after the last measurement. They may be untried.
    """
    # After each measurement the search chooses the shares to try next. For example, (1, 1) took 4
    # seconds and (2, 1) took 3. If the search then chooses (2, 1) again, it has converged. If it
    # chooses (3, 1), it has ended before these were tried: then the fastest that were tried are
    # taken.
    has_converged = last in seconds
    if has_converged:
        best = last
    else:
        best = min(seconds, key=seconds.__getitem__)

    # If not even the best shares fit into memory, take the last ones: untried ones may fit.
    best_fits_in_memory = seconds[best] < math.inf
    if not best_fits_in_memory:
        return last

    # Keep the shares with which the search began, unless others are measurably faster.
    initial = next(iter(seconds))  # the first key, as they were tried first
    is_measurably_faster = seconds[best] * MIN_SPEEDUP < seconds[initial]
    return best if is_measurably_faster else initial


def step_seconds(
    times: Sequence[Sequence[float]],
    shares: tuple[int, ...],
    batch_size: int,
    limits: Sequence[int | None],
) -> float:
    """Returns how long a step takes, in seconds: as long as on its slowest rank.

    The shortest of the measurements is used, because other work on the machine can only make a
    measurement longer.

    Args:
        times: for each rank, several measurements of its seconds per sample with these shares.
        shares: share of each rank.
        batch_size: number of samples in the global batch.
        limits: the largest number of samples that each rank can take; None if not limited. If a
            rank would get more, the result is infinite.
    """
    seconds_of_rank = []
    samples_of_rank = part_sizes(batch_size, shares)
    for samples, limit, times_of_rank in zip(samples_of_rank, limits, times, strict=True):
        if limit is not None and samples > limit:
            return math.inf
        seconds_of_rank.append(samples * min(times_of_rank))
    return max(seconds_of_rank)


def choose_shares(
    seconds: Sequence[float],
    present: tuple[int, ...],
    batch_size: int,
    limits: Sequence[int | None],
) -> tuple[int, ...]:
    """Chooses shares with small numbers, so that all ranks need nearly the same time.

    Args:
        seconds: seconds per sample of each rank.
        present: the current shares, which are kept unless others are much better.
        batch_size: number of samples in the global batch.
        limits: the largest number of samples that each rank can take; None if not limited.

    Raises:
        SettingError: the limits are too low for the batch.
    """
    # The largest number of samples that each rank can take.
    max_samples = [batch_size if limit is None else limit for limit in limits]
    if sum(max_samples) < batch_size:
        fitting = [f"{samples} on rank {rank}" for rank, samples in enumerate(max_samples)]
        raise SettingError(
            f"shares='auto' with a global batch of {batch_size}",
            f"fewer samples fit into memory: {', '.join(fitting)}",
            "set micro_batch_size='auto' too: the batch is then computed in micro-batches",
        )

    ideal = _ideal_division(seconds, max_samples, batch_size)
    step_seconds_by_shares: dict[tuple[int, ...], float] = {}
    for shares in _candidates(ideal, present, max_samples):
        sizes = part_sizes(batch_size, shares)  # samples of each rank
        fits = all(size <= most for size, most in zip(sizes, max_samples, strict=True))
        if fits:
            # A global batch of sum(shares) samples would take as long as its slowest rank, which
            # has as many samples as its share. This is scaled to `batch_size`.
            seconds_per_sample = _slowest(shares, seconds) / sum(shares)
            step_seconds_by_shares[shares] = seconds_per_sample * batch_size

    ideal_seconds = _slowest(ideal, seconds)

    # Keep the current shares if no others can be much faster. They are not in the table if they do
    # not fit into memory.
    present_seconds = step_seconds_by_shares.get(present, math.inf)
    if present_seconds <= ideal_seconds * MIN_SPEEDUP:
        return present

    # Otherwise take the first shares that are nearly ideal; the table begins with small numbers. If
    # there are none, take the fastest ones.
    for shares, seconds_of_step in step_seconds_by_shares.items():
        if seconds_of_step <= ideal_seconds * NEARLY_IDEAL_RATIO:
            return shares

    return min(step_seconds_by_shares, key=step_seconds_by_shares.__getitem__)


def _candidates(
    ideal: Sequence[float], present: tuple[int, ...], max_samples: Sequence[int]
) -> list[tuple[int, ...]]:
    """Returns the shares to choose from.

    They are the current shares, then shares near the ideal proportion, from small to large numbers,
    and last the shares with which every rank takes as many samples as it can.

    Args:
        ideal: number of samples of each rank with which all ranks need the same time.
        present: the current shares.
        max_samples: the largest number of samples that each rank can take.
    """
    num_ranks = len(present)
    candidates = [present]

    # Whole numbers nearly in the proportion of `ideal`, whose sum is about `total`. `parse_shares`
    # divides them by their common divisor: (2, 4) becomes (1, 2).
    lowest_total = num_ranks  # the share 1 for each rank
    for total in range(lowest_total, MAX_SUM_PER_RANK * num_ranks + 1):
        candidates.append(parse_shares(_rounded_division(ideal, total), num_ranks))

    # Shares in the proportion of `max_samples` always fit, even if none of the others do.
    candidates.append(parse_shares(max_samples, num_ranks))
    return candidates


def _slowest(samples: Sequence[float], seconds: Sequence[float]) -> float:
    """Returns the time of the slowest rank.

    Args:
        samples: number of samples of each rank.
        seconds: seconds per sample of each rank.
    """
    return max(count * s for count, s in zip(samples, seconds, strict=True))


def _ideal_division(
    seconds: Sequence[float], max_samples: Sequence[int], batch_size: int
) -> list[float]:
    """Returns fractional numbers of samples with which all ranks need the same time.

    A rank that cannot take its number gets `max_samples`. The rest is divided over the other ranks.

    Args:
        seconds: seconds per sample of each rank.
        max_samples: the largest number of samples that each rank can take.
        batch_size: number of samples in the global batch.
    """
    samples = [0.0] * len(max_samples)

    # Divide the batch over the open ranks in proportion to their speed. Ranks that would get more
    # than `max_samples` are filled and closed. Repeat with the rest of the batch and the other
    # ranks until no rank gets too much.
    open_ranks = set(range(len(max_samples)))
    remaining_samples = float(batch_size)
    while open_ranks:
        samples_per_second = sum(1 / seconds[rank] for rank in open_ranks)

        # A rank gets remaining_samples * (1 / seconds) / (sum of 1 / seconds over the open ranks).
        full_ranks = set()
        for rank in open_ranks:
            samples[rank] = remaining_samples / seconds[rank] / samples_per_second
            if samples[rank] > max_samples[rank]:
                full_ranks.add(rank)

        if not full_ranks:
            break
        for rank in full_ranks:
            samples[rank] = float(max_samples[rank])
        remaining_samples -= sum(samples[rank] for rank in full_ranks)
        open_ranks -= full_ranks

    return samples


def _rounded_division(ideal: Sequence[float], total: int) -> list[int]:
    """Returns whole numbers, one for each rank, nearly in the proportion of `ideal`.

    Each of them is at least 1. Their sum is `total`, unless raising small numbers to 1 has made it
    larger. For example, 1.0 : 2.6 and a total of 4 give `[1, 3]`: exactly they would be 1.11 and
    2.89, rounded down 1 and 2, and the missing 1 is added to the second.
    """
    exact = np.asarray(ideal) * total / sum(ideal)
    numbers = np.maximum(1, np.floor(exact)).astype(int)

    # Rounding down has made the sum too small. Add 1 to the number that is furthest below its exact
    # value, as often as needed. (If small numbers were raised to 1, the sum may already be `total`
    # or more. Then nothing is added.)
    num_missing = total - int(numbers.sum())
    for _ in range(num_missing):
        most_below = int(np.argmax(exact - numbers))
        numbers[most_below] += 1

    return [int(number) for number in numbers]
