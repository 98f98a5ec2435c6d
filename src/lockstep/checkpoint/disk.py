"""Every operation by which saving changes the disk, one function each.

Saving calls them as `disk.write(...)`, so that a test can make any of them fail, or end the
process before any of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MODE = 0o666
"""Of new files, less what the umask takes away."""


def make_folder(path: Path) -> None:
    """Makes a folder whose parent is there."""
    os.mkdir(path)


def create(path: Path) -> int:
    """Opens a new file for writing; returns its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)


def write(descriptor: int, data: memoryview | bytes) -> None:
    """Writes all of it, however many calls the system needs."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync(descriptor: int) -> None:
    """Returns when what was written is on the disk."""
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    """Closes a file; a network file system may only now say that it has no space."""
    os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Returns when the names in a folder are on the disk; of a file, its contents."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def rename(path: Path, to: Path) -> None:
    """Gives a file or folder another name, in the place of a file that has it."""
    os.replace(path, to)


def unlink(path: Path) -> None:
    """Removes a file."""
    os.unlink(path)


def remove_folder(path: Path) -> None:
    """Removes an empty folder."""
    os.rmdir(path)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A new file to write to, on the disk when the block is left without an error."""
    descriptor = create(path)
    try:
        yield descriptor
        sync(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    close(descriptor)


def remove_tree(path: Path) -> None:
    """Removes a folder and what is in it; follows no link."""
    with os.scandir(path) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            unlink(Path(entry.path))
    remove_folder(path)
