"""Records the random numbers that are drawn for each optimizer step.

A training loop may draw random numbers before it calls the model, for example to add noise to the
batch. So the draws of a step begin when its batch is handed out, or when the step before it has
ended. A *stream* is a random generator. Those of numpy and Python cannot be observed call by call,
so their states are compared instead.
"""

from __future__ import annotations

from lockstep.verify.recording.draws import moved_streams, stream_digests
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.training_record import RankUpdate


class StepDraws:
    """The random numbers that were drawn for the current step.

    Args:
        mode: function mode, which sees every call of torch's functions.
    """

    def __init__(self, mode: FunctionMode) -> None:
        self._mode = mode
        self.num_draws_before_step = 0
        """Number of draws of this process before this step."""
        self._streams_before = stream_digests()

    def forget_draws_so_far(self) -> None:
        """Clears the record: random numbers from here on are drawn for the next step.

        Statistics over samples that became Python numbers are cleared as well.
        """
        self.num_draws_before_step = self._mode.draws.num_draws
        self._mode.statistics = {}
        self._mode.draws.digests = set()
        self._streams_before = stream_digests()

    def record(self, update: RankUpdate) -> None:
        """Adds the random numbers and statistics since `forget_draws_so_far` to an update."""
        update.scalar_statistics |= self._mode.statistics
        update.drawn_digests |= self._mode.draws.digests
        update.random_streams |= moved_streams(self._streams_before)
