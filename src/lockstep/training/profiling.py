"""Profiling runs: passes and training steps that are measured and leave nothing behind.

`ProfilingRun` is what the autotuner asks: it repeats forward passes that were seen at other numbers
of samples, each with a backward pass, and no other rank takes part. What comes after the model, the
loss, is not known there. In its place stands one that needs as much memory as a cross entropy does:
it keeps its logarithms, and its gradient is a tensor of its own.

`TrainingSteps` is what `world.memory` asks: real steps on the loader's own batches, in which the
ranks communicate as in a training. Nothing else shows what a step needs under any strategy: the
optimizer's state, the buckets and gathered parameters are made by the first step, and the peak
comes somewhere in the second.

Memory is counted by storages, so that views count once. Torch's hooks and modes are those of the
thread that entered them; replicas run in threads, so they are entered around each replica's call.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from lockstep.data.loader import Loader
from lockstep.data.pytree import map_tensors, tensors
from lockstep.distributed.device import is_out_of_memory
from lockstep.distributed.process_group import Run
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.distributed.torch_compat import BatchNorm, TorchDispatchMode, pytree
from lockstep.errors import UsageError
from lockstep.optim.precision import Precision
from lockstep.strategies.base import may_set
from lockstep.strategies.data_parallel.module import DataParallel
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.training.optimizer import PreparedOptimizer

_MOST_RUNS, _ENOUGH_S = 10, 0.03
"""A time is that of one run; where this is below 30 ms, the shortest of several, up to 10."""
_MARGIN = 0.05
"""Of a GPU's memory, kept free while sizes are tried: what is free is in pieces, later as well."""
_STATE = 2
"""Numbers that an optimizer keeps for each parameter from its first step on, as Adam does."""
_TIMED = 5
"""Global batches whose median time is the time of a step."""
_NO_COLLECTIVES = (
    "the forward pass is tried at several sizes, which differ between the ranks, to find what is "
    "'auto'"
)


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
        self._gpus = _gpus(run, self._modules)
        self._warm: set[tuple[int, int | None]] = set()
        """What has been computed before, and where: caches are made."""

    def fits(self, samples: int, device: int | None = None) -> bool:
        """Whether there is memory for so many samples at a time.

        Args:
            samples: to compute.
            device: of those that divide a batch in this process; None: on all of them.
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
        if self._gpus:
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
                begin = _now(self._gpus)
                self._compute(samples, device)
                took.append(_now(self._gpus) - begin)
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
        with ExitStack() as stack:
            for module, *arguments in self._calls:
                if device is not None and isinstance(module, DataParallel):
                    stack.enter_context(module.only_on(device))
                args, kwargs = self._resized(module, arguments, samples)
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

    def _resized(self, module: nn.Module, arguments: Any, samples: int) -> Any:
        """The arguments of a call with its samples repeated."""
        found = False
        dim = module.dim if isinstance(module, nn.DataParallel) else 0

        def resized(tensor: Tensor) -> Tensor:
            nonlocal found
            plain = tensor.detach()
            if -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] == self._local:
                found = True
                rows = torch.arange(samples, device=tensor.device) % self._local
                plain = plain.index_select(dim, rows)
            return plain.requires_grad_(tensor.requires_grad)

        resized_arguments = map_tensors(arguments, resized)
        if not found:
            raise UsageError(
                f"a call of {type(module).__name__} with {self._local} samples",
                f"no tensor among its arguments has {self._local} as its "
                + (f"dimension {dim}" if dim else "first dimension"),
                "give the model tensors with one row a sample",
            )
        return resized_arguments

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
        """All is put back; collectives are refused, and BatchNorm has statistics of its own."""
        collectives = self._run.collectives
        parts = {id(part): part for module in self._modules for part in module.modules()}.values()
        # Attributes too: what is set to activations, to be looked at, would keep the largest.
        held = [vars(part) for part in parts if may_set(part)] + [part._buffers for part in parts]
        buffers = [b for part in parts for b in part._buffers.values() if b is not None]
        alone = [
            part
            for part in parts
            if isinstance(part, SyncBatchNorm | nn.SyncBatchNorm)
            and "forward" not in vars(part)  # of replicas: the devices of this rank stay together
        ]
        blocked = collectives.blocked
        with _restored([(d, dict(d)) for d in held], buffers, self._gpus), torch.enable_grad():
            try:
                collectives.blocked = _NO_COLLECTIVES
                for layer in alone:
                    layer.forward = BatchNorm.forward.__get__(layer)  # type: ignore[method-assign]
                yield
            finally:
                collectives.blocked = blocked
                for layer in alone:
                    vars(layer).pop("forward", None)


def _stand_in(output: Tensor) -> Tensor:
    real = torch.view_as_real(output) if output.is_complex() else output
    return real.log_softmax(-1).square().sum() if real.dim() else real


@contextmanager
def _restored(
    dictionaries: Sequence[tuple[dict[Any, Any], dict[Any, Any]]],
    values: Iterable[Tensor],
    gpus: Sequence[torch.device],
) -> Iterator[None]:
    """Puts dictionaries, the values of tensors and random streams back on leaving.

    Args:
        dictionaries: each with what is to be in it.
        values: tensors, written to in place, because others hold them too. Copies are on the CPU,
            where those of a GPU do not add to what is measured.
        gpus: whose random streams are used.
    """
    before = [(tensor, local(tensor).to("cpu", copy=True)) for tensor in values]
    with preserve_rng_state(), torch.random.fork_rng(gpus, enabled=bool(gpus)):
        try:
            yield
        finally:
            for dictionary, old in dictionaries:
                dictionary.clear()
                dictionary.update(old)
            with torch.no_grad():
                for tensor, value in before:
                    local(tensor).copy_(value)


def _gpus(run: Run, modules: Iterable[nn.Module]) -> list[torch.device]:
    """All that the modules compute on."""
    devices = {run.device: None}
    for module in modules:
        devices |= dict.fromkeys(p.device for p in module.parameters())
        if isinstance(module, DataParallel):
            devices |= dict.fromkeys(module.devices)
    return [device for device in devices if device.type == "cuda"]


def _now(gpus: Iterable[torch.device]) -> float:
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    return time.perf_counter()


class StepProfile(NamedTuple):
    """What training steps took."""

    samples: int
    """Of this rank's first micro-batch, at which the activations were counted."""
    step_s: float
    sizes: dict[str, dict[torch.device, int]]
    """Bytes by device: `copies`, `activations`, `loss`, `state` and `peak`, see `DeviceMemory`."""


