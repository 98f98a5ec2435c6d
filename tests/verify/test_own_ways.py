"""Trainings that do by hand what DDP does: if right they are EQUAL, else the fault is named.

What an update used decides, not what an optimizer was given as its step began.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import warm

from lockstep.wording import format_ranks

pytestmark = pytest.mark.unit

SCRIPTS = Path(__file__).with_name("own_ways")
THOROUGH = pytest.mark.thorough


def in_main(*words: str, nproc: int = 2, steps: int = 3) -> object:
    return pytest.param(words, nproc, steps, id="-".join((*words, str(nproc))))


def thorough(*words: str, nproc: int = 2, steps: int = 3) -> object:
    return pytest.param(words, nproc, steps, id="-".join((*words, str(nproc))), marks=THOROUGH)


@pytest.mark.parametrize(
    ("words", "nproc", "steps"),
    [
        in_main("in_step", "owner"),
        thorough("in_step", "owner", nproc=3),
        thorough("in_step", "whole"),
        thorough("in_step", "whole", nproc=3),
        thorough("in_step", "slices"),
        thorough("in_step", "slices", nproc=3),
        thorough("flat_slices"),
        thorough("flat_slices", nproc=3),
        thorough("tensor_parallel"),
        thorough("tensor_parallel", nproc=3),
        thorough("stages"),
        thorough("by_hand"),
        thorough("by_hand", nproc=3),
        in_main("by_hand", "first", steps=9),  # to the end of the script, as by default
        thorough("by_hand", "first", nproc=3),
        in_main("probe"),
        thorough("probe", "rank=1", nproc=3),
        thorough("probe", "rank=1", "first"),
        thorough("probe", "every=2", steps=6),
        thorough("probe", "every=3", "rank=1", nproc=3, steps=6),
        thorough("probe", "keeps", "alone"),
        thorough("probe", "module"),
        thorough("probe", "module", "first", nproc=3),
        thorough("probe", "module", "rank=1", "first"),
        thorough("probe", "module", "pretrains", steps=9),
        thorough("without_modules"),
        thorough("without_modules", nproc=3),
        thorough("without_modules", steps=9),
        thorough("without_modules", "grad", steps=9),
        thorough("helper", steps=9),
        thorough("helper", nproc=3, steps=9),
        thorough("helper", "pretrains", steps=9),
        thorough("helper", "pretrains", "same", steps=9),
        thorough("helper", "pretrains", "rank=1", nproc=3, steps=9),
        thorough("helper", "pretrains", "same", "rank=1", steps=9),
        thorough("joins", steps=9),
        thorough("joins", nproc=3, steps=9),
        thorough("joins", steps=50),
        thorough("loss_inside"),
        thorough("loss_inside", nproc=3),
        thorough("contrast", "adjoint"),
        thorough("gathered", "with"),
        thorough("gathered", "with", nproc=3),
        thorough("copies", "lone"),
        thorough("copies", "looks"),
        thorough("copies", "looks", nproc=3),
        thorough("graph"),
        thorough("graph", nproc=3),
    ],
)
def test_what_is_right_is_equal(words: tuple[str, ...], nproc: int, steps: int) -> None:
    script, *arguments = words
    verdict = warm.verify(SCRIPTS / f"{script}.py", *arguments, nproc=nproc, steps=steps)
    assert verdict.word == "EQUAL", verdict.lines()
    if script == "graph":
        assert not verdict.findings  # although all ranks compute the same inputs


@pytest.mark.parametrize(
    ("words", "code", "nproc"),
    [
        pytest.param(("in_step", "whole", "sum"), "LS201", 2, marks=THOROUGH),
        pytest.param(("in_step", "owner", "sum"), "LS201", 3, marks=THOROUGH),
        pytest.param(("in_step", "slices", "sum"), "LS201", 2, marks=THOROUGH),
        pytest.param(("flat_slices", "sum"), "LS201", 2, marks=THOROUGH),
        pytest.param(("flat_slices", "sum"), "LS201", 3, marks=THOROUGH),
        pytest.param(("by_hand", "sum"), "LS201", 2, marks=THOROUGH),
        pytest.param(("by_hand", "alone"), "LS304", 2, marks=THOROUGH),
        pytest.param(("by_hand", "alone"), "LS304", 3, marks=THOROUGH),
        pytest.param(("in_step", "whole", "clips"), "LS404", 2, marks=THOROUGH),
        pytest.param(("in_step", "owner", "clips"), "LS404", 3, marks=THOROUGH),
        pytest.param(("tensor_parallel", "forgets"), "LS210", 2, marks=THOROUGH),
        pytest.param(("contrast", "detach"), "LS207", 2, marks=THOROUGH),
        pytest.param(("contrast", "no_grad"), "LS207", 3, marks=THOROUGH),
        pytest.param(("gathered", "without"), "LS207", 2, marks=THOROUGH),
        pytest.param(("two_models",), "LS311", 2, marks=THOROUGH),
        pytest.param(("probe", "keeps"), "LS304", 2, marks=THOROUGH),
        pytest.param(("probe", "keeps", "rank=1"), "LS304", 3, marks=THOROUGH),
        pytest.param(("probe", "keeps", "module"), "LS304", 2, marks=THOROUGH),
        pytest.param(("probe", "keeps", "module", "first"), "LS304", 2, marks=THOROUGH),
        pytest.param(("without_modules", "keeps"), "LS304", 2, marks=THOROUGH),
        pytest.param(("without_modules", "keeps"), "LS304", 3, marks=THOROUGH),
        pytest.param(("stale",), "LS314", 2, marks=THOROUGH),
        pytest.param(("groups",), "LS315", 4, marks=THOROUGH),
        pytest.param(("graph", "mean"), "LS201", 2, marks=THOROUGH),
    ],
)
def test_a_fault_is_named_for_what_it_is(words: tuple[str, ...], code: str, nproc: int) -> None:
    script, *arguments = words
    verdict = warm.verify(SCRIPTS / f"{script}.py", *arguments, nproc=nproc)
    assert verdict.word == "DIFFERENT"
    assert verdict.findings[0].cause.code == code, verdict.lines()
    assert not any("print" in text for text in verdict.findings[0].cause.evidence)


@THOROUGH
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("tensor_parallel", "alone"),
            "of different shapes than one process: hidden.into, hidden.out",
        ),
        (("stages", "reseeded"), "with other values: 0.weight, 0.bias"),
    ],
)
def test_of_parts_that_cannot_be_joined_nothing_is_known(words: tuple[str, ...], told: str) -> None:
    script, *arguments = words
    verdict = warm.verify(SCRIPTS / f"{script}.py", *arguments)
    assert verdict.word == "NOT KNOWN"
    assert verdict.lines()[0].endswith(f"the ranks hold different tensors, {told}")
    assert verdict.as_json()["findings"] == []


@THOROUGH
@pytest.mark.parametrize("words", [("helper", "pretrains"), ("helper", "rank=1"), ("helper",)])
@pytest.mark.parametrize("nproc", [2, 3])
def test_of_ranks_that_have_not_begun_to_train_nothing_is_known(
    words: tuple[str, ...], nproc: int
) -> None:
    script, *arguments = words
    verdict = warm.verify(SCRIPTS / f"{script}.py", *arguments, nproc=nproc)
    waiting = [rank for rank in range(nproc) if rank != int("rank=1" in words)]
    seen = f"the first 3 optimizer steps, no step of {format_ranks(waiting)} was seen"
    assert verdict.word == "NOT KNOWN", verdict.lines()
    assert verdict.lines()[0].endswith(seen)
    assert "--steps" in verdict.lines()[1]


@pytest.mark.parametrize(
    ("words", "nproc", "codes"),
    [
        (("augmented", "decays"), 2, []),
        pytest.param(("augmented", "decays"), 3, [], marks=THOROUGH),
        pytest.param(("augmented", "stream"), 2, [], marks=THOROUGH),
        pytest.param(("augmented", "sum"), 2, ["LS202"], marks=THOROUGH),
        pytest.param(("augmented", "sum", "stream"), 3, ["LS202"], marks=THOROUGH),
    ],
)
def test_with_the_same_samples_the_rest_is_compared(
    words: tuple[str, ...], nproc: int, codes: list[str]
) -> None:
    script, *arguments = words
    same = warm.verify(SCRIPTS / f"{script}.py", *arguments, nproc=nproc, same_samples=True)
    assert [each.cause.code for each in same.findings if each.case] == codes, same.lines()


@THOROUGH
def test_what_may_lie_behind_other_samples_is_pointed_at() -> None:
    verdict = warm.verify(SCRIPTS / "augmented.py", "sum")
    assert verdict.findings[0].cause.code in {"LS107", "LS110"}
    assert "  then    with --same-samples one process trains" in "\n".join(verdict.lines())
