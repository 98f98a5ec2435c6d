"""Keeps a copy of each step in memory that outlives the ranks: an in-memory checkpoint.

After a failure, the launcher starts new ranks, which resume from the last step that was kept, so
that only the step under way is lost. A kept step holds what `world.checkpoint(...)` would save. It
lies in the launcher's memory: each rank writes to two *areas* in turn (`memory_area`), and *seals*
an area once it is complete. Nothing is written to a disk.

New ranks read a kept step like a checkpoint on disk (`kept_reading`). State that exists on one
machine only is also sent to another machine (`partner_copies`).

A step is kept when the training loop asks a loader for its next micro-batch, and an optimizer has
stepped since the loop last asked. By then the loop has also done what follows the optimizer's step
(schedulers, averages of weights, counters), and the position in the data lies between two global
batches. A loop that gets its batches from elsewhere calls `checkpoint.step()` instead.

A rank overwrites the older of its two areas, and only after all ranks of its machine have sealed
the newer step. Otherwise, a fast rank could overwrite its part of the last complete step while a
slow rank is still writing the next one, and if the slow rank was killed then, no complete step
would be left. So there is a complete step at every moment. After a failure it is the last step or,
if a rank was killed while it was writing, the step before.

On the CPU, everything is copied at once: a thread would take the same time from the same cores.
From a GPU, a thread copies while the next step computes (`background_copy`). Tensors that the
forward pass may change, such as buffers, are first copied on the GPU, and the optimizer's step
waits until the rest is copied.

If keeping every step takes more than a small part of the time, only every k-th step is kept, unless
the user asked for every step (`copy_interval`).
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.background_copy import BackgroundCopy
from lockstep.checkpoint.copy_interval import CopyInterval
from lockstep.checkpoint.kept_layout import KeptLayout, Section
from lockstep.checkpoint.kept_reading import KeptStep, report_parts
from lockstep.checkpoint.memory_area import Area, Seal, size_of_area
from lockstep.checkpoint.partner_copies import Inbox, PartnerCopies, Partners, find_partners
from lockstep.distributed.collectives import Collectives
from lockstep.errors import CheckpointError, LockstepError, warn
from lockstep.machine.control_groups import available_memory
from lockstep.machine.topology import (
    AREAS_PER_RANK,
    MAX_SENDERS_PER_RANK,
    OWN_AREAS_PER_RANK,
)
from lockstep.session.extension import Extension
from lockstep.session.step import Step
from lockstep.torch_compat import copy_to_each
from lockstep.units import format_bytes

MAX_SHARE_OF_FREE_MEMORY = 0.8
"""Keeping steps may take up to this share of the free memory: the script needs some of the rest."""
MAX_WAIT_FOR_PEERS_S = 1.0
"""How long a rank waits for the others to seal the previous step. They have taken part in the step
after it, so they seal it soon, unless a rank has died or has stopped keeping steps."""
POLL_INTERVAL_S = 20e-6
NOT_ANNOUNCED = f"{0:08x}"
"""Stands for the checksum of an announcement that was not made yet. All have the same length, so
that the size of a header is known before."""
BACKGROUND_DEVICES = ("cuda",)
"""The types of devices from which a thread copies while the next step computes."""


class TakenState(NamedTuple):
    """The state of the training at this moment."""

    facts: dict[str, Any]
    """The contents of a checkpoint's manifest, with the number of the step under `step`."""
    sections: list[Section]


