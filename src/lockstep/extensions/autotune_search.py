"""Finds the shares and the micro-batch size of a run by measuring on all ranks.

The *shares* say how a global batch is divided over devices: with shares 3:2, the first of two
devices computes three fifths of the samples. All ranks call the methods of `AutotuneSearch`
together. They start each measurement at the same time, because the devices of a machine slow each
other down, and exchange the results, so that all of them make the same decision.

Times are measured several times, because other programs may slow a machine down for a while.
Differences smaller than the variation of one rank are ignored. The ranks exchange a text before and
after each measurement; at most three different shares are tried, with 5 to 20 measurements each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from lockstep.batch.micro_batches import MicroBatchPlan
from lockstep.batch.plan import part_sizes
from lockstep.batch.shares import (
    are_equally_fast,
    choose_shares_by_times,
    confirm_shares,
    largest_that_fits,
    step_seconds,
    times_are_sufficient,
)
from lockstep.distributed.collectives import gather_answers
from lockstep.distributed.process_group import Run
from lockstep.errors import LockstepError, UsageError
from lockstep.extensions.profiling import ForwardCall, ProfilingRun
from lockstep.strategies.base import StrategyPlan

ALL_DEVICES = None
"""Stands in place of a device's number for all devices of this process together."""
MAX_DIVISIONS = 3
"""The maximum number of different shares that are measured."""


class SharesResult(NamedTuple):
    """The result of the search for shares."""

    before: tuple[int, ...]
    """The shares of the devices until now."""
    after: tuple[int, ...]
    """The shares that the devices should have."""
    times: list[list[float]]
    """Measured seconds per sample, several for each device, to explain the result to the user."""


