"""Predicts a price with Lockstep, and says how well on houses it has not seen."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, random_split

import lockstep


def houses(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    figures = torch.randn(count, 12, generator=drawn)
    price = figures @ torch.randn(12, 1, generator=drawn) + figures[:, :1].square()
    return TensorDataset(figures, price)


world = lockstep.init(seed=3)
known, unseen = random_split(houses(170), [150, 20])
train = world.loader(known, batch_size=12, shuffle=True)
test = world.loader(unseen, batch_size=20)
model = nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = world.prepare(model, optimizer)

for epoch in world.epochs(2):
    for figures, price in world.progress(train):
        loss = F.huber_loss(model(figures), price)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        world.log(loss=loss)
    with torch.no_grad():
        error = world.sum(sum((model(x) - y).abs().sum() for x, y in test)) / len(unseen)
    world.print(f"epoch {epoch}: off by {error:.2f}")
