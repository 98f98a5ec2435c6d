"""Sums tensors over virtual ranks, with the same bits on any number of processes.

The order of the additions is fixed by a binary tree over the virtual ranks (`summation_tree`). Each
process starts with partial sums, the values of some *nodes* of the tree; usually it has one. Every
tensor is cut into *slices*, one for each process. A process receives its slice of all partial sums,
adds them in the order of the tree, and then the slices are gathered. With one node in each process
this sends as many bytes as a ring all-reduce.

On one machine the slices go through shared memory. With several machines and shared memory, each
machine first sums the partial sums of its processes, and then the processes with the same local
rank exchange the results. Without shared memory, as on GPUs, slices go through the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lockstep.communication import routing
from lockstep.communication.shared_memory import SharedMemory, add_in_tree, do_nothing
from lockstep.communication.summation_tree import (
    TreeOrder,
    plan_sums,
    plan_sums_of_machines,
)
from lockstep.communication.traffic import traffic


class TreeSums:
    """Sums over the virtual ranks of one global batch.

    Args:
        present: whether each virtual rank has samples.
        bounds: process p computes the virtual ranks from `bounds[p]` to `bounds[p + 1] - 1`.
        process: number of this process.
    """

    def __init__(self, present: tuple[bool, ...], bounds: tuple[int, ...], process: int) -> None:
        self.present = present
        self.num_present = sum(present)
        self._bounds = bounds
        self._process = process
        self._order: TreeOrder = plan_sums(present, bounds)
        """How many partial sums each process has, and in which order all of them are added."""
        self.leaves = self._order.leaves_of_rank[process]
        """The virtual ranks of this process that have samples."""
        self.merges = self._order.merges_of_rank[process]
        """For each of them, how many merges follow when its value is pushed onto the stack."""
        self._num_processes = len(bounds) - 1

    def start(
        self, partial_sums: Sequence[Tensor], total: Tensor, *, scale: float
    ) -> Callable[[], None]:
        """Begins to sum tensors over all virtual ranks.

        Args:
            partial_sums: the partial sums of this process: flat tensors as long as `total`. They
                are overwritten, and `total` may be one of them.
            total: flat tensor that the sum is written to.
            scale: factor by which the sum is multiplied.

        Returns:
            A function that waits for the sum. If several sums are under way, all processes must
            call their functions in the same order.
        """
        if self._num_processes == 1:
            add_in_tree(partial_sums, self._order.merges, [total], overwrite=True)
            total.mul_(scale)
            return do_nothing

        # The carrier is the device that the backend sends from, e.g. the CPU with Gloo.
        carrier = routing.carrier_device(total.device)
        if carrier != total.device:
            return self._start_on(carrier, partial_sums, total, scale)

        shared = _shared_memory_for(total)
        if shared is not None and shared.is_only_machine:
            shared.sum_in_tree(partial_sums, total, self._order, scale=scale)
            return do_nothing

        # If the processes of each machine have consecutive numbers, their virtual ranks are one
        # range of the tree. Each machine then adds up the partial sums of its own processes first.
        if shared is not None and shared.has_consecutive_ranks:
            return self._start_between_machines(shared, partial_sums, total, scale)

        return _start_sliced_sum(partial_sums, total, self._order, scale, group=None)

    def start_reduce_scatter(
        self, slices_of_partial_sums: Sequence[Sequence[Tensor]], total: Tensor, *, scale: float
    ) -> Callable[[], None]:
        """Begins to sum slices of tensors over all virtual ranks, one slice on each process.

        Args:
            slices_of_partial_sums: this process's partial sums, each cut into slices: the slice
                `slices_of_partial_sums[n][p]` of partial sum n is the one that process p needs. All
                slices are as long as `total`. They are overwritten.
            total: flat tensor that this process's slice of the sum is written to.
            scale: factor by which the sum is multiplied.

        Returns:
            A function that waits for the sum; see `start`.
        """
        # The carrier is the device that the backend sends from, e.g. the CPU with Gloo.
        carrier = routing.carrier_device(total.device)
        if carrier != total.device:
            return self._start_reduce_scatter_on(carrier, slices_of_partial_sums, total, scale)

        # If all processes are on this machine, the slices go through its memory.
        shared = _shared_memory_for(total)
        if shared is not None and shared.is_only_machine:
            shared.reduce_scatter_in_tree(
                slices_of_partial_sums,
                totals=[total],
                num_partial_sums_of_rank=self._order.num_partial_sums_of_rank,
                merges=self._order.merges,
                like=self._like_partial_sum(total),
            )
            total.mul_(scale)
            return do_nothing

        # If the processes of each machine have consecutive numbers, each machine first adds up the
        # partial sums of its own processes, as in `start`.
        if shared is not None and shared.has_consecutive_ranks:
            return self._start_reduce_scatter_between_machines(
                shared, slices_of_partial_sums, total, scale
            )

        return _start_sum_of_own_slice(
            slices_of_partial_sums, total, self._order, scale, group=None
        )

    def _start_on(
        self, carrier: torch.device, partial_sums: Sequence[Tensor], total: Tensor, scale: float
    ) -> Callable[[], None]:
        """Begins a sum on the device that the backend sends from, e.g. on the CPU with Gloo.

        Args:
            carrier: the device that the backend sends from.
            partial_sums: see `start`.
            total: see `start`.
            scale: see `start`.
        """
        total_on_carrier = total.to(carrier)
        wait = self.start(
            [each.to(carrier) for each in partial_sums], total_on_carrier, scale=scale
        )
        return partial(_finish_on_carrier, wait, total_on_carrier, total)

    def _start_reduce_scatter_on(
        self,
        carrier: torch.device,
        slices_of_partial_sums: Sequence[Sequence[Tensor]],
        total: Tensor,
        scale: float,
    ) -> Callable[[], None]:
        """Calls `start_reduce_scatter` with copies on the device that the backend sends from.

        Returns:
            A function that waits for the sum, and copies it back to `total`.
        """
        slices_on_carrier = []
        for slices in slices_of_partial_sums:
            slices_on_carrier.append([each.to(carrier) for each in slices])
        total_on_carrier = total.to(carrier)
        wait = self.start_reduce_scatter(slices_on_carrier, total_on_carrier, scale=scale)
        return partial(_finish_on_carrier, wait, total_on_carrier, total)

    def _like_partial_sum(self, own_slice: Tensor) -> Tensor:
        """Returns a tensor with the shape and dtype of a partial sum. It takes no memory.

        Args:
            own_slice: this process's slice. All processes have slices of the same length.
        """
        return own_slice.expand(self._num_processes, -1)

    def _start_between_machines(
        self,
        shared: SharedMemory,
        partial_sums: Sequence[Tensor],
        total: Tensor,
        scale: float,
    ) -> Callable[[], None]:
        """Begins a sum over several machines, each of which sums its own partial sums first.

        Example: 2 machines have 2 processes each, so a tensor is cut into 2 slices.

            process    local rank    sums over its machine    then with     and copies
            0          0             slice 0                  process 2     slice 1 of process 1
            1          1             slice 1                  process 3     slice 0 of process 0
            2          0             slice 0                  process 0     slice 1 of process 3
            3          1             slice 1                  process 1     slice 0 of process 2

        Args:
            shared: the shared memory of this machine.
            partial_sums: see `start`.
            total: see `start`.
            scale: see `start`.
        """
        local_size = len(shared.ranks)
        local_rank = self._process - shared.ranks[0]
        machine = shared.ranks[0] // local_size
        order = plan_sums_of_machines(self.present, self._bounds, local_size, machine)
        slices = torch.tensor_split(total, local_size)
        own_slice = slices[local_rank]

        # First the ranks of this machine add up their partial sums, each rank one slice of them.
        # Usually one sum is left on the machine. There are several if the tree adds something of
        # another machine in between.
        sums_of_machine = [torch.empty_like(own_slice) for _ in range(order.num_sums_of_machine)]
        shared.reduce_scatter_in_tree(
            [torch.tensor_split(each, local_size) for each in partial_sums],
            totals=sums_of_machine,
            num_partial_sums_of_rank=order.num_partial_sums_of_rank,
            merges=order.merges_on_machine,
            like=total,
        )

        # Then the ranks with this local rank on all machines sum this slice.
        wait = _start_sliced_sum(
            sums_of_machine,
            own_slice,
            order.between_machines,
            scale,
            group=shared.group_across_machines,
        )

        def finish() -> None:
            """Waits for this rank's slice of the sum, then gathers all slices on this machine."""
            wait()
            shared.gather_slices(slices, total)

        return finish

    def _start_reduce_scatter_between_machines(
        self,
        shared: SharedMemory,
        slices_of_partial_sums: Sequence[Sequence[Tensor]],
        total: Tensor,
        scale: float,
    ) -> Callable[[], None]:
        """Does `start_reduce_scatter` over several machines, each of which first sums by itself.

        Example: 2 machines have 2 processes each, so a partial sum is cut into 4 slices.

            process     local rank     sums over its machine      needs in the end
            0           0              slices 0 and 2             slice 0
            1           1              slices 1 and 3             slice 1
            2           0              slices 0 and 2             slice 2
            3           1              slices 1 and 3             slice 3

        Then the processes with the same local rank exchange what they have summed: process 0 sends
        its slice 2 to process 2, which sends its slice 0 to process 0.

        Args:
            shared: the shared memory of this machine.
            slices_of_partial_sums: see `start_reduce_scatter`.
            total: see `start_reduce_scatter`.
            scale: see `start_reduce_scatter`.
        """
        local_size = len(shared.ranks)
        num_machines = self._num_processes // local_size
        machine = shared.ranks[0] // local_size
        order = plan_sums_of_machines(self.present, self._bounds, local_size, machine)

        # Join the slices that the same local rank sums. In the example each partial sum becomes two
        # tensors: the slices 0 and 2 in a row, for local rank 0, and the slices 1 and 3.
        joined_slices_of_partial_sums = []
        for slices in slices_of_partial_sums:
            joined_slices = []
            for local_rank in range(local_size):
                joined_slices.append(torch.cat(list(slices[local_rank::local_size])))
            joined_slices_of_partial_sums.append(joined_slices)

        # What this process sums over its machine has a row for each machine. In the example,
        # process 0 gets slice 0 of the sum in row 0, and slice 2 in row 1.
        sums_of_machine = []
        for _ in range(order.num_sums_of_machine):
            sums_of_machine.append(total.new_empty(num_machines, len(total)))

        shared.reduce_scatter_in_tree(
            joined_slices_of_partial_sums,
            totals=[rows.view(-1) for rows in sums_of_machine],
            num_partial_sums_of_rank=order.num_partial_sums_of_rank,
            merges=order.merges_on_machine,
            like=self._like_partial_sum(total),
        )
        return _start_sum_of_own_slice(
            [list(rows) for rows in sums_of_machine],
            total,
            order.between_machines,
            scale,
            group=shared.group_across_machines,
        )


