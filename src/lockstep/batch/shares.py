"""What `shares="auto"` and `micro_batch_size="auto"` decide from measurements: pure functions.

*Shares* say how a global batch is divided over the ranks, one whole number a rank. The *times* of a
rank are seconds for one sample, taken again and again by all ranks in the same moments.

`extensions.autotune` measures them in the first global batch that is trained on. It can do so
because shares and micro-batches change how a global batch is computed and never what: the loader
hands out a first micro-batch, which is measured, and the rest is divided by what was found.
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
"""Shares are changed if a step gets this much faster: two equal devices never measure alike."""
MIN_TIMES = 5
MAX_TIMES = 20
STEADY_RATIO = 1.05
"""No more times are taken if the median of every rank is at most this multiple of its shortest."""
NEARLY_IDEAL_RATIO = 1.02
"""The smallest whole numbers are taken with which a step takes at most this multiple of the ideal
time."""
MAX_SUM_PER_RANK = 12
"""Whole numbers are tried up to this sum, times the number of ranks."""
SAMPLES_TO_MEASURE = 2
"""Samples a rank in the micro-batch that is measured: few, because it is not known yet how many fit
into memory, and enough for BatchNorm."""


def initial_shares(shares: str | Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Returns the shares with which a run begins, one for each rank.

    Args:
        shares: as the user set them. For `"auto"` they are equal until they are measured.
        size: the number of ranks.

    Raises:
        SettingError: they are no shares for so many ranks.
    """
    return parse_shares(None if is_auto(shares) else shares, size)


def parse_micro_batch_size(value: Any) -> int | None:
    """Returns the number of samples; None for None and `"auto"`.

    Raises:
        SettingError: the value is something else.
    """
    if value is None or is_auto(value):
        return None
    check_micro_batch_size(value)
    size: int = value
    return size


def first_micro_batch(
    count: int, shares: tuple[int, ...], planned: Indices, most: int | None, *, whole: bool
) -> Indices | None:
    """Returns the part of a global batch that is handed out to be measured: one micro-batch.

    Args:
        count: samples of the global batch.
        shares: one a rank.
        planned: begin and end of each part, shape `(micro-batches, ranks, 2)`, as `split_batch`
            returns it.
        most: the most samples that a rank computes at a time; None: any number.
        whole: True to take the first micro-batch that is planned; False to take two samples a rank.

    Returns:
        Begin and end of each rank's part, shape `(1, ranks, 2)`; None: some rank that has a share
        would have no sample of it.
    """
    if whole:
        split = planned[:1]
    else:
        # The same number of samples on each rank that has a share.
        equal_shares = tuple(1 if share > 0 else 0 for share in shares)
        samples_of_rank = SAMPLES_TO_MEASURE
        if most:
            samples_of_rank = min(samples_of_rank, most)
        num_samples = min(count, samples_of_rank * sum(equal_shares))
        split = split_batch(num_samples, equal_shares)

    size_of_rank = split_sizes(split)[0]
    for size, share in zip(size_of_rank, shares, strict=True):
        if share > 0 and size == 0:
            return None

    return split


