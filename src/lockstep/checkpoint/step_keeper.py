"""Keeps the steps of one attempt: copies the state of the training to this rank's memory areas.

A rank writes to two areas in turn. It overwrites the older one, and only after all ranks of its
machine have sealed the newer step. Otherwise, a fast rank could overwrite its part of the last
complete step while a slow rank is still writing the next one, and if the slow rank was killed then,
no complete step would be left. So there is a complete step at every moment. After a failure it is
the last step or, if a rank was killed while it was writing, the step before.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint.copy_interval import CopyInterval
from lockstep.checkpoint.keeping_plan import NOT_ANNOUNCED, KeepingPlan
from lockstep.checkpoint.kept_layout import KeptLayout, Section
from lockstep.checkpoint.kept_reading import KeptStep
from lockstep.checkpoint.machine_areas import MachineAreas, OwnArea, first_area_not_in
from lockstep.checkpoint.memory_area import Area
from lockstep.checkpoint.partner_copies import Inbox, PartnerCopies, Partners
from lockstep.checkpoint.state_copier import StateCopier
from lockstep.distributed.collectives import Collectives
from lockstep.errors import warn
from lockstep.machine.topology import Topology

MAX_WAIT_FOR_PEERS_S = 1.0
"""How long a rank waits for the others to seal the previous step. They have taken part in the step
after it, so they seal it soon, unless a rank has died or has stopped keeping steps."""
POLL_INTERVAL_S = 20e-6


class TakenState(NamedTuple):
    """The state of the training at this moment."""

    facts: dict[str, Any]
    """The contents of a checkpoint's manifest, with the number of the step under `step`."""
    sections: list[Section]


class KeptTraining(NamedTuple):
    """The training whose steps are kept."""

    folder: Path
    """The folder of the checkpoints that the kept steps belong to."""
    collectives: Collectives
    take_state: Callable[[], TakenState]
    """Returns the present state of the training."""
    ids_changed_only_by_optimizer: Callable[[], set[int]]
    """Returns the ids of the tensors that change only in the step of a prepared optimizer."""
    say: Callable[[str], None]
    """Prints a line on rank 0."""
    every_step: bool
    """True to keep every step whatever it costs, and to fail if memory is short."""
    timeout: timedelta | None
    """How long a rank may wait for another one; None for torch's default."""
    bandwidth: float | None
    """Bytes a second that one machine sends to another; None if it was not measured."""


class Attempt(NamedTuple):
    """A start of the run's ranks, which begins from its initial state or from a resumed one."""

    number: int
    """A random number that identifies the attempt, the same on all ranks."""
    folders: list[str]
    """The paths of the checkpoint folder on the machines of the run."""
    resumed: KeptStep | None
    """The step in memory that the training resumed from; None if it started anew or resumed from a
    checkpoint on disk."""

    @property
    def first_serial(self) -> int:
        """The serial number of the resumed step, from which those of this attempt go on."""
        return 0 if self.resumed is None else self.resumed.serial

    @property
    def announcement_checksum(self) -> str:
        """The checksum of what the user was told in the attempt that kept the resumed step."""
        return NOT_ANNOUNCED if self.resumed is None else self.resumed.announcement_checksum

    def areas_of_resumed_step(self, machine: int) -> set[str]:
        """Returns the paths of the areas on a machine that hold the resumed step.

        They must not be overwritten until a later step is complete.
        """
        return set() if self.resumed is None else self.resumed.paths_on(machine)


def collect_state(training: KeptTraining, layout: KeptLayout) -> dict[str, Any]:
    """Collects the present state of the training: finds the tensors to copy, and their places.

    Args:
        training: the training.
        layout: the layout that is updated to copy this state.

    Returns:
        What a header says about the state, see `TakenState`.

    Raises:
        CheckpointError: the state contains something that cannot be stored.
    """
    facts, sections = training.take_state()
    layout.update(sections)
    return facts


