"""Tensors that ranks hold in parts, and updates that are right all the same; made up of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.run.start.worker import Script
from lockstep.verify.accepted_differences import updates_leave_same_parameters
from lockstep.verify.joined_parts import join_parts
from lockstep.verify.names import rename_tensors
from lockstep.verify.run_config import RunConfig
from lockstep.verify.run_record import RunRecord
from lockstep.verify.tolerance import FLOAT64
from lockstep.verify.training_record import RankUpdate, ScriptCall, Update
from lockstep.verify.verdict import Verdict, judge

pytestmark = pytest.mark.launcher

RANDOM = np.random.default_rng(2)
WHOLE = RANDOM.normal(size=(6, 4))
STEPS = [RANDOM.normal(size=(6, 4)) for _ in range(3)]
OWN = [RANDOM.normal(size=(6, 4)) for _ in range(2)]


def held(number: int) -> dict[str, np.ndarray]:
    return {"Net/w": np.array([float(number), 1.0])}


def update(number: int, gradient: np.ndarray, **values: Any) -> RankUpdate:
    found: dict[str, Any] = {
        "step": number,
        "learning_rates": (0.1,),
        "losses": [1.0],
        "began_with_forward": True,
        "initial": {} if number else {"Net/w": WHOLE},
        "parameter_sums": held(number),
        "gradients": {"Net/w": gradient},
        "unclipped": {"Net/w": gradient},
        "parameters": {"Net/w": WHOLE - 0.1 * gradient},
        "unwrapped_parameters": ["Net/w"],
        **values,
    }
    return RankUpdate(**found)


REFERENCE = [Update([update(n, STEPS[n])]) for n in range(2)]
AVERAGES_IN_STEP = [
    Update(update(n, STEPS[n] + own, parameters={"Net/w": WHOLE - STEPS[n]}) for own in OWN)
    for n in range(2)
]
FINALS = [held(2)], [held(2), held(2)]


def verdict(
    other: Sequence[Update], finals: Any = FINALS, reference: Sequence[Update] = REFERENCE
) -> Verdict:
    way = RunConfig(name="2 processes", nproc=2, script=Script(path="train.py"))
    one = RunRecord(way.reference_config(), [*reference], final_sums=finals[0])
    return judge(one, RunRecord(way, [*other], final_sums=finals[1]))


def test_gradients_that_no_update_used_are_no_finding() -> None:
    found = verdict(AVERAGES_IN_STEP)
    assert found.word == "EQUAL"
    assert found.accepted_difference.startswith(
        "where an optimizer's step begins each rank has gradients"
    )


@pytest.mark.parametrize(("left", "word"), [(2, "EQUAL"), (3, "DIFFERENT")])
def test_sums_after_the_last_update_have_the_names_of_one_process(left: int, word: str) -> None:
    def wrapped(name: str) -> str:
        return name.replace("Net/", "Wrapper/module.")

    many = [Update(rename_tensors(r, wrapped) for r in u) for u in AVERAGES_IN_STEP]
    finals = [{wrapped(name): sums for name, sums in held(left).items()}] * 2
    assert verdict(many, (FINALS[0], finals)).word == word


@pytest.mark.parametrize(("left", "word"), [(2, "EQUAL"), (3, "DIFFERENT")])
def test_sums_after_the_last_update_have_the_names_of_models(left: int, word: str) -> None:
    """One process never meets the model, as it calls `model.forward`: only the optimizer has it."""
    place = "/parameter 1 of optimizer 1"

    def named(name: str, updates: Sequence[Update]) -> list[Update]:
        return [
            Update(
                replace(rename_tensors(r, lambda _: name), optimizer_parameters=[name]) for r in u
            )
            for u in updates
        ]

    finals = [{place: held(left)["Net/w"]}], FINALS[1]
    found = verdict(named("Net/w", AVERAGES_IN_STEP), finals, named(place, REFERENCE))
    assert found.word == word


@pytest.mark.parametrize(("is_trained", "word"), [(False, "EQUAL"), (True, "DIFFERENT")])
def test_a_model_that_one_rank_alone_calls_must_not_be_trained(is_trained: bool, word: str) -> None:
    teacher = {"Teacher/w": np.array([7.0, 1.0])}

    def calls_teacher(record: RankUpdate) -> RankUpdate:
        gradients = {**record.gradients, **teacher} if is_trained else record.gradients
        sums = {**record.parameter_sums, **teacher}
        return replace(record, gradients=gradients, parameter_sums=sums)

    many = [Update([calls_teacher(first), second]) for first, second in AVERAGES_IN_STEP]
    finals = FINALS[0], [held(2) | teacher, held(2)]
    assert verdict(many, finals).word == word


def test_updates_that_leave_other_parameters_are_found() -> None:
    assert verdict(AVERAGES_IN_STEP, (FINALS[0], [held(2), held(3)])).word == "DIFFERENT"
    wrong = [
        AVERAGES_IN_STEP[0],
        Update(replace(r, parameter_sums=held(5)) for r in AVERAGES_IN_STEP[1]),
    ]
    assert verdict(wrong).word == "DIFFERENT"


def test_parameters_that_never_move_prove_nothing() -> None:
    one = [Update(replace(r, parameter_sums=held(0)) for r in u) for u in REFERENCE]
    many = [Update(replace(r, parameter_sums=held(0)) for r in u) for u in AVERAGES_IN_STEP]
    assert not updates_leave_same_parameters(one, many, [held(0)], [held(0)] * 2, FLOAT64)


def test_a_sum_that_adam_hides_is_seen_in_what_it_keeps() -> None:
    def keeping(updates: Sequence[Update], times: float) -> list[Update]:
        state = {"Net/w/exp_avg": np.array([times, 3 * times, 24])}
        call = ScriptCall(name="reduce_scatter_tensor", line="train.py:9: reduce", in_step=True)
        # Adam's first step says nothing of the size of gradients.
        moved = {"Net/w": WHOLE - 0.01 * np.sign(STEPS[0])}
        known = {"optimizer_state": state, "calls": [call], "parameters": moved}
        return [Update(replace(r, **known) for r in u) for u in updates]

    one = keeping(REFERENCE, 1.0)
    assert verdict(keeping(AVERAGES_IN_STEP, 1.0), reference=one).word == "EQUAL"
    found = verdict(keeping(AVERAGES_IN_STEP, 2.0), reference=one)
    assert found.findings[0].cause.code == "LS201"
    assert "'exp_avg' is 2 times as large" in " ".join(found.lines())


def test_a_rank_that_others_step_for_has_no_say() -> None:
    missed = RankUpdate(step=1, stepped=False, contributes=False)
    many = [Update([REFERENCE[0][0], REFERENCE[0][0]]), Update([REFERENCE[1][0], missed])]
    assert verdict(many, ([held(2)], [held(2), {}])).word == "EQUAL"


def of_parts(parts: Sequence[np.ndarray], name: str, whole: np.ndarray = WHOLE) -> Any:
    one = [Update([RankUpdate(initial={name: whole}, unwrapped_parameters=[name])])]
    return join_parts(
        one, [Update(RankUpdate(initial={name: p}, unwrapped_parameters=[name]) for p in parts)]
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_are_joined_to_what_one_process_has(axis: int) -> None:
    found = of_parts(np.array_split(WHOLE, 2, axis=axis), "Net/w")
    assert (found.joined_names, found.unjoinable_tensors_text) == (("Net/w",), "")
    for rank in found.parallel_run[0]:
        assert np.array_equal(rank.initial["Net/w"], WHOLE)


def test_slices_of_a_flat_buffer_may_end_with_zeros() -> None:
    flat = np.arange(1.0, 6.0)
    found = of_parts(np.split(np.append(flat, 0.0), 3), "/parameter 1 of optimizer 1", flat)
    assert (found.joined_names, found.unjoinable_tensors_text) == ((), "")
    assert np.array_equal(found.parallel_run[0][2].initial["/parameter 1 of optimizer 1"], flat)


def test_of_other_parts_nothing_is_known() -> None:
    parts = [OWN[0][:3], OWN[1][:3]]
    assert of_parts(parts, "Net/w").unjoinable_tensors_text == (
        "the ranks hold different tensors, of different shapes than one process: w"
    )


def test_copies_that_begin_otherwise_are_no_parts_of_one_model() -> None:
    assert of_parts(OWN, "Net/w").unjoinable_tensors_text == ""
