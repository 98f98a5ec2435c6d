"""Decides what a rank keeps of a step, where it lies in the rank's memory area, and describes it.

The states that a checkpoint would save are cut into *sections*: one for each object, and one for
each entry of an optimizer's state, where `state` holds the tensors. A section is encoded like a
checkpoint on disk (`encoding`), so that the same code reads it. Its *leaves* are its tensors and
numpy values, and its *skeleton* is the section without them. A *placement* is a leaf, or some of
its rows, that this rank copies.

Encoding takes milliseconds for hundreds of tensors, so its result is reused: while a section has
the same skeleton, and leaves of the same shapes, only the leaves are copied.

State that is equal on all ranks of a machine is divided between them. Each rank copies about the
same number of bytes: a range of the tensors, which begins and ends between two rows (of the first
dimension).
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import DTYPES_STORED_AS_BYTES, Encoder, KeyPath, Tree
from lockstep.checkpoint.formats.safetensors import CODE_OF_DTYPE
from lockstep.checkpoint.kept_reading import RANDOM
from lockstep.checkpoint.lazy_tensor import Shape
from lockstep.checkpoint.memory_area import ALIGNMENT, Area, round_up
from lockstep.checkpoint.shards import Box
from lockstep.distributed.tensor_bytes import to_bytes
from lockstep.distributed.torch_compat import is_sharded

Rows = tuple[int, int]
"""The rows of a tensor that a rank copies: the first one, and the one after the last."""
_LEAF = "$leaf"
"""Replaces a leaf in a skeleton."""


class Section(NamedTuple):
    """A piece of the training state that is encoded separately."""

    file: str
    """The checkpoint file that the section belongs to: a module's name or `layout.TRAINING`."""
    path: KeyPath
    """The keys that lead to the section in that file, for example ("optimizer", "state"). Empty for
    a module."""
    value: Any
    is_partial: bool
    """True if this rank has only some of the entries. It keeps all entries that it has."""
    is_divided: bool
    """True if the tensors are equal on all ranks of a machine, so that each rank copies a share."""

    @property
    def key(self) -> tuple[str, KeyPath]:
        """Identifies the section."""
        return self.file, self.path


class LeafKind(NamedTuple):
    """The properties of a leaf. While they stay the same, the leaf keeps its place in the area."""

    dtype: Any
    shape: Shape
    device: Any
    is_sharded: bool


