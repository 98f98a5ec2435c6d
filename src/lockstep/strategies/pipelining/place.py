"""Where a rank stands in a pipeline, and what connects it with the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """Where a rank stands: pipelines side by side, the last stage on the first ranks."""

    positions: int
    per_rank: int
    replicas: int
    position: int
    replica: int

    @classmethod
    def of(cls, rank: int, size: int, positions: int, per_rank: int) -> Place:
        """Of one rank among `size`."""
        replicas = size // positions
        return cls(positions, per_rank, replicas, positions - 1 - rank // replicas, rank % replicas)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Those on this rank."""
        return tuple(range(self.position, self.positions * self.per_rank, self.positions))

    @property
    def last_stage(self) -> int:
        """Of the model."""
        return self.positions * self.per_rank - 1

    def rank_of(self, stage: int) -> int:
        """Where a stage of this rank's pipeline is."""
        return (self.positions - 1 - stage % self.positions) * self.replicas + self.replica


class Groups(NamedTuple):
    """The process groups of a rank of a pipeline.

    Messages between two ranks arrive in the order in which they were sent. With one stage a rank
    all cuts share a group; with several, two cuts may lie between the same ranks, and each has a
    group of its own.
    """

    activations: list[dist.ProcessGroup]
    gradients: list[dist.ProcessGroup]
    replicas: dist.ProcessGroup | None
    """Of the ranks with the same stages, where there are several."""
