"""Waiting for the processes of `launch`, and ending them."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lockstep.errors import RankFailedError, UsageError
from lockstep.launch.rank_process import NO_MAIN_GUARD, Failure, Result, Started

_POLL_S = 0.1
_SETTLE_S = 0.2
"""After a first failure the others may follow within moments, and the order matters."""
_GRACE_S = 3.0
"""Between the request to end and the killing."""


@dataclass
class Rank:
    """One process, seen from the one that launched it."""

    number: int
    process: BaseProcess
    pipe: Connection
    started: bool = False
    last: Result | Failure | None = None
    """What the process said at its end; None: nothing yet, or it died in silence."""
    open: bool = True
    """Whether the pipe may still bring something."""

    @property
    def failed(self) -> bool:
        """It raised, or ended in any way but by returning."""
        code = self.process.exitcode
        if code is None:
            return isinstance(self.last, Failure)
        return not isinstance(self.last, Result) or code != 0

    def read(self) -> None:
        """Takes what the pipe holds."""
        with contextlib.suppress(EOFError, OSError):
            while self.open and self.pipe.poll():
                message = self.pipe.recv()
                if isinstance(message, Started):
                    self.started = True
                else:
                    self.last = message
            return
        self.open = False

    def death(self) -> str:
        """How it failed, in words."""
        if isinstance(self.last, Failure):
            return f"raised {self.last.error}"
        code = self.process.exitcode
        how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
        if isinstance(self.last, Result):
            return f"returned, but then its process ended with {how}"
        return f"died without a Python exception ({how})"


def watch(ranks: list[Rank], was_set: str, timeout: float | None) -> list[Any]:
    """Waits until all have returned and ended; the values by rank.

    Raises:
        RankFailedError: one failed, or the time is over.
        UsageError: the script lacks its `__main__` guard.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while any(rank.process.exitcode is None or rank.last is None for rank in ranks):
        _look(ranks)
        if any(rank.failed for rank in ranks):
            break
        if deadline is not None and time.monotonic() > deadline:
            _raise_late(ranks, was_set, timeout)
    if any(rank.failed for rank in ranks):
        settled = time.monotonic() + _SETTLE_S
        while time.monotonic() < settled and any(rank.process.is_alive() for rank in ranks):
            _look(ranks)
        _raise_first(ranks, was_set)
    return [_value(rank, was_set) for rank in ranks]


def end(ranks: list[Rank]) -> None:
    """Ends the processes that still run, with those they started: asked first, then killed."""
    try:
        _signal(ranks, signal.SIGTERM)
        limit = time.monotonic() + _GRACE_S
        for rank in ranks:
            rank.process.join(max(0.0, limit - time.monotonic()))
    finally:
        _signal(ranks, signal.SIGKILL)
        for rank in ranks:
            rank.process.join()
            rank.process.close()
            rank.pipe.close()


def _look(ranks: list[Rank]) -> None:
    # Not the sentinels alone: a DataLoader worker that outlives its rank holds the sentinel.
    pipes: list[Any] = [rank.pipe for rank in ranks if rank.open]
    sentinels = [rank.process.sentinel for rank in ranks if rank.process.is_alive()]
    wait(pipes + sentinels, _POLL_S)
    for rank in ranks:
        # In this order: what it sent before it ended is read once it has ended.
        _ = rank.process.exitcode
        rank.read()


def _raise_first(ranks: list[Rank], was_set: str) -> None:
    if any(not rank.started and rank.process.exitcode == NO_MAIN_GUARD for rank in ranks):
        raise UsageError(
            was_set,
            "each new process imports the script, and the script launches again when imported",
            'put the call of launch() under `if __name__ == "__main__":`',
        )
    # A death in silence is no consequence of another rank's exception; an exception may well be
    # the consequence of a death (connection closed), or of an earlier exception.
    failed = [rank for rank in ranks if rank.failed]
    first = min(failed, key=lambda r: r.last.time if isinstance(r.last, Failure) else 0.0)
    failure = first.last if isinstance(first.last, Failure) else None
    before = "" if first.started else " before the function began"
    raise RankFailedError(
        was_set,
        f"rank {first.number} {first.death()}{before}; the other processes were ended",
        "mend what its traceback shows" if failure else "look at what the process printed last",
        first.number,
        failure.traceback if failure else "",
    )


def _raise_late(ranks: list[Rank], was_set: str, timeout: float | None) -> None:
    running = [rank.number for rank in ranks if not isinstance(rank.last, Result)]
    numbers = ", ".join(str(number) for number in running)
    raise RankFailedError(
        f"{was_set}, timeout={timeout}",
        f"rank{'s' if len(running) > 1 else ''} {numbers or 'processes'} had not ended in time",
        "allow more time, or see what those ranks wait for",
        running[0] if running else 0,
    )


def _value(rank: Rank, was_set: str) -> Any:
    if not isinstance(rank.last, Result):
        raise TypeError("watched to its end, a rank has a result")
    try:
        return pickle.loads(rank.last.pickled)
    except Exception as error:
        raise RankFailedError(
            was_set,
            f"what rank {rank.number} returned cannot be read here: {error}",
            "return plain values, tensors, or objects of importable classes",
            rank.number,
        ) from error


def _signal(ranks: list[Rank], number: int) -> None:
    for rank in _alive(ranks):
        pid = rank.process.pid
        if pid is None:
            continue
        try:
            os.killpg(pid, number)
        except ProcessLookupError:  # it has not made its group yet
            os.kill(pid, number)


def _alive(ranks: list[Rank]) -> Iterator[Rank]:
    return (rank for rank in ranks if rank.process.is_alive())
