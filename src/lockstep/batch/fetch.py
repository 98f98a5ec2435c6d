"""Reads the micro-batches of a map-style dataset.

The random augmentation of a sample depends only on the seed, the epoch and the index of the sample,
and not on the rank, the loader worker, the batch or where a run was resumed. To achieve this, the
random streams of torch, numpy and `random` are seeded before each sample is read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info

from lockstep.batch.indices import Indices
from lockstep.distributed.seeding import preserve_rng_state, seed_sample
from lockstep.errors import add_note_once
from lockstep.language import translate_sentences

MicroBatchKey = tuple[int, Indices]
"""Epoch, and the indices of the samples of one micro-batch."""


class Fetch(Dataset[Any]):
    """A dataset of micro-batches: indexed by a `MicroBatchKey`, it returns a collated batch.

    Args:
        dataset: the user's map-style dataset.
        collate: function that joins samples into a batch.
        seed: seed of the run.
        sample_rng: True to seed the random streams for each sample. False for a dataset that draws
            no random numbers: it is then read with its `__getitems__`, if it has this method.
    """

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[Any], Any], seed: int, sample_rng: bool
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self.sample_rng = sample_rng
        self.tensor_rows: TensorRows | None = None
        if collate is default_collate:
            self.tensor_rows = find_tensor_rows(dataset)

    def __getitem__(self, key: MicroBatchKey) -> Any:
        epoch, indices = key
        if self.tensor_rows is not None:  # a batch is a selection of rows
            return self.tensor_rows.select(indices)
        if not self.sample_rng:
            return self._read_without_seeding(indices.tolist())

        # In a worker the random streams are used for nothing else, so they need not be preserved.
        in_worker = get_worker_info() is not None
        random_state = nullcontext() if in_worker else preserve_rng_state()
        with random_state:
            samples = []
            for index in indices.tolist():
                seed_sample(self.seed, epoch, index)
                samples.append(self.dataset[index])
            return call_collate(self.collate, samples)

    def _read_without_seeding(self, indices: list[int]) -> Any:
        """Reads a batch of a dataset that draws no random numbers."""
        # With `__getitems__`, which torch's DataLoader uses too, a dataset reads several samples at
        # once.
        get_items = getattr(self.dataset, "__getitems__", None)
        if get_items:
            samples = get_items(indices)
        else:
            samples = [self.dataset[index] for index in indices]
        return call_collate(self.collate, samples)


class TensorRows(NamedTuple):
    """The tensors of a `TensorDataset`, or of a `Subset` of one.

    A batch is a selection of their rows, which is faster than reading and stacking samples.
    """

    tensors: tuple[Tensor, ...]
    row_of_sample: Indices | None
    """For each sample, its row in the tensors; None if sample i is row i."""

    def select(self, samples: Indices) -> list[Tensor]:
        """Returns the batch of the given samples: their rows of each tensor.

        Args:
            samples: indices in the dataset, of shape `(n,)`.
        """
        rows = samples if self.row_of_sample is None else self.row_of_sample[samples]
        try:
            return _select_rows(self.tensors, rows)
        except (IndexError, RuntimeError):  # raised by `index_select` for a negative index
            # A Subset may have such indices, which count from the end. That is rare, so it is not
            # checked beforehand.
            num_rows = len(self.tensors[0])
            rows_from_begin = np.where(rows < 0, rows + num_rows, rows)
            return _select_rows(self.tensors, rows_from_begin)


def find_tensor_rows(dataset: Dataset[Any]) -> TensorRows | None:
    """Returns the tensors of a TensorDataset on the CPU, or of a Subset of one; otherwise None.

    Datasets of a subclass are excluded, because they may augment samples.
    """
    if type(dataset) is Subset:
        inner = find_tensor_rows(dataset.dataset)
        if inner is None:
            return None

        # If the dataset inside is a TensorDataset, its sample i is row i. If it is a Subset as
        # well, its `row_of_sample` says which row each of its samples is.
        samples_of_inner = np.asarray(dataset.indices, dtype=np.int64)
        if inner.row_of_sample is None:
            rows = samples_of_inner
        else:
            rows = inner.row_of_sample[samples_of_inner]
        return TensorRows(inner.tensors, rows)

    if type(dataset) is TensorDataset:
        if all(tensor.device.type == "cpu" for tensor in dataset.tensors):
            return TensorRows(dataset.tensors, row_of_sample=None)

    return None


def _select_rows(tensors: tuple[Tensor, ...], rows: Indices) -> list[Tensor]:
    return [tensor.index_select(0, torch.from_numpy(rows)) for tensor in tensors]


def call_collate(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    """Calls a collate function, and adds a note to errors that may come from an empty batch.

    A collate function may leave out samples, such as broken images. If it leaves out all samples of
    a rank, it may fail because there is nothing to collate. On one device this is less likely, as
    the function gets the whole global batch. The note asks the user to return None in this case.
    """
    try:
        return collate(samples)
    except (IndexError, RuntimeError, ValueError) as error:
        if collate is not default_collate:  # torch's own leaves no samples out
            note = translate_sentences(
                f"the collate function was given {len(samples)} of the samples of a global batch.",
                "If it leaves samples out and none of these was left, let it return None: this "
                "rank then takes part without samples.",
            )
            add_note_once(error, "collated part", note)
        raise
