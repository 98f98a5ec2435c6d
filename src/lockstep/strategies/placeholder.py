"""Lets a rank without samples run the model: with one *placeholder* sample, which is removed again.

If a batch has fewer samples than there are ranks, some ranks get tensors without rows. They still
have to run the model, because the other ranks wait for their gradients, shards or statistics. But
many models refuse such tensors (a reshape with -1, packed sequences). So a prepared module that is
called with them gets one row of a real sample instead, and the row is removed from what it returns.
The training loop never sees it.

The placeholder has no effect: all its gradients are zero, BatchNorm leaves it out, other layers
with statistics compute as in evaluation, and buffers and random streams are restored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.batch.no_rows import Placeholder, has_no_rows, mark_no_rows
from lockstep.batch.pytree import map_tensors, storages, tensors
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.distributed.torch_compat import NormBase, never_compiled, write_counts
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step
from lockstep.strategies import sync_batchnorm
from lockstep.strategies.sync_batchnorm import SyncBatchNorm


class Placeholders(Extension):
    """Gives the prepared modules of a run a placeholder sample when this rank has no samples.

    Args:
        step: of the run.
        modules: all prepared modules. The collection may still grow.
    """

    def __init__(self, step: Step, modules: Collection[nn.Module]) -> None:
        self._step = step
        self._modules = modules
        self._is_needed = False
        """True once this rank had a micro-batch without samples."""
        self.was_computed = False
        """True if a forward pass with gradients of this micro-batch has computed a placeholder."""

    def part_is_empty(self) -> None:
        """Registers the hooks of all prepared modules."""
        self._is_needed = True
        for module in self._modules:
            self._attach(module)

    def module_prepared(self, wrapped: Any) -> None:
        """Registers the hooks of a module that is prepared later."""
        if self._is_needed:
            self._attach(wrapped.module)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Notes that no forward pass of this micro-batch has computed a placeholder yet."""
        self.was_computed = False

    def _attach(self, module: nn.Module) -> None:
        hook = _PlaceholderHooks(self)
        module.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(hook.after, always_call=True)

    def in_backward(self) -> AbstractContextManager[None]:
        """Returns a context for the backward pass.

        Activation checkpointing runs forward passes again in it, so SyncBatchNorm has to know
        again if its samples are a placeholder.
        """
        return self._recomputing() if self._is_needed else nullcontext()

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Tells SyncBatchNorm again, in this context, if its samples are a placeholder."""
        sync_batchnorm.placeholder.computed = self.was_computed
        try:
            yield
        finally:
            sync_batchnorm.placeholder.computed = False

    def report_inputs(self, inputs: Any) -> None:
        """Tells the step which tensors a module is called with, before they are replaced."""
        if torch.is_grad_enabled():
            has_gradient = any(tensor.requires_grad for tensor in tensors(inputs))
            self._step.module_called(storages(inputs), has_gradient=has_gradient)

    @property
    def rank_has_no_samples(self) -> bool:
        """True if this rank has no samples of the micro-batch that is trained or evaluated."""
        step = self._step
        return step.micro_batch_in_use.local_rows == 0 or step.micro_batch.local_rows == 0

    @property
    def sample_tensors(self) -> list[Tensor]:
        """The tensors of a batch of one real sample."""
        return tensors(self._step.sample_in_place_of_none)


class _PlaceholderHooks:
    """The forward hooks of one module, which add a placeholder sample and remove it again.

    Args:
        placeholders: of the run. None for copies of a module, which are called as they are.
    """

    def __init__(self, placeholders: Placeholders | None = None) -> None:
        self._placeholders = placeholders
        self._placeholder = Placeholder(())
        self._entered_contexts: list[AbstractContextManager[None]] = []
        """The contexts of the forward passes that are running, one inside the other."""

    def __reduce__(self) -> tuple[type[_PlaceholderHooks], tuple[()]]:
        """Copies and pickles the hooks as ones that do nothing."""
        return _PlaceholderHooks, ()

    @never_compiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Adds a row to inputs without rows, if this rank has no samples of the micro-batch.

        SyncBatchNorm is told that a placeholder is computed, and side effects of the forward pass
        are prevented until `after` is called.

        Returns:
            The new positional and keyword arguments; None: they stay as they are.
        """
        if self._placeholders is None:  # the module is a copy
            return None
        if not any(has_no_rows(tensor) for tensor in tensors((args, kwargs))):
            return None

        self._placeholders.report_inputs((args, kwargs))
        if not self._placeholders.rank_has_no_samples:  # tensors without rows of the user's own
            return None

        self._placeholder = Placeholder(self._placeholders.sample_tensors)
        new_args, new_kwargs = self._placeholder.add_to((args, kwargs))
        context = _without_side_effects(module)
        context.__enter__()
        self._entered_contexts.append(context)
        sync_batchnorm.placeholder.computed = True
        if torch.is_grad_enabled():
            self._placeholders.was_computed = True

        return new_args, new_kwargs

    @never_compiled
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Removes the row from what the module returned; returns None for no change."""
        if not self._entered_contexts:  # `before` has added no row
            return None
        sync_batchnorm.placeholder.computed = False
        self._entered_contexts.pop().__exit__(None, None, None)
        return map_tensors(output, lambda tensor: mark_no_rows(self._placeholder.cut_off(tensor)))


@contextmanager
def _without_side_effects(module: nn.Module) -> Iterator[None]:
    """Runs a forward pass that leaves buffers and random streams as they were.

    Normalisation layers compute as in evaluation. SyncBatchNorm is an exception: all ranks compute
    its statistics together, and it leaves out placeholders by itself.
    """
    normalisation_layers: list[nn.Module] = []
    synchronised_ids: set[int] = set()
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            synchronised_ids.update(id(buffer) for buffer in layer.buffers(recurse=False))
        elif isinstance(layer, NormBase) and layer.training:
            normalisation_layers.append(layer)

    buffers = [buffer for buffer in module.buffers() if id(buffer) not in synchronised_ids]
    values = [buffer.detach().clone() for buffer in buffers]

    # Torch counts the writes to each tensor. Only buffers that were written to are restored: the
    # backward pass would fail if autograd has saved a tensor that is written to afterwards.
    write_counts_before = write_counts(buffers)
    gpus = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(preserve_rng_state())
        stack.enter_context(torch.random.fork_rng(sorted(gpus), enabled=bool(gpus)))
        for layer in normalisation_layers:
            layer.training = False

        try:
            yield
        finally:
            for layer in normalisation_layers:
                layer.training = True
            write_counts_after = write_counts(buffers)
            with torch.no_grad():
                for index, buffer in enumerate(buffers):
                    if write_counts_after[index] != write_counts_before[index]:
                        buffer.copy_(values[index])
