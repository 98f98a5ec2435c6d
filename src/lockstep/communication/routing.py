"""Which way a collective takes: shared memory on one machine, torch.distributed everywhere else."""

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
    shared = _shared if _shared is not None and _shared.takes(tensor, op) else None
    if shared is not None and group is None:
        shared.all_reduce(tensor, op)
    elif shared is not None and _on_this_machine(group, shared):
        shared.start_all_reduce(tensor, op, between=_stays_here)()
    else:
        traffic.block(partial(dist.all_reduce, tensor, op, group))


def start_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """The sum over a group, None being all ranks, in two halves: what this returns waits for it.

    Between them others may be started; all are to be ended in the same order.
    """
    if _shared is not None and _shared.takes(tensor):
        if group is None:
            return _shared.start_all_reduce(tensor)
        if _on_this_machine(group, _shared):
            return _shared.start_all_reduce(tensor, between=_stays_here)
    work = cast(dist.Work, dist.all_reduce(tensor, group=group, async_op=True))
    traffic.sent += all_reduce_bytes(tensor.nbytes, dist.get_world_size(group))
    return partial(traffic.wait, work.wait)


def all_gather(parts: list[Tensor], tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """`torch.distributed.all_gather`; None is the group of all ranks."""
    here = _shared is not None and _on_this_machine(group, _shared)
    if _shared is not None and here and all(map(_shared.takes, (tensor, *parts))):
        _shared.all_gather(parts, tensor)
    else:
        traffic.block(partial(dist.all_gather, parts, tensor, group))


def broadcast(tensor: Tensor, source: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """`torch.distributed.broadcast` from a rank of the group; None is the group of all ranks."""
    if _shared is not None and _on_this_machine(group, _shared) and _shared.takes(tensor):
        _shared.broadcast(tensor, source)
    else:
        traffic.block(partial(dist.broadcast, tensor, group=group, group_src=source))


def _on_this_machine(group: dist.ProcessGroup | None, shared: SharedMemory) -> bool:
    """Whether a group is that of the ranks that share memory, all of them."""
    if group is None:
        return shared.across is None
    return dist.get_process_group_ranks(group) == shared.ranks


def _stays_here(mine: Tensor) -> Callable[[], None]:
    """In the place of an exchange with the other machines."""
    return lambda: None
