from __future__ import annotations

import json

from fake_snapshots import TIME, alike, at, call, ended, in_backward, looks, own, state
from hypothesis import given
from hypothesis import strategies as st

from lockstep.run.watch.snapshot import Group, Snapshot, from_json, merge, shorten, to_json


def full() -> Snapshot:
    made = (
        *alike(3),
        call("all_gather", 4, 2, frames=in_backward(3)),
        call("send", 1, 2, p2p=True, state="started", backend="nccl", frames=()),
    )
    return looks(
        state(0, in_backward(3), *made, threads=(at(9), ())),
        state(1, None, answered=False, calls=None, completed=None, groups=None, threads=None),
        ended(2, -9),
    )[1]


def test_what_goes_through_text_comes_back_equal() -> None:
    assert from_json(to_json(full())) == full()


def test_a_stack_that_many_calls_share_is_written_once() -> None:
    stack = tuple(own(line) for line in range(50))
    one = Snapshot(TIME, (state(0, at(1), *alike(2, frames=stack)),))
    many = Snapshot(TIME, (state(0, at(1), *alike(500, frames=stack)),))
    assert len(json.loads(to_json(many))["frames"]) == len(json.loads(to_json(one))["frames"])


def test_the_members_of_a_group_are_not_written_for_each_of_them() -> None:
    def length(size: int) -> int:
        groups = (Group("0", "default_pg", tuple(range(100_000, 100_000 + size))),)
        snapshot = Snapshot(TIME, tuple(state(rank, groups=groups) for rank in range(size)))
        assert from_json(to_json(snapshot)) == snapshot
        return len(to_json(snapshot))

    assert length(256) < 4.1 * length(64)


@given(st.lists(st.integers(0, 20), unique=True))
def test_the_members_of_a_group_come_back_in_their_order(ranks: list[int]) -> None:
    snapshot = Snapshot(TIME, (state(0, groups=(Group("0", "default_pg", tuple(ranks)),)),))
    assert from_json(to_json(snapshot)) == snapshot


def test_shortened_keeps_the_latest_calls() -> None:
    short = shorten(Snapshot(TIME, (state(0, at(1), *alike(30)),)), max_calls=4)
    assert [c.seq for c in short.ranks[0].calls or ()] == [27, 28, 29, 30]
    assert shorten(full(), 100).ranks[1].calls is None


def test_merged_is_in_the_order_of_the_ranks() -> None:
    parts = [Snapshot(2.0, (state(2), state(3))), Snapshot(1.0, (state(0), state(1)))]
    assert [s.rank for s in merge(parts).ranks] == [0, 1, 2, 3]
    assert merge(parts).time == 2.0


def test_a_rank_that_is_not_known_has_not_stopped() -> None:
    assert state(0, state=None).stopped is None
    assert state(0, state="T").stopped is True
    assert state(0, state="t").stopped is True
    assert state(0, state="S").stopped is False
