"""Decides how often a step is kept in memory: as often as that costs little time.

The cost of a copy is the time that the training loop has waited for it. It is measured during the
whole run, and not only in the first steps: a copy that is made seldom takes about twice as long as
one in each step, because neither its code nor its data are in the caches by then.

All ranks must keep the same steps. So they decide together, in one exchange of text after each of
the first copies, and after every `NUM_COPIES`-th copy from then on.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

from lockstep.distributed.collectives import Collectives

MAX_COST = 0.02
"""The share of the training time that copies may take: 0.02 is 2 percent."""
COST_AFTER_COPY = 1.2
"""A copy costs this many times what it takes itself: the step after it is slower, since its data
are no longer in the caches. This was measured on an idle machine. In a run beside other programs
the difference is too small to be seen."""
MAX_SHARE_OF_LINK = 0.1
"""The share of the training time in which copies to another machine may use the link between the
machines, which the training itself uses too."""
NUM_COPIES = 16
"""The number of the last copies whose times are considered."""
MARGIN = 1.5
"""Steps are kept more often again only if copies could take this many times as long as they do.
Without a margin, the interval would change all the time."""


class CopyInterval:
    """Chooses the number of steps from one copy to the next.

    Args:
        collectives: the collectives of the run.
        say: function that prints a line on rank 0.
    """

    def __init__(self, collectives: Collectives, say: Callable[[str], None]) -> None:
        self._collectives = collectives
        self._say = say
        self.every = 1
        """The number of steps from one copy to the next: 1 if every step is kept."""
        self._announced_every = 1
        """The value of `every` that the user was last told."""
        self._costs_s: deque[float] = deque(maxlen=NUM_COPIES)
        """How long the training has waited for each of the last copies."""
        self._step_times_s: deque[float] = deque(maxlen=NUM_COPIES)
        """How long the steps before the last copies took."""
        self._link_times_s: deque[float] = deque(maxlen=NUM_COPIES)
        """How long the last copies to another machine took."""

    def note_cost(self, seconds: float) -> None:
        """Notes how long the training has waited for a copy."""
        self._costs_s.append(seconds)

    def note_step_time(self, seconds: float) -> None:
        """Notes how long the step before a copy took."""
        self._step_times_s.append(seconds)

    def note_link_time(self, seconds: float) -> None:
        """Notes how long a copy to another machine took."""
        self._link_times_s.append(seconds)

    def choose(self, num_copies: int, expected_link_s: float) -> None:
        """Decides, together with all ranks, how often a step is kept, if it is time to do so.

        All ranks call this after each copy.

        Args:
            num_copies: number of steps that were kept; the same on all ranks.
            expected_link_s: the expected time of a copy to another machine, which is used until the
                first such copy has been made.
        """
        if num_copies > NUM_COPIES and num_copies % NUM_COPIES > 0:
            return

        # One or two copies may have taken long for another reason. So the cost is taken to be 0
        # until there are enough copies.
        own_cost_s = 0.0
        if len(self._costs_s) >= NUM_COPIES // 2:
            own_cost_s = statistics.median(self._costs_s)
        own = [
            own_cost_s,
            # The first step may take long. Of two steps, this is the shorter one.
            statistics.median_low(self._step_times_s),
            statistics.median(self._link_times_s or [expected_link_s]),
        ]

        # The slowest rank decides.
        answers = self._collectives.exchange(own)
        cost_s = max(answer[0] for answer in answers)
        step_time_s = max(answer[1] for answer in answers)
        link_s = max(answer[2] for answer in answers)

        # Example: a copy costs 12 ms in all, a step takes 100 ms, and copies may take 2 % of the
        # time, which is 2 ms of each step. So a copy may be made once in 6 steps.
        full_cost_s = COST_AFTER_COPY * cost_s  # includes that the step after a copy is slower
        min_every_for_cost = full_cost_s / (MAX_COST * step_time_s)

        # The same for the time in which a copy is sent to another machine.
        min_every_for_link = link_s / (MAX_SHARE_OF_LINK * step_time_s)
        self.every = choose_every(self.every, min_every_for_cost, min_every_for_link)

        # `choose_every` makes the interval longer in several calls. The user is told at the last of
        # them, and only if the interval has at least doubled or halved since the last message.
        is_long_enough = self.every >= min_every_for_cost
        has_doubled = self.every >= 2 * self._announced_every
        has_halved = 2 * self.every <= self._announced_every
        if is_long_enough and (has_doubled or has_halved):
            reason = f"keeping it takes {_milliseconds(cost_s)}"
            if min_every_for_link > min_every_for_cost:
                reason = f"the copy on another machine takes {_milliseconds(link_s)}"
            self._announce(reason, step_time_s)

    def _announce(self, reason: str, step_time_s: float) -> None:
        """Tells the user how often a step is kept.

        For example "every 3 steps, one is kept in memory from now on: keeping it takes 13 ms, and a
        step takes 20 ms".

        Args:
            reason: the reason for the interval, for example "keeping it takes 13 ms".
            step_time_s: the time of a step.
        """
        self._announced_every = self.every

        if self.every == 1:
            how_often = "every step is kept in memory from now on"
        else:
            how_often = f"every {self.every} steps, one is kept in memory from now on"
        self._say(f"{how_often}: {reason}, and a step takes {_milliseconds(step_time_s)}")


def choose_every(every: int, min_every_for_cost: float, min_every_for_link: float) -> int:
    """Returns the number of steps from one copy to the next: 3 if every third step is kept.

    An interval that is too short is lengthened at once. One that is too long is shortened only if
    the shorter one leaves a margin, so that it does not change all the time. With a `MARGIN` of
    1.5, from an interval of 10:

        min_every_for_cost   result
        25                   20: too short, lengthened to 2 * 10, which is the most in one call
        11                   11: too short, lengthened
        8                    10: stays, as 8 with the margin would be 12
        4                     6: too long, shortened to 4 with the margin

    Args:
        every: the interval until now.
        min_every_for_cost: with shorter intervals than this, copies take more than the share
            `MAX_COST` of the training time.
        min_every_for_link: with shorter intervals than this, copies to another machine use the link
            between the machines for more than the share `MAX_SHARE_OF_LINK` of the time.
    """
    # A few copies may have taken long for another reason, so for their cost the interval at most
    # doubles. For the link it grows at once: on a slow network, each copy too many holds up the
    # training.
    capped_min_for_cost = min(math.ceil(min_every_for_cost), 2 * every)
    lengthened = max(capped_min_for_cost, math.ceil(min_every_for_link))
    is_too_short = lengthened > every
    if is_too_short:
        return lengthened

    shortened = math.ceil(MARGIN * max(min_every_for_cost, min_every_for_link))
    return min(every, max(1, shortened))


def _milliseconds(seconds: float) -> str:
    """Writes a time as "0.47 ms", "13 ms" or "1203 ms"."""
    milliseconds = 1000 * seconds
    if milliseconds < 10:
        return f"{milliseconds:.2g} ms"
    return f"{milliseconds:.0f} ms"
