"""Watches what this process reads through DataLoaders that were not prepared.

Each rank reads all samples of such a loader. This is right if one rank evaluates, or if every rank
keeps its own result. It is a mistake if results are summed over the ranks, or if a prepared loader
divides the same dataset. So each pass over such a loader gets a checksum over some numbers of its
samples, by which ranks can tell whether they have read the same samples in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler

from lockstep.batch.pytree import tensors
from lockstep.torch_compat import END_OF_PASS, watch_data_loaders

NUMBERS_OF_SAMPLE = 16
"""About how many numbers of a sample go into the checksum, for each tensor."""
MAX_TENSORS = 8
"""The largest number of tensors of a batch that go into the checksum."""
CHECKSUM_MASK = 2**62 - 1
_INTEGER_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""The dtype as which the bits of a number are added up, by its size in bytes."""


class ReadPass(NamedTuple):
    """A pass over an unprepared DataLoader. Two are equal if the same samples were read."""

    samples: int
    checksum: int


class UnpreparedLoaders:
    """Watches the batches that torch's DataLoaders deliver to this process.

    Args:
        ended: function that is called with each pass that was read to its end.
    """

    def __init__(self, ended: Callable[[ReadPass], None]) -> None:
        self._ended = ended
        self._open_passes: WeakKeyDictionary[Any, ReadPass] = WeakKeyDictionary()
        """What each iterator has delivered so far."""
        self.dataset_in_use: Any = None
        """The dataset of the latest batch, until the pass ends. It is also None if a sampler of the
        user may have chosen a part of the dataset for this rank."""
        self.release = watch_data_loaders(self._delivered)

    def _delivered(self, iterator: Any, dataset: Any, sampler: Any, batch: Any) -> None:
        """Adds a batch to the pass that it belongs to, or reports the end of that pass.

        Args:
            iterator: iterator over the DataLoader; there is one for each pass.
            dataset: dataset of the DataLoader.
            sampler: sampler of the DataLoader.
            batch: the batch that the iterator returned; `END_OF_PASS` at the end.
        """
        # Prepared loaders use a DataLoader as well, over one of Lockstep's datasets.
        if type(dataset).__module__.startswith("lockstep."):
            return

        if batch is END_OF_PASS:
            self.dataset_in_use = None
            ended_pass = self._open_passes.pop(iterator, None)
            # A pass is not reported if its samples could not be counted.
            if ended_pass is not None and ended_pass.samples:
                self._ended(ended_pass)
            return

        self._remember_dataset_in_use(dataset, sampler)

        # Add the batch to what the pass has read before.
        read_before = self._open_passes.get(iterator, ReadPass(samples=0, checksum=0))
        read_now = count_and_checksum(batch)
        self._open_passes[iterator] = ReadPass(
            samples=read_before.samples + read_now.samples,
            checksum=(read_before.checksum + read_now.checksum) & CHECKSUM_MASK,
        )

    def _remember_dataset_in_use(self, dataset: Any, sampler: Any) -> None:
        """Sets `dataset_in_use`, for a check before the backward pass.

        If the user's loop trains on a dataset that it reads as a whole, that is most likely a
        mistake, since every rank reads the same samples; the check warns of this. With a sampler of
        the user's, this rank may read only its part of the dataset, which is no mistake.
        """
        reads_whole_dataset = type(sampler) in (SequentialSampler, RandomSampler)
        self.dataset_in_use = dataset if reads_whole_dataset else None


def count_and_checksum(batch: Any) -> ReadPass:
    """Counts the samples of a batch, and sums the bits of some of their numbers.

    Only dense tensors on the CPU are used. The number of samples is the length of the first one, or
    0 if there is none.

    Returns:
        A `ReadPass` with the number of samples and the sum of this batch. Adding those of all
        batches gives the `ReadPass` of the pass.
    """
    chosen_tensors = [tensor for tensor in tensors(batch) if _can_be_summed(tensor)][:MAX_TENSORS]
    if not chosen_tensors:
        return ReadPass(samples=0, checksum=0)

    total = 0
    for tensor in chosen_tensors:
        rows = tensor.detach().reshape(len(tensor), -1)  # (samples, numbers)
        stride = max(1, rows.shape[1] // NUMBERS_OF_SAMPLE)
        numbers = rows[:, ::stride].contiguous()  # a few numbers of each sample

        # The bits of each number are read as an integer of the same size, because a sum of integers
        # does not depend on the order, unlike a sum of floating-point numbers.
        bits = numbers.view(_INTEGER_DTYPES[numbers.itemsize])
        total += int(bits.sum(dtype=torch.int64))

    return ReadPass(samples=len(chosen_tensors[0]), checksum=total & CHECKSUM_MASK)


def _can_be_summed(tensor: Tensor) -> bool:
    """Returns True for a dense tensor on the CPU that has elements."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    if tensor.device.type != "cpu" or tensor.itemsize not in _INTEGER_DTYPES:
        return False
    return tensor.dim() > 0 and tensor.numel() > 0
