"""What `lockstep doctor` looks at: one file a check, and one line in `CHECKS`.

A check has two functions. `gather(folder)` looks at this machine and gives facts, values that JSON
can hold; `judge(facts)` is pure and says what is wrong with them. One that can mend something has
`fix(facts)` too, which needs no root.
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
"""For all checks of a machine together: what looks at a broken machine may wait for ever."""
_FIRST = 0.75
"""The part of it for the first look, where a second one is to see what was mended."""


def gather(
    folder: Path, checks: Sequence[str] = CHECKS, deadline_s: float = DEADLINE_S
) -> dict[str, Facts]:
    """The facts of this machine, by check; all checks look at the same time.

    Args:
        folder: where checkpoints are to go.
        checks: which.
        deadline_s: seconds after which what has not answered is given up.
    """
    modules = {name: import_module(f"lockstep.doctor.{name}") for name in checks}
    return within(deadline_s, {name: partial(of.gather, folder) for name, of in modules.items()})


def within(seconds: float, work: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each piece of work gives, all at the same time; `UNKNOWN` where it raises or is late."""
    found: dict[str, Any] = {}

    def do(name: str) -> None:
        try:
            found[name] = work[name]()
        except Exception as error:  # whatever is broken here must not hide the others
            found[name] = {UNKNOWN: f"{type(error).__name__}: {error}"}

    threads = [threading.Thread(target=do, args=(name,), daemon=True) for name in work]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = {UNKNOWN: f"no answer within {seconds:.3g} s"}
    return {name: found.get(name, late) for name in work}


def judge(facts: Mapping[str, Facts]) -> dict[str, Finding]:
    """What is wrong with the facts of a machine, by check."""
    return {name: _judge(name, of_check) for name, of_check in facts.items()}


def _judge(name: str, facts: Facts) -> Finding:
    if UNKNOWN in facts:
        do = "what it looked at may hang or be broken"
        return Finding(WARNING, f"not known: {facts[UNKNOWN]}", do)
    finding: Finding = import_module(f"lockstep.doctor.{name}").judge(facts)
    return finding


def fix(facts: Mapping[str, Facts]) -> list[str]:
    """Mends what can be mended without root; says what was done."""
    done: list[str] = []
    for name, of_check in facts.items():
        mend = _fixes(name)
        if mend is not None and UNKNOWN not in of_check:
            try:
                done += mend(of_check)
            except OSError as error:
                done.append(f"{name}: cannot be mended: {error}")
    return done


def _fixes(name: str) -> Callable[[Facts], list[str]] | None:
    return getattr(import_module(f"lockstep.doctor.{name}"), "fix", None)


def look(
    folder: Path, *, mend: bool, deadline_s: float = DEADLINE_S
) -> tuple[dict[str, Facts], list[str]]:
    """The facts of this machine; with `mend` what can be mended is mended first, and said."""
    end = time.monotonic() + deadline_s
    facts = gather(folder, deadline_s=deadline_s * (_FIRST if mend else 1.0))
    done = fix(facts) if mend else []
    if done:
        again = [name for name in facts if _fixes(name)]
        facts |= gather(folder, again, end - time.monotonic())
    return facts, done


def exit_code(findings: Mapping[str, Finding]) -> int:
    """1 where there is an error, else 0."""
    return int(any(finding.level == ERROR for finding in findings.values()))


def lines(findings: Mapping[str, Finding]) -> list[str]:
    """One line a check, and one of what to do where something is wrong."""
    width = max(map(len, findings)) + 2
    found = []
    for name, finding in findings.items():
        found.append(f"{finding.level:<9}{name.replace('_', ' '):<{width}}{finding.found}")
        if finding.level != OK and finding.do:
            found.append(f"{'':<{9 + width}}do: {finding.do}")
    return found


def as_json(facts: Mapping[str, Facts], findings: Mapping[str, Finding]) -> dict[str, Any]:
    """Findings and facts as values for `json.dumps`."""
    found = {}
    for name, (level, words, do) in findings.items():
        found[name] = {"level": level, "found": words, "do": do, "facts": facts[name]}
    return found