class AutotuneSearch:
    """Searches on one rank, in step with the other ranks.

    Devices are numbered over the whole run. None as the number of a device stands for all devices
    of this process together.

    Args:
        run: the run that this process belongs to.
        plan: the plan of the strategy.
        division: how the loader divides global batches now.
        num_samples: number of samples of this rank in the recorded micro-batch.
        calls: forward calls of the recorded micro-batch.
        optimizers: those of the user.
    """

    def __init__(
        self,
        run: Run,
        plan: StrategyPlan,
        division: MicroBatchPlan,
        num_samples: int,
        calls: Sequence[ForwardCall],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._run = run
        self._division = division
        self._num_recorded_samples = num_samples
        self._num_devices = plan.num_devices
        self._local_devices = plan.local_devices
        self._profiling = ProfilingRun(run, calls, num_samples, optimizers)
        self._known_to_fit: dict[int | None, int] = {}
        """The largest number of samples that has fitted into the memory of each device so far."""
        self._known_limits: dict[int | None, int] = {}
        """The largest number of samples that fits into the memory of each device, for devices on
        which a larger number did not fit."""

    def find_shares(self) -> SharesResult:
        """Finds shares with which all devices need the same time for their part of a global batch.

        The time per sample depends on how many samples a device computes. So the devices are
        measured with the present shares, their times suggest other shares, the devices are measured
        again with those, and so on, until the times suggest shares that were already measured.
        """
        batch_size = self._division.batch_size
        before = self._division.shares

        # If a process has several devices, the loader's shares are those of the processes. The
        # devices then start with equal shares.
        if len(before) != self._num_devices:
            before = (1,) * self._num_devices

        # A device that computes one micro-batch after the other can have a part of any size.
        has_micro_batches = (
            self._division.micro_batch_size is not None
            or self._division.autotune_request.micro_batch_size_is_open
        )
        no_limits: list[int | None] = [None] * self._num_devices

        shares = before
        seconds_of_shares: dict[tuple[int, ...], float] = {}  # the time of a whole step
        times_to_show: list[list[float]] = []
        for _ in range(MAX_DIVISIONS):
            # The limits of memory are found in any case: `_measure_times` tries no more samples
            # than are known to fit.
            limits_of_memory = self._call_for_all_devices(
                self._find_limit, self._local_devices, shares
            )
            limits = no_limits if has_micro_batches else limits_of_memory
            times = self._measure_times(shares)

            # The user is shown the times with the first shares, as they say why other shares were
            # tried. But if the devices turn out to be equally fast, the first times were wrong, and
            # later ones are shown.
            if not times_to_show or are_equally_fast(times):
                times_to_show = times

            # The time of a step is infinite if a part does not fit on its device.
            seconds_of_shares[shares] = step_seconds(times, shares, batch_size, limits)
            shares = choose_shares_by_times(times, shares, batch_size, limits)
            if shares in seconds_of_shares:
                break

        # The last shares are only used if a step was measured to be faster with them.
        after = confirm_shares(seconds_of_shares, shares)
        return SharesResult(before, after, times_to_show)

    def find_micro_batch_size(self, shares: tuple[int, ...]) -> int | None:
        """Finds how many samples every process can compute at a time.

        Args:
            shares: shares of the processes.

        Returns:
            The smallest of the processes' limits, which all processes use; None if every process
            can compute its whole part of a global batch at once.
        """
        # Several devices of a process are tried together, as in the training: one of them also
        # holds the parameters and the optimizer's state, so its limit says nothing about the rest.
        devices: Sequence[int | None] = self._local_devices
        if len(devices) > 1:
            devices = (ALL_DEVICES,)
        limits_of_processes = self._call_for_all_devices(self._find_limit, devices, shares)

        sizes_of_parts = part_sizes(self._division.batch_size, shares)
        limits_below_part: list[int] = []
        for limit, size in zip(limits_of_processes, sizes_of_parts, strict=True):
            if limit is not None and limit < size:
                limits_below_part.append(limit)
        return min(limits_below_part, default=None)

    def _measure_times(self, shares: tuple[int, ...]) -> list[list[float]]:
        """Measures all devices again and again, until the times are reliable enough.

        Returns:
            For each device of the run, its measured seconds per sample, in order.
        """
        times_of_device: list[list[float]] = [[] for _ in range(self._num_devices)]
        while True:
            # Each rank measures its own devices with these shares, and gets the times of all.
            latest = self._call_for_all_devices(self._measure_seconds, self._local_devices, shares)
            for device, seconds in enumerate(latest):
                times_of_device[device].append(seconds)
            if times_are_sufficient(times_of_device):
                return times_of_device

    def _size_of_part(self, device: int | None, shares: tuple[int, ...]) -> int:
        """Returns how many samples a device would compute at a time with the given shares.

        Args:
            device: number of the device in the run; None for all devices of this process together.
            shares: shares of the devices, or of the processes if `device` is None.
        """
        sizes = part_sizes(self._division.batch_size, shares)
        size = sizes[self._run.collectives.data_parallel.rank if device is None else device]
        if self._division.micro_batch_size:
            return min(size, self._division.micro_batch_size)
        return size

    def _find_limit(self, device: int | None, shares: tuple[int, ...]) -> int | None:
        """Finds how many samples fit in the memory of a device.

        The result is remembered, so that calls with other shares try as little as possible. If a
        micro-batch of 20 samples was recorded, and 50 samples fit, three calls one after the other,
        whose shares give the device parts of 30, 60 and 40 samples, return:

            part of 30   None: the whole part fits; numbers from 20 to 30 were tried
            part of 60   50: numbers from 30 to 60 were tried
            part of 40   50: a limit that is known is returned for smaller parts too

        Args:
            device: the number of the device; ALL_DEVICES for those of this process together.
            shares: the shares that give the device its part of the global batch.

        Returns:
            The limit, once it is known; None as long as no part has exceeded it, or if nothing was
            recorded that could be tried.
        """
        if device in self._known_limits:
            return self._known_limits[device]

        nothing_was_recorded = self._num_recorded_samples == 0
        if nothing_was_recorded:
            return None

        # The recorded micro-batch has fitted in the training. Earlier calls may have tried more.
        part = self._size_of_part(device, shares)
        known_to_fit = self._known_to_fit.get(device, self._num_recorded_samples)
        if part <= known_to_fit:
            return None

        index = self._index_in_process(device)
        largest = largest_that_fits(
            lambda num_samples: self._profiling.fits(num_samples, index), known_to_fit, part
        )
        self._known_to_fit[device] = largest
        if largest == part:
            return None

        self._known_limits[device] = largest
        return largest

    def _measure_seconds(self, device: int | None, shares: tuple[int, ...]) -> float:
        """Measures the seconds per sample of a device that computes its part with the given shares.

        If the part does not fit in its memory, the device computes as many samples as fit.
        """
        size = self._size_of_part(device, shares)
        if device in self._known_limits:
            size = min(size, self._known_limits[device])
        size = max(2, size)  # BatchNorm cannot train on a single sample
        return self._profiling.seconds_per_sample(size, self._index_in_process(device))

    def _index_in_process(self, device: int | None) -> int | None:
        """Returns the number of a device among the devices of this process.

        Returns None if the process has only one device, or if `device` stands for all of them.
        """
        if device is None or len(self._local_devices) == 1:
            return None
        return device - self._local_devices[0]

    def _call_for_all_devices(
        self,
        function: Callable[[int | None, tuple[int, ...]], Any],
        devices: Sequence[int | None],
        shares: tuple[int, ...],
    ) -> list[Any]:
        """Calls a function for each device of the run, and exchanges the results.

        Each rank calls it for its own devices. All ranks start at the same time.

        Args:
            function: function that is called with the number of a device and the shares, for
                example one that measures the seconds per sample.
            devices: numbers of the devices of this process, or `[ALL_DEVICES]` to call the function
                only once.
            shares: shares that are passed to the function.

        Returns:
            The results for all devices of all ranks, in the order of the ranks.

        Raises:
            UsageError: on all ranks, if the function failed on one of them.
        """
        collectives = self._run.collectives
        shares_are_searched = self._division.autotune_request.shares_are_open
        setting = "shares='auto'" if shares_are_searched else "micro_batch_size='auto'"

        def call_for_local_devices() -> list[Any]:
            try:
                return [function(device, shares) for device in devices]
            except Exception as error:
                raise _not_tried_error(setting, error) from error

        # The ranks wait for each other here, so that all of them begin at the same time.
        collectives.exchange("begin")

        # If a call fails on one rank, all ranks raise a `UsageError`.
        results_of_ranks = gather_answers(collectives, setting, call_for_local_devices, UsageError)
        return list(itertools.chain.from_iterable(results_of_ranks))


def _not_tried_error(setting: str, error: Exception) -> UsageError:
    """Returns the error for a setting whose value could not be found because a call has failed.

    Other ranks raise it too, and say there on which rank the call has failed.
    """
    if isinstance(error, LockstepError):
        reason = f"{error.was_set}: {error.found}"  # without its advice, as the one below is better
    else:
        reason = f"{type(error).__name__}: {error}"
    return UsageError(
        setting,
        f"the model could not be tried at other sizes: {reason}",
        "give numbers instead, such as shares='2:3' and micro_batch_size=16",
    )
