"""Combines the buffers that forward passes change, for virtual ranks that train one model.

A *virtual rank* computes a fixed part of every global batch. All of them begin a global batch with
the same buffers, as all ranks do under DDP. So before a virtual rank begins, the buffers are
restored to what they were at the beginning of the global batch. After the last virtual rank they
get new values. Those of BatchNorm, and those that the user has named (`average_buffers`), get the
mean over virtual ranks, added up in the order of the tree (`virtual_ranks`). All others get the
values of virtual rank 0.

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
from lockstep.distributed.torch_compat import BatchNorm, add_to_each, copy_to_each, write_counts
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step, StepKey
from lockstep.strategies.moving_buffers import names_to_average
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.strategies.virtual_ranks import VirtualRankTree, counts_in_sum


class _Copy(NamedTuple):
    """A copy of a buffer."""

    buffer: Tensor
    """The original buffer, which the model may have replaced since."""
    write_count: int
    """How often the buffer had been written to when it was copied."""
    values: Tensor
    """The values of the buffer when it was copied."""


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
        self._counts: list[str] = []
        """The names of the counters of batches in BatchNorm layers."""
        self._synchronised: set[str] = set()
        """The names of the buffers of SyncBatchNorm layers."""
        self._with_uncounted_writes: set[str] = set()
        """The names of the averaged buffers and of all buffers of BatchNorm.

        Torch counts the writes
        to a tensor, but misses those of its BatchNorm."""
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
                self._counts.append(name)

            if is_of_batchnorm or name in self.averaged:
                self._with_uncounted_writes.add(name)

        self._at_beginning: dict[str, _Copy] = {}
        """Copies of the buffers from the beginning of the present global batch, by name."""
        self._partial_sums: list[list[Tensor]] = []
        """A stack of partial sums of the averaged buffers, over virtual ranks of this process. A
        partial sum has a flat tensor for each dtype."""
        self._of_first: dict[str, Tensor] = {}
        """The new values of the other buffers, if this process computes virtual rank 0, by name."""
        self._previous: MicroBatch | None = None
        self._combined_in: StepKey | None = None
        """The optimizer step after which the buffers were combined."""
        self._in_global_batch = False
        """True from the beginning of a global batch until the buffers are combined."""
        self._present_values: dict[str, Tensor] = {}
        """While a checkpoint is being saved: the present buffers, by name."""

    @property
    def combined(self) -> list[str]:
        """The names of the buffers that are combined here.

        Others are taken from rank 0 elsewhere.
        """
        return [*self.averaged, *self._counts]

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Records whether an optimizer trains the module."""
        if self._prepared_module in modules:
            self._has_optimizer = True

    def begin(self, micro_batch: MicroBatch) -> None:
        """Restores the initial buffers for a virtual rank, or copies them for a global batch."""
        if not self._buffer_owners or not micro_batch.virtual_rank_begins:
            return

        previous = self._previous
        self._previous = micro_batch
        if previous is not None and not micro_batch.first:
            # Another virtual rank of the same global batch.
            self._virtual_rank_ended(previous)
            self._restore_buffers(keep=self._synchronised)
            return

        # A global batch begins.
        if self._in_global_batch:  # the optimizer has not stepped for the previous one
            self._restore_buffers(keep=self._synchronised)

        self._in_global_batch = self._has_optimizer
        self._partial_sums.clear()
        self._of_first.clear()
        self._copy_buffers()

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Combines the buffers of all virtual ranks, after the step of the first optimizer."""
        micro_batch = self._step.micro_batch
        if self._prepared_module not in modules or micro_batch.virtual_rank is None:
            return
        if not self._buffer_owners:
            return
        if self._combined_in == self._step.key or self._previous is None:
            return  # another optimizer has already stepped, or no virtual rank has begun

        self._combined_in = self._step.key
        self._in_global_batch = False
        self._virtual_rank_ended(self._previous)
        self._restore_buffers(keep=self._synchronised)
        self._average(micro_batch.global_samples)
        buffers = self._buffers()

        with torch.no_grad():
            for name, values in self._of_first.items():
                if name in buffers:
                    buffers[name].copy_(values)

        self._of_first.clear()

    def clear_gradients(self) -> None:
        """Restores the initial buffers when the loop has left a global batch early."""
        if self._in_global_batch:
            self._in_global_batch = False
            self._restore_buffers()

    def saving_begins(self) -> None:
        """Restores the initial buffers of the present global batch, to be saved in a checkpoint.

        A resumed run begins this global batch again.
        """
        if not self._in_global_batch:
            return
        for name, buffer in self._changed_buffers().items():
            self._present_values[name] = buffer.clone()
        self._restore_buffers()

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
        copied: list[Tensor] = []
        values_of_copied: list[Tensor] = []
        for name, buffer in self._buffers().items():
            known = self._at_beginning.get(name)
            if known is None or known.buffer is not buffer:
                (write_count,) = write_counts([buffer])
                copies[name] = _Copy(buffer, write_count, buffer.clone())
            elif self._may_have_changed(name, buffer, known):
                (write_count,) = write_counts([buffer])
                copies[name] = _Copy(buffer, write_count, known.values)
                copied.append(buffer)
                values_of_copied.append(known.values)
            else:
                copies[name] = known

        if copied:
            copy_to_each(values_of_copied, copied)

        self._at_beginning = copies

    def _may_have_changed(self, name: str, buffer: Tensor, copy: _Copy) -> bool:
        """Returns False if a buffer is known to have the same values as its copy."""
        (write_count,) = write_counts([buffer])
        was_written_to = copy.buffer is not buffer or copy.write_count != write_count
        return was_written_to or name in self._with_uncounted_writes

    def _changed_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that may have changed since the global batch began, by name."""
        changed = {}
        for name, buffer in self._buffers().items():
            copy = self._at_beginning.get(name)
            if copy is None:
                continue  # the model has registered the buffer since
            if self._may_have_changed(name, buffer, copy):
                changed[name] = buffer
        return changed

    @torch.no_grad()
    def _restore_buffers(self, keep: Collection[str] = ()) -> None:
        """Gives the buffers the values that they had at the beginning of the global batch.

        Args:
            keep: the names of buffers that are not restored.
        """
        restored: dict[str, Tensor] = {}
        for name, buffer in self._changed_buffers().items():
            # A buffer whose shape has changed is not a statistic, but a cache, for example.
            has_same_shape = buffer.shape == self._at_beginning[name].values.shape
            if has_same_shape and name not in keep:
                restored[name] = buffer

        if not restored:
            return

        copy_to_each(
            list(restored.values()), [self._at_beginning[name].values for name in restored]
        )
        for name, buffer in restored.items():
            (write_count,) = write_counts([buffer])
            self._at_beginning[name] = _Copy(buffer, write_count, self._at_beginning[name].values)

    @torch.no_grad()
    def _virtual_rank_ended(self, micro_batch: MicroBatch) -> None:
        """Stores the buffers that a virtual rank has left.

        Args:
            micro_batch: a micro-batch of the virtual rank.
        """
        if not counts_in_sum(micro_batch):
            return

        is_first = micro_batch.virtual_rank_number == 0
        if self.averaged:
            values = self._flat_values(is_first)
            push(self._partial_sums, values, self._tree.num_merges(micro_batch), add_to_each)

        if is_first:
            combined = [*self.combined, *self._synchronised]
            for name, buffer in self._changed_buffers().items():
                if name not in combined:
                    self._of_first[name] = buffer.clone()

    def _flat_values(self, is_first: bool) -> list[Tensor]:
        """Returns what a virtual rank contributes to the sums, as a flat tensor for each dtype.

        The first tensor has the averaged buffers of its dtype, followed by the increments of the
        counters.

        Args:
            is_first: True for virtual rank 0. The others contribute zeros to the counters.
        """
        buffers = self._buffers()
        flat: list[Tensor] = []
        for names in self._averaged_by_dtype(buffers):
            values = [buffers[name].reshape(-1) for name in names]
            if not flat:
                for name in self._counts:
                    added = buffers[name] - self._at_beginning[name].values
                    values.append((added * is_first).reshape(-1).to(values[0].dtype))
            flat.append(torch.cat(values))

        return flat

    def _averaged_by_dtype(self, buffers: Mapping[str, Tensor]) -> list[list[str]]:
        """Returns the names of the averaged buffers, in one list for each dtype."""
        names_of_dtype: dict[torch.dtype, list[str]] = {}
        for name in self.averaged:
            names_of_dtype.setdefault(buffers[name].dtype, []).append(name)
        return list(names_of_dtype.values())

    @torch.no_grad()
    def _average(self, count: int) -> None:
        """Averages buffers over virtual ranks, and updates the counters of batches.

        Before that, all buffers have been restored to the beginning of the global batch.

        Args:
            count: the number of samples in the global batch.
        """
        if not self.averaged:
            return

        sums = self._tree.sums(count)
        buffers = self._buffers()

        # All buffers of a dtype are summed in one message.
        for group, names in enumerate(self._averaged_by_dtype(buffers)):
            results = [buffers[name] for name in names]
            counts = [buffers[name] for name in self._counts] if group == 0 else []
            lengths = [buffer.numel() for buffer in (*results, *counts)]
            total = results[0].new_empty(sum(lengths))
            partial_sums = [partial_sum[group] for partial_sum in self._partial_sums]
            wait = sums.start(partial_sums, total, scale=1.0 / sums.num_present)
            wait()
            means = torch.split(total, lengths)
            shaped = [mean.view_as(buffer) for mean, buffer in zip(means, results, strict=False)]
            copy_to_each(results, shaped)

            for buffer, mean in zip(counts, means[len(results) :], strict=True):
                # This is the mean of the increment of virtual rank 0, an integer, and of zeros.
                added = (mean * sums.num_present).round()
                buffer.add_(added.view_as(buffer).to(buffer.dtype))

        self._partial_sums.clear()
