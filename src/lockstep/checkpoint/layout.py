"""Where a checkpoint's files are, and when a checkpoint is complete.

    runs/digits/
      step-000000120/
        model.safetensors       one file for each module, its keys as the bare module has them
        training.safetensors    the tensors of everything else
        manifest.json           step, epoch, versions, the files with their sizes, the state's tree
      .step-000000110.tmp-...   being written or removed; never read, cleaned up by the next save
      .step-000000120.replaced  steps aside for a second save of the same step, then goes

A checkpoint is complete when its manifest can be read and every file that it lists is there in
the size that it lists. Everything else in the folder is left alone.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EDQUOT, EEXIST, ENOENT, ENOSPC, ENOTDIR, EPERM, EROFS
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lockstep.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
TRAINING = "training.safetensors"

_CHECKPOINT = re.compile(r"step-(\d{9,})|\.step-(\d{9,})\.replaced")
_TEMPORARY = re.compile(r"\.step-\d{9,}\.tmp-[0-9a-f]{16}")


def step_folder(folder: Path, step: int) -> Path:
    """The folder of one step's checkpoint."""
    return folder / f"step-{step:09d}"


def replaced_folder(folder: Path, step: int) -> Path:
    """Where a step's former checkpoint waits while a new one takes its place."""
    return folder / f".step-{step:09d}.replaced"


def temporary_folder(folder: Path, step: int) -> Path:
    """A name that no other process uses."""
    return folder / f".step-{step:09d}.tmp-{secrets.token_hex(8)}"


def weights_file(name: str) -> str:
    """The file of the module that was given under this keyword."""
    return f"{name}.safetensors"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    match = _CHECKPOINT.fullmatch(path.name)
    if match is None:
        raise ValueError(f"not the folder of a checkpoint: {path}")
    return int(match[1] or match[2])


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, the oldest step first; none where there is no folder.

    Raises:
        CheckpointError: `folder` is a file or cannot be read.
    """
    complete: dict[int, Path] = {}
    for path in _candidates(folder):
        if step_of(path) not in complete and is_complete(path):
            complete[step_of(path)] = path
    return [complete[step] for step in sorted(complete)]


def latest(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None.

    Raises:
        CheckpointError: `folder` is a file or cannot be read.
    """
    return next((path for path in _candidates(folder) if is_complete(path)), None)


def incomplete(folder: Path) -> list[Path]:
    """Folders that have a checkpoint's name and are newer than every complete one."""
    broken = []
    for path in _candidates(folder):
        if is_complete(path):
            break
        broken.append(path)
    return broken


def leftovers(folder: Path) -> list[Path]:
    """What interrupted saves have left in a folder."""
    return [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]


def is_complete(path: Path) -> bool:
    """Whether a checkpoint's manifest can be read and its files are there in full."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = manifest["files"]
        return bool(files) and all(
            Path(name).name == name and (path / name).stat().st_size == size
            for name, size in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def read_manifest(path: Path) -> dict[str, Any]:
    """A complete checkpoint's manifest.

    Raises:
        CheckpointError: the checkpoint is incomplete, or of a format that is not known here.
    """
    if not is_complete(path):
        raise CheckpointError(
            f"the checkpoint {path}",
            "it is not complete: its manifest is missing, or names files that are missing or short",
            "use an earlier checkpoint of the same folder",
        )
    manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {path}",
            f"its format is {manifest.get('format')}, this version of Lockstep reads {FORMAT}",
            f"read it with Lockstep {manifest.get('lockstep', 'of the version that saved it')}",
        )
    return manifest


@contextmanager
def plain_errors(doing: str, path: Path) -> Iterator[None]:
    """Turns what the file system and safetensors raise into a `CheckpointError` with its cause."""
    try:
        yield
    except OSError as error:
        raise _explained(doing, path, error.errno, str(error)) from error
    except SafetensorError as error:
        # safetensors writes by itself and has no errno but in its text.
        code = re.search(r"\(os error (\d+)\)", str(error))
        raise _explained(doing, path, int(code[1]) if code else None, str(error)) from error


def _explained(doing: str, path: Path, code: int | None, text: str) -> CheckpointError:
    found, do = text, "see the cause above"
    if code in {ENOSPC, EDQUOT}:
        found = f"no space is left for it ({text})"
        do = "free some space or choose another folder; the last complete checkpoint is untouched"
    elif code in {EACCES, EPERM, EROFS}:
        found = f"permission is denied ({text})"
        do = "choose a folder that you may read and write, or change its permissions"
    elif code in {ENOTDIR, EEXIST}:
        found = f"a file is where a folder should be ({text})"
        do = "choose another folder, or move the file away"
    elif code == ENOENT:
        found = f"it is not there, or went away meanwhile ({text})"
        do = "check the path; no two runs may write checkpoints into one folder"
    return CheckpointError(f"{doing} {path}", found, do)


def _candidates(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name, highest step first, those set aside after their like."""
    with plain_errors("looking for checkpoints in", folder):
        try:
            paths = [path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)]
        except FileNotFoundError:
            return []
    return sorted(paths, key=lambda path: (-step_of(path), path.name.startswith(".")))
