"""Stage `hangs`: what `lockstep run` says, how soon, when ranks hang or fail over NCCL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu.commands import PROGRAMS, at_once, lockstep
from benchmarks.gpu.one_gpu import backend_for_several_ranks
from benchmarks.gpu.results import Stage
from benchmarks.gpu.stages import CPU_FACTOR


@dataclass(frozen=True)
class Expected:
    """What must be said of a fault.

    Attributes:
        notice: a regular expression for the first line that says what is wrong.
        exit_codes: with which the run may end.
    """

    notice: str
    exit_codes: tuple[int, ...]


FAULTS: dict[str, Expected] = {
    "skipped": Expected(r"deadlock", (70,)),
    # A rank that is stopped may be let go on: the run ends by its collective's timeout.
    "stopped": Expected(r"rank 1 is stopped by a signal", (71,)),
    "exception": Expected(r"FIRST FAILURE: rank 1", (1,)),
    "stage": Expected(r"rank 1 is stopped by a signal", (71,)),
}
SECONDS_FOR_A_FAULT = 50.0
MAX_VERDICT_CHARACTERS = 2500


def check_fault(stage: Stage, fault: str, backend: str) -> None:
    """Runs the program with one fault, and reads what the launcher says."""
    expected = FAULTS[fault]
    with stage.check(f"{fault} over {backend}") as values:
        program = str(PROGRAMS / "hang.py")
        arguments = ("run", "--nproc", "2", program, fault, backend)
        factor = 1.0 if stage.on_gpu else CPU_FACTOR
        limit = min(SECONDS_FOR_A_FAULT * factor, stage.time_limit(reserve=2))
        done = lockstep(arguments, stage.scratch / fault, limit, notice=expected.notice)
        values["exit_code"] = done.exit_code
        said = done.stderr[done.stderr.find("\nlockstep: ") :].strip()
        values["said"] = said[-MAX_VERDICT_CHARACTERS:]
        faults = [float(when) for when in re.findall(r"FAULT ([\d.]+)", done.stdout)]
        assert faults, f"it never came to its fault\n{done.stderr[-3000:]}"
        assert done.notice_at is not None, f"nothing was said of it\n{done.stderr[-3000:]}"
        values["seconds_to_the_first_word"] = round(done.notice_at - max(faults), 1)
        if done.exit_code is not None:
            values["seconds_to_the_end"] = round(done.ended_at - max(faults), 1)
        assert done.exit_code in expected.exit_codes, done.stderr[-3000:]


def main() -> None:
    stage = Stage("hangs")
    backend = backend_for_several_ranks(stage)
    at_once(partial(check_fault, stage, fault, backend) for fault in FAULTS)
