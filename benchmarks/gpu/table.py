"""Turns the lines of runs into `docs/gpu.md`: what ran, on what, at which commit, what failed.

    python -m benchmarks.gpu.table [FILE ...]

Without arguments it reads every `*.jsonl` in `benchmarks/results/gpu`. Of each check the newest
line counts, separately for GPUs and for rehearsals on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import DEFAULT_FOLDER, RESULTS, ROOT, read_lines, source_digest
from benchmarks.gpu.stages import STAGES, is_as_expected

PAGE = ROOT / "docs" / "gpu.md"
MAX_VALUE_CHARACTERS = 160
MAX_REASON_CHARACTERS = 300
NEVER_RUN = (
    "**GPUs:** nothing of Lockstep has been run on a GPU yet, neither its CUDA code nor NCCL; a "
    "run of nine minutes on one GPU is prepared and rehearsed on the CPU"
)
NOT_COVERED = (
    "NVLink, InfiniBand, several GPUs in one machine, several machines with GPUs, and the speed "
    "of anything on several GPUs"
)

Line = dict[str, Any]


class Run:
    """The lines that were written between one start of the runner and the next.

    Attributes:
        begin: the line with which it began.
        lines: all others.
    """

    def __init__(self, begin: Line) -> None:
        self.begin = begin
        self.lines: list[Line] = []

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return str(self.begin["values"]["device"])

    def machine(self) -> Line:
        """What the check of versions found; empty where it was not among the stages."""
        for line in self.lines:
            if line["stage"] == "machine" and line["check"] == "versions":
                return dict(line["values"])
        return {}


def runs_of(lines: Iterable[Line]) -> list[Run]:
    """The runs among lines, the oldest first."""
    found: dict[str, Run] = {}
    for line in lines:
        if line.get("stage") == "run":
            found[line["run"]] = Run(line)
        elif line.get("run") in found:
            found[line["run"]].lines.append(line)
    return [found[name] for name in sorted(found)]


def newest_lines(runs: Sequence[Run]) -> list[tuple[Run, Line]]:
    """Of each check its newest line, with its run, in the order of the stages.

    How a stage as a whole ended is told only where that was not as it should be.
    """
    newest: dict[tuple[str, str], tuple[Run, Line]] = {}
    for run in runs:
        for line in run.lines:
            newest[(line["stage"], line["check"])] = (run, line)
    order = [stage.name for stage in STAGES]
    found = []
    for stage in order:
        for (name, check), entry in newest.items():
            told = check != "(stage)" or entry[1]["result"] != "passed"
            if name == stage and told:
                found.append(entry)
    return found


def readme_sentence(lines: Iterable[Line]) -> str:
    """What the README says at its top: what has run on GPUs, and what has not."""
    runs = [run for run in runs_of(lines) if run.device == "cuda"]
    if not runs:
        return f"{NEVER_RUN} ([what it covers](docs/gpu.md))."
    newest = runs[-1]
    names = [run.machine()["gpu"] for run in runs if "gpu" in run.machine()]
    name = names[-1] if names else "GPU of a kind that was not recorded"
    counts = count_results(line for _, line in newest_lines(runs))
    return (
        f"**GPUs:** run on one {name} ({newest.begin['run'][:10]}): {counts}. Over NCCL two to "
        "four ranks shared that one GPU, so its speed on several GPUs is not known "
        "([results](docs/gpu.md))."
    )


def count_results(lines: Iterable[Line]) -> str:
    """`31 checks passed, 2 failed`."""
    counts = dict.fromkeys(RESULTS, 0)
    for line in lines:
        if line["check"] != "(stage)":
            counts[line["result"]] += 1
    parts = [f"{counts['passed']} checks passed"]
    for result in RESULTS[1:]:
        if counts[result]:
            parts.append(f"{counts[result]} {result}")
    return ", ".join(parts)


def page(lines: Sequence[Line], source: str) -> str:
    """The page, in Markdown.

    Args:
        lines: of all runs.
        source: the digest of the present source.
    """
    runs = runs_of(lines)
    on_gpu = [run for run in runs if run.device == "cuda"]
    rehearsed = [run for run in runs if run.device == "cpu"]
    parts = [INTRODUCTION]
    if on_gpu:
        parts.append(described("On a GPU", on_gpu, source))
    else:
        parts.append(
            "## On a GPU\n\nNot run yet. Until it has been, nothing about GPUs in this "
            "documentation rests on a measurement.\n"
        )
    if rehearsed:
        parts.append(described("Rehearsed on the CPU", rehearsed, source))
        parts.append(REHEARSAL_NOTE)
    return "\n".join(parts)


INTRODUCTION = f"""# GPUs: what has been run, and what has not

