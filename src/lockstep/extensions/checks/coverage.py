"""Was every sample of an epoch's plan trained once? The loaders count; here the ranks compare."""

from __future__ import annotations

from lockstep.extensions.checks.base import Guard


class CoverageGuard(Guard):
    """Compares what the loaders have handed out, after the step in which that is due."""

    def after_step(self) -> None:
        """Raises DataError or RanksDifferError; see `lockstep.batch.coverage`."""
        for loader in self.run.loaders:
            loader.coverage.settle(self.run.collectives)
