"""What a rank keeps of a step: which tensors, where in its area, and the text that describes them.

The states that a checkpoint would save are cut into *sections*: one for each object, and one for
each entry of an optimizer's state, which has the tensors under `state`. A section is encoded as a
checkpoint on disk is (`encoding`), so that the same code reads it.

To encode takes milliseconds for hundreds of tensors. So the outcome is kept with the section's
*skeleton*: its value with the tensors, its *leaves*, taken out. As long as a section has the same
skeleton and leaves of the same shapes, a step only copies the leaves.

What is equal on all ranks of a machine is divided between them: each copies about as many bytes, a
range of the tensors in their order, which begins and ends with a row (of the first dimension).
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
"""The first row of a tensor that a rank copies, and the first that it does not."""
_LEAF = "$leaf"
"""Stands for a leaf in a skeleton."""


class Section(NamedTuple):
    """A part of the state that is encoded by itself."""

    file: str
    """The name of a module, or `layout.TRAINING`, as the files of a checkpoint are called."""
    path: KeyPath
    """The keys that lead to it in the state of that file: ("optimizer", "state"). Empty for a
    module."""
    value: Any
    is_partial: bool
    """True if this rank has only some of the entries, and keeps all that it has."""
    is_divided: bool
    """True if the tensors are equal on all ranks of a machine, which copy a part each."""

    @property
    def key(self) -> tuple[str, KeyPath]:
        """Identifies the section."""
        return self.file, self.path


class LeafKind(NamedTuple):
    """What a leaf has to have in common with its predecessor to be copied to its place."""

    dtype: Any
    shape: Shape
    device: Any
    is_sharded: bool


class Placement(NamedTuple):
    """A leaf, or some rows of it, that this rank copies."""

    leaf: int
    """The number of the leaf in its section."""
    rows: Rows | None
    """None: all of them."""
    name: str
    box: Box | None
    """The region of the whole tensor; None: the whole tensor."""
    dtype: torch.dtype
    """The dtype in the area, where exotic ones are stored as bytes."""
    shape: Shape

    @property
    def num_bytes(self) -> int:
        """How much is copied."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class _Known:
    """What is known of a section since it was last encoded."""

    skeleton: Any
    kinds: list[LeafKind]
    placements: list[Placement]
    tree: str | None
    """The tree as JSON; None if another rank of the machine has it."""
    leaves: list[Any]
    locals: list[Tensor]
    """See `_Taken`."""
    is_partial: bool
    """See `Section`."""
    has_shards: bool
    """True if some leaves are DTensors."""
    has_arrays: bool
    """True if some leaves are values of numpy, which are copied from step to step."""
    addresses: list[int]
    """The memory addresses of the leaves."""
    pattern: list[int]
    """Which of them are tied, see `_pattern`."""
    sources: list[Tensor]
    """What is copied, for each placement."""
    offsets: list[int] = field(default_factory=list)
    """The offset of each placement in the values of the area."""
    text: str = ""
    """The description of the section in the header; empty until the offsets are known."""


