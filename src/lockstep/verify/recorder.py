"""Looks on at a script's training, in one rank, and records every update of every optimizer.

It sees calls and values alone: torch's hooks for optimizer steps and forward passes, what loaders
hand out, what backward passes are made of, and a few functions of torch.distributed.

The models of a script that knows nothing of being watched, and the names of their tensors.

What can be told of a batch is a digest of each sample, and what it may weigh.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.checkpoint.modules import plain_names, unwrap
from lockstep.distributed.torch_compat import BatchNorm, pytree
from lockstep.errors import user_line
from lockstep.step import BatchEvent, Callback
from lockstep.verify.patches import DeterminismPatches, digest
from lockstep.verify.record import Array, Call, RankUpdate, Taken, Writer, scale_of

_IGNORED = -100
"""torch's `ignore_index`: labels that count for nothing."""


class Seen(NamedTuple):
    """Of a batch."""

    size: int
    """Samples."""
    contents: tuple[str, ...]
    shape: str
    weights: dict[str, float]


def look_at(batch: Any, count: int | None = None) -> Seen:
    """Takes a batch apart.

    Args:
        batch: a nest of tensors, each with one row a sample.
        count: of samples; None: the rows of the first tensor.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    tensors = [t.detach().cpu() for t in leaves if t.layout == torch.strided and t.dim()]
    if count is None:
        count = len(tensors[0]) if tensors else 0
    rows = [t for t in tensors if len(t) == count]
    shape = "; ".join(f"{t.dtype} {list(t.shape[1:])}" for t in rows)
    return Seen(count, _digests(rows, count), shape, _weights(rows, count))


def random_streams() -> list[str]:
    """A digest of each stream that reading and training may draw from: torch's, numpy's, Python's.

    That of a GPU comes last, where one is used.
    """
    kind, keys, position, *_ = np.random.get_state()
    states = [
        torch.get_rng_state().numpy().tobytes(),
        np.asarray(keys).tobytes() + f"{kind}{position}".encode(),
        repr(random.getstate()).encode(),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state().numpy().tobytes())
    return [hashlib.blake2b(state, digest_size=8).hexdigest() for state in states]


def _digests(rows: list[Tensor], count: int) -> tuple[str, ...]:
    if not rows:
        return ()
    plain = [t.reshape(count, -1).contiguous().view(torch.uint8).numpy() for t in rows if t.numel()]
    found = []
    for number in range(count):
        each = (hashlib.blake2b(v[number].tobytes(), digest_size=6).hexdigest() for v in plain)
        found.append(".".join(each))
    return tuple(found)


def _weights(rows: list[Tensor], count: int) -> dict[str, float]:
    """Samples, and of each whole-number tensor what is not ignored, not zero, or set."""
    found = {"samples": float(count)}
    for number, tensor in enumerate(rows):
        if tensor.is_complex() or tensor.is_floating_point():
            is_mask = bool(((tensor == 0) | (tensor == 1)).all())
            if is_mask and tensor.dim() > 1:
                found[f"ones in tensor {number}"] = float(tensor.sum())
            continue
        kept = tensor[tensor != _IGNORED] if tensor.dtype != torch.bool else tensor
        found[f"labels in tensor {number}"] = float(kept.numel())
        found[f"non-zero values in tensor {number}"] = float(kept.count_nonzero())
    return found


_MOST_PIECES = 16
"""Backward passes of an update whose gradients are kept apart."""
_ROUNDING = 1e-12
"""Of the largest gradient: below it, in float64, there is nothing else."""


class Finished(SystemExit):
    """Enough steps have been recorded; ends the script as `sys.exit(0)` would."""


@dataclass
class _Pending:
    """What happened since the last update."""

    taken: list[Taken] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    local: list[dict[str, Tensor]] = field(default_factory=list)
    state: list[str] | None = None
    """Of the random streams, when the last batch was handed out."""
    rows: list[int] = field(default_factory=list)
    """Of what models were called with, where no loader hands out batches."""
    past_wrapper: str = ""
    statistics: dict[str, None] = field(default_factory=dict)


class Recorder(Callback):
    """A `Watcher` of Lockstep's steps, and the receiver of the hooks of `hooks`.

    Args:
        writer: of this rank.
        steps: of the first optimizer; then the script ends.
        patches: what is switched off in the models.
    """

    def __init__(self, writer: Writer, steps: int, patches: DeterminismPatches) -> None:
        self.models = Models()
        self.of_lockstep = False
        """Whether the script trains by Lockstep."""
        self._writer = writer
        self._steps = steps
        self._neutral = patches
        self._pending = _Pending()
        self._optimizers: dict[int, Optimizer] = {}
        self._taken: dict[int, int] = {}
        """Steps of each optimizer, by its id."""
        self._loaders: dict[int, Any] = {}
        self._passes: dict[int, int] = {}
        self._hooked: dict[int, Tensor] = {}
        self._depth = 0
        self._counts = True
        self._weighted = False
        """`World.backward` runs, or has: its loss is known."""
        self._update: dict[str, Any] = {}
        self._begun = False

    # Of Lockstep's steps

    def prepared(self, module: nn.Module) -> None:
        """`World.prepare` has wrapped a module."""
        self.of_lockstep = True
        self._neutral.quiet(module)
        self.models.add(module)
        self._hook_parameters()

    def delivered(self, event: BatchEvent) -> None:
        """A loader of Lockstep's hands out a micro-batch."""
        self._end_if_enough()
        self._counts, self._weighted = event.counts, False
        seen = look_at(event.batch, event.micro_batch.local)
        self._take(
            Taken(
                loader=self._number(event.loader),
                epoch=event.epoch,
                ids=tuple(event.samples.tolist()),
                contents=seen.contents if len(seen.contents) == len(event.samples) else (),
                shape=seen.shape,
                weights=seen.weights,
            )
        )

    def backward(self, loss: Tensor) -> None:
        """`World.backward` was given a loss, which is weighted here."""
        self._weighted = False
        self.lost(loss)
        self._weighted = True

    # Of the hooks

    def took(self, loader: Any, ids: list[int] | None, batch: Any, stream: str) -> None:
        """A DataLoader of torch's handed out a batch to train on.

        Args:
            loader: which.
            ids: the indices of its samples, where they are known.
            batch: as it was handed out.
            stream: a digest of the random numbers drawn to read it; empty: none were.
        """
        self._end_if_enough()
        self._weighted = False
        seen = look_at(batch)
        self._take(
            Taken(
                loader=self._number(loader),
                epoch=self._passes.get(id(loader), 1) - 1,
                ids=None if ids is None else tuple(ids),
                contents=seen.contents,
                shape=seen.shape,
                weights=seen.weights,
                drew=bool(stream),
                stream=stream,
            )
        )

    def begins_pass(self, loader: Any) -> None:
        """A DataLoader of torch's begins to be iterated, to train."""
        self._number(loader)
        self._passes[id(loader)] = self._passes.get(id(loader), 0) + 1

    def lost(self, loss: Tensor) -> None:
        """A backward pass begins at a loss."""
        if self._weighted:
            return
        self._pending.losses.append(float(loss.detach()))
        self._pending.local.append({})

    def called(self, name: str, tensor: Any) -> None:
        """The script called a function that matters for gradients, with this tensor."""
        known = isinstance(tensor, Tensor)
        storage = _storage(tensor) if known else 0
        own = (_storage(p.grad) for _, p in self.models.parameters() if p.grad is not None)
        self._pending.calls.append(
            Call(
                name=name,
                line=user_line() or "",
                of_graph=known and tensor.requires_grad and torch.is_grad_enabled(),
                of_gradient=storage != 0 and storage in own,
            )
        )

    def wraps(self, module: nn.Module) -> None:
        """DDP is about to be put around a module."""
        self._neutral.quiet(module)

    def wrapped(self, wrapper: DistributedDataParallel) -> None:
        """DDP was put around a module."""
        self.models.wrapped(wrapper)
        self._hook_parameters()

    def enters(self, module: nn.Module, inputs: Any) -> Any:
        """A module's forward pass begins; the outermost one's inputs may be changed."""
        self._depth += 1
        if isinstance(module, BatchNorm) and type(module).forward is BatchNorm.forward:
            if module.training and torch.is_grad_enabled():
                self._pending.statistics[self.models.name_of(module)] = None
            return None
        if self._depth > 1:
            return None
        if id(module) in self.models.averaged and module.training and torch.is_grad_enabled():
            self._pending.past_wrapper = self._pending.past_wrapper or user_line() or "somewhere"
        self._neutral.quiet(module)
        self.models.add(module)
        self._hook_parameters()
        if torch.is_grad_enabled() and len(self._pending.rows) == len(self._pending.losses):
            self._pending.rows += [look_at(inputs).size] * bool(list(module.parameters()))
        return self._neutral.inputs(module, inputs)

    def leaves(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module's forward pass is over."""
        self._depth -= 1

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer is about to step."""
        first = next(iter(self._optimizers), id(optimizer))
        self._optimizers.setdefault(id(optimizer), optimizer)
        taken = self._taken.get(id(optimizer), 0)
        if id(optimizer) == first and taken >= self._steps:
            raise Finished(0)
        held = _held(optimizer)
        named = list(self.models.parameters())
        pending = self._pending
        line = self._neutral.draw_line() if pending.state is not None else ""
        drew = bool(line) or pending.state not in (None, random_streams())
        before = {} if self._begun else _arrays(named)
        self._begun = True
        gradients = _arrays((n, p.grad) for n, p in named if id(p) in held and p.grad is not None)
        _silence(gradients, [(n, p) for n, p in named if n in gradients])
        local = pending.local if len(pending.local) <= _MOST_PIECES else []
        self._update = {
            "optimizer": list(self._optimizers).index(id(optimizer)),
            "step": taken,
            "rates": tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group),
            "taken": tuple(pending.taken) or tuple(map(_nameless, pending.rows)),
            "losses": tuple(pending.losses),
            "counts": self._counts,
            "calls": tuple(pending.calls),
            "drew": drew,
            "draw_line": line,
            "past_wrapper": pending.past_wrapper,
            "not_averaged": tuple(self.models.not_averaged()),
            "statistics": tuple(pending.statistics),
            "before": before,
            "held": {name: digest(p) for name, p in named if not hasattr(p, "full_tensor")},
            "gradients": gradients,
            "local": tuple(_arrays(part.items()) for part in local),
        }

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer has stepped."""
        held = _held(optimizer)
        update = RankUpdate(
            **self._update,
            parameters=_arrays((n, p) for n, p in self.models.parameters() if id(p) in held),
            buffers=_arrays(self.models.buffers()),
        )
        self._writer.write(update)
        self._taken[id(optimizer)] = self._taken.get(id(optimizer), 0) + 1
        state = self._pending.state
        self._pending = _Pending(state=None if state is None else random_streams())
        self._weighted = False

    def _end_if_enough(self) -> None:
        first = next(iter(self._optimizers), None)
        if first is not None and self._taken.get(first, 0) >= self._steps:
            raise Finished(0)

    def _take(self, taken: Taken) -> None:
        self._pending.taken.append(taken)
        self._neutral.watch_draws()
        self._pending.state = random_streams()

    def _number(self, loader: Any) -> int:
        self._loaders.setdefault(id(loader), loader)
        return list(self._loaders).index(id(loader))

    def _hook_parameters(self) -> None:
        """Sees every gradient before anything else does with it what it does."""
        for name, parameter in self.models.parameters():
            if not parameter.requires_grad or not parameter.is_leaf:
                continue
            if self._hooked.get(id(parameter)) is parameter:
                continue
            if hasattr(parameter, "full_tensor"):
                continue  # a shard: what this rank left is not its own alone
            hooks: Any = parameter
            hooks.register_hook(lambda gradient, name=name: self._left(name, gradient))
            self._hooked[id(parameter)] = parameter

    def _left(self, name: str, gradient: Tensor) -> None:
        if self._pending.local and len(self._pending.local) <= _MOST_PIECES:
            part = self._pending.local[-1]
            mine = gradient.detach()
            part[name] = part[name] + mine if name in part else mine.clone()


def _nameless(rows: int) -> Taken:
    """A batch of which only its size is known."""
    return Taken(loader=0, epoch=0, ids=(), contents=(), shape="", weights={"samples": float(rows)})


def _silence(gradients: Mapping[str, Array], named: list[tuple[str, nn.Parameter]]) -> None:
    """Sets to zero what is rounding alone in gradients.

    Those of a bias before a BatchNorm vanish, but for the last bits, which Adam and its like make
    into steps as large as any other.
    """
    limit = _ROUNDING * scale_of(gradients)
    for _, parameter in named:
        gradient: Any = parameter.grad
        own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        if not own.is_sparse and own.is_floating_point():
            own.masked_fill_(own.abs() < limit, 0.0)


def _storage(tensor: Tensor) -> int:
    plain = not tensor.is_sparse and not hasattr(tensor, "full_tensor")
    return tensor.untyped_storage().data_ptr() if plain else 0


def _held(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _arrays(named: Any) -> Mapping[str, Array]:
    """Whole tensors as arrays; of a sharded one all ranks call this together."""
    return dict(_each(named))


def _each(named: Any) -> Iterator[tuple[str, Array]]:
    for name, tensor in named:
        whole = tensor.detach()
        if hasattr(whole, "full_tensor"):
            whole = whole.full_tensor()
        if whole.is_sparse:
            whole = whole.to_dense()
        whole = whole.cpu()
        if whole.is_floating_point():
            whole = whole.double()
        yield name, whole.clone().numpy()  # see `digest`


class Models:
    """Modules that are no part of another, in the order in which they were met."""

    def __init__(self) -> None:
        self._roots: list[tuple[str, nn.Module]] = []
        self._known: set[int] = set()
        """Ids of all modules inside of the roots."""
        self._names: dict[int, str] = {}
        """Of modules that were asked for, and of those beside them, by id."""
        self.averaged: dict[int, set[int]] = {}
        """The parameters that DDP averages, by the id of the module that it wraps."""

    def add(self, module: nn.Module) -> None:
        """A module that was wrapped or called; what is inside of a known one is known."""
        inner = unwrap(module)
        if id(inner) in self._known:
            return
        if not any(True for _ in inner.parameters()) and not any(True for _ in inner.buffers()):
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

    def name_of(self, module: nn.Module) -> str:
        """Of what is inside of one of them; else that of its class."""
        if id(module) not in self._names:
            for _, root in self._roots:
                plain = plain_names(root)
                self._names |= {id(part): plain(name) for name, part in root.named_modules()}
            self._names.setdefault(id(module), "")
        return self._names[id(module)] or type(module).__name__

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each with a name that is the same on every rank; a tied one under its first name."""
        for root, name, tensor in self._named("named_parameters"):
            if isinstance(tensor, nn.Parameter):
                yield f"{root}/{name}", tensor

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Each with a name that is the same on every rank."""
        for root, name, tensor in self._named("named_buffers"):
            yield f"{root}/{name}", tensor

    def not_averaged(self) -> list[str]:
        """Parameters to train, inside of DDP, that it does not know."""
        if not self.averaged:
            return []
        known = set().union(*self.averaged.values())
        found = []
        for root, module in self._roots:
            inner = unwrap(module)
            if id(inner) in self.averaged:
                found += [
                    f"{root}/{name}"
                    for name, parameter in inner.named_parameters()
                    if parameter.requires_grad and id(parameter) not in known
                ]
        return found

    def _named(self, what: str) -> Iterator[tuple[str, str, Tensor]]:
        seen: set[int] = set()
        for root, module in self._roots:
            plain = plain_names(module)
            for name, tensor in getattr(module, what)():
                if tensor is not None and tensor.device.type != "meta" and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield root, plain(name), tensor
