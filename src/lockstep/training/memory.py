"""Memory and time of each device: counted from what is held, and measured in training steps.

Counted are bytes that this strategy leaves on this device: a shard counts as a shard, a view not at
all. Measured is the most that was alive at one time in a training step. Communication: the rows are
exchanged once; the steps communicate as those of a training do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.data.loader import Loader
from lockstep.distributed.process_group import Run
from lockstep.optim.precision import Precision
from lockstep.strategies.data_parallel.module import DataParallel
from lockstep.training.optimizer import PreparedOptimizer
from lockstep.training.profiling import (
    StepProfile,
    TrainingSteps,
    bytes_by_device,
    local,
    state_of,
    storages,
)

_COLUMNS = 8
"""Devices beside each other; more are shown below."""
_WIDTH = 12
_ROWS = (
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
        if any(device.samples is not None for device in devices):
            lines.append(_line("samples at a time", [device.samples for device in devices]))
        for label, name in _ROWS:
            values = [getattr(device, name) for device in devices]
            unknown = name == "state" and None in values
            if unknown or any(getattr(device, name) for device in self.devices):
                shown = ["?" if value is None else f"{value / size:,.1f}" for value in values]
                lines.append(_line(label, shown))
        if any(device.step_s is not None for device in devices):
            times = ["?" if d.step_s is None else f"{d.step_s * 1e3:,.1f} ms" for d in devices]
            lines.append(_line("a step", times))
        return lines


def measure(
    run: Run,
    strategy: str,
    precision: Precision,
    backward: Callable[[Tensor], None],
    *,
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
        run: the present one.
        strategy: its name.
        precision: of its passes.
        backward: as `world.backward`.
        model: prepared.
        optimizer: likewise; None leaves its state out.
        loader: likewise; together with `loss`.
        loss: of the model and a batch, the mean over its samples, as for `world.backward`.

    Returns:
        The figures of all ranks, on every rank.

    Raises:
        UsageError: a part is missing or not prepared, or the loader is in use or empty.
    """
    from torch.distributed.fsdp import FSDPModule  # takes long, and not all scripts ask

    units = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for unit in units:
        unit.reshard()  # an evaluation may have left it whole
    trained = [p for p in model.parameters() if p.requires_grad and not p.is_meta]
    gradients: Counter[torch.device] = Counter()
    for parameter in trained:
        gradients[parameter.device] += _size(local(parameter))
    columns = {
        "gathered": {run.device: _gathered(units)},
        "parameters": bytes_by_device(storages(model.parameters()).values()),
        "buffers": bytes_by_device(storages(model.buffers()).values()),
        "gradients": gradients,
    }
    profile = None
    state = {} if optimizer is None else state_bytes(optimizer)
    if loader is not None or loss is not None:
        steps = TrainingSteps(run, precision, backward, model, optimizer, loader, loss)
        profile = steps.profile()
        columns |= profile.sizes
    else:
        columns["state"] = state or {}
    devices = dict.fromkeys([run.device, *(d for sizes in columns.values() for d in sizes)])
    own = [
        DeviceMemory(
            rank=run.topology.rank,
            device=str(device),
            samples=None if profile is None else profile.samples,
            step_s=None if profile is None else profile.step_s,
            **{name: sizes[device] for name, sizes in columns.items() if device in sizes},
        )
        for device in devices
    ]
    if state is None and profile is None:
        own = [replace(row, state=None) for row in own]
    if isinstance(model, DataParallel):
        own = _replicas(own, model, profile)
    every = run.collectives.exchange([asdict(row) for row in own])
    rows = tuple(DeviceMemory(**row) for of_rank in every for row in of_rank)
    stages = run.collectives.data_parallel.size < run.topology.size
    return Memory(strategy=strategy, devices=rows, stages=stages)


