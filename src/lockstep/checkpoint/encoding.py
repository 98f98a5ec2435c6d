"""Converts a state into a JSON *tree* plus named tensors, and back, without pickling anything.

In a tree, values that JSON can express stand for themselves. Any other value is a JSON object whose
first key, its *tag*, starts with `$`: `{"$tensor": name}`, `{"$tuple": [...]}`, `{"$dict": [[key,
value], ...]}` and so on. A dictionary is a plain JSON object if all its keys are strings and none
starts with `$`. A tensor that is stored in shards is `{"$sharded": name, "dtype": ..., "shape":
...}`.

Tensors that are the same view of the same storage (tied weights) are stored once, under the name of
the first one, and `decode` returns a single tensor for them.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from lockstep.checkpoint.lazy_tensor import LazyTensor, Shape, dtype_name, non_negative_integers
from lockstep.checkpoint.sharding import is_replicated_copy, tie_key
from lockstep.checkpoint.shards import Box, TensorInShards
from lockstep.distributed.tensor_bytes import from_bytes, to_bytes
from lockstep.errors import CheckpointError
from lockstep.torch_compat import (
    dtypes_named,
    is_sharded,
    local_box,
    set_state_dict_metadata,
    state_dict_metadata,
)
from lockstep.wording import describe_type, with_article

Tree = Any
"""What `json` reads and writes: None, bool, int, float, str, lists and dictionaries of these."""
KeyPath = tuple[object, ...]
"""The location of a value in the state, as keys and list indices: `("state", 0, "exp_avg")`."""
FindShards = Callable[[str, torch.dtype, Shape], TensorInShards]
"""Returns the tensor that is stored in shards under this name, with this dtype and shape."""

DTYPE_OF_CODE: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
"""The dtypes that a safetensors file can hold, by their codes in its header."""
for dtype in dtypes_named("float8_e8m0fnu"):
    DTYPE_OF_CODE["F8_E8M0"] = dtype
CODES_OF_NEWER_SAFETENSORS = ("U16", "U32", "U64", "C64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""Not every release of safetensors can read these."""
DTYPES_NOT_IN_SAFETENSORS = {
    torch.complex128,
    torch.complex32,
    *dtypes_named("float4_e2m1fn_x2"),
}
"""The format has no code for these. (Its F4 has another shape than `float4_e2m1fn_x2`.)"""
STORABLE_DTYPES = frozenset(DTYPE_OF_CODE.values()) | DTYPES_NOT_IN_SAFETENSORS
"""The dtypes that a checkpoint can hold."""
DTYPES_STORED_AS_BYTES = DTYPES_NOT_IN_SAFETENSORS.union(
    DTYPE_OF_CODE[code] for code in CODES_OF_NEWER_SAFETENSORS if code in DTYPE_OF_CODE
)
"""Tensors of these dtypes are stored as bytes, so that every release of safetensors can read them.
Their dtype and shape are in the tree."""
STORABLE_DTYPE_OF_NAME = {dtype_name(dtype): dtype for dtype in STORABLE_DTYPES}
DTYPE_OF_NAME = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
"""All dtypes of torch: a state may hold a dtype as a value."""

NAME_RESERVED_BY_SAFETENSORS = "__metadata__"


class EncodedState(NamedTuple):
    """A state as `encode` returns it."""

    tree: Tree
    tensors: dict[str, Tensor]
    """By the names that the tree uses. Contiguous CPU tensors that share no memory, with dtypes
    that every release of safetensors can store."""
    boxes: dict[str, Box]
    """For each of those tensors that is a shard, the region of the whole tensor that it fills."""


