"""Checks what the user wants to save, and that a saved state fits the objects of a run.

The *state* is a dictionary of objects by name: modules, optimizers, schedulers and so on. The
*manifest* is the JSON file that lists what a checkpoint contains. The *length* of a scheduler is
the number of steps that it was built for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint import layout
from lockstep.checkpoint.differences import find_differences
from lockstep.checkpoint.modules import plain_shapes
from lockstep.errors import CheckpointError, SettingError, UsageError
from lockstep.file_paths import check_path_of_this_system
from lockstep.wording import describe_type, did_you_mean

NAMES_OF_OPTIONS = ("keep", "every", "best", "busy", "asynchronous", "memory")
"""The options of `world.checkpoint`. All other keywords name objects that are saved."""
PASS_OBJECTS_WITH_STATE = (
    "pass modules, optimizers, schedulers, loaders, or own objects that have both"
)
RESERVED_NAMES = frozenset({"training", "manifest", "world", "random", "replicas"})
"""Names that a checkpoint uses itself."""
BUILD_AS_SAVED = "build {} as it was in the run that saved it"
LENGTH_ATTRIBUTES = ("total_steps", "T_max", "total_iters")
"""The attributes in which torch's schedulers store their length: OneCycleLR; CosineAnnealingLR; and
LinearLR, ConstantLR and PolynomialLR."""


def check_all_are_named(unnamed_objects: Sequence[Any]) -> None:
    """Raises UsageError for `world.checkpoint(folder, model)`, in place of `model=model`."""
    if unnamed_objects:
        raise UsageError(
            f"world.checkpoint with {describe_type(unnamed_objects[0])} behind the folder",
            "each object needs a name, under which it is saved and found again",
            "name what to save: world.checkpoint(folder, model=model, optimizer=optimizer)",
        )


def check_state(state: Mapping[str, Any]) -> None:
    """Checks the objects that a user passes to `world.checkpoint`, and their names.

    Raises:
        UsageError: there are none, one of them has no state, or a name cannot be used.
    """
    if not state:
        raise UsageError(
            "world.checkpoint without anything to save",
            "only the folder was given",
            "name what to save: world.checkpoint(folder, model=model, optimizer=optimizer)",
        )

    for name, value in state.items():
        can_save = callable(getattr(value, "state_dict", None))
        can_load = callable(getattr(value, "load_state_dict", None))
        if not can_save or not can_load:
            raise UsageError(
                f"world.checkpoint(..., {name}=...)",
                f"{describe_type(value)} has no state_dict() and load_state_dict()",
                did_you_mean(name, NAMES_OF_OPTIONS, PASS_OBJECTS_WITH_STATE),
            )

        # Each name is a key of the manifest, and a part of the names of files.
        if name in RESERVED_NAMES or not name.isidentifier():
            raise UsageError(
                f"world.checkpoint(..., {name}=...)",
                "the name is taken by the checkpoint itself, or is no plain word",
                "use another keyword",
            )

    # "net" and "Net" would be written to the same file on a file system that ignores case.
    names_in_lower_case = {name.lower() for name in state}
    if len(names_in_lower_case) < len(state):
        raise UsageError(
            f"world.checkpoint with {', '.join(state)}",
            "names that differ in upper and lower case alone are one file on some systems",
            "use keywords that differ in more",
        )


def check_is_no_checkpoint(folder: Path) -> None:
    """Checks that a folder for the checkpoints of a run is not the folder of a single checkpoint.

    Raises:
        SettingError: it is the folder of a single checkpoint, or a path of another system.
    """
    check_path_of_this_system(f"world.checkpoint({str(folder)!r}, ...)", folder)

    # The path may be ".", or lead to a checkpoint by a symbolic link.
    resolved = folder.resolve()
    own_files = (layout.MANIFEST, layout.tensor_file(layout.TRAINING))
    is_named_like_checkpoint = layout.has_checkpoint_name(resolved)
    has_files_of_checkpoint = any((resolved / file).exists() for file in own_files)
    if is_named_like_checkpoint and has_files_of_checkpoint:
        raise SettingError(
            f"world.checkpoint({str(folder)!r}, ...)",
            "it is the folder of one checkpoint, not that of the run",
            f"give the folder of the run, {resolved.parent}: resume() takes its latest checkpoint; "
            "to go back to this one, copy it to another folder under the same name, and give that",
        )


def check_fits(path: Path | str, objects: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Checks that a saved state fits the objects of this run, before anything is loaded.

    Args:
        path: the folder of the checkpoint, or a description such as "step 12 in memory".
        objects: the objects of this run by name.
        saved: the saved states by name, with the `manifest`.

    Raises:
        CheckpointError: the saved state does not fit.
    """
    action = f"resuming from {path}"
    if not _has_all_for_resuming(saved):
        raise CheckpointError(
            action,
            "its manifest lacks the step, or the state of the run",
            "use an earlier checkpoint of the same folder",
        )

    saved_names = saved.keys() - RESERVED_NAMES  # the names that the user has given
    if objects.keys() != saved_names:
        not_saved = ", ".join(sorted(objects.keys() - saved_names))
        only_saved = ", ".join(sorted(saved_names - objects.keys()))
        differences = []
        if not_saved:
            differences.append(f"not in the checkpoint: {not_saved}")
        if only_saved:
            differences.append(f"in the checkpoint alone: {only_saved}")
        raise CheckpointError(
            f"resuming from {path} with {', '.join(sorted(objects))}",
            "; ".join(differences),
            "pass to world.checkpoint the names that the run was saved with, or load single "
            "models with lockstep.load_weights",
        )

    for name, value in objects.items():
        was_saved_as_module = name in saved["manifest"]["modules"]
        misfit = _describe_misfit(name, value, saved[name], was_module=was_saved_as_module)
        if misfit is not None:
            advice = BUILD_AS_SAVED.format(name)  # "build NAME as it was in the run that saved it"
            raise CheckpointError(action, misfit, advice)
        if isinstance(value, LRScheduler):
            _check_end_of_schedule(path, name, value, saved[name])


