"""Records the signals that schedulers send before they take a machine away.

SIGTERM requests that the training loop saves and then ends, SIGUSR1 that it saves and goes on.
Slurm sends either with `--signal`, and SIGTERM before it kills a job.

A handler is installed only from the main thread, and only if the program has none for this signal.
It is removed at the end of the run. The handler for SIGTERM is not installed before the training
loop calls `listen`, which shows that it will act on requests. Until then both signals end the
process, as they do by default.
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
"""A second SIGTERM ends the process if it comes at least this much later than the first."""


class SignalRequests:
    """The requests that signals have sent to this process."""

    def __init__(self) -> None:
        self._owner_pid = os.getpid()
        self._previous_handlers: dict[int, Any] = {}
        self._is_listening = False
        self._save_requested = False
        self._stop_requested_at_s: float | None = None
        self._install_handler(signal.SIGUSR1)

    def listen(self) -> None:
        """Declares that the training loop acts on requests. Before, signals end the process."""
        if not self._is_listening:
            self._is_listening = True
            self._install_handler(signal.SIGTERM)

    @property
    def stop(self) -> bool:
        """True if a signal has requested that the run saves and ends."""
        return self._stop_requested_at_s is not None

    def take_save(self) -> bool:
        """Returns True, once for each request, if the run is requested to save and go on."""
        requested = self._save_requested
        self._save_requested = False
        return requested

    def close(self) -> None:
        """Restores the handlers that the signals had before."""
        for number, handler in self._previous_handlers.items():
            # Somebody else may have installed another handler meanwhile.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self._previous_handlers.clear()

    def _install_handler(self, number: int) -> None:
        """Installs our handler for a signal in the main thread, if the program has none."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and termination.is_default(number):
            self._previous_handlers[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handles both signals: records the request, or ends the process."""
        # A forked child, for example a worker of a DataLoader, gets the signal too if a scheduler
        # sends it to all processes. SIGUSR1 is only meant for the training loop.
        is_forked_child = os.getpid() != self._owner_pid
        if is_forked_child:
            if number != signal.SIGUSR1:
                termination.end_by(number)
            return

        # No training loop would act on a request, so the signal does what it would do without this
        # handler: it ends the process.
        if not self._is_listening:
            termination.end_by(number)
            return

        if number == signal.SIGUSR1:
            self._save_requested = True
            return

        # The first SIGTERM is a request to save and stop.
        now_s = time.monotonic()
        if self._stop_requested_at_s is None:
            self._stop_requested_at_s = now_s
            return

        # A second one that comes soon is the same request, and ignored: the scheduler has also sent
        # it to the launcher, which passes it on. A later one ends the process.
        seconds_since_request = now_s - self._stop_requested_at_s
        if seconds_since_request > MIN_TIME_TO_SECOND_SIGTERM_S:
            termination.end_by(number)
