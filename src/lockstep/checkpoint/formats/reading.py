"""Reads weights from every form that a PyTorch user may have; gives the states found in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn

from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import FindShards, decode
from lockstep.checkpoint.formats.pytorch import (
    Objects,
    is_dcp,
    read_dcp,
    read_torch,
    read_torch_index,
)
from lockstep.checkpoint.formats.safetensors import (
    INDEX,
    Entry,
    are_sizes,
    check_plain,
    index_of,
    of_torch,
    read_header,
    read_index,
    short,
    weight_map,
)
from lockstep.checkpoint.modules import plain_state_dict
from lockstep.checkpoint.sharding import Shape, Shard, ShardedEntry, sharded_entry
from lockstep.errors import CheckpointError

Kind = Literal["checkpoint", "dcp", "index", "safetensors", "torch"]

_NESTED_UNDER = ("state_dict", "model_state_dict", "model", "net", "weights", "module")
_DEPTH = 4


@dataclass(frozen=True)
class Found:
    """One state of a model that a file holds."""

    state: Mapping[str, Any]
    """By name. Tensors are views of the mapped file; entries and `Objects` are not read yet."""
    place: str
    """Where in the file, in words; empty for the top."""

    def value(self, name: str) -> Any:
        """A value of the state, read from the file if it has not been."""
        return _read(self.state[name])


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _read(inner) for key, inner in value.items()}
    if isinstance(value, ShardedEntry):
        return value.full()
    return value.read() if isinstance(value, Objects) else value


def read_states(path: Path, *, trust: bool) -> list[Found]:
    """The states in a file or folder; at least one.

    Raises:
        CheckpointError: nothing is there, it cannot be read, it holds no weights, or it holds
            pickled objects and is not trusted.
    """
    path, kind = locate(path)
    if kind == "checkpoint":
        return [_from_checkpoint(path)]
    if kind == "index" and of_torch(places := weight_map(path)):
        return [Found(read_torch_index(path, places, trust), "")]
    if kind == "index":
        return [Found(_mapped(read_index(path)), "")]
    if kind == "safetensors":
        return [Found(_mapped(read_header(path)), "")]
    return states_in(path, read_dcp(path) if kind == "dcp" else read_torch(path, trust))


def locate(path: Path) -> tuple[Path, Kind]:
    """What is to be read where a user names a file or folder, and what it is.

    Raises:
        CheckpointError: nothing is there, what is no file, or a folder without weights.
    """
    if path.is_dir():
        return _in_folder(path)
    if path.suffix == ".safetensors" and not path.exists() and index_of(path).exists():
        path = index_of(path)
    check_plain(path)
    with layout.plain_errors("reading weights from", path):
        path.open("rb").close()
    if path.suffix == ".json":
        return path, "index"
    if layout.holds_shards(path):
        raise CheckpointError(
            f"reading weights from {path}",
            "it holds the shards of one rank",
            f"give the checkpoint that it is in: {path.parent}",
        )
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
            keys = [short(repr(key)) for key in content if isinstance(key, str)]
            held += f" with {', '.join(keys[:8]) or 'nothing by name in it'}"
        raise CheckpointError(
            f"reading weights from {path}",
            f"no weights: it holds a {held}",
            f"save the model's state_dict(), at the top or under one of {', '.join(_NESTED_UNDER)}",
        )
    return found


def read_module(path: Path, name: str, manifest: Mapping[str, Any], *, lazy: bool = False) -> Any:
    """The state of one module of a checkpoint; see `read_stored`.

    Raises:
        CheckpointError: the manifest does not list the module's file, or it cannot be read.
    """
    state = read_stored(path, manifest, name, modules_of(path, manifest)[name], lazy=lazy)
    if not isinstance(state, dict):
        raise CheckpointError(
            f"reading the checkpoint {path}",
            f"the state of {short(name)!r} is a {type(state).__name__} in its manifest",
            "use another checkpoint",
        )
    return state


def read_stored(
    path: Path, manifest: Mapping[str, Any], name: str, tree: Any, *, lazy: bool = False
) -> Any:
    """What a checkpoint holds of a module or of the training.

    Args:
        path: of the checkpoint.
        manifest: of it.
        name: of the module, or `layout.TRAINING`.
        tree: in the manifest, or a part of it.
        lazy: all tensors are `LazyTensor`; else only those in shards, and the others are views of
            the mapped file.

    Raises:
        CheckpointError: the manifest does not list a file, or it cannot be read.
    """
    entries = _entries(path, manifest, name, 0)
    return decode(tree, entries if lazy else _mapped(entries), shard_finder(path, manifest, name))


def shard_finder(path: Path, manifest: Mapping[str, Any], name: str) -> FindShards:
    """Finds the tensors of a module or of the training that are stored in shards.

    Raises:
        CheckpointError: a file of the shards cannot be read.
        ValueError, KeyError, TypeError: the manifest is damaged.
    """
    headers = cache(partial(_entries, path, manifest, name))
    listed = layout.shards_in(manifest).get(name, {})

    def find(tensor: str, dtype: torch.dtype, shape: Shape) -> ShardedEntry:
        shards = []
        for rank, offsets, sizes in listed.get(tensor, ()):
            if not are_sizes(offsets) or not are_sizes(sizes):
                raise ValueError(f"{tensor} has a shard that is nowhere")
            # Others than those that safetensors knows are stored as bytes.
            entry: Any = headers(rank)[tensor].viewed(dtype, tuple(sizes))
            shards.append(Shard(tuple(offsets), tuple(sizes), entry))
        return sharded_entry(tensor, dtype, shape, shards)

    return find


def _entries(path: Path, manifest: Mapping[str, Any], name: str, rank: int) -> dict[str, Entry]:
    file = layout.tensor_file(name, rank)
    if file not in manifest["files"]:  # those are plain names: nothing outside of the folder
        raise CheckpointError(
            f"reading the checkpoint {path}",
            f"its manifest has {short(name)!r}, and does not list {short(file)}",
            "use another checkpoint",
        )
    return read_header(path / file)


def modules_of(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The states of a checkpoint's modules, as its manifest has them.

    Raises:
        CheckpointError: it has none, or not by name.
    """
    modules = manifest.get("modules")
    if not isinstance(modules, dict):
        raise CheckpointError(
            f"reading the checkpoint {path}",
            "its manifest does not say which modules are in it",
            "use another checkpoint",
        )
    return modules


