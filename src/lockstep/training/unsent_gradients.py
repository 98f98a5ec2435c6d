"""Saves and loads the parts of gradients that compression has not sent yet, for checkpoints.

What compression loses of a gradient (`DDP(compress=...)`) stays on its rank, and is sent with the
next gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from lockstep.communication.compressed_means import CompressedMeans
from lockstep.errors import warn
from lockstep.strategies.base import PreparedModule


def unsent_gradients(modules: Iterable[PreparedModule]) -> dict[str, Tensor]:
    """Returns the part of this rank's gradients that compression has not sent yet.

    Args:
        modules: all prepared modules.
    """
    unsent: dict[str, Tensor] = {}
    for number, compressed in enumerate(_compressed_means(modules)):
        for name, tensor in compressed.state_dict().items():
            unsent[f"{number}.{name}"] = tensor
    return unsent


def load_unsent_gradients(
    modules: Iterable[PreparedModule], rank: int, unsent_by_rank: dict[int, dict[str, Tensor]]
) -> None:
    """Loads the parts of gradients that compression had not sent yet when it was saved.

    Warns if they do not fit this run, which may have other ranks or another compression.

    Args:
        modules: all prepared modules.
        rank: the number of this process.
        unsent_by_rank: what `unsent_gradients` returned on each rank.
    """
    everything_fits = True
    for number, compressed in enumerate(_compressed_means(modules)):
        state_by_rank = _unsent_of_module(unsent_by_rank, number)

        # A rank continues with its own state. Those of all ranks are needed if their number has
        # changed: some kinds of compression can divide them anew.
        own_state = state_by_rank.get(rank, {})
        states_of_all_ranks = list(state_by_rank.values())
        fits = compressed.load_state_dict(own_state, states_of_all_ranks)
        if not fits:  # then nothing of it was loaded
            everything_fits = False

    if unsent_by_rank and not everything_fits:
        warn(
            "resuming with DDP(compress=...)",
            found="the checkpoint is of a run with other ranks or machines, or another "
            "compression: what they had left to send, a part of one gradient, does not fit",
            do="nothing; this run begins without it",
        )


def _compressed_means(modules: Iterable[PreparedModule]) -> Iterator[CompressedMeans]:
    """Yields the compressor of each prepared module whose gradients are compressed."""
    for wrapped in modules:
        if wrapped.compressed is not None:
            yield wrapped.compressed


def _unsent_of_module(
    unsent_by_rank: dict[int, dict[str, Tensor]], module_number: int
) -> dict[int, dict[str, Tensor]]:
    """Returns the unsent tensors of one module, by rank and name.

    In `unsent_by_rank` their names begin with the module's number, such as "0.fc.weight". The
    result has "fc.weight".
    """
    prefix = f"{module_number}."
    unsent_of_module: dict[int, dict[str, Tensor]] = {}
    for rank, unsent in unsent_by_rank.items():
        unsent_of_module[rank] = {}
        for name, tensor in unsent.items():
            if name.startswith(prefix):
                unsent_of_module[rank][name.removeprefix(prefix)] = tensor
    return unsent_of_module
