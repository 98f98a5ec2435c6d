"""Rules for ranks whose parameters or optimizers differ from those of other ranks.

A *rule* returns the `Cause` of a difference (`case`) between a run on one process and a run on
several ranks, or None if it does not apply. `case.expected` is the optimizer step on one process,
and `case.actual` the same step on the ranks: a `RankUpdate` (record) for each rank, with the fields
listed under "Needs". `case.parallel_run` holds all steps of the ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from lockstep.verify.algebra import near
from lockstep.verify.cause import (
    Cause,
    format_by_process,
    format_items,
    name_ranks,
    script_names,
)
from lockstep.verify.divergence import Divergence
from lockstep.verify.line_findings import describe_writes
from lockstep.verify.rules.evidence import first_clip_line, format_ranks_that_differ
from lockstep.verify.training_record import Update
from lockstep.wording import format_ranks


def different_optimizers(case: Divergence) -> Cause | None:
    """LS405: in what should be the same step, ranks step with optimizers of different classes.

    Needs: `optimizer_class`.
    Applies: if ranks that stepped have different classes. Then nothing else can be compared.
    False positives: none known.
    Evidence: the class of each rank.
    """
    class_of_rank = {}
    for rank, record in enumerate(case.actual):
        if record.stepped:
            class_of_rank[rank] = record.optimizer_class

    classes = list(class_of_rank.values())
    if len(set(classes)) < 2:
        return None

    # "Adam on rank 0 and rank 1, SGD on rank 2"
    by_rank = format_by_process(classes, name_ranks(class_of_rank))
    return Cause("LS405", (f"the ranks step with different optimizers: {by_rank}",))


def parameters_apart(case: Divergence) -> Cause:
    """LS304: before the step, some ranks have different parameters than rank 0.

    Needs: `parameter_sums`; `parameters` and `write_stacks` for the evidence.
    Applies: always, as it is only called if the parameters differ.
    False positives: none known.
    Evidence: which ranks, whether the previous step made them differ, and the lines that wrote to
        them.
    """
    # By parameter, the ranks whose values before the step differ: {"fc.weight": [1, 3]}.
    ranks_by_name = case.actual.replicas_that_differ()
    step = case.actual[0].step + 1  # records count steps from 0, texts from 1
    sentence = (
        f"before step {step} {format_ranks_that_differ(ranks_by_name)} "
        "held different parameters than rank 0"
    )
    writes = describe_writes(case, tuple(ranks_by_name))

    is_first_update = case.update_index == 0
    if is_first_update:
        return Cause("LS304", (sentence, *writes))

    # Did the previous step already leave the ranks with different parameters, or have they come
    # apart between the steps? The field "parameters" holds the values after a step.
    previous_update = case.parallel_run[case.update_index - 1]
    ranks_apart_by_name = previous_update.ranks_that_differ("parameters", case.tolerance)
    if ranks_apart_by_name:
        sentence_on_previous_step = "the last step has left them so"
    else:
        sentence_on_previous_step = "the last step itself left all ranks with the same parameters"

    return Cause("LS304", (sentence, sentence_on_previous_step, *writes))


@dataclass(frozen=True)
class _Stepper:
    """The first rank that stepped with an optimizer, and the optimizer's parameters."""

    rank: int
    parameter_names: Sequence[str]


def parameters_of_unstepped_optimizer(case: Divergence) -> Cause | None:
    """LS304: a rank was not sent the parameters that another rank's optimizer has changed.

    For example, both ranks construct an Adam, but only rank 0 steps with it, and should send the
    parameters to rank 1 after each step. On rank 1, this optimizer is *unstepped*.

    Needs: `construction_index` and `optimizer_parameters` of ranks that stepped, and
        `unstepped_sums` of ranks that did not.
    Applies: if these parameters differ between the ranks in this update for the first time.
    False positives: none known.
    Evidence: which ranks have other parameters, and the class of the optimizer.
    """
    # If "fc.weight" has other values on rank 1, this is {1: ["fc.weight"]}.
    names_by_rank = _names_differing_from_stepping_rank(case, case.update_index)
    if not names_by_rank:
        return None

    # A difference that was there before an earlier step has been reported for that step.
    earlier_indices = range(case.update_index)
    if any(_names_differing_from_stepping_rank(case, index) for index in earlier_indices):
        return None

    # The class of the optimizer is known from ranks that stepped with it before.
    names = set().union(*names_by_rank.values())
    earlier_updates = case.parallel_run[: case.update_index]
    classes = _classes_of_optimizers_with(names, earlier_updates)
    step = case.actual[0].step + 1  # records count steps from 0, texts from 1
    # "before step 2 rank 1 held other parameters of Adam, which has not stepped there: fc.weight"
    text = (
        f"before step {step} {format_ranks(names_by_rank)} held other parameters of "
        f"{' and '.join(sorted(classes))}, which has not stepped there: "
        f"{format_items(script_names(sorted(names)))}"
    )

    return Cause("LS304", (text,))


def _classes_of_optimizers_with(names: Set[str], updates: Sequence[Update]) -> set[str]:
    """Returns the classes of all optimizers that stepped with any of these parameters."""
    classes = set()
    for update in updates:
        for record in update:
            if not names.isdisjoint(record.optimizer_parameters):
                classes.add(record.optimizer_class)
    return classes


