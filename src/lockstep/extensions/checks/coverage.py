"""Was every sample of an epoch's plan trained once? The loaders count; here the ranks compare."""

from __future__ import annotations

from lockstep.extensions.checks.base import Check


class CoverageCheck(Check):
    """Compares what the loaders have handed out, after the step in which that is due."""

    def global_batch_trained(self) -> None:
        """Raises DataError or RanksDifferError; see `lockstep.batch.coverage`."""
        for loader in self.run.loaders:
            loader.coverage.settle(self.run.collectives)
