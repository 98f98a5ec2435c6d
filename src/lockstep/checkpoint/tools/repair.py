"""Puts a run's folder in order: first a plan, then, if the user wants it, the doing.

What can be done, and what cannot:

- A save that was stopped after its manifest and before its last rename is finished by that rename.
- A manifest whose list of files is wrong is written anew, where each file is whole and holds every
  tensor of the state. A manifest that is lost is lost: what names and nests the state is nowhere
  else. The weights can still be read from their files.
- What is broken is removed, as long as a sound checkpoint remains or nothing of it can be read.

Sound checkpoints are not touched, nor is what was changed a short time ago.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.checkpoint import layout
from lockstep.checkpoint.formats.weight_files import in_place
from lockstep.checkpoint.save import write_text
from lockstep.checkpoint.storage import sealed, sync_folder
from lockstep.checkpoint.tools.inspect import (
    Health,
    checkpoints_at,
    examine,
    listed,
    named,
    whole_files,
)
from lockstep.errors import CheckpointError

RECENT = 600.0
"""Seconds: what was changed since may belong to a run that is saving, or to a copy in progress."""


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
    found = {path: examine(path, values=True) for path in dict.fromkeys((*paths, *around))}
    broken = [found[path] for path in paths if found[path].problems]
    sound = {layout.step_of(path) for path in around if not found[path].problems}
    complete = {path: examine(path, values=True) for path in unfinished}
    finish = [
        path
        for path, health in complete.items()
        if not health.problems and _step(path) not in sound and not _target(path).exists()
    ]
    remains = bool(sound or finish or any(health.only_sizes for health in broken))
    plan = [_for_broken(health, remains) for health in broken]
    plan += [
        Repair("finish", path, "a save that was stopped before its last rename; it is complete")
        if path in finish
        else _for_broken(health, remains, "a save that was stopped; ")
        for path, health in complete.items()
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
                os.replace(path, _target(path))
            elif repair.what == "rebuild":
                _rebuild(path)
            elif repair.what == "remove":
                _remove(path)
            sync_folder(path.parent)


def _for_broken(health: Health, remains: bool, before: str = "") -> Repair:
    why = before + ("; ".join(health.problems) or "there is a complete one of the same step")
    if health.only_sizes and not before:
        return Repair("rebuild", health.path, f"{why}; the files are whole and hold the state")
    if health.foreign:
        return Repair("leave", health.path, why)
    whole = [] if remains else [f for f in whole_files(health.path) if f.name != layout.TRAINING]
    if whole:
        names = ", ".join(file.name for file in whole)
        return Repair(
            "leave",
            health.path,
            f"{why}. No complete checkpoint remains, and {names} can be read: "
            f"lockstep.load_weights(model, '{whole[0]}')",
        )
    return Repair("remove", health.path, why)


def _not_if_recent(repair: Repair, now: float) -> Repair:
    changed = max(p.lstat().st_mtime for p in (repair.path, *repair.path.iterdir()))
    if repair.what == "leave" or now - changed > RECENT:
        return repair
    return Repair(
        "leave",
        repair.path,
        f"{repair.why}. It was changed in the last {RECENT / 60:.0f} minutes: a run may be saving; "
        "try again later",
    )


def _rebuild(path: Path) -> None:
    health = examine(path)
    if health.manifest is None or not health.only_sizes:
        raise FileNotFoundError(f"{path} has changed meanwhile")
    manifest = {**health.manifest, **listed(path, health.manifest)}
    with in_place(path / layout.MANIFEST) as temporary:
        write_text(temporary, sealed(manifest))


def _remove(path: Path) -> None:
    # Renamed first, so that a removal that is cut short leaves nothing with a checkpoint's name.
    hidden = layout.temporary_folder(path.parent, _step(path))
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def _step(path: Path) -> int:
    return int(path.name.removeprefix(".").split("-")[1].split(".")[0])


def _target(path: Path) -> Path:
    return layout.step_folder(path.parent, _step(path))
