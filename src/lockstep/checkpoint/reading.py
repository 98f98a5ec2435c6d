"""Reads weights from every form that a PyTorch user may have; gives the states found in them."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn

from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import decode
from lockstep.checkpoint.header import Entry, read_header
from lockstep.checkpoint.modules import plain_state_dict
from lockstep.checkpoint.shards import INDEX, index_of, read_index
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
    path, kind = locate(path)
    if kind == "checkpoint":
        return [_from_checkpoint(path)]
    if kind == "index":
        return [Found(_mapped(read_index(path)), "")]
    if kind == "safetensors":
        return [Found(_mapped(read_header(path)), "")]
    return states_in(path, read_torch(path, trust))


def locate(path: Path) -> tuple[Path, Literal["checkpoint", "index", "safetensors", "torch"]]:
    """What is to be read where a user names a file or folder, and what it is.

    Raises:
        CheckpointError: nothing is there, or a folder without weights.
    """
    if path.is_dir():
        return _in_folder(path)
    if path.suffix == ".safetensors" and not path.exists() and index_of(path).exists():
        path = index_of(path)
    with layout.plain_errors("reading weights from", path):
        path.open("rb").close()
    if path.suffix == ".json":
        return path, "index"
    return path, "safetensors" if path.suffix == ".safetensors" else "torch"


def states_in(path: Path, content: Any) -> list[Found]:
    """The states in what `read_torch` gave; at least one.

    Raises:
        CheckpointError: there is none.
    """
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
    """The state of one module of a checkpoint; its tensors are views of the mapped file.

    Raises:
        CheckpointError: the manifest does not list the module's file, or it cannot be read.
    """
    file = layout.weights_file(name)
    if file not in manifest["files"]:  # those are plain names: nothing outside of the folder
        raise CheckpointError(
            f"reading the checkpoint {path}",
            f"its manifest has a module {name!r}, and does not list its file {file!r}",
            "use another checkpoint",
        )
    with layout.plain_errors("reading the checkpoint", path):
        tensors = safetensors.torch.load_file(path / file)
    return decode(manifest["modules"][name], tensors)


def the_module(path: Path, manifest: Mapping[str, Any]) -> str:
    """The name of the one module that is meant where none is named.

    Raises:
        CheckpointError: there are several and none is called `model`, or there is none.
    """
    names = list(manifest["modules"])
    if len(names) != 1 and "model" not in names:
        raise CheckpointError(
            f"reading weights from {path}",
            f"it holds {len(names)} modules: {', '.join(names) or 'none'}",
            f"give the file of one of them, such as {path / layout.weights_file('NAME')}",
        )
    return "model" if "model" in names else names[0]


def read_torch(path: Path, trust: bool) -> Any:
    """What `torch.save` wrote; tensors are mapped where the file's format allows it.

    Raises:
        CheckpointError: it cannot be read, or holds pickled objects and is not trusted.
    """
    options: dict[str, Any] = {"map_location": "cpu", "mmap": _is_archive(path)}
    try:
        return _load_tensors(path, options)
    except pickle.UnpicklingError as error:
        if not trust:
            raise _not_trusted(path, error) from error
    except Exception as error:
        raise _unreadable(path, error) from error
    try:
        return torch.load(path, weights_only=False, **options)
    except Exception as error:  # unpickling runs the file's code, which may raise anything
        raise _unreadable(path, error) from error


def _load_tensors(path: Path, options: dict[str, Any]) -> Any:
    try:
        return torch.load(path, weights_only=True, **options)
    except RuntimeError as error:
        if not options["mmap"] or os.strerror(errno.ENOMEM) not in str(error):
            raise
    # A private mapping, torch's default, may not be larger than memory. A shared one may; nothing
    # here writes to it, but the file has to be writable.
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        return torch.load(path, weights_only=True, **options)


def _is_archive(path: Path) -> bool:
    """Whether it is of the newer format, a zip archive; and if so, whether it is one of torch's.

    A packed archive could take any amount of memory, and what is mapped is not unpacked.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        raise _unreadable(path, error) from error
    packed = [m.filename for m in members if m.compress_type != zipfile.ZIP_STORED]
    if packed or sum(m.file_size for m in members) > path.stat().st_size:
        raise CheckpointError(
            f"reading weights from {path}",
            f"it is an archive with packed contents ({', '.join(packed[:3])}), as torch.save "
            "never writes it; a TorchScript file may be one",
            "save the state_dict of the model with torch.save or lockstep.save_weights",
        )
    return True


def _mapped(entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """The tensors of files whose headers have been checked, as views of the mapped files."""
    state: dict[str, Tensor] = {}
    for file in dict.fromkeys(entry.file for entry in entries.values()):
        with layout.plain_errors("reading weights from", file):
            state.update(safetensors.torch.load_file(file))
    return {name: state[name] for name in entries}


def _in_folder(folder: Path) -> tuple[Path, Literal["checkpoint", "index", "safetensors"]]:
    if (folder / layout.MANIFEST).exists():
        return folder, "checkpoint"
    if (path := layout.latest(folder)) is not None:
        return path, "checkpoint"
    with layout.plain_errors("reading weights from", folder):
        indexes = sorted(folder.glob(f"*{INDEX}"))
        files = sorted(folder.glob("*.safetensors"))
    if len(indexes) == 1:
        return indexes[0], "index"
    if len(files) == 1 and not indexes and not folder.name.startswith(("step-", ".step-")):
        return files[0], "safetensors"
    raise CheckpointError(
        f"reading weights from {folder}",
        "it is a folder without a complete checkpoint of Lockstep in it, and without one "
        "safetensors file or index",
        "give a weights file, a checkpoint's folder, or the folder that holds checkpoints",
    )


def _from_checkpoint(path: Path) -> Found:
    manifest = layout.read_manifest(path)
    name = the_module(path, manifest)
    return Found(read_module(path, name, manifest), f"{name} of {path.name}")


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
