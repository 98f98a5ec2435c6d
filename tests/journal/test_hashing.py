"""Hashes of tensors against a naive computation with Python's integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from lockstep.extensions.journal.hashing import (
    BLOCK_BYTES,
    WORD_BYTES,
    WORD_FACTORS,
    WORDS_OF_BLOCK,
    TensorHasher,
    TensorPart,
    mixed_numbers,
)

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


def naive_hash(tensor: Tensor, first_byte: int = 0) -> int:
    """The formula of the module, word by word."""
    rows = tensor.contiguous().reshape(-1)
    data = bytes(first_byte) + rows.view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % WORD_BYTES)
    total = 0
    for place in range(0, len(data), WORD_BYTES):
        word = int.from_bytes(data[place : place + WORD_BYTES], "little", signed=True)
        if word == 0:
            continue
        block, number = divmod(place // WORD_BYTES, WORDS_OF_BLOCK)
        (factor,) = mixed_numbers(block, 1).tolist()
        total += factor * int(WORD_FACTORS[number]) * (word + (word >> 32))
    return total % 2**64


def hasher_of(tensors: list[Tensor], with_numpy: bool) -> TensorHasher:
    parts = []
    for place, tensor in enumerate(tensors):
        parts.append(TensorPart(tuple(tensor.shape), tensor.dtype, place))
    return TensorHasher(parts, len(parts), CPU, with_numpy=with_numpy)


def hash_each(tensors: list[Tensor]) -> list[int]:
    hashes = hasher_of(tensors, with_numpy=True).hashes(tensors)
    return [number % 2**64 for number in hashes.tolist()]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("with_numpy", [True, False])
def test_hashes_are_those_of_the_formula(with_numpy: bool) -> None:
    """On a GPU torch computes them, which is tried on the CPU here."""
    tensors = [
        numbers(3, 5),
        numbers(70001, dtype=torch.bfloat16),  # hashed where it is, but for its end
        numbers(9, dtype=torch.float16),
        numbers(160, 161),
        torch.tensor(3.0),
        torch.zeros(0),
        numbers(200, 150).t(),
        numbers(2, 3, 4, 4).to(memory_format=torch.channels_last),
        numbers(4, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.arange(-5, 5),
    ]
    hasher = hasher_of(tensors, with_numpy)
    hashes = [number % 2**64 for number in hasher.hashes(tensors).tolist()]
    assert hashes == [naive_hash(tensor) for tensor in tensors]
    # Again, with what earlier calls have left in the memory.
    hasher.hashes([None] * len(tensors))
    hasher.hashes([torch.ones_like(tensor) for tensor in tensors])
    assert [number % 2**64 for number in hasher.hashes(tensors).tolist()] == hashes
    assert not hasher.hashes([None] * len(tensors)).any()
    assert not hasher.hashes([torch.zeros_like(tensor) for tensor in tensors]).any()


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 400),
    columns=st.sampled_from([1, 3, 64, 303]),
    num_shards=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_hashes_of_shards_add_up(
    rows: int, columns: int, num_shards: int, dtype: torch.dtype
) -> None:
    whole = numbers(rows, columns, dtype=dtype)
    total = 0
    first_byte = 0
    for shard in whole.chunk(num_shards):
        part = TensorPart(tuple(shard.shape), dtype, 0, first_byte)
        hasher = TensorHasher([part], 1, CPU, with_numpy=first_byte % 3 > 0)
        total += int(hasher.hashes([shard])[0])
        first_byte += shard.nbytes
    assert total % 2**64 == hash_each([whole])[0]


@pytest.mark.parametrize("with_numpy", [True, False])
def test_parts_of_one_result_are_added_up_by_their_factors(with_numpy: bool) -> None:
    tensors = [numbers(5), numbers(20000), numbers(7)]
    parts = [
        TensorPart((5,), torch.float32, 0, factor=3),
        TensorPart((20000,), torch.float32, 0, factor=5),
        TensorPart((7,), torch.float32, 1),
    ]
    hashes = TensorHasher(parts, 2, CPU, with_numpy=with_numpy).hashes(tensors)
    expected = [3 * naive_hash(tensors[0]) + 5 * naive_hash(tensors[1]), naive_hash(tensors[2])]
    assert [number % 2**64 for number in hashes.tolist()] == [e % 2**64 for e in expected]


def test_changes_of_few_bits_and_permutations_change_the_hash() -> None:
    """Each of these is missed by a plain sum of the bits, or by a sum of 64-bit words alone."""
    tensor = numbers(20000)
    original = hash_each([tensor])[0]
    found = {original}
    changed = tensor.clone()
    changed[[0, 1]] = tensor[[1, 0]]
    found.add(hash_each([changed])[0])
    changed = tensor.roll(BLOCK_BYTES // 4)  # by a block
    found.add(hash_each([changed])[0])
    for places in ([1, 3], [1, 1 + BLOCK_BYTES // 4], [0, 2], [19999, 19997]):
        changed = tensor.clone()
        changed[places] *= -1  # only the highest bits of 32-bit halves
        found.add(hash_each([changed])[0])
    for bit in range(32):
        changed = tensor.clone()
        changed.view(torch.int32)[777] ^= 1 << bit if bit < 31 else -(2**31)
        found.add(hash_each([changed])[0])
    assert len(found) == 1 + 2 + 4 + 32


def test_mixed_numbers_are_odd_and_those_of_splitmix64() -> None:
    # The first outputs of SplitMix64 with the seed 0, made odd.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [n % 2**64 for n in mixed_numbers(0, 3).tolist()] == [e | 1 for e in expected]
    assert mixed_numbers(2, 1)[0] == mixed_numbers(0, 3)[2]
