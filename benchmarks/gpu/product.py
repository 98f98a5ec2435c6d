"""Stage `product`: what a user does, by `lockstep run`. Its ranks come from the fork server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.commands import PROGRAMS, at_once, lockstep
from benchmarks.gpu.results import NotRun, Stage

EPOCHS = 6
KILL_AT_STEP = 35
"""In the second of the epochs of 23 steps; a checkpoint is saved every ten steps."""
MIN_ACCURACY = 0.94
MAX_DRIFT = 0.05


PLAIN = "bf16, workers, progress, report, checkpoint"
KILLED = "kill -9, restart, resume"
TWO_RANKS = "two ranks over Gloo on one device"
TWO_RANKS_KILLED = "two ranks over Gloo on one device, kill -9, restart, resume"


def train(
    stage: Stage,
    found: dict[str, dict[str, Any]],
    name: str,
    run_options: Sequence[str],
    script_options: Sequence[str],
) -> None:
    """One training of the digits, with its report and checkpoints in folders of its own."""
    with stage.check(name) as values:
        folder = stage.scratch / name.replace(" ", "-").replace(",", "")
        arguments = [
            *("run", "--device", stage.device, *run_options),
            *("--report", str(folder / "report")),
            *(str(PROGRAMS / "train_digits.py"), "--folder", str(folder / "checkpoints")),
            *("--epochs", str(EPOCHS), *script_options),
        ]
        done = lockstep(arguments, folder, stage.time_limit(reserve=2))
        values["exit_code"] = done.exit_code
        values["wall_s"] = round(done.seconds, 1)
        assert done.exit_code == 0, done.stderr
        values.update(json.loads((folder / "checkpoints" / "result.json").read_text()))
        records = list((folder / "report").rglob("*"))
        values["files_of_the_report"] = len(records)
        traces = [path for path in records if path.name.endswith(".trace.json.gz")]
        values["traces"] = len(traces)
        texts = [path.read_text() for path in records if path.suffix == ".record"]
        values["answers_of_nvml"] = sum(text.count('{"gpu":') for text in texts)  # 0 without it
        assert values["accuracy"] >= MIN_ACCURACY, values
        assert records, "the report's folder is empty"
        assert bool(traces) == ("--trace-step" in run_options), records
        found[name] = values


def compare_with_uninterrupted(
    stage: Stage, found: dict[str, dict[str, Any]], check: str, plain: str, killed: str
) -> None:
    """The run that was killed and resumed ends where the one that was not killed ends.

    Args:
        stage: this stage.
        found: the results of the runs, by name.
        check: the name of this check.
        plain: the name of the run that was not killed.
        killed: the name of the run that was killed, and goes on from the step kept in memory.
    """
    with stage.check(check) as values:
        if plain not in found or killed not in found:
            raise NotRun("one of the two runs failed")
        expected = found[plain]["weights_norm"]
        values["relative_difference"] = abs(found[killed]["weights_norm"] - expected) / expected
        resumed_at = found[killed]["resumed_at_step"]
        assert resumed_at is not None, "the second attempt did not resume"
        # From memory. The last checkpoint on disk is older.
        assert KILL_AT_STEP - 1 <= resumed_at <= KILL_AT_STEP, resumed_at
        assert found[killed]["steps"] == found[plain]["steps"], found
        # Kernels that add in another order each time make bf16 runs drift apart.
        assert values["relative_difference"] < MAX_DRIFT, values


def launch_copies(stage: Stage, nvml_check: str) -> None:
    """A notebook's way: copies of a process that has asked torch for GPUs.

    Args:
        stage: this stage.
        nvml_check: value of the variable that `import lockstep` would set to 1. With 0, torch
            initializes CUDA when it is asked.
    """
    with stage.check(f"launch of copies, PYTORCH_NVML_BASED_CUDA_CHECK={nvml_check}") as values:
        done = subprocess.run(
            [sys.executable, str(PROGRAMS / "launch_copies.py"), stage.device],
            env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": nvml_check},
            capture_output=True,
            text=True,
            timeout=stage.time_limit(reserve=2),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        values.update(json.loads(done.stdout.splitlines()[-1]))
        computed = [stage.device, 1000.0]
        assert values["gpu_is_available"] is stage.on_gpu, values
        if not stage.on_gpu:
            assert values["first"] == values["second"] == computed, values
            return
        if nvml_check == "1":
            assert values["first"] == computed, values
        else:
            assert "torch has asked CUDA for its devices" in values["first"], values
        assert "torch has used a GPU" in values["second"], values


def main() -> None:
    stage = Stage("product")
    one = ("--nproc", "1", "--precision", "bf16")
    # A thread copies each step to memory while the next one computes, also on a GPU.
    restarted = ("--max-restarts", "1", "--keep-in-memory")
    two = ("--nproc", "2", "--backend", "gloo", "--precision", "bf16")
    kill = ("--kill-at-step", str(KILL_AT_STEP))
    found: dict[str, dict[str, Any]] = {}
    at_once(
        [
            partial(train, stage, found, "torch.compile, bf16", one, ["--compile"]),
            partial(train, stage, found, PLAIN, (*one, "--trace-step", "20"), []),
            partial(train, stage, found, KILLED, (*one, *restarted), kill),
            partial(train, stage, found, TWO_RANKS, two, []),
            partial(train, stage, found, TWO_RANKS_KILLED, (*two, *restarted), kill),
            partial(launch_copies, stage, "1"),
            partial(launch_copies, stage, "0"),
        ]
    )
    check = "the killed run ends with the weights of the other"
    compare_with_uninterrupted(stage, found, check, PLAIN, KILLED)
    compare_with_uninterrupted(stage, found, f"{check}, two ranks", TWO_RANKS, TWO_RANKS_KILLED)
