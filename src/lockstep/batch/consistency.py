"""Checks that all ranks read the same data, by comparing a few samples of a dataset.

Machines may have different copies of the data, or list files in different orders, which a loss
would not show. Ranks compare *digests* of samples (`batch.digest`). This module does so for a
dataset with an index, when it is prepared. `stream_consistency` does it for a stream, while it is
read.

Every rank reads up to four samples, with the seeds that the loader would use, and fewer if reading
is slow. If the loader has workers, a worker reads them: a dataset may open files when it is first
read, which processes that are forked later must not share. Nothing is read if the run has only one
process, or if workers are not forked, because starting one would take seconds. Samples that differ
are read a second time. If a sample then differs from its own first reading, it is random in a way
that no seed controls, and is ignored.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.batch.digest import digest
from lockstep.batch.digest_matching import all_digests_match, digests_match
from lockstep.batch.source import Source
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.seeding import preserve_rng_state, seed_sample
from lockstep.errors import RanksDifferError
from lockstep.wording import describe_type, format_ranks

NUM_SAMPLES = 4
READ_TIME_LIMIT_S = 0.25
"""After this time no further sample is read."""
DRAW_BEFORE_PREPARE = (
    "split and draw data before world.prepare, after which every rank draws other random numbers, "
    "or with a seed"
)


def check_samples(source: Source, seed: int, collectives: Collectives) -> None:
    """Compares a few samples of a dataset with an index over all ranks. A collective.

    Streams are compared elsewhere, while they are read.

    Raises:
        RanksDifferError: an index stands for different samples; raised on all ranks.
    """
    is_stream = type(source) is not Source  # an `IterableSource`
    if collectives.single_process or is_stream:
        return

    indices = _spread_indices(len(source.dataset))  # type: ignore[arg-type]
    # For each sample, the digests on all ranks.
    first_reading = _read_on_all_ranks(source, seed, indices, collectives)

    differing_samples: list[int] = []  # by their place in `indices`
    for place, digests_of_ranks in enumerate(first_reading):
        # The digest is None if a rank could not read the sample.
        was_read = all(digest is not None for digest in digests_of_ranks)
        if was_read and not all_digests_match(digests_of_ranks):
            differing_samples.append(place)

    if not differing_samples:
        return

    # Read once more: a sample that differs from its own first reading is random, and no error.
    second_reading = _read_on_all_ranks(source, seed, indices, collectives)
    for place in differing_samples:
        # A reading ends early when time runs out on some rank, so the second one may be shorter.
        was_read_again = place < len(second_reading)
        if not was_read_again:
            continue

        if not _is_random(first_reading[place], second_reading[place]):
            raise RanksDifferError(
                f"{describe_type(source.dataset)} that is the same on every rank",
                describe_difference(indices[place], first_reading[place]),
                "compare the copies of the data on the machines; sort what os.listdir or a set "
                f"gives; shuffle, {DRAW_BEFORE_PREPARE}",
                code="LS104",
            )


def _is_random(digests_of_ranks: Sequence[Any], digests_of_ranks_again: Sequence[Any]) -> bool:
    """Returns True if a sample differed from its own first reading on some rank."""
    for first, second in zip(digests_of_ranks, digests_of_ranks_again, strict=True):
        if not digests_match(first, second):
            return True
    return False


def _spread_indices(length: int) -> list[int]:
    """Returns the indices of up to `NUM_SAMPLES` samples, from the first to the last."""
    if length == 0:
        return []
    last = length - 1
    # With 4 samples, these are at 0, 1/3, 2/3 and 3/3 of the way to the last index. In a short
    # dataset several of them may be the same sample, which the set holds once.
    indices = {last * number // (NUM_SAMPLES - 1) for number in range(NUM_SAMPLES)}
    return sorted(indices)


def _read_on_all_ranks(
    source: Source, seed: int, indices: Sequence[int], collectives: Collectives
) -> list[list[Any]]:
    """Reads samples on all ranks. A collective.

    Returns:
        For each sample, in the order of `indices`, its digests on all ranks. The list ends before
        the first sample that some rank has not read in time.
    """
    digests_by_rank = collectives.exchange(read_samples(source, seed, indices))
    num_read = min(len(digests) for digests in digests_by_rank)  # as many as on the slowest rank
    by_sample = []
    for place in range(num_read):
        by_sample.append([digests[place] for digests in digests_by_rank])
    return by_sample


def describe_difference(sample: int, digests_of_ranks: Sequence[Any]) -> str:
    """Describes which ranks have a different sample at an index than rank 0.

    Args:
        sample: index of the sample.
        digests_of_ranks: digest of the sample on each rank.
    """
    other_ranks = []
    for rank, digest_on_rank in enumerate(digests_of_ranks):
        if not digests_match(digest_on_rank, digests_of_ranks[0]):
            other_ranks.append(rank)
    where = format_ranks(other_ranks)
    return f"sample {sample} on {where} differs from sample {sample} on rank 0"


def read_samples(
    source: Source, seed: int, indices: Sequence[int], *, file_names: bool = False
) -> list[Any]:
    """Reads samples where the loader would read them, in this process or in a worker.

    Args:
        source: the dataset and its loader options.
        seed: seed of the run.
        indices: indices of the samples.
        file_names: True to include file names; see `digest`.

    Returns:
        The digests of the samples, in the order of `indices`; None for one that cannot be read. The
        list is shorter than `indices` if reading takes longer than `READ_TIME_LIMIT_S`. It is empty
        if starting a worker would take long, or if its `worker_init_fn` raises an error.
    """
    # An iterable dataset of digests. It ends early if `READ_TIME_LIMIT_S` have passed.
    reader = _DigestReader(source.dataset, seed, indices, file_names)
    loader_has_workers = source.options["num_workers"] > 0
    if loader_has_workers:
        return _read_in_worker(reader, source.options)

    with preserve_rng_state():
        return list(reader)


def _read_in_worker(reader: _DigestReader, options: Mapping[str, Any]) -> list[Any]:
    """Reads the digests in a worker process; see `read_samples` for when the result is empty.

    Args:
        reader: yields the digests.
        options: options of the loader for torch's DataLoader.
    """
    # The user may have chosen how workers are started: a context of the `multiprocessing` module.
    users_context = options["multiprocessing_context"]
    context = multiprocessing if users_context is None else users_context
    if context.get_start_method() != "fork":  # starting a worker would take seconds
        return []

    worker: DataLoader[Any] = DataLoader(
        reader,
        batch_size=None,  # the digests come one by one
        num_workers=1,
        multiprocessing_context=users_context,
        worker_init_fn=options["worker_init_fn"],
        generator=torch.Generator(),  # torch would draw the worker's seed from the global stream
    )
    try:
        return list(worker)
    except Exception:  # raised by `worker_init_fn`; the training loop will raise it again
        return []


class _DigestReader(IterableDataset[Any]):
    """Yields the digests of some samples of a dataset, until `READ_TIME_LIMIT_S` have passed."""

    def __init__(
        self, dataset: Dataset[Any], seed: int, indices: Sequence[int], file_names: bool
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.indices = indices
        self.file_names = file_names

    def __iter__(self) -> Iterator[Any]:
        begin = time.perf_counter()
        for number, index in enumerate(self.indices):
            is_late = time.perf_counter() - begin > READ_TIME_LIMIT_S
            if number > 0 and is_late:  # the first sample is always read
                return

            seed_sample(self.seed, 0, index)  # as the loader does in epoch 0
            try:
                digest_of_sample = digest(self.dataset[index], file_names=self.file_names)
            except Exception:  # the training loop will raise it again
                digest_of_sample = None

            yield digest_of_sample
