"""Joins tensors that the ranks hold in parts, so that they can be compared with one process.

A run is a list of `Update`s (optimizer steps), each with a `RankUpdate` of every rank: its tensors
by name. Ranks may rightly hold different tensors: slices of an optimizer's flat buffer, parts of a
layer (tensor parallelism), stages of a pipeline, experts. If the parts of all ranks, one after the
other, are the tensor of one process, they are joined. If not, nothing is known of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.verify.cause import format_items, script_names
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import RankUpdate, Update

# Fields of `RankUpdate` with the tensors themselves, so that parts of them can be joined.
_TENSOR_FIELDS = (
    "initial",
    "gradients",
    "reduced_in_step",
    "unclipped",
    "parameters",
    "rewritten_parameters",
)

# Fields with sums over tensors. Sums over parts do not give those over the whole tensor.
_SUM_FIELDS = ("parameter_sums", "changed_between_passes", "optimizer_state")

# Calls with which ranks send each other what they have computed.
_SENDING_CALLS = {"send", "recv", "isend", "irecv", "all_to_all", "all_to_all_single"}


def is_in_no_model(name: str) -> bool:
    """Returns whether a parameter is in no model, so that only its optimizer knows it.

    Such a parameter is named "/parameter 1 of optimizer 1". Those of models are named "Net/weight".
    """
    return name.startswith("/")


@dataclass(frozen=True)
class JoinedRuns:
    """Two runs whose tensors are whole again."""

    reference_run: list[Update]
    parallel_run: list[Update]
    # Names of tensors of models that were joined from parts.
    joined_names: tuple[str, ...] = ()
    # Says for the user which tensors differ between the ranks by design and cannot be joined; empty
    # if there are none.
    unknown: str = ""


@dataclass(frozen=True)
class _Concatenation:
    """How the parts of all ranks make the whole tensor: one after the other in a dimension."""

    dimension: int
    # Of the whole tensor, in this dimension.
    size: int

    def join(self, parts: Sequence[Array]) -> Array:
        """Returns the whole tensor, without the padding that the last parts may end with."""
        concatenated = np.concatenate(parts, axis=self.dimension)
        whole: Array = concatenated.take(range(self.size), axis=self.dimension)
        return whole


def join_parts(reference_run: Sequence[Update], parallel_run: Sequence[Update]) -> JoinedRuns:
    """Joins the tensors of the parallel run that its ranks hold in parts.

    What is a part is seen in the parameters before the first update.

    Args:
        reference_run: the updates of one process.
        parallel_run: the updates of several processes.

    Returns:
        Both runs, with whole tensors for every rank. Tensors that differ between ranks by design
        and are no parts, as in the stages of a pipeline, are named in `JoinedRuns.unknown`.
    """
    unchanged = JoinedRuns(list(reference_run), list(parallel_run))
    has_several_ranks = bool(parallel_run) and len(parallel_run[0]) > 1
    if not reference_run or not has_several_ranks:
        return unchanged

    whole_tensors = reference_run[0].merged("initial")
    concatenations, unknown_names = _find_parts(whole_tensors, parallel_run)
    if not concatenations and not unknown_names:
        return unchanged

    # Tensors that are in no model are buffers of an optimizer. If they cannot be joined, they are
    # dropped: the parameters of the models show whether they were right.
    dropped_names = {name for name in unknown_names if is_in_no_model(name)}
    whole_run = []
    for update in reference_run:
        whole_run.append(_reference_to_compare(update, concatenations.keys(), dropped_names))

    joined_run = []
    for update in parallel_run:
        joined_run.append(_with_joined_tensors(update, concatenations, dropped_names))

    joined_names = tuple(name for name in concatenations if not is_in_no_model(name))
    if joined_names:  # ranks that hold parts of one model are given the same samples
        joined_run = [_count_same_samples_once(update) for update in joined_run]

    unknown_of_models = [name for name in unknown_names if not is_in_no_model(name)]
    unknown = ""
    if unknown_of_models:
        unknown = _describe_different_tensors(unknown_of_models, whole_tensors, parallel_run[0])

    return JoinedRuns(whole_run, joined_run, joined_names, unknown)


def _describe_different_tensors(
    names: Sequence[str], whole_tensors: Mapping[str, Array], first_update: Update
) -> str:
    """Says for the user how tensors of the ranks differ from those of one process."""
    first_name = names[0]
    shapes = {rank.initial[first_name].shape for rank in first_update}
    shapes.add(whole_tensors[first_name].shape)
    how = "of other shapes than one process" if len(shapes) > 1 else "with other values"
    return f"the ranks hold different tensors, {how}: {format_items(script_names(names))}"


def _find_parts(
    whole_tensors: Mapping[str, Array], parallel_run: Sequence[Update]
) -> tuple[dict[str, _Concatenation], list[str]]:
    """Finds the tensors that the ranks hold in parts.

    Args:
        whole_tensors: the initial parameters of one process.
        parallel_run: the updates of several processes.

    Returns:
        For each tensor that can be joined, how; and the names of those that differ between the
        ranks by design and cannot be joined. Copies of one process's tensor are in neither.
    """
    concatenations: dict[str, _Concatenation] = {}
    unknown_names: list[str] = []
    first_update = parallel_run[0]
    for name in first_update.merged("initial"):
        all_ranks_have_it = all(name in rank.initial for rank in first_update)
        if name not in whole_tensors or not all_ranks_have_it:
            continue

        whole = whole_tensors[name]
        parts = [rank.initial[name] for rank in first_update]
        are_equal = all(np.array_equal(part, parts[0]) for part in parts)
        if are_equal and whole.shape == parts[0].shape:  # every rank has the whole tensor
            continue

        concatenation = _find_concatenation(parts, whole)
        if concatenation is not None:
            concatenations[name] = concatenation
            continue

        # Copies that differ by mistake are left to the comparison with one process.
        if _cannot_be_copies(name, parts, whole) or _differ_by_design(name, parallel_run):
            unknown_names.append(name)

    return concatenations, unknown_names


def _find_concatenation(parts: Sequence[Array], whole: Array) -> _Concatenation | None:
    """Finds the dimension in which the ranks' parts, one after the other, are the whole tensor.

    Returns:
        None if there is no such dimension.
    """
    if any(part.ndim != whole.ndim for part in parts):
        return None

    for dimension in range(whole.ndim):
        # In all other dimensions, a part must be as large as the whole tensor.
        other_sizes = _sizes_without(whole, dimension)
        if any(_sizes_without(part, dimension) != other_sizes for part in parts):
            continue

        size = whole.shape[dimension]
        padding = sum(part.shape[dimension] for part in parts) - size

        # A flat buffer may be padded until its size is divisible by the number of ranks.
        is_padded_buffer = whole.ndim == 1 and 0 < padding < len(parts)
        if padding != 0 and not is_padded_buffer:
            continue

        concatenation = _Concatenation(dimension, size)
        if np.array_equal(concatenation.join(parts), whole):
            return concatenation

    return None


def _sizes_without(array: Array, dimension: int) -> list[int]:
    """Returns the shape of an array without one of its dimensions."""
    sizes = list(array.shape)
    del sizes[dimension]
    return sizes


def _cannot_be_copies(name: str, parts: Sequence[Array], whole: Array) -> bool:
    """Returns whether the ranks' tensors cannot be meant as copies of the one process's tensor.

    Args:
        name: of the tensor.
        parts: the tensors of the ranks.
        whole: the tensor of one process.
    """
    if is_in_no_model(name):  # a buffer of an optimizer, which may differ on each rank
        return True
    return any(part.shape != whole.shape for part in parts)


def _differ_by_design(name: str, parallel_run: Sequence[Update]) -> bool:
    """Returns whether it is intended that the ranks hold different values in a tensor.

    Stages of a pipeline, experts and parts of a layer are meant to be different. Their ranks
    exchange what the models compute, and not gradients. Copies of one model may differ, too, but by
    mistake, because they began with different values.
    """
    # If the gradients of the tensor are averaged over the ranks, it is meant as a copy.
    for update in parallel_run:
        if any(call.gradient_of == name for call in update.calls):
            return False  # by a collective that the script calls

    if not all(name in rank.unwrapped for rank in parallel_run[0]):
        return False  # by DDP or Lockstep, which have wrapped the model

    for update in parallel_run:
        gradients = [rank.gradients[name] for rank in update if name in rank.gradients]
        all_ranks_have_it = len(gradients) == len(update)
        if all_ranks_have_it and all(np.array_equal(gradients[0], g) for g in gradients):
            return False  # by something else, since all ranks have the same

    # Ranks that exchange nothing at all train copies, and were meant to average something.
    return any(_ranks_exchange_outputs(update) for update in parallel_run)


def _ranks_exchange_outputs(update: Update) -> bool:
    """Returns whether ranks exchanged what a loss was computed from, before the backward pass.

    That a script gathers something proves nothing: losses that are only shown are gathered, too. An
    all-gather counts only if a loss was computed from what it returned.
    """
    # The lines of such all-gathers; "" if there was none.
    if update.first("gather_line") or update.first("detached_gather_line"):
        return True

    for call in update.calls:
        # `passes_before` is the number of backward passes that came before the call.
        is_before_backward = call.passes_before < update.backward_passes
        is_about_a_gradient = bool(call.gradient_of)  # the parameter's name, or empty
        if not is_before_backward or is_about_a_gradient:
            continue
        # `in_function`: the call is in an autograd function that has its own backward pass.
        if call.name in _SENDING_CALLS or call.in_function:
            return True

    return False


def _with_joined_tensors(
    update: Update, concatenations: Mapping[str, _Concatenation], dropped_names: set[str]
) -> Update:
    """Returns an update of the parallel run in which every rank has the joined tensors.

    Args:
        update: the update, with a part of each tensor on each rank.
        concatenations: how tensors are joined, by name.
        dropped_names: tensors that are left out.
    """
    whole_tensors: dict[str, dict[str, Array]] = {}  # by field and name
    for field_name in _TENSOR_FIELDS:
        whole_tensors[field_name] = {}

        for name, concatenation in concatenations.items():
            parts = []
            for rank in update:
                arrays = getattr(rank, field_name)
                if name in arrays:
                    parts.append(arrays[name])
            if len(parts) == len(update):  # every rank has recorded its part
                whole_tensors[field_name][name] = concatenation.join(parts)

    names = {*concatenations, *dropped_names}
    return Update(_with_tensors(rank, whole_tensors, names) for rank in update)


def _reference_to_compare(
    update: Update, joined_names: Iterable[str], dropped_names: set[str]
) -> Update:
    """Returns an update of the reference run with as much as `_with_joined_tensors` leaves.

    Both lose the dropped tensors, and all sums over the joined ones.

    Args:
        update: the update, whose tensors are whole already. If the reference trains several
            replicas, it has a `RankUpdate` for each of them.
        joined_names: tensors that were joined in the parallel run.
        dropped_names: tensors that are left out.
    """
    whole_tensors: dict[str, dict[str, Array]] = {}  # by field and name
    for field_name in _TENSOR_FIELDS:
        whole_tensors[field_name] = {}
        for name in joined_names:
            arrays = [getattr(rank, field_name).get(name) for rank in update]
            if all(array is not None for array in arrays):  # every replica has recorded it
                whole_tensors[field_name][name] = arrays[0]

    names = {*joined_names, *dropped_names}
    return Update(_with_tensors(rank, whole_tensors, names) for rank in update)


def _with_tensors(
    rank: RankUpdate, whole_tensors: Mapping[str, Mapping[str, Array]], names: set[str]
) -> RankUpdate:
    """Returns the record of a rank in which parts of tensors are replaced by whole ones.

    Args:
        rank: what the rank recorded.
        whole_tensors: the whole tensors, by field of `RankUpdate` and by name.
        names: of all tensors that are replaced. If there is no whole tensor in a field, the part is
            only left out.
    """
    fields: dict[str, Any] = {}
    for field_name in _TENSOR_FIELDS:
        arrays = getattr(rank, field_name)
        new_arrays = {name: array for name, array in arrays.items() if name not in names}
        for name in arrays:
            if name in whole_tensors[field_name]:
                new_arrays[name] = whole_tensors[field_name][name]
        fields[field_name] = new_arrays

    # The sums over a whole tensor cannot be computed from those over its parts.
    for field_name in _SUM_FIELDS:
        fields[field_name] = {}
        for name, sums in getattr(rank, field_name).items():
            # The state of an optimizer is named "PARAMETER/KEY", such as "Net/weight/exp_avg".
            parameter = name.rpartition("/")[0]
            if name not in names and parameter not in names:
                fields[field_name][name] = sums

    # The gradients that each backward pass left, before they were averaged.
    local_gradients = []
    for gradients in rank.local_gradients:
        local_gradients.append({n: array for n, array in gradients.items() if n not in names})

    return replace(rank, **fields, local_gradients=local_gradients)


def _count_same_samples_once(update: Update) -> Update:
    """Lets only the first rank contribute its samples and losses, if all have the same samples."""
    contents_of_first = [batch.contents for batch in update[0].batches]
    for rank in update:
        if [batch.contents for batch in rank.batches] != contents_of_first:
            return update
    others = [replace(rank, contributes=False) for rank in update[1:]]
    return Update([update[0], *others])
