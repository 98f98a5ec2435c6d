"""Ends a rank's process as the interpreter would, without taking the interpreter down.

When Python takes itself down (Py_FinalizeEx), a thread of Gloo's may abort the process. So what
Python does first (waiting for threads, functions of `atexit`, dropping the program's data) is done
here, and the process then ends by `os._exit`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import types
from typing import NoReturn


def exit_process(code: int) -> NoReturn:
    """Does what the interpreter does at its end, and ends the process.

    `threading._shutdown` and `atexit._run_exitfuncs` are what Py_FinalizeEx calls first, in Python
    3.11 to 3.14.

    Args:
        code: the exit code; -2: the process ends by SIGINT.
    """
    with contextlib.suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(KeyboardInterrupt):
        drop_program()
    exit_now(code)


def drop_program() -> None:
    """Frees the program's data, so that files which it has left open are written completely.

    The interpreter does so after its threads have stopped. Then an object's `__del__` may wait for
    threads of torch that wait for the interpreter. Here they still run.
    """
    # The exception that ended the program refers to its data.
    sys.last_type = None
    sys.last_value = None
    sys.last_traceback = None

    # A `__del__`, or a thread that still runs, may miss the data; nobody needs to see that.
    sys.unraisablehook = lambda _: None
    threading.excepthook = lambda _: None

    names = vars(sys.modules["__main__"])
    for name, value in list(names.items()):
        # A `__del__` may use what stays: modules, functions and classes.
        if not isinstance(value, types.ModuleType | types.FunctionType | type):
            del names[name]

    value = None  # this function's own reference to the last one
    gc.collect()
    ctypes.CDLL(None).fflush(None)  # the files of the program's C libraries


def exit_now(code: int) -> NoReturn:
    """Ends the process at once.

    Args:
        code: the exit code; -2: the process ends by SIGINT, by which shells and launchers recognise
            a program that was interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)
