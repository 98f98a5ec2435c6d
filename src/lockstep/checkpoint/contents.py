"""The tensors of a file, of several files or of a checkpoint, without their values until asked.

What the commands of `lockstep checkpoint` see of every form: names, shapes, dtypes, and a way to
read a part of one tensor, so that no tensor has to fit into memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import unstorable
from lockstep.checkpoint.formats.pytorch import (
    METADATA,
    read_dcp,
    read_torch,
    read_torch_index,
    tensors_in,
)
from lockstep.checkpoint.formats.reading import (
    Found,
    locate,
    read_module,
    read_stored,
    states_in,
    the_module,
)
from lockstep.checkpoint.formats.safetensors import (
    of_torch,
    read_header,
    read_index,
    short,
    weight_map,
)
from lockstep.checkpoint.sharding import HeldTensor, LazyTensor, ShardedEntry, in_memory
from lockstep.errors import CheckpointError, SettingError

_EXPANDED = 2**26  # bytes that a tensor may have beyond its memory, as expanded ones do
_FACTS = ("step", "epoch", "world_size", "strategy", "lockstep", "torch", "time")


@dataclass(frozen=True)
class Stored(LazyTensor):
    """One tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    part: Callable[[int, int], Tensor]
    """The elements from one index to before another, flat and on the CPU."""
    tied_to: str | None = None
    """The first name of the same tensor, where it has several."""


@dataclass(frozen=True)
class Contents:
    """What is in a file or a checkpoint."""

    path: Path
    kind: str
    """In words."""
    tensors: Mapping[str, Stored]
    """By name, in the order of the file."""
    extra: Mapping[str, Any]
    """What a state of a module holds besides tensors."""
    facts: Mapping[str, Any]
    """Step, epoch, versions and the like, as far as the form has them."""
    files: Mapping[str, int]
    """Sizes in bytes."""
    modules: tuple[str, ...] = ()
    """Of a checkpoint; `tensors` are those of one of them, or of all with their names in front."""
    training: Mapping[str, Stored] = field(default_factory=dict)
    """Of a checkpoint, if asked for: the tensors of the optimizer and of what else is no model."""


def open_contents(
    path: Path,
    *,
    name: str | None = None,
    trust: bool = False,
    everything: bool = False,
    training: bool = False,
) -> Contents:
    """Finds out what is there; reads no values.

    Args:
        path: a safetensors file, a torch file, the index of several of either, a checkpoint, a
            folder of DCP, or a folder with one of these; of a run's folder the latest complete
            checkpoint.
        name: one model of several; the key above it in a torch file.
        trust: a torch file may run code of its author's while it is read.
        everything: where a checkpoint has several models and none is named, all of them.
        training: of a checkpoint also what is no model, such as the optimizer's tensors.

    Raises:
        CheckpointError: it cannot be read, or is not sound.
        SettingError: there is no such name.
    """
    path, kind = locate(path)
    if kind == "checkpoint":
        return _checkpoint(path, name, everything=everything, training=training)
    if kind == "torch":
        return _torch(path, name, trust)
    if kind == "dcp":
        return _dcp(path, name, training=training)
    if name is not None:
        raise _no_such(path, name, ["one model without a name of its own"])
    if kind == "index" and of_torch(places := weight_map(path)):
        found = Found(read_torch_index(path, places, trust), "")
        kind_of = f"torch files ({len(set(places.values()))} of them)"
        return _of_state(path, kind_of, found, {}, sorted(set(places.values())))
    entries = read_index(path) if kind == "index" else read_header(path)
    files = {e.file.name: e.file.stat().st_size for e in entries.values()}
    return Contents(
        path,
        f"safetensors in {len(files)} files" if kind == "index" else "a safetensors file",
        {key: _stored(key, entry) for key, entry in entries.items()},
        {},
        {},
        files or {path.name: path.stat().st_size},
    )


def leaves(tree: Any) -> Iterator[Mapping[str, Any]]:
    """The places of tensors in a tree that `encode` made, with repetitions."""
    if isinstance(tree, list):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        if "$tensor" in tree or "$sharded" in tree:
            yield tree
        else:
            for value in tree.values():
                yield from leaves(value)


def totals(tensors: Iterable[Stored]) -> dict[str, Any]:
    """How much it is in all; a tensor with several names counts once."""
    own = [stored for stored in tensors if stored.tied_to is None]
    kinds = Counter(dtype_name(stored) for stored in own)
    return {
        "tensors": len(own),
        "values": sum(stored.count for stored in own),
        "bytes": sum(stored.nbytes for stored in own),
        "dtypes": dict(kinds.most_common()),
    }


def dtype_name(stored: Stored) -> str:
    """Such as `float32`."""
    return str(stored.dtype).removeprefix("torch.")