class TrainingSteps:
    """Training steps to be measured: collective, all ranks take them.

    Args:
        run: the present one.
        precision: of its passes.
        backward: as `World.backward`.
        model: prepared.
        optimizer: prepared.
        loader: prepared.
        loss: of the model and a batch; the mean over its samples.

    Raises:
        UsageError: a part is missing or not prepared, or the loader is in use or empty.
    """

    def __init__(
        self,
        run: Run,
        precision: Precision,
        backward: Callable[[Tensor], None],
        model: nn.Module,
        optimizer: Optimizer | None,
        loader: Loader | None,
        loss: Callable[[nn.Module, Any], Tensor] | None,
    ) -> None:
        if loss is None or not isinstance(optimizer, PreparedOptimizer):
            raise UsageError(
                "world.memory with a loader or a loss alone",
                "to take training steps it needs the model, the optimizer, the loader and the loss",
                "call world.memory(model, optimizer, loader, loss) with what world.prepare "
                "returned, or world.memory(model, optimizer) to count without a step",
            )
        if not isinstance(loader, Loader):
            raise UsageError(
                f"world.memory with a {type(loader).__name__} as the loader",
                "it is not a prepared loader",
                "give what world.prepare or world.loader returned for it",
            )
        if loader.steps == 0 or (loader.mid_epoch and loader.start == 0):
            raise UsageError(
                "world.memory with a loader that has no batch to give",
                "it is empty" if loader.steps == 0 else "a loop over it is running",
                "call it before the loop, with data for one global batch at least",
            )
        self._run, self._precision, self._backward = run, precision, backward
        self._model, self._optimizer, self._loader, self._loss = model, optimizer, loader, loss
        self._gpus = _gpus(run, [model])

    def profile(self) -> StepProfile:
        """Takes some steps and puts everything back.

        The first step shows what is kept, the second the peak, the others are timed.
        """
        with self._put_back(), closing(self._endless()) as batches:
            kept = _Kept(self._model)
            self._step(batches, kept=kept)
            sizes = {
                "copies": kept.copies,
                "activations": kept.activations,
                "loss": kept.loss,
                "state": bytes_by_device(storages(state_of(self._optimizer.inner)).values()),
                "peak": self._peak(batches, kept),
            }
            seconds = statistics.median(self._step(batches) for _ in range(_TIMED))
            return StepProfile(kept.samples, seconds, sizes)

    def _endless(self) -> Generator[Any]:
        while True:
            yield from self._loader

    def _step(
        self,
        batches: Iterator[Any],
        watch: Callable[[], AbstractContextManager[Any]] = nullcontext,
        kept: _Kept | None = None,
    ) -> float:
        """One training step, under `watch()`; the seconds it took without the loader."""
        seconds, last = 0.0, False
        while not last:
            batch = next(batches)
            present = self._loader.current
            last = present.last
            begin = _now(self._gpus)
            with watch():
                with kept.forward(present.local) if kept and present.first else nullcontext():
                    loss = self._loss(self._model, batch)
                self._backward(loss)
                if kept:
                    kept.note_gradients()
                self._optimizer.step()
                self._optimizer.zero_grad()
            seconds += _now(self._gpus) - begin
        return seconds

    def _peak(self, batches: Iterator[Any], kept: _Kept) -> dict[torch.device, int]:
        """The most memory that tensors take at one time in a step, by device."""
        if self._run.device.type == "cuda":
            devices = {self._run.device, *kept.activations, *kept.loss}
            for device in devices:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            self._step(batches)
            return {device: torch.cuda.max_memory_allocated(device) for device in devices}
        live = LiveTensors()
        live.hold(storages([*self._model.parameters(), *self._model.buffers()]).values())
        live.hold(storages(state_of(self._optimizer.inner)).values())
        live.hold(held for gradient in kept.gradients for held in [gradient()] if held is not None)
        here = threading.get_ident()

        def in_other_threads(args: Any) -> AbstractContextManager[Any]:
            return nullcontext() if threading.get_ident() == here else live.watch()

        with _around_calls(self._model, in_other_threads):
            self._step(batches, live.watch)
        return {torch.device("cpu"): live.peak}

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """Restores model, optimizer, loader, scaler, counters and random streams on leaving."""
        loader, inner, scaler = self._loader, self._optimizer.inner, self._precision.scaler
        self._precision.settle()
        # Those of a pipeline's other stages have no data.
        held = [*self._model.parameters(), *self._model.buffers()]
        values = [tensor for tensor in held if not tensor.is_meta]
        kept: list[dict[Any, Any]] = [*inner.state.values(), *inner.param_groups]
        state: dict[Any, Any] = inner.state
        values += [v for each in kept for v in each.values() if isinstance(v, Tensor)]
        old = [(state, dict(state)), *((each, _settings(each)) for each in kept)]
        old += [(part._buffers, dict(part._buffers)) for part in self._model.modules()]
        scaler_before = None if scaler is None else scaler.state_dict()
        position, trained = loader.state_dict(), loader.trained
        with _restored(old, values, self._gpus), self._run.step.kept():
            try:
                yield
            finally:
                loader.load_state_dict(position)
                loader.trained = trained
                self._optimizer.zero_grad()
                self._precision.settle()
                if scaler is not None and scaler_before is not None:
                    scaler.load_state_dict(scaler_before)


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state or a group: what is neither tensor nor parameter is copied."""
    return {
        name: value if isinstance(value, Tensor) or name == "params" else deepcopy(value)
        for name, value in values.items()
    }


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state, without single numbers, which may be on the CPU."""
    found = pytree.tree_leaves(list(optimizer.state.values()))
    return [value for value in found if isinstance(value, Tensor) and value.dim()]


