"""Runs the stages, each in a process of its own with a limit of its own.

    make gpu                         # all stages, at most 540 s
    make gpu STAGES=probe,nccl       # some of them again
    make gpu DEVICE=cpu              # rehearses all of it on a machine without a GPU
    make gpu-table                   # turns the results into docs/gpu.md

Where there is no make: python3 -m benchmarks.gpu --stages probe,nccl, in the repository's root.

A stage that hangs, crashes or fills the disk costs itself and nothing else: the runner uses neither
torch nor the GPU, ends whatever a stage has started, and says where the stage stood. Results are
lines in `results.jsonl` and the stages' output is in `output.log`, both in the folder that the
variable OUT names (else `benchmarks/results/gpu`).

The exit code is 0 if every check passed or could not be made here, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import results
from benchmarks.gpu.stages import (
    CPU_FACTOR,
    TOTAL_SECONDS,
    StageOfRun,
    UnknownStage,
    choose,
    is_as_expected,
)

REQUIRED_PACKAGES = (
    *("torch", "numpy", "safetensors", "click", "rich", "psutil", "jinja2"),
    *("pytest", "pytest_timeout"),
)
"""What Lockstep and the stages import. It runs from a checkout, so nothing has installed them."""
MIN_SECONDS_FOR_A_STAGE = 5.0
MAX_SECONDS_FOR_FIRST_LOOK = 120.0
"""On a machine that was just started, the first import of torch reads gigabytes."""
FIRST_LOOK = """
import sys, torch
print(torch.__version__, float(torch.ones(2, device=sys.argv[1]).sum()))
"""
"""A program that shows that torch can compute on the device that it is given."""
SECONDS_TO_DUMP_STACKS = 1.5
SECONDS_TO_DIE = 5.0
"""A process that SIGKILL has not ended after so long is left behind, and named."""
MAX_LOG_BYTES_A_STAGE = 2**20
KEPT_OUTPUT_CHARACTERS = 5000
PR_SET_CHILD_SUBREAPER = 36
"""See prctl(2)."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--stages", default="", help="separated by commas; all if left out")
    parser.add_argument("--limit", type=float, help="seconds for all stages together")
    parser.add_argument(
        "--factor", type=float, help="of the stages' own limits; 1 on a GPU, 4 on the CPU"
    )
    parser.add_argument("--out", type=Path, help="folder of the results, instead of OUT's")
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    try:
        stages = choose(given.stages, on_gpu)
    except UnknownStage as error:
        sys.exit(f"--stages {given.stages}: {error}")
    missing = missing_packages(REQUIRED_PACKAGES)
    if missing:
        sys.exit(f"{sys.executable} lacks {', '.join(missing)}: install them, or run `make gpu`")
    folder = given.out or Path(os.environ.get("OUT") or results.DEFAULT_FOLDER)
    factor = given.factor or (1.0 if on_gpu else CPU_FACTOR)
    seconds = given.limit or TOTAL_SECONDS * factor
    all_passed = run_stages(stages, folder.resolve(), given.device, seconds, factor)
    sys.exit(0 if all_passed else 1)


def run_stages(
    stages: list[StageOfRun], folder: Path, device: str, seconds: float, factor: float
) -> bool:
    """Runs the stages one after the other; returns whether nothing failed.

    Args:
        stages: in the order in which they run.
        folder: of the results.
        device: `cuda` or `cpu`.
        seconds: for all stages together.
        factor: by which each stage's own limit is multiplied.
    """
    results.prepare_folder(folder)
    adopt_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must not write gigabytes
    run = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    facts = {
        "device": device,
        "commit": results.commit(),
        "source": results.source_digest(),
        "stages": [stage.name for stage in stages],
        "limit": seconds,
    }
    results.write_result(folder, run, "run", "(begin)", "passed", 0.0, facts)
    deadline = time.monotonic() + seconds
    problem = first_look(device, MAX_SECONDS_FOR_FIRST_LOOK)
    if problem:
        say(f"no stage is run, since torch cannot use the device: {problem}")
        results.write_result(folder, run, "run", "(first look)", "failed", 0.0, {}, problem)
        results.release_reserve(folder)
        return False
    for stage in stages:
        lacking = missing_packages(stage.needs)
        if lacking:
            reason = f"{sys.executable} lacks {', '.join(lacking)}"
            say(f"{stage.name}: not run, {reason}")
            results.write_result(folder, run, stage.name, "(stage)", "not run", 0.0, {}, reason)
            continue
        left = deadline - time.monotonic()
        if left < MIN_SECONDS_FOR_A_STAGE:
            say(f"{stage.name}: no time is left")
            reason = f"the run's {seconds:.0f} s were over"
            results.write_result(folder, run, stage.name, "(stage)", "not run", 0.0, {}, reason)
            continue
        run_stage(stage, folder, run, device, min(stage.seconds * factor, left))
    results.release_reserve(folder)
    return summarize(folder, run)


