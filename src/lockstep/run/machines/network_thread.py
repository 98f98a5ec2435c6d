"""Provides the launcher's thread for network connections: an asyncio event loop beside the main
thread.

The auth proxy, the forwarder and the connections between launchers all run in this thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

ITERATIONS_BEFORE_END = 5
"""How often the event loop runs after `close` was called. A few times are enough."""

T = TypeVar("T")


class NetworkThread:
    """A thread that runs an event loop until `close` is called."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-network", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # When it ends, the runner cancels the tasks that are still running.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._wait_for_close())

    async def _wait_for_close(self) -> None:
        """Keeps the event loop running until `close` is called."""
        await self._closing.wait()

        # When a connection was accepted, its handler begins to run a few iterations of the loop
        # later. A handler that is cancelled before that cannot close its connection.
        for _ in range(ITERATIONS_BEFORE_END):
            await asyncio.sleep(0)  # lets the loop run once

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine in the thread, without waiting for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the thread, and returns its result.

        If a signal interrupts the wait, the coroutine is cancelled.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        """Calls a function in the thread, without waiting. Does nothing if the thread has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Ends every connection, and then the thread."""
        self.call_soon(self._closing.set)
        self._thread.join()
