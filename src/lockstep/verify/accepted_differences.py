"""Decides which differences between two runs are accepted, because both runs train the same model.

The *reference run* uses one process and the *parallel run* several. Each is a list of `Update`s,
one for each optimizer step, which hold a `RankUpdate` (the record of one rank) for every rank. For
example, a script may average parameters instead of gradients. Then the gradients of the ranks
differ, but do not matter, so they are removed from both runs. What matters are the parameters that
the next forward pass uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.verify.divergence import learning_rates_differ, tensor_differences
from lockstep.verify.joined_parts import belongs_only_to_optimizer
from lockstep.verify.late_models import models_of
from lockstep.verify.names import model_of
from lockstep.verify.tolerance import FLOAT64, Array, Tolerance, largest_of_all
from lockstep.verify.training_record import LARGEST, SIZE, RankUpdate, Update

# For each rank, sums over its parameters after an update, by name. The *sums* of a tensor are two
# numbers that change when any of its values does. Empty for a rank that has not reached its end.
SumsOfRanks = Sequence[Mapping[str, Array]]


@dataclass(frozen=True)
class AcceptedDifference:
    """Two runs without the values that differ but do not matter."""

    reference_run: list[Update]
    parallel_run: list[Update]
    # Tells the user which difference is accepted; empty if there is none.
    text: str


def accept_differences(
    reference_run: Sequence[Update],
    parallel_run: Sequence[Update],
    reference_final_sums: SumsOfRanks,
    parallel_final_sums: SumsOfRanks,
    tolerance: Tolerance,
) -> AcceptedDifference:
    """Removes values from both runs that differ although both runs train the same model.

    Three kinds of differences are tried in order, and the first one found decides what is removed:
    parameters that the script changes after a step, gradients and learning rates that cancel out,
    and gradients that the optimizers average themselves.

    Args:
        reference_run: updates of the run on one process.
        parallel_run: updates of the run on several processes.
        reference_final_sums: sums over the parameters after the last update of the reference run.
        parallel_final_sums: the same for the parallel run.
        tolerance: tolerance within which values are equal.

    Returns:
        Both runs with fewer values, or unchanged and with an empty text if nothing is accepted.
    """
    accepted = _accept_parameters_changed_after_steps(reference_run, parallel_run, tolerance)
    if accepted is not None:
        return accepted

    accepted = _accept_gradients_and_rates_that_cancel(reference_run, parallel_run, tolerance)
    if accepted is not None:
        return accepted

    accepted = _accept_gradients_averaged_in_steps(
        reference_run, parallel_run, reference_final_sums, parallel_final_sums, tolerance
    )
    if accepted is not None:
        return accepted

    return AcceptedDifference(list(reference_run), list(parallel_run), text="")


# Parameters that the script changes after a step, such as by averaging them over the ranks


def _accept_parameters_changed_after_steps(
    reference_run: Sequence[Update], parallel_run: Sequence[Update], tolerance: Tolerance
) -> AcceptedDifference | None:
    """Accepts parameters that differ right after a step but agree before the next forward pass.

    This happens if a script averages parameters instead of gradients. In both runs, such an update
    gets the parameters of the next forward pass instead of its own, and loses its gradients.

    Returns:
        Both runs with these updates replaced, or None if there are none.
    """
    pairs = list(zip(reference_run, parallel_run, strict=False))
    new_reference = list(reference_run)
    new_parallel = list(parallel_run)
    accepted_optimizers: set[int] = set()

    for number, (expected, actual) in enumerate(pairs):
        if not tensor_differences("parameters", expected, actual, tolerance):
            continue

        optimizer = expected[0].optimizer
        next_pair = _first_pair_with_forward_pass(pairs[number + 1 :])

        # No forward pass follows, so it is not known what the script does with the parameters. They
        # are left out if an earlier step of this optimizer was accepted.
        if next_pair is None:
            if optimizer in accepted_optimizers:
                new_reference[number] = _with_next_parameters(expected, update_with_forward=None)
                new_parallel[number] = _with_next_parameters(actual, update_with_forward=None)
            continue

        # Some rank has only a part of the parameters.
        names = expected[0].parameters.keys()
        if not all(record.parameters.keys() == names for record in actual):
            continue

        next_expected, next_actual = next_pair
        new_expected = _with_next_parameters(expected, next_expected)
        new_actual = _with_next_parameters(actual, next_actual)
        if not tensor_differences("parameters", new_expected, new_actual, tolerance):
            new_reference[number] = new_expected
            new_parallel[number] = new_actual
            accepted_optimizers.add(optimizer)

    if not accepted_optimizers:
        return None

    return AcceptedDifference(
        new_reference,
        new_parallel,
        text="gradients differ, and parameters right after a step; before every next forward pass "
        "the parameters agree (after the last step they are not compared)",
    )


def _first_pair_with_forward_pass(
    pairs: Sequence[tuple[Update, Update]],
) -> tuple[Update, Update] | None:
    """Returns the first pair of updates in which both runs made a forward pass, or None.

    Parameters are recorded again only at forward passes. Two optimizers may step after one backward
    pass, without a forward pass in between.

    Args:
        pairs: the same updates of the reference run and the parallel run.
    """
    for expected, actual in pairs:
        if expected[0].began_with_forward and actual[0].began_with_forward:
            return expected, actual
    return None


def _with_next_parameters(update: Update, update_with_forward: Update | None) -> Update:
    """Returns an update without gradients, and with the parameters of the next forward pass.

    For example, each update is a forward pass and a step, after which the script averages the
    parameters. Then update 1 gets the averages, with which the forward pass of update 2 begins.

    Args:
        update: the update, whose `parameters` are the values right after its optimizer step.
        update_with_forward: the next update that begins with a forward pass, or None if there is
            none. Then the parameters of the next forward pass are not known, and are left out.
    """
    records = []
    for rank, record in enumerate(update):
        next_parameters: dict[str, Array] = {}
        if update_with_forward is not None:
            next_parameters = _parameters_at_next_forward(record, update_with_forward[rank])

        records.append(
            replace(
                record,
                gradients={},
                unclipped={},  # the gradients before they were clipped
                parameters=next_parameters,
                parameter_sums=_sums_at_forward_pass(record),
            )
        )

    return Update(records)


def _sums_at_forward_pass(record: RankUpdate) -> Mapping[str, Array]:
    """Returns the sums over the parameters with which an update began; empty without forward pass.

    If two optimizers step one after the other, and only then the script averages the parameters,
    the second update begins with parameters that are not averaged yet. No forward pass uses them.
    """
    return record.parameter_sums if record.began_with_forward else {}


def _parameters_at_next_forward(record: RankUpdate, next_record: RankUpdate) -> dict[str, Array]:
    """Returns the parameters of a rank at its next forward pass, by name.

    Args:
        record: the rank's record of an optimizer step.
        next_record: the rank's record of the update that begins with this forward pass.
    """
    parameters_after_step = record.parameters
    changed_after_step = next_record.rewritten_parameters  # only those that the script has changed
    return {
        name: changed_after_step.get(name, array) for name, array in parameters_after_step.items()
    }


# Gradients and learning rates that cancel out


def _accept_gradients_and_rates_that_cancel(
    reference_run: Sequence[Update], parallel_run: Sequence[Update], tolerance: Tolerance
) -> AcceptedDifference | None:
    """Accepts gradients and learning rates that both differ but result in the same parameters.

    For example, the loss is half as large and the learning rate twice as high. Then the gradients
    are half as large too, and each step changes the parameters as on one process.

    Returns:
        Both runs without gradients, losses and learning rates. None if parameters differ, or if
        gradients and learning rates never differ in the same step.
    """
    some_step_differs_in_both = False
    for expected, actual in zip(reference_run, parallel_run, strict=False):
        if tensor_differences("parameters", expected, actual, tolerance):
            return None
        gradients_differ = tensor_differences("gradients", expected, actual, tolerance)
        if gradients_differ and learning_rates_differ(expected, actual, tolerance):
            some_step_differs_in_both = True

    if not some_step_differs_in_both:
        return None

    return AcceptedDifference(
        reference_run=[_without_gradients_losses_and_rates(update) for update in reference_run],
        parallel_run=[_without_gradients_losses_and_rates(update) for update in parallel_run],
        text="gradients and learning rates differ, and make the same parameters in every step",
    )


def _without_gradients_losses_and_rates(update: Update) -> Update:
    """Returns an update without gradients, losses and learning rates."""
    records = []
    for record in update:
        # `unclipped` holds the gradients before they were clipped.
        records.append(replace(record, gradients={}, unclipped={}, losses=[], learning_rates=()))
    return Update(records)


# Gradients that optimizers average themselves


def _accept_gradients_averaged_in_steps(
    reference_run: Sequence[Update],
    parallel_run: Sequence[Update],
    reference_final_sums: SumsOfRanks,
    parallel_final_sums: SumsOfRanks,
    tolerance: Tolerance,
) -> AcceptedDifference | None:
    """Accepts steps that begin with different gradients on the ranks, but end as on one process.

    For example, an optimizer may average the gradients itself, inside its step. Then each rank
    begins the step with gradients that differ from those of one process, but the training is right.
    It is right, too, if each rank's optimizer updates a slice of the parameters and sends it to the
    others. See `accept_differences` for the arguments.

    Returns:
        Both runs without these gradients and parameters. None if there is nothing to accept.
    """
    if not _steps_begin_differently_on_ranks(parallel_run):
        return None

    if not _steps_differ_from_one_process(reference_run, parallel_run, tolerance):
        return None

    steps_end_as_on_one_process = updates_leave_same_parameters(
        reference_run, parallel_run, reference_final_sums, parallel_final_sums, tolerance
    )
    if not steps_end_as_on_one_process:
        return None

    return AcceptedDifference(
        reference_run=[_without_values_of_step(update) for update in reference_run],
        parallel_run=[_without_values_of_step(update) for update in parallel_run],
        text="where an optimizer's step begins each rank has gradients or tensors of its own; "
        "before every next forward pass the parameters of all ranks are those of one process",
    )


def _steps_begin_differently_on_ranks(parallel_run: Sequence[Update]) -> bool:
    """True if some step begins with other gradients or parameters on one rank than on another.

    Then the recorded gradients or parameters are not those that the ranks train with in the end.
    This happens if gradients are averaged only inside `optimizer.step()`, if each rank's optimizer
    has a slice of the parameters, or if some ranks leave a step to others.
    """
    for update in parallel_run:
        some_ranks_leave_step_to_others = not all(record.stepped for record in update)
        if some_ranks_leave_step_to_others:
            return True
        if _optimizers_have_different_tensors(update):
            return True
        # `FLOAT64` is the tolerance for rounding in float64.
        if update.ranks_that_differ("gradients", tolerance=FLOAT64):
            return True
        if update.ranks_that_differ("parameters", tolerance=FLOAT64):
            return True

    return False


def _optimizers_have_different_tensors(update: Update) -> bool:
    """True if the optimizers of the ranks do not all train the whole parameters of the models.

    A rank's optimizer may have only some of the parameters. Or it has a tensor that it has made
    itself from slices of them, which has a name such as "/parameter 0 of optimizer 0".
    """
    names_of_first_rank = update[0].gradients.keys()
    for record in update:
        if record.gradients.keys() != names_of_first_rank:
            return True
        if any(belongs_only_to_optimizer(name) for name in record.gradients):
            return True
    return False


def _steps_differ_from_one_process(
    reference_run: Sequence[Update], parallel_run: Sequence[Update], tolerance: Tolerance
) -> bool:
    """True if the gradients or parameters of some step differ from those on one process.

    Also true if the parameters before some step differ between the ranks.
    """
    if any(update.replicas_that_differ() for update in parallel_run):
        return True

    for expected, actual in zip(reference_run, parallel_run, strict=False):
        for field_name in ("initial", "gradients", "parameters"):
            if tensor_differences(field_name, expected, actual, tolerance):
                return True

    return False


def updates_leave_same_parameters(
    reference_run: Sequence[Update],
    parallel_run: Sequence[Update],
    reference_final_sums: SumsOfRanks,
    parallel_final_sums: SumsOfRanks,
    tolerance: Tolerance,
) -> bool:
    """True if every update leaves the models on every rank as on one process.

    Two things are compared: the parameters before the next update, and the optimizer's state where
    both runs have it under the same name. Of each parameter, only its *sums* are compared: two
    numbers that change when any of its values does. False if no parameter ever changes, since then
    equal parameters prove nothing.

    Args:
        reference_run: updates of the run on one process.
        parallel_run: updates of the run on several processes.
        reference_final_sums: sums over the parameters after the last update of the reference run.
        parallel_final_sums: the same for the parallel run.
        tolerance: tolerance within which values are equal.
    """
    # There are no updates to compare, or one run has updates that the other does not have.
    if not parallel_run or len(reference_run) != len(parallel_run):
        return False

    # The sums over the parameters of one process, one entry for each update. (With DiLoCo, one
    # process may train several replicas of the model in turn, of which the first one is taken.)
    expected_sums = []
    for sums_of_replicas in _sums_after_updates(reference_run, reference_final_sums):
        expected_sums.append(_sums_of_first_replica(sums_of_replicas))

    sums_of_ranks = _sums_after_updates(parallel_run, parallel_final_sums)
    trained_models = _models_with_gradients([*reference_run, *parallel_run])
    if not _ranks_agree_after_updates(expected_sums, sums_of_ranks, trained_models, tolerance):
        return False

    for expected, actual in zip(reference_run, parallel_run, strict=True):
        if not _optimizer_states_agree(expected, actual, tolerance):
            return False

    first_update_of_one_process = reference_run[0][0]
    sums_before_training = first_update_of_one_process.parameter_sums
    return _parameters_change(sums_before_training, expected_sums)


def _models_with_gradients(updates: Sequence[Update]) -> set[str]:
    """Returns the names of the models that have gradients in some update."""
    models: set[str] = set()
    for update in updates:
        models |= models_of(update.merged("gradients"))
    return models


def _sums_of_first_replica(sums_of_replicas: SumsOfRanks) -> Mapping[str, Array]:
    """Returns the sums over the parameters of one process, or over its first replica of the model.

    Empty if there are no sums, as after the last update of a script that has failed. A rank whose
    parameters are known then does not agree with one process.
    """
    return sums_of_replicas[0] if sums_of_replicas else {}


def _ranks_agree_after_updates(
    expected_sums: Sequence[Mapping[str, Array]],
    actual_sums: Sequence[SumsOfRanks],
    trained_models: set[str],
    tolerance: Tolerance,
) -> bool:
    """True if the models of every rank have the parameters of one process after every update.

    The sums over parameters are compared. False if nothing could be compared at all, since this
    proves nothing.

    Args:
        expected_sums: for each update, sums over the parameters of one process.
        actual_sums: for each update, sums over the parameters of each rank.
        trained_models: names of the models that had gradients in some update.
        tolerance: tolerance within which values are equal.
    """
    num_compared = 0
    for sums_of_one_process, sums_of_ranks in zip(expected_sums, actual_sums, strict=True):
        for sums_of_rank in sums_of_ranks:
            # Nothing is recorded on a rank that has run out of batches (torch's `Join`).
            if not models_of(sums_of_rank):
                continue

            if not _models_agree(sums_of_one_process, sums_of_rank, trained_models, tolerance):
                return False
            num_compared += 1

    return num_compared > 0


def _models_agree(
    expected_sums: Mapping[str, Array],
    actual_sums: Mapping[str, Array],
    trained_models: set[str],
    tolerance: Tolerance,
) -> bool:
    """True if the models of a rank have the parameters of one process.

    Compared are all trained models, and other models that both have: only rank 0 may call a
    teacher, for example. Tensors that belong only to an optimizer are in no model.

    Args:
        expected_sums: sums over the parameters of one process.
        actual_sums: sums over the parameters of the rank.
        trained_models: names of the models that had gradients in some update.
        tolerance: tolerance within which values are equal.
    """
    models_of_both = models_of(expected_sums) & models_of(actual_sums)
    compared_models = trained_models | models_of_both
    expected = _only_arrays_of(compared_models, expected_sums)
    actual = _only_arrays_of(compared_models, actual_sums)
    return _are_equal(expected, actual, tolerance)


def _sums_after_updates(run: Sequence[Update], final_sums: SumsOfRanks) -> list[SumsOfRanks]:
    """Returns, for each update, the sums over the parameters that it left on each rank.

    These are the sums before the next update. After the last update, they are the final sums, which
    are not known if the script has failed.
    """
    sums_after: list[SumsOfRanks] = []
    for next_update in run[1:]:
        sums_after.append([record.parameter_sums for record in next_update])
    sums_after.append(final_sums)
    return sums_after


def _optimizer_states_agree(expected: Update, actual: Update, tolerance: Tolerance) -> bool:
    """True if the optimizers have the same state as on one process, as far as it can be compared.

    For example, the state "Net/weight/exp_avg" is a tensor. An array of three numbers is recorded
    for it: [sum, largest absolute value, size].
    """
    state_on_one_process = expected[0].optimizer_state
    for name, expected_state in state_on_one_process.items():
        # The arrays of all ranks that have this tensor, or a slice of it. Of a rank with the whole
        # tensor, the sum is compared too; of slices, only the largest value.
        states_of_ranks = []
        for record in actual:
            if name in record.optimizer_state:
                states_of_ranks.append(record.optimizer_state[name])

        if not _whole_tensors_agree(expected_state, states_of_ranks, tolerance):
            return False
        if not _slices_agree(expected_state, states_of_ranks, tolerance):
            return False

    return True


def _whole_tensors_agree(
    expected_state: Array, states_of_ranks: Sequence[Array], tolerance: Tolerance
) -> bool:
    """True if the ranks with a whole tensor of the state have that of one process.

    Args:
        expected_state: [sum, largest absolute value, size] of the tensor on one process.
        states_of_ranks: the same on each rank, of the whole tensor or of a slice of it.
        tolerance: tolerance within which values are equal.
    """
    for state in states_of_ranks:
        is_whole = state[SIZE] == expected_state[SIZE]
        # Without a scale, the tolerance depends only on the numbers themselves.
        if is_whole and tolerance.differ(expected_state, state, scale=0.0):
            return False
    return True


def _slices_agree(
    expected_state: Array, states_of_ranks: Sequence[Array], tolerance: Tolerance
) -> bool:
    """True if the slices of the ranks can be slices of the tensor of one process.

    Their largest value must be that of the tensor. This is only known if their sizes add up to the
    size of the tensor: not if several ranks have all of it, or slices overlap.

    Args:
        expected_state: [sum, largest absolute value, size] of the tensor on one process.
        states_of_ranks: the same of the slice on each rank.
        tolerance: tolerance within which values are equal.
    """
    sizes_add_up = sum(state[SIZE] for state in states_of_ranks) == expected_state[SIZE]
    if not sizes_add_up:
        return True
    largest_of_slices = max(state[LARGEST] for state in states_of_ranks)
    return not tolerance.differ(expected_state[LARGEST], largest_of_slices, scale=0.0)


def _only_arrays_of_models(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the arrays without those of parameters that belong only to an optimizer."""
    return {n: array for n, array in arrays.items() if not belongs_only_to_optimizer(n)}


