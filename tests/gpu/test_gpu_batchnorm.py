"""SyncBatchNorm's kernels for GPUs give the values of torch's BatchNorm on the CPU in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_devices import DEVICES, run_on
from ranks import in_gloo_group
from torch import Tensor, nn

from lockstep.strategies.sync_batchnorm import SyncBatchNorm

pytestmark = pytest.mark.ranks

CHANNELS, STEPS = 5, 2
SHARES = [(5, 2), (0, 4), (6, 1)]
INNER: list[tuple[int, ...]] = [(), (7,), (3, 4), (2, 3, 2)]
# The mean of the values is 3: sums of rounded ones lose a few bits of what the dtype has.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 6e-3,
}


@in_gloo_group
def normalise(device: str) -> list[tuple[str, float, float]]:
    """What was compared, how far it is off and how far it may be."""
    return [
        (f"{dtype}, shares {shares}, inner {inner}, {format}: {what}", error, TOLERANCE[dtype])
        for dtype in TOLERANCE
        for shares in SHARES
        for inner in INNER
        for format in (torch.contiguous_format, torch.channels_last)
        if len(inner) == 2 or format is torch.contiguous_format
        for what, error in compare(device, dtype, shares, inner, format)
    ]


def compare(
    device: str,
    dtype: torch.dtype,
    shares: tuple[int, ...],
    inner: tuple[int, ...],
    memory_format: torch.memory_format,
) -> list[tuple[str, float]]:
    """Some steps of a layer over the ranks; beside it torch's own over the whole batch."""
    rank, size, total = dist.get_rank(), dist.get_world_size(), sum(shares)
    torch.manual_seed(total + len(inner))
    kind: Any = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(inner)]
    whole_layer = kind(CHANNELS).double()
    with torch.no_grad():
        for parameter in whole_layer.parameters():
            parameter.uniform_(0.5, 2)
    # As under autocast: parameters and statistics are in fp32 where values are in half precision.
    layer = SyncBatchNorm(CHANNELS, device=device, dtype=torch.promote_types(dtype, torch.float32))
    layer.load_state_dict(whole_layer.state_dict())
    found: list[tuple[str, float]] = []
    for _ in range(STEPS):
        given = (torch.randn(total, CHANNELS, *inner, dtype=torch.float64) + 3).to(dtype)
        dy = torch.randn(given.shape, dtype=torch.float64).to(dtype)
        whole_x = given.double().clone().requires_grad_()
        whole_y = whole_layer(whole_x)
        whole_y.backward(dy.double())
        x = given.split(shares)[rank].to(device).contiguous(memory_format=memory_format)
        y = layer(x.requires_grad_())
        assert (y.dtype, y.device) == (dtype, x.device)
        assert y.is_contiguous(memory_format=memory_format)
        y.backward(dy.split(shares)[rank].to(device))
        found += [
            ("output", off(y, whole_y.split(shares)[rank])),
            ("input's gradient", off(x.grad, whole_x.grad.split(shares)[rank])),
        ]
        for (name, parameter), whole in zip(
            layer.named_parameters(), whole_layer.parameters(), strict=True
        ):
            gradient = parameter.grad.cpu()
            dist.all_reduce(gradient)
            found.append((f"gradient of {name}", off(gradient, whole.grad)))
        layer.zero_grad()
        whole_layer.zero_grad()
    for (name, buffer), whole in zip(layer.named_buffers(), whole_layer.buffers(), strict=True):
        found.append((name, off(buffer, whole)))
    assert size == len(shares)
    return found


def off(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    a, b = found.detach().cpu().double(), wanted.detach().double()
    assert a.shape == b.shape
    return float((a - b).abs().max()) / max(float(b.abs().max()), 1.0) if b.numel() else 0.0


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_give_the_values_of_one_process(device: str) -> None:
    for compared in run_on(normalise, 2, device):
        wrong = [(what, error) for what, error, allowed in compared if not error <= allowed]
        assert not wrong
        # The tolerances are not empty words: half precision is really computed with.
        assert max(error for what, error, _ in compared if "bfloat16" in what) > 1e-4
