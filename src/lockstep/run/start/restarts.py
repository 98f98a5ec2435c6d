"""Says why ranks are started again, and refuses restarts that would not help."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import LockstepError
from lockstep.language import translate
from lockstep.run.watch.failure_report import render_briefly, render_failure
from lockstep.run.watch.first_failure import FirstFailure
from lockstep.run.watch.repeated_failure import step_of_key

_MAX_FULL_REPORTS = 3
"""How many failures of one kind are printed in full. Further ones get one line each."""


def check_restart_may_help(failure: FirstFailure, max_restarts: int, *, is_elastic: bool) -> None:
    """Checks that the ranks need not fail in the same way after a restart.

    Args:
        failure: the first failure of the last attempt.
        max_restarts: how often the ranks may be restarted, for the error.
        is_elastic: True if other machines may take part in the next attempt.

    Raises:
        LockstepError: the same failure came in the same step of an earlier attempt, or it is one
            that each attempt will meet, such as a wrong setting.
    """
    if failure.is_repeated:  # so its step is known
        raise _repeated_failure_error(step_of_key(failure.key), max_restarts)

    # Other machines may honour a setting that the present ones cannot honour.
    if failure.may_be_temporary or is_elastic:
        return

    # "it" is the report of the failure, which is printed above this error.
    raise LockstepError(
        f"--max-restarts {max_restarts}",
        "the same command would fail again in the same way: restarting will not help",
        "repair what it says",
    )


def _repeated_failure_error(step: int | None, max_restarts: int) -> LockstepError:
    """Returns the error for a run in which the same failure has come twice in the same step.

    It is printed below the report of the failure, which "repair what it says" refers to.
    """
    is_before_first_step = not step
    where = (
        "before the first step" if is_before_first_step else f"after step {step} of the training"
    )
    return LockstepError(
        f"--max-restarts {max_restarts}",
        f"the same failure twice {where}: restarting will not help",
        "repair what it says",
    )


def describe_restart(
    failures: Sequence[FirstFailure | None],
    lost_machines: str,
    *,
    restarts_left: int,
    is_counted: bool,
) -> list[str]:
    """Says why all ranks are restarted, in lines in the language of the user.

    Args:
        failures: the first failure of each attempt so far; None for an attempt without one.
        lost_machines: English text that names the machines that were lost; empty if none was.
        restarts_left: how often the ranks may still be restarted after a failure.
        is_counted: True if the ranks are restarted because of their failure, which uses up one of
            --max-restarts. False if they are restarted because the machines of the run have
            changed.
    """
    if lost_machines:
        what_follows = translate("starting the ranks of the other machines again")
        return [f"{translate(lost_machines)}; {what_follows}"]

    failure = failures[-1]
    if failure is None:
        return [translate("the machines of the run have changed; starting all ranks again")]

    if is_counted:
        what_follows = translate(
            f"starting all ranks again (--max-restarts: {restarts_left} left after this)"
        )
    else:
        what_follows = translate(
            "starting all ranks again, as the machines of the run have changed, which uses up no "
            f"restart (--max-restarts: {restarts_left} left)"
        )

    # A failure that comes again and again is reported in full only the first few times. Failures
    # are alike if they are of the same kind, in any step.
    num_alike = len([each for each in failures if each and each.likeness == failure.likeness])
    if num_alike <= _MAX_FULL_REPORTS:
        return [render_failure(failure, translate), what_follows]
    brief_report = render_briefly(failure, num_alike, translate)
    return [f"{brief_report}; {what_follows}"]
