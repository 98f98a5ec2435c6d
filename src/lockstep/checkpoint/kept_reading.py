"""Finds the newest step that the ranks of a run have kept in memory, and reads it.

What one rank has kept of a step is a *part*, in one of its two areas. The parts of all ranks with
the same attempt and serial number are a *kept step*; it is complete if the part of every rank is
sealed.
The ranks of a later attempt, which may be fewer, tell each other what lies in the areas, choose the
same step, and read it as a checkpoint on disk: values are read when they are loaded, and of a shard
only what a rank needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from lockstep.checkpoint.shards import Shard, TensorInShards, join_shards
from lockstep.errors import CheckpointError

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
    folder: str
    """The folder of the checkpoint that it belongs to."""


@dataclass(frozen=True)
class KeptStep:
    """A step whose parts are all there."""

    attempt: int
    serial: int
    step: int
    paths: tuple[str, ...]
    """The areas with the parts, in the order of the ranks that have written them."""


def report_parts(areas: Sequence[Area]) -> list[dict[str, Any]]:
    """Returns a `PartReport` of each area that is sealed and undamaged, as JSON."""
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
            folder=facts["folder"],
        )
        reports.append(asdict(report))
    return reports


def choose_step(reports: Sequence[PartReport], folder: str) -> KeptStep | None:
    """Returns the newest step of which the parts of all ranks are there; None: there is none.

    Args:
        reports: the parts in all areas.
        folder: parts that belong to the checkpoints of another folder are left out.
    """
    parts_of_step: dict[tuple[int, int], dict[int, PartReport]] = {}
    for report in reports:
        if report.folder != folder:
            continue
        key = report.attempt, report.serial
        if key not in parts_of_step:
            parts_of_step[key] = {}
        parts_of_step[key][report.rank] = report
    newest: KeptStep | None = None
    for (attempt, serial), part_of_rank in parts_of_step.items():
        any_part = next(iter(part_of_rank.values()))
        if len(part_of_rank) < any_part.world_size:
            continue
        paths = tuple(part_of_rank[rank].path for rank in sorted(part_of_rank))
        kept = KeptStep(attempt, serial, any_part.step, paths)
        # Of one step there may be two: before and after what a loop does at the end of an epoch.
        if newest is None or (kept.step, kept.serial) > (newest.step, newest.serial):
            newest = kept
    return newest


def read_step(kept: KeptStep, module_names: Sequence[str]) -> dict[str, Any]:
    """Returns the states of a kept step by name, with its `manifest` and the `random` states.

    Args:
        kept: the step.
        module_names: the names of the modules in it.

    Raises:
        CheckpointError: the parts do not fit together.
    """
    parts = [_Part(path) for path in kept.paths]
    names = {section["file"] for part in parts for section in part.sections}
    saved: dict[str, Any] = {}
    for name in names - {layout.TRAINING, RANDOM}:
        saved[name] = _read_file(parts, name)
    saved.update(_read_file(parts, layout.TRAINING))
    rng_states = []
    for part in parts:
        rng_states.append(_read_file([part], RANDOM)["state"])
    saved[RANDOM] = rng_states
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


def _read_file(parts: Sequence[_Part], file: str) -> Any:
    """Returns the state of a module, or the states of everything else by name.

    Args:
        parts: of all ranks.
        file: the name of the module, `layout.TRAINING` or `RANDOM`.
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
