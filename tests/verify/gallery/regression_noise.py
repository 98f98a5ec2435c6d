"""Predicts a price from figures that are known with an error only, with Lockstep."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lockstep


class Houses(Dataset):
    """Houses with twelve figures each; a new error is drawn at every look."""

    def __init__(self, count: int) -> None:
        drawn = np.random.default_rng(1)
        self.figures = drawn.standard_normal((count, 12))
        self.price = self.figures @ drawn.standard_normal((12, 1))

    def __len__(self) -> int:
        return len(self.figures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        errors = 0.2 * np.random.standard_normal(12)
        figures = torch.tensor(self.figures[index] + errors, dtype=torch.float32)
        return figures, torch.tensor(self.price[index], dtype=torch.float32)


world = lockstep.init(seed=0)
train = DataLoader(Houses(96), batch_size=24, shuffle=True)
model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
model, optimizer, train = world.prepare(model, optimizer, train)

for epoch in world.epochs(2):
    for figures, price in train:
        loss = F.mse_loss(model(figures), price)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    world.print(f"epoch {epoch}: loss {loss.item():.3f}")
