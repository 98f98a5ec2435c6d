"""Describes what `lockstep verify` compares: which runs, and whether by bits or within a tolerance.

This is a module of its own, so that the command can make its plan before it imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.verify.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """What `lockstep verify` compares."""

    # The run on one process, and the runs that are compared with it.
    reference: RunConfig
    ways: Sequence[RunConfig]
    # The number of steps that the user has requested; None to use that of `reference`.
    steps: int | None = None
    # Whether one process trains on the batches of all ranks.
    same_samples: bool = False
    # Whether a script that uses Lockstep is compared by bits.
    by_bits: bool = False
    # Whether it is compared by bits only.
    only_bits: bool = False
    # Why a script that uses Lockstep is not compared by bits; empty if the user's options allow it.
    reason_without_bits: str = ""
    # Whether the source of the script mentions Lockstep. If not, a first run finds out.
    source_uses_lockstep: bool = False
