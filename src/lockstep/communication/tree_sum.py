"""Sums over virtual ranks, with the same bits on any number of processes.

Each process has partial sums: its values of *nodes* of the tree in which the virtual ranks are
added up (`summation_tree`). Most often it has one. The tensors are cut into slices, one for each
process, which gets its slice of all nodes and adds them in the order of the tree. Then the slices
are gathered. For one node a process these are as many bytes as those of a ring all-reduce.

On one machine the slices go through shared memory, else through the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication import routing
from lockstep.communication.shared_memory import add_in_tree
from lockstep.communication.summation_tree import RankSums
from lockstep.communication.traffic import traffic


def start_tree_sum(
    nodes: Sequence[Tensor], total: Tensor, sums: RankSums, *, scale: float
) -> Callable[[], None]:
    """Begins to sum tensors over all virtual ranks.

    Args:
        nodes: this process's values of nodes of the tree: flat tensors as long as `total`, which
            are overwritten. `total` itself may be one of them. It is empty if the process has none.
        total: a flat tensor; the sum is written to it.
        sums: says how many nodes each process has, and in which order they are added.
        scale: the sum is multiplied by this.

    Returns:
        A function that waits for the sum. If several sums are under way, all processes call these
        functions in the same order.
    """
    num_processes = len(sums.nodes_of_rank)
    if num_processes == 1:
        add_in_tree(nodes, sums.merges, total, overwrite=True)
        total.mul_(scale)
        return _do_nothing
    shared = routing.shared_memory()
    if shared is not None and shared.across is None and shared.takes(total):
        shared.sum_in_tree(nodes, total, sums, scale=scale)
        return _do_nothing
    slices = _equal_slices(total, num_processes)
    slices_of_nodes = [_equal_slices(node, num_processes) for node in nodes]
    own_slice = torch.empty_like(slices[0])
    wait = start_tree_reduce_scatter(slices_of_nodes, own_slice, sums, scale=scale)

    def finish() -> None:
        """Waits for the own slice of the sum, and gathers those of all processes."""
        wait()
        rows = torch.empty((num_processes, len(own_slice)), dtype=total.dtype, device=total.device)
        routing.all_gather(rows, own_slice)
        traffic.sent += own_slice.nbytes * (num_processes - 1)
        total.copy_(rows.view(-1)[: len(total)])

    return finish


def start_tree_reduce_scatter(
    slices_of_nodes: Sequence[Sequence[Tensor]], total: Tensor, sums: RankSums, *, scale: float
) -> Callable[[], None]:
    """Begins to sum slices of tensors over all virtual ranks, one slice on each process.

    Args:
        slices_of_nodes: of each of this process's nodes the slices, one for each process, all as
            long as `total`. They are overwritten.
        total: the sum of the slices of this process is written to it.
        sums: says how many nodes each process has, and in which order they are added.
        scale: the sum is multiplied by this.

    Returns:
        A function that waits for the sum; see `start_tree_sum`.
    """
    shared = routing.shared_memory()
    if shared is not None and shared.across is None and shared.takes(total):
        shared.reduce_scatter_in_tree(slices_of_nodes, total, sums, scale=scale)
        return _do_nothing
    rank = dist.get_rank()
    sent = []  # for each process its slice of all nodes of this one
    for process in range(len(sums.nodes_of_rank)):
        slices = [slices_of_node[process] for slices_of_node in slices_of_nodes]
        sent.append(torch.cat(slices) if slices else total[:0])
    received = []
    for process, num_nodes in enumerate(sums.nodes_of_rank):
        if process == rank:
            received.append(torch.empty_like(sent[rank]))
        else:
            received.append(total.new_empty(num_nodes * len(total)))
    wait = routing.start_all_to_all(received, sent)
    return partial(_add_received, wait, received, total, sums, scale)


def _add_received(
    wait: Callable[[], None],
    received: Sequence[Tensor],
    total: Tensor,
    sums: RankSums,
    scale: float,
) -> None:
    """Waits for the slices of all processes, and adds them.

    Args:
        wait: waits for them.
        received: of each process its slices for this one, joined.
        total: the sum is written to it.
        sums: says how many nodes each process has, and in which order they are added.
        scale: the sum is multiplied by this.
    """
    wait()
    values: list[Tensor] = []
    for slices in received:
        values += torch.split(slices, max(1, len(total))) if slices.numel() else []
    add_in_tree(values, sums.merges, total, overwrite=True)
    total.mul_(scale)


def _equal_slices(tensor: Tensor, number: int) -> tuple[Tensor, ...]:
    """Cuts a flat tensor into slices of equal length; the last ones are filled up with zeros."""
    length = -(-len(tensor) // number)  # rounded up
    padding = length * number - len(tensor)
    if padding:
        tensor = torch.nn.functional.pad(tensor, (0, padding))
    return torch.split(tensor, max(1, length))


def _do_nothing() -> None:
    """Waits for a sum that is there already."""
