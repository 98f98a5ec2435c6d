"""Records of a run whose tensors get the names of another run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.strategies.base import parameters_of
from lockstep.verify.divergence import Divergence
from lockstep.verify.names import align_names, name_of_replica, rename_tensors
from lockstep.verify.recording.models import Models
from lockstep.verify.rules.local_gradients import LocalGradients, exchanged_inside_step
from lockstep.verify.rules.optimizer import other_optimizer
from lockstep.verify.rules.ranks_apart import parameters_of_unstepped_optimizer
from lockstep.verify.tolerance import FLOAT64
from lockstep.verify.training_record import RankUpdate, ScriptCall, Update

pytestmark = pytest.mark.unit

WEIGHT = np.arange(1.0, 7.0)
REFERENCE_NAME = "Net/layer.weight"
WRAPPED_NAME = "Wrapper/module.layer.weight"


def record(name: str, gradient: float = 1.0, **values: Any) -> RankUpdate:
    """A rank that trains one tensor, under the given name."""
    return RankUpdate(initial={name: WEIGHT}, gradients={name: gradient * WEIGHT}, **values)


def aligned(reference: RankUpdate, ranks: Sequence[RankUpdate]) -> Divergence:
    """The first update of both runs, with the names of the reference."""
    reference_run = [Update([reference])]
    parallel_run = align_names(reference_run, [Update(ranks)]).updates
    return Divergence(reference_run, parallel_run, FLOAT64, 0, "gradients", (REFERENCE_NAME,))


def test_gradients_that_an_optimizer_reduces_in_its_step_are_renamed() -> None:
    ranks = []
    for gradient in (0.5, 1.5):
        call = ScriptCall(name="all_reduce", line="train.py:9: all_reduce(p.grad)", in_step=True)
        reduced = {WRAPPED_NAME: 2 * WEIGHT}  # the sum, where the mean would be right
        ranks.append(record(WRAPPED_NAME, gradient, calls=[call], reduced_in_step=reduced))

    case = aligned(record(REFERENCE_NAME), ranks)
    cause = exchanged_inside_step(LocalGradients(case, (REFERENCE_NAME,)))
    assert cause is not None
    assert (cause.code, cause.ratio) == ("LS201", 2)


@pytest.mark.parametrize(("times", "is_different"), [(1.0, False), (2.0, True)])
def test_the_state_of_an_optimizer_is_renamed_with_its_tensor(
    times: float, is_different: bool
) -> None:
    def with_state(name: str, factor: float) -> RankUpdate:
        numbers = factor * np.array([1.0, 3.0, 6.0])
        return record(name, optimizer_state={f"{name}/exp_avg": numbers})

    case = aligned(with_state(REFERENCE_NAME, 1.0), [with_state(WRAPPED_NAME, times)] * 2)
    assert list(case.actual[0].optimizer_state) == [f"{REFERENCE_NAME}/exp_avg"]
    assert (other_optimizer(case) is not None) == is_different


def test_the_state_of_a_replica_belongs_to_the_tensor_of_the_replica() -> None:
    before = record("Net/w", optimizer_state={"Net/w/exp_avg": np.ones(3)})
    after = rename_tensors(before, lambda name: f"{name} (replica 1)")
    assert list(after.optimizer_state) == ["Net/w (replica 1)/exp_avg"]


def test_the_gradient_that_a_collective_got_is_renamed() -> None:
    call = ScriptCall(
        name="all_reduce", line="train.py:9: all_reduce(p.grad)", gradient_of=WRAPPED_NAME
    )
    other = ScriptCall(name="all_reduce", line="train.py:10: all_reduce(loss)")
    ranks = [record(WRAPPED_NAME, calls=[call, other])]
    case = aligned(record(REFERENCE_NAME), ranks)
    assert [each.gradient_of for each in case.actual.calls] == [REFERENCE_NAME, ""]
    assert call.gradient_of == WRAPPED_NAME  # the record that was read is as it was


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameters_of_an_optimizer_keep_their_places() -> None:
    # The optimizer has the first parameter twice. No model has either parameter.
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([first, first, second])
    models = Models()
    models.stepped_optimizers.append(optimizer)
    names = models.names_of(parameters_of(optimizer))
    third = "/parameter 3 of optimizer 1"
    assert names == ["/parameter 1 of optimizer 1", "/parameter 1 of optimizer 1", third]

    stepped = record(WRAPPED_NAME, construction_index=0, optimizer_parameters=names)
    unstepped = record(WRAPPED_NAME, stepped=False)
    for rank in (stepped, unstepped):
        rank.parameter_sums = {third: np.ones(2)}

    # The rank that has not stepped has another value of the third parameter.
    later = record(WRAPPED_NAME, stepped=False, unstepped_sums={(0, 2): np.full(2, 5.0)})
    reference_run = [Update([record(REFERENCE_NAME)])] * 2
    parallel_run = align_names(
        reference_run, [Update([stepped, unstepped]), Update([stepped, later])]
    ).updates
    case = Divergence(reference_run, parallel_run, FLOAT64, 1, "gradients", (REFERENCE_NAME,))
    cause = parameters_of_unstepped_optimizer(case)
    assert cause is not None
    assert "parameter 3 of optimizer 1" in cause.evidence[0]


def test_a_parameter_without_a_name_stays_without_one() -> None:
    before = record("Net/w", optimizer_parameters=["", "", "Net/w"])
    after = rename_tensors(before, lambda name: f"{name} (replica 1)")
    assert after.optimizer_parameters == ["", "", "Net/w (replica 1)"]


def test_copies_of_a_model_are_told_apart_by_what_is_trained() -> None:
    """The teacher of a student has its first values, and is called first on one process only."""

    def with_student(student: str, teacher: str) -> RankUpdate:
        names = (f"{student}/w", f"{teacher}/w")
        return RankUpdate(
            initial=dict.fromkeys(names, WEIGHT),
            gradients={names[0]: WEIGHT},
            construction_index=0,
            optimizer_parameters=[names[0]],
            module_tensors={f"{teacher}/decay": np.ones(3)},
        )

    reference_run = [Update([with_student("Net#2", "Net")])]
    several = [Update([with_student("Net", "Net#2")] * 2)]
    for record in align_names(reference_run, several).updates[0]:
        assert [*record.gradients] == record.optimizer_parameters == ["Net#2/w"]
        assert [*record.module_tensors] == ["Net/decay"]


def test_two_trained_copies_are_told_apart_by_their_places_in_the_optimizer() -> None:
    def with_first(first: str, second: str) -> RankUpdate:
        names = (f"{first}/w", f"{second}/w")
        return RankUpdate(
            initial=dict.fromkeys(names, WEIGHT),
            gradients={names[0]: WEIGHT, names[1]: -WEIGHT},
            construction_index=0,
            optimizer_parameters=names,
        )

    reference_run = [Update([with_first("Net", "Net#2")])]
    several = [Update([with_first("Net#2", "Net")] * 2)]
    (update,) = align_names(reference_run, several).updates
    assert update[1].gradients["Net/w"] is WEIGHT


def test_a_rank_that_calls_models_in_an_order_of_its_own_has_the_names_of_the_reference() -> None:
    def with_values(rank: int, first: float, second: float) -> RankUpdate:
        initial = {"Net/w": first * WEIGHT, "Net#2/w": second * WEIGHT}
        return RankUpdate(rank=rank, initial=initial)

    reference_run = [Update([with_values(0, 1.0, 2.0)])]
    several = [Update([with_values(0, 1.0, 2.0), with_values(1, 2.0, 1.0)])]
    sums = [{"Net/w": np.ones(2)}, {"Net#2/w": np.ones(2)}]
    run = align_names(reference_run, several, sums)
    for record in run.updates[0]:
        assert np.array_equal(record.initial["Net/w"], WEIGHT)
    assert [[*each] for each in run.final_sums] == [["Net/w"], ["Net/w"]]


def replicas_of(roots_of_ranks: Sequence[tuple[str, str]], num_common: int) -> list[Update]:
    """Updates of DiLoCo with two replicas on each rank, of which the first still train together.

    Args:
        roots_of_ranks: for each rank, the names of the trained model and of its teacher.
        num_common: number of the first updates, with one record for each rank.
    """
    updates = []
    for number in range(3):
        records = []
        for rank, (model, teacher) in enumerate(roots_of_ranks):
            values = {f"{model}/w": WEIGHT, f"{teacher}/w": 2 * WEIGHT}
            whole = RankUpdate(
                rank=rank,
                initial={} if number else values,
                parameter_sums=values,
                gradients={f"{model}/w": WEIGHT},
            )
            if number < num_common:
                records.append(whole)
                continue
            for replica in (2 * rank, 2 * rank + 1):
                records.append(rename_tensors(whole, partial(name_of_replica, replica=replica)))
        updates.append(Update(records))
    return updates


@pytest.mark.parametrize("num_common", [0, 2])
@pytest.mark.parametrize(
    "roots_of_ranks",
    [
        [("Net", "Net#2"), ("Net#2", "Net")],  # the second rank calls the teacher first
        [("Net#2", "Net"), ("Net#2", "Net")],
        [("Wrapper", "Net"), ("Wrapper", "Net")],  # the model is wrapped on several processes only
    ],
)
def test_replicas_have_the_names_of_the_reference(
    roots_of_ranks: list[tuple[str, str]], num_common: int
) -> None:
    models = ("Net", "Net#2") if roots_of_ranks[0][0] != "Wrapper" else ("Net#2", "Net")
    reference_run = []
    for update in replicas_of([models] * 2, num_common):
        records = [replace(record, rank=0) for record in update]
        reference_run.append(Update(records[:1] if len(records) == 2 else records))

    several = replicas_of(roots_of_ranks, num_common)
    run = align_names(reference_run, several, [several[-1][0].gradients] * 2)
    for update in run.updates:
        for replica, record in enumerate(update):
            suffix = f" (replica {replica})" if len(update) == 4 else ""
            assert list(record.gradients) == [f"{models[0]}/w{suffix}"]
            assert {*record.parameter_sums} == {f"{model}/w{suffix}" for model in models}


def test_what_a_module_keeps_is_renamed_with_its_parameters() -> None:
    before = record(REFERENCE_NAME, module_tensors={"Net/memory.rows": np.ones(3)})
    ranks = [
        record(
            WRAPPED_NAME,
            module_tensors={"Wrapper/module.memory.rows": np.full(3, 2.0)},
            module_tensors_before={"Wrapper/module.layer.state[1]": np.ones(3)},
            local_norm_layers=["Wrapper/module.layer"],
        )
    ] * 2
    actual = aligned(before, ranks).actual[0]
    assert [*actual.module_tensors] == ["Net/memory.rows"]
    assert [*actual.module_tensors_before] == ["Net/layer.state[1]"]
    assert actual.local_norm_layers == ["Net/layer"]
