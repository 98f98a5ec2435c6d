"""Each process keeps the state of a part of the parameters only: ZeRO's first stage."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(4)
figures = torch.randn(48, 6)
data = TensorDataset(figures, figures.sum(1, keepdim=True))
sampler = DistributedSampler(data)
train = DataLoader(data, batch_size=12 // size, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in train:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
