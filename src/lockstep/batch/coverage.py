"""Was every sample of the plan trained once, and is it another order every epoch?

Samples are counted, not stored: how many were delivered, and a sum over their indices that does not
depend on the order and takes no sample for another. What was delivered to all ranks together must
be what the plan has. The ranks compare in the optimizer step that follows the end of a pass, where
they are together: after the first two passes, and then whenever 1000 more global batches are done.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler, SequentialSampler

from lockstep.batch.plan import CustomPlan, Indices, Plan
from lockstep.distributed.collectives import Collectives
from lockstep.errors import DataError, RanksDifferError, warn
from lockstep.session.micro_batch import MicroBatch

_FIRST_PASSES = 2
_STEPS = 1000
_AT_ONCE = 2**14
"""Samples that are added up at a time."""
_NONE = np.empty(0, np.int64)
_BY_CHANCE = 10
"""Distinct samples from which on a random order comes twice in less than one of a million cases."""


class _OpenPass:
    """A pass that goes on. Indices are added up some thousands at a time, and let go of."""

    def __init__(self, epoch: int, start: int, plan: Plan) -> None:
        self.epoch, self.start, self.plan = epoch, start, plan
        self.next = start
        """The global batch of the plan that comes next."""
        self.order = 0
        """A CRC-32 over the plan's samples, in their order."""
        self.tallies = np.zeros((2, 2), np.uint64)
        """Planned and delivered: how many samples, and their checksum."""
        self._waiting: tuple[list[Indices], list[Indices]] = ([], [])
        self._count = 0

    def add(self, position: int, samples: Indices, micro: MicroBatch, whole: Indices) -> None:
        """What this rank gets of a micro-batch, and the whole global batch."""
        planned, delivered = self._waiting
        delivered.append(samples)
        if micro.last and position == self.next:
            planned.append(whole)
            self.next += 1
            self._count += len(whole)
            if self._count >= _AT_ONCE:
                self.count()

    def count(self) -> None:
        """Adds up what waits."""
        planned, delivered = (np.concatenate([_NONE, *some]) for some in self._waiting)
        self.tallies += [_tally(planned), _tally(delivered)]
        self.order = zlib.crc32(planned.data, self.order)
        self._waiting, self._count = ([], []), 0


class Coverage:
    """What one loader has delivered on this rank.

    Args:
        sampler, batch_sampler: the user's own; None, both: the order is Lockstep's.
    """

    def __init__(
        self, sampler: Sampler[int] | None, batch_sampler: Sampler[list[int]] | None
    ) -> None:
        order = sampler if batch_sampler is None else batch_sampler
        self._may_repeat = (  # an order written down is meant
            order is None or hasattr(order, "__getitem__") or type(order) is SequentialSampler
        )
        self._tallies = np.zeros((2, 2), np.uint64)
        """Of what the passes had that are not compared yet: planned, and delivered here."""
        self._open: _OpenPass | None = None
        """The latest pass; one around it is not compared."""
        self._orders = 0
        """A CRC-32 over the orders of all passes that count."""
        self._last: tuple[int, int] | None = None
        """The epoch of the last pass, and the CRC-32 of its order."""
        self._passes = self._steps = 0
        self._due = False

    def begin(self, epoch: int, start: int, plan: Plan) -> None:
        """A pass that trains begins, at a global batch of its plan."""
        self._open = _OpenPass(epoch, start, plan)
        if not self._may_repeat and isinstance(plan, CustomPlan):
            now = epoch, zlib.crc32(np.ascontiguousarray(plan.order).data)
            if self._last is not None and now == (self._last[0] + 1, self._last[1]):
                self._warn_of_repetition(epoch, plan.order)
            self._last = now

    def add(
        self,
        epoch: int,
        position: int,
        samples: Indices,
        micro: MicroBatch,
        whole: Indices | None,
    ) -> None:
        """A micro-batch of a pass is delivered on this rank.

        Args:
            epoch: of the pass.
            position: its global batch, of the epoch.
            samples: this rank's of it, shape `(n,)`.
            micro: the micro-batch.
            whole: the samples of its global batch on all ranks; None: of a stream.
        """
        found = self._open
        if found is not None and whole is not None and found.epoch == epoch:
            found.add(position, samples, micro, whole)
            if micro.last and position == len(found.plan) - 1:
                self._end(found)

    def settle(self, collectives: Collectives) -> None:
        """Compares with the other ranks where that is due; on all ranks in the same step.

        Args:
            collectives: of the run.

        Raises:
            RanksDifferError: the ranks went through different orders.
            DataError: together they did not get what the plan has.
        """
        if not self._due:
            return
        self._due, self._steps = False, 0
        mine = [self._orders, *self._tallies.flatten().tolist()]
        self._orders = 0
        self._tallies[:] = 0
        rows = collectives.exchange(mine)
        _check_orders(rows)
        delivered = [row[3:5] for row in rows[: collectives.data_parallel.size]]
        together, planned = np.array(delivered, np.uint64).sum(axis=0).tolist(), mine[1:3]
        if together != planned:
            same = together[0] == planned[0]
            raise DataError(
                "every sample of an epoch's plan once",
                f"all ranks together got {together[0]} samples, the plan has {planned[0]}"
                + (": some came twice, and others not at all" if same else ""),
                "give every rank's loader the same shares and micro_batch_size, and do not change "
                "its sampler while a pass is running",
                code="LS102" if together[0] < planned[0] else "LS101",
            )

    def _end(self, done: _OpenPass) -> None:
        self._open = None
        done.count()
        done.tallies[0, 0] = done.plan.left(done.start)  # whatever was handed out
        self._tallies += done.tallies
        self._orders = zlib.crc32(done.order.to_bytes(4, "little"), self._orders)
        self._passes += 1
        self._steps += len(done.plan) - done.start
        self._due = self._passes <= _FIRST_PASSES or self._steps >= _STEPS

    def _warn_of_repetition(self, epoch: int, order: Indices) -> None:
        self._may_repeat = True  # it is said once
        if bool((order[:-1] <= order[1:]).all()) or len(np.unique(order)) < _BY_CHANCE:
            return
        warn(
            "a sampler of your own",
            f"epoch {epoch} has the same order of samples as epoch {epoch - 1}",
            "let it draw from torch.randperm or from a generator that it keeps, or tell it the "
            "epoch (set_epoch); shuffle=True of the DataLoader needs no sampler",
            code="LS103",
        )


def _tally(samples: Indices) -> npt.NDArray[np.uint64]:
    """How many they are, and their checksum; tallies add up."""
    return np.array([len(samples), checksum(samples)], np.uint64)


def checksum(samples: Indices) -> int:
    """A 64-bit sum over scrambled indices, which is the same in any order.

    Sums of the indices themselves, and of their squares, agree for many different samples.
    """
    words = samples.astype(np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(32)
    words *= np.uint64(0xD6E8FEB86659FD93)
    words ^= words >> np.uint64(29)
    return int(words.sum())


def _check_orders(rows: list[list[int]]) -> None:
    orders = [row[:3] for row in rows]
    if any(order != orders[0] for order in orders):
        raise RanksDifferError(
            "a sampler that gives every rank the same order",
            ", ".join(f"rank {rank}: order {row[0]:08x}" for rank, row in enumerate(orders)),
            "seed it alike on all ranks and do not let it look at the rank or the clock; each rank "
            "gets its part of the global batch from the loader",
            code="LS105",
        )
