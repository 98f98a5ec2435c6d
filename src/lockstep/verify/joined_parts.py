"""Joins tensors that the ranks hold in parts, so that they can be compared with one process.

Ranks may rightly hold different tensors: slices of a flat buffer for an optimizer of each rank's
own, parts of a layer (tensor parallelism), stages, experts. If the parts of all ranks together are
the tensor of one process, they are joined and compared as one. If not, nothing is known of them.
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
    """Returns whether a parameter is known only by its optimizer; its name begins with "/"."""
    return name.startswith("/")


@dataclass(frozen=True)
class JoinedRuns:
    """Two runs whose tensors are whole again."""

    reference_run: list[Update]
    parallel_run: list[Update]
    # Names of tensors of models that were joined from parts.
    joined_names: tuple[str, ...] = ()
    # Says which different tensors the ranks hold that cannot be joined; empty if there are none.
    unknown: str = ""


@dataclass(frozen=True)
class _Concatenation:
    """How parts make a tensor: one after the other in a dimension, cut to the tensor's size.

    A flat buffer may end with zeros that make its size divisible by the number of ranks.
    """

    dimension: int
    size: int

    def join(self, parts: Sequence[Array]) -> Array:
        """Returns the whole tensor."""
        concatenated = np.concatenate(parts, axis=self.dimension)
        whole: Array = concatenated.take(range(self.size), axis=self.dimension)
        return whole


def join_parts(reference_run: Sequence[Update], parallel_run: Sequence[Update]) -> JoinedRuns:
    """Joins the tensors of the parallel run that its ranks hold in parts.

    What is no part and yet differs between ranks by design, as the stages of a pipeline do, is
    named in `JoinedRuns.unknown`.
    """
    unchanged = JoinedRuns(list(reference_run), list(parallel_run))
    if not reference_run or not parallel_run or len(parallel_run[0]) < 2:
        return unchanged
    whole_tensors = reference_run[0].merged("initial")
    first_update = parallel_run[0]
    concatenations: dict[str, _Concatenation] = {}
    unknown_names: list[str] = []
    for name in first_update.merged("initial"):
        all_ranks_have_it = all(name in rank.initial for rank in first_update)
        if name not in whole_tensors or not all_ranks_have_it:
            continue
        whole = whole_tensors[name]
        parts = [rank.initial[name] for rank in first_update]
        are_copies = all(np.array_equal(part, parts[0]) for part in parts)
        if are_copies and whole.shape == parts[0].shape:  # every rank has the whole tensor
            continue
        concatenation = _find_concatenation(parts, whole)
        if concatenation is not None:
            concatenations[name] = concatenation
        elif _shapes_differ(name, parts, whole) or _differ_by_design(name, parallel_run):
            unknown_names.append(name)
    if not concatenations and not unknown_names:
        return unchanged

    dropped_names = {name for name in unknown_names if is_in_no_model(name)}
    joined_names = tuple(name for name in concatenations if not is_in_no_model(name))
    joined_run = [_with_joined(update, concatenations, dropped_names) for update in parallel_run]
    if joined_names:
        joined_run = [_count_same_samples_once(update) for update in joined_run]
    whole_run = [_with_whole(update, concatenations, dropped_names) for update in reference_run]
    unknown_of_models = [name for name in unknown_names if not is_in_no_model(name)]
    unknown = ""
    if unknown_of_models:
        first_name = unknown_of_models[0]
        shapes = {rank.initial[first_name].shape for rank in first_update}
        shapes.add(whole_tensors[first_name].shape)
        how = "of other shapes than one process" if len(shapes) > 1 else "with other values"
        names = format_items(script_names(unknown_of_models))
        unknown = f"the ranks hold different tensors, {how}: {names}"
    return JoinedRuns(whole_run, joined_run, joined_names, unknown)


def _find_concatenation(parts: Sequence[Array], whole: Array) -> _Concatenation | None:
    """Finds the dimension in which the ranks' parts, one after the other, are the whole tensor."""
    if any(part.ndim != whole.ndim for part in parts):
        return None
    for dimension in range(whole.ndim):
        other_sizes = _sizes_without(whole, dimension)
        if any(_sizes_without(part, dimension) != other_sizes for part in parts):
            continue
        size = whole.shape[dimension]
        padding = sum(part.shape[dimension] for part in parts) - size
        # A flat buffer is padded until its size is divisible by the number of ranks.
        may_be_padded = whole.ndim == 1 and 0 < padding < len(parts)
        if padding != 0 and not may_be_padded:
            continue
        concatenation = _Concatenation(dimension, size)
        if np.array_equal(concatenation.join(parts), whole):
            return concatenation
    return None


def _sizes_without(array: Array, dimension: int) -> list[int]:
    """Returns the sizes of all other dimensions."""
    sizes = list(array.shape)
    del sizes[dimension]
    return sizes


