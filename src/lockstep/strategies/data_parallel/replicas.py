"""Copies of a module for the replicas of one forward pass, on its own device and on others.

A copy is shallow: its submodules are new objects with the attributes of the originals. On the
module's device it holds the very parameters, and copies of the buffers. On another device it holds
copies of the parameters, made by torch's broadcast (NCCL where it can); their gradients are added
up there and come back as one. Copies are made for each forward pass, as in `nn.DataParallel`.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm

from lockstep.data.pytree import map_tensors
from lockstep.errors import UsageError
from lockstep.strategies.base import may_set

_broadcast: Any = comm.broadcast_coalesced
_reduce_add: Any = comm.reduce_add_coalesced


def copies(
    module: nn.Module,
    tensors: Sequence[Tensor],
    home: torch.device,
    devices: Sequence[torch.device],
) -> list[nn.Module]:
    """A copy of `module` for each of the devices.

    Args:
        module: to copy.
        tensors: its parameters and buffers, all on `home`.
        home: where gradients come together.
        devices: of the copies; `home` may be among them, also several times.

    Raises:
        UsageError: a part of the module is bound to the original: compiled or scripted code, or a
            `forward` that was set on the object.
    """
    if not devices:
        return []
    elsewhere = list(dict.fromkeys(device for device in devices if device != home))
    moved: dict[torch.device, Sequence[Tensor]] = {}
    if elsewhere and tensors:
        flat = _Broadcast.apply(elsewhere, *tensors)  # type: ignore[no-untyped-call]
        size = len(tensors)
        moved = {d: flat[n * size : (n + 1) * size] for n, d in enumerate(elsewhere)}
    made = []
    for device in devices:
        held = moved.get(device, ())
        if device == home:
            held = [t if isinstance(t, nn.Parameter) else t.clone() for t in tensors]
        made.append(_copy(module, {id(t): h for t, h in zip(tensors, held, strict=True)}))
    return made


def _copy(module: nn.Module, held: dict[int, Tensor]) -> nn.Module:
    """A shallow copy with other tensors in the place of the module's own."""
    made: dict[nn.Module, nn.Module] = {}
    for name, part in module.named_modules():
        _check(name, part)
        made[part] = _shallow(part)
    slots = {kind: _slots(kind) for kind in set(map(type, made))}
    for part, new in made.items():
        for name in slots[type(part)]:
            if hasattr(part, name):
                object.__setattr__(new, name, getattr(part, name))
        # Around `Module.__setattr__`, which looks at each value for longer than a copy takes.
        vars(new).update(
            _modules={n: None if c is None else made[c] for n, c in part._modules.items()},
            _buffers={n: None if b is None else held[id(b)] for n, b in part._buffers.items()},
            _parameters={},
        )
        for name, parameter in part._parameters.items():
            value: Any = None if parameter is None else held[id(parameter)]
            if value is not parameter:
                setattr(new, name, value)  # by which an RNN's list is brought up to date
            new._parameters[name] = value  # so that `next(self.parameters()).device` is right
        if "forward" in vars(part):
            new.forward = _forward_of(vars(part)["forward"], part, new)
    return made[module]


def _shallow(part: nn.Module) -> nn.Module:
    """A new object with the same attributes."""
    replicate: Any = type(part)._replicate_for_data_parallel
    if replicate is not nn.Module._replicate_for_data_parallel:
        # Private, and the only way by which a module can say what a shallow copy of it needs: an
        # RNN has a list of its weights.
        own: nn.Module = replicate(part)
        return own
    new = type(part).__new__(type(part))
    # As torch's own does, which goes through `Module.__setattr__` for each of its changes.
    vars(new).update(vars(part), _is_replica=True)
    return new


def _check(name: str, part: nn.Module) -> None:
    forward = vars(part).get("forward")
    compiled = part._compiled_call_impl is not None or "_orig_mod" in part._modules
    scripted = isinstance(part, torch.jit.ScriptModule)
    foreign = forward is not None and not isinstance(forward, MethodType) and not _vars_of(forward)
    if compiled or scripted or foreign:
        kind = "compiled" if compiled else "scripted" if scripted else "a forward set on the object"
        raise UsageError(
            f"several replicas of a {type(part).__name__}",
            f"{name or 'the module'} is {kind}, which is bound to one object on one device",
            "use strategy='ddp' for it, or leave torch.compile, torch.jit and the like out",
        )


def _vars_of(value: Any) -> dict[str, Any]:
    """The attributes of an object; none of a function, which hides what it needs."""
    hides = isinstance(value, FunctionType | functools.partial)
    return {} if hides else getattr(value, "__dict__", {})


