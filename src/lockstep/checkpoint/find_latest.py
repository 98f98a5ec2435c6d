"""Finds the checkpoint that a run resumes: the latest sound one in its folder.

A checkpoint is *complete* if all its files have their sizes, and *sound* if their checksums agree
too. Rank 0 reads all files to find the latest sound checkpoint. The other ranks only look whether
they see a complete one, so that it is noticed if the machines do not share the folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checkpoint import layout
from lockstep.checkpoint.health import examine
from lockstep.checkpoint.lock import find_other_writer
from lockstep.errors import CheckpointError


@dataclass(frozen=True)
class FolderView:
    """What one rank sees in the folder of the run."""

    name: str | None
    """The name of the checkpoint to resume; None if there is none."""
    step: int = -1
    """The step of the checkpoint; -1 if there is none."""
    epoch: int = -1
    """The epoch of the checkpoint; -1 if there is none."""
    id: str | None = None
    """A random id, which distinguishes the checkpoint from one of the same name on another
    machine."""
    passed_over: dict[str, str] = field(default_factory=dict)
    """What is wrong with each newer checkpoint, by its name."""
    other_writer: str | None = None
    """A description of another run that writes into the folder."""

    def as_json(self) -> dict[str, Any]:
        """Returns the fields by name. They can be sent as JSON and passed to this class again."""
        return asdict(self)

    def describe_problems(self) -> str:
        """Returns the problems as the end of a sentence, or "" if there are none.

        Example: "; passed over: step-000000020 (incomplete); another run writes into this folder".
        """
        text = ""
        if self.passed_over:
            passed = ", ".join(f"{name} ({why})" for name, why in self.passed_over.items())
            text += f"; passed over: {passed}"
        if self.other_writer:
            text += f"; {self.other_writer} writes into this folder"
        return text


def find_latest_sound(folder: Path) -> FolderView:
    """Finds the latest sound checkpoint of a folder, and says why later ones were skipped.

    From the newest checkpoint down to the result, all files are read to compare their checksums.

    Raises:
        CheckpointError: `folder` is a file or cannot be read.
    """
    passed_over: dict[str, str] = {}
    for path in layout.candidates(folder):
        if not layout.is_complete(path):
            passed_over[path.name] = "incomplete"
            continue

        health = examine(path, values=True)  # reads all files
        # A checkpoint of another version of Lockstep is not skipped: reading it later raises an
        # error that says what to do.
        if health.problems and not health.is_of_other_version:
            passed_over[path.name] = "; ".join(health.problems)
            continue

        step, epoch = step_and_epoch(path)
        return FolderView(
            path.name,
            step,
            epoch,
            id=layout.read_manifest(path).get("id"),
            passed_over=passed_over,
            other_writer=find_other_writer(folder),  # named when the run resumes
        )
    return FolderView(name=None, passed_over=passed_over)


def find_latest_complete(folder: Path) -> FolderView:
    """Finds the latest complete checkpoint of a folder. Reads only manifests.

    Raises:
        CheckpointError: `folder` is a file or cannot be read.
    """
    path = layout.latest(folder)
    name = None if path is None else path.name
    return FolderView(name)


def step_and_epoch(path: Path) -> tuple[int, int]:
    """Returns the step and the epoch of a checkpoint; epoch -1 if its manifest is damaged."""
    try:
        epoch = int(layout.read_manifest(path)["epoch"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        epoch = -1
    return layout.step_of(path), epoch


def check_views(folder: Path, views: Sequence[FolderView]) -> None:
    """Checks that rank 0 has found a sound checkpoint, or that no rank sees any checkpoint.

    Args:
        folder: the folder of the run.
        views: the views of all ranks. The view of rank 0 decides what is resumed.

    Raises:
        CheckpointError: all checkpoints are damaged, or another rank sees a checkpoint where rank 0
            sees none.
    """
    view_of_rank_0 = views[0]
    if view_of_rank_0.name is not None:
        return  # `read_manifest_of` checks later that every other rank sees this checkpoint, too

    # Rank 0 has found checkpoints, but all of them are damaged.
    if view_of_rank_0.passed_over:
        # The problems begin with a semicolon: "; passed over: step-000000020 (incomplete)".
        raise CheckpointError(
            f"resuming from {folder}",
            f"none of its checkpoints is sound{view_of_rank_0.describe_problems()}",
            f"see `lockstep checkpoint repair {folder}`; to begin anew, choose another folder",
        )

    # Rank 0 sees no checkpoint at all, so the run would start from the beginning.
    ranks = [str(rank) for rank, view in enumerate(views) if view.name]
    if ranks:
        raise CheckpointError(
            f"resuming from {folder}",
            f"rank {', '.join(ranks)} sees a complete checkpoint there, rank 0 sees none",
            "use a shared folder, one that all machines see, or copy it to the machine of rank 0",
        )


def read_manifest_of(path: Path, checkpoint_id: str | None) -> dict[str, Any]:
    """Reads the manifest of the checkpoint that rank 0 has found, on any rank.

    Args:
        path: the folder of the checkpoint.
        checkpoint_id: the id in the manifest that rank 0 has read.

    Raises:
        CheckpointError: this rank sees no checkpoint there, or another one.
    """
    if not path.exists():
        found = "rank 0 has found it there, and this rank does not see it"
    else:
        manifest = layout.read_manifest(path)
        if manifest.get("id") == checkpoint_id:
            return manifest
        found = "this rank sees another checkpoint under that name than rank 0 does"

    raise CheckpointError(
        f"resuming from {path}",
        found,
        "use a shared folder, one that all machines see, or copy the checkpoint to each",
    )


def removed_meanwhile_error(path: Path) -> CheckpointError:
    """Returns the error for a checkpoint that this rank has found and that is gone since.

    A run that saves removes its older checkpoints. So most likely two runs have the same folder.
    """
    other_writer = find_other_writer(path.parent)
    if other_writer is None:
        found = "it was removed after it had been found, probably by another run in this folder"
    else:
        found = f"it was removed after it had been found; {other_writer} writes into this folder"
    return CheckpointError(
        f"resuming from {path}",
        found,
        "give each run a folder of its own (world.checkpoint(folder, ...)), and start this one "
        "again",
    )
