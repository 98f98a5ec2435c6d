"""Lines up the optimizer steps of all ranks, so that steps which belong together form an `Update`.

Usually step 1 of rank 0 belongs to step 1 of rank 1. But ranks may leave the steps of an optimizer
to others, as with a probe that is trained on rank 0 and sent to the others. A *shared* optimizer is
one with which all ranks step. A rank that has *missed* a step has a record that says so.
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

# What a rank has recorded of one step of one optimizer. If it trains several replicas in turn, each
# replica has a record.
Step = list[RankUpdate]

# The number of an optimizer, and of its step.
StepKey = tuple[int, int]


def group_by_step(updates: Sequence[RankUpdate]) -> list[Step]:
    """Groups the records of one rank by optimizer and step."""
    pairs = [((update.optimizer, update.step), update) for update in updates]
    return list(group_by_key(pairs).values())


def line_up(ranks: Sequence[list[Step]]) -> list[Update]:
    """Returns the updates that the steps of all ranks form.

    If all ranks step with the same optimizers, their n-th steps form an update. If a rank never
    steps with some optimizer, this optimizer's steps come after the step of a shared optimizer
    (one with which all ranks step) that they followed, and the rank has missed them.

    Args:
        ranks: the steps of each rank.
    """
    if _have_same_optimizer_classes(ranks):
        return _line_up_in_order(ranks)
    renumbered_ranks = _with_shared_numbers(ranks)
    optimizers_of_ranks = []
    for steps in renumbered_ranks:
        optimizers_of_ranks.append({_key_of(step)[0] for step in steps})
    shared_optimizers = set.intersection(*optimizers_of_ranks)
    all_are_shared = all(optimizers == shared_optimizers for optimizers in optimizers_of_ranks)
    if not shared_optimizers or all_are_shared:
        return _line_up_in_order(ranks)

    # Each section of a rank begins with a step of a shared optimizer. The first one has only steps
    # that came before all of those.
    sections_of_ranks = []
    for steps in renumbered_ranks:
        sections_of_ranks.append(_split_into_sections(steps, shared_optimizers))
    num_sections = min(len(sections) for sections in sections_of_ranks)
    updates = _line_up_steps_of_some_ranks([sections[0] for sections in sections_of_ranks])
    for number in range(1, num_sections):
        sections = [of_rank[number] for of_rank in sections_of_ranks]
        shared_steps = [section[0] for section in sections]  # one of each rank
        shared_update = Update(chain(*shared_steps))
        if updates and _share_a_backward_pass(updates[-1], shared_update):
            updates[-1] = _with_inputs_of_missing_ranks(updates[-1], shared_update)
            shared_update = _without_inputs(shared_update)
        updates.append(shared_update)
        updates += _line_up_steps_of_some_ranks([section[1:] for section in sections])
    return _with_all_initial_parameters(updates)


def _line_up_in_order(ranks: Sequence[list[Step]]) -> list[Update]:
    """Forms an update of the n-th steps of all ranks, up to the rank with the fewest."""
    return [Update(chain(*steps)) for steps in zip(*ranks, strict=False)]


def _key_of(step: Step) -> StepKey:
    """Returns the numbers of a step's optimizer and of the step."""
    return step[0].optimizer, step[0].step


def _first_updates(steps: Sequence[Step]) -> dict[int, RankUpdate]:
    """Returns the first record of each optimizer of a rank, by the optimizer's number."""
    first_updates: dict[int, RankUpdate] = {}
    for step in steps:
        update = step[0]
        if update.optimizer not in first_updates:
            first_updates[update.optimizer] = update
    return first_updates


def _have_same_optimizer_classes(ranks: Sequence[list[Step]]) -> bool:
    """Returns whether all ranks step with optimizers of the same classes."""
    classes_of_ranks = []
    for steps in ranks:
        classes = {}
        for number, update in _first_updates(steps).items():
            classes[number] = update.optimizer_class
        classes_of_ranks.append(classes)
    return all(classes == classes_of_ranks[0] for classes in classes_of_ranks)


# One number for what is one optimizer on several ranks


def _with_shared_numbers(ranks: Sequence[list[Step]]) -> list[list[Step]]:
    """Renumbers the optimizers, so that an optimizer has the same number on all ranks."""
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
    """Returns the shared number of each optimizer of a rank, by its own number.

    Optimizers are the same if they hold the same parameters; of several, the one that is most
    alike. Optimizers that hold a part each have no parameter in common, but the same number and
    class.

    Args:
        first_updates: the first record of each optimizer of the rank.
        known: the same of optimizers of other ranks, by shared number; new ones are added.
    """
    candidates = []
    for number, update in first_updates.items():
        for shared_number, known_update in known.items():
            num_parameters = len(update.parameters.keys() & known_update.parameters.keys())
            if num_parameters:
                likeness = (num_parameters, *_likeness(update, known_update))
                # Of several that are equally alike, the lowest numbers come first.
                candidates.append((likeness, -shared_number, -number))
    shared_numbers: dict[int, int] = {}
    for _, negative_shared_number, negative_number in sorted(candidates, reverse=True):
        number = -negative_number
        shared_number = -negative_shared_number
        if number not in shared_numbers and shared_number not in shared_numbers.values():
            shared_numbers[number] = shared_number
    for number, update in first_updates.items():
        if number in shared_numbers:
            continue
        is_free = number in known and number not in shared_numbers.values()
        if is_free and _may_have_same_class(known[number], update):
            shared_numbers[number] = number
        else:
            shared_numbers[number] = max(known, default=-1) + 1
            known[shared_numbers[number]] = update
    return shared_numbers


