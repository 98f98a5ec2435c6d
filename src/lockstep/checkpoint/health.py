"""Examines checkpoints and reports what is wrong, for `lockstep checkpoint inspect` and `repair`.

A checkpoint is *complete* if its manifest (the JSON file that lists its contents) can be read and
all files have the listed sizes. It is *sound* if, besides, the files hold the tensors that the
manifest names and agree with their checksums.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import layout
from lockstep.checkpoint.checksums import check_seal, damaged_files
from lockstep.checkpoint.contents import Contents, open_contents
from lockstep.checkpoint.encoding import find_encoded_tensors
from lockstep.checkpoint.file_errors import plain_errors
from lockstep.checkpoint.formats.reading import read_stored
from lockstep.checkpoint.formats.safetensors import read_header
from lockstep.errors import CheckpointError


@dataclass(frozen=True)
class Health:
    """What is wrong with one checkpoint."""

    path: Path
    problems: tuple[str, ...]
    """Empty if nothing is wrong."""
    manifest: Mapping[str, Any] | None
    """The manifest of the checkpoint; None if it is missing or cannot be read."""
    only_file_list_wrong: bool = False
    """True if only the manifest's list of files is wrong, and the files themselves are sound."""
    is_of_other_version: bool = False
    """True if another version of Lockstep wrote the checkpoint, so that it cannot be examined."""


def examine(path: Path, *, values: bool = False) -> Health:
    """Examines the manifest and the files of a checkpoint, and whether they fit together.

    Args:
        path: the folder of the checkpoint.
        values: whether to read all files, to compare their checksums.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    # The manifest
    with plain_errors("looking at", path):
        if not (path / layout.MANIFEST).exists():
            problem = f"{layout.MANIFEST} is missing, which is written last"
            return Health(path, (problem,), manifest=None)
        try:
            text = layout.manifest_text(path)
            manifest = layout.parse_object(text)
            format_version = manifest.get("format")
            if format_version != layout.FORMAT:
                problem = f"its format is {format_version}, this Lockstep reads {layout.FORMAT}"
                return Health(path, (problem,), manifest=None, is_of_other_version=True)
            layout.check_manifest(manifest)
            tensors_of_files = tensor_names_of_files(manifest)
            check_seal(text)
        except (ValueError, KeyError, TypeError) as error:
            return Health(path, (f"{layout.MANIFEST} is damaged: {error}",), manifest=None)

    # The tensors in the files. Their problems are kept apart from those of the list of files,
    # because `repair` can write that list again.
    content_problems = _problems_of_contents(path, manifest, tensors_of_files)

    # The list of files in the manifest
    listed_sizes = manifest.get("files")
    if isinstance(listed_sizes, dict) and listed_sizes.keys() == tensors_of_files.keys():
        size_problems = layout.wrong_sizes(path, listed_sizes)
    else:
        size_problems = ["the list of files in the manifest is not that of its state"]

    # The checksums. Reading all values takes long, so this is skipped if the checkpoint is already
    # known to be broken.
    if values and not size_problems and not content_problems:
        with plain_errors("looking at", path):
            damaged = damaged_files(path, manifest)
        content_problems = [f"{name} is damaged: its checksum differs" for name in damaged]

    return Health(
        path,
        (*size_problems, *content_problems),
        manifest,
        only_file_list_wrong=bool(size_problems) and not content_problems,
    )


def _problems_of_contents(
    path: Path, manifest: Mapping[str, Any], tensors_of_files: Mapping[str, set[str]]
) -> list[str]:
    """Returns what is wrong with the tensors in the files of a checkpoint. Reads no values.

    Args:
        path: the folder of the checkpoint.
        manifest: the manifest of the checkpoint.
        tensors_of_files: the names of the tensors that each file must hold, by file name.
    """
    problems = []
    for file_name, tensor_names in tensors_of_files.items():
        problem = _problem_of_file(path, file_name, tensor_names)
        if problem is not None:
            problems.append(problem)
    if problems:
        return problems  # the shards cannot be checked without all files

    problem = _problem_of_shards(path, manifest, tensors_of_files)
    return [] if problem is None else [problem]


def tensor_names_of_files(manifest: Mapping[str, Any]) -> dict[str, set[str]]:
    """Returns the names of the tensors that each file of a checkpoint must hold, by file name.

    Rank 0 has written one file for each state (a module, or the rest of the training). Any other
    rank has written one file for each state of which it stores shards.

    Args:
        manifest: the manifest of the checkpoint.

    Raises:
        ValueError: a tensor of the state has no name.
    """
    names_of_files: dict[str, set[str]] = {}

    # The files of rank 0, with the tensors that are not in shards.
    for state_name, tree in layout.trees_of_files(manifest).items():
        names = set()
        for encoded in find_encoded_tensors(tree):
            name = _name_of(encoded)
            is_whole = "$tensor" in encoded  # otherwise its shards are added below
            if is_whole:
                names.add(name)
        names_of_files[layout.tensor_file(state_name)] = names

    # The shards: {state: {tensor: [[rank, offsets, sizes], ...]}}.
    for state_name, shards_of_tensor in manifest.get("shards", {}).items():
        for name, shards in shards_of_tensor.items():
            for rank, _offsets, _sizes in shards:
                file_name = layout.tensor_file(state_name, rank)
                names_of_files.setdefault(file_name, set()).add(name)
    return names_of_files


def _name_of(encoded_tensor: Mapping[str, Any]) -> str:
    """Returns the name of a whole tensor, {"$tensor": name}, or one in shards, {"$sharded": name}.

    Raises:
        ValueError: it has no name.
    """
    name = encoded_tensor.get("$tensor", encoded_tensor.get("$sharded"))
    if not isinstance(name, str):
        raise ValueError("a tensor of the state has no name")
    return name


def _problem_of_file(path: Path, file_name: str, tensor_names: set[str]) -> str | None:
    """Returns what is wrong with a file, or None. Reads only its header.

    Args:
        path: the folder of the checkpoint.
        file_name: the name of the file in it.
        tensor_names: the names of the tensors that the file must hold.
    """
    file = path / file_name
    if not file.is_file():
        return f"{file_name} is not there"

    try:
        tensors = read_header(file)
    except CheckpointError as error:
        return f"{file_name}: {error.found}"

    missing = tensor_names - tensors.keys()
    if missing:
        return f"{file_name} lacks {len(missing)} tensors of the state ({min(missing)})"
    return None


def _problem_of_shards(
    path: Path, manifest: Mapping[str, Any], file_names: Collection[str]
) -> str | None:
    """Returns what is wrong with the tensors that are stored in shards, or None.

    Args:
        path: the folder of the checkpoint.
        manifest: the manifest of the checkpoint.
        file_names: the files that the checkpoint should have.
    """
    # `read_stored` reads only files that the manifest lists. Another check reports if that list is
    # wrong. Here it must not hide what is wrong with the shards, so it is corrected.
    corrected_manifest = {**manifest, "files": file_names}
    for state_name, tree in layout.trees_of_files(manifest).items():
        sharded = [encoded for encoded in find_encoded_tensors(tree) if "$sharded" in encoded]
        try:
            # With lazy=True no values are read, but the shards are checked: together they must
            # cover their tensor without overlapping.
            read_stored(path, corrected_manifest, state_name, sharded, lazy=True)
        except CheckpointError as error:
            return f"the shards of {state_name} are not sound: {error.found}"
    return None


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`."""

    path: Path
    checkpoints: tuple[Health, ...]
    """All checkpoints of a run's folder, lowest step first; or the one that was given."""
    leftovers: tuple[Path, ...]
    """Hidden folders of saves that were interrupted or are in progress."""
    contents: Contents | None
    """The contents of the path, or of the latest complete checkpoint in it, if there is one."""

    @property
    def best(self) -> Path | None:
        """The checkpoint with the best metric, or None if the run has not said what is best."""
        paths = []
        manifests = []
        for health in self.checkpoints:
            if health.manifest is not None and not health.problems:
                paths.append(health.path)
                manifests.append(health.manifest)
        if not paths:
            return None

        # "min", "max" or nothing, as the latest one says.
        min_or_max = manifests[-1].get("best")
        return layout.best(paths, min_or_max) if min_or_max else None

    @property
    def sound(self) -> bool:
        """True if something can be read and no checkpoint has a problem."""
        has_problems = any(health.problems for health in self.checkpoints)
        return self.contents is not None and not has_problems


