"""The last round of virtual ranks, kept in memory that outlives the processes of a run.

A *round* is what DiLoCo's virtual ranks do between two exchanges. At its end each rank writes into
a file in memory: the state of each of its virtual ranks, and on the first rank of a machine the
*shared* state, which is equal on all ranks. If the state of a virtual rank is lost with its
machine, it goes on with that of another one, its *substitute*.

`lockstep run` holds two such files for each rank (memfd_create(2)). They belong to the launcher, so
the ranks that it starts after a failure can read them. A rank writes into the older one of its two:
if it is killed while it writes, the previous round is still whole.

After a restart the ranks tell each other which rounds lie on their machines, and `choose_round`
says with which one they go on. A rank reads what is on its own machine; the rest is broadcast from
another one.

A file has the format of safetensors, with the tree of `encode` as one more tensor. It is whole when
its header is: the header's length is written as 0 first, and as what it is at the end.
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
from lockstep.checkpoint.formats.safetensors import file_content, read_header
from lockstep.checkpoint.lazy_tensor import LazyTensor
from lockstep.checkpoint.sharding import copy_to_memory
from lockstep.distributed.collectives import Collectives, run_on_all_ranks
from lockstep.errors import CheckpointError

TREE_NAME = "$tree"
"""The name of the tensor that holds the tree as JSON."""
HEADER_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, a number of this many bytes."""

Report = dict[str, Any]
"""What one rank says about itself, as JSON: `machine`, its number, and `rounds`, the facts of the
rounds in its files, each with the path of its `file`."""
Facts = Mapping[str, Any]
"""What a file says about its round, as JSON: `step` (in which it ended), `world_size`, `rank` (that
has written the file), `random` (the random state of that rank), `folder` (of the checkpoints),
`shared` (True if the file has the shared state), `replicas` (the virtual ranks in it)."""
Part = int
"""Identifies a part of a round: a virtual rank's state by its number, or `SHARED_STATE`."""
SHARED_STATE: Part = -1
"""Stands for the shared state among the parts of a round."""


@dataclass(frozen=True)
class StoredRound:
    """A round that lies in the memory of the machines."""

    step: int
    facts: Facts
    """The facts of one of its files, for what is equal in all: `world_size`."""
    shared_files: Mapping[int, str]
    """The file with the shared state, by the number of each machine that has one."""
    files: Mapping[int, Mapping[int, str]]
    """For each virtual rank that is there: the file with its state, by the number of each machine
    that has one."""
    substitutes: Mapping[int, int]
    """For each virtual rank, whose optimizer state it goes on with: its own, or if that is lost,
    that of the next virtual rank that is there."""
    rng_states: Sequence[str] | None
    """The random states of the ranks as text. None if one is missing, or if the run has another
    number of ranks now."""

    @property
    def lost(self) -> list[int]:
        """The virtual ranks of which nothing is there."""
        return [number for number in self.substitutes if number not in self.files]


def choose_round(reports: Sequence[Report], num_virtual_ranks: int) -> StoredRound | None:
    """Returns the round to go on with: the one with the most virtual ranks, the latest of several.

    Args:
        reports: what `Rounds.report` returned on each rank.
        num_virtual_ranks: how many virtual ranks the run has.

    Returns:
        None if no round has the shared state.
    """
    best: StoredRound | None = None
    steps = {facts["step"] for report in reports for facts in report["rounds"]}
    for step in sorted(steps):
        stored = collect_round(step, reports, num_virtual_ranks)
        if not stored.shared_files:
            continue
        # Later steps come later, so of equally complete rounds the latest is taken.
        if best is None or len(stored.files) >= len(best.files):
            best = stored
    return best


def collect_round(step: int, reports: Sequence[Report], num_virtual_ranks: int) -> StoredRound:
    """Returns the files that all machines have of the round that ended at this step.

    Args:
        step: the step at which the round ended; at least one report has a round that ended there.
        reports: what `Rounds.report` returned on each rank.
        num_virtual_ranks: how many virtual ranks the run has.
    """
    all_facts: list[Facts] = []
    shared_files: dict[int, str] = {}  # by machine
    files: dict[int, dict[int, str]] = {}  # by virtual rank, then by machine
    rng_state_of_rank: dict[int, str] = {}
    for report in reports:
        machine = report["machine"]
        for facts in report["rounds"]:
            if facts["step"] != step:
                continue
            all_facts.append(facts)
            # Several ranks of a machine may have the same state: the first one's file is taken.
            if facts["shared"] and machine not in shared_files:
                shared_files[machine] = facts["file"]
            for number in facts["replicas"]:  # the virtual ranks in this file
                if number not in files:
                    files[number] = {}
                if machine not in files[number]:
                    files[number][machine] = facts["file"]
            rng_state_of_rank[facts["rank"]] = facts["random"]

    # For each virtual rank, the one whose state it goes on with: itself, unless its state is lost.
    substitutes = {}
    if files:
        for number in range(num_virtual_ranks):
            substitutes[number] = next_stored(number, files, num_virtual_ranks)

    # Random states are restored only if the run has as many ranks as it had in that round, and the
    # state of each of them is there.
    world_size = all_facts[0]["world_size"]
    has_same_size = world_size == len(reports)
    has_all_rng_states = len(rng_state_of_rank) == world_size
    rng_states = None
    if has_same_size and has_all_rng_states:
        rng_states = [rng_state_of_rank[rank] for rank in range(world_size)]
    return StoredRound(step, all_facts[0], shared_files, files, substitutes, rng_states)


