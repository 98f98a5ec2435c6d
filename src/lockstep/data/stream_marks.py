"""Do the ranks read the same stream? The first samples of a global batch are compared now and then.

A stream that each rank reads as a whole must be the same one everywhere; of one that is split, the
ranks must not all have the same part. Neither shows in a loss.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from lockstep.data.same_samples import alike, another, digest
from lockstep.data.stream import StreamSource
from lockstep.errors import RanksDifferError
from lockstep.runtime.collectives import Collectives

_SAMPLES = 16
"""Of a global batch that are compared."""
_NUMBERS = 512
"""Of a tensor that are looked at."""
_END = "end "


def marks(samples: Sequence[Any]) -> list[Any]:
    """What stands for the first of these samples."""
    return [digest(pytree.tree_map(_thinned, sample)) for sample in islice(samples, _SAMPLES)]


def _thinned(leaf: Any) -> Any:
    """A large tensor or array as some of its numbers and its shape; the rest as it is."""
    size = leaf.numel() if isinstance(leaf, torch.Tensor) else getattr(leaf, "size", 0)
    if not isinstance(leaf, torch.Tensor | np.ndarray) or size <= _NUMBERS:
        return leaf
    if isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided:
        return leaf
    return [list(leaf.shape), leaf.reshape(-1)[:: size // _NUMBERS]]


def compare(
    collectives: Collectives, source: StreamSource, epoch: int, first: int, mine: list[Any]
) -> None:
    """Compares what the ranks have read of a global batch. A collective.

    Args:
        collectives: of the run.
        source: the stream.
        epoch: that is being read.
        first: the first sample of the global batch.
        mine: the marks of what this rank has read of it.

    Raises:
        RanksDifferError: on every rank.
    """
    text = json.dumps(mine)
    if source.shard is None:
        sums = collectives.exchange(f"{zlib.crc32(text.encode()):08x}")
        _check_ends(epoch, sums)
        if len(set(sums)) > 1:
            rows = [json.loads(row) for row in collectives.exchange(text)]
            _check_alike(source, epoch, first, rows)
        return
    parts = [json.loads(part) for part in collectives.exchange(text)[: collectives.part.count]]
    # A part all of whose samples are alike tells nothing: a stream of zeros is the same everywhere.
    telling = [part for part in parts if any(not alike(sample, part[0]) for sample in part)]
    twins = [part for part in telling if sum(alike(part, other) for other in parts) > 1]
    if twins:
        ranks = [str(rank) for rank, part in enumerate(parts) if alike(part, twins[0])]
        raise RanksDifferError(
            f"shard={'False' if source.shard is False else 'a function'}, for a stream that is "
            "split over the ranks",
            f"ranks {', '.join(ranks)} were given the same samples (epoch {epoch}, from sample "
            f"{first} on)",
            "leave shard=False out: every rank then keeps its part of the stream"
            if source.shard is False
            else "let the function give the samples start, start + step, ... of the stream",
            code="LS108",
        )


def compare_ends(collectives: Collectives, epoch: int, samples: int) -> None:
    """Compares how many samples the ranks have read when their stream is at its end. A collective.

    Raises:
        RanksDifferError: on every rank.
    """
    _check_ends(epoch, collectives.exchange(f"{_END}{samples}"))


def _check_ends(epoch: int, texts: list[str]) -> None:
    """Of ranks whose stream is at its end, and ranks whose stream goes on."""
    if len(set(texts)) > 1 and any(text.startswith(_END) for text in texts):
        ends = [
            f"after {text.removeprefix(_END)} samples on rank {rank}"
            if text.startswith(_END)
            else f"not yet on rank {rank}"
            for rank, text in enumerate(texts)
        ]
        raise RanksDifferError(
            f"a stream that every rank reads (epoch {epoch})",
            f"it ends {', '.join(ends)}",
            "let all ranks read the same data: look for machines whose copies differ",
            code="LS104",
        )


def _check_alike(source: StreamSource, epoch: int, first: int, rows: list[list[Any]]) -> None:
    counts = [len(row) for row in rows]
    shortest = min(counts)
    differing = (n for n in range(shortest) if any(not alike(row[n], rows[0][n]) for row in rows))
    place = next(differing, shortest)
    if place < shortest:
        found = another(first + place, [row[place] for row in rows])
    elif len(set(counts)) > 1:
        ended = ", ".join(str(r) for r, count in enumerate(counts) if count == shortest)
        found = f"on rank {ended} it ends before sample {first + place}, elsewhere it goes on"
    else:
        return
    raise RanksDifferError(
        f"the stream {type(source.dataset).__name__}, which every rank reads as a whole, to keep "
        f"its part (epoch {epoch})",
        found,
        "if it splits itself over the ranks, let it give every rank everything, or pass "
        "shard=False to world.loader; else seed what shuffles it, and let the order not depend "
        "on a set, a folder or the time",
        code="LS109",
    )
