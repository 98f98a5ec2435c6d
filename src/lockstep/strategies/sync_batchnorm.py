"""BatchNorm over the global batch: the statistics of all ranks' samples, however they are shared.

Forward, in training on more than one rank: every rank takes the count, mean and sum of squared
deviations (M2) of its own samples, one all-gather of `1 + 2C` float64 numbers brings them together,
and every rank combines them in rank order by the parallel formula of Chan, Golub and LeVeque
("Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979). All ranks
compute the same bits, so the running statistics stay equal without being broadcast.

Backward: one all-reduce of `2C` float64 numbers (the sums of dy and of dy * normalised x), then
the input gradient of Ioffe and Szegedy ("Batch Normalization", arXiv 1502.03167, section 3).
It is linear in the ranks' losses: scale each rank's loss as you like, and the sum over ranks of
the gradients is the gradient of the sum of the scaled losses. The weight's and bias's gradients
are left as local sums, so they are averaged over ranks as every other parameter's.

Every rank must run the layer, forward and backward, equally often; a rank without samples takes
part with an input of shape (0, C, ...).
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.lazy import LazyModuleMixin

from lockstep.communication import routing
from lockstep.distributed.process_group import blocked, carrier_device
from lockstep.distributed.torch_compat import BatchNorm, outside_compiled_code
from lockstep.errors import DataError, UsageError
from lockstep.settings import Choice

_TORCH_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _PlaceholderState(threading.local):
    """Whether this thread computes a placeholder sample: see `strategies.placeholder`."""

    computed = False


placeholder = _PlaceholderState()


class SyncBatchNorm(BatchNorm):
    """Batch normalisation over the samples of all ranks, on CPU and CUDA.

    Takes inputs of shape (N, C), (N, C, L), (N, C, H, W) or (N, C, D, H, W), where N may differ
    between ranks and may be 0; returns the same shape, dtype and memory format. Parameters,
    buffers and `state_dict` keys are those of `torch.nn.BatchNorm2d`.

    Outside training, without a process group and on one rank it is torch's own BatchNorm, bit for
    bit, and does not communicate. (In eval mode with `track_running_stats=False` that means
    statistics of the rank's own batch, as in torch.)

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics; None averages all batches.
        affine: learn a weight and a bias per channel.
        track_running_stats: keep running statistics for eval mode.
        process_group: the ranks to share statistics with; None is the default group, looked up
            when the layer runs.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
        bias: learn a bias (with `affine`).

    Raises:
        DataError: at forward, for an input of another shape, or in training when the global batch
            has one value per channel.
        UsageError: at forward, on a rank outside `process_group`, or in training mode in an
            evaluation in which some rank has no samples.
    """

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
        """Normalises `x` over the global batch in training, by the running statistics in eval."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return super().forward(x)
        size = dist.get_world_size(self.process_group)
        if size == 1:
            return super().forward(x)
        if size < 1:
            raise UsageError(
                "SyncBatchNorm over a process group",
                "this rank is not a member of the group",
                "pass a group that holds this rank, or process_group=None for all ranks",
            )
        if not torch.is_grad_enabled() and (reason := blocked()) is not None:
            raise UsageError(
                "a model in training mode in an evaluation loop",
                f"its BatchNorm would wait for all ranks, but {reason}",
                "call model.eval() first; for update_bn give the loader drop_last=True",
            )
        return self._forward_over_ranks(x, size)

    @outside_compiled_code  # it communicates
    def _forward_over_ranks(self, x: Tensor, size: int) -> Tensor:
        self._check_input_dim(x)
        moments = _global_moments(x, self.process_group)
        # Only where this rank holds at most one value can the total be that small: elsewhere the
        # host never waits for the device.
        if x.numel() <= x.shape[1]:
            total = int(moments.total)
            if total == 0:  # as torch: an empty output, and statistics left as they are
                return super().forward(x)
            if total == 1:
                raise one_value(
                    f"batch normalisation in training over a global batch on {size} ranks",
                    f"got input size {x.shape} here and 1 value per channel over all ranks",
                )
        if self.track_running_stats:
            update_running_stats(self, moments.mean, moments.variance, moments.total)
        output: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, moments, self.eps, self.process_group
        )
        return output

    def _check_input_dim(self, x: Tensor) -> None:
        check_input(self, x)


def check_input(layer: BatchNorm, x: Tensor, name: str | None = None) -> None:
    """Raises DataError for an input of another shape than a layer (of this name) takes."""
    channels = layer.num_features
    if not 2 <= x.dim() <= 5 or x.shape[1] != channels:
        raise DataError(
            f"{type(layer).__name__}({channels})" + ("" if name is None else f" {name!r}"),
            f"an input of shape {tuple(x.shape)}",
            f"give it (N, {channels}) or (N, {channels}, ...) with up to 5 dimensions",
        )


