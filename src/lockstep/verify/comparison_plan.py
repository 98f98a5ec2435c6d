"""What `lockstep verify` compares: which runs, and whether by bits or within a tolerance.

It stands in a file of its own so that the command can plan before torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.verify.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan:
    """What is compared."""

    # The run on one process, and those that are compared with it.
    reference: RunConfig
    ways: Sequence[RunConfig]
    # The number of steps that the user has asked for; None: see `reference`.
    steps: int | None = None
    # Whether one process trains on the batches of all ranks.
    same_samples: bool = False
    # Whether a script that uses Lockstep is compared by bits.
    by_bits: bool = False
    # Whether it is compared in no other way.
    bits_alone: bool = False
    # Why a script that uses Lockstep is not compared by bits, if the user's options say so.
    reason_without_bits: str = ""
    # Whether the script's source says that it uses Lockstep. If not, a first run finds out.
    source_uses_lockstep: bool = False
