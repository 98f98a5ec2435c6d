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

pytestmark = pytest.mark.netns


class FakeNetwork:
    """What all launchers have published, as real rendezvous would carry it."""

    def __init__(self) -> None:
        self.published: dict[tuple[int | None, str, int], Any] = {}
        """By receiver (None: all), topic and sender."""
        self.lost: list[str] = []

    def rendezvous(self, node: int, max_chars: int = 1 << 20) -> Rendezvous:
        return cast(Rendezvous, _FakeRendezvous(self, node, max_chars))


class _FakeRendezvous:
    can_publish = True

    def __init__(self, network: FakeNetwork, node: int, max_chars: int) -> None:
        self._network, self._node, self._max_chars = network, node, max_chars

    def publish(self, key: str, value: Any, to: int | None = None) -> bool:
        text = json.dumps(value)
        if len(text) <= self._max_chars:
            self._network.published[to, key, self._node] = json.loads(text)
        return len(text) <= self._max_chars

    def published(self, key: str) -> dict[int, Any]:
        published = dict(self._network.published)
        return {
            n: v for (to, k, n), v in published.items() if k == key and to in (None, self._node)
        }

    def departed_nodes(self) -> list[str]:
        return self._network.lost


def snapshot_of_node(
    node: int, time: float = 1.0, calls: tuple[CollectiveCall, ...] = ()
) -> Snapshot:
    state = RankState(rank=node, host=f"h{node}", pid=1, alive=True, calls=calls)
    return Snapshot(time, (state,))


@contextmanager
def answering(exchange: SnapshotExchange) -> Iterator[None]:
    """While this context is open, another launcher answers as its loop does."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.005):
            exchange.answer()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def make_two_exchanges(
    take_second: Callable[[bool], Snapshot] = lambda lines: snapshot_of_node(1),
    max_chars: int = 1 << 20,
) -> tuple[FakeNetwork, SnapshotExchange, SnapshotExchange]:
    network = FakeNetwork()
    first = SnapshotExchange(network.rendezvous(0), 0, 2, lambda lines: snapshot_of_node(0))
    return network, first, SnapshotExchange(network.rendezvous(1, max_chars), 1, 2, take_second)


def test_a_single_machine_exchanges_nothing() -> None:
    alone = SnapshotExchange(FakeNetwork().rendezvous(0), 0, 1, lambda lines: snapshot_of_node(0))
    alone.answer()
    assert alone.take_of_all_ranks() == snapshot_of_node(0)


def test_another_launcher_takes_a_snapshot_when_asked() -> None:
    times = iter(range(10))
    _, first, second = make_two_exchanges(
        lambda lines: snapshot_of_node(1, time=float(next(times)))
    )
    with answering(second):
        for _ in range(2):
            found = first.take_of_all_ranks()
            assert found is not None
            assert [state.rank for state in found.ranks] == [0, 1]
    assert next(times) == 2, "one answer for each question"


def test_two_launchers_may_ask_at_once() -> None:
    _, *both = make_two_exchanges()
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
    _, first, second = make_two_exchanges()
    with answering(second):
        assert first.take_of_all_ranks() is not None
    assert first.take_of_all_ranks() is None


def test_a_lost_machine_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_exchange, "_ANSWER_TIMEOUT_S", 1000.0)
    network, first, _ = make_two_exchanges()
    network.lost.append("node 1")
    assert first.take_of_all_ranks() is None


def test_the_launcher_of_lowest_rank_asks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(snapshot_exchange.time, "monotonic", lambda: now[0])
    taken: list[bool] = []

    def take(lines: bool) -> Snapshot:
        taken.append(lines)
        return snapshot_of_node(1)

    _, first, second = make_two_exchanges(take)
    assert first.delay_s < second.delay_s
    with answering(second):
        for _ in range(2):
            assert first.take_of_all_ranks() is not None, "the first is not led by the answers"
    assert second.take_of_all_ranks() is None
    assert taken == [False, False], "who does not ask does not disturb its ranks either"
    with answering(first):
        assert second.take_of_all_ranks(call_stacks=True) is not None, (
            "a verdict that is found is completed"
        )
        now[0] += snapshot_exchange._LED_FOR_S + 0.1
        assert second.take_of_all_ranks() is not None


def test_lines_are_included_if_the_asker_wants_them() -> None:
    asked: list[bool] = []

    def take(lines: bool) -> Snapshot:
        asked.append(lines)
        return snapshot_of_node(1)

    _, first, second = make_two_exchanges(take)
    with answering(second):
        first.take_of_all_ranks()
        first.take_of_all_ranks(call_stacks=True)
    assert asked == [False, True]


@pytest.mark.parametrize(("max_chars", "num_calls"), [(10_000, 10), (2_000, 1)])
def test_too_long_answers_are_sent_with_fewer_calls(max_chars: int, num_calls: int) -> None:
    calls = tuple(
        CollectiveCall(group="0", backend="gloo", seq=i, op="barrier", time_s=1.0)
        for i in range(100)
    )
    _, first, second = make_two_exchanges(
        lambda lines: snapshot_of_node(1, calls=calls), max_chars=max_chars
    )
    with answering(second):
        found = first.take_of_all_ranks()
    assert found is not None
    assert [call.seq for call in found.ranks[1].calls or ()] == list(range(100 - num_calls, 100))


def test_an_answer_is_sent_only_to_the_launcher_that_asked() -> None:
    network = FakeNetwork()
    first, second, third = (
        SnapshotExchange(
            network.rendezvous(node), node, 3, lambda lines, node=node: snapshot_of_node(node)
        )
        for node in range(3)
    )
    with answering(second), answering(third):
        found = first.take_of_all_ranks()
    assert found is not None
    assert [state.rank for state in found.ranks] == [0, 1, 2]
    assert {(to, teller) for to, _, teller in network.published} == {(None, 0), (0, 1), (0, 2)}
