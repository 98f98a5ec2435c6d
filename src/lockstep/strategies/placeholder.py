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

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.batch.pytree import map_tensors, storages, tensors
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.distributed.torch_compat import NormBase, never_compiled
from lockstep.step import Step
from lockstep.strategies import sync_batchnorm
from lockstep.strategies.sync_batchnorm import SyncBatchNorm


class Placeholders:
    """Gives the prepared modules of one run a placeholder sample where this rank has none.

    Args:
        step: of the run.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.computed = False
        """Whether a forward pass of the present micro-batch computed one, with gradients."""
        step.micro_batch_begins.append(self._forget)

    def attach(self, module: nn.Module) -> None:
        """Adds the hooks to a module, as it is called."""
        hook = _Placeholder(self)
        module.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(hook.after, always_call=True)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Around a backward pass: checkpointed activations are computed once more in it."""
        sync_batchnorm.placeholder.computed = self.computed
        try:
            yield
        finally:
            sync_batchnorm.placeholder.computed = False

    def saw_forward(self, inputs: Any) -> None:
        """Tells the step what a module is called with, before that is replaced."""
        if torch.is_grad_enabled():
            self._step.saw_forward(storages(inputs))

    @property
    def may_be_due(self) -> bool:
        """Whether this rank has no samples of a micro-batch that is trained or evaluated."""
        return not (self._step.seen.local and self._step.current.local)

    @property
    def samples(self) -> list[Tensor]:
        """The tensors of a batch of one sample."""
        return tensors(self._step.placeholder)

    def _forget(self) -> None:
        self.computed = False


class _Placeholder:
    """The hooks of one module."""

    def __init__(self, of_run: Placeholders | None = None) -> None:
        self._of_run = of_run
        self._lengths: set[int] = set()
        """How long a dimension of an output may be that holds the placeholder's rows alone."""
        self._dimensions: set[int] = set()
        """Which dimensions of the inputs had no rows."""
        self._entered: list[AbstractContextManager[None]] = []

    def __reduce__(self) -> tuple[type[_Placeholder], tuple[()]]:
        """Copies of the module, and pickled ones, are called as they are."""
        return _Placeholder, ()

    @never_compiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Replaces inputs of no rows."""
        if self._of_run is None:
            return None
        inputs = tensors((args, kwargs))
        empty = [tensor for tensor in inputs if tensor.dim() and not tensor.numel()]
        if not empty:
            return None
        self._of_run.saw_forward((args, kwargs))
        if not self._of_run.may_be_due:
            return None
        self._dimensions = {tensor.shape.index(0) for tensor in empty}
        self._lengths = {1}
        samples = self._of_run.samples

        def with_row(tensor: Tensor) -> Tensor:
            if tensor.dim() and not tensor.numel():
                return self._with_row(tensor, samples)
            return tensor

        new_args = map_tensors(args, with_row)
        new_kwargs = map_tensors(kwargs, with_row)
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
        return map_tensors(output, self._cut)

    def _with_row(self, tensor: Tensor, samples: Iterable[Tensor]) -> Tensor:
        row = placeholder_of(tensor, samples)
        length = 1
        for size in row.shape:
            length *= size
            self._lengths.add(length)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return row
        made: Tensor = _AddRow.apply(tensor, row)  # type: ignore[no-untyped-call]
        return made

    def _cut(self, tensor: Tensor) -> Tensor:
        dimension = None
        if tensor.dim() and tensor.shape[0] in self._lengths and 0 in self._dimensions:
            dimension = 0
        else:
            for each in sorted(self._dimensions):
                if each < tensor.dim() and tensor.shape[each] == 1 and dimension is None:
                    dimension = each
        cut: Tensor = _CutRows.apply(tensor, dimension)  # type: ignore[no-untyped-call]
        return cut


def placeholder_of(tensor: Tensor, samples: Iterable[Tensor]) -> Tensor:
    """One row in the place of none.

    A batch without rows is a view of a real sample, and so are views of it: then the row is that
    sample's. Of another tensor it is a sample's row of the same shape, else made up.

    Args:
        tensor: of no elements.
        samples: tensors with at least one row.
    """
    shape = [max(1, size) for size in tensor.shape]
    last = tensor.storage_offset()
    last += sum((n - 1) * stride for n, stride in zip(shape, tensor.stride(), strict=True))
    if last < tensor.untyped_storage().nbytes() // tensor.element_size():
        found = tensor.detach().as_strided(shape, tensor.stride(), tensor.storage_offset())
        return found.clone()
    for sample in samples:
        if sample.dim() and len(sample) and list(sample.shape[1:]) == shape[1:]:
            return sample[:1].detach().to(tensor.device, tensor.dtype, copy=True)
    if tensor.dtype == torch.bool:
        return tensor.new_zeros(shape)
    if not tensor.is_floating_point():
        return tensor.new_ones(shape)
    count = torch.Size(shape).numel()
    # Rows with a spread: the deviation of equal numbers is 0, and its derivative infinite.
    return torch.linspace(0.1, 1, count, device=tensor.device).to(tensor.dtype).view(shape)


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
    buffers = [
        (buffer, buffer._version, buffer.detach().clone())
        for buffer in module.buffers()
        if id(buffer) not in moved_alike
    ]
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
                for buffer, version, value in buffers:
                    if buffer._version != version:
                        buffer.copy_(value)


class _AddRow(torch.autograd.Function):
    """Puts a row in the place of a tensor without rows, which gets no gradient of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, row: Tensor) -> Tensor:
        ctx.shape = tensor.shape
        return row

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.shape), None


class _CutRows(torch.autograd.Function):
    """A tensor without its rows, on the same memory; its gradient is zero, whatever comes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dimension: int | None) -> Tensor:
        ctx.shape = tensor.shape
        if dimension is None:
            return tensor.clone()
        shape = list(tensor.shape)
        shape[dimension] = 0
        cut = tensor.new_empty(0)
        cut.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, tensor.stride())
        return cut

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.shape), None
