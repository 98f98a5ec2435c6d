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

from lockstep.optim import activation_bytes
from lockstep.runtime.seeding import kept_random_state
from lockstep.strategies.pipelining.shapes import Arguments


class Call(NamedTuple):
    """How a submodule was called, and what it kept for the backward pass."""

    arguments: Arguments
    autocast: torch.dtype | None
    kept: int = 0
    """Bytes."""


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
            seconds = [_seconds(module.get_submodule(n), calls.get(n)) for n in units if calls]
    finally:
        for m in training:
            m.training = True
    if not calls:
        return Costs([float(size) for size in sizes], "of parameters: no example to measure with")
    kept = [calls[name].kept if name in calls else 0 for name in units]
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

    parts = [module.get_submodule(name) for name in units]
    handles = [
        part.register_forward_pre_hook(recorder(name), with_kwargs=True)
        for name, part in zip(units, parts, strict=True)
    ]
    try:
        found = activation_bytes.measure(module, parts, *arguments)
    finally:
        for handle in handles:
            handle.remove()
    for place, inside in zip(found.order, found.inside, strict=True):
        name = units[place]
        calls[name] = calls[name]._replace(kept=sum(inside.values()))
    return calls


def _ways(batch: Any) -> list[Arguments]:
    if isinstance(batch, dict):
        return [((), batch), ((batch,), {})]
    if isinstance(batch, list | tuple) and batch:
        return [((batch[0],), {}), (tuple(batch), {}), ((batch,), {})]
    return [((batch,), {})]


def _seconds(unit: nn.Module, call: Call | None) -> float:
    """Of one forward and backward pass: the least of a few."""
    if call is None:
        return 0.0
    best = float("inf")
    device = next(unit.parameters()).device
    for _ in range(_TRIALS):
        args, kwargs = pytree.tree_map_only(Tensor, _fresh, call.arguments)
        _settle(device)
        begin = time.perf_counter()
        with torch.autocast(device.type, call.autocast, enabled=call.autocast is not None):
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
        best = min(best, time.perf_counter() - begin)
    return best


def _fresh(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    return copied.requires_grad_() if copied.is_floating_point() else copied


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device)


def _settle(device: torch.device) -> None:
    """What a GPU still computes belongs to what was asked before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
