"""Writes one checkpoint so that it is there in full or not at all.

All is written into a hidden folder and flushed to disk; then one rename puts it in place. Older
checkpoints go only after that. A process that is killed at any point leaves the last complete
checkpoint readable, and a hidden folder that the next save removes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from lockstep.checkpoint import layout
from lockstep.errors import CheckpointError


def write_checkpoint(
    folder: Path,
    step: int,
    files: Mapping[str, Mapping[str, Tensor]],
    manifest: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Writes the checkpoint of one step. One process of the run calls it.

    Args:
        folder: holds the run's checkpoints; made where it is missing.
        step: global batches done; a checkpoint of the same step is replaced.
        files: the safetensors files by name, as `encode` gives their tensors.
        manifest: what else `manifest.json` is to say; JSON.
        keep: how many of the newest checkpoints remain, this one included.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: the folder is a file, is not writable, has no space left, or holds a
            checkpoint of a later step, which a run that had resumed could not have left behind.
    """
    final = layout.step_folder(folder, step)
    with layout.plain_errors("saving the checkpoint", final):
        _make_folder(folder)
        _check_order(folder, step)
        for path in layout.leftovers(folder):
            shutil.rmtree(path, ignore_errors=True)
        temporary = layout.temporary_folder(folder, step)
        temporary.mkdir()
        try:
            sizes = {name: write_tensors(temporary / name, files[name]) for name in files}
            full = {"format": layout.FORMAT, "step": step, **manifest, "files": sizes}
            write_text(temporary / layout.MANIFEST, json.dumps(full, allow_nan=False))
            flush(temporary)
            _put_in_place(temporary, final, step)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for path in layout.list_checkpoints(folder)[:-keep]:
            _remove(path, step)
    return final


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Writes a safetensors file and flushes it to disk; returns its size in bytes.

    Raises:
        CheckpointError: the installed release of safetensors does not know a tensor's dtype.
    """
    path.touch()
    mode = path.stat().st_mode  # safetensors makes a file that only its owner may read
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except KeyError as error:
        raise CheckpointError(
            f"writing {path.name}",
            f"the installed release of safetensors cannot store {error}",
            "convert these tensors, or install the newest safetensors",
        ) from error
    if path.stat().st_mode != mode:
        path.chmod(mode)
    flush(path)
    return path.stat().st_size


def write_text(path: Path, text: str) -> None:
    """Writes a text file and flushes it to disk."""
    path.write_text(text)
    flush(path)


def flush(path: Path) -> None:
    """Flushes a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    flush(folder.parent)


def _check_order(folder: Path, step: int) -> None:
    later = [path for path in layout.list_checkpoints(folder) if layout.step_of(path) > step]
    if later:
        raise CheckpointError(
            f"saving the checkpoint of step {step} in {folder}",
            f"{later[-1].name} is there already, from a run that this one does not continue",
            "call checkpoint.resume() before the loop, or choose another folder",
        )


def _put_in_place(temporary: Path, final: Path, step: int) -> None:
    """Renames; a complete checkpoint of the same step steps aside and can be read until then."""
    aside = layout.replaced_folder(final.parent, step)
    if layout.is_complete(final):
        if aside.exists():
            shutil.rmtree(aside)
        os.replace(final, aside)
    elif final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    flush(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _remove(path: Path, step: int) -> None:
    # Renamed first, so that a removal that is cut short leaves nothing with a checkpoint's name.
    hidden = layout.temporary_folder(path.parent, step)
    os.replace(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
