"""Tensors that every rank has of the first one: parameters once, buffers that move in each step.

The statistics of a SyncBatchNorm are equal on all ranks by construction, and most other buffers
(masks, tables) never change; sending them would be waste. What moves is found by looking, in the
first steps and now and then, with one small all-reduce so that all ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed import collectives
from lockstep.errors import UsageError
from lockstep.step import check_due
from lockstep.strategies.sync_batchnorm import SyncBatchNorm

_TOGETHER = 2**25
"""Bytes that are sent at a time."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**17
"""Numbers summed at a time on the CPU, where torch first makes 64-bit ones of all of them."""


def take_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Gives tensors the first rank's values, as bytes: no backend knows all dtypes.

    Args:
        tensors: equal in number, shape and dtype on all ranks; on devices of the backend.
        group: None: all ranks.

    Raises:
        UsageError: one of them is sparse.
    """
    alike: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise UsageError(
                "world.prepare of a model that holds a sparse tensor",
                f"a buffer or parameter of shape {tuple(tensor.shape)} has the layout "
                f"{tensor.layout}, and only dense ones are made equal on all ranks",
                "register its indices and its values as buffers, or keep it as a plain attribute",
            )
        if any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            tensor.data = tensor.data.contiguous()  # an expanded one has no memory to write to
        if tensor.numel():
            alike.setdefault(tensor.device, []).append(tensor.detach())
    for waiting in alike.values():
        while waiting:
            count, size = 1, waiting[0].nbytes
            while count < len(waiting) and size + waiting[count].nbytes <= _TOGETHER:
                size += waiting[count].nbytes
                count += 1
            _send(waiting[:count], group)
            del waiting[:count]


def _send(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    data = [collectives.to_bytes(tensor) for tensor in tensors]
    flat = torch.cat(data) if len(data) > 1 else data[0]
    dist.broadcast(flat, group=group, group_src=0)
    for tensor, came in zip(tensors, torch.split(flat, [len(each) for each in data]), strict=True):
        if came.data_ptr() != tensor.data_ptr():  # its own memory has come already
            # A copy of its own is aligned, as its dtype must be.
            tensor.copy_(collectives.from_bytes(came.clone(), tensor.dtype, tensor.shape))


class MovingBuffers:
    """Keeps the buffers of a module equal on all ranks, or on those of a group.

    Buffers that are on other ranks, and here on the meta device, are left out.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._module = module
        self._group = group
        synchronised = {
            id(buffer)
            for child in module.modules()
            if isinstance(child, SyncBatchNorm)
            for buffer in child.buffers(recurse=False)
        }
        self._watched = [
            name
            for name, buffer in module.named_buffers()
            if buffer.numel() and not buffer.is_meta and id(buffer) not in synchronised
        ]
        self._before = self._bits(self._watched)
        self.moving: list[str] = []

    def follow(self, number: int) -> None:
        """After global batch `number`: gives every rank the first rank's values of what moves."""
        if check_due(number):
            self._find()
        if self.moving:
            now = dict(self._module.named_buffers())
            take_from_first((now[name] for name in self.moving), self._group)

    def _find(self) -> None:
        """Looks which buffers have changed on any rank since the module was wrapped.

        It compares their bits: torch does not count what its BatchNorm writes as a change.
        """
        if not self._watched:
            return
        now = self._bits(self._watched)
        changed = (now != self._before).to(torch.uint8)
        dist.all_reduce(changed, dist.ReduceOp.MAX, self._group)
        self.moving = [
            name
            for name, flag in zip(self._watched, changed.tolist(), strict=True)
            if flag or name in self.moving
        ]

    def _bits(self, names: list[str]) -> Tensor:
        now = dict(self._module.named_buffers())
        return fingerprint(now[name] for name in names) if names else torch.empty(0)


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
