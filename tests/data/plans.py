"""How loaders that are made without a world divide their global batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from lockstep.batch.micro_batches import Autotuned, AutotuneRequest, MicroBatchPlan
from lockstep.batch.source import Source
from lockstep.distributed.collectives import Collectives


def request(*, micro_batch_size: bool = False) -> AutotuneRequest:
    """What is left open; nothing is measured."""
    return AutotuneRequest(
        found=Autotuned(),
        shares=False,
        micro_batch_size=micro_batch_size,
        profile=lambda plan, samples: nullcontext(),
        as_planned=lambda: True,
    )


def plan_of(
    source: Source, collectives: Collectives, options: dict[str, Any], *, open_size: bool = False
) -> MicroBatchPlan:
    """That of a source, by `shares` and `micro_batch_size`, which are taken out of the options."""
    return MicroBatchPlan(
        batch_size=source.batch_size,
        varying=source.batch_sampler is not None,
        data_parallel=collectives.data_parallel,
        first_shares=options.pop("shares", (1,) * collectives.topology.size),
        first_micro_batch_size=options.pop("micro_batch_size", None),
        request=request(micro_batch_size=open_size),
    )
