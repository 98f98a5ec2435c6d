"""Combines the buffers that forward passes change, for virtual ranks that train one model.

A *virtual rank* computes a fixed part of every global batch. All of them begin a global batch with
the same buffers, as all ranks do under DDP. So before a virtual rank begins, the buffers are
restored to what they were at the beginning of the global batch. After the last virtual rank they
get new values. Those of BatchNorm, and those that the user has named (`average_buffers`), get the
mean over virtual ranks, added up in the order of the tree (`virtual_ranks`). All others get the
values that the first virtual rank of this process has left: on rank 0 that is virtual rank 0.
`moving_buffers` compares these values between the ranks, and then gives those of rank 0 to all.
This is done after the first optimizer step of a global batch, whichever model that optimizer
trains: a model that rests in some steps, such as a GAN's generator, also has buffers to combine.

A SyncBatchNorm gives its buffers the values of the global batch by itself, the same on all ranks
(`virtual_rank_batchnorm`). They are only restored if a global batch is left early.

The counters of batches in BatchNorm layers also come from virtual rank 0, but need no message of
their own. What it has added to them is sent in the same message as the sums of the other buffers,
to which all other virtual ranks contribute zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.communication.summation_tree import push
from lockstep.communication.tree_sum import TreeSums
from lockstep.session.delivery import TrainingPass
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step
from lockstep.strategies.moving_buffers import MovingBuffers, names_to_average
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.strategies.virtual_ranks import VirtualRankTree, counts_in_sum
from lockstep.torch_compat import BatchNorm, add_to_each, copy_to_each, write_count


class _BufferCopy(NamedTuple):
    """A copy of a buffer."""

    buffer: Tensor
    """The original buffer, which the model may have replaced since."""
    write_count: int
    """How often the buffer had been written to when it was copied."""
    tensor: Tensor
    """The copy: the values that the buffer had."""

    def as_copy_of(self, buffer: Tensor) -> _BufferCopy:
        """Returns this copy for a buffer that has the same values now.

        The buffer counts as changed only after the next write to it.
        """
        return _BufferCopy(buffer, write_count(buffer), self.tensor)


class VirtualRankBuffers(Extension):
    """Gives every virtual rank the same initial buffers, and combines the results.

    Args:
        module: the module with the buffers.
        tree: the summation order of the run.
        step: the state of the current optimizer step.
        average: names, or patterns of names, of floating-point buffers that are averaged, in
            addition to those of BatchNorm.
        prepared: the module that `World.prepare` returns, if it differs from `module`.
    """

    def __init__(
        self,
        module: nn.Module,
        tree: VirtualRankTree,
        step: Step,
        average: str | Sequence[str] = (),
        *,
        prepared: nn.Module | None = None,
    ) -> None:
        self._has_optimizer = False
        """True if an optimizer trains the module. Other modules are changed by the script, such as
        an average of another module."""
        self._prepared_module = module if prepared is None else prepared
        self.moving_buffers: MovingBuffers | None = None
        """Gives all processes rank 0's values of the buffers that are not combined here; None if
        there is a single process."""
        self._tree = tree
        self._step = step
        batchnorm_ids: set[int] = set()
        synchronised_ids: set[int] = set()

        for layer in module.modules():
            if isinstance(layer, BatchNorm):
                batchnorm_ids.update(id(buffer) for buffer in layer.buffers(recurse=False))
            if isinstance(layer, SyncBatchNorm):
                synchronised_ids.update(id(buffer) for buffer in layer.buffers(recurse=False))

        chosen = names_to_average(module, average)
        self.averaged: list[str] = []
        """The names of the buffers that are averaged."""
        self._counters: list[str] = []
        """The names of the counters of batches in BatchNorm layers."""
        self._synchronised: set[str] = set()
        """The names of the buffers of SyncBatchNorm layers."""
        self._with_uncounted_writes: set[str] = set()
        """The names of the averaged buffers and of all buffers of BatchNorm.

        Torch counts the writes to a tensor, but misses those of its BatchNorm."""
        self._buffer_owners: list[tuple[str, nn.Module, str]] = []
        """The name of each buffer, the module that holds it, and the attribute of that module."""

        for name, buffer in module.named_buffers():
            if buffer.numel() == 0 or buffer.is_meta:  # those on the meta device are on other ranks
                continue

            owner_name, _, attribute = name.rpartition(".")
            self._buffer_owners.append((name, module.get_submodule(owner_name), attribute))
            is_of_batchnorm = id(buffer) in batchnorm_ids

            if id(buffer) in synchronised_ids:
                self._synchronised.add(name)
            elif buffer.is_floating_point() and (is_of_batchnorm or name in chosen):
                self.averaged.append(name)
            elif is_of_batchnorm:
                self._counters.append(name)

            if is_of_batchnorm or name in self.averaged:
                self._with_uncounted_writes.add(name)

        self._copies_at_beginning: dict[str, _BufferCopy] = {}
        """Copies of the buffers from the beginning of the present global batch, by name."""
        self._partial_sums: list[list[Tensor]] = []
        """A stack of partial sums of the averaged buffers, over virtual ranks of this process.

        A partial sum is a list with one flat tensor for each dtype of the averaged buffers. See
        `_flatten_results` for what such a tensor contains."""
        self._buffers_of_first_virtual_rank: dict[str, Tensor] | None = None
        """The buffers that are neither averaged nor counters nor synchronised, by name, as the
        first virtual rank of this process with samples has left them; None until then."""
        self._first_micro_batch_of_virtual_rank: MicroBatch | None = None
        """The first micro-batch of the virtual rank that was begun last; None before the first
        virtual rank."""
        self._has_uncombined_buffers = False
        """True from the beginning of a global batch until an optimizer step combines the buffers.

        Until then, the module has the buffers of a single virtual rank. Always False if no
        optimizer trains the module."""
        self._training_pass: TrainingPass | None = None
        """The pass of the micro-batch that was begun last."""
        self._values_before_pass_ended: dict[str, Tensor] = {}
        """The buffers, by name, that `pass_ended` has restored when a loop ended before the
        optimizer's step, with the values that the last virtual rank had left."""
        self._present_values: dict[str, Tensor] = {}
        """While a checkpoint is being saved: the present buffers, by name."""

    @property
    def combined_names(self) -> list[str]:
        """The names of the buffers that are combined here.

        Others are taken from rank 0 elsewhere.
        """
        return [*self.averaged, *self._counters]

    def present_combined_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that are combined here, by name, as they are in the module now.

        At the beginning of a global batch they are equal on all processes, and while a virtual rank
        is computed they are what it has left. Empty if no optimizer trains the module, as nothing
        is combined then.
        """
        if not self._has_optimizer:
            return {}
        buffers = self._buffers()
        return {name: buffers[name] for name in self.combined_names if name in buffers}

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Records whether an optimizer trains the module."""
        if self._prepared_module in modules:
            self._has_optimizer = True

    def begin(self, micro_batch: MicroBatch) -> None:
        """Gives the buffers their initial values before a virtual rank of a global batch begins.

        They are copied when the global batch begins. Before each later virtual rank, what the
        previous one has left is stored, and the buffers are restored from the copies.
        """
        if not self._buffer_owners:
            return

        self._training_pass = self._step.training_pass
        if micro_batch.first:
            self._values_before_pass_ended.clear()
        else:
            self._undo_pass_ended()  # the loop still trains on batches that it has kept

        if not micro_batch.virtual_rank_begins:
            return

        first_of_previous = self._first_micro_batch_of_virtual_rank
        self._first_micro_batch_of_virtual_rank = micro_batch
        if micro_batch.first or first_of_previous is None:
            self._begin_global_batch()
        else:
            self._store_buffers_left_by(first_of_previous)
            self._restore_unsynchronised_buffers()

    def _begin_global_batch(self) -> None:
        """Copies the initial buffers of a global batch, and drops what is left of the last one."""
        # If no optimizer has stepped for the previous global batch, the module still has the
        # buffers that the last virtual rank has left. Restore those from before that global batch.
        if self._has_uncombined_buffers:
            self._restore_unsynchronised_buffers()

        self._partial_sums.clear()
        self._buffers_of_first_virtual_rank = None
        self._copy_buffers()
        # The step of an optimizer will combine what the virtual ranks leave in the buffers. A
        # module without an optimizer is left alone: the script changes its buffers by itself.
        self._has_uncombined_buffers = self._has_optimizer

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Combines the buffers of all virtual ranks, after the step of the first optimizer."""
        of_last_virtual_rank = self._first_micro_batch_of_virtual_rank
        if of_last_virtual_rank is None or not self._has_uncombined_buffers:
            return
        self._has_uncombined_buffers = False

        # The last virtual rank ends here, and every other virtual rank in `begin`.
        self._undo_pass_ended()  # if the script makes the step after the loop
        self._store_buffers_left_by(of_last_virtual_rank)
        self._restore_unsynchronised_buffers()

        # Averaged buffers get their mean, and counters advance.
        self._combine_over_virtual_ranks(of_last_virtual_rank.global_samples)

        # All others get what this process's first virtual rank has left, then the values of rank 0.
        self._copy_from_first_virtual_rank()
        if self.moving_buffers is not None:
            self.moving_buffers.make_equal()

    def pass_ended(self) -> None:
        """Restores the initial buffers if a loop has ended without an optimizer step.

        Otherwise the script would evaluate, on each process, with the buffers of another virtual
        rank. The values are kept for `_undo_pass_ended`: the script may make the step after the
        loop, or train on batches that it has kept.
        """
        training_pass = self._training_pass
        if training_pass is None or not self._has_uncombined_buffers:
            return
        loop_may_go_on = not training_pass.loader_ended or training_pass.may_go_on
        if loop_may_go_on:
            return

        for name, buffer in self._changed_buffers().items():
            if name not in self._synchronised:  # the others are not restored
                self._values_before_pass_ended[name] = buffer.clone()
        self._restore_unsynchronised_buffers()

    @torch.no_grad()
    def _undo_pass_ended(self) -> None:
        """Gives buffers back the values that they had before `pass_ended` has restored them.

        Those that have changed since are left alone.
        """
        buffers = self._buffers()
        for name, values in self._values_before_pass_ended.items():
            initial = self._copies_at_beginning[name].tensor
            if name in buffers and torch.equal(buffers[name], initial):
                buffers[name].copy_(values)
        self._values_before_pass_ended.clear()

    @torch.no_grad()
    def _copy_from_first_virtual_rank(self) -> None:
        """Gives buffers the stored values of the first virtual rank of this process."""
        stored_buffers = self._buffers_of_first_virtual_rank or {}
        self._buffers_of_first_virtual_rank = None
        buffers = self._buffers()
        for name, stored in stored_buffers.items():
            if name in buffers:
                buffers[name].copy_(stored)

    def clear_gradients(self) -> None:
        """Restores the initial buffers when the loop has left a global batch early."""
        if self._has_uncombined_buffers:
            self._has_uncombined_buffers = False
            self._restore_all_buffers()

    def saving_begins(self) -> None:
        """Restores the initial buffers of the present global batch, to be saved in a checkpoint.

        A resumed run begins this global batch again.
        """
        if not self._has_uncombined_buffers:
            return
        for name, buffer in self._changed_buffers().items():
            self._present_values[name] = buffer.clone()
        self._restore_all_buffers()

    @torch.no_grad()
    def saving_ended(self) -> None:
        """Restores the buffers of the present virtual rank, after the checkpoint was saved."""
        buffers = self._buffers()
        for name, values in self._present_values.items():
            buffers[name].copy_(values)
        self._present_values.clear()

    def _buffers(self) -> dict[str, Tensor]:
        """Returns the present buffers by name. The model may have removed some."""
        buffers = {}
        for name, owner, attribute in self._buffer_owners:
            buffer = getattr(owner, attribute, None)
            if isinstance(buffer, Tensor):
                buffers[name] = buffer
        return buffers

    @torch.no_grad()
    def _copy_buffers(self) -> None:
        """Updates the copies of those buffers that may have changed since they were copied."""
        copies = {}
        tensors_to_overwrite: list[Tensor] = []
        changed_buffers: list[Tensor] = []
        for name, buffer in self._buffers().items():
            present_copy = self._copies_at_beginning.get(name)
            # The model may have replaced the buffer. Then there is no copy of the new one yet.
            if present_copy is None or present_copy.buffer is not buffer:
                copies[name] = _BufferCopy(buffer, write_count(buffer), tensor=buffer.clone())
            elif self._may_have_changed(name, buffer, present_copy):
                # The copy keeps its memory, which is overwritten below.
                copies[name] = present_copy.as_copy_of(buffer)
                tensors_to_overwrite.append(present_copy.tensor)
                changed_buffers.append(buffer)
            else:
                copies[name] = present_copy

        # Many small copies are faster as one operation.
        if changed_buffers:
            copy_to_each(tensors_to_overwrite, changed_buffers)

        self._copies_at_beginning = copies

    def _may_have_changed(self, name: str, buffer: Tensor, copy: _BufferCopy) -> bool:
        """Returns False if a buffer is known to have the same values as its copy."""
        was_replaced = copy.buffer is not buffer
        was_written_to = write_count(buffer) != copy.write_count
        has_uncounted_writes = name in self._with_uncounted_writes
        return was_replaced or was_written_to or has_uncounted_writes

    def _changed_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that may have changed since the global batch began, by name."""
        changed = {}
        for name, buffer in self._buffers().items():
            copy = self._copies_at_beginning.get(name)
            if copy is None:
                continue  # the model has registered the buffer since
            if self._may_have_changed(name, buffer, copy):
                changed[name] = buffer
        return changed

    def _restore_all_buffers(self) -> None:
        """Gives all buffers the values that they had when the global batch began."""
        self._restore_buffers(names_to_leave=())

    def _restore_unsynchronised_buffers(self) -> None:
        """Restores all buffers except those of SyncBatchNorm layers.

        Those have the values of the global batch already, the same on all virtual ranks.
        """
        self._restore_buffers(names_to_leave=self._synchronised)

    @torch.no_grad()
    def _restore_buffers(self, names_to_leave: Collection[str]) -> None:
        """Gives buffers the values that they had when the global batch began.

        Args:
            names_to_leave: names of the buffers that stay as they are.
        """
        restored: dict[str, Tensor] = {}
        for name, buffer in self._changed_buffers().items():
            # A buffer with a new shape is no statistic, but for example a cache of the model. Such
            # buffers are not restored.
            has_same_shape = buffer.shape == self._copies_at_beginning[name].tensor.shape
            if has_same_shape and name not in names_to_leave:
                restored[name] = buffer

        if not restored:
            return

        initial_values = [self._copies_at_beginning[name].tensor for name in restored]
        copy_to_each(list(restored.values()), initial_values)

        for name, buffer in restored.items():
            self._mark_as_unchanged(name, buffer)

    def _mark_as_unchanged(self, name: str, buffer: Tensor) -> None:
        """Notes that a buffer has the values of its copy, so that only later writes change it."""
        self._copies_at_beginning[name] = self._copies_at_beginning[name].as_copy_of(buffer)

    @torch.no_grad()
    def _store_buffers_left_by(self, micro_batch: MicroBatch) -> None:
        """Stores the buffers as a virtual rank has left them, until `after_step` combines them.

        - Averaged buffers and counters of batches are added to the sums over virtual ranks.
        - Buffers of SyncBatchNorm layers are left out, because all virtual ranks have the same.
        - Of any other buffer, only the value of this process's first virtual rank is stored.

        Args:
            micro_batch: a micro-batch of the virtual rank.
        """
        # The process may have had no virtual rank left to compute, or have repeated one only to
        # check a device. Such results are dropped.
        if not counts_in_sum(micro_batch):
            return
        if self.averaged:
            self._add_to_sums(micro_batch)
        if self._buffers_of_first_virtual_rank is None:
            self._store_uncombined_buffers(micro_batch)

    def _add_to_sums(self, micro_batch: MicroBatch) -> None:
        """Adds the averaged buffers of a virtual rank, and its counters, to the partial sums."""
        # Only virtual rank 0 decides how far the counters advance.
        is_virtual_rank_0 = micro_batch.virtual_rank_number == 0
        flat_tensors = self._flatten_results(is_virtual_rank_0=is_virtual_rank_0)

        # `push` then replaces the two topmost sums by their sum, `num_merges` times.
        num_merges = self._tree.num_merges(micro_batch)
        push(self._partial_sums, flat_tensors, num_merges, add=add_to_each)

    def _store_uncombined_buffers(self, micro_batch: MicroBatch) -> None:
        """Stores the buffers that are not combined, of this process's first virtual rank.

        A virtual rank without samples is passed over: processes compare what they have stored, and
        the buffers that it has not changed would look like a difference. Virtual rank 0 is never
        passed over, because its buffers are what all processes get.
        """
        is_virtual_rank_0 = micro_batch.virtual_rank_number == 0
        has_samples = micro_batch.local_rows > 0
        if not is_virtual_rank_0 and not has_samples:
            return

        stored_elsewhere = [*self.combined_names, *self._synchronised]
        self._buffers_of_first_virtual_rank = {
            name: buffer.clone()
            for name, buffer in self._changed_buffers().items()
            if name not in stored_elsewhere
        }

    def _flatten_results(self, *, is_virtual_rank_0: bool) -> list[Tensor]:
        """Packs the averaged buffers of a virtual rank into one flat tensor for each dtype.

        The increments of the counters of batches (`num_batches_tracked`) follow in the first
        tensor, so that they need no message of their own. For example, a BatchNorm of two channels
        gives, on virtual rank 0,

            [mean_0, mean_1, variance_0, variance_1, 1.0]

        Args:
            is_virtual_rank_0: True for virtual rank 0, which decides how far the counters advance.
                All others put zeros in the place of the increments.
        """
        buffers = self._buffers()
        pieces_by_dtype: list[list[Tensor]] = []
        for names in self._averaged_by_dtype(buffers):
            pieces_by_dtype.append([buffers[name].reshape(-1) for name in names])

        # There is a first dtype, because this is only called if there are averaged buffers.
        first_pieces = pieces_by_dtype[0]
        first_pieces += self._counter_increments(
            buffers, dtype=first_pieces[0].dtype, is_virtual_rank_0=is_virtual_rank_0
        )
        return [torch.cat(pieces) for pieces in pieces_by_dtype]

    def _counter_increments(
        self, buffers: Mapping[str, Tensor], *, dtype: torch.dtype, is_virtual_rank_0: bool
    ) -> list[Tensor]:
        """Returns by how much each counter is to advance in this global batch, as flat tensors.

        They are summed over the virtual ranks, and the counters are to advance as on virtual rank 0
        alone. So all others return zeros.

        Args:
            buffers: the present buffers by name.
            dtype: the dtype of the result.
            is_virtual_rank_0: True on virtual rank 0.
        """
        increments = []
        for name in self._counters:
            if is_virtual_rank_0:
                increment = buffers[name] - self._copies_at_beginning[name].tensor
            else:
                increment = torch.zeros_like(buffers[name])
            increments.append(increment.reshape(-1).to(dtype))
        return increments

    def _averaged_by_dtype(self, buffers: Mapping[str, Tensor]) -> list[list[str]]:
        """Returns the names of the averaged buffers, in one list for each dtype."""
        names_of_dtype: dict[torch.dtype, list[str]] = {}
        for name in self.averaged:
            names_of_dtype.setdefault(buffers[name].dtype, []).append(name)
        return list(names_of_dtype.values())

    @torch.no_grad()
    def _combine_over_virtual_ranks(self, num_samples: int) -> None:
        """Averages buffers over virtual ranks, and advances the counters of batches.

        Each dtype takes one message. That of the first dtype also has the increments of the
        counters, as `_flatten_results` packs them.

        Before the call, all buffers have been restored to the beginning of the global batch.

        Args:
            num_samples: the number of samples in the global batch.
        """
        if not self.averaged:
            return

        sums = self._tree.sums(num_samples)
        buffers = self._buffers()

        for dtype_index, names in enumerate(self._averaged_by_dtype(buffers)):
            averaged = [buffers[name] for name in names]
            counters: list[Tensor] = []
            if dtype_index == 0:
                counters = [buffers[name] for name in self._counters]

            lengths = [buffer.numel() for buffer in (*averaged, *counters)]
            packed_mean = averaged[0].new_empty(sum(lengths))
            self._compute_mean(sums, dtype_index, out=packed_mean)

            # Unpack it: [mean of buffer a | mean of buffer b | mean increment of counter c].
            parts = torch.split(packed_mean, lengths)
            means_of_buffers = parts[: len(averaged)]
            mean_increments = parts[len(averaged) :]

            shaped_means: list[Tensor] = []
            for buffer, mean in zip(averaged, means_of_buffers, strict=True):
                shaped_means.append(mean.view_as(buffer))
            copy_to_each(averaged, shaped_means)

            _advance_counters(counters, mean_increments, sums.num_present)

        self._partial_sums.clear()

    def _compute_mean(self, sums: TreeSums, dtype_index: int, *, out: Tensor) -> None:
        """Computes the mean of the flat tensors of one dtype, over all virtual ranks with samples.

        Args:
            sums: the summation order of the global batch.
            dtype_index: the position of the dtype in each partial sum.
            out: the mean is written to this tensor.
        """
        flat_sums = [partial_sum[dtype_index] for partial_sum in self._partial_sums]
        wait_for_mean = sums.start(flat_sums, total=out, scale=1.0 / sums.num_present)
        wait_for_mean()


def _advance_counters(
    counters: Sequence[Tensor], mean_increments: Sequence[Tensor], num_virtual_ranks: int
) -> None:
    """Adds to each counter of batches what virtual rank 0 has added to it.

    To the mean, virtual rank 0 has contributed its increment, and all others have contributed 0.
    For example, with 4 virtual ranks and an increment of 1, the mean is 0.25, and 0.25 * 4 = 1.

    Args:
        counters: the counters, which are changed in place.
        mean_increments: the mean over all virtual ranks for each counter, flat.
        num_virtual_ranks: the number of virtual ranks that have contributed to the mean.
    """
    for counter, mean in zip(counters, mean_increments, strict=True):
        increment = (mean * num_virtual_ranks).round()  # without the error of the division
        counter.add_(increment.view_as(counter).to(counter.dtype))
