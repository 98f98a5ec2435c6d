"""Warns of learning-rate schedules that are as long as the micro-batches of a training.

`len(loader)` of a prepared loader counts the iterations of the loop, which are micro-batches. A
prepared scheduler steps once per global batch. One that was built for `epochs * len(loader)` steps
is still near the beginning of its schedule when the training ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.batch.loader import Loader
from lockstep.checkpoint.checks import LENGTH_ATTRIBUTES
from lockstep.errors import warn
from lockstep.training.optimizer import PreparedScheduler


def warn_of_lengths_in_micro_batches(
    schedulers: Sequence[PreparedScheduler], loaders: Sequence[Loader], num_epochs: int
) -> None:
    """Warns of each scheduler whose length is the number of micro-batches of the training.

    Args:
        schedulers: the prepared ones.
        loaders: the prepared ones. Those whose length the script has not asked for do not count.
        num_epochs: of the training.
    """
    for loader in loaders:
        if loader.length_asked_at is None or loader.steps is None:
            continue
        length_of_epoch = loader.num_micro_batches_of_epoch()
        if length_of_epoch == loader.steps:
            continue
        for scheduler in schedulers:
            state = scheduler.state_dict()
            for name in LENGTH_ATTRIBUTES:
                if state.get(name) == num_epochs * length_of_epoch:
                    _warn(scheduler, name, loader, num_epochs)


def _warn(scheduler: PreparedScheduler, name: str, loader: Loader, num_epochs: int) -> None:
    kind = type(scheduler.inner).__name__
    length_of_epoch = loader.num_micro_batches_of_epoch()
    length = num_epochs * length_of_epoch
    assert loader.steps is not None
    steps = num_epochs * loader.steps
    warn(
        f"{kind} with {name}={length} in a training of {num_epochs} epochs",
        f"len(loader) is {length_of_epoch}, the micro-batches of an epoch, but the scheduler steps "
        f"once for each global batch: it makes at most {steps} of its {length} steps",
        "compute its length before world.prepare, where len(loader) counts global batches, or from "
        "loader.steps",
        at=loader.length_asked_at,
    )
