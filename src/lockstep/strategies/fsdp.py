"""Sharded parameters: torch's `fully_shard` (FSDP2) with the exactness of the global batch.

Every rank keeps a part of every parameter, of its gradient and of the optimizer's state
(Rajbhandari et al., "ZeRO", arXiv 1910.02054; Zhao et al., "PyTorch FSDP", arXiv 2304.11277). The
model is cut into units (`find_blocks`); a unit's parameters are gathered just before it runs and
let go after it.

Communication: the parameters and buffers of rank 0 are broadcast once, unit by unit, so that no
device ever holds the whole model. Every forward pass gathers each unit once, with gradients or
without, so every rank makes every pass. A backward pass gathers each unit but the last once more
(`reshard_after_forward`); the one that closes a global batch scatters the average of the gradients,
unit by unit, while it still runs. `HSDP` shards within groups of ranks and averages over the groups
with one all-reduce more. Buffers that move are taken from rank 0 after each step (`replication`).
What the ranks have used is compared in each step, in the background (`guards.unit_order`).

Micro-batches before the last send no gradients: they add up in whole on every rank. That is fast
and takes the memory of one whole gradient; `accumulate_shards` sends them each time instead.

Under precision bf16 the parameters are gathered in fp32 and cast by autocast, exactly as under DDP.
Torch's `MixedPrecisionPolicy` would gather half as many bytes, but it also gives bf16 parameters to
what autocast leaves in fp32 (normalisation, embeddings, sums along a residual stream): other
numbers, and errors about mixed types in some layers.

Which parts of a model are sharded as units: the blocks that it repeats.

A unit's parameters are gathered together just before it runs and let go after it. Units should
therefore run one after the other, and be a small part of the model each: the blocks of a
transformer, the residual blocks of a convolutional network. What belongs to no block (embeddings,
the head) is the unit of the model itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn
from torch.utils import swap_tensors

from lockstep.checkpoint.modules import plain_state_dict
from lockstep.checkpoint.weights import gather_on_main
from lockstep.distributed.collectives import run_on_all_ranks
from lockstep.distributed.process_group import Run
from lockstep.distributed.torch_compat import share_meshes_with_copies
from lockstep.errors import RanksDifferError, SettingError, UsageError
from lockstep.optim.module_filter import ModuleFilter, repeated_blocks, select_modules
from lockstep.settings import Choice, check_whole_number
from lockstep.strategies.base import PreparedModule, Strategy, StrategyPlan
from lockstep.strategies.fsdp_state import Outputs, Replaced, Sharded, check_hooks
from lockstep.strategies.replication import MovingBuffers, norm_over_ranks, take_from_first
from lockstep.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class FSDP(Strategy):
    """Options of FSDP: every parameter is spread over all ranks."""

    name: ClassVar[str] = "fsdp"

    blocks: ModuleFilter | None = None
    """The parts that are gathered as units: a class or tuple of classes, a pattern of names as in
    `named_modules()`, or a function of a module; None: the blocks that the model repeats."""
    reshard_after_forward: bool = True
    """Let go of a unit's parameters after its forward pass. False: keep them until the backward
    pass of the last micro-batch is through, so that they are gathered once for each global batch
    and the whole model is on every device meanwhile."""
    accumulate_shards: bool = False
    """Average the gradients of every micro-batch, so that only this rank's part of them is kept
    between micro-batches; else whole ones are, and nothing is sent before the last."""
    find_unused_parameters: bool = False
    """Ranks may use different parameters in a step: each sends zeros for those it has not used.
    Those that no rank has used keep the gradient None, as on one device; one small all-reduce in
    each step tells which. Needs a newer torch than 2.11."""
    average_buffers: str | Sequence[str] = ()
    """Names, or patterns of names, of buffers that are averaged over the ranks after each step,
    weighted by samples, instead of taken from rank 0. Right for running means over samples, such as
    the statistics of InstanceNorm; not for sums, counts and codebooks."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in the memory of the host; GPUs only."""

    def plan(self, run: Run) -> StrategyPlan:
        """Raises SettingError: an option that this run or this torch cannot honour."""
        if self.cpu_offload and (run.device.type == "cpu" or run.topology.size == 1):
            raise SettingError(
                f"{type(self).__name__}(cpu_offload=True)",
                "the device is the CPU: all is there already"
                if run.device.type == "cpu"
                else "one process: nothing is sharded, so nothing is moved away and back",
                "leave cpu_offload out, or use several GPUs",
            )
        if self.find_unused_parameters and not hasattr(
            torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params"
        ):
            raise SettingError(
                f"{type(self).__name__}(find_unused_parameters=True)",
                f"torch {torch.__version__} cannot do that",
                "use every parameter on every rank, or torch 2.13 or later",
            )
        return replace(super().plan(run), evaluation_is_collective=True)

    def wrap(self, module: nn.Module, run: Run) -> PreparedModule:
        """The same module, its parameters replaced by shards of rank 0's.

        On one process it is the module as it was, on its device.

        Raises:
            SettingError: `blocks` matches nothing, or the ranks cannot be grouped as asked.
            UsageError: parameters that cannot be sharded.
        """
        if run.topology.size == 1:
            return PreparedModule(module=module.to(run.device), may_unfreeze=True)
        if next(module.parameters(), None) is None:
            _take_from_first(list(module.buffers()), run.device)
            nothing = Choice(self.name, "not sharded", "no parameters")
            return PreparedModule(module=module, choices=[nothing], may_unfreeze=True)
        check_parameters(module)
        before = dict(module.named_parameters())
        check_hooks(before)
        blocks = find_blocks(module, self.blocks)
        units = {**dict(blocks.found), "": module}
        check_dtypes(list(units.values()))
        size = sum(p.nbytes for p in before.values())
        choices = [self._units_choice(blocks)]  # before torch changes the names of classes
        shards, shape = self._shards(run)
        share_meshes_with_copies()
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh(run.device.type, shape, mesh_dim_names=names)
        _take_from_first(list(module.buffers()), run.device)
        for unit in units.values():
            inside = [block for _, block in blocks.found] if unit is module else []
            outputs = Outputs(unit, inside, lambda: held.keep())
            unit.register_forward_hook(outputs.before)
            self._shard(unit, mesh, run)
            unit.register_forward_hook(outputs.after)
        keep_whole = not self.reshard_after_forward
        held = Sharded(
            units,
            mesh,
            run,
            keep_whole=keep_whole,
            accumulate_shards=self.accumulate_shards,
            find_unused_parameters=self.find_unused_parameters,
        )
        held.moving_buffers = MovingBuffers(
            module, run.step, average=self.average_buffers, strategy=type(self).__name__
        )
        if isinstance(module, AveragedModel):
            average_shards_apart(module)
        if callable(getattr(module, "save_pretrained", None)):
            save_pretrained_whole(module, run)
        after = dict(module.named_parameters())
        return PreparedModule(
            module=module,
            choices=[*choices, shards._replace(value=f"{format_bytes(size)} over {shards.value}")],
            replaced_parameters=[(old, after[name]) for name, old in before.items()],
            may_unfreeze=True,
            unsharded_parameters=list(held.whole.values()),
            zero_grad_misses_gradients=not self.accumulate_shards,
            units=units,
            equal_tensors=held.equal_tensors,
            extensions=[held],
        )

    def _shard(self, unit: nn.Module, mesh: DeviceMesh, run: Run) -> None:
        """Replaces the parameters of a unit by shards of rank 0's."""
        whole = [p for p in unit.parameters() if not isinstance(p, DTensor)]
        _take_from_first(whole, run.device)
        fully_shard(
            unit,
            mesh=mesh,
            # None: not after that of the whole model, which backward begins with.
            reshard_after_forward=None if self.reshard_after_forward else False,
            offload_policy=CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
        )
        for p in whole:  # an optimizer still holds it, and would hold its memory
            p.data = p.data.new_empty(0)
            with suppress(RuntimeError):  # where a graph or a weak reference holds it, too
                swap_tensors(p, Replaced(p.data))  # type: ignore[no-untyped-call]

    def total_norm(self, parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
        """The norm of the whole gradient: one all-reduce of one number."""
        gradients = [p.grad for p in parameters if isinstance(p.grad, DTensor)]
        if not gradients:
            return super().total_norm(parameters, norm_type)
        own = [g.to_local() for g in gradients]
        mesh = gradients[0].device_mesh
        group = mesh.get_group(mesh.ndim - 1)  # its last dimension is the one sharded over
        norm = norm_over_ranks(own, norm_type, torch.device(mesh.device_type), group)
        return norm.to(own[0].device)

    def _shards(self, run: Run) -> tuple[Choice, tuple[int, ...]]:
        """In words, and the shape of the mesh: how many replicas of how many shards."""
        size = run.topology.size
        reason = "parameters, gradients and optimizer state"
        return Choice("shards", f"{size} ranks", reason), (size,)

    def _units_choice(self, blocks: Blocks) -> Choice:
        reason = "each gathered for its own forward and backward; the rest at once"
        if not self.reshard_after_forward:
            reason = "each gathered for its forward and kept until the last backward"
        if blocks.tied:
            reason += f"; not {', '.join(blocks.tied)}: shares a parameter with what is outside"
        if not blocks.found:
            reason = "no repeated blocks found: all parameters are gathered at once"
            return Choice("units", "the whole model", reason)
        return Choice("units", str(blocks), reason)


@dataclass(frozen=True, kw_only=True)
class HSDP(FSDP):
    """Options of HSDP: parameters are spread over `shard_size` ranks, and every such group is a
    replica of the others.

    Raises:
        SettingError: a shard size out of range.
    """

    name: ClassVar[str] = "hsdp"

    shard_size: int | None = None
    """How many neighbouring ranks share a copy of the model; None: those of one machine."""

    def __post_init__(self) -> None:
        if self.shard_size is not None:
            check_whole_number(f"HSDP(shard_size={self.shard_size})", self.shard_size)

    def plan(self, run: Run) -> StrategyPlan:
        """Raises on every rank where the ranks do not make groups of the shard size.

        Raises:
            SettingError: it does not divide the number of ranks.
            RanksDifferError: machines have different numbers of ranks, and none is set.
        """
        size, shard = run.topology.size, self._size(run)
        everyone = run.collectives.exchange(str(shard))
        if len(set(everyone)) > 1:
            raise RanksDifferError(
                f"HSDP(shard_size={self.shard_size})",
                f"ranks 0 to {size - 1} have {', '.join(everyone)} ranks a group",
                "start equally many processes on every machine, or set shard_size",
            )
        if size % shard:
            raise SettingError(
                f"HSDP(shard_size={self.shard_size})",
                f"{size} ranks cannot be cut into groups of {shard}",
                "give a shard_size that divides the number of ranks",
            )
        return super().plan(run)

    def _size(self, run: Run) -> int:
        return self.shard_size or run.topology.local_size

    def _shards(self, run: Run) -> tuple[Choice, tuple[int, ...]]:
        shard = self._size(run)
        replicas = run.topology.size // shard
        reason = "as set" if self.shard_size else "a copy of the model on every machine"
        return Choice("shards", f"{shard} ranks x {replicas} replicas", reason), (replicas, shard)


def check_parameters(module: nn.Module) -> None:
    """Raises UsageError where a parameter cannot be sharded."""
    for name, p in module.named_parameters():
        problem = None
        if isinstance(p, DTensor):
            problem = "is sharded already", "give a plain module to world.prepare, once"
        elif p.is_meta:
            problem = "is on the meta device and has no values", "build the model on the CPU"
        elif p.dim() == 0:
            problem = "has no dimension to cut", "make it a parameter of shape (1,)"
        elif not p.numel():
            problem = "has no elements", "leave it out, or make it a buffer"
        if problem:
            raise UsageError(f"world.prepare of the parameter {name!r}", *problem)
    for name, m in module.named_modules():
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse and m.weight.requires_grad:
            raise UsageError(
                f"world.prepare of {name!r}, an embedding with sparse gradients",
                "gradients of shards are dense",
                "leave sparse=True out, or use strategy='ddp'",
            )


def check_dtypes(units: Sequence[nn.Module]) -> None:
    """Raises UsageError where a unit's gradients, which travel together, have several dtypes."""
    seen: set[int] = set()
    for unit in units:
        own = {n: p for n, p in unit.named_parameters() if id(p) not in seen and p.requires_grad}
        dtypes = {p.dtype: name for name, p in own.items()}
        if len(dtypes) > 1:
            raise UsageError(
                f"world.prepare of a {type(unit).__name__} with parameters of several dtypes",
                ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items()),
                "convert them to one dtype, freeze them (requires_grad_(False)), or choose blocks=",
            )
        seen |= {id(p) for p in own.values()}


