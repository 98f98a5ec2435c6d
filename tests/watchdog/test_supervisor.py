"""When the supervisor takes snapshots and what it reports; snapshots and verdicts are made up."""

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

pytestmark = pytest.mark.launcher

DEADLOCK = Verdict("deadlock", True, (0, 1), "deadlock: nothing moves", waited_s=5.0)


@dataclass
class FakeRun:
    """A made-up run: its clock, its ranks' steps, and the verdicts that are found."""

    now: float = 1000.0
    steps: int = 0
    stepped_at: float = 0.0
    took: float = 0.1
    verdict_found: Verdict | None = None
    straggler_found: Verdict | None = None
    snapshots_taken: list[tuple[float, bool]] = field(default_factory=list)
    times_judged: int = 0
    reports_written: list[Verdict | None] = field(default_factory=list)
    texts_reported: list[str] = field(default_factory=list)
    folder: Path = Path()

    def report(self, text: str, shown_text: str) -> None:
        assert shown_text == text
        self.texts_reported.append(text)

    def supervisor(self, **rules: object) -> Supervisor:
        processes = [Process(rank, rank, self.folder, pid=1) for rank in range(2)]
        return Supervisor(processes, HangRules(**rules), self.folder, self.report)  # type: ignore[arg-type]

    def pass_time(
        self,
        supervisor: Supervisor,
        seconds: float,
        on_each_tick: Callable[[], None] = lambda: None,
    ) -> float | None:
        """Lets time pass in tenths of seconds. Returns after how long the run was to be stopped."""
        until, began = self.now + seconds, self.now
        while self.now < until:
            self.now += 0.1
            on_each_tick()
            if supervisor.check():
                return self.now - began
        return None

    def step(self) -> None:
        self.steps += 1
        self.stepped_at = self.now


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRun:
    run = FakeRun(folder=tmp_path)

    def take_snapshot(processes: object, call_stacks: bool) -> Snapshot:
        run.snapshots_taken.append((run.now, call_stacks))
        return Snapshot(run.now)

    def judge(earlier: Snapshot, later: Snapshot, waited_s: float) -> Verdict | None:
        run.times_judged += 1
        if run.verdict_found is None:
            return None
        return replace(run.verdict_found, waited_s=waited_s)

    monkeypatch.setattr(supervisor.time, "monotonic", lambda: run.now)
    monkeypatch.setattr(supervisor, "take_snapshot", take_snapshot)
    monkeypatch.setattr(
        supervisor,
        "read_heartbeat",
        lambda folder: Heartbeat(1, 1, run.steps, run.stepped_at, run.took),
    )
    monkeypatch.setattr(
        supervisor,
        "write_report",
        lambda folder, snapshot, verdict: run.reports_written.append(verdict),
    )
    monkeypatch.setattr(supervisor.hang, "find", judge)
    monkeypatch.setattr(
        supervisor.straggler, "find_straggler", lambda snapshot: run.straggler_found
    )
    return run


def test_ranks_that_make_steps_are_left_alone(run: FakeRun) -> None:
    supervisor = run.supervisor()
    assert run.pass_time(supervisor, 5.0, run.step) is None
    assert run.snapshots_taken == []


def test_a_deadlock_stops_the_run_and_its_report_is_written(run: FakeRun) -> None:
    run.verdict_found = DEADLOCK
    supervisor = run.supervisor()
    stopped = run.pass_time(supervisor, 60.0)
    assert stopped is not None
    assert 5.0 <= stopped < 7.0
    # Two snapshots for the verdict, and one more for the lines of earlier calls.
    assert [lines for _, lines in run.snapshots_taken] == [False, False, True]
    assert supervisor.verdict is not None
    assert run.reports_written == [supervisor.verdict]
    assert supervisor.check()
    assert run.texts_reported == []  # it is reported at the end, as what failed first


def test_a_rank_that_is_alternately_working_and_blocked_is_reported_once(run: FakeRun) -> None:
    supervisor = run.supervisor()
    for _ in range(10):
        for kind in ("working", "blocked"):
            run.verdict_found = replace(DEADLOCK, kind=kind, fatal=False, headline=kind)
            run.pass_time(supervisor, 2.0)
    assert len(run.texts_reported) == 2  # and once more when it has lasted four times as long
    # Another rank that is waited for, and what ends in another way, is reported at once.
    run.verdict_found = replace(DEADLOCK, kind="stopped", fatal=False, headline="stopped")
    run.pass_time(supervisor, 4.0)
    assert run.texts_reported[2:] == ["stopped"]


