"""The models of a script: what they are called, and what can be read from their tensors.

Torch alone: nothing here knows of updates or of other ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from lockstep.batch.pytree import tensors
from lockstep.checkpoint.modules import plain_names, unwrap
from lockstep.distributed.torch_compat import is_sharded, pytree
from lockstep.strategies.base import parameters_of
from lockstep.verify.tolerance import Array

_LIBRARIES = ("torch.", "lockstep.")
"""What their modules keep is their own affair."""
_MOST_VALUES = 10_000_000
"""Of the outputs of a loss whose second derivative is taken."""


class Models:
    """Modules that are no part of another, in the order in which they were met."""

    def __init__(self) -> None:
        self._roots: list[tuple[str, nn.Module]] = []
        self._known: set[int] = set()
        """Ids of all modules inside of the roots."""
        self.averaged: dict[int, set[int]] = {}
        """The parameters that DDP averages, by the id of the module that it wraps."""
        self.prepared: set[int] = set()
        """Ids of modules that Lockstep has wrapped."""
        self.built: list[Optimizer] = []
        self.stepped: list[Optimizer] = []
        """Their parameters count also where no module has them."""
        self.left: dict[str, Array] = {}
        """Parameters as the last steps left them."""
        self.averaged_over: Sequence[int] = ()
        """The ranks of a DDP's group, where these are not all."""
        self.comm_hook = ""
        """The line of a communication hook that the script gave DDP."""

    def add(self, module: nn.Module) -> None:
        """A module that was wrapped or called; what is inside of a known one is known."""
        inner = unwrap(module)
        if id(inner) in self._known or not holds_tensors(inner):
            return
        # FSDP gives a module a class of its own, made of its own one.
        kind = next(c.__name__ for c in type(inner).__mro__ if "FSDP" not in c.__name__)
        same = sum(name.split("#")[0] == kind for name, _ in self._roots)
        self._roots.append((f"{kind}#{same + 1}" if same else kind, module))
        self._known |= {id(part) for part in module.modules()}

    def wrapped(self, wrapper: DistributedDataParallel) -> None:
        """DDP has been put around a module."""
        self.add(wrapper)
        own = {id(p) for p in wrapper.module.parameters() if p.requires_grad}
        self.averaged[id(wrapper.module)] = own
        ranks = dist.get_process_group_ranks(wrapper.process_group)
        if len(ranks) < dist.get_world_size():
            self.averaged_over = ranks

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each with a name that is the same on every rank; a tied one under its first name."""
        known = set()
        for name, parameter in self._named("named_parameters"):
            known.add(id(parameter))
            yield name, parameter
        for optimizer, stepped in enumerate(self.stepped, 1):
            for number, parameter in enumerate(parameters_of(stepped), 1):
                if id(parameter) not in known and not is_sharded(parameter):
                    known.add(id(parameter))
                    yield f"/parameter {number} of optimizer {optimizer}", parameter

    def of_unstepped(self) -> Iterator[tuple[tuple[int, int], nn.Parameter]]:
        """Parameters that no known model has, of optimizers that were built and have not stepped.

        Each comes with the number of its optimizer, in the order in which they were built, and its
        place in it.
        """
        unstepped = [n for n, each in enumerate(self.built) if each not in self.stepped]
        if not unstepped:
            return
        known = {id(parameter) for _, parameter in self.parameters()}
        for number in unstepped:
            for place, parameter in enumerate(parameters_of(self.built[number])):
                without_values = isinstance(parameter, UninitializedParameter) or parameter.is_meta
                if id(parameter) in known or without_values or is_sharded(parameter):
                    continue
                yield (number, place), parameter

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Each with a name that is the same on every rank."""
        return self._named("named_buffers")

    def attributes(self) -> dict[str, Array]:
        """Sums over tensors that modules keep in plain attributes, and their sizes."""
        found: dict[str, Array] = {}
        own = ((n, m) for n, m in self.modules() if not type(m).__module__.startswith(_LIBRARIES))
        for name, module in own:
            for key, value in vars(module).items():
                kept = value if isinstance(value, Tensor | list | tuple) else ()
                leaves = [t for t in pytree.tree_leaves(kept) if type(t) is Tensor]
                for place, tensor in enumerate(leaves):
                    place_text = f"[{place}]" * (len(leaves) > 1)
                    full = f"{name}.{key}".replace("/.", "/") + place_text
                    found[full] = np.array([*sums_of(tensor), tensor.numel()])
        return found

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Each with a name that is the same on every rank."""
        return self._named("named_modules")

    def not_averaged(self) -> list[str]:
        """Parameters to train, inside of DDP, that it does not know."""
        inside, known = self._within(self.averaged.keys()), set().union(*self.averaged.values())
        return [n for n, p in self.parameters() if p.requires_grad and id(p) in inside - known]

    def _within(self, wrapped: Collection[int]) -> set[int]:
        """Ids of the parameters of those roots that are, or wrap, modules of these ids."""
        roots = (root for _, root in self._roots if id(unwrap(root)) in wrapped)
        return {id(parameter) for root in roots for parameter in root.parameters()}

    def is_wrapped(self, module: nn.Module) -> bool:
        """Whether what it is or wraps is in DDP, or was prepared."""
        return id(unwrap(module)) in self.averaged.keys() | self.prepared

    def of_prepared(self, parameters: set[int]) -> bool:
        """Whether any of these, by their ids, is one of a model that Lockstep has wrapped."""
        return not parameters.isdisjoint(self._within(self.prepared))

    def bare(self) -> list[str]:
        """Parameters to train of models that are neither wrapped nor prepared."""
        held = self._within(self.averaged.keys() | self.prepared)
        return [
            name
            for name, parameter in self.parameters()
            if parameter.requires_grad and id(parameter) not in held and not is_sharded(parameter)
        ]

    def _named(self, what: str) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for root, module in self._roots:
            plain = plain_names(module)
            for name, tensor in getattr(module, what)():
                lazy = isinstance(tensor, UninitializedParameter | UninitializedBuffer)
                if not (lazy or getattr(tensor, "is_meta", False) or id(tensor) in seen):
                    seen.add(id(tensor))
                    yield f"{root}/{plain(name)}", tensor


def compares_samples(loss: Tensor, outputs: Sequence[Tensor], samples: int) -> bool:
    """Whether the gradient of one sample's output changes with another sample's output.

    By second derivatives, between two halves of the samples, which are parted by each bit of their
    number in turn. What is constant between jumps (a choice by rank, a detached weight) is not
    seen, nor is what torch cannot derive twice, but for distances between all outputs.
    """
    # Two views of each sample may be computed in one go; longer rows may be parts of a sample.
    rows = samples, 2 * samples
    outputs = [t for t in _last(outputs) if samples > 1 and t.dim() and len(t) in rows]
    small = sum(t.numel() for t in outputs) <= _MOST_VALUES
    if not outputs or not small or not loss.requires_grad:
        return False
    with suppress(RuntimeError):  # as torch says of a function without a second derivative
        firsts = torch.autograd.grad(loss, outputs, create_graph=True, materialize_grads=True)
        if _follow(firsts, outputs, samples):
            return True
    return _distances(loss, outputs)


_DISTANCES = "CdistBackward0", "EuclideanDistBackward0", "PdistBackward0"
"""What torch cannot derive twice, or not where a distance is zero."""


def _distances(loss: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether the loss is made of `torch.cdist`, or `pdist`, between outputs."""
    made = {output.grad_fn for output in outputs}
    return any(
        all(not made.isdisjoint(nodes_behind(to)) for to, _ in node.next_functions)
        for node in nodes_behind(loss.grad_fn)
        if node.name() in _DISTANCES
    )


