"""Training steps taken on trial: real ones, on the loader's own batches, and then put back.

Nothing else shows what a step needs under any strategy: the optimizer's state, the buckets and
gathered parameters are made by the first step, and the peak comes somewhere in the second.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.data.loader import Loader
from lockstep.distributed.process_group import Run
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.distributed.torch_compat import pytree
from lockstep.optim.precision import Precision
from lockstep.strategies.data_parallel.module import DataParallel
from lockstep.training.allocations import (
    LiveTensors,
    SavedTensors,
    around_calls,
    bytes_by_device,
    local,
    storages,
)
from lockstep.training.optimizer import PreparedOptimizer

_TIMED = 5
"""Global batches whose median time is the time of a step."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is trained on trial.

    Args:
        model, optimizer, loader: prepared.
        loss: of the model and a batch; the mean over its samples.
        backward: as `World.backward`.
    """

    run: Run
    precision: Precision
    backward: Callable[[Tensor], None]
    model: nn.Module
    optimizer: PreparedOptimizer
    loader: Loader
    loss: Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the steps took, in bytes by device."""

    samples: int
    """Of this rank's first micro-batch, at which the activations were counted."""
    activations: dict[torch.device, int]
    """Kept by the model for the backward pass, but for parameters and buffers."""
    loss: dict[torch.device, int]
    """Kept likewise by what comes after the model: outputs brought together, the loss."""
    copies: dict[torch.device, int]
    """Parameters gathered or copied for the pass and held until the backward pass."""
    state: dict[torch.device, int]
    """Of the optimizer."""
    peak: dict[torch.device, int]
    step_s: float


def try_out(subject: Subject) -> Found:
    """Takes some training steps and puts everything back: collective, all ranks call it.

    The first step shows what is kept, the second the peak, the others are timed.
    """
    with _put_back(subject), closing(_endless(subject.loader)) as batches:
        kept = _Kept(subject.model)
        _global_batch(subject, batches, kept=kept)
        state = storages(state_of(subject.optimizer.inner))
        peak = _peak(subject, batches, kept)
        seconds = [_global_batch(subject, batches) for _ in range(_TIMED)]
        return Found(
            samples=kept.samples,
            activations=kept.activations,
            loss=kept.loss,
            copies=kept.copies,
            state=bytes_by_device(state.values()),
            peak=peak,
            step_s=statistics.median(seconds),
        )


def replicated(model: nn.Module) -> nn.Module:
    """The module of which a device runs a replica: inside DataParallel, else the model itself."""
    return model.module if isinstance(model, DataParallel) else model


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state, without single numbers, which may be on the CPU."""
    found: list[Tensor] = []
    waiting: list[Any] = [*optimizer.state.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found += [value] if value.dim() else []
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return found


class _Call:
    """A call of the model or of a replica: its inputs, and what it saves."""

    def __init__(self, args: Any) -> None:
        self.saved = SavedTensors()
        inputs = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        self._inputs: dict[int, int] = {}
        """Bytes of each, by storage: a replica's inputs are views of the whole batch."""
        for tensor in inputs:
            for number in storages([tensor]):
                size = tensor.numel() * tensor.element_size()
                self._inputs[number] = self._inputs.get(number, 0) + size

    def kept(self, counted: dict[int, torch.UntypedStorage]) -> dict[torch.device, int]:
        """What was saved and is not counted yet, by device; adds to what is counted."""
        sizes: dict[torch.device, int] = {}
        for number, storage in self.saved.storages().items():
            size = storage.nbytes()
            if number in self._inputs:
                size = min(size, self._inputs[number])
            elif number in counted:
                continue
            else:
                counted[number] = storage
            sizes[storage.device] = sizes.get(storage.device, 0) + size
        return sizes


