"""Finds the newest step that the ranks of a run have kept in memory, and reads it.

A *part* is what one rank has kept of a step, in one of its memory areas. All parts with the same
attempt and serial number form a *kept step*. It is complete if the part of every rank is there,
on its own machine or as a copy on another one (`partner_copies`). If the ranks of each machine
together have the whole state (there are no shards, for example), the parts of one machine are
enough.

The ranks of a later attempt, which may be fewer, tell each other what lies in their areas, and all
choose the same step. They read it like a checkpoint on disk: values are only read when they are
loaded, and of a shard only what a rank needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import DTYPE_OF_CODE, decode
from lockstep.checkpoint.formats.safetensors import TensorInFile
from lockstep.checkpoint.lazy_tensor import Shape
from lockstep.checkpoint.memory_area import Area
from lockstep.checkpoint.merging import merge_entries
from lockstep.checkpoint.sharding import copy_to_memory
from lockstep.checkpoint.shards import Shard, TensorInShards, join_shards
from lockstep.errors import CheckpointError
from lockstep.wording import format_ranks, group_by_key

RANDOM = "random"
"""The name of the section with the random state of a rank."""


@dataclass(frozen=True)
class PartReport:
    """Describes a part in one of the areas to the other ranks. All values can be sent as JSON."""

    path: str
    """The path of the area."""
    attempt: int
    serial: int
    step: int
    writer_rank: int
    """The rank that wrote the part."""
    world_size: int
    folders: list[str]
    """The paths of the checkpoint folder on the machines of the attempt that wrote the part."""
    writer_machine: int
    """The number that the writer's machine had in that attempt."""
    num_ranks_on_writer_machine: int
    """How many ranks that machine had in that attempt."""
    machine_has_whole_state: bool
    """True if the ranks of each machine together have kept the whole state."""
    strategy: str
    """The strategy of the rank that wrote the part."""
    epoch: int
    num_bytes: int
    """How many bytes of the area are in use."""
    holder_rank: int
    """The rank that reports the part, and has access to the area."""
    holder_machine: int
    """The number of the machine on which the area is now."""
    announcement_checksum: str
    """A checksum of what the user was told about the memory that kept steps take. A later attempt
    tells the user only what is new."""


@dataclass(frozen=True)
class KeptStep:
    """A step in memory that is complete, so that it can be resumed."""

    attempt: int
    serial: int
    step: int
    epoch: int
    parts: tuple[PartReport, ...]
    """All parts that exist. A part may occur several times, once for each copy of it."""
    complete_sets: tuple[tuple[int, ...], ...]
    """Sets of ranks. The parts of any one of these sets make up the whole state."""

    @property
    def strategy(self) -> str:
        """The strategy of the ranks that wrote the parts."""
        return self.parts[0].strategy

    @property
    def world_size(self) -> int:
        """The number of ranks in the attempt that wrote the parts."""
        return self.parts[0].world_size

    @property
    def announcement_checksum(self) -> str:
        """See `PartReport`."""
        return self.parts[0].announcement_checksum

    def paths_on(self, machine: int) -> set[str]:
        """Returns the paths of the areas on a machine that hold a part of this step."""
        return {part.path for part in self.parts if part.holder_machine == machine}

    def copies_of(self, rank: int) -> list[PartReport]:
        """Returns all copies of the part that a rank has written."""
        return [part for part in self.parts if part.writer_rank == rank]


