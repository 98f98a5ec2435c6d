"""Names the files of a checkpoint, lists the checkpoints of a run, and tells which are complete.

A checkpoint is *complete* if its manifest can be read and every file that the manifest lists exists
with the listed size. It is *sound* if the checksums agree too. Other files in the folder are left
alone.

    runs/digits/
      step-000000120/
        model.safetensors       one file for each module, with the names of the bare module
        training.safetensors    the tensors of everything else
        model-rank-00001.safetensors, ...
                                what the other ranks store of either: their shards
        manifest.json           step, epoch, versions, the state's tree, where the shards belong,
                                the files with their sizes and checksums, and a checksum of all that
      .step-000000110.tmp-...   being written or removed; never read, removed by the next save
      .step-000000120.replaced  the former checkpoint of a step that is saved again, until the new
                                one is complete
      .lock                     names the run that writes here, as long as it does
"""

from __future__ import annotations

import glob
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal

from lockstep.checkpoint import storage
from lockstep.checkpoint.checksums import check_seal
from lockstep.checkpoint.file_errors import plain_errors
from lockstep.errors import CheckpointError

FORMAT = 1
"""The version of this layout, as the manifest has it."""
MANIFEST = "manifest.json"
TRAINING = "training"
"""The name of the file for everything that is not a module, such as the optimizer."""
OPTIMIZERS = "optimizers"
"""What the manifest has for each optimizer under this key: its class, and the names of the
parameters of each group."""
CLASS_OF_OPTIMIZER = "class"
NAMES_OF_PARAMETERS = "parameters"
MAX_MANIFEST_BYTES = 1 << 28
"""The manifest of a model of a million tensors is smaller."""

# "step-000000120", ".step-000000120.replaced"
CHECKPOINT_NAME = re.compile(r"step-\d{9,}|\.step-\d{9,}\.replaced")
# ".step-000000110.tmp-0123456789abcdef"
TEMPORARY_NAME = re.compile(r"\.step-\d{9,}\.tmp-[0-9a-f]{16}")


# Names


def step_folder(folder: Path, step: int) -> Path:
    """Returns the folder of one step's checkpoint."""
    return folder / f"step-{step:09d}"


def temporary_folder(folder: Path, step: int) -> Path:
    """Returns a hidden folder for one step that no other process uses."""
    return folder / f".step-{step:09d}.tmp-{secrets.token_hex(8)}"


def tensor_file(name: str, rank: int = 0) -> str:
    """Returns the name of the file with the tensors that one rank stores of a state.

    Args:
        name: the name of a module, or `TRAINING`.
        rank: the rank that stores the tensors.
    """
    if rank == 0:
        return f"{name}.safetensors"
    return f"{name}-rank-{rank:05d}.safetensors"


def is_one_of_several_files(file: Path) -> bool:
    """Returns True if a module is spread over several files of a checkpoint, including this one.

    Then the file of rank 0, "model.safetensors", has a "model-rank-00001.safetensors" beside it.
    """
    name = file.stem.partition("-rank-")[0]
    return any(file.parent.glob(f"{glob.escape(name)}-rank-*.safetensors"))


def has_checkpoint_name(path: Path) -> bool:
    """Returns True if a folder has the name of a checkpoint: `step-...`, `.step-....replaced`."""
    return CHECKPOINT_NAME.fullmatch(path.name) is not None


def is_replaced(checkpoint: Path) -> bool:
    """Returns True for the former checkpoint of a step, `.step-....replaced`."""
    return checkpoint.name.startswith(".")


def step_of(path: Path) -> int:
    """Returns the step in the name of a checkpoint's folder, which may be a hidden folder."""
    # "step-000000120", ".step-000000120.replaced", ".step-000000110.tmp-0123456789abcdef"
    number = path.name.lstrip(".").split("-")[1]
    return int(number.partition(".")[0])


def is_plain_name(name: object) -> bool:
    """Returns True if a file name cannot lead out of the folder, and is not hidden."""
    if not isinstance(name, str) or not name or name.startswith("."):
        return False
    return not any(char in name for char in "/\\:\0")


# The checkpoints of a run


def candidates(folder: Path) -> list[Path]:
    """Lists the folders that have the name of a checkpoint, complete or not, highest step first.

    If a step has a former checkpoint (`.replaced`) too, the new one comes first.

    Raises:
        CheckpointError: `folder` is a file or cannot be read.
    """
    with plain_errors("looking for checkpoints in", folder):
        try:
            paths = [path for path in folder.iterdir() if has_checkpoint_name(path)]
        except FileNotFoundError:
            return []

    return sorted(paths, key=lambda path: (-step_of(path), is_replaced(path)))


