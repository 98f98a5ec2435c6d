"""Describes a data set in a few seconds, so that the copies on several machines can be compared.

Names and sizes are read of all files (up to 100,000), contents only in parts: the beginning, the
middle and the end of 16 files. Machines with the same names choose the same 16 files.
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
    """Describes a file or a folder with all that is in it.

    Returns:
        None if there is nothing at this path. Otherwise `files` and `bytes`, the number of files
        and their size; `sizes`, the sizes of the first thousand by name; `names`, a digest of all
        names and sizes; `contents`, digests of pieces of some files, by name.
    """
    if not path.exists():
        return None

    size_of_file = dict(islice(_files(path), MAX_FILES))
    chosen_files = _spread(list(size_of_file), NUM_DIGESTED_FILES)
    digested = sorted(set(chosen_files))
    return {
        "files": len(size_of_file),
        "bytes": sum(size_of_file.values()),
        "sizes": dict(islice(size_of_file.items(), MAX_LISTED_SIZES)),
        "names": hashlib.sha256(repr(size_of_file).encode()).hexdigest(),
        "contents": {name: _digest(path / name, size_of_file[name]) for name in digested},
    }


def _spread(names: Sequence[str], count: int) -> list[str]:
    """Returns `count` names at equal distances, from the first to the last.

    If there are fewer than `count` names, some are returned several times.
    """
    if not names:
        return []
    last = len(names) - 1
    # Choice k of n is at k * last / (n - 1), rounded down: the first at 0, the last at `last`.
    return [names[number * last // (count - 1)] for number in range(count)]


def _files(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the relative path and the size in bytes of each file below a folder, in order.

    The order is the same on all machines. If the path is itself a file, its name is empty, so that
    `path / name` is that file. The size of a broken link is -1.
    """
    if path.is_file():
        yield "", path.stat().st_size
    for folder, subfolders, names in os.walk(path, followlinks=True):
        subfolders.sort()  # in place: os.walk then visits them in this order
        for name in sorted(names):
            file = Path(folder, name)
            size = file.stat().st_size if file.exists() else -1
            yield str(file.relative_to(path)), size


def _digest(path: Path, size: int) -> str:
    """Returns a digest of three pieces of a file: its beginning, its middle and its end.

    Returns the error's text instead if the file cannot be read.
    """
    digest = hashlib.sha256()
    last_piece_begin = max(size - PIECE_SIZE, 0)
    try:
        with path.open("rb") as file:
            # Piece k of n begins at k * last_piece_begin / (n - 1): the first one at the beginning
            # of the file, and the last one so that it ends with the file. In a small file they
            # overlap.
            for number in range(PIECES_PER_FILE):
                file.seek(number * last_piece_begin // (PIECES_PER_FILE - 1))
                digest.update(file.read(PIECE_SIZE))
    except OSError as error:
        return error.strerror or "not readable"

    return digest.hexdigest()[:8]