def report_parts(
    areas: Sequence[Area], *, holder_rank: int, holder_machine: int
) -> list[dict[str, Any]]:
    """Describes the parts in the given areas, for the other ranks.

    A part was written by a rank of an earlier attempt, maybe on another machine. The rank that
    finds it in an area now is its holder. Areas without a seal, or with damaged contents, are left
    out.

    Args:
        areas: memory areas on this machine.
        holder_rank: the rank of this process.
        holder_machine: the number that this machine has now.

    Returns:
        A `PartReport` for each part, as a dictionary.
    """
    reports = []
    for area in areas:
        # The seal says which step the area holds, and at which byte its contents end.
        seal = area.seal
        if seal is None:
            continue

        # The header says which rank of which run wrote the part.
        header = area.read_header(seal)
        if header is None or not area.is_sound(seal):
            continue

        facts = json.loads(header)["facts"]
        report = PartReport(
            path=area.path,
            attempt=seal.attempt,
            serial=seal.serial,
            step=seal.step,
            writer_rank=facts["rank"],
            world_size=facts["world_size"],
            folders=facts["folders"],
            writer_machine=facts["machine"],
            num_ranks_on_writer_machine=facts["ranks_on_machine"],
            machine_has_whole_state=facts["machine_has_whole_state"],
            strategy=facts["strategy"],
            epoch=facts["epoch"],
            num_bytes=seal.end,
            holder_rank=holder_rank,
            holder_machine=holder_machine,
            announcement_checksum=facts["announcement_checksum"],
        )
        reports.append(asdict(report))
    return reports


def choose_step(reports: Sequence[PartReport], folders: Collection[str]) -> KeptStep | None:
    """Returns the newest complete step of a checkpoint, or None if there is no complete step.

    Args:
        reports: the parts in the areas of all ranks.
        folders: the paths of the checkpoint folder on the machines of the run, the same on all
            ranks. A part that has none of these paths belongs to another checkpoint, and is
            ignored.
    """
    newest: KeptStep | None = None
    for (attempt, serial), parts in _parts_of_steps(reports, folders).items():
        # Sets of ranks that have kept the whole state, such as ((0, 1), (2, 3)) for two machines
        # that each have all of it. The step is incomplete if there is none.
        complete_sets = _complete_sets(parts)
        if not complete_sets:
            continue

        step = parts[0].step  # the same for all parts
        epoch = parts[0].epoch
        kept = KeptStep(attempt, serial, step, epoch, tuple(parts), complete_sets)

        # The same step may have been kept twice: before and after the code at the end of an epoch.
        # Then the one with the higher serial number is the later one. (An attempt that resumes a
        # kept step goes on with its serial numbers.)
        if newest is None or (kept.step, kept.serial) > (newest.step, newest.serial):
            newest = kept
    return newest


def describe_incomplete(reports: Sequence[PartReport], folders: Collection[str]) -> str:
    """Explains why `choose_step` has found no step of the run in memory that can be resumed.

    Args:
        reports: the parts in the areas of all ranks.
        folders: the paths of the checkpoint folder, see `choose_step`.

    Returns:
        A clause without a full stop.
    """
    parts_of_step = _parts_of_steps(reports, folders)
    if not parts_of_step:
        return "no step of this run is in memory"

    # All parts of a step have the same step, serial number and number of ranks.
    parts_of_newest = max(
        parts_of_step.values(), key=lambda parts: (parts[0].step, parts[0].serial)
    )
    newest = parts_of_newest[0]
    present_ranks = {part.writer_rank for part in parts_of_newest}
    missing = set(range(newest.world_size)) - present_ranks
    return (
        f"step {newest.step} in memory is incomplete: what {format_ranks(missing)} kept is missing"
    )


def _parts_of_steps(
    reports: Sequence[PartReport], folders: Collection[str]
) -> dict[tuple[int, int], list[PartReport]]:
    """Groups parts by the step that they belong to; leaves out those of other checkpoints.

    Args:
        reports: the parts in the areas of all ranks.
        folders: the paths of the checkpoint folder, see `choose_step`.

    Returns:
        The parts of each step, by the step's attempt and serial number.
    """
    parts_of_step: dict[tuple[int, int], list[PartReport]] = {}
    for report in reports:
        # The folder may have another path on each machine. One path in common is enough.
        is_of_this_checkpoint = not set(report.folders).isdisjoint(folders)
        if is_of_this_checkpoint:
            parts_of_step.setdefault((report.attempt, report.serial), []).append(report)
    return parts_of_step


