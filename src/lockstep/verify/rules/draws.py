"""Rules for losses and outputs that were computed from random numbers.

A *rule* returns the `Cause` of a difference (`case`) between one process and several ranks, or
None. Of the optimizer step that differs, `case.expected` is what one process recorded and
`case.actual` what the ranks recorded: a `RankUpdate` for each, with the fields under "Needs".
`merged(field)` joins the arrays of all ranks. All steps are in `case.reference_run` and
`case.parallel_run`.
"""

from __future__ import annotations

from collections import Counter

from lockstep.verify.cause import Cause
from lockstep.verify.compare import Divergence
from lockstep.verify.rules.evidence import other_draws


def random_loss(case: Divergence, *evidence: str) -> Cause | None:
    """LS308: the loss was computed from random numbers that one process did not draw.

    LS106: moreover, all ranks drew the same ones.

    Needs: `loss_draws` and `drawn_digests`.
    Applies: if the loss of one run was computed from numbers that the other run did not draw.
    False positives: harmless random numbers, while something else is wrong that they hide.
    Evidence: the evidence that it was given, and the line that drew the numbers.

    Args:
        case: the difference.
        *evidence: sentences of another rule, to which this one adds its own.
    """
    sentences = other_draws(case)
    if not sentences:
        return None

    # For each rank whose loss counts, its draws: pairs of a line and a digest of the numbers.
    draws_of_ranks = [Counter(rank.loss_draws) for rank in case.actual if rank.contributes]
    # A single rank, or ranks that drew nothing, are equal but say nothing.
    several_ranks_drew = len(draws_of_ranks) > 1 and bool(draws_of_ranks[0])
    if several_ranks_drew and all(draws == draws_of_ranks[0] for draws in draws_of_ranks):
        return Cause("LS106", (*evidence, *sentences, "all ranks drew the same numbers"))

    return Cause("LS308", (*evidence, *sentences))


def other_random_stream(case: Divergence, *evidence: str) -> Cause | None:
    """LS308: random numbers were drawn from another stream than torch's, after the batch was read.

    Needs: `random_streams`, whose keys are names such as "numpy's global stream".
    Applies: if a process drew from such a stream.
    False positives: numbers that were drawn for something else than the model's outputs.
    Evidence: the evidence that it was given, and the streams.

    Args:
        case: the difference.
        *evidence: sentences of another rule, to which this one adds its own.
    """
    streams: dict[str, None] = {}  # a set that keeps the order
    for rank in (*case.expected, *case.actual):
        streams.update(dict.fromkeys(rank.random_streams))

    if not streams:
        return None

    names = " and ".join(streams)
    text = f"random numbers were drawn for this step, after its batch, from {names}"
    return Cause("LS308", (*evidence, text))
