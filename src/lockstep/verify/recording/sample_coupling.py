"""Finds losses and models in which one sample influences another sample of its batch.

Such a loss (a contrastive one, a batch normalization) gives other numbers on several processes,
as each sees a part of the batch. It is found by derivatives: the samples are split into two groups
by one bit of their number, for each bit in turn. If a weighted sum over the outputs of one group
has a gradient by inputs of the other group, samples are *coupled*.
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

    This takes second derivatives. A dependence that is constant between jumps (a choice by rank, a
    detached weight) is not found, and neither is one that torch cannot differentiate twice, except
    for distances between the outputs.

    Args:
        loss: a scalar.
        outputs: what the models returned.
        samples: number of samples.
    """
    if samples <= 1 or not loss.requires_grad:
        return False
    # A model may compute two views of each sample in one call; longer outputs may have several
    # rows for a sample, such as tokens, and cannot be told apart.
    possible_rows = (samples, 2 * samples)
    outputs = [t for t in _final_outputs(outputs) if t.dim() and len(t) in possible_rows]
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
    outputs = [t for t in outputs if t.dim() and len(t) == len(hidden)]
    if not outputs or any(t is hidden for t in outputs):  # nothing is computed from the activation
        return False
    if sum(t.numel() for t in (*outputs, hidden)) > MAX_VALUES:
        return False
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
    weights = [torch.arange(t.numel(), device=t.device).cos().view_as(t) for t in results]
    result_samples = [_sample_of_row(t, samples) for t in results]
    source_samples = [_sample_of_row(t, samples) for t in sources]
    for bit in range((samples - 1).bit_length()):
        # A weighted sum over the samples that have this bit ...
        probe = torch.zeros(())
        for result, weight, sample in zip(results, weights, result_samples, strict=True):
            has_bit = (sample >> bit) & 1 == 1
            probe = (result * weight)[has_bit].sum() + probe
        gradients = torch.autograd.grad(probe, sources, retain_graph=True, materialize_grads=True)
        largest = max(float(gradient.abs().max()) for gradient in gradients)
        if not largest:  # this sum depends on nothing
            continue
        # ... must have no gradient by the samples that have not.
        for gradient, sample in zip(gradients, source_samples, strict=True):
            lacks_bit = (sample >> bit) & 1 == 0
            if bool((gradient[lacks_bit].abs() > MIN_RELATIVE_GRADIENT * largest).any()):
                return True
    return False


def _sample_of_row(tensor: Tensor, samples: int) -> Tensor:
    """Returns the number of the sample that each row belongs to; views of it follow one another."""
    return torch.arange(len(tensor), device=tensor.device) % samples


def _measures_distances(loss: Tensor, outputs: Sequence[Tensor]) -> bool:
    """True if `torch.cdist` or `pdist` between outputs is part of the loss."""
    output_nodes = {output.grad_fn for output in outputs}
    for node in nodes_behind(loss.grad_fn):
        if node.name() not in DISTANCE_NODES:
            continue
        # Both arguments of a distance must come from the models: none may be a constant.
        arguments = [argument for argument, _ in node.next_functions]
        are_from_models = [bool(output_nodes & nodes_behind(argument)) for argument in arguments]
        if all(are_from_models):
            return True
    return False


def nodes_behind(*nodes: Any) -> set[Any]:
    """Returns all nodes of the autograd graph that these come from, and these themselves."""
    reached = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is None or node in reached:
            continue
        reached.add(node)
        waiting += [argument for argument, _ in node.next_functions]
    return reached


def _final_outputs(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the outputs from which no other output is made.

    What happens between two models is not the loss's doing.
    """
    with_node = [(output, output.grad_fn) for output in outputs if output.grad_fn is not None]
    arguments = []
    for _, node in with_node:
        arguments += [argument for argument, _ in node.next_functions]
    intermediate = nodes_behind(*arguments)
    return [output for output, node in with_node if node not in intermediate]
