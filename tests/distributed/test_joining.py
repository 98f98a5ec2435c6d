"""The protocol alone, on a store in memory; `test_rendezvous` has the processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed import Store

from lockstep.distributed import rendezvous
from lockstep.distributed.manifest import Claim, Verdict, meet, wait_until
from lockstep.distributed.topology import Topology
from lockstep.errors import (
    DuplicateRankError,
    LockstepError,
    MissingRankError,
    RanksDifferError,
    WorldSizeError,
)


def claim(rank: int, size: int, timeout: float = 20.0, **record: str) -> Claim:
    return Claim(
        Topology(rank=rank, size=size, local_rank=rank, local_size=size),
        {"host": f"host{rank // 2}", "pid": "1", "rank": str(rank), **record},
        "a table",
        timeout,
    )


def meet_all(*claims: Claim) -> list[Verdict]:
    """Each claim in a thread of its own."""
    store = dist.HashStore()
    verdicts: list[Verdict | None] = [None] * len(claims)

    def run(place: int) -> None:
        verdicts[place] = meet(store, claims[place])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(claims))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [verdict for verdict in verdicts if verdict is not None]


def texts(verdicts: list[Verdict]) -> set[tuple[type[LockstepError], str, str, str]]:
    faults = [v.fault for v in verdicts if v.fault is not None]
    assert len(faults) == len(verdicts)
    return {(type(f), f.was_set, f.found, f.do) for f in faults}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_all_records_in_the_order_of_ranks(size: int) -> None:
    verdicts = meet_all(*(claim(rank, size) for rank in reversed(range(size))))
    assert [v.fault for v in verdicts] == [None] * size
    for verdict in verdicts:
        assert [record["rank"] for record in verdict.records] == [str(r) for r in range(size)]
    assert [v.judged for v in verdicts] == [False] * (size - 1) + [True]


def test_a_missing_rank_is_named_to_all_with_those_that_came() -> None:
    ((kind, was_set, found, do),) = texts(
        meet_all(claim(0, 6, 1), claim(1, 6, 1), claim(2, 6, 1), claim(4, 6, 1))
    )
    assert kind is MissingRankError
    assert was_set == "a run of 6 processes that meet at a table"
    assert found.startswith("ranks 3, 5 did not come within 1 s; came: ")
    assert "ranks 0-1 on host0" in found
    assert "rank 2 on host1" in found
    assert "start them" in do


def test_without_rank_0_the_others_say_so() -> None:
    found = {item[2] for item in texts(meet_all(claim(1, 3, 0.3), claim(2, 3, 0.3)))}
    assert found == {
        "rank 0 did not come within 0.3 s; rank 1 did",
        "rank 0 did not come within 0.3 s; rank 2 did",
    }


@pytest.mark.parametrize("doubled", [0, 1])
def test_two_equal_ranks_are_named_to_all(doubled: int) -> None:
    ((kind, _, found, _),) = texts(meet_all(claim(0, 3), claim(1, 3), claim(doubled, 3)))
    assert kind is DuplicateRankError
    assert f"two processes claim rank {doubled}: process" in found


def test_disagreeing_world_sizes_are_named_to_all() -> None:
    ((kind, _, found, _),) = texts(meet_all(claim(0, 2), claim(1, 3), claim(2, 3)))
    assert kind is WorldSizeError
    assert "rank 0 says world size 2; rank" in found


def test_differing_records_are_named_to_all() -> None:
    ((kind, _, found, _),) = texts(
        meet_all(claim(0, 3, seed="0"), claim(1, 3, seed="0"), claim(2, 3, seed="7"))
    )
    assert kind is RanksDifferError
    assert found == "seed: ranks 0-1 have '0', rank 2 has '7'"


@pytest.mark.parametrize("late", [0, 1])
def test_who_comes_after_the_run_has_begun_is_turned_away(late: int) -> None:
    store = dist.HashStore()
    threads = [threading.Thread(target=meet, args=(store, claim(rank, 2))) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fault = meet(store, claim(late, 2)).fault
    assert isinstance(fault, DuplicateRankError)
    assert "a run has already begun there, with process" in fault.found
    assert f"as rank {late};" in fault.found


def test_a_store_that_goes_away_is_reported(free_port: Callable[[], int]) -> None:
    endpoint = rendezvous.Endpoint("127.0.0.1", free_port(), True)
    served: list[Store] = [rendezvous.serve(endpoint, 10)]
    client = rendezvous.connect(endpoint, 10)
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.append(meet(client, claim(1, 2))))
    thread.start()
    wait_until(lambda: served[0].check(["arrival/1"]), time.monotonic() + 10)
    served.clear()
    thread.join()
    fault = verdicts[0].fault
    assert isinstance(fault, MissingRankError)
    assert "went away during the join" in fault.found


def test_a_judge_that_falls_silent_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.distributed.manifest.GRACE_S", 0.1)
    store = dist.HashStore()
    meet(store, claim(0, 1))
    store.delete_key("verdict")
    fault = meet(store, replace(claim(1, 2), timeout=0.1)).fault
    assert isinstance(fault, MissingRankError)
    assert "on host0) came, but stopped answering" in fault.found
