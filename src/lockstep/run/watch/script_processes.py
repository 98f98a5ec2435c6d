"""Makes processes visible to the launcher that a script starts itself, by `mp.spawn` or `Process`.

The launcher has started one process, and that process starts the ranks. Each of them gets a probe
and a folder like those of the launcher's own ranks: `rank_RANK` in the folder of its *group*, the
processes that were started together (`run_folder.group_folder`). Two marker files tell the launcher
more: one in a folder whose processes are not the ranks of one process group, and one in the folder
of a rank that has returned.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lockstep import torch_compat
from lockstep.run.run_folder import group_folder
from lockstep.run.watch import probe
from lockstep.run.watch.evidence import Evidence

NOT_ONE_GROUP_FILE = "unlike"
"""Marks a folder whose processes are not the ranks of one group."""
RETURNED_FILE = "returned"
"""Marks the folder of a process whose program has returned."""

_PACKAGE_PARENT = str(Path(__file__).parents[3])


def watch_script_processes(folder: Path) -> None:
    """Makes the launcher see all processes that this process will start by multiprocessing.

    A process of `mp.spawn` is a rank from its beginning. A `Process` becomes a rank when it opens a
    process group.

    Args:
        folder: the folder of this rank, in which the folders of these processes are created.
    """
    starter = _WatchedStarter(folder)

    # A plain function gets the process as `self`. The bound method `starter.start_process` would
    # not.
    def start(process: BaseProcess) -> None:
        """Replaces `Process.start`."""
        starter.start_process(process)

    replace_start_processes(starter.start_spawned)  # of torch.multiprocessing, for `mp.spawn`
    BaseProcess.start = start  # type: ignore[method-assign, assignment]


def let_processes_import_lockstep() -> None:
    """Adds Lockstep's folder to `sys.path`, which processes of `mp.spawn` inherit."""
    if _PACKAGE_PARENT not in sys.path:
        sys.path.append(_PACKAGE_PARENT)


class _WatchedStarter:
    """Starts the processes of a script, and gives each a folder for its probe.

    Args:
        folder: the folder of this rank, in which the folders of the processes are created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._group_numbers = itertools.count()
        """The numbers that groups get, in the order in which they are started."""
        self._script_pid = os.getpid()
        self._original_start = BaseProcess.start
        self._number_of_present_group = 0
        """The number of the present group of `Process` objects; `start_process` sets it."""

    def start_spawned(
        self,
        original_start_processes: Any,
        fn: Any,
        args: Any = (),
        nprocs: int = 1,
        *more: Any,
        **options: Any,
    ) -> Any:
        """Replaces `mp.start_processes`: each process installs a probe before it calls `fn`.

        All arguments but the first are those that the script has passed.
        """
        let_processes_import_lockstep()
        folder_of_group = group_folder(self._folder, next(self._group_numbers), nprocs)
        watched_fn = partial(_run_spawned, folder_of_group, nprocs, fn)
        return original_start_processes(watched_fn, args, nprocs, *more, **options)

    def start_process(self, process: BaseProcess) -> None:
        """Starts a `Process`, which installs a probe and then calls its `run` method.

        Processes that are started while earlier ones are running belong to the same group.
        """
        # If a rank starts a process, that is a DataLoader worker or another helper.
        is_started_by_script = os.getpid() == self._script_pid
        if not is_started_by_script:
            self._original_start(process)
            return

        all_earlier_ones_have_ended = not multiprocessing.active_children()
        if all_earlier_ones_have_ended:  # a new group begins
            self._number_of_present_group = next(self._group_numbers)

        # The child process gets a copy of `process`, by pickle or fork, and calls `process.run`. So
        # set an attribute `run` of this object, which the child finds before the method.
        late_probe = _LateProbe(self._folder, self._number_of_present_group)
        original_run = process.run
        run_with_probe = partial(_run_process, late_probe, original_run)
        process.run = run_with_probe  # type: ignore[method-assign]
        self._original_start(process)

        # This process does not need the attribute. It refers to `process`, and would keep it alive.
        del process.run


def replace_start_processes(replacement: Callable[..., Any]) -> None:
    """Makes `mp.spawn` and `mp.start_processes` call another function.

    Args:
        replacement: the function; it is called with the original `start_processes`, followed by
            the arguments.
    """
    package: Any = import_module("torch.multiprocessing")
    module: Any = import_module("torch.multiprocessing.spawn")
    original = module.start_processes
    replaced = wraps(original)(partial(replacement, original))
    module.start_processes = replaced  # which `mp.spawn` calls
    package.start_processes = replaced  # which is `mp.start_processes`


def _run_spawned(
    folder: Path, size: int, program: Callable[..., object], index: int, *args: Any
) -> None:
    """Runs the program of a process that `mp.spawn` has started, with a probe.

    The index of the process is assumed to be its rank. That is checked when the program opens its
    default process group.

    Args:
        folder: the folder of the processes that were started together.
        size: the number of these processes.
        program: the function that the script passed to `mp.spawn`.
        index: the index of this process among them.
        args: the arguments of the program.
    """

    def check_assumed_rank(group: Any) -> None:
        """Marks the folder if this process has another rank in the group, or the group another
        size. Called when the program opens its default group.
        """
        is_as_assumed = group.rank() == index and group.size() == size
        if not is_as_assumed:
            (folder / NOT_ONE_GROUP_FILE).touch()

    rank_folder = folder / f"rank_{index}"
    probe.install(Evidence.in_folder(rank_folder), spawn_index=index)
    torch_compat.call_on_new_default_group(check_assumed_rank)

    program(index, *args)

    # This is not reached if the program raises, as the process has failed then.
    (rank_folder / RETURNED_FILE).touch()


def _run_process(late_probe: _LateProbe, run: Callable[[], object]) -> None:
    """Runs the program of a `Process` that the script has started.

    Args:
        late_probe: is installed when the program opens a process group, which says how many ranks
            there are.
        run: the original `Process.run`.
    """
    torch_compat.call_on_new_default_group(late_probe.install)
    run()

    # This is not reached if `run` raises, as the process has failed then.
    if late_probe.rank_folder is not None:
        (late_probe.rank_folder / RETURNED_FILE).touch()


class _LateProbe:
    """Installs the probe of a process once its program opens the default process group.

    Args:
        script_folder: the folder of the rank that runs the script.
        group_number: the number of this process's group.
    """

    def __init__(self, script_folder: Path, group_number: int) -> None:
        self._script_folder = script_folder
        self._group_number = group_number
        self.rank_folder: Path | None = None
        """The folder of this rank, `own_000000_2/rank_1` for rank 1 of 2; None without a probe."""

    def install(self, group: Any) -> None:
        """Installs the probe. It is called when the program opens its default group."""
        if probe.has_probe():  # it was installed when the program opened an earlier group
            return
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread:  # only the main thread may set the signal handlers of a probe
            return

        folder = group_folder(self._script_folder, self._group_number, group.size())
        rank_folder = folder / f"rank_{group.rank()}"

        # If the folder exists, another process has the same rank. Two processes with rank 2 of 4
        # are in different groups. The marker tells the launcher that there are several groups. This
        # process gets no probe.
        if rank_folder.exists():
            (folder / NOT_ONE_GROUP_FILE).touch()
            return

        self.rank_folder = rank_folder
        probe.install(Evidence.in_folder(rank_folder), spawn_index=group.rank())
