from __future__ import annotations

import json

import pytest
from fake_snapshots import (
    TIME,
    completed_all_reduces,
    ended_rank,
    make_call,
    make_snapshots,
    rank_state,
    script_frame,
    stack_at,
    stack_in_backward,
)
from hypothesis import given, strategies as st

from lockstep.run.watch.snapshot import Group, Snapshot, from_json, merge, shorten, to_json

pytestmark = pytest.mark.unit


def full() -> Snapshot:
    made = (
        *completed_all_reduces(3),
        make_call("all_gather", 4, 2, frames=stack_in_backward(3)),
        make_call("send", 1, 2, p2p=True, state="started", backend="nccl", frames=()),
    )
    return make_snapshots(
        rank_state(0, stack_in_backward(3), *made, threads=(stack_at(9), ())),
        rank_state(1, None, answered=False, calls=None, completed=None, groups=None, threads=None),
        ended_rank(2, -9),
    )[1]


def test_a_snapshot_survives_json() -> None:
    assert from_json(to_json(full())) == full()


def test_a_stack_that_many_calls_share_is_written_once() -> None:
    stack = tuple(script_frame(line) for line in range(50))
    one = Snapshot(TIME, (rank_state(0, stack_at(1), *completed_all_reduces(2, frames=stack)),))
    many = Snapshot(TIME, (rank_state(0, stack_at(1), *completed_all_reduces(500, frames=stack)),))
    assert len(json.loads(to_json(many))["frames"]) == len(json.loads(to_json(one))["frames"])


def test_the_members_of_a_group_are_not_written_for_each_of_them() -> None:
    def length(size: int) -> int:
        groups = (Group("0", "default_pg", tuple(range(100_000, 100_000 + size))),)
        snapshot = Snapshot(TIME, tuple(rank_state(rank, groups=groups) for rank in range(size)))
        assert from_json(to_json(snapshot)) == snapshot
        return len(to_json(snapshot))

    assert length(256) < 4.1 * length(64)


@given(st.lists(st.integers(0, 20), unique=True))
def test_the_members_of_a_group_come_back_in_their_order(ranks: list[int]) -> None:
    snapshot = Snapshot(TIME, (rank_state(0, groups=(Group("0", "default_pg", tuple(ranks)),)),))
    assert from_json(to_json(snapshot)) == snapshot


def test_shorten_keeps_the_latest_calls() -> None:
    short = shorten(
        Snapshot(TIME, (rank_state(0, stack_at(1), *completed_all_reduces(30)),)), max_calls=4
    )
    assert [c.seq for c in short.ranks[0].calls or ()] == [27, 28, 29, 30]
    assert shorten(full(), 100).ranks[1].calls is None


def test_merge_puts_ranks_in_order() -> None:
    parts = [
        Snapshot(2.0, (rank_state(2), rank_state(3))),
        Snapshot(1.0, (rank_state(0), rank_state(1))),
    ]
    assert [s.rank for s in merge(parts).ranks] == [0, 1, 2, 3]
    assert merge(parts).time == 2.0


def test_a_rank_that_is_not_known_has_not_stopped() -> None:
    assert rank_state(0, state=None).stopped is None
    assert rank_state(0, state="T").stopped is True
    assert rank_state(0, state="t").stopped is True
    assert rank_state(0, state="S").stopped is False
