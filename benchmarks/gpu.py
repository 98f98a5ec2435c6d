"""Runs every test marked `gpu`, and says what each of them came to.

Prints the machine, a table of the tests with their results and times, and the reasons of those
that failed or were skipped; writes the same to a file. The exit code is 1 where one failed, or was
not begun before the time was over. Where torch sees no GPU they are collected, and their bodies run
on the CPU.

    python benchmarks/gpu.py [-k WORDS] [--out FILE] [--limit SECONDS]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
NEEDED = ("pytest", "pytest_timeout", "psutil", "safetensors", "click", "rich")
REASON_CHARACTERS = 6000


@dataclass(frozen=True)
class Result:
    """What one test came to."""

    test: str
    result: str
    seconds: float
    reason: str


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-k", dest="words", default="", help="of the tests to run, as for pytest")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/gpu.json")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds, for all tests")
    given = parser.parse_args()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(f"to run the tests install {', '.join(missing)}")
    if not torch.cuda.is_available():
        names = collected(given.words)
        print(f"torch {torch.__version__} sees no GPU: {len(names)} tests collected, none run")
        print("their bodies on the CPU:", flush=True)
        sys.exit(subprocess.call(line("tests/gpu", "-m", "not gpu"), cwd=ROOT, env=environment()))
    facts = machine()
    for name, value in facts.items():
        print(f"{name:10} {value}", flush=True)
    wanted = collected(given.words)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = run(given.words, report, given.limit)
        results = read(report) if report.exists() else []
    show(results)
    if len(results) < len(wanted):
        print(f"{len(wanted) - len(results)} not begun: choose some with -k, or set --limit")
    given.out.parent.mkdir(exist_ok=True)
    told = {"machine": facts, "tests": [asdict(result) for result in results]}
    given.out.write_text(json.dumps(told, indent=1) + "\n")
    print(f"written to {given.out}")
    if code or not results:
        sys.exit(1)


def chosen(words: str) -> list[str]:
    return ["-m", "gpu", *(["-k", words] if words else [])]


def collected(words: str) -> list[str]:
    """The names of the tests."""
    arguments = line("--collect-only", *chosen(words))
    done = subprocess.run(
        arguments, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 5):  # 5: there are none
        sys.exit(done.stdout + done.stderr)
    return re.findall(r"^\S+::\S+", done.stdout, re.MULTILINE)


def run(words: str, report: Path, limit: float) -> int:
    """Pytest's exit code; it writes what it has come to also where the time is over."""
    # Of torch and libraries in versions that nobody has tried: a warning is no failure.
    arguments = line("-W", "default", *chosen(words), f"--junitxml={report}", "-v")
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment())
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return process.wait()


def line(*arguments: str) -> list[str]:
    # Tests open sockets, start processes and count them: one after the other, whatever is set up.
    plain = ("-p", "pytest_timeout", "-p", "no:cacheprovider")
    return [sys.executable, "-m", "pytest", *plain, *arguments]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        # Plugins that happen to be installed have nothing to do with it.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # So that it runs from a checkout as it is; ranks and commands inherit it.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        ),
        "GPU_TESTS_ON_CPU": "1",
        # Some versions of torch set this when they begin to use CUDA, which a test that watches
        # over the environment's variables would take for its own doing.
        "CUDA_MODULE_LOADING": os.environ.get("CUDA_MODULE_LOADING", "LAZY"),
    }


def machine() -> dict[str, str]:
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(n) for n in range(count)})
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ("none",)
    return {
        "GPU": f"{count} x {', '.join(names)}",
        "memory": f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.1f} GiB each",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, nccl)),
        "Python": platform.python_version(),
        "CPU": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def read(report: Path) -> list[Result]:
    """The results that pytest has written; an error around a test counts as its failure."""
    found: dict[str, Result] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.get('classname', '')}::{case.get('name', '')}".removeprefix("tests.")
        result, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                result = "skipped" if child.tag == "skipped" else "failed"
                text = child.get("message", "") if result == "skipped" else child.text
                reason = (text or child.get("message", ""))[-REASON_CHARACTERS:]
        # A test that passed and left something behind is written twice.
        if test not in found or result == "failed":
            found[test] = Result(test, result, float(case.get("time", 0.0)), reason)
    return list(found.values())


def show(results: list[Result]) -> None:
    width = max((len(result.test) for result in results), default=0)
    print()
    for result in results:
        last = result.reason.strip().splitlines()[-1:] if result.reason else []
        short = f"  {last[0].strip()}" if last and result.result == "skipped" else ""
        print(f"{result.test:{width}}  {result.result:8}{result.seconds:7.1f} s{short}")
    for result in results:
        if result.result == "failed":
            print(f"\n--- {result.test}\n{result.reason}")
    kinds = ("passed", "failed", "skipped")
    counts = [(kind, sum(result.result == kind for result in results)) for kind in kinds]
    print("\n" + ", ".join(f"{count} {kind}" for kind, count in counts))


if __name__ == "__main__":
    main()
