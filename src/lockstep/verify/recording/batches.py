"""Batches that a training loop is handed: what is in them, and which update they belong to.

A batch is recorded as a `Batch`: a digest of each sample, and its *weights*, the counts that a loss
may be averaged over, such as samples, labels, or tokens that are no padding.
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
    dense = [t for t in tensors(batch) if t.layout == torch.strided and t.dim()]
    on_cpu = [t.detach().cpu() for t in dense]
    if count is None:
        count = len(on_cpu[0]) if on_cpu else 0
    # Tensors with one row for each sample.
    rows = [t for t in on_cpu if len(t) == count]
    shape = "; ".join(f"{t.dtype} {list(t.shape[1:])}" for t in rows)
    contents = _sample_digests(rows, count)
    return Batch(contents=contents, shape=shape, weights=_weights(rows, count), **fields)


def _sample_digests(rows: Sequence[Tensor], count: int) -> list[str]:
    """Returns for each sample the digests of its rows in all tensors, with a dot in between.

    Args:
        rows: tensors with one row for each sample.
        count: number of samples.
    """
    if not rows:
        return []
    row_bytes = []
    for tensor in rows:
        if tensor.numel():
            row_bytes.append(tensor.reshape(count, -1).contiguous().view(torch.uint8).numpy())
    samples = []
    for number in range(count):
        digests = []
        for values in row_bytes:
            digests.append(hashlib.blake2b(values[number].tobytes(), digest_size=6).hexdigest())
        samples.append(".".join(digests))
    return samples


def _weights(rows: Sequence[Tensor], count: int) -> dict[str, float]:
    """Returns the counts that a loss may be averaged over, by description.

    Whole numbers may be labels or tokens. Those are counted that are not ignored, that are not
    zero, and that are no padding, which is the value at the end of most rows. Each is also counted
    without the first column, which the loss of a language model leaves out. Zeros and ones may be a
    mask: the ones are counted.
    """
    weights = {"samples": float(count)}
    by_name = {}
    without_first_column = {}
    for number, tensor in enumerate(rows):
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
            labels = tensor[tensor != IGNORE_INDEX]
        weights[f"labels in {name}"] = float(labels.numel())
        weights[f"non-zero values in {name}"] = float(labels.count_nonzero())
        if tensor.dim() == 2 and tensor.numel():
            # The most frequent value in the last column.
            padding = int(tensor[:, -1].long().mode().values)
            weights[f"values but {padding} in {name}"] = float((tensor != padding).sum())
    return weights


class UnusedBatches:
    """Batches of torch's DataLoaders that no model was called with so far.

    A batch is *recognized* if a model is called with what was made of it. The unused batches of a
    loader whose batches are recognized belong to a later update: they were fetched ahead. Nothing
    is known of other loaders' batches, so those count as used.
    """

    def __init__(self) -> None:
        self._last_number = 0
        self._unused: dict[int, Batch] = {}
        self._recognized_loaders: set[int] = set()
        self._never_trained: list[Batch] = []
        """Batches of an earlier epoch than that of the batch used after them: the script read the
        loader only to look at a batch."""

    def add(self, batch: Any, record: Batch) -> None:
        """Numbers and marks a batch that is handed out."""
        self._last_number += 1
        mark(batch, batch=self._last_number)
        self._unused[self._last_number] = record

    def use(self, number: int) -> None:
        """Notes that a model is called with this batch.

        Earlier batches of the same loader are used as well, or are never trained.
        """
        used = self._unused.get(number)
        if used is None:  # it was used before, or was made from no loader's batch (number 0)
            return
        self._recognized_loaders.add(used.loader)
        for other_number, record in list(self._unused.items()):
            if other_number > number or record.loader != used.loader:
                continue
            if record.epoch < used.epoch:
                self._never_trained.append(record)
            del self._unused[other_number]

    def end_update(self) -> tuple[list[Batch], list[Batch]]:
        """Forgets the batches of the update that ends.

        Returns:
            The batches that were fetched ahead, and those that were never trained.
        """
        fetched_ahead = {}
        for number, record in self._unused.items():
            if record.loader in self._recognized_loaders:
                fetched_ahead[number] = record
        never_trained = self._never_trained
        self._unused = fetched_ahead
        self._never_trained = []
        return list(fetched_ahead.values()), never_trained
