"""The exact weight of every micro-batch, so that gradients are those of the global mean.

DDP averages over ranks and backward passes accumulate, so a micro-batch whose loss is the mean over
weight `w` counts as it should when that loss is multiplied by `w * ranks / W`, `W` being the weight
of the whole global batch.

By samples, `W` is known from the plan. By a user's weight (the tokens that count, say) it is a sum
over ranks: the loader reads one global batch ahead and starts that all-reduce (24 bytes, on the CPU
side) a whole step before its result is needed, so no step waits for it. At most one is under way. A
loop that is left lets go of it unread, which is right where all ranks leave; the sum also says of
which global batch it is, so that one of a rank that has left alone is not taken for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.distributed.collectives import Collectives
from lockstep.errors import DataError, RanksDifferError
from lockstep.step import MicroBatch

Weight = Callable[[Any], float | Tensor]
Pair = tuple[MicroBatch, Any]


@dataclass
class _Group:
    """The micro-batches of one global batch, their weights, and the sum that is on its way."""

    pairs: list[Pair]
    weights: list[float]
    place: tuple[int, int]
    """Its epoch, and its position in it."""
    total: Tensor
    """Over the ranks: weight, epoch, position."""
    work: dist.Work | None


def weighted(
    pairs: Iterator[Pair],
    weight: Weight,
    collectives: Collectives,
    *,
    epoch: int,
    position: int,
    begun: float = 0.0,
) -> Iterator[Pair]:
    """The same micro-batches with the exact scale of `weight` instead of that of samples.

    Args:
        pairs: the micro-batches, in order.
        weight: of a batch.
        collectives: of the run.
        epoch: of the pass.
        position: of the first global batch in the epoch.
        begun: what this rank was handed of that batch before, by weight.

    Raises:
        RanksDifferError: another rank is at another global batch.
    """
    ahead: _Group | None = None
    group: list[Pair] = []
    for pair in pairs:
        group.append(pair)
        if pair[0].last:
            # Before the next sum begins: it would meet what a rank does that has gone elsewhere.
            ready = [] if ahead is None else _finish(ahead, collectives)
            ahead = _start(group, weight, collectives, begun, (epoch, position))
            group, begun, position = [], 0.0, position + 1
            yield from ready
    if ahead is not None:
        yield from _finish(ahead, collectives)


def _start(
    pairs: list[Pair],
    weight: Weight,
    collectives: Collectives,
    begun: float,
    place: tuple[int, int],
) -> _Group:
    weights = [weigh(weight, batch) if micro.local else 0.0 for micro, batch in pairs]
    own = begun + sum(weights) if collectives.contributes else 0.0
    total = torch.tensor([own, *place], dtype=torch.float64)
    work = None if collectives.alone else dist.all_reduce(total, async_op=True)
    return _Group(pairs, weights, place, total, work)


def _finish(group: _Group, collectives: Collectives) -> list[Pair]:
    if group.work is not None:
        group.work.wait()
        _check_place(group, collectives)
    total = float(group.total[0])
    ranks = collectives.data_parallel.size
    plain = ranks == 1 and len(group.pairs) == 1 and group.pairs[0][0].first
    found = []
    for (micro, batch), own in zip(group.pairs, group.weights, strict=True):
        scale = own * ranks / total if total else 0.0
        found.append((replace(micro, scale=1.0 if plain and total else scale, plain=plain), batch))
    return found


def _check_place(group: _Group, collectives: Collectives) -> None:
    size = collectives.topology.size
    if group.total[1:].tolist() != [size * number for number in group.place]:
        epoch, position = group.place
        raise RanksDifferError(
            "the same global batch on every rank, which weight= sums up over the ranks",
            f"rank {collectives.topology.rank} is at number {position} of epoch {epoch}, and "
            "another rank is elsewhere",
            "leave the training loop at the same step on every rank: decide break, continue and "
            "return by what is equal everywhere, such as the step or world.mean(loss)",
        )


def weigh(weight: Weight, batch: Any) -> float:
    """What a batch weighs.

    Raises:
        DataError: the user's function did not give a number that is at least 0.
    """
    value = weight(batch)
    number = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1e300:
        raise DataError(
            f"weight={getattr(weight, '__name__', weight)}",
            f"it gave {value!r} for a batch",
            "return one number that is at least 0, such as the number of tokens that count",
        )
    return float(number)
