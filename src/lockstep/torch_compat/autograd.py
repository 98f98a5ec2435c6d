"""Autograd: its graph, its hooks, its profiler, and what this thread is computing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def count_gradient_hooks(parameter: Tensor) -> int:
    """Returns the number of hooks that are called with a parameter's gradient."""
    hooks_before_accumulation = parameter._backward_hooks or ()
    hooks_after_accumulation = getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
    return len(hooks_before_accumulation) + len(hooks_after_accumulation)


def in_backward_pass() -> bool:
    """Returns True if this thread runs a backward pass.

    That is also true while the forward pass of a checkpointed block is recomputed. Torch's own
    activation checkpointing uses the same test.
    """
    import torch

    return torch._C._current_graph_task_id() != -1  # -1: this thread runs none


def in_function_transform() -> bool:
    """Returns True inside `torch.func.vmap`, `torch.func.grad` and similar transforms.

    There tensors are placeholders, whose values cannot be read.
    """
    import torch

    functorch: Any = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None


def rows_summed_by_loss_function(node: Any) -> int:
    """Returns the number of rows that a loss function has added up with `reduction="sum"`.

    Args:
        node: a node of autograd's graph, for example the `grad_fn` of a loss.

    Returns:
        The size of the first dimension of the loss function's input. 0 if the node is that of
        another function, or of another reduction.
    """
    sum_reduction = 2  # torch.nn._reduction.get_enum("sum")
    if getattr(node, "_saved_reduction", None) != sum_reduction:
        return 0

    # Torch releases the input in the backward pass, after which it raises a RuntimeError.
    try:
        predictions: Tensor = node._saved_self
    except RuntimeError:
        return 0
    return len(predictions) if predictions.dim() > 0 else 0


def is_mean_of_loss_function(node: Any) -> bool:
    """Returns True for the node of a loss function that was called with `reduction="mean"`."""
    mean_reduction = 1  # torch.nn._reduction.get_enum("mean")
    return getattr(node, "_saved_reduction", None) == mean_reduction


def scalar_factor(node: Any) -> float | None:
    """Returns the number by which a node of autograd's graph multiplies: 0.25 for `loss / 4`.

    Args:
        node: a node of autograd's graph.

    Returns:
        None if the node is no multiplication or division, or not by one number on the CPU. Numbers
        of Python are on the CPU.
    """
    name = node.name()
    if name not in ("MulBackward0", "DivBackward0"):
        return None

    # What the node multiplies or divides by: a tensor on the CPU for a number of Python, as in
    # `loss / 4`; None if the backward pass does not need it.
    try:
        other = node._saved_other
    except RuntimeError:  # the backward pass has released it
        return None
    if other is None or other.numel() != 1 or other.requires_grad:
        return None
    if other.is_cuda:  # to read it would wait for the GPU
        return None

    value = float(other)
    if name == "MulBackward0":
        return value
    return 1 / value if value else None


def profiler_is_running() -> bool:
    """Returns True while `torch.profiler` or `torch.autograd.profiler` records in this process."""
    import torch

    # Read in torch 2.11 and 2.13.
    is_running: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return is_running
