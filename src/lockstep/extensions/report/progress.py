"""Shows the progress of one pass over a loader: a bar on rank 0's terminal, or lines in a log.

`progress` hands the items of the loader to the training loop, and updates the display after each
global batch. All ranks must iterate it, because it shows means over all ranks (`metrics`), but only
rank 0 prints. `displays` decides what is printed, and where.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from lockstep.batch.loader import Loader
from lockstep.distributed.collectives import Collectives
from lockstep.errors import UsageError
from lockstep.extensions.report.displays import open_display
from lockstep.extensions.report.metrics import RunningMeans
from lockstep.extensions.report.pass_text import PassState
from lockstep.language import translate_names
from lockstep.session.step import Step
from lockstep.wording import describe_type

# How often the means over all ranks are updated during a pass.
REDUCTIONS_PER_PASS = 50
MAX_BATCHES_BETWEEN_REDUCTIONS = 50
BATCHES_BETWEEN_REDUCTIONS_OF_A_STREAM = 10  # its number of batches is not known


def check_loader(loader: object) -> None:
    """Raises UsageError if the object is not a prepared loader."""
    if not isinstance(loader, Loader):
        raise UsageError(
            f"world.progress of {describe_type(loader)}",
            "it is not a prepared loader",
            "iterate what world.prepare or world.loader returned for it",
        )


def progress(
    loader: Loader,
    collectives: Collectives,
    step: Step,
    description: str = "",
    *,
    done: int = 0,
) -> Generator[Any, None, None]:
    """Yields the items of the loader, and shows how far the pass has come.

    With gradients enabled, the means over all ranks are updated during the pass. Without gradients
    (in an evaluation, where ranks may have different numbers of batches), they are computed once,
    at the end of the pass.

    Args:
        loader: a prepared loader.
        collectives: the collectives of the run.
        step: the step of the run. Its open pass over this loader receives the means.
        description: the text in front of the bar, such as `epoch 3`.
        done: the number of global batches that were trained before the epoch was resumed.
    """
    num_batches = loader.steps
    interval = reduce_every(num_batches) if torch.is_grad_enabled() else 0
    means = RunningMeans(collectives, interval)

    display = None
    if collectives.topology.is_main:
        shown = translate_names(description)  # the record has it in English
        display = open_display(PassState(shown, begun=done, done=done, total=num_batches))

    is_complete = False
    try:
        for item in loader:
            # The loader has opened its own pass last, before it handed out the item.
            if step.logged_passes.open:
                open_pass = step.logged_passes.open[-1]
                if open_pass.loader is loader:
                    open_pass.is_shown = True
                    open_pass.sums = means.sums
                    open_pass.description = description

            yield item

            # The training loop is done with this micro-batch. A step ends with the last one of a
            # global batch.
            micro_batch = loader.current
            means.samples += micro_batch.counted_rows
            if not micro_batch.last:
                continue
            means.step()
            if display is not None:
                display.step(micro_batch.global_samples, means.values)

        means.finish()
        is_complete = True
    finally:
        # If the loop was left early, the final means are unknown.
        if display is not None:
            display.close(means if is_complete else None)


def reduce_every(num_batches: int | None) -> int:
    """Returns after how many global batches the means over all ranks are computed again.

    1000 batches: every 20. 10 batches: every one.

    Args:
        num_batches: the number of global batches in the pass; None if it is not known.
    """
    if num_batches is None:
        return BATCHES_BETWEEN_REDUCTIONS_OF_A_STREAM
    interval = num_batches // REDUCTIONS_PER_PASS
    return max(1, min(MAX_BATCHES_BETWEEN_REDUCTIONS, interval))
