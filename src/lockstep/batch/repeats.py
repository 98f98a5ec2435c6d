"""Plans which virtual ranks are computed twice, by two ranks, in order to find broken devices.

In a *checked* global batch each rank *repeats* one virtual rank of another rank, its *owner*. Both
process the same samples with the same weights and the same random numbers, so both must compute
the same bits. If they do not, one of the two devices is wrong.

Each rank processes its micro-batches of a checked global batch in this order:

1. virtual ranks of its own, one of which another rank repeats;
2. the repeated virtual rank of another rank;
3. the rest of its own virtual ranks.

The ranks compare their results before the third part. If two disagree, the loader inserts further
repeats at that point (`batch.loader`). The third part must not be empty, because the optimizer
steps after the last micro-batch. So a rank that has only one virtual rank computes a micro-batch of
its own again, and the result is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.batch.plan import VirtualRankPiece


class CheckedPiece(NamedTuple):
    """A micro-batch of a rank in a checked global batch."""

    piece: VirtualRankPiece
    is_repeat: bool = False
    """True if its gradient is not used for the optimizer step."""
    is_compared: bool = False
    """True if two ranks compute its virtual rank and compare their results."""


class CheckedGlobalBatch(NamedTuple):
    """The micro-batches of a checked global batch."""

    pieces_of_ranks: list[list[CheckedPiece]]
    """For each rank, its micro-batches in order. All ranks have the same number of them."""
    compared_before: int
    """The index of the micro-batch before which the ranks compare their results."""


def add_repeats(
    pieces_of_ranks: Sequence[Sequence[VirtualRankPiece]], check_number: int
) -> CheckedGlobalBatch:
    """Adds repeated virtual ranks to the micro-batches of a global batch.

    Args:
        pieces_of_ranks: the micro-batches of each rank, see `plan.split_over_virtual_ranks`. There
            are at least two ranks.
        check_number: how many global batches of the run were checked before this one. It decides
            which rank repeats what, so that in time every rank checks every virtual rank of all
            other ranks.
    """
    num_ranks = len(pieces_of_ranks)
    num_pieces_before = _num_pieces_before_repeats(pieces_of_ranks)

    # Rank r checks rank r + 1, in the next check rank r + 2, and so on. When it has checked all
    # other ranks, each of these presents its next virtual rank.
    distance = 1 + check_number % (num_ranks - 1)
    num_rounds_before = check_number // (num_ranks - 1)
    compared_of_rank: list[int | None] = []  # the virtual rank of each rank that another repeats
    for pieces in pieces_of_ranks:
        completed = completed_virtual_ranks(pieces, num_pieces_before)
        number = completed[num_rounds_before % len(completed)] if completed else None
        compared_of_rank.append(number)

    repeats_of_rank: list[list[CheckedPiece]] = []
    for rank in range(num_ranks):
        owner = (rank + distance) % num_ranks
        repeats = []
        for piece in pieces_of_ranks[owner]:
            if piece.virtual_rank == compared_of_rank[owner] and not piece.is_padding:
                repeats.append(CheckedPiece(piece, is_repeat=True, is_compared=True))
        repeats_of_rank.append(repeats)

    # All ranks must have the same number of micro-batches, so unused ones fill the gaps.
    max_repeats = max(len(repeats) for repeats in repeats_of_rank)
    checked_of_ranks = []
    for rank, pieces in enumerate(pieces_of_ranks):
        own = []
        for piece in pieces:
            is_compared = piece.virtual_rank == compared_of_rank[rank] and not piece.is_padding
            own.append(CheckedPiece(piece, is_compared=is_compared))
        repeats = repeats_of_rank[rank]
        repeats += [_unused_piece(pieces)] * (max_repeats - len(repeats))
        rest = own[num_pieces_before:] or [_unused_piece(pieces)]
        checked_of_ranks.append([*own[:num_pieces_before], *repeats, *rest])

    return CheckedGlobalBatch(checked_of_ranks, compared_before=num_pieces_before + max_repeats)


def _num_pieces_before_repeats(pieces_of_ranks: Sequence[Sequence[VirtualRankPiece]]) -> int:
    """Returns how many micro-batches of its own each rank processes before the repeated ones.

    It is the largest number that leaves something for afterwards and does not interrupt a virtual
    rank on any rank, so every rank that has samples has completed a virtual rank by then. If each
    number would interrupt one, the repeats come after all other micro-batches.
    """
    num_micro_batches = len(pieces_of_ranks[0])
    for num_before in range(num_micro_batches - 1, 0, -1):
        # The piece with number 0 is the first of its virtual rank.
        interrupts_no_rank = all(pieces[num_before].piece == 0 for pieces in pieces_of_ranks)
        if interrupts_no_rank:
            return num_before
    return num_micro_batches


def completed_virtual_ranks(pieces: Sequence[VirtualRankPiece], num_pieces: int) -> list[int]:
    """Returns the virtual ranks that a rank has completed after its first `num_pieces` pieces."""
    completed = []
    for piece in pieces[:num_pieces]:
        is_last_of_virtual_rank = piece.piece == piece.num_pieces - 1
        if is_last_of_virtual_rank and not piece.is_padding:
            completed.append(piece.virtual_rank)
    return completed


def _unused_piece(pieces: Sequence[VirtualRankPiece]) -> CheckedPiece:
    """Returns a micro-batch that fills a gap; its result is not used.

    If possible it has samples, because the mean loss of an empty batch would be NaN, and the user's
    loop might print that or stop.

    Args:
        pieces: the micro-batches of the rank.
    """
    with_samples = [piece for piece in pieces if not piece.is_padding]
    if not with_samples:
        return CheckedPiece(pieces[-1])

    # It is marked as the only piece of its virtual rank, so that it begins and ends that.
    repeated = with_samples[-1]._replace(piece=0, num_pieces=1)
    return CheckedPiece(repeated, is_repeat=True)


def pieces_of_virtual_rank(
    pieces_of_ranks: Sequence[Sequence[VirtualRankPiece]], number: int
) -> list[CheckedPiece]:
    """Returns the micro-batches of a virtual rank, which every rank computes again.

    Args:
        pieces_of_ranks: the micro-batches of each rank.
        number: number of the virtual rank.
    """
    repeats = []
    for pieces in pieces_of_ranks:
        for piece in pieces:
            if piece.virtual_rank == number and not piece.is_padding:
                repeats.append(CheckedPiece(piece, is_repeat=True, is_compared=True))
    return repeats
