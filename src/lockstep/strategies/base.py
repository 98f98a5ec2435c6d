"""The interface of a strategy: how the user's modules are spread over the ranks.

A strategy is a frozen set of options. `plan` decides how every global batch is divided over the
ranks. `wrap` turns a module of the user into a `PreparedModule`: the object that the user calls,
and what the rest of Lockstep has to know about it.

On every rank these methods are called in this order:

1. `plan(run)`, once, when the process joins the run;
2. `wrap(module, run)`, for every module that is given to `World.prepare`;
3. `backward(modules, loss, precision)`, for every micro-batch;
4. `total_norm(parameters, norm_type)`, whenever gradients are clipped;
5. the methods of the extensions that `wrap` returned, for every event of the training
   (`session.extension`), after the prepared optimizers and before the checks.

Steps 3 to 5 may communicate, so all ranks take the same steps. The default implementations are
right for every strategy in which each rank has the whole module and computes its own part of the
batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from lockstep.errors import SettingError, UsageError
from lockstep.machine.topology import DataParallelRank
from lockstep.optim.precision import Precision
from lockstep.session.check_schedule import CHECK_EVERY
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import VirtualRanks
from lockstep.settings import Choice, too_few_virtual_ranks_error
from lockstep.wording import join_first

USE_ALL_IN_EVERY_VIRTUAL_RANK = (
    "use all trained parameters in every virtual rank: call an expert also with no rows, or add "
    "0 * parameter.sum() to what the model returns; or leave virtual_ranks out"
)
"""Advice for models of which virtual ranks use different parameters, such as mixtures of experts.
`find_unused_parameters` does not work with virtual ranks."""


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """How the ranks and devices of a run divide every global batch."""

    rank: DataParallelRank
    """Which part of each global batch the loader of this rank reads."""
    shares: tuple[int, ...]
    """The relative sizes of the parts that the loaders read, one number for each part."""
    num_devices: int
    """The number of devices in the whole run that share a global batch. A process may use several
    devices."""
    local_devices: Sequence[int]
    """The numbers of this process's devices, counted from 0 over the whole run."""
    device_shares: tuple[int, ...] | None = (1,)
    """The shares of this process's devices; None if they still have to be measured."""
    num_micro_batches: int
    """The minimum number of micro-batches in a global batch that has enough samples."""
    statistics_group: str = ""
    """The name in `run.groups` of the ranks over which BatchNorm computes its statistics; empty
    for all ranks."""
    evaluation_is_collective: bool = False
    """True if forward passes without gradients also communicate, so that all ranks must make them
    together."""
    can_autotune: bool = False
    """True if `shares="auto"` and `micro_batch_size="auto"` are supported. They require that a rank
    can run a wrapped module on any number of samples without the other ranks."""
    static_graph: bool = False
    """True if every forward pass of the training must use the same operations."""
    virtual_ranks: VirtualRanks | None = None
    """The virtual ranks (`session.micro_batch`), whose number does not depend on the number of
    processes; None without virtual ranks."""

    def micro_batch_size(self, per_device: int | str | None) -> int | str | None:
        """Converts the user's micro-batch size, which applies to one device, to the whole process.

        For example, with device shares (1, 3) and 6 samples per device, this process may compute 8
        samples at a time: 2 on its first device and 6 on the second.

        Args:
            per_device: the user's setting, the maximum number of samples on one device at a time.
                "auto", None and invalid numbers, which are refused later, are returned unchanged.

        Raises:
            SettingError: the shares of the devices are not known yet.
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

        # Of `n` samples, the device with the largest share computes the fraction `largest / sum`,
        # rounded up. This may be at most `per_device` samples:
        #   n * largest / sum <= per_device, so n <= per_device * sum / largest.
        # In the example above the fraction is 3/4, and n <= 6 * 4 / 3 = 8.
        return per_device * sum(self.device_shares) // max(self.device_shares)


def plan_for(run: Run, rank: DataParallelRank) -> StrategyPlan:
    """Returns the plan of a strategy that divides each global batch into one part for each device.

    Args:
        run: the run of this process. With the shares 1:2 in its settings, for example, the second
            part has twice as many samples as the first one.
        rank: which part this rank computes, and the number of parts.

    Raises:
        SettingError: there are more or fewer shares than parts.
    """
    shares = initial_shares(run.settings.shares, rank.size)
    # `lockstep verify --accumulate` asks for at least `min_micro_batches`.
    num_micro_batches = run.settings.num_micro_batches or 1
    num_micro_batches = max(num_micro_batches, run.settings.min_micro_batches)
    return StrategyPlan(
        rank=rank,
        shares=shares,
        num_devices=rank.size,  # one for each part
        local_devices=(rank.rank,),  # the one device that computes this rank's part
        num_micro_batches=num_micro_batches,
        virtual_ranks=planned_virtual_ranks(run, shares),
    )


def refuse_virtual_ranks(
    run: Run,
    strategy: str,
    reason: str,
    do: str = "use strategy='single', 'ddp', 'fsdp' or 'hsdp', or leave virtual_ranks out",
) -> None:
    """Raises SettingError if the user asked for virtual ranks, for a strategy without them.

    Args:
        run: the run of this process.
        strategy: the name of the strategy.
        reason: why the strategy does not support them, for the message.
        do: what the user can do instead, for the message.
    """
    if run.settings.virtual_ranks is not None:
        raise SettingError(
            f"virtual_ranks={run.settings.virtual_ranks} with strategy={strategy!r}",
            reason,
            do,
        )


def planned_virtual_ranks(run: Run, shares: tuple[int, ...]) -> VirtualRanks | None:
    """Returns the virtual ranks of a run whose ranks all train the same model.

    Args:
        run: the run of this process.
        shares: the share of each rank, which decides how many virtual ranks it computes.

    Returns:
        The virtual ranks, or None if the user did not ask for any.

    Raises:
        SettingError: some rank would have no virtual rank to compute.
    """
    num_virtual_ranks = run.settings.virtual_ranks
    if num_virtual_ranks is None:
        return None

    num_per_rank = part_sizes(num_virtual_ranks, shares)
    every_rank_has_one = 0 not in num_per_rank
    if every_rank_has_one:
        # All virtual ranks train one model. (Under DiLoCo each trains a copy.)
        return VirtualRanks(count=num_virtual_ranks, train_copies=False)

    shares_are_equal = len(set(shares)) == 1
    if shares_are_equal:
        raise too_few_virtual_ranks_error(num_virtual_ranks, len(shares))

    # Four virtual ranks are enough for three processes, but with the shares 5:1:1 the processes get
    # 3, 1 and 0 of them. So the error shows the shares.
    divided = ", ".join(str(number) for number in num_per_rank)
    found = f"shares {':'.join(map(str, shares))} give the processes {divided} of them"
    raise too_few_virtual_ranks_error(num_virtual_ranks, len(shares), found)


def open_group(run: Run, name: str, ranks: Tensor) -> dist.ProcessGroup:
    """Opens one process group for each row of a table of ranks. All ranks have to call this.

    For example, `[[0, 1], [2, 3]]` opens a group of ranks 0 and 1, and one of ranks 2 and 3.

    Args:
        run: the run of this process, which closes the groups at its end.
        name: the key under which the group of this rank is kept in `run.groups`.
        ranks: a table in which every rank of the run appears once, shape `(groups, ranks per
            group)`.

    Returns:
        The group that this rank belongs to.
    """
    group = open_groups(ranks.tolist(), name, timeout=run.settings.collective_timeout)
    run.groups[name] = group
    return group


class EqualTensors(NamedTuple):
    """Named tensors that must have the same bits on several ranks.

    Tensors on the meta device belong to other ranks and are not compared.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    group: dist.ProcessGroup | None = None
    """The ranks that hold these tensors; None for all ranks."""

    @classmethod
    def of(cls, module: nn.Module, group: dist.ProcessGroup | None = None) -> EqualTensors:
        """Returns all parameters and buffers of a module, to be compared over the given group."""
        return cls(dict(module.named_parameters()), dict(module.named_buffers()), group)