def encode(
    state: object,
    *,
    name: str = "",
    to_host: Callable[[Tensor], Tensor] | None = None,
    is_rank_0: bool = True,
) -> EncodedState:
    """Splits a state into a tree and tensors. For a DTensor it takes the shard of this rank.

    A tensor is not copied if it is contiguous, on the CPU, and the only one in its storage.

    Args:
        state: any pytree of dict, OrderedDict, Counter, list, tuple, str, int, float, bool, None,
            tensors, numpy arrays and numbers, `torch.dtype`, `torch.device`, `torch.Size`.
        name: the name of the state in error messages.
        to_host: copies a tensor to contiguous CPU memory. The default is `on_cpu`.
        is_rank_0: True on rank 0, which stores every tensor that is not sharded, as `$tensor`. Any
            other rank stores only its own parts, as `$sharded`: its shards of DTensors, or the
            tensors of its own layers under a pipeline.

    Raises:
        CheckpointError: the state holds a value of another type; the message says where.
    """
    # Encoding also collects the tensors, and the region ("box") that each shard has in its tensor.
    encoder = Encoder(name, to_host or on_cpu, is_main=is_rank_0)
    tree = encoder.encode(state, ())
    return EncodedState(tree, encoder.tensors, encoder.boxes)


def decode(
    tree: Tree,
    tensors: Mapping[str, Tensor | LazyTensor],
    find_shards: FindShards | None = None,
) -> Any:
    """Returns the state that was given to `encode`. Tensors are not copied.

    Args:
        tree: the tree that `encode` returned.
        tensors: the tensors, by the names in the tree. Lazy tensors stay lazy, except those that
            were numpy arrays: their values are read.
        find_shards: returns a tensor that is stored in shards; None if there are no such tensors.

    Raises:
        CheckpointError: the tree names a tensor that does not exist, or has an unknown tag.
    """
    try:
        return _Decoder(tensors, find_shards).decode(tree)
    except CheckpointError:
        raise  # it says what is wrong
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            "reading a saved state",
            f"it is damaged: {type(error).__name__}: {str(error)[:200]!r}",
            "use another checkpoint",
        ) from error


def find_encoded_tensors(tree: Tree) -> Iterator[Mapping[str, Any]]:
    """Yields the encoded tensors of a tree, in its order: {"$tensor": ...} and {"$sharded": ...}.

    If several names of the state are tied, their common tensor is yielded once for each of them.
    """
    # Depth first with a stack, as a deeply nested tree could exceed Python's recursion limit. The
    # last element of the stack is visited next.
    to_visit = [tree]
    while to_visit:
        value = to_visit.pop()
        if isinstance(value, list):
            to_visit += reversed(value)
        elif isinstance(value, dict):
            is_tensor = "$tensor" in value or "$sharded" in value
            if is_tensor:
                yield value
            else:
                to_visit += reversed(value.values())


def why_unstorable(value: Tensor) -> str | None:
    """Returns the reason why a tensor cannot be stored, or None if it can be.

    The reason continues a sentence that begins with the name of the tensor: "is a tensor on the
    meta device, which has no values".
    """
    if torch.nn.parameter.is_lazy(value):
        return "is a parameter without a shape yet: run one batch through the model first"

    if type(value) not in {Tensor, torch.nn.Parameter}:
        return f"is {describe_type(value)}, a kind of tensor that cannot be stored as it is"

    if value.is_meta:
        return "is a tensor on the meta device, which has no values"

    if value.layout is not torch.strided or value.is_nested:
        return f"is a tensor of layout {'nested' if value.is_nested else value.layout}"

    if value.dtype not in STORABLE_DTYPES:
        return f"is a tensor of dtype {value.dtype}, which cannot be stored"

    return None


def on_cpu(value: Tensor) -> Tensor:
    """Returns a tensor with the same values in contiguous CPU memory; copies only if necessary."""
    return value.detach().resolve_conj().resolve_neg().cpu().contiguous()


def with_own_storage(tensor: Tensor, storages_in_use: set[int]) -> Tensor:
    """Returns a tensor that has a storage of its own, which holds nothing else.

    That is the given tensor, or a clone if its storage is larger, or is in use by another tensor.

    Args:
        tensor: a contiguous tensor.
        storages_in_use: the addresses of the storages of other tensors. The address of the result
            is added to this set, for the next call.
    """
    storage = tensor.untyped_storage()
    is_part_of_storage = storage.nbytes() != tensor.nbytes
    is_shared = storage.data_ptr() in storages_in_use
    if is_part_of_storage or is_shared:
        tensor = tensor.clone()

    # An empty tensor has no memory, so it has no address that another tensor could share.
    if tensor.numel() > 0:
        storages_in_use.add(tensor.untyped_storage().data_ptr())
    return tensor


