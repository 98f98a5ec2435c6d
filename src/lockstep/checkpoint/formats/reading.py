"""Finds the weights in a file or folder, in every format that a PyTorch user may have.

`read_source` returns a `Source` with the *states* of models that it found: dictionaries of tensors
by name. Most values are not read yet: tensors are views of a mapped file or, if *lazy* ones are
requested, `LazyTensor`s, which can be read in parts. *DCP* is torch's distributed checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn

from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import decode, find_encoded_tensors
from lockstep.checkpoint.file_errors import opened, plain_errors, unreadable
from lockstep.checkpoint.formats.dcp import METADATA, StoredObject, read_dcp, tensors_in
from lockstep.checkpoint.formats.safetensors import (
    TensorInFile,
    begins_like_safetensors,
    read_header,
)
from lockstep.checkpoint.formats.safetensors_files import (
    INDEX_ENDING,
    index_of,
    names_torch_files,
    read_safetensors_index,
    read_weight_map,
)
from lockstep.checkpoint.formats.text import short
from lockstep.checkpoint.formats.torch_save import read_torch, read_torch_index
from lockstep.checkpoint.lazy_tensor import LazyTensor, Shape, non_negative_integers
from lockstep.checkpoint.modules import plain_state_dict
from lockstep.checkpoint.shards import Shard, TensorInShards, join_shards
from lockstep.errors import CheckpointError, SettingError
from lockstep.wording import with_article

Kind = Literal["checkpoint", "dcp", "index", "safetensors", "torch"]

USUAL_KEYS_OF_STATES = (
    "state_dict",
    "model_state_dict",
    "model",
    "net",
    "weights",
    "module",
)
"""The usual keys of a model's state in a dictionary that holds other things too."""
MAX_DEPTH_OF_STATES = 4
"""How many levels of nested dictionaries are searched for a state."""
FACTS_IN_MANIFEST = (
    "step",
    "epoch",
    "world_size",
    "strategy",
    "virtual_ranks",
    "metric",
    "lockstep",
    "torch",
    "time",
)
MAX_FACT_CHARACTERS = 200


@dataclass(frozen=True)
class FoundState:
    """One state of a model that a file holds."""

    state: Mapping[str, Any]
    """Values by name. Tensors are views of the mapped file, or lazy."""
    place: str
    """The place of the state in the file, for example "['model']"; empty for the top level."""
    outer_keys: tuple[str, ...] = ()
    """The keys of the dictionaries that lead to the state, for example ("model",)."""


def _no_tensors() -> Iterable[tuple[str, LazyTensor]]:
    return ()


@dataclass(frozen=True)
class Source:
    """A file or folder that holds weights."""

    path: Path
    kind: str
    """A description such as "a safetensors file"."""
    states: list[FoundState]
    """At least one."""
    files: Iterable[Path]
    """All files that belong to it."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Step, epoch, versions and so on, as far as the form has them."""
    modules: tuple[str, ...] = ()
    """The names of the modules of a checkpoint."""
    find_training_tensors: Callable[[], Iterable[tuple[str, LazyTensor]]] = _no_tensors
    """Returns the tensors that belong to no model, with their names. Those of a DCP folder may
    include a model's."""


def read_values(value: Any) -> Any:
    """Returns a value, or a dictionary of values, after reading what has not been read yet.

    These are tensors in shards, and the objects of a DCP folder.
    """
    if isinstance(value, dict):
        return {key: read_values(item) for key, item in value.items()}
    if isinstance(value, TensorInShards | StoredObject):
        return value.read()
    return value


def read_source(
    path: Path,
    *,
    trust: bool,
    name: str | None = None,
    everything: bool = False,
    lazy: bool = False,
) -> Source:
    """Finds the weights in a file or folder.

    Args:
        path: a safetensors file, a torch file, an index that lists several files of either kind, a
            checkpoint, a DCP folder, or a folder with one of these. In a run's folder, the latest
            complete checkpoint is taken.
        trust: whether a torch file may run its author's code while it is read.
        name: the name of one model in a checkpoint; or, in a torch file or a DCP folder, the key
            under which the model is, such as "model" in `{"model": state_dict}`.
        everything: for checkpoints: whether to take all models if none is named, in one state, with
            the names of the models as prefixes.
        lazy: whether tensors of safetensors files, and of checkpoints, are `LazyTensor`s, not views
            of mapped files.

    Raises:
        CheckpointError: the path does not exist, cannot be read, holds no weights, or holds pickled
            objects and is not trusted.
        SettingError: there is no model of this name.
    """
    path, kind = locate(path)
    if kind == "checkpoint":
        return _read_checkpoint(path, name, everything=everything, lazy=lazy)

    if kind == "torch":
        content = read_torch(path, trust)
        states = _find_states(path, content, name)
        facts = _short_values(content)  # for example the epoch, which is shown to the user
        return Source(path, "a torch file", states, files=[path], facts=facts)

    if kind == "dcp":
        return _read_dcp_folder(path, name)

    # An index or a safetensors file is one model, which has no name.
    if name is not None:
        raise _no_such_name_error(path, name, ["one model without a name of its own"])

    if kind == "index":
        return _read_index(path, trust=trust, lazy=lazy)

    tensors = read_header(path)
    state: Mapping[str, Any] = tensors if lazy else _memory_mapped(tensors)
    return Source(path, "a safetensors file", [FoundState(state, place="")], files=[path])


