"""The steps of `Checkpoint.resume`: find, read and check all, then apply all.

Each is done by every rank on its own; the session exchanges what they found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint import layout
from lockstep.checkpoint.formats.reading import read_module, read_stored
from lockstep.checkpoint.health import examine
from lockstep.checkpoint.lock import holder
from lockstep.checkpoint.modules import differences, load_plain, plain_state_dict
from lockstep.checkpoint.sharding import in_memory, reshard_optimizer
from lockstep.distributed import seeding
from lockstep.distributed.collectives import Collectives
from lockstep.errors import CheckpointError

_LENGTHS = ("total_steps", "T_max", "total_iters")
"""Under these names torch's schedulers keep how long they are."""


@dataclass(frozen=True)
class Finding:
    """What one rank sees in the run's folder."""

    name: str | None
    """Of the latest sound checkpoint, and what tells it from others of that name; None: none."""
    id: str | None
    passed_over: dict[str, str] = field(default_factory=dict)
    """Newer ones, and what is wrong with each."""
    writer: str | None = None
    """Another run that writes there."""

    @property
    def words(self) -> str:
        """What else is to be said, to follow on a sentence."""
        passed = ", ".join(f"{name} ({why})" for name, why in self.passed_over.items())
        text = f"; passed over: {passed}" if passed else ""
        return text + (f"; {self.writer} writes into this folder" if self.writer else "")


def find(folder: Path, *, thoroughly: bool) -> Finding:
    """The latest sound checkpoint of a folder.

    Args:
        folder: holds the run's checkpoints.
        thoroughly: compare the checksums too, for which all of it is read.

    Raises:
        CheckpointError: `folder` is a file or cannot be read.
    """
    passed_over: dict[str, str] = {}
    for path in layout.candidates(folder):
        if not layout.is_complete(path):
            passed_over[path.name] = "incomplete"
            continue
        health = examine(path, values=True) if thoroughly else None
        if health is None or health.foreign or not health.problems:
            identity = layout.read_manifest(path).get("id")
            return Finding(path.name, identity, passed_over, holder(folder) if thoroughly else None)
        passed_over[path.name] = "; ".join(health.problems)
    return Finding(None, None, passed_over)


def read_all(
    path: Path, identity: str | None, state: Mapping[str, Any], reserved: Collection[str]
) -> dict[str, Any]:
    """All states of a checkpoint, after every check that can be made before loading.

    Args:
        path: of the checkpoint.
        identity: that of the checkpoint which rank 0 sees there.
        state: what is to take it up, by name; it is not changed.
        reserved: names in the checkpoint that are not of the user's.

    Raises:
        CheckpointError: this rank does not see it, or it does not fit.
    """
    manifest = _seen(path, identity)
    modules = {name: read_module(path, name, manifest) for name in manifest["modules"]}
    training = read_stored(path, manifest, layout.TRAINING, manifest["training"])
    _check_facts(path, manifest, training)
    _check_names(path, set(state), {*modules, *training} - set(reserved))
    for name, own in state.items():
        _check_entry(path, name, own, modules.get(name))
        if isinstance(own, LRScheduler):
            _check_length(path, name, own, training[name])
    return {"manifest": manifest, **training, **modules}


def apply_all(
    path: Path, loaded: Mapping[str, Any], targets: Mapping[str, Any], collectives: Collectives
) -> str:
    """Takes up what `read_all` gave; returns what was done, in words.

    Raises:
        CheckpointError: something refuses its state.
    """
    notes = ""
    for name, target in targets.items():
        before = dict(_lengths(target.state_dict())) if isinstance(target, LRScheduler) else {}
        try:
            if isinstance(target, nn.Module):
                load_plain(target, loaded[name])
            elif isinstance(target, Optimizer):
                target.load_state_dict(reshard_optimizer(loaded[name], target))
            else:
                target.load_state_dict(in_memory(loaded[name]))
        except Exception as error:
            raise CheckpointError(
                f"resuming {name} from {path}",
                f"{type(error).__name__}: {error}",
                f"build {name} as it was in the run that saved it",
            ) from error
        for place, value in _lengths(target.state_dict()) if before else ():
            if before.get(place, value) != value:
                notes += f"; {name} keeps {place}={value} as saved, not {before[place]} as built"
    manifest, topology = loaded["manifest"], collectives.topology
    note = f"resumed {path} (epoch {manifest['epoch']}, step {manifest['step']})"
    if manifest["world_size"] != topology.size:
        return (
            f"{note}; it was saved by {manifest['world_size']} processes and this run has "
            f"{topology.size}, so model-side randomness (dropout) starts from the seed{notes}"
        )
    try:
        seeding.set_rng_state(in_memory(loaded["random"][topology.rank]), collectives.device)
    except Exception as error:
        raise CheckpointError(
            f"resuming the random streams from {path}",
            f"{type(error).__name__}: {error}",
            "resume with the versions of Python and torch that saved them",
        ) from error
    return note + notes