class Placement(NamedTuple):
    """A leaf that this rank copies, or some rows of a leaf."""

    leaf: int
    """The index of the leaf in its section."""
    rows: Rows | None
    """The rows to copy; None for all rows."""
    name: str
    box: Box | None
    """The region of the whole tensor that is copied; None for the whole tensor."""
    dtype: torch.dtype
    """The dtype in the area. Unusual dtypes are stored as bytes."""
    shape: Shape

    @property
    def num_bytes(self) -> int:
        """The number of bytes that are copied."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class _Known:
    """The result of encoding a section, which is reused until the section changes."""

    skeleton: Any
    kinds: list[LeafKind]
    placements: list[Placement]
    tree: str | None
    """The encoded tree as JSON; None if another rank of the machine keeps it."""
    leaves: list[Any]
    locals: list[Tensor]
    """See `_Taken`."""
    is_partial: bool
    """See `Section`."""
    has_shards: bool
    """True if some leaves are DTensors."""
    has_arrays: bool
    """True if some leaves are numpy values. They must be read anew in each step."""
    addresses: list[int]
    """The memory addresses of the leaves."""
    pattern: list[int]
    """Which leaves share their memory, see `_pattern`."""
    sources: list[Tensor]
    """The tensor to copy from, for each placement."""
    offsets: list[int] = field(default_factory=list)
    """The offset of each placement in the values of the area."""
    text: str = ""
    """The description of the section in the header; empty until the offsets are known."""


class KeptLayout:
    """Knows which tensors a rank keeps of each step, and where they lie in its memory area.

    Args:
        local_rank: the local rank of this process.
        local_size: the number of ranks on this machine. They divide the state that is equal on all.
    """

    def __init__(self, local_rank: int, local_size: int) -> None:
        self._local_rank = local_rank
        self._local_size = local_size
        self._known: dict[tuple[str, KeyPath], _Known] = {}
        self._divided_kinds: list[list[LeafKind]] = []
        """The kinds of the leaves of all divided sections, when they were last divided."""
        self._rows: dict[tuple[str, KeyPath], list[Rows | None]] = {}
        """The rows that this rank copies, for each leaf of each divided section."""
        self._to_divide_anew: set[tuple[str, KeyPath]] = set()
        """The keys of sections that were divided again in this update."""
        self.version = 0
        """Increases when values get other places in the area."""
        self.num_bytes = 0
        """How many bytes the values take in the area."""
        self.sources: list[Tensor] = []
        """The tensors to copy from in this step."""

    @property
    def header_sections(self) -> str:
        """The descriptions of all sections, as a list in JSON."""
        return "[" + ", ".join(known.text for known in self._known.values()) + "]"

    @property
    def has_own_parts(self) -> bool:
        """True if this rank has state that other ranks lack, such as shards or a pipeline stage.

        Random states do not count: a machine can resume without those of other machines.
        """
        for (file, _), known in self._known.items():
            if known.has_shards or (known.is_partial and file != RANDOM):
                return True
        return False

    def leaves(self) -> list[Any]:
        """Returns the tensor of the training state that each of `sources` was taken from."""
        leaves = []
        for known in self._known.values():
            leaves += [known.leaves[placement.leaf] for placement in known.placements]
        return leaves

    def places(self, area: Area) -> list[Tensor]:
        """Returns the tensors in an area that `sources` are copied to, as views of its memory."""
        places = []
        for known in self._known.values():
            for placement, offset in zip(known.placements, known.offsets, strict=True):
                place = area.view(area.values_at + offset, placement.dtype, placement.shape)
                places.append(place)
        return places

    @torch.no_grad()
    def update(self, sections: Sequence[Section]) -> None:
        """Sets `sources` for the present step, and encodes the sections that have changed.

        Args:
            sections: the whole state of this rank.

        Raises:
            CheckpointError: the state contains something that cannot be stored.
        """
        taken = [_Taken(section, self._known.get(section.key)) for section in sections]

        # The ranks of the machine divide the state again if the shapes of its tensors have changed.
        divided_kinds = [each.kinds for each in taken if each.section.is_divided]
        self._to_divide_anew = set()
        if divided_kinds != self._divided_kinds:
            self._divide(taken)
            self._divided_kinds = divided_kinds

        placements_before = self._placements()
        known: dict[tuple[str, KeyPath], _Known] = {}
        for each in taken:
            known[each.section.key] = self._update_section(each)
        self._known = known
        if self._placements() != placements_before:
            self._assign_offsets()

        # The text holds the offsets, so it can only be made now.
        self.sources = []
        for each in taken:
            section_known = known[each.section.key]
            if not section_known.text:
                section_known.text = _text_of(each.section, section_known)
            self.sources += section_known.sources

    def _placements(self) -> list[list[Placement]]:
        """Returns the placements of each section."""
        return [known.placements for known in self._known.values()]

    def _assign_offsets(self) -> None:
        """Assigns each placement its offset in the area, one after the other."""
        self.version += 1
        end = 0
        for known in self._known.values():
            known.offsets = []
            known.text = ""  # it holds the old offsets
            for placement in known.placements:
                known.offsets.append(end)
                end = round_up(end + placement.num_bytes, ALIGNMENT)
        self.num_bytes = end

    def _update_section(self, taken: _Taken) -> _Known:
        """Returns the encoded section for this step; it is only encoded again if it has changed."""
        known = taken.known
        has_other_rows = taken.section.key in self._to_divide_anew
        if known is None or has_other_rows:
            return self._encode(taken)

        if taken.is_unchanged:
            return known

        has_other_form = known.skeleton != taken.skeleton or known.kinds != taken.kinds
        if has_other_form:
            return self._encode(taken)

        addresses = _addresses(taken.locals)
        has_other_ties = _pattern(addresses) != known.pattern
        if has_other_ties:
            return self._encode(taken)

        # Only the tensors are different ones, so the encoded section still fits.
        known.leaves = taken.leaves
        known.locals = taken.locals
        known.addresses = addresses
        known.sources = _sources(known.placements, taken.locals)
        return known

    def _encode(self, taken: _Taken) -> _Known:
        """Encodes a section, and notes what this rank copies of it."""
        section = taken.section
        is_main = self._local_rank == 0
        encoder = _LayoutEncoder(section, is_main=is_main, rows=self._rows.get(section.key))
        tree = encoder.encode(section.value, section.path)

        has_tree = is_main or section.is_partial
        addresses = _addresses(taken.locals)
        known = _Known(
            skeleton=taken.skeleton,
            kinds=taken.kinds,
            placements=encoder.placements,
            tree=json.dumps(tree, allow_nan=False) if has_tree else None,
            leaves=taken.leaves,
            locals=taken.locals,
            is_partial=section.is_partial,
            has_shards=any(kind.is_sharded for kind in taken.kinds),
            has_arrays=any(kind.device is None for kind in taken.kinds),
            addresses=addresses,
            pattern=_pattern(addresses),
            sources=_sources(encoder.placements, taken.locals),
        )

        # The old offsets hold while the placements stay the same. If not, `update` assigns others.
        if taken.known is not None:
            known.offsets = taken.known.offsets
        return known

    def _divide(self, taken: Sequence[_Taken]) -> None:
        """Divides the state that is equal on all ranks of this machine between them, by rows.

        The bytes of all leaves are numbered from first to last, and each rank gets an equal range
        of them. Example: 2 ranks, tensors of 300 and 100 bytes with rows of 10 bytes. Local rank 0
        copies rows 0 to 20 of the first tensor, local rank 1 its other rows and the second tensor.

        Every rank computes this for itself, from the same sizes. The rows are stored in `_rows`.
        """
        self._rows = {}
        divided = [each for each in taken if each.section.is_divided]
        self._to_divide_anew = {each.section.key for each in divided}
        if self._local_size == 1:
            return

        total_bytes = sum(each.num_divided_bytes for each in divided)
        range_begin = total_bytes * self._local_rank // self._local_size
        range_end = total_bytes * (self._local_rank + 1) // self._local_size

        leaf_begin = 0  # the number of the first byte of the leaf
        for each in divided:
            rows_of_leaf: list[Rows | None] = []
            for leaf, kind in zip(each.locals, each.kinds, strict=True):
                # A shard is different on each rank, and a scalar has no rows.
                if kind.is_sharded or leaf.dim() == 0:
                    rows_of_leaf.append(None)
                    continue
                first_row = _row_at(leaf, range_begin - leaf_begin)
                end_row = _row_at(leaf, range_end - leaf_begin)
                rows_of_leaf.append((first_row, end_row))
                leaf_begin += leaf.nbytes
            self._rows[each.section.key] = rows_of_leaf


class _Taken:
    """A section in the present step, split into its skeleton and its leaves.

    Args:
        section: the section.
        known: the result of encoding it in an earlier step; None if it was not encoded yet.
    """

    def __init__(self, section: Section, known: _Known | None) -> None:
        self.section = section
        self.known = known
        self.leaves: list[Any] = []
        self.skeleton = _skeleton(section.value, self.leaves)
        self.locals: list[Tensor] = []
        """The leaves as plain tensors. For a DTensor, this is the shard of this rank."""
        self.kinds: list[LeafKind] = []
        self.is_unchanged = known is not None and self._is_as(known)
        if known is not None and self.is_unchanged:
            self.locals = known.locals
            self.kinds = known.kinds
        else:
            self._read_leaves()

    def _is_as(self, known: _Known) -> bool:
        """Returns True if the section has the same tensors as before, in the same memory."""
        if self.skeleton != known.skeleton or known.has_arrays:
            return False

        has_same_leaves = all(map(_is, self.leaves, known.leaves))
        if not has_same_leaves:
            return False

        # The same tensor may have got other memory, for example by `parameter.data = ...`.
        tensors = self.leaves
        if known.has_shards:
            tensors = [_local(leaf) for leaf in self.leaves]
        return _addresses(tensors) == known.addresses

    def _read_leaves(self) -> None:
        """Sets `locals` and `kinds` from the leaves."""
        for leaf in self.leaves:
            local = _local(leaf)
            is_array = isinstance(leaf, np.ndarray | np.generic)
            device = None if is_array else local.device
            kind = LeafKind(local.dtype, tuple(local.shape), device, is_sharded(leaf))
            self.locals.append(local)
            self.kinds.append(kind)

    @property
    def num_divided_bytes(self) -> int:
        """The number of bytes that the ranks of the machine divide between them."""
        num_bytes = 0
        for leaf, kind in zip(self.locals, self.kinds, strict=True):
            if not kind.is_sharded and leaf.dim() > 0:
                num_bytes += leaf.nbytes
        return num_bytes


class _LayoutEncoder(Encoder):
    """Encodes a section without copying its tensors: it only notes what this rank copies.

    Args:
        section: the section to encode. Its leaves are met in the same order as in `_skeleton`.
        is_main: True on the first rank of the machine, which keeps everything that is not divided.
        rows: the rows of each leaf that this rank copies; None if the section is not divided.
    """

    def __init__(self, section: Section, *, is_main: bool, rows: list[Rows | None] | None) -> None:
        super().__init__(section.file if not section.path else "", _unchanged, is_main)
        self.placements: list[Placement] = []
        self._keeps_whole = is_main or section.is_partial
        self._rows = rows
        self._num_leaves = 0
        self._names: set[str] = set()
        self._box: Box | None = None
        """The region of the present leaf that this rank stores; None if it stores nothing of it."""

    def _encode_tensor(self, value: Any, path: KeyPath) -> Tree:
        self._num_leaves += 1
        return super()._encode_tensor(value, path)

    def _encode_numpy(self, value: Any, path: KeyPath) -> Tree:
        self._num_leaves += 1
        self._box = Box((0,) * np.ndim(value), np.shape(value)) if self._keeps_whole else None
        return super()._encode_numpy(value, path)

    def _box_to_store(self, value: Any) -> Box | None:
        """Returns the region of a tensor that this rank stores, or None if it stores nothing."""
        self._box = super()._box_to_store(value)
        if is_sharded(value):
            return self._box

        rows = None if self._rows is None else self._rows[self._num_leaves - 1]
        if rows is not None:
            first_row, end_row = rows
            other_sizes = tuple(value.shape[1:])
            offsets = (first_row, *(0 for _ in other_sizes))
            self._box = Box(offsets, (end_row - first_row, *other_sizes))
        elif not self._keeps_whole:
            self._box = None
        return self._box

    def _free_name(self, path: KeyPath) -> str:
        """Returns a name for a tensor that no other tensor has: its path, and a number if needed.

        `("a", "b") -> "a.b"`, or `"a.b#2"` if "a.b" is taken. A name is also taken if another rank
        stores the tensor, so that all ranks choose the same names.
        """
        joined_path = ".".join(str(part) for part in path) or "value"
        name = joined_path
        number = 1
        while name in self._names:
            number += 1
            name = f"{joined_path}#{number}"
        self._names.add(name)
        return name

    def _store(self, name: str, tensor: Tensor) -> None:
        """Notes that the chosen region of the present leaf is to be copied."""
        box = self._box
        if box is None:  # a numpy value that the first rank of the machine keeps
            return

        leaf_index = self._num_leaves - 1
        rows = None if self._rows is None else self._rows[leaf_index]
        dtype = tensor.dtype
        shape: Shape = tuple(box.sizes)
        if dtype in DTYPES_STORED_AS_BYTES:
            shape = (math.prod(shape) * dtype.itemsize,)
            dtype = torch.uint8
        self.placements.append(Placement(leaf_index, rows, name, box, dtype, shape))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _is(one: object, other: object) -> bool:
    return one is other


def _skeleton(value: Any, leaves: list[Any]) -> Any:
    """Returns a value with its tensors and numpy values removed, and appends these to `leaves`.

    Example: `{"lr": 0.1, "w": tensor} -> (dict, ["lr", "w"], [(float, 0.1), "$leaf"])`.

    Two skeletons are equal if the values differ only in their leaves. Dictionaries must also have
    the same order, since the leaves are in that order.
    """
    kind = type(value)
    if value is None or kind is str or kind is int:
        return value
    if isinstance(value, Tensor | np.ndarray | np.generic):
        leaves.append(value)
        return _LEAF
    if kind in (dict, OrderedDict, Counter):
        items = [_skeleton(item, leaves) for item in value.values()]
        return kind, list(value), items
    if kind in (list, tuple):
        return kind, [_skeleton(item, leaves) for item in value]
    return kind, value


def _sources(placements: Sequence[Placement], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensor to copy from for each placement: a leaf, or some rows of a leaf."""
    sources = []
    for placement in placements:
        source = leaves[placement.leaf].detach()
        if placement.rows is not None:
            first_row, end_row = placement.rows
            source = source[first_row:end_row]
        if source.dtype != placement.dtype:
            source = to_bytes(source)
        sources.append(source)
    return sources


