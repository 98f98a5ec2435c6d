"""Checks that the run on one process (the *reference*) can be used for comparison.

If it cannot, a `UsageError` says what was set, what was found, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lockstep.errors import UsageError
from lockstep.verify.run_record import RunRecord
from lockstep.verify.unsupported import OWN_PROCESSES_HINT

# Matches torch's errors about different dtypes: "expected m1 and m2 to have the same dtype".
_DTYPE_ERROR = re.compile("(?i)dtype|double")


def check_reference(
    reference: RunRecord,
    heading: str,
    lockstep_options: Sequence[str],
    command: str,
    subject: str,
) -> None:
    """Checks that the reference has trained, and that it uses Lockstep if that is required.

    Args:
        reference: record of the run on one process.
        heading: what the user asked for, as the first line of the error.
        lockstep_options: options given by the user that only work for scripts that use Lockstep.
        command: command that runs the script without a comparison.
        subject: what was run, such as "script".

    Raises:
        UsageError: The reference failed, made no step, or does not use Lockstep.
    """
    problem = _find_problem(reference, lockstep_options, command, subject)
    if problem is None:
        return

    found, advice = problem
    if _may_train_in_unseen_processes(reference):
        line = reference.own_process_line
        found = f"{found.rstrip()}\nit started processes of its own, which are not seen: {line}"
        advice = f"{OWN_PROCESSES_HINT}; else {advice}"

    raise UsageError(heading, _aligned(found), advice)


def _find_problem(
    reference: RunRecord, lockstep_options: Sequence[str], command: str, subject: str
) -> tuple[str, str] | None:
    """Returns why the reference cannot be used, and what to do; None if it can be used.

    Args:
        reference: record of the run on one process.
        lockstep_options: options given by the user that only work for scripts that use Lockstep.
        command: command that runs the script without a comparison.
        subject: what was run, such as "script".
    """
    if _has_started_own_ranks(reference):
        return _describe_failure(reference), OWN_PROCESSES_HINT

    if reference.error:
        # The script may have combined a tensor of a dtype that it names with one in float64.
        is_fp64 = reference.config.precision == "fp64"
        if is_fp64 and _DTYPE_ERROR.search(reference.error):
            advice = f"the {subject} names dtypes itself; try precision fp32"
        else:
            advice = f"make this work: {command}"
        return _describe_failure(reference), advice

    if not reference.updates:
        found = "it made no optimizer step on one process"
        return found, "give it arguments with which it trains"

    options_have_no_effect = bool(lockstep_options) and not reference.uses_lockstep
    if options_have_no_effect:
        options = ", ".join(lockstep_options)
        found = f"it does not train by Lockstep, so {options} would have no effect"
        advice = f"leave it out, or let the {subject} use lockstep.init and world.prepare"
        return found, advice

    return None


def _aligned(found: str) -> str:
    """Indents all lines but the first one, which follows "  found: ", to align them with it."""
    return found.rstrip().replace("\n", "\n         ")


def _has_started_own_ranks(reference: RunRecord) -> bool:
    """True if the script was ended because it starts its ranks itself (see `not_recorded_error`).

    The text of this error contains `OWN_PROCESSES_HINT` as its advice.
    """
    return OWN_PROCESSES_HINT in reference.error


def _may_train_in_unseen_processes(reference: RunRecord) -> bool:
    """True if the script made no step in this process, but started others that may train.

    For example, it calls `subprocess.run(["python", "train.py"])`. False if it was ended because it
    starts its ranks itself, which is reported as such.
    """
    if _has_started_own_ranks(reference):
        return False
    started_a_process = bool(reference.own_process_line)
    return started_a_process and not reference.updates


def _describe_failure(reference: RunRecord) -> str:
    """Returns the error of the reference, followed by the last lines of its output.

    `OWN_PROCESSES_HINT` is removed from the error, because `check_reference` repeats it at the end.
    """
    error_lines = []
    for line in reference.error.splitlines():
        if OWN_PROCESSES_HINT not in line:
            error_lines.append(line)

    output_lines = [f"| {line}" for line in reference.output.splitlines()]
    error = "\n".join(error_lines)
    output = "\n".join(output_lines)

    if not output:
        return f"on one process it ended with {error}"
    return f"on one process it ended with {error}\n{output}"
