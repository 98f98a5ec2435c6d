from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from namespaces import until

from lockstep.run.machines.rendezvous import Rendezvous
from lockstep.run.watch import snapshot_exchange
from lockstep.run.watch.snapshot import CollectiveCall, RankState, Snapshot
from lockstep.run.watch.snapshot_exchange import SnapshotExchange


class Table:
    """What all launchers have told, as a rendezvous would carry it."""

    def __init__(self) -> None:
        self.told: dict[tuple[int | None, str, int], Any] = {}
        """By whom it is for (None: all), the key, and who told it."""
        self.lost: list[str] = []

    def seat(self, node: int, longest: int = 1 << 20) -> Rendezvous:
        return cast(Rendezvous, _Seat(self, node, longest))


class _Seat:
    can_publish = True

    def __init__(self, table: Table, node: int, longest: int) -> None:
        self._table, self._node, self._longest = table, node, longest

    def publish(self, key: str, value: Any, to: int | None = None) -> bool:
        text = json.dumps(value)
        if len(text) <= self._longest:
            self._table.told[to, key, self._node] = json.loads(text)
        return len(text) <= self._longest

    def published(self, key: str) -> dict[int, Any]:
        told = dict(self._table.told)
        return {n: v for (to, k, n), v in told.items() if k == key and to in (None, self._node)}

    def lost_nodes(self) -> list[str]:
        return self._table.lost


def look(node: int, time: float = 1.0, calls: tuple[CollectiveCall, ...] = ()) -> Snapshot:
    state = RankState(rank=node, host=f"h{node}", pid=1, alive=True, calls=calls)
    return Snapshot(time, (state,))


@contextmanager
def answering(other: SnapshotExchange) -> Iterator[None]:
    """Within it another launcher does what its loop does."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.005):
            other.answer()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def pair(
    takes: Callable[[bool], Snapshot] = lambda lines: look(1),
    longest: int = 1 << 20,
) -> tuple[Table, SnapshotExchange, SnapshotExchange]:
    table = Table()
    mine = SnapshotExchange(table.seat(0), 0, 2, lambda lines: look(0))
    return table, mine, SnapshotExchange(table.seat(1, longest), 1, 2, takes)


def test_a_single_machine_exchanges_nothing() -> None:
    alone = SnapshotExchange(Table().seat(0), 0, 1, lambda lines: look(0))
    alone.answer()
    assert alone.take_of_all_ranks() == look(0)


def test_another_launcher_takes_a_snapshot_when_asked() -> None:
    times = iter(range(10))
    _, mine, other = pair(lambda lines: look(1, time=float(next(times))))
    with answering(other):
        for _ in range(2):
            found = mine.take_of_all_ranks()
            assert found is not None
            assert [state.rank for state in found.ranks] == [0, 1]
    assert next(times) == 2, "one answer for each question"


def test_two_launchers_may_ask_at_once() -> None:
    _, *both = pair()
    found: dict[int, int] = {}
    over = threading.Event()

    def run(node: int) -> None:
        merged = both[node].take_of_all_ranks()
        found[node] = 0 if merged is None else len(merged.ranks)
        while not over.wait(0.005):
            both[node].answer()

    threads = [threading.Thread(target=run, args=(node,)) for node in range(2)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(found) == 2)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert found == {0: 2, 1: 2}


def test_an_answer_to_an_earlier_question_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_exchange, "_ANSWER_TIMEOUT_S", 0.1)
    _, mine, other = pair()
    with answering(other):
        assert mine.take_of_all_ranks() is not None
    assert mine.take_of_all_ranks() is None


def test_a_lost_machine_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_exchange, "_ANSWER_TIMEOUT_S", 1000.0)
    table, mine, _ = pair()
    table.lost.append("node 1")
    assert mine.take_of_all_ranks() is None


def test_the_launcher_of_lowest_rank_asks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(snapshot_exchange.time, "monotonic", lambda: now[0])
    taken: list[bool] = []

    def take(lines: bool) -> Snapshot:
        taken.append(lines)
        return look(1)

    _, mine, other = pair(take)
    assert mine.delay_s < other.delay_s
    with answering(other):
        for _ in range(2):
            assert mine.take_of_all_ranks() is not None, "the first is not led by the answers"
    assert other.take_of_all_ranks() is None
    assert taken == [False, False], "who does not ask does not disturb its ranks either"
    with answering(mine):
        assert other.take_of_all_ranks(lines=True) is not None, (
            "a verdict that is found is completed"
        )
        now[0] += snapshot_exchange._LED_FOR_S + 0.1
        assert other.take_of_all_ranks() is not None


def test_lines_are_included_if_the_asker_wants_them() -> None:
    asked: list[bool] = []

    def take(lines: bool) -> Snapshot:
        asked.append(lines)
        return look(1)

    _, mine, other = pair(take)
    with answering(other):
        mine.take_of_all_ranks()
        mine.take_of_all_ranks(lines=True)
    assert asked == [False, True]


@pytest.mark.parametrize(("longest", "told"), [(10_000, 10), (2_000, 1)])
def test_too_long_answers_are_sent_with_fewer_calls(longest: int, told: int) -> None:
    calls = tuple(
        CollectiveCall(group="0", backend="gloo", seq=i, op="barrier", time_s=1.0)
        for i in range(100)
    )
    _, mine, other = pair(lambda lines: look(1, calls=calls), longest=longest)
    with answering(other):
        found = mine.take_of_all_ranks()
    assert found is not None
    assert [call.seq for call in found.ranks[1].calls or ()] == list(range(100 - told, 100))


def test_an_answer_is_sent_only_to_the_launcher_that_asked() -> None:
    table = Table()
    mine, second, third = (
        SnapshotExchange(table.seat(node), node, 3, lambda lines, node=node: look(node))
        for node in range(3)
    )
    with answering(second), answering(third):
        found = mine.take_of_all_ranks()
    assert found is not None
    assert [state.rank for state in found.ranks] == [0, 1, 2]
    assert {(to, teller) for to, _, teller in table.told} == {(None, 0), (0, 1), (0, 2)}
