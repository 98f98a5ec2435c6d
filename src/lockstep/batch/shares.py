"""What `shares="auto"` and `micro_batch_size="auto"` decide from measurements: pure functions.

The measuring is done by `extensions.autotune`, in the first global batch that is trained on. It can
be, because shares and micro-batches change how a global batch is computed and never what: the
loader hands out a first micro-batch, which is profiled, and the rest is divided by what was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.batch.plan import Indices, parse_shares, parts, split_batch
from lockstep.errors import SettingError
from lockstep.settings import is_auto

_WORTH = 1.08
"""Shares are changed where a step gets this much faster: two equal devices never measure alike."""
_FEWEST, _MOST = 5, 20
_STEADY = 1.05
"""Times are taken 5 times, and up to 20 times where one is usually more than 5 % above its best."""
_NEAR = 1.02
"""The smallest whole numbers are taken that come this near to the best division."""
_PARTS = 12
"""Whole numbers are tried up to this sum, times the number of ranks."""
_FIRST = 2
"""Samples a rank in the micro-batch that is profiled: what fits nowhere else, and enough for
BatchNorm."""


def first_shares(shares: str | Sequence[int] | None, size: int) -> tuple[int, ...]:
    """As `parse_shares`; equal ones for `"auto"`, until they are measured.

    Raises:
        SettingError: as there.
    """
    return parse_shares(None if is_auto(shares) else shares, size)


def parse_micro_batch(value: Any) -> int | None:
    """The number of samples, None for `"auto"`.

    Raises:
        SettingError: something else.
    """
    if value is None or is_auto(value):
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingError(
            f"micro_batch_size={value!r}",
            "a micro-batch holds a whole number of samples on each rank",
            "give the number of samples one device computes at a time, or 'auto', or leave it out",
        )
    return value


def first_micro_batch(
    count: int, shares: tuple[int, ...], planned: Indices, most: int | None, *, whole: bool
) -> Indices | None:
    """The part of a global batch that is handed out before everything is known.

    Args:
        count: samples of the global batch.
        shares: one a rank.
        planned: begin and end of each part, shape `(micro-batches, ranks, 2)`, as `split_batch`
            gives them.
        most: samples that a rank computes at a time; None: any number.
        whole: take the first micro-batch that is planned; else two samples a rank.

    Returns:
        Shape `(1, ranks, 2)`. None: some rank that has a share would have no sample of it.
    """
    if whole:
        first = planned[:1]
    else:
        ranks = tuple(int(share > 0) for share in shares)
        first = split_batch(min(count, min(_FIRST, most or _FIRST) * sum(ranks)), ranks)
    sizes = first[0, :, 1] - first[0, :, 0]
    return first if all(n or not share for n, share in zip(sizes, shares, strict=True)) else None


def largest_that_fits(fits: Callable[[int], bool], known: int, most: int) -> int:
    """The largest size that fits, to about a tenth: by doubling, then by halving what is between.

    Args:
        fits: tries a size.
        known: a size that fits.
        most: the largest that is wanted.

    Returns:
        `most` where that fits.
    """
    good, bad = min(known, most), most + 1
    while good < most and bad > most:
        size = min(2 * good, most)
        good, bad = (size, bad) if fits(size) else (good, size)
    while bad <= most and bad - good > max(1, good // 10):
        size = (good + bad) // 2
        good, bad = (size, bad) if fits(size) else (good, size)
    return good


def enough(times: Sequence[Sequence[float]]) -> bool:
    """Whether shares can be chosen from these times of each rank, or more have to be taken."""
    taken = len(times[0])
    steady = all(np.median(each) <= _STEADY * min(each) for each in times)
    return taken >= _MOST or (taken >= _FEWEST and steady)


def alike(times: Sequence[Sequence[float]]) -> bool:
    """Whether the spread of the times hides how the ranks differ, if they do.

    It does where each rank has been as fast at times as any other usually is: no shortest time is
    above the median of another rank.
    """
    return bool(max(map(min, times)) <= min(map(np.median, times)))


def shares_by_times(
    times: Sequence[Sequence[float]],
    present: tuple[int, ...],
    batch_size: int,
    limits: Sequence[int | None],
) -> tuple[int, ...]:
    """The shares by the shortest times; even ones, as far as these fit, where ranks are `alike`.

    What else runs on a machine makes a time longer and never shorter.

    Args:
        times: of each rank for a sample, taken by all ranks in the same moments.
        present: as in `choose_shares`, which raises SettingError.
        batch_size: likewise.
        limits: likewise.
    """
    if alike(times):
        even = (1,) * len(times)
        return choose_shares(even, even, batch_size, limits)
    return choose_shares([min(each) for each in times], present, batch_size, limits)


def confirmed(seconds: Mapping[tuple[int, ...], float], last: tuple[int, ...]) -> tuple[int, ...]:
    """The shares that a search ends with: what its times led to has to hold when it is measured.

    A device that needs nearly the same time for few samples as for many seems the slower for each
    of them the fewer it gets, and would be given fewer still.

    Args:
        seconds: of a step, by the shares that were tried, in their order; infinite: they do not
            fit.
        last: the shares that the last times led to.
    """
    first = next(iter(seconds))
    best = last if last in seconds else min(seconds, key=seconds.__getitem__)
    if seconds[best] == math.inf:
        return last
    return first if seconds[first] <= seconds[best] * _WORTH else best


def step_seconds(
    times: Sequence[Sequence[float]],
    shares: tuple[int, ...],
    batch_size: int,
    limits: Sequence[int | None],
) -> float:
    """What a step takes that waits for the slowest rank; infinite where the shares do not fit.

    Args:
        times: of each rank for a sample, measured at these shares.
        shares: one a rank.
        batch_size: samples of the global batch.
        limits: as in `choose_shares`.
    """
    of_rank = parts(batch_size, shares)
    if any(most is not None and n > most for n, most in zip(of_rank, limits, strict=True)):
        return math.inf
    return max(n * min(each) for n, each in zip(of_rank, times, strict=True))


def choose_shares(
    seconds: Sequence[float],
    present: tuple[int, ...],
    batch_size: int,
    limits: Sequence[int | None],
) -> tuple[int, ...]:
    """Small whole numbers with which all ranks need nearly the same time.

    Args:
        seconds: of each rank for a sample.
        present: the shares as they are; they stay where others are not worth the change.
        batch_size: samples of the global batch.
        limits: the most samples that each rank can take of it; None: any number.

    Raises:
        SettingError: the limits are too low for the batch.
    """
    room = [batch_size if limit is None else limit for limit in limits]
    if sum(room) < batch_size:
        raise SettingError(
            f"shares='auto' with a global batch of {batch_size}",
            "of it fit " + ", ".join(f"{n} on rank {r}" for r, n in enumerate(room)),
            "set micro_batch_size='auto' too: the batch is then computed in micro-batches",
        )
    ideal = _ideal(seconds, room, batch_size)
    ranks = len(present)
    tried = [present]
    for total in range(ranks, _PARTS * ranks + 1):
        tried.append(parse_shares(_whole_numbers(ideal, total), ranks))
    # What always fits, where small numbers do not: it divides the room that there is.
    tried.append(parse_shares(room, ranks))
    needed = {
        shares: max(n * s for n, s in zip(shares, seconds, strict=True)) / sum(shares) * batch_size
        for shares in tried
        if all(n <= most for n, most in zip(parts(batch_size, shares), room, strict=True))
    }
    best = max(n * s for n, s in zip(ideal, seconds, strict=True))
    if needed.get(present, math.inf) <= best * _WORTH:
        return present
    near = (shares for shares, time in needed.items() if time <= best * _NEAR)
    return next(near, min(needed, key=needed.__getitem__))


def _ideal(seconds: Sequence[float], room: Sequence[int], batch_size: int) -> list[float]:
    """Samples a rank, not whole ones, with which all that are not full need the same time."""
    found = [0.0] * len(room)
    free, left = set(range(len(room))), float(batch_size)
    while free:
        speed = sum(1 / seconds[r] for r in free)
        full = {r for r in free if left / seconds[r] / speed > room[r]}
        for rank in full or free:
            found[rank] = float(room[rank]) if full else left / seconds[rank] / speed
        left -= sum(found[rank] for rank in full)
        free -= full or free
    return found


def _whole_numbers(ideal: Sequence[float], total: int) -> list[int]:
    """`total` parts divided nearly as `ideal` is; at least one for each rank."""
    exact = np.asarray(ideal) * total / sum(ideal)
    numbers = np.maximum(1, np.floor(exact)).astype(int)
    for _ in range(total - int(numbers.sum())):
        numbers[int(np.argmax(exact - numbers))] += 1
    return [int(number) for number in numbers]
