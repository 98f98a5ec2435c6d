"""The exact weight of every micro-batch, so that gradients are those of the global mean.

DDP averages over ranks and backward passes accumulate, so a micro-batch whose loss is the mean over
weight `w` counts as it should when that loss is multiplied by `w * ranks / W`, `W` being the weight
of the whole global batch.

By samples, `W` is known from the plan. By a user's weight (the tokens that count, say) it is a sum
over ranks: the loader reads one global batch ahead and starts that all-reduce (8 bytes, on the CPU
side) a whole step before its result is needed, so no step waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import DataError
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.step import MicroBatch

Weight = Callable[[Any], float | Tensor]
Pair = tuple[MicroBatch, Any]


@dataclass
class _Group:
    """The micro-batches of one global batch, their weights, and the sum that is on its way."""

    pairs: list[Pair]
    weights: list[float]
    total: Tensor
    work: dist.Work | None


def weighted(
    pairs: Iterator[Pair], weight: Weight, collectives: Collectives, begun: float = 0.0
) -> Iterator[Pair]:
    """The same micro-batches with the exact scale of `weight` instead of that of samples.

    `begun` is what this rank was handed of the first global batch before, by weight.
    """
    ahead: deque[_Group] = deque()
    group: list[Pair] = []
    for pair in pairs:
        group.append(pair)
        if pair[0].last:
            ahead.append(_start(group, weight, collectives, begun))
            group, begun = [], 0.0
        if len(ahead) == 2:
            yield from _finish(ahead.popleft(), collectives.part.count)
    for waiting in ahead:
        yield from _finish(waiting, collectives.part.count)


def _start(pairs: list[Pair], weight: Weight, collectives: Collectives, begun: float) -> _Group:
    weights = [weigh(weight, batch) if micro.local else 0.0 for micro, batch in pairs]
    own = begun + sum(weights) if collectives.counts else 0.0
    total = torch.tensor([own], dtype=torch.float64)
    work = None if collectives.alone else dist.all_reduce(total, async_op=True)
    return _Group(pairs, weights, total, work)


def _finish(group: _Group, ranks: int) -> Iterator[Pair]:
    if group.work is not None:
        group.work.wait()
    total = float(group.total)
    plain = ranks == 1 and len(group.pairs) == 1 and group.pairs[0][0].first
    for (micro, batch), own in zip(group.pairs, group.weights, strict=True):
        scale = own * ranks / total if total else 0.0
        yield replace(micro, scale=1.0 if plain and total else scale, plain=plain), batch


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
