"""Memory and time of each device: counted from what is held, and measured in training steps.

Counted are bytes that this strategy leaves on this device: a shard counts as a shard, a view not at
all. Measured is the most that was alive at one time in a training step. Communication: the rows are
exchanged once; the steps communicate as those of a training do. Nothing else shows what a step
needs under any strategy: the optimizer's state, the buckets and gathered parameters are made by the
first step, and the peak comes somewhere in the second.

Memory is counted by storages, so that views count once. Torch's hooks and modes are those of the
thread that entered them; replicas run in threads, so they are entered around each replica's call.
"""

from __future__ import annotations

import statistics
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from lockstep.batch.loader import Loader
from lockstep.batch.pytree import tensors
from lockstep.communication import routing
from lockstep.distributed.torch_compat import (
    TorchDispatchMode,
    is_sharded,
    members,
    outside_compiled_code,
    own_part,
    pytree,
)
from lockstep.errors import UsageError
from lockstep.extensions.profiling import gpus_of, restored, synchronized_time
from lockstep.strategies.data_parallel.module import DataParallel
from lockstep.training.optimizer import PreparedOptimizer
from lockstep.training.prepare import Preparer

_TIMED = 5
"""Global batches whose median time is the time of a step."""
_COLUMNS = 8
"""Devices beside each other; more are shown below."""
_WIDTH = 12
_ROWS = (
    ("samples at a time", "samples"),
    ("parameters", "parameters"),
    ("parameter copies", "copies"),
    ("a block whole", "gathered"),
    ("buffers", "buffers"),
    ("gradients", "gradients"),
    ("optimizer state", "state"),
    ("activations", "activations"),
    ("after the model", "loss"),
    ("all of these", "counted"),
    ("measured peak", "peak"),
    ("a step", "step_s"),
)
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_ON_CPU = "tensors alive at one time in a step; what kernels take for themselves is not seen"
_REPLICA = "replica "
_REPLICAS = (
    "replicas share the memory of their process; each is shown as on a device of its own, and with "
    "the first of them the peak of all"
)
_STAGES = "activations of one micro-batch; a stage holds those of several, which the peak shows"
_ON_CUDA = "torch.cuda.max_memory_allocated of a step; the CUDA context is not in it"


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What one device holds, in bytes, and its time; None: not known."""

    rank: int
    device: str
    samples: int | None = None
    """Computed at a time, where steps were taken."""
    parameters: int = 0
    copies: int = 0
    """Parameters gathered or copied for a pass and held until its backward pass."""
    gathered: int = 0
    """By FSDP for the largest of its units, for a moment: its parameters, unless they are held,
    their gradients, and what these are sent in."""
    buffers: int = 0
    gradients: int = 0
    """Those of parameters that are trained, when they are there."""
    state: int | None = 0
    """Of the optimizer, once it has stepped."""
    activations: int | None = None
    """What the model's forward pass keeps for its backward pass, the batch among it."""
    loss: int | None = None
    """What is kept likewise after the model: by the loss, where outputs are joined."""
    peak: int | None = None
    """Where replicas share one device, that of their process, with the first of them."""
    step_s: float | None = None

    @property
    def counted(self) -> int:
        """All that is counted, as if it were alive at the same time."""
        known = (self.parameters, self.copies, self.gathered, self.buffers, self.gradients)
        return sum(known) + (self.state or 0) + (self.activations or 0) + (self.loss or 0)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of every device of a run; `str()` gives it as a table."""

    strategy: str
    devices: tuple[DeviceMemory, ...]
    stages: bool = False
    """Ranks hold stages of the model, which compute several micro-batches at a time."""

    def __str__(self) -> str:
        size, unit = _unit(self.devices)
        lines = [f"memory of each device in {unit}, strategy {self.strategy}"]
        for begin in range(0, len(self.devices), _COLUMNS):
            lines += self._block(self.devices[begin : begin + _COLUMNS], size)
        if any(device.peak is not None for device in self.devices):
            cuda = any(device.device.startswith("cuda") for device in self.devices)
            lines.append(f"  measured: {_ON_CUDA if cuda else _ON_CPU}")
        if any(device.device.startswith(_REPLICA) for device in self.devices):
            lines.append(f"  counted: {_REPLICAS}")
        if self.stages and any(device.activations for device in self.devices):
            lines.append(f"  counted: {_STAGES}")
        return "\n".join(lines)

    def _block(self, devices: tuple[DeviceMemory, ...], size: int) -> list[str]:
        lines = [
            _line("", [f"rank {device.rank}" for device in devices]),
            _line("", [device.device for device in devices]),
        ]
        for label, name in _ROWS:
            values = [getattr(device, name) for device in devices]
            unknown = name == "state" and None in values
            if unknown or any(getattr(device, name) for device in self.devices):
                shown = ["?" if value is None else _shown(name, value, size) for value in values]
                lines.append(_line(label, shown))
        return lines


def measure(
    preparer: Preparer,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    loader: Loader | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
) -> Memory:
    """What each device holds for a model; with `loader` and `loss` also what a step takes.

    With these a few training steps are taken, on the loader's next batches. Then weights,
    optimizer, loader, loss scaler, counters and random streams are what they were; what else `loss`
    changes is not, and gradients are cleared. `print(world.memory(...))` shows a table. All ranks
    call it.

    Args:
        preparer: the run's.
        model: prepared by it.
        optimizer: likewise; None leaves its state out.
        loader: likewise; together with `loss`.
        loss: of the model and a batch, the mean over its samples, as for `world.backward`.

    Returns:
        The figures of all ranks, on every rank.

    Raises:
        UsageError: a part is missing or not prepared, or the loader is in use or empty.
    """
    from torch.distributed.fsdp import FSDPModule  # takes long, and not all scripts ask

    run = preparer.run
    units = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for unit in units:
        unit.reshard()  # an evaluation may have left it whole
    gradients: Counter[torch.device] = Counter()
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.is_meta:
            gradients[parameter.device] += own_part(parameter).nbytes
    columns = {
        "gathered": {run.device: _gathered(units)},
        "parameters": bytes_by_device(storages(model.parameters())),
        "buffers": bytes_by_device(storages(model.buffers())),
        "gradients": gradients,
    }
    whole: dict[str, Any] = {"rank": run.topology.rank}
    if loader is not None or loss is not None:
        steps = _training_steps(preparer, model, optimizer, loader, loss)
        columns |= steps.measure()
        whole |= {"samples": steps.samples, "step_s": steps.seconds}
    elif optimizer is not None:
        state = state_bytes(optimizer)
        columns["state"] = state or {}
        whole |= {"state": None} if state is None else {}
    others = {device for sizes in columns.values() for device in sizes} - {run.device}
    devices = [run.device, *sorted(others, key=lambda device: (device.type, device.index or 0))]
    own = []
    for device in devices:
        sizes = {name: sizes[device] for name, sizes in columns.items() if device in sizes}
        own.append(DeviceMemory(device=str(device), **{**whole, **sizes}))
    if isinstance(model, DataParallel):
        own = _replicas(own, model, whole.get("samples"))
    every = run.collectives.exchange([asdict(row) for row in own])
    rows = tuple(DeviceMemory(**row) for of_rank in every for row in of_rank)
    stages = run.collectives.data_parallel.size < run.topology.size
    return Memory(strategy=preparer.strategy.name, devices=rows, stages=stages)


def _replicas(
    rows: list[DeviceMemory], model: DataParallel, samples: int | None
) -> list[DeviceMemory]:
    """The rows of a process with several devices; where replicas share one, as if they did not.

    Each but the first holds a copy of the parameters, and of their gradients when they go back.
    """
    home = rows[0]
    sizes: list[Any] = [None] * model.num_replicas if samples is None else model.sizes(samples)
    if len(set(model.devices)) == model.num_replicas:
        of = {str(device): size for device, size in zip(model.devices, sizes, strict=True)}
        return [
            replace(
                row,
                samples=of.get(row.device),
                gradients=home.gradients if row.device in of else row.gradients,
            )
            for row in rows
        ]
    activations: list[Any] = sizes
    if samples is not None:
        # By samples: layers that the replicas compute together keep for all of them.
        activations = [(home.activations or 0) * size // max(1, sum(sizes)) for size in sizes]
    made = [
        replace(home, device=f"{_REPLICA}{n}", samples=size, activations=kept)
        for n, (size, kept) in enumerate(zip(sizes, activations, strict=True))
    ]
    loss = None if samples is None else 0
    copies = home.parameters
    others = [
        replace(row, parameters=0, copies=copies, state=0, loss=loss, peak=None) for row in made[1:]
    ]
    return [made[0], *others]


def _gathered(units: Sequence[nn.Module]) -> int:
    """Bytes for the largest unit; of a model's units, the outermost first."""
    known: set[int] = set()
    needed = [0]
    for unit in reversed(units):  # those inside of it have been counted
        own = [p for p in unit.parameters() if id(p) not in known]
        known.update(map(id, own))
        held = int(unit is units[0])  # the outermost stays whole: among the copies
        needed.append(sum((1 - held + 2 * p.requires_grad) * p.nbytes for p in own))
    return max(needed)


