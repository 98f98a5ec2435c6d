"""Checks, while a stream is read, that ranks and loader workers read the right samples.

From time to time, *digests* of the first samples of a global batch are compared (`batch.digest`).
They must be equal on all ranks if every rank reads the whole stream. If the stream is split over
the ranks, they must differ. Loader workers of a rank all read the same part of the stream, of which
each keeps its own global batches, so their digests must be equal too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lockstep.batch.consistency import describe_difference
from lockstep.batch.digest_matching import (
    Match,
    all_digests_match,
    digests_match,
    match_samples,
)
from lockstep.batch.source import IterableSource
from lockstep.distributed.collectives import Collectives
from lockstep.errors import CheckpointError, DataError, RanksDifferError
from lockstep.machine.topology import Topology


def other_beginning_error(source: IterableSource, epoch: int, sample: int) -> CheckpointError:
    """Returns the error for a stream that begins differently than before the run was resumed.

    Args:
        source: the stream.
        epoch: number of the epoch in which the run was resumed.
        sample: number of the first sample that differs.
    """
    return CheckpointError(
        f"resuming the stream {type(source.dataset).__name__} in the middle of epoch {epoch}",
        f"sample {sample} of this epoch is not the one that the checkpoint's run read there, so "
        "some samples would be trained twice and others not at all",
        "continue with the same data; let a stream that shuffles draw from the global generators "
        "of torch, numpy or random, or from one that is seeded with the epoch; or resume from a "
        "checkpoint that was saved between two epochs",
    )


def check_global_batch(
    collectives: Collectives, source: IterableSource, epoch: int, first: int, digests: list[Any]
) -> None:
    """Compares the samples that ranks have read for a global batch of a stream. A collective.

    A rank whose stream has ended calls `check_length` instead, which sends the number of its
    samples in the same exchange.

    Args:
        collectives: the collectives of the run.
        source: the stream.
        epoch: number of the epoch being read.
        first: number of the first sample of the global batch.
        digests: `batch_digests` of the samples that this rank has read.

    Raises:
        RanksDifferError: the ranks have read the wrong samples; raised on every rank.
    """
    sent_by_rank = collectives.exchange(digests)
    every_rank_reads_whole = source.shard is None
    if every_rank_reads_whole:
        # A rank whose stream has ended has sent a number in place of a list of digests.
        _check_same_end(epoch, sent_by_rank)
        _check_same_samples(source, epoch, first, sent_by_rank)
        return

    # The later stages of a pipeline have the same samples as the first stage, so only the ranks of
    # the first stage, which have the lowest numbers, are compared.
    digests_of_parts = sent_by_rank[: collectives.num_contributing_ranks]
    _check_samples_are_distinct(source, epoch, first, digests_of_parts)


def _check_same_samples(
    source: IterableSource, epoch: int, first: int, digests_by_rank: list[list[Any]]
) -> None:
    """Raises RanksDifferError if ranks have read different samples of a stream they all read whole.

    Args:
        source: the stream.
        epoch: number of the epoch being read.
        first: number of the first sample of the global batch.
        digests_by_rank: for each rank, the digests of the samples that it has read.
    """
    num_read = [len(digests) for digests in digests_by_rank]  # on each rank
    num_compared = min(num_read)

    found = ""  # describes the difference
    for place in range(num_compared):
        digests_of_ranks = [digests[place] for digests in digests_by_rank]
        if not all_digests_match(digests_of_ranks):
            found = describe_difference(first + place, digests_of_ranks)
            break

    # The samples that all ranks have read are equal, but the stream may have ended on some ranks.
    if not found and len(set(num_read)) > 1:
        ended_on = [str(rank) for rank, number in enumerate(num_read) if number == num_compared]
        found = (
            f"on rank {', '.join(ended_on)} it ends before sample {first + num_compared}, "
            "elsewhere it goes on"
        )

    if not found:
        return

    raise RanksDifferError(
        f"the stream {type(source.dataset).__name__}, read whole by every rank (epoch {epoch})",
        found,
        "if it splits itself over the ranks, pass shard=False to world.loader or let it give every "
        "rank everything; if it shuffles, seed it alike on all ranks; do not let the order depend "
        "on a set, os.listdir or the time",
        code="LS109",
    )


def _check_samples_are_distinct(
    source: IterableSource, epoch: int, first: int, digests_by_rank: list[list[Any]]
) -> None:
    """Raises RanksDifferError if two ranks have the same samples of a stream that is split.

    Args:
        source: the stream.
        epoch: number of the epoch being read.
        first: number of the first sample of the global batch.
        digests_by_rank: for each rank, the digests of the samples that it has read.
    """
    for rank, digests in enumerate(digests_by_rank):
        # If all samples of this rank are equal, they prove nothing: a stream of zeros is the same
        # on all ranks. The same is true if the rank has no samples.
        samples_are_all_equal = all_digests_match(digests)
        if samples_are_all_equal:
            continue

        other_ranks_with_same = []
        for other_rank, other_digests in enumerate(digests_by_rank):
            if other_rank != rank and digests_match(digests, other_digests):
                other_ranks_with_same.append(other_rank)

        if not other_ranks_with_same:
            continue
        ranks_with_same = [str(number) for number in sorted([rank, *other_ranks_with_same])]

        if source.shard is False:
            shard = "False"
            advice = "leave shard=False out: every rank then keeps its part of the stream"
        else:
            shard = "a function"
            advice = "let the function give the samples start, start + step, ... of the stream"

        raise RanksDifferError(
            f"shard={shard}, for a stream split over the ranks",
            f"ranks {', '.join(ranks_with_same)} were given the same samples (epoch {epoch}, from "
            f"sample {first} on)",
            advice,
            code="LS108",
        )


def check_length(collectives: Collectives, epoch: int, num_samples: int) -> None:
    """Compares how many samples the ranks have read of a stream that has ended. A collective.

    Raises:
        RanksDifferError: the numbers differ; raised on every rank.
    """
    _check_same_end(epoch, collectives.exchange(num_samples))


def _check_same_end(epoch: int, count_or_digests_by_rank: Sequence[int | list[Any]]) -> None:
    """Raises RanksDifferError if the stream has not ended at the same sample on all ranks.

    Args:
        epoch: number of the epoch being read.
        count_or_digests_by_rank: for each rank, the number of samples if its stream has ended, and
            otherwise the digests of the samples that it has read.
    """
    # The number of samples after which the stream has ended on each rank, or None: not yet.
    ends_by_rank = [value if isinstance(value, int) else None for value in count_or_digests_by_rank]
    if len(set(ends_by_rank)) == 1:
        return

    ends = []
    for rank, value in enumerate(ends_by_rank):
        end = "not yet" if value is None else f"after {value} samples"
        ends.append(f"{end} on rank {rank}")

    raise RanksDifferError(
        f"a stream that every rank reads (epoch {epoch})",
        "it ends " + ", ".join(ends),
        "let all ranks read the same data: compare the copies on the machines",
        code="LS104",
    )


class WorkerComparison:
    """Compares what the loader workers of one rank read in one pass over a stream.

    Args:
        source: the stream.
        topology: this rank's place in the run.
        epoch: number of the epoch that the pass reads.
    """

    def __init__(self, source: IterableSource, topology: Topology, epoch: int) -> None:
        self._source = source
        self._topology = topology
        self._epoch = epoch
        self._num_workers: int = source.options["num_workers"]
        self._first_reading: dict[int, tuple[int, list[Any]]] = {}
        """For each position of a global batch, the first worker that read it, and its digests."""
        self._first_end: tuple[int, int] | None = None
        """The first worker that reached the end of the stream, and how many samples it read."""

    def check(
        self,
        worker: int,
        digests_by_position: Mapping[int, list[Any]],
        num_samples_in_all: int | None,
    ) -> None:
        """Compares what a worker has read with what the other workers have read.

        `_check_samples` and `_check_end` remember what the first worker has read, to compare the
        later ones with it.

        Args:
            worker: number of the worker.
            digests_by_position: for some global batches, the digests of their first samples.
            num_samples_in_all: number of samples in the stream if the worker has reached its end,
                else None.

        Raises:
            DataError: the workers read different samples.
        """
        if self._num_workers < 2:
            return
        for position, digests in digests_by_position.items():
            self._check_samples(worker, position, digests)
        latest_position = max(digests_by_position, default=0)
        self._forget_old_readings(latest_position)
        if num_samples_in_all is not None:
            self._check_end(worker, num_samples_in_all)

    def _check_samples(self, worker: int, position: int, digests: list[Any]) -> None:
        """Raises DataError if another worker has read different samples of a global batch.

        Args:
            worker: number of the worker.
            position: position of the global batch in the epoch.
            digests: digests of the first samples of the global batch.
        """
        # The first worker that reads a global batch has nothing to be compared with.
        if position not in self._first_reading:
            self._first_reading[position] = (worker, digests)
            return

        # `Match.OTHER` means that these are other samples. It is no error if the same samples
        # differ in something random, such as the crop of an image (`Match.CHANGED`).
        other_worker, other_digests = self._first_reading[position]
        if match_samples(other_digests, digests) is Match.OTHER:
            self._raise_error(f"worker {worker} and worker {other_worker}, global batch {position}")

    def _check_end(self, worker: int, num_samples: int) -> None:
        """Raises DataError if another worker has read a different number of samples.

        Args:
            worker: number of the worker, which has reached the end of the stream.
            num_samples: number of samples that this worker has read.
        """
        if self._first_end is None:  # this worker is the first at the end
            self._first_end = (worker, num_samples)
            return

        other_worker, other_num_samples = self._first_end
        if other_num_samples != num_samples:
            self._raise_error(
                f"the stream gave worker {worker} {num_samples} samples, and worker {other_worker} "
                f"{other_num_samples}"
            )

    def _forget_old_readings(self, latest_position: int) -> None:
        """Forgets global batches that all workers have passed.

        Workers take turns, so all have passed a global batch once `num_workers` more are read.

        Args:
            latest_position: position of the global batch that was read last.
        """
        for position in list(self._first_reading):
            if position < latest_position - self._num_workers:
                del self._first_reading[position]

    def _raise_error(self, found: str) -> NoReturn:
        """Raises the DataError for workers that read different samples.

        Args:
            found: description of the difference.
        """
        where = f"epoch {self._epoch}"
        if self._topology.size > 1:
            where = f"rank {self._topology.rank}, {where}"
        raise DataError(
            f"the stream {type(self._source.dataset).__name__} with num_workers="
            f"{self._num_workers}: each worker reads the whole stream and takes every "
            f"{self._num_workers}th global batch",
            f"the workers read different samples ({where}: {found}), so some "
            "samples would come more than once and others not at all",
            "use num_workers=1, which reads as fast (several workers each read the whole stream); "
            "or let the stream draw its order from the global generators of torch, numpy or "
            "random, which are seeded alike in all workers, or from a generator that is seeded "
            "with the epoch",
            code="LS109",
        )
