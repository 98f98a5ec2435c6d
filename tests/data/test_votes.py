"""Who is wrong, if processes have computed different bits."""

from __future__ import annotations

import pytest

from lockstep.extensions.device_check.message import (
    Computation,
    Device,
    HeldTensors,
    describe_checkpoint,
    wrong_device_error,
)
from lockstep.extensions.device_check.votes import (
    Kind,
    Results,
    Verdict,
    judge_repeats,
    judge_states,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("first", "again", "kind", "ranks"),
    [
        # Rank 0 is the owner, rank 1 has repeated; the letters are results, "r" the right one.
        ("xr", "xrr", Kind.WRONG, [0]),
        ("rx", "rxr", Kind.WRONG, [1]),
        ("xr", "yrr", Kind.WRONG, [0]),
        ("xr", "rrr", Kind.WRONG_ONCE, [0]),
        ("rx", "rrr", Kind.WRONG_ONCE, [1]),
        ("xy", "rrr", Kind.WRONG_ONCE, [0, 1]),
        ("rx", "rrrx", Kind.WRONG, [3]),
        ("xr", "xrxr", Kind.NO_MAJORITY, [0, 1, 2, 3]),
        ("ab", "abc", Kind.NO_MAJORITY, [0, 1, 2]),
        ("ab", "cde", Kind.ALL_CHANGING, [0, 1]),
        ("xr", "rr", Kind.WRONG_ONCE, [0]),
        ("rx", "rr", Kind.WRONG_ONCE, [1]),
        ("xr", "xr", Kind.ONE_OF_TWO, [0, 1]),
        ("xr", "yr", Kind.CHANGING, [0]),
        ("rx", "ry", Kind.CHANGING, [1]),
        ("ab", "cd", Kind.ALL_CHANGING, [0, 1]),
        ("xr", "", Kind.NOT_REPEATED, [0, 1]),
    ],
)
def test_repeats_are_judged(first: str, again: str, kind: Kind, ranks: list[int]) -> None:
    results = Results(dict(enumerate(first)), dict(enumerate(again)))
    assert judge_repeats(results) == (kind, ranks)


def test_states_are_judged() -> None:
    assert judge_states({0: 7, 1: 8, 2: 7}) == (Kind.WRONG, [1])
    assert judge_states({1: 7, 3: 8}) == (Kind.ONE_OF_TWO, [1, 3])
    assert judge_states({0: 7, 1: 8, 2: 9}) == (Kind.NO_MAJORITY, [0, 1, 2])
    assert judge_states({0: 7, 1: 8, 2: 7, 3: 8}) == (Kind.NO_MAJORITY, [0, 1, 2, 3])


def told(verdict: Verdict, difference: Computation | HeldTensors, *cpus: str) -> str:
    devices = [Device(f"cuda:{rank}", f"node{rank}", {"CPU": cpu}) for rank, cpu in enumerate(cpus)]
    error = wrong_device_error(
        verdict, difference, ["a", "b"], devices, every=50, step=100, checkpoint=""
    )
    return str(error)


@pytest.mark.parametrize("kind", list(Kind))
def test_every_verdict_names_its_devices(kind: Kind) -> None:
    verdict = Verdict(kind, [0, 1])
    computed = told(verdict, Computation(4, 0, 1), "A", "A", "A", "A", "A")
    assert "check_devices=50" in computed
    assert "step 100, virtual rank 4" in computed
    assert "another CPU" not in computed
    if kind is not Kind.NO_MAJORITY:
        assert "rank 0 (cuda:0 of node0) and rank 1 (cuda:1 of node1)" in computed
    held = told(verdict, HeldTensors("parameters", [0, 1, 2, 3, 4]), "A", "A", "A", "A", "A")
    assert "before step 100, in the parameters a, b: " in held


def test_what_decides_bits_is_named_as_the_cause_that_it_may_be() -> None:
    text = told(Verdict(Kind.WRONG, [2]), Computation(0, 2, 0), "AVX512", "AVX512", "AVX2")
    assert "; rank 2 has another CPU (AVX2, others AVX512)" in text
    assert "make all ranks equal in what decides bits" in text


def test_nothing_is_said_of_checkpoints_that_are_not_there() -> None:
    assert describe_checkpoint([], None) == ""
    assert describe_checkpoint(["/nonexistent"], 5) == ""
