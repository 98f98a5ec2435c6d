"""What `lockstep verify` starts in the place of the script, on every rank: it, being recorded."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import torch

from lockstep.launcher.worker import Script, run_as_main
from lockstep.verify.determinism import Neutral
from lockstep.verify.hooks import install
from lockstep.verify.record import Writer
from lockstep.verify.recorder import Recorder
from lockstep.verify.runs import read_plan


def main(folder: Path) -> None:
    """Runs the script of a plan and records it, until it ends or has made its steps.

    Raises:
        BaseException: what the script raises.
    """
    plan = read_plan(folder)
    rank = int(os.environ.get("RANK", "0"))
    writer = Writer(folder, rank)
    neutral = Neutral(double=plan.double)
    # A script that seeds nothing draws other numbers on every process, but the same each time.
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    recorder = Recorder(writer, plan.steps, neutral)
    install(recorder, neutral, plan.batch_times, folder / "saved")
    script = Script(
        path=plan.script,
        arguments=plan.arguments,
        module=plan.module,
        local_rank_flag=plan.local_rank_flag,
    )
    error: BaseException | None = None
    try:
        run_as_main(script)
    except BaseException as caught:
        fine = isinstance(caught, SystemExit) and caught.code in (None, 0)
        error = None if fine else caught
        raise
    finally:
        writer.end(error, neutral.notes(), of_lockstep=recorder.of_lockstep)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
