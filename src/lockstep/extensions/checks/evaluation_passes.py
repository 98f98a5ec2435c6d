"""Warns if only some ranks evaluate over a prepared loader.

A prepared loader gives each rank a part of the samples, so a result that only one rank computes
covers only its part. The number of passes of each rank over each loader is compared in every
collective of Lockstep, as a part of the digest that the ranks exchange anyway, and at the end of
the run. It is only a warning, because a script may mean it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from lockstep.distributed.process_group import Run, store_at_end
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.optim.precision import Precision
from lockstep.strategies.base import PreparedModule
from lockstep.user_code import Location, format_source_line
from lockstep.wording import format_ranks


class LoaderPasses(NamedTuple):
    """What one rank has done with a prepared loader since the run began."""

    begun: int
    """Passes that have begun."""
    evaluated: int
    """Passes without training that came to their end."""
    evaluated_at: Location | None
    """The line of the script that began the latest of these."""


class EvaluationPassesCheck(Check):
    """Compares how often the ranks have gone through each prepared loader."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._compared: list[LoaderPasses] = []
        """This rank's passes when they were last compared in detail."""
        self._has_warned = False
        if not run.collectives.single_process:
            run.collectives.rank_histories.append(self)

    def history_digest(self) -> list[tuple[int, int]]:
        """Returns the passes since the latest detailed comparison: begun and evaluated."""
        if self._has_warned:
            return []
        passes_since: list[tuple[int, int]] = []
        for index, passes in enumerate(self._passes()):
            begun = passes.begun
            evaluated = passes.evaluated
            if index < len(self._compared):
                begun -= self._compared[index].begun
                evaluated -= self._compared[index].evaluated
            passes_since.append((begun, evaluated))
        return passes_since

    def history_details(self) -> list[LoaderPasses]:
        """Returns all passes of this rank."""
        return self._passes()

    def compare_histories(self, details_of_ranks: Sequence[Any]) -> None:
        """Compares the passes of all ranks."""
        self._compared = self._passes()
        self._compare(details_of_ranks)

    def close(self, failed: bool) -> None:
        """Compares passes after the last collective. The last rank that comes here does it.

        No rank waits: one may evaluate for an hour after the others have ended.
        """
        if self.run.collectives.single_process or failed or self.run.joined is None:
            return
        topology = self.run.topology
        texts: list[bytes] = []
        with store_at_end(self.run.joined) as store:
            store.set(f"passes/{topology.rank}", json.dumps(self._passes()))
            num_ranks_here = store.add("passes", 1)
            if num_ranks_here == topology.size:
                texts = [store.get(f"passes/{rank}") for rank in range(topology.size)]
        if texts:
            self._compare([json.loads(text) for text in texts], on_this_rank=True)

    def _passes(self) -> list[LoaderPasses]:
        """Returns the passes of this rank over each loader."""
        return [
            LoaderPasses(loader.passes_begun, loader.evaluated, loader.evaluated_at)
            for loader in self.run.loaders
        ]

    def _compare(self, passes_of_ranks: Sequence[Any], *, on_this_rank: bool = False) -> None:
        """Warns if some ranks have evaluated over a loader that other ranks have not iterated.

        Args:
            passes_of_ranks: of each rank, the passes over each loader.
            on_this_rank: warn on this rank instead of rank 0.
        """
        if self._has_warned or not passes_of_ranks:
            return
        num_loaders = min(len(passes_of_rank) for passes_of_rank in passes_of_ranks)
        for index in range(num_loaders):
            passes = [LoaderPasses(*passes_of_rank[index]) for passes_of_rank in passes_of_ranks]
            ranks: list[int] = []
            for rank, passes_of_rank in enumerate(passes):
                if _has_evaluated_more(passes_of_rank, passes):
                    ranks.append(rank)
            if ranks:
                self._has_warned = True
                self._warn(ranks, passes[ranks[0]].evaluated_at, on_this_rank)
                return

    def _warn(self, ranks: list[int], evaluated_at: Any, on_this_rank: bool) -> None:
        """Warns that only these ranks have evaluated, at this line of the script."""
        location: Location | None = None
        line = ""
        if evaluated_at is not None:
            location = (str(evaluated_at[0]), int(evaluated_at[1]))
            line = f" ({format_source_line(*location)})"
        warn(
            "evaluating over a prepared loader on some ranks only",
            f"only {format_ranks(ranks)} iterated it{line}; a rank gets no more than its part of "
            "the samples, so the result covers a part",
            "evaluate on all ranks with world.sum, or on one rank with an unprepared DataLoader",
            code="LS501",
            at=location,
            on_this_rank=on_this_rank,
        )


def _has_evaluated_more(passes: LoaderPasses, passes_of_ranks: Sequence[LoaderPasses]) -> bool:
    """Returns True if a rank has completed an evaluation that another rank has not even begun.

    Passes that are left early are no sign by themselves: a rank may look at the first batch, or
    leave an evaluation before the others do.
    """
    for other in passes_of_ranks:
        if passes.evaluated > other.evaluated and passes.begun > other.begun:
            return True
    return False
