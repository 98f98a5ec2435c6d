from __future__ import annotations

import linecache

import pytest
from fake_snapshots import make_call, script_frame, stack_in_backward

from lockstep.run.watch.call_table import Mismatch
from lockstep.run.watch.messages import describe, render
from lockstep.run.watch.verdict import Row, Verdict
from lockstep.wording import conjugate, format_ranks

pytestmark = pytest.mark.unit

SOURCE = {20: "    loss.backward()\n", 95: "    evaluate(model, " + "a_long_argument, " * 9 + ")\n"}


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_line(file: str, line: int) -> str:
        assert file == "/home/me/train.py"
        return SOURCE.get(line, "")

    monkeypatch.setattr(linecache, "getline", read_line)


@pytest.mark.usefixtures("source")
def test_a_deadlock_is_rendered_with_its_mismatch() -> None:
    mismatch = Mismatch(
        "the default group",
        6,
        ((0, make_call("broadcast", 6, 8, frames=(script_frame(95),))),
         (1, make_call("all_reduce", 6, 25, frames=stack_in_backward(20))), (2, None)),
        lines_differ_since=4,
    )  # fmt: skip
    rows = (
        Row(0, "a", "waits in broadcast of 8 float", script_frame(95), 12.4),
        Row(1, "a", "waits in all_reduce of 25 float, in backward", script_frame(20), 12.2),
        Row(2, "a", "waits in all_reduce of 25 float, in backward", script_frame(20), 12.1),
        Row(3, "b", "is stopped", None),
    )
    verdict = Verdict(
        "deadlock", True, (0,), "deadlock: so it is", rows, mismatch, ("think",), 12.0
    )
    assert render(verdict) == "\n".join(
        [
            "deadlock: so it is",
            "  rank 0 on a: waits in broadcast of 8 float, for 12 s",
            "    train.py:95: evaluate(model, " + "a_long_argument, " * 3 + "a_long_argume" + "...",
            "  ranks 1-2 on a: wait in all_reduce of 25 float, in backward, for 12 s",
            "    train.py:20: loss.backward()",
            "  rank 3 on b: is stopped",
            "  first mismatch: call 6 of the default group:",
            "    rank 0: broadcast of 8 float",
            "      train.py:95: evaluate(model, " + "a_long_argument, " * 3 + "a_long_argu" + "...",
            "    rank 1: all_reduce of 25 float",
            "      train.py:20: loss.backward()",
            "    rank 2: has not reached it",
            "    (already from call 4 on they called from different lines)",
            "  do: think",
        ]
    )


def test_a_verdict_on_many_ranks_fits_a_screen_and_names_those_at_fault() -> None:
    for does in ("waits in a barrier", "waits in call {}"):
        rows = tuple(Row(n, f"node{n // 8:03}", does.format(n), None) for n in range(1024))
        rows = (*rows[:1000], Row(1000, "node125", "is stopped", None), *rows[1001:])
        calls = tuple((n, make_call("all_reduce", n, n)) for n in range(1024))
        mismatch = Mismatch("the default group", 6, calls)
        lines = render(Verdict("stopped", True, (1000,), "stopped", rows, mismatch)).splitlines()
        assert len(lines) < 30
        assert "  rank 1000 on node125: is stopped" in lines
    assert any(line.endswith("see hang.txt") for line in lines)


@pytest.mark.usefixtures("source")
def test_no_line_is_longer_than_100_columns() -> None:
    rows = tuple(
        Row(r, "host" * r, "waits in " + "x " * 90, script_frame(95), 1.0) for r in range(9)
    )
    text = render(Verdict("working", False, (0,), "long " * 50, rows))
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_line_without_source_shows_its_function() -> None:
    verdict = Verdict(
        "working", False, (0,), "x", (Row(0, "a", "works", script_frame(3, "evaluate")),)
    )
    assert render(verdict).splitlines()[-1] == "    train.py:3, in evaluate"


@pytest.mark.parametrize(
    ("ranks", "name"),
    [((0,), "rank 0"), ((0, 1), "ranks 0-1"), ((3, 1, 5, 4), "ranks 1, 3-5"),
     (tuple(range(0, 200, 2)), f"100 ranks ({', '.join(map(str, range(0, 48, 2)))}, ...)")],
)  # fmt: skip
def test_ranks_are_formatted_as_ranges(ranks: tuple[int, ...], name: str) -> None:
    assert format_ranks(ranks) == name


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (make_call("barrier", 1), "barrier"),
        (make_call("all_reduce", 1, 25), "all_reduce of 25 float"),
        (make_call("all_reduce", 1, input_sizes=((),), dtypes=("long",)), "all_reduce of 1 long"),
        (
            make_call("broadcast", 1, input_sizes=((3, 4),), dtypes=("half",)),
            "broadcast of 3x4 half",
        ),
        (make_call("scatter", 1, output_sizes=((2,),)), "scatter of 2 element"),
        (
            make_call("all_to_all", 1, input_sizes=((1,), (2,), (3,), (4,), (5,)), dtypes=("int",)),
            "all_to_all of 1 + 2 + 3 + 2 more int",
        ),
    ],
)
def test_calls_are_described_by_operation_sizes_and_type(made: object, told: str) -> None:
    assert describe(made) == told  # type: ignore[arg-type]


def test_verbs_are_put_into_the_plural() -> None:
    assert conjugate("is stopped", 1) == "is stopped"
    assert conjugate("is stopped", 2) == "are stopped"
    assert conjugate("waits", 3) == "wait"
    assert conjugate("cannot be seen", 3) == "cannot be seen"
