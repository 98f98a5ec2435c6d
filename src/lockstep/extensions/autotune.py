"""Finds the values of `shares="auto"` and `micro_batch_size="auto"`, once in a run.

*Shares* say how a global batch is divided over ranks or devices: faster ones get more. The
micro-batch size is how many samples a rank computes at a time: as many as fit in its memory.

Both are found in the first global batch that is trained on, right after the backward pass of its
first micro-batch (`batch.shares.first_micro_batch`) and before any optimizer step. The forward
calls of that micro-batch are recorded, and `autotune_search` repeats them at other sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.batch.autotune_request import AutotuneRequest, AutotuneResult
from lockstep.batch.micro_batches import MicroBatchPlan
from lockstep.batch.plan import part_sizes
from lockstep.batch.shares import are_equally_fast
from lockstep.distributed.process_group import Run
from lockstep.distributed.torch_compat import BatchNorm
from lockstep.errors import SettingError, UsageError
from lockstep.extensions.autotune_search import AutotuneSearch
from lockstep.extensions.profiling import ForwardCall, record_calls
from lockstep.extensions.report.console import print_note
from lockstep.language import translate
from lockstep.session.extension import Extension
from lockstep.session.micro_batch import MicroBatch
from lockstep.settings import is_auto
from lockstep.strategies.base import Strategy, StrategyPlan
from lockstep.strategies.data_parallel.module import DataParallel
from lockstep.training.optimizer import PreparedOptimizer
from lockstep.wording import join_first


class _RecordedMicroBatch(NamedTuple):
    """The first micro-batch of the training, whose forward calls are repeated at other sizes."""

    division: MicroBatchPlan
    """How its loader divides global batches."""
    num_samples: int
    """Samples of this rank."""
    calls: list[ForwardCall]
    """Grows while the micro-batch is computed."""


@dataclass
class Autotune(Extension):
    """Finds shares and micro-batch size for all loaders of a run.

    Args:
        run: the run of this process.
        strategy: the strategy of the modules.
        plan: the plan of the strategy.
        modules: all prepared modules. The collection may still grow.
        optimizers: all prepared optimizers. The collection may still grow.

    Raises:
        SettingError: the strategy cannot find what is `"auto"`.
    """

    run: Run
    strategy: Strategy
    plan: StrategyPlan
    modules: Collection[nn.Module]
    optimizers: Collection[PreparedOptimizer]
    found: AutotuneResult = field(default_factory=AutotuneResult)
    _recorded: _RecordedMicroBatch | None = None
    _recording: ExitStack = field(default_factory=ExitStack)
    """Removes the hooks that record calls."""

    def __post_init__(self) -> None:
        self.request(None, self.run.settings.micro_batch_size)

    def request(self, shares: Any, micro_batch_size: Any) -> AutotuneRequest:
        """Returns what is to be found for a loader.

        Args:
            shares: the shares that are set for the loader. None: those of the run.
            micro_batch_size: the size that is set for the loader.

        Raises:
            SettingError: the strategy cannot find it; or numbers are set for one loader, and the
                strategy needs the same shares for all loaders.
        """
        loader_has_numbers = shares is not None and not is_auto(shares)
        # With several devices in a process, the model divides a batch over them, not the loader.
        model_divides_batches = len(self.plan.local_devices) > 1
        if loader_has_numbers and model_divides_batches:
            raise SettingError(
                f"world.loader(shares={shares!r})",
                f"strategy {self.strategy.name!r} divides a batch over the devices of this "
                "process where the model is called, whatever loader it came from",
                "give the shares to lockstep.init, or --shares; model.set_shares(...) changes them "
                "later",
            )
        if shares is None:
            shares = self.run.settings.shares
        wants_shares = is_auto(shares)
        wants_size = is_auto(micro_batch_size)
        if (wants_shares or wants_size) and not self.plan.can_autotune:
            raise SettingError(
                "shares='auto'" if wants_shares else "micro_batch_size='auto'",
                f"strategy {self.strategy.name!r} cannot try a part of the batch on its own",
                "give numbers, or use strategy='ddp'",
            )
        return AutotuneRequest(
            result=self.found,
            # One device has the whole batch, so there is nothing to find.
            wants_shares=wants_shares and self.plan.num_devices > 1,
            wants_micro_batch_size=wants_size,
            profile=self._record,
            must_keep_plan=self._must_keep_plan,
        )

    def after_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Finds what is wanted, if a micro-batch was recorded. All ranks call it.

        The results are written to `self.found`, where the loaders read them. With several devices
        in a process, the modules get the shares too. The main rank prints what was found.

        Raises:
            UsageError: on all ranks, if one could not repeat its calls.
            SettingError: the memory of all ranks together is too small for the batch.
        """
        if self._recorded is None:
            return
        division, num_samples, calls = self._recorded
        self._stop_recording()  # the search calls the modules too
        search = AutotuneSearch(self.run, self.plan, division, num_samples, calls)
        request = division.request
        shares = division.shares
        if request.shares_are_open:
            result = search.find_shares()
            if len(self.plan.local_devices) == 1:
                device_name = "rank"
                shares = result.after
            else:
                # The loader divides a batch over processes, and modules divide it over devices.
                device_name = "device"
                for module in self.modules:
                    if isinstance(module, DataParallel):
                        module.set_shares(result.after)
            self._tell(_describe_shares(result.before, result.after, result.times, device_name))
        if request.micro_batch_size_is_open:
            size = search.find_micro_batch_size(shares)
            self.found.micro_batch_size = size
            largest_part = max(part_sizes(division.batch_size, shares))
            self._tell(_describe_micro_batch_size(size, largest_part))
            self.found.micro_batch_size_is_known = True
        # Set last: the search above also asks `request` whether shares are open, and they no longer
        # are as soon as `found` has them.
        if request.shares_are_open:
            self.found.shares = shares

    def _tell(self, text: str) -> None:
        if self.run.topology.is_main:
            print_note(translate(text))

    @contextmanager
    def _record(self, division: MicroBatchPlan, num_samples: int) -> Iterator[None]:
        """Records the forward calls of the first micro-batch, which is computed in this context.

        They are kept in `self._recorded` until `after_backward` takes them.

        Args:
            division: how its loader divides global batches.
            num_samples: how many samples this rank has in it.

        Raises:
            UsageError: an optimizer has stepped, but `world.backward` was not called.
        """
        calls = self._recording.enter_context(record_calls(self.modules))
        recorded = _RecordedMicroBatch(division, num_samples, calls)
        self._recorded = recorded
        try:
            yield
            # `after_backward` takes the calls, so it was not called if they are still there.
            were_taken = self._recorded is not recorded
            if not were_taken and self.run.step.training_pass.stepped:
                raise UsageError(
                    "loss.backward() where shares or micro_batch_size are 'auto'",
                    "they are found in world.backward",
                    "call world.backward(loss)",
                )
        finally:
            if self._recorded is recorded:
                self._stop_recording()

    def _stop_recording(self) -> None:
        self._recorded = None
        self._recording.close()

    def _must_keep_plan(self) -> bool:
        """Returns True if the first global batch must be computed in the micro-batches as planned.

        Otherwise a first micro-batch of a few samples is split off, which is faster to record. That
        changes the results of BatchNorm, which depend on the whole micro-batch. It is not possible
        with several optimizers, with an optimizer that takes a closure (LBFGS), and with a static
        graph under DDP.
        """
        if self.plan.static_graph or len(self.optimizers) > 1:
            return True
        for optimizer in self.optimizers:
            if isinstance(optimizer.inner, torch.optim.LBFGS):
                return True
        for module in self.modules:
            if any(isinstance(layer, BatchNorm) for layer in module.modules()):
                return True
        return False


