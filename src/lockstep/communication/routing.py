"""Which way a collective takes: shared memory on one machine, torch.distributed everywhere else.

Those of groups that the user or torch has opened are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch.distributed as dist
from torch import Tensor

from lockstep.communication.link import all_reduce_bytes, traffic
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
        traffic.block(partial(dist.all_reduce, tensor, op, group))


def start_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """The sum over a group, None being all ranks, in two halves: what this returns waits for it.

    Between them others may be started; all are to be ended in the same order.
    """
    if group is None and _shared is not None and _shared.takes(tensor):
        return _shared.start_all_reduce(tensor)
    work = cast(dist.Work, dist.all_reduce(tensor, group=group, async_op=True))
    traffic.sent += all_reduce_bytes(tensor.nbytes, dist.get_world_size(group))
    return partial(traffic.wait, work.wait)


def all_gather(parts: list[Tensor], tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """`torch.distributed.all_gather`; None is the group of all ranks."""
    shared = _shared if group is None else None
    if shared is None or shared.across is not None or not all(map(shared.takes, (tensor, *parts))):
        traffic.block(partial(dist.all_gather, parts, tensor, group))
    else:
        shared.all_gather(parts, tensor)


def broadcast(tensor: Tensor, source: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """`torch.distributed.broadcast` from a rank of the group; None is the group of all ranks."""
    shared = _shared if group is None else None
    if shared is None or shared.across is not None or not shared.takes(tensor):
        traffic.block(partial(dist.broadcast, tensor, group=group, group_src=source))
    else:
        shared.broadcast(tensor, source)
