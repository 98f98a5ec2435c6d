"""Was every sample of the plan trained once, and is the order another one in every epoch?

A *pass* is one loop over a loader, which follows a *plan*: the global batches of an epoch. Samples
are counted, not stored: a *tally* has how many there were, and a *checksum* over their indices,
which does not depend on the order. What all ranks together were handed must be what the plan has.
The ranks compare in the optimizer step that follows the end of a pass, when they are together:
after the first two passes, and then whenever 1000 more global batches are done.
"""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass

import numpy as np
from torch.utils.data import Sampler, SequentialSampler

from lockstep.batch.indices import Indices
from lockstep.batch.plan import CustomPlan, Plan
from lockstep.distributed.collectives import Collectives
from lockstep.errors import DataError, RanksDifferError, warn
from lockstep.session.micro_batch import MicroBatch

NUM_FIRST_PASSES_COMPARED = 2
STEPS_BETWEEN_COMPARISONS = 1000
SAMPLES_TALLIED_AT_ONCE = 2**14
MIN_DISTINCT_SAMPLES = 10
"""So many samples come in the same random order twice in less than one of a million cases."""
_NO_SAMPLES = np.empty(0, np.int64)
_MODULUS = 2**64


@dataclass
class _Tally:
    """How many samples there were, and their checksum."""

    count: int = 0
    checksum: int = 0

    def add(self, other: _Tally) -> None:
        """Adds what another tally has counted."""
        self.count += other.count
        self.checksum = (self.checksum + other.checksum) % _MODULUS


def tally(samples: Indices) -> _Tally:
    """Returns the tally of some samples."""
    return _Tally(len(samples), checksum(samples))


