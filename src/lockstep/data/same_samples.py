"""Do all ranks have the same data? A few samples are read on every rank and compared.

Machines may hold different copies, and `os.listdir` gives each its own order. At most four samples
are read, under the seeds that the loader would give them, and fewer where reading takes long. Where
the loader has workers, one worker reads them: a dataset may open files when it is first read, and
processes that are forked later must not share these. Nothing is read on one process, nor where
workers are not forked, since starting one then takes seconds.

Samples that differ are read once more. What then differs from itself is drawn at random by other
means than the global streams, and is left alone.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.data.fetch import as_it_is
from lockstep.data.source import Source
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.seeding import preserve_rng_state, seed_sample
from lockstep.errors import RanksDifferError, some

_SAMPLES = 4
_PATIENCE_S = 0.25
"""After that no further sample is read."""
_LARGE = 2**16
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
    first = _everywhere(source, seed, indices, collectives)
    suspects = _differing(first)
    if not suspects:
        return
    again = _everywhere(source, seed, indices, collectives)
    steady = [
        n
        for n in suspects
        if all(len(b) > n and alike(a[n], b[n]) for a, b in zip(first, again, strict=True))
    ]
    if not steady:
        return
    raise RanksDifferError(
        f"a {type(source.dataset).__name__} that is the same on every rank",
        another(indices[steady[0]], [row[steady[0]] for row in first]),
        "compare the copies of the data on the machines; sort what os.listdir or a set gives, and "
        "seed what shuffles or draws",
        code="LS104",
    )


def another(sample: int, digests: Sequence[Any]) -> str:
    """Which ranks have another sample under a number than rank 0, in words.

    Args:
        sample: the number.
        digests: of what each rank has there.
    """
    others = [rank for rank, found in enumerate(digests) if not alike(found, digests[0])]
    shown = some([str(rank) for rank in others])
    several = "s" * (len(others) > 1)
    return f"sample {sample} of rank{several} {shown} is another one than that of rank 0"


def _everywhere(
    source: Source, seed: int, indices: Sequence[int], collectives: Collectives
) -> list[list[Any]]:
    """What every rank has read, as many samples as it read; None for one that it could not read."""
    mine = json.dumps(_read(source, seed, indices))
    return [json.loads(text) for text in collectives.exchange(mine)]


def _differing(read: Sequence[Sequence[Any]]) -> list[int]:
    """The places at which ranks that could read a sample do not agree."""
    return [
        n
        for n in range(min(map(len, read)))
        if all(row[n] is not None for row in read)
        and any(not alike(row[n], read[0][n]) for row in read)
    ]


def _read(source: Source, seed: int, indices: Sequence[int]) -> list[Any]:
    probe = Probe(source.dataset, seed, indices)
    if not source.options.get("num_workers"):
        with preserve_rng_state():
            return probe[0]
    context = source.options.get("multiprocessing_context")
    method = context if isinstance(context, str) or context is None else context.get_start_method()
    if (method or multiprocessing.get_start_method()) != "fork":
        return []
    worker: DataLoader[Any] = DataLoader(
        probe,
        batch_size=None,
        num_workers=1,
        multiprocessing_context=context,
        collate_fn=as_it_is,
        worker_init_fn=source.options.get("worker_init_fn"),
        generator=torch.Generator(),  # torch would draw the worker's seed from the global stream
    )
    try:
        (found,) = worker
    except Exception:  # of `worker_init_fn`: the training loop meets it at its own line
        return []
    return list(found)


class Probe(Dataset[Any]):
    """A dataset of one item: what `indices` of another one hold, in short."""

    def __init__(self, dataset: Dataset[Any], seed: int, indices: Sequence[int]) -> None:
        self.dataset, self.seed, self.indices = dataset, seed, indices

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> list[Any]:
        found: list[Any] = []
        begun = time.perf_counter()
        for index in self.indices:
            if found and time.perf_counter() - begun > _PATIENCE_S:
                break
            seed_sample(self.seed, 0, index)
            try:
                found.append(digest(self.dataset[index]))
            except Exception:  # whatever it is, the training loop meets it at its own line
                found.append(None)
        return found


def digest(value: Any) -> Any:
    """A sample in short, as JSON: exact but for measured numbers, of which there are many."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value if value.dtype in _NUMPY else value.to(torch.float32)).numpy()
    elif hasattr(value, "__array_interface__"):  # an image
        value = np.asarray(value)
    if isinstance(value, np.ndarray | np.generic):
        return _digest_array(np.asarray(value))
    if isinstance(value, str):  # a path may be this machine's own
        return "path" if "/" in value or "\\" in value else zlib.crc32(value.encode())
    if isinstance(value, bytes):
        return zlib.crc32(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return [[str(key), digest(item)] for key, item in value.items()]
    if isinstance(value, Sequence):
        return [digest(item) for item in value]
    return type(value).__name__


_NUMPY = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


def _digest_array(array: npt.NDArray[Any]) -> list[Any]:
    form = [str(array.dtype), list(array.shape)]
    if array.dtype.kind not in "biufc":
        return form
    array = array.reshape(-1)[:: max(1, array.size // _LARGE)]
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