class _Kept:
    """Looks at a micro-batch: what its forward pass leaves behind for the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.samples = 0
        self.activations: dict[torch.device, int] = {}
        self.loss: dict[torch.device, int] = {}
        self.copies: dict[torch.device, int] = {}
        self.gradients: list[weakref.ref[torch.UntypedStorage]] = []
        """Their storages: those that outlive the clearing are buckets."""
        self._own = storages([*model.parameters(), *model.buffers()])

    @contextmanager
    def forward(self, samples: int) -> Iterator[None]:
        """Around the forward pass and the loss, which must be alive at the end of it."""
        calls: list[_SavedByCall] = []
        outside = SavedTensors()
        used: dict[int, torch.UntypedStorage] = {}

        def watch(arguments: Any) -> AbstractContextManager[Any]:
            calls.append(_SavedByCall(arguments))
            return calls[-1].watch()

        with outside.watch(), _around_calls(self.model, watch), self._parameters_in_use(used):
            yield
        self.samples = samples
        copies = {number: s for number, s in used.items() if number not in self._own}
        self.copies = bytes_by_device(copies.values())
        counted = self._own | copies
        activations: Counter[torch.device] = Counter()
        for call in calls:
            activations.update(call.count(counted))
        self.activations = activations
        after = outside.storages()
        self.loss = bytes_by_device(s for n, s in after.items() if n not in counted)

    def note_gradients(self) -> None:
        """Where they are, after a backward pass."""
        gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
        self.gradients = [weakref.ref(s) for s in storages(gradients).values()]

    @contextmanager
    def _parameters_in_use(self, used: dict[int, torch.UntypedStorage]) -> Iterator[None]:
        """Adds the parameters that each layer computes with, where they are not its own."""
        spread = any(hasattr(p, "to_local") for p in self.model.parameters())

        def look(module: nn.Module, args: Any) -> None:
            used.update(storages(module.parameters(recurse=False)))

        copied = isinstance(self.model, DataParallel)
        watched = self.model.modules() if spread or copied else ()
        handles = [module.register_forward_pre_hook(look) for module in watched]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard, where it is spread over the ranks."""
    tensor = tensor.detach()
    # By its method: the import of DTensor takes long, and where there is one it has been made.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages of dense tensors, by their ids, which are their own while they are held."""
    found = {}
    for tensor in tensors:
        own = local(tensor)
        if own.layout is torch.strided and own.device.type != "meta":
            storage = own.untyped_storage()
            found[id(storage)] = storage
    return found


