"""What the parts of a model cost, measured on an example, to cut it into stages of equal cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lockstep.runtime.seeding import kept_random_state

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Call(NamedTuple):
    """How a submodule was called."""

    arguments: Arguments
    autocast: torch.dtype | None


_TRIALS = 3
_STATE = 4
"""Copies of a parameter on a device: itself, its gradient, two moments of Adam."""


class Costs(NamedTuple):
    """One number a unit, with what it is made of in words."""

    numbers: list[float]
    reason: str


def measure(
    module: nn.Module, units: Sequence[str], examples: Sequence[Callable[[], Any]]
) -> Costs:
    """The cost of every unit: its part of the time and of the memory of a training step.

    Memory is that of parameters, gradients, two optimizer moments and of the activations that are
    kept for the backward pass. Without an example that the model can be called with, it is that of
    the parameters alone.

    Args:
        module: on the CPU.
        units: names of submodules, in order.
        examples: each gives a batch; the model is called with the batch, its first element, or its
            entries as keywords.
    """
    sizes = [
        sum(p.numel() * p.element_size() for p in module.get_submodule(name).parameters())
        for name in units
    ]
    training = [m for m in module.modules() if m.training]
    module.eval()  # running statistics stay as they are, and a SyncBatchNorm waits for nobody
    try:
        with kept_random_state():
            calls = _record(module, units, examples)
            measured = [_one(module.get_submodule(n), calls.get(n)) for n in units if calls]
    finally:
        for m in training:
            m.training = True
    if not measured:
        return Costs([float(size) for size in sizes], "of parameters: no example to measure with")
    seconds, kept = [took for took, _ in measured], [held for _, held in measured]
    memory = [_STATE * size + held for size, held in zip(sizes, kept, strict=True)]
    return Costs(
        [
            s / max(sum(seconds), 1e-12) + m / max(sum(memory), 1)
            for s, m in zip(seconds, memory, strict=True)
        ],
        "of time and memory, measured on an example",
    )


def _record(
    module: nn.Module, units: Sequence[str], examples: Sequence[Callable[[], Any]]
) -> dict[str, Call]:
    """The arguments of every unit in one forward pass; nothing where no example fits."""
    for example in examples:
        device = next(module.parameters()).device
        batch = pytree.tree_map_only(Tensor, partial(_to, device), example())
        for arguments in _ways(batch):
            with suppress(Exception):  # this is not how the model is called
                return _calls(module, units, arguments)
    return {}


def _calls(module: nn.Module, units: Sequence[str], arguments: Arguments) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    kind = next(module.parameters()).device.type

    def recorder(name: str) -> Callable[..., None]:
        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            on = torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind) if on else None
            calls.setdefault(name, Call((args, kwargs), dtype))

        return record

    handles = [
        module.get_submodule(name).register_forward_pre_hook(recorder(name), with_kwargs=True)
        for name in units
    ]
    try:
        with torch.no_grad():
            module(*arguments[0], **arguments[1])
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _ways(batch: Any) -> list[Arguments]:
    if isinstance(batch, dict):
        return [((), batch), ((batch,), {})]
    if isinstance(batch, list | tuple) and batch:
        return [((batch[0],), {}), (tuple(batch), {}), ((batch,), {})]
    return [((batch,), {})]


def _one(unit: nn.Module, call: Call | None) -> tuple[float, int]:
    """Seconds and bytes of one forward and backward pass: the least of a few."""
    if call is None:
        return 0.0, 0
    best, held = float("inf"), 0
    device = next(unit.parameters()).device
    for _ in range(_TRIALS):
        args, kwargs = pytree.tree_map_only(Tensor, _fresh, call.arguments)
        sizes: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in unit.parameters()}

        def keep(tensor: Tensor, sizes: dict[int, int] = sizes, own: set[int] = own) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        _settle(device)
        begin = time.perf_counter()
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast(device.type, call.autocast, enabled=call.autocast is not None),
        ):
            output = unit(*args, **kwargs)
        roots = [
            leaf.sum()
            for leaf in pytree.tree_leaves(output)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if roots:
            trained = [p for p in unit.parameters() if p.requires_grad]
            torch.autograd.grad(roots, trained, allow_unused=True)
        _settle(device)
        best, held = min(best, time.perf_counter() - begin), sum(sizes.values())
    return best, held


def _fresh(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    return copied.requires_grad_() if copied.is_floating_point() else copied


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device)


def _settle(device: torch.device) -> None:
    """What a GPU still computes belongs to what was asked before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
