from __future__ import annotations

import pytest
import torch

from lockstep.strategies.bit_sums import CHUNK_SIZE, bit_sums

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("size", [1, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE + 5])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_a_fingerprint_is_the_sum_of_all_bits(size, dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(size, generator=generator).to(dtype)
    real = torch.view_as_real(tensor) if dtype.is_complex else tensor
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.element_size()]
    (found,) = bit_sums([tensor]).tolist()
    assert found == int(real.view(kind).to(torch.int64).sum())
    for place in (0, size // 2, size - 1):
        changed = tensor.clone()
        changed[place] = ~changed[place] if dtype is torch.bool else changed[place] + 1
        assert bit_sums([changed]).item() != found


def test_one_number_a_tensor_whatever_its_layout():
    square = torch.randn(700, 300)
    assert bit_sums([square, square.t(), torch.zeros(())]).tolist() == [
        *bit_sums([square]).tolist() * 2,
        0,
    ]