def list_checkpoints(folder: Path) -> list[Path]:
    """Lists the complete checkpoints of a folder, lowest step first, one for each step.

    The list is empty if the folder does not exist.

    Raises:
        CheckpointError: `folder` is a file or cannot be read.
    """
    path_of_step: dict[int, Path] = {}
    for path in candidates(folder):
        # While a step is saved again, its former checkpoint stays beside the new one. `candidates`
        # lists the new one first, so the first complete one of a step is taken.
        step = step_of(path)
        if step not in path_of_step and is_complete(path):
            path_of_step[step] = path
    return [path_of_step[step] for step in sorted(path_of_step)]


def latest(folder: Path) -> Path | None:
    """Returns the complete checkpoint with the highest step, or None.

    Raises:
        CheckpointError: `folder` is a file or cannot be read.
    """
    for path in candidates(folder):
        if is_complete(path):
            return path
    return None


def best(paths: Iterable[Path], by: Literal["min", "max"]) -> Path | None:
    """Returns the complete checkpoint that was saved with the smallest or largest metric.

    If several have the same metric, it is the one of the lowest step.

    Args:
        paths: checkpoints, complete or not.
        by: whether the smallest or the largest metric is the best.

    Returns:
        The checkpoint, or None if no complete checkpoint has a metric.
    """
    metric_of_path: dict[Path, float] = {}
    for path in sorted(paths, key=step_of):
        manifest = _manifest_if_complete(path)
        if manifest is not None and isinstance(manifest.get("metric"), int | float):
            metric_of_path[path] = manifest["metric"]
    if not metric_of_path:
        return None

    # Both functions return the first of several equal items, here the one of the lowest step.
    choose = min if by == "min" else max
    return choose(metric_of_path, key=metric_of_path.__getitem__)


def leftovers(folder: Path) -> list[Path]:
    """Lists the hidden folders that interrupted saves have left in a folder."""
    return [path for path in folder.iterdir() if TEMPORARY_NAME.fullmatch(path.name)]


def hide(path: Path) -> Path:
    """Renames a checkpoint that is about to be removed to a hidden name, and returns the new path.

    If the removal is interrupted, no half-removed folder looks like a checkpoint.
    """
    hidden = temporary_folder(path.parent, step_of(path))
    storage.rename(path, hidden)
    return hidden


# Complete checkpoints


def is_complete(path: Path) -> bool:
    """Returns True if a checkpoint's manifest can be read and its files have the listed sizes."""
    return _manifest_if_complete(path) is not None


def _manifest_if_complete(path: Path) -> dict[str, Any] | None:
    """Returns the manifest of a checkpoint, or None if the checkpoint is not complete.

    No error is raised if the manifest is damaged, even if its values have wrong types.
    """
    try:
        manifest = parse_object(manifest_text(path))
        files = manifest["files"]
        if not files:
            return None
        if not all(is_plain_name(name) for name in files):
            return None
        if wrong_sizes(path, files):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest


def wrong_sizes(path: Path, files: Mapping[str, Any]) -> list[str]:
    """Describes each listed file that is missing or has another size than listed.

    Args:
        path: the folder of the checkpoint.
        files: the sizes by file name, as the manifest lists them.
    """
    problems = []
    for name, listed_size in files.items():
        try:
            size = size_of_file(path / name)
        except (FileNotFoundError, ValueError):
            # There is nothing of this name, or something that is no file, such as a folder.
            problems.append(f"{name} is missing")
            continue

        # The manifest may be damaged. In Python, True and 1.0 are equal to 1 too.
        if type(listed_size) is not int or size != listed_size:
            problems.append(f"{name} has {size} bytes, the manifest says {listed_size}")
    return problems


def size_of_file(file: Path) -> int:
    """Returns the size of a plain file in bytes.

    Raises:
        OSError: the file does not exist.
        ValueError: it is not a plain file. (Reading from a pipe, for example, could block forever.)
    """
    status = file.lstat()
    if not S_ISREG(status.st_mode):
        raise ValueError(f"{file.name} is no plain file, but a link, a folder or a device")
    return status.st_size


# Manifests


def manifest_text(path: Path) -> bytes:
    """Returns the bytes of a checkpoint's manifest file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is longer than any manifest can be.
    """
    if size_of_file(path / MANIFEST) > MAX_MANIFEST_BYTES:
        raise ValueError(f"it is longer than {MAX_MANIFEST_BYTES} bytes")
    return (path / MANIFEST).read_bytes()


