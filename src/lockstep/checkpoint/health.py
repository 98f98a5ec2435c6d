"""What is wrong with a checkpoint, and what is in a run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import checksums, layout
from lockstep.checkpoint.header import read_header
from lockstep.checkpoint.stored import leaves
from lockstep.errors import CheckpointError


@dataclass(frozen=True)
class Health:
    """Of one checkpoint."""

    path: Path
    problems: tuple[str, ...]
    """Empty: it is complete, its files have their sizes, and hold what the manifest names."""
    manifest: Mapping[str, Any] | None
    """None: there is none that can be read."""
    only_sizes: bool = False
    """All that is wrong is the manifest's list of files; the files themselves are sound."""
    foreign: bool = False
    """It is of another version of Lockstep, and cannot be judged here."""


def examine(path: Path, *, values: bool = False) -> Health:
    """Compares a checkpoint's manifest with its files.

    Args:
        path: of the checkpoint.
        values: read all of the files, and compare their checksums.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        text = _manifest(path)
        manifest = _parsed(text)
        if manifest.get("format") != layout.FORMAT:
            found = f"its format is {manifest.get('format')}, this Lockstep reads {layout.FORMAT}"
            return Health(path, (found,), None, foreign=True)
        _check_state(manifest)
        if checksums.seal_is_broken(text):
            raise ValueError("is damaged: its checksum differs")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return Health(path, (f"{layout.MANIFEST} {error}",), None)
    wrong = [_wrong_inside(path, name, trees) for name, trees in _needed(manifest).items()]
    inside = [problem for problem in wrong if problem]
    sizes = _wrong_sizes(path, manifest)
    if values and not sizes and not inside:
        with layout.plain_errors("looking at", path):
            damaged = checksums.damaged_files(path, manifest)
        inside = [f"{name} is damaged: its checksum differs" for name in damaged]
    return Health(path, (*sizes, *inside), manifest, only_sizes=bool(sizes) and not inside)


def whole_files(path: Path) -> list[Path]:
    """The safetensors files of a folder that are whole in themselves, and hold something."""
    found = []
    for file in sorted(path.glob("*.safetensors")):
        try:
            if read_header(file):
                found.append(file)
        except CheckpointError:
            continue
    return found


def listed(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest should say of its files, as they are."""
    names = list(_needed(manifest))
    return {
        "files": {name: (path / name).stat().st_size for name in names},
        "checksums": {name: checksums.of_file(path / name) for name in names},
    }


def _manifest(path: Path) -> bytes:
    with layout.plain_errors("looking at", path):
        if not (path / layout.MANIFEST).exists():
            raise ValueError("is missing, which is written last")
        return layout.manifest_text(path)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        return layout.parsed(text)
    except ValueError as error:
        raise ValueError(f"is damaged: {error}") from error


def _check_state(manifest: Mapping[str, Any]) -> None:
    modules = manifest.get("modules")
    if not isinstance(modules, dict) or "training" not in manifest:
        raise ValueError("is damaged: it lacks the state")
    if not all(map(layout.is_plain, modules)):
        raise ValueError("names files outside of its folder")
    for tree in (*modules.values(), manifest["training"]):
        if not all(isinstance(leaf["$tensor"], str) for leaf in leaves(tree)):
            raise ValueError("is damaged: a tensor of the state has no name")


def _needed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The tree that each file is to hold the tensors of."""
    modules = {layout.weights_file(name): tree for name, tree in manifest["modules"].items()}
    return {**modules, layout.TRAINING: manifest["training"]}


def _wrong_sizes(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    listed = manifest.get("files")
    if not isinstance(listed, dict) or listed.keys() != _needed(manifest).keys():
        return ["the list of files in the manifest is not that of its state"]
    wrong = []
    for name, size in listed.items():
        file = path / name
        if not file.is_file() or file.is_symlink():
            wrong.append(f"{name} is missing")
        elif file.stat().st_size != size:
            wrong.append(f"{name} has {file.stat().st_size} bytes, the manifest says {size}")
    return wrong


def _wrong_inside(path: Path, name: str, tree: Any) -> str:
    file = path / name
    if not file.is_file():
        return f"{name} is not there"
    try:
        entries = read_header(file)
    except CheckpointError as error:
        return f"{name}: {error.found}"
    lost = {leaf["$tensor"] for leaf in leaves(tree)} - entries.keys()
    return f"{name} lacks {len(lost)} tensors of the state ({min(lost)})" if lost else ""
