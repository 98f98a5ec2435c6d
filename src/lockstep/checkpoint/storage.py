"""Contains every operation with which saving changes the disk, one function for each.

Saving calls them as `storage.write(...)`, so that a test can make any of them fail, or end the
process before any of them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lockstep.checkpoint import termination

MODE_OF_NEW_FILES = 0o666
"""The umask takes some of these permissions away."""


def make_folder(path: Path) -> None:
    """Creates a folder. Its parent must exist."""
    os.mkdir(path)


def create(path: Path) -> int:
    """Opens a new file for writing; returns its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE_OF_NEW_FILES)


def write(descriptor: int, data: memoryview | bytes) -> None:
    """Writes all of the data, with as many calls as the system needs."""
    remaining = memoryview(data)
    while remaining:
        num_written = os.write(descriptor, remaining)
        remaining = remaining[num_written:]


def sync(descriptor: int) -> None:
    """Waits until what was written to a file is on the disk."""
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    """Closes a file. A network file system may report only now that it has no space."""
    os.close(descriptor)


def sync_path(path: Path) -> None:
    """Waits until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def rename(path: Path, to: Path) -> None:
    """Renames a file or folder. A file that has the new name already is replaced."""
    os.replace(path, to)


def unlink(path: Path) -> None:
    """Removes a file."""
    os.unlink(path)


def remove_folder(path: Path) -> None:
    """Removes an empty folder."""
    os.rmdir(path)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Creates a file for writing, and yields its descriptor.

    The file is flushed to disk at the end of the block, unless the block raises an error.
    """
    descriptor = create(path)
    try:
        yield descriptor
        sync(descriptor)
    except BaseException:
        # The function `close` of this module is for a complete file: it may report that the disk is
        # full. This file is incomplete anyway, and a second error would hide the first.
        os.close(descriptor)
        raise
    close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replaces a file completely or not at all. Yields a temporary path to write to.

    At the end of the block, the temporary file is renamed to `path`. It is removed instead if the
    block raises an error or a signal ends the process.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    with termination.cleaned_up_on_failure(partial(temporary.unlink, missing_ok=True)):
        yield temporary
        rename(temporary, path)
    sync_path(path.parent)


def remove_tree(path: Path) -> None:
    """Removes a folder and everything in it. Symbolic links are removed, not followed."""
    if path.is_symlink():  # what it leads to may belong to somebody else
        unlink(path)
        return

    with os.scandir(path) as scan:
        # The list is complete before anything is removed, which might confuse the scan.
        entries = list(scan)

    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            unlink(Path(entry.path))
    remove_folder(path)
