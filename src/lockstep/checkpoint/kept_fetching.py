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


class _ReadingPlan(NamedTuple):
    """What the ranks of one machine are going to read."""

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
        collectives: the collectives of the run.
        kept: the step.
        module_names: the names of the modules in it.
        received: stack that frees what was sent to this machine. Close it when the states have been
            loaded on all ranks.

    Raises:
        CheckpointError: on all ranks. The step cannot be read, or a machine has too little memory.
    """
    machine = collectives.topology.node_rank
    machine_of_rank: list[int] = collectives.exchange(machine)

    # Every rank plans for all machines, from the same facts, so that all have the same plan.
    plan_of_machine: dict[int, _ReadingPlan] = {}
    for each_machine in sorted(set(machine_of_rank)):
        plan_of_machine[each_machine] = _plan_reading(kept, machine_of_rank, each_machine)
    plan = plan_of_machine[machine]
    run_on_all_ranks(collectives, RESUMING_FROM_MEMORY, lambda: _check_memory(plan, machine))

    random_states = _gather_random_states(collectives, kept)

    # Send each machine the parts that it lacks.
    transfers = _plan_transfers(plan_of_machine, machine_of_rank)
    received_paths = _transfer_parts(collectives, transfers, machine_of_rank, received)

    # Read all parts on this machine. The received ones are listed by the rank that wrote them.
    paths_here = []
    for part in plan.parts:
        is_here = part.machine == machine
        paths_here.append(part.path if is_here else received_paths[part.rank])

    return run_on_all_ranks(
        collectives,
        RESUMING_FROM_MEMORY,
        lambda: read_step(paths_here, module_names, random_states, lacks_shards=plan.lacks_shards),
    )


def _plan_reading(kept: KeptStep, machine_of_rank: Sequence[int], machine: int) -> _ReadingPlan:
    """Decides which parts the ranks of a machine read.

    Args:
        kept: the step.
        machine_of_rank: the machine of each rank of this run.
        machine: the number of the machine.
    """
    # If each rank finds its shard where it left it, a machine reads the parts of its own ranks,
    # which have the same numbers as when the step was kept. If not all ranks are on this machine,
    # it has only a part of each sharded tensor.
    if _every_rank_finds_its_shard(kept, machine_of_rank):
        ranks_here = [rank for rank, where in enumerate(machine_of_rank) if where == machine]
        parts_here = [_find_copy(kept, rank, machine) for rank in ranks_here]
        other_machines_have_ranks = len(ranks_here) < len(machine_of_rank)
        return _ReadingPlan(parts_here, lacks_shards=other_machines_have_ranks)

    # Otherwise, it reads the whole state. Each complete set of ranks has kept all of it. Of these
    # sets, the machine reads the one that needs the fewest parts from other machines.
    plans = []
    for ranks_that_kept in kept.complete_sets:
        # For each part, a copy on this machine is preferred.
        parts = [_find_copy(kept, rank, machine) for rank in ranks_that_kept]
        plans.append(_ReadingPlan(parts, lacks_shards=False))
    return min(plans, key=lambda plan: len(plan.missing_on(machine)))


def _every_rank_finds_its_shard(kept: KeptStep, machine_of_rank: Sequence[int]) -> bool:
    """Returns True if each rank needs only what the ranks of its machine have kept.

    That is so under FSDP if the ranks are as many as before, and on the machines where they were.
    (HSDP and pipelines are left out: a rank need not have kept everything that it needs.)

    Args:
        kept: the step.
        machine_of_rank: the machine of each rank of this run.
    """
    if kept.strategy != "fsdp" or kept.world_size != len(machine_of_rank):
        return False

    # `_find_copy` prefers a copy on the given machine, but there may be none. And if there is one,
    # it may have been written by a rank of the machine, or sent by another machine. Only the first
    # shows that the rank was on this machine before.
    for rank, machine in enumerate(machine_of_rank):
        part = _find_copy(kept, rank, machine)
        lies_here = part.machine == machine
        was_written_here = part.writer_machine == machine
        if not (lies_here and was_written_here):
            return False
    return True


def _find_copy(kept: KeptStep, rank: int, machine: int) -> PartReport:
    """Returns a copy of a rank's part: the one on the given machine, if it has one."""
    copies = kept.copies_of(rank)
    for copy in copies:
        if copy.machine == machine:
            return copy
    return copies[0]


