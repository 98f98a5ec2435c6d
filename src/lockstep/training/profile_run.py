"""Forward and backward passes taken on trial: a call that was seen, at other numbers of samples.

The samples of the call are repeated. Nothing of it stays: gradients are returned by autograd and
dropped, buffers, attributes and random streams are put back, and no other rank takes part.

What comes after the model, the loss, is not known here. In its place stands one that needs as much
memory as a cross entropy does: it keeps its logarithms, and its gradient is a tensor of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.data.pytree import map_tensors, tensors
from lockstep.distributed.device import is_out_of_memory
from lockstep.distributed.process_group import Run
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.distributed.torch_compat import BatchNorm
from lockstep.errors import UsageError
from lockstep.strategies.base import may_set
from lockstep.strategies.data_parallel.module import DataParallel
from lockstep.strategies.sync_batchnorm import SyncBatchNorm

_MOST_RUNS, _ENOUGH_S = 10, 0.03
"""A time is that of one run; where this is below 30 ms, the shortest of several, up to 10."""
_MARGIN = 0.05
"""Of a GPU's memory, kept free while sizes are tried: what is free is in pieces, later as well."""
_STATE = 2
"""Numbers that an optimizer keeps for each parameter from its first step on, as Adam does."""


class Call(NamedTuple):
    """A forward pass that was seen."""

    module: nn.Module
    """As it was called."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Calls:
    """Sees the forward passes with gradients of some modules, until it is closed."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.seen: list[Call] = []
        self._handles = [
            module.register_forward_pre_hook(self._note, prepend=True, with_kwargs=True)
            for module in modules
        ]

    def close(self) -> None:
        """Sees no more."""
        for handle in self._handles:
            handle.remove()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.seen.append(Call(module, args, kwargs))