def save_pretrained_whole(module: Any, run: Run) -> None:
    """Lets `save_pretrained`, as models of Hugging Face have it, write whole weights, not shards.

    All ranks call it together: rank 0 gathers the weights on the CPU, and writes.
    """
    original = module.save_pretrained

    def save_pretrained(save_directory: Any, *args: Any, **options: Any) -> Any:
        if options.get("state_dict") is not None:
            return original(save_directory, *args, **options)
        state = plain_state_dict(module)
        gather_on_main(state, run.collectives)

        def write() -> Any:
            if not run.topology.is_main:
                return None
            # Libraries differ in what save_pretrained takes; all ask the model for its state.
            vars(module)["state_dict"] = lambda *_, **__: OrderedDict(state)
            try:
                return original(save_directory, *args, **options)
            finally:
                del vars(module)["state_dict"]

        return run_on_all_ranks(run.collectives, f"saving weights to {save_directory}", write)

    module.save_pretrained = save_pretrained


def average_shards_apart(module: AveragedModel) -> None:
    """Lets `AveragedModel(use_buffers=True)` average parameters that are shards.

    It gives parameters and buffers to one call of `multi_avg_fn`, and torch cannot compute with
    shards and plain tensors in one list.
    """
    average = module.multi_avg_fn
    if average is None:
        # Called for each tensor; torch's default would take lists of them on GPUs.
        module.avg_fn = module.avg_fn or get_swa_avg_fn()  # type: ignore[no-untyped-call]
        return

    def average_apart(
        averaged: Sequence[Tensor], current: Sequence[Tensor], num_averaged: Tensor | int
    ) -> None:
        for sharded in (True, False):
            places = [i for i, t in enumerate(averaged) if isinstance(t, DTensor) is sharded]
            if places:
                average([averaged[i] for i in places], [current[i] for i in places], num_averaged)

    module.multi_avg_fn = average_apart


