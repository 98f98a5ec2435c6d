"""Joins tensors that are split over the ranks, so that they can be compared with one process.

The ranks may rightly hold different tensors: slices of an optimizer's flat buffer, parts of a layer
(tensor parallelism), stages of a pipeline, experts. If the *parts* of all ranks, concatenated, are
the tensor of one process, they are joined; otherwise, they cannot be compared. A run is a list of
`Update`s (optimizer steps), which hold a `RankUpdate` of every rank with its tensors by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lockstep.verify.cause import format_items, script_names
from lockstep.verify.tolerance import Array
from lockstep.verify.training_record import RankUpdate, ScriptCall, Update

# Fields of `RankUpdate` with values of tensors, whose parts can be joined.
_TENSOR_FIELDS = (
    "initial",
    "gradients",
    "reduced_in_step",
    "unclipped",
    "parameters",
    "rewritten_parameters",
)

# Fields with sums over tensors. The sums over a whole tensor do not follow from those over parts.
_SUM_FIELDS = ("parameter_sums", "changed_between_passes", "optimizer_state")

# Calls with which ranks send each other their results.
_SENDING_CALLS = {"send", "recv", "isend", "irecv", "all_to_all", "all_to_all_single"}


def belongs_only_to_optimizer(name: str) -> bool:
    """True if a parameter belongs to no model, but only to an optimizer.

    Its name is, for example, "/parameter 1 of optimizer 1". Parameters of models have names such as
    "Net/weight".
    """
    return name.startswith("/")


@dataclass(frozen=True)
class JoinedRuns:
    """Two runs in which split tensors are joined."""

    reference_run: list[Update]
    parallel_run: list[Update]
    # Names of the models' tensors that were joined.
    joined_names: tuple[str, ...] = ()
    # Tells the user which tensors differ between the ranks by design and cannot be joined; empty if
    # there are none.
    unjoinable_tensors_text: str = ""


@dataclass(frozen=True)
class _Concatenation:
    """How a tensor is split over the ranks: its parts are concatenated along one dimension."""

    dimension: int
    # Size of the whole tensor in this dimension.
    size: int

    def join(self, parts: Sequence[Array]) -> Array:
        """Concatenates the parts, and removes the padding that may be at the end."""
        concatenated = np.concatenate(parts, axis=self.dimension)
        whole: Array = concatenated.take(range(self.size), axis=self.dimension)
        return whole


def join_parts(reference_run: Sequence[Update], parallel_run: Sequence[Update]) -> JoinedRuns:
    """Joins the tensors of the parallel run that are split over its ranks.

    How a tensor is split is found by comparing the parameters before the first update.

    Args:
        reference_run: updates of the run on one process.
        parallel_run: updates of the run on several processes.

    Returns:
        Both runs, with whole tensors on every rank. `unjoinable_tensors_text` names tensors that
        differ between the ranks by design but are no parts, such as those of pipeline stages.
    """
    unchanged = JoinedRuns(list(reference_run), list(parallel_run))
    has_several_ranks = bool(parallel_run) and len(parallel_run[0]) > 1
    if not reference_run or not has_several_ranks:
        return unchanged

    # The parameters of one process before its first update.
    whole_tensors = reference_run[0].merged("initial")
    concatenations, unjoinable_names = _find_parts(whole_tensors, parallel_run)
    if not concatenations and not unjoinable_names:
        return unchanged

    # Tensors that only an optimizer has are its buffers. If they cannot be joined, they are
    # removed: the parameters of the models show whether the optimizer was right.
    removed_names = {name for name in unjoinable_names if belongs_only_to_optimizer(name)}

    joined_run = []
    for update in parallel_run:
        joined_run.append(_with_joined_tensors(update, concatenations, removed_names))

    # The reference run has whole tensors already, but must have the same values as `joined_run`.
    whole_run = []
    for update in reference_run:
        whole_run.append(
            _without_values_lost_by_joining(update, concatenations.keys(), removed_names)
        )

    # Ranks that hold parts of one model are given the same samples.
    joined_names_of_models = [n for n in concatenations if not belongs_only_to_optimizer(n)]
    if joined_names_of_models:
        joined_run = [_count_same_samples_once(update) for update in joined_run]

    # Tensors of models that cannot be joined are reported to the user.
    unjoinable_tensors_text = ""
    unjoinable_names_of_models = [n for n in unjoinable_names if not belongs_only_to_optimizer(n)]
    if unjoinable_names_of_models:
        unjoinable_tensors_text = _describe_different_tensors(
            unjoinable_names_of_models, whole_tensors, parallel_run[0]
        )

    return JoinedRuns(whole_run, joined_run, tuple(joined_names_of_models), unjoinable_tensors_text)


def _describe_different_tensors(
    names: Sequence[str], whole_tensors: Mapping[str, Array], first_update: Update
) -> str:
    """Tells the user how the tensors of the ranks differ from those of one process.

    Args:
        names: names of the tensors.
        whole_tensors: initial parameters of one process, by name.
        first_update: first update of the parallel run.
    """
    # There is one text for all tensors. It depends on the shapes of the first of them.
    first_name = names[0]
    whole_shape = whole_tensors[first_name].shape
    shapes_differ = any(record.initial[first_name].shape != whole_shape for record in first_update)
    how = "of different shapes than one process" if shapes_differ else "with other values"
    return f"the ranks hold different tensors, {how}: {format_items(script_names(names))}"


def _find_parts(
    whole_tensors: Mapping[str, Array], parallel_run: Sequence[Update]
) -> tuple[dict[str, _Concatenation], list[str]]:
    """Finds the tensors that are split over the ranks.

    Args:
        whole_tensors: initial parameters of one process, by name.
        parallel_run: updates of the run on several processes.

    Returns:
        How each split tensor can be joined, by name; and the names of tensors that differ between
        the ranks by design but cannot be joined. Tensors that each rank has as a whole are left
        out: if the copies of the ranks differ by mistake, the comparison with one process will
        report that.
    """
    concatenations: dict[str, _Concatenation] = {}
    unjoinable_names: list[str] = []
    first_update = parallel_run[0]

    for name in first_update.merged("initial"):
        all_ranks_have_it = all(name in record.initial for record in first_update)
        if name not in whole_tensors or not all_ranks_have_it:
            continue

        whole = whole_tensors[name]
        parts = [record.initial[name] for record in first_update]
        if _are_equal_copies(parts, whole.shape):
            continue

        concatenation = _find_concatenation(parts, whole)
        if concatenation is not None:
            concatenations[name] = concatenation
        elif _cannot_be_copies(name, parts, whole) or _differ_by_design(name, parallel_run):
            unjoinable_names.append(name)

    return concatenations, unjoinable_names


def _are_equal_copies(parts: Sequence[Array], shape_of_whole: tuple[int, ...]) -> bool:
    """True if all ranks have the same whole tensor, perhaps with other values than one process."""
    are_equal = all(np.array_equal(part, parts[0]) for part in parts)
    return are_equal and parts[0].shape == shape_of_whole


def _find_concatenation(parts: Sequence[Array], whole: Array) -> _Concatenation | None:
    """Finds the dimension along which the parts of all ranks form the whole tensor.

    Returns:
        The dimension and size, or None if there is no such dimension.
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
    """Returns the shape of an array without one dimension: [2, 4] for [2, 3, 4] and 1."""
    sizes = list(array.shape)
    del sizes[dimension]
    return sizes


