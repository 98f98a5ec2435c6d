"""Every operation by which saving changes the disk, one function each.

Saving calls them as `disk.write(...)`, so that a test can make any of them fail, or end the
process before any of them.

CRC-32 of files: found while they are written, compared when they are read.

A manifest ends with the checksum of its own text before that:

    {..., "checksums": {"model.safetensors": "crc32:1c291ca3", ...}, "checksum": "crc32:9a7fb4c1"}

CRC-32 (zlib's, RFC 1952) finds every change of up to 32 bits in a row, and any other but for one in
four thousand million. It says nothing about who wrote a file. It costs less than reading from any
disk: 5 GB a second where zlib uses the processor's own instructions, 1 GB where not.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint import termination

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


@contextmanager
def in_place(path: Path) -> Iterator[Path]:
    """A name to write to; what is there afterwards takes the place of `path`, or nothing does."""
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    with termination.undone_unless_finished(partial(temporary.unlink, missing_ok=True)):
        yield temporary
        rename(temporary, path)
    sync_folder(path.parent)


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


_OWN = ', "checksum": "'
_READ_BYTES = 1 << 22


def in_words(crc: int) -> str:
    """As it stands in a manifest, such as `crc32:1c291ca3`."""
    return f"crc32:{crc:08x}"


def of_file(path: Path) -> str:
    """The checksum of what a file holds; reads all of it, a part at a time."""
    crc = 0
    memory = memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(memory):
            crc = zlib.crc32(memory[:count], crc)
    return in_words(crc)


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as JSON that ends with the checksum of the text before that."""
    values = {name: value for name, value in manifest.items() if name != "checksum"}
    text = json.dumps(values, allow_nan=False)[:-1]
    return f'{text}{_OWN}{in_words(zlib.crc32(text.encode()))}"}}'.encode()


def check_seal(text: bytes) -> None:
    """Looks whether a manifest's text is what it was.

    Raises:
        ValueError: it is not.
    """
    before, _, after = text.rpartition(_OWN.encode())
    if after.strip() != f'{in_words(zlib.crc32(before))}"}}'.encode():
        raise ValueError("its checksum differs")


def damaged_files(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Which files of a checkpoint, all of them there, do not hold what was written; reads them."""
    expected = manifest["checksums"]
    return [name for name in manifest["files"] if of_file(path / name) != expected.get(name)]
