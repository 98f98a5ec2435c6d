"""Chooses the way that a collective takes: shared memory on one machine, else torch.distributed.

The group of all ranks, and groups of all ranks of one machine, communicate through shared memory if
`use_shared_memory` was called and the tensor is on the CPU. In all functions `group=None` is the
group of all ranks. `traffic.block` and `traffic.wait` make a call and count the time that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication.shared_memory import SharedMemory
from lockstep.communication.traffic import all_reduce_bytes, traffic

# The tag of what `start_all_to_all` sends, so that it is not taken for what a user's program sends.
ALL_TO_ALL_TAG = 1_047_113
# Backends all-gather in a ring, in which each rank waits for one after the other. If there are more
# ranks than this, a small tensor on the CPU goes to the group's first rank, and from there on in a
# tree.
MAX_RING_RANKS = 8
MAX_SMALL_BYTES = 2**12

_shared_memory: SharedMemory | None = None


def shared_memory() -> SharedMemory | None:
    """Returns the shared memory of the ranks, or None if they do not use any."""
    return _shared_memory


def use_shared_memory(shared: SharedMemory | None) -> None:
    """Lets the ranks communicate through shared memory from now on; None: by the backend again."""
    global _shared_memory
    if _shared_memory is not None:
        _shared_memory.close()
    _shared_memory = shared


def all_reduce(
    tensor: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Reduces a tensor over a group, in place, as `torch.distributed.all_reduce` does.

    Args:
        tensor: is replaced by the result.
        op: SUM, MAX, MIN, or what else the backend can do.
        group: the ranks.
    """
    shared = _shared_memory
    if shared is not None and shared.takes(tensor, op):
        # All ranks: within each machine through its memory, and over the network between machines.
        if group is None:
            shared.all_reduce(tensor, op)
            return
        # The ranks of this machine alone: nothing goes between machines.
        if _is_group_of_machine(group, shared):
            wait = shared.start_all_reduce(tensor, op, between=_no_other_machines)
            wait()
            return
    traffic.block(partial(dist.all_reduce, tensor, op, group))


def start_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """Begins to sum up a tensor over a group, in place.

    Other sums may be started before this one is waited for; all are to be waited for in the order
    in which they were started.

    Returns:
        A function that waits for the sum.
    """
    shared = _shared_memory
    if shared is not None and shared.takes(tensor):
        # All ranks: within each machine through its memory, and over the network between machines.
        if group is None:
            return shared.start_all_reduce(tensor)
        # The ranks of this machine alone: nothing goes between machines.
        if _is_group_of_machine(group, shared):
            return shared.start_all_reduce(tensor, between=_no_other_machines)
    work = cast(dist.Work, dist.all_reduce(tensor, group=group, async_op=True))
    traffic.sent += all_reduce_bytes(tensor.nbytes, dist.get_world_size(group))
    return partial(traffic.wait, work.wait)


def carrier_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Returns where a tensor must be to be sent: NCCL sends from the GPU, others from the CPU.

    Args:
        device: where the tensor is.
        group: the process group that sends it; None: the default group.
    """
    if device.type == "cpu":
        return device
    # The configuration is text such as "cpu:gloo,cuda:nccl". If it has no NCCL for this type of
    # device, Gloo or MPI serves it, and they send from the CPU.
    for part in dist.get_backend_config(group).split(","):
        device_type, backend = part.split(":")
        if device_type == device.type and backend == "nccl":
            return device
    return torch.device("cpu")


def start_all_to_all(
    received: Sequence[Tensor] | Tensor,
    sent: Sequence[Tensor] | Tensor,
    group: dist.ProcessGroup | None = None,
) -> Callable[[], None]:
    """Begins to send the tensor `sent[r]` to rank r of the group, for every rank.

    Args:
        received: tensors, one for each rank, or their rows: `received[r]` is as large as what rank
            r sends to this rank. They may differ in size.
        sent: contiguous tensors, one for each rank.
        group: None for all ranks.

    Returns:
        A function that waits until `received[r]` has what rank r has sent to this rank.
    """
    own_rank = dist.get_rank(group)
    num_ranks = len(sent)
    traffic.sent += sum(tensor.nbytes for tensor in sent) - sent[own_rank].nbytes
    works: list[dist.Work | None]
    if sent[0].is_cuda:
        works = [dist.all_to_all(list(received), list(sent), group=group, async_op=True)]
    else:
        # Not Gloo's own all_to_all: in it each rank sends before it receives. Its message that it
        # is ready to receive then waits behind the data that it sends. So only one side sends at a
        # time, and a slow link is half idle.
        received[own_rank].copy_(sent[own_rank])
        other_ranks = [(own_rank + distance) % num_ranks for distance in range(1, num_ranks)]
        works = []
        for rank in other_ranks:
            if received[rank].numel():
                row = received[rank]  # it is written to
                works.append(dist.irecv(row, group=group, group_src=rank, tag=ALL_TO_ALL_TAG))
        for rank in other_ranks:
            if sent[rank].numel():
                row = sent[rank]
                works.append(dist.isend(row, group=group, group_dst=rank, tag=ALL_TO_ALL_TAG))

    # `run.watch.stacks` knows this function by its name.
    def exchange() -> None:
        """Waits for everything that was started."""
        for work in works:  # torch gives None only to ranks that are not in the group
            traffic.wait(cast(dist.Work, work).wait)

    return exchange


def all_gather(rows: Tensor, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fills a tensor with the tensors of all ranks of the group.

    Args:
        rows: `(ranks, *)`; row r is filled with the tensor of rank r.
        tensor: this rank's, `(*)`.
        group: the ranks.
    """
    # Shared memory carries contiguous tensors of the CPU. Both what this rank gives and what it
    # receives must be such tensors.
    shared = _memory_of_group(group)
    if shared is not None and shared.takes(tensor) and shared.takes(rows):
        shared.all_gather(rows, tensor)
        return
    # Many ranks, and not much to send: not in a ring, in which each rank waits for the one before.
    if len(rows) > MAX_RING_RANKS and _is_small(tensor):
        traffic.block(partial(_all_gather_by_first_rank, rows, tensor, group))
        return
    if _gathers_into_one_tensor(rows, group):
        # Given a list, NCCL gathers into a tensor of its own, and then copies row after row.
        traffic.block(partial(_all_gather_into_one_tensor, rows, tensor, group))
        return
    traffic.block(partial(dist.all_gather, list(rows), tensor, group))


