"""Divides each global batch into micro-batches, and computes the factor of each one's loss.

A *global batch* holds the samples of one optimizer step over all ranks; its *position* is its
number in the epoch. Each rank processes its part in one or more *micro-batches*. With virtual
ranks, the global batch is first cut into a fixed number of parts, one for each *virtual rank*; a
rank then processes the parts of one or more virtual ranks (`session.micro_batch`).

DDP averages gradients over the ranks, and successive backward passes of a rank add up. So if the
loss is a mean over the `n` samples of a micro-batch, it must be multiplied by the *scale*
`n * ranks / N` to give the mean over the `N` samples of the global batch.

With `check_devices`, some virtual ranks of some global batches are *repeated*: a second rank
computes the same samples, and the two ranks compare their results, which must be equal (`repeats`).

Autotuning cuts a global batch into two *segments*: one micro-batch, during which the devices are
measured, and the rest, which is divided according to the result.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lockstep.batch.autotune_request import AutotuneRequest
from lockstep.batch.indices import Indices, ceil_div
from lockstep.batch.plan import (
    Plan,
    VirtualRankPiece,
    micro_batches_needed,
    part_sizes,
    split_batch,
    split_over_virtual_ranks,
    split_sizes,
)
from lockstep.batch.repeats import RankPiece, add_repeats, pieces_of_virtual_rank
from lockstep.batch.shares import first_micro_batch
from lockstep.errors import DataError, SettingError
from lockstep.machine.topology import DataParallelRank
from lockstep.session.micro_batch import MicroBatch, VirtualRank, VirtualRanks


class PlannedMicroBatch(NamedTuple):
    """A micro-batch of this rank whose samples have not been read yet."""

    position: int
    """The number of its global batch in the epoch."""
    micro_batch: MicroBatch
    indices: Indices
    """The indices of its samples in the dataset."""
    all_ranks_have_samples: bool
    """True if every rank has samples in this micro-batch."""
    global_batch: Indices | None = None
    """The indices of all samples of the global batch; None for a stream."""
    compare_devices_before: bool = False
    """True if the ranks compare the results of their devices before this micro-batch starts. By
    then each repeated virtual rank has been computed by both of its ranks."""

    def with_scale(self, scale: float) -> PlannedMicroBatch:
        """Returns the same micro-batch with another factor of its loss."""
        return self._replace(micro_batch=replace(self.micro_batch, scale=scale))


ReadMicroBatch = tuple[PlannedMicroBatch, Any]
"""A planned micro-batch, and the batch that was read for it."""


class Segment(NamedTuple):
    """Micro-batches that are planned and read together, before the next segment is planned."""

    micro_batches: Iterable[PlannedMicroBatch]
    rest_of_global_batch: Sequence[PlannedMicroBatch] = ()
    """If autotuning measures on `micro_batches`, which is then the first part of a global batch:
    the other micro-batches of that global batch. They are planned again in the next segment, as
    the measurement may change how they are divided."""


class _MicroBatchTemplate(NamedTuple):
    """A micro-batch of this rank in every global batch that has a certain number of samples.

    All global batches of the same size are divided alike. So each size is divided once, and the
    result is applied to each global batch of that size (`_planned`).
    """

    micro_batch: MicroBatch
    samples: slice
    """The positions of its samples within the global batch."""
    all_ranks_have_samples: bool
    """True if every rank has samples in this micro-batch."""
    compare_devices_before: bool = False
    """True if the ranks compare the results of their devices before this micro-batch starts."""


@dataclass(kw_only=True)
class MicroBatchPlan:
    """Divides the global batches of a loader."""

    batch_size: int
    """Number of samples in a full global batch."""
    sizes_vary: bool
    """True if global batches may have any size, as those of a user's batch sampler. Then the number
    of micro-batches of each follows from its own size."""
    data_parallel: DataParallelRank
    """This rank among the ranks that process parts of a global batch."""
    initial_shares: tuple[int, ...]
    """The shares of the ranks, which hold until autotuning has measured others."""
    initial_micro_batch_size: int | None = None
    """The micro-batch size, which holds until autotuning has measured another one."""
    min_micro_batches: int = 1
    """The minimum number of micro-batches in a global batch."""
    virtual_ranks: VirtualRanks | None = None
    """The virtual ranks of the run, which share every global batch equally; None without them."""
    check_devices: int | None = None
    """After how many global batches the devices are checked; None if they are never checked."""
    autotune_request: AutotuneRequest
    """What autotuning has to measure in the first training pass."""

    def __post_init__(self) -> None:
        self._num_micro_batches(self.batch_size)  # raises SettingError if the size is impossible

        virtual_ranks = self.virtual_ranks
        if virtual_ranks is None or not virtual_ranks.train_copies:
            return
        if len(set(self.initial_shares)) > 1:
            raise SettingError(
                f"shares {':'.join(map(str, self.initial_shares))} for "
                f"{virtual_ranks.count} replicas",
                "each of them trains on an equal part of the global batch, wherever it is computed",
                "leave shares out",
            )

    @property
    def shares(self) -> tuple[int, ...]:
        """How a global batch is divided over the ranks: rank r gets `shares[r] / sum(shares)`."""
        measured_shares = self.autotune_request.result.shares
        if self.autotune_request.wants_shares and measured_shares is not None:
            return measured_shares
        return self.initial_shares

    @property
    def micro_batch_size(self) -> int | None:
        """The largest number of samples that a rank processes at once; None if not limited."""
        result = self.autotune_request.result
        if self.autotune_request.wants_micro_batch_size and result.micro_batch_size_is_known:
            return result.micro_batch_size
        return self.initial_micro_batch_size

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches in a full global batch."""
        return len(self.split(self.batch_size))

    def split(self, count: int) -> Indices:
        """Divides a global batch into micro-batches, and each micro-batch over the ranks.

        For 8 samples, 2 ranks and 2 micro-batches the result is
        `[[[0, 2], [2, 4]], [[4, 6], [6, 8]]]`.

        Args:
            count: number of samples in the global batch.

        Returns:
            The first sample of each part, and the one after its last, as an array of shape
            `(micro-batches, ranks, 2)`.
        """
        return split_batch(count, self.shares, self.micro_batches_of(count), self.virtual_ranks)

    def micro_batches_of(self, count: int) -> int:
        """Returns the number of micro-batches into which a global batch is divided.

        With virtual ranks, it is the number for each virtual rank's part of the global batch.

        Args:
            count: number of samples in the global batch.
        """
        # The user's batch sampler makes global batches of any size.
        if self.sizes_vary:
            return self._num_micro_batches(count)

        # Otherwise all global batches are full except the last one, which may be short. If a full
        # one of 32 samples has 4 micro-batches of 8, a short one of 10 samples has 2 of 5, which
        # are about as large. With virtual ranks it has as many micro-batches as a full one.
        num_of_full_batch = self._num_micro_batches(self.batch_size)
        is_full = count >= self.batch_size
        if is_full or self.virtual_ranks is not None:
            return num_of_full_batch
        return self._num_micro_batches_of_short(count, num_of_full_batch)

    def _num_micro_batches(self, count: int) -> int:
        """Returns how many micro-batches are needed for `count` samples.

        With virtual ranks, it is the number for each virtual rank's part of these samples. There
        are at least `min_micro_batches`, and so many that none is larger than `micro_batch_size`.

        For example, 4 virtual ranks divide 10 samples into parts of 3, 3, 2 and 2. On 8 ranks, 2
        ranks process each part together. With `micro_batch_size=1` they need 2 micro-batches for
        the largest part, of 3 samples. So the result is 2.
        """
        if self.virtual_ranks is None:
            return self._num_micro_batches_of_ranks(count)

        largest_part = ceil_div(count, self.virtual_ranks.count)
        ranks_of_part = self.virtual_ranks.ranks_per_virtual_rank(len(self.shares))
        equal_shares = (1,) * ranks_of_part
        needed = micro_batches_needed(largest_part, equal_shares, self.micro_batch_size)

        # This may be more than the virtual rank has samples, e.g. 4 micro-batches for 3 samples.
        # `split_over_virtual_ranks` then makes one micro-batch for each sample.
        return max(needed, self.min_micro_batches)

    def _num_micro_batches_of_ranks(self, count: int) -> int:
        """Returns how many micro-batches are needed without virtual ranks; none may be empty."""
        needed = micro_batches_needed(count, self.shares, self.micro_batch_size)
        minimum = min(self.min_micro_batches, count)
        return max(needed, minimum)

    def _num_micro_batches_of_short(self, count: int, num_of_full_batch: int) -> int:
        """Returns the number of micro-batches of the short global batch at the end of an epoch.

        Its micro-batches are about as large as those of a full global batch, so there are fewer of
        them. With as many as in a full one, some ranks would have no samples in some of them.

        The number depends on the number of ranks only if that of a full global batch does. This
        keeps the statistics of BatchNorm, which are those of a micro-batch, the same on any number
        of ranks.

        Args:
            count: number of samples in the short global batch.
            num_of_full_batch: number of micro-batches in a full global batch.
        """
        in_proportion = ceil_div(num_of_full_batch * count, self.batch_size)
        needed = micro_batches_needed(count, self.shares, self.micro_batch_size)
        return max(in_proportion, needed)

    def every_rank_has_samples(self, plan: Plan) -> bool:
        """Returns True if every rank has samples in every micro-batch of an epoch."""
        for count in plan.sizes():
            sizes = split_sizes(self.split(count))
            if not (sizes > 0).all():
                return False
        return True

    def check_every_copy_has_samples(self, smallest: int) -> None:
        """Checks that each copy of the model has samples in each global batch.

        Only under DiLoCo does each virtual rank train a copy, which is called a replica there.

        Args:
            smallest: number of samples in the smallest global batch.

        Raises:
            DataError: some copy would have no samples, and so no gradient for its step.
        """
        virtual_ranks = self.virtual_ranks
        if virtual_ranks is None or not virtual_ranks.train_copies:
            return

        if smallest < virtual_ranks.count:
            raise DataError(
                f"a global batch of {smallest} samples for {virtual_ranks.count} replicas",
                "each of them makes a step with its own part, and some would have none",
                "leave a short last batch out with drop_last=True, or use fewer replicas",
            )

    def plan_epoch(self, plan: Plan, start: int) -> Iterator[PlannedMicroBatch]:
        """Plans this rank's micro-batches of an epoch, with the present shares and size.

        Args:
            plan: the global batches of the epoch.
            start: number of the first global batch to plan.
        """
        return _plan_batches(plan, start, self._templates_by_size(plan, start))

    def _templates_by_size(self, plan: Plan, start: int) -> dict[int, list[_MicroBatchTemplate]]:
        """Divides a global batch of each size that occurs in an epoch from `start` on.

        Usually there are only two sizes, full and short, so few global batches need be divided.
        """
        templates_by_size = {}
        for count in plan.sizes(start):
            templates_by_size[count] = self._templates(count)
        return templates_by_size

    def _templates(self, count: int) -> list[_MicroBatchTemplate]:
        """Returns this rank's micro-batches of a global batch with a number of samples."""
        if self.virtual_ranks is None:
            return self._templates_of_split(count, self.split(count))

        # No devices are checked here, so no rank repeats pieces of another one.
        pieces_without_repeats = []
        for pieces in self._pieces_of_ranks(count):
            pieces_without_repeats.append([RankPiece.computed_once(piece) for piece in pieces])
        return self._templates_of_pieces(count, pieces_without_repeats)

    def plan_training(
        self, plan: Plan, start: int, steps_before: int = 0
    ) -> Generator[Segment, None, None]:
        """Yields the segments of a training pass.

        If autotuning still has something to measure, it does so on the first global batches. What
        remains of the epoch is a single segment.

        Args:
            plan: the global batches of the epoch.
            start: number of the first global batch to plan.
            steps_before: number of optimizer steps that the run has made before this pass. It
                decides in which global batches the devices are checked.
        """
        smallest = min(plan.sizes(start), default=self.batch_size)
        self.check_every_copy_has_samples(smallest)

        # The request is open until autotuning has measured all that this loader asked for. It takes
        # one global batch or more.
        while self.autotune_request.is_open and start < len(plan):
            yield from self.plan_autotuning(start, plan[start])
            start += 1

        if self.check_devices is None:
            yield Segment(self.plan_epoch(plan, start))
        else:
            yield Segment(self._plan_with_checks(plan, start, steps_before))

    def _plan_with_checks(
        self, plan: Plan, start: int, steps_before: int
    ) -> Iterator[PlannedMicroBatch]:
        """Plans this rank's micro-batches of an epoch in which devices are checked.

        In the global batches that are checked, this rank also repeats a virtual rank of another
        rank, so that the two can compare their results.

        Args:
            plan: the global batches of the epoch.
            start: number of the first global batch to plan.
            steps_before: number of optimizer steps that the run has made before this pass.
        """
        # How a global batch is divided depends only on its number of samples. So each size is
        # divided once, into templates of micro-batches, and `_planned` fills in the samples.
        templates_by_size = self._templates_by_size(plan, start)

        for position, global_batch in enumerate(plan.batches(start), start):
            count = len(global_batch)
            steps_before_batch = steps_before + position - start

            check_number = self.number_of_check(steps_before_batch)
            if check_number is None:  # devices are not checked in this global batch
                templates = templates_by_size[count]
            else:
                templates = self._templates_with_repeats(count, check_number)

            for template in templates:
                yield _planned(position, template, global_batch)

    def number_of_check(self, steps_before: int) -> int | None:
        """Returns the number of a global batch among those in which devices are checked.

        With `check_devices=100`, the global batches of the steps 100, 200 and 300 have the numbers
        0, 1 and 2.

        Args:
            steps_before: number of optimizer steps that the run makes before this global batch.

        Returns:
            The number, or None if devices are not checked in this global batch.
        """
        if self.check_devices is None:
            return None
        step = steps_before + 1
        if step % self.check_devices != 0:
            return None
        return step // self.check_devices - 1

    def checks_devices_after(self, steps_before: int) -> bool:
        """Returns True if devices are checked in the global batch after this number of steps."""
        return self.number_of_check(steps_before) is not None

    def _templates_with_repeats(self, count: int, check_number: int) -> list[_MicroBatchTemplate]:
        """Returns this rank's micro-batches of a global batch in which devices are checked.

        To find a broken device, each rank repeats a virtual rank of another rank: it computes the
        same samples. When all repeats are done, the ranks compare the two results of each repeated
        virtual rank. For example, this rank has the micro-batches `[own, repeat, own]`: then the
        last one is marked, and the ranks compare before it. All three say that their global batch
        is checked (`checks_devices`).

        Args:
            count: number of samples in the global batch.
            check_number: number of this global batch among those that are checked. It decides which
                rank repeats which virtual rank.
        """
        checked = add_repeats(self._pieces_of_ranks(count), check_number)
        templates = []
        for index, template in enumerate(self._templates_of_pieces(count, checked.pieces_of_ranks)):
            micro_batch = replace(template.micro_batch, checks_devices=True)
            compare_before = index == checked.index_of_comparison
            templates.append(
                template._replace(micro_batch=micro_batch, compare_devices_before=compare_before)
            )
        return templates

    def _templates_of_pieces(
        self, count: int, pieces_of_ranks: Sequence[Sequence[RankPiece]]
    ) -> list[_MicroBatchTemplate]:
        """Returns this rank's micro-batches of a global batch that virtual ranks divide.

        Args:
            count: number of samples in the global batch.
            pieces_of_ranks: for each rank, its pieces in order. Each consists of some consecutive
                samples of a virtual rank, and says whether these are repeated and compared. All
                ranks have the same number of pieces.
        """
        # The ranks process the pieces at the same index of their lists together. Padding is at the
        # end of a list, so the own pieces keep their indices if it is left out.
        own_pieces = self._without_unused_padding(pieces_of_ranks[self.data_parallel.rank])
        micro_batches = self._micro_batches_of_pieces(own_pieces, count)

        templates = []
        for index, micro_batch in enumerate(micro_batches):
            own_piece = own_pieces[index].piece
            samples = slice(own_piece.begin, own_piece.end)
            all_ranks_have_samples = all(
                pieces[index].piece.num_samples > 0 for pieces in pieces_of_ranks
            )
            templates.append(_MicroBatchTemplate(micro_batch, samples, all_ranks_have_samples))
        return templates

    def _without_unused_padding(self, pieces: Sequence[RankPiece]) -> list[RankPiece]:
        """Returns the pieces of a rank for which it gets a micro-batch.

        A rank that trains fewer copies of the model than others has fewer micro-batches. Only if
        all virtual ranks train one model does it get micro-batches without samples instead.
        """
        assert self.virtual_ranks is not None
        if not self.virtual_ranks.train_copies:
            return list(pieces)
        return [piece for piece in pieces if not piece.piece.is_padding]

    def plan_repeat(
        self, position: int, global_batch: Indices, virtual_rank: int
    ) -> list[PlannedMicroBatch]:
        """Plans the micro-batches of a virtual rank that every rank computes again.

        All ranks do this when two devices have disagreed about the virtual rank.

        Args:
            position: number of the global batch in the epoch.
            global_batch: the indices of all samples of the global batch.
            virtual_rank: number of the virtual rank.
        """
        # The pieces of the virtual rank: each consists of some consecutive samples.
        count = len(global_batch)
        repeated_pieces = pieces_of_virtual_rank(self._pieces_of_ranks(count), virtual_rank)
        micro_batches = self._micro_batches_of_pieces(repeated_pieces, count)

        planned = []
        for repeated_piece, micro_batch in zip(repeated_pieces, micro_batches, strict=True):
            piece = repeated_piece.piece
            # Repeats are inserted in the middle of the global batch, so they are neither the first
            # nor the last micro-batch of an optimizer step.
            repeat = replace(micro_batch, first=False, last=False, checks_devices=True)
            planned.append(
                PlannedMicroBatch(
                    position=position,
                    micro_batch=repeat,
                    indices=global_batch[piece.begin : piece.end],
                    all_ranks_have_samples=True,  # all compute these same samples
                    global_batch=global_batch,
                )
            )
        return planned

    def _pieces_of_ranks(self, count: int) -> list[list[VirtualRankPiece]]:
        """Divides a global batch over the virtual ranks.

        Args:
            count: number of samples in the global batch.

        Returns:
            For each rank, the pieces that it processes one after the other.
        """
        assert self.virtual_ranks is not None
        return split_over_virtual_ranks(
            count, self.shares, self.micro_batches_of(count), self.virtual_ranks
        )

    def _micro_batches_of_pieces(self, pieces: Sequence[RankPiece], count: int) -> list[MicroBatch]:
        """Makes a micro-batch of each piece that this rank processes of a global batch.

        Args:
            pieces: all pieces of the global batch that this rank processes.
            count: number of samples in the global batch.
        """
        assert self.virtual_ranks is not None
        return _micro_batches_of_virtual_ranks(
            pieces, count, self.virtual_ranks, num_ranks=len(self.shares)
        )

    def plan_autotuning(self, position: int, batch: Indices) -> Generator[Segment, None, None]:
        """Yields the one or two segments of a global batch on which autotuning measures.

        The first segment is a single micro-batch. While the training loop processes it, autotuning
        measures shares, or the micro-batch size, or both. The second segment is the rest of the
        global batch, divided by what was measured. For example, with 64 samples on 2 ranks:

        1. The measured micro-batch has 4 samples: 2 on each rank.
        2. Rank 1 turns out to be three times as fast. `self.shares` becomes `(1, 3)`.
        3. The other 60 samples are divided into 15 on rank 0 and 45 on rank 1.

        Args:
            position: number of the global batch in the epoch.
            batch: the indices of all samples of the global batch.
        """
        count = len(batch)
        first_split = self._split_for_measurement(count)
        if first_split is None:  # the batch is too short for a measurement
            yield Segment(self._plan_parts(position, batch, self.split(count)))
            return

        # `first_split` has the shape (1, ranks, 2): where the part of each rank begins and ends.
        # The parts are the first samples of the global batch; the part that ends last shows how
        # many these are.
        ends_of_parts = first_split[0, :, 1]
        num_measured = int(ends_of_parts.max())
        measured = self._plan_parts(position, batch, first_split)

        # The loader may have to read the whole global batch now, to know its weight, so it gets the
        # rest as well. Nobody trains on this rest: it is still divided with the present shares.
        unmeasured_rest = self._plan_rest(position, batch, num_measured)

        # The loop processes the segment while this generator waits in `yield`, and `profile`
        # measures that. When the loop asks for the next segment, `self.shares` and
        # `self.micro_batch_size` are the measured ones.
        samples_of_this_rank = measured[0].micro_batch.local_rows
        with self.autotune_request.recording_context(self, samples_of_this_rank):
            yield Segment(measured, rest_of_global_batch=unmeasured_rest)

        # The rest is planned again, now with the measured shares and micro-batch size.
        if num_measured < count:
            measured_rest = self._plan_rest(position, batch, num_measured)
            yield Segment(measured_rest)

    def _split_for_measurement(self, count: int) -> Indices | None:
        """Returns the micro-batch on which autotuning measures, shape `(1, ranks, 2)`.

        Usually this is a micro-batch of only a few samples, because it is quick. With BatchNorm,
        however, the result depends on which samples are in a micro-batch. Such a model must be
        called with the planned micro-batches, so the first planned one is measured.

        Returns None if the global batch is too short for a measurement.

        Args:
            count: number of samples in the global batch.
        """
        # While the micro-batch size is unknown, a planned micro-batch might not fit into memory.
        fits_in_memory = not self.autotune_request.micro_batch_size_is_open
        takes_planned = fits_in_memory and self.autotune_request.must_keep_plan()
        planned = self.split(count) if takes_planned else None
        return first_micro_batch(count, self.shares, planned, self.micro_batch_size)

    def _plan_rest(
        self, position: int, batch: Indices, num_measured: int
    ) -> list[PlannedMicroBatch]:
        """Plans the micro-batches of a global batch after its first `num_measured` samples.

        They are divided with the present shares and micro-batch size.
        """
        return self._plan_parts(position, batch, self._split_rest(len(batch), num_measured))

    def _split_rest(self, count: int, num_done: int) -> Indices:
        """Divides the samples of a global batch that remain after its first `num_done` samples.

        Returns:
            The first sample of each part, and the one after its last, counted from the beginning of
            the global batch. The shape is `(micro-batches, ranks, 2)`; it has no micro-batches if
            no samples remain.
        """
        planned_split = self.split(count)  # shape (micro-batches, ranks, 2)
        if num_done == count:
            return planned_split[:0]  # no micro-batches

        # For example, the planned micro-batches begin at the samples 0, 8 and 16. After 8 samples,
        # the last two of them are left.
        first_rank = 0  # its part comes first in each micro-batch
        begins = planned_split[:, first_rank, 0]
        plan_can_continue = bool((begins == num_done).any())
        if plan_can_continue:
            return planned_split[begins >= num_done]

        # After 4 samples, the rest is divided anew.
        num_left = count - num_done
        split_of_rest = split_batch(num_left, self.shares, self._num_micro_batches(num_left))
        return num_done + split_of_rest

    def _plan_parts(self, position: int, batch: Indices, split: Indices) -> list[PlannedMicroBatch]:
        """Plans this rank's micro-batches of a global batch, or of consecutive samples of it.

        Args:
            position: number of the global batch in the epoch.
            batch: the indices of all samples of the global batch.
            split: where each part begins and ends, shape `(micro-batches, ranks, 2)`.
        """
        planned = []
        for template in self._templates_of_split(len(batch), split):
            planned.append(_planned(position, template, batch))
        return planned

    def _templates_of_split(self, global_samples: int, split: Indices) -> list[_MicroBatchTemplate]:
        """Returns this rank's micro-batches of a global batch, without virtual ranks.

        A template is a micro-batch of any global batch of this size: it says which positions in the
        global batch the samples have. For 8 samples on 2 ranks, in 2 micro-batches, rank 1 has the
        positions 2 to 3 in the first template and 6 to 7 in the second.

        Args:
            global_samples: number of samples in the whole global batch.
            split: where each part begins and ends, shape `(micro-batches, ranks, 2)`. Usually it
                covers the whole global batch. Autotuning divides the first 4 of 64 samples, for
                example, and then the other 60 (or none, if there are no others).
        """
        if len(split) == 0:
            return []
        rank = self.data_parallel.rank
        sizes = split_sizes(split)  # shape (micro-batches, ranks)

        begin_of_split = int(split[0, 0, 0])  # first micro-batch, rank 0
        end_of_split = int(split[-1, -1, 1])  # last micro-batch, last rank
        micro_batches = _micro_batches_of_sizes(
            sizes,
            rank,
            global_samples,
            has_first=begin_of_split == 0,
            has_last=end_of_split == global_samples,
        )

        templates = []
        for index, micro_batch in enumerate(micro_batches):
            begin, end = split[index, rank].tolist()
            all_ranks_have_samples = bool((sizes[index] > 0).all())
            template = _MicroBatchTemplate(micro_batch, slice(begin, end), all_ranks_have_samples)
            templates.append(template)
        return templates

    def make_micro_batches(self, sizes: Indices, count: int) -> list[MicroBatch]:
        """Makes this rank's micro-batches of a global batch of a stream, in order.

        Without virtual ranks, there is one for each row of `sizes`. Otherwise there is one for each
        piece of the rank's virtual ranks, which follow from `count` alone.

        Args:
            sizes: number of samples in each part, shape `(micro-batches, ranks)`.
            count: number of samples in the whole global batch.
        """
        rank = self.data_parallel.rank
        if self.virtual_ranks is None:
            return _micro_batches_of_sizes(sizes, rank, count)

        pieces = [RankPiece.computed_once(piece) for piece in self._pieces_of_ranks(count)[rank]]
        return self._micro_batches_of_pieces(self._without_unused_padding(pieces), count)


