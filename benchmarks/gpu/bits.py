"""Stage `bits`: with virtual ranks, processes that share a GPU end with the bits of one process.

Processes send through Gloo here, so that the stage does not depend on whether NCCL allows several
ranks on one GPU.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from benchmarks.gpu.commands import PROGRAMS, at_once, lockstep
from benchmarks.gpu.results import NotRun, Stage

RUNS = {
    "1 process": (1, "single"),
    "2 processes, ddp": (2, "ddp"),
    "4 processes, ddp": (4, "ddp"),
    "2 processes, fsdp": (2, "fsdp"),
}
VIRTUAL_RANKS = 4


def train(
    stage: Stage,
    found: dict[str, dict[str, Any]],
    name: str,
    num_processes: int,
    strategy: str,
    virtual_ranks: int | None,
) -> None:
    """Trains the models of the program on some processes, and keeps hashes and seconds."""
    with stage.check(name) as values:
        folder = stage.scratch / name.replace(" ", "-").replace(",", "")
        options = ["--nproc", str(num_processes), "--strategy", strategy, "--backend", "gloo"]
        if num_processes == 1:
            options = ["--nproc", "1", "--strategy", strategy]
        if virtual_ranks is not None:
            options += ["--virtual-ranks", str(virtual_ranks)]
        result = folder / "result.json"
        program = str(PROGRAMS / "same_bits.py")
        arguments = ["run", "--device", stage.device, *options, program, str(result)]
        done = lockstep(arguments, folder, stage.time_limit(reserve=2))
        values["exit_code"] = done.exit_code
        assert done.exit_code == 0, done.stderr
        values.update(json.loads(result.read_text()))
        found[name] = values


def compare(stage: Stage, found: dict[str, dict[str, Any]], name: str) -> None:
    """Compares the hashes of a run with those of one process."""
    with stage.check(f"{name}: the bits of one process") as values:
        if name not in found or "1 process" not in found:
            raise NotRun("one of the two runs failed")
        values["hashes"] = found[name]["hashes"]
        assert found[name]["hashes"] == found["1 process"]["hashes"], found


def main() -> None:
    stage = Stage("bits")
    found: dict[str, dict[str, Any]] = {}
    plain = "1 process without virtual ranks"
    at_once(
        [
            partial(train, stage, found, name, num_processes, strategy, VIRTUAL_RANKS)
            for name, (num_processes, strategy) in RUNS.items()
            if num_processes > 1
        ]
    )
    # One after the other, since their times are compared.
    train(stage, found, "1 process", 1, "single", VIRTUAL_RANKS)
    train(stage, found, plain, 1, "single", None)
    for name in RUNS:
        if name != "1 process":
            compare(stage, found, name)
    with stage.check("what virtual ranks cost on one process") as values:
        if plain not in found or "1 process" not in found:
            raise NotRun("one of the two runs failed")
        for model, seconds in found["1 process"]["step_s"].items():
            values[f"ratio, {model}"] = round(seconds / found[plain]["step_s"][model], 3)
