"""Aligns the optimizer steps of all ranks, so that steps that belong together form an `Update`.

A `Step` is the record of one rank of one optimizer step: a list of `RankUpdate`s, usually with one
element. Usually, the n-th steps of all ranks belong together. But some ranks may leave steps to
others, for example if a probe is trained on rank 0 and sent to the other ranks. These have *missed*
the step, and get a `RankUpdate` that says so. A *shared* optimizer is one that all ranks step with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lockstep.verify.names import num_ranks_of
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import RankUpdate, Update
from lockstep.wording import group_by_key

# The record of a rank of one step of one optimizer. It has one element, or one for each replica if
# the rank trains several replicas in turn.
Step = list[RankUpdate]

# The number of an optimizer, and the number of its step.
StepKey = tuple[int, int]


def group_by_step(updates: Sequence[RankUpdate]) -> list[Step]:
    """Groups the records of a rank by optimizer step, in order.

    Args:
        updates: records of the rank. The records of one step have the same optimizer and step
            number.
    """
    pairs = [(_step_key(update), update) for update in updates]
    return list(group_by_key(pairs).values())


def _step_key(update: RankUpdate) -> StepKey:
    """Returns the numbers of the optimizer and of its step, which all records of a step share."""
    number_of_step = update.step
    return update.optimizer, number_of_step


def line_up(ranks: Sequence[list[Step]]) -> list[Update]:
    """Returns the updates that the steps of all ranks form together.

    If all ranks step with the same optimizers, their n-th steps form an update. Otherwise, steps
    with an optimizer that only some ranks have become updates that the other ranks have missed.

    For example, let `A` be a step of an optimizer that all ranks have, and `b` a step that only
    rank 0 makes. Rank 0 with `A b A` and rank 1 with `A A` form three updates, of which rank 1 has
    missed the second.

    Args:
        ranks: steps of each rank.
    """
    # Usually, all ranks run the same lines, and so step with the same optimizers in the same order.
    if _have_same_optimizer_classes(ranks):
        return _line_up_in_order(ranks)

    # Each rank has numbered its optimizers by itself, so optimizer 0 of rank 0 may be optimizer 1
    # of rank 1. Afterwards, the same optimizer has the same number on all ranks.
    renumbered_ranks = _with_shared_numbers(ranks)
    optimizers_of_ranks = []
    for steps in renumbered_ranks:
        # All records of a step are of the same optimizer, so the first one tells its number.
        optimizers_of_ranks.append({step[0].optimizer for step in steps})

    shared_optimizers = set.intersection(*optimizers_of_ranks)
    all_are_shared = all(optimizers == shared_optimizers for optimizers in optimizers_of_ranks)

    # If all optimizers are shared, the n-th steps of all ranks belong together. If none is shared,
    # nothing tells which steps belong together, so the steps are lined up in order, too.
    if not shared_optimizers or all_are_shared:
        return _line_up_in_order(ranks)

    return _line_up_at_shared_steps(renumbered_ranks, shared_optimizers)


def _line_up_at_shared_steps(
    ranks: Sequence[list[Step]], shared_optimizers: set[int]
) -> list[Update]:
    """Returns the updates of ranks that do not all make every step.

    For example, let `A` be a step of a shared optimizer and `b` a step that only rank 0 makes. Rank
    0 with `b A b A` and rank 1 with `A A` form the updates `b`, `A`, `b` and `A`, of which rank 1
    has missed both `b`.

    Args:
        ranks: steps of each rank.
        shared_optimizers: numbers of the optimizers that all ranks step with.
    """
    # `b A b A` becomes the sections `[b]`, `[A b]` and `[A]`. The first section may be empty; each
    # later one begins with a step of a shared optimizer.
    sections_of_ranks = [_split_into_sections(steps, shared_optimizers) for steps in ranks]

    # The n-th sections of all ranks belong together. Those beyond the last section of some rank are
    # left out.
    first_sections, *later_sections = zip(*sections_of_ranks, strict=False)
    updates = _updates_missed_by_some_ranks(first_sections)
    for sections in later_sections:
        # Each section begins with a step that all ranks have made together.
        shared_steps = [section[0] for section in sections]
        _append_shared_update(updates, _join_steps(shared_steps))

        other_steps = [section[1:] for section in sections]
        updates += _updates_missed_by_some_ranks(other_steps)

    # The comparison expects the initial parameters of every rank in the first update, but a rank
    # that has missed this update has recorded them in a later one.
    return _with_initial_parameters_in_first(updates)


def _append_shared_update(updates: list[Update], shared_update: Update) -> None:
    """Appends an update that all ranks have made, and corrects the update before it if necessary.

    Some ranks may have made both updates after one backward pass, while the others have only made
    the shared one. For example, rank 0 calls `loss.backward()`, `own_optimizer.step()` and
    `optimizer.step()`, and rank 1 calls `loss.backward()` and `optimizer.step()`. Rank 0 has then
    recorded its batch with `own_optimizer.step()`, and rank 1 with `optimizer.step()`: its batch is
    moved to the update before.
    """
    if updates and _share_a_backward_pass(updates[-1], shared_update):
        updates[-1] = _with_inputs_of_missing_ranks(updates[-1], shared_update)
        shared_update = _without_losses_and_parameter_sums(shared_update)
    updates.append(shared_update)


def _line_up_in_order(ranks: Sequence[list[Step]]) -> list[Update]:
    """Returns one update for the n-th steps of all ranks, as far as all ranks have got."""
    updates = []
    for steps_of_ranks in zip(*ranks, strict=False):
        updates.append(_join_steps(steps_of_ranks))
    return updates


def _join_steps(steps_of_ranks: Sequence[Step]) -> Update:
    """Returns the update that consists of one step of each rank, with the records of all ranks."""
    records = []
    for rank, step in enumerate(steps_of_ranks):
        records += [replace(record, rank=rank) for record in step]
    return Update(records)


def _first_updates(steps: Sequence[Step]) -> dict[int, RankUpdate]:
    """Returns the record of the first step of each optimizer of a rank, by optimizer number."""
    first_updates: dict[int, RankUpdate] = {}
    for step in steps:
        update = step[0]  # records of further replicas have the same optimizer
        if update.optimizer not in first_updates:
            first_updates[update.optimizer] = update
    return first_updates


def _have_same_optimizer_classes(ranks: Sequence[list[Step]]) -> bool:
    """True if the optimizers with the same number have the same class on all ranks.

    Each rank numbers its optimizers in the order of their first steps.
    """
    classes_of_ranks = []
    for steps in ranks:
        classes = {}  # by the number of the optimizer
        first_update_of_optimizer = _first_updates(steps)
        for number, update in first_update_of_optimizer.items():
            classes[number] = update.optimizer_class
        classes_of_ranks.append(classes)

    return all(classes == classes_of_ranks[0] for classes in classes_of_ranks)


# One number for the optimizer of a model on all ranks


def _with_shared_numbers(ranks: Sequence[list[Step]]) -> list[list[Step]]:
    """Returns the steps of all ranks, in which the same optimizer has the same number on each rank.

    Each rank has numbered its optimizers in the order of their first steps, so the numbers differ
    between ranks that step with different optimizers. For example, rank 0 steps with Adam (0) and
    SGD (1), and rank 1 only with SGD (0), which gets the number 1.
    """
    # The first record of every optimizer of the ranks so far, by its shared number.
    known_optimizers: dict[int, RankUpdate] = {}
    renumbered_ranks = []
    for steps in ranks:
        shared_numbers = _match_optimizers(_first_updates(steps), known_optimizers)
        renumbered_steps = [_renumbered(step, shared_numbers) for step in steps]
        renumbered_ranks.append(renumbered_steps)
        known_optimizers = _first_updates(renumbered_steps) | known_optimizers

    return renumbered_ranks


def _renumbered(step: Step, shared_numbers: Mapping[int, int]) -> Step:
    """Returns a step of a rank with the shared number of its optimizer.

    Args:
        step: the step.
        shared_numbers: shared number of each optimizer, by the number that the rank gave it.
    """
    return [replace(update, optimizer=shared_numbers[update.optimizer]) for update in step]


def _match_optimizers(
    first_updates: Mapping[int, RankUpdate], known_optimizers: Mapping[int, RankUpdate]
) -> dict[int, int]:
    """Finds the shared number of each optimizer of a rank, by the number that the rank gave it.

    Optimizers of two ranks are the same if they have parameters in common. Each rank may also have
    an optimizer for another part of the parameters, as with pipeline stages: without parameters in
    common, optimizers are the same if they have the same number and class. All other optimizers get
    new numbers.

    For example, rank 0 has numbered its optimizers 0 (Adam for "Net") and 1 (SGD for "Probe"). The
    result for rank 1 depends on its only optimizer, which it has numbered 0:

        SGD for "Probe"   ->  {0: 1}, as optimizer 1 has the same parameters
        Adam for "Head"   ->  {0: 0}, as optimizer 0 has other parameters, but is an Adam too
        SGD for "Head"    ->  {0: 2}, as no optimizer has its parameters, and optimizer 0 is no SGD

    Args:
        first_updates: first record of each optimizer of the rank, by the rank's own number.
        known_optimizers: first record of each optimizer of the previous ranks, by shared number.
    """
    shared_numbers = _match_by_parameters(first_updates, known_optimizers)
    next_new_number = max(known_optimizers, default=-1) + 1

    for own_number, update in first_updates.items():
        if own_number in shared_numbers:
            continue

        is_taken = own_number in shared_numbers.values()  # by another optimizer of this rank
        if not is_taken and _is_known(own_number, update, known_optimizers):
            shared_numbers[own_number] = own_number
        else:
            shared_numbers[own_number] = next_new_number
            next_new_number += 1

    return shared_numbers


def _is_known(number: int, update: RankUpdate, known_optimizers: Mapping[int, RankUpdate]) -> bool:
    """True if a known optimizer has the same number and class as the optimizer of an update."""
    known_update = known_optimizers.get(number)
    return known_update is not None and _may_have_same_class(known_update, update)


def _match_by_parameters(
    first_updates: Mapping[int, RankUpdate], known_optimizers: Mapping[int, RankUpdate]
) -> dict[int, int]:
    """Finds the shared numbers of optimizers that have parameters in common with known ones.

    If several known optimizers have parameters in common, the most similar one is chosen: first of
    all, the one with the most common parameters (see `_Similarity`).

    Args:
        first_updates: first record of each optimizer of the rank, by the rank's own number.
        known_optimizers: first record of each optimizer of the previous ranks, by shared number.

    Returns:
        The shared numbers, by the rank's own numbers.
    """
    pairs: list[_SimilarPair] = []
    for shared_number, known_update in sorted(known_optimizers.items()):
        for own_number, update in sorted(first_updates.items()):
            similarity = _similarity(update, known_update)
            if similarity.num_common_parameters:
                pairs.append(_SimilarPair(similarity, shared_number, own_number))

    # The most similar pairs come first; equally similar ones stay in the order of their numbers.
    pairs.sort(key=lambda pair: pair.similarity, reverse=True)

    # Each optimizer is matched only once, in its most similar pair.
    shared_numbers: dict[int, int] = {}
    for _, shared_number, own_number in pairs:
        if own_number not in shared_numbers and shared_number not in shared_numbers.values():
            shared_numbers[own_number] = shared_number

    return shared_numbers


class _SimilarPair(NamedTuple):
    """A known optimizer, and an optimizer of the rank that has parameters in common with it."""

    similarity: _Similarity
    shared_number: int
    own_number: int


class _Similarity(NamedTuple):
    """How similar the first steps of two optimizers are.

    Compared like any tuple: the first field that is unequal decides which pair is more similar.
    """

    num_common_parameters: int
    same_class: bool
    same_parameters: bool
    same_options: bool


def _may_have_same_class(first: RankUpdate, second: RankUpdate) -> bool:
    """True if two optimizers have the same class, or if the class of one of them is not known.

    The class is not known on a rank without an optimizer, which receives its parameters from
    others.
    """
    if not first.optimizer_class or not second.optimizer_class:
        return True
    return first.optimizer_class == second.optimizer_class


def _similarity(first: RankUpdate, second: RankUpdate) -> _Similarity:
    """Returns how similar the first steps of two optimizers are.

    Common names of parameters alone do not tell which optimizers belong together: a rank may train
    a model with one optimizer first, to pretrain it, and then with another one of the same class.
    So the values after the step are compared too. They are the same on ranks that train together.
    """
    common_names = first.parameters.keys() & second.parameters.keys()
    same_parameters = True
    for name in common_names:
        if not _are_close(first.parameters[name], second.parameters[name]):
            same_parameters = False

    same_rates = list(first.learning_rates) == list(second.learning_rates)
    return _Similarity(
        num_common_parameters=len(common_names),
        same_class=first.optimizer_class == second.optimizer_class,
        same_parameters=same_parameters,
        same_options=same_rates and first.group_options == second.group_options,
    )


def _are_close(first: Array, second: Array) -> bool:
    """True if two arrays are equal within the rounding of float32."""
    if first.shape != second.shape:  # numpy would broadcast the arrays
        return False
    return np.allclose(first, second, rtol=1e-6, equal_nan=True)


# Steps that only some ranks make


def _split_into_sections(steps: Sequence[Step], shared_optimizers: set[int]) -> list[list[Step]]:
    """Splits the steps of a rank before each step of a shared optimizer.

    If `A` is a step of a shared optimizer, `b A b b A` becomes `[b]`, `[A b b]`, `[A]`. If the
    steps begin with `A`, the first section is empty.
    """
    sections: list[list[Step]] = [[]]
    for step in steps:
        if step[0].optimizer in shared_optimizers:
            sections.append([])
        sections[-1].append(step)
    return sections


def _updates_missed_by_some_ranks(ranks: Sequence[Sequence[Step]]) -> list[Update]:
    """Returns updates that only some ranks have made, and that the others have missed.

    For example, rank 0 has made step 3 of optimizer 1, and rank 1 has made no step. The result is
    one update, which rank 1 has missed.

    Args:
        ranks: steps of each rank between two updates that all ranks have made.
    """
    # The steps of one update, by rank, no matter which ranks have made it.
    update_by_key: dict[StepKey, dict[int, Step]] = defaultdict(dict)
    for rank, steps in enumerate(ranks):
        for step in steps:
            key = _step_key(step[0])  # all records of a step have the same key
            update_by_key[key][rank] = step

    updates = []
    for step_of_rank in update_by_key.values():
        step_of_some_rank = next(iter(step_of_rank.values()))
        missed_step = [missed_by(step_of_some_rank[0])]
        steps_of_all_ranks = [step_of_rank.get(rank, missed_step) for rank in range(len(ranks))]
        updates.append(_join_steps(steps_of_all_ranks))

    return updates


def missed_by(update: RankUpdate) -> RankUpdate:
    """Returns the record for a rank that has missed a step that another rank has made.

    Args:
        update: record of the rank that has made the step.
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
    """Returns the updates with records for ranks that have missed all of them.

    Args:
        updates: updates of the ranks that have trained.
        idle_ranks: numbers of the ranks that have recorded nothing. The ranks in `updates` are
            numbered without them.
    """
    if not updates:
        return []

    num_active_ranks = num_ranks_of(updates)
    num_ranks = num_active_ranks + len(idle_ranks)
    active_ranks = [rank for rank in range(num_ranks) if rank not in idle_ranks]

    new_updates = []
    for update in updates:
        some_record = update[0]  # all records have the same optimizer and number of the step
        records = [replace(missed_by(some_record), rank=rank) for rank in idle_ranks]
        records += [replace(record, rank=active_ranks[record.rank]) for record in update]
        records.sort(key=lambda record: record.rank)  # replicas of one rank stay in their order
        new_updates.append(Update(records))

    return new_updates


