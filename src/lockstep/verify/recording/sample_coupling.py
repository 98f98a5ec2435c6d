"""Detects losses and models in which one sample of a batch influences another one.

Such a loss (a contrastive loss, or one behind batch normalization) gives other results on several
processes, since each sees only a part of the batch. The test uses derivatives: the samples are
split into two groups by one bit of their number, for each bit in turn. If a weighted sum over the
outputs of one group has a gradient with respect to inputs of the other group, the samples are
*coupled*. Any two samples differ in some bit, so log2(samples) splits are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

MAX_VALUES = 10_000_000
"""Larger outputs are not tested, because it would take too long."""
MIN_RELATIVE_GRADIENT = 1e-9
"""Gradients below this fraction of the largest one are only rounding."""
DISTANCE_NODES = ("CdistBackward0", "EuclideanDistBackward0", "PdistBackward0")
"""Autograd nodes that torch cannot differentiate twice, at least not for a distance of zero."""


def compares_samples(loss: Tensor, outputs: Sequence[Tensor], num_samples: int) -> bool:
    """True if a loss compares samples, as a contrastive loss does.

    Then the gradient with respect to one sample's output depends on the outputs of other samples.
    To find this dependence, the test takes second derivatives of the loss. Torch cannot compute
    second derivatives of a distance between outputs (`torch.cdist`), which is common in losses that
    compare samples, so the test also looks for distances among the operations that computed the
    loss. It does not find:

    - a dependence that stays the same under small changes of the outputs, such as a sort order or a
      detached weight;
    - a dependence by another function that torch cannot differentiate twice.

    Args:
        loss: a scalar loss.
        outputs: outputs of the models.
        num_samples: number of samples in the batch.
    """
    if num_samples <= 1 or not loss.requires_grad:
        return False

    # A contrastive model may return two rows for each sample, one for each view of it. With more
    # rows, such as one for each token, it is not known which rows belong to which sample.
    tested = []
    for output in _final_outputs(outputs):
        if output.dim() > 0 and len(output) in (num_samples, 2 * num_samples):
            tested.append(output)

    if not tested:
        return False
    takes_too_long = sum(output.numel() for output in tested) > MAX_VALUES
    if takes_too_long:
        return False

    return _has_coupled_gradients(loss, tested, num_samples) or _measures_distances(loss, tested)


def _has_coupled_gradients(loss: Tensor, outputs: Sequence[Tensor], num_samples: int) -> bool:
    """True if the gradient for one sample's output depends on the outputs of other samples.

    Also false if it is not known, because torch has no second derivative of some function.
    """
    try:
        gradients = torch.autograd.grad(loss, outputs, create_graph=True, materialize_grads=True)
        return _samples_are_coupled(gradients, outputs, num_samples)
    except RuntimeError:  # a function without a second derivative
        return False


def couples_samples(outputs: Sequence[Tensor], hidden: Tensor) -> bool:
    """True if a model's output for one sample depends on the hidden activation of another sample.

    Args:
        outputs: outputs of the model.
        hidden: output of a module inside of the model, with one row for each sample.
    """
    num_samples = len(hidden)
    if num_samples < 2:
        return False

    tested = [t for t in outputs if t.dim() > 0 and len(t) == num_samples]
    if not tested:
        return False
    if any(t is hidden for t in tested):  # the model computes nothing from the activation
        return False
    if sum(t.numel() for t in (*tested, hidden)) > MAX_VALUES:
        return False

    # Torch raises RuntimeError for functions that it cannot differentiate. Then it is not known.
    with suppress(RuntimeError):
        return _samples_are_coupled(tested, [hidden], num_samples)

    return False


def _samples_are_coupled(
    results: Sequence[Tensor], sources: Sequence[Tensor], num_samples: int
) -> bool:
    """True if rows of the results depend on rows of other samples in the sources.

    Args:
        results: tensors that were computed from the sources.
        sources: tensors with one or several rows for each sample, like the results.
        num_samples: number of samples.
    """
    weighted_results = [_weighted(t) for t in results]
    # For each tensor, an array with the number of the sample that each of its rows belongs to.
    samples_of_results = [_sample_of_each_row(t, num_samples) for t in results]
    samples_of_sources = [_sample_of_each_row(t, num_samples) for t in sources]

    # The samples are split into two groups. They are coupled if the results of one group have a
    # gradient with respect to sources of the other. Of 4 samples, bit 0 splits off the group of 1
    # and 3, and bit 1 the group of 2 and 3. Any two samples differ in some bit of their numbers,
    # so they are in different groups at least once.
    num_bits = (num_samples - 1).bit_length()
    for bit in range(num_bits):
        rows_in_group = [_have_bit(sample_of_row, bit) for sample_of_row in samples_of_results]
        sum_of_group = _sum_of_rows(weighted_results, rows_in_group)
        gradients = torch.autograd.grad(
            sum_of_group, sources, retain_graph=True, materialize_grads=True
        )

        rows_outside = [~_have_bit(sample_of_row, bit) for sample_of_row in samples_of_sources]
        if _some_rows_have_gradient(gradients, rows_outside):
            return True

    return False


def _have_bit(numbers: Tensor, bit: int) -> Tensor:
    """Returns which of the numbers have a bit set: bit 0 in 1 and 3, but not in 0 and 2."""
    return (numbers >> bit) & 1 == 1


def _weighted(tensor: Tensor) -> Tensor:
    """Returns a tensor in which each value is multiplied by another number.

    So dependences do not cancel out in a sum of the values. The numbers are the cosines of 0, 1, 2,
    ..., which are irregular, and the same at every call.
    """
    weights = torch.arange(tensor.numel(), device=tensor.device).cos().view_as(tensor)
    return tensor * weights


def _sum_of_rows(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """Returns the sum of all values in some rows of the tensors.

    Args:
        tensors: the tensors.
        rows: for each tensor, which of its rows are in the sum.
    """
    total = torch.zeros(())  # torch adds this to a tensor on any device
    for tensor, is_in_sum in zip(tensors, rows, strict=True):
        total = total + tensor[is_in_sum].sum()
    return total


def _some_rows_have_gradient(gradients: Sequence[Tensor], examined_rows: Sequence[Tensor]) -> bool:
    """True if some of the examined rows have a gradient that is more than rounding.

    Args:
        gradients: gradients of several tensors, with all their rows. The largest of all values
            tells how large rounding can be.
        examined_rows: for each tensor, a mask: True for each row that is examined.
    """
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    if largest == 0:
        return False

    for gradient, mask in zip(gradients, examined_rows, strict=True):
        if bool((gradient[mask].abs() > MIN_RELATIVE_GRADIENT * largest).any()):
            return True
    return False


def _sample_of_each_row(tensor: Tensor, num_samples: int) -> Tensor:
    """Returns the number of the sample that each row of a tensor belongs to.

    For two views of three samples, the numbers are 0, 1, 2, 0, 1, 2.
    """
    return torch.arange(len(tensor), device=tensor.device) % num_samples


def _measures_distances(loss: Tensor, outputs: Sequence[Tensor]) -> bool:
    """True if the loss contains distances between outputs, computed by `torch.cdist` or `pdist`."""
    output_nodes = {output.grad_fn for output in outputs}  # nodes of the autograd graph
    for node in nodes_behind(loss.grad_fn):
        if node.name() not in DISTANCE_NODES:
            continue

        # All arguments must come from the models: the distance between an output and a constant
        # does not compare samples.
        are_from_models = []
        for argument_node, _ in node.next_functions:
            are_from_models.append(bool(output_nodes & nodes_behind(argument_node)))

        if all(are_from_models):
            return True

    return False


def nodes_behind(*nodes: Any) -> set[Any]:
    """Returns the given nodes of the autograd graph and all nodes that they were computed from.

    Args:
        *nodes: nodes such as `loss.grad_fn`. None, the node of a tensor without a gradient, is
            ignored.
    """
    reached = set()
    nodes_to_visit = list(nodes)
    while nodes_to_visit:
        node = nodes_to_visit.pop()
        if node is None or node in reached:
            continue
        reached.add(node)
        nodes_to_visit += [argument for argument, _ in node.next_functions]

    return reached


def _final_outputs(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the outputs that no other output was computed from.

    For example, one model returns `a`, and another one is called with it: `b = model(a)`. Then only
    `b` is final, as the loss compares samples by the output of the last model. Outputs without a
    gradient are left out.
    """
    # All nodes of the autograd graph that the outputs were computed from, without their own nodes.
    direct_inputs: list[Any] = []
    for output in outputs:
        if output.grad_fn is not None:
            direct_inputs += [node for node, _ in output.grad_fn.next_functions]
    inner_nodes = nodes_behind(*direct_inputs)

    return [t for t in outputs if t.grad_fn is not None and t.grad_fn not in inner_nodes]
