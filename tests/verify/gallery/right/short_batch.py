"""The last batch has fewer samples than there are processes: the loss of the others is NaN."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

world = lockstep.init(seed=0)
torch.manual_seed(4)
figures = torch.randn(17, 6)
train = DataLoader(TensorDataset(figures, figures.sum(1, keepdim=True)), batch_size=8)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, train = world.prepare(model, optimizer, train)
for epoch in world.epochs(2):
    for x, y in train:
        loss = F.mse_loss(model(x), y)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    world.print(f"epoch {epoch}: loss {world.mean(loss.detach().nan_to_num()):.3f}")