class Encoder:
    """Encodes one state, and collects its tensors.

    Args:
        name: as in `encode`.
        to_host: as in `encode`.
        is_main: True on the rank that stores tensors which it has whole as `$tensor`. All other
            ranks store them as `$sharded`.
    """

    def __init__(self, name: str, to_host: Callable[[Tensor], Tensor], *, is_main: bool) -> None:
        self.name_of_state = name
        self._to_host = to_host
        self._is_main = is_main
        self.tensors: dict[str, Tensor] = {}
        """The stored tensors by name, as in `EncodedState`."""
        self.boxes: dict[str, Box] = {}
        """For each stored tensor that is a shard, the region that it fills, as in
        `EncodedState`."""
        self._tree_of_tie: dict[object, Tree] = {}
        """The trees of the tensors so far, by `tie_key`: tied tensors have the same key."""
        self._storages_in_use: set[int] = set()
        """The addresses of the storages of `tensors`."""
        self._open_containers: set[int] = set()
        """The ids of the containers around the value that is being encoded."""

    def encode(self, value: Any, path: KeyPath) -> Tree:
        """Returns the tree of a value, and adds the tensors in it to `tensors`.

        Args:
            value: a part of the state.
            path: the location of the value in the state.

        Raises:
            CheckpointError: the value cannot be stored.
        """
        # The type of a value must be exactly one of the types below: an instance of a subclass
        # would be restored as an instance of the base class. Only for tensors and numbers of NumPy
        # are subclasses allowed.
        kind = type(value)

        # Values that JSON has itself. It has no nan and inf.
        if value is None or kind in {bool, int, str}:
            return value
        if kind is float:
            if math.isfinite(value):
                return value
            return {"$float": repr(value)}

        # Values with numbers in memory, which are stored as tensors.
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path)
        if kind is np.ndarray:
            return {"$array": self._encode_numpy(value, path)}
        if isinstance(value, np.generic):
            return {"$scalar": self._encode_numpy(value, path)}

        # Everything else.
        if kind is torch.dtype:
            return {"$dtype": dtype_name(value)}
        if kind is torch.device:
            return {"$device": str(value)}
        if kind in {dict, OrderedDict, Counter, list, tuple, torch.Size}:
            return self._encode_container(value, path)
        raise self._error(path, f"is {with_article(kind.__name__)}")

    def _encode_container(self, value: Any, path: KeyPath) -> Tree:
        """Returns the tree of a dictionary, list, tuple or `torch.Size`.

        Raises:
            CheckpointError: the container contains itself, or a value that cannot be stored.
        """
        if id(value) in self._open_containers:
            raise self._error(path, "contains itself")

        self._open_containers.add(id(value))
        try:
            if isinstance(value, dict):
                return self._encode_dict(value, path)

            items = [self.encode(item, (*path, index)) for index, item in enumerate(value)]
            if isinstance(value, torch.Size):  # a kind of tuple
                return {"$size": items}
            if isinstance(value, tuple):
                return {"$tuple": items}
            return items
        finally:
            self._open_containers.discard(id(value))

    def _encode_dict(self, value: dict[Any, Any], path: KeyPath) -> Tree:
        """Returns the tree of a dict, Counter or OrderedDict, with a tag for its type.

        A dict whose keys are all strings needs no tag: `{"lr": 0.1}` stays `{"lr": 0.1}`, and
        `{0: 0.1}` becomes `{"$dict": [[0, 0.1]]}`.
        """
        pairs = []
        for key, item in value.items():
            if not _can_be_key(key):
                raise self._error(path, f"has a key that is {describe_type(key)}")
            pairs.append([self.encode(key, path), self.encode(item, (*path, key))])

        if isinstance(value, Counter):
            return {"$counter": pairs}

        if isinstance(value, OrderedDict):
            tree = {"$ordered": pairs}
            # nn.Module.state_dict() returns an OrderedDict with an attribute `_metadata`, which has
            # the version of each submodule.
            metadata = state_dict_metadata(value)
            if metadata is not None:
                tree["metadata"] = self.encode(metadata, path)
            return tree

        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(pairs)  # a string is encoded as itself
        return {"$dict": pairs}

    def _encode_tensor(self, value: Any, path: KeyPath) -> Tree:
        """Stores a tensor, or this rank's shard of a DTensor, and returns the tree for it.

        If the tensor is tied to one that was stored before, returns the tree of that tensor.
        """
        # Of a DTensor, this rank stores only its shard.
        local = value.detach().to_local() if is_sharded(value) else value
        problem = why_unstorable(local)
        if problem is not None:
            raise self._error(path, problem)

        tie = tie_key(value)  # equal for tied tensors; None for a tensor without memory
        if tie in self._tree_of_tie:
            return self._tree_of_tie[tie]

        box = self._box_to_store(value)  # the region that this rank stores
        is_stored_whole = box is not None and box.sizes == value.shape
        if is_stored_whole and self._is_main:
            tree = self._add_tensor(self._to_host(local), path)
        else:
            # When it is loaded, the tensor is joined from the shards of all ranks. `box` is None if
            # another rank stores the same shard. Under a pipeline, the only shard is the whole
            # tensor.
            tree = self._add_shard(value, local, box, path)

        if tie is not None:
            self._tree_of_tie[tie] = tree
        return tree

    def _add_shard(self, tensor: Any, local: Tensor, box: Box | None, path: KeyPath) -> Tree:
        """Stores this rank's shard of a tensor, and returns the tree of the whole tensor.

        Args:
            tensor: the whole tensor.
            local: the part of it that this rank has.
            box: the region of the tensor that this rank stores; None if it stores nothing of it.
            path: the location of the tensor in the state.
        """
        # The tree names the tensor even if this rank stores no elements of it.
        name = self._unused_name(path)
        if box is not None and 0 not in box.sizes:
            self._record(name, self._to_host(local))
            self.boxes[name] = box

        return {
            "$sharded": name,
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
        }

    def _box_to_store(self, value: Any) -> Box | None:
        """Returns the region of a tensor that this rank stores, or None if it stores nothing of it.

        It is the region that this rank has: its shard of a DTensor, for example the rows 2 to 4, or
        the whole of any other tensor. If a shard is replicated over some ranks, only the first of
        them stores it. Subclasses may choose a smaller region.
        """
        if is_replicated_copy(value):
            return None
        if is_sharded(value):
            return Box(*local_box(value))
        return Box(offsets=(0,) * value.dim(), sizes=tuple(value.shape))

    def _encode_numpy(self, value: Any, path: KeyPath) -> Tree:
        """Stores a numpy array or number as a tensor, and returns the tree of that tensor."""
        try:
            # A copy, so that the tensor keeps its values if the user's array changes. A number
            # becomes an array without dimensions.
            array = np.array(value)
            tensor = torch.from_numpy(array)
        except (TypeError, ValueError):  # torch has no dtype for it
            tensor = None

        if tensor is None or tensor.dtype not in STORABLE_DTYPES:
            raise self._error(path, f"is a numpy value of dtype {value.dtype}")
        return self._add_tensor(tensor.contiguous(), path)

    def _add_tensor(self, tensor: Tensor, path: KeyPath) -> Tree:
        """Stores a whole CPU tensor under a name made from its path, and returns its tree."""
        name = self._unused_name(path)
        self._record(name, tensor)
        if tensor.dtype not in DTYPES_STORED_AS_BYTES:
            return {"$tensor": name}

        # The file has only the bytes of this tensor, so the tree must say what they mean.
        return {
            "$tensor": name,
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
        }

    def _unused_name(self, path: KeyPath) -> str:
        """Returns a tensor name that is not in use: the path, joined by dots.

        `("state", 0, "exp_avg")` becomes "state.0.exp_avg", or "state.0.exp_avg#2" if another
        tensor already has that name.
        """
        joined_path = ".".join(str(part) for part in path) or "value"
        name = joined_path
        number = 1
        while name in self.tensors or name == NAME_RESERVED_BY_SAFETENSORS:
            number += 1
            name = f"{joined_path}#{number}"
        return name

    def _record(self, name: str, tensor: Tensor) -> None:
        """Adds a CPU tensor to those to be stored, as a copy if it shares memory with another one.

        A tensor is added as bytes if some releases of safetensors cannot store its dtype.
        """
        separate = with_own_storage(tensor, self._storages_in_use)
        if separate.dtype in DTYPES_STORED_AS_BYTES:
            separate = to_bytes(separate)
        self.tensors[name] = separate

    def _error(self, path: KeyPath, problem: str) -> CheckpointError:
        """Builds the error for a value that cannot be stored.

        Args:
            path: the location of the value.
            problem: what is wrong with the value: "contains itself".
        """
        place = _format_path(self.name_of_state, path)
        return CheckpointError(
            "saving the state of the training",
            f"{place or 'the state'} {problem}",
            "let state_dict() return tensors, numbers, text, and lists and dictionaries of these",
        )


