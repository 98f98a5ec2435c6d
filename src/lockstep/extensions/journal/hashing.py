"""64-bit hashes of the bits of tensors, which can be added up over the parts of a tensor.

The bytes of a tensor, row by row and filled up with zeros, are read as 64-bit *words*, and 128
words are a *block*. With w(b, j) for word j of block b, the hash is

    sum over b of M(b) * (sum over j of F(j) * (w(b, j) + (w(b, j) >> 32)))   mod 2**64

where M and F are fixed odd numbers that look random. This is the multilinear hash of Carter and
Wegman ("Universal classes of hash functions", 1979) over 32-bit halves of words: `F(j)` multiplies
the lower half, `F(j) * (2**32 + 1)` the upper one. Without the shift, the highest bits of words
would be lost: two changed signs would cancel out.

- It is a sum in which every element is multiplied by a number that belongs to its place. So the
  hash of a tensor is the sum of the hashes of its shards, in any order, and it is the same on CPU
  and GPU.
- A change within one word always changes it, because odd numbers have inverses. Of any other
  change, a permutation too, it misses about one in 2**32 in the worst case (only the highest bits
  differ), and one in 2**64 if lowest bits differ, as rounding makes them. A plain sum of bits would
  miss all permutations. It is not a defence against somebody who looks for collisions.
- Zeros add nothing: no gradient and a gradient of zeros have the same hash, 0.
- It takes a multiplication for each half of a word, and additions. CRC and cryptographic hashes
  have to read a tensor in one order, and torch does not offer them on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.batch.indices import ceil_div
from lockstep.distributed.torch_compat import copy_to_each

Numbers = npt.NDArray[np.int64]

WORD_BYTES = 8
WORDS_OF_BLOCK = 128
BLOCK_BYTES = WORD_BYTES * WORDS_OF_BLOCK
MAX_COPIED_BYTES = 2**16
"""Tensors of at most this size are copied side by side and hashed together, because calls cost more
than copies. Larger ones are hashed where they are."""
MAX_COPIED_BYTES_ON_GPU = 2**20
"""The same on a GPU, where calls cost more."""
BLOCKS_AT_ONCE_ON_CPU = 2**8
"""How many blocks are hashed at a time: 256 KiB, which stay in the cache."""
BLOCKS_AT_ONCE_ON_GPU = 2**16
"""On a GPU so many that each intermediate result takes 64 MiB."""
FIRST_NUMBER_OF_WORDS = 2**63
"""From here on the numbers of the generator belong to words; the first ones belong to blocks."""


def mixed_numbers(first: int, count: int) -> Numbers:
    """Returns odd 64-bit numbers that look random: number `first` and those after it.

    They are outputs of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014).
    """
    counter = np.arange(count, dtype=np.uint64) + np.uint64(first + 1)
    number = counter * np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    number = number ^ (number >> np.uint64(31))
    return (number | np.uint64(1)).view(np.int64)


WORD_FACTORS = mixed_numbers(FIRST_NUMBER_OF_WORDS, WORDS_OF_BLOCK)
"""F: the factor of each word of a block."""


class TensorPart(NamedTuple):
    """What a process has of a tensor: all of it, or a shard of its rows."""

    shape: tuple[int, ...]
    """Of the part."""
    dtype: torch.dtype
    result: int
    """The number of the result that the hash is added to."""
    first_byte: int = 0
    """The byte of the whole tensor at which the part begins."""
    factor: int = 1
    """An odd number that the hash is multiplied by."""


class _SmallPiece(NamedTuple):
    """A small tensor, or the beginning or end of a large one, which is copied to be hashed."""

    place: int
    """Number of the tensor."""
    elements: tuple[int, int] | None
    """Which elements of a large tensor; None: all."""
    num_bytes: int


class _CopiedPiece(NamedTuple):
    """Where a piece is copied to."""

    place: int
    """Number of the tensor."""
    elements: tuple[int, int] | None
    """As in `_SmallPiece`."""
    destination: Tensor
    """A view of the memory that is hashed."""


class _LargePiece(NamedTuple):
    """Whole blocks of a large tensor."""

    place: int
    """Number of the tensor."""
    result: int
    """The number of the result that their hash is added to."""
    elements: tuple[int, int]
    factors: Any
    """The factor of each block."""


class TensorHasher:
    """Computes the hashes of tensors whose shapes are known beforehand.

    Args:
        parts: what the tensors are, in the order of their results.
        num_results: how many hashes there are. Those of several parts may be added up to one.
        device: of the tensors.
        with_numpy: True to compute with numpy, whose calls take less time than those of torch; it
            is possible on the CPU only. None: if it is possible.
    """

    def __init__(
        self,
        parts: Sequence[TensorPart],
        num_results: int,
        device: torch.device,
        *,
        with_numpy: bool | None = None,
    ) -> None:
        self._num_results = num_results
        self._device = device
        self._with_numpy = device.type == "cpu" if with_numpy is None else with_numpy
        max_copied_bytes = MAX_COPIED_BYTES if device.type == "cpu" else MAX_COPIED_BYTES_ON_GPU
        self._copied: list[_CopiedPiece] = []
        self._large: list[_LargePiece] = []
        pieces: list[_SmallPiece] = []
        for place, part in enumerate(parts):
            itemsize = part.dtype.itemsize
            numel = math.prod(part.shape)
            if numel * itemsize <= max_copied_bytes:
                if numel:
                    pieces.append(_SmallPiece(place, None, numel * itemsize))
                continue
            # The blocks of the whole tensor that lie in this part as a whole.
            first_block = ceil_div(part.first_byte, BLOCK_BYTES)
            last_block = (part.first_byte + numel * itemsize) // BLOCK_BYTES
            begin = (first_block * BLOCK_BYTES - part.first_byte) // itemsize
            end = (last_block * BLOCK_BYTES - part.first_byte) // itemsize
            factors = mixed_numbers(first_block, last_block - first_block) * np.int64(part.factor)
            factors_on_device = self._to_device(factors)
            self._large.append(_LargePiece(place, part.result, (begin, end), factors_on_device))
            for elements in ((0, begin), (end, numel)):
                if elements[0] < elements[1]:
                    num_bytes = (elements[1] - elements[0]) * itemsize
                    pieces.append(_SmallPiece(place, elements, num_bytes))
        self._lay_out(parts, pieces)
        if self._with_numpy:
            self._folded = np.empty((BLOCKS_AT_ONCE_ON_CPU, WORDS_OF_BLOCK), np.int64)
        self._word_factors = self._to_device(WORD_FACTORS)

    def _lay_out(
        self,
        parts: Sequence[TensorPart],
        pieces: Sequence[_SmallPiece],
    ) -> None:
        """Gives every piece that is copied blocks of its own in one memory of zeros."""
        bounds: list[int] = []  # at which block each piece begins
        factors: list[Numbers] = [np.empty(0, np.int64)]
        bytes_before: list[int] = []  # from the begin of the piece's first block to the piece
        num_blocks = 0
        for place, elements, num_bytes in pieces:
            part = parts[place]
            skipped = 0 if elements is None else elements[0] * part.dtype.itemsize
            first_block, before = divmod(part.first_byte + skipped, BLOCK_BYTES)
            blocks_of_piece = ceil_div(before + num_bytes, BLOCK_BYTES)
            bounds.append(num_blocks)
            factors.append(mixed_numbers(first_block, blocks_of_piece) * np.int64(part.factor))
            bytes_before.append(before)
            num_blocks += blocks_of_piece
        memory = torch.zeros(num_blocks * BLOCK_BYTES, dtype=torch.uint8, device=self._device)
        self._copied_words = self._words(memory)
        self._copied_factors = self._to_device(np.concatenate(factors))
        for (place, elements, num_bytes), bound, before in zip(
            pieces, bounds, bytes_before, strict=True
        ):
            part = parts[place]
            begin = bound * BLOCK_BYTES + before
            destination = memory[begin : begin + num_bytes].view(part.dtype)
            if elements is None:
                destination = destination.view(part.shape)
            self._copied.append(_CopiedPiece(place, elements, destination))
        # Pieces of one result stand side by side, so that their blocks are added up together.
        self._results: list[int] = []
        first_blocks: list[int] = []
        for (place, _, _), bound in zip(pieces, bounds, strict=True):
            if not self._results or self._results[-1] != parts[place].result:
                self._results.append(parts[place].result)
                first_blocks.append(bound)
        self._first_blocks = np.array(first_blocks, dtype=np.int64)
        if not self._with_numpy:
            sizes = np.diff(np.append(self._first_blocks, num_blocks))
            results = np.array(self._results, dtype=np.int64)
            self._result_of_block = self._to_device(np.repeat(results, sizes))

    def hashes(self, tensors: Sequence[Tensor | None]) -> Any:
        """Returns the hashes, shape `(number of results,)`.

        Args:
            tensors: as many and of the shapes as were said; None has the hash 0.

        Returns:
            An array of numpy, or a tensor on the device, which is not waited for.
        """
        with torch.no_grad():
            self._copy(tensors)
            sums = self._block_sums(self._copied_words) * self._copied_factors
            hashes = self._add_up(sums)
            for piece in self._large:
                tensor = tensors[piece.place]
                if tensor is None:
                    continue
                begin, end = piece.elements
                blocks = tensor.detach().reshape(-1)[begin:end]
                sums_of_blocks = self._block_sums(self._words(blocks))
                products = (sums_of_blocks * piece.factors).reshape(1, -1)
                hashes[piece.result : piece.result + 1] += products.sum(1)
        return hashes

    def _copy(self, tensors: Sequence[Tensor | None]) -> None:
        """Copies small tensors, and the ends of large ones, to where they are hashed."""
        destinations: list[Tensor] = []
        sources: list[Tensor] = []
        for place, elements, destination in self._copied:
            tensor = tensors[place]
            if tensor is None:
                destination.zero_()
                continue
            destinations.append(destination)
            if elements is None:
                sources.append(tensor)
            else:
                sources.append(tensor.reshape(-1)[elements[0] : elements[1]])
        if sources:
            copy_to_each(destinations, sources)

    def _words(self, tensor: Tensor) -> Any:
        """Returns whole blocks as 64-bit words, shape `(blocks, words of a block)`."""
        data = tensor.view(torch.uint8)
        if self._with_numpy:
            return data.numpy().view(np.int64).reshape(-1, WORDS_OF_BLOCK)
        if data.storage_offset() % WORD_BYTES:  # a GPU reads words only from such addresses
            data = data.clone()
        return data.view(torch.int64).view(-1, WORDS_OF_BLOCK)

    def _block_sums(self, words: Any) -> Any:
        """Returns the sum over the words of each block, without the block's factor."""
        if self._with_numpy:
            return self._block_sums_with_numpy(words)
        sums = [torch.empty(0, dtype=torch.int64, device=self._device)]
        for blocks in torch.split(words, BLOCKS_AT_ONCE_ON_GPU):
            folded = (blocks >> 32).add_(blocks)
            sums.append(folded.mul_(self._word_factors).sum(1))
        return torch.cat(sums)

    def _block_sums_with_numpy(self, words: Numbers) -> Numbers:
        """Returns the same as `_block_sums`."""
        sums = np.empty(len(words), np.int64)
        for begin in range(0, len(words), BLOCKS_AT_ONCE_ON_CPU):
            blocks = words[begin : begin + BLOCKS_AT_ONCE_ON_CPU]
            folded = self._folded[: len(blocks)]
            np.right_shift(blocks, 32, out=folded)
            np.add(folded, blocks, out=folded)
            sums_of_blocks = sums[begin : begin + len(blocks)]
            np.einsum("bw,w->b", folded, self._word_factors, out=sums_of_blocks)
        return sums

    def _add_up(self, sums: Any) -> Any:
        """Returns the sum over the blocks of each result, of what was copied."""
        if not self._with_numpy:
            hashes = torch.zeros(self._num_results, dtype=torch.int64, device=self._device)
            return hashes.index_add_(0, self._result_of_block, sums)
        hashes_in_numpy = np.zeros(self._num_results, np.int64)
        if self._results:
            hashes_in_numpy[self._results] = np.add.reduceat(sums, self._first_blocks)
        return hashes_in_numpy

    def _to_device(self, numbers: Numbers) -> Any:
        """Returns numbers as they are for numpy, or as a tensor on the device."""
        if self._with_numpy:
            return numbers
        return copy_to_device(torch.from_numpy(numbers), self._device)


def copy_to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Returns numbers of the host on a device; a GPU is not waited for."""
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
