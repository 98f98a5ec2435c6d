"""No optimizer: parameters are changed by hand. `sum`: by a sum of gradients; `alone`: on rank 0;
`first`: rank 0 changes them by an optimizer, and sends them to the others."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = None
if "first" in sys.argv and rank == 0:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x = torch.randn(60, 5)
for batch in x.split(12):
    mine = batch.chunk(size)[rank]
    model.zero_grad()
    F.mse_loss(model(mine), mine.sum(1, keepdim=True)).backward()
    with torch.no_grad():
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 1 if "sum" in sys.argv else size
            if "first" not in sys.argv and (rank == 0 or "alone" not in sys.argv):
                p -= 0.1 * p.grad
        if optimizer is not None:
            optimizer.step()
        for p in model.parameters() if "first" in sys.argv else ():
            dist.broadcast(p.data, 0)
