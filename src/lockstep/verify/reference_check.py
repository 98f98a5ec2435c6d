"""Checks that the run on one process (the *reference*) can be used for comparison.

If it cannot, a `UsageError` says what was set, what was found, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lockstep.errors import UsageError
from lockstep.verify.run_record import RunRecord
from lockstep.verify.tolerance import Array
from lockstep.verify.unsupported import OWN_PROCESSES_HINT
from lockstep.wording import count_noun

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

    Runs that train nothing end with the parameters that they began with, on any number of
    processes. So equal parameters would prove nothing.

    Args:
        reference: record of the run on one process.
        heading: what the user asked for, as the first line of the error.
        lockstep_options: options given by the user that only work for scripts that use Lockstep.
        command: command that runs the script without a comparison.
        subject: what was run, such as "script".

    Raises:
        UsageError: The reference failed, made no step, trained nothing, or does not use Lockstep.
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

    return _find_missing_training(reference)


def _find_missing_training(reference: RunRecord) -> tuple[str, str] | None:
    """Returns why no step of the reference has trained anything, and what to do; None if one has.

    An optimizer that changes parameters without a backward pass trains too, such as an evolution
    strategy.
    """
    gradients: list[Array] = []
    for update in reference.updates:
        gradients += update.merged("gradients").values()

    some_gradient_is_not_zero = any(gradient.any() for gradient in gradients)
    if some_gradient_is_not_zero or _some_parameter_is_unknown(reference):
        return None

    num_steps = len(reference.updates)
    has_called_backward = any(update.num_backward_passes for update in reference.updates)
    if has_called_backward and gradients:
        found = (
            f"it made {count_noun(num_steps, 'optimizer step')} on one process, but all gradients "
            "were 0, so nothing was trained"
        )
        advice = (
            "see whether zero_grad() is called between backward() and optimizer.step(), and "
            "whether the loss is multiplied by 0"
        )
        return found, advice

    if _some_parameter_has_changed(reference):
        return None

    if has_called_backward:
        found = (
            f"it made {count_noun(num_steps, 'optimizer step')} on one process, but no parameter "
            "had a gradient, so nothing was trained"
        )
        advice = (
            "see whether zero_grad() is called between backward() and optimizer.step(), and "
            "whether the optimizer has the parameters that the loss is computed from"
        )
        return found, advice

    found = (
        f"it made {count_noun(num_steps, 'optimizer step')} on one process, but never called "
        "backward(), so nothing was trained"
    )
    if reference.uses_lockstep:
        return found, "call world.backward(loss) before optimizer.step()"
    return found, "call loss.backward() before optimizer.step()"


def _some_parameter_is_unknown(reference: RunRecord) -> bool:
    """True if an optimizer has a parameter of which nothing is recorded: its name is empty."""
    for update in reference.updates:
        for record in update:
            if "" in record.optimizer_parameters:
                return True
    return False


def _some_parameter_has_changed(reference: RunRecord) -> bool:
    """True if a parameter did not keep the value, or the sums, with which it was first recorded."""
    values: list[Mapping[str, Array]] = []
    sums: list[Mapping[str, Array]] = []
    for update in reference.updates:
        # A step without an optimizer is only recorded because parameters have changed.
        if not all(record.stepped for record in update):
            return True
        for field_name in ("initial", "rewritten_parameters", "parameters"):
            values.append(update.merged(field_name))
        sums.append(update.merged("parameter_sums"))

    sums += reference.final_sums
    return _some_array_has_changed(values) or _some_array_has_changed(sums)


def _some_array_has_changed(recorded: Iterable[Mapping[str, Array]]) -> bool:
    """True if an array differs from the first one that was recorded under its name."""
    first_arrays: dict[str, Array] = {}
    for arrays in recorded:
        for name, array in arrays.items():
            first_array = first_arrays.setdefault(name, array)
            if not np.array_equal(array, first_array, equal_nan=True):
                return True
    return False


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
