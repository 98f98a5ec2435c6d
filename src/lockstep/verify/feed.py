"""The same batches for one process as for several, to compare what lies behind the samples.

The ranks of the run on several processes write each batch that a DataLoader of torch hands out to
train on. On one process every DataLoader then hands out, batch by batch, what those of all ranks
were together: in the order of the ranks, whatever the script's own samplers and datasets do there.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import UsageError

_LENGTHS = "lengths.json"


class Fed(NamedTuple):
    """A batch, and the indices of its samples where they are known."""

    batch: Any
    ids: list[int] | None


class _Places:
    """Numbers a script's DataLoaders, in the order in which they were built, and their passes."""

    def __init__(self) -> None:
        self._built: list[Any] = []
        self._passes: Counter[int] = Counter()

    def build(self, loader: Any) -> None:
        """A DataLoader has been built."""
        self._built.append(loader)

    def number(self, loader: Any) -> int | None:
        """Which one it is; None: it was built before anything was watched."""
        return next((n for n, each in enumerate(self._built) if each is loader), None)

    def begin(self, loader: Any) -> str:
        """A pass over it begins; returns what its batches are called."""
        number = self.number(loader)
        called = -1 if number is None else number
        self._passes[called] += 1
        return f"{called}-{self._passes[called]}"

    @property
    def built(self) -> Sequence[Any]:
        """All that were built."""
        return self._built


class BatchWriter(_Places):
    """Keeps the batches of one rank.

    Args:
        folder: for those of all ranks.
        rank: whose.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__()
        self._folder = folder / f"rank{rank}"
        self._folder.mkdir(parents=True)

    def keep(self, place: str, number: int, fed: Fed) -> None:
        """Writes one.

        Raises:
            UsageError: it holds something that cannot be written.
        """
        try:
            data = pickle.dumps(fed)
        except Exception as error:
            raise UsageError(
                "lockstep verify --same-samples",
                f"a batch cannot be kept for the run on one process: {error}",
                "leave the option out, or let the loader give tensors, numbers and text",
            ) from error
        (self._folder / f"{place}-{number}.pickle").write_bytes(data)

    def close(self) -> None:
        """Writes how many batches each DataLoader has, where they say so."""
        lengths = {}
        for number, loader in enumerate(self.built):
            try:
                lengths[number] = len(loader)
            except TypeError:  # a stream
                continue
        (self._folder / _LENGTHS).write_text(json.dumps(lengths))


class BatchReader(_Places):
    """Joins what the ranks of another run have kept.

    Args:
        folder: of those of all ranks.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folders = sorted(folder.glob("rank*"), key=lambda path: int(path.name[4:]))

    def batches(self, place: str) -> Iterator[Fed]:
        """Those of a pass; each is that of all ranks that had one.

        Raises:
            UsageError: those of the ranks cannot be joined.
        """
        number = 0
        while True:
            paths = [folder / f"{place}-{number}.pickle" for folder in self._folders]
            # Written by our own processes, in a folder of this user alone.
            parts = [pickle.loads(path.read_bytes()) for path in paths if path.exists()]
            if not parts:
                return
            ids = [part.ids for part in parts]
            known = None if None in ids else [index for each in ids for index in each]
            yield Fed(join([part.batch for part in parts]), known)
            number += 1

    def length(self, loader: Any) -> int | None:
        """How many batches a rank of the other run has; None: it is not known."""
        number = self.number(loader)
        for folder in self._folders:
            path = folder / _LENGTHS
            lengths = json.loads(path.read_text()) if path.exists() else {}
            if number is not None and str(number) in lengths:
                found: int = lengths[str(number)]
                return found
        return None


def join(parts: Sequence[Any]) -> Any:
    """One batch made of those of the ranks: tensors and lists one behind the other.

    Raises:
        UsageError: they do not fit.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return _joined_tensors(parts)
    if isinstance(first, Mapping):
        joined = {key: join([part[key] for part in parts]) for key in first}
        return joined if type(first) is dict else type(first)(joined)  # type: ignore[call-arg]
    if isinstance(first, tuple) and hasattr(first, "_replace"):  # a named tuple
        return type(first)(*map(join, zip(*parts, strict=True)))
    if isinstance(first, list | tuple) and any(isinstance(leaf, Tensor) for leaf in first):
        return type(first)(map(join, zip(*parts, strict=True)))
    if isinstance(first, list | tuple):
        return type(first)(leaf for part in parts for leaf in part)
    return first


def _joined_tensors(parts: Sequence[Tensor]) -> Tensor:
    if not parts[0].dim():
        return parts[0]
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = " and ".join(str(list(part.shape)) for part in parts)
        raise UsageError(
            "lockstep verify --same-samples",
            f"the batches of the ranks have tensors of shapes {shapes}, which make no one batch",
            "leave the option out, or pad all batches to one length",
        )
    return torch.cat(list(parts))
