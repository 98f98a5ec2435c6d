"""Barlow-Twins style objective: the cross-correlation is taken over the gathered batch."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

TOTAL = 64


def views(step, rank, world):
    g = torch.Generator().manual_seed(step)
    base = torch.randn(TOTAL, 10, generator=g)
    base = torch.cat([base, base[:, :5] * base[:, 5:]], 1)
    v1 = base + 0.3 * torch.randn(base.shape, generator=g)
    v2 = base + 0.3 * torch.randn(base.shape, generator=g)
    n = TOTAL // world
    return v1[rank * n:(rank + 1) * n], v2[rank * n:(rank + 1) * n]


def gather(z):
    """everybody's embeddings; ours stay attached to the graph"""
    out = [torch.zeros_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(out, z.detach())
    out[dist.get_rank()] = z
    return torch.cat(out)


def barlow(z1, z2, lambd=0.02):
    z1 = (z1 - z1.mean(0)) / (z1.std(0) + 1e-4)
    z2 = (z2 - z2.mean(0)) / (z2.std(0) + 1e-4)
    c = z1.T @ z2 / len(z1)
    on = (torch.diagonal(c) - 1).pow(2).sum()
    off = c.pow(2).sum() - torch.diagonal(c).pow(2).sum()
    return on + lambd * off


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(15, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, a, b):
        return self.body(a), self.body(b)


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Embed())
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(30):
        z1, z2 = model(*views(step, rank, world))
        z1, z2 = gather(z1), gather(z2)
        loss = barlow(z1, z2)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    finish(model)


def finish(model):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.parameters()], f"{os.environ['DUMP']}.rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