def parse_object(text: bytes) -> dict[str, Any]:
    """Parses the JSON object in a file.

    Raises:
        ValueError: the file holds no JSON object, or an object with a duplicate key.
    """
    try:
        content = json.loads(text.decode(), object_pairs_hook=_dict_without_duplicates)
    except RecursionError as error:  # a malicious file with thousands of nested brackets
        raise ValueError(str(error)) from None
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def _dict_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns key-value pairs as a dictionary; raises ValueError if a key occurs twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a name is there twice")
    return content


def trees_of_files(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the states in a manifest as JSON trees (see `encoding`), by the names of their files.

    There is one state for each module, under its name, and one under `TRAINING`.
    """
    return {**manifest["modules"], TRAINING: manifest["training"]}


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Checks that a manifest has the fields and types that its readers rely on.

    Raises:
        ValueError: a field is missing or has another type.
    """
    modules = manifest.get("modules")
    if not isinstance(modules, dict) or not isinstance(manifest.get("training"), dict):
        raise ValueError("it lacks the state")

    # The state of a module must be a dictionary of its tensors by name. It is written as
    # {"fc.weight": tensor, ...}, or, if it is an OrderedDict, as {"$ordered": [["fc.weight",
    # tensor], ...]}.
    for tree in modules.values():
        if not _is_tree_of_dict(tree):
            raise ValueError("the state of a module is not by name")
    # The name of a module is also that of its file.
    if not all(is_plain_name(name) for name in modules):
        raise ValueError("it names files outside of its folder")

    if not isinstance(manifest.get("checksums"), dict):
        raise ValueError("it lacks the checksums of its files")

    if not _optimizers_are_described(manifest.get(OPTIMIZERS)):
        raise ValueError("what it says about its optimizers is damaged")

    # Only with virtual ranks must BatchNorm take its statistics from the same samples as before:
    # from the whole global batch if `sync_batchnorm` is True, else from each virtual rank's part.
    has_virtual_ranks = manifest.get("virtual_ranks") is not None
    if has_virtual_ranks and not isinstance(manifest.get("sync_batchnorm"), bool):
        raise ValueError("it does not say where BatchNorm took its statistics")

    if not _shards_are_listed(manifest.get("shards", {})):
        raise ValueError("its list of shards is damaged")


def _optimizers_are_described(facts_of_optimizers: Any) -> bool:
    """Returns True if a value has the form {"optimizer": {"class": ..., "parameters": ...}}.

    See `optimizer_match.optimizer_facts`.
    """
    if not isinstance(facts_of_optimizers, dict):
        return False
    for facts in facts_of_optimizers.values():
        if not isinstance(facts, dict) or not isinstance(facts.get(CLASS_OF_OPTIMIZER), str):
            return False
        if not _are_groups_of_names(facts.get(NAMES_OF_PARAMETERS)):
            return False
    return True


def _are_groups_of_names(groups: Any) -> bool:
    """Returns True if a value is a list of lists of names. A name may be None."""
    if not isinstance(groups, list):
        return False
    for group in groups:
        if not isinstance(group, list):
            return False
        if not all(name is None or isinstance(name, str) for name in group):
            return False
    return True


def _shards_are_listed(shards_of_states: Any) -> bool:
    """Returns True if a value has the form {"model": {"fc.weight": [[rank, offsets, sizes], ...]}}.

    The offsets and sizes are checked when the shards are read.
    """
    try:
        for shards_of_tensor in shards_of_states.values():
            for shards in shards_of_tensor.values():
                for rank, _offsets, _sizes in shards:
                    if type(rank) is not int:
                        return False
    except (AttributeError, TypeError, ValueError):  # something is no dictionary or no list of 3
        return False
    return True


def _is_tree_of_dict(tree: Any) -> bool:
    """Returns True if a tree stands for a dictionary, in any form in which `encode` writes one."""
    if not isinstance(tree, dict):
        return False
    tags = {key for key in tree if key.startswith("$")}
    return tags <= {"$dict", "$ordered"}  # no tag: a plain dictionary


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a complete checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or has an unknown format.
    """
    manifest = _manifest_if_complete(path)
    if manifest is None:
        raise _damaged_error(
            path,
            "it is not complete: its manifest is missing, or names files that are missing or short",
        )

    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {path}",
            f"its format is {manifest.get('format')}, this version of Lockstep reads {FORMAT}",
            f"read it with Lockstep {manifest.get('lockstep', 'of the version that saved it')}",
        )

    # The manifest ends with its own checksum, the seal.
    try:
        check_manifest(manifest)
        check_seal(manifest_text(path))
    except (OSError, ValueError) as error:
        raise _damaged_error(path, f"its manifest is damaged: {error}") from None
    return manifest


def _damaged_error(path: Path, found: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path}", found, "use an earlier one of the folder")
