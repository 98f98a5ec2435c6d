"""Renames the tensors of one run so that they have the same names as in another run of the script.

The name of a tensor consists of its *root* (the class of its model, with a number if there are
several, such as `Net#2`) and its *path* in the model: `Net/layer.weight`. A wrapper that the script
uses only on several processes may change the path (`Net/module.layer.weight`), and models of one
class may be numbered in another order. A run is a list of `Update`s (optimizer steps), which hold a
`RankUpdate` of every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from lockstep.verify.tolerance import Array, Tolerance
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
LISTS_OF_NAMES = (
    "unwrapped_parameters",
    "unknown_to_ddp",
    "frozen",
    "in_eval_mode",
    "optimizer_parameters",
    "local_norm_layers",
)
"""Fields of `RankUpdate` that are lists of names: of tensors, or of modules. In some of them the
index of a name has a meaning: `optimizer_parameters[i]` is the i-th parameter of the optimizer."""
FIELDS_WITH_VALUES = ("buffers", "parameters", "initial")
"""Fields that hold values of tensors. If several hold the same tensor, the last one is used."""

TOLERANCE_OF_SUMS = Tolerance(relative=1e-6, absolute=0.0)
"""How far sums over the same parameters may be apart in two runs."""

_REPLICA = " (replica "
"""With DiLoCo, each process trains several replicas, whose tensors have names of their own."""

Rename = Callable[[str], str]
"""A function that returns the new name for a name."""
Parts = tuple[str, ...]
"""A name that is split into its parts: ("Net", "layer", "weight") for `Net/layer.weight`."""


def split_name(name: str) -> tuple[str, str]:
    """Splits the name of a tensor into its root and its path: "Net#2" and "layer.weight".

    Either may be empty: a parameter that no model has is "/parameter 1 of optimizer 1".
    """
    root, _, path = name.partition("/")
    return root, path


def model_of(name: str) -> str:
    """Returns the model of a tensor: "Net" for "Net/layer.weight"; empty if it belongs to none."""
    root, _ = split_name(name)
    return root


def path_of(name: str) -> str:
    """Returns the path of a tensor in its model: "layer.weight" for "Net/layer.weight"."""
    _, path = split_name(name)
    return path


def name_of_replica(name: str, replica: int) -> str:
    """Returns the name of a tensor of one of several replicas: "Net/weight (replica 2)"."""
    return f"{name}{_REPLICA}{replica})"


def split_replica(name: str) -> tuple[str, str]:
    """Splits a name such as "Net/weight (replica 2)" into "Net/weight" and " (replica 2)".

    The second part is empty for a tensor that has no replicas.
    """
    tensor_name, separator, number = name.partition(_REPLICA)
    return tensor_name, separator + number


def _split_without_replica(name: str) -> tuple[str, str]:
    """Splits a name into its root and its path: "Net" and "weight" for "Net/weight (replica 2)"."""
    name_without_replica, _ = split_replica(name)
    return split_name(name_without_replica)


@dataclass(frozen=True)
class AlignedRun:
    """What a run has recorded, with names of tensors that another run has too."""

    updates: list[Update]
    # For each rank, sums over the parameters after the last update.
    final_sums: Sequence[Mapping[str, Array]]

    def renamed(self, change_of_rank: Sequence[Rename]) -> AlignedRun:
        """Returns the run with other names for its tensors.

        Args:
            change_of_rank: for each rank, how its names are changed.
        """
        updates = []
        for update in self.updates:
            records = [rename_tensors(record, change_of_rank[record.rank]) for record in update]
            updates.append(Update(records))

        # The run may be given without final sums. Then there are none for any rank.
        final_sums = []
        for sums, change in zip(self.final_sums, change_of_rank, strict=False):
            final_sums.append(_with_new_keys(sums, change))

        return AlignedRun(updates, final_sums)


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
    if not other:
        return run

    # Models of one class may be numbered in another order, on each rank in its own.
    new_roots_of_rank = _new_roots_of_ranks(reference, other)
    if any(new_roots_of_rank):
        run = run.renamed([partial(_with_root, new_roots) for new_roots in new_roots_of_rank])

    # A wrapper may have changed the paths in the models, on all ranks alike.
    reference_tensors = _first_recorded_values(reference)
    other_tensors = _first_recorded_values(run.updates)
    new_names = _new_names(reference_tensors, other_tensors)
    if not new_names:
        return run

    names_in_both_runs = reference_tensors.keys() & other_tensors.keys()
    change = partial(_with_new_name, new_names, _new_modules(new_names), names_in_both_runs)
    return run.renamed([change] * num_ranks_of(other))


def num_ranks_of(run: Sequence[Update]) -> int:
    """Returns the number of ranks of a run. Each has one record in an update, or several replicas.

    With DiLoCo, the number of records may change: in the first updates, all replicas of a rank may
    still be one model.
    """
    highest_rank = -1
    for update in run:
        for record in update:
            highest_rank = max(highest_rank, record.rank)
    return highest_rank + 1


def _new_names(
    reference_tensors: Mapping[str, Array], other_tensors: Mapping[str, Array]
) -> dict[str, str]:
    """Returns new names for the tensors of the other run whose names the reference does not have.

    Each of them gets the name of a tensor of the reference that the other run does not have, if
    there is one with the same shape and a similar name. One with the same values is preferred.

    Args:
        reference_tensors: first recorded values of each tensor of the reference, by name.
        other_tensors: the same for the other run.
    """
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

    return new_names


def _with_new_name(
    new_names: Mapping[str, str],
    new_modules: Mapping[Parts, Parts],
    names_in_both_runs: Collection[str],
    name: str,
) -> str:
    """Returns the new name of a tensor or module; the same name if nothing has changed.

    For example, "Wrapper/module.weight" has the new name "Net/weight", so that the modules
    "Wrapper/module" and "Wrapper" are now "Net". Both runs have "Wrapper/scale":

        Wrapper/module.weight        Net/weight
        Wrapper/scale                Wrapper/scale, although the module has a new name
        Wrapper/module.memory.rows   Net/memory.rows: it keeps its path in the module

    Args:
        new_names: new names of parameters and buffers, by old name.
        new_modules: new names of the modules whose tensors have new names, by old name.
        names_in_both_runs: names of parameters and buffers that do not change.
        name: name of a parameter, a buffer, a module, or another tensor that a module keeps.
    """
    if name in names_in_both_runs:
        return name
    if name in new_names:
        return new_names[name]

    # Anything else keeps its path in the innermost module that has a new name.
    parts = _split(name)
    for length in range(len(parts), 0, -1):
        new_module = new_modules.get(parts[:length])
        if new_module is not None:
            root, *path = new_module + parts[length:]
            return f"{root}/{'.'.join(path)}"

    return name


def _new_modules(new_names: Mapping[str, str]) -> dict[Parts, Parts]:
    """Returns the new names of modules whose tensors have new names.

    For example, "Wrapper/module.layer.weight" is renamed to "Net/layer.weight". Then the result is:

        ("Wrapper", "module", "layer"): ("Net", "layer")
        ("Wrapper", "module"):          ("Net",)
        ("Wrapper",):                   ("Net",), so that "Wrapper/scale" becomes "Net/scale"
    """
    new_modules: dict[Parts, Parts] = {}
    for old_name, new_name in new_names.items():
        old_root, *old_path = _split(old_name)
        new_root, *new_path = _split(new_name)

        # The modules around the tensor, from the innermost one, as long as the rest of the path is
        # the same. In the example these are two, as both paths end with "layer" and "weight".
        for length in range(1, _length_of_common_end(old_path, new_path) + 1):
            old_module = (old_root, *old_path[:-length])
            new_modules[old_module] = (new_root, *new_path[:-length])

        # The model itself, if these modules were not all of the path.
        if old_root != new_root:
            new_modules.setdefault((old_root,), (new_root,))

    return new_modules


def _length_of_common_end(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns how many of the last items of two sequences are the same."""
    length = 0
    for item, other_item in zip(reversed(one), reversed(other), strict=False):
        if item != other_item:
            break
        length += 1
    return length