def test_a_deadlock_may_be_only_reported(run: FakeRun) -> None:
    run.verdict_found = DEADLOCK
    supervisor = run.supervisor(on_hang="report", after=2.0)
    assert run.pass_time(supervisor, 60.0) is None
    assert run.texts_reported == [DEADLOCK.headline] * 3  # again when it is four times as long
    # Somebody frees the run, and it hangs once more, at another place.
    run.verdict_found = None
    run.step()
    run.pass_time(supervisor, 10.0, run.step)
    run.verdict_found = replace(DEADLOCK, ranks=(1,))
    run.pass_time(supervisor, 60.0)
    assert len(run.texts_reported) == 6
    assert len(run.reports_written) == 6


def test_a_full_disk_does_not_hide_a_verdict(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(supervisor, "write_report", fail)
    run.verdict_found = DEADLOCK
    assert run.pass_time(run.supervisor(), 60.0) is not None
    assert run.texts_reported == [
        "hang.txt and hang.json cannot be written: No space left on device"
    ]


def test_waiting_is_reported_seldom(run: FakeRun) -> None:
    run.verdict_found = Verdict("working", False, (0,), "rank 0 works on")
    supervisor = run.supervisor()
    reported_after: list[float] = []
    began = run.now

    def note() -> None:
        if len(run.texts_reported) > len(reported_after):
            reported_after.append(run.now - began)

    assert run.pass_time(supervisor, 200.0, note) is None
    assert len(reported_after) == 3
    assert 6.0 <= reported_after[0] < 10.0
    assert reported_after[1] > 3.5 * reported_after[0]
    # In the next epoch the same wait is not reported again, unless it is much longer.
    run.step()
    assert run.pass_time(supervisor, 60.0) is None
    assert len(run.texts_reported) == 3


def test_slow_steps_are_given_time(run: FakeRun) -> None:
    run.took = 10.0
    supervisor = run.supervisor()
    run.step()
    assert run.pass_time(supervisor, 35.0) is None
    assert run.times_judged == 0
    run.verdict_found = DEADLOCK
    assert run.pass_time(supervisor, 60.0) is not None


def test_snapshots_are_taken_seldom_while_ranks_move(run: FakeRun) -> None:
    supervisor = run.supervisor()
    run.pass_time(supervisor, 100.0)
    assert 20 < len(run.snapshots_taken) < 45
    run.verdict_found = DEADLOCK
    stopped = run.pass_time(supervisor, 60.0)
    assert stopped is not None
    assert stopped < 9.0


def test_a_straggler_is_reported_when_it_was_found_twice(run: FakeRun) -> None:
    supervisor = run.supervisor()
    run.straggler_found = Verdict("straggler", False, (1,), "rank 1 comes late")
    run.pass_time(supervisor, 7.0, run.step)
    run.straggler_found = None
    run.pass_time(supervisor, 30.0, run.step)
    assert run.texts_reported == []
    run.straggler_found = Verdict("straggler", False, (1,), "rank 1 comes late")
    run.pass_time(supervisor, 1000.0, run.step)
    assert run.texts_reported == ["rank 1 comes late"]


class FakeExchange:
    """An exchange in which a launcher of lower rank leads until it is ended."""

    delay_s = 1.0

    def __init__(self) -> None:
        self.is_led = True
        self.asked: list[bool] = []

    def take_of_all_ranks(self, *, call_stacks: bool = False) -> Snapshot | None:
        self.asked.append(call_stacks)
        return None if self.is_led else Snapshot(1.0)


def test_launchers_after_the_first_take_snapshots_later(run: FakeRun) -> None:
    run.verdict_found = DEADLOCK
    first, exchange = run.supervisor(), FakeExchange()
    exchange.is_led = False
    processes = [Process(2, 0, run.folder, pid=1)]
    rules = HangRules()
    second = Supervisor(processes, rules, run.folder, run.report, exchange)  # type: ignore[arg-type]
    began = run.now
    assert run.pass_time(first, 60.0, lambda: exchange.asked or second.check()) is not None
    stopped = run.now - began
    assert exchange.asked == [False], "it has begun, and the first has judged meanwhile"
    assert run.pass_time(second, 60.0) is not None
    assert run.now - began <= stopped + 2.0
    assert exchange.asked == [False, False, True]


def test_a_launcher_that_is_led_finds_nothing_and_asks_again(run: FakeRun) -> None:
    run.verdict_found = DEADLOCK
    exchange = FakeExchange()
    processes = [Process(2, 0, run.folder, pid=1)]
    led = Supervisor(processes, HangRules(), run.folder, run.report, exchange)  # type: ignore[arg-type]
    assert run.pass_time(led, 20.0) is None
    assert run.times_judged == 0
    exchange.is_led = False
    assert run.pass_time(led, 5.0) is not None
