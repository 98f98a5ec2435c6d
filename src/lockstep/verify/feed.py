"""Lets one process train on the batches that several processes trained on, for `--same-samples`.

In the run on several processes, each rank writes the batches that torch's DataLoaders hand out for
training. In the run on one process, every DataLoader then yields these batches instead, those of
all ranks joined. So everything else can be compared, even if samplers or augmentation differ.

A *pass* is one iteration over a DataLoader. It is named by the number of the loader, in the order
of construction, and the number of the pass: `0-1`, `0-2`, ...
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

from lockstep.batch.pytree import tensors
from lockstep.errors import UsageError
from lockstep.verify.recording.tensor_values import single_images

LENGTHS_FILE = "lengths.json"


class LoadedBatch(NamedTuple):
    """A batch, and the indices of its samples in the dataset, or None if they are not known."""

    batch: Any
    ids: list[int] | None


class _PassNames:
    """Numbers a script's DataLoaders and names the passes over them."""

    def __init__(self) -> None:
        self._loaders: list[Any] = []  # in the order of construction
        self._passes_of_loader: Counter[int] = Counter()  # number of passes, by loader number

    def add_loader(self, loader: Any) -> None:
        """Adds a DataLoader that was constructed; its number is the next one."""
        self._loaders.append(loader)

    def number_of(self, loader: Any) -> int | None:
        """Returns the number of a loader; None if it was built before loaders were watched."""
        for number, known_loader in enumerate(self._loaders):
            if known_loader is loader:
                return number
        return None

    def begin_pass(self, loader: Any) -> str:
        """Counts a pass that begins, and returns its name, such as `0-2`."""
        loader_number = self.number_of(loader)
        if loader_number is None:
            loader_number = -1  # loaders without a number share this one
        self._passes_of_loader[loader_number] += 1
        return f"{loader_number}-{self._passes_of_loader[loader_number]}"


class BatchWriter(_PassNames):
    """Writes the batches of one rank.

    Args:
        folder: folder for the batches of all ranks.
        rank: number of the rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__()
        self._folder = folder / f"rank{rank}"
        self._folder.mkdir(parents=True)

    def write(self, name_of_pass: str, batch_number: int, batch: LoadedBatch) -> None:
        """Writes a batch into a file of its own.

        Args:
            name_of_pass: name of the pass, from `begin_pass`.
            batch_number: number of the batch in the pass, from 0.
            batch: the batch.

        Raises:
            UsageError: The batch contains something that cannot be pickled.
        """
        try:
            data = pickle.dumps(batch)
        except Exception as error:
            raise UsageError(
                "lockstep verify --same-samples",
                f"a batch cannot be kept for the run on one process: {error}",
                "leave the option out, or let the loader give tensors, numbers and text",
            ) from error

        (self._folder / f"{name_of_pass}-{batch_number}.pickle").write_bytes(data)

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
    """Reads the batches that the ranks of another run have written, and joins those of all ranks.

    Args:
        folder: folder with the batches of all ranks.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folders = sorted(folder.glob("rank*"), key=_rank_of_folder)

    def batches(self, name_of_pass: str) -> Iterator[LoadedBatch]:
        """Yields the batches of a pass. Each one joins the n-th batches of all ranks.

        A rank without an n-th batch is skipped.

        Raises:
            UsageError: The batches of the ranks cannot be joined.
        """
        batch_number = 0
        while True:
            parts: list[LoadedBatch] = []
            for folder in self._folders:
                path = folder / f"{name_of_pass}-{batch_number}.pickle"
                # Unpickling is safe: the file was written by `lockstep verify` itself, in a folder
                # that only this user can enter.
                if path.exists():
                    parts.append(pickle.loads(path.read_bytes()))

            if not parts:  # the pass has ended on every rank
                return

            ids_of_parts = [part.ids for part in parts]
            batch = join([part.batch for part in parts], ids_of_parts)
            yield LoadedBatch(batch, _joined_ids(parts))
            batch_number += 1

    def length(self, loader: Any) -> int | None:
        """Returns the number of batches that a loader had in the other run; None if not known.

        If the ranks had different numbers, that of the first rank which recorded one is returned.
        """
        loader_number = self.number_of(loader)
        if loader_number is None:
            return None

        for folder in self._folders:
            path = folder / LENGTHS_FILE
            if not path.exists():
                continue
            length_by_loader: dict[str, int] = json.loads(path.read_text())
            key = str(loader_number)  # JSON turns keys into strings
            if key in length_by_loader:
                return length_by_loader[key]

        return None


def _rank_of_folder(folder: Path) -> int:
    """Returns the rank that a folder belongs to: 12 for `rank12`."""
    return int(folder.name.removeprefix("rank"))


def _joined_ids(parts: Sequence[LoadedBatch]) -> list[int] | None:
    """Returns the sample indices of all ranks; None if those of some rank are not known."""
    joined = []
    for part in parts:
        if part.ids is None:
            return None
        joined += part.ids
    return joined


