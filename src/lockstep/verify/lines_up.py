"""Lines up the optimizer steps of all ranks, so that steps which belong together form an `Update`.

A `Step` is what one rank recorded of one optimizer step: a list of `RankUpdate`s, usually of one.
Usually step 1 of rank 0 belongs to step 1 of rank 1. But ranks may leave steps to others, as with a
probe that is trained on rank 0 and sent to the others. Such a rank has *missed* the step, and gets
a `RankUpdate` that says so. A *shared* optimizer is one with which all ranks step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import RankUpdate, Update
from lockstep.wording import group_by_key

# What a rank has recorded of one step of one optimizer: one record, or one for each replica if it
# trains several replicas in turn.
Step = list[RankUpdate]

# The number of an optimizer, and of its step.
StepKey = tuple[int, int]


def group_by_step(updates: Sequence[RankUpdate]) -> list[Step]:
    """Returns the steps that a rank has made, in their order.

    Args:
        updates: the records of the rank. Those of one step have the same numbers of optimizer and
            step.
    """
    pairs = [((update.optimizer, update.step), update) for update in updates]
    return list(group_by_key(pairs).values())


def line_up(ranks: Sequence[list[Step]]) -> list[Update]:
    """Returns the updates that the steps of all ranks form.

    If all ranks step with the same optimizers, their n-th steps form an update. If some rank never
    steps with some optimizer, the steps of this optimizer are updates which that rank has missed.
    They stand after the step of a shared optimizer (one with which all ranks step) that came before
    them.

    Args:
        ranks: the steps of each rank.
    """
    if _have_same_optimizer_classes(ranks):
        return _line_up_in_order(ranks)

    renumbered_ranks = _with_shared_numbers(ranks)
    optimizers_of_ranks = []
    for steps in renumbered_ranks:
        optimizers_of_ranks.append({step[0].optimizer for step in steps})

    shared_optimizers = set.intersection(*optimizers_of_ranks)
    all_are_shared = all(optimizers == shared_optimizers for optimizers in optimizers_of_ranks)

    # If all optimizers are shared, the n-th steps of all ranks belong together. If none is, nothing
    # shows which steps belong together, and the n-th ones are taken, too.
    if not shared_optimizers or all_are_shared:
        return _line_up_in_order(ranks)

    return _line_up_at_shared_steps(renumbered_ranks, shared_optimizers)


def _line_up_at_shared_steps(
    ranks: Sequence[list[Step]], shared_optimizers: set[int]
) -> list[Update]:
    """Returns the updates of ranks some of which do not make all steps.

    For example, if `A` is a step of a shared optimizer and `b` one of rank 0's own, then rank 0
    with `A b A` and rank 1 with `A A` make three updates, of which rank 1 has missed the second.

    Args:
        ranks: the steps of each rank.
        shared_optimizers: the numbers of the optimizers with which all ranks step.
    """
    # Each section begins with a step of a shared optimizer, except the first, which has the steps
    # before all of those.
    sections_of_ranks = [_split_into_sections(steps, shared_optimizers) for steps in ranks]
    # Up to the rank that made the fewest steps of shared optimizers.
    num_sections = min(len(sections) for sections in sections_of_ranks)
    first_sections = [sections[0] for sections in sections_of_ranks]
    updates = _line_up_steps_of_some_ranks(first_sections)

    for number in range(1, num_sections):
        section_of_rank = [sections[number] for sections in sections_of_ranks]
        # Each section begins with a shared step; the steps of some ranks follow.
        shared_step_of_rank = [section[0] for section in section_of_rank]
        _append_shared_update(updates, Update(chain(*shared_step_of_rank)))
        other_steps_of_rank = [section[1:] for section in section_of_rank]
        updates += _line_up_steps_of_some_ranks(other_steps_of_rank)

    return _with_all_initial_parameters(updates)


def _append_shared_update(updates: list[Update], shared_update: Update) -> None:
    """Appends an update that all ranks have made, and corrects the one before it if needed.

    Some ranks may have made both updates after one backward pass, and the others only the shared
    one. These others have recorded their inputs with the shared update, but the inputs belong to
    the backward pass, and so to the first of the two updates.
    """
    if updates and _share_a_backward_pass(updates[-1], shared_update):
        updates[-1] = _with_inputs_of_missing_ranks(updates[-1], shared_update)
        shared_update = _without_losses_and_parameter_sums(shared_update)
    updates.append(shared_update)


def _line_up_in_order(ranks: Sequence[list[Step]]) -> list[Update]:
    """Returns an update of the n-th steps of all ranks, for each n that all ranks have reached."""
    updates = []
    for step_of_rank in zip(*ranks, strict=False):
        updates.append(Update(chain(*step_of_rank)))
    return updates


def _first_updates(steps: Sequence[Step]) -> dict[int, RankUpdate]:
    """Returns the record of the first step of each optimizer of a rank, by optimizer number."""
    first_updates: dict[int, RankUpdate] = {}
    for step in steps:
        update = step[0]  # the records of several replicas are of the same optimizer
        if update.optimizer not in first_updates:
            first_updates[update.optimizer] = update
    return first_updates


def _have_same_optimizer_classes(ranks: Sequence[list[Step]]) -> bool:
    """Returns whether an optimizer of the same number has the same class on all ranks.

    Each rank numbers its optimizers in the order of their first steps.
    """
    classes_of_ranks = []
    for steps in ranks:
        classes = {}  # by the number of the optimizer
        for number, update in _first_updates(steps).items():
            classes[number] = update.optimizer_class
        classes_of_ranks.append(classes)
    return all(classes == classes_of_ranks[0] for classes in classes_of_ranks)


# One number for the optimizer of a model on all ranks


def _with_shared_numbers(ranks: Sequence[list[Step]]) -> list[list[Step]]:
    """Returns the steps of all ranks, with the same number for the same optimizer on each rank.

    Each rank has numbered its optimizers in the order of their first steps, so ranks that step with
    different ones have different numbers.
    """
    # The first record of every optimizer that has a shared number, by that number.
    known: dict[int, RankUpdate] = {}
    renumbered_ranks = []
    for steps in ranks:
        new_numbers = _match_optimizers(_first_updates(steps), known)
        renumbered = []
        for step in steps:
            renumbered.append(
                [replace(update, optimizer=new_numbers[update.optimizer]) for update in step]
            )
        renumbered_ranks.append(renumbered)

    return renumbered_ranks


def _match_optimizers(
    first_updates: dict[int, RankUpdate], known: dict[int, RankUpdate]
) -> dict[int, int]:
    """Finds the shared number of each optimizer of a rank, by the number that the rank gave it.

    Optimizers are the same if they hold the same parameters; of several such, the most alike. If
    each rank's optimizer holds a part of the parameters, they have none in common; then they are
    the same if they have the same number and class. All others get new numbers.

    Args:
        first_updates: the first record of each optimizer of the rank, by the rank's number.
        known: the first record of each optimizer of the ranks before, by shared number. Optimizers
            with new numbers are added to it.
    """
    shared_numbers = _match_by_parameters(first_updates, known)
    for number, update in first_updates.items():
        if number in shared_numbers:
            continue

        # No other optimizer of this rank has this shared number.
        is_free = number in known and number not in shared_numbers.values()
        if is_free and _may_have_same_class(known[number], update):
            shared_numbers[number] = number
        else:
            new_number = max(known, default=-1) + 1
            shared_numbers[number] = new_number
            known[new_number] = update

    return shared_numbers


def _match_by_parameters(
    first_updates: dict[int, RankUpdate], known: dict[int, RankUpdate]
) -> dict[int, int]:
    """Finds the shared numbers of those optimizers that have parameters in common with a known one.

    See `_match_optimizers` for the arguments and the result.
    """
    pairs = []  # (how alike they are, shared number, number on the rank)
    for number, update in first_updates.items():
        for shared_number, known_update in known.items():
            num_parameters = len(update.parameters.keys() & known_update.parameters.keys())
            if num_parameters:
                likeness = (num_parameters, *_likeness(update, known_update))
                pairs.append((likeness, shared_number, number))

    # The most alike pairs come first, and among equally alike ones the lowest numbers. Python's
    # sorting keeps the order of equal elements, so the less important key is sorted by first.
    pairs.sort(key=lambda pair: (pair[1], pair[2]))
    pairs.sort(key=lambda pair: pair[0], reverse=True)
    shared_numbers: dict[int, int] = {}
    for _, shared_number, number in pairs:
        if number not in shared_numbers and shared_number not in shared_numbers.values():
            shared_numbers[number] = shared_number

    return shared_numbers


def _may_have_same_class(first: RankUpdate, second: RankUpdate) -> bool:
    """Returns whether two optimizers have the same class, or the class of one is not known.

    It is not known on a rank that has no optimizer and is sent what others have updated.
    """
    if not first.optimizer_class or not second.optimizer_class:
        return True
    return first.optimizer_class == second.optimizer_class


def _likeness(first: RankUpdate, second: RankUpdate) -> tuple[bool, bool, bool]:
    """Returns in what the first steps of two optimizers are alike, the most important first.

    A rank may train the same parameters by several optimizers of one class, such as one for
    pretraining. Ranks that train together have the same parameters after a step.

    Returns:
        Whether the classes are the same, the parameters after the step, and the options. Such
        tuples are compared to find the most alike optimizers.
    """
    same_class = first.optimizer_class == second.optimizer_class
    same_parameters = True
    for name in first.parameters.keys() & second.parameters.keys():
        if not _are_close(first.parameters[name], second.parameters[name]):
            same_parameters = False

    same_rates = list(first.learning_rates) == list(second.learning_rates)
    same_options = same_rates and first.group_options == second.group_options
    return same_class, same_parameters, same_options


def _are_close(first: Array, second: Array) -> bool:
    """Returns whether two arrays are equal within float32's rounding."""
    if first.shape != second.shape:  # numpy would broadcast them
        return False
    return np.allclose(first, second, rtol=1e-6, equal_nan=True)


