"""Ranks that a script starts itself can meet, and those of `torch.multiprocessing` are watched.

All of it is for the only rank of a run, and for what it starts.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.distributed import torch_compat

_PACKAGES = str(Path(__file__).parents[2])
"""The folder that holds this package."""
UNLIKE, RETURNED = "unlike", "returned"
"""Files of processes that a script has started: they are not the ranks of one group; one has come
to its end."""
_held: list[socket.socket] = []


def let_meet() -> None:
    """Gives the only rank an address at which processes that it starts itself can meet.

    With torchrun's variables they would all look for the launcher's store, also where the program
    gives them an address of their own; or they would find its port taken.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))  # who listens there later says so too, as torch's store does
    _held.append(held)
    port, launchers = held.getsockname()[1], int(os.environ["MASTER_PORT"])
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    torch_compat.store_elsewhere(port, launchers)


def watch(folder: Path) -> None:
    """What the script starts by `torch.multiprocessing` gets folders as ranks have them."""
    calls = itertools.count()

    def started(
        start: Any, fn: Any, args: Any = (), nprocs: int = 1, *others: Any, **named: Any
    ) -> Any:
        if _PACKAGES not in sys.path:  # which a process that is spawned inherits
            sys.path.append(_PACKAGES)
        place = folder / f"own_{next(calls):06}_{nprocs}"
        return start(partial(_run_watched, place, nprocs, fn), args, nprocs, *others, **named)

    on_start_processes(started)


def on_start_processes(instead: Callable[..., Any]) -> None:
    """From now on `mp.spawn` and `mp.start_processes` call this, with the latter as an argument."""
    multiprocessing: Any = import_module("torch.multiprocessing")
    module: Any = import_module("torch.multiprocessing.spawn")
    made = wraps(module.start_processes)(partial(instead, module.start_processes))
    module.start_processes = multiprocessing.start_processes = made


def _run_watched(
    folder: Path, size: int, program: Callable[..., object], index: int, *args: Any
) -> None:
    """In a process that the script has started."""
    from lockstep.watchdog import probe

    def check(group: Any) -> None:
        if (group.rank(), group.size()) != (index, size):
            (folder / UNLIKE).touch()

    probe.install(folder / f"rank_{index}", own=index)
    torch_compat.on_default_group(check)
    program(index, *args)
    (folder / f"rank_{index}" / RETURNED).touch()
