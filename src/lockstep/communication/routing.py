"""Which way a collective takes: shared memory on one machine, torch.distributed everywhere else.

Asynchronous ones, and those of groups that the user or torch has opened, are torch's own.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from lockstep.communication.shared_memory import SharedMemory

_shared: SharedMemory | None = None


def shared_memory() -> SharedMemory | None:
    """That of all ranks, where they have some."""
    return _shared


def use_shared_memory(shared: SharedMemory | None) -> None:
    """From now on the group of all ranks communicates by it; None: by its backend again."""
    global _shared
    if _shared is not None:
        _shared.close()
    _shared = shared


def all_reduce(
    tensor: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """`torch.distributed.all_reduce`; None is the group of all ranks."""
    if group is None and _shared is not None and _shared.takes(tensor, op):
        _shared.all_reduce(tensor, op)
    else:
        dist.all_reduce(tensor, op, group)


def all_gather(parts: list[Tensor], tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """`torch.distributed.all_gather`; None is the group of all ranks."""
    shared = _shared if group is None else None
    if shared is None or shared.across is not None or not all(map(shared.takes, (tensor, *parts))):
        dist.all_gather(parts, tensor, group)
    else:
        shared.all_gather(parts, tensor)