def _check_memory(plan: _ReadingPlan, machine: int) -> None:
    """Checks that this machine has room for the parts that it lacks.

    Args:
        plan: the parts that the ranks of this machine are going to read.
        machine: the number of this machine.

    Raises:
        CheckpointError: the machine has too little free memory.
    """
    needed = sum(part.num_bytes for part in plan.missing_on(machine))
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
    present_rank = collectives.topology.rank

    def read_states_on_this_rank() -> dict[str, str]:
        """Reads the random states that this rank has to read for all ranks.

        Returns:
            The states by the number of the rank that has kept them: `{"3": "..."}`. The numbers and
            the states are texts, because the answers of ranks are sent as JSON.
        """
        texts = {}
        for rank_that_kept in range(kept.world_size):
            # There may be several copies of what a rank has kept, on different machines. Only the
            # first one is read, by the present rank that has it in the memory of its machine.
            copies = kept.copies_of(rank_that_kept)
            if copies and copies[0].holder == present_rank:
                state = read_random_state(copies[0].path)
                texts[str(rank_that_kept)] = rng_state_to_text(state)
        return texts

    states: list[Any] = [None] * kept.world_size
    for texts in gather_answers(collectives, RESUMING_FROM_MEMORY, read_states_on_this_rank):
        for rank_that_kept, text in texts.items():
            states[int(rank_that_kept)] = rng_state_from_text(text)
    return states


def _plan_transfers(
    plan_of_machine: Mapping[int, _ReadingPlan], machine_of_rank: Sequence[int]
) -> list[_Transfer]:
    """Lists the parts to send to other machines, in an order that is the same on all ranks.

    Args:
        plan_of_machine: the parts that each machine is going to read, by its number.
        machine_of_rank: the machine of each rank of this run.
    """
    transfers = []
    for machine, plan in plan_of_machine.items():
        first_rank_on_machine = machine_of_rank.index(machine)
        for part in plan.missing_on(machine):
            transfers.append(_Transfer(part, receiver=first_rank_on_machine))
    return transfers


def _transfer_parts(
    collectives: Collectives,
    transfers: Sequence[_Transfer],
    machine_of_rank: Sequence[int],
    received: ExitStack,
) -> dict[int, str]:
    """Sends and receives the parts that machines lack. All ranks call this with the same transfers.

    In a transfer, the holder of the part and the receiver are ranks of this run. `part.rank` is the
    rank that wrote the part, perhaps in an earlier attempt with other machines.

    Args:
        collectives: the collectives of the run.
        transfers: the parts to send.
        machine_of_rank: the machine of each rank of this run.
        received: stack that frees the parts that were received.

    Returns:
        The paths of the parts that were sent to this machine, by the rank that wrote the part.
    """
    topology = collectives.topology

    # The keys are the ranks that wrote the parts. They are texts, because JSON has no other keys.
    paths_of_this_rank: dict[str, str] = {}
    for transfer in transfers:
        if topology.rank == transfer.part.holder:
            _send(transfer)
        if topology.rank == transfer.receiver:
            paths_of_this_rank[str(transfer.part.rank)] = _receive(transfer, received)

    # One rank has received a part for all ranks of its machine.
    paths_of_each_rank = gather_answers(
        collectives, RESUMING_FROM_MEMORY, lambda: paths_of_this_rank
    )
    paths: dict[int, str] = {}
    for rank, paths_of_rank in enumerate(paths_of_each_rank):
        if machine_of_rank[rank] == topology.node_rank:
            paths |= {int(writer): path for writer, path in paths_of_rank.items()}
    return paths


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
