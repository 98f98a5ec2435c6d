"""Leaves out GPUs that are still held by processes which did not end even at SIGKILL."""

from __future__ import annotations

import os

from lockstep.errors import LockstepError
from lockstep.run.start.plan import LaunchPlan
from lockstep.run.start.process import Attempt
from lockstep.wording import format_ranks


class UsableGpus:
    """The GPUs of this machine that its ranks use, one each.

    Args:
        plan: what was started on this machine at first.
        nproc_asked: the value of --nproc, such as `gpu` or `4`.
    """

    def __init__(self, plan: LaunchPlan, nproc_asked: str) -> None:
        self._plan = plan
        self._nproc_asked = nproc_asked
        self._left: list[str] = []
        """The GPUs that are still used, as in CUDA_VISIBLE_DEVICES; empty while all of them are."""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variable that shows ranks the GPUs that are left; empty while none is
        left out.
        """
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._left)} if self._left else {}

    def leave_out_held(self, attempt: Attempt) -> int | None:
        """Leaves out the GPUs of ranks whose processes did not end, for the next attempt.

        Such a process may still hold its GPU, so another rank could not use it.

        Args:
            attempt: the last attempt.

        Returns:
            The number of ranks of the next attempt, one for each GPU that is left; None if no GPU
            was left out.

        Raises:
            LockstepError: the run may not go on with fewer ranks on this machine.
        """
        # The ranks whose processes did not end at SIGKILL, so that the launcher gave up on them.
        not_ended = [process for process in attempt.processes if process.given_up]
        if not not_ended or not self._each_rank_has_own_gpu(attempt.nproc):
            return None

        # Each rank uses the GPU with the index of its local rank.
        held_indices = {process.local_rank for process in not_ended}
        num_left = attempt.nproc - len(held_indices)

        # The number of ranks may shrink if the user has asked for as many as there are GPUs.
        number_may_shrink = self._nproc_asked in ("auto", "gpu")
        if not number_may_shrink or num_left == 0:
            ranks = format_ranks(process.rank for process in not_ended)
            raise LockstepError(
                f"--nproc {self._nproc_asked}",
                f"the process of {ranks} has not ended and may hold its GPU",
                "repair or restart the machine; with --nproc gpu the next start would take the "
                "GPUs that are left, with --nnodes MIN:MAX the other machines",
            )

        left = []
        for index, gpu in enumerate(self._used_so_far()):
            if index not in held_indices:
                left.append(gpu)
        self._left = left
        return num_left

    def _each_rank_has_own_gpu(self, num_ranks: int) -> bool:
        """Returns True if the ranks of this machine use GPUs, and do not share them."""
        variables = {**os.environ, **self._plan.environment}
        uses_gpus = self._plan.gpus > 0 and variables.get("LOCKSTEP_DEVICE") != "cpu"
        return uses_gpus and num_ranks <= self._plan.gpus

    def _used_so_far(self) -> list[str]:
        """Returns the GPUs of the last attempt, as in CUDA_VISIBLE_DEVICES."""
        if self._left:
            return self._left
        all_gpus = ",".join(str(index) for index in range(self._plan.gpus))
        return os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")
