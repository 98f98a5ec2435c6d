"""Gives one process the batches that several processes trained on, for `--same-samples`.

The ranks of the run on several processes write each batch that a DataLoader of torch gives them to
train on. On one process, every DataLoader then gives, batch by batch, those of all ranks, joined in
the order of the ranks. A *pass* is one iteration over a DataLoader. It is named by the number of
the loader, in the order in which they were built, and the number of the pass: `0-1`, `0-2`, ...

So everything else can be compared even if samplers or augmentation differ.
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

LENGTHS_FILE = "lengths.json"


class LoadedBatch(NamedTuple):
    """A batch, and the indices of its samples in the dataset; None if they are not known."""

    batch: Any
    ids: list[int] | None


class _PassNames:
    """Numbers a script's DataLoaders and names the passes over them."""

    def __init__(self) -> None:
        self._loaders: list[Any] = []  # in the order of their numbers
        self._passes_of_loader: Counter[int] = Counter()  # how many have begun, by loader number

    def add_loader(self, loader: Any) -> None:
        """Numbers a DataLoader that was built."""
        self._loaders.append(loader)

    def number_of(self, loader: Any) -> int | None:
        """Returns the number of a loader; None if it was built before loaders were watched."""
        for number, known_loader in enumerate(self._loaders):
            if known_loader is loader:
                return number
        return None

    def begin_pass(self, loader: Any) -> str:
        """Counts a pass over a loader that begins, and returns its name, such as `0-2`."""
        number = self.number_of(loader)
        if number is None:
            number = -1  # all loaders that were not numbered count as one
        self._passes_of_loader[number] += 1
        return f"{number}-{self._passes_of_loader[number]}"


class BatchWriter(_PassNames):
    """Writes the batches of one rank.

    Args:
        folder: for the batches of all ranks.
        rank: the rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__()
        self._folder = folder / f"rank{rank}"
        self._folder.mkdir(parents=True)

    def write(self, name_of_pass: str, number: int, batch: LoadedBatch) -> None:
        """Writes a batch of a pass into a file of its own.

        Args:
            name_of_pass: as `begin_pass` returned it.
            number: of the batch in the pass, from 0.
            batch: the batch.

        Raises:
            UsageError: it contains something that cannot be pickled.
        """
        try:
            data = pickle.dumps(batch)
        except Exception as error:
            raise UsageError(
                "lockstep verify --same-samples",
                f"a batch cannot be kept for the run on one process: {error}",
                "leave the option out, or let the loader give tensors, numbers and text",
            ) from error

        (self._folder / f"{name_of_pass}-{number}.pickle").write_bytes(data)

    def write_lengths(self) -> None:
        """Writes the number of batches of each DataLoader that has a length."""
        lengths = {}
        for number, loader in enumerate(self._loaders):
            try:
                lengths[number] = len(loader)
            except TypeError:  # its dataset is a stream, which has no length
                continue
        (self._folder / LENGTHS_FILE).write_text(json.dumps(lengths))


class BatchReader(_PassNames):
    """Reads and joins the batches that the ranks of another run have written.

    Args:
        folder: with the batches of all ranks.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folders = sorted(folder.glob("rank*"), key=_rank_of_folder)

    def batches(self, name_of_pass: str) -> Iterator[LoadedBatch]:
        """Yields the batches of a pass: the first ones of all ranks joined, and so on.

        A rank that has no more batches is left out.

        Raises:
            UsageError: the batches of the ranks cannot be joined.
        """
        number = 0
        while True:
            parts: list[LoadedBatch] = []
            for folder in self._folders:
                path = folder / f"{name_of_pass}-{number}.pickle"
                if path.exists():
                    # Our own processes have written it, in a folder that only this user can enter.
                    parts.append(pickle.loads(path.read_bytes()))

            if not parts:  # the pass of every rank has ended
                return

            batch = join([part.batch for part in parts])
            yield LoadedBatch(batch, _joined_ids(parts))
            number += 1

    def length(self, loader: Any) -> int | None:
        """Returns how many batches a loader had on the ranks of the other run.

        Returns None if it is not known. If the ranks had different numbers, that of the first one
        counts.
        """
        number = self.number_of(loader)
        if number is None:
            return None

        for folder in self._folders:
            path = folder / LENGTHS_FILE
            if not path.exists():
                continue
            length_of_loader: dict[str, int] = json.loads(path.read_text())
            if str(number) in length_of_loader:  # keys are texts in JSON
                return length_of_loader[str(number)]

        return None


def _rank_of_folder(folder: Path) -> int:
    """Returns 12 for a folder named `rank12`."""
    return int(folder.name.removeprefix("rank"))


def _joined_ids(parts: Sequence[LoadedBatch]) -> list[int] | None:
    """Returns the indices of all ranks; None if those of some rank are not known."""
    joined = []
    for part in parts:
        if part.ids is None:
            return None
        joined += part.ids
    return joined


def join(parts: Sequence[Any]) -> Any:
    """Joins the batches of the ranks to one batch: tensors and lists one behind the other.

    Args:
        parts: the batches, one for each rank. They may be nested, but all in the same way.

    Raises:
        UsageError: tensors have different shapes.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return _join_tensors(parts)

    if isinstance(first, Mapping):
        joined = {key: join([part[key] for part in parts]) for key in first}
        if type(first) is dict:
            return joined
        # A mapping of a library, such as `BatchEncoding` of transformers.
        return type(first)(joined)  # type: ignore[call-arg]

    if isinstance(first, list | tuple):
        return _join_sequences(parts)

    # Numbers and texts belong to the batch, not to a sample. They should be the same on all ranks.
    return first


def _join_sequences(parts: Sequence[Any]) -> Any:
    """Joins the lists or tuples of all ranks to one.

    Those that hold tensors, such as `[inputs, labels]`, have a field for each kind of value and are
    joined field by field. Others, such as a list of texts, have a value for each sample and are
    joined one behind the other.
    """
    first = parts[0]
    is_named_tuple = isinstance(first, tuple) and hasattr(first, "_replace")
    if is_named_tuple or any(isinstance(value, Tensor) for value in first):
        joined_fields = []
        for values_of_ranks in zip(*parts, strict=True):
            joined_fields.append(join(values_of_ranks))
        # A named tuple takes its fields as separate arguments.
        return type(first)(*joined_fields) if is_named_tuple else type(first)(joined_fields)

    all_values: list[Any] = []
    for part in parts:
        all_values += part

    return type(first)(all_values)


def _join_tensors(parts: Sequence[Tensor]) -> Tensor:
    """Joins tensors along their first dimension, which counts the samples.

    Raises:
        UsageError: the other dimensions differ.
    """
    if not parts[0].dim():  # a number, such as the temperature of a schedule: it has no samples
        return parts[0]

    shapes_of_sample = {part.shape[1:] for part in parts}
    if len(shapes_of_sample) > 1:
        shapes = " and ".join(str(list(part.shape)) for part in parts)
        raise UsageError(
            "lockstep verify --same-samples",
            f"the batches of the ranks have tensors of shapes {shapes}, which make no one batch",
            "leave the option out, or pad all batches to one length",
        )

    return torch.cat(list(parts))
