"""Reads the samples of a micro-batch, each with random streams of its own.

A sample's augmentation is drawn from (seed, epoch, index) and from nothing else: not the rank, the
loader worker, the batch it came in, or the point at which a run was resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info

from lockstep.data.global_batch import Indices
from lockstep.runtime.seeding import kept_random_state, seed_sample

Key = tuple[int, Indices]
"""Epoch and sample indices of one micro-batch."""


class Fetch(Dataset[Any]):
    """A dataset of micro-batches: indexed by a `Key`, returns the collated batch.

    Args:
        dataset: map-style.
        collate: joins samples into a batch.
        seed: of the run.
        sample_rng: False leaves the random streams alone and reads with the dataset's own
            `__getitems__` where it has one: for datasets that draw no random numbers.
    """

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[Any], Any], seed: int, sample_rng: bool
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self.sample_rng = sample_rng
        self.tensors = _tensors(dataset) if collate is default_collate else None

    def __getitem__(self, key: Key) -> Any:
        epoch, indices = key
        if self.tensors is not None:  # rows of tensors: nothing is drawn, nothing to stack
            tensors, subset = self.tensors
            rows = indices if subset is None else subset[indices]
            try:
                return _select(tensors, rows)
            except (IndexError, RuntimeError):  # some are counted from the end
                return _select(tensors, np.where(rows < 0, rows + len(tensors[0]), rows))
        if not self.sample_rng:
            return self.collate(self._read_at_once(indices.tolist()))
        if get_worker_info() is not None:
            return self._read_each(epoch, indices)
        with kept_random_state():
            return self._read_each(epoch, indices)

    def _read_each(self, epoch: int, indices: Indices) -> Any:
        samples = []
        for index in indices.tolist():
            seed_sample(self.seed, epoch, index)
            samples.append(self.dataset[index])
        return self.collate(samples)

    def _read_at_once(self, indices: list[int]) -> list[Any]:
        read = getattr(self.dataset, "__getitems__", None)
        return read(indices) if read else [self.dataset[index] for index in indices]


def _select(tensors: tuple[torch.Tensor, ...], rows: Indices) -> list[torch.Tensor]:
    return [tensor.index_select(0, torch.from_numpy(rows)) for tensor in tensors]


def as_it_is(item: Any) -> Any:
    """For a DataLoader whose dataset gives what is wanted: nothing is collated or converted."""
    return item


def _tensors(dataset: Dataset[Any]) -> tuple[tuple[torch.Tensor, ...], Indices | None] | None:
    """The tensors, and the row of each sample, of a TensorDataset or a Subset of one.

    Only the exact classes: a subclass may augment. Tensors that are not on the CPU are left to
    the general way.
    """
    if type(dataset) is Subset:
        inner = _tensors(dataset.dataset)
        if inner is None:
            return None
        rows = np.asarray(dataset.indices, dtype=np.int64)
        return inner[0], rows if inner[1] is None else inner[1][rows]
    if type(dataset) is TensorDataset and all(t.device.type == "cpu" for t in dataset.tensors):
        return dataset.tensors, None
    return None
