"""Who computes what again in a global batch that is checked."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lockstep.batch.plan import VirtualRankPiece, part_sizes, split_over_virtual_ranks
from lockstep.batch.repeats import CheckedGlobalBatch, add_repeats, pieces_of_virtual_rank
from lockstep.session.micro_batch import VirtualRanks

pytestmark = pytest.mark.unit


def one_model(num_virtual_ranks: int) -> VirtualRanks:
    """The virtual ranks of a run, which train one model together."""
    return VirtualRanks(count=num_virtual_ranks, train_copies=False)


@st.composite
def global_batches(draw: st.DrawFn) -> list[list[VirtualRankPiece]]:
    """The micro-batches of all ranks, each of which has at least one virtual rank."""
    shares = tuple(draw(st.lists(st.integers(1, 4), min_size=2, max_size=5)))
    num_virtual_ranks = draw(st.integers(len(shares), 12))
    if 0 in part_sizes(num_virtual_ranks, shares):
        shares = (1,) * len(shares)
    count = draw(st.integers(1, 30))
    return split_over_virtual_ranks(
        count, shares, draw(st.integers(1, 3)), one_model(num_virtual_ranks)
    )


def virtual_ranks_compared(checked: CheckedGlobalBatch, rank: int, is_repeat: bool) -> set[int]:
    numbers = set()
    for piece in checked.pieces_of_ranks[rank]:
        if piece.is_compared and piece.is_repeat is is_repeat:
            numbers.add(piece.piece.virtual_rank)
    return numbers


@given(global_batches(), st.integers(0, 100))
def test_every_rank_still_computes_its_own(
    pieces_of_ranks: list[list[VirtualRankPiece]], number: int
) -> None:
    checked = add_repeats(pieces_of_ranks, number)
    assert len({len(pieces) for pieces in checked.pieces_of_ranks}) == 1
    for rank, pieces in enumerate(pieces_of_ranks):
        kept = [piece.piece for piece in checked.pieces_of_ranks[rank] if not piece.is_repeat]
        with_samples = [piece for piece in pieces if not piece.is_padding]
        assert [piece for piece in kept if not piece.is_padding] == with_samples
        # The optimizer steps after the last one, and what it needs is known before the comparison.
        assert checked.index_of_comparison < len(checked.pieces_of_ranks[rank])


@given(global_batches(), st.integers(0, 100))
def test_a_rank_is_checked_by_one_other(
    pieces_of_ranks: list[list[VirtualRankPiece]], number: int
) -> None:
    checked = add_repeats(pieces_of_ranks, number)
    owner_of_number = {}
    repeated_numbers = []
    for rank, pieces in enumerate(pieces_of_ranks):
        own = virtual_ranks_compared(checked, rank, is_repeat=False)
        has_samples = any(not piece.is_padding for piece in pieces)
        assert len(own) == has_samples
        owner_of_number.update(dict.fromkeys(own, rank))
        repeated_numbers += virtual_ranks_compared(checked, rank, is_repeat=True)
    assert sorted(repeated_numbers) == sorted(owner_of_number)
    for rank, pieces in enumerate(checked.pieces_of_ranks):
        for repeated in virtual_ranks_compared(checked, rank, is_repeat=True):
            owner = owner_of_number[repeated]
            assert owner != rank
            # All of it is computed, by both, before they compare.
            whole = pieces_of_virtual_rank(pieces_of_ranks, repeated)
            before = checked.index_of_comparison
            assert [piece for piece in pieces[:before] if piece in whole] == whole
            computed = [piece.piece for piece in checked.pieces_of_ranks[owner][:before]]
            assert {piece.piece for piece in whole} <= set(computed)


@given(global_batches(), st.integers(0, 100))
def test_no_virtual_rank_is_interrupted(
    pieces_of_ranks: list[list[VirtualRankPiece]], number: int
) -> None:
    checked = add_repeats(pieces_of_ranks, number)
    for pieces in checked.pieces_of_ranks:
        next_piece = 0
        for index, piece in enumerate(pieces):
            if index == checked.index_of_comparison:
                assert next_piece == 0
            assert piece.piece.piece_number == next_piece
            next_piece += 1
            if next_piece == piece.piece.num_pieces:
                next_piece = 0


def test_in_time_every_rank_checks_every_other_and_all_its_virtual_ranks() -> None:
    pieces_of_ranks = split_over_virtual_ranks(16, (1, 1, 1), 1, one_model(8))
    pairs = set()
    compared = set()
    for number in range(12):
        checked = add_repeats(pieces_of_ranks, number)
        for rank in range(3):
            for repeated in virtual_ranks_compared(checked, rank, is_repeat=True):
                compared.add(repeated)
                owner = next(
                    owner
                    for owner in range(3)
                    if repeated in virtual_ranks_compared(checked, owner, is_repeat=False)
                )
                pairs.add((rank, owner))
    assert pairs == {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}
    # The last virtual rank of a process is what is left for the time after the comparison. A
    # process that has fewer than the others has nothing to compute then.
    assert compared == {0, 1, 3, 4, 6, 7}


def test_one_virtual_rank_for_each_process() -> None:
    checked = add_repeats(split_over_virtual_ranks(8, (1, 1), 1, one_model(2)), 0)
    numbers = [piece.piece.virtual_rank for piece in checked.pieces_of_ranks[0]]
    assert numbers == [0, 1, 0]  # its own, that of rank 1, and something for the optimizer's step
    assert [piece.is_repeat for piece in checked.pieces_of_ranks[0]] == [False, True, True]
    assert [piece.is_compared for piece in checked.pieces_of_ranks[0]] == [True, True, False]
    assert checked.index_of_comparison == 2
