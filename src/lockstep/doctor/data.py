"""Describes a data set in a few seconds, so that the copies on several machines can be compared.

The names and sizes of all files (up to 100,000) are read. Contents are only read in part: the
beginning, the middle and the end of 16 files. Machines with the same names choose the same files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

MAX_FILES = 100_000
MAX_LISTED_SIZES = 1000
NUM_DIGESTED_FILES = 16
PIECES_PER_FILE = 3
PIECE_SIZE = 1 << 16  # bytes


def gather(path: Path) -> dict[str, Any] | None:
    """Describes a file, or a folder with everything in it.

    Returns:
        None if nothing exists at this path. Otherwise `files` and `bytes`, the number of files and
        their total size; `sizes`, the sizes of the first thousand by name; `names`, a digest of all
        names and sizes; and `contents`, digests of pieces of some files, by name.
    """
    if not path.exists():
        return None

    size_of_file = dict(islice(_files(path), MAX_FILES))

    chosen_files = _evenly_spaced(list(size_of_file), NUM_DIGESTED_FILES)
    digested_files = sorted(set(chosen_files))  # if there are few files, some are chosen twice
    return {
        "files": len(size_of_file),
        "bytes": sum(size_of_file.values()),
        "sizes": dict(islice(size_of_file.items(), MAX_LISTED_SIZES)),
        "names": hashlib.sha256(repr(size_of_file).encode()).hexdigest(),
        "contents": {name: _digest(path / name, size_of_file[name]) for name in digested_files},
    }


def _evenly_spaced(names: Sequence[str], count: int) -> list[str]:
    """Returns `count` names at equal distances, from the first to the last.

    For example, 3 of `a b c d e` are `a c e`. If there are fewer than `count` names, some of them
    are returned several times.
    """
    if not names:
        return []
    last = len(names) - 1
    return [names[number * last // (count - 1)] for number in range(count)]


def _files(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the relative path and the size in bytes of each file below a folder.

    The order is the same on all machines. If the path is itself a file, the relative path is empty,
    so that `path / name` is that file. The size of a broken link is -1.
    """
    if path.is_file():
        yield "", path.stat().st_size
        return

    for folder, subfolders, names in os.walk(path, followlinks=True):
        subfolders.sort()  # os.walk visits the subfolders in the order of this list
        for name in sorted(names):
            file = Path(folder, name)
            size = file.stat().st_size if file.exists() else -1
            yield str(file.relative_to(path)), size


def _digest(path: Path, size: int) -> str:
    """Returns a digest of three pieces of a file: its beginning, its middle and its end.

    Returns:
        The digest, or the text of the error if the file cannot be read.
    """
    digest = hashlib.sha256()
    last_piece_begin = max(size - PIECE_SIZE, 0)
    try:
        with path.open("rb") as file:
            # The first piece begins at the beginning of the file, and the last one ends at its end.
            # In a small file, the pieces overlap.
            for number in range(PIECES_PER_FILE):
                file.seek(number * last_piece_begin // (PIECES_PER_FILE - 1))
                digest.update(file.read(PIECE_SIZE))
    except OSError as error:
        return error.strerror or "not readable"
    return digest.hexdigest()[:8]
