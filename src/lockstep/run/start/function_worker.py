"""Runs the function of `lockstep.launch` in a rank; `spawn` is the launching process's side.

A rank of a *fresh* fork server imports the user's script, as processes of multiprocessing do, and
then reads the pickled call from a file. A *copy* of the launching process has the call in its
memory. The pickled return value is written into the rank's folder.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lockstep.machine import process_copy
from lockstep.run.start import worker
from lockstep.run.start.fork_server_process import serve
from lockstep.run.start.openblas import limit_openblas
from lockstep.run.start.process_exit import exit_now, exit_process
from lockstep.run.start.rank_imports import import_for_ranks

RESULT_NAME = "result.pickle"
"""The file in a rank's folder with the return value of the function."""

FunctionCall = functools.partial[Any]
"""A function with its arguments."""


class NoMainGuard(SystemExit):
    """Ends a rank whose script calls `launch` while the rank imports it."""


def run_copy(call: FunctionCall, threads_asked_for: int | None = None) -> NoReturn:
    """Runs the call as a rank in this process, a copy of the launching process, and then ends the
    process.

    It does so as multiprocessing does in a process that it has forked: `Process._bootstrap` drops
    the children, finalizers and locks of the launching process, and calls `Process.run`.

    Args:
        call: the call.
        threads_asked_for: the user's OMP_NUM_THREADS, which a copy cannot use. It is kept for the
            warning about that.
    """
    worker.open_streams()
    process_copy.become_copy(threads_asked_for)
    torch = sys.modules.get("torch")
    if torch is not None:
        # OpenMP's thread pool was not copied, and a parallel region would wait for it forever.
        torch.set_num_threads(process_copy.THREADS_OF_COPY)
    limit_openblas(process_copy.THREADS_OF_COPY)  # NumPy's threads

    process: Any = _ProcessOfCopy(call)
    process._bootstrap()  # calls `run`

    # `exit_now` does not call what the launching process has registered with `atexit`.
    exit_now(process.exit_code_of_call)


class _ProcessOfCopy(multiprocessing.Process):
    """What multiprocessing knows of a copy of the launching process.

    Args:
        call: what the copy runs.
    """

    def __init__(self, call: FunctionCall) -> None:
        super().__init__(name=_process_name(), daemon=False)
        self._call = call
        self.exit_code_of_call = 1
        """1 until `run` has ended, as `_bootstrap` may fail before it, and then prints why."""

    def run(self) -> None:
        """Runs the call. `_bootstrap`, which calls this, would ignore a returned exit code."""
        self.exit_code_of_call = worker.run_recorded(lambda folder: _run_call(self._call, folder))


def fork_server_main(modules: Sequence[str], file: int, control: int) -> NoReturn:
    """Runs a fresh fork server, see `spawn.launch`.

    Args:
        modules: names of the modules that the ranks would import.
        file: descriptor of the file with the pickled call.
        control: descriptor of the fork server's control socket.
    """
    os.set_inheritable(file, False)
    import_for_ranks(modules)
    serve(control, lambda: _run_fresh(file))


def _run_fresh(file: int) -> NoReturn:
    """Runs a rank of a fresh fork server, and then ends the process."""
    worker.open_streams()
    worker.reset_after_fork()
    exit_code = worker.run_recorded(lambda folder: _run_call(_read_call(file), folder))
    exit_process(exit_code)


def _read_call(file: int) -> FunctionCall:
    """Imports the user's script, and reads the call.

    Args:
        file: descriptor of a file with two pickles: how to import the script, and the call.
    """
    with _importing_main_script(), mmap.mmap(file, 0, access=mmap.ACCESS_READ) as mapped:
        os.close(file)  # the mapping stays

        # `prepare` imports the script, with the search path and the arguments of the launching
        # process. It also gives this process a name, which must be that of the rank.
        preparation: dict[str, Any] = pickle.load(mapped)
        preparation["name"] = _process_name()
        multiprocessing.spawn.prepare(preparation)

        call: FunctionCall = pickle.load(mapped)
    return call


@contextlib.contextmanager
def _importing_main_script() -> Iterator[None]:
    """Marks this process as one that imports the user's script, as multiprocessing does.

    Within the block the script must neither start processes, which multiprocessing then refuses,
    nor call `launch`, which then raises `NoMainGuard`.
    """
    process = multiprocessing.current_process()
    process._inheriting = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del process._inheriting  # type: ignore[attr-defined]


def is_importing_main_script() -> bool:
    """Returns True while this process, which another one has started, imports the user's script.

    multiprocessing marks the processes that it has started in the same way as this module.
    """
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def run_sent_call(content: bytes) -> bytes:
    """Runs a call that another node has sent here, and returns the pickled value.

    Args:
        content: the call and what belongs to it; see `lockstep.run.machines.ray_call`.
    """
    from lockstep.run.machines.ray_call import pickle_value, read_call

    call = read_call(content)
    return pickle_value(call())


def _process_name() -> str:
    return f"lockstep-rank-{os.environ['RANK']}"


def _run_call(call: FunctionCall, folder: Path) -> None:
    """Calls the function, and writes its return value into the rank's folder."""
    try:
        value = call()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        value = None  # sys.exit() without an error ends the function like a return

    # Close a World that the function has left open. Elsewhere a function of `atexit` does that, but
    # a copy of the launching process runs none. (After an exception, the rank ends anyway.)
    world = sys.modules.get("lockstep.world")
    if world is not None:
        world.close_current()

    folder.mkdir(parents=True, exist_ok=True)  # a cleaner of temporary folders may have deleted it
    with open(folder / RESULT_NAME, "wb") as file:
        # The pickler of multiprocessing is not used, as it would leave tensors in shared memory
        # that is freed when this process ends.
        pickle.dump(value, file)