`make gpu` runs everything below in at most 540 s on a machine with one GPU. Each part is a process
of its own with a limit of its own, and each result is on disk as soon as it is known; a part that
hangs or crashes costs itself alone.

```sh
make gpu                                  # all of it
make gpu STAGES=probe,nccl                # some of it again
make gpu DEVICE=cpu                       # a rehearsal on a machine without a GPU
make gpu-table                            # writes this page from the results
```

NCCL refuses two ranks on one GPU if both the hash of their host and the bus id of their GPU are
equal. With another `NCCL_HOSTID` in each rank they count as separate hosts and talk over NCCL's
socket transport. Several ranks on one GPU then run real kernels, streams, communicator splits,
point-to-point transfers, the watchdog and Flight Recorder; their speed means nothing. One GPU
cannot show {NOT_COVERED}.
"""
REHEARSAL_NOTE = """
In a rehearsal Gloo takes NCCL's place, models are smaller, and times mean nothing; in place of
synchronizations the reads of values by Python are counted, most of which would not wait for a GPU.
It shows that the run itself works: the stages `rehearse-...` hang, die and fill a disk on purpose.
"""


def described(title: str, runs: Sequence[Run], source: str) -> str:
    """One section: the machine, then a table for each stage."""
    entries = newest_lines(runs)
    parts = [f"## {title}\n"]
    commits = sorted({run.begin["values"].get("commit") or "not known" for run in runs})
    sources = {run.begin["values"].get("source") for run in runs}
    same = "the present source" if sources == {source} else "not all of the present source"
    when = sorted({run.begin["run"] for run in runs})
    parts.append(f"{count_results(line for _, line in entries)}.\n")
    parts.append(f"Begun {', '.join(when)}, at commit {', '.join(commits)}: {same}.\n")
    for run in reversed(runs):
        machine = run.machine()
        if machine:
            parts.append("| machine | |\n|---|---|")
            parts += [f"| {name} | {value} |" for name, value in machine.items()]
            break
    for stage in STAGES:
        of_stage = [(run, line) for run, line in entries if line["stage"] == stage.name]
        of_stage = [entry for entry in of_stage if entry[1]["check"] != "versions"]
        if not of_stage:
            continue
        parts.append(f"\n### {stage.name}: {stage.about}\n")
        parts.append("| check | result | s | found |\n|---|---|---|---|")
        parts += [row(line) for _, line in of_stage]
    return "\n".join(parts) + "\n"


def row(line: Line) -> str:
    """The row of one check."""
    result = line["result"]
    check = "the stage as a whole" if line["check"] == "(stage)" else line["check"]
    if line["check"] == "(stage)" and is_as_expected(line):
        result += ", as it should"
    found = "; ".join(f"{name} {shown(value)}" for name, value in line["values"].items())
    if line["reason"]:
        reason = line["reason"].splitlines()
        last = reason[-1] if result in ("failed",) else reason[0]
        separator = ". " if found else ""
        found += separator + cut(last, MAX_REASON_CHARACTERS)
    return f"| {escaped(check)} | {result} | {line['seconds']:.1f} | {escaped(found)} |"


def shown(value: Any) -> str:
    """A value as it stands in the table."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, dict):
        return cut(", ".join(f"{name} {shown(each)}" for name, each in value.items()) or "none")
    if isinstance(value, str):
        lines = value.splitlines()
        return cut(lines[0]) if lines else ""
    return cut(str(value))


def cut(text: str, limit: int = MAX_VALUE_CHARACTERS) -> str:
    """The beginning of a text."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def escaped(text: str) -> str:
    """A text that breaks no row of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]] or sorted(DEFAULT_FOLDER.glob("*.jsonl"))
    lines: list[Line] = []
    for path in paths:
        lines += read_lines(path)
    PAGE.write_text(page(lines, source_digest()), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")
    print(readme_sentence(lines))


if __name__ == "__main__":
    main()
