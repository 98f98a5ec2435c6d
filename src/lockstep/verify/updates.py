"""What a training did, update by update, on every rank: what `lockstep verify` compares.

An update is one step of one optimizer. All values are plain: numbers, text and numpy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A batch that a training loop was handed."""

    loader: int
    """Which of the script's loaders, in the order of their first use."""
    epoch: int
    ids: tuple[int, ...] | None
    """Indices in the dataset; None: nobody knows them, as of a stream."""
    contents: tuple[str, ...]
    """Of each sample the digests of its tensors, with a dot between them; empty where the batch
    could not be taken apart."""
    shape: str
    """Of the samples; digests are comparable where it is the same."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """What the batch may weigh: its samples, and what is not padding in each of its tensors."""
    drew: bool = False
    """Random numbers were drawn, in this process, while it was read."""
    stream: str = ""
    """A digest of what was drawn."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of the script's that matters for the gradients."""

    name: str
    line: str
    of_graph: bool = False
    """Its input carries a gradient."""
    of_gradient: bool = False
    """Its input is the gradient of a parameter."""


@dataclass(frozen=True, kw_only=True)
class RankUpdate:
    """An update on one rank."""

    optimizer: int
    """Which of the script's optimizers, in the order of their first steps."""
    step: int
    """Which of its steps, from 0."""
    rates: tuple[float, ...]
    """The learning rate of each parameter group."""
    taken: tuple[Taken, ...]
    """What was handed out since the update before."""
    losses: tuple[float, ...]
    """What backward passes were made of, weighted, since the update before."""
    counts: bool
    """Whether this rank's losses count: under a pipeline those of the other ranks do not."""
    calls: tuple[Call, ...]
    drew: bool
    """Random numbers were drawn between the last batch and the step."""
    draw_line: str
    past_wrapper: str
    """The line of a training forward pass around DDP; empty: there was none."""
    not_averaged: tuple[str, ...]
    """Parameters to train that DDP does not know."""
    statistics: tuple[str, ...]
    """BatchNorm layers that took statistics of what this rank alone has."""
    before: Mapping[str, Array]
    """Parameters before the first update; empty at later ones."""
    held: Mapping[str, str]
    """A digest of each parameter before the update, of those that are whole on this rank."""
    gradients: Mapping[str, Array]
    """As the optimizer found them."""
    local: tuple[Mapping[str, Array], ...]
    """As each backward pass of this rank left them, before they were averaged; may be empty."""
    parameters: Mapping[str, Array]
    """After the update: those that the optimizer holds."""
    buffers: Mapping[str, Array]
    """After the update."""


Update = Sequence[RankUpdate]
"""One update on all ranks."""


def merged(update: Update, what: str) -> dict[str, Any]:
    """The arrays of all ranks, by name; of what several have, that of the lowest rank."""
    found: dict[str, Any] = {}
    for rank in reversed(update):
        found.update(getattr(rank, what))
    return found


def losses_of(update: Update) -> list[float]:
    """Of each rank that has any, the sum of its losses."""
    return [sum(rank.losses) for rank in update if rank.counts and rank.losses]


def loss_of(update: Update) -> float | None:
    """The mean over ranks of the sums of their losses; None: no rank had one."""
    sums = losses_of(update)
    return sum(sums) / len(sums) if sums else None


def backward_passes(update: Update) -> int:
    """On the rank that made the most."""
    return max((len(rank.losses) for rank in update), default=0)


Sample = tuple[int, int, int | str]
"""Loader, epoch, and the index or a digest of the content."""


def indices_of(update: Update) -> list[Sample] | None:
    """All samples of the update in the order of ranks; None: some have no known index."""
    batches = _batches(update)
    if any(taken.ids is None for taken in batches):
        return None
    return [(taken.loader, taken.epoch, sample) for taken in batches for sample in taken.ids or ()]


def contents_of(update: Update) -> list[Sample] | None:
    """The same by their content; None: it cannot be told, or is drawn anew by every process."""
    batches = _batches(update)
    if any(t.drew or (t.ids is not None and len(t.ids) != len(t.contents)) for t in batches):
        return None
    return [(taken.loader, taken.epoch, sample) for taken in batches for sample in taken.contents]


def count_of(update: Update) -> int:
    """Samples of the update."""
    return sum(len(taken.ids or taken.contents) for taken in _batches(update))


def shapes_of(update: Update) -> set[str]:
    """Of its samples."""
    return {taken.shape for taken in _batches(update) if taken.contents}


def _batches(update: Update) -> list[Taken]:
    return [taken for rank in update if rank.counts for taken in rank.taken]


def scale_of(arrays: Mapping[str, Array]) -> float:
    """The largest absolute value of all."""
    return max(map(largest, arrays.values()), default=0.0)


def largest(array: Array) -> float:
    """Its largest absolute value; 0 where it is empty."""
    return float(np.abs(array).max()) if array.size else 0.0
