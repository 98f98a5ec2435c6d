"""Ends a rank's process in the same way as the interpreter, without shutting the interpreter down.

When Python shuts down (Py_FinalizeEx), a thread of Gloo may abort the process. So the first steps
of the shutdown (waiting for threads, functions of `atexit`, dropping the program's data) are done
here, and then the process is ended by `os._exit`.
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
    """Does what the interpreter does when it shuts down, and ends the process.

    `threading._shutdown` and `atexit._run_exitfuncs` are the first functions that Py_FinalizeEx
    calls in Python 3.11 to 3.14.

    Args:
        code: the exit code; -2 to end the process by SIGINT.
    """
    with contextlib.suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(KeyboardInterrupt):
        drop_program()
    exit_now(code)


def drop_program() -> None:
    """Frees the program's data, so that files it has left open are written completely.

    Freeing an object calls its `__del__` method, which may wait for a thread of torch. These
    threads can still run now. When the interpreter frees the data by itself, at its very end, they
    can no longer run, and the wait would never end.
    """
    # The exception that ended the program refers to its data.
    sys.last_type = None
    sys.last_value = None
    sys.last_traceback = None

    _silence_errors_of_missing_data()
    _delete_variables_of_script()
    gc.collect()
    ctypes.CDLL(None).fflush(None)  # writes the open files of C libraries


def _silence_errors_of_missing_data() -> None:
    """Hides the exceptions of `__del__` methods, and of threads that are still running.

    They may fail without the program's data, which is of no interest to the user.
    """
    sys.unraisablehook = lambda _: None
    threading.excepthook = lambda _: None


def _delete_variables_of_script() -> None:
    """Deletes the global variables of the script, such as its model.

    Modules, functions and classes are kept, because a `__del__` method may use them.
    """
    variables = vars(sys.modules["__main__"])
    for name, value in list(variables.items()):
        if not isinstance(value, types.ModuleType | types.FunctionType | type):
            del variables[name]


def exit_now(code: int) -> NoReturn:
    """Ends the process at once.

    Args:
        code: the exit code; -2 to end the process by SIGINT, by which shells and launchers
            recognise a program that was interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()

    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)
