"""Checks that every planned sample is trained on once, and that each epoch has another order.

A *pass* is one loop over a loader. It follows a *plan*, the list of the global batches of an epoch.
A *tally* of samples consists of their number and of a *checksum* of their indices, which does not
depend on their order. The tallies of what each rank was handed must add up to the tally of the
plan. The ranks compare in the optimizer step after the end of a pass, when they synchronize anyway:
after each of the first two passes, and then after every 1000 global batches.
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
"""With this many samples, the same random order twice is less likely than one in a million."""
_NO_SAMPLES = np.empty(0, np.int64)
_MODULUS = 2**64


@dataclass
class _Tally:
    """The number of some samples, and the checksum of their indices."""

    count: int = 0
    checksum: int = 0

    def add(self, other: _Tally) -> None:
        """Adds the samples of another tally."""
        self.count += other.count
        self.checksum = (self.checksum + other.checksum) % _MODULUS


def tally(samples: Indices) -> _Tally:
    """Returns the tally of some samples."""
    return _Tally(len(samples), checksum(samples))


def checksum(samples: Indices) -> int:
    """Returns a 64-bit checksum of indices that does not depend on their order.

    It is the sum of a hash of each index. A sum of the indices themselves, or of their squares,
    would be the same for many different sets of samples.
    """
    # Like SplitMix64, the hash multiplies by odd constants and mixes high bits into low ones. NumPy
    # computes products and sums of unsigned integers modulo 2**64.
    words = samples.astype(np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(32)
    words *= np.uint64(0xD6E8FEB86659FD93)
    words ^= words >> np.uint64(29)
    return int(words.sum())


class _OpenPass:
    """A pass in progress. Its samples are collected, and tallied some thousands at a time.

    Args:
        epoch: number of the epoch.
        start: position of the first global batch of the pass.
        plan: the global batches of the epoch.
    """

    def __init__(self, epoch: int, start: int, plan: Plan) -> None:
        self.epoch = epoch
        self.start = start
        self.plan = plan
        self.next_position = start
        """The position of the global batch that should come next."""
        self.crc_of_order = 0
        """A CRC-32 of the planned samples, which depends on their order."""
        self.planned_so_far = _Tally()
        """The tally of the planned samples, over all ranks, of the global batches that came."""
        self.delivered = _Tally()
        """The tally of the samples that this rank was handed."""
        self._planned_samples: list[Indices] = []
        """Planned samples that have not been tallied yet."""
        self._delivered_samples: list[Indices] = []
        """Samples that this rank was handed and that have not been tallied yet."""
        self._num_untallied = 0
        """The number of planned samples that have not been tallied yet. If there are many, `add`
        tallies them, and the delivered ones with them."""

    def add(
        self, position: int, samples: Indices, micro_batch: MicroBatch, global_batch: Indices
    ) -> None:
        """Adds a micro-batch that this rank was handed.

        Args:
            position: position of its global batch in the epoch.
            samples: the indices of this rank's samples in the micro-batch, shape `(n,)`.
            micro_batch: the micro-batch.
            global_batch: the indices of all samples of its global batch. They are added to the
                planned samples with the last micro-batch.
        """
        self._delivered_samples.append(samples)

        # The planned samples of a global batch are added once, with its last micro-batch.
        if not micro_batch.last:
            return

        # If a global batch comes twice or is skipped, `next_position` stays as it is, so no planned
        # samples are added from then on. The comparison of the ranks detects that: if the positions
        # 0 and 2 come, the samples of both were delivered, but only those of 0 count as planned.
        if position != self.next_position:
            return

        self._planned_samples.append(global_batch)
        self.next_position += 1
        self._num_untallied += len(global_batch)
        if self._num_untallied >= SAMPLES_TALLIED_AT_ONCE:
            self.tally_samples()

    def planned_tally(self) -> _Tally:
        """Returns the planned samples of the pass, to compare them with the delivered ones.

        The number is that of the whole plan. The checksum covers only the global batches that came,
        so it cannot show that one never came; the number does.
        """
        num_planned = self.plan.num_samples_from(self.start)
        return _Tally(num_planned, self.planned_so_far.checksum)

    def tally_samples(self) -> None:
        """Adds the collected samples to the tallies and drops them."""
        # np.concatenate needs at least one array.
        planned = np.concatenate([_NO_SAMPLES, *self._planned_samples])
        delivered = np.concatenate([_NO_SAMPLES, *self._delivered_samples])
        self.planned_so_far.add(tally(planned))
        self.delivered.add(tally(delivered))
        # This continues the CRC-32 of all samples that were planned before.
        self.crc_of_order = zlib.crc32(planned.data, self.crc_of_order)

        self._planned_samples = []
        self._delivered_samples = []
        self._num_untallied = 0


class Coverage:
    """Keeps track of the samples that one loader has handed out on this rank.

    Args:
        sampler: the user's own sampler, or None.
        batch_sampler: the user's own batch sampler, or None. If both are None, Lockstep chooses the
            order of the samples.
    """

    def __init__(
        self, sampler: Sampler[int] | None, batch_sampler: Sampler[list[int]] | None
    ) -> None:
        custom_order = sampler if batch_sampler is None else batch_sampler
        # A list of indices as a sampler, and a SequentialSampler, are meant to repeat their order.
        is_meant_to_repeat = (
            hasattr(custom_order, "__getitem__") or type(custom_order) is SequentialSampler
        )
        self._compares_orders = custom_order is not None and not is_meant_to_repeat
        """True to compare the order of each epoch with that of the epoch before, until the first
        repetition."""
        self._planned = _Tally()
        """The tally of the planned samples in all passes that have not been compared yet."""
        self._delivered = _Tally()
        """The tally of the samples that this rank was handed in these passes."""
        self._open_pass: _OpenPass | None = None
        """The latest pass. If it began inside another pass, the outer one is not compared."""
        self._crc_of_all_orders = 0
        """A CRC-32 of the orders in these passes."""
        self._last_epoch_and_crc: tuple[int, int] | None = None
        """The epoch of the last pass with a custom order, and the CRC-32 of that order."""
        self._num_passes = 0
        self._steps_since_comparison = 0
        self._comparison_is_due = False

    def begin(self, epoch: int, start: int, plan: Plan) -> None:
        """Records the start of a training pass, and warns if it repeats the last epoch's order.

        Args:
            epoch: number of the epoch.
            start: position of the first global batch of the pass, which is above 0 in a resumed
                epoch.
            plan: the global batches of the epoch.
        """
        self._open_pass = _OpenPass(epoch, start, plan)

        # Lockstep's own order differs in every epoch. Only that of the user's sampler, which is a
        # `CustomPlan`, can repeat.
        if self._compares_orders and isinstance(plan, CustomPlan):
            repeats_previous_epoch = self._last_epoch_and_crc == (epoch - 1, plan.crc_of_order)
            if repeats_previous_epoch:
                self._compares_orders = False
                self._warn_of_repetition(epoch, plan.order)
            self._last_epoch_and_crc = (epoch, plan.crc_of_order)

    def add(
        self,
        epoch: int,
        position: int,
        samples: Indices,
        micro_batch: MicroBatch,
        global_batch: Indices | None,
    ) -> None:
        """Adds a micro-batch that this rank is handed. Those of streams are ignored.

        Args:
            epoch: number of the epoch.
            position: position of its global batch in the epoch.
            samples: the indices of this rank's samples in the micro-batch, shape `(n,)`.
            micro_batch: the micro-batch.
            global_batch: the indices of all samples of its global batch; None for a stream.
        """
        if global_batch is None:
            return

        open_pass = self._pass_of_epoch(epoch)
        # A pass is no longer checked when another one has begun inside of it.
        if open_pass is None:
            return

        open_pass.add(position, samples, micro_batch, global_batch)
        if micro_batch.last and position == len(open_pass.plan) - 1:
            self._end(open_pass)

    def _pass_of_epoch(self, epoch: int) -> _OpenPass | None:
        """Returns the open pass if it reads this epoch, and None for a pass that is not checked.

        Only the pass that began last is checked. In `for a in loader: for b in loader: ...` the
        outer pass reads epoch 0. The first inner pass reads epoch 1, and from its beginning on the
        batches of the outer one are not checked.
        """
        open_pass = self._open_pass
        if open_pass is None or open_pass.epoch != epoch:
            return None
        return open_pass

    def _end(self, ended_pass: _OpenPass) -> None:
        """Adds a completed pass to those that will be compared.

        It also decides whether `compare_if_due` compares in the next optimizer step.
        """
        self._open_pass = None
        ended_pass.tally_samples()
        self._planned.add(ended_pass.planned_tally())
        self._delivered.add(ended_pass.delivered)

        self._add_order(ended_pass.crc_of_order)
        self._num_passes += 1
        # A pass of a resumed epoch has fewer steps than the epoch.
        self._steps_since_comparison += len(ended_pass.plan) - ended_pass.start
        is_among_first_passes = self._num_passes <= NUM_FIRST_PASSES_COMPARED
        has_many_steps = self._steps_since_comparison >= STEPS_BETWEEN_COMPARISONS
        self._comparison_is_due = is_among_first_passes or has_many_steps

    def _add_order(self, crc_of_order: int) -> None:
        """Adds the order of a pass to the checksum of all passes since the last comparison."""
        bytes_of_crc = crc_of_order.to_bytes(4, "little")
        self._crc_of_all_orders = zlib.crc32(bytes_of_crc, self._crc_of_all_orders)

    def compare_if_due(self, collectives: Collectives) -> None:
        """Compares the tallies with those of the other ranks, if a comparison is due.

        It is called in every optimizer step. A comparison becomes due on all ranks in the same
        step.

        Args:
            collectives: the collectives of the run.

        Raises:
            RanksDifferError: the ranks have read the samples in different orders.
            DataError: together the ranks were not handed exactly the planned samples.
        """
        if not self._comparison_is_due:
            return

        planned = self._planned
        delivered = self._delivered
        crc_of_all_orders = self._crc_of_all_orders
        self._forget_compared_passes()  # makes new tallies; those above stay as they are

        # The order of the samples and the plan must be equal on all ranks. What was delivered is
        # another part of the plan on each rank.
        must_be_equal = [crc_of_all_orders, planned.count, planned.checksum]
        reports = collectives.exchange((must_be_equal, astuple(delivered)))
        parts_that_must_be_equal = [report[0] for report in reports]
        delivered_on_ranks = [_Tally(*report[1]) for report in reports]
        _check_same_orders(parts_that_must_be_equal)

        # All stages of a pipeline get the same samples, so only the ranks of the first stage are
        # added up. These come first.
        delivered_to_all = _Tally()
        for delivered_on_rank in delivered_on_ranks[: collectives.num_contributing_ranks]:
            delivered_to_all.add(delivered_on_rank)
        if delivered_to_all == planned:
            return

        num_delivered = delivered_to_all.count
        num_planned = planned.count
        found = f"all ranks together got {num_delivered} samples, the plan has {num_planned}"
        if num_delivered == num_planned:
            found = (
                f"all ranks together got {num_delivered} samples, as many as the plan has: some "
                "came twice, and others not at all"
            )
        raise DataError(
            "every sample of an epoch's plan once",
            found,
            "give every rank's loader the same shares and micro_batch_size, and do not change "
            "its sampler while a pass is running",
            # LS102: samples were left out. LS101: samples came more than once.
            code="LS102" if num_delivered < num_planned else "LS101",
        )

    def _forget_compared_passes(self) -> None:
        """Sets the tallies back to 0, for the passes of the next comparison."""
        self._planned = _Tally()
        self._delivered = _Tally()
        self._crc_of_all_orders = 0
        self._comparison_is_due = False
        self._steps_since_comparison = 0

    def _warn_of_repetition(self, epoch: int, order: Indices) -> None:
        """Warns that a sampler has returned the same random order as in the previous epoch.

        Args:
            epoch: number of the epoch whose order is that of the previous one.
            order: the indices of its samples.
        """
        # An ascending order (or one with a single sample) is not random, so it is meant to repeat.
        is_ascending = bool((order[:-1] <= order[1:]).all())
        if is_ascending:
            return
        if len(np.unique(order)) < MIN_DISTINCT_SAMPLES:  # it may repeat by chance
            return

        warn(
            "a sampler of your own",
            found=f"epoch {epoch} has the same order of samples as epoch {epoch - 1}",
            do="let it draw from torch.randperm or from a generator that it keeps, or tell it the "
            "epoch (set_epoch); shuffle=True of the DataLoader needs no sampler",
            code="LS103",
        )


def _check_same_orders(plans_of_ranks: list[list[int]]) -> None:
    """Raises RanksDifferError if ranks have planned other samples, or in different orders.

    Args:
        plans_of_ranks: for each rank a list of three numbers: the checksum of its order, the number
            of planned samples, and the checksum of these samples.
    """
    if all(plan == plans_of_ranks[0] for plan in plans_of_ranks):
        return

    # The message shows the checksum of the order, which also differs if the samples do.
    shown = [f"rank {rank}: order {plan[0]:08x}" for rank, plan in enumerate(plans_of_ranks)]
    raise RanksDifferError(
        "a sampler that gives every rank the same order",
        ", ".join(shown),
        "seed it alike on all ranks and do not let it look at the rank or the clock; each rank "
        "gets its part of the global batch from the loader",
        code="LS105",
    )