class VirtualRankState(Protocol):
    """The state of a module that each virtual rank trains by itself, as a checkpoint saves it."""

    own: Sequence[int]
    """The numbers of the virtual ranks that this process computes."""

    def shared_state(self) -> Any:
        """Returns the state that is the same for all virtual ranks, without that of the module."""

    def virtual_rank_state(self, number: int) -> Any:
        """Returns the state of one of the virtual ranks that this process computes."""

    def check(self, shared: Any) -> None:
        """Raises CheckpointError if a saved shared state does not fit this run.

        Args:
            shared: what `shared_state` returned when the checkpoint was saved.
        """

    def load(self, shared: Any, states: Mapping[int, Any]) -> None:
        """Loads saved state.

        Args:
            shared: what `shared_state` returned when the checkpoint was saved.
            states: what `virtual_rank_state` returned then, by the number of the virtual rank.
        """


@dataclass(frozen=True, kw_only=True)
class PreparedModule:
    """What `wrap` returns: the object that the user calls, and facts about it for Lockstep."""

    module: nn.Module
    """The object that the user calls."""
    choices: list[Choice] = field(default_factory=list)
    """What the strategy decided for this module, and why. Rank 0 prints these lines."""
    chosen_difference: str = ""
    """A clause about an option that changes results, such as compressed gradients, and that is
    switched off for `lockstep verify`, which prints the clause. Empty if there is none."""
    replaced_parameters: Sequence[tuple[nn.Parameter, nn.Parameter | None]] = ()
    """Pairs of a parameter that was removed from the user's module and the parameter that replaced
    it (None if the new one is on another rank). Optimizers must not hold removed parameters."""
    may_unfreeze: bool = False
    """True if the user may later unfreeze parameters that are frozen now."""
    unsharded_parameters: Sequence[nn.Parameter] = ()
    """The parameters that forward passes use, if the parameters of `module` are shards."""
    zero_grad_misses_gradients: bool = False
    """True if the gradients of micro-batches accumulate in tensors that `zero_grad` does not
    clear."""
    gradients_after_backward: bool = False
    """True if gradients are also written after `backward` has returned."""
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    """Submodules that communicate in their forward pass, by name."""
    equal_tensors: Callable[[], Iterable[EqualTensors]] = tuple
    """Returns the tensors that must be equal on several ranks; called at each comparison."""
    check_every: int = CHECK_EVERY
    """How many global batches pass between two comparisons of these tensors; 0 for none."""
    extensions: Sequence[Extension] = ()
    """What the strategy does with this module at the events of each step."""
    gradient_bits: Callable[[], dict[str, Tensor]] | None = None
    """Returns a sum over the bits of each parameter's gradient, by name. It is called after the
    backward pass of a virtual rank whose gradients are compared. None if the gradients can be read
    from `parameter.grad`."""
    compressed: CompressedMeans | None = None
    """The compressor of the gradients, if there is one. Checkpoints save its rounding errors."""
    virtual_rank_state: VirtualRankState | None = None
    """Reads and loads the state of this module's virtual ranks, if each of them trains by itself.
    """


