"""`lockstep verify` of a script in processes that are forked from one that has imported torch.

It records and judges as the command does; only what starts the processes is faster.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from ranks import HANG_S, _store, context, rank_environment

from lockstep.run.start.worker import Script
from lockstep.verify.comparison import Comparison
from lockstep.verify.comparison_plan import ComparisonPlan
from lockstep.verify.rank import main
from lockstep.verify.run_config import RunConfig
from lockstep.verify.run_record import RunRecord
from lockstep.verify.verdict import Verdict


def verify(
    script: Path,
    *arguments: str,
    nproc: int = 2,
    steps: int = 3,
    batch_times: int = 1,
    seconds: float | None = None,
    same_samples: bool = False,
    precision: str = "fp64",
) -> Verdict:
    """Compares a script on one process with the script on `nproc`, in float64 or float32."""
    program = Script(path=str(script), arguments=arguments)
    several = RunConfig(name=f"{nproc} processes", nproc=nproc, script=program, steps=steps)
    several = replace(several, precision=precision)
    alone = replace(several.reference_config(batch_times), seconds=seconds)
    plan = ComparisonPlan(reference=alone, ways=[several], steps=steps, same_samples=same_samples)
    with tempfile.TemporaryDirectory() as folder:
        (result,) = Comparison(plan, Path(folder), start, check).results()
    assert isinstance(result.verdict, Verdict)  # not one by bits
    return result.verdict


def check(reference: RunRecord) -> None:
    """Checks that the run on one process has trained."""
    assert not reference.error, reference
    assert reference.updates, reference


def start(folder: Path, way: RunConfig) -> str:
    """Runs a script on processes of this machine; returns what they printed."""
    with _store(way.nproc) as port:
        processes = [
            context.Process(
                target=_rank,
                args=(folder, {**way.environment(), **rank_environment(rank, way.nproc, port)}),
            )
            for rank in range(way.nproc)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(HANG_S)
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
    assert not late, f"still running after {HANG_S} s"
    return "".join(path.read_text() for path in sorted(folder.glob("*.txt")))


def _rank(folder: Path, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that was not forked
    os.chdir(folder)
    tempfile.tempdir = str(folder)
    with open(folder / f"rank{environ['RANK']}.txt", "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 0
    try:
        main(folder)
    except SystemExit as ended:
        code = int(bool(ended.code))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