def _replicas(
    rows: list[DeviceMemory], model: DataParallel, profile: StepProfile | None
) -> list[DeviceMemory]:
    """The rows of a process with several devices; where replicas share one, as if they did not.

    Each but the first holds a copy of the parameters, and of their gradients when they go back.
    """
    home = rows[0]
    sizes: list[Any] = [None] * model.count if profile is None else model.sizes(profile.samples)
    if len(set(model.devices)) == model.count:
        of = {str(device): size for device, size in zip(model.devices, sizes, strict=True)}
        rows = [replace(row, samples=of.get(row.device)) for row in rows]
        others = [row.device in of and row is not rows[0] for row in rows]
        return [
            replace(row, gradients=home.gradients) if other else row
            for row, other in zip(rows, others, strict=True)
        ]
    activations: list[Any] = sizes
    if profile is not None:
        # By samples: layers that the replicas compute together keep for all of them.
        activations = [(home.activations or 0) * size // max(1, sum(sizes)) for size in sizes]
    made = [replace(home, device=f"{_REPLICA}0", samples=sizes[0], activations=activations[0])]
    for n in range(1, model.count):
        made.append(
            replace(
                made[0],
                device=f"{_REPLICA}{n}",
                samples=sizes[n],
                parameters=0,
                copies=home.parameters,
                state=0,
                activations=activations[n],
                loss=None if profile is None else 0,
                peak=None,
            )
        )
    return made


def _gathered(units: Sequence[nn.Module]) -> int:
    """Bytes for the largest unit; of a model's units, the outermost first."""
    known: set[int] = set()
    needed = [0]
    for unit in reversed(units):  # those inside of it have been counted
        own = [p for p in unit.parameters() if id(p) not in known]
        known.update(map(id, own))
        held = int(unit is units[0])  # the outermost stays whole: among the copies
        needed.append(sum((1 - held + 2 * p.requires_grad) * _size(p) for p in own))
    return max(needed)


def state_bytes(optimizer: Optimizer) -> dict[torch.device, int] | None:
    """The bytes of an optimizer's state by device, before its first step too.

    Then a copy of the optimizer makes one step over parameters of the same shapes without data
    (torch's meta device), which shows what it will keep. None where it cannot (LBFGS needs data).
    """
    inner = optimizer.inner if isinstance(optimizer, PreparedOptimizer) else optimizer
    if inner.state:
        return bytes_by_device(storages(state_of(inner)).values())
    stand_in = copy(inner)
    stand_in.state = type(inner.state)(dict)
    where: dict[Tensor, torch.device] = {}
    stand_in.param_groups = []
    for group in inner.param_groups:
        trained = [p for p in group["params"] if p.requires_grad]
        made = [_without_data(p) for p in trained]
        where |= dict(zip(made, (p.device for p in trained), strict=True))
        flags: dict[str, Any] = {
            flag: False for flag in ("foreach", "fused", "capturable") if flag in group
        }
        stand_in.param_groups.append({**group, **flags, "params": made})
    step: Any = type(inner).step
    try:
        # Without what torch and others have wrapped around it: this step is nobody's business.
        getattr(step, "__wrapped__", step)(stand_in)
    except Exception:
        return None
    sizes: dict[torch.device, int] = {}
    for parameter, device in where.items():
        kept = [v for v in stand_in.state.get(parameter, {}).values() if isinstance(v, Tensor)]
        sizes[device] = sizes.get(device, 0) + sum(_size(v) for v in kept if v.dim())
    return sizes


def _without_data(parameter: Tensor) -> nn.Parameter:
    own = local(parameter)
    made = nn.Parameter(torch.empty_like(own, device="meta"))
    made.grad = torch.empty_like(own, device="meta")
    return made


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _unit(devices: Iterable[DeviceMemory]) -> tuple[int, str]:
    """The unit in which the largest figure has one digit or more before the point."""
    largest = max((max(d.counted, d.peak or 0) for d in devices), default=0)
    return next((unit for unit in _UNITS if largest >= 10 * unit[0]), _UNITS[-1])


def _line(label: str, values: Iterable[object]) -> str:
    return f"  {label:<18}" + "".join(f"{value!s:>{_WIDTH}}" for value in values)
