"""Decides by majority which ranks computed wrongly, when their results should be equal.

To check the devices, several ranks compute the same part of a global batch, a *virtual rank*, or
hold the same tensor. If their bits differ, the functions below compare digests of the results and
return a `Verdict`. A result is *right* if more than half of the ranks have it. The functions are
pure: nothing is computed again or communicated here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

_Value = TypeVar("_Value", str, int)
"""A digest, or a sum of bits."""


class Kind(Enum):
    """What is known about a difference between ranks."""

    WRONG = "some ranks have different bits than the majority"
    WRONG_ONCE = "some ranks had different bits than the majority, and the same the second time"
    CHANGING = "a rank has different bits each time, and the other rank the same both times"
    ONE_OF_TWO = "two ranks have different bits, each the same both times"
    NOT_REPEATED = "two ranks have different bits, and could not compute them again"
    ALL_CHANGING = "both ranks have different bits each time"
    NO_MAJORITY = "no bits have a majority"


class Verdict(NamedTuple):
    """Which ranks computed wrongly."""

    kind: Kind
    ranks: Sequence[int]
    """The ranks that are wrong. If that is not known: the ranks of which at least one is wrong."""


class Results(NamedTuple):
    """Digests of what the ranks computed for one virtual rank. Equal digests mean equal bits."""

    first_digest_of_rank: Mapping[int, str]
    """The first results, of the two ranks that computed the virtual rank. They differ."""
    recomputed_digest_of_rank: Mapping[int, str]
    """The results of all ranks, which computed it again because of the difference; empty if they
    could not."""


def judge_repeats(results: Results) -> Verdict:
    """Decides which ranks computed a virtual rank wrongly.

    At first, two ranks computed it, with different results. Then all ranks computed it again.
    """
    first_digest_of_rank = results.first_digest_of_rank
    recomputed_digest_of_rank = results.recomputed_digest_of_rank
    if not recomputed_digest_of_rank:
        return Verdict(Kind.NOT_REPEATED, sorted(first_digest_of_rank))

    # The normal case: a majority of all ranks agrees.
    right = value_of_majority(list(recomputed_digest_of_rank.values()))
    if right is not None:
        wrong = [rank for rank, again in recomputed_digest_of_rank.items() if again != right]
        if wrong:
            return Verdict(Kind.WRONG, sorted(wrong))

        # The second time all ranks were right. So one of the two ranks that computed it at first
        # was wrong only then.
        wrong_once = [rank for rank, first in first_digest_of_rank.items() if first != right]
        return Verdict(Kind.WRONG_ONCE, sorted(wrong_once))

    # Without a majority, a rank is suspicious if its two results differ. Only the two ranks that
    # computed it at first have two results.
    changing = []
    for rank, first in first_digest_of_rank.items():
        if recomputed_digest_of_rank[rank] != first:
            changing.append(rank)
    if len(changing) == 2:
        return Verdict(Kind.ALL_CHANGING, sorted(changing))

    run_has_two_ranks = len(recomputed_digest_of_rank) == 2
    if not run_has_two_ranks:
        return Verdict(Kind.NO_MAJORITY, sorted(recomputed_digest_of_rank))
    if changing:  # the other rank has the same bits both times
        return Verdict(Kind.CHANGING, changing)
    # Each of the two ranks got the same bits both times, but not the bits of the other rank.
    return Verdict(Kind.ONE_OF_TWO, sorted(first_digest_of_rank))


def judge_states(bits_of_rank: Mapping[int, int]) -> Verdict:
    """Decides which ranks hold wrong values of a tensor that should be equal on all ranks.

    Args:
        bits_of_rank: sum of the tensor's bits on each rank; not all sums are equal.
    """
    right = value_of_majority(list(bits_of_rank.values()))
    if right is not None:
        wrong = [rank for rank, bits in bits_of_rank.items() if bits != right]
        return Verdict(Kind.WRONG, sorted(wrong))
    if len(bits_of_rank) == 2:
        return Verdict(Kind.ONE_OF_TWO, sorted(bits_of_rank))
    return Verdict(Kind.NO_MAJORITY, sorted(bits_of_rank))


def value_of_majority(values: Sequence[_Value]) -> _Value | None:
    """Returns the value that makes up more than half of all values, or None."""
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else None
