"""The replicas of one forward pass: copies of a module, threads that can meet, BatchNorm over all.

A copy is shallow: its submodules are new objects with the attributes of the originals. On the
module's device it holds the very parameters, and copies of the buffers. On another device it holds
copies of the parameters, made by torch's broadcast (NCCL where it can); their gradients are added
up there and come back as one. Copies are made for each forward pass, as in `nn.DataParallel`.

Replicas on several devices run side by side, those on one device one at a time and in order: they
share the device's stream of random numbers, so only a fixed order draws the same numbers again.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar, copy_context
from functools import partial, reduce
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm

from lockstep.batch.pytree import map_tensors
from lockstep.distributed.torch_compat import (
    BatchNorm,
    Members,
    in_backward_pass,
    is_compiled,
    members,
    set_members,
    shallow_copy,
)
from lockstep.errors import UsageError
from lockstep.optim.precision import AutocastForward
from lockstep.strategies import sync_batchnorm
from lockstep.strategies.base import may_set

_broadcast: Any = comm.broadcast_coalesced


def replicate(
    module: nn.Module, tensors: Sequence[Tensor], devices: Sequence[torch.device]
) -> list[nn.Module]:
    """A copy of `module` for each of the devices.

    Args:
        module: to copy.
        tensors: its parameters and buffers, all on the first device; gradients come together there.
        devices: the module's own, then those of the copies: all on that one, or each on another.

    Raises:
        UsageError: a part of the module is bound to the original: compiled or scripted code, or a
            `forward` that was set on the object.
    """
    home, *others = devices
    if home in others:
        held = [[t if isinstance(t, nn.Parameter) else t.clone() for t in tensors] for _ in others]
    else:
        held = _copies(others, tensors)
    return [_copy(module, dict(zip(map(id, tensors), own, strict=True))) for own in held]


def _copy(module: nn.Module, held: dict[int, Tensor]) -> nn.Module:
    """A shallow copy with other tensors in the place of the module's own."""
    made: dict[nn.Module, nn.Module] = {}
    for name, part in module.named_modules():
        _check(name, part)
        made[part] = shallow_copy(part)
    for part, new in made.items():
        state = object.__getstate__(part)  # with __slots__: its dictionary and what is in the slots
        for name, value in state[1].items() if isinstance(state, tuple) else ():
            object.__setattr__(new, name, value)
        # Around `Module.__setattr__`, which looks at each value for longer than a copy takes.
        old = members(part)
        parameters: dict[str, Any] = {}
        buffers = {n: None if b is None else held[id(b)] for n, b in old.buffers.items()}
        modules = {n: None if c is None else made[c] for n, c in old.modules.items()}
        set_members(new, Members(parameters, buffers, modules))
        for name, parameter in old.parameters.items():
            own: Any = None if parameter is None else held[id(parameter)]
            if own is not parameter:
                setattr(new, name, own)  # by which an RNN's list is brought up to date
            parameters[name] = own  # so that `next(self.parameters()).device` is right
        if "forward" in vars(part):
            new.forward = _forward_of(vars(part)["forward"], part, new)
    return made[module]


def _check(name: str, part: nn.Module) -> None:
    forward = vars(part).get("forward")
    if isinstance(forward, AutocastForward):
        forward = forward.own
    compiled = is_compiled(part)
    scripted = isinstance(part, torch.jit.ScriptModule)
    # A function hides what it needs.
    hides = isinstance(forward, FunctionType | partial)
    foreign = forward is not None and (hides or not hasattr(forward, "__dict__"))
    if compiled or scripted or foreign:
        kind = "compiled" if compiled else "scripted" if scripted else "a forward set on the object"
        raise UsageError(
            f"several replicas of a {type(part).__name__}",
            f"{name or 'the module'} is {kind}, which is bound to one object on one device",
            "use strategy='ddp' for it, or leave torch.compile, torch.jit and the like out",
        )


def _forward_of(value: Any, part: nn.Module, new: nn.Module) -> Callable[..., Any]:
    """Binds what was set as `forward` at each call, as a copy that holds its own method is freed
    by the next garbage collection only, and holds copies of all parameters until then.
    """
    held = weakref.ref(new)
    return lambda *args, **kwargs: _rebound(value, part, held())(*args, **kwargs)


