"""Decides when a training loop saves: after a number of steps or minutes, or on a signal.

All ranks count the same steps, so they need not exchange anything to save after a number of steps.
But clocks and signals differ between ranks. So the ranks exchange a short text about every half
second, and all of them act in the step of that exchange. The number of steps between two exchanges
(`steps_between_exchanges`) follows from the time of a step on rank 0. On one process nothing is
exchanged, and a signal is acted on in the next step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NamedTuple

from lockstep.checkpoint.preemption import SignalRequests
from lockstep.distributed.collectives import Collectives
from lockstep.errors import SettingError
from lockstep.settings import is_whole_number

EXCHANGE_INTERVAL_S = 0.5
"""About how often the ranks exchange: a signal may be met that late."""
MAX_STEPS_BETWEEN_EXCHANGES = 256
"""Limits how late a signal is met if steps become slow after an exchange."""
MIN_STEP_TIME_S = 1e-6
"""Shorter times are taken for this one, so that a time of 0 is no divisor."""

EXPLANATION_AND_ADVICE = {
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
"""For each setting of a `Policy`, what it is and what to give, for error messages."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When `world.checkpoint` saves, and which checkpoints it keeps.

    Raises:
        SettingError: a value is invalid.
    """

    keep: int = 2
    """Number of the newest checkpoints that are kept."""
    every: int | timedelta | None = None
    """The number of steps, or the time, after which `step()` saves; None: only on a signal."""
    best: Literal["min", "max"] | None = None
    """Whether the checkpoint with the smallest or the largest metric is kept too."""
    busy: Literal["wait", "skip"] = "wait"
    """What a save does while an earlier one is being written."""
    asynchronous: bool = True
    """True if training continues while a checkpoint is written."""

    def __post_init__(self) -> None:
        is_positive_time = isinstance(self.every, timedelta) and self.every > timedelta()
        is_valid = {
            "keep": is_whole_number(self.keep),
            "every": self.every is None or is_whole_number(self.every) or is_positive_time,
            "best": self.best in (None, "min", "max"),
            "busy": self.busy in ("wait", "skip"),
        }
        for name, (explanation, advice) in EXPLANATION_AND_ADVICE.items():
            if not is_valid[name]:
                was_set = f"world.checkpoint(..., {name}={getattr(self, name)!r})"
                raise SettingError(was_set, explanation, advice)


class _RankAnswer(NamedTuple):
    """A rank's message to the others in an exchange."""

    save_requested: bool
    stop_requested: bool
    save_is_due: bool
    """True if it is time to save by this rank's clock. The clock of rank 0 decides."""
    step_time_s: float
    """The mean time of a step since the last exchange. The value of rank 0 is used."""


class SaveSchedule:
    """Decides in each step, with the same result on all ranks, whether to save.

    Args:
        every: as in `Policy`.
        collectives: the collectives of the run.
        requests: the requests that signals have sent to this process.
    """

    def __init__(
        self, every: int | timedelta | None, collectives: Collectives, requests: SignalRequests
    ) -> None:
        self._every = every
        self._collectives = collectives
        self._requests = requests
        self._clock = time.monotonic
        self._saved_at_s = self._clock()
        self.steps_between_exchanges = 1
        # Both are numbers of optimizer steps done.
        self._next_exchange_step = 0
        self._last_exchange_step = 0
        self._last_exchange_at_s = self._saved_at_s

    def saved(self) -> None:
        """Records that a save was made. The time until the next one starts now."""
        self._saved_at_s = self._clock()

    def decide(self, number: int) -> Literal["save", "stop"] | None:
        """Returns what to do in this step: "save", "stop" (save, then end the run), or None.

        In some steps, which are the same on all ranks, the ranks exchange what their clocks and
        signals say.

        Args:
            number: number of optimizer steps that were made; the same on all ranks.
        """
        # From the first call on, signals are requests to the training loop. Before, they end the
        # process.
        self._requests.listen()
        is_due_by_steps = isinstance(self._every, int) and number % self._every == 0

        # Clocks and signals are only considered in the steps in which the ranks exchange them. In
        # other steps there are no answers.
        answers = self._answers_of_ranks(number)
        is_due_by_time = bool(answers) and answers[0].save_is_due  # the clock of rank 0 decides
        # A signal may have been sent to any of the ranks.
        save_requested = any(answer.save_requested for answer in answers)
        stop_requested = any(answer.stop_requested for answer in answers)

        if stop_requested:
            return "stop"
        if is_due_by_steps or is_due_by_time or save_requested:
            return "save"
        return None

    def _answers_of_ranks(self, number: int) -> list[_RankAnswer]:
        """Returns what the clocks and signals of all ranks say; empty if this step has no exchange.

        Args:
            number: number of optimizer steps that were made.
        """
        if self._collectives.single_process:
            return [self._own_answer(number)]
        if number >= self._next_exchange_step:
            return self._exchange(number)
        return []

    def _own_answer(self, number: int) -> _RankAnswer:
        """Returns what the clock and the signals of this rank say."""
        steps_since_exchange = max(1, number - self._last_exchange_step)
        time_since_exchange_s = self._clock() - self._last_exchange_at_s
        return _RankAnswer(
            # A request to save is answered once. A request to stop remains, as the run ends.
            save_requested=self._requests.take_save(),
            stop_requested=self._requests.stop,
            save_is_due=self._is_due(),
            step_time_s=time_since_exchange_s / steps_since_exchange,
        )

    def _is_due(self) -> bool:
        """Returns True if the time between two saves has passed, by the clock of this process."""
        if not isinstance(self._every, timedelta):
            return False
        return self._clock() - self._saved_at_s >= self._every.total_seconds()

    def _exchange(self, number: int) -> list[_RankAnswer]:
        """Exchanges messages with all ranks, and plans the step of the next exchange.

        Args:
            number: number of optimizer steps that were made.
        """
        # Tuples are sent as lists.
        values_of_ranks = self._collectives.exchange(self._own_answer(number))
        answers = [_RankAnswer(*values) for values in values_of_ranks]

        self._set_steps_between_exchanges(answers[0].step_time_s)
        self._next_exchange_step = number + self.steps_between_exchanges
        self._last_exchange_step = number
        self._last_exchange_at_s = self._clock()
        return answers

    def _set_steps_between_exchanges(self, step_time_s: float) -> None:
        """Sets the number of steps that take about `EXCHANGE_INTERVAL_S`, but at most doubles it.

        It grows slowly, because the first steps take longer than later ones: kernels are loaded and
        compiled in them.

        Args:
            step_time_s: the time of a step on rank 0.
        """
        wanted = int(EXCHANGE_INTERVAL_S / max(step_time_s, MIN_STEP_TIME_S))
        allowed = min(2 * self.steps_between_exchanges, MAX_STEPS_BETWEEN_EXCHANGES)
        self.steps_between_exchanges = max(1, min(wanted, allowed))