class KeptLayout:
    """What a rank keeps, and where.

    Args:
        local_rank: of this process.
        local_size: how many processes of the machine divide what is equal on all of them.
    """

    def __init__(self, local_rank: int, local_size: int) -> None:
        self._local_rank = local_rank
        self._local_size = local_size
        self._known: dict[tuple[str, KeyPath], _Known] = {}
        self._divided_kinds: list[list[LeafKind]] = []
        """The leaves of all divided sections, when they were last divided."""
        self._rows: dict[tuple[str, KeyPath], list[Rows | None]] = {}
        """What this rank copies of the leaves of each divided section."""
        self._to_divide_anew: set[tuple[str, KeyPath]] = set()
        """The sections of which this rank copies other rows from now on."""
        self.version = 0
        """Counts the changes of what is where."""
        self.num_bytes = 0
        """How much memory the values take."""
        self.sources: list[Tensor] = []
        """What is copied."""

    @property
    def header_sections(self) -> str:
        """The descriptions of all sections, as a list in JSON."""
        return "[" + ", ".join(known.text for known in self._known.values()) + "]"

    @property
    def has_own_parts(self) -> bool:
        """True if there are shards, stages or the like, of which each rank keeps what it has.

        The random states do not count. A machine may be without those of other machines.
        """
        for (file, _), known in self._known.items():
            if known.has_shards or (known.is_partial and file != RANDOM):
                return True
        return False

    def leaves(self) -> list[Any]:
        """Returns the tensor of the state that each of `sources` is, or is a part of."""
        leaves = []
        for known in self._known.values():
            leaves += [known.leaves[placement.leaf] for placement in known.placements]
        return leaves

    def places(self, area: Area) -> list[Tensor]:
        """Returns where in an area each of `sources` is to be copied."""
        places = []
        for known in self._known.values():
            for placement, offset in zip(known.placements, known.offsets, strict=True):
                place = area.view(area.values_at + offset, placement.dtype, placement.shape)
                places.append(place)
        return places

    @torch.no_grad()
    def update(self, sections: Sequence[Section]) -> None:
        """Finds out what is copied now, and encodes what has changed since the last call.

        Raises:
            CheckpointError: something in the state cannot be stored.
        """
        taken = [_Taken(section, self._known.get(section.key)) for section in sections]
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
            self._place_all()
        self.sources = []
        for each in taken:
            section_known = known[each.section.key]
            if not section_known.text:
                section_known.text = _text_of(each.section, section_known)
            self.sources += section_known.sources

    def _placements(self) -> list[list[Placement]]:
        """Returns the placements of each section."""
        return [known.placements for known in self._known.values()]

    def _place_all(self) -> None:
        """Gives each placement its offset."""
        self.version += 1
        end = 0
        for known in self._known.values():
            known.offsets = []
            known.text = ""
            for placement in known.placements:
                known.offsets.append(end)
                end = round_up(end + placement.num_bytes, ALIGNMENT)
        self.num_bytes = end

    def _update_section(self, taken: _Taken) -> _Known:
        """Returns what is known of a section, encoded anew if it has changed."""
        known = taken.known
        has_other_rows = taken.section.key in self._to_divide_anew
        if known is None or has_other_rows:
            return self._encode(taken)
        if taken.is_unchanged:
            return known
        if known.skeleton != taken.skeleton or known.kinds != taken.kinds:
            return self._encode(taken)
        addresses = _addresses(taken.locals)
        if _pattern(addresses) != known.pattern:  # other tensors than before are tied
            return self._encode(taken)
        known.leaves = taken.leaves
        known.locals = taken.locals
        known.addresses = addresses
        known.sources = _sources(known.placements, taken.locals)
        return known

    def _encode(self, taken: _Taken) -> _Known:
        """Returns a section, encoded."""
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
        if taken.known is not None:
            known.offsets = taken.known.offsets  # if placements have changed, they are given anew
        return known

    def _divide(self, taken: Sequence[_Taken]) -> None:
        """Divides the leaves of the divided sections between the ranks of this machine.

        Every rank computes the same bounds: its range of the bytes of all these leaves.
        """
        self._rows = {}
        divided = [each for each in taken if each.section.is_divided]
        self._to_divide_anew = {each.section.key for each in divided}
        if self._local_size == 1:
            return
        total = sum(each.num_divided_bytes for each in divided)
        begin = total * self._local_rank // self._local_size
        end = total * (self._local_rank + 1) // self._local_size
        position = 0
        for each in divided:
            rows_of_leaf: list[Rows | None] = []
            for leaf, kind in zip(each.locals, each.kinds, strict=True):
                if kind.is_sharded or leaf.dim() == 0:
                    rows_of_leaf.append(None)
                    continue
                first = _row_at(leaf, begin - position)
                last = _row_at(leaf, end - position)
                rows_of_leaf.append((first, last))
                position += leaf.nbytes
            self._rows[each.section.key] = rows_of_leaf


class _Taken:
    """A section as it is in this step.

    Args:
        section: the section.
        known: what is known of it; None: it was not encoded yet.
    """

    def __init__(self, section: Section, known: _Known | None) -> None:
        self.section = section
        self.known = known
        self.leaves: list[Any] = []
        self.skeleton = _skeleton(section.value, self.leaves)
        self.locals: list[Tensor] = []
        """The leaves as plain tensors; of a DTensor this rank's shard."""
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
        if not all(map(_is, self.leaves, known.leaves)):
            return False
        # A tensor may have been given other memory, as by `parameter.data = ...`.
        present = self.leaves
        if known.has_shards:
            present = [_local(leaf) for leaf in self.leaves]
        return _addresses(present) == known.addresses

    def _read_leaves(self) -> None:
        """Finds out what the leaves are."""
        for leaf in self.leaves:
            local = _local(leaf)
            is_array = isinstance(leaf, np.ndarray | np.generic)
            device = None if is_array else local.device
            kind = LeafKind(local.dtype, tuple(local.shape), device, is_sharded(leaf))
            self.locals.append(local)
            self.kinds.append(kind)

    @property
    def num_divided_bytes(self) -> int:
        """How many bytes of the leaves are divided between the ranks of the machine."""
        num_bytes = 0
        for leaf, kind in zip(self.locals, self.kinds, strict=True):
            if not kind.is_sharded and leaf.dim() > 0:
                num_bytes += leaf.nbytes
        return num_bytes


