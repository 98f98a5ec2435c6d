"""Weighs micro-batches by a user's function or by their rows, instead of by planned samples.

The *weight* of a batch is what the user's function says (its number of tokens, say), or its number
of rows if a user's collate function made it. The *scale* of a micro-batch, the factor of its loss,
is then `w * ranks / W`: `w` is its weight, and `W` that of the whole global batch over all ranks.
With virtual ranks (`session.micro_batch`) `ranks` is their number; if each trains a copy of the
model, `ranks` and `W` are those of one virtual rank.

`W` is an all-reduce of a few bytes on the CPU. The loader reads one global batch ahead and starts
it a whole step before its result is needed, so no step waits for it. At most one is under way. A
loop that is left early never reads the last sum, which is right if all ranks leave. The sum also
says of which global batch it is, so that the sum of a rank that has left alone is not mistaken for
another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.batch.micro_batches import PlannedMicroBatch, ReadMicroBatch
from lockstep.batch.rows import RowCounter
from lockstep.distributed.collectives import Collectives
from lockstep.errors import DataError, RanksDifferError
from lockstep.session.micro_batch import VirtualRanks

Weight = Callable[[Any], float | Tensor]


class CountedBatch(NamedTuple):
    """A micro-batch whose rows were counted."""

    planned: PlannedMicroBatch
    batch: Any
    """A batch of one sample if the collate function left all samples out."""
    collated: Any
    """What the collate function returned."""
    weight: float
    has_other_rows: bool
    """True if the number of rows is not the number of planned samples."""
    rows_are_unknown: bool
    """True if the batch does not show how many rows it has."""


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """How the micro-batches of one loader are weighed."""

    weight: Weight | None
    """The user's function; None: batches are weighed by their rows."""
    rows: RowCounter | None
    """None: every sample makes one row, and nothing has to be counted."""
    make_empty_batch: Callable[[], Any]
    """Returns a batch that stands for one without rows."""

    @property
    def is_planned(self) -> bool:
        """True if every part weighs its number of planned samples."""
        return self.weight is None and self.rows is None

    def count_rows(self, planned: PlannedMicroBatch, batch: Any) -> CountedBatch:
        """Counts the rows of a batch, and weighs it.

        Args:
            planned: the micro-batch as it was planned: a row for each sample.
            batch: what the collate function made of its samples.

        Raises:
            DataError: the user's function did not return a number that is at least 0.
        """
        num_samples = planned.micro_batch.local_rows
        visible_rows: int | None = num_samples
        if self.rows is not None and num_samples > 0:
            visible_rows = self.rows.count(batch, num_samples)
        # If the batch does not show its rows, each sample is taken for one.
        num_rows = num_samples if visible_rows is None else visible_rows
        has_other_rows = num_rows != num_samples
        if has_other_rows:
            left_out = max(0, num_samples - num_rows)
            counted = replace(planned.micro_batch, local_rows=num_rows, left_out=left_out)
            planned = planned._replace(micro_batch=counted)
        all_samples_are_left_out = num_samples > 0 and num_rows == 0
        weight = float(num_rows)
        if self.weight is not None and num_rows > 0:  # it is not called with batches without rows
            weight = _weigh_batch(self.weight, batch)
        return CountedBatch(
            planned=planned,
            batch=self.make_empty_batch() if all_samples_are_left_out else batch,
            collated=batch,
            weight=weight,
            has_other_rows=has_other_rows,
            rows_are_unknown=visible_rows is None,
        )


def _index_of_weight(counted: CountedBatch) -> int:
    """Returns the index, in a list of the weights of each virtual rank, of a micro-batch's own.

    Without virtual ranks the list has one weight, of the whole global batch, at index 0.
    """
    number = counted.planned.micro_batch.virtual_rank_number
    return 0 if number is None else number


def _weigh_batch(weight: Weight, batch: Any) -> float:
    """Returns what the user's function says that a batch weighs.

    Raises:
        DataError: it did not return a number that is at least 0.
    """
    value = weight(batch)
    number = float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    # Infinity and NaN are refused too, and numbers whose sum could be infinite.
    if not is_number or not 0 <= number < 1e300:
        raise DataError(
            f"weight={getattr(weight, '__name__', weight)}",
            f"it gave {value!r} for a batch",
            "return one number that is at least 0, such as the number of tokens that count",
        )
    return float(number)


