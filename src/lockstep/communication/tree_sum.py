"""Sums over virtual ranks, with the same bits on any number of processes.

Each process has partial sums: its values of *nodes* of the tree in which the virtual ranks are
added up (`summation_tree`). Most often it has one. The tensors are cut into slices, one for each
process, which gets its slice of all nodes and adds them in the order of the tree. Then the slices
are gathered. For one node a process these are as many bytes as those of a ring all-reduce.

On one machine the slices go through shared memory. Of several machines with shared memory, each
sums up the nodes of its processes first, and processes with the same local rank exchange what is
left. Without shared memory, as on GPUs, all processes exchange slices through the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.communication import routing
from lockstep.communication.shared_memory import SharedMemory, add_in_tree
from lockstep.communication.summation_tree import (
    MachineSums,
    RankSums,
    plan_sums,
    plan_sums_of_machines,
)
from lockstep.communication.traffic import traffic


class TreeSums:
    """Sums over the virtual ranks of one global batch.

    Args:
        present: for each virtual rank, whether it has samples.
        bounds: process p computes the virtual ranks from `bounds[p]` to `bounds[p + 1] - 1`.
        process: the number of this one.
    """

    def __init__(self, present: tuple[bool, ...], bounds: tuple[int, ...], process: int) -> None:
        self.present = present
        self.num_present = sum(present)
        self._bounds = bounds
        self._process = process
        self.ranks: RankSums = plan_sums(present, bounds)
        self.leaves = self.ranks.leaves_of_rank[process]
        """The virtual ranks of this process that have samples."""
        self.merges = self.ranks.merges_of_rank[process]
        """For each of them, how many merges follow when its value was pushed."""
        self._num_processes = len(bounds) - 1

    def start(self, nodes: Sequence[Tensor], total: Tensor, *, scale: float) -> Callable[[], None]:
        """Begins to sum tensors over all virtual ranks.

        Args:
            nodes: this process's values of nodes of the tree: flat tensors as long as `total`,
                which are overwritten. `total` itself may be one of them. It is empty if the process
                has none.
            total: a flat tensor; the sum is written to it.
            scale: the sum is multiplied by this.

        Returns:
            A function that waits for the sum. If several sums are under way, all processes call
            these functions in the same order.
        """
        if self._num_processes == 1:
            add_in_tree(nodes, self.ranks.merges, [total], overwrite=True)
            total.mul_(scale)
            return _do_nothing
        carrier = routing.carrier_device(total.device)
        if carrier != total.device:
            return self._start_on(carrier, nodes, total, scale)
        shared = routing.shared_memory()
        if shared is not None and shared.takes(total):
            all_are_on_one_machine = shared.across is None
            if all_are_on_one_machine:
                shared.sum_in_tree(nodes, total, self.ranks, scale=scale)
                return _do_nothing
            if shared.machine is not None:  # the processes of each machine are neighbours
                return self._start_between_machines(shared, shared.machine, nodes, total, scale)
        return _start_sliced_sum(nodes, total, self.ranks, scale, group=None)

    def start_reduce_scatter(
        self, slices_of_nodes: Sequence[Sequence[Tensor]], total: Tensor, *, scale: float
    ) -> Callable[[], None]:
        """Begins to sum slices of tensors over all virtual ranks, one slice on each process.

        Args:
            slices_of_nodes: `slices_of_nodes[n][p]` is the slice of this process's node n that
                process p sums. All are as long as `total`. They are overwritten.
            total: the sum of the slices of this process is written to it.
            scale: the sum is multiplied by this.

        Returns:
            A function that waits for the sum; see `start`.
        """
        carrier = routing.carrier_device(total.device)
        if carrier != total.device:
            slices_on_carrier = []
            for slices in slices_of_nodes:
                slices_on_carrier.append([node_slice.to(carrier) for node_slice in slices])
            total_on_carrier = total.to(carrier)
            wait = self.start_reduce_scatter(slices_on_carrier, total_on_carrier, scale=scale)
            return lambda: _finish_on_carrier(wait, total_on_carrier, total)
        shared = routing.shared_memory()
        # `across` is None if all processes are on one machine.
        if shared is not None and shared.across is None and shared.takes(total):
            # Stands for all slices together: only its dtype and number of elements are used.
            whole = total.expand(self._num_processes, -1)
            shared.reduce_scatter_in_tree(
                slices_of_nodes, [total], self.ranks.nodes_of_rank, self.ranks.merges, whole=whole
            )
            total.mul_(scale)
            return _do_nothing
        return _start_exchange(slices_of_nodes, total, self.ranks, scale, group=None)

    def _start_on(
        self, carrier: torch.device, nodes: Sequence[Tensor], total: Tensor, scale: float
    ) -> Callable[[], None]:
        """Begins a sum on the device that the backend sends from, such as the CPU for Gloo.

        Args:
            carrier: that device.
            nodes: see `start`.
            total: see `start`.
            scale: see `start`.
        """
        total_on_carrier = total.to(carrier)
        wait = self.start([node.to(carrier) for node in nodes], total_on_carrier, scale=scale)
        return lambda: _finish_on_carrier(wait, total_on_carrier, total)

    def _start_between_machines(
        self,
        shared: SharedMemory,
        machine: int,
        nodes: Sequence[Tensor],
        total: Tensor,
        scale: float,
    ) -> Callable[[], None]:
        """Begins a sum over several machines, each of which sums up its own nodes first.

        Args:
            shared: the shared memory of this machine.
            machine: the number of this machine.
            nodes: see `start`.
            total: see `start`.
            scale: see `start`.
        """
        local_size = len(shared.ranks)
        local_rank = self._process - shared.ranks[0]
        sums: MachineSums = plan_sums_of_machines(self.present, self._bounds, local_size, machine)
        slices = torch.tensor_split(total, local_size)
        own_slice = slices[local_rank]
        # First within the machine, whose sums are values of `num_nodes` nodes. This rank computes
        # its slice of each.
        sums_of_machine = [torch.empty_like(own_slice) for _ in range(sums.num_nodes)]
        shared.reduce_scatter_in_tree(
            [torch.tensor_split(node, local_size) for node in nodes],
            sums_of_machine,
            sums.nodes_of_rank,
            sums.merges,
            whole=total,
        )
        # Then between the machines: the ranks with this local rank sum up this slice.
        wait = _start_sliced_sum(
            sums_of_machine, own_slice, sums.between_machines, scale, group=shared.across
        )

        def finish() -> None:
            """Waits for this rank's slice of the sum, and gathers those of this machine."""
            wait()
            shared.gather_slices(slices, total)

        return finish


