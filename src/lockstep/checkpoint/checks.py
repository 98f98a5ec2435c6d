"""Whether a run has something to save, and what was saved is what a run has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint.modules import differences, plain_state_dict
from lockstep.errors import CheckpointError, UsageError

RESERVED = frozenset({"training", "manifest", "world", "random", "replicas"})
"""Names that a checkpoint has for what is its own."""
BUILD = "build {} as it was in the run that saved it"
_LENGTHS = ("total_steps", "T_max", "total_iters")
"""Under these names torch's schedulers keep how long they are."""


def check_state(state: Mapping[str, Any]) -> None:
    """Raises UsageError where nothing is to be saved, or something that has no state."""
    if not state:
        raise UsageError(
            "world.checkpoint without anything to save",
            "only the folder was given",
            "name what to save: world.checkpoint(folder, model=model, optimizer=optimizer)",
        )
    for name, value in state.items():
        if not all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"world.checkpoint(..., {name}=...)",
                f"a {type(value).__name__} has no state_dict() and load_state_dict()",
                "pass modules, optimizers, schedulers, loaders, or own objects that have both",
            )
        if name in RESERVED or not name.isidentifier():
            raise UsageError(
                f"world.checkpoint(..., {name}=...)",
                "the name is taken by the checkpoint itself, or is no plain word",
                "use another keyword",
            )
    if len({name.lower() for name in state}) < len(state):
        raise UsageError(
            f"world.checkpoint with {', '.join(state)}",
            "names that differ in upper and lower case alone are one file on some systems",
            "use keywords that differ in more",
        )


def check_fits(path: Path | str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Whether what was saved is the state of a run, and of one that has what this one has."""
    doing, manifest = f"resuming from {path}", saved["manifest"]
    numbers = all(type(manifest.get(key)) is int for key in ("epoch", "step", "world_size"))
    if not (numbers and "strategy" in manifest and {"world", "random"} <= saved.keys()):
        raise CheckpointError(
            doing,
            "its manifest lacks the step, or the state of the run",
            "use an earlier checkpoint of the same folder",
        )
    there = saved.keys() - RESERVED
    if own.keys() != there:
        raise CheckpointError(
            f"{doing} with {', '.join(sorted(own))}",
            f"not in the checkpoint: {', '.join(sorted(own.keys() - there)) or 'nothing'}; "
            f"in the checkpoint alone: {', '.join(sorted(there - own.keys())) or 'nothing'}",
            "pass to world.checkpoint the names that the run was saved with, or load single "
            "models with lockstep.load_weights",
        )
    for name, value in own.items():
        found, was_module = "", name in manifest["modules"]
        if isinstance(value, nn.Module) != was_module:
            was = "was a module" if was_module else "was not a module"
            found = f"{name} {was} when it was saved, and is a {type(value).__name__} now"
        elif was_module and (differ := differences(saved[name], plain_state_dict(value))):
            found = f"{name} does not fit: {differ}"
        if found:
            raise CheckpointError(doing, found, BUILD.format(name))
        if isinstance(value, LRScheduler):
            _check_length(path, name, value, saved[name])


def _check_length(path: Path | str, name: str, own: LRScheduler, saved: Any) -> None:
    """Whether a schedule that ends, and raises behind its end, ends where it did."""
    for place, before, now in other_lengths(own, saved):
        if place.endswith("total_steps"):
            kind = type(getattr(own, "inner", own)).__name__
            raise CheckpointError(
                f"resuming {name} from {path}",
                f"{kind} was saved with {place}={before} and is built with {place}={now}: "
                f"it would go on as saved, and end after {before} steps",
                "resume with as many epochs as before; to train longer, load the model alone with "
                "lockstep.load_weights and begin a new schedule, or use a schedule without an end",
            )


def other_lengths(own: LRScheduler, saved: Any) -> list[tuple[str, int, int]]:
    """Where a scheduler is built of another length than it was saved with; both lengths."""
    before, now = dict(_lengths(saved)), dict(_lengths(own.state_dict()))
    return [(p, before[p], n) for p, n in now.items() if before.get(p, n) != n]


def _lengths(state: Any, place: str = "") -> Iterator[tuple[str, int]]:
    """How long a scheduler, and those inside it, are, by where that stands in its state."""
    if isinstance(state, list | tuple):
        state = dict(enumerate(state))
    for key, value in state.items():
        if isinstance(value, dict | list | tuple):
            yield from _lengths(value, f"{place}{key}.")
        elif key in _LENGTHS and type(value) is int:
            yield f"{place}{key}", value
