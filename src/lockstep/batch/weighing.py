"""Computes the factor of a micro-batch's loss if batches are not weighed by their planned samples.

The *weight* of a batch is the value of the user's `weight` function (for example its number of
tokens). Without such a function it is the number of rows that the user's collate function has
made. The *scale* of a micro-batch, the factor of its loss, is `w * ranks / W`, where `w` is its
weight and `W` is the weight of the whole global batch over all ranks. With virtual ranks
(`session.micro_batch`), `ranks` is their number. Under DiLoCo, where each virtual rank trains a
copy of the model, `ranks` and `W` are those of one virtual rank.

`W` is the result of an all-reduce of a few bytes on the CPU. The loader reads one global batch
ahead and starts the all-reduce a whole step before the result is needed, so no step waits for it,
and at most one is in progress. If all ranks leave the loop early, the last result is never read.
If only one rank leaves, its next all-reduce could be mistaken for another one; so each also sums up
the epoch and the position, which shows whether all ranks are at the same global batch.
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
from lockstep.communication.summation_tree import sum_in_order
from lockstep.distributed.collectives import Collectives
from lockstep.errors import DataError, RanksDifferError
from lockstep.session.micro_batch import MicroBatch, VirtualRanks

Weight = Callable[[Any], float | Tensor]

MAX_WEIGHT = 1e300
"""Weights from here on are refused, as their sum might be infinite."""


class CountedBatch(NamedTuple):
    """A micro-batch whose rows have been counted."""

    corrected: PlannedMicroBatch
    """The planned micro-batch, with the counted number of rows."""
    batch: Any
    """The batch to train on. If the collate function dropped all samples, it is an empty batch."""
    collated: Any
    """The batch that the collate function returned, which the loop gets if no rank has any rows."""
    weight: float
    has_other_rows: bool
    """True if the number of rows differs from the planned number of samples."""
    rows_are_unknown: bool
    """True if the number of rows cannot be determined from the batch."""


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """Determines the weights of the micro-batches of one loader."""

    weight: Weight | None
    """The user's function; None to weigh batches by their rows."""
    row_counter: RowCounter | None
    """Counts the rows of batches. None if every sample makes one row."""
    make_one_sample_batch: Callable[[], Any]
    """Makes the batch of a micro-batch without rows; see `Loader._make_one_sample_batch`."""

    @property
    def is_planned(self) -> bool:
        """True if every micro-batch weighs its planned number of samples."""
        return self.weight is None and self.row_counter is None

    def without_weight_function(self) -> Weighing:
        """Returns an object that weighs each batch by its rows."""
        return replace(self, weight=None)

    def count_rows(self, planned: PlannedMicroBatch, batch: Any) -> CountedBatch:
        """Counts the rows of a batch and computes its weight.

        Args:
            planned: the micro-batch as planned, with one row for each sample.
            batch: the batch that the collate function made of its samples.

        Raises:
            DataError: the user's function did not return a number that is at least 0.
        """
        num_samples = planned.micro_batch.local_rows
        counted_rows = self._num_rows_if_known(batch, num_samples)
        rows_are_unknown = counted_rows is None
        num_rows = num_samples if counted_rows is None else counted_rows

        # If the collate function dropped all samples of this rank, its result (often None) cannot
        # be trained on, so an empty batch takes its place.
        all_samples_were_dropped = num_samples > 0 and num_rows == 0
        batch_to_train_on = self.make_one_sample_batch() if all_samples_were_dropped else batch
        return CountedBatch(
            corrected=_with_rows(planned, num_rows),
            batch=batch_to_train_on,
            collated=batch,
            weight=self._weight_of(batch, num_rows),
            has_other_rows=num_rows != num_samples,
            rows_are_unknown=rows_are_unknown,
        )

    def _weight_of(self, batch: Any, num_rows: int) -> float:
        """Returns the weight of a batch: its number of rows, or what the user's function says.

        A batch without rows always weighs 0: the user's function never gets one.
        """
        if self.weight is None or num_rows == 0:
            return float(num_rows)
        return _weigh_batch(self.weight, batch)

    def _num_rows_if_known(self, batch: Any, num_samples: int) -> int | None:
        """Returns the number of rows that were made of some samples, or None if it is unknown."""
        # Without a counter every sample makes one row. The batch of a rank without samples has no
        # rows, whatever it contains.
        if self.row_counter is None or num_samples == 0:
            return num_samples
        return self.row_counter.count(batch, num_samples)


def _with_rows(planned: PlannedMicroBatch, num_rows: int) -> PlannedMicroBatch:
    """Returns a micro-batch with the number of rows that the collate function has made.

    It may have dropped samples, or made several rows of one.
    """
    num_samples = planned.micro_batch.local_rows
    if num_rows == num_samples:
        return planned
    num_dropped = max(0, num_samples - num_rows)
    corrected = replace(planned.micro_batch, local_rows=num_rows, left_out=num_dropped)
    return planned._replace(micro_batch=corrected)


