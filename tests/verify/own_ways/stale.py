"""The optimizer has the parameters from before `fully_shard`."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if size > 1:
    fully_shard(model)
for batch in torch.randn(48, 6).split(8):
    mine = batch.chunk(size)[rank]
    F.mse_loss(model(mine), mine[:, :2]).backward()
    optimizer.step()
    model.zero_grad()