def add_rows_in_tree(rows: Tensor) -> Tensor:
    """Returns the sum of rows in the order of the tree that has a leaf for each of them.

    Neighbours are added until one row is left; a last row without a neighbour waits for the next
    round. That is the order of `summation_tree.Node.children`, in as few operations as the tree has
    levels.

    Args:
        rows: shape `(leaves, *)`, with at least one leaf.
    """
    while len(rows) > 1:
        num_paired = len(rows) // 2 * 2
        sums = rows[0:num_paired:2] + rows[1:num_paired:2]
        rows = torch.cat([sums, rows[num_paired:]]) if num_paired < len(rows) else sums
    return rows[0]


def _start_sliced_sum(
    nodes: Sequence[Tensor],
    total: Tensor,
    sums: RankSums,
    scale: float,
    group: dist.ProcessGroup | None,
) -> Callable[[], None]:
    """Begins a sum in which each process of a group adds up a slice.

    Args:
        nodes: see `TreeSums.start`.
        total: see `TreeSums.start`.
        sums: says how many nodes each process of the group has, and in which order they are added.
        scale: see `TreeSums.start`.
        group: None for all processes.
    """
    if total.numel() == 0:
        return _do_nothing
    num_processes = len(sums.nodes_of_rank)
    length = (len(total) + num_processes - 1) // num_processes  # of a slice, rounded up
    slices_of_nodes = []
    for node in nodes:
        padding = length * num_processes - len(node)
        padded = torch.nn.functional.pad(node, (0, padding)) if padding else node
        slices_of_nodes.append(torch.split(padded, length))
    own_slice = total.new_empty(length)
    wait = _start_exchange(slices_of_nodes, own_slice, sums, scale, group)

    def finish() -> None:
        """Waits for the own slice of the sum, and gathers those of all processes."""
        wait()
        rows = total.new_empty((num_processes, length))
        routing.all_gather(rows, own_slice, group)  # which does not count what it sends
        traffic.sent += own_slice.nbytes * (num_processes - 1)
        total.copy_(rows.view(-1)[: len(total)])

    return finish


def _start_exchange(
    slices_of_nodes: Sequence[Sequence[Tensor]],
    total: Tensor,
    sums: RankSums,
    scale: float,
    group: dist.ProcessGroup | None,
) -> Callable[[], None]:
    """Begins to send each process of a group its slices, and to sum those of this process.

    Args:
        slices_of_nodes: `slices_of_nodes[n][p]` is the slice of this process's node n that process
            p sums.
        total: the sum of the slices of this process is written to it.
        sums: says how many nodes each process of the group has, and in which order they are added.
        scale: the sum is multiplied by this.
        group: None for all processes.
    """
    own = dist.get_rank(group)
    sent = []  # for each process its slice of all nodes of this one
    received = []
    for process, num_nodes in enumerate(sums.nodes_of_rank):
        slices = [slices_of_node[process] for slices_of_node in slices_of_nodes]
        sent.append(torch.cat(slices) if slices else total[:0])
        received.append(total.new_empty(num_nodes * len(total)))
    # This process has as many nodes as `sums` says.
    assert len(received[own]) == len(sent[own])
    wait = routing.start_all_to_all(received, sent, group)

    def finish() -> None:
        """Waits for the slices of all processes, and adds them."""
        wait()
        values: list[Tensor] = []
        for num_nodes, slices_of_process in zip(sums.nodes_of_rank, received, strict=True):
            for node in range(num_nodes):
                values.append(slices_of_process[node * len(total) : (node + 1) * len(total)])
        add_in_tree(values, sums.merges, [total], overwrite=True)
        total.mul_(scale)

    return finish


def _finish_on_carrier(wait: Callable[[], None], total_on_carrier: Tensor, total: Tensor) -> None:
    """Waits for a sum on another device, and copies it to where it is wanted."""
    wait()
    total.copy_(total_on_carrier)


def _do_nothing() -> None:
    """Waits for a sum that is there already."""
