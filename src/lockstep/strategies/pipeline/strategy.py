"""A model cut into stages, each on a rank of its own, alone or times data parallel.

Ranks of one pipeline compute one part of the global batch together, micro-batch by micro-batch; the
number of micro-batches is what keeps the stages busy. Pipelines side by side each compute a part of
their own, and average the gradients of equal stages once a global batch.

The last stage is on the first ranks, so that rank 0 has the model's output and its loss.

torch.distributed.pipelining has the same schedules. Its loss is a function given beforehand and its
shapes are fixed at the first step; here the loss is what the training loop computes, and the last
batch of an epoch may be short. So the point-to-point operations and autograd of torch are used
directly, under the orders of `schedule.order`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.process_group import Run
from lockstep.distributed.topology import DataParallelRank, Topology
from lockstep.distributed.torch_compat import (
    BatchNorm,
    is_compiled,
    is_compiled_in_place,
    without_compile,
)
from lockstep.errors import SettingError, UsageError
from lockstep.optim.precision import Precision
from lockstep.settings import Choice, check_whole_number
from lockstep.strategies.base import PreparedModule, Strategy, StrategyPlan, open_group, plan_for
from lockstep.strategies.pipeline.module import PipelinedModule, StepsOfPipeline
from lockstep.strategies.pipeline.schedule import Place
from lockstep.strategies.pipeline.split import Split, balanced, measure, split, units
from lockstep.strategies.pipeline.stage import StagedModel
from lockstep.strategies.replication import norm_over_ranks, take_from_first
from lockstep.strategies.sync_batchnorm import SyncBatchNorm, convert
from lockstep.wording import count_noun

_SCHEDULES = ("1f1b", "gpipe")
_MICRO_BATCHES = 4
"""For each stage, by default: a fifth of the time is then spent waiting at most."""


@dataclass(frozen=True, kw_only=True)
class Pipeline(Strategy):
    """Options of the pipeline.

    Raises:
        SettingError: a value out of range, or two that do not go together.
    """

    name: ClassVar[str] = "pipeline"

    stages: int | None = None
    """Ranks that one copy of the model is spread over; None: all. It divides the world size."""
    split: Sequence[str] | None = None
    """Names of the submodules that begin the stages after the first; None: cut into stages of equal
    cost, measured on an example from a loader given to the same `prepare`."""
    schedule: str = "1f1b"
    """`1f1b` or `gpipe`, which holds the activations of all micro-batches at a time."""
    interleave: int = 1
    """Stages on each rank: several send more, and wait less on two or three ranks."""
    num_micro_batches: int | None = None
    """Micro-batches of a global batch; None: 4 for each stage, unless `micro_batch_size` is set."""

    def __post_init__(self) -> None:
        if self.schedule not in _SCHEDULES:
            raise SettingError(
                f"Pipeline(schedule={self.schedule!r})",
                f"schedules are {', '.join(_SCHEDULES)}",
                "choose one; interleave=2 makes either an interleaved one",
            )
        for name in ("stages", "interleave", "num_micro_batches"):
            value = getattr(self, name)
            if value is not None:
                check_whole_number(f"Pipeline({name}={value!r})", value)
        if isinstance(self.split, str):
            raise SettingError(f"split={self.split!r}", "it is one text", "give a list of names")

    def plan(self, run: Run) -> StrategyPlan:
        """One part of the batch for each pipeline, in micro-batches that keep its stages busy.

        Raises:
            SettingError: sizes that do not fit, or precision fp16.
        """
        size, stages = run.topology.size, self._positions(run.topology)
        if size % stages:
            raise SettingError(
                f"Pipeline(stages={stages})",
                f"the world size {size} is not a multiple of it",
                f"start {-(-size // stages) * stages} processes, or use other stages",
            )
        if stages == 1 < size:
            raise SettingError(
                "Pipeline(stages=1)",
                f"each of {size} processes would hold the whole model",
                "use strategy='ddp', or at least 2 stages",
            )
        cuts = stages * self.interleave - 1
        if self.split is not None and len(self.split) != cuts and size > 1:
            raise SettingError(
                f"Pipeline(split=...) with {len(self.split)} names",
                f"{stages} ranks with {count_noun(self.interleave, 'stage')} each begin at "
                f"{count_noun(cuts, 'cut')}",
                f"name {cuts}",
            )
        if run.settings.precision == "fp16":
            raise SettingError(
                "strategy='pipeline' with precision='fp16'",
                "its loss scaler would skip steps on one stage and not on the others",
                "use precision='bf16', which needs none",
            )
        place = self._place(run.topology)
        if place.positions > 1:
            self._open_groups(run, place)  # now: BatchNorm may be given that of equal stages
        return replace(
            plan_for(run, DataParallelRank(place.replica, place.replicas)),
            num_micro_batches=self._micro_batches(run),
            statistics_group="replicas",
            evaluation_is_collective=True,
        )

    def wrap(self, module: nn.Module, run: Run) -> PreparedModule:
        """The module cut into stages, of which this rank keeps its own.

        Raises:
            SettingError: `split` does not fit the module, or BatchNorm would get other statistics.
            UsageError: a module that cannot be cut, or a second one.
        """
        place = self._place(run.topology)
        if place.positions == 1:
            choice = Choice("pipeline", "one stage", "one process")
            return PreparedModule(module=module.to(run.device), choices=[choice], may_unfreeze=True)
        self._check_module(module, run)
        self._share_statistics(module, run)
        take_from_first([*module.parameters(), *module.buffers()])
        found, reason = self._cut(module, run, place)
        check_compiled_parts(module, found)
        model = StagedModel(module, found, place.stages, run.device)
        wrapped = PipelinedModule(model, place, self.schedule, run)
        copies = f", {place.replicas} of them side by side" if place.replicas > 1 else ""
        choices = [
            Choice(
                "pipeline",
                f"{place.last_stage + 1} stages on {place.positions} ranks",
                f"{self.schedule}{copies}; rank 0 has the last stage, and so the loss",
            ),
            Choice("stages", f"begin at {', '.join(found.cuts)}", reason),
        ]
        gone, model.gone = model.gone, []  # nothing may keep the whole model in memory
        return PreparedModule(
            module=wrapped,
            choices=choices,
            replaced_parameters=[(old, None) for old in gone],
            may_unfreeze=True,
            zero_grad_misses_gradients=True,
            gradients_after_backward=True,
            equal_tensors=wrapped.equal_tensors,
            extensions=[StepsOfPipeline(wrapped)],
        )

    def backward(
        self, modules: Sequence[nn.Module], loss: Tensor, precision: Precision, **options: Any
    ) -> None:
        """The backward passes that this loss allows.

        Raises:
            UsageError: several models, none, or an option that other stages cannot follow.
        """
        waiting = [m for m in modules if isinstance(m, PipelinedModule) and m.waits_for_loss]
        if len(waiting) > 1:
            raise UsageError(
                "one world.backward for several models under strategy='pipeline'",
                f"{len(waiting)} prepared models were called with gradients",
                "make one module of them, or use strategy='ddp' or 'fsdp'",
            )
        if waiting:
            refused = [name for name in ("inputs", "create_graph") if options.get(name)]
            if refused:
                raise UsageError(
                    f"world.backward(loss, {refused[0]}=...) under strategy='pipeline'",
                    "it would hold for the last stage alone, and the others compute all gradients",
                    "leave it out, or use strategy='ddp' or 'fsdp'",
                )
            waiting[0].backward(loss, precision, **options)
        elif not any(isinstance(m, PipelinedModule) for m in modules):  # one process
            precision.backward(loss, **options)
        else:
            raise UsageError(
                "world.backward without a forward pass of the prepared model",
                "the pipeline has nothing to send gradients back for",
                "call the object that world.prepare returned, once for each world.backward",
            )

    def total_norm(self, parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
        """Over all stages, each of which is on as many ranks as there are pipelines."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks == 1:
            return super().total_norm(parameters, norm_type)
        own = [p.grad for p in parameters if p.grad is not None]
        device = next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))
        return norm_over_ranks(own, norm_type, device, copies=ranks // (self.stages or ranks))

    def _micro_batches(self, run: Run) -> int:
        own, of_run = self.num_micro_batches, run.settings.num_micro_batches
        if own is not None and of_run is not None and own != of_run:
            raise SettingError(
                f"Pipeline(num_micro_batches={own}) and num_micro_batches={of_run}",
                "they contradict each other",
                "set it in one place",
            )
        if own is not None or of_run is not None:
            return own or of_run or 1
        stages = self._positions(run.topology)
        wanted = 1 if stages == 1 or run.settings.micro_batch_size else _MICRO_BATCHES * stages
        return max(wanted, run.settings.min_micro_batches)

    def _positions(self, topology: Topology) -> int:
        return 1 if topology.size == 1 else self.stages or topology.size

    def _place(self, topology: Topology) -> Place:
        positions = self._positions(topology)
        return Place.of(topology.rank, topology.size, positions, self.interleave)

    def _open_groups(self, run: Run, place: Place) -> None:
        ranks = torch.arange(run.topology.size).view(place.positions, place.replicas)
        cuts = 1 if self.interleave == 1 else place.last_stage
        for what, cut in itertools.product(("activations", "gradients"), range(cuts)):
            open_group(run, f"{what} {cut}", ranks.T)
        if place.replicas > 1:
            open_group(run, "replicas", ranks)

    def _share_statistics(self, module: nn.Module, run: Run) -> None:
        """Layers that would take statistics of all ranks take those of equal stages."""
        layers = [m for m in module.modules() if isinstance(m, SyncBatchNorm | nn.SyncBatchNorm)]
        group = run.groups.get("replicas")
        if layers and group is None:
            group = open_group(run, "alone", torch.arange(run.topology.size)[:, None])
        for layer in layers:
            if isinstance(layer, nn.SyncBatchNorm):  # torch's knows no CPU, and no shapes
                convert(layer, group)
            if layer.process_group is None:
                layer.process_group = group

    def _check_module(self, module: nn.Module, run: Run) -> None:
        """Raises where the stages would not compute what one device computes.

        Raises:
            SettingError: a model with BatchNorm, and nothing says how many micro-batches there are.
            UsageError: the model is compiled as a whole.
        """
        if is_compiled(module):
            raise _compiled_around_cuts(type(without_compile(module)).__name__)
        normalised = any(isinstance(m, BatchNorm) for m in module.modules())
        settings = run.settings
        chosen = (self.num_micro_batches, settings.num_micro_batches, settings.micro_batch_size)
        if normalised and not any(chosen):
            raise SettingError(
                "strategy='pipeline' for a model with BatchNorm",
                f"a global batch is cut into {self._micro_batches(run)} micro-batches by default, "
                "and BatchNorm takes its statistics from one of them, not from the whole batch",
                "say how many: lockstep.strategies.Pipeline(num_micro_batches=...), or "
                "micro_batch_size=; one device with as many computes the same",
            )

    def _cut(self, module: nn.Module, run: Run, place: Place) -> tuple[Split, str]:
        """Where the module is cut, with the reason; rank 0 measures for all."""
        if self.split is not None:
            return split(module, self.split), "as set"
        names = units(module)
        measured = measure(module, names, run.examples) if run.topology.is_main else None
        costs, reason, called = run.collectives.exchange(measured)[0]
        # A stage that begins with a submodule that is never called would never begin, so such
        # submodules stay with the one before them.
        firsts = [at for at in range(len(names)) if at == 0 or called[at]]
        if len(firsts) < place.last_stage + 1:
            candidates = ", ".join(names[at] for at in firsts)
            raise UsageError(
                f"a pipeline of {place.last_stage + 1} stages",
                f"the model can be cut into {len(firsts)} parts: {candidates or 'none'}",
                "use fewer stages, or name the submodules to cut at: Pipeline(split=[...])",
            )
        bounds = [*firsts, len(names)]
        numbers = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        cuts = [names[firsts[at]] for at in balanced(numbers, place.last_stage + 1)]
        edges = [0, *(names.index(cut) for cut in cuts), len(names)]
        parts = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
        shown = " + ".join(f"{part / (sum(parts) or 1):.0%}" for part in parts)
        return split(module, cuts), f"{shown} {reason}"


def check_compiled_parts(module: nn.Module, cuts: Split) -> None:
    """Raises UsageError where torch.compile would trace across the border of a stage."""
    for name, part in module.named_modules():
        holds_cut = cuts.stage_of(name) is None
        if holds_cut and is_compiled(part):
            raise _compiled_around_cuts(name)
        # What torch.compile(block) returns calls the block's forward, in whose place the pipeline
        # puts its own. What block.compile() compiles is the call around that.
        if name in cuts.pieces and is_compiled_in_place(part):
            raise UsageError(
                f"{name}.compile() under strategy='pipeline'",
                "it compiles the place where a stage begins or ends, too, which cannot be compiled",
                "put what torch.compile returns in its place, before world.prepare: "
                "model.layers[i] = torch.compile(model.layers[i])",
            )


def _compiled_around_cuts(name: str) -> UsageError:
    return UsageError(
        f"world.prepare of a model under strategy='pipeline' with {name} compiled",
        "it is cut into stages, and no rank runs the whole of it, so there is no whole to compile",
        "compile its blocks one by one instead, before world.prepare: "
        "model.layers[i] = torch.compile(model.layers[i])",
    )
