"""The replicas of one forward pass, in threads that can meet.

Replicas on one device run one at a time and in order: where one waits or ends, the next goes on.
They share the device's stream of random numbers, so a run with dropout gives the same numbers again
only in a fixed order. Replicas on several devices run side by side.

Where one raises, the others are not left waiting: they are called off at their next meeting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import UsageError

Join = Callable[[list[Any]], Sequence[Any]]
"""Takes what all replicas have brought, in their order, and gives each its result."""


@dataclass(frozen=True)
class Place:
    """A replica's place in the forward pass that its thread runs."""

    meeting: Meeting
    position: int

    def exchange(self, name: str, value: Any, join: Join) -> Any:
        """Waits for all replicas; `join` is called once, and each gets its part of the result.

        Args:
            name: of the place in the model: all replicas must have come to the same.
            value: what this replica brings.
            join: must be the same function in all replicas.

        Raises:
            UsageError: the replicas took different ways through the model.
        """
        return self.meeting.exchange(self.position, name, value, join)


_thread = threading.local()


def place() -> Place | None:
    """Where the calling thread is a replica among several that may meet."""
    found: Place | None = getattr(_thread, "place", None)
    return found


def run_together(calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]) -> list[Any]:
    """Runs every call in a thread of its own, the first one in this; returns their results.

    The threads compute as this one would: with its modes of autograd and autocast, on its streams.

    Args:
        calls: one a replica.
        devices: where they run.

    Raises:
        BaseException: what the first call that failed has raised, after all have ended.
    """
    meeting = Meeting(len(calls), in_turn=len(set(devices)) == 1)
    modes = _Modes.present(devices)
    results: list[Any] = [None] * len(calls)

    def work(position: int) -> None:
        outer, _thread.place = place(), Place(meeting, position)
        try:
            meeting.begin(position)
            results[position] = calls[position]()
        except BaseException as error:
            meeting.leave(position, error)
        else:
            meeting.leave(position)
        finally:
            _thread.place = outer

    def work_elsewhere(position: int) -> None:
        with modes.entered():
            work(position)

    threads = [
        threading.Thread(
            target=copy_context().run, args=(work_elsewhere, n), name=f"replica {n}", daemon=True
        )
        for n in range(1, len(calls))
    ]
    for thread in threads:
        thread.start()
    work(0)
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # such as KeyboardInterrupt
        meeting.leave(0, error)
        for thread in threads:
            thread.join()
    failed, meeting.error = meeting.error, None
    if failed is None:
        return results
    try:
        raise failed
    finally:
        del failed  # else its traceback holds itself, and all that the replicas have computed


class _CalledOff(Exception):
    """Another replica has failed; never seen outside of this module."""


class Meeting:
    """What the replicas of one forward pass share.

    Args:
        count: of replicas.
        in_turn: only one runs at a time.
    """

    def __init__(self, count: int, *, in_turn: bool) -> None:
        self.error: BaseException | None = None
        """What the first replica that failed has raised."""
        self._count = count
        self._in_turn = in_turn
        self._turn = 0
        self._changed = threading.Condition()
        self._round = 0
        self._names: dict[int, str] = {}
        self._brought: dict[int, Any] = {}
        self._given: Sequence[Any] = ()
        self._gone: set[int] = set()

    def begin(self, position: int) -> None:
        """Waits for the replica's first turn."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self._may_run(position))
            self._check_not_off()

    def exchange(self, position: int, name: str, value: Any, join: Join) -> Any:
        """See `Place.exchange`."""
        with self._changed:
            present = self._round
            self._names[position], self._brought[position] = name, value
            if len(self._brought) == self._count:
                self._complete(join)
            self._pass_on(position)

            def goes_on() -> bool:
                if self._round == present:  # still waiting: in vain, where one has gone
                    return self.error is not None or bool(self._gone)
                return self.error is not None or self._may_run(position)

            self._changed.wait_for(goes_on)
            self._check_not_off()
            if self._round == present:
                raise _ways_differ(
                    f"replica {position} is at {name!r}, replica {min(self._gone)} has ended"
                )
            return self._given[position]

    def leave(self, position: int, error: BaseException | None = None) -> None:
        """The replica has ended, or failed."""
        with self._changed:
            self._gone.add(position)
            if self.error is None and not isinstance(error, _CalledOff):
                self.error = error
            self._pass_on(position)

    def _complete(self, join: Join) -> None:
        names = [self._names[n] for n in range(self._count)]
        if len(set(names)) > 1:
            places = ", ".join(f"replica {n} at {name!r}" for n, name in enumerate(names))
            raise _ways_differ(places)
        brought = [self._brought[n] for n in range(self._count)]
        self._brought = {}
        self._given = join(brought)
        self._round += 1

    def _may_run(self, position: int) -> bool:
        return not self._in_turn or self._turn == position

    def _pass_on(self, position: int) -> None:
        """Gives the turn to the next replica that has not ended."""
        following = [(position + n) % self._count for n in range(1, self._count + 1)]
        self._turn = next((n for n in following if n not in self._gone), position)
        self._changed.notify_all()

    def _check_not_off(self) -> None:
        if self.error is not None:
            raise _CalledOff


def _ways_differ(found: str) -> UsageError:
    return UsageError(
        "BatchNorm over the samples of all replicas",
        f"they take different ways through the model: {found}",
        "call the same BatchNorm layers in the same order whatever the samples are, or let each "
        "replica take statistics of its own with sync_batchnorm=False",
    )


@dataclass(frozen=True)
class _Modes:
    """What torch keeps for each thread and a new thread would not have."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    cache: bool
    streams: tuple[torch.cuda.Stream, ...]

    @staticmethod
    def present(devices: Sequence[torch.device]) -> _Modes:
        kinds = sorted({device.type for device in devices} | {"cpu"})
        return _Modes(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in kinds
                if torch.is_autocast_enabled(kind)
            ),
            cache=torch.is_autocast_cache_enabled(),
            streams=tuple(torch.cuda.current_stream(d) for d in devices if d.type == "cuda"),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stream in self.streams:
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.cache))
            yield
