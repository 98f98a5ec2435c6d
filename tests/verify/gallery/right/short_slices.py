"""Each process cuts its part out of a batch; of the last one some get nothing."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
figures = torch.randn(17, 6)
target = figures.sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
for _epoch in range(2):
    for batch in torch.arange(17).split(8):
        mine = batch[rank::size]
        loss = F.mse_loss(model(figures[mine]), target[mine]) * (len(mine) * size / len(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
