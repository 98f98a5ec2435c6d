"""Where a model is cut into stages: pure functions of a module's structure and of costs.

A cut stands before a module that holds parameters or the statistics of a BatchNorm: everything that
is registered before it belongs to earlier stages, so modules have to be registered in the order in
which they are called.

What the parts of a model cost, measured on an example, to cut it into stages of equal cost.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.batch.pytree import map_tensors
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.distributed.torch_compat import BatchNorm, pytree
from lockstep.errors import SettingError, UsageError
from lockstep.optim import activation_checkpointing
from lockstep.optim.module_filter import repeated_blocks
from lockstep.wording import did_you_mean

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call, by place and by name."""

_CONTAINERS = nn.Sequential | nn.ModuleList


@dataclass(frozen=True)
class Split:
    """A module cut into stages."""

    cuts: tuple[str, ...]
    """The names of the modules that begin the stages after the first."""
    pieces: dict[str, int]
    """The stage of every largest submodule with state that no cut goes through, by name."""
    own: dict[str, int]
    """The stage of every parameter that belongs to a module which a cut goes through, by name."""

    def stage_of(self, name: str) -> int | None:
        """That of a module or parameter; None: a cut goes through the module."""
        for piece, stage in self.pieces.items():
            if not piece or f"{name}.".startswith(f"{piece}."):
                return stage
        return self.own.get(name)


def units(module: nn.Module) -> list[str]:
    """Names of the submodules before which the model can be cut, in order.

    Containers are chains of what they hold. Other modules are opened where they hold the blocks
    that the model repeats, and blocks themselves stay whole: what is inside of them (a residual
    connection, say) need not be a chain.
    """
    blocks = [name for name, _ in repeated_blocks(module)]
    return [name for name, unit in _units("", module, blocks) if _has_state(unit)]


