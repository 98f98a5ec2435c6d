"""State as a JSON tree beside named tensors, and back; no pickle.

JSON's own values stand for themselves; what JSON cannot say is an object with one key that begins
with `$`: `{"$tensor": name}`, `{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}` and so on.
A dictionary whose keys are all text (and none begins with `$`) is a plain JSON object. A tensor
that is stored in shards is `{"$sharded": name, "dtype": ..., "shape": ...}`.

Two tensors that are the same view of the same storage (tied weights) are stored once, under the
name of the first, and are one tensor again after `decode`.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from lockstep.checkpoint.sharding import (
    LazyTensor,
    Shape,
    ShardedEntry,
    as_shape,
    dtype_name,
    replica,
    view_of,
)
from lockstep.distributed.collectives import from_bytes, to_bytes
from lockstep.distributed.torch_compat import (
    is_sharded,
    local_box,
    set_state_dict_metadata,
    state_dict_metadata,
)
from lockstep.errors import CheckpointError

Tree = Any
"""What `json` reads and writes: None, bool, int, float, str, lists and dictionaries of these."""

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
"""The dtypes that a safetensors file can hold, by what its header calls them."""
_NEWER = ("U16", "U32", "U64", "C64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_NOT_IN_SAFETENSORS = {torch.complex128, torch.complex32, torch.float4_e2m1fn_x2}
"""The format has no name for them; `float4_e2m1fn_x2` it would call F4, with another shape."""
STORABLE = frozenset(DTYPES.values()) | _NOT_IN_SAFETENSORS
"""The dtypes that a checkpoint can hold."""
_AS_BYTES = {DTYPES[code] for code in _NEWER} | _NOT_IN_SAFETENSORS
"""Those that not every release of safetensors reads: a checkpoint stores them as bytes."""
BY_NAME = {dtype_name(dtype): dtype for dtype in STORABLE}
"""What a tree calls them."""
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""All dtypes of torch, as values of their own."""

Box = tuple[Shape, Shape]
"""A shard's offsets in its tensor, and its extents."""
FindShards = Callable[[str, torch.dtype, Shape], ShardedEntry]

_RESERVED = "__metadata__"  # not a tensor's name in a safetensors file


def encode(
    state: object,
    *,
    inside: str = "",
    to_host: Callable[[Tensor], Tensor] | None = None,
    main: bool = True,
) -> tuple[Tree, dict[str, Tensor], dict[str, Box]]:
    """Takes a state apart, or what one rank has of a state that is sharded over the ranks.

    Args:
        state: any pytree of dict, OrderedDict, Counter, list, tuple, str, int, float, bool, None,
            tensors, numpy arrays and numbers, `torch.dtype`, `torch.device`, `torch.Size`. Of
            DTensors this rank's shards are taken.
        inside: what `state` is called, for messages only.
        to_host: gives a tensor's values in contiguous CPU memory; None: `on_cpu`.
        main: this is rank 0, whose tree names all DTensors, and whose file holds all plain
            tensors. On another rank plain tensors are those that rank 0 lacks: shards that are all.

    Returns:
        A tree for `json.dumps`; CPU tensors under the names that the tree uses: contiguous,
        no two sharing memory, of dtypes that every release of safetensors can store; and the boxes
        of those of them that are shards. A tensor that is all that already is not copied.

    Raises:
        CheckpointError: something else is in there; names where.
    """
    encoder = _Encoder(inside, to_host or on_cpu, main)
    return encoder.tree(state, ()), encoder.tensors, encoder.boxes


def decode(
    tree: Tree, tensors: Mapping[str, Tensor | LazyTensor], shards: FindShards | None = None
) -> Any:
    """Puts together again what `encode` took apart; the tensors are not copied.

    Args:
        tree: what `encode` gave.
        tensors: those that the tree names; of lazy ones nothing is read, but for numpy arrays.
        shards: gives a tensor that is stored in shards, of this name, dtype and shape.

    Raises:
        CheckpointError: the tree names a tensor that is not there, or holds a form unknown here.
    """
    try:
        return _Decoder(tensors, shards).value(tree)
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            "reading a saved state",
            f"it is damaged: {type(error).__name__}: {str(error)[:200]!r}",
            "use another checkpoint",
        ) from error


def leaves(tree: Tree) -> Iterator[Mapping[str, Any]]:
    """The places of tensors in a tree, with repetitions."""
    rest = [tree]
    while rest:
        value = rest.pop()
        if isinstance(value, list):
            rest += reversed(value)
        elif isinstance(value, dict) and ("$tensor" in value or "$sharded" in value):
            yield value
        elif isinstance(value, dict):
            rest += reversed(value.values())


def unstorable(value: Tensor) -> str | None:
    """What keeps a tensor from being stored, or None."""
    if torch.nn.parameter.is_lazy(value):
        return "is a parameter without a shape yet: run one batch through the model first"
    if type(value) not in {Tensor, torch.nn.Parameter}:
        return f"is a {type(value).__name__}, a kind of tensor that cannot be stored as it is"
    if value.is_meta:
        return "is a tensor on the meta device, which has no values"
    if value.layout is not torch.strided or value.is_nested:
        return f"is a tensor of layout {'nested' if value.is_nested else value.layout}"
    if value.dtype not in STORABLE:
        return f"is a tensor of dtype {value.dtype}, which cannot be stored"
    return None


