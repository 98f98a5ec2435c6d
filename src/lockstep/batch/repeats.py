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


class RankPiece(NamedTuple):
    """A micro-batch of a rank: a piece of a virtual rank, and what the rank computes it for."""

    piece: VirtualRankPiece
    is_repeat: bool = False
    """True if its gradient is not used for the optimizer step."""
    is_compared: bool = False
    """True if two ranks compute its virtual rank and compare their results."""

    @classmethod
    def computed_once(cls, piece: VirtualRankPiece) -> RankPiece:
        """Returns a micro-batch for the optimizer step, which no other rank computes."""
        return cls(piece)

    @classmethod
    def repeated(cls, piece: VirtualRankPiece) -> RankPiece:
        """Returns a micro-batch that is computed again, to compare the result."""
        return cls(piece, is_repeat=True, is_compared=True)

    @classmethod
    def ignored(cls, piece: VirtualRankPiece) -> RankPiece:
        """Returns a micro-batch that is computed, but neither compared nor used for the step."""
        return cls(piece, is_repeat=True)


class CheckedGlobalBatch(NamedTuple):
    """The micro-batches of a checked global batch."""

    pieces_of_ranks: list[list[RankPiece]]
    """For each rank, its micro-batches in order. All ranks have the same number of them."""
    index_of_comparison: int
    """The index of the micro-batch before which the ranks compare their results."""


def add_repeats(
    pieces_of_ranks: Sequence[Sequence[VirtualRankPiece]], check_number: int
) -> CheckedGlobalBatch:
    """Adds repeated virtual ranks to the micro-batches of a global batch.

    With 2 ranks and 4 virtual ranks of one micro-batch each, rank 0 computes the virtual ranks 0
    and 1, and rank 1 computes 2 and 3. The first check adds a repeat to each rank:

        rank 0: 0, repeat of 2, 1
        rank 1: 2, repeat of 0, 3

    The ranks compare their results of 0 and of 2 before the third micro-batch
    (`index_of_comparison` is 2).

    Args:
        pieces_of_ranks: the micro-batches of each rank, see `plan.split_over_virtual_ranks`. There
            are at least two ranks.
        check_number: how many global batches of the run were checked before this one. It decides
            which rank repeats what, so that in time every rank checks every virtual rank of all
            other ranks.
    """
    num_ranks = len(pieces_of_ranks)
    num_pieces_before = _num_pieces_before_repeats(pieces_of_ranks)

    # Rank r repeats a virtual rank of rank r + 1, in the next check one of rank r + 2, and so on.
    # When it has checked all other ranks, a round is over. With 3 ranks, the checks 0 and 1 are
    # round 0, and the checks 2 and 3 round 1.
    distance_to_owner = 1 + check_number % (num_ranks - 1)
    round_number = check_number // (num_ranks - 1)

    # In each round, each rank has another one of its virtual ranks checked: one of those that it
    # will have completed when the repeats begin, or none (None) if it completes none before.
    checked_virtual_ranks = []
    for pieces in pieces_of_ranks:
        completed = completed_virtual_ranks(pieces, num_pieces_before)
        checked_virtual_ranks.append(_choose_in_turn(completed, round_number))

    # The micro-batches that each rank repeats.
    repeats_of_ranks = []
    for rank in range(num_ranks):
        owner = (rank + distance_to_owner) % num_ranks
        repeats_of_ranks.append(_repeats_of(pieces_of_ranks[owner], checked_virtual_ranks[owner]))
    num_repeats = max(len(repeats) for repeats in repeats_of_ranks)

    # Each rank processes the first micro-batches of its own, then its repeats, then the rest of its
    # own. All ranks must have the same number of micro-batches, so a rank that repeats fewer than
    # others fills the gap with micro-batches whose results are not used.
    pieces_with_repeats = []
    for rank, pieces in enumerate(pieces_of_ranks):
        own = _mark_compared(pieces, checked_virtual_ranks[rank])
        own_before = own[:num_pieces_before]
        own_after = own[num_pieces_before:]

        repeats = repeats_of_ranks[rank]
        filler = _filler_piece(pieces)
        fillers = [filler] * (num_repeats - len(repeats))

        # The ranks compare just before a micro-batch. If none of their own is left, a filler is
        # added, so that they can compare before it.
        if not own_after:
            own_after = [filler]
        pieces_with_repeats.append([*own_before, *repeats, *fillers, *own_after])

    index_of_comparison = num_pieces_before + num_repeats
    return CheckedGlobalBatch(pieces_with_repeats, index_of_comparison)


def _choose_in_turn(virtual_ranks: Sequence[int], round_number: int) -> int | None:
    """Returns another virtual rank in each round, from the first again after the last."""
    if not virtual_ranks:
        return None
    return virtual_ranks[round_number % len(virtual_ranks)]


