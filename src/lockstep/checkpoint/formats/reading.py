"""Reads weights from every form that a PyTorch user may have; gives the states found in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn

from lockstep.checkpoint import layout, sharding
from lockstep.checkpoint.encoding import FindShards, decode, leaves
from lockstep.checkpoint.formats import pytorch
from lockstep.checkpoint.formats.safetensors import (
    INDEX,
    Entry,
    index_of,
    of_torch,
    read_header,
    read_index,
    short,
    weight_map,
)
from lockstep.checkpoint.modules import plain_state_dict
from lockstep.errors import SettingError

Kind = Literal["checkpoint", "dcp", "index", "safetensors", "torch"]

_NESTED_UNDER = ("state_dict", "model_state_dict", "model", "net", "weights", "module")
_DEPTH = 4
_FACTS = ("step", "epoch", "world_size", "strategy", "metric", "lockstep", "torch", "time")


@dataclass(frozen=True)
class Found:
    """One state of a model that a file holds."""

    state: Mapping[str, Any]
    """By name. Tensors are views of the mapped file; entries and `Objects` are not read yet."""
    place: str
    """Where in the file, in words; empty for the top."""


@dataclass(frozen=True)
class Source:
    """A file or folder that holds weights."""

    path: Path
    kind: str
    """In words."""
    states: list[Found]
    """At least one."""
    files: Iterable[Path]
    """All that it is in."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Step, epoch, versions and the like, as far as the form has them."""
    modules: tuple[str, ...] = ()
    """Of a checkpoint."""
    training: Callable[[], Iterable[tuple[str, sharding.LazyTensor]]] = tuple
    """Finds the tensors of what is no module, with their names."""


def read_value(value: Any) -> Any:
    """The same with what is in files read from them."""
    if isinstance(value, dict):
        return {key: read_value(inner) for key, inner in value.items()}
    if isinstance(value, sharding.ShardedEntry):
        return value.full()
    return value.read() if isinstance(value, pytorch.Objects) else value


def read(
    path: Path,
    *,
    trust: bool,
    name: str | None = None,
    everything: bool = False,
    lazy: bool = False,
) -> Source:
    """Finds out what is in a file or folder.

    Args:
        path: a safetensors file, a torch file, the index of several of either, a checkpoint, a
            folder of DCP, or a folder with one of these; of a run's folder the latest complete
            checkpoint.
        trust: a torch file may run code of its author's while it is read.
        name: one model of several; the key above it in a torch file.
        everything: where a checkpoint has several models and none is named, all of them in one
            state, with their names in front.
        lazy: all tensors of safetensors are `LazyTensor`; else views of the mapped files.

    Raises:
        CheckpointError: nothing is there, it cannot be read, it holds no weights, or it holds
            pickled objects and is not trusted.
        SettingError: there is no such name.
    """
    path, kind = locate(path)
    if kind == "checkpoint":
        return _read_checkpoint(path, name, everything=everything, lazy=lazy)
    if kind == "torch":
        content = pytorch.read_torch(path, trust)
        states = _states_in(path, content, name)
        return Source(path, "a torch file", states, [path], _plain_values(content))
    if kind == "dcp":
        tree = pytorch.read_dcp(path)
        states = _states_in(path, tree, name)
        shards = [shard for _, entry in pytorch.tensors_in(tree) for shard in entry.shards]
        return Source(
            path,
            "a folder of torch.distributed.checkpoint",
            states,
            sorted({path / pytorch.METADATA, *(shard.values.file for shard in shards)}),
            training=lambda: pytorch.tensors_in(tree),
        )
    if name is not None:
        raise _no_such(path, name, ["one model without a name of its own"])
    if kind == "index" and of_torch(places := weight_map(path)):
        files = sorted({path.parent / file for file in places.values()})
        state: Mapping[str, Any] = pytorch.read_torch_index(path, places, trust)
        return Source(path, f"torch files ({len(files)} of them)", [Found(state, "")], files)
    entries = read_index(path) if kind == "index" else read_header(path)
    files = list(dict.fromkeys(entry.file for entry in entries.values())) or [path]
    words = f"safetensors in {len(files)} files" if kind == "index" else "a safetensors file"
    return Source(path, words, [Found(entries if lazy else _mapped(entries), "")], files)


def locate(path: Path) -> tuple[Path, Kind]:
    """What is to be read where a user names a file or folder, and what it is.

    Raises:
        CheckpointError: nothing is there, what is no file, or a folder without weights.
    """
    if path.is_dir():
        return _in_folder(path)
    if path.suffix == ".safetensors" and not path.exists() and index_of(path).exists():
        path = index_of(path)
    with layout.opened(path):
        pass  # it can be read
    if path.suffix == ".json":
        return path, "index"
    if layout.holds_shards(path):
        raise layout.unreadable(
            path,
            "it holds the shards of one rank",
            f"give the checkpoint that it is in: {path.parent}",
        )
    return path, "safetensors" if path.suffix == ".safetensors" else "torch"


