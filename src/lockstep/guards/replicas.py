"""Do the replicas still hold the same bits? One pass over the parameters and one small all-reduce.

Every tensor's bits are summed as integers; the largest and the smallest sum over the ranks must be
equal. Gradients are averaged to the same bits on all ranks, so anything else is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import RanksDifferError

EVERY = 200
"""Global batches from one look to the next, by default."""
_EARLY = frozenset({1, 2, 3, 10})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**17
"""Numbers summed at a time on the CPU, where torch first makes 64-bit ones of all of them."""


def due(number: int, every: int = EVERY) -> bool:
    """Whether to look after this global batch: in the first ones, and now and then."""
    return number in _EARLY or number % every == 0


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """One 64-bit sum of the bits of each tensor, shape `(number of tensors,)`."""
    sums = []
    for tensor in tensors:
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        bits = real.contiguous().view(_INTEGERS[real.element_size()])
        if bits.is_cuda or bits.numel() <= _CHUNK:
            sums.append(bits.sum(dtype=torch.int64))
        else:
            parts = [part.sum(dtype=torch.int64) for part in torch.split(bits.view(-1), _CHUNK)]
            sums.append(torch.stack(parts).sum())
    return torch.stack([part.to(sums[0].device) for part in sums])


def check_replicas(module: nn.Module, when: str, group: dist.ProcessGroup | None = None) -> None:
    """Compares the parameters and buffers of a module over all ranks, or those of a group.

    What is on the meta device is on other ranks, and is left out.

    Raises:
        RanksDifferError: on every rank, naming the tensors.
    """
    check_equal(dict(module.named_parameters()), dict(module.named_buffers()), when, group)


def check_equal(
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    when: str,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Compares tensors over all ranks, or those of a group, but for those on the meta device.

    Raises:
        RanksDifferError: on every rank, naming the tensors.
    """
    named = {n: t for n, t in {**parameters, **buffers}.items() if t.numel() and not t.is_meta}
    if not named:
        return
    mine = fingerprint(named.values())
    extremes = torch.cat([mine, -mine])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    largest, smallest = extremes.chunk(2)
    differ = [
        name for name, same in zip(named, (largest == -smallest).tolist(), strict=True) if not same
    ]
    if differ:
        shown = ", ".join(differ[:5]) + (f" and {len(differ) - 5} more" if len(differ) > 5 else "")
        raise RanksDifferError(
            f"replicas that stay equal ({when})",
            f"{len(differ)} of {len(named)} tensors differ between ranks: {shown}",
            "look for a forward pass that goes around the prepared model, parameters changed by "
            "hand on some ranks, or a step taken on some ranks only",
            code="LS309" if all(name in buffers for name in differ) else "LS304",
        )
