"""What `lockstep verify` starts in the place of the script, on every rank: it, being recorded."""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from lockstep.launch.rank_main import Script, run_as_main
from lockstep.verify.hooks import install
from lockstep.verify.neutral import Neutral
from lockstep.verify.record import Writer
from lockstep.verify.recorder import Recorder

PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a script is recorded."""

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    steps: int = 3
    """Of the first optimizer."""
    double: bool = True
    batch_times: int = 1

    def write(self, folder: Path) -> None:
        """For the ranks to read."""
        (folder / PLAN).write_text(json.dumps(asdict(self)), encoding="utf-8")


def read_plan(folder: Path) -> Plan:
    """What `Plan.write` wrote."""
    values = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    return Plan(**{**values, "arguments": tuple(values["arguments"])})


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
    install(Recorder(writer, plan.steps, neutral), neutral, plan.batch_times, folder / "saved")
    try:
        run_as_main(Script(path=plan.script, arguments=plan.arguments, module=plan.module))
    except SystemExit as error:
        writer.end(None if error.code in (None, 0) else error, neutral.notes())
        raise
    except BaseException as error:
        writer.end(error, neutral.notes())
        raise
    writer.end(None, neutral.notes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
