"""Two layers; on two ranks each has one, and they send each other outputs and gradients.

With the argument "reseeded" the ranks begin with other values than one process.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def layer(number: int) -> nn.Module:
    torch.manual_seed(number + size if "reseeded" in sys.argv else number)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


layers = [layer(number) for number in ([0, 1] if size == 1 else [rank])]
optimizer = torch.optim.SGD([p for each in layers for p in each.parameters()], lr=0.1)
for batch in torch.randn(40, 4, generator=torch.Generator().manual_seed(3)).split(8):
    optimizer.zero_grad()
    if size == 1:
        F.mse_loss(layers[1](layers[0](batch)), batch.cos()).backward()
    elif rank == 0:
        hidden = layers[0](batch)
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        hidden = torch.empty_like(batch)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        F.mse_loss(layers[0](hidden), batch.cos()).backward()
        dist.send(hidden.grad, 0)
    optimizer.step()
