"""Real processes for the tests: Gloo on loopback, forked from a server that imported torch."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from glob import glob
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HANG_S = 600.0
"""Seconds after which whatever is waited for counts as hung, on a machine however busy."""
LEAVE_S = 60.0
"""Seconds that processes have to be gone when all is over."""
_OTHERS_S = 60.0
"""Seconds that the other ranks have for their own errors when one has failed."""

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        *("torch", "torch.distributed", "torch._dynamo", "lockstep", "lockstep.world"),
        *("lockstep.verify.rank", "lockstep.checkpoint.checkpointer", "ranks", "frozen"),
    ]
)


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; `errors` maps ranks to tracebacks."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"--- rank {r}\n{text}" for r, text in sorted(errors.items())))


def run_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    env: dict[str, str] | None = None,
    timeout: float = HANG_S,
    environment: Callable[[int], dict[str, str]] | None = None,
    fresh: bool = False,
) -> list[Any]:
    """Runs `fn(*args)` on `size` processes as a launcher would start them; returns their results.

    `fn` must be a module-level function. `environment(rank)` replaces the default environment.
    With `fresh` nothing is imported in the processes but what `fn`'s module imports.
    Fails with `RankFailed` when any rank raises, dies, leaves a thread or a process group behind,
    or is still running after `timeout` seconds.
    """
    with _store(size) as port:
        make = environment or (lambda rank: rank_environment(rank, size, port))
        pipes, processes = [], []
        made = multiprocessing.get_context("spawn") if fresh else context
        for rank in range(size):
            ours, theirs = made.Pipe(duplex=False)
            process = made.Process(
                target=_rank_main, args=(theirs, fn, args, {**make(rank), **(env or {})})
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def in_clean_process(test: Callable[..., None]) -> Callable[..., None]:
    """For tests that fork: in a process without the threads that other tests have left in this."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        where = test.__module__, test.__name__
        run_ranks(_call_wrapped, 1, *where, arguments, environment=lambda rank: {})

    return run


def _call_wrapped(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(import_module(module), name).__wrapped__(**arguments)


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets on one node."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "test",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def in_gloo_group(fn: Callable[..., Any]) -> Callable[..., Any]:
    """For functions that use torch's process group without Lockstep: opens and closes it.

    The models of `fn` are gone before the group is closed. A DDP model that goes after it takes
    the group's threads along, while it holds the interpreter's lock that they may be waiting for.
    """

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        # Imported after the group was opened, as DDP does, it would keep the group alive.
        import_module("torch.distributed.nn.functional")

        dist.init_process_group("gloo")
        try:
            result = fn(*args)
            gc.collect()
        finally:
            dist.destroy_process_group()
        return result

    return run


def as_on_machines(sizes: tuple[int, ...]) -> None:
    """Sets the variables of a rank as if the ranks were on machines of these sizes."""
    rank = int(os.environ["RANK"])
    machine = 0
    while rank >= sizes[machine]:
        rank -= sizes[machine]
        machine += 1
    os.environ.update(
        {
            "GROUP_RANK": str(machine),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(sizes[machine]),
        }
    )


@contextlib.contextmanager
def _store(size: int) -> Iterator[int]:
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def _collect(pipes: list[Connection], processes: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = dict(enumerate(pipes))
    deadline = time.monotonic() + timeout
    while waiting and not (errors and time.monotonic() > deadline):
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank, pipe in list(waiting.items()):
            if pipe not in ready:
                continue
            del waiting[rank]
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                kind, value = "error", f"ended with exit code {processes[rank].exitcode}"
            (results if kind == "result" else errors)[rank] = value
        if errors:  # the others may be waiting for the one that failed
            deadline = min(deadline, time.monotonic() + _OTHERS_S)
    for rank in waiting:
        errors.setdefault(
            rank, f"still running after {timeout} s, or {_OTHERS_S} s after another rank failed"
        )
    if errors:
        raise RankFailed(errors)
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...], environ: dict[str, str]
) -> None:
    os.environ.update(environ)
    torch.set_num_threads(1)
    try:
        result = fn(*args)
        _check_nothing_left()
        _send(pipe, "result", result)
    except BaseException as error:
        _send(pipe, "error", f"{type(error).__name__}: {traceback.format_exc()}")
    finally:
        pipe.close()


def _send(pipe: Connection, kind: str, value: Any) -> None:
    # Plain pickle: multiprocessing's own would pass tensors through shared memory of this process.
    pipe.send_bytes(pickle.dumps((kind, value)))


def descendants(pid: int) -> dict[int, str]:
    """The command lines of the processes below one; psutil would read every process there is."""
    found: dict[int, str] = {}
    for path in glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            for child in map(int, Path(path).read_text().split()):
                found |= {child: _command_line(child), **descendants(child)}
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:  # it has just ended
        return ""


# tqdm starts it with the first progress bar (torch's inductor draws some) and never ends it.
MONITOR_OF_PROGRESS_BARS = "tqdm_monitor"
# It passes numbers on to a DataLoader's worker, and nobody waits for its end once that is closed.
FEEDER_OF_A_QUEUE = "QueueFeederThread"
SECONDS_FOR_A_FEEDER_TO_END = 10.0


def _check_nothing_left() -> None:
    for thread in threading.enumerate():
        if thread.name == FEEDER_OF_A_QUEUE:
            thread.join(SECONDS_FOR_A_FEEDER_TO_END)
    # Python's stand-in for a thread of torch's, of CUDA's autograd say, stays when that has gone.
    left = [
        t.name
        for t in threading.enumerate()
        if t is not threading.main_thread()
        and not isinstance(t, threading._DummyThread)
        and t.name != MONITOR_OF_PROGRESS_BARS
    ]
    if left:
        raise AssertionError(f"threads left behind: {left}")
    if dist.is_initialized():
        raise AssertionError("the process group was left open: call world.close()")
    if "memfd:lockstep" in Path("/proc/self/maps").read_text():
        raise AssertionError("memory shared by the ranks is still mapped")
    tasks = []
    for path in glob("/proc/self/task/*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            tasks.append(Path(path).read_text().strip())
    if "pt_gloo_runloop" in tasks:
        raise AssertionError(f"threads of the process group outlive it: {sorted(tasks)}")
    children = descendants(os.getpid())
    if children:
        raise AssertionError(f"processes left behind: {children}")
