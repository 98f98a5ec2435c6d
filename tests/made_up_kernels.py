"""torch's kernels for BatchNorm that exist on CUDA alone, by plain operations for the CPU.

They compute the same and refuse what the kernels refuse: other dtypes, other memory formats. Read
in torch's `aten/src/ATen/native/cuda/Normalization.cu` and `.cuh`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.communication import routing
from lockstep.strategies import fused_batchnorm


def install() -> list[str]:
    """Puts the kernels in place in this process, and lets SyncBatchNorm use them on the CPU.

    Returns:
        Grows by the name of each kernel, and "all-gather", as they are called.
    """
    called: list[str] = []
    functions = (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt)
    for function in functions:

        def noted(*args, function=function):
            called.append(function.__name__)
            return function(*args)

        setattr(torch, f"batch_norm_{function.__name__}", noted)
    all_gather = routing._all_gather_into_one_tensor

    def noted_all_gather(*args):
        called.append("all-gather")
        all_gather(*args)

    routing._all_gather_into_one_tensor = noted_all_gather
    routing._gathers_into_one_tensor = lambda rows, group: True
    fused_batchnorm.supports = lambda x: True
    return called


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert x.numel()
    variance, mean = torch.var_mean(x.to(accumulated(x.dtype)), other_dims(x), correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats_with_counts(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if running_mean is None else running_mean.dtype
    assert counts.dtype == dtype
    assert means.dtype == invstds.dtype == accumulated(dtype)
    assert x.numel() >= 2**31  # else the kernel counts values in 32 bits
    mean = torch.zeros_like(means[0])
    sum_of_squares = torch.zeros_like(mean)
    number = 0
    for rank_mean, rank_invstd, count in zip(means, invstds, counts, strict=True):
        rank_variance = (1.0 / rank_invstd).square() - eps
        factor = 1.0 / (number + count)
        between = (mean - rank_mean).square() * number * count * factor
        sum_of_squares = sum_of_squares + rank_variance * count + between
        mean = number * factor * mean + count * factor * rank_mean
        number = int(number + count)
    if running_mean is not None:
        unbiased = sum_of_squares / (number - 1)
        running_mean.copy_((1 - momentum) * running_mean + momentum * mean)
        running_var.copy_((1 - momentum) * running_var + momentum * unbiased)
    return mean, (sum_of_squares / number + eps).rsqrt()


def elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    assert is_dense(x)
    check_parameters(x, weight, bias)
    check_pieces(mean, invstd)
    assert mean.dtype == invstd.dtype == accumulated(x.dtype)
    xhat = (x - nd(mean, x)) * nd(invstd, x)
    return affine(xhat, weight, bias).to(x.dtype)


def backward_reduce(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[Tensor | None, ...]:
    assert is_dense(x)
    assert dy.stride() == x.stride()
    assert dy.dtype == x.dtype
    check_parameters(x, weight)
    assert mean.dtype == invstd.dtype == accumulated(x.dtype)
    dims = other_dims(x)
    sum_dy = dy.to(mean.dtype).sum(dims)
    sum_dy_xmu = (dy * (x - nd(mean, x))).sum(dims)
    wanted_sums = (sum_dy, sum_dy_xmu) if input_wanted else (None, None)
    d_weight = (sum_dy_xmu * invstd).to(weight.dtype) if weight_wanted else None
    d_bias = sum_dy.to(weight.dtype) if bias_wanted else None
    return (*wanted_sums, d_weight, d_bias)


def backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    assert counts.dtype == torch.int32
    check_pieces(mean, invstd, weight, sum_dy, sum_dy_xmu, counts)
    assert dy.stride() == x.stride()
    assert weight is None or weight.dtype == mean.dtype
    assert mean.dtype == invstd.dtype == sum_dy.dtype == sum_dy_xmu.dtype == accumulated(x.dtype)
    total = counts.sum()
    slope = invstd.square() * sum_dy_xmu / total
    dx = dy - nd(sum_dy / total, x) - (x - nd(mean, x)) * nd(slope, x)
    return affine(dx * nd(invstd, x), weight, None).to(x.dtype)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * nd(weight, x)
    return x if bias is None else x + nd(bias, x)


def check_parameters(x: Tensor, *parameters: Tensor | None) -> None:
    """They have the dtype of the input, or in half precision that of the statistics."""
    dtypes = {parameter.dtype for parameter in parameters if parameter is not None}
    assert dtypes <= {x.dtype} or dtypes <= {accumulated(x.dtype)}


def check_pieces(*vectors: Tensor | None) -> None:
    """The kernels for channels last read from a pointer on."""
    assert all(vector.is_contiguous() for vector in vectors if vector is not None)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def is_dense(x: Tensor) -> bool:
    if x.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def other_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def nd(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (x.dim() - 2))
