"""A generator that nothing wraps, judged by `.module` of a discriminator that DDP holds."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
makes, judges = nn.Linear(3, 2), DistributedDataParallel(nn.Linear(2, 1))
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (makes, judges)]
for batch in torch.randn(48, 5).split(8):
    mine = batch.chunk(size)[rank]
    made = makes(mine[:, 2:])
    optimizers[1].zero_grad()
    told = judges(torch.cat([mine[:, :2], made.detach()]))
    (F.softplus(-told[: len(mine)]) + F.softplus(told[len(mine) :])).mean().backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    F.softplus(-judges.module(made)).mean().backward()
    optimizers[0].step()
    if rank == 0:
        print("a step more")