def next_stored(number: int, stored: Iterable[int], num_virtual_ranks: int) -> int:
    """Returns the first virtual rank from `number` on, cyclically, of which something is stored.

    With 4 virtual ranks of which 0 and 1 are stored, it is 0 for number 3.
    """
    return min(stored, key=lambda other: (other - number) % num_virtual_ranks)


class Rounds:
    """The files in memory of one rank.

    Args:
        folder: the folder of the checkpoints that the rounds belong to. Rounds of other folders are
            ignored.
        collectives: the collectives of the run.
    """

    def __init__(self, folder: Path, collectives: Collectives) -> None:
        self._folder = str(folder.absolute())
        self._collectives = collectives
        # The launcher holds two files in memory for each rank.
        self._files = [Path(name) for name in collectives.topology.round_memory]

    def store(self, facts: Facts, shared: Any, virtual_ranks: Mapping[int, Any]) -> None:
        """Writes a round over the older of the two rounds that this rank keeps in its files.

        Args:
            facts: the step in which the round ended (`step`), and the random state of this rank
                (`random`). The other facts are added here.
            shared: the shared state, or None if another rank of the machine stores it.
            virtual_ranks: the states of those virtual ranks that this rank stores.
        """
        topology = self._collectives.topology
        all_facts = {
            **facts,
            "folder": self._folder,
            "rank": topology.rank,
            "world_size": topology.size,
            "shared": shared is not None,
            "replicas": list(virtual_ranks),
        }
        tensors = _as_tensors(
            {"facts": all_facts, "shared": shared, "replicas": dict(virtual_ranks)}
        )
        oldest_file = min(self._files, key=self._step_in)  # an empty one, if there is one
        _overwrite(oldest_file, tensors)

    def report(self) -> Report:
        """Returns what this rank has, for `choose_round`."""
        rounds = []
        for path in self._files:
            facts = self._read_facts(path)
            if facts is not None:
                rounds.append({**facts, "file": str(path)})
        return {"machine": self._collectives.topology.node_rank, "rounds": rounds}

    def forget_after(self, step: int) -> None:
        """Empties files with rounds of later steps, because the training goes on from this step."""
        for path in self._files:
            if self._step_in(path) > step:
                os.truncate(path, 0)

    def _step_in(self, path: Path) -> int:
        """Returns the step of the round in a file; -1 if it has none."""
        facts = self._read_facts(path)
        if facts is None:
            return -1
        return int(facts["step"])

    def _read_facts(self, path: Path) -> Facts | None:
        """Returns the facts of the round in a file.

        Returns:
            None if the file holds no round, one that is not whole, or one of another folder.
        """
        with suppress(CheckpointError):
            facts: Facts = _read_tree(read_header(path))["facts"]
            if facts["folder"] == self._folder:
                return facts
        return None

    def read(
        self,
        chosen: StoredRound,
        machine_of_rank: Sequence[int],
        wanted_by_rank: Sequence[Sequence[int]],
    ) -> tuple[Any, dict[int, Any]]:
        """Returns the shared state of a round, and the states of this rank's virtual ranks.

        The latter are by the numbers of the virtual ranks. A virtual rank that is lost gets the
        optimizer state of its substitute, and begins with the shared weights.

        Communication: one broadcast of each part (see `Part`) that a rank needs and its machine
        lacks.

        Args:
            chosen: the round.
            machine_of_rank: the number of each rank's machine, in the order of the ranks.
            wanted_by_rank: the virtual ranks that each rank computes, in the order of the ranks.

        Raises:
            CheckpointError: on all ranks, if one cannot read its part.
        """
        own_rank = self._collectives.topology.rank
        own_machine = self._collectives.topology.node_rank

        # For each part of the round, its file on each machine that has one.
        files_of_part: dict[Part, Mapping[int, str]] = {SHARED_STATE: chosen.shared_files}
        for virtual_rank in sorted(chosen.files):
            files_of_part[virtual_rank] = chosen.files[virtual_rank]
        ranks_in_need = _ranks_in_need(chosen, wanted_by_rank)

        # A part is broadcast if its file is missing on the machine of a rank that needs it.
        sender_of_part: dict[Part, int] = {}
        for part, files in files_of_part.items():
            if any(machine_of_rank[rank] not in files for rank in ranks_in_need[part]):
                sender_of_part[part] = _first_rank_with(files, machine_of_rank)

        # This rank reads the parts on its machine that it needs or sends to others.
        files_to_read: dict[Part, str] = {}
        for part, files in files_of_part.items():
            is_needed = own_rank in ranks_in_need[part]
            is_sender = sender_of_part.get(part) == own_rank
            if own_machine in files and (is_needed or is_sender):
                files_to_read[part] = files[own_machine]
        states: dict[Part, Any] = run_on_all_ranks(
            self._collectives,
            f"resuming from step {chosen.step} in memory",
            lambda: {part: _read_part(Path(file), part) for part, file in files_to_read.items()},
        )
        # All ranks take part in each broadcast, also those that do not need the part.
        for part, sender in sender_of_part.items():
            tensors = _as_tensors(states[part]) if own_rank == sender else None
            received = self._collectives.broadcast(tensors, sender)
            if own_rank in ranks_in_need[part] and part not in states:
                states[part] = _from_tensors(received)

        state_of_virtual_rank = {}
        for virtual_rank in wanted_by_rank[own_rank]:
            state = states[chosen.substitutes[virtual_rank]]
            if virtual_rank in chosen.lost:
                state = _with_shared_weights(state)
            state_of_virtual_rank[virtual_rank] = state
        return states[SHARED_STATE], state_of_virtual_rank


