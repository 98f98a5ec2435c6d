"""The strategy `dp`: one process that computes on several devices, by `module.DataParallel`.

It needs no launcher, but it is slower than `ddp`: all replicas share one Python interpreter, the
parameters are copied in every step, and the first device holds outputs, loss and optimizer. The
data loader sees a single rank, and the module divides each micro-batch among the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lockstep.distributed.process_group import Run
from lockstep.distributed.seeding import mix_seed
from lockstep.errors import SettingError, UsageError, warn
from lockstep.keyword_arguments import check_keywords_of_constructor
from lockstep.machine.topology import DataParallelRank
from lockstep.session.extension import DeliveredBatch, Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.settings import Choice, is_auto
from lockstep.strategies.base import (
    PreparedModule,
    Strategy,
    StrategyPlan,
    planned_virtual_ranks,
    refuse_virtual_ranks,
)
from lockstep.strategies.data_parallel.module import DataParallel
from lockstep.strategies.registry import check_number_of_processes
from lockstep.strategies.single import on_one_process
from lockstep.torch_compat import BatchNorm
from lockstep.wording import describe_type

GPU_STREAM_SEED_TAG = 0xD9
"""Mixed into the seeds of the GPUs, so that no other random stream has the same seeds."""


@check_keywords_of_constructor("lockstep.strategies.DP")
@dataclass(frozen=True, kw_only=True)
class DP(Strategy):
    """The strategy `dp` and its options.

    The devices use the shares of the run: `--shares 2:3:3`.
    """

    name: ClassVar[str] = "dp"

    device_ids: Sequence[int] | None = None
    """The GPUs, the first of which must be the run's device; None for all visible GPUs."""
    output_device: int | None = None
    """The GPU on which the outputs are joined; None for the first one."""
    dim: int = 0
    """The dimension of the samples."""
    replicas: int | None = None
    """The number of replicas on the run's device, which share its parameters; for trials."""

    def plan(self, run: Run) -> StrategyPlan:
        """Plans a run with a single rank, whose devices divide each global batch.

        Raises:
            SettingError: there are several processes, or the devices or shares are invalid.
        """
        check_number_of_processes(self.name, run.topology.size)

        # A wrapper of a module without parameters. Its constructor checks the devices and the
        # shares, and its attributes say which ones the run will use.
        trial_wrapper = self._make_data_parallel(nn.Identity(), run)
        num_replicas = trial_wrapper.num_replicas
        if num_replicas > 1:
            refuse_virtual_ranks(
                run,
                self.name,
                "the loss is computed from the joined outputs of all devices, not from the part of "
                "each virtual rank",
            )

        device_ids = trial_wrapper.device_ids
        if device_ids and device_ids[0] != run.device.index:
            raise SettingError(
                f"DP(device_ids={device_ids})",
                f"the first of them holds the parameters, and batches arrive on {run.device}",
                f"begin with {run.device.index}, or set device='cuda:{device_ids[0]}'",
            )

        # The only process has each batch as a whole, and divides it over its devices.
        process_shares = (1,)
        device_shares: tuple[int, ...] | None = tuple(trial_wrapper.shares)
        if is_auto(run.settings.shares) and num_replicas > 1:
            device_shares = None  # to be measured

        num_micro_batches = run.settings.num_micro_batches or 1  # 1 if it was not set
        return StrategyPlan(
            rank=DataParallelRank(rank=0, size=1),
            shares=process_shares,
            num_devices=num_replicas,
            local_devices=range(num_replicas),
            device_shares=device_shares,
            num_micro_batches=max(run.settings.min_micro_batches, num_micro_batches),
            can_autotune=True,
            virtual_ranks=planned_virtual_ranks(run, process_shares),
        )

    def wrap(self, module: nn.Module, run: Run) -> PreparedModule:
        """Wraps the module in a `DataParallel`.

        Raises:
            UsageError: it already is a DataParallel.
        """
        if isinstance(module, nn.DataParallel):
            raise UsageError(
                f"world.prepare of {describe_type(module)} under strategy 'dp'",
                "the strategy wraps the module itself",
                "prepare the bare module and set shares, or use strategy='single'",
            )

        data_parallel = self._make_data_parallel(module.to(run.device), run)
        _seed_gpu_streams(data_parallel, run)

        # As for any module on one process: with virtual ranks, these extensions keep the gradients
        # and the buffers of virtual ranks apart.
        virtual_rank_extensions = on_one_process(data_parallel, run).extensions
        return PreparedModule(
            module=data_parallel,
            choices=self._choices(data_parallel, run),
            extensions=[WeightedMeanWarning(data_parallel), *virtual_rank_extensions],
        )

    def _make_data_parallel(self, module: nn.Module, run: Run) -> DataParallel:
        """Wraps a module with these options.

        Either `device_ids` or `replicas` (on one device) may be set. If neither is, the module runs
        on all visible GPUs, or in a run on the CPU with one replica.
        """
        device_ids = self.device_ids
        replicas = self.replicas
        if device_ids is None and replicas is None:
            if run.device.type == "cpu":
                # `replicas` prevents `DataParallel` from using visible GPUs, if there are any.
                replicas = 1
            else:
                # The run's own GPU first, because batches arrive there.
                other_gpus = set(range(torch.cuda.device_count())) - {run.device.index}
                device_ids = [run.device.index, *sorted(other_gpus)]

        # Shares "auto" are measured later; until then all are equal.
        shares = None if is_auto(run.settings.shares) else run.settings.shares

        return DataParallel(
            module,
            device_ids,
            self.output_device,
            self.dim,
            replicas=replicas,
            shares=shares,
            sync_batchnorm=run.settings.synchronises_batchnorm,
        )

    def _choices(self, data_parallel: DataParallel, run: Run) -> list[Choice]:
        """Returns the printed lines about the replicas, the shares and BatchNorm.

        A line has a name, a value and a reason, for example
        "batchnorm: 2 synchronised (statistics of the samples of all devices, as on one)".
        """
        where = self._where_replicas_are(data_parallel, run)
        choices = [Choice("replicas", str(data_parallel.num_replicas), where)]
        if len(set(data_parallel.shares)) > 1:
            shares = ":".join(str(share) for share in data_parallel.shares)
            choices.append(
                Choice("shares", shares, "how every micro-batch is divided over the devices")
            )

        # Without `sync_batchnorm`, each device has running statistics of its own samples. Those of
        # the first device are kept.
        has_batchnorm = any(isinstance(m, BatchNorm) for m in data_parallel.module.modules())
        has_replicas = data_parallel.num_replicas > 1
        if has_batchnorm and has_replicas and not run.settings.synchronises_batchnorm:
            reason = "sync_batchnorm=False; the first device's statistics stay"
            choices.append(Choice("batchnorm", "per device", reason))

        # With `sync_batchnorm`: "2 synchronised (statistics of the samples of all devices, ...)"
        # and, for layers that could not be converted, "1 per device (...)".
        choices += data_parallel.batchnorms.choices(
            computed_by="device", samples="the samples of all devices, as on one"
        )
        return choices

    def _where_replicas_are(self, data_parallel: DataParallel, run: Run) -> str:
        """Returns the printed text about the devices of the replicas."""
        if self.replicas is not None:  # all of them on one device
            return f"on {run.device}, as set: they share the parameters"
        if data_parallel.device_ids:  # one on each GPU, the first of which holds the outputs
            gpus = ", ".join(str(index) for index in data_parallel.device_ids)
            return f"on GPUs {gpus}; outputs and loss on one"
        return "no GPU; strategy=lockstep.strategies.DP(replicas=2) computes on two replicas"