def _shared_memory_for(total: Tensor) -> SharedMemory | None:
    """Returns the shared memory of this machine if a tensor can be summed there, else None."""
    shared = routing.shared_memory()
    if shared is None or not shared.supports(total):
        return None
    return shared


def add_rows_in_tree(rows: Tensor) -> Tensor:
    """Returns the sum of the rows of a tensor, added in the order of the tree (`summation_tree`).

    Each round adds pairs of neighbours until one row is left. A last row without a neighbour waits
    for the next round: 5 rows become `0+1, 2+3, 4`, then `(0+1)+(2+3), 4`, then the sum.

    Args:
        rows: tensor of shape `(leaves, *)`, with at least one leaf.
    """
    while len(rows) > 1:
        num_paired = len(rows) // 2 * 2
        sums = rows[0:num_paired:2] + rows[1:num_paired:2]

        has_unpaired_row = num_paired < len(rows)
        rows = torch.cat([sums, rows[num_paired:]]) if has_unpaired_row else sums
    return rows[0]


def _start_sliced_sum(
    partial_sums: Sequence[Tensor],
    total: Tensor,
    order: TreeOrder,
    scale: float,
    group: dist.ProcessGroup | None,
) -> Callable[[], None]:
    """Begins a sum in which each process of a group sums one slice, through the backend.

    Args:
        partial_sums: the partial sums of this process: flat tensors as long as `total`.
        total: flat tensor that the sum is written to.
        order: how many partial sums each process of the group has, and in which order they are
            added.
        scale: factor by which the sum is multiplied.
        group: the process group; None for all processes.

    Returns:
        A function that waits for this process's slice of the sum, and then gathers the slices of
        all processes into `total`.
    """
    if total.numel() == 0:
        return do_nothing

    num_processes = len(order.num_partial_sums_of_rank)
    length_of_slice = (len(total) + num_processes - 1) // num_processes  # rounded up

    # All slices have the same length, so the last one may need padding.
    slices_of_partial_sums = []
    for partial_sum in partial_sums:
        padding = length_of_slice * num_processes - len(partial_sum)
        padded = F.pad(partial_sum, (0, padding)) if padding else partial_sum
        slices_of_partial_sums.append(torch.split(padded, length_of_slice))

    # Each process sums its own slice, and multiplies it by `scale`.
    own_slice = total.new_empty(length_of_slice)
    wait = _start_sum_of_own_slice(slices_of_partial_sums, own_slice, order, scale, group)
    return partial(_gather_slices, wait, own_slice, num_processes, total, group)