def _format_path(name: str, path: KeyPath) -> str:
    """Writes the location of a value in a state: "optimizer.state[0].exp_avg".

    Args:
        name: the name of the state: "optimizer". Without a name ("") it is "state[0].exp_avg".
        path: the keys and indices that lead to the value: `("state", 0, "exp_avg")`.
    """
    text = name
    for part in path:
        if type(part) is str and _is_dotted_name(part):
            text += f".{part}"
        else:
            text += f"[{part!r}]"
    return text if name else text.removeprefix(".")


def _is_dotted_name(text: str) -> bool:
    """Returns True if a text consists of identifiers and dots: "fc" or "fc.weight"."""
    return all(word.isidentifier() for word in text.split("."))


def _can_be_key(key: object) -> bool:
    """Returns True if a dictionary with this key can be stored."""
    if type(key) is tuple:
        return all(_can_be_key(item) for item in key)
    return key is None or type(key) in {str, int, float, bool}


class _Decoder:
    """Decodes one tree, with the tensors that it names. The arguments are those of `decode`."""

    def __init__(
        self, tensors: Mapping[str, Tensor | LazyTensor], find_shards: FindShards | None
    ) -> None:
        self._tensors = tensors
        self._find_shards = find_shards
        # A tied tensor is named several times in a tree. These dictionaries, by name, make sure
        # that it becomes a single object.
        self._sharded_tensors: dict[str, TensorInShards] = {}
        self._tensors_from_bytes: dict[str, Tensor | LazyTensor] = {}

    def decode(self, tree: Tree) -> Any:
        """Returns the value that a tree stands for."""
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree

        tags = [key for key in tree if key.startswith("$")]
        if tags:
            return self._decode_tagged(tags[0], tree)
        return {key: self.decode(item) for key, item in tree.items()}  # a plain dictionary

    def _decode_tagged(self, tag: str, tree: Any) -> Any:
        """Returns the value of a JSON object with a tag: `{"$tuple": [1, 2]}` becomes `(1, 2)`."""
        content = tree[tag]
        match tag:
            case "$float":
                return float(content)
            case "$tensor":
                return self._decode_tensor(tree)
            case "$sharded":
                return self._decode_sharded(tree)
            case "$array":
                return self._decode_numpy(content)
            case "$scalar":
                return self._decode_numpy(content)[()]  # a number of numpy, not an array
            case "$dtype":
                return DTYPE_OF_NAME[content]
            case "$device":
                return torch.device(content)
            case "$size":
                return torch.Size(non_negative_integers(content))
            case "$tuple":
                return tuple(self.decode(content))
            case "$dict":
                return dict(self._decode_pairs(content))
            case "$counter":
                return Counter(dict(self._decode_pairs(content)))
            case "$ordered":
                return self._decode_ordered_dict(tree)
        raise CheckpointError(
            "reading a saved state",
            f"a value of the kind {tag[1:80]!r}, which this version does not know",
            "read it with the version of Lockstep that saved it, or a newer one",
        )

    def _decode_tensor(self, tree: Any) -> Tensor | LazyTensor:
        """Returns the tensor of {"$tensor": name}.

        Some dtypes cannot be read by every release of safetensors. A tensor of such a dtype is
        stored as its bytes. Its tree also has its dtype and shape, by which the bytes are converted
        back.
        """
        name = tree["$tensor"]
        if name not in self._tensors:
            raise CheckpointError(
                "reading a saved state",
                f"the manifest names the tensor {str(name)[:80]!r}, which is in none of its files",
                "the files do not belong together: use another checkpoint",
            )
        stored = self._tensors[name]
        is_stored_as_bytes = "dtype" in tree
        if not is_stored_as_bytes:
            return stored

        # A tied tensor occurs several times in the tree, but is converted only once, so that it
        # becomes a single object.
        dtype = STORABLE_DTYPE_OF_NAME[tree["dtype"]]
        shape = non_negative_integers(tree["shape"])
        if name not in self._tensors_from_bytes:
            if isinstance(stored, LazyTensor):
                self._tensors_from_bytes[name] = stored.view_as(dtype, shape)
            else:
                # In a mapped file the bytes may start at any address, which torch does not accept
                # for every dtype. A clone is aligned.
                self._tensors_from_bytes[name] = from_bytes(stored.clone(), dtype, shape)
        return self._tensors_from_bytes[name]

    def _decode_sharded(self, tree: Any) -> TensorInShards:
        """Returns the tensor of {"$sharded": name, "dtype": ..., "shape": ...}.

        A tied tensor, which occurs several times in the tree, is a single object.
        """
        if self._find_shards is None:
            raise ValueError("a tensor in shards where none is expected")

        name = tree["$sharded"]
        if name not in self._sharded_tensors:
            dtype = STORABLE_DTYPE_OF_NAME[tree["dtype"]]
            shape = non_negative_integers(tree["shape"])
            self._sharded_tensors[name] = self._find_shards(name, dtype, shape)
        return self._sharded_tensors[name]

    def _decode_numpy(self, tree: Any) -> Any:
        """Returns the numpy array that was stored as a tensor, given the tree of that tensor."""
        tensor = self.decode(tree)
        if isinstance(tensor, LazyTensor):
            return tensor.read().numpy()
        # Copied, because the tensor may be mapped from a file that is removed later.
        return tensor.numpy().copy()

    def _decode_pairs(self, pairs: Iterable[Any]) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(value)) for key, value in pairs]

    def _decode_ordered_dict(self, tree: Any) -> OrderedDict[Any, Any]:
        """Returns the dictionary of {"$ordered": pairs, "metadata": ...}.

        The metadata is only there if the dictionary is the state of a module: it has the version of
        each submodule.
        """
        state = OrderedDict(self._decode_pairs(tree["$ordered"]))
        if "metadata" in tree:
            set_state_dict_metadata(state, self.decode(tree["metadata"]))
        return state


def rng_state_to_text(state: dict[str, Any]) -> str:
    """Returns a random state (about 13 KB) as a text that can be sent to another rank."""
    encoded = encode(state)
    data = base64.b64encode(safetensors.torch.save(encoded.tensors)).decode()
    return json.dumps({"tree": encoded.tree, "data": data})


def rng_state_from_text(text: str) -> dict[str, Any]:
    """Returns the random state that was converted to a text by `rng_state_to_text`."""
    content = json.loads(text)
    tensors = safetensors.torch.load(base64.b64decode(content["data"]))
    state: dict[str, Any] = decode(content["tree"], tensors)
    return state