def _rebound(value: Any, part: nn.Module, new: nn.Module | None) -> Any:
    """A method, or an object that calls one, of the copy instead of the original.

    Such an object is what activation checkpointing or autocast puts in the place of `forward`.
    """
    if isinstance(value, MethodType):
        return MethodType(value.__func__, new) if value.__self__ is part else value
    made = copy.copy(value)
    if isinstance(value, AutocastForward) and value.own is not None:
        made.own = _rebound(value.own, part, new)
    for name, inner in vars(value).items():
        if inner is part:
            setattr(made, name, new)
        elif isinstance(inner, MethodType | BatchNormOverReplicas):
            setattr(made, name, _rebound(inner, part, new))
    return made


def _copies(devices: Sequence[torch.device], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those of tensors of one device on each of some others."""
    if not devices or not tensors:
        return [[] for _ in devices]
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    flat = iter(_Broadcast.apply(list(devices), *real))  # type: ignore[no-untyped-call]
    return [
        [torch.view_as_complex(next(flat)) if t.is_complex() else next(flat) for t in tensors]
        for _ in devices
    ]


class _Broadcast(torch.autograd.Function):
    """torch's `Broadcast` without the device the tensors come from.

    What no replica has used has no gradient here, as on one device; torch makes zeros of it, and an
    optimizer with weight decay then moves it.
    """

    @staticmethod
    def forward(ctx: Any, devices: list[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.home, ctx.count = tensors[0].device, len(tensors)
        ctx.set_materialize_grads(False)
        made = [t for of_device in _broadcast(tensors, [ctx.home, *devices])[1:] for t in of_device]
        needed = ctx.needs_input_grad[1:] * len(devices)
        ctx.mark_non_differentiable(*(t for t, n in zip(made, needed, strict=True) if not n))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        sums = []
        for k in range(ctx.count):
            found = [g for g in gradients[k :: ctx.count] if g is not None]
            # From device to device, so that no link carries it twice and home holds it once.
            added = reduce(lambda total, g: total.to(g.device) + g, found) if found else None
            sums.append(None if added is None else added.to(ctx.home))
        return None, *sums


Attributes = dict[str, dict[str, Any]]


def attributes(module: nn.Module) -> Attributes:
    """Those of each part that has a forward of the user's, by its name."""
    return {path: dict(vars(part)) for path, part in module.named_modules() if may_set(part)}


def copy_state_back(
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
            buffers = members(part).buffers
            for name, left in members(found[path]).buffers.items():
                buffer = buffers.get(name)
                if buffer is not None and left is not None and buffer.shape == left.shape:
                    buffer.copy_(left)
                else:
                    buffers[name] = None if left is None else left.detach().to(home)


class ReplicaBarrier:
    """Where the replicas of one forward pass wait for each other.

    Args:
        count: of replicas.
        in_turn: only one runs at a time.
    """

    def __init__(self, count: int, *, in_turn: bool) -> None:
        self.error: BaseException | None = None
        """What the first replica that failed has raised."""
        self._brought: dict[int, tuple[str, Any]] = {}
        """By the replicas that have come."""
        self._given: list[Tensor] = []
        # Called by the last replica to come, before the others go on. Not a method: the barrier
        # would hold itself, and all that it holds until the next garbage collection.
        self._barrier = threading.Barrier(count, partial(_join, self._brought, self._given))
        self._turns = [threading.Semaphore(0) for _ in range(count)] if in_turn else []
        """Each is released as the replica before it waits; the first one's turn comes by itself."""

    def normalise(self, position: int, place: str, layer: BatchNorm, x: Tensor) -> Tensor:
        """Waits for all replicas; the output of one, by the statistics of what all have brought.

        Args:
            position: of this replica.
            place: in the model: all replicas must have come to the same.
            layer: this replica's copy.
            x: its input.

        Raises:
            UsageError: the replicas took different ways through the model.
        """
        self._meet(position, place, (layer, x))
        self.wait_for_turn(position)
        return self._given[position]

    def end(self, position: int) -> None:
        """Waits for all replicas at the end of the forward pass, so that none waits elsewhere."""
        self._meet(position, "the end of its forward pass", None)

    def wait_for_turn(self, position: int) -> None:
        """Returns when the replica may run."""
        if self._turns and position:
            self._turns[position].acquire()
            if self._barrier.broken:
                raise threading.BrokenBarrierError

    def fail(self, error: BaseException) -> None:
        """A replica has failed: the others are cancelled where they wait, or will wait next."""
        if self.error is None and not isinstance(error, threading.BrokenBarrierError):
            self.error = error
        self._barrier.abort()
        for turn in self._turns:
            turn.release()

    def _meet(self, position: int, place: str, value: Any) -> None:
        self._brought[position] = place, value
        try:
            if position + 1 < len(self._turns):
                self._turns[position + 1].release()
            self._barrier.wait()
        except BaseException as error:  # which the user's code may catch
            self.fail(error)
            raise


def _join(brought: dict[int, tuple[str, Any]], given: list[Tensor]) -> None:
    """Makes of what all replicas have brought what each of them gets."""
    places, values = zip(*(brought[n] for n in sorted(brought)), strict=True)
    brought.clear()
    if len(set(places)) > 1:
        raise UsageError(
            "BatchNorm over the samples of all replicas",
            "they take different ways through the model: "
            + ", ".join(f"replica {n} at {place!r}" for n, place in enumerate(places)),
            "call the same BatchNorm layers in the same order whatever the samples are, or let "
            "each replica take statistics of its own with sync_batchnorm=False",
        )
    given[:] = [] if values[0] is None else _normalise(values)


present: ContextVar[tuple[ReplicaBarrier, int] | None] = ContextVar("present", default=None)
"""Where this thread runs one of several replicas that may wait for each other: its position."""


def parallel_apply(
    calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]
) -> list[Any]:
    """Runs every call in a thread of its own, the first one in this; returns their results.

    The threads compute as this one would: with its modes of autograd and autocast, on its streams.

    Args:
        calls: one a replica.
        devices: where they run.

    Raises:
        BaseException: what the first call that failed has raised, after all have ended.
    """
    barrier = ReplicaBarrier(len(calls), in_turn=len(set(devices)) == 1)
    modes = _modes_of_this_thread(devices)

    def work(position: int) -> Any:
        token = present.set((barrier, position))
        try:
            with ExitStack() as stack:
                for mode in modes if position else ():
                    stack.enter_context(mode())
                barrier.wait_for_turn(position)
                result = calls[position]()
                barrier.end(position)
                return result
        except BaseException as error:
            barrier.fail(error)
        finally:
            present.reset(token)

    with ThreadPoolExecutor(len(calls) - 1, "replica") as pool:
        others = [pool.submit(copy_context().run, work, n) for n in range(1, len(calls))]
        results = [work(0)]
        try:
            results += [other.result() for other in others]
        except BaseException as error:  # such as KeyboardInterrupt
            barrier.fail(error)
    failed, barrier.error = barrier.error, None
    if failed is None:
        return results
    try:
        raise failed
    finally:
        del failed  # else its traceback holds itself, and all that the replicas have computed


def _modes_of_this_thread(
    devices: Sequence[torch.device],
) -> list[Callable[[], AbstractContextManager[Any]]]:
    """What torch keeps for each thread and a new thread would not have; to be entered there."""
    modes: list[Callable[[], AbstractContextManager[Any]]] = [
        partial(torch.cuda.stream, torch.cuda.current_stream(d))
        for d in devices
        if d.type == "cuda"
    ]
    modes.append(partial(torch.inference_mode, torch.is_inference_mode_enabled()))
    modes.append(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
    cache = torch.is_autocast_cache_enabled()
    for kind in sorted({device.type for device in devices} | {"cpu"}):
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            modes.append(partial(torch.autocast, kind, dtype, cache_enabled=cache))
    return modes


class BatchNormOverReplicas:
    """The `forward` of a BatchNorm layer with statistics of the samples of all replicas.

    The replicas meet at every such layer. There the mean and the variance of all their samples are
    computed, in two passes over what lies where: only C numbers a replica travel between devices.
    All of it is plain differentiable torch, so that autograd gives the gradient through the
    statistics (Ioffe and Szegedy, "Batch Normalization", arXiv 1502.03167, section 3) for uneven
    parts as well. `sync_batchnorm` does the same over processes, by collectives; a backward pass on
    the CPU runs in one thread, whatever the forward pass ran in, so replicas cannot meet there.

    Outside of several replicas, and where the layer takes no statistics of its batch, it is torch's
    own BatchNorm, bit for bit. The first replica's layer updates its running statistics.
    """

    def __init__(self, layer: BatchNorm, name: str) -> None:
        self.layer: Any = layer
        self.name = name

    @property
    def meets(self) -> bool:
        """Whether the present mode takes statistics of the batch."""
        return self.layer.training or self.layer.running_mean is None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises `x`, (N, C) or (N, C, ...), by the statistics of all replicas' samples."""
        layer, here = self.layer, present.get()
        if here is None or not self.meets:
            if not in_backward_pass():
                layer.met_replicas = False
            elif self.meets and layer.met_replicas:
                raise UsageError(
                    "activation checkpointing of a block with BatchNorm under strategy 'dp'",
                    f"{self.name!r} takes statistics over all replicas, and in the backward pass "
                    "each block is computed again alone",
                    "checkpoint blocks without BatchNorm, use strategy='ddp', or give each replica "
                    "statistics of its own with sync_batchnorm=False",
                )
            return BatchNorm.forward(layer, x)
        layer.met_replicas = True
        sync_batchnorm.check_input(layer, x, self.name)
        barrier, position = here
        return barrier.normalise(position, self.name, layer, x)


def synchronise_batchnorm(module: nn.Module) -> sync_batchnorm.Names:
    """Gives every torch BatchNorm and SyncBatchNorm in `module` the statistics of all replicas.

    Those with a forward of their own are left alone, as `sync_batchnorm.convert` does.
    """
    names = sync_batchnorm.Names([], [])
    for name, part in module.named_modules():
        if isinstance(part, BatchNorm):
            layer: Any = part
            if isinstance(layer, sync_batchnorm.SyncBatchNorm) or sync_batchnorm.is_plain(layer):
                layer.forward, layer.met_replicas = BatchNormOverReplicas(layer, name), False
            ours = isinstance(vars(layer).get("forward"), BatchNormOverReplicas)
            (names.converted if ours else names.left).append(name)
    return names


def _normalise(brought: Sequence[tuple[Any, Tensor]]) -> list[Tensor]:
    """The outputs of all replicas; the first one's layer updates its running statistics."""
    first, x = brought[0]
    dims, dtype = sync_batchnorm.all_but_channels(x), sync_batchnorm.statistics_dtype(x)
    total = sum(x.numel() for _, x in brought) // first.num_features
    if total == 1:
        raise sync_batchnorm.one_value(
            f"batch normalisation over a batch on {len(brought)} replicas",
            "all replicas together have 1",
        )
    mean = _sum_on(x.device, [x.sum(dims, dtype=dtype) for _, x in brought]) / total
    deviations = [x - sync_batchnorm.per_channel(mean, x) for _, x in brought]
    variance = _sum_on(x.device, [d.square().sum(dims) for d in deviations]) / total
    if first.training and first.track_running_stats:
        count = torch.tensor(total, dtype=torch.float64, device=x.device)
        sync_batchnorm.update_running_stats(first, mean.detach(), variance.detach(), count)
    scale = (variance + first.eps).rsqrt()
    outputs = []
    for (layer, x), deviation in zip(brought, deviations, strict=True):
        own = scale.to(x.device) if layer.weight is None else scale.to(x.device) * layer.weight
        output = deviation * sync_batchnorm.per_channel(own, x)
        if layer.bias is not None:
            output = output + sync_batchnorm.per_channel(layer.bias, x)
        outputs.append(output.to(x.dtype))
    return outputs


def _sum_on(device: torch.device, parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape that lie on several devices, on `device`."""
    return torch.stack([part.to(device) for part in parts]).sum(0)
