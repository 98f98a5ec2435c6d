"""What schedulers send before they take a machine away, as requests that a training loop can meet.

SIGTERM: save, then end. SIGUSR1: save and go on. Slurm sends either with `--signal`, and SIGTERM
before it kills.

A handler is installed where nobody else has one, by the main thread, and taken away at the end.
SIGTERM's not before a loop shows, by its first question, that it will act on it; until then both
do what they do without us.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

_AGAIN_S = 5.0
"""A second SIGTERM ends the process when it comes so much later. Before, it is taken for the same
one, sent to the launcher as well, which passes it on."""


class Requests:
    """What this process has been asked for by signals since it was asked last."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}
        self._listening = False
        self._save = False
        self._stop_since: float | None = None
        self._install(signal.SIGUSR1)

    def listen(self) -> None:
        """From now on signals are requests, which the caller will take."""
        if not self._listening:
            self._listening = True
            self._install(signal.SIGTERM)

    @property
    def stop(self) -> bool:
        """Whether the run is to save and end."""
        return self._stop_since is not None

    def take_save(self) -> bool:
        """Whether to save and go on; once for each request."""
        asked, self._save = self._save, False
        return asked

    def close(self) -> None:
        """Signals do again what they did before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self._before.clear()

    def _install(self, number: int) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(number) is signal.SIG_DFL:
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            # In a child, such as a worker of a DataLoader, when a scheduler sends it to everybody.
            if number != signal.SIGUSR1:
                _end_by(number)
        elif not self._listening:
            _end_by(number)
        elif number == signal.SIGUSR1:
            self._save = True
        elif self._stop_since is None:
            self._stop_since = time.monotonic()
        elif time.monotonic() - self._stop_since > _AGAIN_S:
            _end_by(number)


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
