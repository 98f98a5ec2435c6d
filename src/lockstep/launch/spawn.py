"""`lockstep.launch`: a function on several processes, from Python or a notebook."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.launch.machine import Machine, read_machine
from lockstep.launch.rank_process import NO_MAIN_GUARD, STARTING, Call, rank_main
from lockstep.launch.signals import sigterm_raises
from lockstep.launch.spec import choose_nproc, threads_per_process
from lockstep.launch.watch import Rank, end, watch


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nproc: int | str = "auto",
    *,
    timeout: float | None = None,
) -> list[Any]:
    """Runs `fn(*args)` on `nproc` processes of this machine and returns what each returned.

    Each process finds its place as under torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...), so
    `lockstep.init()` and `torch.distributed.init_process_group()` in `fn` join the run. All
    sockets are on loopback.

    A function of an importable module runs in fresh processes (start method "spawn"). What cannot
    be sent to those, such as a function of a notebook, a lambda or a closure, runs in copies of
    this process ("fork"), with one torch thread each: OpenMP's other threads do not survive a
    fork, and waiting for them would hang.

    Args:
        fn: called on every process with the same arguments. What it returns must be picklable,
            and is best on the CPU.
        args: the arguments.
        nproc: a number of processes; `auto`: one a GPU, or one a core where there is no GPU;
            `gpu`, `cpu` likewise.
        timeout: seconds after which the run is ended with an error; None: no limit.

    Returns:
        The returned values, by rank.

    Raises:
        RankFailedError: a process failed. The others have been ended.
        SettingError: `nproc` is not a number of processes.
        UsageError: called inside a rank; from a script without the `__main__` guard; or CUDA is in
            use in this process and `fn` can only be run by fork.
    """
    _refuse_inside_a_rank()
    machine = read_machine()
    size = choose_nproc(nproc, machine.cores, machine.gpus)
    name = getattr(fn, "__qualname__", repr(fn))
    was_set = f"launch({name}) on {size} process{'' if size == 1 else 'es'}"
    call = _callable_elsewhere(Call(fn, tuple(args)), was_set)
    ranks: list[Rank] = []
    with sigterm_raises(), socket.create_server(("127.0.0.1", 0), backlog=max(128, size)) as server:
        try:
            for rank in range(size):
                environment = _environment(machine, rank, size, server, isinstance(call, Call))
                ranks.append(_start(rank, call, environment, server))
            # After the copies are made: the store runs a thread, and its locks would be copied.
            store = _serve(server)
            results = watch(ranks, was_set, timeout)
            del store
        finally:
            end(ranks)
    return results


def _refuse_inside_a_rank() -> None:
    if os.environ.get(STARTING):
        # The new process is importing the script, which called us again: the caller of the first
        # launch explains it, once.
        raise SystemExit(NO_MAIN_GUARD)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise UsageError(
            "launch() inside a run",
            f"this process is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} already",
            "call the function itself, or start the script with plain python",
        )


def _callable_elsewhere(call: Call, was_set: str) -> Call | bytes:
    """The call pickled, for a fresh process; as it is where only a copy of this one can run it."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)  # at the prompt: None; from standard input: "<stdin>"
    importable = getattr(main, "__spec__", None) is not None or (file and Path(file).is_file())
    try:
        pickled = pickle.dumps(call)
    except Exception as error:  # pickle, and a user's own reducer, raise what they like
        reason = f"it cannot be sent to a fresh process ({error})"
    else:
        if importable or (file is None and b"__main__" not in pickled):
            return pickled
        reason = "there is no script file that a fresh process could import"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise UsageError(
            was_set,
            f"{reason}, so only a copy of this process can run it, but this process uses CUDA "
            "already, which does not work in copies",
            "restart and launch before the first use of CUDA, or move the function to a module",
        )
    if "fork" not in multiprocessing.get_all_start_methods():
        raise UsageError(
            was_set,
            f"{reason}, and this system cannot copy processes",
            "move the function to a module that can be imported",
        )
    return call


def _environment(
    machine: Machine, rank: int, size: int, server: socket.socket, copy: bool
) -> dict[str, str]:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.getsockname()[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"launch-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        STARTING: "1",
    }
    if copy:
        variables["OMP_NUM_THREADS"] = "1"
    elif "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(threads_per_process(machine.cores, size))
    if machine.loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = machine.loopback
    return variables


def _start(
    rank: int, call: Call | bytes, environment: dict[str, str], server: socket.socket
) -> Rank:
    copy = isinstance(call, Call)
    context: Any = multiprocessing.get_context("fork" if copy else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    # Not a daemon: those may have no children, and so no DataLoader workers.
    process = context.Process(
        target=rank_main,
        args=(theirs, call, server.fileno() if copy else None),
        name=f"lockstep-rank-{rank}",
    )
    # A fresh process imports the script, and with it torch, before it comes to our code: its
    # variables must be there from the first instruction.
    with _variables(environment), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on fork beside threads
        process.start()
    theirs.close()
    return Rank(rank, process, ours)


def _serve(server: socket.socket) -> Any:
    """The store at which the ranks meet, on our loopback socket; torch's own listens on all."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = server.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )


@contextmanager
def _variables(added: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
