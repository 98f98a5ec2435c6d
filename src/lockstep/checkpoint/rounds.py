"""The last round of replicas that train apart, in memory that outlives the ranks.

`lockstep run` holds two files in memory for each rank (memfd_create(2)), which are there for the
ranks that it starts after these have ended, and gone with it. At the end of a round a rank writes
into the older of its two: what it has of each of its replicas, and on the first rank of a machine
what all ranks have alike. So a rank that is killed while it writes leaves the round before whole.

After a restart the ranks tell each other what lies on their machines, and `choose` says with which
round they go on. A rank reads what is on its own machine; the rest is broadcast from another.

A file is one of safetensors, with the tree of `encode` as the tensor `TREE`. It is whole when its
header is: the header's length is written first as 0, and last as what it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint import storage
from lockstep.checkpoint.encoding import decode, encode
from lockstep.checkpoint.formats.safetensors import content_of, read_header
from lockstep.checkpoint.sharding import LazyTensor, in_memory
from lockstep.distributed.collectives import Collectives, run_on_all_ranks
from lockstep.errors import CheckpointError

TREE = "$tree"
_LENGTH = 8
"""Bytes, at the beginning, which say how long the header is."""

Report = dict[str, Any]
"""What one rank says of itself and its files; JSON."""


@dataclass(frozen=True)
class Chosen:
    """The round with which the ranks go on."""

    step: int
    facts: Mapping[str, Any]
    """What a file says of it, such as its `epoch` and `world_size`."""
    shared: Mapping[int, str]
    """Where what all ranks have alike lies: the files, by machine."""
    replicas: Mapping[int, Mapping[int, str]]
    """Likewise, of the replicas that are there."""
    instead: Mapping[int, int]
    """Whose optimizer state a replica goes on with: its own, or that of the next that is there."""
    random: Sequence[str] | None
    """The random states of the ranks; None: not all are there, or the ranks are not as many."""

    @property
    def lost(self) -> list[int]:
        """The replicas of which nothing is there."""
        return [replica for replica in self.instead if replica not in self.replicas]


def choose(reports: Sequence[Report], count: int) -> Chosen | None:
    """The round of which the most replicas are there; of several the latest. None: there is none.

    Args:
        reports: of every rank, as `Rounds.report` gives them.
        count: of the replicas.
    """
    rounds: dict[int, list[tuple[int, Mapping[str, Any]]]] = {}
    for report in reports:
        for kept in report["kept"]:
            rounds.setdefault(kept["step"], []).append((report["machine"], kept))
    found = [_as_chosen(step, kept, len(reports), count) for step, kept in rounds.items()]
    complete = [each for each in found if each.shared]
    return max(complete, key=lambda each: (len(each.replicas), each.step), default=None)


def _as_chosen(
    step: int, kept: Sequence[tuple[int, Mapping[str, Any]]], ranks: int, count: int
) -> Chosen:
    shared: dict[int, str] = {}
    replicas: dict[int, dict[int, str]] = {}
    for machine, each in kept:
        if each["shared"]:
            shared.setdefault(machine, each["file"])
        for replica in each["replicas"]:
            replicas.setdefault(replica, {}).setdefault(machine, each["file"])
    instead = {
        replica: min(replicas, key=lambda other: (other - replica) % count)
        for replica in range(count if replicas else 0)
    }
    facts = kept[0][1]
    states = {each["rank"]: each["random"] for _, each in kept}
    every = facts["world_size"] == ranks == len(states)
    random = [states[rank] for rank in range(ranks)] if every else None
    return Chosen(step, facts, shared, replicas, instead, random)


class Rounds:
    """One rank's files, and those of the other ranks of its machine.

    Args:
        folder: of the checkpoints that the rounds belong to; what other ones have kept is not seen.
        collectives: of the run.
    """

    def __init__(self, folder: Path, collectives: Collectives) -> None:
        self._folder = str(folder.absolute())
        self._collectives = collectives
        self._files = [Path(name) for name in collectives.topology.memory]

    def keep(self, facts: Mapping[str, Any], shared: Any, replicas: Mapping[int, Any]) -> None:
        """Writes a round into the older file.

        Args:
            facts: JSON: `step`, `epoch`, `random` (this rank's state as text).
            shared: what all ranks have alike; None where another rank of the machine writes it.
            replicas: what each of this rank's has; without those that another such rank writes.
        """
        topology = self._collectives.topology
        facts = {
            **facts,
            "folder": self._folder,
            "rank": topology.rank,
            "world_size": topology.size,
            "shared": shared is not None,
            "replicas": list(replicas),
        }
        steps = [-1 if kept is None else kept["step"] for kept in map(self._kept, self._files)]
        tensors = _encoded({"facts": facts, "shared": shared, "replicas": dict(replicas)})
        _overwrite(self._files[steps.index(min(steps))], tensors)

    def report(self) -> Report:
        """What this rank has, for `choose`."""
        kept = [
            {**facts, "file": str(path)}
            for path in self._files
            if (facts := self._kept(path)) is not None
        ]
        return {"machine": self._collectives.topology.node_rank, "kept": kept}

    def forget_after(self, step: int) -> None:
        """Drops rounds of a later step: the training has gone back behind them."""
        for path in self._files:
            facts = self._kept(path)
            if facts is not None and facts["step"] > step:
                os.truncate(path, 0)

    def _kept(self, path: Path) -> dict[str, Any] | None:
        """What a file says of its round; None: it holds none that is whole."""
        with suppress(CheckpointError):
            facts: dict[str, Any] = _tree(read_header(path))["facts"]
            return facts if facts["folder"] == self._folder else None
        return None

    def read(
        self, chosen: Chosen, machines: Sequence[int], wanted: Sequence[Iterable[int]]
    ) -> tuple[Any, dict[int, Any]]:
        """What this rank needs of a round: what all have alike, and what its replicas have.

        Communication: one broadcast of each part that a rank needs and its machine lacks.

        Args:
            chosen: the round.
            machines: of every rank.
            wanted: the replicas that every rank computes.

        Returns:
            A replica of which nothing is there has the optimizer state of another.

        Raises:
            CheckpointError: on all ranks, where one cannot read its part.
        """
        sources = [[chosen.instead[r] for r in own] for own in wanted]
        parts: list[tuple[int | None, Mapping[int, str]]] = [(None, chosen.shared)]
        parts += [(r, chosen.replicas[r]) for r in sorted(chosen.replicas)]
        needed: dict[int | None, list[int]] = {}
        senders: dict[int | None, int] = {}
        for part, files in parts:
            needed[part] = [q for q, own in enumerate(sources) if part is None or part in own]
            if any(machines[rank] not in files for rank in needed[part]):
                senders[part] = next(q for q, machine in enumerate(machines) if machine in files)
        own, here = self._collectives.topology.rank, self._collectives.topology.node_rank

        def read_here() -> dict[int | None, Any]:
            return {
                part: _read(Path(files[here]), part)
                for part, files in parts
                if here in files and (own in needed[part] or senders.get(part) == own)
            }

        doing = f"resuming from step {chosen.step} in memory"
        found = run_on_all_ranks(self._collectives, doing, read_here)
        for part, sender in senders.items():
            mine = _encoded(found[part]) if own == sender else None
            sent = self._collectives.broadcast(mine, sender)
            if own in needed[part] and part not in found:
                found[part] = _decoded(sent)
        replicas = {r: found[chosen.instead[r]] for r in wanted[own]}
        for replica in set(chosen.lost).intersection(replicas):
            replicas[replica] = _begun_anew(replicas[replica])
        return found[None], replicas


def _begun_anew(other: Mapping[str, Any]) -> dict[str, Any]:
    """A replica that begins with the shared weights and another one's optimizer state."""
    fresh: dict[str, Any] = {"weights": None, "buffers": (), "lost": {}}
    return {**other, "modules": [fresh for _ in other["modules"]]}


def _encoded(state: Any) -> dict[str, Tensor]:
    """A state as tensors alone."""
    tree, tensors, _ = encode(state)
    text = np.frombuffer(json.dumps(tree).encode(), np.uint8).copy()
    return {**tensors, TREE: torch.from_numpy(text)}


def _decoded(tensors: Mapping[str, Any]) -> Any:
    """What `_encoded` was given, in memory of its own."""
    text = in_memory(tensors[TREE])
    return in_memory(decode(json.loads(text.cpu().numpy().tobytes()), tensors))


def _overwrite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """In place: memory that is in use already need not be asked for again."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(file, bytes(_LENGTH), 0)
        header, *values = content_of(path, tensors)
        os.lseek(file, _LENGTH, os.SEEK_SET)
        for data in (header[_LENGTH:], *values):
            storage.write(file, data)
        os.ftruncate(file, os.lseek(file, 0, os.SEEK_CUR))
        os.pwrite(file, header[:_LENGTH], 0)
    finally:
        os.close(file)


def _read(path: Path, part: int | None) -> Any:
    """What all ranks have alike, or a replica's part."""
    entries = read_header(path)
    tree = _tree(entries)
    # `encode` writes a dictionary with such keys as pairs.
    own = tree["shared"] if part is None else dict(tree["replicas"]["$dict"])[part]
    return in_memory(decode(own, entries))


def _tree(entries: Mapping[str, LazyTensor]) -> Any:
    return json.loads(entries[TREE].full().numpy().tobytes())
