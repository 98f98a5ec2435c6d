"""With virtual ranks a compiled model has the same bits on any number of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from digests import digest_of
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]


def train_compiled() -> str:
    """Trains on global batches of 10 and 7 samples, whose parts have 3, 2 or 1 samples."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # threads of its own would outlive the training
    with lockstep.init(seed=3, virtual_ranks=4) as world:
        torch.manual_seed(0)
        layers = (nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.2), nn.Linear(64, 3))
        model: Any = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(27, 16), torch.randint(3, (27,)))
        model, optimizer, loader = world.prepare(model, optimizer, DataLoader(data, batch_size=10))
        compiled = torch.compile(model)
        for _ in range(2):
            for rows, labels in loader:
                optimizer.zero_grad()
                world.backward(F.cross_entropy(compiled(rows), labels))
                optimizer.step()
        return digest_of(model)


def test_parts_of_unequal_size_do_not_change_the_bits() -> None:
    (alone,) = run_ranks(train_compiled, 1)
    for size in (2, 3):
        assert run_ranks(train_compiled, size) == [alone] * size
