"""Errors for what `lockstep verify` cannot record, and for failures of `lockstep verify` itself.

It records only the processes that it starts, so a script must not start ranks of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import active_children
from typing import Any

from lockstep.errors import RecordingFailedError, UsageError
from lockstep.torch_compat import call_on_new_default_group

# What to do with a script that starts its ranks itself.
OWN_PROCESSES_HINT = (
    "verify a script that is one rank, as for torchrun: with RANK and WORLD_SIZE from the "
    "environment, or with lockstep.init"
)


def recording_failed_error(what: str, traceback: str) -> RecordingFailedError:
    """Returns the error for a failure of `lockstep verify` itself.

    Args:
        what: what was recorded or compared, such as "2 processes of train.py".
        traceback: traceback of the failure.
    """
    text = traceback.rstrip().replace("\n", "\n         | ")
    return RecordingFailedError(
        f"lockstep verify, {what}",
        f"verify itself has failed; this says nothing about the script\n         | {text}",
        "please report it with this text; `lockstep run` runs the script as it is",
    )


def not_recorded_error(what: str) -> UsageError:
    """Returns the error for something that a script does in processes that it has started itself.

    Args:
        what: what the script does, such as "an optimizer step in a process that ...".
    """
    found = "lockstep verify records only the processes that it starts"
    return UsageError(what, found, OWN_PROCESSES_HINT)


def raise_own_ranks_error(*_: Any, **__: Any) -> None:
    """Replaces functions that start ranks, such as `torch.multiprocessing.spawn`.

    Raises:
        UsageError: Always.
    """
    raise not_recorded_error("ranks that the script starts itself, by torch.multiprocessing")


def forbid_larger_groups(nproc: int) -> None:
    """Makes it an error to open a process group with more ranks than the run, in this process.

    A larger group means that the script has started ranks of its own.

    Args:
        nproc: number of ranks that `lockstep verify` has started.
    """

    def check_group_size(group: Any) -> None:
        """Raises an error if a new process group has ranks that `lockstep verify` did not start."""
        num_ranks_of_verify = nproc  # the argument of `forbid_larger_groups`
        if group.size() <= num_ranks_of_verify:
            return

        # The script has started the other ranks itself, as child processes. At exit, Python would
        # wait for these processes, which would wait for this rank. So they are killed.
        for child in active_children():
            child.kill()
        raise_own_ranks_error()

    call_on_new_default_group(check_group_size)


def run_without_larger_groups(nproc: int, run: Callable[[], object]) -> None:
    """Calls a function in a process in which larger groups than `nproc` ranks are forbidden.

    Args:
        nproc: number of ranks that `lockstep verify` has started.
        run: function to call, such as the `run` of a process that the script starts.
    """
    forbid_larger_groups(nproc)
    run()
