"""Finds the newest step that the ranks of a run have kept in memory, and reads it.

What one rank has kept of a step is a *part*, in one of its two areas. The parts of all ranks with
the same attempt and serial number are a *kept step*. It is complete if the part of every rank is
there, on its machine or as a copy on another one (`partner_copies`). If no rank has kept anything
that others have not, such as a shard, the parts of the ranks of one machine are enough.

The ranks of a later attempt, which may be fewer, tell each other what lies in the areas, choose the
same step, and read it as a checkpoint on disk: values are read when they are loaded, and of a shard
only what a rank needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import layout
from lockstep.checkpoint.encoding import DTYPE_OF_CODE, decode
from lockstep.checkpoint.formats.safetensors import TensorInFile
from lockstep.checkpoint.lazy_tensor import Shape
from lockstep.checkpoint.memory_area import Area
from lockstep.checkpoint.sharding import copy_to_memory
from lockstep.checkpoint.shards import Shard, TensorInShards, join_shards
from lockstep.errors import CheckpointError
from lockstep.wording import format_ranks

RANDOM = "random"
"""The name of the section with the random state of a rank."""


@dataclass(frozen=True)
class PartReport:
    """What a rank tells the others about a part in one of the areas. All of it is JSON."""

    path: str
    """The path of the area."""
    attempt: int
    serial: int
    step: int
    rank: int
    """The rank that has written it."""
    world_size: int
    folders: list[str]
    """The folder of the checkpoint that it belongs to. Its path may differ between machines: these
    are all that it had."""
    writer_machine: int
    """The number that the machine of the rank that has written it had then."""
    writers_on_machine: int
    """How many ranks that machine had then."""
    is_replica: bool
    """True if no rank has kept anything that the ranks of each machine do not have together."""
    strategy: str
    """The strategy of the rank that has written it."""
    epoch: int
    num_bytes: int
    """How much of the area is in use."""
    holder: int
    """The rank that reports it, and has access to the area."""
    machine: int
    """The number of the machine on which the area is now."""


@dataclass(frozen=True)
class KeptStep:
    """A step whose parts are all there."""

    attempt: int
    serial: int
    step: int
    epoch: int
    copies: tuple[PartReport, ...]
    """All parts that are there; of one part there may be several copies."""
    choices: tuple[tuple[int, ...], ...]
    """Sets of ranks; the parts of the ranks of one set are the whole state."""

    def paths_on(self, machine: int) -> set[str]:
        """Returns the paths of the areas of a machine in which something of the step is."""
        return {copy.path for copy in self.copies if copy.machine == machine}

    def copies_of(self, rank: int) -> list[PartReport]:
        """Returns the copies of the part of a rank."""
        return [copy for copy in self.copies if copy.rank == rank]


def report_parts(areas: Sequence[Area], *, holder: int, machine: int) -> list[dict[str, Any]]:
    """Returns a `PartReport` of each area that is sealed and undamaged, as JSON.

    Args:
        areas: on this machine.
        holder: this rank.
        machine: the number of this machine.
    """
    reports = []
    for area in areas:
        seal = area.seal
        if seal is None:
            continue
        header = area.read_header(seal)
        if header is None or not area.is_sound(seal):
            continue
        facts = json.loads(header)["facts"]
        report = PartReport(
            path=area.path,
            attempt=seal.attempt,
            serial=seal.serial,
            step=seal.step,
            rank=facts["rank"],
            world_size=facts["world_size"],
            folders=facts["folders"],
            writer_machine=facts["machine"],
            writers_on_machine=facts["ranks_on_machine"],
            is_replica=facts["is_replica"],
            strategy=facts["strategy"],
            epoch=facts["epoch"],
            num_bytes=seal.end,
            holder=holder,
            machine=machine,
        )
        reports.append(asdict(report))
    return reports


def choose_step(reports: Sequence[PartReport], folders: Collection[str]) -> KeptStep | None:
    """Returns the newest step that is complete; None: there is none.

    Args:
        reports: the parts in all areas.
        folders: the paths of the folder of the checkpoint on the machines of the run, the same on
            all ranks. Parts of which no path is among them belong to another checkpoint, and are
            left out.
    """
    newest: KeptStep | None = None
    for (attempt, serial), copies in _copies_of_steps(reports, folders).items():
        choices = _complete_sets(copies)
        if not choices:
            continue
        kept = KeptStep(attempt, serial, copies[0].step, copies[0].epoch, tuple(copies), choices)
        # Of one step there may be two: before and after what a loop does at the end of an epoch.
        if newest is None or (kept.step, kept.serial) > (newest.step, newest.serial):
            newest = kept
    return newest


def describe_incomplete(reports: Sequence[PartReport], folders: Collection[str]) -> str:
    """Says why no step in memory can be resumed, when `choose_step` has found none.

    Args:
        reports: as in `choose_step`.
        folders: as in `choose_step`.

    Returns:
        A clause without a full stop.
    """
    copies_of_step = _copies_of_steps(reports, folders)
    if not copies_of_step:
        return "no step of it is in memory"
    newest = max(copies_of_step.values(), key=lambda copies: (copies[0].step, copies[0].serial))
    missing = set(range(newest[0].world_size)) - {copy.rank for copy in newest}
    return (
        f"step {newest[0].step} in memory is incomplete: what {format_ranks(missing)} kept is "
        "missing"
    )


def _copies_of_steps(
    reports: Sequence[PartReport], folders: Collection[str]
) -> dict[tuple[int, int], list[PartReport]]:
    """Returns the parts of each step of a checkpoint, by attempt and serial number.

    Args:
        reports: as in `choose_step`.
        folders: as in `choose_step`.
    """
    copies_of_step: dict[tuple[int, int], list[PartReport]] = {}
    for report in reports:
        if not set(report.folders).isdisjoint(folders):
            copies_of_step.setdefault((report.attempt, report.serial), []).append(report)
    return copies_of_step


def _complete_sets(copies: Sequence[PartReport]) -> tuple[tuple[int, ...], ...]:
    """Returns the sets of ranks whose parts are the whole state of a step.

    Args:
        copies: what there is of the parts of the step.
    """
    any_part = copies[0]
    ranks_there = {copy.rank for copy in copies}
    all_ranks = tuple(range(any_part.world_size))
    if not all(copy.is_replica for copy in copies):
        return (all_ranks,) if len(ranks_there) == any_part.world_size else ()
    ranks_of_machine: dict[int, set[int]] = {}
    size_of_machine: dict[int, int] = {}
    for copy in copies:
        ranks_of_machine.setdefault(copy.writer_machine, set()).add(copy.rank)
        size_of_machine[copy.writer_machine] = copy.writers_on_machine
    sets = []
    for machine, ranks in sorted(ranks_of_machine.items()):
        if len(ranks) == size_of_machine[machine]:
            sets.append(tuple(sorted(ranks)))
    return tuple(sets)


def read_random_state(path: str) -> dict[str, Any]:
    """Returns the random state of the rank that has written an area.

    Raises:
        CheckpointError: the area has changed.
    """
    part = _Part(path)
    state: dict[str, Any] = _read_file([part], RANDOM, lacks_shards=False)["state"]
    in_memory: dict[str, Any] = copy_to_memory(state)
    return in_memory


def read_step(
    paths: Sequence[str],
    module_names: Sequence[str],
    random_states: Sequence[Any],
    *,
    lacks_shards: bool,
) -> dict[str, Any]:
    """Returns the states of a kept step by name, with its `manifest` and the `random` states.

    Args:
        paths: the areas with the parts of a complete set, in the order of their ranks.
        module_names: the names of the modules in it.
        random_states: of all ranks; None where it is not known.
        lacks_shards: True if there are shards in other parts, on other machines, which no rank of
            this machine needs.

    Raises:
        CheckpointError: the parts do not fit together.
    """
    parts = [_Part(path) for path in paths]
    names: set[str] = set()
    for part in parts:
        names.update(section["file"] for section in part.sections)
    saved: dict[str, Any] = {}
    for name in names - {layout.TRAINING, RANDOM}:
        saved[name] = _read_file(parts, name, lacks_shards=lacks_shards)
    saved.update(_read_file(parts, layout.TRAINING, lacks_shards=lacks_shards))
    saved[RANDOM] = list(random_states)
    saved["manifest"] = {**parts[0].facts, "modules": list(module_names)}
    return saved


class _Part:
    """What one rank has kept.

    Args:
        path: of the area.

    Raises:
        CheckpointError: it is not there any more.
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
        """Returns the sections of a file."""
        return [section for section in self.sections if section["file"] == file]

    def tensor(self, code: str, shape: Shape, offset: int) -> TensorInFile:
        """Returns a tensor that lies in the area. Reads no values.

        Args:
            code: of its dtype.
            shape: as it is stored.
            offset: where it is in the values.
        """
        dtype = DTYPE_OF_CODE[code]
        place = self._values_at + offset
        return TensorInFile(Path(self._area.path), dtype, tuple(shape), place)

    def view(self, tensor: TensorInFile) -> Tensor:
        """Returns a view of the area's memory for a tensor that `tensor` has returned."""
        return self._area.view(tensor.offset, tensor.dtype, tensor.shape)


