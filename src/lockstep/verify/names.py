"""Renames the tensors of one run so that they have the same names as in another run of the script.

The name of a tensor consists of its *root* (the class of its model, with a number if there are
several, such as `Net#2`) and its *path* in the model: `Net/layer.weight`. A wrapper that the script
uses only on several processes may change the path (`Net/module.layer.weight`), and models of one
class may be numbered in another order. A run is a list of `Update`s (optimizer steps), which hold a
`RankUpdate` of every rank.
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
    "parameter_sums",
    "parameters",
    "reduced_in_step",
    "rewritten_parameters",
    "unclipped",
    "write_stacks",
)
"""Fields of `RankUpdate` that are mappings with names of tensors as keys."""
LISTS_OF_NAMES = ("unwrapped", "unknown_to_ddp", "frozen", "in_eval_mode", "optimizer_parameters")
"""Fields of `RankUpdate` that are lists of names."""
FIELDS_WITH_VALUES = ("buffers", "parameters", "initial")
"""Fields that hold values of tensors. If several hold the same tensor, the last one is used."""


@dataclass(frozen=True)
class AlignedRun:
    """What a run has recorded, with the tensor names of the reference."""

    updates: list[Update]
    # For each rank, sums over the parameters after the last update.
    final_sums: list[Mapping[str, Array]]

    def renamed(self, change: Callable[[str], str]) -> AlignedRun:
        """Returns the run with other names for its tensors.

        Args:
            change: function that returns the new name for a name.
        """
        updates = []
        for update in self.updates:
            updates.append(Update(rename_tensors(record, change) for record in update))

        return AlignedRun(updates, [_with_new_keys(sums, change) for sums in self.final_sums])


def align_names(
    reference: Sequence[Update],
    other: Sequence[Update],
    other_final_sums: Sequence[Mapping[str, Array]] = (),
) -> AlignedRun:
    """Returns what another run has recorded, with the tensor names of the reference.

    A tensor whose name does not exist in the reference gets an unused name of the reference, if
    both may be the same tensor.

    Args:
        reference: updates of the reference.
        other: updates of the other run.
        other_final_sums: for each rank of the other run, sums over the parameters after the last
            update.
    """
    run = AlignedRun(list(other), list(other_final_sums))

    # Models of one class may be numbered in another order.
    new_roots = _roots_in_other_order(reference, other)
    if new_roots:
        run = run.renamed(lambda name: _with_root(name, new_roots))

    # The values of every parameter and buffer when it was recorded first, by name.
    reference_tensors = _first_recorded_values(reference)
    other_tensors = _first_recorded_values(run.updates)

    # Tensors of the reference whose names do not exist in the other run.
    free_tensors = {}
    for name, array in reference_tensors.items():
        if name not in other_tensors:
            free_tensors[name] = array

    new_names: dict[str, str] = {}
    for name, array in other_tensors.items():
        if name in reference_tensors:
            continue

        # A tensor with the same shape and a similar name, and with the same values if possible.
        new_name = _counterpart(name, array, free_tensors)
        if new_name is not None:
            new_names[name] = new_name
            del free_tensors[new_name]

    if not new_names:
        return run

    return run.renamed(lambda name: new_names.get(name, name))


def _first_recorded_values(updates: Sequence[Update]) -> dict[str, Array]:
    """Returns the first recorded values of every tensor of a run, by name."""
    tensors: dict[str, Array] = {}
    for update in reversed(updates):  # values of earlier updates replace those of later ones
        for field_name in FIELDS_WITH_VALUES:
            tensors.update(update.merged(field_name))
    return tensors


def _counterpart(name: str, array: Array, candidates: Mapping[str, Array]) -> str | None:
    """Returns the name of the candidate that is the same tensor under another name.

    Candidates must have the same shape, and a path with the same ending. Among several, one with
    the same values is preferred.

    Args:
        name: name of the tensor.
        array: values of the tensor.
        candidates: tensors of the other run by name.

    Returns:
        The name, or None if no candidate fits.
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
    """True if the path of one tensor in its model is the end of the other's path.

    For example, `Net/a.b` and `Wrapper/module.a.b` end alike.
    """
    # With a dot in front, so that `xb` does not end like `b`.
    one_path = "." + one.partition("/")[2]
    other_path = "." + other.partition("/")[2]
    return one_path.endswith(other_path) or other_path.endswith(one_path)