def _only_arrays_of(models: set[str], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the arrays of parameters that belong to one of the models."""
    return {name: array for name, array in arrays.items() if model_of(name) in models}


def _are_equal(
    expected: Mapping[str, Array], actual: Mapping[str, Array], tolerance: Tolerance
) -> bool:
    """True if both have the same names, with values that are equal within the tolerance."""
    if expected.keys() != actual.keys():
        return False
    scale = largest_of_all(expected)
    return not any(tolerance.differ(expected[name], actual[name], scale) for name in expected)


def _parameters_change(
    sums_before: Mapping[str, Array], sums_after_updates: Sequence[Mapping[str, Array]]
) -> bool:
    """True if the training changes the parameters.

    Parameters that never change are the same in both runs in any case, and prove nothing.

    Args:
        sums_before: sums over the parameters before the first update.
        sums_after_updates: sums after each update. An entry is empty if the sums are not known.
    """
    # The sums after the last update are not known if the script has failed.
    known_sums = [sums for sums in sums_after_updates if sums]
    if not known_sums:
        return False

    last_sums = known_sums[-1]
    for name in sums_before:
        if name in last_sums and not np.array_equal(last_sums[name], sums_before[name]):
            return True

    return False


def _without_values_of_step(update: Update) -> Update:
    """Returns an update without gradients, and without the parameters right after the step.

    The parameters before the step stay, without those that belong only to an optimizer: it may use
    them as buffers during its step.
    """
    records = []
    for record in update:
        records.append(
            replace(
                record,
                gradients={},
                unclipped={},  # the gradients before they were clipped
                reduced_in_step={},  # the gradients after collectives inside of the step
                parameters={},  # the parameters after the step
                initial=_only_arrays_of_models(record.initial),
                parameter_sums=_only_arrays_of_models(record.parameter_sums),
            )
        )

    return Update(records)
