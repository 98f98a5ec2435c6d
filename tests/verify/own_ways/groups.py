"""DDP averages over pairs of ranks, each of which trains a model of its own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
pairs = [
    dist.new_group([n, n + 1]) if n + 1 < size else dist.new_group([n]) for n in range(0, size, 2)
]
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 2), process_group=pairs[rank // 2])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.randn(48, 6).split(8):
    mine = batch.chunk(size)[rank]
    optimizer.zero_grad()
    F.mse_loss(model(mine), mine[:, :2]).backward()
    optimizer.step()