def _shapes_differ(name: str, parts: Sequence[Array], whole: Array) -> bool:
    """Returns whether the shapes alone say that the tensors are no copies of one process's.

    A tensor that only an optimizer has is a buffer of its own making, whatever its shape.
    """
    shapes = {part.shape for part in parts}
    return len(shapes) > 1 or is_in_no_model(name) or whole.shape not in shapes


def _differ_by_design(name: str, parallel_run: Sequence[Update]) -> bool:
    """Returns whether ranks keep values of their own in a tensor and exchange what they compute.

    Stages of a pipeline, experts and parts of a layer do so. Copies of a model that began with
    other values, by mistake, are in DDP, or their gradients are averaged, or the ranks exchange
    nothing.
    """
    for update in parallel_run:
        if any(call.gradient_of == name for call in update.calls):
            return False
    if not all(name in rank.unwrapped for rank in parallel_run[0]):
        return False
    for update in parallel_run:
        gradients = [rank.gradients[name] for rank in update if name in rank.gradients]
        all_ranks_have_it = len(gradients) == len(update)
        if all_ranks_have_it and all(np.array_equal(gradients[0], g) for g in gradients):
            return False
    return any(_ranks_exchange_outputs(update) for update in parallel_run)


def _ranks_exchange_outputs(update: Update) -> bool:
    """Returns whether ranks exchanged what a loss was computed from, before the backward pass.

    What is only shown, such as the losses of all ranks, is gathered too, but no loss is computed
    from it.
    """
    if update.first("gather_line") or update.first("detached_gather_line"):
        return True
    num_passes = update.backward_passes
    for call in update.calls:
        is_before_backward = call.passes_before < num_passes and not call.gradient_of
        if is_before_backward and (call.name in _SENDING_CALLS or call.in_function):
            return True
    return False


def _with_joined(
    update: Update, concatenations: Mapping[str, _Concatenation], dropped_names: set[str]
) -> Update:
    """Returns an update of the parallel run with joined tensors, without those that are dropped."""
    whole_tensors: dict[str, dict[str, Array]] = {}
    for field_name in _TENSOR_FIELDS:
        whole_tensors[field_name] = {}
        for name, concatenation in concatenations.items():
            parts = []
            for rank in update:
                arrays = getattr(rank, field_name)
                if name in arrays:
                    parts.append(arrays[name])
            if len(parts) == len(update):
                whole_tensors[field_name][name] = concatenation.join(parts)
    names = {*concatenations, *dropped_names}
    return Update(_with_tensors(rank, whole_tensors, names) for rank in update)


def _with_whole(update: Update, concatenations: Iterable[str], dropped_names: set[str]) -> Update:
    """Returns an update of the reference run without what cannot be compared with joined tensors.

    Its tensors are whole already, if all replicas have them.
    """
    whole_tensors: dict[str, dict[str, Array]] = {}
    for field_name in _TENSOR_FIELDS:
        whole_tensors[field_name] = {}
        for name in concatenations:
            arrays = [getattr(rank, field_name).get(name) for rank in update]
            if all(array is not None for array in arrays):
                whole_tensors[field_name][name] = arrays[0]
    names = {*concatenations, *dropped_names}
    return Update(_with_tensors(rank, whole_tensors, names) for rank in update)


def _with_tensors(
    rank: RankUpdate, whole_tensors: Mapping[str, Mapping[str, Array]], names: set[str]
) -> RankUpdate:
    """Replaces the tensors with these names, or leaves them out where there are no whole ones.

    Args:
        rank: what one rank recorded.
        whole_tensors: by field and name.
        names: of all tensors that are replaced or left out.
    """
    fields: dict[str, Any] = {}
    for field_name in _TENSOR_FIELDS:
        arrays = getattr(rank, field_name)
        kept = {name: array for name, array in arrays.items() if name not in names}
        for name in arrays:
            if name in whole_tensors[field_name]:
                kept[name] = whole_tensors[field_name][name]
        fields[field_name] = kept
    for field_name in _SUM_FIELDS:
        fields[field_name] = {}
        for name, sums in getattr(rank, field_name).items():
            # State of an optimizer is named "PARAMETER/KEY".
            parameter = name.rpartition("/")[0]
            if name not in names and parameter not in names:
                fields[field_name][name] = sums
    local_gradients = []
    for gradients in rank.local_gradients:
        local_gradients.append({n: array for n, array in gradients.items() if n not in names})
    return replace(rank, **fields, local_gradients=local_gradients)


def _count_same_samples_once(update: Update) -> Update:
    """Leaves out the samples of all ranks but the first, if all ranks have the same ones.

    Ranks that hold parts of one model are given the same samples.
    """
    contents_of_first = [batch.contents for batch in update[0].batches]
    for rank in update:
        if [batch.contents for batch in rank.batches] != contents_of_first:
            return update
    return Update([update[0], *(replace(rank, contributes=False) for rank in update[1:])])
