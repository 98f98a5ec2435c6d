"""When a training loop saves: every so many steps, every so many minutes, or when a signal asks.

Steps are counted alike by all ranks, so nothing has to be exchanged. Time and signals are not seen
alike: the ranks tell each other, in one exchange of text every half second or so (every
`Moment.pause` steps, which rank 0 adapts to how long a step takes), and all act in the step of
that exchange. On one process nothing is exchanged, and signals are met in the very step.

What schedulers send before they take a machine away, as requests that a training loop can meet.

SIGTERM: save, then end. SIGUSR1: save and go on. Slurm sends either with `--signal`, and SIGTERM
before it kills.

A handler is installed where nobody else has one, by the main thread, and taken away at the end.
SIGTERM's not before a loop shows, by its first question, that it will act on it; until then both
do what they do without us.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Literal

from lockstep.checkpoint import termination
from lockstep.distributed.collectives import Collectives
from lockstep.errors import SettingError
from lockstep.settings import is_whole_number

_BETWEEN_S = 0.5
"""Between two exchanges, about: how late a signal may be met."""
_LONGEST = 256
"""Steps; a step that suddenly takes a second must not let a signal wait for an hour."""
_EXPECTED = {
    "keep": ("it is how many checkpoints remain on disk", "give an integer of at least 1"),
    "every": (
        "it is a number of optimizer steps, or a time",
        "give an integer of at least 1, or datetime.timedelta(minutes=10)",
    ),
    "best": (
        "it says which metric is the best",
        'give "min" or "max", and save(metric=...); to save an object, give it another name',
    ),
    "busy": (
        "it says what a save does while an earlier one is being written",
        'give "wait" or "skip"',
    ),
}
"""Of the settings of a `Policy`: what each is, and what to give."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How `world.checkpoint` saves.

    Raises:
        SettingError: a value that cannot be honoured.
    """

    keep: int = 2
    """How many of the newest checkpoints remain."""
    every: int | timedelta | None = None
    """Steps, or time, after which `step()` saves; None: only when a signal asks."""
    best: Literal["min", "max"] | None = None
    """The checkpoint with the smallest or largest metric remains too."""
    busy: Literal["wait", "skip"] = "wait"
    """What a save does while an earlier one is being written."""
    asynchronous: bool = True
    """Whether the training goes on while a checkpoint is written."""

    def __post_init__(self) -> None:
        period = isinstance(self.every, timedelta) and self.every > timedelta()
        sound = {
            "keep": is_whole_number(self.keep),
            "every": self.every is None or is_whole_number(self.every) or period,
            "best": self.best in (None, "min", "max"),
            "busy": self.busy in ("wait", "skip"),
        }
        for name, (found, do) in _EXPECTED.items():
            if not sound[name]:
                was_set = f"world.checkpoint(..., {name}={getattr(self, name)!r})"
                raise SettingError(was_set, found, do)


class Moment:
    """Decides, in each step and alike on all ranks, whether to save.

    Args:
        every: as in `Policy`.
        collectives: of the run.
        requests: what signals have asked this process for.
    """

    def __init__(
        self, every: int | timedelta | None, collectives: Collectives, requests: Requests
    ) -> None:
        self._every = every
        self._collectives = collectives
        self._requests = requests
        self._clock = time.monotonic
        self._saved_at = self._clock()
        self._next = 0
        self.pause = 1
        """Steps from one exchange to the next."""
        self._exchanged = 0, self._saved_at

    def saved(self) -> None:
        """From now on the time is counted again."""
        self._saved_at = self._clock()

    def decide(self, number: int) -> Literal["save", "stop"] | None:
        """What to do in this step; `stop`: save, then end the run.

        Args:
            number: optimizer steps done; the same on all ranks.
        """
        self._requests.listen()
        due = isinstance(self._every, int) and number % self._every == 0
        stop = False
        if number >= self._next:
            save, stop = self._together(number)
            due = due or save
        return "stop" if stop else "save" if due else None

    def _together(self, number: int) -> tuple[bool, bool]:
        """Whether any rank was asked to save, or it is time; and whether any was asked to stop."""
        now = self._clock()
        every = self._every.total_seconds() if isinstance(self._every, timedelta) else math.inf
        late = now - self._saved_at >= every
        asked, stop = self._requests.take_save(), self._requests.stop
        if self._collectives.alone:
            return asked or late, stop
        before, since = self._exchanged
        seconds = (now - since) / max(1, number - before)
        answers = self._collectives.exchange([asked, stop, late, seconds])
        late, seconds = answers[0][2:]
        # Slowly up: the first steps are no measure, since kernels are loaded and compiled in them.
        self.pause = max(1, min(int(_BETWEEN_S / max(seconds, 1e-6)), 2 * self.pause, _LONGEST))
        self._next = number + self.pause
        self._exchanged = number, self._clock()
        return late or any(answer[0] for answer in answers), any(answer[1] for answer in answers)


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
        if main and termination.is_default(number):
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            # In a child, such as a worker of a DataLoader, when a scheduler sends it to everybody.
            if number != signal.SIGUSR1:
                termination.end_by(number)
        elif not self._listening:
            termination.end_by(number)
        elif number == signal.SIGUSR1:
            self._save = True
        elif self._stop_since is None:
            self._stop_since = time.monotonic()
        elif time.monotonic() - self._stop_since > _AGAIN_S:
            termination.end_by(number)