def header_of(
    facts: dict[str, Any],
    layout: KeptLayout,
    attempt: Attempt,
    topology: Topology,
    *,
    machine_has_whole_state: bool,
    announcement_checksum: str,
) -> bytes:
    """Returns the header of an area: what is copied to it, and which rank has copied it.

    Args:
        facts: the facts of the state, see `TakenState`.
        layout: which tensors are copied, and to which places.
        attempt: the present attempt.
        topology: the place of this rank in the run.
        machine_has_whole_state: True if the ranks of each machine together have the whole state.
        announcement_checksum: a checksum of what the user was told about the memory that steps
            take. After a restart the user is told only what is new.
    """
    all_facts = {
        **facts,
        "folders": attempt.folders,
        "rank": topology.rank,
        "world_size": topology.size,
        "machine": topology.node_rank,
        "ranks_on_machine": topology.local_size,
        "machine_has_whole_state": machine_has_whole_state,
        "announcement_checksum": announcement_checksum,
    }
    # The sections are JSON already: encoding them again would take too long.
    facts_json = json.dumps(all_facts)
    return f'{{"facts": {facts_json}, "sections": {layout.header_sections}}}'.encode()


class StepKeeper:
    """Keeps the steps of an attempt, once all ranks have agreed to keep them.

    All ranks make one at the same step, which they keep by `keep` at once.

    Args:
        training: the training.
        attempt: the present attempt.
        areas: the areas of the ranks of this machine.
        layout: which tensors are copied, and to which places.
        plan: what the ranks have agreed on.
        copier: copies the tensors.
    """

    def __init__(
        self,
        training: KeptTraining,
        attempt: Attempt,
        areas: MachineAreas,
        layout: KeptLayout,
        plan: KeepingPlan,
        copier: StateCopier,
    ) -> None:
        topology = training.collectives.topology
        self._training = training
        self._topology = topology
        self._attempt = attempt
        self._areas = areas
        self._own_areas = [OwnArea(area) for area in areas.own]
        self._layout = layout
        self._plan = plan
        self._copier = copier
        self._interval = CopyInterval(training.collectives, training.say)
        """Chooses whether every step is kept, or every k-th."""
        self._num_steps = 0
        """How many steps of this attempt were kept, the present one included. A rank that has given
        up counts them, too, so that all ranks have the same number."""
        self._last_area = 0
        """The index in `_own_areas` of the area that was sealed last."""
        self._areas_of_resumed_step = attempt.areas_of_resumed_step(topology.node_rank)
        """The paths of the areas that hold the step that the run resumed from, until a later step
        is complete."""
        self._unused_areas_are_freed = False
        """True once a later step than the resumed one is complete, parts of which may lie in areas
        that this attempt does not use."""
        self._given_up = threading.Event()
        """Set if this rank alone has stopped keeping steps. It still takes part in the decisions of
        all ranks."""
        self._copy_s: float | None = None
        """How long the training stood still while the last copy was made or started. None if this
        was recorded already, or if the copy went to new memory, which takes several times as
        long."""
        self._waited_s = 0.0
        """How long the training has waited since then for the background copy to end."""
        self._partner: PartnerCopies | None = None
        """Copies the areas to another machine; None if the plan has no such copies."""
        if plan.partners is not None:
            self._partner = self._open_partner_copies(plan.partners[topology.rank])

    def _open_partner_copies(self, partners: Partners) -> PartnerCopies:
        """Opens the connection over which ranks copy areas to other machines. All ranks call this.

        Args:
            partners: the ranks that this rank sends to and receives from.
        """
        inboxes = []
        for sender_index, sender in enumerate(partners.senders):
            # The copies of a sender are written to two areas in turn. If one of them holds a copy
            # of the resumed step, the first new copy is written to the other one.
            two_areas = self._areas.inbox(sender_index)
            first_to_overwrite = first_area_not_in(self._areas_of_resumed_step, two_areas)
            inboxes.append(Inbox(sender, two_areas, next_area=first_to_overwrite))

        return PartnerCopies(
            partners.receiver,
            inboxes,
            has_given_up=self._given_up.is_set,
            timeout=self._training.timeout,
        )

    @property
    def _serial(self) -> int:
        """The serial number of the present step, see `memory_area.Seal`."""
        return self._attempt.first_serial + self._num_steps

    @property
    def every(self) -> int:
        """The number of steps from one that is kept to the next: 1 if every step is kept."""
        return self._interval.every

    # In each step

    def finish_last_copy(self) -> float:
        """Waits until the last copy has ended, and records what it has cost.

        Returns:
            For how many seconds the training has waited for the end of the copy, here and before
            the step of the optimizer. This is part of the cost of the copy, and not of the time of
            the step: the two are compared to choose the interval between copies.
        """
        self.wait_for_copy()
        waited_s = self._waited_s
        self._waited_s = 0.0

        # The training stood still while the copy was made or started, and then for its end.
        if self._copy_s is not None:
            self._interval.note_cost(self._copy_s + waited_s)
        self._copy_s = None
        return waited_s

    def wait_for_copy(self) -> None:
        """Waits until the last copy has ended. If it has failed, this rank gives up.

        If the script has changed a tensor during the copy, only this step is dropped, and later
        ones are kept. Its area is never sealed.
        """
        begun_at_s = time.perf_counter()
        try:
            is_sealed = self._copier.wait()
            if not is_sealed and self._partner is not None:
                # The thread that sends areas to the partner would wait for the seal for ever.
                self._partner.drop_copy()
        except Exception as error:
            self._give_up(error)
        self._waited_s += time.perf_counter() - begun_at_s

    def keep(
        self, step_number: int, step_time_s: float, facts: dict[str, Any] | None = None
    ) -> None:
        """Copies the present state to an area, and starts to send the area to the partner.

        Args:
            step_number: how many optimizer steps are done.
            step_time_s: how long the last of them took.
            facts: what `collect_state` has returned for the present state, if it was called (for
                the first step of an attempt). None: it is called here.
        """
        # This copy overwrites the step before the last one. So the last one must be on two machines
        # first.
        self._wait_for_partner()

        # 1. Copy. A rank that has given up has no area to send. But it takes part in 2 and 3, where
        # all ranks communicate.
        self._num_steps += 1
        area = self._copy_or_give_up(step_number, facts)

        # 2. Choose how often a step is kept, unless the user asked for every step.
        self._interval.note_step_time(step_time_s)
        if not self._training.every_step:
            self._interval.choose(self._num_steps, self._expected_link_s())

        # 3. Send the area, and receive those of other machines.
        if self._partner is not None:
            self._partner.start(area, self._serial)

    def _wait_for_partner(self) -> None:
        """Waits until the partner machine has the previous step, and notes how long that took."""
        if self._partner is not None:
            self._partner.wait()
            if self._partner.last_duration_s is not None:
                self._interval.note_link_time(self._partner.last_duration_s)

    def _copy_or_give_up(self, step_number: int, facts: dict[str, Any] | None) -> Area | None:
        """Copies the present state to an area, and notes in `_copy_s` how long that took.

        Args:
            step_number: how many optimizer steps are done.
            facts: see `keep`.

        Returns:
            The area. None if this rank has given up, now or earlier, while the others go on.
        """
        has_given_up = self._given_up.is_set()
        if has_given_up:
            return None

        begun_at_s = time.perf_counter()
        try:
            if facts is None:
                facts = collect_state(self._training, self._layout)
            own_area = self._area_to_overwrite()
            memory_was_used_before = own_area.has_views_for(self._layout)
            self._copy(own_area, step_number, facts)
        except Exception as error:
            self._give_up(error)
            return None

        # A copy to new memory takes several times as long as others, so it is left out.
        if memory_was_used_before:
            self._copy_s = time.perf_counter() - begun_at_s
        return own_area.area

    def _copy(self, own_area: OwnArea, step_number: int, facts: dict[str, Any]) -> None:
        """Copies the state to an area and seals it. If the state is on a GPU, a thread does that.

        Args:
            own_area: the area, which may not be sealed yet when this method returns.
            step_number: how many optimizer steps are done.
            facts: what the header says about the state, see `TakenState`.
        """
        header = header_of(
            facts,
            self._layout,
            self._attempt,
            self._topology,
            machine_has_whole_state=self._plan.each_machine_has_all,
            announcement_checksum=self._plan.announcement_checksum,
        )
        destinations = own_area.begin_writing(len(header), self._layout)  # breaks the seal

        # The copier calls `seal_area` when everything is copied: the seal says that the area is
        # complete.
        seal_area = partial(
            own_area.area.set_seal, self._attempt.number, self._serial, step_number, header
        )
        self._copier.copy(
            destinations,
            self._layout,
            self._training.ids_changed_only_by_optimizer,
            seal_area,
        )

    def _give_up(self, problem: Exception) -> None:
        """Stops keeping steps on this rank, because its state can no longer be kept.

        Raises:
            Exception: the problem itself, if the user asked for every step to be kept.
        """
        self._given_up.set()  # tells the thread that sends areas to other machines
        self._areas.give_up(self._attempt.number)  # tells the other ranks of the machine
        if self._training.every_step:
            raise problem
        warn(
            "steps are not kept in memory from here on",
            found=f"{type(problem).__name__}: {problem}",
            do="let state_dict() return what a checkpoint can store",
            on_this_rank=True,
        )

    def _expected_link_s(self) -> float:
        """Estimates how many seconds it takes to send this machine's part of a step to another.

        Returns 0 if nothing is sent, or if the speed of the network was not measured. In the second
        case, the training may have to wait for the first copy.
        """
        bandwidth = self._training.bandwidth
        if self._partner is None or bandwidth is None:
            return 0.0
        return self._plan.bytes_of_machine[self._topology.node_rank] / bandwidth

    # Which area is written

    def _area_to_overwrite(self) -> OwnArea:
        """Chooses which of this rank's two areas is written next, so that a complete step remains.

        Example: area 0 has step 7, and area 1 has step 6. Step 8 is written to area 1. If step 7
        stays incomplete, because another rank has given up, step 8 is written to area 0, and step 6
        remains.
        """
        is_first_step = self._num_steps == 1
        if is_first_step:
            self._last_area = first_area_not_in(self._areas_of_resumed_step, self._areas.own)
        elif self._previous_step_is_complete():
            # The previous step is complete, so the one before it (or the resumed one) may go.
            self._areas_of_resumed_step = set()
            self._free_unused_areas_once()
            self._last_area = 1 - self._last_area
        # Otherwise the previous step is incomplete, and its own area is overwritten.
        return self._own_areas[self._last_area]

    def _previous_step_is_complete(self) -> bool:
        """Returns True if all ranks have sealed the previous step; False if it stays incomplete.

        If ranks send their areas to other machines, the exchange of the previous step has told them
        whether all parts are there. Otherwise, each machine has the whole state, and its ranks wait
        for each other here.
        """
        if self._partner is not None:
            return self._partner.last_step_is_complete

        attempt = self._attempt.number
        previous_serial = self._serial - 1
        deadline = time.perf_counter() + MAX_WAIT_FOR_PEERS_S
        while not self._areas.all_ranks_have_sealed(attempt, previous_serial):
            is_late = time.perf_counter() > deadline
            if is_late or self._areas.some_rank_has_given_up(attempt):
                return False
            time.sleep(POLL_INTERVAL_S)
        return True

    def _free_unused_areas_once(self) -> None:
        """Frees areas that this attempt does not use: parts of the resumed step may lie in them."""
        if not self._unused_areas_are_freed:
            num_senders = 0 if self._partner is None else self._partner.num_senders
            self._areas.free_unused(num_senders)
            self._unused_areas_are_freed = True

    # At the end

    def finish(self) -> None:
        """Waits until the last step is complete, and the partner machine has it.

        The thread that sends the step waits for its seal. If the background copy has failed, there
        will be no seal and the thread would wait forever, so the background copy is waited for
        first: an error in it makes the thread give up.
        """
        self.wait_for_copy()
        if self._partner is not None:
            self._partner.wait()