def the_module(path: Path, manifest: Mapping[str, Any]) -> str:
    """The name of the one module that is meant where none is named.

    Raises:
        CheckpointError: there are several and none is called `model`, or there is none.
    """
    names = list(modules_of(path, manifest))
    if len(names) != 1 and "model" not in names:
        raise CheckpointError(
            f"reading weights from {path}",
            f"it holds {len(names)} modules: {short(', '.join(names), 300) or 'none'}",
            f"give the file of one of them, such as {path / layout.tensor_file('NAME')}",
        )
    return "model" if "model" in names else names[0]


def _mapped(entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """The tensors of files whose headers have been checked, as views of the mapped files."""
    state: dict[str, Tensor] = {}
    for file in dict.fromkeys(entry.file for entry in entries.values()):
        with layout.plain_errors("reading weights from", file):
            state.update(safetensors.torch.load_file(file))
    return {name: state[name] for name in entries}


def _in_folder(folder: Path) -> tuple[Path, Kind]:
    if (folder / layout.MANIFEST).exists():
        return folder, "checkpoint"
    if (path := layout.latest(folder)) is not None:
        return path, "checkpoint"
    if is_dcp(folder):
        return folder, "dcp"
    with layout.plain_errors("reading weights from", folder):
        indexes = sorted(folder.glob(f"*{INDEX}"))
        files = sorted(folder.glob("*.safetensors"))
        files += [] if indexes or files else sorted(folder.glob("pytorch_model.bin"))
    # Others publish the same weights in both forms side by side.
    indexes = [path for path in indexes if ".safetensors" in path.suffixes] or indexes
    if len(indexes) == 1:
        return indexes[0], "index"
    if len(files) == 1 and not indexes and not folder.name.startswith(("step-", ".step-")):
        return files[0], "safetensors" if files[0].suffix == ".safetensors" else "torch"
    raise CheckpointError(
        f"reading weights from {folder}",
        "it is a folder without a complete checkpoint of Lockstep in it, without one safetensors "
        "file or index, and not one of torch's distributed checkpoint",
        "give a weights file, a checkpoint's folder, or the folder that holds checkpoints",
    )


def _from_checkpoint(path: Path) -> Found:
    manifest = layout.read_manifest(path)
    name = the_module(path, manifest)
    return Found(read_module(path, name, manifest), f"{name} of {path.name}")


def _states(content: Any, place: str, depth: int) -> Iterator[Found]:
    if isinstance(content, nn.Module):
        yield Found(plain_state_dict(content), place or "the pickled module")
        return
    if not isinstance(content, Mapping) or depth == 0:
        return
    state = {
        name: value
        for name, value in content.items()
        if isinstance(name, str)
        and (isinstance(value, Tensor | ShardedEntry) or name.endswith("_extra_state"))
    }
    if any(isinstance(value, Tensor | ShardedEntry) for value in state.values()):
        yield Found(state, place)
    for name in _NESTED_UNDER:
        if name in content:
            yield from _states(content[name], f"{place}[{name!r}]", depth - 1)