def _checkpoint(path: Path, name: str | None, *, everything: bool, training: bool) -> Contents:
    manifest = layout.read_manifest(path)
    try:
        modules = tuple(manifest["modules"])
        if name is not None and name not in modules:
            raise _no_such(path, name, modules)
        if name is None and (not everything or len(modules) == 1):
            name = the_module(path, manifest)
        tensors: dict[str, Stored] = {}
        extra: dict[str, Any] = {}
        for module in modules if name is None else (name,):
            front = f"{module}." if name is None else ""
            _add_module(path, manifest, module, front, tensors, extra)
        others = _of_training(path, manifest) if training else {}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, SettingError):
            raise
        raise CheckpointError(
            f"reading the checkpoint {path}",
            f"its manifest is damaged: {type(error).__name__}: {short(error, 300)}",
            "use another checkpoint; lockstep checkpoint repair says what can be saved of this",
        ) from error
    return Contents(
        path,
        "a checkpoint of Lockstep",
        tensors,
        extra,
        {key: manifest[key] for key in _FACTS if key in manifest},
        {**manifest["files"], layout.MANIFEST: (path / layout.MANIFEST).stat().st_size},
        modules,
        others,
    )


def _of_training(path: Path, manifest: Mapping[str, Any]) -> dict[str, Stored]:
    if not isinstance(manifest["training"], dict):
        raise ValueError("it does not say what the training's state is")
    found = list(leaves(manifest["training"]))
    entries = read_stored(path, manifest, layout.TRAINING, found, lazy=True)
    names = [leaf.get("$tensor", leaf.get("$sharded")) for leaf in found]
    return {n: _stored(n, entry) for n, entry in zip(names, entries, strict=True)}


def _add_module(
    path: Path,
    manifest: Mapping[str, Any],
    module: str,
    front: str,
    tensors: dict[str, Stored],
    extra: dict[str, Any],
) -> None:
    first: dict[int, str] = {}
    state = read_module(path, module, manifest, lazy=True)
    for key, value in state.items():
        if isinstance(value, LazyTensor):
            tensors[front + key] = _stored(front + key, value, first.get(id(value)))
            first.setdefault(id(value), front + key)
        else:
            extra[front + key] = in_memory(value)


def _stored(name: str, entry: LazyTensor, tied_to: str | None = None) -> Stored:
    return Stored(name, entry.dtype, entry.shape, entry.part, tied_to)


def _torch(path: Path, name: str | None, trust: bool) -> Contents:
    content = read_torch(path, trust)
    found = _chosen(path, states_in(path, content), name)
    facts = {"read": found.place} if found.place else {}
    if isinstance(content, Mapping):
        facts |= {
            key: value
            for key, value in content.items()
            if type(key) is str
            and (type(value) in {int, float, bool} or (type(value) is str and len(value) < 200))
        }
    return _of_state(path, "a torch file", found, facts, [path.name])


def _of_state(
    path: Path, kind: str, found: Found, facts: Mapping[str, Any], files: Sequence[str]
) -> Contents:
    """What mapped tensors are, with those that are one tied."""
    tensors: dict[str, Stored] = {}
    first: dict[object, str] = {}
    for key, value in found.state.items():
        if not isinstance(value, Tensor):
            continue
        _check_tensor(path, key, value)
        view = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        tied_to = first.setdefault(view, key) if value.numel() else key
        tensors[key] = _stored(key, HeldTensor(value), None if tied_to == key else tied_to)
    return Contents(
        path,
        kind,
        tensors,
        {k: v for k, v in found.state.items() if not isinstance(v, Tensor)},
        facts,
        {name: (path.parent / name).stat().st_size for name in files},
    )


def _dcp(path: Path, name: str | None, *, training: bool) -> Contents:
    tree = read_dcp(path)
    found = _chosen(path, states_in(path, tree), name)
    chosen = [value for value in found.state.values() if isinstance(value, ShardedEntry)]
    others = [(n, e) for n, e in tensors_in(tree) if not any(e is one for one in chosen)]
    for _, entry in tensors_in(tree) if training else found.state.items():
        if isinstance(entry, ShardedEntry):
            entry.check()
    files = {shard.source.file for _, entry in tensors_in(tree) for shard in entry.shards}
    return Contents(
        path,
        "a folder of torch.distributed.checkpoint",
        {n: _stored(n, v) for n, v in found.state.items() if isinstance(v, ShardedEntry)},
        {n: found.value(n) for n, v in found.state.items() if not isinstance(v, ShardedEntry)},
        {"read": found.place} if found.place else {},
        {file.name: file.stat().st_size for file in sorted({path / METADATA, *files})},
        training={n: _stored(n, e) for n, e in others} if training else {},
    )


def _chosen(path: Path, states: list[Found], name: str | None) -> Found:
    if name is not None:
        named = [found for found in states if f"[{name!r}]" in found.place]
        if not named:
            raise _no_such(path, name, [found.place or "the top" for found in states])
        return named[0]
    return max(states, key=lambda found: sum(_size(value) for value in found.state.values()))


def _size(value: object) -> int:
    return value.nbytes if isinstance(value, Tensor | ShardedEntry) else 0


def _check_tensor(path: Path, name: str, value: Tensor) -> None:
    problem = unstorable(value)
    if problem is None and value.nbytes > value.untyped_storage().nbytes() + _EXPANDED:
        problem = (
            f"claims {value.nbytes} bytes and has {value.untyped_storage().nbytes()} in the file"
        )
    if problem:
        raise CheckpointError(
            f"reading weights from {path}",
            f"{name} {problem}",
            "save plain tensors, as the state_dict of a model on the CPU has them",
        )


def _no_such(path: Path, name: str, there: tuple[str, ...] | list[str]) -> SettingError:
    return SettingError(
        f"the name {name!r} in {path}",
        f"there is {', '.join(there)}",
        "give one of these, or leave the name out",
    )