def _describe_shares(
    before: Sequence[int], after: Sequence[int], times: Sequence[Sequence[float]], device_name: str
) -> str:
    """Returns the line about the shares that were found.

    For example "shares auto: changed from 1:1 to 3:2 (time per sample: rank 0 1.2 ms, rank 1 1.8
    ms)".

    Args:
        before: the shares until now.
        after: the shares that were found.
        times: seconds of a sample, several for each device.
        device_name: what a device is called, "rank" or "device".
    """
    are_same = tuple(before) == tuple(after)
    shortest: list[str] = []
    for number, times_of_device in enumerate(times):
        shortest.append(f"{device_name} {number} {_format_seconds(min(times_of_device))}")
    measured = f"time per sample: {join_first(shortest)}"
    if are_equally_fast(times):
        measured += ", within noise"
        reason = f": the {device_name}s are equally fast"
    elif are_same:
        reason = ": no others make a step at least 8 % faster"  # see MIN_SPEEDUP in batch.shares
    else:
        reason = ""
    if are_same:
        change = f"kept {_format_shares(before)}"
    else:
        change = f"changed from {_format_shares(before)} to {_format_shares(after)}"
    return f"shares auto: {change}{reason} ({measured})"


def _describe_micro_batch_size(size: int | None, largest_part: int) -> str:
    """Returns the line about the micro-batch size that was found.

    Args:
        size: None if the whole part of a rank fits.
        largest_part: the samples of a global batch on the rank that has most.
    """
    if size is None:
        return f"micro_batch_size auto: {largest_part}, the whole part of a rank fits"
    return f"micro_batch_size auto: {size} samples at a time, of a part of {largest_part}"


def _format_shares(shares: Sequence[int]) -> str:
    return ":".join(str(share) for share in shares)


def _format_seconds(seconds: float) -> str:
    """Formats a time in seconds, milliseconds or microseconds."""
    if seconds >= 0.1:
        return f"{seconds:.3g} s"
    if seconds * 1e3 >= 0.1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"
