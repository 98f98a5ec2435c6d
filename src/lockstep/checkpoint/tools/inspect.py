"""What is at a path: the checkpoints of a run and their health, and the tensors of one of them.

What is wrong with a checkpoint, and what is in a run's folder.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import layout, storage
from lockstep.checkpoint.formats.safetensors import read_header
from lockstep.checkpoint.tools.contents import Contents, Stored, leaves, open_contents
from lockstep.errors import CheckpointError


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found."""

    path: Path
    checkpoints: tuple[Health, ...]
    """Of a run's folder all of them, the oldest first; of a checkpoint itself."""
    leftovers: tuple[Path, ...]
    """Of saves that were interrupted, or are going on."""
    contents: Contents | None
    """Of the path, or of the latest complete checkpoint in it; None where there is none."""

    @property
    def sound(self) -> bool:
        """Whether something is there and nothing of it is broken."""
        return self.contents is not None and not any(h.problems for h in self.checkpoints)

    def as_json(self) -> dict[str, Any]:
        """All of it, for `json.dumps`."""
        contents = self.contents
        return {
            "path": str(self.path),
            "sound": self.sound,
            "checkpoints": [
                {"path": str(health.path), "problems": list(health.problems)}
                for health in self.checkpoints
            ],
            "leftovers": [str(path) for path in self.leftovers],
            "contents": contents
            and {
                "path": str(contents.path),
                "kind": contents.kind,
                "facts": dict(contents.facts),
                "files": dict(contents.files),
                "modules": list(contents.modules),
                "tensors": _rows(contents.tensors.values()),
                "training": _rows(contents.training.values()),
                "extra": list(contents.extra),
                "totals": totals(contents.tensors.values()),
            },
        }


def inspect(path: Path, *, name: str | None = None, trust: bool = False) -> Inspection:
    """Looks at a file, a checkpoint or a run's folder; reads no values.

    Args:
        path: as for `open_contents`.
        name: one model of several.
        trust: a torch file may run code of its author's while it is read.

    Raises:
        CheckpointError: it is no checkpoint, and cannot be read.
        SettingError: there is no such name.
    """
    path = named(path)
    checkpoints = tuple(map(examine, checkpoints_at(path)))
    run = path.is_dir() and path not in [health.path for health in checkpoints]
    leftovers = tuple(sorted(layout.leftovers(path))) if run else ()
    readable = [health.path for health in checkpoints if not health.problems]
    if readable:
        path_read = max(readable, key=lambda p: (layout.step_of(p), not p.name.startswith(".")))
    elif checkpoints or leftovers:
        return Inspection(path, checkpoints, leftovers, None)
    else:
        path_read = path
    contents = open_contents(path_read, name=name, trust=trust, everything=True, training=True)
    return Inspection(path, checkpoints, leftovers, contents)


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoints in a run's folder, whole or not, the oldest first; one that `path` is.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if not path.is_dir():
        return []
    with layout.plain_errors("looking at", path):
        found = [path] if _is_checkpoint(path) else list(path.iterdir())
    found = [p for p in found if p.is_dir() and _is_checkpoint(p)]
    return sorted(found, key=lambda p: (layout.step_of(p), p.name))


def named(path: Path) -> Path:
    """The same path, with a name at its end: not `.` or `..`."""
    return Path(os.path.abspath(path)) if path.name in ("", "..") else path


def totals(tensors: Iterable[Stored]) -> dict[str, Any]:
    """How much it is in all; a tensor with several names counts once."""
    own = [stored for stored in tensors if stored.tied_to is None]
    kinds = Counter(dtype_name(stored) for stored in own)
    return {
        "tensors": len(own),
        "values": sum(stored.count for stored in own),
        "bytes": sum(stored.nbytes for stored in own),
        "dtypes": dict(kinds.most_common()),
    }


def dtype_name(stored: Stored) -> str:
    """Such as `float32`."""
    return str(stored.dtype).removeprefix("torch.")


def _rows(tensors: Iterable[Stored]) -> list[dict[str, Any]]:
    return [
        {
            "name": stored.name,
            "shape": list(stored.shape),
            "dtype": dtype_name(stored),
            "bytes": stored.nbytes,
            "tied_to": stored.tied_to,
        }
        for stored in tensors
    ]


def _is_checkpoint(path: Path) -> bool:
    try:
        layout.step_of(path)
    except ValueError:
        return False
    return True


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
        if storage.seal_is_broken(text):
            raise ValueError("is damaged: its checksum differs")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return Health(path, (f"{layout.MANIFEST} {error}",), None)
    wrong = [_wrong_inside(path, name, trees) for name, trees in _needed(manifest).items()]
    inside = [problem for problem in wrong if problem]
    sizes = _wrong_sizes(path, manifest)
    if values and not sizes and not inside:
        with layout.plain_errors("looking at", path):
            damaged = storage.damaged_files(path, manifest)
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
        "checksums": {name: storage.of_file(path / name) for name in names},
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