def _seen(path: Path, identity: str | None) -> dict[str, Any]:
    """The manifest, of the checkpoint that rank 0 has found."""
    found = "rank 0 has found it there, and this rank does not see it"
    if path.exists():
        manifest = layout.read_manifest(path)
        if manifest.get("id") == identity:
            return manifest
        found = "this rank sees another checkpoint under that name than rank 0 does"
    raise CheckpointError(
        f"resuming from {path}",
        found,
        "use a shared folder, one that all machines see, or copy the checkpoint to each",
    )


def _check_facts(path: Path, manifest: Mapping[str, Any], training: Any) -> None:
    numbers = all(type(manifest.get(key)) is int for key in ("epoch", "step", "world_size"))
    if not numbers or not isinstance(training, dict) or not {"world", "random"} <= training.keys():
        raise CheckpointError(
            f"resuming from {path}",
            "its manifest lacks the step, or the state of the run",
            "use an earlier checkpoint of the same folder",
        )


def _check_names(path: Path, own: set[str], saved: set[str]) -> None:
    missing, extra = own - saved, saved - own
    if missing or extra:
        raise CheckpointError(
            f"resuming from {path} with {', '.join(sorted(own))}",
            f"not in the checkpoint: {', '.join(sorted(missing)) or 'nothing'}; "
            f"in the checkpoint alone: {', '.join(sorted(extra)) or 'nothing'}",
            "pass to world.checkpoint the names that the run was saved with, or load single "
            "models with lockstep.load_weights",
        )


def _check_entry(path: Path, name: str, own: Any, saved: Mapping[str, Any] | None) -> None:
    """Whether a state of a module (None: of something else) fits what the name stands for."""
    found = ""
    if isinstance(own, nn.Module) != (saved is not None):
        was = "was a module" if saved is not None else "was not a module"
        found = f"{name} {was} when it was saved, and is a {type(own).__name__} now"
    elif saved is not None and (differ := differences(saved, plain_state_dict(own))):
        found = f"{name} does not fit: {differ}"
    if found:
        raise CheckpointError(
            f"resuming from {path}", found, f"build {name} as it was in the run that saved it"
        )


def _check_length(path: Path, name: str, own: LRScheduler, saved: Any) -> None:
    """Whether a schedule that ends, and raises behind its end, ends where it did."""
    before, now = dict(_lengths(saved)), dict(_lengths(own.state_dict()))
    for place, steps in now.items():
        if place.endswith("total_steps") and before.get(place, steps) != steps:
            kind = type(getattr(own, "inner", own)).__name__
            raise CheckpointError(
                f"resuming {name} from {path}",
                f"{kind} was saved with {place}={before[place]} and is built with {place}={steps}: "
                f"it would go on as saved, and end after {before[place]} steps",
                "resume with as many epochs as before; to train longer, load the model alone with "
                "lockstep.load_weights and begin a new schedule, or use a schedule without an end",
            )


def _lengths(state: Any, place: str = "") -> Iterator[tuple[str, int]]:
    """How long a scheduler, and those inside it, are, by where that stands in its state."""
    if isinstance(state, list | tuple):
        state = dict(enumerate(state))
    for key, value in state.items():
        if isinstance(value, dict | list | tuple):
            yield from _lengths(value, f"{place}{key}.")
        elif key in _LENGTHS and type(value) is int:
            yield f"{place}{key}", value