def _complete_sets(parts: Sequence[PartReport]) -> tuple[tuple[int, ...], ...]:
    """Finds the sets of ranks whose parts make up the whole state of a step.

    Args:
        parts: the parts of the step that exist.

    Returns:
        If each machine has the whole state: a set for each machine of which all parts are there,
        such as `((0, 1), (2, 3))`. Otherwise the set of all ranks, `((0, 1, 2, 3),)`, if all parts
        are there. Without any such set, `()`.
    """
    each_machine_has_whole_state = all(part.machine_has_whole_state for part in parts)
    if not each_machine_has_whole_state:
        all_ranks = range(parts[0].world_size)  # the same for all parts of a step
        present_ranks = {part.writer_rank for part in parts}
        return (tuple(all_ranks),) if present_ranks == set(all_ranks) else ()

    parts_of_machine = group_by_key((part.writer_machine, part) for part in parts)
    sets = []
    for _, parts_there in sorted(parts_of_machine.items()):
        ranks = {part.writer_rank for part in parts_there}
        has_parts_of_all_its_ranks = len(ranks) == parts_there[0].num_ranks_on_writer_machine
        if has_parts_of_all_its_ranks:
            sets.append(tuple(sorted(ranks)))
    return tuple(sets)


def read_random_state(path: str) -> dict[str, Any]:
    """Reads the random state that a rank has kept.

    Args:
        path: the path of the area that the rank has written.

    Raises:
        CheckpointError: the area has been overwritten.
    """
    part = _Part(path)
    states = _assemble_states([part], RANDOM, only_local_shards=False)
    in_memory: dict[str, Any] = copy_to_memory(states["state"])
    return in_memory


def read_step(
    paths: Sequence[str],
    module_names: Sequence[str],
    random_states: Sequence[Any],
    *,
    only_local_shards: bool,
) -> dict[str, Any]:
    """Reads a kept step in the form of a checkpoint that was read from disk.

    Args:
        paths: the paths of the memory areas in which the parts of the step lie, one for each rank
            that is needed to have the whole state, in the order of the ranks.
        module_names: the names of the modules of this run, for the manifest.
        random_states: the random states of all ranks; None where it is not known.
        only_local_shards: True if the parts have no shards of ranks on other machines. No rank of
            this machine needs them, so this is no error.

    Returns:
        The states by name, with the manifest as `manifest` and the random states as `random`:
        `{"model": {...}, "optimizer": {...}, "world": {...}, "random": [...], "manifest": {...}}`.

    Raises:
        CheckpointError: the parts do not fit together.
    """
    parts = [_Part(path) for path in paths]

    assemble = partial(_assemble_states, parts, only_local_shards=only_local_shards)

    # {"model": {...}}: each section says to which file it would belong in a checkpoint on disk.
    # These are modules, "training" (all objects that are no modules), and "random".
    file_names: set[str] = set()
    for part in parts:
        file_names.update(section["file"] for section in part.sections)
    module_states = {name: assemble(name) for name in file_names - {layout.TRAINING, RANDOM}}

    # {"optimizer": {...}, "world": {...}}
    other_states = assemble(layout.TRAINING)

    return {
        **module_states,
        **other_states,
        # From the caller, because these parts may lack the random states of some ranks.
        RANDOM: list(random_states),
        "manifest": {**parts[0].facts, "modules": list(module_names)},
    }


