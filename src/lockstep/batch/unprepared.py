"""What this process reads through DataLoaders that were not prepared.

Each rank reads all of the samples of such a loader. That is right where one rank evaluates, or
where every rank keeps its own result; it is a mistake where the results are summed over the ranks,
or where the dataset is the one that a prepared loader divides. To know whether the ranks have read
the same, each pass has a checksum over parts of its samples that does not depend on their order.
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

MAX_NUMBERS_OF_SAMPLE = 16
"""So many numbers of each tensor of a sample go into the checksum."""
MAX_TENSORS = 8
"""So many tensors of a batch do."""
_LARGEST = 2**62 - 1
_AS_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""The dtype in which the bits of another one can be added up, by its size in bytes."""


class ReadPass(NamedTuple):
    """A pass over an unprepared DataLoader; equal where the same samples were read."""

    samples: int
    checksum: int


class UnpreparedLoaders:
    """Sees the batches that DataLoaders of torch deliver to this process.

    Args:
        ended: called with each pass that was read to its end.
    """

    def __init__(self, ended: Callable[[ReadPass], None]) -> None:
        self._ended = ended
        self._read: WeakKeyDictionary[Any, ReadPass] = WeakKeyDictionary()
        """Of each iterator: what it has delivered so far."""
        self.dataset_in_use: Any = None
        """The dataset of the pass that has delivered the latest batch, until that pass ends. None
        too where a sampler of the user's may have chosen a part of it for this rank."""
        self.release = watch_data_loaders(self._delivered)

    def _delivered(self, iterator: Any, dataset: Any, sampler: Any, batch: Any) -> None:
        if type(dataset).__module__.startswith("lockstep."):  # workers of a prepared loader
            return
        if batch is END_OF_PASS:
            self.dataset_in_use = None
            read = self._read.pop(iterator, None)
            if read is not None and read.samples:
                self._ended(read)
            return
        whole = type(sampler) in (SequentialSampler, RandomSampler)
        self.dataset_in_use = dataset if whole else None
        before = self._read.get(iterator, ReadPass(0, 0))
        found = checksum(batch)
        self._read[iterator] = ReadPass(
            before.samples + found.samples, (before.checksum + found.checksum) & _LARGEST
        )


def checksum(batch: Any) -> ReadPass:
    """How many samples a batch has, and a sum over the bits of some numbers of each sample.

    The number of samples is the length of the batch's first tensor; 0 where it has none on the CPU.
    """
    found = [t for t in tensors(batch) if _can_be_summed(t)][:MAX_TENSORS]
    if not found:
        return ReadPass(0, 0)
    total = 0
    for tensor in found:
        rows = tensor.detach().reshape(len(tensor), -1)
        every = max(1, rows.shape[1] // MAX_NUMBERS_OF_SAMPLE)
        some = rows[:, ::every].contiguous()
        total += int(some.view(_AS_INTEGERS[some.itemsize]).sum(dtype=torch.int64))
    return ReadPass(len(found[0]), total & _LARGEST)


def _can_be_summed(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    if tensor.device.type != "cpu" or tensor.itemsize not in _AS_INTEGERS:
        return False
    return tensor.dim() > 0 and tensor.numel() > 0