def one_value(was_set: str, found: str) -> DataError:
    """The error of a batch that has no variance."""
    return DataError(
        was_set,
        f"Expected more than 1 value per channel when training, {found}",
        "use a larger batch, drop a last batch of one sample, or call .eval()",
    )


@torch.no_grad()
def update_running_stats(layer: BatchNorm, mean: Tensor, variance: Tensor, total: Tensor) -> None:
    """Lets a layer's running statistics follow those of a batch, as torch's BatchNorm does.

    Args:
        layer: of torch's, too.
        mean: (C,).
        variance: (C,), biased.
        total: (), values per channel, float64.
    """
    weight = layer.momentum or 0.0
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            weight = 1.0 / float(layer.num_batches_tracked)
    if layer.running_mean is not None:
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), weight)
    if layer.running_var is not None:
        unbiased = variance * (total / (total - 1))
        layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), weight)


class _Centred(NamedTuple):
    """What taking the moments in two passes leaves behind; the output is made of it in place."""

    centre: Tensor
    """(C,), this rank's mean, rounded to the dtype of the statistics."""
    deviations: Tensor
    """`x - centre`."""


_LocalMoments = tuple[Tensor, Tensor, _Centred | None]
"""Mean (C,) and sum of squared deviations (C,) of this rank's values."""


class _Moments(NamedTuple):
    """Of the values of all ranks; float64, on the input's device."""

    mean: Tensor
    """(C,)"""
    variance: Tensor
    """(C,), biased."""
    total: Tensor
    """(), values per channel."""
    centred: _Centred | None


@torch.no_grad()
def _global_moments(x: Tensor, group: dist.ProcessGroup | None) -> _Moments:
    channels = x.shape[1]
    centred = None
    if x.numel() and not placeholder.computed:
        mean, squares, centred = _one_pass(x) if x.is_cuda else _two_passes(x)
        count = torch.full((1,), x.numel() // channels, dtype=torch.float64, device=x.device)
        own = torch.cat([count, mean, squares])
    else:
        own = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=x.device)
    own = own.to(carrier_device(x.device, group))
    everyone = own.new_empty(dist.get_world_size(group), own.numel())
    routing.all_gather(everyone, own, group)
    everyone = everyone.to(x.device)
    counts, means = everyone[:, :1], everyone[:, 1 : 1 + channels]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    squares = everyone[:, 1 + channels :].sum(0) + (counts * (means - mean).square()).sum(0)
    return _Moments(mean, squares / total, total, centred)


