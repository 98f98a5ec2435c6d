"""Collects the random states that a checkpoint saves, and restores them when a run resumes.

A *stream* is the state of the random generators of torch, of the GPU, of numpy and of Python's
`random`. Usually every rank has its own stream. It is saved, and restored if the run has as many
ranks as before. With virtual ranks, random numbers outside of the training loop come from a
*common* stream, which is the same on all ranks, and those inside are seeded again in every step. So
only the common stream is saved, and it can be restored on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lockstep.checkpoint.encoding import rng_state_to_text
from lockstep.checkpoint.sharding import copy_to_memory
from lockstep.distributed import seeding
from lockstep.distributed.collectives import Collectives
from lockstep.errors import warn
from lockstep.wording import count_noun, format_ranks


class CommonStream(Protocol):
    """The methods of `training.virtual_rank_streams.VirtualRankStreams` that a checkpoint uses."""

    @property
    def common(self) -> dict[str, Any]:
        """The state of the common stream, as `seeding.rng_state` returns it."""

    def set_common(self, state: dict[str, Any]) -> None:
        """Sets the common stream to a state that `common` has returned."""


class RandomStates:
    """The random states of a run, for its checkpoints.

    Args:
        collectives: the collectives of the run.
        common_stream: the common stream of the run; None if every rank has its own stream.
    """

    def __init__(self, collectives: Collectives, common_stream: CommonStream | None) -> None:
        self._collectives = collectives
        self._common_stream = common_stream
        self._warned_of_difference = False

    @property
    def is_common(self) -> bool:
        """True if all ranks have one common stream."""
        return self._common_stream is not None

    def state(self) -> dict[str, Any]:
        """Returns the state that is saved for this rank."""
        if self._common_stream is None:
            return seeding.rng_state(self._collectives.device)
        return self._common_stream.common

    def to_text(self) -> str:
        """Returns the state that is saved for this rank, as text."""
        return rng_state_to_text(self.state())

    def check_common(self, states_of_ranks: Sequence[str]) -> None:
        """Warns, once in a run, if the common stream is not the same on all ranks.

        Some ranks have drawn other random numbers than rank 0 then. So the results may differ in
        some bits from those on another number of processes. And a resumed run would not go on with
        the random numbers of these ranks, because the checkpoint stores the stream of rank 0.

        Args:
            states_of_ranks: for each rank, its random state as a text (from `to_text`).
        """
        if self._common_stream is None or self._warned_of_difference:
            return

        state_of_rank_0 = states_of_ranks[0]
        differing = [rank for rank, state in enumerate(states_of_ranks) if state != state_of_rank_0]
        if not differing:
            return

        self._warned_of_difference = True
        warn(
            "random numbers outside of the training loop, with virtual_ranks",
            found=f"{format_ranks(differing)} and rank 0 have not drawn the same ones, so bits are "
            "not promised",
            do="draw them on all ranks, and not under `if world.is_main`; or from a generator of "
            "the script's own",
        )

    def restore(self, saved: Mapping[str, Any]) -> str:
        """Restores the random state of this rank, if the checkpoint has it.

        Args:
            saved: the states of the checkpoint by name, with its `manifest`. `random` has the
                random states of the ranks, with None for a rank whose state is not known, as on a
                lost machine. It is None itself if no state is known.

        Returns:
            "" if the random state was restored, or did not need to be. Otherwise the reason why
            not, as the end of a message: "; dropout's random state restarts from the seed".
        """
        manifest = saved["manifest"]
        states = saved["random"]

        # Case 1: this run has one common stream. It goes on with the first state that is known. If
        # the saved run had a common stream, too, that is a state of it.
        if self._common_stream is not None and states is not None:
            known_states = [state for state in states if state is not None]
            self._common_stream.set_common(copy_to_memory(known_states[0]))
            return ""

        # Case 2: the saved run had one common stream, and this run has one for each rank.
        if manifest.get("virtual_ranks") is not None:
            return "; saved with virtual ranks: dropout's random state restarts from the seed"

        # Case 3: the training has drawn no random numbers, as for dropout. The random state of this
        # rank is the right one already.
        if self._training_drew_nothing(states):
            return ""

        # Case 4: the saved run had another number of ranks.
        topology = self._collectives.topology
        world_size = manifest["world_size"]
        if world_size != topology.size:
            return (
                f"; saved by {count_noun(world_size, 'process')}, resumed on {topology.size}: "
                "dropout's random state restarts from the seed"
            )

        # Case 5: the states of some ranks are not known.
        is_known_for_all = states is not None and None not in states
        if not is_known_for_all:
            return "; dropout's random state restarts from the seed"

        # Case 6: each rank has a state of its own, and there are as many ranks as before.
        seeding.set_rng_state(copy_to_memory(states[topology.rank]), self._collectives.device)
        return ""

    def _training_drew_nothing(
        self, saved_states: Sequence[Mapping[str, Any] | None] | None
    ) -> bool:
        """Returns True if the training that was saved has drawn no random numbers on this rank.

        This run has just been seeded, in the same way as the saved one, and has trained nothing
        yet. So the saved run has drawn nothing if its random state equals the present one.

        Args:
            saved_states: the saved random states by rank; None if they are not known.
        """
        rank = self._collectives.topology.rank
        if saved_states is None or rank >= len(saved_states):
            return False
        saved = saved_states[rank]
        if saved is None:
            return False
        return rng_state_to_text(copy_to_memory(saved)) == self.to_text()
