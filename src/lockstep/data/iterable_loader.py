"""The loader of a stream: this rank's part of every global batch, while the end is not known.

Where every rank reads the whole stream, each knows what the others have, and nothing is exchanged
but, now and then, a few bytes that tell whether they read the same (`stream_marks`). Where the
stream is split, the ranks tell each other how many samples they have of every global batch (8 bytes
each, one global batch ahead, so no step waits for it).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.data.batch_plan import Indices
from lockstep.data.fetch import Key as Rows
from lockstep.data.iterable_source import (
    Item,
    Key,
    StreamFetch,
    StreamSource,
    compare,
    compare_ends,
)
from lockstep.data.loader import SOME_SKIP, Loader
from lockstep.data.micro_batch_plan import Piece, Portion
from lockstep.data.pytree import emptied, map_tensors
from lockstep.data.weighting import Pair, weighted
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.seeding import preserve_rng_state
from lockstep.errors import CheckpointError, DataError, LengthUnknownError, SettingError
from lockstep.settings import Choice
from lockstep.step import MicroBatch

_COMPARED_EVERY = 100
"""Global batches between two looks at whether the ranks read the same stream."""


@dataclass
class _Rest(Portion):
    """The global batches from `position` on, to an end that is not known."""

    position: int = 0


class _Counted:
    """A global batch, and how many samples of it each rank has.

    Args:
        position: which of the epoch.
        item: what this rank has of it.
    """

    def __init__(self, position: int, item: Item) -> None:
        self.position = position
        self.item = item
        self._rows: list[Tensor] = []
        self._work: dist.Work | None = None

    @property
    def brought(self) -> Indices:
        """Samples by rank, shape `(ranks,)`."""
        self.wait()
        if not self._rows:
            return self.item.brought
        return torch.cat(self._rows).numpy()[: len(self.item.brought)]

    def ask(self, collectives: Collectives) -> None:
        """Begins to ask the other ranks."""
        mine = torch.tensor([int(self.item.brought[collectives.data_parallel.rank])])
        self._rows = [torch.empty_like(mine) for _ in range(collectives.topology.size)]
        self._work = dist.all_gather(self._rows, mine, async_op=True)

    def wait(self) -> None:
        """Until the others have answered."""
        if self._work is not None:
            self._work.wait()
            self._work = None


class StreamLoader(Loader):
    """Iterates this rank's micro-batches of a stream; see `Loader`.

    Args:
        source: the stream.
        **options: of `Loader`.

    Raises:
        SettingError: shares or micro-batches that a stream which is split cannot have.
    """

    source: StreamSource

    def __init__(self, source: StreamSource, **options: Any) -> None:
        super().__init__(source, **options)
        self._stream = StreamFetch(
            source, self.seed, options.get("sample_rng", True), self._collectives.data_parallel
        )
        self._raw: list[Any] = []
        self._raw_begins = 0
        if source.shard is not None and self._division.open:
            raise SettingError(
                "shares='auto' or micro_batch_size='auto' for a stream with shard=",
                "they are found by dividing a global batch that a rank has read as a whole",
                "give numbers, or leave shard out",
            )
        if callable(source.shard) and len(set(self.shares)) > 1:
            raise SettingError(
                f"shares {':'.join(map(str, self.shares))} for a stream with shard=",
                "a rank reads every n-th sample of it, so all parts are equal",
                "leave shares out for this loader (shares=(1, 1, ...)), or leave shard out",
            )

    @property
    def steps(self) -> int | None:  # type: ignore[override]
        """Global batches of an epoch; None: not known."""
        return self.source.steps

    @property
    def choice(self) -> Choice:
        """How the global batch is computed, in words."""
        said = super().choice
        if self._collectives.data_parallel.size == 1:
            return said
        how = {
            "whole": "every rank reads the whole stream and keeps its part",
            "seek": "every rank reads its part of the stream",
            "own": "the stream splits itself over the ranks",
        }[self.source.how]
        return Choice(said.name, said.value, f"{said.reason}; {how}")

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Takes up the position; the next pass begins there.

        Raises:
            CheckpointError: the stream or the global batch are not those of the checkpoint.
        """
        if "ranks" not in state:
            raise CheckpointError(
                "resuming a loader of a stream",
                "the checkpoint was made with a loader of a dataset with an index",
                "continue with the data of the checkpoint, or leave the loader out",
            )
        super().load_state_dict(state)

    def example(self) -> Any:
        """A batch of one micro-batch's size, of the first samples, on the CPU."""
        return self._first(0, -(-self.batch_size // self.micro_batches))

    def _identity(self) -> dict[str, int]:
        split = self.source.shard is False
        ranks = self._collectives.data_parallel.size if split else 0
        return {"batch_size": self.batch_size, "seed": self.seed, "ranks": ranks}

    def _begin(self, epoch: int, start: int, training: bool) -> Iterator[Any]:
        self._division.follow()
        return self._run(epoch, self._portions(epoch, start, training), start, training, False)

    def _size(self) -> str:
        try:
            return super()._size()
        except LengthUnknownError:
            return "a stream"

    def _portions(
        self, epoch: int, position: int, training: bool
    ) -> Generator[Portion, None, None]:
        try:
            while training and self._division.open:
                self._raw = self._stream.raw(epoch, position)
                count, size = len(self._raw), self.batch_size
                if not count or (count < size and self.source.drop_last):
                    return
                self._raw_begins = position * size
                batch = np.arange(self._raw_begins, self._raw_begins + count, dtype=np.int64)
                yield from self._division.opened(
                    position,
                    batch,
                    self._collectives.data_parallel,
                    weighed=self.weight is not None,
                )
                self._raw = []
                position += 1
            yield _Rest(deque(), position=position)
        finally:
            self._stream.close()

    def _pairs(self, epoch: int, portion: Portion, training: bool) -> Iterator[Pair]:
        if not isinstance(portion, _Rest):
            return super()._pairs(epoch, portion, training)
        pairs = self._rest(epoch, portion, training)
        if self.weight is None or not training:
            return pairs
        return weighted(
            pairs, self.weight, self._collectives, epoch=epoch, position=portion.position
        )

    def _read(self, keys: list[Rows]) -> Iterator[Any]:
        """Of a global batch that has been read already."""
        for epoch, indices in keys:
            samples = [self._raw[i - self._raw_begins] for i in indices.tolist()]
            yield self._stream.collated(epoch, samples, indices) if samples else self._empty(epoch)

    def _rest(self, epoch: int, portion: _Rest, training: bool) -> Iterator[Pair]:
        everywhere = training or self._together
        outer = self._collectives.blocked
        for counted in self._counted(epoch, portion.position, training):
            for piece, batch in self._pieces(epoch, counted):
                if not everywhere:
                    if not piece[1].local:
                        continue
                    known = self.source.shard is None and piece[3]
                    self._collectives.blocked = outer if known else SOME_SKIP
                portion.pieces.append(piece)
                yield piece[1], batch

    def _pieces(self, epoch: int, counted: _Counted) -> Iterator[tuple[Piece, Any]]:
        """This rank's micro-batches of a global batch, marked; see `division`."""
        item, brought = counted.item, counted.brought
        before = np.cumsum(item.planned, axis=0) - item.planned
        sizes = np.clip(brought - before, 0, item.planned)
        count, index = int(brought.sum()), self._collectives.data_parallel.rank
        some = np.flatnonzero(sizes.sum(axis=1)).tolist()
        plain = len(some) == 1 and bool((brought == brought[0]).all())
        for j in some:
            local = int(sizes[j, index])
            micro = MicroBatch(
                count=count,
                local=local,
                first=j == some[0],
                last=j == some[-1],
                pieces=len(some),
                scale=1.0 if plain else local * len(brought) / count,
                plain=plain,
            )
            if local:
                self._keep_example(item.batches[j], local)
            batch = item.batches[j] if local else self._empty(epoch)
            yield (counted.position, micro, item.indices[j], bool(sizes[j].all())), batch

    def _counted(self, epoch: int, begin: int, training: bool) -> Iterator[_Counted]:
        """The global batches, to the end, and how many samples each rank has of them."""
        source, alone = self.source, self._collectives.alone
        whole = source.shard is None
        asks = not (whole or alone) and (training or self._together or source.drop_last)
        compares = training and not alone
        total = begin * self.batch_size
        ahead: deque[_Counted] = deque()
        for counted in self._items(epoch, begin, compares=compares, endless=asks):
            if compares and self._compared(counted.position, begin):
                first = counted.position * self.batch_size
                compare(self._collectives, source, epoch, first, counted.item.marks)
            if asks:
                counted.ask(self._collectives)
            ahead.append(counted)
            if asks and len(ahead) < 2:
                continue
            known = ahead.popleft()
            count = int(known.brought.sum())
            total += count
            if not count or (source.drop_last and count < self.batch_size):
                break
            yield known
            if count < self.batch_size and source.shard is not False:
                break
        for left in ahead:  # the others have asked too
            left.wait()
        if compares and whole:
            compare_ends(self._collectives, epoch, total)

    def _items(
        self, epoch: int, begin: int, *, compares: bool, endless: bool
    ) -> Iterator[_Counted]:
        """What this rank has of the global batches; with `endless` also where that is nothing."""
        shares, pieces = self._division.shares, self._division.micro_batches
        keys = (
            Key(epoch, t, shares, pieces, compares and self._compared(t, begin))
            for t in itertools.count(begin)
        )
        if self.source.options.get("num_workers", 0):
            items = self._workers.read(self._stream.another(), keys)
        else:
            items = map(self._stream.__getitem__, keys)
        for position, item in enumerate(items, begin):
            if item is None and not endless:
                return
            if item is None:
                item = self._stream.nothing(Key(epoch, position, shares, pieces, False))
            yield _Counted(position, item)

    def _compared(self, position: int, begin: int) -> bool:
        return position == begin or position % _COMPARED_EVERY == 0

    def _empty(self, epoch: int) -> Any:
        if self._example is None:
            self._example = emptied(self._first(epoch, 1), 1)
        return map_tensors(self._example, Tensor.clone)  # the user may write to what is handed out

    def _first(self, epoch: int, count: int) -> Any:
        with preserve_rng_state():
            batch = self._stream.first(epoch, count)
        if batch is None:
            raise DataError(
                f"the stream {type(self.dataset).__name__}",
                "it gives this rank no sample at all, so not even an empty batch can be made",
                "look at what it reads, or use fewer processes",
            )
        return batch
