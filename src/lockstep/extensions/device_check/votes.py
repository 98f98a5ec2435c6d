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
from typing import NamedTuple


class Kind(Enum):
    """What is known about a difference between ranks."""

    WRONG = "some ranks have other bits than the majority"
    WRONG_ONCE = "some ranks had other bits than the majority, and the same the second time"
    CHANGING = "a rank has other bits each time, and the other rank the same both times"
    ONE_OF_TWO = "two ranks have different bits, each the same both times"
    NOT_REPEATED = "two ranks have different bits, and could not compute them again"
    ALL_CHANGING = "both ranks have other bits each time"
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
    repeated_digest_of_rank: Mapping[int, str]
    """The results of all ranks, which computed it again because of the difference; empty if they
    could not."""


def judge_repeats(results: Results) -> Verdict:
    """Decides which ranks computed a virtual rank wrongly.

    At first, two ranks computed it, with different results. Then all ranks computed it again.
    """
    first_digest_of_rank = results.first_digest_of_rank
    repeated_digest_of_rank = results.repeated_digest_of_rank
    if not repeated_digest_of_rank:
        return Verdict(Kind.NOT_REPEATED, sorted(first_digest_of_rank))

    # The normal case: a majority of all ranks agrees.
    right = value_of_majority(list(repeated_digest_of_rank.values()))
    if right is not None:
        wrong = [rank for rank, again in repeated_digest_of_rank.items() if again != right]
        if wrong:  # some ranks differ from the majority, now that all have computed it
            return Verdict(Kind.WRONG, sorted(wrong))

        # The second time all ranks were right. So one of the two ranks that computed it at first
        # was wrong only then.
        wrong_once = [rank for rank, first in first_digest_of_rank.items() if first != right]
        return Verdict(Kind.WRONG_ONCE, sorted(wrong_once))

    # Without a majority, a rank whose two results differ is suspicious. `changing` can only contain
    # the two ranks that have computed it twice. In a run of only two ranks, if one of them changes
    # and the other does not, it is the wrong one.
    changing = []
    for rank, first in first_digest_of_rank.items():
        if repeated_digest_of_rank[rank] != first:
            changing.append(rank)

    if len(repeated_digest_of_rank) == 2:
        return _judge_two(sorted(first_digest_of_rank), changing)
    if len(changing) == len(first_digest_of_rank):
        return Verdict(Kind.ALL_CHANGING, sorted(changing))
    return Verdict(Kind.NO_MAJORITY, sorted(repeated_digest_of_rank))


def _judge_two(ranks: Sequence[int], changing: Sequence[int]) -> Verdict:
    """Decides which of two ranks is wrong, if their results differ the second time, too.

    Args:
        ranks: the two ranks.
        changing: those of them whose second result differs from their first.
    """
    if len(changing) == 1:  # the other rank has the same bits both times
        return Verdict(Kind.CHANGING, changing)
    if changing:
        return Verdict(Kind.ALL_CHANGING, sorted(changing))
    return Verdict(Kind.ONE_OF_TWO, ranks)


def judge_states(bits_of_rank: Mapping[int, int]) -> Verdict:
    """Decides which ranks hold wrong values of a tensor that should be equal on all ranks.

    Args:
        bits_of_rank: sum of the tensor's bits on each rank; not all sums are equal.
    """
    # `value_of_majority` compares texts, as digests of gradients are.
    text_of_rank = {rank: str(bits) for rank, bits in bits_of_rank.items()}
    right = value_of_majority(list(text_of_rank.values()))
    if right is not None:
        wrong = [rank for rank, text in text_of_rank.items() if text != right]
        return Verdict(Kind.WRONG, sorted(wrong))
    if len(bits_of_rank) == 2:
        return Verdict(Kind.ONE_OF_TWO, sorted(bits_of_rank))
    return Verdict(Kind.NO_MAJORITY, sorted(bits_of_rank))


def value_of_majority(values: Sequence[str]) -> str | None:
    """Returns the value that makes up more than half of all values, or None."""
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else None
