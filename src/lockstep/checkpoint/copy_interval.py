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
"""The part of the time of the steps that keeping them may take."""
COST_AFTER_COPY = 1.2
"""A copy costs this many times what it takes itself: the step after it is slower, since its data
are no longer in the caches. This was measured on an idle machine. In a run beside other programs
the difference is too small to be seen."""
MAX_SHARE_OF_LINK = 0.1
"""The part of the time that copies to another machine may take on the link between the machines,
which the training itself uses too."""
NUM_COPIES = 16
"""What counts are the times of the last so many copies."""
MARGIN = 1.5
"""Steps are kept more often again only if copies could take this many times as long as they do.
Without a margin, the interval would change all the time."""


class CopyInterval:
    """Every how many steps one is kept.

    Args:
        collectives: of the run.
        say: prints a line on rank 0.
    """

    def __init__(self, collectives: Collectives, say: Callable[[str], None]) -> None:
        self._collectives = collectives
        self._say = say
        self.every = 1
        """Every so many steps, one is kept."""
        self._said_every = 1
        """What the user was last told."""
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

        steps_for_cost = COST_AFTER_COPY * cost_s / (MAX_COST * step_time_s)
        steps_for_link = link_s / (MAX_SHARE_OF_LINK * step_time_s)
        self.every = choose_every(self.every, steps_for_cost, steps_for_link)

        # The user is told when the interval has reached its value, and has at least doubled or
        # halved since the last message.
        is_settled = self.every >= steps_for_cost
        is_news = self.every >= 2 * self._said_every or 2 * self.every <= self._said_every
        if is_settled and is_news:
            reason = f"that takes {_milliseconds(cost_s)}"
            if steps_for_link > steps_for_cost:
                reason = f"the copy on another machine takes {_milliseconds(link_s)}"
            self._announce(reason, step_time_s)

    def _announce(self, reason: str, step_time_s: float) -> None:
        """Tells the user how often a step is kept.

        Args:
            reason: what takes how long: "that takes 13 ms".
            step_time_s: the time of a step.
        """
        self._said_every = self.every
        which = f"every {self.every} steps, one is"
        if self.every == 1:
            which = "every step is"
        self._say(
            f"{which} kept in memory from now on: {reason}, and a step takes "
            f"{_milliseconds(step_time_s)}"
        )


def choose_every(every: int, steps_for_cost: float, steps_for_link: float) -> int:
    """Returns how often a step is kept from now on: 3 for every third step.

    Args:
        every: how often a step was kept until now.
        steps_for_cost: number of steps of which a copy takes the part `MAX_COST`.
        steps_for_link: number of steps of which a copy to another machine takes the part
            `MAX_SHARE_OF_LINK`.
    """
    # The cost of copies makes the interval at most twice as long, because a few copies may have
    # taken long for another reason. The link changes it at once: on a slow network, each copy too
    # many holds up the training.
    for_cost = min(math.ceil(steps_for_cost), 2 * every)
    needed = max(1, for_cost, math.ceil(steps_for_link))
    if needed >= every:
        return needed

    # The interval becomes shorter only if copies could take `MARGIN` times as long as they do.
    with_margin = math.ceil(MARGIN * max(steps_for_cost, steps_for_link))
    return min(every, max(1, with_margin))


def _milliseconds(seconds: float) -> str:
    """Writes a time as "0.47 ms", "13 ms" or "1203 ms"."""
    milliseconds = 1000 * seconds
    if milliseconds < 10:
        return f"{milliseconds:.2g} ms"
    return f"{milliseconds:.0f} ms"
