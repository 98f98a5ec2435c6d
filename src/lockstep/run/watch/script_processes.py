"""Makes the processes visible that a script starts itself, by `mp.spawn` or `Process`.

The launcher has started one process, and that one starts the ranks. They get a probe, and folders
like those of the launcher's ranks: `own_NUMBER_SIZE/rank_RANK`. Two marker files tell the launcher
more: one in a folder whose processes are not the ranks of one group, and one in the folder of a
rank that has returned.
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

from lockstep.distributed import torch_compat
from lockstep.run.watch import probe
from lockstep.run.watch.evidence import Evidence

NOT_ONE_GROUP_FILE = "unlike"
"""Marks a folder whose processes are not the ranks of one group."""
RETURNED_FILE = "returned"
"""Marks the folder of a process that has come to its end."""

_PACKAGE_PARENT = str(Path(__file__).parents[3])


def watch_script_processes(folder: Path) -> None:
    """Makes the processes visible that this process will start by multiprocessing.

    Those of `mp.spawn` are ranks from their beginning. A `Process` is one as soon as it opens a
    process group.

    Args:
        folder: the rank's folder, in which theirs are created.
    """
    starter = _WatchedStarter(folder)

    def start(process: BaseProcess) -> None:
        """Called as the method `Process.start`."""
        starter.start_process(process)

    replace_start_processes(starter.start_spawned)
    BaseProcess.start = start  # type: ignore[method-assign, assignment]


class _WatchedStarter:
    """Starts the processes of a script, each with a folder for what its probe writes.

    Args:
        folder: the rank's folder, in which theirs are created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        """The numbers of the folders, one for each group of processes."""
        self._script_pid = os.getpid()
        self._original_start = BaseProcess.start
        self._batch_folder = folder
        """The folder of the present group of `Process` objects; `start_process` sets it."""

    def start_spawned(
        self,
        start_processes: Any,
        fn: Any,
        args: Any = (),
        nprocs: int = 1,
        *more: Any,
        **options: Any,
    ) -> Any:
        """Called instead of `mp.start_processes`, which is the first argument.

        Each process then runs `_run_spawned`, which installs a probe and calls the script's `fn`.
        """
        if _PACKAGE_PARENT not in sys.path:  # a spawned process inherits it, and imports Lockstep
            sys.path.append(_PACKAGE_PARENT)
        # For example own_000000_4: the first group of processes, which are four.
        spawn_folder = self._folder / f"own_{next(self._numbers):06}_{nprocs}"
        watched_fn = partial(_run_spawned, spawn_folder, nprocs, fn)
        return start_processes(watched_fn, args, nprocs, *more, **options)

    def start_process(self, process: BaseProcess) -> None:
        """Starts a process which runs `_run_process`: that installs a probe and calls `run`.

        Processes that are started while earlier ones run belong to the same group of ranks, so they
        share a folder, `_batch_folder`.
        """
        is_started_by_script = os.getpid() == self._script_pid
        if not is_started_by_script:  # but by one of its ranks: it is a DataLoader worker or such
            self._original_start(process)
            return

        is_first_of_group = not multiprocessing.active_children()  # the earlier ones have ended
        if is_first_of_group:
            self._batch_folder = self._folder / f"own_{next(self._numbers):06}"

        # An attribute of the object hides the method. The child is started with it.
        process.run = partial(_run_process, self._batch_folder, process.run)  # type: ignore[method-assign]
        self._original_start(process)
        del process.run  # it refers to the process, and would keep it alive


def replace_start_processes(replacement: Callable[..., Any]) -> None:
    """Makes `mp.spawn` and `mp.start_processes` call a function instead.

    Args:
        replacement: called with the original `start_processes`, followed by its arguments.
    """
    package: Any = import_module("torch.multiprocessing")
    module: Any = import_module("torch.multiprocessing.spawn")
    original = module.start_processes
    replaced = wraps(original)(partial(replacement, original))
    module.start_processes = replaced  # `mp.spawn` looks it up here
    package.start_processes = replaced  # this is `mp.start_processes`


def _run_spawned(
    folder: Path, size: int, program: Callable[..., object], index: int, *args: Any
) -> None:
    """Runs the program of a process that `mp.spawn` has started, with a probe.

    Args:
        folder: for the processes that were started together; each has a folder in it.
        size: how many they are.
        program: what the script has given to `mp.spawn`.
        index: the number of this process among them, which is taken for its rank.
        args: the program's arguments.
    """

    def check_group(group: Any) -> None:
        """Called with each default group that the program opens.

        Marks the folder if this process is not the rank in the group that its index says.
        """
        if (group.rank(), group.size()) != (index, size):
            (folder / NOT_ONE_GROUP_FILE).touch()

    rank_folder = folder / f"rank_{index}"
    probe.install(Evidence.in_folder(rank_folder), spawn_index=index)
    torch_compat.on_default_group(check_group)
    program(index, *args)
    (rank_folder / RETURNED_FILE).touch()  # not if the program raises: then it has failed


def _run_process(batch_folder: Path, run: Callable[[], object]) -> None:
    """Runs the program of a `Process` that the script has started.

    It gets a probe as soon as it opens a process group, which says how many ranks there are.

    Args:
        batch_folder: the folder of the processes that belong together. The size of their group is
            added to its name: `own_000000` becomes `own_000000_2`.
        run: the original `Process.run`.
    """
    rank_folders: list[Path] = []  # `install_probe` adds the folder of this process

    def install_probe(group: Any) -> None:
        """Called when this process has opened its default group, which says what rank it is."""
        if probe.has_probe():  # since an earlier group
            return

        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread:  # a probe sets up signals, which only the main thread can do
            return

        folder = batch_folder.with_name(f"{batch_folder.name}_{group.size()}")
        rank_folder = folder / f"rank_{group.rank()}"

        # If the processes open several groups, there are several ranks of this number.
        if rank_folder.exists():
            (folder / NOT_ONE_GROUP_FILE).touch()
            return

        rank_folders.append(rank_folder)
        probe.install(Evidence.in_folder(rank_folder), spawn_index=group.rank())

    torch_compat.on_default_group(install_probe)
    run()

    # This is not reached if the program raises. There is no folder if it has opened no group.
    for rank_folder in rank_folders:
        (rank_folder / RETURNED_FILE).touch()