def missing_packages(names: Sequence[str]) -> list[str]:
    """Returns those of the packages that this Python does not have."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def first_look(device: str, limit: float) -> str:
    """Computes something on the device, in a process of its own.

    Without it, each stage would fail by itself on a machine whose GPU torch cannot use, and the
    first stage would pay for the first import of torch.

    Returns:
        What was wrong; empty if nothing was.
    """
    command = [sys.executable, "-c", FIRST_LOOK, device]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"importing torch and computing on {device} took more than {limit:.0f} s"
    if done.returncode:
        return done.stderr.strip() or f"the first program ended with exit code {done.returncode}"
    torch_version = done.stdout.split()[0]
    say(f"torch {torch_version} computes on {device}, after {time.monotonic() - began:.1f} s")
    return ""


def run_stage(stage: StageOfRun, folder: Path, run: str, device: str, limit: float) -> None:
    """Runs one stage to its end or to its limit, and writes how it ended."""
    say(f"{stage.name}: {stage.about}; at most {limit:.0f} s")
    scratch = Path(tempfile.mkdtemp(prefix=f"gpu-run-{stage.name}-"))
    began = time.monotonic()
    environment = stage_environment(folder, run, device, scratch, limit)
    process = subprocess.Popen(
        # Imported by its own name, as ranks that are forked must find its functions again.
        [sys.executable, "-c", f"from benchmarks.gpu.{stage.module} import main; main()"],
        cwd=results.ROOT,
        env={**environment, "GPU_RUN_STAGE": stage.name},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )
    output = StageOutput(process, folder / results.LOG_NAME, stage.name)
    try:
        code: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
        dump_stacks(process.pid)
    stuck = end_processes()
    output.finish()
    shutil.rmtree(scratch, ignore_errors=True)
    seconds = time.monotonic() - began
    values: dict[str, Any] = {"limit": round(limit, 1)}
    memory = gpu_memory_used()
    if memory is not None:
        values["gpu_memory_used_afterwards_mib"] = memory
    if stuck:
        values["processes_that_sigkill_did_not_end"] = stuck
    result, reason = how_it_ended(code, limit, output)
    results.write_result(folder, run, stage.name, "(stage)", result, seconds, values, reason)
    say(f"{stage.name}: {result} after {seconds:.1f} s")
    if reason:
        say(f"    {reason.splitlines()[0]}")


def how_it_ended(code: int | None, limit: float, output: StageOutput) -> tuple[str, str]:
    """The result of a stage, and the reason where it did not pass.

    Args:
        code: its exit code, or minus the signal that ended it; None where the time was over.
        limit: the seconds that it had.
        output: what it printed.
    """
    stood = ", ".join(output.open_checks) or "outside of a check"
    if code == 0:
        return "passed", ""
    if code is None:
        return "timed out", f"over {limit:.0f} s, at: {stood}\n{output.tail()}"
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return "crashed", f"ended by {name}, at: {stood}\n{output.tail()}"
    return "crashed", f"exit code {code}, at: {stood}\n{output.tail()}"


def stage_environment(
    folder: Path, run: str, device: str, scratch: Path, limit: float
) -> dict[str, str]:
    """The variables of a stage's process; everything that it starts inherits them."""
    tests = results.ROOT / "tests"
    paths = [results.ROOT, results.ROOT / "src", tests, tests / "gpu"]
    kept = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        # It runs from a checkout as it is, whatever is installed.
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([kept] if kept else [])]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TMPDIR": str(scratch),
        "OMP_NUM_THREADS": "1",
        # Some versions of torch set this when they begin to use CUDA, which a test that watches
        # over the environment's variables would take for its own doing.
        "CUDA_MODULE_LOADING": os.environ.get("CUDA_MODULE_LOADING", "LAZY"),
        # Torch asks NVML for GPUs, as it does once Lockstep is imported. Otherwise a process that
        # looks for GPUs before it forks could not use them in the forked ones.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # A GPU of the machine must not be found in a rehearsal.
        **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        results.FOLDER_VARIABLE: str(folder),
        results.RUN_VARIABLE: run,
        results.DEVICE_VARIABLE: device,
        results.END_VARIABLE: repr(time.time() + limit),
    }


