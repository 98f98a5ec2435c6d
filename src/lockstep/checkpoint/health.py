"""What is in a run's folder, what is wrong with it, and putting it in order.

Repairing is a plan first and then, if the user wants it, the doing. What can be done, and what
cannot:

- A save that was stopped after its manifest and before its last rename is finished by that rename.
- A manifest whose list of files is wrong is written anew, where each file is sound and holds every
  tensor of the state. A manifest that is lost is lost: what names and nests the state is nowhere
  else. The weights can still be read from their files.
- What is broken is removed, as long as a sound checkpoint remains or nothing of it can be read.

Sound checkpoints are not touched, nor is what was changed a short time ago.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.checkpoint import layout, storage
from lockstep.checkpoint.contents import Contents, open_contents
from lockstep.checkpoint.encoding import leaves
from lockstep.checkpoint.formats.reading import read_stored
from lockstep.checkpoint.formats.safetensors import read_header
from lockstep.errors import CheckpointError

RECENT = 600.0
"""Seconds: what was changed since may belong to a run that is saving, or to a copy in progress."""


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
    with layout.plain_errors("looking at", path):
        if not (path / layout.MANIFEST).exists():
            return Health(path, (f"{layout.MANIFEST} is missing, which is written last",), None)
        try:
            text = layout.manifest_text(path)
            manifest = layout.parsed(text)
            if manifest.get("format") == layout.FORMAT:
                layout.check_state(manifest)
                needed = _needed(manifest)
                storage.check_seal(text)
        except (ValueError, KeyError, TypeError) as error:
            return Health(path, (f"{layout.MANIFEST} is damaged: {error}",), None)
    if manifest.get("format") != layout.FORMAT:
        found = f"its format is {manifest.get('format')}, this Lockstep reads {layout.FORMAT}"
        return Health(path, (found,), None, foreign=True)
    wrong = [_wrong_inside(path, name, held) for name, held in needed.items()]
    wrong.append("" if any(wrong) else _wrong_shards(path, manifest, needed))
    inside = [problem for problem in wrong if problem]
    listed = manifest.get("files")
    if isinstance(listed, dict) and listed.keys() == needed.keys():
        sizes = layout.wrong_sizes(path, listed)
    else:
        sizes = ["the list of files in the manifest is not that of its state"]
    if values and not sizes and not inside:
        with layout.plain_errors("looking at", path):
            damaged = storage.damaged_files(path, manifest)
        inside = [f"{name} is damaged: its checksum differs" for name in damaged]
    return Health(path, (*sizes, *inside), manifest, only_sizes=bool(sizes) and not inside)


def _needed(manifest: Mapping[str, Any]) -> dict[str, set[str]]:
    """Which tensors each file is to hold.

    Raises:
        ValueError: a tensor of the state has no name.
    """
    needed = {}
    for name, tree in layout.states_of(manifest).items():
        places = list(leaves(tree))
        if not all(isinstance(p.get("$tensor", p.get("$sharded")), str) for p in places):
            raise ValueError("a tensor of the state has no name")
        needed[layout.tensor_file(name)] = {p["$tensor"] for p in places if "$tensor" in p}
    for name, tensors in manifest.get("shards", {}).items():
        for tensor, shards in tensors.items():
            for rank, _, _ in shards:
                needed.setdefault(layout.tensor_file(name, rank), set()).add(tensor)
    return needed


def _wrong_inside(path: Path, name: str, needed: set[str]) -> str:
    file = path / name
    if not file.is_file():
        return f"{name} is not there"
    try:
        entries = read_header(file)
    except CheckpointError as error:
        return f"{name}: {error.found}"
    lost = needed - entries.keys()
    return f"{name} lacks {len(lost)} tensors of the state ({min(lost)})" if lost else ""


def _wrong_shards(path: Path, manifest: Mapping[str, Any], files: Collection[str]) -> str:
    for name, tree in layout.states_of(manifest).items():
        sharded = [place for place in leaves(tree) if "$sharded" in place]
        try:
            read_stored(path, {**manifest, "files": files}, name, sharded, lazy=True)
        except CheckpointError as error:
            return f"the shards of {name} are not sound: {error.found}"
    return ""


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
    def best(self) -> Path | None:
        """The checkpoint with the best metric, where the run has said which that is."""
        sound = [h for h in self.checkpoints if h.manifest is not None and not h.problems]
        by = (sound[-1].manifest or {}).get("best") if sound else None
        return layout.best([h.path for h in sound], by) if by else None

    @property
    def sound(self) -> bool:
        """Whether something is there and nothing of it is broken."""
        return self.contents is not None and not any(h.problems for h in self.checkpoints)


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
    if not readable and (checkpoints or leftovers):
        return Inspection(path, checkpoints, leftovers, None)
    newest = readable[-1] if readable else path
    contents = open_contents(newest, name=name, trust=trust, everything=True, training=True)
    return Inspection(path, checkpoints, leftovers, contents)


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoints in a run's folder, complete or not, the oldest first; one that `path` is.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if layout.is_checkpoint(path):
        return [path] if path.is_dir() else []
    return [p for p in reversed(layout.candidates(path)) if p.is_dir()] if path.is_dir() else []


def named(path: Path) -> Path:
    """The same path, with a name at its end: not `.` or `..`."""
    return Path(os.path.abspath(path)) if path.name in ("", "..") else path


@dataclass(frozen=True)
class Repair:
    """One thing that is wrong, and what to do about it."""

    what: Literal["remove", "finish", "rebuild", "leave"]
    path: Path
    why: str


def plan_repairs(folder: Path, now: float | None = None) -> list[Repair]:
    """What is wrong in a run's folder or with one checkpoint; changes nothing.

    Args:
        folder: holds checkpoints, or is one.
        now: the time, as `time.time()` gives it (None: that).

    Raises:
        CheckpointError: there is no such folder, it cannot be read, or holds no checkpoints.
    """
    folder = named(folder)
    paths = checkpoints_at(folder)
    one = paths == [folder]
    around = checkpoints_at(folder.parent) if one else paths
    with layout.plain_errors("looking at", folder):
        unfinished = [] if one or not folder.is_dir() else sorted(layout.leftovers(folder))
    if not paths and not unfinished:
        raise CheckpointError(
            f"repairing {folder}",
            "it is no checkpoint, and no folder that holds any",
            "give the folder of world.checkpoint, or one checkpoint in it",
        )
    found = {path: examine(path, values=True) for path in {*paths, *around, *unfinished}}
    broken = [found[path] for path in paths if found[path].problems]
    sound = {layout.step_of(path) for path in around if not found[path].problems}
    missing = [p for p in unfinished if layout.step_of(p) not in sound and not _target(p).exists()]
    finish = [path for path in missing if not found[path].problems]
    remains = bool(sound or finish or any(health.only_sizes for health in broken))
    plan = [_for_broken(health, remains) for health in broken]
    plan += [
        Repair("finish", path, "a save that was stopped before its last rename; it is complete")
        if path in finish
        else _for_broken(found[path], remains, "a save that was stopped; ")
        for path in unfinished
    ]
    now = time.time() if now is None else now
    return [_not_if_recent(repair, now) for repair in plan]


def carry_out(plan: Sequence[Repair]) -> None:
    """Does what a plan says; what it leaves is left.

    Raises:
        CheckpointError: something cannot be done; what was done before remains done.
    """
    for repair in plan:
        path = repair.path
        with layout.plain_errors("repairing", path):
            if repair.what == "finish":
                storage.rename(path, _target(path))
            elif repair.what == "rebuild":
                _rebuild(path)
            elif repair.what == "remove":
                storage.remove_tree(layout.hide(path))
            storage.sync_folder(path.parent)


def _for_broken(health: Health, remains: bool, before: str = "") -> Repair:
    why = before + ("; ".join(health.problems) or "there is a complete one of the same step")
    if health.only_sizes and not before:
        return Repair("rebuild", health.path, f"{why}; the files are whole and hold the state")
    readable = [] if remains or health.foreign else _readable_weights(health.path)
    if readable:
        names = ", ".join(file.name for file in readable)
        why += f". No complete checkpoint remains, and {names} can be read: "
        why += f"lockstep.load_weights(model, '{readable[0]}')"
    return Repair("leave" if health.foreign or readable else "remove", health.path, why)


def _readable_weights(path: Path) -> list[Path]:
    """The files of a folder that hold all of a module, and can be read without the manifest."""
    found = []
    for file in sorted(path.glob("*.safetensors")):
        with suppress(CheckpointError):
            if not layout.holds_shards(file) and file.stem != layout.TRAINING and read_header(file):
                found.append(file)
    return found


def _not_if_recent(repair: Repair, now: float) -> Repair:
    changed = max(p.lstat().st_mtime for p in (repair.path, *repair.path.iterdir()))
    if repair.what == "leave" or now - changed > RECENT:
        return repair
    why = f"It was changed in the last {RECENT / 60:.0f} minutes: a run may be saving"
    return Repair("leave", repair.path, f"{repair.why}. {why}; try again later")


def _rebuild(path: Path) -> None:
    health = examine(path)
    if health.manifest is None or not health.only_sizes:
        raise FileNotFoundError(f"{path} has changed meanwhile")
    files = [path / name for name in _needed(health.manifest)]
    manifest = {
        **health.manifest,
        "files": {file.name: file.stat().st_size for file in files},
        "checksums": {file.name: storage.of_file(file) for file in files},
    }
    with storage.in_place(path / layout.MANIFEST) as temporary, storage.new_file(temporary) as file:
        storage.write(file, storage.sealed(manifest))


def _target(path: Path) -> Path:
    return layout.step_folder(path.parent, layout.step_of(path))
