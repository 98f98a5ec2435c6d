"""The strategies FSDP and HSDP: torch's `fully_shard` (FSDP2) with the exact weighting of Lockstep.

Every rank keeps a *shard* of every parameter, of its gradient and of the optimizer's state
(Rajbhandari et al., "ZeRO", arXiv 1910.02054; Zhao et al., "PyTorch FSDP", arXiv 2304.11277). The
model is divided into *units* (`fsdp_blocks`); the parameters of a unit are gathered just before it
runs and freed after it. `HSDP` shards within groups of ranks, and each group has a copy of the
model.

Communication: the parameters and buffers of rank 0 are broadcast once, unit by unit, so that no
device ever holds the whole model. Every forward pass gathers each unit once, with gradients or
without, so all ranks have to make every forward pass. A backward pass gathers each unit but the
last once more (`reshard_after_forward`). In the last micro-batch of a global batch it also averages
the gradients with a reduce-scatter for each unit, while it still runs; `HSDP` adds an all-reduce
over the groups. Buffers that forward passes change are taken from rank 0 after each step
(`moving_buffers`). In each step the ranks compare in the background which units they ran
(`extensions.checks.unit_order`).

Micro-batches before the last send no gradients: whole gradients add up on every rank. That is fast
and takes the memory of one whole gradient. With `accumulate_shards` they are averaged each time.

Under precision bf16 and fp16 units are gathered and computed in half precision, without autocast
(torch's `MixedPrecisionPolicy`): half as many bytes are sent, and no copy of the weights is left
when a unit has run. Gradients are averaged in fp32, and the shards, which the optimizer updates,
are in fp32. Under autocast the gathered parameters would be in fp32, and the copies in half
precision that it makes of them would stay for the backward pass: those of the whole model, on every
rank. But operations that autocast computes in fp32 (normalisation, softmax, losses inside of the
model, sums along a residual stream) are computed in half precision, which gives other results than
`ddp`, and errors about mixed dtypes in models that convert to fp32 inside. `FSDP(autocast=True)` is
for these. Virtual ranks compute under autocast, because they promise the bits of `ddp`, and so do
models that have BatchNorm layers of torch's own, which want parameters in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils import swap_tensors

from lockstep.distributed.process_group import Run
from lockstep.distributed.torch_compat import (
    BatchNorm,
    convert_tensors,
    share_meshes_with_copies,
)
from lockstep.errors import RanksDifferError, SettingError
from lockstep.optim.module_filter import ModuleFilter
from lockstep.optim.precision import HALF_DTYPES
from lockstep.session.extension import Extension
from lockstep.settings import Choice, check_whole_number
from lockstep.strategies.base import (
    PreparedModule,
    Strategy,
    StrategyPlan,
    on_one_process,
    open_group,
    refuse_virtual_ranks,
)
from lockstep.strategies.deferred_model import with_memory
from lockstep.strategies.fsdp_blocks import Blocks, find_blocks
from lockstep.strategies.fsdp_compat import average_shards_separately, save_pretrained_whole
from lockstep.strategies.fsdp_misuse import (
    ReplacedParameter,
    check_dtypes,
    check_hooks,
    check_parameters,
)
from lockstep.strategies.fsdp_module import ShardedModule
from lockstep.strategies.fsdp_outputs import UnitOutputs
from lockstep.strategies.fsdp_virtual_ranks import ShardedVirtualRanks
from lockstep.strategies.moving_buffers import MovingBuffers
from lockstep.strategies.replication import norm_over_ranks, take_from_first
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.strategies.virtual_rank_buffers import VirtualRankBuffers
from lockstep.strategies.virtual_ranks import make_virtual_rank_tree
from lockstep.units import format_bytes
from lockstep.wording import describe_type


@dataclass(frozen=True, kw_only=True)
class FSDP(Strategy):
    """Options of FSDP: every parameter is sharded over all ranks."""

    name: ClassVar[str] = "fsdp"

    blocks: ModuleFilter | None = None
    """The submodules that are gathered as units: a class or tuple of classes, a pattern of names as
    in `named_modules()`, or a function of a module. None for the blocks that the model repeats."""
    reshard_after_forward: bool = True
    """Free a unit's parameters after its forward pass. If False, they are kept until the last
    micro-batch has run backward: they are gathered once in each global batch, and meanwhile the
    whole model is on every device."""
    accumulate_shards: bool = False
    """Average the gradients of every micro-batch, so that only this rank's shard of them is kept
    between micro-batches. If False, whole gradients are kept and only the last micro-batch sends.
    """
    find_unused_parameters: bool = False
    """Allow ranks to use different parameters in a step. Each rank sends zeros for those that it
    has not used. Parameters that no rank has used keep the gradient None, as on one device, which
    takes one small all-reduce in each step. Needs a newer torch than 2.11."""
    average_buffers: str | Sequence[str] = ()
    """Names, or patterns of names, of buffers that are averaged over the ranks after each step,
    weighted by samples, instead of taken from rank 0. Right for running means over samples, such as
    the statistics of InstanceNorm; not for sums, counts and codebooks."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in the memory of the host. GPUs only."""
    autocast: bool = False
    """Under precision bf16 and fp16, compute under autocast, with the numbers of `ddp`. It keeps a
    half-precision copy of the model's weights on every rank from forward to backward. If False,
    everything in the model is computed in half precision, and only shards are kept."""

    def plan(self, run: Run) -> StrategyPlan:
        """Returns a plan in which every rank computes a part of each batch.

        Raises:
            SettingError: an option does not work with this run or this version of torch.
        """
        if self.cpu_offload and (run.device.type == "cpu" or run.topology.size == 1):
            found = "one process: nothing is sharded, so nothing is moved away and back"
            if run.device.type == "cpu":
                found = "the device is the CPU: all is there already"
            raise SettingError(
                f"{type(self).__name__}(cpu_offload=True)",
                found,
                "leave cpu_offload out, or use several GPUs",
            )

        if run.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise SettingError(
                f"strategy={self.name!r} on the CPU",
                f"torch {torch.__version__} cannot do that",
                "use strategy='ddp', or torch 2.8 or later",
            )

        if self.find_unused_parameters:
            refuse_virtual_ranks(
                run,
                f"{self.name}:find_unused_parameters=true",
                "every virtual rank has to use all parameters, so that its gradient has its place "
                "in the sum",
            )

        torch_finds_unused = hasattr(
            torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params"
        )
        if self.find_unused_parameters and not torch_finds_unused:
            raise SettingError(
                f"{type(self).__name__}(find_unused_parameters=True)",
                f"torch {torch.__version__} cannot do that",
                "use every parameter on every rank, or torch 2.13 or later",
            )

        if self.accumulate_shards:
            refuse_virtual_ranks(
                run,
                f"{self.name}:accumulate_shards=true",
                "whole gradients of virtual ranks are added up before they are sent",
            )

        if not hasattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter"):
            refuse_virtual_ranks(
                run,
                self.name,
                f"torch {torch.__version__} cannot do that",
                "use torch 2.9 or later, or strategy='ddp'",
            )

        return replace(super().plan(run), evaluation_is_collective=True)

    def computes_in_half(self, module: nn.Module, run: Run) -> bool:
        """Returns True if the units of a module will be gathered and computed in half precision."""
        if run.settings.precision not in HALF_DTYPES:
            return False
        is_sharded = run.topology.size > 1 and next(module.parameters(), None) is not None
        return is_sharded and self._reason_for_autocast(module, run) == ""

    def _reason_for_autocast(self, module: nn.Module, run: Run) -> str:
        """Returns why a module is computed under autocast in half precision; empty: it is not."""
        if self.autocast:
            return "autocast=True: the numbers of ddp"
        if run.settings.virtual_ranks is not None:
            return "virtual ranks: the bits of ddp"
        for layer in module.modules():
            if isinstance(layer, BatchNorm) and not isinstance(layer, SyncBatchNorm):
                return f"{describe_type(layer)} that is not synchronised, and wants fp32 weights"
        return ""

    def spreads_model(self, run: Run) -> bool:
        """Returns True if there are several ranks."""
        return run.topology.size > 1

    def wrap(self, module: nn.Module, run: Run) -> PreparedModule:
        """Replaces the parameters of a module by shards, unless there is only one process.

        The shards have the values of rank 0's parameters.

        Raises:
            SettingError: `blocks` matches nothing.
            UsageError: parameters cannot be sharded.
        """
        if run.topology.size == 1:
            prepared = on_one_process(module.to(run.device), run)
            choices = self._precision_choices(module, run)
            return replace(prepared, may_unfreeze=True, choices=choices)

        if next(module.parameters(), None) is None:
            _take_from_first(list(module.buffers()), run.device)
            nothing = Choice(self.name, "not sharded", "no parameters")
            return PreparedModule(module=module, choices=[nothing], may_unfreeze=True)

        check_parameters(module)
        parameters_before = dict(module.named_parameters())
        check_hooks(parameters_before)
        blocks = find_blocks(module, self.blocks)

        # The whole model comes last: fully_shard takes the parameters that no block has taken.
        units = {**dict(blocks.found), "": module}
        check_dtypes(list(units.values()))
        num_bytes = sum(parameter.nbytes for parameter in parameters_before.values())

        # Before sharding, because torch then changes the names of the blocks' classes.
        choices = [self._units_choice(blocks), self._shards_choice(run, num_bytes)]
        choices += self._precision_choices(module, run)
        in_half = self.computes_in_half(module, run)
        half_dtype = HALF_DTYPES[run.settings.precision] if in_half else None
        _take_from_first(list(module.buffers()), run.device)
        mesh = self._make_mesh(run)

        outputs_of_units: list[UnitOutputs] = []
        for unit in units.values():
            inner_units = [block for _, block in blocks.found] if unit is module else []
            outputs = UnitOutputs(unit, inner_units)
            outputs_of_units.append(outputs)

            # Forward hooks are called in the order in which they are registered. Torch's own is
            # registered by `fully_shard`, between these two.
            unit.register_forward_hook(outputs.before_torch)

            # Inputs of the whole model are converted by `Precision.attach`, in any container.
            policy = MixedPrecisionPolicy(
                param_dtype=half_dtype,
                reduce_dtype=torch.float32 if in_half else None,
                cast_forward_inputs=unit is not module,
            )
            self._shard(unit, mesh, run, policy)
            unit.register_forward_hook(outputs.after_torch)

        device = torch.device("cpu") if self.cpu_offload else run.device
        if any(parameter.is_meta for parameter in module.parameters()):
            convert_tensors(module, lambda tensor: with_memory(tensor, device))

        extensions: list[Extension] = []
        average: str | Sequence[str] = self.average_buffers
        left_out: Sequence[str] = ()
        gradient_bits = None

        if run.settings.virtual_ranks is not None:
            tree = make_virtual_rank_tree(run)
            buffers = VirtualRankBuffers(module, tree, run.step, average)
            average = ()
            left_out = buffers.combined
            sharded_virtual_ranks = ShardedVirtualRanks(list(units.values()), tree, run.step, mesh)
            gradient_bits = sharded_virtual_ranks.gradient_bits
            extensions = [sharded_virtual_ranks, buffers]

        moving_buffers = MovingBuffers(
            module, run.step, average=average, left_out=left_out, strategy=type(self).__name__
        )
        sharded = ShardedModule(
            units,
            mesh,
            run,
            keep_gathered=not self.reshard_after_forward,
            accumulate_shards=self.accumulate_shards,
            find_unused_parameters=self.find_unused_parameters,
            half_dtype=half_dtype,
            moving_buffers=moving_buffers,
        )
        for outputs in outputs_of_units:
            outputs.on_double_backward = sharded.begin_double_backward

        if isinstance(module, AveragedModel):
            average_shards_separately(module)

        if callable(getattr(module, "save_pretrained", None)):
            save_pretrained_whole(module, run)

        shards = dict(module.named_parameters())
        return PreparedModule(
            module=module,
            choices=choices,
            replaced_parameters=[
                (parameter, shards[name]) for name, parameter in parameters_before.items()
            ],
            may_unfreeze=True,
            unsharded_parameters=list(sharded.whole_parameters.values()),
            zero_grad_misses_gradients=not self.accumulate_shards,
            units=units,
            equal_tensors=sharded.equal_tensors,
            gradient_bits=gradient_bits,
            extensions=[*extensions, sharded],
        )

    def _make_mesh(self, run: Run) -> DeviceMesh:
        """Returns the mesh of all ranks. Parameters are sharded over its last dimension.

        It is made of groups that are open already. `init_device_mesh` would open its own, some of
        them without a timeout; and in a second run of one process on GPUs it ends the process with
        a segmentation fault, as torch's `split_group` does before 2.14 (pytorch#192106, #192109).
        """
        share_meshes_with_copies()
        device_type = run.device.type
        shape = self._mesh_shape(run)
        if len(shape) == 1:
            all_ranks = dist.group.WORLD
            assert all_ranks is not None  # it is open while there is a run
            return DeviceMesh.from_group(all_ranks, device_type, mesh_dim_names=("shard",))

        # Shape (copies of the model, shards): a row has the ranks that share a copy, a column those
        # with the same shard. `open_group` makes a group of each row.
        ranks = torch.arange(run.topology.size).view(shape)
        if "shard" not in run.groups:  # all models of a run use the same groups
            open_group(run, "replicate", ranks.T)
            open_group(run, "shard", ranks)

        groups = [run.groups["replicate"], run.groups["shard"]]
        return DeviceMesh.from_group(
            groups, device_type, mesh=ranks, mesh_dim_names=("replicate", "shard")
        )

    def _shard(
        self, unit: nn.Module, mesh: DeviceMesh, run: Run, policy: MixedPrecisionPolicy
    ) -> None:
        """Replaces those parameters of a unit that are not sharded yet by shards of rank 0's."""
        parameters = [p for p in unit.parameters() if not isinstance(p, DTensor)]
        _take_from_first([p for p in parameters if not p.is_meta], run.device)
        options: dict[str, Any] = {}
        if not self.reshard_after_forward:
            # By default torch frees a unit after its forward pass, but not the root: backward
            # begins with it.
            options["reshard_after_forward"] = False

        fully_shard(
            unit,
            mesh=mesh,
            **options,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
        )
        for parameter in parameters:
            # An optimizer still has the old object, and with it would keep its memory.
            parameter.data = parameter.data.new_empty(0)
            # Torch refuses to swap a tensor that a graph or a weak reference has, too.
            with suppress(RuntimeError):
                swap_tensors(parameter, ReplacedParameter(parameter.data))  # type: ignore[no-untyped-call]

    def total_norm(self, parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
        """Returns the norm of the whole gradient. Takes one all-reduce of one or two numbers."""
        gradients = [p.grad for p in parameters if isinstance(p.grad, DTensor)]
        if not gradients:
            return super().total_norm(parameters, norm_type)
        shards = [gradient.to_local() for gradient in gradients]
        mesh = gradients[0].device_mesh
        group = mesh.get_group(mesh.ndim - 1)  # parameters are sharded over its last dimension
        norm = norm_over_ranks(shards, norm_type, torch.device(mesh.device_type), group)
        return norm.to(shards[0].device)

    def _mesh_shape(self, run: Run) -> tuple[int, ...]:
        """Returns the number of shards, or the number of copies of the model and that of shards."""
        return (run.topology.size,)

    def _shards_choice(self, run: Run, num_bytes: int) -> Choice:
        """Returns the line about the shards of a model whose parameters have this many bytes."""
        value = f"{format_bytes(num_bytes)} over {run.topology.size} ranks"
        return Choice("shards", value, "parameters, gradients and optimizer state")

    def _precision_choices(self, module: nn.Module, run: Run) -> list[Choice]:
        """Returns the lines about the precision of the units; none under fp32 and fp64."""
        precision = run.settings.precision
        if precision not in HALF_DTYPES:
            return []

        value = f"{precision} under autocast"
        reason = self._reason_for_autocast(module, run)
        if run.topology.size == 1:
            if self.autocast or run.settings.virtual_ranks is not None:  # as on several ranks
                return []
            reason = "one process; on several norms and softmax are in it too (autocast=False)"
        elif reason:
            reason += "; copies of the weights stay on every rank until backward"
        else:
            value = f"{precision} in every unit"
            reason = (
                "also norms, softmax and losses in the model; gradients averaged, outputs in fp32"
            )

        return [Choice("precision", value, reason)]

    def _units_choice(self, blocks: Blocks) -> Choice:
        """Returns the line about the units."""
        if not blocks.found:
            reason = "no repeated blocks found: all parameters are gathered at once"
            return Choice("units", "the whole model", reason)

        reason = "each gathered for its own forward and backward; the rest at once"
        if not self.reshard_after_forward:
            reason = "each gathered for its forward and kept until the last backward"

        if blocks.tied:
            reason += f"; not {', '.join(blocks.tied)}: shares a parameter with what is outside"

        return Choice("units", str(blocks), reason)


@dataclass(frozen=True, kw_only=True)
class HSDP(FSDP):
    """Options of HSDP: groups of `shard_size` ranks shard the parameters, and each group has a copy
    of the model.

    Raises:
        SettingError: the shard size is no whole number above 0.
    """

    name: ClassVar[str] = "hsdp"

    shard_size: int | None = None
    """How many neighbouring ranks share a copy of the model. None for those of one machine."""

    def __post_init__(self) -> None:
        if self.shard_size is not None:
            check_whole_number(f"HSDP(shard_size={self.shard_size})", self.shard_size)

    def plan(self, run: Run) -> StrategyPlan:
        """Returns a plan in which every rank computes a part of each batch.

        Raises:
            SettingError: the shard size does not divide the number of ranks.
            RanksDifferError: `shard_size` is None and machines have different numbers of ranks.
        """
        size = run.topology.size
        shard_size = self._ranks_per_group(run)
        shard_size_of_rank = run.collectives.exchange(str(shard_size))
        if len(set(shard_size_of_rank)) > 1:
            raise RanksDifferError(
                f"HSDP(shard_size={self.shard_size})",
                f"ranks 0 to {size - 1} have {', '.join(shard_size_of_rank)} ranks a group",
                "start equally many processes on every machine, or set shard_size",
            )

        if size % shard_size != 0:
            raise SettingError(
                f"HSDP(shard_size={self.shard_size})",
                f"{size} ranks cannot be cut into groups of {shard_size}",
                "give a shard_size that divides the number of ranks",
            )

        if shard_size == 1:
            refuse_virtual_ranks(
                run,
                f"{self.name}:shard_size=1",
                "every process has the whole model, as under ddp, and torch then sums gradients in "
                "an order of its own",
            )

        return super().plan(run)

    def _ranks_per_group(self, run: Run) -> int:
        return self.shard_size or run.topology.local_size

    def _mesh_shape(self, run: Run) -> tuple[int, ...]:
        shard_size = self._ranks_per_group(run)
        return (run.topology.size // shard_size, shard_size)

    def _shards_choice(self, run: Run, num_bytes: int) -> Choice:
        num_replicas, shard_size = self._mesh_shape(run)
        value = f"{format_bytes(num_bytes)} over {shard_size} ranks x {num_replicas} replicas"
        reason = "as set" if self.shard_size else "a copy of the model on every machine"
        return Choice("shards", value, reason)


def _take_from_first(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Moves tensors to a device, makes them contiguous, and gives them rank 0's values."""
    for tensor in tensors:
        tensor.data = tensor.data.to(device).contiguous()
    take_from_first(tensors)
