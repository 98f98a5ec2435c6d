"""Decides which failure of a run came first, and which ranks did not take part in the run.

One failure causes others: when a rank ends, the connections of the other ranks break, and they have
*lost a peer*. Ranks that are stopped after enough steps break connections too, but this is not a
failure. A `RankEnd` describes how the script ended on one rank, and a `RankUpdate` is the record of
one optimizer step on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lockstep.verify.rank_files import RankEnd
from lockstep.verify.run_config import MIN_STEPS
from lockstep.verify.training_record import RankUpdate


def most_steps(updates: Sequence[RankUpdate]) -> int:
    """Returns the number of steps of the optimizer with the most steps; 0 if there were none.

    Args:
        updates: records of one rank.
    """
    return max(Counter(update.optimizer for update in updates).values(), default=0)


def first_failure(
    ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]], steps: int
) -> RankEnd | None:
    """Returns how the rank that failed first has ended; None if nothing went wrong.

    The error may be replaced by a better explanation.

    Args:
        ends: how the script ended, by rank.
        updates: records of each rank.
        steps: number of steps that were to be recorded.
    """
    failed_ranks = [rank for rank, end in ends.items() if end.error]
    if not failed_ranks:
        return _find_rank_without_steps(ends, updates)

    first_rank = min(failed_ranks, key=lambda rank: _order_of_failure(ends[rank]))
    first = ends[first_rank]
    if not first.lost_peer:
        return first

    # The rank has only lost a connection. Find out why the other rank had ended.
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


def _find_rank_without_steps(
    ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]]
) -> RankEnd | None:
    """Returns a failure for the first rank that trained without any step, although all ended well.

    The result is None if there is no such rank.
    """
    for rank in sorted(ends):
        explanation = _explain_rank_without_steps(rank, ends, updates)
        if explanation:
            # With `exited=True`, the output of the script is shown too, as after `sys.exit`.
            return RankEnd(error=explanation, code="LS304", exited=True)
    return None


def _order_of_failure(end: RankEnd) -> tuple[bool, bool, float]:
    """Returns a key for sorting failures, with the most telling one first.

    Failures with a code come first, and lost connections last. Among equals, the earliest failure
    comes first, since it may have caused the later ones.
    """
    has_no_code = not end.code
    return has_no_code, end.lost_peer, end.time  # False sorts before True


def _peers_were_stopped(
    rank: int, ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]], steps: int
) -> bool:
    """True if a rank lost its peers only because enough of their steps were recorded.

    The recorder stops the script on each rank separately. Ranks that do not step together, as under
    `Join` or with one optimizer for all ranks, are not stopped at the same time.
    """
    peers = [end for peer, end in ends.items() if peer != rank and not end.error]
    if not peers or not all(end.was_stopped for end in peers):
        return False

    # The rank itself would have been stopped next.
    has_enough_steps = most_steps(updates[rank]) >= steps
    if has_enough_steps:
        return True

    # The rank may have waited for a rank that trains first, and is stopped before this one makes a
    # step. With several backward passes, it did not wait.
    has_only_begun = ends[rank].backward_passes < MIN_STEPS
    return has_only_begun and not updates[rank]


def _explain_rank_without_steps(
    rank: int, ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]]
) -> str:
    """Explains a failure by a rank that made backward passes but no step, unlike others.

    Returns:
        A sentence, or an empty string if this did not happen.
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
    """Explains a lost connection by a rank whose script ended before all steps were made.

    Returns:
        A sentence, or an empty string if this did not happen.
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
    """Returns the ranks that had not started to train while others did.

    Args:
        ends: how the script ended, by rank.
        updates: records of each rank.
    """
    if not any(updates):  # no rank has trained
        return ()

    # An idle rank has made neither a step nor a backward pass. A few backward passes are allowed if
    # other ranks were stopped after enough steps, since the rank may just have started then.
    some_were_stopped = any(end.was_stopped for end in ends.values())
    max_passes_of_idle_rank = MIN_STEPS - 1 if some_were_stopped else 0
    idle_ranks = []
    for rank in sorted(ends):
        if not updates[rank] and ends[rank].backward_passes <= max_passes_of_idle_rank:
            idle_ranks.append(rank)

    return tuple(idle_ranks)
