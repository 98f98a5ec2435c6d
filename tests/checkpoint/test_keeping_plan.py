"""Whether steps are kept in memory, where their copies go, and what the user is told."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.checkpoint.keeping_plan import RankNeeds, StepsCannotBeKept, plan_keeping

pytestmark = pytest.mark.unit


def needs(machine: int, local_rank: int, **more: Any) -> RankNeeds:
    usual: dict[str, Any] = {
        "bytes_of_step": 1000,
        "bytes_of_areas": [0] * 6,
        "available": 100_000,
        "has_own_parts": True,
        "problem": None,
    }
    return RankNeeds(machine=machine, local_rank=local_rank, **{**usual, **more})


def test_state_that_each_machine_has_is_not_copied_to_another_one() -> None:
    plan = plan_keeping([needs(machine, 0, has_own_parts=False) for machine in range(3)])
    assert plan.each_machine_has_all
    assert plan.partners is None
    assert plan.bytes_of_machine == {0: 1000, 1: 1000, 2: 1000}
    assert "two copies, 2.0 KiB for a rank at most, 2.0 KiB on a machine" in plan.announcement
    assert not plan.announcement.endswith("another one")


def test_shards_are_copied_to_the_next_machine() -> None:
    """Machine 1 has one rank, which receives what the two ranks of machine 0 keep."""
    plan = plan_keeping([needs(0, 0), needs(0, 1), needs(1, 0, bytes_of_step=3000)])
    assert plan.partners is not None
    assert [partner.receiver for partner in plan.partners] == [2, 2, 0]
    assert [partner.senders for partner in plan.partners] == [[2], [], [0, 1]]
    assert plan.bytes_of_machine == {0: 2000, 1: 3000}
    # Two areas for each of 3000 + 2 * 1000 bytes on machine 1. Machine 0 has 2000 of its own and
    # 3000 of the other's.
    assert "two on another one, 9.8 KiB for a rank" in plan.announcement


def test_a_machine_with_too_few_ranks_gets_no_copies() -> None:
    plan = plan_keeping([*(needs(0, local_rank) for local_rank in range(3)), needs(1, 0)])
    assert plan.partners is None
    assert not plan.each_machine_has_all
    assert plan.announcement.endswith("no machine has a copy of the shards of another one")


@pytest.mark.parametrize(("bytes_of_areas", "fits"), [([0] * 6, False), ([800, 800, 9, 9], True)])
def test_memory_that_the_areas_take_already_need_not_be_free(
    bytes_of_areas: list[int], fits: bool
) -> None:
    of_one_machine = [needs(0, 0, available=500, bytes_of_areas=bytes_of_areas)]
    if fits:
        plan_keeping(of_one_machine)
        return
    with pytest.raises(StepsCannotBeKept) as raised:
        plan_keeping(of_one_machine)
    assert raised.value.found == "it takes 2.0 KiB of memory on a machine, and 0.5 KiB are free"


def test_one_rank_that_cannot_keep_its_state_decides_for_all() -> None:
    with pytest.raises(StepsCannotBeKept, match="a set cannot be stored"):
        plan_keeping([needs(0, 0), needs(0, 1, problem="a set cannot be stored")])