class _Kept:
    """Looks at the first micro-batch of a step: what its forward pass leaves behind."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.samples = 0
        self.activations: dict[torch.device, int] = {}
        self.loss: dict[torch.device, int] = {}
        self.copies: dict[torch.device, int] = {}
        self.gradients: list[weakref.ref[torch.UntypedStorage]] = []
        """Their storages: those that outlive the clearing are buckets."""
        self.done = False
        self._own = storages([*model.parameters(), *model.buffers()])
        self._calls: list[_Call] = []
        """Of the model, or of its replicas."""
        self._outside = SavedTensors()
        self._seen: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def forward(self, samples: int) -> Iterator[None]:
        """Around the forward pass and the loss, which must be alive at the end of it."""
        if self.done:
            yield
            return

        def each(args: Any) -> AbstractContextManager[Any]:
            self._calls.append(_Call(args))
            return self._calls[-1].saved.watch()

        with (
            self._outside.watch(),
            around_calls(replicated(self.model), each),
            self._parameters_in_use(),
        ):
            yield
        self.samples = samples
        self._look()
        self.done = True

    def after_backward(self) -> None:
        """Notes where the gradients are."""
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        self.gradients = [weakref.ref(s) for s in storages(gradients).values()]

    def _look(self) -> None:
        copies = {number: s for number, s in self._seen.items() if number not in self._own}
        self.copies = bytes_by_device(copies.values())
        counted = self._own | copies
        for call in self._calls:
            for device, size in call.kept(counted).items():
                self.activations[device] = self.activations.get(device, 0) + size
        outside = self._outside.storages()
        self.loss = bytes_by_device(s for n, s in outside.items() if n not in counted)
        self._calls, self._outside, self._seen = [], SavedTensors(), {}  # they hold what they saw

    @contextmanager
    def _parameters_in_use(self) -> Iterator[None]:
        """Sees the parameters that each layer computes with, where they are not its own."""
        spread = any(hasattr(p, "to_local") for p in self.model.parameters())
        copied = isinstance(self.model, DataParallel)

        def look(module: nn.Module, args: Any) -> None:
            self._seen.update(storages(module.parameters(recurse=False)))

        watched = self.model.modules() if spread or copied else ()
        handles = [module.register_forward_pre_hook(look) for module in watched]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _global_batch(
    subject: Subject,
    batches: Iterator[Any],
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext,
    kept: _Kept | None = None,
) -> float:
    """One training step, under `watch()`; the seconds it took without the loader."""
    seconds = 0.0
    while True:
        batch = next(batches)
        present = subject.loader.current
        begin = _now(subject.run.device)
        with watch():
            _micro_batch(subject, batch, present.local, kept)
        seconds += _now(subject.run.device) - begin
        if present.last:
            return seconds


def _micro_batch(subject: Subject, batch: Any, samples: int, kept: _Kept | None) -> None:
    with nullcontext() if kept is None else kept.forward(samples):
        loss = subject.loss(subject.model, batch)
    subject.backward(loss)
    if kept is not None:
        kept.after_backward()
    subject.optimizer.step()
    subject.optimizer.zero_grad()


def _peak(subject: Subject, batches: Iterator[Any], kept: _Kept) -> dict[torch.device, int]:
    """The most memory that tensors take at one time in a step, by device."""
    if subject.run.device.type == "cuda":
        devices = {subject.run.device, *kept.activations, *kept.loss}
        for device in devices:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        _global_batch(subject, batches)
        return {device: torch.cuda.max_memory_allocated(device) for device in devices}
    model = subject.model
    live = LiveTensors()
    live.hold(storages([*model.parameters(), *model.buffers()]).values())
    live.hold(storages(state_of(subject.optimizer.inner)).values())
    live.hold(held for gradient in kept.gradients for held in [gradient()] if held is not None)
    here = threading.get_ident()

    def in_other_threads(args: Any) -> AbstractContextManager[Any]:
        return nullcontext() if threading.get_ident() == here else live.watch()

    with around_calls(replicated(model), in_other_threads):
        _global_batch(subject, batches, live.watch)
    return {torch.device("cpu"): live.peak}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _endless(loader: Loader) -> Generator[Any]:
    while True:
        yield from loader


@contextmanager
def _put_back(subject: Subject) -> Iterator[None]:
    """Restores model, optimizer, loader, scaler, counters and random streams on leaving."""
    loader, optimizer, scaler = subject.loader, subject.optimizer, subject.precision.scaler
    subject.precision.settle()
    model_before = _copies(_tensors_of(subject.model))
    state_before = {p: _copies(state) for p, state in optimizer.inner.state.items()}
    groups_before = [_settings(group) for group in optimizer.inner.param_groups]
    scaler_before = None if scaler is None else scaler.state_dict()
    position, trained = loader.state_dict(), loader.trained
    with preserve_rng_state(), _kept_cuda_state(subject.run.device), subject.run.step.kept():
        try:
            yield
        finally:
            loader.load_state_dict(position)
            loader.trained = trained
            optimizer.zero_grad()
            _restore(_tensors_of(subject.model), model_before)
            for parameter in list(optimizer.inner.state):
                if parameter in state_before:
                    _restore(optimizer.inner.state[parameter], state_before[parameter])
                else:
                    del optimizer.inner.state[parameter]
            for group, before in zip(optimizer.inner.param_groups, groups_before, strict=True):
                _restore(group, before)
            subject.precision.settle()
            if scaler is not None and scaler_before is not None:
                scaler.load_state_dict(scaler_before)


def _tensors_of(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers; those of a pipeline's other stages, which have no data, left out."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in found.items() if not tensor.is_meta}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group whose settings are copies, and whose parameters are the same."""
    settings = {name: value for name, value in group.items() if name != "params"}
    return {**_copies(settings), "params": group["params"]}


def _copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies on the CPU, where those of a GPU do not add to what is measured."""
    return {
        name: local(value).to("cpu", copy=True) if isinstance(value, Tensor) else deepcopy(value)
        for name, value in values.items()
    }


def _restore(values: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Puts tensors back in place, because others hold them too, and replaces the rest."""
    for name in values.keys() - before.keys():
        del values[name]
    for name, value in before.items():
        if isinstance(value, Tensor) and isinstance(values.get(name), Tensor):
            local(values[name]).copy_(value)
        else:
            values[name] = value


@contextmanager
def _kept_cuda_state(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    state = torch.cuda.get_rng_state(device)
    try:
        yield
    finally:
        torch.cuda.set_rng_state(state, device)
