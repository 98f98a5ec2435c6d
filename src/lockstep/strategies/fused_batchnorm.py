"""BatchNorm over several ranks by torch's kernels for CUDA (and ROCm).

torch's own `SyncBatchNorm` consists of these kernels. They read half-precision inputs without a
copy in float32, and combine the statistics of all ranks and update the running statistics in one
kernel. All statistics have the *statistics dtype*: float64 for inputs in float64, else float32.

Unlike torch's layer, this code never waits for the device. torch removes the rows of ranks without
samples, and only the device knows how many there are.

Each rank sends a row of 2 C + 1 numbers (C is the number of channels): C means, C inverse standard
deviations `1 / sqrt(variance + eps)`, and the number of values per channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Replaces a count of 0 where it is divided by. Adding it to another count changes nothing.
SMALLEST_COUNT = 1e-30


def supports(x: Tensor) -> bool:
    """Returns True if these kernels can process a tensor."""
    return x.is_cuda and x.is_floating_point()


def make_row(x: Tensor, eps: float, *, has_samples: bool) -> Tensor:
    """Returns the row that this rank sends: means, inverse standard deviations and the count.

    Args:
        x: the input of the layer.
        eps: the small number that the layer adds to the variance.
        has_samples: False if `x` is a placeholder of a rank without samples. Then the row is the
            same as for an empty `x`.
    """
    channels = x.shape[1]
    if x.numel() and has_samples:
        mean, invstd = torch.batch_norm_stats(x, eps)
        num_values = mean.new_full((1,), x.numel() // channels)
    else:
        # The count is 0, so the means and deviations do not matter. But the kernel that combines
        # the rows divides by the deviations, which must not be 0.
        mean = x.new_zeros(channels, dtype=torch.promote_types(x.dtype, torch.float32))
        invstd = torch.ones_like(mean)
        num_values = mean.new_zeros(1)

    return torch.cat([mean, invstd, num_values])


def combine_rows(
    rows: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Returns the mean and the inverse standard deviation of all ranks' values, shape (C,).

    Args:
        rows: the rows of all ranks, from `make_row`, shape `(ranks, 2 C + 1)`. Together they must
            have at least two values per channel.
        running_mean: the running mean, which is updated in place, in the statistics dtype; None to
            update nothing.
        running_var: the running variance, likewise.
        momentum: the weight of these values in the running statistics.
        eps: the small number that the layer adds to the variance.
    """
    channels = rows.shape[1] // 2
    means, invstds, counts = torch.split(rows, [channels, channels, 1], dim=1)

    # The kernel adds one rank after the other, and divides by the number of values so far. If the
    # first ranks have none, this would be a division by 0. So 0 becomes a count that is too small
    # to change any sum.
    counts = counts.reshape(-1).clamp(min=SMALLEST_COUNT)

    # It only looks at the dtype and the size of its first argument, the input of the layer.
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        _input_for_64_bit_counts(rows.dtype, rows.device),
        means,
        invstds,
        running_mean,
        running_var,
        momentum,
        eps,
        counts,
    )
    return mean, invstd


