"""The interface of a strategy: how a module is spread over the ranks.

A strategy is a frozen set of options. `World` calls, on every rank:

1. `check(run)`: once, when the run is joined; then `part`, `shares`, `devices` and
   `micro_batch_size`, which say how the global batch is divided.
2. `wrap(module, run)`: once for every module given to `prepare`; returns what the user calls, with
   the reasons of what was chosen.
3. `backward(modules, loss, precision)`: for every micro-batch.
4. `total_norm(parameters, norm_type)`: where gradients are clipped.
5. `before_step(module, optimizer)`: before each real step of an optimizer that holds parameters of
   the module, which is the one that `wrap` returned.
6. `after_step(module)`: after it.
7. `release(module)`: when the run is left.

3 to 6 may communicate: every rank takes the same steps. The methods that are not abstract do what
is right where every rank holds the whole module and computes a part of the batch of its own.

Attributes that a forward pass of the user's may set on its modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.data.shares import first_shares
from lockstep.distributed import collectives
from lockstep.distributed.process_group import Run
from lockstep.distributed.topology import DataParallelRank, Topology
from lockstep.errors import UsageError
from lockstep.optim.precision import Precision
from lockstep.settings import Choice

_TOGETHER = 2**25
"""Bytes that are sent at a time."""


class Wrapped(NamedTuple):
    """A module as the user calls it, and what was chosen on the way."""

    module: nn.Module
    choices: list[Choice]
    replaced: Sequence[tuple[nn.Parameter, nn.Parameter | None]] = ()
    """Parameters of the user's module that an optimizer must not hold any more, each with what it
    holds instead; None: it lives on other ranks."""


def place(module: nn.Module, device: torch.device) -> list[Choice]:
    """Moves a module to its device, unless it is spread over several GPUs by hand."""
    gpus = sorted({str(p.device) for p in module.parameters() if p.device.type == "cuda"})
    if len(gpus) < 2:
        module.to(device)
        return []
    return [Choice("devices", ", ".join(gpus), "the model is spread over them; left as it is")]


def take_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Gives tensors the first rank's values, as bytes: no backend knows all dtypes.

    Args:
        tensors: equal in number, shape and dtype on all ranks; on devices of the backend.
        group: None: all ranks.

    Raises:
        UsageError: one of them is sparse.
    """
    alike: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise UsageError(
                "world.prepare of a model that holds a sparse tensor",
                f"a buffer or parameter of shape {tuple(tensor.shape)} has the layout "
                f"{tensor.layout}, and only dense ones are made equal on all ranks",
                "register its indices and its values as buffers, or keep it as a plain attribute",
            )
        if any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            tensor.data = tensor.data.contiguous()  # an expanded one has no memory to write to
        if tensor.numel():
            alike.setdefault(tensor.device, []).append(tensor.detach())
    for waiting in alike.values():
        while waiting:
            count, size = 1, waiting[0].nbytes
            while count < len(waiting) and size + waiting[count].nbytes <= _TOGETHER:
                size += waiting[count].nbytes
                count += 1
            _send(waiting[:count], group)
            del waiting[:count]


def _send(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    data = [collectives.to_bytes(tensor) for tensor in tensors]
    flat = torch.cat(data) if len(data) > 1 else data[0]
    dist.broadcast(flat, group=group, group_src=0)
    for tensor, came in zip(tensors, torch.split(flat, [len(each) for each in data]), strict=True):
        if came.data_ptr() != tensor.data_ptr():  # its own memory has come already
            # A copy of its own is aligned, as its dtype must be.
            tensor.copy_(collectives.from_bytes(came.clone(), tensor.dtype, tensor.shape))


class Strategy(ABC):
    """How modules are spread over the ranks."""

    name: ClassVar[str]

    autotunes: ClassVar[bool] = False
    """`shares="auto"` and `micro_batch_size="auto"` can be found: a wrapped module computes any
    number of samples without other ranks."""

    static_graph: bool = False
    """Passes through the model are all like the first one, so a batch is not computed in parts."""

    unfreezes: ClassVar[bool] = False
    """Parameters that were frozen in `wrap` may be trained later."""

    writes_at_backward: ClassVar[bool] = True
    """Gradients are written in `backward` alone."""

    evaluates_together: ClassVar[bool] = False
    """A forward pass without gradients, too, involves other ranks: all ranks need to make it."""

    @abstractmethod
    def check(self, run: Run) -> None:
        """Raises SettingError where the run cannot use this strategy."""

    def part(self, topology: Topology) -> DataParallelRank:
        """Which part of every global batch this rank computes."""
        return DataParallelRank(topology.rank, topology.size)

    def shares(self, run: Run) -> tuple[int, ...]:
        """How a global batch is divided over its parts: one whole number each.

        Raises:
            SettingError: the shares that were set do not fit the run.
        """
        return first_shares(run.settings.shares, run.collectives.data_parallel.size)

    def devices(self, run: Run) -> int:
        """Devices that divide a global batch, whether or not each has a process."""
        return run.collectives.data_parallel.size

    def micro_batch_size(self, run: Run, largest: int | str | None) -> int | str | None:
        """The most samples this process computes at a time.

        Args:
            run: the run.
            largest: for one device, as the user has set it.
        """
        return largest

    def pieces(self, run: Run) -> int:
        """Into how many micro-batches a global batch is cut at least, where it has the samples."""
        return run.settings.pieces

    def statistics_group(self, run: Run) -> dist.ProcessGroup | None:
        """The ranks over which BatchNorm takes its statistics, where the batch has several parts.

        None: all ranks.
        """
        return None

    @abstractmethod
    def wrap(self, module: nn.Module, run: Run) -> Wrapped:
        """The module, on its device, as the user calls it."""

    def backward(
        self, modules: Sequence[nn.Module], loss: Tensor, precision: Precision, **options: Any
    ) -> None:
        """The backward pass of a loss that is weighted already.

        Args:
            modules: all that `wrap` has returned.
            loss: one element.
            precision: makes the pass, scaling the loss where it must.
            **options: of `torch.autograd.backward`.
        """
        precision.backward(loss, **options)

    def gradients(self, module: nn.Module) -> Iterator[Tensor]:
        """What backward passes have left on this rank, in whatever form."""
        return (p.grad for p in module.parameters() if p.grad is not None)

    def keeps_gradients(self, module: nn.Module) -> bool:
        """Whether those of micro-batches add up where no `zero_grad` reaches them."""
        return False

    def total_norm(self, parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
        """The norm of the whole gradient over all ranks, a plain tensor on every rank."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)

    @abstractmethod
    def before_step(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Raises UsageError where the gradients are not those of the global batch."""

    @abstractmethod
    def after_step(self, module: nn.Module) -> None:
        """Raises RanksDifferError where the ranks have parted."""

    @abstractmethod
    def release(self, module: nn.Module) -> None:
        """Lets go of the process group; the module can still evaluate."""


PLAIN = frozenset(vars(nn.Module()))
"""Those that every module has; what is in them is known, or of no matter."""


def may_set(part: nn.Module) -> bool:
    """Whether a module's forward is the user's: torch's own layers keep nothing between calls."""
    return not type(part).__module__.startswith("torch.nn.")
