"""The strategies FSDP and HSDP: torch's `fully_shard` (FSDP2) with Lockstep's exact weighting.

Every rank keeps a *shard* of every parameter, of its gradient and of the optimizer's state
(Rajbhandari et al., "ZeRO", arXiv 1910.02054; Zhao et al., "PyTorch FSDP", arXiv 2304.11277). The
model is divided into *units* (`fsdp_blocks`): the parameters of a unit are gathered just before it
runs, and freed after it has run. `HSDP` shards within groups of ranks, and each group has a copy of
the model.

Communication: The parameters and buffers of rank 0 are broadcast once, unit by unit, so that no
device ever holds the whole model. Every forward pass gathers each unit once, with or without
gradients, so all ranks have to make every forward pass. A backward pass gathers each unit except
the last one again (`reshard_after_forward`). In the last micro-batch of a global batch the backward
pass also averages the gradients, with one reduce-scatter for each unit; `HSDP` adds an all-reduce
over the groups. Buffers that forward passes change are taken from rank 0 after each step
(`moving_buffers`). In each step the ranks compare in the background which units they ran
(`extensions.checks.unit_order`).

Micro-batches before the last one send no gradients: whole gradients accumulate on every rank. That
is fast, and takes the memory of one whole gradient. With `accumulate_shards` the gradients of each
micro-batch are averaged, and only shards are kept.

Under the precisions bf16 and fp16, units are gathered and computed in half precision, without
autocast (torch's `MixedPrecisionPolicy`). Half as many bytes are sent, and no copy of the weights
is left when a unit has run. Gradients are averaged in fp32, and the shards, which the optimizer
updates, are in fp32. Autocast would gather the parameters in fp32 and keep a half-precision copy of
each for the backward pass, that is, of the whole model on every rank.

But without autocast, operations for which it uses fp32 (normalisation, softmax, losses inside the
model, sums along a residual stream) run in half precision. Results then differ from those of `ddp`,
and models that convert to fp32 inside may raise errors about mixed dtypes. `FSDP(autocast=True)` is
for such models. Two kinds of runs always use autocast: runs with virtual ranks, which promise the
bits of `ddp`, and models with torch's own BatchNorm layers, which need parameters in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

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
from lockstep.errors import RanksDifferError, SettingError
from lockstep.keyword_arguments import check_keywords_of_constructor
from lockstep.optim.module_filter import ModuleFilter
from lockstep.optim.precision import HALF_DTYPES
from lockstep.session.extension import Extension
from lockstep.settings import Choice, check_whole_number
from lockstep.strategies.base import (
    USE_ALL_IN_EVERY_VIRTUAL_RANK,
    PreparedModule,
    Strategy,
    StrategyPlan,
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
from lockstep.strategies.fsdp_scalars import AveragedScalars, SummedScalars, find_scalars
from lockstep.strategies.fsdp_virtual_ranks import ShardedVirtualRanks
from lockstep.strategies.moving_buffers import MovingBuffers
from lockstep.strategies.replication import broadcast_from_first_rank, norm_over_ranks
from lockstep.strategies.single import on_one_process
from lockstep.strategies.sync_batchnorm import SyncBatchNorm
from lockstep.strategies.virtual_rank_buffers import VirtualRankBuffers
from lockstep.strategies.virtual_ranks import make_virtual_rank_tree
from lockstep.torch_compat import (
    BatchNorm,
    convert_tensors,
    share_meshes_with_copies,
    unscale_shards_with_others,
)
from lockstep.units import format_bytes
from lockstep.wording import describe_type


@dataclass(frozen=True)
class _Model:
    """A model that is being sharded, with what the steps of `FSDP.wrap` need to know about it."""

    units: Mapping[str, nn.Module]
    """The units by name. The last one is the whole model, with an empty name."""
    mesh: DeviceMesh
    """The mesh over whose last dimension parameters are sharded."""
    run: Run
    half_dtype: torch.dtype | None
    """The half-precision dtype in which units are computed; None for that of their parameters."""
    scalars: Mapping[str, nn.Parameter]
    """The parameters without dimensions, which every rank keeps whole, by name."""

    @property
    def root(self) -> nn.Module:
        """The whole model, which contains all other units."""
        return self.units[""]


@check_keywords_of_constructor("lockstep.strategies.FSDP")
@dataclass(frozen=True, kw_only=True)
class FSDP(Strategy):
    """The strategy `fsdp`, which shards every parameter over all ranks, and its options."""

    name: ClassVar[str] = "fsdp"

    blocks: ModuleFilter | None = None
    """The submodules that are gathered as units: a class or tuple of classes, a pattern of names as
    in `named_modules()`, or a function of a module. None for the repeated blocks of the model."""
    reshard_after_forward: bool = True
    """Free a unit's parameters after its forward pass. If False, they are gathered once per global
    batch and kept until the last micro-batch's backward pass, so that the whole model is on every
    device in the meantime."""
    accumulate_shards: bool = False
    """Average the gradients of every micro-batch, so that only this rank's shard of them is kept
    between micro-batches. If False, whole gradients are kept, and averaged after the last one."""
    find_unused_parameters: bool = False
    """Allow ranks to use different parameters in a step. Each rank sends zeros for parameters that
    it has not used. If no rank has used a parameter, its gradient stays None, as on one device;
    finding these takes one small all-reduce in each step. Requires a newer torch than 2.11."""
    average_buffers: str | Sequence[str] = ()
    """Names, or patterns of names, of buffers that are averaged over the ranks after each step,
    weighted by samples, instead of being taken from rank 0. This is right for running means over
    samples, such as the statistics of InstanceNorm, but not for sums, counts and codebooks."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory. For GPUs only."""
    autocast: bool = False
    """Under the precisions bf16 and fp16, compute under autocast, as `ddp` does. This keeps a
    half-precision copy of the model's weights on every rank from forward to backward. If False,
    everything in the model is computed in half precision, and only shards are kept."""

    def plan(self, run: Run) -> StrategyPlan:
        """Plans a run in which every rank computes its own part of each global batch.

        Raises:
            SettingError: an option is not supported in this run or by this version of torch.
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
                f"leave find_unused_parameters out, and {USE_ALL_IN_EVERY_VIRTUAL_RANK}",
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
        """Returns why a module uses autocast in half precision; an empty string if it does not.

        Under autocast the parameters stay in fp32, and the units compute the same numbers as a
        model under `ddp`. The reason is printed in brackets, e.g. "bf16 under autocast (virtual
        ranks: the bits of ddp)": the results are those of `ddp` bit by bit.
        """
        if self.autocast:
            return "autocast=True: the numbers of ddp"
        if run.settings.virtual_ranks is not None:
            return "virtual ranks: the bits of ddp"

        # Without autocast all parameters are in half precision. Torch's own BatchNorm would fail
        # then: its parameters must have the dtype of its running statistics, which is fp32.
        for layer in module.modules():
            if isinstance(layer, BatchNorm) and not isinstance(layer, SyncBatchNorm):
                return f"{describe_type(layer)} that is not synchronised, and wants fp32 weights"
        return ""

    def spreads_model(self, run: Run) -> bool:
        """Returns True if there are several ranks, since each of them then holds only shards."""
        return run.topology.size > 1

    def wrap(self, module: nn.Module, run: Run) -> PreparedModule:
        """Replaces the parameters of a module by shards, which have the values of rank 0.

        With one process, or without parameters, nothing is sharded.

        Raises:
            SettingError: no submodule matches the option `blocks`.
            UsageError: a parameter cannot be sharded.
        """
        if run.topology.size == 1:
            return self._wrap_on_one_process(module, run)
        if next(module.parameters(), None) is None:
            return self._wrap_without_parameters(module, run)

        check_parameters(module)
        scalars = find_scalars(module)
        sharded_parameters: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            if name not in scalars:
                sharded_parameters[name] = parameter
        check_hooks(sharded_parameters)

        # The whole model is the last unit: it gets the parameters that belong to no block.
        blocks = find_blocks(module, self.blocks)
        units = {**dict(blocks.found), "": module}
        check_dtypes(list(units.values()))

        # The blocks are described before they are sharded, because torch renames their classes.
        choices = self._choices(module, blocks, run)
        half_dtype = self._half_dtype(module, run)
        model = _Model(units, self._make_mesh(run), run, half_dtype, scalars)
        outputs_of_units = self._shard_model(model)

        virtual_ranks = _make_virtual_rank_extensions(model, self.average_buffers)
        sharded = self._make_sharded_module(model, virtual_ranks)
        for outputs in outputs_of_units:
            outputs.on_backward = sharded.hide_gradients
            outputs.on_double_backward = sharded.begin_double_backward

        _adapt_methods_of_libraries(module, run)
        if model.scalars:
            unscale_shards_with_others()

        # They are notified of events in this order.
        extensions: list[Extension] = [sharded]
        gradient_bits = None
        if virtual_ranks is not None:
            extensions = [*virtual_ranks.extensions(), sharded]
            gradient_bits = virtual_ranks.gradient_bits
        elif model.scalars:
            averaged_scalars = AveragedScalars(module, list(model.scalars.values()), run.step)
            extensions = [averaged_scalars, sharded]

        shards = dict(module.named_parameters())
        return PreparedModule(
            module=module,
            choices=choices,
            replaced_parameters=[
                (parameter, shards[name]) for name, parameter in sharded_parameters.items()
            ],
            may_unfreeze=True,
            unsharded_parameters=list(sharded.whole_parameters.values()),
            zero_grad_misses_gradients=not self.accumulate_shards,
            units=units,
            equal_tensors=sharded.equal_tensors,
            gradient_bits=gradient_bits,
            extensions=extensions,
        )

    def _wrap_on_one_process(self, module: nn.Module, run: Run) -> PreparedModule:
        """Moves a module to the device of the only process, without sharding it."""
        prepared = on_one_process(module.to(run.device), run)
        choices = self._precision_choices(module, run)
        return replace(prepared, may_unfreeze=True, choices=choices)

    def _wrap_without_parameters(self, module: nn.Module, run: Run) -> PreparedModule:
        """Gives all ranks the buffers of rank 0, for a module that has nothing to shard."""
        _move_and_broadcast_from_first_rank(list(module.buffers()), run.device)
        nothing = Choice(self.name, "not sharded", "no parameters")
        return PreparedModule(module=module, choices=[nothing], may_unfreeze=True)

    def _half_dtype(self, module: nn.Module, run: Run) -> torch.dtype | None:
        """Returns the half-precision dtype in which units are computed; None for their own."""
        if not self.computes_in_half(module, run):
            return None
        return HALF_DTYPES[run.settings.precision]

    def _shard_model(self, model: _Model) -> list[UnitOutputs]:
        """Gives all ranks the values of rank 0, and replaces the parameters of the model by shards.

        Returns:
            The `UnitOutputs` of each unit.
        """
        # Buffers and scalars are not sharded: each rank gets all of them.
        _move_and_broadcast_from_first_rank(list(model.root.buffers()), model.run.device)
        scalars_with_memory = [p for p in model.scalars.values() if not p.is_meta]
        _move_and_broadcast_from_first_rank(scalars_with_memory, model.run.device)

        # Each rank gets the parameters of rank 0, unit by unit, and keeps its shards of them.
        outputs_of_units = self._shard_units(model)

        # The tensors of a model that was built on the meta device have no memory yet. They get it
        # here, filled with NaN; their values are computed or loaded later (`deferred_model`).
        if any(parameter.is_meta for parameter in model.root.parameters()):
            convert_tensors(
                model.root, lambda tensor: with_memory(tensor, self._device_of(tensor, model))
            )

        return outputs_of_units

    def _device_of(self, tensor: Tensor, model: _Model) -> torch.device:
        """Returns the device of a tensor of a sharded model. Only shards are offloaded."""
        is_shard = isinstance(tensor, DTensor)
        return torch.device("cpu") if self.cpu_offload and is_shard else model.run.device

    def _make_sharded_module(
        self, model: _Model, virtual_ranks: _VirtualRankExtensions | None
    ) -> ShardedModule:
        """Makes the object that follows the training of a model, and of its buffers.

        Args:
            model: the model, whose units are sharded already.
            virtual_ranks: averages the buffers in a run with virtual ranks, else None.
        """
        # Makes the buffers that forward passes change equal on all ranks, except those that
        # `VirtualRankBuffers` combines.
        make_moving_buffers = partial(
            MovingBuffers, model.root, model.run.step, strategy=type(self).__name__
        )

        moving_buffers: MovingBuffers | None
        if virtual_ranks is None:
            moving_buffers = make_moving_buffers(average=self.average_buffers)
        else:
            # `VirtualRankBuffers` calls it, after it has combined the others.
            virtual_ranks.buffers.moving_buffers = make_moving_buffers(
                left_out=virtual_ranks.buffers.combined_names
            )
            moving_buffers = None

        return ShardedModule(
            model.units,
            model.mesh,
            model.run,
            keep_gathered=not self.reshard_after_forward,
            accumulate_shards=self.accumulate_shards,
            find_unused_parameters=self.find_unused_parameters,
            half_dtype=model.half_dtype,
            moving_buffers=moving_buffers,
        )

    def _shard_units(self, model: _Model) -> list[UnitOutputs]:
        """Applies `fully_shard` to each unit, and returns two hooks of each unit (`UnitOutputs`).

        Hooks are called in the order of registration: one of ours before torch's own, and one after
        it. `fully_shard` registers torch's.
        """
        *blocks, whole_model = model.units.values()
        outputs_of_units: list[UnitOutputs] = []
        for unit in [*blocks, whole_model]:
            is_root = unit is whole_model
            # A block contains no units.
            outputs = UnitOutputs(unit, inner_units=blocks if is_root else [])
            outputs_of_units.append(outputs)

            policy = MixedPrecisionPolicy(
                param_dtype=model.half_dtype,
                reduce_dtype=None if model.half_dtype is None else torch.float32,
                # `Precision.attach` converts the inputs of the whole model, in any container.
                cast_forward_inputs=not is_root,
            )

            unit.register_forward_hook(outputs.before_torch)
            self._shard(unit, model, policy)  # registers torch's hook
            unit.register_forward_hook(outputs.after_torch)

        return outputs_of_units

    def _make_mesh(self, run: Run) -> DeviceMesh:
        """Returns a mesh of all ranks. Parameters are sharded over its last dimension.

        The mesh is made of process groups that are open already. `init_device_mesh` would open
        groups of its own, some of them without a timeout. In a second run of the same process on
        GPUs, it would also end the process with a segmentation fault, as torch's `split_group` does
        before 2.14 (pytorch#192106, #192109).
        """
        # From now on copies of a sharded parameter share its mesh. A copied mesh would keep process
        # groups of its own alive.
        share_meshes_with_copies()

        device_type = run.device.type
        shape = self._mesh_shape(run)
        if len(shape) == 1:
            all_ranks = dist.group.WORLD
            assert all_ranks is not None  # it is open while there is a run
            return DeviceMesh.from_group(all_ranks, device_type, mesh_dim_names=("shard",))

        # The ranks of a row share one copy of the model, and the ranks of a column hold the same
        # shard. For 2 copies of 2 shards, the rows are [[0, 1], [2, 3]].
        ranks = torch.arange(run.topology.size).view(shape)
        if "shard" not in run.groups:  # all models of a run use the same groups
            open_group(run, "replicate", ranks.T)  # a group for each column: [[0, 2], [1, 3]]
            open_group(run, "shard", ranks)  # a group for each row

        groups = [run.groups["replicate"], run.groups["shard"]]
        return DeviceMesh.from_group(
            groups, device_type, mesh=ranks, mesh_dim_names=("replicate", "shard")
        )

    def _shard(self, unit: nn.Module, model: _Model, policy: MixedPrecisionPolicy) -> None:
        """Replaces the parameters of a unit by shards, which have the values of rank 0.

        Parameters of inner units, which are sharded already, stay as they are.
        """
        scalars = set(model.scalars.values())  # they have no rows to cut, so ranks keep them whole
        parameters = [
            p for p in unit.parameters() if not isinstance(p, DTensor) and p not in scalars
        ]
        _move_and_broadcast_from_first_rank(
            [p for p in parameters if not p.is_meta], model.run.device
        )

        # By default torch frees the parameters of each unit after its forward pass, except those of
        # the whole model. With `reshard_after_forward=False` it frees none.
        options: dict[str, Any] = {}
        if not self.reshard_after_forward:
            options["reshard_after_forward"] = False
        if scalars:
            options["ignored_params"] = scalars

        fully_shard(
            unit,
            mesh=model.mesh,
            **options,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
        )

        # An optimizer may still hold the old parameters, which the model no longer uses.
        for parameter in parameters:
            _free_and_forbid_use(parameter)

    def total_norm(self, parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
        """Returns the norm of the whole gradient, with one small all-reduce over all shards."""
        # All parameters are sharded, so their gradients are DTensors, except for scalars.
        gradients = [p.grad for p in parameters if isinstance(p.grad, DTensor)]
        if not gradients:
            return super().total_norm(parameters, norm_type)
        shards = [gradient.to_local() for gradient in gradients]

        # Parameters are sharded over the last dimension of the mesh.
        mesh = gradients[0].device_mesh
        shard_dimension = mesh.ndim - 1
        group = mesh.get_group(shard_dimension)

        # Every rank of the group has the whole gradient of a scalar, and only the first one adds
        # it. The others add empty tensors, so that the norm has the same dtype on all ranks.
        counts_scalars = mesh.get_local_rank(shard_dimension) == 0
        parts = list(shards)
        for parameter in parameters:
            if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
                gradient = parameter.grad
                parts.append(gradient if counts_scalars else gradient.new_empty(0))

        norm = norm_over_ranks(parts, norm_type, torch.device(mesh.device_type), group)

        # With `cpu_offload` the shards are on the CPU, and the ranks communicate on the GPU.
        return norm.to(shards[0].device)

    def _mesh_shape(self, run: Run) -> tuple[int, ...]:
        """Returns the shape of the mesh: `(shards,)`, or `(copies, shards)` under HSDP."""
        return (run.topology.size,)

    def _choices(self, module: nn.Module, blocks: Blocks, run: Run) -> list[Choice]:
        """Returns the printed lines about units, shards and precision.

        Args:
            module: the model, before it is sharded.
            blocks: the blocks that become units.
            run: the run of this process.
        """
        num_bytes = sum(parameter.nbytes for parameter in module.parameters())
        choices = [self._units_choice(blocks), self._shards_choice(run, num_bytes)]
        return choices + self._precision_choices(module, run)

    def _shards_choice(self, run: Run, num_bytes: int) -> Choice:
        """Returns the printed line about the shards.

        Args:
            run: the run of this process.
            num_bytes: the size of the model's parameters.
        """
        value = f"{format_bytes(num_bytes)} over {run.topology.size} ranks"
        return Choice("shards", value, "parameters, gradients and optimizer state")

    def _precision_choices(self, module: nn.Module, run: Run) -> list[Choice]:
        """Returns the printed lines about the precision of the units; none under fp32 and fp64."""
        precision = run.settings.precision
        if precision not in HALF_DTYPES:
            return []

        value = f"{precision} under autocast"

        # Case 1: one process, which always uses autocast. Tell the user if several processes would
        # compute otherwise. With virtual ranks they would not: their results do not depend on the
        # number of processes.
        if run.topology.size == 1:
            has_virtual_ranks = run.settings.virtual_ranks is not None
            several_would_compute_alike = self.autocast or has_virtual_ranks
            if several_would_compute_alike:
                return []
            reason = (
                "one process; several would also compute norms and softmax in half precision "
                "(autocast=False)"
            )
            return [Choice("precision", value, reason)]

        # Case 2: several processes that use autocast.
        reason = self._reason_for_autocast(module, run)
        if reason:
            reason += "; copies of the weights stay on every rank until backward"
            return [Choice("precision", value, reason)]

        # Case 3: several processes that compute everything in half precision, the default.
        value = f"{precision} in every unit"
        reason = "also norms, softmax and losses in the model; gradients averaged, outputs in fp32"
        return [Choice("precision", value, reason)]

    def _units_choice(self, blocks: Blocks) -> Choice:
        """Returns the printed line about the units.

        For example:

            units: 12 x Block (each gathered for its own forward and backward; the rest at once)

        The rest are the parameters outside of these units, and blocks that cannot be units because
        they share a parameter with other modules. These blocks are named at the end.
        """
        if not blocks.found:
            reason = "no repeated blocks found: all parameters are gathered at once"
            return Choice("units", "the whole model", reason)

        reason = "each gathered for its own forward and backward; the rest at once"
        if not self.reshard_after_forward:
            reason = "each gathered for its forward and kept until the last backward"

        if blocks.tied_to_outside:
            names = ", ".join(blocks.tied_to_outside)
            reason += f"; not {names}: shares a parameter with what is outside"

        return Choice("units", str(blocks), reason)


@dataclass(frozen=True, kw_only=True)
class HSDP(FSDP):
    """The strategy `hsdp`, in which each group of ranks shards a copy of the model.

    Raises:
        SettingError: the shard size is not a whole number above 0.
    """

    name: ClassVar[str] = "hsdp"

    shard_size: int | None = None
    """How many neighbouring ranks share a copy of the model; None for all ranks of a machine."""

    def __post_init__(self) -> None:
        if self.shard_size is not None:
            check_whole_number(f"HSDP(shard_size={self.shard_size})", self.shard_size)

    def plan(self, run: Run) -> StrategyPlan:
        """Plans a run under HSDP, in which groups of ranks hold copies of the model.

        Every rank computes its own part of each global batch.

        Raises:
            SettingError: the number of ranks is not a multiple of the shard size.
            RanksDifferError: `shard_size` is None and the machines have different numbers of ranks.
        """
        size = run.topology.size
        shard_size = self._ranks_per_group(run)

        # If `shard_size` is None, it is the number of ranks on the machine. The error shows the
        # shard size of each rank, e.g. "ranks 0 to 3 have 1, 3, 3, 3 ranks a group".
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


class _VirtualRankExtensions(NamedTuple):
    """The objects that sum gradients and average buffers over virtual ranks."""

    scalars: SummedScalars | None
    """Sums the gradients of parameters without dimensions; None if there are none."""
    gradients: ShardedVirtualRanks
    buffers: VirtualRankBuffers

    def extensions(self) -> list[Extension]:
        """Returns them in the order in which they are notified of events.

        `gradients` removes what is left in `parameter.grad` when another virtual rank begins, so
        `scalars` comes before it.
        """
        if self.scalars is None:
            return [self.gradients, self.buffers]
        return [self.scalars, self.gradients, self.buffers]

    def gradient_bits(self) -> dict[str, Tensor]:
        """Returns sums over the bits of the gradients of the virtual rank that has just ended."""
        sums_of_shards = self.gradients.gradient_bits()
        if self.scalars is None:
            return sums_of_shards
        return {**sums_of_shards, **self.scalars.gradient_bits()}


def _make_virtual_rank_extensions(
    model: _Model, average_buffers: str | Sequence[str]
) -> _VirtualRankExtensions | None:
    """Makes the objects that sum gradients and average buffers over virtual ranks.

    Args:
        model: the model, whose units are sharded already.
        average_buffers: names, or patterns of names, of buffers that are averaged.

    Returns:
        The objects; None in a run without virtual ranks.
    """
    run = model.run
    if run.settings.virtual_ranks is None:
        return None

    tree = make_virtual_rank_tree(run)
    scalars = SummedScalars(model.scalars, tree, run.step) if model.scalars else None
    gradients = ShardedVirtualRanks(list(model.units.values()), tree, run.step, model.mesh)
    buffers = VirtualRankBuffers(model.root, tree, run.step, average_buffers)
    return _VirtualRankExtensions(scalars, gradients, buffers)


def _adapt_methods_of_libraries(module: nn.Module, run: Run) -> None:
    """Replaces methods of other libraries that expect whole parameters instead of shards."""
    if isinstance(module, AveragedModel):
        average_shards_separately(module)

    if callable(getattr(module, "save_pretrained", None)):
        save_pretrained_whole(module, run)


def _free_and_forbid_use(parameter: nn.Parameter) -> None:
    """Frees the memory of a parameter that shards replace, and makes every use of it an error.

    Torch refuses to replace the object if a graph or a weak reference refers to it. The parameter
    then stays, without elements.
    """
    parameter.data = parameter.data.new_empty(0)
    with suppress(RuntimeError):
        swap_tensors(parameter, ReplacedParameter(parameter.data))  # type: ignore[no-untyped-call]


def _move_and_broadcast_from_first_rank(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Moves tensors to a device, makes them contiguous, and gives them rank 0's values."""
    for tensor in tensors:
        tensor.data = tensor.data.to(device).contiguous()
    broadcast_from_first_rank(tensors)
