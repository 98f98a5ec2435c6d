"""The interface of a strategy: how a module is spread over the ranks.

A strategy is a frozen set of options. `plan` divides every global batch over the ranks, and `wrap`
turns a module of the user into a `PreparedModule`: the object that the user calls, and what the
rest of Lockstep has to know about it.

On every rank these methods are called in this order:

1. `plan(run)`, once, when the process joins the run;
2. `wrap(module, run)`, for every module that is given to `World.prepare`;
3. `backward(modules, loss, precision)`, for every micro-batch;
4. `total_norm(parameters, norm_type)`, where gradients are clipped;
5. the methods of the extensions that `wrap` returned, for every event of the training
   (`session.extension`), after the prepared optimizers and before the checks.

Steps 3 to 5 may communicate, so all ranks take the same steps. The methods that are not abstract
are right for every strategy in which each rank has the whole module and computes its own part of
the batch.
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

from lockstep.batch.plan import part_sizes
from lockstep.batch.shares import initial_shares
from lockstep.communication.compressed_means import CompressedMeans
from lockstep.communication.groups import open_groups
from lockstep.distributed.process_group import Run
from lockstep.distributed.topology import DataParallelRank
from lockstep.errors import LockstepError, SettingError, UsageError, add_note_once
from lockstep.optim.precision import Precision
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch, VirtualRanks
from lockstep.session.step import CHECK_EVERY
from lockstep.settings import Choice, check_number_of_processes, too_few_virtual_ranks_error


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """How the ranks and devices of a run divide every global batch."""

    rank: DataParallelRank
    """Which of the loader's parts this rank computes."""
    shares: tuple[int, ...]
    """How large the loader's parts are in relation to each other, one number for each part."""
    num_devices: int
    """How many devices of the whole run divide a global batch. A process may have several."""
    local_devices: Sequence[int]
    """The numbers of this process's devices among all of them, from 0."""
    device_shares: tuple[int, ...] | None = (1,)
    """The shares of this process's devices. None if they still have to be measured."""
    num_micro_batches: int
    """A global batch is divided into at least this many micro-batches if it has enough samples."""
    statistics_group: str = ""
    """The name in `run.groups` of the ranks over which BatchNorm computes its statistics. Empty
    for all ranks."""
    evaluation_is_collective: bool = False
    """True if forward passes without gradients involve other ranks too, so that all ranks have to
    make them."""
    can_autotune: bool = False
    """True if `shares="auto"` and `micro_batch_size="auto"` are possible, because a wrapped module
    computes any number of samples without other ranks."""
    static_graph: bool = False
    """True if every forward pass of the training has to use the same operations."""
    virtual_ranks: VirtualRanks | None = None
    """The virtual ranks (`session.micro_batch`), whose number does not depend on the number of
    processes. None: there are none."""

    def micro_batch_size(self, per_device: int | str | None) -> int | str | None:
        """Returns how many samples this process may compute at a time.

        With m samples a device gets at most ceil(m * its share / sum of shares). The result is the
        largest m with which no device gets more than `per_device` samples.

        Args:
            per_device: the setting of the user. "auto" and None are returned as they are.

        Raises:
            SettingError: the shares are not known yet.
        """
        if not isinstance(per_device, int) or per_device < 1:
            return per_device

        if self.device_shares is None:
            raise SettingError(
                f"micro_batch_size={per_device} and shares='auto' over several devices of a "
                "process",
                "how many samples that is over all devices depends on shares not yet known",
                "set micro_batch_size='auto' too, or give the shares",
            )

        return per_device * sum(self.device_shares) // max(self.device_shares)


def plan_for(run: Run, rank: DataParallelRank) -> StrategyPlan:
    """Returns the plan of a strategy in which one device computes each of the loader's parts.

    Args:
        run: of this process.
        rank: the part that this rank computes, and the number of parts.

    Raises:
        SettingError: the shares do not fit the number of parts.
    """
    shares = initial_shares(run.settings.shares, rank.size)
    return StrategyPlan(
        rank=rank,
        shares=shares,
        num_devices=rank.size,
        local_devices=(rank.rank,),
        num_micro_batches=max(run.settings.min_micro_batches, run.settings.num_micro_batches or 1),
        virtual_ranks=planned_virtual_ranks(run, shares),
    )


def refuse_virtual_ranks(
    run: Run,
    strategy: str,
    reason: str,
    do: str = "use strategy='single', 'ddp', 'fsdp' or 'hsdp', or leave virtual_ranks out",
) -> None:
    """Raises SettingError if virtual ranks were asked for, under a strategy without them.

    Args:
        run: of this process.
        strategy: its name.
        reason: why it cannot have them.
        do: what to do.
    """
    if run.settings.virtual_ranks is not None:
        raise SettingError(
            f"virtual_ranks={run.settings.virtual_ranks} with strategy={strategy!r}",
            reason,
            do,
        )