def _ranks_in_need(
    chosen: StoredRound, wanted_by_rank: Sequence[Sequence[int]]
) -> dict[Part, list[int]]:
    """Returns the ranks that need a part, for each part of a round that is stored.

    All ranks need the shared state. A rank also needs the states of the virtual ranks that it
    computes, or, if one of these is lost, that of its substitute.

    Args:
        chosen: the round.
        wanted_by_rank: the virtual ranks that each rank computes.
    """
    all_ranks = list(range(len(wanted_by_rank)))
    ranks_of_part: dict[Part, list[int]] = {SHARED_STATE: all_ranks}
    for virtual_rank in chosen.files:
        ranks_of_part[virtual_rank] = []
    for rank, wanted in enumerate(wanted_by_rank):
        needed = {chosen.substitutes[virtual_rank] for virtual_rank in wanted}
        for virtual_rank in needed:
            ranks_of_part[virtual_rank].append(rank)
    return ranks_of_part


def _first_rank_with(files: Mapping[int, str], machine_of_rank: Sequence[int]) -> int:
    """Returns the first rank whose machine has one of these files."""
    for rank, machine in enumerate(machine_of_rank):
        if machine in files:
            return rank
    raise ValueError("the round lies on none of the machines")


def _with_shared_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a virtual rank's state with which it begins with the shared weights.

    Its optimizer states stay. The states of its modules are replaced by ones that change nothing:
    loading `None` as weights, and no buffers, leaves the shared ones in place.
    """
    without_weights: dict[str, Any] = {"weights": None, "buffers": (), "lost": {}}
    return {**state, "modules": [without_weights for _ in state["modules"]]}


def _as_tensors(state: Any) -> dict[str, Tensor]:
    """Returns a state as tensors by name; the tree is one of them, as the bytes of its JSON."""
    encoded = encode(state)
    tree_bytes = np.frombuffer(json.dumps(encoded.tree).encode(), np.uint8).copy()
    return {**encoded.tensors, TREE_NAME: torch.from_numpy(tree_bytes)}


def _from_tensors(tensors: Mapping[str, Any]) -> Any:
    """Returns the state that `_as_tensors` was given, with memory of its own."""
    tree_bytes = copy_to_memory(tensors[TREE_NAME]).cpu().numpy().tobytes()
    return copy_to_memory(decode(json.loads(tree_bytes), tensors))


def _overwrite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a file in place, so that the memory which it has already is used again.

    The length of the header, at the beginning of the file, is 0 until everything else is written:
    a file that is not whole has no header that could be read.
    """
    zero_length = bytes(HEADER_LENGTH_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, zero_length, 0)
        # The header with its length before it, then the bytes of each tensor.
        header, *values = file_content(path, tensors)
        os.lseek(descriptor, HEADER_LENGTH_BYTES, os.SEEK_SET)
        storage.write(descriptor, header[HEADER_LENGTH_BYTES:])
        for data in values:
            storage.write(descriptor, data)
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.ftruncate(descriptor, end)
        os.pwrite(descriptor, header[:HEADER_LENGTH_BYTES], 0)
    finally:
        os.close(descriptor)


def _read_part(path: Path, part: Part) -> Any:
    """Reads a part of a round from a file: the shared state, or that of a virtual rank."""
    tensors = read_header(path)
    tree = _read_tree(tensors)
    if part == SHARED_STATE:
        part_tree = tree["shared"]
    else:
        # `encode` writes a dictionary whose keys are numbers as {"$dict": [[number, tree], ...]}.
        tree_of_virtual_rank = dict(tree["replicas"]["$dict"])
        part_tree = tree_of_virtual_rank[part]
    return copy_to_memory(decode(part_tree, tensors))


def _read_tree(tensors: Mapping[str, LazyTensor]) -> Any:
    """Returns the tree of a file; reads no other tensor."""
    return json.loads(tensors[TREE_NAME].read().numpy().tobytes())
