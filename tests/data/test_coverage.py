"""What ranks were handed, added up, against the plan."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.batch.coverage import Coverage, checksum
from lockstep.batch.plan import EpochPlan, plan_epoch, split_batch
from lockstep.errors import DataError, LockstepError, RanksDifferError
from lockstep.session.micro_batch import MicroBatch

pytestmark = pytest.mark.unit

WHOLE = MicroBatch()


def test_a_checksum_depends_on_the_samples_and_not_on_their_order():
    generator = np.random.default_rng(0)
    samples = generator.integers(0, 10**9, 1000)
    assert checksum(samples) == checksum(samples[::-1])
    assert checksum(samples[:0]) == 0
    # Equal in number, sum and sum of squares.
    assert checksum(np.array([0, 4, 5])) != checksum(np.array([1, 2, 6]))
    for place in range(1000):
        other = samples.copy()
        other[place] += 1
        assert checksum(other) != checksum(samples)


def settle(ranks: list[Coverage], counting: int | None = None) -> list[LockstepError | None]:
    """What each rank says; None: nothing is wrong, or nothing is due."""
    brought: list[Any] = []
    found: list[LockstepError | None] = []
    for rank in ranks:  # a copy brings what the rank will bring
        collect = SimpleNamespace(exchange=brought.append, num_contributing_ranks=None)
        with contextlib.suppress(TypeError):
            copy.deepcopy(rank).compare_if_due(collect)
    for rank in ranks:
        present = SimpleNamespace(
            exchange=lambda _: brought, num_contributing_ranks=counting or len(ranks)
        )
        try:
            rank.compare_if_due(present)
            found.append(None)
        except LockstepError as error:
            found.append(error)
    return found


def hand_out(
    ranks: list[Coverage],
    plan: EpochPlan,
    epoch: int = 0,
    start: int = 0,
    plans: list[EpochPlan] | None = None,
    spoil: Any = lambda rank, position, samples: samples,
) -> None:
    """One pass on every rank, in two micro-batches each global batch."""
    for number, rank in enumerate(ranks):
        own = plan if plans is None else plans[number]
        rank.begin(epoch, start, own)
        for position in range(start, len(own)):
            batch = own[position]
            parts = split_batch(len(batch), (1,) * len(ranks), 2)
            for j, part in enumerate(parts):
                begin, end = part[number]
                micro = MicroBatch(first=j == 0, last=j == len(parts) - 1)
                samples = spoil(number, position, batch[begin:end])
                rank.add(epoch, position, samples, micro, batch)


def three() -> list[Coverage]:
    return [Coverage(None, None) for _ in range(3)]


PLAN = plan_epoch(1000, 7, seed=3)


def test_nothing_is_said_where_all_is_right():
    ranks = three()
    assert settle(ranks) == [None] * 3  # nothing is done yet
    for epoch in range(4):
        hand_out(ranks, plan_epoch(1000, 7, seed=3, epoch=epoch), epoch)
        assert settle(ranks) == [None] * 3


def test_a_pass_that_was_resumed_in_its_middle():
    ranks = three()
    hand_out(ranks, PLAN, start=100)
    assert ranks[0]._planned.count == 1000 - 700
    assert settle(ranks) == [None] * 3


def test_a_pass_that_was_broken_off_does_not_count():
    ranks = three()
    for rank in ranks:
        rank.begin(0, 0, PLAN)
        rank.add(0, 0, PLAN[0], WHOLE, PLAN[0])
    hand_out(ranks, plan_epoch(1000, 7, seed=3, epoch=1), 1)
    for rank in ranks:
        rank.add(0, len(PLAN) - 1, PLAN[0], WHOLE, PLAN[0])  # the pass around it goes on
    assert settle(ranks) == [None] * 3


def test_ranks_of_one_pipeline_get_the_same_part():
    ranks = three()
    for rank in ranks:
        rank.begin(0, 0, PLAN)
        for position in range(len(PLAN)):
            rank.add(0, position, PLAN[position], WHOLE, PLAN[position])
    assert settle(ranks, counting=1) == [None] * 3


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda rank, at, samples: samples[1:] if (rank, at) == (1, 5) else samples, "LS102"),
        (lambda rank, at, samples: np.append(samples, 3) if at == 9 else samples, "LS101"),
        (lambda rank, at, samples: samples * 0 if (rank, at) == (2, 9) else samples, "LS101"),
    ],
)
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_what_is_missing_or_doubled_is_found_on_all_ranks(spoil, code, epoch):
    ranks = three()
    for good in range(epoch):
        hand_out(ranks, plan_epoch(1000, 7, epoch=good), good)
        settle(ranks)
    hand_out(ranks, plan_epoch(1000, 7, epoch=epoch), epoch, spoil=spoil)
    errors = settle(ranks)
    for later in range(epoch + 1, epoch + 15):  # after the first passes only now and then
        if errors[0] is None:
            hand_out(ranks, plan_epoch(1000, 7, epoch=later), later)
            errors = settle(ranks)
    assert all(isinstance(error, DataError) and error.code == code for error in errors), errors


@pytest.mark.parametrize(
    ("handed", "code"),
    [([0, 1, 3], "LS102"), ([0, 1, 1, 3], "LS101"), ([0, 1, 2, 2, 3], "LS101")],
)
def test_a_global_batch_that_all_ranks_skip_or_repeat(handed, code):
    plan, (rank,) = plan_epoch(16, 4), (ranks := [Coverage(None, None)])
    rank.begin(0, 0, plan)
    for position in handed:
        rank.add(0, position, plan[position], WHOLE, plan[position])
    (error,) = settle(ranks)
    assert (error and error.code) == code


def test_a_long_pass_is_added_up_as_it_goes_on():
    ranks, plan = three(), plan_epoch(50_000, 60, seed=1)
    hand_out(ranks, plan)
    samples = np.concatenate(list(plan.batches()))
    for rank in ranks:
        assert (rank._planned.count, rank._planned.checksum) == (50_000, checksum(samples))
    assert sum(rank._delivered.count for rank in ranks) == 50_000
    assert settle(ranks) == [None] * 3


def test_other_orders_are_found_on_all_ranks():
    ranks = three()
    hand_out(ranks, PLAN, plans=[PLAN, PLAN, plan_epoch(1000, 7, seed=4)])
    errors = settle(ranks)
    assert all(isinstance(error, RanksDifferError) and error.code == "LS105" for error in errors)


def test_long_passes_are_compared_each_short_ones_now_and_then():
    (rank,) = ranks = [Coverage(None, None)]
    exchanges: list[Any] = []
    counting = SimpleNamespace(
        exchange=lambda row: exchanges.append(row) or [row],
        num_contributing_ranks=1,
    )
    for epoch in range(52):
        hand_out(ranks, plan_epoch(160, 4, epoch=epoch), epoch)  # 40 steps
        rank.compare_if_due(counting)
    assert [row[1][0] for row in exchanges] == [160, 160, 25 * 160, 25 * 160]
    for epoch in range(52, 54):
        hand_out(ranks, plan_epoch(4000, 4, epoch=epoch), epoch)
        rank.compare_if_due(counting)
    assert [row[1][0] for row in exchanges[4:]] == [4000, 4000]
