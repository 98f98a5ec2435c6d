"""Stage `tests`: the tests marked `gpu`, file by file, each with a limit of its own.

Each test's result is written as soon as the test is over, by the plugin below, so that a file that
hangs loses only the test that hung. On the CPU the bodies of the same tests run there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu.commands import end_tree
from benchmarks.gpu.results import BEGIN_MARK, END_MARK, ROOT, Stage
from benchmarks.gpu.stages import CPU_FACTOR

SECONDS_FOR_A_FILE = 40.0
MIN_SECONDS = 5.0
FIRST = ("nccl", "prefetch", "checkpoint", "parity", "memory", "batchnorm", "precision")
"""Parts of the names of files, the most valuable first; the others follow."""


def files_in_order() -> list[str]:
    """The files of tests, relative to the root."""
    paths = sorted((ROOT / "tests" / "gpu").glob("test_gpu_*.py"))

    def key(name: str) -> tuple[int, str]:
        for number, part in enumerate(FIRST):
            if part in name:
                return number, name
        return len(FIRST), name

    return sorted((f"tests/gpu/{path.name}" for path in paths), key=key)


def run_file(stage: Stage, file: str) -> None:
    """Runs the tests of one file; a line for the file is written if they do not end by themselves.

    The tests write their own lines.
    """
    marker = "gpu" if stage.on_gpu else "not gpu"
    factor = 1.0 if stage.on_gpu else CPU_FACTOR
    limit = min(SECONDS_FOR_A_FILE * factor, stage.seconds_left - 1)
    plugins = ("-p", "pytest_timeout", "-p", "no:cacheprovider", "-p", __name__)
    command = [sys.executable, "-m", "pytest", *plugins, "-m", marker, "-W", "default", file]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        code: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
        end_tree(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
    seconds = time.monotonic() - began
    no_tests = 5
    if code is None:
        stage.write(file, "timed out", seconds, {}, f"over {limit:.0f} s")
    elif code not in (0, 1, no_tests):
        stage.write(file, "crashed", seconds, {}, f"pytest ended with exit code {code}")


def main() -> None:
    stage = Stage("tests")
    for file in files_in_order():
        if stage.seconds_left < MIN_SECONDS:
            stage.write(file, "not run", 0.0, {}, "no time was left")
            continue
        print(f"{BEGIN_MARK}{file}", flush=True)
        run_file(stage, file)
        print(f"{END_MARK}{file}", flush=True)


# The plugin, in the process of pytest


def pytest_runtest_logreport(report: Any) -> None:
    """Writes the line of a test when it is over; an error around it counts as its failure."""
    is_end_of_test = report.when == "call"
    if not is_end_of_test and report.passed:
        return
    result = {"passed": "passed", "failed": "failed", "skipped": "not run"}[report.outcome]
    reason = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2])
    elif not report.passed:
        reason = report.longreprtext
    name = report.nodeid.removeprefix("tests/gpu/")
    Stage("tests").write(name, result, report.duration, {}, reason)
