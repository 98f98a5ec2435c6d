"""The place of a rank: in which of several pipelines it is, and which stages of the model it has.

A *pipeline* is a group of ranks that hold one copy of the model. Several pipelines stand side by
side and divide the global batch. A rank's *position* is its number in its pipeline, in the order of
the forward pass. If ranks have several stages, stage k is at position k modulo the number of
positions. The last position is on the first ranks, so that rank 0 has the model's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

ACROSS_PIPELINES = "pipelines"
"""The name in `run.groups` of the ranks that have the same stages in different pipelines."""


@dataclass(frozen=True)
class PipelinePlace:
    """The place of one rank in a run with one or more pipelines."""

    num_positions: int
    stages_per_rank: int
    num_pipelines: int
    position: int
    """The number of this rank in its pipeline, from 0."""
    pipeline: int
    """The number of this rank's pipeline, from 0."""

    @classmethod
    def of_rank(
        cls, rank: int, num_ranks: int, num_positions: int, stages_per_rank: int
    ) -> PipelinePlace:
        """Computes the place of a rank.

        The first `num_pipelines` ranks are at the last position of the pipelines, the next ones at
        the position before it, and so on. For example, with two pipelines of three positions, ranks
        0 and 1 are at position 2, ranks 2 and 3 at position 1, and ranks 4 and 5 at position 0.
        """
        num_pipelines = num_ranks // num_positions
        return cls(
            num_positions=num_positions,
            stages_per_rank=stages_per_rank,
            num_pipelines=num_pipelines,
            position=num_positions - 1 - rank // num_pipelines,
            pipeline=rank % num_pipelines,
        )

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The numbers of the stages on this rank."""
        return tuple(range(self.position, self.last_stage + 1, self.num_positions))

    @property
    def last_stage(self) -> int:
        """The number of the model's last stage."""
        return self.num_positions * self.stages_per_rank - 1

    @property
    def num_gradient_groups(self) -> int:
        """The number of process groups that carry the gradients of a pipeline."""
        return 1 + max(self.gradient_group(cut) for cut in range(self.last_stage))

    def gradient_group(self, cut: int) -> int:
        """Returns the number of the process group that carries the gradients of a cut.

        Each rank sends gradients to the previous position, and receives them from the next one.
        NCCL executes the operations of a group one after the other, in the order in which the rank
        has started them, and a send may last until its receiver is ready. So in a common group a
        receive would wait for earlier sends.

        With one stage on each rank this does no harm: the gradients of one micro-batch after the
        other go from the last position to the first. With several stages a rank may wait for a
        gradient that its neighbour sends only after it has received one from this rank: a deadlock.
        So a rank uses different groups for its two neighbours, and in each group it only sends or
        only receives. Two groups alternate between the links of the ring, and a ring with an odd
        number of links needs a third one.

        Args:
            cut: the number of the cut, which is between the stages `cut` and `cut + 1`.
        """
        if self.stages_per_rank == 1:
            return 0
        link = cut % self.num_positions
        is_last_of_odd_ring = self.num_positions % 2 == 1 and link == self.num_positions - 1
        return 2 if is_last_of_odd_ring else link % 2

    def rank_of_stage(self, stage: int) -> int:
        """Returns the rank of this pipeline that has a given stage; the inverse of `of_rank`."""
        return self.rank_at(stage % self.num_positions)

    def rank_at(self, position: int) -> int:
        """Returns the rank of this pipeline at a given position."""
        positions_after = self.num_positions - 1 - position
        return positions_after * self.num_pipelines + self.pipeline
