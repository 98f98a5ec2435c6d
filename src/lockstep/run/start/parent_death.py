"""Asks the kernel what becomes of processes whose parent ends. This only works on Linux.

See prctl(2): PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends.

    Args:
        parent: process id of the parent. If it has ended already, this process exits at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)


def become_subreaper() -> None:
    """Makes this process the parent of each process below it whose own parent has ended.

    This includes processes in sessions of their own, so this process can find and end them all.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