def _read_dcp_folder(path: Path, name: str | None) -> Source:
    """Reads a folder of torch's distributed checkpoint.

    Args:
        path: the folder.
        name: the key under which the model is, such as "ema", if there are several models. None:
            any model.
    """
    tree = read_dcp(path)
    states = _find_states(path, tree, name)

    files = {path / METADATA}
    for _, tensor in tensors_in(tree):
        for shard in tensor.shards:
            stored_values = shard.values
            files.add(stored_values.file)

    return Source(
        path,
        kind="a folder of torch.distributed.checkpoint",
        states=states,
        files=sorted(files),
        find_training_tensors=lambda: tensors_in(tree),  # those of the model, too
    )


def _read_index(path: Path, *, trust: bool, lazy: bool) -> Source:
    """Reads an index of several safetensors files, or of several files of `torch.save`.

    Args:
        path: the path of the index.
        trust: whether files of `torch.save` may run their author's code.
        lazy: whether tensors of safetensors files are `LazyTensor`s, not views of mapped files.
    """
    weight_map = read_weight_map(path)  # the file name of each tensor
    state: Mapping[str, Any]
    if names_torch_files(weight_map):
        state = read_torch_index(path, weight_map, trust)
        files = sorted({path.parent / file_name for file_name in weight_map.values()})
        kind = f"torch files ({len(files)} of them)"
    else:
        tensors = read_safetensors_index(path)
        state = tensors if lazy else _memory_mapped(tensors)
        files = _files_of(tensors)
        kind = f"safetensors in {len(files)} files"
    return Source(path, kind, [FoundState(state, place="")], files)


# Where to read


def locate(path: Path) -> tuple[Path, Kind]:
    """Returns the file or folder to read for a path that a user gives, and its kind.

    The result differs from the given path if that is a folder, or if the weights were written to
    several files with an index.

    Raises:
        CheckpointError: the path does not exist, is not a plain file, or is a folder without
            weights.
    """
    if path.is_dir():
        return _locate_in_folder(path)

    # `save_weights` may have written several files "net-00001-of-00002.safetensors" and their index
    # in place of "net.safetensors".
    was_split = path.suffix == ".safetensors" and not path.exists() and index_of(path).exists()
    if was_split:
        path = index_of(path)

    with opened(path) as file:  # raises an error if the file cannot be read
        # People who are used to torch.save may have named a file of save_weights "net.pth".
        is_safetensors = begins_like_safetensors(file) or path.suffix == ".safetensors"

    is_index = path.suffix == ".json"
    if is_index:
        return path, "index"
    if layout.is_one_of_several_files(path):
        raise unreadable(
            path,
            "it holds the shards of one rank",
            f"give the checkpoint that it is in: {path.parent}",
        )

    return path, "safetensors" if is_safetensors else "torch"


def _locate_in_folder(folder: Path) -> tuple[Path, Kind]:
    """Finds what to read in a folder: a checkpoint, DCP's files, an index, or a single file."""
    if (folder / layout.MANIFEST).exists():
        return folder, "checkpoint"
    latest = layout.latest(folder)
    if latest is not None:
        return latest, "checkpoint"
    if (folder / METADATA).is_file():
        return folder, "dcp"

    with plain_errors("reading weights from", folder):
        indexes = _preferred_indexes(folder)
        file = _single_file(folder)
    if len(indexes) == 1:
        return indexes[0], "index"

    # Beside several indexes, nothing says that the single file is meant. A folder that is named
    # like a checkpoint may be a damaged one, and the only file in it a part of what was saved.
    may_be_damaged_checkpoint = folder.name.startswith(("step-", ".step-"))
    file_has_all_weights = not indexes and not may_be_damaged_checkpoint
    if file is not None and file_has_all_weights:
        return file, "safetensors" if file.suffix == ".safetensors" else "torch"

    raise unreadable(
        folder,
        "it is a folder without a complete checkpoint of Lockstep in it, without one safetensors "
        "file or index, and not one of torch's distributed checkpoint",
        "give a weights file, a checkpoint's folder, or the folder that holds checkpoints",
    )


