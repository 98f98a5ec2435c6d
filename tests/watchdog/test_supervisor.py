"""When the supervisor looks and what it says; the looks and judgements themselves are made up."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from lockstep.run.start.plan import HangRules
from lockstep.run.start.process import Process
from lockstep.run.watch import supervisor
from lockstep.run.watch.heartbeat import Heartbeat
from lockstep.run.watch.snapshot import Snapshot
from lockstep.run.watch.supervisor import Supervisor
from lockstep.run.watch.verdict import Verdict

DEADLOCK = Verdict("deadlock", True, (0, 1), "deadlock: nothing moves", waited_s=5.0)


@dataclass
class World:
    """A made-up run: its clock, its ranks' steps, and what a look would find."""

    now: float = 1000.0
    steps: int = 0
    stepped_at: float = 0.0
    took: float = 0.1
    found: Verdict | None = None
    late: Verdict | None = None
    looks: list[tuple[float, bool]] = field(default_factory=list)
    judged: int = 0
    kept: list[Verdict | None] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    folder: Path = Path()

    def supervisor(self, **rules: object) -> Supervisor:
        processes = [Process(rank, rank, self.folder, pid=1) for rank in range(2)]
        return Supervisor(processes, HangRules(**rules), self.folder, self.said.append)  # type: ignore[arg-type]

    def pass_time(
        self, supervisor: Supervisor, seconds: float, each: Callable[[], None] = lambda: None
    ) -> float | None:
        """Lets time pass in tenths of seconds; when the run was to be stopped, if it was."""
        until, began = self.now + seconds, self.now
        while self.now < until:
            self.now += 0.1
            each()
            if supervisor.check():
                return self.now - began
        return None

    def step(self) -> None:
        self.steps += 1
        self.stepped_at = self.now


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    made = World(folder=tmp_path)

    def look(processes: object, lines: bool) -> Snapshot:
        made.looks.append((made.now, lines))
        return Snapshot(made.now)

    def judge(earlier: Snapshot, later: Snapshot, waited_s: float) -> Verdict | None:
        made.judged += 1
        if made.found is None:
            return None
        kind, fatal, ranks, headline = (
            made.found.kind, made.found.fatal, made.found.ranks, made.found.headline
        )  # fmt: skip
        return Verdict(kind, fatal, ranks, headline, waited_s=waited_s)

    monkeypatch.setattr(supervisor.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(supervisor, "take_snapshot", look)
    monkeypatch.setattr(
        supervisor,
        "read_heartbeat",
        lambda folder: Heartbeat(1, 1, made.steps, made.stepped_at, made.took),
    )
    monkeypatch.setattr(
        supervisor, "write_report", lambda folder, snapshot, verdict: made.kept.append(verdict)
    )
    monkeypatch.setattr(supervisor.hang, "find", judge)
    monkeypatch.setattr(supervisor.straggler, "find_straggler", lambda snapshot: made.late)
    return made


def test_ranks_that_make_steps_are_left_alone(world: World) -> None:
    supervisor = world.supervisor()
    assert world.pass_time(supervisor, 5.0, world.step) is None
    assert world.looks == []


def test_a_deadlock_stops_the_run_and_its_report_is_written(world: World) -> None:
    world.found = DEADLOCK
    supervisor = world.supervisor()
    stopped = world.pass_time(supervisor, 60.0)
    assert stopped is not None
    assert 5.0 <= stopped < 7.0
    # Two looks for the verdict, and one more for the lines of earlier calls.
    assert [lines for _, lines in world.looks] == [False, False, True]
    assert supervisor.verdict is not None
    assert world.kept == [supervisor.verdict]
    assert supervisor.check()
    assert world.said == []  # it is told at the end, as what failed first


def test_a_rank_that_is_alternately_working_and_blocked_is_reported_once(world: World) -> None:
    supervisor = world.supervisor()
    for _ in range(10):
        for kind in ("working", "blocked"):
            world.found = replace(DEADLOCK, kind=kind, fatal=False, headline=kind)
            world.pass_time(supervisor, 2.0)
    assert len(world.said) == 2  # and once more when it has lasted four times as long
    # Another rank that is waited for, and what ends in another way, is told at once.
    world.found = replace(DEADLOCK, kind="stopped", fatal=False, headline="stopped")
    world.pass_time(supervisor, 4.0)
    assert world.said[2:] == ["stopped"]


def test_a_deadlock_may_be_only_reported(world: World) -> None:
    world.found = DEADLOCK
    supervisor = world.supervisor(on_hang="report", after=2.0)
    assert world.pass_time(supervisor, 60.0) is None
    assert world.said == [DEADLOCK.headline] * 3  # again when it is four times as long
    # Somebody frees the run, and it hangs once more, at another place.
    world.found = None
    world.step()
    world.pass_time(supervisor, 10.0, world.step)
    world.found = replace(DEADLOCK, ranks=(1,))
    world.pass_time(supervisor, 60.0)
    assert len(world.said) == 6
    assert len(world.kept) == 6


def test_a_full_disk_does_not_hide_a_verdict(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(supervisor, "write_report", fail)
    world.found = DEADLOCK
    assert world.pass_time(world.supervisor(), 60.0) is not None
    assert world.said == ["hang.txt and hang.json cannot be written: No space left on device"]


def test_waiting_is_reported_seldom(world: World) -> None:
    world.found = Verdict("working", False, (0,), "rank 0 works on")
    supervisor = world.supervisor()
    told: list[float] = []
    began = world.now

    def note() -> None:
        if len(world.said) > len(told):
            told.append(world.now - began)

    assert world.pass_time(supervisor, 200.0, note) is None
    assert len(told) == 3
    assert 6.0 <= told[0] < 10.0
    assert told[1] > 3.5 * told[0]
    # In the next epoch the same wait is not told again, unless it is much longer.
    world.step()
    assert world.pass_time(supervisor, 60.0) is None
    assert len(world.said) == 3


def test_slow_steps_are_given_time(world: World) -> None:
    world.took = 10.0
    supervisor = world.supervisor()
    world.step()
    assert world.pass_time(supervisor, 35.0) is None
    assert world.judged == 0
    world.found = DEADLOCK
    assert world.pass_time(supervisor, 60.0) is not None


def test_snapshots_are_taken_seldom_while_ranks_move(world: World) -> None:
    supervisor = world.supervisor()
    world.pass_time(supervisor, 100.0)
    assert 20 < len(world.looks) < 45
    world.found = DEADLOCK
    stopped = world.pass_time(supervisor, 60.0)
    assert stopped is not None
    assert stopped < 9.0


def test_a_straggler_is_reported_when_it_was_found_twice(world: World) -> None:
    supervisor = world.supervisor()
    world.late = Verdict("straggler", False, (1,), "rank 1 comes late")
    world.pass_time(supervisor, 7.0, world.step)
    world.late = None
    world.pass_time(supervisor, 30.0, world.step)
    assert world.said == []
    world.late = Verdict("straggler", False, (1,), "rank 1 comes late")
    world.pass_time(supervisor, 1000.0, world.step)
    assert world.said == ["rank 1 comes late"]


class Led:
    """An exchange in which a launcher of lower rank leads until it is ended."""

    delay_s = 1.0

    def __init__(self) -> None:
        self.led = True
        self.asked: list[bool] = []

    def take_of_all_ranks(self, *, lines: bool = False) -> Snapshot | None:
        self.asked.append(lines)
        return None if self.led else Snapshot(1.0)


def test_launchers_after_the_first_take_snapshots_later(world: World) -> None:
    world.found = DEADLOCK
    first, exchange = world.supervisor(), Led()
    exchange.led = False
    processes = [Process(2, 0, world.folder, pid=1)]
    rules = HangRules()
    second = Supervisor(processes, rules, world.folder, world.said.append, exchange)  # type: ignore[arg-type]
    began = world.now
    assert world.pass_time(first, 60.0, lambda: exchange.asked or second.check()) is not None
    stopped = world.now - began
    assert exchange.asked == [False], "it has begun, and the first has judged meanwhile"
    assert world.pass_time(second, 60.0) is not None
    assert world.now - began <= stopped + 2.0
    assert exchange.asked == [False, False, True]


def test_a_launcher_that_is_led_finds_nothing_and_asks_again(world: World) -> None:
    world.found = DEADLOCK
    exchange = Led()
    processes = [Process(2, 0, world.folder, pid=1)]
    led = Supervisor(processes, HangRules(), world.folder, world.said.append, exchange)  # type: ignore[arg-type]
    assert world.pass_time(led, 20.0) is None
    assert world.judged == 0
    exchange.led = False
    assert world.pass_time(led, 5.0) is not None
