"""Gives the tensors of one run the names that the same tensors have in another run of the script.

A tensor is named by its model and its place inside, as `Net/layer.weight`. The part before the "/"
is the *root*: the class of the model, with a number if there are several, as `Net#2`. A wrapper
that a script uses on several processes only may change the place (`Net/module.layer.weight`), and
models of one class may have been met in another order. A run is a list of `Update`s (optimizer
steps), each with a `RankUpdate` of every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import RankUpdate, Update

MAPPINGS_FROM_NAMES = (
    "buffers",
    "changed_between_passes",
    "gradients",
    "initial",
    "module_tensors",
    "module_tensors_before",
    "optimizer_state",
    "parameter_sums",
    "parameters",
    "rewritten_parameters",
    "unclipped",
    "write_stacks",
)
"""Fields of `RankUpdate` that are mappings from names of tensors."""
LISTS_OF_NAMES = ("unwrapped", "unknown_to_ddp", "frozen", "in_eval_mode", "optimizer_parameters")
"""Fields of `RankUpdate` that are lists of names."""
FIELDS_WITH_VALUES = ("buffers", "parameters", "initial")
"""Fields that hold whole tensors; of a tensor that several have, the last one counts."""


def align_names(reference: Sequence[Update], other: Sequence[Update]) -> list[Update]:
    """Returns the other run's updates with the reference's names for the same tensors.

    A tensor whose name the reference does not know gets one of the reference's names that the other
    run does not know, if the tensors may be the same.
    """
    # First the models: those of one class may be numbered in another order.
    new_roots = _roots_in_other_order(reference, other)
    if new_roots:
        other = _renamed_run(other, lambda name: _with_root(name, new_roots))

    reference_tensors = _first_values(reference)
    other_tensors = _first_values(other)

    # Then the tensors. Free are those of the reference whose names the other run does not know.
    free_tensors = {}
    for name, array in reference_tensors.items():
        if name not in other_tensors:
            free_tensors[name] = array

    new_names: dict[str, str] = {}
    for name, array in other_tensors.items():
        if name in reference_tensors:
            continue
        new_name = _counterpart(name, array, free_tensors)
        if new_name is not None:
            new_names[name] = new_name
            del free_tensors[new_name]

    if not new_names:
        return list(other)

    return _renamed_run(other, lambda name: new_names.get(name, name))


def _first_values(updates: Sequence[Update]) -> dict[str, Array]:
    """Returns every tensor of a run by name, as it was when it was recorded first."""
    tensors: dict[str, Array] = {}
    for update in reversed(updates):  # earlier updates replace the values of later ones
        for field_name in FIELDS_WITH_VALUES:
            tensors.update(update.merged(field_name))
    return tensors


def _counterpart(name: str, array: Array, candidates: Mapping[str, Array]) -> str | None:
    """Returns the name of the candidate that is the same tensor under another name.

    It has the same shape, and its name has the same end. If there are several, it is the first with
    the same values, or else the first.

    Args:
        name: of a tensor.
        array: its values.
        candidates: tensors of the other run by their names.

    Returns:
        None if no candidate has this shape and such a name.
    """
    fitting = []
    for candidate, candidate_array in candidates.items():
        if candidate_array.shape == array.shape and _end_alike(candidate, name):
            fitting.append(candidate)

    for candidate in fitting:
        if np.array_equal(candidates[candidate], array):
            return candidate

    return fitting[0] if fitting else None


def _end_alike(one: str, other: str) -> bool:
    """Returns whether the place of one tensor in its model is the end of the other's.

    For example, `Net/a.b` and `Wrapper/module.a.b` end alike.
    """
    # With a dot in front, so that `xb` does not end like `b`.
    one_place = "." + one.partition("/")[2]
    other_place = "." + other.partition("/")[2]
    return one_place.endswith(other_place) or other_place.endswith(one_place)


def _renamed_run(updates: Sequence[Update], change: Callable[[str], str]) -> list[Update]:
    """Returns updates with other names for the tensors, as `rename_tensors` does for one rank."""
    return [Update(rename_tensors(rank, change) for rank in update) for update in updates]


def rename_tensors(rank: RankUpdate, change: Callable[[str], str]) -> RankUpdate:
    """Returns a rank's update with other names for the tensors.

    Args:
        rank: the update on one rank.
        change: returns the new name for a name, which may be the same.
    """
    fields: dict[str, Any] = {}
    for field_name in MAPPINGS_FROM_NAMES:
        fields[field_name] = _with_new_keys(getattr(rank, field_name), change)

    for field_name in LISTS_OF_NAMES:
        new_names = [change(name) for name in getattr(rank, field_name)]
        fields[field_name] = list(dict.fromkeys(new_names))  # each once, in the same order

    local_gradients = [_with_new_keys(gradients, change) for gradients in rank.local_gradients]
    return replace(rank, **fields, local_gradients=local_gradients)


def _with_new_keys(values: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Returns a mapping whose keys, the names of tensors, are changed."""
    return {change(name): value for name, value in values.items()}


# Models of one class


@dataclass
class _FirstState:
    """A model before the first update."""

    # By their place in the model, such as "layer.weight".
    parameters: dict[str, Array] = field(default_factory=dict)
    # The places of parameters that do not require gradients.
    frozen: set[str] = field(default_factory=set)


def _roots_in_other_order(reference: Sequence[Update], other: Sequence[Update]) -> dict[str, str]:
    """Returns the reference's name (root) for each model of the other run, if some are swapped.

    Models of one class are told apart by their first parameters, then by what is frozen. If both
    are the same in several models, a model keeps its name where it can.

    Returns:
        An empty mapping if no name changes, or if some model has no counterpart.
    """
    free_models = _first_states(reference)  # those to which no model of `other` was assigned yet
    other_models = _first_states(other)
    if free_models.keys() != other_models.keys():
        return {}  # the runs have different models

    new_names: dict[str, str] = {}
    for name, state in other_models.items():
        candidates = []
        for free_name, free_state in free_models.items():
            is_same_class = _class_of(free_name) == _class_of(name)
            if is_same_class and _are_equal(free_state.parameters, state.parameters):
                candidates.append(free_name)

        if not candidates:
            return {}

        with_same_frozen = []
        for candidate in candidates:
            if free_models[candidate].frozen == state.frozen:
                with_same_frozen.append(candidate)

        if with_same_frozen:
            candidates = with_same_frozen

        best = name if name in candidates else candidates[0]
        new_names[name] = best
        del free_models[best]

    if all(name == new_name for name, new_name in new_names.items()):
        return {}

    return new_names


def _class_of(root: str) -> str:
    """Returns `Net` for the root `Net#2`."""
    return root.split("#")[0]


def _with_root(name: str, new_roots: Mapping[str, str]) -> str:
    """Returns a tensor's name with the new root of its model, if that has one."""
    root, _, place = name.partition("/")
    return f"{new_roots.get(root, root)}/{place}"


def _first_states(updates: Sequence[Update]) -> dict[str, _FirstState]:
    """Returns what each model was like before the first update, by its root."""
    states: dict[str, _FirstState] = defaultdict(_FirstState)
    if not updates:
        return states

    first = updates[0]
    for name, array in first.merged("initial").items():
        root, _, place = name.partition("/")
        state = states[root]
        state.parameters[place] = array
        if name in first[0].frozen:
            state.frozen.add(place)

    return states


def _are_equal(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """Returns whether two mappings have the same names and values."""
    if one.keys() != other.keys():
        return False
    return all(np.array_equal(one[name], other[name]) for name in one)