class _LayoutEncoder(Encoder):
    """Encodes a section, and notes what this rank copies instead of copying it.

    Args:
        section: whose leaves it meets in the order of `_skeleton`.
        is_main: True on the first rank of the machine, which keeps what is not divided.
        rows: what this rank copies of each leaf; None: the section is not divided.
    """

    def __init__(self, section: Section, *, is_main: bool, rows: list[Rows | None] | None) -> None:
        super().__init__(section.file if not section.path else "", _unchanged, is_main)
        self.placements: list[Placement] = []
        self._keeps_whole = is_main or section.is_partial
        self._rows = rows
        self._num_leaves = 0
        self._names: set[str] = set()
        self._box: Box | None = None
        """The region of the present leaf that is stored."""

    def _encode_tensor(self, value: Any, path: KeyPath) -> Tree:
        self._num_leaves += 1
        return super()._encode_tensor(value, path)

    def _encode_numpy(self, value: Any, path: KeyPath) -> Tree:
        self._num_leaves += 1
        self._box = Box((0,) * np.ndim(value), np.shape(value)) if self._keeps_whole else None
        return super()._encode_numpy(value, path)

    def _box_to_store(self, value: Any) -> Box | None:
        self._box = super()._box_to_store(value)
        if is_sharded(value):
            return self._box
        rows = None if self._rows is None else self._rows[self._num_leaves - 1]
        if rows is not None:
            first, last = rows
            rest = tuple(value.shape[1:])
            self._box = Box((first, *(0 for _ in rest)), (last - first, *rest))
        elif not self._keeps_whole:
            self._box = None
        return self._box

    def _free_name(self, path: KeyPath) -> str:
        """Returns the path joined by dots, with a number if another tensor has that name.

        A name is taken even if another rank stores the tensor: so all ranks give the same names.
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
        """Notes what of the present leaf is copied."""
        box = self._box
        if box is None:  # a numpy array that the first rank of the machine keeps
            return
        rows = None
        if self._rows is not None and self._rows[self._num_leaves - 1] is not None:
            rows = self._rows[self._num_leaves - 1]
        dtype = tensor.dtype
        shape: Shape = tuple(box.sizes)
        if dtype in DTYPES_STORED_AS_BYTES:
            shape = (math.prod(shape) * dtype.itemsize,)
            dtype = torch.uint8
        self.placements.append(Placement(self._num_leaves - 1, rows, name, box, dtype, shape))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _is(one: object, other: object) -> bool:
    return one is other


def _skeleton(value: Any, leaves: list[Any]) -> Any:
    """Returns a value with its tensors and values of numpy taken out, and adds these to `leaves`.

    Two skeletons are equal if the values have the same form, and are the same except for these. The
    order of dictionaries counts, since the leaves are in that order.
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
    """Returns what is copied for each placement: leaves, or some rows of them."""
    sources = []
    for placement in placements:
        source = leaves[placement.leaf].detach()
        if placement.rows is not None:
            first, last = placement.rows
            source = source[first:last]
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
    """Returns where tensors are in memory."""
    return [tensor.data_ptr() for tensor in tensors]


def _pattern(addresses: Sequence[int]) -> list[int]:
    """Returns, for each address, the place of the first that is equal: which tensors are tied."""
    first_place: dict[int, int] = {}
    return [first_place.setdefault(address, place) for place, address in enumerate(addresses)]


def _row_at(tensor: Tensor, position: int) -> int:
    """Returns the row of a tensor at a position in bytes from its beginning, within its bounds."""
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
    """Returns True for a dictionary with `state`, whose tree is a plain JSON object."""
    if type(state) is not dict or "state" not in state:
        return False
    return all(type(key) is str and not key.startswith("$") for key in state)