class WeightedMeanWarning(Extension):
    """Warns once if samples have weights, but a mean is computed inside the model (LS310).

    The mean of each device is then weighted by its number of samples, not by their weights.
    """

    def __init__(self, module: DataParallel) -> None:
        self._module = module
        self._samples_have_weights = False
        self._has_warned = False

    def delivered(self, batch: DeliveredBatch) -> None:
        """Records whether the samples of the loader have weights (its option `weight`)."""
        self._samples_have_weights = batch.loader.weight is not None

    def backward_begins(self, weighted_loss: Tensor, micro_batch: MicroBatch) -> None:
        """Warns once if the latest forward pass returned a mean and the samples have weights.

        Args:
            weighted_loss: not needed here; all extensions get it.
            micro_batch: not needed here either.
        """
        if self._has_warned or not self._samples_have_weights or not self._module.returned_mean:
            return

        self._has_warned = True
        warn(
            f"a mean computed inside of a model on {self._module.num_replicas} devices, and a "
            "loader with weight=",
            found="each device's mean is weighted by its number of samples, not by the samples' "
            "weights",
            do="return the loss and the weight of each sample, and divide their sums outside of "
            "the model; if a plain mean over samples is meant, nothing has to be done",
            code="LS310",
        )


def _seed_gpu_streams(data_parallel: DataParallel, run: Run) -> None:
    """Gives each GPU its own random numbers.

    torch gives all GPUs the same seed, with which the dropout masks of all replicas would be equal.
    """
    for number, device in enumerate(data_parallel.device_ids[1:], 1):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(mix_seed(run.settings.seed, number, GPU_STREAM_SEED_TAG))
