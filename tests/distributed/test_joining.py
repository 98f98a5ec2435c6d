"""The protocol alone, on a store in memory; `test_rendezvous` has the processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import Store

from lockstep.distributed import rendezvous
from lockstep.distributed.join import Join
from lockstep.errors import (
    DuplicateRankError,
    LockstepError,
    MissingRankError,
    RanksDifferError,
    WorldSizeError,
)
from lockstep.machine.network import Endpoint, wait_until
from lockstep.machine.topology import SET_BY_SCRIPT, SET_BY_VARIABLES, Topology

pytestmark = pytest.mark.unit

UNKNOWN = frozenset({"local_rank", "local_size", "node_rank"})

Decision = Sequence[str] | LockstepError


@dataclass(frozen=True)
class Rank:
    """One process that asks to join."""

    topology: Topology
    manifest: dict[str, str]
    timeout: float
    one_host: bool = False

    def join(self, store: Store) -> Decision:
        try:
            host = f"host{0 if self.one_host else self.topology.rank // 2}"
            return Join(
                store, self.topology, self.manifest, "a table", self.timeout, host=host
            ).agree()
        except LockstepError as error:
            return error

    def error(self, store: Store) -> LockstepError:
        error = self.join(store)
        assert isinstance(error, LockstepError)
        return error


def rank_of(rank: int, size: int, timeout: float = 600.0, **manifest: str) -> Rank:
    return Rank(
        Topology(rank=rank, size=size, local_rank=rank, local_size=size),
        manifest,
        timeout,
    )


def join_all(*ranks: Rank) -> list[Decision]:
    """Each rank in a thread of its own."""
    store = dist.HashStore()
    decisions: list[Decision | None] = [None] * len(ranks)

    def run(place: int) -> None:
        decisions[place] = ranks[place].join(store)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [decision for decision in decisions if decision is not None]


def texts(decisions: list[Decision]) -> set[tuple[type[LockstepError], str, str, str]]:
    errors = [d for d in decisions if isinstance(d, LockstepError)]
    assert len(errors) == len(decisions)
    return {(type(f), f.was_set, f.found, f.do) for f in errors}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_all_hosts_in_the_order_of_ranks(size: int) -> None:
    decisions = join_all(*(rank_of(rank, size) for rank in reversed(range(size))))
    assert decisions == [[f"host{rank // 2}" for rank in range(size)]] * size


def test_machines_of_the_same_name_are_told_apart_by_their_boot_id() -> None:
    store = dist.HashStore()
    places = [("host", "a"), ("host", "b"), ("host", "a"), ("other", "a")]
    decisions: list[Decision] = [[]] * len(places)

    def run(rank: int) -> None:
        host, boot_id = places[rank]
        topology = rank_of(rank, len(places)).topology
        join = Join(store, topology, {}, "a table", 600.0, host=host, boot_id=boot_id)
        decisions[rank] = join.agree()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert decisions == [["host", "host (2)", "host", "other"]] * len(places)


class Counting:
    """A store that counts the bytes that one rank reads."""

    def __init__(self, store: Store) -> None:
        self.store, self.read = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def get(self, key: str) -> bytes:
        found = self.store.get(key)
        self.read += len(found)
        return found


def test_what_a_rank_reads_does_not_grow_with_their_number() -> None:
    read: dict[int, list[int]] = {}
    for size in (4, 24):
        shared = dist.HashStore()
        stores = [Counting(shared) for _ in range(size)]
        ranks = [
            replace(rank_of(rank, size, text="x" * 500), one_host=True) for rank in range(size)
        ]
        threads = [
            threading.Thread(target=rank.join, args=(store,))
            for rank, store in zip(ranks, stores, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        read[size] = [store.read for store in stores]
    assert read[24][0] < 7 * read[4][0]
    assert max(read[24][1:]) <= max(read[4][1:]) + 10


def test_a_missing_rank_is_named_to_all_with_those_that_came() -> None:
    ((kind, was_set, found, do),) = texts(
        join_all(rank_of(0, 6, 1), rank_of(1, 6, 1), rank_of(2, 6, 1), rank_of(4, 6, 1))
    )
    assert kind is MissingRankError
    assert was_set == "a run of 6 processes that meet at a table"
    assert found.startswith("ranks 3, 5 did not come within 1 s; came: ")
    assert "ranks 0-1 on host0" in found
    assert "rank 2 on host1" in found
    assert "start them" in do


def test_without_rank_0_the_others_say_so() -> None:
    found = {item[2] for item in texts(join_all(rank_of(1, 3, 0.3), rank_of(2, 3, 0.3)))}
    assert found == {
        "rank 0 did not come within 0.3 s; rank 1 did",
        "rank 0 did not come within 0.3 s; rank 2 did",
    }


@pytest.mark.parametrize("doubled", [0, 1])
def test_two_equal_ranks_are_named_to_all(doubled: int) -> None:
    ((kind, _, found, _),) = texts(join_all(rank_of(0, 3), rank_of(1, 3), rank_of(doubled, 3)))
    assert kind is DuplicateRankError
    assert f"two processes claim rank {doubled}: process" in found


def test_disagreeing_world_sizes_are_named_to_all() -> None:
    ((kind, _, found, _),) = texts(join_all(rank_of(0, 2), rank_of(1, 3), rank_of(2, 3)))
    assert kind is WorldSizeError
    assert "rank 0 says world size 2; rank" in found


def test_differing_manifests_are_named_to_all() -> None:
    ((kind, _, found, _),) = texts(
        join_all(rank_of(0, 3, seed="0"), rank_of(1, 3, seed="0"), rank_of(2, 3, seed="7"))
    )
    assert kind is RanksDifferError
    assert found == "seed: ranks 0-1 have '0', rank 2 has '7'"


@pytest.mark.parametrize(
    ("argument", "topologies", "is_told"),
    [
        # Two launchers on one machine, one process each: the local rank of both is 0.
        ("--augment", [{"source": "torchrun"}] * 2, True),
        ("--node", [{"source": "torchrun"}, {"source": "torchrun", "node_rank": 1}], False),
        # Nothing has told the processes that they share a machine before they met.
        ("--me", [{"source": SET_BY_SCRIPT, "unknown": UNKNOWN}] * 2, False),
        ("--me", [{"source": SET_BY_VARIABLES, "unknown": UNKNOWN}] * 2, True),
        ("--local-rank", [{"source": SET_BY_VARIABLES, "unknown": UNKNOWN}] * 2, False),
    ],
)
def test_an_argument_may_differ_if_it_is_exactly_the_number_of_each_process(
    argument: str, topologies: list[dict[str, Any]], is_told: bool
) -> None:
    ranks = []
    for number, fields in enumerate(topologies):
        topology = Topology(rank=number, size=2, **fields)
        manifest = {"arguments": f"train.py {argument} {number}"}
        ranks.append(Rank(topology, manifest, timeout=600.0, one_host=True))
    decisions = join_all(*ranks)
    if not is_told:
        assert decisions == [["host0", "host0"]] * 2
        return
    ((kind, _, found, do),) = texts(decisions)
    assert kind is RanksDifferError
    assert found.startswith(f"arguments: rank 0 has 'train.py {argument} 0', rank 1 has")
    assert "--rank" in do


@pytest.mark.parametrize("late", [0, 1])
def test_who_comes_after_the_run_has_begun_is_turned_away(late: int) -> None:
    store = dist.HashStore()
    threads = [threading.Thread(target=rank_of(rank, 2).join, args=(store,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    error = rank_of(late, 2).error(store)
    assert isinstance(error, DuplicateRankError)
    assert "a run has already begun there, with process" in error.found
    assert f"as rank {late};" in error.found


def test_a_store_that_goes_away_is_reported(free_port: Callable[[], int]) -> None:
    endpoint = Endpoint("127.0.0.1", free_port(), True)
    served: list[Store] = [rendezvous.serve(endpoint, 10)]
    client = rendezvous.connect(endpoint, 10)
    decisions: list[Decision] = []
    thread = threading.Thread(target=lambda: decisions.append(rank_of(1, 2).join(client)))
    thread.start()
    wait_until(lambda: served[0].check(["request/1"]), time.monotonic() + 600)
    served.clear()
    thread.join()
    error = decisions[0]
    assert isinstance(error, MissingRankError)
    assert "went away during the join" in error.found


def test_a_rank_0_that_falls_silent_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.distributed.join.DECISION_GRACE_S", 0.1)
    store = dist.HashStore()
    rank_of(0, 1).join(store)
    store.delete_key("decision")
    error = rank_of(1, 2, 0.1).error(store)
    assert isinstance(error, MissingRankError)
    assert "on host0) came, but stopped answering" in error.found
