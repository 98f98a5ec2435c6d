"""Decides what a rank keeps of a step, where it lies in the rank's memory area, and describes it.

The training state is cut into *sections*: one for each object, and one for each entry of an
optimizer's state. The *leaves* of a section are its tensors and numpy values, and its *skeleton* is
the section without them. A section is encoded like a checkpoint on disk (`encoding`). A *placement*
is a leaf, or some of its rows, that this rank copies.

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
from collections.abc import Iterator, Mapping, Sequence
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
from lockstep.torch_compat import is_sharded

Rows = tuple[int, int]
"""The rows of a tensor that a rank copies: the first one, and the one after the last."""
SectionKey = tuple[str, KeyPath]
"""Identifies a section: the file and path of `Section`."""
_LEAF = object()
"""Replaces a leaf in a skeleton. It equals no value that a state may hold."""


class Section(NamedTuple):
    """A piece of the training state that is encoded separately."""

    file: str
    """The checkpoint file that the section belongs to: a module's name or `layout.TRAINING`."""
    path: KeyPath
    """The keys that lead to the section in that file, for example ("optimizer", "state"). Empty for
    a module."""
    value: Any
    is_partial: bool = False
    """True if this rank has only some of the entries. It keeps all entries that it has."""
    is_divided: bool = False
    """True if the tensors are equal on all ranks of a machine, so that each rank copies a share. If
    a section is neither partial nor divided, the first rank of each machine keeps all of it."""

    @property
    def key(self) -> SectionKey:
        """Identifies the section."""
        return self.file, self.path


class LeafKind(NamedTuple):
    """The properties of a leaf. While they stay the same, the leaf keeps its place in the area."""

    dtype: Any
    shape: Shape
    device_of_tensor: Any
    """None for a numpy value."""
    is_sharded: bool

    @property
    def is_numpy_value(self) -> bool:
        """True for a numpy array or number."""
        return self.device_of_tensor is None

    @property
    def can_be_divided(self) -> bool:
        """True for a tensor that is equal on all ranks of a machine, if its section is.

        A shard is different on each rank, and a scalar has no rows. A numpy value is stored whole
        (`_LayoutEncoder._encode_numpy`).
        """
        return not self.is_sharded and not self.is_numpy_value and len(self.shape) > 0


