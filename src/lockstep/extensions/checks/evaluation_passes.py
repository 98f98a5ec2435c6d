"""Warns if only some ranks evaluate over a prepared loader.

A prepared loader gives each rank a part of the samples, so a result that only one rank computes
covers only its part. The number of passes of each rank over each loader is compared in every
collective of Lockstep, as a part of the digest that the ranks exchange anyway, and at the end of
the run. It is only a warning, because a script may mean it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
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


NO_PASSES = LoaderPasses(begun=0, evaluated=0, evaluated_at=None)


class EvaluationPassesCheck(Check):
    """Compares how often the ranks have gone through each prepared loader.

    The three methods with `history` or `histories` in their names are called by the collectives of
    the run (`distributed.collectives.RankHistory`).
    """

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._passes_at_comparison: list[LoaderPasses] = []
        """This rank's passes over each loader when they were last compared in detail."""
        self._has_warned = False
        if not run.collectives.single_process:
            run.collectives.rank_histories.append(self)

    def history_digest(self) -> list[tuple[int, int]]:
        """Returns the numbers of passes since the latest detailed comparison, for each loader.

        They are pairs: how many passes were begun, and how many came to their end without training
        (`LoaderPasses.evaluated`). If they differ between ranks, the collectives make a detailed
        comparison, by `history_details` and `compare_histories`, and count from 0 again.
        """
        if self._has_warned:
            return []  # the same on all ranks, so that nothing is compared any more

        passes_now = self._passes()
        # Loaders that were prepared after the comparison had no passes then.
        num_new_loaders = len(passes_now) - len(self._passes_at_comparison)
        passes_then = self._passes_at_comparison + [NO_PASSES] * num_new_loaders
        return [
            (now.begun - then.begun, now.evaluated - then.evaluated)
            for now, then in zip(passes_now, passes_then, strict=True)
        ]

    def history_details(self) -> list[LoaderPasses]:
        """Returns what this rank has done with each loader since the run began."""
        return self._passes()

    def compare_histories(self, details_of_ranks: Sequence[Any]) -> None:
        """Warns if only some ranks have evaluated over a loader.

        Args:
            details_of_ranks: for each rank, what `history_details` has returned, read from JSON.
        """
        self._passes_at_comparison = self._passes()
        self._compare(details_of_ranks)

    def close(self, failed: bool) -> None:
        """Compares the passes after the last collective of the run.

        Each rank writes its passes to the store of the run. The rank that is the last to write
        compares them, and warns. So no rank waits for another, which may still evaluate for an
        hour.
        """
        if self.run.collectives.single_process or failed:
            return

        passes_of_ranks = self._collect_if_last()
        if passes_of_ranks is not None:
            # Usually rank 0 warns, but now only this rank knows the passes of all ranks.
            self._compare(passes_of_ranks, on_this_rank=True)

    def _collect_if_last(self) -> list[Any] | None:
        """Writes the passes of this rank to the store of the run.

        Returns:
            On the rank that is the last to write: for each rank, its passes over each loader, as in
            `_compare`. None on the other ranks, or if the store is gone.
        """
        joined = self.run.joined  # tells how to reach the store of the run
        if joined is None:
            return None

        topology = self.run.topology
        with store_at_end(joined) as store:  # if the store is gone, the block ends early
            store.set(f"passes/{topology.rank}", json.dumps(self._passes()))
            num_ranks_at_end = store.add("passes", 1)
            is_last = num_ranks_at_end == topology.size
            if is_last:
                return [json.loads(store.get(f"passes/{rank}")) for rank in range(topology.size)]
        return None

    def _passes(self) -> list[LoaderPasses]:
        """Returns what this rank has done with each prepared loader, in the order of the loaders.

        All ranks prepare the same loaders in the same order.
        """
        return [
            LoaderPasses(loader.passes_begun, loader.evaluated, loader.evaluated_at)
            for loader in self.run.loaders
        ]

    def _compare(self, passes_of_ranks: Sequence[Any], *, on_this_rank: bool = False) -> None:
        """Warns, once in a run, if some ranks have evaluated over a loader more than others.

        Args:
            passes_of_ranks: for each rank, its passes over each loader, as they were read from
                JSON: the fields of a `LoaderPasses` in a list.
            on_this_rank: True to warn on this rank instead of rank 0.
        """
        if self._has_warned:
            return

        for passes_over_loader in _by_loader(passes_of_ranks):
            evaluating_ranks: list[int] = []
            for rank, passes in enumerate(passes_over_loader):
                if _has_evaluated_more(passes, passes_over_loader):
                    evaluating_ranks.append(rank)

            if evaluating_ranks:
                self._has_warned = True
                first_rank = evaluating_ranks[0]
                evaluated_at = _as_location(passes_over_loader[first_rank].evaluated_at)
                self._warn(evaluating_ranks, evaluated_at, on_this_rank)
                return

    def _warn(self, ranks: list[int], evaluated_at: Location | None, on_this_rank: bool) -> None:
        """Warns that only these ranks have evaluated.

        Args:
            ranks: the ranks that have evaluated.
            evaluated_at: the line of the script that began the evaluation; None if not known.
            on_this_rank: True to warn on this rank instead of rank 0.
        """
        line = "" if evaluated_at is None else f" ({format_source_line(*evaluated_at)})"
        warn(
            "evaluating over a prepared loader on some ranks only",
            found=f"only {format_ranks(ranks)} iterated it{line}; a rank gets no more than its "
            "part of the samples, so the result covers a part",
            do="evaluate on all ranks with world.sum, or on one rank with an unprepared DataLoader",
            code="LS501",
            at=evaluated_at,
            on_this_rank=on_this_rank,
        )


def _by_loader(passes_of_ranks: Sequence[Any]) -> Iterator[list[LoaderPasses]]:
    """Yields for each loader the passes of all ranks over it, in the order of the ranks.

    A rank that is late may not have prepared the last loaders yet. These are left out.

    Args:
        passes_of_ranks: see `EvaluationPassesCheck._compare`.
    """
    for passes_over_loader in zip(*passes_of_ranks, strict=False):
        yield [LoaderPasses(*fields) for fields in passes_over_loader]


def _has_evaluated_more(passes: LoaderPasses, passes_of_ranks: Sequence[LoaderPasses]) -> bool:
    """Returns True if a rank has completed an evaluation that another rank has not even begun.

    That some rank has evaluated more is not enough: the other may have left the same evaluation
    early. That it has begun more passes is not enough either: it may have looked at a first batch.

    Args:
        passes: the passes of the rank in question.
        passes_of_ranks: the passes of all ranks over the same loader.
    """
    for other in passes_of_ranks:
        if passes.evaluated > other.evaluated and passes.begun > other.begun:
            return True
    return False


def _as_location(value: Any) -> Location | None:
    """Returns a file and line, which may be in a list because they were read from JSON."""
    if value is None:
        return None
    file, line = value
    return str(file), int(line)
