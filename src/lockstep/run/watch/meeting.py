"""Reports early why processes cannot meet, where torch would let them wait until its timeout.

The launcher serves the store at which its ranks meet, at MASTER_ADDR and MASTER_PORT, and says so
by TORCHELASTIC_USE_AGENT_STORE. Processes that the script starts in a rank, by `mp.spawn` for
example, inherit these variables. So two things go wrong:

- At an address of the script's own, such as `tcp://127.0.0.1:29500`, torch serves no store, and all
  wait for one.
- If each of the launcher's ranks starts processes with the ranks 0 and 1, they meet at the
  launcher's store, where each of these ranks is then claimed twice.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lockstep import torch_compat
from lockstep.errors import SettingError
from lockstep.machine.network import wait_until
from lockstep.run.watch.evidence import FOLDER_VARIABLE
from lockstep.run.watch.script_processes import (
    let_processes_import_lockstep,
    replace_start_processes,
)

CONNECT_TIMEOUT_S = 2.0
SERVED_WITHIN_S = 20.0
"""How long a rank waits for a store that the script may serve itself, in a process that begins a
little later."""
ADVICE_ON_TWO_LAUNCHERS = (
    "let one of them start the processes: call the function without torch.multiprocessing.spawn, "
    "or start the script with --nproc-per-node 1"
)


def check_init_process_group() -> None:
    """Makes `init_process_group` raise an error where processes cannot meet.

    This is called in a rank of the launcher. It also counts for processes that the rank forks or
    starts by `mp.spawn`.
    """
    _check_init_process_group(rank_pid=os.getpid())


def _check_init_process_group(rank_pid: int) -> None:
    torch_compat.replace_store_creation(partial(_create_checked_store, rank_pid))
    replace_start_processes(partial(_start_checked_processes, rank_pid))


def _start_checked_processes(
    rank_pid: int, original_start_processes: Any, fn: Any, *args: Any, **options: Any
) -> Any:
    """Replaces `mp.start_processes`: each process checks its meetings, too, and then calls `fn`."""
    let_processes_import_lockstep()
    return original_start_processes(partial(_run_checked, rank_pid, fn), *args, **options)


def _run_checked(rank_pid: int, program: Callable[..., object], index: int, *args: Any) -> None:
    _check_init_process_group(rank_pid)
    program(index, *args)


def _create_checked_store(
    rank_pid: int,
    original_create_store: Any,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    *more: Any,
) -> Any:
    """Creates the store of `init_process_group`.

    Args:
        rank_pid: process id of the launcher's rank, which is this process or has started it.
        original_create_store: torch's function.
        host: the host at which the store is served.
        port: its port.
        rank: the rank that this process will have.
        world_size: the number of processes that will meet.
        more: the other arguments of torch's function.

    Raises:
        SettingError: nobody serves the store, or another rank of the launcher has started a process
            with the same rank.
    """
    launcher_serves_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not launcher_serves_store:
        return original_create_store(host, port, rank, world_size, *more)

    is_started_by_script = os.getpid() != rank_pid
    if rank == 0:  # torch lets rank 0 serve the store where there is no launcher
        _check_is_served(host, port, is_started_by_script=is_started_by_script)
    store = original_create_store(host, port, rank, world_size, *more)

    # A process alone meets no other one. A script that opens the store by `rendezvous` may give
    # each of several groups a prefix of its own in it, and so have several processes of one rank.
    is_alone = world_size == 1
    if is_started_by_script and not is_alone and torch_compat.is_in_init_process_group():
        _claim_rank(store, rank)
    return store


def _check_is_served(host: str, port: int, *, is_started_by_script: bool) -> None:
    """Waits until something listens at the address of the store; raises SettingError if not."""
    launchers_address = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    if (host, str(port)) == launchers_address:
        return

    deadline = time.monotonic() + SERVED_WITHIN_S
    if not wait_until(lambda: _may_be_served(host, port), deadline):
        raise _not_served_error(host, port, is_started_by_script=is_started_by_script)


def _may_be_served(host: str, port: int) -> bool:
    """Returns False if it is certain that nothing listens at an address now."""
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # torch says what is wrong
        return True
    return True


def _not_served_error(host: str, port: int, *, is_started_by_script: bool) -> SettingError:
    was_set = f"init_process_group at tcp://{host}:{port}"
    is_only_rank_of_machine = os.environ.get("LOCAL_WORLD_SIZE") == "1"
    if is_started_by_script and not is_only_rank_of_machine:
        return SettingError(
            was_set,
            "nobody serves a store there, as the script has started this process itself, in a rank "
            "of lockstep run, which serves the store of its ranks elsewhere",
            ADVICE_ON_TWO_LAUNCHERS,
        )
    return SettingError(
        was_set,
        "nobody serves a store there, as lockstep run serves the store of its ranks elsewhere",
        "leave init_method out, and keep rank and world_size if they are given: the store is then "
        "found by the environment variables",
    )


def _claim_rank(store: Any, rank: int) -> None:
    """Checks that no other rank of the launcher has started a process with the same rank."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"lockstep/{attempt}/parent_of_rank_{rank}"
    own_parent = Path(os.environ[FOLDER_VARIABLE]).name  # "rank_0": the launcher's rank
    parent = store.compare_set(key, "", own_parent).decode()
    if parent == own_parent:
        return

    first, second = sorted(int(name.removeprefix("rank_")) for name in (parent, own_parent))
    raise SettingError(
        f"init_process_group as rank {rank}",
        f"the script has started two processes with this rank: in rank {first} and in rank "
        f"{second} of lockstep run",
        ADVICE_ON_TWO_LAUNCHERS,
    )