def _one_pass(x: Tensor) -> _LocalMoments:
    variance, mean = torch.var_mean(x.to(statistics_dtype(x)), all_but_channels(x), correction=0)
    return mean, variance * (x.numel() // x.shape[1]), None


def _two_passes(x: Tensor) -> _LocalMoments:
    """On the CPU several times as fast as torch's kernels that need one pass."""
    dims, count = all_but_channels(x), x.numel() // x.shape[1]
    centre = x.sum(dims, dtype=statistics_dtype(x)) / count
    deviations = x - per_channel(centre, x)
    rest, squares = _sums(deviations, deviations, torch.zeros_like(centre), torch.ones_like(centre))
    # What the rounding of `centre` left over counts for the mean; in the squares it is of second
    # order.
    return centre + rest.double() / count, squares, _Centred(centre, deviations)


def _sums(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
    """Over all dimensions but the channels: the sums of `dy` and of `dy * (x - mean) * invstd`."""
    # Asked for the gradients of bias and weight alone, this kernel takes both sums in one pass.
    # It reads only the dtype of its third argument, the weight.
    _, with_x, plain = torch.ops.aten.native_batch_norm_backward(
        dy, x, invstd, None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return plain, with_x


class _Normalize(torch.autograd.Function):
    """Normalisation by moments of the global batch, with the gradient through them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: _Moments,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        mean, variance, total, centred = moments
        dtype = statistics_dtype(x)
        invstd = (variance + eps).rsqrt()
        rounded = mean.to(dtype), variance.to(dtype)
        ctx.save_for_backward(x, weight, *rounded, invstd.to(dtype), total)
        ctx.eps, ctx.group = eps, group
        ctx.counts = not placeholder.computed
        if not x.numel():
            return torch.empty_like(x)
        if centred is None:
            weight = None if weight is None else weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
            return F.batch_norm(x, *rounded, weight, bias, training=False, eps=eps)
        scale = invstd if weight is None else invstd * weight
        shift = (centred.centre - mean) * scale
        if bias is not None:
            shift += bias
        output = centred.deviations.mul_(per_channel(scale.to(dtype), x))
        return output.add_(per_channel(shift.to(dtype), x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, invstd, total = ctx.saved_tensors
        dy = gradients[0]
        if dy.stride() != x.stride():  # the kernels are fast when both lie alike in memory
            dy = torch.empty_like(x).copy_(dy)
        if x.numel() and ctx.counts:
            sum_dy, sum_dy_xhat = _sums(dy, x, mean, invstd)
        else:
            sum_dy = sum_dy_xhat = torch.zeros_like(mean)
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([sum_dy, sum_dy_xhat]).double()
            sums = sums.to(carrier_device(x.device, ctx.group))
            routing.all_reduce(sums, group=ctx.group)
            scale = invstd if weight is None else invstd * weight
            means = sums.to(x.device).div_(-total).mul_(scale).to(invstd.dtype)
            if ctx.counts:
                dx = _input_gradient(dy, x, mean, variance, scale.to(invstd.dtype), means, ctx.eps)
            else:  # the statistics do not depend on a placeholder
                dx = torch.zeros_like(x)
        # As on every other parameter: of this rank's loss alone, and zeros from an empty share.
        d_weight = sum_dy_xhat.to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_bias = sum_dy if weight is None else sum_dy.to(weight.dtype)
        return dx, d_weight, d_bias if ctx.needs_input_grad[2] else None, None, None, None


def _input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, variance: Tensor, scale: Tensor, means: Tensor, eps: float
) -> Tensor:
    """`dy * scale + means[0] + xhat * means[1]`: two passes and no temporary."""
    if not x.numel():
        return torch.zeros_like(x)
    dx = F.batch_norm(x, mean, variance, means[1], means[0], training=False, eps=eps)
    return dx.addcmul_(dy, per_channel(scale, x))


def statistics_dtype(x: Tensor) -> torch.dtype:
    """In which statistics of `x` are taken, on its device."""
    return torch.promote_types(x.dtype, torch.float32)


def all_but_channels(x: Tensor) -> list[int]:
    """The dimensions that statistics are taken over."""
    return [d for d in range(x.dim()) if d != 1]


def per_channel(vector: Tensor, x: Tensor) -> Tensor:
    """`vector`, (C,), in a shape that goes with `x`, and on its device."""
    return vector.to(x.device).view(1, -1, *[1] * (x.dim() - 2))


class Names(NamedTuple):
    """Of the batch norms of a module, as in `named_modules()` (the root is "")."""

    converted: list[str]
    """Those that take their statistics over all samples now."""
    left: list[str]
    """Those left alone because they have behaviour of their own."""

    def choices(self, *, each: str, of: str) -> list[Choice]:
        """In words: `each` one has a part of the samples, and these are `of` all."""
        rows = (
            (len(self.converted), "synchronised", f"statistics of {of}"),
            (len(self.left), f"per {each}", "they have a forward of their own"),
        )
        return [Choice("batchnorm", f"{n} {how}", why) for n, how, why in rows if n]


def convert(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> Names:
    """Turns every torch BatchNorm (and torch SyncBatchNorm) in `module` into a SyncBatchNorm.

    The layers change class in place: parameters, buffers, hooks, flags and sharing stay as they
    are, and an optimizer that holds the parameters goes on holding them. A subclass is converted
    when all it defines is a constructor; one with methods of its own is left alone and named in
    the result.

    Args:
        module: the model, or a single layer.
        process_group: the ranks to share statistics with; None is the default group (for a torch
            SyncBatchNorm: the group it has).

    Raises:
        UsageError: a lazy BatchNorm has not seen its first input; nothing is changed then.
    """
    converted: dict[str, Any] = {}
    left: list[str] = []
    for name, layer in module.named_modules():
        if not isinstance(layer, BatchNorm) or isinstance(layer, SyncBatchNorm):
            continue
        if isinstance(layer, LazyModuleMixin):
            raise UsageError(
                f"conversion to SyncBatchNorm of {name or 'the module'}, a {type(layer).__name__}",
                "it does not know its number of channels before its first input",
                "run one forward pass of the model on a sample batch first",
            )
        if is_plain(layer):
            converted[name] = layer
        else:
            left.append(name)
    for layer in converted.values():
        layer.process_group = process_group or vars(layer).get("process_group")
        layer.__class__ = SyncBatchNorm
    return Names(list(converted), left)


def is_plain(layer: nn.Module) -> bool:
    """True when another forward in the place of the layer's loses none of its behaviour."""
    if "forward" in vars(layer):
        return False
    for layer_class in type(layer).__mro__:
        if layer_class in _TORCH_CLASSES:
            return True
        if not all(name.startswith("__") for name in vars(layer_class)):
            return False
    return False
