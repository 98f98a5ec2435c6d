"""Keeps each step in memory that outlives the ranks, so that a failure costs the step under way.

Others call this in-memory checkpoints.

What is kept is what `world.checkpoint(...)` would save. It lies in memory of the launcher, two
*areas* for each rank (`memory_area`); the ranks that it starts after a failure read it like a
checkpoint on disk (`kept_reading`). Nothing is written to a disk. What no other machine has is sent
to one of them (`partner_copies`).

When it is kept: when the training loop asks a loader for its next micro-batch, and an optimizer has
stepped since it last asked. All that the loop does with a batch is done then, also what follows on
the optimizer's step (schedulers, averages of weights, counters), and the position in the data is
that between two global batches. A loop that has its batches from elsewhere calls
`checkpoint.step()`, which keeps too.

A rank overwrites the older of its areas, and only when all ranks of the machine have sealed the
newer one. Otherwise a rank that is ahead could overwrite its part of the last complete step while
another, which is then killed, still writes its part of the next. So at every moment there is a
complete step, and after a failure it is the last one or, if a rank was killed while it wrote, the
one before.

On the CPU everything is copied at once. A core copies 20 GB a second; in a thread it would take the
same time from the same cores. From a GPU a thread copies while the next step computes
(`background_copy`). What the forward pass may change, such as buffers, is copied on the GPU before,
and the optimizer's step waits until the rest is copied.

If keeping every step costs more than a small part of the time, every k-th step is kept, unless the
user wants every one (`copy_interval`).
"""

from __future__ import annotations

import json
import time
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
from lockstep.checkpoint.memory_area import Area, Seal
from lockstep.checkpoint.partner_copies import Inbox, PartnerCopies, Partners, find_partners
from lockstep.distributed.collectives import Collectives
from lockstep.distributed.control_groups import available_memory
from lockstep.distributed.topology import AREAS_PER_RANK, OWN_AREAS_PER_RANK
from lockstep.distributed.torch_compat import copy_to_each
from lockstep.errors import CheckpointError, LockstepError, warn
from lockstep.session.extension import Extension
from lockstep.session.step import Step
from lockstep.units import format_bytes

MAX_SHARE_OF_FREE_MEMORY = 0.8
"""Keeping steps may take this part of the free memory: the script needs some of the rest."""
MAX_WAIT_FOR_PEERS_S = 1.0
"""How long a rank waits for the others to seal the step before. They have taken part in the step
since, so they are about to; longer, only a rank that has died or that keeps nothing any more."""
POLL_INTERVAL_S = 20e-6
BACKGROUND_DEVICES = ("cuda",)
"""The types of devices from which a thread copies while the next step computes."""


class TakenState(NamedTuple):
    """The state of the training at this moment."""

    facts: dict[str, Any]
    """What the manifest of a checkpoint would say, with `step`."""
    sections: list[Section]