class ProfilingRun:
    """Tries calls at other sizes.

    Args:
        run: whose device it is.
        calls: the forward passes of one backward pass.
        local: the samples that they were made with.

    Raises:
        UsageError: on trying, where it cannot be seen which tensors hold the samples.
    """

    def __init__(self, run: Run, calls: Sequence[Call], local: int) -> None:
        self._run = run
        self._calls = calls
        self._local = local
        self._modules = list({id(call.module): call.module for call in calls}.values())
        self._warm: set[tuple[int, int | None]] = set()
        """What has been computed before, and where: caches are made."""

    def fits(self, samples: int, device: int | None = None) -> bool:
        """Whether there is memory for so many samples at a time.

        Args:
            samples: to compute.
            device: where, by its number among all that divide a batch; None: on all of this
                process.
        """
        with self._undisturbed():
            try:
                self._compute_beside_reserve(samples, device)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            else:
                return True
        # Not before here: the error held the frames in which the memory was asked for.
        gc.collect()
        if self._gpus():
            torch.cuda.empty_cache()
        return False

    def seconds(self, samples: int, device: int | None = None) -> float:
        """For each sample, where so many are computed at a time; the arguments are those above."""
        took: list[float] = []
        with self._undisturbed():
            if (samples, device) not in self._warm:
                self._compute(samples, device)
                self._warm.add((samples, device))
            while sum(took) < _ENOUGH_S and len(took) < _MOST_RUNS:
                self._wait()
                begin = time.perf_counter()
                self._compute(samples, device)
                self._wait()
                took.append(time.perf_counter() - begin)
        return min(took) / samples

    def _compute_beside_reserve(self, samples: int, device: int | None) -> None:
        reserve = self._reserve()
        self._compute(samples, device)
        del reserve

    def _compute(self, samples: int, device: int | None) -> None:
        """A forward and a backward pass over all calls."""
        if not self._calls:
            raise UsageError(
                "world.backward(loss)",
                "no forward pass of a prepared model came before it",
                "call what world.prepare returned",
            )
        outputs, inputs = [], []
        with ExitStack() as alone:
            for call in self._calls:
                module = call.module
                if device is not None and isinstance(module, DataParallel):
                    alone.enter_context(module.only_on(device))
                args, kwargs = self._resized(call, samples)
                inputs += [t for t in tensors((args, kwargs)) if t.requires_grad]
                inputs += [p for p in module.parameters() if p.requires_grad]
                outputs += tensors(module(*args, **kwargs))
        losses = [_stand_in(output) for output in outputs if output.requires_grad]
        if not losses or not inputs:
            raise UsageError(
                "the output of the model",
                "no tensor with a gradient is seen in it",
                "return tensors, or tuples, dicts or dataclasses of them",
            )
        unique = list({id(tensor): tensor for tensor in inputs}.values())
        torch.autograd.grad(losses, unique, allow_unused=True)

    def _resized(self, call: Call, samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = False
        dim = call.module.dim if isinstance(call.module, DataParallel) else 0

        def resized(tensor: Tensor) -> Tensor:
            nonlocal found
            plain = tensor.detach()
            if -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] == self._local:
                found = True
                rows = torch.arange(samples, device=tensor.device) % self._local
                plain = plain.index_select(dim, rows)
            return plain.requires_grad_(tensor.requires_grad)

        args, kwargs = map_tensors((call.args, call.kwargs), resized)
        if not found:
            raise UsageError(
                f"a call of {type(call.module).__name__} with {self._local} samples",
                f"no tensor among its arguments has {self._local} as its "
                + (f"dimension {dim}" if dim else "first dimension"),
                "give the model tensors with one row a sample",
            )
        return args, kwargs

    def _reserve(self) -> Tensor | None:
        """Memory that is not to be had in the training either."""
        if self._run.device.type != "cuda":
            return None
        own = {id(p): p for module in self._modules for p in module.parameters() if p.requires_grad}
        state = _STATE * sum(p.numel() * p.element_size() for p in own.values())
        margin = int(_MARGIN * torch.cuda.mem_get_info(self._run.device)[1])
        return torch.empty(state + margin, dtype=torch.uint8, device=self._run.device)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Everything is as it was before, and collectives are refused rather than waited for."""
        collectives = self._run.collectives
        gpus = self._gpus()
        with (
            preserve_rng_state(),
            torch.random.fork_rng(gpus, enabled=bool(gpus)),
            _kept_attributes(self._modules),
            _kept_buffers(self._modules),
            _own_statistics(self._modules),
            torch.enable_grad(),
        ):
            blocked, collectives.blocked = collectives.blocked, _ON_TRIAL
            try:
                yield
            finally:
                collectives.blocked = blocked

    def _wait(self) -> None:
        for gpu in self._gpus():
            torch.cuda.synchronize(gpu)

    def _gpus(self) -> list[torch.device]:
        """All that the models compute on."""
        devices = {self._run.device: None}
        for module in self._modules:
            devices |= dict.fromkeys(p.device for p in module.parameters())
            if isinstance(module, DataParallel):
                devices |= dict.fromkeys(module.devices)
        return [device for device in devices if device.type == "cuda"]


_ON_TRIAL = (
    "the forward pass is tried at several sizes, which differ between the ranks, to find what is "
    "'auto'"
)


def _stand_in(output: Tensor) -> Tensor:
    real = torch.view_as_real(output) if output.is_complex() else output
    return real.log_softmax(-1).square().sum() if real.dim() else real


@contextmanager
def _kept_attributes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Else what is set to activations, to be looked at, would keep those of the largest trial."""
    owners = {id(part): part for module in modules for part in module.modules()}.values()
    before = [(vars(part), dict(vars(part))) for part in owners if may_set(part)]
    try:
        yield
    finally:
        for attributes, old in before:
            attributes.clear()
            attributes.update(old)


@contextmanager
def _kept_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    owners = {id(child): child for module in modules for child in module.modules()}.values()
    before = [
        (owner, name, buffer, buffer.clone())
        for owner in owners
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in before:
                owner._buffers[name] = buffer
                buffer.copy_(value)


@contextmanager
def _own_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Synchronised BatchNorm layers take the statistics of this rank's samples alone."""
    layers = [
        child
        for module in modules
        for child in module.modules()
        if isinstance(child, SyncBatchNorm | nn.SyncBatchNorm)
        and "forward" not in vars(child)  # of replicas: the devices of this rank stay together
    ]
    for layer in layers:
        layer.forward = BatchNorm.forward.__get__(layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