class _Part:
    """The part of a step that one rank has kept, opened for reading.

    Args:
        path: the path of the memory area that holds the part.

    Raises:
        CheckpointError: the area no longer holds a part.
    """

    def __init__(self, path: str) -> None:
        area = Area(path)
        seal = area.seal
        header = None if seal is None else area.read_header(seal)
        if seal is None or header is None:
            raise CheckpointError(
                "resuming from memory",
                "what was kept there has changed while it was read",
                "resume from the last checkpoint on disk",
            )
        content = json.loads(header)
        self.facts: dict[str, Any] = content["facts"]
        self.sections: list[dict[str, Any]] = content["sections"]
        self._area = area
        self._values_at = seal.values_at

    def sections_of(self, file: str) -> list[dict[str, Any]]:
        """Returns the sections that belong to a file of the checkpoint."""
        return [section for section in self.sections if section["file"] == file]

    def lazy_tensor(self, code: str, shape: Shape, offset: int) -> TensorInFile:
        """Returns a tensor in the area as a lazy tensor, whose values are not read yet.

        Args:
            code: the code of its dtype in safetensors, such as "F32".
            shape: the shape that is stored.
            offset: where the tensor begins, in bytes from the first value in the area.
        """
        dtype = DTYPE_OF_CODE[code]
        offset_in_area = self._values_at + offset
        return TensorInFile(Path(self._area.path), dtype, tuple(shape), offset_in_area)

    def view_of(self, lazy: TensorInFile) -> Tensor:
        """Returns a tensor that `lazy_tensor` has returned as a view of the area's memory."""
        return self._area.view(lazy.offset, lazy.dtype, lazy.shape)


class _ShardsOfThisMachine(TensorInShards):
    """A tensor with some shards on other machines. Each rank can only read its own shard."""

    def read_box(self, offsets: Shape, sizes: Shape) -> Tensor:
        """Reads the shard with exactly this offset and size; other regions cannot be read.

        That is enough: such a tensor is only read if the ranks have the same shards as before.

        Raises:
            CheckpointError: there is no such shard on this machine.
        """
        if 0 in sizes:
            return torch.empty(sizes, dtype=self.dtype)

        for shard in self.shards:
            if shard.offsets == offsets and shard.sizes == sizes:
                return shard.values.read()
        raise self._not_here_error()

    def read_range(self, begin: int, end: int) -> Tensor:
        """Returns an empty tensor for an empty range; any other range cannot be read.

        Raises:
            CheckpointError: the range is not empty.
        """
        if begin < end:
            raise self._not_here_error()
        return torch.empty(0, dtype=self.dtype)

    def _not_here_error(self) -> CheckpointError:
        return CheckpointError(
            f"resuming {self.name} from memory",
            "this rank needs a shard that another machine has kept",
            "resume from the last checkpoint on disk",
        )


def _assemble_states(parts: Sequence[_Part], file: str, *, only_local_shards: bool) -> Any:
    """Puts together what the ranks have kept of the state of a module, or of the other states.

    Args:
        parts: the parts of a complete set of ranks.
        file: the name of a module, `layout.TRAINING` or `RANDOM`.
        only_local_shards: see `read_step`.

    Returns:
        The state of the module; for `TRAINING` and `RANDOM` a dictionary of states by name.
    """
    # Only the tree says of a tensor whether what was kept is the whole tensor, {"$tensor": name},
    # or a piece of it, {"$sharded": name}. Until it is decoded, each tensor is taken for both.
    whole_tensors: dict[str, Tensor] = {}
    pieces = _Pieces(only_local_shards=only_local_shards)
    for kept in _kept_tensors(parts, file):
        pieces.add(kept)
        if kept.name not in whole_tensors:  # several ranks may have kept the same tensor
            whole_tensors[kept.name] = kept.view()
    return decode(_merge_trees(parts, file), whole_tensors, pieces.join)


class _KeptTensor(NamedTuple):
    """A tensor, or a region of a tensor, that one rank has kept."""

    name: str
    """The name of the whole tensor."""
    offsets: Shape
    """The first index of the region in the whole tensor, in each dimension."""
    sizes: Shape
    """The size of the region in each dimension."""
    values: TensorInFile
    part: _Part
    """The part in which the values lie."""

    def view(self) -> Tensor:
        """Returns the values as a view of the area's memory."""
        return self.part.view_of(self.values)