def _repeats_of(
    pieces_of_owner: Sequence[VirtualRankPiece], virtual_rank: int | None
) -> list[RankPiece]:
    """Returns the micro-batches of a virtual rank, to be computed again by another rank.

    Padding is left out, since it has no samples.

    Args:
        pieces_of_owner: all micro-batches of the rank that owns the virtual rank.
        virtual_rank: number of the virtual rank. None if the owner finishes no virtual rank before
            the repeats: then nothing is repeated.
    """
    if virtual_rank is None:
        return []

    repeats = []
    for piece in pieces_of_owner:
        if piece.virtual_rank == virtual_rank and not piece.is_padding:
            repeats.append(RankPiece.repeated(piece))
    return repeats


def _mark_compared(
    pieces: Sequence[VirtualRankPiece], repeated_virtual_rank: int | None
) -> list[RankPiece]:
    """Returns a rank's own micro-batches; those that another rank repeats are marked as compared.

    Args:
        pieces: the micro-batches of the rank.
        repeated_virtual_rank: the virtual rank of this rank that another one repeats, or None.
    """
    own_pieces = []
    for piece in pieces:
        is_compared = piece.virtual_rank == repeated_virtual_rank and not piece.is_padding
        own_pieces.append(RankPiece(piece, is_compared=is_compared))
    return own_pieces


def _num_pieces_before_repeats(pieces_of_ranks: Sequence[Sequence[VirtualRankPiece]]) -> int:
    """Returns how many micro-batches of its own each rank processes before the repeated ones.

    At that point no rank may be in the middle of a virtual rank. So on every rank the next
    micro-batch must be the first one of a virtual rank (`piece_number == 0`). Of the points for
    which this is true, the last one is taken, because most virtual ranks are complete by then and
    can be repeated. With two virtual ranks of two micro-batches each on every rank, it is 2.

    If there is no such point between two micro-batches, the repeats come after all of them.
    """
    num_micro_batches = len(pieces_of_ranks[0])
    for num_before in range(num_micro_batches - 1, 0, -1):
        next_pieces = [pieces[num_before] for pieces in pieces_of_ranks]
        if all(piece.piece_number == 0 for piece in next_pieces):
            return num_before
    return num_micro_batches


def completed_virtual_ranks(pieces: Sequence[VirtualRankPiece], num_pieces: int) -> list[int]:
    """Returns the virtual ranks that a rank has completed after its first `num_pieces` pieces."""
    completed = []
    for piece in pieces[:num_pieces]:
        is_last_of_virtual_rank = piece.piece_number == piece.num_pieces - 1
        if is_last_of_virtual_rank and not piece.is_padding:
            completed.append(piece.virtual_rank)
    return completed


def _filler_piece(pieces: Sequence[VirtualRankPiece]) -> RankPiece:
    """Returns a micro-batch for a rank that has fewer than others; it does not change the step.

    It is one of the rank's own micro-batches, computed a second time, and its gradient is ignored.
    Only a rank without samples gets an empty one, whose gradient is zero: the mean loss of an empty
    batch is NaN, and the user's loop might print that or stop.

    Args:
        pieces: the micro-batches of the rank.
    """
    with_samples = [piece for piece in pieces if not piece.is_padding]
    if not with_samples:
        padding = pieces[-1]
        return RankPiece.computed_once(padding)  # its gradient of zero need not be ignored

    # The rank also computes this piece at its usual place, where its gradient is used.
    return RankPiece.ignored(_as_only_piece(with_samples[-1]))


def _as_only_piece(piece: VirtualRankPiece) -> VirtualRankPiece:
    """Returns a piece as if it were the only one of its virtual rank: piece 0 of 1.

    The virtual rank then begins and ends with it, and does not wait for other pieces.
    """
    return piece._replace(piece_number=0, num_pieces=1)


def pieces_of_virtual_rank(
    pieces_of_ranks: Sequence[Sequence[VirtualRankPiece]], number: int
) -> list[RankPiece]:
    """Returns the micro-batches of a virtual rank, to be computed again by every rank.

    This is done if two ranks disagree about the virtual rank: the majority of all ranks then shows
    which of the two is wrong.

    Args:
        pieces_of_ranks: the micro-batches of each rank.
        number: number of the virtual rank.
    """
    # Padding, which only fills up the list of a rank, has no samples and is left out.
    repeats = []
    for pieces in pieces_of_ranks:
        for piece in pieces:
            if piece.virtual_rank == number and not piece.is_padding:
                repeats.append(RankPiece.repeated(piece))  # every rank computes and compares it
    return repeats
