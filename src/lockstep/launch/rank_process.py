"""The other end of `launch`: what runs in each of its processes."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

STARTING = "LOCKSTEP_LAUNCH_STARTING"
"""Variable that is set while a new process imports the user's script, until our code begins."""

NO_MAIN_GUARD = 76
"""Exit code of a process whose script called `launch` while it was being imported."""


class Call(NamedTuple):
    """What a rank is to do."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]


class Started(NamedTuple):
    """First message: the process runs our code."""


class Result(NamedTuple):
    """Last message of a rank that returned: the value, pickled."""

    pickled: bytes


class Failure(NamedTuple):
    """Last message of a rank that raised."""

    time: float
    """`time.monotonic()`, which all processes of a machine share."""
    error: str
    """The exception in one line."""
    traceback: str


def rank_main(pipe: Connection, call: Call | bytes, inherited_fd: int | None) -> None:
    """Runs the call and sends `Started`, then `Result` or `Failure`.

    Args:
        pipe: to the process that launched.
        call: pickled for a fresh process; as it is for a copy of the launching one.
        inherited_fd: in a copy, the listening socket, which is the launching process's alone.
    """
    os.environ.pop(STARTING, None)
    if inherited_fd is not None:
        os.close(inherited_fd)
        _forget_the_parent()
    # A group of its own, so that it is ended together with its DataLoader workers, and so that
    # Ctrl-C reaches the launching process alone.
    os.setsid()
    pipe.send(Started())
    try:
        fn, args = pickle.loads(call) if isinstance(call, bytes) else call
        last: Result | Failure = _call(fn, args)
    except BaseException as error:
        last = Failure(time.monotonic(), _one_line(error), _users_traceback(error))
    pipe.send(last)
    pipe.close()
    if isinstance(last, Failure):
        sys.exit(1)


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Result:
    try:
        value = fn(*args)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        value = None
    # Exit handlers do not run in processes of multiprocessing: what `fn` left open is closed here.
    world = sys.modules.get("lockstep.world")
    if world is not None:
        world.close_current()
    # By value: multiprocessing's own pickler would leave tensors in memory that dies with us.
    return Result(pickle.dumps(value))


def _forget_the_parent() -> None:
    """Undoes what a copy has from the launching process and must not keep."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch = sys.modules.get("torch")
    if torch is not None:
        # OpenMP's thread pool was not copied; a parallel region would wait for it for ever.
        torch.set_num_threads(1)


def _one_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


def _users_traceback(error: BaseException) -> str:
    """The traceback without our own frames at its top."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