# Two updates after one backward pass


def _share_a_backward_pass(earlier: Update, later: Update) -> bool:
    """True if some ranks made two updates after one backward pass, and other ranks only the later.

    This shows in a rank that has recorded the same losses with both updates, while another rank has
    missed the earlier one. For example, rank 0 calls `loss.backward()`, `own_optimizer.step()` and
    `optimizer.step()`, and rank 1 calls `loss.backward()` and `optimizer.step()`.

    Args:
        earlier: an update that some ranks may have missed.
        later: the next update, which all ranks have made.
    """
    nobody_missed_the_earlier = all(record.stepped for record in earlier)
    if nobody_missed_the_earlier:
        return False

    # If a rank trains several replicas, an update has a record for each of them. If the numbers of
    # records differ, it is not known which of them belong together.
    if len(earlier) != len(later):
        return False

    for before, after in zip(earlier, later, strict=True):
        if not before.stepped:
            continue

        # Since the two steps of this rank have no backward pass in between, the record of the later
        # step repeats the losses of the earlier one.
        repeats_losses = bool(before.losses) and before.losses == after.losses
        if repeats_losses:
            return True

    return False


def _with_inputs_of_missing_ranks(earlier: Update, later: Update) -> Update:
    """Returns the earlier of two updates, with the inputs of ranks that have missed it.

    For example, these are the calls of two ranks, and in brackets the batch that was recorded with
    each step. The result is the earlier update, with batch 1 for rank 1 too:

        rank 0: loss.backward(), own_optimizer.step() [batch 0], optimizer.step() []
        rank 1: loss.backward(),                                 optimizer.step() [batch 1]

    Losses are removed on all ranks, since it is not known which of the two steps they belong to.

    Args:
        earlier: step of `own_optimizer`, which some ranks have missed.
        later: step of `optimizer`, which all ranks have made.
    """
    records = []
    for before, after in zip(earlier, later, strict=True):
        with_inputs = before if before.stepped else _with_inputs_of(after, before)
        records.append(replace(with_inputs, losses=[]))
    return Update(records)