def on_cpu(value: Tensor) -> Tensor:
    """The values of a tensor in contiguous CPU memory; the tensor itself where it is that."""
    return value.detach().resolve_conj().resolve_neg().cpu().contiguous()


def separate(tensor: Tensor, memory: set[int]) -> Tensor:
    """A copy, if the tensor is a part of something larger or its memory is in use already.

    `memory` holds the addresses in use, and gets this tensor's.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or storage.data_ptr() in memory:
        tensor = tensor.clone()
    if tensor.numel():
        memory.add(tensor.untyped_storage().data_ptr())
    return tensor


class _Encoder:
    """The tensors met so far in one call of `encode`."""

    def __init__(self, inside: str, to_host: Callable[[Tensor], Tensor], main: bool) -> None:
        self.inside = inside
        self._to_host = to_host
        self._main = main
        self.tensors: dict[str, Tensor] = {}
        self.boxes: dict[str, Box] = {}
        self._trees: dict[object, Tree] = {}  # of each view of a storage
        self._memory: set[int] = set()
        self._open: set[int] = set()  # the containers around the present value

    def tree(self, value: Any, path: tuple[object, ...]) -> Tree:
        kind = type(value)
        if value is None or kind in {bool, int, str}:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind is np.ndarray or isinstance(value, np.generic):
            array = self._array(value, path)
            return {"$array": array} if kind is np.ndarray else {"$scalar": array}
        if kind is torch.dtype:
            return {"$dtype": dtype_name(value)}
        if kind is torch.device:
            return {"$device": str(value)}
        if kind in {dict, OrderedDict, Counter, list, tuple, torch.Size}:
            return self._container(value, path)
        raise self._refused(path, f"is a {kind.__name__}")

    def _container(self, value: Any, path: tuple[object, ...]) -> Tree:
        if id(value) in self._open:
            raise self._refused(path, "contains itself")
        self._open.add(id(value))
        try:
            if isinstance(value, dict):
                return self._dict(value, path)
            items = [self.tree(item, (*path, place)) for place, item in enumerate(value)]
            if isinstance(value, torch.Size):
                return {"$size": items}
            return {"$tuple": items} if isinstance(value, tuple) else items
        finally:
            self._open.discard(id(value))

    def _dict(self, value: dict[Any, Any], path: tuple[object, ...]) -> Tree:
        items = []
        for key, item in value.items():
            if not _can_be_key(key):
                raise self._refused(path, f"has a key that is a {type(key).__name__}")
            items.append([self.tree(key, path), self.tree(item, (*path, key))])
        if isinstance(value, Counter):
            return {"$counter": items}
        if isinstance(value, OrderedDict):
            # nn.Module.state_dict() keeps the versions of the modules in an attribute.
            metadata = state_dict_metadata(value)
            extra = {} if metadata is None else {"metadata": self.tree(metadata, path)}
            return {"$ordered": items, **extra}
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(items)
        return {"$dict": items}

    def _tensor(self, value: Any, path: tuple[object, ...]) -> Tree:
        """Takes a tensor, or this rank's shard, the only one of a tensor that is plain."""
        sharded = is_sharded(value)
        local = value.detach().to_local() if sharded else value
        if problem := unstorable(local):
            raise self._refused(path, problem)
        box = local_box(value) if sharded else ((0,) * value.dim(), tuple(value.shape))
        view = view_of(value)
        if view in self._trees:
            return self._trees[view]
        if self._main and box[1] == value.shape and not replica(value):
            tree = self._add(self._to_host(local), path)
        else:
            name = self._free_name(path)
            if local.numel() and not replica(value):
                self._store(name, self._to_host(local))
                self.boxes[name] = box
            shape = list(value.shape)
            tree = {"$sharded": name, "dtype": dtype_name(value.dtype), "shape": shape}
        if view is not None:
            self._trees[view] = tree
        return tree

    def _array(self, value: Any, path: tuple[object, ...]) -> Tree:
        try:
            tensor = torch.from_numpy(np.array(value))
        except (TypeError, ValueError):
            tensor = None
        if tensor is None or tensor.dtype not in STORABLE:
            raise self._refused(path, f"is a numpy value of dtype {value.dtype}")
        return self._add(tensor.contiguous(), path)

    def _add(self, tensor: Tensor, path: tuple[object, ...]) -> Tree:
        name = self._free_name(path)
        self._store(name, tensor)
        if tensor.dtype not in _AS_BYTES:
            return {"$tensor": name}
        return {"$tensor": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}

    def _free_name(self, path: tuple[object, ...]) -> str:
        name = plain = ".".join(map(str, path)) or "value"
        number = 1
        while name in self.tensors or name == _RESERVED:
            number += 1
            name = f"{plain}#{number}"
        return name

    def _store(self, name: str, tensor: Tensor) -> None:
        """Keeps a tensor under a name, some dtypes as bytes."""
        own = separate(tensor, self._memory)
        self.tensors[name] = to_bytes(own) if own.dtype in _AS_BYTES else own

    def _refused(self, path: tuple[object, ...], problem: str) -> CheckpointError:
        place = self.inside
        for part in path:
            plain = type(part) is str and all(word.isidentifier() for word in part.split("."))
            place += (f".{part}" if place else str(part)) if plain else f"[{part!r}]"
        return CheckpointError(
            "saving the state of the training",
            f"{place or 'the state'} {problem}",
            "let state_dict() return tensors, numbers, text, and lists and dictionaries of these",
        )


