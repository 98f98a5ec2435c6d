"""Weights in one safetensors file, or in several with an index, in the form that is common.

    net.safetensors                     one file, or
    net.safetensors.index.json          {"metadata": {"total_size": bytes},
    net-00001-of-00002.safetensors       "weight_map": {name: file, ...}}
    net-00002-of-00002.safetensors

Several files are there in full or not at all too: they get names that are free, the index is
renamed into place after all of them, and only then those of a former index go.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from torch import Tensor

from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import separate
from lockstep.checkpoint.formats.safetensors import Entry, read_header, short
from lockstep.checkpoint.save import write_tensors, write_text
from lockstep.checkpoint.storage import sync_folder
from lockstep.errors import CheckpointError, SettingError

INDEX = ".index.json"
TORCH_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
"""Of files that `torch.save` wrote."""
SHARD_SIZE = 5_000_000_000
"""Bytes; above it `convert` writes several files."""

_MAX_INDEX = 100_000_000  # bytes
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{middle}b": base**power
    for middle, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kmgt", 1)
}


@dataclass(frozen=True)
class Piece:
    """One tensor to be written."""

    name: str
    nbytes: int
    get: Callable[[], Tensor]
    """Gives it, contiguous and on the CPU; called once, when its file is written."""


def in_bytes(size: int | str) -> int:
    """A size such as `5GB`, `500MB` or `2GiB` in bytes.

    Raises:
        SettingError: it is no size, or nothing fits into it.
    """
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?b|)", str(size).strip().lower())
    if parts is None or (found := int(float(parts[1]) * _UNITS[parts[2]])) < 1:
        raise SettingError(
            f"a shard size of {size!r}",
            "it is no size of a file",
            "give bytes, or a text such as '5GB' or '500MiB'",
        )
    return found


def index_of(path: Path) -> Path:
    """Where the index is, if weights that are called `path` are in several files."""
    return path.with_name(path.name + INDEX)


def read_index(path: Path) -> dict[str, Entry]:
    """The tensors of an index's safetensors files, all of which are looked at; reads the headers.

    Raises:
        CheckpointError: the index or a file cannot be read, the index names files outside of its
            folder, or a tensor is not in the file that it names.
    """
    places = weight_map(path)
    headers = {name: read_header(path.parent / name) for name in dict.fromkeys(places.values())}
    for name, file in places.items():
        if name not in headers[file]:
            raise misplaced(path, name, file)
    extra = [n for header in headers.values() for n in header if n not in places]
    if extra:
        names = short(", ".join(extra[:3]))
        raise _unlike(path, f"it does not name {len(extra)} tensors of its files ({names})")
    return {name: headers[file][name] for name, file in places.items()}


def misplaced(path: Path, name: str, file: str) -> CheckpointError:
    """The error of an index by which a tensor is in a file that does not hold it."""
    return _unlike(path, f"the tensor {short(name)!r} is to be in {file}, which does not hold it")


def _unlike(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"reading weights from {path}",
        found,
        "the files do not belong together: copy or download all of them again",
    )


def write_weights(path: Path, pieces: Sequence[Piece], shard_size: int | None) -> list[Path]:
    """Writes tensors in one file, or in several with an index where they exceed `shard_size`.

    What was there under that name goes once the new is complete. At most one file's tensors are
    in memory at a time.

    Returns:
        What was written; the index, if there is one, first.

    Raises:
        CheckpointError: it cannot be written; nothing is left of it then.
    """
    groups = _groups(pieces, shard_size)
    index = index_of(path)
    with layout.plain_errors("saving weights to", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        former = _former(index)
        if len(groups) == 1:
            with in_place(path) as temporary:
                write_tensors(temporary, _tensors(groups[0]))
            written, stale = [path], [index, *former]
        else:
            written, stale = _write_several(path, groups), [path, *former]
        for old in stale:
            old.unlink(missing_ok=True)
    return written


@contextmanager
def in_place(path: Path) -> Iterator[Path]:
    """A name to write to; what is there afterwards takes the place of `path`, or nothing does."""
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _write_several(path: Path, groups: Sequence[Sequence[Piece]]) -> list[Path]:
    files = _free_names(path, len(groups))
    made: list[Path] = []
    try:
        for file, group in zip(files, groups, strict=True):
            with in_place(file) as temporary:
                write_tensors(temporary, _tensors(group))
            made.append(file)
        total = sum(piece.nbytes for group in groups for piece in group)
        places = {p.name: f.name for f, group in zip(files, groups, strict=True) for p in group}
        content = {"metadata": {"total_size": total}, "weight_map": places}
        with in_place(index_of(path)) as temporary:
            write_text(temporary, json.dumps(content, indent=2) + "\n")
    except BaseException:
        for file in made:
            file.unlink(missing_ok=True)
        raise
    return [index_of(path), *files]


def _groups(pieces: Sequence[Piece], shard_size: int | None) -> list[list[Piece]]:
    """In the given order, each group within the size but for one tensor that alone exceeds it."""
    groups: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if groups[-1] and shard_size is not None and size + piece.nbytes > shard_size:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.nbytes
    return groups


def _tensors(group: Sequence[Piece]) -> dict[str, Tensor]:
    memory: set[int] = set()
    return {piece.name: separate(piece.get(), memory) for piece in group}


def _free_names(path: Path, number: int) -> list[Path]:
    stem = path.name.removesuffix(".safetensors")
    for attempt in count(1):
        start = stem if attempt == 1 else f"{stem}-v{attempt}"
        names = [f"{start}-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)]
        files = [path.with_name(name) for name in names]
        if not any(file.exists() for file in files):
            break
    return files


def _former(index: Path) -> list[Path]:
    """The files of an index that is about to be replaced, as far as their names are ours."""
    stem = re.escape(index.name.removesuffix(INDEX).removesuffix(".safetensors"))
    ours = re.compile(rf"{stem}(-v\d+)?-\d{{5,}}-of-\d{{5,}}\.safetensors")
    try:
        names = set(weight_map(index).values())
    except CheckpointError:  # none there, or nothing that could be read through it
        return []
    return [index.with_name(name) for name in sorted(names) if ours.fullmatch(name)]


def of_torch(places: Mapping[str, str]) -> bool:
    """Whether an index is one over files of `torch.save`, as `pytorch_model.bin.index.json` is."""
    return all(file.endswith(TORCH_ENDINGS) for file in places.values())


def weight_map(path: Path) -> dict[str, str]:
    """Which file each tensor of an index is in; all of one kind.

    Raises:
        CheckpointError: it cannot be read, is no index, or names files that are not beside it.
    """
    try:
        with layout.plain_errors("reading weights from", path), path.open("rb") as file:
            text = file.read(_MAX_INDEX + 1)
        if len(text) > _MAX_INDEX:
            raise ValueError(f"it is longer than {_MAX_INDEX} bytes")
        places = json.loads(text, object_pairs_hook=layout.without_duplicates)["weight_map"]
        if not isinstance(places, dict) or not places:
            raise ValueError("its weight_map is no object, or empty")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"reading weights from {path}",
            f"it is no index of weights: {type(error).__name__}: {short(error, 300)}",
            'give a file with {"weight_map": {name: file}}, as lockstep checkpoint convert writes',
        ) from error
    for file in places.values():
        if not (layout.is_plain(file) and file.endswith((".safetensors", *TORCH_ENDINGS))):
            raise CheckpointError(
                f"reading weights from {path}",
                f"it names the file {short(file)!r}, which is not one beside it",
                "use no index from a source that you do not trust; its files are plain names",
            )
    if not of_torch(places) and any(file.endswith(TORCH_ENDINGS) for file in places.values()):
        raise CheckpointError(
            f"reading weights from {path}",
            "it names safetensors files and files of torch.save",
            "make one form of them with lockstep checkpoint convert",
        )
    return places