class StageOutput:
    """Copies what a stage prints to the log, and keeps the end of it.

    A thread reads, so that a stage that prints much is never held up. A stage may fill the disk:
    what the log does not take is lost, and the stage goes on.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, stage: str) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self._log = log
        self._written = 0
        self._kept = ""
        self.open_checks: list[str] = []
        """The checks that have begun and not ended."""
        self._write(f"\n=== {stage}, {time.strftime('%H:%M:%S')}\n".encode())
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            self._write(line)
            text = line.decode(errors="replace")
            if text.startswith(results.BEGIN_MARK):
                self.open_checks.append(text.removeprefix(results.BEGIN_MARK).strip())
            if text.startswith(results.END_MARK):
                ended = text.removeprefix(results.END_MARK).strip()
                self.open_checks = [name for name in self.open_checks if name != ended]
            self._kept = (self._kept + text)[-KEPT_OUTPUT_CHARACTERS:]

    def _write(self, data: bytes) -> None:
        if self._written + len(data) > MAX_LOG_BYTES_A_STAGE:
            return
        self._written += len(data)
        with contextlib.suppress(OSError), self._log.open("ab") as file:
            file.write(data)

    def tail(self) -> str:
        """The end of what was printed."""
        return self._kept

    def finish(self) -> None:
        """Waits until all is read, unless a process that cannot be ended holds the pipe."""
        self._thread.join(SECONDS_TO_DIE)


def dump_stacks(pid: int) -> None:
    """Has a stage that is over its time print where its threads are, before it is ended."""
    import psutil  # here, so that `main` can say first that it is missing

    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGABRT)  # faulthandler prints all stacks
    with contextlib.suppress(psutil.Error):
        psutil.Process(pid).wait(SECONDS_TO_DUMP_STACKS)


def adopt_orphans() -> None:
    """Makes this process the parent of whatever a stage leaves behind, so that it can be ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_processes() -> list[str]:
    """Kills everything that the stage has started.

    Returns:
        Those that were not gone after some seconds, each with the state that the system gives.
    """
    import psutil

    limit = time.monotonic() + SECONDS_TO_DIE
    left = psutil.Process().children(recursive=True)
    while left and time.monotonic() < limit:
        for child in left:
            with contextlib.suppress(psutil.Error):
                child.kill()
        psutil.wait_procs(left, timeout=0.2)
        reap_orphans()
        left = psutil.Process().children(recursive=True)
    stuck = []
    for child in left:
        with contextlib.suppress(psutil.Error):
            stuck.append(f"pid {child.pid} ({child.name()}) is {child.status()}")
    return stuck


def reap_orphans() -> None:
    """Takes the exit status of processes that were adopted, which are zombies until then."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def gpu_memory_used() -> int | None:
    """MiB that all processes hold on the first GPU; None where it cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return int(done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def summarize(folder: Path, run: str) -> bool:
    """Prints how many checks came to what; returns whether nothing failed."""
    lines = [
        line
        for line in results.read_lines(folder / results.FILE_NAME)
        if line.get("run") == run and line.get("stage") != "run"
    ]
    say("")
    for line in lines:
        if not is_as_expected(line):
            say(f"{line['result']}: {line['stage']}, {line['check']}")
            for text in line["reason"].splitlines()[-3:]:
                say(f"    {text[:200]}")
    counts = []
    for result in results.RESULTS:
        count = sum(line["result"] == result for line in lines)
        counts.append(f"{count} {result}")
    say(", ".join(counts))
    say(f"written to {folder / results.FILE_NAME}")
    return all(is_as_expected(line) for line in lines)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
