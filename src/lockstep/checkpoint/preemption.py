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
"""A second SIGTERM ends the process if it comes at least this much later than the first."""


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
        """To be called once the training loop acts on requests; before that, signals end it."""
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
        """Puts back the handlers that signals had before."""
        for number, handler in self._previous_handlers.items():
            # Somebody else may have installed another handler meanwhile.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self._previous_handlers.clear()

    def _install_handler(self, number: int) -> None:
        """Installs the handler for a signal, unless the program has one, or this is a thread."""
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and termination.is_default(number):
            self._previous_handlers[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of both signals: notes the request, or ends the process."""
        is_forked_child = os.getpid() != self._owner_pid
        if is_forked_child:
            # Such as a worker of a DataLoader: schedulers may signal all processes. SIGUSR1 is
            # meant for the training loop alone.
            if number != signal.SIGUSR1:
                termination.end_by(number)
            return
        if not self._is_listening:  # no loop would act on a request
            termination.end_by(number)
            return
        if number == signal.SIGUSR1:
            self._save_requested = True
            return
        # SIGTERM. Soon after the first one, another may come that means the same request: it was
        # sent to the launcher as well, which passes it on. A later one ends the process.
        now_s = time.monotonic()
        if self._stop_requested_at_s is None:
            self._stop_requested_at_s = now_s
        elif now_s - self._stop_requested_at_s > MIN_TIME_TO_SECOND_SIGTERM_S:
            termination.end_by(number)
