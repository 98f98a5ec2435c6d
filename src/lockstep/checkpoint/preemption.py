"""Signals that schedulers send before they take a machine away, as requests to a training loop.

SIGTERM: save, then end. SIGUSR1: save and go on. Slurm sends either with `--signal`, and SIGTERM
before it kills.

A handler is installed only if nobody else has installed one, only from the main thread, and it is
removed at the end of the run. The handler for SIGTERM is not installed before a loop shows, by its
first call of `listen`, that it will act on it. Until then both signals end the process, as they do
by default.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from lockstep.checkpoint import termination

MIN_TIME_TO_SECOND_SIGTERM_S = 5.0
"""A second SIGTERM ends the process if it comes at least so much later than the first. An earlier
one is taken for the same request: it was sent to the launcher as well, which passes it on."""


class SignalRequests:
    """What signals have asked this process for."""

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self._previous_handlers: dict[int, Any] = {}
        self._is_listening = False
        self._save_requested = False
        self._stop_requested_at_s: float | None = None
        self._install_handler(signal.SIGUSR1)

    def listen(self) -> None:
        """From now on signals are requests, which the caller will act on."""
        if not self._is_listening:
            self._is_listening = True
            self._install_handler(signal.SIGTERM)

    @property
    def stop(self) -> bool:
        """True if the run is to save and end."""
        return self._stop_requested_at_s is not None

    def take_save(self) -> bool:
        """Returns True if the run is to save and go on; only once for each request."""
        requested = self._save_requested
        self._save_requested = False
        return requested

    def close(self) -> None:
        """Lets signals do again what they did before."""
        for number, handler in self._previous_handlers.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self._previous_handlers.clear()

    def _install_handler(self, number: int) -> None:
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and termination.is_default(number):
            self._previous_handlers[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of both signals: notes the request, or ends the process."""
        if os.getpid() != self._owner_pid:
            # A child, such as a worker of a DataLoader: schedulers may signal all processes.
            if number != signal.SIGUSR1:
                termination.end_by(number)
        elif not self._is_listening:
            termination.end_by(number)
        elif number == signal.SIGUSR1:
            self._save_requested = True
        elif self._stop_requested_at_s is None:
            self._stop_requested_at_s = time.monotonic()
        elif time.monotonic() - self._stop_requested_at_s > MIN_TIME_TO_SECOND_SIGTERM_S:
            termination.end_by(number)
