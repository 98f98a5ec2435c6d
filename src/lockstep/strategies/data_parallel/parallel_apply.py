"""Runs the replicas of one forward pass in threads, as torch's `parallel_apply` does.

Replicas on different devices run at the same time. Replicas on the same device run one at a time,
in order: they share the device's stream of random numbers, and draw the same numbers again only if
the order is fixed.

Replicas can *meet*: each of them waits until all have reached the same place in the model, and gets
a result that is computed from the values that they bring. BatchNorm over all replicas uses this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, NamedTuple

import torch

from lockstep.distributed.streams import take_gpu_in_this_thread
from lockstep.errors import UsageError

Combine = Callable[[list[Any]], list[Any]]
"""Computes the result of a meeting for each replica, from the values that the replicas bring."""

END_OF_FORWARD = "the end of its forward pass"


class Arrival(NamedTuple):
    """A replica that waits at a meeting."""

    place: str
    """The place in the model at which the replica waits."""
    value: Any
    combine: Combine | None
    """Computes the results; None for a meeting without a result."""


class ReplicaBarrier:
    """Lets the replicas of one forward pass wait for each other.

    Args:
        num_replicas: the number of replicas.
        in_turn: True if only one of them may run at a time.
    """

    def __init__(self, num_replicas: int, *, in_turn: bool) -> None:
        self.error: BaseException | None = None
        """The error of the first replica that failed; None if none has failed."""
        self._arrivals: dict[int, Arrival] = {}
        self._results: list[Any] = []

        # The last replica that arrives calls this before the others go on. It is not a method,
        # because the barrier would then be in a reference cycle, and all results would stay in
        # memory until the next garbage collection.
        end_meeting = partial(_end_meeting, self._arrivals, self._results)
        self._barrier = threading.Barrier(num_replicas, end_meeting)

        # A replica's semaphore is released when the previous replica waits. The first replica never
        # has to wait for its turn.
        self._turns: list[threading.Semaphore] = []
        if in_turn:
            self._turns = [threading.Semaphore(0) for _ in range(num_replicas)]

    def meet(self, position: int, place: str, value: Any, combine: Combine) -> Any:
        """Waits until all replicas have called this, and returns the result for this one.

        Args:
            position: the number of this replica, from 0.
            place: the place in the model, which must be the same for all replicas.
            value: the value that this replica brings.
            combine: computes the results of all replicas from their values; called once.

        Raises:
            UsageError: the replicas are at different places.
        """
        self._wait_for_all(position, Arrival(place, value, combine))
        self.wait_for_turn(position)
        return self._results[position]

    def end_of_forward(self, position: int) -> None:
        """Waits until all replicas have ended the forward pass; none may wait elsewhere."""
        self._wait_for_all(position, Arrival(END_OF_FORWARD, None, None))

    def wait_for_turn(self, position: int) -> None:
        """Waits until this replica may run."""
        if self._turns and position > 0:
            self._turns[position].acquire()
            if self._barrier.broken:  # another replica has failed, and released all turns
                raise threading.BrokenBarrierError

    def fail(self, error: BaseException) -> None:
        """Records that a replica has failed, and makes the others fail when they wait next.

        A replica that is waiting, or is going to wait, gets a `threading.BrokenBarrierError`.
        """
        # A BrokenBarrierError only follows from the failure of another replica.
        if self.error is None and not isinstance(error, threading.BrokenBarrierError):
            self.error = error
        self._barrier.abort()
        for turn in self._turns:
            turn.release()

    def _wait_for_all(self, position: int, arrival: Arrival) -> None:
        """Lets the next replica run, and waits until all replicas have called this method.

        If another replica fails in the meantime, `fail` breaks the barrier, and this raises
        `threading.BrokenBarrierError`.
        """
        self._arrivals[position] = arrival
        try:
            # `_turns` has a semaphore for each replica if they run in turn; otherwise it is empty.
            next_position = position + 1
            if next_position < len(self._turns):
                self._turns[next_position].release()
            self._barrier.wait()
        except BaseException as error:  # recorded here, because the user's code may catch it
            self.fail(error)
            raise


def _end_meeting(arrivals: dict[int, Arrival], results: list[Any]) -> None:
    """Checks that all replicas are at the same place, and computes the results of their meeting.

    Args:
        arrivals: the waiting replicas, by number. The dictionary is emptied for the next meeting.
        results: the list into which the result of each replica is written.

    Raises:
        UsageError: the replicas are at different places.
    """
    in_order = [arrivals[position] for position in sorted(arrivals)]
    arrivals.clear()
    places = [arrival.place for arrival in in_order]
    if len(set(places)) > 1:
        shown = [f"replica {number} at {place!r}" for number, place in enumerate(places)]
        raise UsageError(
            "BatchNorm over the samples of all replicas",
            f"they take different ways through the model: {', '.join(shown)}",
            "call the same BatchNorm layers in the same order whatever the samples are, or let "
            "each replica take statistics of its own with sync_batchnorm=False",
        )

    # At the same place all replicas have the same function. It is None at the end of the forward
    # pass, where they only wait: there is nothing to combine.
    combine = in_order[0].combine
    if combine is None:
        results.clear()
    else:
        results[:] = combine([arrival.value for arrival in in_order])


class RunningReplica(NamedTuple):
    """The replica that a thread is running."""

    barrier: ReplicaBarrier
    position: int


current_replica: ContextVar[RunningReplica | None] = ContextVar("current_replica", default=None)
"""The replica that the current thread is running; None outside of `parallel_apply`."""


def parallel_apply(
    calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]
) -> list[Any]:
    """Runs calls at the same time, and returns their results.

    The first call runs in the calling thread, the others in threads of their own. There, the
    calling thread's modes of autograd and autocast, and its CUDA streams, are used as well.

    Args:
        calls: one function for each replica.
        devices: the device of each replica.

    Raises:
        BaseException: the error of the first call that failed, after all calls have ended.
    """
    share_one_device = len(set(devices)) == 1
    barrier = ReplicaBarrier(len(calls), in_turn=share_one_device)
    mode_factories = _mode_factories_of_this_thread(devices)

    def run_in_turn(position: int) -> Any:
        """Runs one call, and returns its result when all calls have ended.

        If all replicas share one device, they run in turn: each begins when the one before it waits
        in the barrier, in a BatchNorm layer or at the end of its forward pass.
        """
        barrier.wait_for_turn(position)
        result = calls[position]()
        barrier.end_of_forward(position)
        return result

    def enter_modes_of_caller(stack: ExitStack, position: int) -> None:
        """Gives the current thread the GPU of its replica, and the calling thread's modes.

        Modes, such as autocast and `no_grad`, belong to a thread. The first call runs in the
        calling thread, which has them already.
        """
        if position == 0:
            return
        take_gpu_in_this_thread(devices[position])
        for make_mode in mode_factories:
            stack.enter_context(make_mode())

    def run_replica(position: int) -> Any:
        """Runs one call in the current thread, and returns its result.

        If the call fails, this returns None. The barrier keeps the error, which `parallel_apply`
        raises, and releases all replicas that wait in it.
        """
        token = current_replica.set(RunningReplica(barrier, position))
        try:
            with ExitStack() as stack:
                enter_modes_of_caller(stack, position)
                return run_in_turn(position)
        except BaseException as error:
            barrier.fail(error)
            return None
        finally:
            current_replica.reset(token)

    with ThreadPoolExecutor(len(calls) - 1, "replica") as pool:
        futures = []
        for position in range(1, len(calls)):
            futures.append(pool.submit(copy_context().run, run_replica, position))

        results = [run_replica(0)]
        try:
            for future in futures:
                results.append(future.result())
        except BaseException as error:  # a KeyboardInterrupt while waiting, for example
            barrier.fail(error)

    failure = barrier.error
    barrier.error = None  # the error refers to frames, which refer to the barrier
    if failure is None:
        return results

    try:
        raise failure
    finally:
        # The traceback refers to this frame. Without `del` this would be a reference cycle, which
        # would keep everything that the replicas have computed in memory.
        del failure


def _mode_factories_of_this_thread(
    devices: Sequence[torch.device],
) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Returns functions that make context managers with this thread's modes, for other threads.

    torch keeps these modes per thread: CUDA streams, inference mode, gradients and autocast. Each
    thread needs context managers of its own, because one cannot be entered twice.
    """
    factories: list[Callable[[], AbstractContextManager[Any]]] = []
    for device in devices:
        if device.type == "cuda":
            factories.append(partial(torch.cuda.stream, torch.cuda.current_stream(device)))

    factories.append(partial(torch.inference_mode, torch.is_inference_mode_enabled()))
    factories.append(partial(torch.set_grad_enabled, torch.is_grad_enabled()))
    cache_enabled = torch.is_autocast_cache_enabled()
    device_types = {"cpu"} | {device.type for device in devices}  # a model may compute on the CPU

    for device_type in sorted(device_types):
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            factories.append(
                partial(torch.autocast, device_type, dtype, cache_enabled=cache_enabled)
            )

    return factories