def state_bytes(optimizer: Optimizer) -> dict[torch.device, int] | None:
    """The bytes of an optimizer's state by device, before its first step too.

    Then a copy of the optimizer makes one step over parameters of the same shapes without data
    (torch's meta device), which shows what it will keep. None where it cannot (LBFGS needs data).
    """
    inner = optimizer.inner if isinstance(optimizer, PreparedOptimizer) else optimizer
    if inner.state:
        return bytes_by_device(storages(state_of(inner)))
    stand_in = copy(inner)
    stand_in.state = type(inner.state)(dict)
    where: dict[Tensor, torch.device] = {}
    stand_in.param_groups = []
    for group in inner.param_groups:
        trained = [p for p in group["params"] if p.requires_grad]
        made = [_without_data(p) for p in trained]
        where |= dict(zip(made, (p.device for p in trained), strict=True))
        flags: Any = {name: False for name in ("foreach", "fused", "capturable") if name in group}
        stand_in.param_groups.append({**group, **flags, "params": made})
    step: Any = type(inner).step
    try:
        # Without what torch and others have wrapped around it: this step is nobody's business.
        getattr(step, "__wrapped__", step)(stand_in)
    except Exception:
        return None
    sizes: Counter[torch.device] = Counter()
    for parameter, device in where.items():
        kept = [v for v in stand_in.state.get(parameter, {}).values() if isinstance(v, Tensor)]
        sizes[device] += sum(v.nbytes for v in kept if v.dim())
    return sizes


