"""Searches the shares and the micro-batch size of a run, by measurements on all ranks.

The *shares* of devices say how a global batch is divided over them. All ranks call the methods of
`AutotuneSearch` together: they begin each measurement at the same time, because devices of one
machine slow each other down, and they exchange the results, so that all decide from the same
numbers. Times are measured repeatedly, because other programs may slow a machine down now and then;
differences smaller than the variation of one rank count as none.

Communication: an exchange of text before and after each measurement. For each division of the batch
there are 5 to 20 of them, and there are at most three divisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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

MAX_DIVISIONS = 3
"""How many different shares are measured at most."""


class SharesResult(NamedTuple):
    """What the search for shares has found."""

    before: tuple[int, ...]
    """The shares of the devices until now."""
    after: tuple[int, ...]
    """The shares that they should have."""
    times: list[list[float]]
    """Measured seconds of a sample, several for each device, which explain the result."""


class AutotuneSearch:
    """The search on one rank.

    Devices are numbered over the whole run. The number None stands for all devices of this process
    together.

    Args:
        run: the run of this process.
        plan: the plan of the strategy.
        division: how the loader divides global batches now.
        num_samples: how many samples this rank has in the recorded micro-batch.
        calls: the recorded forward calls.
    """

    def __init__(
        self,
        run: Run,
        plan: StrategyPlan,
        division: MicroBatchPlan,
        num_samples: int,
        calls: Sequence[ForwardCall],
    ) -> None:
        self._run = run
        self._division = division
        self._num_samples = num_samples
        self._num_devices = plan.num_devices
        self._local_devices = plan.local_devices
        self._profiling = ProfilingRun(run, calls, num_samples)
        self._known_to_fit: dict[int | None, int] = {}
        """The largest number of samples that is known to fit on a device."""
        self._known_limits: dict[int | None, int] = {}
        """The largest number of samples that fits on a device, where more were tried in vain."""

    def find_shares(self) -> SharesResult:
        """Measures the devices and finds shares with which all of them need the same time.

        The time of a sample depends on how many samples a device has. So the times with some
        shares lead to other shares, and the devices are measured again with these, until the times
        lead to shares that were measured before.
        """
        batch_size = self._division.batch_size
        before = self._division.shares
        # If a process has several devices, the loader's shares are those of the processes.
        if len(before) != self._num_devices:
            before = (1,) * self._num_devices
        has_micro_batches = (
            self._division.micro_batch_size is not None
            or self._division.request.micro_batch_size_is_open
        )
        shares = before
        seconds_of_shares: dict[tuple[int, ...], float] = {}
        times_to_show: list[list[float]] = []
        for _ in range(MAX_DIVISIONS):
            # How many samples fit on each device at a time. `_measure_times` tries no more.
            limits = self._find_everywhere(self._find_limit, self._local_devices, shares)
            if has_micro_batches:
                # A part of any size can be computed, one micro-batch after the other.
                limits = [None] * self._num_devices
            times = self._measure_times(shares)
            # The first times explain the result, unless devices turn out to be equally fast.
            if not times_to_show or are_equally_fast(times):
                times_to_show = times
            # The seconds of a whole step with these shares; infinite if the parts do not fit.
            seconds_of_shares[shares] = step_seconds(times, shares, batch_size, limits)
            shares = choose_shares_by_times(times, shares, batch_size, limits)
            if shares in seconds_of_shares:
                break
        # New shares count only if they were measured as faster.
        after = confirm_shares(seconds_of_shares, shares)
        return SharesResult(before, after, times_to_show)

    def find_micro_batch_size(self, shares: tuple[int, ...]) -> int | None:
        """Returns how many samples every process can compute at a time, None for its whole part.

        It is the same number on all processes, so the smallest of what fits on each.

        Args:
            shares: the shares of the processes.
        """
        sizes = part_sizes(self._division.batch_size, shares)  # of the parts of the processes
        devices: Sequence[int | None] = self._local_devices
        if len(devices) > 1:
            # They are tried together (None), as the process uses them: what fits on each of them
            # differs, because one holds the parameters and the optimizer's state.
            devices = (None,)
        # How many samples fit on each process at a time. None: its whole part fits.
        limits = self._find_everywhere(self._find_limit, devices, shares)
        limits_below_part: list[int] = []
        for limit, size in zip(limits, sizes, strict=True):
            if limit is not None and limit < size:
                limits_below_part.append(limit)
        return min(limits_below_part, default=None)

    def _measure_times(self, shares: tuple[int, ...]) -> list[list[float]]:
        """Measures the seconds of a sample on each device until shares can be chosen by them.

        Returns:
            For each device of the run, the times that were measured one after the other.
        """
        times_of_device: list[list[float]] = [[] for _ in range(self._num_devices)]
        while True:
            latest = self._find_everywhere(self._measure_seconds, self._local_devices, shares)
            for device, seconds in enumerate(latest):
                times_of_device[device].append(seconds)
            if times_are_sufficient(times_of_device):
                return times_of_device

    def _size_of_part(self, device: int | None, shares: tuple[int, ...]) -> int:
        """Returns how many samples a device would compute at a time with these shares.

        Args:
            device: its number in the run. None for all devices of this process together.
            shares: the shares of the devices; if `device` is None, those of the processes.
        """
        sizes = part_sizes(self._division.batch_size, shares)
        index = self._run.collectives.data_parallel.rank if device is None else device
        size = sizes[index]
        if self._division.micro_batch_size:
            return min(size, self._division.micro_batch_size)
        return size

    def _find_limit(self, device: int | None, shares: tuple[int, ...]) -> int | None:
        """Returns how many samples fit on a device, None if its whole part does.

        What was found is remembered in `_known_to_fit` and `_known_limits`, for the next shares.
        """
        if device in self._known_limits:  # with earlier shares, more did not fit
            return self._known_limits[device]
        if self._num_samples == 0:  # this rank has recorded nothing that it could repeat
            return None
        size = self._size_of_part(device, shares)
        # At least the recorded micro-batch has fitted.
        fitting = self._known_to_fit.get(device, self._num_samples)
        if size <= fitting:
            return None
        index = self._index_in_process(device)
        fitting = largest_that_fits(
            lambda samples: self._profiling.fits(samples, index), fitting, size
        )
        self._known_to_fit[device] = fitting
        if fitting == size:
            return None
        self._known_limits[device] = fitting
        return fitting

    def _measure_seconds(self, device: int | None, shares: tuple[int, ...]) -> float:
        """Returns the seconds of a sample on a device when it computes its part with these shares.

        If its part does not fit into memory, it computes as many samples as fit.
        """
        size = self._size_of_part(device, shares)
        if device in self._known_limits:
            size = min(size, self._known_limits[device])
        size = max(2, size)  # BatchNorm cannot train on a single sample
        return self._profiling.seconds(size, self._index_in_process(device))

    def _index_in_process(self, device: int | None) -> int | None:
        """Returns the number of a device among those of this process.

        None if the process has only one, or if `device` stands for all of them.
        """
        if device is None or len(self._local_devices) == 1:
            return None
        return device - self._local_devices[0]

    def _find_everywhere(
        self,
        find: Callable[[int | None, tuple[int, ...]], Any],
        devices: Sequence[int | None],
        shares: tuple[int, ...],
    ) -> list[Any]:
        """Calls a function for the devices of all ranks, on all ranks at the same time.

        Args:
            find: the function, which is called with the number of a device, and the shares.
            devices: the numbers of the devices of this process. `[None]` calls the function only
                once, for all devices of the process together.
            shares: the shares, which are passed on.

        Returns:
            The results for all devices of all ranks, in the order of the ranks.

        Raises:
            UsageError: on all ranks, if the function failed on one.
        """
        collectives = self._run.collectives
        shares_are_open = self._division.request.shares_are_open
        was_set = "shares='auto'" if shares_are_open else "micro_batch_size='auto'"

        def find_for_local_devices() -> list[Any]:
            """Returns the results for the devices of this process."""
            try:
                return [find(device, shares) for device in devices]
            except Exception as error:
                text = str(error)
                if isinstance(error, LockstepError):  # without its advice: below is one that fits
                    text = f"{error.was_set}: {error.found}"
                raise UsageError(
                    was_set,
                    "the model could not be tried at other sizes on "
                    f"rank {collectives.topology.rank}: {type(error).__name__}: {text}",
                    "give numbers instead, such as shares='2:3' and micro_batch_size=16",
                ) from error

        collectives.exchange("begin")  # so that all ranks begin at the same time
        results_of_ranks = gather_answers(collectives, was_set, find_for_local_devices, UsageError)
        results: list[Any] = []
        for results_of_rank in results_of_ranks:
            results += results_of_rank
        return results
