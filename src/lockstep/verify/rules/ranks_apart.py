"""Rules for ranks whose parameters or optimizers differ from those of other ranks.

A *rule* returns the `Cause` of a difference (`case`) between one process and several ranks, or
None. Of the optimizer step that differs, `case.expected` is what one process recorded and
`case.actual` what the ranks recorded: a `RankUpdate` for each, with the fields under "Needs".
`merged(field)` joins the arrays of all ranks. All steps are in `case.reference_run` and
`case.parallel_run`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from lockstep.verify.algebra import near
from lockstep.verify.cause import Cause, format_by_process, format_items, script_names
from lockstep.verify.compare import Divergence
from lockstep.verify.line_findings import describe_writes
from lockstep.verify.rules.evidence import first_clip_line, format_ranks_that_differ
from lockstep.verify.training_record import Update
from lockstep.wording import format_ranks


def different_optimizers(case: Divergence) -> Cause | None:
    """LS405: in what should be one step, ranks step with optimizers of different classes.

    Needs: `optimizer_class`.
    Applies: if ranks that stepped have different classes. Nothing else can be compared then.
    False positives: none known.
    Evidence: the class of each rank.
    """
    classes = [rank.optimizer_class for rank in case.actual if rank.stepped]
    if len(set(classes)) < 2:
        return None
    by_rank = format_by_process(classes, with_reference=False)
    return Cause("LS405", (f"the ranks step with different optimizers: {by_rank}",))


def replicas_that_differ(case: Divergence) -> Cause:
    """LS304: ranks hold other parameters than rank 0 before the step.

    Needs: `parameter_sums`; `parameters` and `write_stacks` for the evidence.
    Applies: always.
    False positives: none known.
    Evidence: which ranks, whether the last step left them so, and the lines that wrote to them.
    """
    # By parameter, the ranks that held other values before the step than rank 0.
    ranks_by_name = case.actual.replicas_that_differ()
    step = case.actual[0].step + 1
    sentence = (
        f"before step {step} {format_ranks_that_differ(ranks_by_name)} "
        "held other parameters than rank 0"
    )
    writes = describe_writes(case, tuple(ranks_by_name))
    if case.update_index == 0:  # there was no step before
        return Cause("LS304", (sentence, *writes))

    update_before = case.parallel_run[case.update_index - 1]
    if update_before.ranks_that_differ("parameters", case.tolerance):
        after = "the last step has left them so"
    else:
        after = "the last step itself left all ranks with the same"

    return Cause("LS304", (sentence, after, *writes))


@dataclass(frozen=True)
class _OptimizerOwner:
    """The first rank that stepped with an optimizer, and the optimizer's parameters."""

    rank: int
    parameter_names: Sequence[str]


def parameters_of_unstepped_optimizer(case: Divergence) -> Cause | None:
    """LS304: some ranks step with an optimizer, and others hold other values of its parameters.

    Needs: `construction_index` and `optimizer_parameters` of ranks that stepped, `unstepped_sums`
        of those that did not.
    Applies: if these parameters differ between the ranks in this update for the first time.
    False positives: none known.
    Evidence: which ranks hold other parameters, and the optimizer's class.
    """
    names_by_rank = _unstepped_names_that_differ(case, case.update_index)
    if not names_by_rank:
        return None

    for number in range(case.update_index):
        if _unstepped_names_that_differ(case, number):  # it is not new in this step
            return None

    names: set[str] = set()
    for names_of_rank in names_by_rank.values():
        names |= set(names_of_rank)

    classes = _classes_of_optimizers_with(names, case.parallel_run[: case.update_index])
    step = case.actual[0].step + 1
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
        for rank in update:
            if not names.isdisjoint(rank.optimizer_parameters):
                classes.add(rank.optimizer_class)
    return classes


