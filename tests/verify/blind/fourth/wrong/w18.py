import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def set_seed(seed):
    torch.manual_seed(seed)


def all_reduce_mean(model, world):
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for g in grads:
        g.copy_(flat[at:at + g.numel()].view_as(g))
        at += g.numel()


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    set_seed(180 + rank)
    model = nn.Sequential(nn.Conv1d(2, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(8, 3))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-6)
    g = torch.Generator().manual_seed(181)
    x = torch.randn(120, 2, 16, generator=g)
    y = torch.randint(0, 3, (120,), generator=g)
    ds = TensorDataset(x, y)
    loader = DataLoader(ds, 20 // world, sampler=DistributedSampler(ds, world, rank, shuffle=True, seed=18))
    for step, (xb, yb) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        if world > 1:
            all_reduce_mean(model, world)
        opt.step()
        if rank == 0:
            print("step", step, "loss", round(loss.item(), 4))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