def _with_inputs_of(next_update: RankUpdate, missed_update: RankUpdate) -> RankUpdate:
    """Returns the record of a missed update, with inputs that the rank has recorded at its next.

    These are the batches, whether they count (`contributes`), and the sums over the parameters with
    which the rank has computed the losses of these batches.

    Args:
        next_update: the rank's record of its next update, which it has made.
        missed_update: the rank's record of the update that it has missed.
    """
    return replace(
        missed_update,
        batches=next_update.batches,
        model_inputs=next_update.model_inputs,
        contributes=next_update.contributes,
        parameter_sums=next_update.parameter_sums,
    )


def _without_losses_and_parameter_sums(update: Update) -> Update:
    """Returns the later of two updates after one backward pass, without losses and parameter sums.

    The losses may belong to the earlier update. The sums over the parameters before the update were
    moved to the earlier one, for ranks that missed it.
    """
    return Update(replace(record, losses=[], parameter_sums={}) for record in update)


# Parameters before the first update


def _with_initial_parameters_in_first(updates: list[Update]) -> list[Update]:
    """Returns the updates, with the initial parameters of every rank moved to the first update.

    A rank records its initial parameters with its own first step, which is in a later update if the
    rank has missed the first one.
    """
    new_updates = []
    for update_index, update in enumerate(updates):
        is_first = update_index == 0
        records = []
        for rank, record in enumerate(update):
            if is_first:
                initial = _initial_parameters(updates, rank)
            else:
                initial = {}
            records.append(replace(record, initial=initial))
        new_updates.append(Update(records))

    return new_updates


