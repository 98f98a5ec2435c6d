"""The names of a training's tensors, as another training of the same script has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import RankUpdate, Update

_BY_NAME = (
    *("initial", "parameter_sums", "gradients", "unclipped", "parameters", "buffers"),
    *(
        "module_tensors",
        "module_tensors_before",
        "optimizer_state",
        "rewritten_parameters",
        "changed_between_passes",
        "write_stacks",
    ),
)
_FIRST = ("buffers", "parameters", "initial")
_NAMES = ("unwrapped", "unknown_to_ddp", "frozen", "in_eval_mode", "optimizer_parameters")


def aligned(reference: Sequence[Update], other: Sequence[Update]) -> list[Update]:
    """`other` with the reference's names for the same tensors.

    A wrapper, as a library's, may put something before them, or be met before what is inside. The
    end of the name and the shape tell, and where several fit, the values and the order. Models of
    one class, as a model and its copy, may have been met in another order; their first values and
    what of them is frozen tell.
    """
    if roots := _other_order(reference, other):
        other = [Update(renamed(r, lambda n: _in_root(n, roots)) for r in u) for u in other]
    expected, found = (
        {n: a for u in run[::-1] for what in _FIRST for n, a in u.merged(what).items()}
        for run in (reference, other)
    )
    free = {name: array for name, array in expected.items() if name not in found}
    names: dict[str, str] = {}
    for name, array in found.items() if free else ():
        fits = [n for n, own in free.items() if own.shape == array.shape and _same_end(n, name)]
        if fits and name not in expected:
            names[name] = next((n for n in fits if np.array_equal(free[n], array)), fits[0])
            del free[names[name]]
    if not names:
        return list(other)
    return [Update(renamed(rank, lambda n: names.get(n, n)) for rank in u) for u in other]


def renamed(rank: RankUpdate, change: Callable[[str], str]) -> RankUpdate:
    """The same with other names for the tensors."""

    def of(values: Mapping[str, Any]) -> Any:
        return {change(name): value for name, value in values.items()}

    values: dict[str, Any] = {what: of(getattr(rank, what)) for what in _BY_NAME}
    values |= {what: [*of(dict.fromkeys(getattr(rank, what)))] for what in _NAMES}
    return replace(rank, **values, local_gradients=list(map(of, rank.local_gradients)))


def _in_root(name: str, roots: Mapping[str, str]) -> str:
    root, _, rest = name.partition("/")
    return f"{roots.get(root, root)}/{rest}"


def _other_order(reference: Sequence[Update], other: Sequence[Update]) -> dict[str, str]:
    """Models whose names several of one class have the other way round; empty: there are none."""
    runs = [_models(run[0]) if run else {} for run in (reference, other)]
    if runs[0].keys() != runs[1].keys():
        return {}
    free, names = dict(runs[0]), dict[str, str]()
    for name, (values, frozen) in runs[1].items():
        kind = name.split("#")[0]
        fits = [n for n, (own, _) in free.items() if n.split("#")[0] == kind and _same(own, values)]
        alike = [n for n in fits if free[n][1] == frozen]
        # The very name goes first, where all else is the same.
        best = sorted(alike or fits, key=lambda n: n != name)[:1]
        if not best:
            return {}
        names[name] = best[0]
        del free[best[0]]
    return names if any(a != b for a, b in names.items()) else {}


def _models(update: Update) -> dict[str, tuple[dict[str, Array], set[str]]]:
    """By model, its parameters before the first update, and which of them are frozen."""
    found: dict[str, tuple[dict[str, Array], set[str]]] = {}
    for name, array in update.merged("initial").items():
        model, _, own = name.partition("/")
        values, frozen = found.setdefault(model, ({}, set()))
        values[own] = array
        frozen |= {own} if name in update[0].frozen else set()
    return found


def _same(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """Whether they have the same names and values."""
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def _same_end(one: str, other: str) -> bool:
    ends = [f".{name.partition('/')[2]}" for name in (one, other)]
    return ends[0].endswith(ends[1]) or ends[1].endswith(ends[0])