def _kept_tensors(parts: Sequence[_Part], file: str) -> Iterator[_KeptTensor]:
    """Yields everything that the ranks have kept of the tensors of a file.

    The header of a part describes it by `["F32", [2, 5], 64, [2, 0], [2, 5]]`, for example: 2 x 5
    numbers of the dtype float32, which lie at byte 64 of the area. In the whole tensor, this region
    begins at [2, 0] and has the sizes [2, 5].
    """
    for part in parts:
        for section in part.sections_of(file):
            for name, description in section["tensors"].items():
                dtype_code, shape, offset, box_offsets, box_sizes = description
                values = part.lazy_tensor(dtype_code, shape, offset)
                yield _KeptTensor(name, tuple(box_offsets), tuple(box_sizes), values, part)


def _merge_trees(parts: Sequence[_Part], file: str) -> Any:
    """Returns the tree of a module, or of the other states, from the trees of its sections.

    A section that is equal on all ranks has a tree on the first rank of each machine. Of a partial
    section, each rank has a tree with some of the entries, and these are merged. Example: the trees
    `{"0": ...}` and `{"1": ...}` of two ranks for the partial section at the path ["optimizer",
    "state"] become `{"optimizer": {"state": {"0": ..., "1": ...}}}`.

    Args:
        parts: the parts of a complete set of ranks.
        file: the name of a module, `layout.TRAINING` or `RANDOM`.
    """
    tree: Any = {}
    for part in parts:
        for section in part.sections_of(file):
            if "tree" in section:
                tree = _put(tree, section["path"], section["tree"], merges=section["partial"])
    return tree


class _Pieces:
    """The regions of tensors that the ranks have kept, from which `join` makes whole tensors.

    Args:
        only_local_shards: True if other regions are on other machines. No rank of this machine
            needs them.
    """

    def __init__(self, *, only_local_shards: bool) -> None:
        self._only_local_shards = only_local_shards
        self._pieces_of_name: dict[str, dict[tuple[Shape, Shape], TensorInFile]] = {}
        """For each tensor, its pieces by their offsets and sizes in the whole tensor."""

    def add(self, piece: _KeptTensor) -> None:
        """Adds a piece of a tensor, unless the same piece was added before."""
        pieces = self._pieces_of_name.setdefault(piece.name, {})
        pieces.setdefault((piece.offsets, piece.sizes), piece.values)

    def join(self, name: str, dtype: torch.dtype, shape: Shape) -> TensorInShards:
        """Returns the tensor with this name, of which each piece is a shard.

        Args:
            name: the name of the tensor.
            dtype: its dtype. The pieces may be stored as bytes.
            shape: the shape of the whole tensor.
        """
        shards = []
        for (offsets, sizes), values in self._pieces_of_name.get(name, {}).items():
            shards.append(Shard(offsets, values.view_as(dtype, sizes)))

        # If some shards are on other machines only, the tensor cannot be put together here. Each
        # rank can only read its own shard of it.
        num_elements_here = sum(shard.values.num_elements for shard in shards)
        if self._only_local_shards and num_elements_here < math.prod(shape):
            return _ShardsOfThisMachine(name, dtype, shape, tuple(shards))
        return join_shards(name, dtype, shape, shards)  # raises an error if one is missing


def _put(tree: Any, path: Sequence[Any], branch: Any, *, merges: bool) -> Any:
    """Returns a copy of a tree of nested dictionaries with a branch inserted at a path.

    Example: `_put({"a": 1}, ["b", "c"], 2, merges=False) -> {"a": 1, "b": {"c": 2}}`.

    Args:
        tree: the tree of the file so far.
        path: the keys that lead to the branch. If it is empty, the branch is the whole tree.
        branch: the tree of one section.
        merges: True to merge the branch with what is at that path already, because each rank has
            kept only some entries of the section. False to replace what is there.
    """
    if not path:
        something_is_there = bool(tree)
        if merges and something_is_there:
            return merge_entries(first=tree, second=branch)
        return branch

    first_key, *other_keys = path
    subtree = tree.get(first_key) or {}
    return {**tree, first_key: _put(subtree, other_keys, branch, merges=merges)}