def _initial_parameters(updates: Sequence[Update], rank: int) -> dict[str, Array]:
    """Returns the parameters of a rank before update 0, by name; empty if the rank recorded none.

    A rank records its parameters once, before its own first step, when other ranks may have trained
    some of them already. For example, rank 1 makes its first step in update 2:

    - "Net/a" was trained by rank 0 in update 0. Its initial value is what rank 0 has recorded.
    - "Net/b" was trained by nobody. Its initial value is what rank 1 has recorded.
    - "Net/c" did not exist in update 0. It is left out, as the reference has not recorded it.
    """
    # The indices of the updates at which the rank has recorded its parameters: one, or none.
    update_indices = [index for index, update in enumerate(updates) if update[rank].initial]
    if not update_indices:
        return {}

    update_index = update_indices[0]
    recorded_by_rank = updates[update_index][rank].initial
    if update_index == 0:  # nothing was trained yet
        return dict(recorded_by_rank)

    trained_before: set[str] = set()  # names of parameters that other ranks have trained
    for update in updates[:update_index]:
        trained_before |= update.merged("parameters").keys()

    recorded_in_first_update = updates[0].merged("initial")  # by the ranks that made it
    initial: dict[str, Array] = {}
    for name, array in recorded_by_rank.items():
        existed_in_first_update = name in recorded_in_first_update
        if not existed_in_first_update:
            continue
        if name in trained_before:
            initial[name] = recorded_in_first_update[name]
        else:
            initial[name] = array

    return initial
