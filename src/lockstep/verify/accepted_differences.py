"""Differences inside of steps that leave the right parameters, and therefore are accepted.

A script may compute a step in another way on several processes and still train the same model: it
may average parameters instead of gradients, or average gradients inside of `optimizer.step()`, or
halve the loss and double the learning rate. Then the values that no training depends on are left
out of both runs before they are compared. What counts are the parameters with which the next
forward pass begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.verify.compare import learning_rates_differ, tensor_differences
from lockstep.verify.joined_parts import is_in_no_model
from lockstep.verify.tolerance import FLOAT64, Array, Tolerance, scale_of
from lockstep.verify.training_record import LARGEST, SIZE, RankUpdate, Update

# For each rank, sums over the parameters with which it would have gone on.
FinalSums = Sequence[Mapping[str, Array]]


@dataclass(frozen=True)
class AcceptedDifference:
    """Two runs without the values that differ and do not matter."""

    reference_run: list[Update]
    parallel_run: list[Update]
    # What differs, in words.
    text: str


def accept_differences(
    reference_run: Sequence[Update],
    parallel_run: Sequence[Update],
    final_sums: tuple[FinalSums, FinalSums],
    tolerance: Tolerance,
) -> AcceptedDifference:
    """Leaves out of both runs what differs in steps that leave the right parameters.

    Args:
        reference_run: on one process.
        parallel_run: on several.
        final_sums: of both runs.
        tolerance: what counts as equal.
    """
    accepted = _parameters_changed_after_steps(reference_run, parallel_run, tolerance)
    if accepted is None:
        accepted = _losses_and_rates_that_cancel(reference_run, parallel_run, tolerance)
    if accepted is not None:
        return accepted
    if (
        optimizers_get_values_of_their_rank(parallel_run)
        and _steps_differ(reference_run, parallel_run, tolerance)
        and updates_leave_same_parameters(reference_run, parallel_run, final_sums, tolerance)
    ):
        return AcceptedDifference(
            _without_values_of_steps(reference_run),
            _without_values_of_steps(parallel_run),
            "where an optimizer's step begins each rank has gradients or tensors of its own; "
            "before every next forward pass the parameters of all ranks are those of one process",
        )
    return AcceptedDifference(list(reference_run), list(parallel_run), "")


# Parameters that are changed by hand after a step


def _parameters_changed_after_steps(
    reference_run: Sequence[Update], parallel_run: Sequence[Update], tolerance: Tolerance
) -> AcceptedDifference | None:
    """Compares the parameters before the next forward pass instead of those after a step.

    It applies to updates whose parameters differ after the step and agree before the next forward
    pass, as if parameters are averaged instead of gradients. Gradients of such updates are left
    out. After the last step of such an optimizer, no next forward pass is known.

    Returns:
        None if there is no such update.
    """
    pairs = list(zip(reference_run, parallel_run, strict=False))
    # Updates before which the parameters are known once more; the first one follows no step.
    numbers_after_forward = []
    for number, (expected, actual) in enumerate(pairs):
        both_began_with_forward = expected[0].began_with_forward and actual[0].began_with_forward
        if number and both_began_with_forward:
            numbers_after_forward.append(number)

    replaced: dict[int, tuple[Update, Update]] = {}
    optimizers_replaced: set[int] = set()
    for number, (expected, actual) in enumerate(pairs):
        if not tensor_differences("parameters", expected, actual, tolerance):
            continue
        optimizer = expected[0].optimizer
        later_numbers = [later for later in numbers_after_forward if later > number]
        if not later_numbers:
            # No forward pass follows. If earlier steps of this optimizer were accepted, this one
            # is too, and its parameters are not compared.
            if optimizer in optimizers_replaced:
                replaced[number] = _with_next_parameters(expected), _with_next_parameters(actual)
            continue
        names = expected[0].parameters.keys()
        if not all(rank.parameters.keys() == names for rank in actual):
            continue  # some rank has only a part of the parameters
        next_expected, next_actual = pairs[later_numbers[0]]
        new_expected = _with_next_parameters(expected, next_expected)
        new_actual = _with_next_parameters(actual, next_actual)
        if not tensor_differences("parameters", new_expected, new_actual, tolerance):
            replaced[number] = new_expected, new_actual
            optimizers_replaced.add(optimizer)
    if not replaced:
        return None
    new_reference = list(reference_run)
    new_parallel = list(parallel_run)
    for number, (new_expected, new_actual) in replaced.items():
        new_reference[number] = new_expected
        new_parallel[number] = new_actual
    return AcceptedDifference(
        new_reference,
        new_parallel,
        "gradients differ, and parameters right after a step; before every next forward pass the "
        "parameters agree (after the last step they are not compared)",
    )


def _with_next_parameters(update: Update, next_update: Update | None = None) -> Update:
    """Returns an update without gradients, with the parameters before the next forward pass.

    Args:
        update: the update.
        next_update: the next one that begins with a forward pass; None: the parameters are not
            known.
    """
    ranks = []
    for number, rank in enumerate(update):
        parameters: dict[str, Array] = {}
        if next_update is not None:
            rewritten = next_update[number].rewritten_parameters
            for name, array in rank.parameters.items():
                parameters[name] = rewritten.get(name, array)
        # Between two steps without a forward pass, the parameters do not count.
        parameter_sums = rank.parameter_sums if rank.began_with_forward else {}
        ranks.append(
            replace(
                rank,
                gradients={},
                unclipped={},
                parameter_sums=parameter_sums,
                parameters=parameters,
            )
        )
    return Update(ranks)


# Losses and learning rates that make good for each other


def _losses_and_rates_that_cancel(
    reference_run: Sequence[Update], parallel_run: Sequence[Update], tolerance: Tolerance
) -> AcceptedDifference | None:
    """Leaves out gradients, losses and learning rates if together they give the same parameters.

    For example, the loss is half as large, and the learning rate twice as high.

    Returns:
        None if parameters differ, or if there is no step with both other gradients and other rates.
    """
    some_cancel = False
    for expected, actual in zip(reference_run, parallel_run, strict=False):
        if tensor_differences("parameters", expected, actual, tolerance):
            return None
        gradients_differ = tensor_differences("gradients", expected, actual, tolerance)
        if gradients_differ and learning_rates_differ(expected, actual, tolerance):
            some_cancel = True
    if not some_cancel:
        return None
    return AcceptedDifference(
        _without_losses_and_rates(reference_run),
        _without_losses_and_rates(parallel_run),
        "gradients and learning rates differ, and make the same parameters in every step",
    )


def _without_losses_and_rates(updates: Sequence[Update]) -> list[Update]:
    """Returns the updates without gradients, losses and learning rates."""
    new_updates = []
    for update in updates:
        ranks = [
            replace(rank, gradients={}, unclipped={}, losses=[], learning_rates=())
            for rank in update
        ]
        new_updates.append(Update(ranks))
    return new_updates


# Updates that use something else than what the optimizer was given


def optimizers_get_values_of_their_rank(parallel_run: Sequence[Update]) -> bool:
    """Returns whether optimizers were given other values on each rank, so not what they used.

    So it is if gradients are averaged inside of `optimizer.step()`, if each optimizer has a slice
    of the parameters, if ranks leave the step to another one, or if a rank has joined.
    """
    for update in parallel_run:
        if not all(rank.stepped for rank in update):
            return True
        if update.ranks_that_differ("gradients", FLOAT64):
            return True
        if update.ranks_that_differ("parameters", FLOAT64):
            return True
        names_of_first = update[0].gradients.keys()
        for rank in update:
            if rank.gradients.keys() != names_of_first:
                return True
            if any(is_in_no_model(name) for name in rank.gradients):
                return True
    return False


def _steps_differ(
    reference_run: Sequence[Update], parallel_run: Sequence[Update], tolerance: Tolerance
) -> bool:
    """Returns whether gradients or parameters of some update are not those of one process."""
    for expected, actual in zip(reference_run, parallel_run, strict=False):
        for field_name in ("initial", "gradients", "parameters"):
            if tensor_differences(field_name, expected, actual, tolerance):
                return True
    return any(update.replicas_that_differ() for update in parallel_run)


def updates_leave_same_parameters(
    reference_run: Sequence[Update],
    parallel_run: Sequence[Update],
    final_sums: tuple[FinalSums, FinalSums],
    tolerance: Tolerance,
) -> bool:
    """Returns whether every update has left the models, on every rank, as on one process.

    What counts are the parameters with which the next forward pass begins, and the optimizer's
    state where both runs have it under the same name.

    Args:
        reference_run: on one process.
        parallel_run: on several.
        final_sums: of both runs.
        tolerance: what counts as equal.
    """
    if not parallel_run or len(reference_run) != len(parallel_run):
        return False
    reference_final, parallel_final = final_sums
    # Both lists have the sums before each update, and at the end those after the last one.
    expected_sums = [update[0].parameter_sums for update in reference_run]
    expected_sums.append(reference_final[0] if reference_final else {})
    sums_of_ranks: list[Sequence[Mapping[str, Array]]] = []
    for update in parallel_run:
        sums_of_ranks.append([rank.parameter_sums for rank in update])
    sums_of_ranks.append(parallel_final)

    num_compared = 0
    # Those before the first update are no outcome of an update.
    for expected, sums_of_rank in zip(expected_sums[1:], sums_of_ranks[1:], strict=True):
        expected_of_models = _of_models(expected)
        for sums in sums_of_rank:
            actual_of_models = _of_models(sums)
            if not actual_of_models:  # the rank had joined
                continue
            if not _are_equal(expected_of_models, actual_of_models, tolerance):
                return False
            num_compared += 1
    for expected_update, actual_update in zip(reference_run, parallel_run, strict=True):
        if not _optimizer_states_agree(expected_update, actual_update, tolerance):
            return False
    return num_compared > 0 and _parameters_change(expected_sums)


def _optimizer_states_agree(expected: Update, actual: Update, tolerance: Tolerance) -> bool:
    """Returns whether optimizers have the state of one process, where it can be compared.

    A tensor of the state is known by a sum, its largest absolute value and its size. Sums over
    slices of a tensor say nothing of the whole one, but the largest value of all slices does.
    """
    for name, expected_state in expected[0].optimizer_state.items():
        states = []
        for rank in actual:
            if name in rank.optimizer_state:
                states.append(rank.optimizer_state[name])
        for state in states:
            is_whole = state[SIZE] == expected_state[SIZE]
            if is_whole and tolerance.differ(expected_state, state, 0.0):
                return False
        slices_are_complete = sum(state[SIZE] for state in states) == expected_state[SIZE]
        if slices_are_complete:
            largest_of_slices = max(state[LARGEST] for state in states)
            if tolerance.differ(expected_state[LARGEST], largest_of_slices, 0.0):
                return False
    return True


def _of_models(sums: Mapping[str, Array]) -> dict[str, Array]:
    """Leaves out parameters that only an optimizer has."""
    return {name: array for name, array in sums.items() if not is_in_no_model(name)}


def _are_equal(
    expected: Mapping[str, Array], actual: Mapping[str, Array], tolerance: Tolerance
) -> bool:
    """Returns whether both have the same names, with values that are equal within the tolerance."""
    if expected.keys() != actual.keys():
        return False
    scale = scale_of(expected)
    return not any(tolerance.differ(expected[name], actual[name], scale) for name in expected)


def _parameters_change(sums_of_updates: Sequence[Mapping[str, Array]]) -> bool:
    """Returns whether training changes the parameters. If it does not, they agree in any case.

    Args:
        sums_of_updates: sums over the parameters before each update, and after the last one; these
            are empty if they are not known.
    """
    first = sums_of_updates[0]
    last = sums_of_updates[-1]
    if not last:
        last = sums_of_updates[-2]
    for name in first:
        if name in last and not np.array_equal(last[name], first[name]):
            return True
    return False


def _without_values_of_steps(updates: Sequence[Update]) -> list[Update]:
    """Leaves out what optimizers were given, and what ranks held right after a step."""
    return [Update(_without_step(rank) for rank in update) for update in updates]


def _without_step(rank: RankUpdate) -> RankUpdate:
    """Returns what a rank recorded, without gradients and without parameters after the step."""
    empty: dict[str, Any] = {}
    return replace(
        rank,
        gradients=empty,
        unclipped=empty,
        reduced_in_step=empty,
        parameters=empty,
        initial=_of_models(rank.initial),
        parameter_sums=_of_models(rank.parameter_sums),
    )
