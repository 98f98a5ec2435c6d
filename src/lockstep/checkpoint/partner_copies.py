"""Copies what each rank keeps to another machine, so that no step is lost when a machine fails.

A rank keeps its part of each step in an *area* of memory, and *seals* the area once it is complete.
The machines form a ring. Each rank sends its area to the rank with the same local rank on the next
machine, its *partner*, and receives an area from the machine before. If the next machine has fewer
ranks, some of its ranks receive from two. A thread does this over a process group of its own, while
the training goes on. At the end all ranks meet. If each of them has sent its part, every rank knows
that the whole step is on two machines, and may overwrite the step before. If a part is missing, all
ranks keep the step before, and overwrite the parts of the incomplete one.

Only state that no other machine has needs a copy: shards (FSDP), stages (pipelines) and virtual
ranks (DiLoCo). State that is equal on all ranks is on every machine anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.memory_area import PAGE_BYTES, Area, read_seal
from lockstep.communication.groups import open_groups
from lockstep.machine.topology import MAX_SENDERS_PER_RANK

_WAIT_FOR_SEAL_S = 0.001


class Partners(NamedTuple):
    """The ranks of other machines that a rank exchanges its areas with."""

    receiver: int
    """The rank that it sends to."""
    senders: list[int]
    """The ranks that it receives from."""


@dataclass
class Inbox:
    """The two areas that hold what this rank receives from one other rank."""

    sender: int
    areas: Sequence[Area]
    """Two areas, which are written in turn."""
    next_area: int
    """The index of the area that is written next."""


class PartnerCopies:
    """Sends the areas of this rank to another machine, and receives areas from another machine.

    All ranks must create one together.

    Args:
        receiver: the rank that this rank sends to.
        inboxes: one inbox for each rank that this rank receives from.
        has_given_up: function that returns True once this rank has stopped keeping steps.
        timeout: how long the other ranks may take; None for torch's default.
    """

    def __init__(
        self,
        receiver: int,
        inboxes: Sequence[Inbox],
        *,
        has_given_up: Callable[[], bool],
        timeout: timedelta | None,
    ) -> None:
        self._receiver = receiver
        self._inboxes = inboxes
        self._has_given_up = has_given_up
        all_ranks = range(dist.get_world_size())
        self._group = open_groups(
            [list(all_ranks)], "copies of kept steps", timeout=timeout, cpu_tensors_only=True
        )
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._copy_is_dropped = False
        """True if the area of the present step will have no seal."""
        self.last_step_is_complete = False
        """True if all ranks have sent their parts of the step in the last exchange."""
        self.last_duration_s: float | None = None
        """How long the last exchange took, counted from when both sides had something to send."""

    @property
    def num_senders(self) -> int:
        """From how many ranks this rank receives areas."""
        return len(self._inboxes)

    def start(self, area: Area | None, serial: int) -> None:
        """Starts the thread that sends an area once it is sealed, and receives the partners' areas.

        All ranks call this with the same serial number, after `wait`.

        Args:
            area: the area with this rank's part of the step; None if the rank has stopped keeping
                steps.
            serial: the serial number of the step, see `memory_area.Seal`.
        """
        self._copy_is_dropped = False
        self.last_step_is_complete = False

        # A daemon thread does not keep the process alive while it waits for a rank that has died.
        self._thread = threading.Thread(
            target=self._run, args=(area, serial), name="lockstep-partner", daemon=True
        )
        self._thread.start()

    def drop_copy(self) -> None:
        """Tells the thread that the area given to `start` will not be sealed.

        The partner is sent a page without a seal, and keeps the step before.
        """
        self._copy_is_dropped = True

    def wait(self) -> None:
        """Waits until all ranks have finished the exchange that `start` began.

        Raises:
            Exception: the connection to another rank is broken.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None

        # The error is that of this exchange alone, not of a later one.
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def _run(self, area: Area | None, serial: int) -> None:
        """Runs the exchange in the thread, and stores an error for `wait` to raise."""
        try:
            self._exchange(area, serial)
        except Exception as error:
            self._error = error

    def _exchange(self, area: Area | None, serial: int) -> None:
        """Sends this rank's area, receives the areas of others, and waits for all ranks to finish.

        Each rank sends the first page of its area, and then the content:

            first page       what follows
            with a seal      the content, of which the seal says how large it is
            without a seal   nothing: the sender has no part of this step
        """
        # Without an area, or if the copy to it has failed or was dropped, the page has no seal.
        page = _page_without_seal() if area is None else self._wait_for_sealed_page(area, serial)
        seal = read_seal(page.numpy().data)
        lacks_part = seal is None

        # 1. Exchange the first pages.
        sends = [self._send(page)]
        received_pages = [self._receive_page(inbox) for inbox in self._inboxes]

        # The time is taken from here on. Until now, this rank may have waited for others to make
        # their copies; from now on it only waits for the network.
        begun_at_s = time.perf_counter()

        # 2. Exchange the contents.
        if area is not None and seal is not None:
            sends.append(self._send(area.content(seal)))
        for inbox, received_page in zip(self._inboxes, received_pages, strict=True):
            self._receive_content(inbox, received_page)

        for send in sends:
            send.wait()
        self.last_duration_s = time.perf_counter() - begun_at_s

        # 3. All ranks meet, so that each of them knows whether the whole step is on two machines.
        num_missing_parts = torch.tensor(1 if lacks_part else 0)
        dist.all_reduce(num_missing_parts, group=self._group)
        self.last_step_is_complete = num_missing_parts.item() == 0

        # The two areas of an inbox are written in turn, so that the last complete step remains
        # while the next one is being received. An incomplete step is overwritten by the next one.
        if self.last_step_is_complete:
            for inbox in self._inboxes:
                inbox.next_area = 1 - inbox.next_area

    def _receive_page(self, inbox: Inbox) -> Tensor:
        """Receives the first page of the area of another rank."""
        page = _page_without_seal()
        self._receive(page, inbox.sender)
        return page

    def _receive_content(self, inbox: Inbox, page: Tensor) -> None:
        """Receives the content of another rank's area, if its first page has a seal.

        Args:
            inbox: the areas for the copies of that rank.
            page: the first page of its area, which was received before.
        """
        seal = read_seal(page.numpy().data)
        if seal is None:  # the sender has no part of this step, so nothing follows
            return

        copy = inbox.areas[inbox.next_area]
        memory_for_content = copy.begin_copy(seal)
        self._receive(memory_for_content, inbox.sender)
        copy.finish_copy(page)  # writes the page, with the seal in it

    def _wait_for_sealed_page(self, area: Area, serial: int) -> Tensor:
        """Waits until an area is sealed with the serial number, and returns its first page.

        Another thread may seal the area, once it has copied everything from the GPU. If that copy
        fails, so that this rank gives up, or if the copy is dropped, a page without a seal is
        returned.
        """
        while True:
            page = area.first_page()
            seal = read_seal(page.numpy().data)
            if seal is not None and seal.serial == serial:
                return page
            if self._has_given_up() or self._copy_is_dropped:
                return _page_without_seal()
            time.sleep(_WAIT_FOR_SEAL_S)

    def _send(self, tensor: Tensor) -> dist.Work:
        work = dist.isend(tensor, self._receiver, group=self._group)
        assert work is not None  # this rank is in the group
        return work

    def _receive(self, tensor: Tensor, sender: int) -> None:
        dist.recv(tensor, sender, group=self._group)


