"""Warns at the end of a run if nothing was prepared and each rank trained a model of its own.

A script that calls `lockstep.init` and forgets `world.prepare` runs to its end without an error:
each rank trains on all samples, and no gradient is averaged. It may also be right, if the script
averages gradients itself or wraps its model in DDP. Then there are collectives between the steps of
its optimizers. If there were none on any rank, and all ranks have made steps, the ranks trained
apart.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.communication.routing import num_calls_in_shared_memory
from lockstep.distributed.process_group import Run, store_at_end
from lockstep.errors import warn
from lockstep.extensions.checks.base import Check
from lockstep.optim.precision import Precision
from lockstep.session.micro_batch import MicroBatch
from lockstep.strategies.base import PreparedModule
from lockstep.torch_compat import never_compiled, num_collectives
from lockstep.user_code import Location, user_location
from lockstep.wording import count_noun

MIN_STEPS = 2
"""Fewer steps are no training: scripts step once to create the state of an optimizer."""


class NothingPreparedCheck(Check):
    """Counts the steps of all optimizers of a script, as long as no module is prepared."""

    def __init__(self, run: Run, precision: Precision, wrapped: Collection[PreparedModule]) -> None:
        super().__init__(run, precision, wrapped)
        self._num_steps = 0
        self._location: Location | None = None
        """The line of the script that has made the first step."""
        self._num_collectives_at_first_step = 0
        """The number of collectives so far, of this rank, when the first step was made."""
        self._num_collectives_at_last_step = 0
        self._is_active = run.joined is not None and run.collectives.data_parallel.size > 1
        if self._is_active:
            self._unhook = register_optimizer_step_post_hook(self._after_any_step).remove

    def module_prepared(self, wrapped: Any) -> None:
        """Stops counting: the script does call `world.prepare`."""
        self._stop()

    def before_backward(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Stops counting: `PreparationCheck` looks at every loss of `world.backward`."""
        self._stop()

    def close(self, failed: bool) -> None:
        """Tells the other ranks whether this one has trained alone.

        The last rank that closes its run knows of all of them, and warns.
        """
        was_watched = self._is_active
        self._stop()
        if not was_watched or failed:
            return

        has_exchanged = self._num_collectives_at_last_step != self._num_collectives_at_first_step
        has_trained_alone = self._num_steps >= MIN_STEPS and not has_exchanged
        if not has_trained_alone:
            return

        if self._is_last_of_all():
            self._warn()

    def _is_last_of_all(self) -> bool:
        """Counts this rank as one that has trained alone; returns True if all ranks have by now."""
        joined = self.run.joined
        if joined is None:
            return False

        num_alone = 0
        with store_at_end(joined) as store:  # if the store is gone, the block ends early
            num_alone = store.add("trained without prepare", 1)  # the new count, with this rank
        return num_alone == self.run.topology.size

    @never_compiled
    def _after_any_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Called by torch after any optimizer has stepped: counts the collectives so far.

        If there are no more at the last step than at the first one, this rank has exchanged nothing
        between its steps.
        """
        calls_of_backend = num_collectives()
        if calls_of_backend is None:  # the backend does not count them
            self._stop()
            return

        self._num_steps += 1
        self._num_collectives_at_last_step = calls_of_backend + num_calls_in_shared_memory()
        if self._num_steps == 1:
            self._num_collectives_at_first_step = self._num_collectives_at_last_step
            self._location = user_location()  # for the warning at the end of the run

    def _stop(self) -> None:
        """Stops counting steps."""
        if self._is_active:
            self._is_active = False
            self._unhook()

    def _warn(self) -> None:
        """Warns, on this rank, that all ranks have trained alone."""
        warn(
            "training without world.prepare",
            found=f"optimizers made {count_noun(self._num_steps, 'step')} on this rank, and there "
            "was no collective between them on any rank: unless the script exchanges gradients in "
            "another way, each process has trained a model of its own",
            do="give the model to world.prepare with its optimizer, and use what it returns: "
            "model, optimizer = world.prepare(model, optimizer)",
            code="LS311",
            at=self._location,
            on_this_rank=True,
        )
