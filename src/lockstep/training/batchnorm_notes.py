"""Says what BatchNorm takes its statistics from, where global batches are cut into micro-batches.

BatchNorm normalises by one micro-batch over all ranks. `micro_batch_size=` is what one rank
computes at a time, so the number of micro-batches depends on the number of ranks, and with it the
statistics; `num_micro_batches=` holds on any number of ranks. With virtual ranks both do: then
`micro_batch_size=` is what one virtual rank computes at a time, and their number does not change.
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.distributed.process_group import Run
from lockstep.errors import warn
from lockstep.settings import Choice, is_auto
from lockstep.strategies.base import StrategyPlan


class BatchNormNotes:
    """Notes a choice for each loader that cuts its global batches, and warns once.

    Args:
        run: of this process.
        plan: of its strategy.
        add_choice: adds to the choices that rank 0 prints.
    """

    def __init__(self, run: Run, plan: StrategyPlan, add_choice: Callable[[Choice], None]) -> None:
        self._run = run
        self._plan = plan
        self._add_choice = add_choice
        self._is_synchronised = False
        """True if a module has BatchNorm layers that take statistics over ranks."""
        self._cutting_size: int | str | None = None
        """The first micro_batch_size that cut a global batch."""
        self._num_micro_batches = 1
        """How many micro-batches it cut it into."""
        self._has_warned = False

    def module_is_synchronised(self) -> None:
        """A module whose BatchNorm layers take statistics over ranks is being prepared."""
        self._is_synchronised = True
        self._warn_if_needed()

    def loader_cuts(self, number: int, num_micro_batches: int, size: int | str | None) -> None:
        """A loader cuts its global batches into micro-batches.

        Args:
            number: of the loader.
            num_micro_batches: of a global batch.
            size: the micro_batch_size that asks for them; None if their number is set.
        """
        if size is not None and self._cutting_size is None:
            self._cutting_size = size
            self._num_micro_batches = num_micro_batches
        # With sync_batchnorm=False the user has already been told that the statistics differ.
        if self._is_synchronised:
            ranks = "ranks" if self._run.settings.virtual_ranks is None else "virtual ranks"
            reason = (
                f"of each micro-batch of loader {number}, over all {ranks}; not of the global batch"
            )
            self._add_choice(Choice("batchnorm", "statistics", reason))
        self._warn_if_needed()

    def _warn_if_needed(self) -> None:
        """Warns once if a model has BatchNorm and a micro_batch_size has cut a global batch."""
        size = self._cutting_size
        if self._has_warned or size is None or not self._is_synchronised:
            return
        if self._run.settings.virtual_ranks is not None:
            return  # the number of micro-batches does not depend on the number of processes
        # Several processes without a second data-parallel rank: they are the stages of a pipeline.
        # Its micro-batches do not depend on the number of processes.
        is_pipeline = self._plan.rank.size == 1 and not self._run.collectives.single_process
        if is_pipeline:
            return
        self._has_warned = True
        if is_auto(size):
            now = ""
            instead = "num_micro_batches=... holds on any number of ranks"
        else:
            now = f" (now {self._num_micro_batches})"
            instead = (
                f"num_micro_batches={self._num_micro_batches} instead gives these numbers "
                "everywhere"
            )
        warn(
            f"micro_batch_size={size!r} and a model with BatchNorm",
            "BatchNorm takes its statistics from one micro-batch over all ranks. micro_batch_size= "
            f"is what one rank computes at a time, so the number of micro-batches{now} depends on "
            "the number of ranks, and with it the result",
            f"say into how many micro-batches a global batch is cut: {instead}",
        )