def planned_virtual_ranks(run: Run, shares: tuple[int, ...]) -> VirtualRanks | None:
    """Returns the virtual ranks of a run in which all train one model; None: none were asked for.

    Args:
        run: of this process.
        shares: one for each rank.

    Raises:
        SettingError: some rank would have no virtual rank to compute.
    """
    number = run.settings.virtual_ranks
    if number is None:
        return None

    num_ranks = len(shares)
    numbers_of_ranks = part_sizes(number, shares)
    if 0 in numbers_of_ranks:
        error = too_few_virtual_ranks_error(number, num_ranks)
        if len(set(shares)) > 1:
            divided = ", ".join(str(number_of_rank) for number_of_rank in numbers_of_ranks)
            found = f"shares {':'.join(map(str, shares))} give the processes {divided} of them"
            error = SettingError(error.was_set, found, error.do)
        raise error

    return VirtualRanks(count=number, train_copies=False)


def open_group(run: Run, name: str, ranks: Tensor) -> dist.ProcessGroup:
    """Opens a process group for each row of a table of ranks. All ranks have to call it.

    Args:
        run: which closes the groups at its end.
        name: of the group in `run.groups`.
        ranks: a table that has every rank of the run once, shape `(groups, ranks of a group)`.

    Returns:
        The group that this rank belongs to.
    """
    group = open_groups(ranks.tolist(), name, timeout=run.settings.collective_timeout)
    run.groups[name] = group
    return group


