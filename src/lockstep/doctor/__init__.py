"""Implements `lockstep doctor`: one file per check, which is listed in `CHECKS`.

A check has two functions. `gather(folder)` reads *facts* from this machine, as values that JSON can
represent; `folder` is the folder for checkpoints. `judge(facts)` is a pure function that returns a
*finding*: what is wrong, if anything. A check that can repair something without root also has
`fix(facts)`, which returns a line about each repair.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.columns import join_label, pad, width_of
from lockstep.doctor import (
    clock,
    cores,
    disk,
    gpus,
    hostname,
    leftovers,
    limits,
    memory,
    network,
    shared_memory,
    software,
    token,
    variables,
)
from lockstep.doctor.base import (
    ERROR,
    OK,
    UNKNOWN,
    WARNING,
    Check,
    Facts,
    Finding,
    RepairingCheck,
)
from lockstep.language import translate

CHECKS: Mapping[str, Check] = {
    "software": software,
    "gpus": gpus,
    "cores": cores,
    "memory": memory,
    "shared_memory": shared_memory,
    "limits": limits,
    "clock": clock,
    "disk": disk,
    "hostname": hostname,
    "network": network,
    "variables": variables,
    "token": token,
    "leftovers": leftovers,
}
"""The checks in the order in which their findings are shown."""
DEADLINE_S = 20.0
"""The time for all checks of a machine together, as a check of something broken may hang."""
FIRST_EXAMINATION_SHARE = 0.75
"""The share of the deadline for the first examination, if there may be another after repairs."""
LEVEL_WIDTH = 9
"""The number of columns for the level, such as `warning`, in a printed line."""


def gather(
    folder: Path, checks: Iterable[str] = CHECKS, deadline_s: float = DEADLINE_S
) -> dict[str, Facts]:
    """Gathers the facts of this machine, by the name of the check. All checks run at the same time.

    If a check fails or takes too long, its facts are a dictionary with the single key `UNKNOWN`.

    Args:
        folder: the folder for checkpoints.
        checks: the names of the checks to run.
        deadline_s: the seconds after which unfinished checks are given up.
    """
    gather_functions = {name: partial(CHECKS[name].gather, folder) for name in checks}
    return run_within(deadline_s, gather_functions)


def run_within(seconds: float, functions: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Calls all functions at the same time, each in a thread of its own.

    Returns:
        The result of each function, by its name. If a function raised, or did not return in time,
        it is a dictionary with the key `UNKNOWN` and the reason.
    """
    results: dict[str, Any] = {}

    def call(name: str) -> None:
        try:
            results[name] = functions[name]()
        except Exception as error:  # a broken machine may raise anything; the others go on
            results[name] = {UNKNOWN: f"{type(error).__name__}: {error}"}

    # A function may hang forever. Daemon threads do not keep this process from ending.
    threads = [threading.Thread(target=call, args=(name,), daemon=True) for name in functions]
    for thread in threads:
        thread.start()

    deadline = time.monotonic() + seconds  # for all threads together
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))

    too_late = {UNKNOWN: f"no answer within {seconds:.3g} s"}
    return {name: results.get(name, too_late) for name in functions}


def judge(facts: Mapping[str, Facts]) -> dict[str, Finding]:
    """Returns the finding of each check on the facts of a machine, by the name of the check."""
    return {
        name: _judge_check(CHECKS[name], facts_of_check) for name, facts_of_check in facts.items()
    }


def _judge_check(check: Check, facts: Facts) -> Finding:
    """Returns the finding of one check, which is a warning if its facts are not known."""
    if UNKNOWN in facts:
        do = "what it looked at may hang or be broken"
        return Finding(WARNING, f"not known: {facts[UNKNOWN]}", do)
    return check.judge(facts)


def fix(facts: Mapping[str, Facts]) -> list[str]:
    """Repairs what can be repaired without root.

    Args:
        facts: the facts of each check, by the name of the check.

    Returns:
        A line about each repair, and about each one that failed.
    """
    done: list[str] = []
    for name, facts_of_check in facts.items():
        check = CHECKS[name]
        facts_are_known = UNKNOWN not in facts_of_check
        if not isinstance(check, RepairingCheck) or not facts_are_known:
            continue
        try:
            done += check.fix(facts_of_check)
        except OSError as error:
            done.append(f"{name}: cannot be fixed: {error}")

    return done


def examine(
    folder: Path, *, repair: bool, deadline_s: float = DEADLINE_S
) -> tuple[dict[str, Facts], list[str]]:
    """Gathers the facts of this machine, after making repairs if they are wanted.

    Args:
        folder: the folder for checkpoints.
        repair: whether to repair what can be repaired without root.
        deadline_s: the seconds that everything may take.

    Returns:
        The facts by the name of the check, and a line about each repair.
    """
    end = time.monotonic() + deadline_s
    if not repair:
        return gather(folder, deadline_s=deadline_s), []

    facts = gather(folder, deadline_s=deadline_s * FIRST_EXAMINATION_SHARE)
    done = fix(facts)
    if done:
        # Gather the facts of these checks again. The others have repaired nothing.
        checks_to_repeat = [name for name in facts if isinstance(CHECKS[name], RepairingCheck)]
        remaining_s = end - time.monotonic()
        facts.update(gather(folder, checks_to_repeat, remaining_s))
    return facts, done


def exit_code(findings: Mapping[str, Finding]) -> int:
    """Returns 1 if any finding is an error, and otherwise 0."""
    has_error = any(finding.level == ERROR for finding in findings.values())
    return 1 if has_error else 0


def format_findings(findings: Mapping[str, Finding]) -> list[str]:
    """Formats the findings: a line for each and, if something is wrong, a line below with what to
    do.

    The columns are the level, the name of the check and what was found:

        warning  clock          2026-11-28 07:45:46 UTC, not kept right by the network: logs of ...
                                do: timedatectl set-ntp true, or start chrony, as root
    """
    shown_names = {name: translate(name.replace("_", " ")) for name in findings}
    name_width = max(width_of(name) for name in shown_names.values()) + 2
    indent = " " * (LEVEL_WIDTH + name_width)
    lines = []
    for name, finding in findings.items():
        level = pad(translate(finding.level), LEVEL_WIDTH)
        padded_name = pad(shown_names[name], name_width)
        lines.append(f"{level}{padded_name}{translate(finding.found)}")
        if finding.level != OK and finding.do:
            advice = join_label(translate("do:"), translate(finding.do))
            lines.append(indent + advice)

    return lines


def as_json(facts: Mapping[str, Facts], findings: Mapping[str, Finding]) -> dict[str, Any]:
    """Returns the findings, each with its facts, as values for `json.dumps`."""
    report = {}
    for name, finding in findings.items():
        report[name] = {**finding._asdict(), "facts": facts[name]}

    return report
