"""The strategy `pipeline`: a model is cut into stages, which are on different ranks.

The ranks of one *pipeline* compute one part of the global batch together, micro-batch by
micro-batch; several micro-batches keep all stages busy. Several pipelines may stand side by side:
each of them computes its own part of the global batch, and the gradients of equal stages are
averaged once per global batch. A rank's *position* is its number in its pipeline. The last stage is
on the first ranks, so that rank 0 has the model's output and its loss.

torch.distributed.pipelining has the same schedules, but its loss is a function that is given in
advance, and its shapes are fixed in the first step. Here the training loop computes the loss, and
the last batch of an epoch may be short. So torch's point-to-point operations and autograd are used
directly, in the order of `schedule.order`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.batch.indices import ceil_div
from lockstep.distributed.process_group import Run
from lockstep.errors import SettingError, UsageError
from lockstep.keyword_arguments import check_keywords_of_constructor
from lockstep.machine.topology import DataParallelRank, Topology
from lockstep.optim.precision import Precision
from lockstep.settings import Choice, check_whole_number
from lockstep.strategies.base import (
    PreparedModule,
    Strategy,
    StrategyPlan,
    open_group,
    plan_for,
    refuse_virtual_ranks,
)
from lockstep.strategies.pipeline.module import PipelinedModule, Wires
from lockstep.strategies.pipeline.place import ACROSS_PIPELINES, PipelinePlace
from lockstep.strategies.pipeline.split import Split, balanced_cuts, split, units
from lockstep.strategies.pipeline.stage import StagedModel
from lockstep.strategies.pipeline.training import PipelineSteps
from lockstep.strategies.pipeline.unit_costs import UnitCosts, measure
from lockstep.strategies.pipeline.wire import Wire
from lockstep.strategies.replication import broadcast_from_first_rank, norm_over_ranks
from lockstep.strategies.sync_batchnorm import SyncBatchNorm, convert
from lockstep.torch_compat import (
    BatchNorm,
    gpu_of_default_group,
    is_compiled,
    is_compiled_in_place,
    without_compile,
)
from lockstep.wording import count_noun

SCHEDULES = ("1f1b", "gpipe")
MICRO_BATCHES_PER_STAGE = 4
"""The default, with which ranks are idle for at most a fifth of the time."""


@check_keywords_of_constructor("lockstep.strategies.Pipeline")
@dataclass(frozen=True, kw_only=True)
class Pipeline(Strategy):
    """The strategy `pipeline` and its options.

    Raises:
        SettingError: an option has a value out of range, or two options exclude each other.
    """

    name: ClassVar[str] = "pipeline"
    computes_batch_side_by_side: ClassVar[bool] = False
    why_ranks_differ: ClassVar[str] = "each rank has the parameters of its own stage"

    stages: int | None = None
    """Number of ranks over which one copy of the model is spread, a divisor of the number of all
    ranks; None for all ranks."""
    split: Sequence[str] | None = None
    """Names of the submodules with which the stages begin, except for the first stage. None to cut
    the model into stages of equal cost, measured on an example from a loader that is given to the
    same `prepare`."""
    schedule: str = "1f1b"
    """`1f1b`, or `gpipe`, which keeps the activations of all micro-batches at the same time."""
    interleave: int = 1
    """Number of stages on each rank. More stages reduce the idle time of two or three ranks, but
    more is sent."""
    num_micro_batches: int | None = None
    """Number of micro-batches in a global batch. None for 4 per stage, unless `micro_batch_size` is
    set."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise SettingError(
                f"Pipeline(schedule={self.schedule!r})",
                f"schedules are {', '.join(SCHEDULES)}",
                "choose one; interleave=2 makes either an interleaved one",
            )

        for option in ("stages", "interleave", "num_micro_batches"):
            value = getattr(self, option)
            if value is not None:
                check_whole_number(f"Pipeline({option}={value!r})", value)

        if isinstance(self.split, str):
            raise SettingError(f"split={self.split!r}", "it is one text", "give a list of names")

    def plan(self, run: Run) -> StrategyPlan:
        """Plans a run in which each pipeline computes a part of the global batch, in micro-batches.

        Raises:
            SettingError: the options do not fit the number of ranks or each other, or precision is
                fp16.
        """
        refuse_virtual_ranks(
            run, self.name, "its micro-batches go through stages on several processes"
        )
        num_ranks = run.topology.size
        num_positions = self._ranks_per_pipeline(run.topology.size)
        if num_ranks % num_positions != 0:
            next_multiple = ceil_div(num_ranks, num_positions) * num_positions
            raise SettingError(
                f"Pipeline(stages={num_positions})",
                f"the world size {num_ranks} is not a multiple of it",
                f"start {next_multiple} processes, or use other stages",
            )

        if num_positions == 1 and num_ranks > 1:
            raise SettingError(
                "Pipeline(stages=1)",
                f"each of {num_ranks} processes would hold the whole model",
                "use strategy='ddp', or at least 2 stages",
            )

        num_cuts = num_positions * self.interleave - 1
        if self.split is not None and len(self.split) != num_cuts and num_ranks > 1:
            raise SettingError(
                f"Pipeline(split=...) with {len(self.split)} names",
                f"{num_positions} ranks with {count_noun(self.interleave, 'stage')} each begin at "
                f"{count_noun(num_cuts, 'cut')}",
                f"give {num_cuts} names",
            )

        if run.settings.precision == "fp16":
            raise SettingError(
                "strategy='pipeline' with precision='fp16'",
                "its loss scaler would skip steps on one stage and not on the others",
                "use precision='bf16', which needs none",
            )

        place = self._place(run.topology)
        if place.num_positions > 1 and place.num_pipelines > 1:
            # The group is opened before modules are wrapped, because BatchNorm layers may use it.
            open_group(run, ACROSS_PIPELINES, _table_of_ranks(run, place))

        return replace(
            plan_for(run, DataParallelRank(place.pipeline, place.num_pipelines)),
            num_micro_batches=self._num_micro_batches(run),
            statistics_group=ACROSS_PIPELINES,
            evaluation_is_collective=True,
        )

    def spreads_model(self, run: Run) -> bool:
        """Returns True if there are several stages on different ranks."""
        return self._ranks_per_pipeline(run.topology.size) > 1

    def wrap(self, module: nn.Module, run: Run) -> PreparedModule:
        """Cuts the module into stages and keeps those of this rank.

        Raises:
            SettingError: `split` does not fit the module, or BatchNorm would get other statistics.
            UsageError: the module cannot be cut.
        """
        place = self._place(run.topology)
        if place.num_positions == 1:
            choice = Choice("pipeline", "one stage", "one process")
            return PreparedModule(module=module.to(run.device), choices=[choice], may_unfreeze=True)

        self._check_module(module, run)
        self._set_statistics_groups(module, run)
        tensors = [*module.parameters(), *module.buffers()]
        broadcast_from_first_rank([tensor for tensor in tensors if not tensor.is_meta])
        cuts, reason = self._cut(module, run, place)
        check_compiled_parts(module, cuts)
        model = StagedModel(module, cuts, place.stages, run.device)
        wires = self._open_wires(run, place)
        pipelined = PipelinedModule(model, place, self.schedule, run, wires)
        side_by_side = ""
        if place.num_pipelines > 1:
            side_by_side = f", {place.num_pipelines} of them side by side"

        choices = [
            Choice(
                "pipeline",
                f"{place.last_stage + 1} stages on {place.num_positions} ranks",
                f"{self.schedule}{side_by_side}; rank 0 has the last stage, and so the loss",
            ),
            Choice("stages", f"begin at {', '.join(cuts.cuts)}", reason),
        ]

        # The model must not refer to removed parameters any more, since that would keep all of the
        # user's model in memory.
        parameters_on_other_ranks = model.parameters_on_other_ranks
        model.parameters_on_other_ranks = []
        return PreparedModule(
            module=pipelined,
            choices=choices,
            replaced_parameters=[
                (parameter, None)  # None: the values are on other ranks
                for parameter in parameters_on_other_ranks
            ],
            may_unfreeze=True,
            zero_grad_misses_gradients=True,
            gradients_after_backward=True,
            equal_tensors=pipelined.equal_tensors,
            extensions=[PipelineSteps(pipelined)],
        )

    def backward(
        self, modules: Sequence[nn.Module], loss: Tensor, precision: Precision, **options: Any
    ) -> None:
        """Gives the loss to the pipelined module that was called, which runs backward passes.

        Raises:
            UsageError: not exactly one module was called, or an option is set that only the last
                stage could follow.
        """
        # On one process `wrap` returns the module itself, since there is nothing to cut.
        pipelined = [module for module in modules if isinstance(module, PipelinedModule)]
        if not pipelined:
            precision.backward(loss, **options)
            return

        waiting = [module for module in pipelined if module.waits_for_loss]
        if not waiting:
            raise UsageError(
                "world.backward without a forward pass of the prepared model",
                "the pipeline has nothing to send gradients back for",
                "call the object that world.prepare returned, once for each world.backward",
            )

        if len(waiting) > 1:
            raise UsageError(
                "one world.backward for several models under strategy='pipeline'",
                f"{len(waiting)} prepared models were called with gradients",
                "make one module of them, or use strategy='ddp' or 'fsdp'",
            )

        for option in ("inputs", "create_graph"):
            if options.get(option):
                raise UsageError(
                    f"world.backward(loss, {option}=...) under strategy='pipeline'",
                    "it would apply to the last stage alone, and the others compute all gradients",
                    "leave it out, or use strategy='ddp' or 'fsdp'",
                )

        waiting[0].backward(loss, precision, **options)

    def total_norm(self, parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
        """Returns the norm of the gradients of all stages.

        Args:
            parameters: the parameters of the model, or of a part of it. Those of other stages are
                on the meta device and have no gradient here.
            norm_type: the type of the norm, as for `torch.nn.utils.get_total_norm`.
        """
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if num_ranks == 1:
            return super().total_norm(parameters, norm_type)

        gradients = [p.grad for p in parameters if p.grad is not None]
        local_parameters = [p for p in parameters if not p.is_meta]
        device = _device_of_default_group()
        if local_parameters:
            device = local_parameters[0].device

        # Every pipeline has all stages, so a gradient is on as many ranks as there are pipelines.
        # The sum over all ranks counts it that often, and is divided by their number (`copies`).
        num_pipelines = num_ranks // self._ranks_per_pipeline(num_ranks)
        return norm_over_ranks(gradients, norm_type, device, copies=num_pipelines)

    def _ranks_per_pipeline(self, num_ranks: int) -> int:
        """Returns the number of ranks in a pipeline, by default all ranks.

        The user's option for it is called `stages`, although each rank may have several stages of
        the model (`interleave`).
        """
        if num_ranks == 1:
            return 1
        return self.stages or num_ranks

    def _num_micro_batches(self, run: Run) -> int:
        """Returns the number of micro-batches in a global batch.

        Raises:
            SettingError: the number was set twice, to different values.
        """
        from_options = self.num_micro_batches
        from_settings = run.settings.num_micro_batches
        if from_options is not None and from_settings is not None:
            if from_options != from_settings:
                raise SettingError(
                    f"Pipeline(num_micro_batches={from_options}) and "
                    f"num_micro_batches={from_settings}",
                    "they contradict each other",
                    "set it in one place",
                )

        if from_options is not None:
            return from_options
        if from_settings is not None:
            return from_settings

        ranks_in_pipeline = self._ranks_per_pipeline(run.topology.size)
        default = MICRO_BATCHES_PER_STAGE * ranks_in_pipeline
        if ranks_in_pipeline == 1:  # there are no other stages to keep busy
            default = 1
        if run.settings.micro_batch_size:  # the loader divides by this size, perhaps into more
            default = 1
        return max(default, run.settings.min_micro_batches)

    def _place(self, topology: Topology) -> PipelinePlace:
        """Returns the place of this rank in the pipelines."""
        num_positions = self._ranks_per_pipeline(topology.size)
        return PipelinePlace.of_rank(topology.rank, topology.size, num_positions, self.interleave)

    def _open_wires(self, run: Run, place: PipelinePlace) -> Wires:
        """Opens the process groups of one model, and returns the wires that use them.

        Every model has its own groups, because NCCL cannot tell messages of two models apart. Over
        Gloo receives are posted early, so tags tell the messages of a group apart. For 2 cuts:

            wire            group                           tag of cut 0    tag of cut 1
            activations     activations                     0               1
            outputs         activations                     2               3
            gradients       `PipelinePlace.gradient_group`  0               1
        """
        model_number = len(run.prepared)

        # `open_group` opens a group for each row of a table, such as [[0, 2], [1, 3]].
        ranks_of_pipelines = _table_of_ranks(run, place).T
        activations = open_group(run, f"activations of model {model_number}", ranks_of_pipelines)

        # There are several, so that receiving a gradient need not wait until another has been sent.
        gradients: list[dist.ProcessGroup] = []
        for number in range(place.num_gradient_groups):
            name = f"gradients {number} of model {model_number}"
            gradients.append(open_group(run, name, ranks_of_pipelines))

        num_cuts = place.last_stage  # stages count from 0, and each except stage 0 begins at a cut
        wires = Wires([], [], [])
        for cut in range(num_cuts):
            group = gradients[place.gradient_group(cut)]
            tag_of_output = num_cuts + cut
            wires.activations.append(Wire(activations, run.device, tag=cut))
            wires.gradients.append(Wire(group, run.device, tag=cut))
            wires.outputs.append(Wire(activations, run.device, tag=tag_of_output))

        return wires

    def _set_statistics_groups(self, module: nn.Module, run: Run) -> None:
        """Makes SyncBatchNorm layers take their statistics over the ranks with the same stages.

        Other ranks do not run these layers. With a single pipeline, each rank computes them alone.
        """
        layers = [m for m in module.modules() if isinstance(m, SyncBatchNorm | nn.SyncBatchNorm)]
        if not layers:
            return

        # With several pipelines, which hold replicas of the model, this is the group of the ranks
        # with the same stages.
        group = run.groups.get(ACROSS_PIPELINES)
        has_one_pipeline = group is None
        if has_one_pipeline:
            group = _open_group_of_this_rank_alone(run)

        for layer in layers:
            # Torch's own layer (`nn.SyncBatchNorm`) becomes Lockstep's (`SyncBatchNorm`), in place.
            # Torch's works neither on CPUs nor on the meta device, where the pipeline computes
            # shapes of other stages.
            if isinstance(layer, nn.SyncBatchNorm):
                convert(layer, group)  # sets the group; leaves classes of the user alone

            if layer.process_group is None:
                layer.process_group = group

    def _check_module(self, module: nn.Module, run: Run) -> None:
        """Raises an error if the stages would not compute the same as one device.

        BatchNorm takes its statistics from each micro-batch. So the user must have set the number
        of micro-batches, with which one device computes the same statistics.

        Raises:
            SettingError: the model has BatchNorm, and the user has not set the number of
                micro-batches.
            UsageError: the model is compiled as a whole.
        """
        if is_compiled(module):
            raise _compiled_around_cuts_error(type(without_compile(module)).__name__)

        has_batchnorm = any(isinstance(part, BatchNorm) for part in module.modules())
        user_set_the_number = (
            self.num_micro_batches
            or run.settings.num_micro_batches
            or run.settings.micro_batch_size
        )
        if has_batchnorm and not user_set_the_number:
            raise SettingError(
                "strategy='pipeline' for a model with BatchNorm",
                f"a global batch is cut into {self._num_micro_batches(run)} micro-batches by "
                "default, and BatchNorm takes its statistics from one of them, not from the whole "
                "batch",
                "say how many: lockstep.strategies.Pipeline(num_micro_batches=...), or "
                "micro_batch_size=; one device with the same number of micro-batches computes the "
                "same",
            )

    def _cut(self, module: nn.Module, run: Run, place: PipelinePlace) -> tuple[Split, str]:
        """Cuts the module, either at the names that are set or into stages of equal cost.

        A *unit* is a submodule before which the model can be cut.

        Returns:
            The cut module, and the reason for the cuts, to be printed.

        Raises:
            UsageError: there are fewer submodules to cut at than stages.
            SettingError: the names that are set do not fit the module.
        """
        if self.split is not None:
            return split(module, self.split), "as set"

        unit_names = units(module)

        # All ranks must cut at the same places, so rank 0 measures for all of them.
        measured = None
        if run.topology.is_main:
            measured = measure(module, unit_names, run.examples)

        # The values travel as JSON, in which a named tuple becomes a list.
        costs_on_rank_0 = run.collectives.exchange(measured)[0]
        unit_costs = UnitCosts(*costs_on_rank_0)

        num_stages = place.last_stage + 1
        first_units_of_later_stages = _choose_first_units(unit_names, unit_costs, num_stages)
        cuts = [unit_names[unit_index] for unit_index in first_units_of_later_stages]

        boundaries = [0, *first_units_of_later_stages, len(unit_names)]
        costs_of_stages = _sums_between_boundaries(unit_costs.costs, boundaries)
        return split(module, cuts), f"{_percentages(costs_of_stages)} {unit_costs.reason}"


def _open_group_of_this_rank_alone(run: Run) -> dist.ProcessGroup:
    """Opens a process group for each rank, and returns the one that has only this rank."""
    # `open_group` opens a group for each row of a table. Here the table is [[0], [1], [2], ...].
    one_rank_per_row = torch.arange(run.topology.size)[:, None]
    return open_group(run, "alone", one_rank_per_row)


def _table_of_ranks(run: Run, place: PipelinePlace) -> Tensor:
    """Returns the ranks of all pipelines, shape `(positions, pipelines)`.

    A row has the ranks at one position, which have equal stages; a column has the ranks of one
    pipeline.
    """
    return torch.arange(run.topology.size).view(place.num_positions, place.num_pipelines)


def _device_of_default_group() -> torch.device:
    """Returns the GPU with which the default process group was opened; the CPU if there is none.

    A rank that holds nothing of a clipped part of the model must send from a GPU if the other ranks
    do. Otherwise they would wait for this rank over NCCL, while it waited for them over Gloo.
    """
    return gpu_of_default_group() or torch.device("cpu")


def _percentages(costs_of_stages: Sequence[float]) -> str:
    """Returns the share of each stage as text: `[12, 13] -> "48% + 52%"`."""
    total = sum(costs_of_stages) or 1  # all may be 0
    return " + ".join(f"{cost / total:.0%}" for cost in costs_of_stages)


def _choose_first_units(names: Sequence[str], unit_costs: UnitCosts, num_stages: int) -> list[int]:
    """Chooses the units with which stages begin, so that all stages have nearly the same cost.

    Args:
        names: the names of the *units*: submodules before which the model can be cut.
        unit_costs: the cost of each unit, and whether the model calls it.
        num_stages: the number of stages.

    Returns:
        The index of the first unit of each stage, except for the first stage.

    Raises:
        UsageError: there are fewer possible cuts than stages.
    """
    # A stage begins when its first unit is called, so that must be a unit that the model calls. The
    # exception is unit 0: the first stage begins with the forward pass itself.
    possible_units: list[int] = []
    for index in range(len(names)):
        if index == 0 or unit_costs.called[index]:
            possible_units.append(index)

    if len(possible_units) < num_stages:
        shown = ", ".join(names[index] for index in possible_units)
        raise UsageError(
            f"a pipeline of {num_stages} stages",
            f"the model can be cut into {len(possible_units)} parts: {shown or 'none'}",
            "use fewer stages, or name the submodules to cut at: Pipeline(split=[...])",
        )

    # Put each of these units into a group with the units after it that are not called. Then divide
    # the groups among the stages, and find the group with which each stage but the first begins.
    # For example, the units 0, 2 and 3 of 5 are possible: the groups are (0, 1), (2,) and (3, 4).
    # If the second stage begins with group 1, its first unit is 2.
    costs_of_groups = _sums_between_boundaries(unit_costs.costs, [*possible_units, len(names)])
    groups_at_cuts = balanced_cuts(costs_of_groups, num_stages)

    return [possible_units[group] for group in groups_at_cuts]


def _sums_between_boundaries(numbers: Sequence[float], boundaries: Sequence[int]) -> list[float]:
    """Returns the sums of numbers between boundaries: `([1, 2, 3, 4], [0, 2, 4]) -> [3, 7]`."""
    return [sum(numbers[begin:end]) for begin, end in itertools.pairwise(boundaries)]


def check_compiled_parts(module: nn.Module, cuts: Split) -> None:
    """Raises UsageError if torch.compile would trace across the border between two stages.

    Args:
        module: the user's model.
        cuts: where the model is cut, and which stage each submodule belongs to.
    """
    for name, part in module.named_modules():
        stage = cuts.stage_of(name)
        is_divided_over_stages = stage is None
        if is_divided_over_stages and is_compiled(part):
            raise _compiled_around_cuts_error(name)

        # The pipeline adds code to the call of each piece, which sends and receives tensors.
        # `block.compile()` compiles this code too, which fails. `torch.compile(block)` only
        # compiles the block, so it is allowed.
        is_piece = name in cuts.pieces
        if is_piece and is_compiled_in_place(part):
            raise UsageError(
                f"{name}.compile() under strategy='pipeline'",
                "it compiles the place where a stage begins or ends, too, which cannot be compiled",
                "put what torch.compile returns in its place, before world.prepare: "
                "model.layers[i] = torch.compile(model.layers[i])",
            )


def _compiled_around_cuts_error(name: str) -> UsageError:
    """Returns the error for a compiled module that is to be divided over stages."""
    return UsageError(
        f"world.prepare of a model under strategy='pipeline' with {name} compiled",
        "it is cut into stages, and no rank runs the whole of it, so it cannot be compiled as one",
        "compile its blocks one by one instead, before world.prepare: "
        "model.layers[i] = torch.compile(model.layers[i])",
    )