def _has_all_for_resuming(saved: Mapping[str, Any]) -> bool:
    """Returns True if saved states, with the `manifest`, have what only resuming needs.

    That is not checked when a manifest is read.
    """
    manifest = saved["manifest"]
    has_numbers = all(type(manifest.get(key)) is int for key in ("epoch", "step", "world_size"))
    has_run_state = "world" in saved and "random" in saved
    return has_numbers and has_run_state and "strategy" in manifest


def _describe_misfit(name: str, value: Any, saved: Any, *, was_module: bool) -> str | None:
    """Returns why a saved state does not fit an object, or None if it may fit.

    Only the state of a module is compared in detail: by names and shapes.

    Args:
        name: the name under which the object was saved.
        value: the object of this run.
        saved: the saved state.
        was_module: True if the object was an `nn.Module` when it was saved.
    """
    is_module = isinstance(value, nn.Module)
    if is_module and was_module:
        differences = find_differences(saved, plain_shapes(value))
        return f"{name} does not fit: {differences}" if differences else None

    if is_module or was_module:
        was = "was a module" if was_module else "was not a module"
        return f"{name} {was} when it was saved, and is {describe_type(value)} now"
    return None


def _check_end_of_schedule(path: Path | str, name: str, scheduler: LRScheduler, saved: Any) -> None:
    """Checks that a OneCycleLR is built for as many steps as it was saved with.

    When a scheduler loads its state, the saved number of steps replaces the number that it was
    built with. OneCycleLR raises an error after its last step, so a longer run would fail there.

    Args:
        path: the folder of the checkpoint, or a description such as "step 12 in memory".
        name: the name under which the user saves the scheduler.
        scheduler: the scheduler of this run.
        saved: its saved state.

    Raises:
        CheckpointError: the scheduler would end earlier or later than it was built for.
    """
    for length in changed_lengths(scheduler, saved):
        # The place is "total_steps", or in a SequentialLR "_schedulers.1.total_steps". Only
        # OneCycleLR has this attribute. Other schedulers just go on after their last step.
        is_length_of_one_cycle = length.place.endswith("total_steps")
        if is_length_of_one_cycle:
            kind = _class_name_of(scheduler)
            raise CheckpointError(
                f"resuming {name} from {path}",
                f"{kind} was saved with {length.place}={length.saved} and is built with "
                f"{length.place}={length.built}: it would go on as saved, and end after "
                f"{length.saved} steps",
                "resume with as many epochs as before; to train longer, load the model alone with "
                "lockstep.load_weights and begin a new schedule, or use a schedule without an end",
            )


def _class_name_of(scheduler: LRScheduler) -> str:
    """Returns the name of the class of the user's scheduler."""
    # A prepared scheduler is a wrapper with the user's own as `inner`.
    return type(getattr(scheduler, "inner", scheduler)).__name__


class ChangedLength(NamedTuple):
    """A number of steps of a scheduler that is not what was saved."""

    place: str
    """The place of the number in the scheduler's state, such as "_schedulers.1.T_max"."""
    saved: int
    """The number in the saved state."""
    built: int
    """The number that the scheduler of this run was built with."""


def changed_lengths(scheduler: LRScheduler, saved: Any) -> list[ChangedLength]:
    """Returns the lengths that differ between a scheduler and its saved state.

    The schedulers inside it (`SequentialLR`) are compared too.
    """
    saved_lengths = dict(_find_lengths(saved))
    changed = []
    for place, built in _find_lengths(scheduler.state_dict()):
        if place in saved_lengths and saved_lengths[place] != built:
            changed.append(ChangedLength(place, saved_lengths[place], built))
    return changed


def _find_lengths(state: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yields numbers of steps in a scheduler's state with their places.

    For example `("_schedulers.1.T_max", 100)`. A number of steps that a scheduler was built for is
    called a length; `LENGTH_ATTRIBUTES` lists the attributes that hold one.

    Args:
        state: the state of a scheduler, or a dictionary or list inside it.
        prefix: the place of that dictionary or list, ending in a dot: "_schedulers.1.".
    """
    if isinstance(state, list | tuple):
        state = dict(enumerate(state))  # by index

    for key, value in state.items():
        if isinstance(value, dict | list | tuple):
            yield from _find_lengths(value, f"{prefix}{key}.")
        elif key in LENGTH_ATTRIBUTES and type(value) is int:  # None if no length was given
            yield f"{prefix}{key}", value