def _preferred_indexes(folder: Path) -> list[Path]:
    """Returns the indexes in a folder; only those of safetensors, if there are any.

    Many publish the same weights in both formats side by side: "model.safetensors.index.json" and
    "pytorch_model.bin.index.json".
    """
    indexes = sorted(folder.glob(f"*{INDEX_ENDING}"))
    safetensors_indexes = [index for index in indexes if ".safetensors" in index.suffixes]
    return safetensors_indexes or indexes


def _single_file(folder: Path) -> Path | None:
    """Returns the only safetensors file of a folder, or else "pytorch_model.bin", or else None.

    That is the usual name of a torch file with published weights.
    """
    safetensors_files = sorted(folder.glob("*.safetensors"))
    files = safetensors_files or sorted(folder.glob("pytorch_model.bin"))
    return files[0] if len(files) == 1 else None


# States in nested dictionaries


def _find_states(path: Path, content: Any, name: str | None) -> list[FoundState]:
    """Finds the states of models in nested dictionaries. Returns at least one.

    Args:
        path: the path of the file, for errors.
        content: the content of a torch file or a DCP folder.
        name: a key that must be somewhere above the state; None to return all states.

    Raises:
        CheckpointError: there is no state.
        SettingError: there is no state below that key.
    """
    states = list(_walk_states(content, keys=(), max_depth=MAX_DEPTH_OF_STATES))
    if not states:
        raise _no_weights_error(path, content)
    if name is None:
        return states

    named = [state for state in states if name in state.outer_keys]
    if not named:
        raise _no_such_name_error(path, name, [state.place or "the top" for state in states])
    return named


def _walk_states(content: Any, keys: tuple[str, ...], max_depth: int) -> Iterator[FoundState]:
    """Yields the states in nested dictionaries, outer ones first.

    A dictionary is taken for a state if it has any tensors. Its values under `USUAL_KEYS_OF_STATES`
    (such as "state_dict" and "model") are searched too. Of a pickled module, its state is taken.

    Args:
        content: the dictionary or module to search.
        keys: the keys that lead to `content` in the file.
        max_depth: how many levels of nested dictionaries are searched.
    """
    place = "".join(f"[{key!r}]" for key in keys)
    if isinstance(content, nn.Module):
        yield FoundState(plain_state_dict(content), place or "the pickled module", keys)
        return
    if not isinstance(content, Mapping) or max_depth == 0:
        return

    state = _state_in(content)
    if state is not None:
        yield FoundState(state, place, keys)

    for key in USUAL_KEYS_OF_STATES:
        if key in content:
            yield from _walk_states(content[key], (*keys, key), max_depth - 1)


def _state_in(content: Mapping[Any, Any]) -> dict[str, Any] | None:
    """Returns the state of a model in a dictionary; None if the dictionary has no tensors.

    A state has tensors and extra states: what `get_extra_state` of a module returns, which may be
    any value.
    """
    state = {}
    has_tensors = False
    for name, value in content.items():
        if not isinstance(name, str):
            continue
        is_tensor = isinstance(value, Tensor | TensorInShards)
        has_tensors = has_tensors or is_tensor
        if is_tensor or name.endswith("_extra_state"):
            state[name] = value
    return state if has_tensors else None


def _no_weights_error(path: Path, content: Any) -> CheckpointError:
    """Builds the error for a file without weights; it says what the file holds instead."""
    held = type(content).__name__  # "list", or "dict with 'epoch', 'losses'"
    if isinstance(content, Mapping):
        text_keys = [short(repr(key)) for key in content if isinstance(key, str)]
        listed = ", ".join(text_keys[:8]) or "no keys that are text"
        held += f" with {listed}"
    return unreadable(
        path,
        f"no weights: it holds {with_article(held)}",
        "save the model's state_dict(), at the top or under one of "
        f"{', '.join(USUAL_KEYS_OF_STATES)}",
    )


def _no_such_name_error(path: Path, name: str, names: Sequence[str]) -> SettingError:
    return SettingError(
        f"the name {name!r} in {path}",
        f"the file has the names {', '.join(names)}",
        "give one of these, or leave the name out",
    )


