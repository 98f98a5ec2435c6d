"""In which order a rank of a pipeline computes: pure functions of sizes.

A global batch is M micro-batches; a model is cut into stages, stage k lying at position k modulo
the number of positions. What a rank computes is a list of forward and backward passes of its
stages.

- `gpipe`: all forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965).
- `1f1b`: as few forward passes ahead as keep all positions busy, then one backward pass for each
  forward pass (Narayanan et al. 2019, PipeDream, and 2021, arXiv 2104.04473): the same time, and
  activations of at most as many micro-batches as there are positions.
- 1f1b with several stages a rank is the interleaved schedule of the second paper, with one
  difference: the last position finishes the forward pass of a micro-batch before it begins the
  next one, because its loss is computed by the user's training loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Action:
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
    """Lets the ranks compute in turns, each taking the first of its actions that can be done.

    A backward pass goes before a forward pass (but under gpipe), as long as it can be done; forward
    passes go in rounds of as many micro-batches as there are positions, as in the paper.
    """
    last = positions * per_rank - 1
    orders: list[list[Action]] = [[] for _ in range(positions)]
    done: set[Action] = set()
    waiting = [
        sorted(
            (
                Action(forward, stage, micro_batch)
                for forward in (False, True)
                for stage in range(position, last + 1, positions)
                for micro_batch in range(micro_batches)
            ),
            key=lambda a: _urgency(a, schedule, positions),
        )
        for position in range(positions)
    ]

    def ready(action: Action) -> bool:
        stage, micro_batch = action.stage, action.micro_batch
        if action.forward:
            before = stage == 0 or Action(True, stage - 1, micro_batch) in done
            finishes = stage % positions != positions - 1 or micro_batch == 0
            return before and (finishes or Action(True, last, micro_batch - 1) in done)
        after = stage == last or Action(False, stage + 1, micro_batch) in done
        return after and Action(True, stage, micro_batch) in done

    while any(waiting):
        taken = [next(filter(ready, _offered(actions, schedule)), None) for actions in waiting]
        for position, action in enumerate(taken):
            if action is not None:
                orders[position].append(action)
                waiting[position].remove(action)
                done.add(action)
    return orders


def _offered(actions: list[Action], schedule: str) -> list[Action]:
    if schedule == "1f1b":
        return actions
    return [a for a in actions if a.forward] or actions


def _urgency(action: Action, schedule: str, positions: int) -> tuple[object, ...]:
    stage = action.stage // positions
    round_ = action.micro_batch // positions
    if action.forward:
        return schedule != "gpipe", round_, stage, action.micro_batch
    return schedule == "gpipe", round_, -stage, action.micro_batch