def scale_by_weight(
    read: Iterator[ReadMicroBatch],
    weighing: Weighing,
    collectives: Collectives,
    epoch: int,
    weight_before: float = 0.0,
    virtual_ranks: VirtualRanks | None = None,
) -> Iterator[ReadMicroBatch]:
    """Yields micro-batches with the exact scale of what they weigh, instead of the planned one.

    Args:
        read: the micro-batches, in order.
        weighing: how a batch is weighed.
        collectives: of the run.
        epoch: of the pass.
        weight_before: the weight of the micro-batches of the first global batch that this rank was
            handed before this call; 0 if `read` begins with the global batch.
        virtual_ranks: of the run; None: there are none.

    Raises:
        RanksDifferError: another rank is at another global batch.
    """
    weight_sum: _WeightSum | None = None
    global_batch: list[ReadMicroBatch] = []
    for planned, batch in read:
        global_batch.append((planned, batch))
        if not planned.micro_batch.last:
            continue
        # `global_batch` is complete. The sum of the one before it, which is under way, is waited
        # for before the next sum begins: if a rank has left its loop, the next sum would meet some
        # other collective of that rank.
        ready = [] if weight_sum is None else weight_sum.wait()
        weight_sum = _WeightSum(
            global_batch, weighing, collectives, epoch, weight_before, virtual_ranks
        )
        global_batch = []
        weight_before = 0.0
        yield from ready
        if collectives.single_process:  # there is no sum to wait for, so nothing is read ahead
            yield from weight_sum.wait()
            weight_sum = None
    if weight_sum is not None:
        yield from weight_sum.wait()


