"""Rules for models that return something else for the same inputs, and for BatchNorm.

A *rule* returns the `Cause` of a difference, or None. `case` is the difference between a run on one
process and one on several: `case.expected` is what the optimizer step recorded on one process,
`case.actual` what each rank recorded. "Needs" names those fields of `RankUpdate`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.verify.cause import Cause, format_items, script_names
from lockstep.verify.compare import Divergence
from lockstep.verify.line_findings import describe_writes
from lockstep.verify.rules.draws import other_random_stream, random_loss
from lockstep.verify.rules.evidence import backward_passes, gradient_patterns
from lockstep.verify.rules.model_inputs import format_differing_other_inputs
from lockstep.verify.sample_rows import match_forwards
from lockstep.verify.tolerance import Array, scale_of
from lockstep.verify.training_record import LARGEST

BATCHNORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def local_batchnorm(case: Divergence) -> Cause | None:
    """LS306: BatchNorm computed its statistics from each rank's own samples.

    Needs: `local_norm_layers`.
    Applies: if there is such a layer and more than one rank.
    Looks the same: the layers are there for certain, but something else may be wrong as well.
    Says: which layers, and whether they belong to a model that is not trained.
    """
    layers: set[str] = set()
    for rank in case.actual:
        layers |= set(rank.local_norm_layers)
    if not layers or case.num_ranks <= 1:
        return None
    modules_with_frozen_parameters = {name.rpartition(".")[0] for name in case.actual[0].frozen}
    kind = "BatchNorm layers"
    if layers <= modules_with_frozen_parameters:
        kind = "BatchNorm layers of a model that is not trained"
    names = format_items(script_names(sorted(layers)))
    text = f"each rank's part alone gave the statistics of {kind}: {names}"
    return Cause("LS306", (text, *_patterns_of_gradients(case)))


def batchnorm_in_other_passes(case: Divergence) -> Cause | None:
    """LS307: BatchNorm saw the samples in another number of forward passes.

    Needs: `buffers` with BatchNorm's running mean, and `losses`, one for each backward pass.
    Applies: if the number of backward passes is not that of one process.
    Looks the same: a model whose BatchNorm is in evaluation mode.
    Says: the numbers of backward passes.
    """
    has_batchnorm = any(name.endswith("running_mean") for name in case.actual.merged("buffers"))
    if not has_batchnorm:
        return None
    if case.expected.backward_passes == case.actual.backward_passes:
        return None
    return Cause("LS307", (backward_passes(case), *_patterns_of_gradients(case)))


def _patterns_of_gradients(case: Divergence) -> tuple[str, ...]:
    """Says which gradients are wrong, unless it is the buffers that differ."""
    if case.kind == "buffers":
        return ()
    return gradient_patterns(case)


def batchnorm_buffers(case: Divergence) -> Cause | None:
    """LS306 or LS307, if all buffers that differ are BatchNorm's.

    Needs, Applies, Looks the same, Says: see `local_batchnorm` and `batchnorm_in_other_passes`.
    """
    if not all(name.endswith(BATCHNORM_BUFFERS) for name in case.names):
        return None
    return local_batchnorm(case) or batchnorm_in_other_passes(case)


def other_buffers(case: Divergence) -> Cause:
    """LS309: buffers that are not BatchNorm's differ after the step.

    Needs: `buffers`, and `write_stacks` for the evidence.
    Applies: always.
    Looks the same: buffers that are meant to be different on each rank.
    Says: which buffers, and the lines that wrote to them.
    """
    text = f"after the step: {format_items(script_names(case.names))}"
    return Cause("LS309", (text, *describe_writes(case, case.names)))


def later_inputs_of_model(case: Divergence) -> Cause | None:
    """LS111: what a model was given besides its first input differs.

    Needs: `forwards` with inputs.
    Applies: if the outputs cannot be compared sample by sample. If they can, `other_inputs` has
        found such inputs already.
    Looks the same: a hidden state that is wrong because an earlier step was; then it differs there.
    Says: for how many samples.
    """
    for forward in match_forwards(case.expected, case.actual):
        differing_inputs = forward.differing_rows("other_inputs")
        if forward.matched_rows("outputs") is None and differing_inputs.any():
            return Cause("LS111", (format_differing_other_inputs(forward, differing_inputs),))
    return None


def other_outputs(case: Divergence) -> Cause | None:
    """Names the cause of outputs that differ for the same inputs.

    LS208: an output depends on the other samples of the batch, which another rank has. LS309: the
    model keeps tensors that differ. LS308, LS106: random numbers were drawn.

    Needs: `forwards`; `coupling_model` of one process, in which an output follows from other
        samples; `module_tensors` and `buffers`; draws.
    Applies: to the first model with other outputs. LS208 needs ranks that exchanged nothing before
        the backward pass.
    Looks the same: something else may be wrong in the model as well.
    Says: for how many inputs the output differs, and why.
    """
    for forward in match_forwards(case.expected, case.actual):
        differs = forward.differing_rows("outputs")
        if not differs.any():
            continue
        sentence = (
            f"{forward.model}: for {differs.sum()} of {len(differs)} inputs it returned "
            "something else than on one process"
        )
        if case.expected.first("coupling_model") and not _ranks_exchanged_tensors(case):
            text = "on one process its output for a sample follows from the others of the batch"
            why = "no rank exchanged anything in the forward pass"
            return Cause("LS208", (sentence, text, why))
        names = _kept_tensors_that_differ(case)
        if names:
            text = f"what the model keeps is not that of one process: {format_items(names)}"
            return Cause("LS309", (sentence, text))
        return random_loss(case, sentence) or other_random_stream(case, sentence)
    return None


def _ranks_exchanged_tensors(case: Divergence) -> bool:
    """Returns whether a collective on something else than a gradient preceded a backward pass."""
    num_passes = case.actual.backward_passes
    for call in case.actual.calls:
        if call.passes_before < num_passes and not call.gradient_of:
            return True
    return False


def _kept_tensors_that_differ(case: Divergence) -> list[str]:
    """Returns names of buffers and other tensors of modules that differ from one process."""
    names: dict[str, None] = {}
    for field_name in ("module_tensors_before", "module_tensors", "buffers"):
        expected_arrays = case.expected.merged(field_name)
        scale = scale_of(expected_arrays)
        for name, expected in expected_arrays.items():
            arrays = []
            for rank in case.actual:
                if name in getattr(rank, field_name):
                    arrays.append(getattr(rank, field_name)[name])
            has_size = field_name != "buffers"  # buffers are recorded themselves, others as sums
            same_size = _have_size_of(expected, arrays, has_size)
            differs = any(case.tolerance.differ(expected, array, scale) for array in arrays)
            is_wrong_part = (
                has_size and case.num_ranks > 1 and _are_equal_parts(expected, arrays, case)
            )
            if (same_size and differs) or is_wrong_part:
                names[name.partition("/")[2] or name] = None
    return list(names)


def _have_size_of(expected: Array, arrays: Sequence[Array], has_size: bool) -> bool:
    """Returns whether tensors have the size of one process.

    Args:
        expected: of one process.
        arrays: of the ranks that have the tensor.
        has_size: whether the arrays are sums with the tensor's size at the end.
    """
    for array in arrays:
        if array.shape != expected.shape:
            return False
        if has_size and array[-1] != expected[-1]:
            return False
    return True


def _are_equal_parts(expected: Array, arrays: Sequence[Array], case: Divergence) -> bool:
    """Returns whether each rank has a part of a tensor, for its samples, and all parts are equal.

    Ranks with other samples should have other values in it, so these are not computed from them.
    Zeros say nothing.

    Args:
        expected: sums over the tensor of one process, with its size at the end.
        arrays: the same of the ranks that have the tensor.
        case: the difference.
    """
    for array in arrays:
        if expected[-1] <= 0 or array[-1] * case.num_ranks != expected[-1]:
            return False
    if len(arrays) < 2 or arrays[0][LARGEST] == 0:
        return False
    spread = np.ptp(arrays, axis=0)  # of each of the sums over the ranks
    return not spread.any()
