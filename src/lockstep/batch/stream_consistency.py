"""Do all ranks, and all loader workers, read the same from a stream? Compared while it is read.

What is compared are *digests* of the first samples of a global batch (`digest`), now and then. They
must be the same on all ranks if every rank reads the whole stream, and must not all be the same if
the stream is split over the ranks. Several loader workers of a rank each read all that the rank
reads, and take from it the global batches that are their own, so they must read the same too.
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
from lockstep.distributed.topology import Topology
from lockstep.errors import CheckpointError, DataError, RanksDifferError


def other_beginning_error(source: IterableSource, epoch: int, sample: int) -> CheckpointError:
    """Returns the error of a stream that does not begin as it did before the run was resumed.

    Args:
        source: the stream.
        epoch: in which the run was resumed.
        sample: the number of the first sample that is another one.
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
    """Compares what the ranks have read of a global batch of a stream. A collective.

    Args:
        collectives: of the run.
        source: the stream.
        epoch: that is being read.
        first: the number of the first sample of the global batch.
        digests: `batch_digests` of what this rank has read of it.

    Raises:
        RanksDifferError: raised on every rank.
    """
    every_rank_reads_whole = source.shard is None
    digests_by_rank = collectives.exchange(digests)
    if every_rank_reads_whole:
        # A rank on which the stream has ended has called `check_length` instead, whose exchange
        # meets this one. Its item in the list is a number of samples, and not a list of digests.
        _check_ends(epoch, digests_by_rank)
        _check_same_samples(source, epoch, first, digests_by_rank)
    else:
        # The first ranks have different parts of the stream. The ranks after them are the further
        # stages of a pipeline, which have the same samples as the first stage.
        digests_of_parts = digests_by_rank[: collectives.num_contributing_ranks]
        _check_other_samples(source, epoch, first, digests_of_parts)


def _check_same_samples(
    source: IterableSource, epoch: int, first: int, digests_by_rank: list[list[Any]]
) -> None:
    """Raises RanksDifferError if the ranks that read a whole stream have read other samples.

    Args:
        source: the stream.
        epoch: that is being read.
        first: the number of the first sample of the global batch.
        digests_by_rank: for each rank the digests of the samples that it has read.
    """
    num_read = [len(digests) for digests in digests_by_rank]  # on each rank
    num_compared = min(num_read)

    found = ""  # says how they differ
    for place in range(num_compared):
        digests_of_ranks = [digests[place] for digests in digests_by_rank]
        if not all_digests_match(digests_of_ranks):
            found = describe_difference(first + place, digests_of_ranks)
            break

    # What all ranks have read is equal. On some of them the stream may have ended there.
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


def _check_other_samples(
    source: IterableSource, epoch: int, first: int, digests_by_rank: list[list[Any]]
) -> None:
    """Raises RanksDifferError if two ranks have the same samples of a stream that is split.

    Args:
        source: the stream.
        epoch: that is being read.
        first: the number of the first sample of the global batch.
        digests_by_rank: for each rank the digests of the samples that it has read.
    """
    for digests in digests_by_rank:
        # If all samples of a rank are equal to each other, nothing can be said: a stream of zeros
        # is the same everywhere. This is also true if the rank has no samples.
        if all_digests_match(digests):
            continue

        ranks_with_same = []
        for rank, other in enumerate(digests_by_rank):
            if digests_match(digests, other):
                ranks_with_same.append(str(rank))

        if len(ranks_with_same) == 1:  # the rank that they are of, and no other
            continue

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
        RanksDifferError: raised on every rank.
    """
    _check_ends(epoch, collectives.exchange(num_samples))


def _check_ends(epoch: int, found_by_rank: Sequence[Any]) -> None:
    """Raises RanksDifferError if the stream has ended on some ranks, and elsewhere later.

    Args:
        epoch: that is being read.
        found_by_rank: for each rank the number of samples if its stream has ended; otherwise the
            digests of the samples that it has read.
    """
    some_ended = any(isinstance(found, int) for found in found_by_rank)
    all_equal = all(found == found_by_rank[0] for found in found_by_rank)
    if not some_ended or all_equal:
        return

    ends = []
    for rank, found in enumerate(found_by_rank):
        end = f"after {found} samples" if isinstance(found, int) else "not yet"
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
        topology: of this rank.
        epoch: of the pass.
    """

    def __init__(self, source: IterableSource, topology: Topology, epoch: int) -> None:
        self._source = source
        self._topology = topology
        self._epoch = epoch
        self._num_workers: int = source.options["num_workers"]
        self._first_reading: dict[int, tuple[int, list[Any]]] = {}
        """The first worker that read a global batch, and its digests, by the batch's position."""
        self._first_end: tuple[int, int] | None = None
        """The first worker that has come to the end of the stream, and how many samples it gave."""

    def check(
        self,
        worker: int,
        digests_by_position: Mapping[int, list[Any]],
        num_samples_in_all: int | None,
    ) -> None:
        """Compares what a worker has read with what the other workers have read.

        Keeps what it was given, so that the next worker can be compared with it.

        Args:
            worker: its number.
            digests_by_position: digests of the first samples of some global batches.
            num_samples_in_all: how many samples the stream has, if the worker has come to its end.

        Raises:
            DataError: the workers read different samples.
        """
        if self._num_workers < 2:
            return
        for position, digests in digests_by_position.items():
            self._check_samples(worker, position, digests)
        self._forget_old_readings(latest=max(digests_by_position, default=0))
        if num_samples_in_all is not None:
            self._check_end(worker, num_samples_in_all)

    def _check_samples(self, worker: int, position: int, digests: list[Any]) -> None:
        """Raises DataError if another worker has read other samples of a global batch.

        If this worker is the first that has read it, its digests are kept for the next one.

        Args:
            worker: the number of the worker.
            position: of the global batch.
            digests: of the first samples of the global batch.
        """
        if position not in self._first_reading:
            self._first_reading[position] = (worker, digests)
            return
        other_worker, other_digests = self._first_reading[position]
        # Samples of which only something random differs, such as an image's crop, are no error.
        if match_samples(other_digests, digests) is Match.OTHER:
            self._raise_error(f"worker {worker} and worker {other_worker}, global batch {position}")

    def _check_end(self, worker: int, num_samples: int) -> None:
        """Raises DataError if the stream has given another worker another number of samples.

        Args:
            worker: the number of the worker, which has come to the end of the stream.
            num_samples: how many samples the stream gave this worker.
        """
        if self._first_end is None:  # this worker is the first at the end
            self._first_end = (worker, num_samples)
            return

        other_worker, other_num_samples = self._first_end
        if other_num_samples != num_samples:
            self._raise_error(
                f"it gave worker {worker} {num_samples} samples, and worker {other_worker} "
                f"{other_num_samples}"
            )

    def _forget_old_readings(self, latest: int) -> None:
        """Forgets the readings of global batches that all workers have passed.

        The workers take turns, so each reads past a global batch within the next `num_workers`.

        Args:
            latest: the position of the global batch that was read last.
        """
        for position in list(self._first_reading):
            if position < latest - self._num_workers:
                del self._first_reading[position]

    def _raise_error(self, found: str) -> NoReturn:
        """Raises the DataError of workers that read different samples; `found` says which."""
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