class KeptSteps(Extension):
    """Keeps the steps of the training in the memory areas of this rank.

    Args:
        folder: the folder of the checkpoints that the kept steps belong to.
        collectives: the collectives of the run.
        step: the step of the run, which counts the optimizer steps.
        take_state: function that returns the present state of the training.
        steady_ids: function that returns the ids of *steady* tensors: those that change only in the
            step of a prepared optimizer.
        say: function that prints a line on rank 0.
        every_step: True to keep every step whatever it costs, and to fail if memory is short.
        timeout: how long a rank may wait for another one; None for torch's default.
        bandwidth: bytes a second that one machine sends to another; None if it was not measured.
    """

    _announced = NOT_ANNOUNCED
    """A checksum of what rank 0 has said last about the memory that steps take."""

    def __init__(
        self,
        folder: Path,
        collectives: Collectives,
        step: Step,
        take_state: Callable[[], TakenState],
        steady_ids: Callable[[], set[int]],
        say: Callable[[str], None],
        *,
        every_step: bool,
        timeout: timedelta | None,
        bandwidth: float | None,
    ) -> None:
        topology = collectives.topology
        self.folder = str(folder.absolute())
        self._folders: list[str] = []
        """The paths of the folder on the machines of the run."""
        self._collectives = collectives
        self._topology = topology
        self._step = step
        self._take_state = take_state
        self._steady_ids = steady_ids
        self._background: BackgroundCopy | None = None
        if collectives.device.type in BACKGROUND_DEVICES:
            self._background = BackgroundCopy()
        self._say = say
        self._must_keep_every_step = every_step
        self._timeout = timeout
        self._bandwidth = bandwidth
        self._each_machine_has_all = True
        """True if the ranks of each machine together have the whole state."""
        self._partner: PartnerCopies | None = None
        """Copies the areas to another machine. None if there is no other machine, or if each
        machine has the whole state anyway."""
        self._bytes_on_machine = 0
        """How many bytes of a step the ranks of this machine keep."""
        self._layout = KeptLayout(topology.local_rank, topology.local_size)
        self._areas_of_ranks: list[list[Area]] = []
        """The areas of each rank: the two that it writes to, and two more for each rank of another
        machine whose copies it may receive. There is a list for each local rank that the launcher
        has started in any attempt. Empty before `open`."""
        self._own_areas: list[Area] = []
        """The two areas to which this rank writes its steps in turn."""
        self._destinations_of_area: dict[int, list[Tensor]] = {}
        """The tensors in an area that the values are copied to, by the number of the area."""
        self._layout_version_of_area: dict[int, int] = {}
        """For each area, the version of the layout to which `_destinations_of_area` belongs."""
        self._attempt = 0
        self._serial = 0
        """Numbers the kept steps, see `memory_area.Seal`."""
        self._last_area = 0
        """The number of the area that was sealed last."""
        self._areas_of_resumed_step: set[str] = set()
        """The paths of the areas that hold the step that the run resumed from. They must not be
        overwritten until a later step is complete."""
        self._resumed_step_is_released = False
        """True once a later step is complete. By then the memory of ranks that no longer exist has
        been freed, too."""
        self._is_on = False
        """True while the ranks keep steps. All ranks switch it off together, if steps cannot be
        kept."""
        self._has_given_up = False
        """True if this rank alone has stopped keeping steps. It still takes part in the decisions
        of all ranks."""
        self._num_copies = 0
        """How many steps of this attempt were kept."""
        self._interval = CopyInterval(collectives, say)
        """Chooses whether every step is kept, or every k-th."""
        self._last_step_number = -1
        """How many optimizer steps were done when a step was last kept or passed over."""
        self._last_time_s = 0.0
        self._clones_every_source = False
        """True once a tensor that was taken to be steady has changed outside the optimizer's step.
        From then on the background copy never copies from the training's own tensors."""
        self._copied_with_new_layout = False
        """True if the last copy was the first one to its area, or the first one after the layout
        has changed."""
        self._copy_s: float | None = None
        """How long the training stood still while the last copy was made or started. None if this
        was recorded already, or if the copy went to new memory, which takes several times as
        long."""
        self._waited_s = 0.0
        """How long the training has waited since then for the background copy to end."""

    # After a start

    def open(self) -> None:
        """Opens the areas of all ranks of this machine. A second call does nothing.

        Raises:
            OSError: the launcher has ended, or runs in another container.
        """
        if self._areas_of_ranks:
            return

        # The launcher gives the paths of all areas on this machine, rank by rank.
        paths_of_areas = self._topology.memory
        areas = [Area(path) for path in paths_of_areas]
        for begin in range(0, len(areas), AREAS_PER_RANK):
            self._areas_of_ranks.append(areas[begin : begin + AREAS_PER_RANK])

        # A rank writes to its first two areas. The others receive copies from another machine.
        areas_of_this_rank = self._areas_of_ranks[self._topology.local_rank]
        self._own_areas = areas_of_this_rank[:OWN_AREAS_PER_RANK]

    def report(self) -> list[dict[str, Any]]:
        """Describes what lies in the areas that this rank looks after, one report for each part.

        The ranks exchange these reports to choose the step that they resume.
        """
        areas: list[Area] = []
        for areas_of_rank in self._looked_after():
            areas += areas_of_rank
        topology = self._topology
        return report_parts(areas, holder_rank=topology.rank, holder_machine=topology.node_rank)

    def _looked_after(self) -> list[list[Area]]:
        """Returns the areas of this rank, and those of some ranks that no longer exist.

        An earlier attempt may have had more ranks. 5 ranks before, 2 ranks now: the rank with local
        rank 0 looks after the areas of the ranks 0, 2 and 4, the other one after those of 1 and 3.
        """
        return self._areas_of_ranks[self._topology.local_rank :: self._topology.local_size]

    def start(self, attempt: int, folders: list[str], resumed: KeptStep | None) -> None:
        """Starts to keep steps. It is called once the training has its initial or resumed state.

        Args:
            attempt: a random number that identifies this attempt, the same on all ranks.
            folders: the paths of the checkpoint folder on the machines of the run.
            resumed: the step in memory that the training resumed from; None if it started anew or
                resumed from a checkpoint on disk.
        """
        self._attempt = attempt
        self._folders = folders

        # The serial numbers of the steps go on from that of the resumed step.
        self._serial = 0 if resumed is None else resumed.serial

        # The user was told what the steps of the earlier attempt take.
        self._announced = NOT_ANNOUNCED if resumed is None else resumed.announced

        # The resumed step must survive until a later step is complete.
        self._areas_of_resumed_step = set()
        if resumed is not None:
            self._areas_of_resumed_step = resumed.paths_on(self._topology.node_rank)
        self._resumed_step_is_released = False

        # The present state need not be copied: after a failure, the next start makes the same
        # initial state, or resumes from the same step or checkpoint. So this step counts as kept.
        self._last_step_number = self._step.number
        self._last_time_s = time.perf_counter()
        self._num_copies = 0
        self._interval = CopyInterval(self._collectives, self._say)
        self._copy_s = None  # how long the last copy took; there is none yet
        self._waited_s = 0.0  # how long the training has waited for the end of that copy

        self._has_given_up = False
        self._is_on = True

    def stop(self) -> None:
        """Stops keeping steps. The step kept last stays in memory until another one is kept."""
        self._wait_for_copy()
        self._is_on = False

        # Drop the references to the areas. `open` opens them again.
        self._areas_of_ranks = []
        self._own_areas = []
        self._destinations_of_area = {}
        self._layout_version_of_area = {}
        # The layout refers to the tensors of the training. An empty one refers to none.
        self._layout = KeptLayout(self._topology.local_rank, self._topology.local_size)

    def forget_other_steps(self) -> None:
        """Deletes all steps in the areas but the resumed one, by breaking the seals of the areas.

        This must not happen before a new step is about to be kept: until then, the areas may hold a
        step of another checkpoint that the script resumes next.
        """
        for areas_of_rank in self._looked_after():
            for area in areas_of_rank:
                if area.path not in self._areas_of_resumed_step:
                    area.break_seal()

    def close(self, failed: bool) -> None:
        """Waits until the partner machine has the last step, unless this rank has failed.

        The thread that sends the step waits for its seal. If the background copy has failed, there
        will be no seal and the thread would wait forever, so the background copy is waited for
        first: an error in it makes the thread give up.
        """
        if self._partner is not None and not failed:
            self._wait_for_copy()
            self._partner.wait()
        self._partner = None

    def release(self) -> None:
        """Drops the references to the training state and the areas, at the end of the run."""
        self.stop()
        self._take_state = _nothing_to_take
        self._steady_ids = set

    # In each step

    def batch_is_done(self) -> None:
        """Keeps the present step, if an optimizer has stepped since the last call."""
        if self._is_on and self._step.number != self._last_step_number:
            self.keep()

    def keep(self) -> None:
        """Keeps the present step if it is one of those to be kept: every step, or every k-th."""
        self._wait_for_copy()  # the previous copy must have ended
        step_time_s = self._measure_step()

        number = self._step.number
        self._last_step_number = number
        must_be_kept = number % self._interval.every == 0
        if must_be_kept:
            phase_before = self._step.enter_phase("checkpoint")
            try:
                self._keep(number, step_time_s)
            finally:
                self._step.enter_phase(phase_before)

        self._last_time_s = time.perf_counter()

    def _measure_step(self) -> float:
        """Returns how many seconds the present step took, and records what the last copy cost.

        The training has waited for the end of the last copy here, and perhaps before the step of
        the optimizer. These waits are part of the cost of the copy, and not of the time of the
        step: the two are compared to choose the interval between copies.
        """
        waited_s = self._waited_s
        self._waited_s = 0.0
        self._note_cost_of_last_copy(waited_s)
        return time.perf_counter() - self._last_time_s - waited_s

    def _keep(self, number: int, step_time_s: float) -> None:
        """Copies the present state to an area, and starts to send the area to the partner.

        Args:
            number: how many optimizer steps are done.
            step_time_s: how long the last of them took.
        """
        # The step that was kept before must be on two machines before its predecessor is lost.
        self._wait_for_partner()

        # A rank that has given up copies nothing and has no area to send. But it counts the steps,
        # and takes part below, where all ranks communicate.
        self._serial += 1
        area = self._copy_with_timing(number)

        ranks_have_decided_to_keep_none = not self._is_on  # which they do at their first copy
        if ranks_have_decided_to_keep_none:
            return
        self._num_copies += 1

        # Choose how often a step is kept, unless the user asked for every step.
        self._interval.note_step_time(step_time_s)
        if not self._must_keep_every_step:
            self._interval.choose(self._num_copies, self._expected_link_s())

        if self._partner is not None:
            self._partner.start(area, self._serial)

    def _wait_for_partner(self) -> None:
        """Waits until the partner machine has the previous step, and notes how long that took."""
        if self._partner is not None:
            self._partner.wait()
            if self._partner.last_duration_s is not None:
                self._interval.note_link_time(self._partner.last_duration_s)

    def _copy_with_timing(self, number: int) -> Area | None:
        """Copies the present state to an area, and notes in `_copy_s` how long that took.

        The first copy of a layout to an area is left out: it takes several times as long as others.

        Returns:
            As `_update_and_copy`; None also if this rank has given up before.
        """
        begun_at_s = time.perf_counter()
        self._copied_with_new_layout = False
        area = None if self._has_given_up else self._update_and_copy(number)
        if not self._copied_with_new_layout:
            self._copy_s = time.perf_counter() - begun_at_s
        return area

    def _update_and_copy(self, number: int) -> Area | None:
        """Collects the present state, and copies it to an area.

        Args:
            number: how many optimizer steps are done.

        Returns:
            The area. None if this rank has a problem and gives up, while the others go on, or if
            the ranks have decided to keep no steps.
        """
        is_first_copy = self._num_copies == 0
        if is_first_copy:
            return self._make_first_copy(number)
        try:
            facts, sections = self._take_state()
            self._layout.update(sections)  # finds the tensors to copy, and their places in an area
            return self._copy(number, facts)
        except Exception as error:
            self._give_up(error)
            return None

    def _make_first_copy(self, number: int) -> Area | None:
        """Does what `_update_and_copy` does, at the first step that is kept.

        All ranks decide together whether steps can be kept at all, also about a problem that one of
        them has with its state.
        """
        problem: Exception | None = None
        facts: dict[str, Any] = {}
        area_bytes = 0  # how much memory a copy takes, with its header
        try:
            facts, sections = self._take_state()
            self._layout.update(sections)
            area_bytes = size_of_area(len(self._header(facts)), self._layout.num_bytes)
        except Exception as error:
            problem = error

        self._agree_to_keep_steps(area_bytes, problem)
        if not self._is_on:
            return None

        self.forget_other_steps()  # those of earlier attempts
        try:
            return self._copy(number, facts)
        except Exception as error:
            self._give_up(error)
            return None

    def _copy(self, num_steps: int, facts: dict[str, Any]) -> Area:
        """Copies the state to an area and seals it. If the state is on a GPU, a thread does that.

        Args:
            num_steps: how many optimizer steps are done.
            facts: what the header says about the state, see `TakenState`.

        Returns:
            The area, which may not be sealed yet.
        """
        header = self._header(facts)
        area_number = self._area_to_overwrite()
        area = self._own_areas[area_number]
        # `begin_writing` breaks the seal. If the area becomes larger or smaller, its memory moves,
        # and the views to which earlier steps were copied must be made again.
        memory_has_moved = area.begin_writing(len(header), self._layout.num_bytes)
        destinations = self._destinations_in(area, area_number, memory_has_moved)
        self._last_area = area_number

        # Copy, and then set the seal, which says that the area is complete.
        seal = partial(area.set_seal, self._attempt, self._serial, num_steps, header)
        if self._background is None:
            copy_to_each(destinations, self._layout.sources)
            seal()
        else:
            self._copy_in_background(self._background, destinations, seal)
        return area

    def _destinations_in(
        self, area: Area, area_number: int, memory_has_moved: bool
    ) -> list[Tensor]:
        """Returns the tensors to copy to: views of an area's memory, one for each source.

        Those of the last copy to this area are used again, unless the area has other memory now, or
        the layout (which tensors are copied to where) has changed since.
        """
        has_new_layout = self._layout_version_of_area.get(area_number) != self._layout.version
        self._copied_with_new_layout = has_new_layout
        if memory_has_moved or has_new_layout:
            self._destinations_of_area[area_number] = self._layout.destinations_in(area)
            self._layout_version_of_area[area_number] = self._layout.version
        return self._destinations_of_area[area_number]

    def _header(self, facts: dict[str, Any]) -> bytes:
        """Returns the header of an area: what is copied to it, and which rank has copied it.

        Args:
            facts: the facts of the state, see `TakenState`.
        """
        topology = self._topology
        all_facts = {
            **facts,
            "folders": self._folders,
            "rank": topology.rank,
            "world_size": topology.size,
            "machine": topology.node_rank,
            "ranks_on_machine": topology.local_size,
            "machine_has_whole_state": self._each_machine_has_all,
            "announced": self._announced,
        }
        # The sections are JSON already: encoding them again would take too long.
        facts_json = json.dumps(all_facts)
        sections_json = self._layout.header_sections
        return f'{{"facts": {facts_json}, "sections": {sections_json}}}'.encode()

    def _copy_in_background(
        self,
        background: BackgroundCopy,
        destinations: Sequence[Tensor],
        seal: Callable[[], None],
    ) -> None:
        """Copies tensors on the CPU at once, and starts to copy those on the GPU in a thread.

        A *steady* tensor changes only in the step of the optimizer, which waits for the thread. Any
        other tensor may change in the next forward pass, so the thread copies from a clone of it.

        Args:
            background: the copier with the thread.
            destinations: the tensors to copy to, one for each source of the layout.
            seal: the function that seals the area; it is called when everything is copied.
        """
        steady_ids = self._steady_ids()

        cpu_destinations: list[Tensor] = []
        cpu_sources: list[Tensor] = []
        gpu_destinations: list[Tensor] = []
        gpu_sources: list[Tensor] = []
        leaves = self._layout.leaves()
        sources = self._layout.sources
        for destination, source, leaf in zip(destinations, sources, leaves, strict=True):
            if source.device.type not in BACKGROUND_DEVICES:
                cpu_destinations.append(destination)
                cpu_sources.append(source)
                continue

            # The source is a tensor of the training state (the leaf), or some rows of it.
            is_steady = id(leaf) in steady_ids
            needs_clone = self._clones_every_source or not is_steady
            gpu_destinations.append(destination)
            gpu_sources.append(source.clone() if needs_clone else source)

        copy_to_each(cpu_destinations, cpu_sources)
        background.start(gpu_destinations, gpu_sources, seal)

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Waits until the tensors that the optimizer is about to change have been copied."""
        self._wait_for_copy()

    def _wait_for_copy(self) -> None:
        """Waits until the background copy of the last kept step has ended.

        Steady tensors, such as parameters, are copied without a clone: nothing should change them
        until the optimizer steps, and it waits here first. If the script has changed one of them
        nevertheless, all later copies are made from clones.
        """
        if self._background is None:
            return

        begun_at_s = time.perf_counter()
        try:
            no_source_has_changed = self._background.wait()
            if not no_source_has_changed:
                self._clones_every_source = True
        except Exception as error:
            self._give_up(error)
        self._waited_s += time.perf_counter() - begun_at_s

    def _area_to_overwrite(self) -> int:
        """Chooses which of this rank's two areas is written next, so that a complete step remains.

        Waits until the other ranks of the machine have sealed the previous step. Example: area 0
        has step 7, and area 1 has step 6. Step 8 is written to area 1. If step 7 stays incomplete,
        because another rank has given up, step 8 is written to area 0, and step 6 remains.

        Returns:
            The number of the area: 0 or 1.
        """
        is_first_copy = self._num_copies == 0
        if is_first_copy:
            return self._area_without_resumed_step(self._own_areas)

        area_of_previous_step = self._last_area
        area_of_older_step = 1 - self._last_area  # the older step is complete

        previous_is_complete = self._wait_for_previous_step()
        if not previous_is_complete:
            return area_of_previous_step

        self._release_resumed_step_once()
        return area_of_older_step

    def _release_resumed_step_once(self) -> None:
        """Gives up the step that the training resumed from, as a later step is complete.

        Parts of it may lie in areas that this attempt does not use; these are freed.
        """
        if not self._resumed_step_is_released:
            self._areas_of_resumed_step = set()
            self._free_unused_inboxes()
            self._free_areas_of_absent_ranks()
            self._resumed_step_is_released = True

    def _free_unused_inboxes(self) -> None:
        """Frees the areas of this rank for copies of ranks that send it none in this attempt."""
        num_senders = 0 if self._partner is None else self._partner.num_senders
        num_used = OWN_AREAS_PER_RANK * (1 + num_senders)
        for area in self._areas_of_ranks[self._topology.local_rank][num_used:]:
            area.free()

    def _wait_for_previous_step(self) -> bool:
        """Waits until all ranks of the machine have sealed the previous step.

        Returns:
            True if they have; False if the step stays incomplete.
        """
        deadline = time.perf_counter() + MAX_WAIT_FOR_PEERS_S
        while not self._last_is_complete():
            if time.perf_counter() > deadline or self._a_peer_has_given_up():
                return False
            time.sleep(POLL_INTERVAL_S)
        return True

    def _area_without_resumed_step(self, areas: Sequence[Area]) -> int:
        """Returns the index of the first area that holds no part of the resumed step.

        Until a later step is complete, the resumed one is the only complete step, so that it must
        not be overwritten. Of two areas that are written in turn, one does not hold it.
        """
        for index, area in enumerate(areas):
            if area.path not in self._areas_of_resumed_step:
                return index
        raise AssertionError("all areas hold the resumed step")

    def _last_is_complete(self) -> bool:
        """Returns True if all ranks of this machine have sealed the previous step."""
        previous_serial = self._serial - 1
        for areas_of_rank in self._areas_of_ranks[: self._topology.local_size]:
            seals = [area.seal for area in areas_of_rank]
            if not any(_is_of(seal, self._attempt, previous_serial) for seal in seals):
                return False
        return True

    def _a_peer_has_given_up(self) -> bool:
        """Returns True if a rank of this machine has stopped keeping steps in this attempt."""
        areas_of_present_ranks = self._areas_of_ranks[: self._topology.local_size]
        return any(areas[0].given_up_in == self._attempt for areas in areas_of_present_ranks)

    def _free_areas_of_absent_ranks(self) -> None:
        """Frees the areas of ranks that this attempt no longer has; local rank 0 does it."""
        if self._topology.local_rank != 0:
            return
        for areas_of_rank in self._areas_of_ranks[self._topology.local_size :]:
            for area in areas_of_rank:
                area.free()

    # What it costs

    def _agree_to_keep_steps(self, area_bytes: int, problem: Exception | None) -> None:
        """Decides with the other ranks whether steps are kept, and which machines get copies.

        All ranks call this when they are about to keep their first step. They exchange their needs
        once, so that all of them come to the same decision.

        Args:
            area_bytes: how much memory a copy of this rank takes.
            problem: the error met while the state of this rank was collected, if there was one.

        Raises:
            CheckpointError: every step was asked for, but a machine has too little memory or a
                state cannot be stored.
        """
        # The areas to which this rank writes, and those for copies that it receives.
        areas_of_this_rank = self._areas_of_ranks[self._topology.local_rank]
        answers = self._collectives.exchange(
            {
                "bytes": area_bytes,
                "held": [area.file_bytes for area in areas_of_this_rank],
                "available": available_memory(),
                "machine": self._topology.node_rank,
                "local_rank": self._topology.local_rank,
                "has_own_parts": self._layout.has_own_parts,
                "problem": None if problem is None else str(problem),
            }
        )

        problems = [answer["problem"] for answer in answers if answer["problem"] is not None]
        if problems:
            if self._must_keep_every_step and isinstance(problem, LockstepError):
                raise problem
            self._refuse(problems[0], "let state_dict() return what a checkpoint can store")
            return

        # Copies on other machines are only needed if each machine does not have the whole state.
        self._each_machine_has_all = not any(answer["has_own_parts"] for answer in answers)
        partners: list[Partners] | None = None
        if not self._each_machine_has_all:
            partners = find_partners(
                [(answer["machine"], answer["local_rank"]) for answer in answers]
            )

        # By rank: how many bytes its areas will take, and how many they take already.
        needed: list[int] = []
        held: list[int] = []
        ranks_of_machine: dict[int, list[int]] = {}
        for rank, answer in enumerate(answers):
            senders = [] if partners is None else partners[rank].senders
            bytes_a_step = answer["bytes"] + sum(answers[sender]["bytes"] for sender in senders)
            needed.append(OWN_AREAS_PER_RANK * bytes_a_step)

            # Areas that the rank does not use now may hold memory too, until a later step than the
            # resumed one is complete. So it is left out.
            num_areas = OWN_AREAS_PER_RANK * (1 + len(senders))
            held.append(sum(answer["held"][:num_areas]))
            ranks_of_machine.setdefault(answer["machine"], []).append(rank)

        for ranks in ranks_of_machine.values():
            new_bytes = sum(max(0, needed[rank] - held[rank]) for rank in ranks)
            self._check_memory(new_bytes, answers[ranks[0]]["available"])
            if not self._is_on:
                return

        ranks_here = ranks_of_machine[self._topology.node_rank]
        self._bytes_on_machine = sum(answers[rank]["bytes"] for rank in ranks_here)
        if partners is not None:
            areas_for_copies = areas_of_this_rank[OWN_AREAS_PER_RANK:]
            self._partner = self._open_partner_copies(
                areas_for_copies, partners[self._topology.rank]
            )

        needed_of_machines: list[int] = []
        for ranks in ranks_of_machine.values():
            needed_of_machines.append(sum(needed[rank] for rank in ranks))
        self._announce(
            max(needed),
            max(needed_of_machines),
            has_partners=partners is not None,
            num_machines=len(ranks_of_machine),
        )

    def _announce(
        self, most_of_rank: int, most_of_machine: int, *, has_partners: bool, num_machines: int
    ) -> None:
        """Prints that every step is kept, and how much memory the kept steps take.

        Nothing is printed if the attempt that kept the resumed step has printed the same.

        Args:
            most_of_rank: bytes that the areas of a rank take, at most.
            most_of_machine: bytes that the areas of all ranks of a machine take, at most.
            has_partners: True if the ranks send copies to other machines.
            num_machines: the number of machines in the run.
        """
        # A single machine, and a machine that has the whole state, needs no copies elsewhere.
        needs_partners = num_machines > 1 and not self._each_machine_has_all
        has_too_few_ranks_for_copies = needs_partners and not has_partners
        copies = "two copies"  # in the two areas of a rank
        note = ""
        if has_partners:
            copies = "two copies on its machine and two on another one"
        elif has_too_few_ranks_for_copies:
            # A rank can receive the copies of at most `MAX_SENDERS_PER_RANK` ranks.
            note = (
                f"; one machine has more than {MAX_SENDERS_PER_RANK} times as many ranks as the "
                "machine that would get its copies, so that no machine has a copy of the shards of "
                "another one"
            )
        line = (
            f"every step is kept in memory: {copies}, {format_bytes(most_of_rank)} for a rank at "
            f"most, {format_bytes(most_of_machine)} on a machine at most{note}"
        )
        checksum = f"{zlib.crc32(line.encode()):08x}"
        if checksum != self._announced:
            self._say(line)
            self._announced = checksum

    def _check_memory(self, new: int, available: int | None) -> None:
        """Stops keeping steps if a machine has too little free memory for them.

        Args:
            new: bytes that the areas of the machine's ranks will take in addition.
            available: bytes that are free on the machine; None if that is unknown.

        Raises:
            CheckpointError: the memory is too small, and every step was asked for.
        """
        if available is not None and new > MAX_SHARE_OF_FREE_MEMORY * available:
            self._refuse(
                f"it takes {format_bytes(new)} of memory on a machine, and "
                f"{format_bytes(available)} are free",
                "use fsdp, which divides the state, start fewer processes, or free some memory",
            )

    def _open_partner_copies(self, areas: Sequence[Area], partners: Partners) -> PartnerCopies:
        """Opens the connection over which ranks copy areas to other machines. All ranks call this.

        Args:
            areas: this rank's areas for the copies that it receives, two for each sender.
            partners: the ranks that this rank sends to and receives from.
        """
        inboxes = []
        for sender_index, sender in enumerate(partners.senders):
            # A sender writes to `OWN_AREAS_PER_RANK` areas, and each of them has a copy here.
            first_area = sender_index * OWN_AREAS_PER_RANK
            pair = areas[first_area : first_area + OWN_AREAS_PER_RANK]

            # One of the areas may hold a copy of the resumed step, which must not be overwritten.
            next_area = self._area_without_resumed_step(pair)
            inboxes.append(Inbox(sender, pair, next_area))

        return PartnerCopies(
            partners.receiver,
            inboxes,
            has_given_up=lambda: self._has_given_up,
            timeout=self._timeout,
        )

    def _refuse(self, found: str, advice: str) -> None:
        """Stops keeping steps on all ranks, for a reason that all of them know.

        Args:
            found: the reason.
            advice: what the user can do about it.

        Raises:
            CheckpointError: the user asked for every step to be kept.
        """
        self._is_on = False
        if self._must_keep_every_step:
            raise CheckpointError("keeping each step in memory", found, advice)
        self._say(f"steps are not kept in memory: {found}")

    def _give_up(self, problem: Exception) -> None:
        """Stops keeping steps on this rank, because its state can no longer be kept.

        Raises:
            Exception: the problem itself, if the user asked for every step to be kept.
        """
        self._has_given_up = True
        # The other ranks of the machine look for this in the first area of each rank.
        self._own_areas[0].give_up(self._attempt)
        if self._must_keep_every_step:
            raise problem
        warn(
            "steps are not kept in memory from here on",
            f"{type(problem).__name__}: {problem}",
            "let state_dict() return what a checkpoint can store",
            on_this_rank=True,
        )

    def _note_cost_of_last_copy(self, waited_s: float) -> None:
        """Records for how long the last copy held up the training, unless it was recorded before.

        The training waited while the copy was made or started (`_copy_s`), and then for the end of
        the background copy.

        Args:
            waited_s: how long it waited for the end of the background copy.
        """
        if self._copy_s is not None:
            self._interval.note_cost(self._copy_s + waited_s)
        self._copy_s = None

    def _expected_link_s(self) -> float:
        """Estimates how many seconds it takes to send this machine's part of a step to another.

        Returns 0 if nothing is sent, or if the speed of the network was not measured. In the second
        case, the training may have to wait for the first copy.
        """
        if self._partner is None or self._bandwidth is None:
            return 0.0
        return self._bytes_on_machine / self._bandwidth


def _nothing_to_take() -> TakenState:
    """Replaces the function that collects the training state once the run is over."""
    return TakenState({}, [])


def _is_of(seal: Seal | None, attempt: int, serial: int) -> bool:
    """Returns True if an area is sealed with this attempt and serial number."""
    return seal is not None and seal.attempt == attempt and seal.serial == serial