def _split(name: str) -> Parts:
    """Splits a name into its root and the parts of its path: ("Net", "layer", "weight")."""
    root, path = split_name(name)
    return (root, *path.split(".")) if path else (root,)


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
    one_path = "." + path_of(one)
    other_path = "." + path_of(other)
    return one_path.endswith(other_path) or other_path.endswith(one_path)


def rename_tensors(record: RankUpdate, change: Rename) -> RankUpdate:
    """Returns the record of a rank with other names for its tensors.

    Args:
        record: record of the rank.
        change: function that returns the new name for a name.
    """

    def change_unless_empty(name: str) -> str:
        # An empty name stands for a tensor without a name, or for no tensor.
        return change(name) if name else ""

    fields: dict[str, Any] = {}
    for field_name in MAPPINGS_FROM_NAMES:
        fields[field_name] = _with_new_keys(getattr(record, field_name), change)
    for field_name in LISTS_OF_NAMES:
        fields[field_name] = [change_unless_empty(name) for name in getattr(record, field_name)]

    calls = []
    for call in record.calls:
        calls.append(replace(call, gradient_of=change_unless_empty(call.gradient_of)))

    return replace(
        record,
        **fields,
        local_gradients=[_with_new_keys(each, change) for each in record.local_gradients],
        optimizer_state=_with_new_keys_of_state(record.optimizer_state, change),
        calls=calls,
    )


