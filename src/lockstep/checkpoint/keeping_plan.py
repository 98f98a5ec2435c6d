"""Decides whether the steps of a run can be kept in memory, and which machines get copies of them.

All ranks tell each other what they need before they keep their first step. Each of them makes the
plan from the same answers, so that all have the same one.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.checkpoint.partner_copies import Partners, find_partners
from lockstep.machine.topology import MAX_SENDERS_PER_RANK, OWN_AREAS_PER_RANK
from lockstep.units import format_bytes

MAX_SHARE_OF_FREE_MEMORY = 0.8
"""Keeping steps may take up to this share of the free memory: the script needs some of the rest."""


class StepsCannotBeKept(Exception):
    """No rank keeps steps, for a reason that all of them know.

    Args:
        found: the reason.
        advice: what the user can do about it.
    """

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found)
        self.found = found
        self.advice = advice


@dataclass(frozen=True)
class RankNeeds:
    """What a rank needs to keep its steps, and what it has. All values can be sent as JSON."""

    bytes_of_step: int
    """How much memory one copy of its state takes, with the header."""
    bytes_of_areas: list[int]
    """How much memory each of its areas takes already."""
    available: int | None
    """How much memory is free on its machine; None if that is unknown."""
    machine: int
    local_rank: int
    has_own_parts: bool
    """True if the rank has state that other ranks lack, such as shards."""
    problem: str | None
    """The error that was raised when its state was collected, if there was one."""


@dataclass(frozen=True)
class KeepingPlan:
    """How the ranks keep steps. All ranks have the same plan."""

    each_machine_has_all: bool
    """True if the ranks of each machine together have the whole state."""
    partners: list[Partners] | None
    """For each rank, the ranks of other machines with which it exchanges copies. None if there are
    no copies on other machines: there is one machine, or each has the whole state anyway, or a
    machine has too few ranks to receive them."""
    bytes_of_machine: Mapping[int, int]
    """How many bytes of a step the ranks of a machine keep, by the number of the machine."""
    announcement: str
    """Tells the user that every step is kept, and how much memory that takes."""

    @property
    def announcement_checksum(self) -> str:
        """A checksum of the announcement. A later attempt announces only what has changed."""
        return f"{zlib.crc32(self.announcement.encode()):08x}"


NOT_ANNOUNCED = f"{0:08x}"
"""Stands for the checksum of an announcement that was not made yet. All have the same length, so
that the size of a header is known before."""


def plan_keeping(needs: Sequence[RankNeeds]) -> KeepingPlan:
    """Decides how the ranks keep steps.

    Args:
        needs: what each rank needs, by rank.

    Raises:
        StepsCannotBeKept: the state of a rank cannot be kept, or a machine has too little memory.
    """
    problems = [need.problem for need in needs if need.problem is not None]
    if problems:
        raise StepsCannotBeKept(problems[0], "let state_dict() return what a checkpoint can store")

    ranks_of_machine: dict[int, list[int]] = {}
    for rank, need in enumerate(needs):
        ranks_of_machine.setdefault(need.machine, []).append(rank)

    # A single machine, and a machine that has the whole state, needs no copies elsewhere.
    each_machine_has_all = not any(need.has_own_parts for need in needs)
    needs_partners = len(ranks_of_machine) > 1 and not each_machine_has_all
    partners: list[Partners] | None = None
    if needs_partners:
        partners = find_partners([(need.machine, need.local_rank) for need in needs])

    bytes_of_machine: dict[int, int] = {}
    for machine, ranks in ranks_of_machine.items():
        _check_memory_of_machine(ranks, needs, partners)
        bytes_of_machine[machine] = sum(needs[rank].bytes_of_step for rank in ranks)

    announcement = _announcement(
        list(ranks_of_machine.values()), needs, partners, needs_partners=needs_partners
    )
    return KeepingPlan(each_machine_has_all, partners, bytes_of_machine, announcement)


def _senders_to(rank: int, partners: Sequence[Partners] | None) -> list[int]:
    """Returns the ranks that send their copies to a rank."""
    return [] if partners is None else partners[rank].senders


def _bytes_of_used_areas(
    rank: int, needs: Sequence[RankNeeds], partners: Sequence[Partners] | None
) -> int:
    """Returns how much memory the areas of a rank will take, those for copies included."""
    bytes_of_step = needs[rank].bytes_of_step
    for sender in _senders_to(rank, partners):
        bytes_of_step += needs[sender].bytes_of_step
    return OWN_AREAS_PER_RANK * bytes_of_step


def _bytes_to_allocate(
    rank: int, needs: Sequence[RankNeeds], partners: Sequence[Partners] | None
) -> int:
    """Returns how much memory the areas of a rank will take in addition to what they have.

    After a restart, the areas have the memory that an earlier attempt has used. Only the areas that
    the rank is going to use count: others keep their memory until a later step than the resumed one
    is complete.
    """
    num_used_areas = OWN_AREAS_PER_RANK * (1 + len(_senders_to(rank, partners)))
    bytes_there = sum(needs[rank].bytes_of_areas[:num_used_areas])
    return max(0, _bytes_of_used_areas(rank, needs, partners) - bytes_there)


def _check_memory_of_machine(
    ranks: Sequence[int], needs: Sequence[RankNeeds], partners: Sequence[Partners] | None
) -> None:
    """Checks that a machine has enough free memory for the areas of its ranks.

    Args:
        ranks: the ranks on the machine.
        needs: what each rank needs, by rank.
        partners: the partners of each rank; None if there are no copies on other machines.

    Raises:
        StepsCannotBeKept: it has too little.
    """
    new_bytes = sum(_bytes_to_allocate(rank, needs, partners) for rank in ranks)
    available = needs[ranks[0]].available  # on the machine, so all its ranks say the same
    if available is not None and new_bytes > MAX_SHARE_OF_FREE_MEMORY * available:
        raise StepsCannotBeKept(
            f"it takes {format_bytes(new_bytes)} of memory on a machine, and "
            f"{format_bytes(available)} are free",
            "use fsdp, which divides the state, start fewer processes, or free some memory",
        )


def _announcement(
    ranks_of_machines: Sequence[Sequence[int]],
    needs: Sequence[RankNeeds],
    partners: Sequence[Partners] | None,
    *,
    needs_partners: bool,
) -> str:
    """Returns the line that says that every step is kept, and how much memory that takes.

    Args:
        ranks_of_machines: for each machine, its ranks.
        needs: what each rank needs, by rank.
        partners: the partners of each rank; None if there are no copies on other machines.
        needs_partners: True if there should be copies on other machines.
    """
    bytes_of_rank = [_bytes_of_used_areas(rank, needs, partners) for rank in range(len(needs))]
    bytes_of_machines = []
    for ranks in ranks_of_machines:
        bytes_of_machines.append(sum(bytes_of_rank[rank] for rank in ranks))
    most_of_rank = format_bytes(max(bytes_of_rank))
    most_of_machine = format_bytes(max(bytes_of_machines))

    copies = "two copies"  # in the two areas of a rank
    note = ""
    if partners is not None:
        copies = "two copies on its machine and two on another one"
    elif needs_partners:
        # A rank can receive the copies of at most `MAX_SENDERS_PER_RANK` ranks.
        note = (
            f"; one machine has more than {MAX_SENDERS_PER_RANK} times as many ranks as the "
            "machine that would get its copies, so that no machine has a copy of the shards of "
            "another one"
        )
    return (
        f"every step is kept in memory: {copies}, {most_of_rank} for a rank at most, "
        f"{most_of_machine} on a machine at most{note}"
    )