def _unstepped_names_that_differ(case: Divergence, number: int) -> dict[int, list[str]]:
    """Compares parameters of optimizers that step on some ranks only, before an update.

    A rank that never steps with an optimizer has recorded no names of its parameters, but only
    their sums, by the optimizer's number and the parameter's place in it (`unstepped_sums`). The
    number counts the optimizers as they are built, so it is the same on the rank that steps, the
    *owner*.

    Args:
        case: the difference.
        number: of the update before which the values are compared.

    Returns:
        For each rank that does not step, the parameters whose values are not those of the owner.
    """
    owners = _owners_of_optimizers(case.parallel_run[:number])
    update = case.parallel_run[number]
    names_by_rank: dict[int, list[str]] = defaultdict(list)
    for rank_number, rank in enumerate(update):
        for (index, place), sums in rank.unstepped_sums.items():
            if index not in owners:
                continue

            owner = owners[index]
            if place >= len(owner.parameter_names):  # the rank built another optimizer
                continue

            name = owner.parameter_names[place]
            owner_sums = update[owner.rank].parameter_sums.get(name)
            if owner_sums is not None and not np.array_equal(owner_sums, sums):
                names_by_rank[rank_number].append(name)

    return names_by_rank


def _owners_of_optimizers(updates: Sequence[Update]) -> dict[int, _OptimizerOwner]:
    """Returns the first rank that stepped with each optimizer while another rank did not.

    The key is the optimizer's number in the order in which a rank builds its optimizers.
    """
    owners: dict[int, _OptimizerOwner] = {}
    for update in updates:
        all_ranks_stepped = all(rank.stepped for rank in update)
        if all_ranks_stepped:
            continue
        for rank_number, rank in enumerate(update):
            index = rank.construction_index
            is_known = index >= 0
            if is_known and index not in owners:
                owners[index] = _OptimizerOwner(rank_number, rank.optimizer_parameters)

    return owners


def changed_between_passes(case: Divergence) -> Cause | None:
    """Names the cause of parameters that the ranks change differently within one step.

    LS302: an earlier backward pass of the step averaged no gradients, because the script called the
    model without its DDP wrapper. LS301: it averaged none for another reason. LS304: it averaged
    them.

    Needs: `changed_between_passes` and `local_passes`.
    Applies: if the ranks changed parameters between two backward passes to different values.
    False positives: none known.
    Evidence: which ranks, and whether an earlier pass left each rank's own gradients.
    """
    ranks_by_name = case.actual.ranks_that_differ("changed_between_passes", case.tolerance)
    if not ranks_by_name:
        return None

    ranks = format_ranks_that_differ(ranks_by_name)
    sentence = (
        f"between the backward passes of this step {ranks} changed parameters to others than rank 0"
    )
    some_earlier_pass_was_local = False
    for rank in case.actual:
        # `local_passes`: for each backward pass, True if its gradients were not averaged.
        earlier_passes = rank.local_passes[:-1]
        if any(earlier_passes):
            some_earlier_pass_was_local = True

    if not some_earlier_pass_was_local:
        return Cause("LS304", (sentence, *describe_writes(case, tuple(ranks_by_name))))

    why = "what a backward pass before it left was each rank's own, and no average"
    line = case.actual.first("past_wrapper_line")
    if line:
        return Cause("LS302", (sentence, why, f"a forward pass bypassed the DDP wrapper: {line}"))

    return Cause("LS301", (sentence, why))


def factors_of_ranks(case: Divergence) -> Cause | None:
    """LS404: ranks multiplied their gradients by different numbers after the backward passes.

    Needs: `gradient_factor`.
    Applies: if it is known of all ranks and differs.
    False positives: another scaling than clipping that each rank does for its shards.
    Evidence: the number of each rank, and the line that clips.
    """
    factors = [rank.gradient_factor for rank in case.actual]
    # NaN: on this rank not all gradients were multiplied by the same number.
    if any(math.isnan(factor) for factor in factors):
        return None
    if all(near(factors[0], factor) for factor in factors):
        return None

    by_rank = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in enumerate(factors))
    return Cause(
        "LS404",
        (
            "after the last backward pass gradients were multiplied by numbers of each rank: "
            f"{by_rank}",
            "as by clipping with the norm of a rank's own shards instead of that of all shards",
            *first_clip_line(case),
        ),
    )
