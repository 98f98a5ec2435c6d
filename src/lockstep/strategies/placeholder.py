"""What a rank without samples computes: one placeholder sample, whose results are cut off.

Many models refuse a batch of no samples: a reshape with -1, a padded encoder, packed sequences. Yet
a rank that has none has to take part, because the other ranks wait for its gradients, its shards,
or its statistics. So a prepared module that is called with tensors of no rows gets one row instead,
of a real sample, and what it returns is cut back to no rows. The training loop sees no row of it,
so its own sums stay exact.

The row counts for nothing: every gradient of it is zero, BatchNorm does not see it, other layers
that keep statistics compute in evaluation mode, buffers and random streams are afterwards what they
were before.
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
    """Gives the prepared modules of one run a placeholder sample where this rank has none.

    Args:
        step: of the run.
        modules: all prepared ones; the collection may still grow.
    """

    def __init__(self, step: Step, modules: Collection[nn.Module]) -> None:
        self._step = step
        self._modules = modules
        self._is_needed = False
        """True once this rank had a micro-batch without samples."""
        self.computed = False
        """True if a forward pass of the present micro-batch computed one, with gradients."""

    def part_is_empty(self) -> None:
        """Hooks all prepared modules."""
        self._is_needed = True
        for module in self._modules:
            self._attach(module)

    def module_prepared(self, wrapped: Any) -> None:
        """Hooks a module that is prepared later."""
        if self._is_needed:
            self._attach(wrapped.module)

    def begin(self, micro_batch: MicroBatch) -> None:
        """No forward pass of this micro-batch has computed a placeholder yet."""
        self.computed = False

    def _attach(self, module: nn.Module) -> None:
        hook = _Placeholder(self)
        module.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(hook.after, always_call=True)

    def in_backward(self) -> AbstractContextManager[None]:
        """Returns the context of a backward pass, in which checkpointed activations are computed
        once more.
        """
        return self._recomputing() if self._is_needed else nullcontext()

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        sync_batchnorm.placeholder.computed = self.computed
        try:
            yield
        finally:
            sync_batchnorm.placeholder.computed = False

    def saw_forward(self, inputs: Any) -> None:
        """Tells the step what a module is called with, before that is replaced."""
        if torch.is_grad_enabled():
            derived = any(tensor.requires_grad for tensor in tensors(inputs))
            self._step.module_called(storages(inputs), has_gradient=derived)

    @property
    def may_be_due(self) -> bool:
        """Whether this rank has no samples of a micro-batch that is trained or evaluated."""
        return not (self._step.micro_batch_in_use.local_rows and self._step.micro_batch.local_rows)

    @property
    def samples(self) -> list[Tensor]:
        """The tensors of a batch of one sample."""
        return tensors(self._step.sample_in_place_of_none)


class _Placeholder:
    """The hooks of one module."""

    def __init__(self, of_run: Placeholders | None = None) -> None:
        self._of_run = of_run
        self._placeholder = Placeholder(())
        self._entered: list[AbstractContextManager[None]] = []

    def __reduce__(self) -> tuple[type[_Placeholder], tuple[()]]:
        """Copies of the module, and pickled ones, are called as they are."""
        return _Placeholder, ()

    @never_compiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Replaces inputs of no rows."""
        if self._of_run is None:
            return None
        if not any(has_no_rows(tensor) for tensor in tensors((args, kwargs))):
            return None
        self._of_run.saw_forward((args, kwargs))
        if not self._of_run.may_be_due:
            return None
        self._placeholder = Placeholder(self._of_run.samples)
        new_args, new_kwargs = self._placeholder.add_to((args, kwargs))
        context = _without_traces(module)
        context.__enter__()
        self._entered.append(context)
        sync_batchnorm.placeholder.computed = True
        self._of_run.computed |= torch.is_grad_enabled()
        return new_args, new_kwargs

    @never_compiled
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cuts the placeholder off what the module returned."""
        if not self._entered:
            return None
        sync_batchnorm.placeholder.computed = False
        self._entered.pop().__exit__(None, None, None)
        return map_tensors(output, lambda tensor: mark_no_rows(self._placeholder.cut_off(tensor)))


@contextmanager
def _without_traces(module: nn.Module) -> Iterator[None]:
    """Layers that keep statistics compute as in evaluation; buffers and random streams stay."""
    layers = list(module.modules())
    synchronised = [layer for layer in layers if isinstance(layer, SyncBatchNorm)]
    moved_alike = {id(b) for layer in synchronised for b in layer.buffers(recurse=False)}
    normalising = [
        layer
        for layer in layers
        if isinstance(layer, NormBase) and layer.training and not isinstance(layer, SyncBatchNorm)
    ]
    buffers = [buffer for buffer in module.buffers() if id(buffer) not in moved_alike]
    values = [buffer.detach().clone() for buffer in buffers]
    writes_before = write_counts(buffers)
    gpus = sorted({b.device.index for b in module.parameters() if b.device.type == "cuda"})
    with ExitStack() as stack:
        stack.enter_context(preserve_rng_state())
        stack.enter_context(torch.random.fork_rng(gpus, enabled=bool(gpus)))
        for layer in normalising:
            layer.training = False
        try:
            yield
        finally:
            for layer in normalising:
                layer.training = True
            with torch.no_grad():
                writes_after = write_counts(buffers)
                for index, buffer in enumerate(buffers):
                    if writes_after[index] != writes_before[index]:
                        buffer.copy_(values[index])
