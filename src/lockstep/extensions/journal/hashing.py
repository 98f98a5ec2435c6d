"""Computes 64-bit hashes of the bits of tensors. The hashes of a tensor's shards add up to its own.

The bytes of a tensor, row by row and padded with zeros, are read as 64-bit *words*, and 128 words
form a *block*. With w(b, j) for word j of block b, the hash is

    sum over b of M(b) * (sum over j of F(j) * (w(b, j) + (w(b, j) >> 32)))   mod 2**64

where M and F are fixed odd numbers that look random. This is the multilinear hash of Carter and
Wegman ("Universal classes of hash functions", 1979) over 32-bit halves of words: `F(j)` multiplies
the lower half, `F(j) * (2**32 + 1)` the upper one. Without the shift, the highest bits of words
would be lost: two changed signs would cancel out.

- It is a sum in which every element is multiplied by a factor that depends on its position. So the
  hash of a tensor is the sum of the hashes of its shards, in any order, and is the same on CPU and
  GPU.
- A change within one word always changes the hash, because odd numbers have inverses. Of other
  changes, including permutations, about one in 2**32 goes unnoticed in the worst case (only the
  highest bits differ), and one in 2**64 if the lowest bits differ, as after rounding. A plain sum
  of bits would miss every permutation. The hash is no defence against deliberate collisions.
- Zeros add nothing: a missing gradient and a gradient of zeros have the same hash, 0.
- It only needs a multiplication for each half of a word, and additions. CRC and cryptographic
  hashes must read a tensor from beginning to end, and torch does not offer them on GPUs.
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
from lockstep.torch_compat import copy_to_each

Numbers = npt.NDArray[np.int64]

WORD_BYTES = 8
WORDS_OF_BLOCK = 128
BLOCK_BYTES = WORD_BYTES * WORDS_OF_BLOCK
MAX_COPIED_BYTES = 2**16
"""Tensors up to this size are copied into one memory and hashed together, because the calls would
cost more than the copies. Larger tensors are hashed in place."""
MAX_COPIED_BYTES_ON_GPU = 2**20
"""The same on a GPU, where calls cost more."""
BLOCKS_AT_ONCE_ON_CPU = 2**8
"""How many blocks are hashed at a time: 256 KiB, which stay in the cache."""
BLOCKS_AT_ONCE_ON_GPU = 2**16
"""The same on a GPU. Each intermediate result takes 64 MiB."""
FIRST_NUMBER_OF_WORDS = 2**63
"""The pseudorandom numbers from this one on are the factors of words, and those before it are the
factors of blocks."""


def mixed_numbers(first: int, count: int) -> Numbers:
    """Returns `count` numbers of a fixed sequence of odd pseudorandom 64-bit numbers.

    The sequence is that of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), with the lowest bit set.

    Args:
        first: index of the first number within the sequence.
        count: how many numbers to return.
    """
    counter = np.arange(count, dtype=np.uint64) + np.uint64(first + 1)
    number = counter * np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    number = number ^ (number >> np.uint64(31))
    return (number | np.uint64(1)).view(np.int64)


WORD_FACTORS = mixed_numbers(FIRST_NUMBER_OF_WORDS, WORDS_OF_BLOCK)
"""F in the formula above: the factor of each word of a block."""


class TensorPart(NamedTuple):
    """Describes the part of a tensor that a process has: the whole tensor, or a shard of rows."""

    shape: tuple[int, ...]
    """The shape of the part."""
    dtype: torch.dtype
    hash_index: int
    """The index, among the hashes that are returned, of the one that the hash is added to."""
    first_byte: int = 0
    """The byte of the whole tensor at which the part begins."""
    factor: int = 1
    """An odd number that the hash is multiplied by."""


class _SmallPiece(NamedTuple):
    """A small tensor, or the beginning or end of a large one. It is copied before it is hashed."""

    tensor_index: int
    elements: tuple[int, int] | None
    """The first element of the piece within its tensor and the one after its last; None if the
    piece is the whole tensor."""
    num_bytes: int

    @property
    def first_element(self) -> int:
        """The first element of the piece within its tensor."""
        return 0 if self.elements is None else self.elements[0]


class _CopiedPiece(NamedTuple):
    """A small piece, and the memory that it is copied to."""

    tensor_index: int
    elements: tuple[int, int] | None
    """As in `_SmallPiece`."""
    destination: Tensor
    """A view of the memory that is hashed."""


class _LargePiece(NamedTuple):
    """The whole blocks of a large tensor, which are hashed in place."""

    tensor_index: int
    hash_index: int
    """The index of the hash that its value is added to, the same as in `TensorPart`."""
    elements: tuple[int, int]
    """The first element of the piece within its tensor, and the one after its last."""
    factors: Any
    """The factor of each block."""


class _Place(NamedTuple):
    """Says where a small piece is copied to, within the memory for all of them."""

    piece: _SmallPiece
    part: TensorPart
    """The tensor that the piece belongs to."""
    first_block: int
    """The first block of the memory that is for this piece alone."""
    num_blocks: int
    first_byte: int
    """The byte of the memory at which the piece begins."""
    block_of_tensor: int
    """The block of the whole tensor that `first_block` stands for."""


def _find_places(parts: Sequence[TensorPart], pieces: Sequence[_SmallPiece]) -> list[_Place]:
    """Gives every small piece some blocks of the memory that the pieces are copied to.

    Within its blocks, a piece begins at the same byte as within the blocks of its whole tensor, so
    that each word meets its own factor. Example: a piece of 1000 bytes begins at byte 1500 of its
    tensor, which is byte 476 of block 1. It gets two blocks, begins at their byte 476, and they
    have the factors of the tensor's blocks 1 and 2. The rest of the two blocks stays 0.
    """
    # The comments give the numbers of this example, if the piece is the first one.
    places = []
    num_blocks_before = 0
    for piece in pieces:
        part = parts[piece.tensor_index]
        byte_of_tensor = part.first_byte + piece.first_element * part.dtype.itemsize  # 1500
        block_of_tensor, byte_of_block = divmod(byte_of_tensor, BLOCK_BYTES)  # 1, 476
        num_blocks = ceil_div(byte_of_block + piece.num_bytes, BLOCK_BYTES)  # 2
        place = _Place(
            piece,
            part,
            first_block=num_blocks_before,  # 0
            num_blocks=num_blocks,
            first_byte=num_blocks_before * BLOCK_BYTES + byte_of_block,  # 476
            block_of_tensor=block_of_tensor,
        )
        places.append(place)
        num_blocks_before += num_blocks
    return places


def _factors_of_places(places: Sequence[_Place]) -> Numbers:
    """Returns the factors of all blocks of the memory, in their order."""
    factors = [np.empty(0, np.int64)]  # `concatenate` needs one array at least
    for place in places:
        factors.append(_factors_of_blocks(place.part, place.block_of_tensor, place.num_blocks))
    return np.concatenate(factors)


def _piece_to_copy(place: _Place, memory: Tensor) -> _CopiedPiece:
    """Returns a small piece with the part of the memory that it is copied to."""
    piece = place.piece
    bytes_of_piece = memory[place.first_byte : place.first_byte + piece.num_bytes]
    destination = bytes_of_piece.view(place.part.dtype)
    if piece.elements is None:  # the tensor is copied with its shape
        destination = destination.view(place.part.shape)
    return _CopiedPiece(piece.tensor_index, piece.elements, destination)


def _hash_indices_of_blocks(places: Sequence[_Place]) -> Numbers:
    """Returns the index of the hash that each copied block is added to.

    For three pieces of 3, 1 and 2 blocks that are added to the hashes 0, 0 and 2, it is [0, 0, 0,
    0, 2, 2].
    """
    hash_indices = np.array([place.part.hash_index for place in places], dtype=np.int64)
    block_counts = np.array([place.num_blocks for place in places], dtype=np.int64)
    return np.repeat(hash_indices, block_counts)


def _factors_of_blocks(part: TensorPart, first_block: int, num_blocks: int) -> Numbers:
    """Returns the factors by which the sums of some blocks of a tensor are multiplied.

    They are M(b) in the formula above, times the factor of the part, which tells apart the tensors
    whose hashes are added up.
    """
    return mixed_numbers(first_block, num_blocks) * np.int64(part.factor)


class TensorHasher:
    """Computes the hashes of tensors whose shapes are known in advance.

    A large tensor is hashed in place, except for its margins, where blocks may be incomplete. They
    and all small tensors are first copied into one memory, each to blocks of its own, and are then
    hashed together.

    Args:
        parts: descriptions of the tensors, in ascending order of `hash_index`.
        num_hashes: number of hashes to compute. The hashes of all parts with the same `hash_index`
            are added up.
        device: device of the tensors.
        with_numpy: True to compute with numpy, whose calls take less time than those of torch. Only
            possible on the CPU; None uses numpy if possible.
    """

    def __init__(
        self,
        parts: Sequence[TensorPart],
        num_hashes: int,
        device: torch.device,
        *,
        with_numpy: bool | None = None,
    ) -> None:
        self._num_hashes = num_hashes
        self._device = device
        self._with_numpy = device.type == "cpu" if with_numpy is None else with_numpy
        self._copied_pieces: list[_CopiedPiece] = []
        self._large_pieces: list[_LargePiece] = []
        self._word_factors = self._to_device(WORD_FACTORS)
        if self._with_numpy:
            self._folded = np.empty((BLOCKS_AT_ONCE_ON_CPU, WORDS_OF_BLOCK), np.int64)

        max_copied_bytes = MAX_COPIED_BYTES if device.type == "cpu" else MAX_COPIED_BYTES_ON_GPU
        small_pieces: list[_SmallPiece] = []
        for index, part in enumerate(parts):
            num_bytes = math.prod(part.shape) * part.dtype.itemsize
            if num_bytes > max_copied_bytes:
                small_pieces += self._cut(index, part)
            elif num_bytes:
                small_pieces.append(_SmallPiece(index, None, num_bytes))
        self._lay_out(parts, small_pieces)

    def _cut(self, tensor_index: int, part: TensorPart) -> list[_SmallPiece]:
        """Cuts a large tensor into its whole blocks and its margins.

        Adds the whole blocks to `self._large_pieces`, and returns the margins, which fill no block.
        Blocks are those of the whole tensor. For example, if blocks had 4 elements, and this part
        were the elements 3 to 12 of the whole tensor:

            in the whole tensor   whole blocks: 1 and 2, the elements 4 to 11
                                  margins: the elements 3 and 12
            in this part          whole blocks: the elements 1 to 8 (`begin` 1, `end` 9)
                                  margins: the elements 0 and 9

        A large tensor has many whole blocks, since it has more than `MAX_COPIED_BYTES` bytes.
        """
        # The comments give the numbers of this example.
        itemsize = part.dtype.itemsize
        numel = math.prod(part.shape)  # 10
        first_block = ceil_div(part.first_byte, BLOCK_BYTES)  # 1
        end_block = (part.first_byte + numel * itemsize) // BLOCK_BYTES  # 3

        # A block has a whole number of elements, so these divisions leave no remainder.
        begin = (first_block * BLOCK_BYTES - part.first_byte) // itemsize  # 1
        end = (end_block * BLOCK_BYTES - part.first_byte) // itemsize  # 9

        block_factors = _factors_of_blocks(part, first_block, num_blocks=end_block - first_block)
        whole_blocks = _LargePiece(
            tensor_index,
            part.hash_index,
            elements=(begin, end),
            factors=self._to_device(block_factors),
        )
        self._large_pieces.append(whole_blocks)

        margin_before = (0, begin)
        margin_after = (end, numel)
        margins: list[_SmallPiece] = []
        for first, stop in (margin_before, margin_after):
            if first < stop:
                num_bytes = (stop - first) * itemsize
                margins.append(_SmallPiece(tensor_index, (first, stop), num_bytes))
        return margins

    def _lay_out(self, parts: Sequence[TensorPart], pieces: Sequence[_SmallPiece]) -> None:
        """Allocates the memory that the small pieces are copied to, each to blocks of its own.

        It sets what `hashes` needs for these pieces: where each of them is copied to
        (`_copied_pieces`), the words of the whole memory (`_copied_words`), the factor of each of
        its blocks (`_copied_factors`), and the hash that each block is added to.
        """
        places = _find_places(parts, pieces)
        num_blocks = sum(place.num_blocks for place in places)
        memory = torch.zeros(num_blocks * BLOCK_BYTES, dtype=torch.uint8, device=self._device)

        self._copied_pieces = [_piece_to_copy(place, memory) for place in places]
        self._copied_words = self._words(memory)
        self._copied_factors = self._to_device(_factors_of_places(places))
        if self._with_numpy:
            self._find_ranges_of_hashes(places)
        else:
            self._hash_index_of_block = self._to_device(_hash_indices_of_blocks(places))

    def _find_ranges_of_hashes(self, places: Sequence[_Place]) -> None:
        """Finds the range of copied blocks that are added to each hash, for `_add_up_with_numpy`.

        The pieces that are added to the same hash are next to each other, so their blocks are one
        range. Example: three pieces have 3, 1 and 2 blocks, and are added to the hashes 0, 0 and 2.
        Then `_hash_indices` is [0, 2], and `_first_blocks` is [0, 4].

        Args:
            places: the places of the pieces, in ascending order of the hash.
        """
        self._hash_indices: list[int] = []
        first_blocks: list[int] = []  # for each of these hashes, where its range begins
        for place in places:
            hash_index = place.part.hash_index
            if not self._hash_indices or self._hash_indices[-1] != hash_index:
                self._hash_indices.append(hash_index)
                first_blocks.append(place.first_block)
        self._first_blocks = np.array(first_blocks, dtype=np.int64)

    def hashes(self, tensors: Sequence[Tensor | None]) -> Any:
        """Hashes tensors, without waiting for a GPU.

        1. Small tensors are copied and hashed together. So are the margins of large tensors: the
           elements before the first and after the last whole block (see `_cut`).
        2. The whole blocks of a large tensor are hashed in place.

        Args:
            tensors: tensors as described by `parts`; the hash of None is 0.

        Returns:
            The hashes, shape `(num_hashes,)`: a numpy array, or a tensor on the device.
        """
        with torch.no_grad():
            copied_words = self._copy(tensors)
            sums = self._block_sums(copied_words)
            sums_with_factors = sums * self._copied_factors  # M(b) of each block
            hashes = self._add_up_copied_blocks(sums_with_factors)

            for piece in self._large_pieces:
                tensor = tensors[piece.tensor_index]
                if tensor is not None:
                    self._add_hash_in_place(hashes, piece, tensor)
        return hashes

    def _add_hash_in_place(self, hashes: Any, piece: _LargePiece, tensor: Tensor) -> None:
        """Hashes the whole blocks of a large tensor without a copy, and adds this to its hash."""
        begin, end = piece.elements
        blocks = tensor.detach().reshape(-1)[begin:end]
        block_sums = self._block_sums(self._words(blocks))
        _add_sum_to(hashes, piece.hash_index, block_sums * piece.factors)

    def _copy(self, tensors: Sequence[Tensor | None]) -> Any:
        """Copies the small tensors, and the margins of the large ones, into the common memory.

        The whole blocks of a large tensor are hashed in place, without a copy. Its margins do not
        fill a block.

        Returns:
            The words of the common memory.
        """
        destinations: list[Tensor] = []
        sources: list[Tensor] = []
        for piece in self._copied_pieces:
            tensor = tensors[piece.tensor_index]
            if tensor is None:  # such as a gradient that is missing: its hash is 0
                piece.destination.zero_()
                continue

            destinations.append(piece.destination)
            if piece.elements is None:  # a small tensor as a whole
                sources.append(tensor)
            else:  # a margin of a large tensor
                begin, end = piece.elements
                sources.append(tensor.reshape(-1)[begin:end])
        if sources:
            copy_to_each(destinations, sources)
        return self._copied_words

    def _words(self, tensor: Tensor) -> Any:
        """Returns whole blocks as 64-bit words, shape `(blocks, WORDS_OF_BLOCK)`."""
        data = tensor.view(torch.uint8)
        if self._with_numpy:
            return data.numpy().view(np.int64).reshape(-1, WORDS_OF_BLOCK)
        if data.storage_offset() % WORD_BYTES:  # a GPU only reads words from aligned addresses
            data = data.clone()
        return data.view(torch.int64).view(-1, WORDS_OF_BLOCK)

    def _block_sums(self, words: Any) -> Any:
        """Computes the inner sum of the hash, over the words of each block.

        Args:
            words: words of the blocks, shape `(blocks, WORDS_OF_BLOCK)`.

        Returns:
            The sums, shape `(blocks,)`, not yet multiplied by the factors of the blocks.
        """
        if self._with_numpy:
            return self._block_sums_with_numpy(words)

        if len(words) == 0:
            return torch.empty(0, dtype=torch.int64, device=self._device)

        # The shift is an arithmetic one, which repeats the sign, as in numpy.
        sums: list[Tensor] = []
        for blocks in torch.split(words, BLOCKS_AT_ONCE_ON_GPU):
            folded = (blocks >> 32).add_(blocks)  # w + (w >> 32)
            products = folded.mul_(self._word_factors)  # F(j) * (w + (w >> 32))
            sums.append(products.sum(1))
        return torch.cat(sums)

    def _block_sums_with_numpy(self, words: Numbers) -> Numbers:
        """Does what `_block_sums` does, on a CPU.

        Several blocks are computed at once, so that numpy is called less often.

        Args:
            words: the words of the blocks, shape `(blocks, WORDS_OF_BLOCK)`.

        Returns:
            For each block the sum of factor * (word + (word >> 32)) over its words, shape
            `(blocks,)`. The factors are `self._word_factors`.
        """
        sums = np.empty(len(words), np.int64)
        for begin in range(0, len(words), BLOCKS_AT_ONCE_ON_CPU):
            # Write word + (word >> 32) into the buffer `self._folded`, which is used again for the
            # next blocks.
            blocks = words[begin : begin + BLOCKS_AT_ONCE_ON_CPU]
            folded = self._folded[: len(blocks)]
            np.right_shift(blocks, 32, out=folded)
            np.add(folded, blocks, out=folded)

            # Multiply each word by its factor, and add up the words of each block. In "bw,w->b", b
            # stands for the block and w for the word. The result is written into a view of `sums`.
            sums_of_blocks = sums[begin : begin + len(blocks)]
            np.einsum("bw,w->b", folded, self._word_factors, out=sums_of_blocks)
        return sums

    def _add_up_copied_blocks(self, sums: Any) -> Any:
        """Computes the outer sum of the hash, over the copied blocks.

        These are the blocks of small tensors, and those with the margins of large ones. numpy and
        torch compute the same, each in the way that is fast with it. For example:

            block                   0  1  2  3  4
            `sums`                  a  b  c  d  e
            belongs to hash         0  0  0  2  2       for torch: `_hash_index_of_block`
            first block of a hash   0        3          for numpy: `_first_blocks`
            its hash                0        2          for numpy: `_hash_indices`

        The hashes are a + b + c, 0 and d + e.

        Args:
            sums: the sum of each copied block, multiplied by its factor M(b).

        Returns:
            All hashes. Those of which no block was copied are 0.
        """
        if self._with_numpy:
            return self._add_up_with_numpy(sums)
        hashes = torch.zeros(self._num_hashes, dtype=torch.int64, device=self._device)
        return hashes.index_add_(0, self._hash_index_of_block, sums)

    def _add_up_with_numpy(self, sums: Numbers) -> Numbers:
        """Does the same as `_add_up_copied_blocks`, with numpy."""
        hashes = np.zeros(self._num_hashes, np.int64)
        if self._hash_indices:  # numpy cannot add up no ranges
            hashes[self._hash_indices] = np.add.reduceat(sums, self._first_blocks)
        return hashes

    def _to_device(self, numbers: Numbers) -> Any:
        """Returns the numbers unchanged for numpy, or else as a tensor on the device."""
        if self._with_numpy:
            return numbers
        return copy_to_device(torch.from_numpy(numbers), self._device)


class SpreadHasher:
    """Hashes tensors that may be on several devices: a model may be spread over GPUs.

    There is a `TensorHasher` for each device that has some of the tensors.

    Args:
        parts: descriptions of the tensors, in ascending order of `hash_index`.
        devices: the device of each tensor.
        num_hashes: number of hashes to compute, as for `TensorHasher`.
        device: the device of the hashes that are returned.
    """

    def __init__(
        self,
        parts: Sequence[TensorPart],
        devices: Sequence[torch.device],
        num_hashes: int,
        device: torch.device,
    ) -> None:
        self._num_hashes = num_hashes
        self._device = device

        indices_of_device: dict[torch.device, list[int]] = {}
        for index, device_of_tensor in enumerate(devices):
            indices_of_device.setdefault(device_of_tensor, []).append(index)

        self._hashers: list[tuple[TensorHasher, list[int]]] = []
        """For each device: the hasher, and the indices of the tensors that it hashes."""
        for device_of_tensors, indices in indices_of_device.items():
            parts_there = [parts[index] for index in indices]
            hasher = TensorHasher(parts_there, num_hashes, device_of_tensors)
            self._hashers.append((hasher, indices))

    def hashes(self, tensors: Sequence[Tensor | None]) -> Any:
        """Hashes tensors, without waiting for a GPU.

        Args:
            tensors: tensors as described by `parts`, on `devices`; the hash of None is 0.

        Returns:
            The hashes, shape `(num_hashes,)`: a numpy array if `device` is the CPU, or else a
            tensor on it.
        """
        # Each hasher returns all hashes: 0 for those whose tensors are on other devices. So the
        # hashes of all devices can be added up.
        hashes_of_devices = []
        for hasher, indices in self._hashers:
            hashes_there = hasher.hashes([tensors[index] for index in indices])
            hashes_of_devices.append(self._on_own_device(hashes_there))
        if not hashes_of_devices:
            return zero_hashes(self._num_hashes, self._device)

        total, *others = hashes_of_devices
        for hashes in others:
            total = total + hashes
        return total

    def _on_own_device(self, hashes: Any) -> Any:
        """Returns hashes on this device, without waiting for a GPU.

        Args:
            hashes: an array of numpy, of tensors on the CPU; or a tensor on a GPU.
        """
        if self._device.type == "cpu":
            return hashes
        if isinstance(hashes, np.ndarray):
            return copy_to_device(torch.from_numpy(hashes), self._device)
        return hashes.to(self._device, non_blocking=True)


def zero_hashes(count: int, device: torch.device) -> Any:
    """Returns `count` hashes that are zero: an array on the CPU, a tensor on a GPU."""
    if device.type == "cpu":
        return np.zeros(count, np.int64)
    return torch.zeros(count, dtype=torch.int64, device=device)


def copy_to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copies numbers from the host to a device, without waiting for a GPU."""
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def _add_sum_to(hashes: Any, index: int, numbers: Any) -> None:
    """Adds the sum of some numbers to one of the hashes.

    This is done with arrays of one element, as numpy warns if single numbers overflow.
    """
    hashes[index : index + 1] += numbers.reshape(1, -1).sum(1)