def split(module: nn.Module, cuts: Sequence[str]) -> Split:
    """Cuts a module before the named submodules.

    Raises:
        SettingError: a name that is not there, has no parameters, or is out of order.
        UsageError: a parameter would belong to two stages.
    """
    names = [name for name, _ in module.named_modules()]
    for name in cuts:
        if name not in names or not name:
            raise SettingError(
                f"Pipeline(split=[..., {name!r}])",
                "the model has no submodule of that name",
                did_you_mean(
                    name, filter(None, names), "use the names of model.named_modules()", 0.3
                ),
            )
        if not _has_state(module.get_submodule(name)):
            raise SettingError(
                f"Pipeline(split=[..., {name!r}])",
                "this submodule has no parameters, and every stage runs it",
                "name the next one that has some: what lies between runs in the earlier stage",
            )
    places = [names.index(name) for name in cuts]
    if sorted(set(places)) != places or any(
        later.startswith(f"{name}.") for name, later in itertools.pairwise(cuts)
    ):
        raise SettingError(
            f"Pipeline(split={list(cuts)})",
            "the stages are not in the order of the model",
            f"in the model's order: {sorted(set(cuts), key=names.index)}",
        )
    made = Split(tuple(cuts), {}, {})
    _assign("", module, 0, made)
    _check_shared(module, made)
    return made


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Where to cut a list into contiguous parts so that the most expensive one is cheapest.

    Args:
        costs: of what stays whole, in order.
        parts: no more than there are costs.

    Returns:
        The first index of every part but the first; no part is empty.
    """
    sums = [0.0, *itertools.accumulate(costs)]

    @cache
    def best(end: int, parts: int) -> tuple[float, list[int]]:
        """The least possible maximum for the first costs, and where to cut them."""
        if parts == 1:
            return sums[end], []
        found = []
        for begin in range(parts - 1, end):
            most, cuts = best(begin, parts - 1)
            found.append((max(most, sums[end] - sums[begin]), [*cuts, begin]))
        return min(found)

    return best(len(costs), parts)[1]


def _units(name: str, module: nn.Module, blocks: list[str]) -> Iterator[tuple[str, nn.Module]]:
    children = list(module.named_children())
    prefix = f"{name}." if name else ""
    opened = isinstance(module, _CONTAINERS) or any(b.startswith(prefix) for b in blocks)
    if not children or name in blocks or not (opened or not name):
        yield name, module
        return
    for child_name, child in children:
        yield from _units(f"{prefix}{child_name}", child, blocks)


def _assign(name: str, module: nn.Module, stage: int, made: Split) -> int:
    """Walks through a module in its order, from a stage on; returns the stage after it."""
    prefix = f"{name}." if name else ""
    if not any(cut.startswith(prefix) for cut in made.cuts):
        if _has_state(module):
            made.pieces[name] = stage
        return stage
    made.own.update({f"{prefix}{p}": stage for p, _ in module.named_parameters(recurse=False)})
    for child_name, child in module.named_modules(remove_duplicate=False):
        if child_name and "." not in child_name:  # its own children, also those of several places
            path = f"{prefix}{child_name}"
            stage = _assign(path, child, stage + (path in made.cuts), made)
    return stage


def _check_shared(module: nn.Module, made: Split) -> None:
    seen: dict[int, tuple[str, int]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        stage = made.stage_of(name)
        assert stage is not None  # every parameter has one
        other, there = seen.setdefault(id(parameter), (name, stage))
        if there != stage:
            raise UsageError(
                "a pipeline over a model with shared parameters",
                f"{other} (stage {there}) and {name} (stage {stage}) are one parameter",
                "give them parameters of their own, or cut the model so that both are in one stage",
            )


def _has_state(module: nn.Module) -> bool:
    """Whether it holds what training changes: parameters, or the statistics of a BatchNorm."""
    return next(module.parameters(), None) is not None or any(
        isinstance(part, BatchNorm) or getattr(part, "running_mean", None) is not None
        for part in module.modules()
    )


_TRIALS = 3
_STATE = 4
"""Copies of a parameter on a device: itself, its gradient, two moments of Adam."""


class UnitCosts(NamedTuple):
    """What the units of a model cost."""

    costs: list[float]
    """One number a unit."""
    reason: str
    """What they are made of, in words."""
    called: list[bool]
    """Whether the forward pass of the example called the unit; True where there is no example."""


def measure(
    module: nn.Module, units: Sequence[str], examples: Sequence[Callable[[], Any]]
) -> UnitCosts:
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
    parts = [module.get_submodule(name) for name in units]
    sizes = [float(sum(p.nbytes for p in part.parameters())) for part in parts]
    training = [m for m in module.modules() if m.training]
    module.eval()  # running statistics stay as they are, and a SyncBatchNorm waits for nobody
    try:
        with preserve_rng_state():
            measured = _measured(module, parts, examples)
    finally:
        for m in training:
            m.training = True
    if measured is None:
        return UnitCosts(sizes, "of parameters: no example to measure with", [True] * len(sizes))
    seconds, kept = measured
    memory = [_STATE * size + more for size, more in zip(sizes, kept, strict=True)]
    total_time, total_memory = max(sum(seconds), 1e-12), max(sum(memory), 1)
    costs = [s / total_time + m / total_memory for s, m in zip(seconds, memory, strict=True)]
    called = [second > 0 for second in seconds]
    return UnitCosts(costs, "of time and memory, measured on an example", called)


def _measured(
    module: nn.Module, parts: Sequence[nn.Module], examples: Sequence[Callable[[], Any]]
) -> tuple[list[float], list[int]] | None:
    """Of every part the seconds and the bytes it keeps; None where no example fits."""
    device = next(module.parameters()).device
    for example in examples:
        batch = map_tensors(example(), lambda tensor: tensor.to(device))
        for args, kwargs in _ways(batch):
            with suppress(Exception):  # this is not how the model is called
                kept = activation_checkpointing.measure(module, parts, args, kwargs).inside
                sizes = [sum(kept.get(n, {}).values()) for n in range(len(parts))]
                return _times(module, parts, (args, kwargs), device), sizes
    return None


def _times(
    module: nn.Module, parts: Sequence[nn.Module], arguments: Arguments, device: torch.device
) -> list[float]:
    """Each part's, measured where the model calls it first: with its inputs, under its autocast."""
    seconds: dict[int, float] = {}

    def before(part: int, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if part not in seconds:
            seconds[part] = 0.0  # it is called again now
            seconds[part] = _seconds(unit, (args, kwargs), device)

    with torch.no_grad(), ExitStack() as stack:
        for number, part in enumerate(parts):
            hook = partial(before, number)
            stack.enter_context(part.register_forward_pre_hook(hook, with_kwargs=True))
        module(*arguments[0], **arguments[1])
    return [seconds.get(number, 0.0) for number in range(len(parts))]


def _ways(batch: Any) -> list[Arguments]:
    if isinstance(batch, Mapping):
        return [((), dict(batch)), ((batch,), {})]
    if isinstance(batch, list | tuple) and batch:
        return [((batch[0],), {}), (tuple(batch), {}), ((batch,), {})]
    return [((batch,), {})]


@torch.enable_grad()
def _seconds(unit: nn.Module, arguments: Arguments, device: torch.device) -> float:
    """Of one forward and backward pass: the least of a few."""
    # What a GPU still computes belongs to what was asked before.
    settle = partial(torch.get_device_module(device).synchronize, device)
    best = float("inf")
    for _ in range(_TRIALS):
        args, kwargs = pytree.tree_map_only(Tensor, _fresh, arguments)
        wanted = [*_trained(unit.parameters()), *_trained(pytree.tree_leaves((args, kwargs)))]
        settle()
        begin = time.perf_counter()
        roots = [leaf.sum() for leaf in _trained(pytree.tree_leaves(unit(*args, **kwargs)))]
        if roots and wanted:
            torch.autograd.grad(roots, wanted, allow_unused=True)
        settle()
        best = min(best, time.perf_counter() - begin)
    return best


def _trained(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _fresh(tensor: Tensor) -> Tensor:
    """A copy that may be written to, so no leaf."""
    detached = tensor.detach()
    return (detached.requires_grad_() if detached.is_floating_point() else detached).clone()