def _cannot_be_copies(name: str, parts: Sequence[Array], whole: Array) -> bool:
    """True if the tensors of the ranks cannot be copies of the tensor of one process.

    Args:
        name: name of the tensor.
        parts: tensors of the ranks.
        whole: tensor of one process.
    """
    # A buffer of an optimizer may be different on each rank.
    if belongs_only_to_optimizer(name):
        return True
    return any(part.shape != whole.shape for part in parts)


def _differ_by_design(name: str, parallel_run: Sequence[Update]) -> bool:
    """True if a tensor is meant to have different values on each rank.

    Stages of a pipeline, experts and parts of a layer are different by design; their ranks exchange
    outputs or activations, and not gradients. Copies of one model may differ too, but by mistake,
    because they started with different values.
    """
    # A collective that the script calls averages the gradients, so the tensors are copies.
    for update in parallel_run:
        if any(call.gradient_of == name for call in update.calls):
            return False

    # DDP or Lockstep has wrapped the model of this tensor, and averages its gradients.
    for record in parallel_run[0]:
        is_wrapped = name not in record.unwrapped_parameters
        if is_wrapped:
            return False

    # All ranks have the same gradients, so something averages them.
    for update in parallel_run:
        gradients = [record.gradients[name] for record in update if name in record.gradients]
        all_ranks_have_it = len(gradients) == len(update)
        if all_ranks_have_it and all(np.array_equal(gradients[0], g) for g in gradients):
            return False

    # Nothing averages the gradients. If the ranks exchange outputs, the tensors are parts of one
    # model. Otherwise, they are copies whose gradients the script forgets to average.
    return any(_ranks_exchange_outputs(update) for update in parallel_run)