# Steps that only some ranks make


def _split_into_sections(steps: Sequence[Step], shared_optimizers: set[int]) -> list[list[Step]]:
    """Splits the steps of a rank before each step of a shared optimizer.

    If `A` is a step of a shared optimizer, `b A b b A` becomes `[b]`, `[A b b]`, `[A]`. The first
    section is empty if a rank begins with `A`.
    """
    sections: list[list[Step]] = [[]]
    for step in steps:
        if step[0].optimizer in shared_optimizers:
            sections.append([])
        sections[-1].append(step)
    return sections


def _line_up_steps_of_some_ranks(ranks: Sequence[list[Step]]) -> list[Update]:
    """Returns updates that only some ranks have made; the others have missed them.

    Args:
        ranks: the steps of each rank between two updates that all have made.
    """
    # Steps of several ranks belong together if optimizer and step have the same numbers. For each
    # such pair of numbers (the key), the steps of the ranks that made it.
    step_by_rank_of_key: dict[StepKey, dict[int, Step]] = defaultdict(dict)
    for rank, steps in enumerate(ranks):
        for step in steps:
            key = (step[0].optimizer, step[0].step)
            step_by_rank_of_key[key][rank] = step

    updates = []
    for step_by_rank in step_by_rank_of_key.values():
        some_step = next(iter(step_by_rank.values()))
        missed_step = [missed_by(some_step[0])]
        steps_of_all_ranks = [step_by_rank.get(rank, missed_step) for rank in range(len(ranks))]
        updates.append(Update(chain(*steps_of_all_ranks)))

    return updates


