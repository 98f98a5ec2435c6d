"""Tensors that ranks hold in parts, and trainings whose updates are right all the same.

Ranks may rightly hold different tensors: slices of a flat buffer for an optimizer of each rank's
own, parts of a layer (tensor parallelism), stages, experts. Where the parts of all ranks together
are the tensor of one process, they are joined and compared as one. Where they are not, nothing is
known of them, and that is what is said. Pure, as `compare` is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.verify.cause import format_items, script_names
from lockstep.verify.compare import tensor_differences
from lockstep.verify.tolerance import FLOAT64, Array, Tolerance, scale_of
from lockstep.verify.training_record import LARGEST, SIZE, RankUpdate, Update

_WHOLE = (
    "initial",
    "gradients",
    "reduced_in_step",
    "unclipped",
    "parameters",
    "rewritten_parameters",
)
"""Where tensors are recorded as they are, so that parts of them can be joined."""
_SUMS = ("parameter_sums", "changed_between_passes", "optimizer_state")
"""Where sums over tensors are recorded, which those of parts do not give."""
_LOOSE = "/"
"""How the names of parameters begin that an optimizer has and no model."""
_MOVES = {"send", "recv", "isend", "irecv", "all_to_all", "all_to_all_single"}
"""Calls by which ranks hand on what they have computed."""


def is_loose(name: str) -> bool:
    """Whether a parameter is an optimizer's alone."""
    return name.startswith(_LOOSE)


@dataclass(frozen=True)
class Joined:
    """A training whose tensors are whole again."""

    reference: list[Update]
    other: list[Update]
    parts: tuple[str, ...] = ()
    """Names of tensors of models that were joined from the parts of ranks."""
    unknown: str = ""
    """In words, what ranks hold of which nothing is known; empty: there is nothing."""


def joined(reference: Sequence[Update], other: Sequence[Update]) -> Joined:
    """Both trainings, with what ranks hold in parts joined to what one process has."""
    whole = Joined([*reference], [*other])
    if not reference or not other or len(other[0]) < 2:
        return whole
    expected = reference[0].merged("initial")
    joins: dict[str, Callable[[Sequence[Array]], Array]] = {}
    unknown: list[str] = []
    for name in other[0].merged("initial"):
        parts = [rank.initial.get(name) for rank in other[0]]
        arrays = [part for part in parts if part is not None]
        same = all(np.array_equal(array, arrays[0]) for array in arrays)
        missing = len(arrays) < len(parts) or name not in expected
        if missing or (same and expected[name].shape == arrays[0].shape):
            continue
        join = _way_to_join(arrays, expected.get(name))
        if join is not None:
            joins[name] = join
        elif _are_parts(name, arrays, expected[name]) or _stay_apart(name, other):
            unknown.append(name)
    if not joins and not unknown:
        return whole
    loose = [name for name in unknown if is_loose(name)]
    of_models = [name for name in unknown if not is_loose(name)]
    of_parts = tuple(name for name in joins if not is_loose(name))
    updates = [_with_joined(update, joins, {*loose}) for update in other]
    if of_parts:
        updates = [_without_copies(update) for update in updates]
    one = [_with_joined(update, dict.fromkeys(joins, _first), {*loose}) for update in reference]
    text = ""
    if of_models:
        shapes = [rank.initial[of_models[0]].shape for rank in other[0]]
        kinds = {*shapes, expected[of_models[0]].shape}
        how = "of other shapes than one process" if len(kinds) > 1 else "with other values"
        text = f"the ranks hold different tensors, {how}: {format_items(script_names(of_models))}"
    return Joined(one, updates, of_parts, text)


def _first(arrays: Sequence[Array]) -> Array:
    return arrays[0]