def _ranks_exchange_outputs(update: Update) -> bool:
    """True if the ranks exchange model outputs or activations that a loss is computed from."""
    # The recorder has noted the line of an all-gather whose result went into a loss, with or
    # without a gradient. (Other all-gathers are no proof: scripts gather losses to display them.)
    gathers_for_loss = bool(
        update.first_on_any_rank("gather_line") or update.first_on_any_rank("detached_gather_line")
    )
    if gathers_for_loss:
        return True

    # After the last backward pass of the update, the ranks exchange something else than outputs,
    # such as metrics.
    for call in update.calls:
        is_before_last_pass = call.num_passes_before < update.num_backward_passes
        if is_before_last_pass and _exchanges_activations(call):
            return True

    return False


def _exchanges_activations(call: ScriptCall) -> bool:
    """True if a collective exchanges activations, from which the loss is computed, in some way."""
    exchanges_gradients = bool(call.gradient_of)
    if exchanges_gradients:
        return False

    # These calls move activations from one rank to another, as between pipeline stages. And if the
    # `forward` of a `torch.autograd.Function` makes a call, then its `backward` sends gradients
    # back, so the exchanged tensors are part of the computation of the loss.
    return call.name in _SENDING_CALLS or call.in_autograd_function


def _with_joined_tensors(
    update: Update, concatenations: Mapping[str, _Concatenation], removed_names: set[str]
) -> Update:
    """Returns an update of the parallel run in which every rank has the joined tensors.

    Args:
        update: the update, with a part of each tensor on each rank.
        concatenations: how each split tensor is joined, by name.
        removed_names: names of tensors that cannot be joined and are removed.
    """
    # Join the parts in each field, such as "gradients", in which every rank has recorded its part.
    whole_tensors: dict[str, dict[str, Array]] = {}  # by field and name
    for field_name in _TENSOR_FIELDS:
        whole_tensors[field_name] = {}
        arrays_of_ranks = [getattr(record, field_name) for record in update]
        for name, concatenation in concatenations.items():
            if all(name in arrays for arrays in arrays_of_ranks):
                parts = [arrays[name] for arrays in arrays_of_ranks]
                whole_tensors[field_name][name] = concatenation.join(parts)

    # The parts are removed from all fields. Where a whole tensor is known, it takes their place.
    split_names = {*concatenations, *removed_names}
    return Update(_replace_split_tensors(record, split_names, whole_tensors) for record in update)


