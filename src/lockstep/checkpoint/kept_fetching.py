"""Brings the parts of a kept step to the machines that need them, and reads it.

On one machine every rank reads the areas of all ranks. Of several machines, each reads what lies
there: what is equal on all ranks is on every machine, and a rank that was started again under FSDP
finds its shard where it left it. What a machine lacks, because it is new or because the ranks are
others than before, is sent to it by a rank that has it; its ranks free it when they have loaded it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch.distributed as dist

from lockstep.checkpoint.encoding import rng_state_from_text, rng_state_to_text
from lockstep.checkpoint.kept_reading import (
    KeptStep,
    PartReport,
    read_random_state,
    read_step,
)
from lockstep.checkpoint.memory_area import PAGE_BYTES, Area, round_up
from lockstep.distributed.collectives import Collectives, gather_answers, run_on_all_ranks
from lockstep.distributed.control_groups import available_memory
from lockstep.errors import CheckpointError
from lockstep.units import format_bytes

RESUMING_FROM_MEMORY = "resuming from memory"
MAX_SHARE_OF_FREE_MEMORY = 0.8
"""What is sent to a machine may take this part of its free memory."""


class _Transfer(NamedTuple):
    """A part that is sent from one machine to another."""

    part: PartReport
    receiver: int
    """The rank that takes it for its machine."""


class _Reading(NamedTuple):
    """What the ranks of one machine read."""

    parts: list[PartReport]
    """One copy of each part, on this machine where there is one."""
    lacks_shards: bool
    """See `read_step`."""

    def missing_on(self, machine: int) -> list[PartReport]:
        """Returns the parts that must be sent to a machine before it can read."""
        return [part for part in self.parts if part.machine != machine]


def fetch_step(
    collectives: Collectives, kept: KeptStep, module_names: Sequence[str], received: ExitStack
) -> dict[str, Any]:
    """Returns the states of a kept step, as `read_step` does. All ranks call this for one step.

    Args:
        collectives: of the run.
        kept: the step.
        module_names: the names of the modules in it.
        received: frees what was sent to this machine, when the states have been loaded everywhere.

    Raises:
        CheckpointError: on all ranks. The step cannot be read, or a machine has too little memory.
    """
    topology = collectives.topology
    machine = topology.node_rank
    machine_of_rank: list[int] = collectives.exchange(machine)
    reading_of: dict[int, _Reading] = {}
    for each in sorted(set(machine_of_rank)):
        reading_of[each] = _plan_reading(kept, machine_of_rank, each)
    run_on_all_ranks(
        collectives, RESUMING_FROM_MEMORY, lambda: _check_memory(reading_of[machine], machine)
    )
    random_states = _gather_random_states(collectives, kept)
    path_of_part: dict[str, str] = {}
    """Where the parts are that were sent to this machine. The keys are the ranks that have written
    them, as text, since JSON has no other keys."""
    for transfer in _plan_transfers(reading_of, machine_of_rank):
        if topology.rank == transfer.part.holder:
            _send(transfer)
        if topology.rank == transfer.receiver:
            path_of_part[str(transfer.part.rank)] = _receive(transfer, received)
    paths_of_rank = gather_answers(collectives, RESUMING_FROM_MEMORY, lambda: path_of_part)
    for rank, paths in enumerate(paths_of_rank):
        if machine_of_rank[rank] == machine:
            path_of_part |= paths
    reading = reading_of[machine]
    paths_here = []
    for part in reading.parts:
        is_here = part.machine == machine
        paths_here.append(part.path if is_here else path_of_part[str(part.rank)])
    return run_on_all_ranks(
        collectives,
        RESUMING_FROM_MEMORY,
        lambda: read_step(
            paths_here, module_names, random_states, lacks_shards=reading.lacks_shards
        ),
    )


def _plan_reading(kept: KeptStep, machine_of_rank: Sequence[int], machine: int) -> _Reading:
    """Returns what the ranks of a machine read.

    Args:
        kept: the step.
        machine_of_rank: the machines of the ranks of this run.
        machine: the number of the machine.
    """
    if _every_rank_finds_its_shard(kept, machine_of_rank):
        ranks_here = [rank for rank, where in enumerate(machine_of_rank) if where == machine]
        parts_here = [_copy_on(kept, rank, machine) for rank in ranks_here]
        return _Reading(parts_here, lacks_shards=len(parts_here) < len(machine_of_rank))
    readings = []
    for ranks in kept.choices:
        parts = [_copy_on(kept, rank, machine) for rank in ranks]
        readings.append(_Reading(parts, lacks_shards=False))
    # Of several sets of ranks, the one of which the machine lacks the least.
    return min(readings, key=lambda reading: len(reading.missing_on(machine)))


def _every_rank_finds_its_shard(kept: KeptStep, machine_of_rank: Sequence[int]) -> bool:
    """Returns True if each rank needs only what the ranks of its machine have kept.

    That is so under FSDP if the ranks are as many as before, and on the machines where they were.
    (HSDP and pipelines are left out: a rank need not have kept everything that it needs.)
    """
    any_part = kept.copies[0]
    if any_part.strategy != "fsdp" or any_part.world_size != len(machine_of_rank):
        return False
    for rank, machine in enumerate(machine_of_rank):
        part = _copy_on(kept, rank, machine)
        if part.machine != machine or part.writer_machine != machine:
            return False
    return True


def _copy_on(kept: KeptStep, rank: int, machine: int) -> PartReport:
    """Returns a copy of the part of a rank, on a machine if there is one there."""
    copies = kept.copies_of(rank)
    for copy in copies:
        if copy.machine == machine:
            return copy
    return copies[0]


def _check_memory(reading: _Reading, machine: int) -> None:
    """Checks that there is room for what a machine lacks.

    Raises:
        CheckpointError: it is not.
    """
    needed = sum(part.num_bytes for part in reading.missing_on(machine))
    available = available_memory()
    if available is not None and needed > MAX_SHARE_OF_FREE_MEMORY * available:
        raise CheckpointError(
            RESUMING_FROM_MEMORY,
            f"{format_bytes(needed)} would have to be sent to this machine, which has "
            f"{format_bytes(available)} of free memory",
            "resume from the last checkpoint on disk",
        )


def _gather_random_states(collectives: Collectives, kept: KeptStep) -> list[Any]:
    """Returns the random states of the ranks that have kept a step; None where it is not known."""
    own_rank = collectives.topology.rank

    def read_held() -> dict[str, str]:
        """Returns the random states that this rank has access to, by the number of their rank."""
        texts = {}
        for rank in range(kept.copies[0].world_size):
            copies = kept.copies_of(rank)
            if copies and copies[0].holder == own_rank:
                texts[str(rank)] = rng_state_to_text(read_random_state(copies[0].path))
        return texts

    states: list[Any] = [None] * kept.copies[0].world_size
    for texts in gather_answers(collectives, RESUMING_FROM_MEMORY, read_held):
        for rank, text in texts.items():
            states[int(rank)] = rng_state_from_text(text)
    return states


def _plan_transfers(
    reading_of: Mapping[int, _Reading], machine_of_rank: Sequence[int]
) -> list[_Transfer]:
    """Returns what is sent, in an order that is the same on all ranks."""
    transfers = []
    for machine, reading in reading_of.items():
        for part in reading.missing_on(machine):
            transfers.append(_Transfer(part, receiver=machine_of_rank.index(machine)))
    return transfers


def _send(transfer: _Transfer) -> None:
    """Sends a part, from the rank that has reported it."""
    area = Area(transfer.part.path)
    dist.send(area.whole(transfer.part.num_bytes), transfer.receiver)


def _receive(transfer: _Transfer, received: ExitStack) -> str:
    """Receives a part into memory of this process.

    Returns:
        The path under which the other ranks of the machine find it.
    """
    descriptor = os.memfd_create("lockstep-received")
    received.callback(os.close, descriptor)
    os.ftruncate(descriptor, round_up(transfer.part.num_bytes, PAGE_BYTES))
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    dist.recv(Area(path).whole(transfer.part.num_bytes), transfer.part.holder)
    return path