def _without_data(parameter: Tensor) -> nn.Parameter:
    own = own_part(parameter)
    made = nn.Parameter(torch.empty_like(own, device="meta"))
    made.grad = torch.empty_like(own, device="meta")
    return made


def _unit(devices: Iterable[DeviceMemory]) -> tuple[int, str]:
    """The unit in which the largest figure has one digit or more before the point."""
    largest = max((max(d.counted, d.peak or 0) for d in devices), default=0)
    return next((unit for unit in _UNITS if largest >= 10 * unit[0]), _UNITS[-1])


def _shown(name: str, value: float, size: int) -> str:
    if name == "samples":
        return str(value)
    return f"{value * 1e3:,.1f} ms" if name == "step_s" else f"{value / size:,.1f}"


def _line(label: str, values: Iterable[object]) -> str:
    return f"  {label:<18}" + "".join(f"{value!s:>{_WIDTH}}" for value in values)


def _training_steps(
    preparer: Preparer, model: nn.Module, optimizer: Any, loader: Any, loss: Any
) -> TrainingSteps:
    """Raises UsageError where a part is missing or not prepared, or the loader is in use."""
    prepared = isinstance(optimizer, PreparedOptimizer) and isinstance(loader, Loader)
    if loss is None or not prepared:
        given = ", ".join(type(part).__name__ for part in (optimizer, loader, loss))
        raise UsageError(
            f"world.memory with {given} as optimizer, loader and loss",
            "training steps need all three, and the first two as world.prepare returned them",
            "call world.memory(model, optimizer, loader, loss) with these, or "
            "world.memory(model, optimizer) to count without a step",
        )
    if loader.steps == 0 or (loader.mid_epoch and loader.start == 0):
        raise UsageError(
            "world.memory with a loader that has no batch to give",
            "it is empty" if loader.steps == 0 else "a loop over it is running",
            "call it before the loop, with data for one global batch at least",
        )
    if preparer.virtual_ranks is not None:
        raise UsageError(
            "world.memory with training steps under strategy='diloco'",
            "they would be steps of the replicas, which are not put back",
            "call world.memory(model, optimizer) to count without a step",
        )
    return TrainingSteps(preparer, model, optimizer, loader, loss)