def _short_values(content: Any) -> dict[str, Any]:
    """Returns the numbers and short texts of a torch file, for example its epoch."""
    if not isinstance(content, Mapping):
        return {}

    # Exact types only: instances of subclasses, which a trusted file may hold, need not be shown.
    values = {}
    for key, value in content.items():
        if type(key) is not str:
            continue
        is_number = type(value) in {int, float, bool}
        is_short_text = type(value) is str and len(value) < MAX_FACT_CHARACTERS
        if is_number or is_short_text:
            values[key] = value
    return values


# Checkpoints


def _read_checkpoint(path: Path, name: str | None, *, everything: bool, lazy: bool) -> Source:
    """Reads one module of a checkpoint, or all of them.

    Args:
        path: the folder of the checkpoint.
        name: the name of the module. None: all modules if `everything`, otherwise the one that
            is called "model" or the only one.
        everything: whether to read all modules if none is named. Their values get the names
            "MODULE.NAME" in one state.
        lazy: whether all tensors are `LazyTensor`s, not views of the mapped files.
    """
    manifest = layout.read_manifest(path)
    modules = tuple(manifest["modules"])
    if name is not None and name not in modules:
        raise _no_such_name_error(path, name, modules)

    reads_several = name is None and everything and len(modules) > 1
    if reads_several:
        found = FoundState(_read_all_modules(path, manifest, lazy=lazy), place="")
    else:
        module = _default_module(path, modules) if name is None else name
        state = read_stored(path, manifest, module, lazy=lazy)
        found = FoundState(state, place=f"{module} of {path.name}")

    facts = {}  # step, epoch, versions and so on, for the user
    for key in FACTS_IN_MANIFEST:
        if manifest.get(key) is not None:
            facts[key] = manifest[key]
    return Source(
        path,
        kind="a checkpoint of Lockstep",
        states=[found],
        files=[path / file_name for file_name in (*manifest["files"], layout.MANIFEST)],
        facts=facts,
        modules=modules,
        find_training_tensors=partial(_find_training_tensors, path, manifest),
    )


def _read_all_modules(path: Path, manifest: Mapping[str, Any], *, lazy: bool) -> dict[str, Any]:
    """Returns the values of all modules of a checkpoint, as "MODULE.NAME"."""
    state = {}
    for module in manifest["modules"]:
        for key, value in read_stored(path, manifest, module, lazy=lazy).items():
            state[f"{module}.{key}"] = value
    return state


def _find_training_tensors(
    path: Path, manifest: Mapping[str, Any]
) -> Iterable[tuple[str, LazyTensor]]:
    """Returns the tensors of a checkpoint that are in no module, with their names.

    These are the tensors of optimizers, for example. No values are read.
    """
    # In the manifest, a tensor is {"$tensor": name} or {"$sharded": name, ...}.
    encoded_tensors = list(find_encoded_tensors(manifest["training"]))
    names = [encoded.get("$tensor", encoded.get("$sharded")) for encoded in encoded_tensors]
    tensors = _read_encoded_tensors(path, manifest, encoded_tensors)
    return zip(names, tensors, strict=True)


def _read_encoded_tensors(
    path: Path, manifest: Mapping[str, Any], encoded_tensors: list[Mapping[str, Any]]
) -> list[LazyTensor]:
    """Decodes some tensors of a manifest's training state.

    Args:
        path: the folder of the checkpoint.
        manifest: the manifest of the checkpoint.
        encoded_tensors: the tensors as they stand in the manifest: `[{"$tensor": "0.exp_avg"},
            {"$sharded": "1.exp_avg", "dtype": "float32", "shape": [6, 4]}]`.

    Returns:
        For each of them the tensor in the files of the checkpoint. No values are read.
    """
    # `read_stored` decodes any tree of JSON values, and a list is one.
    tensors: list[LazyTensor] = read_stored(
        path, manifest, layout.TRAINING, tree=encoded_tensors, lazy=True
    )
    return tensors


def _default_module(path: Path, modules: Sequence[str]) -> str:
    """Returns the module to read if the user names none: "model", or the only one.

    Raises:
        CheckpointError: there are several modules, and none is called "model".
    """
    if "model" in modules:
        return "model"
    if len(modules) == 1:
        return modules[0]
    raise unreadable(
        path,
        f"it holds {len(modules)} modules: {short(', '.join(modules), 300) or 'none'}",
        f"give the file of one of them, such as {path / layout.tensor_file('NAME')}",
    )