def largest_that_fits(fits: Callable[[int], bool], known: int, most: int) -> int:
    """Finds the largest size that fits, to about a tenth.

    Sizes are doubled until one does not fit; then what is in between is halved.

    Args:
        fits: tries a size.
        known: a size that fits.
        most: the largest size that is wanted.

    Returns:
        A size that fits: `most`, if that fits.
    """
    fitting = min(known, most)  # the largest size that is known to fit
    too_large = most + 1  # the smallest size that is known not to fit; so far there is none

    # Double the size until one does not fit.
    while fitting < most and too_large > most:
        size = min(2 * fitting, most)
        if fits(size):
            fitting = size
        else:
            too_large = size

    # If one did not fit, halve the range between the two, until it is a tenth of what fits.
    while too_large <= most and too_large - fitting > max(1, fitting // 10):
        size = (fitting + too_large) // 2
        if fits(size):
            fitting = size
        else:
            too_large = size

    return fitting


def times_are_sufficient(times: Sequence[Sequence[float]]) -> bool:
    """Returns True if shares can be chosen from these times of each rank.

    Otherwise more times have to be taken.

    Args:
        times: seconds for one sample, several for each rank; all ranks have equally many.
    """
    num_times = len(times[0])
    if num_times >= MAX_TIMES:  # enough, however much they differ
        return True
    if num_times < MIN_TIMES:
        return False

    # They are sufficient if they are steady on every rank: half of them near the shortest.
    for times_of_rank in times:
        if np.median(times_of_rank) > STEADY_RATIO * min(times_of_rank):
            return False

    return True


def are_equally_fast(times: Sequence[Sequence[float]]) -> bool:
    """Returns True if the ranks differ less than the times of one rank do.

    Then every rank has been as fast at times as any other rank usually is: no shortest time is
    longer than the median of another rank.

    Args:
        times: seconds for one sample, several for each rank.
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
    """Chooses shares by the shortest times; equal ones if the ranks are equally fast.

    The shortest times count, because whatever else runs on a machine makes a time longer and never
    shorter.

    Args:
        times: seconds for one sample, several for each rank.
        present: the current shares, which are kept unless others are much better.
        batch_size: samples of the global batch.
        limits: the most samples of it that each rank can take; None: any number.

    Raises:
        SettingError: the limits are too low for the batch.
    """
    if are_equally_fast(times):
        equal = (1,) * len(times)
        return choose_shares(equal, equal, batch_size, limits)
    shortest = [min(times_of_rank) for times_of_rank in times]
    return choose_shares(shortest, present, batch_size, limits)


def confirm_shares(
    seconds: Mapping[tuple[int, ...], float], last: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the shares with which a search ends: new ones only if they were measured as faster.

    A device that needs nearly the same time for few samples as for many seems slower for each of
    them the fewer it gets, and would be given fewer still.

    Args:
        seconds: of a step, for the shares that were tried, in their order; infinite if they do not
            fit into memory.
        last: the shares that the last times led to.
    """
    initial = next(iter(seconds))  # the shares with which the search began
    if last in seconds:  # the search is at its end: measuring these shares has led to them again
        best = last
    else:  # it was given up before
        best = min(seconds, key=seconds.__getitem__)

    if seconds[best] == math.inf:  # no shares that were tried fit into memory; `last` may fit
        return last
    if seconds[initial] <= seconds[best] * MIN_SPEEDUP:
        return initial

    return best


def step_seconds(
    times: Sequence[Sequence[float]],
    shares: tuple[int, ...],
    batch_size: int,
    limits: Sequence[int | None],
) -> float:
    """Returns the seconds of a step, which waits for the slowest rank.

    Args:
        times: seconds for one sample, several for each rank, measured at these shares.
        shares: one a rank.
        batch_size: samples of the global batch.
        limits: the most samples of it that each rank can take; None: any number. If some rank would
            get more, the result is infinite.
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
    """Returns small whole numbers with which all ranks need nearly the same time.

    Args:
        seconds: of each rank for a sample.
        present: the current shares, which are kept unless others are much better.
        batch_size: samples of the global batch.
        limits: the most samples of it that each rank can take; None: any number.

    Raises:
        SettingError: the limits are too low for the batch.
    """
    # The most samples that each rank can take.
    room = [batch_size if limit is None else limit for limit in limits]
    if sum(room) < batch_size:
        fitting = [f"{samples} on rank {rank}" for rank, samples in enumerate(room)]
        raise SettingError(
            f"shares='auto' with a global batch of {batch_size}",
            f"fewer samples fit into memory: {', '.join(fitting)}",
            "set micro_batch_size='auto' too: the batch is then computed in micro-batches",
        )

    ideal = _ideal_division(seconds, room, batch_size)
    step_seconds_by_shares: dict[tuple[int, ...], float] = {}
    for shares in _candidates(ideal, present, room):
        sizes = part_sizes(batch_size, shares)  # samples of each rank
        fits = all(size <= most for size, most in zip(sizes, room, strict=True))
        if fits:
            # A global batch of sum(shares) samples would take as long as its slowest rank, which
            # has as many samples as its share. This is scaled to `batch_size`.
            seconds_per_sample = _slowest(shares, seconds) / sum(shares)
            step_seconds_by_shares[shares] = seconds_per_sample * batch_size

    ideal_seconds = _slowest(ideal, seconds)

    # The current shares are kept if no others can be much faster. They are not in the table if they
    # do not fit into memory.
    present_seconds = step_seconds_by_shares.get(present, math.inf)
    if present_seconds <= ideal_seconds * MIN_SPEEDUP:
        return present

    # Otherwise the first shares that are nearly ideal are taken, since the table begins with those
    # of small numbers. If none are, the fastest ones are taken.
    for shares, seconds_of_step in step_seconds_by_shares.items():
        if seconds_of_step <= ideal_seconds * NEARLY_IDEAL_RATIO:
            return shares

    return min(step_seconds_by_shares, key=step_seconds_by_shares.__getitem__)


def _candidates(
    ideal: Sequence[float], present: tuple[int, ...], room: Sequence[int]
) -> list[tuple[int, ...]]:
    """Returns shares to choose from, those of small numbers first.

    Args:
        ideal: samples of each rank with which all need the same time.
        present: the current shares.
        room: the most samples that each rank can take. These numbers themselves are candidates,
            because shares in proportion to them always fit.
    """
    num_ranks = len(present)
    candidates = [present]

    # Whole numbers nearly in the proportion of `ideal`, whose sum is about `total`. `parse_shares`
    # divides them by their common divisor.
    for total in range(num_ranks, MAX_SUM_PER_RANK * num_ranks + 1):
        candidates.append(parse_shares(_rounded_division(ideal, total), num_ranks))
    candidates.append(parse_shares(room, num_ranks))
    return candidates


def _slowest(samples: Sequence[float], seconds: Sequence[float]) -> float:
    """Returns the time of the slowest rank.

    Args:
        samples: that each rank computes.
        seconds: of each rank for a sample.
    """
    return max(count * s for count, s in zip(samples, seconds, strict=True))


def _ideal_division(seconds: Sequence[float], room: Sequence[int], batch_size: int) -> list[float]:
    """Returns samples of each rank, as fractions, with which all ranks need the same time.

    Ranks that have no room for that many get what they have room for, and the others the rest.

    Args:
        seconds: of each rank for a sample.
        room: the most samples that each rank can take.
        batch_size: samples of the global batch.
    """
    samples = [0.0] * len(room)

    # The batch is divided over the open ranks, in proportion to their speeds. Ranks that would get
    # more than they have room for are filled and closed. What is left is divided anew over the
    # others, until no rank gets too much.
    open_ranks = set(range(len(room)))
    remaining_samples = float(batch_size)
    while open_ranks:
        samples_per_second = sum(1 / seconds[rank] for rank in open_ranks)

        # A rank gets remaining_samples * (1 / seconds) / (sum of 1 / seconds over the open ranks).
        full_ranks = set()
        for rank in open_ranks:
            samples[rank] = remaining_samples / seconds[rank] / samples_per_second
            if samples[rank] > room[rank]:
                full_ranks.add(rank)

        if not full_ranks:
            break
        for rank in full_ranks:
            samples[rank] = float(room[rank])
        remaining_samples -= sum(samples[rank] for rank in full_ranks)
        open_ranks -= full_ranks

    return samples


def _rounded_division(ideal: Sequence[float], total: int) -> list[int]:
    """Returns whole numbers, one for each rank, nearly in the proportion of `ideal`.

    Their sum is `total`. It may be larger, because each of them is at least 1.
    """
    exact = np.asarray(ideal) * total / sum(ideal)
    numbers = np.maximum(1, np.floor(exact)).astype(int)

    # What was lost by rounding down goes, one by one, to the rank that is furthest below its exact
    # number. If small numbers were raised to 1, the sum may have reached `total` already.
    for _ in range(total - int(numbers.sum())):
        most_below = int(np.argmax(exact - numbers))
        numbers[most_below] += 1

    return [int(number) for number in numbers]
