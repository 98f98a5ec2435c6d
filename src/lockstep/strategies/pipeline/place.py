"""Where a rank stands: in which of several pipelines, and with which stages of the model.

A *pipeline* is a group of ranks that hold one copy of the model; several pipelines stand side by
side and divide the global batch. A rank's *position* is its number in its pipeline, in the order of
the forward pass. With several stages per rank, stage k is at position k modulo the number of
positions. The last position is on the first ranks, so that rank 0 has the model's output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class PipelinePlace:
    """The place of one rank."""

    num_positions: int
    stages_per_rank: int
    num_pipelines: int
    position: int
    """The number of this rank in its pipeline, from 0."""
    pipeline: int
    """The number of its pipeline, from 0."""

    @classmethod
    def of_rank(
        cls, rank: int, num_ranks: int, num_positions: int, stages_per_rank: int
    ) -> PipelinePlace:
        """Returns the place of a rank.

        The first `num_pipelines` ranks are at the last position, each in another pipeline; the next
        ones are at the position before it, and so on. For example, of two pipelines with three
        positions, ranks 0 and 1 are at position 2, ranks 2 and 3 at position 1, ranks 4 and 5 at
        position 0.
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
        """The stages on this rank."""
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

        Each rank sends gradients to the position before its own and receives them from the position
        after it. NCCL executes the operations of a group one after the other, in the order in which
        a rank has started them, and a send may last until its receiver comes to it. In a common
        group a receive would wait for the sends before it.

        With one stage on each rank that does no harm: the gradients of one micro-batch after the
        other go from the last position to the first. With several, a rank may wait in this way for
        a gradient that its neighbour sends only after it has received from this rank. So the two
        neighbours of a rank have different groups: links take turns with two groups, and in a ring
        of an odd number the last link has a third. In each group a rank then only sends or only
        receives.

        Args:
            cut: the one between the stages `cut` and `cut + 1`.
        """
        if self.stages_per_rank == 1:
            return 0
        link = cut % self.num_positions
        is_odd_one_out = self.num_positions % 2 == 1 and link == self.num_positions - 1
        return 2 if is_odd_one_out else link % 2

    def rank_of_stage(self, stage: int) -> int:
        """Returns the rank of this pipeline that has a stage; the inverse of `of_rank`."""
        position = stage % self.num_positions
        positions_after = self.num_positions - 1 - position
        return positions_after * self.num_pipelines + self.pipeline