def _gather_slices(
    wait: Callable[[], None],
    own_slice: Tensor,
    num_processes: int,
    total: Tensor,
    group: dist.ProcessGroup | None,
) -> None:
    """Waits for this process's slice of a sum, then gathers the slices of all processes.

    Args:
        wait: function that waits until `own_slice` holds this process's slice of the sum.
        own_slice: slice of this process. All slices have the same length.
        num_processes: number of processes in the group.
        total: flat tensor that the sum is written to. It may be shorter than all slices together,
            because the last slice may be padded.
        group: the process group; None for all processes.
    """
    wait()
    rows = total.new_empty((num_processes, len(own_slice)))
    routing.all_gather(rows, own_slice, group)
    total.copy_(rows.view(-1)[: len(total)])  # without the padding

    # `routing.all_gather` leaves counting the bytes to its caller.
    traffic.sent += own_slice.nbytes * (num_processes - 1)


def _start_sum_of_own_slice(
    slices_of_partial_sums: Sequence[Sequence[Tensor]],
    own_total: Tensor,
    order: TreeOrder,
    scale: float,
    group: dist.ProcessGroup | None,
) -> Callable[[], None]:
    """Begins to send slices to the processes of a group, each of which sums its own slice.

    Args:
        slices_of_partial_sums: this process's partial sums, each cut into slices: the slice
            `slices_of_partial_sums[n][p]` of partial sum n is sent to process p.
        own_total: tensor that the sum of this process's own slice is written to.
        order: how many partial sums each process of the group has, and in which order they are
            added.
        scale: factor by which the sum is multiplied.
        group: the process group; None for all processes.

    Returns:
        A function that waits for the slices of the other processes, and writes the sum.
    """
    own_process = dist.get_rank(group)
    length_of_slice = len(own_total)

    # A message holds one slice of each partial sum of its sender, one after the other. For example,
    # process 0 has the partial sums a and b, and process 1 has c. Process 1 gets slice 1 of a and
    # of b from process 0, in one message, and sends slice 0 of c to it. The message of a process
    # without partial sums is empty.
    empty_message = own_total[:0]
    sent = []
    received = []
    for process, num_partial_sums in enumerate(order.num_partial_sums_of_rank):
        slices = [
            slices_of_partial_sum[process] for slices_of_partial_sum in slices_of_partial_sums
        ]
        sent.append(torch.cat(slices) if slices else empty_message)
        received.append(own_total.new_empty(num_partial_sums * length_of_slice))

    # This process must have as many partial sums as `order` says.
    assert len(received[own_process]) == len(sent[own_process])
    wait = routing.start_all_to_all(received, sent, group)
    return partial(_add_received_slices, wait, received, own_total, order, scale)


