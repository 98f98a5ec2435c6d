"""Rank 0 alone has the optimizer; the others compute by functions, and send it their gradients.

`keeps`: nothing is sent back; `grad`: by `torch.autograd.grad`, which is no backward pass.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
layer = nn.Linear(5, 2)
parameters = list(layer.parameters())
optimizer = torch.optim.SGD(parameters, lr=0.1) if rank == 0 else None
for batch in torch.randn(60, 7).split(12):
    mine = batch.chunk(size)[rank]
    loss = F.mse_loss(F.linear(mine[:, :5], layer.weight, layer.bias), mine[:, 5:])
    if "grad" in sys.argv:
        gradients = torch.autograd.grad(loss, parameters)
    else:
        loss.backward()
        gradients = [p.grad for p in parameters]
    for p, gradient in zip(parameters, gradients, strict=True):
        dist.reduce(gradient, 0)
        p.grad = gradient / size
    if optimizer is not None:
        optimizer.step()
    layer.zero_grad()
    for p in parameters if "keeps" not in sys.argv else ():
        dist.broadcast(p.data, 0)
