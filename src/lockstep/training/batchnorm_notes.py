"""Tells from which samples BatchNorm takes its statistics if global batches are divided.

BatchNorm normalises by the statistics of one micro-batch over all ranks. `micro_batch_size=` is the
number of samples that one rank computes at a time, so the number of micro-batches, and with it the
statistics, depends on the number of ranks. `num_micro_batches=` gives the same statistics on any
number of ranks. With virtual ranks both settings do: then `micro_batch_size=` applies to a virtual
rank, and their number does not change.
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.distributed.process_group import Run
from lockstep.errors import warn
from lockstep.settings import Choice, is_auto
from lockstep.strategies.base import StrategyPlan


class BatchNormNotes:
    """Adds a printed line for each loader that divides its global batches, and warns once.

    Args:
        run: the run of this process.
        plan: the plan of its strategy.
        add_choice: adds a line to those that rank 0 prints.
    """

    def __init__(self, run: Run, plan: StrategyPlan, add_choice: Callable[[Choice], None]) -> None:
        self._run = run
        self._plan = plan
        self._add_choice = add_choice
        self._has_synchronised_batchnorm = False
        """True if a module has BatchNorm layers that take their statistics over ranks."""
        self._micro_batch_size: int | str | None = None
        """The first `micro_batch_size=` that divides a global batch into micro-batches; None if
        there is none."""
        self._num_micro_batches = 1
        """The number of micro-batches into which that size divides a global batch."""
        self._has_warned = False

    def note_synchronised_module(self) -> None:
        """Records that a module has BatchNorm layers that take their statistics over ranks."""
        self._has_synchronised_batchnorm = True
        self._warn_if_needed()

    def loader_divides_batches(
        self, number: int, num_micro_batches: int, micro_batch_size: int | str | None
    ) -> None:
        """Records that a loader divides its global batches into micro-batches.

        Args:
            number: the number of the loader.
            num_micro_batches: the number of micro-batches in a global batch.
            micro_batch_size: the setting `micro_batch_size=` from which this number follows; None
                if the user has set the number of micro-batches instead.
        """
        # The warning names the size of the first loader that has one.
        if self._micro_batch_size is None and micro_batch_size is not None:
            self._micro_batch_size = micro_batch_size
            self._num_micro_batches = num_micro_batches

        # A line of the startup summary says of which samples the statistics are.
        if self._has_synchronised_batchnorm:
            if self._run.settings.virtual_ranks is None:
                what = f"of each micro-batch of loader {number}, over all ranks"
            else:
                what = f"of each micro-batch of loader {number}, over all virtual ranks"
            reason = f"{what}; not of the global batch"
            self._add_choice(Choice("batchnorm", "statistics", reason))

        self._warn_if_needed()

    def _warn_if_needed(self) -> None:
        """Warns once if a model has BatchNorm and a micro_batch_size divides global batches."""
        size = self._micro_batch_size
        if self._has_warned or size is None or not self._has_synchronised_batchnorm:
            return

        if self._number_depends_on_ranks():
            self._warn(size)

    def _number_depends_on_ranks(self) -> bool:
        """Returns True if another number of ranks would need other micro-batches.

        It is False with virtual ranks, whose micro-batches are fixed, and in a pipeline, where
        several processes compute parts of one model on the same samples.
        """
        has_virtual_ranks = self._run.settings.virtual_ranks is not None
        has_several_processes = not self._run.collectives.single_process
        num_parts_of_global_batch = self._plan.rank.size
        is_pipeline = has_several_processes and num_parts_of_global_batch == 1
        return not has_virtual_ranks and not is_pipeline

    def _warn(self, size: int | str) -> None:
        """Warns that the statistics depend on the number of ranks.

        Args:
            size: the setting `micro_batch_size=`.
        """
        self._has_warned = True
        if is_auto(size):
            current_number = ""  # it is not known yet
            setting = "num_micro_batches=... holds on any number of ranks"
        else:
            current_number = f" (now {self._num_micro_batches})"
            setting = (
                f"num_micro_batches={self._num_micro_batches} instead gives these numbers "
                "everywhere"
            )

        warn(
            f"micro_batch_size={size!r} and a model with BatchNorm",
            found="BatchNorm takes its statistics from one micro-batch over all ranks. "
            "micro_batch_size= is what one rank computes at a time, so the number of micro-batches"
            f"{current_number} depends on the number of ranks, and with it the result",
            do=f"say into how many micro-batches a global batch is cut: {setting}",
        )
