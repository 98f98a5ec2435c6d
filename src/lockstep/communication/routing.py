"""Collectives that use shared memory where possible, and torch.distributed otherwise.

Shared memory carries CPU tensors between the ranks of one machine, once `use_shared_memory` was
called. Everything else goes through the backend, such as Gloo or NCCL. In all functions
`group=None` is the group of all ranks. `traffic.block` and `traffic.wait` call a function and
measure how long it takes.
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

# The tag of the messages of `start_all_to_all`, which keeps them apart from those of user scripts.
ALL_TO_ALL_TAG = 1_047_113
# Backends all-gather in a ring, where data passes through all ranks one after the other. With more
# ranks than this, the group's first rank gathers a small CPU tensor and broadcasts the result.
MAX_RING_RANKS = 8
MAX_SMALL_BYTES = 2**12

_shared_memory: SharedMemory | None = None


def shared_memory() -> SharedMemory | None:
    """Returns the shared memory of the ranks, or None if they do not use any."""
    return _shared_memory


def num_calls_in_shared_memory() -> int:
    """Returns how many collectives have gone through shared memory so far."""
    return 0 if _shared_memory is None else _shared_memory.num_completed


def use_shared_memory(shared: SharedMemory | None) -> None:
    """Sets the shared memory that collectives use from now on; None to use only the backend."""
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
        tensor: this rank's values, which are replaced by the result.
        op: SUM, MAX, MIN, or any other operation that the backend supports.
        group: the process group; None for all ranks.
    """
    shared = _shared_memory
    if shared is not None and shared.supports(tensor, op):
        # All ranks: within each machine through its memory, and over the network between machines.
        if group is None:
            shared.all_reduce(tensor, op)
            return

        # Only the ranks of this machine.
        if _is_group_of_machine(group, shared):
            shared.all_reduce_within_machine(tensor, op)
            return

    traffic.block(partial(dist.all_reduce, tensor, op, group))


def start_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """Begins to sum a tensor over a group, in place.

    Several sums may be under way at once. They must be waited for in the order in which they were
    started.

    Returns:
        A function that waits until the tensor holds the sum.
    """
    shared = _shared_memory
    if shared is not None and shared.supports(tensor):
        # All ranks: within each machine through its memory, and over the network between machines.
        if group is None:
            return shared.start_all_reduce(tensor)

        # Only the ranks of this machine.
        if _is_group_of_machine(group, shared):
            return shared.start_all_reduce_within_machine(tensor)

    work = cast(dist.Work, dist.all_reduce(tensor, group=group, async_op=True))
    traffic.sent += all_reduce_bytes(tensor.nbytes, dist.get_world_size(group))
    return partial(traffic.wait, work.wait)


def carrier_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Returns the *carrier*: the device that a tensor must be on when the backend sends it.

    NCCL sends tensors from their GPU. Any other backend sends them from the CPU; the caller copies
    them there.

    Args:
        device: device of the tensor.
        group: the process group that sends the tensor; None for the default group.
    """
    if device.type == "cpu":
        return device

    # The configuration is text such as "cpu:gloo,cuda:nccl".
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
        received: a tensor for each rank, or one tensor with a row for each rank. `received[r]` is
            filled with the tensor that rank r sends to this rank, and must have its size.
        sent: contiguous tensors, one for each rank. Their sizes may differ.
        group: the process group; None for all ranks.

    Returns:
        A function that waits until all tensors have been received.
    """
    own_rank = dist.get_rank(group)
    traffic.sent += sum(tensor.nbytes for tensor in sent) - sent[own_rank].nbytes

    works: list[dist.Work | None]
    if sent[0].is_cuda:
        works = [dist.all_to_all(list(received), list(sent), group=group, async_op=True)]
    else:
        works = _start_all_to_all_with_gloo(received, sent, group)

    # The watchdog finds this function in the stack of a rank that waits, by its name
    # (`run.watch.stacks`).
    def exchange() -> None:
        """Waits for all sends and receives."""
        for work in works:  # torch gives None only to ranks that are not in the group
            traffic.wait(cast(dist.Work, work).wait)

    return exchange


def _start_all_to_all_with_gloo(
    received: Sequence[Tensor] | Tensor,
    sent: Sequence[Tensor] | Tensor,
    group: dist.ProcessGroup | None,
) -> list[dist.Work | None]:
    """Starts to receive from all ranks, then to send to them; see `start_all_to_all`.

    In Gloo's own all_to_all each rank starts to send first. But Gloo sends only to a receiver that
    is ready, so the two ranks of a pair would send one after the other instead of at once.
    """
    own_rank = dist.get_rank(group)
    num_ranks = len(sent)
    received[own_rank].copy_(sent[own_rank])
    other_ranks = [(own_rank + distance) % num_ranks for distance in range(1, num_ranks)]

    # An empty tensor takes no message. Its sender and its receiver both skip it.
    works = []
    for rank in other_ranks:
        tensor = received[rank]
        if tensor.numel() > 0:
            works.append(dist.irecv(tensor, group=group, group_src=rank, tag=ALL_TO_ALL_TAG))

    for rank in other_ranks:
        tensor = sent[rank]
        if tensor.numel() > 0:
            works.append(dist.isend(tensor, group=group, group_dst=rank, tag=ALL_TO_ALL_TAG))

    return works


