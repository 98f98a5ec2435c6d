"""CRC-32 of files: found while they are written, compared when they are read.

A manifest ends with the checksum of its own text before that:

    {..., "checksums": {"model.safetensors": "crc32:1c291ca3", ...}, "checksum": "crc32:9a7fb4c1"}

CRC-32 (zlib's, RFC 1952) finds every change of up to 32 bits in a row, and any other but for one in
four thousand million. It says nothing about who wrote a file. It costs less than reading from any
disk: 5 GB a second where zlib uses the processor's own instructions, 1 GB where not.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_KIND = "crc32:"
_OWN = ', "checksum": "'
_CHUNK = 1 << 22


def checksum(data: memoryview | bytes, before: int = 0) -> int:
    """The CRC-32 of `data` that follows on data of which `before` is the CRC-32."""
    return zlib.crc32(data, before)


def in_words(crc: int) -> str:
    """As it stands in a manifest, such as `crc32:1c291ca3`."""
    return f"{_KIND}{crc:08x}"


def of_file(path: Path) -> str:
    """The checksum of what a file holds; reads all of it, a part at a time."""
    crc = 0
    memory = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(memory):
            crc = zlib.crc32(memory[:count], crc)
    return in_words(crc)


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as JSON that ends with the checksum of the text before that."""
    values = {name: value for name, value in manifest.items() if name != "checksum"}
    text = json.dumps(values, allow_nan=False)[:-1]
    return f'{text}{_OWN}{in_words(zlib.crc32(text.encode()))}"}}'.encode()


def seal_is_broken(text: bytes) -> bool:
    """Whether a manifest's text is not what it was; one of a time without checksums is believed."""
    before, found, after = text.rpartition(_OWN.encode())
    if not found:
        return b'"checksums"' in text
    return after.strip() != f'{in_words(zlib.crc32(before))}"}}'.encode()


def damaged_files(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Which files of a checkpoint do not hold what was written; reads all of them.

    One that is not there is not named, nor one of which the manifest has no known checksum: older
    versions wrote none.
    """
    expected = manifest.get("checksums")
    if not isinstance(expected, dict):
        return []
    return [
        name
        for name, value in expected.items()
        if isinstance(value, str)
        and value.startswith(_KIND)
        and name in manifest["files"]
        and (path / name).is_file()
        and of_file(path / name) != value
    ]
