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
from functools import partial
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
from lockstep.errors import CheckpointError
from lockstep.machine.control_groups import available_memory
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
    only_local_shards: bool
    """See `read_step`."""

    def missing_on(self, machine: int) -> list[PartReport]:
        """Returns the parts that must be sent to a machine before it can read."""
        return [part for part in self.parts if part.holder_machine != machine]


def fetch_step(
    collectives: Collectives, kept: KeptStep, module_names: Sequence[str], received: ExitStack
) -> dict[str, Any]:
    """Returns the states of a kept step, as `read_step` does. All ranks call this for one step.

    1. Each rank plans for all machines what they read, from the same facts.
    2. The ranks exchange the random states.
    3. Each machine is sent the parts that it lacks.
    4. Each rank reads the parts from the memory of its machine.

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

    # 1. Every rank needs the plans of all machines, to know which parts it has to send.
    plan_of_machine: dict[int, _ReadingPlan] = {}
    for each_machine in sorted(set(machine_of_rank)):
        plan_of_machine[each_machine] = _plan_reading(kept, machine_of_rank, each_machine)
    plan = plan_of_machine[machine]
    run_on_all_ranks(collectives, RESUMING_FROM_MEMORY, lambda: _check_memory(plan, machine))

    # 2.
    random_states = _gather_random_states(collectives, kept)

    # 3.
    transfers = _plan_transfers(plan_of_machine, machine_of_rank)
    path_of_received_part = _transfer_parts(collectives, transfers, machine_of_rank, received)

    # 4.
    paths_here = []
    for part in plan.parts:
        is_here = part.holder_machine == machine
        paths_here.append(part.path if is_here else path_of_received_part[part.writer_rank])
    read = partial(
        read_step,
        paths_here,
        module_names,
        random_states,
        only_local_shards=plan.only_local_shards,
    )
    return run_on_all_ranks(collectives, RESUMING_FROM_MEMORY, read)


def _plan_reading(kept: KeptStep, machine_of_rank: Sequence[int], machine: int) -> _ReadingPlan:
    """Decides which parts the ranks of a machine read.

    Args:
        kept: the step.
        machine_of_rank: the machine of each rank of this run.
        machine: the number of the machine.
    """
    if _every_rank_finds_its_shard(kept, machine_of_rank):
        ranks_on_machine = [rank for rank, where in enumerate(machine_of_rank) if where == machine]
        return _plan_own_shards(kept, ranks_on_machine, machine, len(machine_of_rank))
    return _plan_whole_state(kept, machine)


def _plan_own_shards(
    kept: KeptStep, ranks_on_machine: Sequence[int], machine: int, world_size: int
) -> _ReadingPlan:
    """Plans that a machine reads only what its own ranks have kept. That is all in its memory."""
    parts = [_find_copy_preferably_on(machine, kept, rank) for rank in ranks_on_machine]
    # The shards of ranks on other machines are left out of the tensors.
    other_machines_have_ranks = len(ranks_on_machine) < world_size
    return _ReadingPlan(parts, only_local_shards=other_machines_have_ranks)


def _plan_whole_state(kept: KeptStep, machine: int) -> _ReadingPlan:
    """Plans that a machine reads the whole state.

    Each complete set of ranks has kept the whole state. The machine reads the parts of one set: of
    the set that needs the fewest parts from other machines.
    """
    plans = []
    for ranks_that_kept in kept.complete_sets:
        parts = [_find_copy_preferably_on(machine, kept, rank) for rank in ranks_that_kept]
        plans.append(_ReadingPlan(parts, only_local_shards=False))
    return min(plans, key=lambda plan: len(plan.missing_on(machine)))


def _every_rank_finds_its_shard(kept: KeptStep, machine_of_rank: Sequence[int]) -> bool:
    """Returns True if each rank needs only what the ranks of its machine have kept.

    Under FSDP, each rank does if the ranks are as many as before, and on the machines where they
    were. (HSDP and pipelines are left out: a rank need not have kept everything that it needs.)

    Args:
        kept: the step.
        machine_of_rank: the machine of each rank of this run.
    """
    if kept.strategy != "fsdp" or kept.world_size != len(machine_of_rank):
        return False

    for rank, machine in enumerate(machine_of_rank):
        part = _find_copy_preferably_on(machine, kept, rank)
        is_held_here = part.holder_machine == machine
        was_written_here = part.writer_machine == machine  # otherwise the rank was elsewhere before
        if not (is_held_here and was_written_here):
            return False
    return True


def _find_copy_preferably_on(machine: int, kept: KeptStep, rank: int) -> PartReport:
    """Returns the copy of a rank's part on a machine or, without one, a copy on another machine."""
    copies = kept.copies_of(rank)
    for copy in copies:
        if copy.holder_machine == machine:
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
    """Returns the random states of the ranks that have kept a step; None where it is not known.

    All ranks call this. Each of them reads some of the states, and all get the states of all.
    """
    texts_of_ranks = gather_answers(
        collectives,
        RESUMING_FROM_MEMORY,
        lambda: _read_random_states(kept, collectives.topology.rank),
    )
    states: list[Any] = [None] * kept.world_size
    for texts in texts_of_ranks:
        for writer_rank, text in texts.items():
            states[int(writer_rank)] = rng_state_from_text(text)
    return states