def rename_tensors(record: RankUpdate, change: Callable[[str], str]) -> RankUpdate:
    """Returns the record of a rank with other names for its tensors.

    Args:
        record: record of the rank.
        change: function that returns the new name for a name.
    """

    def new_name(name: str) -> str:
        # An empty name stands for a tensor without a name, or for no tensor.
        return change(name) if name else ""

    fields: dict[str, Any] = {}
    for field_name in MAPPINGS_FROM_NAMES:
        fields[field_name] = _with_new_keys(getattr(record, field_name), change)

    # Every name keeps its index, even if it occurs twice: the index of a name in
    # `optimizer_parameters` is that of the parameter in the optimizer.
    for field_name in LISTS_OF_NAMES:
        fields[field_name] = [new_name(name) for name in getattr(record, field_name)]

    return replace(
        record,
        **fields,
        local_gradients=[_with_new_keys(each, change) for each in record.local_gradients],
        optimizer_state=_with_new_keys_of_state(record.optimizer_state, change),
        calls=[replace(call, gradient_of=new_name(call.gradient_of)) for call in record.calls],
    )


def _with_new_keys(values: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Returns a mapping in which the keys, which are names of tensors, are renamed."""
    return {change(name): value for name, value in values.items()}


def _with_new_keys_of_state(
    state: Mapping[str, Any], change: Callable[[str], str]
) -> dict[str, Any]:
    """Returns an optimizer's state in which the tensors that it belongs to are renamed.

    The state "Net/weight/exp_avg" belongs to the tensor "Net/weight".
    """
    renamed = {}
    for name, value in state.items():
        tensor_name, _, key = name.rpartition("/")
        renamed[f"{change(tensor_name)}/{key}"] = value
    return renamed


# Models of one class


@dataclass
class _FirstState:
    """The state of a model before the first update."""

    # Parameters by their path in the model, such as "layer.weight".
    parameters: dict[str, Array] = field(default_factory=dict)
    # The paths of parameters that do not require gradients.
    frozen: set[str] = field(default_factory=set)


def _roots_in_other_order(reference: Sequence[Update], other: Sequence[Update]) -> dict[str, str]:
    """Returns the reference's root for each model of the other run, if some of them are swapped.

    Models of one class are told apart by the initial values of their parameters, then by which
    parameters are frozen. If both are the same for several models, a model keeps its name if
    possible.

    Returns:
        The new roots by old root. Empty if no root changes, or if some model has no counterpart.
    """
    # The first state of each model, by its root. Models of the reference are removed here when
    # their counterpart is found.
    free_models = _first_states_by_root(reference)
    other_models = _first_states_by_root(other)
    if free_models.keys() != other_models.keys():  # the runs have different models
        return {}

    new_roots: dict[str, str] = {}
    for root, state in other_models.items():
        candidates = []
        for free_root, free_state in free_models.items():
            is_same_class = _class_of(free_root) == _class_of(root)
            if is_same_class and _are_equal(free_state.parameters, state.parameters):
                candidates.append(free_root)

        if not candidates:
            return {}

        # Prefer models in which the same parameters are frozen, if there are any.
        with_same_frozen = []
        for candidate in candidates:
            if free_models[candidate].frozen == state.frozen:
                with_same_frozen.append(candidate)
        preferred = with_same_frozen or candidates

        # Among these, prefer the model with the same root.
        new_root = root if root in preferred else preferred[0]
        new_roots[root] = new_root
        del free_models[new_root]

    if all(root == new_root for root, new_root in new_roots.items()):
        return {}

    return new_roots


def _class_of(root: str) -> str:
    """Returns the class of a root: `Net` for `Net#2`."""
    return root.split("#")[0]


def _with_root(name: str, new_roots: Mapping[str, str]) -> str:
    """Returns the name of a tensor with the new root of its model, if there is one."""
    root, _, path = name.partition("/")
    return f"{new_roots.get(root, root)}/{path}"


def _first_states_by_root(updates: Sequence[Update]) -> dict[str, _FirstState]:
    """Returns the state of each model before the first update, by root."""
    states: dict[str, _FirstState] = defaultdict(_FirstState)
    if not updates:
        return states

    # The initial parameters of all ranks: a rank may have only some of them. The same parameters
    # are frozen on every rank, so those of rank 0 are used.
    first_update = updates[0]
    initial_parameters = first_update.merged("initial")
    frozen_names = first_update[0].frozen
    for name, array in initial_parameters.items():
        root, _, path = name.partition("/")
        state = states[root]
        state.parameters[path] = array
        if name in frozen_names:
            state.frozen.add(path)

    return states


def _are_equal(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """True if two mappings have the same names and values."""
    if one.keys() != other.keys():
        return False
    return all(np.array_equal(one[name], other[name]) for name in one)
