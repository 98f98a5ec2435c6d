"""The stages of the run, the most valuable first, and the seconds that each may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOTAL_SECONDS = 540.0
"""Of the whole run on a GPU machine. One command may take 600 s there. If the first look at the
device is short, all stages but the last fit into this time, even if each takes as long as it may.
A later stage gets what the earlier ones have left."""
CPU_FACTOR = 4.0
"""A rehearsal on the CPU has so many times the seconds: its machine is small, and often busy."""


@dataclass(frozen=True)
class StageOfRun:
    """One stage: a module of `benchmarks.gpu` that runs in a process of its own."""

    name: str
    seconds: float
    """When it has run for so long, it is ended."""
    module: str
    about: str
    """What it shows, for the table."""
    needs: tuple[str, ...] = ()
    """Packages that it imports beside those of the whole run."""
    in_rehearsal_only: bool = False
    expected: str = "passed"
    """How it ends when all is well; a rehearsed failure is meant to fail."""


STAGES = (
    StageOfRun("machine", 20, "machine", "versions, `lockstep doctor`, memory of an idle rank"),
    StageOfRun("probe", 30, "probe", "whether NCCL connects several ranks on one GPU"),
    StageOfRun(
        "product",
        70,
        "product",
        "`lockstep run` from the warm fork server: kill, resume, compile",
        needs=("sklearn",),
    ),
    StageOfRun(
        "syncs", 80, "synchronizations", "host synchronizations with the device in a step, by place"
    ),
    StageOfRun("nccl", 140, "nccl", "2 and 4 ranks over NCCL against one process on the CPU"),
    StageOfRun("hangs", 55, "hangs", "verdicts on runs that hang or fail over NCCL"),
    StageOfRun("speed", 75, "speed", "time and memory against plain PyTorch"),
    StageOfRun(
        "bits", 50, "bits", "virtual ranks: the same bits with 1, 2 and 4 processes on one GPU"
    ),
    StageOfRun("tests", 140, "pytest_files", "`pytest -m gpu`, file by file"),
    StageOfRun(
        "rehearse-hang",
        3,
        "rehearsals",
        "a stage that hangs",
        in_rehearsal_only=True,
        expected="timed out",
    ),
    StageOfRun(
        "rehearse-kill",
        30,
        "rehearsals",
        "a stage that is killed",
        in_rehearsal_only=True,
        expected="crashed",
    ),
    StageOfRun(
        "rehearse-disk", 30, "rehearsals", "a stage that fills the disk", in_rehearsal_only=True
    ),
)
NEEDS_PROBE = {"syncs", "nccl", "hangs", "speed"}
"""These start several ranks on one GPU where the probe has shown that NCCL allows it."""


def is_as_expected(line: dict[str, Any]) -> bool:
    """Whether a line of the results is no failure."""
    if line["result"] in ("passed", "not run"):
        return True
    expected = {stage.name: stage.expected for stage in STAGES}
    return line["check"] == "(stage)" and line["result"] == expected.get(line["stage"])


class UnknownStage(ValueError):
    """A stage was named that is not there."""


def choose(names: str, on_gpu: bool) -> list[StageOfRun]:
    """The stages that are to run, in their order.

    Args:
        names: separated by commas; empty for all.
        on_gpu: leaves out what is only rehearsed.

    Raises:
        UnknownStage: a name is none of a stage.
    """
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    unknown = wanted - {stage.name for stage in STAGES}
    if unknown:
        known = ", ".join(stage.name for stage in STAGES)
        raise UnknownStage(f"no stage {', '.join(sorted(unknown))}; the stages are {known}")
    if wanted & NEEDS_PROBE:
        wanted.add("probe")
    chosen = []
    for stage in STAGES:
        if wanted and stage.name not in wanted:
            continue
        if not wanted and stage.in_rehearsal_only and on_gpu:
            continue
        chosen.append(stage)
    return chosen
