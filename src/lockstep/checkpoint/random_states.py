"""The random states of a checkpoint: what is saved of them, and what a resumed run restores.

A *stream* is the state of the random generators of torch, of the GPU, of numpy and of Python's
`random`. Every rank has a stream of its own, which is saved, and restored if the run has as many
ranks. With virtual ranks, what is drawn outside of the training loop comes from a *common* stream,
which is the same on all ranks, and what is drawn inside is seeded anew in every step. So the common
stream alone is saved, even inside of the training loop, and it is restored on any number of ranks.
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
    """What a checkpoint needs of `lockstep.training.virtual_rank_streams.VirtualRankStreams`."""

    @property
    def common(self) -> dict[str, Any]:
        """The state of the common stream, as `seeding.rng_state` returns it."""

    def set_common(self, state: dict[str, Any]) -> None:
        """Sets the common stream to a state that `common` has returned."""


class RandomStates:
    """The random states of a run, for its checkpoints.

    Args:
        collectives: the collectives of the run.
        common_stream: the common stream of the run; None: every rank has a stream of its own.
    """

    def __init__(self, collectives: Collectives, common_stream: CommonStream | None) -> None:
        self._collectives = collectives
        self._common_stream = common_stream
        self._warned_of_difference = False

    @property
    def is_common(self) -> bool:
        """True if there is one stream for all ranks."""
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
        """Warns once if the common stream is not the same on all ranks. The first one is saved.

        Args:
            states_of_ranks: what `to_text` returned on each rank.
        """
        if self._common_stream is None or self._warned_of_difference:
            return
        differing = []
        for rank, state in enumerate(states_of_ranks):
            if state != states_of_ranks[0]:
                differing.append(rank)
        if not differing:
            return
        self._warned_of_difference = True
        warn(
            "random numbers outside of the training loop, with virtual_ranks",
            f"{format_ranks(differing)} and rank 0 have not drawn the same ones, so bits are not "
            "promised",
            "draw them on all ranks, and not under `if world.is_main`; or from a generator of the "
            "script's own",
        )

    def restore(self, saved: Mapping[str, Any]) -> str:
        """Restores the random state of this rank, if the checkpoint has it.

        Args:
            saved: the states of the checkpoint by name, with its `manifest`.

        Returns:
            "" if it was restored. Otherwise the end of a sentence that says why not.
        """
        manifest = saved["manifest"]
        states = saved["random"]
        if self._common_stream is not None and states is not None:
            # With virtual ranks the checkpoint has the common stream alone. Without them it has a
            # stream for each rank, and the first one is taken: the common stream goes on as that
            # of a run on one process.
            # Of a step in memory, the states of ranks on a lost machine are not known.
            known_states = [state for state in states if state is not None]
            self._common_stream.set_common(copy_to_memory(known_states[0]))
            return ""
        if manifest.get("virtual_ranks") is not None:
            return "; saved with virtual ranks: dropout's random state restarts from the seed"
        topology = self._collectives.topology
        world_size = manifest["world_size"]
        if world_size != topology.size:
            return (
                f"; saved by {count_noun(world_size, 'process')}, resumed on {topology.size}: "
                "dropout's random state restarts from the seed"
            )
        # Of a step in memory, only the states of ranks on a lost machine are not known.
        is_known_for_all = states is not None and None not in states
        if not is_known_for_all:
            return "; dropout's random state restarts from the seed"
        seeding.set_rng_state(copy_to_memory(states[topology.rank]), self._collectives.device)
        return ""
