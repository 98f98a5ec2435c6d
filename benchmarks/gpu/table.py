"""Turns the lines of runs into `docs/gpu.md`: what ran, on what, at which commit, what failed.

`docs/gpu.zh.md` says the same in Chinese.

    python -m benchmarks.gpu.table [FILE ...]

Without arguments it reads every `*.jsonl` in `benchmarks/results/gpu`. Of each check the newest
line counts, separately for GPUs and for rehearsals on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.aims import aims_of
from benchmarks.gpu.page_texts import CHINESE, ENGLISH, PageTexts
from benchmarks.gpu.results import DEFAULT_FOLDER, RESULTS, ROOT, read_lines
from benchmarks.gpu.stages import STAGES, is_as_expected

MAX_VALUE_CHARACTERS = 160
MAX_REASON_CHARACTERS = 300

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


def readme_sentence(lines: Iterable[Line], texts: PageTexts = ENGLISH) -> str:
    """What the README says at its top: what has run on GPUs, and what has not."""
    runs = [run for run in runs_of(lines) if run.device == "cuda"]
    if not runs:
        return texts.readme_without_a_gpu
    newest = runs[-1]
    names = [run.machine()["gpu"] for run in runs if "gpu" in run.machine()]
    return texts.readme_with_a_gpu.format(
        gpu=names[-1] if names else texts.unknown_gpu,
        day=newest.begin["run"][:10],
        counts=count_results((line for _, line in newest_lines(runs)), texts),
    )


def count_results(lines: Iterable[Line], texts: PageTexts = ENGLISH) -> str:
    """`31 checks passed, 2 failed`."""
    counts = dict.fromkeys(RESULTS, 0)
    for line in lines:
        if line["check"] != "(stage)":
            counts[line["result"]] += 1
    parts = [texts.passed.format(number=counts["passed"])]
    for result in RESULTS[1:]:
        if counts[result]:
            name = texts.results.get(result, result)
            parts.append(texts.other_results.format(number=counts[result], result=name))
    return texts.comma.join(parts)


def page(lines: Sequence[Line], texts: PageTexts = ENGLISH) -> str:
    """The page, in Markdown.

    Args:
        lines: of all runs.
        texts: of the language.
    """
    runs = runs_of(lines)
    on_gpu = [run for run in runs if run.device == "cuda"]
    rehearsed = [run for run in runs if run.device == "cpu"]
    parts = [texts.introduction]
    if on_gpu:
        parts.append(described(texts.on_a_gpu, on_gpu, texts))
    else:
        parts.append(f"## {texts.on_a_gpu}\n\n{texts.not_run}\n")
    if rehearsed:
        parts.append(described(texts.rehearsed, rehearsed, texts))
        parts.append(texts.rehearsal_note)
    return "\n".join(parts)


def described(title: str, runs: Sequence[Run], texts: PageTexts) -> str:
    """One section: the machine, then a table for each stage."""
    entries = newest_lines(runs)
    parts = [f"## {title}\n"]
    commits = sorted({run.begin["values"].get("commit") or "not known" for run in runs})
    when = sorted({run.begin["run"] for run in runs})
    begun = texts.begun.format(when=", ".join(when), commits=", ".join(commits))
    full_stop = begun[-1]
    parts.append(count_results((line for _, line in entries), texts) + full_stop + "\n")
    parts.append(begun + "\n")
    for run in reversed(runs):
        machine = run.machine()
        if machine:
            parts.append(f"| {texts.machine} | |\n|---|---|")
            parts += [f"| {name} | {value} |" for name, value in machine.items()]
            break
    for stage in STAGES:
        of_stage = [(run, line) for run, line in entries if line["stage"] == stage.name]
        of_stage = [entry for entry in of_stage if entry[1]["check"] != "versions"]
        if not of_stage:
            continue
        parts.append(f"\n### {stage.name}{texts.colon}{texts.about[stage.name]}\n")
        parts.append(f"| {texts.columns} |\n|---|---|---|---|---|")
        parts += [row(line, texts) for _, line in of_stage]
    return "\n".join(parts) + "\n"


def row(line: Line, texts: PageTexts = ENGLISH) -> str:
    """The row of one check."""
    result = texts.results.get(line["result"], line["result"])
    check = texts.whole_stage if line["check"] == "(stage)" else line["check"]
    if line["check"] == "(stage)" and is_as_expected(line):
        result += texts.as_it_should
    found = "; ".join(f"{name} {shown(value)}" for name, value in line["values"].items())
    if line["reason"]:
        reason = line["reason"].splitlines()
        told = reason[-1] if line["result"] == "failed" else reason[0]
        separator = ". " if found else ""
        found += separator + cut(told, MAX_REASON_CHARACTERS)
    aim = "; ".join(f"{name} ≤ {most:g}" for name, most in aims_of_line(line).items())
    return f"| {escaped(check)} | {result} | {aim} | {line['seconds']:.1f} | {escaped(found)} |"


def aims_of_line(line: Line) -> dict[str, float]:
    """The most that each value of a check may be; empty for a stage as a whole."""
    return {} if line["check"] == "(stage)" else aims_of(line["stage"], line["check"])


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
    for texts in (ENGLISH, CHINESE):
        texts.page.write_text(page(lines, texts), encoding="utf-8")
        print(f"written: {texts.page.relative_to(ROOT)}")
        print(readme_sentence(lines, texts))


if __name__ == "__main__":
    main()