def bytes_by_device(held: Iterable[torch.UntypedStorage]) -> dict[torch.device, int]:
    """The bytes of storages that are held, by the device they are on."""
    sizes: Counter[torch.device] = Counter()
    for storage in held:
        sizes[storage.device] += storage.nbytes()
    return dict(sizes)


class SavedTensors:
    """What autograd keeps of forward passes for the backward pass, once per storage.

    torch hands out each tensor that an operation saves (`torch.autograd.graph.saved_tensors_hooks`,
    see the tutorial "Hooks for autograd saved tensors"). A storage that was given back since, as
    FSDP does with gathered parameters, has no bytes when it is counted.
    """

    def __init__(self) -> None:
        self._kept: dict[int, torch.UntypedStorage] = {}

    def watch(self) -> saved_tensors_hooks:
        """To be entered around a forward pass, in the thread that makes it."""
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """All that were saved; by id, as `storages` gives them."""
        return dict(self._kept)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._kept.update(storages([tensor]))
        return tensor.detach()  # an output that is kept as it is would keep itself


class _SavedByCall(SavedTensors):
    """What a call of the model or of a replica saves; of its inputs only what it was given."""

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        self._inputs: Counter[int] = Counter()
        """Bytes of each, by storage: a replica's inputs are views of the whole batch."""
        for tensor in tensors(arguments):
            for number in storages([tensor]):
                self._inputs[number] += tensor.numel() * tensor.element_size()

    def count(self, counted: dict[int, torch.UntypedStorage]) -> Counter[torch.device]:
        """The bytes of what is not counted yet, by device; adds to what is counted."""
        sizes: Counter[torch.device] = Counter()
        for number, storage in self._kept.items():
            if number in self._inputs:
                sizes[storage.device] += min(storage.nbytes(), self._inputs[number])
            elif number not in counted:
                counted[number] = storage
                sizes[storage.device] += storage.nbytes()
        return sizes


class LiveTensors:
    """The bytes of the tensors alive on the CPU that a step has touched, and the most at any time.

    Every operation says what it takes and makes; a storage counts from then until it is freed.
    Memory that a kernel takes for itself and gives back before it returns is not seen.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._lock = threading.RLock()
        self._sizes: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self._bound = 0
        """The bytes alive are not more: what was freed since they were added up is still in it."""

    @property
    def total(self) -> int:
        """The bytes alive now; storages may be smaller than when they were seen, as FSDP's are."""
        return sum(storage.nbytes() for storage in self._sizes)

    def hold(self, held: Iterable[torch.UntypedStorage]) -> None:
        """Counts storages that exist."""
        with self._lock:
            for storage in held:
                if storage.device.type == "cpu":
                    self._bound += max(0, storage.nbytes() - self._sizes.get(storage, 0))
                    self._sizes[storage] = storage.nbytes()
            if self._bound > self.peak:
                self._bound = self.total
                self.peak = max(self.peak, self._bound)

    def watch(self) -> AbstractContextManager[Any]:
        """To be entered around a step, in each of its threads."""
        return _Operations(self)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operation of a thread to `LiveTensors`."""

    def __init__(self, live: LiveTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs, result))
        self._live.hold(storages(t for t in leaves if isinstance(t, Tensor)).values())
        return result


@contextmanager
def _around_calls(
    model: nn.Module, make: Callable[[Any], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Enters `make(arguments)` around every call of a model, or of each of its replicas, in the
    thread that calls it.
    """
    module = model.module if isinstance(model, DataParallel) else model
    entered = threading.local()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        context = make((args, kwargs))
        context.__enter__()
        entered.contexts = [*getattr(entered, "contexts", ()), context]

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        entered.contexts.pop().__exit__(None, None, None)

    handles = [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