def inspect(path: Path, *, name: str | None = None, trust: bool = False) -> Inspection:
    """Examines a file of weights, a checkpoint or a run's folder, without reading values.

    Args:
        path: the file or folder, as for `open_contents`.
        name: the name of one model, if there are several.
        trust: whether a torch file may run its author's code while it is read.

    Raises:
        CheckpointError: the path is no checkpoint and cannot be read.
        SettingError: there is no model of this name.
    """
    # A checkpoint is recognised by the name of its folder. So "." is replaced by the full path.
    path = with_name(path)
    healths = tuple(examine(checkpoint) for checkpoint in checkpoints_at(path))

    leftovers: tuple[Path, ...] = ()
    is_checkpoint = path in [health.path for health in healths]
    if path.is_dir() and not is_checkpoint:
        leftovers = tuple(sorted(layout.leftovers(path)))

    readable = [health.path for health in healths if not health.problems]
    if readable:
        to_open = readable[-1]  # the newest checkpoint
    elif healths or leftovers:
        # All checkpoints are damaged, or there are only interrupted saves.
        return Inspection(path, healths, leftovers, contents=None)
    else:
        to_open = path  # a file of weights, or a folder of another library

    # All models of a checkpoint are described, and also the tensors of optimizers and the like.
    contents = open_contents(to_open, name=name, trust=trust, everything=True, training=True)
    return Inspection(path, healths, leftovers, contents)


def checkpoints_at(path: Path) -> list[Path]:
    """Lists the checkpoints in a run's folder, complete or not, lowest step first.

    If `path` is a checkpoint itself, the list has only this one.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if not path.is_dir():
        return []
    if layout.has_checkpoint_name(path):
        return [path]
    highest_step_first = layout.candidates(path)
    return [candidate for candidate in reversed(highest_step_first) if candidate.is_dir()]


def with_name(path: Path) -> Path:
    """Returns the path, made absolute if it ends in "." or "..", so that it ends in a name."""
    if path.name in ("", ".."):
        return Path(os.path.abspath(path))
    return path