def _states_in(path: Path, content: Any, name: str | None) -> list[Found]:
    """The states in what `read_torch` gave, or those below a name; at least one.

    Raises:
        CheckpointError: there is none.
        SettingError: there is none below that name.
    """
    found = list(_states(content, "", _DEPTH))
    if not found:
        held = type(content).__name__
        if isinstance(content, Mapping):
            keys = [short(repr(key)) for key in content if isinstance(key, str)]
            held += f" with {', '.join(keys[:8]) or 'nothing by name in it'}"
        raise layout.unreadable(
            path,
            f"no weights: it holds a {held}",
            f"save the model's state_dict(), at the top or under one of {', '.join(_NESTED_UNDER)}",
        )
    named = [state for state in found if name is None or f"[{name!r}]" in state.place]
    if not named:
        raise _no_such(path, str(name), [state.place or "the top" for state in found])
    return named


def read_stored(
    path: Path, manifest: Mapping[str, Any], name: str, tree: Any = None, *, lazy: bool = False
) -> Any:
    """What a checkpoint holds of a module or of the training.

    Args:
        path: of the checkpoint.
        manifest: of it.
        name: of the module, or `layout.TRAINING`.
        tree: a part of what stands there in the manifest; None: all of it.
        lazy: all tensors are `LazyTensor`; else only those in shards, and the others are views of
            the mapped file.

    Raises:
        CheckpointError: the manifest does not list a file, or it cannot be read.
    """
    if tree is None:
        tree = layout.states_of(manifest)[name]
    entries = _entries(path, manifest, name, 0)
    return decode(tree, entries if lazy else _mapped(entries), _shard_finder(path, manifest, name))


def _shard_finder(path: Path, manifest: Mapping[str, Any], name: str) -> FindShards:
    """Finds the tensors of a module or of the training that are stored in shards.

    Raises:
        CheckpointError: a file of the shards cannot be read.
        ValueError, KeyError, TypeError: the manifest is damaged.
    """
    headers = cache(partial(_entries, path, manifest, name))
    listed = manifest.get("shards", {}).get(name, {})

    def find(tensor: str, dtype: torch.dtype, shape: sharding.Shape) -> sharding.ShardedEntry:
        shards = []
        for rank, offsets, sizes in listed.get(tensor, ()):
            # Others than those that safetensors knows are stored as bytes.
            values = headers(rank)[tensor].viewed(dtype, sharding.as_shape(sizes))
            shards.append(sharding.Shard(sharding.as_shape(offsets), values))
        return sharding.sharded_entry(tensor, dtype, shape, shards)

    return find


def _entries(path: Path, manifest: Mapping[str, Any], name: str, rank: int) -> dict[str, Entry]:
    file = layout.tensor_file(name, rank)
    if file not in manifest["files"]:  # those are plain names: nothing outside of the folder
        raise layout.unreadable(path, f"its manifest has {short(name)!r}, but not {short(file)}")
    return read_header(path / file)


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
    if (folder / pytorch.METADATA).is_file():
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
    raise layout.unreadable(
        folder,
        "it is a folder without a complete checkpoint of Lockstep in it, without one safetensors "
        "file or index, and not one of torch's distributed checkpoint",
        "give a weights file, a checkpoint's folder, or the folder that holds checkpoints",
    )


def _read_checkpoint(path: Path, name: str | None, *, everything: bool, lazy: bool) -> Source:
    manifest = layout.read_manifest(path)
    modules = tuple(manifest["modules"])
    if name is not None and name not in modules:
        raise _no_such(path, name, modules)
    if name is None and everything and len(modules) > 1:
        states = ((n, read_stored(path, manifest, n, lazy=lazy)) for n in modules)
        found = Found({f"{n}.{key}": value for n, s in states for key, value in s.items()}, "")
    else:
        if name is None and len(modules) != 1 and "model" not in modules:
            raise layout.unreadable(
                path,
                f"it holds {len(modules)} modules: {short(', '.join(modules), 300) or 'none'}",
                f"give the file of one of them, such as {path / layout.tensor_file('NAME')}",
            )
        name = name or ("model" if "model" in modules else modules[0])
        found = Found(read_stored(path, manifest, name, lazy=lazy), f"{name} of {path.name}")

    def training() -> Iterable[tuple[str, sharding.LazyTensor]]:
        places = list(leaves(manifest["training"]))
        entries = read_stored(path, manifest, layout.TRAINING, places, lazy=True)
        names = [place.get("$tensor", place.get("$sharded")) for place in places]
        return zip(names, entries, strict=True)

    return Source(
        path,
        "a checkpoint of Lockstep",
        [found],
        [path / name for name in (*manifest["files"], layout.MANIFEST)],
        {key: manifest[key] for key in _FACTS if manifest.get(key) is not None},
        modules,
        training,
    )


def _no_such(path: Path, name: str, there: Sequence[str]) -> SettingError:
    return SettingError(
        f"the name {name!r} in {path}",
        f"there is {', '.join(there)}",
        "give one of these, or leave the name out",
    )


def _plain_values(content: Any) -> dict[str, Any]:
    """What a torch file says beside the weights, as far as it is short."""
    return {
        key: value
        for key, value in (content.items() if isinstance(content, Mapping) else ())
        if type(key) is str
        and (type(value) in {int, float, bool} or (type(value) is str and len(value) < 200))
    }


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
        and (isinstance(value, Tensor | sharding.ShardedEntry) or name.endswith("_extra_state"))
    }
    if any(isinstance(value, Tensor | sharding.ShardedEntry) for value in state.values()):
        yield Found(state, place)
    for name in _NESTED_UNDER:
        if name in content:
            yield from _states(content[name], f"{place}[{name!r}]", depth - 1)
