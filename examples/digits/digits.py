"""The data and the network that both scripts share: scikit-learn's bundled digits, no download."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits as bundled_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """1 437 images to train on and 360 to test with, each `(1, 8, 8)` in 0..1."""
    digits = bundled_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    split = torch.Generator().manual_seed(0)
    train, test = random_split(TensorDataset(images, labels), [1437, 360], generator=split)
    return train, test


class Net(nn.Module):
    """Two convolutions and two linear layers, with BatchNorm, and with dropout where asked."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(64 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images)