@dataclass
class TrainingSteps:
    """Training steps to be measured: collective, all ranks take them."""

    preparer: Preparer
    model: nn.Module
    optimizer: PreparedOptimizer
    loader: Loader
    loss: Callable[[nn.Module, Any], Tensor]
    samples: int = 0
    """Of this rank's first micro-batch, at which the activations were counted."""
    seconds: float = 0.0
    """Of a step."""
    _sizes: dict[str, dict[torch.device, int]] = field(default_factory=dict)
    _gradients: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)
    """Where they are after a backward pass; what outlives the clearing is a bucket."""

    def __post_init__(self) -> None:
        self._run = self.preparer.run
        self._gpus = gpus_of(self._run, [self.model])

    def measure(self) -> dict[str, dict[torch.device, int]]:
        """Takes some steps and puts everything back.

        The first step shows what is kept, the second the peak, the others are timed.

        Returns:
            Bytes by device: `copies`, `activations`, `loss`, `state`, `peak`; see `DeviceMemory`.
        """
        with self._put_back(), closing(self._endless()) as batches:
            self._step(batches, look=True)
            self._sizes["state"] = bytes_by_device(storages(state_of(self.optimizer.inner)))
            self._sizes["peak"] = self._peak(batches)
            self.seconds = statistics.median(self._step(batches) for _ in range(_TIMED))
        return self._sizes

    def _endless(self) -> Generator[Any]:
        while True:
            yield from self.loader

    def _step(
        self,
        batches: Iterator[Any],
        watch: AbstractContextManager[Any] | None = None,
        *,
        look: bool = False,
    ) -> float:
        """One training step, under `watch`; the seconds it took without the loader.

        With `look` it is seen what the forward pass of its first micro-batch keeps.
        """
        seconds, last = 0.0, False
        while not last:
            batch = next(batches)
            present = self.loader.current
            last = present.last
            begin = synchronized_time(self._gpus)
            with watch or nullcontext():
                with self._look(present.local_rows) if look and present.first else nullcontext():
                    loss = self.loss(self.model, batch)
                self.preparer.backward(loss)
                if look:
                    gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
                    self._gradients = [weakref.ref(storage) for storage in storages(gradients)]
                self.optimizer.step()
                self.optimizer.zero_grad()
            seconds += synchronized_time(self._gpus) - begin
        return seconds

    @contextmanager
    def _look(self, samples: int) -> Iterator[None]:
        """Around the forward pass and the loss, which must be alive at the end of it."""
        own = storages([*self.model.parameters(), *self.model.buffers()])
        calls: list[SavedTensors] = []
        outside = SavedTensors()
        used: set[torch.UntypedStorage] = set()

        def watch(arguments: Any) -> AbstractContextManager[Any]:
            calls.append(SavedTensors(arguments))
            return calls[-1].watch()

        with outside.watch(), _around_calls(self.model, watch), self._parameters_in_use(used):
            yield
        self.samples = samples
        copies = used - own
        counted = own | copies
        activations: Counter[torch.device] = Counter()
        for call in calls:
            activations.update(call.count(counted))
        self._sizes = {
            "copies": bytes_by_device(copies),
            "activations": activations,
            "loss": outside.count(counted),
        }

    @contextmanager
    def _parameters_in_use(self, used: set[torch.UntypedStorage]) -> Iterator[None]:
        """Adds the parameters that each layer computes with, where they are not its own."""
        spread = any(map(is_sharded, self.model.parameters()))

        @outside_compiled_code
        def look(module: nn.Module, args: Any) -> None:
            used.update(storages(module.parameters(recurse=False)))

        copied = isinstance(self.model, DataParallel)
        with ExitStack() as hooks:
            for module in self.model.modules() if spread or copied else ():
                hooks.enter_context(module.register_forward_pre_hook(look))
            yield

    def _peak(self, batches: Iterator[Any]) -> dict[torch.device, int]:
        """The most memory that tensors take at one time in a step, by device."""
        if self._run.device.type == "cuda":
            devices = {self._run.device, *self._sizes["activations"], *self._sizes["loss"]}
            for device in devices:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            self._step(batches)
            return {device: torch.cuda.max_memory_allocated(device) for device in devices}
        live = LiveTensors()
        live.hold(storages([*self.model.parameters(), *self.model.buffers()]))
        live.hold(storages(state_of(self.optimizer.inner)))
        live.hold(held for gradient in self._gradients for held in [gradient()] if held is not None)
        here = threading.get_ident()

        def in_other_threads(args: Any) -> AbstractContextManager[Any]:
            return nullcontext() if threading.get_ident() == here else live

        with _around_calls(self.model, in_other_threads):
            self._step(batches, live)
        return {torch.device("cpu"): live.peak}

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """Restores model, optimizer, loader, scaler, counters and random streams on leaving."""
        loader, inner, precision = self.loader, self.optimizer.inner, self.preparer.precision
        # Those of a pipeline's other stages have no data.
        held = [*self.model.parameters(), *self.model.buffers()]
        values = [tensor for tensor in held if not tensor.is_meta]
        kept: list[dict[Any, Any]] = [*inner.state.values(), *inner.param_groups]
        state: dict[Any, Any] = inner.state
        values += [v for each in kept for v in each.values() if isinstance(v, Tensor)]
        old = [(state, dict(state)), *((each, _settings(each)) for each in kept)]
        buffers = [members(part).buffers for part in self.model.modules()]
        old += [(own, dict(own)) for own in buffers]
        scaler = precision.state_dict()
        position, trained = loader.state_dict(), loader.trained
        with restored(old, values, self._gpus), self._run.step.preserved():
            try:
                yield
            finally:
                loader.load_state_dict(position)
                loader.trained = trained
                self.optimizer.zero_grad()
                precision.load_state_dict(scaler)


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


