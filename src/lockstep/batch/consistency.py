"""Do all ranks read the same data? A few samples are compared; a loss would not show it.

Machines may hold different copies, and `os.listdir` gives each its own order.

Of a dataset with an index (`check_samples`, when it is prepared) at most four samples are read on
every rank, under the seeds that the loader would give them, and fewer where reading takes long.
Where the loader has workers, one worker reads them: a dataset may open files when it is first read,
and processes that are forked later must not share these. Nothing is read on one process, nor where
workers are not forked, since starting one then takes seconds. Samples that differ are read once
more. What then differs from itself is drawn at random by other means than the global streams, and
is left alone.

Of an iterable (`check_global_batch`, now and then while it is read) the first samples of a global
batch are compared: they must be the same where every rank reads the whole of it, and must not all
be the same where it is split. Each of several loader workers reads the whole of what its rank
reads, and takes the global batches from it that are its own, so all workers must read the same too:
`WorkerComparison`.

Are these the data that an earlier start of the training read? See `fingerprint`; here it is read
(`read_fingerprint`) and judged (`check_fingerprint`).
"""

from __future__ import annotations

import multiprocessing
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.batch.fingerprint import (
    Fingerprint,
    Match,
    Parts,
    alike,
    all_alike,
    compare,
    match_samples,
    parts_of,
)
from lockstep.batch.source import IterableSource, Source, index_bytes, subset_indices
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.seeding import preserve_rng_state, seed_sample
from lockstep.distributed.topology import Topology
from lockstep.errors import CheckpointError, DataError, RanksDifferError, warn
from lockstep.wording import join_first

_SAMPLES = 4
SAMPLES_COMPARED = 16
_TIME_LIMIT_S = 0.25
"""After that no further sample is read."""
_NUMBERS, _NUMBERS_OF_BATCH = 2**16, 512
"""Numbers of an array that are looked at, evenly spread."""
_SMALL = 16
"""Numbers that are compared one by one, whatever they are."""
DRAW_BEFORE_PREPARE = (
    "split and draw data before world.prepare, after which every rank draws other random numbers, "
    "or with a seed"
)
HUGGING_FACE_FINGERPRINT = "_fingerprint"
"""The attribute of `datasets.Dataset` that its documentation calls the fingerprint."""
_FINGERPRINT_SAMPLES = 32
_STRIDE = 13
"""Has no divisor in common with the number of samples of a fingerprint. Every so many of them come
one after the other, so that those which are read in time are spread over the dataset."""


