"""The interface of a strategy: how a module is spread over the ranks.

A strategy is a frozen set of options. On every rank

1. `plan(run)` is called once, when the run is joined: how every global batch is divided;
2. `wrap(module, run)` for every module given to `prepare`: what the user calls, with the reasons of
   what was chosen and the facts that the guards go by;
3. `backward(modules, loss, precision)` for every micro-batch;
4. `total_norm(parameters, norm_type)` where gradients are clipped;
5. the extensions that `wrap` returned are told of all that happens in the training
   (`session.extension`), after the prepared optimizers and before the checks.

3 to 5 may communicate: every rank takes the same steps. The methods that are not abstract do what
is right where every rank holds the whole module and computes a part of the batch of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.batch.shares import first_shares
from lockstep.communication.compression import CompressedMeans
from lockstep.distributed.process_group import Run
from lockstep.distributed.topology import DataParallelRank
from lockstep.errors import LockstepError, SettingError, UsageError
from lockstep.optim.precision import Precision
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.session.step import CHECK_EVERY
from lockstep.settings import Choice


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """How a run's ranks and devices divide every global batch."""

    rank: DataParallelRank
    """Which of the loader's parts this rank computes."""
    shares: tuple[int, ...]
    """Of the loader's parts."""
    devices: int
    """That divide a global batch, whether or not each has a process."""
    own_devices: Sequence[int]
    """Which of these are this process's."""
    device_shares: tuple[int, ...] | None = (1,)
    """Of this process's devices; None: they are still to be measured."""
    num_micro_batches: int
    """Into which a global batch is cut at least, where it has the samples."""
    statistics_group: str = ""
    """Name in `run.groups` of the ranks over which BatchNorm takes its statistics; empty: all."""
    evaluates_together: bool = False
    """A forward pass without gradients, too, involves other ranks: all of them need to make it."""
    autotunes: bool = False
    """`shares="auto"` and `micro_batch_size="auto"` can be found: a wrapped module computes any
    number of samples without other ranks."""
    static_graph: bool = False
    """Every forward pass of the training has to be alike."""
    num_virtual_ranks: int | None = None
    """How many parts of every global batch are computed as if each had a rank of its own, whatever
    the number of processes; None: the parts are those of the ranks."""

    def micro_batch_size(self, of_device: int | str | None) -> int | str | None:
        """The most samples this process computes at a time, of which no device gets more than set.

        A device's part of m samples is at most ceil(m * its share / all shares).

        Raises:
            SettingError: the shares are not known yet.
        """
        if not isinstance(of_device, int) or of_device < 1:
            return of_device
        if self.device_shares is None:
            raise SettingError(
                f"micro_batch_size={of_device} and shares='auto' over several devices of a process",
                "how many samples that is over all devices depends on shares not yet known",
                "set micro_batch_size='auto' too, or give the shares",
            )
        return of_device * sum(self.device_shares) // max(self.device_shares)


def plan_for(run: Run, rank: DataParallelRank) -> StrategyPlan:
    """How a global batch is divided over parts that one device computes each.

    Raises:
        SettingError: shares that do not fit.
    """
    return StrategyPlan(
        rank=rank,
        shares=first_shares(run.settings.shares, rank.size),
        devices=rank.size,
        own_devices=(rank.rank,),
        num_micro_batches=max(run.settings.min_micro_batches, run.settings.num_micro_batches or 1),
    )


def open_group(run: Run, name: str, ranks: Tensor) -> dist.ProcessGroup:
    """Opens a process group of each row of ranks, for the run; this rank's is returned."""
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())  # type: ignore[no-untyped-call]
    run.groups[name] = group
    return group