class EqualTensors(NamedTuple):
    """Tensors, by name, that must have the same bits on several ranks.

    Tensors on the meta device belong to other ranks and are not compared.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    group: dist.ProcessGroup | None = None
    """The ranks that have them. None for all ranks."""

    @classmethod
    def of(cls, module: nn.Module, group: dist.ProcessGroup | None = None) -> EqualTensors:
        """Returns all parameters and buffers of a module."""
        return cls(dict(module.named_parameters()), dict(module.named_buffers()), group)


class VirtualRankState(Protocol):
    """What a checkpoint keeps of a module that each virtual rank trains by itself."""

    own: Sequence[int]
    """The virtual ranks that this process computes."""

    def shared_state(self) -> Any:
        """Returns what all ranks share besides the module's own state."""

    def virtual_rank_state(self, number: int) -> Any:
        """Returns what one of this process's virtual ranks has of its own."""

    def check(self, shared: Any) -> None:
        """Raises CheckpointError if what `shared_state` returned cannot be loaded."""

    def load(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Loads what `shared_state` and `virtual_rank_state` returned."""


@dataclass(frozen=True, kw_only=True)
class PreparedModule:
    """A module as `World.prepare` returns it, and what the rest of Lockstep must know about it."""

    module: nn.Module
    """The object that the user calls."""
    choices: list[Choice] = field(default_factory=list)
    """What the strategy decided for this module, with its reasons. Rank 0 prints it."""
    replaced_parameters: Sequence[tuple[nn.Parameter, nn.Parameter | None]] = ()
    """Parameters of the user's module that an optimizer must not hold any more, each with the
    parameter that took its place. None if that one is on other ranks."""
    may_unfreeze: bool = False
    """True if parameters that are frozen now may be trained later."""
    unsharded_parameters: Sequence[nn.Parameter] = ()
    """The parameters that forward passes use, if the parameters of `module` are shards."""
    zero_grad_misses_gradients: bool = False
    """True if gradients of micro-batches add up in tensors that no `zero_grad` reaches."""
    gradients_after_backward: bool = False
    """True if gradients are also written after `backward` has returned."""
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    """Submodules that communicate in their forward pass, by name."""
    equal_tensors: Callable[[], Iterable[EqualTensors]] = tuple
    """Returns the tensors that must be equal on several ranks; called when they are compared."""
    check_every: int = CHECK_EVERY
    """Global batches between two comparisons of these tensors. 0 for no comparison."""
    extensions: Sequence[Extension] = ()
    """What the strategy does with this module in each step."""
    gradient_bits: Callable[[], dict[str, Tensor]] | None = None
    """Returns a sum of the bits of each parameter's gradient, by name, for the virtual rank whose
    backward pass has just ended, if it `is_compared`. None: the gradients are in `parameter.grad`.
    """
    compressed: CompressedMeans | None = None
    """The compressor of the gradients, if there is one. Checkpoints save its rounding errors."""
    virtual_rank_state: VirtualRankState | None = None
    """Access to the state that each virtual rank has of this module, if there are virtual ranks."""


def changed_parameters_error(found: str) -> UsageError:
    """Returns the error for trained parameters that are not the ones that were prepared.

    Args:
        found: which parameters, and how they changed.
    """
    return UsageError(
        "parameters added, replaced, unfrozen or moved after world.prepare",
        found,
        "change the model first, then call world.prepare",
        code="LS303",
    )


_EMPTY_PART_NOTE = "lockstep: this rank"
"""How the note of `note_empty_part` begins."""


def note_empty_part(error: BaseException | None, micro_batch: MicroBatch) -> None:
    """Adds a note to an error, once, if this rank had no samples when it was raised.

    Many functions of torch refuse tensors without rows, and their errors do not say why there are
    none.
    """
    if not isinstance(error, RuntimeError | ValueError | IndexError | TypeError):
        return
    if isinstance(error, LockstepError):
        return

    rank_has_no_samples = micro_batch.global_samples > 0 and micro_batch.local_rows == 0
    if not rank_has_no_samples:
        return

    found = f"has none of the {micro_batch.global_samples} samples of this batch"
    if micro_batch.left_out:
        found = (
            f"has no samples: the collate function left out all {micro_batch.left_out} of its part"
        )

    add_note_once(
        error,
        _EMPTY_PART_NOTE,
        f" {found}, so its tensors have the shape (0, *). Functions of torch "
        "that refuse these get one placeholder row; all else that the script computes beside the "
        "prepared model has to be right for any number of samples; or leave short batches out: "
        "drop_last=True.",
    )


def move_to_device(module: nn.Module, device: torch.device) -> list[Choice]:
    """Moves a module to a device, unless the user has spread it over several GPUs.

    Returns:
        What is to be printed about it: nothing, or that the module stays on its GPUs.
    """
    gpus: set[str] = set()
    for parameter in module.parameters():
        if parameter.device.type == "cuda":
            gpus.add(str(parameter.device))

    if len(gpus) < 2:
        module.to(device)
        return []

    reason = "the model is spread over them; left as it is"
    return [Choice("devices", ", ".join(sorted(gpus)), reason)]


class Strategy(ABC):
    """How modules are spread over the ranks."""

    name: ClassVar[str]

    def plan(self, run: Run) -> StrategyPlan:
        """Returns how a global batch is divided; by default over all ranks, with a device each.

        Raises:
            SettingError: the run cannot use this strategy, or the shares do not fit it.
        """
        return plan_for(run, DataParallelRank(run.topology.rank, run.topology.size))

    def computes_in_half(self, module: nn.Module, run: Run) -> bool:
        """Returns True if `wrap` will give a module parameters in half precision when it runs.

        Under precision bf16 and fp16 its forward pass is then not run under autocast.
        """
        return False

    @abstractmethod
    def wrap(self, module: nn.Module, run: Run) -> PreparedModule:
        """Moves a module to its device and prepares it for the run.

        Parameters may be NaN: values of a model that was built on the meta device are computed
        later, unless `needs_values`.
        """

    def spreads_model(self, run: Run) -> bool:
        """Returns True if ranks have parts of the model.

        Then `wrap` is given parameters on the meta device, and gives memory to this rank's part.
        """
        return False

    @property
    def needs_values(self) -> bool:
        """True if `wrap` copies parameters, so that they must have their values."""
        return False

    def backward(
        self, modules: Sequence[nn.Module], loss: Tensor, precision: Precision, **options: Any
    ) -> None:
        """Runs the backward pass of a loss that is already weighted.

        Args:
            modules: all modules that `wrap` has returned.
            loss: a tensor of one element.
            precision: scales the loss, if needed, and runs the pass.
            **options: arguments of `torch.autograd.backward`.
        """
        precision.backward(loss, **options)

    def total_norm(self, parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
        """Returns the norm of the gradient of the whole model, a plain tensor, on every rank."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """One process on one device: plain torch, which all other strategies are compared with."""

    name: ClassVar[str] = "single"

    def plan(self, run: Run) -> StrategyPlan:
        """Raises SettingError on more than one process."""
        check_number_of_processes(self.name, run.topology.size)
        return replace(super().plan(run), can_autotune=True)

    def wrap(self, module: nn.Module, run: Run) -> PreparedModule:
        """Returns the module itself, on its device."""
        choices = move_to_device(module, run.device)
        return replace(on_one_process(module, run), choices=choices)


def on_one_process(module: nn.Module, run: Run) -> PreparedModule:
    """Returns a module as it is prepared if there is one process: nothing is sent."""
    if run.settings.virtual_ranks is None:
        return PreparedModule(module=module)

    # These modules need what is defined above.
    from lockstep.strategies.virtual_rank_buffers import VirtualRankBuffers
    from lockstep.strategies.virtual_ranks import VirtualRankGradients, make_virtual_rank_tree

    tree = make_virtual_rank_tree(run)
    gradients = VirtualRankGradients(list(module.parameters()), tree, run.step, single_process=True)
    buffers = VirtualRankBuffers(module, tree, run.step)
    return PreparedModule(module=module, extensions=[gradients, buffers])


class ModuleWrapper(nn.Module):
    """A wrapper around the user's module, which is its attribute `module`.

    Attributes that the user sets on the wrapper are set on the user's module if it has them, so
    that scripts work the same with and without the wrapper.
    """

    _is_initialized = False
    """True once the wrapper has all of its own attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the user's module, or of the wrapper if the module has none such."""
        belongs_to_wrapper = (
            not self._is_initialized or name in self.__dict__ or hasattr(type(self), name)
        )
        if not belongs_to_wrapper and hasattr(self.module, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)


MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes that every module has. None of them holds results of a forward pass."""


def may_set_attributes(module: nn.Module) -> bool:
    """Returns True if a forward pass may set attributes of a module; torch's own layers do not."""
    return not type(module).__module__.startswith("torch.nn.")


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns all parameters of an optimizer, in the order of its groups."""
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters
