"""What each sample went through on one process and on several: inputs, outputs, what the loss made.

Samples are known by their inputs, so batches need no loader. Pure, as `compare` is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.verify.tolerance import Array, largest
from lockstep.verify.training_record import Forward, RankUpdate, Update


@dataclass(frozen=True)
class Rows:
    """The same forward passes of the reference and of another training, sample by sample."""

    model: str
    one: Forward
    many: Forward
    ranks: Array
    """Of each sample of the other the rank."""
    pairs: Array
    """Of the samples that both have, their places in the one and in the other: two rows."""

    @property
    def missing(self) -> int:
        """Samples that only the reference has."""
        return len(self.one.inputs) - int(self.pairs.shape[1])

    @property
    def more(self) -> Array:
        """The places of those that only the other has."""
        return np.setdiff1d(np.arange(len(self.many.inputs)), self.pairs[1])

    def both(self, what: str) -> tuple[Array, Array] | None:
        """What the samples have that both have; None: it has no row for each of them."""
        one, many = getattr(self.one, what), getattr(self.many, what)
        if len(one) != len(self.one.inputs) or len(many) != len(self.many.inputs):
            return None
        return one[self.pairs[0]], many[self.pairs[1]]

    def differ(self, what: str) -> Array:
        """Of each sample that both have, whether it is something else; empty: it is not known."""
        both = self.both(what)
        if both is None:
            return np.zeros(0, dtype=bool)
        most = _SAME_ROW * max(map(largest, both))
        found: Array = np.abs(both[0] - both[1]).max(axis=1, initial=0.0) > most
        return found


def followed(updates: Sequence[Update], *others: Sequence[Update]) -> list[Update]:
    """Updates without inputs whose rows are no samples, as those of a list of graphs are nodes.

    Args:
        updates: of one training.
        others: of those with which it is compared; what fits on all ranks of all is followed.
    """
    forwards = [f for run in (updates, *others) for u in run for rank in u for f in rank.forwards]
    unfit = {_class_of(forward) for forward in forwards if not forward.rows_are_samples}
    return [Update(_without(rank, unfit) for rank in u) for u in updates] if unfit else [*updates]


def _class_of(forward: Forward) -> str:
    return forward.model.partition(",")[0]


def _without(rank: RankUpdate, unfit: Set[str]) -> RankUpdate:
    inputs = [replace(taken, contents=()) for taken in rank.model_inputs]
    taken = [replace(t, contents=()) if t.ids is None else t for t in rank.batches]
    taken = inputs if rank.batches == rank.model_inputs else taken
    kept = [forward for forward in rank.forwards if _class_of(forward) not in unfit]
    return replace(rank, forwards=kept, model_inputs=inputs, batches=taken)


def rows_of(one: Update, many: Update) -> list[Rows]:
    """The forward passes of an update, by sample; empty: they cannot be compared."""
    expected, found = tables(one), tables(many)
    if [*expected] != [*found] or any(expected[k][0].shape != found[k][0].shape for k in found):
        return []
    both = ((expected[key][0], *found[key]) for key in expected)
    return [Rows(a.model, a, b, ranks, _pairs(a, b)) for a, b, ranks in both]


def tables(update: Update) -> dict[str, tuple[Forward, Array]]:
    """By model, all samples in the order of ranks, and the rank of each."""
    found: dict[str, list[tuple[int, Forward]]] = defaultdict(list)
    for number, rank in enumerate(update):
        for forward in rank.forwards if rank.contributes else ():
            found[forward.model].append((number, forward))
    return {model: _joined(each) for model, each in found.items()}


def _joined(each: Sequence[tuple[int, Forward]]) -> tuple[Forward, Array]:
    kinds = ("inputs", "other_inputs", "outputs", "output_gradients", "targets", "input_values")
    arrays: dict[str, Any] = {k: np.zeros((0, 2)) for k in kinds}
    for kind in kinds:
        found = [getattr(forward, kind) for _, forward in each]
        if len({array.shape[1:] for array in found}) == 1:
            arrays[kind] = np.concatenate(found)
    first = each[0][1]
    shape = " or ".join(sorted({forward.shape for _, forward in each}))
    ranks = np.concatenate([np.full(len(forward.inputs), number) for number, forward in each])
    return Forward(model=first.model, shape=shape, **arrays), ranks


def near_rows(rows: Array, known: Array) -> Array:
    """Of each row, whether one of those known is the same."""
    most = _SAME_ROW * max(largest(rows), largest(known))
    found = [bool((np.abs(known - row) <= most).all(axis=1).any()) for row in rows]
    return np.array(found, dtype=bool)


_SAME_ROW = 1e-9
"""Of the largest number of all rows: as near are those of one sample."""


def _pairs(one: Forward, many: Forward) -> Array:
    """Each sample of one with the same one of the other, and of several with the nearest."""
    most = _SAME_ROW * max(largest(one.inputs), largest(many.inputs))
    order = np.argsort(many.inputs[:, 0], kind="stable")
    firsts = many.inputs[order, 0]
    free, found = np.ones(len(order), dtype=bool), []
    kinds = ("inputs", "other_inputs", "outputs", "targets")
    known = [k for k in kinds if len(getattr(one, k)) == len(one.inputs)]
    known = [k for k in known if len(getattr(many, k)) == len(many.inputs)]
    a, b = (np.concatenate([getattr(f, k) for k in known], axis=1) for f in (one, many))
    for place, (first, second) in enumerate(one.inputs):
        low, high = np.searchsorted(firsts, [first - most, first + most])
        near_by = [n for n in order[low:high] if abs(many.inputs[n, 1] - second) <= most]
        left = [n for n in near_by if free[n]]
        if left:
            nearest = min(left, key=lambda n: float(np.abs(b[n] - a[place]).max()))
            free[nearest] = False
            found.append((place, nearest))
    return np.array(found, dtype=int).reshape(-1, 2).T
