"""CRC-32 checksums of files and manifests: computed when they are written, compared when read.

A manifest is sealed: it ends with the checksum of its own text before that.

    {..., "checksums": {"model.safetensors": "crc32:1c291ca3", ...}, "checksum": "crc32:9a7fb4c1"}

CRC-32 (zlib's, RFC 1952) finds every change of up to 32 consecutive bits, and all but one in four
thousand million of any other changes. It says nothing about who wrote a file. It takes less time
than reading from a disk: 5 GB a second if zlib uses the processor's own instructions, else 1 GB.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEAL = ', "checksum": "'
"""What stands between a manifest's text and its checksum."""
READ_CHUNK_BYTES = 1 << 22


def format_crc(crc: int) -> str:
    """Returns a checksum as it stands in a manifest, such as "crc32:1c291ca3"."""
    return f"crc32:{crc:08x}"


def file_checksum(path: Path) -> str:
    """Returns the checksum of a file's content. Reads all of it, a chunk at a time."""
    crc = 0
    buffer = memoryview(bytearray(READ_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            crc = zlib.crc32(buffer[:num_bytes], crc)
    return format_crc(crc)


def seal_manifest(manifest: Mapping[str, Any]) -> bytes:
    """Returns a manifest as JSON that ends with the checksum of the text before that."""
    values = {name: value for name, value in manifest.items() if name != "checksum"}
    text = json.dumps(values, allow_nan=False).removesuffix("}")  # the brace comes after the seal
    checksum = format_crc(zlib.crc32(text.encode()))
    return f'{text}{SEAL}{checksum}"}}'.encode()


def check_seal(manifest_text: bytes) -> None:
    """Checks that a manifest's text is as it was written.

    Raises:
        ValueError: the text differs from its checksum.
    """
    # `{...values...` `, "checksum": "` `crc32:9a7fb4c1"}`
    text, _, end = manifest_text.rpartition(SEAL.encode())
    expected_end = f'{format_crc(zlib.crc32(text))}"}}'
    if end.strip() != expected_end.encode():  # an editor may have added a newline
        raise ValueError("its checksum differs")


def damaged_files(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Returns the names of those files of a checkpoint that differ from their checksums.

    A file without a checksum in the manifest counts as damaged.

    Args:
        path: the path of a checkpoint whose files are all there. They are read.
        manifest: the manifest of the checkpoint.
    """
    expected = manifest["checksums"]
    damaged = []
    for name in manifest["files"]:
        if file_checksum(path / name) != expected.get(name):
            damaged.append(name)
    return damaged
