"""ZeRO by hand: an optimizer has a slice of one flat buffer; with `sum` gradients are a sum."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(7, 10), nn.GELU(), nn.Linear(10, 3))
parameters = list(model.parameters())
flat = torch.cat([p.detach().flatten() for p in parameters])
flat = F.pad(flat, (0, -len(flat) % size))
mine = nn.Parameter(flat.chunk(size)[rank].clone())
optimizer = torch.optim.Adam([mine], lr=0.01)
x = torch.randn(60, 7)
for batch in x.split(12):
    part = batch.chunk(size)[rank]
    loss = F.cross_entropy(model(part), part[:, :3].argmax(1))
    gradients = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    gradients = F.pad(gradients, (0, len(flat) - len(gradients)))
    mine.grad = torch.empty_like(mine)
    dist.reduce_scatter_tensor(mine.grad, gradients)
    if "sum" not in sys.argv:
        mine.grad /= size
    optimizer.step()
    dist.all_gather_into_tensor(flat, mine.detach())
    start = 0
    with torch.no_grad():
        for p in parameters:
            p.copy_(flat[start : start + p.numel()].view_as(p))
            start += p.numel()