class _ShardsOfThisMachine(TensorInShards):
    """A tensor of which some shards are on other machines: each rank reads its own shard only."""

    def read_box(self, offsets: Shape, sizes: Shape) -> Tensor:
        """Returns the values of a shard.

        Raises:
            CheckpointError: there is no shard with this offset and size.
        """
        if 0 in sizes:
            return torch.empty(sizes, dtype=self.dtype)
        for shard in self.shards:
            if shard.offsets == offsets and shard.sizes == sizes:
                return shard.values.read()
        raise self._not_here()

    def read_range(self, begin: int, end: int) -> Tensor:
        """Raises an error, unless nothing is asked for.

        Raises:
            CheckpointError: `begin` is less than `end`.
        """
        if begin < end:
            raise self._not_here()
        return torch.empty(0, dtype=self.dtype)

    def _not_here(self) -> CheckpointError:
        return CheckpointError(
            f"resuming {self.name} from memory",
            "this rank needs a shard that another machine has kept",
            "resume from the last checkpoint on disk",
        )


def _read_file(parts: Sequence[_Part], file: str, *, lacks_shards: bool) -> Any:
    """Returns the state of a module, or the states of everything else by name.

    Args:
        parts: of a complete set of ranks.
        file: the name of the module, `layout.TRAINING` or `RANDOM`.
        lacks_shards: as in `read_step`.
    """
    whole_tensors: dict[str, Tensor] = {}
    boxes_of_tensor: dict[str, dict[tuple[Shape, Shape], TensorInFile]] = {}
    tree: Any = {}
    for part in parts:
        for section in part.sections_of(file):
            for name, (code, shape, offset, box_offsets, box_sizes) in section["tensors"].items():
                tensor = part.tensor(code, shape, offset)
                # Several ranks may have the same; the first one's is taken.
                if name not in whole_tensors:
                    whole_tensors[name] = part.view(tensor)
                box = (tuple(box_offsets), tuple(box_sizes))
                boxes_of_tensor.setdefault(name, {}).setdefault(box, tensor)
            if "tree" in section:
                tree = _put(tree, section["path"], section["tree"], section["partial"])

    def find_shards(name: str, dtype: torch.dtype, shape: Shape) -> TensorInShards:
        """Returns a tensor of which several ranks have kept a part each."""
        shards = []
        for (offsets, sizes), tensor in boxes_of_tensor.get(name, {}).items():
            shards.append(Shard(offsets, tensor.view_as(dtype, sizes)))
        num_elements = sum(shard.values.num_elements for shard in shards)
        if lacks_shards and num_elements < math.prod(shape):
            return _ShardsOfThisMachine(name, dtype, shape, tuple(shards))
        return join_shards(name, dtype, shape, shards)

    return decode(tree, whole_tensors, find_shards)


