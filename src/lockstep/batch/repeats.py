"""Plans which virtual ranks are computed twice, by two processes, to check the devices.

In a *checked* global batch each process computes one virtual rank of another process once more: it
*repeats* it. The other process is its *owner*. Both compute the same samples with the same weights
and the same random stream, so both must get the same bits.

A process hands out its micro-batches of a checked global batch in this order:

1. virtual ranks of its own, at least one of which is compared;
2. the repeated virtual rank of another process;
3. the rest of its own virtual ranks.

Before the third part all processes know whether they agree; if not, the loader inserts further
repeats there (`batch.loader`). A process that has one virtual rank only has nothing left for the
third part. It cannot be empty, because the optimizer steps after the last micro-batch; so the
process computes a micro-batch of its own again, whose result nobody uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.batch.plan import VirtualRankPiece


class CheckedPiece(NamedTuple):
    """A micro-batch of a process in a checked global batch."""

    piece: VirtualRankPiece
    is_repeat: bool = False
    """True if it counts for nothing."""
    is_compared: bool = False
    """True if its virtual rank is computed by two processes that compare it."""


class CheckedGlobalBatch(NamedTuple):
    """The micro-batches of a checked global batch."""

    pieces_of_ranks: list[list[CheckedPiece]]
    """For each rank its micro-batches in order; all ranks have as many."""
    compared_before: int
    """The index of the micro-batch before which the ranks compare."""


def add_repeats(
    pieces_of_ranks: Sequence[Sequence[VirtualRankPiece]], check_number: int
) -> CheckedGlobalBatch:
    """Adds repeated virtual ranks to the micro-batches of a global batch.

    Args:
        pieces_of_ranks: the micro-batches of each rank, of which there are at least two; see
            `plan.split_over_virtual_ranks`.
        check_number: how many checks there were before in the run. It decides who repeats what, so
            that in time every rank checks every other one, and each of its virtual ranks.
    """
    num_ranks = len(pieces_of_ranks)
    place = _place_of_repeats(pieces_of_ranks)
    distance = 1 + check_number % (num_ranks - 1)  # rank r checks the rank so far after it
    num_rounds_before = check_number // (num_ranks - 1)
    compared_of_rank: list[int | None] = []
    for pieces in pieces_of_ranks:
        complete = virtual_ranks_before(pieces, place)
        number = complete[num_rounds_before % len(complete)] if complete else None
        compared_of_rank.append(number)
    repeats_of_rank: list[list[CheckedPiece]] = []
    for rank in range(num_ranks):
        owner = (rank + distance) % num_ranks
        repeats = []
        for piece in pieces_of_ranks[owner]:
            if piece.virtual_rank == compared_of_rank[owner] and not piece.is_padding:
                repeats.append(CheckedPiece(piece, is_repeat=True, is_compared=True))
        repeats_of_rank.append(repeats)
    most_repeats = max(len(repeats) for repeats in repeats_of_rank)
    checked_of_ranks = []
    for rank, pieces in enumerate(pieces_of_ranks):
        own = []
        for piece in pieces:
            is_compared = piece.virtual_rank == compared_of_rank[rank] and not piece.is_padding
            own.append(CheckedPiece(piece, is_compared=is_compared))
        repeats = repeats_of_rank[rank]
        repeats += [_unused_piece(pieces)] * (most_repeats - len(repeats))
        rest = own[place:] or [_unused_piece(pieces)]
        checked_of_ranks.append([*own[:place], *repeats, *rest])
    return CheckedGlobalBatch(checked_of_ranks, compared_before=place + most_repeats)


def _place_of_repeats(pieces_of_ranks: Sequence[Sequence[VirtualRankPiece]]) -> int:
    """Returns how many micro-batches of its own each rank computes before the repeated ones.

    Something of its own is left on every rank, unless every place would divide a virtual rank.
    Where none is divided, each rank that has samples has completed a virtual rank.
    """
    num_micro_batches = len(pieces_of_ranks[0])
    for place in range(num_micro_batches - 1, 0, -1):
        if all(pieces[place].piece == 0 for pieces in pieces_of_ranks):
            return place
    return num_micro_batches


def virtual_ranks_before(pieces: Sequence[VirtualRankPiece], place: int) -> list[int]:
    """Returns the virtual ranks that a rank has completed before the micro-batch at a place."""
    completed = []
    for piece in pieces[:place]:
        if not piece.is_padding and piece.piece == piece.num_pieces - 1:
            completed.append(piece.virtual_rank)
    return completed


def _unused_piece(pieces: Sequence[VirtualRankPiece]) -> CheckedPiece:
    """Returns a micro-batch that a rank computes although nobody needs it.

    It has samples if the rank has any: the mean loss of a batch without rows would be NaN, which
    training loops print, or stop at.

    Args:
        pieces: of the rank.
    """
    with_samples = [piece for piece in pieces if not piece.is_padding]
    if not with_samples:
        return CheckedPiece(pieces[-1])
    repeated = with_samples[-1]._replace(piece=0, num_pieces=1)
    return CheckedPiece(repeated, is_repeat=True)


def pieces_of_virtual_rank(
    pieces_of_ranks: Sequence[Sequence[VirtualRankPiece]], number: int
) -> list[CheckedPiece]:
    """Returns the micro-batches of a virtual rank that all processes compute again.

    Args:
        pieces_of_ranks: the micro-batches of each rank.
        number: of the virtual rank.
    """
    repeats = []
    for pieces in pieces_of_ranks:
        for piece in pieces:
            if piece.virtual_rank == number and not piece.is_padding:
                repeats.append(CheckedPiece(piece, is_repeat=True, is_compared=True))
    return repeats