def _with_new_keys(values: Mapping[str, Any], change: Rename) -> dict[str, Any]:
    """Returns a mapping in which the keys, which are names of tensors, are renamed."""
    return {change(name): value for name, value in values.items()}


def _with_new_keys_of_state(state: Mapping[str, Any], change: Rename) -> dict[str, Any]:
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
class _ModelHistory:
    """What a run has recorded of a model, and how the model is trained."""

    # Parameters before the first update, by their path in the model, such as "layer.weight". Empty
    # if the script has called the model for the first time after that.
    initial: dict[str, Array] = field(default_factory=dict)
    # Two numbers for each parameter before an update, by the index of the update and by path. Here,
    # a path names its replica too, since each replica has other values: "layer.weight (replica 2)".
    sums: dict[int, dict[str, Array]] = field(default_factory=dict)
    # The paths of parameters that do not require gradients.
    frozen: set[str] = field(default_factory=set)
    # By the path of a parameter: the number of the optimizer that trains it, and the index of the
    # parameter in that optimizer.
    places: dict[str, tuple[int, int]] = field(default_factory=dict)


def _new_roots_of_ranks(
    reference: Sequence[Update], other: Sequence[Update]
) -> list[dict[str, str]]:
    """Returns for each rank of the other run the reference's root for each of its models.

    Each rank numbers its models in the order in which it has called or wrapped them, so the numbers
    may differ between ranks too.

    Returns:
        For each rank, the new roots by old root; empty if no root changes.
    """
    reference_models = _models_by_class(reference)
    models_of_all_ranks = _models_by_class(other)

    new_roots_of_rank = []
    for rank in range(num_ranks_of(other)):
        only_this_rank = [_records_of_rank(update, rank) for update in other]
        new_roots: dict[str, str] = {}
        for class_name, models_of_rank in _models_by_class(only_this_rank).items():
            candidates = reference_models[class_name]
            new_roots_of_class = _counterparts(candidates, models_of_rank)

            # The reference may not have a model of this rank, or the rank only a part of it. Then
            # the models of all ranks together, which have all parts, say how they are renamed.
            if len(new_roots_of_class) < len(models_of_rank):
                new_roots_of_class = _new_roots_of_all(candidates, models_of_all_ranks[class_name])
            new_roots |= new_roots_of_class
        new_roots_of_rank.append(_without_unchanged(new_roots))

    return new_roots_of_rank


def _records_of_rank(update: Update, rank: int) -> Update:
    """Returns an update with the records of one rank only, which has several with DiLoCo."""
    return Update(record for record in update if record.rank == rank)


def _without_unchanged(new_roots: Mapping[str, str]) -> dict[str, str]:
    """Returns the new roots that are not the same as the old ones."""
    return {root: new_root for root, new_root in new_roots.items() if new_root != root}


def _counterparts(
    candidates: Mapping[str, _ModelHistory], models: Mapping[str, _ModelHistory]
) -> dict[str, str]:
    """Matches the models of one class in two runs.

    For example, the result is `{"Net#2": "Net"}` if `Net#2` of the other run is `Net` of the
    reference.

    Models are told apart by the first values of their parameters. Some may have equal values, as a
    student and its teacher: these are told apart by which parameters are frozen, and by their
    places in the optimizers. If all of this is the same, a model keeps its name if possible.

    Args:
        candidates: models of the class in the reference, by root.
        models: models of the class in the other run, by root.

    Returns:
        The new roots by old root, without models that the reference does not have.
    """
    free_candidates = dict(candidates)
    new_roots: dict[str, str] = {}
    for root, model in models.items():
        new_root = _root_of_same_model(root, model, free_candidates)
        if new_root is not None:
            new_roots[root] = new_root
            del free_candidates[new_root]

    return new_roots


def _root_of_same_model(
    root: str, model: _ModelHistory, candidates: Mapping[str, _ModelHistory]
) -> str | None:
    """Returns the root of the candidate that is the same model; None if there is none.

    Args:
        root: root of the model.
        model: the model.
        candidates: models of the same class in the reference, by root.
    """
    roots = [each for each in candidates if _have_same_values(candidates[each], model)]
    if not roots:
        return None

    # If there are several, those are preferred that have the same frozen parameters, and then those
    # whose parameters are in the same places in the optimizers.
    with_same_frozen = [each for each in roots if candidates[each].frozen == model.frozen]
    if with_same_frozen:
        roots = with_same_frozen
    in_same_places = [each for each in roots if candidates[each].places == model.places]
    if in_same_places:
        roots = in_same_places

    return root if root in roots else roots[0]


