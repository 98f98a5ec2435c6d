"""Sums the gradients of virtual ranks under FSDP2, in the order of their tree.

A *virtual rank* has a fixed part of every global batch, and its gradient is a *leaf* of the tree
(`strategies.virtual_ranks`). After the last backward pass of each virtual rank, torch calls our
reduce-scatter for each unit, with the whole gradient of the unit
(`FSDPModule.set_custom_reduce_scatter`). Until the last virtual rank of a process nothing is sent:
the gradient is added to the previous partial sums as far as the tree allows. So a process that
computes several virtual ranks keeps whole gradients between them, as FSDP does between
micro-batches.

Under `hsdp` several processes hold the same shard. Each of them gets the sum of another piece of
it, and has negative zeros elsewhere. Then torch adds up their results, which puts the pieces
together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lockstep.batch.indices import ceil_div
from lockstep.communication.summation_tree import push
from lockstep.communication.tree_sum import TreeSums
from lockstep.errors import RanksDifferError, UsageError
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step
from lockstep.strategies.base import USE_ALL_IN_EVERY_VIRTUAL_RANK
from lockstep.strategies.bit_sums import gradient_bit_sums
from lockstep.strategies.virtual_ranks import (
    SkippedVirtualRanks,
    VirtualRankTree,
    check_virtual_rank_backward,
    counts_in_sum,
    has_nonzero_gradients,
    skipped_error,
)
from lockstep.torch_compat import shards_in_reduction_order


class TreeReduceScatter:
    """Sums the gradients of one unit over virtual ranks; each process gets its shard.

    It has the methods of torch's `ReduceScatter`, which `FSDPModule.set_custom_reduce_scatter`
    describes.

    Args:
        tree: the summation order of the run.
        step: the state of the current optimizer step.
        mesh: the mesh of the processes; parameters are sharded over its last dimension.
        unit: the module whose gradients are summed.
        names: the names of the parameters, by the ids of their shards.
    """

    def __init__(
        self,
        tree: VirtualRankTree,
        step: Step,
        mesh: DeviceMesh,
        unit: FSDPModule,
        names: Mapping[int, str],
    ) -> None:
        self.gradient_bits: dict[str, Tensor] = {}
        """The sums of the bits of each gradient of the latest compared virtual rank, by name."""
        self._names = names
        self._tree = tree
        self._unit = unit
        self._step = step
        self._num_processes = mesh.size()
        self._num_shards = mesh.size(mesh.ndim - 1)
        self._num_copies = self._num_processes // self._num_shards
        self._copy = 0 if mesh.ndim == 1 else mesh.get_local_rank(0)
        """Under `hsdp`, which of the processes with the same shard this one is."""
        self._partial_sums: list[Tensor] = []
        """A stack of partial sums over the virtual ranks that this process has computed so far."""
        self._num_pushed = 0
        """How many virtual ranks of this process are in the partial sums."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates memory for the gradients of the unit, or for a shard of them."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Adds the gradient of a virtual rank; after the last one, writes the sum of this shard.

        Args:
            output_tensor: receives the shard of the gradient. Until the last virtual rank of the
                process, it is set to zero.
            input_tensor: the gradient of the unit as a flat tensor, with one chunk for each shard.
            group: the processes that hold the shards.
            op: the operation of the reduce-scatter, a sum.
            async_op: always False.
        """
        micro_batch = self._step.micro_batch
        sums = self._tree.sums(micro_batch.global_samples)
        if micro_batch.virtual_rank is not None and micro_batch.virtual_rank.is_compared:
            self.gradient_bits = self._sum_bits(input_tensor)

        if counts_in_sum(micro_batch):
            if self._step.extensions.listeners["leaf_gradient"]:
                self._notify_extensions(input_tensor, micro_batch)
            self._push(input_tensor, micro_batch)

        if not micro_batch.last:
            output_tensor.zero_()
            return

        slices_of_partial_sums = [self._slice(partial_sum) for partial_sum in self._partial_sums]
        self.forget()
        scale = 1.0 / self._tree.num_virtual_ranks
        if self._num_copies == 1:
            _sum_slices(sums, slices_of_partial_sums, output_tensor, scale)
            return

        length_of_slice = ceil_div(len(output_tensor), self._num_copies)
        own_slice = output_tensor.new_empty(length_of_slice)
        _sum_slices(sums, slices_of_partial_sums, own_slice, scale)

        # Adding -0.0 changes no value. Adding 0.0 would turn -0.0 into 0.0.
        output_tensor.fill_(-0.0)
        begin = self._copy * length_of_slice
        own_piece = output_tensor[begin : begin + length_of_slice]
        own_piece.copy_(own_slice[: len(own_piece)])

    def _slice(self, partial_sum: Tensor) -> list[Tensor]:
        """Cuts a partial sum into the slices of all processes, in the order of the processes.

        With 2 copies of a model in 2 shards, 4 processes sum [1, 2, 3, 4, 5, 6, 7, 8]:

            process      0 (copy 0)    1 (copy 0)    2 (copy 1)    3 (copy 1)
            has shard    [1, 2, 3, 4]  [5, 6, 7, 8]  [1, 2, 3, 4]  [5, 6, 7, 8]
            gets slice   [1, 2]        [5, 6]        [3, 4]        [7, 8]

        The processes with the same shard divide it between them. All slices have the same length,
        so the last ones may be padded.
        """
        shards = partial_sum.view(self._num_shards, -1)
        length_of_slice = ceil_div(shards.shape[1], self._num_copies)
        padding = length_of_slice * self._num_copies - shards.shape[1]
        if padding:
            shards = torch.nn.functional.pad(shards, (0, padding))

        # One tensor for each copy of the model, with the shape (shards, length of a slice). Its
        # rows are the slices of the processes that have this copy.
        slices: list[Tensor] = []
        for slices_of_copy in torch.split(shards, length_of_slice, dim=1):
            slices += slices_of_copy.unbind()
        return slices

    def forget(self) -> None:
        """Drops the partial sums of a global batch."""
        self._partial_sums = []
        self._num_pushed = 0

    def _split_by_parameter(
        self, flat: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[Tensor, ...] | None:
        """Splits the gradient of the unit into the gradients of its parameters.

        For example, with 2 shards and the parameters a (4 elements) and b (2 elements):

            flat:    [a0 a1 b0 | a2 a3 b1]       one chunk for each shard
            result:  [[a0 a1], [a2 a3]]  and  [[b0], [b1]]

        Args:
            flat: the gradient of the unit. Each chunk has those rows of each parameter that belong
                to the shard, padded with zeros so that all chunks have the same length.
            parameters: the shards of the unit's trainable parameters.

        Returns:
            For each parameter a tensor of shape `(shards, n)`: row s has the n elements of the
            parameter in chunk s. None if some parameters were not used, because torch does not tell
            which ones the gradient contains.
        """
        lengths = []
        for parameter in parameters:
            # A shard is a DTensor, whose shape is that of the whole parameter.
            rows_of_shard = ceil_div(parameter.shape[0], self._num_shards)
            lengths.append(rows_of_shard * math.prod(parameter.shape[1:]))

        # The gradient of a unit is shorter if some parameters were not used.
        has_all_parameters = len(flat) == sum(lengths) * self._num_shards
        if not has_all_parameters:
            return None

        # One row for each chunk. The columns are divided between the parameters.
        chunks = flat.view(self._num_shards, -1)
        return torch.split(chunks, lengths, dim=1)

    def _notify_extensions(self, flat: Tensor, micro_batch: MicroBatch) -> None:
        """Passes the gradient of a virtual rank to the extensions, one tensor for each parameter.

        The journal, for example, records hashes of these gradients.

        Args:
            flat: the gradient of the unit, a flat tensor with one chunk for each shard.
            micro_batch: a micro-batch of the virtual rank.

        Raises:
            UsageError: some parameters were not used, so it is not known which ones the gradient
                contains.
        """
        parameters = self.trained_shards()
        padded_gradients = self._split_by_parameter(flat, parameters)
        if padded_gradients is None:
            raise UsageError(
                "hashes of gradients under fsdp, with parameters that are not used",
                "the gradient of a unit does not have all of its parameters, and torch does not "
                "say which are missing",
                "use all parameters; or leave the journal out, and do not compare by bits: "
                "lockstep verify --float64",
            )

        # Drop the zeros that follow each gradient: the last shards may have fewer rows than others.
        # For example, a gradient of shape (3, 5) in 2 shards has the rows 0 and 1 in shard 0, and
        # row 2 and a row of zeros in shard 1.
        gradients: list[Tensor] = []
        for parameter, padded in zip(parameters, padded_gradients, strict=True):
            gradient = padded.reshape(-1)[: parameter.numel()]
            gradients.append(gradient.view(parameter.shape))

        self._step.extensions.leaf_gradient(micro_batch, parameters, gradients)

    def trained_shards(self) -> list[Tensor]:
        """Returns the shards of the trainable parameters, in the order of the unit's gradient."""
        shards: list[Tensor] = []
        for shard in shards_in_reduction_order(self._unit):
            if shard.requires_grad:
                shards.append(shard)
        return shards

    def _sum_bits(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns a sum over the bits of each parameter's gradient, by the name of the parameter.

        If some parameters were not used, torch does not tell which ones the gradient contains, and
        there is a single sum.

        Args:
            flat: the gradient of the unit; see `_split_by_parameter`.
        """
        shards = self.trained_shards()
        names = [self._names[id(shard)] for shard in shards]
        columns_of_parameters = self._split_by_parameter(flat, shards)
        if columns_of_parameters is None:
            return {f"the parameters around {names[0]}": gradient_bit_sums([flat])[0]}
        return dict(zip(names, gradient_bit_sums(columns_of_parameters), strict=True))

    def _push(self, gradient: Tensor, micro_batch: MicroBatch) -> None:
        """Adds the gradient of a virtual rank to the partial sums, as far as the tree allows.

        Zeros are added first for earlier virtual ranks of this process that have not used the unit.

        Args:
            gradient: the gradient of the unit.
            micro_batch: a micro-batch of the virtual rank.

        Raises:
            UsageError: virtual ranks have used different parameters.
        """
        virtual_rank = micro_batch.virtual_rank
        assert virtual_rank is not None

        # The virtual ranks of this process, and how many additions follow each push. For example,
        # `leaves` is (4, 5, 6, 7) and `merges` is (0, 1, 0, 2).
        sums = self._tree.sums(micro_batch.global_samples)

        # The virtual ranks are pushed in order. If this is number 6 and only 4 was pushed before,
        # zeros are pushed for number 5.
        num_before = sums.leaves.index(virtual_rank.number)
        num_missing = num_before - self._num_pushed
        for _ in range(num_missing):
            self._push_next(torch.zeros_like(gradient), sums.merges)

        self._check_same_parameters(gradient, micro_batch)
        self._push_next(gradient, sums.merges)

    def _check_same_parameters(self, gradient: Tensor, micro_batch: MicroBatch) -> None:
        """Raises UsageError if virtual ranks before this one have used other parameters.

        The gradient of a unit only contains the parameters that were used, so its length shows it.
        """
        if self._partial_sums and len(self._partial_sums[-1]) != len(gradient):
            raise UsageError(
                "virtual_ranks under fsdp, with parameters that not all of them use",
                f"virtual rank {micro_batch.virtual_rank_number} has used other parameters of a "
                "unit than those before it",
                USE_ALL_IN_EVERY_VIRTUAL_RANK,
            )

    def _push_next(self, gradient: Tensor, merges: Sequence[int]) -> None:
        """Pushes the gradient of the next virtual rank of this process, and counts it.

        Then adds up the topmost partial sums on the stack, as often as the tree says.

        Args:
            gradient: the gradient of the virtual rank.
            merges: for each virtual rank of this process, how many such additions (merges) follow
                when its gradient was pushed.
        """
        num_merges = merges[self._num_pushed]
        push(self._partial_sums, gradient, num_merges, Tensor.add_)
        self._num_pushed += 1


def _sum_slices(
    sums: TreeSums, slices_of_partial_sums: Sequence[Sequence[Tensor]], total: Tensor, scale: float
) -> None:
    """Sums over all virtual ranks; see `TreeSums.start_reduce_scatter`.

    Raises:
        RanksDifferError: the processes have used different parameters of the unit, or call
            different collectives.
    """
    try:
        wait = sums.start_reduce_scatter(slices_of_partial_sums, total, scale=scale)
        wait()
    except RanksDifferError as error:
        if not _all_ranks_reduce_scatter(error):
            raise
        # All ranks are here with gradients of different lengths: the gradient of a unit only
        # contains the parameters that were used.
        raise RanksDifferError(
            "virtual_ranks under fsdp, with parameters that not all of them use",
            error.found,
            USE_ALL_IN_EVERY_VIRTUAL_RANK,
        ) from None


def _all_ranks_reduce_scatter(error: RanksDifferError) -> bool:
    """Returns True if all ranks have called `start_reduce_scatter`, with tensors that differ."""
    calls = error.found.split("; ")
    return all("reduce_scatter in a tree of" in call for call in calls)


class ShardedVirtualRanks(Extension):
    """Sums the gradients of a sharded module over virtual ranks.

    Args:
        units: the modules that `fully_shard` was applied to. The last one is the whole model.
        tree: the summation order of the run.
        step: the state of the current optimizer step.
        mesh: the mesh of the processes.
    """

    def __init__(
        self,
        units: Sequence[nn.Module],
        tree: VirtualRankTree,
        step: Step,
        mesh: DeviceMesh,
    ) -> None:
        self._step = step
        self._root = units[-1]
        self._skipped_virtual_ranks = SkippedVirtualRanks(self._has_gradients)
        self._sums: list[TreeReduceScatter] = []
        unit: Any
        names = {id(shard): name for name, shard in self._root.named_parameters()}

        for unit in units:
            reduce_scatter = TreeReduceScatter(tree, step, mesh, unit, names)
            self._sums.append(reduce_scatter)
            unit.set_custom_reduce_scatter(reduce_scatter)
            # By default torch would divide by the number of processes.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Drops what earlier micro-batches have left, if a global batch or virtual rank begins."""
        if micro_batch.first:
            self.clear_gradients()
        elif micro_batch.virtual_rank_begins:
            self._end_previous_virtual_rank()

        if micro_batch.virtual_rank_begins:
            self._skipped_virtual_ranks.begin(micro_batch)

    def _end_previous_virtual_rank(self) -> None:
        """Removes the zeros that the backward pass of a virtual rank leaves in `parameter.grad`.

        Without a backward pass, the gradients there are those of earlier global batches, and stay.
        """
        if self._skipped_virtual_ranks.had_backward:
            for parameter in self._root.parameters():
                parameter.grad = None

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Raises UsageError for a backward pass that cannot be part of the sum."""
        check_virtual_rank_backward(self._step, micro_batch)
        self._skipped_virtual_ranks.backward_begins()

    def backward_ended(self, micro_batch: MicroBatch) -> None:
        """Notes that the virtual rank has had its backward pass."""
        self._skipped_virtual_ranks.backward_ended()

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Raises UsageError if a virtual rank was skipped: its gradient would count as zero."""
        skipped = self._skipped_virtual_ranks.find()
        if skipped is not None and self._root in modules:
            raise skipped_error(skipped)

    def _has_gradients(self) -> bool:
        """Returns True if some shard has a gradient that is not zero.

        Until the last virtual rank of a process, torch leaves zeros in the gradients of shards.
        Between a forward and a backward pass the modules may hold whole parameters, so the shards
        are not looked up in them.
        """
        return any(has_nonzero_gradients(sums.trained_shards()) for sums in self._sums)

    def gradient_bits(self) -> dict[str, Tensor]:
        """Returns sums over the bits of the gradients of the virtual rank that has just ended.

        It is called once for each virtual rank whose gradients are compared.
        """
        sums_of_all_units: dict[str, Tensor] = {}
        for reduce_scatter in self._sums:
            sums_of_all_units.update(reduce_scatter.gradient_bits)
            reduce_scatter.gradient_bits = {}  # the next virtual rank may not use the unit
        return sums_of_all_units

    def clear_gradients(self) -> None:
        """Drops the partial sums when the loop has left a global batch early."""
        for reduce_scatter in self._sums:
            reduce_scatter.forget()
