"""Errors of `lockstep verify` for what it cannot record, and for its own failures.

It records only the processes that it starts itself, so a script must not start its own ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import active_children
from typing import Any

from lockstep.distributed.torch_compat import on_default_group
from lockstep.errors import RecordingFailedError, UsageError

# What to do with a script that starts its ranks itself.
OWN_PROCESSES_HINT = (
    "verify a script that is one rank, as for torchrun: with RANK and WORLD_SIZE from the "
    "environment, or with lockstep.init"
)


def recording_failed_error(what: str, traceback: str) -> RecordingFailedError:
    """Returns the error for a failure of `lockstep verify` itself.

    Args:
        what: what was recorded or compared, such as "2 processes of train.py".
        traceback: the traceback of the failure.
    """
    text = traceback.rstrip().replace("\n", "\n         | ")
    return RecordingFailedError(
        f"lockstep verify, {what}",
        f"verify itself has failed; this says nothing about the script\n         | {text}",
        "please report it with this text; `lockstep run` runs the script as it is",
    )


def not_recorded_error(what: str) -> UsageError:
    """Returns the error for what a script does in processes that it started itself.

    Args:
        what: what it does, such as "an optimizer step in a process that ...".
    """
    found = "lockstep verify records only the processes that it starts"
    return UsageError(what, found, OWN_PROCESSES_HINT)


def refuse_own_ranks(*_: Any, **__: Any) -> None:
    """Replaces functions that start ranks, such as `torch.multiprocessing.spawn`.

    Raises:
        UsageError: always.
    """
    raise not_recorded_error("ranks that the script starts itself, by torch.multiprocessing")


def refuse_larger_groups(nproc: int, run: Callable[[], object] = lambda: None) -> None:
    """Makes a process group with more ranks than the run an error, and then calls a function.

    Such a group means that the script has started ranks of its own. It stays an error in this
    process after the call, too.

    Args:
        nproc: the number of ranks that `lockstep verify` has started.
        run: the function; by default one that does nothing.
    """

    def check_group_size(group: Any) -> None:
        if group.size() <= nproc:
            return
        # The script's own ranks would wait for this one, and the error could not end the script.
        for child in active_children():
            child.kill()
        refuse_own_ranks()

    on_default_group(check_group_size)
    run()
