from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from lockstep.errors import JoinError
from lockstep.run.machines.nodes import (
    LEFT,
    LOST,
    Node,
    Peers,
    describe_departure,
    describe_missing,
    without_replaced_nodes,
)
from lockstep.run.machines.wait_announcer import WaitAnnouncer

pytestmark = pytest.mark.launcher


def node(rank: int | None, number: int = 0, **fields: object) -> Node:
    values = {"host": f"host{number}", "pid": 100 + number, "run_id": "r", "nodes": "2:2"}
    return Node(**{**values, "rank": rank, "number": number, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("comer", "kind", "found"),
    [
        (node(1, 5), None, ""),
        (node(0, 5), "DuplicateRankError", "node 0 has already come: process 100 on host host0"),
        (
            node(1, 5, nodes="3:3"),
            "WorldSizeError",
            "node 0 on host host0 was started with --nnodes 2",
        ),
        (node(1, 5, nodes="1:4"), "WorldSizeError", "--nnodes 2"),
        (node(1, 5, run_id="s"), "MasterUnreachableError", "another run, 'r'"),
        (node(1, 5, version="2.0"), "JoinError", "node 0 on host host0 has Lockstep (unknown)"),
    ],
)
def test_a_launcher_of_the_same_run_is_admitted_and_others_are_refused(
    comer: Node, kind: str | None, found: str
) -> None:
    peers = Peers(node(0))
    if kind is None:
        admitted = peers.admit(comer)
        assert admitted == replace(comer, number=1)
        assert peers.node(1) == admitted
    else:
        with pytest.raises(JoinError) as error:
            peers.admit(comer)
        assert type(error.value).__name__ == kind
        assert found in error.value.found
        assert len(peers.all()) == 1


def test_nodes_without_a_rank_are_all_admitted() -> None:
    peers = Peers(node(None))
    for number in (1, 2):
        assert peers.admit(node(None, 9)).number == number


def test_a_node_may_come_again_after_it_was_lost_and_takes_its_place() -> None:
    peers = Peers(node(0))
    peers.admit(node(1))
    peers.write(1, {"state": LOST, "why": "its connection ended"})
    assert peers.admit(node(1, pid=7)).number == 2
    assert [n.number for n in without_replaced_nodes(peers.all())] == [0, 2]


@pytest.mark.parametrize(
    ("older", "newer", "expected"),
    [
        # An elastic run has lost the newer node in round 1; the older one got its rank in round 3.
        ({"last_started_round": 3, "state": LEFT}, {"last_started_round": 1, "state": LOST}, 1),
        ({"last_started_round": 3}, {"last_started_round": 1, "state": LOST}, 1),
        ({"last_started_round": 2, "state": LOST}, {"last_started_round": 3, "state": LEFT}, 2),
        ({"last_started_round": 2, "state": LOST}, {"last_started_round": 2, "state": LEFT}, 2),
        ({"last_started_round": 2, "state": LOST}, {}, 2),
    ],
)
def test_of_two_nodes_of_a_rank_the_one_that_has_started_last_counts(
    older: dict[str, object], newer: dict[str, object], expected: int
) -> None:
    nodes = [node(0), node(1, 1, **older), node(1, 2, **newer)]
    assert [each.number for each in without_replaced_nodes(nodes)] == [0, expected]


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([node(0, requested_round=1), node(1, 1, requested_round=1)], ""),
        ([node(0, requested_round=1)], "node 1 of 2 has not joined; here: node 0 on host host0"),
        (
            [node(0, requested_round=2), node(1, 1, requested_round=1)],
            "node 1 on host host1 is still ending its previous start; here: node 0 on host host0, "
            "node 1 on host host1",
        ),
        (
            [
                node(0, requested_round=2),
                node(1, 1, requested_round=2, state=LEFT, why="rank 3 failed"),
            ],
            "node 1 on host host1 has left (rank 3 failed); here: node 0 on host host0",
        ),
        (
            [
                node(0, requested_round=1),
                node(1, 1, state=LOST, why="x"),
                node(1, 2, requested_round=1),
            ],
            "",
        ),
    ],
)
def test_missing_nodes_are_described(nodes: list[Node], text: str) -> None:
    assert describe_missing(nodes, 2, nodes[0].requested_round) == text


def test_many_missing_nodes_are_each_named() -> None:
    text = describe_missing([node(0, requested_round=1)], 4, 1)
    assert all(f"node {rank} of 4 has not joined" in text for rank in (1, 2, 3))


def test_published_values_are_added_and_a_node_survives_json() -> None:
    peers = Peers(node(0))
    peers.write(0, {"published": {"a": 1}})
    peers.write(0, {"published": {"b": [2]}, "requested_round": 3})
    assert peers.own.published == {"a": 1, "b": [2]}
    assert Node(**json.loads(json.dumps(asdict(peers.own)))) == peers.own


def test_a_node_that_left_in_the_end_is_not_gone() -> None:
    assert not node(1, state=LEFT).gone_early
    assert node(1, state=LEFT, why="rank 0 failed").gone_early
    assert node(1, state=LOST).gone_early
    assert describe_departure(node(None, 4, state=LEFT)) == "process 104 on host host4 has left"


def test_waiting_is_announced_after_a_while_when_it_changes_and_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("lockstep.run.machines.wait_announcer.time.monotonic", lambda: now)
    said: list[str] = []
    announcer = WaitAnnouncer(said.append)
    for seconds, reason in [(0, "a"), (4, "b"), (1, "b"), (1, "b"), (1, "c"), (59, "c"), (2, "c")]:
        now += seconds
        announcer.say_waiting(reason)
    assert said == ["b (waiting for 5 s)", "c (waiting for 7 s)", "c (waiting for 68 s)"]
