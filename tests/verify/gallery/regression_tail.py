"""Predicts prices; the data do not divide into whole batches."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 24


def houses(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    figures = torch.randn(count, 12, generator=drawn)
    price = figures @ torch.randn(12, 1, generator=drawn) + figures[:, :1] * figures[:, 1:2]
    return TensorDataset(figures, price)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = houses(63)
sampler = DistributedSampler(data, shuffle=True, seed=0)
loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler, drop_last=True)
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for figures, price in loader:
        loss = F.mse_loss(model(figures), price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
dist.destroy_process_group()
