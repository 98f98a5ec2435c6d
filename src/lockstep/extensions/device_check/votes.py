"""Decides which ranks have computed wrongly, from what all of them have computed.

The functions are pure: digests of results go in, a `Verdict` comes out. Results are *right* if more
than half of the ranks have them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What is known of a difference."""

    WRONG = "some ranks have other bits than the majority"
    WRONG_ONCE = "some ranks had other bits than the majority, and the same the second time"
    CHANGING = "a rank has other bits each time, and the other rank the same both times"
    ONE_OF_TWO = "two ranks have different bits, each the same both times"
    NOT_REPEATED = "two ranks have different bits, and could not compute them again"
    ALL_CHANGING = "both ranks have other bits each time"
    NO_MAJORITY = "no bits have a majority"


class Verdict(NamedTuple):
    """Who has computed wrongly."""

    kind: Kind
    ranks: Sequence[int]
    """Those that are wrong, or if nobody knows which, those between which the error is."""


class Results(NamedTuple):
    """What the ranks have computed for one virtual rank: digests that are equal if the bits are."""

    first_of_rank: Mapping[int, str]
    """The results that differ, of two ranks."""
    again_of_rank: Mapping[int, str]
    """What all ranks have computed then; empty if they could not."""


def judge_repeats(results: Results) -> Verdict:
    """Returns who has computed a virtual rank wrongly.

    Args:
        results: of the ranks. The two first ones differ.
    """
    first_of_rank = results.first_of_rank
    again_of_rank = results.again_of_rank
    if not again_of_rank:
        return Verdict(Kind.NOT_REPEATED, sorted(first_of_rank))
    changing = []
    for rank, first in first_of_rank.items():
        if again_of_rank[rank] != first:
            changing.append(rank)
    right = value_of_majority(list(again_of_rank.values()))
    if right is not None:
        wrong = [rank for rank, again in again_of_rank.items() if again != right]
        if wrong:
            return Verdict(Kind.WRONG, sorted(wrong))
        once = [rank for rank, first in first_of_rank.items() if first != right]
        return Verdict(Kind.WRONG_ONCE, sorted(once))
    if len(again_of_rank) == 2:
        return _judge_two(first_of_rank, again_of_rank, changing)
    if len(changing) == len(first_of_rank):
        return Verdict(Kind.ALL_CHANGING, sorted(changing))
    return Verdict(Kind.NO_MAJORITY, sorted(again_of_rank))


def _judge_two(
    first_of_rank: Mapping[int, str], again_of_rank: Mapping[int, str], changing: Sequence[int]
) -> Verdict:
    """Returns who of two ranks is wrong, if they disagree the second time too.

    Args:
        first_of_rank: what each of them has computed.
        again_of_rank: what it has computed then.
        changing: those whose two results differ.
    """
    if len(changing) == 1:  # the other one has the same bits both times
        return Verdict(Kind.CHANGING, changing)
    if changing:
        return Verdict(Kind.ALL_CHANGING, sorted(changing))
    return Verdict(Kind.ONE_OF_TWO, sorted(first_of_rank))


def judge_states(bits_of_rank: Mapping[int, int]) -> Verdict:
    """Returns which ranks hold a wrong tensor.

    Args:
        bits_of_rank: the sum of its bits on each rank; not all are equal.
    """
    right = value_of_majority([str(bits) for bits in bits_of_rank.values()])
    if right is not None:
        wrong = [rank for rank, bits in bits_of_rank.items() if str(bits) != right]
        return Verdict(Kind.WRONG, sorted(wrong))
    if len(bits_of_rank) == 2:
        return Verdict(Kind.ONE_OF_TWO, sorted(bits_of_rank))
    return Verdict(Kind.NO_MAJORITY, sorted(bits_of_rank))


def value_of_majority(values: Sequence[str]) -> str | None:
    """Returns the value that more than half of all have; None if there is none."""
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else None
