"""Checks that every sample of an epoch is trained exactly once over all ranks.

Each prepared loader counts the samples that it hands out on this rank. This check has the ranks
compare their counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lockstep.extensions.checks.base import Check


class CoverageCheck(Check):
    """Compares what the loaders of all ranks have handed out."""

    def global_batch_trained(self, modules: Sequence[nn.Module]) -> None:
        """Compares the counts of the loaders for which that is due after this optimizer step.

        Raises:
            DataError: samples were trained twice or left out.
            RanksDifferError: the ranks have gone through their loaders differently.
        """
        for loader in self.run.loaders:
            loader.coverage.compare_if_due(self.run.collectives)