class _WeightSum:
    """The all-reduce of the weight of one global batch, which is under way.

    Args:
        global_batch: this rank's micro-batches of the global batch.
        weighing: how a batch is weighed.
        collectives: of the run.
        epoch: of the pass.
        weight_before: the weight of what this rank has already got of the global batch.
        virtual_ranks: of the run; None: there are none.
    """

    def __init__(
        self,
        global_batch: list[ReadMicroBatch],
        weighing: Weighing,
        collectives: Collectives,
        epoch: int,
        weight_before: float,
        virtual_ranks: VirtualRanks | None,
    ) -> None:
        self._global_batch = global_batch
        self._weighing = weighing
        self._collectives = collectives
        self._virtual_ranks = virtual_ranks
        self._num_parts = 1 if virtual_ranks is None else virtual_ranks.count
        self._epoch = epoch
        self._position = global_batch[0][0].position
        self._counted = [weighing.count_rows(planned, batch) for planned, batch in global_batch]
        # The weight of each virtual rank's part. Without virtual ranks there is one: of the whole.
        weights = [0.0] * self._num_parts
        if collectives.contributes:
            # Only autotuning hands out a part before. With virtual ranks it is refused, so this is
            # the weight of the whole.
            weights[0] = weight_before
            for counted in self._counted:
                if not counted.planned.micro_batch.is_repeat:  # another rank has counted it
                    weights[_index_of_weight(counted)] += counted.weight
        has_other_rows = float(any(counted.has_other_rows for counted in self._counted))
        has_unknown_rows = float(any(counted.rows_are_unknown for counted in self._counted))
        # All of these are summed over the ranks; `wait` reads them in the same order.
        values = [*weights, has_other_rows, has_unknown_rows, self._epoch, self._position]
        self._sums = torch.tensor(values, dtype=torch.float64)
        self._work = None
        if not collectives.single_process:
            self._work = dist.all_reduce(self._sums, async_op=True)

    def wait(self) -> list[ReadMicroBatch]:
        """Waits for the sum, and returns the micro-batches with their exact scales.

        Raises:
            RanksDifferError: another rank is at another global batch.
        """
        if self._work is not None:
            self._work.wait()
        # The sums over the ranks of the values that __init__ joins, in the same order.
        (
            *weights,
            num_ranks_with_other_rows,
            num_ranks_with_unknown_rows,
            sum_of_epochs,
            sum_of_positions,
        ) = self._sums.tolist()
        self._check_same_global_batch(sum_of_epochs, sum_of_positions)
        row_counter = self._weighing.rows
        if self._weighing.weight is not None or row_counter is None:
            return self._scaled(weights)
        # Batches are weighed by their rows.
        first_planned, _ = self._global_batch[0]
        global_samples = first_planned.micro_batch.global_samples
        if num_ranks_with_unknown_rows > 0:
            row_counter.warn_of_unknown(global_samples)
        if num_ranks_with_other_rows == 0:  # each sample makes one row, so the planned scales hold
            return self._global_batch
        row_counter.warn_of_rows(global_samples, int(sum(weights)))
        return self._scaled(weights)

    def _check_same_global_batch(self, sum_of_epochs: float, sum_of_positions: float) -> None:
        """Raises RanksDifferError if some rank is at another global batch than this one.

        Args:
            sum_of_epochs: over the ranks, of the epoch that each is in.
            sum_of_positions: over the ranks, of the position of the global batch that each is at.
        """
        # If all ranks have the same number, the sum is `size` times this rank's. If they differ, it
        # is not on at least one rank, which raises.
        topology = self._collectives.topology
        same_epoch = sum_of_epochs == topology.size * self._epoch
        same_position = sum_of_positions == topology.size * self._position
        if same_epoch and same_position:
            return
        raise RanksDifferError(
            "the same global batch on every rank, whose weights or rows are summed up",
            f"rank {topology.rank} is at number {self._position} of epoch {self._epoch}, and "
            "another rank is elsewhere",
            "leave the training loop at the same step on every rank: decide break, continue "
            "and return by what is equal everywhere, such as the step or world.mean(loss)",
        )

    def _scaled(self, weights: list[float]) -> list[ReadMicroBatch]:
        """Returns the micro-batches, each with the scale `w * ranks / W`.

        Args:
            weights: the weight `W`, summed over all ranks, of each virtual rank's part. Without
                virtual ranks it has one item, the weight of the whole global batch.
        """
        virtual_ranks = self._virtual_ranks
        trains_copies = virtual_ranks is not None and virtual_ranks.train_copies
        num_gradients = self._num_gradients()  # the `ranks` of the formula
        total_of_global_batch = sum(weights)
        is_one_micro_batch = self._is_one_micro_batch()
        scaled = []
        for counted in self._counted:
            micro_batch = counted.planned.micro_batch
            # The `W` of the formula. Each copy of the model has a mean of its own.
            total = total_of_global_batch
            if trains_copies:
                total = weights[_index_of_weight(counted)]
            scale = 0.0
            if total > 0:
                scale = counted.weight * num_gradients / total
            # A micro-batch that is the whole global batch has scale 1: it needs no scaling.
            is_plain = is_one_micro_batch and total > 0
            micro_batch = replace(micro_batch, scale=scale, plain=is_plain)
            # A rank without rows gets an empty batch. But if no rank has rows, each gets what its
            # collate function returned, as one device would.
            batch = counted.batch if total_of_global_batch > 0 else counted.collated
            scaled.append((counted.planned._replace(micro_batch=micro_batch), batch))
        return scaled

    def _num_gradients(self) -> int:
        """Returns of how many gradients the mean is taken: of all ranks, or of virtual ranks."""
        num_ranks = self._collectives.data_parallel.size
        virtual_ranks = self._virtual_ranks
        if virtual_ranks is None:
            return num_ranks
        if virtual_ranks.train_copies:  # the ranks that compute one copy of the model together
            return max(1, num_ranks // virtual_ranks.count)
        return virtual_ranks.count

    def _is_one_micro_batch(self) -> bool:
        """Returns True if the global batch is one micro-batch, which this rank computes alone."""
        first_planned, _ = self._global_batch[0]
        first = first_planned.micro_batch
        is_only_micro_batch = len(self._global_batch) == 1 and first.first
        is_only_rank = self._collectives.data_parallel.size == 1
        return is_only_rank and is_only_micro_batch and first.virtual_rank is None
