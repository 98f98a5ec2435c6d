"""Deals with the system's limits on processes, threads, open files and memory (see `ulimit -a`).

When a launcher reaches one of them, it gets an OSError or RuntimeError from deep inside some
library. This is turned into a SettingError that says how many processes were too many.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from lockstep.errors import SettingError
from lockstep.wording import count_noun

_SCARCITY_ERRORS = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# The ends of this many pipes are as many descriptors as a run on one machine needs.
_LAUNCHER_PIPES = 6
_PIPES_PER_RANK = 3

# With this many descriptors, evidence can be held in memory too, and many are still free.
_SPARE_DESCRIPTORS = 64
_EVIDENCE_DESCRIPTORS_PER_RANK = 16


@contextlib.contextmanager
def explain_scarcity(nproc: int) -> Iterator[None]:
    """Turns a lack of processes, threads, files or memory into an error that explains it.

    Whether there are enough file descriptors is tried out at once, by opening as many pipes as the
    run needs. If they ran out later, in a C++ library, it might abort the process instead of
    raising an error.

    Args:
        nproc: number of ranks on this machine.

    Raises:
        SettingError: the system refused to provide more, here or within the block.
    """
    try:
        _try_opening_pipes(_LAUNCHER_PIPES + _PIPES_PER_RANK * nproc)
        yield
    except (OSError, RuntimeError) as error:
        if not _is_scarcity(error):
            raise

        raise SettingError(
            f"{count_noun(nproc, 'process')} on this machine",
            f"the system gives no more: {error}",
            "raise the limits of processes, files or memory (ulimit -a), or start fewer processes",
        ) from None


def _try_opening_pipes(count: int) -> None:
    """Opens pipes and closes them again; raises OSError if there cannot be as many."""
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            for descriptor in os.pipe():
                opened.callback(os.close, descriptor)


def _is_scarcity(error: OSError | RuntimeError) -> bool:
    """Returns True if an error says that the system refuses to provide more of something."""
    # If no thread can be started, Python and torch raise a RuntimeError with one of these texts.
    texts_of_thread_errors = ("can't start new thread", os.strerror(errno.EAGAIN))
    return getattr(error, "errno", None) in _SCARCITY_ERRORS or str(error) in texts_of_thread_errors


def can_hold_evidence(nproc: int) -> bool:
    """Returns True if the launcher may open enough files to hold the evidence of its ranks in
    memory.
    """
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft_limit >= _SPARE_DESCRIPTORS + _EVIDENCE_DESCRIPTORS_PER_RANK * nproc
