"""One process that computes on several devices: `torch.nn.DataParallel`, exact.

It needs no launcher, and it is the slower way: all replicas share one Python, the parameters are
copied in every step, and the first device holds outputs, loss and optimizer. `module` says what is
computed where, `replicas` how the replicas run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lockstep.distributed.process_group import Run
from lockstep.distributed.seeding import mix_seed
from lockstep.distributed.topology import DataParallelRank
from lockstep.distributed.torch_compat import BatchNorm
from lockstep.errors import SettingError, UsageError, warn
from lockstep.session.extension import DeliveredBatch, Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.settings import Choice, is_auto
from lockstep.strategies.base import Strategy, StrategyPlan, Wrapped
from lockstep.strategies.data_parallel.module import DataParallel


@dataclass(frozen=True, kw_only=True)
class DP(Strategy):
    """Options of DataParallel. The devices' shares are those of the run: `--shares 2:3:3`."""

    name: ClassVar[str] = "dp"

    device_ids: Sequence[int] | None = None
    """GPUs, the first of which is the run's device; None: all that are visible."""
    output_device: int | None = None
    """GPU that the outputs are joined on; None: the first."""
    dim: int = 0
    """Of the samples."""
    replicas: int | None = None
    """So many on the run's device instead, sharing its parameters; for trying it out."""

    def plan(self, run: Run) -> StrategyPlan:
        """The loader sees one part; the devices divide it.

        Raises:
            SettingError: several processes, or devices or shares that do not fit.
        """
        if run.topology.size > 1:
            raise SettingError(
                "strategy='dp'",
                f"world size {run.topology.size}: dp is one process for all its devices",
                "use strategy='ddp', or start one process",
            )
        example = self._wrapped(nn.Identity(), run)  # where devices and shares are checked
        home = example.device_ids
        if home and home[0] != run.device.index:
            raise SettingError(
                f"DP(device_ids={home})",
                f"the first of them holds the parameters, and batches arrive on {run.device}",
                f"begin with {run.device.index}, or set device='cuda:{home[0]}'",
            )
        return StrategyPlan(
            rank=DataParallelRank(0, 1),
            shares=(1,),
            devices=example.count,
            own_devices=range(example.count),
            device_shares=None
            if is_auto(run.settings.shares) and example.count > 1
            else tuple(example.shares),
            num_micro_batches=max(
                run.settings.min_micro_batches, run.settings.num_micro_batches or 1
            ),
            autotunes=True,
        )

    def wrap(self, module: nn.Module, run: Run) -> Wrapped:
        """The module in `DataParallel`.

        Raises:
            UsageError: it is in a DataParallel already.
        """
        if isinstance(module, nn.DataParallel):
            raise UsageError(
                f"world.prepare of a {type(module).__name__} under strategy 'dp'",
                "the strategy wraps the module itself",
                "prepare the bare module and set shares, or use strategy='single'",
            )
        wrapped = self._wrapped(module.to(run.device), run)
        _part_random_streams(wrapped, run)
        return Wrapped(
            module=wrapped,
            choices=self._choices(wrapped, run),
            extensions=[_WeightedMeans(wrapped)],
        )

    def _wrapped(self, module: nn.Module, run: Run) -> DataParallel:
        device_ids, replicas = self.device_ids, self.replicas
        if device_ids is None and replicas is None:
            if run.device.type == "cpu":
                replicas = 1
            else:
                others = set(range(torch.cuda.device_count())) - {run.device.index}
                device_ids = [run.device.index, *sorted(others)]
        return DataParallel(
            module,
            device_ids,
            self.output_device,
            self.dim,
            replicas=replicas,
            shares=None if is_auto(run.settings.shares) else run.settings.shares,
            sync_batchnorm=run.settings.sync_batchnorm,
        )

    def _choices(self, wrapped: DataParallel, run: Run) -> list[Choice]:
        if self.replicas is not None:
            reason = f"on {run.device}, as set: they share the parameters"
        elif wrapped.device_ids:
            reason = f"on GPUs {', '.join(map(str, wrapped.device_ids))}; outputs and loss on one"
        else:
            reason = "no GPU; strategy=lockstep.strategies.DP(replicas=2) computes on two replicas"
        choices = [Choice("replicas", str(wrapped.count), reason)]
        if len(set(wrapped.shares)) > 1:
            shown = ":".join(map(str, wrapped.shares))
            choices.append(Choice("shares", shown, "of every micro-batch, over the devices"))
        has = any(isinstance(m, BatchNorm) for m in wrapped.module.modules())
        if has and wrapped.count > 1 and not run.settings.sync_batchnorm:
            reason = "sync_batchnorm=False; the first device's statistics stay"
            choices.append(Choice("batchnorm", "per device", reason))
        of = "the samples of all devices, as on one"
        return choices + wrapped.batchnorms.choices(each="device", of=of)


class _WeightedMeans(Extension):
    """Warns of losses that the devices took means of, from a loader whose samples have weights."""

    def __init__(self, module: DataParallel) -> None:
        self._module = module
        self._weighted = self._warned = False

    def delivered(self, event: DeliveredBatch) -> None:
        self._weighted = event.loader.weight is not None

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        if self._weighted and not self._warned and self._module.averaged:
            self._warned = True
            warn(
                f"a mean computed inside of a model on {self._module.count} devices, and a loader "
                "with weight=",
                "a device's mean counts by its samples; their weight is that of the whole batch",
                "return the loss of each sample and what it weighs, and divide their sums "
                "outside; nothing, where it is a mean over samples",
                code="LS310",
            )


def _part_random_streams(wrapped: DataParallel, run: Run) -> None:
    """Gives each GPU random numbers of its own; torch seeds all alike, so masks would repeat."""
    for n, device in enumerate(wrapped.device_ids[1:], 1):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(mix_seed(run.settings.seed, n, 0xD9))
