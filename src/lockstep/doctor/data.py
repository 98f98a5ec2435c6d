"""The data, as far as it can be seen in seconds: names, sizes, and pieces of some files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

_MOST_FILES, _LISTED = 100_000, 1000
_SAMPLES, _PIECES, _PIECE = 16, 3, 1 << 16


def gather(path: Path) -> dict[str, Any] | None:
    """What is at a path: None: nothing.

    `files` and `bytes` of the first 100,000 files by name, `sizes` of the first thousand, `names`
    a digest of all names and sizes; `contents` a digest of the beginning, middle and end of up to
    16 files, which the same names choose alike everywhere.
    """
    if not path.exists():
        return None
    found = dict(islice(_files(path), _MOST_FILES))
    names = list(found)
    chosen = {names[i * (len(names) - 1) // (_SAMPLES - 1)] for i in range(_SAMPLES) if names}
    return {
        "files": len(found),
        "bytes": sum(found.values()),
        "sizes": dict(islice(found.items(), _LISTED)),
        "names": hashlib.sha256(repr(found).encode()).hexdigest(),
        "contents": {name: _digest(path / name, found[name]) for name in sorted(chosen)},
    }


def _files(path: Path) -> Iterator[tuple[str, int]]:
    """Names below a folder and sizes, in order; a file has no name."""
    if path.is_file():
        yield "", path.stat().st_size
    for folder, inner, names in os.walk(path, followlinks=True):
        inner.sort()
        for name in sorted(names):
            file = Path(folder, name)
            yield str(file.relative_to(path)), file.stat().st_size if file.exists() else -1


def _digest(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            for number in range(_PIECES):
                file.seek(number * max(size - _PIECE, 0) // (_PIECES - 1))
                digest.update(file.read(_PIECE))
    except OSError as error:
        return error.strerror or "not readable"
    return digest.hexdigest()[:8]
