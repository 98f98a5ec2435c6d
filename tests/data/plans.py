"""How loaders that are made without a world divide their global batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from lockstep.batch.autotune_request import AutotuneRequest, AutotuneResult
from lockstep.batch.micro_batches import MicroBatchPlan
from lockstep.batch.source import Source
from lockstep.distributed.collectives import Collectives


def request(*, micro_batch_size: bool = False) -> AutotuneRequest:
    """What is left open; nothing is measured."""
    return AutotuneRequest(
        result=AutotuneResult(),
        wants_shares=False,
        wants_micro_batch_size=micro_batch_size,
        recording_context=lambda plan, samples: nullcontext(),
        must_keep_plan=lambda: True,
    )


def plan_of(
    source: Source, collectives: Collectives, options: dict[str, Any], *, open_size: bool = False
) -> MicroBatchPlan:
    """That of a source, by `shares` and `micro_batch_size`, which are taken out of the options."""
    return MicroBatchPlan(
        batch_size=source.batch_size,
        sizes_vary=source.batch_sampler is not None,
        data_parallel=collectives.data_parallel,
        initial_shares=options.pop("shares", (1,) * collectives.topology.size),
        initial_micro_batch_size=options.pop("micro_batch_size", None),
        autotune_request=request(micro_batch_size=open_size),
    )