def _local(leaf: Any) -> Tensor:
    """Returns a leaf as a plain tensor; of a DTensor this rank's shard. Shares memory if it can."""
    if isinstance(leaf, np.ndarray | np.generic):
        return torch.from_numpy(np.array(leaf))
    if is_sharded(leaf):
        local: Tensor = leaf.to_local()
        return local
    plain: Tensor = leaf
    return plain


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the memory address of each tensor."""
    return [tensor.data_ptr() for tensor in tensors]


def _pattern(addresses: Sequence[int]) -> list[int]:
    """Returns, for each address, the index of the first equal one. It shows which tensors are tied.

    Example: `[700, 800, 700] -> [0, 1, 0]`.
    """
    first_index: dict[int, int] = {}
    return [first_index.setdefault(address, index) for index, address in enumerate(addresses)]


def _row_at(tensor: Tensor, position: int) -> int:
    """Returns the row that holds the byte at a position, which may lie outside the tensor.

    4 rows of 10 bytes: 25 -> 2. A position before the tensor gives 0, one after it gives 4.
    """
    num_rows = tensor.shape[0]
    if tensor.nbytes == 0 or position >= tensor.nbytes:
        return num_rows
    return max(0, position) * num_rows // tensor.nbytes


def _text_of(section: Section, known: _Known) -> str:
    """Returns the description of a section in the header, as JSON.

    {"file": ..., "path": [...], "partial": ..., "tensors": {name: [code, shape, offset, offsets of
    the box, its sizes]}, "tree": ...}, without "tree" if another rank of the machine has it.
    """
    tensors: dict[str, Any] = {}
    for placement, offset in zip(known.placements, known.offsets, strict=True):
        box_offsets = None if placement.box is None else placement.box.offsets
        box_sizes = None if placement.box is None else placement.box.sizes
        code = CODE_OF_DTYPE[placement.dtype]
        tensors[placement.name] = [code, placement.shape, offset, box_offsets, box_sizes]
    description = {
        "file": section.file,
        "path": section.path,
        "partial": section.is_partial,
        "tensors": tensors,
    }
    text = json.dumps(description)
    if known.tree is None:
        return text
    text = text.removesuffix("}")
    return f'{text}, "tree": {known.tree}}}'


def sections_of(
    states: Mapping[str, Any],
    module_names: Sequence[str],
    optimizer_names: Sequence[str],
    partial_names: Sequence[str],
) -> list[Section]:
    """Cuts the states of a training into sections.

    Args:
        states: by name; in the state of a module, tensors that other ranks have are None.
        module_names: which of them are states of modules.
        optimizer_names: which of them are states of optimizers.
        partial_names: the names of states of which this rank has only some entries. These are the
            tensors of a module, or what stands under `state` in another object's state.
    """
    sections = []
    for name, state in states.items():
        is_partial = name in partial_names
        is_optimizer = name in optimizer_names
        if name in module_names:
            sections.append(Section(name, (), state, is_partial, is_divided=not is_partial))
        elif (is_optimizer or is_partial) and _can_be_cut(state):
            for key, value in state.items():
                is_entries = key == "state"
                section = Section(
                    layout.TRAINING,
                    (name, key),
                    value,
                    is_partial=is_partial and is_entries,
                    is_divided=is_optimizer and not is_partial and is_entries,
                )
                sections.append(section)
        else:
            sections.append(Section(layout.TRAINING, (name,), state, False, False))
    return sections


def _can_be_cut(state: Any) -> bool:
    """Returns True if each entry of a state can be a section of its own.

    It must be a dictionary with an entry `state`, and be encoded as a plain JSON object.
    """
    if type(state) is not dict or "state" not in state:
        return False
    return all(type(key) is str and not key.startswith("$") for key in state)