def changed_parameters_error(found: str) -> UsageError:
    """Returns the error for a model whose parameters were changed after it was prepared.

    Args:
        found: which parameters were changed, and how.
    """
    return UsageError(
        "parameters added, replaced, unfrozen or moved after world.prepare",
        found,
        "change the model first, then call world.prepare",
        code="LS303",
    )


def not_averaged_error(changes: Sequence[str]) -> UsageError:
    """Returns the error for parameters whose gradients are not averaged, as they were changed.

    Args:
        changes: the name of each parameter and how it was changed, such as "fc.weight unfrozen".
    """
    effect = "their gradients are not averaged over the ranks"
    return changed_parameters_error(f"{join_first(changes)}; {effect}")


def describe_change_of_kind(
    name: str, parameter: Tensor, dtype: torch.dtype, device: torch.device
) -> str:
    """Describes how a parameter was converted or moved.

    For example: "fc.weight now torch.float64, was torch.float32".

    Args:
        name: the name of the parameter.
        parameter: the parameter as it is now.
        dtype: its earlier dtype.
        device: its earlier device.

    Returns:
        The description; empty if nothing has changed.
    """
    if parameter.dtype != dtype:
        return f"{name} now {parameter.dtype}, was {dtype}"
    if parameter.device != device:
        return f"{name} now on {parameter.device}, was on {device}"
    return ""