def _put(tree: Any, path: Sequence[Any], branch: Any, is_partial: bool) -> Any:
    """Returns a tree with a branch put in its place, or merged with what another rank has there.

    Args:
        tree: the tree of a file so far.
        path: the keys that lead to the place of the branch; empty: it is the whole tree.
        branch: the tree of a section.
        is_partial: True if each rank has only some entries of the section.
    """
    if not path:
        return _merged(tree, branch) if is_partial and tree else branch
    first, *rest = path
    below = tree.get(first)
    if below is None:
        below = {}
    return {**tree, first: _put(below, rest, branch, is_partial)}


def _merged(tree: Mapping[str, Any], branch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of both: those that the first lacks are taken from the second.

    Both are the entries of a module, {"$ordered": [[name, tree or None], ...]} with all names, or
    those of another object by number, {"$dict": [[number, tree], ...]}; {} if there are none.
    """
    if "$ordered" in tree:
        entry_of_name = dict(branch["$ordered"])
        pairs = []
        for name, entry in tree["$ordered"]:
            pairs.append([name, entry_of_name.get(name) if entry is None else entry])
        return {**tree, "$ordered": pairs}
    entries = dict(tree.get("$dict", []))
    for number, entry in branch.get("$dict", []):
        entries.setdefault(number, entry)
    return {"$dict": [[number, entries[number]] for number in sorted(entries)]}
