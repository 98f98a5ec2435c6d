"""Buffers under DDP: those that move are taken from rank 0 after every step.

The statistics of a SyncBatchNorm are equal on all ranks by construction, and most other buffers
(masks, tables) never change; sending them would be waste. What moves is found by looking, in the
first steps and now and then, with one small all-reduce so that all ranks agree.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.strategies.base import take_from_first
from lockstep.strategies.replica_check import fingerprint
from lockstep.strategies.sync_batchnorm import SyncBatchNorm


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

    def find(self) -> None:
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

    def share(self) -> None:
        """Gives every rank the first rank's values."""
        if self.moving:
            now = dict(self._module.named_buffers())
            take_from_first((now[name] for name in self.moving), self._group)
