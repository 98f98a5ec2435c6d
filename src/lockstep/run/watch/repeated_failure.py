"""Tells whether a restart cannot help, because the same failure has come twice in the same step.

Ranks that are started again go on from the last checkpoint. A failure whose cause is in the program
or in its data comes again in the same step, and no restart helps. A failure whose cause is
elsewhere (the network, a device, memory, another process) may pass. A run that could have gone on
must not be ended, so a failure counts only if all that is known of it speaks for the first kind:

- A rank has raised an exception of a type in `_PROGRAM_ERRORS`, and neither its message nor what it
  was raised from names anything outside of the program.
- No other failure came at the same time.
- The step is known. Steps are counted from the beginning of the training, so the same step means
  that there was no progress, from whatever step each start has gone on.

Signals never count: who has sent them is not known, and another process may have used the memory.
"""

from __future__ import annotations

import json
import re

from lockstep.run.watch.exit_status import ExitStatus

MAX_S_WITHOUT_STEP = 300.0
"""A start that has made no step counts only if it has failed within this time. One that runs for
longer may do other work than training, and may get further each time."""

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
# Words of messages about devices, networks, memory and other processes. torch raises RuntimeError
# for all of these, too.
_OUTSIDE = re.compile(
    r"\b(?:cuda|cudnn|cublas|nccl|hip\b|ecc\b|xpu|mps\b|gloo|ucc\b|mpi\b|devices?\b"
    r"|time[d-]? ?out|(?:dis)?connect|network|sockets?\b|port\b|hosts?\b|peers?\b|unreachable"
    r"|refused|pipe\b|https?\b|servers?\b|download|unavailable|temporar|retry|rate limit"
    r"|memory|resources?\b|no space|quota|too many open|disk\b|input/output|i/o\b|errno\b"
    r"|workers?\b|process(?:es)?\b|killed|permission|locke?d?\b)",
    re.IGNORECASE,
)
# Errors of the dataset are raised again by the loader: `ValueError: no data (in DataLoader worker
# process 0)`. Their message is the traceback from there.
_IN_WORKER = re.compile(r" \(in DataLoader worker process \d+\)$")
_ADDRESS_OF_OBJECT = re.compile(r"0x[0-9a-f]+")


def failure_key(end: ExitStatus) -> str:
    """Returns a text that is the same for the same failure in another attempt.

    Args:
        end: how a rank has ended, which has failed first.

    Returns:
        Empty if the failure may pass by itself, or if its step is not known.
    """
    error = end.error
    step = _step(end)
    if error is None or error.line is None or end.code <= 0 or step is None:
        return ""

    types = [error.type]
    for earlier in error.chain:  # "ValueError: no data"
        earlier_type, _, _ = earlier.partition(":")
        types.append(earlier_type)

    if not _PROGRAM_ERRORS.issuperset(types):
        return ""

    headline = _IN_WORKER.sub("", error.headline)
    was_in_worker = headline != error.headline
    texts = [headline, *error.chain]
    if not was_in_worker:
        texts.append(error.message)

    if any(_OUTSIDE.search(text) for text in texts):
        return ""

    headline = _ADDRESS_OF_OBJECT.sub("0x", headline)
    return json.dumps({"step": step, "line": error.line, "headline": headline})


def step_of_key(key: str) -> int:
    """Returns the step in which a failure has come, from its `failure_key`."""
    step: int = json.loads(key)["step"]
    return step


def _step(end: ExitStatus) -> int | None:
    """Returns the step after which a rank has failed, counted from the beginning of the training.

    Returns:
        None if it is not known.
    """
    trained_steps = None if end.error is None else end.error.trained_steps
    if end.step is not None:  # this start has made steps
        # 0 if they are not those of a prepared optimizer, and unknown without `lockstep.init`.
        return trained_steps or None
    if not end.made_no_step or end.ran_s is None or end.ran_s > MAX_S_WITHOUT_STEP:
        return None
    return trained_steps or 0