def _gathers_into_one_tensor(rows: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Returns True if NCCL sends tensors like `rows`, and they are one piece of memory."""
    is_on_gpu = rows.device.type != "cpu"
    return is_on_gpu and rows.is_contiguous() and carrier_device(rows.device, group) == rows.device


def _all_gather_into_one_tensor(
    rows: Tensor, tensor: Tensor, group: dist.ProcessGroup | None
) -> None:
    """Gathers the tensors of all ranks into one contiguous tensor."""
    if hasattr(dist, "all_gather_single"):
        gather = dist.all_gather_single
    else:
        gather = dist.all_gather_into_tensor  # its name before torch 2.13
    # One after the other, not stacked: all backends can do that.
    gather(rows.view(-1), tensor.reshape(-1), group=group)


def _is_small(tensor: Tensor) -> bool:
    """Returns True if the first rank may gather a tensor; Gloo gathers no complex numbers."""
    is_on_cpu = tensor.device.type == "cpu"
    return is_on_cpu and tensor.nbytes <= MAX_SMALL_BYTES and not tensor.is_complex()


def _all_gather_by_first_rank(
    rows: Tensor, tensor: Tensor, group: dist.ProcessGroup | None
) -> None:
    """Gathers the tensors on the group's first rank, which sends all of them to every rank."""
    gathered = list(rows) if dist.get_rank(group) == 0 else None  # `dist.gather` wants None there
    dist.gather(tensor, gathered, group=group, group_dst=0)
    dist.broadcast(rows, group=group, group_src=0)


def broadcast(tensor: Tensor, source: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Copies the tensor of a rank of the group to the others, as `torch.distributed.broadcast`.

    Args:
        tensor: what is sent by rank `source`, and is written to on the others. It has one dtype and
            shape on all ranks, and is contiguous on all or none, so that all go the same way.
        source: the number of the rank in the group.
        group: the ranks.
    """
    shared = _memory_of_group(group)
    if shared is not None and shared.takes(tensor):
        shared.broadcast(tensor, source)
    else:
        traffic.block(partial(dist.broadcast, tensor, group=group, group_src=source))


def _memory_of_group(group: dist.ProcessGroup | None) -> SharedMemory | None:
    """Returns the memory that all ranks of a group share; None: they do not share any."""
    if _shared_memory is not None and _is_group_of_machine(group, _shared_memory):
        return _shared_memory
    return None


def _is_group_of_machine(group: dist.ProcessGroup | None, shared: SharedMemory) -> bool:
    """Returns True if a group consists of all ranks that share the memory.

    Args:
        group: the group; None: all ranks of the run.
        shared: the memory of the ranks of this machine.
    """
    if group is None:  # then there must be one machine, and so no group across machines
        return shared.across is None
    return dist.get_process_group_ranks(group) == shared.ranks


def _no_other_machines(shard: Tensor) -> Callable[[], None]:
    """Stands for the exchange with other machines, in a sum over one machine."""
    return lambda: None
