"""`world.checkpoint(folder, **state)`: the whole state of a training, saved and taken up again.

Communication: `save` is two small exchanges of text, `resume` three; each carries errors too, so
that what goes wrong on one rank is raised on all of them. Between those of `save`, sharded tensors
are gathered. Rank 0 alone writes; every rank reads.
"""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint import layout, random_state
from lockstep.checkpoint.encoding import decode, encode
from lockstep.checkpoint.modules import differences, load_plain, plain_state_dict
from lockstep.checkpoint.reading import read_module
from lockstep.checkpoint.save import write_checkpoint
from lockstep.checkpoint.whole import completed, gathered, lacks, spread_optimizer
from lockstep.errors import CheckpointError, LockstepError, SettingError, UsageError
from lockstep.runtime.collectives import Collectives

_RESERVED = frozenset({"training", "world", "random"})

T = TypeVar("T")


class Stateful(Protocol):
    """What can be saved: modules, optimizers, schedulers, loaders, or a user's own objects."""

    def state_dict(self) -> Any:
        """The state, in tensors, numbers, text, and lists and dictionaries of these."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Takes a state up again."""


class Checkpoint:
    """Saves and resumes the state of a training. All ranks make one and call its methods.

    Args:
        folder: holds the run's checkpoints; rank 0 makes it with the first save.
        collectives: those of the run.
        keep: how many checkpoints remain; older ones go once a new one is complete.
        state: what to save, by name. Modules are saved under the names of the bare module, each
            in a file of its own, so that they fit a run of any size and any wrapper.
        world_state: the run's own state; its `state_dict()` has the integers `step` and `epoch`.

    Raises:
        SettingError: `keep` is not a positive integer.
        UsageError: there is nothing to save, or something that has no state.
    """

    def __init__(
        self,
        folder: str | Path,
        collectives: Collectives,
        *,
        keep: int,
        state: Mapping[str, Any],
        world_state: Stateful,
    ) -> None:
        _check_arguments(keep, state)
        self.folder = Path(folder)
        self.last_resume_note = ""
        """What the last `resume()` found and did, in a sentence or two."""
        self._collectives = collectives
        self._keep = keep
        self._state = dict(state)
        self._world_state = world_state

    def save(self) -> Path:
        """Writes a checkpoint of the present step; returns its folder when it is safely on disk.

        The random state of every rank goes with it. It is complete or not there at all; an
        earlier checkpoint of the same step is replaced.

        Raises:
            CheckpointError: on all ranks, when any of them cannot do its part (disk full, not
                writable, a state that cannot be stored, a later step in the folder).
        """
        doing = f"saving a checkpoint in {self.folder}"
        states, streams = self._everywhere(doing, self._collect)
        # Not before all ranks have their states: one that failed would be waited for.
        for name, value in self._state.items():
            if isinstance(value, nn.Module | Optimizer):
                states[name] = self._whole(value, states[name])

        def write() -> tuple[Path | None, str]:
            if not self._collectives.topology.is_main:
                return None, ""
            path = self._write(states, [random_state.from_text(text) for text in streams])
            return path, path.name

        _, names = self._everywhere(doing, write)
        return self.folder / names[0]

    def resume(self) -> bool:
        """Takes up the latest complete checkpoint; False where the folder has none.

        Rank 0 chooses, and all ranks read the same checkpoint. Everything is checked on all ranks
        before anything is changed. Random states are restored where the number of ranks is that
        of the run that saved; `last_resume_note` says what was done.

        Raises:
            CheckpointError: on all ranks, when any of them cannot see or read the checkpoint that
                rank 0 has found, or when it does not fit what this run has.
        """
        doing = f"resuming from {self.folder}"
        _, answers = self._everywhere(doing, self._find)
        choices = [json.loads(answer) for answer in answers]
        chosen = choices[0]
        if chosen["name"] is None:
            seen = [str(rank) for rank, choice in enumerate(choices) if choice["name"]]
            if seen:
                raise CheckpointError(
                    doing,
                    f"rank {', '.join(seen)} sees a complete checkpoint there, rank 0 sees none",
                    "use a folder that all machines share, or copy it to the machine of rank 0",
                )
            self.last_resume_note = f"nothing to resume in {self.folder}{chosen['broken']}"
            return False
        path = self.folder / chosen["name"]
        loaded, _ = self._everywhere(doing, lambda: (self._read(path, chosen["id"]), ""))
        note, _ = self._everywhere(doing, lambda: (self._apply(path, loaded), ""))
        self.last_resume_note = note + chosen["broken"]
        return True

    def wait(self) -> None:
        """Returns when everything saved so far is on disk, on all ranks.

        `save` itself returns no earlier, so this is a barrier.
        """
        self._collectives.barrier()

    def _everywhere(self, doing: str, work: Callable[[], tuple[T, str]]) -> tuple[T, list[str]]:
        """Runs `work` on every rank: its own result, and all ranks' texts; or an error on all."""
        if self._collectives.blocked is not None:
            raise UsageError(
                f"{doing} in the body of an evaluation loop",
                self._collectives.blocked,
                "do it after the loop",
            )
        failure: Exception | None = None
        try:
            result, text = work()
            answer: dict[str, Any] = {"text": text}
        except Exception as error:  # whatever it is, the others must not wait for this rank
            failure, answer = error, {"error": _in_parts(doing, error)}
        answers = [json.loads(a) for a in self._collectives.exchange(json.dumps(answer))]
        if failure is not None:
            raise failure
        for rank, heard in enumerate(answers):
            if "error" in heard:
                was_set, found, do = heard["error"]
                raise CheckpointError(was_set, f"rank {rank}: {found}", do)
        return result, [heard["text"] for heard in answers]

    def _collect(self) -> tuple[dict[str, Any], str]:
        # On every rank, since what is sharded can only be had from all together.
        states = {
            name: plain_state_dict(value) if isinstance(value, nn.Module) else value.state_dict()
            for name, value in self._state.items()
        }
        states["world"] = self._world_state.state_dict()
        return states, random_state.to_text(random_state.capture(self._collectives.device))

    def _whole(self, value: Any, state: Any) -> Any:
        """On rank 0 the whole state of a module or an optimizer that is spread over the ranks."""
        state = gathered(state, keep=self._collectives.topology.is_main)
        if isinstance(value, nn.Module) and lacks(state):
            versions = getattr(state, "_metadata", None)
            state = OrderedDict(completed(state, self._collectives))
            state._metadata = versions
        elif getattr(value, "partial", False):
            state = {**state, "state": completed(state["state"], self._collectives)}
        return state

    def _write(self, states: Mapping[str, Any], streams: list[dict[str, Any]]) -> Path:
        from lockstep import __version__  # the package itself imports this module

        files: dict[str, dict[str, Tensor]] = {}
        modules: dict[str, Any] = {}
        for name in self._modules():
            modules[name], files[layout.weights_file(name)] = encode(states[name], inside=name)
        world = states["world"]
        others = {name: state for name, state in states.items() if name not in modules}
        tree, files[layout.TRAINING] = encode({**others, "random": streams})
        manifest = {
            # Tells apart two checkpoints of one name, on machines that share no file system.
            "id": secrets.token_hex(8),
            "lockstep": __version__,
            "torch": torch.__version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "epoch": int(world["epoch"]),
            "world_size": self._collectives.topology.size,
            "modules": modules,
            "training": tree,
        }
        return write_checkpoint(self.folder, int(world["step"]), files, manifest, keep=self._keep)

    def _modules(self) -> list[str]:
        return [name for name, value in self._state.items() if isinstance(value, nn.Module)]

    def _find(self) -> tuple[None, str]:
        path = layout.latest(self.folder)
        broken = ", ".join(p.name for p in layout.incomplete(self.folder))
        choice = {
            "name": path and path.name,
            "id": path and layout.read_manifest(path).get("id"),
            "broken": f"; passed over as incomplete: {broken}" if broken else "",
        }
        return None, json.dumps(choice)

    def _read(self, path: Path, identity: str) -> dict[str, Any]:
        """All states of a checkpoint, after every check that can be made before loading."""
        manifest = layout.read_manifest(path)
        if manifest.get("id") != identity:
            raise CheckpointError(
                f"resuming from {path}",
                "this rank sees another checkpoint under that name than rank 0 does",
                "use a folder that all machines share",
            )
        modules = {name: read_module(path, name, manifest) for name in manifest["modules"]}
        with layout.plain_errors("reading the checkpoint", path):
            mapped = safetensors.torch.load_file(path / layout.TRAINING)
        # Copied out of the mapped file: an optimizer may keep these, and the file will go.
        training = decode(manifest["training"], {k: v.clone() for k, v in mapped.items()})
        self._check_names(path, {*modules, *training} - _RESERVED)
        for name in self._state:
            self._check_entry(path, name, modules.get(name))
        return {"manifest": manifest, **training, **modules}

    def _check_names(self, path: Path, saved: set[str]) -> None:
        missing, extra = self._state.keys() - saved, saved - self._state.keys()
        if missing or extra:
            raise CheckpointError(
                f"resuming from {path} with {', '.join(self._state)}",
                f"not in the checkpoint: {', '.join(sorted(missing)) or 'nothing'}; "
                f"in the checkpoint alone: {', '.join(sorted(extra)) or 'nothing'}",
                "pass to world.checkpoint the names that the run was saved with, or load single "
                "models with lockstep.load_weights",
            )

    def _check_entry(self, path: Path, name: str, saved: Mapping[str, Any] | None) -> None:
        """Whether a state of a module (None: of something else) fits what the name stands for."""
        own = self._state[name]
        found = ""
        if isinstance(own, nn.Module) != (saved is not None):
            was = "was a module" if saved is not None else "was not a module"
            found = f"{name} {was} when it was saved, and is a {type(own).__name__} now"
        elif saved is not None and (differ := differences(saved, plain_state_dict(own))):
            found = f"{name} does not fit: {differ}"
        if not found:
            return
        raise CheckpointError(
            f"resuming from {path}", found, f"build {name} as it was in the run that saved it"
        )

    def _apply(self, path: Path, loaded: Mapping[str, Any]) -> str:
        targets = {**self._state, "world": self._world_state}
        for name, target in targets.items():
            try:
                if isinstance(target, nn.Module):
                    load_plain(target, loaded[name])
                elif isinstance(target, Optimizer):
                    target.load_state_dict(spread_optimizer(loaded[name], target))
                else:
                    target.load_state_dict(loaded[name])
            except Exception as error:
                raise CheckpointError(
                    f"resuming {name} from {path}",
                    f"{type(error).__name__}: {error}",
                    f"build {name} as it was in the run that saved it",
                ) from error
        manifest, topology = loaded["manifest"], self._collectives.topology
        note = f"resumed {path} (epoch {manifest['epoch']}, step {manifest['step']})"
        if manifest["world_size"] != topology.size:
            return (
                f"{note}; it was saved by {manifest['world_size']} processes and this run has "
                f"{topology.size}, so model-side randomness (dropout) starts from the seed"
            )
        random_state.restore(loaded["random"][topology.rank], self._collectives.device)
        return note


def _check_arguments(keep: int, state: Mapping[str, Any]) -> None:
    if type(keep) is not int or keep < 1:
        raise SettingError(
            f"world.checkpoint(..., keep={keep!r})",
            "it is how many checkpoints remain on disk, this run's newest among them",
            "give an integer of at least 1",
        )
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
        if name in _RESERVED or not name.isidentifier():
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


def _in_parts(doing: str, error: Exception) -> tuple[str, str, str]:
    if isinstance(error, LockstepError):
        return error.was_set, error.found, error.do
    return doing, f"{type(error).__name__}: {error}", "see the traceback of that rank"
