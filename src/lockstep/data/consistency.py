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
"""

from __future__ import annotations

import math
import multiprocessing
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.data.source import IterableSource, Source
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.seeding import preserve_rng_state, seed_sample
from lockstep.distributed.topology import Topology
from lockstep.errors import DataError, RanksDifferError, some

_SAMPLES = 4
SAMPLES_COMPARED = 16
_TIME_LIMIT_S = 0.25
"""After that no further sample is read."""
_NUMBERS, _NUMBERS_OF_BATCH = 2**16, 512
"""Numbers of an array that are looked at, evenly spread."""
_SMALL = 16
"""Numbers that are compared one by one, whatever they are."""
_TOLERANCE = 1e-3
"""Relative; machines decode images and round sums a little differently."""


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
    first = list(zip(*collectives.exchange(_read(source, seed, indices)), strict=False))
    differing = [n for n, row in enumerate(first) if None not in row and not _all_alike(row)]
    if not differing:
        return
    again = list(zip(*collectives.exchange(_read(source, seed, indices)), strict=False))
    for n in differing:
        if n < len(again) and all(map(alike, first[n], again[n])):
            raise RanksDifferError(
                f"a {type(source.dataset).__name__} that is the same on every rank",
                _difference(indices[n], first[n]),
                "compare the copies of the data on the machines; sort what os.listdir or a set "
                "gives, and seed what shuffles or draws",
                code="LS104",
            )


def _read(source: Source, seed: int, indices: Sequence[int]) -> list[Any]:
    """Digests of samples, as many as there is time for; None for one that cannot be read."""
    digests = _Digests(source.dataset, seed, indices)
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

    def __init__(self, dataset: Dataset[Any], seed: int, indices: Sequence[int]) -> None:
        self.dataset, self.seed, self.indices = dataset, seed, indices

    def __iter__(self) -> Iterator[Any]:
        begun = time.perf_counter()
        for number, index in enumerate(self.indices):
            if number and time.perf_counter() - begun > _TIME_LIMIT_S:
                return
            seed_sample(self.seed, 0, index)
            try:
                found = digest(self.dataset[index])
            except Exception:  # whatever it is, the training loop meets it at its own line
                found = None
            yield found


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
        if len(twins) > 1 and not _all_alike(part):
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


class Match(Enum):
    """How the same places of two readings of a dataset compare."""

    SAME = "the samples are the same"
    CHANGED = "something in all samples is the same, such as the labels, and something differs"
    OTHER = "nothing that tells the samples apart is the same"


def match_samples(before: Sequence[Any], now: Sequence[Any]) -> Match:
    """Compares the digests of the same samples in two readings; more of one are left out.

    Where one part of the samples differs, an image perhaps, and another one is as before in all of
    them, the label perhaps, they are the same samples, of which something was drawn or computed in
    another way. Only a part that is not the same in all samples can tell this.
    """
    pairs = list(zip(map(parts_of, before), map(parts_of, now), strict=False))
    if all(alike_parts(old, new) for old, new in pairs):
        return Match.SAME
    first = pairs[0][0]
    for name in first:
        values = [old.get(name) for old, _ in pairs]
        tells_apart = len(pairs) == 1 or not _all_alike(values)
        unchanged = all(name in new and alike(old.get(name), new[name]) for old, new in pairs)
        if tells_apart and unchanged:
            return Match.CHANGED
    return Match.OTHER


def alike_parts(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two samples are the same in every part."""
    return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)


def parts_of(found: Any, name: str = "sample") -> dict[str, Any]:
    """The parts of a sample, such as image and label, from its digest; each has a name."""
    if not isinstance(found, list) or _is_array(found) or _is_long_list_of_values(found):
        return {name: found}
    parts: dict[str, Any] = {}
    for number, item in enumerate(found):
        if isinstance(item, list) and len(item) == 2 and isinstance(item[0], str):
            key, value = item  # of a mapping
            if not _is_array(item):
                parts |= parts_of(value, f"{name}[{key!r}]")
                continue
        parts |= parts_of(item, f"{name}[{number}]")
    return parts


def _is_array(found: list[Any]) -> bool:
    """Whether this is the digest of an array: dtype, shape, and what tells its numbers."""
    if len(found) < 2 or not isinstance(found[0], str) or not isinstance(found[1], list):
        return False
    return all(type(size) is int for size in found[1])


def _is_long_list_of_values(found: list[Any]) -> bool:
    """Whether these are the values of one thing, such as tokens, rather than several things."""
    return len(found) > _SMALL and not any(isinstance(item, list) for item in found)


def _check_same(source: IterableSource, epoch: int, first: int, rows: list[list[Any]]) -> None:
    counts = [len(row) for row in rows]
    shortest = min(counts)
    differing = (n for n in range(shortest) if not _all_alike([row[n] for row in rows]))
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
    shown = some([str(rank) for rank in others])
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


def digest(value: Any, most: int = _NUMBERS) -> Any:
    """A sample in short, as JSON: exact but for measured numbers, of which there are many.

    Of an array at most about twice `most` numbers are looked at.
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
    if isinstance(value, str):  # a path may be this machine's own
        return "path" if "/" in value or "\\" in value else zlib.crc32(value.encode())
    if isinstance(value, bytes):
        return zlib.crc32(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return [[str(key), digest(item, most)] for key, item in value.items()]
    if isinstance(value, Sequence):
        return [digest(item, most) for item in value]
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


def alike(one: Any, other: Any) -> bool:
    """Whether two digests are of the same sample."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-9)
    return bool(one == other)


def _all_alike(digests: Sequence[Any]) -> bool:
    return all(alike(one, digests[0]) for one in digests)
