"""Describes the batches that a script trains on, and decides which step they belong to.

A batch is a nest (tuples, lists, dictionaries) of tensors, each with one row for each sample. A
`Batch` record holds a digest of each sample, and *weights*: the counts that a loss may be averaged
over, such as the number of samples, of labels, or of tokens without padding. A step was trained on
the batches that were handed out since the step before, except for those that were fetched ahead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.verify.recording.loss_calls import IGNORE_INDEX
from lockstep.verify.recording.marks import mark
from lockstep.verify.recording.tensor_values import (
    tensors_with_any_rows,
    without_tensors_of_single_samples,
)
from lockstep.verify.training_record import Batch


def describe_batch(
    batch: Any, num_samples: int | None = None, *, ids: Sequence[int] | None = None, **fields: Any
) -> Batch:
    """Builds the record of a batch: digests, shape and weights of its samples.

    Args:
        batch: nest of tensors, each with one row for each sample.
        num_samples: number of samples in the batch. By default, the number of rows of the first
            tensor, or of images in a list of single images.
        ids: indices of the samples in the dataset; None or empty if they are not known.
        **fields: further fields of the record, such as `epoch`.
    """
    num_images = _num_images_in_list(num_samples, ids)
    all_tensors = tensors_with_any_rows(batch, num_images)
    if num_samples is None:
        # Not the number of indices: a `collate_fn` may make several rows of each index.
        num_samples = len(all_tensors[0]) if all_tensors else 0

    # Tensors with another number of rows say nothing about single samples, and are left out. So are
    # tensors of a single sample, such as the boxes in one image.
    sample_tensors = []
    for tensor in without_tensors_of_single_samples(all_tensors, batch, num_samples):
        if len(tensor) == num_samples:
            sample_tensors.append(tensor.detach().cpu())

    # The shape of one sample, such as "torch.float32 [3, 32, 32]; torch.int64 []". It is empty only
    # if no tensor has rows at all.
    tensors_to_describe = sample_tensors or all_tensors
    shape = "; ".join(f"{t.dtype} {list(t.shape[1:])}" for t in tensors_to_describe)

    contents = _sample_digests(sample_tensors, num_samples)
    weights = _weights(sample_tensors, num_samples)
    return Batch(contents=contents, shape=shape, weights=weights, ids=ids, **fields)


def _num_images_in_list(num_samples: int | None, ids: Sequence[int] | None) -> int | None:
    """Returns how many images a batch has, if it begins with a list of single images.

    There is one for each sample, such as 2 in `([image, image], labels)` with the indices 7 and 3.
    None if neither the number of samples nor their indices are known.
    """
    if num_samples is not None:
        return num_samples
    return len(ids) if ids else None


def _sample_digests(sample_tensors: Sequence[Tensor], num_samples: int) -> list[str]:
    """Returns one text for each sample: the digests of its row in each tensor, joined by dots.

    Args:
        sample_tensors: tensors with one row for each sample.
        num_samples: number of samples in the batch.
    """
    if not sample_tensors:
        return []

    # Each tensor as bytes. Four float32 numbers for each of 2 samples become shape (2, 16).
    byte_tables = []
    for tensor in sample_tensors:
        if tensor.numel() == 0:  # it tells nothing about the samples
            continue
        numbers = tensor.reshape(num_samples, -1).contiguous()
        bytes_of_samples = numbers.view(torch.uint8)
        byte_tables.append(bytes_of_samples.numpy())

    digests_of_samples = []
    for sample in range(num_samples):
        digests = []
        for table in byte_tables:
            digests.append(hashlib.blake2b(table[sample].tobytes(), digest_size=6).hexdigest())
        digests_of_samples.append(".".join(digests))

    return digests_of_samples


def _weights(sample_tensors: Sequence[Tensor], num_samples: int) -> dict[str, float]:
    """Returns the counts that a loss over this batch may be averaged over, by description.

    For example `{"samples": 2, "labels in tensor 0": 7, "values but 0 in tensor 0": 5}`. The last
    of these is the number of values other than the padding 0. Each tensor is also counted without
    its first column, because the loss of a language model leaves that column out. These counts come
    last, because the first count that explains a difference is the one that is reported.
    """
    whole_tensors = {}
    without_first_column = {}
    for number, tensor in enumerate(sample_tensors):
        name = f"tensor {number}"
        whole_tensors[name] = tensor
        if tensor.dim() > 1 and tensor.shape[1] > 1:
            without_first_column[f"{name} without its first column"] = tensor[:, 1:]

    weights = {"samples": float(num_samples)}
    for name, tensor in (whole_tensors | without_first_column).items():
        if tensor.is_complex() or tensor.is_floating_point():
            weights |= _ones_in_mask(name, tensor)  # empty unless the tensor is a mask
        else:
            weights |= _counts_of_labels(name, tensor)

    return weights


def _ones_in_mask(name: str, tensor: Tensor) -> dict[str, float]:
    """Counts the ones in a floating-point mask: a tensor that holds only zeros and ones.

    Other floating-point values do not tell what a loss may be averaged over, so the result is
    empty for them.
    """
    is_mask = bool(((tensor == 0) | (tensor == 1)).all())
    if is_mask and tensor.dim() > 1:
        return {f"ones in {name}": float(tensor.sum())}
    return {}


def _counts_of_labels(name: str, tensor: Tensor) -> dict[str, float]:
    """Counts the values of an integer or boolean tensor, which may hold labels or tokens.

    Returns:
        The number of labels that are not ignored, and of labels that are not zero. For a tensor
        with rows and columns, such as tokens, also the number of values that are not padding.
    """
    # Torch's losses ignore the label -100. A boolean tensor has no such value.
    labels = tensor
    if tensor.dtype != torch.bool:
        labels = tensor[tensor != IGNORE_INDEX]

    counts = {
        f"labels in {name}": float(labels.numel()),
        f"non-zero values in {name}": float(labels.count_nonzero()),
    }

    if tensor.dim() == 2 and tensor.numel():
        counts |= _count_without_padding(name, tensor)

    return counts


def _count_without_padding(name: str, rows_of_tokens: Tensor) -> dict[str, float]:
    """Counts the values that are not padding: {"values but 0 in tensor 0": 5}.

    Texts of different lengths are padded at their end. So if there is padding, it is the most
    frequent value in the last column.
    """
    padding = int(rows_of_tokens[:, -1].long().mode().values)
    num_other_values = float((rows_of_tokens != padding).sum())
    return {f"values but {padding} in {name}": num_other_values}


class UnusedBatches:
    """Keeps the batches of torch's DataLoaders that no model has been called with yet.

    A loop may fetch batches ahead, which belong to a later optimizer step. They can be told apart
    only for loaders whose batches are *recognized*: at least one of them was followed to the call
    of a model. Batches of other loaders always belong to the current step.
    """

    def __init__(self) -> None:
        self._last_number = 0
        self._not_seen_in_models: dict[int, Batch] = {}
        """Records of batches that no model was called with yet, by their number, from 1."""
        self._recognized_loaders: set[int] = set()
        """Numbers of the loaders whose batches were followed to the call of a model."""
        self._never_trained: list[Batch] = []
        """Batches of an epoch that was over before the first batch was trained on: the script
        only looked at them."""

    def add(self, batch: Any, record: Batch) -> None:
        """Adds a batch that a loader hands out, and marks its tensors with the number of the batch.

        Everything that the script computes from these tensors carries the mark too. When a model is
        called with a marked tensor, `mark_used` is called with that number.
        """
        self._last_number += 1
        mark(batch, batch=self._last_number)
        self._not_seen_in_models[self._last_number] = record

    def mark_used(self, batch_number: int) -> None:
        """Notes that a batch has reached a model, and what this says of the loader's earlier ones.

        Earlier batches of the same epoch belong to the same optimizer step. Those of an earlier
        epoch were never trained on: the script has only looked at them, for example to compute
        their mean.

        Args:
            batch_number: number of the batch; 0 if the tensor was made from no batch.
        """
        used_batch = self._not_seen_in_models.get(batch_number)
        if used_batch is None:  # it was used before, or the number is 0
            return

        self._recognized_loaders.add(used_batch.loader)

        # The used batch, and earlier ones of its loader. Batches are numbered in the order in which
        # loaders hand them out.
        numbers_up_to_used_batch = [
            number
            for number, batch in self._not_seen_in_models.items()
            if batch.loader == used_batch.loader and number <= batch_number
        ]
        for number in numbers_up_to_used_batch:
            batch = self._not_seen_in_models.pop(number)
            is_of_earlier_epoch = batch.epoch < used_batch.epoch
            if is_of_earlier_epoch:
                self._never_trained.append(batch)
            # The others stay in the record of the current step.

    def end_update(self) -> tuple[list[Batch], list[Batch]]:
        """Forgets the batches of the step that ends, but not those that were fetched ahead.

        Returns:
            The batches that were fetched ahead for a later step, and the batches that were never
            trained on.
        """
        # Batches of other loaders are all taken for batches of the step that ends, since they could
        # not be followed to the call of a model.
        fetched_ahead = {}
        for number, record in self._not_seen_in_models.items():
            model_calls_are_seen = record.loader in self._recognized_loaders
            if model_calls_are_seen:
                fetched_ahead[number] = record

        never_trained = self._never_trained
        self._not_seen_in_models = fetched_ahead
        self._never_trained = []

        return list(fetched_ahead.values()), never_trained
