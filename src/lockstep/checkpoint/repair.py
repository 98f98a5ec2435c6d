"""Plans and makes the repairs of `lockstep checkpoint repair` in the folder of a run.

- A save that was interrupted after its manifest and before its last rename is finished by that
  rename.
- A manifest whose list of files is wrong is written again, if every file is sound and holds all
  tensors of the state. A lost manifest cannot be restored, because only the manifest has the names
  and the nesting of the state. The weights can still be read from their files.
- A broken checkpoint is removed, if a sound one remains or if nothing in it can be read.

Sound checkpoints are not touched, and neither is anything that was changed a short time ago.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.checkpoint import layout, storage
from lockstep.checkpoint.checksums import file_checksum, seal_manifest
from lockstep.checkpoint.file_errors import plain_errors
from lockstep.checkpoint.formats.safetensors import read_header
from lockstep.checkpoint.health import (
    Health,
    checkpoints_at,
    examine,
    tensor_names_of_files,
    with_name,
)
from lockstep.errors import CheckpointError

MIN_AGE_S = 600.0
"""What was changed more recently may belong to a run that is saving, or to a copy in progress."""


@dataclass(frozen=True)
class Repair:
    """One broken checkpoint or interrupted save, and what to do about it."""

    action: Literal["remove", "finish", "rebuild", "leave"]
    path: Path
    """The folder of a checkpoint, or the hidden folder of a save that was stopped."""
    why: str
    """What is wrong with it, for users."""


def plan_repairs(folder: Path, now_s: float | None = None) -> list[Repair]:
    """Finds out what is wrong in a run's folder or with one checkpoint. Changes nothing.

    Args:
        folder: the folder of a run, or one checkpoint in it.
        now_s: the time, as `time.time()` returns it, which is the default.

    Returns:
        A repair for each checkpoint that is not sound, and for each save that was stopped. Empty if
        all is in order.

    Raises:
        CheckpointError: there is no such folder, it cannot be read, or holds no checkpoints.
    """
    folder = with_name(folder)  # a checkpoint is recognised by the name of its folder
    checkpoints = checkpoints_at(folder)
    is_checkpoint = checkpoints == [folder]
    unfinished_saves: list[Path] = []
    if not is_checkpoint:
        with plain_errors("looking at", folder):
            if folder.is_dir():
                unfinished_saves = sorted(layout.leftovers(folder))
    if not checkpoints and not unfinished_saves:
        raise CheckpointError(
            f"repairing {folder}",
            "it is no checkpoint, and no folder that holds any",
            "give the folder of world.checkpoint, or one checkpoint in it",
        )

    # Whether a broken checkpoint may be removed depends on the other checkpoints of its run, even
    # if only this one was given.
    checkpoints_of_run = checkpoints_at(folder.parent) if is_checkpoint else checkpoints
    health_of: dict[Path, Health] = {}
    for path in {*checkpoints, *checkpoints_of_run, *unfinished_saves}:
        health_of[path] = examine(path, values=True)
    sound_steps = set()
    for path in checkpoints_of_run:
        if not health_of[path].problems:
            sound_steps.add(layout.step_of(path))

    broken = [health_of[path] for path in checkpoints if health_of[path].problems]
    to_rebuild = [health for health in broken if health.only_file_list_wrong]
    to_finish = _saves_to_finish(unfinished_saves, health_of, sound_steps)
    sound_one_remains = bool(sound_steps or to_finish or to_rebuild)

    plan = [_repair_checkpoint(health, sound_one_remains) for health in broken]
    for path in unfinished_saves:
        if path in to_finish:
            why = "a save that was stopped before its last rename; it is complete"
            plan.append(Repair("finish", path, why))
        else:
            plan.append(_repair_unfinished_save(health_of[path], sound_one_remains))

    if now_s is None:
        now_s = time.time()
    return [_leave_if_recent(repair, now_s) for repair in plan]


def _saves_to_finish(
    unfinished_saves: Sequence[Path], health_of: Mapping[Path, Health], sound_steps: Set[int]
) -> list[Path]:
    """Returns the interrupted saves that only lack their last rename, and are still needed.

    A save is not needed if its step has another checkpoint.

    Args:
        unfinished_saves: the hidden folders of saves that were interrupted.
        health_of: what is wrong with each of them.
        sound_steps: the steps of the run that have a sound checkpoint.
    """
    to_finish = []
    for path in unfinished_saves:
        is_whole = not health_of[path].problems
        has_sound_checkpoint = layout.step_of(path) in sound_steps

        # A damaged checkpoint of the step may be in the way of the last rename.
        name_is_taken = _final_path(path).exists()
        if is_whole and not has_sound_checkpoint and not name_is_taken:
            to_finish.append(path)
    return to_finish


def carry_out(plan: Sequence[Repair]) -> None:
    """Makes the repairs of a plan, one after the other. The repair "leave" changes nothing.

    Raises:
        CheckpointError: a repair cannot be made. The repairs before it have been made.
    """
    for repair in plan:
        path = repair.path
        with plain_errors("repairing", path):
            if repair.action == "finish":
                storage.rename(path, _final_path(path))
            elif repair.action == "rebuild":
                _rebuild_file_list(path)
            elif repair.action == "remove":
                # It is renamed first: if the removal is interrupted, no half checkpoint is left.
                hidden_path = layout.hide(path)
                storage.remove_tree(hidden_path)
            storage.sync_path(path.parent)


def _repair_checkpoint(health: Health, sound_one_remains: bool) -> Repair:
    """Decides what to do about a broken checkpoint.

    Args:
        health: what is wrong with it.
        sound_one_remains: True if the run has a sound checkpoint once all repairs are made.
    """
    why = "; ".join(health.problems)
    if health.only_file_list_wrong:
        why += "; the files are whole and hold the state"
        return Repair("rebuild", health.path, why)
    return _remove_or_leave(health, why, sound_one_remains)


def _repair_unfinished_save(health: Health, sound_one_remains: bool) -> Repair:
    """Decides what to do about an interrupted save that cannot or need not be finished.

    Args:
        health: what is wrong with its hidden folder. Without problems, it need not be finished.
        sound_one_remains: as for `_repair_checkpoint`.
    """
    problems = "; ".join(health.problems) or "there is a complete one of the same step"
    return _remove_or_leave(health, f"a save that was stopped; {problems}", sound_one_remains)


def _remove_or_leave(health: Health, why: str, sound_one_remains: bool) -> Repair:
    """Decides whether to remove a broken folder, or to leave it because it may still be useful.

    Args:
        health: what is wrong with the folder.
        why: the same as a text for the user.
        sound_one_remains: True if the run has another checkpoint, which is sound.
    """
    # The checkpoint was written by another version of Lockstep, which can perhaps read it.
    if health.is_of_other_version:
        return Repair("leave", health.path, why)

    # Nothing of the broken folder is needed if the run has a sound checkpoint.
    if sound_one_remains:
        return Repair("remove", health.path, why)

    # Otherwise, files of weights that can be read are all that is left.
    readable = _readable_weights(health.path)
    if not readable:
        return Repair("remove", health.path, why)

    names = ", ".join(file.name for file in readable)
    why += (
        f". No complete checkpoint remains, and {names} can be read: "
        f"lockstep.load_weights(model, '{readable[0]}')"
    )
    return Repair("leave", health.path, why)


def _readable_weights(path: Path) -> list[Path]:
    """Lists the files of a folder from which a module can be read without a manifest.

    Such a file holds all tensors of the module.
    """
    readable = []
    for file in sorted(path.glob("*.safetensors")):
        holds_only_shards = layout.is_one_of_several_files(file)
        holds_states_of_optimizers = file.stem == layout.TRAINING
        if holds_only_shards or holds_states_of_optimizers:
            continue

        # A file that cannot be read, or that has no tensors, is left out.
        with suppress(CheckpointError):
            tensors = read_header(file)
            if tensors:
                readable.append(file)
    return readable


def _leave_if_recent(repair: Repair, now_s: float) -> Repair:
    """Returns the repair, or one that leaves the folder alone if it was changed a short time ago.

    Args:
        repair: the planned repair.
        now_s: the present time, as `time.time()` returns it.
    """
    if repair.action == "leave":
        return repair

    # The last change of the folder or of a file in it.
    changed_at_s = repair.path.lstat().st_mtime
    for file in repair.path.iterdir():
        changed_at_s = max(changed_at_s, file.lstat().st_mtime)
    is_recent = now_s - changed_at_s <= MIN_AGE_S
    if not is_recent:
        return repair

    why = (
        f"{repair.why}. It was changed in the last {MIN_AGE_S / 60:.0f} minutes: a run may be "
        "saving; try again later"
    )
    return Repair("leave", repair.path, why)


def _rebuild_file_list(path: Path) -> None:
    """Writes a manifest again, with the sizes and checksums that the files have now.

    Raises:
        OSError: the checkpoint has changed since the plan was made.
    """
    # Some time may have passed since the plan was made, so the checkpoint is examined again.
    health = examine(path)
    if health.manifest is None or not health.only_file_list_wrong:
        raise OSError(f"{path} has changed meanwhile")

    # The tensors in the manifest tell which files there must be.
    sizes = {}
    checksums = {}
    file_names = tensor_names_of_files(health.manifest).keys()
    for file_name in file_names:
        file = path / file_name
        sizes[file_name] = file.stat().st_size
        checksums[file_name] = file_checksum(file)

    manifest = {**health.manifest, "files": sizes, "checksums": checksums}
    manifest_path = path / layout.MANIFEST
    with storage.replacing(manifest_path) as temporary, storage.new_file(temporary) as descriptor:
        storage.write(descriptor, seal_manifest(manifest))


def _final_path(path: Path) -> Path:
    """Returns the path of a checkpoint, given the hidden folder of its save."""
    return layout.step_folder(path.parent, layout.step_of(path))
