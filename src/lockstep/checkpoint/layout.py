"""Where a checkpoint's files are, and when a checkpoint is complete.

    runs/digits/
      step-000000120/
        model.safetensors       one file for each module, its keys as the bare module has them
        training.safetensors    the tensors of everything else
        model-rank-00001.safetensors, ...
                                what the other ranks store of either: their shards
        manifest.json           step, epoch, versions, the state's tree, where the shards belong,
                                the files with their sizes and checksums, and a checksum of all that
      .step-000000110.tmp-...   being written or removed; never read, cleaned up by the next save
      .step-000000120.replaced  steps aside for a second save of the same step, then goes
      .lock                     who writes here, while a run does

A checkpoint is complete when its manifest can be read and every file that it lists is there in
the size that it lists; it is sound when the checksums agree too. Everything else in the folder is
left alone.
"""

from __future__ import annotations

import errno
import glob
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal

from safetensors import SafetensorError

from lockstep.checkpoint import storage
from lockstep.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
TRAINING = "training"
"""What is no module: the optimizer, and all else."""

_MAX_MANIFEST = 1 << 28
"""Bytes; a model of a million tensors has less."""
_CHECKPOINT = re.compile(r"step-\d{9,}|\.step-\d{9,}\.replaced")
_TEMPORARY = re.compile(r"\.step-\d{9,}\.tmp-[0-9a-f]{16}")


def step_folder(folder: Path, step: int) -> Path:
    """The folder of one step's checkpoint."""
    return folder / f"step-{step:09d}"


def temporary_folder(folder: Path, step: int) -> Path:
    """A name that no other process uses."""
    return folder / f".step-{step:09d}.tmp-{secrets.token_hex(8)}"


def tensor_file(name: str, rank: int = 0) -> str:
    """The file of what one rank stores of the module of this name, or of the training."""
    return f"{name}-rank-{rank:05d}.safetensors" if rank else f"{name}.safetensors"


def states_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The trees of the states that a manifest has, by the names of their files."""
    return {**manifest["modules"], TRAINING: manifest["training"]}


def holds_shards(file: Path) -> bool:
    """Whether a file of a checkpoint is one of several that hold a module together."""
    stem = file.stem.partition("-rank-")[0]
    return any(file.parent.glob(f"{glob.escape(stem)}-rank-*.safetensors"))


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has a checkpoint's name."""
    return _CHECKPOINT.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder, also of a hidden one."""
    return int(path.name.lstrip(".").split("-")[1].partition(".")[0])


def candidates(folder: Path) -> list[Path]:
    """Folders with a checkpoint's name, highest step first, those set aside after their like.

    Raises:
        CheckpointError: `folder` is a file or cannot be read.
    """
    with plain_errors("looking for checkpoints in", folder):
        try:
            paths = list(filter(is_checkpoint, folder.iterdir()))
        except FileNotFoundError:
            return []
    return sorted(paths, key=lambda path: (-step_of(path), path.name.startswith(".")))


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a folder, the oldest step first; none where there is no folder.

    Raises:
        CheckpointError: `folder` is a file or cannot be read.
    """
    complete = filter(is_complete, reversed(candidates(folder)))
    return list({step_of(path): path for path in complete}.values())


