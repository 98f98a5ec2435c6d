"""`lockstep doctor`: one file per check, and its name in `CHECKS`.

A check has two functions. `gather(folder)` reads *facts* from this machine, values that JSON can
hold; `folder` is where checkpoints are to go. `judge(facts)` is a pure function that returns a
*finding*: what is wrong with the facts. A check that can repair something without root also has
`fix(facts)`, which returns what it did.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.doctor.base import ERROR, OK, UNKNOWN, WARNING, Facts, Finding

CHECKS = (
    "software",
    "gpus",
    "cores",
    "memory",
    "shared_memory",
    "limits",
    "clock",
    "disk",
    "hostname",
    "network",
    "variables",
    "token",
    "leftovers",
)
DEADLINE_S = 20.0
"""The time for all checks of a machine together: a check of something broken may hang."""
FIRST_EXAMINATION_SHARE = 0.75
"""The part of the deadline for the first examination, if another one after repairs may follow."""
LEVEL_WIDTH = 9
"""Columns of the level, such as `warning`, in a printed line."""


def gather(
    folder: Path, checks: Sequence[str] = CHECKS, deadline_s: float = DEADLINE_S
) -> dict[str, Facts]:
    """Returns the facts of this machine, by the name of the check. All checks run at once.

    The facts of a check that failed or was given up are a dict with the one key `UNKNOWN`.

    Args:
        folder: where checkpoints are to go.
        checks: the names of the checks to run.
        deadline_s: after how many seconds checks that have not finished are given up.
    """
    gather_functions = {name: partial(_module_of(name).gather, folder) for name in checks}
    return run_within(deadline_s, gather_functions)


def _module_of(check: str) -> Any:
    return import_module(f"lockstep.doctor.{check}")


def run_within(seconds: float, functions: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Calls all functions at the same time, each in a thread.

    Returns:
        What each function returned, by its name. For a function that raised, or that did not return
        in time, a dict whose key `UNKNOWN` says so.
    """
    results: dict[str, Any] = {}

    def call(name: str) -> None:
        try:
            results[name] = functions[name]()
        except Exception as error:  # a broken machine may raise anything; the others still count
            results[name] = {UNKNOWN: f"{type(error).__name__}: {error}"}

    # A function may hang for ever. As daemons, such threads do not keep this process from ending.
    threads = [threading.Thread(target=call, args=(name,), daemon=True) for name in functions]
    for thread in threads:
        thread.start()

    deadline = time.monotonic() + seconds  # for all of them together
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))

    too_late = {UNKNOWN: f"no answer within {seconds:.3g} s"}
    return {name: results.get(name, too_late) for name in functions}


def judge(facts: Mapping[str, Facts]) -> dict[str, Finding]:
    """Returns the finding of each check about the facts of a machine, by the name of the check."""
    return {check: _judge_check(check, facts_of_check) for check, facts_of_check in facts.items()}


def _judge_check(check: str, facts: Facts) -> Finding:
    """Returns the finding of one check: a warning if its facts are not known."""
    if UNKNOWN in facts:
        do = "what it looked at may hang or be broken"
        return Finding(WARNING, f"not known: {facts[UNKNOWN]}", do)
    finding: Finding = _module_of(check).judge(facts)
    return finding


def fix(facts: Mapping[str, Facts]) -> list[str]:
    """Repairs what can be repaired without root.

    Args:
        facts: those of each check, by the name of the check.

    Returns:
        A line about each repair, and about each that failed.
    """
    done: list[str] = []
    for check, facts_of_check in facts.items():
        if not _can_fix(check) or UNKNOWN in facts_of_check:
            continue
        try:
            done += _module_of(check).fix(facts_of_check)
        except OSError as error:
            done.append(f"{check}: cannot be fixed: {error}")

    return done


def _can_fix(check: str) -> bool:
    return hasattr(_module_of(check), "fix")


def examine(
    folder: Path, *, repair: bool, deadline_s: float = DEADLINE_S
) -> tuple[dict[str, Facts], list[str]]:
    """Gathers the facts of this machine. If repairs are wanted, they are made first, and the facts
    are those after them.

    Args:
        folder: where checkpoints are to go.
        repair: repair what can be repaired without root.
        deadline_s: seconds for all of it.

    Returns:
        The facts by the name of the check, and a line about each repair.
    """
    end = time.monotonic() + deadline_s

    if not repair:
        return gather(folder, deadline_s=deadline_s), []

    facts = gather(folder, deadline_s=deadline_s * FIRST_EXAMINATION_SHARE)
    done = fix(facts)
    if done:
        # Only the checks that can repair something may have other facts now.
        fixable = [check for check in facts if _can_fix(check)]
        remaining_s = end - time.monotonic()
        facts.update(gather(folder, fixable, remaining_s))

    return facts, done


def exit_code(findings: Mapping[str, Finding]) -> int:
    """Returns 1 if a finding is an error, and otherwise 0."""
    has_error = any(finding.level == ERROR for finding in findings.values())
    return 1 if has_error else 0


def lines(findings: Mapping[str, Finding]) -> list[str]:
    """Returns a line for each finding, and below it what to do if something is wrong.

    The columns are the level, the name of the check and what was found:

        warning  clock          2026-11-28 07:45:46 UTC, not kept right by the network: logs of ...
                                do: timedatectl set-ntp true, or start chrony, as root
    """
    name_width = max(len(name) for name in findings) + 2
    text = []
    for name, finding in findings.items():
        level = finding.level.ljust(LEVEL_WIDTH)
        padded_name = name.replace("_", " ").ljust(name_width)
        text.append(f"{level}{padded_name}{finding.found}")
        if finding.level != OK and finding.do:
            text.append(" " * (LEVEL_WIDTH + name_width) + f"do: {finding.do}")

    return text


def as_json(facts: Mapping[str, Facts], findings: Mapping[str, Finding]) -> dict[str, Any]:
    """Returns the findings, each with its facts, as values for `json.dumps`."""
    report = {}
    for name, finding in findings.items():
        report[name] = {
            "level": finding.level,
            "found": finding.found,
            "do": finding.do,
            "facts": facts[name],
        }

    return report