def _have_same_values(candidate: _ModelHistory, model: _ModelHistory) -> bool:
    """True if two models have the same values, when both runs have first recorded some of them.

    Args:
        candidate: a model of the reference, which trains all replicas.
        model: a model of the other run, perhaps of a single rank, which trains some replicas.
    """
    if candidate.initial and model.initial:
        return _are_equal(candidate.initial, model.initial)

    # One of the runs has called the model after its first update. Sums are compared before the
    # first update for which both runs know the model.
    indices_in_both = candidate.sums.keys() & model.sums.keys()
    if not indices_in_both:
        return False
    first_index = min(indices_in_both)
    sums = model.sums[first_index]
    return _are_near(_of_same_replicas(candidate.sums[first_index], sums), sums)


def _of_same_replicas(arrays: Mapping[str, Array], others: Iterable[str]) -> dict[str, Array]:
    """Returns the arrays of those replicas that some of the other names belong to."""
    replicas = {split_replica(name)[1] for name in others}
    return {name: array for name, array in arrays.items() if split_replica(name)[1] in replicas}


def _new_roots_of_all(
    candidates: Mapping[str, _ModelHistory], models: Mapping[str, _ModelHistory]
) -> dict[str, str]:
    """Returns new roots for all models of a class, also for those without a counterpart.

    A model without a counterpart keeps its root, unless this is the new root of another model. Then
    it gets one that no model has. For example, the models are "Net" and "Net#2", and the reference
    has only "Net", which is "Net#2" here. Then "Net#2" becomes "Net", and "Net" becomes "Net#2".

    Args:
        candidates: models of the class in the reference, by root.
        models: models of the class, by root.
    """
    counterparts = _counterparts(candidates, models)
    new_roots = dict(counterparts)
    models_without_root: list[str] = []
    for root in models:
        if root in counterparts:
            continue
        if root in counterparts.values():
            models_without_root.append(root)
        else:
            new_roots[root] = root

    # There are at least as many roots as models, so one is free for each. Those of the reference
    # are preferred.
    for old_root in models_without_root:
        taken_roots = new_roots.values()
        free_roots = [root for root in (*candidates, *models) if root not in taken_roots]
        new_roots[old_root] = free_roots[0]

    return new_roots


def _with_root(new_roots: Mapping[str, str], name: str) -> str:
    """Returns the name of a tensor with the new root of its model, if there is one."""
    root, path = split_name(name)
    return f"{new_roots.get(root, root)}/{path}"


def _models_by_class(updates: Sequence[Update]) -> dict[str, dict[str, _ModelHistory]]:
    """Returns the models of a run, by their class and then by root.

    For example, what is recorded of the parameter `Net#2/layer.weight` is found in the model
    `result["Net"]["Net#2"]`, by the path "layer.weight".

    Values are merged from all ranks, as a rank may have only some of the parameters. Which of them
    are frozen and trained is read from the first rank, as the others do the same.
    """
    models = _models_with_values(updates)

    frozen_names: set[str] = set()
    for update in updates:
        frozen_names.update(update[0].frozen)
    for name in frozen_names:
        root, path = _split_without_replica(name)
        if root in models:
            models[root].frozen.add(path)

    for name, place_in_optimizer in _places_in_optimizers(updates).items():
        root, path = _split_without_replica(name)
        if root in models:
            models[root].places[path] = place_in_optimizer

    models_by_class: dict[str, dict[str, _ModelHistory]] = defaultdict(dict)
    for root, model in models.items():
        class_name = root.split("#")[0]  # "Net" for "Net#2"
        models_by_class[class_name][root] = model

    return models_by_class


def _models_with_values(updates: Sequence[Update]) -> dict[str, _ModelHistory]:
    """Returns the models of a run by root, each with the recorded values of its parameters.

    A model without recorded values is left out, since nothing is known by which it could be
    recognized in another run.
    """
    models: dict[str, _ModelHistory] = defaultdict(_ModelHistory)
    for index, update in enumerate(updates):
        for name, array in update.merged("initial").items():
            root, path = _split_without_replica(name)
            models[root].initial[path] = array

        for name, sums in update.merged("parameter_sums").items():
            root, path = split_name(name)
            models[root].sums.setdefault(index, {})[path] = sums

    return dict(models)


def _places_in_optimizers(updates: Sequence[Update]) -> dict[str, tuple[int, int]]:
    """Returns the optimizer of each parameter on the first rank, and its index in the optimizer.

    Optimizers are numbered in the order in which the script has constructed them.
    """
    places: dict[str, tuple[int, int]] = {}
    for update in updates:
        record = update[0]
        for index, name in enumerate(record.optimizer_parameters):
            places.setdefault(name, (record.construction_index, index))
    return places


def _are_equal(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """True if two mappings have the same names and values."""
    if one.keys() != other.keys():
        return False
    return all(np.array_equal(one[name], other[name]) for name in one)


def _are_near(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """True if two mappings have the same names, and the same sums but for rounding."""
    if one.keys() != other.keys():
        return False
    return not any(TOLERANCE_OF_SUMS.differ(one[name], other[name], scale=0.0) for name in one)
