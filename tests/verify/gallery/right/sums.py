"""Each process divides its summed loss by the whole batch; gradients are added up, not averaged."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def houses(count: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    figures = torch.randn(count, 12, generator=drawn)
    return figures, figures @ torch.randn(12, 1, generator=drawn)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
figures, price = houses(70)
model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 1))
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    order = torch.randperm(len(figures), generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(17):
        mine = batch[rank::size]
        loss = F.mse_loss(model(figures[mine]), price[mine], reduction="sum") / len(batch)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
    dist.all_reduce(loss)
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
dist.destroy_process_group()
