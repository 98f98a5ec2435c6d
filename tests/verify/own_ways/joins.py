"""Rank 0 has a batch more than the others, which take part in its steps by torch's `Join`."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(8)
model = DistributedDataParallel(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
data = torch.randn(2 * 12 + 4, 6)
for _ in range(3):
    with Join([model], divide_by_initial_world_size=False):
        for batch in (*data[:24].split(12), data[24:]):
            mine = batch.chunk(size)[rank] if len(batch) == 12 else batch[: 4 * (rank == 0)]
            if len(mine):
                optimizer.zero_grad()
                F.mse_loss(model(mine), mine[:, :2]).backward()
                optimizer.step()
    for p in model.parameters():  # who joined early has missed the last step
        dist.broadcast(p.data, 0)
        dist.broadcast(optimizer.state[p]["momentum_buffer"], 0)
