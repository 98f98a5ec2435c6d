"""The global batch: which samples form it, and who computes which of them.

Two pure functions carry all of Lockstep's promises about data:

1. `plan_epoch(length, batch_size, seed=, epoch=, ...)` cuts an epoch into global batches. It knows
   nothing of devices, so the order of samples cannot depend on them.
2. `split_batch(count, shares, micro_batches)` cuts one global batch into micro-batches and ranks.
   It knows nothing of the data.

A global batch is laid out as consecutive micro-batches, and each micro-batch as consecutive parts
of the ranks. The micro-batches hold the same samples on any number of ranks, which is what makes
BatchNorm, whose statistics are those of a micro-batch, independent of that number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError, SettingError
from lockstep.settings import is_whole_number
from lockstep.wording import count_noun

Indices = npt.NDArray[np.int64]
IntOrArray = TypeVar("IntOrArray", int, Indices)
Words = npt.NDArray[np.uint64]

_AT_ONCE = 2**14
"""Indices that are computed at a time; the order of no more samples than these is drawn whole."""
_ROUNDS = 6
_GAMMA, _MIX_1, _MIX_2, _30, _27, _31, _32 = map(
    np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 30, 27, 31, 32)
)
"""Of SplitMix64, and the half of a word."""


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The global batches of one epoch: `plan[t]` holds the sample indices of batch t, in order."""

    samples: int
    """Used in the epoch."""
    batch_size: int
    read: Callable[[int, int], Indices]
    """The sample indices from one place of the order on, to before another."""

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def __getitem__(self, step: int) -> Indices:
        if not 0 <= step < len(self):
            raise IndexError(step)
        begin = step * self.batch_size
        return self.read(begin, min(begin + self.batch_size, self.samples))

    def batches(self, start: int = 0) -> Iterator[Indices]:
        """The global batches from one on; the indices of several are computed together."""
        span = max(1, _AT_ONCE // self.batch_size) * self.batch_size
        for begin in range(start * self.batch_size, self.samples, span):
            indices = self.read(begin, min(begin + span, self.samples))
            for at in range(0, len(indices), self.batch_size):
                yield indices[at : at + self.batch_size]

    def sizes(self, start: int = 0) -> set[int]:
        """How large the global batches from one on are."""
        full, rest = divmod(self.left(start), self.batch_size)
        return {size for size in (full and self.batch_size, rest) if size}

    def left(self, start: int) -> int:
        """Samples of the global batches from one on."""
        return max(0, self.samples - start * self.batch_size)


@dataclass(frozen=True, eq=False)
class CustomPlan:
    """The global batches of one epoch, as an `EpochPlan`, in an order of the user's own."""

    order: Indices
    """Sample indices, shape `(samples used in the epoch,)`."""
    bounds: Indices
    """Where the batches begin and end in `order`, shape `(steps + 1,)`."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, step: int) -> Indices:
        if not 0 <= step < len(self):
            raise IndexError(step)
        return self.order[self.bounds[step] : self.bounds[step + 1]]

    def batches(self, start: int = 0) -> Iterator[Indices]:
        """The global batches from one on."""
        return (self[step] for step in range(start, len(self)))

    def sizes(self, start: int = 0) -> set[int]:
        """How large the global batches from one on are."""
        return set(np.diff(self.bounds[start:]).tolist())

    def left(self, start: int) -> int:
        """Samples of the global batches from one on."""
        return int(self.bounds[-1] - self.bounds[start])


Plan = EpochPlan | CustomPlan


def plan_epoch(
    length: int,
    batch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
) -> EpochPlan:
    """The global batches of one epoch, from nothing but its arguments.

    The order of a large dataset is never drawn as a whole: time and memory do not depend on its
    length.

    Args:
        length: samples in the dataset, up to `sys.maxsize`.
        batch_size: samples in a global batch; the last one is shorter when it does not divide
            `length`, or left out with `drop_last`.
        seed: of the run.
        epoch: counted from 0; every epoch has an order of its own.
        shuffle: False keeps the dataset's order.
        drop_last: leave out a last batch that is not full.

    Raises:
        DataError: `batch_size` or `length` is out of range.
    """
    check_batch_size(batch_size)
    if length < 0:
        raise DataError(f"a dataset of length {length}", "a length is at least 0", "fix __len__")
    used = length - length % batch_size if drop_last else length
    if not shuffle:
        return EpochPlan(used, batch_size, partial(np.arange, dtype=np.int64))
    if not permutes(length):
        order = shuffled(length, seed=seed, epoch=epoch)
        return EpochPlan(used, batch_size, lambda begin, end: order[begin:end])
    keys = _words(seed, epoch, _ROUNDS)
    return EpochPlan(used, batch_size, lambda begin, end: permuted(begin, end, length, keys))


def cut(order: Indices, batch_size: int, *, drop_last: bool) -> CustomPlan:
    """Consecutive global batches of a given order."""
    steps = batches_in_epoch(len(order), batch_size, drop_last=drop_last)
    bounds = np.minimum(np.arange(steps + 1, dtype=np.int64) * batch_size, len(order))
    return CustomPlan(order[: bounds[-1]], bounds)


def batches_in_epoch(length: int, batch_size: int, *, drop_last: bool) -> int:
    """Global batches, and so optimizer steps, in an epoch."""
    return length // batch_size if drop_last else -(-length // batch_size)


def _words(seed: int, epoch: int, count: int) -> Words:
    """Random 64-bit words, the same on every machine and with every version of numpy.

    numpy promises stable streams for the raw output of its bit generators, not for
    `Generator.permutation` (NEP 19); a run resumed next year must see the same order.
    """
    low, high = seed & 0xFFFFFFFF, seed >> 32  # a SeedSequence cuts numbers into words of 32 bits
    return np.random.Philox(np.random.SeedSequence([low, epoch, high])).random_raw(count)


def shuffled(length: int, *, seed: int, epoch: int) -> Indices:
    """A permutation of `range(length)` that is drawn as a whole: random words, sorted."""
    words = _words(seed, epoch, length)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def permutes(length: int) -> bool:
    """Whether a shuffled dataset of this length is ordered by `permuted`, not by `shuffled`.

    A Feistel network over a handful of indices cannot give all their orders equally often.
    """
    return length > _AT_ONCE


def permuted(begin: int, end: int, length: int, keys: Words) -> Indices:
    """What stands at the places from `begin` to before `end` in a permutation of `range(length)`.

    A generalized Feistel network with cycle walking (Black and Rogaway 2002, "Ciphers with
    Arbitrary Finite Domains", methods 2 and 3). A place is a cell of a table of `a` columns and `b`
    rows, about the square root of `length` each. A round moves a cell along its row by a number
    that depends on the row and the key, the next along its column. The table has less than one row
    more than it needs; who lands there goes on until he is back.

    Args:
        begin: at least 0.
        end: at most `length`.
        length: from 1 to `sys.maxsize`.
        keys: one random word a round, an even number.

    Returns:
        Shape `(end - begin,)`.
    """
    values = _cross(np.arange(begin, end, dtype=np.uint64), length, keys)
    while len(outside := np.flatnonzero(values >= np.uint64(length))):
        values[outside] = _cross(values[outside], length, keys)
    return values.astype(np.int64)


def _cross(cells: Words, length: int, keys: Words) -> Words:
    """All rounds, once. What a round moves by is the output of SplitMix64 (Steele et al. 2014)."""
    columns = math.isqrt(length - 1) + 1
    a, b = np.uint64(columns), np.uint64(-(-length // columns))
    y = cells // a
    x, h, t = cells - y * a, np.empty_like(cells), np.empty_like(cells)
    for key in keys:
        np.multiply(y, _GAMMA, out=h)
        h += key
        h ^= np.right_shift(h, _30, out=t)
        h *= _MIX_1
        h ^= np.right_shift(h, _27, out=t)
        h *= _MIX_2
        h ^= np.right_shift(h, _31, out=t)
        h >>= _32  # from here on: the upper half as a number in range(a)
        h *= a
        h >>= _32
        x += h
        np.minimum(x, np.subtract(x, a, out=t), out=x)  # modulo a: what is below 0 wraps round
        x, y, a, b = y, x, b, a
    return y * a + x


@lru_cache(maxsize=256)
def split_batch(
    count: int,
    shares: tuple[int, ...],
    micro_batches: int = 1,
    num_virtual_ranks: int | None = None,
) -> Indices:
    """Who computes which samples of a global batch.

    Every rank's part is within one sample of its share of the whole batch, and micro-batches
    differ by at most one sample. Of `count < micro_batches` samples there are only `count`
    micro-batches, so none is empty on all ranks; a rank's part may be.

    Args:
        count: samples in the global batch.
        shares: one weight a rank, `(1, 2)`: rank 1 computes twice as much as rank 0.
        micro_batches: how many pieces the batch is computed in, one after the other.
        num_virtual_ranks: that divide the global batch; see `_split_over_virtual_ranks`. None:
            there are none.

    Returns:
        An array of shape `(micro-batches, ranks, 2)`: begin and end within the global batch.
    """
    if num_virtual_ranks is not None:
        return _split_over_virtual_ranks(count, len(shares), micro_batches, num_virtual_ranks)
    micro_batches = max(1, min(micro_batches, count))
    of_rank = parts(count, shares)
    # Spread each rank's samples evenly over the batch, then cut: the totals stay exact.
    positions = np.concatenate([(np.arange(n) + 0.5) / n for n in of_rank if n] or [np.empty(0)])
    owners = np.repeat(np.arange(len(shares)), of_rank)[np.argsort(positions, kind="stable")]
    cuts = -(-count * np.arange(micro_batches + 1) // micro_batches)
    found = np.empty((micro_batches, len(shares), 2), dtype=np.int64)
    for j in range(micro_batches):
        sizes = np.bincount(owners[cuts[j] : cuts[j + 1]], minlength=len(shares))
        stops = cuts[j] + np.cumsum(sizes)
        found[j, :, 0], found[j, :, 1] = stops - sizes, stops
    found.setflags(write=False)
    return found


def _split_over_virtual_ranks(
    count: int, num_ranks: int, micro_batches: int, num_virtual_ranks: int
) -> Indices:
    """Says who computes which samples of a global batch that virtual ranks divide.

    Each virtual rank has a part of its own, which does not depend on the number of ranks. If there
    are fewer ranks, each computes several virtual ranks, one after the other; if there are more,
    several neighbouring ranks compute one together.

    Args:
        count: samples in the global batch.
        num_ranks: at most `num_virtual_ranks`, or a multiple of it.
        micro_batches: pieces in which each part is computed; fewer if a part has fewer samples.
        num_virtual_ranks: of the run.

    Returns:
        An array as of `split_batch`, with the micro-batches of a rank's first virtual rank first.
    """
    max_on_rank = ceil_div(num_virtual_ranks, num_ranks)
    ranks_of_each = max(1, num_ranks // num_virtual_ranks)
    sizes = parts(count, (1,) * num_virtual_ranks)
    begins = np.cumsum([0, *sizes])
    pieces = max(1, min(micro_batches, *sizes))
    split = np.zeros((max_on_rank * pieces, num_ranks, 2), dtype=np.int64)
    for first_rank in range(0, num_ranks, ranks_of_each):
        columns = slice(first_rank, first_rank + ranks_of_each)
        numbers = virtual_ranks_of(first_rank, num_ranks, num_virtual_ranks)
        for index, number in enumerate(numbers):
            rows = slice(index * pieces, (index + 1) * pieces)
            split_of_part = split_batch(sizes[number], (1,) * ranks_of_each, pieces)
            split[rows, columns] = begins[number] + split_of_part
    split.setflags(write=False)
    return split


def virtual_ranks_of(rank: int, num_ranks: int, num_virtual_ranks: int) -> range:
    """Returns the virtual ranks that a rank computes.

    These are as many as other ranks compute, or one more; or a single one, with other ranks.
    """
    if num_ranks > num_virtual_ranks:
        ranks_of_each = num_ranks // num_virtual_ranks
        number = rank // ranks_of_each
        return range(number, number + 1)
    first = ceil_div(num_virtual_ranks * rank, num_ranks)
    end = ceil_div(num_virtual_ranks * (rank + 1), num_ranks)
    return range(first, end)


def ceil_div(dividend: IntOrArray, divisor: int) -> IntOrArray:
    """Returns the quotient of whole numbers, rounded up."""
    return -(-dividend // divisor)


def parts(count: int, shares: tuple[int, ...]) -> list[int]:
    """Each rank's samples of a whole global batch."""
    ends = -(-count * np.cumsum([0, *shares]) // sum(shares))
    return [int(n) for n in np.diff(ends)]  # ceilings: a lone sample goes to the first rank


@lru_cache(maxsize=256)
def micro_batches_needed(batch_size: int, shares: tuple[int, ...], largest: int | None) -> int:
    """How many micro-batches keep every rank's part of each within `largest` samples.

    Counted once for the full batch, so a short last batch is computed in as many pieces.
    """
    if largest is None:
        return 1
    if largest < 1:
        raise SettingError(
            f"micro_batch_size={largest}",
            "a micro-batch holds at least one sample on each rank",
            "give the number of samples one device computes at a time, or leave it out",
        )
    for pieces in range(math.ceil(batch_size / (largest * len(shares))), batch_size + 1):
        found = split_batch(batch_size, shares, max(1, pieces))
        if int((found[..., 1] - found[..., 0]).max()) <= largest:
            return max(1, pieces)
    return batch_size


def check_batch_size(batch_size: object) -> int:
    """Raises DataError unless this is a whole number of at least 1, which is returned."""
    if not is_whole_number(batch_size):
        raise DataError(
            f"batch_size={batch_size!r}",
            "a global batch holds a whole number of samples, at least 1",
            "give the number of samples of one optimizer step over all devices",
        )
    return batch_size


def parse_shares(
    shares: str | Sequence[int] | None, size: int, *, of: str = "rank"
) -> tuple[int, ...]:
    """`'1:2'` or `(1, 2)` as one non-negative whole number a rank, or a device.

    None is equal shares.

    Raises:
        SettingError: the wrong number of shares, none above zero, or not whole numbers.
    """
    if shares is None:
        return (1,) * size
    do = f"give one whole number a {of}, for example shares='2:3:3'"
    try:
        parts = shares.split(":") if isinstance(shares, str) else list(shares)
        numbers = tuple(int(part) for part in parts)
        exact = all(isinstance(p, str) or p == n for p, n in zip(parts, numbers, strict=True))
    except (TypeError, ValueError):
        exact, numbers = False, ()
    if not exact:
        raise SettingError(f"shares={shares!r}", "these are not whole numbers", do)
    if len(numbers) != size:
        wanted = f"a world size of {size}" if of == "rank" else count_noun(size, of)
        found = f"{count_noun(len(numbers), 'share')} for {wanted}"
        raise SettingError(f"shares={shares!r}", found, do)
    if min(numbers) < 0 or max(numbers) == 0:
        raise SettingError(f"shares={shares!r}", "shares are at least 0, and one is above 0", do)
    divisor = math.gcd(*numbers)
    return tuple(n // divisor for n in numbers)