def _page_without_seal() -> Tensor:
    """Returns the first page of an area that holds nothing."""
    return torch.zeros(PAGE_BYTES, dtype=torch.uint8)


def find_partners(machine_and_local_rank: Sequence[tuple[int, int]]) -> list[Partners] | None:
    """Decides to which rank of the next machine each rank sends its copies.

    All ranks compute this from the same numbers, so they agree. Example: ranks 0 and 1 are on
    machine 0, and rank 2 is on machine 1. Ranks 0 and 1 send to rank 2, and rank 2 sends to rank 0.

    Args:
        machine_and_local_rank: the number of the machine and the local rank, for each rank.

    Returns:
        The partners of each rank. None if there is only one machine, or if the ranks of a machine
        are too few to receive from all ranks of the machine before.
    """
    # The machines form a ring: the last one sends to the first.
    num_ranks = len(machine_and_local_rank)
    ring = _ranks_of_machines(machine_and_local_rank)
    if len(ring) == 1:
        return None

    receiver_of: dict[int, int] = {}
    senders_of: dict[int, list[int]] = {rank: [] for rank in range(num_ranks)}
    for position, ranks in enumerate(ring):
        next_ranks = ring[(position + 1) % len(ring)]
        if len(ranks) > MAX_SENDERS_PER_RANK * len(next_ranks):
            return None
        for index, rank in enumerate(ranks):
            receiver = next_ranks[index % len(next_ranks)]
            receiver_of[rank] = receiver
            senders_of[receiver].append(rank)

    return [Partners(receiver_of[rank], senders_of[rank]) for rank in range(num_ranks)]


def _ranks_of_machines(machine_and_local_rank: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Returns the ranks of each machine, in the order of their local ranks.

    With ranks 0 and 2 on machine 0, and ranks 1 and 3 on machine 1: `[[0, 2], [1, 3]]`.

    Args:
        machine_and_local_rank: the number of the machine and the local rank, for each rank.
    """
    places = []
    for rank, (machine, local_rank) in enumerate(machine_and_local_rank):
        places.append((machine, local_rank, rank))

    ranks_of_machine: dict[int, list[int]] = {}
    for machine, _local_rank, rank in sorted(places):
        ranks_of_machine.setdefault(machine, []).append(rank)
    return list(ranks_of_machine.values())