def _add_received_slices(
    wait: Callable[[], None],
    received: Sequence[Tensor],
    own_total: Tensor,
    order: TreeOrder,
    scale: float,
) -> None:
    """Waits for the messages of all processes, then adds their slices in the tree's order.

    If process 0 has 2 partial sums and process 1 has 1, the message of process 0 contains 2 slices,
    and that of process 1 contains 1. These 3 slices are the values of 3 partial sums, from left to
    right in the tree.

    Args:
        wait: function that waits until the messages have been received.
        received: the message of each process: one slice of each of its partial sums.
        own_total: tensor that the sum of the slices is written to. It is as long as a slice.
        order: how many partial sums each process has, and in which order they are added.
        scale: factor by which the sum is multiplied.
    """
    wait()

    values: list[Tensor] = []
    for num_partial_sums, message in zip(order.num_partial_sums_of_rank, received, strict=True):
        slices_of_process = message.view(num_partial_sums, len(own_total))
        for index in range(num_partial_sums):
            values.append(slices_of_process[index])

    # The received slices may be overwritten on the way to the sum.
    add_in_tree(values, order.merges, [own_total], overwrite=True)
    own_total.mul_(scale)


def _finish_on_carrier(wait: Callable[[], None], total_on_carrier: Tensor, total: Tensor) -> None:
    """Waits for a sum on the device of the backend, and copies it to the device of `total`."""
    wait()
    total.copy_(total_on_carrier)