def gpus_of(module: nn.Module) -> set[str]:
    """Returns the names of the GPUs that the parameters of a module are on."""
    gpus: set[str] = set()
    for parameter in module.parameters():
        if parameter.device.type == "cuda":
            gpus.add(str(parameter.device))
    return gpus


def move_to_device(module: nn.Module, device: torch.device) -> list[Choice]:
    """Moves a module to a device, unless the user has spread it over several GPUs.

    Returns:
        The lines to print: none, or one that says that the module stays on its GPUs.
    """
    gpus = gpus_of(module)
    if len(gpus) < 2:
        module.to(device)
        return []

    reason = "the model is spread over them; left as it is"
    return [Choice("devices", ", ".join(sorted(gpus)), reason)]


class Strategy(ABC):
    """How modules are spread over the ranks."""

    name: ClassVar[str]
    """What the user calls it, and what records say; also that of its `Entry`."""
    averages_whole_gradient: ClassVar[bool] = False
    """True if all ranks average the gradient of the whole model in every step, so that its size
    says what the network has to carry."""
    computes_batch_side_by_side: ClassVar[bool] = True
    """True if the ranks compute the parts of one global batch at the same time, so that a loss may
    gather them."""
    why_ranks_differ: ClassVar[str] = ""
    """Why the ranks do not all have the weights of one model, which a journal is of, as a sentence
    for an error message; empty if they do."""

    def plan(self, run: Run) -> StrategyPlan:
        """Decides how a global batch is divided.

        By default every rank gets a part for its one device.

        Raises:
            SettingError: the run cannot use this strategy, or the shares do not fit it.
        """
        return plan_for(run, DataParallelRank(run.topology.rank, run.topology.size))

    def computes_in_half(self, module: nn.Module, run: Run) -> bool:
        """Returns True if the forward pass of a wrapped module will use half-precision parameters.

        It then needs no autocast under the precisions bf16 and fp16.
        """
        return False

    @abstractmethod
    def wrap(self, module: nn.Module, run: Run) -> PreparedModule:
        """Moves a module to its device and prepares it for the run.

        Unless `needs_values` is True, the parameters of a model that was built on the meta device
        may still be NaN here. Their values are computed later.
        """

    def spreads_model(self, run: Run) -> bool:
        """Returns True if each rank holds only a part of the model.

        `wrap` then gets a model on the meta device as it is, and allocates memory for this rank's
        part.
        """
        return False

    @property
    def needs_values(self) -> bool:
        """True if `wrap` copies the values of parameters, which must therefore be known by then."""
        return False

    def backward(
        self, modules: Sequence[nn.Module], loss: Tensor, precision: Precision, **options: Any
    ) -> None:
        """Runs the backward pass of a loss that is already multiplied by its weight.

        Args:
            modules: all modules that `wrap` has returned.
            loss: a tensor with one element.
            precision: scales the loss if its dtype requires that, and runs the backward pass.
            **options: arguments of `torch.autograd.backward`.
        """
        precision.backward(loss, **options)

    def total_norm(self, parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
        """Returns the norm of the gradient of the whole model, as a plain tensor, on every rank."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)


class ModuleWrapper(nn.Module):
    """A wrapper around the user's module, which is its attribute `module`.

    If the user sets an attribute that the user's module has, it is set there, not on the wrapper.
    So scripts work the same with and without the wrapper.
    """

    _is_initialized = False
    """True once the wrapper has all of its own attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the user's module if it has it, else of the wrapper."""
        belongs_to_wrapper = (
            not self._is_initialized or name in self.__dict__ or hasattr(type(self), name)
        )
        if not belongs_to_wrapper and hasattr(self.module, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)


MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes that every module has. None of them holds a result of a forward pass."""


def may_set_attributes(module: nn.Module) -> bool:
    """Returns True if a forward pass may set attributes of a module; torch's own layers do not."""
    return not type(module).__module__.startswith("torch.nn.")


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Returns all parameters of an optimizer, in the order of its groups."""
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters
