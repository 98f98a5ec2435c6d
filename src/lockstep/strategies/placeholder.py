"""Lets a rank without samples run the model, with one *placeholder* sample.

If a batch has fewer samples than there are ranks, some ranks get tensors without rows. They still
have to run the model, because the other ranks wait for their gradients, shards or statistics. But
many models reject tensors without rows (because of a reshape with -1, or packed sequences). So a
prepared module that is called with such tensors is given one row of a real sample instead, and that
row is removed from its output. The training loop never sees it.

The placeholder has no effect on the training: all its gradients are zero, BatchNorm ignores it,
other layers with statistics compute as in evaluation, and buffers and random streams are restored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.batch.no_rows import Placeholder, has_no_rows, mark_no_rows
from lockstep.batch.pytree import (
    map_tensors_and_attributes,
    tensors,
    tensors_and_attributes,
)
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import Step
from lockstep.strategies import sync_batchnorm
from lockstep.strategies.module_hook import RunHook, report_inputs
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.torch_compat import BatchNorm, NormBase, never_compiled, write_counts


class Placeholders(Extension):
    """Gives the prepared modules of a run a placeholder sample when this rank has no samples.

    Args:
        step: the state of the current optimizer step.
        modules: all prepared modules; the collection may still grow.
    """

    def __init__(self, step: Step, modules: Collection[nn.Module]) -> None:
        self._step = step
        self._modules = modules
        self._is_needed = False
        """True if this rank has had a micro-batch without samples."""
        self.placeholder_was_computed = False
        """True if a forward pass of this micro-batch, with gradients, used a placeholder."""

    def part_is_empty(self) -> None:
        """Registers hooks on all prepared modules when this rank first has no samples."""
        self._is_needed = True
        for module in self._modules:
            self._attach(module)

    def module_prepared(self, wrapped: Any) -> None:
        """Registers hooks on a module that is prepared later."""
        if self._is_needed:
            self._attach(wrapped.module)

    def begin(self, micro_batch: MicroBatch) -> None:
        """Resets `placeholder_was_computed` at the beginning of a micro-batch."""
        self.placeholder_was_computed = False

    def _attach(self, module: nn.Module) -> None:
        hook = _PlaceholderHooks(self)
        module.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(hook.after, always_call=True)

    def in_backward(self) -> AbstractContextManager[None]:
        """Returns a context for the backward pass.

        In the backward pass activation checkpointing runs forward passes again. SyncBatchNorm must
        then know whether they compute a placeholder.
        """
        return self._recomputing() if self._is_needed else nullcontext()

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Tells SyncBatchNorm, in this context, whether forward passes compute a placeholder."""
        sync_batchnorm.thread_state.computes_placeholder = self.placeholder_was_computed
        try:
            yield
        finally:
            sync_batchnorm.thread_state.computes_placeholder = False

    def report_inputs(self, inputs: Any) -> None:
        """Tells the step which tensors a module was called with, before they are replaced."""
        report_inputs(self._step, inputs)

    @property
    def rank_has_no_samples(self) -> bool:
        """True if this rank has no samples of the micro-batch that is trained or evaluated."""
        step = self._step
        return step.micro_batch_in_use.local_rows == 0 or step.micro_batch.local_rows == 0

    @property
    def sample_tensors(self) -> list[Tensor]:
        """The tensors of a batch with a single real sample."""
        return tensors(self._step.sample_in_place_of_none)