def _plan_batches(
    plan: Plan, start: int, templates_by_size: dict[int, list[_MicroBatchTemplate]]
) -> Iterator[PlannedMicroBatch]:
    """Yields this rank's micro-batches of an epoch.

    Args:
        plan: the global batches of the epoch.
        start: number of the first global batch to plan.
        templates_by_size: maps the size of a global batch to this rank's micro-batches of it.
    """
    for position, global_batch in enumerate(plan.batches(start), start):
        for template in templates_by_size[len(global_batch)]:
            yield _planned(position, template, global_batch)


def _planned(
    position: int, template: _MicroBatchTemplate, global_batch: Indices
) -> PlannedMicroBatch:
    """Applies a template to a global batch: adds the position and the indices of its samples.

    Everything else is the same in each global batch of this size, and taken from the template.

    Args:
        position: number of the global batch in the epoch.
        template: a micro-batch of any global batch of this size.
        global_batch: the indices of all samples of the global batch.
    """
    return PlannedMicroBatch(
        position=position,
        micro_batch=template.micro_batch,
        indices=global_batch[template.samples],
        all_ranks_have_samples=template.all_ranks_have_samples,
        global_batch=global_batch,
        compare_devices_before=template.compare_devices_before,
    )


def _micro_batches_of_sizes(
    sizes: Indices,
    rank: int,
    global_samples: int,
    *,
    has_first: bool = True,
    has_last: bool = True,
) -> list[MicroBatch]:
    """Makes a rank's micro-batches of a global batch from the sizes of their parts.

    Args:
        sizes: number of samples in each part, shape `(micro-batches, ranks)`. These may be only
            some consecutive micro-batches of the global batch.
        rank: the rank whose micro-batches are returned.
        global_samples: number of samples in the whole global batch.
        has_first: True if `sizes` begins with the first micro-batch of the global batch.
        has_last: True if `sizes` ends with the last micro-batch of the global batch.
    """
    num_micro_batches, num_ranks = sizes.shape

    # If all ranks process equal parts of the global batch in a single micro-batch, DDP's mean over
    # the ranks is already right, and the loss needs no factor. The field `plain` says so.
    is_whole = has_first and has_last and num_micro_batches == 1
    sizes_are_equal = bool((sizes == sizes[0, 0]).all())
    is_empty = global_samples == 0  # a loss of no samples counts 0, so it needs that factor
    needs_no_factor = is_whole and sizes_are_equal and not is_empty

    micro_batches = []
    for index, local_rows in enumerate(sizes[:, rank].tolist()):
        # The loss is a mean over `local_rows` samples. Multiplied by `local_rows / global_samples`,
        # it is this rank's part of the mean over the global batch. DDP divides the sum over the
        # ranks by their number, so it is multiplied by that, too.
        scale = 1.0 if needs_no_factor else local_rows * num_ranks / max(1, global_samples)
        micro_batch = MicroBatch(
            global_samples=global_samples,
            local_rows=local_rows,
            first=has_first and index == 0,
            last=has_last and index == num_micro_batches - 1,
            num_micro_batches=num_micro_batches,
            scale=scale,
            plain=needs_no_factor,
        )
        micro_batches.append(micro_batch)
    return micro_batches