def read_stored(
    path: Path, manifest: Mapping[str, Any], name: str, tree: Any = None, *, lazy: bool = False
) -> Any:
    """Returns the state of a module, or of the rest of the training, in a checkpoint.

    Args:
        path: the folder of the checkpoint.
        manifest: the manifest of the checkpoint.
        name: the name of the module, or `layout.TRAINING`.
        tree: the part of the state to return, as a JSON tree (see `encoding`) from the manifest.
            None: the whole state.
        lazy: whether all tensors are `LazyTensor`s. Otherwise only tensors in shards are lazy, and
            the others are views of the mapped file.

    Raises:
        CheckpointError: the manifest does not list a file, or the file cannot be read.
    """
    if tree is None:
        tree = layout.trees_of_files(manifest)[name]

    # All tensors that are not sharded are in rank 0's file. Reading its header gives a lazy tensor
    # for each.
    lazy_tensors = _read_header_of(path, manifest, name, rank=0)
    whole_tensors = lazy_tensors if lazy else _memory_mapped(lazy_tensors)

    # Other tensors are put together from shards, in the files of several ranks.
    stored_shards = _StoredShards(path, manifest, name)
    return decode(tree, whole_tensors, find_shards=stored_shards.find)


class _StoredShards:
    """Finds the tensors of a state that a checkpoint stores in shards.

    Args:
        path: the folder of the checkpoint.
        manifest: the manifest of the checkpoint.
        name: the name of a module, or `layout.TRAINING`.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any], name: str) -> None:
        self._path = path
        self._manifest = manifest
        self._name = name
        self._shards_of_tensor: Any = manifest.get("shards", {}).get(name, {})
        """{tensor: [[rank, offsets, sizes], ...]}; empty if only rank 0 has stored tensors."""
        self._tensors_of_rank: dict[int, dict[str, TensorInFile]] = {}
        """The tensors in the file of each rank, as far as their headers have been read."""

    def find(self, tensor_name: str, dtype: torch.dtype, shape: Shape) -> TensorInShards:
        """Returns a tensor with the shards that the manifest lists for it. Reads no values.

        Raises:
            CheckpointError: a file with shards cannot be read.
            ValueError, KeyError, TypeError: the manifest is damaged.
        """
        shards = []
        for rank, offsets, sizes in self._shards_of_tensor.get(tensor_name, ()):
            stored = self._tensors_in_file_of(rank)[tensor_name]
            # A shard of a dtype that is stored as bytes is converted back.
            values = stored.view_as(dtype, non_negative_integers(sizes))
            shards.append(Shard(non_negative_integers(offsets), values))
        return join_shards(tensor_name, dtype, shape, shards)

    def _tensors_in_file_of(self, rank: int) -> dict[str, TensorInFile]:
        """Returns the tensors in the file of a rank by name. Their values are not read yet."""
        if rank not in self._tensors_of_rank:
            self._tensors_of_rank[rank] = _read_header_of(
                self._path, self._manifest, self._name, rank
            )
        return self._tensors_of_rank[rank]


def _read_header_of(
    path: Path, manifest: Mapping[str, Any], name: str, rank: int
) -> dict[str, TensorInFile]:
    """Returns the tensors in the file with one rank's part of a state. Reads no values.

    Args:
        path: the folder of the checkpoint.
        manifest: the manifest of the checkpoint.
        name: the name of a module, or `layout.TRAINING`.
        rank: the rank that has written the file.

    Raises:
        CheckpointError: the manifest does not list the file, or the file cannot be read.
    """
    file_name = layout.tensor_file(name, rank)
    if file_name not in manifest["files"]:
        raise unreadable(path, f"its manifest has {short(name)!r}, but not {short(file_name)}")
    # A listed file is inside the folder, which was checked when the manifest was read.
    return read_header(path / file_name)


def _memory_mapped(tensors: Mapping[str, TensorInFile]) -> dict[str, Tensor]:
    """Maps the files of tensors into memory, and returns the tensors as views of them.

    Args:
        tensors: the tensors by name, from headers that have been checked.
    """
    views: dict[str, Tensor] = {}
    for file in _files_of(tensors):
        with plain_errors("reading weights from", file):
            views.update(safetensors.torch.load_file(file))
    return {name: views[name] for name in tensors}


def _files_of(tensors: Mapping[str, TensorInFile]) -> list[Path]:
    """Returns the files of these tensors, without repetitions."""
    return list(dict.fromkeys(tensor.file for tensor in tensors.values()))