class Placement(NamedTuple):
    """A leaf that this rank copies, or some rows of a leaf."""

    leaf: int
    """The index of the leaf in its section."""
    rows: Rows | None
    """The rows to copy; None for all rows."""
    name: str
    box: Box
    """The region of the whole tensor that is copied."""
    dtype: torch.dtype
    """The dtype in the area. Unusual dtypes are stored as bytes."""
    shape: Shape

    @property
    def num_bytes(self) -> int:
        """The number of bytes that are copied."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class _EncodedSection:
    """The result of encoding a section, which is reused until the section changes."""

    skeleton: Any
    leaf_kinds: list[LeafKind]
    placements: list[Placement]
    """The leaves, or rows of leaves, that this rank copies."""
    tree: str | None
    """The encoded tree as JSON; None if another rank of the machine keeps it."""
    leaves: list[Any]
    local_leaves: list[Tensor]
    """See `_PresentSection`."""
    is_partial: bool
    """See `Section`."""
    has_shards: bool
    """True if some leaves are DTensors."""
    has_numpy_values: bool
    """True if some leaves are numpy values. They must be read anew in each step."""
    addresses: list[int]
    """The memory addresses of the leaves."""
    ties: list[int]
    """Which leaves share their memory, see `_find_ties`."""
    sources: list[Tensor]
    """The tensor to copy from, for each placement."""
    offsets: list[int] = field(default_factory=list)
    """The offset of each placement in the values of the area."""
    text: str = ""
    """The description of the section in the header; empty until the offsets are known."""

    def replace_tensors(
        self, leaves: list[Any], local_leaves: list[Tensor], addresses: list[int]
    ) -> None:
        """Makes the encoded section refer to other tensors, of the same dtypes and shapes.

        Args:
            leaves: the tensors of the section.
            local_leaves: the same as plain tensors: of a DTensor, this rank's shard.
            addresses: the memory addresses of the local leaves.
        """
        self.leaves = leaves
        self.local_leaves = local_leaves
        self.addresses = addresses
        self.sources = _sources(self.placements, local_leaves)


class KeptLayout:
    """Knows which tensors a rank keeps of each step, and where they lie in its memory area.

    Args:
        local_rank: the local rank of this process.
        local_size: the number of ranks on this machine. They divide the state that is equal on all.
    """

    def __init__(self, local_rank: int, local_size: int) -> None:
        self._local_rank = local_rank
        self._local_size = local_size
        self._encoded: dict[SectionKey, _EncodedSection] = {}
        """The sections as they were encoded last."""
        self._divided_kinds: list[list[LeafKind]] = []
        """The kinds of the leaves of all divided sections, when they were last divided."""
        self._rows_of_section: dict[SectionKey, list[Rows | None]] = {}
        """The rows that this rank copies, for each leaf of each divided section."""
        self.version = 0
        """Increases when values get other places in the area."""
        self.num_bytes = 0
        """How many bytes the values take in the area."""
        self.sources: list[Tensor] = []
        """The tensors to copy from in this step."""

    @property
    def header_sections(self) -> str:
        """The descriptions of all sections, as a list in JSON."""
        return "[" + ", ".join(encoded.text for encoded in self._encoded.values()) + "]"

    @property
    def has_own_parts(self) -> bool:
        """True if this rank has state that other ranks lack, such as shards or a pipeline stage.

        Random states do not count: a machine can resume without those of other machines.
        """
        for (file, _), encoded in self._encoded.items():
            if encoded.has_shards or (encoded.is_partial and file != RANDOM):
                return True
        return False

    def leaves(self) -> list[Any]:
        """Returns the tensor of the training state that each of `sources` was taken from."""
        leaves = []
        for encoded in self._encoded.values():
            leaves += [encoded.leaves[placement.leaf] for placement in encoded.placements]
        return leaves

    def destinations_in(self, area: Area) -> list[Tensor]:
        """Returns the tensors in an area that `sources` are copied to, as views of its memory."""
        destinations = []
        for encoded in self._encoded.values():
            for placement, offset in zip(encoded.placements, encoded.offsets, strict=True):
                view = area.view(area.values_at + offset, placement.dtype, placement.shape)
                destinations.append(view)
        return destinations

    @torch.no_grad()
    def update(self, sections: Sequence[Section]) -> None:
        """Sets `sources` for the present step, and encodes the sections that have changed.

        Encoding a section finds its placements: the tensors, or rows of tensors, that this rank
        copies. Each placement has an offset in the memory area. The description of the section in
        JSON (its text) has these offsets. A *divided* section is equal on all ranks of the machine,
        and each of them copies some rows of its tensors.

        Args:
            sections: the whole state of this rank.

        Raises:
            CheckpointError: the state contains something that cannot be stored.
        """
        present_sections: list[_PresentSection] = []
        for section in sections:
            encoded_before = self._encoded.get(section.key)
            present_sections.append(_PresentSection(section, encoded_before))

        # 1. The ranks of the machine divide the state again if the shapes of its tensors have
        # changed. Then this rank copies other rows of all divided sections.
        divided = [present for present in present_sections if present.section.is_divided]
        kinds_of_divided = [present.leaf_kinds for present in divided]  # with the shapes
        was_divided_again = kinds_of_divided != self._divided_kinds
        if was_divided_again:
            self._rows_of_section = self._divide(divided)
            self._divided_kinds = kinds_of_divided

        # 2. Encode sections of which this rank copies other rows, and sections that have changed.
        encoded_sections: dict[SectionKey, _EncodedSection] = {}
        for present in present_sections:
            has_other_rows = was_divided_again and present.section.is_divided
            encoded = None if has_other_rows else self._reuse_encoded(present)
            if encoded is None:
                encoded = self._encode(present)
            encoded_sections[present.section.key] = encoded

        # 3. If a placement has changed, all get new offsets. The texts of all sections have the old
        # offsets, so they are dropped.
        placements_before = self._placements()  # those of the sections in `self._encoded`
        self._encoded = encoded_sections
        placements_now = self._placements()
        if placements_now != placements_before:
            self._assign_offsets()
            for encoded in encoded_sections.values():
                encoded.text = ""

        # 4. Write the missing texts: those of sections that were encoded just now, or all.
        self.sources = []
        for present in present_sections:
            encoded = encoded_sections[present.section.key]
            if not encoded.text:
                encoded.text = _text_of(present.section, encoded)
            self.sources += encoded.sources

    def _placements(self) -> list[list[Placement]]:
        """Returns the placements of each section in `self._encoded`."""
        return [encoded.placements for encoded in self._encoded.values()]

    def _assign_offsets(self) -> None:
        """Assigns each placement its offset in the area, one after the other."""
        self.version += 1  # tells `OwnArea` to make its views of the memory again
        end = 0
        for encoded in self._encoded.values():
            encoded.offsets = []
            for placement in encoded.placements:
                encoded.offsets.append(end)
                end = round_up(end + placement.num_bytes, ALIGNMENT)
        self.num_bytes = end

    def _reuse_encoded(self, present: _PresentSection) -> _EncodedSection | None:
        """Returns the encoded section of an earlier step, if it can be used for this step, too.

        If the section has other tensors now, the encoded section is changed to refer to these.

        Returns:
            The encoded section, or None if the section must be encoded again.
        """
        encoded = present.encoded_before
        if encoded is None:
            return None

        # Case 1: the section consists of the same tensors in the same memory.
        if present.is_unchanged:
            return encoded

        # Case 2: it consists of other tensors, but these have the same dtypes and shapes, and
        # everything that is no tensor is the same. Then the encoded tree still holds.
        has_same_skeleton = encoded.skeleton == present.skeleton
        has_same_kinds = encoded.leaf_kinds == present.leaf_kinds
        if not (has_same_skeleton and has_same_kinds):
            return None

        # Leaves that share memory are tied: they are stored once, under one name in the tree. (The
        # memory of a DTensor is that of its local leaf, this rank's shard.)
        addresses = _addresses(present.local_leaves)
        has_same_ties = _find_ties(addresses) == encoded.ties
        if not has_same_ties:
            return None

        encoded.replace_tensors(present.leaves, present.local_leaves, addresses)
        return encoded

    def _encode(self, present: _PresentSection) -> _EncodedSection:
        """Encodes a section, and notes what this rank copies of it.

        Args:
            present: the section in the present step, split into its leaves (tensors and numpy
                values) and its skeleton (everything else).
        """
        section = present.section
        kinds = present.leaf_kinds

        # Encoding makes a tree in JSON and the placements: which rows of which leaf this rank
        # copies. The ranks of a machine have the same tree, so the first of them keeps it, unless
        # each rank has other entries of the section.
        is_main = self._local_rank == 0

        # If the ranks of this machine divide the section between them: the rows that this rank
        # copies of each leaf. Otherwise None.
        rows_of_leaf = self._rows_of_section.get(section.key)
        encoder = _LayoutEncoder(section, is_main=is_main, rows_of_leaf=rows_of_leaf)
        tree = encoder.encode(section.value, section.path)
        keeps_tree = is_main or section.is_partial
        tree_text = json.dumps(tree, allow_nan=False) if keeps_tree else None

        # Each placement has an offset in the memory area. They are the offsets of the last step, if
        # all placements are those of the last step. Otherwise `update`, which calls this method,
        # assigns new offsets to all sections afterwards.
        encoded_before = present.encoded_before
        offsets = [] if encoded_before is None else encoded_before.offsets

        addresses = _addresses(present.local_leaves)
        return _EncodedSection(
            # What was encoded. In the next step, `_reuse_encoded` compares the section with this.
            skeleton=present.skeleton,
            leaf_kinds=kinds,
            leaves=present.leaves,
            local_leaves=present.local_leaves,  # plain tensors: of a DTensor, this rank's shard
            addresses=addresses,
            ties=_find_ties(addresses),  # which leaves share their memory
            is_partial=section.is_partial,  # True if this rank has only some of the entries
            has_shards=any(kind.is_sharded for kind in kinds),
            has_numpy_values=any(kind.is_numpy_value for kind in kinds),
            # The result: the tree, what this rank copies, from which tensors, and to where.
            tree=tree_text,
            placements=encoder.placements,
            sources=_sources(encoder.placements, present.local_leaves),
            offsets=offsets,
        )

    def _divide(self, divided: Sequence[_PresentSection]) -> dict[SectionKey, list[Rows | None]]:
        """Divides the state that is equal on all ranks of this machine between them, by rows.

        The bytes of all leaves are numbered from first to last, and each rank gets an equal range
        of them. Every rank computes this for itself, from the same sizes. Example: 2 ranks, and two
        tensors of 30 and 10 rows, with 10 bytes in each row:

            rank   its range of bytes   rows of the first tensor   rows of the second tensor
            0      0 to 200             0 to 20                    none
            1      200 to 400           20 to 30                   0 to 10

        Args:
            divided: the sections with this state.

        Returns:
            For each section, the rows that this rank copies of each leaf, such as (20, 30); None
            for a leaf that is not divided, whose bytes are not numbered. Empty if there is one rank
            on the machine, which copies everything.
        """
        if self._local_size == 1:
            return {}

        total_bytes = sum(present.num_divided_bytes for present in divided)
        range_begin = total_bytes * self._local_rank // self._local_size
        range_end = total_bytes * (self._local_rank + 1) // self._local_size

        rows_of_section: dict[SectionKey, list[Rows | None]] = {}
        bytes_before_leaf = 0
        for present in divided:
            rows_of_leaf: list[Rows | None] = []
            for leaf, kind in zip(present.local_leaves, present.leaf_kinds, strict=True):
                if not kind.can_be_divided:
                    rows_of_leaf.append(None)
                    continue

                # For rank 1 and the second tensor: from 200 - 300, before the tensor, to 400 - 300,
                # its end. Both are rounded down to a whole row, and clamped to the tensor. Where
                # one rank ends, the next one begins, so each row is copied by exactly one rank.
                first_row = _clamped_row_at(leaf, range_begin - bytes_before_leaf)
                end_row = _clamped_row_at(leaf, range_end - bytes_before_leaf)
                rows_of_leaf.append((first_row, end_row))
                bytes_before_leaf += leaf.nbytes

            rows_of_section[present.section.key] = rows_of_leaf
        return rows_of_section


class _PresentSection:
    """A section in the present step, split into its skeleton and its leaves.

    Args:
        section: the section.
        encoded_before: the result of encoding it in an earlier step; None if there is none.
    """

    def __init__(self, section: Section, encoded_before: _EncodedSection | None) -> None:
        self.section = section
        self.encoded_before = encoded_before
        self.leaves: list[Any] = []
        self.skeleton = _skeleton(section.value, self.leaves)
        self.local_leaves: list[Tensor] = []
        """The leaves as plain tensors. For a DTensor, this is the shard of this rank."""
        self.leaf_kinds: list[LeafKind] = []
        self.is_unchanged = encoded_before is not None and self._has_same_leaves_as(encoded_before)
        if encoded_before is not None and self.is_unchanged:
            self.local_leaves = encoded_before.local_leaves
            self.leaf_kinds = encoded_before.leaf_kinds
        else:
            self._convert_leaves()

    def _has_same_leaves_as(self, encoded: _EncodedSection) -> bool:
        """Returns True if the section has the same tensors as before, in the same memory.

        Then nothing needs to be done for it but to copy the tensors again.

        Args:
            encoded: the section as it was encoded in an earlier step.
        """
        # A numpy value was copied to a tensor in the earlier step. If the value has changed since,
        # that tensor still has the old one.
        if encoded.has_numpy_values:
            return False

        if self.skeleton != encoded.skeleton:
            return False

        # Equal skeletons have equally many leaves.
        for leaf, leaf_before in zip(self.leaves, encoded.leaves, strict=True):
            if leaf is not leaf_before:
                return False

        # The same tensor may have got other memory, for example by `parameter.data = ...`. A
        # DTensor has no memory of its own: its local part, the shard of this rank, has it.
        tensors_with_memory = self.leaves
        if encoded.has_shards:
            tensors_with_memory = [_local(leaf) for leaf in self.leaves]
        return _addresses(tensors_with_memory) == encoded.addresses

    def _convert_leaves(self) -> None:
        """Fills `local_leaves` and `leaf_kinds`: one plain tensor and one kind for each leaf."""
        for leaf in self.leaves:
            plain_tensor = _local(leaf)  # of a numpy value, a tensor with its numbers
            is_numpy_value = isinstance(leaf, np.ndarray | np.generic)
            device_of_tensor = None if is_numpy_value else plain_tensor.device
            shape = tuple(plain_tensor.shape)
            kind = LeafKind(plain_tensor.dtype, shape, device_of_tensor, is_sharded(leaf))
            self.local_leaves.append(plain_tensor)
            self.leaf_kinds.append(kind)

    @property
    def num_divided_bytes(self) -> int:
        """The number of bytes that the ranks of the machine divide between them."""
        num_bytes = 0
        for leaf, kind in zip(self.local_leaves, self.leaf_kinds, strict=True):
            if kind.can_be_divided:
                num_bytes += leaf.nbytes
        return num_bytes


@dataclass
class _LeafToStore:
    """The leaf that a `_LayoutEncoder` is encoding."""

    index: int
    """The index of the leaf in its section."""
    rows: Rows | None
    """The rows that this rank stores; None if the leaf is not divided."""
    box: Box | None = None
    """The region that this rank stores; None if it stores nothing of the leaf."""


class _LayoutEncoder(Encoder):
    """Encodes a section without copying its tensors: it only notes what this rank copies.

    Args:
        section: the section to encode. Its leaves are met in the same order as in `_skeleton`.
        is_main: True on the first rank of the machine, which keeps everything that is not divided.
        rows_of_leaf: the rows of each leaf that this rank copies; None if the section is not
            divided.
    """

    def __init__(
        self, section: Section, *, is_main: bool, rows_of_leaf: list[Rows | None] | None
    ) -> None:
        # For errors: a module has no path and is named by its file, all others by their path.
        name = section.file if not section.path else ""
        super().__init__(name, _unchanged, is_main=is_main)
        self.placements: list[Placement] = []
        self._keeps_undivided_leaves = is_main or section.is_partial
        """True on the first rank of the machine, and if each rank has other entries."""
        self._rows_of_leaf = rows_of_leaf
        self._num_leaves = 0
        """How many leaves were met so far, the present one included."""
        self._leaf = _LeafToStore(index=-1, rows=None)
        """The present leaf."""
        self._names: set[str] = set()

    def _begin_leaf(self) -> None:
        """Makes the next leaf the present one."""
        index = self._num_leaves
        rows = None if self._rows_of_leaf is None else self._rows_of_leaf[index]
        self._leaf = _LeafToStore(index, rows)
        self._num_leaves += 1

    def _encode_tensor(self, value: Any, path: KeyPath) -> Tree:
        self._begin_leaf()
        return super()._encode_tensor(value, path)

    def _encode_numpy(self, value: Any, path: KeyPath) -> Tree:
        self._begin_leaf()
        if self._keeps_undivided_leaves:
            self._leaf.box = Box(offsets=(0,) * np.ndim(value), sizes=np.shape(value))
        return super()._encode_numpy(value, path)

    def _box_to_store(self, value: Any) -> Box | None:
        """Returns the region of a tensor that this rank stores, and notes it for `_record`."""
        self._leaf.box = self._find_box(value, self._leaf.rows)
        return self._leaf.box

    def _find_box(self, value: Any, rows: Rows | None) -> Box | None:
        """Returns the region of a tensor that this rank stores, or None if it stores nothing.

        A DTensor: this rank's shard. A tensor that the ranks of the machine divide between them:
        some rows. Any other tensor: all of it on the first rank of the machine, and nothing on the
        other ranks, unless these have other entries of the section.

        Args:
            value: the tensor.
            rows: the rows that this rank stores; None if the tensor is not divided into rows.
        """
        if is_sharded(value):
            return super()._box_to_store(value)  # the shard
        if rows is not None:
            return _box_of_rows(rows, value.shape)
        if self._keeps_undivided_leaves:
            return super()._box_to_store(value)  # the whole tensor
        return None

    def _unused_name(self, path: KeyPath) -> str:
        """Returns a name for a tensor that no other tensor has: its path, and a number if needed.

        `("a", "b") -> "a.b"`, or `"a.b#2"` if "a.b" is taken. Every rank gives a name to every
        tensor, even if it does not store the tensor, so that all ranks choose the same names.
        """
        joined_path = ".".join(str(part) for part in path) or "value"
        name = joined_path
        number = 1
        while name in self._names:
            number += 1
            name = f"{joined_path}#{number}"
        self._names.add(name)
        return name

    def _record(self, name: str, tensor: Tensor) -> None:
        """Adds a placement: it says which region of the present leaf this rank copies in each step.

        The method of `Encoder` that this one overrides keeps the tensor itself.

        Args:
            name: name of the tensor in the area.
            tensor: the leaf as a tensor. Only its dtype is used.
        """
        leaf = self._leaf
        # The region is None for a numpy value, unless this is the first rank of the machine, which
        # copies it (`_encode_numpy`). For a tensor without a region, this method is not called.
        if leaf.box is None:
            return

        dtype, shape = _dtype_and_shape_in_area(tensor.dtype, leaf.box)
        placement = Placement(leaf.index, leaf.rows, name, leaf.box, dtype, shape)
        self.placements.append(placement)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _box_of_rows(rows: Rows, shape: Sequence[int]) -> Box:
    """Returns some rows of a tensor as a region: rows (2, 5) of shape (8, 4) are at (2, 0)."""
    first_row, end_row = rows
    other_sizes = tuple(shape[1:])
    offsets = (first_row, *(0 for _ in other_sizes))
    return Box(offsets, (end_row - first_row, *other_sizes))


def _dtype_and_shape_in_area(dtype: torch.dtype, box: Box) -> tuple[torch.dtype, Shape]:
    """Returns how a region of a tensor is stored in the area: as its bytes if the dtype is unusual.

    6 elements in complex64, which have 8 bytes each, are stored as 48 elements in uint8.
    """
    shape: Shape = tuple(box.sizes)
    if dtype in DTYPES_STORED_AS_BYTES:
        return torch.uint8, (math.prod(shape) * dtype.itemsize,)
    return dtype, shape


def _skeleton(value: Any, leaves: list[Any]) -> Any:
    """Returns a value with its tensors and numpy values removed, and appends these to `leaves`.

    Example: `{"lr": 0.1, "w": tensor} -> (dict, ["lr", "w"], [(float, 0.1), _LEAF])`.

    Two skeletons are equal if the values differ only in their leaves. Dictionaries must also have
    the same order, since the leaves are in that order.

    In Python, 1, 1.0 and True are equal. So a value stands beside its type: 1.0 becomes `(float,
    1.0)`, and True `(bool, True)`. Only the frequent int, str and None stay as they are.
    """
    kind = type(value)  # for True it is bool, not int
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

        # Some dtypes are stored as bytes. Then the dtype in the area is uint8.
        if source.dtype != placement.dtype:
            source = to_bytes(source)
        sources.append(source)
    return sources


def _local(leaf: Any) -> Tensor:
    """Returns a leaf as a plain tensor.

    A numpy value is copied. A tensor is returned itself, and a DTensor as this rank's shard of it,
    which shares its memory.
    """
    if isinstance(leaf, np.ndarray | np.generic):
        return torch.from_numpy(np.array(leaf))

    tensor: Tensor = leaf.to_local() if is_sharded(leaf) else leaf
    return tensor


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the memory address of each tensor."""
    return [tensor.data_ptr() for tensor in tensors]


