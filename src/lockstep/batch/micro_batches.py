"""Plans the micro-batches of a loader: how its global batches are divided, and what each counts.

A *global batch* holds the samples of one optimizer step, over all ranks; its *position* is its
number in the epoch. Each rank computes its part in one or more *micro-batches*. A *virtual rank*
is a fixed part of every global batch, whatever the number of ranks; see `session.micro_batch`.

DDP averages gradients over the ranks, and the backward passes of a rank add up. So the mean loss
over the `n` samples of a micro-batch counts as it should when it is multiplied by the *scale*
`n * ranks / N`, where `N` is the number of samples of the global batch.

In a *checked* global batch some virtual ranks are *repeated*, to check the devices; see `repeats`.

If shares or the micro-batch size are to be measured first, a global batch is handed out in two
*segments*: a micro-batch in which they are measured, then the rest, divided by what was found.
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
    split_batch,
    split_over_virtual_ranks,
    split_sizes,
    virtual_ranks_of,
)
from lockstep.batch.repeats import CheckedPiece, add_repeats, pieces_of_virtual_rank
from lockstep.batch.shares import first_micro_batch
from lockstep.distributed.topology import DataParallelRank
from lockstep.errors import DataError, SettingError
from lockstep.session.micro_batch import MicroBatch, VirtualRank, VirtualRanks


class PlannedMicroBatch(NamedTuple):
    """A micro-batch of this rank, before it is read."""

    position: int
    """The position of its global batch in the epoch."""
    micro_batch: MicroBatch
    indices: Indices
    """The indices of its samples in the dataset."""
    on_all_ranks: bool
    """True if every rank has samples of it."""
    global_batch: Indices | None = None
    """The indices of all samples of the global batch; None for a stream."""
    compared_before: bool = False
    """True if the ranks compare what two of them have computed before it is handed out."""


ReadMicroBatch = tuple[PlannedMicroBatch, Any]
"""A planned micro-batch, and the batch that was read for it."""


class Segment(NamedTuple):
    """Micro-batches that are planned and read together."""

    micro_batches: Iterable[PlannedMicroBatch]
    rest_of_global_batch: Sequence[PlannedMicroBatch] = ()
    """If `micro_batches` is the first part of a global batch: the rest, as it is planned so far.
    The next segment has it again, divided by what was measured in between."""


class _RankPart(NamedTuple):
    """A micro-batch of this rank, in a global batch of a certain size."""

    micro_batch: MicroBatch
    samples: slice
    """The positions of its samples in the global batch."""
    on_all_ranks: bool
    compared_before: bool = False
    """True if the ranks compare what two of them have computed before it is handed out."""


@dataclass(kw_only=True)
class MicroBatchPlan:
    """How the global batches of a loader are divided."""

    batch_size: int
    """Samples of a global batch."""
    sizes_vary: bool
    """True if global batches may have any size. Then each is divided by its own size."""
    data_parallel: DataParallelRank
    """This rank among the ranks that compute parts of a global batch."""
    initial_shares: tuple[int, ...]
    """The shares until others are measured."""
    initial_micro_batch_size: int | None = None
    """The micro-batch size until another one is measured."""
    min_micro_batches: int = 1
    """The least number of micro-batches of a global batch."""
    virtual_ranks: VirtualRanks | None = None
    """Each has an equal part of every global batch; None: there are none."""
    check_devices: int | None = None
    """Global batches between two that are checked; None: none is, or there is one process."""
    request: AutotuneRequest
    """What is to be measured in the first pass that trains."""

    def __post_init__(self) -> None:
        self._num_micro_batches(self.batch_size)  # raises SettingError for an impossible size
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
        """How a global batch is divided over the ranks: as set, or as measured meanwhile."""
        measured = self.request.result.shares
        if self.request.wants_shares and measured is not None:
            return measured
        return self.initial_shares

    @property
    def micro_batch_size(self) -> int | None:
        """The most samples that a rank computes at a time; None: its whole part."""
        result = self.request.result
        if self.request.wants_micro_batch_size and result.micro_batch_size_is_known:
            return result.micro_batch_size
        return self.initial_micro_batch_size

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of a full global batch."""
        return len(self.split(self.batch_size))

    def split(self, count: int) -> Indices:
        """Divides a global batch over micro-batches and ranks.

        Args:
            count: samples of the global batch.

        Returns:
            Begin and end of each part, shape `(micro-batches, ranks, 2)`.
        """
        return split_batch(count, self.shares, self.num_pieces(count), self.virtual_ranks)

    def num_pieces(self, count: int) -> int:
        """Returns in how many micro-batches a global batch is computed, at most.

        With virtual ranks, that is the number for each virtual rank's part of the global batch.

        Args:
            count: samples of the global batch.
        """
        if self.sizes_vary:
            return self._num_micro_batches(count)
        # All batches are divided as a full one is, except for a short last batch.
        number = self._num_micro_batches(self.batch_size)
        if self.virtual_ranks is None and count < self.batch_size:
            return self._num_micro_batches_of_short(count, number)
        return number

    def _num_micro_batches(self, count: int) -> int:
        """Returns in how many micro-batches `count` samples are computed.

        With virtual ranks, it is the number of micro-batches of each virtual rank's part.
        """
        if self.virtual_ranks is None:
            needed = micro_batches_needed(count, self.shares, self.micro_batch_size)
            # Each micro-batch has at least one sample.
            at_least = min(self.min_micro_batches, count)
            return max(needed, at_least)
        largest_part = ceil_div(count, self.virtual_ranks.count)
        if not self.virtual_ranks.train_copies:  # a virtual rank is computed by one rank
            needed = micro_batches_needed(largest_part, (1,), self.micro_batch_size)
            return max(needed, self.min_micro_batches)
        # Each virtual rank trains a copy. If there are more ranks, several compute one together.
        smallest_part = count // self.virtual_ranks.count
        ranks_of_part = max(1, len(self.shares) // self.virtual_ranks.count)
        equal_shares = (1,) * ranks_of_part
        needed = micro_batches_needed(largest_part, equal_shares, self.micro_batch_size)
        at_least = min(self.min_micro_batches, smallest_part)
        return max(needed, at_least)

    def _num_micro_batches_of_short(self, count: int, number_of_full: int) -> int:
        """Returns in how many micro-batches a short global batch is computed.

        They are about as large as those of a full one. If there were as many as of a full one, some
        ranks would have no samples in some of them. The number depends on the number of ranks only
        if that of a full batch does, so BatchNorm sees the same micro-batches on any number of
        ranks.

        Args:
            count: samples of the short global batch.
            number_of_full: the number of micro-batches of a full global batch.
        """
        in_proportion = ceil_div(number_of_full * count, self.batch_size)
        needed = micro_batches_needed(count, self.shares, self.micro_batch_size)
        return max(in_proportion, needed)

    def every_rank_has_samples(self, plan: Plan) -> bool:
        """Returns True if every rank has samples of every micro-batch of an epoch."""
        for count in plan.sizes():
            sizes = split_sizes(self.split(count))
            if not (sizes > 0).all():
                return False
        return True

    def check_trained(self, smallest: int) -> None:
        """Checks that each copy of the model has samples of each global batch that is trained on.

        Args:
            smallest: samples of the smallest global batch.

        Raises:
            DataError: the virtual rank of some copy would have none.
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
        """Returns this rank's micro-batches, all divided by the shares and the size of this moment.

        Args:
            plan: the global batches of the epoch.
            start: the position of the first one that is wanted.
        """
        parts_by_size = {}
        for count in plan.sizes(start):
            parts_by_size[count] = self._parts_of_rank(count, self.split(count))
        return _plan_batches(plan, start, parts_by_size)

    def plan_training(
        self, plan: Plan, start: int, steps_before: int = 0
    ) -> Generator[Segment, None, None]:
        """Yields the segments of a pass that trains, in whose first global batches it autotunes.

        Args:
            plan: the global batches of the epoch.
            start: the position of the first one that is wanted.
            steps_before: how many optimizer steps the run has made when the pass begins. They
                decide which global batches are checked.
        """
        self.check_trained(min(plan.sizes(start), default=self.batch_size))
        while start < len(plan) and self.request.is_open:
            yield from self.plan_autotuning(start, plan[start])
            start += 1
        if self.check_devices is None:
            yield Segment(self.plan_epoch(plan, start))
        else:
            yield Segment(self._plan_with_checks(plan, start, steps_before))

    def _plan_with_checks(
        self, plan: Plan, start: int, steps_before: int
    ) -> Iterator[PlannedMicroBatch]:
        """Yields this rank's micro-batches, with repeats in the global batches that are checked.

        Args:
            plan: the global batches of the epoch.
            start: the position of the first one that is wanted.
            steps_before: how many optimizer steps the run has made when the pass begins.
        """
        parts_by_size = {}
        for count in plan.sizes(start):
            parts_by_size[count] = self._parts_of_rank(count, self.split(count))
        for position, global_batch in enumerate(plan.batches(start), start):
            count = len(global_batch)
            check_number = self.check_number(steps_before + position - start)
            parts = parts_by_size[count]
            if check_number is not None:
                parts = self._parts_with_repeats(count, check_number)
            for part in parts:
                yield _planned(position, part, global_batch)

    def check_number(self, steps_before: int) -> int | None:
        """Returns how many global batches were checked before one; None if it is not checked.

        Args:
            steps_before: how many optimizer steps come before the global batch.
        """
        if self.check_devices is None or (steps_before + 1) % self.check_devices != 0:
            return None
        return (steps_before + 1) // self.check_devices - 1

    def _parts_with_repeats(self, count: int, check_number: int) -> list[_RankPart]:
        """Returns this rank's micro-batches of a global batch that is checked.

        Args:
            count: samples of the global batch.
            check_number: how many global batches were checked before.
        """
        checked = add_repeats(self._pieces_of_ranks(count), check_number)
        pieces = checked.pieces_of_ranks[self.data_parallel.rank]
        parts = []
        for index, micro_batch in enumerate(self._micro_batches_of_pieces(pieces, count)):
            micro_batch = replace(micro_batch, checks_devices=True)
            piece = pieces[index].piece
            on_all_ranks = True
            for pieces_of_rank in checked.pieces_of_ranks:
                if pieces_of_rank[index].piece.is_padding:
                    on_all_ranks = False
            parts.append(
                _RankPart(
                    micro_batch,
                    slice(piece.begin, piece.end),
                    on_all_ranks,
                    compared_before=index == checked.compared_before,
                )
            )
        return parts

    def plan_repeat(
        self, position: int, global_batch: Indices, virtual_rank: int
    ) -> list[PlannedMicroBatch]:
        """Returns the micro-batches of a virtual rank that all ranks compute again.

        Args:
            position: of the global batch in the epoch.
            global_batch: the indices of all its samples.
            virtual_rank: its number.
        """
        count = len(global_batch)
        pieces = pieces_of_virtual_rank(self._pieces_of_ranks(count), virtual_rank)
        planned = []
        for checked, micro_batch in zip(
            pieces, self._micro_batches_of_pieces(pieces, count), strict=True
        ):
            indices = global_batch[checked.piece.begin : checked.piece.end]
            # They are inserted in the middle of the global batch.
            micro_batch = replace(micro_batch, first=False, last=False, checks_devices=True)
            planned.append(PlannedMicroBatch(position, micro_batch, indices, True, global_batch))
        return planned

    def _pieces_of_ranks(self, count: int) -> list[list[VirtualRankPiece]]:
        """Returns the micro-batches of all ranks, if all virtual ranks train one model.

        Args:
            count: samples of the global batch.
        """
        assert self.virtual_ranks is not None
        return split_over_virtual_ranks(
            count, self.shares, self.num_pieces(count), self.virtual_ranks.count
        )

    def _micro_batches_of_pieces(
        self, pieces: Sequence[CheckedPiece], count: int
    ) -> list[MicroBatch]:
        """Returns micro-batches of this rank, if all virtual ranks train one model.

        Args:
            pieces: all that it computes of a global batch.
            count: samples of the global batch.
        """
        assert self.virtual_ranks is not None
        return _micro_batches_of_virtual_ranks(
            pieces, count, self.virtual_ranks.count, num_ranks=len(self.shares)
        )

    def plan_autotuning(self, position: int, batch: Indices) -> Generator[Segment, None, None]:
        """Yields the segments of a global batch in which autotuning measures.

        It measures shares, or the micro-batch size, or both (`request`), while the training loop
        computes the first segment, which is one micro-batch.

        Args:
            position: of the global batch in the epoch.
            batch: the indices of its samples.
        """
        count = len(batch)
        # Until the micro-batch size was measured, a planned micro-batch may be too large for the
        # memory. Then the first micro-batch has a few samples only.
        size_is_known = not self.request.micro_batch_size_is_open
        keeps_plan = size_is_known and self.request.must_keep_plan()
        first_split = first_micro_batch(
            count, self.shares, self.split(count), self.micro_batch_size, whole=keeps_plan
        )
        if first_split is None:  # the batch is too short to measure anything
            yield Segment(self._plan_parts(position, batch, self.split(count)))
            return
        # The micro-batch has the first samples of the global batch: up to its largest end.
        num_measured = int(first_split[..., 1].max())
        measured = self._plan_parts(position, batch, first_split)
        rest = self._plan_parts(position, batch, self._split_rest(count, num_measured))
        with self.request.profile(self, measured[0].micro_batch.local_rows):
            yield Segment(measured, rest_of_global_batch=rest)
        if num_measured < count:
            # The rest is divided anew, by the shares and the size that were measured just now.
            rest = self._plan_parts(position, batch, self._split_rest(count, num_measured))
            yield Segment(rest)

    def _split_rest(self, count: int, num_done: int) -> Indices:
        """Divides a global batch of `count` samples without its first `num_done` samples.

        Returns:
            Begin and end of each part in the global batch, shape `(micro-batches, ranks, 2)`. The
            micro-batches are those of the plan if one of them begins after these samples.
        """
        split = self.split(count)
        begins = split[:, 0, 0]  # where each micro-batch begins: with the part of rank 0
        a_micro_batch_begins_here = num_done in begins
        if a_micro_batch_begins_here or num_done == count:
            return split[begins >= num_done]
        num_samples = count - num_done
        num_micro_batches = self._num_micro_batches(num_samples)
        return num_done + split_batch(num_samples, self.shares, num_micro_batches)

    def _plan_parts(self, position: int, batch: Indices, split: Indices) -> list[PlannedMicroBatch]:
        """Returns this rank's micro-batches of a global batch, or of a part of it.

        Args:
            position: of the global batch in the epoch.
            batch: the indices of all its samples.
            split: begin and end of each part, shape `(micro-batches, ranks, 2)`.
        """
        planned = []
        for part in self._parts_of_rank(len(batch), split):
            planned.append(_planned(position, part, batch))
        return planned

    def _parts_of_rank(self, count: int, split: Indices) -> list[_RankPart]:
        """Returns this rank's micro-batches of a global batch, or of a part of it.

        Args:
            count: samples of the whole global batch.
            split: begin and end of each part, shape `(micro-batches, ranks, 2)`. It may be empty.
        """
        if len(split) == 0:
            return []
        rank = self.data_parallel.rank
        sizes = split_sizes(split)
        begin_of_split = int(split[0, 0, 0])
        end_of_split = int(split[-1, -1, 1])
        micro_batches = self.make_micro_batches(
            sizes,
            count,
            has_first=begin_of_split == 0,
            has_last=end_of_split == count,
        )
        bounds = split[:, rank].tolist()
        # If another rank has one more virtual rank, it has more micro-batches than this one. Then
        # the last ones of `bounds` are not used.
        parts = []
        for index, micro_batch in enumerate(micro_batches):
            begin, end = bounds[index]
            on_all_ranks = bool(sizes[index].all())
            parts.append(_RankPart(micro_batch, slice(begin, end), on_all_ranks))
        return parts

    def make_micro_batches(
        self, sizes: Indices, count: int, *, has_first: bool = True, has_last: bool = True
    ) -> list[MicroBatch]:
        """Returns this rank's micro-batches of a global batch, or of consecutive parts of it.

        Args:
            sizes: samples of each part, shape `(micro-batches, ranks)`. If there are virtual ranks,
                it is the whole global batch.
            count: samples of the whole global batch.
            has_first: True if the first part is the first of the global batch.
            has_last: True if the last part is the last of the global batch.
        """
        rank = self.data_parallel.rank
        if self.virtual_ranks is None:
            return make_micro_batches(sizes, rank, count, has_first=has_first, has_last=has_last)
        if self.virtual_ranks.train_copies:
            return _micro_batches_of_copies(sizes, rank, count, self.virtual_ranks.count)
        pieces = [CheckedPiece(piece) for piece in self._pieces_of_ranks(count)[rank]]
        return self._micro_batches_of_pieces(pieces, count)


def _plan_batches(
    plan: Plan, start: int, parts_by_size: dict[int, list[_RankPart]]
) -> Iterator[PlannedMicroBatch]:
    """Yields this rank's micro-batches of an epoch.

    Args:
        plan: the global batches of the epoch.
        start: the position of the first one that is wanted.
        parts_by_size: this rank's micro-batches of a global batch of each size.
    """
    for position, global_batch in enumerate(plan.batches(start), start):
        for part in parts_by_size[len(global_batch)]:
            yield _planned(position, part, global_batch)


def _planned(position: int, part: _RankPart, global_batch: Indices) -> PlannedMicroBatch:
    """Returns a micro-batch of this rank in a certain global batch.

    Args:
        position: of the global batch in the epoch.
        part: the micro-batch, in a global batch of that size.
        global_batch: the indices of all its samples.
    """
    return PlannedMicroBatch(
        position,
        part.micro_batch,
        global_batch[part.samples],
        part.on_all_ranks,
        global_batch,
        part.compared_before,
    )


def make_micro_batches(
    sizes: Indices,
    rank: int,
    count: int,
    *,
    has_first: bool = True,
    has_last: bool = True,
) -> list[MicroBatch]:
    """Returns a rank's micro-batches of a global batch, or of consecutive parts of it.

    Args:
        sizes: samples of each part, shape `(micro-batches, ranks)`.
        rank: whose micro-batches are returned.
        count: samples of the whole global batch.
        has_first: True if the first part is the first of the global batch.
        has_last: True if the last part is the last of the global batch.
    """
    num_micro_batches, num_ranks = sizes.shape
    # If the global batch is one micro-batch, equally large on all ranks, the scale is 1, and the
    # loss needs no factor.
    is_whole = has_first and has_last and num_micro_batches == 1
    sizes_are_equal = bool((sizes == sizes[0, 0]).all())
    plain = is_whole and count > 0 and sizes_are_equal
    micro_batches = []
    for index, local_rows in enumerate(sizes[:, rank].tolist()):
        # The n * ranks / N of the module's docstring.
        scale = 1.0 if plain else local_rows * num_ranks / max(1, count)
        micro_batch = MicroBatch(
            global_samples=count,
            local_rows=local_rows,
            first=has_first and index == 0,
            last=has_last and index == num_micro_batches - 1,
            num_micro_batches=num_micro_batches,
            scale=scale,
            plain=plain,
        )
        micro_batches.append(micro_batch)
    return micro_batches


def _micro_batches_of_virtual_ranks(
    pieces: Sequence[CheckedPiece], count: int, num_virtual_ranks: int, *, num_ranks: int
) -> list[MicroBatch]:
    """Returns a rank's micro-batches, if all virtual ranks train one model.

    Args:
        pieces: of the rank; those that are repeated count for nothing.
        count: samples of the whole global batch.
        num_virtual_ranks: of the run.
        num_ranks: that compute them.
    """
    numbers = set()
    for checked in pieces:
        if not checked.piece.is_padding and not checked.is_repeat:
            numbers.add(checked.piece.virtual_rank)
    micro_batches = []
    for index, checked in enumerate(pieces):
        piece = checked.piece
        virtual_rank = VirtualRank(
            number=piece.virtual_rank,
            begins=piece.piece == 0,
            ends=piece.piece == piece.num_pieces - 1,
            piece=piece.piece,
            number_on_process=len(numbers),
            mean_number_on_process=num_virtual_ranks / num_ranks,
            has_own_step=False,
            is_padding=piece.is_padding,
            is_repeat=checked.is_repeat,
            is_compared=checked.is_compared,
        )
        local_rows = piece.end - piece.begin
        micro_batch = MicroBatch(
            global_samples=count,
            local_rows=local_rows,
            first=index == 0,
            last=index == len(pieces) - 1,
            num_micro_batches=len(pieces),
            # With this factor the mean over these samples counts in the mean over virtual ranks as
            # these samples count in the mean over the global batch.
            scale=local_rows * num_virtual_ranks / max(1, count),
            plain=False,
            virtual_rank=virtual_rank,
        )
        micro_batches.append(micro_batch)
    return micro_batches


def _micro_batches_of_copies(
    sizes: Indices, rank: int, count: int, num_virtual_ranks: int
) -> list[MicroBatch]:
    """Returns a rank's micro-batches, those of its first copy of the model first.

    Args:
        sizes: samples of each part, shape `(micro-batches, ranks)`. A column has the pieces of the
            first virtual rank of that rank, then those of the second, and so on.
        rank: whose micro-batches are returned.
        count: samples of the whole global batch.
        num_virtual_ranks: of the run.
    """
    max_micro_batches, num_ranks = sizes.shape
    numbers = virtual_ranks_of(rank, num_ranks, num_virtual_ranks)
    max_virtual_ranks = ceil_div(num_virtual_ranks, num_ranks)  # of one rank
    pieces_of_virtual_rank = max(1, max_micro_batches // max_virtual_ranks)
    num_micro_batches = len(numbers) * pieces_of_virtual_rank
    # If there are more ranks than virtual ranks, neighbouring ranks compute one together.
    ranks_of_virtual_rank = max(1, num_ranks // num_virtual_ranks)
    first_rank = rank - rank % ranks_of_virtual_rank
    ranks = slice(first_rank, first_rank + ranks_of_virtual_rank)
    micro_batches = []
    for index, number in enumerate(numbers):
        first_piece = index * pieces_of_virtual_rank
        pieces = sizes[first_piece : first_piece + pieces_of_virtual_rank]  # shape (pieces, ranks)
        samples_of_virtual_rank = int(pieces[:, ranks].sum())
        for piece, local_rows in enumerate(pieces[:, rank].tolist()):
            virtual_rank = VirtualRank(
                number=number,
                begins=piece == 0,
                ends=piece == pieces_of_virtual_rank - 1,
                number_on_process=len(numbers),
                mean_number_on_process=max(1.0, num_virtual_ranks / num_ranks),
                has_own_step=True,
            )
            position = first_piece + piece
            micro_batch = MicroBatch(
                global_samples=count,
                local_rows=local_rows,
                first=position == 0,
                last=position == num_micro_batches - 1,
                num_micro_batches=num_micro_batches,
                scale=local_rows * ranks_of_virtual_rank / max(1, samples_of_virtual_rank),
                plain=False,
                virtual_rank=virtual_rank,
            )
            micro_batches.append(micro_batch)
    return micro_batches