def latest(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None.

    Raises:
        CheckpointError: `folder` is a file or cannot be read.
    """
    return next(filter(is_complete, candidates(folder)), None)


def best(paths: Iterable[Path], by: Literal["min", "max"]) -> Path | None:
    """The complete checkpoint that was saved with the smallest or largest metric, or None.

    Of equal ones the earliest; one without a metric is none.
    """
    found = {p: (_if_complete(p) or {}).get("metric") for p in sorted(paths, key=step_of)}
    metrics = {path: metric for path, metric in found.items() if isinstance(metric, int | float)}
    choose = min if by == "min" else max
    return choose(metrics, key=metrics.__getitem__, default=None)


def leftovers(folder: Path) -> list[Path]:
    """What interrupted saves have left in a folder."""
    return [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]


def is_complete(path: Path) -> bool:
    """Whether a checkpoint's manifest can be read and its files are there in full."""
    return _if_complete(path) is not None


def _if_complete(path: Path) -> dict[str, Any] | None:
    """The manifest of a complete checkpoint; None: it is not one."""
    try:
        manifest = parsed(manifest_text(path))
        files = manifest["files"]
        there = bool(files) and all(map(is_plain, files)) and not wrong_sizes(path, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if there else None


def wrong_sizes(path: Path, files: Mapping[str, Any]) -> list[str]:
    """Which files of a checkpoint are not there in the sizes of its manifest, in words."""
    wrong = []
    for name, size in files.items():
        try:
            found = size_of(path / name)
        except (FileNotFoundError, ValueError):
            wrong.append(f"{name} is missing")
        else:
            if type(size) is not int or found != size:
                wrong.append(f"{name} has {found} bytes, the manifest says {size}")
    return wrong


def manifest_text(path: Path) -> bytes:
    """What stands in the manifest of a checkpoint.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer than any that is written here.
    """
    if size_of(path / MANIFEST) > _MAX_MANIFEST:
        raise ValueError(f"it is longer than {_MAX_MANIFEST} bytes")
    return (path / MANIFEST).read_bytes()


def parsed(text: bytes) -> dict[str, Any]:
    """The object that JSON from a file describes.

    Raises:
        ValueError: it is no JSON object, or names something twice.
    """
    try:
        values = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    return values


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name is there twice")
    return content


def size_of(file: Path) -> int:
    """Bytes of a file that is nothing else: no link, and no pipe, which would be waited for.

    Raises:
        OSError: it is not there.
        ValueError: it is something else.
    """
    status = file.lstat()
    if not S_ISREG(status.st_mode):
        raise ValueError(f"{file.name} is no plain file, but a link, a folder or a device")
    return status.st_size


def is_plain(name: object) -> bool:
    """Whether it is the name of a file beside the manifest, without a way out of the folder."""
    return (
        isinstance(name, str)
        and bool(name)
        and not set(name) & set("/\\:\0")
        and not name.startswith(".")
    )


def check_state(manifest: Mapping[str, Any]) -> None:
    """Looks whether a manifest has the state of a run, in the form that all readers rely on.

    Raises:
        ValueError: it has not.
    """
    modules, shards = manifest.get("modules"), manifest.get("shards", {})
    if not isinstance(modules, dict) or not isinstance(manifest.get("training"), dict):
        raise ValueError("it lacks the state")
    for tree in modules.values():
        tags = {key for key in tree if key.startswith("$")} if isinstance(tree, dict) else {""}
        if not tags <= {"$dict", "$ordered"}:
            raise ValueError("the state of a module is not by name")
    if not all(map(is_plain, modules)):
        raise ValueError("it names files outside of its folder")
    if not isinstance(manifest.get("checksums"), dict):
        raise ValueError("it lacks the checksums of its files")
    try:
        for tensors in shards.values():
            for places in tensors.values():
                if not all(type(rank) is int for rank, _, _ in places):
                    raise TypeError
    except (AttributeError, TypeError, ValueError):
        raise ValueError("its list of shards is damaged") from None


def read_manifest(path: Path) -> dict[str, Any]:
    """A complete checkpoint's manifest.

    Raises:
        CheckpointError: the checkpoint is incomplete, or of a format that is not known here.
    """
    manifest = _if_complete(path)
    if manifest is None:
        raise _damaged(
            path,
            "it is not complete: its manifest is missing, or names files that are missing or short",
        )
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {path}",
            f"its format is {manifest.get('format')}, this version of Lockstep reads {FORMAT}",
            f"read it with Lockstep {manifest.get('lockstep', 'of the version that saved it')}",
        )
    try:
        check_state(manifest)
        storage.check_seal(manifest_text(path))
    except (OSError, ValueError) as error:
        raise _damaged(path, f"its manifest is damaged: {error}") from None
    return manifest


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path}", found, "use an earlier one of the folder")


def hide(path: Path) -> Path:
    """Gives a checkpoint that is to be removed a name by which nobody reads it; returns that.

    A removal that is cut short leaves nothing with a checkpoint's name.
    """
    hidden = temporary_folder(path.parent, step_of(path))
    storage.rename(path, hidden)
    return hidden


def unreadable(
    path: Path, found: str, do: str = "copy or download the file again, or use another one"
) -> CheckpointError:
    """The error of a file or folder whose weights cannot be read."""
    return CheckpointError(f"reading weights from {path}", found, do)


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """A file to read weights from; what is none, such as a pipe, may keep its reader waiting.

    Raises:
        CheckpointError: it is none, not there, or cannot be read.
    """
    with plain_errors("reading weights from", path):
        if not S_ISREG(path.stat().st_mode):
            raise unreadable(path, "it is no file, but a folder, a pipe or a device")
        with path.open("rb") as file:
            yield file


def make_way(path: Path) -> None:
    """Makes the folders above a file that is to be written.

    Raises:
        OSError: they cannot be made, or a folder has its name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")


@contextmanager
def plain_errors(doing: str, path: Path) -> Iterator[None]:
    """Turns what the file system and safetensors raise into a `CheckpointError` with its cause."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        found, do = str(error), "see the cause above"
        for codes, what, advice in _CAUSES:
            if getattr(error, "errno", None) in codes:
                found, do = f"{what} ({error})", advice
        raise CheckpointError(f"{doing} {path}", found, do) from error


_CAUSES = (
    (
        {errno.ENOSPC},
        "no space is left for it",
        "free some space or choose another folder; the last complete checkpoint is untouched",
    ),
    (
        {errno.EDQUOT, errno.EFBIG},
        "your quota, or a limit on the size of a file, is used up",
        "remove what you do not need, ask for more, or choose another folder; the last complete "
        "checkpoint is untouched",
    ),
    (
        {errno.EROFS},
        "the file system is read-only",
        "choose another folder; where it could be written before, look at the machine's log: a "
        "disk that fails is made read-only",
    ),
    (
        {errno.EACCES, errno.EPERM},
        "permission is denied",
        "choose a folder that you may read and write, or change its permissions",
    ),
    (
        {errno.ENOTDIR, errno.EEXIST},
        "a file is where a folder should be",
        "choose another folder, or move the file away",
    ),
    (
        {errno.ENOENT},
        "it is not there, or went away meanwhile",
        "check the path, and whether its file system is still mounted",
    ),
    (
        {errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO},
        "the disk or the network file system does not answer as it should",
        "look at the mount and the machine's log; an earlier checkpoint there is untouched",
    ),
)
"""Numbers of the system's errors, what they mean here, and what to do."""
