"""Buffers that forward passes change, with virtual ranks that train one model.

Every virtual rank begins a global batch with the same buffers, as every rank does under DDP. So
before a virtual rank begins, the buffers are set back to what they were when the global batch
began. After the last one they get their new values: those of BatchNorm, and others that the user
has named (`average_buffers`), the mean over virtual ranks, added up in the order of the tree; all
others those of virtual rank 0.

A SyncBatchNorm gives its buffers the values of the global batch by itself, the same on all ranks
(`virtual_rank_batchnorm`). They are only set back where a global batch is broken off.

The numbers of batches that BatchNorm counts are of the last kind. What virtual rank 0 has added to
them is summed in the same message as the means, where all other virtual ranks give zeros, so that
they need no message of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.communication.summation_tree import push
from lockstep.distributed.torch_compat import BatchNorm, add_to_each, copy_to_each, write_counts
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step, StepKey
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.strategies.virtual_ranks import VirtualRankTree, has_leaf


class _Copy(NamedTuple):
    """A copy of a buffer."""

    buffer: Tensor
    """The buffer itself, which the model may have replaced since."""
    write_count: int
    """How often it had been written to when it was copied."""
    values: Tensor


class VirtualRankBuffers(Extension):
    """Gives every virtual rank the same buffers to begin with, and combines what they made of them.

    Args:
        module: whose buffers these are.
        tree: of the run.
        step: of the run.
        average: patterns of the names of floating-point buffers that are averaged, besides those of
            BatchNorm.
        prepared: the module as `World.prepare` returns it, if that is another one.
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
        """False for a module that the script changes itself, such as an average of another one."""
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
        patterns = [average] if isinstance(average, str) else average
        self.averaged: list[str] = []
        """The names of the buffers that are averaged."""
        self._counts: list[str] = []
        """The names of the numbers of batches that BatchNorm counts."""
        self._synchronised: set[str] = set()
        """The names of the buffers of SyncBatchNorm."""
        self._with_uncounted_writes: set[str] = set()
        """The names of the averaged buffers and of all of BatchNorm. Torch counts the writes to a
        tensor, except those of its BatchNorm."""
        self._places: list[tuple[str, nn.Module, str]] = []
        """The name of each buffer, the module that holds it, and the attribute of that module."""
        for name, buffer in module.named_buffers():
            if buffer.numel() == 0 or buffer.is_meta:  # on the meta device: other ranks have it
                continue
            owner_name, _, attribute = name.rpartition(".")
            self._places.append((name, module.get_submodule(owner_name), attribute))
            is_of_batchnorm = id(buffer) in batchnorm_ids
            is_chosen = any(fnmatchcase(name, pattern) for pattern in patterns)
            if id(buffer) in synchronised_ids:
                self._synchronised.add(name)
            elif buffer.is_floating_point() and (is_of_batchnorm or is_chosen):
                self.averaged.append(name)
            elif is_of_batchnorm:
                self._counts.append(name)
            if is_of_batchnorm or name in self.averaged:
                self._with_uncounted_writes.add(name)
        self._at_beginning: dict[str, _Copy] = {}
        """The buffers when the present global batch began."""
        self._nodes: list[list[Tensor]] = []
        """Partial sums of the averaged buffers over virtual ranks of this process; a stack. Of each
        there is a flat tensor for each dtype."""
        self._of_first: dict[str, Tensor] = {}
        """What virtual rank 0 has made of the other buffers, if this process computes it."""
        self._previous: MicroBatch | None = None
        self._combined_in: StepKey | None = None
        """The optimizer step after which the buffers were combined."""
        self._in_global_batch = False
        """True from the beginning of a global batch until the buffers are combined."""
        self._put_aside: dict[str, Tensor] = {}
        """The present buffers by name, while those of the beginning are saved in a checkpoint."""

    @property
    def combined(self) -> list[str]:
        """The names of the buffers that are combined here; others are to be taken from rank 0."""
        return [*self.averaged, *self._counts]

    def optimizer_prepared(self, optimizer: Any, modules: Sequence[nn.Module]) -> None:
        """Notes that an optimizer steps for the module."""
        if self._prepared_module in modules:
            self._has_optimizer = True

    def begin(self, micro_batch: MicroBatch) -> None:
        """Sets the buffers back to the beginning of the global batch, for another virtual rank."""
        if not self._places or not micro_batch.virtual_rank_begins:
            return
        previous = self._previous
        self._previous = micro_batch
        if previous is not None and not micro_batch.first:
            # Another virtual rank of the same global batch.
            self._virtual_rank_ended(previous)
            self._restore_buffers(keep=self._synchronised)
            return
        # A global batch begins.
        if self._in_global_batch:  # the optimizer has not stepped for the one before
            self._restore_buffers(keep=self._synchronised)
        self._in_global_batch = self._has_optimizer
        self._nodes.clear()
        self._of_first.clear()
        self._copy_buffers()

    def after_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Combines the buffers of all virtual ranks, after the first optimizer's step."""
        micro_batch = self._step.micro_batch
        if self._prepared_module not in modules or micro_batch.virtual_rank is None:
            return
        if not self._places:
            return
        if self._combined_in == self._step.key or self._previous is None:
            return  # another optimizer has stepped before, or no virtual rank has begun
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
        """Sets the buffers back to the beginning of a global batch that was broken off."""
        if self._in_global_batch:
            self._in_global_batch = False
            self._restore_buffers()

    def saving_begins(self) -> None:
        """Lets a checkpoint have the buffers that the present global batch began with.

        A run that is resumed begins the global batch anew.
        """
        if not self._in_global_batch:
            return
        for name, buffer in self._changed_buffers().items():
            self._put_aside[name] = buffer.clone()
        self._restore_buffers()

    @torch.no_grad()
    def saving_ended(self) -> None:
        """Gives the buffers back what the present virtual rank has made of them."""
        buffers = self._buffers()
        for name, values in self._put_aside.items():
            buffers[name].copy_(values)
        self._put_aside.clear()

    def _buffers(self) -> dict[str, Tensor]:
        """Returns the present buffers by name. The model may have removed some."""
        buffers = {}
        for name, owner, attribute in self._places:
            buffer = getattr(owner, attribute, None)
            if isinstance(buffer, Tensor):
                buffers[name] = buffer
        return buffers

    @torch.no_grad()
    def _copy_buffers(self) -> None:
        """Copies the buffers, those that may have changed since they were last copied."""
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
        """Returns False if a buffer is known to have the values of its copy."""
        (write_count,) = write_counts([buffer])
        was_written_to = copy.buffer is not buffer or copy.write_count != write_count
        return was_written_to or name in self._with_uncounted_writes

    def _changed_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that may have changed since the global batch began, by name."""
        changed = {}
        for name, buffer in self._buffers().items():
            copy = self._at_beginning.get(name)
            if copy is None:
                continue  # the model has registered it since
            if self._may_have_changed(name, buffer, copy):
                changed[name] = buffer
        return changed

    @torch.no_grad()
    def _restore_buffers(self, keep: Collection[str] = ()) -> None:
        """Gives the buffers the values that they had when the global batch began.

        Args:
            keep: the names of those that keep their present values.
        """
        restored: dict[str, Tensor] = {}
        for name, buffer in self._changed_buffers().items():
            # If it has another shape it is another buffer, such as a cache.
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
        """Takes what a virtual rank has made of the buffers.

        Args:
            micro_batch: of the virtual rank.
        """
        if not has_leaf(micro_batch):
            return
        is_first = micro_batch.virtual_rank_number == 0
        if self.averaged:
            values = self._flat_values(is_first)
            push(self._nodes, values, self._tree.num_merges(micro_batch), add_to_each)
        if is_first:
            combined = [*self.combined, *self._synchronised]
            for name, buffer in self._changed_buffers().items():
                if name not in combined:
                    self._of_first[name] = buffer.clone()

    def _flat_values(self, is_first: bool) -> list[Tensor]:
        """Returns what a virtual rank adds to the sums: a flat tensor for each dtype.

        After the averaged buffers, the first one has what was added to the counts.

        Args:
            is_first: True for virtual rank 0.
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
        """Returns the names of the averaged buffers, those of one dtype together."""
        names_of_dtype: dict[torch.dtype, list[str]] = {}
        for name in self.averaged:
            names_of_dtype.setdefault(buffers[name].dtype, []).append(name)
        return list(names_of_dtype.values())

    @torch.no_grad()
    def _average(self, count: int) -> None:
        """Gives the averaged buffers their means over virtual ranks, and counts those of the first.

        All of them have the values that the global batch began with.

        Args:
            count: samples of the global batch.
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
            nodes = [node[group] for node in self._nodes]
            wait = sums.start(nodes, total, scale=1.0 / sums.num_present)
            wait()
            means = torch.split(total, lengths)
            shaped = [mean.view_as(buffer) for mean, buffer in zip(means, results, strict=False)]
            copy_to_each(results, shaped)
            for buffer, mean in zip(counts, means[len(results) :], strict=True):
                # The mean of what virtual rank 0 has added and of zeros, a whole number before.
                added = (mean * sums.num_present).round()
                buffer.add_(added.view_as(buffer).to(buffer.dtype))
        self._nodes.clear()