class KeptSteps(Extension):
    """Keeps steps in the areas of this rank.

    Args:
        folder: of the checkpoints that the kept steps belong to.
        collectives: of the run.
        step: of the run.
        take_state: returns the present state.
        steady_ids: returns the ids of tensors that only a prepared optimizer changes, in its step.
        say: prints a line on rank 0.
        every_step: True to keep every step whatever it costs, and to fail where memory is short.
        timeout: how long a rank may wait for another one; None: torch's default.
        bandwidth: bytes a second that a machine sends to another one; None: it was not measured.
    """

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
        """The paths that the folder has on the machines of the run."""
        self._collectives = collectives
        self._topology = topology
        self._step = step
        self._take_state = take_state
        self._steady_ids = steady_ids
        self._background: BackgroundCopy | None = None
        if collectives.device.type in BACKGROUND_DEVICES:
            self._background = BackgroundCopy(collectives.device)
        self._say = say
        self._every_step = every_step
        self._timeout = timeout
        self._bandwidth = bandwidth
        self._is_replica = True
        """True if no rank keeps anything that the ranks of each machine do not have together."""
        self._partner: PartnerCopies | None = None
        """Copies to another machine. None: there is none, or it has everything anyway."""
        self._bytes_on_machine = 0
        """How much the ranks of this machine keep of a step."""
        self._layout = KeptLayout(topology.local_rank, topology.local_size)
        self._slots: list[list[Area]] = []
        """The areas of each rank that the launcher has started in any attempt, by local rank. Empty
        before `open`."""
        self._own: list[Area] = []
        """The two areas of this rank. The others of its slot are for copies."""
        self._places: dict[int, list[Tensor]] = {}
        """The places in an area that the values are copied to, by the number of the area."""
        self._version_of_places: dict[int, int] = {}
        self._attempt = 0
        self._serial = 0
        """See `memory_area.Seal`."""
        self._last_area = 0
        """The number of the area that was sealed last."""
        self._protected: set[str] = set()
        """The areas with the step that was resumed, until a later one is complete."""
        self._has_freed_slots = False
        """True if the memory of ranks that are no longer there has been given back."""
        self._is_on = False
        self._has_given_up = False
        """True if this rank keeps nothing any more. It still takes part in what ranks decide."""
        self._num_copies = 0
        """How many steps of this attempt were kept."""
        self._interval = CopyInterval(collectives, say)
        """Every how many steps one is kept."""
        self._last_number = -1
        """The optimizer steps that were done when a step was last kept, or passed over."""
        self._last_time_s = 0.0
        self._was_changed = False
        """True if tensors have changed that only a prepared optimizer was to change."""
        self._copy_s: float | None = None
        """How long the last copy held up the training when it was made. None: none was made since
        that was last noted, or it went to new memory, which takes several times as long."""
        self._waited_s = 0.0
        """How long the training has waited for the last copy afterwards."""

    # After a start

    def open(self) -> None:
        """Opens the areas of all ranks of this machine; a second call does nothing.

        Raises:
            OSError: the launcher is gone, or in another container.
        """
        if self._slots:
            return
        areas = [Area(path) for path in self._topology.memory]
        for begin in range(0, len(areas), AREAS_PER_RANK):
            self._slots.append(areas[begin : begin + AREAS_PER_RANK])
        self._own = self._slots[self._topology.local_rank][:OWN_AREAS_PER_RANK]

    def report(self) -> list[dict[str, Any]]:
        """Returns the reports of the areas that this rank looks after."""
        areas: list[Area] = []
        for slot in self._looked_after():
            areas += slot
        topology = self._topology
        return report_parts(areas, holder=topology.rank, machine=topology.node_rank)

    def _looked_after(self) -> list[list[Area]]:
        """Returns the slots that this rank looks after: its own, and some that no rank has now."""
        return self._slots[self._topology.local_rank :: self._topology.local_size]

    def start(self, attempt: int, folders: list[str], resumed: KeptStep | None) -> None:
        """Begins to keep steps; to be called when the training has its state.

        Args:
            attempt: a random number, the same on all ranks.
            folders: the paths that the folder of the checkpoints has on the machines of the run.
            resumed: the step in memory that was resumed. None: the training goes on from elsewhere.
        """
        self._attempt = attempt
        self._folders = folders
        self._serial = 0 if resumed is None else resumed.serial
        self._protected = set()
        if resumed is not None:
            self._protected = resumed.paths_on(self._topology.node_rank)
        self._has_freed_slots = False
        self._last_number = self._step.number
        self._last_time_s = time.perf_counter()
        self._num_copies = 0
        self._interval = CopyInterval(self._collectives, self._say)
        self._copy_s = None
        self._waited_s = 0.0
        self._has_given_up = False
        self._is_on = True

    def stop(self) -> None:
        """Keeps nothing from now on. What is kept stays, until another step is kept."""
        self._wait_for_copy()
        self._is_on = False
        self._slots = []
        self._own = []
        self._places = {}
        self._version_of_places = {}
        self._layout = KeptLayout(self._topology.local_rank, self._topology.local_size)

    def forget_others(self) -> None:
        """Breaks the seals of what lies in the areas, except that of the step that was resumed.

        Not before something is kept: it may be of another checkpoint, which is resumed next.
        """
        for slot in self._looked_after():
            for area in slot:
                if area.path not in self._protected:
                    area.break_seal()

    def close(self, failed: bool) -> None:
        """Waits until the last step is with the partner, if this rank ends well.

        The partner's thread waits for the seal of that step. If the copy in the background has
        failed there will be none, which must be noticed first, or the thread would wait forever.
        """
        if self._partner is not None and not failed:
            self._wait_for_copy()
            self._partner.wait()
        self._partner = None

    def release(self) -> None:
        """Lets the state of the training and the areas go, at the end of the run."""
        self.stop()
        self._take_state = _nothing_to_take
        self._steady_ids = set

    # In each step

    def batch_is_done(self) -> None:
        """Keeps the step, if an optimizer has stepped since this was last called."""
        if self._is_on and self._step.number != self._last_number:
            self.keep()

    def keep(self) -> None:
        """Keeps the present step, unless it is one of those that are passed over."""
        self._wait_for_copy()
        step_time_s = time.perf_counter() - self._last_time_s - self._waited_s
        self._note_cost()
        number = self._step.number
        self._last_number = number
        if number % self._interval.every == 0:
            phase_before = self._step.enter_phase("checkpoint")
            try:
                self._keep(number, step_time_s)
            finally:
                self._step.enter_phase(phase_before)
        self._last_time_s = time.perf_counter()

    def _keep(self, number: int, step_time_s: float) -> None:
        """Copies the present state to an area, and seals it.

        Args:
            number: the optimizer steps that are done.
            step_time_s: how long the last of them took.
        """
        if self._partner is not None:
            self._partner.wait()  # until the last step that was kept is on two machines
            if self._partner.last_duration_s is not None:
                self._interval.note_link_time(self._partner.last_duration_s)
        begun_at_s = time.perf_counter()
        version_before = self._version_of_places.copy()
        area: Area | None = None
        self._serial += 1
        if not self._has_given_up:
            area = self._update_and_copy(number)
        if not self._is_on:
            return
        self._num_copies += 1
        if self._version_of_places == version_before:
            self._copy_s = time.perf_counter() - begun_at_s
        self._interval.note_step_time(step_time_s)
        if not self._every_step:
            self._interval.choose(self._num_copies, self._expected_link_s())
        if self._partner is not None:
            self._partner.start(area, self._serial)

    def _update_and_copy(self, number: int) -> Area | None:
        """Finds out what is to be copied, and copies it to an area.

        Args:
            number: the optimizer steps that are done.

        Returns:
            The area; None if this rank keeps nothing any more.
        """
        problem: Exception | None = None
        facts: dict[str, Any] = {}
        try:
            facts, sections = self._take_state()
            self._layout.update(sections)
        except Exception as error:
            problem = error
        if self._num_copies == 0:
            self._begin(problem)
        elif problem is not None:
            self._give_up(problem)
        if not self._is_on or self._has_given_up:
            return None
        if self._num_copies == 0:
            self.forget_others()
        try:
            return self._copy(number, facts)
        except Exception as error:
            self._give_up(error)
            return None

    def _copy(self, number: int, facts: dict[str, Any]) -> Area:
        """Copies what the layout names to an area, seals it, and returns it."""
        topology = self._topology
        all_facts = {
            **facts,
            "folders": self._folders,
            "rank": topology.rank,
            "world_size": topology.size,
            "machine": topology.node_rank,
            "ranks_on_machine": topology.local_size,
            "is_replica": self._is_replica,
        }
        facts_text = json.dumps(all_facts)
        sections_text = self._layout.header_sections
        header = f'{{"facts": {facts_text}, "sections": {sections_text}}}'.encode()
        place = self._area_to_overwrite()
        area = self._own[place]
        is_other_memory = area.begin(len(header), self._layout.num_bytes)
        if is_other_memory or self._version_of_places.get(place) != self._layout.version:
            self._places[place] = self._layout.places(area)
            self._version_of_places[place] = self._layout.version
        self._last_area = place
        seal = partial(area.set_seal, self._attempt, self._serial, number, header)
        if self._background is None:
            copy_to_each(self._places[place], self._layout.sources)
            seal()
        else:
            self._copy_in_background(self._background, self._places[place], seal)
        return area

    def _copy_in_background(
        self, background: BackgroundCopy, places: Sequence[Tensor], seal: Callable[[], None]
    ) -> None:
        """Starts to copy what is on the GPU, and copies everything else.

        What the next forward pass may change, such as buffers, is copied on the GPU first.

        Args:
            background: copies in a thread.
            places: where the sources are copied to.
            seal: is called when all is copied.
        """
        steady_ids = self._steady_ids()
        now: tuple[list[Tensor], list[Tensor]] = ([], [])
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        leaves = self._layout.leaves()
        for place, source, leaf in zip(places, self._layout.sources, leaves, strict=True):
            is_here = source.device.type not in BACKGROUND_DEVICES
            chosen = now if is_here else later
            is_steady = id(leaf) in steady_ids and not self._was_changed
            chosen[0].append(place)
            chosen[1].append(source if is_here or is_steady else source.clone())
        copy_to_each(*now)
        background.start(*later, seal)

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Waits until what the optimizer is about to change is copied."""
        self._wait_for_copy()

    def _wait_for_copy(self) -> None:
        """Waits for the copy of the last step that was kept.

        If something has changed meanwhile that was to be steady, everything is copied on the GPU
        first from now on.
        """
        if self._background is None:
            return
        begun_at_s = time.perf_counter()
        try:
            if not self._background.wait():
                self._was_changed = True
        except Exception as error:
            self._give_up(error)
        self._waited_s += time.perf_counter() - begun_at_s

    def _area_to_overwrite(self) -> int:
        """Returns the number of the area that is written next: not that of a complete step.

        Waits until the other ranks of the machine have sealed the step before.
        """
        if self._num_copies == 0:
            return self._first_unprotected(self._own)
        deadline = time.perf_counter() + MAX_WAIT_FOR_PEERS_S
        while not self._last_is_complete():
            if time.perf_counter() > deadline or self._a_peer_has_given_up():
                return self._last_area  # the other one has the last complete step
            time.sleep(POLL_INTERVAL_S)
        if not self._has_freed_slots:
            self._protected = set()
            self._free_unused_slots()
            self._has_freed_slots = True
        return 1 - self._last_area

    def _first_unprotected(self, areas: Sequence[Area]) -> int:
        """Returns the number of the first area without a part of the step that was resumed.

        There is one: of two areas that were written in turn, one has another step.
        """
        return next(i for i, area in enumerate(areas) if area.path not in self._protected)

    def _last_is_complete(self) -> bool:
        """Returns True if all ranks of this machine have sealed what this rank has sealed last."""
        serial = self._serial - 1
        for slot in self._slots[: self._topology.local_size]:
            seals = [area.seal for area in slot]
            if not any(_is_of(seal, self._attempt, serial) for seal in seals):
                return False
        return True

    def _a_peer_has_given_up(self) -> bool:
        """Returns True if another rank of this machine writes nothing any more."""
        present_slots = self._slots[: self._topology.local_size]
        return any(slot[0].given_up_in == self._attempt for slot in present_slots)

    def _free_unused_slots(self) -> None:
        """Frees the areas of ranks that are not there any more."""
        if self._topology.local_rank == 0:
            for slot in self._slots[self._topology.local_size :]:
                for area in slot:
                    area.free()

    # What it costs

    def _begin(self, problem: Exception | None) -> None:
        """Agrees with the other ranks whether steps are kept, and where copies go; says so.

        All ranks call it when they keep something for the first time. One exchange of text.

        Args:
            problem: why the state of this rank cannot be stored.

        Raises:
            CheckpointError: memory is short on a machine, or a state cannot be stored, and every
                step was asked for.
        """
        own_slot = self._slots[self._topology.local_rank]
        answers = self._collectives.exchange(
            {
                "bytes": self._layout.num_bytes,
                "held": [area.file_bytes for area in own_slot],
                "available": available_memory(),
                "machine": self._topology.node_rank,
                "local_rank": self._topology.local_rank,
                "is_replica": not self._layout.has_own_parts,
                "problem": None if problem is None else str(problem),
            }
        )
        problems = [answer["problem"] for answer in answers if answer["problem"] is not None]
        if problems:
            if self._every_step and isinstance(problem, LockstepError):
                raise problem
            self._refuse(problems[0], "let state_dict() return what a checkpoint can store")
            return
        self._is_replica = all(answer["is_replica"] for answer in answers)
        places = [(answer["machine"], answer["local_rank"]) for answer in answers]
        partners = None if self._is_replica else find_partners(places)
        answers_of_machine: dict[int, list[dict[str, Any]]] = {}
        for rank, answer in enumerate(answers):
            senders = [] if partners is None else partners[rank].senders
            num_bytes = answer["bytes"] + sum(answers[sender]["bytes"] for sender in senders)
            answer["needed"] = OWN_AREAS_PER_RANK * num_bytes
            # What lies in the other areas of the rank is in the way until they are used again.
            num_areas = OWN_AREAS_PER_RANK * (1 + len(senders))
            answer["held"] = sum(answer["held"][:num_areas])
            answers_of_machine.setdefault(answer["machine"], []).append(answer)
        for on_machine in answers_of_machine.values():
            self._check_memory(on_machine)
            if not self._is_on:
                return
        on_this_machine = answers_of_machine[self._topology.node_rank]
        self._bytes_on_machine = sum(answer["bytes"] for answer in on_this_machine)
        if partners is not None:
            self._partner = self._open_partner_copies(
                own_slot[OWN_AREAS_PER_RANK:], partners[self._topology.rank]
            )
        if self._serial > 1:
            return  # an earlier attempt has said it
        most = max(answer["needed"] for answer in answers)
        total = sum(answer["needed"] for answer in answers_of_machine[answers[0]["machine"]])
        copies = "two copies"
        note = ""
        if partners is not None:
            copies = "two copies on its machine and two on another one"
        elif len(answers_of_machine) > 1 and not self._is_replica:
            note = (
                "; one machine has more than twice as many ranks as another, so that no machine "
                "has a copy of the shards of another one"
            )
        self._say(
            f"every step is kept in memory: {copies}, {format_bytes(most)} for a rank at most, "
            f"{format_bytes(total)} on its machine{note}"
        )

    def _check_memory(self, answers: Sequence[dict[str, Any]]) -> None:
        """Keeps nothing from now on if a machine has too little memory.

        Args:
            answers: of the ranks of the machine, see `_begin`.

        Raises:
            CheckpointError: it has, and every step was asked for.
        """
        new = sum(max(0, answer["needed"] - answer["held"]) for answer in answers)
        available = answers[0]["available"]
        if available is not None and new > MAX_SHARE_OF_FREE_MEMORY * available:
            self._refuse(
                f"it takes {format_bytes(new)} of memory on a machine, and "
                f"{format_bytes(available)} are free",
                "use fsdp, which divides the state, start fewer processes, or free some memory",
            )

    def _open_partner_copies(self, areas: Sequence[Area], partners: Partners) -> PartnerCopies:
        """Returns what copies to another machine. All ranks call this.

        Args:
            areas: of this rank, for what it receives.
            partners: of this rank.
        """
        inboxes = []
        for number, sender in enumerate(partners.senders):
            first = number * OWN_AREAS_PER_RANK
            pair = areas[first : first + OWN_AREAS_PER_RANK]
            inboxes.append(Inbox(sender, pair, next_area=self._first_unprotected(pair)))
        return PartnerCopies(
            partners.receiver,
            inboxes,
            has_given_up=lambda: self._has_given_up,
            timeout=self._timeout,
        )

    def _refuse(self, found: str, advice: str) -> None:
        """Keeps nothing from now on, because of something that all ranks know.

        Raises:
            CheckpointError: the user has asked for every step to be kept.
        """
        self._is_on = False
        if self._every_step:
            raise CheckpointError("keeping each step in memory", found, advice)
        self._say(f"steps are not kept in memory: {found}")

    def _give_up(self, problem: Exception) -> None:
        """Keeps nothing from now on, because the state of this rank cannot be kept any more.

        Raises:
            Exception: the problem, if the user has asked for every step to be kept.
        """
        self._has_given_up = True
        self._own[0].give_up(self._attempt)
        if self._every_step:
            raise problem
        warn(
            "steps are not kept in memory from here on",
            f"{type(problem).__name__}: {problem}",
            "let state_dict() return what a checkpoint can store",
            on_this_rank=True,
        )

    def _note_cost(self) -> None:
        """Notes how long the last copy has held up the training, if that is not yet noted."""
        if self._copy_s is not None:
            self._interval.note_cost(self._copy_s + self._waited_s)
        self._copy_s = None
        self._waited_s = 0.0

    def _expected_link_s(self) -> float:
        """Returns how many seconds it will take to copy what this machine keeps to another one.

        It is 0 if the speed of the network was not measured. Then the training may have to wait for
        the first copy.
        """
        if self._partner is None or self._bandwidth is None:
            return 0.0
        return self._bytes_on_machine / self._bandwidth


def _nothing_to_take() -> TakenState:
    """Takes the place of the function that returns the state, when the run is over."""
    return TakenState({}, [])


def _is_of(seal: Seal | None, attempt: int, serial: int) -> bool:
    """Returns True if an area is sealed with this attempt and serial number."""
    return seal is not None and seal.attempt == attempt and seal.serial == serial
