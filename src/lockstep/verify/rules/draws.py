"""Rules for losses and outputs that were computed from random numbers.

A *rule* returns the `Cause` of a difference (`case`) between a run on one process and a run on
several ranks, or None if it does not apply. `case.expected` is the optimizer step on one process,
and `case.actual` the same step on the ranks: a `RankUpdate` (record) for each rank, with the fields
listed under "Needs".
"""

from __future__ import annotations

from collections import Counter

from lockstep.verify.cause import Cause
from lockstep.verify.divergence import Divergence
from lockstep.verify.rules.evidence import describe_random_numbers_of_one_run


def cause_if_loss_is_random(case: Divergence, *evidence: str) -> Cause | None:
    """LS106 or LS308: the loss was computed from random numbers that only one of the runs drew.

    LS106: there are several ranks, and each of them drew the same numbers. LS308: anything else.

    Needs: `loss_draws` and `drawn_digests`.
    Applies: if the loss of one run was computed from numbers that the other run did not draw.
    False positives: if these numbers do no harm, and something else is wrong.
    Evidence: the given evidence, and the line that drew the numbers.

    Args:
        case: the difference.
        *evidence: sentences of the calling rule, which come first.
    """
    sentences_on_draws = describe_random_numbers_of_one_run(case)
    if not sentences_on_draws:
        return None

    # The draws of each rank whose loss counts, as pairs of a line and a digest of the numbers. They
    # are compared as counters, because their order does not matter.
    draws_of_ranks = [Counter(record.loss_draws) for record in case.actual if record.contributes]

    each_drew_the_same = all(draws and draws == draws_of_ranks[0] for draws in draws_of_ranks)
    if len(draws_of_ranks) > 1 and each_drew_the_same:
        same = "all ranks drew the same numbers"
        return Cause("LS106", (*evidence, *sentences_on_draws, same))

    return Cause("LS308", (*evidence, *sentences_on_draws))


def other_random_stream(case: Divergence, *evidence: str) -> Cause | None:
    """LS308: after the batch was read, another generator than torch's was used.

    Needs: `random_streams`, which holds only generators other than torch's. Its keys are names such
        as "numpy's global stream".
    Applies: if a process drew from such a generator.
    False positives: numbers that are not used for the outputs of the model.
    Evidence: the given evidence, and the names of the generators.

    Args:
        case: the difference.
        *evidence: sentences of the calling rule, which come first.
    """
    other_streams: dict[str, None] = {}  # an ordered set
    for record in (*case.expected, *case.actual):
        other_streams.update(dict.fromkeys(record.random_streams))

    if not other_streams:
        return None

    names = " and ".join(other_streams)
    text = f"random numbers were drawn for this step, after its batch, from {names}"
    return Cause("LS308", (*evidence, text))