def _may_have_same_class(first: RankUpdate, second: RankUpdate) -> bool:
    """Returns whether two optimizers have one class, as far as it is known.

    A rank without an optimizer, which is sent what others have updated, knows no class.
    """
    if not first.optimizer_class or not second.optimizer_class:
        return True
    return first.optimizer_class == second.optimizer_class


def _likeness(first: RankUpdate, second: RankUpdate) -> tuple[bool, bool, bool]:
    """Returns in what the first steps of two optimizers are alike, the most important first.

    Ranks that train together have the same parameters after a step. But a rank may have trained
    them before, by another optimizer of the same class.
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
    if first.shape != second.shape:
        return False
    return np.allclose(first, second, rtol=1e-6, equal_nan=True)


# Steps that only some ranks make


def _split_into_sections(steps: Sequence[Step], shared_optimizers: set[int]) -> list[list[Step]]:
    """Splits the steps of a rank before each step of a shared optimizer.

    The first section has the steps that came before all of those; it may be empty.
    """
    sections: list[list[Step]] = [[]]
    for step in steps:
        optimizer, _ = _key_of(step)
        if optimizer in shared_optimizers:
            sections.append([])
        sections[-1].append(step)
    return sections


def _line_up_steps_of_some_ranks(ranks: Sequence[list[Step]]) -> list[Update]:
    """Returns updates that only some ranks have made; the others have missed them.

    Args:
        ranks: the steps of each rank between two updates that all have made.
    """
    step_of_rank_by_key: dict[StepKey, dict[int, Step]] = defaultdict(dict)
    for rank, steps in enumerate(ranks):
        for step in steps:
            step_of_rank_by_key[_key_of(step)][rank] = step
    updates = []
    for step_of_rank in step_of_rank_by_key.values():
        first_step = next(iter(step_of_rank.values()))
        missed = [missed_by(first_step[0])]
        steps_of_all = [step_of_rank.get(rank, missed) for rank in range(len(ranks))]
        updates.append(Update(chain(*steps_of_all)))
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
        updates: of the ranks that trained.
        idle_ranks: the numbers of the ranks that did not.
    """
    new_updates = []
    for update in updates:
        ranks = list(update)
        # In ascending order, so that each one is inserted at its own number.
        for idle_rank in sorted(idle_ranks):
            ranks.insert(idle_rank, missed_by(update[0]))
        new_updates.append(Update(ranks))
    return new_updates


# Two updates after one backward pass


def _share_a_backward_pass(earlier: Update, later: Update) -> bool:
    """Returns whether some ranks made two updates after one backward pass.

    Args:
        earlier: an update that some ranks have missed.
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
    """Adds to the earlier of two such updates what the ranks that missed it began with.

    Losses are left out: those of two updates cannot be told apart if some ranks made only one.
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


def _without_inputs(update: Update) -> Update:
    """Leaves out of the later of two such updates what is compared with the earlier one."""
    return Update(replace(rank, losses=[], parameter_sums={}) for rank in update)


# Parameters before the first update


def _with_all_initial_parameters(updates: list[Update]) -> list[Update]:
    """Moves the parameters with which each rank began to the first update.

    A rank that makes its first step after others is recorded only then.
    """
    new_updates = []
    for number, update in enumerate(updates):
        ranks = []
        for rank_number, rank in enumerate(update):
            initial = _initial_parameters(updates, rank_number) if number == 0 else {}
            ranks.append(replace(rank, initial=initial))
        new_updates.append(Update(ranks))
    return new_updates


def _initial_parameters(updates: Sequence[Update], rank_number: int) -> dict[str, Array]:
    """Returns the parameters with which a rank began, as far as they are known.

    If other ranks have trained parameters before this rank is recorded, it may have been sent the
    new ones. Then the values with which the others began stand for its own. Models that the others
    did not know at their first step are left out.
    """
    initial_of_others = updates[0].merged("initial")
    trained_names: set[str] = set()
    for number, update in enumerate(updates):
        recorded = update[rank_number].initial
        if not recorded:  # the rank has not begun: only others have trained so far
            trained_names |= update.merged("parameters").keys()
            continue
        if number == 0:
            return dict(recorded)
        initial = {}
        for name, array in recorded.items():
            if name in initial_of_others:
                was_trained = name in trained_names
                initial[name] = initial_of_others[name] if was_trained else array
        return initial
    return {}