def nodes_behind(*ends: Any) -> set[Any]:
    """Of the graph that leads to some, themselves among them."""
    found, left = set(), [*ends]
    while left:
        each = left.pop()
        if each is not None and each not in found:
            found.add(each)
            left += [to for to, _ in each.next_functions]
    return found


def couples_samples(outputs: Sequence[Tensor], inside: Tensor) -> bool:
    """Whether one sample's output changes with what another sample is inside of the model.

    Args:
        outputs: of the model, each with a row a sample.
        inside: what a part of it has returned, likewise.
    """
    outputs = [t for t in outputs if t.dim() and len(t) == len(inside)]
    small = sum(t.numel() for t in (*outputs, inside)) <= _MOST_VALUES
    if not outputs or not small or len(inside) < 2 or any(t is inside for t in outputs):
        return False
    with suppress(RuntimeError):
        return _follow(outputs, [inside], len(inside))
    return False


def _follow(values: Sequence[Tensor], sources: Sequence[Tensor], samples: int) -> bool:
    """Whether the rows of some values change with rows of other samples in what they come from."""
    waves = [torch.arange(t.numel(), device=t.device).cos().view_as(t) for t in values]
    places = [
        [torch.arange(len(t), device=t.device) % samples for t in each]
        for each in (values, sources)
    ]
    for bit in range((samples - 1).bit_length()):
        ones, others = ([n >> bit & 1 for n in each] for each in places)
        probe = [(t * w)[n == 1].sum() for t, w, n in zip(values, waves, ones, strict=True)]
        slopes = torch.autograd.grad(
            sum(probe, torch.zeros(())), sources, retain_graph=True, materialize_grads=True
        )
        most = max(float(slope.abs().max()) for slope in slopes)
        across = (s[n == 0].abs() for s, n in zip(slopes, others, strict=True))
        if most and any(bool((other > 1e-9 * most).any()) for other in across):
            return True
    return False