def join(parts: Sequence[Any], ids: Sequence[list[int] | None] | None = None) -> Any:
    """Joins the batches of several ranks into one batch: tensors and lists are concatenated.

    For object detection, a batch may begin with a list that has one image for each sample, since
    their sizes may differ. Such lists are concatenated too, and so are those of the targets. For
    example, rank 0 has one image and rank 1 has two:

        ([a], [targets of a]) and ([b, c], [targets of b, targets of c])
        -> ([a, b, c], [targets of a, targets of b, targets of c])

    Args:
        parts: batches of the ranks, which may be nested, all in the same way.
        ids: for each batch, the indices of its samples, or None if they are not known.

    Raises:
        UsageError: Tensors have different shapes.
    """
    num_images = []
    for part, ids_of_part in zip(parts, ids or [None] * len(parts), strict=True):
        num_samples = len(ids_of_part) if ids_of_part else None
        num_images.append(len(single_images(part, num_samples)))

    # Batches of all ranks are built alike: if one does not begin with images, none does.
    if 0 in num_images:
        num_images = []
    return _join(parts, num_images, is_whole_batch=True)


def _join(parts: Sequence[Any], num_images: Sequence[int], *, is_whole_batch: bool = False) -> Any:
    """Joins the same part of the batches of several ranks.

    Args:
        parts: the part in the batch of each rank.
        num_images: for each rank, the number of images in its batch. Empty if the batches do not
            begin with a list of single images, see `join`.
        is_whole_batch: whether the parts are the batches themselves.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return _join_tensors(parts)

    if isinstance(first, Mapping):
        joined = {}
        for key in first:
            values_of_ranks = [part[key] for part in parts]
            joined[key] = _join(values_of_ranks, num_images)

        if type(first) is dict:
            return joined
        # The mapping class of a library, such as `BatchEncoding` of transformers.
        return type(first)(joined)  # type: ignore[call-arg]

    if isinstance(first, list | tuple):
        if _have_entry_for_each_image(parts, num_images, is_whole_batch=is_whole_batch):
            return _concatenate(parts)
        if _entries_are_fields(first, batches_begin_with_images=bool(num_images)):
            return _join_fields(parts, num_images)
        return _concatenate(parts)  # such as a list of strings

    # Numbers and strings belong to the batch as a whole, so they should be the same on all ranks.
    return first


def _have_entry_for_each_image(
    parts: Sequence[Any], num_images: Sequence[int], *, is_whole_batch: bool
) -> bool:
    """True if a list or tuple has one entry for each image of the batch, on every rank.

    With two images, these have:

        [image, image]
        [{"boxes": a}, {"boxes": b}]

    A whole batch `(images, targets)` also has two entries, but they are not for one image each.

    Args:
        parts: the list or tuple of each rank.
        num_images: for each rank, the number of images in its batch, or empty; see `_join`.
        is_whole_batch: whether the parts are the batches themselves.
    """
    lengths = [len(part) for part in parts]
    if lengths != list(num_images):
        return False

    first_entry = parts[0][0]
    entries_are_fields = is_whole_batch and not isinstance(first_entry, Mapping)
    return not entries_are_fields


def _entries_are_fields(
    sequence: list[Any] | tuple[Any, ...], *, batches_begin_with_images: bool
) -> bool:
    """True if the entries of a list or tuple are different values, each with all samples.

    Otherwise, there is one entry for each sample, as in a list of strings.
    """
    if _is_named_tuple(sequence):
        return True
    if any(isinstance(entry, Tensor) for entry in sequence):  # such as [inputs, labels]
        return True
    # Such as ([image, image], [boxes, boxes]).
    return batches_begin_with_images and bool(tensors(sequence))


def _join_fields(parts: Sequence[Any], num_images: Sequence[int]) -> Any:
    """Joins lists or tuples of several ranks field by field.

    Args:
        parts: the list or tuple of each rank.
        num_images: for each rank, the number of images in its batch, or empty; see `_join`.
    """
    joined_fields = []
    for values_of_ranks in zip(*parts, strict=True):
        joined_fields.append(_join(values_of_ranks, num_images))

    first = parts[0]
    if _is_named_tuple(first):  # it takes its fields as separate arguments
        return type(first)(*joined_fields)
    return type(first)(joined_fields)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_replace")


def _concatenate(parts: Sequence[Any]) -> Any:
    """Returns lists or tuples of several ranks as one."""
    all_values: list[Any] = []
    for part in parts:
        all_values += part

    return type(parts[0])(all_values)


def _join_tensors(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors along their first dimension, which is that of the samples.

    Raises:
        UsageError: The other dimensions differ.
    """
    # A single number, such as a temperature, does not belong to a sample.
    if not parts[0].dim():
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
