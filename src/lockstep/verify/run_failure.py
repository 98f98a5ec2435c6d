"""Decides which failure of a run came first, and which ranks took no part in it.

One failure causes others: if a rank ends, the connections of the other ranks break. Ranks that are
stopped after enough steps break connections too, which is no failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lockstep.verify.rank_files import RankEnd
from lockstep.verify.run_config import MIN_STEPS
from lockstep.verify.training_record import RankUpdate


def most_steps(updates: Sequence[RankUpdate]) -> int:
    """Returns how many steps the optimizer made that made the most."""
    return max(Counter(update.optimizer for update in updates).values(), default=0)


def first_failure(
    ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]], steps: int
) -> RankEnd | None:
    """Returns what went wrong first; None: nothing did.

    Args:
        ends: how the script ended, by rank.
        updates: of each rank.
        steps: that were to be recorded.
    """
    failed_ranks = [rank for rank, end in ends.items() if end.error]
    if not failed_ranks:
        for rank in sorted(ends):
            never_stepped = _describe_rank_without_steps(rank, ends, updates)
            if never_stepped:
                return RankEnd(error=never_stepped, code="LS304", exited=True)
        return None
    first_rank = min(failed_ranks, key=lambda rank: _order_of_failure(ends[rank]))
    first = ends[first_rank]
    if not first.lost_peer:
        return first
    never_stepped = _describe_rank_without_steps(first_rank, ends, updates)
    if never_stepped:
        return replace(first, error=never_stepped, code="LS304")
    if _peers_were_stopped(first_rank, ends, updates, steps):
        return None
    peer_ended = _describe_peer_that_ended(first_rank, ends, updates, steps)
    if peer_ended:
        error = f"{peer_ended}\nrank {first_rank}: {first.error}"
        return replace(first, error=error, code="LS405")
    return first


def _order_of_failure(end: RankEnd) -> tuple[bool, bool, float]:
    """Sorts failures: those with a code first, those by a lost connection last, then by time.

    A failure that came later was often caused by another one, and so is a broken connection.
    """
    return not end.code, end.lost_peer, end.time


def _peers_were_stopped(
    rank: int, ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]], steps: int
) -> bool:
    """Returns whether a rank lost its peers only because enough of their steps were recorded.

    Ranks that do not step alike, as under `Join` or with one optimizer for all, are not stopped at
    the same place. A rank without a step may have waited for another one that trained first.
    """
    peers = [end for peer, end in ends.items() if peer != rank and not end.error]
    if not peers or not all(end.was_stopped for end in peers):
        return False
    if most_steps(updates[rank]) >= steps:
        return True
    has_only_begun = ends[rank].backward_passes < MIN_STEPS
    return has_only_begun and not updates[rank]


def _describe_rank_without_steps(
    rank: int, ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]]
) -> str:
    """Says that a rank made backward passes but no step while others stepped; empty: it did not."""
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


def _describe_peer_that_ended(
    rank: int, ends: Mapping[int, RankEnd], updates: Sequence[list[RankUpdate]], steps: int
) -> str:
    """Says that a rank's peer was gone because its script had ended; empty: that was not why."""
    ranks_that_ended = [peer for peer, end in ends.items() if not end.error]
    steps_of_rank = most_steps(updates[rank])
    if not ranks_that_ended or steps_of_rank >= steps:
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

    If the others were stopped after enough steps, a rank without a step may have made the backward
    passes of its first one.
    """
    if not any(updates):
        return ()
    some_were_stopped = any(end.was_stopped for end in ends.values())
    max_passes = MIN_STEPS - 1 if some_were_stopped else 0
    idle_ranks = []
    for rank in sorted(ends):
        if not updates[rank] and ends[rank].backward_passes <= max_passes:
            idle_ranks.append(rank)
    return tuple(idle_ranks)
