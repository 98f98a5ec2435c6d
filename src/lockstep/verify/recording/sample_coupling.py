"""Finds losses and models in which one sample influences another sample of its batch.

Such a loss (a contrastive one, a batch normalization) gives other numbers on several processes,
as each sees a part of the batch. It is found by derivatives: the samples are split into two groups
by one bit of their number, for each bit in turn. If a weighted sum over the outputs of one group
has a gradient by inputs of the other group, samples are *coupled*. Any two samples differ in some
bit, so log2(samples) splits are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

MAX_VALUES = 10_000_000
"""Larger outputs are not differentiated: it would take too long."""
MIN_RELATIVE_GRADIENT = 1e-9
"""A gradient below this share of the largest one is rounding."""
DISTANCE_NODES = ("CdistBackward0", "EuclideanDistBackward0", "PdistBackward0")
"""Autograd nodes that torch cannot differentiate twice, or not where a distance is zero."""


def compares_samples(loss: Tensor, outputs: Sequence[Tensor], samples: int) -> bool:
    """True if the loss's gradient by one sample's output depends on another sample's output.

    This takes second derivatives. A dependence that does not change with small changes of the
    outputs (the order in which samples are sorted, a detached weight) has none and is not found.
    Neither is one that torch cannot differentiate twice, except for distances between outputs.

    Args:
        loss: a scalar.
        outputs: what the models returned.
        samples: number of samples.
    """
    if samples <= 1 or not loss.requires_grad:
        return False

    # A contrastive model may compute two views of each sample in one call, and return one row for
    # each view. An output with more rows, such as one for each token, is left out: which rows
    # belong to which sample is not known.
    possible_rows = (samples, 2 * samples)
    outputs = [t for t in _final_outputs(outputs) if t.dim() > 0 and len(t) in possible_rows]
    if not outputs or sum(t.numel() for t in outputs) > MAX_VALUES:
        return False

    # torch raises RuntimeError for a function without a second derivative.
    with suppress(RuntimeError):
        gradients = torch.autograd.grad(loss, outputs, create_graph=True, materialize_grads=True)
        if _samples_are_coupled(gradients, outputs, samples):
            return True

    return _measures_distances(loss, outputs)


def couples_samples(outputs: Sequence[Tensor], hidden: Tensor) -> bool:
    """True if one sample's output depends on another sample's hidden activation.

    Args:
        outputs: what the model returned.
        hidden: what a part of the model returned, with one row for each sample.
    """
    if len(hidden) < 2:
        return False

    outputs = [t for t in outputs if t.dim() > 0 and len(t) == len(hidden)]
    if not outputs or any(t is hidden for t in outputs):  # nothing is computed from the activation
        return False
    if sum(t.numel() for t in (*outputs, hidden)) > MAX_VALUES:
        return False

    # torch raises RuntimeError for what it cannot differentiate; then it is not known.
    with suppress(RuntimeError):
        return _samples_are_coupled(outputs, [hidden], len(hidden))

    return False


def _samples_are_coupled(
    results: Sequence[Tensor], sources: Sequence[Tensor], samples: int
) -> bool:
    """True if rows of the results depend on rows of other samples in the sources.

    Args:
        results: tensors that were computed from the sources.
        sources: tensors; these and the results have one row, or several, for each sample.
        samples: number of samples.
    """
    # Different weights for all values, so that their dependences do not cancel out in a sum.
    weights = [torch.arange(t.numel(), device=t.device).cos().view_as(t) for t in results]
    # For each row of a tensor, the number of its sample.
    result_samples = [_sample_of_row(t, samples) for t in results]
    source_samples = [_sample_of_row(t, samples) for t in sources]
    for bit in range((samples - 1).bit_length()):  # the bits of the largest number
        # A weighted sum over the results of all samples whose number has this bit.
        weighted_sum = torch.zeros(())
        for result, weight, sample in zip(results, weights, result_samples, strict=True):
            has_bit = (sample >> bit) & 1 == 1
            weighted_sum = (result * weight)[has_bit].sum() + weighted_sum

        gradients = torch.autograd.grad(
            weighted_sum, sources, retain_graph=True, materialize_grads=True
        )
        largest = max(float(gradient.abs().max()) for gradient in gradients)
        if largest == 0:  # this sum depends on nothing
            continue

        # If it has a gradient by a sample whose number lacks this bit, the samples are coupled.
        for gradient, sample in zip(gradients, source_samples, strict=True):
            lacks_bit = (sample >> bit) & 1 == 0
            if bool((gradient[lacks_bit].abs() > MIN_RELATIVE_GRADIENT * largest).any()):
                return True

    return False


def _sample_of_row(tensor: Tensor, samples: int) -> Tensor:
    """Returns the number of the sample that each row belongs to.

    With two views of three samples the numbers are 0, 1, 2, 0, 1, 2: all first views come first.
    """
    return torch.arange(len(tensor), device=tensor.device) % samples


def _measures_distances(loss: Tensor, outputs: Sequence[Tensor]) -> bool:
    """True if `torch.cdist` or `pdist` between outputs is part of the loss."""
    output_nodes = {output.grad_fn for output in outputs}  # of the autograd graph
    for node in nodes_behind(loss.grad_fn):
        if node.name() not in DISTANCE_NODES:
            continue
        # All arguments of a distance must come from the models. An output's distance to a constant
        # does not compare samples.
        arguments = [argument for argument, _ in node.next_functions]
        are_from_models = [bool(output_nodes & nodes_behind(argument)) for argument in arguments]
        if all(are_from_models):
            return True

    return False


def nodes_behind(*nodes: Any) -> set[Any]:
    """Returns all nodes of the autograd graph that these come from, and these themselves.

    Args:
        *nodes: such as `loss.grad_fn`; None of a tensor that carries no gradient.
    """
    reached = set()
    nodes_to_visit = list(nodes)
    while nodes_to_visit:
        node = nodes_to_visit.pop()
        if node is None or node in reached:
            continue
        reached.add(node)
        # The nodes of its arguments.
        nodes_to_visit += [argument for argument, _ in node.next_functions]

    return reached


def _final_outputs(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the outputs from which no other output is made.

    If one model is called with the output of another, only the last output is what the loss
    compares samples by.
    """
    arguments: list[Any] = []  # nodes that some output is made from
    for output in outputs:
        if output.grad_fn is not None:
            arguments += [argument for argument, _ in output.grad_fn.next_functions]
    inner_nodes = nodes_behind(*arguments)
    return [t for t in outputs if t.grad_fn is not None and t.grad_fn not in inner_nodes]
