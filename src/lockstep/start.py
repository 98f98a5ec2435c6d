"""`lockstep.init`: where a script becomes part of a run."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from lockstep.runtime.choice import Choice
from lockstep.runtime.run import join_run, leave
from lockstep.runtime.seeding import seed_everything
from lockstep.runtime.settings import settle
from lockstep.strategies.base import Strategy
from lockstep.strategies.registry import strategy as find_strategy
from lockstep.world import World


def init(  # noqa: PLR0913 - one place for all settings of a run
    strategy: str | Strategy | None = None,
    *,
    seed: int | None = None,
    precision: str | None = None,
    backend: str | None = None,
    init_method: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    shares: Any = None,
    micro_batch: int | str | None = None,
    device: str | None = None,
    sync_batchnorm: bool = True,
    ledger: str | Path | None = None,
    timeout: float | timedelta | None = None,
    collective_timeout: float | timedelta | None = None,
) -> World:
    """Joins the run: process group, device, seeds. Started plainly, the run is one process.

    What is left out here may be set outside the script, by `lockstep run --precision bf16` or
    LOCKSTEP_PRECISION=bf16; a contradiction is an error.

    Args:
        strategy: `single`, `dp`, `ddp`, `fsdp`, `hsdp`, `pipeline`, or options such as
            `lockstep.strategies.DDP(...)`; left out, `single` on one process, `ddp` on several.
        seed: of everything random (left out: 0).
        precision: `fp32` (left out), `bf16`, `fp16` or `fp64`.
        backend: `nccl`, `gloo` or `mpi`; left out, by device.
        init_method: `env://`, `tcp://host:port` or `file:///path`.
        rank: with `world_size`, where no launcher tells.
        world_size: likewise.
        shares: how a global batch is divided, `"1:2"` or `(1, 2)`; `"auto"`: by how fast the ranks
            are, which is measured in the first batch; left out, equally.
        micro_batch: the most samples a rank computes at a time; `"auto"`: as many as fit into its
            memory; left out, its whole part.
        device: `cpu`, `cuda` or `cuda:0`; left out, a GPU where there is one.
        sync_batchnorm: False leaves BatchNorm layers with statistics of their own on each rank.
        ledger: folder in which every rank writes down which samples it trains in which step; left
            out, nothing is written. `lockstep verify --ledger` reads it.
        timeout: seconds that the ranks wait for each other here (left out: 30).
        collective_timeout: seconds that a collective may take (left out: torch's default).

    Raises:
        JoinError: the ranks did not come together; the subclass says why.
        RanksDifferError: the ranks run other code, arguments, versions or settings.
        SettingError: a setting that cannot be honoured.
        UsageError: this process is in a run already.
    """
    ledger = ledger if ledger is None else str(ledger)
    given = {name: value for name, value in locals().items() if name not in {"rank", "world_size"}}
    settings = settle(given, os.environ)
    run, choices = join_run(settings, os.environ, rank=rank, world_size=world_size)
    try:
        chosen, reason = find_strategy(settings.strategy, run.topology.size)
        chosen.check(run)
        if run.topology.size > 1:
            reason = f"{reason}; ranks given by {run.topology.source}"
        run.collectives.part = chosen.part(run.topology)
        choices.insert(0, Choice("strategy", chosen.name, reason))
        seed_everything(settings.seed)
        world = World(run, chosen, choices)
        if settings.ledger is not None:
            from lockstep.data.ledger import Ledger  # not all runs keep one

            written = Ledger(settings.ledger, run.collectives, run.loaders)
            run.step.watchers.append(written)
            run.at_end.append(lambda failed: written.close())
        return world
    except BaseException:
        leave(run, failed=True)
        raise
