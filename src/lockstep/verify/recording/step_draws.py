"""Records the random numbers that are drawn for each step.

A loop may draw for a step before it calls the model, say to add noise to the batch. So the draws of
a step begin when its batch is handed out, or when the step before it ended. A *stream* is a random
generator that cannot be watched call by call, such as numpy's: its state is compared instead.
"""

from __future__ import annotations

from lockstep.verify.recording.draws import moved_streams, stream_digests
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.training_record import RankUpdate


class StepDraws:
    """The random numbers that are drawn for the current step.

    Args:
        mode: sees every call of torch's functions.
    """

    def __init__(self, mode: FunctionMode) -> None:
        self._mode = mode
        self.count_before = 0
        """Draws of the process before this step."""
        self._streams_before = stream_digests()

    def restart(self) -> None:
        """Forgets the draws so far: what is drawn from here on is drawn for the next step.

        The statistics over samples that became numbers of Python's are forgotten as well.
        """
        self.count_before = self._mode.draws.count
        self._mode.statistics = {}
        self._mode.draws.digests = set()
        self._streams_before = stream_digests()

    def record(self, update: RankUpdate) -> None:
        """Adds to an update what was drawn since `restart`, and the statistics since then."""
        update.scalar_statistics |= self._mode.statistics
        update.drawn_digests |= self._mode.draws.digests
        update.random_streams |= moved_streams(self._streams_before)