def _find_ties(addresses: Sequence[int]) -> list[int]:
    """Finds out which tensors are tied, that is, share their memory.

    Args:
        addresses: the memory address of each tensor.

    Returns:
        For each tensor, the index of the first one with the same address.

    Example: `[700, 800, 700] -> [0, 1, 0]`.
    """
    first_index: dict[int, int] = {}
    return [first_index.setdefault(address, index) for index, address in enumerate(addresses)]


def _clamped_row_at(tensor: Tensor, position: int) -> int:
    """Returns the row that holds the byte at a position, counted from the tensor's first byte.

    The position may lie outside the tensor. 4 rows of 10 bytes: 25 -> 2; -100, which is before the
    tensor, -> 0; 100, which is after its end, -> 4, the number of rows.
    """
    num_rows = tensor.shape[0]
    if tensor.nbytes == 0 or position >= tensor.nbytes:
        return num_rows
    return max(0, position) * num_rows // tensor.nbytes


def _text_of(section: Section, encoded: _EncodedSection) -> str:
    """Returns the description of a section in the header, as JSON.

    For example:

        {"file": "training", "path": ["optimizer", "state"], "partial": false,
         "tensors": {"optimizer.state.0.exp_avg": ["F32", [2, 5], 64, [2, 0], [2, 5]]},
         "tree": {...}}

    Here the rows 2 and 3 of a tensor with 5 columns are stored. There is no "tree" if another rank
    of the machine keeps it.
    """
    tensors: dict[str, Any] = {}
    for placement, offset_in_area in zip(encoded.placements, encoded.offsets, strict=True):
        tensors[placement.name] = [
            CODE_OF_DTYPE[placement.dtype],  # "F32"
            placement.shape,  # [2, 5]: of the stored rows
            offset_in_area,  # 64: their first byte
            placement.box.offsets,  # [2, 0]: where they begin in the whole tensor
            placement.box.sizes,  # [2, 5]: how far they extend in it
        ]
    description = {
        "file": section.file,
        "path": section.path,
        "partial": section.is_partial,
        "tensors": tensors,
    }
    text = json.dumps(description)
    if encoded.tree is None:
        return text
    # The tree is JSON text already, and may be long, so it is inserted as text.
    return _with_json_entry(text, "tree", encoded.tree)


