"""Copies what each rank keeps to another machine, so that no step is lost with a machine.

The machines form a ring. A rank sends what it has kept to the rank with its local rank on the next
machine, its *partner*, and receives that of the machine before. If the next machine has fewer
ranks, some of them have two partners. All this happens in a thread, through a process group of its
own, while the training goes on. At the end all ranks meet: then every rank knows that the step is
on two machines everywhere, and may overwrite the step before.

Only what no other machine has is worth a copy: shards (FSDP), stages (pipelines), virtual ranks
(DiLoCo). What is equal on all ranks is on every machine anyway.
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
from lockstep.distributed.topology import MAX_SENDERS_PER_RANK

_WAIT_FOR_SEAL_S = 0.001


class Partners(NamedTuple):
    """The ranks of other machines with which a rank exchanges what they keep."""

    receiver: int
    """The rank to which it sends."""
    senders: list[int]
    """The ranks from which it receives."""


@dataclass
class Inbox:
    """What this rank receives from one other rank."""

    sender: int
    areas: Sequence[Area]
    """Two areas, which are written in turn."""
    next_area: int
    """The number of the one that is written next."""


class PartnerCopies:
    """Sends the areas of this rank, and receives those of another machine. All ranks open it.

    Args:
        receiver: the rank to which this one sends.
        inboxes: of the ranks from which this one receives.
        has_given_up: returns True once this rank keeps nothing any more.
        timeout: how long the other ranks may take; None: torch's default.
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
        self.last_duration_s: float | None = None
        """How long the last exchange took, from when both sides had something to send."""

    def start(self, area: Area | None, serial: int) -> None:
        """Starts to send an area, as soon as it is sealed, and to receive those of the partners.

        All ranks call it for the same serial number, after `wait`.

        Args:
            area: what this rank has kept; None: it keeps nothing any more.
            serial: of what is being kept; see `memory_area.Seal`.
        """
        # A daemon, because it may wait for a rank that has died when this process ends.
        self._thread = threading.Thread(
            target=self._run, args=(area, serial), name="lockstep-partner", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until all ranks have sent and received what was started.

        Raises:
            Exception: the connection to another rank is broken.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error

    def _run(self, area: Area | None, serial: int) -> None:
        """Runs in the thread; keeps the error, if there is one."""
        try:
            self._exchange(area, serial)
        except Exception as error:
            self._error = error

    def _exchange(self, area: Area | None, serial: int) -> None:
        """Sends an area and receives others, and waits until all ranks have done so."""
        page = torch.zeros(PAGE_BYTES, dtype=torch.uint8)  # without a seal
        if area is not None:
            page = self._sealed_page(area, serial)
        sent = [self._send(page)]
        received_pages = []
        for inbox in self._inboxes:
            received_page = torch.empty_like(page)
            self._receive(received_page, inbox.sender)
            received_pages.append(received_page)
        begun_at_s = time.perf_counter()
        seal = read_seal(page.numpy().data)
        if area is not None and seal is not None:
            sent.append(self._send(area.content(seal)))
        for inbox, received_page in zip(self._inboxes, received_pages, strict=True):
            received_seal = read_seal(received_page.numpy().data)
            if received_seal is None:  # that rank keeps nothing any more
                continue
            place = inbox.areas[inbox.next_area]
            self._receive(place.begin_copy(received_seal), inbox.sender)
            place.finish_copy(received_page)
            inbox.next_area = 1 - inbox.next_area
        for work in sent:
            work.wait()
        self.last_duration_s = time.perf_counter() - begun_at_s
        dist.all_reduce(torch.zeros(1), group=self._group)

    def _sealed_page(self, area: Area, serial: int) -> Tensor:
        """Returns the first page of an area, as soon as it is sealed with a serial number.

        The area may be sealed by another thread, when that has copied everything from the GPU. The
        page has no seal if that fails.
        """
        while True:
            page = area.first_page()
            seal = read_seal(page.numpy().data)
            if seal is not None and seal.serial == serial:
                return page
            if self._has_given_up():
                return torch.zeros_like(page)
            time.sleep(_WAIT_FOR_SEAL_S)

    def _send(self, tensor: Tensor) -> dist.Work:
        work = dist.isend(tensor, self._receiver, group=self._group)
        assert work is not None  # this rank is in the group
        return work

    def _receive(self, tensor: Tensor, sender: int) -> None:
        dist.recv(tensor, sender, group=self._group)


def find_partners(places: Sequence[tuple[int, int]]) -> list[Partners] | None:
    """Returns the partners of all ranks, which are the same for all that ask.

    Args:
        places: of all ranks, the number of the machine and the local rank.

    Returns:
        None if there is one machine, or if one has more ranks than those of the next can receive
        from.
    """
    ranks_of_machine: dict[int, list[int]] = {}
    for (machine, _), rank in sorted(zip(places, range(len(places)), strict=True)):
        ranks_of_machine.setdefault(machine, []).append(rank)
    ring = list(ranks_of_machine.values())
    if len(ring) == 1:
        return None
    receiver_of: dict[int, int] = {}
    senders_of: dict[int, list[int]] = {rank: [] for rank in range(len(places))}
    for position, ranks in enumerate(ring):
        next_ranks = ring[(position + 1) % len(ring)]
        if len(ranks) > MAX_SENDERS_PER_RANK * len(next_ranks):
            return None
        for place, rank in enumerate(ranks):
            receiver = next_ranks[place % len(next_ranks)]
            receiver_of[rank] = receiver
            senders_of[receiver].append(rank)
    return [Partners(receiver_of[rank], senders_of[rank]) for rank in range(len(places))]