def missed_by(update: RankUpdate) -> RankUpdate:
    """Returns the record of a rank that has not made a step that another rank has made.

    Args:
        update: the record of the rank that has made it.
    """
    return RankUpdate(
        optimizer=update.optimizer,
        optimizer_class=update.optimizer_class,
        step=update.step,
        stepped=False,
        dtype=update.dtype,
        contributes=False,
    )


def with_idle_ranks(updates: Sequence[Update], idle_ranks: Collection[int]) -> list[Update]:
    """Adds ranks that have missed all updates.

    Args:
        updates: what the ranks recorded that trained. In these, ranks are numbered without the
            idle ones.
        idle_ranks: the numbers of the ranks that recorded nothing.
    """
    new_updates = []
    for update in updates:
        ranks = list(update)
        # In ascending order, so that all lower ranks are there when one is inserted.
        for idle_rank in sorted(idle_ranks):
            ranks.insert(idle_rank, missed_by(update[0]))
        new_updates.append(Update(ranks))

    return new_updates


# Two updates after one backward pass


def _share_a_backward_pass(earlier: Update, later: Update) -> bool:
    """Returns whether some ranks made two updates after one backward pass.

    Those ranks step with an optimizer of their own and then with a shared one, without another
    backward pass in between, so they record the same losses for both.

    Args:
        earlier: an update that some ranks may have missed.
        later: the next one, which all ranks have made.
    """
    some_missed_it = any(not rank.stepped for rank in earlier)
    if not some_missed_it or len(earlier) != len(later):
        return False
    for before, after in zip(earlier, later, strict=True):
        if before.stepped and before.losses and before.losses == after.losses:
            return True
    return False


