"""What the replicas of a module do otherwise than one device, found by looking at a forward pass.

A module that keeps statistics of its samples, or a term of the loss, keeps those of each replica's
samples in each replica, and those of the first one stay. A list beside the tensors of a batch is
not cut. Neither is an error, as both may be meant; both give other numbers in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import some, warn
from lockstep.strategies.attributes import PLAIN
from lockstep.strategies.replicas.parts import listed

_SHOWN = 4
_CODE = "LS310"


class Differences:
    """Looks at the first forward pass of several replicas, and at the first with gradients."""

    def __init__(self) -> None:
        self._seen = False
        self._trained = False

    @contextmanager
    def looked_for(self, modules: Sequence[nn.Module], batch: Any, count: int) -> Iterator[None]:
        """Warns of what the pass shows that runs meanwhile.

        Args:
            modules: the replicas that run.
            batch: what the whole pass was called with.
            count: its samples.
        """
        trained = torch.is_grad_enabled() and not self._trained
        if len(modules) < 2 or (self._seen and not trained):
            yield
            return
        if not self._seen:
            self._seen = True
            _warn_of_lists(len(modules), batch, count)
        before = _containers(modules[0]) if trained else {}
        yield
        if trained:
            self._trained = True
            _warn_of_state(modules, before)


def _warn_of_lists(replicas: int, batch: Any, count: int) -> None:
    found = listed(batch, count)
    if found:
        warn(
            f"inputs of a module on {replicas} replicas",
            f"{found[0]}, beside tensors of {count} samples: tensors are cut, and this goes to "
            "every replica as a whole",
            "give what belongs to the samples as tensors; nothing, where it does not",
            code=_CODE,
        )


def _warn_of_state(modules: Sequence[nn.Module], before: dict[str, _Terms]) -> None:
    first, *others = [_kept(module) for module in modules]
    names = [n for n, value in first.items() if not all(_same(value, o.get(n)) for o in others)]
    # A list or dictionary that was there before is one for all replicas.
    now = _containers(modules[0])
    names += [n for n, old in before.items() if n in now and now[n].came_to(old)]
    if names:
        shown = some(names, _SHOWN)
        warn(
            f"a module on {len(modules)} replicas that keeps {shown}",
            "each replica makes its own of its samples, and the first one's stays; a list grows "
            "by an entry a replica, and a dictionary keeps the last one's",
            "return what the loss needs from forward, so that it is joined",
            code=_CODE,
        )


def _kept(module: nn.Module) -> dict[str, Any]:
    """Buffers, and numbers with a gradient in attributes, lists and dictionaries, by name."""
    found: dict[str, Any] = {}
    for name, part in _parts(module):
        found |= {name + key: buffer for key, buffer in part._buffers.items()}
        found |= {name + key: value for key, value in vars(part).items() if is_term(value)}
    for name, container in _containers(module).items():
        found |= {f"{name}.{key}": term for key, term in container.terms.items()}
    return found


class _Terms(NamedTuple):
    """Of a loss, in a list or dictionary."""

    container: Any
    terms: dict[Any, Tensor]

    def came_to(self, old: _Terms) -> bool:
        """Whether the same container had others before."""
        ids = [list(map(id, each.terms.values())) for each in (self, old)]
        return self.container is old.container and ids[0] != ids[1]


def _containers(module: nn.Module) -> dict[str, _Terms]:
    found = {}
    for name, part in _parts(module):
        for key, value in vars(part).items():
            if key not in PLAIN and isinstance(value, list | dict):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                found[name + key] = _Terms(value, {k: v for k, v in items if is_term(v)})
    return found


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, part in module.named_modules():
        if not isinstance(part, _BatchNorm):  # which has a choice of its own, `sync_batchnorm`
            yield f"{name}." if name else "", part


def is_term(value: Any) -> bool:
    """Whether this is one number with a gradient, as a loss is."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # Others cannot be compared, and no statistics are kept in them: a graph, packed weights.
    packed = one.is_quantized or (one.is_floating_point() and one.itemsize == 1)
    if one.layout is not torch.strided or packed:
        return True
    return torch.allclose(one.detach(), other.detach().to(one.device), equal_nan=True)