def _with_json_entry(object_text: str, key: str, value_text: str) -> str:
    """Adds an entry to a JSON object, both as text: `{"a": 1}` and `[2]` -> `{"a": 1, "b": [2]}`.

    The object must have an entry already.
    """
    without_brace = object_text.removesuffix("}")
    return without_brace + f', "{key}": {value_text}' + "}"


def sections_of(
    states: Mapping[str, Any],
    module_names: Sequence[str],
    optimizer_names: Sequence[str],
    partial_names: Sequence[str],
) -> list[Section]:
    """Cuts the states of a training into sections.

    There are three kinds of sections:

    - *partial*: each rank has only some of its entries, and keeps these. Modules and entries
      "state" are partial if they are in `partial_names`.
    - *divided*: it is equal on all ranks of a machine, and each of them keeps a share. Other
      modules and entries "state" of optimizers are divided.
    - *small*: everything else. The first rank of each machine keeps all of it.

    Example: a model and an SGD optimizer, with no `partial_names`. The file of all objects other
    than modules is "training" (`layout.TRAINING`).

        file         path                           kind
        "model"      ()                             divided
        "training"   ("optimizer", "state")         divided
        "training"   ("optimizer", "param_groups")  small

    Args:
        states: by name; in the state of a module, tensors that other ranks have are None.
        module_names: which of them are states of modules.
        optimizer_names: which of them are states of optimizers.
        partial_names: the names of states of which this rank has only some entries.
    """
    sections = []
    for name, state in states.items():
        is_partial = name in partial_names
        may_have_large_entry = name in optimizer_names or is_partial

        if name in module_names:
            sections.append(_section_of_module(name, state, is_partial=is_partial))
        elif may_have_large_entry and _can_be_split_by_entry(state):
            sections += _sections_of_entries(name, state, is_partial=is_partial)
        else:
            sections.append(Section(layout.TRAINING, path=(name,), value=state))  # small
    return sections


