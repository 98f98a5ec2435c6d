"""BatchNorm over the global batch: `SyncBatchNorm` has statistics of the samples of all ranks.

The input `x` of a layer has shape (N, C, ...), with C *channels*; N differs between ranks and may
be 0. The *moments* of a channel are its mean and variance. A *placeholder* is a sample that a rank
without samples computes (`strategies.placeholder`); it does not count in the statistics.

Forward pass, in training on several ranks: Every rank computes the count, mean and sum of squared
deviations (M2) of its own samples. One all-gather of `1 + 2C` float64 numbers brings them together,
and every rank combines them by the parallel formula of Chan, Golub and LeVeque ("Updating Formulae
and a Pairwise Algorithm for Computing Sample Variances", 1979). All ranks compute the same bits, so
the running statistics stay equal without being broadcast.

Backward pass: One all-reduce of `2C` float64 numbers (the sums of dy and of dy * normalised x) is
followed by the input gradient of Ioffe and Szegedy ("Batch Normalization", arXiv 1502.03167,
section 3). It is linear in the ranks' losses: whatever factor each rank's loss has, the sum over
ranks of the gradients is the gradient of the sum of the scaled losses. The gradients of weight and
bias are local sums, which are averaged over ranks later, like those of every other parameter.

This is how it works on the CPU. On GPUs, torch's own kernels do the same in float32
(`fused_batchnorm`).

The order of the sums: In the forward pass, the ranks' moments are added in the binary tree of
`summation_tree` (on GPUs, torch's kernel adds them in the order of the ranks). In the backward
pass, the order is that of the all-reduce, which depends on how ranks are placed on machines. With
virtual ranks, of which each rank computes one, it is the tree instead (`SyncBatchNorm.tree_sums`),
and neither order depends on machines.

Every rank must run the layer the same number of times, forward and backward. A rank without samples
takes part with an input of shape (0, C, ...).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.lazy import LazyModuleMixin

from lockstep.communication import routing
from lockstep.communication.routing import carrier_device
from lockstep.communication.tree_sum import TreeSums, add_rows_in_tree
from lockstep.distributed.process_group import blocked_reason
from lockstep.errors import DataError, UsageError
from lockstep.settings import Choice
from lockstep.strategies import fused_batchnorm
from lockstep.torch_compat import BatchNorm, outside_compiled_code
from lockstep.wording import describe_type

_TORCH_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _ThreadState(threading.local):
    """Tells, per thread, whether a placeholder sample is computed (`strategies.placeholder`)."""

    computes_placeholder = False


thread_state = _ThreadState()


class SyncBatchNorm(BatchNorm):
    """Batch normalisation over the samples of all ranks, on CPU and CUDA.

    Takes inputs of shape (N, C), (N, C, L), (N, C, H, W) or (N, C, D, H, W), where N may differ
    between ranks and may be 0. The output has the same shape, dtype and memory format. Parameters,
    buffers and `state_dict` keys are those of `torch.nn.BatchNorm2d`.

    In evaluation, without a process group and on one rank it is torch's own BatchNorm, bit for bit,
    and does not communicate. (In eval mode with `track_running_stats=False`, it uses the statistics
    of the rank's own batch, as in torch.)

    Args:
        num_features: the number of channels, C.
        eps: a small number that is added to the variance.
        momentum: the weight of a new batch in the running statistics; None for the average of all
            batches.
        affine: True to learn a weight and a bias per channel.
        track_running_stats: True to keep running statistics for eval mode.
        process_group: the ranks to share statistics with; None for the default group, which is
            looked up when the layer runs.
        device: the device of parameters and buffers.
        dtype: the dtype of parameters and buffers.
        bias: True to learn a bias (with `affine`).

    Raises:
        DataError: in forward, if the input has another shape, or in training if the global batch
            has only one value per channel.
        UsageError: in forward, on a rank outside of `process_group`, or in training mode in an
            evaluation in which some rank has no samples.
    """

    tree_sums: TreeSums | None = None
    """Adds up over virtual ranks, of which each rank computes one. None if the order of a sum over
    ranks does not matter."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.process_group = process_group

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `x` over the global batch, in eval mode by the running statistics."""
        if not self.training:
            return self._forward_in_eval(x)

        has_process_group = dist.is_available() and dist.is_initialized()
        if not has_process_group:
            return super().forward(x)

        num_ranks = dist.get_world_size(self.process_group)
        if num_ranks == 1:
            return super().forward(x)

        is_member_of_group = num_ranks != -1  # torch returns -1 on other ranks
        if not is_member_of_group:
            raise UsageError(
                "SyncBatchNorm over a process group",
                "this rank is not a member of the group",
                "pass a group that holds this rank, or process_group=None for all ranks",
            )

        _check_all_ranks_run_this()
        return self._forward_over_ranks(x, num_ranks)

    def _forward_in_eval(self, x: Tensor) -> Tensor:
        """Normalises `x` by the running statistics, as torch's own BatchNorm does.

        Under `fsdp`, the weight and bias may be in half precision, while the running statistics are
        in fp32. Torch requires the same dtype for all of them, so weight and bias are converted.
        """
        mean = self.running_mean
        variance = self.running_var
        if mean is None or self.weight is None or self.weight.dtype == mean.dtype:
            return super().forward(x)

        self._check_input_dim(x)
        weight = self.weight.to(mean.dtype)
        bias = None if self.bias is None else self.bias.to(mean.dtype)
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=self.eps)

    @outside_compiled_code  # it communicates
    def _forward_over_ranks(self, x: Tensor, num_ranks: int) -> Tensor:
        """Normalises `x` by the moments of all ranks' samples."""
        self._check_input_dim(x)
        if fused_batchnorm.supports(x):
            return self._forward_by_fused_kernels(x, num_ranks)

        moments = _global_moments(x, self.process_group)
        if self._no_rank_has_values(x, moments.total, num_ranks):
            return super().forward(x)  # torch's own layer accepts an empty batch

        if self.track_running_stats:
            update_running_stats(self, moments.mean, moments.variance, moments.total)

        sum_over_ranks = self._function_that_sums_over_ranks()
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, moments, self.eps, sum_over_ranks
        )
        return output

    def _function_that_sums_over_ranks(self) -> Callable[[Tensor], Tensor]:
        """Returns the function that sums over ranks in the backward pass."""
        return partial(sum_over_ranks, group=self.process_group, tree_sums=self.tree_sums)

    def _forward_by_fused_kernels(self, x: Tensor, num_ranks: int) -> Tensor:
        """Normalises `x` by the statistics of all ranks' samples, on a GPU."""
        group = self.process_group
        x = fused_batchnorm.in_dense_format(x)

        # Each rank sends C means, C inverse standard deviations, and its number of values per
        # channel. `detach` keeps autograd from recording this, because `FusedNormalize` computes
        # the gradient through the statistics by itself.
        x_is_placeholder = thread_state.computes_placeholder
        own_statistics = fused_batchnorm.make_row(
            x.detach(), self.eps, has_samples=not x_is_placeholder
        )
        statistics_of_ranks = _gather_rows(own_statistics, group)
        counts = statistics_of_ranks[:, -1]  # the numbers of values per channel
        if self._no_rank_has_values(x, counts.sum(), num_ranks):
            return super().forward(x)  # torch's own layer accepts an empty batch

        mean, invstd = self._combine_and_update_running_stats(statistics_of_ranks)
        output: Tensor = fused_batchnorm.FusedNormalize.apply(  # type: ignore[no-untyped-call]
            x,
            self.weight,
            self.bias,
            mean,
            invstd,
            counts,
            self._function_that_sums_over_ranks(),
            x_is_placeholder,
        )
        return output

    def _combine_and_update_running_stats(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Combines the statistics of all ranks, and updates the running statistics.

        Args:
            rows: what all ranks have sent, shape (ranks, 2 C + 1): C means, C inverse standard
                deviations, and the number of values per channel.

        Returns:
            The mean and `1 / sqrt(variance + eps)` of all ranks' samples.
        """
        # The usual case: one kernel combines the rows and updates the running statistics. It needs
        # statistics in the dtype of the rows, and a momentum: without one, the weight of this batch
        # is 1 / `num_batches_tracked`, which is on the device.
        running_mean = self.running_mean
        has_dtype_of_rows = running_mean is not None and running_mean.dtype == rows.dtype
        if self.track_running_stats and self.momentum is not None and has_dtype_of_rows:
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            return fused_batchnorm.combine_rows(
                rows, running_mean, self.running_var, self.momentum, self.eps
            )

        # Otherwise the kernel only combines the rows. Without running statistics, its momentum does
        # not matter.
        mean, invstd = fused_batchnorm.combine_rows(rows, None, None, momentum=0.0, eps=self.eps)
        if self.track_running_stats:
            variance = invstd.double().pow(-2) - self.eps  # invstd = 1 / sqrt(variance + eps)
            counts = rows[:, -1]
            update_running_stats(self, mean, variance, total=counts.double().sum())

        return mean, invstd

    def _no_rank_has_values(self, x: Tensor, total: Tensor, num_ranks: int) -> bool:
        """Returns True if no rank has any values. The caller then returns an empty output.

        To read `total`, this would have to wait for the device. That is rarely needed: a rank with
        at least two values per channel knows the answer from `x` alone.

        Args:
            x: the input on this rank.
            total: the number of values per channel on all ranks, shape ().
            num_ranks: the number of ranks.

        Raises:
            DataError: there is only one value per channel.
        """
        num_channels = x.shape[1]
        has_two_values_per_channel = x.numel() > num_channels
        if has_two_values_per_channel:
            return False

        values_of_all_ranks = int(total)  # waits for the device
        if values_of_all_ranks == 1:
            raise one_value_error(
                f"batch normalisation in training over a global batch on {num_ranks} ranks",
                f"got input size {x.shape} here and 1 value per channel over all ranks",
            )

        return values_of_all_ranks == 0

    def _check_input_dim(self, x: Tensor) -> None:
        check_input(self, x)


def _check_all_ranks_run_this() -> None:
    """Raises UsageError in an evaluation in which some ranks may have fewer batches than others.

    Then not all ranks run this layer, which would wait for them forever.
    """
    is_evaluation = not torch.is_grad_enabled()
    if not is_evaluation:
        return

    # The run blocks collectives in such an evaluation, and says why.
    reason_collectives_are_blocked = blocked_reason()
    if reason_collectives_are_blocked is not None:
        raise UsageError(
            "a model in training mode in an evaluation loop",
            f"its BatchNorm would wait for all ranks, but {reason_collectives_are_blocked}",
            "call model.eval() first; for update_bn give the loader drop_last=True",
        )


def check_input(layer: BatchNorm, x: Tensor, name: str | None = None) -> None:
    """Raises DataError if the input of a layer does not have the right shape.

    Args:
        layer: a BatchNorm layer.
        x: its input.
        name: the name of the layer in the model, if it is known.
    """
    channels = layer.num_features
    if not 2 <= x.dim() <= 5 or x.shape[1] != channels:
        description = f"{type(layer).__name__}({channels})"
        if name is not None:
            description += f" {name!r}"
        raise DataError(
            description,
            f"an input of shape {tuple(x.shape)}",
            f"give it (N, {channels}) or (N, {channels}, ...) with up to 5 dimensions",
        )


def one_value_error(was_set: str, found: str) -> DataError:
    """Returns the error for a batch with one value per channel, which has no variance."""
    return DataError(
        was_set,
        f"Expected more than 1 value per channel when training, {found}",
        "use a larger batch, drop a last batch of one sample, or call .eval()",
    )


@torch.no_grad()
def update_running_stats(layer: BatchNorm, mean: Tensor, variance: Tensor, total: Tensor) -> None:
    """Updates a layer's running statistics with those of a batch, as torch's BatchNorm does.

    Args:
        layer: one of torch's BatchNorm layers, or a SyncBatchNorm.
        mean: the mean of the batch, shape (C,).
        variance: its biased variance, shape (C,).
        total: the number of values per channel, float64, shape ().
    """
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)

    weight_of_batch: float | Tensor
    if layer.momentum is not None:
        weight_of_batch = layer.momentum
    elif layer.num_batches_tracked is not None:
        # Without momentum, the running statistics are the mean over all batches. The weight stays a
        # tensor, because reading the number would wait for the device.
        weight_of_batch = 1.0 / layer.num_batches_tracked.double()
    else:
        weight_of_batch = 0.0  # the running statistics never change, as in torch

    if layer.running_mean is not None:
        _update_running(layer.running_mean, mean, weight_of_batch)

    if layer.running_var is not None:
        unbiased = variance * (total / (total - 1))
        _update_running(layer.running_var, unbiased, weight_of_batch)


def _update_running(running: Tensor, statistic: Tensor, weight: float | Tensor) -> None:
    """Sets a running statistic to `(1 - weight) * running + weight * statistic`."""
    if isinstance(weight, Tensor):
        weight = weight.to(running.dtype)
    running.lerp_(statistic.to(running.dtype), weight)


class _CentredInput(NamedTuple):
    """The input minus its mean, from `_two_pass_moments`; the output is computed from it."""

    centre: Tensor
    """The mean on this rank, rounded to the dtype of the statistics, shape (C,)."""
    deviations: Tensor
    """`x - centre`. The output is computed in its memory."""


class _LocalMoments(NamedTuple):
    """The moments of this rank's values."""

    mean: Tensor
    """(C,)"""
    sum_of_squares: Tensor
    """(C,), of the deviations from the mean (M2)."""
    centred: _CentredInput


class _GlobalMoments(NamedTuple):
    """The moments of all ranks' values, in float64, on the device of the input."""

    mean: Tensor
    """(C,)"""
    variance: Tensor
    """(C,), biased."""
    total: Tensor
    """(), values per channel."""
    centred: _CentredInput | None
    """This rank's input minus its mean; None if this rank has no values that count."""


@torch.no_grad()
def _global_moments(x: Tensor, group: dist.ProcessGroup | None) -> _GlobalMoments:
    """Computes the moments of the inputs of all ranks, with one all-gather.

    Args:
        x: the input on this rank. It does not count if it is a placeholder sample.
        group: the ranks.

    Returns:
        The moments. They come with this rank's input minus its own mean (`centred`), from which the
        normalised output is computed later; None if this rank has no values that count.
    """
    channels = x.shape[1]
    centred = None

    # Every rank sends a row of 1 + 2 C numbers: its number of values per channel, C means, and C
    # sums of squared deviations from the mean. A rank without samples sends zeros.
    x_is_placeholder = thread_state.computes_placeholder
    if x.numel() and not x_is_placeholder:
        local = _two_pass_moments(x)
        centred = local.centred
        count = torch.full((1,), x.numel() // channels, dtype=torch.float64, device=x.device)
        row = torch.cat([count, local.mean, local.sum_of_squares])
    else:
        row = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)

    rows = _gather_rows(row, group)
    counts = rows[:, :1]  # (ranks, 1)
    means = rows[:, 1 : 1 + channels]  # (ranks, C)
    sums_of_squares = rows[:, 1 + channels :]  # (ranks, C)

    # With n_r values, mean m_r and sum of squared deviations M2_r on rank r (Chan, Golub, LeVeque):
    #   total = sum n_r,  mean = sum n_r * m_r / total
    #   variance = (sum M2_r + sum n_r * (m_r - mean) ** 2) / total
    # `add_rows_in_tree` adds up over the ranks: from shape (ranks, C) to (C,).
    total = add_rows_in_tree(counts).squeeze(0)  # from (ranks, 1) to (1,) to ()
    mean = add_rows_in_tree(counts * means) / total
    squares_within_ranks = add_rows_in_tree(sums_of_squares)
    squares_between_ranks = add_rows_in_tree(counts * (means - mean).square())
    variance = (squares_within_ranks + squares_between_ranks) / total

    return _GlobalMoments(mean, variance, total, centred)


def _gather_rows(row: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the rows of all ranks, shape `(ranks, length)`, on the device of `row`."""
    sent = row.to(carrier_device(row.device, group))
    rows = sent.new_empty(dist.get_world_size(group), sent.numel())
    routing.all_gather(rows, sent, group)
    return rows.to(row.device)


def sum_over_ranks(
    sums: Tensor, group: dist.ProcessGroup | None, tree_sums: TreeSums | None
) -> Tensor:
    """Adds up tensors over all ranks, and returns the sums. May overwrite its argument.

    Args:
        sums: the sums over the samples of this rank, contiguous.
        group: the ranks.
        tree_sums: adds up in a fixed order; None if the order may depend on the machines.
    """
    # If `sums` is on the device that the backend sends from, `to` does not copy it.
    device_of_backend = carrier_device(sums.device, group)
    totals = sums.to(device_of_backend)
    if tree_sums is None:
        routing.all_reduce(totals, group=group)
    else:
        _sum_in_tree(totals, tree_sums)

    return totals.to(sums.device)


def _sum_in_tree(tensor: Tensor, tree_sums: TreeSums) -> None:
    """Replaces a contiguous tensor by its sum over all ranks, added in the order of a tree."""
    flat = tensor.view(-1)
    wait = tree_sums.start([flat], total=flat, scale=1.0)
    wait()


def _two_pass_moments(x: Tensor) -> _LocalMoments:
    """Computes the moments of `x` in two passes: first the mean, then the deviations from it.

    On the CPU this is several times as fast as torch's kernel. The deviations are kept, because the
    output can be computed from them.
    """
    count = x.numel() // x.shape[1]  # values per channel
    rough_mean = x.sum(all_but_channels(x), dtype=statistics_dtype(x)) / count  # (C,)
    deviations = x - per_channel(rough_mean, x)

    sum_of_deviations, sum_of_squares = _sum_and_sum_of_squares(deviations)

    # The rough mean has an error by rounding, which is the mean of the deviations. (It also makes
    # the sum of squares too large, by count * error**2, which does not matter.)
    error_of_rough_mean = sum_of_deviations.double() / count
    mean = rough_mean + error_of_rough_mean
    return _LocalMoments(mean, sum_of_squares, _CentredInput(rough_mean, deviations))


def _sum_and_sum_of_squares(deviations: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, per channel, the sum of the deviations d and the sum of d * d.

    They are sums of products dy * (x - mean) * invstd, with d for dy and x, mean 0 and invstd 1.
    """
    zeros = deviations.new_zeros(deviations.shape[1])
    return _sum_and_sum_of_products(
        dy=deviations, x=deviations, mean=zeros, invstd=torch.ones_like(zeros)
    )


def _sum_and_sum_of_products(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns, per channel, the sum of `dy` and the sum of `dy * (x - mean) * invstd`.

    They are the gradients of bias and weight of a BatchNorm layer. torch's kernel for its backward
    pass computes only these two, in one pass, if the gradient of `x` is not requested.
    """
    # The kernel normalises by the given mean and invstd, so it needs neither running statistics nor
    # eps. It only looks at the dtype of the weight.
    any_tensor_of_that_dtype = invstd
    unused_eps = 0.0
    _, sum_of_products, sum_of_dy = torch.ops.aten.native_batch_norm_backward(
        dy,
        x,
        any_tensor_of_that_dtype,  # weight
        None,  # running mean
        None,  # running variance
        mean,
        invstd,
        True,  # as in training
        unused_eps,
        [False, True, True],  # whether the gradients of x, weight and bias are wanted
    )

    return sum_of_dy, sum_of_products


class _Normalize(torch.autograd.Function):
    """Normalises by moments of the global batch, with the gradient through the moments.

    In its formulas, `invstd` is 1 / sqrt(variance + eps), and `xhat` is the normalised input, (x -
    mean) * invstd.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: _GlobalMoments,
        eps: float,
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Returns `xhat * weight + bias`, where `xhat` is `(x - mean) / sqrt(variance + eps)`.

        `moments` has the float64 moments of all ranks: `mean` and `variance`, of shape (C,), and
        `total`, the number of values per channel. `moments.centred` is a pair: `centre`, the mean
        of this rank's samples, and `deviations`, which is `x - centre`. The output is computed in
        the memory of `deviations`. The backward pass calls `sum_over_ranks`.
        """
        dtype = statistics_dtype(x)
        invstd = (moments.variance + eps).rsqrt()
        mean = moments.mean.to(dtype)
        variance = moments.variance.to(dtype)
        ctx.save_for_backward(x, weight, mean, variance, invstd.to(dtype), moments.total)
        ctx.eps = eps
        ctx.sum_over_ranks = sum_over_ranks
        ctx.is_placeholder = thread_state.computes_placeholder

        # Case 1: this rank has no samples. Its backward pass still takes part in the sums.
        if not x.numel():
            return torch.empty_like(x)

        # Case 2: this rank has a placeholder sample, of which no moments were computed. So there
        # are no deviations to start from, and torch's kernel computes everything.
        if moments.centred is None:
            weight = None if weight is None else weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
            return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

        # Case 3: the deviations from this rank's mean (`centre`) were computed for the moments.
        # The global mean differs: x - mean = deviations + (centre - mean). With scale = invstd *
        # weight,
        #   output = (x - mean) * scale + bias
        #          = deviations * scale + shift, where shift = (centre - mean) * scale + bias.
        centre, deviations = moments.centred
        scale = invstd if weight is None else invstd * weight  # (C,)
        shift = (centre - moments.mean) * scale  # (C,)
        if bias is not None:
            shift += bias

        # Computed in place, because the deviations are not needed any more.
        output = deviations.mul_(per_channel(scale.to(dtype), x))
        return output.add_(per_channel(shift.to(dtype), x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of `x`, weight and bias; the other arguments have none.

        `xhat` is the normalised input, `(x - mean) * invstd`, and `total` is the number of values
        per channel on all ranks. Sums are taken per channel, and have shape (C,).
        """
        x, weight, mean, variance, invstd, total = ctx.saved_tensors
        needs_dx, needs_d_weight, needs_d_bias = ctx.needs_input_grad[:3]
        dy = gradients[0]
        if dy.stride() != x.stride():  # the kernels are fast if both have the same memory format
            dy = torch.empty_like(x).copy_(dy)

        if x.numel() and not ctx.is_placeholder:
            sum_dy, sum_dy_xhat = _sum_and_sum_of_products(dy, x, mean, invstd)
        else:
            sum_dy = torch.zeros_like(mean)
            sum_dy_xhat = torch.zeros_like(mean)

        dx = None
        if needs_dx:
            own_sums = torch.stack([sum_dy, sum_dy_xhat]).double()  # (2, C)
            sums = ctx.sum_over_ranks(own_sums)
            if ctx.is_placeholder:  # the global moments do not depend on a placeholder
                dx = torch.zeros_like(x)
            else:
                # With scale = invstd * weight, and the sums over all ranks:
                #   dx = scale * (dy - sum_dy / total - xhat * sum_dy_xhat / total)
                #      = scale * dy + constant + factor_of_xhat * xhat, where
                #   constant = sum_dy / -total * scale
                #   factor_of_xhat = sum_dy_xhat / -total * scale
                # Both are computed at once, from the two rows of `sums`.
                scale = invstd if weight is None else invstd * weight
                coefficients = sums.div_(-total).mul_(scale).to(invstd.dtype)
                constant, factor_of_xhat = coefficients
                dx = _scaled_sum(
                    dy, scale.to(invstd.dtype), x, mean, variance, ctx.eps, factor_of_xhat, constant
                )

        # Like those of every other parameter, these are gradients of only this rank's loss, which
        # are averaged over the ranks later. On a rank without samples they are zeros.
        d_weight = sum_dy_xhat.to(weight.dtype) if needs_d_weight else None
        d_bias = None
        if needs_d_bias:
            d_bias = sum_dy if weight is None else sum_dy.to(weight.dtype)

        return dx, d_weight, d_bias, None, None, None


def _scaled_sum(
    dy: Tensor,
    scale: Tensor,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    factor_of_xhat: Tensor,
    constant: Tensor,
) -> Tensor:
    """Returns `dy * scale + xhat * factor_of_xhat + constant`, without a temporary tensor.

    `xhat` is `x`, normalised by `mean` and `variance`. `dy` and `x` have the shape (N, C, ...);
    `scale`, `mean`, `variance`, `factor_of_xhat` and `constant` have one number per channel: (C,).
    """
    if not x.numel():
        return torch.zeros_like(x)

    # The kernel of the forward pass computes xhat * weight + bias for any two vectors. With these
    # two, it computes xhat * factor_of_xhat + constant.
    result = F.batch_norm(
        x, mean, variance, weight=factor_of_xhat, bias=constant, training=False, eps=eps
    )
    return result.addcmul_(dy, per_channel(scale, x))


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which statistics of `x` are computed: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def all_but_channels(x: Tensor) -> list[int]:
    """Returns the dimensions over which statistics are computed: all except dimension 1."""
    return [dim for dim in range(x.dim()) if dim != 1]


def per_channel(vector: Tensor, x: Tensor) -> Tensor:
    """Returns a vector of shape (C,) in a shape that broadcasts with `x`, on its device."""
    ones = [1] * (x.dim() - 2)
    return vector.to(x.device).view(1, -1, *ones)


class BatchNormNames(NamedTuple):
    """The names of a module's BatchNorm layers, as in `named_modules()` (the root is "")."""

    converted: list[str]
    """The layers that now take their statistics over all samples."""
    left_alone: list[str]
    """The layers that were not converted, because they have their own forward."""

    def choices(self, *, computed_by: str, samples: str) -> list[Choice]:
        """Returns the printed lines about the layers: those converted, and those left alone.

        Args:
            computed_by: what computes a part of the samples: "rank" or "device".
            samples: a description of all samples, to be printed after "statistics of".
        """
        choices: list[Choice] = []
        if self.converted:
            number = len(self.converted)
            choices.append(
                Choice("batchnorm", f"{number} synchronised", f"statistics of {samples}")
            )

        if self.left_alone:
            number = len(self.left_alone)
            reason = "they have a forward of their own"
            choices.append(Choice("batchnorm", f"{number} per {computed_by}", reason))

        return choices


def convert(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> BatchNormNames:
    """Turns every torch BatchNorm (and torch SyncBatchNorm) in a module into a SyncBatchNorm.

    The class of the layers is changed in place: parameters, buffers, hooks and flags stay the same,
    and an optimizer keeps its parameters. A layer of a subclass is converted if the subclass only
    defines a constructor. A layer with other methods of its own is left unchanged, and named in the
    result.

    Args:
        module: the model, or a single layer.
        process_group: the ranks to share statistics with; None for the default group (or the group
            that a torch SyncBatchNorm already has).

    Raises:
        UsageError: a lazy BatchNorm has not seen its first input. Nothing is changed then.
    """
    converted: dict[str, Any] = {}
    left_alone: list[str] = []
    for name, layer in module.named_modules():
        # `BatchNorm` is the base class of all BatchNorm layers of torch, nn.SyncBatchNorm as well.
        if not isinstance(layer, BatchNorm) or isinstance(layer, SyncBatchNorm):
            continue

        if isinstance(layer, LazyModuleMixin):
            raise UsageError(
                f"conversion to SyncBatchNorm of {name or 'the module'}, {describe_type(layer)}",
                "it does not know its number of channels before its first input",
                "run one forward pass of the model on a sample batch first",
            )

        if has_no_method_of_user(layer):
            converted[name] = layer
        else:
            left_alone.append(name)

    # Done at the end, so that nothing is changed if an error is raised above.
    for layer in converted.values():
        # Only a torch SyncBatchNorm may have a process group already.
        layer.process_group = process_group or getattr(layer, "process_group", None)
        layer.__class__ = SyncBatchNorm

    return BatchNormNames(list(converted), left_alone)


def forget_tree_sums(module: nn.Module) -> None:
    """Removes the fixed order of sums from every SyncBatchNorm in a module."""
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.tree_sums = None


def has_no_method_of_user(layer: nn.Module) -> bool:
    """Returns True if replacing the layer's forward loses no code of the user.

    This holds for torch's classes, and for subclasses that only define names with two leading
    underscores, such as `__init__` and `__module__`. A subclass with any other method or attribute
    may compute something else.
    """
    if "forward" in vars(layer):  # set on the object
        return False

    # Check the user's classes, which come before torch's class.
    for layer_class in type(layer).__mro__:
        if layer_class in _TORCH_CLASSES:
            return True
        has_only_special_names = all(name.startswith("__") for name in vars(layer_class))
        if not has_only_special_names:
            return False

    return False  # it has no torch class with a forward that is known here