def _index_of_weight(counted: CountedBatch) -> int:
    """Returns the index of a micro-batch in a list with one weight for each virtual rank.

    Without virtual ranks, the list only has the weight of the whole global batch, at index 0.
    """
    virtual_rank = counted.corrected.micro_batch.virtual_rank_number
    return 0 if virtual_rank is None else virtual_rank


def _weigh_batch(weight: Weight, batch: Any) -> float:
    """Calls the user's weight function on a batch.

    Raises:
        DataError: the function did not return a number that is at least 0.
    """
    value = weight(batch)
    is_tensor_of_one = isinstance(value, Tensor) and value.numel() == 1
    number: Any = float(value) if is_tensor_of_one else value

    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 0 <= number < MAX_WEIGHT:  # NaN is refused too
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
    """Replaces the planned scale of each micro-batch by the one that follows from its weight.

    The scales of a global batch depend on its weight over all ranks, which an all-reduce computes.
    So that nobody waits for it, one global batch is read ahead: global batch 0 is read, and its
    all-reduce started; global batch 1 is read; then the all-reduce of 0 is done, and the
    micro-batches of 0 are yielded.

    Args:
        read: the micro-batches, in order.
        weighing: determines the weight of a batch.
        collectives: the collectives of the run.
        epoch: number of the epoch.
        weight_before: if `read` begins in the middle of a global batch, the weight of this rank's
            earlier micro-batches of that global batch; otherwise 0.
        virtual_ranks: the virtual ranks of the run, or None.

    Raises:
        RanksDifferError: another rank is at another global batch.
    """
    pending: _PendingGlobalBatch | None = None  # its all-reduce is in progress
    for global_batch in _group_by_global_batch(read):
        # Only one all-reduce may be in progress. If a rank has left its loop, waiting for the
        # previous one raises an error; a second one would be taken for another collective.
        previous_scaled = [] if pending is None else pending.wait_for_scaled()
        pending = _PendingGlobalBatch(
            global_batch, weighing, collectives, epoch, weight_before, virtual_ranks
        )
        weight_before = 0.0  # only the first global batch may have begun before `read`
        yield from previous_scaled

        # A single process needs no all-reduce, so it does not read ahead.
        if collectives.single_process:
            yield from pending.wait_for_scaled()
            pending = None

    # The last global batch.
    if pending is not None:
        yield from pending.wait_for_scaled()


def _group_by_global_batch(read: Iterator[ReadMicroBatch]) -> Iterator[list[ReadMicroBatch]]:
    """Yields the micro-batches of each global batch as a list, once its last one has been read."""
    global_batch = []
    for planned, batch in read:
        global_batch.append((planned, batch))
        if planned.micro_batch.last:
            yield global_batch
            global_batch = []


class _SumsOverRanks(NamedTuple):
    """What the ranks have added up of one global batch."""

    weights: list[float]
    """The weight of each virtual rank's part; without virtual ranks, one weight for all."""
    ranks_with_other_rows: float
    """The number of ranks with another number of rows than samples."""
    ranks_with_unknown_rows: float
    """The number of ranks whose rows cannot be counted."""
    epochs: float
    """The sum of the epochs in which the ranks are."""
    positions: float
    """The sum of the positions of the ranks' global batches."""


