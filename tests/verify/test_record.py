"""What is known of a run whose script has failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.run.start.worker import Script
from lockstep.verify.rank_files import RankEnd, UpdateWriter
from lockstep.verify.run_config import RunConfig
from lockstep.verify.run_record import RunRecord, record_run
from lockstep.verify.training_record import RankUpdate

pytestmark = pytest.mark.launcher

TWO = RunConfig(name="2 processes", nproc=2, script=Script(path="train.py"))


def recorded(
    folder: Path, *ends: tuple[int, BaseException | None], steps: Sequence[int] = ()
) -> RunRecord:
    """A run whose ranks end so, one after the other, after so many steps."""

    def start(run: Path, way: RunConfig) -> str:
        for rank, error in ends:
            writer = UpdateWriter(run, rank)
            for _ in range(dict(enumerate(steps)).get(rank, 0)):
                writer.write(RankUpdate())
            writer.end(error)
        return "one\ntwo\n"

    return record_run(TWO, folder / "run", start)


def test_the_error_that_came_first_is_told_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="invalid") as first:
        int("x")
    later = RuntimeError("the connection was closed")
    run = recorded(tmp_path, (1, first.value), (0, later))
    headline, at = run.error.splitlines()
    assert headline.startswith("ValueError: invalid literal")
    assert at.startswith("  at:    test_record.py:")
    assert (run.code, run.output) == ("", "")


def test_an_error_of_the_catalogue_goes_before_what_came_first(tmp_path: Path) -> None:
    known = UsageError("a", "b", "c", code="LS303")
    run = recorded(tmp_path, (0, ValueError("x")), (1, known))
    assert run.code == "LS303"
    assert run.error.startswith("UsageError: a\n  found: b\n")


@pytest.mark.parametrize(
    ("code", "text"), [("LS101", "sys.exit('LS101')"), (2, "sys.exit(2)"), (None, "sys.exit()")]
)
def test_what_a_script_exits_with_is_no_code_of_the_catalogue(
    tmp_path: Path, code: str | int | None, text: str
) -> None:
    run = recorded(tmp_path, (0, SystemExit(code)), (1, None))
    assert (run.error, run.code, run.output) == (text, "", "one\ntwo")


def test_a_rank_that_ended_before_the_others_is_the_finding(tmp_path: Path) -> None:
    closed = RuntimeError("Connection closed by peer")
    run = recorded(tmp_path / "fewer", (1, None), (0, closed), steps=(2, 1))
    assert run.code == "LS405"
    assert run.error.splitlines() == [
        "a rank that was gone: rank 1 ended without an error after optimizer step 1, "
        "rank 0 went on after step 2",
        "rank 0: RuntimeError: Connection closed by peer",
    ]
    # All asked for had been made.
    run = recorded(tmp_path / "more", (0, None), (1, closed), steps=(3, 2))
    assert run.code == "LS405"
    assert run.error.startswith(
        "a rank that was gone: rank 0 ended without an error after optimizer step 3, rank 1"
    )
    # What goes wrong first, or after all steps, is another matter.
    for number, (first, steps) in enumerate([(closed, (2, 1)), (None, (3, 3))]):
        run = recorded(tmp_path / str(number), (1, first), (0, closed), steps=steps)
        assert run.code == ""


@pytest.mark.parametrize(
    ("until", "passes", "steps", "code", "idle"),
    [
        ("step 3", 0, (3, 0), "", (1,)),
        ("step 3", 1, (3, 0), "", (1,)),  # of its first step
        ("step 3", 3, (3, 0), "LS405", ()),
        ("step 3", 0, (3, 1), "LS405", ()),
        ("", 0, (3, 0), "LS405", ()),
    ],
)
def test_a_rank_that_waited_for_one_that_was_stopped_has_not_failed(
    tmp_path: Path, until: str, passes: int, steps: tuple[int, int], code: str, idle: Sequence[int]
) -> None:
    def start(run: Path, way: RunConfig) -> str:
        for rank in range(2):
            writer = UpdateWriter(run, rank)
            for number in range(steps[rank]):
                writer.write(RankUpdate(step=number))
            if rank == 0:
                writer.end(None, RankEnd(stopped_at=until, num_backward_passes=0))
            else:
                lost = RuntimeError("Connection closed by peer")
                writer.end(lost, RankEnd(num_backward_passes=passes))
        return ""

    run = record_run(TWO, tmp_path / "run", start)
    assert (run.code, bool(run.error), run.idle_ranks) == (code, bool(code), idle)
    if idle:
        assert [update[1].stepped for update in run.updates] == [False] * 3


def test_a_rank_that_is_left_as_it_was_is_found_though_nothing_failed(tmp_path: Path) -> None:
    def start(run: Path, way: RunConfig) -> str:
        for rank in range(2):
            writer = UpdateWriter(run, rank)
            for number in range(0 if rank else 3):
                writer.write(RankUpdate(step=number))
            passes = 3 * rank
            end = RankEnd(num_backward_passes=passes, num_passes_without_step=passes)
            writer.end(None, end)
        return ""

    run = record_run(TWO, tmp_path / "run", start)
    assert run.code == "LS304"
    assert "of rank 1 have not changed in 3 backward passes" in run.error


def test_a_process_that_is_lost(tmp_path: Path) -> None:
    run = recorded(tmp_path, (0, None))
    assert (run.error, run.output) == ("the loss of a process", "one\ntwo")
    assert recorded(tmp_path / "right", (0, None), (1, None)).error == ""


def test_a_process_that_is_lost_before_the_others_lose_their_connection(tmp_path: Path) -> None:
    report = "lockstep: FIRST FAILURE: rank 0\n  killed by SIGABRT\n  train.py:23: x()\n"

    def start(run: Path, way: RunConfig) -> str:
        UpdateWriter(run, 1).end(RuntimeError("Connection reset by peer"))
        return "a line\n" * 20 + report

    run = record_run(TWO, tmp_path / "run", start)
    assert run.error == "the loss of a process"
    assert run.output.splitlines() == report.splitlines()


def test_what_a_rank_has_recorded_at_its_end_stays_with_it_if_another_rank_is_lost(
    tmp_path: Path,
) -> None:
    def start(run: Path, way: RunConfig) -> str:
        end = RankEnd(final_sums={"Net/w": [1.0, 2.0]}, branch_outcomes=[(("train.py", 3, 4), 1)])
        UpdateWriter(run, 1).end(None, end)
        return ""

    run = record_run(TWO, tmp_path / "run", start)
    assert [list(sums) for sums in run.final_sums] == [[], ["Net/w"]]
    assert [len(outcomes) for outcomes in run.branch_outcomes] == [0, 1]


def test_a_copy_of_the_process_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = UpdateWriter(tmp_path, 0)
    monkeypatch.setattr("os.getpid", lambda: 0)
    with pytest.raises(UsageError, match="only the processes that it starts"):
        writer.write(None)  # type: ignore[arg-type]
    assert list((tmp_path / "rank0").iterdir()) == []