def _take_from_first(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Places tensors, dense in memory, and gives them rank 0's values."""
    for tensor in tensors:
        tensor.data = tensor.data.to(device).contiguous()
    take_from_first(tensors)


class Blocks(NamedTuple):
    """The parts of a module that become units, in the order in which they are registered."""

    found: list[tuple[str, nn.Module]]
    """Names and modules; none is inside another."""
    tied: list[str]
    """Names of those left to the whole, because a parameter of theirs is used elsewhere too."""

    def __str__(self) -> str:
        counts = Counter(type(block).__name__ for _, block in self.found)
        return ", ".join(f"{count} x {name}" for name, count in counts.items())


def find_blocks(module: nn.Module, chosen: ModuleFilter | None = None) -> Blocks:
    """The blocks of a module.

    Args:
        module: the model; it is never a block of itself.
        chosen: a class or tuple of classes, a pattern of names as in `named_modules()`, or a
            function that says yes or no to each module; of nested matches the outermost is taken.
            None: `lockstep.optim.module_filter.repeated_blocks`.

    Raises:
        SettingError: nothing matches what was chosen.
    """
    matching = (
        repeated_blocks(module) if chosen is None else select_modules(module, chosen, "blocks={}")
    )
    modules = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    places = _places(module)
    found, tied = [], []
    for name, part in matching:
        inside = _places(part)
        if any(places[p] != modules[id(part)] * count for p, count in inside.items()):
            tied.append(name)
        elif inside:
            found.append((name, part))
    return Blocks(found, tied)


def _places(module: nn.Module) -> Counter[int]:
    """In how many places of a module each parameter is, by its id."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