class _PendingGlobalBatch:
    """A global batch whose weight is being summed up over the ranks.

    The constructor starts the all-reduce. The object keeps the micro-batches until
    `wait_for_scaled` has the result.

    Args:
        global_batch: this rank's micro-batches of the global batch.
        weighing: determines the weight of a batch.
        collectives: the collectives of the run.
        epoch: number of the epoch.
        weight_before: weight of this rank's micro-batches of the global batch that were handed out
            earlier and are not in `global_batch`.
        virtual_ranks: the virtual ranks of the run, or None.
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

        # The weight of each virtual rank's part, or, without virtual ranks, one weight for all.
        weights = [0.0] * self._num_parts
        if collectives.contributes:
            # `weight_before` is only above 0 if autotuning measures, which is refused with virtual
            # ranks. So there is only one weight.
            weights[0] = weight_before
            for counted in self._counted:
                # A repeat, which checks a device, is already counted on another rank.
                if not counted.corrected.micro_batch.is_repeat:
                    weights[_index_of_weight(counted)] += counted.weight
        has_other_rows = float(any(counted.has_other_rows for counted in self._counted))
        has_unknown_rows = float(any(counted.rows_are_unknown for counted in self._counted))

        # All of these are summed over the ranks. `_wait_for_sums` unpacks them in the same order.
        values = [*weights, has_other_rows, has_unknown_rows, self._epoch, self._position]
        self._sums = torch.tensor(values, dtype=torch.float64)
        self._work = None
        if not collectives.single_process:
            self._work = dist.all_reduce(self._sums, async_op=True)

    def wait_for_scaled(self) -> list[ReadMicroBatch]:
        """Waits for the all-reduce, and returns the micro-batches with their exact scales.

        Raises:
            RanksDifferError: another rank is at another global batch.
        """
        sums = self._wait_for_sums()
        self._check_same_global_batch(sums.epochs, sums.positions)

        row_counter = self._weighing.row_counter
        weight_function = self._weighing.weight
        if weight_function is not None or row_counter is None:
            return self._scaled(sums.weights)
        return self._scaled_by_rows(sums, row_counter)

    def _scaled_by_rows(
        self, sums: _SumsOverRanks, row_counter: RowCounter
    ) -> list[ReadMicroBatch]:
        """Returns the micro-batches with their exact scales, if each batch weighs its counted rows.

        Warns if rows cannot be counted, or are not one for each sample.
        """
        first_planned, _ = self._global_batch[0]
        global_samples = first_planned.micro_batch.global_samples
        if sums.ranks_with_unknown_rows > 0:
            row_counter.warn_of_unknown(global_samples)

        # If every rank has one row for each of its samples, the planned scales are right.
        if sums.ranks_with_other_rows == 0:
            return self._global_batch

        # On some rank the collate function left samples out, or added rows.
        row_counter.warn_of_rows(global_samples, int(sum(sums.weights)))
        return self._scaled(sums.weights)

    def _wait_for_sums(self) -> _SumsOverRanks:
        """Waits for the all-reduce and returns its result."""
        if self._work is not None:
            self._work.wait()

        # The order is that in which `__init__` has packed the values.
        *weights, other_rows, unknown_rows, epochs, positions = self._sums.tolist()
        return _SumsOverRanks(weights, other_rows, unknown_rows, epochs, positions)

    def _check_same_global_batch(self, sum_of_epochs: float, sum_of_positions: float) -> None:
        """Raises RanksDifferError if some rank is at another global batch than this one.

        Args:
            sum_of_epochs: the sum over all ranks of the number of their epoch.
            sum_of_positions: the sum over all ranks of the position of their global batch.
        """
        # If all ranks have the same number, the sum is `size` times the number of this rank.
        # Otherwise some rank differs from the mean, and that rank raises, which ends the run. With
        # the numbers 3 and 4, for example, the sum is 7, which is neither 2 * 3 nor 2 * 4.
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
        """Returns the micro-batches with the scale `w * ranks / W`; see the module's docstring.

        Args:
            weights: the weight of each virtual rank's part, summed over all ranks. Without virtual
                ranks, the list only has the weight of the whole global batch.
        """
        # If a rank has nothing to train on but another one has, its model must be called
        # nevertheless, on an empty batch (`CountedBatch.batch`). If no rank has anything, the loop
        # gets what the collate function returned, as it would on a single device.
        some_rank_has_weight = sum(weights) > 0

        scaled = []
        for counted in self._counted:
            total_weight = self._total_weight(counted, weights)
            micro_batch = self._with_scale(counted, total_weight)
            planned = counted.corrected._replace(micro_batch=micro_batch)
            batch = counted.batch if some_rank_has_weight else counted.collated
            scaled.append((planned, batch))
        return scaled

    def _total_weight(self, counted: CountedBatch, weights: list[float]) -> float:
        """Returns the weight `W` over which the mean loss of a micro-batch is taken.

        That is the weight of the global batch, or if virtual ranks train copies of the model, that
        of the virtual rank's part.
        """
        virtual_ranks = self._virtual_ranks
        trains_copies = virtual_ranks is not None and virtual_ranks.train_copies
        return weights[_index_of_weight(counted)] if trains_copies else sum_in_order(weights)

    def _with_scale(self, counted: CountedBatch, total_weight: float) -> MicroBatch:
        """Returns a micro-batch with the factor of its loss, `w * ranks / W`.

        Args:
            counted: the micro-batch, with its weight `w`.
            total_weight: `W`.
        """
        # If nothing has a weight, there is nothing to train on, and every loss counts 0.
        micro_batch = counted.corrected.micro_batch
        if total_weight == 0:
            return replace(micro_batch, scale=0.0, plain=False)

        # The gradients of the ranks are averaged: added up, and divided by their number. So each
        # loss is multiplied by that number.
        scale = counted.weight * self._num_averaged_gradients() / total_weight

        # A micro-batch that is the whole global batch has the scale 1. `plain` says that the user
        # may then call `loss.backward()`, without a factor.
        return replace(micro_batch, scale=scale, plain=self._is_one_micro_batch())

    def _num_averaged_gradients(self) -> int:
        """Returns how many gradients are averaged before the optimizer steps."""
        num_ranks = self._collectives.data_parallel.size
        if self._virtual_ranks is None:
            return num_ranks  # one gradient for each rank
        return self._virtual_ranks.num_averaged_gradients(num_ranks)

    def _is_one_micro_batch(self) -> bool:
        """Returns True if this rank alone processes the whole global batch in one micro-batch."""
        first_planned, _ = self._global_batch[0]
        first = first_planned.micro_batch
        is_only_micro_batch = len(self._global_batch) == 1 and first.first
        is_only_rank = self._collectives.data_parallel.size == 1
        return is_only_rank and is_only_micro_batch and first.virtual_rank is None