def check_samples(source: Source, seed: int, collectives: Collectives) -> None:
    """Compares a few samples of a dataset with an index over all ranks; alone it reads nothing.

    Raises:
        RanksDifferError: an index stands for different samples; on all ranks.
    """
    if collectives.alone or type(source) is not Source:
        return
    last = len(source.dataset) - 1  # type: ignore[arg-type]
    indices = sorted({last * n // (_SAMPLES - 1) for n in range(_SAMPLES if last >= 0 else 0)})
    # By sample, what every rank has read; as many samples as all of them read in time.
    first = list(zip(*collectives.exchange(read_samples(source, seed, indices)), strict=False))
    differing = [n for n, row in enumerate(first) if None not in row and not all_alike(row)]
    if not differing:
        return
    again = list(zip(*collectives.exchange(read_samples(source, seed, indices)), strict=False))
    for n in differing:
        if n < len(again) and all(map(alike, first[n], again[n])):
            raise RanksDifferError(
                f"a {type(source.dataset).__name__} that is the same on every rank",
                _difference(indices[n], first[n]),
                "compare the copies of the data on the machines; sort what os.listdir or a set "
                f"gives; shuffle, {DRAW_BEFORE_PREPARE}",
                code="LS104",
            )


def read_samples(
    source: Source, seed: int, indices: Sequence[int], *, file_names: bool = False
) -> list[Any]:
    """Digests of samples, as many as there is time for; None for one that cannot be read."""
    digests = _Digests(source.dataset, seed, indices, file_names)
    if not source.options["num_workers"]:
        with preserve_rng_state():
            return list(digests)
    context = source.options["multiprocessing_context"] or multiprocessing
    if context.get_start_method() != "fork":
        return []
    worker: DataLoader[Any] = DataLoader(
        digests,
        batch_size=None,
        num_workers=1,
        multiprocessing_context=source.options["multiprocessing_context"],
        worker_init_fn=source.options["worker_init_fn"],
        generator=torch.Generator(),  # torch would draw the worker's seed from the global stream
    )
    try:
        return list(worker)
    except Exception:  # of `worker_init_fn`: the training loop meets it at its own line
        return []


class _Digests(IterableDataset[Any]):
    """What some samples of a dataset hold, in short, as long as there is time to read them."""

    def __init__(
        self, dataset: Dataset[Any], seed: int, indices: Sequence[int], file_names: bool
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.indices = indices
        self.file_names = file_names

    def __iter__(self) -> Iterator[Any]:
        begun = time.perf_counter()
        for number, index in enumerate(self.indices):
            if number and time.perf_counter() - begun > _TIME_LIMIT_S:
                return
            seed_sample(self.seed, 0, index)
            try:
                found = digest(self.dataset[index], file_names=self.file_names)
            except Exception:  # whatever it is, the training loop meets it at its own line
                found = None
            yield found


def read_fingerprint(source: Source, seed: int) -> Fingerprint | None:
    """Reads the fingerprint of a dataset with an index; of a stream there is none."""
    if isinstance(source, IterableSource):
        return None
    last = len(source.dataset) - 1  # type: ignore[arg-type]
    wanted: list[int] = []
    for number in range(_FINGERPRINT_SAMPLES):
        place = number * _STRIDE % _FINGERPRINT_SAMPLES
        index = last * place // (_FINGERPRINT_SAMPLES - 1)
        if index >= 0 and index not in wanted:
            wanted.append(index)
    twice = [index for index in wanted for _ in range(2)]
    digests = read_samples(source, seed, twice, file_names=True)
    read: dict[int, Parts] = {}
    random: set[str] = set()
    for index, first, second in zip(wanted, digests[0::2], digests[1::2], strict=False):
        if first is not None and second is not None:
            read[index] = parts_of(first)
            random |= _unequal_parts(read[index], parts_of(second))
    # What is drawn in one sample is drawn in all, also where two draws were equal by chance.
    samples = {
        index: {name: part for name, part in parts.items() if name not in random}
        for index, parts in read.items()
    }
    name = getattr(source.dataset, HUGGING_FACE_FINGERPRINT, None)
    return Fingerprint(
        subsets=[zlib.crc32(index_bytes(indices)) for indices in subset_indices(source.dataset)],
        hugging_face=name if isinstance(name, str) else None,
        samples=samples,
    )


def _unequal_parts(first: Parts, second: Parts) -> set[str]:
    """The names of the parts that were not exactly the same when a sample was read again."""
    return {name for name, part in first.items() if repr(part) != repr(second.get(name))}


def check_fingerprint(source: Source, before: Fingerprint, now: Fingerprint) -> None:
    """Compares the data of a checkpoint with those of the run that resumes it.

    Raises:
        CheckpointError: they are others; it warns where they may be the same.
    """
    difference = compare(before, now)
    name = type(source.dataset).__name__
    if difference is None:
        return
    if difference.other_samples:
        raise CheckpointError(
            f"resuming a loader of a {name} of {source.length} samples",
            f"it is not the data of the checkpoint, although the length is the same: "
            f"{difference.found}",
            "continue with the data that the training began with; if they were split or drawn at "
            "random, do so after lockstep.init(seed=...) and before world.prepare, or with a seed "
            "of their own; to train on other data, leave the loader out of the checkpoint",
        )
    warn(
        f"resuming a loader of a {name} of {source.length} samples",
        f"{difference.found}; other parts of them, such as the labels, are as in the checkpoint",
        "nothing, if you changed how samples are prepared; otherwise continue with the data of "
        "the checkpoint",
    )


def other_beginning(source: IterableSource, epoch: int, place: int) -> CheckpointError:
    """The error where a stream does not begin as it did before the run was resumed."""
    return CheckpointError(
        f"resuming the stream {type(source.dataset).__name__} in the middle of epoch {epoch}",
        f"sample {place} of this epoch is not the one that the checkpoint's run read there, so "
        "some samples would be trained twice and others not at all",
        "continue with the same data; let a stream that shuffles draw from the global generators "
        "of torch, numpy or random, or from one that is seeded with the epoch; or resume from a "
        "checkpoint that was saved between two epochs",
    )


def check_global_batch(
    collectives: Collectives, source: IterableSource, epoch: int, first: int, mine: list[Any]
) -> None:
    """Compares what the ranks have read of a global batch of an iterable. A collective.

    Args:
        collectives: of the run.
        source: the iterable.
        epoch: that is being read.
        first: the first sample of the global batch.
        mine: `batch_digests` of what this rank has read of it.

    Raises:
        RanksDifferError: on every rank.
    """
    rows = collectives.exchange(mine)
    if source.shard is None:
        _check_ends(epoch, rows)
        _check_same(source, epoch, first, rows)
        return
    parts = rows[: collectives.data_parallel.size]
    # A part all of whose samples are alike tells nothing: a stream of zeros is the same everywhere.
    for part in parts:
        twins = [str(rank) for rank, other in enumerate(parts) if alike(part, other)]
        if len(twins) > 1 and not all_alike(part):
            own = source.shard is False
            raise RanksDifferError(
                f"shard={'False' if own else 'a function'}, for a stream split over the ranks",
                f"ranks {', '.join(twins)} were given the same samples (epoch {epoch}, from sample "
                f"{first} on)",
                "leave shard=False out: every rank then keeps its part of the stream"
                if own
                else "let the function give the samples start, start + step, ... of the stream",
                code="LS108",
            )


def check_length(collectives: Collectives, epoch: int, samples: int) -> None:
    """Compares how many samples the ranks have read when an iterable is at its end. A collective.

    Raises:
        RanksDifferError: on every rank.
    """
    _check_ends(epoch, collectives.exchange(samples))


def _check_ends(epoch: int, found: Sequence[Any]) -> None:
    """Of ranks whose stream is at its end after a number of samples, and ranks that go on."""
    if any(isinstance(n, int) for n in found) and any(n != found[0] for n in found):
        ends = [f"after {n} samples" if isinstance(n, int) else "not yet" for n in found]
        raise RanksDifferError(
            f"a stream that every rank reads (epoch {epoch})",
            "it ends " + ", ".join(f"{end} on rank {rank}" for rank, end in enumerate(ends)),
            "let all ranks read the same data: compare the copies on the machines",
            code="LS104",
        )


class WorkerComparison:
    """Compares what the loader workers of one rank read in one pass over an iterable.

    Args:
        source: the iterable.
        topology: of this rank.
        epoch: of the pass.
    """

    def __init__(self, source: IterableSource, topology: Topology, epoch: int) -> None:
        self._source = source
        self._topology = topology
        self._epoch = epoch
        self._num_workers: int = source.options["num_workers"]
        self._digests: dict[int, tuple[int, list[Any]]] = {}
        """By the position of a global batch: a worker that has read it, and its digests."""
        self._end: tuple[int, int] | None = None
        """A worker that came to the end of the iterable, and the samples that it gave."""

    def check(
        self, worker: int, digests: Mapping[int, list[Any]], samples_in_all: int | None
    ) -> None:
        """Compares what a worker has read with what the others have.

        Args:
            worker: its number.
            digests: of the first samples of global batches, by their position.
            samples_in_all: samples of the iterable, where the worker has come to its end.

        Raises:
            DataError: the workers read different samples.
        """
        if self._num_workers < 2:
            return
        for position, mine in digests.items():
            other, theirs = self._digests.setdefault(position, (worker, mine))
            if match_samples(theirs, mine) is Match.OTHER:
                self._raise_of(f"worker {worker} and worker {other}, global batch {position}")
        # The other workers read past a global batch before each has given another one.
        latest = max(digests, default=0)
        for position in [p for p in self._digests if p < latest - self._num_workers]:
            del self._digests[position]
        if samples_in_all is None:
            return
        if self._end is None:
            self._end = worker, samples_in_all
        other, samples = self._end
        if samples != samples_in_all:
            self._raise_of(
                f"it gave worker {worker} {samples_in_all} samples, and worker {other} {samples}"
            )

    def _raise_of(self, found: str) -> NoReturn:
        rank = f"rank {self._topology.rank}, " if self._topology.size > 1 else ""
        raise DataError(
            f"the stream {type(self._source.dataset).__name__} with num_workers="
            f"{self._num_workers}: each worker reads the whole stream and takes every "
            f"{self._num_workers}th global batch",
            f"the workers read different samples ({rank}epoch {self._epoch}: {found}), so some "
            "samples would come more than once and others not at all",
            "use num_workers=1, which reads as fast (several workers each read the whole stream); "
            "or let the stream draw its order from the global generators of torch, numpy or "
            "random, which are seeded alike in all workers, or from a generator that is seeded "
            "with the epoch",
            code="LS109",
        )


def _check_same(source: IterableSource, epoch: int, first: int, rows: list[list[Any]]) -> None:
    counts = [len(row) for row in rows]
    shortest = min(counts)
    differing = (n for n in range(shortest) if not all_alike([row[n] for row in rows]))
    place = next(differing, shortest)
    if place < shortest:
        found = _difference(first + place, [row[place] for row in rows])
    elif len(set(counts)) > 1:
        ended = ", ".join(str(r) for r, count in enumerate(counts) if count == shortest)
        found = f"on rank {ended} it ends before sample {first + place}, elsewhere it goes on"
    else:
        return
    raise RanksDifferError(
        f"the stream {type(source.dataset).__name__}, read whole by every rank (epoch {epoch})",
        found,
        "if it splits itself over the ranks, pass shard=False to world.loader or let it give every "
        "rank everything; if it shuffles, seed it alike on all ranks; do not let the order depend "
        "on a set, os.listdir or the time",
        code="LS109",
    )


def _difference(sample: int, digests: Sequence[Any]) -> str:
    """Which ranks have another sample at an index than rank 0, in words."""
    others = [rank for rank, found in enumerate(digests) if not alike(found, digests[0])]
    shown = join_first([str(rank) for rank in others])
    several = "s" * (len(others) > 1)
    return f"sample {sample} on rank{several} {shown} differs from sample {sample} on rank 0"


def batch_digests(samples: Sequence[Any]) -> list[Any]:
    """The digests of the first samples of a batch; None for one of which none can be made."""
    digests: list[Any] = []
    for sample in islice(samples, SAMPLES_COMPARED):
        try:
            digests.append(digest(sample, _NUMBERS_OF_BATCH))
        except Exception:  # a class of the user's own that only looks like a list or an array
            digests.append(None)
    return digests


def digest(value: Any, most: int = _NUMBERS, *, file_names: bool = False) -> Any:
    """A sample in short, as JSON: exact but for measured numbers, of which there are many.

    Args:
        value: the sample.
        most: about half as many numbers of an array as are looked at, at most.
        file_names: whether a path counts with its last part. Its folders are this machine's own.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return [str(value.dtype), list(value.shape)]
        value = value.detach().cpu()
        value = (value if value.dtype in _NUMPY else value.to(torch.float32)).numpy()
    elif hasattr(value, "__array_interface__"):  # an image
        value = np.asarray(value)
    if isinstance(value, np.ndarray | np.generic):
        return _digest_array(np.asarray(value), most)
    if isinstance(value, str):
        last_part = value.replace("\\", "/").rpartition("/")[2]
        if last_part != value and not file_names:  # a path may be this machine's own
            return "path"
        return zlib.crc32(last_part.encode())
    if isinstance(value, bytes):
        return zlib.crc32(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return [
            [str(key), digest(item, most, file_names=file_names)] for key, item in value.items()
        ]
    if isinstance(value, Sequence):
        return [digest(item, most, file_names=file_names) for item in value]
    return type(value).__name__


_NUMPY = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


def _digest_array(array: npt.NDArray[Any], most: int) -> list[Any]:
    form = [str(array.dtype), list(array.shape)]
    if array.dtype.kind not in "biufc":
        return form
    array = array.reshape(-1)[:: max(1, array.size // most)]
    if array.dtype.kind != "f" and (array.dtype != np.uint8 or array.size <= _SMALL):
        return [*form, zlib.crc32(np.ascontiguousarray(array).tobytes())]
    if array.size <= _SMALL:
        return [*form, *array.astype(np.float64).tolist()]
    numbers = array.astype(np.float64)
    sizes = np.abs(numbers)
    weights = np.linspace(0.5, 1.5, len(numbers))
    means = sizes.mean(), (sizes * weights).mean(), np.maximum(numbers, 0.0).mean()
    return [*form, *map(float, means)]