def _way_to_join(
    parts: Sequence[Array], whole: Array | None
) -> Callable[[Sequence[Array]], Array] | None:
    """How the parts of the ranks make what one process has; None: they do not.

    They lie one behind the other in some dimension. A flat buffer may end with zeros that make it
    divisible by the number of ranks.
    """
    if whole is None or any(part.ndim != whole.ndim for part in parts):
        return None
    for dimension in range(whole.ndim):
        others = [np.delete(part.shape, dimension).tolist() for part in parts]
        if any(other != np.delete(whole.shape, dimension).tolist() for other in others):
            continue

        def join(arrays: Sequence[Array], dimension: int = dimension) -> Array:
            every = np.concatenate(arrays, axis=dimension)
            wanted: Array = every.take(range(whole.shape[dimension]), axis=dimension)
            return wanted

        total = sum(part.shape[dimension] for part in parts)
        if total < whole.shape[dimension]:
            continue
        rest = total - whole.shape[dimension]
        padded = whole.ndim == 1 and rest < len(parts)
        if (rest == 0 or padded) and np.array_equal(join(parts), whole):
            return join
    return None


def _are_parts(name: str, arrays: Sequence[Array], whole: Array) -> bool:
    """Whether the shapes alone say that these are not copies of what one process has."""
    shapes = {array.shape for array in arrays}
    return len(shapes) > 1 or is_loose(name) or whole.shape not in shapes


def _stay_apart(name: str, other: Sequence[Update]) -> bool:
    """Whether ranks keep values of their own in a tensor, and hand on what they compute with it.

    As stages of a pipeline, experts, and parts of a layer do. Copies that began with other values
    are told from them by gradients that are averaged, in DDP, by a collective, or before the step,
    and by ranks that hand on nothing.
    """
    calls = [call for update in other for call in update.calls]
    averaged = any(call.gradient_of == name for call in calls)
    if averaged or not all(name in rank.unwrapped for rank in other[0]):
        return False
    for update in other:
        used = [rank.gradients[name] for rank in update if name in rank.gradients]
        if len(used) == len(update) and all(np.array_equal(used[0], each) for each in used):
            return False
    return any(_hands_on(update) for update in other)


def _hands_on(update: Update) -> bool:
    """Whether ranks exchanged what a loss is made of, before the backward pass.

    What is only shown, such as the losses of all ranks, is gathered too, but no loss is made of it.
    """
    passes = update.backward_passes
    before = [call for call in update.calls if call.passes_before < passes and not call.gradient_of]
    gathered = bool(update.first("gather_line") or update.first("detached_gather_line"))
    return gathered or any(call.name in _MOVES or call.in_function for call in before)


def _with_joined(
    update: Update,
    joins: Mapping[str, Callable[[Sequence[Array]], Array]],
    dropped: Iterable[str],
) -> Update:
    """The update with the tensors of these names joined, and without those that are dropped."""
    away = {*dropped}
    values: dict[str, dict[str, Array]] = {}
    for what in _WHOLE:
        values[what] = {}
        for name, join in joins.items():
            arrays = [getattr(rank, what)[name] for rank in update if name in getattr(rank, what)]
            if len(arrays) == len(update):
                values[what][name] = join(arrays)
    return Update(_replaced(rank, values, {*joins}, away) for rank in update)


def _replaced(
    rank: RankUpdate, values: Mapping[str, Mapping[str, Array]], names: set[str], away: set[str]
) -> RankUpdate:
    gone = names | away
    new: dict[str, Any] = {}
    for what in _WHOLE:
        kept = {n: a for n, a in getattr(rank, what).items() if n not in gone}
        own = {n: values[what][n] for n in getattr(rank, what) if n in values[what]}
        new[what] = {**kept, **own}
    for what in _SUMS:
        sums = getattr(rank, what)
        new[what] = {n: sums[n] for n in sums if not {n, n.rpartition("/")[0]} & gone}
    new["local_gradients"] = [
        {n: part[n] for n in part if n not in gone} for part in rank.local_gradients
    ]
    return replace(rank, **new)


def _without_copies(update: Update) -> Update:
    """Ranks that hold parts of one model are given the same samples, which count once."""
    first = [taken.contents for taken in update[0].batches]
    same = all([taken.contents for taken in rank.batches] == first for rank in update)
    if not same:
        return update
    return Update([update[0], *(replace(rank, contributes=False) for rank in update[1:])])


# Updates that are right all the same

Finals = Sequence[Mapping[str, Array]]