def _can_be_key(key: object) -> bool:
    if type(key) is tuple:
        return all(map(_can_be_key, key))
    return key is None or type(key) in {str, int, float, bool}


@dataclass
class _Decoder:
    """The tensors of one call of `decode`."""

    tensors: Mapping[str, Tensor | LazyTensor]
    shards: FindShards | None
    made: dict[str, Any] = field(default_factory=dict)
    """Of tensors in shards, and of those that are stored as bytes: one of each name."""

    def value(self, tree: Tree) -> Any:
        if isinstance(tree, list):
            return [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        tag = next((key for key in tree if key.startswith("$")), None)
        if tag is None:
            return {key: self.value(item) for key, item in tree.items()}
        if tag not in _DECODERS:
            raise CheckpointError(
                "reading a saved state",
                f"a value of the kind {tag[1:80]!r}, which this version does not know",
                "read it with the version of Lockstep that saved it, or a newer one",
            )
        return _DECODERS[tag](self, tree)

    def array(self, tree: Any) -> Any:
        found = self.value(tree)
        if isinstance(found, LazyTensor):
            return found.full().numpy()
        return found.numpy().copy()  # not of a mapped file, which may go

    def sharded(self, tree: Any) -> Any:
        name = tree["$sharded"]
        if self.shards is None:
            raise ValueError("a tensor in shards where none is expected")
        if name not in self.made:
            dtype, shape = BY_NAME[tree["dtype"]], as_shape(tree["shape"])
            self.made[name] = self.shards(name, dtype, shape)
        return self.made[name]

    def stored(self, tree: Any) -> Any:
        name = tree["$tensor"]
        if name not in self.tensors:
            raise CheckpointError(
                "reading a saved state",
                f"its list names the tensor {str(name)[:80]!r}, which is in none of its files",
                "the files do not belong together: use another checkpoint",
            )
        found = self.tensors[name]
        if "dtype" not in tree:
            return found
        dtype, shape = BY_NAME[tree["dtype"]], as_shape(tree["shape"])
        if name not in self.made:
            if isinstance(found, LazyTensor):
                self.made[name] = found.viewed(dtype, shape)
            else:  # copied, since bytes in a mapped file may begin at any address
                self.made[name] = from_bytes(found.clone(), dtype, shape)
        return self.made[name]

    def pairs(self, items: Iterable[Any]) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(value)) for key, value in items]

    def ordered(self, tree: Any) -> OrderedDict[Any, Any]:
        state = OrderedDict(self.pairs(tree["$ordered"]))
        if "metadata" in tree:
            set_state_dict_metadata(state, self.value(tree["metadata"]))
        return state


_DECODERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "$float": lambda _, tree: float(tree["$float"]),
    "$tensor": lambda decoder, tree: decoder.stored(tree),
    "$sharded": lambda decoder, tree: decoder.sharded(tree),
    "$array": lambda decoder, tree: decoder.array(tree["$array"]),
    "$scalar": lambda decoder, tree: decoder.array(tree["$scalar"])[()],
    "$dtype": lambda _, tree: _DTYPES[tree["$dtype"]],
    "$device": lambda _, tree: torch.device(tree["$device"]),
    "$size": lambda _, tree: torch.Size(as_shape(tree["$size"])),
    "$tuple": lambda decoder, tree: tuple(decoder.value(tree["$tuple"])),
    "$dict": lambda decoder, tree: dict(decoder.pairs(tree["$dict"])),
    "$counter": lambda decoder, tree: Counter(dict(decoder.pairs(tree["$counter"]))),
    "$ordered": lambda decoder, tree: decoder.ordered(tree),
}


def rng_state_to_text(state: dict[str, Any]) -> str:
    """A captured state (about 13 KB) for the way from one rank to another."""
    tree, tensors, _ = encode(state)
    data = base64.b64encode(safetensors.torch.save(tensors)).decode()
    return json.dumps({"tree": tree, "data": data})


def rng_state_from_text(text: str) -> dict[str, Any]:
    """The state that `rng_state_to_text` was given."""
    parts = json.loads(text)
    tensors = safetensors.torch.load(base64.b64decode(parts["data"]))
    state: dict[str, Any] = decode(parts["tree"], tensors)
    return state
