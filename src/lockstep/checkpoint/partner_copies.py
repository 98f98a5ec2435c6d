"""Copies what each rank keeps to another machine, so that no step is lost with a machine.

The machines form a ring. A rank sends what it has kept to the rank with its local rank on the next
machine, its *partner*, and receives that of the machine before. Both happen in a thread, through a
process group of their own, while the training goes on. At the end all ranks meet: then every rank
knows that the step is on two machines everywhere, and may overwrite the step before.

Only what no other machine has is worth a copy: shards (FSDP), stages (pipelines), virtual ranks
(DiLoCo). What is equal on all ranks is on every machine anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.memory_area import PAGE_BYTES, Area, read_seal
from lockstep.communication.groups import open_groups

_WAIT_FOR_SEAL_S = 0.001


class PartnerCopies:
    """Sends the areas of this rank, and receives those of another machine. All ranks open it.

    Args:
        areas: the two areas for what is received.
        next_area: the number of the one that is written first.
        receiver: the rank to which this one sends.
        sender: the rank from which this one receives.
        has_given_up: returns True once this rank keeps nothing any more.
        timeout: how long the other ranks may take; None: torch's default.
    """

    def __init__(
        self,
        areas: Sequence[Area],
        *,
        next_area: int,
        receiver: int,
        sender: int,
        has_given_up: Callable[[], bool],
        timeout: timedelta | None,
    ) -> None:
        self._areas = areas
        self._receiver = receiver
        self._sender = sender
        self._has_given_up = has_given_up
        all_ranks = range(dist.get_world_size())
        self._group = open_groups(
            [list(all_ranks)], "copies of kept steps", timeout=timeout, cpu_tensors_only=True
        )
        self._next_area = next_area
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.last_duration_s: float | None = None
        """How long the last exchange took, from when both sides had something to send."""

    def start(self, area: Area | None, serial: int) -> None:
        """Starts to send an area, as soon as it is sealed, and to receive one.

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
        """Sends an area and receives one, and waits until all ranks have done so."""
        page = torch.zeros(PAGE_BYTES, dtype=torch.uint8)  # without a seal
        if area is not None:
            page = self._sealed_page(area, serial)
        received_page = torch.empty_like(page)
        sent = [self._send(page)]
        self._receive(received_page)
        begun_at_s = time.perf_counter()
        seal = read_seal(page.numpy().data)
        if area is not None and seal is not None:
            sent.append(self._send(area.content(seal)))
        place = self._areas[self._next_area]
        received_seal = read_seal(received_page.numpy().data)
        if received_seal is not None:
            self._receive(place.begin_copy(received_seal))
        for work in sent:
            work.wait()
        self.last_duration_s = time.perf_counter() - begun_at_s
        if received_seal is not None:
            place.finish_copy(received_page)
            self._next_area = 1 - self._next_area
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

    def _receive(self, tensor: Tensor) -> None:
        dist.recv(tensor, self._sender, group=self._group)


def find_partners(places: Sequence[tuple[int, int]], rank: int) -> tuple[int, int] | None:
    """Returns the rank that a rank sends to, and the one that it receives from.

    Args:
        places: of all ranks, the number of the machine and the local rank.
        rank: the rank.

    Returns:
        None if there is one machine, or if the machines have different numbers of ranks.
    """
    rank_at: Mapping[tuple[int, int], int] = {place: other for other, place in enumerate(places)}
    machines = sorted({machine for machine, _ in places})
    local_ranks = sorted({local_rank for _, local_rank in places})
    is_grid = len(places) == len(machines) * len(local_ranks) == len(rank_at)
    if len(machines) == 1 or not is_grid:
        return None
    machine, local_rank = places[rank]
    position = machines.index(machine)
    next_machine = machines[(position + 1) % len(machines)]
    machine_before = machines[position - 1]
    return rank_at[next_machine, local_rank], rank_at[machine_before, local_rank]
