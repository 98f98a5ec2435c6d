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

from lockstep.run.watch.exit_status import ExitStatus

MAX_S_WITHOUT_STEP = 300.0
"""An attempt that made no step is only considered if it failed within this time. If it ran for
longer, it may do other work than training, and may get further each time."""

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
# Words in messages about devices, networks, memory and other processes. torch raises RuntimeError
# for these too.
_OUTSIDE = re.compile(
    r"\b(?:cuda|cudnn|cublas|nccl|hip\b|ecc\b|xpu|mps\b|gloo|ucc\b|mpi\b|devices?\b"
    r"|time[d-]? ?out|(?:dis)?connect|network|sockets?\b|port\b|hosts?\b|peers?\b|unreachable"
    r"|refused|pipe\b|https?\b|servers?\b|download|unavailable|temporar|retry|rate limit"
    r"|memory|resources?\b|no space|quota|too many open|disk\b|input/output|i/o\b|errno\b"
    r"|workers?\b|process(?:es)?\b|killed|permission|locke?d?\b)",
    re.IGNORECASE,
)
# The loader raises errors of the dataset again: `ValueError: no data (in DataLoader worker process
# 0)`. The message of such an error is the traceback from the worker.
_IN_WORKER = re.compile(r" \(in DataLoader worker process \d+\)$")
_ADDRESS_OF_OBJECT = re.compile(r"0x[0-9a-f]+")


def failure_key(end: ExitStatus) -> str:
    """Returns a key that is equal if another attempt fails in the same way in the same step.

    Args:
        end: how the rank ended that failed first.

    Returns:
        The key. Empty if the failure may pass by itself, or if its step is not known.
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

    # Search everything that is known about the exception, except the message of an error from a
    # DataLoader worker: it always mentions the worker, which would be taken for another process.
    headline = _IN_WORKER.sub("", error.headline)  # "ValueError: no data (in DataLoader ...)"
    was_in_worker = headline != error.headline
    texts = [headline, *error.chain]
    if not was_in_worker:
        texts.append(error.message)
    if any(_OUTSIDE.search(text) for text in texts):
        return ""

    headline = _ADDRESS_OF_OBJECT.sub("0x", headline)
    return json.dumps({"step": step, "line": error.line, "headline": headline})


def step_of_key(key: str) -> int:
    """Returns the step in which a failure came, from its `failure_key`."""
    step: int = json.loads(key)["step"]
    return step


def _step(end: ExitStatus) -> int | None:
    """Returns the step after which a rank failed, counted from the beginning of the training.

    Two counts are known: the steps of this attempt, by the heartbeat, and all steps of the training
    (`ErrorRecord.trained_steps`), if the script called `lockstep.init`:

        steps of the attempt        result
        some                        the count of the training; None if it is 0 or not known
        none, failed soon           the count of the training, up to which this attempt has resumed;
                                    0 if it is not known, as the script then begins anew
        none, ran for long          None: the attempt has done other work than training
        not known                   None

    Returns:
        The step, or None if it is not known.
    """
    steps_of_training = None if end.error is None else end.error.trained_steps

    made_steps = end.step is not None
    if made_steps:
        # The count of the training is 0 if no prepared optimizer has made these steps.
        return None if steps_of_training == 0 else steps_of_training

    failed_soon = end.ran_s is not None and end.ran_s <= MAX_S_WITHOUT_STEP
    if end.made_no_step and failed_soon:
        return 0 if steps_of_training is None else steps_of_training
    return None