def checksum(samples: Indices) -> int:
    """Returns a 64-bit sum over hashed indices, which is the same in any order.

    Each index is hashed first, because sums of the indices themselves, and of their squares, agree
    for many different samples.
    """
    # The hash multiplies by odd constants and mixes high bits into low ones (as SplitMix64 does).
    # Products and the sum are taken modulo 2**64: arrays of unsigned integers wrap around.
    words = samples.astype(np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(32)
    words *= np.uint64(0xD6E8FEB86659FD93)
    words ^= words >> np.uint64(29)
    return int(words.sum())


class _OpenPass:
    """A pass that is under way. Its samples are tallied some thousands at a time.

    Args:
        epoch: of the pass.
        start: the position of its first global batch.
        plan: the global batches of the epoch.
    """

    def __init__(self, epoch: int, start: int, plan: Plan) -> None:
        self.epoch = epoch
        self.start = start
        self.plan = plan
        self.next_position = start
        """The position of the global batch that comes next."""
        self.order_checksum = 0
        """A CRC-32 over the planned samples, in their order."""
        self.planned = _Tally()
        """The tally of the global batches, over all ranks."""
        self.delivered = _Tally()
        """The tally of the samples that this rank was handed."""
        self._planned_samples: list[Indices] = []
        """Samples that are not tallied yet."""
        self._delivered_samples: list[Indices] = []
        self._num_planned_samples = 0

    def add(
        self, position: int, samples: Indices, micro_batch: MicroBatch, global_batch: Indices
    ) -> None:
        """Adds what this rank was handed of a micro-batch.

        Args:
            position: of its global batch in the epoch.
            samples: the indices of this rank's samples of it, shape `(n,)`.
            micro_batch: the micro-batch.
            global_batch: the indices of all samples of its global batch, which are added once: with
                the last micro-batch.
        """
        self._delivered_samples.append(samples)
        # A global batch that comes a second time or out of order is delivered, but is not planned
        # again: the comparison with the other ranks then finds the difference.
        if micro_batch.last and position == self.next_position:
            self._planned_samples.append(global_batch)
            self.next_position += 1
            self._num_planned_samples += len(global_batch)
            if self._num_planned_samples >= SAMPLES_TALLIED_AT_ONCE:
                self.tally_samples()

    def tally_samples(self) -> None:
        """Adds the samples that came since the last time to the tallies, and forgets them."""
        # `concatenate` needs at least one array, so an empty one comes first.
        planned = np.concatenate([_NO_SAMPLES, *self._planned_samples])
        delivered = np.concatenate([_NO_SAMPLES, *self._delivered_samples])
        self.planned.add(tally(planned))
        self.delivered.add(tally(delivered))
        self.order_checksum = zlib.crc32(planned.data, self.order_checksum)
        self._planned_samples = []
        self._delivered_samples = []
        self._num_planned_samples = 0


class Coverage:
    """What one loader has handed out on this rank.

    Args:
        sampler, batch_sampler: the user's own. If both are None, the order is Lockstep's.
    """

    def __init__(
        self, sampler: Sampler[int] | None, batch_sampler: Sampler[list[int]] | None
    ) -> None:
        custom_order = sampler if batch_sampler is None else batch_sampler
        # A sequence of indices, and the dataset's order, are meant to be the same in every epoch.
        self._may_repeat = (
            custom_order is None
            or hasattr(custom_order, "__getitem__")
            or type(custom_order) is SequentialSampler
        )
        self._planned = _Tally()
        """The tally of the passes that were not compared yet, over all ranks."""
        self._delivered = _Tally()
        """The tally of what this rank was handed in these passes."""
        self._open_pass: _OpenPass | None = None
        """The latest pass. If it began inside another one, that one is not compared."""
        self._orders_checksum = 0
        """A CRC-32 over the orders of the passes that were not compared yet."""
        self._last_order: tuple[int, int] | None = None
        """The epoch of the last pass in a custom order, and the CRC-32 of its order."""
        self._num_passes = 0
        self._steps_since_comparison = 0
        self._comparison_is_due = False

    def begin(self, epoch: int, start: int, plan: Plan) -> None:
        """Notes that a pass that trains begins, and warns if its order is that of the last epoch.

        Args:
            epoch: of the pass.
            start: the position in the epoch of the first global batch that is trained on; more than
                0 if training is resumed inside of the epoch.
            plan: the global batches of the epoch.
        """
        self._open_pass = _OpenPass(epoch, start, plan)
        if not self._may_repeat and isinstance(plan, CustomPlan):
            order_checksum = zlib.crc32(np.ascontiguousarray(plan.order).data)
            if self._last_order == (epoch - 1, order_checksum):
                self._warn_of_repetition(epoch, plan.order)
            self._last_order = (epoch, order_checksum)

    def add(
        self,
        epoch: int,
        position: int,
        samples: Indices,
        micro_batch: MicroBatch,
        global_batch: Indices | None,
    ) -> None:
        """Adds a micro-batch that this rank is handed. Those of streams are not counted.

        Args:
            epoch: of the pass.
            position: of its global batch in the epoch.
            samples: the indices of this rank's samples of it, shape `(n,)`.
            micro_batch: the micro-batch.
            global_batch: the indices of all samples of its global batch; None for a stream.
        """
        if global_batch is None:
            return
        # Another pass over the same loader may have begun inside this one. Then only the inner pass
        # is counted. While it is open, `_open_pass` has its epoch, and after its end it is None.
        open_pass = self._open_pass
        if open_pass is None or open_pass.epoch != epoch:
            return
        open_pass.add(position, samples, micro_batch, global_batch)
        if micro_batch.last and position == len(open_pass.plan) - 1:
            self._end(open_pass)

    def _end(self, ended_pass: _OpenPass) -> None:
        """Adds a pass that has come to its end to what will be compared.

        Sets `_comparison_is_due`, which `settle` reads in the optimizer step that follows.
        """
        self._open_pass = None
        ended_pass.tally_samples()
        # The tally has only the global batches that came. With the number of samples of the plan
        # in it, the comparison shows if one was left out.
        ended_pass.planned.count = ended_pass.plan.num_samples_from(ended_pass.start)
        self._planned.add(ended_pass.planned)
        self._delivered.add(ended_pass.delivered)
        # One checksum over the orders of all passes that are compared together.
        order_checksum = ended_pass.order_checksum.to_bytes(4, "little")
        self._orders_checksum = zlib.crc32(order_checksum, self._orders_checksum)
        self._num_passes += 1
        self._steps_since_comparison += len(ended_pass.plan) - ended_pass.start
        is_first_pass = self._num_passes <= NUM_FIRST_PASSES_COMPARED
        is_late = self._steps_since_comparison >= STEPS_BETWEEN_COMPARISONS
        self._comparison_is_due = is_first_pass or is_late

    def settle(self, collectives: Collectives) -> None:
        """Compares with the other ranks if that is due, which it is on all ranks in the same step.

        Args:
            collectives: of the run.

        Raises:
            RanksDifferError: the ranks went through different orders.
            DataError: together they did not get what the plan has.
        """
        if not self._comparison_is_due:
            return
        planned = self._planned
        delivered = self._delivered
        order = [self._orders_checksum, planned.count, planned.checksum]
        self._forget_compared_passes()
        # From each rank a pair: its order, and the two numbers of the tally of what it was handed.
        reports = collectives.exchange((order, astuple(delivered)))
        _check_same_orders([order_on_rank for order_on_rank, _ in reports])
        # The stages of a pipeline get the same samples. Only the first ranks count; the ranks
        # behind them are further stages.
        delivered_to_all = _Tally()
        for _, (count_on_rank, checksum_on_rank) in reports[: collectives.num_contributing_ranks]:
            delivered_to_all.add(_Tally(count_on_rank, checksum_on_rank))
        if delivered_to_all == planned:
            return
        found = f"all ranks together got {delivered_to_all.count} samples, "
        found += f"the plan has {planned.count}"
        if delivered_to_all.count == planned.count:
            found += ": some came twice, and others not at all"
        raise DataError(
            "every sample of an epoch's plan once",
            found,
            "give every rank's loader the same shares and micro_batch_size, and do not change "
            "its sampler while a pass is running",
            code="LS102" if delivered_to_all.count < planned.count else "LS101",
        )

    def _forget_compared_passes(self) -> None:
        """Begins to count anew for the next comparison."""
        self._planned = _Tally()
        self._delivered = _Tally()
        self._orders_checksum = 0
        self._comparison_is_due = False
        self._steps_since_comparison = 0

    def _warn_of_repetition(self, epoch: int, order: Indices) -> None:
        """Warns that a random order is the same as in the epoch before.

        It is called once, since it sets `_may_repeat`, after which orders are not compared again.

        Args:
            epoch: that has the same order.
            order: the indices of its samples.
        """
        self._may_repeat = True
        is_sorted = bool((order[:-1] <= order[1:]).all())
        if is_sorted:  # the same order is meant
            return
        if len(np.unique(order)) < MIN_DISTINCT_SAMPLES:  # it may be the same by chance
            return
        warn(
            "a sampler of your own",
            f"epoch {epoch} has the same order of samples as epoch {epoch - 1}",
            "let it draw from torch.randperm or from a generator that it keeps, or tell it the "
            "epoch (set_epoch); shuffle=True of the DataLoader needs no sampler",
            code="LS103",
        )


def _check_same_orders(orders: list[list[int]]) -> None:
    """Raises RanksDifferError if ranks went through different orders.

    Args:
        orders: for each rank `[checksum of its orders, number of planned samples, checksum of
            these samples]`.
    """
    if all(order == orders[0] for order in orders):
        return
    shown = [f"rank {rank}: order {order[0]:08x}" for rank, order in enumerate(orders)]
    raise RanksDifferError(
        "a sampler that gives every rank the same order",
        ", ".join(shown),
        "seed it alike on all ranks and do not let it look at the rank or the clock; each rank "
        "gets its part of the global batch from the loader",
        code="LS105",
    )