def _names_differing_from_stepping_rank(
    case: Divergence, update_index: int
) -> dict[int, list[str]]:
    """Finds parameters that differ between a rank that never steps and one that does.

    A rank that never steps with its own copy of an optimizer has recorded sums over the parameters
    of this copy (`unstepped_sums`). They are compared with those of the first rank that steps with
    the optimizer.

    Args:
        case: the difference.
        update_index: index of the update before which the parameters are compared.

    Returns:
        For each rank that never steps, the parameters that differ, such as `{1: ["fc.weight"]}`.
    """
    first_stepper_of_optimizer = _first_steppers(case.parallel_run[:update_index])
    update = case.parallel_run[update_index]
    names_by_rank: dict[int, list[str]] = defaultdict(list)

    for rank, record in enumerate(update):
        # A rank that has not stepped does not know the names of these parameters. It has recorded
        # the sums under a pair of numbers, such as (1, 0) for the first parameter of the second
        # optimizer that the rank has constructed.
        for (optimizer_number, parameter_index), sums in record.unstepped_sums.items():
            stepper = first_stepper_of_optimizer.get(optimizer_number)
            if stepper is None:
                continue

            name = _name_of_parameter(stepper, parameter_index)
            expected_sums = update[stepper.rank].parameter_sums.get(name)
            if expected_sums is not None and not np.array_equal(expected_sums, sums):
                names_by_rank[rank].append(name)

    return names_by_rank


def _name_of_parameter(stepper: _Stepper, parameter_index: int) -> str:
    """Returns the name of a parameter of the optimizer that a rank stepped with.

    Empty if this optimizer has fewer parameters: a rank that has not stepped may have constructed
    another optimizer in its place.
    """
    names = stepper.parameter_names
    return names[parameter_index] if parameter_index < len(names) else ""


def _first_steppers(updates: Sequence[Update]) -> dict[int, _Stepper]:
    """Returns, for each optimizer that not all ranks step with, the first rank that does.

    For example, if rank 0 alone steps with optimizer 1, the result is `{1: _Stepper(rank=0, ...)}`.

    Updates in which all ranks stepped are skipped. Keys are the numbers of the optimizers, in the
    order in which a rank constructs them.
    """
    first_stepper_of_optimizer: dict[int, _Stepper] = {}
    for update in updates:
        all_ranks_stepped = all(record.stepped for record in update)
        if all_ranks_stepped:
            continue

        for rank, record in enumerate(update):
            # The number of the optimizer that this rank stepped with. It is -1 if the rank did not
            # step, or if the number is not known.
            optimizer_number = record.construction_index
            number_is_known = optimizer_number >= 0
            if number_is_known and optimizer_number not in first_stepper_of_optimizer:
                stepper = _Stepper(rank, record.optimizer_parameters)
                first_stepper_of_optimizer[optimizer_number] = stepper

    return first_stepper_of_optimizer


def changed_between_passes(case: Divergence) -> Cause | None:
    """Names the cause of parameters that the ranks changed differently within one step.

    LS302: an earlier backward pass of the step did not average gradients, because the script
    bypassed the DDP wrapper. LS301: it did not average them for another reason. LS304: it averaged
    them.

    Needs: `changed_between_passes` and `local_passes`.
    Applies: if the ranks changed parameters to different values between two backward passes.
    False positives: none known.
    Evidence: which ranks, and whether the gradients of an earlier pass were local.
    """
    ranks_by_name = case.actual.ranks_that_differ("changed_between_passes", case.tolerance)
    if not ranks_by_name:
        return None

    ranks = format_ranks_that_differ(ranks_by_name)
    sentence = (
        f"between the backward passes of this step {ranks} gave parameters different values "
        "than rank 0"
    )
    # For each backward pass, `local_passes` is True if its gradients stayed local.
    some_earlier_pass_was_local = any(any(record.local_passes[:-1]) for record in case.actual)
    if not some_earlier_pass_was_local:
        return Cause("LS304", (sentence, *describe_writes(case, tuple(ranks_by_name))))

    # Each rank has changed the parameters with these local gradients.
    why = "an earlier backward pass left gradients that were not averaged"
    line = case.actual.first_on_any_rank("line_that_bypassed_wrapper")
    if line:
        return Cause("LS302", (sentence, why, f"a forward pass bypassed the DDP wrapper: {line}"))

    return Cause("LS301", (sentence, why))


def factors_of_ranks(case: Divergence) -> Cause | None:
    """LS404: ranks multiplied their gradients by different numbers after the backward passes.

    Needs: `gradient_factor`.
    Applies: if this number is known for all ranks and differs.
    False positives: ranks that scale the gradients of their shards for another reason than
        clipping.
    Evidence: the number of each rank, and the line that clips.
    """
    # NaN: a rank has not multiplied all its gradients by the same number.
    factors = [record.gradient_factor for record in case.actual]
    some_factor_is_unknown = any(math.isnan(factor) for factor in factors)
    factors_are_equal = all(near(factors[0], factor) for factor in factors)
    if some_factor_is_unknown or factors_are_equal:
        return None

    # "0.5 on rank 0, 0.7 on rank 1"
    by_rank = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in enumerate(factors))
    text = (
        "after the last backward pass each rank multiplied its gradients by another number: "
        f"{by_rank}"
    )
    likely_reason = (
        "as by clipping with the norm of a rank's own shards instead of that of all shards"
    )
    return Cause("LS404", (text, likely_reason, *first_clip_line(case)))