def _last(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of which none of the others is made: between those models may compare samples."""
    known = [(output, output.grad_fn) for output in outputs if output.grad_fn is not None]
    behind = nodes_behind(*(node for _, made in known for node, _ in made.next_functions))
    return [output for output, made in known if made not in behind]


def are_positions(targets: Tensor) -> bool:
    """Whether targets number the samples, as those of a contrastive loss: they are no labels.

    They are places in what is compared, which differ where a rank compares less, or gathers.
    """
    if targets.is_floating_point() or targets.dtype == torch.bool or targets.dim() != 1:
        return False
    count = len(targets)
    return count > 2 and bool((targets - targets[0]).equal(torch.arange(count).to(targets)))


def is_traced() -> bool:
    """Whether `torch.jit.trace` follows what is computed, which is nothing else's affair then."""
    jit: Any = torch.jit
    return bool(jit.is_tracing())


def inside_autograd_function() -> bool:
    """Whether the script is in the forward pass of a function that has a backward pass of its own.

    What is gathered there is given its gradient by that.
    """
    forwards = {
        each.forward.__code__
        for each in _subclasses(torch.autograd.Function)
        if hasattr(each.forward, "__code__")
    }
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in forwards:
            return True
        frame = frame.f_back
    return False


def _subclasses(kind: type) -> list[Any]:
    direct: list[Any] = kind.__subclasses__()
    return [*direct, *(each for one in direct for each in _subclasses(one))]


def sums_of(tensor: Tensor) -> Array:
    """Numbers that change with any of a tensor's."""
    values = tensor.detach().flatten().double().nan_to_num()
    wave = torch.arange(len(values), device=values.device, dtype=torch.float64).cos()
    return np.array([float(values @ wave), float(values.abs().max()) if len(values) else 0.0])


def rows_of_tensors(values: Sequence[Tensor], count: int) -> Array:
    """Of each sample two numbers that change with any of its values, shape (count, 2).

    Args:
        values: tensors with `count` rows, or so many times as many, in order.
        count: samples.
    """
    flat = [t.detach().reshape(count, -1).double().nan_to_num() for t in values if t.numel()]
    if not flat or not count:
        return np.zeros((0, 2))
    whole = torch.cat(flat, dim=1)
    place = torch.arange(whole.shape[1], device=whole.device, dtype=whole.dtype)
    return (whole @ torch.stack([place.cos(), (1.7 * place + 1).cos()], dim=1)).cpu().numpy()


def parts_of_samples(values: Any) -> tuple[int, list[Tensor]]:
    """How many samples there are, by the first tensor, and all tensors with one row for each.

    A hidden state has its samples in the second dimension.
    """
    plain = [t for t in tensors(values) if t.layout == torch.strided and t.dim()]
    count = len(plain[0]) if plain else 0
    return count, with_rows(plain, count)


def with_rows(values: Sequence[Tensor], count: int) -> list[Tensor]:
    """Those that have one row for each sample, or can be turned so."""
    turned = [t.transpose(0, 1) if t.dim() > 1 and len(t) != count else t for t in values]
    return [t for t in turned if t.dim() and len(t) == count and not t.is_complex()]


def storage_of(tensor: Tensor) -> int:
    """Where its values lie; 0: they lie in several places."""
    with suppress(RuntimeError, ValueError):  # what stands for other tensors, or has no size yet
        return 0 if is_sharded(tensor) else tensor.untyped_storage().data_ptr()
    return 0


def holds_tensors(module: nn.Module) -> bool:
    """Whether it has parameters or buffers."""
    return next(chain(module.parameters(), module.buffers()), None) is not None
