"""How a loader's global batches are divided over micro-batches and ranks, as it hands them out.

Where shares or the size of a micro-batch are to be found first, a global batch is handed out in two
portions: a piece in which they are found, then the rest, cut by what was found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

from lockstep.data.batch_plan import EpochPlan, Indices, micro_batches_needed, split_batch
from lockstep.data.shares import AutotuneRequest, Question, opening, parse_micro_batch
from lockstep.distributed.topology import DataParallelRank
from lockstep.step import MicroBatch

Piece = tuple[int, MicroBatch, Indices, bool]
"""A micro-batch of this rank: step, what it is, sample indices, whether all ranks have some."""


@dataclass
class Portion:
    """Pieces that are cut, read and handed out together; the next portion may be cut otherwise."""

    pieces: deque[Piece]
    """In order; each is taken off when it is handed out."""
    ahead: list[Piece] = field(default_factory=list)
    """The rest of the global batch, where it must be read already to weigh the whole."""
    begun: float = 0.0
    """What this rank was handed of the first of these global batches before, by weight."""


class Division:
    """The division of a loader's global batches.

    Args:
        batch_size: samples of a global batch.
        varying: global batches may be of any size: each is cut by its own.
        shares: one whole number a rank.
        micro_batch_size: the most samples a rank computes at a time; None: its whole part. `"auto"`
            is None until it is found.
        least_pieces: micro-batches of a global batch, at least.
        wish: what is found in the first pass that trains; None: nothing.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        varying: bool,
        shares: tuple[int, ...],
        micro_batch_size: int | str | None,
        least_pieces: int,
        wish: AutotuneRequest | None,
    ) -> None:
        self.shares = shares
        self._batch_size = batch_size
        self._varying = varying
        self._micro_batch = parse_micro_batch(micro_batch_size)
        self._least_pieces = least_pieces
        self._wish = wish
        self.follow()

    @property
    def open(self) -> bool:
        """Something is still to be found."""
        return self._wish is not None and self._wish.open

    def follow(self) -> None:
        """Takes up what has been found in the meantime, by whichever loader."""
        if self._wish is not None:
            found = self._wish.found
            if self._wish.shares and found.shares is not None:
                self.shares = found.shares
            if self._wish.micro_batch_size and found.tried:
                self._micro_batch = found.micro_batch_size
        self.micro_batches = self._needed(self._batch_size)

    def planned(self, count: int) -> Indices:
        """Begin and end of each part of a global batch, shape `(micro-batches, ranks, 2)`."""
        return split_batch(
            count, self.shares, self._needed(count) if self._varying else self.micro_batches
        )

    def pieces(self, plan: EpochPlan, data_parallel: DataParallelRank, start: int) -> list[Piece]:
        """All of this rank's pieces from a step on."""
        return [
            piece
            for step in range(start, len(plan))
            for piece in _marked(step, plan[step], self.planned(len(plan[step])), data_parallel)
        ]

    def portions(
        self, plan: EpochPlan, data_parallel: DataParallelRank, start: int, *, weighed: bool
    ) -> Generator[Portion, None, None]:
        """A pass that trains, from a step on; finds, in its first global batches, what is open.

        Args:
            plan: of the epoch.
            data_parallel: this rank's.
            start: the first step.
            weighed: the user's weight of a global batch has to be known when it begins.
        """
        self.follow()
        while start < len(plan) and self._wish is not None and self._wish.open:
            yield from self.opened(start, plan[start], data_parallel, weighed=weighed)
            start += 1
        yield Portion(deque(self.pieces(plan, data_parallel, start)))

    def opened(
        self, step: int, batch: Indices, data_parallel: DataParallelRank, *, weighed: bool
    ) -> Generator[Portion, None, None]:
        """One global batch, in which something of what is open is found."""
        wish = self._wish
        count, planned = len(batch), self.planned(len(batch))
        first = None
        if wish is not None:
            first = opening(count, self.shares, planned, self._micro_batch, whole=wish.whole)
        if wish is None or first is None:  # it is too short
            yield Portion(deque(_marked(step, batch, planned, data_parallel)))
            return
        begin, end = first[0, data_parallel.rank]
        question = Question(
            local=int(end - begin),
            batch_size=self._batch_size,
            shares=self.shares,
            micro_batch_size=self._micro_batch,
            find_shares=wish.shares and wish.found.shares is None,
            find_micro_batch=wish.micro_batch_size and not wish.found.tried,
        )
        done = int(first[0, -1, 1])
        portion = Portion(deque(_marked(step, batch, first, data_parallel)))
        if weighed:
            portion.ahead = _marked(step, batch, self._rest(count, done), data_parallel)
        with wish.found.watch(question):
            yield portion
        self.follow()
        if done < count:
            rest = _marked(step, batch, self._rest(count, done), data_parallel)
            yield Portion(deque(rest), begun=portion.begun)

    def _needed(self, count: int) -> int:
        needed = micro_batches_needed(count, self.shares, self._micro_batch)
        return max(needed, min(self._least_pieces, count))

    def _rest(self, count: int, done: int) -> Indices:
        """The parts of a global batch after its first samples: as planned, where that can be."""
        planned = self.planned(count)
        later = [j for j in range(len(planned)) if planned[j, 0, 0] == done]
        if later or done == count:
            return planned[later[0] :] if later else planned[:0]
        return done + split_batch(count - done, self.shares, self._needed(count - done))


def _marked(
    step: int, batch: Indices, parts: Indices, data_parallel: DataParallelRank
) -> list[Piece]:
    """This rank's micro-batches of what of a global batch is in `parts`."""
    counts = parts[..., 1] - parts[..., 0]
    whole = len(parts) == 1 and int(counts.sum()) == len(batch)
    plain = whole and bool((counts == counts[0, 0]).all()) and len(batch) > 0
    found = []
    for j in range(len(parts)):
        begin, end = parts[j, data_parallel.rank]
        local = int(end - begin)
        micro = MicroBatch(
            count=len(batch),
            local=local,
            first=int(parts[j, 0, 0]) == 0,
            last=int(parts[j, -1, 1]) == len(batch),
            pieces=len(parts),
            scale=1.0 if plain else local * data_parallel.size / max(1, len(batch)),
            plain=plain,
        )
        found.append((step, micro, batch[begin:end], bool(counts[j].all())))
    return found
