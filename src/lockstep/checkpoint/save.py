"""Writes one checkpoint so that it is there in full or not at all.

All is written into a hidden folder and flushed to disk; then one rename puts it in place. Older
checkpoints go only after that. A process that is killed at any point leaves the last complete
checkpoint readable, and a hidden folder that the next save removes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint import checksums, disk, layout
from lockstep.checkpoint.header import DTYPES
from lockstep.errors import CheckpointError

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_CHUNK = 1 << 23
"""Bytes that are summed up and written at a time."""


class Written(NamedTuple):
    """A file that is on the disk."""

    size: int
    """Bytes."""
    checksum: str


def write_checkpoint(
    folder: Path,
    step: int,
    files: Mapping[str, Mapping[str, Tensor]],
    manifest: Mapping[str, Any],
    *,
    keep: int,
    best: Literal["min", "max"] | None = None,
    passed_over: Collection[str] = (),
) -> Path:
    """Writes the checkpoint of one step. One process of the run calls it.

    Args:
        folder: holds the run's checkpoints; made where it is missing.
        step: global batches done; a checkpoint of the same step is replaced.
        files: the safetensors files by name, as `encode` gives their tensors.
        manifest: what else `manifest.json` is to say; JSON.
        keep: how many of the newest checkpoints remain, this one included.
        best: which `metric` of their manifests lets one remain beside those.
        passed_over: names of checkpoints that are known to be damaged: they do not count.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: the folder is a file, is not writable, has no space left, or holds a
            checkpoint of a later step, which a run that had resumed could not have left behind.
    """
    final = layout.step_folder(folder, step)
    with layout.plain_errors("saving the checkpoint", final):
        make_folders(folder)
        check_order(folder, step, passed_over)
        for path in layout.leftovers(folder):
            _remove_if_possible(path)
        temporary = layout.temporary_folder(folder, step)
        try:
            disk.make_folder(temporary)
            written = {name: write_tensors(temporary / name, files[name]) for name in files}
            full = {
                "format": layout.FORMAT,
                "step": step,
                **manifest,
                "files": {name: file.size for name, file in written.items()},
                "checksums": {name: file.checksum for name, file in written.items()},
            }
            write_text(temporary / layout.MANIFEST, checksums.sealed(full))
            disk.sync_folder(temporary)
            _put_in_place(temporary, final, step)
        except BaseException:
            _remove_if_possible(temporary)
            raise
        _remove_old(folder, step, keep, best, {*passed_over} - {final.name})
    return final


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Writes a new safetensors file and flushes it to disk.

    Straight from the tensors' memory, which `safetensors.torch.save_file` copies first; and what
    is written is summed up on the way. The format:
    https://huggingface.co/docs/safetensors/index#format

    Args:
        path: of a file that is not there yet.
        tensors: by name, contiguous and on the CPU.

    Raises:
        CheckpointError: the format has no name for a tensor's dtype.
    """
    # By size of their elements, so that each begins where one of its kind may; as safetensors does.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header = _header(path, ordered)
    size, crc = 0, 0
    with disk.new_file(path) as file:
        for data in (memoryview(header), *(_memory(tensor) for _, tensor in ordered)):
            for begin in range(0, len(data), _CHUNK):
                chunk = data[begin : begin + _CHUNK]
                crc = checksums.checksum(chunk, crc)
                disk.write(file, chunk)
            size += len(data)
    return Written(size, checksums.in_words(crc))


def write_text(path: Path, text: str | bytes) -> None:
    """Writes a new text file and flushes it to disk."""
    with disk.new_file(path) as file:
        disk.write(file, text.encode() if isinstance(text, str) else text)


def make_folders(folder: Path) -> None:
    """Makes a folder, and those above it, where they are missing."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    with suppress(FileExistsError):
        disk.make_folder(folder)
    folder.stat()  # what is there instead may be a link to nowhere
    disk.sync_folder(folder.parent)


def check_order(folder: Path, step: int, passed_over: Collection[str] = ()) -> None:
    """Refuses to save an earlier step than those that are there.

    Args:
        folder: holds the run's checkpoints.
        step: about to be saved.
        passed_over: names of checkpoints that do not count.

    Raises:
        CheckpointError: the folder holds a checkpoint of a later step, or cannot be read.
    """
    later = [p for p in _counting(folder, passed_over) if layout.step_of(p) > step]
    if later:
        raise CheckpointError(
            f"saving the checkpoint of step {step} in {folder}",
            f"{later[-1].name} is there already, from a run that this one does not continue",
            "call checkpoint.resume() before the loop, or choose another folder",
        )


def _header(path: Path, tensors: list[tuple[str, Tensor]]) -> bytes:
    """The length of the header and the header of a safetensors file."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        if tensor.dtype not in _CODES:
            raise CheckpointError(
                f"writing {path.name}",
                f"safetensors cannot store {tensor.dtype}",
                "convert these tensors to another dtype",
            )
        begin, end = end, end + tensor.nbytes
        content[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, not copied."""
    if not tensor.numel():
        return memoryview(b"")
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _put_in_place(temporary: Path, final: Path, step: int) -> None:
    """Renames; a complete checkpoint of the same step steps aside and can be read until then."""
    aside = layout.replaced_folder(final.parent, step)
    if layout.is_complete(final):
        if aside.exists():
            disk.remove_tree(aside)
        disk.rename(final, aside)
    elif final.exists():
        disk.remove_tree(final)
    disk.rename(temporary, final)
    disk.sync_folder(final.parent)
    if aside.exists():
        _remove_if_possible(aside)


def _remove_old(
    folder: Path,
    step: int,
    keep: int,
    best: Literal["min", "max"] | None,
    passed_over: Collection[str],
) -> None:
    counting = _counting(folder, passed_over)
    kept = counting[-keep:]
    if best is not None:
        kept.append(layout.best(counting, best) or kept[-1])
    for path in counting:
        if path not in kept:
            # Renamed first, so that a removal that is cut short leaves nothing with its name.
            hidden = layout.temporary_folder(folder, step)
            disk.rename(path, hidden)
            _remove_if_possible(hidden)


def _counting(folder: Path, passed_over: Collection[str]) -> list[Path]:
    return [path for path in layout.list_checkpoints(folder) if path.name not in passed_over]


def _remove_if_possible(path: Path) -> None:
    # What stays is hidden, and the next save tries again.
    with suppress(OSError):
        disk.remove_tree(path)
