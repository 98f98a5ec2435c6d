"""Batches that a training loop is handed: what is in them, and which update they belong to.

A batch is a nest (tuples, lists, dictionaries) of tensors, each with one row for each sample. It is
recorded as a `Batch`: a digest of each sample, and its *weights*, the counts that a loss may be
averaged over, such as samples, labels, or tokens that are no padding. The samples of an optimizer
step are those of the batches since the step before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.batch.pytree import tensors
from lockstep.verify.recording.loss_calls import IGNORE_INDEX
from lockstep.verify.recording.marks import mark
from lockstep.verify.training_record import Batch


def describe_batch(batch: Any, count: int | None = None, **fields: Any) -> Batch:
    """Returns the record of a batch.

    Args:
        batch: a nest of tensors, each with one row for each sample.
        count: number of samples; None: the rows of the first tensor.
        **fields: further fields of the record, such as `epoch`.
    """
    # Sparse tensors and single numbers have no rows.
    with_rows = [t for t in tensors(batch) if t.layout == torch.strided and t.dim() > 0]
    on_cpu = [t.detach().cpu() for t in with_rows]
    if count is None:
        count = len(on_cpu[0]) if on_cpu else 0

    sample_tensors = [t for t in on_cpu if len(t) == count]
    # The shape of a sample, such as "torch.float32 [3, 32, 32]; torch.int64 []".
    shape = "; ".join(f"{t.dtype} {list(t.shape[1:])}" for t in sample_tensors)
    contents = _sample_digests(sample_tensors, count)
    weights = _weights(sample_tensors, count)

    return Batch(contents=contents, shape=shape, weights=weights, **fields)


def _sample_digests(sample_tensors: Sequence[Tensor], count: int) -> list[str]:
    """Returns for each sample the digests of its rows in all tensors, with a dot in between.

    Args:
        sample_tensors: tensors with one row for each sample.
        count: number of samples.
    """
    if not sample_tensors:
        return []

    tables = []  # for each tensor, an array of shape (samples, bytes of a sample)
    for tensor in sample_tensors:
        if tensor.numel():
            tables.append(tensor.reshape(count, -1).contiguous().view(torch.uint8).numpy())

    samples = []
    for number in range(count):
        digests = []
        for table in tables:
            digests.append(hashlib.blake2b(table[number].tobytes(), digest_size=6).hexdigest())
        samples.append(".".join(digests))

    return samples


def _weights(sample_tensors: Sequence[Tensor], count: int) -> dict[str, float]:
    """Returns the counts that a loss may be averaged over, by description.

    Whole numbers may be labels or tokens. Three of their numbers are returned: how many are not
    ignored (-100), how many are not zero, and how many are no padding. Padding is the value at the
    end of most rows. Each tensor is counted a second time without its first column, since the loss
    of a language model leaves that out. A tensor of zeros and ones may be a mask: its ones are
    counted.

    For example {"samples": 2, "labels in tensor 0": 7, "values but 0 in tensor 0": 5, ...}.
    """
    weights = {"samples": float(count)}
    by_name = {}
    without_first_column = {}
    for number, tensor in enumerate(sample_tensors):
        name = f"tensor {number}"
        by_name[name] = tensor
        if tensor.dim() > 1 and tensor.shape[1] > 1:
            without_first_column[f"{name} without its first column"] = tensor[:, 1:]

    for name, tensor in (by_name | without_first_column).items():
        if tensor.is_complex() or tensor.is_floating_point():
            # Of such values only a mask says what a loss may be averaged over.
            is_mask = bool(((tensor == 0) | (tensor == 1)).all())
            if is_mask and tensor.dim() > 1:
                weights[f"ones in {name}"] = float(tensor.sum())
            continue

        labels = tensor
        if tensor.dtype != torch.bool:
            labels = tensor[tensor != IGNORE_INDEX]  # -100, which torch's losses leave out

        weights[f"labels in {name}"] = float(labels.numel())
        weights[f"non-zero values in {name}"] = float(labels.count_nonzero())

        if tensor.dim() == 2 and tensor.numel():
            # The most frequent value in the last column.
            padding = int(tensor[:, -1].long().mode().values)
            weights[f"values but {padding} in {name}"] = float((tensor != padding).sum())

    return weights


class UnusedBatches:
    """Batches of torch's DataLoaders that no model was called with so far.

    A batch is *recognized* if a model is called with what was made of it. If batches of a loader
    are recognized, its unused ones were fetched ahead: they belong to a later optimizer step.
    Nothing is known of other loaders' batches, so those count as used.
    """

    def __init__(self) -> None:
        self._last_number = 0
        self._unused: dict[int, Batch] = {}
        """By the number of the batch, from 1."""
        self._recognized_loaders: set[int] = set()
        """The numbers of the loaders whose batches are recognized."""
        self._never_trained: list[Batch] = []
        """Batches of an earlier epoch than that of the batch used after them: the script read the
        loader only to look at a batch."""

    def add(self, batch: Any, record: Batch) -> None:
        """Adds a batch that is handed out, and marks its tensors with its number.

        What the script computes from these tensors carries the mark too, so `use` can be called
        with the number when a model is called.
        """
        self._last_number += 1
        mark(batch, batch=self._last_number)
        self._unused[self._last_number] = record

    def use(self, number: int) -> None:
        """Notes that a model is called with what was made of this batch.

        The batch is then no longer unused. Earlier batches of the same loader count as used in the
        same step. Those of an earlier epoch were never trained: the script only looked at them.
        """
        used = self._unused.get(number)
        if used is None:  # it was used before, or was made from no loader's batch (number 0)
            return

        self._recognized_loaders.add(used.loader)

        for other_number, record in list(self._unused.items()):  # a copy, since some are deleted
            if other_number > number or record.loader != used.loader:
                continue
            if record.epoch < used.epoch:
                self._never_trained.append(record)
            del self._unused[other_number]

    def end_update(self) -> tuple[list[Batch], list[Batch]]:
        """Forgets all batches except those that were fetched ahead for a later optimizer step.

        Returns:
            The batches that were fetched ahead, and those that were never trained.
        """
        fetched_ahead = {}
        for number, record in self._unused.items():
            # A model may be called with something that cannot be followed back to a batch. So an
            # unused batch counts as used if no batch of its loader was ever recognized.
            if record.loader in self._recognized_loaders:
                fetched_ahead[number] = record

        never_trained = self._never_trained
        self._unused = fetched_ahead
        self._never_trained = []

        return list(fetched_ahead.values()), never_trained
