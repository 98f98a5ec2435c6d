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

When the first step of an attempt is to be kept, all ranks agree on how to do that (`keeping_plan`).
From then on a `StepKeeper` keeps the steps. If keeping every step takes more than a small part of
the time, only every k-th step is kept, unless the user asked for every step (`copy_interval`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoint.keeping_plan import (
    NOT_ANNOUNCED,
    KeepingPlan,
    RankNeeds,
    StepsCannotBeKept,
    plan_keeping,
)
from lockstep.checkpoint.kept_layout import KeptLayout
from lockstep.checkpoint.kept_reading import KeptStep, report_parts
from lockstep.checkpoint.machine_areas import MachineAreas
from lockstep.checkpoint.memory_area import size_of_area
from lockstep.checkpoint.state_copier import StateCopier
from lockstep.checkpoint.step_keeper import (
    Attempt,
    KeptTraining,
    StepKeeper,
    TakenState,
    collect_state,
    header_of,
)
from lockstep.errors import CheckpointError, LockstepError
from lockstep.machine.control_groups import available_memory
from lockstep.session.extension import Extension
from lockstep.session.step import Step


class KeptSteps(Extension):
    """Keeps the steps of the training in the memory areas of this rank.

    It is idle until `start`, and after `stop`.

    Args:
        training: the training.
        step: the step of the run, which counts the optimizer steps.
    """

    def __init__(self, training: KeptTraining, step: Step) -> None:
        self.folder = str(training.folder.absolute())
        self._training = training
        self._topology = training.collectives.topology
        self._step = step
        self._copier = StateCopier(training.collectives.device)
        self._areas: MachineAreas | None = None
        """The areas of the ranks of this machine; None before `open` and after `stop`."""
        self._attempt: Attempt | None = None
        """The attempt whose steps are kept; None while no steps are kept."""
        self._keeper: StepKeeper | None = None
        """Keeps the steps of the attempt; None until its first step is kept."""
        self._last_step_number = -1
        """How many optimizer steps were done when a step was last kept or passed over."""
        self._last_time_s = 0.0
        """When that was."""

    # After a start

    def open(self) -> MachineAreas:
        """Opens the areas of all ranks of this machine, unless they are open, and returns them.

        Raises:
            OSError: the launcher has ended, or runs in another container.
        """
        if self._areas is None:
            self._areas = MachineAreas(self._topology)
        return self._areas

    def report(self) -> list[dict[str, Any]]:
        """Describes what lies in the areas that this rank looks after, one report for each part.

        The ranks exchange these reports to choose the step that they resume.
        """
        topology = self._topology
        areas = self.open().looked_after()
        return report_parts(areas, holder_rank=topology.rank, holder_machine=topology.node_rank)

    def start(self, attempt_number: int, folders: list[str], resumed: KeptStep | None) -> None:
        """Starts to keep steps. It is called once the training has its initial or resumed state.

        Before that, `finish_present_step` has waited for the copy of an earlier call.

        Args:
            attempt_number: a random number that identifies this attempt, the same on all ranks.
            folders: the paths of the checkpoint folder on the machines of the run.
            resumed: the step in memory that the training resumed from; None if it started anew or
                resumed from a checkpoint on disk.
        """
        self._attempt = Attempt(attempt_number, folders, resumed)

        # The present state need not be copied: after a failure, the next start makes the same
        # initial state, or resumes from the same step or checkpoint. So this step counts as kept.
        self._last_step_number = self._step.number
        self._last_time_s = time.perf_counter()

    def finish_present_step(self) -> None:
        """Waits until the step kept last is complete, also on another machine. All ranks call this.

        Otherwise its copy could overwrite, and seal, an area that holds something else by then.
        """
        keeper = self._keeper
        self._keeper = None
        if keeper is not None:
            keeper.finish()

    def stop(self) -> None:
        """Stops keeping steps. The step kept last stays in memory until another one is kept.

        All ranks call this. `open` and `start` begin anew.
        """
        self._attempt = None
        self._areas = None
        self.finish_present_step()

    def forget_other_steps(self) -> None:
        """Deletes all steps in the areas but the resumed one, by breaking the seals of the areas.

        This must not happen before a new step is about to be kept: until then, the areas may hold a
        step of another checkpoint that the script resumes next.
        """
        assert self._attempt is not None  # `start` was called
        areas_to_keep = self._attempt.areas_of_resumed_step(self._topology.node_rank)
        self.open().break_seals(except_of=areas_to_keep)

    def close(self, failed: bool) -> None:
        """Waits until the step kept last is complete, and drops all references to the training.

        Args:
            failed: True if this rank has failed. Then it does not wait for other machines.
        """
        keeper = self._keeper
        self._attempt = None
        self._keeper = None
        self._areas = None
        # These two functions refer to the training. They are not called any more.
        self._training = self._training._replace(
            take_state=_no_state, ids_changed_only_by_optimizer=_no_ids
        )
        if keeper is None:
            return

        if failed:
            keeper.wait_for_copy()
        else:
            keeper.finish()

    # In each step

    def before_step(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        """Waits until the tensors that the optimizer is about to change have been copied."""
        if self._keeper is not None:
            self._keeper.wait_for_copy()

    def batch_is_done(self) -> None:
        """Keeps the present step, if an optimizer has stepped since the last call.

        It passes the step over if it is not one of those to be kept: every step, or every k-th.
        """
        number = self._step.number
        attempt = self._attempt  # None while no steps are kept
        if attempt is None or number == self._last_step_number:
            return

        # The previous copy must have ended. The time for which the training waits for its end is a
        # cost of that copy, so it does not count as time of the present step.
        keeper = self._keeper  # None before the first step of this attempt is kept
        waited_s = 0.0 if keeper is None else keeper.finish_last_copy()
        step_time_s = time.perf_counter() - self._last_time_s - waited_s

        self._last_step_number = number
        if keeper is None or number % keeper.every == 0:
            self._keep(attempt, keeper, number, step_time_s)
        self._last_time_s = time.perf_counter()

    def _keep(
        self, attempt: Attempt, keeper: StepKeeper | None, number: int, step_time_s: float
    ) -> None:
        """Keeps the present step. The report counts the time as time for checkpoints.

        Args:
            attempt: the present attempt.
            keeper: keeps its steps; None for the first one.
            number: how many optimizer steps are done.
            step_time_s: how long the last of them took.
        """
        phase_before = self._step.enter_phase("checkpoint")
        try:
            if keeper is None:
                self._keep_first(attempt, number, step_time_s)
            else:
                keeper.keep(number, step_time_s)
        finally:
            self._step.enter_phase(phase_before)

    # The first step of an attempt

    def _keep_first(self, attempt: Attempt, number: int, step_time_s: float) -> None:
        """Keeps the first step of an attempt, if all ranks agree that steps can be kept.

        Args:
            attempt: the present attempt.
            number: how many optimizer steps are done.
            step_time_s: how long the last of them took.

        Raises:
            CheckpointError: every step was asked for, but a machine has too little memory or a
                state cannot be stored.
        """
        areas = self.open()
        layout = KeptLayout(self._topology.local_rank, self._topology.local_size)
        first_state = self._collect_first_state(attempt, layout)

        self._attempt = None  # no step of this attempt is kept unless all ranks agree
        plan = self._agree(areas, layout, first_state)
        if plan is None:
            return
        self._attempt = attempt

        # The user is not told again what an earlier attempt has announced.
        if plan.announcement_checksum != attempt.announcement_checksum:
            self._training.say(plan.announcement)

        self.forget_other_steps()  # those of earlier attempts
        self._keeper = StepKeeper(self._training, attempt, areas, layout, plan, self._copier)
        self._keeper.keep(number, step_time_s, first_state.facts)

    def _collect_first_state(self, attempt: Attempt, layout: KeptLayout) -> _FirstState:
        """Collects the state of the first step, and notes an error instead of raising it.

        A rank that has a problem tells the others in `_agree`, where all of them decide together.

        Args:
            attempt: the present attempt.
            layout: the layout that is updated to copy this state.
        """
        try:
            facts = collect_state(self._training, layout)
            return _FirstState(facts, self._bytes_of_step(attempt, layout, facts), problem=None)
        except Exception as error:
            return _FirstState(facts={}, num_bytes=0, problem=error)

    def _bytes_of_step(self, attempt: Attempt, layout: KeptLayout, facts: dict[str, Any]) -> int:
        """Returns how much memory one copy of this rank's state takes, with its header."""
        # The ranks have not agreed on the last two values yet. Other values change the length of
        # the header by a byte ("true" or "false"), and `size_of_area` rounds up to a page.
        header = header_of(
            facts,
            layout,
            attempt,
            self._topology,
            machine_has_whole_state=False,
            announcement_checksum=NOT_ANNOUNCED,
        )
        return size_of_area(len(header), layout.num_bytes)

    def _agree(
        self, areas: MachineAreas, layout: KeptLayout, first_state: _FirstState
    ) -> KeepingPlan | None:
        """Agrees with the other ranks on how steps are kept. All ranks call this.

        Args:
            areas: the areas of the ranks of this machine.
            layout: which tensors this rank copies.
            first_state: this rank's state, as it was collected for the first step.

        Returns:
            The plan, the same on all ranks; None if they have agreed to keep no steps.

        Raises:
            CheckpointError: every step was asked for, but steps cannot be kept.
        """
        problem = first_state.problem
        needs = RankNeeds(
            bytes_of_step=first_state.num_bytes,
            bytes_of_areas=[area.file_bytes for area in areas.of_this_rank],
            available=available_memory(),
            machine=self._topology.node_rank,
            local_rank=self._topology.local_rank,
            has_own_parts=layout.has_own_parts,
            problem=None if problem is None else str(problem),
        )
        answers = self._training.collectives.exchange(asdict(needs))
        try:
            return plan_keeping([RankNeeds(**answer) for answer in answers])
        except StepsCannotBeKept as error:
            reason = error  # the same on all ranks

        # Not in the `except` block: the traceback of a `CheckpointError` from there would also show
        # the `StepsCannotBeKept`.
        self._raise_or_say_why_no_step_is_kept(reason, problem)
        return None

    def _raise_or_say_why_no_step_is_kept(
        self, reason: StepsCannotBeKept, problem: Exception | None
    ) -> None:
        """Tells the user why no step is kept, by an error if every step was asked for.

        Args:
            reason: the reason on which the ranks agree.
            problem: the error that was raised when this rank's state was collected, if there was
                one.

        Raises:
            CheckpointError: every step was asked for.
        """
        if not self._training.every_step:
            self._training.say(f"steps are not kept in memory: {reason.found}")
            return

        # If this rank itself has the problem, its error says more than the reason that was sent.
        if isinstance(problem, LockstepError):
            raise problem
        raise CheckpointError("keeping each step in memory", reason.found, reason.advice)


class _FirstState(NamedTuple):
    """What came of collecting this rank's state for the first step of an attempt."""

    facts: dict[str, Any]
    """See `TakenState`; empty if there was a problem."""
    num_bytes: int
    """How much memory one copy of the state takes, with its header; 0 if there was a problem."""
    problem: Exception | None
    """The error that was raised, if there was one."""


def _no_state() -> TakenState:
    """Replaces the function that collects the training state once the run is over."""
    return TakenState({}, [])


def _no_ids() -> set[int]:
    """Replaces the function that finds the tensors of the optimizer once the run is over."""
    return set()
