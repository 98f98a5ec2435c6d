"""The steps of all ranks, put together to updates: which step of a rank is which of another one.

Ranks may leave the steps of an optimizer to others, as where a probe is trained on rank 0 alone and
sent to the others. Pure, as `compare` is.
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

Step = list[RankUpdate]
"""What a rank has recorded of one step of one optimizer. Of replicas that take turns, each has an
update."""
OptimizerStep = tuple[int, int]
"""The number of an optimizer, and of its step."""


def steps_of(updates: Sequence[RankUpdate]) -> list[Step]:
    """The updates of a rank by optimizer and step."""
    return [*group_by_key(((each.optimizer, each.step), each) for each in updates).values()]


def lined_up(ranks: Sequence[list[Step]]) -> list[Update]:
    """The updates of all ranks.

    Where all ranks step with the same optimizers, one step of each makes an update. Where a rank
    never steps with some optimizer, the steps of this optimizer come after the step of a common
    optimizer that they followed, and the rank counts as one that has not stepped.
    """
    if _step_alike(ranks):
        return _in_order(ranks)
    numbered = _with_common_numbers(ranks)
    present = [{_key(step)[0] for step in steps} for steps in numbered]
    common = set.intersection(*present)
    if not common or all(each == common for each in present):
        return _in_order(ranks)
    parts = [_split(steps, common) for steps in numbered]
    count = min(map(len, parts))
    updates: list[Update] = []
    for number in range(count):
        of_ranks = [part[number] for part in parts]
        if number:  # nothing comes before the first common step but steps of some ranks
            together = Update(chain(*(steps[0] for steps in of_ranks)))
            if updates and _share_a_backward_pass(updates[-1], together):
                updates[-1] = _with_the_pass_of(updates[-1], together)
                together = _without_the_pass(together)
            updates.append(together)
            of_ranks = [steps[1:] for steps in of_ranks]
        updates += _of_some_ranks(of_ranks)
    return _begun_by_all(updates)


def _in_order(ranks: Sequence[list[Step]]) -> list[Update]:
    return [Update(chain(*steps)) for steps in zip(*ranks, strict=False)]


def _key(step: Step) -> OptimizerStep:
    return step[0].optimizer, step[0].step


def _optimizers(steps: Sequence[Step]) -> dict[int, RankUpdate]:
    """The first update of each optimizer of a rank, by its number."""
    found: dict[int, RankUpdate] = {}
    for step in steps:
        found.setdefault(step[0].optimizer, step[0])
    return found


def _step_alike(ranks: Sequence[list[Step]]) -> bool:
    """Whether all ranks step with optimizers of the same classes."""
    kinds = []
    for steps in ranks:
        kinds.append(
            {number: update.optimizer_class for number, update in _optimizers(steps).items()}
        )
    return all(each == kinds[0] for each in kinds)


def _with_common_numbers(ranks: Sequence[list[Step]]) -> list[list[Step]]:
    """The steps of all ranks, with one number for what is one optimizer on several ranks."""
    known: dict[int, RankUpdate] = {}
    numbered = []
    for steps in ranks:
        numbers = _matched(_optimizers(steps), known)
        of_rank = []
        for step in steps:
            of_rank.append([replace(each, optimizer=numbers[each.optimizer]) for each in step])
        numbered.append(of_rank)
    return numbered


def _matched(own: dict[int, RankUpdate], known: dict[int, RankUpdate]) -> dict[int, int]:
    """The common numbers of a rank's optimizers, by their own; new ones are added to `known`.

    Optimizers are the same if they hold the same parameters; of several, the one most alike is.
    Those that hold a part each have the same number and class.
    """
    candidates = []
    for number, update in own.items():
        for other, of_others in known.items():
            shared = len(update.parameters.keys() & of_others.parameters.keys())
            if shared:
                # Of several that are equally alike, the first.
                likeness = (shared, *_likeness(update, of_others), -other, -number)
                candidates.append((likeness, number, other))
    numbers: dict[int, int] = {}
    for _, number, other in sorted(candidates, reverse=True):
        if number not in numbers and other not in numbers.values():
            numbers[number] = other
    for number, update in own.items():
        if number in numbers:
            continue
        free = number in known and number not in numbers.values()
        # A rank that has no optimizer, and is sent what others have updated, knows no class.
        if free and (
            known[number].optimizer_class == update.optimizer_class
            or "" in (known[number].optimizer_class, update.optimizer_class)
        ):
            numbers[number] = number
        else:
            numbers[number] = max(known, default=-1) + 1
            known[numbers[number]] = update
    return numbers


def _likeness(one: RankUpdate, other: RankUpdate) -> tuple[bool, bool, bool]:
    """How much the first steps of two optimizers are alike: the more important first.

    Ranks that train together have the same parameters after a step. A rank may have trained them
    before, by another optimizer of the same class.
    """
    names = one.parameters.keys() & other.parameters.keys()
    left_the_same = all(
        one.parameters[name].shape == other.parameters[name].shape
        and np.allclose(one.parameters[name], other.parameters[name], rtol=1e-6, equal_nan=True)
        for name in names
    )
    of_same_options = (
        list(one.learning_rates) == list(other.learning_rates)
        and one.group_options == other.group_options
    )
    return one.optimizer_class == other.optimizer_class, left_the_same, of_same_options


def _split(steps: Sequence[Step], common: set[int]) -> list[list[Step]]:
    """The steps of a rank, in parts that begin with the steps of common optimizers."""
    parts: list[list[Step]] = [[]]
    for step in steps:
        if _key(step)[0] in common:
            parts.append([])
        parts[-1].append(step)
    return parts


def _of_some_ranks(ranks: Sequence[list[Step]]) -> list[Update]:
    """Updates that only some ranks have made, between two that all have made."""
    stepped: dict[OptimizerStep, dict[int, Step]] = defaultdict(dict)
    for rank, steps in enumerate(ranks):
        for step in steps:
            stepped[_key(step)][rank] = step
    updates = []
    for made in stepped.values():
        missed = missed_by(next(iter(made.values()))[0])
        of_ranks = [made.get(rank, [missed]) for rank in range(len(ranks))]
        updates.append(Update(chain(*of_ranks)))
    return updates


def missed_by(update: RankUpdate) -> RankUpdate:
    """What is recorded of a rank that has not made the step that another one has made."""
    return RankUpdate(
        optimizer=update.optimizer,
        optimizer_class=update.optimizer_class,
        step=update.step,
        stepped=False,
        dtype=update.dtype,
        contributes=False,
    )


def with_idle_ranks(updates: Sequence[Update], idle: Collection[int]) -> list[Update]:
    """Updates of the ranks that trained, with the ranks that took no part in any of them.

    Args:
        updates: without those ranks.
        idle: their numbers.
    """
    found = []
    for update in updates:
        ranks = [*update]
        for rank in sorted(idle):
            ranks.insert(rank, missed_by(update[0]))
        found.append(Update(ranks))
    return found


def _share_a_backward_pass(some: Update, together: Update) -> bool:
    """Whether ranks have made two updates by one backward pass, of which others made the second."""
    missed = [rank for rank, update in enumerate(some) if not update.stepped]
    if not missed or len(some) != len(together):
        return False
    return any(
        bool(before.losses) and before.losses == after.losses
        for before, after in zip(some, together, strict=True)
        if before.stepped
    )


def _with_the_pass_of(some: Update, together: Update) -> Update:
    """The first of two such updates, with what ranks began with that have not made it.

    Without losses: those of two updates cannot be told apart where some ranks have made only one.
    """
    ranks = []
    for before, after in zip(some, together, strict=True):
        if not before.stepped:
            before = replace(
                before,
                batches=after.batches,
                model_inputs=after.model_inputs,
                contributes=after.contributes,
                parameter_sums=after.parameter_sums,
            )
        ranks.append(replace(before, losses=[]))
    return Update(ranks)


def _without_the_pass(update: Update) -> Update:
    """The second of two such updates; what it began with is told of the first."""
    return Update(replace(rank, losses=[], parameter_sums={}) for rank in update)


def _begun_by_all(updates: list[Update]) -> list[Update]:
    """The updates, the first of which has the first parameters of all ranks.

    A rank that makes its first step after others is recorded only then. What an optimizer of others
    has trained before may have been sent to it: with what it began is not known, and the values of
    the others stand for it. Models that only it knows by then are not among the first parameters.
    """
    found = []
    for number, update in enumerate(updates):
        ranks = []
        for place, rank in enumerate(update):
            values = _first_parameters(updates, place) if number == 0 else {}
            ranks.append(replace(rank, initial=values))
        found.append(Update(ranks))
    return found


def _first_parameters(updates: Sequence[Update], place: int) -> dict[str, Array]:
    of_others = updates[0].merged("initial")
    trained: set[str] = set()
    for update in updates:
        if update[place].initial:
            values = {}
            for name, array in update[place].initial.items():
                if update is updates[0]:
                    values[name] = array
                elif name in of_others:
                    values[name] = of_others[name] if name in trained else array
            return values
        trained |= update.merged("parameters").keys()
    return {}