def _slots(kind: type) -> list[str]:
    """Names of the attributes that its objects keep outside of their dictionary."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return found


def _forward_of(value: Any, part: nn.Module, new: nn.Module) -> Callable[..., Any]:
    """Binds what was set as `forward` at each call, as a copy that holds its own method is freed
    by the next garbage collection only, and holds copies of all parameters until then.
    """
    held = weakref.ref(new)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _rebound(value, part, held())(*args, **kwargs)

    return forward


def _rebound(value: Any, part: nn.Module, new: nn.Module | None) -> Any:
    """A method, or an object that calls one, of the copy instead of the original.

    Such an object is what activation checkpointing puts in the place of `forward`.
    """
    if isinstance(value, MethodType):
        return MethodType(value.__func__, new) if value.__self__ is part else value
    made = copy.copy(value)
    for name, inner in vars(value).items():
        if inner is part:
            setattr(made, name, new)
        elif isinstance(inner, MethodType):
            setattr(made, name, _rebound(inner, part, new))
    return made


class _Broadcast(torch.autograd.Function):
    """torch's `Broadcast` without the device the tensors come from.

    What no replica has used has no gradient here, as on one device; torch makes zeros of it, and an
    optimizer with weight decay then moves it.
    """

    @staticmethod
    def forward(ctx: Any, devices: list[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.home, ctx.devices, ctx.count = tensors[0].device, devices, len(tensors)
        ctx.set_materialize_grads(False)
        made = []
        for of_device in _broadcast(tensors, [ctx.home, *devices])[1:]:
            for tensor, new in zip(tensors, of_device, strict=True):
                made.append(torch.view_as_complex(new) if tensor.is_complex() else new)
        needed = ctx.needs_input_grad[1:] * len(devices)
        fixed = [new for new, needs in zip(made, needed, strict=True) if not needs]
        ctx.mark_non_differentiable(*fixed)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        columns = [gradients[k :: ctx.count] for k in range(ctx.count)]
        if torch.is_grad_enabled():  # create_graph=True: by what can be differentiated again
            there = [[g.to(ctx.home) for g in column if g is not None] for column in columns]
            return (None, *[sum(column[1:], column[0]) if column else None for column in there])
        used = [k for k, column in enumerate(columns) if any(g is not None for g in column)]
        if not used:
            return (None, *[None] * len(columns))
        filled = [_filled(columns[k], ctx.devices) for k in used]
        is_complex = [column[0].is_complex() for column in filled]
        # On the first of the others: the device that holds everything has the least room.
        sums = _reduce_add(
            [
                [torch.view_as_real(g) if g.is_complex() else g for g in of_device]
                for of_device in zip(*filled, strict=True)
            ],
            ctx.devices[0].index,
        )
        found: list[Tensor | None] = [None] * ctx.count
        for k, total, c in zip(used, sums, is_complex, strict=True):
            found[k] = (torch.view_as_complex(total) if c else total).to(ctx.home)
        return (None, *found)


def _filled(column: Sequence[Tensor | None], devices: Sequence[torch.device]) -> list[Tensor]:
    """One tensor's gradients on all devices, zeros where a replica has not used it."""
    known = next(g for g in column if g is not None)
    return [
        torch.zeros_like(known, device=device) if g is None else g
        for g, device in zip(column, devices, strict=True)
    ]


Attributes = dict[str, dict[str, Any]]


def attributes(module: nn.Module) -> Attributes:
    """Those of each part that has a forward of the user's, by its name."""
    return {path: dict(vars(part)) for path, part in module.named_modules() if may_set(part)}


def take_back(
    module: nn.Module, replica: nn.Module, before: Attributes, home: torch.device
) -> None:
    """What a forward pass has left in a copy, in buffers and attributes; the original has not run.

    Args:
        module: the original.
        replica: the copy.
        before: its `attributes` before the pass.
        home: the device of the original.
    """
    found = dict(replica.named_modules())
    for path, old in before.items():
        part = module.get_submodule(path)
        for name, value in vars(found[path]).items():
            if name not in old or old[name] is not value:
                vars(part)[name] = map_tensors(value, lambda tensor: tensor.to(home))
    with torch.no_grad():
        for path, part in module.named_modules():
            for name, left in found[path]._buffers.items():
                buffer = part._buffers.get(name)
                if buffer is not None and left is not None and buffer.shape == left.shape:
                    buffer.copy_(left)
                else:
                    part._buffers[name] = None if left is None else left.detach().to(home)