def _input_for_64_bit_counts(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor that takes the place of a layer's input, and makes a kernel use 64 bits.

    `batch_norm_gather_stats_with_counts` only looks at the dtype and the size of the input: from
    2**31 elements on, it uses 64-bit integers. The ranks may have that many values together even if
    no rank has them alone. This tensor takes no memory: all its elements are at the same address.
    """
    return torch.empty((), dtype=dtype, device=device).expand(2**31)


class FusedNormalize(torch.autograd.Function):
    """Normalises by the statistics of all ranks, with the gradient through the statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        counts: Tensor,
        sum_over_ranks: Callable[[Tensor], Tensor],
        is_placeholder: bool,
    ) -> Tensor:
        """Returns `(x - mean) * invstd * weight + bias`.

        A rank without samples passes an empty `x`, or a placeholder if the layer is inside of a
        prepared model.

        Args:
            ctx: stores what the backward pass needs.
            x: the input, contiguous or with the channels last.
            weight: the weight, shape (C,), or None.
            bias: the bias, shape (C,), or None.
            mean: the mean of all ranks, shape (C,).
            invstd: the inverse standard deviation of all ranks, shape (C,).
            counts: the number of values per channel on each rank, shape (ranks,).
            sum_over_ranks: adds up over all ranks in the backward pass.
            is_placeholder: True if `x` is a placeholder of a rank without samples, which was left
                out of the statistics.
        """
        weight_for_kernel = _for_kernels(weight, mean.dtype)
        bias_for_kernel = _for_kernels(bias, mean.dtype)
        ctx.save_for_backward(x, weight_for_kernel, mean, invstd, counts.to(torch.int32))

        # The dtype of the gradients of weight and bias. A layer without weight may have a bias,
        # whose gradient then gets the dtype of the statistics.
        ctx.weight_dtype = mean.dtype if weight is None else weight.dtype
        ctx.sum_over_ranks = sum_over_ranks
        ctx.is_placeholder = is_placeholder
        if not x.numel():  # this rank has no samples
            return torch.empty_like(x)

        unused_eps = 0.0  # `invstd` contains the layer's eps already
        output: Tensor = torch.batch_norm_elemt(
            x, weight_for_kernel, bias_for_kernel, mean, invstd, unused_eps
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of `x`, weight and bias; the other arguments have none."""
        x, weight, mean, invstd, counts = ctx.saved_tensors
        needs_dx, needs_d_weight, needs_d_bias = ctx.needs_input_grad[:3]
        dy = gradients[0]
        if dy.stride() != x.stride():  # the kernels need both in the same memory format
            dy = torch.empty_like(x).copy_(dy)

        d_weight = None
        if x.numel() and not ctx.is_placeholder:
            # The sums over this rank's values, per channel, of dy and of dy * (x - mean).
            sum_dy, sum_dy_xmu, d_weight, _ = torch.batch_norm_backward_reduce(
                dy,
                x,
                mean,
                invstd,
                weight,
                True,  # the sums are wanted
                needs_d_weight,
                False,  # the gradient of the bias is `sum_dy`
            )
        else:
            sum_dy = torch.zeros_like(mean)
            sum_dy_xmu = torch.zeros_like(mean)
            if needs_d_weight:
                d_weight = torch.zeros_like(mean)

        dx = None
        if needs_dx:
            sums = ctx.sum_over_ranks(torch.stack([sum_dy, sum_dy_xmu]))
            if ctx.is_placeholder or not x.numel():
                dx = torch.zeros_like(x)
            else:
                total_dy, total_dy_xmu = sums
                dx = torch.batch_norm_backward_elemt(
                    dy, x, mean, invstd, weight, total_dy, total_dy_xmu, counts
                )

        # Like those of every other parameter, these are gradients of only this rank's loss, which
        # are averaged over the ranks later.
        if d_weight is not None:
            d_weight = d_weight.to(ctx.weight_dtype)

        d_bias = sum_dy.to(ctx.weight_dtype) if needs_d_bias else None
        return dx, d_weight, d_bias, None, None, None, None, None


def _for_kernels(parameter: Tensor | None, statistics_dtype: torch.dtype) -> Tensor | None:
    """Converts a weight or bias to the statistics dtype, contiguous, as the kernels need it."""
    return None if parameter is None else parameter.to(statistics_dtype).contiguous()


def in_dense_format(x: Tensor) -> Tensor:
    """Returns `x` if it is contiguous or has the channels last, else a contiguous copy."""
    formats = [torch.contiguous_format]
    if x.dim() == 4:
        formats.append(torch.channels_last)

    if x.dim() == 5:
        formats.append(torch.channels_last_3d)

    for memory_format in formats:
        if x.is_contiguous(memory_format=memory_format):
            return x

    return x.contiguous()