def outcomes_agree(
    reference: Sequence[Update],
    other: Sequence[Update],
    finals: tuple[Finals, Finals],
    tolerance: Tolerance,
) -> bool:
    """Whether every update has left the models, on every rank, as it left them on one process.

    What counts are the parameters that the next forward pass begins with, and what the optimizer
    keeps, as far as both have it by the same name.

    Args:
        reference: on one process.
        other: on several.
        finals: of both, sums over the parameters that each rank would have gone on with.
        tolerance: what counts as equal.
    """
    count = min(len(reference), len(other))
    if not count or len(reference) != len(other):
        return False
    both = list(zip(reference, other, strict=True))
    states = [(one[0].parameter_sums, [rank.parameter_sums for rank in many]) for one, many in both]
    states.append((finals[0][0] if finals[0] else {}, [*finals[1]]))
    known = 0
    for held, ranks in states[1:]:
        expected = _of_models(held)
        for found in map(_of_models, ranks):
            if not found:  # it had joined
                continue
            if expected.keys() != found.keys() or _differ(expected, found, tolerance):
                return False
            known += 1
    if not all(_keep_the_same(one, many, tolerance) for one, many in both):
        return False
    return known > 0 and _moves(states)


def _keep_the_same(one: Update, many: Update, tolerance: Tolerance) -> bool:
    """Whether optimizers keep what that of one process keeps, as far as it can be compared.

    Of slices the largest value of all is compared, for which their sums do not tell.
    """
    for name, sums in one[0].optimizer_state.items():
        ranks = [rank.optimizer_state[name] for rank in many if name in rank.optimizer_state]
        whole = [own for own in ranks if own[SIZE] == sums[SIZE]]
        if any(tolerance.differ(sums, own, 0.0) for own in whole):
            return False
        covers = sum(own[SIZE] for own in ranks) == sums[SIZE]
        if covers and tolerance.differ(sums[LARGEST], max(own[LARGEST] for own in ranks), 0.0):
            return False
    return True


def _of_models(held: Mapping[str, Array]) -> dict[str, Array]:
    return {name: sums for name, sums in held.items() if not is_loose(name)}


def _differ(one: Mapping[str, Array], other: Mapping[str, Array], tolerance: Tolerance) -> bool:
    scale = scale_of(one)
    return any(tolerance.differ(one[name], other[name], scale) for name in one)


def _moves(states: Sequence[tuple[Mapping[str, Array], Any]]) -> bool:
    """Whether the parameters are trained at all: those that never change agree in any case."""
    first, last = states[0][0], states[-1][0] or states[-2][0]
    return any(name in last and not np.array_equal(last[name], first[name]) for name in first)


def are_of_ranks(other: Sequence[Update]) -> bool:
    """Whether what optimizers were given is each rank's own, so that it is not what they used."""
    for update in other:
        if not all(rank.stepped for rank in update):
            return True
        if update.ranks_that_differ("gradients", FLOAT64):
            return True
        names = [rank.gradients.keys() for rank in update]
        if any(each != names[0] for each in names):
            return True
        if update.ranks_that_differ("parameters", FLOAT64):
            return True
        if any(is_loose(name) for each in names for name in each):
            return True
    return False


def without_steps(updates: Sequence[Update]) -> list[Update]:
    """The training without what optimizers were given, and what ranks held right after a step."""
    return [
        Update(
            replace(
                rank,
                gradients={},
                unclipped={},
                reduced_in_step={},
                parameters={},
                losses=rank.losses,
                initial=_of_models(rank.initial),
                parameter_sums=_of_models(rank.parameter_sums),
            )
            for rank in update
        )
        for update in updates
    ]


def differs_in_steps(
    reference: Sequence[Update], other: Sequence[Update], tolerance: Tolerance
) -> bool:
    """Whether gradients or parameters of some step are not those of one process."""
    both = zip(reference, other, strict=False)
    return any(
        any(tensor_differences(what, one, many, tolerance))
        for one, many in both
        for what in ("initial", "gradients", "parameters")
    ) or any(many.replicas_that_differ() for many in other)