def _micro_batches_of_virtual_ranks(
    pieces: Sequence[RankPiece], count: int, virtual_ranks: VirtualRanks, *, num_ranks: int
) -> list[MicroBatch]:
    """Makes a micro-batch of each piece of a rank.

    Args:
        pieces: the pieces of a global batch that the rank processes, in this order. Repeated pieces
            do not contribute to the gradient.
        count: number of samples in the whole global batch, over all ranks.
        virtual_ranks: the virtual ranks of the run.
        num_ranks: number of ranks that process them.
    """
    virtual_ranks_of_this_rank = set()
    for rank_piece in pieces:
        if not rank_piece.piece.is_padding and not rank_piece.is_repeat:
            virtual_ranks_of_this_rank.add(rank_piece.piece.virtual_rank)

    # A loss that a rank reports is divided by this number: the sum over the virtual ranks becomes a
    # mean over them when the ranks take their mean.
    virtual_ranks_per_rank = max(1.0, virtual_ranks.count / num_ranks)

    # The scale is `n * ranks / N`, as in the module's docstring. The gradients that are averaged
    # take the place of the ranks. `N` is the size of the global batch, or if virtual ranks train
    # copies, of the virtual rank's part.
    num_averaged_gradients = virtual_ranks.num_averaged_gradients(num_ranks)
    samples_of_copies: Sequence[int] = ()
    if virtual_ranks.train_copies:
        samples_of_copies = part_sizes(count, (1,) * virtual_ranks.count)

    micro_batches = []
    for index, rank_piece in enumerate(pieces):
        piece = rank_piece.piece
        virtual_rank = VirtualRank(
            number=piece.virtual_rank,
            begins=piece.piece_number == 0,
            ends=piece.piece_number == piece.num_pieces - 1,
            piece=piece.piece_number,
            num_on_process=len(virtual_ranks_of_this_rank),
            virtual_ranks_per_process=virtual_ranks_per_rank,
            has_own_step=virtual_ranks.train_copies,
            is_padding=piece.is_padding,
            is_repeat=rank_piece.is_repeat,
            is_compared=rank_piece.is_compared,
        )
        local_rows = piece.end - piece.begin
        num_samples = count
        if virtual_ranks.train_copies:
            num_samples = samples_of_copies[piece.virtual_rank]
        micro_batch = MicroBatch(
            global_samples=count,
            local_rows=local_rows,
            first=index == 0,
            last=index == len(pieces) - 1,
            num_micro_batches=len(pieces),
            scale=local_rows * num_averaged_gradients / max(1, num_samples),
            # The loss needs `world.backward`, even where its factor happens to be 1.
            plain=False,
            virtual_rank=virtual_rank,
        )
        micro_batches.append(micro_batch)
    return micro_batches
