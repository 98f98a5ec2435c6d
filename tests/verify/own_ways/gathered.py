"""By Lockstep: a loss over the codes of all ranks, `with` their gradients or without."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

world = lockstep.init(seed=0)
model = nn.Linear(6, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(63, 6)), batch_size=21)
model, optimizer, loader = world.prepare(model, optimizer, loader)
for (x,) in loader:
    codes = model(x)
    both = world.gather((codes, x[:, :4]), gradient="with" in sys.argv)
    scores = both[0] @ both[1].T + 0 * codes.sum()
    world.backward(F.cross_entropy(scores, torch.arange(len(scores))))
    optimizer.step()
    optimizer.zero_grad()