def _without_values_lost_by_joining(
    update: Update, joined_names: Iterable[str], removed_names: set[str]
) -> Update:
    """Returns an update of the reference run without values that the parallel run has lost.

    For example, "Net/weight" was joined and "Net/bias" could not be. The parallel run then has no
    values of "Net/bias". It also has no sums over either tensor, as the sums over "Net/weight"
    cannot be computed from those over its parts:

        gradients={"Net/weight": w, "Net/bias": b}       ->  gradients={"Net/weight": w}
        parameter_sums={"Net/weight": s, "Net/bias": t}  ->  parameter_sums={}

    Args:
        update: the update, whose tensors are whole already. It has one `RankUpdate`, or several if
            one process trains several replicas of the model.
        joined_names: names of tensors that were joined in the parallel run.
        removed_names: names of tensors that could not be joined.
    """
    # The joined tensors, by field and name. All replicas get those of the first one, as all ranks
    # of the parallel run have the same joined tensors.
    kept_tensors: dict[str, dict[str, Array]] = {}
    for field_name in _TENSOR_FIELDS:
        kept_tensors[field_name] = {}
        arrays_of_replicas = [getattr(record, field_name) for record in update]
        for name in joined_names:
            if all(name in arrays for arrays in arrays_of_replicas):
                kept_tensors[field_name][name] = arrays_of_replicas[0][name]

    # Values of split tensors are removed from each field, except for those in `kept_tensors`.
    split_names = {*joined_names, *removed_names}
    return Update(_replace_split_tensors(record, split_names, kept_tensors) for record in update)


def _replace_split_tensors(
    record: RankUpdate,
    split_names: set[str],
    whole_tensors: Mapping[str, Mapping[str, Array]],
) -> RankUpdate:
    """Returns the record of a rank in which split tensors are replaced by whole ones, or removed.

    Args:
        record: record of the rank.
        split_names: names of the tensors that are split over the ranks. The sums over them and
            their local gradients are always removed.
        whole_tensors: whole tensors by field of `RankUpdate` and by name, such as
            `{"gradients": {"Net/weight": array}}`. A split tensor that is missing in a field here
            is removed from that field of the record.
    """
    fields: dict[str, Any] = {}
    for field_name in _TENSOR_FIELDS:
        arrays = getattr(record, field_name)
        whole_arrays = whole_tensors[field_name]
        joined = {name: whole_arrays[name] for name in arrays if name in whole_arrays}
        fields[field_name] = {**_without(split_names, arrays), **joined}

    # The sums over a whole tensor do not follow from those over its parts.
    for field_name in _SUM_FIELDS:
        fields[field_name] = {}
        for name, sums in getattr(record, field_name).items():
            if _tensor_of(name, field_name) not in split_names:
                fields[field_name][name] = sums

    # Gradients of single backward passes, before they were averaged.
    local_gradients = [_without(split_names, arrays) for arrays in record.local_gradients]

    return replace(record, **fields, local_gradients=local_gradients)


def _without(names: set[str], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the arrays, by name, without those with the given names."""
    return {name: array for name, array in arrays.items() if name not in names}


def _tensor_of(name: str, field_name: str) -> str:
    """Returns the name of the tensor that a sum in a field of `RankUpdate` belongs to.

    Sums over optimizer state have names such as "Net/weight/exp_avg", which belong to the parameter
    "Net/weight". In all other fields, the name is that of the tensor.
    """
    if field_name == "optimizer_state":
        return name.rpartition("/")[0]
    return name


def _count_same_samples_once(update: Update) -> Update:
    """Returns an update in which only the first rank contributes samples and losses.

    An update whose ranks have different samples is returned unchanged.
    """
    # `contents` holds a digest of each sample, so equal contents mean the same samples.
    contents_of_first_rank = [batch.contents for batch in update[0].batches]
    for record in update:
        if [batch.contents for batch in record.batches] != contents_of_first_rank:
            return update

    other_ranks = [replace(record, contributes=False) for record in update[1:]]
    return Update([update[0], *other_ranks])
