"""Finds the values of `shares="auto"` and `micro_batch_size="auto"`, once in a run.

*Shares* say how a global batch is divided over ranks or devices: faster ones get more samples. The
*micro-batch size* is the number of samples that a rank computes at a time: as many as fit in its
memory.

The forward calls of the first micro-batch of the training are recorded. Right after its backward
pass, and before any optimizer step, `autotune_search` repeats these calls with other numbers of
samples, and measures time and memory (`batch.shares.first_micro_batch`).
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
from lockstep.torch_compat import BatchNorm
from lockstep.training.optimizer import PreparedOptimizer
from lockstep.wording import join_first


class _RecordedMicroBatch(NamedTuple):
    """The first micro-batch of the training, whose forward calls are repeated at other sizes."""

    division: MicroBatchPlan
    """How its loader divides global batches."""
    num_samples: int
    """The number of samples of this rank in the micro-batch."""
    calls: list[ForwardCall]
    """The forward calls recorded so far. The list grows while the micro-batch is computed."""


@dataclass
class Autotune(Extension):
    """Finds shares and the micro-batch size for all loaders of a run.

    Args:
        run: the run that this process belongs to.
        strategy: the strategy of the modules.
        plan: the plan of the strategy.
        modules: all prepared modules. The collection may still grow.
        optimizers: all prepared optimizers. The collection may still grow.

    Raises:
        SettingError: if a setting is `"auto"` and the strategy does not support that.
    """

    run: Run
    strategy: Strategy
    plan: StrategyPlan
    modules: Collection[nn.Module]
    optimizers: Collection[PreparedOptimizer]
    found: AutotuneResult = field(default_factory=AutotuneResult)
    _recorded_micro_batch: _RecordedMicroBatch | None = None
    _recording_hooks: ExitStack = field(default_factory=ExitStack)
    """While calls are recorded, closing it removes the hooks that record them."""

    def __post_init__(self) -> None:
        self.request(None, self.run.settings.micro_batch_size)

    def request(self, shares: Any, micro_batch_size: Any) -> AutotuneRequest:
        """Returns a loader's request: which of its values are `"auto"`, and where to find them.

        Args:
            shares: shares that are set for the loader; None to use those of the run.
            micro_batch_size: micro-batch size that is set for the loader.

        Raises:
            SettingError: if a value is `"auto"` and the strategy does not support that, or if the
                loader has shares of its own and the strategy needs the same shares for all loaders.
        """
        self._check_shares_of_loader(shares)

        shares_in_effect = self.run.settings.shares if shares is None else shares
        wants_shares = is_auto(shares_in_effect)
        wants_size = is_auto(micro_batch_size)
        if wants_shares or wants_size:
            setting = "shares='auto'" if wants_shares else "micro_batch_size='auto'"
            self._check_can_autotune(setting)

        has_several_devices = self.plan.num_devices > 1  # otherwise one device gets all samples
        return AutotuneRequest(
            result=self.found,
            wants_shares=wants_shares and has_several_devices,
            wants_micro_batch_size=wants_size,
            recording_context=self._recording_context,
            must_keep_plan=self._must_keep_plan,
        )

    def _check_shares_of_loader(self, shares: Any) -> None:
        """Refuses numbers as the shares of one loader if the model divides the batches."""
        # With several devices in a process, the model divides a batch over them, not the loader.
        model_divides_batches = len(self.plan.local_devices) > 1
        are_numbers = shares is not None and not is_auto(shares)
        if are_numbers and model_divides_batches:
            raise SettingError(
                f"world.loader(shares={shares!r})",
                f"strategy {self.strategy.name!r} divides a batch over the devices of this "
                "process where the model is called, whatever loader it came from",
                "give the shares to lockstep.init, or --shares; model.set_shares(...) changes them "
                "later",
            )

    def _check_can_autotune(self, setting: str) -> None:
        """Refuses a setting such as "shares='auto'" if the strategy does not support it."""
        if not self.plan.can_autotune:
            raise SettingError(
                setting,
                f"strategy {self.strategy.name!r} cannot try a part of the batch on its own",
                "give numbers, or use strategy='ddp'",
            )

    def after_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Measures what is `"auto"`, after the backward pass of the recorded micro-batch.

        Does nothing after any other micro-batch. The results are written to `self.found`, where the
        loaders read them, and the main rank prints them. All ranks must call this together.

        Raises:
            UsageError: on all ranks, if one of them could not repeat its calls.
            SettingError: if the memory of all ranks together is too small for the batch.
        """
        if self._recorded_micro_batch is None:
            return

        plan_of_loader, num_samples, calls = self._recorded_micro_batch
        self._stop_recording()  # the search calls the modules again
        optimizers = [optimizer.inner for optimizer in self.optimizers]
        search = AutotuneSearch(self.run, self.plan, plan_of_loader, num_samples, calls, optimizers)

        # A value is open if this loader is to find it, and no other loader has found it before.
        request = plan_of_loader.autotune_request
        must_find_shares = request.shares_are_open
        must_find_size = request.micro_batch_size_is_open

        # The shares come first: the size depends on how many samples each process has.
        shares_of_processes = plan_of_loader.shares
        if must_find_shares:
            shares_of_processes = self._find_and_apply_shares(search, shares_of_processes)
        if must_find_size:
            size = search.find_micro_batch_size(shares_of_processes)
            largest_part = max(part_sizes(plan_of_loader.batch_size, shares_of_processes))
            self._print_translated(_describe_micro_batch_size(size, largest_part))

            self.found.micro_batch_size = size
            self.found.micro_batch_size_is_known = True

        if must_find_shares:
            # Written only now: had the search for the size failed, its error should have named
            # shares='auto' too, as it does while the shares are open.
            self.found.shares = shares_of_processes

    def _find_and_apply_shares(
        self, search: AutotuneSearch, shares_of_processes: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Finds the shares of all devices, and returns the new shares of the processes.

        If a process has one device, both are the same. If it has several, its `DataParallel`
        modules divide its part of a batch over them: these modules get the shares of the devices,
        and the processes keep the shares that they have.

        Args:
            search: the search for the shares.
            shares_of_processes: the shares that the processes have until now.
        """
        result = search.find_shares()
        process_has_one_device = len(self.plan.local_devices) == 1
        device_name = "rank" if process_has_one_device else "device"
        self._print_translated(
            _describe_shares(result.before, result.after, result.times, device_name)
        )

        shares_of_devices = result.after
        if process_has_one_device:
            return shares_of_devices
        for module in self.modules:
            if isinstance(module, DataParallel):
                module.set_shares(shares_of_devices)
        return shares_of_processes

    def _print_translated(self, text: str) -> None:
        """Prints a text in the user's language, on the main rank only."""
        if self.run.topology.is_main:
            print_note(translate(text))

    @contextmanager
    def _recording_context(self, division: MicroBatchPlan, num_samples: int) -> Iterator[None]:
        """Records the forward calls of the first micro-batch, which runs inside this context.

        They are kept in `self._recorded_micro_batch`. Inside the context, the user's loop calls
        `world.backward`, which calls `after_backward`: this uses the calls, ends the recording and
        sets `self._recorded_micro_batch` to None.

        Args:
            division: how the loader of the micro-batch divides global batches.
            num_samples: number of samples of this rank in the micro-batch.

        Raises:
            UsageError: if an optimizer has stepped, but `world.backward` was not called.
        """
        # Calls are recorded until `_stop_recording` closes the stack of hooks.
        calls = self._recording_hooks.enter_context(record_calls(self.modules))
        recorded = _RecordedMicroBatch(division, num_samples, calls)
        self._recorded_micro_batch = recorded

        def after_backward_was_called() -> bool:
            return self._recorded_micro_batch is not recorded

        try:
            yield

            # If no optimizer has stepped either, the loop evaluates, or has skipped the batch.
            has_stepped = self.run.step.training_pass.stepped
            if has_stepped and not after_backward_was_called():
                raise UsageError(
                    "loss.backward() where shares or micro_batch_size are 'auto'",
                    "they are found in world.backward",
                    "call world.backward(loss)",
                )
        finally:
            if not after_backward_was_called():
                self._stop_recording()

    def _stop_recording(self) -> None:
        """Removes the hooks from the modules, and forgets the recorded micro-batch."""
        self._recorded_micro_batch = None
        self._recording_hooks.close()

    def _must_keep_plan(self) -> bool:
        """Returns True if the first global batch must be computed in its planned micro-batches.

        Usually the loader computes the first global batch as two micro-batches: a small one, which
        is quick to record, and the rest. This method lists the cases in which it must not.
        """
        # DDP with a static graph does not support several micro-batches.
        if self.plan.static_graph:
            return True

        # With several optimizers, as in a GAN, each of them steps after a backward pass of its own,
        # so gradients cannot be accumulated over several micro-batches.
        if len(self.optimizers) > 1:
            return True

        # LBFGS calls a closure of the user, which must see the whole global batch: `step` refuses a
        # closure in a global batch of several micro-batches.
        for optimizer in self.optimizers:
            if isinstance(optimizer.inner, torch.optim.LBFGS):
                return True

        # The result of BatchNorm depends on which samples are in a micro-batch.
        for module in self.modules:
            if any(isinstance(layer, BatchNorm) for layer in module.modules()):
                return True
        return False


def _describe_shares(
    before: Sequence[int], after: Sequence[int], times: Sequence[Sequence[float]], device_name: str
) -> str:
    """Returns the line that tells the user which shares were found.

    For example "shares auto: changed from 1:1 to 3:2 (time per sample: rank 0 1.2 ms, rank 1 1.8
    ms)".

    Args:
        before: shares until now.
        after: shares that were found.
        times: measured seconds per sample, several for each device.
        device_name: how a device is called in the line, "rank" or "device".
    """
    # The shortest time of each device, as a text: "rank 0 1.2 ms".
    shortest: list[str] = []
    for number, times_of_device in enumerate(times):
        shortest.append(f"{device_name} {number} {_format_seconds(min(times_of_device))}")
    measured = join_first(shortest)

    old_shares = _format_shares(before)
    new_shares = _format_shares(after)
    are_kept = old_shares == new_shares
    change = f"kept {old_shares}" if are_kept else f"changed from {old_shares} to {new_shares}"

    # Each case is a whole sentence, as other languages have another order of words.
    if are_equally_fast(times):
        return (
            f"shares auto: {change}: the {device_name}s are equally fast "
            f"(time per sample: {measured}, within noise)"
        )
    if are_kept:  # the text has the value of `batch.shares.MIN_SPEEDUP`
        return (
            f"shares auto: {change}: no others make a step at least 8 % faster "
            f"(time per sample: {measured})"
        )
    return f"shares auto: {change} (time per sample: {measured})"


def _describe_micro_batch_size(size: int | None, largest_part: int) -> str:
    """Returns the line that tells the user which micro-batch size was found.

    Args:
        size: micro-batch size; None if every rank can compute its whole part at once.
        largest_part: number of samples in the largest part that a rank has of a global batch.
    """
    if size is None:
        return f"micro_batch_size auto: {largest_part}, the whole part of a rank fits"
    return f"micro_batch_size auto: {size} samples at a time, of a part of {largest_part}"


def _format_shares(shares: Sequence[int]) -> str:
    """Formats shares: `(3, 2) -> "3:2"`."""
    return ":".join(str(share) for share in shares)


def _format_seconds(seconds: float) -> str:
    """Formats a time in seconds, milliseconds or microseconds."""
    if seconds >= 0.1:
        return f"{seconds:.3g} s"
    if seconds * 1e3 >= 0.1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"
