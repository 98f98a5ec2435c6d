"""Predicts counts with a Poisson loss, with Lockstep."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def counts(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(9)
    figures = torch.randn(count, 8, generator=drawn)
    rate = (figures @ torch.randn(8, 1, generator=drawn) * 0.3).exp()
    return TensorDataset(figures, torch.poisson(rate, generator=drawn))


world = lockstep.init(seed=0)
train = DataLoader(counts(96), batch_size=24, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
model, optimizer, train = world.prepare(model, optimizer, train)
poisson = nn.PoissonNLLLoss(reduction="mean")

for epoch in world.epochs(2):
    for figures, seen in train:
        loss = poisson(model(figures), seen)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    world.print(f"epoch {epoch}: loss {loss.item():.3f}")