def all_gather(rows: Tensor, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gathers the tensors of all ranks of a group into the rows of one tensor.

    Args:
        rows: output tensor of shape `(ranks, *)`; row r is filled with the tensor of rank r.
        tensor: the tensor of this rank, of shape `(*)`.
        group: the process group; None for all ranks.
    """
    shared = _memory_of_group(group)
    if shared is not None and shared.supports(tensor) and shared.supports(rows):
        shared.all_gather(rows, tensor)
        return

    # In a ring of many ranks a small tensor takes long. It is faster to gather all tensors on the
    # first rank, which then sends them to every rank.
    if len(rows) > MAX_RING_RANKS and _is_small(tensor):
        traffic.block(partial(_all_gather_by_first_rank, rows, tensor, group))
        return

    if _gathers_into_one_tensor(rows, group):
        # With a list of rows, NCCL would gather into a temporary tensor and copy each row from it.
        traffic.block(partial(_all_gather_into_one_tensor, rows, tensor, group))
        return

    traffic.block(partial(dist.all_gather, list(rows), tensor, group))


def _gathers_into_one_tensor(rows: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Returns True if NCCL gathers the rows, and they are contiguous in memory."""
    is_on_gpu = rows.device.type != "cpu"
    return is_on_gpu and rows.is_contiguous() and carrier_device(rows.device, group) == rows.device


def _all_gather_into_one_tensor(
    rows: Tensor, tensor: Tensor, group: dist.ProcessGroup | None
) -> None:
    """Gathers the tensors of all ranks into `rows` without a temporary tensor.

    Args:
        rows: contiguous output tensor with one row for each rank.
        tensor: the tensor of this rank, with as many elements as a row.
        group: the process group; None for all ranks.
    """
    if hasattr(dist, "all_gather_single"):
        gather = dist.all_gather_single
    else:
        gather = dist.all_gather_into_tensor  # its name before torch 2.13

    # Not all backends can gather into a tensor of rows, so both tensors are passed as flat ones.
    flat_rows = rows.view(-1)
    gather(flat_rows, tensor.reshape(-1), group=group)


def _is_small(tensor: Tensor) -> bool:
    """Returns True for a small CPU tensor that Gloo can gather; it gathers no complex numbers."""
    is_on_cpu = tensor.device.type == "cpu"
    return is_on_cpu and tensor.nbytes <= MAX_SMALL_BYTES and not tensor.is_complex()


def _all_gather_by_first_rank(
    rows: Tensor, tensor: Tensor, group: dist.ProcessGroup | None
) -> None:
    """Gathers the tensors on the group's first rank, which sends all of them to every rank."""
    is_first_rank = dist.get_rank(group) == 0
    gathered = list(rows) if is_first_rank else None
    dist.gather(tensor, gathered, group=group, group_dst=0)
    dist.broadcast(rows, group=group, group_src=0)


def broadcast(tensor: Tensor, source: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Copies a tensor from one rank of a group to the others, as `torch.distributed.broadcast`.

    Args:
        tensor: the values to send on rank `source`; overwritten on the other ranks. All ranks must
            pass the same dtype and shape, and all or none a contiguous tensor, so that all of them
            choose between shared memory and the backend in the same way.
        source: number of the sending rank within the group.
        group: the process group; None for all ranks.
    """
    shared = _memory_of_group(group)
    if shared is not None and shared.supports(tensor):
        shared.broadcast(tensor, source)
    else:
        traffic.block(partial(dist.broadcast, tensor, group=group, group_src=source))


def _memory_of_group(group: dist.ProcessGroup | None) -> SharedMemory | None:
    """Returns the memory that all ranks of a group share, or None if they share none."""
    if _shared_memory is not None and _is_group_of_machine(group, _shared_memory):
        return _shared_memory
    return None


def _is_group_of_machine(group: dist.ProcessGroup | None, shared: SharedMemory) -> bool:
    """Returns True if a group consists of all ranks that share the memory.

    Args:
        group: the process group; None for all ranks.
        shared: the memory of the ranks of this machine.
    """
    if group is None:
        return shared.is_only_machine
    return dist.get_process_group_ranks(group) == shared.ranks