def _with_inputs_of_missing_ranks(earlier: Update, later: Update) -> Update:
    """Returns the earlier of two updates after one backward pass, with the inputs of all ranks.

    The ranks that missed the update had inputs too, which they recorded for the later one. Losses
    are left out, since it is not known to which of the two updates a loss belongs.
    """
    ranks = []
    for before, after in zip(earlier, later, strict=True):
        if before.stepped:
            ranks.append(replace(before, losses=[]))
        else:
            ranks.append(
                replace(
                    before,
                    batches=after.batches,
                    model_inputs=after.model_inputs,
                    contributes=after.contributes,
                    parameter_sums=after.parameter_sums,
                    losses=[],
                )
            )

    return Update(ranks)


def _without_losses_and_parameter_sums(update: Update) -> Update:
    """Returns the later of two updates after one backward pass, without what may not be its own.

    The losses may be those of the earlier update. The sums over the parameters before the update
    were moved to the earlier one, for ranks that missed it.
    """
    return Update(replace(rank, losses=[], parameter_sums={}) for rank in update)


# Parameters before the first update


def _with_all_initial_parameters(updates: list[Update]) -> list[Update]:
    """Returns the updates with the initial parameters of every rank in the first one.

    A rank records them with its own first step, which may be part of a later update.
    """
    new_updates = []
    for number, update in enumerate(updates):
        ranks = []
        for rank_number, rank in enumerate(update):
            initial: dict[str, Array] = {}
            if number == 0:
                initial = _initial_parameters(updates, rank_number)
            ranks.append(replace(rank, initial=initial))
        new_updates.append(Update(ranks))

    return new_updates


def _initial_parameters(updates: Sequence[Update], rank_number: int) -> dict[str, Array]:
    """Returns the parameters with which a rank began, by name; empty if it recorded none.

    A rank may have recorded its parameters only after other ranks had trained them and sent it the
    new values. Then the values with which the others began are taken instead. If the rank recorded
    nothing at the first update, parameters that no other rank had then are left out.
    """
    initial_of_others = updates[0].merged("initial")
    trained_names: set[str] = set()  # by other ranks, before this rank recorded anything
    for number, update in enumerate(updates):
        recorded = update[rank_number].initial
        if not recorded:
            trained_names |= update.merged("parameters").keys()
            continue

        if number == 0:  # nothing was trained before
            return dict(recorded)

        initial = {}
        for name, array in recorded.items():
            if name in initial_of_others:
                was_trained = name in trained_names
                initial[name] = initial_of_others[name] if was_trained else array

        return initial

    return {}
