"""Rules for models that return other outputs for the same inputs, and for BatchNorm.

A *rule* returns the `Cause` of a difference (`case`) between a run on one process and a run on
several ranks, or None if it does not apply. `case.expected` is the optimizer step on one process,
and `case.actual` the same step on the ranks: a `RankUpdate` (record) for each rank, with the fields
listed under "Needs". `merged(field)` merges the arrays of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.verify.cause import Cause, format_items, script_names
from lockstep.verify.divergence import Divergence
from lockstep.verify.line_findings import describe_writes
from lockstep.verify.names import path_of
from lockstep.verify.rules.draws import cause_if_loss_is_random, other_random_stream
from lockstep.verify.rules.evidence import format_backward_passes, gradient_patterns
from lockstep.verify.rules.model_inputs import format_differing_additional_inputs
from lockstep.verify.sample_rows import match_forwards
from lockstep.verify.tolerance import Array, largest_of_all
from lockstep.verify.training_record import LARGEST, SIZE

BATCHNORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def local_batchnorm(case: Divergence) -> Cause | None:
    """LS306: BatchNorm computed its statistics from each rank's own samples.

    Needs: `local_norm_layers`.
    Applies: if there is such a layer and more than one rank.
    False positives: the layer may be harmless, while something else is wrong.
    Evidence: which layers, whether they belong to a model that is not trained, and which gradients
        are wrong by which factors.
    """
    layers: set[str] = set()
    for record in case.actual:
        layers |= set(record.local_norm_layers)

    if not layers or case.num_ranks <= 1:
        return None

    # `frozen` has names of parameters. "Net/norm.weight" belongs to the layer "Net/norm". A layer
    # counts as frozen if any of its parameters is.
    frozen_layers = {name.rpartition(".")[0] for name in case.actual[0].frozen}
    all_are_frozen = layers <= frozen_layers
    kind = "BatchNorm layers"
    if all_are_frozen:
        kind = "BatchNorm layers of a model that is not trained"

    names = format_items(script_names(sorted(layers)))
    text = f"each rank computed from its own samples the statistics of {kind}: {names}"
    return Cause("LS306", (text, *_patterns_of_gradients(case)))


def batchnorm_in_other_passes(case: Divergence) -> Cause | None:
    """LS307: BatchNorm saw the samples in another number of forward passes.

    Needs: `buffers` with BatchNorm's running mean, and `losses`, one for each backward pass.
    Applies: if the number of backward passes differs from one process.
    False positives: a model whose BatchNorm layers are in evaluation mode.
    Evidence: the numbers of backward passes.
    """
    has_batchnorm = any(name.endswith("running_mean") for name in case.actual.merged("buffers"))
    if not has_batchnorm:
        return None
    if case.expected.num_backward_passes == case.actual.num_backward_passes:
        return None
    return Cause("LS307", (format_backward_passes(case), *_patterns_of_gradients(case)))


def _patterns_of_gradients(case: Divergence) -> tuple[str, ...]:
    """Says which gradients are wrong, unless the difference is in buffers."""
    if case.kind == "buffers":
        return ()
    return gradient_patterns(case)


def batchnorm_buffers(case: Divergence) -> Cause | None:
    """LS306 or LS307, if all buffers that differ belong to BatchNorm layers.

    LS306: the layers saw only each rank's own samples. LS307: they saw the samples in another
    number of forward passes.
    """
    if not all(name.endswith(BATCHNORM_BUFFERS) for name in case.names):
        return None
    return local_batchnorm(case) or batchnorm_in_other_passes(case)


def other_buffers(case: Divergence) -> Cause:
    """LS309: buffers that do not belong to BatchNorm layers differ after the step.

    Needs: `buffers`, and `write_stacks` for the evidence.
    Applies: always.
    False positives: buffers that are meant to be different on each rank.
    Evidence: which buffers, and the lines that wrote to them.
    """
    text = f"after the step: {format_items(script_names(case.names))}"
    return Cause("LS309", (text, *describe_writes(case, case.names)))


def later_inputs_of_model(case: Divergence) -> Cause | None:
    """LS111: the inputs of a model after its first input differ.

    Needs: `forwards` with inputs.
    Applies: if the outputs cannot be compared sample by sample. Otherwise, `other_inputs` has found
        such inputs already.
    False positives: none known. A state that was wrong after an earlier step is reported there.
    Evidence: for how many samples.
    """
    for forward in match_forwards(case.expected, case.actual):
        differing_inputs = forward.differing_rows("other_inputs")  # a bool for each sample
        if forward.matched_rows("outputs") is None and differing_inputs.any():
            return Cause("LS111", (format_differing_additional_inputs(forward, differing_inputs),))
    return None


def other_outputs(case: Divergence) -> Cause | None:
    """Names the cause of outputs that differ for the same inputs.

    - LS208: an output depends on other samples of the batch, which are on another rank.
    - LS309: the model keeps tensors that differ.
    - LS308 or LS106: random numbers were drawn (see `cause_if_loss_is_random` and
      `other_random_stream`).

    Needs: `forwards`; `model_with_coupled_samples` of one process, whose output for a sample
        depends on other samples; `module_tensors` and `buffers`; `loss_draws` and `random_streams`.
    Applies: to the first model with other outputs. LS208 requires that the ranks exchanged nothing
        before the backward pass.
    False positives: something else may be wrong in the model as well.
    Evidence: for how many inputs the output differs, and why.
    """
    for forward in match_forwards(case.expected, case.actual):
        differs = forward.differing_rows("outputs")  # a bool for each sample
        if not differs.any():
            continue

        sentence = (
            f"{forward.model}: for {differs.sum()} of {len(differs)} inputs it returned "
            "something else than on one process"
        )
        samples_are_coupled = bool(case.expected.first_on_any_rank("model_with_coupled_samples"))
        if samples_are_coupled and not _ranks_exchanged_tensors(case):
            text = "on one process its output for a sample depends on the others of the batch"
            why = "no rank exchanged anything in the forward pass"
            return Cause("LS208", (sentence, text, why))

        names = _kept_tensors_that_differ(case)
        if names:
            text = f"what the model keeps is not that of one process: {format_items(names)}"
            return Cause("LS309", (sentence, text))

        # The model itself may be random, like one with a noise layer.
        return cause_if_loss_is_random(case, sentence) or other_random_stream(case, sentence)

    return None


def _ranks_exchanged_tensors(case: Divergence) -> bool:
    """True if the ranks exchanged anything but gradients before the last backward pass."""
    num_passes = case.actual.num_backward_passes  # of the whole step
    for call in case.actual.calls:
        # `num_passes_before` is the number of backward passes of the step before the call. It is
        # smaller than the number of all passes if the call was made before the last pass.
        is_before_last_pass = call.num_passes_before < num_passes
        input_is_gradient = bool(call.gradient_of)
        if is_before_last_pass and not input_is_gradient:
            return True

    return False


def _kept_tensors_that_differ(case: Divergence) -> list[str]:
    """Returns the names of tensors that modules keep between steps and that are wrong on the ranks.

    These are buffers, and attributes that are tensors but neither parameters nor buffers. Names are
    without the model: "norm.running_mean" for "Net/norm.running_mean".
    """
    names = [
        *_wrong_module_tensors(case, "module_tensors_before"),  # before the first forward pass
        *_wrong_module_tensors(case, "module_tensors"),  # before the optimizer step
        *_wrong_buffers(case),  # after the optimizer step
    ]

    names_in_model = [path_of(name) or name for name in names]
    return list(dict.fromkeys(names_in_model))  # without duplicates


def _wrong_buffers(case: Divergence) -> list[str]:
    """Returns the names of buffers with the same shape as on one process, but other values.

    A buffer of another shape may rightly hold something for the samples of its rank, such as the
    last hidden state with one row for each sample.
    """
    expected_buffers = case.expected.merged("buffers")
    scale = largest_of_all(expected_buffers)

    wrong_names = []
    for name, expected in expected_buffers.items():
        actual = _arrays_of_ranks(case, "buffers", name)
        have_same_shape = all(array.shape == expected.shape for array in actual)
        if not have_same_shape:
            continue

        if any(case.tolerance.differ(expected, array, scale) for array in actual):
            wrong_names.append(name)

    return wrong_names


def _wrong_module_tensors(case: Divergence, field_name: str) -> list[str]:
    """Returns the names of module attributes that are tensors, but not buffers, and are wrong.

    Example: a module keeps `self.memory`, which has 8 values on one process.

    - If it has 8 values on each of 2 ranks, it should be equal to that of one process.
    - If it has 4 values on each rank, these should belong to the samples of the rank. It is wrong
      if both ranks have the same 4 values.

    Args:
        case: the difference.
        field_name: "module_tensors", or "module_tensors_before" the first forward pass.
    """
    # A summary has three numbers: the sum of a tensor, its largest value and its size.
    expected_summaries = case.expected.merged(field_name)
    scale = largest_of_all(expected_summaries)

    wrong_names = []
    for name, expected in expected_summaries.items():
        summaries = _arrays_of_ranks(case, field_name, name)
        each_rank_has_all = all(summary[SIZE] == expected[SIZE] for summary in summaries)
        if each_rank_has_all:
            is_wrong = any(case.tolerance.differ(expected, each, scale) for each in summaries)
        else:
            # Each rank has a part, and the ranks have different samples. So the same part on every
            # rank is wrong.
            is_wrong = _are_equal_parts(expected, summaries, case.num_ranks)

        if is_wrong:
            wrong_names.append(name)

    return wrong_names


def _arrays_of_ranks(case: Divergence, field_name: str, name: str) -> list[Array]:
    """Returns the array with this name of each rank that has one, from the given field."""
    arrays = []
    for record in case.actual:
        arrays_by_name = getattr(record, field_name)
        if name in arrays_by_name:
            arrays.append(arrays_by_name[name])
    return arrays


def _are_equal_parts(expected: Array, summaries: Sequence[Array], num_ranks: int) -> bool:
    """True if several of N ranks have 1/N of a tensor's values each, and all have the same values.

    For example, a cache has 8 values on one process, and the same 4 values on each of 2 ranks. The
    tensors themselves are not known: they are compared by their sum, largest value and size. Zeros
    are no proof, since a tensor may not have been filled yet.

    Args:
        expected: three numbers that stand for the tensor on one process: a sum, the largest
            absolute value (at index `LARGEST`), and the number of values (at index `SIZE`).
        summaries: the same three numbers for each rank that has the tensor; other ranks are
            ignored.
        num_ranks: number of ranks.
    """
    if len(summaries) < 2 or expected[SIZE] <= 0:
        return False

    are_parts = all(summary[SIZE] * num_ranks == expected[SIZE] for summary in summaries)
    are_equal = all(np.array_equal(summary, summaries[0]) for summary in summaries)
    are_zero = all(summary[LARGEST] == 0 for summary in summaries)
    return are_parts and are_equal and not are_zero
