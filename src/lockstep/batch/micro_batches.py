"""A rank's micro-batches: how global batches are divided, and how much each micro-batch weighs.

Where shares or the size of a micro-batch are to be found first, a global batch is handed out in two
segments: a micro-batch in which they are found, then the rest, divided by what was found.

DDP averages over ranks and backward passes accumulate, so a micro-batch whose loss is the mean over
weight `w` counts as it should when that loss is multiplied by `w * ranks / W`, `W` being the weight
of the whole global batch. By samples, `W` is known from the plan. By a user's weight (the tokens
that count, say), or by the rows that a user's collate function made, it is a sum over ranks: the
loader reads one global batch ahead and starts that
all-reduce (24 bytes, on the CPU side) a whole step before its result is needed, so no step waits
for it. At most one is under way. A loop that is left lets go of it unread, which is right where all
ranks leave; the sum also says of which global batch it is, so that one of a rank that has left
alone is not taken for another.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.batch.plan import (
    Indices,
    Plan,
    ceil_div,
    micro_batches_needed,
    split_batch,
    virtual_ranks_of,
)
from lockstep.batch.rows import RowCounter
from lockstep.batch.shares import first_micro_batch
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.topology import DataParallelRank
from lockstep.errors import DataError, RanksDifferError, SettingError
from lockstep.session.micro_batch import MicroBatch, VirtualRank

Weight = Callable[[Any], float | Tensor]


class PlannedMicroBatch(NamedTuple):
    """A micro-batch of this rank, before it is read."""

    step: int
    """Which global batch of the epoch it is part of."""
    micro_batch: MicroBatch
    indices: Indices
    """Of its samples in the dataset."""
    on_all_ranks: bool
    """Whether every rank has samples of it."""
    whole: Indices | None = None
    """Of all samples of the global batch; None: of a stream."""


WithBatch = tuple[PlannedMicroBatch, Any]


@dataclass
class Autotuned:
    """What has been found in a run, for all loaders that want it."""

    shares: tuple[int, ...] | None = None
    """None: not yet found."""
    micro_batch_size: int | None = None
    """The most samples that fit at a time; None: no limit was met."""
    tried: bool = False
    """Whether `micro_batch_size` has been looked for."""


@dataclass(frozen=True, kw_only=True)
class AutotuneRequest:
    """What one loader leaves open."""

    found: Autotuned
    shares: bool
    micro_batch_size: bool
    profile: Callable[[MicroBatchPlan, int], AbstractContextManager[None]]
    """To be entered while the first micro-batch, of so many samples, is computed."""
    as_planned: Callable[[], bool]
    """Whether the model needs to see micro-batches as they are planned."""

    @property
    def open_shares(self) -> bool:
        """They are wanted and not known yet."""
        return self.shares and self.found.shares is None

    @property
    def open_micro_batch_size(self) -> bool:
        """It is wanted and not known yet."""
        return self.micro_batch_size and not self.found.tried

    @property
    def undecided(self) -> bool:
        """One of them is."""
        return self.open_shares or self.open_micro_batch_size


class Segment(NamedTuple):
    """Micro-batches that are planned and read together."""

    micro_batches: Iterable[PlannedMicroBatch]
    ahead: Sequence[PlannedMicroBatch] = ()
    """After a single one: the rest of its global batch, as divided so far; the next segment has it
    as it is then."""


@dataclass(kw_only=True)
class MicroBatchPlan:
    """How the global batches of a loader are divided."""

    batch_size: int
    """Samples of a global batch."""
    varying: bool
    """Global batches may be of any size: each is divided by its own."""
    data_parallel: DataParallelRank
    """This rank among those that compute parts."""
    first_shares: tuple[int, ...]
    """One whole number a rank, until others are found."""
    first_micro_batch_size: int | None = None
    """The most samples a rank computes at a time, likewise; None: its whole part."""
    min_micro_batches: int = 1
    """Of a global batch."""
    num_virtual_ranks: int | None = None
    """Each has an equal part of every global batch; None: there are none."""
    request: AutotuneRequest
    """What is found in the first pass that trains."""

    def __post_init__(self) -> None:
        self._needed(self.batch_size)  # refuses a size that cannot be
        if self.num_virtual_ranks is not None and len(set(self.first_shares)) > 1:
            raise SettingError(
                f"shares {':'.join(map(str, self.first_shares))} for "
                f"{self.num_virtual_ranks} replicas",
                "each of them trains on an equal part of the global batch, wherever it is computed",
                "leave shares out",
            )

    @property
    def shares(self) -> tuple[int, ...]:
        """As given, or as found in the meantime, by whichever loader."""
        found = self.request.found.shares if self.request.shares else None
        return self.first_shares if found is None else found

    @property
    def micro_batch_size(self) -> int | None:
        """The most samples a rank computes at a time: likewise."""
        if self.request.micro_batch_size and self.request.found.tried:
            return self.request.found.micro_batch_size
        return self.first_micro_batch_size

    @property
    def max_virtual_ranks_of_process(self) -> int:
        """The most virtual ranks that a process computes, one after the other."""
        return ceil_div(self.num_virtual_ranks or 1, len(self.shares))

    @property
    def num_micro_batches(self) -> int:
        """Of a full global batch."""
        return len(self.split(self.batch_size))

    def split(self, count: int) -> Indices:
        """Begin and end of each part of a global batch, shape `(micro-batches, ranks, 2)`."""
        needed = self._needed(count if self.varying else self.batch_size)
        if self.num_virtual_ranks is None and not self.varying and count < self.batch_size:
            needed = self._needed_of_short(count, needed)
        return split_batch(count, self.shares, needed, self.num_virtual_ranks)

    def _needed_of_short(self, count: int, of_full: int) -> int:
        """Micro-batches of a short global batch: about as large as those of a full one.

        Cut into as many as a full one, it would leave ranks without samples in some of them. Their
        number depends on the number of ranks only where that of a full one does, so BatchNorm sees
        the same micro-batches on any number of ranks.
        """
        alike = -(-of_full * count // self.batch_size)
        fewest = micro_batches_needed(count, self.shares, self.micro_batch_size)
        return max(alike, fewest)

    def of_epoch(self, plan: Plan, start: int) -> Iterator[PlannedMicroBatch]:
        """This rank's micro-batches from a step on, one after the other, all divided as of now."""
        divided = {count: self._of_rank(count, self.split(count)) for count in plan.sizes(start)}
        return (
            PlannedMicroBatch(step, micro, whole[part], on_all_ranks, whole)
            for step, whole in enumerate(plan.batches(start), start)
            for micro, part, on_all_ranks in divided[len(whole)]
        )

    def reaches_all(self, plan: Plan) -> bool:
        """Whether every rank has samples of every micro-batch."""
        splits = (self.split(count) for count in plan.sizes(0))
        return all(bool((split[..., 0] < split[..., 1]).all()) for split in splits)

    def check_trained(self, smallest: int) -> None:
        """Raises DataError if a virtual rank would get nothing of a global batch of this size."""
        if self.num_virtual_ranks is not None and smallest < self.num_virtual_ranks:
            raise DataError(
                f"a global batch of {smallest} samples for {self.num_virtual_ranks} replicas",
                "each of them makes a step with its own part, and some would have none",
                "leave a short last batch out with drop_last=True, or use fewer replicas",
            )

    def segments(self, plan: Plan, start: int) -> Generator[Segment, None, None]:
        """A pass that trains, from a step on; in its first global batches finds what is open."""
        self.check_trained(min(plan.sizes(start), default=self.batch_size))
        while start < len(plan) and self.request.undecided:
            yield from self.autotuned(start, plan[start])
            start += 1
        yield Segment(self.of_epoch(plan, start))

    def autotuned(self, step: int, batch: Indices) -> Generator[Segment, None, None]:
        """One global batch, in which something of what is not known is found."""
        count, planned = len(batch), self.split(len(batch))
        # The plan's own, where that is known to be no larger than wanted.
        whole = self.request.as_planned() and not self.request.open_micro_batch_size
        first = first_micro_batch(count, self.shares, planned, self.micro_batch_size, whole=whole)
        if first is None:  # it is too short
            yield Segment(self._planned(step, batch, planned))
            return
        done = int(first[0, -1, 1])
        now, rest = self._planned(step, batch, first), self._rest(count, done)
        with self.request.profile(self, now[0].micro_batch.local_rows):
            yield Segment(now, ahead=self._planned(step, batch, rest))
        if done < count:
            yield Segment(self._planned(step, batch, self._rest(count, done)))

    def _needed(self, count: int) -> int:
        """Micro-batches of a global batch, or of the part of one virtual rank."""
        if self.num_virtual_ranks is not None:
            group = (1,) * max(1, len(self.shares) // self.num_virtual_ranks)
            largest = -(-count // self.num_virtual_ranks)
            needed = micro_batches_needed(largest, group, self.micro_batch_size)
            return max(needed, min(self.min_micro_batches, count // self.num_virtual_ranks))
        needed = micro_batches_needed(count, self.shares, self.micro_batch_size)
        return max(needed, min(self.min_micro_batches, count))

    def _rest(self, count: int, done: int) -> Indices:
        """The parts of a global batch after its first samples: as planned, where that can be."""
        planned = self.split(count)
        begins = planned[:, 0, 0]
        if done == count or done in begins:
            return planned[begins >= done]
        return done + split_batch(count - done, self.shares, self._needed(count - done))

    def _planned(self, step: int, batch: Indices, parts: Indices) -> list[PlannedMicroBatch]:
        """This rank's micro-batches of what of a global batch is in `parts`."""
        return [
            PlannedMicroBatch(step, micro, batch[part], on_all_ranks, batch)
            for micro, part, on_all_ranks in self._of_rank(len(batch), parts)
        ]

    def _of_rank(self, count: int, parts: Indices) -> list[tuple[MicroBatch, slice, bool]]:
        """This rank's of a global batch of a size: where they are, and whether all have some."""
        if not len(parts):
            return []
        rank, sizes = self.data_parallel.rank, parts[..., 1] - parts[..., 0]
        opens, closes = bool(parts[0, 0, 0] == 0), bool(parts[-1, -1, 1] == count)
        found = micro_batches(
            sizes, rank, count, opens=opens, closes=closes, num_virtual_ranks=self.num_virtual_ranks
        )
        return [
            (micro, slice(begin, end), bool(of_ranks.all()))
            for micro, (begin, end), of_ranks in zip(
                found, parts[:, rank].tolist(), sizes, strict=False
            )  # another rank may have one virtual rank more
        ]


def micro_batches(
    sizes: Indices,
    rank: int,
    count: int,
    *,
    opens: bool = True,
    closes: bool = True,
    num_virtual_ranks: int | None = None,
) -> list[MicroBatch]:
    """A rank's consecutive micro-batches of a global batch.

    Args:
        sizes: samples of each part, shape `(micro-batches, ranks)`.
        rank: whose they are.
        count: samples of the whole global batch.
        opens: the first of them is the first of the global batch.
        closes: the last of them is the last.
        num_virtual_ranks: of the run; None: every rank computes a part of one model's batch.
    """
    number, ranks = sizes.shape
    if num_virtual_ranks is not None:
        return _micro_batches_of_virtual_ranks(sizes, rank, count, num_virtual_ranks)
    plain = opens and closes and number == 1 and count > 0 and bool((sizes == sizes[0, 0]).all())
    return [
        MicroBatch(
            global_samples=count,
            local_rows=local,
            first=opens and j == 0,
            last=closes and j == number - 1,
            num_micro_batches=number,
            scale=1.0 if plain else local * ranks / max(1, count),
            plain=plain,
        )
        for j, local in enumerate(sizes[:, rank].tolist())
    ]


def _micro_batches_of_virtual_ranks(
    sizes: Indices, rank: int, count: int, num_virtual_ranks: int
) -> list[MicroBatch]:
    """Returns a rank's micro-batches, those of its first virtual rank first.

    Args:
        sizes: samples of each part, shape `(micro-batches, ranks)`.
        rank: whose micro-batches are returned.
        count: samples of the whole global batch.
        num_virtual_ranks: of the run.
    """
    max_micro_batches, num_ranks = sizes.shape
    numbers = virtual_ranks_of(rank, num_ranks, num_virtual_ranks)
    max_virtual_ranks = ceil_div(num_virtual_ranks, num_ranks)
    pieces_of_each = max(1, max_micro_batches // max_virtual_ranks)
    ranks_of_each = max(1, num_ranks // num_virtual_ranks)
    first_rank = rank // ranks_of_each * ranks_of_each
    num_micro_batches = len(numbers) * pieces_of_each
    found = []
    for index, number in enumerate(numbers):
        begin = index * pieces_of_each
        parts = sizes[begin : begin + pieces_of_each]
        samples_of_virtual_rank = int(parts[:, first_rank : first_rank + ranks_of_each].sum())
        for piece, local in enumerate(parts[:, rank].tolist()):
            virtual_rank = VirtualRank(
                number=number,
                begins=piece == 0,
                ends=piece == pieces_of_each - 1,
                number_on_process=len(numbers),
                mean_number_on_process=max(1.0, num_virtual_ranks / num_ranks),
            )
            position = begin + piece
            micro_batch = MicroBatch(
                global_samples=count,
                local_rows=local,
                first=position == 0,
                last=position == num_micro_batches - 1,
                num_micro_batches=num_micro_batches,
                scale=local * ranks_of_each / max(1, samples_of_virtual_rank),
                plain=False,
                virtual_rank=virtual_rank,
            )
            found.append(micro_batch)
    return found


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """How the micro-batches of one loader are weighed.

    By what the user's function says a batch weighs; where there is none, by the rows of the
    batches. Rows are counted where a collate function of the user's makes the batches.
    """

    weight: Weight | None
    rows: RowCounter | None
    """None: every sample makes one row, and nothing has to be counted."""
    empty: Callable[[], Any]
    """A batch without rows."""

    @property
    def is_planned(self) -> bool:
        """Whether the plan says already what each part weighs."""
        return self.weight is None and self.rows is None

    def counted(self, planned: PlannedMicroBatch, batch: Any) -> CountedBatch:
        """The batch with the number of its rows, and what it weighs.

        Raises:
            DataError: the user's function gave no number that is at least 0.
        """
        micro = planned.micro_batch
        rows: int | None = micro.local_rows
        if self.rows is not None and micro.local_rows:
            rows = self.rows.count(batch, micro.local_rows)
        clear = rows is not None
        if rows is None:
            rows = micro.local_rows
        given = batch
        if rows == 0 and micro.local_rows:
            batch = self.empty()
        if rows != micro.local_rows:
            left_out = max(0, micro.local_rows - rows)
            planned = planned._replace(
                micro_batch=replace(micro, local_rows=rows, left_out=left_out)
            )
        by_user = 0.0 if self.weight is None else weigh(self.weight, planned, batch)
        value = float(rows) if self.weight is None else by_user
        return CountedBatch(planned, batch, given, value, rows != micro.local_rows, not clear)


class CountedBatch(NamedTuple):
    """A micro-batch whose rows were counted."""

    planned: PlannedMicroBatch
    batch: Any
    """A batch of one sample where nothing is left."""
    given: Any
    """What the collate function returned."""
    weight: float
    differs: bool
    """It has another number of rows than was planned."""
    unclear: bool
    """It does not show how many rows it has."""


def _begin_sum(
    pairs: list[WithBatch],
    weighing: Weighing,
    collectives: Collectives,
    epoch: int,
    weight_before: float,
    num_virtual_ranks: int,
) -> Callable[[], list[WithBatch]]:
    """Begins to sum up the weight of one global batch; see `weighted`.

    Returns:
        What waits for the sum and gives the micro-batches with their exact scales; it raises
        RanksDifferError where another rank is at another global batch.
    """
    counted = [weighing.counted(*pair) for pair in pairs]
    own = [weight_before, *[0.0] * (num_virtual_ranks - 1)]
    for each in counted:
        own[each.planned.micro_batch.virtual_rank_number or 0] += each.weight
    differing = float(any(each.differs for each in counted))
    unclear = float(any(each.unclear for each in counted))
    if not collectives.contributes:
        own = [0.0] * num_virtual_ranks
    place = epoch, pairs[0][0].step
    # Over the ranks: weight of each virtual rank's part, or of all, how many ranks have other rows
    # than planned or none that can be seen, epoch, position.
    sums = torch.tensor([*own, differing, unclear, *place], dtype=torch.float64)
    work = None if collectives.alone else dist.all_reduce(sums, async_op=True)

    def scaled() -> list[WithBatch]:
        topology, ranks = collectives.topology, collectives.data_parallel.size
        if work is not None:
            work.wait()
        *totals, ranks_that_differ, ranks_unclear, at_epoch, at_step = sums.tolist()
        if [at_epoch, at_step] != [topology.size * number for number in place]:
            raise RanksDifferError(
                "the same global batch on every rank, whose weights or rows are summed up",
                f"rank {topology.rank} is at number {place[1]} of epoch {place[0]}, and another "
                "rank is elsewhere",
                "leave the training loop at the same step on every rank: decide break, continue "
                "and return by what is equal everywhere, such as the step or world.mean(loss)",
            )
        samples = pairs[0][0].micro_batch.global_samples
        if weighing.weight is None and weighing.rows is not None:
            if ranks_unclear:
                weighing.rows.warn_of_unknown(samples)
            if not ranks_that_differ:
                return pairs
            weighing.rows.warn_of_rows(samples, int(sum(totals)))
        alone = ranks == 1 and len(pairs) == 1 and pairs[0][0].micro_batch.first
        alone = alone and pairs[0][0].micro_batch.virtual_rank is None
        found = []
        for each in counted:
            micro = each.planned.micro_batch
            total = totals[micro.virtual_rank_number or 0]
            scale = each.weight * max(1, ranks // num_virtual_ranks) / total if total else 0.0
            micro = replace(micro, scale=scale, plain=alone and total > 0)
            # Where nothing is left on any rank, all get what one device would get.
            batch = each.batch if sum(totals) else each.given
            found.append((each.planned._replace(micro_batch=micro), batch))
        return found

    return scaled


def weighted(
    pairs: Iterator[WithBatch],
    weighing: Weighing,
    collectives: Collectives,
    epoch: int,
    weight_before: float = 0.0,
    num_virtual_ranks: int | None = None,
) -> Iterator[WithBatch]:
    """The same micro-batches with the exact scale of what they weigh instead of that of the plan.

    Args:
        pairs: the micro-batches, in order.
        weighing: what a batch weighs.
        collectives: of the run.
        epoch: of the pass.
        weight_before: of what this rank was handed of the first global batch before.
        num_virtual_ranks: of the run, each with a mean of its own; None: there are none.

    Raises:
        RanksDifferError: another rank is at another global batch.
    """
    ahead: Callable[[], list[WithBatch]] = list  # nothing yet
    group: list[WithBatch] = []
    for pair in pairs:
        group.append(pair)
        if pair[0].micro_batch.last:
            # Before the next sum begins: it would meet what a rank does that has gone elsewhere.
            ready = ahead()
            ahead = _begin_sum(
                group, weighing, collectives, epoch, weight_before, num_virtual_ranks or 1
            )
            group, weight_before = [], 0.0
            yield from ready
            if collectives.alone:  # there is no sum to wait for, so nothing is read ahead
                yield from ahead()
                ahead = list
    yield from ahead()


def weigh(weight: Weight, planned: PlannedMicroBatch, batch: Any) -> float:
    """What a micro-batch weighs; one without samples nothing.

    Raises:
        DataError: the user's function did not give a number that is at least 0.
    """
    if not planned.micro_batch.local_rows:
        return 0.0
    value = weight(batch)
    number = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1e300:
        raise DataError(
            f"weight={getattr(weight, '__name__', weight)}",
            f"it gave {value!r} for a batch",
            "return one number that is at least 0, such as the number of tokens that count",
        )
    return float(number)