class _PlaceholderHooks(RunHook):
    """The forward hooks of one module, which add a placeholder sample and remove it again.

    Args:
        placeholders: the object of this run; None makes the hooks do nothing, as in a copied
            module.
    """

    def __init__(self, placeholders: Placeholders | None = None) -> None:
        self._run_state = placeholders
        """Whether this rank has samples, shared by all modules of the run; None in a copy."""
        self._placeholder_sample = Placeholder(())
        """The sample that the latest forward pass without samples got."""
        self._side_effect_guards: list[AbstractContextManager[None]] = []
        """The contexts that `before` has entered to prevent side effects, and that `after` exits;
        one for each running forward pass, because they may be nested."""

    @never_compiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Adds a row to inputs without rows, if this rank has no samples of the micro-batch.

        It also tells SyncBatchNorm about the placeholder, and prevents side effects of the forward
        pass until `after` is called.

        Returns:
            The new positional and keyword arguments, or None to leave them unchanged.
        """
        # A copy of the module (`copy.deepcopy`, pickle) gets hooks without the state of the run,
        # because the run does not prepare the copy.
        if self._run_state is None:
            return None
        if not any(has_no_rows(tensor) for tensor in tensors_and_attributes((args, kwargs))):
            return None

        # The step learns from the inputs which micro-batch the loop computes on, and so whether the
        # rank has samples of it.
        self._run_state.report_inputs((args, kwargs))
        user_made_tensors_without_rows = not self._run_state.rank_has_no_samples
        if user_made_tensors_without_rows:
            return None

        self._placeholder_sample = Placeholder(self._run_state.sample_tensors)
        new_args, new_kwargs = self._placeholder_sample.add_to((args, kwargs))

        # A `with` statement cannot span two hooks, so `after` exits this context.
        guard = _without_side_effects(module)
        guard.__enter__()
        self._side_effect_guards.append(guard)

        sync_batchnorm.thread_state.computes_placeholder = True
        if torch.is_grad_enabled():
            # A backward pass may follow, in which SyncBatchNorm must know of the placeholder.
            self._run_state.placeholder_was_computed = True

        return new_args, new_kwargs

    @never_compiled
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Removes the placeholder's row from the output, and undoes what `before` has set up.

        `before` has told SyncBatchNorm about the placeholder, and has entered a context that
        prevents side effects of the forward pass. A `with` statement cannot span two hooks, so the
        context is exited here.

        Returns:
            The output without the row, also in a `torch.distributions.Distribution`; None, which
            leaves the output unchanged, if `before` added no row.
        """
        if not self._row_was_added:
            return None

        sync_batchnorm.thread_state.computes_placeholder = False
        guard = self._side_effect_guards.pop()
        guard.__exit__(None, None, None)

        return map_tensors_and_attributes(
            output,
            change=self._cut_off_row,
            change_distribution=self._placeholder_sample.cut_off_distribution,
        )

    @property
    def _row_was_added(self) -> bool:
        """True if `before` has added a row in the running forward pass."""
        return len(self._side_effect_guards) > 0

    def _cut_off_row(self, tensor: Tensor) -> Tensor:
        """Removes the placeholder's row from a result, and marks a tensor without rows.

        A function of torch that refuses a marked tensor computes with a placeholder row, too.
        """
        return mark_no_rows(self._placeholder_sample.cut_off(tensor))


@contextmanager
def _without_side_effects(module: nn.Module) -> Iterator[None]:
    """A context for a forward pass that must not change buffers and random streams.

    SyncBatchNorm layers, which ignore placeholders by themselves, compute as usual, on all ranks
    together. Other normalisation layers compute as in evaluation, because in training a batch of
    one sample may be an error. BatchNorm without running statistics, which takes those of the batch
    in evaluation too, gets some. At the end, all buffers of the model are restored except those of
    SyncBatchNorm layers.
    """
    layers_to_evaluate: list[nn.Module] = []
    layers_without_statistics: list[BatchNorm] = []
    ids_of_synchronised_buffers: set[int] = set()
    for layer in module.modules():
        is_synchronised = isinstance(layer, SyncBatchNorm)
        if is_synchronised:
            ids_of_synchronised_buffers.update(map(id, layer.buffers(recurse=False)))
        elif isinstance(layer, NormBase) and layer.training:
            layers_to_evaluate.append(layer)

        computes_as_usual = is_synchronised and layer.training
        if isinstance(layer, BatchNorm) and layer.running_mean is None and not computes_as_usual:
            layers_without_statistics.append(layer)

    unsynchronised_buffers = [
        b for b in module.buffers() if id(b) not in ids_of_synchronised_buffers
    ]
    gpus = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        # Restore the random streams: first those of the CPU, then those of the GPUs.
        stack.enter_context(preserve_rng_state())
        stack.enter_context(torch.random.fork_rng(sorted(gpus), enabled=bool(gpus)))
        stack.enter_context(_buffers_restored(unsynchronised_buffers))
        for layer in layers_without_statistics:
            stack.enter_context(_lent_statistics(layer))
        for layer in layers_to_evaluate:
            layer.training = False

        try:
            yield
        finally:
            for layer in layers_to_evaluate:
                layer.training = True


@contextmanager
def _lent_statistics(layer: BatchNorm) -> Iterator[None]:
    """A context in which a BatchNorm layer without running statistics has the mean 0, variance 1.

    The layer then computes with them in evaluation, and accepts a single value per channel.
    """

    def lend(layer: BatchNorm, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        """Makes the statistics when the input is known, which shows their device and dtype."""
        x = args[0] if args else kwargs["input"]
        dtype = torch.promote_types(x.dtype, torch.float32)
        if layer.weight is not None:  # torch requires the same dtype
            dtype = layer.weight.dtype
        layer.running_mean = x.new_zeros(layer.num_features, dtype=dtype)
        layer.running_var = x.new_ones(layer.num_features, dtype=dtype)

    hook = layer.register_forward_pre_hook(lend, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        layer.running_mean = None
        layer.running_var = None


@contextmanager
def _buffers_restored(buffers: Sequence[Tensor]) -> Iterator[None]:
    """A context at whose end all buffers that were written to have their old values again.

    Other buffers are not written to: autograd may have saved a buffer that was only read, and a
    backward pass fails if a saved tensor was written to.
    """
    values_before = [buffer.detach().clone() for buffer in buffers]
    write_counts_before = write_counts(buffers)
    try:
        yield
    finally:
        write_counts_after = write_counts(buffers)
        with torch.no_grad():
            for index, buffer in enumerate(buffers):
                if write_counts_after[index] != write_counts_before[index]:
                    buffer.copy_(values_before[index])