class Replicas(NamedTuple):
    """Tensors, by name, that have the same bits on several ranks; those on meta are left out."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    group: dist.ProcessGroup | None = None
    """None: all ranks."""

    @classmethod
    def of(cls, module: nn.Module, group: dist.ProcessGroup | None = None) -> Replicas:
        """All that a module holds."""
        return cls(dict(module.named_parameters()), dict(module.named_buffers()), group)


class VirtualRankState(Protocol):
    """What a checkpoint keeps of a module that each virtual rank trains by itself."""

    own: Sequence[int]
    """The virtual ranks that this process computes."""

    def round_is_over(self) -> bool:
        """Returns True if all virtual ranks have begun again with the shared weights."""

    def shared_state(self) -> Any:
        """Returns what all ranks share besides the module's own state."""

    def virtual_rank_state(self, number: int) -> Any:
        """Returns what one of this process's virtual ranks has of its own."""

    def check(self, shared: Any) -> None:
        """Raises CheckpointError if what `shared_state` returned cannot be loaded."""

    def load(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Loads what `shared_state` and `virtual_rank_state` returned."""


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """A module as the user calls it, what was chosen on the way, and what is known of it."""

    module: nn.Module
    choices: list[Choice] = field(default_factory=list)
    replaced: Sequence[tuple[nn.Parameter, nn.Parameter | None]] = ()
    """Parameters of the user's module that an optimizer must not hold any more, each with what it
    holds instead; None: it lives on other ranks."""
    may_unfreeze: bool = False
    """Parameters that are frozen now may be trained later."""
    whole: Sequence[nn.Parameter] = ()
    """What forward passes compute with, where the parameters are shards."""
    gradients_elsewhere: bool = False
    """True if gradients of micro-batches add up in tensors that no `zero_grad` reaches."""
    gradients_after_backward: bool = False
    """True if gradients are also written after `backward` has returned."""
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    """Submodules that communicate when they run, by name."""
    replicas: Callable[[], Iterable[Replicas]] = tuple
    """What ranks have in common; asked when it is to be compared."""
    check_every: int = CHECK_EVERY
    """Global batches between two comparisons of them; 0: never."""
    extensions: Sequence[Extension] = ()
    """What the strategy does with this module in each step."""
    compressed: CompressedMeans | None = None
    """How gradients are sent; what it still has to send belongs into checkpoints."""
    virtual_rank_state: VirtualRankState | None = None
    """What virtual ranks have of their own of this module; None: there are none."""


def parameters_changed(found: str) -> UsageError:
    """The error of parameters that are trained and are not those that were prepared."""
    return UsageError(
        "parameters added, replaced, unfrozen or moved after world.prepare",
        found,
        "change the model first, then call world.prepare",
        code="LS303",
    )


_EMPTY_PART = "lockstep: this rank"


def note_empty_part(error: BaseException | None, present: MicroBatch) -> None:
    """Says of an error, once, if this rank had no samples where it was raised."""
    if not isinstance(error, RuntimeError | ValueError | IndexError | TypeError):
        return
    told = any(note.startswith(_EMPTY_PART) for note in getattr(error, "__notes__", ()))
    if told or isinstance(error, LockstepError) or not present.global_samples or present.local_rows:
        return
    found = f"has none of the {present.global_samples} samples of this batch"
    if present.left_out:
        found = f"has no samples: the collate function left out all {present.left_out} of its part"
    error.add_note(
        f"{_EMPTY_PART} {found}, so its tensors have the shape (0, *). Functions of torch that "
        "refuse these get one placeholder row; all else that the script computes beside the "
        "prepared model has to be right for any number of samples; or leave short batches out: "
        "drop_last=True."
    )


def place(module: nn.Module, device: torch.device) -> list[Choice]:
    """Moves a module to its device, unless it is spread over several GPUs by hand."""
    gpus = sorted({str(p.device) for p in module.parameters() if p.device.type == "cuda"})
    if len(gpus) < 2:
        module.to(device)
        return []
    return [Choice("devices", ", ".join(gpus), "the model is spread over them; left as it is")]


class Strategy(ABC):
    """How modules are spread over the ranks."""

    name: ClassVar[str]

    def plan(self, run: Run) -> StrategyPlan:
        """How a global batch is divided: here over all ranks, of one device each.

        Raises:
            SettingError: the run cannot use this strategy, or shares that do not fit it.
        """
        return plan_for(run, DataParallelRank(run.topology.rank, run.topology.size))

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

    def total_norm(self, parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
        """The norm of the whole gradient over all ranks, a plain tensor on every rank."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """One process on one device, plain torch: what all other strategies are compared with."""

    name: ClassVar[str] = "single"

    def plan(self, run: Run) -> StrategyPlan:
        """Raises SettingError on more than one process."""
        if run.topology.size > 1:
            raise SettingError(
                "strategy='single'",
                f"world size {run.topology.size}: the processes would train apart",
                "use strategy='ddp', or start one process",
            )
        return replace(super().plan(run), autotunes=True)

    def wrap(self, module: nn.Module, run: Run) -> Wrapped:
        """The module itself, on its device, with nothing around it."""
        return Wrapped(module=module, choices=place(module, run.device))


class Around(nn.Module):
    """A wrapper of the user's `module`: attributes of that one are set there, as on one process."""

    _complete = False
    """Its own attributes are there."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets what is not the wrapper's own in the user's module, if it has it."""
        own = name in self.__dict__ or not self._complete or hasattr(type(self), name)
        if not own and hasattr(self.module, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)


PLAIN = frozenset(vars(nn.Module()))
"""Attributes that every module has; what is in them is known, or of no matter."""


def may_set(part: nn.Module) -> bool:
    """Whether a forward pass of the user's may set attributes: torch's own layers keep nothing."""
    return not type(part).__module__.startswith("torch.nn.")


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All that an optimizer holds, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
