"""Watches what this process reads through DataLoaders that were not prepared.

Each rank reads all samples of such a loader. That is right if one rank evaluates, or if every rank
keeps its own result. It is a mistake if the results are summed over the ranks, or if the dataset is
the one that a prepared loader divides. So that the ranks can tell whether they have read the same,
each pass over such a loader has a checksum over some numbers of its samples, which does not depend
on their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler

from lockstep.batch.pytree import tensors
from lockstep.distributed.torch_compat import END_OF_PASS, watch_data_loaders

NUMBERS_OF_SAMPLE = 16
"""About how many numbers of each tensor of a sample go into the checksum."""
MAX_TENSORS = 8
"""How many tensors of a batch go into the checksum."""
CHECKSUM_MASK = 2**62 - 1
_INTEGER_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""The dtype as which the bits of a number are added up, by its size in bytes."""


class ReadPass(NamedTuple):
    """A pass over an unprepared DataLoader. Two are equal if the same samples were read."""

    samples: int
    checksum: int


class UnpreparedLoaders:
    """Watches the batches that DataLoaders of torch deliver to this process.

    Args:
        ended: called with each pass that was read to its end.
    """

    def __init__(self, ended: Callable[[ReadPass], None]) -> None:
        self._ended = ended
        self._open_passes: WeakKeyDictionary[Any, ReadPass] = WeakKeyDictionary()
        """What each iterator has delivered so far."""
        self.dataset_in_use: Any = None
        """The dataset of the pass that has delivered the latest batch, until that pass ends. It is
        also None if a sampler of the user's may have chosen a part of it for this rank."""
        self.release = watch_data_loaders(self._delivered)

    def _delivered(self, iterator: Any, dataset: Any, sampler: Any, batch: Any) -> None:
        """Adds a batch to the pass that it belongs to, or reports the end of that pass.

        Args:
            iterator: of the DataLoader; there is one for each pass.
            dataset: of the DataLoader.
            sampler: of the DataLoader.
            batch: what the iterator has returned; `END_OF_PASS` if it has nothing more.
        """
        # A prepared loader reads with a DataLoader, too, over a dataset of Lockstep's.
        if type(dataset).__module__.startswith("lockstep."):
            return

        if batch is END_OF_PASS:
            self.dataset_in_use = None
            ended_pass = self._open_passes.pop(iterator, None)
            # A pass of which no sample could be counted is not reported.
            if ended_pass is not None and ended_pass.samples:
                self._ended(ended_pass)
            return

        # Any other sampler may have chosen a part of the dataset for this rank.
        reads_whole_dataset = type(sampler) in (SequentialSampler, RandomSampler)
        self.dataset_in_use = dataset if reads_whole_dataset else None
        read_before = self._open_passes.get(iterator, ReadPass(samples=0, checksum=0))
        read_now = checksum(batch)
        self._open_passes[iterator] = ReadPass(
            samples=read_before.samples + read_now.samples,
            checksum=(read_before.checksum + read_now.checksum) & CHECKSUM_MASK,
        )


def checksum(batch: Any) -> ReadPass:
    """Returns how many samples a batch has, and a sum over the bits of some of their numbers.

    Only dense tensors on the CPU are looked at. The number of samples is the length of the first of
    them, or 0 if there is none.
    """
    summed = [tensor for tensor in tensors(batch) if _can_be_summed(tensor)][:MAX_TENSORS]
    if not summed:
        return ReadPass(samples=0, checksum=0)

    total = 0
    for tensor in summed:
        rows = tensor.detach().reshape(len(tensor), -1)  # one for each sample
        stride = max(1, rows.shape[1] // NUMBERS_OF_SAMPLE)
        numbers = rows[:, ::stride].contiguous()  # of each sample a few
        # The bits of each number are added up as those of an integer of the same size. A sum of
        # integers does not depend on the order, while one of floating-point numbers does.
        bits = numbers.view(_INTEGER_DTYPES[numbers.itemsize])
        total += int(bits.sum(dtype=torch.int64))

    return ReadPass(samples=len(summed[0]), checksum=total & CHECKSUM_MASK)


def _can_be_summed(tensor: Tensor) -> bool:
    """Returns True for a dense tensor on the CPU that has elements."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    if tensor.device.type != "cpu" or tensor.itemsize not in _INTEGER_DTYPES:
        return False
    return tensor.dim() > 0 and tensor.numel() > 0
