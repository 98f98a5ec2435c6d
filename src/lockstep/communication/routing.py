"""Which way a collective takes: shared memory on one machine, torch.distributed everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch.distributed as dist
from torch import Tensor

from lockstep.communication.link import all_reduce_bytes, traffic
from lockstep.communication.shared_memory import SharedMemory

_TAG = 1_047_113
"""Of what `start_all_to_all` sends, so that it is not taken for what a user's program sends."""

_RING, _SMALL_BYTES = 8, 2**12
"""Backends all-gather in a ring, where each rank waits for one after the other. What is small and
on the CPU goes by the group's first rank where there are more ranks: to it, and from there in a
tree."""

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


def start_all_to_all(
    received: Tensor, sent: Tensor, group: dist.ProcessGroup | None = None
) -> Callable[[], None]:
    """Row r of `sent` goes to rank r of the group, and its row for this rank comes into `received`.

    What this returns waits until `received` is there.
    """
    own, size = dist.get_rank(group), len(sent)
    traffic.sent += (size - 1) * sent[0].nbytes
    works: list[dist.Work | None]
    if sent.is_cuda:
        works = [dist.all_to_all_single(received, sent.contiguous(), group=group, async_op=True)]
    else:
        received[own].copy_(sent[own])
        others = [(own + distance) % size for distance in range(1, size)]
        # In Gloo's all_to_all each rank sends before it receives. Its word that it is ready to
        # receive then waits behind what it sends, so only one side sends at a time, and a slow link
        # is half idle.
        works = [dist.irecv(received[r], group=group, group_src=r, tag=_TAG) for r in others]
        works += [dist.isend(sent[r], group=group, group_dst=r, tag=_TAG) for r in others]

    def exchange() -> None:
        for work in works:
            traffic.wait(cast(dist.Work, work).wait)

    return exchange


def all_gather(rows: Tensor, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fills `rows`, one for each rank of the group, with their tensors; None: of all ranks."""
    here = _shared is not None and _on_this_machine(group, _shared)
    if _shared is not None and here and _shared.takes(tensor) and _shared.takes(rows):
        _shared.all_gather(rows, tensor)
    elif len(rows) > _RING and _may_go_by_first(tensor):
        traffic.block(partial(_all_gather_by_first, rows, tensor, group))
    else:
        traffic.block(partial(dist.all_gather, list(rows), tensor, group))


def _may_go_by_first(tensor: Tensor) -> bool:
    """Whether it is small enough for `_all_gather_by_first`; Gloo gathers no complex numbers."""
    on_cpu = tensor.device.type == "cpu"
    return on_cpu and tensor.nbytes <= _SMALL_BYTES and not tensor.is_complex()


def _all_gather_by_first(rows: Tensor, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    taken = list(rows) if dist.get_rank(group) == 0 else None
    dist.gather(tensor, taken, group=group, group_dst=0)
    dist.broadcast(rows, group=group, group_src=0)


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
