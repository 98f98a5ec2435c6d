"""Reads weights from every form that a PyTorch user may have; gives the states found in them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import decode
from lockstep.checkpoint.modules import plain_state_dict
from lockstep.errors import CheckpointError

_NESTED_UNDER = ("state_dict", "model_state_dict", "model", "net", "weights", "module")
_DEPTH = 4


@dataclass(frozen=True)
class Found:
    """One state of a model that a file holds."""

    state: Mapping[str, Any]
    place: str
    """Where in the file, in words; empty for the top."""


def read_states(path: Path, *, trust: bool) -> list[Found]:
    """The states in a file or folder; at least one.

    Raises:
        CheckpointError: nothing is there, it cannot be read, it holds no weights, or it holds
            pickled objects and is not trusted.
    """
    if path.is_dir():
        return [_from_checkpoint(path)]
    with layout.plain_errors("reading weights from", path):
        path.open("rb").close()
        if path.suffix == ".safetensors":
            return [Found(safetensors.torch.load_file(path), "")]
    content = _torch_load(path, trust)
    found = list(_states(content, "", _DEPTH))
    if not found:
        held = type(content).__name__
        if isinstance(content, Mapping):
            held += f" with {', '.join(map(repr, list(content)[:8])) or 'nothing in it'}"
        raise CheckpointError(
            f"reading weights from {path}",
            f"no weights: it holds a {held}",
            f"save the model's state_dict(), at the top or under one of {', '.join(_NESTED_UNDER)}",
        )
    return found


def read_module(path: Path, name: str, manifest: Mapping[str, Any]) -> Any:
    """The state of one module of a checkpoint; its tensors are views of the mapped file."""
    with layout.plain_errors("reading the checkpoint", path):
        tensors = safetensors.torch.load_file(path / layout.weights_file(name))
    return decode(manifest["modules"][name], tensors)


def _from_checkpoint(folder: Path) -> Found:
    path = folder if (folder / layout.MANIFEST).exists() else layout.latest(folder)
    if path is None:
        raise CheckpointError(
            f"reading weights from {folder}",
            "it is a folder without a complete checkpoint of Lockstep in it",
            "give a weights file, a checkpoint's folder, or the folder that holds checkpoints",
        )
    manifest = layout.read_manifest(path)
    names = list(manifest["modules"])
    if len(names) != 1 and "model" not in names:
        raise CheckpointError(
            f"reading weights from {path}",
            f"it holds {len(names)} modules: {', '.join(names) or 'none'}",
            f"give the file of one of them, such as {path / layout.weights_file('NAME')}",
        )
    name = "model" if "model" in names else names[0]
    return Found(read_module(path, name, manifest), f"{name} of {path.name}")


def _torch_load(path: Path, trust: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not trust:
            raise _not_trusted(path, error) from error
    except Exception as error:
        raise _unreadable(path, error) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # unpickling runs the file's code, which may raise anything
        raise _unreadable(path, error) from error


def _not_trusted(path: Path, error: Exception) -> CheckpointError:
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # a file of the older format, or a broken one
        asked = []
    if not asked and "nsupported" not in str(error):
        return _unreadable(path, error)
    names = ", ".join(asked[:5]) or "names of code"
    return CheckpointError(
        f"reading weights from {path}",
        f"it is a pickle with more than tensors in it ({names}); reading such a file runs whatever "
        "code its author put there",
        "pass trust=True if you trust where it comes from, then keep what lockstep.save_weights "
        "makes of it",
    )


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    reason = next((line for line in str(error).splitlines() if line.strip()), "")
    return CheckpointError(
        f"reading weights from {path}",
        f"torch.load cannot read it: {type(error).__name__}: {reason}",
        "check that the file is whole, that it was written by torch.save, and that the classes of "
        "a pickled model can be imported",
    )


def _states(content: Any, place: str, depth: int) -> Iterator[Found]:
    if isinstance(content, nn.Module):
        yield Found(plain_state_dict(content), place or "the pickled module")
        return
    if not isinstance(content, Mapping) or depth == 0:
        return
    state = {
        name: value
        for name, value in content.items()
        if isinstance(name, str) and (isinstance(value, Tensor) or name.endswith("_extra_state"))
    }
    if any(isinstance(value, Tensor) for value in state.values()):
        yield Found(state, place)
    for name in _NESTED_UNDER:
        if name in content:
            yield from _states(content[name], f"{place}[{name!r}]", depth - 1)
