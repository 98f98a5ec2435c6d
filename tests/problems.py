"""Small models and data for the tests, the same on every rank."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

SAMPLES, FEATURES, CLASSES = 50, 6, 4


def tensors(samples: int = SAMPLES, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Samples `(FEATURES,)` and labels."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(CLASSES, (samples,), generator=generator)
    return TensorDataset(x, y)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise from all three random streams to each sample."""

    def __init__(self, samples: int = SAMPLES, dtype: torch.dtype = torch.float64) -> None:
        self.data = tensors(samples, dtype)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        noise = torch.rand(x.shape, dtype=x.dtype) + float(np.random.rand()) + random.random()
        return x + 0.1 * noise, y


class Scale(nn.Module):
    """Multiplies by a parameter without dimensions, which cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def mlp(batch_norm: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Two layers, with or without BatchNorm between them; the same weights each time."""
    torch.manual_seed(3)
    middle = [nn.BatchNorm1d(16)] if batch_norm else []
    return nn.Sequential(nn.Linear(FEATURES, 16), *middle, nn.Tanh(), nn.Linear(16, CLASSES)).to(
        dtype
    )


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross entropy of a batch `(x, y)`."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under plain names, detached from the model."""
    plain = getattr(model, "module", model)
    return {name: value.detach().clone() for name, value in plain.state_dict().items()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference relative to each tensor's own size."""
    assert one.keys() == other.keys()
    worst = 0.0
    for name, a in one.items():
        a, b = a.double(), other[name].double()
        scale = max(float(a.abs().max()), 1e-12)
        worst = max(worst, float((a - b).abs().max()) / scale)
    return worst
