"""Buffers that forward passes change, with virtual ranks that train one model.

Every virtual rank begins a global batch with the same buffers, as every rank does under DDP. So
before a virtual rank begins, the buffers are set back to what they were when the global batch
began. After the last one they get their new values: those of BatchNorm, and others that the user
has named (`average_buffers`), the mean over virtual ranks, added up in the order of the tree; all
others those of virtual rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.communication.summation_tree import push
from lockstep.distributed.torch_compat import BatchNorm, add_to_each, write_counts
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step, StepKey
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
        for layer in module.modules():
            if isinstance(layer, BatchNorm):
                batchnorm_ids.update(id(buffer) for buffer in layer.buffers(recurse=False))
        patterns = [average] if isinstance(average, str) else average
        self.averaged: list[str] = []
        """The names of the buffers that are averaged."""
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
            if buffer.is_floating_point() and (is_of_batchnorm or is_chosen):
                self.averaged.append(name)
            if is_of_batchnorm or name in self.averaged:
                self._with_uncounted_writes.add(name)
        self._at_beginning: dict[str, _Copy] = {}
        """The buffers when the present global batch began."""
        self._nodes: list[list[Tensor]] = []
        """Partial sums of the averaged buffers over virtual ranks of this process; a stack."""
        self._of_first: dict[str, Tensor] = {}
        """What virtual rank 0 has made of the other buffers, if this process computes it."""
        self._previous: MicroBatch | None = None
        self._combined_in: StepKey | None = None
        """The optimizer step after which the buffers were combined."""
        self._in_global_batch = False
        """True from the beginning of a global batch until the buffers are combined."""
        self._put_aside: dict[str, Tensor] = {}
        """The present buffers by name, while those of the beginning are saved in a checkpoint."""

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
            self._restore_buffers()
            return
        # A global batch begins.
        if self._in_global_batch:  # the optimizer has not stepped for the one before
            self._restore_buffers()
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
        self._restore_buffers()
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
        for name, buffer in self._buffers().items():
            known = self._at_beginning.get(name)
            if known is not None and not self._may_have_changed(name, buffer, known):
                copies[name] = known
            else:
                (write_count,) = write_counts([buffer])
                copies[name] = _Copy(buffer, write_count, buffer.clone())
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
    def _restore_buffers(self) -> None:
        """Gives the buffers the values that they had when the global batch began."""
        for name, buffer in self._changed_buffers().items():
            copy = self._at_beginning[name]
            if buffer.shape == copy.values.shape:  # else it is another buffer, such as a cache
                buffer.copy_(copy.values)
                (write_count,) = write_counts([buffer])
                self._at_beginning[name] = _Copy(buffer, write_count, copy.values)

    @torch.no_grad()
    def _virtual_rank_ended(self, micro_batch: MicroBatch) -> None:
        """Takes what a virtual rank has made of the buffers.

        Args:
            micro_batch: of the virtual rank.
        """
        if not has_leaf(micro_batch):
            return
        if self.averaged:
            buffers = self._buffers()
            values = [buffers[name].clone() for name in self.averaged]
            push(self._nodes, values, self._tree.num_merges(micro_batch), add_to_each)
        if micro_batch.virtual_rank_number == 0:
            for name, buffer in self._changed_buffers().items():
                if name not in self.averaged:
                    self._of_first[name] = buffer.clone()

    @torch.no_grad()
    def _average(self, count: int) -> None:
        """Gives the averaged buffers their means over virtual ranks.

        Args:
            count: samples of the global batch.
        """
        if not self.averaged:
            return
        sums = self._tree.sums(count)
        all_buffers = self._buffers()
        places_by_dtype: dict[torch.dtype, list[int]] = {}
        buffers = [all_buffers[name] for name in self.averaged]
        for place, buffer in enumerate(buffers):
            if buffer.dtype not in places_by_dtype:
                places_by_dtype[buffer.dtype] = []
            places_by_dtype[buffer.dtype].append(place)
        # All buffers of a dtype are summed in one message.
        for places in places_by_dtype.values():
            nodes = []
            for node in self._nodes:
                nodes.append(torch.cat([node[place].reshape(-1) for place in places]))
            numel = sum(buffers[place].numel() for place in places)
            total = buffers[places[0]].new_empty(numel)
            wait = sums.start(nodes, total, scale=1.0 / sums.num_present)
            wait()
            means = torch.split(total, [buffers[place].numel() for place in places])
            for place, mean in zip(places, means, strict=True):
                buffers[place].copy_(mean.view_as(buffers[place]))
        self._nodes.clear()