def _read_random_states(kept: KeptStep, rank: int) -> dict[str, str]:
    """Reads the random states of a kept step of which a rank is the first holder.

    Returns:
        The states by the rank that has written them: `{"3": "..."}`. The ranks and the states are
        texts, because they are sent as JSON.
    """
    texts = {}
    for writer_rank in range(kept.world_size):
        copies = kept.copies_of(writer_rank)  # there may be several, on different machines
        if copies and copies[0].holder_rank == rank:
            state = read_random_state(copies[0].path)
            texts[str(writer_rank)] = rng_state_to_text(state)
    return texts


def _plan_transfers(
    plan_of_machine: Mapping[int, _ReadingPlan], machine_of_rank: Sequence[int]
) -> list[_Transfer]:
    """Lists the parts to send to other machines, in an order that is the same on all ranks.

    The holder of a part sends it to the first rank of the machine that needs it.

    Args:
        plan_of_machine: the parts that each machine is going to read, by its number, in the same
            order on all ranks.
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

    Three ranks play a role for each part. For example:

        writer     rank 3 of an earlier attempt, perhaps with other machines, has written the part
        holder     rank 0 of this run finds it in the memory of its machine, and sends it
        receiver   rank 4 of this run receives it for all ranks of its machine

    All ranks on the machine of rank 4 return `{3: "/proc/1234/fd/5"}`.

    Args:
        collectives: the collectives of the run.
        transfers: the parts to send.
        machine_of_rank: the machine of each rank of this run.
        received: stack that frees the parts that were received.

    Returns:
        The paths of the parts that were sent to this machine, by the rank that wrote the part.
    """
    topology = collectives.topology
    received_here: list[tuple[int, str]] = []  # the writer and the path of each part
    for transfer in transfers:
        if topology.rank == transfer.part.holder_rank:
            _send(transfer)
        if topology.rank == transfer.receiver:
            path = _receive(transfer, received)
            received_here.append((transfer.part.writer_rank, path))

    # Tell the other ranks of the machine.
    received_by_rank = gather_answers(collectives, RESUMING_FROM_MEMORY, lambda: received_here)
    path_by_writer_rank: dict[int, str] = {}
    for rank, writers_and_paths in enumerate(received_by_rank):
        if machine_of_rank[rank] == topology.node_rank:
            path_by_writer_rank.update(dict(writers_and_paths))
    return path_by_writer_rank


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
    dist.recv(Area(path).whole(transfer.part.num_bytes), transfer.part.holder_rank)
    return path
