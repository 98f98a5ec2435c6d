"""In which order a rank of a pipeline computes: pure functions of sizes.

A global batch is M micro-batches; a model is cut into stages, stage k lying at position k modulo
the number of positions. What a rank computes is a list of forward and backward passes of its
stages.

- `gpipe`: all forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965).
- `1f1b`: as few forward passes ahead as keep all positions busy, then one backward pass for each
  forward pass (Narayanan et al. 2019, PipeDream, and 2021, arXiv 2104.04473): the same time, and
  activations of at most as many micro-batches as there are positions.
- Several stages a rank are taken in turns, as in the second paper, but each rank finishes the
  forward pass of a micro-batch before it begins the next one: the user's training loop computes
  the loss on the last position, and what the loop calls between two micro-batches (a collective,
  an evaluation) finds all ranks at the same one. From four ranks on this costs more than it saves.

Where a rank stands in a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

_AHEAD = 2
"""Interleaved 1f1b: so many more micro-batches than positions may be under way on a rank."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    forward: bool
    stage: int
    micro_batch: int


@lru_cache(maxsize=64)
def order(
    schedule: str, position: int, positions: int, per_rank: int, micro_batches: int
) -> tuple[Action, ...]:
    """What the rank at `position` computes for one global batch, in order.

    Args:
        schedule: `gpipe` or `1f1b`.
        position: of the rank in the pipeline, from 0.
        positions: ranks in the pipeline.
        per_rank: stages on each of them.
        micro_batches: of the global batch.
    """
    if per_rank > 1:
        return tuple(_interleaved(schedule, positions, per_rank, micro_batches)[position])
    ahead = micro_batches if schedule == "gpipe" else positions - 1 - position
    return tuple(_one_stage(position, ahead, micro_batches))


def _one_stage(stage: int, ahead: int, micro_batches: int) -> Iterator[Action]:
    for micro_batch in range(micro_batches + ahead):
        if micro_batch < micro_batches:
            yield Action(True, stage, micro_batch)
        if 0 <= micro_batch - ahead < micro_batches:
            yield Action(False, stage, micro_batch - ahead)


def _interleaved(
    schedule: str, positions: int, per_rank: int, micro_batches: int
) -> list[list[Action]]:
    """Lets the ranks compute by a clock, each taking the first of its actions that can be done.

    A forward pass takes one tick, a backward pass two. Forward passes go first, because the last
    position waits for them, and in their order: no place of the training loop is between the stages
    of a rank.

    A training loop has two places in each turn where all ranks may meet in a collective: after the
    call of the model (2 * micro_batch) and after `world.backward` (one more). A rank gets past such
    a place when it has done all that it can do until there; so nothing may need what another rank
    does only after a later one.
    """
    last = positions * per_rank - 1
    most = micro_batches if schedule == "gpipe" else positions + _AHEAD
    orders: list[list[Action]] = [[] for _ in range(positions)]
    forward, backward = [], []
    for position in range(positions):
        stages = range(position, last + 1, positions)
        forward.append([Action(True, s, n) for n in range(micro_batches) for s in stages])
        backward.append([Action(False, s, n) for n in range(micro_batches) for s in stages[::-1]])
    done: dict[Action, tuple[int, int]] = {}
    """When an action ends, and before which place of the training loop."""
    free, present = [0] * positions, [0] * positions
    tick = 0
    while any(backward):
        for position in [p for p in range(positions) if free[p] <= tick]:
            actions = forward[position][:1]
            if schedule == "1f1b" or not actions:
                actions += backward[position]
            for action in actions:
                here = max(present[position], 2 * action.micro_batch + (not action.forward))
                needed = _needed(action, positions, last, most)
                known = [done.get(before, (tick + 1, 0)) for before in needed]
                if all(end <= tick and before <= here for end, before in known):
                    orders[position].append(action)
                    (forward if action.forward else backward)[position].remove(action)
                    free[position] = tick + (1 if action.forward else 2)
                    done[action] = free[position], here
                    called = action.forward and action.stage > last - positions
                    present[position] = here + called
                    break
        tick += 1
    return orders


def _needed(action: Action, positions: int, last: int, most: int) -> Iterator[Action]:
    """What is done before an action, by its rank or by another one."""
    stage, number = action.stage, action.micro_batch
    if not action.forward:
        yield Action(True, stage, number)
        if stage < last:
            yield Action(False, stage + 1, number)
        return
    if stage:
        yield Action(True, stage - 1, number)
    if number >= most:  # the rank is through with an earlier one when its lowest stage is
        yield Action(False, stage % positions, number - most)


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