def _section_of_module(name: str, state: Mapping[str, Any], *, is_partial: bool) -> Section:
    """Returns the section of a module, which has a file of its own."""
    return Section(
        file=name, path=(), value=state, is_partial=is_partial, is_divided=not is_partial
    )


def _sections_of_entries(
    name: str, state: Mapping[str, Any], *, is_partial: bool
) -> Iterator[Section]:
    """Yields a section for each entry of a state, such as "state" and "param_groups".

    Only the entry "state" has tensors: it is partial, or else divided, so that each rank of a
    machine copies a share of it. The other entries are small, and equal on all ranks, so the first
    rank of each machine copies them.

    Args:
        name: the name of the object, for example of an optimizer.
        state: its state.
        is_partial: True if this rank has only some of the entries in `state["state"]`.
    """
    for key, value in state.items():
        has_tensors = key == "state"
        yield Section(
            file=layout.TRAINING,
            path=(name, key),
            value=value,
            is_partial=has_tensors and is_partial,
            is_divided=has_tensors and not is_partial,
        )


def _can_be_split_by_entry(state: Any) -> bool:
    """Returns True if each entry of a state can be a section of its own.

    It must be a dictionary with an entry `state`, and be encoded as a plain JSON object. The state
    of a user's own optimizer may be anything else.
    """
    if type(state) is not dict or "state" not in state:
        return False
    return all(type(key) is str and not key.startswith("$") for key in state)
