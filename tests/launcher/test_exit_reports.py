"""What launchers tell each other about the ends of their ranks, without any process."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.run.machines.nodes import LOST, Node
from lockstep.run.start.exit_reports import ExitReports
from lockstep.run.start.interrupts import Interrupts
from lockstep.run.start.process import Attempt, Process
from lockstep.run.start.process_memory import OomCounts
from lockstep.run.watch.exit_status import Interruption

pytestmark = pytest.mark.unit


class Connection:
    """One launcher's rendezvous: all of a run publish into the same dictionary."""

    can_publish = True

    def __init__(self, node: int, published: dict[int, Any]) -> None:
        self.node = node
        self.all = published
        self.num_published = 0
        self.lost: list[Node] = []

    def publish(self, key: str, value: Any) -> None:
        self.num_published += 1
        self.all[self.node] = value

    def published(self, key: str) -> dict[int, Any]:
        return self.all

    def departed_nodes(self) -> list[Node]:
        return self.lost


class Launcher:
    """One of two launchers, with one rank, whose process has not ended."""

    def __init__(self, node: int, folder: Path, published: dict[int, Any]) -> None:
        self.rank = Process(rank=node, local_rank=0, folder=folder / str(node), pid=1, started_at=1)
        self.connection = Connection(node, published)
        self.interrupts = Interrupts()
        attempt = Attempt([self.rank], 2, node, num_nodes=2, nproc=1, folder=folder)
        rendezvous: Any = self.connection
        counts = OomCounts(None, None)
        self.reports = ExitReports(rendezvous, attempt, [], counts, self.interrupts)

    def end(self, code: int, at: float) -> None:
        self.rank.code, self.rank.ended_at = code, at


@pytest.fixture
def pair(tmp_path: Path) -> list[Launcher]:
    published: dict[int, Any] = {}
    return [Launcher(node, tmp_path, published) for node in range(2)]


def test_launchers_find_the_same_first_failure(pair: list[Launcher]) -> None:
    first, second = pair
    assert not first.reports.has_failure_elsewhere()
    second.end(3, at=10)
    second.reports.publish()
    assert first.reports.has_failure_elsewhere()
    assert first.reports.a_machine_has_ended_elsewhere()
    first.rank.signals_sent[signal.SIGTERM] = 11
    first.end(-signal.SIGTERM, at=12)
    found = [launcher.reports.find_first_failure() for launcher in pair]
    assert found[0] == found[1]
    assert found[0] is not None
    assert (found[0].kind, found[0].ranks, found[0].time) == ("exit", (1,), 10)


def test_a_launcher_that_was_interrupted_is_named_by_the_other(pair: list[Launcher]) -> None:
    second = pair[1]
    second.interrupts.received = Interruption(signal=signal.SIGINT, time=10)
    second.reports.publish()
    for launcher in pair:
        launcher.end(0, at=11)
    headlines = []
    for launcher in pair:
        failure = launcher.reports.find_first_failure()
        assert failure is not None
        headlines.append(failure.headline)
    assert headlines[0].startswith(f"{headlines[1]} on host ")


def test_the_end_of_all_ranks_is_told_once(pair: list[Launcher]) -> None:
    first, second = pair
    first.end(0, at=10)
    assert first.reports.others_run()
    assert first.reports.others_run()
    assert first.connection.num_published == 1
    second.end(0, at=11)
    assert not second.reports.others_run()
    assert not first.reports.others_run()
    assert [launcher.reports.find_first_failure() for launcher in pair] == [None, None]


def test_a_machine_that_is_lost_with_all_its_ranks_is_the_failure(pair: list[Launcher]) -> None:
    first, second = pair
    second.reports.publish()
    about = {"host": "b", "pid": 1, "run_id": "r", "nodes": "2:2"}
    lost = Node(number=1, rank=1, state=LOST, why="its connection ended", **about)  # type: ignore[arg-type]
    first.connection.lost = [lost]
    first.rank.signals_sent[signal.SIGTERM] = 11
    first.end(-signal.SIGTERM, at=12)
    failure = first.reports.find_first_failure()
    assert failure is not None
    assert (failure.kind, failure.ranks, failure.host) == ("node_lost", (1,), "b")
