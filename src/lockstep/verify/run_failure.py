"""Decides which failure of a run came first, and which ranks took no part in it.

One failure causes others: if a rank ends, the connections of the other ranks break, and they have
*lost a peer*. Ranks that are stopped after enough steps break connections too, which is no failure.
A `RankEnd` says how the script ended on one rank; a `RankUpdate` is the record of one optimizer
step on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lockstep.verify.rank_files import RankEnd
from lockstep.verify.run_config import MIN_STEPS
from lockstep.verify.training_record import RankUpdate


def most_steps(updates: Sequence[RankUpdate]) -> int:
    """Returns the number of steps of the optimizer that made the most; 0 if none made any.

    Args:
        updates: the records of one rank.
    """
    return max(Counter(update.optimizer for update in updates).values(), default=0)


def first_failure(
    ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]], steps: int
) -> RankEnd | None:
    """Returns what went wrong first; None: nothing did.

    Args:
        ends: how the script ended, by rank.
        updates: the records of each rank.
        steps: how many steps were to be recorded.

    Returns:
        How the rank that failed first has ended, perhaps with a better explanation in the place of
        its error.
    """
    failed_ranks = [rank for rank, end in ends.items() if end.error]
    if not failed_ranks:
        # Without an error, a rank may still have trained in vain.
        for rank in sorted(ends):
            explanation = _explain_rank_without_steps(rank, ends, updates)
            if explanation:
                # `exited=True`: the script's output is shown too, as after `sys.exit`.
                return RankEnd(error=explanation, code="LS304", exited=True)
        return None

    first_rank = min(failed_ranks, key=lambda rank: _order_of_failure(ends[rank]))
    first = ends[first_rank]
    if not first.lost_peer:
        return first

    # The rank has lost a connection, which says nothing of why the other rank was gone.
    explanation = _explain_rank_without_steps(first_rank, ends, updates)
    if explanation:
        return replace(first, error=explanation, code="LS304")
    if _peers_were_stopped(first_rank, ends, updates, steps):
        return None

    explanation = _explain_by_peer_that_ended(first_rank, ends, updates, steps)
    if explanation:
        error = f"{explanation}\nrank {first_rank}: {first.error}"
        return replace(first, error=error, code="LS405")

    return first


def _order_of_failure(end: RankEnd) -> tuple[bool, bool, float]:
    """Returns a key by which failures are sorted, with the most telling one first.

    Failures with a code come first, and lost connections last. Among equals, the earliest comes
    first, since later ones were often caused by it.
    """
    has_no_code = not end.code
    return has_no_code, end.lost_peer, end.time  # False sorts before True


def _peers_were_stopped(
    rank: int, ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]], steps: int
) -> bool:
    """Returns whether a rank lost its peers only because enough of their steps were recorded.

    The recorder stops the script on each rank by itself. Ranks that do not step alike, as under
    `Join` or with one optimizer for all, are not stopped at the same moment.
    """
    peers = [end for peer, end in ends.items() if peer != rank and not end.error]
    if not peers or not all(end.was_stopped for end in peers):
        return False

    has_enough_steps = most_steps(updates[rank]) >= steps
    if has_enough_steps:  # it would have been stopped next
        return True

    # A rank without a step may have waited for another one that trained first. A rank that has made
    # several backward passes did not wait.
    has_only_begun = ends[rank].backward_passes < MIN_STEPS
    return has_only_begun and not updates[rank]


def _explain_rank_without_steps(
    rank: int, ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]]
) -> str:
    """Explains a failure by a rank that made backward passes, but no step while others stepped.

    Returns:
        A sentence, or "" if that is not what happened.
    """
    num_passes = ends[rank].backward_passes_without_step
    if updates[rank] or num_passes < MIN_STEPS:
        return ""

    for other_rank, other_updates in enumerate(updates):
        if other_rank != rank and other_updates:
            return (
                f"the parameters of rank {rank} have not changed in {num_passes} backward passes: "
                f"it makes no step and is sent none; those of rank {other_rank} have changed "
                f"{len(other_updates)} times"
            )

    return ""


def _explain_by_peer_that_ended(
    rank: int, ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]], steps: int
) -> str:
    """Explains a lost connection by a peer whose script had ended before the steps were made.

    Returns:
        A sentence, or "" if that is not what happened.
    """
    ranks_that_ended = [peer for peer, end in ends.items() if not end.error]
    steps_of_rank = most_steps(updates[rank])
    made_all_steps = steps_of_rank >= steps
    if not ranks_that_ended or made_all_steps:
        return ""

    peer = ranks_that_ended[0]
    return (
        f"a rank that was gone: rank {peer} ended without an error after optimizer step "
        f"{most_steps(updates[peer])}, rank {rank} went on after step {steps_of_rank}"
    )


def find_idle_ranks(
    ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]]
) -> tuple[int, ...]:
    """Returns the ranks that had not begun to train while others did.

    Args:
        ends: how the script ended, by rank.
        updates: the records of each rank.
    """
    if not any(updates):  # no rank has trained
        return ()

    # A rank without a step is idle if it has made no backward pass either. When ranks are stopped
    # after enough steps, another one may just have begun: then a few backward passes count as none.
    some_were_stopped = any(end.was_stopped for end in ends.values())
    max_passes_of_idle_rank = MIN_STEPS - 1 if some_were_stopped else 0
    idle_ranks = []
    for rank in sorted(ends):
        if not updates[rank] and ends[rank].backward_passes <= max_passes_of_idle_rank:
            idle_ranks.append(rank)

    return tuple(idle_ranks)
