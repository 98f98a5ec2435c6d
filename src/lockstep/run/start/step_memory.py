"""Provides memory of the launcher in which the latest steps outlive the ranks that made them.

After each step, a rank copies its state into this memory (`lockstep.checkpoint.kept_steps`). The
launcher holds it, so ranks that are restarted after a failure find the last complete step there. An
*area* is a block of this memory; each rank has several.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence

from lockstep.errors import SettingError
from lockstep.machine.topology import (
    AREAS_PER_RANK,
    OWN_AREAS_PER_RANK,
    SEAL_BYTES,
    SEALED_FLAG_AT,
)
from lockstep.run.start.plan import LaunchPlan
from lockstep.run.start.torchrun_flags import may_restart

AREA_BYTES_AT_FIRST = 4096
"""The size of an area at first. Ranks enlarge it as needed."""


class StepMemory:
    """The areas of memory for the ranks of this machine, which are empty until a rank needs them.

    They are not in /dev/shm, which is small in containers, and where files remain if a launcher is
    killed. They are anonymous files (memfd_create(2)) of this process, which its ranks open as
    `/proc/PID/fd/NUMBER`.

    Args:
        nproc: number of ranks that get areas.
        keeps_every_step: True if the user has asked for each step to be kept.
    """

    def __init__(self, nproc: int, *, keeps_every_step: bool = False) -> None:
        self._keeps_every_step = keeps_every_step
        self._descriptors = []
        for _ in range(AREAS_PER_RANK * nproc):
            descriptor = os.memfd_create("lockstep-step")
            os.ftruncate(descriptor, AREA_BYTES_AT_FIRST)
            self._descriptors.append(descriptor)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that tell a rank the paths of the areas; empty if there are
        none.

        Every rank is told the areas of all ranks: if the next attempt has fewer ranks, one of them
        must read the areas of several.
        """
        if not self._descriptors:
            return {}
        paths = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._descriptors]
        variables = {"LOCKSTEP_STEP_MEMORY": " ".join(paths)}
        if self._keeps_every_step:
            variables["LOCKSTEP_KEEP_EVERY_STEP"] = "1"
        return variables

    def kept_steps(self) -> list[frozenset[bytes]]:
        """Returns the steps that each rank has kept completely, by local rank.

        A step is given by its seal, which is unique. Copies for other machines are left out.
        """
        seals_of_ranks = []
        # The areas of one rank follow each other; those for its own steps come first.
        for first_area in range(0, len(self._descriptors), AREAS_PER_RANK):
            own_areas = self._descriptors[first_area : first_area + OWN_AREAS_PER_RANK]
            heads = [os.pread(area, SEAL_BYTES, 0) for area in own_areas]
            seals_of_ranks.append(frozenset(head for head in heads if _is_sealed(head)))
        return seals_of_ranks

    def have_all_kept_since(
        self, kept_before: Sequence[frozenset[bytes]], local_ranks: Iterable[int]
    ) -> bool:
        """Returns True if each of the given ranks has kept a step that is not in `kept_before`.

        Args:
            kept_before: what `kept_steps` has returned before.
            local_ranks: the ranks.
        """
        kept_now = self.kept_steps()
        if not kept_now:  # there is no memory for steps
            return False
        for local_rank in local_ranks:
            new_steps = kept_now[local_rank] - kept_before[local_rank]
            if not new_steps:
                return False
        return True

    @property
    def is_used(self) -> bool:
        """True if ranks have kept steps in the memory."""
        sizes = [os.fstat(descriptor).st_size for descriptor in self._descriptors]
        return max(sizes, default=0) > AREA_BYTES_AT_FIRST

    @property
    def is_wanted_and_unused(self) -> bool:
        """True if the user has asked for each step to be kept, but the ranks have kept none."""
        return self._keeps_every_step and not self.is_used

    def close(self) -> None:
        """Frees the memory."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def _is_sealed(head: bytes) -> bool:
    """Returns True if the head of an area says that the area has a complete step."""
    flag = head[SEALED_FLAG_AT : SEALED_FLAG_AT + 8]  # zeros before the first step
    return int.from_bytes(flag, "little") == 1


def step_memory_for(plan: LaunchPlan, flags: argparse.Namespace) -> StepMemory:
    """Creates the memory for the ranks of this machine, without areas if nobody would read them.

    Args:
        plan: what is started on this machine.
        flags: torchrun's flags.
    """
    is_refused = plan.keep_in_memory is False
    if is_refused or _why_nothing_is_kept(flags) is not None:
        return StepMemory(0)
    return StepMemory(plan.nproc, keeps_every_step=plan.keep_in_memory is True)


def check_keep_in_memory(flags: argparse.Namespace) -> None:
    """Checks that `--keep-in-memory`, which the user has given, is possible and useful.

    Args:
        flags: torchrun's flags.

    Raises:
        SettingError: steps cannot be kept, or nothing would read them.
    """
    problem = _why_nothing_is_kept(flags)
    if problem is not None:
        found, advice = problem
        raise SettingError("--keep-in-memory", found, advice)


def _why_nothing_is_kept(flags: argparse.Namespace) -> tuple[str, str] | None:
    """Returns why steps cannot be kept, or would be of no use, and what the user can do.

    Returns:
        Both texts, or None if steps can be kept.
    """
    if not may_restart(flags):
        return (
            "nothing would read what is kept: ranks that fail are not started again",
            "add --max-restarts 3, for example",
        )
    if sys.platform != "linux":
        return "this system has no memfd_create(2)", "leave the option out"
    return None
