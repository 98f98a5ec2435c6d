"""Recognizes calls of torch that compute a statistic over the samples of a batch.

A mean, a maximum or a sort over the first dimension of a batch gives another result on a rank that
only has a part of the batch. Only statistics of model inputs matter here, which require no
gradient: what a script does with model outputs shows up in their gradients. The exception are
functions that choose samples, such as `topk`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lockstep.batch.pytree import tensors
from lockstep.verify.recording.tensor_values import summarize

REDUCTIONS = {
    *("mean", "sum", "std", "var", "norm", "max", "min", "amax", "amin", "median", "logsumexp"),
    *("softmax", "log_softmax", "cumsum", "bincount", "normalize", "vector_norm", "nanmean"),
}
EXTREMES = {"max", "min", "amax", "amin"}
"""Those reductions that return one of the values."""
CHOICES = {"topk", "sort", "argsort", "kthvalue", "quantile", "median"}
"""Functions that choose samples, or a threshold for them."""
CHOICES_OVER_LAST_DIM = CHOICES - {"median", "quantile"}
"""Choices whose default dimension is the last one; `median` and `quantile` use all values."""
DIM_IS_THIRD_ARGUMENT = {"topk", "kthvalue", "norm", "normalize", "quantile", "vector_norm"}
"""Functions whose third argument is `dim`; for the others, it is the second."""


def reduces_over_samples(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True if a call of torch reduces, sorts or selects over the first dimension of a batch.

    Args:
        name: name of the called function.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    if name not in REDUCTIONS and name not in CHOICES:
        return False

    values = args[0] if args else kwargs.get("input")
    if not isinstance(values, Tensor) or values.dim() == 0 or len(values) < 2:
        return False
    # What a script does with model outputs shows up in their gradients, except for choices.
    if values.requires_grad and name not in CHOICES:
        return False

    # The maximum of integers is usually the length of the longest text, to which a batch is padded.
    # That does no harm.
    if name in EXTREMES and not values.is_floating_point():
        return False

    dims = _dims_of_call(name, args, kwargs)
    if dims is None:  # all dimensions
        return True

    # The first of three dimensions may be given as 0 or as -3.
    return 0 in dims or -values.dim() in dims


def _dims_of_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int] | None:
    """Returns the dimensions that a call of torch reduces or sorts; None for all of them.

    They are what the caller has given as `dim`, or the default. Anything else in the position of
    `dim` is left out: a name of a dimension, or the tensor `b` in `torch.max(a, b)`, which computes
    no statistic.
    """
    # The signatures are torch.sum(input, dim) and torch.norm(input, p, dim), for example.
    index_of_dim = 2 if name in DIM_IS_THIRD_ARGUMENT else 1
    if "dim" in kwargs:
        dim = kwargs["dim"]
    elif len(args) > index_of_dim:
        dim = args[index_of_dim]
    elif name == "normalize":
        dim = 1  # F.normalize(input, p=2.0, dim=1)
    elif name in CHOICES_OVER_LAST_DIM:  # functions that choose samples, such as `topk`
        dim = -1
    else:
        dim = None

    if dim is None:
        return None

    dims = dim if isinstance(dim, tuple | list) else [dim]
    return [value for value in dims if type(value) is int]


def summary_number(result: Any) -> float | None:
    """Returns a number by which results are compared: a weighted sum over all values.

    Every position has another weight, so the number also changes if two values are swapped.

    Args:
        result: return value of a call of torch: a tensor, or a tuple such as that of `torch.max`,
            of which the first tensor is used.

    Returns:
        The number, or None if there is no tensor, if the tensor is complex, or if its values cannot
        be read: on the meta device, or inside a function that `torch.func` transforms.
    """
    result_tensors = tensors(result)
    if not result_tensors:
        return None

    tensor = result_tensors[0]
    is_subclass = type(tensor) is not Tensor  # sharded, or wrapped by `torch.func`
    if is_subclass or tensor.is_meta:
        return None

    if tensor.is_complex():  # `summarize` would leave out the imaginary parts
        return None

    try:
        weighted_sum, _largest = summarize(tensor)
    except RuntimeError:  # the values cannot be read
        return None

    return float(weighted_sum)
