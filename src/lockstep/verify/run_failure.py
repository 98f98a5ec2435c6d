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
    # Without an error on any rank, a rank whose parameters never change is a failure too (LS304).
    failed_ranks = [rank for rank, end in ends.items() if end.error]
    if not failed_ranks:
        return _failure_of_rank_that_never_steps(ends, updates)

    first_rank = min(failed_ranks, key=lambda rank: _order_of_failure(ends[rank]))
    first = ends[first_rank]
    if not first.lost_peer:
        return first

    # The rank has only lost a connection. One of three cases may explain it better.

    # 1. The parameters of this rank have never changed while those of another rank have (LS304).
    # This is a failure even if the other rank was stopped after enough steps.
    never_steps_text = _describe_rank_that_never_steps(first_rank, ends, updates)
    if never_steps_text:
        return replace(first, error=never_steps_text, code="LS304")

    # 2. The other ranks were ended on purpose, so nothing went wrong.
    if _peers_were_stopped(first_rank, ends, updates, steps):
        return None

    # 3. Another rank ended by itself after fewer steps (LS405).
    peer_ended_text = _describe_peer_that_ended(first_rank, ends, updates, steps)
    if peer_ended_text:
        error = f"{peer_ended_text}\nrank {first_rank}: {first.error}"
        return replace(first, error=error, code="LS405")

    return first


def _failure_of_rank_that_never_steps(
    ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]]
) -> RankEnd | None:
    """Treats a rank as failed that trained without making any step, although it ended well.

    Its parameters differ from those of the ranks that made steps (LS304, "the ranks have different
    parameters").

    Returns:
        A `RankEnd` with this error, for the first such rank; None if there is no such rank.
    """
    for rank in sorted(ends):
        text = _describe_rank_that_never_steps(rank, ends, updates)
        if text:
            return RankEnd(error=text, code="LS304", output_may_tell_why=True)
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
    # Peers with an error are left out: they may have lost their own peers in the same way.
    ends_of_peers = [end for peer, end in ends.items() if peer != rank and not end.error]
    peers_were_stopped = bool(ends_of_peers) and all(end.was_stopped for end in ends_of_peers)

    # The rank was about to be stopped too.
    has_enough_steps = most_steps(updates[rank]) >= steps

    # If ranks train one by one, this rank may have waited for its turn to make its first step. It
    # has then made few backward passes, or none.
    has_not_stepped = not updates[rank]
    num_passes = ends[rank].num_backward_passes
    may_have_waited_for_turn = has_not_stepped and _may_still_make_first_step(num_passes)

    return peers_were_stopped and (has_enough_steps or may_have_waited_for_turn)


def _may_still_make_first_step(num_backward_passes: int) -> bool:
    """True if a rank that has made no step yet may still make its first one.

    A rank may accumulate gradients over a few backward passes before it steps. After `MIN_STEPS`
    passes without a step, it is taken for a rank that never steps.
    """
    return num_backward_passes < MIN_STEPS


def _describe_rank_that_never_steps(
    rank: int, ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]]
) -> str:
    """Says that a rank made backward passes but no step, while another rank made steps.

    A rank that is sent the parameters of another one, instead of making steps, has updates too. So
    a rank without updates neither steps nor is sent parameters.

    Returns:
        A sentence, or an empty string if this is not the case for the rank.
    """
    num_passes = ends[rank].num_passes_without_step
    has_updates = bool(updates[rank])
    if has_updates or _may_still_make_first_step(num_passes):
        return ""

    for other_rank, other_updates in enumerate(updates):
        if other_rank != rank and other_updates:
            return (
                f"the parameters of rank {rank} have not changed in {num_passes} backward passes: "
                f"it makes no step and is sent none; those of rank {other_rank} have changed "
                f"{len(other_updates)} times"
            )

    return ""


def _describe_peer_that_ended(
    rank: int, ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]], steps: int
) -> str:
    """Explains a lost connection by another rank, whose script had ended before all steps.

    Args:
        rank: rank that lost the connection. It has ended with an error.
        ends: how the script ended, by rank.
        updates: records of each rank.
        steps: number of steps that were to be recorded.

    Returns:
        A text that follows "on 2 processes the script ended with: ", or an empty string if there is
        no such rank.
    """
    # A rank that made all steps needed its peers no longer, so their end explains no failure.
    steps_of_rank = most_steps(updates[rank])
    if steps_of_rank >= steps:
        return ""

    peers_that_ended_well = [peer for peer, end in ends.items() if not end.error]
    if not peers_that_ended_well:
        return ""

    peer = peers_that_ended_well[0]
    return (
        f"a rank that was gone: rank {peer} ended without an error after optimizer step "
        f"{most_steps(updates[peer])}, rank {rank} went on after step {steps_of_rank}"
    )


def find_idle_ranks(
    ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]]
) -> tuple[int, ...]:
    """Returns the ranks that had not started to train while others did.

    Such ranks are not at fault, so the verdict only says that nothing was seen of them.

    Args:
        ends: how the script ended, by rank.
        updates: records of each rank.
    """
    if not any(updates):  # no rank has trained
        return ()

    some_were_stopped = any(end.was_stopped for end in ends.values())

    idle_ranks = []
    for rank in sorted(ends):
        if updates[rank]:  # the rank has made a step
            continue

        num_passes = ends[rank].num_backward_passes
        has_not_begun = num_passes == 0

        # A rank is idle, too, if it was about to make its first step when other ranks were stopped
        # after enough steps.
        has_just_begun = some_were_stopped and _may_still_make_first_step(num_passes)
        if has_not_begun or has_just_begun:
            idle_ranks.append(rank)

    return tuple(idle_ranks)