def storages(tensors: Iterable[Tensor]) -> set[torch.UntypedStorage]:
    """The storages of dense tensors; each is one and the same object while it is held."""
    own = (own_part(tensor) for tensor in tensors)
    dense = (t for t in own if t.layout is torch.strided and t.device.type != "meta")
    return {tensor.untyped_storage() for tensor in dense}


def bytes_by_device(held: Iterable[torch.UntypedStorage]) -> Counter[torch.device]:
    """The bytes of storages that are held, by the device they are on."""
    sizes: Counter[torch.device] = Counter()
    for storage in held:
        sizes[storage.device] += storage.nbytes()
    return sizes


class SavedTensors:
    """What autograd keeps of forward passes for the backward pass, once per storage.

    torch hands out each tensor that an operation saves (`torch.autograd.graph.saved_tensors_hooks`,
    see the tutorial "Hooks for autograd saved tensors"). A storage that was given back since, as
    FSDP does with gathered parameters, has no bytes when it is counted.

    Args:
        arguments: of the pass: of these only what it was given counts, where it is a view.
    """

    def __init__(self, arguments: Any = ()) -> None:
        self._saved: set[torch.UntypedStorage] = set()
        self._inputs: Counter[torch.UntypedStorage] = Counter()
        """Bytes of each: a replica's inputs are views of the whole batch."""
        for tensor in tensors(arguments):
            for storage in storages([tensor]):
                self._inputs[storage] += tensor.nbytes

    def watch(self) -> saved_tensors_hooks:
        """To be entered around a forward pass, in the thread that makes it."""
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def count(self, counted: set[torch.UntypedStorage]) -> Counter[torch.device]:
        """The bytes of what is not counted yet, by device; adds to what is counted."""
        sizes: Counter[torch.device] = Counter()
        for storage in self._saved & self._inputs.keys():
            sizes[storage.device] += min(storage.nbytes(), self._inputs[storage])
        new = self._saved - self._inputs.keys() - counted
        counted |= new
        return sizes + bytes_by_device(new)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._saved.update(storages([tensor]))
        return tensor.detach()  # an output that is kept as it is would keep itself


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of the tensors alive on the CPU that a step has touched, and the most at any time.

    To be entered around a step, in each of its threads. Every operation says what it takes and
    makes; a storage counts from then until it is freed.
    Memory that a kernel takes for itself and gives back before it returns is not seen, and what
    all ranks reduce through is not counted: it is there once, whatever the model.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        shared = routing.shared_memory()
        self._left_out = None if shared is None else shared.address
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
                if storage.device.type == "cpu" and storage.data_ptr() != self._left_out:
                    self._bound += max(0, storage.nbytes() - self._sizes.get(storage, 0))
                    self._sizes[storage] = storage.nbytes()
            if self._bound > self.peak:
                self._bound = self.total
                self.peak = max(self.peak, self._bound)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs, result))
        self.hold(storages(t for t in leaves if isinstance(t, Tensor)))
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

    @outside_compiled_code
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        context = make((args, kwargs))
        context.__enter__()
        entered.contexts = [*getattr(entered, "contexts", ()), context]

    @outside_compiled_code
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        entered.contexts.pop().__exit__(None, None, None)

    entering = module.register_forward_pre_hook(enter, with_kwargs=True)
    with entering, module.register_forward_hook(leave, always_call=True):
        yield
