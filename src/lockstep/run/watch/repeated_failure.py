"""Tells whether a restart is pointless, because the same failure has come twice in the same step.

Ranks that are restarted continue from the last checkpoint. If the cause of a failure is in the
program or its data, the failure comes again in the same step, and no restart helps. If the cause is
elsewhere (the network, a device, memory, another process), it may pass. Since a run that could have
continued must not be ended, a failure is only called repeated if everything known about it points
to the program:

- A rank has raised an exception of a type in `_PROGRAM_ERRORS`, and neither its message nor the
  exceptions it was raised from mention anything outside the program.
- No other failure came at the same time.
- The step is known. Steps are counted from the beginning of the training, so the same step means
  that there was no progress, whichever step each attempt resumed from.

An end by a signal is never called repeated: it is not known who sent the signal, and another
process may have used up the memory.
"""

from __future__ import annotations

import json
import re

from lockstep.error_in_flight import ErrorInFlight
from lockstep.run.watch.error_record import ErrorRecord
from lockstep.run.watch.exit_status import ExitStatus

MAX_S_WITHOUT_STEP = 300.0
"""An attempt that made no step is only considered if it failed within this time. If it ran for
longer, it may do different work than training, and may get further each time."""

_PROGRAM_ERRORS = frozenset(
    (
        "ArithmeticError",
        "AssertionError",
        "AttributeError",
        "DataError",
        "FloatingPointError",
        "ImportError",
        "IndentationError",
        "IndexError",
        "KeyError",
        "LookupError",
        "ModuleNotFoundError",
        "NameError",
        "NotImplementedError",
        "OverflowError",
        "RecursionError",
        "RuntimeError",
        "SettingError",
        "SyntaxError",
        "TabError",
        "TypeError",
        "UnboundLocalError",
        "UnicodeDecodeError",
        "UnicodeEncodeError",
        "UsageError",
        "ValueError",
        "ZeroDivisionError",
    )
)
# A message with one of these words is about something outside the program, which may pass: a
# device, the network, memory or another process. torch raises RuntimeError for these too.
_MENTIONS_OUTSIDE_CAUSE = re.compile(
    r"\b(?:cuda|cudnn|cublas|nccl|hip\b|ecc\b|xpu|mps\b|gloo|ucc\b|mpi\b|devices?\b"
    r"|time[d-]? ?out|(?:dis)?connect|network|sockets?\b|port\b|hosts?\b|peers?\b|unreachable"
    r"|refused|pipe\b|https?\b|servers?\b|download|unavailable|temporar|retry|rate limit"
    r"|memory|resources?\b|no space|quota|too many open|disk\b|input/output|i/o\b|errno\b"
    r"|workers?\b|process(?:es)?\b|killed|permission|locke?d?\b)",
    re.IGNORECASE,
)
# The end of a headline if an error of a worker process was raised again: `ValueError: no data (in
# DataLoader worker process 0)`, and `(in a worker process)` for that of a pool. The message of an
# error from a DataLoader is the traceback from its worker.
_IN_WORKER = re.compile(r" \(in (?:DataLoader worker process \d+|a worker process)\)$")
_MESSAGE_FROM_WORKER = re.compile(r"Caught .* in DataLoader worker process")
_ADDRESS_OF_OBJECT = re.compile(r"0x[0-9a-f]+")


def failure_key(end: ExitStatus) -> str:
    """Returns a key that is equal if another attempt fails in the same way in the same step.

    Args:
        end: how the rank ended that failed first.

    Returns:
        The key. Empty if another attempt may succeed, or if the step is not known.
    """
    # Only a rank that ended by itself with an error (a code above 0) will do so again. A signal (a
    # code below 0) may have come from outside.
    error = end.error
    if error is None or end.code <= 0:
        return ""

    # An error from a DataLoader worker is compared without the number of the worker:
    # "ValueError: no data (in DataLoader worker process 0)" -> "ValueError: no data"
    headline = _IN_WORKER.sub("", error.headline)
    if not _comes_from_program(error, headline):
        return ""

    # A rank that failed soon, without a step, failed in its first one. After a longer time without
    # a step it is not known where it failed.
    step = _step_of_failure(
        has_made_step=end.has_made_step,
        failed_soon=end.ran_s is not None and end.ran_s <= MAX_S_WITHOUT_STEP,
        steps_of_training=error.trained_steps,
    )
    return _make_key(step, error.line, headline)


