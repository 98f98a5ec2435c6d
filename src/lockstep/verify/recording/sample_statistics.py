"""Recognizes calls of torch that take a statistic over the samples of a batch.

A mean, a maximum or a sort over the first dimension of a batch gives another result on a rank that
has a part of the batch. Only inputs of the model count, which carry no gradient: what is done with
outputs is seen by its gradients. Functions that choose samples count for outputs too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from lockstep.batch.pytree import tensors
from lockstep.verify.recording.tensor_values import summarize

REDUCTIONS = {
    *("mean", "sum", "std", "var", "norm", "max", "min", "amax", "amin", "median", "logsumexp"),
    *("softmax", "log_softmax", "cumsum", "bincount", "normalize", "vector_norm", "nanmean"),
}
EXTREMES = {"max", "min", "amax", "amin"}
CHOICES = {"topk", "sort", "argsort", "kthvalue", "quantile", "median"}
"""Functions that choose samples, or a limit for them."""
CHOICES_OVER_LAST_DIM = CHOICES - {"median", "quantile"}
"""Choices whose default dimension is the last one; `median` and `quantile` take all values."""
DIM_IS_THIRD_ARGUMENT = {"topk", "kthvalue", "norm", "normalize", "quantile", "vector_norm"}
"""Functions with another argument before `dim`; for the others `dim` is the second."""


def reduces_over_samples(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True if the call of this function goes over the first dimension of a batch.

    Args:
        name: of the function of torch that is called.
        args: of the call.
        kwargs: of the call.
    """
    if name not in REDUCTIONS and name not in CHOICES:
        return False

    values = args[0] if args else kwargs.get("input")
    if not isinstance(values, Tensor) or values.dim() == 0 or len(values) < 2:
        return False
    # What is done with outputs of a model is seen by its gradients, except for choices.
    if values.requires_grad and name not in CHOICES:
        return False
    # The longest text of a batch is a whole number, and pads the batch: that does no harm.
    if name in EXTREMES and not values.is_floating_point():
        return False

    for dim in _dims(name, args, kwargs):
        if dim is None:  # all dimensions
            return True
        # For a tensor of two dimensions, the first one is 0 or -2. With one argument more, the
        # place of `dim` may hold something else, such as another tensor in `torch.max(a, b)`.
        is_first_dim = type(dim) is int and dim % values.dim() == 0
        if is_first_dim:
            return True

    return False


def _dims(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the dimensions that a function goes over, as they were given or by default.

    [None] stands for all dimensions.
    """
    # torch.sum(input, dim), but torch.norm(input, p, dim)
    place = 2 if name in DIM_IS_THIRD_ARGUMENT else 1
    if "dim" in kwargs:
        dim = kwargs["dim"]
    elif len(args) > place:
        dim = args[place]
    elif name == "normalize":  # its default
        dim = 1
    elif name in CHOICES_OVER_LAST_DIM:
        dim = -1
    else:
        dim = None

    return list(dim) if isinstance(dim, tuple | list) else [dim]


def summary_number(result: Any) -> float | None:
    """Returns a number that changes with any value of a result's first tensor.

    None if there is no tensor, or if its values cannot be read: on the meta device, or inside a
    function that `torch.func` transforms.

    Args:
        result: what a call of torch has returned: a tensor, or a tuple such as that of `max`.
    """
    result_tensors = tensors(result)
    if not result_tensors:
        return None

    tensor = result_tensors[0]
    # A subclass of Tensor may be sharded, or wrapped by `torch.func`.
    if type(tensor) is not Tensor or tensor.is_meta or tensor.is_complex():
        return None

    with suppress(RuntimeError):  # torch raises it for values that cannot be read
        weighted_sum, _ = summarize(tensor)
        return float(weighted_sum)

    return None