def key_of_error_in_flight(
    error: ErrorInFlight, steps: int | None, trained_steps: int | None, waited_s: float
) -> str:
    """Returns a key that is equal if another attempt hangs in the same step, by the same exception.

    Args:
        error: the exception that a rank handles.
        steps: the optimizer steps that the rank has made in this attempt; None if not known.
        trained_steps: the steps since the training began; None if they are not counted.
        waited_s: how long the run has made no step, in seconds.

    Returns:
        The key. Empty if another attempt may succeed, or if the step is not known.
    """
    # The headline is all that is known of this exception: "ValueError: no data".
    headline = _IN_WORKER.sub("", error.headline)
    error_type, _, _ = headline.partition(":")
    if error_type not in _PROGRAM_ERRORS or _MENTIONS_OUTSIDE_CAUSE.search(headline):
        return ""

    # If the run has made no step for long, it is not known where the rank failed.
    step = _step_of_failure(
        has_made_step=None if steps is None else steps > 0,
        failed_soon=waited_s <= MAX_S_WITHOUT_STEP,
        steps_of_training=trained_steps,
    )
    return _make_key(step, error.line, headline)


def _make_key(step: int | None, line: str | None, headline: str) -> str:
    """Returns the key of a failure; an empty text if its step or its line is not known."""
    if step is None or line is None:
        return ""

    # The address of an object differs from attempt to attempt.
    headline = _ADDRESS_OF_OBJECT.sub("0x", headline)
    return json.dumps({"step": step, "line": line, "headline": headline})


def step_of_key(key: str) -> int:
    """Returns the step in which a failure came, from its `failure_key`."""
    step: int = json.loads(key)["step"]
    return step


def _comes_from_program(error: ErrorRecord, headline: str) -> bool:
    """Returns True if an error comes from the program itself, so that it would occur again.

    An error may not occur again if its type is not in `_PROGRAM_ERRORS`, or if a text mentions a
    device, the network, memory or another process: "RuntimeError: CUDA error: ..."

    Args:
        error: the error.
        headline: the headline without a worker process: "ValueError: no data".
    """
    types = [error.type]
    for earlier_headline in error.chain:  # "ValueError: no data"
        earlier_type, _, _ = earlier_headline.partition(":")
        types.append(earlier_type)
    if not _PROGRAM_ERRORS.issuperset(types):
        return False

    # The message of an error from a DataLoader worker begins with "Caught ValueError in DataLoader
    # worker process 0". It is not searched, as the words "worker process" alone would match.
    texts = [headline, *error.chain]
    if not _MESSAGE_FROM_WORKER.match(error.message):
        texts.append(error.message)
    return not any(_MENTIONS_OUTSIDE_CAUSE.search(text) for text in texts)


def _step_of_failure(
    *, has_made_step: bool | None, failed_soon: bool, steps_of_training: int | None
) -> int | None:
    """Returns the step after which a rank failed, counted from the beginning of the training.

        has_made_step   failed_soon    steps_of_training   result
        None            either         any                 None
        True            either         12                  12
        True            either         0 or None           None: its steps are not counted
        False           False          any                 None: it did other work for a long time
        False           True           12                  12: this attempt has resumed step 12
        False           True           0 or None           0: it began anew

    Args:
        has_made_step: whether this attempt has made a step; None if that is not known.
        failed_soon: True if the attempt failed within `MAX_S_WITHOUT_STEP`.
        steps_of_training: the counted steps since the training began, including those of earlier
            attempts that this one resumed; None if `lockstep.init` was not called.

    Returns:
        The step, or None if it is not known.
    """
    if has_made_step is None:
        return None

    if has_made_step:
        return steps_of_training or None
    if not failed_soon:
        return None
    return steps_of_training or 0
